"""The initial state of a run: random parameters, replaced by those of `config.init_from` where it is set."""
from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.data import opening
from vit_jax.data.labels import classes
from vit_jax.models import adapters
from vit_jax.objectives import kinds
from vit_jax.objectives.spec import Begin
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
  begins = kinds.begins_with(config)
  for name, begin in begins.items():
    if not begin.weights:
      raise UserError(f"objective.{name}.weights: expected {begin.required}, got ''. Set it to that of a trained "
                      'network.')
  named = {'init_from': config.init_from} if config.init_from else {}
  return named | {f'objective.{name}.weights': begin.weights for name, begin in begins.items()}


def given(config: schema.Config, program: Program, class_names: tuple[str, ...],
          found: Weights | None = None) -> dict[str, InitArrays]:
  """Returns the arrays that weights give to the state of step 0, by what they are for; nothing is on a device yet.

  Arguments and errors are those of `begin`.
  """
  named(config)
  arrays: dict[str, InitArrays] = {}
  if config.init_from:
    arrays['init_from'] = _from_weights(found or loading.load(config.init_from, view=config.init_view), config, program,
                                        class_names)
  for name, begin in kinds.begins_with(config).items():
    if begin.is_text:
      arrays[name] = _text_tower(name, begin, config, program)
    else:
      arrays[name] = _network(name, begin, config, program, class_names)
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


def _network(name: str, begin: Begin, config: schema.Config, program: Program,
             class_names: tuple[str, ...]) -> InitArrays:
  """Returns a network that the objective has beside the trained one, such as a teacher; it is part of `extra`. Raises
  UserError if the weights do not fit, or lack a head that the network has."""
  found = loading.load(begin.weights, view=begin.view, first=begin.first)
  log.info('%s: %s', name.capitalize(), loading.text(found))
  usual = found.preprocess.mean, found.preprocess.std
  for which, expected, given in zip(('mean', 'std'), usual, begin.normalization, strict=False):
    if not np.allclose(expected, given, atol=1e-3):
      log.warning('objective.%s.%s: expected %s, as for its weights, got %s', name, which, expected, tuple(given))
  extra = program.abstract_state.extra
  while begin.part not in extra:
    extra = extra['inner']
  wanted = extra[begin.part]
  adapted = [part for part in ('backbone', 'head') if part in wanted]
  if 'head' in adapted:
    check_order(found, class_names, config.data)
  else:  # the head of the weights has no use
    found = found._replace(params={part: tree for part, tree in found.params.items() if part != 'head'})
  others = wanted.keys() - {*adapted, 'state'}
  if missing := sorted(others - found.params.keys()):
    raise UserError(f'objective.{name}.weights: expected weights with {", ".join(missing)}, got {found.source}, which '
                    'has none. Use the run directory of a complete network.')
  own = found._replace(params={part: found.params[part] for part in adapted})
  setting = 'model' if begin.model is config.model else f'objective.{name}.model'
  like = {part: wanted[part] for part in adapted}
  fitted = adapt.adapt(own, Target(begin.model, begin.image_px, like, None, setting))
  network = {**fitted.params, **{part: found.params[part] for part in others}}
  network |= {'state': fitted.state} if 'state' in wanted else {}
  leaves = _leaves(network)
  return InitArrays({}, {f'{prefix}{begin.part}/{leaf_name}': leaf for prefix in WRAPPED
                         for leaf_name, leaf in leaves.items()}, _record(found, fitted))


def _text_tower(name: str, begin: Begin, config: schema.Config, program: Program) -> InitArrays:
  """Returns a trained text tower; with scale and bias of the logits, if both towers are of the same weights."""
  where = begin.weights
  from vit_jax.weights import text as texts  # only here: few runs have a text tower
  found = texts.load(where)
  log.info('%s', texts.describe(found))
  shapes = program.abstract_state
  wanted = with_frozen(shapes.params, shapes.extra)
  if differences := trees.difference(found.params, wanted[begin.part], found_name='the weights', wanted_name='the run'):
    raise UserError(f'objective.{name}.weights: expected a text tower that fits this run, got {where}:\n{differences}')
  params = {f'{begin.part}/{path}': leaf for path, leaf in _leaves(found.params).items()}
  if where == config.init_from:
    logits = {'logits/scale': np.log(found.scale), 'logits/bias': found.bias}
    params |= {path: np.asarray(x, np.float32) for path, x in logits.items() if path in trees.flatten(wanted)}
  return InitArrays(params, {f'{place}/{path}': leaf for place in COPIES for path, leaf in params.items()},
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


