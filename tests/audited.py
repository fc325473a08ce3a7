"""The program, noting the files it opens: one `r PATH` or `w PATH` a line, in `$AUDIT/<number of the process>`."""
from __future__ import annotations

import os
import sys

from vit_jax import main

_out = open(os.path.join(os.environ['AUDIT'], os.environ['VIT_JAX_PROCESS_ID']), 'w', buffering=1)


def _note(event: str, args: tuple[object, ...]) -> None:
  if event == 'open' and isinstance(args[0], str | os.PathLike):
    _out.write(f'{"w" if int(str(args[2])) & (os.O_WRONLY | os.O_RDWR) else "r"} {os.fspath(args[0])}\n')


if __name__ == '__main__':
  sys.addaudithook(_note)
  sys.exit(main.run())
