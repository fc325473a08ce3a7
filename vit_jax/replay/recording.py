"""`vit-jax record`: writes the record of a run, an evaluation or a study, with which anyone can replay it.

`run` reads the outcome and the command that made it (`outcomes`), refuses a command that would run code of others
(`planned`), computes digests of the data and of the settings (`inputs`, `settings`), and writes the file (`records`).
It trains and evaluates nothing.
"""
from __future__ import annotations

import datetime
import fnmatch
import pathlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vit_jax.config import json_files
from vit_jax.core.errors import UserError, printable
from vit_jax.record import console, destination
from vit_jax.replay import inputs, outcomes, planned, records, settings
from vit_jax.replay.job import ReadLine
from vit_jax.replay.outcomes import Outcome
from vit_jax.replay.records import Record, Tolerance

MOST_NAMED = 12  # values in a message


def run(*, files: Sequence[str], claim: str, to: pathlib.Path, data: Mapping[str, str], command: str,
        values: str = '*', tolerance: float, elsewhere: float, reason: str, allow_code: bool, overwrite: bool = False,
        read_line: ReadLine) -> int:
  """Writes the record of the outcome in a directory; exit status 0.

  Args:
    files: one directory of a run, an evaluation or a study, or one `evaluate.json`.
    claim: a sentence, in which {NAME:.1%} is the value of a metric.
    to: the file to write.
    data: paths by the names that replace them in the record.
    command: lines for a shell joined by &&, in place of the commands of the outcome; '' = those.
    values: patterns of the names of values that the record keeps, separated by commas.
    tolerance, elsewhere, reason: see `records.Tolerance`.
    allow_code: read the config of the command even if it is not one of this package.
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


def _make(path: pathlib.Path, record_id: str, claim: str, patterns: Sequence[str], tolerance: Tolerance,
          paths: Mapping[str, str], command: str, *, allow_code: bool, read_line: ReadLine) -> Record:
  """Returns the record of the outcome in `path`; the other arguments are those of `run`."""
  outcome = outcomes.read(path)
  values = _values(outcome, claim, patterns)
  if command:
    commands = [shlex.split(line)[1:] for line in command.split('&&')]
  else:
    commands = [_without_workdir(words) for words in outcome.commands]
    if not allow_code and (problems := planned.code(commands[-1])):
      raise UserError('\n'.join(f'{path}: {printable(problem)}.' for problem in problems))
  job, configs = read_line(commands[-1])
  if job == 'evaluate' and not any(word.startswith('--weights') for word in commands[-1]):
    raise UserError(f'{path}: expected a run, or an evaluation of weights, got one that wrote into a run. Record the '
                    'run, or evaluate it with --weights=RUN.')
  if len(commands) > 1 and not command:  # one for each run
    commands = [[*words, f'--workdir={{{inputs.WORK}}}/runs/{run_name}']
                for words, run_name in zip(commands, outcome.checkpoints, strict=True)]
  commands = [[inputs.named(word, paths) for word in words] for words in commands]
  config = json_files.read(outcome.config / 'config.json')
  of_run = settings.of(config, paths)
  of_command = settings.of(configs[0], paths).stated if len(configs) == 1 else of_run.stated
  console.begin_stage('reading the data')
  inputs.check_unchanged(config, outcome.data)
  contents = inputs.contents(config, is_trained=outcome.kind == 'train', paths=paths)
  weights = inputs.files(commands, paths)
  console.end_stage()
  found_by_run = sorted(setting for setting in of_command.keys() | of_run.stated.keys()
                        if of_command.get(setting) != of_run.stated.get(setting))
  made: dict[str, Any] = {'date': datetime.datetime.now(datetime.UTC).date().isoformat(), 'commit': outcome.commit,
                          'machine': outcome.machine}
  if not command or job == 'study':
    made |= {name: round(cost, 2) if name.endswith('processor_s') else cost for name, cost in outcome.cost.items()}
  return Record(
      record_id, claim, outcome.kind, tuple(shlex.join(['vit-jax', *words]) for words in commands),
      values=values, tolerance=tolerance, params_digest=outcome.params_digest, checkpoints=outcome.checkpoints,
      settings=of_run.stated, config_digest=of_run.digest, setting_digests=of_run.digests, data=contents, files=weights,
      about=_about({**contents, **weights}), found=tuple(found_by_run), made=made)


def _values(outcome: Outcome, claim: str, patterns: Sequence[str]) -> dict[str, float]:
  """Returns the values of an outcome whose names match one of the patterns, and those that the claim names.

  Raises:
    UserError: the claim names no value, or an unknown one, or has an unusual format; or a pattern matches no name.
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
  chosen = {*claimed, *(name for pattern in patterns for name in fnmatch.filter(names, pattern))}
  return {name: measured[name] for name in names if name in chosen}


def _some(values: Collection[str]) -> str:
  """Returns the first names of values, and the number of the others; a study has hundreds."""
  names, num_others = list(values), len(values) - MOST_NAMED
  return ', '.join(names[:MOST_NAMED]) + (f' and {num_others:,} others' if num_others > 0 else '')


def _without_workdir(words: Sequence[str]) -> list[str]:
  """Returns the arguments of a command without `--workdir` and its value, and without `-q` and `-v`.

  Raises:
    UserError: there are no others, as the result was not made by the command line.
  """
  words, _ = console.split_switches(words)
  kept = [word for before, word in zip(['', *words], words, strict=False)
          if not {'--workdir', '-workdir'} & {before, word} and not word.lstrip('-').startswith('workdir=')]
  if not kept:
    raise UserError('record: expected a result of the vit-jax command line, got one without a command. Run the command '
                    'again with this version.')
  return kept


def _about(contents: Mapping[str, object]) -> dict[str, str]:
  """Returns the sentences that records of this package have about names with the same content; see `Record.about`."""
  about = {}
  for record in map(records.read_file, records.paths()):
    for name, sentence in record.about.items():
      for key, content in {**record.data, **record.files}.items():
        if (f'{{{name}}}' in key or key == name) and contents.get(key) == content:
          about[name] = sentence
  return about
