"""Where each setting of a config was set: the line of the config's file, by watching the file run.

Settings are attributes that `Settings.__setattr__` sets, so a profile function sees every one of them, with the line of
the config file that led to it. `dataclasses.replace` and `copy.deepcopy` keep the lines of what they do not change.
"""
from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from vit_jax.config.schema.checks import Settings

_SET = Settings.__setattr__.__code__
_REPLACE = tuple(function.__code__ for function in (
    dataclasses.replace, getattr(dataclasses, '_replace', None)) if function is not None)
_COPY: CodeType = copy._reconstruct.__code__  # type: ignore[attr-defined]
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_Found = TypeVar('_Found')


class Line(NamedTuple):
  """A line of a config's file; `is_named` says whether it names the setting, and does not only make the part."""
  path: pathlib.Path
  number: int
  is_named: bool

  def __str__(self) -> str:
    return f'{self.path.name}:{self.number}'


class Origins:
  """Lines by part and name of a setting; holds the parts, so that no other object gets their identity."""

  def __init__(self) -> None:
    self._lines: dict[tuple[int, str], Line] = {}
    self._parts: list[Any] = []
    self._changed: dict[int, tuple[Any, set[str]]] = {}  # by the identity of a frame of `dataclasses.replace`

  def of(self, part: Any, name: str) -> Line | None:
    """Returns the line that set a setting of a part; None if no config file did."""
    return self._lines.get((id(part), name))

  def watch(self, function: Callable[[], _Found]) -> _Found:
    """Calls a function, and notes every setting that is set meanwhile."""
    before = sys.getprofile()
    sys.setprofile(self._on_event)
    try:
      return function()
    finally:
      sys.setprofile(before)
      self._changed.clear()

  def _on_event(self, frame: FrameType, event: str, result: Any) -> None:
    if event == 'call' and frame.f_code is _SET:
      self._note(frame)
    elif event == 'call' and frame.f_code in _REPLACE:
      part = frame.f_locals.get('obj', frame.f_locals.get('self'))
      self._changed[id(frame)] = part, {*frame.f_locals.get('changes', {})}
    elif event == 'return' and frame.f_code in _REPLACE:
      self._changed.pop(id(frame), None)
    elif event == 'return' and frame.f_code is _COPY and isinstance(result, Settings):
      self._inherit(result, frame.f_locals['x'], None)

  def _note(self, frame: FrameType) -> None:
    """Notes one setting; the frame is that of `__setattr__`."""
    part, name, caller = frame.f_locals['self'], frame.f_locals['name'], frame.f_back
    self._parts.append(part)
    stack = []
    while caller is not None and caller.f_code is not Origins.watch.__code__:
      stack.append(caller)
      caller = caller.f_back
    below = next((i for i, one in enumerate(stack) if _is_config(one.f_code.co_filename)), len(stack))
    changed = next((self._changed[id(one)] for one in stack[:below] if id(one) in self._changed), None)
    if changed and name not in changed[1]:
      self._inherit(part, changed[0], name)
    elif below < len(stack) and not _is_default_part(stack[:below]):
      path, first = pathlib.Path(stack[below].f_code.co_filename), stack[below].f_lineno
      number = _named(path, first, name)
      self._lines[id(part), name] = Line(path, number or first, bool(number))

  def _inherit(self, part: Any, source: Any, name: str | None) -> None:
    """Copies the lines of one setting, or of all, from another part."""
    self._parts.append(part)
    for field in dataclasses.fields(source):
      if name in (None, field.name) and (found := self.of(source, field.name)):
        self._lines[id(part), field.name] = found


def _is_default_part(stack: list[FrameType]) -> bool:
  """Returns whether a part is made by the `__init__` of another one, as its default."""
  return sum(frame.f_code.co_name == '__init__' and frame.f_code.co_filename == '<string>' for frame in stack) > 1


@functools.cache
def _is_config(file: str) -> bool:
  """Returns whether a file is a config: neither of this package, nor of Python or an installed package."""
  if file.startswith('<'):
    return False
  path = pathlib.Path(file).resolve()
  if path.is_relative_to(_PACKAGE):
    return path.is_relative_to(_PACKAGE / 'configs')
  return path.suffix == '.py' and not path.is_relative_to(sys.base_prefix) and 'site-packages' not in path.parts


@functools.cache
def _calls(path: pathlib.Path) -> dict[int, list[dict[str, int]]]:
  """Returns the lines of the keywords of all calls, and of assignments to attributes, by the line where these begin."""
  found: dict[int, list[dict[str, int]]] = {}
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Call):
      found.setdefault(node.lineno, []).append({one.arg: one.value.lineno for one in node.keywords if one.arg})
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      found.setdefault(node.lineno, []).append(
          {one.attr: one.lineno for one in targets if isinstance(one, ast.Attribute)})
  return found


def _named(path: pathlib.Path, number: int, name: str) -> int:
  """Returns the line that names a setting, in a call or assignment that begins at line `number`; 0 if none does."""
  return next((one[name] for one in _calls(path).get(number, []) if name in one), 0)
