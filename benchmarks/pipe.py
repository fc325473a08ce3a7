"""A program of its own that answers requests over a pipe, a line of JSON each."""
from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.core.errors import UserError


class JsonProcess:
  """A process that writes a line of JSON when it is ready, `ready`, and one for each request.

  An answer with the key `error` is an error of the user, as is a process that ends.

  Args:
    command: the program and its arguments.
    name: what messages begin with, such as the flag that asked for the process.
    expected: what an error says was expected.
    environ: its environment; None = that of this process.
  """

  def __init__(self, command: Sequence[str], *, name: str, expected: str,
               environ: Mapping[str, str] | None = None) -> None:
    self._name, self._expected = name, expected
    self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
      self.ready = self._answer()
    except UserError:
      self.close()
      raise

  def ask(self, request: Any) -> dict[str, Any]:
    """Sends a request and returns the answer.

    Raises:
      UserError: the process reports an error, or has ended.
    """
    assert self._process.stdin
    self._process.stdin.write(json.dumps(request) + '\n')
    self._process.stdin.flush()
    return self._answer()

  def _answer(self) -> dict[str, Any]:
    assert self._process.stdout
    line = self._process.stdout.readline()
    if not line:
      raise UserError(f'{self._name}: expected an answer of its process, got exit status {self._process.wait()}. Its '
                      'own message is above.')
    answer: dict[str, Any] = json.loads(line)
    if 'error' in answer:
      raise UserError(f'{self._name}: expected {self._expected}, got {answer["error"]}')
    return answer

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      if pipe:
        pipe.close()
