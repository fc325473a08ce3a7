"""Masked autoencoders (MAE), with and without their decoder, and fine-tuned."""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import Family, Kind, License, Published, Tensors, decoder_positions
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import NORMS, PILLOW


def _config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  d = weights.decoder
  assert d
  return {**transformers.vit_config(m, weights),
          'decoder_hidden_size': d.decoder_width, 'decoder_num_hidden_layers': d.decoder_depth,
          'decoder_num_attention_heads': d.decoder_heads, 'decoder_intermediate_size': 4 * d.decoder_width,
          'mask_ratio': d.mask_ratio, 'norm_pix_loss': d.norm_pix_loss}


def _finish(tensors: Tensors, weights: Weights) -> Tensors:
  return transformers.under('vit')({**tensors, 'decoder.decoder_pos_embed': decoder_positions(weights)}, weights)


_FILES, _LICENSE, _MAE = 'https://dl.fbaipublicfiles.com/mae', 'CC-BY-NC-4.0', 'arXiv 2111.06377'
FAMILY = Family(
    'mae', 'MAE', '`.pth` of the authors, with and without the decoder, and fine-tuned; transformers',
    files=(timm.vit(lambda t: 'patch_embed.proj.weight' in t and (
        'decoder_embed.weight' in t or {'fc_norm.weight', 'cls_token'} <= t.keys()), label='mae'),),
    kinds=(Kind('vit_mae', ('ViTMAEForPreTraining', 'ViTMAEForPreTraining'),
                lambda m, weights, _: transformers.is_plain(m, weights, decoder=True), lambda _: transformers.VIT,
                _config, _finish),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC,
    licenses=(License(r'timm/vit_\w+[._]mae.*|facebook/vit-mae-.*', _LICENSE),),
    addresses={
        **{f'mae_pretrain_vit_{size}': f'{_FILES}/pretrain/mae_pretrain_vit_{size}.pth' for size in (
            'base', 'large', 'huge')},
        **{f'mae_finetuned_vit_{size}': f'{_FILES}/finetune/mae_finetuned_vit_{size}.pth' for size in (
            'base', 'large', 'huge')},
        **{f'mae_visualize_vit_{size}': f'{_FILES}/visualize/mae_visualize_vit_{size}.pth' for size in (
            'base', 'large')}},
    published=(Published(r'mae_finetuned_vit_(huge)', '{0}/14', 224, 'ImageNet-1k', 1_000, _MAE, _LICENSE),
               Published(r'mae_finetuned_vit_([a-z]+)', '{0}/16', 224, 'ImageNet-1k', 1_000, _MAE, _LICENSE),
               Published(r'mae_\w+_vit_(huge)', '{0}/14', 224, 'ImageNet-1k', 0, _MAE, _LICENSE),
               Published(r'mae_\w+_vit_([a-z]+)', '{0}/16', 224, 'ImageNet-1k', 0, _MAE, _LICENSE)))
