"""Which settings of a task make no sense, alone or with the rest of the config. Asked by `check.py` alone."""
from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from vit_jax.config import model_options, schema
from vit_jax.config.schema import Centering, DistillType, PatchTarget, Pool, Positions, PositionsAt, ranges

CELLS = schema.COLOR_CELLS
WITHOUT_CLASSES = (schema.Mae, schema.MaskedPatch, schema.Dino)
"""Tasks whose networks have no head."""


def faults(c: schema.Config) -> Iterator[str]:
  """What is wrong, each with its value and what would be right."""
  match c.objective:
    case schema.Supervised():
      pass
    case schema.Mae():
      yield from _tokens(c)
      yield from _mae(c, c.objective)
    case schema.MaskedPatch():
      yield from _tokens(c)
      yield from _masked_patch(c, c.objective)
    case schema.Dino():
      yield from _dino(c, c.objective)
    case schema.TokenLabel():
      yield from _tokens(c)
      yield from _token_label(c, c.objective)
    case schema.Distill():
      yield from _distill(c, c.objective)
    case _:
      assert_never(c.objective)
  yield from _classes(c)


def _classes(c: schema.Config) -> Iterator[str]:
  """What needs a head."""
  if not isinstance(c.objective, WITHOUT_CLASSES):
    return
  kind = type(c.objective).__name__
  for name, evaluation in c.evals.items():
    if isinstance(evaluation, schema.TopK):
      yield (f'evals.{name} measures the guesses of a head, which objective {kind} has not; want an evaluation of '
             'features')
  if c.head != schema.Head():
    yield f'head is set, but objective {kind} has none; want head as it is by default'
  if c.data.recipe.mixup or c.data.recipe.cutmix:
    yield f'data.recipe.mixup and cutmix mix labels, which objective {kind} does not use; want 0'
  if c.data.max_labels:
    yield (f'data.max_labels: expected 0 for objective {kind}, which does not learn from labels, got '
           f'{c.data.max_labels}. Set it to 0.')


def _tokens(c: schema.Config) -> Iterator[str]:
  if not isinstance(c.model, schema.ViT):
    yield (f'objective {type(c.objective).__name__} works on patch tokens, which model {type(c.model).__name__} does '
           'not give; want a ViT')


def _num_patches(c: schema.Config) -> int:
  patch = getattr(c.model, 'patch', 0)
  return (c.image_px[0] // patch) * (c.image_px[1] // patch) if patch >= 1 else 0


def _mae(c: schema.Config, o: schema.Mae) -> Iterator[str]:
  num_visible = int(_num_patches(c) * (1. - o.mask_ratio) + 1e-6)
  if _num_patches(c) and not 0 < num_visible < _num_patches(c):
    yield (f'objective.mask_ratio={o.mask_ratio} leaves {num_visible} of {_num_patches(c)} patches '
           'visible; want some visible and some hidden')
  if o.decoder_width % o.decoder_heads:
    yield f'objective.decoder_width={o.decoder_width} is not a multiple of objective.decoder_heads={o.decoder_heads}'
  if o.decoder_width % 4:
    yield (f'objective.decoder_width={o.decoder_width} is not a multiple of 4, which 2-D sine-cosine positions need')
  m = c.model
  if not isinstance(m, schema.ViT):
    return
  whole = {'positions=relative': m.positions is Positions.RELATIVE, 'axial=true': m.axial,
           'positions_at=layers': m.positions_at is PositionsAt.LAYERS, 'pool=map': m.pool is Pool.MAP,
           'pool=patches': m.pool is Pool.PATCHES, 'norm_after_pool=true': m.norm_after_pool,
           'distilled=true': m.distilled, f'stem={type(m.stem).__name__}': not isinstance(m.stem, schema.PatchStem)}
  yield from (f'model.{name} does not go with objective Mae, whose encoder gets some patches of the image alone'
              for name, is_so in whole.items() if is_so)


def _masked_patch(c: schema.Config, o: schema.MaskedPatch) -> Iterator[str]:
  if model_options.has_statistics(c.model):
    yield f'model {type(c.model).__name__} has BatchNorm, which objective MaskedPatch keeps no statistics of'
  num_corrupted = _num_patches(c) - int(_num_patches(c) * (1. - o.mask_ratio) + 1e-6)
  if _num_patches(c) and not num_corrupted:
    yield f'objective.mask_ratio={o.mask_ratio} corrupts {num_corrupted} of {_num_patches(c)} patches; want one'
  if o.mask_token_prob + o.random_patch_prob > 1 + 1e-9:
    yield (f'objective.mask_token_prob={o.mask_token_prob} and objective.random_patch_prob={o.random_patch_prob} are '
           'probabilities of two of three cases; want their sum at most 1')
  patch = getattr(c.model, 'patch', CELLS)
  if o.target is PatchTarget.COLORS and patch % CELLS:
    yield (f'objective.target=colors cuts patches into {CELLS} x {CELLS} cells, but model.patch={patch} is not a '
           f'multiple of {CELLS}; want one, or another target')


def _dino(c: schema.Config, o: schema.Dino) -> Iterator[str]:
  if not c.data.recipe.views.on:
    yield 'objective Dino learns from several crops of an image; want data.recipe.views.on=true'
  for name, allowed in (('teacher_temperature', ranges.Range(1e-6)), ('momentum', ranges.SHARE)):
    ramp: schema.Ramp = getattr(o, name)
    yield from (f'objective.{name}.{end}: expected {allowed}, got {getattr(ramp, end)}.' for end in ('start', 'end')
                if not allowed.has(getattr(ramp, end)))
  if o.centering is not Centering.MEAN and o.center_momentum != schema.Dino().center_momentum:
    yield (f'objective.center_momentum={o.center_momentum} changes nothing with objective.centering='
           f'{o.centering.value}; want centering=mean')
  if o.centering is Centering.SINKHORN and c.train.accumulate > 1:
    yield (f'objective.centering=sinkhorn spreads answers over the whole batch, but train.accumulate='
           f'{c.train.accumulate} shows it in parts; want train.accumulate=1 or centering=mean')
  if model_options.has_statistics(c.model):
    yield f'model {type(c.model).__name__} has BatchNorm, which mixes the crops that objective Dino compares'
  views = c.data.recipe.views
  if views.on and views.num_local and getattr(c.model, 'positions', None) is Positions.RELATIVE:
    yield 'model.positions=relative cannot be resized to local crops; want other positions, or views.num_local=0'
  if isinstance(c.model, schema.Mixer) and views.on and views.num_local:
    yield 'model Mixer takes images of one size, but local crops have another; want views.num_local=0'


def _token_label(c: schema.Config, o: schema.TokenLabel) -> Iterator[str]:
  r = c.data.recipe
  moving = {'mixup': r.mixup > 0, 'cutmix': r.cutmix > 0, 'rotate_degrees': r.rotate_degrees > 0, 'scale': r.scale > 0,
            'shear': r.shear > 0}
  if named := [name for name, is_on in moving.items() if is_on]:
    yield (f'data.recipe.{", ".join(named)} moves or mixes pixels in a way that label maps cannot follow; want crops, '
           'flips and shifts, and objective.mix_token')
  rows = c.batch_size // c.train.accumulate
  if o.mix_token and rows % 2:
    yield f'objective.mix_token=true exchanges tokens in pairs, but a microbatch has {rows} images; want an even number'


def _distill(c: schema.Config, o: schema.Distill) -> Iterator[str]:
  if o.distill_type is DistillType.HARD and o.temperature != 1:
    yield f'objective.temperature={o.temperature} changes nothing with objective.distill_type=hard; want 1'
  if o.distill_type is DistillType.HARD and o.soft_mean is not schema.SoftMean.PAPER:
    yield (f'objective.soft_mean: expected paper with objective.distill_type=hard, got {o.soft_mean.value}. Set '
           'objective.distill_type=soft, whose loss it divides.')
  if o.weight == 1 and o.label_smoothing:
    yield (f'objective.label_smoothing={o.label_smoothing} changes nothing with objective.weight=1, which leaves the '
           'labels out; want 0')
  yield from (f'objective.teacher.{fault}' for fault in model_options.faults(o.teacher.model, c.image_px))
