"""The same questions to every kind of every part of a config: objectives, optimizers, evaluators, networks.

What the kinds compute is tried by tests of their own; this one finds kinds that cannot be chosen, run or read again.
"""
from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import options
import pytest

from vit_jax.config import describe, engine, schema
from vit_jax.core import implementation
from vit_jax.data import opening

REQUIRED: dict[type, Any] = {}
"""Values of kinds that have settings without a default."""


class Kind(NamedTuple):
  """A kind of a part, the settings that have such a part, and its name there."""
  owner: type
  field: str
  declared: Any
  kind: type


def kinds() -> dict[str, Kind]:
  """Every kind of every part that may be of several, by its place."""
  found = {}
  for owner in options.classes():
    for field in dataclasses.fields(owner):
      declared = field.type
      declared = declared.__args__[-1] if getattr(declared, '__origin__', None) is dict else declared
      for name, kind in engine.kinds(declared).items():
        found[f'{owner.__name__}.{field.name}={name}'] = Kind(owner, field.name, declared, kind)
  return found


KINDS = kinds()


def made(kind: type) -> Any:
  try:
    return REQUIRED.get(kind) or kind()
  except TypeError as error:
    pytest.fail(f'tests/test_every_kind.py: expected settings with defaults, or an example in REQUIRED, got {error}.')


@pytest.mark.parametrize('name', KINDS)
def test_a_kind_is_found_by_its_name_in_texts_and_files(name: str) -> None:
  one = KINDS[name]
  text = name.partition('=')[2]
  if one.kind not in REQUIRED:
    assert engine.by_name(one.declared, text, None) == one.kind()
  assert getattr(schema, one.kind.__name__) is one.kind


@pytest.mark.parametrize('name', [name for name, one in KINDS.items() if one.owner is schema.Config])
def test_a_config_with_this_kind_is_read_again_from_json(name: str) -> None:
  one = KINDS[name]
  value = made(one.kind)
  config = dataclasses.replace(schema.Config(), **{one.field: {'own': value} if one.field == 'evals' else value})
  again = engine.from_json(engine.to_json(config))
  assert again == config and type(again) is schema.Config
  shown = [setting.name for setting in describe.settings(config)]
  path = f'{one.field}.own' if one.field == 'evals' else one.field
  assert not [field.name for field in dataclasses.fields(one.kind)
              if not any(f'{setting}.'.startswith(f'{path}.{field.name}.') for setting in shown)]


@pytest.mark.parametrize('name', KINDS)
def test_the_code_of_a_kind_takes_its_settings(name: str) -> None:
  kind = KINDS[name].kind
  if not any(hasattr(other, 'implementation') for other in engine.kinds(KINDS[name].declared).values()):
    return  # settings of another part, whose code reads them
  code = implementation.load(kind.implementation)
  assert callable(code)
  if KINDS[name].owner is schema.ViT:  # whose parts are made from their fields
    taken = inspect.signature(code).parameters
    assert {field.name for field in dataclasses.fields(kind)} <= taken.keys()


@pytest.mark.parametrize('name', opening.KINDS)
def test_a_source_can_be_opened_by_its_form(name: str) -> None:
  kind = opening.KINDS[name]
  assert kind.syntax.startswith(name)
  assert callable(opening.find_opener(kind.syntax.split(',')[0]))
  parameters = list(inspect.signature(implementation.load(kind.opener)).parameters)
  assert parameters == ['where', 'data', 'image_px'] + ['order'] * (name in opening._SORTING_KINDS)
