"""`vit-jax record`: writes the record of a run or an evaluation, with which anyone can replay it."""
from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import pathlib
import shlex
from collections.abc import Collection, Mapping, Sequence

from vit_jax.core.errors import UserError, printable
from vit_jax.record import console, destination
from vit_jax.replay import inputs, outcomes, planned, records, settings
from vit_jax.replay.job import ReadLine
from vit_jax.replay.records import Record, Tolerance

MOST_NAMED = 12
"""Names of values in a message."""


def run(*, files: Sequence[str], claim: str, to: pathlib.Path, data: Mapping[str, str], command: str,
        values: str = '*', tolerance: float, elsewhere: float, reason: str, allow_code: bool, overwrite: bool = False,
        read_line: ReadLine) -> int:
  """Writes the record of the outcome in a directory; exit status 0.

  Args:
    files: the directory of a run or an evaluation, or an `evaluate.json`.
    claim: a sentence, in which {NAME:.1%} is the value of a metric.
    to: the file to write.
    data: paths by the names that replace them in the record.
    command: lines for a shell joined by &&, in place of those that the result has.
    values: patterns of the names of values that the record keeps, with commas.
    tolerance, elsewhere, reason: see `records.Tolerance`.
    allow_code: read the config of the command also if it is not one of this package.
    overwrite: replace the file.
    read_line: reads a command line.
  """
  if len(files) != 1:
    raise UserError(f'record: expected one directory, got {" and ".join(files) or "none"}. Name one directory.')
  if to.suffix != '.json':
    raise UserError(f'--to: expected a file NAME.json, got {to}. Add the suffix.')
  destination.check_free([to], setting='--to', overwrite=overwrite)
  if (tolerance or elsewhere) and not reason:
    raise UserError('--reason: expected why the values may differ, got none. A tolerance without a reason proves '
                    'nothing.')
  record = make(pathlib.Path(files[0]), to.stem, claim, data, Tolerance(tolerance, elsewhere, reason), read_line,
                command, allow_code=allow_code)
  record = with_values(record, values.split(','))
  records.write(record, to)
  print(f'{record.sentence}\nWritten: {to}. Replay it with vit-jax replay {to}', flush=True)
  return 0


def make(path: pathlib.Path, name: str, claim: str, data: Mapping[str, str], tolerance: Tolerance,
         read_line: ReadLine, lines: str = '', *, allow_code: bool = False) -> Record:
  """Returns the record of an outcome.

  Raises:
    UserError: there is none, its command cannot be run again, or the claim names a value that it does not have.
  """
  found = outcomes.read(path)
  check_claim(claim, found)
  typed = [shlex.split(line)[1:] for line in lines.split('&&')] if lines else [command(one) for one in found.commands]
  if not lines and not allow_code and (problems := planned.code(typed[-1])):
    raise UserError('\n'.join(f'{path}: {printable(one)}.' for one in problems))
  job, configs = read_line(typed[-1])
  if job == 'evaluate' and not any(word.startswith('--weights') for word in typed[-1]):
    raise UserError(f'{path}: expected a run, or an evaluation of weights, got one that wrote into a run. Record the '
                    'run, or evaluate it with --weights=RUN.')
  if len(typed) > 1 and not lines:
    typed = [[*one, f'--workdir={{{inputs.WORK}}}/runs/{run}']
             for one, run in zip(typed, found.checkpoints, strict=True)]
  words = [[inputs.named(word, data) for word in one] for one in typed]
  own = settings.read(found.config)
  resolved = settings.given(own, data)
  parsed = settings.given(configs[-1], data) if len(configs) == 1 else resolved
  console.begin_stage('reading the data')
  inputs.check_unchanged(own, found.data)
  record = Record(
      id=name, claim=claim, kind=found.kind, command=tuple(shlex.join(['vit-jax', *one]) for one in words),
      values=found.values, tolerance=tolerance, params_digest=found.params_digest, checkpoints=found.checkpoints,
      settings=resolved, config_digest=settings.digest(own, data), setting_digests=settings.digests(own, data),
      found=tuple(sorted(key for key in parsed.keys() | resolved.keys() if parsed.get(key) != resolved.get(key))),
      files=inputs.files(words, data),
      data=inputs.contents(own, is_trained=found.kind == 'train', found=data),
      made={'date': datetime.datetime.now(datetime.UTC).date().isoformat(), 'commit': found.commit,
            'machine': found.machine} | ({} if lines and job != 'study' else _spent(found) | found.cost))
  console.end_stage()
  return dataclasses.replace(with_claimed(record, found), about=_about(record))


def _about(record: Record) -> dict[str, str]:
  """Returns what other records say of its names of data and weights, where the content is the same."""
  own = record.data | record.files
  return {name: text for path in records.paths() for other in [records.read_file(path)]
          for name, text in other.about.items()
          if any(f'{{{name}}}' in key or key == name for key, content in (other.data | other.files).items()
                 if own.get(key) == content)}


def _spent(found: outcomes.Outcome) -> dict[str, float]:
  """Returns the processor seconds of a run, or of all runs of a study, and those of training, where they are known."""
  spent = {'processor_s': found.processor_s, 'training_processor_s': found.training_processor_s}
  return {name: round(number, 2) for name, number in spent.items() if number}


def check_claim(claim: str, found: outcomes.Outcome) -> None:
  """Raises UserError if a claim has no value, which no replay could compare, or names one that the outcome has not."""
  names = records.claimed(claim)
  if wrong := records.odd_formats(claim):
    raise UserError(f'--claim: expected a format such as .1% or ,.0f, got {wrong[0][:40]}. Change it.')
  if odd := [name for name in names if name not in found.values | found.history]:
    raise UserError(f'--claim: expected names of values in braces, got {{{odd[0]}}}. Use {_some(found.values)}, or '
                    'METRIC at STEP.')
  if not names:
    raise UserError(f'--claim: expected a sentence with a value in braces, such as {{{next(iter(found.values))}:.3g}}, '
                    f'got {claim!r}. Use {_some(found.values)}, or METRIC at STEP.')


def with_claimed(record: Record, found: outcomes.Outcome) -> Record:
  """Returns the record with the values of evaluations during training that its claim names."""
  return dataclasses.replace(record, values=record.values | {
      name: found.history[name] for name in records.claimed(record.claim) if name not in found.values})


def with_values(record: Record, patterns: Sequence[str]) -> Record:
  """Returns the record with the values whose names match one of the patterns, and those that its claim names.

  Raises:
    UserError: no value has a name of a pattern.
  """
  if odd := [one for one in patterns if not fnmatch.filter(record.values, one)]:
    raise UserError(f'--values: expected patterns of names of values, got {odd[0]!r}, which none has. Use '
                    f'{_some(record.values)}.')
  kept = {*records.claimed(record.claim), *(name for one in patterns for name in fnmatch.filter(record.values, one))}
  return dataclasses.replace(record, values={name: value for name, value in record.values.items() if name in kept})


def _some(values: Collection[str]) -> str:
  """Returns the first of the names of values; a study has hundreds."""
  names, more = list(values), len(values) - MOST_NAMED
  return ', '.join(names[:MOST_NAMED]) + (f' and {more:,} others' if more > 0 else '')


def command(words: Sequence[str]) -> list[str]:
  """Returns a command without the directory that it wrote into, and without the switches of messages.

  Raises:
    UserError: the result is not of the command line.
  """
  found: list[str] = []
  rest = console.take(words)[0]
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
