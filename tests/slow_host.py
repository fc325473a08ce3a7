"""The program, in which one process takes longer for each image that it reads: `python tests/slow_host.py train …`.

  SLOW_HOST=1 SLOW_S=.03 bash launch/local_processes.sh 2 1 -- python tests/slow_host.py train --config=…
"""
from __future__ import annotations

import os
import sys
import time
from typing import Any

from vit_jax.data import loader


def install(seconds: float) -> None:
  """Makes each image of a training batch take so many seconds more."""
  make = loader.Train.__call__

  def slowly(self: loader.Train, number: int, *allocate: Any) -> dict[str, Any]:
    batch = make(self, number, *allocate)
    time.sleep(seconds * len(batch['index']))
    return batch

  loader.Train.__call__ = slowly  # type: ignore[method-assign]


if __name__ == '__main__':
  from vit_jax import main
  if os.environ.get('VIT_JAX_PROCESS_ID') == os.environ.get('SLOW_HOST'):
    install(float(os.environ['SLOW_S']))
  sys.exit(main.run())
