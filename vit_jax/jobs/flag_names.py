"""Rewrites messages so that they name the flag of a job, `--data`, in place of the setting behind it, `data.source`.

A person who set `--data=photos` has not seen the name of the setting, and would not find it in the help of the job.
Jobs whose flags stand for settings (`prepare`, `embed`, `finetune`, `pretrain`, `export`) open their data inside.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from vit_jax.core.errors import UserError

_START = r'(?<![\w./-])'
"""Not after a character of a longer name or path: `/photos/data.source` stays."""
_END = r'(?!\w|[.]\w)'
"""Not before one: `data.source_px` and `data.source.txt` stay, but a period ends a sentence: `Set data.source.`"""


@contextlib.contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
  """Replaces settings by flags in the message of a `UserError` that is raised inside.

  `data.label_column`, `config.data.label_column` and `--config.data.label_column` all become `--label_column`.

  Args:
    flags: the flag of each setting, such as `--label_column`; of at least one setting.
  """
  try:
    yield
  except UserError as error:
    settings = '|'.join(re.escape(name) for name in sorted(flags, key=len, reverse=True))  # the longest that fits
    pattern = rf'{_START}(?:--)?(?:config[.])?({settings}){_END}'
    raise type(error)(re.sub(pattern, lambda found: flags[found[1]], str(error))) from error
