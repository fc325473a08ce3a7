"""Makes `golden_initialization.json`: statistics of every parameter as the authors' programs create it.

Run three times, where the programs' libraries are, with the folder that holds their checkouts (dino@7c446df,
dinov2@b8931f7, deit@7e160fe, TokenLabeling@9dbfd59, mae@efb2a80, axial-deeplab@79088ed, big_vision@0127fb6,
vision_transformer@c6de1e5), each by its repository's name:

  python tests/models/make_golden_initialization.py timm
  PYTHONPATH=TIMM_0_3_2 python tests/models/make_golden_initialization.py torch CHECKOUTS
  python tests/models/make_golden_initialization.py jax CHECKOUTS

Made with torch 2.15, timm 1.0.31, jax 0.10.2, and for deit, TokenLabeling and mae timm 0.3.2, which needs a module
`torch._six` that PyTorch no longer has. Of dinov2's file with the linear classifier only that class is executed, since
the rest needs further libraries. The heads of MAE's fine-tuning and linear probe are made by the statements of
main_finetune.py, line 257, and main_linprobe.py, line 218. The program of Noisy Student was not at hand, so that
EfficientNet is left out.

The file has, for each program, the leaves by their names here: how many values were drawn over all seeds, their mean,
standard deviation, kurtosis and largest magnitude, and how many are at ±2 by an error of `trunc_normal_`. Networks have
width 32, 2 blocks of 4 heads and patches of 8 px.
"""
from __future__ import annotations

import ast
import collections.abc
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

FILE = pathlib.Path(__file__).with_name('golden_initialization.json')
SEEDS = 400
WIDTH, DEPTH, HEADS, PATCH, PX, CLASSES = 32, 2, 4, 8, 32, 10
Leaves = dict[str, np.ndarray]
SIZES: dict[str, Any] = {'img_size': PX, 'patch_size': PATCH, 'embed_dim': WIDTH, 'depth': DEPTH, 'num_heads': HEADS}

TORCH_NAMES = [  # a pattern and what replaces it; the first part of a name says where it lies
    (r'^blocks\.\d+\.', 'backbone/blocks/'), (r'^decoder_blocks\.\d+\.', 'decoder/blocks/'),
    (r'^patch_embed\.proj\.', 'backbone/stem/'), (r'^patch_embed\.(conv\d)\.', r'backbone/stem/\1/'),
    (r'^patch_embed\.bn(\d)\.', r'backbone/stem/norm\1/'), (r'^cls_token$', 'backbone/cls'),
    (r'^dist_token$', 'backbone/dist'), (r'^(reg_token|register_tokens)$', 'backbone/registers'),
    (r'^norm\.', 'backbone/norm/'), (r'^attn_pool\.', 'backbone/pool/'), (r'pool/latent$', 'pool/probe'),
    (r'pool/(q|kv|proj)\.', r'pool/attn.\1.'), (r'^(head|head_dist)\.', r'\1/'), (r'^aux_head\.', 'aux/'),
    (r'^decoder_embed\.', 'decoder/embed/'), (r'^decoder_pred\.', 'decoder/predict/'),
    (r'^decoder_norm\.', 'decoder/norm/'), (r'attn\.proj\.', 'attn/out/'), (r'attn\.', 'attn/'),
    (r'mlp\.(fc1|fc1_x)\.', 'mlp/up/'), (r'mlp\.fc1_g\.', 'mlp/gate/'), (r'mlp\.(fc2|w3)\.', 'mlp/down/'),
    (r'mlp\.w12\.', 'mlp/w12/'), (r'(gamma_|ls)([12])(\.gamma)?$', r'scale\2'),
    (r'(norm\d?)\.', r'\1/'), (r'(norm\d?/)weight$', r'\1scale'), (r'[./]weight$', '/kernel'), (r'[.]bias$', '/bias')]
PARTS = {'attn/qkv/': ('query', 'key', 'value'), 'attn/kv/': ('key', 'value'), 'attn/q/': ('query',),
         'mlp/w12/': ('gate', 'up')}


AXIAL_NAMES = [
    (r'^conv1\.', 'root.'), (r'^bn1\.', 'root_norm.'), (r'^layer1\.0\.', 'stage1.unit1.'), ('conv_down', 'conv1'),
    ('conv_up', 'conv2'), (r'downsample\.0', 'proj'), (r'downsample\.1', 'proj_norm'), ('hight_block', 'height'),
    ('width_block', 'width'), ('qkv_transform', 'qkv'), ('bn_qkv', 'qkv_norm'), ('bn_similarity', 'logits_norm'),
    ('bn_output', 'out_norm'), (r'\.bn(\d)\.', r'.norm\1.'), (r'(norm\d?\.)weight$', r'\1scale'),
    ('weight$', 'kernel'), (r'\.', '/')]


def torch_leaves(network: Any, num_first: int = 1, num_registers: int = 0) -> Iterator[tuple[str, np.ndarray]]:
  """Parameters of a network in PyTorch by their names here; fused matrices are cut into their parts.

  The first rows of its table of positions are of the class and distillation token, and of registers.
  """
  for name, parameter in network.named_parameters():
    value = parameter.detach().numpy()
    if name == 'pos_embed' and parameter.requires_grad:
      yield 'backbone/positions/patches', value[:, num_first + num_registers:]
      if num_first:
        yield 'backbone/positions/first', value[:, :num_first]
    if name.endswith('pos_embed'):
      continue
    for pattern, new in TORCH_NAMES:
      name = re.sub(pattern, new, name)
    fused = next((one for one in PARTS if one in name), '')
    if not fused:
      yield name, value
      continue
    kind = 'kernel' if value.ndim == 2 else 'bias'
    for part, one in zip(PARTS[fused], np.split(value, len(PARTS[fused])), strict=True):
      yield f'{name.partition(fused)[0]}{fused.partition("/")[0]}/{part}/{kind}', one


def joined(leaves: Iterator[tuple[str, np.ndarray]]) -> Leaves:
  """The leaves by name, those of all blocks as one."""
  found: dict[str, list[np.ndarray]] = {}
  for name, value in leaves:
    found.setdefault(name, []).append(value.ravel())
  return {name: np.concatenate(parts) for name, parts in found.items()}


def timm_programs() -> dict[str, Callable[[], Leaves]]:
  """Those of timm 1.0."""
  import timm
  from timm.layers import SwiGLU
  from timm.models.vision_transformer import VisionTransformer
  assert timm.__version__ == '1.0.31', timm.__version__

  def one(mode: str, num_first: int, **more: Any) -> Callable[[], Leaves]:
    return lambda: joined(torch_leaves(VisionTransformer(
        **SIZES, num_classes=CLASSES, weight_init=mode, mlp_layer=SwiGLU, init_values=1e-5, **more), num_first,
        more.get('reg_tokens', 0)))

  pooled = {'global_pool': 'map', 'class_token': False}
  return {'timm': one('', 1, reg_tokens=3), 'timm_jax': one('jax', 1, reg_tokens=3),
          'timm, attention pooling': one('', 0, **pooled), 'timm_jax, attention pooling': one('jax', 0, **pooled)}


def torch_programs(checkouts: pathlib.Path) -> dict[str, Callable[[], Leaves]]:
  """Those that need timm 0.3.2, and others in PyTorch."""
  six = types.ModuleType('torch._six')
  six.container_abcs, six.int_classes, six.string_classes = collections.abc, int, str  # type: ignore[attr-defined]
  sys.modules['torch._six'] = six
  setattr(np, 'float', float)  # noqa: B010  # which MAE's positions name
  import timm
  import torch
  assert timm.__version__ == '0.3.2', timm.__version__

  def load(folder: str, *names: str) -> list[Any]:
    for name in {key for key in sys.modules if key.partition('.')[0] in ('utils', 'models', 'vision_transformer')}:
      del sys.modules[name]
    sys.path.insert(0, str(checkouts / folder))
    found = [__import__(name, fromlist=['x']) for name in names]
    del sys.path[0]
    return found

  def project(head: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, parameter in head.named_parameters():
      name = re.sub(r'^mlp\.(\d)\.', lambda m: f'projector/mlp{int(m[1]) // 2 + 1}/', name)
      name = {'last_layer.weight_v': 'projector/prototypes/kernel',
              'last_layer.weight_g': 'projector/prototypes/norm'}.get(name, name)
      yield name.replace('weight', 'kernel'), parameter.detach().numpy()

  def linear(layer: Any, name: str) -> Leaves:
    return {f'{name}/kernel': layer.weight.detach().numpy(), f'{name}/bias': layer.bias.detach().numpy()}

  dino, of_probe = load('dino', 'vision_transformer', 'eval_linear')
  dinov2, head2 = load('dinov2', 'dinov2.models.vision_transformer', 'dinov2.layers.dino_head')
  source = ast.parse((checkouts / 'dinov2' / 'dinov2' / 'eval' / 'linear.py').read_text())
  probe2 = {'nn': torch.nn}
  exec(ast.unparse(next(one for one in source.body if getattr(one, 'name', '') == 'LinearClassifier')), probe2)
  deit, deit3 = load('deit', 'models', 'models_v2')
  lvvit, = load('TokenLabeling', 'tlt.models.lvvit')
  mae, mae_vit = load('mae', 'models_mae', 'models_vit')
  axial, = load('axial-deeplab/lib', 'models.axialnet')
  head = {'in_dim': WIDTH, 'out_dim': 64, 'hidden_dim': 48, 'bottleneck_dim': 16}
  classes = {'num_classes': CLASSES}

  def of_dino() -> Leaves:
    net = dino.VisionTransformer(**{**SIZES, 'img_size': [PX]}, qkv_bias=True, **classes)
    return {**joined(torch_leaves(net)), **dict(project(dino.DINOHead(**head, norm_last_layer=False))),
            **linear(of_probe.LinearClassifier(WIDTH, CLASSES).linear, 'probe')}

  def of_dinov2() -> Leaves:
    net = dinov2.DinoVisionTransformer(**SIZES, num_register_tokens=3, init_values=1e-5, ffn_layer='swiglu',
                                       block_chunks=0)
    return {**joined(torch_leaves(net)), **dict(project(head2.DINOHead(**head))),
            **linear(probe2['LinearClassifier'](WIDTH, use_n_blocks=1, use_avgpool=False, **classes).linear, 'probe')}

  def of_mae() -> Leaves:
    net = mae.MaskedAutoencoderViT(**SIZES, decoder_embed_dim=16, decoder_depth=1, decoder_num_heads=2)
    heads = {}
    for name, std in (('head', 2e-5), ('probe', .01)):
      layer = mae_vit.VisionTransformer(**SIZES, qkv_bias=True, **classes).head
      timm.models.layers.trunc_normal_(layer.weight, std=std)
      heads |= linear(layer, name)
    return {**joined(torch_leaves(net)), **heads}

  def of_axial() -> Leaves:
    net = axial.AxialAttentionNet(axial.AxialBlock, (1, 1, 1, 1), zero_init_residual=True, s=.25, groups=4)
    found = {}
    for name, value in net.named_parameters():
      if name.startswith(('conv1', 'bn1', 'layer1')):
        for pattern, new in AXIAL_NAMES:
          name = re.sub(pattern, new, name)
        found[f'backbone/{name}'] = value.detach().numpy()
    return found

  return {
      'dino': of_dino, 'dinov2': of_dinov2, 'mae': of_mae, 'axial': of_axial,
      'deit': lambda: joined(torch_leaves(deit.DistilledVisionTransformer(**SIZES, qkv_bias=True, **classes), 2)),
      'deit3': lambda: joined(torch_leaves(deit3.vit_models(
          **SIZES, qkv_bias=True, init_scale=1e-4, block_layers=deit3.Layer_scale_init_Block, **classes), 0)),
      'lvvit': lambda: joined(torch_leaves(lvvit.LV_ViT(**SIZES, return_dense=True, mix_token=True, **classes)))}


FLAX_NAMES = [
    (r'^embedding/', 'backbone/stem/'), (r'^cls$', 'backbone/cls'),
    (r'^(Transformer/posembed_input/)?pos_embedding$', 'backbone/positions'),
    (r'^conv_root/', 'backbone/stem/root/'), (r'^gn_root/', 'backbone/stem/root_norm/'),
    (r'^block1/unit1/', 'backbone/stem/stage1/unit1/'), (r'^root_block/conv_root/', 'backbone/root/'),
    (r'^block1/unit01/', 'backbone/stage1/unit1/'), (r'^norm-pre-head/', 'backbone/norm/'),
    ('/conv_proj/', '/proj/'), ('/gn_proj/', '/proj_norm/'), (r'/gn(\d)/', r'/norm\1/'),
    (r'^Transformer/encoder_norm/', 'backbone/norm/'), (r'^Transformer/encoderblock_\d+/', 'backbone/blocks/'),
    (r'^MAPHead_0/', 'backbone/pool/'), (r'MultiHeadDotProductAttention_\d/', 'attn/'), (r'MlpBlock_\d/', 'mlp/'),
    (r'pool/LayerNorm_0/', 'pool/norm/'), (r'mlp/Dense_0/', 'mlp/up/'), (r'mlp/Dense_1/', 'mlp/down/'),
    (r'blocks/LayerNorm_0/', 'blocks/norm1/'), (r'blocks/LayerNorm_[12]/', 'blocks/norm2/'),
    (r'^pre_logits/', 'head/pre_logits/'),
    (r'^stem/', 'backbone/stem/'), (r'^MixerBlock_\d+/', 'backbone/blocks/'), (r'LayerNorm_0/', 'norm1/'),
    (r'LayerNorm_1/', 'norm2/'), (r'token_mixing/', 'tokens/'), (r'channel_mixing/', 'channels/'),
    (r'Dense_0/', 'up/'), (r'Dense_1/', 'down/'), (r'^pre_head_layer_norm/', 'backbone/norm/')]


def jax_programs(checkouts: pathlib.Path) -> dict[str, Callable[[], Leaves]]:
  """Those in JAX; each call draws all seeds at once."""
  sys.path[:0] = [str(checkouts / 'big_vision'), str(checkouts / 'vision_transformer')]
  import flax
  import jax
  import jax.numpy as jnp
  from big_vision.models import bit_paper, mlp_mixer
  from big_vision.models import vit as big_vision

  from vit_jax import models_vit

  def leaves(network: Any, num_first: int = 1) -> Callable[[], Leaves]:
    def make() -> Leaves:
      init = jax.vmap(lambda key: network.init(key, jnp.zeros((1, PX, PX, 3)), train=False)['params'])
      tree = jax.jit(init)(jax.random.split(jax.random.key(0), SEEDS))
      found: dict[str, list[np.ndarray]] = {}
      for path, value in flax.traverse_util.flatten_dict(tree, sep='/').items():
        name = path
        for pattern, new in FLAX_NAMES:
          name = re.sub(pattern, new, name)
        if name == 'backbone/positions':
          found['backbone/positions/patches'] = [np.asarray(value)[:, :, num_first:]]
          found |= {'backbone/positions/first': [np.asarray(value)[:, :, :num_first]]} if num_first else {}
        else:
          found.setdefault(name, []).append(np.asarray(value).ravel())
      return {name: np.concatenate([one.ravel() for one in parts]) for name, parts in found.items()}
    return make

  transformer = {'num_layers': DEPTH, 'mlp_dim': 4 * WIDTH, 'num_heads': HEADS}
  vit: dict[str, Any] = {'num_classes': CLASSES, 'hidden_size': WIDTH, 'transformer': transformer}
  big: dict[str, Any] = {'num_classes': CLASSES, 'patch_size': (PATCH, PATCH), 'width': WIDTH, 'depth': DEPTH,
                         'num_heads': HEADS}
  return {
      'vision_transformer': leaves(models_vit.VisionTransformer(
          **vit, patches=types.SimpleNamespace(size=(PATCH, PATCH)), representation_size=24, head_bias_init=-3.)),
      'vision_transformer, hybrid': leaves(models_vit.VisionTransformer(
          **vit, patches=types.SimpleNamespace(size=(2, 2)),
          resnet=types.SimpleNamespace(num_layers=(1,), width_factor=.5))),
      'big_vision': leaves(big_vision._Model(**big, pool_type='tok', rep_size=24), 0),
      'big_vision, attention pooling': leaves(big_vision._Model(**big, pool_type='map'), 0),
      'mixer': leaves(mlp_mixer.MlpMixer(
          patch_size=(PATCH, PATCH), num_classes=CLASSES, num_blocks=DEPTH, hidden_dim=WIDTH, tokens_mlp_dim=24,
          channels_mlp_dim=48)),
      'bit': leaves(bit_paper.Model(num_classes=CLASSES, width=.5, depth=(1,)))}


def statistics(values: np.ndarray) -> list[float]:
  """How many values, mean, standard deviation, kurtosis (0 of equal values), largest magnitude, how many at ±2.

  In the `trunc_normal_` of DINO and timm one value in 2^24 is at the lower end of the truncation, 100 standard
  deviations away: the inverse of the error function is infinite at -1. They are counted, and left out of the other
  figures.
  """
  x = values.astype(np.float64).ravel()
  ends = np.abs(x) == 2.
  x = x[~ends]
  std = x.std() if np.ptp(x) else 0.
  kurtosis = ((x - x.mean()) ** 4).mean() / std ** 4 if std else 0.
  return [values.size, *(float(f'{one:.6g}') for one in (x.mean(), std, kurtosis, np.abs(x).max())), int(ends.sum())]


def main(kind: str, checkouts: str = '') -> None:
  where = pathlib.Path(checkouts)
  programs = timm_programs() if kind == 'timm' else torch_programs(where) if kind == 'torch' else jax_programs(where)
  golden = json.loads(FILE.read_text()) if FILE.exists() else {}
  for name, make in programs.items():
    found: dict[str, list[np.ndarray]] = {}
    for seed in range(1 if kind == 'jax' else SEEDS):
      if kind != 'jax':
        import torch
        torch.manual_seed(seed)
      for leaf, value in make().items():
        found.setdefault(leaf, []).append(np.array(value).ravel())
    golden[name] = {leaf: statistics(np.concatenate(parts)) for leaf, parts in sorted(found.items())}
    print(name, len(golden[name]), flush=True)
    write(golden)


def write(golden: dict[str, dict[str, list[float]]]) -> None:
  lines = [f' {json.dumps(name)}: {{\n' + ',\n'.join(f'  {json.dumps(leaf)}: {json.dumps(row)}'
                                                     for leaf, row in golden[name].items()) + '}'
           for name in sorted(golden)]
  FILE.write_text('{\n' + ',\n'.join(lines) + '}\n')


if __name__ == '__main__':
  main(*sys.argv[1:])
