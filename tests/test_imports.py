"""The layer rule: what each package may import, read from the source without running it."""
from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'vit_jax'

FLOORS = [
    ['core'],
    ['config', 'record'],
    ['models', 'optim', 'parallel', 'recipes'],
    ['data', 'objectives', 'evaluate', 'weights', 'train'],
    ['inspect', 'jobs', 'replay'],
    ['plan', 'export'],
    ['study'],
]
"""Packages from the ground up. No import runs upward; the modules outside packages (main, api) are on top."""
APART = {'data': {'objectives', 'evaluate', 'weights', 'train'}, 'optim': {'models'}, 'parallel': {'models'},
         'objectives': {'evaluate', 'weights', 'train'}, 'evaluate': {'objectives', 'weights'},
         'train': {'data', 'objectives', 'evaluate', 'weights'}, 'models': {'optim'}, 'record': {'config'}}
"""What a package does not know of its own floor."""
ONLY_IN = {
    'flax': ('models/', 'nnx.py'),
    'grain': ('data/', 'jobs/train.py'),
    'tensorflow_datasets': ('data/',),
    'cv2': ('data/',),
    'orbax': ('train_plain.py', 'train/checkpoint.py', 'train/checkpoint_reader.py', 'weights/runs.py'),
    'absl': ('main.py', 'config/', 'data/'),
    'tokenizers': ('data/text/',),
    'sentencepiece': ('data/text/',),
    'tensorflow': (),
    'torch': (),
    'benchmarks': (),
    'tests': (),
}
FILES = sorted(PACKAGE.rglob('*.py'))


@functools.cache
def nodes(path: pathlib.Path) -> tuple[ast.Import | ast.ImportFrom | ast.Assign, ...]:
  """The imports and assignments of a file, also inside functions."""
  return tuple(node for node in statements(ast.parse(path.read_text()).body)
               if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign))


def statements(body: list) -> Iterator[ast.AST]:
  """All statements of a body, also those inside others; expressions, which are most of a tree, hold none."""
  for node in body:
    yield node
    for part in ('body', 'orelse', 'finalbody', 'handlers', 'cases'):
      yield from statements(getattr(node, part, ()))


def imports(path: pathlib.Path) -> list[str]:
  """Full names of all modules a file imports, also inside functions."""
  found = []
  for node in nodes(path):
    if isinstance(node, ast.Import):
      found += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      found += [node.module] + [f'{node.module}.{alias.name}' for alias in node.names]
  return found


def may_import(package: str) -> set[str]:
  """The packages that one of `FLOORS` may import."""
  floor = next(i for i, names in enumerate(FLOORS) if package in names)
  return {name for names in FLOORS[:floor + 1] for name in names} - APART.get(package, set())


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_package_may(path: pathlib.Path) -> None:
  where = str(path.relative_to(PACKAGE))
  package = where.split('/')[0]
  for name in imports(path):
    parts = name.split('.')
    if parts[0] == 'vit_jax' and len(parts) > 1 and (PACKAGE / package).is_dir() and (PACKAGE / parts[1]).is_dir():
      assert parts[1] in may_import(package), f'{where} may not import {name}'
    if parts[0] in ONLY_IN:
      assert where.startswith(ONLY_IN[parts[0]]), f'{where} may not import {name}'


def test_no_package_imports_the_modules_on_top() -> None:
  top = {f'vit_jax.{path.stem}' for path in PACKAGE.glob('*.py') if path.stem != '__init__'}
  assert {'vit_jax.main', 'vit_jax.api'} <= top
  for path in FILES:
    if path.parent != PACKAGE:
      assert not top & set(imports(path)), path


def test_every_package_is_on_a_floor() -> None:
  found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != '__pycache__'}
  assert found == {name for names in FLOORS for name in names}


def test_no_modules_import_each_other_in_a_circle() -> None:
  """A module of a package needs the package's own code only if it takes a name from it that is not a module."""
  modules = {'.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): p for p in FILES}
  edges = {name: {found for found in needed(path, modules) if found != 'vit_jax'} for name, path in modules.items()}
  while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
    edges = {name: targets for name, targets in edges.items() if name not in leaves}
  assert not edges, f'in a circle, or above one: {sorted(edges)}'


def needed(path: pathlib.Path, modules: Collection[str]) -> set[str]:
  """The modules of ours that a file imports, or takes names from, also inside functions."""
  found: set[str] = set()
  for node in nodes(path):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      full = {f'{node.module}.{alias.name}' for alias in node.names}
      found |= full | ({node.module or ''} if full - set(modules) else set())
  return found & set(modules)


def test_no_module_is_a_place_for_everything() -> None:
  names = {p.stem for p in FILES}
  assert not names & {'utils', 'helpers', 'misc', 'common'}


SLOW = ('cv2', 'tensorboardX', 'grain', 'sklearn', 'matplotlib', 'tensorflow_datasets', 'ml_collections', 'orbax',
        'tokenizers', 'sentencepiece',
        'google.protobuf', 'google_crc32c', 'tensorflow', 'jax.experimental.pallas')
"""Packages that only the code that uses them imports."""
OF_FEW_RUNS = tuple(f'vit_jax.{name}' for name in (
    'data.answers', 'data.formats.pseudo', 'data.text', 'evaluate.features', 'evaluate.fewshot', 'evaluate.knn',
    'evaluate.segmentation', 'evaluate.store', 'jobs.teacher_labels', 'jobs.text_towers', 'objectives.sam', 'recipes',
    'train.tracker_hooks', 'weights.init_state', 'weights.loading', 'weights.preprocess'))
"""Modules of this package that a run imports only where its config names them."""
STARTS = {
    'the package, its help and a wrong flag': """
        import vit_jax, vit_jax.main
        assert vit_jax.main.run(['--help']) == 0 and vit_jax.main.run(['list', '--fast']) == 2
        """,
    'a job that predicts': 'from vit_jax.jobs import predict; predict.run',
    'a run on data in memory, up to its first step': """
        import pathlib, tempfile
        from vit_jax.config import schema as s
        from vit_jax.jobs import startup, train
        startup.start()
        model = s.ViT(patch=8, width=8, depth=1, heads=1, mlp=s.Mlp(8))
        config = s.Config(name='x', batch_size=8, length='2 steps', image_px=(16, 16), model=model, evals={},
                          data=s.Data(source='synthetic', recipe=s.Recipe(crop=s.Crop.RESIZE)))
        with tempfile.TemporaryDirectory() as folder:
          run = train.Run(config, pathlib.Path(folder), 0.)
          assert run.checkpointer.restore(run.parts.program.placed_state) is None
          assert len(next(run.loader.batches(0))['image']) == 8
        """}


@pytest.mark.parametrize('start', STARTS)
def test_a_start_imports_only_what_it_uses(start: str) -> None:
  own = {'the package': ('jax', 'flax', 'numpy'), 'a run': OF_FEW_RUNS}
  unused = (*SLOW, *next((names for name, names in own.items() if start.startswith(name)), ()))
  code = f'{textwrap.dedent(STARTS[start])}\nimport sys\nprint(sorted({set(unused)} & sys.modules.keys()))'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
  assert done.stdout.strip().endswith('[]'), done.stdout + done.stderr


def test_configs_are_not_written_to_after_overrides() -> None:
  for path in FILES:
    for node in nodes(path):
      if isinstance(node, ast.Assign):
        for target in node.targets:
          assert not ast.unparse(target).startswith(('config.', 'self.config.')), f'{path}: {ast.unparse(node)}'
