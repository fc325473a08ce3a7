"""Placements of a config on known hardware: mesh, what is computed again, how the blocks run.

Hardware is spelled as the planner spells it, `v3:16x16`; the names that clouds sell it under are aliases. `gpu:8` is
eight GPUs of any kind with 80 GB or more.
Knows no devices, and imports no jax.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import assert_never

from vit_jax.config import model_options, schema
from vit_jax.core.errors import UserError

# What is rented -> what the compiler calls it. Numbers after v2 to v5p count cores, after v5e and v6e chips.
ALIASES = {
    **{f'{chip}-{8 * n}': f'{chip}:{grid}' for chip in ('v2', 'v3') for n, grid in (
        (1, '2x2'), (4, '4x4'), (8, '4x8'), (16, '8x8'), (32, '8x16'), (64, '16x16'), (128, '16x32'),
        (256, '32x32'))},
    **{f'{chip}-{8 * n}': f'{chip}:{grid}' for chip in ('v4', 'v5p') for n, grid in (
        (1, '2x2x1'), (2, '2x2x2'), (4, '2x2x4'), (8, '2x4x4'), (16, '4x4x4'), (32, '4x4x8'), (64, '4x8x8'),
        (128, '8x8x8'))},
    **{f'{name}-{n}': f'{chip}:{grid}' for chip, names in (('v5e', ('v5e', 'v5litepod')), ('v6e', ('v6e',)))
       for name in names for n, grid in (
           (1, '1x1'), (4, '2x2'), (8, '2x4'), (16, '4x4'), (32, '4x8'), (64, '8x8'), (128, '8x16'),
           (256, '16x16'))},
}
GPUS = ('a100', 'h100', 'h200')


@dataclasses.dataclass(frozen=True)
class Placement:
  """How a model is laid out on one kind of hardware. Products are in bf16."""
  fsdp: int = 1
  remat: schema.Remat = schema.Remat.NAMES
  execution: schema.Execution = schema.Execution.SCAN
  accumulate: int = 1


def canonical(text: str) -> str:
  """The planner's name of a slice: `v3-512` is `v3:16x16`; other texts are returned as they are."""
  return ALIASES.get(text.strip().lower(), text.strip().lower())


def place(config: schema.Config, mesh: str, known: Mapping[str, Placement]) -> schema.Config:
  """The config laid out for `mesh`, such as `v3:16x16`, `v3-512` or `h100:8`; '' leaves it as it is.

  Raises:
    UserError: lists the meshes that the config knows.
  """
  if not mesh:
    return config
  kind, _, size = canonical(mesh).partition(':')
  found = known.get(f'{"gpu" if kind in GPUS else kind}:{size}')
  if found is None:
    raise UserError(f'mesh={mesh}: {config.name} has no placement of that name; known: {", ".join(known)}. For other '
                    'hardware set config.mesh.fsdp, config.model.remat and config.model.execution, and try them with '
                    '--job=plan --search')
  return dataclasses.replace(
      config, mesh=dataclasses.replace(config.mesh, fsdp=found.fsdp),
      train=dataclasses.replace(config.train, accumulate=found.accumulate),
      model=dataclasses.replace(run_as(config.model, remat=found.remat, execution=found.execution),
                                dtype=schema.DType.BF16))


def run_as(model: schema.Model, *, remat: schema.Remat, execution: schema.Execution) -> schema.Model:
  """The same model, run this way; one of convolutions has no `execution`, and computes units again or not."""
  match model:
    case schema.ViT() | schema.Mixer():
      return dataclasses.replace(model, remat=remat, execution=execution)
    case schema.ResNet() | schema.EfficientNet():
      return dataclasses.replace(model, remat=remat if remat in model_options.UNIT_REMAT else schema.Remat.FULL)
    case _:
      assert_never(model)
