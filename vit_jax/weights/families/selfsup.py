"""Self-supervised ViTs whose tensors have the names of timm or transformers: DINO, MoCo v3, I-JEPA and MAE."""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Interpolation, Mean, PositionResize
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import (
  Changed,
  Family,
  Kind,
  License,
  Published,
  Tensors,
  decoder_positions,
  dropping,
  renamed,
)
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import NORMS, PILLOW

DINO = Family(
    'dino', 'DINO', '`.pth` of the authors',
    files=(timm.vit(lambda t: 'patch_embed.proj.weight' in t and any(name.startswith('head.last_layer') for name in t),
                    label='dino'),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC_OFFSET,
    addresses={f'{name}_pretrain': f'https://dl.fbaipublicfiles.com/dino/{name}_pretrain/{name}_pretrain.pth'
               for name in ('dino_deitsmall16', 'dino_deitsmall8', 'dino_vitbase16', 'dino_vitbase8')},
    published=(Published(r'dino_(?:deit|vit)([a-z]+?)(\d+)_pretrain', '{0}/{1}', 224, 'ImageNet-1k', 0,
                         'arXiv 2104.14294'),))

_ENCODER = 'module.base_encoder.'
_MOCO_HEADS = {384: 12}
"""By width, where the size with this width has another number (arXiv 2104.02057, section 5)."""


def _rename_moco(tensors: Tensors) -> Changed:
  """Returns the encoder that the authors evaluate, under the names of timm."""
  kept, dropped = dropping(tensors, {
      r'module\.momentum_encoder\..*': 'the average of the encoder, which the authors do not evaluate',
      r'module\.(base_encoder\.head|predictor)\..*': 'of pre-training: projection and prediction'})
  return renamed(kept, (r'^module\.base_encoder\.', '')), dropped


def _moco_hints(tensors: Tensors) -> Hints:
  return timm.HINTS._replace(heads=_MOCO_HEADS.get(tensors[f'{_ENCODER}cls_token'].shape[-1], 0))


MOCO = Family(
    'moco', 'MoCo v3', '`.pth.tar` of the authors',
    files=(timm.vit(lambda t: f'{_ENCODER}cls_token' in t, _moco_hints, rename=_rename_moco),),
    images={**NORMS['imagenet'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': .875})

IJEPA = Family(
    'ijepa', 'I-JEPA', 'checkpoints of the authors; transformers; timm',
    kinds=(Kind('ijepa', ('IJepaModel', ''),
                lambda m, weights, changed: not weights.num_classes and not weights.decoder and (
                    changed == {'pool'} and m.pool == Mean()),
                lambda _: transformers.VIT, transformers.tower_config, lambda tensors, _: tensors),),
    licenses=(License(r'facebook/ijepa_.*|timm/vit_\w+_ijepa.*', 'CC-BY-NC-4.0'),))


def _mae_config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  d = weights.decoder
  assert d
  return {**transformers.vit_config(m, weights),
          'decoder_hidden_size': d.decoder_width, 'decoder_num_hidden_layers': d.decoder_depth,
          'decoder_num_attention_heads': d.decoder_heads, 'decoder_intermediate_size': 4 * d.decoder_width,
          'mask_ratio': d.mask_ratio, 'norm_pix_loss': d.norm_pix_loss}


def _mae_finish(tensors: Tensors, weights: Weights) -> Tensors:
  return transformers.under('vit')({**tensors, 'decoder.decoder_pos_embed': decoder_positions(weights)}, weights)


_FILES, _LICENSE, _PAPER = 'https://dl.fbaipublicfiles.com/mae', 'CC-BY-NC-4.0', 'arXiv 2111.06377'
MAE = Family(
    'mae', 'MAE', '`.pth` of the authors, with and without the decoder, and fine-tuned; transformers',
    files=(timm.vit(lambda t: 'patch_embed.proj.weight' in t and (
        'decoder_embed.weight' in t or {'fc_norm.weight', 'cls_token'} <= t.keys()), label='mae'),),
    kinds=(Kind('vit_mae', ('ViTMAEForPreTraining', 'ViTMAEForPreTraining'),
                lambda m, weights, _: transformers.is_plain(m, weights, decoder=True), lambda _: transformers.VIT,
                _mae_config, _mae_finish),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC,
    licenses=(License(r'timm/vit_\w+[._]mae.*|facebook/vit-mae-.*', _LICENSE),),
    addresses={
        **{f'mae_pretrain_vit_{size}': f'{_FILES}/pretrain/mae_pretrain_vit_{size}.pth' for size in (
            'base', 'large', 'huge')},
        **{f'mae_finetuned_vit_{size}': f'{_FILES}/finetune/mae_finetuned_vit_{size}.pth' for size in (
            'base', 'large', 'huge')},
        **{f'mae_visualize_vit_{size}': f'{_FILES}/visualize/mae_visualize_vit_{size}.pth' for size in (
            'base', 'large')}},
    published=(Published(r'mae_finetuned_vit_(huge)', '{0}/14', 224, 'ImageNet-1k', 1_000, _PAPER, _LICENSE),
               Published(r'mae_finetuned_vit_([a-z]+)', '{0}/16', 224, 'ImageNet-1k', 1_000, _PAPER, _LICENSE),
               Published(r'mae_\w+_vit_(huge)', '{0}/14', 224, 'ImageNet-1k', 0, _PAPER, _LICENSE),
               Published(r'mae_\w+_vit_([a-z]+)', '{0}/16', 224, 'ImageNet-1k', 0, _PAPER, _LICENSE)))
