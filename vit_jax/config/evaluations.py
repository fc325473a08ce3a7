"""Evaluations as in papers, by name."""
from __future__ import annotations

from collections.abc import Callable

from vit_jax.config import schema

DINO_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, .1)
"""Learning rates that DINOv2's linear evaluation tries (arXiv 2304.07193), for 256 examples a step; DINO's is 0.001."""
LAST_FOUR = (-4, -3, -2, -1)


def dino_probe() -> schema.Probe:
  """Returns DINO's linear probe of a ViT-S, with DINOv2's rates.

  It uses class tokens of the last four blocks, and SGD for 100 epochs.
  """
  return schema.Probe(epochs=100, warmup_epochs=0, train_batch_size=1024, learning_rates=DINO_RATES,
                      trust_coefficient=0., batch_norm=False, rate_by_epoch=True,
                      features=schema.FeatureLayers(LAST_FOUR))


NAMES: dict[str, Callable[[], schema.Eval]] = {
    'topk': schema.TopK, 'real': schema.Real, 'fewshot': schema.FewShot, 'knn': schema.Knn,
    'retrieval': schema.Retrieval, 'health': schema.Health, 'logistic': schema.Logistic, 'probe_mae': schema.Probe,
    'probe_dino': dino_probe,
    'zeroshot': schema.ZeroShot, 'caption_retrieval': schema.CaptionRetrieval, 'segmentation': schema.Segmentation}
"""Names that `--config.evals=knn,logistic` accepts in addition to those of the config."""


def named(name: str) -> schema.Eval:
  """Returns the evaluation of one of `NAMES`."""
  return NAMES[name]()
