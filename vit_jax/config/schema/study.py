"""A study: named runs of the train job, and what is made of their results."""
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import field

from vit_jax.config.schema.checks import Run, Settings, problem
from vit_jax.config.schema.ranges import ANY, COUNT, POSITIVE, SEED, Range, ranged
from vit_jax.config.schema.run import Config

__all__ = ('Choices', 'Distribution', 'Figure', 'Halving', 'Integers', 'LogUniform', 'Result', 'Results', 'Row',
           'Search', 'SearchMethod', 'Sobol', 'Study', 'Uniform')


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
  low: float = ranged(1e-4, POSITIVE)
  high: float = ranged(1e-2, POSITIVE)


@dataclasses.dataclass
class Uniform(_Interval):
  """Numbers between `low` and `high`, in ten thousand steps or more."""
  low: float = ranged(0., ANY)
  high: float = ranged(1., ANY)


@dataclasses.dataclass
class Integers(_Interval):
  """Whole numbers from `low` to `high`, both included."""
  low: int = ranged(1, ANY)
  high: int = ranged(2, ANY)


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
  points: int = ranged(16, COUNT)


@dataclasses.dataclass
class Halving(Settings):
  """Successive halving (Jamieson and Talwalkar, 2016): of the points at a rung, the best 1 in `factor` continue.

  The rungs are at 1, 1 / factor, 1 / factor^2, … of the length of each run. A run that continues does so from its own
  checkpoint.
  """
  points: int = ranged(16, COUNT)
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
  seed: int = ranged(0, SEED)         # of the points

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
