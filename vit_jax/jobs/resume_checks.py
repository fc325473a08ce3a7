"""What has to be the same for a run to continue from a checkpoint."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_jax.config import provenance, schema
from vit_jax.core.errors import UserError
from vit_jax.record import storage


def check_settings(meta: Mapping[str, Any], config: schema.Config, workdir: storage.Path, *, is_done: bool) -> None:
  """Raises UserError if a run would continue as another network, which the shapes of its arrays do not show.

  How images are prepared may change while a run is under way, but not for the checkpoint that it ended with.
  """
  changed = {name: pair for name, pair in provenance.differences(meta, config).items()
             if is_done or not provenance.is_preprocessing(name)}
  if changed:
    raise UserError(f'The run in {workdir} was made with other settings:\n{provenance.text(changed)}\nUse the settings '
                    'it was made with, or another --workdir.')


def check_data(saved: Mapping[str, Any], now: Mapping[str, Any], workdir: storage.Path) -> None:
  """Raises UserError if a run would go on with other data, or in another order, than it began with."""
  changed = [f'  {name}: {saved.get(name)} -> {value}' for name, value in now.items() if saved.get(name) != value]
  if changed:
    raise UserError(f'The run in {workdir} cannot go on with the same data in the same order:\n' + '\n'.join(changed)
                    + '\nWant what it was begun with, or another --workdir.')
