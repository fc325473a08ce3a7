"""Tasks of VTAB from the sets of TFDS to the table, with a tiny network on tiny pictures."""
from __future__ import annotations

import json
import pathlib
import time

import jax
import numpy as np
import pytest

from tests.data import vtab_sets
from vit_jax import main
from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.data.formats.vtab import DATASETS, TASKS
from vit_jax.data.source import read_one
from vit_jax.jobs import train
from vit_jax.recipes import vtab
from vit_jax.study import table

pytest.importorskip('tensorflow_datasets')
pytestmark = pytest.mark.usefixtures('one_device', 'no_page')

OVERRIDES = [
    'length=3 steps', 'batch_size=16', 'image_px=8,8', 'model.patch=4', 'model.width=16', 'model.depth=1',
    'model.heads=2', 'model.mlp.hidden=16', 'optimizer.schedule.warmup=1 steps', 'evals.test.batch_size=40',
    'train.progress=false']


def sizes(dataset: str) -> dict[str, int]:
  """Enough for 800 and 200, and a few to test on."""
  parts, needed = DATASETS[dataset].parts, {'train': 800, 'val': 200, 'test': 37}
  found: dict[str, int] = {}
  for part, rule in parts.items():
    found[rule.split] = max(found.get(rule.split, 0), -(-needed[part] * 100 // (rule.stop - rule.start)))
  return found | {split: 1 for split in vtab_sets.FIXTURES[dataset].published if split not in found}


def prepare(task: str, data_dir: pathlib.Path) -> tuple[schema.Study, schema.Config, int]:
  """Writes the set of a task; its study, its run, and the number of images to test on."""
  vtab_sets.write(TASKS[task].dataset, data_dir, sizes(TASKS[task].dataset))
  study = files.load_study(f'vtab:Ti/16,seeds=1,tasks={task}', [*OVERRIDES, f'data.data_dir={data_dir}'])
  [part] = [rule for split, rule in DATASETS[TASKS[task].dataset].parts.items() if split == 'test']
  num = sizes(TASKS[task].dataset)[part.split]
  return study, next(iter(study.runs.values())), part.stop * num // 100 - part.start * num // 100


def run(task: str, data_dir: pathlib.Path, workdir: pathlib.Path) -> schema.Result:
  study, config, num_test = prepare(task, data_dir)
  [name] = study.runs
  assert train.run(config, workdir) == 0
  final = json.loads((workdir / 'final.json').read_text())
  assert final['num_examples'] == {'test': num_test}
  assert 0 <= final['metrics']['test/top1'] <= 1 and final['step'] == 3
  result = schema.Result(config, str(workdir), 3, 1., 1, 1., final['metrics'], final['metrics']['test/top1'])
  [row, *means] = table.make_rows(study, {name: result})
  assert row['task'] == task and row['runs'] == 1 and means[-1]['tasks'] == '1 of 19'
  return result


@pytest.mark.slow(reason='7 s: a run')
def test_a_task_runs_from_its_set_to_the_table(tmp_path: pathlib.Path) -> None:
  run('smallnorb/azimuth', tmp_path / 'sets', tmp_path / 'run')


@pytest.mark.slow(reason='about 3 s each: the set is written and its first batches are made')
@pytest.mark.parametrize('task', [task for task in vtab.TASKS if task != 'smallnorb/azimuth'])
def test_every_other_task_begins(task: str, tmp_path: pathlib.Path) -> None:
  """All but the compiled step: the set, its parts, batches to train on and to measure, and the shapes of a step."""
  config, num_test = prepare(task, tmp_path / 'sets')[1:]
  begun = train.Run(config, tmp_path / 'run', time.monotonic())
  batch = next(iter(begun.loader.batches(0)))
  assert batch['image'].shape == (16, 8, 8, 3) and len(begun.data.train) == 1000
  assert batch['label'].min() >= 0 and batch['label'].max() < len(begun.data.class_names)
  _, metrics = jax.eval_shape(begun.parts.program.step_fn, begun.parts.program.abstract_state, batch)
  zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), metrics)
  assert 'loss' in zeros.unpack().means
  source, classes = begun.data.eval, range(len(begun.data.class_names))
  assert len(source) == num_test and all(read_one(source, i).label in classes for i in range(num_test))
  begun.loader.close()


def test_a_task_whose_set_is_not_there_says_how_to_get_it(tmp_path: pathlib.Path) -> None:
  config = files.load_study('vtab:Ti/16,seeds=1,tasks=resisc45', [f'data.data_dir={tmp_path}']).runs['resisc45_seed0']
  with pytest.raises(UserError, match='VTAB task resisc45: .* is not prepared .* manually .* python -m vit_jax.data'):
    train.run(config, tmp_path / 'run')


@pytest.mark.slow(reason='a study of two runs in processes of their own: about a minute')
def test_a_study_tells_what_lacks_goes_on_without_it_and_later_with_it(tmp_path: pathlib.Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
  sets, folder = tmp_path / 'sets', tmp_path / 'study'
  words = ['study', '--config=vtab:Ti/16,seeds=1,tasks=smallnorb/azimuth+eurosat', f'--workdir={folder}',
           f'--config.data.data_dir={sets}', *(f'--config.{one}' for one in OVERRIDES)]
  vtab_sets.write('smallnorb', sets, sizes('smallnorb'))
  assert main.run(words) == 2
  out = capsys.readouterr().out
  assert 'VTAB task eurosat: tfds:eurosat/rgb is not prepared' in out and '1 of 2 runs are finished, 1 failed' in out
  assert f'python -m vit_jax.data.formats.tfds_build eurosat/rgb {sets}' in (folder / 'table.html').read_text()
  first = (folder / 'runs' / 'smallnorb-azimuth_seed0' / 'final.json').stat().st_mtime_ns
  vtab_sets.write('eurosat/rgb', sets, sizes('eurosat/rgb'))
  assert main.run(words) == 0 and '2 of 2 runs are finished' in capsys.readouterr().out
  assert (folder / 'runs' / 'smallnorb-azimuth_seed0' / 'final.json').stat().st_mtime_ns == first
  assert main.run(['report', f'--workdir={folder}']) == 0
  out = capsys.readouterr().out
  assert 'mean of structured' in out and 'VTAB-19' in out and '2 of 19' in out


def test_a_table_is_printed_from_the_directory_of_a_study(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected the table of a study, got no such file'):
    table.show(tmp_path)
  study = files.load_study('transfer:L/16,tasks=pets', [])
  table.write(tmp_path, study, {}, {})
  text = table.show(tmp_path).splitlines()
  assert text[0].split('  ')[0] == 'set' and 'published only' in text[1] and '88.55 ± 0.04' in text[1]
  assert text[-1] == f'Page: {tmp_path}/table.html'
