"""Tables of names: our path, the name in a file, and the layout of the tensor; and their use in both directions.

A layout is a pair of inverse functions: `read` converts a file's array to ours, `write` ours to the file's. Both only
reorder elements, so all bits are kept. If a file does not split heads, our attention kernels are `[D, A * K]` and
`[A * K, D]` here.

In a pattern, `{i}` counts layers from 0 (our leaf is stacked over them), `{s}` and `{u}` count stages and units from 1,
`{s0}` and `{u0}` from 0, `{u2}` units from 01; `{t}` and `{t0}` count stages like `{s}` and `{s0}` without the first.
Running statistics have paths below `state`.

`PATHS` lists our path names of all parameters, which are a public format; those that objectives add are in
`objectives/`.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray

Tensors = Mapping[str, HostArray]


class Layout(NamedTuple):
  """The two directions of a layout."""
  read: Callable[[HostArray], HostArray]
  write: Callable[[HostArray], HostArray]


def _same(x: HostArray) -> HostArray:
  return x


def _transposed(x: HostArray) -> HostArray:
  return x.T


SAME = Layout(_same, _same)
DENSE = Layout(_transposed, _transposed)
"""PyTorch's `Linear.weight [out, in]`; ours is `[in, out]`."""
CONV = Layout(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""PyTorch's `Conv2d.weight [out, in, height, width]`; ours is `[height, width, in, out]`."""
VECTOR = Layout(lambda x: x.reshape(-1), _same)
"""GroupNorm arrays that some files store as `[1, 1, 1, C]`."""
POINT = Layout(lambda x: x.reshape(x.shape[-2:]), lambda x: x[None, None])
"""A dense layer stored as a 1×1 convolution, `[1, 1, in, out]`."""
POINT_CONV = Layout(lambda x: x[:, :, 0, 0].T, lambda x: x.T[:, :, None, None])
"""A dense layer stored as a 1×1 convolution in PyTorch, `[out, in, 1, 1]`."""
ROW = Layout(lambda x: x.reshape(1, 1, -1), lambda x: x.reshape(-1))
"""A vector `[D]`; here `[1, 1, D]`."""
ROWS = Layout(lambda x: x[None], lambda x: x[0])
"""A table `[M, D]`; here `[1, M, D]`."""


class Entry(NamedTuple):
  """One of our leaves and a tensor of a family: all of it, or part `part[0]` of `part[1]` equal parts of axis 0."""
  ours: str
  theirs: str
  layout: Layout
  part: tuple[int, int] = (0, 1)


Table = tuple[Entry, ...]


_KINDS: dict[str, tuple[tuple[str, str, Layout], ...]] = {
    # of PyTorch
    'dense': (('/kernel', '.weight', DENSE), ('/bias', '.bias', SAME)),
    'conv': (('/kernel', '.weight', CONV), ('/bias', '.bias', SAME)),
    'point conv': (('/kernel', '.weight', POINT_CONV), ('/bias', '.bias', SAME)),
    'packed': (('/kernel', '_weight', DENSE), ('/bias', '_bias', SAME)),  # `in_proj` of MultiheadAttention
    'norm': (('/scale', '.weight', SAME), ('/bias', '.bias', SAME)),
    'statistics': (('/mean', '.running_mean', SAME), ('/var', '.running_var', SAME)),
    # of Flax
    'flax': (('/kernel', '/kernel', SAME), ('/bias', '/bias', SAME)),
    'flax norm': (('/scale', '/scale', SAME), ('/bias', '/bias', SAME)),
    'flax group norm': (('/scale', '/scale', VECTOR), ('/bias', '/bias', VECTOR)),
    # one array
    'same': (('', '', SAME),), 'filter': (('', '', CONV),), 'matrix': (('', '', DENSE),), 'vector': (('', '', VECTOR),),
    'point': (('', '', POINT),), 'row': (('', '', ROW),), 'rows': (('', '', ROWS),)}
"""The leaves of each kind of layer: the end of our path, the end of the name in a file, and the layout."""


def table(text: str) -> Table:
  """Returns the entries of a table of names.

  A line is `ours | theirs | kind`, with a kind of `_KINDS`; a line that ends with `|` continues on the next one. Braces
  with commas, such as `{query,key,value}`, make one line for each word: the first braces of our path go with the first
  braces of the name in the file, and so on. `[k/n]` behind a name means part k (from 0) of n equal parts of the
  tensor's axis 0.
  """
  entries = []
  for line in filter(str.strip, re.sub(r'\|\n', '|', text).splitlines()):
    ours_pattern, theirs_pattern, kind = (word.strip() for word in line.split('|'))
    for ours, name_and_part in _choices(ours_pattern, theirs_pattern):
      theirs, _, part = name_and_part.rstrip(']').partition('[')
      number, _, count = (part or '0/1').partition('/')
      entries += [Entry(ours + our_end, theirs + their_end, layout, (int(number), int(count)))
                  for our_end, their_end, layout in _KINDS[kind]]
  return tuple(entries)


_CHOICE = re.compile(r'\{([^{}]*,[^{}]*)\}')


def _choices(ours: str, theirs: str) -> list[tuple[str, str]]:
  """Returns both sides of a line for each combination of the words in their braces."""
  our_choice, their_choice = _CHOICE.search(ours), _CHOICE.search(theirs)
  if our_choice is None or their_choice is None:
    assert our_choice is their_choice, f'{ours} | {theirs}: one side has more choices than the other'
    return [(ours, theirs)]
  words = zip(our_choice[1].split(','), their_choice[1].split(','), strict=True)
  pairs = []
  for our_word, their_word in words:
    pairs += _choices(ours.replace(our_choice[0], our_word, 1), theirs.replace(their_choice[0], their_word, 1))
  return pairs


def without(entries: Table, pattern: str) -> Table:
  """Returns the entries whose path of ours does not match a pattern."""
  return tuple(entry for entry in entries if not re.fullmatch(pattern, entry.ours))


_COUNTERS = {'i': r'(?P<i>\d+)', 's': r'(?P<s>\d+)', 'u': r'(?P<u>\d+)', 's0': r'(?P<s0>\d+)', 'u0': r'(?P<u0>\d+)',
             'u2': r'(?P<u2>\d{2,})', 't': r'(?P<t>[2-9]|[1-9]\d+)', 't0': r'(?P<t0>[1-9]\d*)'}
_FROM_ONE = {'s': 0, 'u': 0, 's0': 1, 'u0': 1, 'u2': 0, 't': 0, 't0': 1}
"""Added to each counter of stages and units so that it counts from 1."""
_PLACE = re.compile(r'\{(\w+)\}')
MOST_LAYERS = 1000
"""Limit of the numbers in names. The deepest published networks have about 100 layers."""
_AXES: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r'.*attn/(query|key|value|out)/kernel', (2, 3)), (r'.*attn/(query|key|value)/bias', (1, 2)),
    (r'.*attn/frequencies', (3,)),
    (r'backbone/(cls|dist|registers|positions|pool/probe)|mask_token|text/positions', (3,)), (r'text/tokens', (2,)),
    (r'backbone/(stem/)?(root|stage\d+/unit\d+/(conv\d|proj))/kernel|backbone/stem/kernel|.*/conv/kernel', (4,)),
    (r'.*/kernel', (2,)), (r'.*', (1,)))
"""Number of axes of our leaves, without the axis of layers. Heads may be split or not."""


class Match(NamedTuple):
  """The result of applying a table to a file.

  leaves: our leaves by path name; attention kernels as the file splits their heads, or not.
  left: the file's names that match no entry.
  problems: tensors that cannot be combined, one sentence each.
  """
  leaves: dict[str, HostArray]
  left: list[str]
  problems: list[str]


def read(tensors: Tensors, table: Table) -> Match:
  """Returns our leaves from a file's tensors.

  Raises:
    UserError: parameters are integers or floating point of 8 bits.
  """
  pieces: dict[str, dict[int, HostArray]] = {}
  origins: dict[str, list[str]] = {}
  left, problems, short = [], [], []
  for name in sorted(tensors, key=_natural):
    known = [(entry, counted) for entry in table if (counted := _match(entry.theirs, name)) is not None]
    left += [] if known else [name]
    short += [name] if known and (tensors[name].dtype.kind != 'f' or tensors[name].dtype.itemsize == 1) else []
    for entry, counted in known:
      if max(counted.values(), default=0) > MOST_LAYERS:
        problems.append(f'{name}: expected numbers up to {MOST_LAYERS:,} in the name of a layer')
        continue
      ours = _fill(entry.ours, counted)
      if counted.get('i', 0) in pieces.get(ours, ()):
        problems.append(f'{name} and another tensor are both {ours}')
        continue
      try:
        piece = _cut(tensors[name], entry, ours)
      except (ValueError, IndexError):
        problems.append(f'{name} is {_shape(tensors[name])}, from which {ours} cannot be made')
        continue
      pieces.setdefault(ours, {})[counted.get('i', 0)] = piece
      origins.setdefault(ours, []).append(name)
  check_whole(tensors, short)
  depths: dict[str, int] = {}
  for name, parts in pieces.items():
    depths[_stack(name)] = max(depths.get(_stack(name), 1), max(parts) + 1)
  leaves = {}
  for name, parts in pieces.items():
    wrong = _unlike(name, parts, origins[name], depth=depths[_stack(name)])
    problems += wrong
    if not wrong:
      leaves[name] = np.stack([parts[i] for i in range(len(parts))]) if _stack(name) else parts[0]
  return Match(leaves, left, problems)


def check_whole(tensors: Tensors, quantized: Sequence[str]) -> None:
  """Raises UserError if there are names in `quantized`, of tensors that mean something with their scales only."""
  if quantized:
    more = f' and {len(quantized) - 1:,} more' if len(quantized) > 1 else ''
    raise UserError(f'expected parameters in floating point of 16 to 64 bits, got {_shape(tensors[quantized[0]])} for '
                    f'{quantized[0]}{more}: the file is quantized, and such numbers mean something with their scales '
                    'only. Use the weights from before the quantization.')


def write(leaves: Tensors, table: Table) -> tuple[dict[str, HostArray], list[str]]:
  """Returns a file's tensors from our leaves (heads as in the file), and the names of leaves that have no entry."""
  parts: dict[str, dict[int, HostArray]] = {}
  unmatched = []
  for name, leaf in leaves.items():
    known = [(entry, counted) for entry in table if (counted := _match(entry.ours, name)) is not None]
    unmatched += [] if known else [name]
    for entry, counted in known[:1]:
      layers = range(leaf.shape[0]) if '{i}' in entry.theirs else [None]
      for i in layers:
        theirs = _fill(entry.theirs, counted if i is None else {**counted, 'i': i})
        parts.setdefault(theirs, {})[entry.part[0]] = entry.layout.write(leaf if i is None else leaf[i])
  joined = {name: np.concatenate([group[k] for k in sorted(group)]) if len(group) > 1 else next(iter(group.values()))
            for name, group in parts.items()}
  return {name: np.ascontiguousarray(x) for name, x in joined.items()}, unmatched


def _cut(tensor: HostArray, entry: Entry, ours: str) -> HostArray:
  """Returns the entry's part of a tensor in our layout. Raises ValueError or IndexError if it does not fit."""
  number, count = entry.part
  found = entry.layout.read(np.split(tensor, count)[number] if count > 1 else tensor)
  expected = next(axes for pattern, axes in _AXES if re.fullmatch(pattern, ours))
  if found.ndim not in expected or not found.size:
    raise ValueError(f'{found.shape}')
  return found


def _stack(name: str) -> str:
  """Returns the stack of blocks that a leaf belongs to, or ''."""
  before, found, _ = name.partition('/blocks/')
  return f'{before}{found}' if found else ''


_MOST_LAYERS = 12  # named in a message


def _unlike(name: str, parts: Mapping[int, HostArray], origins: list[str], *, depth: int) -> list[str]:
  """Returns the problems with the layers of one leaf."""
  missing = [i for i in range(depth) if i not in parts]
  shapes = [parts[i].shape for i in sorted(parts)]
  usual = max(shapes, key=shapes.count)
  odd = [f'{origin} gives {list(shape)}, others {list(usual)}, of {name}'
         for origin, shape in zip(origins, shapes, strict=False) if shape != usual]
  layers = documents.joined(list(map(str, missing)), _MOST_LAYERS)
  return odd + ([f'{name}: there is nothing for layers {layers} of {depth}'] if missing else [])


def _match(pattern: str, name: str) -> dict[str, int] | None:
  """Returns the counters of a name that matches a pattern; those from 0 also from 1, and vice versa."""
  found = _compiled(pattern).fullmatch(name)
  if found is None:
    return None
  counted = {key: int(value) for key, value in found.groupdict().items()}
  for key, value in tuple(counted.items()):
    same = [other for other in _FROM_ONE if key in _FROM_ONE and other[0] == key[0]]
    counted |= {other: value + _FROM_ONE[key] - _FROM_ONE[other] for other in same}
  return counted


def _fill(pattern: str, counted: Mapping[str, int]) -> str:
  return _PLACE.sub(lambda found: f'{counted[found[1]]:02d}' if found[1] == 'u2' else str(counted[found[1]]), pattern)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
  return re.compile(''.join(_COUNTERS[part] if i % 2 else re.escape(part)
                            for i, part in enumerate(_PLACE.split(pattern))))


def _natural(name: str) -> list[tuple[int, str]]:
  """Returns a sort key that orders numbers inside of names by value."""
  return [(int(part), '') if i % 2 else (-1, part) for i, part in enumerate(re.split(r'(\d+)', name))]


def _shape(tensor: HostArray) -> str:
  return f'{tensor.dtype}{list(tensor.shape)}'


def listed(names: Iterable[str], most: int = 12) -> list[str]:
  """Returns the first `most` names as lines, and the number of the others."""
  found = list(names)
  return [f'  {name}' for name in found[:most]] + ([f'  … and {len(found) - most} more'] if len(found) > most else [])


PATHS = {
    # Vision Transformer; leaves under `blocks` are stacked, depth first
    'backbone/stem/kernel': '[P, P, C, D]',
    'backbone/stem/bias': '[D]',
    'backbone/cls': '[1, 1, D]',
    'backbone/dist': '[1, 1, D]',
    'backbone/registers': '[1, R, D]',
    'backbone/positions': '[1, M, D]: class and distillation token first, none for registers',
    'backbone/positions/(row|column)': '[h, D / 2], [w, D / 2]',
    'backbone/blocks/positions(/(row|column))?': 'as above, of each layer',
    'backbone/blocks/((row|column)/)?norm[12]/(scale|bias)': '[L, D]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/kernel': '[L, D, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/bias': '[L, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key)_norm/(scale|bias)': '[L, K]',
    'backbone/blocks/attn/relative': '[L, 2 N - 1, A, K]',
    'backbone/blocks/((row|column)/)?attn/out/kernel': '[L, A, K, D]',
    'backbone/blocks/((row|column)/)?attn/out/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/kernel': '[L, D, F]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/bias': '[L, F]',
    'backbone/blocks/((row|column)/)?mlp/down/kernel': '[L, F, D]',
    'backbone/blocks/((row|column)/)?mlp/down/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?scale[12]': '[L, D]',
    'backbone/blocks/((row|column)/)?(attn|mlp)/norm/(scale|bias)': '[L, D], [L, F]',
    'backbone/(norm|norm_before|stem_norm)/(scale|bias)': '[D]',
    'backbone/pool/probe': '[1, 1, D]',
    'backbone/pool/(attn/(query|key|value|out)|mlp/(up|down)|norm)/(kernel|scale|bias)': 'as in a block, without L',
    # the stem of LV-ViT
    'backbone/stem/conv[123]/kernel': '[side, side, I, W]',
    'backbone/stem/norm[123]/(scale|bias)': '[W]',
    # hybrids and BiT: stages and units from 1
    'backbone/(stem/)?root/kernel': '[7, 7, 3, W]',
    'backbone/stem/root_norm/(scale|bias)': '[W]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(conv[123]|proj)/kernel': '[side, side, I, O]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(norm[123]|proj_norm)/(scale|bias)': '[C]',
    # Mixer
    'backbone/blocks/(tokens|channels)/(up|down)/(kernel|bias)': '[L, in, out], [L, out]',
    # EfficientNet: stages and blocks from 1
    'backbone/(stem|top)/(conv/kernel|norm/(scale|bias))': '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/(expand|depthwise|project)/(conv/kernel|norm/(scale|bias))':
        '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/gate/(down|up)/(kernel|bias)': '[in, out], [out]',
    # running statistics of BatchNorm, in the stem of LV-ViT and in EfficientNet
    'state/stem/norm[123]/(mean|var)': '[W]',
    'state/(stem|top|stage[0-9]+/block[0-9]+/(expand|depthwise|project))/norm/(mean|var)': '[C]',
    # heads; the input of `head_dist` is the distillation token
    '(head|head_dist)/kernel': '[D, C]',
    '(head|head_dist)/bias': '[C]',
    '(head|head_dist)/pre_logits/(kernel|bias)': '[D, D], [D]',
    # the decoder of a masked autoencoder, of width E
    'mask_token': '[1, 1, E]',
    'decoder/(embed|predict)/(kernel|bias)': '[in, out], [out]',
    'decoder/norm/(scale|bias)': '[E]',
    'decoder/blocks/.*': 'as in the backbone',
}
"""Patterns of our path names, with shapes. Axis letters: `core/types.py`. For conditions see the networks' modules."""
