"""Settings of the run itself, the whole config of a run, and studies: named runs, and what is made of their results."""
import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import field

from vit_jax.config import durations
from vit_jax.config.schema import ranges as r
from vit_jax.config.schema.checks import NoEffect, Run, Settings, at_most, multiple, no_effect, problem
from vit_jax.config.schema.data import Data
from vit_jax.config.schema.evals import SEVERAL_LABELS, TOP_K_METRICS, Eval, TopK
from vit_jax.config.schema.model import Head, Lora, Model
from vit_jax.config.schema.objective import Objective, Supervised
from vit_jax.config.schema.optim import AdamW, AnyOptimizer, Decay
from vit_jax.config.schema.ranges import Range, duration, ranged
from vit_jax.config.schema.vit import ViT
from vit_jax.core.errors import UserError

__all__ = ('Checkpoints', 'Choices', 'Config', 'Distribution', 'EarlyStop', 'EmaWarmup', 'Figure', 'Halving',
           'InitSettings', 'Integers', 'LogUniform', 'Mesh', 'OnNonfinite', 'Result', 'Results', 'Row', 'Sam', 'Search',
           'SearchMethod', 'Sobol', 'Study', 'Trackers', 'Train', 'Uniform')

MESH = Range(1, 2**20, also=(-1,))
"""Devices along an axis; -1 = the rest."""
MESH_OR_AUTO = Range(1, 2**20, also=(-1, 0))
"""0 = auto: chosen from the hardware."""


class OnNonfinite(enum.Enum):
  """What a loss or gradient that is not finite leads to; the update is never applied."""
  STOP = 'stop'
  SKIP = 'skip'


class EmaWarmup(enum.Enum):
  """The decay d of an EMA at the start of the run; s is the number of updates before."""
  RATIO = 'ratio'  # min(d, (1 + s) / (10 + s)) (TensorFlow)
  POWER = 'power'  # min(d, 1 - (1 + s) ** -2/3) (timm)
  NONE = 'none'    # d throughout: the start of the run weighs d ** s


@dataclasses.dataclass
class Sam(Settings):
  """Sharpness-aware minimization (arXiv 2010.01412), or GSAM (arXiv 2203.08065) with `alpha`. Steps cost double."""
  rho: float = ranged(0., r.NOT_NEGATIVE)    # length of the perturbation at the peak of the learning rate; 0 = off
  # At the end of the learning rate, linear in the rate between; -1 = as rho.
  rho_end: float = ranged(-1., Range(also=(-1,)))
  alpha: float = ranged(0., r.NOT_NEGATIVE)  # of GSAM's surrogate gap; 0 = plain SAM
  without_effect = (NoEffect('rho', (0.,)),)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    schedule = config.optimizer.schedule
    yield from at_most(f'{name}.rho_end', self.rho_end, self.rho, f'{name}.rho')
    if schedule.decay is Decay.CONSTANT and not schedule.cooldown:
      yield from no_effect(self, name, ('rho_end',), 'with a constant learning rate, which rho follows')


@dataclasses.dataclass
class EarlyStop(Settings):
  """Ends the run, as if it were done, when an evaluation has stopped getting better."""
  metric: str = ''                              # such as test/top1@ema; '' = off
  patience: int = ranged(5, r.COUNT)              # evaluations without a new best one that end the run
  min_delta: float = ranged(0., r.NOT_NEGATIVE)   # the least improvement that counts as a new best
  without_effect = (NoEffect('metric', ('',)),)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    yield from _metric_problems(f'{name}.metric', self.metric, config)


@dataclasses.dataclass
class Train(Settings):
  """The run itself."""
  accumulate: int = ranged(0, r.COUNT_OR_0)  # microbatches a step; same result as the whole batch. 0 = auto
  # Threads of XLA on CPUs; the last bits of results depend on them. 0 = the number of cores where the run begins.
  cpu_threads: int = ranged(0, r.COUNT_OR_0)
  portable: bool = False  # on CPUs: the same bits on every x86 processor with AVX2, as far as known; slower
  ema: float = ranged(0., r.BELOW_1)  # decay of a moving average of the parameters (ViT paper: Polyak, .9999); 0 = off
  ema_warmup: EmaWarmup = EmaWarmup.RATIO
  sam: Sam = field(default_factory=Sam)
  early_stop: EarlyStop = field(default_factory=EarlyStop)
  log_every: str = duration('50 steps', zero=False)  # between two lines of metrics
  # How long reads and writes are repeated after their first failure, if storage or the network fails; '0' = not at all.
  retry: str = '5 minutes'
  on_nonfinite: OnNonfinite = OnNonfinite.STOP
  progress: bool = True  # progress bar on a terminal, a line now and then elsewhere
  profile: str = ''  # steps to trace, first..last from 1, such as 100..105; in WORKDIR/profile; '' = none
  # TensorBoard and xprof on any machine can take profiles of each process, on this port plus its index; 0 = off.
  profile_port: int = ranged(0, Range(0, 65_535))
  dump_hlo: bool = False  # compile the train step once more, for its text: WORKDIR/hlo/train_step.txt
  without_effect = (NoEffect('ema', (0.,), ('ema_warmup',)),)

  @property
  def microbatches(self) -> int:
    """`accumulate`, or 1 where it is not chosen yet."""
    return max(1, self.accumulate)

  @property
  def retry_s(self) -> float:
    """`retry` in seconds."""
    return durations.parse_wall(self.retry) or 0.

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if self.retry != '0' and not durations.parse_wall(self.retry):
      yield problem(f'{name}.retry', "minutes or hours, such as '5 minutes', or '0'", self.retry)
    yield from multiple('batch_size', config.batch_size, self.microbatches, f'{name}.accumulate={self.accumulate}')
    if self.accumulate > 1 and config.model.has_batch_norm:
      yield problem(f'{name}.accumulate', f'1 for {type(config.model).__name__}, whose BatchNorm needs statistics of '
                    'the complete batch', self.accumulate)
    if self.accumulate > 1 and self.sam.rho and config.objective.compares_examples:
      yield problem(f'{name}.accumulate', f'1 with {name}.sam.rho={self.sam.rho:g} for objective '
                    f'{type(config.objective).__name__}, which compares all examples of the batch', self.accumulate)
    if self.portable and self.cpu_threads < 2:  # with one thread, some sums follow the caches of the processor
      yield problem(f'{name}.cpu_threads', f'at least 2 with {name}.portable=true', self.cpu_threads,
                    f'Set --config.{name}.cpu_threads=2, or the number of cores of the machines.')
    try:
      durations.parse_steps(self.profile)
    except UserError as error:
      yield f'{name}.profile: {error}'


@dataclasses.dataclass
class Checkpoints(Settings):
  """When checkpoints are made and which stay. The last one is always made, and always stays."""
  every: str = duration('10 %', wall=True)  # between two checkpoints; or '20 minutes', by the clock of process 0
  keep_latest: int = ranged(2, r.COUNT)  # newest checkpoints that stay
  # Keep these for good; a multiple of `every`. '12 hours': at least so far apart.
  keep_every: str = duration('', off=True, wall=True)
  keep_best: str = ''  # a metric, such as test/top1: measured at every checkpoint, of which the best is kept

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if self.keep_best:
      yield from _metric_problems(f'{name}.keep_best', self.keep_best, config)
    if not durations.parse_wall(self.every):
      return
    if self.keep_best:
      yield problem(f'{name}.every', f'steps, epochs or a percentage with {name}.keep_best, which is measured at the '
                    'steps of all checkpoints', self.every)
    if self.keep_every and not durations.parse_wall(self.keep_every):
      yield problem(f'{name}.keep_every', f"minutes or hours with {name}.every='{self.every}'", self.keep_every)


@dataclasses.dataclass
class Mesh(Settings):
  """Devices as a grid. -1, at most once, takes the rest; 0 = auto, chosen by the rules of `parallel/layout.py`."""
  data: int = ranged(-1, MESH)            # splits the batch
  fsdp: int = ranged(0, MESH_OR_AUTO)     # splits the batch, parameters and optimizer state
  tensor: int = ranged(0, MESH_OR_AUTO)   # splits heads, MLP and classes
  # TPU slices, or nodes, that `data` goes over first; fsdp and tensor stay inside one. 0 = as many as there are at each
  # start: a run that lost a slice continues on the others, with more microbatches.
  slices: int = ranged(1, r.COUNT_OR_0)
  chosen: tuple[str, ...] = ()    # written by the program: settings that were auto, such as mesh.fsdp, model.remat
  chosen_for: str = ''            # written by the program: the hardware that they were chosen for
  chosen_slices: int = ranged(0, r.COUNT_OR_0)  # written by the program: slices of the first start, with slices=0
  chosen_parts: int = ranged(1, r.COUNT)        # written by the program: parts of each microbatch, on fewer slices

  def problems(self, config: Run, name: str) -> Iterator[str]:
    sizes = {'data': self.data, 'fsdp': self.fsdp, 'tensor': self.tensor}
    if list(sizes.values()).count(-1) > 1:
      yield problem(name, '-1 (the remaining devices) for at most one axis', sizes)
    if self.slices and self.data > 0:
      yield from multiple(f'{name}.data', self.data, self.slices, f'{name}.slices={self.slices}, or -1')
    if not self.slices and self.data != -1:
      yield problem(f'{name}.data', f'-1 with {name}.slices=0, as the number of devices may change', self.data)


@dataclasses.dataclass
class Trackers(Settings):
  """Where the metrics of a run are shown beside its record. A tracker that fails is a warning; the run continues."""
  tensorboard: bool = True  # event files in the run directory
  wandb: str = ''   # PROJECT or ENTITY/PROJECT of Weights & Biases; '' = off
  mlflow: str = ''  # experiment of MLflow, in the store of $MLFLOW_TRACKING_URI; '' = off
  images: int = ranged(0, Range(0, 64))  # of the first batch, as the network receives them; 0 = none
  histograms: str = duration('', off=True)  # interval of histograms of all parameters

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if self.wandb and (self.wandb.count('/') > 1 or not all(self.wandb.split('/'))):
      yield problem(f'{name}.wandb', "PROJECT, ENTITY/PROJECT or ''", self.wandb)
    if not self.tensorboard and not self.wandb:
      yield from no_effect(self, name, ('images', 'histograms'), 'without TensorBoard and Weights & Biases')


class InitSettings(enum.Enum):
  """Which settings come from the weights of `init_from` where neither the recipe nor the command line sets them.

  A recipe sets what it gives another value than the default here.
  """
  WEIGHTS = 'weights'  # form of the GELU, epsilon, resizing of positions, normalization, resizing of images
  NETWORK = 'network'  # likewise, but images are resized as the config says: protocols of papers
  CONFIG = 'config'    # none; what config.json of a run has, in which they are resolved


@dataclasses.dataclass
class Config(Settings):
  """A run."""
  name: str = 'unnamed'  # of the run, in its report
  seed: int = ranged(0, r.SEED)  # for the parameters, the data order and the augmentation
  length: str = duration('10 epochs', zero=False, percent=False)  # of the training
  batch_size: int = ranged(128, r.COUNT)  # examples a step, over all devices
  image_px: tuple[int, int] = ranged((224, 224), r.PX)  # height, width
  data: Data = field(default_factory=Data)
  model: Model = field(default_factory=ViT)  # network
  head: Head = field(default_factory=Head)
  lora: Lora = field(default_factory=Lora)  # adapters that are trained in place of the backbone
  objective: Objective = field(default_factory=Supervised)  # what is learned
  optimizer: AnyOptimizer = field(default_factory=AdamW)  # update rule, learning rate and weight decay
  train: Train = field(default_factory=Train)
  evals: dict[str, Eval] = field(default_factory=dict)  # evaluations during training, by name
  checkpoints: Checkpoints = field(default_factory=Checkpoints)
  mesh: Mesh = field(default_factory=Mesh)
  trackers: Trackers = field(default_factory=Trackers)
  init_from: str = ''  # weights to begin with: a file, folder, run, address or known name; '' = random ones
  # Of a run given there: student, ema or teacher, '' = ema where there is one; of a file with several networks, which.
  init_view: str = ''
  init_settings: InitSettings = InitSettings.WEIGHTS  # that are not set

  @property
  def has_average(self) -> bool:
    """Whether there is a view `ema`: an average of the parameters."""
    return bool(self.train.ema or self.optimizer.average)

  @property
  def microbatches(self) -> int:
    """Microbatches of a step: `train.accumulate`, on fewer slices than at the first start times the parts of each."""
    return self.train.microbatches * self.mesh.chosen_parts

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if not self.init_from and self.init_view:
      yield problem('init_view', "'' without init_from", self.init_view, 'Set init_from to a run that has this view.')


def _metric_problems(name: str, text: str, config: Config) -> Iterator[str]:
  """Yields problems of `EVALUATION/METRIC[@VIEW]`, the name of a number that an evaluation of the config measures."""
  evaluation, _, rest = text.partition('/')
  metric, _, view = rest.partition('@')
  measured = config.evals.get(evaluation)
  if measured is None:
    known = ', '.join(config.evals) or 'none is configured'
    yield problem(name, f'EVALUATION/METRIC with one of the evaluations ({known})', text)
    return
  if isinstance(measured, TopK) and metric not in (known_metrics := (
      *TOP_K_METRICS, *measured.metrics, *(SEVERAL_LABELS if config.data.max_labels > 1 else ()))):
    yield problem(name, f'one of the metrics of evals.{evaluation}, {", ".join(known_metrics)}', text,
                  f'Others are measured if evals.{evaluation}.metrics names them.')
  if view == 'ema' and not config.has_average:
    yield problem(name, 'no @ema with train.ema=0', text)
  if view == 'student':
    yield problem(name, f'{evaluation}/{metric} for the raw weights, without @', text)
  elif measured.views and (view or 'student') not in measured.views:
    yield problem(name, f'one of the views of evals.{evaluation}, {", ".join(measured.views)}', text)


@dataclasses.dataclass(frozen=True)
class Result:
  """What is known of a run that is done."""
  config: Config
  workdir: str
  step: int                   # updates done
  seconds: float              # wall time of all its starts
  num_params: int
  exaflops: float             # of training, 1e18 floating-point operations
  metrics: dict[str, float]   # as in its final.json: test/top1, test/top1@ema
  headline: float | None      # the one metric a single number is quoted from; None = it has no evaluation
  # Metrics, and `step`, where the metric of train.early_stop, or else checkpoints.keep_best, was best; {} without one.
  best: dict[str, float] = field(default_factory=dict)
  training_processor_s: float = 0.  # of the steps of all its starts and their data, after the first step


Results = dict[str, Result]
"""Results by the name of the run, in the order of the study; runs that failed or are to come are not there."""
Row = dict[str, str | float | int | None]
"""A row of a table: value by column."""


@dataclasses.dataclass
class Figure(Settings):
  """A panel of the study's figure, drawn from columns of its table."""
  x: str
  y: str
  series: str = ''            # column whose values are a line each; '' = one line
  error: str = ''             # column with the half-width of an error bar at each point; '' = none
  log_x: bool = False
  log_y: bool = False


class _Interval(Settings):
  """What distributions over an interval share."""
  low: float
  high: float

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if not self.low < self.high:
      yield problem(name, 'low < high', f'{self.low:g} and {self.high:g}')


@dataclasses.dataclass
class LogUniform(_Interval):
  """Numbers whose logarithm is uniform between those of `low` and `high`, with 4 significant digits."""
  low: float = ranged(1e-4, r.POSITIVE)
  high: float = ranged(1e-2, r.POSITIVE)


@dataclasses.dataclass
class Uniform(_Interval):
  """Numbers between `low` and `high`, in ten thousand steps or more."""
  low: float = ranged(0., r.ANY)
  high: float = ranged(1., r.ANY)


@dataclasses.dataclass
class Integers(_Interval):
  """Whole numbers from `low` to `high`, both included."""
  low: int = ranged(1, r.ANY)
  high: int = ranged(2, r.ANY)


@dataclasses.dataclass
class Choices(Settings):
  """Some values, such as `Choices((16, 32))` or `Choices(('adamw', 'sgd'))`."""
  values: tuple[str | float | bool, ...] = ()

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if len(self.values) < 2:
      yield problem(name, 'at least two values', self.values)


Distribution = LogUniform | Uniform | Integers | Choices


@dataclasses.dataclass
class Sobol(Settings):
  """So many points, each trained to the end."""
  points: int = ranged(16, r.COUNT)


@dataclasses.dataclass
class Halving(Settings):
  """Successive halving (Jamieson and Talwalkar, 2016): of the points at a rung, the best 1 in `factor` continue.

  The rungs are at 1, 1 / factor, 1 / factor^2, … of the length of each run. A run that continues does so from its own
  checkpoint.
  """
  points: int = ranged(16, r.COUNT)
  factor: int = ranged(4, Range(2, 64))
  rungs: int = ranged(0, Range(0, 16))  # with the one at the end; 0 = until the points of a rung are fewer than factor

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if self.points < self.factor and not self.rungs:
      yield problem(f'{name}.points', f'at least {name}.factor={self.factor}, of which the best one continues',
                    self.points, 'Search more points, or set a smaller factor.')


SearchMethod = Sobol | Halving


@dataclasses.dataclass
class Search(Settings):
  """Runs that differ in some settings, whose values are points of a Sobol sequence."""
  base: Config = field(default_factory=Config)
  ranges: dict[str, Distribution] = field(default_factory=dict)  # by setting, such as 'optimizer.lr'
  metric: str = ''                    # decides, such as 'val/top1'; '' = the headline, the number a run is quoted by
  method: SearchMethod = field(default_factory=Sobol)
  seed: int = ranged(0, r.SEED)         # of the points

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if not self.ranges:
      example = "{'optimizer.lr': LogUniform(1e-4, 1e-2)}"
      yield problem(f'{name}.ranges', f'settings with their ranges, such as {example}', self.ranges)
    evaluation = self.metric.partition('/')[0]
    if self.metric and evaluation not in self.base.evals:
      yield problem(f'{name}.metric', f'EVALUATION/METRIC of {", ".join(self.base.evals) or "evals, which has none"}',
                    self.metric)


@dataclasses.dataclass
class Study(Settings):
  """Several runs. Their names are names of directories."""
  name: str = 'unnamed'
  runs: dict[str, Config] = field(default_factory=dict)
  # Each gives further runs from the results of all before it, when these are done: final runs with the best rate.
  then: tuple[Callable[[Results], dict[str, Config]], ...] = ()
  table: Callable[[Results], list[Row]] | None = None  # None = a row a run, with all its metrics
  figures: tuple[Figure, ...] = ()
  # Drawn into the figures as lines through these points, such as fits; the table's rows are then points without lines.
  curves: Callable[[Results], list[Row]] | None = None
  search: Search | None = None  # makes the runs, which are then not given
