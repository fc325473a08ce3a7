"""What each job says is "the run", for every policy of checkpoints and every way in which a run may be restarted.

`python tests/restarts.py` prints the table, `python tests/restarts.py best killed` a part of it, named by policies and
ways. Every start is a process of its own, forked from one that has imported the program but touched no device. `check`
compares what the jobs say with what is on the disk, and returns the differences.
"""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
METRIC = 'test/nll'
TINY = ('--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2', '--config.model.mlp.hidden=16',
        '--config.batch_size=40', '--config.train.progress=false', '--config.evals.test.batch_size=80',
        '--config.train.log_every=5 steps', '--config.data.eval_split=test[:80]', '--config.trackers.tensorboard=false')
RUN = ('train', '--config=digits', *TINY, '--config.train.ema=0', '--config.optimizer.lr=.3',
       '--config.optimizer.schedule.warmup=100 %', '--config.length=40 steps', '--config.checkpoints.every=5 steps',
       '--config.evals.test.every=5 steps')
"""Such a learning rate makes the loss worse after the first steps, so that the best checkpoint is not the last."""
BEST = f'--config.checkpoints.keep_best={METRIC}'
STOP = (f'--config.train.early_stop.metric={METRIC}', '--config.train.early_stop.patience=4')
POLICIES: dict[str, tuple[str, ...]] = {
    'latest': ('--config.checkpoints.keep_latest=1',),
    'latest 2': (),
    'best': (BEST, '--config.checkpoints.keep_latest=1'),
    'best of another view': (f'{BEST}@ema', '--config.checkpoints.keep_latest=1', '--config.train.ema=.5'),
    'every': ('--config.checkpoints.keep_latest=1', '--config.checkpoints.keep_every=15 steps'),
    'best, every and latest 3': (BEST, '--config.checkpoints.keep_latest=3',
                                 '--config.checkpoints.keep_every=20 steps'),
    'by the clock': ('--config.checkpoints.every=0.01 minutes', '--config.checkpoints.keep_every=0.03 minutes',
                     '--config.checkpoints.keep_latest=1'),
    'early stop': (*STOP, '--config.checkpoints.keep_latest=1'),
    'best and early stop': (*STOP, BEST, '--config.checkpoints.keep_latest=1'),
}
"""Settings by the name of the policy."""
JOBS: dict[str, tuple[str, ...]] = {
    'finetune': ('finetune', '--weights={base}', '--data=digits', '--compare=no', '--config.evals.val.batch_size=80',
                 '--config.batch_size=40', '--config.train.progress=false', '--config.trackers.tensorboard=false',
                 '--config.length=40 steps', '--config.checkpoints.every=5 steps', '--config.evals.val.every=5 steps',
                 '--config.optimizer.lr=1', '--config.optimizer.schedule.warmup=100 %'),
}
"""Jobs that train with their own policy, on the weights of another run."""
COSTS = ('seconds', 'processor_s', 'training_processor_s')


@dataclasses.dataclass
class Said:
  """What a job says: the step, the metric and the SHA-256 of the run; None if it does not say it."""
  step: int | None = None
  value: float | None = None
  digest: str | None = None


def begin(words: Sequence[str], log: pathlib.Path) -> int:
  """Runs the program in a process of its own, forked from this one; its number."""
  sys.stdout.flush()
  if number := os.fork():
    return number
  file = open(log, 'a')
  sys.stdout = sys.stderr = file
  for stream in (1, 2):
    os.dup2(file.fileno(), stream)
  from vit_jax import main
  status = 1
  try:
    status = main.run(list(words))
  finally:
    file.flush()
    os._exit(status)


def wait(number: int) -> int:
  return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def steps(workdir: pathlib.Path) -> list[int]:
  folder = workdir / 'checkpoints'
  return sorted(int(name) for name in os.listdir(folder) if name.isdigit()) if folder.is_dir() else []


def stopped(words: Sequence[str], workdir: pathlib.Path, log: pathlib.Path, number: signal.Signals) -> int:
  """Runs until a checkpoint after step 12 exists, and sends a signal; the exit status."""
  child = begin(words, log)
  while max(steps(workdir), default=0) < 12 and not (workdir / 'final.json').exists():
    time.sleep(.001)
  os.kill(child, number)
  return wait(child)


def once(words: Sequence[str], workdir: pathlib.Path, log: pathlib.Path) -> None:
  assert wait(begin(words, log)) == 0, log.read_text()[-3000:]


def paused(words: Sequence[str], workdir: pathlib.Path, log: pathlib.Path) -> None:
  once([*words, '--until=40 %'], workdir, log)
  once(words, workdir, log)


def asked(words: Sequence[str], workdir: pathlib.Path, log: pathlib.Path) -> None:
  status = stopped(words, workdir, log, signal.SIGUSR1)
  # After the last step nothing is left to stop for: the signal ends the process, and the next start completes the run.
  assert status in (0, 75, -signal.SIGUSR1), f'status {status}\n{log.read_text()[-3000:]}'
  once(words, workdir, log)


def killed(words: Sequence[str], workdir: pathlib.Path, log: pathlib.Path) -> None:
  stopped(words, workdir, log, signal.SIGKILL)
  once(words, workdir, log)


def twice(words: Sequence[str], workdir: pathlib.Path, log: pathlib.Path) -> None:
  asked(words, workdir, log)
  before = files(workdir)
  once(words, workdir, log)
  changed = {name for name, content in files(workdir).items() if before.get(name) != content}
  assert not changed, f'a finished run was started again and changed {sorted(changed)}'


def files(workdir: pathlib.Path) -> dict[str, bytes]:
  """The content of every file of a run by name, without its lock."""
  return {str(path.relative_to(workdir)): path.read_bytes() for path in workdir.rglob('*')
          if path.is_file() and path.name != '.lock'}


WAYS: dict[str, Callable[[Sequence[str], pathlib.Path, pathlib.Path], None]] = {
    'one process': once, 'paused': paused, 'stopped by USR1': asked, 'killed': killed, 'started after its end': twice}


def ask(workdir: pathlib.Path, out: pathlib.Path, *, exports: bool = True) -> dict[str, Said]:
  """What the jobs say of a run; each writes into `out`. Without `exports`, all but the job export, which compiles."""
  from vit_jax.config import engine
  from vit_jax.core import trees
  from vit_jax.jobs import report
  from vit_jax.weights import card, loading
  source, found = str(workdir), dict[str, Said]()
  view = 'ema' if engine.read_file(workdir / 'config.json').train.ema else 'student'
  name = metric_of(engine.read_file(workdir / 'config.json').checkpoints.keep_best)
  name += f'@{view}' * (view != 'student' and '@' not in name)

  def job(*words: str) -> None:
    from vit_jax import main
    assert main.run(list(words)) == 0, words

  job('evaluate', f'--workdir={source}', f'--to={out}')
  evaluated = json.loads((out / 'evaluate.json').read_text())
  found['evaluate'] = Said(evaluated['step'], evaluated['metrics'][name], evaluated['params_digest'])
  page = report.to_html([workdir])
  metric = re.search(rf'{re.escape(name)}</t[dh]>\s*<td[^>]*>([\d.]+)( ?%)?', page)
  at = re.search(r'those of step (\d+)', page) or re.search(r'finished at step (\d+)', page)
  digest = re.search(r'\b[0-9a-f]{64}\b', page)
  found['report'] = Said(int(at[1]) if at else None, float(metric[1]) / (100 if metric[2] else 1) if metric else None,
                         digest and digest[0])
  job('convert', f'--weights={source}', f'--to={out / "net.npz"}')
  if exports:
    job('export', f'--weights={source}', f'--to={out / "net.stablehlo"}')
  weights = loading.load(source)
  cards = {**({'export': (out / 'net.stablehlo.md').read_text()} if exports else {}),
           'convert': (out / 'net.npz.md').read_text(),
           'push': card.text(weights, 'hf://me/net', written_as='huggingface', how='', is_folder=True)}
  for one, content in cards.items():
    metric = re.search(rf'\| {re.escape(name)} \| ([\d.]+) \|', content)
    at, digest = re.search(r'at step (\d+)', content), re.search(r'bit for bit: `(\w+)`', content)
    found[one] = Said(int(at[1]) if at else None, float(metric[1]) if metric else None, digest and digest[1])
  used = trees.digest(weights.params)
  same = [step for step in steps(workdir) if trees.digest(loading.load(f'{source}/checkpoints/{step}').params) == used]
  found['predict'] = Said(same[-1] if same else None)
  return found


def metric_of(keep_best: str) -> str:
  """The metric that the jobs are asked for."""
  return keep_best or METRIC


def truth(workdir: pathlib.Path) -> Said:
  """The step of the run by its config, the record and the checkpoints; computed without the code that is tested."""
  config = json.loads((workdir / 'config.json').read_text())
  best, kept = config['checkpoints']['keep_best'], steps(workdir)
  rows: dict[int, dict[str, float]] = {}
  for line in (workdir / 'metrics.jsonl').read_text().splitlines():
    if 'event' not in (row := json.loads(line)):
      rows.setdefault(row['step'], {}).update(row)
  every = 5 if not config['checkpoints']['every'].endswith('minutes') else 1
  paused = {json.loads(path.read_text())['step'] for path in workdir.glob('paused_*.json')}
  saved = [step for step in rows if best in rows[step] and (step % every == 0 or step in {max(rows), *paused})]
  sign = 1 if best.endswith('nll') or '@' in best else -1
  step = min(saved, key=lambda one: (sign * rows[one][best], -one)) if best else max(kept)
  meta = json.loads((workdir / 'checkpoints' / str(step) / 'meta' / 'metadata').read_text()) if step in kept else None
  return Said(step, rows[step].get(metric_of(best)), meta['body']['digests']['params'] if meta else 'not on the disk')


def differences(said: dict[str, Said], right: Said) -> list[str]:
  """What the jobs say that is not so."""
  found = []
  for name, one in said.items():
    found += [f'{name}: step {one.step}, not {right.step}'] * (one.step != right.step)
    found += [f'{name}: {one.value}, not {right.value}'] * (
        one.value is not None and right.value is not None and abs(one.value - right.value) > 6e-4 * max(1, right.value))
    found += [f'{name}: SHA-256 {one.digest}, not {right.digest}'] * (one.digest not in (None, right.digest))
  return found


def check(policy: str, way: str, folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
  """Runs one cell of the table in processes of their own; a row of the table, and what is wrong."""
  workdir, log = folder / 'run', folder / 'log.txt'
  words, problems = [*RUN, *POLICIES.get(policy, ()), f'--workdir={workdir}'], []
  if policy in JOBS:
    once([*RUN, '--config.length=5 steps', f'--workdir={folder / "base"}'], folder / 'base', log)
    words = [*(word.format(base=folder / 'base') for word in JOBS[policy]), f'--workdir={workdir}']
  began = time.monotonic()
  try:
    WAYS[way](words, workdir, log)
  except AssertionError as error:
    return {'said': {}}, [str(error)]
  lasted = time.monotonic() - began
  if not (child := os.fork()):
    try:
      with open(folder / 'jobs.txt', 'a') as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        found = ask(workdir, folder / 'out')
        (folder / 'said.json').write_text(json.dumps({name: dataclasses.asdict(one) for name, one in found.items()}))
        os._exit(0)
    except BaseException:
      import traceback
      traceback.print_exc()
      os._exit(1)
  if wait(child):
    return {'said': {}}, [*problems, (folder / 'jobs.txt').read_text()[-2000:]]
  said = {name: Said(**one) for name, one in json.loads((folder / 'said.json').read_text()).items()}
  right, final = truth(workdir), json.loads((workdir / 'final.json').read_text())
  problems += differences(said, right)
  starts = sum('"event": "start"' in line for line in (workdir / 'metrics.jsonl').read_text().splitlines())
  costs = {name: final.get(name) for name in (*COSTS, 'starts')}
  problems += [f'final.json: starts {final.get("starts")}, not {starts}'] * (final.get('starts') != starts)
  problems += [f'final.json: {final["seconds"]:.1f} s of {lasted:.1f} s'] * (final['seconds'] < .5 * lasted)
  line = next((one for one in log.read_text().splitlines() if 'best test/nll' in one), '')
  return {'disk': steps(workdir), 'run': right, 'said': said, 'costs': costs, 'lasted': lasted, 'line': line}, problems


def main(wanted: Sequence[str]) -> int:
  """Prints the table; 1 if something is wrong."""
  bad = 0
  print('| policy | way | on the disk | the run | jobs that agree | s, processor s, of training, starts | wrong |')
  print('|---|---|---|---|---|---|---|')
  names = [*POLICIES, *JOBS]
  for policy in (one for one in names if one in wanted or not {*wanted} & {*names}):
    for way in (one for one in WAYS if one in wanted or not {*wanted} & {*WAYS}):
      if way == 'paused' and policy in JOBS:
        continue  # only `train` has --until
      with tempfile.TemporaryDirectory() as folder:
        row, problems = check(policy, way, pathlib.Path(folder))
        bad += bool(problems)
        right = row.get('run', Said())
        agree = [name for name, one in row['said'].items() if one.step == right.step]
        costs = ', '.join('-' if value is None else f'{value:.3g}' for value in row.get('costs', {}).values())
        value = 'not measured' if right.value is None else f'{right.value:.4f}'
        print(f'| {policy} | {way} | {row.get("disk")} | step {right.step}, {value}, {str(right.digest)[:8]} | '
              f'{", ".join(agree)} | {costs} | {"; ".join(problems) or "-"} |', flush=True)
  return int(bad > 0)


if __name__ == '__main__':
  sys.path.insert(0, str(ROOT))
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
  import sklearn.datasets  # noqa: F401

  import vit_jax.commands
  import vit_jax.jobs.evaluate
  import vit_jax.jobs.train
  import vit_jax.main
  import vit_jax.parallel.hardware  # noqa: F401
  sys.exit(main(sys.argv[1:]))
