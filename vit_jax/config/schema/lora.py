"""Settings of low-rank adapters: LoRA, rsLoRA and DoRA."""
import dataclasses
import re
from collections.abc import Iterator

from vit_jax.config.schema.checks import Run, Settings, patterns, problem, switched_off
from vit_jax.config.schema.model import Mixer, Model
from vit_jax.config.schema.ranges import BELOW_1, NOT_NEGATIVE, Range, ranged
from vit_jax.config.schema.vit import ViT

__all__ = ('Lora', 'adapted_layers')

EVERY = 'query,key,value,out,mlp/.*,tokens/.*,channels/.*'
"""All dense layers in the blocks of all networks."""
RANKS = Range(0, 16_384)  # no published ViT is as wide
ATTENTION, MLP = ('attn/query', 'attn/key', 'attn/value', 'attn/out'), ('mlp/up', 'mlp/down')


@dataclasses.dataclass
class Lora(Settings):
  """Low-rank adapters (arXiv 2106.09685): the backbone is frozen, and `W + scale A B` takes the place of W."""
  rank: int = ranged(0, RANKS)              # r, the inner size of A B; 0 = off, all parameters are trained
  alpha: float = ranged(0., NOT_NEGATIVE)   # scale is alpha / rank; 0 = alpha is the rank, so the scale is 1
  dropout: float = ranged(0., BELOW_1)      # of the input of A, while training
  # Layers of the blocks, by the end of their path or a pattern of it; several with commas: query,value,mlp/.*
  targets: str = EVERY
  dora: bool = False    # DoRA (arXiv 2402.09353): the norm of each output's weights is a parameter of its own
  rslora: bool = False  # rsLoRA (arXiv 2312.03732): scale is alpha / sqrt(rank)

  @property
  def scale(self) -> float:
    """The factor of A B."""
    return (self.alpha or self.rank) / (self.rank ** .5 if self.rslora else self.rank)

  def is_target(self, layer: str) -> bool:
    """Returns whether the layer with this path in a block, such as `attn/query`, has an adapter."""
    return any(re.fullmatch(f'(.*/)?({end})', layer) for end in self.ends)

  @property
  def ends(self) -> tuple[str, ...]:
    """`targets` one by one."""
    return tuple(self.targets.split(','))

  def problems(self, config: Run, name: str) -> Iterator[str]:
    if not self.rank:
      yield from switched_off(self, name, f'with {name}.rank=0')
      return
    if wrong := list(patterns(f'{name}.targets', self.ends)):
      yield from wrong
      return
    layers = adapted_layers(config.model)
    if not layers:
      yield problem(f'{name}.rank', f'0 for {type(config.model).__name__}, which has no blocks of dense layers',
                    self.rank)
      return
    for target in self.ends:
      if target not in EVERY.split(',') and not any(re.fullmatch(f'(.*/)?({target})', layer) for layer in layers):
        yield problem(f'{name}.targets', f'the ends of {", ".join(layers)}, or patterns', target)
    if not any(self.is_target(layer) for layer in layers):
      yield problem(f'{name}.targets', f'one of {", ".join(layers)} at least', self.targets)
    if config.head.probe:
      yield problem('head.probe', f'false with {name}.rank={self.rank}, as no gradient reaches the backbone of a probe',
                    True)
    if any(rule.frozen_until == '100 %' and re.fullmatch(rule.paths, 'backbone/blocks/attn/query/lora_a')
           for rule in config.optimizer.rules):
      yield (f'optimizer.rules: expected none that freezes the adapters with {name}.rank={self.rank}, got one. Remove '
             'it: the other parameters of the backbone are frozen without a rule.')


def adapted_layers(model: Model) -> tuple[str, ...]:
  """Returns the paths of the dense layers of a block that adapters can be added to.

  It is () for networks without such blocks.
  """
  match model:
    case ViT():
      return tuple(f'{part}/{name}'.lstrip('/') for part in model.block.parts
                   for name in (*ATTENTION, *model.mlp.layers))
    case Mixer():
      return tuple(f'{part}/{name}' for part in ('tokens', 'channels') for name in ('up', 'down'))
    case _:
      return ()
