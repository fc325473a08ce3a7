"""`vit-jax embed` and the tables of `predict`: what the files hold, resuming, and what is refused."""
from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from tests.weights import made
from vit_jax import main
from vit_jax.core import files
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate import embedding, features, store
from vit_jax.evaluate.embedding import Work
from vit_jax.inspect import many_images
from vit_jax.inspect.model import Model
from vit_jax.train.stopping import StopRequest
from vit_jax.weights import loading

pytestmark = pytest.mark.usefixtures('one_device')
NUM = 9
FORMATS = {'npz': 'x.npz', 'parquet': 'x', 'one parquet': 'x.parquet'}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
  """Weights by the name of a small network; shards of four images."""
  monkeypatch.setattr(loading, 'load', lambda where, **_: made.network(
      **{'num_classes': 0, 'class_names': ()} if 'headless' in where else {}))
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')
  monkeypatch.setattr(embedding, 'SHARD_EXAMPLES', 4)
  monkeypatch.setattr(embedding, 'SHARDS', 1)
  monkeypatch.setattr(many_images, 'BATCH', 2)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  """Nine images in three classes, and what is none."""
  rng = np.random.default_rng(0)
  for i in range(NUM):
    path = tmp_path / 'set' / 'train' / 'abc'[i % 3] / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (50, 40, 3), np.uint8)).save(path)
  (tmp_path / 'set' / 'train' / 'b' / 'bad.png').write_bytes(b'no image')
  return tmp_path / 'set'


def run(*words: object) -> int:
  weights = [] if any(str(word).startswith('--weights') for word in words) else ['--weights=vit']
  return main.run(['embed', *weights, '--config.batch_size=2', *map(str, words)])


def read(path: pathlib.Path, what: str = 'features') -> tuple[dict[str, HostArray], list[str], dict[str, Any]]:
  """Values by name, names in their order, and the info, by other readers than our own."""
  if path.suffix == '.npz':
    with np.load(path) as file:
      return dict(zip(file['name'].tolist(), file[what], strict=True)), file['name'].tolist(), json.loads(
          str(file['info']))
  pq = pytest.importorskip('pyarrow.parquet')
  table = pq.read_table(path if path.is_file() else sorted(map(str, path.glob('*.parquet'))))
  info = json.loads(table.schema.metadata[b'vit_jax']) if path.is_file() else json.loads(
      (path / 'info.json').read_text())
  names = table['name'].to_pylist()
  values = [np.asarray(row, np.float32).reshape(info['shape']) for row in table[what].to_pylist()]
  return dict(zip(names, values, strict=True)), names, info


@pytest.mark.quick('npz', 'parquet', reason='3 s each, most of it one compilation')
@pytest.mark.parametrize('format', FORMATS)
def test_every_format_holds_the_features_of_the_files_in_their_order(
    format: str, folder: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  if 'parquet' in format:
    pytest.importorskip('pyarrow')
  to = tmp_path / FORMATS[format]
  kind = [f'--format={format}'] if to.suffix == '' else []
  assert run(f'--to={to}', folder, *kind) == 0
  found, names, info = read(to)
  paths = sorted(str(path) for path in folder.rglob('?.png'))
  assert names == paths and info['num_rows'] == NUM and info['num_bad'] == 1 and info['num_examples'] == NUM + 1
  assert 'bad.png: not an image' in caplog.text and not list(tmp_path.glob('*.part'))
  expected = Model(made.network()).features(paths)
  np.testing.assert_allclose(np.stack([found[path] for path in paths]), expected, atol=2e-6)
  assert info['preprocessing']['exif_orientation'] is True and info['shape'] == [expected.shape[1]]
  block = next(store.open_complete(to).blocks())
  assert block.id[:4].tolist() == [0, 1, 2, 3][:len(block.id)] and (block.label == -1).all()


@pytest.mark.parametrize('source', ['classes', 'labels', 'splits'])
def test_every_image_of_a_folder_is_taken_or_said_to_be_left_out(
    source: str, folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture) -> None:
  (folder / 'train' / 'b' / 'bad.png').unlink()
  if source == 'splits':
    (folder / 'train' / 'c').rename(folder / 'c')
    (folder / 'test').mkdir()
    (folder / 'c').rename(folder / 'test' / 'a')
  elif source == 'labels':
    (folder / 'train' / 'labels.csv').write_text(''.join(f'{"abc"[i % 3]}/{i}.png,{"xy"[i % 2]}\n' for i in range(NUM)))
  where = folder if source == 'splits' else folder / 'train'
  assert run(f'--to={tmp_path / "x.npz"}', f'--data=folder:{where}') == 0
  said = 'only the split train is read; left out: test. Set --split to read another one.'
  assert (said in caplog.text) is (source == 'splits')
  num = 6 if source == 'splits' else NUM
  assert f'features of {num} images.' in capsys.readouterr().out and len(read(tmp_path / 'x.npz')[0]) == num


def test_a_source_has_labels_and_positions(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert run(f'--to={tmp_path / "x.npz"}', f'--data=folder:{folder}', '--split=train') == 0
  with np.load(tmp_path / 'x.npz') as found:
    info = json.loads(str(found['info']))
    assert info['class_names'] == ['a', 'b', 'c'] and info['preprocessing']['exif_orientation'] is True
    for name, label in zip(found['name'].tolist(), found['label'].tolist(), strict=True):
      assert pathlib.Path(name).parent.name == 'abc'[label]
    assert len(found['id']) == NUM and sorted({*range(10)} - {*found['id'].tolist()}) != []


@pytest.mark.parametrize(('words', 'expected'), [
    (['--what=probabilities'], lambda model, paths: jax.nn.softmax(model.logits(paths))),
    (['--what=tokens'], lambda model, paths: model.features(paths, as_grid=True)),
    (['--blocks=-1'], lambda model, paths: model.features(paths))])
def test_probabilities_tokens_and_features_of_blocks_are_those_of_the_model(
    words: list[str], expected: Callable[[Model, list[str]], HostArray], folder: pathlib.Path,
    tmp_path: pathlib.Path) -> None:
  what = words[0].removeprefix('--what=') if 'what' in words[0] else 'features'
  assert run(f'--to={tmp_path / "x.npz"}', folder, *words) == 0
  found, names, _ = read(tmp_path / 'x.npz', what)
  wanted = expected(Model(made.network()), names)
  np.testing.assert_allclose(np.stack(list(found.values())).ravel(), np.asarray(wanted).ravel(), atol=5e-6)


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> list[int]:
  """Ends the program as a kill does when a function of `embedding` is called for the `at`-th time."""
  before, calls = getattr(embedding, name), []

  def count(*args: Any, **kwargs: Any) -> Any:
    calls.append(len(calls))
    if len(calls) == at:
      raise KeyboardInterrupt
    return before(*args, **kwargs)
  monkeypatch.setattr(embedding, name, count)
  return calls


def contents(path: pathlib.Path) -> dict[str, bytes]:
  return {one.name: one.read_bytes() for one in ([path] if path.is_file() else sorted(path.iterdir()))}


@pytest.mark.quick('npz-_write_shard-3', 'parquet-_finish-1', reason='4 s each, most of it one compilation')
@pytest.mark.parametrize('name, at', [('_write_shard', 3), ('_finish', 1)])
@pytest.mark.parametrize('format', FORMATS)
def test_what_was_stopped_resumes_to_the_same_bytes(
    format: str, name: str, at: int, folder: pathlib.Path, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  if 'parquet' in format:
    pytest.importorskip('pyarrow')
  kind = [] if '.' in FORMATS[format] else [f'--format={format}']
  (tmp_path / 'whole').mkdir()
  whole, to = tmp_path / 'whole' / FORMATS[format], tmp_path / FORMATS[format]
  assert run(f'--to={whole}', folder, *kind) == 0
  with monkeypatch.context() as patch:
    interrupt(patch, name, at)
    assert run(f'--to={to}', folder, *kind) == 130
  [part] = tmp_path.glob(f'{to.name}.*.part')
  kept = {path.name: path.stat().st_mtime_ns for path in part.iterdir() if path.name.startswith('features')}
  assert len([name for name in kept if name.endswith('.done')]) == (2 if at == 3 else 3) and not to.exists()
  (part / '.vit_jax-0123456789abcdef.part').write_bytes(b'of a killed process')
  calls = interrupt(monkeypatch, '_write_shard', 99)
  assert run(f'--to={to}', folder, *kind) == 0
  assert len(calls) == (1 if at == 3 else 0) and not part.exists()
  assert contents(to) == contents(whole)


def test_a_folder_whose_last_step_was_stopped_is_completed(folder: pathlib.Path, tmp_path: pathlib.Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
  to, whole = tmp_path / 'x', tmp_path / 'whole'
  for path in (whole, to):
    assert run(f'--to={path}', folder, '--format=parquet') == 0
  plan = json.dumps(store.planned(json.loads((whole / 'info.json').read_text())))
  part = files.Unfinished(to, plan, ()).folder
  to.rename(part)  # as if it was killed before the folder was renamed
  (part / 'plan.json').write_text(plan)
  calls = interrupt(monkeypatch, '_write_shard', 1)
  assert run(f'--to={to}', folder, '--format=parquet') == 0
  assert not calls and contents(to) == contents(whole)


def test_a_signal_ends_with_status_75(folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(StopRequest, 'reason', lambda self, step: 'SIGTERM')
  assert run(f'--to={tmp_path / "x.npz"}', folder) == 75
  assert 'Stopped by SIGTERM. The same command resumes.' in caplog.text and not (tmp_path / 'x.npz').exists()


def test_processes_share_the_shards(tmp_path: pathlib.Path) -> None:
  info = {'format': store.FORMAT, 'what': 'features', 'shape': [2], 'num_examples': 10, 'per_shard': 3}
  computed: dict[int, list[range]] = {0: [], 1: []}

  def work(name: str) -> Work:
    return Work(tmp_path / name, info, store.choose(tmp_path / name, 'parquet'))

  def compute(process: int) -> Callable[[range], store.Block]:
    def one(rows: range) -> store.Block:
      computed[process].append(rows)
      block = store.Block.empty(rows, (2,))
      block.values[:] = np.asarray(rows)[:, None]
      return block
    return one

  with work('x').unfinished.open():
    pass
  embedding.write(work('x'), compute(1), share=(1, 2))  # its barriers are the order here
  embedding.write(work('x'), compute(0), share=(0, 2))
  assert computed == {0: [range(0, 3), range(6, 9)], 1: [range(3, 6), range(9, 10)]}
  embedding.write(work('y'), compute(0))
  assert contents(tmp_path / 'x') == contents(tmp_path / 'y')
  with pytest.raises(UserError, match='expected a folder that all processes share, got no features-00001-of-00004'):
    embedding.write(work('z'), compute(0), share=(0, 2))


def test_complete_files_are_kept_and_others_refused(folder: pathlib.Path, tmp_path: pathlib.Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
  to = tmp_path / 'x.npz'
  assert run(f'--to={to}', folder) == 0
  before = to.stat().st_mtime_ns
  assert run(f'--to={to}', folder) == 0 and to.stat().st_mtime_ns == before
  assert f'Already in {to}: features of 10 images.' in capsys.readouterr().out
  assert run(f'--to={to}', folder, '--what=tokens') == 2
  assert 'expected a new file or folder, got one with other content' in capsys.readouterr().err


@pytest.mark.parametrize(('words', 'said'), [
    ([], '--data: expected either a source or files, got none'),
    (['a.jpg', '--data=folder:x'], '--data: expected either a source or files, got both'),
    (['FOLDER', '--split=train'], '--split: expected --data as well'),
    (['FOLDER', '--what=tokens', '--blocks=1'], '--blocks: expected --what=features, got --what=tokens'),
    (['FOLDER', '--blocks=0'], '--blocks: expected block numbers with commas'),
    (['FOLDER', '--blocks=77'], 'blocks: expected ascending numbers from 1 to'),
    (['FOLDER', '--what=probabilities', '--weights=vit-headless'], '--what: expected features or tokens for'),
    (['FOLDER', '--format=npz'], 'expected a file with the suffix .npz, which --format=npz writes, got none'),
    (['FOLDER', '--to=x.safetensors'], '--to: expected a file that ends in .parquet, .npz, or the name of a folder'),
    (['FOLDER', '--format=array_record'], '--format: expected one of parquet, npz, got'),
    (['FOLDER', '--to=x.npz', '--format=parquet'], '--format: expected npz, the suffix of --to='),
    (['nowhere.jpg'], 'expected image files or folders of images, got no such file'),
    (['FOLDER', '--config.model.depth=3'], 'expected the network of the weights')])
def test_what_does_not_fit_is_refused(words: list[str], said: str, folder: pathlib.Path, tmp_path: pathlib.Path,
                                      capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  to = [] if any('--to' in word for word in words) else ['--to=out']
  assert run(*to, *(str(folder) if word == 'FOLDER' else word for word in words)) == 2
  assert said in capsys.readouterr().err


def test_the_model_writes_the_same_files(folder: pathlib.Path, tmp_path: pathlib.Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', str(tmp_path))
  model = Model(made.network())
  model.embed(folder, to='~/x.npz')
  found, names, _ = read(tmp_path / 'x.npz')
  np.testing.assert_allclose(np.stack(list(found.values())), model.features(names), atol=2e-6)
  with pytest.raises(UserError, match="what: expected one of features, probabilities, tokens, got 'logits'"):
    model.embed(folder, to=tmp_path / 'y.npz', what='logits')


def test_evaluations_read_the_files_in_place_of_computing(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture) -> None:
  for i in range(6):  # a test split, too
    path = folder / 'test' / 'abc'[i % 3] / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(9 + i).integers(0, 256, (50, 40, 3), np.uint8)).save(path)
  sets = {'train': tmp_path / 'train.npz', 'test': tmp_path / 'test.parquet'}
  for split, path in sets.items():
    assert run(f'--to={path}', f'--data=folder:{folder}', f'--split={split}') == 0

  def evaluate(name: str, *words: str) -> dict[str, float]:
    assert main.run(['evaluate', '--weights=vit', '--config=features', f'--config.data.source=folder:{folder}',
                     '--config.evals=knn', '--config.evals.knn.neighbors=3', '--config.evals.knn.headline=3',
                     '--config.batch_size=4', f'--workdir={tmp_path / name}', *words]) == 0
    found: dict[str, float] = json.loads((tmp_path / name / 'evaluate.json').read_text())['metrics']
    return found
  computed = evaluate('a')
  with monkeypatch.context() as patch:
    patch.setattr(features.Split, 'extract', lambda *_: pytest.fail('features were computed'))
    stored = evaluate('b', f'--embedded={sets["train"]},{sets["test"]}')
  assert stored == computed and 'Features are read from' in caplog.text
  caplog.clear()
  assert evaluate('c', f'--embedded={sets["train"]}') == computed
  assert 'expected files of vit-jax embed with the same data' in caplog.text
  assert main.run(['evaluate', '--weights=vit', f'--embedded={folder}', f'--config.data.source=folder:{folder}',
                   '--config=features', f'--workdir={tmp_path / "d"}']) == 2


@pytest.mark.parametrize('suffix', ['csv', 'parquet'])
def test_predictions_are_a_table(suffix: str, folder: pathlib.Path, tmp_path: pathlib.Path,
                                 monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  if suffix == 'parquet':
    pq = pytest.importorskip('pyarrow.parquet')
  to, words = tmp_path / f'x.{suffix}', ['predict', '--weights=vit', str(folder), '--top=2']
  with monkeypatch.context() as patch:
    interrupt(patch, '_write_shard', 2)
    assert main.run([*words, f'--to={to}']) == 130
  assert main.run([*words, f'--to={to}']) == 2  # one file is no image
  capsys.readouterr()
  assert main.run([*words, '--json']) == 2
  _, *printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  rows = list(csv.DictReader(open(to))) if suffix == 'csv' else pq.read_table(to).to_pylist()
  assert [row['file'] for row in rows] == [one['file'] for one in printed] and len(rows) == NUM + 1
  for row, one in zip(rows, printed, strict=True):
    if 'error' in one:
      assert row['error'] == one['error'] and not row['class_1'] and not row['probability_2']
      continue
    for rank, guess in enumerate(one['classes'], 1):
      assert row[f'class_{rank}'] == guess['name'] and int(row[f'label_{rank}']) == guess['label']
      assert float(row[f'probability_{rank}']) == pytest.approx(guess['probability'], abs=1e-5)
  if suffix == 'csv':
    whole = to.read_bytes()
    to.unlink()
    assert main.run([*words, f'--to={to}']) == 2 and to.read_bytes() == whole


def test_a_table_is_no_folder_of_overlays(tmp_path: pathlib.Path, folder: pathlib.Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
  for flag in ('--overlay', '--json'):
    assert main.run(['predict', '--weights=vit', str(folder), f'--to={tmp_path / "x.csv"}', flag]) == 2
    assert '--to: expected neither --overlay nor --json with a table' in capsys.readouterr().err


def test_shards_are_whole_batches_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.undo()
  assert embedding.shard_size(1_281_167, (768,), 64) == 4096
  assert embedding.shard_size(10_000, (768,), 64) == 576
  assert embedding.shard_size(5, (768,), 64) == 64
  assert embedding.shard_size(10**7, (196, 768), 64) * 196 * 768 * 4 <= embedding.SHARD_BYTES


