"""The settings of a run as its record states them: those that differ from their defaults, and digests of all.

`recording` writes them. `job` compares them twice: before a command runs with the settings that its command line gives,
and after it with those of the run. Names such as `{photos}` stand in place of paths, so that data may be elsewhere.
"""
from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vit_jax.config import describe, json_files, layout, schema
from vit_jax.record import checkpoint_files
from vit_jax.replay import inputs

OF_THE_MACHINE = ('mesh.', *layout.AUTO, 'train.progress', 'data.workers', 'data.threads', 'trackers.')
"""Beginnings of the names of settings that follow from the machine, or that no result depends on."""
SHORT = 6
"""Hexadecimal digits of the digest of one setting: one of 56,000 pairs of 300 settings has the same."""


class Settings(NamedTuple):
  """The settings of a config that a result depends on, by dotted name, with values as in JSON.

  every: all of them.
  stated: those that a record states, which differ from their defaults, and the kinds of parts, such as `model.type`.
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
    """The short digests of all settings with their values, with spaces."""
    return ' '.join(sorted(_short_digest(*item) for item in self.every.items()))

  def newer(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the automatic settings with a value that a record from before there were such settings does not state."""
    return {name: value for name, value in self.stated.items() if name in self.automatic and name not in recorded}

  def differences(self, recorded: Mapping[str, Any], *, ignored: Collection[str] = ()) -> list[str]:
    """Returns a line for each setting that differs from those of a record, except for `newer` and `ignored` ones."""
    lines = []
    for name in sorted((recorded.keys() | self.stated.keys()) - {*ignored, *self.newer(recorded)}):
      if name not in recorded or name not in self.every or recorded[name] != self.every[name]:
        before = json.dumps(recorded[name]) if name in recorded else 'default'
        now = json.dumps(self.every[name]) if name in self.every else 'none'
        lines.append(f'{name}: {before} -> {now}' + ' (the default)' * (name in self.every and name not in self.stated))
    return lines

  def explain_digest(self, recorded: str) -> str:
    """Returns which settings are the reason that `digest` is not that of a record.

    Args:
      recorded: `setting_digests` of the record; '' = the record is from before there were any.
    """
    if not recorded:
      return ('This version has other settings than the one that made the record: new ones, or other defaults of '
              'those that the record does not name. A record of this age does not say which; those that it names are '
              'compared.')
    known = set(recorded.split())
    changed = [name for name, value in self.every.items() if _short_digest(name, value) not in known]
    gone = len(known) - (len(self.every) - len(changed))
    return '\n'.join(['This version has other settings than the one that made the record:',
                      *(f'  {name}: {json.dumps(self.every[name])}' for name in changed),
                      *[f'  {gone} that the record has, and this version has not or with another value'] * (gone > 0)])


def of(config: schema.Config, paths: Mapping[str, str]) -> Settings:
  """Returns the settings of a config, in which names replace the paths of data and weights."""
  described = describe.settings(config)
  changed = {one.name for one in described if one.value != one.default}
  kinds = {'model', 'objective', 'optimizer', *(f'evals.{name}' for name in config.evals)} | changed
  every = {name: inputs.named(value, paths) if isinstance(value, str) else value
           for name, value in json_files.flat(json_files.to_plain(config)).items()
           if not name.startswith(OF_THE_MACHINE)}
  stated = {name: value for name, value in every.items()
            if name in changed or name.endswith('.type') and name.removesuffix('.type') in kinds}
  return Settings(every, stated, {one.name for one in described
                                  if getattr(one.default, 'value', one.default) == 'auto'})


def _short_digest(name: str, value: Any) -> str:
  return checkpoint_files.sha256({name: value})[:SHORT]
