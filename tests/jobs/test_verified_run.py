"""A run whose data turn out to be changed: it stops, is saved, and resumes with the right data to the same end."""
from __future__ import annotations

import json
import pathlib
import threading

import pytest

from tests.data import prepared_sets
from tests.jobs.test_train import TINY
from vit_jax import main
from vit_jax.data.files import verification
from vit_jax.data.pipeline import verifying


def run(workdir: pathlib.Path, data: pathlib.Path) -> int:
  return main.run(['--job=train', *TINY, f'--workdir={workdir}', f'--config.data.source=array_record:{data}',
                   '--config.data.in_memory=no', '--config.data.workers=0'])


@pytest.mark.slow(reason='12 s: three runs')
def test_a_run_on_a_changed_shard_stops_with_its_last_step_saved_and_resumes_to_the_same_end(
    one_device: None, no_page: None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  data = prepared_sets.write(tmp_path / 'set')
  assert run(tmp_path / 'whole', data) == 0
  path = data / 'train-00003-of-00004.array_record'
  right = path.read_bytes()
  changed = bytearray(right)
  changed[-2**16 - 1] ^= 1  # in the padding, so that no image differs
  path.write_bytes(changed)
  gate, check, digest = threading.Event(), verifying.Used.check, verification.Background._digest

  def slow(self: verification.Background, path: str) -> str | None:
    gate.wait()
    return digest(self, path)

  def at_six(self: verifying.Used, number: int) -> None:
    if number == 6 and self._running:
      gate.set()
      self._running._thread.join()
    check(self, number)

  with monkeypatch.context() as patch:
    patch.setattr(verification.Background, '_digest', slow)
    patch.setattr(verifying.Used, 'check', at_six)
    assert run(tmp_path / 'split', data) == 2
  said = capsys.readouterr().err
  assert f'error: {data}: expected unchanged shards, got 1 of 4 with another checksum: {path.name}' in said
  assert 'Step 6 is saved; run the same command again to resume.' in said and 'Traceback' not in said
  path.write_bytes(right)
  assert run(tmp_path / 'split', data) == 0
  whole, split = (json.loads((tmp_path / name / 'final.json').read_text()) for name in ('whole', 'split'))
  assert whole['params_digest'] == split['params_digest'] and split['step'] == 12
