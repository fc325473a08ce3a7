"""What a run refuses is found before it starts: where its files are, and the objects that are built from its config."""
from __future__ import annotations

import dataclasses
import os
import pathlib

import numpy as np
import pytest
import yaml

from tests.weights import made
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.data import shared
from vit_jax.jobs import check, train
from vit_jax.weights import saving


def config(source: str = 'digits', **data: str) -> s.Config:
  return s.Config(name='x', data=s.Data(source=source, **data))  # type: ignore[arg-type]


def problems(found: s.Config, **place: object) -> str:
  return '\n'.join(check.problems(found, None, check.Location(**place)))  # type: ignore[arg-type]


@pytest.mark.parametrize(('source', 'setting'), [
  ('folder:JFT', 'source=folder:{data}'), ('array_record:set', 'source=array_record:{data}'),
  ('tfds:imagenet2012', 'data_dir={data}'), ('vtab:cifar', 'data_dir={data}')])
def test_mounted_data_that_the_command_does_not_name_are_refused_with_what_to_add(source: str, setting: str) -> None:
  text = problems(config(source), elsewhere=True, data='gs://b/d')
  assert f'Add --config.data.{setting} to the command.' in text
  named = config(source.split(':')[0] + ':{data}') if 'source' in setting else config(source, data_dir='{data}')
  assert problems(named, elsewhere=True, data='gs://b/d') == ''


def test_a_relative_folder_is_not_on_the_hosts_and_an_absolute_one_is_theirs(tmp_path: pathlib.Path) -> None:
  text = problems(config('folder:mine'), elsewhere=True, root=tmp_path)
  assert 'data.source=folder:mine: expected a folder of the hosts, got a relative path, which is not in the' in text
  assert f'the checkout {tmp_path}' in text
  (tmp_path / 'mine').mkdir()
  assert problems(config('folder:mine'), elsewhere=True, root=tmp_path) == ''
  assert problems(config('folder:/data/mine'), elsewhere=True) == ''
  assert 'expected the folder of tfds:cars on the hosts, got none' in problems(config('tfds:cars'), elsewhere=True)


def test_each_source_of_a_mixture_and_of_evaluations_is_checked(tmp_path: pathlib.Path) -> None:
  found = dataclasses.replace(config(f'mix:0.5*folder:{tmp_path},0.5*folder:{tmp_path}/none'),
                              evals={'other': s.TopK(source=f'array_record:{tmp_path}/set')})
  text = problems(found)
  assert f'folder:{tmp_path}/none: expected a folder of images, got no folder' in text
  assert f'{tmp_path}/set: expected a prepared dataset, got no info.json' in text
  assert f'folder:{tmp_path}:' not in text


def test_data_here_are_looked_up() -> None:
  assert 'is not prepared in /none' in problems(config('tfds:cars', data_dir='/none'))
  assert 'got the address gs://b/x' in problems(config('folder:gs://b/x'))
  assert 'expected one of digits, synthetic, folder:PATH' in problems(config('imagenet'))
  assert problems(config('synthetic')) == ''


@pytest.mark.parametrize('kind', ['wds', 'tfrecord', 'parquet'])
def test_patterns_of_files_are_looked_up_here_and_their_folder_in_the_checkout_for_hosts(
    kind: str, tmp_path: pathlib.Path) -> None:
  assert f'{tmp_path}/set/train-*: expected this file, or files of this pattern, got none' in problems(
      config(f'{kind}:{tmp_path}/set/train-*'))
  assert f'Add --config.data.source={kind}:{{data}} to the command.' in problems(
      config(f'{kind}:JFT'), elsewhere=True, data='gs://b/d')
  assert problems(config(f'{kind}:{{data}}/train-*'), elsewhere=True, data='gs://b/d') == ''
  where = f'{kind}:mine/{{train,val}}-*'
  assert 'expected a folder of the hosts, got a relative path' in problems(config(where), elsewhere=True, root=tmp_path)
  (tmp_path / 'mine').mkdir()
  assert problems(config(where), elsewhere=True, root=tmp_path) == ''
  assert problems(config(f'{kind}:gs://bucket/set/train-*'), elsewhere=True) == ''
  assert 'got the address https://a/b' in problems(config(f'{kind}:https://a/b'), elsewhere=True)
  (tmp_path / 'mine' / 'train-0').touch()
  assert problems(config(f'{kind}:{tmp_path}/mine/train-*')) == ''


def test_weights_of_this_machine_do_not_reach_the_hosts(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'runs' / 'b16').mkdir(parents=True)
  own = dataclasses.replace(config(), init_from='runs/b16')
  assert 'init_from=runs/b16: expected weights that the hosts can read' in problems(own, elsewhere=True, root=tmp_path)
  assert problems(own, root=tmp_path) == ''
  named = dataclasses.replace(config(), init_from='ViT-B_16-i21k')
  assert problems(named, elsewhere=True, root=tmp_path) == ''


def test_weights_in_a_home_directory_that_does_not_exist_are_a_problem_of_this_machine() -> None:
  own = dataclasses.replace(config(), init_from='~no_such_user/b16.npz')
  assert problems(own, elsewhere=True) == ''
  (text,) = check.training_problems(own, check.Location())
  assert text.startswith('~no_such_user/b16.npz: expected the path of a file or folder')


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: pathlib.Path) -> None:
  tmp_path.chmod(0o500)
  (text,) = check.problems(config(), tmp_path / 'runs' / 'x', check.Location())
  assert f'got no permission to write in {tmp_path}' in text


def test_a_file_in_place_of_the_run_directory_is_refused(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'runs').write_text('')
  (text,) = check.problems(config(), tmp_path / 'runs' / 'x', check.Location())
  assert f'expected a folder, got the file {tmp_path}/runs' in text
  assert check.problems(config(), tmp_path / 'new' / 'x', check.Location()) == []


TEXT = (pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'k8s.yaml').read_text()
FILLED = (('REGION-docker.pkg.dev/PROJECT/REPOSITORY/', 'eu-docker.pkg.dev/p/r/'), ('MY-DATA-BUCKET', 'data'),
          ('MY-RUNS-BUCKET', 'runs'))


def written(folder: pathlib.Path, *changes: tuple[str, str]) -> str:
  """The path of the template with names filled in, and these changes."""
  text = TEXT
  for old, new in (*FILLED, *changes):
    assert old in text, old
    text = text.replace(old, new)
  (folder / 'run.yaml').write_text(text)
  return str(folder / 'run.yaml')


def test_the_template_runs_its_command_on_its_slices_once_its_names_are_filled_in(tmp_path: pathlib.Path) -> None:
  found = check.read_manifest(written(tmp_path, ('replicas: 1', 'replicas: 2')))
  assert found.topology == 'v5e:4x4' and found.slices == 2
  assert found.line.startswith('vit-jax --config=vit_s16_i1k --config.data.data_dir=/data/tfds')


def test_the_template_keeps_the_cache_in_the_bucket_of_runs() -> None:
  """Programs that were compiled and lists are there at the next start, on other nodes."""
  (jobset,) = yaml.safe_load_all(TEXT)
  pod = jobset['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
  (container,) = pod['containers']
  cache = next(one['value'] for one in container['env'] if one['name'] == 'XDG_CACHE_HOME')
  mounts = {one['mountPath']: one for one in container['volumeMounts']}
  assert cache.startswith('/runs/') and not mounts['/runs'].get('readOnly')
  assert next(one for one in pod['volumes'] if one['name'] == 'runs')['csi']['driver'].startswith('gcsfuse')


@pytest.mark.parametrize(('old', 'new'), [
  ('emptyDir:\n                    medium: Memory', 'emptyDir: {}'), ('mountPath: /dev/shm', 'mountPath: /shm'),
], ids=['medium', 'mount'])
def test_a_volume_for_shared_memory_is_not_needed_as_loader_processes_use_none(tmp_path: pathlib.Path, old: str,
                                                                               new: str) -> None:
  assert check.read_manifest(written(tmp_path, (old, new))).topology == 'v5e:4x4'
  assert shared.is_possible()  # on Linux, which the image has: batches are in memory without a name


@pytest.mark.parametrize(('old', 'new', 'message'), [
  ('gke-tpu-topology: 4x4', 'gke-tpu-topology: 4x8', 'parallelism and completions: expected 8, the hosts of a 4x8'),
  ('tpu-v5-lite-podslice', 'tpu-v9', 'gke-tpu-accelerator: expected one of tpu-v4-podslice'),
  ('google.com/tpu: 4', 'google.com/tpu: 0', 'the hosts of a 4x4 slice with 0 chips each'),
  ('kind: JobSet', 'kind: Job', 'expected a JobSet with one job on TPUs'),
  ('name: vit-jax', 'name: [', 'expected a JobSet with one job on TPUs'),
], ids=['hosts', 'chip', 'chips', 'kind', 'yaml'])
def test_a_manifest_whose_pods_would_fail_is_refused(tmp_path: pathlib.Path, old: str, new: str, message: str) -> None:
  with pytest.raises(UserError) as caught:
    check.read_manifest(written(tmp_path, (old, new)))
  assert message in str(caught.value)


def test_placeholders_and_missing_files_are_named(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'run.yaml').write_text(TEXT)
  with pytest.raises(UserError, match='got the placeholder MY-DATA-BUCKET'):
    check.read_manifest(str(tmp_path / 'run.yaml'))
  with pytest.raises(UserError, match='expected a manifest, got "No such file or directory"'):
    check.read_manifest(str(tmp_path / 'none.yaml'))


LIT = ('objective.text.depth=1', 'objective.text.width=16', 'objective.text.heads=2', 'objective.text.mlp=16',
       'model.depth=1', 'model.width=16', 'model.heads=2', 'model.mlp.hidden=16', 'image_px=16,16', 'batch_size=16',
       'evals.zeroshot.split=test')
NATIVE = ('data.source=digits', 'data.num_examples=0', 'data.num_classes=0', 'data.eval_split=test', 'batch_size=8',
          'image_px=32,32', 'data.recipe.native_lengths=2,4', 'train.accumulate=1', 'model.depth=1', 'model.width=16',
          'model.heads=2', 'model.mlp.hidden=16', 'length=2 steps', 'optimizer.schedule.warmup=1 steps')
FEATURES = ('model.depth=1', 'model.width=16', 'model.heads=2', 'model.mlp.hidden=16', 'batch_size=16')


def found(name: str, *overrides: str, elsewhere: bool = False) -> str:
  """Returns the problems of a config with overrides, those of its places included."""
  config = files.load(name, list(overrides))
  place = check.Location(elsewhere=elsewhere)
  assert check.problems(config, None, place) == []
  return '\n'.join(check.training_problems(config, place))


@pytest.mark.parametrize(('change', 'message'), [
  ('model.positions=sincos', 'model.positions: expected learned or nopositions for images at their own aspect, got '
   'sincos. Set it, or data.recipe.eval_native_patch=0 and data.recipe.native_lengths=()'),
  ('model.positions=rotary', 'for images at their own aspect, got rotary.'),
  ('model.positions.at=layers', 'model.positions.at: expected stem or shared for images at their own aspect, got '),
  ('model.positions=nopositions', ''),
])
def test_positions_that_have_no_grid_of_their_own_are_refused(change: str, message: str) -> None:
  text = found('naflex_s16_i1k', *NATIVE, change)
  assert message in text and bool(message) == bool(text)


@pytest.mark.parametrize('elsewhere', [False, True])
def test_an_unknown_set_of_templates_is_refused_wherever_the_data_are(elsewhere: bool) -> None:
  source = 'array_record:/data' if elsewhere else 'digits'
  lit = [f'lit_cifar10:source={source}', *LIT]
  assert found(*lit, elsewhere=elsewhere) == ''
  wanted = '{}: expected one of class_name_only, clip_paper, clip_best, or a template with one {{}} for'
  text = found(*lit, 'objective.prompts=clip_worst', elsewhere=elsewhere)
  assert wanted.format('objective.prompts') in text and text.count('expected') == 1
  assert wanted.format('evals.zeroshot.prompts') in found(*lit, 'evals.zeroshot.prompts=x', elsewhere=elsewhere)


def test_texts_without_a_tokenizer_or_captions_are_refused() -> None:
  lit = ['lit_cifar10:source=digits', *LIT]
  text = found(*lit, 'objective.text.tokens=clip')
  assert text.startswith('objective.text.tokenizer: expected the file of a tokenizer') and text.count('expected') == 1
  assert 'objective.prompts: expected a template for the names of classes' in found(*lit, 'objective.prompts=')


def test_missing_weights_are_refused_here_and_left_to_the_hosts_elsewhere(tmp_path: pathlib.Path) -> None:
  lit = ['lit_cifar10:source=digits', *LIT, f'init_from={tmp_path}/none.npz']
  assert f'{tmp_path}/none.npz: expected weights as a path' in found(*lit)
  assert found('lit_cifar10:source=array_record:/data', *LIT, f'init_from={tmp_path}/none.npz', elsewhere=True) == ''
  own = ['lit_cifar10:source=digits', *LIT, 'evals.zeroshot.weights=none.npz']
  assert 'none.npz: expected weights as a path' in found(*own)
  assert found('lit_cifar10:source=digits', *LIT, 'init_from=ViT-B_16-i21k') == ''  # it may not be on this machine


def test_a_file_that_is_no_weights_is_refused_unless_it_is_large(tmp_path: pathlib.Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  np.savez(tmp_path / 'x.npz', some=np.zeros(3))
  lit = ['lit_cifar10:source=digits', *LIT, f'init_from={tmp_path}/x.npz']
  assert f'{tmp_path}/x.npz cannot be used: its 1 tensors are named as in no known family' in found(*lit)
  monkeypatch.setattr(check, 'MAX_WEIGHTS_BYTES', 10)
  assert found(*lit) == ''


def test_feature_distillation_needs_a_teacher() -> None:
  distill = ['feature_distill_cifar10:source=digits', *FEATURES]
  assert "objective.teacher.weights: expected a weight file, got ''." in found(*distill)
  assert 'image_px: expected multiples of model.patch=16 px' in found(*distill, 'objective.teacher.px=33')


def test_the_teacher_is_read_so_that_its_patches_and_the_shapes_of_arrays_are_known(tmp_path: pathlib.Path) -> None:
  network = s.ViT(patch=16, width=16, depth=1, heads=2, mlp=s.Mlp(16))
  saving.save(made.network(network, num_classes=0, class_names=()), str(tmp_path / 'teacher.npz'))
  distill = ['feature_distill_cifar10:source=digits', *FEATURES, f'objective.teacher.weights={tmp_path}/teacher.npz']
  assert found(*distill, 'objective.teacher.px=32') == ''
  assert 'objective.teacher.px: expected a multiple of objective.teacher.model.patch=16, got 33' in found(
      *distill, 'objective.teacher.px=33')
  text = found('digits', f'init_from={tmp_path}/teacher.npz')
  assert 'float32[1, 16] in the weights, float32[3, 64] in the run' in text


def test_evaluations_that_cannot_be_built_are_refused() -> None:
  wanted = "split of digits: expected one of test, train, got 'no_such_split'."
  assert wanted in found('digits', 'evals.test.split=no_such_split')
  assert wanted in found('digits', 'evals.test.split=no_such_split', 'init_from=ViT-B_16-i21k')  # it is not here


@pytest.fixture
def in_a_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """A run of LiT on a folder of empty files that counts as a large one, beside three names and weights of width 32."""
  monkeypatch.setattr(check, 'MANY_FILES', 0)
  (tmp_path / 'three.txt').write_text('a\nb\nc\n')
  network = s.ViT(patch=16, width=32, depth=1, heads=2, mlp=s.Mlp(16))
  saving.save(made.network(network, num_classes=0, class_names=()), str(tmp_path / 'wide.npz'))
  for name in (*(f'train/{kind}/{number}.png' for kind in 'ab' for number in range(5)), 'test/a/1.png'):
    (tmp_path / 'images' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'images' / name).touch()
  return ['lit_cifar10', *LIT, f'data.source=folder:{tmp_path}/images', 'batch_size=8', 'evals.zeroshot.split=train']


def test_problems_in_a_large_folder_are_found_together(tmp_path: pathlib.Path, in_a_folder: list[str]) -> None:
  assert "expected one of test, train, got 'validation'" in found(*in_a_folder, 'data.eval_split=validation')
  text = found(*in_a_folder, f'objective.names={tmp_path}/three.txt', 'batch_size=16', f'init_from={tmp_path}/wide.npz')
  for problem in ('objective.names: expected 2 names, one for each class', 'or set --config.model.width=32.',
                  'batch_size: expected at most 10, the number of examples'):
    assert problem in text, text


@pytest.mark.slow(reason='2 s: six runs are begun; the test above finds the same problems')
@pytest.mark.parametrize(('wanted', 'overrides'), [
  ("expected one of test, train, got 'validation'", 'data.eval_split=validation'),
  ('objective.names=none.txt: expected a text file, got "No such', 'objective.names=none.txt'),
  ('objective.names: expected 2 names, one for each class', 'objective.names={}/three.txt'),
  ('which takes captions, and folder:', 'objective.prompts='),
  ('batch_size: expected at most 10, the number of examples', 'batch_size=16'),
  ('or set --config.model.width=32.', 'init_from={}/wide.npz'),
])
def test_the_check_has_the_words_of_training(wanted: str, overrides: str, tmp_path: pathlib.Path,
                                             in_a_folder: list[str]) -> None:
  words = [*in_a_folder, overrides.format(tmp_path)]
  assert wanted in (text := found(*words))
  with pytest.raises(UserError) as error:
    train.run(files.load(words[0], words[1:]), tmp_path / 'run', overridden={word.partition('=')[0] for word in words})
  assert str(error.value) == text


def test_weights_are_compared_with_the_network_where_the_data_are_not_opened(tmp_path: pathlib.Path) -> None:
  network = s.ViT(patch=16, width=32, depth=1, heads=2, mlp=s.Mlp(16))
  saving.save(made.network(network, num_classes=0, class_names=()), str(tmp_path / 'wide.npz'))
  words = ['lit_cifar10:source=hf:owner/name', *LIT, f'init_from={tmp_path}/wide.npz']
  assert 'or set --config.model.width=32.' in found(*words) and found(*words, 'model.width=32') == ''
