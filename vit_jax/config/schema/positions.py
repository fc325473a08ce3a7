"""Settings of the positions of a Vision Transformer's tokens: one class for each kind."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema.layers import Network, Part
from vit_jax.config.schema.ranges import ANY, COUNT_OR_0, NOT_NEGATIVE, Range, ranged

__all__ = ('ByIndex', 'Frequencies', 'Learned', 'Learned2d', 'LearnedRotary', 'NoPositions', 'PositionResize',
           'PositionSettings', 'Positions', 'PositionsAt', 'Relative', 'Rotary', 'SinCos', 'UnitInterval')


class PositionsAt(enum.Enum):
  """Where learned positions are added (ViT paper, Appendix D.4)."""
  STEM = 'stem'      # once, after the stem
  LAYERS = 'layers'  # before every block, each with its own
  SHARED = 'shared'  # before every block, the same


class PositionResize(enum.Enum):
  """How learned positions are resized to another token grid. The programs that weights come from differ in it."""
  ALIGNED = 'aligned'            # bilinear, corners aligned, no antialiasing: vision_transformer, big_vision
  BICUBIC = 'bicubic'            # a = -3/4, borders aligned, no antialiasing: DeiT, MAE, transformers
  BICUBIC_OFFSET = 'bicubic_offset'        # likewise, with scale (n + 0.1) / M for M -> n tokens: DINO, DINOv2
  BICUBIC_ANTIALIAS = 'bicubic_antialias'  # a = -1/2, borders aligned, antialiased: timm, DINOv2 with registers
  BILINEAR = 'bilinear'          # borders aligned, no antialiasing: Perception Encoder
  # Likewise, to a square of the longer side, of which the other is cut off: timm's NaFlexViT that keeps the aspect.
  BICUBIC_ANTIALIAS_SQUARE = 'bicubic_antialias_square'
  BILINEAR_ANTIALIAS = 'bilinear_antialias'  # borders aligned, antialiased: TIPS, SigLIP 2 of any size


class PositionSettings(Part):
  """Base of the kinds of position embedding."""
  at: PositionsAt = PositionsAt.STEM  # where they are added
  resize: PositionResize  # of learned vectors, for images of other sizes
  is_resizable: ClassVar[bool] = True  # whether images of other sizes have positions
  is_rotary: ClassVar[bool] = False  # whether queries and keys are rotated
  has_table: ClassVar[bool] = False  # whether there are learned vectors
  has_rows: ClassVar[bool] = False  # whether there is a learned vector for each token


@dataclasses.dataclass
class NoPositions(PositionSettings):
  """No positions: the image is a bag of patches (ViT paper, Appendix D.4)."""
  implementation: ClassVar[str] = 'vit_jax.models.vit.positions:NoPositions'


@dataclasses.dataclass
class Learned(PositionSettings):
  """One learned vector for each token (ViT paper, eq. 1)."""
  at: PositionsAt = PositionsAt.STEM
  resize: PositionResize = PositionResize.ALIGNED  # for images of other sizes
  implementation: ClassVar[str] = 'vit_jax.models.vit.positions:Learned'
  has_table: ClassVar[bool] = True
  has_rows: ClassVar[bool] = True


@dataclasses.dataclass
class Learned2d(PositionSettings):
  """Half of a learned vector for each column, half for each row, concatenated (ViT paper, Appendix D.4)."""
  at: PositionsAt = PositionsAt.STEM
  resize: PositionResize = PositionResize.ALIGNED  # for images of other sizes
  implementation: ClassVar[str] = 'vit_jax.models.vit.positions:Learned2d'
  has_table: ClassVar[bool] = True

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    yield from checks.multiple(f'{name}.width', model.width, 2, f'2 with {own}=learned2d')


class Frequencies(enum.Enum):
  """Program whose frequencies fixed positions have, with temperature 10,000."""
  BIG_VISION = 'big_vision'  # Better plain ViT baselines
  MAE = 'mae'                # MAE; MoCo v3 has rows first


@dataclasses.dataclass
class SinCos(PositionSettings):
  """Fixed 2-D sine-cosine vectors."""
  frequencies: Frequencies = Frequencies.BIG_VISION
  implementation: ClassVar[str] = 'vit_jax.models.vit.positions:SinCos'

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    if model.width % 4 or model.width < 8:
      yield checks.problem(f'{name}.width', f'a multiple of 4, at least 8, with {own}=sincos', model.width)


@dataclasses.dataclass
class Relative(PositionSettings):
  """Learned keys for 1-D offsets, added to the attention logits of every block (ViT paper, Appendix D.4)."""
  implementation: ClassVar[str] = 'vit_jax.models.vit.positions:Relative'
  is_resizable: ClassVar[bool] = False


@dataclasses.dataclass
class ByIndex(checks.Settings):
  """Rows and columns count by their number, in radians (RoPE-ViT, EVA-02, Perception Encoder)."""
  grid: int = ranged(0, COUNT_OR_0)  # a side of any grid counts as so many patches; 0 = as it is
  offset: float = ranged(0., ANY)    # number of the first row and column


@dataclasses.dataclass
class UnitInterval(checks.Settings):
  """Rows and columns count by the center of the patch in an image from -1 to 1, times 2 pi (DINOv3).

  In training these coordinates can change at random, at each pass alike for all images: `(c + a) b s`. Both coordinates
  have an `a` and a `b` of their own, and share `s`. So the network does not depend on one size of images.
  """
  shift: float = ranged(0., NOT_NEGATIVE)     # a is uniform in [-shift, shift]
  jitter: float = ranged(1., Range(1, 100))   # log b is uniform in [-log jitter, log jitter]
  rescale: float = ranged(1., Range(1, 100))  # log s is uniform in [-log rescale, log rescale]

  @property
  def is_drawn(self) -> bool:
    """Whether coordinates change in training."""
    return self.shift > 0 or self.jitter > 1 or self.rescale > 1


@dataclasses.dataclass
class Rotary(PositionSettings):
  """Queries and keys of patches are rotated by row and column (RoPE-ViT, DINOv3)."""
  base: float = ranged(100., Range(1, above=True))  # ratio of the frequencies (RoPE-ViT: 100)
  mixed: bool = False  # frequencies of row and column are learned, in each head (RoPE-ViT, mixed)
  coordinates: ByIndex | UnitInterval = field(default_factory=ByIndex)  # what rows and columns count as
  implementation: ClassVar[str] = 'vit_jax.models.vit.rotary:Rotary'
  is_rotary: ClassVar[bool] = True

  def network_problems(self, model: Network, name: str, own: str) -> Iterator[str]:
    head = f'4 channels for each of {name}.heads={model.heads} with {own}={checks.kind(self)}'
    yield from checks.multiple(f'{name}.width', model.width, 4 * model.heads, head)


@dataclasses.dataclass
class LearnedRotary(Rotary):
  """One learned vector for each token, and rotations (EVA-02, Perception Encoder)."""
  resize: PositionResize = PositionResize.ALIGNED  # of the vectors, for images of other sizes
  implementation: ClassVar[str] = 'vit_jax.models.vit.rotary:LearnedRotary'
  has_table: ClassVar[bool] = True
  has_rows: ClassVar[bool] = True


Positions = Learned | Learned2d | SinCos | NoPositions | Relative | Rotary | LearnedRotary | PositionSettings
