"""Settings of training on images and texts."""
import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

from vit_jax.config.schema import checks
from vit_jax.config.schema.checks import NoEffect, problem
from vit_jax.config.schema.evals import TextRule
from vit_jax.config.schema.objective_base import ObjectiveSettings
from vit_jax.config.schema.ranges import ANY, COUNT, COUNT_OR_0, POSITIVE, Range, ranged

__all__ = ('Activation', 'Contrastive', 'PairForm', 'PairLoss', 'Text', 'TextPool', 'TextProjection', 'Tokens')

BYTE_TOKENS = 259
"""Size of the vocabulary of `Tokens.BYTES`: padding, end, unknown, and the 256 bytes (ByT5, arXiv 2105.13626)."""


class PairLoss(enum.Enum):
  """The loss of a batch of images and texts."""
  SIGMOID = 'sigmoid'  # each pair is a decision of its own (SigLIP, arXiv 2303.15343)
  SOFTMAX = 'softmax'  # of all texts, that of an image; and of all images, that of a text (CLIP, arXiv 2103.00020)


class PairForm(enum.Enum):
  """How the loss of all pairs of a batch is computed on several devices; the result is the same."""
  AUTO = 'auto'      # by the size of the batch and the number of devices (objectives/pair_losses.py)
  MATRIX = 'matrix'  # all logits at once; every device receives all texts
  RING = 'ring'      # texts pass from device to device; memory does not grow with the number of devices


class Tokens(enum.Enum):
  """How texts become tokens: the tokenizer of a family, and the tokens that it adds."""
  BYTES = 'bytes'    # the bytes of UTF-8 and an end (ByT5, arXiv 2105.13626); needs no file
  CLIP = 'clip'      # start, text, end; padded with the end
  SIGLIP = 'siglip'  # text, end; padded with the end, or with <pad> of Gemma's vocabulary (SigLIP 2)
  TIPS = 'tips'      # text; padded with 0


class TextPool(enum.Enum):
  """Which output of the blocks becomes the vector of a text."""
  LAST = 'last'  # of the last token, padding or not (SigLIP)
  END = 'end'    # of the first token with the highest id, which ends the text (CLIP)
  MEAN = 'mean'  # the mean over the tokens that are not padding (TIPS)


class TextProjection(enum.Enum):
  """What maps the vector of a text to the width of the vectors of images."""
  BIAS = 'bias'    # a matrix and a bias (SigLIP, LiT)
  PLAIN = 'plain'  # a matrix (CLIP)
  NONE = 'none'    # nothing: the widths are equal (TIPS)


class Activation(enum.Enum):
  """The activation of the MLP of a text tower."""
  TANH = 'tanh'    # forms of the GELU, as in `Gelu`
  EXACT = 'exact'
  QUICK = 'quick'
  RELU = 'relu'    # max(x, 0) (TIPS)


@dataclasses.dataclass
class Text(checks.Settings):
  """The text tower. With `weights`, all settings of its network are those of the weights."""
  weights: str = ''    # with a text tower, to begin with: of CLIP, SigLIP, TIPS or a run; '' = random ones
  tokens: Tokens = Tokens.BYTES
  tokenizer: str = ''  # the file of the tokenizer, or its folder; '' = beside the weights; bytes has none
  text_rule: TextRule = TextRule.AUTO          # how texts are simplified; bytes: lower
  vocabulary: int = ranged(BYTE_TOKENS, COUNT)  # number of different tokens
  length: int = ranged(64, COUNT)              # tokens of a text: shorter ones are padded, longer ones cut
  width: int = ranged(768, COUNT)              # channels of a token
  depth: int = ranged(12, Range(1, 10_000))    # number of blocks
  heads: int = ranged(12, COUNT)               # attention heads
  mlp: int = ranged(3072, COUNT)               # hidden width of the MLP
  activation: Activation = Activation.TANH
  norm_eps: float = ranged(1e-6, POSITIVE)     # epsilon of LayerNorm
  pool: TextPool = TextPool.LAST
  causal: bool = False                         # a token attends only to itself and to those before it (CLIP)
  sinusoidal: bool = False                     # fixed positions, and embeddings times sqrt(width) (TIPS)
  projection: TextProjection = TextProjection.BIAS
  without_effect = (NoEffect('tokens', (Tokens.BYTES,), ('tokenizer',), ', which has no file'),)

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from checks.multiple(f'{name}.width', self.width, self.heads, f'{name}.heads={self.heads}')
    if self.tokens is not Tokens.BYTES:
      return
    if self.vocabulary < BYTE_TOKENS:
      yield problem(f'{name}.vocabulary', f'at least {BYTE_TOKENS} with {name}.tokens=bytes', self.vocabulary)
    if self.pool is TextPool.END:
      yield problem(f'{name}.pool', f'last or mean with {name}.tokens=bytes, whose end has not the highest id',
                    self.pool)


@dataclasses.dataclass
class Contrastive(ObjectiveSettings):
  """Images and their texts get similar vectors: SigLIP (arXiv 2303.15343), CLIP (2103.00020), LiT (2111.07991).

  A tower that `optimizer.rules` freeze for the whole run only evaluates, as LiT's image tower does.
  """
  implementation: ClassVar[str] = 'vit_jax.objectives.contrastive:Spec'
  has_head: ClassVar[bool] = False
  takes_native: ClassVar[bool] = True
  takes_texts: ClassVar[bool] = True
  compares_examples: ClassVar[bool] = True
  loss: PairLoss = PairLoss.SIGMOID
  text: Text = field(default_factory=Text)
  out_dim: int = ranged(0, COUNT_OR_0)  # to which images are projected, without bias (CLIP); 0 = features as they are
  scale_init: float = ranged(0., Range(0))  # of the logits at the start; 0 = as published: 10, of softmax 1 / 0.07
  scale_max: float = ranged(0., Range(0))   # CLIP: 100; 0 = no limit
  bias_init: float = ranged(-10., ANY)      # of the logits of sigmoid
  form: PairForm = PairForm.AUTO
  chunk: int = ranged(256, COUNT)           # images that the ring compares with the texts of a device at a time
  # '' = the captions of the images; else templates for the names of classes, as in ZeroShot: clip_best, 'a {}.'
  prompts: str = ''
  names: str = ''                           # of classes, for the prompts; as in ZeroShot
  same_class: bool = False  # an image also matches the texts of the other images of its class; for prompts
  without_effect = (
      NoEffect('loss', (PairLoss.SOFTMAX,), ('bias_init',), ', which a bias does not change'),
      NoEffect('form', (PairForm.MATRIX,), ('chunk',), ', which has no chunks'),
      NoEffect('prompts', ('',), ('names', 'same_class'), ', which takes captions'))

  def problems(self, config: checks.Run, name: str) -> Iterator[str]:
    yield from super().problems(config, name)
    if '{}' in self.prompts and self.prompts.count('{}') != 1:
      yield problem(f'{name}.prompts', 'one {} for the name of the class', self.prompts)
    if self.same_class and self.form is PairForm.RING:
      yield problem(f'{name}.form', f'auto or matrix with {name}.same_class=true, which compares all classes at once',
                    self.form)
    if config.data.in_memory.value == 'yes':
      yield problem('data.in_memory', 'auto or no for objective Contrastive, whose texts are drawn on the host at '
                    'every step', config.data.in_memory)
    if config.data.recipe.views.on:
      yield problem('data.recipe.views.on', 'false for objective Contrastive', True)
    if self.out_dim and self.text.projection is TextProjection.NONE and self.text.width != self.out_dim:
      yield problem(f'{name}.out_dim', f'{name}.text.width={self.text.width} with {name}.text.projection=none',
                    self.out_dim)
