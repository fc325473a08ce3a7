"""Objectives in the train job: label maps are made and used, a teacher is loaded, weights are reused, alarms raised."""
from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.data.image import transform as transforms
from vit_jax.data.labels import label_maps
from vit_jax.data.source import Record
from vit_jax.data.sources import builtin
from vit_jax.jobs import build, teacher_labels, train
from vit_jax.objectives import kinds
from vit_jax.record import writer
from vit_jax.weights import loading

pytestmark = pytest.mark.xdist_group('test_objectives')  # in one worker, for what the tests share

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=16, pool=schema.Pool.MEAN)
CROPS = schema.Recipe(flip=False, views=schema.Views(on=True, num_local=1, local_px=8), eval_resize_px=16)
STILL = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)


def config(objective: schema.Objective, steps: int = 2, lr: float = 1e-2, **changes: Any) -> schema.Config:
  recipe = CROPS if isinstance(objective, schema.Dino) else STILL
  found = schema.Config(
      name='tiny', length=f'{steps} steps', batch_size=40, image_px=(16, 16), model=MODEL, objective=objective,
      data=schema.Data(source='digits', recipe=recipe), optimizer=schema.AdamW(lr=lr, weight_decay=0.),
      train=schema.Train(log_every='1 steps', progress=False), checkpoints=schema.Checkpoints(every='100 %'))
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
  workdir = tmp_path_factory.mktemp('runs') / 'teacher'
  assert train.run(config(schema.Supervised()), workdir) == 0
  return workdir


def test_label_maps_are_what_the_teacher_says_of_each_patch_and_train_a_student(
    teacher: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  task = schema.TokenLabel(top=2, map_grid=(4, 4))
  maps = tmp_path / 'maps'
  assert teacher_labels.run(config(task, batch_size=256), str(teacher), maps) == 0
  assert f'--config.objective.maps={maps} --config.objective.map_grid=4,4' in capsys.readouterr().out
  source = builtin.open_digits('train')
  stored = label_maps.LabelMaps(maps)
  assert stored.info.num_examples == len(source) == 1437 and stored.info.digest == source.digest
  classes, scores = stored.read(np.array([1436, 3]))
  assert classes.shape == (2, 16, 2) and classes.max() < 10 and (scores[..., 0] >= scores[..., 1]).all()
  found = loading.load(str(teacher))
  _check_against(found, source[3].image, classes[1], scores[1])
  with pytest.raises(UserError, match="objective.maps: expected a directory of label maps, got ''"):
    train.run(config(task), tmp_path / 'none')
  with pytest.raises(UserError, match=r'expected label maps with top 3, got 2\.'):
    train.run(config(dataclasses.replace(task, maps=str(maps), top=3)), tmp_path / 'wrong')
  with pytest.raises(UserError, match=r'expected label maps with scores logits, got probabilities\.'):
    info = json.loads((maps / label_maps.INFO).read_text())
    (maps / label_maps.INFO).write_text(json.dumps(info | {'scores': 'probabilities'}))
    train.run(config(dataclasses.replace(task, maps=str(maps))), tmp_path / 'old')
  (maps / label_maps.INFO).write_text(json.dumps(info))
  assert train.run(config(dataclasses.replace(task, maps=str(maps))), tmp_path / 'student') == 0
  rows = [row for row in writer.read(tmp_path / 'student').rows if 'train/dense_loss' in row]
  assert len(rows) == 2 and all(np.isfinite(row['train/dense_loss']) for row in rows)


def _check_against(found: loading.Weights, image: Any, classes: np.ndarray, scores: np.ndarray) -> None:
  """Patch by patch, from the network's tokens."""
  example = transforms.eval_transform(STILL, (16, 16))(Record(image, 0))
  tokens = build.build_backbone(config(schema.Supervised())).apply(
      found.params['backbone'], {}, example['image'][None].astype(np.float32) / 127.5 - 1, train=False,
      key=None)[0].tokens[0]
  logits = np.asarray(tokens, np.float64) @ found.params['head']['kernel'] + found.params['head']['bias']
  best = np.argsort(-logits, -1)[:, :2]
  np.testing.assert_array_equal(classes, best)
  np.testing.assert_allclose(scores, np.take_along_axis(logits, best, -1), rtol=1e-3, atol=1e-3)  # f16 on disk


def test_a_student_begins_with_its_teacher_and_never_changes_it(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  taught = schema.Distill(schema.Teacher(model=MODEL))
  with pytest.raises(UserError, match="objective.teacher.weights: expected a weight file, got ''"):
    train.run(config(taught), tmp_path / 'none')
  taught = schema.Distill(schema.Teacher(str(teacher), model=MODEL))
  assert train.run(config(taught, model=schema.ViT(**{**vars(MODEL), 'width': 8})), tmp_path / 'student') == 0
  saved = _extra(tmp_path / 'student')
  want = params(teacher)
  assert {name for name in want if name.startswith(('backbone', 'head'))} == {
      name.removeprefix('trained/') for name in saved}
  for name, leaf in saved.items():
    np.testing.assert_array_equal(leaf, want[name.removeprefix('trained/')])
  rows = [row for row in writer.read(tmp_path / 'student').rows if 'train/agreement' in row]
  assert len(rows) == 2 and len({row['train/labels_loss'] for row in rows}) == 2


def _extra(run: pathlib.Path) -> dict[str, np.ndarray]:
  step = max(int(p.name) for p in (run / 'checkpoints').iterdir())
  return {name: np.asarray(x) for name, x in trees.flatten(
      ocp.StandardCheckpointer().restore((run / 'checkpoints' / str(step) / 'extra').absolute())).items()}


def test_what_was_learned_without_labels_is_handed_on_by_one_line(tmp_path: pathlib.Path) -> None:
  for name, objective, view in (('mae', schema.Mae(decoder_width=8, decoder_depth=1, decoder_heads=2), 'student'),
                                ('dino', schema.Dino(out_dim=8, hidden_dim=8, bottleneck_dim=4), 'teacher')):
    assert train.run(config(objective), tmp_path / name) == 0
    tuned = config(schema.Supervised(), lr=0., init_from=str(tmp_path / name), init_view=view)
    assert train.run(tuned, tmp_path / f'{name}_tuned') == 0
    before, after = params(tmp_path / name, view), params(tmp_path / f'{name}_tuned')
    backbone = [key for key in after if key.startswith('backbone/')]
    assert len(backbone) > 10
    for key in backbone:
      np.testing.assert_array_equal(after[key], before[key])
  student = params(tmp_path / 'dino', 'student')
  assert any((student[key] != before[key]).any() for key in backbone)


def test_a_collapse_is_heard_and_can_end_the_run(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  hot = schema.Ramp(5., 5.)
  collapsed = schema.Dino(out_dim=8, hidden_dim=8, bottleneck_dim=4, centering=schema.Centering.NONE,
                          teacher_temperature=hot,
                          collapse=schema.Collapse(patience='3 steps', after='15 steps'))
  assert train.run(config(collapsed, steps=40), tmp_path / 'heard') == 0
  assert 'ALARM at step 18: train/information=' in caplog.text and 'Try a lower objective.teacher_temp' in caplog.text
  alarms = [e for e in writer.read(tmp_path / 'heard').events if e['event'] == 'alarm']
  assert [e['step'] for e in alarms] == [18] and alarms[0]['value'] < .05
  rows = [row for row in writer.read(tmp_path / 'heard').rows if 'train/kl' in row]
  assert abs(rows[-1]['train/below_uniform']) < .05 and rows[-1]['train/teacher_entropy'] > .99 * np.log(8)
  stops = dataclasses.replace(collapsed.collapse, action=schema.OnCollapse.STOP)
  with pytest.raises(UserError, match=r'ALARM at step 18'):
    train.run(config(dataclasses.replace(collapsed, collapse=stops), steps=40), tmp_path / 'stopped')
  # The same with the usual temperature and centring, and a rate that they can follow: no alarm.
  well = dataclasses.replace(collapsed, centering=schema.Centering.MEAN, teacher_temperature=schema.Ramp(.04, .04))
  assert train.run(config(well, steps=40, lr=1e-3), tmp_path / 'well') == 0
  record = writer.read(tmp_path / 'well')
  assert 'alarm' not in {e['event'] for e in record.events}
  assert min(row['train/information'] for row in record.rows if 'train/information' in row) > .1


def test_other_configs_and_teachers_are_no_use_for_label_maps(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='objective: expected TokenLabel, got Supervised'):
    teacher_labels.run(config(schema.Supervised()), str(teacher), tmp_path / 'maps')
