"""DINOv2, with and without registers."""
from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import Changed, Family, Files, Kind, License, Published, Tensors, dropping
from vit_jax.weights.network import Weights, layer_scale
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import Table


def _found(tensors: Tensors) -> bool:
  if 'patch_embed.proj.weight' not in tensors:
    return False
  return 'register_tokens' in tensors or ('mask_token' in tensors and 'blocks.0.ls1.gamma' in tensors)


def _change(tensors: Tensors) -> Changed:
  """Returns the tensors of transformers without a head that no network here has, and with the gate as it saves it."""
  width = tensors['embeddings.patch_embeddings.projection.weight'].shape[:1]
  dropped: tuple = ()
  if 'classifier.weight' in tensors and width and tensors['classifier.weight'].shape[-1:] == (2 * width[0],):
    tensors, dropped = dropping(tensors, {
        r'classifier\..*': 'this head reads class token and mean patch side by side; no head here does'})
  return _gates_joined(transformers.with_older_names(tensors)), dropped


def _gates_joined(tensors: Tensors) -> Tensors:
  """Returns the tensors with gate and value of each SwiGLU MLP joined."""
  found = {}
  for name, tensor in tensors.items():
    if '.mlp.gate_proj.' in name and (up := tensors.get(name.replace('gate_proj', 'up_proj'))) is not None:
      if up.shape != tensor.shape or not up.ndim:
        raise UserError(f'{name} has the shape {list(tensor.shape)}, its up_proj {list(up.shape)}')
      found[name.replace('gate_proj', 'weights_in')] = np.concatenate([tensor, up])
    elif '.mlp.up_proj.' not in name:
      found[name.replace('.mlp.down_proj.', '.mlp.weights_out.')] = tensor
  return found


def table(model: schema.ViT) -> Table:
  """Returns the names of transformers for this network."""
  return transformers.DINO_SWIGLU if isinstance(model.mlp, schema.SwiGlu) else transformers.DINO


def with_mask_token(tensors: Tensors, _: Weights) -> Tensors:
  """Returns the tensors with the mask token that the classes of transformers expect, as zeros."""
  width = tensors['embeddings.cls_token'].shape[-1]
  return tensors | {'embeddings.mask_token': np.zeros((1, width), np.float32)}


def mlp_ratio(m: schema.ViT) -> int:
  """Returns the setting from which transformers computes the size of an MLP; raises UserError if there is none."""
  is_gated = isinstance(m.mlp, schema.SwiGlu)
  ratio = round((1.5 if is_gated else 1.) * m.mlp.hidden / m.width)
  hidden = (ratio * m.width * 2 // 3 + 7) // 8 * 8 if is_gated else ratio * m.width  # as its Dinov2SwiGLUFFN
  if hidden != m.mlp.hidden:
    raise UserError(f'--family: expected an MLP whose size a whole mlp_ratio states, got {m.mlp.hidden} for '
                    f'the width {m.width}. Set --family=timm or --family=run.')
  return ratio


def _config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  is_gated = isinstance(m.mlp, schema.SwiGlu)
  return {**transformers.older_config(m, weights), 'mlp_ratio': mlp_ratio(m),
          'use_swiglu_ffn': is_gated, 'layerscale_value': layer_scale(m)} | (
              {'num_register_tokens': m.registers} if m.registers else {})


def _kind(model_type: str, loaded_by: str, *, has_registers: bool) -> Kind:
  def holds(m: schema.ViT, weights: Weights, changed: frozenset[str]) -> bool:
    needed = {'block.layer_scale', *(['registers'] if has_registers else [])}
    return {'block.layer_scale', 'registers'} & changed == needed and (
        not transformers.obstacles(m, weights))

  return Kind(model_type, (loaded_by, loaded_by), holds, table, _config, with_mask_token)


FAMILY = Family(
    'dinov2', 'DINOv2', '`.pth` of the authors, with and without registers, and of their training; transformers; timm',
    files=(Files('transformers', lambda t: transformers.is_older(t, has_scales=True),
                 lambda t: transformers.DINO_SWIGLU if any('.mlp.weights_in.' in name for name in t) else
                 transformers.DINO, transformers.HINTS._replace(norm_eps=1e-6), change=_change),
           timm.vit(_found, label='dinov2')),
    kinds=(_kind('dinov2_with_registers', 'Dinov2WithRegistersModel', has_registers=True),
           _kind('dinov2', 'Dinov2Model', has_registers=False)),
    timm_drops={r'(dino|ibot)_head\..*': 'the projection head of self-supervision'},
    images={**NORMS['imagenet'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC_OFFSET,
    licenses=(License(r'facebook/dinov2.*|timm/vit_\w+_dinov2.*', 'Apache-2.0'),),
    addresses={f'dinov2_{size}{kind}': f'https://dl.fbaipublicfiles.com/dinov2/dinov2_{size}/'
               f'dinov2_{size}{kind}_pretrain.pth' for size in ('vits14', 'vitb14', 'vitl14', 'vitg14')
               for kind in ('', '_reg4')},
    published=(Published(r'dinov2_vit([a-z])14', 'DINOv2-{0}/14', 518, 'LVD-142M', 0, 'arXiv 2304.07193'),
               Published(r'dinov2_vit([a-z])14_reg4', 'DINOv2-reg-{0}/14', 518, 'LVD-142M', 0, 'arXiv 2309.16588')))
