"""The page of comparisons has a row for each, and what a row claims is what its test compares."""
from __future__ import annotations

import ast
import pathlib
import re

import fidelity
import numpy as np
import pytest

ROWS = [row for rows in fidelity.ROWS.values() for row in rows]
SIGNS = {  # what stands where one of these is compared with
    'axial-deeplab': 'axial-deeplab', 'big_transfer': 'big_transfer', 'big_vision': 'big_vision', 'deit': '(?i)deit',
    'dino': r'\bdino', 'dinov2': 'dinov2', 'mae': r'\bmae\b', 'noisystudent': 'noisystudent',
    'vision_transformer': 'vision_transformer', 'TokenLabeling': 'TokenLabeling', 'timm': r'\btimm\b',
    'transformers': r'\btransformers\b', 'PEFT': r'\bpeft\b',
    'stable-pretraining': 'stable-pretraining', 'tips': r'\btips\b', 'TensorFlow': '(?i)tensorflow',
    'torch': r'\btorch\b', 'Pillow': r'\bPIL\b|Image\.',
    'optax': r'\boptax\.', 'scikit-learn': r'\bsklearn\b|linear_model', 'NumPy': r'\bnp\.', 'ReaL': 'real',
    'Table 3': '(?i)table[ _]3', 'Table 4': '(?i)table[ _]4', 'Table 5': '(?i)table[ _](5|five)',
    'Table 6': '(?i)table[ _](6|six)', 'Table 7': '(?i)table[ _](7|seven)', 'Table 8': '(?i)table[ _](8|eight)',
    'Table 9': '(?i)table[ _](9|nine)', 'Table 1': 'Table 1', '3.1 and D.3': 'D.3', 'B.1.1': 'B.1.1',
    'BiT paper': '(?i)bit', 'AugReg paper': 'paper', 'SciPy': r'\bndimage\b', 'published': 'published',
    'formula': r'formula|math\.|tf\.train', 'programs of the families': 'program'}


def source(path: pathlib.Path, name: str) -> str:
  """A function of a file with the comments above it, and all of the file that it refers to, directly or not."""
  text = path.read_text()
  lines, found = text.splitlines(), {}
  for node in ast.parse(text).body:
    names = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else [
        child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)]
    first = min([node.lineno, *(each.lineno for each in getattr(node, 'decorator_list', ()))]) - 1
    while first and lines[first - 1].lstrip().startswith('#'):
      first -= 1
    for one in [getattr(node, 'name', ''), *(names if not hasattr(node, 'name') else ())]:
      found[one] = '\n'.join(lines[first:node.end_lineno])
  wanted, reached = [name], {}
  while wanted:
    one = wanted.pop()
    if one in found and one not in reached:
      reached[one] = found[one]
      wanted += re.findall(r'\w+', found[one])
  return '\n'.join(reached.values())


def evidence(row: fidelity.Row) -> str:
  """The test with what it refers to, the docstring of its file, and the script that ran what it is compared with."""
  path, _, name = row.test.partition('::')
  script = (fidelity.ROOT / 'tests' / row.made).read_text() if row.made else ''
  text = (fidelity.ROOT / 'tests' / path).read_text()
  return (ast.get_docstring(ast.parse(text)) or '') + source(fidelity.ROOT / 'tests' / path, name) + script


@pytest.mark.parametrize('test', sorted({row.test for row in ROWS}))
def test_every_comparison_names_a_test(test: str) -> None:
  path, _, name = test.partition('::')
  tree = ast.parse((fidelity.ROOT / 'tests' / path).read_text())
  assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.what)
def test_a_row_claims_only_what_its_test_compares(row: fidelity.Row) -> None:
  text = evidence(row)
  claimed = [name for name in SIGNS if re.search(rf'(?<!\w){re.escape(name)}(?!\w)', row.oracle)]
  assert claimed, f'{row.oracle}: expected one of {", ".join(SIGNS)}'
  programs = [name for name in fidelity.COMMITS if re.search(rf'(?<!\w){re.escape(name)}(?!\w)', row.what)]
  for name in (*claimed, *programs):
    assert re.search(SIGNS[name], text), f'{row.what}: {name} is not in {row.test} nor in {row.made or "a script"}'


@pytest.mark.parametrize('made', sorted({row.made for row in ROWS if row.made}))
def test_a_script_makes_a_file_that_the_tests_read(made: str) -> None:
  script = (fidelity.ROOT / 'tests' / made).read_text()
  files = [name for name in re.findall(r'[\w.]+\.(?:npz|json)', script)
           if (fidelity.ROOT / 'tests' / made).with_name(name).exists()]
  assert files, f'{made} names no file beside it'
  for path in {row.test.partition('::')[0] for row in ROWS if row.made == made}:
    test = fidelity.ROOT / 'tests' / path
    text = test.read_text()
    text += ''.join(near.read_text() for near in test.parent.glob('*.py') if re.search(rf'import .*{near.stem}', text))
    assert any(name in text for name in (*files, pathlib.Path(made).stem)), f'{path} does not read {files}'


def test_the_page_has_each_comparison_with_its_bound_and_the_differences() -> None:
  text, bounds = fidelity.PAGE.read_text(), fidelity.stored_bounds()
  assert bounds.keys() == {row.test for row in ROWS}, 'run python -m tests.fidelity'
  for row in ROWS:
    cells = [line for line in text.splitlines() if line.startswith(f'| {row.oracle} | ')]
    assert any(row.what + fidelity.in_brackets(bounds[row.test]) in line for line in cells), row.what
  assert text == fidelity.page(bounds), 'run python -m tests.fidelity page'


def test_a_bound_is_short_on_the_page() -> None:
  assert fidelity.in_brackets('rtol 1e-05, atol 1e-07 (17)') == ' (1e-5, ±1e-7)'
  assert [fidelity.in_brackets(bound) for bound in ('atol 0.07 (1)', 'equal', 'passed')] == [' (±0.07)', ' (equal)', '']


def test_bounds_are_the_loosest_tolerances_of_a_test() -> None:
  assert str(fidelity.demanded([3, 4], 0, 0)) == 'equal' and str(fidelity.demanded(['a'], 0, 0)) == 'passed'
  some = fidelity.demanded([1., -2.5], 1e-5, 0).joined(fidelity.demanded(np.ones(3), 0., 2e-6)).joined(fidelity.Seen())
  assert some == fidelity.Seen(1e-5, 2e-6, 2.5) and str(some) == 'rtol 1e-05, atol 2e-06 (2.5)'
  recorder = fidelity.Recorder()
  recorder._now = 'x'
  recorder._allclose(np.testing.assert_allclose)([1.], [1.], atol=1e-3)
  assert recorder._approx(pytest.approx)(4.) == 4. and recorder.seen['x'] == fidelity.Seen(1e-6, 1e-3, 4.)
