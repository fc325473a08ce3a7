"""The cost of a Vision Transformer, by arithmetic."""
from __future__ import annotations

from typing import assert_never

from vit_jax.config import schema
from vit_jax.config.schema import DType, Norm, Pool, Positions, PositionsAt, Remat
from vit_jax.models import resnet
from vit_jax.models.counting import Conv, Costs, halved, item_bytes


def costs(model: schema.ViT, image_px: tuple[int, int]) -> Costs:
  """The cost, with that of the stem."""
  stem = _stem_costs(model, image_px)
  parameters, macs = _parameters(model, image_px), _macs(model, image_px)
  inputs = (model.patch // model.stem.stride) ** 2 * stem.width  # of one patch
  parameters['stem'] = sum(stem.parameters.values()) + (inputs + model.stem_bias) * model.width
  macs['stem'] = sum(stem.macs.values()) + num_tokens(model, image_px)[0] * inputs * model.width
  return Costs(parameters, macs, stem.activation_bytes + _activation_bytes(model, image_px), model.width)


def num_tokens(model: schema.ViT, image_px: tuple[int, int]) -> tuple[int, int]:
  """Patch tokens N, and tokens in the encoder M (with class and distillation token, registers)."""
  h, w = _grid(model, image_px)
  return h * w, h * w + model.pool.has_class_token + model.distilled + model.registers


def _parameters(model: schema.ViT, image_px: tuple[int, int]) -> dict[str, int]:
  width, pool_hidden = model.width, model.pool_mlp or model.mlp
  positions, at_layers = _position_parameters(model, image_px), model.positions_at is PositionsAt.LAYERS
  return {
      'stem': 0,
      'cls': width if model.pool.has_class_token else 0,
      'dist': width if model.distilled else 0,
      'registers': model.registers * width,
      'positions': 0 if at_layers else positions,
      'blocks': model.depth * (_num_blocks(model) * _block_parameters(model, image_px) + at_layers * positions),
      'norm': (model.norm_before + model.stem_norm + model.final_norm) * _of_norm(model, width),
      'pool': width + 4 * width * (width + 1) + _of_norm(model, width) + (2 * width + 1) * pool_hidden + width
              if model.pool.is_attention else 0}


def _of_norm(model: schema.ViT, width: int) -> int:
  """Parameters of a norm over `width` channels."""
  return width if model.norm is Norm.RMS else 2 * width


def _macs(model: schema.ViT, image_px: tuple[int, int]) -> dict[str, int]:
  (patches, tokens), width, hidden = num_tokens(model, image_px), model.width, model.mlp
  pooled = tokens if model.pool is Pool.MAP_CLS else patches
  blocks, is_relative = model.depth * _num_blocks(model), model.positions is Positions.RELATIVE
  return {
      'stem': 0,
      'qkv': blocks * tokens * 3 * width ** 2,
      'attention': model.depth * 2 * _attention_entries(model, image_px) * width,
      'relative': blocks * patches * (2 * patches - 1) * width if is_relative else 0,
      'out': blocks * tokens * width ** 2,
      'mlp': blocks * tokens * width * hidden * (3 if model.swiglu else 2),
      'pool': 2 * width * (width + pooled * (width + 1) + (model.pool_mlp or hidden))
              if model.pool.is_attention else 0}


def _stem_costs(model: schema.ViT, image_px: tuple[int, int]) -> Costs:
  """Of the network before the patches; its units are computed again where the blocks are. Its width: channels."""
  match model.stem:
    case schema.PatchStem():
      return Costs({}, {}, 0, 3)
    case schema.ResNetStem():
      remat = Remat.NONE if model.remat.saves_everything else Remat.FULL
      return resnet.stem_costs(model.stem, image_px, dtype=model.dtype, remat=remat)
    case schema.ConvStem():
      return _convolutions(model.stem.width, image_px, size=item_bytes(model.dtype))
    case _:
      assert_never(model.stem)


def _convolutions(width: int, image_px: tuple[int, int], *, size: int) -> Costs:
  """Of three convolutions, each with a norm; kept is what each of them and its norm reads."""
  side = halved(image_px)
  convs = [Conv('stem', 7, 3, width, image_px, side), *[Conv('stem', 3, width, width, side, side)] * 2]
  parameters = sum(conv.parameters + 2 * width for conv in convs)
  kept = sum(conv.input_size + conv.output_size for conv in convs) * size
  return Costs({'stem': parameters}, {'stem': sum(conv.macs for conv in convs)}, kept, width)


def _activation_bytes(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Of the blocks."""
  everything, blocks = _layer_bytes(model, image_px), _num_blocks(model)
  tokens, size = num_tokens(model, image_px)[1], item_bytes(model.dtype)
  wide, hidden = tokens * model.width * size, tokens * model.mlp * size * (2 if model.swiglu else 1)
  match model.remat:
    case Remat.NONE | Remat.AUTO:
      saved = everything
    case Remat.NAMES:  # the input, and of each block query, key, value, attention, residual, MLP pre-activation
      saved = wide + blocks * ((4 if model.parallel else 5) * wide + hidden)
    case Remat.QKV:  # the input, query, key, value, MLP pre-activation
      saved = wide + blocks * (3 * wide + hidden)
    case Remat.MLP:  # the input, MLP pre-activation
      saved = wide + blocks * hidden
    case Remat.FULL:
      saved = wide
  return model.full_remat * wide + (model.depth - model.full_remat) * saved + everything - saved


def _grid(model: schema.ViT, image_px: tuple[int, int]) -> tuple[int, int]:
  return image_px[0] // model.patch, image_px[1] // model.patch


def _num_blocks(model: schema.ViT) -> int:
  """Blocks a layer: a row block and a column block with axial attention."""
  return 2 if model.axial else 1


def _attention_entries(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Pairs of query and key that one head of one layer weighs."""
  patches, tokens = num_tokens(model, image_px)
  return patches * sum(_grid(model, image_px)) if model.axial else tokens ** 2


def _position_parameters(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Parameters of one table of learned positions."""
  match model.positions:
    case Positions.LEARNED | Positions.LEARNED_ROTARY2D:
      return (num_tokens(model, image_px)[1] - model.registers) * model.width
    case Positions.LEARNED2D:
      return sum(_grid(model, image_px)) * model.width // 2
    case _:
      return 0


def _block_parameters(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Parameters of one block without positions."""
  width, hidden, patches = model.width, model.mlp, num_tokens(model, image_px)[0]
  biases = model.out_bias + (2 + model.key_bias if model.qkv_bias else 0)
  attn = 4 * width ** 2 + biases * width + 2 * _of_norm(model, width // model.heads) * model.qk_norm
  relative = (2 * patches - 1) * width if model.positions is Positions.RELATIVE else 0
  mlp = (2 if model.swiglu else 1) * (width + model.mlp_bias) * hidden + (hidden + model.mlp_bias) * width
  norms = ((1 if model.parallel else 2) + model.attn_norm) * _of_norm(model, width) + (
      _of_norm(model, hidden) * model.mlp_norm)
  scales = (1 + model.mlp_scale) * width if model.layer_scale else 0
  return attn + relative + mlp + norms + scales + width * model.rotary_mixed


def _layer_bytes(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Bytes that the gradient of one layer needs."""
  tokens, size = num_tokens(model, image_px)[1], item_bytes(model.dtype)
  num_norms = 1 if model.parallel else 2
  # Inputs of the dense layers (norms, attention), query, key and value; pre-activations and activation; with
  # LayerScale the branches that it scales.
  widths = num_norms + 4 + (2 if model.layer_scale else 0) + model.attn_norm
  dense = tokens * (widths * model.width + ((3 if model.swiglu else 2) + model.mlp_norm) * model.mlp) * size
  normed = (num_norms + (2 if model.qk_norm else 0) + model.attn_norm) * model.width + model.mlp_norm * model.mlp
  norms = normed * tokens * 4  # the centred inputs, f32
  rounded = 0 if model.dtype is DType.F32 else size  # the weights as the product with value reads them
  weights = model.heads * _attention_entries(model, image_px) * (4 + rounded)
  return _num_blocks(model) * (dense + norms) + weights
