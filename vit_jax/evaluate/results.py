"""Results of evaluators, and of all evaluations of a run: metrics, predictions, `evaluate.json`, `predictions.npz`.

For a truncated split the name of each metric contains the limit, `top1.partial500`, so that every file, table or figure
with the metric shows it. Splits without examples and outputs that are not finite are errors (`check_…`).
"""
from __future__ import annotations

import collections
import dataclasses
import io
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import documents, trees
from vit_jax.core.contracts import Viewed
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray, PyTree
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, read_one
from vit_jax.record import machine, run_directory, storage
from vit_jax.train.state import TrainState

T = TypeVar('T')
TOP = 5  # of the metrics `top5`
NUM_CORRECT, NUM_WRONG, NUM_OF_CLASS = 14, 96, 7
"""Images that are saved for the report: correct ones, and wrong ones at most, in all and of each class."""
_MOST_NAMES = 5  # of weights in a message
THUMBNAIL_PX = 160
"""The longer side of these images at most."""
PARTIAL = '.partial'


def is_share(name: str) -> bool:
  """Returns whether a metric is a share, such as an accuracy: `test/top1@ema`, `few/10shot_std`, `train/accuracy`."""
  known = (r'(.+/)?(top\d+|recall\d+|\d+shot|(\w+_)?accuracy|m?iou|held_out(?!_nll)|class_mean|ece|mfu|map|auroc|f1)'
           r'([._].*)?(@.*)?')
  return re.fullmatch(known, name) is not None


@dataclasses.dataclass(frozen=True)
class Guesses:
  """Predictions for each example: position in the source, label, most likely classes `[S, k]`, their probabilities.

  The label of an example with several is the predicted class if that is one of them; `is_single`: none has several.
  """
  index: np.ndarray
  label: np.ndarray
  top: np.ndarray
  probability: np.ndarray
  is_single: bool = True


class Low(NamedTuple):
  """A metric that is too low for a network of use: its value, the limit, the limit's setting, and what to do."""
  metric: str
  value: float
  below: float
  setting: str
  advice: str


class Result(NamedTuple):
  """The result of an evaluator.

  metrics: by name; fractions, NLL in nats.
  num_examples: number of valid examples; images that could not be decoded are not valid.
  guesses: predictions by row, of evaluators that return them.
  headline: name of the main metric; '' = no metric is an accuracy.
  features_s: seconds spent on computing features; 0 = no features were needed, or they were stored.
  figures: images to save, `[H, W, 3]` u8 by name.
  arrays: a classifier that can be applied to other images, to save; {} = none.
  alarms: metrics that are too low, of which a run warns.
  """
  metrics: dict[str, float]
  num_examples: int
  guesses: Guesses | None
  headline: str
  features_s: float = 0.
  figures: Mapping[str, np.ndarray] = {}
  arrays: Mapping[str, np.ndarray] = {}
  alarms: Sequence[Low] = ()

  @property
  def score(self) -> float:
    """The value of the headline metric."""
    return self.metrics[self.headline]

  @property
  def is_partial(self) -> bool:
    """Whether the split was truncated by a limit."""
    return any(PARTIAL in name for name in self.metrics)


class Measuring(Protocol):
  """Evaluates one view. The result does not depend on the batch size or the number of workers, devices or hosts."""

  def measure(self, selected: PyTree) -> Result:
    """Returns the complete result. Every process must call it."""
    ...


class Fingerprint(NamedTuple):
  """Size and digest of a source, by which a record sees that images were changed after a run; '' = not known."""
  examples: int
  digest: str


def named(metrics: Mapping[str, float], limit: int) -> dict[str, float]:
  """Returns the metrics with `limit` in their names, the number of examples of a truncated split; 0 = not truncated."""
  return {mark(name, limit): value for name, value in metrics.items()}


def mark(name: str, limit: int) -> str:
  """Returns the name of a metric over at most `limit` examples; 0 = all."""
  return f'{name}{PARTIAL}{limit}' if limit else name


def started_ahead(started: Iterable[T]) -> Iterator[T]:
  """Yields what was started for each batch, after that of the next one: the host fetches it while devices compute."""
  waiting: list[T] = []
  for batch in started:
    waiting.append(batch)
    if len(waiting) > 1:
      yield waiting.pop(0)
  yield from waiting


def check_size(name: str, num_examples: int) -> None:
  """Raises UserError if a split is empty."""
  if not num_examples:
    raise UserError(f'{name}: expected a split with at least one example, got none. Choose another split.')


def check_counted(name: str, num_counted: int, num_examples: int) -> None:
  """Raises UserError if a split has no valid example."""
  if not num_counted:
    raise UserError(f'{name}: expected an example that can be decoded and has a label or a caption, got none among '
                    f'{num_examples:,}. Choose another split, or correct its files.')


def check_finite(name: str, num_broken: int, selected: PyTree) -> None:
  """Raises UserError if outputs of a batch are not finite, and names non-finite weights. Every process must call it."""
  if num_broken:
    names = nonfinite_leaves(selected)
    why = (f'these weights hold nan or inf: {documents.joined(names, _MOST_NAMES)}. Use others, such as those of an '
           'earlier checkpoint.' if names else
           'all weights are finite, so numbers overflow inside the network (through its dtype, or images whose range '
           'is not that of its training).')
    raise UserError(f'{name}: expected finite outputs, got others for {num_broken:,} images of a batch: {why}')


def nonfinite_leaves(tree: PyTree) -> list[str]:
  """Returns the path names of leaves with NaN or infinite values."""
  finite = jax.device_get(_finite(tree))
  return [name for name, is_good in trees.flatten(finite).items() if not is_good]


@jax.jit
def _finite(tree: PyTree) -> PyTree:
  return jax.tree.map(
      lambda x: jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(True), tree)


class Final(NamedTuple):
  """Results by evaluation and view; `headline` is the main result, of the evaluation `name` and the view `view`.

  seconds: duration of each evaluation over all its views.
  """
  results: dict[str, dict[str, Result]]
  headline: Result | None
  name: str
  view: str
  seconds: dict[str, float]

  @property
  def metrics(self) -> dict[str, float]:
    """All metrics as `<evaluation>/<metric>[@view]`."""
    return {metric_name(e, metric, view): value for e, views in self.results.items()
            for view, result in views.items() for metric, value in result.metrics.items()}

  @property
  def headline_name(self) -> str:
    """The name of the main result, such as `test/top1@ema`; '' without evaluations."""
    return metric_name(self.name, self.headline.headline, self.view) if self.headline else ''

  @property
  def score(self) -> float | None:
    """The value of the main result, unless it is of segmentation; None without evaluations."""
    return self.headline.score if self.headline and not self.headline.headline.startswith('miou') else None

  @property
  def feature_seconds(self) -> dict[str, float]:
    """The part of `seconds` spent on computing features."""
    return {name: round(sum(result.features_s for result in group.values()), 3)
            for name, group in self.results.items()}


def metric_name(evaluation: str, metric: str, view: str) -> str:
  return f'{evaluation}/{metric}' + ('' if view == 'student' else f'@{view}')


def is_telling(metric: str, num_classes: float) -> bool:
  """Returns whether to show a metric.

  Top-5 with few classes, which is nearly always 1, single seeds, and the IoU by class are not shown.
  """
  is_sure = num_classes <= TOP and re.fullmatch(r'(.+/)?top5([._].*)?(@.*)?', metric)
  return not is_sure and not re.search(r'_seed\d+|(^|/)iou\.', metric)


def measure(evaluators: dict[str, dict[str, Measuring]], objective: Viewed, state: TrainState) -> Final:
  """Runs every evaluation of every view.

  The headline is the first evaluation that has one, of the EMA weights if they exist, else of the raw weights; this
  choice does not depend on the results.
  """
  views = objective.views()
  results: dict[str, dict[str, Result]] = {}
  seconds: dict[str, float] = {}
  for name in in_order(evaluators):
    began = time.monotonic()
    results[name] = {view: evaluator.measure(views[view].select(state.params, state.extra))
                     for view, evaluator in evaluators[name].items()}
    seconds[name] = round(time.monotonic() - began, 3)
  results = {name: results[name] for name in evaluators}
  for name, group in results.items():
    view = 'ema' if 'ema' in group else next(iter(group))
    if group[view].headline:
      return Final(results, group[view], name, view, seconds)
  return Final(results, None, '', '', seconds)


def in_order(evaluators: Mapping[str, Mapping[str, Measuring]]) -> list[str]:
  """Returns the names in the order to run: few-shot is last, because it reuses features that the others stored."""
  def reuses_features(name: str) -> bool:
    return any(getattr(evaluator, 'reuses_features', False) for evaluator in evaluators[name].values())

  return sorted(evaluators, key=reuses_features)


def write(workdir: storage.Path, final: Final, step: int, *, fit: transforms.EvalTransform, source: Source,
          class_names: tuple[str, ...], params_digest: str, data: Mapping[str, Fingerprint]) -> None:
  """Writes `evaluate.json`, `predictions.npz`, figures as `figures/EVALUATION/NAME.png`, and `probes/EVALUATION.npz`.

  Args:
    workdir: the run directory.
    final: the results.
    step: of the weights.
    fit: the preprocessing of the evaluated images.
    source: of the headline evaluation.
    class_names: of the outputs.
    params_digest: of the weights, for `evaluate.json`, which also says how it was made (`record/machine.py`).
    data: what the evaluations read, by source and split.
  """
  headline = final.headline
  run_directory.write_json(workdir / 'evaluate.json', {
      'step': step, 'evaluation': final.name, 'view': final.view,
      'metric': headline.headline if headline else None,
      'top1': final.score,
      'top5': headline.metrics.get('top5') if headline else None,
      'num_examples': headline.num_examples if headline else 0,
      'partial': any(result.is_partial for group in final.results.values() for result in group.values()),
      'metrics': final.metrics, 'seconds': final.seconds, 'feature_seconds': final.feature_seconds,
      'preprocessing': transforms.eval_summary(fit.recipe, fit.image_px), 'params_digest': params_digest,
      'data': {name: fingerprint._asdict() for name, fingerprint in data.items()}, **machine.origin(),
      'processor_s': machine.processor_s()})
  if jax.process_index():
    return
  if headline and headline.guesses is not None:
    _write_predictions(workdir, final, headline.guesses, source, class_names, fit)
  for name, views in final.results.items():
    for view, result in views.items():
      title = metric_name(name, '', view).replace('/', '')
      for figure, image in result.figures.items():
        (workdir / 'figures' / title).mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        Image.fromarray(image).save(content, 'png')
        run_directory.write_bytes(workdir / 'figures' / title / f'{figure}.png', content.getvalue())
      if result.arrays:
        (workdir / 'probes').mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **result.arrays)  # type: ignore[arg-type]
        run_directory.write_bytes(workdir / 'probes' / f'{title}.npz', content.getvalue())


def show(final: Final, *, num_classes: int, recipe: schema.Recipe) -> None:
  """Prints one line per evaluation and view, named if there are several."""
  for name, group in final.results.items():
    for view, result in group.items():
      numbers = '  '.join(f'{metric} {format_number(metric, number)}' for metric, number in result.metrics.items()
                          if is_telling(metric, num_classes))
      part = ', a part of the split' if result.is_partial else ''
      which = f'{view}, ' if len(group) > 1 else ''
      print(f'{name} ({which}{result.num_examples:,} images{part}): {numbers}')
    features = f', of which features {s:.1f} s' if (s := final.feature_seconds[name]) else ''
    print(f'{name} took {final.seconds[name]:.1f} s{features}')
  print('Images are rotated by their EXIF orientation.' if recipe.upright else
        'The EXIF orientation of images is ignored.', flush=True)


def format_number(metric: str, number: float) -> str:
  """Returns the value of a metric as text: in percent if it is a share, else with four decimals, or more if small."""
  if is_share(metric):
    return f'{100 * number:.2f} %'
  return f'{number:.3g}' if 0. < abs(number) < 1e-3 else f'{number:.4f}'


def _write_predictions(workdir: storage.Path, final: Final, guesses: Guesses, source: Source,
                       class_names: tuple[str, ...], fit: transforms.EvalTransform) -> None:
  """Writes `predictions.npz`: all predictions of the headline, and some correctly and wrongly classified images."""
  right = np.flatnonzero(guesses.top[:, 0] == guesses.label)
  spread = right[np.linspace(0, len(right) - 1, min(NUM_CORRECT, len(right))).astype(int)]
  shown, drawn = [], dataclasses.replace(fit, recipe=transforms.at_one_size(fit.recipe))
  for row in [*choose_mistakes(guesses), *spread] if fit.recipe.channels == RGB else ():  # others cannot be drawn
    index = int(guesses.index[row])
    try:
      shown.append((index, source.describe(index), _thumbnail(np.asarray(drawn(read_one(source, index))['image']))))
    except BadImage:
      continue
  content = io.BytesIO()
  np.savez_compressed(
      content, split=final.name, view=final.view, is_single=guesses.is_single, class_names=np.array(class_names),
      index=guesses.index, label=guesses.label, top=guesses.top, probability=guesses.probability,
      example_index=np.array([s[0] for s in shown], np.int32), example_name=np.array([s[1] for s in shown]),
      example_image=np.stack([s[2] for s in shown]) if shown else np.zeros((0, 1, 1, 3), np.uint8))
  run_directory.write_bytes(workdir / 'predictions.npz', content.getvalue())


def choose_mistakes(guesses: Guesses) -> list[int]:
  """Returns rows with wrong predictions: the most confident ones of each class, at most `NUM_OF_CLASS` of each.

  If there are more than `NUM_WRONG`, each class has its first mistake before any class has its second one.
  """
  wrong = np.flatnonzero(guesses.top[:, 0] != guesses.label)
  wrong = wrong[np.argsort(-guesses.probability[wrong, 0], kind='stable')]
  rank, seen = np.zeros(len(wrong), int), collections.Counter[int]()
  for number, label in enumerate(guesses.label[wrong].tolist()):
    rank[number] = seen[label]
    seen[label] += 1
  order = np.argsort(rank, kind='stable')
  return wrong[order[rank[order] < NUM_OF_CLASS]][:NUM_WRONG].tolist()


def _thumbnail(image: HostArray) -> HostArray:
  """Returns an image `[H, W, 3]` u8 whose longer side is at most `THUMBNAIL_PX`."""
  small = Image.fromarray(image)
  small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
  return np.asarray(small)
