"""Text towers of weight files, read as strictly as image towers: each tensor has a place, each parameter a tensor.

`load` reads the part of a file that `loading.load` leaves out. TIPS has its text tower in a file of its own, which is
found beside that of the images by its name.
"""
from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Activation, Gelu, TextPool, TextProjection, TextRule, Tokens
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.types import Params
from vit_jax.data.text import prompts, tokenizer
from vit_jax.models import cost
from vit_jax.models.text_tower import TextTower
from vit_jax.objectives import contrastive
from vit_jax.weights import addresses, files, infer, loading, runs, sidecars, tables
from vit_jax.weights.families import text as text_towers
from vit_jax.weights.families.record import Tensors
from vit_jax.weights.families.text import Found
from vit_jax.weights.hints import EPSILON, MOST_HEADS
from vit_jax.weights.network import Line, Report, Weights

TIPS_SCALE = 1 / 0.005065968260169029  # transformers' Tipsv2Config, for files without a temperature
TIPS_LENGTH = 64  # its positions are not in the file
_HEADS = {1152: 16}  # So400m; the other published towers have heads of 64 channels
_ACTIVATIONS = {**sidecars.ACTIVATIONS, 'relu': None}


class TextWeights(NamedTuple):
  """A text tower with all that is needed to use it.

  tower: its settings.
  params: f32 numpy arrays.
  family: one of `data.text.tokenizer.FAMILIES`.
  scale, bias: logits are `scale * similarity + bias`.
  is_sigmoid: whether a probability is the sigmoid of its logit (SigLIP), and not a softmax over texts.
  folder: in which the tokenizer is expected.
  tokenizer_file: its path, if it is known; '' = in `folder`.
  text_rule: how texts are simplified; AUTO = as the family does.
  source: path, address or name of the weights.
  report: how every tensor was used.
  """
  tower: TextTower
  params: Params
  family: str
  scale: float
  bias: float
  is_sigmoid: bool
  folder: pathlib.Path
  source: str
  report: Report
  tokenizer_file: str = ''
  text_rule: TextRule = TextRule.AUTO

  @property
  def rule(self) -> TextRule:
    """How texts are simplified; never `AUTO`."""
    return prompts.rule_of(self.family) if self.text_rule is TextRule.AUTO else self.text_rule


def load(where: str, *, image: Weights) -> TextWeights:
  """Loads the text tower of the weights at `where`, whose image tower is `image`.

  Raises:
    UserError: the weights have no text tower, a tensor is missing or has no place, or both towers do not fit.
  """
  path = addresses.local(where)
  if runs.is_run(path):
    run = runs.read(path, view='')
    if not isinstance(run.config.objective, schema.Contrastive):
      raise UserError(f'{redacted(where)}: expected weights with a text tower, got a run without one. Use the weights '
                      'that the run began with.')
    found = of_config(run.config, run.params, redacted(where))
    _check_width(found.tower, image)
    return found
  shards = addresses.weight_files(path)
  tensors = loading.read(shards).tensors
  beside = shards[0].with_name(shards[0].name.replace('vision', 'text'))  # as TIPS is published
  if not text_towers.has_text(tensors) and beside != shards[0] and beside.is_file():
    tensors, shards = files.read(beside), [beside]
  try:
    return _of_tensors(tensors, shards[0], redacted(where), image)
  except UserError as error:
    raise UserError(f'{where}, text tower: {error}') from None


def of_config(config: schema.Config, params: Params, where: str) -> TextWeights:
  """Returns the text tower of a run that trains one, with its `params`; {} = they are not known yet."""
  objective = config.objective
  assert isinstance(objective, schema.Contrastive), objective
  text, logits = objective.text, params.get('logits', {})
  width = objective.out_dim or cost.forward(config.model, config.image_px, head=config.head, num_classes=0,
                                            num_channels=config.data.channels).width
  return TextWeights(
      contrastive.tower(text, out_width=width), params.get('text', {}), text.tokens.value,
      float(np.exp(logits.get('scale', 0.))), float(logits.get('bias', 0.)),
      objective.loss is schema.PairLoss.SIGMOID, pathlib.Path(), where,
      Report(tuple(Line(f'text/{name}', 'taken') for name in trees.flatten(params.get('text', {}))), (), ()),
      tokenizer_file=text.tokenizer, text_rule=text.text_rule)


def load_alone(where: str) -> TextWeights:
  """Loads the text tower of weights that also have an image tower. Raises UserError as `load`."""
  return load(where, image=loading.load(where))


def settings(given: schema.Text) -> schema.Text:
  """Returns the settings of the text tower of `given.weights`; the other settings are those that are given.

  Raises:
    UserError: the weights have no text tower, or there is no tokenizer.
  """
  found = load_alone(given.weights)
  tower, path = found.tower, find_tokenizer(found, given.tokenizer)
  projection = TextProjection.NONE if not tower.out_width else (
      TextProjection.BIAS if tower.projection_bias else TextProjection.PLAIN)
  return dataclasses.replace(
      given, tokens=Tokens(found.family), tokenizer=str(path or ''), vocabulary=tower.vocabulary, length=tower.length,
      width=tower.width, depth=tower.depth, heads=tower.heads, mlp=tower.mlp,
      activation=Activation.RELU if tower.gelu is None else Activation(tower.gelu.value), norm_eps=tower.norm_eps,
      pool=tower.pool, causal=tower.is_causal, sinusoidal=tower.is_sinusoidal, projection=projection)


def find_tokenizer(weights: TextWeights, given: str = '') -> pathlib.Path | None:
  """Returns the file of the tokenizer of a text tower, the given one or that beside its weights; None if it has none.

  Raises:
    UserError: there is no such file.
  """
  given = given or weights.tokenizer_file
  if weights.family == tokenizer.BYTES:
    return None
  if not given:
    addresses.fetch_tokenizer(weights.source, tokenizer.FILES[weights.family])
  return tokenizer.find(weights.folder, weights.family, requested=given, source=weights.source)


def _of_tensors(tensors: Tensors, path: pathlib.Path, where: str, image: Weights) -> TextWeights:
  found = text_towers.recognize(tensors)
  match = tables.read(found.tensors, found.table)
  if match.left or match.problems:
    raise UserError('\n'.join([*match.problems, *(['tensors without a place in a text tower:'] if match.left else []),
                               *tables.listed(match.left)]))
  config = _config(path)
  tower = _tower(match.leaves, found, config, image)
  leaves = {name.removeprefix('text/'): x for name, x in match.leaves.items()}
  wanted = jax.eval_shape(tower.init, jax.random.key(0))
  params = trees.unflatten(infer.fitted(leaves, trees.flatten(wanted)))
  if differences := trees.difference(params, wanted, found_name='the file', wanted_name='the network'):
    raise UserError('the tensors do not make a complete network:\n' + '\n'.join(
        tables.listed(line.strip() for line in differences.splitlines())))
  _check_width(tower, image)
  scale = found.scale if found.scale is not None else TIPS_SCALE if found.family == tokenizer.TIPS else None
  if scale is None:
    raise UserError('expected a scale of the logits, got none. Use the complete file of the model.')
  report = Report((*(Line(name, 'taken') for name in match.leaves), *found.dropped), (), ())
  return TextWeights(tower, params, found.family, scale, found.bias or 0., found.is_sigmoid, path.parent, where, report)


def _tower(leaves: infer.Leaves, found: Found, config: Mapping[str, Any], image: Weights) -> TextTower:
  """Returns the settings of a tower, by the shapes of its leaves, its family and a config beside the file."""
  wanted = ('text/tokens', 'text/blocks/norm1/scale', 'text/blocks/mlp/up/kernel', 'text/blocks/attn/query/kernel')
  if missing := [name for name in wanted if name not in leaves]:
    raise UserError('expected the tensors of a text tower, got none for ' + ', '.join(missing))
  vocabulary, width = leaves['text/tokens'].shape
  query = leaves['text/blocks/attn/query/kernel']
  heads = query.shape[-2] if query.ndim == 4 else int(config.get('heads', 0)) or _HEADS.get(width, width // 64)
  if not heads or width % heads:
    raise UserError(f'heads of the text tower: expected a divisor of its width {width}, got {heads}. Put the '
                    'config.json of the model beside its weights.')
  is_tips, is_clip = found.family == tokenizer.TIPS, found.family == tokenizer.CLIP
  kernel = leaves.get('text/projection/kernel')
  gelu = found.gelu if is_tips or found.gelu else getattr(image.model, 'gelu', Gelu.EXACT)
  return TextTower(
      vocabulary, leaves['text/positions'].shape[1] if 'text/positions' in leaves else TIPS_LENGTH, width,
      depth=len(leaves['text/blocks/norm1/scale']), heads=heads, mlp=leaves['text/blocks/mlp/up/kernel'].shape[-1],
      gelu=config.get('activation', gelu), norm_eps=config.get('norm_eps', found.norm_eps),
      pool=TextPool.MEAN if is_tips else TextPool.END if is_clip else TextPool.LAST, is_causal=is_clip,
      is_sinusoidal=is_tips, out_width=0 if kernel is None else kernel.shape[-1],
      projection_bias='text/projection/bias' in leaves)


_FIX = 'Correct it, fetch it again, or move it away from the weights.'


def _config(path: pathlib.Path) -> dict[str, Any]:
  """Returns `heads`, `activation` and `norm_eps` of the text tower in the config beside a file, where it has them.

  Raises:
    UserError: the config cannot be understood.
  """
  for name, keys in (('config.json', ('text_config',)), ('open_clip_config.json', ('model_cfg', 'text_cfg'))):
    config = path.with_name(name)
    if not config.is_file():
      continue
    table = documents.read(config, expected='the settings of a text tower as JSON', advice=_FIX)
    for key in keys:
      table = table.object_or_empty(key)
    found: dict[str, Any] = {}
    if named := [name for name in ('num_attention_heads', 'heads') if name in table]:
      found['heads'] = table.field(named[0]).whole(0, MOST_HEADS)
    if 'hidden_act' in table:
      if table.field('hidden_act').text() not in _ACTIVATIONS:
        raise table.field('hidden_act', default=None).error(f'one of {", ".join(_ACTIVATIONS)}')
      found['activation'] = _ACTIVATIONS[table.field('hidden_act').text()]
    if 'layer_norm_eps' in table:
      found['norm_eps'] = table.field('layer_norm_eps').number(*EPSILON)
    return found
  return {}


def _check_width(tower: TextTower, image: Weights) -> None:
  """Raises UserError unless both towers have vectors of the same width."""
  own = tower.out_width or tower.width
  width = image.num_classes or getattr(image.model, 'width', own)
  if own != width:
    raise UserError(f'expected vectors of {width} numbers, as those of the images, got {own}. Use both towers of one '
                    'model.')


def describe(text: TextWeights) -> str:
  """Returns one line about a text tower."""
  t = text.tower
  kind = 'sigmoid' if text.is_sigmoid else 'softmax'
  return (f'Text tower of {text.source} ({text.family}): width {t.width}, depth {t.depth}, {t.heads} heads, '
          f'{t.vocabulary:,} tokens, {t.length} of a text, {trees.num_elements(text.params):,} parameters; logits '
          f'{text.scale:.4g} x similarity {text.bias:+.4g}, {kind}')
