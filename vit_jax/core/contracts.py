"""The contracts between the parts. Nothing inherits from these; a part satisfies them by shape.

A capability that does not fit these contracts means that a contract is wrong: change it here,
and never add a special case to `train/step.py` or `train/loop.py`.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Outputs, Params, PyTree


class Backbone(Protocol):
  """A network from images to features.

  `state` is `{}` unless the network carries running statistics (BatchNorm).
  """

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Parameters (f32) and state for images like `image [B, H, W, 3] f32`."""
    ...

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Features of `image [B, H, W, 3] f32`, and the new state.

    `key` feeds dropout and stochastic depth; it may be None when `train` is False.
    """
    ...


class TokenBackbone(Backbone, Protocol):
  """A backbone that works on a sequence of tokens, any of which may be left out."""

  def embed(self, params: Params, image: Array) -> Array:
    """`[B, H, W, 3]` to patch tokens `[B, N, D]`, before positions and without class token."""
    ...

  def stem(self, params: Params, state: PyTree, image: Array, *, train: bool) -> tuple[Array, PyTree]:
    """As `embed`, and the new state: for stems with running statistics too."""
    ...

  def positions(self, params: Params, grid: tuple[int, int]) -> Array:
    """Position embeddings `[N, D]` of the patch tokens on a grid `(h, w)`."""
    ...

  def encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int],
             train: bool, key: Key | None) -> Features:
    """Encodes any subset of tokens `[B, n, D]` with their positions `[n, D]` or `[B, n, D]`.

    Raises UserError for a subset if the blocks know the places of tokens themselves.
    """
    ...


class LayeredBackbone(Backbone, Protocol):
  """A backbone that can be driven layer by layer, for looking inside; `train` is off throughout."""

  def begin(self, params: Params, image: Array) -> Array:
    """What the first block sees of `image [B, H, W, 3] f32`: `[B, M, D]`, the N patch tokens last."""
    ...

  def block(self, params: Params, tokens: Array, *, layer: Array | int, capture: bool,
            attn_delta: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Encoder block `layer`, from 0.

    `attn_delta [B, A, M, M]` is added to the attention weights. Returns the new tokens and, with `capture`,
    `attention [B, A, M, M]` f32 on the explicit path (axial attention: `row_attention` and `column_attention`).
    """
    ...

  def finish(self, params: Params, tokens: Array, *, grid: tuple[int, int]) -> Features:
    """Features of what the last block gave."""
    ...

  def readout_weights(self, params: Params, tokens: Array) -> Array:
    """Weight of each token in the pooled features, `[B, M]` f32 with sum 1, for the output of the last block."""
    ...


class View(Protocol):
  """A network to look at: `student`, `ema`, `teacher`."""

  def select(self, params: Params, extra: Extra) -> PyTree:
    """What `predict` needs of a state: backbone, head, running statistics."""
    ...

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    """Outputs for prepared images `[B, H, W, 3] f32`, with dropout off."""
    ...


class Viewed(Protocol):
  """Something with networks that evaluators may look at."""

  def views(self) -> dict[str, View]:
    """The networks by name; `student` always among them."""
    ...


class Objective(Viewed, Protocol):
  """A task: what is learned from a batch."""

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    """Parameters and extra for prepared batches shaped like `batch`."""
    ...

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    """The loss of a prepared batch. `step` is the number of updates done before this one."""
    ...

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    """The next `extra`, from the updated parameters and the summed `stats`.

    Acts on trees leaf by leaf: their layers may be unstacked (`unstacked.Layers`).
    """
    ...

  def views(self) -> dict[str, View]:
    """The networks that evaluators may look at, by name; `student` always among them."""
    ...


class Watch(NamedTuple):
  """A metric of the train step that raises an alarm when it is low for too long.

  metric: its name.
  below: the alarm's threshold; not a number counts as low.
  setting: name of the setting with the threshold.
  lasting: number of low steps in a row that raise one alarm.
  after: number of steps at the start of the run that do not count.
  stops: whether an alarm ends the run.
  advice: what to do, a sentence without its full stop.
  """
  metric: str
  below: float
  setting: str
  lasting: int
  after: int
  stops: bool
  advice: str


class Prepare(Protocol):
  """Normalisation, device augmentation and mixing; pure, jitted inside the step."""

  def __call__(self, batch: Batch, key: Key, step: Array) -> Batch:
    ...


class Evaluator(Protocol):
  """Measures one view. The result does not depend on batch size, worker, device or host count."""

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    ...


class LoaderInfo(NamedTuple):
  """What a run must agree on to see the same data again; saved and compared as text."""
  source: str
  num_examples: int
  batch_size: int
  seed: int
  digest: str


class Loader(Protocol):
  """Training batches as a pure function of (seed, step).

  The *global* batch is the same for any number of workers and processes; this process gets its rows.
  """
  info: LoaderInfo

  def batches(self, start: int) -> Iterator[Batch]:
    """Endless batches of host arrays from step `start` on: this process's rows."""
    ...

  def describe(self, index: int) -> str:
    """A name a person can find the example by: a file path, or source and position."""
    ...

  def close(self) -> None:
    """Stops workers and frees what they held."""
    ...



class EvalLoader(Protocol):
  """One pass over a split: every example exactly once, padded with `mask` 0 to whole batches.

  Every process yields the same number of batches, whatever its share of the examples.
  """
  num_examples: int

  @property
  def num_bad(self) -> int:
    """Images of this process that could not be decoded so far; they have `mask` 0 and count nowhere."""
    ...

  def batches(self) -> Iterator[Batch]:
    """Host arrays, always with `mask` and `index`: this process's rows."""
    ...

  def describe(self, index: int) -> str:
    """A name a person can find the example by."""
    ...

  def close(self) -> None:
    """Stops workers and frees what they held."""
    ...
