"""What every source stores of its examples, in its order, and the batches that are made of it."""
from __future__ import annotations

import json
import pathlib

import cv2
import hubs
import numpy as np
import pytest

from tests.data import packed, parquets, vtab_sets
from tests.golden import sets, surface
from tests.jobs import test_prepare_archives as archives
from vit_jax import main

PX = ('image_px=32,32', 'batch_size=8', 'data.workers=0', 'data.threads=2', 'data.in_memory=no')
STEPS = range(6)
BANDS = 5
published = archives.published


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """All sets below one folder, without those that need a server."""
  root = sets.write(tmp_path_factory.mktemp('sets'))
  write_masks(root / 'masks')
  write_bands(root / 'bands')
  parquets.write(root / 'groups', 'train', parquets.large(600), 3, rows=8)
  return root


@pytest.fixture(scope='module')
def tfds(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Three sets in the format of TFDS: with classes, with objects, and with a class that follows from objects."""
  pytest.importorskip('tensorflow_datasets')
  root = tmp_path_factory.mktemp('tfds')
  for name in ('oxford_flowers102', 'clevr', 'kitti'):
    vtab_sets.write(name, root, {'train': 20, 'validation': 10, 'test': 10})
  return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def write_masks(root: pathlib.Path) -> None:
  """Images whose classes, three of them, are those of rectangles."""
  for split, num in (('train', 12), ('val', 6)):
    for kind in ('images', 'masks'):
      (root / kind / split).mkdir(parents=True)
    for i in range(num):
      seed = i + 100 * (split == 'val')
      rng = np.random.default_rng(seed)
      (root / 'images' / split / f'{i:02d}.{"png" if seed % 3 == 0 else "jpg"}').write_bytes(sets.photo(seed))
      height, width = (int(side) for side in rng.integers(48, 96, 2))  # as `photo` draws them
      mask = cv2.resize(rng.integers(0, 3, (3, 4), np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
      cv2.imwrite(str(root / 'masks' / split / f'{i:02d}.png'), mask)
  (root / 'classes.txt').write_text('sky\nsea\nsand\n')


def write_bands(root: pathlib.Path) -> None:
  """Images with five channels of 16 bits, as `.npy`."""
  rng = np.random.default_rng(5)
  for split, num in (('train', 17), ('test', 9)):
    for i in range(num):
      path = root / split / f'class{i % 2}' / f'{i:02d}.npy'
      path.parent.mkdir(parents=True, exist_ok=True)
      np.save(path, rng.integers(0, 9_000, (*rng.integers(20, 50, 2), BANDS)).astype(np.uint16))


def check(name: str, config: surface.schema.Config, *splits: str, steps: range = STEPS) -> None:
  """Compares what is stored of splits, and training batches, with the stored digests."""
  for split in splits:
    surface.stored(f'records/{name}/{split}', lambda: surface.digest(surface.records(config, split)), {})  # noqa: B023
  if steps:
    surface.stored(f'batches/{name}', lambda: surface.digest(surface.train_batches(config, steps)))


@pytest.mark.parametrize('name', ['folder', 'labels', 'captions', 'array_record', 'wds', 'tfrecord', 'parquet'])
def test_a_source_stores_the_known_bytes_labels_and_captions(root: pathlib.Path, name: str) -> None:
  kind = 'folder' if name in ('labels', 'captions') else name
  config = surface.read_config(f'data.source={kind}:{root}/{name}', *sets.SETTINGS.get(name, ()),
                               *(('data.max_labels=3',) if name == 'labels' else ()))
  check(name, config, 'train', 'test', steps=range(0))


@pytest.mark.parametrize('source', ['tfds:oxford_flowers102', 'tfds:clevr', 'vtab:flowers102', 'vtab:clevr/count',
                                    'vtab:clevr/distance', 'vtab:kitti/distance'])
def test_sets_of_tfds_and_tasks_of_vtab(tfds: pathlib.Path, source: str) -> None:
  column = ('data.label_column=objects/shape', 'data.max_labels=16') if source == 'tfds:clevr' else ()
  config = surface.read_config(f'data.source={source}', f'data.data_dir={tfds}', *column, *PX)
  check(source, config, 'train', 'test', steps=range(0) if column else STEPS)


@pytest.mark.parametrize('split', ['train[:80%]', 'train[80%:]', 'train[3:-5]+test[:4]', 'test'])
@pytest.mark.parametrize('kind', ['folder', 'parquet'])
def test_slices_and_sums_of_splits(root: pathlib.Path, kind: str, split: str) -> None:
  config = surface.read_config(f'data.source={kind}:{root}/{kind}')
  surface.stored(f'records/slices/{split}', lambda: surface.digest(surface.records(config, split)), {})


@pytest.mark.parametrize('seed', [0, 1])
def test_examples_that_are_held_out_of_the_only_split(root: pathlib.Path, seed: int) -> None:
  config = surface.read_config(f'data.source=folder:{root}/folder/train', 'data.holdout=.3',
                               f'data.holdout_seed={seed}', *PX)
  check(f'holdout {seed}', config, 'train', 'test')


def test_a_file_of_classes_gives_their_numbers(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'classes.txt').write_text('n1 elk\nn2 cow\nn3 ant\nn4 bee\n')
  config = surface.read_config(f'data.source=folder:{root}/folder', f'data.classes={tmp_path}/classes.txt', *PX)
  check('classes', config, 'train', 'test')


def test_a_resumed_run_keeps_the_order_of_its_classes(root: pathlib.Path) -> None:
  config = surface.read_config(f'data.source=folder:{root}/folder')
  assert surface.class_names(config) == sets.NAMES
  assert surface.class_names(config, order=('cow', 'ant', 'bee')) == ('cow', 'ant', 'bee')


def test_a_dataset_of_the_hub(root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.delenv('HF_TOKEN', raising=False)
  with hubs.running(tmp_path / 'home') as hub:
    hub.repos['datasets/me/pets'] = hubs.Repo(
        {f'data/{path.name}': path.read_bytes() for path in sorted((root / 'parquet').glob('*.parquet'))})
    check('hf', surface.read_config('data.source=hf:me/pets', *PX), 'train', 'test')


@pytest.mark.parametrize('name', ['cifar10', 'cifar100', 'mnist'])
def test_published_archives(published: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
  assert main.run(['prepare', f'--data={name}', f'--archive={published}', f'--to={tmp_path}/set']) == 0
  check(name, surface.read_config(f'data.source=array_record:{tmp_path}/set'), 'train', 'test', steps=range(0))


def test_images_with_masks(root: pathlib.Path) -> None:
  check('masks', surface.read_config(f'data.source=masks:{root}/masks'), 'train', 'val', 'train[:50%]', steps=range(0))


@pytest.mark.parametrize('crop', ['inception', 'resize'])
def test_images_with_five_channels(root: pathlib.Path, crop: str) -> None:
  mean = ','.join(['4500.'] * BANDS)
  config = surface.read_config(f'data.source=folder:{root}/bands', f'data.channels={BANDS}', f'data.recipe.crop={crop}',
                               f'data.recipe.mean={mean}', f'data.recipe.std={mean}', *PX)
  check(f'bands {crop}', config, 'train')
  surface.stored(f'eval/bands {crop}', lambda: surface.digest(surface.eval_batches(config)))


def test_prepare_measures_the_channels(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert main.run(['prepare', f'--data=folder:{root}/bands', f'--channels={BANDS}', f'--to={tmp_path}/set']) == 0
  info = json.loads((tmp_path / 'set' / 'info.json').read_text())
  np.testing.assert_allclose([*info['mean'], *info['std']], surface.known('bands', [*info['mean'], *info['std']]), 1e-6)


def test_images_that_a_teacher_has_labeled(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  own = ('data.source=digits', 'image_px=8,8', 'batch_size=20', 'data.recipe.crop=resize', 'data.recipe.mixup=0',
         'data.workers=0')
  surface.write_answers(tmp_path / 'answers', surface.read_config(*own), 'test', num_classes=10, logits=False)
  pseudo = {'source': 'digits', 'split': 'test', 'teacher': 'teacher', 'labels': f'{tmp_path}/answers', 'top': 3,
            'threshold': .6, 'per_class': 9, 'share': .25}
  config = surface.read_config(*own, *(f'data.pseudo.{name}={value}' for name, value in pseudo.items()))
  surface.stored('batches/pseudo', lambda: surface.digest(surface.train_batches(config, range(15))))


def test_label_maps_of_a_teacher(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  config = surface.read_config(f'data.source=folder:{root}/folder', *PX, 'objective=token_label',
                               f'objective.maps={tmp_path}/maps', 'objective.map_grid=1,1', 'objective.top=3',
                               'data.recipe.mixup=0')
  surface.write_answers(tmp_path / 'maps', config, 'train', num_classes=3, logits=True)
  surface.stored('batches/maps', lambda: surface.digest(surface.train_batches(config, STEPS)))


def test_captions_that_were_prepared_as_tokens(tmp_path: pathlib.Path) -> None:
  texts = {i: f'One, {i}\n\n  two_{i} é\nthree {i} {"long " * 9}'.encode() for i in range(23)}
  packed.write_tars(tmp_path / 'tars', 'train', packed.examples(23), texts=texts)
  packed.write_tars(tmp_path / 'tars', 'test', packed.examples(7))
  assert main.run(['prepare', f'--data=wds:{tmp_path}/tars', f'--to={tmp_path}/set', '--tokens=bytes']) == 0
  config = surface.read_config(*PX, 'objective.prompts=', 'objective.bias_init=-2',
                               base=f'lit_cifar10:source=array_record:{tmp_path}/set')
  surface.stored('batches/tokens', lambda: surface.digest(surface.train_batches(config, STEPS)))


def test_files_of_parquet_that_are_larger_than_memory_are_read_by_windows(root: pathlib.Path) -> None:
  config = surface.read_config(f'data.source=parquet:{root}/groups', 'data.shuffle_mib=1', *PX,
                               'data.eval_split=train', 'batch_size=20')
  batches = surface.train_batches(config, range(32))
  indexes = np.concatenate([batch['index'] for batch in batches])
  assert sorted(indexes[:600].tolist()) == list(range(600)) and len(set(indexes[:80] // 8)) < 40
  surface.stored('batches/windows', lambda: surface.digest(batches))
  surface.stored('order/windows', lambda: surface.text_digest(str(indexes.tolist())), {})
