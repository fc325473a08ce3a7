"""The final results of a run or an evaluation: numbers, `evaluate.json`, `predictions.npz`."""
from __future__ import annotations

import collections
import dataclasses
import io
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core.contracts import Viewed
from vit_jax.core.types import HostArray
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, read_one
from vit_jax.evaluate import resources
from vit_jax.evaluate.classify import TOP
from vit_jax.evaluate.results import Guesses, Measuring, Result, is_share
from vit_jax.record import machine, run_directory, storage
from vit_jax.train.state import TrainState

NUM_CORRECT, NUM_WRONG, NUM_OF_CLASS = 14, 96, 7
"""Images that are saved for the report: correct ones, and wrong ones at most, in all and of each class."""
THUMBNAIL_PX = 160
"""The longer side of these images at most."""


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
    return {name: round(sum(one.features_s for one in group.values()), 3) for name, group in self.results.items()}


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
    results[name] = {view: one.measure(views[view].select(state.params, state.extra))
                     for view, one in evaluators[name].items()}
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
    return any(getattr(one, 'reuses_features', False) for one in evaluators[name].values())

  return sorted(evaluators, key=reuses_features)


def write(workdir: storage.Path, final: Final, step: int, *, fit: transforms.EvalTransform, source: Source,
          class_names: tuple[str, ...], params_digest: str, data: Mapping[str, resources.Fingerprint]) -> None:
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
  _write_evaluation(workdir, final, step, fit=fit, params_digest=params_digest, data=data)
  _write_predictions(workdir, final, source, class_names, fit)
  _write_figures(workdir, final)
  _write_arrays(workdir, final)


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


def _write_evaluation(workdir: storage.Path, final: Final, step: int, *, fit: transforms.EvalTransform,
                      params_digest: str, data: Mapping[str, resources.Fingerprint]) -> None:
  """Writes `evaluate.json`; `fit` is the preprocessing of its images."""
  headline = final.headline
  content: dict[str, Any] = {
      'step': step, 'evaluation': final.name, 'view': final.view,
      'metric': headline.headline if headline else None,
      'top1': final.score,
      'top5': headline.metrics.get('top5') if headline else None,
      'num_examples': headline.num_examples if headline else 0,
      'partial': any(result.is_partial for group in final.results.values() for result in group.values()),
      'metrics': final.metrics, 'seconds': final.seconds, 'feature_seconds': final.feature_seconds,
      'preprocessing': transforms.eval_summary(fit.recipe, fit.image_px), 'params_digest': params_digest,
      'data': {name: one._asdict() for name, one in data.items()}, **machine.origin(),
      'processor_s': machine.processor_s()}
  run_directory.write_json(workdir / 'evaluate.json', content)


def _write_figures(workdir: storage.Path, final: Final) -> None:
  for name, views in final.results.items():
    for view, result in views.items() if jax.process_index() == 0 else ():
      for figure, image in result.figures.items():
        folder = workdir / 'figures' / metric_name(name, '', view).rstrip('/').replace('/@', '@')
        folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        Image.fromarray(image).save(content, 'png')
        run_directory.write_bytes(folder / f'{figure}.png', content.getvalue())


def _write_arrays(workdir: storage.Path, final: Final) -> None:
  """Writes the classifiers of evaluations as `probes/EVALUATION.npz`."""
  for name, views in final.results.items():
    for view, result in views.items() if jax.process_index() == 0 else ():
      if result.arrays:
        (workdir / 'probes').mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **result.arrays)  # type: ignore[arg-type]
        run_directory.write_bytes(workdir / 'probes' / f'{metric_name(name, "", view).replace("/", "")}.npz',
                                  content.getvalue())


def _write_predictions(workdir: storage.Path, final: Final, source: Source, class_names: tuple[str, ...],
                      fit: transforms.EvalTransform) -> None:
  """Writes `predictions.npz`: all predictions of the headline, and some correctly and wrongly classified images."""
  if jax.process_index() or final.headline is None or final.headline.guesses is None:
    return
  guesses = final.headline.guesses
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
      index=guesses.index,
      label=guesses.label, top=guesses.top, probability=guesses.probability,
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
  for place, label in enumerate(guesses.label[wrong].tolist()):
    rank[place] = seen[label]
    seen[label] += 1
  order = np.argsort(rank, kind='stable')
  return wrong[order[rank[order] < NUM_OF_CLASS]][:NUM_WRONG].tolist()


def _thumbnail(image: HostArray) -> HostArray:
  """Returns an image `[H, W, 3]` u8 whose longer side is at most `THUMBNAIL_PX`."""
  small = Image.fromarray(image)
  small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
  return np.asarray(small)
