"""Start-up of every job that computes: platform, compilation cache, logging."""
from __future__ import annotations

import logging
import os
import pathlib

import jax


def start() -> None:
  """Sets up jax and logging for this process. Touches no device."""
  root = logging.getLogger()
  root.handlers = [h for h in root.handlers if not type(h).__module__.startswith('absl')]  # set by an import
  logging.basicConfig(format='%(message)s', level=logging.WARNING)
  logging.getLogger('vit_jax').setLevel(logging.INFO)
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)  # Orbax drops tasks whose error it has raised already
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  if cache is None:
    base = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')
    jax.config.update('jax_compilation_cache_dir', str(base / 'vit_jax' / 'xla'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
