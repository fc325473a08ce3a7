"""Evaluations as papers do them, by name, and which settings of evaluations go together."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from vit_jax.config import schema

DINO_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, .1)
"""Learning rates that DINOv2's linear evaluation tries (arXiv 2304.07193), for 256 examples a step; DINO took .001."""
LAST_FOUR = (-4, -3, -2, -1)
FROZEN = schema.FewShot | schema.Knn | schema.Logistic | schema.Probe
"""Evaluations that learn from frozen features."""


def dino_probe() -> schema.Probe:
  """DINO's linear probe of a ViT-S: class tokens of the last four blocks, SGD for 100 epochs, with DINOv2's rates."""
  return schema.Probe(epochs=100, warmup_epochs=0, train_batch_size=1024, learning_rates=DINO_RATES,
                      trust_coefficient=0., batch_norm=False,
                      features=schema.FeatureLayers(LAST_FOUR))


NAMES: dict[str, Callable[[], schema.Eval]] = {
    'topk': schema.TopK, 'real': schema.Real, 'fewshot': schema.FewShot, 'knn': schema.Knn, 'logistic': schema.Logistic,
    'probe_mae': schema.Probe, 'probe_dino': dino_probe}
"""What `--config.evals=knn,logistic` may list beside the evaluations that a config has."""


def named(name: str) -> schema.Eval:
  """The evaluation of one of `NAMES`."""
  return NAMES[name]()


def faults(c: schema.Config) -> Iterator[str]:
  """What is wrong with the evaluations of a config, each with its value and what would be right."""
  yield from _head(c)
  best = c.checkpoints.keep_best.split('/')[0]
  for name, one in c.evals.items():
    where = f'evals.{name}'
    if isinstance(one, FROZEN) and one.features.patches and not one.features.blocks:
      yield f'{where}.features.patches=true needs features.blocks, such as -1'
    if one.limit and name == best:
      yield (f'{where}.limit={one.limit} makes its numbers partial ones, but checkpoints.keep_best='
             f'{c.checkpoints.keep_best!r} goes by them; want limit=0')
    match one:
      case schema.TopK():
        yield from _top_k(where, one)
      case schema.FewShot():
        yield from _few_shot(where, one)
      case schema.Knn():
        yield from _knn(where, one)
      case schema.Logistic():
        yield from _some(f'{where}.l2', one.l2)
      case schema.Probe():
        yield from _probe(where, one)


def _head(c: schema.Config) -> Iterator[str]:
  """What is wrong with a head that is a linear probe."""
  head = c.head
  if not head.probe:
    given = {'features': bool(head.features.blocks) or head.features.patches, 'batch_norm': head.batch_norm}
    yield from (f'head.{name} is for linear probes; want head.probe=true too' for name in given if given[name])
    return
  if not any(rule.frozen_until == '100 %' and re.fullmatch(rule.paths, 'backbone/norm/scale')
             for rule in c.optimizer.rules):
    yield ("head.probe=true trains the head alone; want optimizer.rules with PathRule('backbone/.*', "
           "frozen_until='100 %')")
  if head.batch_norm and c.train.accumulate > 1:
    yield (f'train.accumulate={c.train.accumulate} would give head.batch_norm the statistics of a part of the batch; '
           'want train.accumulate=1')
  if head.features.patches and not head.features.blocks:
    yield 'head.features.patches=true needs head.features.blocks, such as -1'


def _top_k(where: str, one: schema.TopK) -> Iterator[str]:
  if isinstance(one, schema.Real) and one.classes:
    yield f'{where}.classes={one.classes}: ReaL labels are numbers of ImageNet classes; want none'


def _few_shot(where: str, one: schema.FewShot) -> Iterator[str]:
  yield from _some(f'{where}.shots', one.shots)


def _knn(where: str, one: schema.Knn) -> Iterator[str]:
  yield from _some(f'{where}.neighbours', one.neighbours)
  if one.headline not in one.neighbours:
    yield f'{where}.headline={one.headline} is not among neighbours={one.neighbours}; want one of them'


def _probe(where: str, one: schema.Probe) -> Iterator[str]:
  yield from _some(f'{where}.learning_rates', one.learning_rates)
  if one.warmup_epochs > one.epochs:
    yield f'{where}.warmup_epochs: expected at most {where}.epochs={one.epochs}, got {one.warmup_epochs}.'


def _some(name: str, values: tuple[float, ...]) -> Iterator[str]:
  if not values:
    yield f'{name}: expected at least one number, got ().'
