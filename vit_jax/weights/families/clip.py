"""CLIP and OpenCLIP: files of OpenAI and open_clip, of transformers and of timm; also the names of their image towers
for other families.
"""
from __future__ import annotations

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, PositionResize
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.families.record import Changed, Clues, Family, Files, Kind, License, Tensors, dropping, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Line
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

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
  if any(name.startswith(('visual.', 'vision_encoder.')) for name in tensors):
    tensors, lines = dropping(tensors, _TEXT)
    tensors = renamed(tensors, *_AUTHORS)
  elif {'conv1.weight', 'ln_pre.weight'} <= tensors.keys():
    tensors = renamed(tensors, *_AUTHORS)
  found, is_tower = dict(tensors), 'norm_pre.weight' in tensors
  for name, axes in (('cls_token', 1), ('pos_embed', 2)):
    if is_tower and name in tensors and tensors[name].ndim == axes:
      found[name] = tensors[name].reshape(1, -1, tensors[name].shape[-1])
  if is_tower and 'proj' in found and found['proj'].ndim == 2:
    found['head.weight'] = found.pop('proj').T
  for leaf in ('weight', 'bias'):
    if (x := found.get(f'attn_pool.attn.in_proj_{leaf}')) is not None and x.ndim:
      found[f'attn_pool.q.{leaf}'], found[f'attn_pool.kv.{leaf}'] = np.split(
          found.pop(f'attn_pool.attn.in_proj_{leaf}'), [len(x) // 3])
  if is_tower and 'head.bias' in found and not np.any(found['head.bias']):
    del found['head.bias']
    lines += (Line('head.bias', 'dropped', 'zeros: the head is a projection'),)
  return found, lines


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


def _warn(model: schema.Model, clues: Clues) -> list[str]:
  if clues.has_gelu or not isinstance(model, schema.ViT) or not isinstance(model.mlp, schema.Mlp):
    return []
  return ['its GELU is a guess: exact, as in open_clip. Weights of OpenAI and those trained as theirs have another: '
          'set --model=gelu=quick for these']


FAMILY = Family(
    'clip', 'CLIP, OpenCLIP', 'files of OpenAI and open_clip; transformers; timm',
    files=(Files('transformers', lambda t: {'embeddings.patch_embedding.weight', 'pre_layrnorm.weight'} <= t.keys(),
                 TRANSFORMERS, Hints(gelu=Gelu.QUICK, norm_eps=1e-5)),
           timm.vit(lambda t: {'patch_embed.proj.weight', 'norm_pre.weight', 'norm.weight'} <= t.keys() and (
               'attn_pool.latent' not in t), Hints(gelu=Gelu.EXACT, norm_eps=1e-5), warn=_warn)),
    kinds=(Kind('clip_vision_model', ('CLIPVisionModel', 'CLIPVisionModelWithProjection'),
                lambda _, weights, changed: changed == {'norm_before', 'stem.bias'} and (
                    not weights.num_classes or not weights.head.bias),
                lambda _: TRANSFORMERS, transformers.tower_config, transformers.under('vision_model')),),
    config_defaults={kind: {'num_attention_heads': 0, 'hidden_act': 'quick_gelu', 'layer_norm_eps': 1e-5}
                     for kind in ('clip', 'clip_vision_model')},
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_to_timm,
    licenses=(License(r'openai/clip-.*|laion/CLIP-.*', 'MIT'),
              License(r'timm/vit_\w+_clip_\w*\.(openai|laion).*', 'MIT'),
              License(r'timm/vit_\w+_clip_\w*\.metaclip.*', 'CC-BY-NC-4.0')))
