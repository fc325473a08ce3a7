"""A hundred checkpoints with one damaged file each: the one before is restored, with a message, or it is an error."""
from __future__ import annotations

import pathlib
import random
import re
import shutil
import subprocess
import sys

import pytest
import runs
import saved

from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.train import checkpoint
from vit_jax.train.step import Program

CASES = 104
SEED = 0


def cases(folder: pathlib.Path) -> list[tuple[str, str, str]]:
  """Step, file and damage: every file of the newest checkpoint twice, then some of the one before."""
  rng = random.Random(SEED)
  files = {step: sorted(str(p.relative_to(folder / step)) for p in (folder / step).rglob('*') if p.is_file())
           for step in '12'}
  found = [('2', name, how) for name in files['2'] for how in rng.sample(sorted(saved.DAMAGES), 2)]
  more = [('1', name, how) for name in files['1'] for how in saved.DAMAGES]
  return (found + rng.sample(more, max(CASES - len(found), 20)))[:max(CASES, len(found))]


@pytest.mark.slow(reason='about 40 s on an idle core: 100 restores, of which each saves again')
@pytest.mark.timeout(3000)
def test_a_hundred_damaged_checkpoints_are_never_read_as_if_they_were_whole(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  built = saved.program()
  whole = tmp_path / 'whole' / 'checkpoints'
  digests = saved.write(whole, built, [1, 2])
  rest = trees.digest((built.init_fn().opt, built.init_fn().extra))
  ends: dict[str, int] = {}
  for step, name, how in cases(whole):
    folder = tmp_path / 'run' / 'checkpoints'
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(whole, folder)
    saved.DAMAGES[how](folder / step / name)
    caplog.clear()
    end = restore(folder, built, digests, rest, caplog)
    ends[end] = ends.get(end, 0) + 1
    assert end in ('whole', 'the one before'), (step, name, how, end)
    assert end == 'whole' or step == '2', (step, name, how, end)
  print(sum(ends.values()), ends)
  assert sum(ends.values()) >= 100 and ends['the one before'] >= 25


def restore(folder: pathlib.Path, built: Program, digests: dict[int, str], rest: str,
            caplog: pytest.LogCaptureFixture) -> str:
  """What came of a start on this folder; saving afterwards has to work."""
  checkpointer = checkpoint.Checkpointer(folder, keep=saved.KEEP)
  try:
    got = checkpointer.restore(built.placed_state)
    assert got is not None
    step = int(got.state.step)
    if trees.digest(got.state.params) != digests[step] or trees.digest((got.state.opt, got.state.extra)) != rest:
      return 'SILENT'
    if got.about['data'] != {'seed': step}:
      return 'SILENT'
    if step == 1 and 'checkpoint 2 is damaged and set aside' not in caplog.text:
      return 'without a message'
    checkpointer.save(got.state._replace(step=got.state.step + 1), {}, {'test/top1': .5})
    checkpointer.wait()
    return 'whole' if step == 2 else 'the one before'
  except UserError as error:
    return f'error: {error}'
  finally:
    checkpointer.close()


AGAIN = """
import sys
from vit_jax import main
for workdir in sys.argv[1].split(','):
  print(f'In {workdir}', flush=True)
  status = main.run([*sys.argv[2:], f'--workdir={workdir}'])
  assert status == 0, status
  sys.stderr.flush()
"""


@pytest.mark.slow(reason='about 40 s: two starts of the program, one of which goes on with five runs')
def test_the_program_goes_on_from_the_checkpoint_before_without_a_traceback(tmp_path: pathlib.Path) -> None:
  settings = ('--config.length=6 steps', '--config.checkpoints.every=2 steps')
  runs.finish(runs.start(tmp_path / 'whole', *settings))
  want = runs.final(tmp_path / 'whole')['params_digest']
  damaged = []
  for item, how in (('params', 'empty'), ('opt', 'absent'), ('extra', 'folder'), ('opt', 'zeros')):
    workdir = pathlib.Path(shutil.copytree(tmp_path / 'whole', tmp_path / f'{item}_{how}'))
    damaged.append(workdir)
    for path in list((workdir / 'checkpoints' / '6' / item / 'ocdbt.process_0' / 'd').iterdir()):
      saved.DAMAGES[how](path)  # some of them hold nothing that is still used
  (tmp_path / 'whole' / 'checkpoints' / '6' / '_CHECKPOINT_METADATA').write_text('[]')
  damaged.append(tmp_path / 'whole')
  words = ['--config=digits', *runs.TINY, *settings]
  process = subprocess.Popen([sys.executable, '-c', AGAIN, ','.join(map(str, damaged)), *words],
                             env=runs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  out = runs.finish(process, timeout_s=900.)
  assert 'Traceback' not in out and 'Exception ignored' not in out and 'never awaited' not in out, out
  for workdir, part in zip(damaged, re.split('^In .*$', out, flags=re.MULTILINE)[1:], strict=True):
    assert 'checkpoint 6 is damaged and set aside' in part and 'Resuming at step 4 of 6' in part
    assert runs.final(workdir)['params_digest'] == want and (workdir / 'damaged' / '6').is_dir()
