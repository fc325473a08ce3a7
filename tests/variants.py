"""Every variant of a Vision Transformer, read from the types of its settings, with a tiny network of each.

`names()` has each kind of each part, such as `block=axial`, and each other value of each setting of each part, such as
`block=axial layer_scale=0.5`. A new kind or setting is in it as soon as it is in the schema. What cannot be read from a
type is in the tables below, and a variant that is not there fails every test, with a message that says what to add.
"""
from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from vit_jax.config import check, engine, schema
from vit_jax.config.schema import checks

PX, GRID = (32, 48), (4, 6)
BASE = schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48))
COMBINED = 'many at once'
"""The network that the default tests ask where each network would take too long."""

Changes = dict[str, Any]
KINDS: dict[type, Changes] = {
    schema.Mlp: {}, schema.SwiGlu: {'mlp': schema.SwiGlu(48)}, schema.Attention: {},
    schema.Plain: {'block': schema.Plain(.5)}, schema.Parallel: {'block': schema.Parallel()},
    schema.Axial: {'block': schema.Axial(.5), 'pool': schema.Mean()},
    schema.Learned: {}, schema.Learned2d: {'positions': schema.Learned2d()},
    schema.SinCos: {'positions': schema.SinCos()}, schema.NoPositions: {'positions': schema.NoPositions()},
    schema.Relative: {'positions': schema.Relative()}, schema.Rotary: {'positions': schema.Rotary(), 'registers': 1},
    schema.LearnedRotary: {'positions': schema.LearnedRotary(), 'registers': 1},
    schema.ByIndex: {}, schema.UnitInterval: {'positions.coordinates': schema.UnitInterval()},
    schema.ClassToken: {}, schema.Mean: {'pool': schema.Mean()}, schema.First: {'pool': schema.First()},
    schema.Map: {'pool': schema.Map(), 'registers': 1},
    schema.PatchStem: {}, schema.ResNetStem: {'stem': schema.ResNetStem((1,), 32)},
    schema.ConvStem: {'stem': schema.ConvStem(8)},
    schema.LayerNorm: {}, schema.RmsNorm: {'norm': schema.RmsNorm()},
}
"""What a tiny network with each kind of part changes in `BASE`."""

VALUES: dict[str, Any] = {
    'ViT.registers': 2, 'Plain.branch_scale': .5, 'Parallel.branch_scale': .5,
    'Rotary.base': 10., 'ByIndex.grid': 5, 'ByIndex.offset': 1., 'Map.heads': 2, 'Map.hidden': 40,
}
"""Another value of each number; switches and choices take all their values."""

NEEDS: dict[str, Changes] = {
    'last_norm=pooled': {'pool': schema.Mean()}, 'block=plain mlp_scale=False': {'block.layer_scale': .5},
    'block=axial mlp_scale=False': {'block.layer_scale': .5}, 'positions=learned at=layers': {'registers': 1},
}
"""What else a variant must change, or had better."""

SKIPPED = {
    'a size': {'ViT.patch', 'ViT.width', 'ViT.depth', 'ViT.heads', 'Mlp.hidden', 'SwiGlu.hidden', 'ResNetStem.layers',
               'ResNetStem.width', 'ConvStem.width'},
    'a number that is used in one place, which the tests of that part have': {
        'LayerNorm.eps', 'RmsNorm.eps', 'ResNetStem.std_eps', 'ResNetStem.var_eps', 'ResNetStem.norm_eps'},
    'how a network is run, not what it computes; questions of their own': {
        'ViT.dtype', 'ViT.kernels', 'ViT.execution', 'ViT.unroll', 'ViT.remat', 'ViT.full_remat', 'Attention.kernel',
        'Mlp.kernel'},
    'of training alone, with random numbers': {
        'ViT.dropout', 'ViT.drop_path', 'ViT.drop_path_even', 'ViT.patch_dropout', 'Attention.dropout',
        'UnitInterval.shift', 'UnitInterval.jitter', 'UnitInterval.rescale'},
    'of images of other sizes; tests/export/test_any_size.py has each': {'Learned.resize', 'LearnedRotary.resize',
                                                                         'Learned2d.resize'},
    'initial values; tests/models/test_initialization.py has each': {'ViT.init', 'Plain.layer_scale'},
}
"""Settings that are not switched, by the reason."""

TOGETHER: dict[str, Changes] = {
    'plain': {},
    COMBINED: {
        'block': schema.Plain(.5), 'mlp': schema.SwiGlu(48, inner_norm=True), 'norm': schema.RmsNorm(),
        'attention': schema.Attention(schema.QkvBias.QUERY_VALUE, qk_norm=True, inner_norm=True), 'norm_before': True,
        'positions': schema.LearnedRotary(10., mixed=True), 'pool': schema.Map(class_token=True, heads=2),
        'registers': 1, 'stem.norm': True},
    'a mean beside a class token, normalized': {
        'pool': schema.Mean(class_token=True), 'last_norm': schema.LastNorm.POOLED},
}
"""Networks with several variants."""


def names() -> list[str]:
  """The networks, by what each has."""
  return [*TOGETHER, *_found()]


def kinds() -> list[str]:
  """Of these the networks that have a kind of part with its usual settings."""
  return [*TOGETHER, *(name for name in _found() if ' ' not in name and _is_kind(name))]


def mostly_slow(reason: str, quick: tuple[str, ...] = (COMBINED,)) -> pytest.MarkDecorator:
  """Asks every network, in the default tests only those named."""
  return pytest.mark.parametrize('name', [
      name if name in quick else pytest.param(name, marks=pytest.mark.slow(reason=reason)) for name in names()])


@functools.cache
def network(name: str) -> schema.ViT:
  """The network of this name; fails where a table above lacks it, or where its settings do not fit together."""
  changes = TOGETHER[name] if name in TOGETHER else _found()[name]
  if isinstance(changes, str):
    pytest.fail(changes)
  settings: schema.ViT = schema.replaced(BASE, changes | NEEDS.get(name, {}))
  if found := check.problems(schema.Config(model=settings, image_px=PX), of='model'):
    pytest.fail(f'tests/variants.py: expected settings that fit together for {name!r}. Add what it needs to NEEDS: '
                f'{" ".join(found)}')
  return settings


def _is_kind(name: str) -> bool:
  field = name.partition('=')[0]
  return dataclasses.is_dataclass(getattr(BASE, field))


@functools.cache
def _found() -> dict[str, Changes | str]:
  """Changes of `BASE` by name; or what to add to the tables. Of equal networks the first."""
  found: dict[str, Changes | str] = {}
  seen = {repr(BASE)}
  for name, changes in _walk(BASE, '', {}):
    text = changes if isinstance(changes, str) else repr(schema.replaced(BASE, changes | NEEDS.get(name, {})))
    if text not in seen:
      found[name] = changes
      seen.add(text)
  return found


def _walk(settings: Any, path: str, base: Changes) -> Iterator[tuple[str, Changes | str]]:
  """Yields the variants of the settings at a path, such as `positions`, of a network with these changes."""
  for field in dataclasses.fields(settings):
    where, label = f'{path}.{field.name}'.lstrip('.'), f'{_label(settings, path)}{field.name}'
    union = list(engine.kinds(field.type).values())
    single = [field.type] if isinstance(field.type, type) and dataclasses.is_dataclass(field.type) else []
    for kind in union or single:
      name = f'{label}={kind.__name__.lower()}'
      if kind not in KINDS:
        yield name, (f'tests/variants.py: expected an example of {kind.__name__}. Add it to KINDS: '
                     f"{{schema.{kind.__name__}: {{'{where}': schema.{kind.__name__}(…)}}}}, and what else a tiny "
                     'network with it needs.')
        continue
      yield name, base | KINDS[kind]
      yield from _walk(_at(base | KINDS[kind], where), where, base | KINDS[kind])
    if not (union or single):
      yield from _switched(settings, field, where, label, base)


def _switched(settings: Any, field: dataclasses.Field[Any], where: str, label: str,
              base: Changes) -> Iterator[tuple[str, Changes | str]]:
  """Yields the other values of one setting."""
  now = getattr(settings, field.name)
  owners = [f'{kind.__name__}.{field.name}' for kind in type(settings).__mro__]
  if any(owner in skipped for owner in owners for skipped in SKIPPED.values()):
    return
  values = ([not now] if isinstance(now, bool) else [one for one in type(now) if one is not now]
            if isinstance(now, enum.Enum) else [VALUES[owner] for owner in owners if owner in VALUES][:1])
  if not values:
    yield f'{label}=…', (f'tests/variants.py: expected another value of {owners[0]}. Add it to VALUES, or the setting '
                         'to SKIPPED with the reason.')
  for value in values:
    yield f'{label}={checks.shown(value)}', base | {where: value}


def _at(changes: Changes, where: str) -> Any:
  found: Any = schema.replaced(BASE, changes)
  for part in where.split('.'):
    found = getattr(found, part)
  return found


def _label(settings: Any, path: str) -> str:
  return f'{path.replace(".", " ")}={checks.kind(settings)} ' if path else ''
