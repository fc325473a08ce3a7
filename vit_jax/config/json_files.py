"""A config as JSON and back: `config.json` of a run directory. Each part names its type.

A type of this package has its name, a person's own `module:Class`, which is imported when the file is read.
"""
from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_jax.config import parts, schema
from vit_jax.core import implementation, os_errors
from vit_jax.core.errors import UserError
from vit_jax.core.json_text import parse
from vit_jax.core.redaction import redacted

_ADVICE = 'The command that trained the run writes it again; other jobs also take --config=NAME.'


def to_json(config: schema.Config) -> str:
  """Returns the complete config as JSON; each part names its type.

  Passwords and tokens of addresses are left out.
  """
  return json.dumps(_plain(config), indent=2) + '\n'


def read(path: pathlib.Path) -> schema.Config:
  """Reads the config of a file such as `config.json` of a run directory.

  Raises:
    UserError: it is not such a file; lists every setting that is unknown or has a value of another type.
  """
  try:
    text = path.read_text()
  except OSError as error:
    raise os_errors.kind(error)(f'{path}: expected a file that can be read, got {error.strerror}. Check that it is '
                                'there and that this user may read it.') from error
  except ValueError:
    raise UserError(f'{path}: expected a config as JSON, got bytes that are not UTF-8. {_ADVICE}') from None
  try:
    return from_json(text)
  except UserError as error:
    got = error if text.strip() else 'an empty file'
    separator = '\n' if '\n' in str(got) else '. '
    raise UserError(f'{path}: expected a config as JSON, got {got}{separator}{_ADVICE}') from None


def from_json(text: str) -> schema.Config:
  """Returns the config that `to_json` wrote. Absent settings have their defaults.

  Raises:
    UserError: lists every setting that is unknown or has a value of another type.
  """
  try:
    saved = parse(text)
  except ValueError as error:
    raise UserError(f'text that is not JSON: {error}') from None
  return parts.from_plain(saved)


def flat(plain: Any, prefix: str = '') -> dict[str, Any]:
  """Returns the settings of a config as parsed JSON, or of a part of it, by dotted names such as `model.width`."""
  if not isinstance(plain, Mapping):
    return {prefix: plain}
  return {name: value for key, child in plain.items()
          for name, value in flat(child, f'{prefix}.{key}'.strip('.')).items()}


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return {'type': implementation.type_name(type(value)),
            **{f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (tuple, list)):
    return [_plain(v) for v in value]
  if isinstance(value, str):
    return redacted(value)
  return value.value if isinstance(value, enum.Enum) else value
