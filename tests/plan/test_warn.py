"""Warnings of plans: shards that are no whole tiles, kernels that are not gathered, and bytes beyond the ideal."""
from __future__ import annotations

from typing import Any

import pytest

from vit_jax.config import files
from vit_jax.parallel import sharding, xla_flags
from vit_jax.plan import compile, compiled, plan, table, topologies, warn

SMALL = ('model.depth=1', 'model.heads=8', 'data.num_classes=1000')
MADE: dict[str, plan.Plan] = {}


def planned(*overrides: str, topology: str = 'v4:4x4x8', **kinds: tuple[int, int]) -> plan.Plan:
  """A plan of one wide layer, whose program has these collectives: `all_gather=(calls, bytes sent)`."""
  key = repr((overrides, topology))
  if key not in MADE:
    config = files.load('vit_l16_jft', [*SMALL, *overrides])
    subject = plan.Subject(config, topologies.parse(topology), 10**9, 1_000, False)
    MADE[key] = plan.Plan(subject, plan.abstract_parts(subject), None, '')
  rows = [compiled.Collective(kind.replace('_', '-'), calls, sent, sent) for kind, (calls, sent) in kinds.items()]
  answer = compile.Answer(None, costs=compiled.NOTHING._replace(collectives=rows), peak_bytes=2**30)
  return plan.Plan(MADE[key].subject, MADE[key].parts, answer, '')


def text(found: plan.Plan) -> str:
  return '\n'.join(warn.find(found))


def test_what_an_fsdp_layout_has_to_send_is_two_gathers_and_one_sum_of_its_parameters() -> None:
  found = planned('mesh.fsdp=128', 'model.width=6144', 'model.mlp.hidden=24576')
  sizes = [(leaf.size, placed.spec) for leaf, placed in zip(
      plan.jax.tree.leaves(found.parts.program.abstract_state.params),
      plan.jax.tree.leaves(found.parts.program.shardings.params), strict=True)]
  sharded = sum(size for size, spec in sizes if 'fsdp' in spec)
  whole = sum(size for size, spec in sizes if 'fsdp' not in spec)
  # bf16: 2 bytes. A ring of 128 sends 127/128 of an array for a gather, and twice that for an all-reduce.
  assert warn.ideal_bytes(found) == round(2 * 127 / 128 * (3 * sharded + 2 * whole))
  assert sharded > 450_000_000 and whole < 10_000_000


def test_a_program_that_sends_what_it_has_to_has_no_warning() -> None:
  found = planned('mesh.fsdp=128', 'model.width=6144', 'model.mlp.hidden=24576', all_gather=(12, 1_800_000_000),
                  reduce_scatter=(6, 900_000_000))
  assert warn.find(found) == [] and '**Warning**' not in table.render(found)
  assert table.to_json(found)['warnings'] == [] and table.to_json(found)['ideal_sent_bytes'] > 2_700_000_000


def test_a_program_that_gathers_nothing_and_sends_twice_as_much_is_reported() -> None:
  found = planned('mesh.fsdp=128', 'model.width=6144', 'model.mlp.hidden=24576', all_reduce=(932, 5_600_000_000))
  assert 'mesh.fsdp=128, but the compiled step gathers no parameter: it has 932 all-reduces.' in text(found)
  assert 'fsdp is over all devices of a slice' in text(found) and 'Set --config.mesh.fsdp=64 --config' in text(found)
  assert 'A device sends 5.60 GB in a step, 2.0 times the 2.77 GB that this layout needs' in text(found)
  assert table.render(found).count('**Warning**: ') == 2 == len(table.to_json(found)['warnings'])


@pytest.mark.parametrize(('kinds', 'number'), [
    ({'all_gather': (4, 1)}, 0), ({'collective_permute': (9, 1)}, 0), ({'reduce_scatter': (4, 1)}, 1)])
def test_windowed_gathers_are_gathers_too(kinds: dict[str, Any], number: int) -> None:
  found = planned('mesh.fsdp=128', 'model.width=6144', 'model.mlp.hidden=24576', **kinds)
  assert len(warn.find(found)) == number


def test_gradients_that_are_summed_whole_are_reported_with_the_flags_to_compare(
    monkeypatch: pytest.MonkeyPatch) -> None:
  """What `data` has to sum, in float32, is an eighth of the kernels, and all of the others."""
  words = 'mesh.fsdp=8', 'mesh.data=-1', 'model.width=2048', 'model.mlp.hidden=8192'
  few = planned(*words, topology='v5e:16x16', all_gather=(4, 1), all_reduce=(4, 30_000_000))
  assert warn.find(few) == []
  whole = planned(*words, topology='v5e:16x16', all_gather=(4, 1), all_reduce=(4, 100_000_000))
  pairs = zip(plan.jax.tree.leaves(whole.parts.program.abstract_state.params),
              plan.jax.tree.leaves(whole.parts.program.shardings.params), strict=True)
  needed = sum(leaf.size * 4 / (8 if 'fsdp' in placed.spec else 1) for leaf, placed in pairs)
  assert 20e6 < needed < 30e6
  assert (f'Gradients are summed whole: all-reduces of 95 MiB, of which this layout needs {needed / 2**20:.0f} MiB.'
          in text(whole))
  assert 'Compare --flags=scatter_layout.' in text(whole)
  trillium = planned(*words, topology='v6e:16x16', all_gather=(4, 1), all_reduce=(4, 100_000_000))
  assert 'Compare --flags=sparsecore.' in text(trillium)
  everywhere = planned(*words, topology='v5e:2x4', all_gather=(4, 1), all_reduce=(4, 100_000_000))
  assert 'Set --config.mesh.fsdp=4 --config.mesh.data=-1, or compare --flags=scatter_layout.' in text(everywhere)
  assert 'summed whole' not in text(planned('mesh.fsdp=1', all_reduce=(4, 100_000_000)))
  monkeypatch.setenv('LIBTPU_INIT_ARGS', ' '.join(xla_flags.SETS['scatter_layout'].flags))
  assert '--flags=scatter_layout is set and leaves these.' in text(whole)
  assert 'Set --config.mesh.fsdp=4 --config.mesh.data=-1.' in text(everywhere)


def test_shards_that_are_no_whole_tiles_are_reported_with_the_fsdp_that_would_be() -> None:
  found = planned('mesh.fsdp=128', 'model.width=1536', 'model.mlp.hidden=6144', all_gather=(1, 1))
  rows = 1536 // 128
  assert rows % sharding.TILE_ROWS, 'this test needs shards that are no tiles'
  assert f'shards whose number of rows is not a multiple of {sharding.TILE_ROWS}' in text(found)
  assert f'({rows})' in text(found) and 'Set --config.mesh.fsdp=64 --config.mesh.data=-1.' in text(found)
  assert warn.find(planned('mesh.fsdp=64', 'model.width=1536', 'model.mlp.hidden=6144', all_gather=(1, 1))) == []


def test_shards_of_whole_heads_are_as_wide_as_their_entries() -> None:
  changes = 'model.heads=16', 'model.width=1024', 'model.mlp.hidden=4096', 'model.depth=24'
  found = planned('mesh.fsdp=8', *changes, topology='v3:8x8', all_gather=(1, 1))
  by_heads = {spec for name, _, spec in warn._leaves(found) if name.endswith('attn/key/kernel')}
  assert by_heads == {plan.jax.sharding.PartitionSpec(None, None, 'fsdp', None)}, 'this test needs two heads in a shard'
  assert warn.find(found) == []


def test_devices_without_tiles_and_plans_without_fsdp_have_no_such_warning() -> None:
  assert warn.find(planned('mesh.fsdp=1', all_reduce=(1, 1))) == []
  assert warn.find(planned('mesh.fsdp=64', 'model.width=768', topology='cpu:64', all_gather=(1, 1))) == []


def test_the_sums_of_activations_over_tensor_are_needed() -> None:
  one, two = (warn.ideal_bytes(planned('mesh.fsdp=64', f'mesh.tensor={t}', 'mesh.data=-1', 'model.width=6144',
                                       'model.mlp.hidden=24576')) for t in (1, 2))
  rows = 4096 // 64
  tokens, item = 14 * 14 + 1, 2
  assert one / 2 < two - 4 * rows * tokens * 6144 * item < one  # 4 sums of half of the bytes, twice each
