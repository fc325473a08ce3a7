"""Segmentation of frozen tokens against scikit-learn and NumPy, on any mesh; in evaluations of weights and of runs."""
from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import programs
import pytest
import single
from PIL import Image

from tests.evaluate import masked, rows
from tests.weights import made
from vit_jax import main
from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree
from vit_jax.data import opening, workers
from vit_jax.data.image.masks import MaskedImages, MaskValues
from vit_jax.evaluate import pixels, segmentation
from vit_jax.evaluate.segmentation import Draw, Tokens
from vit_jax.weights import saving

PX, GRID = (16, 24), (4, 6)
L2 = 2e-3


def patch_means(selected: PyTree, image: Array) -> Array:
  """Tokens with two channels more than colors, which are their squares: `[B, N * 6]`."""
  means = image.reshape(len(image), GRID[0], 4, GRID[1], 4, 3).mean((2, 4))
  return jax.numpy.concatenate([means, means**2], -1).reshape(len(image), -1) * selected['backbone']['scale']


def prepare(batch: dict[str, Array], key: Array, step: Array) -> dict[str, Array]:
  del key, step
  return batch | {'image': batch['image'] / 255.}


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return masked.write(tmp_path_factory.mktemp('masked'), train=9, test=5)


def images(root: pathlib.Path, split: str, **settings: int) -> MaskedImages:
  source = opening.open_split(schema.Data(source=f'masks:{root}'), split, image_px=PX)
  return MaskedImages(source, schema.Recipe(), PX, settings.get('resize_px', 0), settings.get('stride_px', 0), GRID,
                      MaskValues(0, 255, 3))


def tokens(root: pathlib.Path, split: str, mesh: str, **settings: int) -> Tokens:
  return Tokens(patch_means, prepare, images(root, split, **settings), batch_size=4,  # type: ignore[arg-type]
                mesh=programs.mesh(rows.MESHES[mesh]), threads=2, name=f'evals.dense ({split})', bar=False)


def evaluator(root: pathlib.Path, mesh: str = 'one', **settings: Any) -> segmentation.Segmentation:
  own = schema.Segmentation(**{'l2': (L2,), 'neighbors': (3,), 'temperature': .1, 'max_steps': 100} | settings)
  geometry = {name: settings[name] for name in ('resize_px', 'stride_px') if name in settings}
  return segmentation.Segmentation(
      tokens(root, 'train', mesh, **geometry), tokens(root, 'test', mesh, **geometry), settings=own,
      class_names=masked.NAMES, protocol=segmentation.describe(own, 'b2', images(root, 'test', **geometry)))


@functools.cache
def by_hand(root: pathlib.Path) -> dict[str, np.ndarray]:
  """Confusion matrices of scikit-learn's optimum and of k-NN in NumPy, with whole images."""
  from sklearn.linear_model import LogisticRegression

  def read(split: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    each = map(images(root, split), range({'train': 9, 'test': 5}[split]))
    return [(np.asarray(patch_means(rows.weights(), e['windows'] / np.float32(255.))).reshape(24, 6), e['tokens'][0],
             e['mask']) for e in each]
  train = read('train')
  x, y = np.concatenate([one[0] for one in train]).astype(np.float64), np.concatenate([one[1].ravel() for one in train])
  assert (y >= 0).all()
  mean, std = x.mean(0), x.std(0) + 1e-5
  best = LogisticRegression(C=1 / (L2 * len(x)), tol=1e-9, max_iter=10_000).fit((x - mean) / std, y)
  unit = x / np.linalg.norm(x, axis=1, keepdims=True)
  found = {'linear': np.zeros((3, 3), int), 'knn': np.zeros((3, 3), int)}
  for token, _, mask in read('test'):
    similarity = token / np.linalg.norm(token, axis=1, keepdims=True) @ unit.T
    near = np.argsort(-similarity, 1)[:, :3]
    weight = np.exp(np.take_along_axis(similarity, near, 1) / .1)
    votes = np.stack([(weight * (y[near] == c)).sum(1) for c in range(3)], 1) / weight.sum(1, keepdims=True)
    for name, scores in (('linear', best.decision_function((token - mean) / std)), ('knn', votes)):
      resized = np.asarray(jax.image.resize(scores.reshape(*GRID, 3), (*mask.shape, 3), 'bilinear', antialias=False))
      best_two = np.sort(resized[mask >= 0], -1)[:, -2:]
      assert name == 'knn' or np.diff(best_two).min() > 1e-3  # beyond what the tolerances of the solvers change
      found[name] += pixels.count(mask, np.round(resized * 2**16).argmax(-1), 3)
  return found


@pytest.mark.quick('one', reason='4 s: compiles the solver for another mesh')
@pytest.mark.parametrize('mesh', ['one', 'data=2'])
def test_scores_are_those_of_scikit_learn_and_numpy(root: pathlib.Path, mesh: str) -> None:
  result = evaluator(root, mesh).measure(rows.weights())
  for name, method in (('linear', f'linear.l2_{L2:g}'), ('knn', 'knn3.t0.1')):
    want = pixels.scores(by_hand(root)[name])
    where = f'{method}.b2.norm.16x24'
    found = [result.metrics[f'{kind}.{where}'] for kind in ('miou', 'accuracy')]
    # A few of 9,208 pixels have votes of two classes that are equal but for rounding.
    assert found == pytest.approx([want.miou, want.accuracy], abs=1e-3)
    assert .5 < found[0] < 1.
    iou = [result.metrics[f'iou.{where}.class_{label}'] for label in ('red', 'green', 'blue_sky')]
    assert np.mean(iou) == pytest.approx(found[0])
  assert result.headline == f'miou.linear.l2_{L2:g}.b2.norm.16x24' and result.num_examples == 5


def test_each_class_has_an_iou_where_names_differ_in_letters_that_metrics_do_not_have(root: pathlib.Path) -> None:
  own = schema.Segmentation()
  found = segmentation.Segmentation(tokens(root, 'train', 'one'), tokens(root, 'test', 'one'), settings=own,
                                    class_names=('天', '地', 'sky'), protocol='p')._score('knn', np.diag([1, 2, 3]))
  assert [name for name in found if name.startswith('iou')] == [
      f'iou.knn.p.class_{label}' for label in ('0__', '1__', '2_sky')]


def test_every_pixel_of_every_mask_counts_once(root: pathlib.Path) -> None:
  expected = np.zeros(3, int)
  for path in (root / 'masks/test').iterdir():
    expected += np.bincount(np.asarray(Image.open(path)).ravel(), minlength=256)[:3]
  for settings in ({}, {'resize_px': 30, 'stride_px': 7}):  # one window, and many that overlap
    one = evaluator(root, l2=(), **settings)
    data = one.train.table(rows.weights(), Draw(0, 0))
    matrices, figures = one._count(rows.weights(), [one._nearest(data, 3)])
    assert matrices[0].sum(1).tolist() == expected.tolist() and not figures


def test_a_sliding_window_that_covers_the_image_gives_the_same(tmp_path: pathlib.Path) -> None:
  masked.write(tmp_path, train=2, test=1)
  for path in tmp_path.rglob('*.png'):  # with the aspect ratio of the window, so that both ways resize them alike
    Image.open(path).resize((48, 32), Image.Resampling.NEAREST).save(path)
  whole = evaluator(tmp_path, l2=()).measure(rows.weights()).metrics
  slid = evaluator(tmp_path, l2=(), resize_px=16, stride_px=5).measure(rows.weights()).metrics
  assert list(slid) == [name.replace('16x24', 'short16.window16x24.stride5') for name in whole]
  assert list(slid.values()) == list(whole.values())


def test_tokens_are_drawn_by_a_seed_and_named(root: pathlib.Path) -> None:
  train = tokens(root, 'train', 'one')
  drawn = [train.table(rows.weights(), Draw(5, seed)) for seed in (0, 0, 1)]
  for data in drawn:
    assert np.bincount(np.asarray(data.example)[np.asarray(data.weight) > 0]).tolist() == [5] * 9
  features = [np.asarray(data.features) for data in drawn]
  assert (features[0] == features[1]).all() and (features[0] != features[2]).any()
  metrics = evaluator(root, l2=(), tokens_per_image=5, token_seed=1).measure(rows.weights()).metrics
  assert 'miou.knn3.t0.1.b2.norm.16x24.tokens5.seed1' in metrics


def test_tokens_that_do_not_fit_into_memory_are_refused(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(workers, 'memory_bytes', lambda: 4 * 9 * 10 * 24)  # ten tokens of six channels an image
  with pytest.raises(UserError, match=r'evals.dense \(train\): expected training tokens that fit into .* of 9 images. '
                                      'Set tokens_per_image of the evaluation to at most 10.'):
    tokens(root, 'train', 'one').table(rows.weights(), Draw(0, 0))
  tokens(root, 'train', 'one').table(rows.weights(), Draw(10, 0))


def test_held_out_images_choose_the_penalty(root: pathlib.Path) -> None:
  one = evaluator(root, holdout=.3)
  assert one._hold().tolist() == [i in (1, 4, 7) for i in range(9)]
  with pytest.raises(UserError, match='expected at least two images, one of which can be held out'):
    evaluator(root, holdout=.99)._hold()


@pytest.mark.parametrize(('settings', 'said'), [
    ({'l2': (), 'neighbors': ()}, r'evals.dense.neighbors: expected at least one number with evals.dense.l2=\(\)'),
    ({'stride_px': 4}, 'evals.dense.stride_px: expected its default 0 with evals.dense.resize_px=0'),
    ({'resize_px': 8}, 'evals.dense.resize_px: expected at least image_px'),
    ({'resize_px': 32, 'stride_px': 17}, 'evals.dense.resize_px: expected at least image_px'),
    ({'token_seed': 1}, 'evals.dense.token_seed: expected its default 0 with evals.dense.tokens_per_image=0'),
    ({'features': schema.FeatureLayers((-1,), patches=True)}, 'evals.dense.features.patches: expected false')])
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str) -> None:
  config = schema.Config(image_px=PX, model=schema.ViT(patch=4, width=8, depth=1, heads=1, mlp=schema.Mlp(8)),
                         evals={'dense': schema.Segmentation(**settings)})
  with pytest.raises(UserError, match=said):
    check.check(config)


@pytest.fixture(scope='module')
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp('weights') / 'tiny.npz'
  saving.save(made.network(), str(path))
  return str(path)


def evaluate(weights: str, root: pathlib.Path, workdir: pathlib.Path, *words: str) -> int:
  with single.one_device():
    return main.run(['evaluate', '--config=dense_probe', f'--weights={weights}', f'--config.data.source=masks:{root}',
                     f'--workdir={workdir}', *words])


def test_weights_are_evaluated_and_overlays_saved(weights: str, root: pathlib.Path, tmp_path: pathlib.Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
  words = ('l2=()', 'features.blocks=1,2', 'norm=false', 'tokens_per_image=3', 'overlays=2')
  assert evaluate(weights, root, tmp_path / 'run', *(f'--config.evals.dense.{word}' for word in words)) == 0
  found = json.loads((tmp_path / 'run' / 'evaluate.json').read_text())
  where = 'b1+2.raw.32x32.tokens3.seed0'
  assert {f'dense/miou.knn30.t0.07.{where}', f'dense/accuracy.knn30.t0.07.{where}'} <= set(found['metrics'])
  assert found['metric'] == f'miou.knn30.t0.07.{where}' and found['top1'] is None and found['num_examples'] == 5
  shown = capsys.readouterr().out
  assert 'miou.knn30' in shown and '.class_red' not in shown
  overlays = sorted((tmp_path / 'run' / 'figures' / 'dense').iterdir())
  assert [path.name for path in overlays] == ['0000.png', '0001.png']
  assert np.asarray(Image.open(overlays[0])).std() > 10


def test_masks_and_classes_are_not_mixed_up(weights: str, root: pathlib.Path, tmp_path: pathlib.Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
  assert evaluate(weights, root, tmp_path, '--config.evals=knn') == 2
  assert 'evals.knn: expected a source whose images have classes, got masks:' in capsys.readouterr().err
  assert evaluate(weights, root, tmp_path, '--config.evals.dense.source=digits') == 2
  assert 'evals.dense: expected a source whose images have masks, got digits/' in capsys.readouterr().err
  assert evaluate(weights, root, tmp_path, '--config.evals.dense.num_classes=9') == 2
  assert 'evals.dense.num_classes: expected 3, got 9. masks:' in capsys.readouterr().err


def test_a_source_without_names_needs_the_number_of_classes(weights: str, tmp_path: pathlib.Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
  (masked.write(tmp_path, train=3, test=2) / 'classes.txt').unlink()
  assert evaluate(weights, tmp_path, tmp_path / 'run') == 2
  assert 'expected the number of classes of the masks, got 0. masks:' in capsys.readouterr().err
  words = ('l2=()', 'num_classes=2', 'first_class=1', 'ignore=-1')
  assert evaluate(weights, tmp_path, tmp_path / 'run', *(f'--config.evals.dense.{word}' for word in words)) == 2
  assert 'expected class indices from 1 to 2, or -1 for pixels to ignore, got 255' in capsys.readouterr().err


@pytest.mark.slow(reason='15 s: a run, which compiles its step')
def test_a_run_is_evaluated_on_masks(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'tiny.py').write_text(f""""Tiny."
from vit_jax.config import schema as s

def get_config():
  return s.Config(
      name='tiny', length='4 steps', batch_size=16, image_px=(8, 8),
      model=s.ViT(patch=4, width=8, depth=1, heads=1, mlp=s.Mlp(8)),
      data=s.Data(source='digits', train_split='train[:64]', recipe=s.Recipe(crop=s.Crop.RESIZE, flip=False)),
      train=s.Train(ema=.9, progress=False),
      checkpoints=s.Checkpoints(keep_best='dense/miou.knn3.t0.07.b1.norm.8x8@ema'),
      evals={{'dense': s.Segmentation(source='masks:{root}', train_split='train', every='2 steps', l2=(),
                                     neighbors=(3,), overlays=1)}})
""")
  with single.one_device():
    assert main.run(['train', f'--config={tmp_path / "tiny.py"}', f'--workdir={tmp_path / "run"}']) == 0
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  found = [line for line in lines if 'dense/miou.knn3.t0.07.b1.norm.8x8@ema' in line]
  assert len(found) > 1 and 'dense/accuracy.knn3.t0.07.b1.norm.8x8' in found[0]
  assert (tmp_path / 'run' / 'figures' / 'dense@ema' / '0000.png').is_file()
