"""`--job=bench` over sizes of images: peak speed and largest batch, as in Figure 12 of the ViT paper (Appendix D.5)."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.inspect import figures

if TYPE_CHECKING:
  from vit_jax.bench.job import Report


def at_each(name: str, config: schema.Config, px: str) -> list[tuple[str, schema.Config]]:
  """The config at each side of `px`, such as `64,128,224`, with its name; as it is for ''.

  Raises:
    UserError: a side is no positive number.
  """
  found = []
  for text in filter(None, (part.strip() for part in px.split(','))):
    if not (text.isdecimal() and int(text)):
      raise UserError(f'--px={px}: {text!r} is no side of images in pixels; want such as 64,128,224')
    recipe = config.data.recipe  # whose size before the central crop of evaluation stays in proportion
    recipe = dataclasses.replace(recipe, eval_resize_px=round(recipe.eval_resize_px * int(text) / config.image_px[0]))
    found.append((f'{name} at {text} px', dataclasses.replace(
        config, image_px=(int(text), int(text)), data=dataclasses.replace(config.data, recipe=recipe))))
  return found or [(name, config)]


def figure(reports: Sequence[Report]) -> bytes:
  """PNG: images a second of the forward pass, and images a batch, over the side of an image; a line a network."""
  networks = dict.fromkeys(report.model.rpartition(' at ')[0] for report in reports)
  speeds, batches = {}, {}
  for network in networks:
    own = sorted((report for report in reports if report.model.rpartition(' at ')[0] == network), key=lambda r: r.px)
    side = np.array([report.px for report in own], np.float64)
    forward = [next(row for row in report.rows if row.part == 'forward') for report in own]
    speeds[network] = side, np.array([row.images / row.median_s for row in forward])
    batches[network] = side, np.array([float(report.batch_size) for report in own])
  return figures.panels({'Peak speed, forward': ('images a second', speeds), 'Batch': ('images', batches)},
                        xlabel='side of an image, px', is_log=True)
