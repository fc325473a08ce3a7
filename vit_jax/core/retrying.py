"""Repeats operations that failed for a temporary reason: reads and writes of files on storage that others share."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from vit_jax.core import os_errors
from vit_jax.core.errors import TemporaryError

PATIENCE_S = 300.
"""Seconds after the first failure during which an operation is repeated."""
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.
log = logging.getLogger('vit_jax.storage')
_Result = TypeVar('_Result')


def retried(operation: Callable[[], _Result], what: str, *, patience_s: float | None = None) -> _Result:
  """Returns the result of `operation`, which is repeated after temporary errors, with waits that double.

  Args:
    operation: reads or writes; repeating it has the same effect as doing it once.
    what: the operation, for messages, such as `reading gs://BUCKET/x`.
    patience_s: seconds after the first failure during which it is repeated; None = `PATIENCE_S`.

  Raises:
    TemporaryError: it still failed for a temporary reason.
  """
  started, wait_s, patience = time.monotonic(), FIRST_WAIT_S, PATIENCE_S if patience_s is None else patience_s
  while True:
    try:
      return operation()
    except Exception as error:
      if isinstance(error, TemporaryError) or os_errors.is_lost_peer(error) or not os_errors.is_temporary(error):
        raise
      reason, left_s = os_errors.first_line(error), patience - (time.monotonic() - started)
      if left_s <= 0:
        raise TemporaryError(f'{what}: expected success within {patience:.0f} s, got {reason}. Check the storage and '
                             'the network, then run the same command again, which resumes.') from error
    log.warning('%s failed and is tried again in %.1f s: %s', what, min(wait_s, left_s), reason)
    time.sleep(min(wait_s, left_s))
    wait_s = min(2 * wait_s, MOST_WAIT_S)
