"""The settings of a run as a record has them: those that differ from their defaults, and a digest of all."""
from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_jax.config import describe, json_files, layout, schema
from vit_jax.record import checkpoint_files
from vit_jax.replay import inputs

OF_THE_MACHINE = ('mesh.', *layout.AUTO, 'train.progress', 'data.workers', 'data.threads', 'trackers.')
"""Settings that follow from the machine, or that no result depends on."""
SHORT = 6
"""Hexadecimal digits of the digest of one setting: one of 56,000 pairs of 300 settings has the same."""


def read(path: pathlib.Path) -> schema.Config:
  """Returns the config of a run directory."""
  return json_files.read(path / 'config.json')


def given(config: schema.Config, found: Mapping[str, str]) -> dict[str, Any]:
  """Returns the settings that differ from their defaults, and the kinds of parts, by name.

  Args:
    config: of the run.
    found: paths by name, which replace them.
  """
  own = {one.name for one in describe.settings(config) if one.value != one.default}
  return {name: value for name, value in _all(config, found).items()
          if name in own or name.endswith('.type') and name.removesuffix('.type') in own | _kinds(config)}


def of_data(recorded: Mapping[str, Any]) -> schema.Config:
  """Returns a config with the data settings and the image size of a record, and defaults otherwise."""
  plain: dict[str, Any] = {}
  for name, value in recorded.items():
    if name.startswith('data.') or name == 'image_px':
      *parts, last = name.split('.')
      part = plain
      for one in parts:
        part = part.setdefault(one, {})
      part[last] = value
  return json_files.from_json(json.dumps(plain))


def digest(config: schema.Config, found: Mapping[str, str]) -> str:
  """Returns the SHA-256 of all settings that a result depends on."""
  return checkpoint_files.sha256(_all(config, found))


def digests(config: schema.Config, found: Mapping[str, str]) -> str:
  """Returns a short digest of each setting with its value, with spaces."""
  return ' '.join(sorted(_short(config, found).values()))


def explain_digest(before: str, config: schema.Config, found: Mapping[str, str]) -> str:
  """Returns which settings are the reason that the digest of all is another one than in a record.

  Args:
    before: `setting_digests` of the record; '' = it is from before there were any.
    config: of the replay.
    found: paths by name.
  """
  if not before:
    return ('This version has other settings than the one that made the record: new ones, or other defaults of those '
            'that the record does not name. A record of this age does not say which; those that it names are compared.')
  now, known = _all(config, found), set(before.split())
  new = [f'  {name}: {json.dumps(now[name])}' for name, short in _short(config, found).items() if short not in known]
  gone = len(known) - (len(now) - len(new))
  return '\n'.join(['This version has other settings than the one that made the record:', *new,
                    *[f'  {gone} that the record has, and this version has not or with another value'] * (gone > 0)])


def _short(config: schema.Config, found: Mapping[str, str]) -> dict[str, str]:
  return {name: checkpoint_files.sha256({name: value})[:SHORT] for name, value in _all(config, found).items()}


def differences(before: Mapping[str, Any], config: schema.Config, found: Mapping[str, str], *,
                without: tuple[str, ...] = ()) -> list[str]:
  """Returns a line for each setting of a config that differs from those of a record; not those that are `newer`.

  Args:
    before: settings of the record that differ from their defaults.
    config: to compare.
    found: paths by name.
    without: settings that are not compared.
  """
  now, own = _all(config, found), given(config, found)
  lines = []
  for name in sorted((before.keys() | own.keys()) - {*without, *newer(before, config, found)}):
    if name not in before or name not in now or before[name] != now[name]:
      old = json.dumps(before[name]) if name in before else 'default'
      new = json.dumps(now[name]) if name in now else 'none'
      lines.append(f'{name}: {old} -> {new}' + ' (the default)' * (name in now and name not in own))
  return lines


def newer(before: Mapping[str, Any], config: schema.Config, found: Mapping[str, str]) -> dict[str, Any]:
  """Returns the settings that a run has found out and that a record from before there were any does not state.

  Their default is `auto`: a run replaces it by a value, which a record would have.
  """
  is_open = {one.name for one in describe.settings(config) if getattr(one.default, 'value', one.default) == 'auto'}
  return {name: value for name, value in given(config, found).items() if name in is_open and name not in before}


def _kinds(config: schema.Config) -> set[str]:
  """Returns the names of the parts whose kind a record always states."""
  return {'model', 'objective', 'optimizer', *(f'evals.{name}' for name in config.evals)}


def _all(config: schema.Config, found: Mapping[str, str]) -> dict[str, Any]:
  flat = json_files.flat(json_files.to_plain(config))
  return {name: inputs.named(value, found) if isinstance(value, str) else value for name, value in flat.items()
          if not name.startswith(OF_THE_MACHINE)}
