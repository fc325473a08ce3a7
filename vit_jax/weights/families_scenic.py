"""The image towers of TIPS and TIPSv2 in the `.npz` files of their authors' JAX program, which is built on scenic.

The file has the parameters of the program's class VisionEncoder, by their paths. Its layer scale is folded into the
matrices, and it has two class tokens as one tensor: the first one is the class token here, the second one a register,
as in the PyTorch files of the same networks. Positions are those of the patches alone.
"""
from __future__ import annotations

from vit_jax.config.schema import Gelu
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.weights.hints import Hints
from vit_jax.weights.layouts import SAME, Entry, Table
from vit_jax.weights.renaming import Recognized, Tensors
from vit_jax.weights.report import Line

_TOKENS = 'encoder/ToTokenSequence_0'
_CLS, _REGISTERS, _POSITIONS = f'{_TOKENS}/cls', f'{_TOKENS}/cls[1:]', f'{_TOKENS}/posembed_input'
_KERNEL = f'{_TOKENS}/embedding/kernel'
_BLOCK = 'encoder/transformer/encoderblock_{i}'
_GATED = f'{_BLOCK}/FFNSwiGluFused_0'

HINTS = Hints(gelu=Gelu.TANH, norm_eps=1e-6)  # flax's defaults; the PyTorch program of the authors has the exact GELU


def _parts(ours: str, theirs: str, *leaves: str) -> list[Entry]:
  return [Entry(f'{ours}/{leaf}', f'{theirs}/{leaf}', SAME) for leaf in leaves]


_LAYERS = {
    'attn/query': f'{_BLOCK}/MultiHeadDotProductAttention_0/query',
    'attn/key': f'{_BLOCK}/MultiHeadDotProductAttention_0/key',
    'attn/value': f'{_BLOCK}/MultiHeadDotProductAttention_0/value',
    'attn/out': f'{_BLOCK}/MultiHeadDotProductAttention_0/out'}
_PLAIN = {'mlp/up': f'{_BLOCK}/MlpBlock_0/Dense_0', 'mlp/down': f'{_BLOCK}/MlpBlock_0/Dense_1'}
_SWIGLU = {'mlp/gate': f'{_GATED}/Dense_0', 'mlp/up': f'{_GATED}/Dense_1', 'mlp/down': f'{_GATED}/Dense_2'}
"""Of TIPS-g: the swish is of the first layer."""


def _table(mlp: dict[str, str]) -> Table:
  """Returns the names of a network with one of the two kinds of MLPs."""
  blocks = {**_LAYERS, **mlp}
  return (
      *_parts('backbone/stem', f'{_TOKENS}/embedding', 'kernel', 'bias'), Entry('backbone/cls', _CLS, SAME),
      Entry('backbone/registers', _REGISTERS, SAME), Entry('backbone/positions', _POSITIONS, SAME),
      *_parts('backbone/blocks/norm1', f'{_BLOCK}/LayerNorm_0', 'scale', 'bias'),
      *_parts('backbone/blocks/norm2', f'{_BLOCK}/LayerNorm_1', 'scale', 'bias'),
      *(entry for ours, theirs in blocks.items() for entry in _parts(f'backbone/blocks/{ours}', theirs, 'kernel',
                                                                     'bias')),
      *_parts('backbone/norm', 'encoder/encoder_norm', 'scale', 'bias'))


MLP, SWIGLU = _table(_PLAIN), _table(_SWIGLU)


def recognize(tensors: Tensors) -> Recognized | None:
  """Returns the family of an image tower of TIPS with the names of scenic; None for other files.

  Raises:
    UserError: class tokens, positions or the kernel of the patches are missing, or do not have the shape that these
      files have.
  """
  if not any(name.startswith(f'{_TOKENS}/') for name in tensors):
    return None
  cls = _checked(tensors, _CLS, (1, 2, 0))
  table = _checked(tensors, _POSITIONS, (1, 0, 0, 0))
  side = _checked(tensors, _KERNEL, (0, 0, 3, 0)).shape[0]
  found = {**tensors, _CLS: cls[:, :1], _REGISTERS: cls[:, 1:], _POSITIONS: table.reshape(1, -1, table.shape[-1])}
  line = Line(_CLS, 'folded', 'the second class token is a register here')
  is_gated = any('/FFNSwiGluFused_0/' in name for name in tensors)
  return Recognized('tips', SWIGLU if is_gated else MLP, found, (line,),
                    HINTS._replace(image_px=(table.shape[1] * side, table.shape[2] * side)))


def _checked(tensors: Tensors, name: str, shape: tuple[int, ...]) -> HostArray:
  """Returns a tensor. Raises UserError if it is missing or has another shape; 0 stands for any length."""
  found = tensors[name].shape if name in tensors else None
  if found is None or len(found) != len(shape) or any(n not in (0, own) for own, n in zip(found, shape, strict=True)):
    wanted = ', '.join(str(n or 'any') for n in shape)
    raise UserError(f'{name}: expected an array [{wanted}], got {"none" if found is None else list(found)}. Use a file '
                    'as the authors of TIPS published it.')
  return tensors[name]
