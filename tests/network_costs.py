"""Writes `vit_jax/recipes/network_costs.json`: parameters and FLOPs of all listed networks and published weights.

    python -m tests.network_costs     about a minute
"""
from __future__ import annotations

import json
import sys

from vit_jax.configs import study_scaling
from vit_jax.recipes import catalog, published, sizes
from vit_jax.weights import published as published_weights


def needed() -> list[catalog.Network]:
  """Returns everything that `list_models`, `list_weights` and the scaling study show."""
  found = [catalog.Network(name, catalog.usual_px(name), catalog.NUM_CLASSES, False) for name in sizes.names()]
  for rule, model in map(published_weights.rule, published_weights.NAMES):
    found.append(catalog.Network(model, rule.px or catalog.usual_px(model), rule.num_classes, rule.is_hidden))
  found += [catalog.Network(name, catalog.PX, published.JFT_CLASSES, False)
            for name in (*study_scaling.NEXT, *(row.model for row in published.TABLE_6))]
  return list(dict.fromkeys(found))


def write() -> None:
  """Derives all costs and writes the file."""
  costs = {}
  for network in needed():
    costs[str(network)] = network.derive()
    print(network, *costs[str(network)], file=sys.stderr)
  lines = (f'  {json.dumps(name)}: {json.dumps(costs[name])}' for name in sorted(costs))
  catalog.COSTS.write_text('{\n' + ',\n'.join(lines) + '\n}\n', encoding='utf-8')


if __name__ == '__main__':
  write()
