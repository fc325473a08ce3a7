"""What `train` refuses when it builds the objects of a run is found by `check`, from the config and the files alone."""
from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.jobs import check, train
from vit_jax.weights import saving

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
  place = check.Place(elsewhere=elsewhere)
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
  monkeypatch.setattr(check, 'LARGE_BYTES', 10)
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
  monkeypatch.setattr(check, 'FEW_FILES', 0)
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
