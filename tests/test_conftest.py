"""What the suite says about itself at its end."""
from __future__ import annotations

import types

import pytest


class Terminal:
  """Keeps what is written."""

  def __init__(self, **stats: list[types.SimpleNamespace]) -> None:
    self.stats, self.lines = stats, list[str]()

  def section(self, title: str) -> None:
    self.lines.append(title)

  def line(self, text: str) -> None:
    self.lines.append(text)


def skipped(test: str, reason: str) -> types.SimpleNamespace:
  return types.SimpleNamespace(nodeid=test, longrepr=('a.py', 1, f'Skipped: {reason}'))


def test_each_reason_to_skip_is_a_line_with_the_number_of_tests_and_their_files(request: pytest.FixtureRequest) -> None:
  own, = (one for one in request.config.pluginmanager.get_plugins()
          if getattr(one, '__file__', '') == str(request.config.rootpath / 'tests' / 'conftest.py'))
  terminal = Terminal(passed=[], skipped=[skipped('tests/b.py::x', 'no GPU'), skipped('tests/a.py::x[1]', 'no data'),
                                          skipped('tests/a.py::y', 'no GPU'), skipped('tests/a.py::z', 'no GPU')])
  own.pytest_terminal_summary(terminal)
  assert terminal.lines == ['skipped tests, by reason', '   3  no GPU  (a.py, b.py)', '   1  no data  (a.py)']
  nothing = Terminal(passed=[])
  own.pytest_terminal_summary(nothing)
  assert not nothing.lines
