"""Tests of the printed table of a network."""
from __future__ import annotations

import networks
import pytest

from vit_jax.config import schema
from vit_jax.models import backbones, cost


@pytest.mark.dear('efficientnet', reason='1 s of tracing')
@pytest.mark.parametrize('name', networks.MODELS)
def test_the_table_lists_every_parameter_and_adds_up_the_parts(name: str) -> None:
  model = networks.MODELS[name]
  lines = backbones.build(model, networks.PX).tabulate().splitlines()
  end = next(i for i, line in enumerate(lines) if line.startswith('all parameters'))
  counts = [int(line.split()[-1].replace(',', '')) for line in lines[1:end]]
  known = cost.parameters(model, networks.PX, head=schema.Head(), num_classes=0)
  assert sum(counts) == sum(known.values()) == int(lines[end].split()[-1].replace(',', ''))
  flops = cost.forward_flops(model, networks.PX, head=schema.Head(), num_classes=0)
  parts = {line.split()[0]: float(line.split()[-1].replace(',', '')) for line in lines[end + 3:-1]}
  assert parts == pytest.approx({part: count / 1e6 for part, count in flops.items() if count}, abs=5.1e-4)


def test_the_table_of_a_vit_shows_paths_and_shapes() -> None:
  table = backbones.build(schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=48), (16, 24)).tabulate()
  assert 'blocks/attn/query/kernel  2 x 32 x 4 x 8       2,048' in table
  assert 'all parameters                                21,504' in table and 'attention' in table
