"""A record: a published number and the command that reproduces it. Each is a JSON file in `benchmarks/records`.

With each number, a record has the command, the settings, the digests of the data and the machine that it is from. A
digest that is not known is empty. `recording` makes and writes records; `job` reads and compares them; `vit-jax list
--records` lists them. Anybody may have written the file of a record, so reading it is strict and runs nothing.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
from typing import Any

from vit_jax.core import documents, files, globs
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.data.content import Content
from vit_jax.record import machine

_IN_CHECKOUT, _INSTALLED = machine.ROOT / 'benchmarks' / 'records', machine.ROOT / 'vit_jax' / 'records'
FOLDER = _INSTALLED if _INSTALLED.is_dir() and not _IN_CHECKOUT.is_dir() else _IN_CHECKOUT
"""The records of this package: in a checkout, or installed as `vit_jax.records`."""
KINDS = ('train', 'evaluation', 'measurement')
_MOST_LETTERS = 2**16  # of all commands of a record
_VALUE = re.compile(r'\{([^{}:]+)(?::([^{}]*))?\}')  # in a claim, such as '{test/top1:.1%}'
_FORMAT = re.compile(r'[-+ ]?[0-9]?[,_]?(\.[0-9])?[eEfFgG%]?')
"""Formats of values that a claim may have, such as '.1%': a large width would take memory."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """The absolute difference by which values may differ, and the reason.

  same: on a machine that computes the same bits; with 0, digests must also be equal.    elsewhere: on any other one.
  values: smaller limits for single values, by name: a third of the distance to chance or to a compared value, at most.
  """
  same: float = 0.
  elsewhere: float = 0.
  reason: str = ''
  values: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Record:
  """A record; every field but `id` is in its file.

  id: the name of the file, without its suffix.
  claim: a sentence, in which `{NAME}` or `{NAME:.1%}` is a value.
  kind: `train`, parameters and metrics at the end of a run or of several runs in a row; `evaluation`, its metrics; or
    `measurement`, times and speeds: these are not replayed, as no machine repeats them exactly.
  command: lines for a shell, run in order. `{NAME}` is the path of data or weights that a person gives, `{work}` the
    directory of the replay.
  values: by the name of the metric; for a study, see `outcomes.Outcome`.
  tolerance: of the values.
  params_digest: of the parameters at the end, or of the evaluated weights; '' = not known.
  checkpoints: digest of the parameters by step; for a study by the name of the run.
  settings: of the last command that differ from the defaults.    found: those of them that only the run determines.
  config_digest: of all settings; '' = not known.    setting_digests: see `Settings.digests`; '' = not known.
  data: `Content` by 'SOURCE SPLIT'.    files: see `inputs.files`.    about: a sentence by `NAME` of data or weights.
  made: date, commit, machine, and costs such as processor seconds.
  replayed: date and commit of the last replay that was equal or close, which it says; or 'never, since DATE'.
  """
  id: str
  claim: str
  kind: str
  command: tuple[str, ...]
  values: dict[str, float]
  tolerance: Tolerance = Tolerance()
  params_digest: str = ''
  checkpoints: dict[str, str] = dataclasses.field(default_factory=dict)
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  found: tuple[str, ...] = ()
  config_digest: str = ''
  setting_digests: str = ''
  data: dict[str, Content] = dataclasses.field(default_factory=dict)
  files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  about: dict[str, str] = dataclasses.field(default_factory=dict)
  made: dict[str, Any] = dataclasses.field(default_factory=dict)
  replayed: str = ''

  @property
  def sentence(self) -> str:
    """The claim with its values."""
    return self.filled(self.claim)

  def filled(self, text: str) -> str:
    """Returns a text with values in place of `{NAME:FORMAT}`."""
    def number(match: re.Match[str]) -> str:
      return format(self.values[match[1]], match[2] or 'g').replace('%', ' %')
    return _VALUE.sub(number, text)

  def words(self) -> list[list[str]]:
    """Returns the commands as lists of arguments, without the name of the program."""
    return [shlex.split(line)[1:] for line in self.command]


def claimed(claim: str) -> list[str]:
  """Returns the names of the values of a claim."""
  return [match[1] for match in _VALUE.finditer(claim)]


def unusual_formats(claim: str) -> list[str]:
  """Returns the values in a claim whose format is not allowed, such as '{test/top1:99999f}'."""
  return [match[0] for match in _VALUE.finditer(claim) if not _FORMAT.fullmatch(match[2] or '')]


def paths() -> list[pathlib.Path]:
  """Returns the files of all records of this package, sorted by name."""
  return sorted(FOLDER.glob('*.json'))


def is_id(spec: str) -> bool:
  """Returns whether a text is the id of a record of this package, and not the path of a file."""
  return pathlib.Path(spec).suffix != '.json'


def find(spec: str) -> pathlib.Path:
  """Returns the path of a record, given as an id or a path; raises UserError if there is no record with this id."""
  if not is_id(spec):
    return pathlib.Path(spec)
  known = {path.stem: path for path in paths()}
  if spec not in known:
    raise UserError(f'replay: expected the ID of a record, got {spec!r}.{globs.hint(spec, list(known))} List all with '
                    'vit-jax list --records.')
  return known[spec]


def read(spec: str) -> Record:
  """Returns the record with an id, or in a file; raises UserError as `find` and `read_file`."""
  return read_file(find(spec))


def read_file(path: pathlib.Path) -> Record:
  """Returns the record in a file; raises UserError if the file is not one."""
  return from_plain(path.stem, documents.read(path, expected='a record as JSON', advice='List all records with vit-jax '
                                              'list --records, or write this one again with vit-jax record.'))


def write(record: Record, path: pathlib.Path) -> None:
  """Writes a record, with sorted keys."""
  files.replace(path, f'{json.dumps(to_plain(record), indent=1, sort_keys=True, ensure_ascii=False)}\n'.encode())


def to_plain(record: Record) -> dict[str, Any]:
  """Returns a record as values of JSON, the content of its file; empty fields are left out."""
  plain = dataclasses.asdict(record)
  plain['data'] = {name: content._asdict() for name, content in record.data.items()}
  if not record.tolerance.values:
    del plain['tolerance']['values']
  return {name: value for name, value in plain.items() if name != 'id' and value not in ('', (), {})}


def from_plain(name: str, content: Field) -> Record:
  """Returns the record with the id `name` from the content of its file.

  Raises:
    UserError: a field is unknown, missing, or has a wrong type or value.
  """
  known = [field.name for field in dataclasses.fields(Record) if field.name != 'id']
  if unknown := sorted(content.object().keys() - set(known)):
    raise content.field(unknown[0]).error(f'only the fields {", ".join(known)}')
  command = tuple(line.text() for line in content.field('command').items())
  if sum(map(len, command)) > _MOST_LETTERS:
    raise content.field('command').error(f'lines of at most {_MOST_LETTERS:,} characters together')
  tolerance = content.part('tolerance')
  record = Record(
      name, content.field('claim').text(), content.field('kind').text(), command, _numbers(content.field('values')),
      Tolerance(tolerance.field('same', default=0.).number(0), tolerance.field('elsewhere', default=0.).number(0),
                tolerance.field('reason', default='').text(), _numbers(tolerance.part('values'))),
      checkpoints=_texts(content.part('checkpoints')), settings=content.part('settings').object(),
      found=content.field('found', default=()).texts(), about=_texts(content.part('about')),
      data={key: Content(one.field('examples').whole(), *(one.field(part).text() for part in Content._fields[1:]))
            for key, one in content.part('data').fields()},
      files={key: file.object() for key, file in content.part('files').fields()}, made=_made(content.part('made')),
      **{key: content.field(key, default='').text()
         for key in ('params_digest', 'config_digest', 'setting_digests', 'replayed')})
  if record.kind not in KINDS:
    raise content.field('kind').error(f'one of {", ".join(KINDS)}')
  if formats := unusual_formats(record.claim):
    raise content.field('claim').error(f'values with a format such as .1% or ,.0f, not {formats[0][:40]!r},')
  if not record.values.keys() >= {*claimed(record.claim)}:
    raise content.field('claim').error(f'names of values ({documents.listed(list(record.values), 5)})')
  try:
    is_complete = record.claim and all(record.words())
  except ValueError:  # a quotation mark without its second one
    is_complete = False
  if not is_complete:
    raise content.field('command').error('a claim and commands as for a shell')
  return record


def _numbers(field: Field) -> dict[str, float]:
  return {name: value.number() for name, value in field.fields()}


def _texts(field: Field) -> dict[str, str]:
  return {name: value.text() for name, value in field.fields()}


def _made(made: Field) -> dict[str, Any]:
  """Checks and returns the field `made`. The machine may have fields of another version, which are not checked."""
  for name, value in made.fields():
    if name in ('date', 'commit'):
      value.text()
    elif name != 'machine':
      value.number(0)
  machine_field = made.part('machine')
  for name in ('cpu_model', 'device_kind'):
    machine_field.field(name, default='').text()
  _texts(machine_field.part('versions'))
  return made.object()
