"""Tables of names: our path, the name in a file, and the layout of the tensor; and their use in both directions.

A layout is a pair of inverse functions: `read` converts a file's array to ours, `write` ours to the file's. Both only
reorder elements, so all bits are kept. If a file does not split heads, our attention kernels are `[D, A * K]` and
`[A * K, D]` here.

In a pattern, `{i}` counts layers from 0 (our leaf is stacked over them), `{s}` and `{u}` count stages and units from 1,
`{s0}` and `{u0}` from 0, `{u2}` units from 01; `{t}` and `{t0}` count stages like `{s}` and `{s0}` without the first.
Running statistics have paths below `state`. Our paths are a public format; `tests/weights/test_names.py` lists them.

For example, the line `backbone/blocks/norm1 | blocks.{i}.norm1 | norm` reads `blocks.0.norm1.weight [D]` and
`blocks.1.norm1.weight [D]` as the leaf `backbone/blocks/norm1/scale [2, D]`, and writes this leaf as these tensors.
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


SAME = Layout(lambda x: x, lambda x: x)
DENSE = Layout(lambda x: x.T, lambda x: x.T)
"""PyTorch's `Linear.weight [out, in]`; ours is `[in, out]`."""
CONV = Layout(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""PyTorch's `Conv2d.weight [out, in, height, width]`; ours is `[height, width, in, out]`."""
VECTOR = Layout(lambda x: x.reshape(-1), lambda x: x)
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
    # layers of PyTorch
    'dense': (('/kernel', '.weight', DENSE), ('/bias', '.bias', SAME)),
    'conv': (('/kernel', '.weight', CONV), ('/bias', '.bias', SAME)),
    'point conv': (('/kernel', '.weight', POINT_CONV), ('/bias', '.bias', SAME)),
    'packed': (('/kernel', '_weight', DENSE), ('/bias', '_bias', SAME)),  # `in_proj` of MultiheadAttention
    'norm': (('/scale', '.weight', SAME), ('/bias', '.bias', SAME)),
    'statistics': (('/mean', '.running_mean', SAME), ('/var', '.running_var', SAME)),
    # layers of Flax
    'flax': (('/kernel', '/kernel', SAME), ('/bias', '/bias', SAME)),
    'flax norm': (('/scale', '/scale', SAME), ('/bias', '/bias', SAME)),
    'flax group norm': (('/scale', '/scale', VECTOR), ('/bias', '/bias', VECTOR)),
    # one array alone
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



class _Counter(NamedTuple):
  """A number in the names of a file: what it counts, how to get the number here from it, and which numbers match."""
  counts: str
  added: int = 0
  digits: str = r'\d+'


_COUNTERS = {
    'i': _Counter('layer'), 's': _Counter('stage'), 's0': _Counter('stage', added=1), 'u': _Counter('unit'),
    'u0': _Counter('unit', added=1), 'u2': _Counter('unit', digits=r'\d{2,}'),
    't': _Counter('stage', digits=r'[2-9]|[1-9]\d+'), 't0': _Counter('stage', added=1, digits=r'[1-9]\d*')}
"""What the braces of a pattern stand for. Here layers count from 0, stages and units from 1."""
_BRACES = re.compile(r'\{(\w+)\}')
MOST_LAYERS = 1000
"""Limit of the numbers in names. The deepest published networks have about 100 layers."""
_AXES: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r'.*attn/(query|key|value|out)/kernel', (2, 3)), (r'.*attn/(query|key|value)/bias', (1, 2)),
    (r'.*attn/frequencies', (3,)),
    (r'backbone/(cls|dist|registers|positions|pool/probe)|mask_token|text/positions', (3,)), (r'text/tokens', (2,)),
    (r'backbone/(stem/)?(root|stage\d+/unit\d+/(conv\d|proj))/kernel|backbone/stem/kernel|.*/conv/kernel', (4,)),
    (r'.*/kernel', (2,)), (r'.*', (1,)))
"""Number of axes of our leaves by pattern of the path, without the axis of layers; the first pattern counts.
`backbone/blocks/attn/query/kernel` has 2, or 3 where heads are split."""


class Match(NamedTuple):
  """The result of applying a table to a file.

  leaves: our leaves by path name; attention kernels as the file splits their heads, or not.
  unused: the file's names that match no entry.
  problems: tensors that cannot be combined, one sentence each.
  """
  leaves: dict[str, HostArray]
  unused: list[str]
  problems: list[str]


def read(tensors: Tensors, table: Table) -> Match:
  """Returns our leaves from a file's tensors.

  Raises:
    UserError: parameters are integers or floating point of 8 bits.
  """
  layers: dict[str, dict[int, HostArray]] = {}  # by our path, then by the number of the layer
  origins: dict[str, list[str]] = {}
  unused, problems, quantized = [], [], []
  for name in sorted(tensors, key=_natural):
    matches = [(entry, numbers) for entry in table if (numbers := _match(entry.theirs, name)) is not None]
    if not matches:
      unused.append(name)
    elif tensors[name].dtype.kind != 'f' or tensors[name].dtype.itemsize == 1:
      quantized.append(name)
    for entry, numbers in matches:
      if max(numbers.values(), default=0) > MOST_LAYERS:
        problems.append(f'{name}: expected numbers up to {MOST_LAYERS:,} in the name of a layer')
        continue
      ours, layer = _fill(entry.ours, numbers), numbers.get('layer', 0)
      if layer in layers.get(ours, ()):
        problems.append(f'{name} and another tensor are both {ours}')
        continue
      try:
        leaf = _cut(tensors[name], entry, ours)
      except (ValueError, IndexError):
        problems.append(f'{name} is {_shape(tensors[name])}, from which {ours} cannot be made')
        continue
      layers.setdefault(ours, {})[layer] = leaf
      origins.setdefault(ours, []).append(name)
  check_whole(tensors, quantized)
  depths: dict[str, int] = {}
  for name, by_layer in layers.items():
    depths[_stack(name)] = max(depths.get(_stack(name), 1), max(by_layer) + 1)
  leaves = {}
  for name, by_layer in layers.items():
    different = _unlike(name, by_layer, origins[name], depth=depths[_stack(name)])
    problems += different
    if not different:
      leaves[name] = np.stack([by_layer[i] for i in range(len(by_layer))]) if _stack(name) else by_layer[0]
  return Match(leaves, unused, problems)


def check_whole(tensors: Tensors, quantized: Sequence[str]) -> None:
  """Raises UserError if there are names in `quantized`, of tensors that mean something with their scales only."""
  if quantized:
    more = f' and {len(quantized) - 1:,} more' if len(quantized) > 1 else ''
    raise UserError(f'expected parameters in floating point of 16 to 64 bits, got {_shape(tensors[quantized[0]])} for '
                    f'{quantized[0]}{more}: the file is quantized, and such numbers mean something with their scales '
                    'only. Use the weights from before the quantization.')


def write(leaves: Tensors, table: Table) -> tuple[dict[str, HostArray], list[str]]:
  """Returns a file's tensors from our leaves (heads as in the file), and the names of leaves that have no entry."""
  parts: dict[str, dict[int, HostArray]] = {}  # by the name in the file, then by the number of the part
  unmatched = []
  for name, leaf in leaves.items():
    matches = ((entry, numbers) for entry in table if (numbers := _match(entry.ours, name)) is not None)
    entry, numbers = next(matches, (None, {}))
    if entry is None:
      unmatched.append(name)
      continue
    is_stacked = '{i}' in entry.theirs
    for i, layer in enumerate(leaf if is_stacked else [leaf]):
      theirs = _fill(entry.theirs, {**numbers, 'layer': i})
      parts.setdefault(theirs, {})[entry.part[0]] = entry.layout.write(layer)
  tensors = {}
  for name, by_number in parts.items():
    ordered = [by_number[number] for number in sorted(by_number)]
    tensors[name] = np.ascontiguousarray(np.concatenate(ordered) if len(ordered) > 1 else ordered[0])
  return tensors, unmatched


def _cut(tensor: HostArray, entry: Entry, ours: str) -> HostArray:
  """Returns the entry's part of a tensor in our layout. Raises ValueError or IndexError if it does not fit."""
  number, count = entry.part
  leaf = entry.layout.read(np.split(tensor, count)[number] if count > 1 else tensor)
  expected = next(num_axes for pattern, num_axes in _AXES if re.fullmatch(pattern, ours))
  if leaf.ndim not in expected or not leaf.size:
    raise ValueError(f'{leaf.shape}')
  return leaf


def _stack(name: str) -> str:
  """Returns the stack of blocks that a leaf belongs to, such as `backbone/blocks/`; '' for a leaf of no block."""
  before, separator, _ = name.partition('/blocks/')
  return before + separator if separator else ''


def _unlike(name: str, by_layer: Mapping[int, HostArray], origins: list[str], *, depth: int) -> list[str]:
  """Returns the problems with the layers of one leaf: other shapes than most have, and missing layers."""
  shapes = [by_layer[i].shape for i in sorted(by_layer)]
  most_common = max(shapes, key=shapes.count)
  problems = [f'{origin} gives {list(shape)}, others {list(most_common)}, of {name}'
              for origin, shape in zip(origins, shapes, strict=False) if shape != most_common]
  if missing := [str(i) for i in range(depth) if i not in by_layer]:
    problems.append(f'{name}: there is nothing for layers {documents.joined(missing, 12)} of {depth}')
  return problems


def _match(pattern: str, name: str) -> dict[str, int] | None:
  """Returns the numbers in a name that matches a pattern, such as `{'stage': 1, 'unit': 3}`; None without a match."""
  match = _compiled(pattern).fullmatch(name)
  if match is None:
    return None
  return {_COUNTERS[key].counts: int(digits) + _COUNTERS[key].added for key, digits in match.groupdict().items()}


def _fill(pattern: str, numbers: Mapping[str, int]) -> str:
  """Returns the name that a pattern has with these numbers."""
  def number(braces: re.Match[str]) -> str:
    counter = _COUNTERS[braces[1]]
    return f'{numbers[counter.counts] - counter.added:0{2 if braces[1] == "u2" else 1}d}'

  return _BRACES.sub(number, pattern)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
  """Returns the regular expression of a pattern, with a group for each of its braces."""
  parts = _BRACES.split(pattern)  # text and the content of braces in turn
  return re.compile(''.join(f'(?P<{part}>{_COUNTERS[part].digits})' if i % 2 else re.escape(part)
                            for i, part in enumerate(parts)))


def _natural(name: str) -> list[tuple[int, str]]:
  """Returns a sort key that orders numbers inside of names by value."""
  return [(int(part), '') if i % 2 else (-1, part) for i, part in enumerate(re.split(r'(\d+)', name))]


def _shape(tensor: HostArray) -> str:
  return f'{tensor.dtype}{list(tensor.shape)}'


def listed(names: Iterable[str], most: int = 12) -> list[str]:
  """Returns the first `most` names as lines, and the number of the others."""
  names = list(names)
  more = [f'  … and {len(names) - most} more'] if len(names) > most else []
  return [f'  {name}' for name in names[:most]] + more
