"""Settings of tasks: what is learned from a batch."""
import dataclasses
import enum


class Loss(enum.Enum):
  """Classification loss, in nats."""
  SOFTMAX = 'softmax'
  SIGMOID = 'sigmoid'  # one binary cross-entropy a class, summed over classes
  BCE = 'bce'          # likewise, with the mean over classes (DeiT III)


@dataclasses.dataclass
class Supervised:
  """Classification with labels."""
  loss: Loss = Loss.SOFTMAX
  label_smoothing: float = 0.            # targets become (1 - x) * target + x / classes, for every loss
  threshold: float = -1.                 # of sigmoid and bce: targets above it become 1, others 0; -1 = off
  class_weights: tuple[float, ...] = ()  # of an example, by its class; the mean is weighted; () = all alike


class EmaWarmup(enum.Enum):
  """How the decay d of a moving average begins; s is the number of updates before."""
  RATIO = 'ratio'  # min(d, (1 + s) / (10 + s)) (TensorFlow)
  POWER = 'power'  # min(d, 1 - (1 + s) ** -2/3) (timm)
  NONE = 'none'    # d throughout: the start of the run weighs d ** s


@dataclasses.dataclass
class Sam:
  """Sharpness-aware minimisation (arXiv 2010.01412), or GSAM (arXiv 2203.08065) with `alpha`. Twice the cost a step."""
  rho: float = 0.      # length of the perturbation at the peak of the learning rate; 0 = off
  rho_end: float = -1  # at the end of the learning rate, linear in the rate between; -1 = as rho
  alpha: float = 0.    # of GSAM's surrogate gap; 0 = plain SAM
