"""A record: a published number and the command that reproduces it. One JSON file each, in `benchmarks/records`.

A record does not state a number without the command, the settings, the digests of the data and the machine that it is
from. Digests that nobody has computed yet are empty, never guessed; `replayed` then says so.
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

FOLDER = next((one for one in (machine.ROOT / 'benchmarks' / 'records', machine.ROOT / 'vit_jax' / 'records')
               if one.is_dir()), machine.ROOT / 'benchmarks' / 'records')
"""The records of this repository: in a checkout, or installed as `vit_jax.records`."""
KINDS = {'train': 'the parameters and the metrics at the end of a run, or of several runs in a row',
         'evaluation': 'the metrics of an evaluation',
         'measurement': 'times and speeds, which no machine repeats exactly: they are not replayed'}
COMMIT_LETTERS = 7
_MOST_LETTERS = 2**16  # of all commands
VALUE = re.compile(r'\{([^{}:]+)(?::([^{}]*))?\}')


_FORMAT = re.compile(r'[-+ ]?[0-9]?[,_]?(\.[0-9])?[eEfFgG%]?')
"""Formats of the values in a claim; a width is a number of bytes of memory."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """How far each value may differ, as an absolute difference, and why.

  same: on a machine with the same bits, where 0 also compares the parameters.    elsewhere: on any other machine.
  values: the most for single values, by name: below a third of the distance to chance and to what it is compared with.
  """
  same: float = 0.
  elsewhere: float = 0.
  reason: str = ''
  values: dict[str, float] = dataclasses.field(default_factory=dict)

  def of(self, name: str, *, is_same: bool) -> float:
    """Returns how far a value may differ, on a machine with the same bits or on another one."""
    usual = self.same if is_same else self.elsewhere
    return min(usual, self.values.get(name, usual))


@dataclasses.dataclass(frozen=True)
class Record:
  """A record; every field but `id` is in its file.

  id: the name of the file, without its suffix.
  claim: a sentence, in which `{NAME}` or `{NAME:.1%}` is a value.
  kind: one of `KINDS`.
  command: lines for a shell, run in order; `{NAME}` is the path of data or weights that a person gives, and `{work}`
    the fresh directory.
  values: by the name of the metric; in a study after the name of the run.
  tolerance: of the values.
  params_digest: of the parameters at the end, or of the evaluated weights; '' = not known.
  checkpoints: digest of the parameters by step.
  settings: of the last command that differ from the defaults.    found: those of them that only the run finds out.
  config_digest: of all settings; '' = not known.    setting_digests: the beginning of the digest of each; '' likewise.
  data: `Content` by source and split.    files: size and SHA-256 by name.    about: what each `{NAME}` is.
  made: date, commit, machine and processor seconds.
  replayed: date and commit of the last replay that was equal, or only `close`; or 'never, since DATE'.
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
    return VALUE.sub(lambda found: _shown(self.values[found[1]], found[2] or ''), text)

  def words(self) -> list[list[str]]:
    """Returns the commands as lists of arguments, without the name of the program."""
    return [shlex.split(line)[1:] for line in self.command]


def read(spec: str) -> Record:
  """Returns the record with this id, or of this file.

  Raises:
    UserError: there is no such record, or the file is not one.
  """
  path = pathlib.Path(spec)
  if is_id(spec):
    names = [one.stem for one in paths()]
    if spec not in names:
      raise UserError(f'replay: expected the ID of a record, got {spec!r}.{globs.hint(spec, names)} List all with '
                      'vit-jax list --records.')
    path = FOLDER / f'{spec}.json'
  return read_file(path)


def claimed(claim: str) -> list[str]:
  """Returns the names of the values of a claim."""
  return [match[1] for match in VALUE.finditer(claim)]


def odd_formats(claim: str) -> list[str]:
  """Returns the values of a claim whose format is not a usual one, as one with a large width, which takes memory."""
  return [match[0] for match in VALUE.finditer(claim) if not _FORMAT.fullmatch(match[2] or '')]


def is_id(spec: str) -> bool:
  """Returns whether a text is the id of a record of this repository, and not the path of a file."""
  return pathlib.Path(spec).suffix != '.json'


def read_file(path: pathlib.Path) -> Record:
  """Returns the record of a file; raises UserError if it is not one."""
  return from_plain(path.stem, documents.read(path, expected='a record as JSON', advice='List all records with vit-jax '
                                              'list --records, or write this one again with vit-jax record.'))


def paths() -> list[pathlib.Path]:
  """Returns the files of all records of the repository, by name."""
  return sorted(FOLDER.glob('*.json'))


def path_of(record: Record) -> pathlib.Path:
  """Returns the file of a record of the repository."""
  return FOLDER / f'{record.id}.json'


def write(record: Record, path: pathlib.Path) -> None:
  """Writes a record, with sorted keys."""
  files.replace(path, f'{json.dumps(to_plain(record), indent=1, sort_keys=True, ensure_ascii=False)}\n'.encode())


def to_plain(record: Record) -> dict[str, Any]:
  """Returns the content of the file of a record; empty fields are left out."""
  found = dataclasses.asdict(record)
  found['data'] = {name: content._asdict() for name, content in record.data.items()}
  found['tolerance'] = {name: value for name, value in found['tolerance'].items() if value != {}}
  return {name: value for name, value in found.items() if name != 'id' and value not in ('', (), {})}


def from_plain(name: str, found: Field) -> Record:
  """Returns the record of the content of a file.

  Raises:
    UserError: a field is unknown, missing, or has another type.
  """
  known = [field.name for field in dataclasses.fields(Record) if field.name != 'id']
  if unknown := sorted(found.object().keys() - set(known)):
    raise found.field(unknown[0]).error(f'only the fields {", ".join(known)}')
  command = tuple(line.text() for line in found.field('command').items())
  if sum(map(len, command)) > _MOST_LETTERS:
    raise found.field('command').error(f'lines of at most {_MOST_LETTERS:,} characters together')
  record = Record(
      name, found.field('claim').text(), found.field('kind').text(), command, _numbers(found.field('values')),
      _tolerance(found.part('tolerance')), checkpoints=_texts(found.part('checkpoints')),
      settings=found.part('settings').object(), found=found.field('found', default=()).texts(),
      data={key: _content(one) for key, one in found.part('data').fields()},
      files={key: one.object() for key, one in found.part('files').fields()}, about=_texts(found.part('about')),
      made=_made(found.part('made')), **{key: found.field(key, default='').text() for key in (
          'params_digest', 'config_digest', 'setting_digests', 'replayed')})
  if record.kind not in KINDS:
    raise found.field('kind').error(f'one of {", ".join(KINDS)}')
  if odd := odd_formats(record.claim):
    raise found.field('claim').error(f'values with a format such as .1% or ,.0f, not {odd[0][:40]!r},')
  if unknown := sorted({match[1] for match in VALUE.finditer(record.claim)} - record.values.keys()):
    raise found.field('claim').error(f'names of values ({documents.listed(list(record.values), 5)})')
  try:
    if not all(record.words()) or not record.claim:
      raise ValueError
  except ValueError:
    raise found.field('command').error('a claim and commands as for a shell') from None
  return record


def _numbers(found: Field) -> dict[str, float]:
  return {name: one.number() for name, one in found.fields()}


def _texts(found: Field) -> dict[str, str]:
  return {name: one.text() for name, one in found.fields()}


def _tolerance(found: Field) -> Tolerance:
  return Tolerance(found.field('same', default=0.).number(0), found.field('elsewhere', default=0.).number(0),
                   found.field('reason', default='').text(), _numbers(found.part('values')))


def _content(found: Field) -> Content:
  return Content(found.field('examples').whole(), *(found.field(name).text() for name in Content._fields[1:]))


def _made(found: Field) -> dict[str, Any]:
  """Returns how a record was made, whose other fields are those of this or another version."""
  for name, one in found.fields():
    if name in ('date', 'commit'):
      one.text()
    elif name != 'machine':
      one.number(0)
  for name, one in found.part('machine').fields():
    if name in ('cpu_model', 'device_kind'):
      one.text()
  _texts(found.part('machine').part('versions'))
  return found.object()


def _shown(value: float, spec: str) -> str:
  return format(value, spec).replace('%', ' %') if spec else f'{value:g}'
