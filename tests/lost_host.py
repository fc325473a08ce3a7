"""The program, with a folder for temporary files of its own for each process, as hosts have: `LOCAL=DIR`."""
from __future__ import annotations

import os
import sys
import tempfile

if __name__ == '__main__':
  tempfile.tempdir = os.path.join(os.environ['LOCAL'], os.environ.get('VIT_JAX_PROCESS_ID', '0'))
  os.makedirs(tempfile.tempdir, exist_ok=True)
  from vit_jax import main
  sys.exit(main.run())
