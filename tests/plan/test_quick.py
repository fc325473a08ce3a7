"""Quick plans: figures of a deep network from two shallow ones."""
from __future__ import annotations

import pytest

from vit_jax.config import files, schema
from vit_jax.plan import compile, compiled, overlap, quick
from vit_jax.plan.schedule import Schedule


def request(*overrides: str) -> compile.Request:
  return compile.Request(files.load('vit_l16_jft', ['model.execution=unrolled', 'model.remat=none', *overrides]),
                         'v3:16x16', 1_000, 10, False)


def answer(request: compile.Request) -> compile.Answer:
  """Figures that grow with the depth as those of a network do: a constant and a part for each block."""
  depth = request.config.model.depth  # type: ignore[union-attr]
  costs = compiled.Costs(100 + 7 * depth, compiled.Unknown(0, 0, []),
                         [compiled.Collective('all-gather', 1 + 6 * depth, 5 * depth, 3 * depth)],
                         [compiled.Kernel('attend', 2 * depth)])
  operations = [compiled.Operation('forward', 'Block/mlp', depth, 4 * depth, 2 * depth),
                compiled.Operation('update', 'head', 1, 30, 20)]
  return compile.Answer(None, 11 * depth, 12 * depth, 1_000 + 13 * depth, costs, 1., 2., operations,
                        Schedule(50 + 3 * depth, depth, 2 * depth, 0, 0, []),
                        [overlap.Wait('all-gather', 1 + 6 * depth, 40 * depth, 7 + 2 * depth)])


def test_the_figures_of_all_blocks_are_on_the_line_through_two_shallow_programs() -> None:
  asked = []

  def ask(one: compile.Request) -> compile.Answer:
    asked.append(one.config.model.depth)  # type: ignore[union-attr]
    return answer(one)

  found, exact = quick.ask(request(), by=ask), answer(request())
  assert asked == [2, 4] and found.costs == exact.costs and found.schedule == exact.schedule
  assert found._replace(lower_s=1., compile_s=2., operations=()) == exact._replace(operations=())
  assert sorted(found.operations) == sorted(exact.operations) and found.compile_s == 4.


@pytest.mark.parametrize(('depth', 'asked'), [(12, [2, 4]), (6, [6, 6])])
def test_a_text_tower_as_deep_as_that_of_images_has_as_few_blocks(depth: int, asked: list[int]) -> None:
  config = files.load('siglip_b16', ['model.execution=unrolled', f'objective.text.depth={depth}'])
  found = []

  def ask(one: compile.Request) -> compile.Answer:
    assert isinstance(one.config.objective, schema.Contrastive)
    found.append(one.config.objective.text.depth)
    return answer(one)

  quick.ask(request()._replace(config=config), by=ask)
  assert found == asked


@pytest.mark.parametrize('override', ['model.execution=scan', 'model.depth=4', 'model.full_remat=3'])
def test_what_no_shallow_program_stands_for_is_compiled_as_it_is(override: str) -> None:
  one = request('model.remat=names', override)
  assert not quick.is_shorter(one.config) and quick.ask(one, by=answer) == answer(one)


def test_where_a_shallow_program_does_not_fit_the_complete_one_says_by_how_much() -> None:
  def ask(one: compile.Request) -> compile.Answer:
    depth = one.config.model.depth  # type: ignore[union-attr]
    return answer(one) if depth == 2 else compile.Answer(compiled.Overflow(4. * depth, 15., 'temporaries'))

  found = quick.ask(request(), by=ask).overflow
  assert found is not None and found.need_gib == 96.
