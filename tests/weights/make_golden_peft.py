"""Makes golden_peft.npz: small random networks of transformers and timm with adapters of PEFT, and what they compute.

    python make_golden_peft.py golden_peft.npz

Needs torch 2.13, transformers 5.23, timm 1.0.31, peft 0.21; the tests do not. Nothing here is part of those programs.
For each case: the tensors of the base and of the adapters as PEFT saves them, its adapter_config.json, an image, the
logits, and the gradients of `(logits * weights).sum()` by adapters and head.
"""
from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import timm
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import ViTConfig, ViTForImageClassification

TIMM_LAYERS = r'blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])'
CASES: dict[str, dict[str, Any]] = {
    'hf_lora': {'r': 4, 'lora_alpha': 8, 'target_modules': r'.*\.(q_proj|v_proj)', 'modules_to_save': ['classifier']},
    'hf_dora': {'r': 3, 'lora_alpha': 5, 'use_dora': True, 'use_rslora': True, 'modules_to_save': ['classifier'],
                'target_modules': r'.*\.([qkvo]_proj|fc[12])'},
    'timm_lora': {'r': 2, 'lora_alpha': 6, 'target_modules': TIMM_LAYERS, 'rank_pattern': {'qkv': 3},
                  'alpha_pattern': {'qkv': 4}, 'modules_to_save': ['head']},
    'timm_dora': {'r': 2, 'lora_alpha': 6, 'use_dora': True, 'target_modules': TIMM_LAYERS,
                  'modules_to_save': ['head']},
}


def network(case: str) -> torch.nn.Module:
  if case.startswith('hf'):
    return ViTForImageClassification(ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_labels=5,
                                               intermediate_size=24, image_size=16, patch_size=8))
  return timm.models.VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5,
                                       num_classes=5)


def draw(model: torch.nn.Module) -> None:
  """Random values for all parameters, so that none is zero."""
  with torch.no_grad():
    for name, p in model.named_parameters():
      p.copy_(p.abs() * (1 + .3 * torch.rand_like(p)) if 'magnitude' in name else p + .2 * torch.randn_like(p))


def make(case: str) -> dict[str, np.ndarray]:
  torch.manual_seed(sorted(CASES).index(case))
  base = network(case)
  draw(base)
  with tempfile.TemporaryDirectory() as folder:
    if case.startswith('hf'):
      base.save_pretrained(folder)
      found = {f'base/{k}': v for k, v in load_file(f'{folder}/model.safetensors').items()}
      found['base_config'] = np.array(pathlib.Path(folder, 'config.json').read_text())
    else:
      found = {f'base/{k}': v.numpy().copy() for k, v in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(**CASES[case])).eval()
    for name, p in model.named_parameters():
      if 'lora_' in name:
        with torch.no_grad():
          p.copy_(p.abs() * (1 + .3 * torch.rand_like(p)) if 'magnitude' in name else .3 * torch.randn_like(p))
    model.save_pretrained(folder)
    found |= {f'adapter/{k}': v for k, v in load_file(f'{folder}/adapter_model.safetensors').items()}
    config = json.loads(pathlib.Path(folder, 'adapter_config.json').read_text())
  found['config'] = np.array(json.dumps(config))
  image, weights = torch.randn(3, 3, 16, 16), torch.randn(3, 5)
  logits = model(image)
  logits = logits if isinstance(logits, torch.Tensor) else logits.logits
  (logits * weights).sum().backward()
  found |= {'image': image.permute(0, 2, 3, 1).numpy(), 'weights': weights.numpy(), 'logits': logits.detach().numpy()}
  for name, p in model.named_parameters():
    if p.grad is not None:
      plain = name.replace('.default', '').replace('modules_to_save.', '')
      found[f'gradient/{plain}'] = p.grad.numpy()
  return {f'{case}/{name}': x for name, x in found.items()}


if __name__ == '__main__':
  torch.set_num_threads(1)
  np.savez_compressed(sys.argv[1], **{name: x for case in CASES for name, x in make(case).items()})
