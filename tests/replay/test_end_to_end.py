"""A tiny run is recorded and replayed by processes of its own, also in part."""
from __future__ import annotations

import json
import pathlib

import pytest

from tests import runs
from vit_jax.replay import records

pytestmark = pytest.mark.slow(reason='60 s: five processes that train for some steps')
EXTRA = ('--config.length=60 steps', '--config.checkpoints.every=20 steps', '--config.checkpoints.keep_latest=9')


def test_a_run_is_recorded_and_replayed_whole_and_in_part(tmp_path: pathlib.Path) -> None:
  runs.finish(runs.start(tmp_path / 'run', *EXTRA))
  file = tmp_path / 'record.json'
  assert runs.command('record', str(tmp_path / 'run'), '--claim={test/top1@ema:.1%} of the digits.', f'--to={file}'
                      ).returncode == 0
  record = records.read(str(file))
  assert [*record.checkpoints] == ['20', '40', '60'] and record.data['digits test'].examples == 360
  done = runs.command('replay', str(file))
  assert done.returncode == 0 and '6 values and 4 digests of parameters, bit for bit' in done.stdout, done.stdout
  done = runs.command('replay', f'--workdir={tmp_path / "run"}', '--segment=20', str(file))
  assert done.returncode == 0 and 'EQUAL: the parameters of step 40' in done.stdout, done.stdout + done.stderr
  assert not (tmp_path / 'run' / 'checkpoints' / '21').exists()
  plain = json.loads(file.read_text())
  plain['checkpoints']['40'] = '0' * 64
  file.write_text(json.dumps(plain))
  done = runs.command('replay', str(file))
  assert done.returncode == 3 and '\n  parameters at 40: 000000000000 -> ' in done.stdout, done.stdout
