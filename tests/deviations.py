"""The known differences from the authors' programs and from the papers, read from docstrings.

A config says what differs in its section `Differs:`; a docstring of the package says what all recipes share in a
paragraph `Differs from PROGRAM: …`. `python -m tests.fidelity page` writes both into `docs/explanation/fidelity.md`.
"""
from __future__ import annotations

import ast
import pathlib
import re
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
NONE = re.compile(r'No difference ')
NO_PAPER = re.compile(r'It follows no ')
"""How a section begins that has no difference of its own."""
_SMALL = "It is a small form of the paper's method"
_SENTENCE_END = re.compile(r'(?<=\.)\s+(?=[A-Z])')
_SAME = re.compile(r'As (\w+)\.py\.')
_SECTION = re.compile(r'^Differs: +(.*?)(?=^[A-Z][a-z]+:|\Z)', re.M | re.S)
_PARAGRAPH = re.compile(r'^Differs from ([^:]+): (.*?)(?=\n\s*\n|\Z)', re.M | re.S)


class Difference(NamedTuple):
  """One difference: the file with its docstring, the program or paper, and the text."""
  path: str
  of: str
  text: str

  def in_short(self) -> str:
    """The first three sentences, with a capital letter."""
    return self.text[0].upper() + ' '.join(_SENTENCE_END.split(self.text)[:3])[1:]


def joined(text: str) -> str:
  """A paragraph in one line."""
  return ' '.join(text.split())


def of_configs() -> dict[str, str | None]:
  """The section of each config by its name; None: it has none."""
  found: dict[str, str | None] = {}
  for path in sorted((ROOT / 'configs').glob('*.py')):
    if path.stem != '__init__':
      section = _SECTION.search(ast.get_docstring(ast.parse(path.read_text())) or '')
      found[path.stem] = joined(section[1]) if section else None
  return found


def of_package() -> list[Difference]:
  """The paragraphs of the docstrings of the package, in the order of its files."""
  found = []
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    text = path.read_text()
    if 'Differs from' not in text:
      continue
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        found += [Difference(str(path.relative_to(ROOT)), joined(of), joined(what))
                  for of, what in _PARAGRAPH.findall(ast.get_docstring(node) or '')]
  return found


def tables() -> list[str]:
  """The lines of the page with the differences: recipes with the same text share a row."""
  configs = of_configs()
  recipes: dict[str, list[str]] = {}
  for name, text in configs.items():
    same = _SAME.fullmatch(text or '')
    recipes.setdefault((configs[same[1]] if same else text) or '', []).append(name)
  programs: dict[str, list[str]] = {}
  for one in of_package():
    programs.setdefault(one.of, []).append(one.in_short())
  none, no_paper = (listed(name for text, names in recipes.items() if begin.match(text) for name in names)
                    for begin in (NONE, NO_PAPER))
  differing = sorted((listed(names), text.replace(_SMALL, 'Small form')) for text, names in recipes.items()
                     if not (NONE.match(text) or NO_PAPER.match(text)))
  return [
      '## Recipes\n', '| recipe | what differs from its program or paper |', '|---|---|',
      *(f'| {names} | {text} |' for names, text in differing),
      '', textwrap.fill(f'No difference of their own is known: {none}. No paper is followed by {no_paper}.', 120),
      '\n## Programs\n',
      'These hold for every recipe that follows the program or paper; docstrings of `vit_jax/` say more.\n',
      '| from | what differs |', '|---|---|', *(f'| {of} | {" ".join(texts)} |' for of, texts in programs.items())]


def listed(names: Iterable[str]) -> str:
  """The names of recipes, sorted, as code."""
  return ', '.join(f'`{name}`' for name in sorted(names))
