"""Runs that begin with weights: what is taken, what starts anew, and that a resumed run does not read them again."""
from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import ClassVar

import jax
import numpy as np
import pytest
import single

from tests.weights import made
from vit_jax import main
from vit_jax.config import check, files, schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import checks
from vit_jax.core import trees
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, Extra, Key, Params
from vit_jax.jobs import build, report
from vit_jax.objectives import feature_distill, spec, supervised
from vit_jax.parallel import sharding
from vit_jax.weights import inherit, init_state, loading, saving
from vit_jax.weights.network import Weights

SIZE = {'depth': 1, 'width': 16, 'heads': 2, 'mlp.hidden': 16}
TINY = ['--config=digits', *(f'--config.model.{name}={value}' for name, value in SIZE.items()),
        '--config.batch_size=40', '--config.evals.test.batch_size=80', '--config.evals.test.every=50 steps',
        '--config.train.ema=.9']
NAMES = tuple(map(str, range(10)))


def config(**changes: object) -> schema.Config:
  found = files.load('digits', [word.removeprefix('--config.') for word in TINY[1:]])
  return dataclasses.replace(found, **changes)


def model(**changes: object) -> schema.ViT:
  return checks.replaced(config().model, changes)


def network(names: tuple[str, ...] = NAMES, **changes: object) -> Weights:
  how = made.HOW._replace(resize_px=0, image_px=config().image_px, mean=tuple(config().data.recipe.mean),
                          std=tuple(config().data.recipe.std))
  return made.network(model(**changes), num_classes=len(names), class_names=names, preprocess=how)


BUILT: dict[str, build.Parts] = {}


def begin(run: schema.Config, workdir: pathlib.Path, *,
          is_blank: bool = False) -> tuple[build.Parts, init_state.TrainState]:
  """Parts, made once for runs that differ in their weights alone, and the state they begin with.

  With `is_blank`, weights replace zeros instead of random arrays, whose program takes seconds to compile.
  """
  plain = dataclasses.replace(run, init_from='', init_view='')
  if repr(plain) not in BUILT:
    mesh, _ = build.open_mesh(run)
    BUILT[repr(plain)] = build.parts(plain, mesh=mesh, num_examples=1437, num_classes=10, in_memory=True)
  parts = BUILT[repr(plain)]
  program = parts.program if not is_blank else parts.program._replace(init_fn=lambda: jax.tree.map(
      lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), parts.program.abstract_state))
  return parts, init_state.begin(run, program, NAMES, workdir)


def assert_equal(a: object, b: object) -> None:
  one, two = trees.flatten(a), trees.flatten(b)
  assert one.keys() == two.keys()
  for name, leaf in one.items():
    np.testing.assert_array_equal(np.asarray(leaf), np.asarray(two[name]), err_msg=name)


@pytest.mark.parametrize('names', [NAMES, ('cat', 'dog')])
def test_parameters_and_their_average_are_those_of_the_file(names: tuple[str, ...], tmp_path: pathlib.Path) -> None:
  given = network(names)
  saving.save(given, str(tmp_path / 'a.npz'))
  parts, state = begin(config(init_from=str(tmp_path / 'a.npz')), tmp_path)
  assert_equal(state.params['backbone'], given.params['backbone'])
  assert_equal(state.extra['ema'], state.params)
  if names == NAMES:
    assert_equal(state.params['head'], given.params['head'])
  else:
    assert not np.any(state.params['head']['kernel'])
  fresh = parts.program.init_fn()
  assert_equal(jax.tree.map(np.shape, state), jax.tree.map(np.shape, fresh))
  assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True))
  told = json.loads((tmp_path / 'init.json').read_text())['init_from']
  fates = {line['what'] for line in told['fitted']['tensors']}
  assert fates == ({'taken'} if names == NAMES else {'taken', 'new', 'dropped'}) and told['source'].endswith('a.npz')


@pytest.mark.slow(reason='4 s: an EfficientNet is built')
def test_running_statistics_begin_as_those_of_the_file(tmp_path: pathlib.Path) -> None:
  small = schema.EfficientNet(width_factor=.25, depth_factor=.3)
  how = made.HOW._replace(resize_px=0, image_px=config().image_px)
  given = made.network(small, num_classes=len(NAMES), class_names=NAMES, preprocess=how)
  saving.save(given, str(tmp_path / 'net'), family='run')
  _, state = begin(config(model=small, init_from=str(tmp_path / 'net')), tmp_path, is_blank=True)
  assert_equal(state.params, given.params)
  assert_equal(state.extra['inner']['model_state'], given.state)


def test_without_weights_a_run_begins_as_it_did(tmp_path: pathlib.Path) -> None:
  parts, state = begin(config(), tmp_path)
  assert_equal(state, parts.program.init_fn())
  assert not (tmp_path / 'init.json').exists()


def test_the_teacher_of_distillation_is_its_file(tmp_path: pathlib.Path) -> None:
  teacher = network(depth=2)
  saving.save(teacher, str(tmp_path / 't.npz'))
  task = schema.Distill(teacher=schema.Teacher(weights=str(tmp_path / 't.npz'), model=teacher.model))
  _, state = begin(config(objective=task), tmp_path, is_blank=True)
  trained = state.extra['inner']['trained']
  assert_equal({name: trained[name] for name in ('backbone', 'head')}, teacher.params)
  assert 'teacher' in json.loads((tmp_path / 'init.json').read_text())
  with pytest.raises(UserError, match="objective.teacher.weights: expected a weight file, got ''"):
    begin(config(objective=schema.Distill(teacher=schema.Teacher(model=model()))), tmp_path)


@dataclasses.dataclass
class Coached(schema.Supervised):
  """Settings of an objective in a person's own file, with a second network beside the trained one."""
  implementation: ClassVar[str] = 'tests.weights.test_init_state:CoachedSpec'
  coach: schema.FeatureTeacher = dataclasses.field(default_factory=schema.FeatureTeacher)


class CoachedObjective(supervised.Supervised):
  coach: feature_distill.Trained

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = super().init(key, batch)
    return params, {**extra, sharding.TRAINED: self.coach.init(key, 1)}


class CoachedSpec(supervised.Spec):
  from_weights = ('coach.model', 'coach.mean', 'coach.std')

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> CoachedObjective:
    found = super().build(backbone, num_classes, lengths=lengths)
    found.__class__ = CoachedObjective
    found.coach = feature_distill.Trained(self.settings.coach, self.config.data.recipe, self.config.image_px, None)
    return found

  def begins_with(self) -> dict[str, spec.Begin]:
    coach = self.settings.coach
    return {'coach': spec.Begin(coach.weights, sharding.TRAINED, coach.model, self.config.image_px,
                                required='a weight file')}

  def settings_from(self, name: str, weights: spec.Loaded) -> dict[str, object]:
    p = weights.preprocess
    return {'coach.model': weights.model, 'coach.mean': tuple(p.mean), 'coach.std': tuple(p.std)}


def test_an_objective_of_ones_own_begins_with_a_network_from_a_file(tmp_path: pathlib.Path) -> None:
  coach = network(width=24, heads=3)
  saving.save(coach, str(tmp_path / 'coach.npz'))
  given = config(objective=Coached(coach=schema.FeatureTeacher(str(tmp_path / 'coach.npz'))))
  run = inherit.resolve(given, (), tmp_path / 'run').config
  assert run.objective.coach.model.width == 24
  with pytest.raises(UserError, match=r'objective.coach.model.width: expected 24, as in objective.coach.weights, got'):
    inherit.resolve(given, ('objective.coach.model.width',), tmp_path / 'run')
  _, state = begin(run, tmp_path, is_blank=True)
  assert_equal(state.extra['inner']['trained']['backbone'], coach.params['backbone'])
  assert 'coach' in json.loads((tmp_path / 'init.json').read_text())
  with pytest.raises(UserError, match="objective.coach.weights: expected a weight file, got ''. Set it to that of"):
    begin(config(objective=Coached()), tmp_path)


@pytest.mark.parametrize(('names', 'says'), [
    (NAMES[::-1], 'expected the classes in the order of the data, got another order'),
    (NAMES[:4], 'expected the 10 classes of the data, got 4'),
    ((), 'expected weights with a head, got weights without one')])
def test_a_head_of_other_classes_is_refused(names: tuple[str, ...], says: str) -> None:
  init_state.check_order(network(), NAMES, schema.Data())
  with pytest.raises(UserError, match=says):
    init_state.check_order(network(names), NAMES, schema.Data())


def train(workdir: pathlib.Path, *words: str) -> int:
  """Trains on one device, without a report at the end."""
  with single.one_device(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(report, 'write_report', lambda workdir: '')
    return main.run(['train', *TINY, f'--workdir={workdir}', *words])


@pytest.fixture(scope='module')
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run that began with a file, which is gone."""
  root = tmp_path_factory.mktemp('runs')
  saving.save(network(**{'positions.resize': schema.PositionResize.BICUBIC_OFFSET}), str(root / 'a.npz'))
  assert train(root / 'run', f'--config.init_from={root / "a.npz"}', '--config.length=3 steps') == 0
  (root / 'a.npz').unlink()
  return root / 'run'


@pytest.mark.slow(reason='10 s: two runs')
def test_a_resumed_run_does_not_read_its_weights_again(done: pathlib.Path) -> None:
  weights_file = done.parent / 'a.npz'
  assert not weights_file.exists()
  before = json.loads((done / 'config.json').read_text())
  assert before['model']['positions']['resize'] == 'bicubic_offset' and before['init_settings'] == 'config'
  (done / 'final.json').unlink()
  assert train(done, f'--config.init_from={weights_file}', '--config.length=3 steps') == 0
  assert json.loads((done / 'final.json').read_text())['step'] == 3
  assert json.loads((done / 'config.json').read_text())['model'] == before['model']


@pytest.mark.slow(reason='9 s: runs with two views')
def test_a_run_begins_with_the_view_of_another_that_it_names(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
  found = {view: loading.load(str(done), view=view) for view in ('student', 'ema')}
  assert loading.load(str(done)).report.notes[0].endswith('view ema')
  assert found['ema'].class_names == NAMES and found['ema'].preprocess.image_px == config().image_px
  for view, one in found.items():
    _, state = begin(config(init_from=str(done), init_view=view), tmp_path)
    assert_equal(state.params, one.params)
  student, ema = (jax.tree.leaves(found[view].params) for view in ('student', 'ema'))
  assert not any(np.array_equal(a, b) for a, b in zip(student, ema, strict=True))


@pytest.mark.slow(reason='6 s: a run')
def test_a_checkpoint_of_a_run_can_be_named_by_its_step(done: pathlib.Path) -> None:
  steps = sorted(int(p.name) for p in (done / 'checkpoints').iterdir() if p.name.isdigit())
  found = loading.load(str(done / 'checkpoints' / str(steps[0])))
  assert found.report.notes == (f'Run: step {steps[0]}, view ema',)


def test_positions_are_resized_as_the_config_says(tmp_path: pathlib.Path) -> None:
  given = network()
  saving.save(given, str(tmp_path / 'a.npz'))
  side = given.preprocess.image_px[0] * 2
  runs = [config(init_from=str(tmp_path / 'a.npz'), image_px=(side, side), model=model(**{'positions.resize': how}))
          for how in (schema.PositionResize.ALIGNED, schema.PositionResize.BICUBIC)]
  found = [begin(run, tmp_path, is_blank=True)[1] for run in runs]
  one, two = (np.asarray(state.params['backbone']['positions']) for state in found)
  assert one.shape == two.shape != given.params['backbone']['positions'].shape and not np.array_equal(one, two)


@pytest.mark.slow(reason='2 s: runs are built; tests/weights/test_adapt.py has what fits')
def test_weights_that_do_not_fit_are_a_message(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  saving.save(network(gelu=schema.Gelu.EXACT if model().gelu is schema.Gelu.TANH else schema.Gelu.TANH),
              str(tmp_path / 'a.npz'))
  words = [f'--config.init_from={tmp_path / "a.npz"}', '--config.length=1 steps',
           f'--config.model.gelu={model().gelu.value}']  # which decides over the weights
  assert train(tmp_path / 'run', *words) == 2
  assert 'model.gelu: expected exact, as in the weights, got tanh.' in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()  # nothing is left of a run that never began
  (tmp_path / 'own').mkdir()
  assert train(tmp_path / 'own', *words) == 2
  assert (tmp_path / 'own').exists()  # a folder that was there stays


@pytest.mark.slow(reason='2 s: runs are built')
def test_an_initial_view_without_weights_is_refused() -> None:
  with pytest.raises(UserError, match="init_view: expected '' without init_from, got 'ema'."):
    check.check(config(init_view='ema'))
