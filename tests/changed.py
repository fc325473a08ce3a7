"""The test files that a change can affect: `python -m tests.changed [BASE]` prints them, one a line.

A change is what differs between the files here and where this branch left BASE (the first of origin/main, main and HEAD
that exists), files that git does not yet know included. A test file is affected if it imports a changed module, also
through other modules; if it names one in a string, as tests that start a program do; or if it names a changed file
that is not a module. A change of what every test depends on (`EVERYTHING`) affects all of them.
"""
from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[1]
EVERYTHING = ('pyproject.toml', 'setup.py', 'tests/conftest.py', 'tests/compiler.py')
BASES = ('origin/main', 'main', 'HEAD')


def main() -> int:
  """Prints the affected test files."""
  names = changed(*sys.argv[1:2])
  found = affected(names)
  print(f'{len(names)} changed files affect {len(found)} of {len(all_tests())} test files.', file=sys.stderr)
  for path in found:
    print(path.relative_to(ROOT))
  return 0


def changed(base: str = '') -> list[str]:
  """Paths from the root of the checkout of what differs from `base`, deleted files included."""
  base = base or next(name for name in BASES if not _git('rev-parse', '-q', '--verify', name).returncode)
  start = _git('merge-base', 'HEAD', base).stdout.strip() or base
  out = _git('diff', '--name-only', start), _git('ls-files', '--others', '--exclude-standard')
  return sorted({line for one in out for line in one.stdout.splitlines()})


def _git(*words: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True, check=False)


def all_tests() -> list[pathlib.Path]:
  """All of them, in the order of pytest."""
  return sorted((ROOT / 'tests').rglob('test_*.py'))


def affected(names: Collection[str]) -> list[pathlib.Path]:
  """The test files that a change of the files `names` can affect."""
  files = all_tests()
  if set(names) & set(EVERYTHING):
    return files
  reached = reach({path for path in _modules().values() if str(path.relative_to(ROOT)) in names}, dependents())
  folders = {(ROOT / name).parent for name in names if pathlib.Path(name).name == 'conftest.py'}
  others = [name for name in names if not name.endswith('.py')]
  return [path for path in files if path in reached or folders & set(path.parents) or _names_any(path, others)]


def reach(start: set[pathlib.Path], after: Mapping[pathlib.Path, set[pathlib.Path]]) -> set[pathlib.Path]:
  """What can be reached from `start`, which is part of it."""
  found, new = set(start), set(start)
  while new:
    new = {path for one in new for path in after.get(one, ())} - found
    found |= new
  return found


@functools.cache
def dependents() -> dict[pathlib.Path, set[pathlib.Path]]:
  """The files that import each module, or name it in a string."""
  modules = _modules()
  found: dict[pathlib.Path, set[pathlib.Path]] = {}
  for path in sorted(set(modules.values())):
    for name in _uses(path):
      for module in _prefixes(name):
        if module in modules:
          found.setdefault(modules[module], set()).add(path)
  return found


@functools.cache
def _modules() -> dict[str, pathlib.Path]:
  """Files by the names that they are imported by; those of configs and those directly in `tests` have two."""
  found = {}
  for folder in ('vit_jax', 'configs', 'benchmarks', 'tests', 'launch'):
    for path in sorted((ROOT / folder).rglob('*.py')):
      name = '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
      found[name] = path
      if folder == 'configs':
        found[f'vit_jax.{name}'] = path
      if folder == 'tests' and path.parent.name == 'tests':
        found[path.stem] = path
  return found


def _uses(path: pathlib.Path) -> Iterator[str]:
  """Full names that a file imports, and modules that are named in a string; in a test also configs."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f'{node.module}.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
      yield from _named(node.value, is_test=path.name.startswith('test_'))


def _named(text: str, *, is_test: bool) -> Iterator[str]:
  """The module that a string names, such as `vit_jax.main`, `jobs.train` or `configs/digits.py`; `digits` in a test."""
  name = text.removeprefix('--config=').partition(':')[0].removesuffix('.py').replace('/', '.')
  if name.startswith(('vit_jax.', 'configs.', 'benchmarks.')):
    yield name
  elif '.' in name and name.replace('.', '').isidentifier():
    yield f'vit_jax.{name}'
  elif is_test and name.isidentifier():
    yield f'configs.{name}'


def _prefixes(name: str) -> list[str]:
  """`a.b.c` -> `a.b.c`, `a.b`: a name of a module, or of something in one; not `vit_jax`, which imports on demand."""
  return [part for part in (name, name.rpartition('.')[0]) if part not in ('', 'vit_jax')] or [name]


def _names_any(path: pathlib.Path, names: Collection[str]) -> bool:
  """Whether a test is in the folder of the tests of these files, or mentions one."""
  text = path.read_text()
  return any(pathlib.Path(name).name in text or path.parent.name == pathlib.Path(name).parts[0] for name in names)


if __name__ == '__main__':
  sys.exit(main())
