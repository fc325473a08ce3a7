"""Docstrings of functions are whole sentences in the third person."""
from __future__ import annotations

import ast
import pathlib

import pytest
import sentences

LIMITS = {'models': 131, 'weights': 16}
"""Functions of a package whose docstrings begin otherwise; 0 for others. Lower a limit with what you rewrite."""


@pytest.mark.parametrize('name', sorted(path.parent.name for path in sentences.PACKAGE.glob('*/__init__.py')))
def test_docstrings_of_public_functions_begin_with_a_verb(name: str) -> None:
  found = list(sentences.fragments(sentences.PACKAGE / name))
  assert len(found) <= LIMITS.get(name, 0), (
      'expected docstrings such as "Returns the mean over valid examples."; add a missing verb to sentences.VERBS:\n'
      + '\n'.join(found))


def test_a_fragment_is_found_and_properties_are_nouns(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  functions = {'good': 'Returns it.', 'bad': 'The mean.', '_own': 'The mean.', 'number': 'The number.'}
  text = ''.join(f'@property\ndef {name}(): "{said}"\n' if name == 'number' else f'def {name}(): "{said}"\n'
                 for name, said in functions.items())
  assert ast.parse(text)
  (tmp_path / 'a.py').write_text(text)
  monkeypatch.setattr(sentences, 'PACKAGE', tmp_path)
  assert list(sentences.fragments(tmp_path)) == [f'{tmp_path.name}/a.py:2 bad: The mean.']
