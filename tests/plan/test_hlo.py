"""How often the loops of a compiled program run, where its text does not say: by the counter."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from vit_jax.plan import hlo

# As the TPU compiler writes a loop that it made itself and unrolled once; see `test_compiled` for a scan's.
TEXT = """HloModule jit_step

%cond (p: (f32[8], u32[])) -> pred[] {
  %bound = u32[]{:T(128)} constant(BOUND)
  %p = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %less = pred[]{:T(512)} compare(%i, %bound), direction=DIRECTION
}

%body (q: (f32[8], u32[])) -> (f32[8], u32[]) {
  %by = u32[]{:T(128)} constant(STEP)
  %q = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%q), index=1
  %x = f32[8]{0} get-tuple-element(%q), index=0
  %next = u32[]{:T(128)} add(%j, %by), metadata={op_name="jit(step)/dot_general"}
  ROOT %out = (f32[8]{0}, u32[]{:T(128)}) tuple(%x, %next)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %first = u32[]{:T(128)} constant(FIRST)
  %start = u32[]{:T(128)} copy(%first)
  %state = (f32[8]{0}, u32[]{:T(128)}) tuple(%a, %start)
  ROOT %loop = (f32[8]{0}, u32[]{:T(128)}) while(%state), condition=%cond, body=%body
}
"""


def trips(first: str = '0', bound: str = '8', step: str = '1', direction: str = 'LT') -> int | None:
  text = TEXT.replace('FIRST', first).replace('BOUND', bound).replace('STEP', step).replace('DIRECTION', direction)
  program = hlo.parse(text)
  (loop,) = (one for one in program.instructions(program.entry) if one.opcode == 'while')
  return program.trips(loop, program.entry)


@pytest.mark.parametrize(('first', 'bound', 'step', 'want'), [
    ('0', '8', '1', 8), ('0', '8', '2', 4), ('0', '7', '2', 4), ('3', '8', '1', 5), ('-2', '8', '3', 4),
    ('8', '8', '1', 0), ('9', '8', '1', 0)])
def test_trips_follow_from_start_step_and_bound(first: str, bound: str, step: str, want: int) -> None:
  assert trips(first, bound, step) == want == len(range(int(first), int(bound), int(step)))


def test_a_loop_without_a_counter_has_no_known_trips() -> None:
  assert trips(direction='NE') is None and trips(step='0') is None
  assert trips(bound='8.5') is None  # no constant that is an integer


def test_operands_are_named_in_order_whatever_stands_between() -> None:
  program = hlo.parse('ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %t = (f32[2]{0:T(8)}, /*index=1*/f32[]) '
                      'tuple(%a.1, /*index=1*/%b-2), metadata={op_name="jit(step)/f(x)"}\n}')
  (one,) = program.instructions('main')
  assert one.operands == ['a.1', 'b-2'] and one.is_root and one.source == 'jit(step)/f(x)'


CONDITIONAL_TEXT = """HloModule jit_step

%first (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %sine = f32[8]{0} sine(%p)
}

%second (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %cosine = f32[8]{0} cosine(%q)
}

ENTRY %main (x: pred[], a: f32[8]) -> f32[8] {
  %x = pred[] parameter(0)
  %a = f32[8]{0} parameter(1)
  ROOT %chosen = f32[8]{0} conditional(%x, %a, %a), BRANCHES
}
"""


@pytest.mark.parametrize('branches', ['branch_computations={%first, %second}',
                                      'true_computation=%first, false_computation=%second'])
def test_all_branches_of_a_conditional_are_followed(branches: str) -> None:
  visits = list(hlo.parse(CONDITIONAL_TEXT.replace('BRANCHES', branches)).walk())
  assert [visit.instruction.name for visit in visits] == ['x', 'a', 'chosen', 'p', 'sine', 'q', 'cosine']
  assert all(visit.times == 1 and visit.has_known_times for visit in visits)


def test_a_loop_that_ends_by_its_data_is_seen_in_the_text_of_this_machines_compiler() -> None:
  def halve(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: y > 1., lambda y: y / 2, x) + jax.lax.fori_loop(0, 7, lambda i, y: y * 2, x)

  text = jax.jit(halve).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile().as_text() or ''
  program = hlo.parse(text)
  found = [program.trips(one, name) for name, body in program.computations.items() for one in body.values()
           if one.opcode == 'while']
  assert sorted(found, key=str) == [7, None]
