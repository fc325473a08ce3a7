"""Settings of evaluations."""
import dataclasses


@dataclasses.dataclass
class TopK:
  """Top-1, top-5, NLL over a split, every example once."""
  every: str = '1 epoch'
  split: str = ''              # '' = data.eval_split
  batch_size: int = 0          # 0 = the training batch size
  views: tuple[str, ...] = ()  # empty = all that the objective has
  metrics: tuple[str, ...] = ()  # measured beside top1, top5 and nll: ece, class_mean
