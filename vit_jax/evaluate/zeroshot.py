"""Zero-shot classification by texts (CLIP, arXiv 2103.00020, section 3.1.4), in the protocol of big_vision.

The vector of a class is the mean of the vectors of its prompts, each of unit length, which is then given unit length
itself. An image is assigned to the class whose vector has the largest inner product with its own. Names of metrics hold
the protocol: the list of templates, and the rule by which texts were simplified.
"""
from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray, PyTree
from vit_jax.data.text import prompts as prompting
from vit_jax.evaluate import linear
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.problems import check_single
from vit_jax.evaluate.resources import Encoder, Make, Resources
from vit_jax.evaluate.results import Measuring, Result

log = logging.getLogger('vit_jax.evaluate')
EPS = 1e-8  # added to a length before it divides (big_vision, discriminative_classifier.py)


def class_vectors(encoder: Encoder, prompts: Sequence[Sequence[str]]) -> HostArray:
  """Returns the vector of each class, `[C, E]` f32 of unit length, from the prompts of each class."""
  vectors_TE = encoder.embed([prompt for of_class in prompts for prompt in of_class])
  ends = np.cumsum([len(of_class) for of_class in prompts])
  means_CE = np.stack([part.mean(0, dtype=np.float32) for part in np.split(vectors_TE, ends[:-1])])
  return means_CE / (EPS + np.linalg.norm(means_CE, axis=1, keepdims=True))


class ZeroShot:
  """Evaluator of one view: `top1` and `top5` with the protocol in their names.

  Args:
    test: split to classify.
    encoder: of texts, and of the features.
    prompts: of each class, in the order of the labels.
    protocol: for the names of the metrics, such as `clip_best_canonical`.
  """

  def __init__(self, test: Split, encoder: Encoder, prompts: Sequence[Sequence[str]], *, protocol: str) -> None:
    self._test, self._encoder, self._prompts, self._protocol = test, encoder, prompts, protocol
    self._classes: linear.Linear | None = None

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of examples."""
    placed = self._test.place(self._test.table(selected))
    encoder = self._encoder.at(selected)
    if encoder is not self._encoder or self._classes is None:  # a text tower that is not of the view embeds once
      vectors_CE = class_vectors(encoder, self._prompts)
      self._classes = linear.Linear(jnp.asarray(vectors_CE.T), jnp.zeros(len(vectors_CE)))
    right_top1, right_top5, total = jax.device_get(linear.count_right(
        self._classes, encoder.project(placed['features']), placed['label'], placed['mask'])).tolist()
    self._test.check_counted(total)
    metrics = {f'top1_{self._protocol}': right_top1 / total, f'top5_{self._protocol}': right_top5 / total}
    return Result(metrics, total, None, f'top1_{self._protocol}', self._test.spent_s)


def build(resources: Resources, name: str, settings: schema.ZeroShot) -> Make:
  """Builds the evaluator for each view; all views share one text tower."""
  where, test = f'evals.{name}', resources.eval_source(name)
  check_single(where, test)
  if len(test.class_names) < 2:
    raise UserError(f'{where}: expected guesses among at least two classes, got one, by which each image is right. '
                    'Leave this evaluation out with --config.evals=…, or use data with labels of several classes.')
  encoder = resources.encoder(name, settings)
  rule = encoder.rule if settings.text_rule is TextRule.AUTO else settings.text_rule
  words = prompting.class_names(test.class_names, settings.names, setting=f'{where}.names')
  templates = prompting.find_templates(settings.prompts, setting=f'{where}.prompts')
  prompts = prompting.build(words, templates, rule, synonyms=settings.synonyms)
  log.info('%s: %s classes, %s prompts such as %r.', where, f'{len(prompts):,}', f'{sum(map(len, prompts)):,}',
           prompts[0][0])

  def make(view: str) -> Measuring:
    return ZeroShot(resources.split(name, settings, test, view, in_memory=True), encoder, prompts,
                    protocol=protocol(settings, rule))
  return make


def protocol(settings: schema.ZeroShot, rule: TextRule) -> str:
  """Returns the protocol as a part of a metric's name, such as `clip_best_canonical`."""
  templates = settings.prompts if settings.prompts in prompting.template_sets() else 'template'
  return '_'.join([templates, rule.value, *(['synonyms'] if settings.synonyms else [])])
