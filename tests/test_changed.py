"""Which tests a change selects."""
from __future__ import annotations

import pathlib
import subprocess

import changed
import pytest


def names(*paths: str) -> set[str]:
  return {str(path.relative_to(changed.ROOT / 'tests')) for path in changed.affected(paths)}


@pytest.mark.slow(reason='3 s: reads every file; what changed is below, and no result depends on it')
def test_a_module_selects_the_tests_that_import_it_also_through_others() -> None:
  found = names('vit_jax/data/device/mix.py')
  assert {'data/test_mix.py', 'data/test_transforms.py', 'jobs/test_train.py', 'test_end_to_end.py'} <= found
  assert not {'record/test_machine.py', 'objectives/test_losses.py', 'core/test_trees.py'} & found


@pytest.mark.slow(reason='3 s: reads every file; what changed is below, and no result depends on it')
def test_a_job_selects_the_tests_of_the_program_that_loads_it_by_name() -> None:
  assert {'test_main.py', 'test_end_to_end.py', 'jobs/test_train.py'} <= names('vit_jax/jobs/train.py')
  assert 'optim/test_adam.py' not in names('vit_jax/jobs/train.py')


@pytest.mark.slow(reason='3 s: reads every file; what changed is below, and no result depends on it')
def test_other_files_select_the_tests_that_mention_them_or_lie_beside_them() -> None:
  found = names('launch/tpu_pod.sh')
  assert 'launch/test_tpu_pod.py' in found and 'optim/test_adam.py' not in found
  assert 'test_configs.py' in names('configs/mae_i1k.py')
  assert names('tests/data/conftest.py') == {str(p.relative_to(changed.ROOT / 'tests')) for p in changed.all_tests()
                                             if p.parent.name == 'data'}
  assert len(names('pyproject.toml')) == len(changed.all_tests())


def test_changes_are_those_since_the_branch_left_and_new_files(tmp_path: pathlib.Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(changed, 'ROOT', tmp_path)

  def git(*words: str) -> None:
    subprocess.run(['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *words], cwd=tmp_path, check=True,
                   capture_output=True)

  def write(name: str, text: str = 'a') -> None:
    (tmp_path / name).write_text(text)

  git('init', '-q', '-b', 'main')
  write('kept')
  write('edited')
  git('add', '.')
  git('commit', '-qm', 'first')
  git('checkout', '-qb', 'branch')
  write('committed')
  git('add', '.')
  git('commit', '-qm', 'second')
  write('edited', 'b')
  write('new')
  assert changed.changed() == ['committed', 'edited', 'new'] and changed.changed('HEAD') == ['edited', 'new']
