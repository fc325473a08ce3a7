"""Mutated weight files: four families in five containers, changed at random, read by a process with little memory.

Run as a program it is that process: `python -m tests.weights.fuzz FIRST LAST` makes and reads the cases with these
numbers (`tests/fuzzing.py`). A case depends on its number alone.
"""
from __future__ import annotations

import functools
import io
import math
import pathlib
import pickletools
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from tests import fuzzing
from tests.weights import drawn, test_pickles

KINDS = ('vision_transformer.npz', 'timm.safetensors', 'mae.pth', 'dino.pth', 'vision_transformer.msgpack')
NPZ, FLAX = KINDS[0], KINDS[-1]
Tensors = dict[str, np.ndarray]
Rng = np.random.Generator


def vit(kind: str, d: int = 8, mlp: int = 12, depth: int = 2, patch: int = 4, side: int = 2,
        classes: int = 3) -> Tensors:
  """The tensors of a tiny ViT (of width d, for side x side patches) as a family names them."""
  m = side * side + 1
  if kind == 'vision_transformer':
    shapes = {'cls': (1, 1, d), 'embedding/kernel': (patch, patch, 3, d), 'embedding/bias': (d,),
              'Transformer/posembed_input/pos_embedding': (1, m, d), 'Transformer/encoder_norm/scale': (d,),
              'Transformer/encoder_norm/bias': (d,), 'head/kernel': (d, classes), 'head/bias': (classes,)}
    for i in range(depth):
      at = f'Transformer/encoderblock_{i}'
      shapes |= {f'{at}/LayerNorm_{n}/{leaf}': (d,) for n in (0, 2) for leaf in ('scale', 'bias')}
      for name in ('query', 'key', 'value'):
        shapes |= {f'{at}/MultiHeadDotProductAttention_1/{name}/kernel': (d, 2, d // 2),
                   f'{at}/MultiHeadDotProductAttention_1/{name}/bias': (2, d // 2)}
      shapes |= {f'{at}/MultiHeadDotProductAttention_1/out/kernel': (2, d // 2, d),
                 f'{at}/MultiHeadDotProductAttention_1/out/bias': (d,), f'{at}/MlpBlock_3/Dense_0/kernel': (d, mlp),
                 f'{at}/MlpBlock_3/Dense_0/bias': (mlp,), f'{at}/MlpBlock_3/Dense_1/kernel': (mlp, d),
                 f'{at}/MlpBlock_3/Dense_1/bias': (d,)}
    return {name: drawn.tensor(name, shape) for name, shape in shapes.items()}
  shapes = {'cls_token': (1, 1, d), 'pos_embed': (1, m, d), 'patch_embed.proj.weight': (d, 3, patch, patch),
            'patch_embed.proj.bias': (d,), 'norm.weight': (d,), 'norm.bias': (d,)}
  shapes |= {'head.weight': (classes, d), 'head.bias': (classes,)} if kind == 'timm' else {}
  shapes |= {f'head.last_layer.weight_{x}': (5, d if x == 'v' else 1) for x in 'gv'} if kind == 'dino' else {}
  blocks = {'blocks': (depth, d, mlp)}
  if kind == 'mae':
    blocks['decoder_blocks'] = (1, d, 4 * d)
    shapes |= {'mask_token': (1, 1, d), 'decoder_embed.weight': (d, d), 'decoder_embed.bias': (d,),
               'decoder_norm.weight': (d,), 'decoder_norm.bias': (d,), 'decoder_pred.weight': (3 * patch**2, d),
               'decoder_pred.bias': (3 * patch**2,)}
  for stack, (layers, width, hidden) in blocks.items():
    for i in range(layers):
      at = f'{stack}.{i}'
      for name, shape in (('norm1', (width,)), ('norm2', (width,)), ('attn.qkv', (3 * width, width)),
                          ('attn.proj', (width, width)), ('mlp.fc1', (hidden, width)), ('mlp.fc2', (width, hidden))):
        shapes |= {f'{at}.{name}.weight': shape, f'{at}.{name}.bias': shape[:1]}
  found = {name: drawn.tensor(name, shape) for name, shape in shapes.items()}
  return found | ({'decoder_pos_embed': drawn.decoder_positions(side, d)} if kind == 'mae' else {})


# Containers.

def write(path: pathlib.Path, tensors: Tensors, kind: str) -> None:
  """Writes tensors as a file of this kind; MAE's in PyTorch's zip, DINO's in its older form."""
  from vit_jax.weights import safetensors
  match kind:
    case 'vision_transformer.npz':
      (np.savez if len(tensors) % 2 else np.savez_compressed)(path, **tensors)  # type: ignore[arg-type]
    case 'timm.safetensors':
      safetensors.write(path, {name: x.astype(np.float32) for name, x in tensors.items()})
    case 'vision_transformer.msgpack':
      _write_flax(path, tensors)
    case _:
      content = {name: test_pickles.Tensor(x.astype(np.float32).ravel(), x.shape, tuple(
          math.prod(x.shape[i + 1:]) for i in range(x.ndim))) for name, x in tensors.items()}
      test_pickles.write(path, {'model': content, 'epoch': 3, 'args': {'lr': .1}} if kind == 'mae.pth' else content,
                         old=kind == 'dino.pth')
  if zipfile.is_zipfile(path):
    _redated(path)


def _write_flax(path: pathlib.Path, tensors: Tensors) -> None:
  """Writes a checkpoint of Flax; where a name is that of a tensor and of others in it, all names are on one level."""
  found: dict[str, Any] = {}
  try:
    for name, x in tensors.items():
      *folders, last = name.split('/')
      functools.reduce(lambda one, key: one.setdefault(key, {}), folders, found)[last] = x
  except (TypeError, AttributeError, IndexError):
    found = dict(tensors)

  def plain(value: Any) -> Any:
    if isinstance(value, dict):
      return {name: plain(one) for name, one in value.items()}
    return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes())))

  path.write_bytes(msgpack.packb({'params': plain(found), 'step': 3}))


def _redated(path: pathlib.Path) -> None:
  """Writes a zip file again with 1980 as the date of all its members, as a case must not depend on the time."""
  with zipfile.ZipFile(path) as old:
    members = [(one.filename, old.read(one), one.compress_type) for one in old.infolist()]
  with zipfile.ZipFile(path, 'w') as new:
    for name, data, compression in members:
      new.writestr(zipfile.ZipInfo(name), data, compression)


@functools.cache
def whole(kind: str) -> bytes:
  """The bytes of a file that nothing has changed."""
  path = pathlib.Path(f'whole-{kind}')
  write(path, vit(kind.split('.')[0]), kind)
  content = path.read_bytes()
  path.unlink()
  return content


# Mutations: of bytes to bytes.

def flipped(rng: Rng, content: bytes, kind: str) -> bytes:
  found, places = bytearray(content), _structure(content, kind)
  for _ in range(rng.integers(1, 9)):
    at = int(rng.choice(places)) if rng.random() < .7 else int(rng.integers(len(found)))
    found[at] ^= 1 << int(rng.integers(8))
  return bytes(found)


def truncated(rng: Rng, content: bytes, kind: str) -> bytes:
  return content[:int(rng.integers(len(content)))]


def inserted(rng: Rng, content: bytes, kind: str) -> bytes:
  at, length = int(rng.choice(_structure(content, kind))), int(rng.integers(1, 40))
  if rng.random() < .3:
    return content[:at] + content[at + length:]
  return content[:at] + (rng.bytes(length) if rng.random() < .5 else bytes(length)) + content[at:]


def spliced(rng: Rng, content: bytes, kind: str) -> bytes:
  other = whole(str(rng.choice(KINDS)))
  a, b = int(rng.integers(len(content))), int(rng.integers(len(other)))
  return content[:a] + other[b:] if rng.random() < .7 else content + other[b:]


def lengths(rng: Rng, content: bytes, kind: str) -> bytes:
  """Numbers of 1, 2, 4 or 8 bytes replaced by others that are of interest."""
  found, size = bytearray(content), int(rng.choice([1, 2, 4, 8]))
  places = _structure(content, kind)
  for _ in range(rng.integers(1, 4)):
    at = min(int(rng.choice(places)), len(found) - size)
    value = int(rng.choice([0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1]))
    value = -1 if rng.random() < .2 else value
    found[at:at + size] = (value % 2**(8 * size)).to_bytes(size, 'little')
  return bytes(found)


def edited(rng: Rng, content: bytes, kind: str) -> bytes:
  """A header, pickle or central directory with its text changed, in a container that is whole around it."""
  if kind == 'timm.safetensors':
    length, = struct.unpack('<Q', content[:8])
    text = _text(rng, content[8:8 + length])
    return struct.pack('<Q', len(text)) + text + content[8 + length:]
  if kind in ('dino.pth', FLAX):
    return _text(rng, content[:4000]) + content[4000:]
  return _rezipped(rng, content, _text if rng.random() < .5 else _bytes)


def opcodes(rng: Rng, content: bytes, kind: str) -> bytes:
  """Instructions of a pickle replaced by others; of other files, as `edited`."""
  if kind == 'dino.pth':
    return _opcodes(rng, content)
  return _rezipped(rng, content, _opcodes) if kind == 'mae.pth' else edited(rng, content, kind)


def tensors(rng: Rng, content: bytes, kind: str) -> bytes:
  """A whole file of tensors with other names, shapes or numbers of axes."""
  found = vit(kind.split('.')[0])
  for _ in range(rng.integers(1, 3)):
    name = str(rng.choice(sorted(found)))
    x = found[name]
    match rng.integers(9):
      case 0:
        del found[name]
      case 1:
        found[name] = x.reshape(-1) if rng.random() < .5 else x.reshape(1, *x.shape)
      case 2:
        found[name] = x[..., :0]
      case 3:
        found[name] = np.zeros((), np.float32)
      case 4:
        found[name] = np.repeat(x, int(rng.integers(2, 4)), int(rng.integers(x.ndim))) if x.ndim else x
      case 5:
        number = str(rng.choice(['0', '1', '7', '300', '99999999', '9' * 30, '9' * 600, '٣', '²', '-1']))
        found[re.sub(r'\d+', number, name, count=1) if number.isascii() else name.replace('0', number)] = x
      case 6:
        found[str(rng.choice(_NAMES))] = x
      case 7:
        found[name] = x.T if rng.random() < .5 else x[:1]
      case _:
        found[name] = np.full_like(x, rng.choice([np.nan, np.inf, 0.]))
  if kind == 'vision_transformer.npz' and rng.random() < .3:
    dtype = str(rng.choice(['f2', 'f8', 'i1', '?', 'c8', 'S3', 'U2', 'M8[s]', 'V2', 'V5', 'f4,i2']))
    found[name] = np.zeros(3, dtype)
  return _packed(found, kind)


def networks(rng: Rng, content: bytes, kind: str) -> bytes:
  """A whole file of a network of other sizes, some of which no network has."""
  small = kind == 'mae.pth'  # positions of its decoder take a width of a multiple of 4
  found = vit(kind.split('.')[0], d=int(rng.choice([4, 8, 12] if small else [2, 3, 4, 6, 7, 12, 32])),
              mlp=int(rng.choice([1, 5, 16])), depth=int(rng.choice([1, 2, 3, 12])),
              patch=int(rng.choice([1, 2, 4, 5, 16])), side=int(rng.choice([1, 2, 3, 14])),
              classes=int(rng.choice([1, 2, 1000])))
  groups = sorted({re.sub(r'\d+', '#', name).rpartition('.' if kind not in (NPZ, FLAX) else '/')[0] for name in found})
  for _ in range(rng.integers(0, 3)):
    gone = str(rng.choice(groups))
    found = {name: x for name, x in found.items() if not re.sub(r'\d+', '#', name).startswith(gone or '-')}
  more = {'reg_token': 3, 'register_tokens': 3, 'dist_token': 1}
  if rng.random() < .3:
    name = str(rng.choice(sorted(more)))
    found[name] = np.zeros((1, more[name], 8), np.float32)
  if rng.random() < .2:
    prefix = str(rng.choice(['module.', 'backbone.', 'params/', 'opt/target/', 'vit.']))
    found = {prefix + name: x for name, x in found.items()}
  return _packed(found, kind)


def _packed(found: Tensors, kind: str) -> bytes:
  path = pathlib.Path('tensors.part')
  with open(path, 'wb') as file:
    if kind == 'vision_transformer.npz':
      np.savez(file, **found)  # type: ignore[arg-type]
  if kind != 'vision_transformer.npz':
    write(path, found, kind)
  changed = path.read_bytes()
  path.unlink()
  return changed


_NAMES = ('backbone/stem/kernel', 'pos_embed', 'cls', 'dist_token', 'reg_token', 'mask_token', 'blocks.0.ls1.gamma',
          'stem.proj.weight', 'blocks.0.mlp_tokens.fc1.weight', 'conv_stem.weight', 'stages.0.blocks.0.conv1.weight',
          'stem.conv.weight', 'resnet/root_block/standardized_conv2d/kernel', 'block99999999/unit1/conv1/kernel',
          'block1/unit99999999/conv1/kernel', 'conv_root/kernel', 'embeddings.patch_embeddings.projection.weight',
          'MixerBlock_0/token_mixing/Dense_0/kernel', 'decoder_pos_embed', 'decoder_embed.weight', 'pre_logits/kernel',
          'Transformer/encoderblock/LayerNorm_0/scale', 'params/img/x', 'opt/target/cls', 'attn_pool.latent',
          'decoder_blocks.0.norm1.weight', 'blocks.0.attn.q_norm.weight', 'head_dist.weight', 'probe', '', '/', '.',
          '\x1b[2J')
MUTATIONS: tuple[Callable[[Rng, bytes, str], bytes], ...] = (
    flipped, truncated, inserted, spliced, lengths, edited, opcodes, tensors, networks)


def _structure(content: bytes, kind: str) -> np.ndarray:
  """Places of a file that are not numbers of tensors."""
  if kind == 'timm.safetensors':
    return np.arange(8 + struct.unpack('<Q', content[:8])[0])
  if kind in ('dino.pth', FLAX):
    return np.arange(min(len(content), 6000))
  starts = [found.start() for found in re.finditer(b'PK[\1-\6][\1-\6]', content)]
  places = [np.arange(at, min(at + 160, len(content))) for at in starts]
  places += [np.arange(at, min(at + 6000, len(content))) for at in starts[:1] if kind == 'mae.pth']
  return np.unique(np.concatenate(places))


def _text(rng: Rng, content: bytes) -> bytes:
  """Numbers and words of a text replaced by others."""
  words = list(re.finditer(rb'\d+|[A-Za-z_]{3,}', content))
  for found in sorted(rng.choice(len(words), min(len(words), int(rng.integers(1, 4))), replace=False))[::-1]:
    new = str(rng.choice(['0', '-1', '1', '7', '4294967296', '9' * 25, '1e5', 'null', '"', '[', '{}', '..', 'F16', 'I8',
                          '<f8', '|O', 'BF16', 'shape', 'True', '\\u0000', '\\ud800', 'NaN', '', '(', "'"])).encode()
    content = content[:words[found].start()] + new + content[words[found].end():]
  return content


def _bytes(rng: Rng, content: bytes) -> bytes:
  found = bytearray(content)
  for _ in range(rng.integers(1, 5)):
    found[int(rng.integers(len(found)))] = int(rng.integers(256))
  return bytes(found)


def _opcodes(rng: Rng, content: bytes) -> bytes:
  places, file = [], io.BytesIO(content)
  try:
    while len(places) < 3000:
      places += [place for _, _, place in pickletools.genops(file) if place is not None]
  except ValueError:
    pass
  found, codes = bytearray(content), [ord(one.code) for one in pickletools.opcodes]
  for _ in range(rng.integers(1, 5)):
    found[int(rng.choice(places))] = int(rng.choice(codes))
  return bytes(found)


def _rezipped(rng: Rng, content: bytes, change: Callable[[Rng, bytes], bytes]) -> bytes:
  """An archive with one member changed, and the right checksum of what it has become."""
  out = io.BytesIO()
  with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, 'w') as new:
    names = old.namelist()
    chosen = next((name for name in names if name.endswith('data.pkl')), str(rng.choice(names)))
    for name in names:
      data = old.read(name)
      if name == chosen:
        end = 128 if name.endswith('.npy') else len(data)  # of an array's header
        data = change(rng, data[:end]) + data[end:]
      new.writestr(zipfile.ZipInfo(name), data)
  return out.getvalue()


def case(number: int) -> tuple[str, str, bytes]:
  """Kind, name of the mutation and bytes of a case."""
  rng = np.random.default_rng(number)
  kind = KINDS[number % len(KINDS)]
  mutation = MUTATIONS[number // len(KINDS) % len(MUTATIONS)]
  content = mutation(rng, whole(kind), kind)
  return kind, mutation.__name__, content


# The process.

class _Response(io.BytesIO):
  def __init__(self, content: bytes) -> None:
    super().__init__(content)
    self.headers = {'Content-Length': str(len(content))}


def result(path: pathlib.Path, content: bytes) -> dict[str, Any]:
  """What becomes of one file: `shapes` by parameter, or `refused` with the message, or `error` with a traceback."""
  from vit_jax.core import trees
  from vit_jax.weights import addresses as places
  from vit_jax.weights import loading
  path.write_bytes(content)

  def fetch() -> None:
    places.local(f'https://host/{path.name}', opener=lambda _: _Response(content))

  def load() -> dict[str, list[int]]:
    loaded = loading.load(str(path), model='heads=2,decoder_heads=2')
    return {name: list(leaf.shape) for name, leaf in trees.flatten(loaded.params).items()}

  fetched = fuzzing.outcome(fetch)
  found = fuzzing.outcome(load)
  path.unlink()
  found |= {key: fetched[key] for key in ('error',) if key in fetched}
  found |= {'shapes': found.pop('read')} if 'read' in found else {}
  return {**found, 'kept': 'read' in fetched, **({'why': fetched['refused']} if 'refused' in fetched else {})}


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
  """A pure function, which takes most of the time, with its results kept."""
  kept: dict[str, Any] = {}

  def remembered(*args: Any, **settings: Any) -> Any:
    key = repr((args, settings))
    if key not in kept:
      kept[key] = function(*args, **settings)
    return kept[key]

  return remembered


def one(number: int) -> dict[str, Any]:
  """What became of a case."""
  kind, mutation, content = case(number)
  return {'kind': kind, 'mutation': mutation, **result(pathlib.Path(f'{number}-{kind}'), content)}


def main(arguments: list[str]) -> None:
  from vit_jax.weights import loading
  loading.expected = _remembered(loading.expected)
  for kind in KINDS:
    found = result(pathlib.Path(kind), whole(kind))
    assert 'shapes' in found, found
  fuzzing.main(one, arguments)


if __name__ == '__main__':
  main(sys.argv[1:])
