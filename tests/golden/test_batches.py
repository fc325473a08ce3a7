"""Training and evaluation batches: every source with every kind of recipe, from any step, for hosts and processes."""
from __future__ import annotations

import pathlib
import shutil

import buckets
import numpy as np
import pytest

from tests.golden import sets, surface

PX = ('image_px=32,32', 'batch_size=8', 'data.workers=0', 'data.threads=2', 'data.in_memory=no')
RECIPES = {
    'inception': ('from_folder', *PX),
    'augreg': ('vit_s16_i1k', *PX, 'data.num_examples=0', 'data.num_classes=0', 'data.eval_split=test',
               'data.recipe.jitter.brightness=.4', 'data.recipe.erase.probability=.5', 'data.recipe.shift_px=2',
               'data.recipe.rotate_degrees=9', 'data.recipe.interpolation=bicubic', 'data.recipe.antialias=true',
               'data.recipe.repeats=2'),
    'views': ('dino_cifar10', *PX, 'data.recipe.views.blur=1,.1,.5', 'data.recipe.views.jitter.hue=.1',
              'data.recipe.views.solarize=0,.5,0'),
    'native': ('naflex_s16_i1k', *PX, 'data.num_examples=0', 'data.num_classes=0', 'data.eval_split=test',
               'data.recipe.native_lengths=2,4', 'model.dtype=float32'),
}
STEPS = range(15)
REMOTE = ('array_record', 'parquet', 'tfrecord', 'wds')
BYTES_ALIKE = ('folder', 'parquet', 'tfrecord', 'wds', *(f'gs://{name}' for name in REMOTE if name != 'array_record'))
"""Sources of the same bytes in the same order: their batches must be equal."""


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return sets.write(tmp_path_factory.mktemp('sets'))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def where(root: pathlib.Path, name: str, bucket: buckets.Server | None = None) -> tuple[str, ...]:
  """Returns the overrides of a source, which is put into the bucket if its name begins with `gs://`."""
  kind = name.removeprefix('gs://')
  if kind == 'mix':
    return (f'data.source=mix:0.7*folder:{root}/folder,0.3*parquet:{root}/parquet',)
  if kind in ('digits', 'synthetic'):
    return (f'data.source={kind}',)
  if kind in ('labels', 'captions'):
    return (f'data.source=folder:{root}/{kind}',)
  place = f'{root}/{kind}'
  if bucket is not None and kind != name:
    place = f'gs://golden/{kind}'
    for path in filter(pathlib.Path.is_file, (root / kind).iterdir()):
      bucket.generation += 1
      bucket.objects[f'golden/{kind}/{path.name}'] = (bucket.generation, path.read_bytes())
  return (f'data.source={kind}:{place}', *sets.SETTINGS.get(kind, ()))


def read(recipe: str, source: tuple[str, ...], *more: str) -> surface.schema.Config:
  base, *settings = RECIPES[recipe]
  if base.startswith('dino'):
    base = f'{base}:source=digits'
  return surface.read_config(*source, *settings, *more, base=base)


def train_digest(recipe: str, source: tuple[str, ...], *more: str, steps: range = STEPS) -> str:
  return surface.digest(surface.train_batches(read(recipe, source, *more), steps))


@pytest.mark.parametrize('recipe', RECIPES)
@pytest.mark.parametrize('name', ['folder', 'array_record', 'mix', 'digits', 'synthetic'])
def test_training_batches_are_those_that_are_stored(root: pathlib.Path, name: str, recipe: str) -> None:
  if (name, recipe) == ('synthetic', 'native'):
    pytest.skip('synthetic images have no aspect of their own')
  surface.stored(f'train/{name}/{recipe}', lambda: train_digest(recipe, where(root, name)))


@pytest.mark.parametrize('name', BYTES_ALIKE[1:])
def test_the_same_bytes_in_another_format_give_the_same_batches(
    root: pathlib.Path, name: str, bucket: buckets.Server) -> None:
  digests = {train_digest('inception', where(root, one, bucket)) for one in ('folder', name)}
  assert len(digests) == 1


def test_shards_in_a_bucket_give_the_batches_of_their_files(root: pathlib.Path, bucket: buckets.Server) -> None:
  digests = {train_digest('inception', where(root, name, bucket), steps=range(5))
             for name in ('array_record', 'gs://array_record')}
  assert len(digests) == 1


@pytest.mark.parametrize('recipe', RECIPES)
def test_a_loader_that_begins_in_the_middle_gives_the_rest_of_the_batches(root: pathlib.Path, recipe: str) -> None:
  whole = surface.train_batches(read(recipe, where(root, 'folder')), STEPS)
  rest = surface.train_batches(read(recipe, where(root, 'folder')), STEPS[9:])
  assert surface.digest(whole[9:]) == surface.digest(rest)


@pytest.mark.parametrize(('recipe', 'num_hosts'), [
    ('inception', 4), ('augreg', 2), ('views', 2), ('native', 2), ('native', 4)])
def test_hosts_make_the_rows_of_the_same_global_batches(root: pathlib.Path, recipe: str, num_hosts: int) -> None:
  config, steps = read(recipe, where(root, 'folder')), range(2, 5)
  parts = [surface.train_batches(config, steps, host=host, num_hosts=num_hosts) for host in range(num_hosts)]
  assert surface.digest(surface.joined(parts)) == surface.digest(surface.train_batches(config, steps))


@pytest.mark.parametrize('recipe', ['inception', 'augreg', 'native'])
@pytest.mark.parametrize('name', ['folder', 'digits'])
def test_evaluation_batches_are_those_that_are_stored_on_any_number_of_hosts(
    root: pathlib.Path, name: str, recipe: str) -> None:
  config = read(recipe, where(root, name), 'data.eval_split=test[:13]')
  found = surface.eval_batches(config)
  surface.stored(f'eval/{name}/{recipe}', lambda: surface.digest(found))
  parts = [surface.eval_batches(config, host=host, num_hosts=2) for host in range(2)]
  assert len(found) == 2 and surface.digest(surface.joined(parts)) == surface.digest(found)


DEVICE = {
    'crops': ('data.recipe.crop=resize', 'data.recipe.shift_px=2', 'data.recipe.rotate_degrees=9',
              'data.recipe.scale=.2', 'data.recipe.shear=.1', 'data.recipe.mixup=0'),
    'mixup': ('data.recipe.crop=resize', 'data.recipe.mixup=.4'),
    'cutmix': ('data.recipe.crop=resize', 'data.recipe.mixup=.8', 'data.recipe.cutmix=1'),
    'erase': ('data.recipe.crop=resize', 'data.recipe.mixup=0', 'data.recipe.erase.probability=.5'),
}


@pytest.mark.parametrize('name', DEVICE)
def test_crops_and_mixtures_on_the_device_have_the_known_values(root: pathlib.Path, name: str) -> None:
  config = read('inception', where(root, 'folder'), *DEVICE[name], 'data.in_memory=yes', 'batch_size=4', 'seed=3')
  batches = surface.on_device(config, surface.train_batches(config, range(2)), num_classes=3, in_memory=True)
  found = surface.sketch(batches)
  assert found[:len(found) // 2] != found[len(found) // 2:]  # of the two steps
  np.testing.assert_allclose(found, surface.known(f'device/{name}', found), rtol=2e-5, atol=2e-6)


@pytest.mark.slow(reason='4 s: two loader processes')
@pytest.mark.parametrize('recipe', ['inception', 'views'])
def test_loader_processes_give_the_batches_of_threads(root: pathlib.Path, recipe: str) -> None:
  whole = train_digest(recipe, where(root, 'folder'))
  assert train_digest(recipe, where(root, 'folder'), 'data.workers=2') == whole


def test_damaged_members_are_replaced_by_the_next_ones(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  shutil.copytree(root / 'folder', tmp_path / 'folder')
  sets.damage(tmp_path)
  found = surface.train_batches(read('inception', where(tmp_path, 'folder')), STEPS)
  assert sum(int(batch['bad'].sum()) for batch in found) >= 2
  surface.stored('train/damaged', lambda: surface.digest(found))


@pytest.mark.parametrize(('name', 'more'), {
    'labels': ('data.max_labels=3', 'objective.loss=sigmoid'),
    'captions': (),
}.items())
def test_labels_and_captions_of_files(root: pathlib.Path, name: str, more: tuple[str, ...]) -> None:
  base = 'lit_cifar10:source=digits' if name == 'captions' else 'from_folder'
  if name == 'captions':
    more = ('objective.prompts=', 'objective.bias_init=-2')
  config = surface.read_config(*PX, *where(root, name), *more, base=base)
  surface.stored(f'train/{name}', lambda: surface.digest(surface.train_batches(config, STEPS)))


def test_batches_in_memory_are_those_of_files_that_are_only_resized(root: pathlib.Path) -> None:
  more = ('data.recipe.crop=resize', 'data.recipe.mixup=0')
  config = read('inception', where(root, 'array_record'), *more, 'data.in_memory=yes')
  surface.stored('train/in_memory', lambda: surface.digest(surface.train_batches(config, STEPS)))


def test_seeds_change_the_order_and_the_crops(root: pathlib.Path) -> None:
  found = [surface.train_batches(read('inception', where(root, 'folder'), f'seed={seed}'), range(6)) for seed in (0, 1)]
  order = [np.concatenate([batch['index'] for batch in one]).tolist() for one in found]
  assert order[0] != order[1] and sorted(order[0][:41]) == sorted(order[1][:41]) == list(range(41))
  assert surface.digest(found[0]) != surface.digest(found[1])
