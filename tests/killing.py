"""Kills a training run with SIGKILL at many random moments: `python tests/killing.py WORKDIR KILLS SEED`.

Every start is a process of its own, forked from one that has imported the program but touched no device, which saves
half of the time of a start. A third of the kills comes at any moment from the beginning of a start on; the others come
when a save has just begun, or up to a second after the first new checkpoint, so that saves are hit, and what follows
them. A start that is not killed ends the run. Prints a line of JSON for each start: when it was killed, and why then.
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
       '--config.model.mlp=16', '--config.batch_size=40', '--config.train.ema=.9', '--config.train.progress=false',
       '--config.evals.test.every=300 steps', '--config.evals.test.batch_size=80', '--config.length=300 steps',
       '--config.checkpoints.every=3 steps', '--config.train.log_every=1 steps')
MOMENTS = ('any', 'save', 'after')
GIVEN_UP_S = 600.


def begin(workdir: pathlib.Path) -> int:
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
    status = main.run([*RUN, f'--workdir={workdir}'])
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
  sys.exit(kill_at_random(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
