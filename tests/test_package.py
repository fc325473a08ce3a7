"""What is installed from a wheel, away from the checkout."""
from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from vit_jax import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
WHEEL = ('from setuptools import build_meta; print(build_meta.build_wheel({!r}))')


def python(folder: pathlib.Path, *words: str, **environ: str) -> str:
  done = subprocess.run([sys.executable, *words], cwd=folder, env={**os.environ, **environ}, text=True, check=False,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  assert done.returncode == 0, done.stdout[-3000:]
  return done.stdout


@pytest.mark.slow(reason='10 s: builds a wheel and starts the program twice')
def test_a_wheel_has_all_that_the_program_needs_and_says_what_it_is(tmp_path: pathlib.Path) -> None:
  source, elsewhere = tmp_path / 'source', tmp_path / 'elsewhere'
  elsewhere.mkdir()
  source.mkdir()
  for name in ('vit_jax', 'configs', 'benchmarks'):
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'MANIFEST.in'):
    shutil.copy(ROOT / name, source)
  python(source, '-c', WHEEL.format(str(tmp_path)))
  (wheel,) = tmp_path.glob('vit_jax-*.whl')
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (metadata,) = [archive.read(name).decode() for name in names if name.endswith('METADATA')]
    archive.extractall(tmp_path / 'site')
  assert not [name for name in names if name.startswith('benchmarks')]
  assert 'vit_jax/py.typed' in names and 'vit_jax/configs/digits.py' in names
  assert any(name.startswith('vit_jax/inspect/templates/') for name in names)
  assert any(name.endswith('LICENSE') for name in names)
  assert 'vit_jax/records/digits.json' in names and 'importlib_resources' in metadata
  links = re.findall(r'\]\(([^)]*)\)|src="([^"]*)"', metadata)
  assert len(links) > 40 and all(re.match(r'https?://|#', one or other) for one, other in links)
  assert '/vit_jax/blob/main/docs/' in metadata and '/vit_jax/raw/main/.github/' in metadata
  labels = ('imagenet_1k.txt', 'imagenet_21k.txt', 'LICENSE_WORDNET')
  assert {f'vit_jax/data/labels/{name}' for name in labels} <= {*names}
  assert 'Author: The vit_jax authors' in metadata and 'License-Expression: Apache-2.0' in metadata.replace(
      'License: Apache-2.0', 'License-Expression: Apache-2.0') and '## Start' in metadata
  found = python(elsewhere, '-P', '-c', f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
                 "from vit_jax import main; print(main.__file__); main.run(['list']); main.run(['--version']); "
                 "main.run(['list', '--records=digits'])")
  assert re.search(r'^digits +train ', found, re.M)
  assert str(tmp_path / 'site') in found and 'vit_l16_jft' in found and 'vit_jax ' in found


@pytest.mark.slow(reason='5 s: packs all files')
def test_a_source_distribution_has_all_tests_and_what_they_read(tmp_path: pathlib.Path) -> None:
  kept = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split('\n')
  if not any(kept):
    pytest.skip('not a git checkout')
  source = tmp_path / 'source'
  for name in filter(None, kept):
    if (ROOT / name).is_file():
      (source / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, source / name)
  python(source, '-c', WHEEL.replace('wheel', 'sdist').format(str(tmp_path)))
  (path,) = tmp_path.glob('vit_jax-*.tar.gz')
  with tarfile.open(path) as archive:
    names = {name.partition('/')[2] for name in archive.getnames()}
  assert {*filter(None, kept)} - names == set()


def test_the_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--version']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('vit_jax ') and 'Python ' in lines[0] and lines[1].startswith('jax ')


def test_the_citation_and_the_changes_are_of_this_version() -> None:
  from vit_jax import __version__
  assert f'\nversion: {__version__}\n' in (ROOT / 'CITATION.cff').read_text()
  assert f'## {__version__}' in (ROOT / 'CHANGELOG.md').read_text()
