"""Settings of evaluations."""
import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import NoEffect, Run, Settings, problem
from vit_jax.config.schema.model import FeatureLayers
from vit_jax.config.schema.ranges import Range, duration, ranged

__all__ = ('EVALUATIONS', 'LAST_FOUR', 'CaptionRetrieval', 'Eval', 'Evaluation', 'FeatureEvaluation', 'FewShot',
           'FewShotProtocol', 'FrozenEvaluation', 'Gallery', 'Health', 'Knn', 'Logistic', 'Probe', 'Real', 'Retrieval',
           'Segmentation', 'TextEvaluation', 'TextRule', 'TopK', 'ZeroShot')

TOP_K_METRICS = ('top1', 'top5', 'nll')
"""What `TopK` always measures."""
MORE_METRICS = ('ece', 'class_mean')
"""What `TopK.metrics` may name."""
SEVERAL_LABELS = ('map', 'auroc', 'f1')
"""What `TopK` also measures of images with several labels."""


@dataclasses.dataclass
class Evaluation(Settings):
  """The settings that all evaluations share."""
  every: str = duration('10 epochs')  # between two evaluations
  split: str = ''                          # '' = data.eval_split
  batch_size: int = ranged(0, r.COUNT_OR_0)  # 0 = the training batch size
  views: tuple[str, ...] = ()              # empty = all that the objective has
  limit: int = ranged(0, r.COUNT_OR_0)     # number of examples, marked as partial in every result; 0 = all
  source: str = ''                         # as data.source; '' = the same

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if 'ema' in self.views and not config.has_average:
      yield problem(f'{name}.views', 'no ema with train.ema=0', self.views)
    best = config.checkpoints.keep_best
    if self.limit and f'evals.{best.split("/")[0]}' == name:
      yield problem(f'{name}.limit', f'0 with checkpoints.keep_best={best!r}, which compares complete results',
                    self.limit)


@dataclasses.dataclass
class FeatureEvaluation(Evaluation):
  """Evaluations that read features. They use the class names of their data, not those of the loaded weights' head."""


@dataclasses.dataclass
class FrozenEvaluation(FeatureEvaluation):
  """The settings that evaluations which learn from frozen features share."""
  train_split: str = ''  # '' = data.train_split
  features: FeatureLayers = field(default_factory=FeatureLayers)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if self.features.patches and not self.features.blocks:
      yield problem(f'{name}.features.blocks', f'block numbers, such as -1, with {name}.features.patches=true', ())


def _not_empty(name: str, values: tuple[float, ...]) -> Iterator[str]:
  if not values:
    yield problem(name, 'at least one number', values)


@dataclasses.dataclass
class TopK(Evaluation):
  """Top-1, top-5, NLL over a split, every example once."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.classify:build'
  every: str = duration('1 epoch')  # between two evaluations
  metrics: tuple[str, ...] = ()  # in addition to top1, top5 and nll: ece, class_mean
  # A file that maps the classes of the source to those of the network, one line `source: class, class` each; any of
  # several classes is correct. '' = they have the same names or numbers.
  classes: str = ''
  only_present: bool = False  # predicts only classes that the source has (ImageNet-A, -R)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if not set(self.metrics) <= set(MORE_METRICS):
      yield problem(f'{name}.metrics', f'some of {", ".join(MORE_METRICS)}', self.metrics,
                    f'{", ".join(TOP_K_METRICS)} are always measured.')


@dataclasses.dataclass
class Real(TopK):
  """ImageNet-ReaL (arXiv 2006.07159): any label of an image is correct; images without a label do not count."""
  labels: str = ''  # real.json; '' = the dataset has them: tfds:imagenet2012_real

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if self.classes:
      yield problem(f'{name}.classes', "'', as ReaL labels are numbers of ImageNet classes", self.classes)


class FewShotProtocol(enum.Enum):
  """Which features of which images are regressed, which examples are drawn, and what if a class has too few."""
  RUN = 'run'  # what the head reads, of images as the run evaluates them; a class with too few examples is an error
  # What the last layer reads, after a hidden layer of the head; images of 256 / 224 of the side without their aspect
  # ratio, cropped; the program's random numbers; such a class gives what it has.
  BIG_VISION = 'big_vision'


@dataclasses.dataclass
class FewShot(FrozenEvaluation):
  """Ridge regression on a few examples of each class (ViT paper, section 4.1), by the solver of big_vision.

  For ImageNet `train_split='train[:65000]'` suffices.
  """
  implementation: ClassVar[str] = 'vit_jax.evaluate.fewshot:build'
  protocol: FewShotProtocol = FewShotProtocol.RUN  # whose features, images and examples: the run's or big_vision's
  shots: tuple[int, ...] = ranged((1, 5, 10, 25), r.COUNT)  # examples of each class
  num_seeds: int = ranged(3, r.COUNT)  # draws of examples, whose mean is reported
  l2: float = ranged(1024., r.POSITIVE)  # penalty of the regression
  l2_sweep: tuple[float, ...] = ranged((), r.POSITIVE)  # other values, also chosen among by leave-one-out
  without_effect = (NoEffect('protocol', (FewShotProtocol.BIG_VISION,), ('features',),
                             ', which has features of its own'),)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from _not_empty(f'{name}.shots', self.shots)


@dataclasses.dataclass
class Knn(FrozenEvaluation):
  """Weighted k nearest neighbors by cosine (DINO, arXiv 2104.14294)."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.knn:build'
  neighbors: tuple[int, ...] = ranged((10, 20, 100, 200), r.COUNT)  # values of k
  temperature: float = ranged(.07, r.POSITIVE)  # of the votes
  headline: int = ranged(20, r.COUNT)  # the k of the single number that is reported

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from _not_empty(f'{name}.neighbors', self.neighbors)
    if self.headline not in self.neighbors:
      yield problem(f'{name}.headline', f'one of {name}.neighbors={self.neighbors}', self.headline)


@dataclasses.dataclass
class Health(FeatureEvaluation):
  """Whether features collapse, without labels: RankMe, deviation by dimension, uniformity and alignment."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.health:build'
  images: int = ranged(1024, r.COUNT)         # at most so many of the split, at equal distances
  min_rank: float = ranged(2., r.NOT_NEGATIVE)  # RankMe below which an alarm is raised

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if config.data.recipe.eval_native_patch:
      yield problem('data.recipe.eval_native_patch', f'0 with {name}, which mirrors and crops images of one size',
                    config.data.recipe.eval_native_patch)


class Gallery(enum.Enum):
  """The images that retrieval searches."""
  REST = 'rest'    # all other images of the split: leave-one-out
  TRAIN = 'train'  # the training split


@dataclasses.dataclass
class Retrieval(FrozenEvaluation):
  """Recall@1, @5 and @10: the share of images with one of their class among the K nearest by cosine."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.knn:build_retrieval'
  gallery: Gallery = Gallery.REST  # the images to search
  without_effect = (NoEffect('gallery', (Gallery.REST,), ('train_split',), ', which searches one split'),)


@dataclasses.dataclass
class Logistic(FrozenEvaluation):
  """Multinomial logistic regression to its optimum, with the best of several penalties."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.logistic:build'
  # Factor of |W|^2 / 2, which is added to the mean loss: scikit-learn's 1 / (C N).
  l2: tuple[float, ...] = ranged(
      (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1., 3., 10.), r.POSITIVE)
  holdout: float = ranged(.1, r.INSIDE)          # part of the training examples that chooses among them
  max_steps: int = ranged(500, r.COUNT)          # of L-BFGS

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from _not_empty(f'{name}.l2', self.l2)


@dataclasses.dataclass
class Probe(FrozenEvaluation):
  """A linear classifier trained by SGD on features of images without augmentation; by default MAE's, with LARS."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.probe:build'
  epochs: int = ranged(90, r.COUNT)                   # MAE, Table 10; DINO: 100
  warmup_epochs: int = ranged(10, r.COUNT_OR_0)       # DINO: 0
  train_batch_size: int = ranged(16_384, r.COUNT)     # DINO: 1024
  learning_rates: tuple[float, ...] = ranged((.1,), r.POSITIVE)  # to choose from
  base_batch_size: int = ranged(256, r.COUNT_OR_0)    # of the learning rates, which are scaled to the batch; 0 = off
  momentum: float = ranged(.9, r.SHARE)  # of SGD
  trust_coefficient: float = ranged(.001, r.NOT_NEGATIVE)  # of LARS; 0 = plain SGD (DINO)
  batch_norm: bool = True                    # of the features, without scale and bias; DINO: no
  rate_by_epoch: bool = False                # the learning rate falls once an epoch, and not at every step; DINO: yes
  holdout: float = ranged(.1, r.INSIDE)  # part of the training examples that chooses, where there are several rates

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from _not_empty(f'{name}.learning_rates', self.learning_rates)
    if self.warmup_epochs > self.epochs:
      yield problem(f'{name}.warmup_epochs', f'at most {name}.epochs={self.epochs}', self.warmup_epochs)


class TextRule(enum.Enum):
  """How names of classes and templates of prompts are simplified before they are tokenized."""
  AUTO = 'auto'            # canonical for SigLIP and SigLIP 2, lower for CLIP and TIPS
  CANONICAL = 'canonical'  # lower case without punctuation, spaces for underscores (big_vision)
  LOWER = 'lower'          # lower case, spaces for underscores
  NONE = 'none'            # unchanged


@dataclasses.dataclass
class TextEvaluation(FeatureEvaluation):
  """Evaluations with texts, for weights with a text tower, and for runs that train one."""
  weights: str = ''             # with the text tower; '' = those that are evaluated; of a run its own, or init_from
  tokenizer: str = ''           # its file; '' = beside the weights
  text_rule: TextRule = TextRule.AUTO


@dataclasses.dataclass
class ZeroShot(TextEvaluation):
  """Zero-shot classification by texts (CLIP, arXiv 2103.00020, section 3.1.4), for weights with a text tower.

  An image belongs to the class whose vector is most similar. The vector of a class is the mean of those of its prompts.
  """
  implementation: ClassVar[str] = 'vit_jax.evaluate.zeroshot:build'
  # class_name_only, clip_paper (81 templates), clip_best (8), or a template such as 'a photo of a {}.'
  prompts: str = 'clip_best'
  names: str = ''               # '' = of the data; clip_imagenet; or a file with one name of a class per line
  synonyms: bool = False        # of several names with commas, all are used, and not only the first

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if '{}' in self.prompts and self.prompts.count('{}') != 1:
      yield problem(f'{name}.prompts', 'one {} for the name of the class', self.prompts)


@dataclasses.dataclass
class CaptionRetrieval(TextEvaluation):
  """Recall@K between images and their captions, both ways (arXiv 2103.00020, Table 13), of a source with captions."""
  implementation: ClassVar[str] = 'vit_jax.evaluate.caption_retrieval:build'
  captions: int = ranged(5, r.COUNT)  # most captions of an image, its first ones (COCO: 5)


@dataclasses.dataclass
class Segmentation(FrozenEvaluation):
  """Semantic segmentation of `masks:…` by classifiers of frozen tokens, whose scores are resized to the masks: mIoU.

  The window of `resize_px` is `image_px` of the run. `features.blocks=()` is the last block.
  """
  implementation: ClassVar[str] = 'vit_jax.evaluate.segmentation:build'
  norm: bool = True  # applies the last norm to each of features.blocks, as DINOv2's programs do
  # Short side of an image that windows cover; 0 = one window, to which the image is resized without its aspect ratio.
  resize_px: int = ranged(0, r.PX_OR_0)
  stride_px: int = ranged(0, r.PX_OR_0)  # between windows; 0 = their sides, so that they do not overlap
  tokens_per_image: int = ranged(0, r.COUNT_OR_0)  # drawn of a training image; 0 = all
  token_seed: int = ranged(0, r.SEED)  # of the draw
  # Of logistic regression, as in Logistic: to choose from by the NLL on held-out images; () = no linear classifier.
  l2: tuple[float, ...] = ranged((1e-4, 1e-3, 1e-2, 1e-1), r.POSITIVE)
  holdout: float = ranged(.1, r.INSIDE)          # part of the training images that chooses among them
  max_steps: int = ranged(500, r.COUNT)          # of L-BFGS
  neighbors: tuple[int, ...] = ranged((30,), r.COUNT)  # values of k, of tokens by cosine; () = no k-NN
  temperature: float = ranged(.07, r.POSITIVE)  # of their votes
  ignore: int = ranged(255, Range(-1, 65_535))  # value of pixels that do not count; -1 = none
  first_class: int = ranged(-1, Range(-1, 65_535))  # value of class 0; lower values do not count; -1 = of the source
  num_classes: int = ranged(0, r.COUNT_OR_0)  # 0 = those that the source names
  overlays: int = ranged(0, Range(0, 1000))  # test images that are saved with their masks, true and predicted
  without_effect = (
      NoEffect('resize_px', (0,), ('stride_px',), ', where one window is the whole image'),
      NoEffect('tokens_per_image', (0,), ('token_seed',), ', which takes all'))

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if self.features.patches:
      yield problem(f'{name}.features.patches', 'false, as every token is classified', True)
    if not self.l2 and not self.neighbors:
      yield problem(f'{name}.neighbors', f'at least one number with {name}.l2=()', self.neighbors)
    if self.resize_px and (self.resize_px < min(config.image_px) or self.stride_px > min(config.image_px)):
      yield problem(f'{name}.resize_px', f'at least image_px={config.image_px}, the window, and a stride_px of at most '
                    'that', (self.resize_px, self.stride_px))


Eval = (TopK | Real | FewShot | Knn | Retrieval | Logistic | Probe | Segmentation | ZeroShot | CaptionRetrieval
        | Health | Evaluation)
"""The built-in evaluations; the last one stands for a person's own, which inherit from it, or from a class below it."""
LAST_FOUR = (-4, -3, -2, -1)
"""The last four blocks, whose class tokens DINO's linear probe of a ViT-S reads."""
EVALUATIONS: dict[str, Callable[[], Eval]] = {
    'topk': TopK, 'real': Real, 'fewshot': FewShot, 'knn': Knn, 'retrieval': Retrieval, 'health': Health,
    'logistic': Logistic, 'probe_mae': Probe,
    # DINO's: SGD for 100 epochs. Its rate is 0.001 for 256 examples; these are those of DINOv2 (arXiv 2304.07193).
    'probe_dino': lambda: Probe(
        epochs=100, warmup_epochs=0, train_batch_size=1024, trust_coefficient=0., batch_norm=False, rate_by_epoch=True,
        learning_rates=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, .1),
        features=FeatureLayers(LAST_FOUR)),
    'zeroshot': ZeroShot, 'caption_retrieval': CaptionRetrieval, 'segmentation': Segmentation}
"""Evaluations as in papers, by the names that `--config.evals=knn,logistic` accepts beside those of the config."""
