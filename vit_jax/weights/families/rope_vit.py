"""ViTs of timm whose queries and keys are rotated: RoPE-ViT, with fixed and with learned frequencies, and others."""
from __future__ import annotations

from vit_jax.config.schema import ByIndex, Gelu
from vit_jax.weights.families import timm
from vit_jax.weights.families.record import Changed, Family, License, Tensors
from vit_jax.weights.grids import NONE
from vit_jax.weights.hints import Hints


def _to_timm(tensors: Tensors) -> Changed:
  """Returns the tensors with the learned frequencies of all blocks, `[2, L, A, K / 2]`, as one tensor per block."""
  x = tensors.get('rope.freqs')
  if x is None or x.ndim != 4:
    return tensors, ()
  found = {f'blocks.{i}.rope.freqs': x[:, i] for i in range(x.shape[1])}
  return {name: one for name, one in tensors.items() if name != 'rope.freqs'} | found, ()


def _found(tensors: Tensors) -> bool:
  if not {'patch_embed.proj.weight', 'blocks.0.gamma_1', 'blocks.0.attn.qkv.weight'} <= tensors.keys():
    return False
  # With a table of positions alone it may be DeiT III, and the name decides.
  return 'pos_embed' not in tensors or 'blocks.0.rope.freqs' in tensors


def _hints(tensors: Tensors) -> Hints:
  own = {'positions.base': 100.} if 'cls_token' in tensors else {
      'positions.base': 10_000., 'positions.coordinates': ByIndex(16)}
  return Hints(gelu=Gelu.EXACT, norm_eps=1e-6, settings=own)


FAMILY = Family(
    'rope_vit', 'RoPE-ViT', 'timm, with fixed and with learned frequencies',
    files=(timm.vit(_found, _hints, label='timm', first=(NONE,)),), to_timm=_to_timm,
    licenses=(License(r'timm/vit_\w+_rope_\w*\.naver_in1k', 'Apache-2.0'),))
