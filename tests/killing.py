"""Kills a training run with SIGKILL at many moments: `python tests/killing.py WORKDIR KILLS SEED [placed]`.

Every start is a process of its own, forked from one that has imported the program but touched no device, which saves
half of the time of a start. A third of the kills comes at any moment from the beginning of a start on; the others come
when a save has just begun, or up to a second after the first new checkpoint, so that saves are hit, and what follows
them. A start that is not killed ends the run. Prints a line of JSON for each start: when it was killed, and why then.

With `placed`, the record of the run decides the moment: in a training step, in a save, in an evaluation, and in the
last tenth of the kills at the end of the run, where it evaluates, saves and writes its results. The line says what was
found after the kill: the newest step of the record, what was under way, and whether there were results.
"""
from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUN = ('--config=digits', '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
       '--config.model.mlp.hidden=16', '--config.batch_size=40', '--config.train.ema=.9',
       '--config.train.progress=false',
       '--config.evals.test.every=300 steps', '--config.evals.test.batch_size=80', '--config.length=300 steps',
       '--config.checkpoints.every=3 steps', '--config.train.log_every=1 steps')
MOMENTS = ('any', 'save', 'after')
PLACED = ('step', 'save', 'step', 'evaluation', 'save', 'step')
STEPS, SAVED_EVERY, EVALUATED_EVERY = 1200, 8, 10
SLOWER = ('--config.evals.test.every=10 steps', '--config.checkpoints.every=8 steps', '--config.batch_size=480',
          '--config.length=1200 steps')
"""Of placed kills: half of the time or more no save is under way, so that a kill can be in a step alone."""
GIVEN_UP_S = 600.


def begin(workdir: pathlib.Path, *more: str) -> int:
  """Starts the run in a process of its own; its number."""
  number = os.fork()
  if number:
    return number
  sys.stdout = sys.stderr = open(workdir.with_name(f'{workdir.name}.txt'), 'a')
  os.dup2(sys.stdout.fileno(), 1)
  os.dup2(sys.stdout.fileno(), 2)
  from vit_jax import main
  status = 1
  try:
    status = main.run([*RUN, *more, f'--workdir={workdir}'])
  finally:
    sys.stdout.flush()
    os._exit(status)


def names(workdir: pathlib.Path) -> set[str]:
  """What is in the folder of checkpoints."""
  folder = workdir / 'checkpoints'
  return set(os.listdir(folder)) if folder.is_dir() else set()


def wait_for(workdir: pathlib.Path, child: int, moment: str, limit_s: float, rng: random.Random) -> int | None:
  """Returns when it is time to kill: None, or the exit status of a run that has ended before."""
  before, began = names(workdir), time.monotonic()
  until = began + limit_s
  saves = rng.randrange(1, 4)  # the first saves of a start are no others
  while time.monotonic() < until:
    new = names(workdir) - before
    begun = {name for name in new if 'tmp' in name}
    if moment == 'save' and begun and (saves := saves - 1) <= 0:
      time.sleep(rng.uniform(0., .05))
      return None
    before |= begun
    if moment == 'after' and new - begun:
      time.sleep(rng.uniform(0., 1.))
      return None
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
      return os.waitstatus_to_exitcode(status)
    time.sleep(.0005)
  assert moment == 'any', f'no {moment} in {GIVEN_UP_S:.0f} s'
  return None


def rows(workdir: pathlib.Path) -> list[dict]:
  """The complete lines at the end of the record, oldest first."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return []
  with open(path, 'rb') as file:
    file.seek(max(0, os.path.getsize(path) - 20_000))
    lines = file.read().split(b'\n')
  return [json.loads(line) for line in lines[1 if len(lines) > 2 else 0:-1] if line.startswith(b'{')]


def found(workdir: pathlib.Path) -> dict:
  """What a kill left: the newest step of the record, and what was under way."""
  own = [row for row in rows(workdir) if 'step' in row and 'event' not in row]
  step = int(own[-1]['step']) if own else 0
  is_evaluated = any('test/top1' in row for row in own if row['step'] == step)
  saving = any('tmp' in name for name in names(workdir))
  started = [row for row in rows(workdir) if row.get('event') == 'start']
  is_new = bool(own) and (not started or own[-1]['time_s'] > started[-1]['time_s'])
  what = ('start' if not is_new else 'end' if step == STEPS else 'evaluation' if step % EVALUATED_EVERY == 0
          and not is_evaluated else 'save' if saving else 'step')
  return {'step': step, 'in': what, 'saving': saving, 'results': (workdir / 'final.json').exists()}


def wait_placed(workdir: pathlib.Path, child: int, moment: str, rng: random.Random) -> int | None:
  """Returns at the moment, after at least one new checkpoint: None, or the exit status of a run that ended before."""
  before, size, saves = names(workdir), -1, rng.randrange(1, 3)
  until = time.monotonic() + GIVEN_UP_S
  while time.monotonic() < until:
    now = names(workdir)
    num_new = sum(name.isdigit() for name in now - before)
    is_saving = any('tmp' in name for name in now)
    if moment == 'save' and num_new >= saves and is_saving:
      time.sleep(rng.uniform(0., .15))
      return None
    path = workdir / 'metrics.jsonl'
    if path.exists() and (grown := path.stat().st_size) != size:
      size = grown
      newest = next((row for row in reversed(rows(workdir)) if 'train/loss' in row), {'step': 0})['step']
      is_there = {'step': num_new >= saves and not is_saving and newest % EVALUATED_EVERY,
                  'evaluation': num_new and not newest % EVALUATED_EVERY,
                  'end': newest == STEPS, 'save': False}[moment]
      if is_there:
        time.sleep(rng.uniform(0., {'step': .05, 'evaluation': .03, 'end': 1.5}[moment]))
        return None
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
      return os.waitstatus_to_exitcode(status)
    time.sleep(.0005)
  raise AssertionError(f'no {moment} in {GIVEN_UP_S:.0f} s')


def kill_placed(workdir: pathlib.Path, kills: int, seed: int) -> int:
  """Starts and kills the run so many times at placed moments, then lets it end; its exit status."""
  rng, number = random.Random(seed), 0
  while number < kills:
    is_late = number >= kills - kills // 10 or max((int(one) for one in names(workdir) if one.isdigit()),
                                                   default=0) >= STEPS - 2 * SAVED_EVERY
    moment, began = 'end' if is_late else PLACED[number % len(PLACED)], time.monotonic()
    child = begin(workdir, *SLOWER)
    if (workdir / 'final.json').exists():  # a run that is done evaluates once more
      time.sleep(rng.uniform(0., 6.))
      status = None
    else:
      status = wait_placed(workdir, child, moment, rng)
    if status is None:
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      number += 1
    print(json.dumps({'kill': number, 'moment': moment, 'after_s': round(time.monotonic() - began, 2), 'status': status,
                      'left': sorted(names(workdir)), **found(workdir)}), flush=True)
    if status:
      return status
  _, status = os.waitpid(begin(workdir, *SLOWER), 0)
  return os.waitstatus_to_exitcode(status)


def kill_at_random(workdir: pathlib.Path, kills: int, seed: int) -> int:
  """Starts and kills the run so many times, then lets it end; its exit status."""
  rng, longest_s = random.Random(seed), 10.
  for number in range(kills):
    moment, began = MOMENTS[number % len(MOMENTS)], time.monotonic()
    child = begin(workdir)
    limit_s = rng.uniform(0., longest_s) if moment == 'any' else GIVEN_UP_S
    status = wait_for(workdir, child, moment, limit_s, rng)
    longest_s = longest_s if moment == 'any' else time.monotonic() - began
    if status is None:
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
    print(json.dumps({'kill': number, 'moment': moment, 'after_s': round(time.monotonic() - began, 2),
                      'status': status, 'left': sorted(names(workdir))}), flush=True)
    if status is not None:
      return status
  _, status = os.waitpid(begin(workdir), 0)
  return os.waitstatus_to_exitcode(status)


if __name__ == '__main__':
  sys.path.insert(0, str(ROOT))
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
  import sklearn.datasets  # noqa: F401

  import vit_jax.commands
  import vit_jax.jobs.train
  import vit_jax.main
  import vit_jax.parallel.hardware  # noqa: F401
  kill = kill_placed if 'placed' in sys.argv else kill_at_random
  sys.exit(kill(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
