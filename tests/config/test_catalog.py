"""The list of configs."""
from __future__ import annotations

import vit_jax
from vit_jax.config import files


def test_configs_are_listed_with_their_arguments() -> None:
  found = {one.name: one for one in vit_jax.list_configs()}
  assert [*found] == files.list_names() and all(one.about and one.path.is_file() for one in found.values())
  assert found['finetune'].arguments[:2] == ('model', 'dataset') and found['digits'].arguments == ()


def test_a_pattern_chooses_configs() -> None:
  assert {one.name for one in vit_jax.list_configs('mae*i1k')} == {'mae_i1k', 'mae_scratch_i1k'}
