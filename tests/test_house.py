"""One module owns each idea, and each room has a budget of lines: what the source files of the package may contain."""
from __future__ import annotations

import ast
import collections
import functools
import pathlib
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / 'vit_jax'
MOST_LINES = 500
"""Lines of a file."""
BUDGETS = {
    # Why some rooms hold more than at first. data, jobs, core, record: docstrings have protocols, layouts of files,
    # examples and arguments, and dense expressions are named steps; label files are two modules, of lines and of
    # splits; a push checks the licenses of all weights and teachers of a run. train: a barrier for checkpoints, so
    # that a save that fails in one process does not hang the others. core, optim, models: parameters state which of
    # them are matrices, blocks are told of images and padding and may state losses, and a block attends to other
    # tokens. objectives: which weights a teacher begins with, from weights, and the losses of a network. weights: what
    # is written for timm is checked as its program reads it. parallel: the layout and the choice of kernels, from
    # config. config: overrides are a module beside the engine. evaluate, export, plan: fields of records have shapes
    # and units, and dense expressions are named steps. jobs: the table of norms, from inspect. config: the rule of a
    # parameter, from optim.
    'data': 15_410, 'weights': 8_790, 'models': 6_100, 'config': 5_080, 'jobs': 6_350, 'evaluate': 4_440,
    'core': 3_490, 'objectives': 3_290, 'inspect': 2_860, 'plan': 3_340, 'record': 2_620, 'recipes': 1_870,
    'train': 1_900, 'export': 1_580, '.': 1_450, 'replay': 1_300, 'optim': 1_340, 'study': 1_050, 'parallel': 1_790}
"""Lines of a room: a folder of the package, or '.' for the files at its top. Who raises a number says why beside it."""
READERS = ('json.load', 'json.loads', 'json.JSONDecoder', 'np.load', 'np.loadtxt', 'np.genfromtxt', 'np.fromfile',
           'np.memmap', 'np.lib.format', 'pickle.load', 'pickle.loads', 'pickle.Unpickler', 'zipfile.ZipFile',
           'yaml.load', 'yaml.safe_load', 'yaml.safe_load_all')
"""What parses files: JSON and NumPy files are each read by one module, within limits."""
OWNED = {
    'locks': ('fcntl.flock', 'fcntl.lockf'),
    'threads': ('threading.Thread', 'threading.Timer', 'futures.ThreadPoolExecutor'),
    'memory files': ('os.memfd_create',),
    'readers': READERS}
"""Ideas, and the names that stand for them; moves and names of unfinished files are found by `moves`."""
OWNERS: dict[str, dict[str, str | dict[str, str]]] = {
    'moves': {
        'core/files.py': 'this is the module',
        'record/growing.py': 'the temporary folder of a mirror',
        'record/storage.py': 'object storage',
        'replay/job.py': 'the temporary folder of a replay, from mkdtemp',
        'train/profile.py': 'the temporary folder of a profile, from mkdtemp'},
    'locks': {
        'core/files.py': 'folders that are being made',
        'data/formats/listing.py': 'one process lists',
        'data/index.py': 'one process indexes',
        'record/run_directory.py': 'one process writes a run'},
    'threads': {
        'core/signals.py': 'answers Ctrl-C',
        'data/formats/hf.py': 'downloads',
        'data/index.py': 'files of an index',
        'data/loader.py': 'images that are held in memory',
        'data/prepare.py': 'examples of a shard',
        'data/workers.py': 'starts processes, and ends with the parent',
        'jobs/predict.py': 'reads images',
        'jobs/serve.py': 'the live page',
        'parallel/feed.py': 'one batch ahead',
        'record/growing.py': 'uploads a record',
        'record/trackers.py': 'a tracker never delays a step'},
    'memory files': {
        'data/formats/listing.py': 'a listing of this process',
        'data/shared.py': 'batches of loader processes'},
    'readers': {
        'core/archives.py': {'zipfile.ZipFile': 'the reader of NumPy files'},
        'core/documents.py': {'json.loads': 'the reader of JSON'},
        'data/formats/builtin.py': {'np.loadtxt': 'the digits of this package'},
        'data/formats/hf.py': {'yaml.safe_load': 'the head of a README, whose size is limited'},
        'data/prepare.py': {'np.lib.format': 'writes an image'},
        'evaluate/features.py': {'np.memmap': 'a temporary file, which this process made'},
        'evaluate/store.py': {
            'np.lib.format': 'writes arrays',
            'zipfile.ZipFile': 'writes an archive'},
        'jobs/check.py': {'yaml.safe_load_all': 'manifests of Kubernetes, which a person checks'},
        'plan/compile.py': {'pickle.loads': 'a request of the parent process, in a folder of its own'},
        'weights/files.py': {'np.lib.format': 'writes weights', 'zipfile.ZipFile': 'writes weights'},
        'weights/pickles.py': {'zipfile.ZipFile': 'writes weights'},
        'weights/safetensors.py': {'np.fromfile': 'tensors, whose sizes were compared with the file'}}}
"""Modules that have an idea, and why; of readers the reason of each."""


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding='utf-8'))


def files() -> dict[str, pathlib.Path]:
  return {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob('*.py'))}


def names(path: pathlib.Path) -> set[str]:
  """Returns the dotted names that a module uses, and those that it imports from a module without it."""
  found = set()
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Attribute):
      found.add(ast.unparse(node).removeprefix('concurrent.').replace('numpy.', 'np.'))
    elif isinstance(node, ast.ImportFrom):
      found |= {f'{(node.module or "").removeprefix("concurrent.")}.{one.name}' for one in node.names}
  return found


def moves(path: pathlib.Path) -> Iterator[str]:
  """Yields the lines where a module moves or removes files by hand, or names an unfinished one."""
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      name, of = node.func.attr, ast.unparse(node.func.value)
      is_one = len(node.args) == 1 and not node.keywords  # of a path; texts have two
      is_moving = name in ('replace', 'rename', 'renames') and (of == 'os' or is_one)
      if (name == 'rmtree' or is_moving) and of not in ('files', 'dataclasses'):
        yield f'{node.lineno}: {ast.unparse(node)[:80]}'
    if isinstance(node, ast.Constant) and str(node.value).endswith(('.part', '.tmp', '.half')):
      yield f'{node.lineno}: {node.value!r}'


def test_a_room_keeps_its_budget() -> None:
  lines: collections.Counter[str] = collections.Counter()
  for where, path in files().items():
    room, _, inside = where.partition('/')
    lines[room if inside else '.'] += len(path.read_text(encoding='utf-8').splitlines())
  assert lines.keys() == BUDGETS.keys()
  over = {room: f'{num:,} lines of {BUDGETS[room]:,}' for room, num in lines.items() if num > BUDGETS[room]}
  assert not over, 'make it shorter, or raise the budget with a reason beside it'


def test_no_file_is_too_long_to_read() -> None:
  assert not {where: num for where, path in files().items()
              if (num := len(path.read_text(encoding='utf-8').splitlines())) > MOST_LINES}


@pytest.mark.parametrize('idea', OWNERS)
def test_an_idea_is_only_in_the_modules_that_own_it(idea: str) -> None:
  if idea == 'moves':
    found = {where: set(moves(path)) for where, path in files().items()}
  else:
    found = {where: names(path) & {*OWNED[idea]} for where, path in files().items()}
  found = {where: what for where, what in found.items() if what}
  others = {where: what for where, what in found.items() if where not in OWNERS[idea]}
  assert not others, f'use one of the modules that own {idea}: {", ".join(OWNERS[idea])}'
  gone = {where for where, why in OWNERS[idea].items()
          if where not in found or (isinstance(why, dict) and set(why) != found[where])}
  assert not gone, 'these own less, or other names, than the table says'
