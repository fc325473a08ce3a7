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
    """Returns readable text: counts, and one line for everything that was not taken unchanged."""
    counts = [f'{len(self.of(what))} {what}' for what in ('taken', 'resized', 'folded', 'new', 'dropped')
              if self.of(what)]
    changed = [f'  {line.what:<8}{line.name}' + (f': {line.rule}' if line.rule else '')
            for line in self.lines if line.what != 'taken']
    return '\n'.join([*self.notes, f'Tensors: {", ".join(counts) or "none"} (those of all blocks as one)', *changed,
                      *(f'Warning: {one}' for one in self.warnings)])

  def plain(self) -> dict[str, Any]:
    """Returns the report of every tensor for a JSON file."""
    return {'notes': list(self.notes), 'warnings': list(self.warnings),
            'tensors': [line._asdict() for line in self.lines]}
