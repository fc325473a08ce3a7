"""Reading a compiled program's text: a small one written by hand, and a real one of this machine's compiler."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.parallel import mesh
from vit_jax.plan import compiled, hlo

# A loop of 5 around a loop of 3; cycles inside a fusion are those of the fusion. Bytes: 4 x 8 x 4 = 128.
TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inside (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0:T(8,128)} parameter(0)
  ROOT %neg = f32[4,8]{1,0:T(8,128)} negate(%p), backend_config={"estimated_cycles":"9000"}
}

%async (p1: f32[1,8]) -> f32[4,8] {
  ROOT %gather.2 = f32[4,8]{1,0} all-gather(%p1), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

%all-reduce-scatter.1 (p2: f32[4,8]) -> f32[1,8] {
  %reduce = f32[4,8]{1,0} all-reduce(%p2), channel_id=9, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %part = f32[1,8]{1,0} dynamic-slice(%reduce)
}

%inner_body (q: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %one = s32[]{:T(128)} constant(1)
  %q.1 = (s32[]{:T(128)}, f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%q.1), index=0
  %copy = s32[]{:T(128)S(6)} copy(%i.1)
  %next = s32[]{:T(128)} add(%copy, %one), metadata={op_name="jit(step)/jvp()/while/body/add"}
  %move = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=3
  %f = f32[4,8]{1,0:T(8,128)S(1)} fusion(%x), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"10"}
  ROOT %out = (s32[], /*index=1*/f32[4,8]{1,0}) tuple(%next, %f)
}

%inner_condition (q: (s32[], f32[4,8])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %q = (s32[]{:T(128)}, f32[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %less = pred[]{:T(256)} compare(%i, %three), direction=LT
}

%outer_body (r: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %w = (s32[], /*index=1*/f32[4,8]{1,0}) while(%r), condition=%inner_condition, body=%inner_body
  %s = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%async
  %d = f32[4,8]{1,0} fusion(%s), kind=kCustom, calls=%async
  ROOT %out2 = (s32[], f32[4,8]{1,0}) tuple(%i, %f)
}

%outer_condition (r: (s32[], f32[4,8])) -> pred[] {
  ROOT %go = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (input: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]) while(%input), condition=%outer_condition, body=%outer_body, KNOWN, \
metadata={op_name="jit(step)/jit(_beta)/vmap()/while" stack_frame_id=7}
  %rs = f32[1,8]{1,0} fusion(%loop), kind=kCustom, calls=%all-reduce-scatter.1
  %ar = (f32[4,8]{1,0}, bf16[2,2]{1,0}) all-reduce(%a, %b), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'a','b'}
  ROOT %done = f32[4,8]{1,0} copy(%ar), backend_config={"window_config":{"estimated_cycles":"100"}}
}
"""


def read(known: str = 'backend_config={"known_trip_count":{"n":"5"}}') -> compiled.Costs:
  return compiled.read(TEXT.replace('KNOWN', known), num_devices=8)


def test_cycles_are_counted_once_a_trip_and_not_inside_fusions() -> None:
  assert read().cycles == 5 * 3 * 10 + 100 and read().unknown == compiled.Unknown(0, 0, [])


def test_collectives_are_counted_by_kind_with_their_bytes() -> None:
  assert {row.kind: tuple(row)[1:] for row in read().collectives} == {
      'all-reduce': (1, 136, 2 * 136 * 7 // 8),          # over all 8
      'all-gather': (5, 5 * 128, 5 * 96),                # over 4; written twice under one channel
      'reduce-scatter': (1, 128, 96),                    # an all-reduce that is cut at once
      'collective-permute': (15, 15 * 128, 15 * 128)}    # its type names operand, result and two counters


MANUAL = """HloModule jit_step, is_scheduled=true

%async_collective_fusion.1 (p: f32[4,8]) -> f32[4,8] {
  %all-gather.1.1 = f32[4,8]{1,0:T(8,128)S(1)} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%fused_computation.1 (q: f32[4,8]) -> (f32[4,8], f32[4,8]) {
  %inside = f32[4,8]{1,0} fusion(%q), kind=kCustom, calls=%async_collective_fusion.1
}

%async-collective-start.1 (p.1: f32[1,8]) -> f32[4,8] {
  ROOT %all-gather.1 = f32[4,8]{1,0} all-gather(%p.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%async-collective-done.1 (p.2: f32[4,8]) -> f32[4,8] {
  ROOT %all-gather.1.2 = f32[4,8]{1,0} all-gather(%p.2), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%async-collective-start.2 (p.3: f32[1,8]) -> f32[4,8] {
  ROOT %all-gather.2 = f32[4,8]{1,0} all-gather(%p.3), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (a: f32[1,8], b: f32[1,8]) -> f32[4,8] {
  %a = f32[1,8]{1,0} parameter(0)
  %start.1 = (f32[4,8]{1,0}, u32[]) fusion(%a), kind=kCustom, calls=%async-collective-start.1
  %start.2 = (f32[4,8]{1,0}, u32[]) fusion(%a), kind=kCustom, calls=%async-collective-start.2
  %part.1 = f32[4,8]{1,0} get-tuple-element(%start.1), index=0
  %work = (f32[4,8]{1,0}, f32[4,8]{1,0}) fusion(%part.1, %b), kind=kOutput, calls=%fused_computation.1
  %part.2 = f32[4,8]{1,0} get-tuple-element(%work), index=0
  %done = f32[4,8]{1,0} fusion(%part.2), kind=kCustom, calls=%async-collective-done.1
  %hop.1 = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%done), channel_id=1
  %end.1 = f32[4,8]{1,0} collective-permute-done(%hop.1)
  %hop.2 = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%end.1), channel_id=1
  %end.2 = f32[4,8]{1,0} collective-permute-done(%hop.2)
  %swap.1 = ((f32[4,8]{1,0}), f32[4,8]{1,0}, u32[]) all-to-all-start(%end.2), channel_id=1, replica_groups={{0,1,2,3}}
  %swapped.1 = f32[4,8]{1,0} all-to-all-done(%swap.1)
  %swap.2 = f32[4,8]{1,0} all-to-all(%swapped.1), channel_id=1, replica_groups={{0,1,2,3}}
  %cut.1 = (f32[4,8]{1,0}, f32[1,8]{1,0}) reduce-scatter-start(%swap.2), channel_id=1, replica_groups={{0,1,2,3}}
  %cut.2 = f32[1,8]{1,0} reduce-scatter-done(%cut.1)
  ROOT %cut.3 = f32[1,8]{1,0} reduce-scatter(%swap.2), channel_id=1, replica_groups={{0,1,2,3}}
}
"""


def test_collectives_of_one_channel_are_counted_one_by_one_and_asynchronous_ones_once() -> None:
  """All that `shard_map` makes has channel 1. The first gather is written three times, in fusions that follow."""
  found = {row.kind: tuple(row)[1:] for row in compiled.read(MANUAL, num_devices=4).collectives}
  assert found == {'all-gather': (2, 2 * 128, 2 * 96), 'reduce-scatter': (2, 2 * 128, 2 * 96),
                   'all-to-all': (2, 2 * 128, 2 * 96), 'collective-permute': (2, 2 * 128, 2 * 128)}


@pytest.mark.slow(reason='1 s: compiles')
def test_the_permutes_of_a_shard_map_are_all_counted() -> None:
  """A ring over four devices: the compiler of CPUs gives all of them channel 1, too."""
  def ring(x: jax.Array) -> jax.Array:
    total = x
    for _ in range(3):
      x = jax.lax.ppermute(x, 'data', [(i, (i + 1) % 4) for i in range(4)])
      total = total + x
    return total

  where = mesh.make(schema.Mesh(4, 1, 1), jax.devices()[:4])
  spec = PartitionSpec('data')
  form = jax.shard_map(ring, mesh=where, in_specs=spec, out_specs=spec, check_vma=False)
  text = jax.jit(form).lower(jnp.zeros((8, 16))).compile().as_text()
  assert text
  (row,) = compiled.read(text, num_devices=4).collectives
  assert row == compiled.Collective('collective-permute', 3, 3 * 2 * 16 * 4, 3 * 2 * 16 * 4)


KERNEL = """%attend_fwd.12 = (f32[4,8]{1,0}) custom-call(%x), custom_call_target="tpu_custom_call", attributes={m={
"xprof_metadata":"{\\"block\\": 256}"
}}, metadata={op_name="jit(step)/attend_fwd"}, backend_config={"custom_call_config":{"body":"TUzvUg"}}
  %q.1 ="""


def test_kernels_without_cycles_are_counted_by_name_and_hide_nothing_that_follows() -> None:
  """Their metadata takes several lines, which begin at the margin."""
  assert read().kernels == []
  text = TEXT.replace('KNOWN', 'backend_config={"known_trip_count":{"n":"5"}}').replace('%q.1 =', KERNEL)
  found = compiled.read(text, num_devices=8)
  assert found.kernels == [compiled.Kernel('attend_fwd', 15)]
  assert found._replace(kernels=[]) == read()
  counted = compiled.read(text.replace('"body"', '"estimated_cycles":"7","body"'), num_devices=8)
  assert counted.kernels == [] and counted.cycles == read().cycles + 15 * 7


def test_a_loop_of_unknown_length_is_counted_once_and_reported() -> None:
  assert read('').unknown == compiled.Unknown(1, 3 * 10, ['jit(_beta)']) and read('').cycles == 3 * 10 + 100


@pytest.mark.parametrize(('message', 'want'), [
    ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (50.49G) exceeds '
     'available HBM (15.48G).', (50.49, 15.48, 'temporaries')),
    ('RESOURCE_EXHAUSTED: Used 17.5G of 15.48G hbm. Exceeded hbm capacity by 2.02G.',
     (17.5, 15.48, 'the program')),
    ('RESOURCE_EXHAUSTED: something else', (0., 0., 'the program')),
    ('Used 512.0M of 15.48G hbm', (.5, 15.48, 'the program'))])
def test_an_out_of_memory_message_says_by_how_much(message: str, want: tuple[float, float, str]) -> None:
  assert compiled.overflow(message) == pytest.approx(want)


def test_another_error_is_no_overflow() -> None:
  assert compiled.overflow('INVALID_ARGUMENT: no') is None


def test_the_text_of_this_machines_compiler_is_read_too() -> None:
  grid = mesh.make(schema.Mesh(8, 1, 1))
  rows, whole = NamedSharding(grid, PartitionSpec('data')), NamedSharding(grid, PartitionSpec())

  def total(x: jax.Array) -> jax.Array:
    def one(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
      return jax.lax.with_sharding_constraint(jnp.sin(carry + x.sum(0) * row), whole), None
    return jax.lax.scan(one, jnp.zeros(37), jnp.arange(11.))[0]

  text = jax.jit(total, in_shardings=rows).lower(jax.ShapeDtypeStruct((16, 37), jnp.float32)).compile().as_text()
  costs = compiled.read(text or '', num_devices=8)
  assert costs.cycles == 0 and costs.unknown.loops == 0
  assert [row.kind for row in costs.collectives] == ['all-reduce']
  assert costs.collectives[0].num_bytes == costs.collectives[0].calls * 37 * 4


STEP = """HloModule jit_step, is_scheduled=true

%inside (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0:T(8,128)} parameter(0)
  ROOT %neg = f32[4,8]{1,0:T(8,128)} negate(%p), backend_config={"estimated_cycles":"9000"}
}

%body (q: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %one = s32[]{:T(128)} constant(1)
  %q.1 = (s32[]{:T(128)}, f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%q.1), index=0
  %next = s32[]{:T(128)} add(%i.1, %one)
  %f = f32[4,8]{1,0:T(8,128)S(1)} fusion(%x), kind=kLoop, calls=%inside, metadata={op_name="jit(step)/jvp()/while/body/jvp(Block)/mlp/up/cond/branch_fun/dot_general"}, backend_config={"estimated_cycles":"10"}
  ROOT %out = (s32[], /*index=1*/f32[4,8]{1,0}) tuple(%next, %f)
}

%condition (q: (s32[], f32[4,8])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %q = (s32[]{:T(128)}, f32[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %less = pred[]{:T(256)} compare(%i, %three), direction=LT
}

ENTRY %main (p0: f32[4,8]) -> f32[4,8] {
  %w = (s32[], f32[4,8]{1,0}) while(%t), condition=%condition, body=%body
  %a = f32[4,8]{1,0} add(%x, %y), metadata={op_name="jit(step)/add"}, backend_config={"estimated_cycles":"7"}
  ROOT %c = f32[4,8]{1,0} copy(%a), backend_config={"estimated_cycles":"5"}
}
"""  # noqa: E501


def test_cycles_are_those_of_fusions_times_the_trips_of_their_loop() -> None:
  assert compiled.operations(STEP) == [
      compiled.Operation('forward', 'Block/mlp/up/dot_general', 3, 30), compiled.Operation('update', 'add', 1, 7),
      compiled.Operation('update', 'copy', 1, 5)]


@pytest.mark.parametrize('source, expected', [
    ('jit(step)/transpose(jvp(Block))/attn/cond/branch_1_fun/dot_general', ('backward', 'Block/attn/dot_general')),
    ('jit(step)/jvp()/while/body/closed_call/checkpoint/Block/mlp/tanh', ('forward', 'Block/mlp/tanh')),
    ('jit(step)/transpose(jvp(jvp()))/checkpoint/rematted_computation/Block/add', ('recomputed', 'Block/add')),
    ('jit(step)/jit(_where)/select_n', ('update', '_where/select_n')),
    ('jit(step)', ('update', 'step'))])
def test_a_place_has_a_phase_and_the_names_of_modules(source: str, expected: tuple[str, str]) -> None:
  assert compiled.locate(hlo.Instruction('x', 'add', 'f32[]', f'metadata={{op_name="{source}"}}', False)) == expected
