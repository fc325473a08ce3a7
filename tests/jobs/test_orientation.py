"""A run records whether it turns images by their EXIF orientation; everything that uses its weights does the same."""
from __future__ import annotations

import dataclasses
import io
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

import vit_jax
from configs import cifar10
from tests.data import images
from tests.weights import made
from vit_jax import main
from vit_jax.config import engine, schema
from vit_jax.config.schema import Exif
from vit_jax.data.image import decode, headers
from vit_jax.inspect.model import Model
from vit_jax.jobs import build, frozen_features, predict, resume, serve, train
from vit_jax.parallel import layout
from vit_jax.weights import loading, saving
from vit_jax.weights.hints import Reading

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')
RECORDS = {'turned': True, 'as stored': False, 'none': None}
PHOTO = headers.write_orientation(images.encode(images.random_image(3, height=40, width=64), '.jpg'), 6)


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Runs with each record, the same weights as files, and rotated photos in a folder and as shards of it."""
  found = tmp_path_factory.mktemp('recorded')
  for name, exif in RECORDS.items():
    weights = made.network(preprocess=made.HOW._replace(exif_orientation=exif))
    saving.save(weights, str(found / name), family='run')
    saving.save(weights, str(found / f'{name}.npz'))
  for number in range(4):
    path = found / 'photos' / 'test' / made.CLASSES[number % 2].split()[0] / f'{number}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PHOTO)
  return found


def prepared(weights: str) -> list[np.ndarray]:
  """The photo as weights get it by their own door: a path, bytes, a PIL image and an upload."""
  network = Model(loading.load(weights))
  return [network.prepare(PHOTO), network.prepare(Image.open(io.BytesIO(PHOTO))),
          network.prepare(serve.decode(PHOTO, network.decoding))]


@pytest.mark.parametrize('form', ['{}', '{}.npz'])
@pytest.mark.parametrize('name', RECORDS)
def test_named_files_are_turned_as_the_run_records(name: str, form: str, root: pathlib.Path) -> None:
  upright = RECORDS[name] is not False
  weights = str(root / form.format(name))
  assert loading.load(weights).preprocess.exif_orientation is RECORDS[name]
  wanted = Model(made.network()).prepare(decode.decode(PHOTO, headers.DecodeOptions(upright=upright)))
  for found in prepared(weights):
    np.testing.assert_array_equal(found, wanted)
  said = predict.describe(predict.load(weights, Reading()))['preprocessing']
  assert isinstance(said, dict) and said['exif_orientation'] is upright
  words = {True: 'EXIF orientation applied (', False: 'EXIF orientation ignored (',
           None: 'EXIF orientation applied to folders and named files ('}
  assert words[RECORDS[name]] in loading.text(loading.load(weights))


@pytest.mark.parametrize(('name', 'words', 'upright'), [
    ('turned', [], True), ('as stored', [], False), ('none', [], True),
    ('as stored', ['--preprocess=exif=true'], True),
    ('turned', ['--config.data.recipe.exif_orientation=false'], False)])
def test_an_evaluation_turns_images_as_the_run_records(
    name: str, words: list[str], upright: bool, root: pathlib.Path, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['evaluate', f'--weights={root / name}', f'--config.data.source=folder:{root / "photos"}',
                   '--config.batch_size=8', f'--workdir={tmp_path}', *words]) == 0
  assert json.loads((tmp_path / 'evaluate.json').read_text())['preprocessing']['exif_orientation'] is upright
  line = 'Images are rotated by their EXIF orientation.' if upright else 'The EXIF orientation of images is ignored.'
  assert line in capsys.readouterr().out


def test_embedded_folders_and_named_files_have_the_features_of_the_run(
    root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  found = []
  for number, words in enumerate(([f'--data=folder:{root / "photos"}', '--split=test'], [str(root / 'photos')])):
    to = tmp_path / f'{number}.npz'
    assert main.run(['embed', f'--weights={root / "as stored"}', f'--to={to}', '--config.batch_size=4', *words]) == 0
    with np.load(to) as content:
      assert json.loads(str(content['info']))['preprocessing']['exif_orientation'] is False
      found.append(content['features'])
  np.testing.assert_array_equal(*found)
  wanted = vit_jax.load(str(root / 'as stored')).features(PHOTO)
  np.testing.assert_allclose(found[0], np.repeat(wanted, 4, 0), atol=2e-6)


@pytest.mark.parametrize(('given', 'recorded', 'expected'), [
    (Exif.AUTO, Exif.FALSE, Exif.FALSE), (Exif.AUTO, Exif.TRUE, Exif.TRUE), (Exif.TRUE, Exif.FALSE, Exif.TRUE)])
def test_a_run_that_resumes_keeps_what_it_recorded(
    given: Exif, recorded: Exif, expected: Exif, tmp_path: pathlib.Path) -> None:
  config = schema.Config(data=schema.Data(source='folder:photos', recipe=schema.Recipe(exif_orientation=given)))
  before = dataclasses.replace(config, data=dataclasses.replace(
      config.data, recipe=schema.Recipe(exif_orientation=recorded)))
  assert resume.keep_orientation(config, tmp_path) is config
  (tmp_path / 'config.json').write_text(engine.to_json(before))
  assert f'"exif_orientation": {str(recorded.value).lower()}' in (tmp_path / 'config.json').read_text()
  assert resume.keep_orientation(config, tmp_path).data.recipe.exif_orientation is expected


@pytest.mark.parametrize(('recorded', 'expected'), [(None, Exif.AUTO), (Exif.FALSE, Exif.FALSE)])
def test_a_run_on_a_folder_records_that_it_turns_images_unless_it_began_otherwise(
    recorded: Exif | None, expected: Exif, root: pathlib.Path, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  class Begun(Exception):
    """Ends a run before its network is built."""

  def begin(config: schema.Config, *_: object) -> None:
    assert config.data.recipe.exif_orientation is expected
    found = build.with_statistics(config, build.open_data(config).train)
    assert found.data.recipe.upright is (recorded is not Exif.FALSE)
    raise Begun
  monkeypatch.setattr(train, 'Run', begin)
  if recorded is not None:
    (tmp_path / 'config.json').write_text(engine.to_json(schema.Config(
        data=schema.Data(recipe=schema.Recipe(exif_orientation=recorded)))))
  config = cifar10.get_config(f'source=folder:{root / "photos"}')
  config.data.train_split = 'test'
  with pytest.raises(Begun):
    train.run(config, tmp_path)


@pytest.mark.parametrize(('form', 'words', 'patch'), [
    ('run', [], 8), ('file.npz', [], 8), ('run', ['--config.data.recipe.eval_native_patch=0'], 0)])
def test_a_run_at_the_own_aspect_of_images_is_evaluated_so_by_its_weights(
    form: str, words: list[str], patch: int, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  weights = made.network(preprocess=made.HOW._replace(native_patch=8, resize_px=0))
  saving.save(weights, str(tmp_path / form), **({'family': 'run'} if form == 'run' else {}))
  assert main.run(['evaluate', f'--weights={tmp_path / form}', f'--config.data.source=folder:{root / "photos"}',
                   '--config.batch_size=8', f'--workdir={tmp_path / "results"}', *words]) == 0
  found = json.loads((tmp_path / 'results' / 'evaluate.json').read_text())
  assert found['preprocessing'].get('native_patch', 0) == patch
  loaded = loading.load(str(tmp_path / form))
  assert 'at their own aspect in patches of 8 px' in loading.text(loaded)
  assert Model(loaded).prepare(PHOTO).shape == (32, 32, 3)


@pytest.mark.parametrize('recorded', [None, False])
def test_features_without_fine_tuning_are_of_images_turned_as_by_the_weights(
    recorded: bool | None, root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  class Begun(Exception):
    """Ends the comparison before anything is computed."""

  def begin(config: schema.Config, *_: object, **__: object) -> None:
    assert config.data.recipe.exif_orientation is Exif(recorded is None)
    raise Begun
  monkeypatch.setattr(build, 'resources', begin)
  data = schema.Data(source=f'folder:{root / "photos"}', train_split='test', eval_split='test')
  weights = made.network(preprocess=made.HOW._replace(exif_orientation=recorded))
  config = schema.Config(data=data, batch_size=8)
  with pytest.raises(Begun):
    frozen_features._compare(tmp_path, config, build.open_data(config), weights)


def test_what_a_run_decided_is_no_change_of_auto() -> None:
  """As for a study, which continues runs that paused and configures them by `auto`."""
  auto, applied, ignored = (layout.put(schema.Config(), {'data.recipe.exif_orientation': value})
                            for value in (schema.Exif.AUTO, schema.Exif.TRUE, schema.Exif.FALSE))
  assert resume.changes(engine.to_plain(ignored), auto) == resume.changes(engine.to_plain(auto), applied) == []
  assert resume.changes(engine.to_plain(ignored), applied) == ['  data.recipe.exif_orientation: False -> True']
  older = engine.to_plain(ignored)
  older['optimizer']['layer_groups'] = 'mae'  # a setting of earlier versions
  assert resume.changes(older, ignored) == []
