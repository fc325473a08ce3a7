"""The state of a run: a plain tree of arrays."""
from __future__ import annotations

from typing import NamedTuple

from vit_jax.core.types import Array, Extra, Params, PyTree


class TrainState(NamedTuple):
  """The arrays that one step passes to the next; no functions and no random keys.

  step: number of steps done, scalar i32.   opt: the optimizer's state.
  """
  step: Array
  params: Params
  opt: PyTree
  extra: Extra
