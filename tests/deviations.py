"""The page of known differences from the authors' programs and from the papers, made from docstrings.

`python -m tests.deviations` writes `docs/explanation/deviations.md`. A config says what differs in its section
`Differs:`; a docstring of the package in a paragraph `Differs from PROGRAM: …`, for what all recipes share.
"""
from __future__ import annotations

import ast
import pathlib
import re
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'explanation' / 'deviations.md'
HEAD = """# Deviations

Every known difference of a recipe from the program of its authors, or from its paper where no program was published.
[Fidelity](fidelity.md) has what was compared and is the same. `python -m tests.deviations` writes this page from the
docstrings of the configs and of the package, and a test compares them.

Some differences are meant everywhere: random numbers and the order of images are others; training is in float32, or in
bfloat16 with `model.dtype=bfloat16`, where programs in PyTorch scale losses to train in float16; sums over devices are
added in another order. The effect on accuracy was measured where a number says so, and nowhere else.
"""
NONE = re.compile(r'No difference |It follows no |As ')
"""How a section begins that has no difference of its own."""
_SECTION = re.compile(r'^Differs: +(.*?)(?=^[A-Z][a-z]+:|\Z)', re.M | re.S)
_PARAGRAPH = re.compile(r'^Differs from ([^:]+): (.*?)(?=\n\s*\n|\Z)', re.M | re.S)


class Difference(NamedTuple):
  """One difference: the file with its docstring, the program or paper, and the text."""
  path: str
  of: str
  text: str


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


def page() -> str:
  """The text of `docs/explanation/deviations.md`."""
  configs = {name: text or '' for name, text in of_configs().items()}
  parts = [HEAD, '## Of several recipes\n', '| from | what differs | where |', '|---|---|---|']
  parts += [f'| {one.of} | {one.text} | `{one.path}` |' for one in of_package()]
  parts += ['\n## Of single recipes\n', '| recipe | what differs |', '|---|---|']
  parts += [f'| `{name}` | {text} |' for name, text in configs.items() if not NONE.match(text)]
  parts += ['\n## Recipes without a difference of their own\n', '| recipe | |', '|---|---|']
  parts += [f'| `{name}` | {text} |' for name, text in configs.items() if NONE.match(text)]
  return '\n'.join(parts) + '\n'


def main() -> int:
  """Writes the page."""
  PAGE.write_text(page())
  print(f'Written: {PAGE}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
