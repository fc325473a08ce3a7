"""The Python API: `vit_jax.load`."""
from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from typing import Any

import jax
import loaded
import pytest
import sentences

import vit_jax
from vit_jax import api
from vit_jax.core.errors import UserError
from vit_jax.weights import loading
from vit_jax.weights.network import Weights


def test_class_names_may_come_from_a_file_or_a_list(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights('vit')._replace(class_names=()))
  count = loaded.weights('vit').num_classes
  names = [f'n{i:08d} sort {i}' for i in range(count)]
  (tmp_path / 'words.txt').write_text('\n'.join(names))
  for classes in (names, tmp_path / 'words.txt', str(tmp_path / 'words.txt')):
    model = vit_jax.load('x', classes=classes)
    assert model.class_names == tuple(names) and model.find_class('sort 1') == 1
  assert f'2 blocks, {count} classes' in repr(model)
  with pytest.raises(UserError, match=f'classes.*: expected {count} names, one per output of the weights, got 1'):
    vit_jax.load('x', classes=['a'])


def test_load_does_not_let_jax_look_for_a_missing_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights('vit'))
  monkeypatch.setattr(api.hardware, 'platforms', lambda: 'cpu')
  before = jax.config.jax_platforms
  try:
    jax.config.update('jax_platforms', None)
    vit_jax.load('x')
    assert jax.config.jax_platforms == 'cpu'
    jax.config.update('jax_platforms', 'cuda,cpu')
    vit_jax.load('x')
    assert jax.config.jax_platforms == 'cuda,cpu'  # as the person set it
  finally:
    jax.config.update('jax_platforms', before)


def test_load_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
  asked = []

  def load(where: str, **given: Any) -> Weights:
    asked.append((where, given))
    return loaded.weights('vit')
  monkeypatch.setattr(loading, 'load', load)
  model = vit_jax.load(pathlib.Path('a.npz'), preprocess='half')
  assert isinstance(model, vit_jax.Model) and asked == [('a.npz', {
      'preprocess': 'half', 'model': '', 'view': '', 'allow_download': False, 'allow_nonfinite': False})]


def test_an_unknown_attribute_of_the_package_lists_the_known_ones() -> None:
  with pytest.raises(AttributeError, match="no attribute 'loda'; it has Guess, Model, UserError, list_configs"):
    vit_jax.loda  # type: ignore[attr-defined]  # noqa: B018
  assert 'load' in dir(vit_jax)


def test_the_public_names_are_those_of_the_documentation() -> None:
  page = (pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'reference' / 'public.md').read_text()
  assert sorted(re.findall(r'(?m)^\| `vit_jax\.(\w+)` \|', page)) == sorted(vit_jax.__all__)
  assert dir(vit_jax) == sorted([*vit_jax.__all__, '__version__'])
  of_configs = re.findall(r'(?m)^\| `(vit_jax\.[\w.]+)\.(\w+)` \|', page)
  assert len(of_configs) == 4
  for owner, name in of_configs:
    assert hasattr(importlib.import_module(owner), name) or importlib.import_module(f'{owner}.{name}')


def test_public_names_are_described_in_sentences() -> None:
  objects = {name: getattr(vit_jax, name) for name in vit_jax.__all__}
  for owner in [one for one in objects.values() if inspect.isclass(one)]:
    objects |= {f'{owner.__name__}.{name}': one for name, one in vars(owner).items()
                if inspect.isfunction(one) and not name.startswith('_')}
  assert len(objects) > 15
  for name, one in objects.items():
    first = inspect.cleandoc(one.__doc__ or '').split('\n\n')[0]
    assert sentences.begins_with_verb(first) and first.endswith('.'), f'{name}: {first!r}'


def test_weights_that_do_not_exist_are_an_error_of_both_kinds(tmp_path: pathlib.Path) -> None:
  for kind in (FileNotFoundError, UserError):
    with pytest.raises(kind, match=r'none\.npz: expected weights as a path, .* got a path where there is no file'):
      vit_jax.load(tmp_path / 'none.npz')
