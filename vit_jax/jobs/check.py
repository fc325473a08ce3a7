"""Problems of a run that are known before it starts: where its data, weights and run directory are.

The job is `vit_jax/check.py`. It calls `problems`, and if there are none, `training_problems`, which builds the objects
of the run with the functions that a run calls, without its devices and without the compiler. For `--manifest` it first
calls `read_manifest`, so that what would make the pods of a JobSet fail is found before `kubectl apply` requests a TPU
slice. `study` calls `problems`, too.

A run starts on this machine, or elsewhere: on hosts that get a copy of this checkout, and whose other files are not
known here. No image is read, and networks and parameters are shapes. What needs a network connection is left to the
run, as are large weights, weights that are not on this machine, and images that a teacher labels. What follows from the
config alone is in `config/check.py`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeVar

import jax

from vit_jax.config import check, layout, schema
from vit_jax.config.schema import ranges
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data import loader as loaders
from vit_jax.data import opening, user_files
from vit_jax.data.formats import array_record, folder, mixture, shards, tfds
from vit_jax.data.source import title
from vit_jax.data.text import prompts as prompting
from vit_jax.evaluate import evaluators as evaluation
from vit_jax.jobs import build, train
from vit_jax.models import cost
from vit_jax.objectives import kinds
from vit_jax.parallel import mesh as meshes
from vit_jax.record import storage
from vit_jax.weights import addresses, inherit, init_state
from vit_jax.weights.network import Weights

DATA, WORKDIR = '{data}', '{workdir}'
"""Words of a command that launchers replace by folders of the hosts."""
PACKED = ('parquet', 'tfrecord', 'wds')
"""Kinds of sources that are patterns of files."""
SETTINGS = {kind: f'source={kind}:{DATA}' for kind in ('folder', 'array_record', *PACKED)} | {
    'tfds': 'data_dir={data}', 'vtab': 'data_dir={data}'}
"""The setting of `data` in which a config names a folder, by the kind of its source."""
FEW_FILES = 20_000
"""Listing a folder with more files takes seconds to minutes, which a line announces."""
CHIPS = {'tpu-v4-podslice': 'v4', 'tpu-v5-lite-podslice': 'v5e', 'tpu-v5p-slice': 'v5p', 'tpu-v6e-slice': 'v6e',
         'tpu7x': 'tpu7x'}
"""The name of a chip by the value of the node label `cloud.google.com/gke-tpu-accelerator`."""
PLACEHOLDERS = ('PROJECT/', 'REPOSITORY/', 'MY-DATA-BUCKET', 'MY-RUNS-BUCKET')
ASSUMED_STEPS, ASSUMED_CLASSES = 1_000_000, 1_000
"""Steps of an epoch and classes, where neither the config nor a dataset on this machine has them.

So many steps that no schedule is longer than a run, and few enough for a thousand epochs.
"""
LARGE_BYTES = 4 << 30
"""Weights of more bytes are not read, which takes memory and the better part of a minute."""
_CHIP, _SHAPE = 'cloud.google.com/gke-tpu-accelerator', 'cloud.google.com/gke-tpu-topology'
T = TypeVar('T')


class Place(NamedTuple):
  """Where a run will be.

  elsewhere: not on this machine.
  data: address that a launcher mounts or copies for the word {data}; '' = none.
  root: folder to which relative paths refer.
  """
  elsewhere: bool = False
  data: str = ''
  root: pathlib.Path = pathlib.Path()


def problems(config: schema.Config, workdir: storage.Path | None, place: Place) -> list[str]:
  """Returns all problems of the data, the initial weights and the directory of a run."""
  lines, places = [], [*sources(config)]
  if place.data and not any(DATA in one for one in (config.data.data_dir, *(source for _, source in places))):
    setting = SETTINGS.get(config.data.source.partition(':')[0], SETTINGS['array_record'])
    lines.append(f'--data: expected the word {DATA} in the command, for the folder of {place.data} on the hosts, got '
                 f'none; the config reads data.source={config.data.source}. Add --config.data.{setting} to the '
                 'command.')
  for setting, source in places:
    try:
      if place.elsewhere:
        lines += _elsewhere(setting, source, config.data, place)
      else:
        _check_here(setting, source, config.data)
    except UserError as error:
      lines.append(str(error))
  weights = config.init_from
  if place.elsewhere and weights and not weights.startswith(('/', DATA, WORKDIR)) and '://' not in weights:
    path = pathlib.Path(os.path.expanduser(weights))
    if (place.root / path).exists() and (path.parts[0] == 'runs' or weights.startswith('~')):
      lines.append(f'init_from={weights}: expected weights that the hosts can read, got a path of this machine, which '
                   'is not copied to them. Copy it to a bucket and give its gs:// address.')
  if isinstance(workdir, pathlib.Path) and not place.elsewhere and WORKDIR not in str(workdir):
    there = next(path for path in (workdir, *workdir.parents) if path.exists())
    if not there.is_dir():
      lines.append(f'--workdir={workdir}: expected a folder, got the file {there}. Choose another.')
    elif not os.access(there, os.W_OK | os.X_OK):
      lines.append(f'--workdir={workdir}: expected a folder that can be written, got no permission to write in '
                   f'{there}. Choose another, or change its permissions.')
  return list(dict.fromkeys(lines))


def training_problems(config: schema.Config, place: Place, workdir: storage.Path | None = None,
                      overridden: Collection[str] = ()) -> list[str]:
  """Returns the problems of a training run that its objects find when they are built, from the files on this machine.

  Args:
    config: a config for which `problems` found nothing.
    place: where the run will be.
    workdir: the run directory; None = the default.
    overridden: names of the settings on the command line.
  """
  named = dict.fromkeys(source for _, source in sources(config))
  is_here = not place.elsewhere and not config.data.pseudo.source
  for source in named:  # files of this machine, or an index that is read in seconds
    kind, _, where = source.partition(':')
    is_here &= kind in opening.KINDS and kind != 'hf' and not (kind in ('wds', 'tfrecord') and '://' in where)
  for source in named if is_here else ():
    if source.startswith('folder:'):
      folders = os.walk(user_files.resolve(source.partition(':')[2], 'data.source'))
      if any(num > FEW_FILES for num in itertools.accumulate(len(files) for _, _, files in folders)):
        print(f'Listing {source}, which has more than {FEW_FILES:,} files. The list is kept for the run.', flush=True)
  log, collector = logging.getLogger('vit_jax'), _Collector()
  before = log.level
  log.setLevel(logging.ERROR)  # the run itself shows warnings
  try:
    _find(config, workdir, overridden, collector, elsewhere=place.elsewhere, is_here=is_here)
  finally:
    log.setLevel(before)
  return collector.problems


def sources(config: schema.Config) -> Iterator[tuple[str, str]]:
  """Yields the setting and the name of every source of a run; a mixture yields each of its sources."""
  named = {'data.source': config.data.source, 'data.pseudo.source': config.data.pseudo.source,
           **{f'evals.{name}.source': settings.source for name, settings in config.evals.items()}}
  for setting, source in named.items():
    terms = mixture.parse(source.removeprefix('mix:')) if source.startswith('mix:') else []
    yield from ((setting, term.source) for term in terms)
    if source and not terms:
      yield setting, source


def _check_here(setting: str, source: str, data: schema.Data) -> None:
  """Raises UserError unless this machine has the data; reads no image."""
  kind, _, where = source.partition(':')
  if kind == 'folder' and where:
    path = user_files.resolve(where, setting)
    if not os.path.isdir(path):
      folder.refuse_placeholder(os.path.relpath(path))
      raise UserError(f'data.source=folder:{path}: expected a folder of images, got no folder. Set '
                      '--config.data.source=folder:PATH; for a run on other hosts, use vit-jax check --elsewhere.')
  elif kind == 'array_record' and where:
    path = user_files.locate(where, setting)
    array_record.read_info(os.path.dirname(path) if array_record.is_pattern(path) else path)
  elif kind == 'tfds' and where:
    tfds.find(where, data_dir=data.data_dir)
  else:
    opener = opening.find_opener(source)
    if kind in (*PACKED, 'vtab'):
      opener(where, data, schema.Config().image_px)  # lists the files


def _elsewhere(setting: str, source: str, data: schema.Data, place: Place) -> Iterator[str]:
  """Yields the problem of a path on the hosts: absolute ones are theirs, relative ones must be in the checkout."""
  kind, _, where = source.partition(':')
  what = f'{setting}={source}'
  if kind not in SETTINGS or not where:
    opening.find_opener(source)
    return
  if kind in ('tfds', 'vtab'):
    where = data.data_dir
    what = f'data.data_dir={where}'
  if not where:
    yield (f'data.data_dir: expected the folder of {source} on the hosts, got none. Give the data to the launcher '
           f'(--data=gs://BUCKET/FOLDER) and add --config.data.data_dir={DATA} to the command, or set an absolute '
           'path.')
  elif '://' in where:
    (user_files.locate if kind in ('array_record', *PACKED) else user_files.resolve)(where, what)
  elif not where.startswith((DATA, '/', '~')) and not (place.root / shards.folder_of(where)).exists():
    yield (f'{what}: expected a folder of the hosts, got a relative path, which is not in the checkout {place.root}. '
           f'Give the data to the launcher (--data=gs://BUCKET/FOLDER) and write {DATA} for its folder, or an absolute '
           'path.')


class _Collector:
  """Calls functions and collects the errors of a person that they raise."""

  def __init__(self) -> None:
    self.problems: list[str] = []

  def result(self, work: Callable[[], T]) -> T | None:
    """Returns what a function returns; None if it raises UserError, which is a problem."""
    try:
      return work()
    except UserError as error:
      if str(error) not in self.problems:
        self.problems.append(str(error))
      return None


def _find(config: schema.Config, workdir: storage.Path | None, overridden: Collection[str], collector: _Collector, *,
          elsewhere: bool, is_here: bool) -> None:
  """Finds the weights and the data, reads what is on this machine, and builds the run with it."""
  named = collector.result(lambda: init_state.named(config)) or {}
  for prefix, part in ranges.walk(config):
    if prompts := getattr(part, 'prompts', ''):
      collector.result(functools.partial(prompting.find_templates, prompts, setting=f'{prefix}prompts'))
  named |= {f'evals.{name}.weights': settings.weights for name, settings in config.evals.items()
            if isinstance(settings, schema.TextEvaluation) and settings.weights}
  paths = [] if elsewhere else [_path(where, collector) for where in dict.fromkeys(named.values())]
  num_bytes = sum(file.stat().st_size for path in paths if path
                  for file in (path.rglob('*') if path.is_dir() else [path]) if file.is_file())
  is_known = not collector.problems and not elsewhere and None not in paths and num_bytes <= LARGE_BYTES
  weights: Weights | None = None
  if is_known and named:
    where = workdir or train.default_workdir(config.name)
    resolved = collector.result(lambda: inherit.resolve(config, overridden, where))
    if resolved is None:
      return
    config, weights = resolved
    collector.result(functools.partial(check.check, config))
    if collector.problems:
      return
  data = collector.result(lambda: build.open_data(config)) if is_here else None
  if is_here and data is None:
    return
  _build(config, data, weights, collector, is_known=is_known)


def _path(where: str, collector: _Collector) -> pathlib.Path | None:
  """Returns the local path of weights; None if they are not on this machine, which is a problem of paths alone."""
  if not addresses.exists(os.path.expanduser(where)) and addresses.is_remote(where):
    with contextlib.suppress(UserError):
      return addresses.local(where, offline=True)
    return None
  return collector.result(lambda: addresses.local(where))


def _build(config: schema.Config, data: build.Data | None, weights: Weights | None, collector: _Collector, *,
           is_known: bool) -> None:
  """Builds a run on one device of this machine. What depends on the devices of the run is left out."""
  mesh = meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1])
  config = layout.plain(cost.plain(dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1))))
  if data:
    measured = collector.result(lambda: build.measured(config, data.train))
    if measured is None:
      return
    config = measured
  numbers = known_numbers(config)
  if data:
    numbers = build.Numbers(config.data.num_examples or len(data.train), len(data.class_names), data.in_memory)
    collector.result(lambda: loaders.check_batch_size(config.batch_size, len(data.train), title(data.train)))
  elif config.data.num_examples and not config.data.any_num_examples:
    collector.result(lambda: loaders.check_batch_size(config.batch_size, config.data.num_examples, config.data.source))
  parts = collector.result(lambda: build.parts(config, mesh=mesh, **numbers._asdict()))
  if parts and is_known and (data or not config.objective.has_head):  # a head is compared by its classes
    collector.result(lambda: init_state.given(config, parts.program, data.class_names if data else (), weights))
  if not data:
    return
  opened = data._replace(in_memory=False)  # else evaluators decode all images now
  collector.result(lambda: build.check_size(config.data, opened.train))
  spec = kinds.of(config)
  targets = collector.result(lambda: (spec.open_maps(opened.train), spec.open_texts(opened.train)))
  has_texts = any(isinstance(settings, schema.TextEvaluation) for settings in config.evals.values())
  if parts and targets and (is_known or not has_texts):  # else they would read the weights again
    collector.result(lambda: evaluation.build(build.resources(
        config, opened, parts.objective, mesh=mesh, shard=meshes.local_rows(mesh))))


def known_numbers(config: schema.Config) -> build.Numbers:
  """Returns the numbers of the data that the config describes, or assumed ones."""
  data = config.data
  return build.Numbers(data.num_examples or ASSUMED_STEPS * config.batch_size, data.num_classes or ASSUMED_CLASSES,
                       in_memory=False)


class Manifest(NamedTuple):
  """What a manifest runs: a command line, on so many slices of a topology."""
  line: str
  topology: str
  slices: int


def read_manifest(path: str) -> Manifest:
  """Returns what a manifest runs.

  Raises:
    UserError: the file is missing or is no JobSet of one job, or lists all that would make its pods fail.
  """
  import yaml  # a dependency of flax
  try:
    text = pathlib.Path(path).read_text()
    manifest = next(document for document in yaml.safe_load_all(text)
                    if isinstance(document, dict) and document.get('kind') == 'JobSet')
    (replicated,) = manifest['spec']['replicatedJobs']
    job = replicated['template']['spec']
    pod = job['template']['spec']
    chip, shape = pod['nodeSelector'][_CHIP], str(pod['nodeSelector'][_SHAPE])
    arguments = [str(word) for word in pod['containers'][0]['args']]
    slices = int(replicated.get('replicas', 1))
    chips = int(pod['containers'][0]['resources']['limits']['google.com/tpu'])
    total, counts = math.prod(int(side) for side in shape.split('x')), (job['parallelism'], job['completions'])
    is_complete = counts[0] * chips == total and counts[0] == counts[1]
  except OSError as error:
    raise failures.kind(error)(f'{path}: expected a manifest, got "{error.strerror}". Copy '
                                'launch/k8s.yaml.') from error
  except (yaml.YAMLError, StopIteration, LookupError, AttributeError, TypeError, ValueError, ArithmeticError,
          RecursionError) as error:
    mark = getattr(error, 'problem_mark', None)
    got = (f'no YAML at line {mark.line + 1}, column {mark.column + 1}' if mark
           else f'none of the field {str(error.args[0])[:60]!r}' if isinstance(error, KeyError)
           else 'no document of kind JobSet' if isinstance(error, StopIteration)
           else 'a field of another type, or a number of jobs that is not 1')
    raise UserError(f'{path}: expected a JobSet with one job on TPUs as in launch/k8s.yaml, got {got}. Compare it with '
                    'that file.') from error
  content = re.sub(r'#.*', '', text)
  problems = [f'expected your own names, got the placeholder {word.strip("/")}. Replace it.'
              for word in PLACEHOLDERS if word in content]
  if not is_complete:
    problems.append(f'parallelism and completions: expected {max(1, total // max(1, chips))}, the hosts of a {shape} '
                    f'slice with {chips} chips each, got {counts[0]} and {counts[1]}.')
  if chip not in CHIPS:
    problems.append(f'{_CHIP}: expected one of {", ".join(CHIPS)}, got {chip}.')
  if problems:
    raise UserError('\n'.join(f'{path}: {problem}' for problem in problems))
  return Manifest(shlex.join(['vit-jax', *arguments]), f'{CHIPS[chip]}:{shape}', slices)
