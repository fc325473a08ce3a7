"""Builds the evaluators of a config. Only this module refers to every kind of evaluation."""
from __future__ import annotations

from typing import assert_never

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.evaluate import classify, fewshot, knn, logistic, probe, retrieval, segmentation, zeroshot
from vit_jax.evaluate.bench import Bench, Make
from vit_jax.evaluate.results import Measuring


def build(bench: Bench) -> dict[str, dict[str, Measuring]]:
  """Returns the evaluators by evaluation and view. They share loaders, and features of the same weights."""
  found: dict[str, dict[str, Measuring]] = {}
  for name, settings in bench.config.evals.items():
    chosen = settings.views or tuple(bench.views)
    if not set(chosen) <= set(bench.views):
      raise UserError(f'evals.{name}.views: expected some of {", ".join(bench.views)}, got {", ".join(chosen)}.')
    make = _build(bench, name, settings)
    found[name] = {view: make(view) for view in chosen}
  return found


def _build(bench: Bench, name: str, settings: schema.Eval) -> Make:
  match settings:
    case schema.TopK():  # and Real
      return classify.build(bench, name, settings)
    case schema.FewShot():
      return fewshot.build(bench, name, settings)
    case schema.Knn():
      return knn.build(bench, name, settings)
    case schema.Retrieval():
      return retrieval.build(bench, name, settings)
    case schema.Logistic():
      return logistic.build(bench, name, settings)
    case schema.Probe():
      return probe.build(bench, name, settings)
    case schema.Segmentation():
      return segmentation.build(bench, name, settings)
    case schema.ZeroShot():
      return zeroshot.build(bench, name, settings)
    case _:
      assert_never(settings)
