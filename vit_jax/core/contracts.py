"""The contracts between modules, as protocols: classes satisfy them without inheriting from them.

A run calls them in this order: `Loader.batches` yields batches of the host. Inside the compiled step, `Prepare`
normalizes and augments a batch, `Objective.loss` calls a `Backbone`, and `Objective.after_update` follows the update of
the parameters. An evaluation takes batches from an `EvalLoader`, and passes the result of `View.select` to
`View.predict`.

If a new capability does not fit a contract, change the contract here. Do not add a special case to `train/step.py` or
`train/loop.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from vit_jax.core.types import Array, Batch, Extra, Features, HostArray, Key, LossOut, Outputs, Params, PyTree


class Backbone(Protocol):
  """A network that maps images to features.

  `state` is `{}` unless the network has running statistics (BatchNorm).
  """

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Returns parameters (f32) and state for images of the shape of `image [B, H, W, 3] f32`."""

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns the features of `image [B, H, W, 3] f32`, and the new state.

    `key` is for dropout and stochastic depth; it may be None if `train` is False.
    """


class TokenBackbone(Backbone, Protocol):
  """A backbone that encodes a sequence of tokens, or any subset of it."""

  def embed(self, params: Params, image: Array) -> Array:
    """Maps `[B, H, W, 3]` to patch tokens `[B, N, D]`, without position embeddings and class token."""

  def stem(self, params: Params, state: PyTree, image: Array, *, train: bool) -> tuple[Array, PyTree]:
    """Maps images to patch tokens like `embed`, and also returns the new state, for stems with running statistics."""

  def positions(self, params: Params, grid: tuple[int, int]) -> Array:
    """Returns position embeddings `[N, D]` of the patch tokens on a grid `(h, w)`."""

  def encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int],
             train: bool, key: Key | None, mask: Array | None = None) -> Features:
    """Encodes any subset of tokens `[B, n, D]` with their positions `[n, D]` or `[B, n, D]`.

    Tokens with `mask [B, n]` False are not attended to, and their features have no meaning; None = no such tokens.

    Raises UserError for a subset if the blocks depend on the positions of tokens in the grid.
    """


class LayeredBackbone(Backbone, Protocol):
  """A backbone that can be run layer by layer, to inspect intermediate results; always in evaluation mode."""

  def begin(self, params: Params, image: Array, state: PyTree | None = None) -> Array:
    """Returns the input of the first block for `image [B, H, W, 3] f32`: `[B, M, D]`, the N patch tokens last.

    `state` has the running statistics; None = the network has none.
    """

  def block(self, params: Params, tokens: Array, *, layer: Array | int, capture: bool,
            attn_delta: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Applies encoder block `layer`, counted from 0.

    `attn_delta [B, A, M, M]` is added to the attention weights. Returns the new tokens and, with `capture`,
    `attention [B, A, M, M]` f32 on the explicit path (axial attention: `row_attention` and `column_attention`).
    """

  def finish(self, params: Params, tokens: Array, *, grid: tuple[int, int]) -> Features:
    """Returns the features for the output of the last block."""

  def readout_weights(self, params: Params, tokens: Array) -> Array:
    """Returns the weight of each token in the pooled features, `[B, M]` f32 with sum 1, for the last block's output."""


class View(Protocol):
  """One of the networks of a run: `student`, `ema` or `teacher`."""

  def select(self, params: Params, extra: Extra) -> PyTree:
    """Returns the part of a state that `predict` uses: backbone, head, running statistics."""

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    """Returns the outputs for prepared images `[B, H, W, 3] f32`, without dropout."""


class Viewed(Protocol):
  """An object with networks that can be evaluated, such as an objective."""

  def views(self) -> dict[str, View]:
    """Returns the networks by name; `student` always exists."""


class Objective(Viewed, Protocol):
  """A training objective: defines the loss of a batch."""

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    """Returns parameters and `extra` for prepared batches of the shape of `batch`."""

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    """Returns the loss of a prepared batch. `step` is the number of updates done before this one."""

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    """Returns the next `extra`, from the updated parameters and the summed `stats`."""


class Coupling(NamedTuple):
  """The loss of an objective that compares the examples of a batch, in two parts.

      rows, stats = embed(params, extra, batch, key, step)
      loss = compare(params, extra, rows, batch, key, step)

  A step of several microbatches calls `embed` for each microbatch and `compare` once, for the rows of the whole batch,
  which are small. So its loss is that of the whole batch. `Objective.loss` returns the loss of `compare`, and `stats`.

  embed: takes any rows of a batch. It returns `rows`, a tree of floating-point arrays `[B, ...]` in which each row
    depends on one example alone, and `LossOut.stats`.
  compare: takes the whole batch, and returns a `LossOut` with the stats `{}`.
  """
  embed: Callable[[Params, Extra, Batch, Key, Array], tuple[PyTree, PyTree]]
  compare: Callable[[Params, Extra, PyTree, Batch, Key, Array], LossOut]

  def inside(self, unwrap: Callable[[Params, Extra, Key], tuple[Params, Extra]]) -> Coupling:
    """Returns the coupling of an objective that wraps the objective of this coupling.

    `unwrap` takes params, extra and key of the outer objective, and returns params and extra of the inner objective.
    """
    def embed(params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> tuple[PyTree, PyTree]:
      return self.embed(*unwrap(params, extra, key), batch, key, step)

    def compare(params: Params, extra: Extra, rows: PyTree, batch: Batch, key: Key, step: Array) -> LossOut:
      return self.compare(*unwrap(params, extra, key), rows, batch, key, step)

    return Coupling(embed, compare)


@runtime_checkable
class Coupled(Protocol):
  """An objective that may compare the examples of a batch; other objectives do not have this method."""

  def coupling(self) -> Coupling | None:
    """Returns the two parts of the loss; None if the loss is a mean over examples."""


def coupling(objective: Objective) -> Coupling | None:
  """Returns the two parts of an objective's loss; None if the loss is a mean over examples."""
  return objective.coupling() if isinstance(objective, Coupled) else None


class Watch(NamedTuple):
  """A metric of the train step, and the alarm that is raised if the metric is low for too many steps.

  metric: the name of the metric.
  below: the metric is low if it is below this threshold, or NaN.
  setting: the name of the setting that has the threshold.
  lasting: number of low steps in a row that cause one alarm.
  after: number of steps at the start of the run that do not count.
  stops: whether an alarm ends the run.
  advice: what to do after an alarm: a sentence without its full stop.
  """
  metric: str
  below: float
  setting: str
  lasting: int
  after: int
  stops: bool
  advice: str


class Prepare(Protocol):
  """Normalization, augmentation on the device, and mixing; a pure function that is compiled as part of the step."""

  def __call__(self, batch: Batch, key: Key, step: Array) -> Batch:
    ...


class LoaderInfo(NamedTuple):
  """All facts that determine the order of a run's data: saved as text, and compared when the run is resumed."""
  source: str
  num_examples: int
  batch_size: int
  seed: int
  digest: str


class Loader(Protocol):
  """Training batches as a pure function of (seed, step).

  The *global* batch is the same for any number of workers and processes. Each process loads some of the rows.
  """
  info: LoaderInfo

  def batches(self, start: int) -> Iterator[Batch]:
    """Yields batches of host arrays without end, from step `start`: this process's rows."""

  def indexes(self, step: int) -> HostArray:
    """Returns the index of each example in the global batch of a step, `[B] i64`: the rows of all processes."""

  def describe(self, index: int) -> str:
    """Returns a name by which a user can find the example: a file path, or source and position."""

  def close(self) -> None:
    """Stops workers and frees their resources."""


class EvalLoader(Protocol):
  """One pass over a split: every example exactly once, with the last batch padded by rows with `mask` 0.

  Every process yields the same number of batches, even if the processes have different numbers of examples.
  """
  num_examples: int

  @property
  def num_bad(self) -> int:
    """Number of this process's images that could not be decoded so far. They have a `mask` of 0, and do not count."""

  def batches(self) -> Iterator[Batch]:
    """Yields batches of host arrays, always with `mask` and `index`: this process's rows."""

  def describe(self, index: int) -> str:
    """Returns a name by which a user can find the example."""

  def close(self) -> None:
    """Stops workers and frees their resources."""
