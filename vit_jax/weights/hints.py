"""What is set or known about weights besides their tensors: the options of a person, and `Hints` about the network.

`Reading` has the options of `loading.load`. `Hints` are settings that the shapes of parameters do not determine, from
`--model`, sidecars, published names and families.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, PositionResize
from vit_jax.core.errors import UserError

MOST_PX = 16_384  # side of an image; a network for larger images would not fit in memory
MOST_HEADS = 4096
EPSILON = (1e-15, .999)  # limits of the epsilon of norms
OWN_GRID = -1  # as `ByIndex.grid`: that of the table of positions


class Reading(NamedTuple):
  """The options of `loading.load`, which explains them; jobs get them from flags of these names."""
  preprocess: str = ''
  model: str = ''
  view: str = ''
  allow_download: bool = False
  allow_nonfinite: bool = False


AS_FOUND = Reading()
"""Nothing is set: everything is detected from the weights."""


class Hints(NamedTuple):
  """Settings that shapes do not determine; 0, '' and None: unknown.

  pool: a key of `POOLS`.
  settings: others of `schema.ViT` by dotted names, such as `positions.base`.
  timm_pool: how timm pools tokens, in its words: token, avg or map.
  heads_width: the heads are those of a network of this width; for others they are unknown, see `of_width`.
  """
  heads: int = 0
  decoder_heads: int = 0
  gelu: Gelu | None = None
  norm_eps: float = 0.
  image_px: tuple[int, int] | None = None
  position_resize: PositionResize | None = None
  pool: str = ''
  norm_after_pool: bool = False
  settings: Mapping[str, Any] = {}
  timm_pool: str = ''
  heads_width: int = 0

  def with_fallback(self, other: Hints) -> Hints:
    """Returns these hints, with unknown values replaced by those of `other`."""
    known = Hints._make(own or fallback for own, fallback in zip(self, other, strict=True))
    return known._replace(settings={**other.settings, **self.settings}, heads_width=0)

  def of_width(self, width: int) -> Hints:
    """Returns the hints for a network of this width, without the heads if they are those of another one."""
    return self if width == self.heads_width else self._replace(heads=0)


def parse(text: str) -> Hints:
  """Parses `--model=heads=6,decoder_heads=16,gelu=exact,norm_eps=1e-6,image=224x320,position_resize=bicubic`.

  `pool` is a key of `POOLS`, or a name of other programs: token and tok, gap, 0.

  Raises:
    UserError: the text is not of this form.
  """
  found = schema.parse_arg(text, heads=(), decoder_heads=(), gelu=('', *(g.value for g in Gelu)), norm_eps=(), image=(),
                           position_resize=('', *(p.value for p in PositionResize)), pool=())
  return Hints(
      parse_whole('--model', 'heads', found['heads'], 1, MOST_HEADS),
      parse_whole('--model', 'decoder_heads', found['decoder_heads'], 1, MOST_HEADS),
      Gelu(found['gelu']) if found['gelu'] else None,
      parse_number('--model', 'norm_eps', found['norm_eps'], *EPSILON),
      parse_px('--model', found['image']) if found['image'] else None,
      PositionResize(found['position_resize']) if found['position_resize'] else None, parse_pool(found['pool']))


POOLS: dict[str, schema.PoolSettings] = {
    'cls': schema.ClassToken(), 'mean': schema.Mean(), 'patches': schema.Mean(class_token=True),
    'first': schema.First(), 'map': schema.Map(), 'map_cls': schema.Map(class_token=True)}
"""Kinds of pooling by the words of `--model`; `patches` is the mean beside a class token."""
_OTHER_POOLS = {'token': 'cls', 'tok': 'cls', 'gap': 'mean', '0': 'first'}
UNPOOLED = ('unpooled', 'token_unpooled', 'none')  # names in vision_transformer and big_vision


def parse_pool(text: str) -> str:
  """Returns the pooling of a name, a key of `POOLS`; '' for ''.

  Raises:
    UserError: the name is unknown, or means a network without pooling.
  """
  names = (*_OTHER_POOLS, *POOLS)
  if text in UNPOOLED:
    raise UserError(f'--model=pool: expected one of {", ".join(names)}, got {text}. Such a network gives one answer '
                    'for each token, and all that is computed here is of whole images. Set pool=mean or pool=cls; '
                    'vit-jax inspect reads single tokens.')
  if text and text not in names:
    raise UserError(f'--model=pool: expected one of {", ".join(names)}, got {text}. Choose one of these.')
  return _OTHER_POOLS.get(text, text)


def pool_word(pool: schema.PoolSettings) -> str:
  """Returns the key of `POOLS` for a kind of pooling; the name of its class for a person's own."""
  return next((word for word, one in POOLS.items() if (type(one), one.class_token) == (type(pool), pool.class_token)),
              type(pool).__name__)


def parse_whole(flag: str, name: str, text: str, low: int, high: int) -> int:
  """Parses a whole number from `low` to `high` of a flag such as `--model=heads=6`; 0 for ''. Raises UserError."""
  if not text:
    return 0
  if not re.fullmatch(r'[0-9]{1,9}', text) or not low <= int(text) <= high:
    raise UserError(f'{flag}={name}: expected a whole number, {low:,} to {high:,}, got {text[:40]!r}. '
                    'Correct the number.')
  return int(text)


def parse_number(flag: str, name: str, text: str, low: float, high: float) -> float:
  """Parses a number of a flag as `parse_whole` does; 0 for ''."""
  if not text:
    return 0.
  try:
    found = float(text)
  except ValueError:
    found = math.nan
  if not low <= found <= high:
    raise UserError(f'{flag}={name}: expected a number, {low:g} to {high:g}, got {text[:40]!r}. Correct the number.')
  return found


def parse_px(flag: str, text: str) -> tuple[int, int]:
  """Parses the size of images of a flag, `224` or `224x320` (height x width), px. Raises UserError."""
  if not re.fullmatch(r'[0-9]+(x[0-9]+)?', text):
    raise UserError(f'{flag}=image: expected a size such as 224 or 224x320, got {text[:40]!r}. '
                    'Write the size in one of these forms.')
  height, _, width = text.partition('x')
  return parse_whole(flag, 'image', height, 1, MOST_PX), parse_whole(flag, 'image', width or height, 1, MOST_PX)
