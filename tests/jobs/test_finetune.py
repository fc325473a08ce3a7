"""`finetune`: weights and a folder are enough; the rest follows from both, and can be overridden."""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import shutil

import numpy as np
import pytest
import saved

from tests.data import images
from tests.weights import made, test_golden
from vit_jax import main
from vit_jax.config import engine, schema
from vit_jax.config.schema import Geometry
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.jobs import build, finetune, frozen_features, resume
from vit_jax.parallel import mesh as meshes
from vit_jax.record import checkpoint_files
from vit_jax.weights import inherit, init_state, runs, saving

pytestmark = [pytest.mark.xdist_group('test_finetune'),  # in one worker, for what the tests share
              pytest.mark.usefixtures('one_device', 'no_page')]


def fill(root: pathlib.Path, *folders: str, each: int) -> str:
  """Writes images of three classes below each of the folders; returns the name of the source."""
  for folder in folders:
    for label, name in enumerate(('ant', 'bee', 'cat')):
      place = root / folder / name
      place.mkdir(parents=True)
      for i in range(each):
        (place / f'{i}.png').write_bytes(images.encode(images.random_image(100 * label + i, height=40, width=36)))
  return f'folder:{root}'


def splits(source: str, *changes: str) -> finetune.Splits:
  return finetune.choose_splits(finetune.open_settings(finetune.load_config(), source, changes))


@pytest.mark.parametrize(('folders', 'each', 'train', 'evaluated'), [
    (('train', 'val'), 5, 15, 15),
    (('train', 'validation', 'test'), 4, 12, 12),
    (('train', 'test'), 3, 9, 9),
    (('train',), 10, 24, 6),
    (('',), 7, 16, 5),
])
def test_a_folder_of_any_layout_has_images_to_evaluate_on(
    folders: tuple[str, ...], each: int, train: int, evaluated: int, tmp_path: pathlib.Path) -> None:
  found = splits(fill(tmp_path, *folders, each=each))
  assert (len(found.train), len(found.evaluated)) == (train, evaluated)
  shown = [{one.describe(i) for i in range(len(one))} for one in (found.train, found.evaluated)]
  assert not shown[0] & shown[1] and len(shown[0]) == train


def test_a_large_folder_holds_out_a_tenth_and_the_command_line_decides(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  source = fill(tmp_path / 'a', '', each=10)
  monkeypatch.setattr(finetune, 'SMALL_DATASET', 30)
  assert [len(splits(source, *one).evaluated) for one in ((), ('data.holdout=0.5',))] == [3, 15]
  with pytest.raises(UserError, match='split of folder:.*: expected one of test, train, got'):
    splits(source, 'data.eval_split=other')
  with pytest.raises(UserError, match=r'data.eval_split: expected the images to evaluate on beside data.train_split='):
    splits(fill(tmp_path / 'b', 'train', each=2), 'data.train_split=train[:4]')
  both = splits(source, 'data.train_split=train[:20]', 'data.eval_split=train[20:]')
  assert (len(both.train), len(both.evaluated)) == (20, 7)


def test_a_folder_without_its_kind_is_recognized(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'--data: expected .*folder:PATH.* Set --data=folder:{tmp_path}'):
    splits(str(tmp_path))


def test_what_the_flags_give_is_no_override(capsys: pytest.CaptureFixture[str]) -> None:
  def said(*words: str) -> str:
    assert main.run(['finetune', '--weights=x.npz', '--data=folder:x', *words]) == 2
    return capsys.readouterr().err
  assert 'config.init_from: expected no override, as --weights gives it' in said('--config.init_from=y')
  assert 'config.data.source: expected no override, as --data gives it' in said('--config.data.source=y')
  assert 'Did you mean config.optimizer.momentum?' in said('--config.optimizer.momentun=.8')
  assert 'folder:x' in said() or 'x: expected a folder' in said()


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """The current folder, with weights and 21 images."""
  monkeypatch.chdir(tmp_path)
  saving.save(made.network(), 'some weights.npz')
  fill(tmp_path / 'photos', '', each=7)
  return tmp_path


WORDS = ('finetune', '--weights=some weights.npz', '--data=folder:photos')


@pytest.mark.usefixtures('here')
def test_the_run_has_the_network_of_the_weights_and_the_size_of_the_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
  given: list[schema.Config] = []
  monkeypatch.setattr(finetune.train, 'run', lambda config, workdir, **_: given.append(config) or 75)
  assert main.run([*WORDS, '--config.model.drop_path=.2', '--config.evals.val.metrics=ece']) == 75
  (config,), network = given, made.network()
  assert 'on 16 images of 3 classes, evaluated on 5.' in caplog.text and '--config.batch_size=8\n' in caplog.text
  assert "--config.length='150 steps'" in caplog.text and 'Predict' not in capsys.readouterr().out
  assert config.model == dataclasses.replace(network.model, drop_path=.2) and config.evals['val'].metrics == ('ece',)
  assert config.image_px == network.preprocess.image_px and config.data.holdout == finetune.SMALL_HOLDOUT
  assert (config.batch_size, config.length, config.init_from) == (8, '150 steps', 'some weights.npz')
  assert config.init_settings is schema.InitSettings.WEIGHTS
  assert config.checkpoints == schema.Checkpoints(every=config.evals['val'].every, keep_best='val/top1')


@pytest.mark.usefixtures('here')
@pytest.mark.parametrize(('before', 'said'), [
    ('others.npz', 'one that began from others.npz. Use others.npz, or another --workdir'),
    ('', 'one that began from none. Leave them out, or use another --workdir')])
def test_a_run_that_began_from_other_weights_is_not_continued(
    before: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  workdir = pathlib.Path('run')
  saved.write(workdir / 'checkpoints', saved.program(), [3])
  (workdir / 'config.json').write_text(engine.to_json(schema.Config(init_from=before)))
  files = saved.snapshot(workdir)
  for words in (WORDS, ('train', '--config=digits', '--config.init_from=some weights.npz')):
    assert main.run([*words, '--workdir=run']) == 2
    error = capsys.readouterr().err
    assert f'expected a run that began from the weights some weights.npz, got {said}' in error
  assert saved.snapshot(workdir) == files
  resume.check_weights(workdir, schema.Config(init_from=os.path.abspath(before) if before else ''))


@pytest.mark.slow(reason='about 8 s: a run and a prediction')
@pytest.mark.usefixtures('here')
def test_twenty_images_are_enough_and_the_last_line_predicts(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
  words = [*WORDS, '--config.length=5 steps', '--config.evals.val.every=2 steps',
           '--config.checkpoints.every=100 %']
  assert main.run(words) == 0
  out = capsys.readouterr().out
  workdir, network = pathlib.Path('runs/finetune_some_weights_photos'), made.network()
  config = json.loads((workdir / 'config.json').read_text())
  assert config['model']['gelu'] == network.model.gelu.value
  assert config['data']['recipe']['mean'] == list(network.preprocess.mean)
  assert config['data']['recipe']['exif_orientation'] is True
  assert '"val/top1"' in (workdir / 'metrics.jsonl').read_text()
  command = shlex.split(out.splitlines()[-1])
  assert command[0] == 'vit-jax' and main.run(command[1:]) == 0
  predicted = capsys.readouterr().out
  assert all(name in predicted for name in ('ant', 'bee', 'cat')) and predicted.startswith('photos/')
  assert main.run(words) == 0  # nothing is left to do
  assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
  kept = json.loads((workdir / frozen_features.FILE).read_text())['compared']
  assert caplog.text.count('Features of some weights.npz without fine-tuning: k-NN ') == 2 and kept['num_images'] == 5
  assert caplog.text.count(f'Compared in {kept["seconds"]:.0f} s.') == 2  # it is computed once
  assert main.run([*words, '--workdir=plain', '--compare=no']) == 0
  final, plain = (json.loads((folder / 'final.json').read_text()) for folder in (workdir, pathlib.Path('plain')))
  assert plain['params_digest'] == final['params_digest'] and plain['metrics'] == final['metrics']
  read, evaluated = final['data'], json.loads((workdir / 'evaluate.json').read_text())['data']
  assert read == evaluated and {name: one['examples'] for name, one in read.items()} == {
      'folder:photos train': 16, 'folder:photos val': 5} and all(len(one['digest']) > 31 for one in read.values())
  assert not pathlib.Path('plain', frozen_features.FILE).exists() and caplog.text.count('without fine-tuning') == 2


def test_a_batch_is_a_multiple_of_the_devices(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  found = splits(fill(tmp_path, 'train', 'val', each=4))
  monkeypatch.setattr(finetune.jax, 'device_count', lambda: 3)
  config = finetune.make(made.network(), found)
  assert config.batch_size == 9 and isinstance(config.model, schema.ViT)


def test_a_new_head_starts_as_in_the_protocol_whatever_the_network_began_with() -> None:
  network = made.network()
  assert isinstance(network.model, schema.ViT)
  network = network._replace(model=dataclasses.replace(network.model, init=schema.Init.DINO))
  config = finetune.make(network, splits('synthetic', 'data.num_classes=5'))
  assert config.model == dataclasses.replace(network.model, init=schema.Init.VISION_TRANSFORMER)


@pytest.mark.parametrize(('geometry', 'sampler'), [
    ('torchvision', 'torchvision'), ('huggingface', 'torchvision'), ('big_vision', 'tensorflow')])
def test_random_crops_are_those_of_the_program_of_the_weights(geometry: str, sampler: str) -> None:
  network = made.network(preprocess=made.HOW._replace(geometry=Geometry(geometry)))
  found = splits('synthetic', 'data.num_classes=5')
  config = finetune.make(network, found)
  assert config.data.recipe.crop_sampler.value == sampler
  assert f'--config.data.recipe.crop_sampler={sampler}' in finetune.describe(config, found)
  changed = finetune.apply(config, ['data.recipe.crop_sampler=clipped'])
  assert 'crop_sampler=clipped' in finetune.describe(changed, found)


@pytest.mark.slow(reason='12 s: compiles a train step')
def test_fine_tuning_on_the_same_batches_is_timms(tmp_path: pathlib.Path) -> None:
  """Position embeddings and blocks of timm's file, the new head, gradients, clipping and momentum of each step."""
  golden = json.loads(pathlib.Path(__file__).with_name('golden_finetuning.json').read_text())
  num_steps, rng = len(golden['loss']), np.random.default_rng(0)
  network = test_golden.load('timm_vit', tmp_path)
  changes = [f'length={num_steps} steps', 'optimizer.schedule.warmup=2 steps', 'batch_size=8', 'optimizer.lr=.1',
             'optimizer.mu_dtype=float32', 'data.recipe.crop=resize', 'data.recipe.flip=false', 'data.num_classes=5']
  found = splits('synthetic', *changes)
  config = finetune.apply(finetune.make(network, found), changes)
  config, *_ = inherit.resolve(config, [one.partition('=')[0] for one in changes], tmp_path, network)
  mesh = meshes.make(config.mesh)
  program = build.parts(config, mesh=mesh, num_examples=1_000, num_classes=5, in_memory=False).program
  names = found.train.class_names
  state = init_state.begin(config, program, names, tmp_path, network)
  losses, norms = [], []
  for step in range(num_steps):
    batch = {'image': rng.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8),
             'label': rng.integers(0, 5, 8).astype(np.int32), 'index': np.arange(8) + step}
    state, packed = program.step_fn(state, meshes.put_batch(batch, mesh, Shard((0,), 1)))
    metrics = packed.unpack()
    losses.append(metrics.means['loss'].sum / metrics.means['loss'].weight)
    norms.append(metrics.grad_norm)
  # f32 has 24 bits; the deepest sums are of some 1,000 terms, and 12 updates add up.
  np.testing.assert_allclose(losses, golden['loss'], rtol=1e-5)
  np.testing.assert_allclose(norms, golden['grad_norm'], rtol=1e-4)


@pytest.mark.usefixtures('here')
def test_lora_trains_adapters_with_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
  given: list[schema.Config] = []
  monkeypatch.setattr(finetune.train, 'run', lambda config, workdir, **_: given.append(config) or 75)
  for words in (['--lora'], ['--lora=3', '--config.lora.alpha=6', '--config.lora.targets=query,value'], []):
    assert main.run([*WORDS, *words]) == 75
  adapted, own, plain = given
  assert adapted.lora == schema.Lora(rank=8) and isinstance(adapted.optimizer, schema.AdamW)
  assert (own.lora.rank, own.lora.alpha, own.lora.ends) == (3, 6., ('query', 'value'))
  assert plain.lora == schema.Lora() and isinstance(plain.optimizer, schema.Sgd)


@pytest.mark.slow(reason='about 20 s: a run, resumed, and what reads it')
@pytest.mark.usefixtures('here')
def test_a_run_of_adapters_resumes_to_the_same_bits_and_is_read_merged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
  words = [*WORDS, '--lora=2', '--config.lora.dora=true', '--config.lora.dropout=.1', '--config.train.ema=.5',
           '--config.length=4 steps', '--config.evals.val.every=4 steps', '--config.checkpoints.every=2 steps',
           '--compare=no']
  assert main.run(words) == 0
  workdir, network = pathlib.Path('runs/finetune_some_weights_photos'), made.network()
  whole = json.loads((workdir / 'final.json').read_text())
  shutil.rmtree(workdir / 'checkpoints' / '4')
  (workdir / 'final.json').unlink()
  assert main.run(words) == 0
  again = json.loads((workdir / 'final.json').read_text())
  assert 'Resuming at step 2 of 4' in caplog.text
  assert again['params_digest'] == whole['params_digest'] and again['metrics'] == whole['metrics']
  found = runs.read(workdir, view='ema')
  frozen, merged = trees.flatten(found.frozen), trees.flatten(found.params)
  for name, x in trees.flatten(network.params).items():
    if name.startswith('backbone/'):
      np.testing.assert_array_equal(frozen[name], x, err_msg=name)
  assert merged.keys() == {*frozen, 'head/kernel', 'head/bias'}
  assert (merged['backbone/blocks/mlp/up/kernel'] != frozen['backbone/blocks/mlp/up/kernel']).any()
  capsys.readouterr()
  assert main.run(['evaluate', f'--workdir={workdir}']) == 0
  assert json.loads((workdir / 'evaluate.json').read_text())['metrics'] == pytest.approx(whole['metrics'], rel=1e-6)
  assert main.run(['predict', f'--weights={workdir}', str(next(pathlib.Path('photos').rglob('*.png')))]) == 0
  predicted = capsys.readouterr().out
  assert all(name in predicted for name in ('ant', 'bee', 'cat'))


def test_the_threads_of_the_run_are_fixed_before_its_devices_are_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
  def start(train: schema.Train, before: dict[str, object]) -> int:
    raise InterruptedError(train.cpu_threads, before)

  monkeypatch.setattr('vit_jax.jobs.finetune.startup.start', start)
  monkeypatch.setattr('vit_jax.jobs.resume.find_machine', lambda workdir: {'of': str(workdir)})
  with pytest.raises(InterruptedError) as found:
    finetune.run('gs://b/ti16.npz', 'folder:my/pets', None, lora=0, changes=['train.cpu_threads=3'], overridden=())
  assert found.value.args == (3, {'of': str(finetune.train.default_workdir('finetune ti16 pets'))})


def test_the_last_of_several_views_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """As of every setting that is given twice, and as the config of the run has it."""
  def load(where: str, *, view: str) -> None:
    raise InterruptedError(where, view)

  monkeypatch.setattr('vit_jax.jobs.finetune.loading.load', load)
  with pytest.raises(InterruptedError) as found:
    finetune.run('runs/one', fill(tmp_path, 'train', 'val', each=2), tmp_path / 'run', lora=0, overridden=(),
                 changes=['init_view=ema', 'init_view=student'])
  assert found.value.args == ('runs/one', 'student')


@pytest.mark.parametrize(('tuned', 'is_as_good'), [(.9, True), (.94, True), (.96, False)])
def test_frozen_features_that_are_as_good_are_recommended(tuned: float, is_as_good: bool) -> None:
  found = frozen_features.Comparison(knn=.8, logistic=.92, num_images=100, seconds=12.3)
  data = schema.Data(source='folder:my photos', eval_split='val', holdout=.2)
  text = frozen_features.describe(found, tuned, 'vit.npz', data)
  assert text.startswith('Features of vit.npz without fine-tuning: k-NN 80.00%, logistic regression 92.00%; '
                         f'fine-tuned {tuned:.2%} of 100 images (standard error ')
  assert text.endswith("--config.data.source='folder:my photos' --config.data.eval_split=val "
                       '--config.data.holdout=0.2') == is_as_good
  assert ('as good here' in text) == is_as_good


@pytest.mark.usefixtures('here')
def test_frozen_features_are_compared_only_of_few_images_with_one_class_each(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  found, network = splits('folder:photos'), made.network()
  config = finetune.make(network, found)
  data = build.Data(found.train, found.evaluated, found.train.class_names, in_memory=False)
  asked: list[object] = []
  monkeypatch.setattr(checkpoint_files, 'choose', lambda workdir, metric: checkpoint_files.Chosen(3, 5, metric, .5))
  monkeypatch.setattr(checkpoint_files, 'measured', lambda workdir, step: {3: {'val/top1': .5}}[step])
  monkeypatch.setattr(frozen_features, '_compare', lambda *given: asked.append(given) or 1 // 0)

  def report(config: schema.Config) -> int:
    frozen_features.report(tmp_path, config, data, network, metric='val/top1')
    return len(asked)

  several = dataclasses.replace(config, data=dataclasses.replace(config.data, max_labels=2))
  gray = dataclasses.replace(config, data=dataclasses.replace(config.data, channels=1))
  assert report(several) == report(gray) == 0
  monkeypatch.setattr(frozen_features, 'MAX_IMAGES', 20)
  assert report(config) == 0 and not caplog.records
  monkeypatch.setattr(frozen_features, 'MAX_IMAGES', 21)
  assert report(config) == 1  # and the error does not end the finished run
  assert 'Frozen features were not compared: ZeroDivisionError' in caplog.text
