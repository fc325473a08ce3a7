"""What a person can observe of the program, as digests: the only file here that knows how the program is built inside.

Everything goes through a config with the overrides of a command line, so these tests hold for any implementation of the
data path, the record and the checkpoints. `stored` compares a digest with the one in `digests.json`. Digests of pixels
are those of one version of OpenCV and NumPy, and digests of parameters those of one version of jax on processors with
AVX2. With other versions, the digest of a second computation is compared instead. With
`VIT_JAX_GOLDEN=write` they are stored anew: review each changed line.
"""
from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cv2
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import files, schema
from vit_jax.core import numerics
from vit_jax.core.types import Shard
from vit_jax.data import answers, opening
from vit_jax.data import loader as loaders
from vit_jax.data.device import prepare
from vit_jax.data.source import Source
from vit_jax.jobs import build
from vit_jax.record import checkpoint_files, machine

DIGESTS = pathlib.Path(__file__).with_name('digests.json')
PIXELS = {'numpy': np.__version__, 'opencv': cv2.__version__}
Batches = list[dict[str, np.ndarray]]


def stored(name: str, make: Callable[[], str], versions: Mapping[str, str] = PIXELS) -> None:
  """Compares the digest that `make` computes with the stored one, or with a second one where versions differ.

  With `VIT_JAX_GOLDEN=write` the digest is stored.
  """
  known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
  found = make()
  if os.environ.get('VIT_JAX_GOLDEN') == 'write':
    known[name] = {'digest': found, 'versions': dict(versions)}
    DIGESTS.write_text(json.dumps(known, indent=1, sort_keys=True) + '\n')
    return
  assert name in known, f'{name}: no digest is stored. Run with VIT_JAX_GOLDEN=write and review the change.'
  expected = known[name]['digest'] if known[name]['versions'] == dict(versions) else make()
  assert found == expected, name


def processor() -> str:
  """Returns family, model and stepping of the processor, where Linux lists them; its name may be that of several."""
  text = machine.CPUINFO.read_text() if machine.CPUINFO.is_file() else ''
  found = [re.search(rf'^{field}\s*: *(.*)$', text, re.M) for field in ('vendor_id', 'cpu family', 'model', 'stepping')]
  return ' '.join(one[1] for one in found if one) or machine.cpu_model()


def read_config(*overrides: str, base: str = 'from_folder') -> schema.Config:
  """Returns a config with overrides such as `data.source=folder:x`."""
  return files.load(base, list(overrides))


def train_batches(config: schema.Config, steps: range, *, host: int = 0, num_hosts: int = 1) -> Batches:
  """Returns the training batches of some steps, of which this host makes its rows, as the train step gets them."""
  data = build.open_data(config)
  loader = build.train_loader(config, data, Shard((host,), num_hosts))
  try:
    return [copied(batch) for batch in itertools.islice(loader.batches(steps.start), len(steps))]
  finally:
    loader.close()


def described(source: str, split: str) -> list[str]:
  """Returns the description of each example of a split, in its order: the path of the file in a folder."""
  opened = opening.open_split(schema.Data(source=source), split, image_px=(8, 8))
  return [opened.describe(row) for row in range(len(opened))]


def eval_batches(config: schema.Config, *, batch_size: int = 8, host: int = 0, num_hosts: int = 1) -> Batches:
  """Returns the batches of one pass over the evaluation split, of which this host makes its rows."""
  source = open_split(config, config.data.eval_split)
  recipe = build.with_orientation(config, source).data.recipe
  loader = loaders.eval_loader(source, recipe=recipe, image_px=config.image_px, batch_size=batch_size,
                               shard=Shard((host,), num_hosts), threads=2)
  try:
    return [copied(batch) for batch in loader.batches()]
  finally:
    loader.close()


def open_split(config: schema.Config, split: str) -> Source:
  return opening.open_split(config.data, split, image_px=config.image_px)


def class_names(config: schema.Config, *, order: tuple[str, ...] = ()) -> tuple[str, ...]:
  """Returns the classes of the data; `order` has those of a run that resumes."""
  return build.open_data(config, order=order).class_names


def records(config: schema.Config, split: str) -> Batches:
  """Returns everything that a source stores of each example of a split, in its order: bytes, labels, mask, captions."""
  source, made = open_split(config, split), []
  for row, record in enumerate(source.read(range(len(source)))):
    assert record.labels == source.labels(row)
    image = record.image if isinstance(record.image, np.ndarray) else np.frombuffer(record.image, np.uint8)
    made.append({'image': image, 'labels': np.array(record.labels, np.int64),
                 'mask': np.frombuffer(record.mask or b'', np.uint8),
                 'texts': np.frombuffer('\n'.join(source.captions(row)).encode(), np.uint8)})
  names = np.frombuffer('\n'.join(source.class_names).encode(), np.uint8)
  return [{'names': names}, *made]


def on_device(config: schema.Config, batches: Batches, *, num_classes: int, in_memory: bool = False) -> Batches:
  """Returns training batches as the objective gets them at steps 0, 1, ...: cropped, mixed and normalized."""
  made = jax.jit(prepare.prepare_train(config.data.recipe, num_classes=num_classes, on_device_geometry=in_memory))
  found = []
  for step, batch in enumerate(batches):
    keys = numerics.split_key(jax.random.fold_in(jax.random.key(config.seed), step), 'prepare', 'loss')
    found.append(copied(made(jax.tree.map(jnp.asarray, batch), keys['prepare'], jnp.asarray(step))))
  return found


def write_answers(folder: pathlib.Path, config: schema.Config, split: str, *, num_classes: int, logits: bool) -> None:
  """Writes what a teacher says about each image of a split: three classes of ten with their scores, drawn."""
  source, rng = open_split(config, split), np.random.default_rng(3)
  scores = np.sort(rng.dirichlet(np.full(num_classes, .3), len(source)))[:, ::-1][:, :3].astype(np.float16)
  classes = np.argsort(rng.uniform(size=(len(source), num_classes)))[:, :3]
  info = answers.Info(source.name, source.digest, len(source), (1, 1), 3, num_classes, 100, {'teacher': 'teacher'},
                         answers.LOGITS if logits else answers.PROBABILITIES)
  answers.write(folder, info, lambda rows: tuple(
      one[rows.start:rows.stop, None, None] for one in (classes, scores)), setting='--to')  # type: ignore[arg-type,return-value]


def copied(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name: np.array(value) for name, value in batch.items()}


def joined(parts: Iterable[Batches]) -> Batches:
  """Returns the global batches of the parts of all hosts, in the order of the hosts."""
  return [{name: np.concatenate([one[name] for one in batch]) for name in batch[0]}
          for batch in zip(*parts, strict=True)]


def digest(batches: Iterable[Mapping[str, np.ndarray]]) -> str:
  """Returns a digest of names, types, shapes and bits."""
  found = hashlib.sha256()
  for batch in batches:
    for name in sorted(batch):
      value = np.ascontiguousarray(batch[name])
      found.update(f'{name} {value.dtype} {value.shape}'.encode())
      found.update(value.tobytes())
  return found.hexdigest()[:32]


def sketch(batches: Batches) -> list[float]:
  """Returns the mean and a weighted mean of each floating array, which other processors round differently."""
  values = [value.astype(np.float64).ravel() for batch in batches for _, value in sorted(batch.items())
            if np.issubdtype(value.dtype, np.floating)]
  return [float(number) for value in values for number in (
      np.abs(value).mean(), (value * np.cos(np.arange(value.size))).mean())]


def text_digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def state_digests(workdir: pathlib.Path) -> dict[str, str]:
  """Returns the digests of the parts of the train state that the latest checkpoint of a run has saved."""
  latest = max((path for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
  found = checkpoint_files.read_meta(latest)['digests']
  return {name: found[name] for name in sorted(found)}


def known(name: str, value: Any) -> Any:
  """Returns the stored numbers of this name; `value` is stored with `VIT_JAX_GOLDEN=write`."""
  numbers = json.loads(DIGESTS.read_text())
  if os.environ.get('VIT_JAX_GOLDEN') == 'write':
    numbers[name] = value
    DIGESTS.write_text(json.dumps(numbers, indent=1, sort_keys=True) + '\n')
  return numbers[name]
