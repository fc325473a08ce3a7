"""Tests of the printed table of a network."""
from __future__ import annotations

import numpy as np

from vit_jax.models import counting


def test_the_table_lists_every_parameter_and_adds_up_the_modules() -> None:
  params = {'blocks': {'attn': {'query': {'kernel': np.zeros((2, 32, 4, 8))}}}, 'cls': np.zeros((1, 1, 32))}
  table = counting.table(params, {'stem': 1_500_000, 'blocks/attn': 2_000_000, 'pool': 0})
  assert 'blocks/attn/query/kernel  2 x 32 x 4 x 8       2,048' in table
  assert 'all parameters                                 2,080' in table
  assert [line.split()[0] for line in table.splitlines()[-3:]] == ['stem', 'blocks/attn', 'all']
  assert table.splitlines()[-1].split()[-1] == '3.500'
