"""Settings of evaluations."""
import dataclasses
from collections.abc import Iterator
from dataclasses import field

from vit_jax.config.schema.checks import Run, Settings, problem
from vit_jax.config.schema.model import FeatureLayers
from vit_jax.config.schema.ranges import COUNT, COUNT_OR_0, INSIDE, NOT_NEGATIVE, POSITIVE, SHARE, duration, ranged

TOP_K_METRICS = ('top1', 'top5', 'nll')
"""What `TopK` always measures."""
MORE_METRICS = ('ece', 'class_mean')
"""What `TopK.metrics` may name."""


@dataclasses.dataclass
class Evaluation(Settings):
  """What every evaluation has. Not one itself."""
  every: str = duration('10 epochs')
  split: str = ''                          # '' = data.eval_split
  batch_size: int = ranged(0, COUNT_OR_0)  # 0 = the training batch size
  views: tuple[str, ...] = ()              # empty = all that the objective has
  # a quick look at the first so many examples; marked as partial everywhere; 0 = all
  limit: int = ranged(0, COUNT_OR_0)
  source: str = ''  # like data.source; '' = that

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if 'ema' in self.views and not config.train.ema:
      yield problem(f'{name}.views', 'no ema with train.ema=0', self.views)


@dataclasses.dataclass
class TopK(Evaluation):
  """Top-1, top-5, NLL over a split, every example once."""
  every: str = duration('1 epoch')
  metrics: tuple[str, ...] = ()  # measured beside top1, top5 and nll: ece, class_mean
  # A file that says which classes of the network a class of the source is, if it has other names: `source: class,
  # class` a line; any of several is right. '' = its classes are called as the network's, or numbered like them.
  classes: str = ''
  only_present: bool = False  # only classes that the source has can be guessed (ImageNet-A, -R)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if not set(self.metrics) <= set(MORE_METRICS):
      yield problem(f'{name}.metrics', f'some of {", ".join(MORE_METRICS)}', self.metrics,
                    f'{", ".join(TOP_K_METRICS)} are always measured.')


@dataclasses.dataclass
class Real(TopK):
  """ImageNet-ReaL (arXiv 2006.07159): any of an image's labels is right, images without one do not count."""
  labels: str = ''  # real.json; '' = the set brings them itself: tfds:imagenet2012_real


@dataclasses.dataclass
class FewShot(Evaluation):
  """Ridge regression on a few examples of each class (ViT paper, section 4.1), as big_vision has it."""
  train_split: str = ''                               # '' = data.train_split; of ImageNet train[:65000] is enough
  shots: tuple[int, ...] = ranged((1, 5, 10, 25), COUNT)
  num_seeds: int = ranged(3, COUNT)
  l2: float = ranged(1024., POSITIVE)
  l2_sweep: tuple[float, ...] = ranged((), POSITIVE)  # further ones, and the one that leaving each shot out prefers
  features: FeatureLayers = field(default_factory=FeatureLayers)


@dataclasses.dataclass
class Knn(Evaluation):
  """Weighted k nearest neighbours by cosine (DINO, arXiv 2104.14294)."""
  train_split: str = ''              # '' = data.train_split
  neighbours: tuple[int, ...] = ranged((10, 20, 100, 200), COUNT)
  temperature: float = ranged(.07, POSITIVE)
  headline: int = ranged(20, COUNT)  # the k that a single number is quoted from
  features: FeatureLayers = field(default_factory=FeatureLayers)


@dataclasses.dataclass
class Logistic(Evaluation):
  """Multinomial logistic regression to its optimum, with the best of several penalties."""
  train_split: str = ''  # '' = data.train_split
  # Per example, of |W|^2 / 2 beside the mean loss: scikit-learn's 1 / (C N).

  l2: tuple[float, ...] = ranged(
      (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1., 3., 10.), POSITIVE)
  holdout: float = ranged(.1, INSIDE)            # part of the training examples that chooses among them
  max_steps: int = ranged(500, COUNT)            # of L-BFGS
  tolerance: float = ranged(1e-6, NOT_NEGATIVE)  # largest entry of the gradient at the end
  features: FeatureLayers = field(default_factory=FeatureLayers)


@dataclasses.dataclass
class Probe(Evaluation):
  """A linear classifier trained on features of unaugmented pictures by SGD; by default as MAE's, with LARS."""
  train_split: str = ''                               # '' = data.train_split
  epochs: int = ranged(90, COUNT)                     # MAE, Table 10; DINO: 100
  warmup_epochs: int = ranged(10, COUNT_OR_0)         # DINO: 0
  train_batch_size: int = ranged(16_384, COUNT)       # DINO: 1024
  learning_rates: tuple[float, ...] = ranged((.1,), POSITIVE)  # learning rates to choose from
  # examples a step that they are for; they are scaled to the batch; 0 = as they are
  base_batch_size: int = ranged(256, COUNT_OR_0)
  momentum: float = ranged(.9, SHARE)
  trust_coefficient: float = ranged(.001, NOT_NEGATIVE)  # of LARS; 0 = plain SGD (DINO)
  batch_norm: bool = True                    # of the features, without scale and bias; DINO: no
  holdout: float = ranged(.1, INSIDE)        # part of the training examples that chooses, where there are several rates
  features: FeatureLayers = field(default_factory=FeatureLayers)


Eval = TopK | Real | FewShot | Knn | Logistic | Probe
