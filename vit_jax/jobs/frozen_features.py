"""Compares a fine-tuned network with k-NN and logistic regression on the features of the pretrained network.

On a small dataset, k-NN or logistic regression may be as good as fine-tuning, and need one forward pass over the
images. `finetune` calls `report` after the run, which logs the comparison and writes `frozen_features.json`:

  {"of": [weights, digest of the training images, of the evaluated ones],
   "compared": {"knn": 0.8, "logistic": 0.92, "num_images": 100, "seconds": 12.3}}
"""
from __future__ import annotations

import dataclasses
import logging
import math
import shlex
import time
from typing import NamedTuple

import jax

from vit_jax.config import check, files, schema
from vit_jax.core import documents
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.evaluate import results
from vit_jax.jobs import build, evaluate
from vit_jax.record import checkpoint_files, console, run_directory, storage
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')
FILE = 'frozen_features.json'
MAX_IMAGES = 5_000
"""Nothing is compared if the training images and the evaluated images together are more."""
NEIGHBORS = 10  # of k-NN
SPLIT_SETTINGS = ('source', 'train_split', 'eval_split', 'holdout')
"""Settings of `data` that decide which images are trained and evaluated on."""


class Comparison(NamedTuple):
  """Accuracies of k-NN and of logistic regression, 0 to 1; the number of evaluated images; and the duration."""
  knn: float
  logistic: float
  num_images: int
  seconds: float


def report(workdir: storage.Path, config: schema.Config, data: build.Data, network: Weights, *, metric: str) -> None:
  """Logs how good frozen features are, and writes `FILE`. An error becomes a warning.

  Does nothing for many images, multi-label images, several processes, other channels, or a run without the metric.

  Args:
    workdir, config, data: the directory, the config and the data of the finished run.
    network: the pretrained weights.
    metric: the accuracy of the run to compare with, such as `val/top1`.
  """
  can_compare = network.channels == config.data.channels and not config.data.max_labels
  if not can_compare or jax.process_count() > 1 or len(data.train) + len(data.eval) > MAX_IMAGES:
    return
  checkpoint = checkpoint_files.choose(workdir, config.checkpoints.keep_best)
  measured = checkpoint_files.measured(workdir, checkpoint.step) if checkpoint else {}
  tuned = measured.get(f'{metric}@ema', measured.get(metric))  # the EMA weights are evaluated if the run has them
  if tuned is None:
    return
  try:
    comparison = _read_comparison(workdir, network, data) or _compare(workdir, config, data, network)
  except Exception as error:  # any error: the run has succeeded, and must not end with the exit status of a failure
    log.warning('Frozen features were not compared: %s: %s. The results of the run are complete.',
                type(error).__name__, error)
    return
  log.info('%s', describe(comparison, tuned, network.source, config.data))


def describe(comparison: Comparison, tuned: float, weights: str, data: schema.Data) -> str:
  """Returns a line with all accuracies and, if frozen features are as good, a command that measures them again.

  They are as good if the better accuracy is at least `tuned`, of the fine-tuned network, minus one standard error.
  """
  knn, logistic, num_images, seconds = comparison
  error = math.sqrt(tuned * (1 - tuned) / num_images)
  text = (f'Features of {weights} without fine-tuning: k-NN {knn:.2%}, logistic regression {logistic:.2%}; '
          f'fine-tuned {tuned:.2%} of {num_images:,} images (standard error {error:.2%}). Compared in {seconds:.0f} s.')
  if max(knn, logistic) < tuned - error:
    return text
  defaults = files.load('features', []).data
  changed = [f'--config.data.{name}={shlex.quote(str(getattr(data, name)))}' for name in SPLIT_SETTINGS
             if getattr(data, name) != getattr(defaults, name)]
  return (f'{text}\nFrozen features are as good here, and need no training. To measure them again:\n  vit-jax evaluate '
          f'--weights={shlex.quote(weights)} --config=features --config.evals=knn,logistic {" ".join(changed)}')


def _read_comparison(workdir: storage.Path, network: Weights, data: build.Data) -> Comparison | None:
  """Returns the comparison in `FILE` of an earlier start; None if it is damaged, or of other weights or images."""
  try:
    document = documents.read(workdir / FILE)
    if document.field('of').list() != _identity(network, data):
      return None
    compared = document.field('compared')
    return Comparison(compared.field('knn').number(0, 1), compared.field('logistic').number(0, 1),
                    compared.field('num_images').whole(1), compared.field('seconds').number(0))
  except (UserError, TemporaryError):
    return None


def _identity(network: Weights, data: build.Data) -> list[str]:
  """Returns what a comparison depends on, the field `of` of `FILE`."""
  return [network.source, data.train.digest, data.eval.digest]


def _compare(workdir: storage.Path, config: schema.Config, data: build.Data, network: Weights) -> Comparison:
  """Measures the features of the pretrained network on the images of the run, and writes and returns the comparison."""
  console.begin_stage('comparing with frozen features of the pretrained weights')
  began_s = time.monotonic()
  evals: dict[str, schema.Eval] = {'knn': schema.Knn(neighbors=(NEIGHBORS,), headline=NEIGHBORS),
                                   'logistic': schema.Logistic()}
  config = dataclasses.replace(files.load('evaluate', []), data=config.data, evals=evals, batch_size=config.batch_size,
                               train=schema.Train(progress=config.train.progress))
  config = build.with_orientation(evaluate.with_weights(config, network, ()), data.train)
  check.check(config)
  subject = evaluate.make_subject(config, network, has_head=False)
  evaluators = subject.open_resources(data).evaluators()
  measured = results.measure(evaluators, subject.viewed, subject.state).results
  console.end_stage()
  knn = measured['knn']['student']
  logistic = measured['logistic']['student']
  comparison = Comparison(knn.score, logistic.score, knn.num_examples, round(time.monotonic() - began_s, 1))
  run_directory.write_json(workdir / FILE, {'of': _identity(network, data), 'compared': comparison._asdict()})
  return comparison
