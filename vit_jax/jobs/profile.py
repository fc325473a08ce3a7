"""`--job=profile`: asks a running run for a profile of some steps on some of its hosts, and waits for it."""
from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

from vit_jax.core import json_text
from vit_jax.core.errors import UserError
from vit_jax.record import storage
from vit_jax.record.profile_request import ANSWER, FOLDER, REQUEST, Request

LOOK_S = 0.5, 5.
"""Seconds between two looks for the answer: on this machine, and in object storage."""


def run(workdir: storage.Path, host: Sequence[int], steps: int, timeout: int) -> int:
  """Writes the request, waits for the answer and prints where the profiles are; exit status 0.

  Args:
    workdir: of the run, which is training.
    host: indexes of the processes to profile.
    steps: number of steps.
    timeout: seconds to wait.

  Raises:
    UserError: there is no such run, it does not answer in time, or it cannot make the profile.
  """
  if not (workdir / 'config.json').exists():
    raise UserError(f'--workdir={workdir}: expected the directory of a run that is training, got one without '
                    'config.json. Pass the --workdir of the run.')
  request = Request(uuid.uuid4().hex, tuple(dict.fromkeys(host)), steps, time.time() + timeout)
  path = workdir / FOLDER / REQUEST
  storage.write_bytes(path, request.to_json().encode())
  print('Waiting for the run, which looks for requests at each interval of train.log_every.', flush=True)
  try:
    found = wait(workdir, request)
  finally:
    with contextlib.suppress(*storage.faults()):
      path.unlink(missing_ok=True)
  errors = []
  for one, answer in sorted(found.items(), key=lambda item: int(item[0])):
    if 'error' in answer:
      errors.append(str(answer['error']))
    else:
      print(f'Host {one} ({answer["name"]}), steps {answer["first"]:,} to {answer["last"]:,}: {answer["folder"]}')
  if len(errors) < len(found):
    print(f'tensorboard --logdir={workdir / FOLDER}', flush=True)
  if errors:
    raise UserError('\n'.join(errors))
  return 0


def wait(workdir: storage.Path, request: Request) -> dict[str, dict[str, Any]]:
  """Returns the answers of the processes to a request, by their indexes.

  Raises:
    UserError: there is none in time.
  """
  look_s = LOOK_S[0 if storage.is_local(workdir) else 1]
  while time.time() < request.until_s:
    storage.refresh(workdir)
    with contextlib.suppress(ValueError, *storage.faults()):
      found = json_text.parse(storage.read_text(workdir / FOLDER / ANSWER))
      if found.get('id') == request.id:
        return dict(found['hosts'])
    time.sleep(look_s)
  raise UserError(f'--workdir={workdir}: expected an answer of the run in time, got none. Check that the run is '
                  'training; it answers after two intervals of train.log_every, and after the steps themselves. Set '
                  '--timeout to wait longer.')
