"""The list of configs."""
from __future__ import annotations

import pytest

import vit_jax
from vit_jax.config import files


def test_configs_are_listed_with_their_arguments() -> None:
  found = {one.name: one for one in vit_jax.list_configs()}
  assert [*found] == files.list_names() and all(one.about and one.path.is_file() for one in found.values())
  assert found['finetune'].arguments[:2] == ('model', 'dataset') and found['digits'].arguments == ()


def test_a_pattern_chooses_configs() -> None:
  assert {one.name for one in vit_jax.list_configs('mae*i1k')} == {'mae_i1k', 'mae_scratch_i1k'}


def test_an_empty_list_of_configs_is_explained_by_a_warning() -> None:
  with pytest.warns(UserWarning, match="list_configs: .* got 'digts'. Did you mean digits"):
    assert vit_jax.list_configs('digts') == []
