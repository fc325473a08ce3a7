"""A round of Noisy Student through the main job: a teacher labels, is stopped, goes on, and a student learns."""
from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import types

import begun
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend as extend_backend

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import answers, loader, opening
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import read_one
from vit_jax.jobs import teacher_labels, train
from vit_jax.recipes import noisy_student
from vit_jax.record import progress, reader
from vit_jax.weights import inference, loading

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16), pool=schema.Mean())
CONFIG = schema.Config(
    name='tiny', length='2 steps', batch_size=40, image_px=(16, 16), model=MODEL,
    data=schema.Data(source='digits', train_split='train[:137]',
                     recipe=schema.Recipe(crop=schema.Crop.RESIZE, flip=False, mixup=.2)),
    optimizer=schema.AdamW(lr=1e-2, weight_decay=0.), train=schema.Train(log_every='1 steps', progress=False),
    checkpoints=schema.Checkpoints(every='100 %'))
UNLABELED = schema.Pseudo(source='digits', split='test', top=4, threshold=.1, per_class=30, share=.6)
"""360 pictures."""


@pytest.fixture(scope='module')
def teacher(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return begun.write(CONFIG, tmp_path_factory.mktemp('runs') / 'teacher')


def student(teacher: pathlib.Path) -> schema.Config:
  return noisy_student.taught(CONFIG, str(teacher), UNLABELED, 1)


@pytest.mark.slow(reason='9 s: two programs; tests/data/test_pseudo.py has what a student reads')
def test_a_round_is_stopped_goes_on_and_ends_in_a_student(
    teacher: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(teacher_labels, '_IMAGES_PER_PART_OF_LABELS', 80)
  update, seen = progress.Progress.update, []

  def stop_at(self: progress.Progress, done: int, values: dict[str, float]) -> None:
    seen.append(done)
    if seen == [40, 80, 120, 160, 200]:  # of the first start
      os.kill(os.getpid(), signal.SIGTERM)
    update(self, done, values)

  monkeypatch.setattr(progress.Progress, 'update', stop_at)
  config = student(teacher)
  labels = pathlib.Path(config.data.pseudo.labels)
  assert labels == teacher / 'pseudo_1'
  assert train.run(config, tmp_path / 'student') == 75
  assert 'Stopped by SIGTERM while the teacher labels images' in capsys.readouterr().out
  assert seen == [40, 80, 120, 160, 200] and not labels.exists()
  assert sorted(p.name for p in labels.parent.glob('pseudo_1.*.part/scores*.npy')) == [
      'scores-00000.npy', 'scores-00001.npy']
  seen.clear()
  assert train.run(config, tmp_path / 'student') == 0
  assert seen[:5] == [200, 240, 280, 320, 360]
  check_labels(teacher, labels)
  rows = reader.read(tmp_path / 'student').rows
  assert [row['step'] for row in rows if 'train/loss' in row] == [1, 2]
  seen.clear()
  assert not teacher_labels.ensure(dataclasses.replace(config, length='3 steps'))
  assert not seen  # nothing is labeled twice


def test_a_folder_with_other_content_is_named_by_its_setting(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(UserError, match=f'^data.pseudo.labels={tmp_path}: expected a new folder, got one with other con'):
    teacher_labels.ensure(with_pseudo(student(teacher), labels=str(tmp_path)))


def with_pseudo(config: schema.Config, **changes: object) -> schema.Config:
  pseudo = dataclasses.replace(config.data.pseudo, **changes)
  return dataclasses.replace(config, data=dataclasses.replace(config.data, pseudo=pseudo))


def signal_at(position: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
  """The process gets SIGTERM at a position; returns the list of the positions and rates that the progress bar gets."""
  update, seen = progress.Progress.update, list[tuple[int, float]]()

  def signal_and_update(self: progress.Progress, done: int, values: dict[str, float]) -> None:
    if done == position and position not in dict(seen):
      os.kill(os.getpid(), signal.SIGTERM)
    seen.append((done, values['train/images_per_s']))
    update(self, done, values)

  monkeypatch.setattr(progress.Progress, 'update', signal_and_update)
  return seen


def test_a_teacher_of_fewer_classes_than_top_labels_images_once(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  config = with_pseudo(student(teacher), labels=str(tmp_path / 'labels'), top=13)
  assert not teacher_labels.ensure(config) and not teacher_labels.ensure(config)
  classes, scores = answers.Answers(tmp_path / 'labels').read(np.arange(360))
  assert (np.sort(classes[:, 0, :10]) == np.arange(10)).all() and not scores[:, 0, 10:].any()
  np.testing.assert_allclose(scores.sum(-1), 1, atol=2e-3)
  with pytest.raises(UserError, match='^data.pseudo.top: expected at most 1,000 classes of an answer, got 1,001. Set'):
    teacher_labels.ensure(with_pseudo(config, labels=str(tmp_path / 'more'), top=1_001))


def test_a_signal_after_the_last_image_stops_the_run(teacher: pathlib.Path, tmp_path: pathlib.Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
  signal_at(360, monkeypatch)
  config = with_pseudo(student(teacher), labels=str(tmp_path / 'labels'))
  assert teacher_labels.ensure(config) == 'SIGTERM' and teacher_labels.ensure(config) == ''


def test_a_stop_closes_the_loader_and_the_rate_is_that_of_the_current_start(
    teacher: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(teacher_labels, '_IMAGES_PER_PART_OF_LABELS', 80)
  closed, close, ticks = [], loader.EvalLoader.close, iter(range(1_000))

  def close_and_count(self: loader.EvalLoader) -> None:
    closed.append(self)
    close(self)

  monkeypatch.setattr(loader.EvalLoader, 'close', close_and_count)
  monkeypatch.setattr(teacher_labels, 'time', types.SimpleNamespace(monotonic=lambda: next(ticks)))
  seen = signal_at(160, monkeypatch)
  config = with_pseudo(student(teacher), labels=str(tmp_path / 'labels'))
  assert teacher_labels.ensure(config) == 'SIGTERM'
  assert seen == [(40, 40), (80, 40), (120, 40), (160, 40)] and len(closed) == 3  # stops in the third part
  seen.clear()
  ticks = iter(range(1_000))
  assert teacher_labels.ensure(config) == ''
  assert seen == [(200, 40), (240, 40), (280, 40), (320, 40), (360, 40)]


def test_a_run_whose_batch_is_smaller_than_the_number_of_devices_has_its_images_labeled(
    teacher: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  devices = extend_backend.get_backend().devices()
  assert len(devices) == 8
  for name in ('devices', 'local_devices'):
    monkeypatch.setattr(jax, name, lambda *_, **__: devices)
  for name in ('device_count', 'local_device_count'):
    monkeypatch.setattr(jax, name, lambda *_, **__: 8)
  config = with_pseudo(student(teacher), labels=str(tmp_path / 'labels'))
  config = dataclasses.replace(config, batch_size=4, mesh=schema.Mesh(data=1, fsdp=1, tensor=8))
  assert not teacher_labels.ensure(config)
  assert answers.Answers(tmp_path / 'labels').read_most_likely()[1].all()
  with pytest.raises(UserError, match='^batch_size: expected a multiple of 8 batch shards .*, got 12. Set it to'):
    teacher_labels.ensure(with_pseudo(dataclasses.replace(config, batch_size=12, mesh=schema.Mesh()), labels='new'))


def check_labels(teacher: pathlib.Path, labels: pathlib.Path) -> None:
  """The labels are the teacher's own answers to whole pictures, computed one after the other."""
  found, maps = loading.load(str(teacher)), answers.Answers(labels)
  source = opening.open_split(schema.Data(source='digits'), 'test', image_px=(16, 16))
  fit = transforms.eval_transform(inference.eval_recipe(found), (16, 16))
  for place in (0, 79, 80, 359):
    image = (np.asarray(fit(read_one(source, place))['image'], np.float32) / 255 - .5) / .5
    logits = inference.function(found)(inference.parameters(found), jnp.asarray(image)[None]).logits
    assert logits is not None
    odds = np.exp(np.asarray(logits, np.float64)[0])
    classes, scores = maps.read(np.array([place]))
    order = np.argsort(-odds)[:4]
    np.testing.assert_allclose(scores[0, 0], odds[order] / odds.sum(), atol=2e-3)
    np.testing.assert_allclose(odds[classes[0, 0]], odds[order], rtol=1e-3)


def test_several_processes_share_the_parts(tmp_path: pathlib.Path) -> None:
  info = answers.Info('some', 'abc', 11, (1, 1), 2, 11, 2, {'teacher': 't'}, answers.PROBABILITIES)
  asked: dict[int, list[int]] = {0: [], 1: [], 2: []}
  places: list[str] = []

  def compute(process: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
    asked[process].append(rows.start)
    return np.full((len(rows), 1, 1, 2), rows.start), np.ones((len(rows), 1, 1, 2))

  def meet(place: str) -> None:
    places.append(place)
    if place == 'label maps begun':  # the others do their parts before this one goes on
      for process in (1, 2):
        answers.write(tmp_path / 'maps', info, lambda rows: compute(process, rows), setting='--to',  # noqa: B023
                      process=(process, 3))

  assert answers.write(tmp_path / 'maps', info, lambda rows: compute(0, rows), setting='--to', process=(0, 3),
                       barrier=meet)
  assert asked == {0: [0, 6], 1: [2, 8], 2: [4, 10]}
  assert places == [f'label maps {what}' for what in ('checked', 'begun', 'written', 'complete')]
  assert answers.Answers(tmp_path / 'maps').read(np.array([10]))[0].ravel().tolist() == [10, 10]


@pytest.mark.slow(reason='2 s: a teacher is built')
def test_a_teacher_of_other_classes_is_refused(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
  config = student(teacher)
  other = dataclasses.replace(config, data=dataclasses.replace(
      config.data, source='synthetic', train_split='train', pseudo=dataclasses.replace(
          config.data.pseudo, labels=str(tmp_path / 'labels'))))
  with pytest.raises(UserError, match='class'):
    teacher_labels.ensure(other)
  assert not teacher_labels.ensure(CONFIG)
