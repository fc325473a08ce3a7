"""What a task costs an image and training step, by arithmetic: FLOPs of all its networks on all that they see."""
from __future__ import annotations

from typing import assert_never

from vit_jax.config import schema
from vit_jax.config.schema import PatchTarget, Pool
from vit_jax.models import cost

COLORS = 512


def train_flops(objective: schema.Objective, model: schema.Model, image_px: tuple[int, int], *, head: schema.Head,
                num_classes: int, views: schema.Views) -> int:
  """FLOPs of one image in one step: forward and backward pass of what learns, forward pass of what teaches."""
  def forward(network: schema.Model, size: tuple[int, int] = image_px, *, head: schema.Head = head,
              num_classes: int = 0) -> int:
    return sum(cost.forward_flops(network, size, head=head, num_classes=num_classes).values())

  plain = schema.Head()
  match objective:
    case schema.Supervised():
      learning, teaching = forward(model, num_classes=num_classes), 0
    case schema.Mae():
      learning, teaching = _mae(objective, _vit(model), image_px), 0
    case schema.MaskedPatch():
      vit = _vit(model)
      outputs = {PatchTarget.COLOR: COLORS, PatchTarget.COLORS: 16 * COLORS, PatchTarget.PIXELS: 3 * vit.patch ** 2}
      predictions = round(objective.mask_ratio * _num_patches(vit, image_px))
      learning, teaching = forward(vit, head=plain) + 2 * predictions * vit.width * outputs[objective.target], 0
    case schema.Dino():
      project = _projector(objective, cost.feature_width(model, image_px))
      large, small = (forward(model, size, head=plain) + project for size in (image_px, (views.local_px,) * 2))
      learning, teaching = 2 * large + views.num_local * small, 2 * large
    case schema.TokenLabel():
      vit = _vit(model)
      dense = 2 * _num_patches(vit, image_px) * vit.width * num_classes
      learning, teaching = forward(vit, num_classes=num_classes) + dense, 0
    case schema.Distill():
      more = 2 * _vit(model).width * num_classes if getattr(model, 'distilled', False) else 0
      learning = forward(model, num_classes=num_classes) + more
      teaching = forward(objective.teacher.model, head=objective.teacher.head, num_classes=num_classes)
    case _:
      assert_never(objective)
  return cost.TRAIN_FACTOR * learning + teaching


def mae_encoder_flops(objective: schema.Mae, model: schema.ViT, image_px: tuple[int, int]) -> int:
  """FLOPs of the encoder's forward pass: on a picture of the visible patches in a row."""
  visible = int(_num_patches(model, image_px) * (1. - objective.mask_ratio) + 1e-6)
  row = (model.patch, visible * model.patch)
  return sum(cost.forward_flops(model, row, head=schema.Head(), num_classes=0).values())


def _mae(objective: schema.Mae, model: schema.ViT, image_px: tuple[int, int]) -> int:
  width, first = objective.decoder_width, int(model.pool.has_class_token)
  visible = int(_num_patches(model, image_px) * (1. - objective.mask_ratio) + 1e-6)
  # The prediction of pixels is a stem the other way round.
  decoder = schema.ViT(patch=model.patch, width=width, depth=objective.decoder_depth, heads=objective.decoder_heads,
                       mlp=4 * width, pool=Pool.CLS if first else Pool.MEAN)
  decode = sum(cost.forward_flops(decoder, image_px, head=schema.Head(), num_classes=0).values())
  return mae_encoder_flops(objective, model, image_px) + decode + 2 * (visible + first) * model.width * width


def _projector(o: schema.Dino, width: int) -> int:
  return 2 * (width * o.hidden_dim + o.hidden_dim ** 2 + o.hidden_dim * o.bottleneck_dim + o.bottleneck_dim * o.out_dim)


def _vit(model: schema.Model) -> schema.ViT:
  assert isinstance(model, schema.ViT), model
  return model


def _num_patches(model: schema.ViT, image_px: tuple[int, int]) -> int:
  return cost.num_tokens(model, image_px)[0]
