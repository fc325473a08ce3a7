"""Repeats operations that failed for a temporary reason: reads and writes of files on storage that others share."""
from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from vit_jax.core import os_errors
from vit_jax.core.errors import TemporaryError

PATIENCE_S = 300.
"""Seconds after the first failure during which an operation is repeated, unless `configure` sets another time."""
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.
log = logging.getLogger('vit_jax.storage')
_Result = TypeVar('_Result')
_patience_s: float | None = None


def configure(patience_s: float | None) -> None:
  """Sets how long this process repeats operations (`train.retry`); loader processes get the value of their parent."""
  global _patience_s
  _patience_s = patience_s


def patience() -> float:
  """Returns for how many seconds after its first failure an operation is repeated in this process; 0 = not at all."""
  return PATIENCE_S if _patience_s is None else _patience_s


def retried(operation: Callable[[], _Result], what: str | Callable[[], str], *,
            patience_s: float | None = None,
            choose: Callable[[BaseException], bool] | None = None) -> _Result:
  """Returns the result of `operation`, which is repeated after temporary errors, with waits that double.

  A server that asks for a longer wait (`Retry-After`) gets it, within the patience. A `TemporaryError` is not repeated,
  since it says that this was done.

  Args:
    operation: reads or writes; repeating it has the same effect as doing it once.
    what: the operation, for messages, such as `reading gs://BUCKET/x`, or a function that returns it.
    patience_s: seconds after the first failure during which it is repeated; None = `patience()`.
    choose: returns whether to repeat after an error; None = `is_worth`.

  Raises:
    TemporaryError: it still failed for a temporary reason. With a patience of 0, errors are those of the operation.
  """
  choose = choose or is_worth
  started_s: float | None = None
  wait_s = FIRST_WAIT_S
  limit_s = patience() if patience_s is None else patience_s
  if limit_s <= 0:
    return operation()
  while True:
    try:
      return operation()
    except Exception as error:
      if not choose(error):
        raise
      now_s, name = time.monotonic(), what if isinstance(what, str) else what()
      started_s = now_s if started_s is None else started_s
      reason, left_s = os_errors.first_line(error), limit_s - (now_s - started_s)
      if left_s <= 0:
        raise TemporaryError(f'{name}: expected success within {limit_s:.0f} s, got {reason}. '
                             f'{os_errors.find(error) or "Check the storage and the network."} Then run the same '
                             'command again, which resumes.') from error
      now_wait_s = min(max(wait_s, _asked_s(error)), left_s)
    log.warning('%s failed and is tried again in %.1f s: %s', name, now_wait_s, reason)
    time.sleep(now_wait_s)
    wait_s = min(2 * wait_s, MOST_WAIT_S)


def is_worth(error: BaseException) -> bool:
  """Returns whether this process may repeat an operation that raised this error."""
  return (not isinstance(error, TemporaryError) and not os_errors.is_lost_peer(error)
          and os_errors.is_temporary(error, with_context=True))


def _asked_s(error: BaseException) -> float:
  """Returns the seconds that a server asks to wait in `Retry-After`, a number or a date; 0 without it."""
  for one in os_errors.chain(error, with_context=False):
    headers = getattr(one, 'headers', None) or getattr(getattr(one, 'response', None), 'headers', None)
    text = str(headers.get('Retry-After') or '') if headers is not None and hasattr(headers, 'get') else ''
    if text.isdecimal():
      return float(text)
    if text:
      try:
        return max(0., email.utils.parsedate_to_datetime(text).timestamp() - time.time())
      except ValueError:
        return 0.
  return 0.
