"""Runs the program in processes of its own, to kill it, and reads what it leaves."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = ('--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2', '--config.model.mlp.hidden=16',
        '--config.batch_size=40', '--config.train.ema=.9', '--config.evals.test.every=20 steps',
        '--config.evals.test.batch_size=80')


def environment() -> dict[str, str]:
  """Of a program on one device."""
  found = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return found | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0', 'PYTHONPATH': str(ROOT)}


def start(workdir: pathlib.Path, *extra: str, config: str = 'digits') -> subprocess.Popen[str]:
  """A training run of a tiny model in a process group of its own, on one device."""
  return begin(f'--config={config}', f'--workdir={workdir}', *TINY, *extra)


def begin(*words: str) -> subprocess.Popen[str]:
  """Starts any job in a process group of its own, on one device."""
  return subprocess.Popen([sys.executable, '-m', 'vit_jax.main', *words], env=environment(), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], *, status: int = 0, timeout_s: float = 180.) -> str:
  """Waits for the end; what was printed."""
  out, _ = process.communicate(timeout=timeout_s)
  assert process.returncode == status, out[-3000:]
  return out


def events(workdir: pathlib.Path, name: str) -> list[dict]:
  """Events of a kind in `metrics.jsonl`, all of them, whatever was lost later."""
  path = workdir / 'metrics.jsonl'
  found = []
  for line in path.read_text().splitlines() if path.exists() else []:
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if row.get('event') == name:
      found.append(row)
  return found


def wait_for_checkpoint(process: subprocess.Popen[str], workdir: pathlib.Path, *, number: int = 1,
                        timeout_s: float = 120.) -> None:
  """Returns once so many checkpoints are whole on disk."""
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline:
    folder = workdir / 'checkpoints'
    if folder.is_dir() and sum(p.name.isdigit() for p in folder.iterdir()) >= number:
      return
    assert process.poll() is None, (process.communicate()[0] or '')[-3000:]
    time.sleep(.05)
  raise AssertionError(f'no checkpoint in {timeout_s:.0f} s')


def wait_for_step(process: subprocess.Popen[str], workdir: pathlib.Path, step: int) -> None:
  """Returns once the record has this step."""
  while not ((workdir / 'metrics.jsonl').exists() and step in losses(workdir)):
    assert process.poll() is None, (process.communicate()[0] or '')[-3000:]
    time.sleep(.05)


def kill(process: subprocess.Popen[str]) -> None:
  """kill -9, for the process alone: what it started has to see to itself."""
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()


def losses(workdir: pathlib.Path) -> dict[int, float]:
  """Training loss by step, the last one logged for each."""
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines() if line.endswith('}')]
  return {row['step']: row['train/loss'] for row in rows if 'train/loss' in row}


def final(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / 'final.json').read_text())


def command(*words: str) -> subprocess.CompletedProcess[str]:
  """Runs any job to its end, on one device."""
  return subprocess.run([sys.executable, '-m', 'vit_jax.main', *words], env=environment(), capture_output=True,
                        text=True, check=False, timeout=300)
