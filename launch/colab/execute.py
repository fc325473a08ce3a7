"""Runs notebooks in a folder of their own and stores their outputs: after a change of a notebook.

    python launch/colab/execute.py                    all of them, a few minutes each on a CPU
    python launch/colab/execute.py quickstart tpu

Needs the packages of the extra `test`. Paths of the folder become relative, as a reader's own folder is elsewhere.
"""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DIGEST = 'executed_code'
"""The key in a notebook's metadata for the digest of the code that made its outputs."""


def digest(notebook: dict[str, Any]) -> str:
  """Returns a digest of the code of a notebook, in which the address of the repository does not count."""
  code = [''.join(cell['source']) for cell in notebook['cells'] if cell['cell_type'] == 'code']
  return hashlib.sha256(re.sub(r'github\.com/[^\'"]*', '', json.dumps(code)).encode()).hexdigest()


def relative(outputs: list[Any], folder: pathlib.Path) -> list[Any]:
  """Returns the outputs of a cell with paths relative to the folder of the notebook, and to the checkout.

  Reports break lines in paths with `<wbr>`, which is escaped in the frame of a page.
  """
  text = json.dumps(outputs)
  for place in (folder, ROOT):
    gap = '(?:<wbr>|&lt;wbr&gt;)?'
    path = ''.join(re.escape(letter) + gap for letter in str(place))
    text = re.sub(f'{path}(?:/{gap})?', '', text)
  return json.loads(text)


def execute(path: pathlib.Path) -> None:
  """Runs a notebook and writes it with its outputs.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed; the file stays as it was.
  """
  import nbclient
  import nbformat
  notebook = nbformat.read(path, as_version=4)
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name).resolve()
    nbclient.NotebookClient(notebook, timeout=None, kernel_name='python3', record_timing=False, coalesce_streams=True,
                            resources={'metadata': {'path': str(folder)}}).execute()
    for cell in notebook.cells:
      if cell.cell_type == 'code':
        cell.outputs = [nbformat.from_dict(one) for one in relative(cell.outputs, folder)]
  notebook.metadata = {'colab': {'name': path.name}, 'kernelspec': notebook.metadata['kernelspec'],
                       'language_info': {'name': 'python'}}
  text = nbformat.writes(notebook)
  stored = json.loads(text)
  stored['metadata'][DIGEST] = digest(stored)
  path.write_text(json.dumps(stored, indent=1, ensure_ascii=False, sort_keys=True) + '\n', encoding='utf-8')


if __name__ == '__main__':
  os.environ.update(PYTHONPATH=str(ROOT), JAX_PLATFORMS='cpu', PYTHONWARNINGS='ignore')
  os.environ.pop('MPLBACKEND', None)
  for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob('*.ipynb')):
    print(name, flush=True)
    execute(HERE / f'{name}.ipynb')
