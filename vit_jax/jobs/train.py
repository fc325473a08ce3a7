"""`--job=train`: pre-trains or fine-tunes, evaluates, saves checkpoints, and resumes.

`commands.Command.run`, `finetune` and `pretrain` call `run`, which chooses the directory, the initial weights and the
commits of datasets, and lets a teacher label images if the config says so. Then `Run` opens the data and builds the
objects (`build.py`), restores or initializes the state, and calls the loop (`train/loop.py`) with hooks for metrics,
evaluations, checkpoints, trackers and profiles. `resume.py` checks what must not change when a run resumes.
"""
from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from vit_jax import __version__
from vit_jax.config import check, durations, provenance, schema
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
from vit_jax.parallel import elastic, feed
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
_ADVICE_BY_FOLDER = {
    'JFT-': 'JFT is internal to Google. The configs vit_l16_i21k and vit_b16_i21k train on ImageNet-21k, which is '
            'public. ',
    'imagenet21k': 'ImageNet-21k is downloaded from image-net.org after registration there. '}
"""Where to get data that no program can download, by the beginning of the name of their folder."""


def run(config: schema.Config, workdir: storage.Path | None = None, *, overridden: Collection[str] = (),
        weights: Weights | None = None, until: str = '', is_segment: bool = False) -> int:
  """Trains until the end or until `until` (exit status 0), or until a signal to stop (`failures.TRY_AGAIN`).

  Args:
    config: the config of the run.
    workdir: the run directory; None = `runs/NAME`, where only a run with the same settings is resumed.
    overridden: names of the settings on the command line; they take precedence over those of `config.init_from`.
    weights: the weights of `config.init_from`; None = they are loaded here.
    until: the part of the run, such as '25 %' or '500 steps', after which the run pauses: it is evaluated and saved,
      with the results in `paused_UNTIL.json`. When started again, it continues as if it had not paused. '' = the end.
    is_segment: when the run pauses, it is not evaluated, and the exit status is `failures.TRY_AGAIN`.
  """
  began_s = time.monotonic()
  is_default_workdir = workdir is None
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
  if is_default_workdir:
    resume.check_same(workdir, config)
  # Processes of one run may share the directory; process 0 locks it for all.
  with run_directory.hold(workdir) if process_id == 0 else contextlib.nullcontext():
    if config.data.pseudo.source:
      from vit_jax.jobs import teacher_labels
      if reason := teacher_labels.ensure(config):
        print(f'Stopped by {reason} while the teacher labels images. Run the same command again to resume.', flush=True)
        return failures.TRY_AGAIN
    return Run(config, workdir, began_s, weights, overridden).run(until, is_segment=is_segment)


def default_workdir(name: str) -> storage.Path:
  """Returns the directory of a run whose command names none: `runs/NAME`."""
  return storage.open_path(f'runs/{run_directory.default_name(name)}')


def _open_data(config: schema.Config, overridden: Collection[str], order: Sequence[str]) -> build.Data:
  """Opens the data of a run, with classes in `order`, () = any order; errors also say how to set another source."""
  try:
    return build.open_data(config, order=order)
  except UserError as error:
    if 'data.source' in overridden:
      raise
    advice = next((advice for folder, advice in _ADVICE_BY_FOLDER.items()
                   if config.data.source.startswith(f'folder:{folder}')), '')
    raise UserError(f'{error}\nConfig {config.name} trains on data.source={config.data.source}. {advice}Set your own '
                    'data with --config.data.source=folder:PATH, or try --config=digits, whose data is installed. The '
                    'jobs plan and check need no data.') from error


class _Session(NamedTuple):
  """The objects of one start of a run, which trains from step `start` to step `last`: the end of the run or `--until`.

  latest: the newest evaluation metrics, which evaluations write, and `early_stop` and `saving` read.
  early_stop, saving: hooks that run after all evaluations of a step, in this order.
  """
  start: int
  last: int
  writer: Writer
  clock: clocks.Clock
  latest: hooks.Latest
  early_stop: hooks.EarlyStop
  saving: hooks.Checkpoint


class Run:
  """A run in one of its processes. The constructor opens data and builds all objects; then `run` is called once."""

  def __init__(self, config: schema.Config, workdir: storage.Path, began_s: float, weights: Weights | None = None,
               overridden: Collection[str] = ()) -> None:
    self.workdir, self._began_s, self._weights = workdir, began_s, weights  # `began_s` is by `time.monotonic`
    self._restored_digest, self._restore_s = '', 0.  # digest and loading time of the checkpoint, if the run resumes
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
    """Restores or initializes the state, trains, evaluates; has the arguments and the exit status of `train.run`."""
    total = self.parts.lengths.total_steps
    try:
      last = min(total, self.parts.lengths.steps(until)) if until else total
    except UserError as error:
      raise UserError(f'--until: {error}') from None
    console.begin_stage('creating or restoring the state')
    state, start = self._restore_or_initialize()
    if start > last:
      raise UserError(f'--until: expected at least {start:,} steps, which the run in {self.workdir} has done, got '
                      f'{until!r}, {last:,} steps. Set a larger part of the run, or use another --workdir.')
    latest: hooks.Latest = {}
    early_stop = self._make_early_stop(start, latest)
    if start == last or early_stop.reason:
      paused_at = until if start < total and not early_stop.reason else ''
      final = resume.find_finished(self.workdir, paused_at, start, self._restored_digest)
      if final is not None:
        return self._print_earlier_results(final, paused_at)
    resume.write_config(self.workdir, self.config)
    session = self._open_session(start, last, early_stop, latest)
    batches = feed.Ahead(self.loader.batches(start), lambda batch: meshes.put_batch(batch, self.mesh, self.shard))
    try:
      return self._save_and_evaluate(self._train(state, batches, session), session, until, is_segment=is_segment)
    finally:
      session.writer.close()
      batches.close()
      self.loader.close()
      self.checkpointer.close()

  def _train(self, state: TrainState, batches: Iterator[Batch], session: _Session) -> loop.Ended:
    """Runs the loop and its hooks until the last step of the session, a signal, an early stop, or an error."""
    clock, start, early_stop = session.clock, session.start, session.early_stop
    images_per_step = self.config.batch_size * len(self.shard.parts) / self.shard.count  # of this process
    speed = host_speed.HostSpeed(clock, images_per_step, self.loader)
    log_every = self.parts.lengths.steps(self.config.train.log_every)
    times = host_times.HostTimes(clock, session.writer, log_every=log_every, gather=host_times.gather_by_devices())
    profiling = self._make_profile(start, clock)
    console.begin_stage('reading the first batch, compiling the train step' if start < session.last else 'evaluating')
    with (profile.served(self.config.train.profile_port, jax.process_index()), profiling,
          stopping.StopRequest() as request):
      step_fn = times.timed(profiling.mark(speed.timed(self.parts.program.step_fn)))
      in_order: list[loop.Hook] = [times, *self._make_hooks(session), early_stop, session.saving, profiling, speed]
      return loop.run(
          step_fn, state, batches, start=start, total=start if early_stop.reason else session.last, hooks=in_order,
          clock=clock, should_stop=lambda step: request.reason(step) or early_stop.reason)

  def _save_and_evaluate(self, ended: loop.Ended, session: _Session, until: str, *, is_segment: bool) -> int:
    """Saves the state after the loop, and evaluates it unless a signal or a segment ended; returns the exit status."""
    total, early_reason = self.parts.lengths.total_steps, session.early_stop.reason
    if ended.error:
      raise self._save_after(ended.error, ended, session)
    if ended.reason and ended.reason != early_reason:
      return self._stop_early(ended, session)
    is_paused = ended.step == session.last < total and not early_reason
    if is_paused and is_segment:
      return self._stop_early(ended._replace(reason='the end of the segment'), session)
    if early_reason:
      log.info('Ended at step %s of %s by %s.', f'{ended.step:,}', f'{total:,}', early_reason)
    try:
      self._finish(ended, session, until if is_paused else '')
    except TemporaryError as error:
      raise self._save_after(error, ended, session) from error
    return 0

  def _restore_or_initialize(self) -> tuple[TrainState, int]:
    """Returns the state of the newest complete checkpoint, or else a new state, and the step of the state."""
    total = self.parts.lengths.total_steps
    began_s = time.monotonic()
    restored = self.checkpointer.restore(self.parts.program.placed_state)
    if restored is None:
      return self._initialize(), 0
    self._restore_s = time.monotonic() - began_s
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
    weights, self._weights = self._weights, None  # so that the arrays are freed after `begin`
    return init_state.begin(self.config, self.parts.program, self.data.class_names, self.workdir, weights)

  def _open_session(self, start: int, last: int, early_stop: hooks.EarlyStop, latest: hooks.Latest) -> _Session:
    """Opens the session from step `start` to `last`, records the start, and charges the clock with the time so far."""
    total, lost = self.parts.lengths.total_steps, resume.find_lost(self.workdir, start)
    writer = Writer(self.workdir, process_index=jax.process_index(), resumed_from=start or None,
                    progress_total=total, progress=self.config.train.progress and start < total,
                    trackers=trackers.opener(self.config, self.workdir, start or None))
    writer.event('start', **machine.origin(), devices=jax.device_count(), processes=jax.process_count(),
                 **elastic.describe(self.config, meshes.count_slices(jax.devices())), lost=lost._asdict())
    clock = clocks.Clock(self.config.batch_size, build.train_flops(self.parts) * self.config.batch_size,
                         clocks.find_peak_flops(jax.devices()[0].device_kind, jax.device_count()))
    clock.charge('startup', time.monotonic() - self._began_s - self._restore_s)
    if self._restore_s:
      clock.charge('restore', self._restore_s)
    writer.event('goodput', step=start, **clock.goodput()._asdict())  # counts even if the run is killed soon
    every = self.config.checkpoints.every
    every_s = durations.parse_wall(every)  # None = `every` is not a wall time
    times = SaveTimes(0 if every_s else self.parts.lengths.steps(every), every_s, start=start)
    saving = hooks.Checkpoint(times, self.checkpointer, writer, clock, about=self._describe_run(), latest=latest)
    return _Session(start, last, writer, clock, latest, early_stop, saving)

  def _make_hooks(self, session: _Session) -> list[loop.Hook]:
    """Returns the hooks that measure. They run before the hooks that stop early and save, which read the metrics."""
    config, parts, writer, clock, latest = self.config, self.parts, session.writer, session.clock, session.latest
    added: list[loop.Hook] = [
        hooks.Metrics(writer, clock, log_every=parts.lengths.steps(config.train.log_every),
                      total=parts.lengths.total_steps, steps_an_epoch=parts.lengths.steps_an_epoch,
                      schedule=parts.schedule),
        hooks.Finite(config.train.on_nonfinite, diagnose.build(parts.objective, parts.prepare, self.loader.describe,
                                                               self.loader.indexes, mesh=self.mesh, seed=config.seed))]
    added += trackers.hooks(config, parts, writer, self.mesh)
    added += [hooks.Alarm(watch, writer) for watch in kinds.of(config).watches(parts.lengths)]
    for name in results.in_order(self.evaluators):
      every = parts.lengths.steps(config.evals[name].every)
      added.append(hooks.Evaluate(every, self._make_evaluation(name, writer), writer, clock, latest))
    if best_metric := config.checkpoints.keep_best:  # the evaluation of this metric also runs at each checkpoint
      every = parts.lengths.steps(config.checkpoints.every)
      evaluate = self._make_evaluation(best_metric.split('/')[0], writer)
      added.append(hooks.Evaluate(every, evaluate, writer, clock, latest, metric=best_metric))
    return added

  def _make_evaluation(self, name: str, writer: Writer) -> Callable[[TrainState, int], Mapping[str, float]]:
    """Returns a function that evaluates all views of an evaluation, raises alarms, and returns the metrics by name."""
    views = self.parts.objective.views()

    def evaluate(state: TrainState, step: int) -> Mapping[str, float]:
      by_view = {view: evaluator.measure(views[view].select(state.params, state.extra))
               for view, evaluator in self.evaluators[name].items()}
      log.info('%s', summary.evaluated(name, step, self.parts.lengths.total_steps, by_view))
      _raise_alarms(name, by_view, step, writer)
      return {results.metric_name(name, metric, view): value
              for view, result in by_view.items() for metric, value in result.metrics.items()}

    return evaluate

  def _make_early_stop(self, start: int, latest: hooks.Latest) -> hooks.EarlyStop:
    """Returns the hook of early stopping with the metrics up to step `start`; without a metric, it does nothing."""
    settings = self.config.train.early_stop
    evaluation_name = settings.metric.split('/')[0]
    every = self.parts.lengths.steps(self.config.evals[evaluation_name].every) if settings.metric else 0
    hook = hooks.EarlyStop(settings.metric, patience=settings.patience, min_delta=settings.min_delta, every=every,
                           latest=latest)
    if every and start:
      hook.recall(resume.record(self.workdir).rows, up_to=start)
    return hook

  def _make_profile(self, start: int, clock: clocks.Clock) -> profile.Profile:
    """Returns the hook that profiles the configured steps; also writes the HLO of the train step if configured."""
    settings, total = self.config.train, self.parts.lengths.total_steps
    hook = profile.Profile(self.workdir / 'profile', durations.parse_steps(settings.profile), start=start, total=total,
                           process_index=jax.process_index())
    if settings.dump_hlo and start < total:
      with clock.phase('compile'):
        self._dump_hlo()
    return hook

  def _dump_hlo(self) -> None:
    """Writes the optimized program of the train step, compiled from shapes as in a plan.

    The first step of the run may have to compile the program again. All processes compile, and process 0 writes.
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

  def _describe_run(self) -> dict[str, Any]:
    """Returns the description of the run that is saved in each checkpoint."""
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
    """Saves the last step if this process is the only one; returns the error, with advice if the step is saved."""
    # With several processes, the others wait in the next step and cannot take part in saving.
    if jax.process_count() > 1 or ended.step == session.start or session.saving.has_failed:
      return error
    try:
      session.saving.save(ended.step, ended.state, wait=True)
    except (UserError, TemporaryError) as save_error:
      log.warning('Step %s could not be saved either: %s', f'{ended.step:,}', save_error)
      return error
    error_type = TemporaryError if isinstance(error, TemporaryError) else UserError
    return error_type(f'{str(error).rstrip(".")}. Step {ended.step:,} is saved; run the same command again to resume.')

  def _stop_early(self, ended: loop.Ended, session: _Session) -> int:
    """Saves the state without an evaluation; returns the exit status of a run that the same command resumes."""
    session.saving.save(ended.step, ended.state, wait=True)
    session.writer.event('stop', step=ended.step, reason=ended.reason)
    session.writer.close()
    print(f'Stopped by {ended.reason} after step {ended.step:,}, which is saved. Run the same command again to resume.',
          flush=True)
    return failures.TRY_AGAIN

  def _finish(self, ended: loop.Ended, session: _Session, until: str) -> None:
    """Evaluates, saves, and writes results and report. `until` is the part after which the run pauses; '' = it ends."""
    step, writer = ended.step, session.writer
    with session.clock.phase('evaluate'):
      final = results.measure(self.evaluators, self.parts.objective, ended.state)
    if session.start < step:
      for name, by_view in final.results.items():
        _raise_alarms(name, by_view, step, writer)
      writer.write(step, final.metrics)
      session.latest.update({name: (step, value) for name, value in final.metrics.items()})
      session.saving.save(step, ended.state, wait=True)
    writer.event('goodput', step=step, **session.clock.goodput()._asdict())
    if until:
      writer.event('stop', step=step, reason=f'--until={until}')
    writer.close()
    self._write_results(final, session.saving.digest or self._restored_digest, step, until)

  def _write_results(self, final: results.Final, digest: str, step: int, until: str) -> None:
    """Writes all results of a run and the report; if the run pauses, writes only `paused_UNTIL.json`."""
    record = resume.record(self.workdir) if not jax.process_index() else reader.NOTHING
    checkpoint_used = self._find_checkpoint() if not jax.process_index() else None
    lines = [summary.best(final, record.rows, checkpoint_used),
             summary.spent(record.events, num_steps=step, batch_size=self.config.batch_size)]
    log.info('%s', '\n'.join(filter(None, lines)))
    spent = clocks.sum_starts(record.events)
    processor_s = {'processor_s': spent.processor_s, 'training_processor_s': spent.training_processor_s}
    content = {
        'step': step, 'starts': clocks.count_starts(record.events), 'seconds': spent.total_s,
        **{name: seconds for name, seconds in processor_s.items() if seconds is not None},  # None = not known
        'params_digest': digest, 'headline': final.headline_name,
        'num_params': trees.num_elements(self.parts.program.abstract_state.params), 'metrics': final.metrics,
        'exaflops': build.train_flops(self.parts) * self.config.batch_size * step / 1e18,
        'num_examples': {name: next(iter(group.values())).num_examples for name, group in final.results.items()},
        'data': {name: fingerprint._asdict() for name, fingerprint in self._fingerprints().items()}}
    if until:
      run_directory.write_json(self.workdir / run_directory.paused_file(until), {**content, 'top1': final.score})
      self._print_paused(step, until)
      return
    fit = transforms.eval_transform(self.config.data.recipe, self.config.image_px)
    results.write(self.workdir, final, step, fit=fit, source=resources.eval_source(self.config, self.data, final.name),
                  class_names=self.data.class_names, params_digest=digest, data=self._fingerprints())
    run_directory.write_json(self.workdir / 'final.json', content)
    if jax.process_index() == 0:
      page = report.write_or_warn(self.workdir)
      print(summary.last_line(content, checkpoint_used, page), flush=True)

  def _find_checkpoint(self) -> checkpoint_files.Chosen | None:
    """Returns the checkpoint whose weights are those of the run: the best by `keep_best`, or else the newest one."""
    config = build.saved_config(self.workdir) or self.config  # a finished run keeps its own settings
    return runs.find_whole(self.workdir, config.checkpoints.keep_best)[0]

  def _print_earlier_results(self, final: Mapping[str, Any], until: str) -> int:
    """Prints the results of a run that finished or paused in an earlier start; writes a report that is missing."""
    self.loader.close()
    self.checkpointer.close()
    log.info('The run is not trained or evaluated again, and its results stay as they are. To evaluate it, run '
             'vit-jax evaluate --workdir=%s.', self.workdir)
    if jax.process_index() == 0 and until:
      self._print_paused(final['step'], until)
    elif jax.process_index() == 0:
      path = self.workdir / report.PAGE
      page = str(path) if path.exists() else report.write_or_warn(self.workdir)
      print(summary.last_line(final, self._find_checkpoint(), page), flush=True)
    return 0

  def _print_paused(self, step: int, until: str) -> None:
    print(f'Paused after step {step:,} of {self.parts.lengths.total_steps:,} by --until={until}, evaluated and saved. '
          'Run the same command without --until to continue.', flush=True)

  def _fingerprints(self) -> dict[str, resources.Fingerprint]:
    """Returns a fingerprint of each split that the run read, by `SOURCE SPLIT`; without images labeled by a teacher."""
    data = self.config.data
    source_by_name = {f'{data.source} {data.eval_split}': self.data.eval}
    if not data.pseudo.source:
      source_by_name[f'{data.source} {data.train_split}'] = self.data.train
    return self._resources.fingerprints() | {
        name: resources.fingerprint(source) for name, source in source_by_name.items()}


def _raise_alarms(name: str, by_view: Mapping[str, Result], step: int, writer: Writer) -> None:
  """Logs a warning and writes an event for each metric of an evaluation that is too low."""
  for view, result in by_view.items():
    for low in result.alarms:
      metric = results.metric_name(name, low.metric, view)
      writer.event('alarm', step=step, metric=metric, value=low.value, below=low.below)
      log.warning('ALARM at step %s: %s=%.4g is below %s=%g.\n  %s.', f'{step:,}', metric, low.value, low.setting,
                  low.below, low.advice)
