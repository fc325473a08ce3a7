"""Rewrites error messages, so that they name the flag that a person has set, and not the setting behind the flag.

The jobs `prepare`, `embed`, `finetune`, `pretrain` and `export` set `data.source` from the flag `--data`. A person who
sets `--data=photos` does not find `data.source` in the help. So these jobs open their data inside `naming_flags`.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from vit_jax.core.errors import UserError

_START = r'(?<![\w./-])'
"""Matches where no longer name or path goes before: `data.source` in `/photos/data.source` is no setting."""
_END = r'(?!\w|[.]\w)'
"""Matches where no longer name goes on, such as `data.source_px` or `data.source.txt`. A period may follow."""


@contextlib.contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
  """Replaces settings by flags in the message of a `UserError` that the block of this `with` statement raises.

  `data.label_column`, `config.data.label_column` and `--config.data.label_column` all become `--label_column`.

  Args:
    flags: the flag, such as `--label_column`, by the name of the setting; at least one.
  """
  try:
    yield
  except UserError as error:
    settings = '|'.join(re.escape(name) for name in sorted(flags, key=len, reverse=True))  # longer names match first
    pattern = rf'{_START}(?:--)?(?:config[.])?({settings}){_END}'
    raise type(error)(re.sub(pattern, lambda match: flags[match[1]], str(error))) from error
