"""`vit-jax record`: writes the record of a run or an evaluation, with which anyone can replay it.

It reads the outcome (`outcomes`), takes the command that made it, refuses one that would run other code (`planned`),
computes digests of the data and of the settings (`inputs`, `settings`) and writes the file (`records`). It trains and
evaluates nothing.
"""
from __future__ import annotations

import datetime
import fnmatch
import pathlib
import shlex
from collections.abc import Collection, Mapping, Sequence

from vit_jax.config import json_files
from vit_jax.core.errors import UserError, printable
from vit_jax.record import console, destination
from vit_jax.replay import inputs, outcomes, planned, records, settings
from vit_jax.replay.job import ReadLine
from vit_jax.replay.outcomes import Outcome
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

  Raises:
    UserError: there is no outcome, its command cannot be run again, or the claim names a value that it does not have.
  """
  if len(files) != 1:
    raise UserError(f'record: expected one directory, got {" and ".join(files) or "none"}. Name one directory.')
  if to.suffix != '.json':
    raise UserError(f'--to: expected a file NAME.json, got {to}. Add the suffix.')
  destination.check_free([to], setting='--to', overwrite=overwrite)
  if (tolerance or elsewhere) and not reason:
    raise UserError('--reason: expected why the values may differ, got none. A tolerance without a reason proves '
                    'nothing.')
  record = _make(pathlib.Path(files[0]), to.stem, claim, values.split(','), Tolerance(tolerance, elsewhere, reason),
                 data, command, allow_code=allow_code, read_line=read_line)
  records.write(record, to)
  print(f'{record.sentence}\nWritten: {to}. Replay it with vit-jax replay {to}', flush=True)
  return 0


def _make(path: pathlib.Path, name: str, claim: str, patterns: Sequence[str], tolerance: Tolerance,
          paths: Mapping[str, str], command: str, *, allow_code: bool, read_line: ReadLine) -> Record:
  """Returns the record with this name of the outcome at a path; the other arguments are those of `run`."""
  outcome = outcomes.read(path)
  values = _values(outcome, claim, patterns)
  words = [shlex.split(line)[1:] for line in command.split('&&')] if command else [
      _without_workdir(words) for words in outcome.commands]
  if not command and not allow_code and (problems := planned.code(words[-1])):
    raise UserError('\n'.join(f'{path}: {printable(one)}.' for one in problems))
  job, configs = read_line(words[-1])
  if job == 'evaluate' and not any(word.startswith('--weights') for word in words[-1]):
    raise UserError(f'{path}: expected a run, or an evaluation of weights, got one that wrote into a run. Record the '
                    'run, or evaluate it with --weights=RUN.')
  if len(words) > 1 and not command:
    words = [[*line, f'--workdir={{{inputs.WORK}}}/runs/{run_name}']
             for line, run_name in zip(words, outcome.checkpoints, strict=True)]
  words = [[inputs.named(word, paths) for word in line] for line in words]
  config = json_files.read(outcome.config / 'config.json')
  of_run = settings.of(config, paths)
  of_command = settings.of(configs[0], paths).stated if len(configs) == 1 else of_run.stated
  console.begin_stage('reading the data')
  inputs.check_unchanged(config, outcome.data)
  contents = inputs.contents(config, is_trained=outcome.kind == 'train', paths=paths)
  weights = inputs.files(words, paths)
  console.end_stage()
  cost = {key: round(number, 2) if key.endswith('processor_s') else number for key, number in outcome.cost.items()}
  return Record(
      id=name, claim=claim, kind=outcome.kind, command=tuple(shlex.join(['vit-jax', *line]) for line in words),
      values=values, tolerance=tolerance, params_digest=outcome.params_digest,
      checkpoints=outcome.checkpoints, settings=of_run.stated, config_digest=of_run.digest,
      setting_digests=of_run.digests, data=contents, files=weights, about=_about({**contents, **weights}),
      found=tuple(sorted(key for key in of_command.keys() | of_run.stated.keys()
                         if of_command.get(key) != of_run.stated.get(key))),
      made={'date': datetime.datetime.now(datetime.UTC).date().isoformat(), 'commit': outcome.commit,
            'machine': outcome.machine} | ({} if command and job != 'study' else cost))


def _values(outcome: Outcome, claim: str, patterns: Sequence[str]) -> dict[str, float]:
  """Returns the values of an outcome whose names match one of the patterns, and those that the claim names.

  Raises:
    UserError: the claim has no value, which no replay could compare, or an unknown one; or a pattern matches none.
  """
  claimed, measured = records.claimed(claim), outcome.history | outcome.values
  if formats := records.unusual_formats(claim):
    raise UserError(f'--claim: expected a format such as .1% or ,.0f, got {formats[0][:40]}. Change it.')
  if unknown := [name for name in claimed if name not in measured]:
    raise UserError(f'--claim: expected names of values in braces, got {{{unknown[0]}}}. Use {_some(outcome.values)}, '
                    'or METRIC at STEP.')
  if not claimed:
    raise UserError(f'--claim: expected a sentence with a value in braces, such as {{{next(iter(outcome.values))}:.3g}}'
                    f', got {claim!r}. Use {_some(outcome.values)}, or METRIC at STEP.')
  names = list(dict.fromkeys([*outcome.values, *claimed]))
  if unused := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
    raise UserError(f'--values: expected patterns of names of values, got {unused[0]!r}, which none has. Use '
                    f'{_some(names)}.')
  kept = {*claimed, *(name for pattern in patterns for name in fnmatch.filter(names, pattern))}
  return {name: measured[name] for name in names if name in kept}


def _some(values: Collection[str]) -> str:
  """Returns the first of the names of values; a study has hundreds."""
  names, more = list(values), len(values) - MOST_NAMED
  return ', '.join(names[:MOST_NAMED]) + (f' and {more:,} others' if more > 0 else '')


def _without_workdir(words: Sequence[str]) -> list[str]:
  """Returns a command without the directory that it wrote into, and without the switches of messages.

  Raises:
    UserError: the result is not of the command line.
  """
  words = console.take(words)[0]
  kept = [word for before, word in zip(['', *words], words, strict=False)
          if not {'--workdir', '-workdir'} & {before, word} and not word.lstrip('-').startswith('workdir=')]
  if not kept:
    raise UserError('record: expected a result of the vit-jax command line, got one without a command. Run the command '
                    'again with this version.')
  return kept


def _about(contents: Mapping[str, object]) -> dict[str, str]:
  """Returns what the records of this package say of names of data and weights, where the content is the same."""
  shipped = [records.read_file(path) for path in records.paths()]
  return {name: text for record in shipped for name, text in record.about.items()
          if any((f'{{{name}}}' in key or key == name) and contents.get(key) == content
                 for key, content in {**record.data, **record.files}.items())}
