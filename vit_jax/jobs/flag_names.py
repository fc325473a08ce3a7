"""Messages about settings that a person gave as flags of a job name the flags."""
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from vit_jax.core.errors import UserError


@contextlib.contextmanager
def shown(flags: Mapping[str, str]) -> Iterator[None]:
  """Replaces settings by flags in the message of a `UserError`: `data.label_column`, and `--config.` before it.

  Args:
    flags: the flag of each setting, such as `--label_column`.
  """
  try:
    yield
  except UserError as error:
    names = '|'.join(map(re.escape, sorted(flags, key=len, reverse=True)))
    text = re.sub(rf'(?<![\w./-])(?:--)?(?:config\.)?({names})(?!\w|[.]\w)', lambda match: flags[match[1]], str(error))
    raise type(error)(text) from error
