"""Settings of the whole suite: eight simulated devices, strict ranks, no network, one compilation cache."""
from __future__ import annotations

import collections
import ctypes
import functools
import gc
import logging
import os
import pathlib
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import compiler

os.environ['JAX_PLATFORMS'] = os.environ.get('VIT_JAX_TEST_PLATFORM', 'cpu')  # cuda: by benchmarks/gpu_check.sh
# Tests are mostly compilation: level 0 halves it, and keeps the arithmetic; without the newer emitters of fusions it
# takes 0.6 of that, and 0.8 of the rest if a small program is not split into modules of LLVM. On a busy machine eight
# devices may wait for one another longer than the 40 s after which XLA would end the process.
if os.environ['JAX_PLATFORMS'] == 'cpu':
  os.environ['XLA_FLAGS'] = ' '.join((
      os.environ.get('XLA_FLAGS', ''), '--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=0',
      '--xla_cpu_collective_call_terminate_timeout_seconds=600',
      *(f'--{flag}={value}' for flag, value in (('xla_cpu_use_fusion_emitters', 'false'),
                                                ('xla_cpu_parallel_codegen_split_count', 1)) if compiler.knows(flag))))
os.environ.setdefault('HF_HUB_OFFLINE', '1')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import buckets
import jax
import pytest
import single
from jax._src.xla_bridge import backends_are_initialized
from markupsafe import Markup

from vit_jax.core import failures
from vit_jax.jobs import startup

gc.disable()  # to the end of the collection, which leaves no garbage

# Run in the background, the tests would ignore Ctrl-C, and so would all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update('jax_numpy_rank_promotion', 'raise')
startup.keep_freed_memory = lambda: None  # a worker would keep the most that any of its tests needed


STARTED_S = pytest.StashKey[float]()
NUM_SHOWN = 25
LIMIT_GIB = 2.
"""Memory of a worker above which it releases its compiled programs after a module of tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Cases that the mark `dear` names are slow, and those that `quick` does not name."""
  marks = [(item, mark) for item in items for mark in item.iter_markers() if mark.name in ('quick', 'dear')]
  unknown = {(item.nodeid.partition('[')[0], name) for item, mark in marks for name in mark.args}
  for item, mark in marks:
    name = item.callspec.id  # type: ignore[attr-defined]
    unknown.discard((item.nodeid.partition('[')[0], name))
    if (name in mark.args) == (mark.name == 'dear'):
      item.add_marker(pytest.mark.slow(**mark.kwargs))
  if unknown and not any('::' in word for word in config.args):
    raise pytest.UsageError(f'pytest.mark: expected names of cases, got {sorted(unknown)}.')


def pytest_collection_finish() -> None:
  """What was imported and collected stays to the end: nobody need search it for garbage while tests trace."""
  if backends_are_initialized():
    raise pytest.UsageError('tests: expected modules that compute nothing when they are imported, got one that '
                            'initialized the devices. Move what it computes into a test or a fixture.')
  gc.freeze()
  gc.set_threshold(200_000, 20, 100)
  gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
  start_devices()
  item.stash[STARTED_S] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
  """Adds the processor seconds of a complete test to its last report."""
  report: pytest.TestReport = yield  # type: ignore[assignment]
  if call.when == 'teardown':
    report.user_properties.append(('cpu_s', cpu_s() - item.stash[STARTED_S]))
  return report  # type: ignore[return-value]


def cpu_s() -> float:
  """Returns the processor seconds of this process, and of the programs that it started and that have ended."""
  times = os.times()
  return times.user + times.system + times.children_user + times.children_system


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  """Lists the files that take the most processor time, and why tests were skipped: each reason once, with its files."""
  cpu_by_file: collections.Counter[str] = collections.Counter()
  for report in terminalreporter.stats.get('', ()):  # the reports of what follows tests that pass
    cpu_by_file[report.nodeid.partition('::')[0]] += dict(report.user_properties).get('cpu_s', 0.)
  if cpu_by_file:
    terminalreporter.section(f'processor seconds, {cpu_by_file.total():.0f} in all: the {NUM_SHOWN} dearest files')
  for file, seconds in cpu_by_file.most_common(NUM_SHOWN):
    terminalreporter.line(f'{seconds:6.1f}  {file}')
  where: dict[str, collections.Counter[str]] = {}
  for report in terminalreporter.stats.get('skipped', ()):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    file = report.nodeid.partition('::')[0].removeprefix('tests/')
    where.setdefault(reason.removeprefix('Skipped: '), collections.Counter())[file] += 1
  if where:
    terminalreporter.section('skipped tests, by reason')
  for reason, files in sorted(where.items(), key=lambda item: -item[1].total()):
    terminalreporter.line(f'{files.total():4}  {reason}  ({", ".join(sorted(files))})')


@functools.cache
def start_devices() -> None:
  """Initializes the devices, in each process that runs tests; jobs that run in here have this pool of threads."""
  os.environ['PJRT_NPROC'] = str(startup.widen_pool(8))
  jax.devices()
  del os.environ['PJRT_NPROC']  # programs that tests start have a device or two


@pytest.fixture(scope='module', autouse=True)
def compiled_programs() -> Iterator[None]:
  """Releases compiled programs, which otherwise take several GiB towards the end of the suite."""
  yield
  status = pathlib.Path('/proc/self/statm')
  if status.exists() and int(status.read_text().split()[1]) * resource.getpagesize() > LIMIT_GIB * 2**30:
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # without it, freed memory stays with the process


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
  """Connecting to anything but this machine fails."""
  connect = socket.socket.connect

  def guarded(self: socket.socket, address: object) -> None:
    host = address[0] if isinstance(address, tuple) else 'local'
    if host not in ('127.0.0.1', '::1', 'localhost', 'local'):
      raise OSError(f'tests may not reach the network: {address}')
    connect(self, address)  # type: ignore[arg-type]

  monkeypatch.setattr(socket.socket, 'connect', guarded)


@pytest.fixture(autouse=True)
def usual_patience(monkeypatch: pytest.MonkeyPatch) -> None:
  """A run that an earlier test made in this process sets how long operations are repeated: minutes."""
  monkeypatch.setattr(failures, '_patience_s', None)


@pytest.fixture(autouse=True)
def usual_messages(monkeypatch: pytest.MonkeyPatch) -> None:
  """What a loader process sets, which a test may do in this process, would keep the messages of later tests."""
  own = logging.getLogger('vit_jax')
  monkeypatch.setattr(own, 'handlers', own.handlers)
  monkeypatch.setattr(own, 'propagate', True)


@pytest.fixture(scope='session')
def storage_server() -> Iterator[buckets.Server]:
  """One for all tests: what reads `gs://` remembers where that is."""
  with pytest.MonkeyPatch.context() as patch, buckets.serve() as server:
    for name, value in server.environment().items():
      patch.setenv(name, value)
    buckets.install()
    yield server


@pytest.fixture
def bucket(storage_server: buckets.Server) -> Iterator[buckets.Server]:
  """A stand-in for object storage, empty; any `gs://NAME/…` is in it."""
  storage_server.objects.clear()
  storage_server.requests.clear()
  if storage := sys.modules.get('vit_jax.data.storage'):
    storage._state.generations.clear()  # of objects of other tests
  yield storage_server
  storage_server.broken = False
  storage_server.faults.clear()


@pytest.fixture(scope='module')
def one_device() -> Iterator[None]:
  """Jobs of a module see one device: a third less to compile, where the mesh is not the question."""
  with single.one_device():
    yield


@pytest.fixture(scope='module')
def no_page() -> Iterator[None]:
  """Runs of a module draw no report, which takes longer than a tiny run; tests of the report are elsewhere."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('vit_jax.jobs.report.write_report', lambda workdir, **_: f'{workdir}/report.html')
    yield


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
  """Charts are empty, where what is in them is not the question."""
  for name in ('draw_curves', 'draw_heat_map', 'draw_confusion'):
    monkeypatch.setattr(f'vit_jax.inspect.charts.{name}', lambda *args, **named: Markup('<svg></svg>'))


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
  """Refuses implicit dtype promotion in our own code."""
  with jax.numpy_dtype_promotion('strict'):
    yield
