"""Makes `golden_families.npz`: what timm and transformers compute with the weights of `drawn.py`, at three sizes.

Run where PyTorch, transformers and timm are:  python tests/weights/make_golden_families.py [PREFIX]
Made with torch 2.13, transformers 5.23, timm 1.0.31; to be made anew when a format is added here. For each format the
file has the names and shapes of its tensors, its config, and for one image of each of SIZES the pooled features, the
patch tokens and, with a head, its outputs. Names of the authors' files are those that timm's own readers take.
"""
from __future__ import annotations

import functools
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import drawn  # noqa: E402

SIZES = ((32, 32), (16, 16), (48, 32))  # native, half, not square
TINY = {'img_size': 32, 'patch_size': 8, 'embed_dim': 32, 'depth': 2, 'num_heads': 2}
HF = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 48, 'image_size': 32,
      'patch_size': 8}
RATIO = 1.5
Outputs = dict[str, np.ndarray]


def image(size: tuple[int, int]) -> Any:
  import torch
  return torch.from_numpy(drawn.image(48, 1)[:, :size[0], :size[1]]).permute(0, 3, 1, 2).contiguous()


def timm_vits() -> dict[str, Any]:
  """Networks of timm's class VisionTransformer."""
  import torch
  from timm.layers import LayerNorm, RmsNorm, SwiGLU, SwiGLUPacked
  from timm.models.vision_transformer import VisionTransformer
  tiny = {**TINY, 'mlp_ratio': RATIO, 'num_classes': 0, 'dynamic_img_size': True}
  five = functools.partial(LayerNorm, eps=1e-5)
  rms = functools.partial(RmsNorm, eps=1e-5)
  clip = {**tiny, 'pre_norm': True, 'norm_layer': five}
  mean = {'class_token': False, 'global_pool': 'avg', 'fc_norm': False}
  return {
      'timm_clip_openai': VisionTransformer(**{**clip, 'num_classes': 16}, act_layer='quick_gelu'),
      'timm_clip_laion': VisionTransformer(**clip),
      'timm_siglip': VisionTransformer(**tiny, class_token=False, global_pool='map'),
      'timm_dinov2': VisionTransformer(**tiny, init_values=1e-5),
      'timm_aimv2': VisionTransformer(**{**tiny, **mean}, qkv_bias=False, proj_bias=False, act_layer='silu',
                                      norm_layer=rms, embed_norm_layer=rms, mlp_layer=SwiGLU),
      'timm_tipsv2': VisionTransformer(**tiny, init_values=1., reg_tokens=1, no_embed_class=True),
      'timm_tipsv2_giant': VisionTransformer(
          **{**tiny, 'mlp_ratio': 3.}, init_values=1., reg_tokens=1, no_embed_class=True, mlp_layer=SwiGLUPacked,
          act_layer=torch.nn.SiLU),
      'timm_ijepa': VisionTransformer(**{**tiny, **mean}),
      'timm_mae_finetuned': VisionTransformer(**{**tiny, 'num_classes': 7}, global_pool='avg'),
  }


def timm_evas() -> dict[str, Any]:
  """Networks of timm's class Eva."""
  from timm.layers import LayerNorm
  from timm.models.eva import Eva
  tiny = {**TINY, 'mlp_ratio': RATIO, 'num_classes': 0, 'dynamic_img_size': True, 'use_rot_pos_emb': True}
  five = functools.partial(LayerNorm, eps=1e-5)
  dino = {**tiny, 'use_abs_pos_emb': False, 'rope_type': 'dinov3', 'rope_temperature': 100, 'rope_rotate_half': True,
          'init_values': 1e-5, 'num_reg_tokens': 2, 'use_fc_norm': False, 'norm_layer': five, 'global_pool': 'token'}
  eva = {**tiny, 'swiglu_mlp': True, 'ref_feat_shape': (16, 16)}
  large = {**eva, 'qkv_fused': False, 'scale_mlp': True}
  pe = {**tiny, 'attn_type': 'rope', 'use_pre_transformer_norm': True, 'ref_feat_shape': (4, 4),
        'rope_grid_offset': 1., 'rope_grid_indexing': 'xy', 'norm_layer': five}
  rope = {**tiny, 'attn_type': 'rope', 'init_values': 1e-5, 'global_pool': 'token', 'use_abs_pos_emb': False,
          'rope_grid_indexing': 'xy', 'rope_temperature': 100., 'no_embed_class': True}
  mixed = {**rope, 'rope_type': 'mixed', 'rope_temperature': 10.}
  core = {**pe, 'global_pool': 'map', 'attn_pool_num_heads': 8, 'attn_pool_mlp_ratio': 2.}
  return {
      'timm_dinov3': Eva(**dino, qkv_bias=False),
      'timm_dinov3_plus_qkvb': Eva(**dino, swiglu_mlp=True, swiglu_align_to=8),
      'timm_eva02_small': Eva(**{**eva, 'num_classes': 7}), 'timm_eva02_base': Eva(**large),
      'timm_eva02_clip': Eva(**{**large, 'num_classes': 16}, scale_attn_inner=True, global_pool='token'),
      'timm_ropevit': Eva(**rope), 'timm_ropevit_mixed': Eva(**mixed),
      'timm_ropevit_ape': Eva(**{**rope, 'use_abs_pos_emb': True}),
      'timm_ropevit_mixed_ape': Eva(**{**mixed, 'use_abs_pos_emb': True}),
      'timm_ropevit_sbb': Eva(**{**tiny, 'init_values': 1e-5, 'use_abs_pos_emb': False, 'ref_feat_shape': (16, 16)},
                              class_token=False, num_reg_tokens=1),
      'timm_pe_core': Eva(**{**core, 'num_classes': 16}),
      'timm_pe_core_giant': Eva(**{**core, 'rope_grid_offset': 0.}, class_token=False),
      'timm_pe_spatial': Eva(**pe, use_post_transformer_norm=False, use_fc_norm=False),
      'timm_pe_lang': Eva(**pe, use_post_transformer_norm=False, use_fc_norm=False, init_values=.1),
  }


def huggingface() -> dict[str, Any]:
  import transformers as t
  dino = {**HF, 'num_register_tokens': 2, 'layerscale_value': .5}
  tips = {k: v for k, v in HF.items() if k != 'intermediate_size'}
  return {
      'hf_clip': t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**HF, projection_dim=16)),
      'hf_openclip': t.CLIPVisionModel(t.CLIPVisionConfig(**HF, hidden_act='gelu')),
      'hf_siglip': t.SiglipVisionModel(t.SiglipVisionConfig(**HF)),
      'hf_dinov2': t.Dinov2Model(t.Dinov2Config(**tips)),
      'hf_dinov3': t.DINOv3ViTModel(t.DINOv3ViTConfig(**dino)),
      'hf_dinov3_plus': t.DINOv3ViTModel(t.DINOv3ViTConfig(**dino, use_gated_mlp=True, hidden_act='silu')),
      'hf_aimv2': t.Aimv2VisionModel(t.Aimv2VisionConfig(**HF, use_head=False)),
      'hf_aimv2_native': t.Aimv2VisionModel(t.Aimv2VisionConfig(**HF, use_head=False, is_native=True)),
      'hf_tipsv2': t.Tipsv2VisionModel(t.Tipsv2VisionConfig(**tips, mlp_ratio=RATIO)),
      'hf_ijepa': t.IJepaModel(t.IJepaConfig(**HF)),
  }


def openai_name(name: str) -> str:
  """The name in files of CLIP and of the Perception Encoder of a tensor of timm."""
  for old, new in ((r'^patch_embed\.proj\.', 'conv1.'), (r'^pos_embed$', 'positional_embedding'),
                   (r'^cls_token$', 'class_embedding'), (r'^norm_pre\.', 'ln_pre.'), (r'^norm\.', 'ln_post.'),
                   (r'\.norm([12])\.', r'.ln_\1.'), (r'^blocks\.', 'transformer.resblocks.'), (r'\.qkv\.', '.in_proj_'),
                   (r'(\d\.attn)\.proj\.', r'\1.out_proj.'), (r'\.gamma_(\d)$', r'.ls_\1.gamma'),
                   (r'^(transformer.*mlp)\.fc1\.', r'\1.c_fc.'), (r'^(transformer.*mlp)\.fc2\.', r'\1.c_proj.'),
                   (r'^attn_pool\.latent$', 'attn_pool.probe'), (r'^attn_pool\.proj\.', 'attn_pool.attn.out_proj.'),
                   (r'^attn_pool\.norm\.', 'attn_pool.layernorm.'), (r'^attn_pool\.mlp\.fc1', 'attn_pool.mlp.c_fc'),
                   (r'^attn_pool\.mlp\.fc2', 'attn_pool.mlp.c_proj')):
    name = re.sub(old, new, name)
  return name


def as_openai(state: Outputs) -> Outputs:
  found: Outputs = {}
  for name, x in state.items():
    if name == 'head.bias' or name.startswith('attn_pool.kv'):
      continue
    if name == 'head.weight':
      found['proj'] = x.T
    elif name.startswith('attn_pool.q.'):
      kind = name.rsplit('.', 1)[1]
      found[f'attn_pool.attn.in_proj_{kind}'] = np.concatenate([x, state[f'attn_pool.kv.{kind}']])
    else:
      found[openai_name(name)] = x[0] if name == 'pos_embed' else x[0, 0] if name == 'cls_token' else x
  return {f'visual.{name}': x for name, x in found.items()} | {
      'logit_scale': np.float32(2.), 'positional_embedding': np.zeros((5, 16), np.float32)}


def as_dinov3(state: Outputs) -> Outputs:
  found: Outputs = {'rope_embed.periods': np.ones(4, np.float32), 'mask_token': np.zeros((1, 32), np.float32)}
  for name, x in state.items():
    if name.endswith('.q_bias'):
      prefix = name.removesuffix('.q_bias')
      width = len(x)
      found[f'{prefix}.qkv.bias'] = np.concatenate([x, np.full(width, 9., np.float32), state[f'{prefix}.v_bias']])
      found[f'{prefix}.qkv.bias_mask'] = np.repeat(np.float32([1, 0, 1]), width)
    elif not name.endswith('.v_bias'):
      for old, new in (('reg_token', 'storage_tokens'), ('gamma_1', 'ls1.gamma'), ('gamma_2', 'ls2.gamma'),
                       ('fc1_g', 'w1'), ('fc1_x', 'w2'), ('mlp.fc2', 'mlp.w3' if 'blocks.0.mlp.fc1_g.weight' in state
                                                          else 'mlp.fc2')):
        name = name.replace(old, new)
      found[name] = x
  return found


def as_aimv2(state: Outputs) -> Outputs:
  rules = (('patch_embed.', 'preprocessor.patchifier.'), ('pos_embed', 'preprocessor.pos_embed'),
           ('blocks.', 'trunk.blocks.'), ('fc1_g', 'fc1'), ('fc1_x', 'fc3'), ('norm1', 'norm_1'), ('norm2', 'norm_2'))
  def rename(name: str) -> str:
    if name.startswith('norm.'):
      return 'trunk.post_trunk_norm.weight'
    return functools.reduce(lambda one, rule: one.replace(*rule), rules, name)

  return {rename(name): x for name, x in state.items()}


def as_eva02(state: Outputs) -> Outputs:
  rules = (('mlp.norm', 'mlp.ffn_ln'), ('attn.norm', 'attn.inner_attn_ln'), ('fc1_g', 'w1'), ('fc1_x', 'w2'),
           ('mlp.fc2', 'mlp.w3'), ('q_proj.bias', 'q_bias'), ('v_proj.bias', 'v_bias'))
  found = {functools.reduce(lambda one, rule: one.replace(*rule), rules, name): x for name, x in state.items()}
  return found | {'rope.freqs_cos': np.zeros((16, 16), np.float32), 'rope.freqs_sin': np.zeros((16, 16), np.float32)}


ORIGINALS: dict[str, tuple[str, Callable[[Outputs], Outputs]]] = {
    'original_clip_openai': ('timm_clip_openai', as_openai), 'original_pe_core': ('timm_pe_core', as_openai),
    'original_pe_lang': ('timm_pe_lang', as_openai), 'original_dinov3': ('timm_dinov3_plus_qkvb', as_dinov3),
    'original_aimv2': ('timm_aimv2', as_aimv2), 'original_eva02': ('timm_eva02_base', as_eva02)}
"""Files with the names of their authors: which network of timm computes the same, and how its tensors are named."""


def tensors(shapes: dict[str, list[int]]) -> Outputs:
  """The drawn weights of a network. The head of CLIP and its like has zeros as bias."""
  is_tower = any(name.startswith('norm_pre') for name in shapes)
  found = {name: np.asarray(drawn.tensor(name, tuple(shape))) for name, shape in shapes.items()}
  return {name: np.zeros_like(x) if name == 'head.bias' and is_tower else x for name, x in found.items()}


def fill(model: Any) -> Outputs:
  """Gives a model the drawn weights; its tensors by name."""
  import torch
  found = tensors({name: list(old.shape) for name, old in model.state_dict().items()})
  for name, old in model.state_dict().items():
    old.copy_(torch.from_numpy(found[name]))
  model.eval()
  return found


def check_original(name: str, model: Any, tensors: Outputs) -> None:
  """Checks that timm's own reader of the authors' files makes these tensors the same network."""
  import torch
  from timm.models import eva, vision_transformer
  module = eva if type(model).__name__ == 'Eva' else vision_transformer
  read = module.checkpoint_filter_fn({k: torch.from_numpy(np.array(x)) for k, x in tensors.items()}, model)
  for key, value in model.state_dict().items():
    assert torch.equal(read[key], value), (name, key)


def outputs(name: str, model: Any, size: tuple[int, int]) -> Outputs:
  """Pooled features and patch tokens, both after the last norm, and the outputs of the head."""
  import torch
  x = image(size)
  with torch.no_grad():
    if not name.startswith('hf'):
      tokens = model.forward_features(x)
      found = {'pooled': model.forward_head(tokens, pre_logits=True), 'tokens': tokens[:, model.num_prefix_tokens:]}
      found |= {'logits': model(x)} if model.num_classes else {}
      return {key: value.numpy() for key, value in found.items()}
    if name == 'hf_aimv2' and size != SIZES[0]:
      return {}
    more = {'interpolate_pos_encoding': True} if re.fullmatch('hf_(clip|openclip|siglip|ijepa)', name) else {}
    out = model(x, **more)
    tower = getattr(model, 'vision_model', model)
    tokens, num_first = out.last_hidden_state, 0
    if 'clip' in name:
      tokens, num_first = tower.post_layernorm(tokens), 1
    if 'dino' in name or 'tips' in name:
      num_first = 1 + getattr(model.config, 'num_register_tokens', 0)
    found = {'tokens': tokens[:, num_first:]}
    is_mean = 'aimv2' in name or 'ijepa' in name
    found['pooled'] = tokens.mean(1) if is_mean else out.pooler_output if 'siglip' in name else tokens[:, 0]
    found |= {'logits': out.image_embeds} if hasattr(out, 'image_embeds') else {}
    return {key: value.numpy() for key, value in found.items()}


def models(only: str) -> dict[str, tuple[Any, Outputs]]:
  """All networks with their tensors, by name of the format; those of the authors' files are read by timm first."""
  made = {**timm_vits(), **timm_evas(), **({} if only else huggingface())}
  found = {name: (model, fill(model)) for name, model in made.items() if name.startswith(only)}
  for name, (source, rename) in () if only else ORIGINALS.items():
    check_original(name, found[source][0], rename(found[source][1]))
  return found


KEPT = ('model_type', 'hidden_act', 'layer_norm_eps', 'rms_norm_eps', 'num_attention_heads', 'image_size', 'patch_size',
        'rope_theta')
"""What is read of a config of transformers."""


def main(only: str = '') -> None:
  """Writes the file; with `only`, the networks whose name begins so are made anew, and the others kept."""
  held: Outputs = dict(np.load(HERE / 'golden_families.npz')) if only else {}
  for name, (model, found) in models(only).items():
    config = {k: v for k, v in model.config.to_dict().items() if k in KEPT} if name.startswith('hf') else {}
    held[f'{name}/about'] = np.array(json.dumps({'shapes': {k: list(v.shape) for k, v in found.items()},
                                                 'config': config}))
    for size in SIZES:
      for kind, value in outputs(name, model, size).items():
        held[f'{name}/{size[0]}x{size[1]}/{kind}'] = value
    print(name, float(value.std()))
  np.savez_compressed(HERE / 'golden_families.npz', **held)
  print((HERE / 'golden_families.npz').stat().st_size, 'bytes')


if __name__ == '__main__':
  main(*sys.argv[1:])
