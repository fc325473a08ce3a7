"""Makes `golden_published.npz`: what timm and open_clip say about their pretrained weights, for `test_published.py`.

Run where PyTorch, timm and open_clip are:  python tests/weights/make_golden_published.py
Made with torch 2.13, timm 1.0.31, open_clip 3.3.0; to be made anew for another version of these. The file has JSON:
`timm` has the networks of MODULES with their settings and the preprocessing of each tag, `open_clip` the pretrained
tags of ViTs, `older` the older names of timm's tags. For each distinct kind of network (other sizes aside) there are
the shapes of a small one in `kinds`, and its logits for one image with the weights of `drawn.py`.
"""
from __future__ import annotations

import json
import os
import pathlib
import sys
import warnings
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import drawn  # noqa: E402

MODULES = ('vision_transformer', 'deit', 'eva', 'mlp_mixer', 'vision_transformer_hybrid', 'resnetv2', 'efficientnet',
           'vision_transformer_relpos', 'beit', 'vision_transformer_sam', 'naflexvit', 'cait')
VITS = ('VisionTransformer', 'VisionTransformerDistilled', 'Eva')
COMPUTED = ('periods', '_mask', 'k_bias')
"""Parts of names of tensors that timm computes itself."""
NATIVELY_QUICK = 'natively QuickGELU'


def is_known(name: str, module: str) -> bool:
  """Whether networks of this kind may be read here: those of other families with the same modules are not."""
  return module in MODULES and (module != 'efficientnet' or name.startswith('tf_efficientnet_')) and (
      module != 'resnetv2' or '_bit' in name)


def timm_networks() -> dict[str, Any]:
  """Networks that have pretrained weights, by name."""
  import timm
  import torch
  from timm.models._registry import _model_to_module
  found: dict[str, Any] = {}
  for name, module in sorted(_model_to_module.items()):
    tags = [one for one in timm.list_pretrained(name) if one.partition('.')[0] == name]
    if not tags or not is_known(name, module):
      continue
    with torch.device('meta'):
      model = timm.create_model(name)
    found[name] = {**settings(model), 'default': timm.get_pretrained_cfg(name).tag,
                   'tags': {one.partition('.')[2]: preprocessing(timm.get_pretrained_cfg(one)) for one in tags}}
  return found


def settings(model: Any) -> dict[str, Any]:
  """Settings of a network that its weights do not show, and its size."""
  block = model.blocks[0] if len(getattr(model, 'blocks', ())) else None
  mlp, attention = getattr(block, 'mlp', None), getattr(block, 'attn', None)
  act = getattr(mlp, 'act', None)
  is_vit = type(model).__name__ in VITS and mlp is not None
  down = [x.shape[1] for name, x in mlp.named_parameters() if name in ('fc2.weight', 'w3.weight')] if is_vit else [0]
  return {
      'class': type(model).__name__, 'block': type(block).__name__, 'heads': getattr(attention, 'num_heads', 0),
      'act': {'GELU': 'exact', 'GELUTanh': 'tanh', 'QuickGELU': 'quick'}.get(type(act).__name__, ''),
      'eps': getattr(getattr(block, 'norm1', None), 'eps', 0.), 'pool': str(getattr(model, 'global_pool', ''))[:8],
      'has_norm': not is_vit or any(not isinstance(getattr(model, one, None), (type(None), identity()))
                                    for one in ('norm', 'fc_norm')),
      'width': model.embed_dim if is_vit else 0, 'depth': len(model.blocks) if is_vit else 0, 'mlp': down[0],
      'is_gated': type(mlp).__name__ in ('SwiGLU', 'GluMlp', 'SwiGLUPacked')}


def identity() -> type:
  import torch
  return torch.nn.Identity


def preprocessing(cfg: Any) -> list[Any]:
  """Height, width, crop, its mode, interpolation, mean, deviation, and whether the GELU is the quick one."""
  return [*cfg.input_size[1:], cfg.crop_pct, cfg.crop_mode, cfg.interpolation, list(cfg.mean), list(cfg.std),
          NATIVELY_QUICK in str(cfg.notes)]


def older_names() -> dict[str, str]:
  from timm.models._registry import _deprecated_models
  return {old: new for old, new in _deprecated_models.items() if new}


def open_clip_tags() -> list[dict[str, Any]]:
  """Pretrained ViTs of open_clip: model, tag, repository, file, GELU, size, heads and preprocessing."""
  from open_clip.factory import get_model_config
  from open_clip.pretrained import _PRETRAINED
  found = []
  for model, tags in _PRETRAINED.items():
    config = get_model_config(model) or {'vision_cfg': {'layers': []}}
    vision = config['vision_cfg']
    for tag, cfg in tags.items():
      if not isinstance(vision.get('layers'), list):
        found.append({
            'model': model, 'tag': tag, 'hub': cfg['hf_hub'].strip('/'), 'file': os.path.basename(cfg['url']),
            'is_quick': bool(cfg.get('quick_gelu') or config.get('quick_gelu')),
            'timm': vision.get('timm_model_name', ''), 'px': vision.get('image_size', 0),
            'heads': vision.get('width', 0) // vision.get('head_width', 64), 'mean': list(cfg['mean']),
            'std': list(cfg['std']), 'interpolation': cfg['interpolation'], 'resize_mode': cfg['resize_mode']})
  return found


def small(name: str, known: dict[str, Any]) -> tuple[Any, int]:
  """A small network of timm with all switches of a published one, and the side of its images."""
  import timm
  import torch
  from timm.layers import HybridEmbed
  more: dict[str, Any] = {'embed_dim': 16 * known['heads'], 'depth': 2, 'num_classes': 7}
  with torch.device('meta'):
    stem = timm.create_model(name).patch_embed
  px = 64 if isinstance(stem, HybridEmbed) else 4 * stem.patch_size[0]
  more |= {'ref_feat_shape': (4, 4)} if '_pe_' in name else {}  # as many as it has positions
  return timm.create_model(name, img_size=px, **more), px


def filled(model: Any) -> dict[str, list[int]]:
  """Gives a model the drawn weights; the shapes of its tensors."""
  import torch
  shapes = {}
  for name, old in model.state_dict().items():
    if old.ndim and not any(part in name for part in COMPUTED):
      old.copy_(torch.from_numpy(np.asarray(drawn.tensor(name, tuple(old.shape)))))
      shapes[name] = list(old.shape)
  model.eval()
  return shapes


def kind(known: dict[str, Any], shapes: dict[str, list[int]]) -> str:
  """What distinguishes a network from others of another size."""
  own = {key: known[key] for key in ('class', 'block', 'act', 'eps', 'pool', 'has_norm', 'is_gated')}
  return json.dumps([own, sorted(shapes), [len(shape) for shape in shapes.values()]])


def kinds(networks: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """One network of each kind, and its logits for one image."""
  import torch
  found, logits, seen = {}, {}, set()
  for name, known in networks.items():
    if known['class'] not in VITS or not known['depth']:
      continue
    try:
      model, px = small(name, known)
    except AssertionError as error:  # settings for each block, as of Sapiens 2
      print(name, error)
      continue
    with torch.no_grad():
      shapes = filled(model)
      if kind(known, shapes) in seen:
        continue
      seen.add(kind(known, shapes))
      image = torch.from_numpy(drawn.image(px, 1)).permute(0, 3, 1, 2).contiguous()
      logits[f'logits/{name}'] = model(image).numpy()
    found[name] = {'px': px, 'shapes': shapes}
  return found, logits


def main() -> None:
  warnings.simplefilter('ignore')
  networks = timm_networks()
  found, logits = kinds(networks)
  path = HERE / 'golden_published.npz'
  np.savez_compressed(path, timm=json.dumps(networks), older=json.dumps(older_names()),
                      open_clip=json.dumps(open_clip_tags()), kinds=json.dumps(found), **logits)
  print(len(networks), sum(len(one['tags']) for one in networks.values()), len(found), path.stat().st_size, 'bytes')


if __name__ == '__main__':
  main()
