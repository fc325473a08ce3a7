"""Batches that a thread makes one ahead of their consumer."""
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from vit_jax.parallel import feed


def test_values_come_in_order_and_one_is_made_ahead() -> None:
  made: list[int] = []
  second = threading.Event()

  def place(item: int) -> int:
    assert threading.current_thread() is not threading.main_thread()
    made.append(item)
    if item == 1:
      second.set()
    return 10 * item

  with feed.Ahead(iter(range(4)), place) as ahead:
    assert next(ahead) == 0
    assert second.wait(10) and next(ahead) == 10
    assert list(ahead) == [20, 30] and list(ahead) == []
  assert made == [0, 1, 2, 3]


def test_no_more_than_one_value_is_made_ahead() -> None:
  made: list[int] = []
  with feed.Ahead(iter(range(9)), made.append) as ahead:
    next(ahead)
  assert made == [0, 1]  # closing waits for the thread


def test_an_error_is_raised_after_the_values_before_it_and_again() -> None:
  def items() -> Iterator[int]:
    yield 1
    raise ValueError('broken')

  ahead = feed.Ahead(items(), lambda item: item)
  assert next(ahead) == 1
  for _ in range(2):
    with pytest.raises(ValueError, match='broken'):
      next(ahead)
  ahead.close()


def test_closing_ends_the_thread_and_the_items() -> None:
  closed = threading.Event()

  def items() -> Iterator[int]:
    try:
      while True:
        yield 1
    finally:
      closed.set()

  before = threading.active_count()
  ahead = feed.Ahead(items(), lambda item: item)
  assert next(ahead) == 1 and threading.active_count() == before + 1
  ahead.close()
  assert closed.is_set() and threading.active_count() == before
  with pytest.raises(StopIteration):
    next(ahead)
