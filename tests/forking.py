"""Starts programs by forking one process that has imported what they import: 4 s of processor time less for each.

    python tests/forking.py serve SOCKET            imports, then runs each request in a fork of itself
    python tests/forking.py run SOCKET WORDS…       runs `vit-jax WORDS…`
    python tests/forking.py script SOCKET FILE      runs a Python file

A client passes its directory, environment and standard streams to the fork, and ends with its status. BLOCK_FLAGS in
the environment of `run` has flags by job, see `blocks.py`.
"""
from __future__ import annotations

import json
import os
import pathlib
import runpy
import signal
import socket
import sys
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]
JOBS = ('jobs.train', 'jobs.evaluate', 'jobs.predict', 'inspect.job', 'jobs.prepare', 'jobs.report')


def serve(where: str) -> None:
  """Imports the jobs without starting a device, then forks for each request, until it is killed."""
  import importlib

  from vit_jax import main  # noqa: F401
  for job in JOBS:
    importlib.import_module(f'vit_jax.{job}')
  server = socket.socket(socket.AF_UNIX)
  server.bind(where)
  server.listen(8)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  while True:
    connection, _ = server.accept()
    if os.fork() == 0:
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      server.close()
      _answer(connection)
    connection.close()


def _answer(connection: socket.socket) -> None:
  """Runs the program of a request in this process, which ends."""
  text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
  request = json.loads(text)
  for number, stream in enumerate(streams):
    os.dup2(stream, number)
  sys.stdin, sys.stdout, sys.stderr = open(0), open(1, 'w', closefd=False), open(2, 'w', buffering=1, closefd=False)
  os.chdir(request['folder'])
  os.environ.clear()
  os.environ.update(request['environment'])
  sys.path[0] = request['folder']
  status = 0
  try:
    if request['kind'] == 'script':
      sys.argv = request['words']
      runpy.run_path(request['words'][0], run_name='__main__')
    else:
      from vit_jax import main
      sys.argv = ['vit-jax', *request['words']]
      main.program()
  except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(bool(end.code))
  except BaseException:
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  connection.sendall(str(status).encode())
  os._exit(status)


def request(kind: str, where: str, words: list[str]) -> int:
  """Has a program run by the server, and returns its status."""
  if kind == 'run' and words:
    sys.path.insert(0, str(ROOT / 'tests'))
    from blocks import words_with
    words = words_with(words, json.loads(os.environ.get('BLOCK_FLAGS', '{}')).get(words[0], []))
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(where)
    asked = {'kind': kind, 'words': words, 'folder': os.getcwd(), 'environment': dict(os.environ)}
    socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
    return int(connection.recv(16) or b'1')


if __name__ == '__main__':
  if sys.argv[1] == 'serve':
    sys.path[0] = str(ROOT)
    serve(sys.argv[2])
  else:
    sys.exit(request(sys.argv[1], sys.argv[2], sys.argv[3:]))
