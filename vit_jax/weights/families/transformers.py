"""What files of transformers have in common: prefixes, the names of its older ViTs, and the configs of a folder."""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Geometry, Interpolation, QkvBias, checks
from vit_jax.core.errors import UserError
from vit_jax.weights.families import record
from vit_jax.weights.families.record import Changed, Kind, Prepared, Tensors
from vit_jax.weights.hints import Hints, pool_word
from vit_jax.weights.network import Weights, layer_scale, position_resize
from vit_jax.weights.preprocess import NORMS, Preprocess, side_px
from vit_jax.weights.tables import Table, table, without

HINTS = Hints(gelu=Gelu.EXACT, norm_eps=1e-12)
"""Defaults of its ViTConfig."""
IMAGES: dict[str, Any] = {**NORMS['half'], 'geometry': Geometry.HUGGINGFACE, 'interpolation': Interpolation.BILINEAR,
                          'antialias': True, 'resize': 0}
_PREFIX = (r'^(vit|deit|dinov2|dinov2_with_registers|vit_mae|ijepa)\.|^((clip|siglip|aimv2|tipsv2)\.)?vision_model\.'
           r'|^model\.(?=layer\.)')
_DROPS = {
    r'pooler\.dense\..*': 'a pooler that classification does not use',
    r'embeddings\.mask_token': 'of pre-training with hidden patches',
    r'decoder\.0\..*': 'of pre-training with hidden patches',
    r'(text_model|text_projection)\..*|logit_scale|logit_bias|temperature|text_projection': 'of the text tower',
    r'(embeddings|text_model\.embeddings)\.position_ids': 'numbers from 0'}
_BLOCK = r'^((?:encoder\.layer|decoder\.decoder_layers)\.\d+)\.'
_PATCHES = 'embeddings.patch_embeddings.projection.weight'

_COMMON = table("""
    backbone/stem | embeddings.patch_embeddings.projection | conv
    backbone/{cls,dist} | embeddings.{cls_token,distillation_token} | same
    backbone/{registers,positions} | embeddings.{register_tokens,position_embeddings} | same
    backbone/norm | layernorm | norm
    backbone/blocks/attn/{query,key,value} | encoder.layer.{i}.attention.attention.{query,key,value} | dense
    backbone/blocks/attn/out | encoder.layer.{i}.attention.output.dense | dense
    {head,head_dist} | {classifier,distillation_classifier} | dense
    decoder/{embed,predict} | decoder.{decoder_embed,decoder_pred} | dense
    decoder/blocks/attn/{query,key,value} | decoder.decoder_layers.{i}.attention.attention.{query,key,value} | dense
    decoder/blocks/attn/out | decoder.decoder_layers.{i}.attention.output.dense | dense
    decoder/blocks/{norm1,norm2} | decoder.decoder_layers.{i}.{layernorm_before,layernorm_after} | norm
    decoder/blocks/mlp/{up,down} | decoder.decoder_layers.{i}.{intermediate,output}.dense | dense
    decoder/norm | decoder.decoder_norm | norm
    mask_token | decoder.mask_token | same
""")
VIT: Table = (*_COMMON, *table("""
    backbone/blocks/{norm1,norm2} | encoder.layer.{i}.{layernorm_before,layernorm_after} | norm
    backbone/blocks/mlp/{up,down} | encoder.layer.{i}.{intermediate,output}.dense | dense
"""))
"""ViT, DeiT and ViTMAE, without the prefix (`vit.`, `deit.`) that the backbone has inside of a model with a head."""
DINO: Table = (*_COMMON, *table("""
    backbone/blocks/{norm1,norm2} | encoder.layer.{i}.{norm1,norm2} | norm
    backbone/blocks/mlp/{up,down} | encoder.layer.{i}.mlp.{fc1,fc2} | dense
    backbone/blocks/{scale1,scale2} | encoder.layer.{i}.{layer_scale1,layer_scale2}.lambda1 | same
"""))
DINO_SWIGLU: Table = (*without(DINO, 'backbone/blocks/mlp/.*'), *table("""
    backbone/blocks/mlp/{gate,up,down} | encoder.layer.{i}.mlp.{weights_in[0/2],weights_in[1/2],weights_out} | dense
"""))


# Reading

def prepare(tensors: Tensors) -> Prepared:
  """Returns the tensors without the prefix of the backbone, and without those of poolers and text towers."""
  tensors = record.renamed(_from_flax(tensors), (_PREFIX, ''), (r'^cls_classifier', 'classifier'),
                    (r'^layers\.', 'encoder.layer.'),
                    (r'^decoder\.decoder_encoder\.layer\.', 'decoder.decoder_layers.'))  # saved by transformers 5.23
  tensors, dropped = record.dropping(tensors, _DROPS)
  return Prepared(tensors, dropped, label='huggingface')


def _from_flax(tensors: Tensors) -> Tensors:
  """Returns the tensors of a `flax_model.msgpack` under the names and in the layouts of PyTorch; others as they are."""
  if not any(re.search(r'embeddings/patch_embeddings?/(projection/)?kernel$', name) for name in tensors):
    return tensors
  axes = {2: (1, 0), 4: (3, 2, 0, 1)}  # of matrices and convolutions of Flax, in the order of PyTorch
  of_pytorch: Tensors = {}
  for name, x in tensors.items():
    layer, _, leaf = name.replace('/', '.').rpartition('.')
    if leaf == 'kernel' and x.ndim in axes:
      x = x.transpose(axes[x.ndim])
    if leaf in ('kernel', 'scale', 'embedding'):
      leaf = 'weight'
    of_pytorch[f'{layer}.{leaf}' if layer else leaf] = x
  return of_pytorch

def is_older(tensors: Tensors, *, has_scales: bool) -> bool:
  """Whether it is a ViT, DeiT, ViTMAE, or with layer scales a DINOv2 or TIPSv2."""
  return _PATCHES in tensors and any('.layer_scale1.' in name for name in tensors) == has_scales


def with_older_names(tensors: Tensors) -> Tensors:
  """Returns the tensors of an older network under the names that all versions have."""
  return record.renamed(tensors, *((_BLOCK + rf'attention\.{name[0]}_proj', rf'\1.attention.attention.{name}')
                            for name in ('query', 'key', 'value')),
                 (_BLOCK + r'attention\.o_proj', r'\1.attention.output.dense'))


def change_vit(tensors: Tensors) -> Changed:
  """Returns the tensors of a ViT, DeiT or ViTMAE under the names that all versions have."""
  return record.without_fixed(record.renamed(
      with_older_names(tensors), (_BLOCK + r'mlp\.fc1', r'\1.intermediate.dense'),
      (_BLOCK + r'mlp\.fc2', r'\1.output.dense')), 'decoder.decoder_pos_embed')


# Writing

_FREE = ('hidden', 'kernel', 'dropout', 'eps', 'resize')
"""Settings of parts that every kind of network of transformers has, or that do not change its function."""


def differing(m: schema.ViT) -> frozenset[str]:
  """Returns the settings in which a network differs from a plain ViT, if they change its function.

  The names are dotted, such as `norm_before` and `attention.qkv_bias`; `mlp` stands for an MLP of another class.
  """
  plain, alone = schema.ViT(), ('pool', 'norm_before', 'last_norm', 'registers')
  names = {name for name in alone if getattr(m, name) != getattr(plain, name)}
  for name in ('mlp', 'attention', 'block', 'positions', 'stem', 'norm'):
    part, plain_part = getattr(m, name), getattr(plain, name)
    if type(part) is not type(plain_part):
      names.add(name)
    for field in dataclasses.fields(plain_part):
      value = getattr(plain_part, field.name)
      if field.name not in _FREE and getattr(part, field.name, value) != value:
        names.add(f'{name}.{field.name}')
  return frozenset(names)


def kind_of(weights: Weights, kinds: Iterable[Kind]) -> Kind:
  """Returns the first kind of network of transformers that computes what this one does.

  Raises:
    UserError: transformers has no such network; the message gives the reason.
  """
  m = weights.model
  if not isinstance(m, schema.ViT):
    raise UserError(f'--family: expected one that has a {type(m).__name__}, got huggingface. Set --family=timm, or '
                    'write an .npz.')
  names = differing(m)
  for kind in kinds:
    if kind.holds(m, weights, names):
      return kind
  raise UserError('--family: expected a network that transformers has, got ' + '; '.join(obstacles(m, weights))
                  + '. Set --family=timm or --family=run.')


def obstacles(m: schema.ViT, weights: Weights) -> list[str]:
  """Returns why this ViT is none of the older networks of transformers."""
  problems = []
  if not isinstance(m.pool, schema.ClassToken):
    problems.append(f'pool={pool_word(m.pool)}: its ViTs read the class token')
  if not isinstance(m.positions, schema.Learned):
    problems.append(f'positions={checks.kind(m.positions)}: its ViTs have a table')
  if isinstance(m.stem, schema.ResNetStem):
    problems.append('a ResNet stem: its hybrids are other networks')
  if weights.head.pre_logits:
    problems.append(f'head.pre_logits={weights.head.pre_logits}: its heads are one layer')
  is_dino = bool(layer_scale(m))
  if not is_dino and (m.registers or isinstance(m.mlp, schema.SwiGlu)):
    problems.append('registers or SwiGLU without LayerScale, which its DINOv2 always has')
  if is_dino and weights.num_classes:
    problems.append('a head on the class token alone: that of its DINOv2 reads the mean patch as well')
  if is_dino and m.pool.distillation:
    problems.append('LayerScale or registers with a distillation token')
  return problems


def is_plain(m: schema.ViT, weights: Weights, *, distilled: bool = False, decoder: bool = False) -> bool:
  """Whether a ViT is one of the older networks without layer scales, with these parts."""
  has_decoder = bool(weights.decoder) and not m.pool.distillation
  has_parts = m.pool.distillation == distilled and has_decoder == decoder
  return has_parts and not layer_scale(m) and not obstacles(m, weights)


def under(prefix: str) -> Callable[[Tensors, Weights], Tensors]:
  """Returns a function that gives the backbone inside of a model with a head or a decoder its prefix."""
  def prefixed(tensors: Tensors, weights: Weights) -> Tensors:
    if not weights.num_classes and not weights.decoder:
      return tensors
    return {name if re.match(r'(\w*classifier|decoder|visual_projection)\.', name) else f'{prefix}.{name}': x
            for name, x in tensors.items()}

  return prefixed


ACTIVATION = {Gelu.EXACT: 'gelu', Gelu.TANH: 'gelu_pytorch_tanh', Gelu.QUICK: 'quick_gelu'}
FILTERS = {Interpolation.BILINEAR: 2, Interpolation.BICUBIC: 3, Interpolation.AREA: 4}  # BOX: the mean over an area


def config(weights: Weights, kind: Kind) -> dict[str, Any]:
  """Returns the content of `config.json`."""
  m = weights.model
  assert isinstance(m, schema.ViT)
  return {
      'architectures': [kind.loaded_by[bool(weights.num_classes)]], 'model_type': kind.model_type,
      'hidden_size': m.width, 'num_hidden_layers': m.depth, 'num_attention_heads': m.heads,
      'hidden_act': 'silu' if isinstance(m.mlp, schema.SwiGlu) else ACTIVATION[m.gelu], 'patch_size': m.patch,
      'num_channels': 3,
      'image_size': side_px(weights.preprocess), 'dtype': 'float32', 'position_resize': position_resize(m),
  } | kind.config(m, weights)


def tower_config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  """Returns what the configs of CLIP, SigLIP and I-JEPA have besides."""
  projection = {'projection_dim': weights.num_classes} if weights.num_classes else {}
  return {'layer_norm_eps': m.norm.eps, 'intermediate_size': m.mlp.hidden, **projection}


def older_config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  """Returns what the configs of the older networks have besides."""
  content: dict[str, Any] = {
      'hidden_act': ACTIVATION[m.gelu], 'layer_norm_eps': m.norm.eps,
      'qkv_bias': m.attention.qkv_bias is not QkvBias.NONE, 'hidden_dropout_prob': 0.,
      'attention_probs_dropout_prob': 0., 'initializer_range': .02}
  if names := weights.class_names or tuple(f'LABEL_{i}' for i in range(weights.num_classes)):
    content |= {'id2label': {str(i): name for i, name in enumerate(names)},
                'label2id': {name: i for i, name in enumerate(names)}}
  return content


def vit_config(m: schema.ViT, weights: Weights) -> dict[str, Any]:
  """Returns what the configs of ViT, DeiT and ViTMAE have besides."""
  return {**older_config(m, weights), 'intermediate_size': m.mlp.hidden}


def processor(p: Preprocess) -> dict[str, Any]:
  """Returns the content of `preprocessor_config.json`.

  ViTImageProcessor resizes to a square, and DeiTImageProcessor also takes a center crop; BitImageProcessor resizes the
  short side and takes a center crop.
  """
  crop = {'height': p.image_px[0], 'width': p.image_px[1]}
  content: dict[str, Any] = {
      'do_resize': True, 'resample': FILTERS[p.interpolation], 'do_rescale': True, 'rescale_factor': 1 / 255,
      'do_normalize': True, 'image_mean': list(p.mean), 'image_std': list(p.std)}
  if not p.resize_px:
    return content | {'image_processor_type': 'ViTImageProcessor', 'size': crop}
  if p.geometry is Geometry.HUGGINGFACE:
    size, processor_type = {'height': p.resize_px, 'width': p.resize_px}, 'DeiTImageProcessor'
  else:
    size, processor_type = {'shortest_edge': p.resize_px}, 'BitImageProcessor'
  return content | {'image_processor_type': processor_type, 'size': size, 'do_center_crop': True, 'crop_size': crop}
