"""Messages about optional packages name a command that works in a checkout and beside a wheel."""
import ast
import pathlib
import re
import sys
from importlib import metadata

import pytest

from vit_jax.core import extras
from vit_jax.core.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


def test_the_command_names_the_packages_of_the_extra() -> None:
  assert extras.install('onnx') == "pip install 'onnx>=1.16' 'onnxruntime>=1.18'"
  assert extras.install('plan').startswith("pip install 'libtpu>=") and ';' not in extras.install('plan')


def test_without_metadata_the_command_is_that_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
  def missing(name: str) -> list[str]:
    raise metadata.PackageNotFoundError(name)

  monkeypatch.setattr(extras.metadata, 'requires', missing)
  assert extras.install('onnx') == "pip install -e '.[onnx]' in the checkout of vit_jax"


def test_a_missing_package_and_a_broken_one_are_reported(tmp_path: pathlib.Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
  with pytest.raises(UserError, match=r'^--to=x: expected the Python package onnxxx, got none. Run: pip '):
    extras.load('onnxxx.y', 'onnx', '--to=x')
  (tmp_path / 'broken_package.py').write_text("raise ImportError('libx.so is missing')")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(UserError, match=r'got an error when it is imported \(libx.so is missing\)'):
    extras.load('broken_package', 'onnx', '--to=x')
  assert 'onnxxx' not in sys.modules


def test_every_extra_that_the_code_names_exists() -> None:
  named = {node.value for path in (ROOT / 'vit_jax').rglob('*.py') for call in ast.walk(ast.parse(path.read_text()))
           if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
           and isinstance(call.func.value, ast.Name) and call.func.value.id == 'extras'
           for node in call.args[:2] if isinstance(node, ast.Constant) and isinstance(node.value, str)}
  known = set(metadata.metadata('vit-jax').get_all('Provides-Extra') or ())
  assert {'onnx', 'plan', 'gcs', 'text', 'crop', 'tfds'} <= named & known


def test_no_page_installs_the_project_by_its_name_alone() -> None:
  files = [*(ROOT / 'vit_jax').rglob('*.py'), *(ROOT / 'docs').rglob('*.md'), *ROOT.glob('*.md'),
           *(ROOT / 'launch').rglob('*.*')]
  found = [(str(path), line) for path in files if path.is_file()
           for line in path.read_text(encoding='utf-8', errors='replace').splitlines()
           if re.search(r"""pip install ['"]?vit[-_]jax""", line)]
  assert not found
