"""Records: published numbers and the commands that reproduce them, each a JSON file in `benchmarks/records`.

A record holds numbers, and the command, the settings, the digests of the data and the machine that produced the
numbers. `recording` makes and writes records, `job` reads and compares records, and `vit-jax list --records` lists
records. Anybody may have written the file of a record, so `read_file` checks every field and runs nothing.
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
"""The folder with the records of this package: in a checkout, or installed as `vit_jax.records`."""
KINDS = ('train', 'evaluation', 'measurement')
_MAX_CHARACTERS = 2**16  # of all commands of a record
_VALUE = re.compile(r'\{([^{}:]+)(?::([^{}]*))?\}')  # a name and a format in a claim, such as '{test/top1:.1%}'
_FORMAT = re.compile(r'[-+ ]?[0-9]?[,_]?(\.[0-9])?[eEfFgG%]?')
"""The formats that a claim may have, such as '.1%'. Large widths are not allowed, as they would take much memory."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """The largest allowed absolute differences of values, and the reason why values may differ.

  same: on a machine that computes the same bits; with 0, digests must also be equal.
  elsewhere: on other machines.
  values: smaller limits for some values, by name: at most a third of the distance to chance or to a compared value.
  """
  same: float = 0.
  elsewhere: float = 0.
  reason: str = ''
  values: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Record:
  """A record. The file of a record has all fields except `id`; '' and empty fields are not known.

  id: the name of the file, without the suffix.
  claim: a sentence, in which `{NAME}` or `{NAME:.1%}` is a value.
  kind: `train`: metrics and parameters at the end of a run, or of several runs in a row; `evaluation`: metrics;
    `measurement`: times and speeds, which are not replayed, as no machine repeats them exactly.
  command: lines for a shell, run in order. The placeholder `{NAME}` is the path of data or weights, `{work}` the
    directory of the replay.
  values: by the name of the metric; for a study, see `outcomes.Outcome`.
  params_digest: of the parameters at the end, or of the evaluated weights.
  checkpoints: digest of the parameters by step; for a study by the name of the run.
  settings: the settings of the last command that differ from the defaults, by dotted name.
  found: names of the settings whose values the run chose, so that the command line does not have them.
  config_digest, setting_digests: see `Settings.digest` and `Settings.digests`.
  data: `Content` by 'SOURCE SPLIT'.    files: digests of weights and other files; see `inputs.digest_files`.
  about: a sentence about the data or weights of each placeholder, by name.
  made: date, commit, machine, and costs such as processor seconds.
  replayed: 'DATE COMMIT' of the last equal replay, 'DATE COMMIT close' of a close one, or 'never, since DATE'.
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
    """Returns a text with the values of this record in place of `{NAME:FORMAT}`."""
    def format_value(match: re.Match[str]) -> str:
      return format(self.values[match[1]], match[2] or 'g').replace('%', ' %')
    return _VALUE.sub(format_value, text)

  def words(self) -> list[list[str]]:
    """Returns the arguments of each command, without the name of the program."""
    return [shlex.split(line)[1:] for line in self.command]


def claimed(claim: str) -> list[str]:
  """Returns the names of the values in a claim."""
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
  path_by_id = {path.stem: path for path in paths()}
  if spec not in path_by_id:
    raise UserError(f'replay: expected the ID of a record, got {spec!r}.{globs.hint(spec, list(path_by_id))} List all '
                    'with vit-jax list --records.')
  return path_by_id[spec]


def read(spec: str) -> Record:
  """Returns the record with an id, or in a file; raises UserError as `find` and `read_file` do."""
  return read_file(find(spec))


def read_file(path: pathlib.Path) -> Record:
  """Returns the record in a file; raises UserError if the file is not a record."""
  advice = 'List all records with vit-jax list --records, or write this one again with vit-jax record.'
  return from_plain(path.stem, documents.read(path, expected='a record as JSON', advice=advice))


def write(record: Record, path: pathlib.Path) -> None:
  """Writes the file of a record, with sorted keys."""
  files.replace(path, f'{json.dumps(to_plain(record), indent=1, sort_keys=True, ensure_ascii=False)}\n'.encode())


def to_plain(record: Record) -> dict[str, Any]:
  """Returns the content of the file of a record, as values of JSON without empty fields."""
  plain = dataclasses.asdict(record)
  plain['data'] = {name: content._asdict() for name, content in record.data.items()}
  if not record.tolerance.values:
    del plain['tolerance']['values']
  return {name: value for name, value in plain.items() if name != 'id' and value not in ('', (), {})}


def from_plain(record_id: str, content: Field) -> Record:
  """Returns a record from the content of a file; raises UserError if a field is unknown, missing or invalid."""
  known = [field.name for field in dataclasses.fields(Record) if field.name != 'id']
  if unknown := sorted(content.object().keys() - set(known)):
    raise content.field(unknown[0]).error(f'only the fields {", ".join(known)}')
  command = tuple(line.text() for line in content.field('command').elements())
  if sum(map(len, command)) > _MAX_CHARACTERS:
    raise content.field('command').error(f'lines of at most {_MAX_CHARACTERS:,} characters together')
  tolerance = content.object_or_empty('tolerance')
  record = Record(
      record_id, content.field('claim').text(), content.field('kind').text(), command,
      _numbers(content.field('values')),
      Tolerance(tolerance.field('same', default=0.).number(0), tolerance.field('elsewhere', default=0.).number(0),
                tolerance.field('reason', default='').text(), _numbers(tolerance.object_or_empty('values'))),
      checkpoints=_texts(content.object_or_empty('checkpoints')), settings=content.object_or_empty('settings').object(),
      found=content.field('found', default=()).texts(), about=_texts(content.object_or_empty('about')),
      data={key: Content(field.field('examples').whole(), *(field.field(name).text() for name in Content._fields[1:]))
            for key, field in content.object_or_empty('data').fields()},
      files={name: file.object() for name, file in content.object_or_empty('files').fields()},
      made=_checked_made(content.object_or_empty('made')),
      **{name: content.field(name, default='').text()
         for name in ('params_digest', 'config_digest', 'setting_digests', 'replayed')})
  if record.kind not in KINDS:
    raise content.field('kind').error(f'one of {", ".join(KINDS)}')
  if formats := unusual_formats(record.claim):
    raise content.field('claim').error(f'values with a format such as .1% or ,.0f, not {formats[0][:40]!r},')
  if not record.values:
    raise content.field('values').error('at least one value')
  if not record.values.keys() >= {*claimed(record.claim)}:
    raise content.field('claim').error(f'names of values ({documents.listed(list(record.values), 5)})')
  try:
    is_complete = record.claim and all(record.words())
  except ValueError:  # a quotation mark is not closed
    is_complete = False
  if not is_complete:
    raise content.field('command').error('a claim and commands as for a shell')
  return record


def _numbers(field: Field) -> dict[str, float]:
  return {name: value.number() for name, value in field.fields()}


def _texts(field: Field) -> dict[str, str]:
  return {name: value.text() for name, value in field.fields()}


def _checked_made(made: Field) -> dict[str, Any]:
  """Checks and returns the field `made`; unknown fields of the machine, of other versions, are not checked."""
  for name, value in made.fields():
    if name in ('date', 'commit'):
      value.text()
    elif name != 'machine':
      value.number(0)
  machine_field = made.object_or_empty('machine')
  for name in ('cpu_model', 'device_kind'):
    machine_field.field(name, default='').text()
  _texts(machine_field.object_or_empty('versions'))
  return made.object()
