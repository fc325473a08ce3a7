"""A study: named runs of the train job, and what is made of their results."""
import dataclasses
from collections.abc import Callable
from dataclasses import field

from vit_jax.config.schema.checks import Settings
from vit_jax.config.schema.run import Config

__all__ = ('Figure', 'Result', 'Results', 'Row', 'Study')


@dataclasses.dataclass(frozen=True)
class Result:
  """What is known of a run that is done."""
  config: Config
  workdir: str
  step: int                   # updates done
  seconds: float              # wall time of its last start
  num_params: int
  exaflops: float             # of training, 1e18 floating-point operations
  metrics: dict[str, float]   # as in its final.json: test/top1, test/top1@ema
  headline: float | None      # the one metric a single number is quoted from; None = it has no evaluation
  # Metrics, and `step`, where the metric of train.early_stop, or else checkpoints.keep_best, was best; {} without one.
  best: dict[str, float] = field(default_factory=dict)


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
