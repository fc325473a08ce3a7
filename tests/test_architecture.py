"""docs/explanation/architecture.md names files and functions that exist, and its table has at most 14 files."""
from __future__ import annotations

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'explanation' / 'architecture.md').read_text()
FILE = re.compile(r'`(vit_jax/[\w/]+\.py)`')
CODE = re.compile(r'`([A-Za-z_][\w.]*)`')
ROWS = [[cell.strip() for cell in line.strip('|').split('|')] for line in PAGE.splitlines()
        if re.match(r'\| \d+ \|', line)]


def definitions(path: str) -> set[str]:
  """Names of the functions, classes and methods of a file."""
  found: set[str] = set()
  for node in ast.parse((ROOT / path).read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      found.add(node.name)
    if isinstance(node, ast.ClassDef):
      found |= {f'{node.name}.{inner.name}' for inner in node.body if isinstance(inner, ast.FunctionDef)}
  return found


def test_the_walk_has_at_most_14_files_each_once() -> None:
  files = [FILE.findall(row[1]) for row in ROWS]
  assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1)) and len(ROWS) <= 14
  assert all(len(found) == 1 for found in files) and len({found[0] for found in files}) == len(ROWS)


def test_the_functions_of_each_row_are_in_its_file() -> None:
  for row in ROWS:
    [path], names = FILE.findall(row[1]), CODE.findall(row[2])
    assert names and set(names) <= definitions(path), f'{path}: {names}'


def test_functions_in_parentheses_are_in_the_file_before_them() -> None:
  listed = re.findall(r'`(vit_jax/[\w/]+\.py)`\s+\(([^)]*)\)', PAGE)
  assert len(listed) >= 15
  for path, names in listed:
    assert set(CODE.findall(names)) <= definitions(path), f'{path}: {names}'


def test_names_of_variants_are_in_the_file_of_their_row() -> None:
  variants = re.findall(r'`(\w+)`(?:,)? in (\d+)', PAGE)
  assert {name for name, _ in variants} >= {'ViewsTransform', 'EvalTransform', 'Eval', 'EvalLoader'}
  for name, number in variants:
    assert name in definitions(FILE.findall(ROWS[int(number) - 1][1])[0]), name
