"""Loaders: batches as a function of (seed, step), exact evaluation, bad images."""
from __future__ import annotations

import dataclasses
import itertools
import pathlib
import threading
from collections.abc import Callable

import cv2
import numpy as np
import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core import errors, types
from vit_jax.core.types import Shard
from vit_jax.data import loader, opening
from vit_jax.data.source import Rows, Source, first_label
from vit_jax.parallel import feed

INCEPTION = schema.Recipe(shift_px=1, rotate_degrees=5.)
RESIZE = schema.Recipe(crop=schema.Crop.RESIZE)
ALONE = Shard((0,), 1)
BATCH, NUM_IMAGES = 6, 37


def source_of(root: pathlib.Path, split: str = 'train') -> Source:
  return opening.open_split(schema.Data(source=f'folder:{root}'), split, image_px=(8, 10))


def train(source: Source, **changes: object) -> loader.TrainLoader:
  settings = {'recipe': INCEPTION, 'image_px': (8, 10), 'batch_size': BATCH, 'seed': 0, 'shard': ALONE,
              'workers': 0, 'threads': 2, 'in_memory': False, 'max_bad_images': 0}
  return loader.train_loader(source, **(settings | changes))


class Empty(Rows):
  """A source without examples."""
  name, title, digest, class_names = 'folder:none', '', '', ()

  def __len__(self) -> int:
    return 0


def test_a_source_without_examples_is_named() -> None:
  with pytest.raises(errors.UserError, match='folder:none: expected at least one example, got none'):
    train(Empty())  # type: ignore[arg-type]


def take(made: loader.TrainLoader, num: int, start: int = 0) -> list[types.Batch]:
  batches = [{k: np.array(v) for k, v in b.items()} for b in itertools.islice(made.batches(start), num)]
  made.close()
  return batches


def evaluate(source: Source, **changes: object) -> list[types.Batch]:
  settings = {'recipe': RESIZE, 'image_px': (8, 10), 'batch_size': BATCH, 'shard': ALONE, 'threads': 2}
  made = loader.eval_loader(source, **(settings | changes))
  batches = list(made.batches())
  made.close()
  return batches


def assert_same(ones: list[types.Batch], twos: list[types.Batch]) -> None:
  assert len(ones) == len(twos)
  for one, two in zip(ones, twos, strict=True):
    assert set(one) == set(two)
    for name in one:
      np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def side_by_side(shards: list[list[types.Batch]]) -> list[types.Batch]:
  return [{k: np.concatenate([b[k] for b in rows]) for k in rows[0]} for rows in zip(*shards, strict=True)]


@pytest.fixture(params=[False, True], ids=['host', 'memory'])
def memory(request: pytest.FixtureRequest) -> dict[str, object]:
  """Settings of both paths."""
  return {'in_memory': request.param, 'recipe': RESIZE if request.param else INCEPTION}


def test_batches_have_the_promised_keys_types_and_shapes(image_folder: pathlib.Path,
                                                         memory: dict[str, object]) -> None:
  [batch] = take(train(source_of(image_folder), **memory), 1)
  assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
      'image': ((6, 8, 10, 3), 'uint8'), 'label': ((6,), 'int32'), 'index': ((6,), 'int64'),
      'box': ((6, 4), 'float32'), 'bad': ((6,), 'bool')}


def test_rows_belong_together(image_folder: pathlib.Path, memory: dict[str, object]) -> None:
  source = source_of(image_folder)
  for batch in take(train(source, **memory), 7):
    assert batch['label'].tolist() == [first_label(source, i) for i in batch['index'].tolist()]


def test_the_same_seed_gives_the_same_batches_and_another_one_others(image_folder: pathlib.Path,
                                                                     memory: dict[str, object]) -> None:
  source = source_of(image_folder)
  batches = take(train(source, **memory), 8)
  assert_same(batches, take(train(source, **memory, threads=1), 8))
  other = take(train(source, **memory, seed=1), 8)
  assert any((a['index'] != b['index']).any() for a, b in zip(batches, other, strict=True))


def test_starting_at_a_step_is_skipping_to_it(image_folder: pathlib.Path, memory: dict[str, object]) -> None:
  source = source_of(image_folder)
  assert_same(take(train(source, **memory), 12)[9:], take(train(source, **memory), 3, start=9))


@pytest.mark.dear('memory-3', reason='1 to 2 s')
@pytest.mark.parametrize('count', [2, 3])
def test_shards_side_by_side_are_the_global_batch(image_folder: pathlib.Path, memory: dict[str, object],
                                                  count: int) -> None:
  source = source_of(image_folder)
  for start in (0, 5):
    shards = [take(train(source, **memory, shard=Shard((i,), count)), 8, start) for i in range(count)]
    assert_same(side_by_side(shards), take(train(source, **memory), 8, start))


def test_each_example_comes_once_an_epoch_in_a_new_order(image_folder: pathlib.Path,
                                                         memory: dict[str, object]) -> None:
  index = np.concatenate([b['index'] for b in take(train(source_of(image_folder), **memory), NUM_IMAGES)])
  epochs = index.reshape(BATCH, NUM_IMAGES)
  np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(NUM_IMAGES), (BATCH, 1)))
  assert len({tuple(e.tolist()) for e in epochs}) == BATCH


def test_both_paths_visit_examples_in_the_same_order(image_folder: pathlib.Path) -> None:
  source = source_of(image_folder)
  plain = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)
  assert_same(take(train(source, recipe=plain), 8), take(train(source, recipe=plain, in_memory=True), 8))


def test_augmentation_is_new_in_every_epoch(image_folder: pathlib.Path) -> None:
  source = source_of(image_folder)
  boxes = [b['box'][b['index'] == 5] for b in take(train(source), 13)]
  assert len(np.unique(np.concatenate(boxes), axis=0)) >= 2


def test_the_info_says_what_a_run_must_agree_on(image_folder: pathlib.Path) -> None:
  source = source_of(image_folder)
  info = train(source, seed=3).info
  assert info == (f'folder:{image_folder}/train', 37, 6, 3, source.digest)


@pytest.mark.parametrize('in_memory', [False, True])
@pytest.mark.parametrize(('batch_size', 'count'), [(6, 1), (6, 3), (37, 1), (40, 2), (5, 1), (1, 1)])
def test_evaluation_sees_each_example_once(image_folder: pathlib.Path, batch_size: int, count: int, *,
                                           in_memory: bool) -> None:
  source = source_of(image_folder)
  shards = [evaluate(source, batch_size=batch_size, shard=Shard((i,), count), in_memory=in_memory)
            for i in range(count)]
  assert len({len(s) for s in shards}) == 1
  batches = side_by_side(shards)
  mask = np.concatenate([b['mask'] for b in batches]) > 0
  index = np.concatenate([b['index'] for b in batches])
  assert len(mask) == -(-37 // batch_size) * batch_size
  np.testing.assert_array_equal(index[mask], np.arange(37))
  assert np.concatenate([b['label'] for b in batches])[mask].tolist() == [first_label(source, i) for i in range(37)]
  assert set(batches[0]) == {'image', 'label', 'index', 'box', 'mask'}


def test_evaluation_from_memory_is_the_same(image_folder: pathlib.Path) -> None:
  source = source_of(image_folder)
  ones, twos = evaluate(source), evaluate(source, in_memory=True)
  for one, two in zip(ones, twos, strict=True):
    for name in ('image', 'mask', 'index'):
      np.testing.assert_array_equal(one[name], two[name])


BAD = {'cut.jpg': lambda: encode(random_image(1, height=90, width=90), '.jpg')[:900],
       'text.jpg': lambda: b'no picture', 'empty.png': lambda: b'',
       'cut.png': lambda: encode(random_image(2))[:-20]}
GOOD = {'deep.png': lambda: cv2.imencode('.png', random_image(3).astype(np.uint16) * 257)[1].tobytes(),
        'gray.png': lambda: cv2.imencode('.png', random_image(4)[..., 0])[1].tobytes(),
        'rgba.png': lambda: cv2.imencode('.png', np.dstack([random_image(5), random_image(5)[..., 0]]))[1].tobytes()}


@pytest.fixture(scope='module')
def damaged(tmp_path_factory: pytest.TempPathFactory,
            write_split: Callable[..., None]) -> Source:
  """37 plain pictures, four bad ones and three unusual ones."""
  root = tmp_path_factory.mktemp('damaged')
  write_split(root / 'train')
  for name, make in (BAD | GOOD).items():
    (root / 'train' / 'ant' / name).write_bytes(make())
  return source_of(root)


def bad_indexes(source: Source) -> list[int]:
  return [i for i in range(len(source)) if pathlib.Path(source.describe(i)).name in BAD]


def test_bad_images_are_replaced_by_the_next_good_one_and_marked(damaged: Source,
                                                                 memory: dict[str, object]) -> None:
  plain = {'recipe': schema.Recipe(crop=schema.Crop.RESIZE, flip=False), 'in_memory': memory['in_memory']}
  batches = take(train(damaged, **plain, max_bad_images=4), 8)
  rows = {int(i): (image, int(label), bool(bad)) for b in batches
          for i, image, label, bad in zip(b['index'], b['image'], b['label'], b['bad'], strict=True)}
  assert sorted(i for i, row in rows.items() if row[2]) == bad_indexes(damaged)
  assert len(rows) == 44
  for index in bad_indexes(damaged):
    successor = next(i % 44 for i in range(index + 1, index + 44) if i % 44 not in bad_indexes(damaged))
    np.testing.assert_array_equal(rows[index][0], rows[successor][0])
    assert rows[index][1] == first_label(damaged, successor)


def test_each_bad_image_is_logged_once_with_its_reason(damaged: Source, memory: dict[str, object],
                                                       caplog: pytest.LogCaptureFixture) -> None:
  made = train(damaged, **memory, max_bad_images=4)
  take(made, 30)
  assert len(made.bad.indexes) == 4
  lines = [r.getMessage() for r in caplog.records if r.name == 'vit_jax.data']
  assert len(lines) == 4
  for name, reason in {'cut.jpg': 'the JPEG is truncated', 'text.jpg': 'not an image, or truncated .10 bytes',
                       'empty.png': 'the file is empty', 'cut.png': 'the PNG is truncated'}.items():
    [line] = [line for line in lines if name in line]
    assert line.startswith('bad image: ') and reason.replace('.', '(') in line


def test_only_batches_that_were_taken_count(damaged: Source) -> None:
  made = train(damaged, max_bad_images=0, threads=8)
  stream = made.batches(0)
  clean = list(itertools.takewhile(lambda b: not b['bad'].any(), take(train(damaged, max_bad_images=4), 8)))
  for _ in clean:
    next(stream)
  with pytest.raises(errors.UserError):
    next(stream)
  made.close()


def test_too_many_bad_images_stop_the_run_and_are_named(damaged: Source,
                                                        memory: dict[str, object]) -> None:
  with pytest.raises(errors.UserError, match='folder:.*/train: expected at most data.max_bad_images=3 images that '
                                            'cannot be decoded, got 4: .*(jpg|png)'):
    take(train(damaged, **memory, max_bad_images=3), 8)


def test_in_evaluation_bad_images_do_not_count(damaged: Source) -> None:
  for in_memory in (False, True):
    made = loader.eval_loader(damaged, recipe=RESIZE, image_px=(8, 10), batch_size=6, shard=ALONE, threads=2,
                              in_memory=in_memory)
    batches = list(made.batches())
    index, mask = (np.concatenate([b[k] for b in batches]) for k in ('index', 'mask'))
    assert made.num_bad == 4 and made.num_examples == 44 and mask.sum() == 40
    assert not set(index[mask > 0].tolist()) & set(bad_indexes(damaged))


def test_a_source_without_any_good_image_is_refused(tmp_path: pathlib.Path) -> None:
  for name in 'ab':
    (tmp_path / 'train' / name).mkdir(parents=True)
    for i in range(4):
      (tmp_path / 'train' / name / f'{i}.jpg').write_bytes(b'no')
  with pytest.raises(errors.UserError, match='expected images that can be decoded, got 8 bad images in a row, '
                                            'starting at .*. The last reason: '):
    take(train(source_of(tmp_path), max_bad_images=9), 1)


def test_sizes_that_do_not_fit_are_refused(image_folder: pathlib.Path) -> None:
  source = source_of(image_folder)
  with pytest.raises(errors.UserError, match='batch_size: expected at most 37, the number of ex.*, got 38. Set .*=32'):
    train(source, batch_size=38)
  with pytest.raises(errors.UserError, match='^batch_size: expected a positive multiple of 4, the parts .*, got 6'):
    train(source, shard=Shard((0,), 4))
  with pytest.raises(errors.UserError, match='seed: expected 0 or more, got -1'):
    train(source, seed=-1)


def test_small_sets_that_are_only_resized_fit_in_memory(image_folder: pathlib.Path) -> None:
  source, auto = source_of(image_folder), schema.InMemory.AUTO
  fits = loader.fits_in_memory
  assert fits(source, recipe=RESIZE, image_px=(8, 8), choice=auto)
  assert not fits(source, recipe=RESIZE, image_px=(4400, 4400), choice=auto)
  assert fits(source, recipe=RESIZE, image_px=(4400, 4400), choice=schema.InMemory.YES)
  assert not fits(source, recipe=INCEPTION, image_px=(8, 8), choice=auto)
  assert not fits(source, recipe=RESIZE, image_px=(8, 8), choice=schema.InMemory.NO)
  with pytest.raises(errors.UserError, match='data.in_memory: expected auto or no with data.recipe.crop=inception'):
    fits(source, recipe=INCEPTION, image_px=(8, 8), choice=schema.InMemory.YES)


@pytest.mark.parametrize('in_memory', [False, True])
def test_repeats_are_augmented_anew_and_resumed_exactly(image_folder: pathlib.Path, *, in_memory: bool) -> None:
  source = source_of(image_folder)
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, repeats=3) if in_memory else dataclasses.replace(
      INCEPTION, repeats=3)
  settings = {'recipe': recipe, 'in_memory': in_memory, 'batch_size': 12}
  whole = take(train(source, **settings), 8)
  shards = [take(train(source, **settings, shard=Shard((i,), 3)), 3, start=5) for i in range(3)]
  assert_same(whole[5:], side_by_side(shards))
  assert train(source, **settings).info.digest == f'{source.digest} repeats=3'  # as it changes the order
  first = whole[0]
  assert first['index'][:4].tolist() == first['index'][4:8].tolist() == first['index'][8:].tolist()
  assert (first['image'][:4] == first['image'][4:8]).all() == in_memory
  with pytest.raises(errors.UserError, match='batch_size: expected at least 6, two different examples with '
                                            'data.recipe.repeats=3, got 5'):
    train(source, **(settings | {'batch_size': 5}))


def test_what_the_host_must_do_is_not_left_to_memory(image_folder: pathlib.Path) -> None:
  source = source_of(image_folder)
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, randaugment=schema.RandAugment(2))
  assert not loader.fits_in_memory(source, recipe=recipe, image_px=(8, 8), choice=schema.InMemory.AUTO)
  with pytest.raises(errors.UserError, match='expected auto or no with data.recipe.randaugment.layers=2'):
    train(source, recipe=recipe, in_memory=True)


def test_an_iterator_is_closed_once_and_closing_waits_for_the_thread_that_closes_it(
    image_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  began, going, closed = threading.Event(), threading.Event(), list[str]()

  class Slow:
    def __iter__(self) -> Slow:
      return self

    def __next__(self) -> types.Batch:
      return {'index': np.zeros(6, np.int64), 'bad': np.zeros(6, bool)}

    def close(self) -> None:
      began.set()
      assert going.wait(10)
      closed.append(threading.current_thread().name)

  made = train(source_of(image_folder))
  monkeypatch.setattr(made, '_start_batches', lambda numbers: Slow())
  ahead = feed.Ahead(made.batches(0), lambda batch: batch)
  monkeypatch.setattr(feed, 'CLOSE_S', 0.)
  ahead.close()
  assert began.wait(10)
  threading.Timer(.1, going.set).start()
  made.close()
  assert closed == ['feed']
