"""Infers the settings of a network from the shapes of its parameters, with hints from `--model` and from sidecars.

Shapes determine nearly all settings. Exceptions are the number of attention heads if the file does not split them
(inferred for known sizes, else set with `--model=heads=N`), the form of the GELU, the epsilon of LayerNorm, the pooling
of networks with neither a class token nor an attention pool, and the shape of a grid that is not square.
"""
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import LastNorm, QkvBias
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models.rivals import efficientnet
from vit_jax.recipes import sizes
from vit_jax.weights.hints import OWN_GRID, POOLS, Hints

Leaves = dict[str, HostArray]
LAYER_SCALE = 1e-5  # a value other than 0 means that LayerScale exists; its initial value no longer matters
MAE_DECODER_HEADS = {512: 16}  # number of heads by the width of the decoder (MAE, arXiv 2111.06377)
_BLOCKS = 'backbone/blocks'
_STACKED_DECODER = 'decoder/blocks/norm1/scale'


def model(leaves: Leaves, hints: Hints) -> schema.Model:
  """Returns the settings of the backbone of `leaves`; those that neither shapes nor `hints` have are the defaults.

  Raises:
    UserError: a setting without a default cannot be determined; the message names it.
  """
  if f'{_BLOCKS}/tokens/up/kernel' in leaves:
    _check_present(leaves, 'backbone/stem/kernel', f'{_BLOCKS}/norm1/scale', f'{_BLOCKS}/channels/up/kernel')
    depth, width = leaves[f'{_BLOCKS}/norm1/scale'].shape
    default = schema.Mixer()
    return schema.Mixer(
        patch=leaves['backbone/stem/kernel'].shape[0], width=width, depth=depth,
        tokens_mlp=leaves[f'{_BLOCKS}/tokens/up/kernel'].shape[-1],
        channels_mlp=leaves[f'{_BLOCKS}/channels/up/kernel'].shape[-1],
        gelu=hints.gelu or default.gelu, norm_eps=hints.norm_eps or default.norm_eps)
  if 'backbone/root/kernel' in leaves:
    var_eps = hints.settings.get('stem.var_eps', schema.ResNet().var_eps)
    return schema.ResNet(units(leaves, 'backbone'), leaves['backbone/root/kernel'].shape[-1], var_eps=var_eps)
  if 'backbone/stem/conv/kernel' in leaves:
    return _efficientnet(leaves)
  _check_present(leaves, 'backbone/stem/kernel', f'{_BLOCKS}/attn/query/kernel', f'{_BLOCKS}/mlp/up/kernel',
                 f'{_BLOCKS}/norm1/scale')
  return _vit(leaves, hints)


def _check_present(leaves: Leaves, *names: str) -> None:
  """Raises UserError if a leaf of one of these names is missing."""
  if missing := [name for name in names if name not in leaves]:
    raise UserError('expected the tensors of a known network, got none for ' + ', '.join(missing))


def units(leaves: Leaves, prefix: str) -> tuple[int, ...]:
  """Returns the number of bottleneck units of each stage below a path, such as `backbone` or `backbone/stem`.

  Raises:
    UserError: stages or units are not numbered from 1.
  """
  units_of_stage: dict[int, set[int]] = {}
  for name in leaves:
    if match := re.match(rf'{prefix}/stage(\d+)/unit(\d+)/', name):  # backbone/stage1/unit2/conv1/kernel
      units_of_stage.setdefault(int(match[1]), set()).add(int(match[2]))
  numbered = {'stages': set(units_of_stage)}
  numbered |= {f'units of stage {stage}': numbers for stage, numbers in units_of_stage.items()}
  for parts, numbers in numbered.items():
    if numbers != set(range(1, len(numbers) + 1)):
      raise UserError(f'its {parts} are numbered {", ".join(map(str, sorted(numbers)[:8]))}, and not from 1 on')
  return tuple(len(units_of_stage[stage]) for stage in sorted(units_of_stage))


def _vit(leaves: Leaves, hints: Hints) -> schema.ViT:
  """Returns the settings of a ViT; the files of some have neither a bias of the stem nor a last norm."""
  depth, width = leaves['backbone/blocks/norm1/scale'].shape
  may_lack = 'backbone/norm_before/scale' in leaves  # a bias of the stem and the last norm: files without are whole
  stem = _stem(leaves, hints.settings, has_bias='backbone/stem/bias' in leaves or not may_lack)
  pool = _pool(leaves, hints)
  patch = leaves['backbone/stem/kernel'].shape[0] * stem.stride
  mlp = (schema.SwiGlu if f'{_BLOCKS}/mlp/gate/kernel' in leaves else schema.Mlp)(
      hidden=leaves[f'{_BLOCKS}/mlp/up/kernel'].shape[-1], bias=f'{_BLOCKS}/mlp/down/bias' in leaves,
      inner_norm=f'{_BLOCKS}/mlp/norm/scale' in leaves)
  query = leaves[f'{_BLOCKS}/attn/query/kernel']
  heads = query.shape[-2] if query.ndim == 4 else hints.heads or known_heads(width, depth, mlp)
  _check_heads(heads, width, said=hints.heads)
  has_query, has_key = (f'{_BLOCKS}/attn/{name}/bias' in leaves for name in ('query', 'key'))
  attention = schema.Attention(
      qkv_bias=QkvBias.NONE if not has_query else QkvBias.ALL if has_key else QkvBias.QUERY_VALUE,
      out_bias=f'{_BLOCKS}/attn/out/bias' in leaves, qk_norm=f'{_BLOCKS}/attn/query_norm/scale' in leaves,
      inner_norm=f'{_BLOCKS}/attn/norm/scale' in leaves)
  norm = schema.LayerNorm if f'{_BLOCKS}/norm1/bias' in leaves else schema.RmsNorm
  has_last = 'backbone/norm/scale' in leaves or not may_lack
  last_norm = LastNorm.POOLED if hints.norm_after_pool else hints.settings.get(
      'last_norm', LastNorm.TOKENS if has_last else LastNorm.NONE)
  return schema.ViT(
      patch=patch, width=width, depth=depth, heads=heads, mlp=mlp, attention=attention,
      block=schema.Plain(layer_scale=LAYER_SCALE if f'{_BLOCKS}/scale1' in leaves else 0.),
      positions=_positions(leaves, hints, patch, pool), pool=pool, stem=stem, norm=norm(hints.norm_eps or norm().eps),
      norm_before='backbone/norm_before/scale' in leaves, last_norm=last_norm,
      registers=leaves['backbone/registers'].shape[1] if 'backbone/registers' in leaves else 0,
      gelu=hints.gelu or schema.ViT().gelu)


def _own(settings: Mapping[str, Any], part: str) -> dict[str, Any]:
  """Returns those of `Hints.settings` that belong to a part of the network, by their names in it."""
  return {name.removeprefix(f'{part}.'): value for name, value in settings.items() if name.startswith(f'{part}.')}


def _stem(leaves: Leaves, settings: Mapping[str, Any], *, has_bias: bool) -> schema.PatchStem | schema.ResNetStem:
  """Returns the stem: that of a hybrid if the leaves have the root of a ResNet; `settings` are those of `Hints`."""
  if 'backbone/stem/root/kernel' in leaves:
    return schema.ResNetStem(units(leaves, 'backbone/stem'), leaves['backbone/stem/root/kernel'].shape[-1],
                             **_own(settings, 'stem'))
  return schema.PatchStem(bias=has_bias, norm='backbone/stem_norm/scale' in leaves)


def _positions(leaves: Leaves, hints: Hints, patch: int, pool: schema.PoolSettings) -> schema.PositionSettings:
  """Returns the positions: by the table in the file, and by whether its program rotates queries and keys."""
  own, is_mixed = _own(hints.settings, 'positions'), f'{_BLOCKS}/attn/frequencies' in leaves
  resize: dict[str, Any] = {'resize': hints.position_resize} if hints.position_resize else {}
  table = leaves.get('backbone/positions')
  if not own and not is_mixed:
    return hints.settings.get('positions', schema.SinCos()) if table is None else schema.Learned(**resize)
  if table is None:
    return schema.Rotary(mixed=is_mixed, **own)
  index = own.get('coordinates')
  if isinstance(index, schema.ByIndex) and index.grid == OWN_GRID:
    num_patches = table.shape[1] - pool.class_token
    side = math.isqrt(num_patches)
    rows, columns = (px // patch for px in hints.image_px or (side * patch, side * patch))
    is_oblong = rows != columns and rows * columns == num_patches
    if is_oblong or side * side != num_patches:  # rows and columns are counted to one number
      raise UserError(f'expected a square grid of positions, got {num_patches} patches for images of other sides. '
                      'Correct --model=image, or use other weights.')
    own['coordinates'] = dataclasses.replace(index, grid=side)
  return schema.LearnedRotary(mixed=is_mixed, **own, **resize)


def has_pool(leaves: Leaves) -> bool:
  """Whether the tensors determine how tokens are pooled."""
  return 'backbone/cls' in leaves or 'backbone/pool/probe' in leaves


def _pool(leaves: Leaves, hints: Hints) -> schema.PoolSettings:
  has_cls, has_probe = 'backbone/cls' in leaves, 'backbone/pool/probe' in leaves
  if not has_pool(leaves):
    if hints.pool not in ('', 'mean', 'first'):
      raise UserError(f'--model=pool: expected mean or first, got {hints.pool}. The file has neither a class token nor '
                      'an attention pool.')
    return POOLS[hints.pool or 'mean']
  if has_probe:
    pool = 'map_cls' if has_cls else 'map'
  elif hints.norm_after_pool or hints.pool == 'patches':  # the tensors are those of pooling by class token
    pool = 'patches'
  else:
    pool = 'cls'
  if hints.pool not in ('', pool):
    raise UserError(f'--model=pool: expected {pool}, which the tensors of the file are for, got {hints.pool}. Leave '
                    'it out.')
  if has_probe:
    hidden = leaves['backbone/pool/mlp/up/kernel'].shape[-1] if 'backbone/pool/mlp/up/kernel' in leaves else 0
    is_usual = hidden == leaves[f'{_BLOCKS}/mlp/up/kernel'].shape[-1]
    return schema.Map(class_token=has_cls, hidden=0 if is_usual else hidden, **_own(hints.settings, 'pool'))
  return schema.ClassToken(distillation='backbone/dist' in leaves) if pool == 'cls' else POOLS[pool]


def pool_of_timm(word: str, leaves: Leaves) -> str:
  """Returns the pooling that a network of timm with this `global_pool` has; '' where its tensors determine it.

  Raises:
    UserError: networks here do not pool in this way.
  """
  if word not in ('', 'token', 'avg', 'map'):
    raise UserError(f'global_pool: expected token, avg or map in the config of timm, got {word!r}, which is not '
                    'available here. Change it if the weights were trained otherwise.')
  if not word or 'backbone/pool/probe' in leaves:
    return ''
  has_cls = 'backbone/cls' in leaves
  return {'token': 'cls' if has_cls else '', 'avg': 'patches' if has_cls else 'mean', 'map': ''}[word]


def pool_note(model: schema.Model, hints: Hints) -> str:
  """Returns a sentence where a name or a config decided that patch tokens are pooled, beside a class token."""
  is_ours = isinstance(model, schema.ViT) and model.pool == POOLS['patches'] and (
      model.last_norm is not LastNorm.POOLED)
  if not is_ours or not hints.pool:
    return ''
  return ('Pooling: the mean of the patch tokens, as in timm for this network. For the class token, set '
          '--model=pool=cls.')


def known_heads(width: int, depth: int, mlp: schema.MlpSettings) -> int:
  """Returns the number of heads of the published model with this width, depth and MLP; 0 if there is no such model."""
  published, plain = map(sizes.published, sizes.PUBLISHED), (sizes.vit(f'{name}/16') for name in sizes.VIT)
  for vit in (*published, *plain):
    if (vit.width, vit.depth, vit.mlp.hidden, type(vit.mlp)) == (width, depth, mlp.hidden, type(mlp)):
      return vit.heads
  return 0


def _check_heads(heads: int, width: int, *, said: int) -> None:
  """Raises UserError if the number of heads is unknown (0), no divisor of the width, or not the one `said` in hints."""
  if said and said != heads:
    raise UserError(f'--model=heads: expected {heads}, as the kernels of the file are split, got {said}. Leave it out.')
  if not heads:
    raise UserError(f'--model=heads: expected the number of attention heads, got none. The file does not contain it, '
                    f'and no published network of width {width} has these sizes. Set --model=heads=N.')
  if width % heads:
    raise UserError(f'--model=heads: expected a divisor of the width {width}, got {heads}. Set another.')


def _efficientnet(leaves: Leaves) -> schema.EfficientNet:
  """Returns the settings of the published EfficientNet with these channels and blocks; B1 and B2 differ in the top."""
  _check_present(leaves, 'backbone/stem/conv/kernel', 'backbone/top/conv/kernel')
  stem, top = (leaves[f'backbone/{layer}/conv/kernel'].shape[-1] for layer in ('stem', 'top'))
  blocks = {name for name in leaves if re.fullmatch(r'backbone/stage\d+/block\d+/depthwise/conv/kernel', name)}
  for name in sizes.EFFICIENTNET:
    model = sizes.efficientnet(name)
    channels = [efficientnet.scaled(num, model.width_factor) for num in (efficientnet.STEM, efficientnet.TOP)]
    blocks_of_model = {f'backbone/stage{s}/{block.name}/depthwise/conv/kernel'
                       for s, stage in enumerate(efficientnet.stages(model), 1) for block in stage}
    if channels == [stem, top] and blocks == blocks_of_model:
      return model
  raise UserError(f'it is an EfficientNet with {stem} channels in its stem, {top} in its top and {len(blocks)} blocks; '
                  f'known are {", ".join(sizes.EFFICIENTNET)}')


def efficientnet_px(model: schema.EfficientNet) -> tuple[int, int]:
  """Returns the image size of the published network with these factors, px."""
  px = next(px for width, depth, px, _ in sizes.EFFICIENTNET.values()
            if (width, depth) == (model.width_factor, model.depth_factor))
  return px, px


def decoder(leaves: Leaves, hints: Hints) -> schema.Mae | None:
  """Returns the settings of a masked autoencoder's decoder; None if there is no decoder.

  Raises:
    UserError: the number of heads is unknown.
  """
  if _STACKED_DECODER not in leaves:
    return None
  depth, width = leaves[_STACKED_DECODER].shape
  heads = hints.decoder_heads or MAE_DECODER_HEADS.get(width, 0)
  if not heads or width % heads:
    raise UserError(f'--model=decoder_heads: expected a divisor of the width {width} of the decoder, got {heads}. The '
                    'file does not contain the number of its heads. Set --model=decoder_heads=N.')
  return schema.Mae(decoder_width=width, decoder_depth=depth, decoder_heads=heads)


def fitted(leaves: Leaves, shapes: Mapping[str, Any]) -> Leaves:
  """Returns the leaves with attention split into heads, `[…, D, A, K]`, where the network has it so and a file has not.

  `shapes` are those of the network. A leaf that is not its matrix with joined heads stays as it is.
  """
  split = dict(leaves)
  for name, leaf in leaves.items():
    if name in shapes and leaf.shape == _with_joined_heads(name, shapes[name].shape):
      split[name] = leaf.reshape(shapes[name].shape)
  return split


def without_heads(leaves: Leaves) -> Leaves:
  """Returns the leaves with attention kernels as matrices `[…, D, A K]`, as in PyTorch."""
  return {name: leaf.reshape(_with_joined_heads(name, leaf.shape)) for name, leaf in leaves.items()}


def _with_joined_heads(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a leaf with heads A and channels K of attention as one axis, such as `[…, D, A K]`."""
  layer = re.search(r'(?:^|/)attn/(query|key|value|out)/(kernel|bias)$', name)
  if layer and layer[1] != 'out':  # [..., A, K]
    return (*shape[:-2], math.prod(shape[-2:]))
  if layer and layer[2] == 'kernel':  # [..., A, K, D]
    return (*shape[:-3], math.prod(shape[-3:-1]), shape[-1])
  return shape
