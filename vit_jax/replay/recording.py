"""`vit-jax record`: writes a record of a run, an evaluation or a study, which others can replay.

`run` reads the outcome and the command that produced it (`outcomes`), refuses a command that would run code of others
(`planned`), computes digests of the data and the settings (`inputs`, `settings`), and writes the file (`records`). It
does not train or evaluate.
"""
from __future__ import annotations

import datetime
import fnmatch
import pathlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vit_jax.config import engine
from vit_jax.core.errors import UserError, printable
from vit_jax.record import console, destination
from vit_jax.replay import inputs, outcomes, planned, records, settings
from vit_jax.replay.job import ReadLine
from vit_jax.replay.outcomes import Outcome
from vit_jax.replay.records import Record, Tolerance

MAX_NAMED = 12  # names of values in a message


def run(*, files: Sequence[str], claim: str, to: pathlib.Path, data: Mapping[str, str], command: str,
        values: str = '*', tolerance: float, elsewhere: float, reason: str, allow_code: bool, overwrite: bool = False,
        read_line: ReadLine) -> int:
  """Writes the record of the outcome in a directory; returns the exit status 0.

  Args:
    files: one directory of a run, an evaluation or a study, or one `evaluate.json`.
    claim: a sentence, in which {NAME:.1%} is the value of a metric.
    to: the file to write.
    data: paths of data and weights, by the names of the placeholders that replace the paths in the record.
    command: lines for a shell joined by &&; '' = the commands of the outcome.
    values: patterns of the names of values that the record keeps, separated by commas.
    tolerance, elsewhere, reason: see `records.Tolerance`.
    allow_code: read the config of the command even if the config is not one of this package.
    overwrite: replace the file.

  Raises:
    UserError: there is no outcome, its command cannot be run again, or the claim names a value that is not measured.
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
  """Returns the record of the outcome in `path`; `paths` is `data`, and the other arguments are those of `run`."""
  outcome = outcomes.read(path)
  values = _choose_values(outcome, claim, patterns)
  if command:
    commands = [shlex.split(line)[1:] for line in command.split('&&')]
  else:
    commands = [_without_workdir(words) for words in outcome.commands]
    problems = [] if allow_code else planned.find_foreign_code(commands[-1])
    if problems:
      raise UserError('\n'.join(f'{path}: {printable(problem)}.' for problem in problems))
  job, configs = read_line(commands[-1])
  if job == 'evaluate' and not any(word.startswith('--weights') for word in commands[-1]):
    raise UserError(f'{path}: expected a run, or an evaluation of weights, got an evaluation that wrote into a run. '
                    'Record the run, or evaluate it with --weights=RUN.')
  if len(commands) > 1 and not command:  # the outcome of a study has a command for each run
    commands = [[*words, f'--workdir={{{inputs.WORK}}}/runs/{run_name}']
                for words, run_name in zip(commands, outcome.checkpoints, strict=True)]
  commands = [[inputs.with_placeholders(word, paths) for word in words] for words in commands]
  config = engine.read_file(outcome.config_folder / 'config.json')
  run_settings = settings.of_config(config, paths)
  console.begin_stage('reading the data')
  inputs.check_unchanged(config, outcome.data)
  contents = inputs.read_contents(config, is_run=outcome.kind == 'train', paths=paths)
  digests = inputs.digest_files(commands, paths)
  console.end_stage()
  found: list[str] = []
  if len(configs) == 1:
    found = _find_chosen_settings(settings.of_config(configs[0], paths).stated, run_settings.stated)
  made: dict[str, Any] = {'date': datetime.datetime.now(datetime.UTC).date().isoformat(), 'commit': outcome.commit,
                          'machine': outcome.machine}
  if not command or job == 'study':
    made |= {name: round(cost, 2) if name.endswith('processor_s') else cost for name, cost in outcome.cost.items()}
  return Record(
      record_id, claim, outcome.kind, tuple(shlex.join(['vit-jax', *words]) for words in commands),
      values=values, tolerance=tolerance, params_digest=outcome.params_digest, checkpoints=outcome.checkpoints,
      settings=run_settings.stated, config_digest=run_settings.digest, setting_digests=run_settings.digests,
      data=contents, files=digests, about=_find_sentences({**contents, **digests}), found=tuple(found), made=made)


def _find_chosen_settings(of_command: Mapping[str, Any], of_run: Mapping[str, Any]) -> list[str]:
  """Returns the names of the settings that a run chose, so that they differ from those of the command, sorted."""
  return sorted(name for name in of_command.keys() | of_run.keys() if of_command.get(name) != of_run.get(name))


def _choose_values(outcome: Outcome, claim: str, patterns: Sequence[str]) -> dict[str, float]:
  """Returns the values of an outcome whose names match one of the patterns, and those that the claim names.

  Raises UserError if the claim has no value, an unknown value or an unusual format, or a pattern matches no name.
  """
  claimed = records.claimed(claim)
  measured = outcome.history | outcome.values
  if formats := records.unusual_formats(claim):
    raise UserError(f'--claim: expected a format such as .1% or ,.0f, got {formats[0][:40]}. Change it.')
  if unknown := [name for name in claimed if name not in measured]:
    raise UserError(f'--claim: expected names of values in braces, got {{{unknown[0]}}}. Use '
                    f'{_listed(outcome.values)}, or METRIC at STEP.')
  if not claimed:
    raise UserError(f'--claim: expected a sentence with a value in braces, such as {{{next(iter(outcome.values))}:.3g}}'
                    f', got {claim!r}. Use {_listed(outcome.values)}, or METRIC at STEP.')
  names = list(dict.fromkeys([*outcome.values, *claimed]))
  if unused := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
    raise UserError(f'--values: expected patterns of names of values, got {unused[0]!r}, which none has. Use '
                    f'{_listed(names)}.')
  chosen = {*claimed, *(name for pattern in patterns for name in fnmatch.filter(names, pattern))}
  return {name: measured[name] for name in names if name in chosen}


def _listed(names: Collection[str]) -> str:
  """Returns the first `MAX_NAMED` names, and the number of the others: the values of a study have hundreds of names."""
  num_others = len(names) - MAX_NAMED
  return ', '.join([*names][:MAX_NAMED]) + (f' and {num_others:,} others' if num_others > 0 else '')


def _without_workdir(words: Sequence[str]) -> list[str]:
  """Returns the arguments of a command without `--workdir` and its value, and without `-q` and `-v`.

  Raises UserError if no argument is left, because the result was not made by the command line.
  """
  words, _ = console.split_switches(words)
  flags = ('--workdir', '-workdir')
  kept = [word for previous, word in zip(['', *words], words, strict=False)
          if previous not in flags and word not in flags and not word.lstrip('-').startswith('workdir=')]
  if not kept:
    raise UserError('record: expected a result of the vit-jax command line, got one without a command. Run the command '
                    'again with this version.')
  return kept


def _find_sentences(content_by_key: Mapping[str, object]) -> dict[str, str]:
  """Returns `Record.about`, with the sentences of records of this package that have the same data or files."""
  sentence_by_name = {}
  for record in map(records.read_file, records.paths()):
    for name, sentence in record.about.items():
      for key, content in {**record.data, **record.files}.items():
        if (f'{{{name}}}' in key or key == name) and content_by_key.get(key) == content:
          sentence_by_name[name] = sentence
  return sentence_by_name
