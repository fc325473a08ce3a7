"""Tells once, after the first steps, whether the host makes the images that the step takes; adapts `data.workers`."""
from __future__ import annotations

import logging

import jax

from vit_jax.config import schema
from vit_jax.core.contracts import Loader
from vit_jax.core.types import Shard
from vit_jax.data.pipeline import capacity
from vit_jax.data.pipeline import loader as loaders
from vit_jax.record.clock import Clock
from vit_jax.train import host_speed

log = logging.getLogger('vit_jax.data')
WAITING = 0.05
"""The step waits for the host if this share of the training time, or more, is spent waiting for data."""


def hook(config: schema.Config, loader: Loader, shard: Shard, clock: Clock) -> host_speed.HostSpeed:
  """Returns the hook that measures; for data in memory, it tells nothing."""
  supply = loader.supply if isinstance(loader, loaders.TrainLoader) else None
  images = config.batch_size * len(shard.parts) / shard.count

  def tell(found: host_speed.Found) -> None:
    if supply is not None:
      decide(found, images, supply, setting=config.data.workers, here=capacity.machine())

  return host_speed.HostSpeed(clock.goodput, tell)


def decide(found: host_speed.Found, images: float, supply: loaders.Supply, *, setting: int,
           here: capacity.Machine) -> None:
  """Logs what was measured, for `images` of this host in a step; with `data.workers=auto`, sets the capacity."""
  step = images / found.alone_s
  host = min(step, images / found.step_s) if found.waiting >= WAITING else step
  measured = capacity.Measured(host, step, found.busy_cores)
  wanted = capacity.workers_after(measured, supply.workers, batch_bytes=supply.batch_bytes, here=here)
  slow = logging.WARNING if jax.process_index() else logging.INFO  # other processes than 0 log warnings alone
  log.log(logging.DEBUG if measured.keeps_up else slow, '%s', capacity.describe(
      measured, supply.workers, wanted, setting=setting, here=here))
  if setting == schema.AUTO_WORKERS:
    supply.workers = wanted
