"""ViTs with rotary positions: RoPE-ViT, EVA-02 and EVA-02-CLIP, and the Perception Encoder."""
from __future__ import annotations

from vit_jax.config.schema import ByIndex, Gelu, Interpolation, PositionResize
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Family, License, Tensors, renamed
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import OWN_GRID, Hints
from vit_jax.weights.preprocess import NORMS, PILLOW


def _frequencies_by_block(tensors: Tensors) -> Changed:
  """Returns the tensors with the learned frequencies of all blocks, `[2, L, A, K / 2]`, as one tensor per block."""
  x = tensors.get('rope.freqs')
  if x is None or x.ndim != 4:
    return tensors, ()
  found = {f'blocks.{i}.rope.freqs': x[:, i] for i in range(x.shape[1])}
  return {name: one for name, one in tensors.items() if name != 'rope.freqs'} | found, ()


def _is_rope_vit(tensors: Tensors) -> bool:
  if not {'patch_embed.proj.weight', 'blocks.0.gamma_1', 'blocks.0.attn.qkv.weight'} <= tensors.keys():
    return False
  # With a table of positions alone it may be DeiT III, and the name decides.
  return 'pos_embed' not in tensors or 'blocks.0.rope.freqs' in tensors


def _rope_vit_hints(tensors: Tensors) -> Hints:
  own = {'positions.base': 100.} if 'cls_token' in tensors else {
      'positions.base': 10_000., 'positions.coordinates': ByIndex(16)}
  return Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=own)


ROPE_VIT = Family(
    'rope_vit', 'RoPE-ViT', 'timm, with fixed and with learned frequencies',
    files=(timm.vit(_is_rope_vit, _rope_vit_hints, label='timm', first=(NONE,)),), to_timm=_frequencies_by_block,
    licenses=(License(r'timm/vit_\w+_rope_\w*\.naver_in1k', 'Apache-2.0'),))


def _eva02_to_timm(tensors: Tensors) -> Changed:
  """Renames inner norms and the matrices of gated MLPs, whose names DINOv2 and DINOv3 have too."""
  tensors = renamed(
      tensors, (r'\.mlp\.ffn_ln\.', '.mlp.norm.'), (r'\.attn\.inner_attn_ln\.', '.attn.norm.'),
      (r'\.mlp\.w12\.', '.mlp.fc1.'), (r'\.mlp\.w1\.', '.mlp.fc1_g.'), (r'\.mlp\.w2\.', '.mlp.fc1_x.'),
      (r'\.mlp\.w3\.', '.mlp.fc2.'), (r'\.mlp\.c_fc\.', '.mlp.fc1.'), (r'\.mlp\.c_proj\.', '.mlp.fc2.'))
  is_split = 'blocks.0.attn.q_proj.weight' in tensors
  return renamed(tensors, (r'\.attn\.([qv])_bias$', r'.attn.\1_proj.bias')) if is_split else tensors, ()


def _is_eva02(tensors: Tensors) -> bool:
  is_gated = 'blocks.0.mlp.fc1_g.weight' in tensors or timm.is_packed(tensors)
  return is_gated and {'patch_embed.proj.weight', 'pos_embed'} <= tensors.keys() and bool(
      {'blocks.0.attn.q_proj.weight', 'blocks.0.attn.q_bias'} & tensors.keys())


EVA02 = Family(
    'eva02', 'EVA-02, EVA-02-CLIP', 'files of the authors; timm',
    files=(timm.vit(_is_eva02, Hints(gelu=Gelu.EXACT, norm_eps=1e-6,
                                     settings={'positions.base': 10_000., 'positions.coordinates': ByIndex(16)})),),
    images={**NORMS['clip'], **PILLOW, 'resize': 1.}, position_resize=PositionResize.BICUBIC, to_timm=_eva02_to_timm,
    licenses=(License(r'timm/eva02_.*', 'MIT'),))


def _pe_hints(tensors: Tensors) -> Hints:
  has_cls, has_pool = 'cls_token' in tensors, 'attn_pool.latent' in tensors
  own = {'positions.base': 10_000., 'positions.coordinates': ByIndex(OWN_GRID, float(has_cls))}
  return Hints(gelu=Gelu.EXACT, norm_eps=1e-5, settings=own | ({'pool.heads': 8} if has_pool else {}),
               pool='' if has_pool else 'patches' if has_cls else 'mean')


PE = Family(
    'pe', 'Perception Encoder', 'files of the authors; timm',
    files=(timm.vit(lambda t: {'patch_embed.proj.weight', 'norm_pre.weight'} <= t.keys() and (
        'attn_pool.latent' in t or 'norm.weight' not in t), _pe_hints),),
    images={**NORMS['half'], **PILLOW, 'interpolation': Interpolation.BILINEAR, 'resize': 0},
    position_resize=PositionResize.BILINEAR, licenses=(License(r'facebook/PE-.*|timm/vit_pe_.*', 'Apache-2.0'),))
