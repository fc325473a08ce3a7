"""Results of evaluators, and of all evaluations of a run: metrics, predictions, `evaluate.json`, `predictions.npz`.

An evaluator measures one view (the raw or the EMA weights) and returns a `Result`. `measure` runs all evaluators of a
job and returns a `Final`, which `write` writes and `show` prints. For a truncated split the name of each metric has the
limit, `top1.partial500`, so that every file, table or figure with the metric shows it.
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
import numpy as np
from PIL import Image

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core.contracts import Viewed
from vit_jax.core.types import HostArray, PyTree
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, read_one
from vit_jax.record import machine, run_directory, storage
from vit_jax.train.state import TrainState

T = TypeVar('T')
TOP = 5
"""Number of most likely classes that the metrics `top5` accept."""
NUM_CORRECT, NUM_WRONG, NUM_WRONG_OF_CLASS = 14, 96, 7
"""Images that are saved for the report: correct ones; wrong ones at most, in all and of each class."""
THUMBNAIL_PX = 160
"""The longer side of these images at most."""
PARTIAL = '.partial'
_SHARE_METRIC = re.compile(
    r'(.+/)?(top\d+|recall\d+|\d+shot|(\w+_)?accuracy|m?iou|held_out(?!_nll)|class_mean|ece|mfu|map|auroc|f1)([._].*)?(@.*)?')
"""Matches metrics that are shares of 1, such as `test/top1@ema`, `few/10shot_std` and `train/accuracy`."""
_TOP5_METRIC = re.compile(r'(.+/)?top5([._].*)?(@.*)?')
"""Matches `test/top5@ema`, `knn/top5_k20` and the like."""
_DETAIL_METRIC = re.compile(r'_seed\d+|(^|/)iou\.')
"""Finds the metrics of a single seed, `few/5shot_seed0`, and of a single class, `dense/iou.linear.class_cat`."""


def is_share(name: str) -> bool:
  """Returns whether a metric is a share of 1, such as an accuracy: `test/top1@ema`, `few/10shot_std`."""
  return _SHARE_METRIC.fullmatch(name) is not None


def is_telling(metric: str, num_classes: float) -> bool:
  """Returns whether to show a metric.

  Top-5 with few classes, which is nearly always 1, single seeds, and the IoU by class are not shown.
  """
  is_nearly_1 = num_classes <= TOP and _TOP5_METRIC.fullmatch(metric)
  return not is_nearly_1 and not _DETAIL_METRIC.search(metric)


@dataclasses.dataclass(frozen=True)
class Guesses:
  """Predictions for S examples: `index label [S]` i32, `top [S, k]` i32, `probability [S, k]` f32.

  `index` is the position in the source, and `top` has the most likely classes, the most likely first. The label of an
  example with several is the predicted class if that is one of them; `is_single`: none has several.
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
  guesses: predictions, of evaluators that return them.
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
    """Returns the complete result of the selected parameters of a view. Every process must call it."""
    ...


@dataclasses.dataclass(frozen=True)
class Truncated:
  """Measures with an evaluator whose split was truncated to `limit` examples, and marks the names of its metrics."""
  evaluator: Measuring
  limit: int

  @property
  def reuses_features(self) -> bool:
    return reuses_features(self.evaluator)

  def measure(self, selected: PyTree) -> Result:
    """Returns the result of the evaluator, with metrics such as `top1.partial500`."""
    result, ending = self.evaluator.measure(selected), f'{PARTIAL}{self.limit}'
    return result._replace(metrics={f'{name}{ending}': value for name, value in result.metrics.items()},
                           headline=f'{result.headline}{ending}' if result.headline else '')


class Fingerprint(NamedTuple):
  """Size and digest of a source, by which a record sees that images were changed after a run; '' = not known."""
  examples: int
  digest: str


def started_ahead(started: Iterable[T]) -> Iterator[T]:
  """Yields the items one step late, so that devices compute an item while the host fetches the one before it."""
  waiting: list[T] = []
  for item in started:
    waiting.append(item)
    if len(waiting) > 1:
      yield waiting.pop(0)
  yield from waiting


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
    return {metric_name(name, metric, view): value for name, by_view in self.results.items()
            for view, result in by_view.items() for metric, value in result.metrics.items()}

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
    return {name: round(sum(result.features_s for result in by_view.values()), 3)
            for name, by_view in self.results.items()}


def metric_name(evaluation: str, metric: str, view: str) -> str:
  """Returns the complete name of a metric, such as `test/top1` of the view `student`, or `test/top1@ema`."""
  return f'{evaluation}/{metric}' + ('' if view == 'student' else f'@{view}')


def measure(evaluators: dict[str, dict[str, Measuring]], objective: Viewed, state: TrainState) -> Final:
  """Runs every evaluation of every view.

  The headline is the first evaluation that has one, of the EMA weights if they exist, else of the raw weights; this
  choice does not depend on the results.
  """
  views = objective.views()
  results: dict[str, dict[str, Result]] = {}
  seconds: dict[str, float] = {}
  for name in in_order(evaluators):
    began_s = time.monotonic()
    results[name] = {view: evaluator.measure(views[view].select(state.params, state.extra))
                     for view, evaluator in evaluators[name].items()}
    seconds[name] = round(time.monotonic() - began_s, 3)
  results = {name: results[name] for name in evaluators}
  for name, by_view in results.items():
    view = 'ema' if 'ema' in by_view else next(iter(by_view))
    if by_view[view].headline:
      return Final(results, by_view[view], name, view, seconds)
  return Final(results, None, '', '', seconds)


def in_order(evaluators: Mapping[str, Mapping[str, Measuring]]) -> list[str]:
  """Returns the names in the order to run: few-shot is last, because it reuses features that the others stored."""
  return sorted(evaluators, key=lambda name: any(map(reuses_features, evaluators[name].values())))


def reuses_features(evaluator: Measuring) -> bool:
  """Returns whether an evaluator is run after those that store features."""
  return getattr(evaluator, 'reuses_features', False)


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
      'partial': any(result.is_partial for by_view in final.results.values() for result in by_view.values()),
      'metrics': final.metrics, 'seconds': final.seconds, 'feature_seconds': final.feature_seconds,
      'preprocessing': transforms.eval_summary(fit.recipe, fit.image_px), 'params_digest': params_digest,
      'data': {name: fingerprint._asdict() for name, fingerprint in data.items()}, **machine.origin(),
      'processor_s': machine.processor_s()})
  if jax.process_index():
    return
  if headline and headline.guesses is not None:
    _write_predictions(workdir, final, headline.guesses, source, class_names, fit)
  for name, by_view in final.results.items():
    for view, result in by_view.items():
      title = metric_name(name, '', view).replace('/', '')
      for figure, image in result.figures.items():
        content = io.BytesIO()
        Image.fromarray(image).save(content, 'png')
        _write_file(workdir / 'figures' / title, f'{figure}.png', content)
      if result.arrays:
        content = io.BytesIO()
        np.savez(content, **result.arrays)  # type: ignore[arg-type]
        _write_file(workdir / 'probes', f'{title}.npz', content)


def _write_file(folder: storage.Path, name: str, content: io.BytesIO) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  run_directory.write_bytes(folder / name, content.getvalue())


def show(final: Final, *, num_classes: int, recipe: schema.Recipe) -> None:
  """Prints one line per evaluation and view, named if there are several."""
  for name, by_view in final.results.items():
    for view, result in by_view.items():
      numbers = '  '.join(f'{metric} {format_number(metric, number)}' for metric, number in result.metrics.items()
                          if is_telling(metric, num_classes))
      part = ', a part of the split' if result.is_partial else ''
      which = f'{view}, ' if len(by_view) > 1 else ''
      print(f'{name} ({which}{result.num_examples:,} images{part}): {numbers}')
    features_s = final.feature_seconds[name]
    features = f', of which features {features_s:.1f} s' if features_s else ''
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
  correct = np.flatnonzero(guesses.top[:, 0] == guesses.label)
  some_correct = correct[np.linspace(0, len(correct) - 1, min(NUM_CORRECT, len(correct))).astype(int)]
  can_be_drawn = fit.recipe.channels == RGB
  to_pixels = dataclasses.replace(fit, recipe=transforms.at_one_size(fit.recipe))
  indexes, names, images = [], [], []
  for row in [*choose_mistakes(guesses), *some_correct] if can_be_drawn else ():
    index = int(guesses.index[row])
    try:
      images.append(_thumbnail(np.asarray(to_pixels(read_one(source, index))['image'])))
    except BadImage:
      continue
    indexes.append(index)
    names.append(source.describe(index))
  content = io.BytesIO()
  np.savez_compressed(
      content, split=final.name, view=final.view, is_single=guesses.is_single, class_names=np.array(class_names),
      index=guesses.index, label=guesses.label, top=guesses.top, probability=guesses.probability,
      example_index=np.array(indexes, np.int32), example_name=np.array(names),
      example_image=np.stack(images) if images else np.zeros((0, 1, 1, 3), np.uint8))
  run_directory.write_bytes(workdir / 'predictions.npz', content.getvalue())


def choose_mistakes(guesses: Guesses) -> list[int]:
  """Returns rows with wrong predictions: the most confident ones of each class, at most `NUM_WRONG_OF_CLASS` of each.

  If there are more than `NUM_WRONG`, each class has its first mistake before any class has its second one.
  """
  wrong = np.flatnonzero(guesses.top[:, 0] != guesses.label)
  wrong = wrong[np.argsort(-guesses.probability[wrong, 0], kind='stable')]
  rank_in_class, num_seen = np.zeros(len(wrong), int), collections.Counter[int]()
  for i, label in enumerate(guesses.label[wrong].tolist()):
    rank_in_class[i] = num_seen[label]
    num_seen[label] += 1
  order = np.argsort(rank_in_class, kind='stable')
  return wrong[order[rank_in_class[order] < NUM_WRONG_OF_CLASS]][:NUM_WRONG].tolist()


def _thumbnail(image: HostArray) -> HostArray:
  """Returns an image `[H, W, 3]` u8 whose longer side is at most `THUMBNAIL_PX`."""
  small = Image.fromarray(image)
  small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
  return np.asarray(small)
