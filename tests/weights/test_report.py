"""What a person reads of a load: counts, and the tensors that were not taken unchanged."""
from __future__ import annotations

from vit_jax.weights.network import Line, Report


def test_many_tensors_with_one_rule_are_one_line_and_few_are_listed() -> None:
  few = [Line(f'head/{i}', 'new', 'other classes') for i in range(8)]
  many = [Line(f'text.{i}', 'dropped', 'of the text tower') for i in range(1_009)]
  lines = Report((Line('norm', 'taken'), *few, *many, Line('x', 'dropped'))).text().splitlines()
  assert lines[0] == 'Tensors: 1 taken, 8 new, 1010 dropped (those of all blocks as one)'
  assert lines[1:9] == [f'  new     head/{i}: other classes' for i in range(8)]
  assert lines[9:] == ['  dropped text.0 and 1,008 more: of the text tower', '  dropped x']
