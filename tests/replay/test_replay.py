"""`vit-jax record` and `vit-jax replay`, with a run that takes no time: what is compared, and what a person reads."""
from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from data import images

from vit_jax import main
from vit_jax.config import engine, files
from vit_jax.evaluate import resources
from vit_jax.recipes import sizes
from vit_jax.replay import inputs, job, recording, records
from vit_jax.replay.outcomes import Status

MACHINE = {'device_kind': 'cpu', 'cpu_threads': 2, 'cores': 2, 'cpu_model': 'X', 'cpu_isa': 'AVX2', 'XLA_FLAGS': '',
           'ONEDNN_MAX_CPU_ISA': '', 'versions': {'jax': '1', 'jaxlib': '1'}}
COMMAND = ['vit-jax', 'train', '--config=from_folder', '--config.data.source=folder:{folder}', '--config.seed=3',
           '--config.length=4 steps']
CLAIM = 'Of the images {test/top1:.1%} are right, after 2 steps {test/top1 at 2:.0%}.'


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Directories that replays keep are removed with those of the test."""
  monkeypatch.setattr(job.tempfile, 'tempdir', str(tmp_path))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  for split in ('train', 'test'):
    for number in range(4):
      path = tmp_path / 'photos' / split / ('cat', 'dog')[number % 2] / f'{number}.png'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(images.encode(images.random_image(number + 4 * (split == 'test'))))
  return tmp_path / 'photos'


def write_run(workdir: pathlib.Path, words: list[str], *, top1: float = .75, digest: str = 'abc', isa: str = 'AVX2',
              changes: tuple[str, ...] = ()) -> None:
  """Leaves what a run of a command leaves."""
  workdir.mkdir(parents=True)
  given = [word.removeprefix('--config.') for word in words if word.startswith('--config.')]
  config = files.load('from_folder', [*given, *changes], models=sizes.model)
  (workdir / 'config.json').write_text(engine.to_json(config))
  lines: list[dict[str, Any]] = [
      {'event': 'start', 'time_s': 0., 'resumed_from': None, 'command': words, 'commit': 'c0ffee',
       'machine': MACHINE | {'cpu_isa': isa}, 'devices': 1},
      {'step': 2, 'time_s': 1., 'test/top1': .5},
      {'event': 'checkpoint', 'time_s': 1., 'step': 2, 'params_digest': 'ab'},
      {'event': 'checkpoint', 'time_s': 2., 'step': 4, 'params_digest': digest}]
  (workdir / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  (workdir / 'final.json').write_text(json.dumps(
      {'step': 4, 'seconds': 9., 'processor_s': 7.5, 'training_processor_s': 5.25, 'exaflops': 2e-9,
       'params_digest': digest, 'metrics': {'test/top1': top1, 'test/nll': .25}}))


@pytest.fixture
def record(folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  """The record of a run, written by the command."""
  words = [word.format(folder=folder) for word in COMMAND]
  write_run(tmp_path / 'run', [*words, f'--workdir={tmp_path / "run"}'])
  assert main.run(['record', str(tmp_path / 'run'), f'--claim={CLAIM}', f'--data=photos={folder}',
                   f'--to={tmp_path / "record.json"}']) == 0
  return tmp_path / 'record.json'


Run = Callable[..., int]


@pytest.fixture
def replay(record: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
  """Replays the record; the command leaves a run with the values that are given."""
  def replayed(*more: str, data: pathlib.Path | None = folder, path: pathlib.Path = record, status: int = 0,
               **values: Any) -> int:
    def execute(words: list[str], check: bool, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
      assert words[1:3] == ['-m', 'vit_jax.main'] and not check
      workdir = next(word.partition('=')[2] for word in words if word.startswith('--workdir='))
      write_run(pathlib.Path(workdir), words[3:], **values)
      return subprocess.CompletedProcess(words, status)
    monkeypatch.setattr(job.subprocess, 'run', execute)
    return main.run(['replay', str(path), *([f'--data=photos={data}'] if data else []), *more])
  return replayed


def change(path: pathlib.Path, **fields: Any) -> None:
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_record_has_everything_that_a_replay_needs_and_no_path(record: pathlib.Path, folder: pathlib.Path) -> None:
  text, found = record.read_text(), records.read(str(record))
  assert str(folder.parent) not in text and list(json.loads(text)) == sorted(json.loads(text))
  assert found.command == ("vit-jax train --config=from_folder '--config.data.source=folder:{photos}' --config.seed=3 "
                           "'--config.length=4 steps'",)
  assert found.sentence == 'Of the images 75.0 % are right, after 2 steps 50 %.'
  assert found.values == {'test/top1': .75, 'test/nll': .25, 'test/top1 at 2': .5}
  assert (found.kind, found.params_digest, found.checkpoints) == ('train', 'abc', {'2': 'ab', '4': 'abc'})
  assert sorted(found.data) == ['folder:{photos} test', 'folder:{photos} train']
  assert found.settings['seed'] == 3 and found.settings['data.source'] == 'folder:{photos}' and not found.found
  assert found.made['commit'] == 'c0ffee' and found.made['processor_s'] == 7.5 and found.made['machine'] == MACHINE
  assert [found.made[name] for name in ('exaflops', 'seconds', 'devices')] == [2e-9, 9., 1]
  assert type(found.made['devices']) is int


@pytest.mark.parametrize('switch', ['-q', '--verbose'])
def test_the_switches_of_messages_are_not_part_of_the_command(folder: pathlib.Path, tmp_path: pathlib.Path,
                                                              switch: str) -> None:
  program, *words = (word.format(folder=folder) for word in COMMAND)
  write_run(tmp_path / 'run', [program, switch, *words, '--workdir', 'x'])
  to = tmp_path / 'record.json'
  assert main.run(['record', str(tmp_path / 'run'), f'--claim={CLAIM}', f'--to={to}']) == 0
  assert records.read(str(to)).words() == [words]


def test_a_record_of_a_study_has_the_processor_seconds_of_all_of_its_runs(folder: pathlib.Path,
                                                                          tmp_path: pathlib.Path) -> None:
  words = [word.format(folder=folder) for word in COMMAND]
  for seed in (0, 1):
    write_run(tmp_path / 'study' / 'runs' / f'dino_seed{seed}', words, top1=.5 + seed / 4)
  to = tmp_path / 'record.json'
  common = ['record', str(tmp_path / 'study'), f'--data=photos={folder}', f'--to={to}', '--claim={median test/top1}.']
  study = 'vit-jax study --config=study_selfsup:source=folder:{photos},objectives=dino,seeds=2 --workdir={work}/study'
  assert main.run([*common, f'--command={study}']) == 0
  found = records.read(str(to))
  assert found.sentence == '0.625.'
  assert (found.made['processor_s'], found.made['training_processor_s']) == (15., 10.5)
  assert main.run([*common, '--overwrite', f'--command={study} && vit-jax train --config=digits']) == 0  # unknown cost
  assert not {'processor_s', 'training_processor_s'} & records.read(str(to)).made.keys()


def test_a_record_of_a_study_has_the_median_and_the_range_of_runs_that_differ_in_the_seed_alone(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  words = [word.format(folder=folder) for word in COMMAND]
  for seed in range(4):
    write_run(tmp_path / 'study' / 'runs' / f'lion_lr1_seed{seed}_equal', words, top1=.5 + seed / 8)
  write_run(tmp_path / 'study' / 'runs' / 'lion_lr2_seed0', words, top1=1.)
  to = tmp_path / 'record.json'

  def write(claim: str, *more: str) -> int:
    return main.run(['record', str(tmp_path / 'study'), f'--data=photos={folder}', f'--to={to}', '--overwrite',
                     '--command=vit-jax study --config=study_optimizers', f'--claim={claim}', *more])

  claim = '{median lion_lr1_equal test/top1}, {lowest lion_lr1_equal test/top1} to {highest lion_lr1_equal test/top1}'
  assert write(claim) == 0
  every = records.read(str(to))
  assert every.sentence == '0.6875, 0.5 to 0.875'
  assert 'median lion_lr2 test/top1' not in every.values and 'lion_lr2_seed0 test/nll' in every.values
  assert write('{median lion_lr1_equal test/top1}', '--values=lowest *,*seed0* test/top1') == 0
  assert {*records.read(str(to)).values} == {
      'median lion_lr1_equal test/top1', 'lowest lion_lr1_equal test/top1', 'lowest lion_lr1_equal test/nll',
      'lion_lr1_seed0_equal test/top1', 'lion_lr2_seed0 test/top1'}
  capsys.readouterr()
  assert write(claim, '--values=x') == 2
  assert "--values: expected patterns of names of values, got 'x', which none has. Use " in capsys.readouterr().err
  assert write('{x}') == 2
  error = capsys.readouterr().err
  assert 'got {x}. Use ' in error
  assert error.endswith(f' and {len(every.values) - recording.MAX_NAMED} others, or METRIC at STEP.\n')


def test_an_equal_outcome_ends_with_status_0(replay: Run, capsys: pytest.CaptureFixture[str]) -> None:
  assert replay() == Status.EQUAL == 0
  shown = capsys.readouterr().out
  assert 'EQUAL: 3 values and 3 digests of parameters, bit for bit.' in shown and 'Recorded: ' in shown


def test_a_directory_is_kept_if_the_outcome_differs_or_if_it_was_given(
    replay: Run, tmp_path: pathlib.Path) -> None:
  assert replay() == 0 and not [*tmp_path.glob('vit_jax_replay_*')]
  assert replay(digest='abd') == 3 and [*tmp_path.glob('vit_jax_replay_*')]
  assert replay(f'--to={tmp_path / "kept"}') == 0 and (tmp_path / 'kept' / 'result' / 'final.json').is_file()
  assert replay(f'--to={tmp_path / "kept"}') == 2


@pytest.mark.parametrize(('values', 'line'), [
    ({'top1': .7500001}, 'value test/top1: 0.75 -> 0.7500001, by +1e-07'),
    ({'digest': 'abd'}, 'parameters at the end: abc -> abd\n  parameters at 4: abc -> abd')])
def test_a_changed_value_or_bit_is_named(replay: Run, capsys: pytest.CaptureFixture[str], values: dict[str, Any],
                                         line: str) -> None:
  assert replay(**values) == Status.RESULT
  assert f'DIFFERS from the record:\n  {line}\n' in capsys.readouterr().out


def test_a_tampered_record_is_named(replay: Run, record: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  change(record, values={'test/top1': .8, 'test/top1 at 2': .5})
  assert replay() == Status.RESULT and 'value test/top1: 0.8 -> 0.75, by -0.05' in capsys.readouterr().out
  change(record, values={'test/top1': .75, 'test/top1 at 2': .5, 'test/top5': 1.})
  assert replay() == Status.RESULT and 'value test/top5: 1.0 -> not measured' in capsys.readouterr().out


def test_another_machine_is_named_and_has_a_tolerance_of_its_own(
    replay: Run, record: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert replay(isa='AVX512', digest='abd', top1=.76) == Status.MACHINE
  assert 'cpu_isa: AVX2 -> AVX512' in capsys.readouterr().out
  change(record, tolerance={'same': 0., 'elsewhere': .02, 'reason': 'One image of 50.'})
  assert replay(isa='AVX512', digest='abd', top1=.76) == Status.EQUAL
  assert 'CLOSE: 3 values within 0.02 (One image of 50.). Not equal:' in capsys.readouterr().out
  assert replay(isa='AVX512', digest='abd', top1=.78) == Status.MACHINE
  assert ', by +0.03, within 0.02 allowed' in capsys.readouterr().out
  assert replay(digest='abd') == Status.RESULT, 'the tolerance is for other machines alone'


@pytest.mark.parametrize('split', ['train', 'test'])
def test_a_changed_image_and_a_changed_label_are_named_before_anything_runs(
    replay: Run, folder: pathlib.Path, capsys: pytest.CaptureFixture[str], split: str) -> None:
  path = folder / split / 'dog' / '1.png'
  before = path.read_bytes()
  path.write_bytes(images.encode(images.random_image(99)))
  assert replay() == Status.DATA
  shown = capsys.readouterr().out
  assert f'folder:{{photos}} {split}: other images, in class dog' in shown and '$ vit-jax' not in shown
  assert ('\nSet --data=photos=PATH to those of the record, or run the command with these data and write a record of '
          'it with vit-jax record.\n') in shown
  path.unlink()
  (folder / split / 'cat' / '1.png').write_bytes(before)
  assert replay() == Status.DATA
  assert f'{split}: the same images with other labels, in classes cat, dog' in capsys.readouterr().out


def test_a_changed_setting_is_named_before_anything_runs(
    replay: Run, record: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  line = records.read(str(record)).command[0]
  change(record, command=[line.replace('seed=3', 'seed=4')])
  assert replay() == Status.CONFIG
  shown = capsys.readouterr().out
  assert 'nothing was run: config\n  seed: 3 -> 4\nCheck out the commit of the record, c0ffee, or' in shown
  assert '$ vit-jax' not in shown
  change(record, command=[line.replace(' --config.seed=3', '')])
  assert replay() == Status.CONFIG and '  seed: 3 -> 0 (the default)\n' in capsys.readouterr().out


def test_a_setting_that_only_the_run_shows_is_named(replay: Run, capsys: pytest.CaptureFixture[str]) -> None:
  assert replay(changes=('model.width=24',)) == Status.CONFIG
  assert '  model.width: ' in capsys.readouterr().out


def test_data_that_nobody_gave_skip_the_replay_with_a_reason(
    replay: Run, record: pathlib.Path, folder: pathlib.Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.delenv(inputs.FOLDER_VARIABLE, raising=False)
  change(record, about={'photos': 'eight small images'})
  assert replay(data=None) == Status.MISSING
  shown = capsys.readouterr().out
  assert 'SKIPPED: --data: expected the path of photos, got none.' in shown and '(photos: eight small images)' in shown
  monkeypatch.setenv(inputs.FOLDER_VARIABLE, str(folder.parent))
  assert replay(data=None) == Status.EQUAL
  assert replay(data=folder / 'missing') == 2


def test_a_file_of_classes_has_a_name_in_a_record_and_is_found_by_it(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  classes = tmp_path / 'classes.txt'
  classes.write_text('dog\ncat\n')
  words = [word.format(folder=folder) for word in (*COMMAND, f'--config.data.classes={classes}')]
  write_run(tmp_path / 'run', words)
  paths = f'--data=photos={folder},classes={classes}'
  assert main.run(['record', str(tmp_path / 'run'), f'--claim={CLAIM}', paths, f'--to={tmp_path / "1.json"}']) == 0
  assert records.read(str(tmp_path / '1.json')).settings['data.classes'] == '{classes}'

  def execute(started: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    write_run(pathlib.Path(started[-1].removeprefix('--workdir=')), started[3:])
    return subprocess.CompletedProcess(started, 0)
  monkeypatch.setattr(job.subprocess, 'run', execute)
  assert main.run(['replay', str(tmp_path / '1.json'), paths]) == Status.EQUAL


def test_a_name_is_explained_as_records_of_the_same_images_do(
    record: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert not records.read_file(record).about
  change(record, about={'photos': 'eight small images', 'weights': 'of a small network'})
  monkeypatch.setattr(records, 'FOLDER', record.parent)
  assert main.run(['record', str(tmp_path / 'run'), f'--claim={CLAIM}', f'--data=photos={folder}',
                   f'--to={tmp_path / "later" / "2.json"}']) == 0
  assert records.read_file(tmp_path / 'later' / '2.json').about == {'photos': 'eight small images'}
  images = records.read_file(record).data
  change(record, data={name: {**content._asdict(), 'images': '0' * 64} for name, content in images.items()})
  assert main.run(['record', str(tmp_path / 'run'), f'--claim={CLAIM}', f'--data=photos={folder}',
                   f'--to={tmp_path / "later" / "3.json"}']) == 0
  assert not records.read_file(tmp_path / 'later' / '3.json').about, 'of other images with the same name'


def test_a_command_that_fails_ends_the_replay_with_its_status(
    replay: Run, capsys: pytest.CaptureFixture[str]) -> None:
  assert replay(status=75) == 75
  folder = capsys.readouterr().out.rpartition('Its files are in ')[2].strip()
  assert (pathlib.Path(folder) / 'result' / 'final.json').is_file()


def test_the_date_of_an_equal_replay_is_noted_in_the_file_of_the_record_where_asked(
    replay: Run, record: pathlib.Path) -> None:
  assert replay('--mark', top1=.7) == 3 and not records.read(str(record)).replayed
  assert replay('--mark') == 0 and records.read(str(record)).replayed.startswith('20')


def test_weights_are_compared_by_their_bytes(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a.npz'
  path.write_bytes(b'one')
  words = [['evaluate', '--weights={net}', '--config.data.source=digits']]
  before = inputs.digest_files(words, {'net': str(path)})
  assert before['net']['bytes'] == 3 and inputs.find_names(words) == ['net']
  path.write_bytes(b'two')
  assert inputs.digest_files(words, {'net': str(path)}) != before
  literal = inputs.digest_files([['train', f'--config.init_from={path}']], {})
  assert [*literal] == [str(path)] and literal[str(path)]['bytes'] == 3


def test_names_replace_whole_paths_and_back() -> None:
  found = {'a': '/data/a', 'ab': '/data/ab'}
  text = inputs.with_placeholders('folder:/data/ab and /data/a/x and /data/abc', found)
  assert text == 'folder:{ab} and {a}/x and /data/abc'
  assert inputs.with_paths(text, found) == 'folder:/data/ab and /data/a/x and /data/abc'
  given = '--config=speedrun_cifar10:source=folder:cifar10 --config=my-cifar10.py --to=x/cifar10'
  assert inputs.with_placeholders(given, {'c': 'cifar10'}) == given.replace('folder:cifar10', 'folder:{c}')


@pytest.mark.parametrize(('change', 'message'), [
    ({'kind': 'guess'}, "measurement, got 'guess'."), ({'more': 1}, 'record.json, more: expected '),
    ({'values': 3}, 'values: expected an object, got 3.'), ({'claim': '{test/top9:.1%}'}, "got '{test/top9:.1%}'.")])
def test_a_file_that_is_no_record_is_an_error(record: pathlib.Path, change: dict[str, Any], message: str,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  record.write_text(json.dumps(json.loads(record.read_text()) | change))
  assert main.run(['replay', str(record)]) == 2 and message in capsys.readouterr().err


def test_a_run_whose_data_were_changed_since_is_not_recorded(
    record: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  config = engine.read_file(tmp_path / 'run' / 'config.json')
  source = f'folder:{folder}'
  read = {f'{source} {split}': resources.fingerprint(inputs.open_split(config, source, split))._asdict()
          for split in ('train', 'test')}
  words = ['record', str(tmp_path / 'run'), f'--claim={CLAIM}', f'--data=photos={folder}', f'--to={tmp_path}/2.json',
           '--overwrite']
  change(tmp_path / 'run' / 'final.json', data=read)
  assert main.run(words) == 0
  (folder / 'train' / 'cat' / '0.png').rename(folder / 'train' / 'cat' / 'x.png')
  assert main.run(words) == 2
  was, now = read[f'folder:{folder} train']['digest'][:12], 'got 4 images with digest '
  said = capsys.readouterr().err
  assert f'folder:{folder} train: expected the 4 images with digest {was} that the result is of, {now}' in said
  assert 'Put the data back as they were, or run the command again.' in said and f'{folder} test' not in said
  change(tmp_path / 'run' / 'final.json', data={name: one | {'digest': ''} for name, one in read.items()})
  assert main.run(words) == 0  # an evaluation of weights knows the number alone
  (folder / 'test' / 'dog' / '1.png').unlink()
  assert main.run(words) == 2
  assert f'folder:{folder} test: expected the 4 images that the result is of, got 3 images' in capsys.readouterr().err


def test_what_cannot_be_replayed_or_recorded_is_explained(
    record: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  def error(*words: str) -> str:
    assert main.run([*words]) == 2
    return capsys.readouterr().err
  assert 'expected one record, got none' in error('replay')
  assert 'expected both --segment=STEP and --workdir=DIR' in error('replay', '--segment=3')
  change(record, kind='measurement')
  assert 'which no machine repeats exactly. Measure it again: vit-jax train' in error('replay', str(record))
  to = f'--to={tmp_path / "x.json"}'
  assert 'expected the directory of a run that has ended' in error('record', str(tmp_path), '--claim=x', to)
  run = str(tmp_path / 'run')
  assert 'expected names of values in braces, got {a}' in error('record', run, '--claim={a}', to)
  assert 'expected why the values may differ' in error('record', run, '--claim=x', to, '--tolerance=.1')
  assert ("--claim: expected a sentence with a value in braces, such as {test/top1:.3g}, got '75 % are right'. Use "
          'test/top1, test/nll, or METRIC at STEP.') in error('record', run, '--claim=75 % are right', to)
  empty = error('record', run, '--claim', to)
  assert '--claim: expected a value, got none. Set --claim=TEXT: the result as a sentence; {test/top1:.1%}' in empty
  assert 'expected a file NAME.json' in error('record', run, '--claim=x', '--to=x')


def test_a_segment_ends_at_the_next_checkpoint_and_compares_its_digest(
    record: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  run = tmp_path / 'run'
  (run / 'checkpoints' / '2').mkdir(parents=True)
  (run / 'checkpoints' / '4').mkdir()

  def train(config: Any, workdir: pathlib.Path, *, until: str, is_segment: bool) -> int:
    assert until == '4 steps' and is_segment and config.seed == 3 and (workdir / 'checkpoints' / '2').is_dir()
    with open(workdir / 'metrics.jsonl', 'a') as file:
      for line in ({'event': 'start', 'time_s': 2., 'resumed_from': 2, 'machine': MACHINE | {'cpu_isa': isa}},
                   {'event': 'checkpoint', 'time_s': 3., 'step': 4, 'params_digest': digest}):
        file.write(f'{json.dumps(line)}\n')
    return 75

  monkeypatch.setattr(job.train, 'run', train)
  words = ['replay', f'--workdir={run}', '--segment=2']
  digest, isa = 'abc', 'AVX2'
  assert main.run(words) == 0
  assert 'EQUAL: the parameters of step 4, trained from step 2' in capsys.readouterr().out
  digest = 'abd'
  assert main.run(words) == 3 and 'DIFFERS: the parameters of step 4: abc -> abd' in capsys.readouterr().out
  isa = 'AVX512'
  assert main.run(words) == 4 and 'cpu_isa: AVX2 -> AVX512' in capsys.readouterr().out
  digest, isa = 'abc', 'AVX2'
  change(record, checkpoints={'2': 'ab', '4': 'xyz'})
  assert main.run([*words, str(record)]) == 3 and 'xyz -> abc' in capsys.readouterr().out
  change(record, checkpoints={'dino_seed0': 'ab', 'dino_seed1': 'abc'})
  assert main.run([*words, str(record)]) == 2
  assert 'record: expected the record of one run, got one of 2 runs. Leave' in capsys.readouterr().err
  assert main.run(['replay', f'--workdir={run}', '--segment=4']) == 2
  assert 'with a later one, got 4. Use one of 2' in capsys.readouterr().err
  (run / 'metrics.jsonl').unlink()  # as of a published checkpoint; the record has the digests
  change(record, checkpoints={'2': 'ab', '4': 'abc'})
  assert main.run([*words, str(record)]) == 0 and 'EQUAL' in capsys.readouterr().out
  digest = 'abd'
  assert main.run([*words, str(record)]) == 3 and 'abc -> abd' in capsys.readouterr().out
  assert main.run(words) == 2 and 'has no metrics.jsonl' in capsys.readouterr().err


def test_records_are_listed(record: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                            capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(records, 'FOLDER', record.parent)
  assert main.run(['list', '--records']) == 0
  assert 'record' in (shown := capsys.readouterr().out) and 'Of the images 75.0 % are right' in shown
  assert main.run(['list', '--records=nothing']) == 2
  assert records.read('record').id == 'record'


