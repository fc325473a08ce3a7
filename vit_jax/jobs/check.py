"""Problems of a run that are known before it starts: where its data, weights and run directory are.

A run starts here, or elsewhere: on hosts that get a copy of this checkout, and whose other files are not known here.
Reads no image. What follows from the config alone is in `config/check.py`; what follows from the
devices is in `vit_jax/check.py`, which is the job.

A JobSet manifest for a TPU slice has the command and the hardware; what would make its pods fail is found before
`kubectl apply` requests a slice.
"""
from __future__ import annotations

import os
import pathlib
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.data.files import access
from vit_jax.data.sources import folder, mixture, opening, prepared, shard_files, tfds, vtab
from vit_jax.record import storage

DATA, WORKDIR = '{data}', '{workdir}'
"""Words of a command for which launchers put in folders of the hosts."""
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
_CHIP, _SHAPE = 'cloud.google.com/gke-tpu-accelerator', 'cloud.google.com/gke-tpu-topology'


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
  found = [*_data_word_problems(config, place)]
  for setting, source in sources(config):
    found += _source_problems(setting, source, config.data, place)
  found += _weights_problems(config, place)
  if workdir is not None and not place.elsewhere:
    found += _workdir_problems(workdir)
  return list(dict.fromkeys(found))


def training_problems(config: schema.Config, place: Place, workdir: storage.Path | None = None,
                      overridden: Collection[str] = ()) -> list[str]:
  """Returns the problems of a training run that the objects of it find when they are built (`check_run.py`).

  Args:
    config: without `problems`.
    place: of the run.
    workdir: of the run; None = the default.
    overridden: settings on the command line.
  """
  from vit_jax.jobs import check_run  # only here: other jobs are checked without importing jax
  named = [source for _, source in sources(config)]
  is_here = not place.elsewhere and not config.data.pseudo.source and all(map(_is_here, named))
  for source in dict.fromkeys(named) if is_here else ():
    if source.startswith('folder:') and not _has_few(source.partition(':')[2]):
      print(f'Listing {source}, which has more than {FEW_FILES:,} files. The list is kept for the run.', flush=True)
  return check_run.problems(config, workdir, overridden, elsewhere=place.elsewhere, is_here=is_here)


def _is_here(source: str) -> bool:
  """Whether a source is one of files of this machine, or of an index that is read in seconds."""
  kind, _, where = source.partition(':')
  return kind in opening.KINDS and kind != 'hf' and not (kind in ('wds', 'tfrecord') and '://' in where)


def _has_few(where: str) -> bool:
  num_files = 0
  for _, _, files in os.walk(access.resolve(where, 'data.source')):
    num_files += len(files)
    if num_files > FEW_FILES:
      return False
  return True


def sources(config: schema.Config) -> Iterator[tuple[str, str]]:
  """Yields the setting and the name of every source of a run; a mixture yields each of its sources."""
  named = {'data.source': config.data.source, 'data.pseudo.source': config.data.pseudo.source,
           **{f'evals.{name}.source': one.source for name, one in config.evals.items()}}
  for setting, source in named.items():
    terms = mixture.parse(source.removeprefix('mix:')) if source.startswith('mix:') else []
    yield from ((setting, term.source) for term in terms)
    if source and not terms:
      yield setting, source


def _data_word_problems(config: schema.Config, place: Place) -> Iterator[str]:
  """Data that are mounted, but not read."""
  named = [config.data.data_dir, *(source for _, source in sources(config))]
  if not place.data or any(DATA in one for one in named):
    return
  kind = config.data.source.partition(':')[0]
  setting = SETTINGS.get(kind, SETTINGS['array_record'])
  yield (f'--data: expected the word {DATA} in the command, for the folder of {place.data} on the hosts, got none; the '
         f'config reads data.source={config.data.source}. Add --config.data.{setting} to the command.')


def _source_problems(setting: str, source: str, data: schema.Data, place: Place) -> Iterator[str]:
  kind, _, where = source.partition(':')
  try:
    if kind in ('folder', 'array_record') and where:
      find = access.locate if kind == 'array_record' else access.resolve  # the others are not read from buckets
      yield from _path_problems(f'{setting}={source}', where, place, find)
      if not place.elsewhere:
        _check_here(kind, find(where, setting))
    elif kind in PACKED and where:
      yield from _path_problems(f'{setting}={source}', where, place, access.locate)
      if not place.elsewhere:
        opening.find_opener(source)(where, data, schema.Config().image_px)  # lists the files
    elif kind in ('tfds', 'vtab') and where:
      if place.elsewhere:
        yield from _data_dir_problems(source, data, place)
      elif kind == 'tfds':
        tfds.find(where, data_dir=data.data_dir)
      else:
        vtab.opener(where, data, schema.Config().image_px)
    else:
      opening.find_opener(source)
  except UserError as error:
    yield str(error)


def _path_problems(what: str, where: str, place: Place,
                   find: Callable[[str, str], str] = access.resolve) -> Iterator[str]:
  """Problems of a path on the hosts: absolute ones are theirs, relative ones must be in the checkout."""
  if '://' in where:
    find(where, what)
  elif place.elsewhere and not where.startswith((DATA, '/', '~')) and not (
      place.root / shard_files.folder_of(where)).exists():
    yield (f'{what}: expected a folder of the hosts, got a relative path, which is not in the checkout {place.root}. '
           f'Give the data to the launcher (--data=gs://BUCKET/FOLDER) and write {DATA} for its folder, or an absolute '
           'path.')


def _data_dir_problems(source: str, data: schema.Data, place: Place) -> Iterator[str]:
  if not data.data_dir:
    yield (f'data.data_dir: expected the folder of {source} on the hosts, got none. Give the data to the launcher '
           f'(--data=gs://BUCKET/FOLDER) and add --config.data.data_dir={DATA} to the command, or set an absolute '
           'path.')
  else:
    yield from _path_problems(f'data.data_dir={data.data_dir}', data.data_dir, place)


def _check_here(kind: str, path: str) -> None:
  """Raises UserError unless there is such data; reads no image."""
  if kind == 'array_record':
    prepared.read_info(os.path.dirname(path) if prepared.is_pattern(path) else path)
  elif not os.path.isdir(path):
    folder.refuse_placeholder(os.path.relpath(path))
    raise UserError(f'data.source=folder:{path}: expected a folder of images, got no folder. Set '
                    '--config.data.source=folder:PATH; for a run on other hosts, use vit-jax check --elsewhere.')


def _weights_problems(config: schema.Config, place: Place) -> Iterator[str]:
  """Weights that are a file or a run of this machine, outside of the checkout that the hosts get."""
  where = config.init_from
  if place.elsewhere and where and not where.startswith(('/', DATA, WORKDIR)) and '://' not in where:
    path = pathlib.Path(where).expanduser()
    if (place.root / path).exists() and (path.parts[0] == 'runs' or where.startswith('~')):
      yield (f'init_from={where}: expected weights that the hosts can read, got a path of this machine, which is not '
             'copied to them. Copy it to a bucket and give its gs:// address.')


def _workdir_problems(workdir: storage.Path) -> Iterator[str]:
  if not isinstance(workdir, pathlib.Path) or WORKDIR in str(workdir):
    return
  there = next(path for path in (workdir, *workdir.parents) if path.exists())
  if not there.is_dir():
    yield f'--workdir={workdir}: expected a folder, got the file {there}. Choose another.'
  elif not os.access(there, os.W_OK | os.X_OK):
    yield (f'--workdir={workdir}: expected a folder that can be written, got no permission to write in {there}. Choose '
           'another, or change its permissions.')


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
    found = next(one for one in yaml.safe_load_all(text) if isinstance(one, dict) and one.get('kind') == 'JobSet')
    (replicated,) = found['spec']['replicatedJobs']
    job = replicated['template']['spec']
    pod = job['template']['spec']
    problems = [*_placeholder_problems(text), *_job_problems(job, pod)]
    chip, shape = pod['nodeSelector'][_CHIP], str(pod['nodeSelector'][_SHAPE])
    arguments = [str(word) for word in pod['containers'][0]['args']]
    slices = int(replicated.get('replicas', 1))
  except OSError as error:
    raise os_errors.kind(error)(f'{path}: expected a manifest, got "{error.strerror}". Copy '
                                'launch/k8s.yaml.') from error
  except (yaml.YAMLError, StopIteration, LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
    raise UserError(f'{path}: expected a JobSet with one job on TPUs as in launch/k8s.yaml, got {_unreadable(error)}. '
                    'Compare it with that file.') from error
  if chip not in CHIPS:
    problems.append(f'{_CHIP}: expected one of {", ".join(CHIPS)}, got {chip}.')
  if problems:
    raise UserError('\n'.join(f'{path}: {problem}' for problem in problems))
  return Manifest(shlex.join(['vit-jax', *arguments]), f'{CHIPS[chip]}:{shape}', slices)


def _unreadable(error: Exception) -> str:
  """Returns what is wrong with a manifest that could not be read."""
  if mark := getattr(error, 'problem_mark', None):
    return f'no YAML at line {mark.line + 1}, column {mark.column + 1}'
  if isinstance(error, KeyError):
    return f'none of the field {str(error.args[0])[:60]!r}'
  if isinstance(error, StopIteration):
    return 'no document of kind JobSet'
  return 'a field of another type, or a number of jobs that is not 1'


def _placeholder_problems(text: str) -> Iterator[str]:
  content = re.sub(r'#.*', '', text)
  for word in PLACEHOLDERS:
    if word in content:
      yield f'expected your own names, got the placeholder {word.strip("/")}. Replace it.'


def _job_problems(job: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
  """Yields the problem of hosts and chips that do not make up the slice."""
  shape = str(pod['nodeSelector'][_SHAPE])
  chips = int(pod['containers'][0]['resources']['limits']['google.com/tpu'])
  total = 1
  for side in shape.split('x'):
    total *= int(side)
  if job['parallelism'] * chips != total or job['completions'] != job['parallelism']:
    yield (f'parallelism and completions: expected {max(1, total // chips)}, the hosts of a {shape} slice with {chips} '
           f'chips each, got {job["parallelism"]} and {job["completions"]}.')
