"""Several sources as one: shares, order, classes, and exact resuming."""
from __future__ import annotations

import itertools
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core import types
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader, opening, order
from vit_jax.data.formats import hf, mixture
from vit_jax.data.source import Source, first_label, read_one

RECIPE = schema.Recipe(shift_px=1, randaugment=schema.RandAugment(2, 9.), jitter=schema.Jitter(.3, .3, .3))


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory, write_split: Callable[..., None]) -> list[pathlib.Path]:
  """37 and 11 pictures of the same seven classes, and 9 of two others."""
  root = tmp_path_factory.mktemp('mixed')
  for name, num, classes in (('a', 37, None), ('b', 11, None), ('c', 9, ('ant', 'zebra'))):
    for split in ('train', 'test'):
      write_split(root / name / split, num, **({'classes': classes} if classes else {}))
  return [root / n for n in 'abc']


def open_mixed(text: str, **fields: object) -> opening.Sources:
  return opening.open_sources(schema.Data(source=text, **fields), image_px=(8, 8))


def train(source: Source, **changes: object) -> loader.TrainLoader:
  settings = {'recipe': RECIPE, 'image_px': (8, 10), 'batch_size': 6, 'seed': 0, 'shard': Shard((0,), 1),
              'workers': 0, 'threads': 2, 'in_memory': False, 'max_bad_images': 0}
  return loader.train_loader(source, **(settings | changes))


def take(made: loader.TrainLoader, num: int, start: int = 0) -> list[types.Batch]:
  batches = [{k: np.array(v) for k, v in b.items()} for b in itertools.islice(made.batches(start), num)]
  made.close()
  return batches


def assert_same(ones: list[types.Batch], twos: list[types.Batch]) -> None:
  for one, two in zip(ones, twos, strict=True):
    for name in one:
      np.testing.assert_array_equal(one[name], two[name], err_msg=name)


WORKERS = pytest.mark.slow(reason='loader processes start in about 5 s')


@pytest.mark.parametrize(('workers', 'count'), [(0, 1), (0, 2), (0, 3), pytest.param(2, 1, marks=WORKERS),
                                                pytest.param(2, 3, marks=WORKERS)])
def test_a_mixture_goes_on_exactly_for_any_workers_and_shards(folders: list[pathlib.Path], workers: int,
                                                             count: int) -> None:
  source = open_mixed(f'mix:0.7*folder:{folders[0]},0.3*folder:{folders[1]}').train
  whole = take(train(source), 9)
  parts = [take(train(source, workers=workers, shard=Shard((i,), count)), 3, start=6) for i in range(count)]
  joined = [{k: np.concatenate([b[k] for b in rows]) for k in rows[0]} for rows in zip(*parts, strict=True)]
  assert_same(whole[6:], joined)


def test_each_source_has_its_share_and_each_example_its_turn(folders: list[pathlib.Path]) -> None:
  source = open_mixed(f'mix:3*folder:{folders[0]},1*folder:{folders[1]}').train
  assert isinstance(source, mixture.Mixture) and source.shares == (750, 250) and len(source) == 48
  index = source.visit(5, 1)(np.arange(4000))
  for rounds in index.reshape(4, 1000):
    assert (rounds >= 37).sum() == 250
  for low, high in ((0, 37), (37, 48)):
    own = index[(index >= low) & (index < high)]
    size = high - low
    passes = own[:len(own) // size * size].reshape(-1, size)
    np.testing.assert_array_equal(np.sort(passes), np.tile(np.arange(low, high), (len(passes), 1)))
    assert len({tuple(p) for p in passes.tolist()}) > .9 * len(passes)


def test_the_order_is_a_function_of_seed_and_position(folders: list[pathlib.Path]) -> None:
  visits = tuple(order.Shuffled(size, seed) for seed, size in enumerate((37, 11)))
  visit = mixture.Visit(visits, (37, 11), (700, 300), 3)
  whole = visit(np.arange(3000))
  np.testing.assert_array_equal(visit(np.array([2999, 5, 1000])), whole[[2999, 5, 1000]])
  assert (mixture.Visit(visits, (37, 11), (700, 300), 4)(np.arange(100)) != whole[:100]).any()
  np.testing.assert_array_equal(pickle.loads(pickle.dumps(visit))(np.arange(50)), whole[:50])


def test_rows_and_names_belong_together(folders: list[pathlib.Path]) -> None:
  source = open_mixed(f'mix:0.5*folder:{folders[0]},0.5*folder:{folders[1]}').train
  for batch in take(train(source), 7):
    for index, label in zip(batch['index'].tolist(), batch['label'].tolist(), strict=True):
      path = pathlib.Path(source.describe(index))
      assert path.parent.name == source.class_names[label] == source.class_names[first_label(source, index)]
      assert path.is_relative_to(folders[0] if index < 37 else folders[1])


def test_slices_are_taken_of_each_source_and_evaluation_has_all(folders: list[pathlib.Path]) -> None:
  opened = open_mixed(f'mix:0.5*folder:{folders[0]},0.5*folder:{folders[1]}', train_split='train[:10]')
  assert len(opened.train) == 20 and len(opened.eval) == 48
  made = loader.eval_loader(opened.eval, recipe=schema.Recipe(), image_px=(8, 8), batch_size=7, shard=Shard((0,), 1),
                            threads=1)
  seen = np.concatenate([b['index'][b['mask'] > 0] for b in made.batches()])
  np.testing.assert_array_equal(seen, np.arange(48))


def test_classes_are_the_same_or_apart(folders: list[pathlib.Path]) -> None:
  text = f'mix:0.5*folder:{folders[0]},0.5*folder:{folders[2]}'
  with pytest.raises(UserError, match='got 7 that only one of them has, such as bee, cow, dog, elk, fox. Use sources '
                                      'with equal classes, or set data.mix_classes=separate'):
    open_mixed(text)
  opened = open_mixed(text, mix_classes=schema.MixClasses.SEPARATE)
  assert opened.class_names == ('ant (1)', 'bee', 'cow', 'dog', 'elk', 'fox', 'gnu', 'ant (2)', 'zebra')
  assert {first_label(opened.train, i) for i in range(37, 46)} == {7, 8}
  assert read_one(opened.train, 40).label == first_label(opened.train, 40)


def test_equal_names_in_another_order_go_by_the_first() -> None:
  class Named:
    def __init__(self, *names: str) -> None:
      self.class_names, self.name = names, 'x'
  names, labels = mixture.join_classes([Named('a', 'b', 'c'), Named('c', 'a', 'b')], separate=False)
  assert names == ('a', 'b', 'c') and labels == [[0, 1, 2], [2, 0, 1]]


def test_another_weight_is_another_digest_and_memory_keeps_the_order(folders: list[pathlib.Path]) -> None:
  one, two = (open_mixed(f'mix:{w}*folder:{folders[0]},1*folder:{folders[1]}').train for w in (1, 2))
  assert one.digest != two.digest and len(pickle.dumps(one)) < 20_000
  plain = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)
  assert_same(take(train(one, recipe=plain), 5), take(train(one, recipe=plain, in_memory=True), 5))


@pytest.mark.parametrize('weights', [(1, 1, 1), (.7, .3), (1, 997, 2), (1e-3, .999), (5,)])
def test_shares_fill_a_round(weights: tuple[float, ...]) -> None:
  found = mixture.shares(weights)
  assert sum(found) == 1000 and min(found) >= 1
  np.testing.assert_allclose(np.array(found) / 1000, np.array(weights) / sum(weights), atol=1.1e-3)


@pytest.mark.parametrize(('text', 'said'), [
    ('mix:folder:a', 'expected mix:WEIGHT*SOURCE,WEIGHT*SOURCE such as mix:0.7*folder:A,0.3*tfds:B, got mix:folder:a'),
    ('mix:0.5*digits', 'such as mix:0.7*folder:A,0.3*tfds:B, got mix:0.5'),
    ('mix:0.5*digits,x*digits', 'such as mix:0.7*folder:A,0.3*tfds:B, got mix:0.5'),
    ('mix:0.9999*digits,0.0001*digits', 'expected weights of at least 0.001 of their sum, got 0.0001 for digits'),
    ('mix:0*digits,1*digits', 'got 0 for digits'),
    ('mix:1*digits,1*mix:1*digits', "expected all sources of a mixture in one list, got 'mix:1*digits'"),
    ('mix:1*digits,1*nothing', 'data.source: expected one of digits, synthetic'),
])
def test_what_is_no_mixture_is_refused(text: str, said: str) -> None:
  with pytest.raises(UserError) as error:
    open_mixed(text)
  assert said in str(error.value)


def test_paths_may_hold_commas() -> None:
  assert [t.source for t in mixture.parse('0.5*folder:/a,b/c, 0.5*tfds:x')] == ['folder:/a,b/c', 'tfds:x']


def test_a_pinned_mixture_keeps_its_weights_however_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(hf, 'pin', lambda where, known=(): f'{where}@{"0" * 40}')
  at = '@' + '0' * 40
  assert opening.pin('mix:1281167*hf:a/b,50000.5*folder:c') == (
      f'mix:1281167*hf:a/b{at},50000.5*folder:c')
  assert opening.pin('mix:.0000125*hf:a/b,.0000125*folder:c') == f'mix:0.0000125*hf:a/b{at},0.0000125*folder:c'
  assert opening.pin('mix:0.5 * hf:a/b, 0.5 * folder:c') == f'mix:0.5*hf:a/b{at},0.5*folder:c'


def test_every_source_of_a_mixture_is_one_to_learn_classes_from(
    folders: list[pathlib.Path], tmp_path: pathlib.Path, write_split: Callable[..., None]) -> None:
  def learned(source: pathlib.Path) -> None:
    data = schema.Data(source=f'mix:0.5*folder:{folders[2]},0.5*folder:{source}',
                       mix_classes=schema.MixClasses.SEPARATE)
    opening.check_learnable(opening.open_split(data, 'train', image_px=(8, 8)), learner='Supervised')
  for year in ('2019', '2020'):
    write_split(tmp_path / 'years' / year, 6, classes=('cat', 'dog'))
  with pytest.raises(UserError, match='expected folders of classes, got folders with the same folders in each: 2019'):
    learned(tmp_path / 'years')
  write_split(tmp_path / 'captioned', 2, classes=('any',))
  names = [path.relative_to(tmp_path / 'captioned') for path in (tmp_path / 'captioned').rglob('*.*')]
  (tmp_path / 'captioned' / 'captions_train.jsonl').write_text(
      ''.join(f'{{"image": "{name}", "captions": ["a cat"]}}\n' for name in names))
  with pytest.raises(UserError, match='expected images with labels for Supervised, got folder:.*, whose images have n'):
    learned(tmp_path / 'captioned')


def test_the_classes_of_mixed_folders_are_in_no_known_order() -> None:
  def is_known(source: str) -> bool:
    data = schema.Data(source=source, mix_classes=schema.MixClasses.SEPARATE)
    return opening.is_order_known(('cat', 'dog', 'ant', 'bee'), data)
  assert not is_known('mix:0.5*folder:a,0.5*folder:b') and not is_known('mix:0.5*tfds:a,0.5*folder:b')
  assert is_known('mix:0.5*tfds:a,0.5*tfds:b')


def test_images_with_masks_are_not_mixed_with_others(folders: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
  for name in ('images', 'masks'):
    (tmp_path / name).mkdir()
    for number in range(3):
      (tmp_path / name / f'{number}.png').write_bytes(encode(random_image(number)))
  with pytest.raises(UserError, match=f'got masks:{tmp_path}/train, whose images have masks, beside folder:'):
    opening.open_split(schema.Data(source=f'mix:0.5*folder:{folders[2]},0.5*masks:{tmp_path}',
                                   mix_classes=schema.MixClasses.SEPARATE), 'train', image_px=(8, 8))
