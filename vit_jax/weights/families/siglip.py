"""SigLIP and SigLIP 2: files of transformers; those of big_vision and timm have the tensors of other ViTs there."""
from __future__ import annotations

from vit_jax.config.schema import Gelu, Map, PositionResize
from vit_jax.weights.families import clip, transformers
from vit_jax.weights.families.record import Family, Files, Kind, License, Tensors, with_patch_kernel
from vit_jax.weights.hints import Hints

_PATCHES = 'embeddings.patch_embedding.weight'


def _hints(tensors: Tensors) -> Hints:
  return Hints(gelu=Gelu.TANH, norm_eps=1e-6,
               position_resize=PositionResize.BILINEAR_ANTIALIAS if tensors[_PATCHES].ndim == 2 else None)


_DEFAULTS = {'num_attention_heads': 0, 'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-6}
FAMILY = Family(
    'siglip', 'SigLIP, SigLIP 2', '`.npz` of big_vision; transformers; timm',
    files=(Files('transformers', lambda t: _PATCHES in t and 'pre_layrnorm.weight' not in t, clip.TRANSFORMERS, _hints,
                 change=lambda t: (with_patch_kernel(t, _PATCHES), ())),),
    kinds=(Kind('siglip_vision_model', ('SiglipVisionModel', ''),
                lambda m, weights, changed: not weights.num_classes and changed == {'pool'} and m.pool == Map(),
                lambda _: clip.TRANSFORMERS, transformers.tower_config, lambda tensors, _: tensors),),
    config_defaults={
        **dict.fromkeys(('siglip', 'siglip_vision_model'), _DEFAULTS),
        **dict.fromkeys(('siglip2', 'siglip2_vision_model'), {**_DEFAULTS, 'num_patches': 256, 'patch_size': 16})},
    licenses=(License(r'(google|timm)/\w*siglip.*', 'Apache-2.0'),))
