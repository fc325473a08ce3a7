"""The settings of a run in a record: the settings that differ from their defaults, and digests of all settings.

`recording` writes the settings of a run (`of_config`) into a record. `job` compares the settings of the record twice:
with the settings of the command line before the command runs, and with the settings of the run after it. Placeholders
such as `{photos}` replace paths, so data may be in any folder.
"""
from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vit_jax.config import describe, engine, schema
from vit_jax.parallel import layout
from vit_jax.record import checkpoint_files
from vit_jax.replay import inputs

OF_THE_MACHINE = ('mesh.', *layout.AUTO, 'train.progress', 'data.workers', 'data.threads', 'trackers.')
"""Beginnings of the names of settings that depend on the machine, or do not change results; a record omits them."""
NUM_SHORT_DIGITS = 6
"""Hexadecimal digits of the digest of one setting. With 300 settings, 1 change in 56,000 is not detected."""


class Settings(NamedTuple):
  """The settings of a config that change results, by dotted name, with values as in JSON.

  every: all these settings.
  stated: the settings that a record lists: those that differ from defaults, and types such as `model.type`.
  automatic: names of the settings with the default `auto`, which a run replaces by a value.
  """
  every: dict[str, Any]
  stated: dict[str, Any]
  automatic: set[str]

  @property
  def digest(self) -> str:
    """The SHA-256 of all settings; `Record.config_digest`."""
    return checkpoint_files.sha256(self.every)

  @property
  def digests(self) -> str:
    """The short digest of each setting with its value, sorted and joined by spaces; `Record.setting_digests`."""
    return ' '.join(sorted(_short_digest(name, value) for name, value in self.every.items()))

  def newer(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the automatic settings that a record lacks, as the version that made the record had no such settings."""
    return {name: value for name, value in self.stated.items() if name in self.automatic and name not in recorded}

  def differences(self, recorded: Mapping[str, Any], *, ignored: Collection[str] = ()) -> list[str]:
    """Returns a line for each setting that differs from the settings of a record, except for `newer` and `ignored`."""
    lines = []
    for name in sorted((recorded.keys() | self.stated.keys()) - {*ignored, *self.newer(recorded)}):
      if name in recorded and name in self.every and recorded[name] == self.every[name]:
        continue
      before = json.dumps(recorded[name]) if name in recorded else 'default'
      now = json.dumps(self.every[name]) if name in self.every else 'none'
      is_default = name in self.every and name not in self.stated
      lines.append(f'{name}: {before} -> {now}{" (the default)" if is_default else ""}')
    return lines

  def explain_digest(self, recorded: str) -> str:
    """Returns a text that lists the settings whose short digests are not among those of a record.

    Call it if `digest` is not the record's. `recorded` is `Record.setting_digests`; '' = the record is too old.
    """
    if not recorded:
      return ('This version has other settings than the version that made the record: new settings, or other defaults '
              'of settings that the record does not list. This record is too old to show which. The settings that it '
              'lists are compared.')
    recorded_digests = set(recorded.split())
    changed = [name for name, value in self.every.items() if _short_digest(name, value) not in recorded_digests]
    num_gone = len(recorded_digests) - (len(self.every) - len(changed))
    lines = ['This version has other settings than the version that made the record:',
             *(f'  {name}: {json.dumps(self.every[name])}' for name in changed)]
    if num_gone > 0:
      lines.append(f'  {num_gone} of the record that this version does not have, or has with another value')
    return '\n'.join(lines)


def of_config(config: schema.Config, paths: Mapping[str, str]) -> Settings:
  """Returns the settings of a config, in which placeholders replace the paths of data and weights."""
  described = describe.settings(config)
  changed = {setting.name for setting in described if setting.value != setting.default}
  parts = {'model', 'objective', 'optimizer', *(f'evals.{name}' for name in config.evals)} | changed
  every = {name: inputs.with_placeholders(value, paths) if isinstance(value, str) else value
           for name, value in engine.flat(engine.to_plain(config)).items()
           if not name.startswith(OF_THE_MACHINE)}
  listed = changed | {f'{part}.type' for part in parts}
  stated = {name: value for name, value in every.items() if name in listed}
  automatic = {setting.name for setting in described
               if getattr(setting.default, 'value', setting.default) == 'auto'}  # an enum has `.value`
  return Settings(every, stated, automatic)


def _short_digest(name: str, value: Any) -> str:
  """Returns the first `NUM_SHORT_DIGITS` digits of the digest of a setting and its value."""
  return checkpoint_files.sha256({name: value})[:NUM_SHORT_DIGITS]
