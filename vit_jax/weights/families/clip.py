"""Image towers that were trained with texts: CLIP and OpenCLIP, SigLIP and SigLIP 2, and AIMv2.

Files of big_vision and of timm have the tensors of SigLIP under the names of other ViTs, see `flax.py` and `vit.py`.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Frequencies, Gelu, Learned, Map, Mean, PositionResize, QkvBias, SinCos
from vit_jax.weights.families import record, timm, transformers
from vit_jax.weights.families.record import Changed, Clues, Family, Files, Kind, License, Tensors
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Line, Weights
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

# CLIP

_AUTHORS = (  # names of OpenAI, open_clip and the Perception Encoder, and what timm has for them
    (r'^(visual|vision_encoder)\.(trunk\.)?', ''), (r'^conv1\.', 'patch_embed.proj.'),
    (r'^positional_embedding$', 'pos_embed'), (r'^class_embedding$', 'cls_token'), (r'^ln_pre\.', 'norm_pre.'),
    (r'^ln_post\.', 'norm.'),
    (r'^transformer\.resblocks\.', 'blocks.'), (r'\.ln_(\d)\.', r'.norm\1.'), (r'\.ls_(\d)\.gamma$', r'.gamma_\1'),
    (r'(\d\.attn)\.in_proj_', r'\1.qkv.'), (r'(\d\.attn)\.out_proj\.', r'\1.proj.'), (r'\.mlp\.c_fc\.', '.mlp.fc1.'),
    (r'\.mlp\.c_proj\.', '.mlp.fc2.'), (r'^attn_pool\.probe$', 'attn_pool.latent'),
    (r'^attn_pool\.attn\.out_proj\.', 'attn_pool.proj.'), (r'^attn_pool\.layernorm\.', 'attn_pool.norm.'))
_TEXT = {
    r'(text|text_encoder)\..*|logit_scale|logit_bias|token_embedding\..*|text_projection|transformer\.resblocks\..*|'
    r'ln_final\..*|attn_mask|input_resolution|context_length|vocab_size|positional_embedding|temperature':
        'of the text tower'}
"""In a file whose image tower has a prefix."""


def _to_timm(tensors: Tensors) -> Changed:
  """Renames an image tower; tables get three axes, and the projection becomes a head."""
  lines: tuple[Line, ...] = ()
  has_prefix = any(name.startswith(('visual.', 'vision_encoder.')) for name in tensors)
  if has_prefix:
    tensors, lines = record.dropping(tensors, _TEXT)
  if has_prefix or {'conv1.weight', 'ln_pre.weight'} <= tensors.keys():
    tensors = record.renamed(tensors, *_AUTHORS)
  if 'norm_pre.weight' in tensors:
    tensors, more = _to_timm_tower(tensors)
    lines += more
  return Changed(_split_pool(tensors), lines)


def _to_timm_tower(tensors: Tensors) -> Changed:
  """Returns the tensors of a tower of CLIP with tables `[1, M, D]`, and with its projection `[D, C]` as a head."""
  tensors = dict(tensors)
  for name, num_axes in (('cls_token', 1), ('pos_embed', 2)):
    if name in tensors and tensors[name].ndim == num_axes:
      tensors[name] = tensors[name].reshape(1, -1, tensors[name].shape[-1])
  if 'proj' in tensors and tensors['proj'].ndim == 2:
    tensors['head.weight'] = tensors.pop('proj').T
  if 'head.bias' in tensors and not np.any(tensors['head.bias']):
    del tensors['head.bias']
    return Changed(tensors, (Line('head.bias', 'dropped', 'zeros: the head is a projection'),))
  return Changed(tensors)


def _split_pool(tensors: Tensors) -> Tensors:
  """Returns the tensors with query, key and value of an attention pool as timm has them: `q`, and `kv` in one."""
  tensors = dict(tensors)
  for leaf in ('weight', 'bias'):
    packed = tensors.get(f'attn_pool.attn.in_proj_{leaf}')
    if packed is not None and packed.ndim:
      del tensors[f'attn_pool.attn.in_proj_{leaf}']
      tensors[f'attn_pool.q.{leaf}'], tensors[f'attn_pool.kv.{leaf}'] = np.split(packed, [len(packed) // 3])
  return tensors


TRANSFORMERS = table("""
    backbone/cls | embeddings.class_embedding | row
    backbone/stem | embeddings.patch_embedding | conv
    backbone/positions | embeddings.position_embedding.weight | rows
    backbone/{norm_before,norm} | {pre_layrnorm,post_layernorm} | norm
    backbone/blocks/attn/{query,key,value,out} | encoder.layers.{i}.self_attn.{q,k,v,out}_proj | dense
    backbone/blocks/{norm1,norm2} | encoder.layers.{i}.{layer_norm1,layer_norm2} | norm
    backbone/blocks/mlp/{up,down} | encoder.layers.{i}.mlp.{fc1,fc2} | dense
    backbone/pool/probe | head.probe | same
    backbone/pool/attn/{query,key,value} | head.attention.{in_proj[0/3],in_proj[1/3],in_proj[2/3]} | packed
    backbone/pool/attn/out | head.attention.out_proj | dense
    backbone/pool/norm | head.layernorm | norm
    backbone/pool/mlp/{up,down} | head.mlp.{fc1,fc2} | dense
    head/kernel | visual_projection.weight | matrix
""")
"""CLIP and SigLIP, without the prefix `vision_model.`."""


def _warn_of_gelu(model: schema.Model, clues: Clues) -> list[str]:
  """Returns a warning if nothing determines the form of the GELU."""
  if clues.has_gelu or not isinstance(model, schema.ViT) or not isinstance(model.mlp, schema.Mlp):
    return []
  return ['its GELU is a guess: exact, as in open_clip. Weights of OpenAI and those trained as theirs have another: '
          'set --model=gelu=quick for these']


def _is_clip_vision(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
  """Whether the CLIP of transformers computes this ViT; its head is a projection without bias."""
  return differing == {'norm_before', 'stem.bias'} and not (weights.num_classes and weights.head.bias)


CLIP = Family(
    'clip', 'CLIP, OpenCLIP', 'files of OpenAI and open_clip; transformers; timm',
    files=(Files('transformers', record.named('embeddings.patch_embedding.weight', 'pre_layrnorm.weight'), TRANSFORMERS,
                 Hints(gelu=Gelu.QUICK, norm_eps=1e-5)),
           timm.vit(record.named('patch_embed.proj.weight', 'norm_pre.weight', 'norm.weight',
                                 without=['attn_pool.latent']),
                    Hints(gelu=Gelu.EXACT, norm_eps=1e-5), warn=_warn_of_gelu)),
    kinds=(Kind('clip_vision_model', ('CLIPVisionModel', 'CLIPVisionModelWithProjection'), _is_clip_vision,
                TRANSFORMERS, transformers.tower_config, transformers.under('vision_model')),),
    config_defaults={kind: {'num_attention_heads': 0, 'hidden_act': 'quick_gelu', 'layer_norm_eps': 1e-5}
                     for kind in ('clip', 'clip_vision_model')},
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_to_timm,
    licenses=(License(r'openai/clip-.*|laion/CLIP-.*', 'MIT'),
              License(r'timm/vit_\w+_clip_\w*\.(openai|laion).*', 'MIT'),
              License(r'timm/vit_\w+_clip_\w*\.metaclip.*', 'CC-BY-NC-4.0')))

# SigLIP

_PATCHES = 'embeddings.patch_embedding.weight'


def _siglip_hints(tensors: Tensors) -> Hints:
  """Returns the hints; SigLIP 2 for images of any size embeds patches by a matrix, and resizes positions otherwise."""
  is_any_size = tensors[_PATCHES].ndim == 2
  return Hints(gelu=Gelu.TANH, norm_eps=1e-6,
               position_resize=PositionResize.BILINEAR_ANTIALIAS if is_any_size else None)


def _is_siglip_vision(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
  """Whether the SigLIP of transformers computes this ViT."""
  return not weights.num_classes and differing == {'pool'} and m.pool == Map()


_SIGLIP_DEFAULTS = {'num_attention_heads': 0, 'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-6}
SIGLIP = Family(
    'siglip', 'SigLIP, SigLIP 2', '`.npz` of big_vision; transformers; timm',
    files=(Files('transformers', record.named(_PATCHES, without=['pre_layrnorm.weight']), TRANSFORMERS, _siglip_hints,
                 change=lambda tensors: Changed(record.with_patch_kernel(tensors, _PATCHES))),),
    kinds=(Kind('siglip_vision_model', ('SiglipVisionModel', ''), _is_siglip_vision, TRANSFORMERS,
                transformers.tower_config),),
    config_defaults={
        **dict.fromkeys(('siglip', 'siglip_vision_model'), _SIGLIP_DEFAULTS),
        **dict.fromkeys(('siglip2', 'siglip2_vision_model'),
                        {**_SIGLIP_DEFAULTS, 'num_patches': 256, 'patch_size': 16})},
    licenses=(License(r'(google|timm)/\w*siglip.*', 'Apache-2.0'),))

# AIMv2

AIMV2_NAMES = table("""
    backbone/stem | embeddings.patch_embed | conv
    backbone/stem_norm | embeddings.rms_norm | norm
    backbone/positions | embeddings.position_embedding.weight | rows
    backbone/blocks/attn/{query,key,value,out} | encoder.layers.{i}.attention.{q,k,v,out}_proj | dense
    backbone/blocks/{norm1,norm2} | encoder.layers.{i}.{rms_norm1,rms_norm2} | norm
    backbone/blocks/mlp/{gate,up,down} | encoder.layers.{i}.ffn.{gate,up,down}_proj | dense
    backbone/norm | rms_norm | norm
""")
"""The names of transformers."""
_FIXED = SinCos(Frequencies.MAE)


def _aimv2_to_timm(tensors: Tensors) -> Changed:
  """Renames the tensors of the authors, all of which begin with `preprocessor.`, `trunk.` or `post_trunk_norm.`."""
  if not any(name.startswith(('preprocessor.', 'trunk.')) for name in tensors):
    return Changed(tensors)
  return Changed(record.renamed(
      tensors, (r'^preprocessor\.patchifier\.', 'patch_embed.'), (r'^preprocessor\.pos_embed$', 'pos_embed'),
      (r'^trunk\.', ''), (r'^post_trunk_norm\.', 'norm.'), (r'\.norm_([12])\.', r'.norm\1.'),
      (r'\.mlp\.fc1\.', '.mlp.fc1_g.'), (r'\.mlp\.fc3\.', '.mlp.fc1_x.')))


def _aimv2_hints(tensors: Tensors) -> Hints:
  """Returns the hints; a network for images at their own aspect has fixed positions, and thus no table of them."""
  has_table = 'embeddings.position_embedding.weight' in tensors
  return Hints(norm_eps=1e-5, settings={} if has_table else {'positions': _FIXED}, pool='mean')


def _is_aimv2_vision(m: schema.ViT, weights: Weights, differing: frozenset[str]) -> bool:
  """Whether the AIMv2 of transformers computes this ViT; one setting of it is for all biases of attention."""
  required = {'norm', 'stem.norm', 'mlp', 'pool'}
  allowed = required | {'positions', 'attention.qkv_bias', 'attention.out_bias', 'mlp.bias'}
  biases = m.attention.qkv_bias, m.attention.out_bias
  return (not weights.num_classes and required <= differing <= allowed and m.pool == Mean()
          and (isinstance(m.positions, Learned) or m.positions == _FIXED)
          and biases in ((QkvBias.ALL, True), (QkvBias.NONE, False)))


def _aimv2_config(m: schema.ViT, _: Weights) -> dict[str, Any]:
  return {'rms_norm_eps': m.norm.eps, 'intermediate_size': m.mlp.hidden, 'mlp_bias': m.mlp.bias, 'use_head': False,
          'qkv_bias': m.attention.qkv_bias is QkvBias.ALL, 'is_native': m.positions == _FIXED}


AIMV2 = Family(
    'aimv2', 'AIMv2', 'files of the authors; transformers; timm',
    files=(Files('transformers', record.named('embeddings.patch_embed.weight'), AIMV2_NAMES, _aimv2_hints,
                 change=lambda tensors: record.dropping(tensors, {
                     r'head\..*': 'a pool without a projection of its query, which no network here has'})),
           timm.vit(record.named('patch_embed.proj.weight', 'patch_embed.norm.weight', without=['blocks.0.norm1.bias']),
                    Hints(norm_eps=1e-5))),
    kinds=(Kind('aimv2_vision_model', ('Aimv2VisionModel', ''), _is_aimv2_vision, AIMV2_NAMES, _aimv2_config),),
    config_defaults={kind: {'hidden_act': 'silu'} for kind in ('aimv2', 'aimv2_vision_model')},
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_aimv2_to_timm,
    licenses=(License(r'(apple|timm)/aimv2.*', 'Apple ASCL or AMLR'),))
