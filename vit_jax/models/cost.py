"""What a Vision Transformer costs, by arithmetic: parameters, FLOPs, bytes kept for the backward pass.

XLA counts the body of a scan once, so utilisation is computed from these figures. FLOPs are those of
matrix products only, two per multiply-add; elementwise work is left out, as in the papers.
"""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.config.schema import DType, Pool, Positions, Remat

TRAIN_FACTOR = 3  # one forward product, and two in the backward pass


def num_tokens(model: schema.ViT, image_px: tuple[int, int]) -> tuple[int, int]:
  """Patch tokens N, and tokens in the encoder M (with the class token)."""
  patches = (image_px[0] // model.patch) * (image_px[1] // model.patch)
  return patches, patches + (1 if model.pool is Pool.CLS else 0)


def parameters(model: schema.ViT, image_px: tuple[int, int], *, head: schema.Head,
               num_classes: int) -> dict[str, int]:
  """Number of parameters by part; `num_classes=0` leaves the head out."""
  width, hidden = model.width, model.mlp
  attn, mlp = 4 * width * (width + 1), 2 * width * hidden + hidden + width
  parts = {
      'stem': model.patch ** 2 * 3 * width + width,
      'cls': width if model.pool is Pool.CLS else 0,
      'positions': num_tokens(model, image_px)[1] * width if model.positions is Positions.LEARNED else 0,
      'blocks': model.depth * (attn + mlp + 4 * width),
      'norm': 2 * width}
  if num_classes:
    pre_logits = (width + 1) * head.pre_logits
    parts['head'] = pre_logits + ((head.pre_logits or width) + 1) * num_classes
  return parts


def forward_flops(model: schema.ViT, image_px: tuple[int, int], *, head: schema.Head,
                  num_classes: int) -> dict[str, int]:
  """FLOPs of one forward pass of one image by part, two per multiply-add.

  `qkv` and `out` are the projections, `attention` the products of query with key and weights with value.
  """
  (patches, tokens), width, depth = num_tokens(model, image_px), model.width, model.depth
  macs = {
      'stem': patches * model.patch ** 2 * 3 * width,
      'qkv': depth * tokens * 3 * width ** 2,
      'attention': depth * 2 * tokens ** 2 * width,
      'out': depth * tokens * width ** 2,
      'mlp': depth * 2 * tokens * width * model.mlp,
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
  everything = _block_bytes(model, image_px)
  tokens, size = num_tokens(model, image_px)[1], _item_bytes(model)
  wide, hidden = tokens * model.width * size, tokens * model.mlp * size
  match model.remat:
    case Remat.NONE:
      return model.depth * everything
    case Remat.NAMES:  # block input, query, key, value, attention, residual, MLP pre-activation
      saved = 6 * wide + hidden
    case Remat.MLP:  # block input, MLP pre-activation
      saved = wide + hidden
    case Remat.FULL:
      saved = wide
  return model.depth * saved + everything - saved


def _block_bytes(model: schema.ViT, image_px: tuple[int, int]) -> int:
  """Bytes that the gradient of one block needs."""
  tokens, size = num_tokens(model, image_px)[1], _item_bytes(model)
  # Inputs of the dense layers (norm1, norm2, attention), query, key and value; pre-activation and activation.
  dense = tokens * (6 * model.width + 2 * model.mlp) * size
  norms = 2 * tokens * model.width * 4  # the centred input of each LayerNorm, f32
  rounded = 0 if model.dtype is DType.F32 else size  # the weights as the product with value reads them
  return dense + norms + model.heads * tokens ** 2 * (4 + rounded)


def _item_bytes(model: schema.ViT) -> int:
  return {DType.F32: 4, DType.BF16: 2}[model.dtype]
