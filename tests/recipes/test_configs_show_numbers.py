"""Every config states the numbers of its recipe, in its file or in that of a config that it loads and changes.

None comes from a default or from the package.
"""
from __future__ import annotations

import ast
import dataclasses
import pathlib

import pytest

from vit_jax.config import schema

ROOT = pathlib.Path(__file__).resolve().parents[2] / 'configs'
FILES = sorted(path for path in ROOT.glob('*.py') if path.stem != '__init__')
EVALUATION = {'dense_probe', 'evaluate', 'features', 'imagenet_tests', 'report_card'}
"""Configs for --job=evaluate, which train nothing."""
_MOMENTS = ('lr', 'b1', 'b2', 'weight_decay', 'clip_norm', 'schedule')
STATED: dict[str, tuple[str, ...]] = {
    'Config': ('length', 'batch_size', 'image_px', 'data', 'model', 'objective', 'optimizer'),
    'AdamW': _MOMENTS, 'Adam': _MOMENTS, 'Lamb': _MOMENTS, 'Lion': _MOMENTS,
    'ScheduleFree': _MOMENTS, 'Muon': (*_MOMENTS, 'momentum', 'polynomials', 'scale'),
    'Adafactor': ('lr', 'b1', 'b2_cap', 'weight_decay', 'clip_norm', 'schedule'),
    'Sgd': ('lr', 'momentum', 'weight_decay', 'clip_norm', 'schedule'),
    'Lars': ('lr', 'momentum', 'trust_coefficient', 'weight_decay', 'clip_norm', 'schedule'),
    'RMSProp': ('lr', 'b2', 'eps', 'initial_scale', 'momentum', 'weight_decay', 'clip_norm', 'schedule'),
    'Schedule': ('decay', 'warmup'),
    'Recipe': ('crop', 'flip'),
    'RandAugment': ('layers', 'magnitude', 'table'),
    'Erase': ('probability', 'area', 'aspect'),
    'Views': ('on', 'num_local', 'global_area', 'blur', 'solarize', 'grayscale', 'jitter'),
    'Mae': tuple(field.name for field in dataclasses.fields(schema.Mae)),
    'MaskedPatch': tuple(field.name for field in dataclasses.fields(schema.MaskedPatch)),
    'Dino': tuple(field.name for field in dataclasses.fields(schema.Dino) if field.name != 'collapse'),
    'Dinov2': tuple(field.name for field in dataclasses.fields(schema.Dinov2) if field.name != 'collapse'),
    'Dinov2Distill': tuple(
        field.name for field in dataclasses.fields(schema.Dinov2Distill) if field.name != 'collapse'),
    'Dinov3': tuple(field.name for field in dataclasses.fields(schema.Dinov3) if field.name != 'collapse'),
    'Gram': ('weight', 'start', 'step'),
    'Byol': tuple(field.name for field in dataclasses.fields(schema.Byol) if field.name != 'collapse'),
    'LeJepa': tuple(field.name for field in dataclasses.fields(schema.LeJepa) if field.name != 'collapse'),
    'IJepa': tuple(field.name for field in dataclasses.fields(schema.IJepa) if field.name != 'collapse'),
    'TokenLabel': tuple(field.name for field in dataclasses.fields(schema.TokenLabel) if field.name != 'maps'),
    'Distill': ('teacher', 'distill_type', 'weight', 'label_smoothing'),
    'FeatureDistill': ('teacher', 'distance', 'pooled_weight', 'patch_weight'),
    'Supervised': ('loss', 'label_smoothing'),
    'Pseudo': ('source', 'top', 'threshold', 'per_class', 'share'),
    'Sam': ('rho', 'alpha')}
"""What a call of each settings dataclass has to state."""
BY_OPTION = {
    ('Recipe', 'INCEPTION'): ('crop_sampler', 'crop_area', 'crop_aspect'), ('RandAugment', 'TIMM'): ('magnitude_std',),
    ('Schedule', 'STEPS'): ('milestones', 'gamma'), ('Schedule', 'RSQRT'): ('timescale',),
    ('Schedule', 'EXPONENTIAL'): ('every', 'gamma'), ('Distill', 'SOFT'): ('temperature',)}
"""What it has to state beside an option."""


OFF = ('RandAugment', 'Pseudo', 'Recipe', 'Optimizer')
"""A call of these without arguments means: switched off, or the schema's own."""


def missing(path: pathlib.Path) -> list[str]:
  """The settings that calls of settings dataclasses leave to their defaults, each with its line."""
  found = []
  for node in ast.walk(ast.parse(path.read_text())):
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
      continue
    kind = node.func.attr
    is_off = kind in OFF and not node.args + node.keywords
    if ast.unparse(node.func) != f's.{kind}' or kind not in STATED or is_off:
      continue
    fields = [field.name for field in dataclasses.fields(getattr(schema, kind))]
    given = {*fields[:len(node.args)], *(keyword.arg for keyword in node.keywords)}
    text = ' '.join(ast.unparse(one) for one in (*node.args, *(keyword.value for keyword in node.keywords))
                    if not isinstance(one, ast.Call))
    needed = [*STATED[kind], *(name for (one, option), names in BY_OPTION.items() if one == kind
                               and f'.{option}' in text for name in names)]
    if kind == 'Recipe' and 'views' in given:
      needed = ['crop_sampler', 'crop_aspect', 'flip']
    found += [f'line {node.lineno}: {kind}.{name}' for name in needed if name not in given]
  return found


@pytest.mark.parametrize('path', [path for path in FILES if path.stem not in EVALUATION], ids=lambda path: path.stem)
def test_a_config_states_its_numbers(path: pathlib.Path) -> None:
  assert not missing(path)


def test_no_module_of_recipes_makes_a_run() -> None:
  modules = sorted((ROOT.parent / 'vit_jax' / 'recipes').glob('*.py'))
  assert modules
  for path in modules:
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    made = {f'{module}.{kind}' for module in ('s', 'schema') for kind in STATED}
    assert not calls & (made - {'schema.RandAugment'}), path


def test_defaults_regularize_and_schedule_nothing() -> None:
  for kind in (schema.AdamW, schema.Adam, schema.Adafactor, schema.Lamb, schema.Lars, schema.Lion, schema.Muon,
               schema.RMSProp, schema.ScheduleFree, schema.Sgd):
    o = kind()
    assert (o.weight_decay, o.clip_norm, o.clip_tensor, o.clip_adaptive, o.layer_decay) == (0., 0., 0., 0., 1.), kind
    assert (o.schedule.decay, o.schedule.warmup, o.schedule.cooldown) == (schema.Decay.CONSTANT, '0 steps', ''), kind
  for model in (schema.ViT(), schema.Mixer(), schema.EfficientNet()):
    assert (model.dropout, model.drop_path) == (0., 0.)
  label, recipe, train = schema.TokenLabel(), schema.Recipe(), schema.Train()
  assert (schema.Supervised().label_smoothing, schema.Distill().label_smoothing, label.label_smoothing) == (0., 0., 0.)
  assert (label.mix_token, label.dense_weight, train.ema, train.sam.rho) == (False, 1., 0., 0.)
  assert (recipe.mixup, recipe.cutmix, recipe.erase.probability, recipe.randaugment.layers) == (0., 0., 0., 0)
  assert (recipe.views.on, recipe.three_augment, recipe.repeats) == (False, False, 1)
  assert schema.Jitter().brightness == 0.
