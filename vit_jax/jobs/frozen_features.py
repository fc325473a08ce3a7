"""Compares a fine-tuned network with k-NN and logistic regression on the features of the pretrained network.

On a small dataset, these may be as good as fine-tuning, and need one forward pass over the images. `finetune` calls
`report` after the run has ended, which prints the comparison and keeps it in `frozen_features.json`:

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
MOST_IMAGES = 5_000
"""Nothing is compared if there are more training and evaluated images together."""
NEIGHBORS = 10  # of k-NN
SPLITS = ('source', 'train_split', 'eval_split', 'holdout')
"""Settings that decide which images are trained and evaluated on."""


class Compared(NamedTuple):
  """Accuracies of k-NN and of logistic regression on the evaluated images, their number, and the seconds it took."""
  knn: float
  logistic: float
  num_images: int
  seconds: float


def report(workdir: storage.Path, config: schema.Config, data: build.Data, network: Weights, *, metric: str) -> None:
  """Prints how good frozen features are, and never raises an error.

  Does nothing for many images, multi-label images, several processes, or channels that the weights do not have.

  Args:
    workdir, config, data: the directory, the config and the data of the finished run.
    network: the pretrained weights.
    metric: the accuracy of the run to compare with, such as `val/top1`.
  """
  has_features = network.channels == config.data.channels and not config.data.max_labels
  if not has_features or jax.process_count() > 1 or len(data.train) + len(data.eval) > MOST_IMAGES:
    return
  checkpoint = checkpoint_files.choose(workdir, config.checkpoints.keep_best)
  measured = checkpoint_files.measured(workdir, checkpoint.step) if checkpoint else {}
  tuned = measured.get(f'{metric}@ema', measured.get(metric))  # the EMA weights are those of the run, if there are any
  if tuned is None:
    return
  try:
    compared = _read(workdir, network, data) or _compare(workdir, config, data, network)
  except Exception as error:  # of any part: the run has finished, and must not end as a failed one
    log.warning('Frozen features were not compared: %s: %s. The results of the run are complete.',
                type(error).__name__, error)
    return
  log.info('%s', describe(compared, tuned, network.source, config.data))


def describe(compared: Compared, tuned: float, weights: str, data: schema.Data) -> str:
  """Returns a line with the accuracies; and if frozen features are as good, a command that measures them again.

  They are as good if their better accuracy is at least `tuned`, of the fine-tuned weights, minus one standard error.
  """
  knn, logistic, num, seconds = compared
  error = math.sqrt(tuned * (1 - tuned) / num)
  text = (f'Features of {weights} without fine-tuning: k-NN {knn:.2%}, logistic regression {logistic:.2%}; '
          f'fine-tuned {tuned:.2%} of {num:,} images (standard error {error:.2%}). Compared in {seconds:.0f} s.')
  if max(knn, logistic) < tuned - error:
    return text
  defaults = files.load('features', []).data
  changed = [f'--config.data.{name}={shlex.quote(str(getattr(data, name)))}' for name in SPLITS
             if getattr(data, name) != getattr(defaults, name)]
  return (f'{text}\nFrozen features are as good here, and need no training. To measure them again:\n  vit-jax evaluate '
          f'--weights={shlex.quote(weights)} --config=features --config.evals=knn,logistic {" ".join(changed)}')


def _read(workdir: storage.Path, network: Weights, data: build.Data) -> Compared | None:
  """Returns the comparison in `FILE`, from an earlier start; None if it is not of these weights and images."""
  try:
    document = documents.read(workdir / FILE)
    if document.field('of').list() != _identity(network, data):
      return None
    compared = document.field('compared')
    return Compared(compared.field('knn').number(0, 1), compared.field('logistic').number(0, 1),
                    compared.field('num_images').whole(1), compared.field('seconds').number(0))
  except (UserError, TemporaryError):
    return None


def _identity(network: Weights, data: build.Data) -> list[str]:
  return [network.source, data.train.digest, data.eval.digest]


def _compare(workdir: storage.Path, config: schema.Config, data: build.Data, network: Weights) -> Compared:
  """Measures the features of the pretrained network on the run's images, and writes `FILE`."""
  console.begin_stage('comparing with frozen features of the pretrained weights')
  began = time.monotonic()
  evals: dict[str, schema.Eval] = {'knn': schema.Knn(neighbors=(NEIGHBORS,), headline=NEIGHBORS),
                                   'logistic': schema.Logistic()}
  evaluated = dataclasses.replace(files.load('evaluate', []), data=config.data, evals=evals,
                                  batch_size=config.batch_size, train=schema.Train(progress=config.train.progress))
  evaluated = build.with_orientation(evaluate.with_weights(evaluated, network, ()), data.train)
  check.check(evaluated)
  subject = evaluate.of_weights(evaluated, network, has_head=False)
  shared = subject.open_resources(data)
  measured = results.measure(shared.evaluators(), subject.viewed, subject.state).results
  console.end_stage()
  knn, logistic = (list(measured[name].values())[0] for name in evals)  # frozen features have a single view
  compared = Compared(knn.score, logistic.score, knn.num_examples, round(time.monotonic() - began, 1))
  run_directory.write_json(workdir / FILE, {'of': _identity(network, data), 'compared': compared._asdict()})
  return compared
