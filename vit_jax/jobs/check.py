"""Finds problems of a run before the run starts: problems of data, weights, run directory, network and objective.

The job `check` (`vit_jax/check.py`) calls `problems` and, if there are none, `training_problems`, which builds the
objects of the run with the functions that a run calls, without the devices of the run and without the compiler. For
`--manifest`, the job first calls `read_manifest`, which finds what would make the pods of a JobSet fail. `study` calls
`problems`, too.

A run starts on this machine or elsewhere, on hosts that get a copy of this checkout and have other files. No image is
read, and parameters are shapes without values. The checks leave out whatever needs a network connection, large weights,
weights that are not on this machine, and images that a teacher labels. `config/check.py` checks the config alone.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeVar

import jax

from vit_jax.config import check, schema
from vit_jax.config.schema import ranges
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data import loader as loaders
from vit_jax.data import opening, user_files
from vit_jax.data.formats import array_record, folder, mixture, shards, tfds
from vit_jax.data.source import title
from vit_jax.data.text import prompts as prompting
from vit_jax.jobs import build, train
from vit_jax.models import cost
from vit_jax.objectives import kinds
from vit_jax.parallel import layout
from vit_jax.parallel import mesh as meshes
from vit_jax.record import storage
from vit_jax.weights import addresses, inherit, init_state
from vit_jax.weights.network import Weights

DATA, WORKDIR = '{data}', '{workdir}'
"""Words in a command that launchers replace with folders of the hosts."""
FILE_PATTERNS = ('parquet', 'tfrecord', 'wds')
"""Kinds of sources that are patterns of files, such as `parquet:/data/*.parquet`."""
OVERRIDE_BY_KIND = {kind: f'source={kind}:{DATA}' for kind in ('folder', 'array_record', *FILE_PATTERNS)} | {
    'tfds': 'data_dir={data}', 'vtab': 'data_dir={data}'}
"""The override that puts the folder of the hosts into a source, without `data.`, by the kind of the source."""
MANY_FILES = 20_000
"""Listing a folder with more files takes seconds to minutes, and is announced."""
CHIP_BY_LABEL = {'tpu-v4-podslice': 'v4', 'tpu-v5-lite-podslice': 'v5e', 'tpu-v5p-slice': 'v5p',
                 'tpu-v6e-slice': 'v6e', 'tpu7x': 'tpu7x'}
"""The name of a chip by the value of the node label `_CHIP`."""
PLACEHOLDERS = ('PROJECT/', 'REPOSITORY/', 'MY-DATA-BUCKET', 'MY-RUNS-BUCKET')
"""Words of `launch/k8s.yaml` that a person must replace."""
ASSUMED_STEPS, ASSUMED_CLASSES = 1_000_000, 1_000
"""Assumed numbers of steps of an epoch and of classes, if neither the config nor a dataset on this machine has them. No
schedule is longer than so many steps, and the steps of a thousand epochs fit into 32 bits."""
MAX_WEIGHTS_BYTES = 4 << 30
"""Weights of more bytes are not read, because it takes too much memory and time."""
_CHIP, _TOPOLOGY = 'cloud.google.com/gke-tpu-accelerator', 'cloud.google.com/gke-tpu-topology'  # node labels of GKE
T = TypeVar('T')


class Location(NamedTuple):
  """The machines on which a run will start, and the files of these machines.

  elsewhere: whether the run starts on other machines than this one.
  data: the address that a launcher mounts or copies for the word {data}; '' = none.
  root: the folder of this machine to which relative paths refer.
  """
  elsewhere: bool = False
  data: str = ''
  root: pathlib.Path = pathlib.Path()


def problems(config: schema.Config, workdir: storage.Path | None, location: Location) -> list[str]:
  """Returns all problems of the data, the initial weights and the directory of a run, one line each."""
  lines = []
  settings_and_sources = list(sources(config))
  paths = [config.data.data_dir, *(source for _, source in settings_and_sources)]
  if location.data and not any(DATA in path for path in paths):
    setting = OVERRIDE_BY_KIND.get(config.data.source.partition(':')[0], OVERRIDE_BY_KIND['array_record'])
    lines.append(f'--data: expected the word {DATA} in the command, for the folder of {location.data} on the hosts, '
                 f'got none; the config reads data.source={config.data.source}. Add --config.data.{setting} to the '
                 'command.')
  for setting, source in settings_and_sources:
    try:
      if location.elsewhere:
        lines += _problems_elsewhere(setting, source, config.data, location)
      else:
        _check_here(setting, source, config.data)
    except UserError as error:
      lines.append(str(error))
  weights = config.init_from
  if location.elsewhere and weights and not weights.startswith(('/', DATA, WORKDIR)) and '://' not in weights:
    path = pathlib.Path(os.path.expanduser(weights))
    if (location.root / path).exists() and (path.parts[0] == 'runs' or weights.startswith('~')):
      lines.append(f'init_from={weights}: expected weights that the hosts can read, got a path of this machine, which '
                   'is not copied to them. Copy it to a bucket and give its gs:// address.')
  if isinstance(workdir, pathlib.Path) and not location.elsewhere and WORKDIR not in str(workdir):
    parent = next(path for path in (workdir, *workdir.parents) if path.exists())
    if not parent.is_dir():
      lines.append(f'--workdir={workdir}: expected a folder, got the file {parent}. Choose another.')
    elif not os.access(parent, os.W_OK | os.X_OK):
      lines.append(f'--workdir={workdir}: expected a folder that can be written, got no permission to write in '
                   f'{parent}. Choose another, or change its permissions.')
  return list(dict.fromkeys(lines))


def training_problems(config: schema.Config, location: Location, workdir: storage.Path | None = None,
                      overridden: Collection[str] = ()) -> list[str]:
  """Returns the problems that are found by building the objects of a training run from the files of this machine.

  Args:
    config: a config for which `problems` found nothing.
    location: where the run will be.
    workdir: the run directory; None = the default.
    overridden: names of the settings on the command line.
  """
  unique_sources = dict.fromkeys(source for _, source in sources(config))
  reads_data = not location.elsewhere and not config.data.pseudo.source and all(map(_opens_in_seconds, unique_sources))
  if reads_data:
    _announce_listing(unique_sources)
  collector = _Collector()
  log = logging.getLogger('vit_jax')
  level = log.level
  log.setLevel(logging.ERROR)  # the run itself shows warnings
  try:
    _check_training(config, workdir, overridden, collector, elsewhere=location.elsewhere, reads_data=reads_data)
  finally:
    log.setLevel(level)
  return collector.problems


def _announce_listing(source_names: Iterable[str]) -> None:
  """Prints a line for each folder with more than `MANY_FILES`, whose files will be listed."""
  for source in source_names:
    if source.startswith('folder:'):
      folders = os.walk(user_files.resolve(source.partition(':')[2], 'data.source'))
      # `any` stops at the first sum that is large enough.
      if any(num > MANY_FILES for num in itertools.accumulate(len(files) for _, _, files in folders)):
        print(f'Listing {source}, which has more than {MANY_FILES:,} files. The list is kept for the run.', flush=True)


def _opens_in_seconds(source: str) -> bool:
  """Returns whether a source has its files on this machine, or an index that is read in seconds."""
  kind, _, address = source.partition(':')
  is_remote = kind in ('wds', 'tfrecord') and '://' in address
  return kind in opening.KINDS and kind != 'hf' and not is_remote


def sources(config: schema.Config) -> Iterator[tuple[str, str]]:
  """Yields (setting, source) for every source of a run; a mixture yields each of the mixed sources."""
  source_by_setting = {'data.source': config.data.source, 'data.pseudo.source': config.data.pseudo.source}
  source_by_setting |= {f'evals.{name}.source': settings.source for name, settings in config.evals.items()}
  for setting, source in source_by_setting.items():
    terms = mixture.parse(source.removeprefix('mix:')) if source.startswith('mix:') else []
    yield from ((setting, term.source) for term in terms)
    if source and not terms:
      yield setting, source


def _check_here(setting: str, source: str, data: schema.Data) -> None:
  """Raises UserError unless this machine has the data of a source; reads no image."""
  kind, _, name = source.partition(':')
  if kind == 'folder' and name:
    path = user_files.resolve(name, setting)
    if not os.path.isdir(path):
      folder.refuse_placeholder(os.path.relpath(path))
      raise UserError(f'data.source=folder:{path}: expected a folder of images, got no folder. Set '
                      '--config.data.source=folder:PATH; for a run on other hosts, use vit-jax check --elsewhere.')
  elif kind == 'array_record' and name:
    path = user_files.locate(name, setting)
    array_record.read_info(os.path.dirname(path) if array_record.is_pattern(path) else path)
  elif kind == 'tfds' and name:
    tfds.find(name, data_dir=data.data_dir)
  else:
    opener = opening.find_opener(source)
    if kind in (*FILE_PATTERNS, 'vtab'):
      opener(name, data, schema.Config().image_px)  # lists the files


def _problems_elsewhere(setting: str, source: str, data: schema.Data, location: Location) -> Iterator[str]:
  """Yields the problem of a source on the hosts. Absolute paths are not checked; relative ones must be in the checkout.

  Raises UserError if the kind of source does not exist, or cannot read from the address.
  """
  kind, _, path = source.partition(':')
  named = f'{setting}={source}'
  if kind not in OVERRIDE_BY_KIND or not path:
    opening.find_opener(source)
    return
  if kind in ('tfds', 'vtab'):
    path = data.data_dir
    named = f'data.data_dir={path}'
  if not path:
    yield (f'data.data_dir: expected the folder of {source} on the hosts, got none. Give the data to the launcher '
           f'(--data=gs://BUCKET/FOLDER) and add --config.data.data_dir={DATA} to the command, or set an absolute '
           'path.')
  elif '://' in path and kind in ('array_record', *FILE_PATTERNS):
    user_files.locate(path, named)
  elif '://' in path:
    user_files.resolve(path, named)
  elif not path.startswith((DATA, '/', '~')) and not (location.root / shards.folder_of(path)).exists():
    yield (f'{named}: expected a folder of the hosts, got a relative path, which is not in the checkout '
           f'{location.root}. Give the data to the launcher (--data=gs://BUCKET/FOLDER) and write {DATA} for its '
           'folder, or an absolute path.')


class _Collector:
  """Calls functions with `call`, and collects the messages of the `UserError`s in `problems`, each message once."""

  def __init__(self) -> None:
    self.problems: list[str] = []

  def call(self, function: Callable[[], T]) -> T | None:
    """Returns the result of a function; None if it raises UserError."""
    try:
      return function()
    except UserError as error:
      if str(error) not in self.problems:
        self.problems.append(str(error))
      return None


def _check_training(config: schema.Config, workdir: storage.Path | None, overridden: Collection[str],
                    collector: _Collector, *, elsewhere: bool, reads_data: bool) -> None:
  """Reads weights and data on this machine, and builds the run with them; ends if the next step needs what failed."""
  address_by_setting = collector.call(lambda: init_state.named(config)) or {}  # of weights
  for prefix, part in ranges.walk(config):
    if prompts := getattr(part, 'prompts', ''):
      collector.call(functools.partial(prompting.find_templates, prompts, setting=f'{prefix}prompts'))
  address_by_setting |= {f'evals.{name}.weights': settings.weights for name, settings in config.evals.items()
                         if isinstance(settings, schema.TextEvaluation) and settings.weights}
  addresses_here = [] if elsewhere else dict.fromkeys(address_by_setting.values())
  paths = [_find_local_path(address, collector) for address in addresses_here]
  num_bytes = 0
  for path in filter(None, paths):
    files = path.rglob('*') if path.is_dir() else [path]
    num_bytes += sum(file.stat().st_size for file in files if file.is_file())
  reads_weights = not collector.problems and not elsewhere and None not in paths and num_bytes <= MAX_WEIGHTS_BYTES
  weights: Weights | None = None
  if reads_weights and address_by_setting:
    run_directory = workdir or train.default_workdir(config.name)
    resolved = collector.call(lambda: inherit.resolve(config, overridden, run_directory))
    if resolved is None:
      return
    config, weights = resolved
    collector.call(functools.partial(check.check, config))
    if collector.problems:
      return
  data = collector.call(lambda: build.open_data(config)) if reads_data else None
  if reads_data and data is None:
    return
  _check_objects(config, data, weights, collector, reads_weights=reads_weights)


def _find_local_path(address: str, collector: _Collector) -> pathlib.Path | None:
  """Returns the local path of weights; None after a problem, or for a remote address that is not in the cache."""
  if not addresses.exists(os.path.expanduser(address)) and addresses.is_remote(address):
    with contextlib.suppress(UserError):
      return addresses.local(address, offline=True)
    return None
  return collector.call(lambda: addresses.local(address))


def _check_objects(config: schema.Config, data: build.Data | None, weights: Weights | None, collector: _Collector, *,
                   reads_weights: bool) -> None:
  """Builds a run on one device of this machine. Nothing is checked that depends on the devices of the run.

  Args:
    config: the config, with the settings that the weights determine.
    data: the data; None = the data are not read here.
    weights: the weights of `config.init_from`; None = there are none, or they are not read here.
    collector: collects the problems.
    reads_weights: whether all weights of the run can be read here.
  """
  mesh = meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1])
  config = layout.plain(cost.plain(dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1))))
  if data:
    measured = collector.call(lambda: build.with_statistics(config, data.train))
    if measured is None:
      return
    config = measured
  numbers = known_numbers(config)
  if data:
    numbers = build.Numbers(config.data.num_examples or len(data.train), len(data.class_names), data.in_memory)
    collector.call(lambda: loaders.check_batch_size(config.batch_size, len(data.train), title(data.train)))
  elif config.data.num_examples and not config.data.any_num_examples:
    collector.call(lambda: loaders.check_batch_size(config.batch_size, config.data.num_examples, config.data.source))
  parts = collector.call(lambda: build.parts(config, mesh=mesh, **numbers._asdict()))
  if parts and reads_weights and (data or not config.objective.has_head):  # a head is compared by its classes
    collector.call(lambda: init_state.given(config, parts.program, data.class_names if data else (), weights))
  if not data:
    return
  opened = data._replace(in_memory=False)  # otherwise the evaluators would decode all images now
  collector.call(lambda: build.check_size(config.data, opened.train))
  spec = kinds.of(config)
  targets = collector.call(lambda: (spec.open_maps(opened.train), spec.open_texts(opened.train)))
  has_texts = any(isinstance(settings, schema.TextEvaluation) for settings in config.evals.values())
  if parts and targets and (reads_weights or not has_texts):  # evaluations with texts read the weights
    collector.call(lambda: build.resources(
        config, opened, parts.objective, mesh=mesh, shard=meshes.local_shard(mesh)).evaluators())


def known_numbers(config: schema.Config) -> build.Numbers:
  """Returns the numbers of examples and classes in the config; a missing number is assumed."""
  data = config.data
  return build.Numbers(data.num_examples or ASSUMED_STEPS * config.batch_size, data.num_classes or ASSUMED_CLASSES,
                       in_memory=False)


class Manifest(NamedTuple):
  """The run of a manifest: the command line, such as `vit-jax --config=digits`; the topology of a slice, such as
  `v5e:4x4`; and the number of slices."""
  line: str
  topology: str
  slices: int


def read_manifest(path: str) -> Manifest:
  """Returns the run of a Kubernetes manifest with the fields of `launch/k8s.yaml`.

  Raises UserError if the file is missing or is not a JobSet of one job, or with all problems that make its pods fail.
  """
  import yaml  # a dependency of flax
  try:
    text = pathlib.Path(path).read_text()
    manifest = next(document for document in yaml.safe_load_all(text)
                    if isinstance(document, dict) and document.get('kind') == 'JobSet')
    (replicated_job,) = manifest['spec']['replicatedJobs']
    job = replicated_job['template']['spec']
    pod = job['template']['spec']
    chip, topology = pod['nodeSelector'][_CHIP], str(pod['nodeSelector'][_TOPOLOGY])
    arguments = [str(word) for word in pod['containers'][0]['args']]
    slices = int(replicated_job.get('replicas', 1))
    chips_per_host = int(pod['containers'][0]['resources']['limits']['google.com/tpu'])
    num_chips = math.prod(int(side) for side in topology.split('x'))
    hosts, completions = job['parallelism'], job['completions']
    is_complete = hosts * chips_per_host == num_chips and hosts == completions
  except OSError as error:
    raise failures.error_class(error)(f'{path}: expected a manifest, got "{error.strerror}". Copy '
                                      'launch/k8s.yaml.') from error
  except (yaml.YAMLError, StopIteration, LookupError, AttributeError, TypeError, ValueError, ArithmeticError,
          RecursionError) as error:
    if mark := getattr(error, 'problem_mark', None):
      got = f'no YAML at line {mark.line + 1}, column {mark.column + 1}'
    elif isinstance(error, KeyError):
      got = f'none of the field {str(error.args[0])[:60]!r}'
    elif isinstance(error, StopIteration):
      got = 'no document of kind JobSet'
    else:
      got = 'a field of another type, or a number of jobs that is not 1'
    raise UserError(f'{path}: expected a JobSet with one job on TPUs as in launch/k8s.yaml, got {got}. Compare it with '
                    'that file.') from error
  text_without_comments = re.sub(r'#.*', '', text)
  problems = [f'expected your own names, got the placeholder {word.strip("/")}. Replace it.'
              for word in PLACEHOLDERS if word in text_without_comments]
  if not is_complete:
    num_hosts = max(1, num_chips // max(1, chips_per_host))
    problems.append(f'parallelism and completions: expected {num_hosts}, the hosts of a {topology} slice with '
                    f'{chips_per_host} chips each, got {hosts} and {completions}.')
  if chip not in CHIP_BY_LABEL:
    problems.append(f'{_CHIP}: expected one of {", ".join(CHIP_BY_LABEL)}, got {chip}.')
  if problems:
    raise UserError('\n'.join(f'{path}: {problem}' for problem in problems))
  return Manifest(shlex.join(['vit-jax', *arguments]), f'{CHIP_BY_LABEL[chip]}:{topology}', slices)
