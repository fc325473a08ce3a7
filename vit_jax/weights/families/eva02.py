"""EVA-02 and EVA-02-CLIP: files of the authors, and of timm."""
from __future__ import annotations

from vit_jax.config.schema import ByIndex, Gelu, PositionResize
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Family, License, Tensors, renamed
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW


def _to_timm(tensors: Tensors) -> Changed:
  """Renames inner norms and the matrices of gated MLPs, whose names DINOv2 and DINOv3 have too."""
  tensors = renamed(
      tensors, (r'\.mlp\.ffn_ln\.', '.mlp.norm.'), (r'\.attn\.inner_attn_ln\.', '.attn.norm.'),
      (r'\.mlp\.w12\.', '.mlp.fc1.'), (r'\.mlp\.w1\.', '.mlp.fc1_g.'), (r'\.mlp\.w2\.', '.mlp.fc1_x.'),
      (r'\.mlp\.w3\.', '.mlp.fc2.'), (r'\.mlp\.c_fc\.', '.mlp.fc1.'), (r'\.mlp\.c_proj\.', '.mlp.fc2.'))
  is_split = 'blocks.0.attn.q_proj.weight' in tensors
  return renamed(tensors, (r'\.attn\.([qv])_bias$', r'.attn.\1_proj.bias')) if is_split else tensors, ()


def _found(tensors: Tensors) -> bool:
  is_gated = 'blocks.0.mlp.fc1_g.weight' in tensors or timm.is_packed(tensors)
  return is_gated and {'patch_embed.proj.weight', 'pos_embed'} <= tensors.keys() and bool(
      {'blocks.0.attn.q_proj.weight', 'blocks.0.attn.q_bias'} & tensors.keys())


FAMILY = Family(
    'eva02', 'EVA-02, EVA-02-CLIP', 'files of the authors; timm',
    files=(timm.vit(_found, Hints(gelu=Gelu.EXACT, norm_eps=1e-6,
                                  settings={'positions.base': 10_000., 'positions.coordinates': ByIndex(16)})),),
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_to_timm,
    licenses=(License(r'timm/eva02_.*', 'MIT'),))
