"""What an MLP-Mixer costs, by arithmetic."""
from __future__ import annotations

from typing import assert_never

from vit_jax.config import schema
from vit_jax.config.schema import Remat
from vit_jax.models.cost.parts import Costs, item_bytes


def costs(model: schema.Mixer, image_px: tuple[int, int]) -> Costs:
  """All of it; blocks are two MLPs, each after a LayerNorm."""
  width, tokens = model.width, _num_tokens(model, image_px)
  over_tokens, over_channels = 2 * tokens * model.tokens_mlp, 2 * width * model.channels_mlp
  biases = tokens + model.tokens_mlp + width + model.channels_mlp
  parameters = {'stem': (model.patch ** 2 * 3 + 1) * width,
                'blocks': model.depth * (over_tokens + over_channels + biases + 4 * width), 'norm': 2 * width}
  macs = {'stem': tokens * model.patch ** 2 * 3 * width, 'tokens_mlp': model.depth * width * over_tokens,
          'channels_mlp': model.depth * tokens * over_channels}
  return Costs(parameters, macs, _activation_bytes(model, image_px), width)


def _activation_bytes(model: schema.Mixer, image_px: tuple[int, int]) -> int:
  """As of a ViT: what `remat` saves in every block, and the rest of one where something is computed again."""
  size, tokens = item_bytes(model.dtype), _num_tokens(model, image_px)
  wide = tokens * model.width * size
  hidden = (model.width * model.tokens_mlp + tokens * model.channels_mlp) * size
  everything = 2 * tokens * model.width * 4 + 2 * wide + 2 * hidden  # centred inputs of the norms in f32
  match model.remat:
    case Remat.NONE | Remat.AUTO:
      return model.depth * everything
    case Remat.NAMES:  # the input, residual, pre-activations
      saved = 2 * wide + hidden
    case Remat.QKV | Remat.MLP:  # the input, pre-activations
      saved = wide + hidden
    case Remat.FULL:
      saved = wide
    case _:
      assert_never(model.remat)
  return model.depth * saved + everything - saved


def _num_tokens(model: schema.Mixer, image_px: tuple[int, int]) -> int:
  return (image_px[0] // model.patch) * (image_px[1] // model.patch)
