"""`vit-jax check`: what it refuses before hardware is requested, and what it lets pass."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax import check, main
from vit_jax.commands import Command
from vit_jax.core.errors import UserError
from vit_jax.jobs import check as places


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> str:
  """Runs the job and returns what it prints, or its error."""
  status = main.run(['check', *words])
  shown = capsys.readouterr()
  assert (status == 2) == bool(shown.err) and status in (0, 2), shown
  return shown.out + shown.err


def test_a_sound_run_is_checked_without_its_data_and_its_layout_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
  text = checked(capsys, '--config=digits', '--topology=cpu:8', '--elsewhere')
  assert 'Checked the train command of digits: no problems found.' in text
  assert 'data=8 fsdp=1 tensor=1' in text


@pytest.mark.parametrize(('words', 'message'), [
  (['--topology=cpu:7', '--config.evals.test.batch_size=70'], 'batch_size: expected a multiple of 7 batch shards'),
  (['--topology=cpu:16'], 'evals.test.batch_size: expected a multiple of 16 batch shards'),
  (['--topology=cpu:8', '--config.mesh.fsdp=3'], 'mesh: expected sizes whose product is 8'),
  (['--topology=v4:2x2x1', '--slices=2'], 'Add --config.mesh.slices=2 to the command.'),
  (['--topology=v9-8'], '--topology: expected one of the topologies below'),
  (['--config.length=2 steps', '--config.optimizer.schedule.warmup=5 steps', '--topology=cpu:8'],
   'optimizer.schedule.warmup: expected at most the run'),
], ids=['batch', 'evaluation', 'mesh', 'slices', 'name', 'schedule'])
def test_what_does_not_divide_over_the_devices_is_refused(capsys: pytest.CaptureFixture[str], words: list[str],
                                                         message: str) -> None:
  assert message in checked(capsys, '--config=digits', *words)


def test_fewer_slices_than_at_the_first_start_show_their_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
  words = ('--config=digits', '--topology=v4:2x2x1', '--config.mesh.slices=0', '--config.mesh.chosen_slices=2')
  assert 'slices,' not in checked(capsys, *words)
  assert 'Layout for 8 x v4 in 2 slices' in (text := checked(capsys, *words, '--slices=1'))
  assert 'On 1 of 2 slices, 2 microbatches.' in text
  assert ('mesh.slices: expected 1 or 2 slices, over which batch_size=128 divides, got 3; the run began on 2.'
          in checked(capsys, *words, '--slices=3'))


def test_unknown_hardware_is_refused_elsewhere_too_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
  text = checked(capsys, '--config=digits', '--elsewhere', '--topology=v4-33')
  assert "expected one of the topologies below, got 'v4-33'" in text and '16x16x16' in text
  assert 'Did you mean v4-32?' in text and 'Checked:' not in text


def test_a_run_that_needs_more_memory_than_the_devices_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
  text = checked(capsys, '--config=vit_22b_jft4b', '--config.data.source=array_record:/jft', '--elsewhere',
                 '--topology=v4-8')
  assert '--topology: expected hardware with the memory for this run, got v4-8. Use more' in text and 'GiB' in text


def test_all_problems_of_a_command_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
  line = 'python -m vit_jax.main --config=digits --config.optimizer.lr=high --workdri=x --config.seeed=1'
  text = checked(capsys, f'--line={line}')
  for problem in ('optimizer.lr', '--workdri: expected a known flag', 'seeed'):
    assert problem in text, text


def test_one_of_config_line_and_manifest_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
  assert 'expected one of --config, --line and --manifest' in checked(capsys)
  assert 'expected one of' in checked(capsys, '--config=digits', '--line=vit-jax --config=digits')


def test_a_line_is_found_behind_other_words() -> None:
  for line in ("A=1 python -m vit_jax.main --config=digits --workdir='a b'", '/x/bin/vit-jax train --config=digits '
               '--workdir="a b"'):
    command = check.read(line)
    assert isinstance(command, Command) and command.job == 'train'
    assert command.values['workdir'] == pathlib.Path('a b').absolute()
  with pytest.raises(UserError, match='expected a command with vit_jax.main or vit-jax'):
    check.read('python train.py')


def test_other_jobs_and_studies_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
  text = checked(capsys, '--line=vit-jax study --config=ablations --topology=v3-8')
  assert 'data.source=folder:' in text and 'is not prepared in' in text  # of several runs
  line = 'vit-jax study --config=study_data_size:scale=small,source=digits'
  assert 'the study command' in checked(capsys, f'--line={line}')
  assert 'the evaluate command' in checked(capsys, '--line=vit-jax evaluate --weights=ViT-B_16-i21k --config=digits')


def test_rows_of_parquet_files_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
  pytest.importorskip('pyarrow')
  from tests.data import parquets
  parquets.write(tmp_path, 'train', parquets.large(12))
  words = ['--config=from_folder', f'--config.data.source=parquet:{tmp_path}', '--config.data.eval_split=train']
  assert 'batch_size: expected at most 12, the number of ex' in checked(capsys, *words, '--config.batch_size=14')
  assert 'Checked the ' in checked(capsys, *words, '--config.batch_size=8')


def empty_images(folder: pathlib.Path, *names: str) -> str:
  """Creates files, of which no image is read, and returns the source."""
  for name in names:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  return f'folder:{folder}'


def test_a_batch_with_more_images_than_there_are_is_refused_in_large_folders_too(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  source = empty_images(tmp_path, 'a/1.png', 'a/2.png', 'b/1.png', 'b/2.png', 'b/3.png')
  words = ['--config=from_folder', f'--config.data.source={source}']
  message = f'batch_size: expected at most 4, the number of examples of {source}, all but the 10 % held out, got 6.'
  assert f'{message} Set --config.batch_size=4.' in checked(capsys, *words, '--config.batch_size=6')
  assert 'Listing' not in (text := checked(capsys, *words, '--config.batch_size=4')) and 'Checked the ' in text
  monkeypatch.setattr(places, 'MANY_FILES', 4)
  text = checked(capsys, *words, '--config.batch_size=6')
  assert f'Listing {source}, which has more than 4 files. The list is kept for the run.' in text and message in text


def test_a_batch_is_compared_with_the_number_in_the_config_where_the_data_are_not_here(
    capsys: pytest.CaptureFixture[str]) -> None:
  words = ['--config=from_folder', '--config.data.source=folder:/data', '--elsewhere', '--config.batch_size=10']
  assert 'Checked the ' in checked(capsys, *words)
  counted = [*words, '--config.data.num_examples=8']
  assert 'batch_size: expected at most 8, the number of examples of folder:/data, got 10.' in checked(capsys, *counted)
  assert 'Checked the ' in checked(capsys, *counted, '--config.data.any_num_examples=true')


def test_images_are_counted_for_training_only(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
  (tmp_path / 'test' / 'a').mkdir(parents=True)
  (tmp_path / 'test' / 'a' / '1.png').touch()
  line = f'vit-jax evaluate --weights=x.npz --config.data.source=folder:{tmp_path}'
  assert 'Checked the evaluate command' in checked(capsys, f'--line={line}')
  line = f'vit-jax train --config=from_folder --config.data.source=folder:{tmp_path}'
  assert "got 'train'" in checked(capsys, f'--line={line}')


@pytest.mark.parametrize('line', ['vit-jax train "--config=digits', "vit-jax train '--config", 'vit-jax train x\\'])
def test_a_line_with_an_open_quote_is_a_message(line: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert '--line: expected a command line whose quotes are closed, got ' in checked(capsys, f'--line={line}')


def test_a_rank_beyond_every_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
  said = checked(capsys, '--config=digits', '--config.lora.rank=1000000000')
  assert 'lora.rank: expected 0 to 16384, got 1000000000' in said
