"""The notebooks are clean and share their set-up, and run, whichever backend of matplotlib the environment names."""
from __future__ import annotations

import ast
import json
import os
import pathlib
import re
from typing import Any

import pytest

from vit_jax.commands import JOBS

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'launch' / 'colab').glob('*.ipynb'))
INLINE = 'module://matplotlib_inline.backend_inline'
TIMEOUT_S = 600


def code(path: pathlib.Path) -> list[str]:
  return [''.join(cell['source']) for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == 'code']


def test_these_are_the_notebooks() -> None:
  assert [path.stem for path in NOTEBOOKS] == ['augreg', 'finetune', 'inspect', 'quickstart', 'selfsup', 'tpu']


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_without_outputs_and_its_code_is_python(path: pathlib.Path) -> None:
  notebook = json.loads(path.read_text())
  assert notebook['nbformat'] == 4 and notebook['nbformat_minor'] >= 5
  assert len({cell['id'] for cell in notebook['cells']}) == len(notebook['cells'])
  for cell in notebook['cells']:
    assert isinstance(cell['source'], list) and set(cell) >= {'cell_type', 'metadata', 'source'}
    if cell['cell_type'] == 'code':
      assert cell['outputs'] == [] and cell['execution_count'] is None
      ast.parse(''.join(cell['source']))
  assert 'colab-badge.svg' in ''.join(notebook['cells'][0]['source'])


def test_all_notebooks_have_the_same_set_up() -> None:
  cells = [[cell for cell in code(path) if cell.startswith('#@title Setup')] for path in NOTEBOOKS]
  assert all(len(found) == 1 for found in cells) and len({found[0] for found in cells}) == 1


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_commands_of_a_notebook_name_jobs_and_configs_that_exist(path: pathlib.Path) -> None:
  text = '\n'.join(code(path))
  jobs = re.findall(r"(?m)^ *run\('(\w+)'", text)
  assert jobs and set(jobs) <= set(JOBS)
  for name in re.findall(r'--config=([a-z]\w*)', text):
    assert (ROOT / 'configs' / f'{name}.py').exists(), name


@pytest.mark.slow(reason='20 to 60 s for a notebook on an idle core')
@pytest.mark.xdist_group('documents')
@pytest.mark.parametrize(('name', 'backend'), [
    ('quickstart', INLINE), ('finetune', ''), ('augreg', INLINE), ('inspect', INLINE), ('inspect', ''), ('selfsup', ''),
    ('tpu', INLINE)])
def test_a_notebook_runs_at_a_small_setting(name: str, backend: str, tmp_path: pathlib.Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
  nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
  for variable, value in {'VIT_JAX_SHORT': '1', 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'MPLBACKEND': backend,
                          'XLA_FLAGS': '--xla_backend_optimization_level=0', 'IPYTHONDIR': str(tmp_path)}.items():
    if value:
      monkeypatch.setenv(variable, value)
    else:
      monkeypatch.delenv(variable, raising=False)
  notebook = nbformat.read(ROOT / 'launch' / 'colab' / f'{name}.ipynb', as_version=4)
  nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name='python3',
                          resources={'metadata': {'path': str(tmp_path)}}).execute()
  outputs = [one for cell in notebook.cells if cell.cell_type == 'code' for one in cell.outputs]
  texts = ''.join(one.get('text', '') for one in outputs)
  assert 'local runtime with a' in texts and not [one for one in outputs if one.output_type == 'error']
  assert figures(outputs) >= {'quickstart': 2, 'inspect': 3, 'selfsup': 2, 'augreg': 1}.get(name, 0)
  assert os.listdir(tmp_path)


def figures(outputs: list[Any]) -> int:
  """The number of figures and pages that cells show."""
  return sum(any(kind in one.get('data', {}) for kind in ('image/png', 'text/html')) for one in outputs)
