"""What a network costs, by arithmetic: parameters, FLOPs, bytes kept for the backward pass.

XLA counts the body of a scan once, so utilisation is computed from these figures. FLOPs are those of
matrix products and convolutions only, two per multiply-add; elementwise work is left out, as in the papers.
"""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.models.backbones import room
from vit_jax.models.vit.cost import num_tokens as num_tokens

TRAIN_FACTOR = 3  # one forward product, and two in the backward pass


def parameters(model: schema.Model, image_px: tuple[int, int], *, head: schema.Head,
               num_classes: int) -> dict[str, int]:
  """Number of parameters by part; `num_classes=0` leaves the head out."""
  found = room(model).costs(image_px)
  if not num_classes:
    return found.parameters
  pre_logits = (found.width + 1) * head.pre_logits
  return {**found.parameters, 'head': pre_logits + ((head.pre_logits or found.width) + head.bias) * num_classes}


def forward_flops(model: schema.Model, image_px: tuple[int, int], *, head: schema.Head,
                  num_classes: int) -> dict[str, int]:
  """FLOPs of one forward pass of one image by part, two per multiply-add.

  Of a ViT, `qkv` and `out` are the projections, `attention` the products of query with key and weights with
  value, `relative` those of query with relative keys, `pool` all of attention pooling.
  """
  found = room(model).costs(image_px)
  of_head = found.width * head.pre_logits + (head.pre_logits or found.width) * num_classes
  return {part: 2 * count for part, count in {**found.macs, 'head': of_head}.items()}


def train_flops(model: schema.Model, image_px: tuple[int, int], *, head: schema.Head, num_classes: int) -> int:
  """FLOPs of forward and backward pass of one image; what is computed again under remat is not counted."""
  return TRAIN_FACTOR * sum(forward_flops(model, image_px, head=head, num_classes=num_classes).values())


def activation_bytes(model: schema.Model, image_px: tuple[int, int]) -> int:
  """Estimate of the bytes of one image that live at the start of the backward pass.

  What `model.remat` saves in every block or unit and, where something is computed again, the rest of one.
  Of a ViT the saved values are exact, and its stem is left out unless it is a network. `Remat.NONE` is what
  gradients of norms, activations and attention written by hand need; those of autodiff keep about twice as
  much (S/16, f32, XLA on CPU: 1.7 unrolled, 2.2 scanned).
  """
  return room(model).costs(image_px).activation_bytes


def feature_width(model: schema.Model, image_px: tuple[int, int]) -> int:
  """D, of the pooled features."""
  return room(model).costs(image_px).width
