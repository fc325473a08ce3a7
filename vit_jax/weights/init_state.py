"""The initial state of a run: random parameters, replaced by those of `config.init_from` where it is set."""
from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.data import opening
from vit_jax.data.labels import classes
from vit_jax.models import adapters, backbones
from vit_jax.parallel.sharding import with_frozen
from vit_jax.record import run_directory, storage
from vit_jax.train.state import TrainState
from vit_jax.train.step import Program
from vit_jax.weights import adapt, loading
from vit_jax.weights.adapt import Target
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.weights')

WRAPPED = ('', 'inner/', 'inner/inner/')
"""Prefixes of the parts of `extra` of an objective, without and with others (EMA, adapters) around it."""
COPIES = tuple(f'{prefix}{name}' for prefix in WRAPPED for name in ('ema', 'teacher', 'frozen', 'gram'))
"""Parts of `extra` that are initialized as copies of the parameters, or hold those that are not trained."""
STATES = tuple(f'{prefix}model_state' for prefix in WRAPPED)
TRAINED = tuple(f'{prefix}trained' for prefix in WRAPPED)
"""Parts of `extra` that hold the teacher of distillation."""
_SHOWN = 12  # classes in a message


class InitArrays(NamedTuple):
  """Arrays that replace random ones, by path name in the parameters and in `extra`, and a record for `init.json`."""
  params: dict[str, np.ndarray]
  extra: dict[str, np.ndarray]
  record: dict[str, object]


def begin(config: schema.Config, program: Program, class_names: tuple[str, ...], workdir: storage.Path,
          found: Weights | None = None) -> TrainState:
  """Returns the state of step 0; logs which arrays come from weights, and writes them to `init.json`.

  Args:
    config: of the run.
    program: of the run.
    class_names: of the data.
    workdir: for `init.json`.
    found: the weights of `config.init_from` if they have been read; None = read them.

  Raises:
    UserError: weights cannot be loaded or do not fit; raised before any array is on a device.
  """
  arrays = given(config, program, class_names, found)
  state = program.init_fn()
  for one in arrays.values():
    state = state._replace(params=_replaced(state.params, one.params), extra=_replaced(state.extra, one.extra))
  if arrays:
    run_directory.write_json(workdir / 'init.json', {name: one.record for name, one in arrays.items()})
  return state


def named(config: schema.Config) -> dict[str, str]:
  """Returns the weights that a run begins with, by the setting that names them.

  Raises:
    UserError: a teacher has none.
  """
  task, found = config.objective, {'init_from': config.init_from}
  if isinstance(task, schema.Distill | schema.FeatureDistill | schema.Dinov2Distill) and task.has_weights:
    found['objective.teacher.weights'] = task.teacher.weights
    if not task.teacher.weights:
      kind = 'a run of DINOv2 or DINOv3' if isinstance(task, schema.Dinov2Distill) else 'a weight file'
      raise UserError(f"objective.teacher.weights: expected {kind}, got ''. Set it to that of a trained network.")
  if isinstance(task, schema.Dinov3):
    found['objective.gram.weights'] = task.gram.weights
  if isinstance(task, schema.Contrastive):
    found['objective.text.weights'] = task.text.weights
  return {name: where for name, where in found.items() if where}


def given(config: schema.Config, program: Program, class_names: tuple[str, ...],
          found: Weights | None = None) -> dict[str, InitArrays]:
  """Returns the arrays that weights give to the state of step 0, by what they are for; nothing is on a device yet.

  Arguments and errors are those of `begin`.
  """
  wanted, arrays = named(config), dict[str, InitArrays]()
  if config.init_from:
    arrays['init_from'] = _from_weights(found or loading.load(config.init_from, view=config.init_view), config, program,
                                        class_names)
  if isinstance(config.objective, schema.Distill):
    arrays['teacher'] = _teacher(config.objective.teacher, config, program, class_names)
  if 'objective.teacher.weights' in wanted and isinstance(
      config.objective, schema.FeatureDistill | schema.Dinov2Distill):
    arrays['teacher'] = _feature_teacher(config.objective, config)
  if isinstance(config.objective, schema.Dinov3) and 'objective.gram.weights' in wanted:
    arrays['gram'] = _gram(config.objective.gram, config, program)
  if isinstance(config.objective, schema.Contrastive) and 'objective.text.weights' in wanted:
    arrays['text'] = _text_tower(config.objective.text.weights, config, program)
  return arrays


def _from_weights(found: Weights, config: schema.Config, program: Program, class_names: tuple[str, ...]) -> InitArrays:
  log.info('%s', loading.text(found))
  for text in adapt.preprocessing_differs(found, config.data.recipe):
    log.warning('%s', text)
  shapes = program.abstract_state
  outputs = () if config.objective.takes_texts else class_names  # a projection has no classes
  target = Target(config.model, config.image_px, adapters.plain(with_frozen(shapes.params, shapes.extra)), outputs)
  fitted = adapt.adapt(found, target)
  log.info('Into this run:\n%s', fitted.report.text())
  params, statistics = _leaves(fitted.params), _leaves(fitted.state)
  params |= adapters.magnitudes(trees.flatten(shapes.params), params)
  extra = {f'{place}/{name}': leaf for place in COPIES for name, leaf in params.items()}
  extra |= {f'{place}/{name}': leaf for place in STATES for name, leaf in statistics.items()}
  return InitArrays(params, extra, _record(found, fitted))


def _teacher(teacher: schema.Teacher, config: schema.Config, program: Program,
             class_names: tuple[str, ...]) -> InitArrays:
  """Returns the trained teacher of distillation, which is part of `extra`."""
  found = loading.load(teacher.weights)
  log.info('Teacher: %s', loading.text(found))
  check_order(found, class_names, config.data)
  for name, own, value in (('mean', found.preprocess.mean, teacher.mean), ('std', found.preprocess.std, teacher.std)):
    if not np.allclose(own, value, atol=1e-3):
      log.warning('objective.teacher.%s: expected %s, as for its weights, got %s', name, own, tuple(value))
  extra = program.abstract_state.extra
  while 'trained' not in extra:
    extra = extra['inner']
  trained = extra['trained']
  like = {name: trained[name] for name in ('backbone', 'head')}
  fitted = adapt.adapt(found, Target(teacher.model, config.image_px, like, None, 'objective.teacher.model'))
  leaves = {**_leaves(fitted.params), **{f'state/{name}': leaf for name, leaf in _leaves(fitted.state).items()}}
  return InitArrays({}, {f'{place}/{name}': leaf for place in TRAINED for name, leaf in leaves.items()},
               _record(found, fitted))


def _feature_teacher(objective: schema.FeatureDistill | schema.Dinov2Distill, config: schema.Config) -> InitArrays:
  """Returns the frozen teacher whose features or outputs are predicted, which is part of `extra`."""
  teacher, has_heads = objective.teacher, isinstance(objective, schema.Dinov2Distill)
  found = loading.load(teacher.weights, view=teacher.view, first='teacher' if has_heads else '')
  log.info('Teacher: %s', loading.text(found))
  px = teacher.image_px(config.image_px)
  network, image = backbones.build(teacher.model, px), jnp.zeros((1, *px, 3))
  like = {'backbone': jax.eval_shape(lambda: network.init(jax.random.key(0), image)[0])}
  own = found._replace(params={'backbone': found.params['backbone']})
  fitted = adapt.adapt(own, Target(teacher.model, px, like, None))  # at the size of images that it sees
  params = {**fitted.params, **({'state': fitted.state} if fitted.state else {})}
  if has_heads:
    params |= {name: tree for name, tree in found.params.items() if name.endswith('projector')}
  leaves = _leaves(params)
  return InitArrays({}, {f'{place}/{name}': leaf for place in TRAINED for name, leaf in leaves.items()},
                    _record(found, fitted))


def _gram(gram: schema.Gram, config: schema.Config, program: Program) -> InitArrays:
  """Returns the Gram teacher of DINOv3, a backbone like that of the run, which is part of `extra`."""
  found = loading.load(gram.weights, view=gram.view, first='teacher')
  log.info('Gram teacher: %s', loading.text(found))
  backbone = with_frozen(program.abstract_state.params, program.abstract_state.extra)['backbone']
  own = found._replace(params={'backbone': found.params['backbone']})
  fitted = adapt.adapt(own, Target(config.model, config.image_px, {'backbone': adapters.plain(backbone)}, ()))
  leaves = _leaves(fitted.params)
  return InitArrays({}, {f'{prefix}gram/{name}': leaf for prefix in WRAPPED for name, leaf in leaves.items()},
                    _record(found, fitted))


def _text_tower(where: str, config: schema.Config, program: Program) -> InitArrays:
  """Returns a trained text tower; with scale and bias of the logits, if both towers are of the same weights."""
  from vit_jax.weights import text as texts  # only here: few runs have a text tower
  found = texts.load_alone(where)
  log.info('%s', texts.describe(found))
  shapes = program.abstract_state
  wanted = with_frozen(shapes.params, shapes.extra)
  if differences := trees.difference(found.params, wanted['text'], found_name='the weights', wanted_name='the run'):
    raise UserError(f'objective.text.weights: expected a text tower that fits this run, got {where}:\n{differences}')
  params = {f'text/{name}': leaf for name, leaf in _leaves(found.params).items()}
  if where == config.init_from:
    logits = {'logits/scale': np.log(found.scale), 'logits/bias': found.bias}
    params |= {name: np.asarray(x, np.float32) for name, x in logits.items() if name in trees.flatten(wanted)}
  return InitArrays(params, {f'{place}/{name}': leaf for place in COPIES for name, leaf in params.items()},
                    {'source': found.source, 'family': found.family, 'read': found.report.plain()})


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
  return {name: np.asarray(leaf) for name, leaf in trees.flatten(tree).items()}


def check_order(found: Weights, class_names: tuple[str, ...], data: schema.Data) -> None:
  """Checks that the outputs of the head are these classes, in their order.

  Weights that do not name their classes are refused unless the order of the data is known
  (`opening.is_order_known`).

  Args:
    found: weights with a head.
    class_names: of the data.
    data: the settings of the data.

  Raises:
    UserError: the classes differ, or nothing says in which order they are.
  """
  advice = 'Set --config.data.classes=FILE, with a line for each output, in their order, such as "n01440764 tench".'
  if not found.num_classes:
    raise UserError(f'{found.source}: expected weights with a head, got weights without one. Use weights that were '
                    'trained on classes.')
  if found.num_classes != len(class_names):
    raise UserError(f'{found.source}: expected the {len(class_names):,} classes of the data, got '
                    f'{found.num_classes:,}. {advice}')
  if not found.class_names and not opening.is_order_known(class_names, data):
    raise UserError(f'{found.source}: expected weights that name their classes, or data that say which class is which '
                    f'output, got neither: the classes of the data are sorted by name, '
                    f'{documents.listed(class_names, _SHOWN)}. {advice}')
  if not found.class_names:
    log.info('%s does not name its classes; they are in the order of the data: %s', found.source,
             documents.listed(class_names, _SHOWN))
  in_order = tuple(range(len(class_names)))
  if found.class_names and classes.match(class_names, found.class_names, where=found.source) != in_order:
    raise UserError(f'{found.source}: expected the classes in the order of the data, got another order. Set '
                    '--config.data.classes=FILE, with a line for each output, in their order.')


def _replaced(tree: PyTree, leaves: Mapping[str, np.ndarray]) -> PyTree:
  """Returns the tree with some arrays replaced, with their dtypes and shardings kept."""
  def place(name: str, old: jax.Array) -> jax.Array:
    new = leaves.get(name)
    if new is None:
      return old
    assert new.shape == old.shape, (name, new.shape, old.shape)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: new[index].astype(old.dtype))

  return trees.map_named(place, tree)


def _record(found: Weights, fitted: adapt.Adapted) -> dict[str, object]:
  return {'source': found.source, 'family': found.family, 'read': found.report.plain(),
          'fitted': fitted.report.plain()}


