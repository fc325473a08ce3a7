"""Short texts that the processes of a run show each other, without waiting for each other.

They are kept by jax's coordination service, which every process is connected to. In a synchronous step no process can
be far ahead: when one has the metrics of step t + `LAG`, all have launched that step, so they have had the metrics of
step t. What every process puts there after step t is therefore complete for all of them after step t + `LAG`.
"""
from __future__ import annotations

import logging
from typing import Any

import jax

LAG = 2
"""Steps after which the texts that all processes put on the board are there."""
ROOT = 'vit_jax/'
log = logging.getLogger('vit_jax.parallel')


class Board:
  """Texts by name, for a process that is alone; names of a folder begin with `FOLDER/`."""

  def __init__(self) -> None:
    self._texts: dict[str, str] = {}

  def put(self, name: str, text: str) -> None:
    """Adds or replaces a text."""
    self._texts[name] = text

  def get(self, name: str) -> str:
    """Returns a text; '' if there is none."""
    return self._texts.get(name, '')

  def all(self, folder: str) -> dict[str, str]:
    """Returns the texts of a folder by their names in it."""
    return {name[len(folder) + 1:]: text for name, text in self._texts.items() if name.startswith(f'{folder}/')}

  def remove(self, folder: str) -> None:
    """Removes the texts of a folder."""
    for name in self.all(folder):
      del self._texts[f'{folder}/{name}']


class Shared(Board):
  """The board of several processes. A call that fails has no effect: no run depends on these texts."""

  def __init__(self, client: Any) -> None:
    super().__init__()
    self._client = client

  def put(self, name: str, text: str) -> None:
    self._tried(lambda: self._client.key_value_set(ROOT + name, text, allow_overwrite=True), None)

  def get(self, name: str) -> str:
    return self._tried(lambda: self._client.key_value_try_get(ROOT + name), '')

  def all(self, folder: str) -> dict[str, str]:
    found = self._tried(lambda: self._client.key_value_dir_get(f'{ROOT}{folder}/'), [])
    return {name.removeprefix(f'{ROOT}{folder}/'): text for name, text in found}

  def remove(self, folder: str) -> None:
    self._tried(lambda: self._client.key_value_delete(f'{ROOT}{folder}/'), None)

  def _tried(self, call: Any, otherwise: Any) -> Any:
    try:
      return call()
    except Exception as error:  # jax has no type of its own for a key that is missing, nor for a lost connection
      if 'NOT_FOUND' not in str(error):
        log.debug('The coordination service did not answer: %s', error)
      return otherwise


def find() -> Board:
  """Returns the board of this run."""
  if jax.process_count() == 1:
    return Board()
  from jax._src import distributed  # jax has no public access to the service that it runs
  return Shared(distributed.global_state.client)
