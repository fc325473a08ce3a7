"""A JobSet manifest for a TPU slice: the command and the hardware in it, and what would make its pods fail.

It is read for `vit-jax check --manifest=FILE`, before `kubectl apply` requests a slice.
"""
from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.core.errors import UserError

CHIPS = {'tpu-v4-podslice': 'v4', 'tpu-v5-lite-podslice': 'v5e', 'tpu-v5p-slice': 'v5p', 'tpu-v6e-slice': 'v6e',
         'tpu7x': 'tpu7x'}
"""The name of a chip by the value of the node label `cloud.google.com/gke-tpu-accelerator`."""
PLACEHOLDERS = ('PROJECT/', 'REPOSITORY/', 'MY-DATA-BUCKET', 'MY-RUNS-BUCKET')
_CHIP, _SHAPE = 'cloud.google.com/gke-tpu-accelerator', 'cloud.google.com/gke-tpu-topology'


class Manifest(NamedTuple):
  """What a manifest runs: a command line, on so many slices of a topology."""
  line: str
  topology: str
  slices: int


def read(path: str) -> Manifest:
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
    raise UserError(f'{path}: expected a manifest, got "{error.strerror}". Copy launch/k8s.yaml.') from error
  except (yaml.YAMLError, StopIteration, LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
    raise UserError(f'{path}: expected a JobSet with one job on TPUs as in launch/k8s.yaml, got {_reason(error)}. '
                    'Compare it with that file.') from error
  if chip not in CHIPS:
    problems.append(f'{_CHIP}: expected one of {", ".join(CHIPS)}, got {chip}.')
  if problems:
    raise UserError('\n'.join(f'{path}: {problem}' for problem in problems))
  return Manifest(shlex.join(['vit-jax', *arguments]), f'{CHIPS[chip]}:{shape}', slices)


def _reason(error: Exception) -> str:
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
  """Hosts and chips that do not make up the slice."""
  shape = str(pod['nodeSelector'][_SHAPE])
  chips = int(pod['containers'][0]['resources']['limits']['google.com/tpu'])
  total = 1
  for side in shape.split('x'):
    total *= int(side)
  if job['parallelism'] * chips != total or job['completions'] != job['parallelism']:
    yield (f'parallelism and completions: expected {max(1, total // chips)}, the hosts of a {shape} slice with {chips} '
           f'chips each, got {job["parallelism"]} and {job["completions"]}.')
