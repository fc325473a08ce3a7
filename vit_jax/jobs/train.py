"""`--job=train`: pre-trains or fine-tunes, evaluates, saves checkpoints, and resumes.

`run` is the job: it settles the directory, the weights, the dataset commits and the labels of a teacher. `Run` then
opens the data and builds the objects (`build.py`), creates or restores the state, and calls the loop (`train/loop.py`)
with hooks for metrics, evaluations, checkpoints, trackers and profiles. `finetune` and `pretrain` call `run` with the
config that they make. What may not change when a run resumes is in `resume.py`.
"""
from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from vit_jax import __version__
from vit_jax.config import check, durations, elastic, provenance, schema
from vit_jax.core import failures, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Batch
from vit_jax.data.content import describe_files
from vit_jax.data.image import geometry
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Source
from vit_jax.evaluate import resources, results
from vit_jax.evaluate.results import Result
from vit_jax.jobs import build, host_speed, report, resume, startup, summary, trackers
from vit_jax.objectives import kinds
from vit_jax.parallel import feed
from vit_jax.parallel import mesh as meshes
from vit_jax.record import checkpoint_files, console, machine, reader, run_directory, storage
from vit_jax.record import clock as clocks
from vit_jax.record.writer import Writer
from vit_jax.train import checkpoint, diagnose, hooks, host_times, loop, profile, stopping
from vit_jax.train.save_times import SaveTimes
from vit_jax.train.state import TrainState
from vit_jax.weights import runs
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')


def run(config: schema.Config, workdir: storage.Path | None = None, *, overridden: Collection[str] = (),
        weights: Weights | None = None, until: str = '', is_segment: bool = False) -> int:
  """Trains until the end or until `until` (exit status 0), or until a signal to stop (`failures.TRY_AGAIN`).

  Args:
    config: the config of the run.
    workdir: the run directory; None = `runs/NAME`, where only a run with the same settings is resumed.
    overridden: names of the settings on the command line, which override those of `config.init_from`.
    weights: the weights of `config.init_from` if they have been read.
    until: the part of the run, such as '25 %' or '500 steps', after which it pauses: it is evaluated and saved, with
      the results in `paused_UNTIL.json`, and continues as if it had not paused when it is started again; '' = the end.
    is_segment: the run is not evaluated where it pauses, and the exit status is that after a signal.
  """
  began, is_default = time.monotonic(), workdir is None
  workdir = workdir or default_workdir(config.name)
  check.check(config)
  trackers.check(config)
  process_id = startup.start(config.train, resume.find_machine(workdir))
  resume.check_weights(workdir, config)
  if config.init_from or kinds.begins_with(config):
    from vit_jax.weights import inherit  # only here: most runs read no weights, and reading them is many modules
    config, weights = inherit.resolve(config, overridden, workdir, weights)
    check.check(config)
  config = resume.keep_orientation(resume.pin_sources(config, workdir), workdir)
  if is_default:
    resume.check_same(workdir, config)
  # Processes of one run may share the directory; process 0 locks it for all.
  with run_directory.hold(workdir) if process_id == 0 else contextlib.nullcontext():
    if config.data.pseudo.source:
      from vit_jax.jobs import teacher_labels
      if reason := teacher_labels.ensure(config):
        print(f'Stopped by {reason} while the teacher labels images. Run the same command again to resume.', flush=True)
        return failures.TRY_AGAIN
    return Run(config, workdir, began, weights, overridden).run(until, is_segment=is_segment)


def default_workdir(name: str) -> storage.Path:
  """Returns the directory of a run whose command names none: `runs/NAME`."""
  return storage.open_path(f'runs/{run_directory.default_name(name)}')


def _open_data(config: schema.Config, overridden: Collection[str], order: Sequence[str]) -> build.Data:
  """Opens the data of a run. If the command does not set the source, errors also say how to set it."""
  try:
    return build.open_data(config, order=order)
  except UserError as error:
    if 'data.source' in overridden:
      raise
    origin = next((text for name, text in _ORIGINS.items() if config.data.source.startswith(f'folder:{name}')), '')
    raise UserError(f'{error}\nConfig {config.name} trains on data.source={config.data.source}. {origin}Set your own '
                    'data with --config.data.source=folder:PATH, or try --config=digits, whose data is installed. The '
                    'jobs plan and check need no data.') from error


_ORIGINS = {
    'JFT-': 'JFT is internal to Google. The configs vit_l16_i21k and vit_b16_i21k train on ImageNet-21k, which is '
            'public. ',
    'imagenet21k': 'ImageNet-21k is downloaded from image-net.org after registration there. '}
"""Where data come from that no program can download, by the beginning of the name of their folder."""


class _Session(NamedTuple):
  """What one start of a run works with, from step `start` to step `last`, the end of the run or of `--until`.

  latest: the newest evaluation metrics; evaluations write them, `early_stop` and `saving` read them.
  early_stop, saving: hooks, which run after all evaluations of a step, in this order.
  """
  start: int
  last: int
  writer: Writer
  clock: clocks.Clock
  latest: hooks.Latest
  early_stop: hooks.EarlyStop
  saving: hooks.Checkpoint


class Run:
  """A run in one of its processes, from opening the data to the report; `began` is the monotonic time of its start."""

  def __init__(self, config: schema.Config, workdir: storage.Path, began: float, weights: Weights | None = None,
               overridden: Collection[str] = ()) -> None:
    self.workdir, self._began, self._weights = workdir, began, weights
    self._restored_digest, self._restore_s = '', 0.  # of a checkpoint, if the run resumes from one
    self.data = _open_data(config, overridden, resume.find_classes(workdir))
    self._sources: dict[str, Source] = {'train': self.data.train, 'eval': self.data.eval}
    config = build.with_statistics(config, self.data.train)
    self.mesh, self.shard, self.parts = build.open_run(config, self.data, workdir=workdir, overridden=overridden)
    self.config = config = self.parts.config
    self.loader = build.train_loader(config, self.data, self.shard)
    self._resources = build.resources(config, self.data, self.parts.objective, mesh=self.mesh, shard=self.shard,
                                      workdir=workdir)
    self.evaluators = self._resources.evaluators()
    self.checkpointer = checkpoint.Checkpointer(
        workdir / 'checkpoints', keep=checkpoint.Keep.of(config.checkpoints, self.parts.lengths.steps))
    log.info('%s', summary.start(self.parts, self.data, workdir,
                                 text=self.loader.texts.sample() if self.loader.texts else ''))
    log.debug('%s', summary.parameters(self.parts))

  def run(self, until: str = '', *, is_segment: bool = False) -> int:
    """Restores or initializes the state, trains, evaluates; returns the exit status. Arguments: see `train.run`."""
    total = self.parts.lengths.total_steps
    try:
      last = min(total, self.parts.lengths.steps(until)) if until else total
    except UserError as error:
      raise UserError(f'--until: {error}') from None
    console.begin_stage('creating or restoring the state')
    state, start = self._begin()
    if start > last:
      raise UserError(f'--until: expected at least {start:,} steps, which the run in {self.workdir} has done, got '
                      f'{until!r}, {last:,} steps. Set a larger part of the run, or use another --workdir.')
    latest: hooks.Latest = {}
    early_stop = self._early_stop(start, latest)
    if start == last or early_stop.reason:
      paused_at = until if start < total and not early_stop.reason else ''
      final = resume.find_finished(self.workdir, paused_at, start, self._restored_digest)
      if final is not None:
        return self._repeat(final, paused_at)
    resume.write_config(self.workdir, self.config)
    session = self._open_session(start, last, early_stop, latest)
    batches = feed.Ahead(self.loader.batches(start), lambda batch: meshes.put_batch(batch, self.mesh, self.shard))
    try:
      return self._end(self._train(state, batches, session), session, until, is_segment=is_segment)
    finally:
      session.writer.close()
      batches.close()
      self.loader.close()
      self.checkpointer.close()

  def _train(self, state: TrainState, batches: Iterator[Batch], session: _Session) -> loop.Ended:
    """Runs the loop and its hooks until the last step of the session, a signal, an early stop, or an error."""
    clock, start, early_stop = session.clock, session.start, session.early_stop
    images_a_step = self.config.batch_size * len(self.shard.parts) / self.shard.count  # of this process
    speed = host_speed.HostSpeed(clock, images_a_step, self.loader)
    log_every = self.parts.lengths.steps(self.config.train.log_every)
    times = host_times.HostTimes(clock, session.writer, log_every=log_every, gather=host_times.gather_by_devices())
    profiling = self._profile(start, clock)
    console.begin_stage('reading the first batch, compiling the train step' if start < session.last else 'evaluating')
    with (profile.served(self.config.train.profile_port, jax.process_index()), profiling,
          stopping.StopRequest() as request):
      step_fn = times.timed(profiling.mark(speed.timed(self.parts.program.step_fn)))
      in_order: list[loop.Hook] = [times, *self._hooks(session), early_stop, session.saving, profiling, speed]
      return loop.run(
          step_fn, state, batches, start=start, total=start if early_stop.reason else session.last, hooks=in_order,
          clock=clock, should_stop=lambda step: request.reason(step) or early_stop.reason)

  def _end(self, ended: loop.Ended, session: _Session, until: str, *, is_segment: bool) -> int:
    """Saves the state after the loop, and evaluates it unless a signal or a segment ended; returns the exit status."""
    total, early_reason = self.parts.lengths.total_steps, session.early_stop.reason
    if ended.error:
      raise self._save_after(ended.error, ended, session)
    if ended.reason and ended.reason != early_reason:
      return self._stop(ended, session)
    is_part = ended.step == session.last < total and not early_reason
    if is_part and is_segment:
      return self._stop(ended._replace(reason='the end of the segment'), session)
    if early_reason:
      log.info('Ended at step %s of %s by %s.', f'{ended.step:,}', f'{total:,}', early_reason)
    try:
      self._finish(ended, session, until if is_part else '')
    except TemporaryError as error:
      raise self._save_after(error, ended, session) from error
    return 0

  def _begin(self) -> tuple[TrainState, int]:
    """Returns the state of the newest complete checkpoint or a new one, and its step."""
    program, total = self.parts.program, self.parts.lengths.total_steps
    began = time.monotonic()
    restored = self.checkpointer.restore(program.placed_state)
    if restored is None:
      return self._initialize(), 0
    self._restore_s = time.monotonic() - began
    resume.check_data(restored.about['data'], self.loader.info._asdict(), self.workdir)
    step = int(restored.state.step)
    if step > total:
      raise UserError(f'length: expected at least {step:,} steps, which the run in {self.workdir} has done, got '
                      f'{self.config.length!r}, {total:,} steps. Set a longer one, or use another --workdir.')
    self._restored_digest = str(restored.about['digests']['params'])
    resume.check_settings(restored.about, self.config, self.workdir, is_done=step == total)
    if step < total:
      resume.warn_of_machine(restored.about)
      resume.warn_of_files(restored.about, self._sources)
    log.info('Already finished: step %s of %s in %s.' if step == total else 'Resuming at step %s of %s in %s.',
             f'{step:,}', f'{total:,}', self.workdir)
    return restored.state, step

  def _initialize(self) -> TrainState:
    """Returns the state of step 0, with the weights that the config names."""
    if build.keeps_random_network(self.parts):
      log.warning('init_from: expected weights for a network that is frozen for the whole run, got none, so that it '
                  'stays random. Set --config.init_from.')
    if not self.config.init_from and not kinds.begins_with(self.config):
      return self.parts.program.init_fn()
    from vit_jax.weights import init_state
    weights, self._weights = self._weights, None  # frees its arrays
    return init_state.begin(self.config, self.parts.program, self.data.class_names, self.workdir, weights)

  def _open_session(self, start: int, last: int, early_stop: hooks.EarlyStop, latest: hooks.Latest) -> _Session:
    """Returns the session from step `start` to `last`, and charges its clock with the time that it has taken so far."""
    total, lost = self.parts.lengths.total_steps, resume.find_lost(self.workdir, start)
    writer = Writer(self.workdir, process_index=jax.process_index(), resumed_from=start or None,
                    progress_total=total, progress=self.config.train.progress and start < total,
                    trackers=trackers.opener(self.config, self.workdir, start or None))
    writer.event('start', **machine.origin(), devices=jax.device_count(), processes=jax.process_count(),
                 **elastic.describe(self.config, meshes.count_slices(jax.devices())), lost=lost._asdict())
    clock = clocks.Clock(self.config.batch_size, build.train_flops(self.parts) * self.config.batch_size,
                         clocks.find_peak_flops(jax.devices()[0].device_kind, jax.device_count()))
    clock.charge('startup', time.monotonic() - self._began - self._restore_s)
    if self._restore_s:
      clock.charge('restore', self._restore_s)
    writer.event('goodput', step=start, **clock.goodput()._asdict())  # the costs of a start that is killed soon
    every_s = durations.parse_wall(every := self.config.checkpoints.every)
    times = SaveTimes(0 if every_s else self.parts.lengths.steps(every), every_s, start=start)
    saving = hooks.Checkpoint(times, self.checkpointer, writer, clock, about=self._about(), latest=latest)
    return _Session(start, last, writer, clock, latest, early_stop, saving)

  def _hooks(self, session: _Session) -> list[loop.Hook]:
    """Returns the hooks that measure; they run before early stopping and saving, which read the newest metrics."""
    config, parts, writer, clock, latest = self.config, self.parts, session.writer, session.clock, session.latest
    added: list[loop.Hook] = [
        hooks.Metrics(writer, clock, log_every=parts.lengths.steps(config.train.log_every),
                      total=parts.lengths.total_steps, steps_an_epoch=parts.lengths.steps_an_epoch,
                      schedule=parts.schedule),
        hooks.Finite(config.train.on_nonfinite, diagnose.build(parts.objective, parts.prepare, self.loader.describe,
                                                               self.loader.indexes, mesh=self.mesh, seed=config.seed))]
    added += trackers.hooks(config, parts, writer, self.mesh)
    added += [hooks.Alarm(watch, writer) for watch in kinds.of(config).watches(parts.lengths)]
    every = {name: parts.lengths.steps(config.evals[name].every) for name in results.in_order(self.evaluators)}
    added += [hooks.Evaluate(every[name], self._evaluation(name, writer), writer, clock, latest) for name in every]
    if best := config.checkpoints.keep_best:  # each checkpoint is evaluated, in addition to the evaluation's own steps
      added.append(hooks.Evaluate(parts.lengths.steps(config.checkpoints.every),
                                  self._evaluation(best.split('/')[0], writer), writer, clock, latest, metric=best))
    return added

  def _evaluation(self, name: str, writer: Writer) -> Callable[[TrainState, int], Mapping[str, float]]:
    """Returns a function that evaluates every view of an evaluation, warns, and returns the metrics by name."""
    views = self.parts.objective.views()

    def evaluate(state: TrainState, step: int) -> Mapping[str, float]:
      by_view = {view: evaluator.measure(views[view].select(state.params, state.extra))
               for view, evaluator in self.evaluators[name].items()}
      log.info('%s', summary.evaluated(name, step, self.parts.lengths.total_steps, by_view))
      _raise_alarms(name, by_view, step, writer)
      return {results.metric_name(name, metric, view): number
              for view, result in by_view.items() for metric, number in result.metrics.items()}

    return evaluate

  def _early_stop(self, start: int, latest: hooks.Latest) -> hooks.EarlyStop:
    """Returns the hook of early stopping as of step `start`; without early stopping, one that never fires."""
    settings = self.config.train.early_stop
    evaluation_name = settings.metric.split('/')[0]
    every = self.parts.lengths.steps(self.config.evals[evaluation_name].every) if settings.metric else 0
    hook = hooks.EarlyStop(settings.metric, patience=settings.patience, min_delta=settings.min_delta, every=every,
                           latest=latest)
    if every and start:
      hook.recall(resume.record(self.workdir).rows, up_to=start)
    return hook

  def _profile(self, start: int, clock: clocks.Clock) -> profile.Profile:
    """Returns the hook that profiles the configured steps, and writes the HLO of the train step if configured."""
    settings, total = self.config.train, self.parts.lengths.total_steps
    hook = profile.Profile(self.workdir / 'profile', durations.parse_steps(settings.profile), start=start, total=total,
                           process_index=jax.process_index())
    if settings.dump_hlo and start < total:
      with clock.phase('compile'):
        self._dump_hlo()
    return hook

  def _dump_hlo(self) -> None:
    """Writes the optimized program of the train step, compiled from shapes as in a plan.

    This is a separate compilation, cached on disk for the next dump; the first step may have to compile again. All
    processes compile, and process 0 writes.
    """
    path, program = self.workdir / 'hlo' / 'train_step.txt', self.parts.program
    compiled = program.step_fn.lower(program.abstract_state, build.abstract_batch(self.config)).compile()
    try:
      text = compiled.as_text() or ''
    except jax.errors.JaxRuntimeError as error:  # jaxlib 0.10.2 cannot read calls of SparseCores back
      log.warning('train.dump_hlo: expected a program that jaxlib can print, got %s. Set LIBTPU_INIT_ARGS='
                  '"--xla_jf_dump_to=DIR --xla_jf_dump_hlo_text=true": the compiler writes its text into the '
                  'directory.', str(error).partition('\n')[0])
      return
    run_directory.write_text(path, text)
    log.info('The compiled train step is in %s', path)

  def _about(self) -> dict[str, Any]:
    """Returns the description of the run that each of its checkpoints has."""
    recipe = self.config.data.recipe
    interpolation, antialias = geometry.eval_resampling(recipe)
    files = {name: list(describe_files(source)) for name, source in self._sources.items()}
    preprocessing = {'eval_resize_px': recipe.eval_resize_px, 'eval_geometry': recipe.eval_geometry.value,
                     'mean': list(recipe.mean), 'std': list(recipe.std), 'interpolation': interpolation.value,
                     'antialias': antialias, 'truncate': recipe.truncate}
    return {'code': __version__, 'data': self.loader.info._asdict(), 'files': files, 'machine': machine.describe(),
            'name': self.config.name, 'class_names': list(self.data.class_names),
            'image_px': list(self.config.image_px), provenance.SETTINGS: provenance.settings(self.config),
            'preprocessing': preprocessing}

  def _save_after(self, error: UserError | TemporaryError, ended: loop.Ended,
                  session: _Session) -> UserError | TemporaryError:
    """Saves the last step, if this process can do so alone, and returns the error with what to do."""
    # Other processes wait in their next step and cannot save.
    if jax.process_count() > 1 or ended.step == session.start or session.saving.has_failed:
      return error
    try:
      session.saving.save(ended.step, ended.state, wait=True)
    except (UserError, TemporaryError) as another:
      log.warning('Step %s could not be saved either: %s', f'{ended.step:,}', another)
      return error
    kind = TemporaryError if isinstance(error, TemporaryError) else UserError
    return kind(f'{str(error).rstrip(".")}. Step {ended.step:,} is saved; run the same command again to resume.')

  def _stop(self, ended: loop.Ended, session: _Session) -> int:
    """Saves the state without evaluating it; returns the exit status of a run that continues when started again."""
    session.saving.save(ended.step, ended.state, wait=True)
    session.writer.event('stop', step=ended.step, reason=ended.reason)
    session.writer.close()
    print(f'Stopped by {ended.reason} after step {ended.step:,}, which is saved. Run the same command again to resume.',
          flush=True)
    return failures.TRY_AGAIN

  def _finish(self, ended: loop.Ended, session: _Session, until: str) -> None:
    """Evaluates, saves, and writes results and report; `until` of a run that pauses, '' = it ends."""
    step, writer = ended.step, session.writer
    with session.clock.phase('evaluate'):
      final = results.measure(self.evaluators, self.parts.objective, ended.state)
    if session.start < step:
      for name, by_view in final.results.items():
        _raise_alarms(name, by_view, step, writer)
      writer.write(step, final.metrics)
      session.latest.update({name: (step, number) for name, number in final.metrics.items()})
      session.saving.save(step, ended.state, wait=True)
    writer.event('goodput', step=step, **session.clock.goodput()._asdict())
    if until:
      writer.event('stop', step=step, reason=f'--until={until}')
    writer.close()
    self._write_results(final, session.saving.digest or self._restored_digest, step, until)

  def _write_results(self, final: results.Final, digest: str, total: int, until: str) -> None:
    """Writes all results of a run and its report; of a run that pauses, only `paused_UNTIL.json`."""
    record = resume.record(self.workdir) if not jax.process_index() else reader.NOTHING
    used = self._find_used() if not jax.process_index() else None
    lines = [summary.best(final, record.rows, used),
             summary.spent(record.events, num_steps=total, batch_size=self.config.batch_size)]
    log.info('%s', '\n'.join(filter(None, lines)))
    spent = clocks.sum_starts(record.events)
    processor_s = {'processor_s': spent.processor_s, 'training_processor_s': spent.training_processor_s}
    content = {
        'step': total, 'starts': clocks.count_starts(record.events), 'seconds': spent.total_s,
        **{name: seconds for name, seconds in processor_s.items() if seconds is not None},  # None = not known
        'params_digest': digest, 'headline': final.headline_name,
        'num_params': trees.num_elements(self.parts.program.abstract_state.params), 'metrics': final.metrics,
        'exaflops': build.train_flops(self.parts) * self.config.batch_size * total / 1e18,
        'num_examples': {name: next(iter(group.values())).num_examples for name, group in final.results.items()},
        'data': {name: fingerprint._asdict() for name, fingerprint in self._fingerprints().items()}}
    if until:
      run_directory.write_json(self.workdir / run_directory.paused_file(until), {**content, 'top1': final.score})
      self._say_paused(total, until)
      return
    fit = transforms.eval_transform(self.config.data.recipe, self.config.image_px)
    results.write(self.workdir, final, total, fit=fit, source=resources.eval_source(self.config, self.data, final.name),
                  class_names=self.data.class_names, params_digest=digest, data=self._fingerprints())
    run_directory.write_json(self.workdir / 'final.json', content)
    if jax.process_index() == 0:
      page = report.write_or_warn(self.workdir)
      print(summary.last_line(content, used, page), flush=True)

  def _find_used(self) -> checkpoint_files.Chosen | None:
    """Returns the checkpoint whose weights are those of the run: the newest one, or the best one."""
    saved = build.saved_config(self.workdir) or self.config  # of a finished run, whatever this command sets
    return runs.find_whole(self.workdir, saved.checkpoints.keep_best)[0]

  def _repeat(self, final: Mapping[str, Any], until: str) -> int:
    """Prints the results of a run that has finished or paused in an earlier start; changes none of its files."""
    self.loader.close()
    self.checkpointer.close()
    log.info('The run is not trained or evaluated again, and its results stay as they are. To evaluate it, run '
             'vit-jax evaluate --workdir=%s.', self.workdir)
    if jax.process_index() == 0 and until:
      self._say_paused(final['step'], until)
    elif jax.process_index() == 0:
      used, path = self._find_used(), self.workdir / report.PAGE
      page = str(path) if path.exists() else report.write_or_warn(self.workdir)
      print(summary.last_line(final, used, page), flush=True)
    return 0

  def _say_paused(self, step: int, until: str) -> None:
    print(f'Paused after step {step:,} of {self.parts.lengths.total_steps:,} by --until={until}, evaluated and saved. '
          'Run the same command without --until to continue.', flush=True)

  def _fingerprints(self) -> dict[str, resources.Fingerprint]:
    """Returns what the run read, by source and split; not the images that a teacher labeled."""
    data = self.config.data
    sources = {f'{data.source} {data.eval_split}': self.data.eval}
    if not data.pseudo.source:
      sources[f'{data.source} {data.train_split}'] = self.data.train
    return self._resources.fingerprints() | {name: resources.fingerprint(source) for name, source in sources.items()}


def _raise_alarms(name: str, by_view: Mapping[str, Result], step: int, writer: Writer) -> None:
  """Logs the metrics of an evaluation that are too low, by view, also as events."""
  for view, result in by_view.items():
    for low in result.alarms:
      metric = results.metric_name(name, low.metric, view)
      writer.event('alarm', step=step, metric=metric, value=low.value, below=low.below)
      log.warning('ALARM at step %s: %s=%.4g is below %s=%g.\n  %s.', f'{step:,}', metric, low.value, low.setting,
                  low.below, low.advice)
