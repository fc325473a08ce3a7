"""One set of images in every format: the same batches bit for bit, for any number of hosts, and from any step on.

The formats are read from files and, where they can be, from a bucket, also by a process that may open 64 files.
`VIT_JAX_TEST_IMAGES=FOLDER` is a folder of real images, `FOLDER/train/CLASS/*`, for a slow test with the first 5,000.
"""
from __future__ import annotations

import hashlib
import itertools
import logging
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import buckets
import numpy as np
import pytest
import runs

from tests.data import packed, parquets
from tests.data.images import random_image
from tests.data.packed import Example
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, Shard
from vit_jax.data import content, loader, opening, order, storage
from vit_jax.data.image import decode
from vit_jax.data.source import Source, first_label, read_one, take
from vit_jax.jobs import prepare

FOUND = packed.examples(41)
BATCH = 8
REMOTE = ('array_record', 'parquet', 'tfrecord', 'wds')
FORMATS = ('folder', *REMOTE, *(f'gs://{name}' for name in REMOTE))
SETTINGS = {'wds': {'label_column': 'json/label'}, 'tfrecord': {'label_column': 'image/class/text'}}
Open = Callable[[str], Source]


def write(root: pathlib.Path, found: Sequence[Example], *, shards: int = 3) -> None:
  """Writes examples in every format, in the order of the folder."""
  for key, image, label in found:
    path = root / 'folder' / 'train' / packed.NAMES[label] / f'{key}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)
  write_packed(root, shards=shards)


def write_packed(root: pathlib.Path, *, shards: int) -> None:
  """Writes the images of `root/folder` in the other formats, in their order; labels are names."""
  folder = opening.open_split(schema.Data(source=f'folder:{root}/folder'), 'train', image_px=(8, 8))
  in_order = [Example(pathlib.Path(folder.describe(i)).stem, bytes(read_one(folder, i).image), first_label(folder, i))
              for i in range(len(folder))]
  packed.write_tars(root / 'wds', 'train', in_order, shards, names=folder.class_names)
  packed.write_tfrecords(root / 'tfrecord', 'train', in_order, shards, names=folder.class_names)
  parquets.write(root / 'parquet', 'train', in_order, shards, names=folder.class_names)
  prepare.run(root / 'array_record', data=f'wds:{root}/wds', label_column='json/label', splits=['train'],
              shards=shards)


def open_format(root: pathlib.Path, name: str, bucket: buckets.Server | None = None) -> Source:
  """Opens a format, such as `wds` or `gs://wds`, in the order of the folder."""
  kind = name.removeprefix('gs://')
  where = str(root / kind)
  if kind != name:
    where = f'gs://formats{root}/{kind}'
    if bucket and not bucket.names(where):
      for path in (path for path in (root / kind).iterdir() if path.is_file()):
        bucket.generation += 1
        bucket.objects[f'{where.removeprefix("gs://")}/{path.name}'] = (bucket.generation, path.read_bytes())
  source = opening.open_split(schema.Data(source=f'{kind}:{where}', **SETTINGS.get(kind, {})), 'train', image_px=(8, 8))
  if kind != 'array_record':
    return source
  stored = order.Shuffled(len(source), 0)(np.arange(len(source)))  # as `prepare` stores them
  return take(source, np.argsort(stored), name=source.name)


@pytest.fixture(autouse=True)
def own_state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Nothing that another test has kept."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(storage, '_state', storage._State(storage.Settings()))


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  found = tmp_path_factory.mktemp('formats')
  write(found, FOUND)
  return found


@pytest.fixture
def opened(root: pathlib.Path, bucket: buckets.Server) -> Open:
  return lambda name: open_format(root, name, bucket)


def batches(source: Source, hosts: int, numbers: range, *, most_bad: int = 0) -> list[Batch]:
  """Global batches, of which each host makes its rows, begun anew at the first step."""
  parts = []
  for host in range(hosts):
    made = loader.train_loader(
        source, recipe=schema.Recipe(flip=True), image_px=(8, 10), batch_size=BATCH, seed=3,
        shard=Shard((host,), hosts), workers=0, threads=2, in_memory=False, max_bad_images=most_bad)
    parts.append([{k: np.array(v) for k, v in b.items()}
                  for b in itertools.islice(made.batches(numbers.start), len(numbers))])
    made.close()
  return [{k: np.concatenate([part[i][k] for part in parts]) for k in parts[0][0]} for i in range(len(numbers))]


def check_same(found: list[Batch], expected: list[Batch]) -> None:
  for one, other in zip(found, expected, strict=True):
    assert one.keys() == other.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])


def digest(found: list[Batch]) -> str:
  made = hashlib.sha256()
  for batch in found:
    for name, values in sorted(batch.items()):
      made.update(f'{name} {values.dtype} {values.shape} '.encode() + np.ascontiguousarray(values).tobytes())
  return made.hexdigest()


@pytest.mark.parametrize('name', FORMATS)
def test_every_format_gives_the_batches_of_the_folder_from_any_step_on_and_for_any_number_of_hosts(
    name: str, opened: Open) -> None:
  whole = batches(opened('folder'), 1, range(12))  # two epochs and a half
  check_same(batches(opened(name), 1, range(12)), whole)
  check_same(batches(opened(name), 2, range(7, 12)), whole[7:])
  check_same(batches(opened(name), 4, range(9, 12)), whole[9:])


@pytest.mark.parametrize('name', FORMATS)
def test_every_format_has_the_content_of_the_folder(name: str, opened: Open) -> None:
  assert content.read(opened(name)) == content.read(opened('folder'))
  assert opened(name).class_names == packed.NAMES


def test_prepared_examples_keep_names_without_the_folder(opened: Open) -> None:
  source = opened('array_record')
  names = {source.describe(i).rpartition('(')[2] for i in range(len(source))}
  assert '/' in (first := min(names)) and first.startswith('set-train-000.tar/') and len(names) == len(FOUND)


def test_an_image_that_is_damaged_is_counted_and_replaced_alike_in_every_format(
    tmp_path: pathlib.Path, bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  damaged = {3: FOUND[3].image[:-40], 7: FOUND[7].image[:50] + bytes(60) + FOUND[7].image[110:]}
  write(tmp_path, [e._replace(image=damaged.get(i, e.image)) for i, e in enumerate(FOUND)])
  found = {}
  for name in FORMATS:
    caplog.clear()
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
      found[name] = digest(batches(open_format(tmp_path, name, bucket), 1, range(12), most_bad=10))
    assert sum('bad image' in one.getMessage() for one in caplog.records) == len(damaged), name
  assert len(set(found.values())) == 1, found


def test_an_example_that_is_stored_twice_counts_twice_in_every_format(tmp_path: pathlib.Path,
                                                                      bucket: buckets.Server) -> None:
  write(tmp_path, [*FOUND, *(e._replace(key=f'{e.key}_') for e in FOUND[:4])])  # copies follow their originals
  for kind in ('wds', 'tfrecord'):  # under the same key
    for path in (path for path in (tmp_path / kind).iterdir() if path.is_file()):
      if kind == 'wds':
        path.write_bytes(packed.renamed(path.read_bytes(), lambda name: name.replace('_.', '.')))
  whole = digest(batches(open_format(tmp_path, 'folder'), 1, range(12)))
  for name in FORMATS:
    source = open_format(tmp_path, name, bucket)
    assert len(source) == len(FOUND) + 4 and digest(batches(source, 1, range(12))) == whole, name


def test_a_member_that_was_renamed_is_a_key_without_an_image_and_an_image_without_a_label(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  write(tmp_path, FOUND)
  for path in (tmp_path / 'wds').glob('*.tar'):
    path.write_bytes(packed.renamed(path.read_bytes(), lambda name: name.replace('000004.png', 'x.png')))
  source = open_format(tmp_path, 'wds')
  assert len(source) == len(FOUND) and 'keys without an image (2)' in caplog.text  # before and after it
  whole = batches(open_format(tmp_path, 'folder'), 1, range(5))
  renamed = batches(source, 1, range(5), most_bad=1)
  same = [np.array_equal(one['image'][row], other['image'][row])
          for one, other in zip(whole, renamed, strict=True) for row in range(BATCH)]
  assert same.count(False) == 1  # its first use in an epoch has another image


def test_files_of_webdataset_and_tensorflow_are_read(tmp_path: pathlib.Path) -> None:
  stored = np.load(pathlib.Path(__file__).with_name('golden_shards.npz'))
  for name in stored.files:
    kind = 'wds' if name.endswith('.tar') else 'tfrecord' if '-of-' in name else 'compressed'
    (tmp_path / kind).mkdir(exist_ok=True)
    (tmp_path / kind / name.replace('.gz', '.tfrecord')).write_bytes(stored[name].tobytes())
  tars, records = (open_format(tmp_path, name) for name in ('wds', 'tfrecord'))
  assert list(tars.read(range(9))) == list(records.read(range(9))) and len(tars) == len(records) == 9
  for i, example in enumerate(packed.examples(9)):
    np.testing.assert_array_equal(decode.decode(read_one(records, i).image), random_image(i))
    assert first_label(records, i) == example.label
    assert tars.captions(i) == (f'an image of {packed.NAMES[example.label]}',)  # type: ignore[attr-defined]
    assert records.describe(i).endswith(f'({example.key}.png)')
  with pytest.raises(UserError, match='train.tfrecord: expected a complete TFRecord file, got a file compressed by gz'):
    opening.open_split(schema.Data(source=f'tfrecord:{tmp_path}/compressed'), 'train', image_px=(8, 8))


READ = """
import sys
from tests.data import test_formats
for name in test_formats.FORMATS:
  source = test_formats.open_format(test_formats.pathlib.Path(sys.argv[1]), name)
  print(name, len(source), test_formats.digest(test_formats.batches(source, 1, range(int(sys.argv[2])))))
"""


def read_with_few_files(root: pathlib.Path, bucket: buckets.Server, num_batches: int) -> dict[str, tuple[str, str]]:
  """Number and digest of the batches of each format, read by a process that may open 64 files."""
  for name in FORMATS:
    open_format(root, name, bucket)  # which uploads it
  environment = runs.environment() | bucket.environment() | {'PYTHONPATH': os.pathsep.join(['.', 'tests'])}
  done = subprocess.run(['bash', '-c', 'ulimit -n 64; exec "$@"', 'bash', sys.executable, '-c', READ, str(root),
                         str(num_batches)], cwd=runs.ROOT, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  return {name: (num, found) for name, num, found in (line.split() for line in done.stdout.splitlines())}


@pytest.mark.slow(reason='15 s: 100 files of each format, and a process of its own')
def test_sixty_four_open_files_are_enough_for_every_format(tmp_path: pathlib.Path, bucket: buckets.Server) -> None:
  write(tmp_path, packed.examples(200), shards=100)
  whole = digest(batches(open_format(tmp_path, 'folder'), 1, range(60)))
  assert read_with_few_files(tmp_path, bucket, 60) == dict.fromkeys(FORMATS, ('200', whole))


@pytest.mark.timeout(1800)
@pytest.mark.slow(reason='3 min with 5,000 real images')
def test_real_images_give_the_same_batches_in_every_format(tmp_path: pathlib.Path, bucket: buckets.Server) -> None:
  where = os.environ.get('VIT_JAX_TEST_IMAGES', '')
  if not where:
    pytest.skip('needs real images: VIT_JAX_TEST_IMAGES=FOLDER, with FOLDER/train/CLASS/*')
  paths = sorted(pathlib.Path(where, 'train').glob('*/*'))
  for path in paths[::max(1, len(paths) // 5_000)][:5_000]:
    (tmp_path / 'folder' / 'train' / path.parent.name).mkdir(parents=True, exist_ok=True)
    shutil.copy(path, tmp_path / 'folder' / 'train' / path.parent.name / path.name)
  write_packed(tmp_path, shards=8)
  num = min(len(paths), 5_000)
  steps = num // BATCH + 10
  whole = digest(batches(open_format(tmp_path, 'folder'), 1, range(steps)))
  for name in FORMATS[1:]:
    made = loader.train_loader(
        open_format(tmp_path, name, bucket), recipe=schema.Recipe(flip=True), image_px=(8, 10), batch_size=BATCH,
        seed=3, shard=Shard((0,), 1), workers=2, threads=1, in_memory=False, max_bad_images=0)
    found = [{k: np.array(v) for k, v in b.items()} for b in itertools.islice(made.batches(0), steps)]
    made.close()
    assert digest(found) == whole, name
  assert read_with_few_files(tmp_path, bucket, steps) == dict.fromkeys(FORMATS, (str(num), whole))
