"""What a Vision Transformer costs, by arithmetic: parameters, FLOPs, bytes kept for the backward pass.

XLA counts the body of a scan once, so utilisation is computed from these figures. FLOPs are those of
matrix products only, two per multiply-add; elementwise work is left out, as in the papers.
"""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.config.schema import DType, Pool, Positions, PositionsAt, Remat

TRAIN_FACTOR = 3  # one forward product, and two in the backward pass


def num_tokens(model: schema.ViT, image_px: tuple[int, int]) -> tuple[int, int]:
  """Patch tokens N, and tokens in the encoder M (with class token and registers)."""
  h, w = _grid(model, image_px)
  return h * w, h * w + (1 if model.pool is Pool.CLS else 0) + model.registers


def parameters(model: schema.ViT, image_px: tuple[int, int], *, head: schema.Head,
               num_classes: int) -> dict[str, int]:
  """Number of parameters by part; `num_classes=0` leaves the head out."""
  width, hidden = model.width, model.mlp
  positions, at_layers = _position_parameters(model, image_px), model.positions_at is PositionsAt.LAYERS
  parts = {
      'stem': model.patch ** 2 * 3 * width + width,
      'cls': width if model.pool is Pool.CLS else 0,
      'registers': model.registers * width,
      'positions': 0 if at_layers else positions,
      'blocks': model.depth * (_num_blocks(model) * _block_parameters(model, image_px) + at_layers * positions),
      'norm': 2 * width,
      'pool': width + 4 * width * (width + 1) + 2 * width + 2 * width * hidden + hidden + width
              if model.pool is Pool.MAP else 0}
  if num_classes:
    pre_logits = (width + 1) * head.pre_logits
    parts['head'] = pre_logits + ((head.pre_logits or width) + 1) * num_classes
  return parts


def forward_flops(model: schema.ViT, image_px: tuple[int, int], *, head: schema.Head,
                  num_classes: int) -> dict[str, int]:
  """FLOPs of one forward pass of one image by part, two per multiply-add.

  `qkv` and `out` are the projections, `attention` the products of query with key and weights with value,
  `relative` those of query with relative keys, `pool` all of attention pooling.
  """
  (patches, tokens), width, hidden = num_tokens(model, image_px), model.width, model.mlp
  blocks, is_relative = model.depth * _num_blocks(model), model.positions is Positions.RELATIVE
  macs = {
      'stem': patches * model.patch ** 2 * 3 * width,
      'qkv': blocks * tokens * 3 * width ** 2,
      'attention': model.depth * 2 * _attention_entries(model, image_px) * width,
      'relative': blocks * patches * (2 * patches - 1) * width if is_relative else 0,
      'out': blocks * tokens * width ** 2,
      'mlp': blocks * tokens * width * hidden * (3 if model.swiglu else 2),
      'pool': 2 * width * (width + patches * (width + 1) + hidden)
              if model.pool is Pool.MAP else 0,
      'head': width * head.pre_logits + (head.pre_logits or width) * num_classes}
  return {part: 2 * count for part, count in macs.items()}


def train_flops(model: schema.ViT, image_px: tuple[int, int], *, head: schema.Head, num_classes: int) -> int:
  """FLOPs of forward and backward pass of one image; what is computed again under remat is not counted."""
  return TRAIN_FACTOR * sum(forward_flops(model, image_px, head=head, num_classes=num_classes).values())


def activation_bytes(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Estimate of the bytes of one image that live at the start of the backward pass of the blocks.

  What `model.remat` saves in every block and, where something is computed again, the rest of one block.
  The saved values are exact. `Remat.NONE` is what gradients of LayerNorm, GELU and attention written by
  hand need; those of autodiff keep about twice as much (S/16, f32, XLA on CPU: 1.7 unrolled, 2.2 scanned).
  """
  everything, blocks = _layer_bytes(model, image_px), _num_blocks(model)
  tokens, size = num_tokens(model, image_px)[1], _item_bytes(model)
  wide, hidden = tokens * model.width * size, tokens * model.mlp * size * (2 if model.swiglu else 1)
  match model.remat:
    case Remat.NONE:
      return model.depth * everything
    case Remat.NAMES:  # the input, and of each block query, key, value, attention, residual, MLP pre-activation
      saved = wide + blocks * ((4 if model.parallel else 5) * wide + hidden)
    case Remat.MLP:  # the input, MLP pre-activation
      saved = wide + blocks * hidden
    case Remat.FULL:
      saved = wide
  return model.depth * saved + everything - saved


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
    case Positions.LEARNED:
      return (num_tokens(model, image_px)[1] - model.registers) * model.width
    case Positions.LEARNED2D:
      return sum(_grid(model, image_px)) * model.width // 2
    case _:
      return 0


def _block_parameters(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Parameters of one block without positions."""
  width, hidden, patches = model.width, model.mlp, num_tokens(model, image_px)[0]
  attn = 4 * width * (width + 1) + (4 * width // model.heads if model.qk_norm else 0)
  relative = (2 * patches - 1) * width if model.positions is Positions.RELATIVE else 0
  mlp = (2 if model.swiglu else 1) * (width + 1) * hidden + (hidden + 1) * width
  return attn + relative + mlp + (2 if model.parallel else 4) * width + (2 * width if model.layer_scale else 0)


def _layer_bytes(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Bytes that the gradient of one layer needs."""
  tokens, size = num_tokens(model, image_px)[1], _item_bytes(model)
  num_norms = 1 if model.parallel else 2
  # Inputs of the dense layers (norms, attention), query, key and value; pre-activations and activation; with
  # LayerScale the branches that it scales.
  widths = num_norms + 4 + (2 if model.layer_scale else 0)
  dense = tokens * (widths * model.width + (3 if model.swiglu else 2) * model.mlp) * size
  norms = (num_norms + (2 if model.qk_norm else 0)) * tokens * model.width * 4  # the centred inputs, f32
  rounded = 0 if model.dtype is DType.F32 else size  # the weights as the product with value reads them
  weights = model.heads * _attention_entries(model, image_px) * (4 + rounded)
  return _num_blocks(model) * (dense + norms) + weights


def _item_bytes(model: schema.ViT) -> int:
  return {DType.F32: 4, DType.BF16: 2}[model.dtype]
