"""Settings of optimizers, learning rates, and what differs by parameter."""
import dataclasses
import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import ClassVar

from vit_jax.config import durations
from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import NoEffect, Run, Settings, no_effect, patterns, problem
from vit_jax.config.schema.layers import DType
from vit_jax.config.schema.ranges import duration, ranged

__all__ = ('Adafactor', 'Adam', 'AdamW', 'AnyOptimizer', 'Curve', 'Decay', 'DecayBy', 'Lamb', 'Lars', 'Lion',
           'Muon', 'MuonScale', 'NewtonSchulz', 'Optimizer', 'PathRule', 'RMSProp', 'Ramp', 'Schedule',
           'ScheduleFree', 'Sgd', 'Warmup')


class Decay(enum.Enum):
  """Shape of the learning rate after the warm-up."""
  COSINE = 'cosine'      # down to `end_lr` at the end of the run
  LINEAR = 'linear'      # likewise
  RSQRT = 'rsqrt'        # 1 / sqrt(1 + steps since the warm-up / timescale) (Scaling ViT)
  STEPS = 'steps'        # times `drop` at each of `drops` (BiT-HyperRule)
  EXPONENTIAL = 'exponential'  # times `drop` after every `every`, counted from the start of the run (EfficientNet)
  CONSTANT = 'constant'  # with a cooldown: warm-up, stable, decay (WSD)


class Warmup(enum.Enum):
  """How far a warm-up of w updates has come at update s (from 0), by the program that a recipe is from."""
  MOVING = 'moving'        # (s + 1) / (w + 1): the first update moves, and the peak is reached after the last
  FROM_ZERO = 'from_zero'  # s / w: big_vision, vision_transformer, BiT, MAE, Noisy Student; with stairs timm
  LINSPACE = 'linspace'    # s / (w - 1), the last update at the peak: DINO


_READERS = {
    'decay_from_start': (Decay.COSINE, Decay.LINEAR), 'milestones': (Decay.STEPS,), 'timescale': (Decay.RSQRT,),
    'gamma': (Decay.STEPS, Decay.EXPONENTIAL), 'every': (Decay.EXPONENTIAL,)}
"""The decays that read a setting of `Schedule`, by its name."""


@dataclasses.dataclass
class Schedule(Settings):
  """Learning rate over the run: linear warm-up, then decay, then perhaps a linear cooldown to `end_lr`."""
  decay: Decay = Decay.CONSTANT
  warmup: str = duration('0 steps')  # linear rise of the learning rate
  warmup_form: Warmup = Warmup.MOVING
  warmup_lr: float = ranged(0., r.NOT_NEGATIVE)  # from which it rises (timm: 1e-6)
  # The decay is counted from the start of the run, and the warm-up takes its place at first (timm, DeiT).
  decay_from_start: bool = False  # of cosine and linear
  # The learning rate changes only so often: '1 epoch' (timm); '' = at every update.
  stairs: str = duration('', off=True, zero=False)
  lag: str = duration('', off=True)  # it is that of so long ago: '1 epoch' in DeiT's program; '' = of now
  end_lr: float = ranged(0., r.NOT_NEGATIVE)             # of cosine, linear, and of a cooldown
  cooldown: str = duration('', off=True)  # last part of the run, after rsqrt, steps or constant; '' = none
  hold: str = duration('', off=True)      # last part of the run, at `end_lr` after cosine or linear; '' = none
  timescale: str = duration('10_000 steps', zero=False)  # of rsqrt
  milestones: tuple[str, ...] = duration(())                  # of steps: moments, from the start of the run
  gamma: float = ranged(.1, r.UP_TO_1)                    # of steps and exponential: factor at each
  every: str = duration('2.4 epochs', zero=False)        # of exponential
  without_effect = (
      *(NoEffect('decay', tuple(decay for decay in Decay if decay not in decays), (setting,),
                 advice=f'It is a setting of decay={" and ".join(decay.value for decay in decays)}.')
        for setting, decays in _READERS.items()),
      NoEffect('decay', (Decay.COSINE, Decay.LINEAR), ('cooldown',), ', which reaches end_lr by itself'),
      NoEffect('decay', (Decay.RSQRT, Decay.STEPS, Decay.EXPONENTIAL, Decay.CONSTANT), ('hold',),
               advice='Set cooldown instead.'))

  def problems(self, config: Run, name: str) -> Iterator[str]:
    given = f'with {name}.decay={self.decay.value}'
    if not durations.parse(self.warmup).value:
      yield from no_effect(self, name, ('warmup_form', 'warmup_lr', 'decay_from_start'), f'with {name}.warmup=0 steps')
    if self.decay not in (Decay.COSINE, Decay.LINEAR) and not self.cooldown:
      yield from no_effect(self, name, ('end_lr',), f'{given} and no cooldown')
    if self.decay is Decay.STEPS and not self.milestones:
      yield problem(f'{name}.milestones', f'at least one {given}', ())


class Curve(enum.Enum):
  """How a number gets from one value to another."""
  COSINE = 'cosine'
  LINEAR = 'linear'


@dataclasses.dataclass
class Ramp(Settings):
  """A factor over the run: `start` up to the moment `begin`, `end` after the moment `until`, a curve between."""
  start: float = ranged(1., r.NOT_NEGATIVE)  # factor before `begin`
  end: float = ranged(1., r.NOT_NEGATIVE)  # factor after `until`
  begin: str = duration('0 steps')  # start of the curve
  until: str = duration('100 %')  # end of the curve
  curve: Curve = Curve.COSINE
  # It changes only so often: '1 epoch' (DINO's temperature); '' = at every update.
  stairs: str = duration('', off=True, zero=False)


@dataclasses.dataclass
class PathRule(Settings):
  """What is different for the parameters whose whole path name matches. The first rule that matches decides."""
  paths: str  # pattern of whole path names
  lr: float | Ramp = ranged(1., r.NOT_NEGATIVE)          # times the learning rate
  weight_decay: float | Ramp = ranged(1., r.NOT_NEGATIVE)  # times the weight decay
  # From the start to here no update, no decay, and moments stay; '100 %' = for good.
  frozen_until: str = duration('', off=True)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from patterns(f'{name}.paths', (self.paths,))
    if config.optimizer.weight_decay == 0:
      yield from no_effect(self, name, ('weight_decay',), 'with optimizer.weight_decay=0')


def find_rule(path: str, rules: Sequence[PathRule]) -> PathRule | None:
  """Returns the first rule that matches the path name of a parameter; None if none does.

  A pattern that is not a regular expression, which `PathRule.problems` reports, matches nothing.
  """
  return next((rule for rule in rules if not any(patterns('', [rule.paths])) and re.fullmatch(rule.paths, path)), None)


def is_frozen(path: str, rules: Sequence[PathRule]) -> bool:
  """Returns whether the rules freeze the parameter with this path name for good."""
  rule = find_rule(path, rules)
  return rule is not None and rule.frozen_until == '100 %'


class DecayBy(enum.Enum):
  """What weight decay is multiplied with at each step; all but `gradient` are decoupled (arXiv 1711.05101)."""
  GRADIENT = 'gradient'  # nothing: it is part of the gradient, before the momentum (coupled; only of Sgd)
  LR = 'lr'              # the learning rate, with the factors of layers and rules (optax, PyTorch)
  SCHEDULE = 'schedule'  # the schedule over its peak alone: weight_decay is the product (big_vision)


@dataclasses.dataclass
class Optimizer(Settings):
  """What every optimizer has. Not one itself."""
  after_rate: ClassVar[str] = ''  # code of what comes after the learning rate (`optim/optimizers.py`)
  average: ClassVar[str] = ''  # code of the law of the average that is evaluated, instead of train.ema
  lr: float = ranged(1e-3, r.NOT_NEGATIVE)  # at the peak of the schedule
  # Examples a step that `lr` is for; it is scaled to the batch; 0 = as it is.
  base_batch_size: int = ranged(0, r.COUNT_OR_0)
  weight_decay: float = ranged(0., r.NOT_NEGATIVE)  # strength of the decay of the parameters
  weight_decay_ramp: Ramp = field(default_factory=Ramp)  # factor of it over the run
  weight_decay_mask: tuple[str, ...] = ('.*/kernel',)  # patterns of whole path names
  schedule: Schedule = field(default_factory=Schedule)
  clip_norm: float = ranged(0., r.NOT_NEGATIVE)  # of the whole gradient; 0 = off
  # Patterns of parts of the parameters whose gradients are clipped apart, each with a norm of its own; the rest is one
  # more part. A parameter belongs to the first pattern that matches its whole path name. () = the whole is one.
  clip_parts: tuple[str, ...] = ()
  clip_tensor: float = ranged(0., r.NOT_NEGATIVE)  # norm of each tensor's gradient by layer (qkv is one); 0 = off
  # Gradient over parameter norm, each output unit; not the head; 0 = off.
  clip_adaptive: float = ranged(0., r.NOT_NEGATIVE)
  # Factor of the learning rate from a layer to the one below; 1 = off. What comes before the blocks is layer 0, block i
  # from 0 is i + 1, and the rest depth + 1 (MAE).
  layer_decay: float = ranged(1., r.UP_TO_1)
  rules: tuple[PathRule, ...] = ()  # exceptions for some parameters, the first that matches
  without_effect: ClassVar[tuple[NoEffect, ...]] = (
      NoEffect('clip_norm', (0.,), ('clip_parts',)), NoEffect('weight_decay', (0.,), ('weight_decay_ramp',)))

  def problems(self, config: Run, name: str) -> Iterator[str]:
    clips = {clip: value for clip in ('clip_norm', 'clip_tensor', 'clip_adaptive') if (value := getattr(self, clip))}
    if len(clips) > 1:
      yield problem(name, f'at most one of {", ".join(clips)}', clips, 'Set the others to 0.')
    peak = self.lr * config.batch_size / self.base_batch_size if self.base_batch_size else self.lr
    if self.schedule.end_lr > peak:
      yield problem(f'{name}.schedule.end_lr', f'at most {peak:g}, the peak that {name}.lr={self.lr} gives',
                    self.schedule.end_lr)
    if self.layer_decay != 1 and not hasattr(config.model, 'depth'):
      yield problem(f'{name}.layer_decay', f'1 for {type(config.model).__name__}, which has no blocks to count',
                    self.layer_decay)
    for mask in ('weight_decay_mask', 'trust_ratio_mask', 'clip_parts'):
      yield from patterns(f'{name}.{mask}', getattr(self, mask, ()))
    if self.weight_decay and not self.weight_decay_mask:
      yield problem(f'{name}.weight_decay_mask', f'a pattern with {name}.weight_decay={self.weight_decay}', ())
    by = getattr(self, 'decay_by', None)
    if by is DecayBy.GRADIENT and not isinstance(self, Sgd):
      yield problem(f'{name}.decay_by', f'lr or schedule for {type(self).__name__}, whose weight decay is decoupled',
                    by, 'For coupled weight decay use Adam or Sgd.')
    if by is DecayBy.SCHEDULE and self.lr == 0:
      yield problem(f'{name}.lr', f'a positive number with {name}.decay_by=schedule, which divides by it', self.lr)


@dataclasses.dataclass
class Adam(Optimizer):
  """Adam with coupled decay: `weight_decay * parameter` is added to the gradient, before the moments."""
  implementation: ClassVar[str] = 'vit_jax.optim.adam:adam'
  b1: float = ranged(.9, r.BELOW_1)  # decay of the first moment
  b2: float = ranged(.999, r.BELOW_1)  # decay of the second moment
  eps: float = ranged(1e-8, r.POSITIVE)  # added to the root of the second moment
  mu_dtype: DType = DType.F32  # first moment as it is kept; computed in f32


@dataclasses.dataclass
class AdamW(Adam):
  """Adam with decoupled weight decay: each step takes off `lr * weight_decay * parameter`."""
  implementation: ClassVar[str] = 'vit_jax.optim.adam:adamw'
  decay_by: DecayBy = DecayBy.LR


@dataclasses.dataclass
class Adafactor(Optimizer):
  """Adafactor as Scaling ViT has it (section 3.4): a first moment, no relative step, capped second decay."""
  implementation: ClassVar[str] = 'vit_jax.optim.adafactor:adafactor'
  b1: float = ranged(.9, r.BELOW_1)  # decay of the first moment
  mu_dtype: DType = DType.BF16
  # Largest decay of the second moment, which is 1 - t ** -0.8 at update t from 1.
  b2_cap: float = ranged(.999, r.INSIDE)
  eps: float = ranged(1e-30, r.POSITIVE)  # added to the squared gradient
  decay_by: DecayBy = DecayBy.LR


@dataclasses.dataclass
class Lamb(Adam):
  """LAMB: Adam's update with decay, scaled to the norm of the parameter (arXiv 1904.00962)."""
  implementation: ClassVar[str] = 'vit_jax.optim.adam:lamb'
  eps: float = ranged(1e-6, r.POSITIVE)  # added to the root of the second moment
  trust_ratio_mask: tuple[str, ...] = ('.*',)  # patterns of what is scaled; the rest moves as by AdamW


@dataclasses.dataclass
class Lars(Optimizer):
  """LARS: the gradient with decay, scaled to the norm of the parameter, then momentum (arXiv 1708.03888)."""
  implementation: ClassVar[str] = 'vit_jax.optim.momentum:lars'
  lr: float = ranged(.1, r.NOT_NEGATIVE)  # at the peak of the schedule
  momentum: float = ranged(.9, r.BELOW_1)  # decay of the sum of updates
  trust_coefficient: float = ranged(.001, r.POSITIVE)  # factor of parameter norm over gradient norm
  mu_dtype: DType = DType.F32
  trust_ratio_mask: tuple[str, ...] = ('.*/kernel',)  # patterns of what is scaled; the rest moves as by SGD


@dataclasses.dataclass
class Lion(Optimizer):
  """Lion: the sign of a moment, with decoupled decay (arXiv 2302.06675, Algorithm 2)."""
  implementation: ClassVar[str] = 'vit_jax.optim.momentum:lion'
  lr: float = ranged(1e-4, r.NOT_NEGATIVE)  # at the peak of the schedule
  b1: float = ranged(.9, r.BELOW_1)  # weight of the momentum in the update
  b2: float = ranged(.99, r.BELOW_1)  # decay of the momentum
  mu_dtype: DType = DType.F32
  decay_by: DecayBy = DecayBy.LR


class NewtonSchulz(enum.Enum):
  """The polynomials of five Newton-Schulz iterations, which decide how near to 1 the singular values of updates are."""
  KELLER = 'keller'  # one for all iterations (Jordan): .68 to 1.13
  DION = 'dion'      # one for each (optax's name; timm: quintic): .98 to 1.03


class MuonScale(enum.Enum):
  """The length of a matrix's update, for inputs i and outputs o."""
  RMS = 'rms'      # .2 sqrt(max(i, o)): root mean square .2, as AdamW's; its rates carry over (Moonlight)
  SHAPE = 'shape'  # sqrt(max(1, o / i)) (Jordan); the learning rate is then about .02


@dataclasses.dataclass
class Muon(Optimizer):
  """Muon: momentum made orthogonal for matrices of blocks, AdamW for other parameters (Jordan et al. 2024)."""
  implementation: ClassVar[str] = 'vit_jax.optim.muon:muon'
  matrices: tuple[str, ...] = ('(.*/)?blocks/.*kernel',)  # patterns of what is made orthogonal
  momentum: float = ranged(.95, r.BELOW_1)  # decay of the mean of gradients
  polynomials: NewtonSchulz = NewtonSchulz.KELLER
  dtype: DType = DType.BF16  # of the iterations
  scale: MuonScale = MuonScale.RMS
  b1: float = ranged(.9, r.BELOW_1)  # decay of AdamW's first moment
  b2: float = ranged(.95, r.BELOW_1)  # decay of its second moment
  eps: float = ranged(1e-8, r.POSITIVE)  # added to the root of the second moment
  mu_dtype: DType = DType.F32  # momentum and first moment as they are kept
  decay_by: DecayBy = DecayBy.LR

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    yield from patterns(f'{name}.matrices', self.matrices)


@dataclasses.dataclass
class RMSProp(Optimizer):
  """RMSProp with momentum as TensorFlow 1 has it; weight decay is added to the gradient, as an L2 penalty is."""
  implementation: ClassVar[str] = 'vit_jax.optim.momentum:rmsprop'
  lr: float = ranged(.016, r.NOT_NEGATIVE)  # at the peak of the schedule
  b2: float = ranged(.9, r.BELOW_1)            # decay of the mean of squares, which begins at `initial_scale`
  initial_scale: float = ranged(1., r.NOT_NEGATIVE)  # mean of squares at the start
  eps: float = ranged(1e-3, r.POSITIVE)        # added to the mean of squares, below the root
  momentum: float = ranged(.9, r.BELOW_1)      # of updates that are already multiplied by the learning rate
  mu_dtype: DType = DType.F32                    # momentum as it is kept

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if self.schedule.hold and not self.schedule.end_lr:
      yield problem(f'{name}.schedule.end_lr', f'more than 0 for RMSProp with {name}.schedule.hold, as the learning '
                    'rate is inside its momentum', 0)


@dataclasses.dataclass
class ScheduleFree(Optimizer):
  """Schedule-free AdamW: no decay of the learning rate; the average of the view `ema` is what is evaluated."""
  implementation: ClassVar[str] = 'vit_jax.optim.schedule_free:adamw'
  after_rate: ClassVar[str] = 'vit_jax.optim.schedule_free:interpolate'
  average: ClassVar[str] = 'vit_jax.optim.schedule_free:Average'
  lr: float = ranged(2.5e-3, r.NOT_NEGATIVE)  # after the warm-up
  b1: float = ranged(.9, r.BELOW_1)  # weight of the average in the point where gradients are computed
  b2: float = ranged(.999, r.BELOW_1)  # decay of the second moment
  eps: float = ranged(1e-8, r.POSITIVE)  # added to the root of the second moment
  decay_by: DecayBy = DecayBy.LR

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if self.schedule.decay is not Decay.CONSTANT or self.schedule.cooldown:
      yield problem(f'{name}.schedule', 'decay=constant and no cooldown for ScheduleFree, whose average takes their '
                    'place', f'decay={self.schedule.decay.value}, cooldown={self.schedule.cooldown!r}')
    if config.train.ema:
      yield problem('train.ema', f'0 with {name}=schedulefree, which has an average of its own', config.train.ema)


@dataclasses.dataclass
class Sgd(Optimizer):
  """SGD with momentum. Its weight decay is coupled, as in PyTorch, or decoupled: SGDW, and big_vision's `momentum`."""
  implementation: ClassVar[str] = 'vit_jax.optim.momentum:sgd'
  lr: float = ranged(.01, r.NOT_NEGATIVE)  # at the peak of the schedule
  momentum: float = ranged(.9, r.BELOW_1)  # decay of the sum of gradients
  mu_dtype: DType = DType.F32
  decay_by: DecayBy = DecayBy.GRADIENT
  without_effect = (NoEffect('weight_decay', (0.,), ('decay_by',), advice='Set optimizer.weight_decay for it.'),)


AnyOptimizer = AdamW | Adam | Adafactor | Lamb | Lars | Lion | Muon | RMSProp | ScheduleFree | Sgd | Optimizer
"""The built-in optimizers; the last one stands for a person's own, which inherit from it (`core/implementation.py`)."""
