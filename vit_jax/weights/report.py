"""Records of how every tensor of a weight file was used, to be printed and saved."""
from __future__ import annotations

from typing import Any, NamedTuple


class Line(NamedTuple):
  """One tensor, or several with the same result.

  name: path in our parameters, or the name in the file if the tensor has no such path.
  what: taken | resized | folded | new | dropped.
  rule: the reason; '' if the tensor was taken unchanged.
  """
  name: str
  what: str
  rule: str = ''


_MOST = 8
"""How many tensors with the same rule are listed one by one."""


class Report(NamedTuple):
  """The lines of a load or an adaptation, in order."""
  lines: tuple[Line, ...] = ()
  notes: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()

  def __add__(self, other: Report) -> Report:  # type: ignore[override]
    return Report(self.lines + other.lines, self.notes + other.notes, self.warnings + other.warnings)

  def of(self, what: str) -> list[Line]:
    """Returns the lines with this result."""
    return [line for line in self.lines if line.what == what]

  def text(self) -> str:
    """Returns readable text: counts, and what was not taken unchanged; of many tensors with one rule, the first."""
    counts = [f'{len(self.of(what))} {what}' for what in ('taken', 'resized', 'folded', 'new', 'dropped')
              if self.of(what)]
    groups: dict[tuple[str, str], list[str]] = {}
    for line in self.lines:
      if line.what != 'taken':
        groups.setdefault((line.what, line.rule), []).append(line.name)
    changed = [f'  {what:<8}{name}' + (f': {rule}' if rule else '')
               for (what, rule), names in groups.items() for name in _listed(names)]
    return '\n'.join([*self.notes, f'Tensors: {", ".join(counts) or "none"} (those of all blocks as one)', *changed,
                      *(f'Warning: {one}' for one in self.warnings)])

  def plain(self) -> dict[str, Any]:
    """Returns the report of every tensor for a JSON file."""
    return {'notes': list(self.notes), 'warnings': list(self.warnings),
            'tensors': [line._asdict() for line in self.lines]}


def _listed(names: list[str]) -> list[str]:
  return names if len(names) <= _MOST else [f'{names[0]} and {len(names) - 1:,} more']
