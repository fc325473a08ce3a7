"""`inspect --dense`: principal components, the foreground, and a probe whose classes and errors are drawn."""
from __future__ import annotations

import errno
import json
import pathlib

import numpy as np
import pytest
import single
from PIL import Image

from tests.evaluate import masked
from tests.weights import made
from vit_jax import main
from vit_jax.inspect import dense, embeddings
from vit_jax.weights import saving


def test_principal_components_are_those_of_scikit_learn_and_of_a_singular_value_decomposition() -> None:
  from sklearn.decomposition import PCA
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(200, 12)) @ rng.normal(size=(12, 12)) + 5.
  found = embeddings.principal(rows)
  theirs = PCA(3, svd_solver='full').fit(rows)
  _, values, axes = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
  for parts, share in ((theirs.transform(rows), theirs.explained_variance_ratio_),
                       ((rows - rows.mean(0)) @ axes[:3].T, values[:3]**2 / (values**2).sum())):
    np.testing.assert_allclose(found.parts * np.sign((found.parts * parts).sum(0)), parts, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.share, share, rtol=1e-9)


@pytest.mark.parametrize('sign', [1., -1.])
def test_the_foreground_is_what_differs_from_the_border(sign: float) -> None:
  rng = np.random.default_rng(1)
  inside = np.zeros((8, 12), bool)
  inside[2:6, 3:9] = True
  tokens = rng.normal(size=(8, 12, 6)) * .1 + sign * np.where(inside[..., None], 1., -1.) * rng.normal(size=6)
  np.testing.assert_array_equal(embeddings.foreground(tokens, .5), inside)


@pytest.fixture(scope='module')
def probed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Weights, a set with masks, and a run that fitted a probe."""
  folder = tmp_path_factory.mktemp('dense')
  saving.save(made.network(), str(folder / 'tiny.npz'))
  masked.write(folder, train=9, test=5)
  with single.one_device():
    assert main.run(['evaluate', '--config=dense_probe', f'--weights={folder / "tiny.npz"}',
                     f'--config.data.source=masks:{folder}', f'--workdir={folder / "run"}',
                     '--config.evals.dense.neighbors=()', '--config.evals.dense.l2=.01,',
                     '--config.evals.dense.features.blocks=1,2', '--config.evals.dense.max_steps=60']) == 0
  return folder


def inspect(folder: pathlib.Path, to: pathlib.Path, *words: str) -> int:
  with single.one_device():
    return main.run(['inspect', '--dense', f'--weights={folder / "tiny.npz"}', f'--to={to}', *words])


def test_the_errors_that_are_drawn_are_those_of_the_evaluation(
    probed: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  metrics = json.loads((probed / 'run' / 'evaluate.json').read_text())['metrics']
  expected = {name: value for name, value in metrics.items() if '.class_' not in name}
  (accuracy,) = [value for name, value in expected.items() if name.startswith('dense/accuracy.linear')]
  (miou,) = [value for name, value in expected.items() if name.startswith('dense/miou.linear')]
  masks = f'--masks={probed / "masks" / "test"}'
  assert inspect(probed, tmp_path, f'--probe={probed / "run"}', masks, '--foreground=.5',
                 str(probed / 'images' / 'test')) == 0
  said = capsys.readouterr().out
  assert f'Over these images: mIoU {miou:.2%}, accuracy {accuracy:.2%} of the pixels.' in said and .3 < miou < 1
  files = sorted((tmp_path / 'dense').iterdir())
  assert [file.name for file in files] == [f'{number}.png' for number in range(5)]
  first, mask = (np.asarray(Image.open(path)) for path in (files[0], probed / 'masks' / 'test' / '0.png'))
  height = round(448 * mask.shape[0] / mask.shape[1])
  assert first.shape[1] == 6 * (448 + 4) - 4 and height < first.shape[0] < height + 60  # six panels and a legend
  arrays = np.load(tmp_path / 'dense.npz')
  assert arrays['components'].shape[0] == arrays['scores'].shape[0] == 5 and arrays['scores'].shape[-1] == 3
  page = (tmp_path / 'report.html').read_text()
  assert page.count('<img src="data:image/png;base64,') == 5 and f'accuracy {accuracy:.2%}' in page


def test_a_perfect_prediction_has_no_errors_and_others_are_red(probed: pathlib.Path, tmp_path: pathlib.Path) -> None:
  with np.load(probed / 'run' / 'probes' / 'dense.npz') as found:
    probe = dict(found)
  image = probed / 'images' / 'test' / '0.png'
  size = np.asarray(Image.open(image)).shape[:2]
  for name, value in (('right', 1), ('wrong', 2)):
    (tmp_path / name).mkdir()
    Image.fromarray(np.full(size, value, np.uint8)).save(tmp_path / name / '0.png')
    fixed = probe | {'kernel': 0 * probe['kernel'], 'bias': np.array([0., 1., 0.], np.float32)}
    np.savez(tmp_path / 'fixed.npz', **fixed)
    assert inspect(probed, tmp_path / f'{name}_out', f'--probe={tmp_path / "fixed.npz"}',
                   f'--masks={tmp_path / name}', str(image)) == 0
    errors = np.asarray(Image.open(tmp_path / f'{name}_out' / 'dense' / '0.png'))[20:40, -400:-48].astype(int)
    is_red = (errors[..., 0] - errors[..., 1] > 100).mean()
    assert is_red == (0. if name == 'right' else 1.)


def test_other_sizes_blocks_and_images_of_one_name_are_drawn(probed: pathlib.Path, tmp_path: pathlib.Path) -> None:
  same = [str(probed / 'images' / split / '1.png') for split in ('train', 'test')]
  assert inspect(probed, tmp_path, '--block=1', '--preprocess=resize=32,image=32x64', *same) == 0
  assert sorted(file.name for file in (tmp_path / 'dense').iterdir()) == ['1_0.png', '1_1.png']
  components = np.load(tmp_path / 'dense.npz')['components']
  assert components.shape[2] == 2 * components.shape[1]
  np.testing.assert_allclose(components.reshape(-1, 3).mean(0), 0, atol=1e-9)  # of all images together
  assert np.abs(components[0].mean((0, 1))).max() > 1e-3


def test_an_image_whose_name_is_that_of_a_numbered_one_has_a_picture(probed: pathlib.Path,
                                                                     tmp_path: pathlib.Path) -> None:
  places = [tmp_path / name for name in ('a/x.png', 'b/x.png', 'c/x_1.png')]
  for place in places:
    place.parent.mkdir()
    place.write_bytes((probed / 'images' / 'test' / '0.png').read_bytes())
  assert inspect(probed, tmp_path / 'out', *map(str, places)) == 0
  assert sorted(file.name for file in (tmp_path / 'out' / 'dense').iterdir()) == ['x_0.png', 'x_1.png', 'x_1_.png']


def test_masks_without_a_pixel_that_counts_and_images_of_one_name_are_refused(
    probed: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  image = probed / 'images' / 'test' / '0.png'
  Image.fromarray(np.full(np.asarray(Image.open(image)).shape[:2], 255, np.uint8)).save(tmp_path / '0.png')
  words = f'--probe={probed / "run"}', f'--masks={tmp_path}', str(image)
  assert inspect(probed, tmp_path / 'out', *words) == 2
  assert f'--masks: expected a pixel that counts, got none in the masks of {tmp_path}.' in capsys.readouterr().err
  assert inspect(probed, tmp_path / 'out', *words, str(probed / 'images' / 'train' / '0.png')) == 2
  assert 'as each has the mask of its name, got several named 0.' in capsys.readouterr().err


def test_a_probe_or_a_mask_that_storage_does_not_give_now_is_no_error_of_a_person(
    probed: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  def lost(*words: object) -> bytes:
    raise OSError(errno.EIO, 'Input/output error')

  masks = probed / 'masks' / 'test'
  words = f'--probe={probed / "run"}', f'--masks={masks}', str(probed / 'images' / 'test' / '0.png')
  for owner, name, what in (pathlib.Path, 'read_bytes', masks / '0.png'), (
      dense.archives, 'read_npz', f'--probe={probed / "run" / "probes" / "dense.npz"}'):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, lost)
      assert inspect(probed, tmp_path / 'out', *words) == 75
    assert f'{what}: expected to read it, got "Input/output error"' in capsys.readouterr().err


@pytest.mark.parametrize(('words', 'error'), [
    (['--masks=x'], '--masks: expected --probe as well, whose errors are shown'),
    (['--probe=nothing'], '--probe: expected a run with one probe in nothing/probes, got 0. Make one'),
    (['--block=9'], 'layer: expected 0 to 2'),
    (['--probe={folder}/run', '--masks={folder}/images'], '--masks: expected 0.png (or .tif'),
    (['--probe={folder}/run', '--masks={folder}/images/test'], 'expected a mask with one channel of class indices'),
    (['--probe={folder}/tiny.npz'], '--probe: expected a probe of vit-jax evaluate, got'),
    (['--probe={folder}/narrow.npz'], '--probe: expected a probe of tokens of width 64, as these weights have them')])
def test_what_cannot_be_drawn_is_explained(probed: pathlib.Path, tmp_path: pathlib.Path, words: list[str], error: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
  with np.load(probed / 'run' / 'probes' / 'dense.npz') as found:
    np.savez(probed / 'narrow.npz', **dict(found) | {'mean': found['mean'][:-1], 'std': found['std'][:-1],
                                                     'kernel': found['kernel'][:-1]})
  words = [word.format(folder=probed) for word in words]
  assert inspect(probed, tmp_path, *words, str(probed / 'images' / 'test' / '0.png')) == 2
  assert error in capsys.readouterr().err


def test_flags_of_dense_pictures_need_it(probed: pathlib.Path, tmp_path: pathlib.Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
  weights = f'--weights={probed / "tiny.npz"}'
  assert main.run(['inspect', weights, f'--to={tmp_path}', '--probe=x']) == 2
  assert '--probe, --masks, --foreground, --block: expected --dense as well' in capsys.readouterr().err
  assert main.run(['inspect', '--dense', weights, f'--to={tmp_path}']) == 2
  assert '--dense: expected one network and at least one image, got 1 and 0' in capsys.readouterr().err
