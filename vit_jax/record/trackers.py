"""Trackers send the metrics of a run to other programs: TensorBoard, Weights & Biases and MLflow.

`jobs/trackers.py` makes the trackers that the config names, each inside a `Guarded`, so that an error or a slow server
of a tracker does not disturb the run. `writer.py` passes every row to the trackers, and closes them. Hooks pass images
and histograms (`Writer.show`). The package of a tracker is imported when the tracker is made.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from vit_jax.core import failures
from vit_jax.core.types import Array, HostArray

log = logging.getLogger('vit_jax.record')
MAX_WAITING = 10_000  # calls that may wait for a slow tracker
CLOSE_S = 60.         # for which the end of a run waits for a slow tracker
MAX_BYTES = 2**23     # of an event file of TensorBoard; a complete file is uploaded to object storage only once
Status = Literal['done', 'stopped', 'failed']
"""How a start of a run ended: after its last step, by a signal to stop, or by an error."""
_EVENT_FILE = re.compile(r'events\.out\.tfevents\.(\d{1,12})\.', re.ASCII)  # 'events.out.tfevents.1700000000.host.7'


class Histogram(NamedTuple):
  """The number of values in each of n bins, `counts [n]`, with `edges [n + 1]`, and sums of the values and squares."""
  counts: HostArray | Array
  edges: HostArray | Array
  sum: HostArray | Array
  sum_squares: HostArray | Array


class Tracker(Protocol):
  """Takes the metrics, images and histograms of one start of a run. Every method may raise any exception."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds metrics after `step` updates."""

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    """Adds images `[B, H, W, 3]` u8 by name."""

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Adds histograms by name; a tracker without histograms does nothing."""

  def close(self, status: Status) -> None:
    """Sends all values that were not sent yet, and ends the run of the tracker with this status."""


class Guarded:
  """Makes and calls a tracker. Its first error becomes a warning, and later calls do nothing: the run continues.

  Args:
    name: for the warning, such as `trackers.wandb`.
    make: returns the tracker.
    background: whether a thread makes all calls, including `make`, so that a slow server does not delay steps.
  """

  def __init__(self, name: str, make: Callable[[], Tracker], *, background: bool) -> None:
    self._name, self._make, self._has_failed = name, functools.cache(make), False
    self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_WAITING)  # None ends the thread
    self._thread = threading.Thread(target=self._work, name=name, daemon=True) if background else None
    if self._thread:
      self._thread.start()
    self.do(lambda tracker: None)  # makes the tracker

  def do(self, call: Callable[[Tracker], None]) -> None:
    """Calls a function with the tracker, at once or later in the thread."""
    if self._thread and not self._has_failed:
      try:
        self._calls.put_nowait(call)
      except queue.Full:
        self._disable(f'{MAX_WAITING:,} calls that wait')
    else:
      self._call(call)

  def close(self, status: Status) -> None:
    """Closes the tracker; waits for the thread for at most `CLOSE_S`."""
    self.do(lambda tracker: tracker.close(status))
    if self._thread:
      with contextlib.suppress(queue.Full):  # the server of the tracker does not answer
        self._calls.put_nowait(None)
      self._thread.join(CLOSE_S)
      if self._thread.is_alive():
        self._disable(f'no end within {CLOSE_S:.0f} s')

  def _work(self) -> None:
    """Makes the calls of the queue, in the thread."""
    while (call := self._calls.get()) is not None:
      self._call(call)

  def _call(self, call: Callable[[Tracker], None]) -> None:
    if self._has_failed:
      return
    try:
      call(self._make())
    except (Exception, SystemExit) as error:  # the code of other packages may raise anything
      self._disable(failures.typed_line(error))

  def _disable(self, got: str) -> None:
    self._has_failed = True
    log.warning('%s: expected a tracker that takes the metrics, got %s. The run continues without it; metrics.jsonl '
                'has all values.', self._name, got)


class TensorBoard:
  """Writes event files, at least one for each start of a run; all values are in the file after each call.

  The class does not use the thread of tensorboardX, which ends when the disk is full: the run would then wait forever.

  Args:
    folder: an existing folder for the files.
    resumed_from: step of the checkpoint from which the run resumes, or None. TensorBoard then does not show values of
      later steps that an earlier start wrote.
  """

  def __init__(self, folder: str, resumed_from: int | None) -> None:
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2
    logging.getLogger('tensorboardX').setLevel(logging.ERROR)  # its warnings name each value that is not finite
    self._open, self._summary, self._messages, self._folder = record_writer.RecordWriter, summary, event_pb2, folder
    self._begin_file()
    if resumed_from is not None:
      log_type = self._messages.SessionLog
      self._add(step=resumed_from + 1, session_log=log_type(status=log_type.START))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._add_summaries(step, [self._summary.scalar(name, value) for name, value in values.items()])

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    self._add_summaries(step, [self._summary.image(f'{name}/{i}', image, dataformats='HWC')
                               for name, images in values.items() for i, image in enumerate(images)])

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    summaries = []
    for name, bins in values.items():
      summaries.append(self._summary.histogram_raw(
          name, min=float(bins.edges[0]), max=float(bins.edges[-1]), num=float(bins.counts.sum()), sum=float(bins.sum),
          sum_squares=float(bins.sum_squares), bucket_limits=bins.edges[1:].tolist(),
          bucket_counts=bins.counts.tolist()))
    self._add_summaries(step, summaries)

  def close(self, status: Status = 'done') -> None:
    del status
    self._file.close()

  def _begin_file(self) -> None:
    """Opens the next file. TensorBoard reads files in the order of the number, which is the time if possible."""
    numbers = [int(match[1]) for name in os.listdir(self._folder) if (match := _EVENT_FILE.match(name))]
    number = max([round(time.time()), *(earlier + 1 for earlier in numbers)])
    name = f'events.out.tfevents.{number}.{socket.gethostname()}.{time.time_ns()}'  # unique in a bucket, too
    self._file, self._num_bytes = self._open(os.path.join(self._folder, name)), 0
    self._add(file_version='brain.Event:2')

  def _add_summaries(self, step: int, summaries: list[Any]) -> None:
    for summary in summaries:
      self._add(step=step, summary=summary)
    self._file.flush()

  def _add(self, **fields: Any) -> None:
    content = self._messages.Event(wall_time=time.time(), **fields).SerializeToString()
    self._file.write(content)
    self._num_bytes += len(content) + 16  # with a length of 8 bytes and two checksums of 4 bytes
    if self._num_bytes > MAX_BYTES:
      self._file.close()
      self._begin_file()


def tensorboard(folder: str, resumed_from: int | None) -> Guarded:
  """Returns the tracker of TensorBoard."""
  return Guarded('trackers.tensorboard', lambda: TensorBoard(folder, resumed_from), background=False)


class WeightsAndBiases:
  """Sends metrics to a run of Weights & Biases. With `$WANDB_MODE=offline`, wandb writes files for `wandb sync`.

  `step` is one of the metrics, because a resumed run may repeat steps, and wandb's own step cannot decrease.

  Args:
    project: PROJECT or ENTITY/PROJECT.
    run_id: letters and digits, the same at every start of a run, so that wandb resumes its run.
    folder: for the files of wandb.
    settings: of the run, by dotted name.
  """

  def __init__(self, project: str, *, name: str, run_id: str, folder: str, settings: Mapping[str, str]) -> None:
    import wandb
    entity, _, project = project.rpartition('/')
    self._wandb = wandb
    self._run = wandb.init(entity=entity or None, project=project, name=name, id=run_id, resume='allow', dir=folder,
                           config=dict(settings))
    self._run.define_metric('step')
    self._run.define_metric('*', step_metric='step')

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    self._run.log({**values, 'step': step})

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    self.write(step, {name: [self._wandb.Image(image) for image in images] for name, images in values.items()})

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    self.write(step, {name: self._wandb.Histogram(np_histogram=(bins.counts.tolist(), bins.edges.tolist()))
                      for name, bins in values.items()})

  def close(self, status: Status) -> None:
    self._run.finish(exit_code=1 if status == 'failed' else 0)


class MLflow:
  """Sends metrics to a run in the store of `$MLFLOW_TRACKING_URI`.

  Args:
    experiment: its name; it is created if it does not exist.
    run_id: of an earlier start, which is resumed; '' = a new run.
    remember: is called with the id of a new run, and stores it for the next start.
    settings: of the run, by dotted name.
  """

  def __init__(self, experiment: str, *, name: str, run_id: str, remember: Callable[[str], object],
               settings: Mapping[str, str]) -> None:
    from mlflow import entities, tracking
    logging.getLogger('mlflow').setLevel(logging.WARNING)  # mlflow logs every table of its database
    self._client, self._metric, self._run_id = tracking.MlflowClient(), entities.Metric, run_id
    if run_id:
      self._client.update_run(run_id, status='RUNNING')
      return
    existing = self._client.get_experiment_by_name(experiment)
    experiment_id = existing.experiment_id if existing else self._client.create_experiment(experiment)
    self._run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
    remember(self._run_id)
    params = [entities.Param(key, value[:500]) for key, value in settings.items()]  # a length that every store accepts
    for first in range(0, len(params), 100):  # the maximum number in a request
      self._client.log_batch(self._run_id, params=params[first:first + 100])

  def write(self, step: int, values: Mapping[str, float]) -> None:
    now_ms = int(1000 * time.time())
    self._client.log_batch(self._run_id, metrics=[
        self._metric(_mlflow_name(name), value, now_ms, step) for name, value in values.items()])

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    for name, images in values.items():
      for i, image in enumerate(images):
        self._client.log_image(self._run_id, image, key=f'{_mlflow_name(name)}/{i}', step=step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Does nothing: MLflow has no histograms."""

  def close(self, status: Status) -> None:
    self._client.set_terminated(self._run_id, {'done': 'FINISHED', 'stopped': 'KILLED', 'failed': 'FAILED'}[status])


def _mlflow_name(name: str) -> str:
  """Returns a name in which `_` replaces the characters that MLflow does not allow."""
  return re.sub(r'[^-\w./: ]', '_', name)
