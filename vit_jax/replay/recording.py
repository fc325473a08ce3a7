"""`vit-jax record`: writes the record of a run or an evaluation, with which anyone can replay it."""
from __future__ import annotations

import dataclasses
import datetime
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from vit_jax.core.errors import UserError
from vit_jax.record import stage
from vit_jax.replay import inputs, outcomes, records, settings
from vit_jax.replay.job import ReadLine
from vit_jax.replay.records import Record, Tolerance


def run(*, files: Sequence[str], claim: str, to: pathlib.Path, data: Mapping[str, str], tolerance: float,
        elsewhere: float, reason: str, read_line: ReadLine) -> int:
  """Writes the record of the outcome in a directory; exit status 0.

  Args:
    files: the directory of a run or an evaluation, or an `evaluate.json`.
    claim: a sentence, in which {NAME:.1%} is the value of a metric.
    to: the file to write.
    data: paths by the names that replace them in the record.
    tolerance, elsewhere, reason: see `records.Tolerance`.
    read_line: reads a command line.
  """
  if len(files) != 1:
    raise UserError(f'record: expected one directory, got {" and ".join(files) or "none"}.')
  if to.suffix != '.json':
    raise UserError(f'--to: expected a file NAME.json, got {to}. Add the suffix.')
  if (tolerance or elsewhere) and not reason:
    raise UserError('--reason: expected why the values may differ, got none. A tolerance without a reason proves '
                    'nothing.')
  record = make(pathlib.Path(files[0]), to.stem, claim, data, Tolerance(tolerance, elsewhere, reason), read_line)
  records.write(record, to)
  print(f'{record.sentence}\nWritten: {to}. Replay it with vit-jax replay {to}', flush=True)
  return 0


def make(path: pathlib.Path, name: str, claim: str, data: Mapping[str, str], tolerance: Tolerance,
         read_line: ReadLine) -> Record:
  """Returns the record of an outcome.

  Raises:
    UserError: there is none, its command cannot be run again, or the claim names a value that it does not have.
  """
  found = outcomes.read(path)
  words = command(found.command)
  job, configs = read_line(words)
  if job == 'evaluate' and not any(word.startswith('--weights') for word in words):
    raise UserError(f'{path}: expected a run, or an evaluation of weights, got one that wrote into a run. Record the '
                    'run, or evaluate it with --weights=RUN.')
  stage.begin('reading the data')
  line = shlex.join(['vit-jax', *(inputs.named(word, data) for word in words)])
  folder = path if path.is_dir() else path.parent
  own = settings.read(folder)
  given = settings.given(configs[-1], data) if configs else {}
  resolved = settings.given(own, data)
  record = Record(
      id=name, claim=claim, kind=found.kind, command=(line,), values=found.values, tolerance=tolerance,
      params_digest=found.params_digest, checkpoints=found.checkpoints, settings=resolved,
      found=tuple(sorted(key for key in given.keys() | resolved.keys() if given.get(key) != resolved.get(key))),
      config_digest=settings.digest(own, data), files=inputs.files([shlex.split(line)[1:]], data),
      data=inputs.contents(own, is_trained=found.kind == 'train', found=data),
      made={'date': datetime.datetime.now(datetime.UTC).date().isoformat(), 'commit': found.commit,
            'machine': found.machine, 'processor_s': found.processor_s})
  stage.end()
  return with_claimed(record, found)


def with_claimed(record: Record, found: outcomes.Outcome) -> Record:
  """Returns the record with the values of evaluations during training that its claim names.

  Raises:
    UserError: the claim names a value that there is not.
  """

  names = [match[1] for match in records.VALUE.finditer(record.claim)]
  if odd := [name for name in names if name not in found.values | found.history]:
    raise UserError(f'--claim: expected names of values in braces, got {{{odd[0]}}}. Use {", ".join(found.values)}, or '
                    'METRIC at STEP.')
  return dataclasses.replace(record, values=record.values | {
      name: found.history[name] for name in names if name not in found.values})


def command(words: Sequence[str]) -> list[str]:
  """Returns a command without the directory that it wrote into.

  Raises:
    UserError: the result is not of the command line.
  """
  found: list[str] = []
  rest = list(words)
  while rest:
    word = rest.pop(0)
    if word in ('--workdir', '-workdir') and rest:
      rest.pop(0)
    elif not word.lstrip('-').startswith('workdir='):
      found.append(word)
  if not found:
    raise UserError('record: expected a result of the vit-jax command line, got one without a command. Run the command '
                    'again with this version.')
  return found
