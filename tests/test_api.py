"""The Python API: `vit_jax.load`."""
from __future__ import annotations

import pathlib
from typing import Any

import jax
import loaded
import pytest

import vit_jax
from vit_jax import api
from vit_jax.core.errors import UserError
from vit_jax.weights import loading


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

  def load(where: str, **given: Any) -> loading.Weights:
    asked.append((where, given))
    return loaded.weights('vit')
  monkeypatch.setattr(loading, 'load', load)
  model = vit_jax.load(pathlib.Path('a.npz'), preprocess='half')
  assert isinstance(model, vit_jax.Model) and asked == [('a.npz', {
      'preprocess': 'half', 'model': '', 'view': '', 'allow_download': False, 'allow_nonfinite': False})]


def test_an_unknown_attribute_of_the_package_lists_the_known_ones() -> None:
  with pytest.raises(AttributeError, match="no attribute 'loda'; it has load, Model, list_models, list_weights"):
    vit_jax.loda  # type: ignore[attr-defined]  # noqa: B018
  assert 'load' in dir(vit_jax)


def test_weights_that_do_not_exist_are_an_error_of_both_kinds(tmp_path: pathlib.Path) -> None:
  for kind in (FileNotFoundError, UserError):
    with pytest.raises(kind, match=r'none\.npz: expected weights as a path, .* got a path where there is no file'):
      vit_jax.load(tmp_path / 'none.npz')
