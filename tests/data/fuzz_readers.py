"""Mutated files of data that are no images: each is read, or refused with a reason (`tests/fuzzing.py`).

`python -m tests.data.fuzz_readers READER FIRST LAST` does the cases of one of `READERS` below its working directory.
What a reader gives is counted: `read` is the number of usable examples, and `reasons` are those of the others.
"""
from __future__ import annotations

import functools
import io
import json
import pathlib
import shutil
import sys
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests import fuzzing
from tests.data import packed
from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import answers, loader, opening
from vit_jax.data.formats import array_record, tfrecord
from vit_jax.data.formats import example as messages
from vit_jax.data.image import masks, transform
from vit_jax.data.labels import classes, real
from vit_jax.data.source import Source
from vit_jax.jobs import prepare

NUM, CLASSES = 6, ('ant', 'bee', 'cow')
SEVERAL = 2  # of the mutations of values, beside one of bytes
Content = dict[str, bytes]
FIT = transform.eval_transform(schema.Recipe(), (8, 8), max_labels=3)


def image(number: int, extension: str = '.png') -> bytes:
  return encode(random_image(number, height=6, width=7), extension)


def usable(source: Source) -> tuple[int, list[str]]:
  """The number of usable examples, and the reasons of the others."""
  reasons = [reason for i in range(min(len(source), 40)) if (reason := loader.reason_bad(source, i, FIT))]
  [source.describe(i) for i in range(min(len(source), 3))]
  return min(len(source), 40) - len(reasons), reasons


def open_data(source: str, split: str = 'train', **settings: Any) -> tuple[int, list[str]]:
  data = schema.Data(source=source, max_labels=3, **settings)
  return usable(opening.check_labels(opening.open_split(data, split, image_px=(8, 8)), data))


# Each reader: what its folder holds, the files that are mutated, and what reads them.

def labels_files(kind: str) -> Content:
  pairs = [(f'{CLASSES[i % 3]}/{i}.png', [CLASSES[i % 3], CLASSES[i % 2]][:1 + i % 2]) for i in range(NUM)]
  lines = {'csv': lambda p, c: ','.join([p, *c]), 'tsv': lambda p, c: '\t'.join([p, *c]),
           'jsonl': lambda p, c: json.dumps({'image': p, 'labels': c})}[kind]
  return {f'labels.{kind}': '\n'.join(lines(*pair) for pair in pairs).encode(), **dict(zip(
      (path for path, _ in pairs), map(image, range(NUM)), strict=True))}


def read_labels(folder: pathlib.Path) -> tuple[int, list[str]]:
  return open_data(f'folder:{folder}', holdout=.34)


@functools.cache
def prepared_files(several: bool) -> Content:
  """A prepared dataset, made once by the program itself."""
  source, to = pathlib.Path(f'source{several}'), pathlib.Path(f'prepared{several}')
  for name, content in labels_files('csv').items():
    if several or not name.startswith('labels'):
      (source / name).parent.mkdir(parents=True, exist_ok=True)
      (source / name).write_bytes(content)
  prepare.run(to, data=f'folder:{source}')
  return {path.name: path.read_bytes() for path in to.iterdir()}


def prepared_of_one() -> Content:
  return prepared_files(False)


def prepared_of_several() -> Content:
  return prepared_files(True)


def read_prepared(folder: pathlib.Path) -> tuple[int, list[str]]:
  return open_data(f'array_record:{folder}')


def read_shards(folder: pathlib.Path) -> tuple[int, list[str]]:
  """Shards of any size, as the description then says."""
  info = json.loads((folder / array_record.INFO).read_text())
  for shards in info['splits'].values():
    for shard in shards:
      shard['num_bytes'] = (folder / shard['file']).stat().st_size
      shard['num_examples'] = min(shard['num_examples'], shard['num_bytes'])
  (folder / array_record.INFO).write_text(json.dumps(info))
  return read_prepared(folder)


def tfds_files(kind: str) -> Content:
  """A dataset as TFDS prepares it, with classes, several classes inside of a sequence, and text."""
  own = 'tensorflow_datasets.core.features.'
  label = {'classLabel': {'numClasses': '3'}, 'pythonClassName': f'{own}class_label_feature.ClassLabel'}
  features = {
      'image': {'image': {'dtype': 'uint8', 'encodingFormat': 'png', 'shape': {'dimensions': ['-1', '-1', '3']}},
                'pythonClassName': f'{own}image_feature.Image'},
      'label': label, 'file_name': {'pythonClassName': f'{own}text_feature.Text', 'text': {}}}
  name = f'animals-train.{kind}-00000-of-00001'
  info = {'fileFormat': kind, 'moduleName': 'animals', 'name': 'animals', 'version': '1.2.0', 'splits': [{
      'filepathTemplate': '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}', 'name': 'train', 'numBytes': '1000',
      'shardLengths': [str(NUM)]}]}
  everything = {'featuresDict': {'features': features}, 'pythonClassName': f'{own}features_dict.FeaturesDict'}
  return {'dataset_info.json': json.dumps(info, indent=1).encode(), 'label.labels.txt': '\n'.join(CLASSES).encode(),
          'features.json': json.dumps(everything, indent=1).encode(),
          name: shard(kind, [example(i) for i in range(NUM)])}


def example(number: int) -> bytes:
  return messages.serialize({'image': image(number), 'label': number % 3, 'file_name': f'{number}.png'.encode(),
                         'labels': [0, 1], 'name': f'{number}.png'.encode()})


def shard(kind: str, found: list[bytes]) -> bytes:
  """The records as a TFRecord or ArrayRecord file."""
  if kind == 'tfrecord':
    frames = [(len(one).to_bytes(8, 'little'), one) for one in found]
    return b''.join(size + tfrecord.mask(size) + one + tfrecord.mask(one) for size, one in frames)
  from array_record.python import array_record_module
  writer = array_record_module.ArrayRecordWriter('shard.part', 'group_size:1')
  for one in found:
    writer.write(one)
  writer.close()
  return pathlib.Path('shard.part').read_bytes()


def read_tfds(folder: pathlib.Path) -> tuple[int, list[str]]:
  return open_data('tfds:animals:1.2.0', data_dir=str(folder.parents[1]))


def tar_files() -> Content:
  found = [packed.Example(f'{i}', image(i), i % 3) for i in range(NUM)]
  return {'train-0.tar': packed.tar(packed.members(found[:4])),
          'train-1.tar': packed.tar(packed.members(found[4:]), tarfile.PAX_FORMAT)}


def read_tars(folder: pathlib.Path) -> tuple[int, list[str]]:
  """With labels as numbers, and as lists of names."""
  open_data(f'wds:{folder}', label_column='json/both')
  return open_data(f'wds:{folder}')


def record_files() -> Content:
  found = [packed.tf_example(packed.imagenet_features(packed.Example(f'{i}', image(i), i % 3))) for i in range(NUM)]
  return {'train-0.tfrecord': packed.tfrecord(found[:4]), 'train-1.tfrecord': packed.tfrecord(found[4:])}


def read_records(folder: pathlib.Path) -> tuple[int, list[str]]:
  """With labels as names, and as numbers."""
  open_data(f'tfrecord:{folder}', label_column='image/class/text')
  return open_data(f'tfrecord:{folder}', label_offset=1)


def mask_files(kind: str) -> Content:
  found, rng = {'classes.txt': '\n'.join(CLASSES).encode()}, np.random.default_rng(0)
  for number in range(3):
    values = rng.integers(0, 3, (6, 7)).astype(np.uint8)
    made, out = Image.fromarray(values), io.BytesIO()
    if kind == 'gif':
      made.putpalette(bytes(range(256)) * 3)
    made.save(out, {'png': 'PNG', 'gif': 'GIF', 'tif': 'TIFF', 'bmp': 'BMP'}[kind])
    found |= {f'images/{number}.png': image(number), f'masks/{number}.{kind}': out.getvalue()}
  return found


def read_masks(folder: pathlib.Path) -> tuple[int, list[str]]:
  source = opening.open_split(schema.Data(source=f'masks:{folder}', holdout=.3), 'train', image_px=(8, 8))
  values = masks.MaskValues(0, 255, max(1, len(source.class_names)))
  cut = masks.MaskedImages(source, schema.Recipe(), (8, 8), 0, 0, (2, 2), values)
  for index in range(len(source)):
    cut(index)
  return len(source), []


def map_files() -> Content:
  folder, rng = pathlib.Path('maps'), np.random.default_rng(0)
  if not folder.exists():
    info = answers.Info('folder:x', 'abc', NUM, (2, 2), 2, 3, 4, {'teacher': 't.npz'}, answers.LOGITS)
    answers.write(folder, info, lambda rows: (rng.integers(0, 3, (len(rows), 2, 2, 2)),
                                                 rng.normal(size=(len(rows), 2, 2, 2))), setting='--to')
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_maps(folder: pathlib.Path) -> tuple[int, list[str]]:
  maps = answers.Answers(folder)
  num = min(maps.info.num_examples, 40)
  maps.read(np.arange(num))
  maps.read_most_likely()
  return num, []


def class_files() -> Content:
  return {'classes.txt': b'# classes\nn01440764 tench, Tinca tinca\nn02708093 analog clock\n\nn3 bee\n7 x\n12\n',
          'map.txt': b'ant: n01440764; bee\nbee: 12\ncow: analog clock\n',
          'map.json': b'{"ant": "tench, Tinca tinca; bee", "bee": "12", "cow": "n02708093"}',
          'predictions.txt': b'ILSVRC2012_val_00000293.JPEG 65\nILSVRC2012_val_00000294.JPEG 970\n',
          'real.json': json.dumps([[1], [2, 3], []]).encode()}


def read_classes(folder: pathlib.Path) -> tuple[int, list[str]]:
  """All of them, as they do not depend on each other; those of the first that is refused."""
  network = classes.read(str(folder / 'classes.txt'))
  for name in ('map.txt', 'map.json'):
    classes.map_classes(CLASSES, network, path=str(folder / name), where='evals.x')
  for one in network[:3]:
    classes.find(network, one, num_classes=len(network))
  for read in (real.read, real.read_predictions):  # which never fit, as there are 50,000 of them
    try:
      read(str(folder / ('real.json' if read is real.read else 'predictions.txt')))
    except UserError as error:
      fuzzing.check_message(str(error))
  return len(network), []


READERS: dict[str, tuple[Callable[[], Content], Callable[[str], bool], Callable[[pathlib.Path], tuple[int, list[str]]]]]
READERS = {
    **{f'labels_{kind}': (functools.partial(labels_files, kind), lambda name: name.startswith('labels'), read_labels)
       for kind in ('csv', 'tsv', 'jsonl')},
    'info': (prepared_of_several, lambda name: name == 'info.json', read_prepared),
    'shards': (prepared_of_one, lambda name: name.endswith('array_record'), read_shards),
    'shards_of_several': (prepared_of_several, lambda name: name.endswith('array_record'), read_shards),
    'tfds': (functools.partial(tfds_files, 'tfrecord'), lambda name: name.endswith(('.json', '.txt')), read_tfds),
    'tfrecord': (functools.partial(tfds_files, 'tfrecord'), lambda name: '.tfrecord' in name, read_tfds),
    'wds': (tar_files, lambda name: name.endswith('.tar'), read_tars),
    'records': (record_files, lambda name: name.endswith('.tfrecord'), read_records),
    **{f'masks_{kind}': (functools.partial(mask_files, kind), lambda name: name.startswith(('masks', 'classes')),
                         read_masks) for kind in ('png', 'gif', 'tif', 'bmp')},
    'label_maps': (map_files, lambda name: True, read_maps),
    'classes': (class_files, lambda name: True, read_classes)}


# Mutations: those of bytes and texts, of JSON values, and of records in a shard that is whole.

def json_fields(rng: fuzzing.Rng, content: bytes) -> bytes:
  """A JSON file, or lines of JSON, with other values."""
  if content.count(b'\n{') > 1 or not content.strip().startswith(b'{'):
    lines = content.split(b'\n')
    at = int(rng.integers(len(lines)))
    lines[at] = json.dumps(fuzzing.mutate_json(rng, json.loads(lines[at]))).encode()
    return b'\n'.join(lines)
  return json.dumps(fuzzing.mutate_json(rng, json.loads(content))).encode()


def of_records(kind: str) -> Callable[[fuzzing.Rng, bytes], bytes]:
  def of_a_record(rng: fuzzing.Rng, content: bytes) -> bytes:
    """A whole shard with one record changed."""
    found = [example(i) for i in range(NUM)]
    at = int(rng.integers(NUM))
    match int(rng.integers(4)):
      case 0:
        found[at] = fuzzing.mutate(rng, found[at], fuzzing.OF_BYTES)[1]
      case 1:
        values = {'image': [image(0), b'', 3, [1, 2], b'\xff\xd8'], 'label': [-1, 3, 2**62, -2**63, b'ant', []],
                  'labels': [[-1], [3], list(range(1_000)), b'x', [2**62]], 'name': [b'\xff\0', 3, b'../a', b'a\nb']}
        name = str(rng.choice(sorted(values)))
        value = values[name][int(rng.integers(len(values[name])))]
        found[at] = messages.serialize({'image': image(1), 'label': 1, 'labels': [1], 'name': b'x', name: value})
      case 2:
        found[at] = messages.serialize({name: value for name, value in (
            ('image', image(2)), ('label', 1), ('labels', [1]), ('name', b'x')) if rng.random() < .6})
      case _:
        found = [found[int(i)] for i in rng.integers(0, NUM, int(rng.integers(1, 2 * NUM)))]
    return shard(kind, found)
  return of_a_record


def of_members(rng: fuzzing.Rng, content: bytes) -> bytes:
  """A whole archive with members changed, left out, repeated, exchanged, of other names or kinds."""
  found = packed.members([packed.Example(f'{i}', image(i), i % 3) for i in range(4)])
  links = {}
  for _ in range(int(rng.integers(1, 4))):
    at = int(rng.integers(len(found)))
    name, data = found[at]
    match int(rng.integers(6)):
      case 0:
        found[at] = name, fuzzing.mutate(rng, data, fuzzing.OF_TEXT)[1]
      case 1:
        del found[at]
      case 2:
        found.insert(int(rng.integers(len(found))), found[at])
      case 3:
        names = ('', '.', '/', '..', '../a.png', '/etc/a.png', 'a' * 300 + '.png', 'ü.png', '\n.png', '0.PNG', '0.',
                 '.cls', '0.json.cls', '__a__', 'a/', '0.cls', '0.png')
        found[at] = str(rng.choice(names)), data
      case 4:
        links[name] = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE][
            int(rng.integers(5))]
      case _:
        values = (b'-1', b'3', b'9' * 30, b'', b'[]', b'{"label": true}', b'{"both": ["ant", 3]}', b'{"both": []}',
                  b'{"both": "ant"}', b'{"both": [null]}', b'{"both": ["\\ud800"]}', b'\xff' * 100, b'[' * 5000)
        found[at] = name, values[int(rng.integers(len(values)))]
  kinds = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
  return packed.tar(found, kinds[int(rng.integers(3)) if all(len(n) < 99 for n, _ in found) else 1], links)


def of_features(rng: fuzzing.Rng, content: bytes) -> bytes:
  """A whole file with features of other values, kinds or names, or with a record that is changed as bytes."""
  found = []
  for number in range(4):
    features = packed.imagenet_features(packed.Example(f'{number}', image(number), number % 3))
    for _ in range(int(rng.integers(3))):
      name = str(rng.choice(sorted(features)))
      values = (b'', image(0), 3, -1, 2**63 - 1, [1, 2], [], .5, [b'ant', b'bee'], b'\xff\xfe', 'a\nb',
                list(range(9_000)))
      match int(rng.integers(3)):
        case 0:
          features[name] = values[int(rng.integers(len(values)))]
        case 1:
          del features[name]
        case _:
          features[str(rng.choice(['', 'ü', 'x' * 300, 'image/class/label ', '\x00']))] = features.pop(name)
    found.append(packed.tf_example(features))
    if rng.random() < .3:
      found[-1] = fuzzing.mutate(rng, found[-1], fuzzing.OF_BYTES)[1]
  return packed.tfrecord(found)


def mask_values(rng: fuzzing.Rng, content: bytes) -> bytes:
  """A whole mask of another mode, size, range, or number of frames."""
  mode = str(rng.choice(['1', 'L', 'P', 'I', 'F', 'I;16', 'RGB', 'RGBA', 'LA', 'CMYK', 'PA']))
  size = [(7, 6), (6, 7), (1, 1), (7, 600), (9, 9)][int(rng.integers(5))]
  values = rng.integers(0, 256, size[::-1]).astype(np.uint8)
  made = Image.fromarray(values.astype(np.uint16) * 200) if mode == 'I;16' else Image.fromarray(values).convert(
      'RGB' if mode == 'PA' else mode)
  out = io.BytesIO()
  kind = str(rng.choice(['PNG', 'TIFF', 'GIF', 'BMP', 'JPEG', 'WEBP']))
  frames: dict[str, Any] = {'save_all': True, 'append_images': [made] * 3} if rng.random() < .3 else {}
  try:
    made.save(out, kind, **frames)
  except (OSError, ValueError, KeyError):
    return fuzzing.flipped(rng, content)
  return out.getvalue()


def mutations(reader: str, name: str) -> list[Callable[[fuzzing.Rng, bytes], bytes]]:
  if name.endswith(('.json', '.jsonl')) and name != 'real.json':
    return [*fuzzing.OF_TEXT, *[json_fields] * 2 * len(fuzzing.OF_TEXT)]
  if reader == 'records':
    return [*fuzzing.OF_BYTES, *[of_features] * 8]
  if '.tfrecord' in name or name.endswith('array_record'):
    return [*fuzzing.OF_BYTES, *[of_records('tfrecord' if '.tfrecord' in name else 'array_record')] * 6]
  if name.endswith('.tar'):
    return [*fuzzing.OF_BYTES, *[of_members] * 6]
  if name.startswith('masks/'):
    return [*fuzzing.OF_BYTES, *[mask_values] * 3]
  return list(fuzzing.OF_BYTES if name.endswith('.npy') else fuzzing.OF_TEXT)


def case(reader: str, number: int) -> fuzzing.Result:
  """What becomes of the files of a reader with one of them mutated."""
  files, is_mutated, read = READERS[reader]
  content, rng = dict(files()), np.random.default_rng([number, sorted(READERS).index(reader)])
  names = sorted(filter(is_mutated, content))
  name = names[number % len(names)]
  mutation, content[name] = fuzzing.mutate(rng, content[name], mutations(reader, name))
  folder = pathlib.Path(f'{number}').absolute() / ('animals/1.2.0' if reader.startswith('tf') else 'data')
  for one, data in content.items():
    (folder / one).parent.mkdir(parents=True, exist_ok=True)
    (folder / one).write_bytes(data)
  found = fuzzing.outcome(lambda: read(folder))
  shutil.rmtree(f'{number}')
  if 'read' in found:
    found['read'], found['reasons'] = found['read']
  return {'file': name, 'mutation': mutation, **found}


def main(reader: str, *numbers: str) -> None:
  files, _, read = READERS[reader]
  folder = pathlib.Path('whole').absolute() / ('animals/1.2.0' if reader.startswith('tf') else 'data')
  for one, data in files().items():
    (folder / one).parent.mkdir(parents=True, exist_ok=True)
    (folder / one).write_bytes(data)
  num, reasons = read(folder)
  assert num and not reasons, reasons
  fuzzing.main(functools.partial(case, reader), numbers)


if __name__ == '__main__':
  main(*sys.argv[1:])
