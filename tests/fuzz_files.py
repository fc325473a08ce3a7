"""Mutated files of persons that are not images or weights alone: adapters, configs, tokenizers, names of classes.

`python -m tests.fuzz_files KIND FIRST LAST` reads the cases with these numbers, and prints what became of each
(`fuzzing.py`).
"""
from __future__ import annotations

import functools
import json
import pathlib
import shutil
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import fuzzing
from tests.fuzzing import Result, Rng

WEIGHTS = pathlib.Path(__file__).parent / 'weights'
PLACE = pathlib.Path('place')
PYTHON = b"""from vit_jax.config import schema as s
from vit_jax.recipes import sizes

def get_config(arguments: str = '') -> s.Config:
  given = s.parse_arg(arguments, size=('S/16', 'B/16'))
  config = s.Config(
      name='mine', length='90 epochs', batch_size=1024, image_px=(224, 224),
      data=s.Data(source='folder:photos', recipe=s.Recipe(crop_area=(0.2, 1.))),
      model=sizes.vit(given['size']), objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.1),
      optimizer=s.AdamW(lr=1e-3, weight_decay=0.1, schedule=s.Schedule(s.Decay.COSINE, warmup='5 epochs')),
      evals={'test': s.TopK(every='1 epoch')})
  config.optimizer.lr = 3e-4
  return config
"""
CLASSES = ''.join(f'n{i:08d} name {i}, synonym {i}\n' for i in range(40)).encode()


@functools.cache
def golden() -> Any:
  return np.load(WEIGHTS / 'golden_peft.npz')


def part(kind: str, case: str) -> dict[str, np.ndarray]:
  prefix = f'{case}/{kind}/'
  return {name.removeprefix(prefix): golden()[name] for name in golden() if name.startswith(prefix)}


# Adapters.

@functools.cache
def adapter_files(case: str) -> dict[str, bytes]:
  """The files of a folder of adapters for the weights in `base`, which is written beside it."""
  from vit_jax.weights import files
  PLACE.mkdir(exist_ok=True)
  base = pathlib.Path('base').absolute()
  base.mkdir(exist_ok=True)
  files.write_safetensors(base / f'{case}.safetensors', part('base', case))
  files.write_safetensors(PLACE / 'a', part('adapter', case))
  tensors = (PLACE / 'a').read_bytes()
  config = json.loads(str(golden()[f'{case}/config'])) | {'base_model_name_or_path': str(base / f'{case}.safetensors')}
  side = {'class_names': ['a', 'b', 'c'], 'preprocess': {
      'mean': [.5, .5, .5], 'std': [.5, .5, .5], 'resize': 18, 'image_px': [16, 16], 'antialias': True,
      'interpolation': 'bicubic', 'geometry': 'torchvision'}}
  return {'adapter_config.json': json.dumps(config).encode(), 'adapter_model.safetensors': tensors,
          'weights.json': json.dumps(side).encode()}


def changed_tensors(rng: Rng, content: bytes, case: str) -> bytes:
  """A whole file of tensors with other names, shapes or values."""
  from vit_jax.weights import files
  found = part('adapter', case)
  for _ in range(int(rng.integers(1, 3))):
    name = str(rng.choice(sorted(found)))
    x = found[name]
    match int(rng.integers(7)):
      case 0:
        del found[name]
      case 1:
        found[name] = x.reshape(-1) if rng.random() < .5 else x.reshape(1, *x.shape)
      case 2:
        found[name] = x[..., :0] if rng.random() < .5 else x[:0]
      case 3:
        found[name] = np.repeat(x, 3, int(rng.integers(x.ndim)))
      case 4:
        found[name.replace('lora', str(rng.choice(['lora_X', 'ia3', 'lora_embedding'])))] = x
      case 5:
        found[name] = x.T
      case _:
        found[name] = np.full_like(x, rng.choice([np.nan, np.inf, 1e38, 0.]))
  files.write_safetensors(PLACE / 'a', found)
  return (PLACE / 'a').read_bytes()


def adapter(rng: Rng) -> Result:
  from vit_jax.core import trees
  from vit_jax.weights import loading
  case = str(rng.choice(['timm_lora', 'timm_dora']))
  content = dict(adapter_files(case))
  name = str(rng.choice(['adapter_config.json', 'adapter_config.json', 'adapter_model.safetensors', 'weights.json']))
  if name.endswith('.json') and rng.random() < .7:
    mutation, content[name] = 'json', as_json(fuzzing.mutate_json(rng, json.loads(content[name])))
  elif name.endswith('.json'):
    mutation, content[name] = fuzzing.mutate(rng, content[name], fuzzing.OF_TEXT)
  elif rng.random() < .5:
    mutation, content[name] = 'tensors', changed_tensors(rng, content[name], case)
  else:
    length, = struct.unpack('<Q', content[name][:8])
    mutation, header = fuzzing.mutate(rng, content[name][8:8 + length], fuzzing.OF_TEXT)
    content[name] = struct.pack('<Q', len(header)) + header + content[name][8 + length:]
  folder = PLACE / 'adapter'
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  for one, data in content.items():
    (folder / one).write_bytes(data)
  return {'file': name, 'mutation': mutation, **fuzzing.outcome(lambda: {
      path: list(x.shape) for path, x in trees.flatten(loading.load(str(folder), model='heads=2').params).items()})}


def as_json(value: Any) -> bytes:
  return json.dumps(value).encode(errors='replace')


# Configs.

@functools.cache
def configs() -> tuple[bytes, ...]:
  from vit_jax.config import engine, files
  names = ('digits', 'mae_i1k', 'from_folder:R50+B/16')
  return tuple(engine.to_json(files.load(name, [])).encode() for name in names)


def config_json(rng: Rng) -> Result:
  from vit_jax.config import check, files
  content = configs()[int(rng.integers(len(configs())))]
  if rng.random() < .7:
    mutation, content = 'json', as_json(fuzzing.mutate_json(rng, json.loads(content)))
  else:
    mutation, content = fuzzing.mutate(rng, content, fuzzing.OF_TEXT)
  path = pathlib.Path('config.json')
  path.write_bytes(content)
  return {'mutation': mutation, **fuzzing.outcome(lambda: check.check(files.load(str(path), [])))}


def config_python(rng: Rng) -> Result:
  """The code of a config: messages are those of Python, for its author, with the line."""
  from vit_jax.config import check, files
  mutation, content = fuzzing.mutate(rng, PYTHON, fuzzing.OF_TEXT)
  path = pathlib.Path('mine.py')
  path.write_bytes(content)
  return {'mutation': mutation, **fuzzing.outcome(lambda: check.check(files.load(str(path), [])))}


# Tokenizers and names of classes.

def tokenizer(name: str, family: str, folder: str, rng: Rng) -> Result:
  from vit_jax.data.text.tokenizer import Tokenizer
  PLACE.mkdir(exist_ok=True)
  for path in (WEIGHTS / 'text_files' / folder).iterdir():
    if path.is_file():
      shutil.copy(path, PLACE / path.name)
  target = 'merges.txt' if name == 'vocab.json' and rng.random() < .3 else name
  content = (PLACE / target).read_bytes()
  if target.endswith('.json') and rng.random() < .6:
    mutation, content = 'json', as_json(fuzzing.mutate_json(rng, json.loads(content)))
  else:
    mutation, content = fuzzing.mutate(rng, content, fuzzing.OF_BYTES if target.endswith('.model') else fuzzing.OF_TEXT)
  (PLACE / target).write_bytes(content)
  return {'mutation': mutation, **fuzzing.outcome(lambda: Tokenizer(PLACE / name, family=family, length=16)(
      ['a photo of a cat.', '', 'é\U0001f600 ' * 30]).ids.tolist())}


def classes(rng: Rng) -> Result:
  from vit_jax.data.labels import classes as names
  mutation, content = fuzzing.mutate(rng, CLASSES, fuzzing.OF_TEXT)
  path = pathlib.Path('classes.txt')
  path.write_bytes(content)
  return {'mutation': mutation, **fuzzing.outcome(lambda: len(names.read(str(path), setting='--classes')))}


KINDS: dict[str, Callable[[Rng], Result]] = {
    'adapter': adapter, 'config_json': config_json, 'config_python': config_python, 'classes': classes,
    'tokenizer_model': functools.partial(tokenizer, 'spiece.model', 'siglip', 'siglip'),
    'tokenizer_json': functools.partial(tokenizer, 'tokenizer.json', 'siglip', 'siglip2'),
    'tokenizer_clip': functools.partial(tokenizer, 'vocab.json', 'clip', 'clip')}


def case(kind: str, number: int) -> Result:
  return KINDS[kind](np.random.default_rng([number, *kind.encode()]))


if __name__ == '__main__':
  if sys.argv[1] == 'adapter':
    from tests.weights import fuzz
    from vit_jax.weights import loading
    loading.expected = fuzz._remembered(loading.expected)
  fuzzing.main(functools.partial(case, sys.argv[1]), sys.argv[2:])
