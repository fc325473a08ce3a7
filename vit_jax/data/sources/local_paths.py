"""Paths of data, which lie on this machine: an address such as `gs://…` is refused by name, not made a folder here."""
from __future__ import annotations

import os

from vit_jax.core.errors import UserError


def resolve(where: str | os.PathLike[str], said: str) -> str:
  """The path from the root; `~` and the current folder are filled in.

  Args:
    where: the path as it was given.
    said: the setting or flag that gives it.

  Raises:
    UserError: it is an address.
  """
  text = os.fspath(where)
  if '://' in text:
    raise UserError(f'{said}: expected a folder of this machine, got the address {text}. Copy it (gcloud storage cp '
                    '-r), or mount it (gcsfuse)')
  return os.path.abspath(os.path.expanduser(text))
