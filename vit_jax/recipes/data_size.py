"""The study of data size (ViT paper, arXiv 2010.11929, section 4.3): datasets of three sizes (Figure 3), and networks
on nested random subsets of one (Figure 4).

Sources keep their examples in an order that was random when they were written (TFDS, prepared shards) or that a hash of
the names gives (folders), so that the first N are a random subset, and those of a smaller N are among them. All runs of
a network have the same settings, number of updates and no regularization beyond the published weight decay; the
accuracy is that of the moment at which the held-out examples were classified best (early stopping).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import published, studies, transfer

VAL = 'val'
ACCURACY = 'ImageNet %'
SET_FIGURES = (s.Figure('images', ACCURACY, series='model', log_x=True),)
IMAGES, BEST, FEW_SHOT = 'images', 'best val %', 'few-shot %'
FIGURES = (s.Figure(IMAGES, FEW_SHOT, series='model', log_x=True), s.Figure(IMAGES, BEST, series='model', log_x=True))


def sizes(text: str, default: Sequence[int]) -> list[int]:
  """Parses numbers of images such as `1000+4000` or `9e6+30e6`, ascending; '' gives `default`.

  Raises:
    UserError: one is not a positive number.
  """
  numbers = []
  for part in filter(None, text.split('+')):
    try:
      numbers.append(int(float(part)))
    except ValueError:
      raise UserError(f'subsets: expected numbers of images such as 1000+4000+16000, got {part!r}. '
                      'Correct the numbers.') from None
  if any(number < 1 for number in numbers):
    raise UserError(f'subsets: expected positive numbers of images such as 1000+4000+16000, got {text}. '
                    'Correct the numbers.')
  return sorted(set(numbers)) or list(default)


def chosen(networks: Mapping[str, s.Model], text: str) -> dict[str, s.Model]:
  """Returns the networks that `ViT+BiT` names, or all for ''.

  Names with a + of their own cannot be chosen together.

  Raises:
    UserError: a name is unknown.
  """
  names = [text] if text in networks else studies.choose('models', text, networks)
  return {name: network for name, network in networks.items() if name in names}


class Subset(NamedTuple):
  """A network, and the number of images that it is trained on."""
  model: str
  images: int

  @property
  def name(self) -> str:
    """The name of the run."""
    return f'{self.model.replace("/", "_")}_{self.images}'

  def run(self, config: s.Config) -> s.Config:
    """Returns the config of the network, with this subset of its training images."""
    return s.replaced(config, {'name': f'{self.model} {self.images}', 'data.train_split': f'train[:{self.images}]',
                               'data.num_examples': self.images})


def rows(results: s.Results, subsets: Sequence[Subset]) -> list[s.Row]:
  """Returns a row for each run: its best result, and whether a ViT was then ahead of the ResNets on as many images."""
  done = {subset: results[subset.name] for subset in subsets if subset.name in results}
  resnet_scores: dict[int, list[float]] = {}  # by number of images
  for subset, result in done.items():
    if isinstance(result.config.model, s.ResNet) and f'{VAL}/top1' in result.best:
      resnet_scores.setdefault(subset.images, []).append(result.best[f'{VAL}/top1'])
  rows: list[s.Row] = []
  for subset, result in done.items():
    val, rivals = result.best.get(f'{VAL}/top1'), resnet_scores.get(subset.images, [])
    is_ahead = None
    if val is not None and rivals and not isinstance(result.config.model, s.ResNet):
      is_ahead = 'yes' if val > max(rivals) else 'no'
    rows.append({
        'model': subset.model, IMAGES: subset.images, BEST: studies.percent(val),
        FEW_SHOT: studies.percent(studies.few_shot(result.best)), 'ahead of ResNets': is_ahead,
        'last val %': studies.percent(result.metrics.get(f'{VAL}/top1')),
        'best at step': int(result.best.get('step', 0)), 'steps': result.step, 'parameters': result.num_params,
        'exaFLOPs': result.exaflops, 'seconds': round(result.seconds, 1)})
  return rows


def set_rows(results: s.Results, pretrained: Mapping[str, tuple[str, str]], images: Mapping[str, int]) -> list[s.Row]:
  """Returns a row for each network and pre-training set: the accuracy on ImageNet after fine-tuning.

  Args:
    results: of the runs of `pretrained` and, fine-tuned, of those of `transfer.stages`.
    pretrained: network and set of each pre-training run.
    images: of each set.
  """
  rows: list[s.Row] = []
  for run, (model, name) in pretrained.items():
    if run in results:
      result, in_paper = results[run], published.TABLE_5.get(name, {}).get(model)
      tuned = transfer.accuracies(results, ('imagenet2012',), prefix=f'{run}_').get('ImageNet')
      rows.append({'model': model, 'set': name, IMAGES: images[name],
                   ACCURACY: None if tuned is None else round(tuned, 2),
                   'Table 5 %': in_paper[0] if in_paper else None, 'parameters': result.num_params,
                   'exaFLOPs': result.exaflops, 'seconds': round(result.seconds, 1)})
  return rows
