"""Weights of any format as one record: `load` reads them, `adapt.py` fits them to a run, `saving.py` writes them.

Every tensor of a file must have a place in the network or be dropped by a stated rule, and every parameter of the
network must be in the file, with the correct shape.
"""
from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize, checks
from vit_jax.config.schema.data import RGB
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.types import HostArray, Params
from vit_jax.models import backbones, heads
from vit_jax.models.decoders import Decoder
from vit_jax.weights import (
  addresses,
  branches,
  files,
  grids,
  infer,
  peft,
  published,
  recognize,
  resize,
  runs,
  sidecars,
  tables,
)
from vit_jax.weights import hints as model_hints
from vit_jax.weights import preprocess as preparing
from vit_jax.weights.families import rotary
from vit_jax.weights.families.record import Clues
from vit_jax.weights.hints import Hints
from vit_jax.weights.infer import Leaves
from vit_jax.weights.network import Line, Report, Weights, describe, position_resize
from vit_jax.weights.preprocess import Known, Preprocess


def load(where: str, *, preprocess: str = '', model: str = '', view: str = '', first: str = '',
         allow_download: bool = False, allow_nonfinite: bool = False) -> Weights:
  """Loads the weights at `where`.

  Args:
    where: a file, a folder (of adapters of PEFT, too: they are merged), a run directory, `gs://…`, `https://…`,
      `hf://owner/name`, or a known name.
    preprocess: overrides the file, its sidecars and its name: `half`, `imagenet`, `clip` or `zero_one` for
      mean and deviation, and `resize=248,image=224,interpolation=bicubic,antialias=true`; '' = nothing.
    model: settings that tensors do not determine: `heads=6,gelu=exact,norm_eps=1e-6,image=224x320`; '' = nothing.
    view: of a run directory: student, ema or teacher, '' = ema where there is one; of a file with several networks,
      which one, '' = the one for inference.
    first: the view of a run directory that '' means where the run has it, before ema.
    allow_download: whether weights are downloaded that only the config of adapters names.
    allow_nonfinite: whether parameters may be infinite or NaN, with a warning in the report.

  Raises:
    UserError: the file does not exist, is not a weight file, a tensor is missing or has no place, or a value is not
      finite.
  """
  explicit, hints = preparing.parse(preprocess), model_hints.parse(model)
  path, shown = addresses.local(where), redacted(where)
  if runs.is_run(path):
    weights = _of_run(shown, runs.read(path, view=view, first=first), explicit, hints)
  else:
    weights = _of_files(path, shown, explicit, hints, view=view, allow_download=allow_download)
  nonfinite = _not_finite(trees.flatten(weights.params) | trees.flatten(weights.state))
  if nonfinite and not allow_nonfinite:
    raise UserError(f'--weights={where}: expected weights with finite values, got {nonfinite}. Use other weights, such '
                    'as an earlier checkpoint, or add --allow_nonfinite to use these.')
  return weights._replace(given=where)


def _of_files(path: pathlib.Path, where: str, explicit: list[preparing.PreprocessRule], hints: Hints, *, view: str,
              allow_download: bool) -> Weights:
  """Returns weights from a file, the folder of a model, or one of adapters; for the arguments see `_of_tensors`."""
  adapter = peft.read(path) if peft.is_adapter(path) else None
  shards = addresses.weight_files(peft.resolve(adapter, where, allow_download=allow_download) if adapter else path)
  content = read(shards, view)
  try:
    if not adapter:
      return _of_tensors(content, shards[0], where, explicit, hints)
    merged = content._replace(tensors=peft.merge(content.tensors, adapter))
    weights = _of_tensors(merged, shards[0], where, [*explicit, *adapter.rules], hints)
    return weights._replace(class_names=adapter.class_names or weights.class_names)
  except UserError as error:
    raise UserError(f'{where} cannot be used: {error}') from None


def read(shards: Sequence[pathlib.Path], view: str = '') -> files.Content:
  """Returns the tensors of the network for inference in the files of a model, or of the one that `view` names."""
  if len(shards) == 1:
    return files.read_network(shards[0], recognize.is_known, view=view)
  tensors: dict[str, HostArray] = {}
  for shard in shards:
    more = files.read(shard)
    if duplicates := sorted(tensors.keys() & more.keys()):
      raise UserError(f'{shard}: expected tensors that no other shard has, got {len(duplicates):,} of an earlier one, '
                      f'such as {duplicates[0]}. Fetch all files of the model again.')
    tensors |= more
  chosen = branches.choose(tensors, recognize.is_known, view)
  return files.Content({new: tensors[name] for new, name in chosen.names.items()}, chosen)


def text(weights: Weights) -> str:
  """Returns a description of what was loaded."""
  classes = f'{weights.num_classes:,} classes' if weights.num_classes else 'no head'
  named = ' with names' if weights.class_names else ''
  return '\n'.join([
      f'Weights: {weights.source} ({weights.family}): {describe(weights.model)}, {classes}{named}, '
      f'{trees.num_elements(weights.params):,} parameters',
      preparing.describe(weights.preprocess), weights.report.text()])


def _of_tensors(content: files.Content, path: pathlib.Path, where: str, explicit: list[preparing.PreprocessRule],
                hints: Hints) -> Weights:
  """Returns weights from the named tensors of a network in the file `path`, beside which sidecars are looked for.

  `where` is for messages and reports; `explicit` are the rules of `--preprocess` and of adapters, `hints` are of
  `--model`.
  """
  sidecar, family = sidecars.read(path), recognize.recognize(content.tensors)
  by_name = published.find((sidecar.architecture, str(path), where))
  match = tables.read(family.tensors, family.table)
  given_px = hints.image_px
  name_hints = by_name.hints.of_width(match.leaves.get('backbone/blocks/norm1/scale', np.zeros(1)).shape[-1])
  if family.label in ('vision_transformer', 'big_vision', 'bit'):  # files of programs that have these settings
    name_hints = Hints()
  hints = hints.with_fallback(sidecar.hints).with_fallback(name_hints._replace(position_resize=None))
  clues = Clues(tuple(name.rpartition('/')[2].lower() for name in (sidecar.architecture, path.name, where)),
                has_config=sidecar != Known(), has_gelu=hints.gelu is not None)
  hints = hints.with_fallback(family.hints).with_fallback(Hints(
      position_resize=recognize.position_resize(family.label, name_hints.position_resize,
                                                has_registers='backbone/registers' in match.leaves),
      pool=infer.pool_of_timm(hints.timm_pool, match.leaves)))
  _check_all_used(match, content.chosen.path, family.label)
  _check_rgb(match.leaves)
  model = infer.model(match.leaves, hints)
  warnings = [*family.warn(model, clues), *_fixed_positions(model, match.leaves, family.label),
              *_guessed_pool(model, match.leaves, hints)]
  decoder = infer.decoder(match.leaves, hints)
  known_px = [hints.image_px] if hints.image_px else []
  known_px += [rule.values['image_px'] for rule in by_name.rules if 'image_px' in rule.values]
  placed = grids.place(match.leaves, model, family.first_rows, given_px=given_px, known_px=known_px)
  if isinstance(model, schema.EfficientNet) and not hints.image_px:
    hints = hints._replace(image_px=infer.efficientnet_px(model))
  image_px = placed.image_px or hints.image_px or (224, 224)
  head, num_classes = _head(placed.leaves)
  wanted = expected(model, head, num_classes, decoder, image_px, with_dist='head_dist/kernel' in placed.leaves)
  leaves = infer.fitted(placed.leaves, trees.flatten(wanted))
  if differences := trees.difference(trees.unflatten(leaves), wanted, found_name='the file', wanted_name='the network'):
    raise UserError('the tensors do not make a complete network:\n' + '\n'.join(tables.listed(
        line.strip() for line in differences.splitlines())))
  leaves = rotary.reordered(leaves, model)
  rules = [*explicit, *sidecar.rules, *by_name.rules]
  rules += [preparing.PreprocessRule('its size', {'image_px': hints.image_px})] if hints.image_px else []
  preprocess, guesses = preparing.decide(rules, usual=recognize.usual(family.label), own_px=placed.image_px)
  class_names, ignored = _names(sidecar.class_names, num_classes)
  chosen, changed = content.chosen, {line.name for line in placed.lines}
  lines = [*(Line(name, 'taken') for name in leaves if name not in changed), *placed.lines, *family.dropped]
  lines += [Line(name, 'dropped', f'beside the network {chosen.path} of the file') for name in chosen.beside]
  several = (f'Network: {chosen.path or "the one without a name"}, of several in the file. '
             f'--view={" or ".join(chosen.others)} reads another.') if chosen.others else ''
  notes = filter(None, (several, placed.note, published.terms(where), infer.pool_note(model, hints)))
  report = Report(tuple(lines), tuple(notes), (*guesses, *warnings, *ignored, *_unusable_values(leaves)))
  params = trees.unflatten(leaves)
  state = params.pop('state', {})
  weights = Weights(
      model=model, head=head, num_classes=num_classes, params=params, state=state, decoder=decoder,
      preprocess=preprocess._replace(image_px=image_px), class_names=class_names, family=family.label, source=where,
      report=report, is_sigmoid=sidecar.is_sigmoid)
  return at_size(weights, preprocess)


def at_size(weights: Weights, preprocess: Preprocess) -> Weights:
  """Returns the weights with another preprocessing; positions are resized for `preprocess.image_px`.

  Raises:
    UserError: the network is for one size of images only, or its patches do not cover this one.
  """
  m, old_px, new_px = weights.model, weights.preprocess.image_px, preprocess.image_px
  if old_px == new_px or isinstance(m, schema.ResNet | schema.EfficientNet):
    return weights._replace(preprocess=preprocess)
  if not isinstance(m, schema.ViT) or not m.positions.is_resizable:
    with_positions = f' with positions {checks.kind(m.positions)}' if isinstance(m, schema.ViT) else ''
    raise UserError(f'image={new_px[0]}x{new_px[1]}: expected {old_px[0]}x{old_px[1]}, as this {type(m).__name__}'
                    f'{with_positions} takes one size of images only. Leave the size of images out.')
  if any(px % m.patch or not px for px in new_px):
    raise UserError(f'image={new_px[0]}x{new_px[1]}: expected multiples of the patch side, {m.patch} px. Choose '
                    'another size of images.')
  old, new = ((px[0] // m.patch, px[1] // m.patch) for px in (old_px, new_px))
  if not m.positions.has_rows:
    return weights._replace(preprocess=preprocess)
  leaves, lines = resize.tables(trees.flatten(weights.params), old, new, how=PositionResize(position_resize(m)),
                                num_first=m.num_first)
  resized = {line.name for line in lines}
  kept = tuple(line for line in weights.report.lines if line.name not in resized or line.what != 'taken')
  return weights._replace(params=trees.unflatten(leaves), preprocess=preprocess,
                          report=weights.report._replace(lines=(*kept, *lines)))


_FIRST = ('backbone/stem/root/kernel', 'backbone/stem/kernel', 'backbone/stem/conv/kernel', 'backbone/root/kernel')
"""The kernels that read the channels of images."""


def _check_rgb(leaves: Leaves) -> None:
  """Raises UserError if the network is for images of other channels than RGB."""
  name = next((name for name in _FIRST if name in leaves), '')
  if name and (num := leaves[name].shape[2]) != RGB:
    raise UserError(f'expected weights for RGB images, got {name} for data.channels={num}. Files of other programs '
                    f'are read for RGB alone. Use those for RGB with --config.data.channels={num}, which adapts them.')


def _check_all_used(match: tables.Match, path: str, label: str) -> None:
  """Raises UserError if a tensor is unused, or cannot be combined with the others.

  `path` is that of the network in its file, which reports call `label`.
  """
  problems = list(match.problems)
  if match.unused:
    problems += [f'{len(match.unused)} tensors have no place in this network:', *tables.listed(match.unused),
                 *recognize.reasons(match.unused, label)]
    problems += [f'If they are beside the network {path}, leave them out with --view={path}.'] if path else []
  if problems:
    raise UserError('\n'.join(problems))


def _head(leaves: Leaves) -> tuple[schema.Head, int]:
  """Returns the settings of the head, and the number of its outputs."""
  hidden, kernel = leaves.get('head/pre_logits/kernel'), leaves.get('head/kernel')
  may_lack_bias = kernel is not None and 'backbone/norm_before/scale' in leaves  # as in CLIP; others are incomplete
  head = schema.Head(pre_logits=0 if hidden is None else hidden.shape[-1],
                     bias='head/bias' in leaves or not may_lack_bias)
  return head, 0 if kernel is None else kernel.shape[-1]


def expected(model: schema.Model, head: schema.Head, num_classes: int, decoder: schema.Mae | None,
             image_px: tuple[int, int], *, with_dist: bool) -> Params:
  """Returns the shapes of all parameters of a network, and of its running statistics under `state` if it has any."""
  backbone = backbones.build(model, image_px)

  def init() -> Params:
    key, image = jax.random.key(0), jnp.zeros((1, *image_px, 3))
    params, state = backbone.init(key, image)
    network: Params = {'backbone': params, **({'state': state} if state else {})}
    if num_classes:
      width = model.width if isinstance(model, schema.ViT | schema.Mixer) else backbone.apply(
          params, state, image, train=False, key=None)[0].pooled.shape[-1]
      network['head'] = heads.Head(head).init(key, width, num_classes)
      if with_dist:
        network['head_dist'] = heads.Head(schema.Head()).init(key, width, num_classes)
    if decoder:
      assert isinstance(model, schema.ViT)
      of_mae = Decoder(decoder.decoder_width, decoder.decoder_depth, decoder.decoder_heads, model)
      network |= {'decoder': of_mae.init(key), 'mask_token': of_mae.init_mask(key)}
    return network

  return jax.eval_shape(init)


def _names(names: tuple[str, ...], num_classes: int) -> tuple[tuple[str, ...], list[str]]:
  """Returns the names of the outputs of a head, and a warning if they were ignored, as there are more or fewer."""
  if not num_classes:  # features, without a head whose outputs the names would be of
    return (), []
  if names and len(names) != num_classes:
    return (), [f'{len(names)} class names in the sidecar do not match the {num_classes} outputs of '
                'the head; they are ignored']
  return names, []


def _fixed_positions(model: schema.Model, leaves: Leaves, family: str) -> list[str]:
  """Returns a warning if positions are assumed to be fixed, as in big_vision. Raises UserError if the file is of
  another program."""
  if not isinstance(model, schema.ViT) or 'backbone/positions' in leaves or model.positions != schema.SinCos():
    return []
  if family != 'big_vision':
    raise UserError('expected position embeddings, got none: they are rotary or absent, which is not supported. Choose '
                    'other weights.')
  return ['it has no position embeddings; they are assumed to be fixed (sincos), as in big_vision']


def _guessed_pool(model: schema.Model, leaves: Leaves, hints: Hints) -> list[str]:
  """Returns a warning if neither the tensors, `--model` nor a sidecar determine how tokens are pooled."""
  if not isinstance(model, schema.ViT) or infer.has_pool(leaves) or hints.pool or (
      model.last_norm is schema.LastNorm.POOLED):
    return []
  return ['its pooling is a guess: the mean of the patch tokens. The same tensors may belong to a network that takes '
          'the first one (big_vision, pool type 0) or pools nothing (vision_transformer, unpooled). Set '
          '--model=pool=mean or --model=pool=first.']


def _unusable_values(leaves: Leaves) -> list[str]:
  """Returns warnings about values that cannot be used."""
  warnings = []
  if 'head/kernel' in leaves and not np.any(leaves['head/kernel']):
    warnings.append('the head is all zeros, as in the ImageNet-21k files of the ViT paper: its predictions mean '
                    'nothing')
  if nonfinite := _not_finite(leaves):
    warnings.append(f'not finite: {nonfinite}')
  return warnings


def _not_finite(leaves: Leaves) -> str:
  """Returns how many parameters have values that are infinite or NaN, and the first of them; '' for none."""
  names = [name for name, leaf in leaves.items() if leaf.dtype.kind == 'f' and not np.isfinite(leaf).all()]
  return f'infinite or NaN values in {documents.joined(names, 3)}' if names else ''


def _of_run(where: str, run: runs.Found, explicit: list[preparing.PreprocessRule], hints: Hints) -> Weights:
  """Returns weights from a checkpoint of the run at `where`; the other arguments are those of `_of_tensors`."""
  if hints != Hints():
    raise UserError(f'--model: expected none for the run {where}, whose config has all settings. Leave it out.')
  leaves, objective = trees.flatten(run.params), run.config.objective
  rule = preparing.PreprocessRule('the run', run.preprocess)
  preprocess, _ = preparing.decide([*explicit, rule], usual=recognize.usual('vision_transformer'), own_px=None)
  kernel = leaves.get('head/kernel')
  num_classes = 0 if kernel is None else kernel.shape[-1]
  has_classes = not objective.takes_texts  # else its head projects images
  head = run.config.head if has_classes else schema.Head(bias=False)
  class_names, ignored = _names(run.class_names if has_classes else (), num_classes)
  report = Report(tuple(Line(name, 'taken') for name in leaves), (f'Run: step {run.step:,}, view {run.view}',),
                  (*_unusable_values(leaves), *ignored))
  weights = Weights(
      model=run.config.model, head=head, num_classes=num_classes, params=run.params, state=run.state,
      decoder=objective if isinstance(objective, schema.Mae) else None,
      preprocess=preprocess._replace(image_px=run.preprocess['image_px']), class_names=class_names, family='run',
      source=where, report=report, step=run.step,
      is_sigmoid=isinstance(objective, schema.Supervised) and objective.loss is not schema.Loss.SOFTMAX)
  return at_size(weights, preprocess)
