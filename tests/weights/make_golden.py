"""Makes `golden.npz`: what transformers and timm compute with the weights of `drawn.py`, for `test_golden.py`.

Run where PyTorch, transformers and timm are:  python tests/weights/make_golden.py
Made with torch 2.13, transformers 5.23, timm 1.0.31; to be made anew when a model is added here.
The file holds, for each model, names and shapes of its tensors, its config, and its outputs for two images.
"""
from __future__ import annotations

import functools
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import drawn  # noqa: E402

TINY = {'img_size': 32, 'patch_size': 8, 'embed_dim': 32, 'depth': 2, 'num_heads': 4, 'num_classes': 7}
BIT_CHANNELS = (256, 512)
HF = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'intermediate_size': 48, 'image_size': 32,
      'patch_size': 8, 'num_labels': 7}


def fill(model: torch.nn.Module) -> dict[str, np.ndarray]:
  """Gives a model the drawn weights; its tensors by name."""
  found = {}
  for name, old in model.state_dict().items():
    table = 'decoder_pos_embed' in name
    new = drawn.decoder_positions(4, old.shape[-1]) if table else np.asarray(drawn.tensor(name, tuple(old.shape)))
    old.copy_(torch.from_numpy(new))
    found[name] = new
  model.eval()
  return found


def images(px: int) -> torch.Tensor:
  return torch.from_numpy(drawn.image(px)).permute(0, 3, 1, 2).contiguous()


def bit() -> Any:
  from timm.layers import StdConv2d
  from timm.models.resnetv2 import ResNetV2
  return ResNetV2((1, 2), BIT_CHANNELS, num_classes=7, stem_type='fixed',
                  conv_layer=functools.partial(StdConv2d, eps=1e-8))


def timm_models() -> dict[str, Any]:
  import timm
  from timm.layers import SwiGLUPacked
  from timm.models.mlp_mixer import MlpMixer
  from timm.models.vision_transformer import VisionTransformer
  from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2

  def hybrid(layers: tuple[int, ...], patch: int) -> Any:
    embed = functools.partial(HybridEmbed, backbone=_resnetv2(layers))
    return VisionTransformer(**{**TINY, 'patch_size': patch, 'embed_layer': embed})

  deit = timm.models.deit.VisionTransformerDistilled(**TINY)
  return {
      'timm_bit': bit(), 'timm_efficientnet': timm.create_model('tf_efficientnet_b0', num_classes=7),
      'timm_vit': VisionTransformer(**TINY),
      'timm_deit_distilled': deit,
      'timm_registers': VisionTransformer(**TINY, reg_tokens=3, init_values=.1, no_embed_class=True),
      'timm_registers_embedded': VisionTransformer(**TINY, reg_tokens=3),
      'timm_map': VisionTransformer(**TINY, class_token=False, global_pool='map'),
      'timm_mean': VisionTransformer(**TINY, class_token=False, global_pool='avg', fc_norm=False),
      'timm_mean_fc_norm': VisionTransformer(**TINY, class_token=False, global_pool='avg'),
      'timm_mae_finetuned': VisionTransformer(**TINY, global_pool='avg'),  # what MAE's models_vit.py computes
      'timm_qk_norm': VisionTransformer(**TINY, qk_norm=True),
      'timm_swiglu': VisionTransformer(**{**TINY, 'num_classes': 0}, mlp_layer=SwiGLUPacked, act_layer=torch.nn.SiLU,
                                       init_values=.1, mlp_ratio=3.),
      'timm_hybrid': hybrid((1, 2), 1),
      'timm_hybrid_root': hybrid((), 4),
      'timm_mixer': MlpMixer(num_classes=7, img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
  }


def hf_models() -> dict[str, Any]:
  import transformers as t
  dino = {k: v for k, v in HF.items() if k not in ('intermediate_size', 'num_labels')}
  decoder = {'decoder_hidden_size': 16, 'decoder_num_hidden_layers': 2, 'decoder_num_attention_heads': 2,
             'decoder_intermediate_size': 64, 'mask_ratio': 0.}
  return {
      'hf_vit': t.ViTForImageClassification(t.ViTConfig(**HF)),
      'hf_vit_tanh': t.ViTForImageClassification(t.ViTConfig(
          **HF, hidden_act='gelu_pytorch_tanh', layer_norm_eps=1e-3)),
      'hf_vit_bare': t.ViTModel(t.ViTConfig(**HF)),
      'hf_deit': t.DeiTForImageClassificationWithTeacher(t.DeiTConfig(**HF)),
      'hf_mae': t.ViTMAEForPreTraining(t.ViTMAEConfig(**{k: v for k, v in HF.items() if k != 'num_labels'}, **decoder)),
      'hf_dinov2': t.Dinov2Model(t.Dinov2Config(**dino)),
      'hf_dinov2_registers': t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**dino, num_register_tokens=3)),
      'hf_dinov2_swiglu': t.Dinov2Model(t.Dinov2Config(**dino, use_swiglu_ffn=True)),
  }


def npz_shapes(*, attention: int, norm: int, mlp: int, prefix: str = '', positions: str = 'pos_embedding',
               rows: int = 16, has_cls: bool = False, stem: tuple[int, ...] = (8, 8, 3), has_map: bool = False,
               units: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
  """Names and shapes of an npz of vision_transformer or big_vision, of width 32, depth 2, 4 heads.

  `attention`, `norm` and `mlp` are the numbers of the attention, the second norm and the MLP in a block.
  """
  def attend(name: str) -> dict[str, tuple[int, ...]]:
    split = {f'{name}/{part}/{leaf}': shape for part in ('query', 'key', 'value')
             for leaf, shape in (('kernel', (32, 4, 8)), ('bias', (4, 8)))}
    return split | {f'{name}/out/kernel': (4, 8, 32), f'{name}/out/bias': (32,)}

  def normed(name: str) -> dict[str, tuple[int, ...]]:
    return {f'{name}/{leaf}': (32,) for leaf in ('scale', 'bias')}

  def dense(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f'{name}/kernel': (inputs, outputs), f'{name}/bias': (outputs,)}

  found = {'embedding/kernel': (*stem, 32), 'embedding/bias': (32,), positions: (1, rows, 32)}
  found |= {'cls': (1, 1, 32)} if has_cls else {}
  for i in range(2):
    block = f'Transformer/encoderblock_{i}'
    found |= normed(f'{block}/LayerNorm_0') | normed(f'{block}/LayerNorm_{norm}')
    found |= attend(f'{block}/MultiHeadDotProductAttention_{attention}')
    found |= dense(f'{block}/MlpBlock_{mlp}/Dense_0', 32, 128) | dense(f'{block}/MlpBlock_{mlp}/Dense_1', 128, 32)
  found |= normed('Transformer/encoder_norm') | dense('head', 32, 7)
  if has_map:
    found |= {'MAPHead_0/probe': (1, 1, 32)} | attend('MAPHead_0/MultiHeadDotProductAttention_0')
    found |= normed('MAPHead_0/LayerNorm_0') | dense('MAPHead_0/MlpBlock_0/Dense_0', 32, 128)
    found |= dense('MAPHead_0/MlpBlock_0/Dense_1', 128, 32)
  if units:
    found |= {'conv_root/kernel': (7, 7, 3, 64), 'gn_root/scale': (64,), 'gn_root/bias': (64,)}
  inputs = 64
  for stage, count in enumerate(units):
    hidden = 64 * 2 ** stage
    for unit in range(count):
      name = f'block{stage + 1}/unit{unit + 1}'
      shapes = {'conv1': (1, 1, inputs, hidden), 'conv2': (3, 3, hidden, hidden), 'conv3': (1, 1, hidden, 4 * hidden)}
      shapes |= {} if unit else {'conv_proj': (1, 1, inputs, 4 * hidden)}
      found |= {f'{name}/{conv}/kernel': shape for conv, shape in shapes.items()}
      for norm_name, size in (('gn1', hidden), ('gn2', hidden), ('gn3', 4 * hidden), ('gn_proj', 4 * hidden)):
        if norm_name != 'gn_proj' or not unit:
          # Some published files have these as [1, 1, 1, C].
          shape = (size,) if unit else (1, 1, 1, size)
          found |= {f'{name}/{norm_name}/scale': shape, f'{name}/{norm_name}/bias': shape}
      inputs = 4 * hidden
  return {prefix + name: shape for name, shape in found.items()}


def bit_shapes() -> dict[str, tuple[int, ...]]:
  """Names and shapes of an npz of BiT with units (1, 2), a root of 64 channels and 7 classes."""
  def normed(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f'{name}/group_norm/{leaf}': (size,) for leaf in ('gamma', 'beta')}

  found, inputs = {'resnet/root_block/standardized_conv2d/kernel': (7, 7, 3, 64)}, 64
  for stage, count in enumerate((1, 2), 1):
    outputs = BIT_CHANNELS[stage - 1]
    hidden = outputs // 4
    for unit in range(1, count + 1):
      name = f'resnet/block{stage}/unit{unit:02d}'
      for letter, shape in zip('abc', ((1, 1, inputs, hidden), (3, 3, hidden, hidden), (1, 1, hidden, outputs)),
                               strict=True):
        found[f'{name}/{letter}/standardized_conv2d/kernel'] = shape
        found |= normed(f'{name}/{letter}', shape[2])
      if unit == 1:
        found[f'{name}/a/proj/standardized_conv2d/kernel'] = (1, 1, inputs, outputs)
      inputs = outputs
  head = {'resnet/head/conv2d/kernel': (1, 1, inputs, 7), 'resnet/head/conv2d/bias': (7,)}
  return found | normed('resnet', inputs) | head


def npz_models() -> dict[str, tuple[Any, dict[str, tuple[int, ...]]]]:
  """timm's networks, and what they are to read through timm's own reader of these files."""
  from timm.models.vision_transformer import VisionTransformer
  from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2
  tanh = {**TINY, 'act_layer': 'gelu_tanh'}
  mean = {'class_token': False, 'global_pool': 'avg', 'fc_norm': False}
  hybrid = functools.partial(HybridEmbed, backbone=_resnetv2((1, 2)))
  paper = {'attention': 1, 'norm': 2, 'mlp': 3, 'positions': 'Transformer/posembed_input/pos_embedding'}
  newer = {'attention': 0, 'norm': 1, 'mlp': 0}
  return {
      'npz_bit': (bit(), bit_shapes()),
      'npz_vit': (VisionTransformer(**tanh), npz_shapes(**paper, rows=17, has_cls=True)),
      'npz_mean': (VisionTransformer(**tanh, **mean), npz_shapes(**paper)),
      'npz_hybrid': (VisionTransformer(**{**tanh, 'patch_size': 1, 'embed_layer': hybrid}),
                     npz_shapes(**paper, rows=17, has_cls=True, stem=(1, 1, 512), units=(1, 2))),
      'npz_big_vision': (VisionTransformer(**tanh, **mean), npz_shapes(**newer, prefix='params/')),
      'npz_two_towers': (VisionTransformer(**{**tanh, 'num_classes': 7}, class_token=False, global_pool='map'),
                         npz_shapes(**newer, prefix='params/img/', has_map=True)),
  }


def read_npz(name: str, model: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  """Gives a model the drawn weights through timm's reader of npz files."""
  from timm.models import resnetv2, vision_transformer
  reader = resnetv2 if name == 'npz_bit' else vision_transformer
  tensors = {name: drawn.tensor(name, shape) for name, shape in shapes.items()}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'weights.npz'
    np.savez(path, **tensors)
    reader._load_weights(model, str(path))
  model.eval()
  return tensors


def saved_names(model: Any, tensors: dict[str, np.ndarray]) -> dict[str, str]:
  """What `save_pretrained` calls each tensor: another layout of names than that of the classes.

  It saves the gate and the value of a SwiGLU MLP as one, in this order; these are left out.
  """
  from safetensors.numpy import load_file
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    saved = load_file(pathlib.Path(folder) / 'model.safetensors')
  by_value = {value.tobytes(): name for name, value in saved.items()}
  for name, value in tensors.items():
    if '.gate_proj.' in name:
      joined = np.concatenate([value, tensors[name.replace('gate_proj', 'up_proj')]])
      assert np.array_equal(saved[name.replace('gate_proj', 'weights_in')], joined)
  return {name: by_value[value.tobytes()] for name, value in tensors.items()
          if '.gate_proj.' not in name and '.up_proj.' not in name}


def outputs(name: str, model: Any, px: int) -> dict[str, np.ndarray]:
  """Logits, or class token and patch tokens after the last norm; of MAE also the reconstruction."""
  image = images(px)
  with torch.no_grad():
    if name.startswith('timm'):
      if name == 'timm_swiglu':
        return {'pooled': model(image).numpy()}
      return {'logits': model(image).numpy()}
    if name == 'hf_mae':
      noise = torch.arange(16).float()[None].repeat(2, 1)  # in order: nothing is shuffled
      encoded = model.vit(image, noise=noise).last_hidden_state
      return {'pooled': encoded[:, 0].numpy(), 'tokens': encoded[:, 1:].numpy(),
              'patches': model(image, noise=noise).logits.numpy()}
    found = model(image)
    if hasattr(found, 'logits'):
      return {'logits': found.logits.numpy()}
    return {'pooled': found.last_hidden_state[:, 0].numpy()}


def main() -> None:
  held: dict[str, np.ndarray] = {}
  for name, model in {**timm_models(), **hf_models()}.items():
    px = TINY['img_size']
    tensors = fill(model)
    config = model.config.to_dict() if name.startswith('hf') else {}
    if name.startswith('hf'):
      config['architectures'] = [type(model).__name__]
    held[f'{name}/about'] = np.array(json.dumps({
        'px': px, 'shapes': {k: list(v.shape) for k, v in tensors.items()}, 'config': config,
        'saved_names': saved_names(model, tensors) if name.startswith('hf') else {}}, default=str))
    for kind, value in outputs(name, model, px).items():
      held[f'{name}/{kind}'] = value
    print(name, {k.split('/')[1]: v.shape for k, v in held.items() if k.startswith(f'{name}/')}, value.std())
  for name, (model, shapes) in npz_models().items():
    read_npz(name, model, shapes)
    held[f'{name}/about'] = np.array(json.dumps({'px': 32, 'shapes': shapes, 'config': {}, 'saved_names': {}}))
    held[f'{name}/logits'] = outputs('timm', model, 32)['logits']
  np.savez_compressed(HERE / 'golden.npz', **held)
  print((HERE / 'golden.npz').stat().st_size, 'bytes')


if __name__ == '__main__':
  main()
