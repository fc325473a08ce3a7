"""Finds the networks in a file by what is in it: the parts of its names under which there is a known family.

Files of training hold several networks (a teacher beside its student, an average), and wrappers put prefixes before all
names (`module.`, `_orig_mod.`, `net.`). Both are parts of names here: `teacher/module.blocks.0.norm1.weight` is the
tensor `module.blocks.0.norm1.weight` of the entry `teacher` of a file. A prefix that all names share is left out if
what remains is a network. Imports no family and no reader.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

Tensors: TypeAlias = 'dict[str, HostArray]'
ORDER = ('model', 'state_dict', 'model_ema', 'state_dict_ema', 'teacher', 'student', 'module', 'target_encoder',
         'encoder', 'params')
"""Of several networks with these names, the first one is for inference. Of others, a person chooses."""
_STATE = re.compile(r'opt_state|mu|nu|trace')
"""Entries of optimizers of Optax, which have the shapes and names of the network."""
_MOST_DEPTH = 8
_LEAST_SHARE = 16  # a network has at least this part of the tensors around it; bounds the work for odd files


class Chosen(NamedTuple):
  """One network of a file.

  names: of its tensors, and the names of these in the file.
  path: of the network in the file; '' = the whole file.
  others: paths of the other networks, which `--view` can choose.
  beside: tensors of the file that are of none of its networks.
  """
  names: dict[str, str]
  path: str = ''
  others: tuple[str, ...] = ()
  beside: tuple[str, ...] = ()


def whole(tensors: Mapping[str, HostArray]) -> Chosen:
  """Returns all tensors as one network."""
  return Chosen({name: name for name in tensors})


def choose(tensors: Tensors, is_network: Callable[[Tensors], bool], view: str = '') -> Chosen:
  """Returns the network for inference, or the one that `view` names.

  Args:
    tensors: of a file, or stand-ins of the same shapes; entries of the file are before a `/` in their names.
    is_network: whether tensors make a network.
    view: a path, or the beginning or end of the only path with it; '' = the network for inference.

  Raises:
    UserError: there is no such network, or several, and none of them is known to be the one for inference.
  """
  found = _networks(tensors, is_network, '', _MOST_DEPTH)
  if view:
    path = _named(view, tensors, found)
    others = [one for one in found if one != path and one and not one.startswith(path)]
    return Chosen(_below(path, tensors), _shown(path), tuple(map(_shown, others)))
  if not found:
    return _unknown(tensors)
  path, *ties = sorted(found, key=_rank)
  if ties and _rank(ties[0]) == _rank(path):
    raise UserError(f'--view: expected one of the networks in the file ({_listed(found)}), got none. Nothing says '
                    'which one is for inference. Choose one.')
  others = [one for one in found if one != path]
  inside = {new: name for new, name in _below(path, tensors).items()
            if not name.startswith(tuple(one for one in others if one.startswith(path)))}
  taken = {name for one in found for name in _below(one, tensors).values()}
  beside = [name for name in tensors if name not in taken]
  if not path.endswith('/'):  # in one table with the network, such as its head
    table = path.rpartition('/')[0] + '/' if '/' in path else ''
    inside |= {name.removeprefix(table): name for name in beside if name.startswith(table)}
    beside = [name for name in beside if not name.startswith(table)]
  return Chosen(inside, _shown(path), tuple(map(_shown, others)), tuple(beside))


def _networks(tensors: Tensors, is_network: Callable[[Tensors], bool], path: str, depth: int) -> list[str]:
  """Returns the paths, with the separator after them, of the networks at or below `path`."""
  separator = '/' if any('/' in name for name in tensors) else '.'
  parts: dict[str, Tensors] = {}
  for name, tensor in tensors.items():
    first, found, inner_name = name.partition(separator)
    if found and inner_name:
      parts.setdefault(first, {})[inner_name] = tensor
  parts = {first: part for first, part in parts.items()
           if len(part) * _LEAST_SHARE >= len(tensors) and not _STATE.fullmatch(first)}
  known = {first for first, part in parts.items() if is_network(part)}
  rest = {name: x for name, x in tensors.items() if name.partition(separator)[0] not in known}
  is_beside = bool(known) and is_network(rest)  # one network around another, such as its average
  if len(known) < 2 and not is_beside and is_network(tensors):
    return [path]
  found_paths = [path] if is_beside else []
  for first, part in parts.items():
    inner = f'{path}{first}{separator}'
    if first in known:
      found_paths += _networks(part, is_network, inner, depth - 1) if depth else [inner]
    elif depth:
      found_paths += _networks(part, is_network, inner, depth - 1)
  return found_paths


def _rank(path: str) -> tuple[int, ...]:
  return tuple(ORDER.index(part) if part in ORDER else len(ORDER) for part in re.split('[/.]', path)[:-1])


def _named(view: str, tensors: Tensors, found: list[str]) -> str:
  """Returns the path that `view` names. Raises UserError."""
  exact = [path for path in found if _shown(path) == view]
  inside = [path for path in found if re.match(re.escape(view) + '[/.]', path)]
  last = [path for path in found if re.search(rf'[/.]{re.escape(view)}$', _shown(path))]
  for one in (exact, inside, last):
    if len(one) == 1:
      return one[0]
  if not inside:
    for separator in '/.':
      if any(name.startswith(view + separator) for name in tensors):
        return view + separator
  listed = _listed(found) or ', '.join(dict.fromkeys(name.partition('/')[0] for name in tensors if '/' in name))
  if not listed or found == ['']:
    raise UserError(f'--view: expected none for a file with one network, got {view!r}. Leave it out.')
  raise UserError(f'--view: expected one of the networks in the file ({listed}), got {view!r}. Choose one.')


def _below(path: str, tensors: Tensors) -> dict[str, str]:
  return {name.removeprefix(path): name for name in tensors if name.startswith(path)}


def _unknown(tensors: Tensors) -> Chosen:
  """Returns the tensors of no known network, without the entries of the file before all names."""
  path = ''
  while (firsts := {name.removeprefix(path).partition('/')[0] for name in tensors if '/' in name.removeprefix(path)}
         ) and len(firsts) == 1 and all('/' in name.removeprefix(path) for name in tensors):
    path += f'{next(iter(firsts))}/'
  return Chosen(_below(path, tensors), _shown(path))


def _shown(path: str) -> str:
  return ascii(path.rstrip('/.'))[1:-1][:100]


def _listed(paths: list[str]) -> str:
  return ', '.join(filter(None, map(_shown, paths)))[:300]
