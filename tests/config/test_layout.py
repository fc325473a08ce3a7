"""Placements of a config on known hardware."""
from __future__ import annotations

import pytest

from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

KNOWN = {'v3:2x2': layout.Placement(fsdp=8, remat=s.Remat.FULL, execution=s.Execution.UNROLLED, accumulate=4)}


def test_a_placement_sets_mesh_recomputation_and_execution_in_bf16() -> None:
  before = s.Config(name='a', seed=5)
  after = layout.place(before, 'v3-8', KNOWN)
  assert after.mesh == s.Mesh(-1, 8, 1) and after.train.accumulate == 4 and after.seed == 5
  assert (after.model.remat, after.model.execution, after.model.dtype) == (
      s.Remat.FULL, s.Execution.UNROLLED, s.DType.BF16)
  assert before == s.Config(name='a', seed=5)


def test_no_mesh_leaves_the_config_as_it_is() -> None:
  config = s.Config()
  assert layout.place(config, '', KNOWN) is config


@pytest.mark.parametrize('mesh', ['gpu:8', 'A100:8', 'h100:8', 'h200:8'])
def test_one_placement_serves_all_kinds_of_gpu(mesh: str) -> None:
  known = {'gpu:8': layout.Placement(fsdp=8, accumulate=2)}
  after = layout.place(s.Config(name='mine'), mesh, known)
  assert (after.mesh.fsdp, after.train.accumulate) == (8, 2)
  with pytest.raises(UserError, match='mesh=h100:4: mine has no placement of that name; known: gpu:8'):
    layout.place(s.Config(name='mine'), 'h100:4', known)


def test_an_unknown_mesh_lists_the_known_ones() -> None:
  with pytest.raises(UserError, match=r'mesh=v9: mine has no placement of that name; known: v3:2x2\..*--search'):
    layout.place(s.Config(name='mine'), 'v9', KNOWN)


KINDS = {'size': ('B/16', 'S/16'), 'aug': ('none', 'light1'), 'mesh': ('',)}


@pytest.mark.parametrize(('text', 'want'), [
    ('', {'size': 'B/16', 'aug': 'none', 'mesh': ''}),
    ('light1,S/16', {'size': 'S/16', 'aug': 'light1', 'mesh': ''}),
    (' mesh=v3:16x16 , aug=light1,', {'size': 'B/16', 'aug': 'light1', 'mesh': 'v3:16x16'})])
def test_config_arguments_are_words_or_pairs_in_any_order(text: str, want: dict[str, str]) -> None:
  assert s.parse_arg(text, **KINDS) == want


@pytest.mark.parametrize(('text', 'said'), [
    ('S/17,v3', ["'S/17' is not known", "'v3' is not known", 'size=B/16 | S/16', 'mesh=...']),
    ('size=M/16', ["'size=M/16' is not known"]), ('B/16,S/16', ['size is given twice: B/16 and S/16'])])
def test_config_arguments_that_are_wrong_are_all_listed_with_the_known_ones(text: str, said: list[str]) -> None:
  with pytest.raises(UserError) as error:
    s.parse_arg(text, **KINDS)
  assert all(part in str(error.value) for part in said), error.value
