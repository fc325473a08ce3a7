"""The command line: what is accepted, and what a mistake reads like."""
from __future__ import annotations

import pytest

from vit_jax import main
from vit_jax.core.errors import UserError


def test_the_job_is_a_flag_or_the_first_word_and_defaults_to_train() -> None:
  want = main.Command('train', {'config': 'a', 'workdir': 'b'}, [])
  for words in (['--config=a', '--workdir=b'], ['train', '--config', 'a', '--workdir', 'b'],
                ['--job=train', '-config=a', '--workdir=b']):
    assert main.parse(words) == want


def test_overrides_are_collected() -> None:
  got = main.parse(['--config=a', '--workdir=b', '--config.x.y=1=2', '--config.z', '3'])
  assert got.overrides == ['x.y=1=2', 'z=3']


@pytest.mark.parametrize(('words', 'said'), [
    (['--confg=a'], ['--confg: no such flag; did you mean config?', '--job=train needs --config', 'needs --workdir']),
    (['--job=trian'], ['--job=trian: no such job; did you mean train?; there are: train, evaluate']),
    (['evaluat'], ["'evaluat' is no flag", 'did you mean evaluate?']),
    (['list', '--workdir=x'], ['--workdir is not for --job=list, which takes: no flags']),
    (['report', '--workdir=x', '--config.a=1'], ['--config.a=1 is not for --job=report']),
    (['--config', '--workdir=x'], ['--config has no value; want --config=VALUE']),
])
def test_all_mistakes_are_said_at_once(words: list[str], said: list[str]) -> None:
  with pytest.raises(UserError) as error:
    main.parse(words)
  for part in said:
    assert part in str(error.value), part


def test_help_names_every_job_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['train', '--help']) == 0
  text = capsys.readouterr().out
  assert all(f'  {name} ' in text for name in main.JOBS) and all(f'--{name} ' in text for name in main.FLAGS)


def test_a_mistake_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--config=digit', '--workdir=x']) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: There is no config') and 'Traceback' not in error


def test_list_prints_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list']) == 0
  assert 'digits' in capsys.readouterr().out
