"""TPU slices as fake devices, laid over hosts as the real ones are: what a mesh asks of a device, and no more."""
from __future__ import annotations

import dataclasses
import itertools

KINDS = {'v3': ('TPU v3', 2), 'v4': ('TPU v4', 1), 'v5e': ('TPU v5 lite', 1), 'v5p': ('TPU v5', 1),
         'v6e': ('TPU v6 lite', 1)}
"""What jax calls a device of each generation, and devices a chip."""

# (id, process_index, coords) of v5e:4x4 as `jax.experimental.topologies` gives them (libtpu 0.0.51).
RECORDED = (
    (0, 0, (0, 0, 0)), (1, 0, (1, 0, 0)), (4, 0, (0, 1, 0)), (5, 0, (1, 1, 0)),
    (2, 1, (2, 0, 0)), (3, 1, (3, 0, 0)), (6, 1, (2, 1, 0)), (7, 1, (3, 1, 0)),
    (8, 2, (0, 2, 0)), (9, 2, (1, 2, 0)), (12, 2, (0, 3, 0)), (13, 2, (1, 3, 0)),
    (10, 3, (2, 2, 0)), (11, 3, (3, 2, 0)), (14, 3, (2, 3, 0)), (15, 3, (3, 3, 0)))


@dataclasses.dataclass(frozen=True)
class Device:
  """A core of v3, a chip of the others."""
  id: int
  process_index: int
  coords: tuple[int, int, int]
  core_on_chip: int
  device_kind: str
  platform: str = 'tpu'


def devices(name: str) -> list[Device]:
  """Of a slice such as `v4:2x2x4`: a host has a square of 2 x 2 chips; hosts and chips are counted along x first."""
  kind, _, grid = name.partition(':')
  x_size, y_size, *rest = (int(size) for size in grid.split('x'))
  device_kind, cores = KINDS[kind]
  found = [
      Device(cores * ((z * y_size + y) * x_size + x) + core, (z * (y_size // 2) + y // 2) * (x_size // 2) + x // 2,
             (x, y, z), core, device_kind)
      for z, y, x, core in itertools.product(range(rest[0] if rest else 1), range(y_size), range(x_size), range(cores))]
  return sorted(found, key=lambda d: (d.process_index, d.id))
