"""The program with the stand-in for a bucket and short waits: `python tests/contested.py --job=train …`."""
from __future__ import annotations

import sys

import buckets

if __name__ == '__main__':
  buckets.install()
  from vit_jax import main
  from vit_jax.core import failures
  from vit_jax.record import growing
  failures.FIRST_WAIT_S = .2
  growing.Mirror.__init__.__kwdefaults__['every_s'] = .5  # also lines that are then lost reach the bucket
  sys.exit(main.run())
