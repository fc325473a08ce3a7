"""`evaluate --weights`: weights of any format on a folder, with labels that are outputs of the head."""
from __future__ import annotations

import csv
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.data import images
from tests.weights import made
from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.image import decode, geometry
from vit_jax.data.source import first_label
from vit_jax.evaluate import by_class, classify
from vit_jax.jobs import evaluate as job
from vit_jax.weights import inference, loading, saving
from vit_jax.weights.hints import Reading

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')

OWN = [made.CLASSES[i].split()[0] for i in (5, 1, 2)]


@pytest.fixture(scope='module')
def here(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A folder with weights, with and without names of their classes, and pictures of three of them."""
  root = tmp_path_factory.mktemp('here')
  saving.save(made.network(), str(root / 'named.npz'))
  saving.save(made.network(class_names=()), str(root / 'nameless.npz'))
  (root / 'words.txt').write_text('\n'.join(made.CLASSES))
  for i, name in enumerate(OWN):
    (root / 'set' / 'test' / name).mkdir(parents=True)
    for k in range(3):
      image = images.random_image(10 * i + k, height=50, width=70)
      (root / 'set' / 'test' / name / f'{k}.png').write_bytes(images.encode(image))
  return root


def evaluate(root: pathlib.Path, file: str, *words: str) -> int:
  return main.run(['evaluate', f'--weights={root / file}', f'--config.data.source=folder:{root / "set"}',
                   '--config.batch_size=8', *words])


@functools.cache
def by_hand(root: pathlib.Path, mean: float = .5) -> dict[str, float]:
  """Top-1, top-5 and NLL over the folder, one picture at a time."""
  found = loading.load(str(root / 'named.npz'))
  infer = jax.jit(inference.function(found))
  ranks, nll = [], []
  for name in OWN:
    label = [line.split()[0] for line in made.CLASSES].index(name)
    for path in sorted((root / 'set' / 'test' / name).iterdir()):
      recipe = schema.Recipe(eval_resize_px=36, antialias=True, interpolation=found.preprocess.interpolation,
                             eval_geometry=found.preprocess.geometry)
      image, _ = geometry.fit(decode.decode(path.read_bytes()), recipe=recipe, image_px=(32, 32))
      normed = jnp.asarray((image[None] / 255. - mean) / .5, jnp.float32)
      logits = np.asarray(infer(inference.parameters(found), normed).logits[0], np.float64)
      ranks.append((logits > logits[label]).sum())
      nll.append(np.log(np.exp(logits - logits[label]).sum()))
  return {'top1': np.mean(np.array(ranks) < 1), 'top5': np.mean(np.array(ranks) < 5), 'nll': np.mean(nll)}


def read(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / 'evaluate.json').read_text())


@pytest.mark.parametrize(('file', 'words'), [
    ('named.npz', []), ('nameless.npz', ['--config.data.classes={root}/words.txt'])])
def test_a_folder_with_some_classes_is_measured_by_their_names(
    file: str, words: list[str], here: pathlib.Path, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  words = [word.format(root=here) for word in words]
  assert evaluate(here, file, f'--workdir={tmp_path}', *words) == 0
  wanted, found = by_hand(here), read(tmp_path)
  assert f'test (9 images): top1 {100 * wanted["top1"]:.2f} %  top5 ' in capsys.readouterr().out
  assert found['num_examples'] == 9 and set(found) >= {'top1', 'top5', 'num_examples', 'metrics'}
  for name, value in wanted.items():
    assert found['metrics'][f'test/{name}'] == pytest.approx(value, abs=1e-4)
  assert (found['top1'], found['top5']) == pytest.approx((wanted['top1'], wanted['top5']))
  assert json.loads((tmp_path / 'weights.json').read_text())['family'] == 'vision_transformer'
  config = json.loads((tmp_path / 'config.json').read_text())
  assert found['preprocessing'] == {
      'geometry': 'torchvision', 'resize_px': 36, 'image_px': [32, 32], 'interpolation': 'bicubic', 'antialias': True,
      'truncate': False, 'mean': [.5] * 3, 'std': [.5] * 3, 'exif_orientation': True}
  assert config['data']['recipe']['eval_resize_px'] == 36 and config['model']['width'] == 32


def test_several_labels_an_image_have_average_precision_area_and_f1(
    here: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  lines = [f'test/{name}/{k}.png,{",".join(dict.fromkeys([name, OWN[k]]))}' for name in OWN for k in range(3)]
  folder = tmp_path / 'several'
  shutil.copytree(here / 'set', folder)
  (folder / 'labels_test.csv').write_text('\n'.join(lines))
  assert main.run(['evaluate', f'--weights={here / "named.npz"}', f'--config.data.source=folder:{folder}',
                   '--config.data.max_labels=2', '--config.batch_size=8', f'--workdir={tmp_path / "out"}']) == 0
  metrics = read(tmp_path / 'out')['metrics']
  network = vit_jax.load(str(here / 'named.npz'))
  logits = network.logits([str(folder / line.split(',')[0]) for line in lines])
  names = [line.split()[0] for line in made.CLASSES]
  target = np.array([[name in line.split(',')[1:] for name in names] for line in lines])
  want = classify.measure_classes(np.asarray(logits), target)
  assert {f'test/{name}' for name in want} <= set(metrics)
  assert {name: metrics[f'test/{name}'] for name in want} == pytest.approx(want)
  assert f'map {100 * want["map"]:.2f} %  auroc {100 * want["auroc"]:.2f} %' in capsys.readouterr().out


def test_what_learns_from_features_goes_by_the_classes_of_the_folder(here: pathlib.Path,
                                                                     tmp_path: pathlib.Path) -> None:
  words = ['--config.evals=test,knn', '--config.data.train_split=test[1:]', '--config.evals.knn.neighbors=1,3',
           '--config.evals.knn.headline=1']
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path}', *words) == 0
  found = read(tmp_path)
  assert found['metrics']['test/top1'] == pytest.approx(by_hand(here)['top1']) and found['metric'] == 'top1'
  assert found['metrics']['knn/top1_k1'] >= 8 / 9  # all but the first are their own neighbors


@pytest.mark.slow(reason='2 s: evaluates four times')
def test_preprocessing_is_that_of_the_weights_unless_a_person_says_otherwise(
    here: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path / "a"}', '--config.data.recipe.mean=.3,.3,.3') == 0
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path / "b"}', '--preprocess=zero_one') == 0
  nll = [read(tmp_path / name)['metrics']['test/nll'] for name in 'ab']
  assert nll[0] == pytest.approx(by_hand(here, mean=.3)['nll'], abs=1e-4) and nll[1] != nll[0]


@pytest.mark.slow(reason='1.5 s: evaluates twice')
def test_another_evaluation_in_a_directory_replaces_the_first_and_is_no_run_that_goes_on(
    here: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level('INFO')
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path}') == 0 and 'earlier evaluation' not in caplog.text
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path}', '--config.data.recipe.mean=.3,.3,.3') == 0
  assert f'{tmp_path} has the results of an earlier evaluation, which are replaced.' in caplog.text
  assert 'These settings differ' not in caplog.text
  assert json.loads((tmp_path / 'config.json').read_text())['data']['recipe']['mean'] == [.3, .3, .3]


def test_images_of_another_size_get_resized_positions_and_the_same_part_of_the_image(
    here: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path}', '--config.image_px=40,24') == 0
  how = read(tmp_path)['preprocessing']
  assert (how['image_px'], how['resize_px']) == ([40, 24], 40)  # 36 * 24 / 32 is 27, which 40 px do not fit in
  lines = json.loads((tmp_path / 'weights.json').read_text())['tensors']
  rules = {line['name']: line['rule'] for line in lines if line['what'] == 'resized'}
  assert rules == {'backbone/positions': '4 x 4 to 5 x 3 tokens, aligned'}


def test_without_a_workdir_results_go_where_they_say(here: pathlib.Path, tmp_path: pathlib.Path,
                                                     monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.chdir(tmp_path)
  assert evaluate(here, 'named.npz') == 0
  folder = tmp_path / 'runs' / 'evaluate' / 'named.npz'
  assert f'Written to {folder}/evaluate.json\nReport: {folder}/report.html' in capsys.readouterr().out
  first = (folder / 'evaluate.json').read_bytes()
  own, moved = made.network(), shutil.copytree(here, tmp_path / 'moved')
  head = {**own.params['head'], 'bias': own.params['head']['bias'] + 1}
  (tmp_path / 'others').mkdir()
  saving.save(own._replace(params={**own.params, 'head': head}), str(tmp_path / 'others' / 'named.npz'))
  for root, file, got in ((here, f'{tmp_path}/others/named.npz', 'other weights'),
                          (moved, 'named.npz', 'other data (folder:')):
    assert evaluate(root, file) == 2 and (folder / 'evaluate.json').read_bytes() == first
    said = f'--workdir={folder}: expected a new directory, or results of these weights and data, got those of {got}'
    assert said in capsys.readouterr().err
  assert evaluate(moved, 'named.npz', '--overwrite') == 0 and evaluate(moved, 'named.npz') == 0


def test_results_of_a_person_are_not_replaced(here: pathlib.Path, tmp_path: pathlib.Path,
                                              monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / 'runs' / 'evaluate' / 'named.npz'
  folder.mkdir(parents=True)
  (folder / 'evaluate.json').write_text('mine')
  assert evaluate(here, 'named.npz', '--overwrite') == 2 and (folder / 'evaluate.json').read_text() == 'mine'
  assert 'got one with another evaluate.json' in capsys.readouterr().err


@pytest.mark.parametrize(('file', 'words', 'says'), [
    ('nameless.npz', [], 'expected the 3 classes of the data, got 7. Set --config.data.classes=FILE, with a line for '
     'each output, in their order, such as "n01440764 tench". For weights with other classes than the data, '
     '--config.evals=knn,fewshot'),
    ('named.npz', ['--config.model.depth=3'], 'config.model.depth: expected the network of the weights'),
    ('named.npz', ['--config.data.classes=no.txt'], 'data.classes=no.txt: expected a text file'),
    ('named.npz', ['--embedded=/nowhere'], '/nowhere: expected the output of vit-jax embed'),  # not read by the top-1
    ('named.npz', ['--view=ema'], "--view: expected none for a file with one network, got 'ema'. Leave it out."),
    ('headless.npz', [], 'expected weights with a classification head')])
def test_what_cannot_be_measured_is_said_and_leaves_nothing(
    file: str, words: list[str], says: str, here: pathlib.Path, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  if file == 'headless.npz' and not (here / file).exists():
    saving.save(made.network(num_classes=0, class_names=()), str(here / file))
  assert evaluate(here, file, f'--workdir={tmp_path / "w"}', *words) == 2
  assert says in capsys.readouterr().err and not (tmp_path / 'w').exists()


NAMED = [f'kind_{i}' for i in range(12)]


def nameless(root: pathlib.Path, names: list[str], class_names: tuple[str, ...] = ()) -> tuple[int, dict]:
  """Evaluates weights with twelve outputs on a picture for each, whose classes have these names."""
  weights = root / 'twelve.npz'
  root.mkdir(exist_ok=True)
  saving.save(made.network(num_classes=12, class_names=class_names), str(weights))
  for i, name in enumerate(names):
    (root / 'set' / 'test' / name).mkdir(parents=True)
    (root / 'set' / 'test' / name / 'x.png').write_bytes(images.encode(images.random_image(i)))
  status = main.run(['evaluate', f'--weights={weights}', f'--config.data.source=folder:{root / "set"}',
                     '--config.batch_size=12', f'--workdir={root / "out"}'])
  return status, read(root / 'out')['metrics'] if not status else {}


@pytest.fixture(scope='module')
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict:
  """The metrics of named weights on folders of these names."""
  return nameless(tmp_path_factory.mktemp('named'), NAMED, tuple(NAMED))[1]


@pytest.mark.parametrize(('form', 'class_names'), [('{}', ()), ('{:03}', ()), ('{}', tuple(NAMED))],
                         ids=['numbers', 'padded', 'of named outputs'])
def test_folders_with_the_numbers_of_the_outputs_are_these_outputs(
    form: str, class_names: tuple[str, ...], by_name: dict, tmp_path: pathlib.Path) -> None:
  status, found = nameless(tmp_path, [form.format(i) for i in range(12)], class_names)
  # The sum of the 12 losses has another order, as the files have.
  assert status == 0 and found == pytest.approx(by_name, rel=12 * 2**-24)


@pytest.mark.parametrize('names', [NAMED, [str(i) for i in range(1, 13)], [f'c{i}' for i in range(12)]],
                         ids=['names', 'from one', 'names that end with numbers'])
def test_an_order_of_classes_that_would_be_a_guess_is_refused(
    names: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert nameless(tmp_path, names)[0] == 2
  assert ('expected weights that name their classes, or data that say which class is which output, got neither: the '
          'classes of the data are sorted by name, ') in (text := capsys.readouterr().err)
  assert 'Set --config.data.classes=FILE, with a line for each output, in their order, such as' in text
  (tmp_path / 'classes.txt').write_text('\n'.join(names))
  assert main.run(['evaluate', f'--weights={tmp_path / "twelve.npz"}', f'--config.data.source=folder:{tmp_path}/set',
                   '--config.batch_size=12', f'--workdir={tmp_path / "out"}',
                   f'--config.data.classes={tmp_path / "classes.txt"}']) == 0


def test_a_run_of_its_own_is_not_written_over(here: pathlib.Path, tmp_path: pathlib.Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'checkpoints').mkdir()
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path}') == 2
  assert '--workdir: expected a directory without a run' in capsys.readouterr().err


def test_evaluate_needs_a_run_or_weights_and_reads_flags_of_weights_for_weights_only(
    here: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['evaluate']) == 2
  assert '--workdir: expected the directory of a run, got none. Set --workdir=DIR or --we' in capsys.readouterr().err
  with pytest.raises(UserError, match='--weights: expected weights for --preprocess, --model and --view, got none'):
    job.run(None, here, reading=Reading('half'), source='', overridden=())


def test_folders_with_wordnet_ids_are_outputs_of_imagenet(tmp_path: pathlib.Path,
                                                          caplog: pytest.LogCaptureFixture) -> None:
  ids = {'n01440764': 0, 'n02123045': 281, 'n15075141': 999}
  for name in ids:
    (tmp_path / name).mkdir()
    for k in range(2):
      (tmp_path / name / f'{k}.png').touch()
  found, data = made.network(num_classes=1_000, class_names=()), schema.Data(source=f'folder:{tmp_path}', holdout=.5)
  config = schema.Config(data=data, evals={'test': schema.TopK()})
  with caplog.at_level('INFO'):
    opened = job.open_labeled(config, found).eval
  assert {pathlib.Path(opened.describe(i)).parent.name: first_label(opened, i) for i in range(3)} == ids
  assert '3 classes of the data are WordNet ids, and are evaluated as outputs of the 1,000 classes of Im' in caplog.text
  (tmp_path / 'n01440764').rename(tmp_path / 'n99999999')
  with pytest.raises(UserError, match=r'expected classes of ImageNet-1k, got 1 of 3 that are not there: n99999999\.'):
    job.open_labeled(config, found)


def test_a_projection_is_no_head_of_classes() -> None:
  config, found = schema.Config(evals={'val': schema.TopK()}), made.network(head=schema.Head(bias=False))
  with pytest.raises(UserError, match='a classification head, got a projection to 7 numbers. Use weights that were'):
    job.check_head(found, config, where='clip')
  with pytest.raises(UserError, match='a classification head, got weights without one'):
    job.check_head(made.network(num_classes=0), config, where='clip')
  job.check_head(found._replace(family='run'), config, where='a run of its own')
  job.check_head(found, schema.Config(evals={'knn': schema.Knn()}), where='clip')


def test_precision_and_recall_of_each_class_are_printed_and_written_on_request(
    here: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path}', '--by_class', f'--csv={tmp_path / "t.csv"}') == 0
  with np.load(tmp_path / 'predictions.npz') as saved:
    label, predicted, names = saved['label'], saved['top'][:, 0], saved['class_names']
  table = list(csv.reader((tmp_path / 't.csv').read_text().splitlines()))
  assert table[0] == [*by_class.COLUMNS] and [int(row[1]) for row in table[1:]] == sorted({*label, *predicted})
  for row in table[1:]:
    one, right = int(row[1]), ((label == predicted) & (label == int(row[1]))).sum()
    assert row[0] == names[one] and [int(cell) for cell in row[5:]] == [(label == one).sum(), (predicted == one).sum()]
    assert float(row[3]) == right / max((label == one).sum(), 1)
  out = capsys.readouterr().out
  assert 'By class (test):\nclass ' in out and '\nmacro mean ' in out and out.count('Written to') == 2


@pytest.mark.parametrize(('words', 'says'), [
    (['--by_class', '--config.evals=knn'], '--by_class: expected a first evaluation that predicts a class for each '
     'image, such as topk, got knn. Set --config.evals=topk.'),
    (['--csv=t.txt'], '--csv: expected FILE.csv in a folder that exists, got /'),
    (['--csv=no/t.csv'], '/no/t.csv. Choose another path.'),
    (['--csv=t.csv', '--config.data.max_labels=2'], '/t.csv: expected images with one class each, got folder:'),
    (['--by_class', '--config=report_card'], '--by_class: expected one of --weights and another config than')])
def test_a_table_of_classes_that_cannot_be_made_is_refused_before_the_evaluation(
    words: list[str], says: str, here: pathlib.Path, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  assert evaluate(here, 'named.npz', f'--workdir={tmp_path / "w"}', *words) == 2
  assert says in capsys.readouterr().err and not (tmp_path / 'w').exists()
