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


def differences(before: Mapping[str, Any], config: schema.Config, found: Mapping[str, str], *,
                without: tuple[str, ...] = ()) -> list[str]:
  """Returns a line for each setting of a config that differs from those of a record.

  Args:
    before: settings of the record that differ from their defaults.
    config: to compare.
    found: paths by name.
    without: settings that are not compared.
  """
  now, own = _all(config, found), given(config, found)
  lines = []
  for name in sorted((before.keys() | own.keys()) - set(without)):
    if name not in before or name not in now or before[name] != now[name]:
      old = json.dumps(before[name]) if name in before else 'default'
      new = json.dumps(now[name]) if name in now else 'none'
      lines.append(f'{name}: {old} -> {new}' + ' (the default)' * (name in now and name not in own))
  return lines


def _kinds(config: schema.Config) -> set[str]:
  """Returns the names of the parts whose kind a record always states."""
  return {'model', 'objective', 'optimizer', *(f'evals.{name}' for name in config.evals)}


def _all(config: schema.Config, found: Mapping[str, str]) -> dict[str, Any]:
  flat = json_files.flat(json.loads(json_files.to_json(config)))
  return {name: inputs.named(value, found) if isinstance(value, str) else value for name, value in flat.items()
          if not name.startswith(OF_THE_MACHINE)}
