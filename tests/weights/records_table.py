"""Prints the table of families in `docs/reference/weights.md`, from the records of the families.

python -m tests.weights.records_table
"""
from __future__ import annotations

from vit_jax.weights import recognize
from vit_jax.weights.families import FAMILIES
from vit_jax.weights.families.record import Family


def formats(family: Family) -> list[str]:
  """Returns the values of `--family` with which networks of a family are written under names that it has."""
  own = {name for files in family.files for name in files.formats} | ({'huggingface'} if family.kinds else set())
  is_timm = any(files.program == 'timm' for files in family.files) or not any(files.formats for files in family.files)
  return [name for name in recognize.FORMATS if name in own | ({'timm'} if is_timm else set())]


def table() -> str:
  """Returns the table in Markdown."""
  rows = [(family.title, family.about, ', '.join(f'`{name}`' for name in formats(family))) for family in FAMILIES]
  head = ('family', 'files that are read', 'written (`--family=`)')
  return '\n'.join(f'| {" | ".join(row)} |' for row in (head, ('---',) * 3, *rows))


if __name__ == '__main__':
  print(table())
