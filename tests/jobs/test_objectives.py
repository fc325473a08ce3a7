"""Objectives in the train job: label maps are made and used, a teacher is loaded, weights are reused, alarms raised."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any

import begun
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.config import durations, engine, schema
from vit_jax.core import trees
from vit_jax.core.contracts import Watch
from vit_jax.core.errors import UserError
from vit_jax.data import answers, opening
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record, read_one
from vit_jax.jobs import build, teacher_labels, train
from vit_jax.objectives import dinov2_distill, kinds
from vit_jax.record import reader
from vit_jax.weights import loading
from vit_jax.weights.network import Weights

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16), pool=schema.Mean())
CROPS = schema.Recipe(flip=False, views=schema.Views(on=True, num_local=1, local_px=8), eval_resize_px=16)
STILL = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)


def config(objective: schema.Objective, steps: int = 2, lr: float = 1e-2, **changes: Any) -> schema.Config:
  recipe = CROPS if isinstance(objective, schema.Dino) else STILL
  found = schema.Config(
      name='tiny', length=f'{steps} steps', batch_size=40, image_px=(16, 16), model=MODEL, objective=objective,
      data=schema.Data(source='digits', train_split='train[:137]', recipe=recipe),
      optimizer=schema.AdamW(lr=lr, weight_decay=0.), train=schema.Train(log_every='1 steps', progress=False),
      checkpoints=schema.Checkpoints(every='100 %'))
  return dataclasses.replace(found, **changes)


def test_a_teacher_is_among_the_networks_of_a_run_by_its_place_in_the_config() -> None:
  distil = schema.Distill(teacher=schema.Teacher(model=schema.ViT(width=32)))
  assert kinds.of(config(distil)).models() == {'model': MODEL, 'objective.teacher.model': schema.ViT(width=32)}
  assert kinds.of(config(schema.Supervised())).models() == {'model': MODEL}


def params(run: pathlib.Path, view: str = 'student') -> dict[str, np.ndarray]:
  return trees.flatten(loading.load(str(run), view=view).params)


@pytest.fixture(scope='module')
def teacher(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A supervised run."""
  return begun.write(config(schema.Supervised()), tmp_path_factory.mktemp('runs') / 'teacher')


TASK = schema.TokenLabel(top=2, map_grid=(4, 4))


@pytest.fixture(scope='module')
def maps(teacher: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Label maps by the teacher."""
  folder = tmp_path_factory.mktemp('made') / 'maps'
  assert teacher_labels.run(config(TASK, batch_size=60), str(teacher), folder) == 0
  return folder


@pytest.mark.slow(reason='5 s: a teacher is built and asked')
def test_label_maps_are_what_the_teacher_says_of_each_patch(teacher: pathlib.Path, maps: pathlib.Path) -> None:
  source = opening.open_split(schema.Data(source='digits'), 'train[:137]', image_px=(16, 16))
  stored = answers.Answers(maps)
  assert stored.info.num_examples == len(source) == 137 and stored.info.digest == source.digest
  classes, scores = stored.read(np.array([136, 3]))
  assert classes.shape == (2, 16, 2) and classes.max() < 10 and (scores[..., 0] >= scores[..., 1]).all()
  _check_against(loading.load(str(teacher)), read_one(source, 3).image, classes[1], scores[1])


@pytest.mark.slow(reason='1 s, with the maps')
def test_other_label_maps_than_the_config_says_are_refused(maps: pathlib.Path, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match="objective.maps: expected a directory of label maps, got ''"):
    train.run(config(TASK), tmp_path / 'none')
  with pytest.raises(UserError, match=r'expected label maps with top 3, got 2\.'):
    train.run(config(dataclasses.replace(TASK, maps=str(maps), top=3)), tmp_path / 'wrong')
  old = shutil.copytree(maps, tmp_path / 'old_maps')
  info = json.loads((old / answers.INFO).read_text())
  (old / answers.INFO).write_text(json.dumps(info | {'scores': 'probabilities'}))
  with pytest.raises(UserError, match=r'expected label maps with scores logits, got probabilities\.'):
    train.run(config(dataclasses.replace(TASK, maps=str(old))), tmp_path / 'old')


@pytest.mark.slow(reason='4 s: traces a run; tests/data/test_token_targets.py has the targets')
def test_a_student_is_given_the_label_maps_of_its_images(maps: pathlib.Path, tmp_path: pathlib.Path) -> None:
  run = train.Run(config(dataclasses.replace(TASK, maps=str(maps))), tmp_path, time.monotonic())
  batch = next(iter(run.loader.batches(0)))
  classes, scores = answers.Answers(maps).read(batch['index'])
  np.testing.assert_array_equal(batch['token_labels'], classes)
  np.testing.assert_array_equal(batch['token_scores'], scores)
  _, metrics = jax.eval_shape(run.parts.program.step_fn, run.parts.program.abstract_state, batch)
  zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), metrics)
  assert 'dense_loss' in zeros.unpack().means
  run.loader.close()


@pytest.mark.slow(reason='10 s: compiles a train step')
def test_label_maps_train_a_student(maps: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert train.run(config(dataclasses.replace(TASK, maps=str(maps))), tmp_path / 'student') == 0
  rows = [row for row in reader.read(tmp_path / 'student').rows if 'train/dense_loss' in row]
  assert len(rows) == 2 and all(np.isfinite(row['train/dense_loss']) for row in rows)


def _check_against(found: Weights, image: Any, classes: np.ndarray, scores: np.ndarray) -> None:
  """Patch by patch, from the network's tokens."""
  example = transforms.eval_transform(STILL, (16, 16))(Record(image, (0,)))
  tokens = build.build_backbone(config(schema.Supervised())).apply(
      found.params['backbone'], {}, example['image'][None].astype(np.float32) / 127.5 - 1, train=False,
      key=None)[0].tokens[0]
  logits = np.asarray(tokens, np.float64) @ found.params['head']['kernel'] + found.params['head']['bias']
  best = np.argsort(-logits, -1)[:, :2]
  np.testing.assert_array_equal(classes, best)
  np.testing.assert_allclose(scores, np.take_along_axis(logits, best, -1), rtol=1e-3, atol=1e-3)  # f16 on disk


@pytest.mark.slow(reason='9 s: compiles a train step; tests/objectives/test_distill.py has the teacher')
def test_a_student_begins_with_its_teacher_never_changes_it_and_its_alarms_are_heard(
    teacher: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  taught = schema.Distill(schema.Teacher(model=MODEL))
  with pytest.raises(UserError, match="objective.teacher.weights: expected a weight file, got ''"):
    train.run(config(taught), tmp_path / 'none')
  taught = schema.Distill(schema.Teacher(str(teacher), model=MODEL))
  watch = Watch('agreement', 2., 'some.setting', lasting=1, after=1, stops=False, advice='Be glad')
  monkeypatch.setattr(type(kinds.of(config(taught))), 'watches', lambda self, lengths: [watch])
  assert train.run(config(taught, model=schema.ViT(**{**vars(MODEL), 'width': 8})), tmp_path / 'student') == 0
  saved = _extra(tmp_path / 'student')
  want = params(teacher)
  assert {name for name in want if name.startswith(('backbone', 'head'))} == {
      name.removeprefix('trained/') for name in saved}
  for name, leaf in saved.items():
    np.testing.assert_array_equal(leaf, want[name.removeprefix('trained/')])
  record = reader.read(tmp_path / 'student')
  rows = [row for row in record.rows if 'train/agreement' in row]
  assert len(rows) == 2 and len({row['train/labels_loss'] for row in rows}) == 2
  assert [(e['step'], e['below']) for e in record.events if e['event'] == 'alarm'] == [(2, 2.)]


@pytest.mark.slow(reason='4 s: compiles a train step; tests/evaluate/test_health.py has the alarm of an evaluation')
def test_features_of_low_rank_raise_an_alarm(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  health = schema.Health(every='1 steps', images=20, min_rank=1e6, batch_size=20)
  assert train.run(config(MAE, evals={'health': health}), tmp_path / 'low') == 0
  record = reader.read(tmp_path / 'low')
  assert len([row for row in record.rows if 'health/rank_me' in row and 'health/alignment' in row]) == 2
  assert [(e['step'], e['metric'], e['below']) for e in record.events if e['event'] == 'alarm'] == [
      (1, 'health/rank_me', 1e6), (2, 'health/rank_me', 1e6)]
  assert 'is below evals.health.min_rank=1e+06' in caplog.text


def _extra(run: pathlib.Path) -> dict[str, np.ndarray]:
  step = max(int(p.name) for p in (run / 'checkpoints').iterdir())
  return {name: np.asarray(x) for name, x in trees.flatten(
      ocp.StandardCheckpointer().restore((run / 'checkpoints' / str(step) / 'extra').absolute())).items()}


MAE = schema.Mae(decoder_width=8, decoder_depth=1, decoder_heads=2)
DINO = schema.Dino(out_dim=8, hidden_dim=8, bottleneck_dim=4)


@pytest.mark.slow(reason='5 s each: two runs are built; tests/weights/test_init_state.py has what a run begins with')
@pytest.mark.parametrize(('objective', 'view'), [(MAE, 'student'), (DINO, 'teacher')])
def test_what_was_learned_without_labels_is_handed_on_by_one_line(
    objective: schema.Objective, view: str, tmp_path: pathlib.Path) -> None:
  before = params(begun.write(config(objective), tmp_path / 'before'), view)
  tuned = config(schema.Supervised(), lr=0., init_from=str(tmp_path / 'before'), init_view=view)
  run = train.Run(tuned, tmp_path / 'tuned', time.monotonic())
  state, step = run._restore_or_initialize()
  run.loader.close()
  after = trees.flatten(state.params)
  backbone = [key for key in after if key.startswith('backbone/')]
  assert len(backbone) > 10 and step == 0
  for key in backbone:
    np.testing.assert_array_equal(after[key], before[key])
  if view == 'teacher':
    student = params(tmp_path / 'before', 'student')
    assert any((student[key] != before[key]).any() for key in backbone)


DINOV3 = schema.Dinov3(out_dim=8, hidden_dim=8, bottleneck_dim=4, group=4, patch_out_dim=6, patch_bottleneck_dim=4)


@pytest.mark.slow(reason='7 s: three runs are built')
def test_a_gram_teacher_begins_with_the_weights_of_a_run_or_of_init_from(tmp_path: pathlib.Path) -> None:
  """Other runs, of networks with other heads, give their teacher alone; the student begins as `init_from` says."""
  before, other = (begun.write(config(objective, seed=seed), tmp_path / name) for objective, seed, name in (
      (DINOV3, 0, 'before'), (DINO, 1, 'other')))
  gram = schema.Gram(weights=str(other), step='1 steps')  # of a run with a teacher that one; step is not read
  for given, want in ((gram, params(other, 'teacher')), (schema.Gram(), params(before, 'student'))):
    run = train.Run(config(dataclasses.replace(DINOV3, gram=given), init_from=str(before)),
                    tmp_path / f'run{bool(given.weights)}', time.monotonic())
    state, _ = run._restore_or_initialize()
    run.loader.close()
    begins, fixed, old = (trees.flatten(tree) for tree in (state.params, state.extra['gram'], params(before)))
    assert {name for name in want if name.startswith('backbone')} == fixed.keys() and len(fixed) > 10
    assert all((leaf == want[name]).all() for name, leaf in fixed.items())
    assert begins.keys() == old.keys() and all((leaf == old[name]).all() for name, leaf in begins.items())
  with pytest.raises(UserError, match='expected'):
    train.Run(config(dataclasses.replace(DINOV3, gram=schema.Gram(weights=str(tmp_path / 'none')))),
              tmp_path / 'wrong', time.monotonic())._restore_or_initialize()


@pytest.mark.slow(reason='6 s: runs are built, and one trains')
def test_a_run_with_heads_teaches_another_network_which_takes_the_sizes_of_its_heads(tmp_path: pathlib.Path) -> None:
  heads = dataclasses.replace(DINOV3, norm_last_layer=False, hidden_dim=12)
  before = begun.write(config(heads), tmp_path / 'before')
  teacher = schema.FeatureTeacher(str(before), px=16)
  given = config(schema.Dinov2Distill(group=4, teacher=teacher), model=schema.ViT(**{**vars(MODEL), 'width': 8}))
  assert train.run(given, tmp_path / 'run') == 0
  found = engine.read_file(tmp_path / 'run' / 'config.json').objective
  assert isinstance(found, schema.Dinov2Distill) and isinstance(found.teacher.model, schema.ViT)
  for name in dinov2_distill.HEAD_SIZES:
    assert getattr(found, name) == getattr(heads, name), name
  assert found.teacher.model.width == MODEL.width and not found.norm_last_layer
  want, extra = params(before, 'teacher'), _extra(tmp_path / 'run')
  trained = {name.removeprefix('trained/'): leaf for name, leaf in extra.items() if name.startswith('trained/')}
  assert trained.keys() == {name for name in want if name != 'mask_token'}
  assert all((leaf == want[name]).all() for name, leaf in trained.items())
  assert 'projector/mlp1/kernel' in params(tmp_path / 'run', 'teacher')
  alone = begun.write(config(MAE), tmp_path / 'alone')
  with pytest.raises(UserError, match='objective.teacher.weights: expected a run of DINOv2, whose heads teach, got'):
    train.run(config(schema.Dinov2Distill(group=4, teacher=schema.FeatureTeacher(str(alone)))), tmp_path / 'wrong')


@pytest.mark.slow(reason='4 s: two runs are built')
def test_a_separate_head_of_patches_may_be_new_or_of_no_use(tmp_path: pathlib.Path) -> None:
  pairs = {'new': (DINO, DINOV3), 'unused': (DINOV3, schema.Supervised())}
  for name, (first, then) in pairs.items():
    run = train.Run(config(then, init_from=str(begun.write(config(first), tmp_path / name))), tmp_path / f'then {name}',
                    time.monotonic())
    state, _ = run._restore_or_initialize()
    run.loader.close()
    assert ('patch_projector' in state.params) == (name == 'new')


@pytest.mark.slow(reason='10 s: compiles a train step')
def test_a_run_ends_with_what_it_began_with_where_it_learns_nothing(tmp_path: pathlib.Path) -> None:
  before = params(begun.write(config(MAE), tmp_path / 'before'))
  assert train.run(config(schema.Supervised(), lr=0., init_from=str(tmp_path / 'before')), tmp_path / 'tuned') == 0
  for key, leaf in params(tmp_path / 'tuned').items():
    if key.startswith('backbone/'):
      np.testing.assert_array_equal(leaf, before[key])


def collapsed(**changes: Any) -> schema.Dino:
  """A task whose outputs soon hold nothing."""
  return dataclasses.replace(DINO, centering=schema.Centering.NONE, teacher_temperature=schema.Ramp(5., 5.),
                             collapse=schema.Collapse(patience='3 steps', after='15 steps', **changes))


def test_a_collapse_is_watched_for_as_the_config_says() -> None:
  lengths = durations.Lengths(num_examples=137, batch_size=40, total_steps=40)
  [watch] = kinds.of(config(collapsed())).watches(lengths)
  assert watch[:6] == ('information', .05, 'objective.collapse.threshold', 3, 15, False)
  [watch] = kinds.of(config(collapsed(action=schema.OnCollapse.STOP, threshold=.5))).watches(lengths)
  assert watch.stops and watch.below == .5 and 'objective.teacher_temp' in watch.advice


@pytest.mark.slow(reason='30 s: three runs of 40 steps with three views')
def test_a_collapse_is_heard_and_can_end_the_run(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  assert train.run(config(collapsed(), steps=40), tmp_path / 'heard') == 0
  assert 'ALARM at step 18: train/information=' in caplog.text and 'Try a lower objective.teacher_temp' in caplog.text
  alarms = [e for e in reader.read(tmp_path / 'heard').events if e['event'] == 'alarm']
  assert [e['step'] for e in alarms] == [18] and alarms[0]['value'] < .05
  rows = [row for row in reader.read(tmp_path / 'heard').rows if 'train/kl' in row]
  assert abs(rows[-1]['train/below_uniform']) < .05 and rows[-1]['train/teacher_entropy'] > .99 * np.log(8)
  with pytest.raises(UserError, match=r'ALARM at step 18'):
    train.run(config(collapsed(action=schema.OnCollapse.STOP), steps=40), tmp_path / 'stopped')
  # The same with the usual temperature and centering, and a rate that they can follow: no alarm.
  well = dataclasses.replace(collapsed(), centering=schema.Centering.MEAN, teacher_temperature=schema.Ramp(.04, .04))
  usual = config(well, steps=40, lr=1e-3)
  usual.data.train_split = 'train'  # on a tenth of the images there is less to tell apart
  assert train.run(usual, tmp_path / 'well') == 0
  record = reader.read(tmp_path / 'well')
  assert 'alarm' not in {e['event'] for e in record.events}
  assert min(row['train/information'] for row in record.rows if 'train/information' in row) > .1


@pytest.mark.slow(reason='5 s, with the teacher')
def test_other_configs_and_teachers_are_no_use_for_label_maps(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected TokenLabel, .*, got Supervised. Name a config .*prepare --data='):
    teacher_labels.run(config(schema.Supervised()), str(teacher), tmp_path / 'maps')
