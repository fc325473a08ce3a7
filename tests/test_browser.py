"""The driver of Chromium: what needs no browser."""
from __future__ import annotations

from typing import Any

import browser
import pytest


class Answers(browser.Page):
  """A page whose scripts give these answers, one after the other."""

  def __init__(self, answers: list[Any]) -> None:
    self._answers, self._timeout_s = answers, 60.

  def run(self, script: str) -> Any:
    answer = self._answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer


def test_waiting_goes_on_while_one_page_gives_way_to_the_next() -> None:
  answers = [False, *(browser.ProtocolError(text, text) for text in browser.BETWEEN_PAGES), True, 'not asked']
  Answers(answers).wait('ready')
  assert answers == ['not asked']


def test_another_error_of_the_protocol_ends_waiting() -> None:
  with pytest.raises(AssertionError, match='^Runtime.evaluate: no such method'):
    Answers([browser.ProtocolError('no such method', 'Runtime.evaluate: no such method'), True]).wait('ready')
