"""Where the cycles of a compiled program go."""
from __future__ import annotations

import pytest

from vit_jax.plan import operations
from vit_jax.plan.operations import Operation

TEXT = """HloModule jit_step, is_scheduled=true

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
  assert operations.read(TEXT) == [
      Operation('forward', 'Block/mlp/up/dot_general', 3, 30), Operation('update', 'add', 1, 7),
      Operation('update', 'copy', 1, 5)]


@pytest.mark.parametrize('source, expected', [
    ('jit(step)/transpose(jvp(Block))/attn/cond/branch_1_fun/dot_general', ('backward', 'Block/attn/dot_general')),
    ('jit(step)/jvp()/while/body/closed_call/checkpoint/Block/mlp/tanh', ('forward', 'Block/mlp/tanh')),
    ('jit(step)/transpose(jvp(jvp()))/checkpoint/rematted_computation/Block/add', ('recomputed', 'Block/add')),
    ('jit(step)/jit(_where)/select_n', ('update', '_where/select_n')),
    ('jit(step)', ('update', 'step'))])
def test_a_place_has_a_phase_and_the_names_of_modules(source: str, expected: tuple[str, str]) -> None:
  assert operations.place(source) == expected
