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
from collections.abc import Mapping
from typing import Any

from vit_jax.core import globs, os_errors
from vit_jax.core.errors import UserError
from vit_jax.data.content import Content
from vit_jax.record import origin

FOLDER = origin.ROOT / 'benchmarks' / 'records'
KINDS = {'train': 'the parameters and the metrics at the end of a run, or of several runs in a row',
         'evaluation': 'the metrics of an evaluation',
         'measurement': 'times and speeds, which no machine repeats exactly: they are not replayed'}
VALUE = re.compile(r'\{([^{}:]+)(?::([^{}]*))?\}')


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """How far each value may differ, as an absolute difference, and why.

  same: on a machine with the same bits, where 0 also compares the parameters.    elsewhere: on any other machine.
  """
  same: float = 0.
  elsewhere: float = 0.
  reason: str = ''


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
  config_digest: of all settings; '' = not known.
  data: `Content` by source and split.    files: size and SHA-256 by name.    about: what each `{NAME}` is.
  made: date, commit, machine and processor seconds.
  replayed: date of the last replay that was equal, or 'never, since DATE'.
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
  if path.suffix != '.json':
    names = [one.stem for one in paths()]
    if spec not in names:
      raise UserError(f'replay: expected the ID of a record, got {spec!r}.{globs.hint(spec, names)} List all with '
                      'vit-jax list --records.' if names else
                      f'{spec}: expected the id of a record, got no folder {FOLDER}. The records are in the '
                      'repository; pass the path of a JSON file.')
    path = FOLDER / f'{spec}.json'
  return read_file(path)


def read_file(path: pathlib.Path) -> Record:
  """Returns the record of a file; raises UserError if it is not one."""
  try:
    return from_plain(path.stem, json.loads(path.read_text()))
  except OSError as error:
    raise os_errors.kind(error)(f'{path}: expected a record, got "{error.strerror}". List all records with vit-jax '
                                'list --records.') from error
  except ValueError as error:
    raise UserError(f'{path}: expected a record as JSON, got {error}. Write it again with vit-jax record.') from error


def paths() -> list[pathlib.Path]:
  """Returns the files of all records of the repository, by name."""
  return sorted(FOLDER.glob('*.json'))


def path_of(record: Record) -> pathlib.Path:
  """Returns the file of a record of the repository."""
  return FOLDER / f'{record.id}.json'


def write(record: Record, path: pathlib.Path) -> None:
  """Writes a record, with sorted keys."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(to_plain(record), indent=1, sort_keys=True, ensure_ascii=False) + '\n')


def to_plain(record: Record) -> dict[str, Any]:
  """Returns the content of the file of a record; empty fields are left out."""
  found = dataclasses.asdict(record)
  found['data'] = {name: content._asdict() for name, content in record.data.items()}
  return {name: value for name, value in found.items() if name != 'id' and value not in ('', (), {})}


def from_plain(name: str, plain: Any) -> Record:
  """Returns the record of the content of a file.

  Raises:
    ValueError: a field is unknown, missing, or has another type.
  """
  fields = {field.name: field for field in dataclasses.fields(Record) if field.name != 'id'}
  if not isinstance(plain, Mapping):
    raise ValueError('no object')
  if unknown := sorted(plain.keys() - fields.keys()):
    raise ValueError(f'the unknown field {unknown[0]}')
  if missing := [one for one in ('claim', 'kind', 'command', 'values') if one not in plain]:
    raise ValueError(f'no field `{missing[0]}`')
  if plain['kind'] not in KINDS:
    raise ValueError(f'the kind {plain["kind"]!r}; known: {", ".join(KINDS)}')
  try:
    found = dict(plain)
    found |= {one: tuple(map(str, plain[one])) for one in ('command', 'found') if one in plain}
    found |= {'values': {key: float(value) for key, value in plain['values'].items()}}
    found |= {'data': {key: Content(**value) for key, value in plain.get('data', {}).items()}}
    found |= {'tolerance': Tolerance(**plain.get('tolerance', {}))}
    record = Record(id=name, **found)
    if not all(record.words()) or not record.sentence:
      raise TypeError('an empty command or claim')
  except (AttributeError, TypeError, KeyError) as error:
    raise ValueError(f'a field of another type ({error})') from error
  return record


def _shown(value: float, spec: str) -> str:
  return format(value, spec).replace('%', ' %') if spec else f'{value:g}'
