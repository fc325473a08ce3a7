"""Names of earlier versions: files of old runs are read through this table, and messages give the new name.

The only place that knows old names of settings, of the types of parts (`type` in `config.json`) and of choices.
"""
from __future__ import annotations

import dataclasses
import enum
from typing import Any

SETTINGS = {
    'Optimizer.lr_per': 'base_batch_size',
    'Optimizer.decayed': 'weight_decay_mask',
    'Optimizer.moment': 'mu_dtype',
    'Optimizer.trusted': 'trust_ratio_mask',
    'Optimizer.trust': 'trust_coefficient',
    'Adafactor.factored_side': 'min_dim_size_to_factor',
    'RMSProp.start': 'initial_scale',
    'Schedule.drops': 'milestones',
    'Schedule.drop': 'gamma',
    'Train.layers_apart': 'unstacked_layers',
    'EarlyStop.least_gain': 'min_delta',
    'Mae.hidden': 'mask_ratio',
    'Mae.normalized': 'norm_pix_loss',
    'MaskedPatch.corrupted': 'mask_ratio',
    'MaskedPatch.masked': 'mask_token_prob',
    'MaskedPatch.swapped': 'random_patch_prob',
    'Dino.prototypes': 'out_dim',
    'Dino.hidden': 'hidden_dim',
    'Dino.bottleneck': 'bottleneck_dim',
    'Dino.learned_norm': 'norm_last_layer',
    'Collapse.below': 'threshold',
    'Collapse.lasting': 'patience',
    'Collapse.then': 'action',
    'TokenLabel.mix': 'mix_token',
    'Distill.teach': 'distill_type',
    'Knn.neighbours': 'neighbors',
    'Segmentation.neighbours': 'neighbors',
    'Probe.rates': 'learning_rates',
    'Probe.rate_per': 'base_batch_size',
    'Probe.trust': 'trust_coefficient',
    'Evaluation.tap': 'features',
    'Head.tap': 'features',
}
"""`Type.old` -> new, of the type that declares the setting or of one it inherits from."""
NEGATED = ('Dino.learned_norm',)
"""Those of `SETTINGS` whose new setting is true where the old one was false."""
REMOVED = ('Config.init_interpolation',)
"""Settings of version 0.1 that changed nothing but how a run began: they are ignored in files of old runs."""
TYPES = {'Tap': 'FeatureLayers'}
CHOICES = {'MixClasses.apart': 'separate', 'Decode.whole': 'full'}
"""`Enum.old value` -> new value."""


def is_removed(kind: type, name: str) -> bool:
  """Whether a settings dataclass once had a setting of this name that has no successor."""
  return _key(kind, name, REMOVED) is not None


def setting(kind: type, name: str) -> str | None:
  """The present name of a setting that a settings dataclass has under another one; None if it never had this name."""
  key = _key(kind, name, SETTINGS)
  return SETTINGS[key] if key and any(field.name == SETTINGS[key] for field in dataclasses.fields(kind)) else None


def value(kind: type, name: str, old: Any) -> Any:
  """The value of the setting `setting(kind, name)` for the value that it had under its old name."""
  return not old if _key(kind, name, NEGATED) and isinstance(old, bool) else old


def type_name(name: Any) -> str:
  """The present name of the type of a part; '' for what is not a name."""
  return TYPES.get(name, name) if isinstance(name, str) else ''


def choice(kind: type[enum.Enum], old: Any) -> Any:
  """The present value of a choice."""
  return CHOICES.get(f'{kind.__name__}.{old}', old) if isinstance(old, str) else old


def path(config: Any, name: str) -> str:
  """A dotted name in which every setting of a config has its present name; the rest stays."""
  first, dot, rest = name.partition('.')
  if dataclasses.is_dataclass(config):
    first = setting(type(config), first) or first
    inner = getattr(config, first, None)
  else:
    inner = config.get(first) if isinstance(config, dict) else None
  return f'{first}.{path(inner, rest)}' if dot else first


def _key(kind: type, name: str, table: Any) -> str | None:
  return next((key for one in kind.__mro__ if (key := f'{one.__name__}.{name}') in table), None)
