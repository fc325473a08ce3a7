"""The notebooks share their set-up, hold the outputs of their code, and run, whichever backend of matplotlib is set."""
from __future__ import annotations

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import types
from typing import Any

import pytest

from vit_jax.commands import JOBS
from vit_jax.parallel import hardware

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'launch' / 'colab').glob('*.ipynb'))
INLINE = 'module://matplotlib_inline.backend_inline'
TIMEOUT_S = 600
FIGURES = {'augreg': 1, 'finetune': 1, 'inspect': 5, 'quickstart': 2, 'selfsup': 2, 'tpu': 0}


def code(path: pathlib.Path) -> list[str]:
  return [''.join(cell['source']) for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == 'code']


def test_these_are_the_notebooks() -> None:
  assert [path.stem for path in NOTEBOOKS] == ['augreg', 'finetune', 'inspect', 'quickstart', 'selfsup', 'tpu']


def load(path: pathlib.Path) -> types.ModuleType:
  """Returns a script of the repository as a module."""
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_its_code_is_python_and_its_badge_opens_it(path: pathlib.Path) -> None:
  notebook = json.loads(path.read_text())
  assert notebook['nbformat'] == 4 and notebook['nbformat_minor'] >= 5
  assert len({cell['id'] for cell in notebook['cells']}) == len(notebook['cells'])
  for cell in notebook['cells']:
    assert isinstance(cell['source'], list) and set(cell) >= {'cell_type', 'metadata', 'source'}
    if cell['cell_type'] == 'code':
      ast.parse(''.join(cell['source']))
  slug = load(ROOT / 'launch' / 'site' / 'repository.py').read()
  assert (f'[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google'
          f'.com/github/{slug}/blob/main/launch/colab/{path.name})') in ''.join(notebook['cells'][0]['source'])
  assert f"SOURCE = 'git+https://github.com/{slug}'" in '\n'.join(code(path))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_those_of_the_code_and_name_no_folder_of_a_machine(path: pathlib.Path) -> None:
  notebook = json.loads(path.read_text())
  cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
  script = load(path.parent / 'execute.py')
  assert notebook['metadata'][script.DIGEST] == script.digest(notebook), f'python launch/colab/execute.py {path.stem}'
  assert [cell['execution_count'] for cell in cells] == list(range(1, len(cells) + 1))
  outputs = [one for cell in cells for one in cell['outputs']]
  assert not any(one['output_type'] == 'error' for one in outputs)
  texts = ''.join(text for one in outputs for text in [*one.get('text', ()), *one.get('data', {}).get('text/html', ())])
  texts = re.sub('(&lt;|<)wbr(&gt;|>)', '', texts)
  assert 'local runtime with a CPU' in texts and 'Traceback' not in texts
  assert re.findall(r'(?<![\w.<:/])/(?:home|root|tmp|usr|opt|var|mnt|work|content|Users)/[^\s"<]*', texts) == []
  assert figures(outputs) >= FIGURES[path.stem] and path.stat().st_size < 1_500_000


def test_paths_in_outputs_become_relative_also_where_a_page_breaks_them() -> None:
  script = load(ROOT / 'launch' / 'colab' / 'execute.py')
  outputs = [{'text': f'/tmp/a.b/runs/x /tmp/a.b {ROOT}/vit_jax/main.py',
              'data': {'text/html': '/tmp/&lt;wbr&gt;a.&lt;wbr&gt;b/&lt;wbr&gt;runs/x /tmp/<wbr>a.<wbr>b/<wbr>y'}}]
  assert script.relative(outputs, pathlib.Path('/tmp/a.b')) == [
      {'text': 'runs/x  vit_jax/main.py', 'data': {'text/html': 'runs/x y'}}]


@pytest.mark.parametrize(('wheel', 'source', 'extra', 'installed'), [
    ('', 'git+https://example.org/a/b', '', 'git+https://example.org/a/b'),
    ('', 'git+https://example.org/a/b', 'gpu12', 'git+https://example.org/a/b'),
    ('vit_jax-0.1.0-py3-none-any.whl', 'git+https://example.org/a/b', 'tpu', 'file://{}/vit_jax-0.1.0-py3-none-any.whl'),
    ('', 'checkout', '', 'file://{}/checkout')])
def test_the_set_up_installs_a_repository_a_wheel_or_a_checkout_with_the_extra_of_the_devices(
    wheel: str, source: str, extra: str, installed: str, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  (cell,) = [text for text in code(NOTEBOOKS[0]) if text.startswith('#@title Setup')]
  commands: list[list[str]] = []
  monkeypatch.setattr(subprocess, 'run', lambda words, check: commands.append(words))
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  monkeypatch.setattr(hardware, 'extra', lambda: extra)
  monkeypatch.chdir(tmp_path)
  if wheel:
    pathlib.Path(wheel).touch()
  exec(re.sub(r"SOURCE = '[^']*'", f"SOURCE = '{source}'", cell), {'__name__': '__main__'})
  place = installed.format(tmp_path)
  assert [words[1:] for words in commands] == [
      ['-m', 'pip', 'install', '--quiet', '--no-deps', f'vit_jax @ {place}'],
      ['-m', 'pip', 'install', '--quiet', f'vit_jax{f"[{extra}]" * bool(extra)} @ {place}']]


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
  assert figures(outputs) >= FIGURES[name]
  assert os.listdir(tmp_path)


def figures(outputs: list[Any]) -> int:
  """The number of figures and pages that cells show."""
  return sum(any(kind in one.get('data', {}) for kind in ('image/png', 'text/html')) for one in outputs)
