"""Text towers of weight files, read as strictly as image towers: each tensor has a place, each parameter a tensor.

`load` reads the part of a file that `loading.load` leaves out. TIPS has its text tower in a file of its own, which is
found beside that of the images by its name. The first half of this module has the names in the files of programs, from
which `recognize` returns `TowerTensors`; the second half makes `TextWeights` of these.

Our paths: `text/tokens [V, D]`, `text/positions [1, N, D]`, `text/blocks/…` as in a backbone, `text/norm/{scale,bias}`,
`text/projection/{kernel [D, E],bias [E]}`.
"""
from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Activation, Gelu, TextPool, TextProjection, TextRule, Tokens
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.types import Params
from vit_jax.data.text import prompts, tokenizer
from vit_jax.data.text.tokenizer import CLIP, SIGLIP, TIPS
from vit_jax.models import cost
from vit_jax.models.text_tower import TextTower
from vit_jax.objectives import contrastive
from vit_jax.weights import addresses, files, infer, loading, runs, sidecars, tables
from vit_jax.weights.families import flax
from vit_jax.weights.families.record import Tensors, dropping, renamed
from vit_jax.weights.hints import EPSILON, MOST_HEADS
from vit_jax.weights.network import Line, Report, Weights
from vit_jax.weights.tables import Table, table

# The names in files


class TowerTensors(NamedTuple):
  """The text tower of a file, under the names of its program.

  family: one of `data.text.tokenizer.FAMILIES`.
  table: the names of the program.
  tensors: by these names.
  scale, bias: of the logits, `scale * similarity + bias`; None = not in the file.
  is_sigmoid: whether each logit is a decision of its own (SigLIP), and not one of a softmax.
  gelu: of the program; None = that of the image tower of the same file. TIPS has none.
  norm_eps: of the program.
  dropped: tensors without a use.
  """
  family: str
  table: Table
  tensors: Tensors
  scale: float | None
  bias: float | None
  is_sigmoid: bool
  gelu: Gelu | None
  norm_eps: float
  dropped: tuple[Line, ...] = ()


class Program(NamedTuple):
  """How text towers look in the files of a program.

  tokens: pattern of the name of the table of tokens, by which the program is detected.
  tower: pattern of the names of the text tower; the other tensors are those of the image tower.
  read: returns the tower, of its own tensors, which it may change.
  """
  tokens: str
  tower: str
  read: Callable[[Tensors], TowerTensors]


_DROPS = {r'(text_model\.)?embeddings\.position_ids|text_model\.embeddings\.position_ids': 'numbers from 0',
          r'attn_mask|input_resolution|context_length|vocab_size': 'a setting, and not a weight'}


def recognize(tensors: Tensors) -> TowerTensors:
  """Returns the text tower among the tensors of a file. Raises UserError if there is none."""
  if (program := _program(tensors)) is None:
    raise UserError('expected weights with a text tower, got weights of images alone. Use the complete file of a CLIP, '
                    'SigLIP or TIPS model.')
  of_tower, dropped = dropping({name: x for name, x in tensors.items() if re.fullmatch(program.tower, name)}, _DROPS)
  tower = program.read(of_tower)
  return tower._replace(dropped=dropped + tower.dropped)


def _program(tensors: Tensors) -> Program | None:
  """Returns the program whose text tower is in a file; None if there is no text tower."""
  return next((program for program in _PROGRAMS if any(re.fullmatch(program.tokens, name) for name in tensors)), None)


# transformers: CLIP, SigLIP and TIPSv2
_TRANSFORMERS = table("""
    text/tokens | text_model.embeddings.token_embedding.weight | same
    text/positions | text_model.embeddings.position_embedding.weight | rows
    text/blocks/attn/{query,key,value,out} | text_model.encoder.layers.{i}.self_attn.{q,k,v,out}_proj | dense
    text/blocks/{norm1,norm2} | text_model.encoder.layers.{i}.{layer_norm1,layer_norm2} | norm
    text/blocks/mlp/{up,down} | text_model.encoder.layers.{i}.mlp.{fc1,fc2} | dense
    text/norm | text_model.final_layer_norm | norm
    text/projection | text_model.head | dense
    text/projection/kernel | text_projection.weight | matrix
""")


def _of_transformers(tensors: Tensors) -> TowerTensors:
  family = SIGLIP if 'text_model.head.weight' in tensors else CLIP if 'text_projection.weight' in tensors else TIPS
  scale, bias = _take_logits(tensors)
  return TowerTensors(
      family, _TRANSFORMERS, tensors, scale, bias, is_sigmoid=bias is not None,
      gelu={CLIP: Gelu.QUICK, SIGLIP: Gelu.TANH, TIPS: None}[family], norm_eps=1e-6 if family == SIGLIP else 1e-5)


# big_vision: SigLIP, and LiT, which is trained with a softmax and has no bias of the logits
_BIG_VISION = table("""
    text/{tokens,positions} | {Embed_0/embedding,pos_embedding} | same
    text/blocks/{norm1,norm2} | Encoder_0/encoderblock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    text/blocks/attn/{query,key,value,out} |
        Encoder_0/encoderblock_{i}/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    text/blocks/mlp/{up,down} | Encoder_0/encoderblock_{i}/MlpBlock_0/{Dense_0,Dense_1} | flax
    text/norm | Encoder_0/encoder_norm | flax norm
    text/projection | head | flax
""")
"""Without the prefix `params/txt/`."""


def _of_big_vision(tensors: Tensors) -> TowerTensors:
  tensors = renamed(tensors, (r'^params/', ''))
  scale, bias = _take_logits(tensors, scale='t', bias='b')
  tensors = flax.unstacked(renamed(tensors, (r'^txt/', '')), 'Encoder_0/encoderblock')
  dropped: tuple[Line, ...] = ()
  if 'pos_embedding' in tensors and 'Encoder_0/pos_embedding' in tensors:  # big_vision adds both for its oldest files
    tensors['pos_embedding'] = tensors['pos_embedding'] + tensors.pop('Encoder_0/pos_embedding')
    dropped = (Line('Encoder_0/pos_embedding', 'folded', 'added to the other positions'),)
  return TowerTensors(SIGLIP, _BIG_VISION, tensors, scale, bias, is_sigmoid=bias is not None, gelu=Gelu.TANH,
                      norm_eps=1e-6, dropped=dropped)


# OpenAI, open_clip (with the prefix `text.`) and the PyTorch files of TIPS, which have no positions
_OPENAI = table("""
    text/tokens | token_embedding.weight | same
    text/positions | positional_embedding | rows
    text/blocks/attn/{query,key,value} |
        transformer.resblocks.{i}.attn.{in_proj[0/3],in_proj[1/3],in_proj[2/3]} | packed
    text/blocks/attn/out | transformer.resblocks.{i}.attn.out_proj | dense
    text/blocks/{norm1,norm2} | transformer.resblocks.{i}.{ln_1,ln_2} | norm
    text/blocks/mlp/{up,down} | transformer.resblocks.{i}.mlp.{c_fc,c_proj} | dense
    text/norm | ln_final | norm
    text/projection/kernel | text_projection | same
    text/projection | text_projection | dense
""")


def _of_openai(tensors: Tensors) -> TowerTensors:
  tensors, dropped = dropping(renamed(tensors, (r'^text\.', '')), _DROPS)
  scale, bias = _take_logits(tensors)
  tower = TowerTensors(CLIP, _OPENAI, tensors, scale, bias, is_sigmoid=False, gelu=None, norm_eps=1e-5, dropped=dropped)
  if 'positional_embedding' not in tensors:
    return tower._replace(family=TIPS)
  if bias is not None:
    return tower._replace(family=SIGLIP, is_sigmoid=True, gelu=Gelu.TANH, norm_eps=1e-6)
  return tower


# scenic: the JAX files of TIPS
_SCENIC = table("""
    text/tokens | token_emb/emb_var | same
    text/blocks/{norm1,norm2} | transformer/encoderblock_{i}/{LayerNorm_0,LayerNorm_1} | flax norm
    text/blocks/attn/{query,key,value,out} |
        transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/{query,key,value,out} | flax
    text/blocks/mlp/{up,down} | transformer/encoderblock_{i}/MlpBlock_0/{Dense_0,Dense_1} | flax
    text/norm | text_encoder_norm | flax norm
""")


def _of_scenic(tensors: Tensors) -> TowerTensors:
  scale, bias = _take_logits(tensors)
  return TowerTensors(TIPS, _SCENIC, tensors, scale, bias, is_sigmoid=False, gelu=None, norm_eps=1e-6)


_PROGRAMS = (
    Program(r'text_model\.embeddings\.token_embedding\.weight',
            r'(text_model|text_projection)\..*|logit_scale|logit_bias|temperature', _of_transformers),
    Program(r'(params/)?txt/Embed_0/embedding', r'(params/)?(txt/.*|t|b|bias_init|temperature)', _of_big_vision),
    Program(r'(text\.)?token_embedding\.weight',
            r'text\..*|token_embedding\..*|positional_embedding|transformer\.resblocks\..*|ln_final\..*|'
            r'text_projection(\..*)?|logit_scale|logit_bias|temperature|attn_mask|input_resolution|context_length|'
            r'vocab_size', _of_openai),
    Program(r'token_emb/emb_var', r'.*', _of_scenic))


def _take_logits(tensors: Tensors, *, scale: str = 'logit_scale', bias: str = 'logit_bias'
                 ) -> tuple[float | None, float | None]:
  """Removes scale and bias of the logits from tensors, and returns them; None = not in the file.

  Files have the logarithm of the scale. Those of TIPS have a temperature instead, `1 / scale`.

  Args:
    tensors: of a text tower, without those of other towers.
    scale, bias: names of the numbers in the files of a program.
  """
  log_scale, offset = _take_number(tensors, scale), _take_number(tensors, bias)
  temperature = _take_number(tensors, 'temperature') if scale == 'logit_scale' else None
  if temperature is None:
    return None if log_scale is None else float(np.exp(log_scale)), offset
  if not temperature > 0:
    raise UserError(f'temperature: expected a positive number, got {temperature}')
  return 1. / temperature, offset


def _take_number(tensors: Tensors, name: str) -> float | None:
  """Removes a tensor of one number, and returns the number; None if there is no such tensor."""
  x = tensors.pop(name, None)
  if x is None:
    return None
  if x.size != 1 or not np.isfinite(x).all():
    raise UserError(f'scale or bias of the logits: expected one finite number, got an array {list(x.shape)}')
  return float(x.reshape(()))


# Loading

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


def load(where: str, *, image: Weights | None = None) -> TextWeights:
  """Loads the text tower of the weights at `where`, whose image tower is `image`; None = it is loaded from there, too.

  Raises:
    UserError: the weights have no text tower, a tensor is missing or has no place, or both towers do not fit.
  """
  image = image or loading.load(where)
  path = addresses.local(where)
  if runs.is_run(path):
    run = runs.read(path, view='')
    if not isinstance(run.config.objective, schema.Contrastive):
      raise UserError(f'{redacted(where)}: expected weights with a text tower, got a run without one. Use the weights '
                      'that the run began with.')
    weights = of_config(run.config, run.params, redacted(where))
    _check_width(weights.tower, image)
    return weights
  file, *_ = shards = addresses.weight_files(path)
  tensors = loading.read(shards).tensors
  text_file = file.with_name(file.name.replace('vision', 'text'))  # as TIPS is published
  if _program(tensors) is None and text_file != file and text_file.is_file():
    tensors, file = files.read(text_file), text_file
  try:
    return _of_tensors(tensors, file, redacted(where), image)
  except UserError as error:
    raise UserError(f'{where}, text tower: {error}') from None


def of_config(config: schema.Config, params: Params, where: str) -> TextWeights:
  """Returns the text tower of a run that trains one, with its `params`; {} = they are not known yet."""
  objective = config.objective
  assert isinstance(objective, schema.Contrastive), objective
  width = objective.out_dim or cost.forward(config.model, config.image_px, head=config.head, num_classes=0,
                                            num_channels=config.data.channels).width
  tower_params, logits = params.get('text', {}), params.get('logits', {})
  taken = tuple(Line(f'text/{name}', 'taken') for name in trees.flatten(tower_params))
  return TextWeights(
      tower=contrastive.tower(objective.text, out_width=width), params=tower_params, family=objective.text.tokens.value,
      scale=float(np.exp(logits.get('scale', 0.))), bias=float(logits.get('bias', 0.)),
      is_sigmoid=objective.loss is schema.PairLoss.SIGMOID, folder=pathlib.Path(), source=where, report=Report(taken),
      tokenizer_file=objective.text.tokenizer, text_rule=objective.text.text_rule)


def settings(given: schema.Text) -> schema.Text:
  """Returns the settings of the text tower of `given.weights`; the other settings are those that are given.

  Raises:
    UserError: the weights have no text tower, or there is no tokenizer.
  """
  weights = load(given.weights)
  tower, path = weights.tower, find_tokenizer(weights, given.tokenizer)
  projection = TextProjection.NONE
  if tower.out_width:
    projection = TextProjection.BIAS if tower.projection_bias else TextProjection.PLAIN
  return dataclasses.replace(
      given, tokens=Tokens(weights.family), tokenizer=str(path or ''), vocabulary=tower.vocabulary, length=tower.length,
      width=tower.width, depth=tower.depth, heads=tower.heads, mlp=tower.mlp,
      activation=Activation.RELU if tower.gelu is None else Activation(tower.gelu.value), norm_eps=tower.norm_eps,
      pool=tower.pool, causal=tower.is_causal, sinusoidal=tower.is_sinusoidal, projection=projection)


def find_tokenizer(weights: TextWeights, given: str = '') -> pathlib.Path | None:
  """Returns the file of the tokenizer of a text tower, the given one or that beside its weights; None if it has
  none. Raises UserError if there is no such file."""
  given = given or weights.tokenizer_file
  if weights.family == tokenizer.BYTES:
    return None
  if not given:
    addresses.fetch_tokenizer(weights.source, tokenizer.FILES[weights.family])
  return tokenizer.find(weights.folder, weights.family, requested=given, source=weights.source)


def _of_tensors(tensors: Tensors, path: pathlib.Path, where: str, image: Weights) -> TextWeights:
  """Returns the text tower among the tensors of the file `path`, of the weights at `where`."""
  found = recognize(tensors)
  match = tables.read(found.tensors, found.table)
  unused = ['tensors without a place in a text tower:', *tables.listed(match.unused)] if match.unused else []
  if match.problems or unused:
    raise UserError('\n'.join([*match.problems, *unused]))
  tower = _tower(match.leaves, found, _config(path), image)
  wanted = jax.eval_shape(tower.init, jax.random.key(0))
  leaves = {name.removeprefix('text/'): x for name, x in match.leaves.items()}
  params = trees.unflatten(infer.fitted(leaves, trees.flatten(wanted)))
  if differences := trees.difference(params, wanted, found_name='the file', wanted_name='the network'):
    raise UserError('the tensors do not make a complete network:\n' + '\n'.join(
        tables.listed(line.strip() for line in differences.splitlines())))
  _check_width(tower, image)
  scale = TIPS_SCALE if found.scale is None and found.family == TIPS else found.scale
  if scale is None:
    raise UserError('expected a scale of the logits, got none. Use the complete file of the model.')
  report = Report((*(Line(name, 'taken') for name in match.leaves), *found.dropped))
  return TextWeights(tower=tower, params=params, family=found.family, scale=scale, bias=found.bias or 0.,
                     is_sigmoid=found.is_sigmoid, folder=path.parent, source=where, report=report)


def _tower(leaves: infer.Leaves, found: TowerTensors, config: Mapping[str, Any], image: Weights) -> TextTower:
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
  is_tips, is_clip = found.family == TIPS, found.family == CLIP
  gelu = found.gelu
  if gelu is None and not is_tips:
    gelu = getattr(image.model, 'gelu', Gelu.EXACT)
  kernel = leaves.get('text/projection/kernel')
  return TextTower(
      vocabulary=vocabulary, length=leaves['text/positions'].shape[1] if 'text/positions' in leaves else TIPS_LENGTH,
      width=width, depth=len(leaves['text/blocks/norm1/scale']), heads=heads,
      mlp=leaves['text/blocks/mlp/up/kernel'].shape[-1], gelu=config.get('activation', gelu),
      norm_eps=config.get('norm_eps', found.norm_eps),
      pool={TIPS: TextPool.MEAN, CLIP: TextPool.END}.get(found.family, TextPool.LAST), is_causal=is_clip,
      is_sinusoidal=is_tips, out_width=0 if kernel is None else kernel.shape[-1],
      projection_bias='text/projection/bias' in leaves)


_FIX = 'Correct it, fetch it again, or move it away from the weights.'


def _config(path: pathlib.Path) -> dict[str, Any]:
  """Returns `heads`, `activation` and `norm_eps` of the text tower in the config beside a file, where it has them.
  Raises UserError if the config cannot be understood."""
  for name, keys in (('config.json', ('text_config',)), ('open_clip_config.json', ('model_cfg', 'text_cfg'))):
    config = path.with_name(name)
    if not config.is_file():
      continue
    content = documents.read(config, expected='the settings of a text tower as JSON', advice=_FIX)
    for key in keys:
      content = content.object_or_empty(key)
    settings: dict[str, Any] = {}
    if names := [name for name in ('num_attention_heads', 'heads') if name in content]:
      settings['heads'] = content.field(names[0]).whole(0, MOST_HEADS)
    if 'hidden_act' in content:
      if content.field('hidden_act').text() not in _ACTIVATIONS:
        raise content.field('hidden_act', default=None).error(f'one of {", ".join(_ACTIVATIONS)}')
      settings['activation'] = _ACTIVATIONS[content.field('hidden_act').text()]
    if 'layer_norm_eps' in content:
      settings['norm_eps'] = content.field('layer_norm_eps').number(*EPSILON)
    return settings
  return {}


def _check_width(tower: TextTower, image: Weights) -> None:
  """Raises UserError unless both towers have vectors of the same width."""
  text_width = tower.out_width or tower.width
  image_width = image.num_classes or getattr(image.model, 'width', text_width)
  if text_width != image_width:
    raise UserError(f'expected vectors of {image_width} numbers, as those of the images, got {text_width}. Use both '
                    'towers of one model.')


def describe(text: TextWeights) -> str:
  """Returns one line about a text tower."""
  t = text.tower
  kind = 'sigmoid' if text.is_sigmoid else 'softmax'
  return (f'Text tower of {text.source} ({text.family}): width {t.width}, depth {t.depth}, {t.heads} heads, '
          f'{t.vocabulary:,} tokens, {t.length} of a text, {trees.num_elements(text.params):,} parameters; logits '
          f'{text.scale:.4g} x similarity {text.bias:+.4g}, {kind}')
