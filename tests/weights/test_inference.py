"""The network under weights, for a forward pass alone."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import loaded
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.weights import inference
from vit_jax.weights.network import Weights


def with_execution(execution: schema.Execution) -> Weights:
  found = loaded.weights('vit')
  return found._replace(model=dataclasses.replace(found.model, execution=execution))  # type: ignore[arg-type]


@pytest.mark.parametrize(('execution', 'scans'), [('auto', 1), ('scan', 1), ('unrolled', 0)])
def test_on_cpus_it_loops_over_the_blocks_unless_the_settings_unroll_them(execution: str, scans: int) -> None:
  found = with_execution(schema.Execution(execution))
  image = jnp.zeros((1, *found.preprocess.image_px, 3))
  text = str(jax.make_jaxpr(inference.function(found))(inference.parameters(found), image))
  assert text.count(' scan[') == scans


def test_the_loop_computes_what_unrolled_blocks_compute() -> None:
  image = np.random.default_rng(0).normal(size=(2, *loaded.weights('vit').preprocess.image_px, 3)).astype(np.float32)
  looped, unrolled = (jax.jit(inference.function(found))(inference.parameters(found), image).logits for found in map(
      with_execution, (schema.Execution.AUTO, schema.Execution.UNROLLED)))
  np.testing.assert_allclose(looped, unrolled, rtol=1e-5, atol=1e-5)
