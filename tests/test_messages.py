"""Errors that a person reads say what to do, after what was expected and what was found."""
from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import vit_jax

ROOT = pathlib.Path(vit_jax.__file__).parent
VALUE = '\0'
"""Stands for a value in a text, which may be a sentence."""
ADVICE = re.compile(rf"[.…:)'\"`{VALUE}]\s+(?:{VALUE}|[A-Z-][^.]*[.{VALUE}])|{VALUE}$|\n")
"""A second sentence, or a value or a list that ends the message."""


def text_of(node: ast.expr) -> str:
  """Returns the text that an expression builds, with `VALUE` in place of what is not constant."""
  match node:
    case ast.Constant(value=str(value)):
      return value
    case ast.JoinedStr(values=values):
      return ''.join(text_of(one) for one in values)
    case ast.BinOp(left=left, op=ast.Add(), right=right):
      return text_of(left) + text_of(right)
  return VALUE


def messages() -> Iterator[tuple[str, str]]:
  """Yields the place and the text of each message that says what was expected and what was found."""
  for path in sorted(ROOT.rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith('UserError'):
        text = text_of(node.args[0])
        if ': expected ' in text or text.startswith('expected '):
          yield f'{path.relative_to(ROOT.parent)}:{node.lineno}', text


def test_every_error_says_what_to_do() -> None:
  found = list(messages())
  assert len(found) > 500
  without = [f'{place}: {text.replace(VALUE, "{}")}' for place, text in found
             if not ADVICE.search(text, text.index('expected '))]
  assert not without, 'no sentence on what to do in\n' + '\n'.join(without)


def test_a_message_without_advice_is_seen() -> None:
  bare, whole, ended = (text_of(ast.parse(one, mode='eval').body) for one in (
      'f"a: expected {b}, got {c}."', 'f"a: expected {b}, got {c}. Set it."', 'f"a: expected {b}, got {c}. " + advice'))
  assert [bool(ADVICE.search(text, text.index('expected '))) for text in (bare, whole, ended)] == [False, True, True]
