"""The settings of a run in a record: those that differ from their defaults, and digests of all settings.

`recording` writes them (`of`). `job` compares them twice: with the settings that the command line gives, before the
command runs, and with those of the run after it. Names such as `{photos}` replace paths, so data may be anywhere.
"""
from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vit_jax.config import describe, json_files, layout, schema
from vit_jax.record import checkpoint_files
from vit_jax.replay import inputs

OF_THE_MACHINE = ('mesh.', *layout.AUTO, 'train.progress', 'data.workers', 'data.threads', 'trackers.')
"""Beginnings of the names of settings that follow from the machine, or that no result depends on: they are left out."""
SHORT = 6
"""Hexadecimal digits of the digest of one setting. Of 300 settings, 1 change in 56,000 is not seen."""


class Settings(NamedTuple):
  """The settings of a config that a result depends on, by dotted name, with values as in JSON.

  every: all of them.
  stated: those that a record lists: they differ from their defaults, or are the kinds of parts, such as `model.type`.
  automatic: names of the settings with the default `auto`, which a run replaces by a value.
  """
  every: dict[str, Any]
  stated: dict[str, Any]
  automatic: set[str]

  @property
  def digest(self) -> str:
    """The SHA-256 of all settings."""
    return checkpoint_files.sha256(self.every)

  @property
  def digests(self) -> str:
    """The short digest of each setting with its value, sorted and joined by spaces."""
    return ' '.join(sorted(_short_digest(*item) for item in self.every.items()))

  def newer(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the automatic settings that are not in a record, as it was made before there were such settings."""
    return {name: value for name, value in self.stated.items() if name in self.automatic and name not in recorded}

  def differences(self, recorded: Mapping[str, Any], *, ignored: Collection[str] = ()) -> list[str]:
    """Returns a line for each setting that differs from those of a record, except for `newer` and `ignored` ones."""
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
    """Returns which settings differ if `digest` is not that of a record, whose `setting_digests` is `recorded`.

    The settings of the record are known only by their digests; '' = a record that was made before there were any.
    """
    if not recorded:
      return ('This version has other settings than the one that made the record: new ones, or other defaults of '
              'those that the record does not name. A record of this age does not say which; those that it names are '
              'compared.')
    known = set(recorded.split())
    changed = [name for name, value in self.every.items() if _short_digest(name, value) not in known]
    num_gone = len(known) - (len(self.every) - len(changed))
    lines = ['This version has other settings than the one that made the record:',
             *(f'  {name}: {json.dumps(self.every[name])}' for name in changed)]
    if num_gone > 0:
      lines.append(f'  {num_gone} that the record has, and this version has not or with another value')
    return '\n'.join(lines)


def of(config: schema.Config, paths: Mapping[str, str]) -> Settings:
  """Returns the settings of a config, in which names replace the paths of data and weights."""
  described = describe.settings(config)
  changed = {setting.name for setting in described if setting.value != setting.default}
  parts = {'model', 'objective', 'optimizer', *(f'evals.{name}' for name in config.evals)} | changed
  every = {name: inputs.named(value, paths) if isinstance(value, str) else value
           for name, value in json_files.flat(json_files.to_plain(config)).items()
           if not name.startswith(OF_THE_MACHINE)}
  stated = {name: value for name, value in every.items()
            if name in changed or name.endswith('.type') and name.removesuffix('.type') in parts}
  automatic = {setting.name for setting in described
               if getattr(setting.default, 'value', setting.default) == 'auto'}  # `.value` of an enum
  return Settings(every, stated, automatic)


def _short_digest(name: str, value: Any) -> str:
  """Returns the beginning of the digest of a setting and its value."""
  return checkpoint_files.sha256({name: value})[:SHORT]
