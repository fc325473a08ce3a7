"""Saves reports of unforeseen errors: command, versions and traceback. `failures.explain` calls it.

Imports only the standard library and `errors`, as what failed may be any other module.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata

import vit_jax
from vit_jax.core.errors import redacted

MOST_FILES = 20
"""Reports that are kept; older ones are deleted."""
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'libtpu')


def report(error: BaseException, words: Sequence[str] = ()) -> str:
  """Returns a report for debugging: command, versions, traceback."""
  return redacted('\n'.join([f'Command: {" ".join(map(repr, words))}', versions(), '',
                             ''.join(traceback.format_exception(error))]))


def versions() -> str:
  """Returns the versions of this program, Python and the main packages, in two lines; imports none of them."""
  installed = []
  for name in _PACKAGES:
    try:
      installed.append(f'{name} {metadata.version(name)}')
    except metadata.PackageNotFoundError:
      continue
  return (f'vit_jax {vit_jax.__version__}, Python {platform.python_version()} on {platform.platform()}\n'
          f'{", ".join(installed)}')


def save(text: str, environ: Mapping[str, str]) -> pathlib.Path | None:
  """Saves a report in the user's state directory or a temporary one, and returns its path; None if both fail."""
  home = environ.get('XDG_STATE_HOME') or os.path.join(os.path.expanduser('~'), '.local', 'state')
  content = text.encode(errors='backslashreplace')
  with contextlib.suppress(OSError):
    path = pathlib.Path(home) / 'vit_jax' / time.strftime(f'failure-%Y%m%d-%H%M%S-{os.getpid()}.txt')
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(content)
    for old in sorted(path.parent.glob('failure-*.txt'))[:-MOST_FILES]:
      old.unlink(missing_ok=True)
    return path
  with contextlib.suppress(OSError):
    handle, name = tempfile.mkstemp('.txt', 'vit_jax-failure-')
    with open(handle, 'wb') as file:
      file.write(content)
    return pathlib.Path(name)
  return None
