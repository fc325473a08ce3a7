"""A config as JSON and back: `config.json` of a run directory. Each part names its type.

A type of this package has its name, a person's own `module:Class`. Its module is imported when the file is read, if the
reader needs it, and if it may be run (`core/implementation.py`): the file may be another person's.
"""
from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_jax.config import parts, schema
from vit_jax.core import documents, implementation
from vit_jax.core.errors import UserError, redacted

_ADVICE = 'The command that trained the run writes it again; other jobs also take --config=NAME.'


def to_json(config: schema.Config) -> str:
  """Returns the complete config as JSON; each part names its type.

  Passwords and tokens of addresses are left out.
  """
  return json.dumps(to_plain(config), indent=2) + '\n'


def read(path: pathlib.Path, *, code: str = '') -> schema.Config:
  """Reads the config of a file such as `config.json` of a run directory; `code` as `parts.from_plain` has it.

  Raises:
    UserError: it is not such a file; lists every setting that is unknown or has a value of another type.
  """
  text = documents.read_text(path, expected='a config as JSON', advice=_ADVICE)
  try:
    return from_json(text, code=code)
  except UserError as error:
    got = error if text.strip() else 'an empty file'
    separator = '\n' if '\n' in str(got) else '. '
    raise UserError(f'{path}: expected a config as JSON, got {got}{separator}{_ADVICE}') from None


def from_json(text: str, *, code: str = '') -> schema.Config:
  """Returns the config that `to_json` wrote. Absent settings have their defaults; `code` as `parts.from_plain` has it.

  Raises:
    UserError: lists every setting that is unknown or has a value of another type.
  """
  try:
    saved = documents.parse(text, nan=True)
  except ValueError as error:
    raise UserError(f'text that is not JSON: {error}') from None
  return parts.from_plain(saved, code=code)


def flat(plain: Any, prefix: str = '') -> dict[str, Any]:
  """Returns the settings of a config as parsed JSON, or of a part of it, by dotted names such as `model.width`."""
  if not isinstance(plain, Mapping):
    return {prefix: plain}
  return {name: value for key, child in plain.items()
          for name, value in flat(child, f'{prefix}.{key}'.strip('.')).items()}


def to_plain(value: Any) -> Any:
  """Returns a config, or a part of it, as parsed JSON; passwords and tokens of addresses are left out."""
  if dataclasses.is_dataclass(value):
    return {'type': implementation.type_name(type(value)),
            **{f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
  if isinstance(value, dict):
    return {str(k): to_plain(v) for k, v in value.items()}
  if isinstance(value, (tuple, list)):
    return [to_plain(v) for v in value]
  if isinstance(value, str):
    return redacted(value)
  return value.value if isinstance(value, enum.Enum) else value
