"""How every tensor of a weight file was used, as records that can be printed and written."""
from __future__ import annotations

from typing import Any, NamedTuple


class Line(NamedTuple):
  """One tensor, or several that share a fate.

  name: path in our parameters, or the file's own name where it has none here.
  what: taken | resized | folded | new | dropped.
  rule: why, in words; '' where it is taken as it is.
  """
  name: str
  what: str
  rule: str = ''


class Report(NamedTuple):
  """What a load or an adaptation did, in order."""
  lines: tuple[Line, ...] = ()
  notes: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()

  def __add__(self, other: Report) -> Report:  # type: ignore[override]
    return Report(self.lines + other.lines, self.notes + other.notes, self.warnings + other.warnings)

  def of(self, what: str) -> list[Line]:
    """The lines of one fate."""
    return [line for line in self.lines if line.what == what]

  def text(self) -> str:
    """For a person: counts, and a line for everything that was not simply taken."""
    counts = [f'{len(self.of(what))} {what}' for what in ('taken', 'resized', 'folded', 'new', 'dropped')
              if self.of(what)]
    changed = [f'  {line.what:<8}{line.name}' + (f': {line.rule}' if line.rule else '')
            for line in self.lines if line.what != 'taken']
    return '\n'.join([*self.notes, f'Tensors: {", ".join(counts) or "none"} (those of all blocks as one)', *changed,
                      *(f'Warning: {one}' for one in self.warnings)])

  def plain(self) -> dict[str, Any]:
    """For a JSON file: every tensor."""
    return {'notes': list(self.notes), 'warnings': list(self.warnings),
            'tensors': [line._asdict() for line in self.lines]}
