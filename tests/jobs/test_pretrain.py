"""`pretrain`: weights and a folder are enough to go on without labels; the heads learn before the backbone does."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from tests.jobs import test_finetune
from tests.weights import made
from vit_jax import main
from vit_jax.config import files, schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.jobs import finetune, pretrain, train
from vit_jax.record import storage
from vit_jax.weights import loading, saving

pytestmark = [pytest.mark.xdist_group('test_pretrain'), pytest.mark.usefixtures('one_device', 'no_page')]
OBJECTIVES = ('dino', 'lejepa', 'mae', 'ijepa')
WORDS = ('pretrain', '--weights=vit.npz', '--data=folder:photos')
SMALL = ('--config.objective.out_dim=32', '--config.objective.hidden_dim=16', '--config.objective.bottleneck_dim=8',
         '--config.data.recipe.views.num_local=1', '--config.evals.knn.neighbors=1', '--config.evals.knn.headline=1',
         '--config.length=4 steps', '--config.batch_size=8')


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """The current folder, with weights and 21 images of three classes."""
  monkeypatch.chdir(tmp_path)
  saving.save(made.network(), 'vit.npz')
  test_finetune.fill(tmp_path / 'photos', '', each=7)
  return tmp_path / 'photos'


def configs_given(monkeypatch: pytest.MonkeyPatch, *words: str) -> schema.Config:
  """The config that a command would train."""
  given: list[schema.Config] = []
  monkeypatch.setattr(pretrain.train, 'run', lambda config, workdir, **_: given.append(config) or 75)
  assert main.run([*WORDS, *words]) == 75
  return given[0]


@pytest.mark.usefixtures('here')
@pytest.mark.parametrize('objective', OBJECTIVES)
def test_the_run_has_the_network_of_the_weights_and_the_size_of_the_data(
    objective: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  config, network = configs_given(monkeypatch, f'--objective={objective}'), made.network()
  assert 'on 16 images, evaluated on 5.' in caplog.text and "--warm_heads='10 %', for which" in caplog.text
  assert config.model == network.model and config.image_px == network.preprocess.image_px
  assert (config.batch_size, config.length, config.init_from) == (8, '300 steps', 'vit.npz')
  assert type(config.objective).__name__.lower() == objective
  assert config.optimizer.rules == (schema.PathRule('backbone/.*', frozen_until='10 %'),)
  assert list(config.evals) == ['knn', 'health']
  assert config.data.recipe.views.on == (objective in ('dino', 'lejepa'))


@pytest.mark.usefixtures('here')
def test_another_optimizer_has_no_frozen_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  assert not configs_given(monkeypatch, '--config.optimizer=lion').optimizer.rules
  assert 'evaluated on 5.' in caplog.text and '--warm_heads' not in caplog.text


@pytest.mark.usefixtures('here')
@pytest.mark.parametrize(('words', 'view'), [
    (('--config.evals=',), ''), (('--objective=dino', "--config.evals.knn.views=('teacher','student')"), 'teacher')])
def test_the_commands_at_the_end_name_the_first_evaluated_view(
    words: tuple[str, ...], view: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(pretrain.train, 'run', lambda *_, **__: 0)
  assert main.run([*WORDS, *words]) == 0
  said = capsys.readouterr().out
  assert 'vit-jax embed --weights=' in said and (f' --view={view} ' in said if view else '--view' not in said)


@pytest.mark.usefixtures('here')
def test_small_crops_follow_the_size_of_images_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
  patch = made.network().model.patch
  sides = [configs_given(monkeypatch, *words).data.recipe.views.local_px for words in (
      (f'--config.image_px={7 * patch},{7 * patch}',),
      (f'--config.image_px={7 * patch},{7 * patch}', f'--config.data.recipe.views.local_px={2 * patch}'))]
  assert sides == [3 * patch, 2 * patch]


def test_a_folder_of_one_class_has_no_neighbors_to_ask(here: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ('bee', 'cat'):
    for image in (here / name).iterdir():
      image.rename(here / 'ant' / f'{name} {image.name}')
    (here / name).rmdir()
  assert list(configs_given(monkeypatch).evals) == ['health']


@pytest.mark.usefixtures('here')
def test_what_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
  def said(*words: str) -> str:
    assert main.run([*WORDS, *words]) == 2
    return capsys.readouterr().err

  assert '--warm_heads: expected' in said('--warm_heads=soon') and '--objective: expected' in said('--objective=clip')
  assert 'config.model: expected no override, as --weights gives it' in said('--config.model=Mixer')
  assert 'Did you mean' in said('--config.optimizer.lrr=1')


def test_the_name_of_a_run_has_no_token_of_an_address() -> None:
  assert finetune.run_name('pretrain', 'https://host/a/vit.npz?token=se.cret', 'folder:photos') == 'pretrain vit photos'


def test_batch_and_length_follow_from_the_number_of_images() -> None:
  runs = [files.load(f'pretrain:examples={n}', []) for n in (0, 8, 100, 10_000, 10**9)]
  assert [(run.batch_size, run.length) for run in runs] == [
      (64, '300 steps'), (8, '300 steps'), (8, '300 steps'), (64, '3125 steps'), (64, '50000 steps')]
  with pytest.raises(UserError, match='examples: expected at least 8 training images, got 7'):
    files.load('pretrain:examples=7', [])


@pytest.mark.slow(reason='about 15 s: a run, and one in two parts')
@pytest.mark.usefixtures('here')
def test_the_heads_learn_while_the_backbone_is_frozen_and_a_stopped_run_goes_on_bit_for_bit(
    capsys: pytest.CaptureFixture[str]) -> None:
  changes = [one.removeprefix('--config.') for one in SMALL]
  found = finetune.choose_splits(finetune.open_settings(pretrain.load_config('dino', ''), 'folder:photos', changes))
  network = loading.load('vit.npz')
  config = pretrain.with_small_crops(finetune.apply(pretrain.make(network, found, 'dino', '50 %'), changes), ())
  assert train.run(config, storage.open_path('parts'), weights=network, until='50 %') == 0
  begun, half = loading.load('vit.npz', view=''), loading.load('parts', view='student')
  changed = {name for name, leaf in trees.flatten(half.params).items()
             if not np.array_equal(leaf, trees.flatten(begun.params).get(name, leaf))}
  assert not changed  # of the backbone; a run of DINO has no other parts in its weights
  words = [*WORDS, *SMALL, '--warm_heads=50 %']
  assert main.run([*words, '--workdir=parts']) == 0
  assert '  vit-jax finetune --weights=' in capsys.readouterr().out
  assert main.run([*words, '--workdir=whole']) == 0
  parts, whole = (json.loads(pathlib.Path(name, 'final.json').read_text()) for name in ('parts', 'whole'))
  assert parts['params_digest'] == whole['params_digest']
  after = trees.flatten(loading.load('whole', view='student').params)
  assert any(not np.array_equal(leaf, after[name]) for name, leaf in trees.flatten(half.params).items())
