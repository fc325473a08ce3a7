"""Planning: the verdict, the figures, what is written, the search, and what is said where something is missing."""
from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest

from vit_jax import main
from vit_jax.config import check, engine, files
from vit_jax.core.errors import UserError
from vit_jax.jobs import build
from vit_jax.models import cost
from vit_jax.plan import cards, compile, compiled, overlap, plan, schedule, search, table, topologies
from vit_jax.record import console

TINY = ['--config=digits', '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
        '--config.model.mlp.hidden=24', '--config.batch_size=48', '--config.length=37 steps']
JFT = ['--config=vit_l16_jft', '--topology=v3-512']
FLAT = 'model.depth=2'  # where the depth of the network is not the question


MADE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def each_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
  """What is made from shapes is made once for all tests: tracing a large network takes seconds."""
  def once(make: Callable[..., Any], *args: Any) -> Any:
    key = repr((make.__name__, args))
    if key not in MADE:
      MADE[key] = make(*args)
    return MADE[key]

  for module, name in ((plan, 'abstract_parts'), (build, 'lay_out')):
    monkeypatch.setattr(module, name, functools.partial(once, getattr(module, name)))


def run(workdir: pathlib.Path, *words: str) -> dict:
  assert main.run(['--job=plan', *words, f'--to={workdir}']) == 0
  return json.loads((workdir / 'plan.json').read_text())


def subject(config: str, topology: str, *overrides: str) -> plan.Subject:
  loaded = files.load(config, list(overrides))
  there = topologies.parse(topology, slices=loaded.mesh.slices)
  return plan.Subject(loaded, there, loaded.data.num_examples, loaded.data.num_classes, False)


def answer(peak_gib: float = 1., cycles: int = 94_000_000, sent: int = 70_000_000) -> compile.Answer:
  costs = compiled.NOTHING._replace(cycles=cycles, collectives=[compiled.Collective('all-reduce', 3, sent, sent)])
  return compile.Answer(None, 2**29, 2**29, int(peak_gib * 2**30), costs, 1., 2.)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(topologies, 'missing', lambda topology: 'The TPU compiler is not installed here.')


@pytest.mark.parametrize('words, message', [
    (['--topology=cpu:8'], '--config: expected a config or the --workdir of a run, got neither.'),
    (['--topology=cpu:8', '--config=digits', '--workdir=x'], 'Set --to=x to write plan.md and plan.json there.'),
    (['--topology=v5e:4x4', '--config=digits', '--slices=2'], 'mesh.slices: expected 2, the number of slices of the')])
def test_a_plan_needs_one_config_and_its_slices(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  assert main.run(['plan', *words]) == 2
  assert message in capsys.readouterr().err.replace(f'{tmp_path}/', '') and not list(tmp_path.iterdir())


def test_the_config_of_a_run_is_planned_by_its_directory(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'config.json').write_text(engine.to_json(files.load('digits', [one[9:] for one in TINY[1:]])))
  found = run(tmp_path / 'plan', '--topology=h200:1', f'--workdir={tmp_path}')
  assert found == run(tmp_path / 'same', '--topology=h200:1', *TINY)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['config.json', 'plan', 'same']


@pytest.mark.slow(reason='7 s: a program compiles; tests/plan/test_compiled.py reads what a compiler says')
def test_a_step_is_compiled_for_simulated_devices_and_measured(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  found = run(tmp_path, *TINY, '--topology=cpu:3', '--config.mesh.fsdp=3')
  assert found['fits'] and found['compiled'] and found['num_devices'] == 3 and found['total_steps'] == 37
  assert found['mesh'] == {'data': 1, 'fsdp': 3, 'tensor': 1} and found['measured'] is False
  assert 0 < found['argument_bytes'] < found['peak_gib_per_device'] * 2**30
  assert found['collectives'] and all(row['count'] > 0 and row['bytes'] > 0 for row in found['collectives'])
  text = (tmp_path / 'plan.md').read_text()
  assert text.strip() == capsys.readouterr().out.strip()
  assert '**Fits**' in text and 'assumed 40% of the peak for float32' in text and 'head/kernel' in text


def test_each_length_of_sequences_is_planned_and_a_step_is_their_mean(
    tmp_path: pathlib.Path, no_compiler: None) -> None:
  found = run(tmp_path, *TINY, '--topology=v5e:2x2', '--config.data.recipe.eval_native_patch=4',
              '--config.data.recipe.native_lengths=4,16,16', '--config.train.accumulate=2')
  short, long = found['lengths']
  assert (short['tokens'], short['microbatches']) == (4, 1) and (long['tokens'], long['microbatches']) == (16, 2)
  assert short['estimated_step_ms'] < long['estimated_step_ms']
  mean = (short['estimated_step_ms'] + 2 * long['estimated_step_ms']) / 3
  assert found['estimated_step_ms'] == pytest.approx(mean) and found['mfu'] == pytest.approx(plan.ASSUMED_MFU)
  assert found['peak_gib_per_device'] == long['peak_gib_per_device']
  assert '| 16                  | 67%          | 2            |' in (tmp_path / 'plan.md').read_text()


@pytest.mark.slow(reason='5 s: traces L/16; planned below are two of its layers')
def test_the_run_of_the_paper_is_planned_without_data_and_without_the_compiler(
    tmp_path: pathlib.Path, no_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
  found = run(tmp_path, *JFT, '--config.model.full_remat=3')
  config = files.load('vit_l16_jft', [])
  own = cost.forward(config.model, config.image_px, head=config.head, num_classes=18_291)
  assert found['total_steps'] == 1_035_645 and found['num_devices'] == 512 and found['paper_core_days'] == 680
  assert found['num_params'] == sum(own.parameters.values()) and not found['compiled'] and found['fits']
  flops = 3 * 4096 * sum(own.flops.values())
  assert found['flops_per_step'] == flops
  assert found['estimated_step_ms'] == pytest.approx(flops / 512 / 61.5e12 / .4 * 1e3)
  assert found['core_days'] == pytest.approx(found['estimated_step_ms'] / 1e3 * 1_035_645 * 512 / 86_400)
  text = capsys.readouterr().out
  assert 'remat none, full in the first 3. ' in text
  assert 'Layout for 512 x v3: data=64 fsdp=8' in text and found['dtype'] == 'bfloat16'
  assert 'by arithmetic only. The TPU compiler is not installed here.' in text
  assert 'Time and cost (not measured on a TPU)' in text and 'TPUv3-core-days, ViT paper, Table 2' in text


def test_the_most_expensive_operations_are_listed_and_the_rest_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
  parts = [compiled.Operation('backward', 'Block/mlp/up/dot_general', 48, 47_000_000)]
  parts += [compiled.Operation('forward', f'part{i}', 1, 1_000_000) for i in range(table.OPERATIONS + 3)]
  text = table.render(planned(monkeypatch, answer()._replace(operations=parts)))
  assert '| backward | Block/mlp/up/dot_general | 48    | 50.00 | 50.0% |' in text
  assert '| forward  | all others               | 4     | 4.26  | 4.3%  |' in text


def test_state_is_split_over_fsdp(no_compiler: None) -> None:
  whole = plan.make(subject('vit_l16_jft', 'v3:2x2', FLAT, 'mesh.fsdp=1')).memory
  split = plan.make(subject('vit_l16_jft', 'v3:2x2', FLAT, 'mesh.fsdp=8')).memory
  assert whole['parameters'] == pytest.approx(8 * split['parameters'], rel=.05)  # biases, norms, positions stay whole
  assert whole['optimizer'] == pytest.approx(2 * whole['parameters'], rel=.001)


def test_an_fsdp_size_that_divides_no_dimension_is_reported(no_compiler: None) -> None:
  found = plan.make(subject('vit_l16_jft', 'v5e:16x16', FLAT, 'mesh.fsdp=256', 'model.width=1664'))
  assert found.replicated_bytes > 2**27 and 'mesh.fsdp=256 does not divide their dimensions' in table.verdict(found)
  assert plan.make(subject('vit_l16_jft', 'v5e:16x16', FLAT, 'mesh.fsdp=128')).replicated_bytes < 2**25


def planned(monkeypatch: pytest.MonkeyPatch, given: compile.Answer) -> plan.Plan:
  monkeypatch.setattr(topologies, 'missing', lambda topology: '')
  monkeypatch.setattr(compile, 'ask', lambda request: given)
  return plan.make(subject('vit_l16_jft', 'v3:16x16', FLAT))


def test_cycles_and_collectives_become_time_apart_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
  found = planned(monkeypatch, answer()).to_json()
  assert found['estimated_step_ms'] == pytest.approx(100.) and found['collectives_ms'] == pytest.approx(1.)
  assert found['step_ms_with_collectives'] == pytest.approx(101.) and found['step_ms_source'] == 'compiler_cycles'
  assert found['mfu'] == pytest.approx(found['flops_per_step'] / 512 / 61.5e12 / .1)


def test_the_price_is_that_of_all_chips_for_the_steps_and_their_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
  found = planned(monkeypatch, answer())
  assert found.to_json()['price'] is None and '| price ' not in table.render(found)
  priced = dataclasses.replace(found, hourly_price=2.5)
  hours = .101 * 1_035_645 / 3600
  assert priced.to_json()['price'] == pytest.approx(2.5 * 256 * hours)  # 512 devices of v3 are 256 chips
  assert priced.to_json()['hours_with_collectives'] == pytest.approx(hours)
  assert f'{2.5 * 256 * hours:,.2f}' in table.render(priced) and '256 at 2.5 an hour' in table.render(priced)


def test_a_plan_by_arithmetic_claims_no_compiled_programs_and_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
  compiled_plan = dataclasses.replace(planned(monkeypatch, answer()), is_quick=True, hourly_price=2.5)
  by_arithmetic = dataclasses.replace(compiled_plan, answer=None, reason='No compiler.')
  monkeypatch.setattr(table.quick, 'is_shorter', lambda config: True)
  for one, is_compiled in ((compiled_plan, True), (by_arithmetic, False)):
    text = table.render(one)
    assert ('This plan is quick' in text) is is_compiled
    assert ('an hour; all steps, with collectives' in text) is is_compiled and 'an hour; all steps' in text


def test_loops_of_unknown_length_are_listed_with_their_time_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
  costs = answer().costs._replace(unknown=compiled.Unknown(4, 94_000, ['jit(_beta)/jit(_gamma)']))
  found = planned(monkeypatch, answer()._replace(costs=costs))
  (row,) = (line for line in table.render(found).splitlines() if 'loops of unknown length' in line)
  assert '| 0.1 ms ' in row and '4, counted as one iteration each' in row and 'jit(_beta)/jit(_gamma)' in row
  assert found.to_json()['unknown_loops'] == {'loops': 4, 'cycles': 94_000, 'sources': ['jit(_beta)/jit(_gamma)']}
  assert 'loops of unknown length' not in table.render(planned(monkeypatch, answer()))


def test_kernels_without_cycles_are_listed_and_times_are_lower_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
  costs = answer().costs._replace(kernels=[compiled.Kernel('attend_fwd', 24), compiled.Kernel('other', 1_200)])
  found = planned(monkeypatch, answer()._replace(costs=costs))
  cells = {row[1].strip(): row[2].strip() for row in (line.split('|') for line in table.render(found).splitlines())
           if len(row) == 5}
  assert cells['step'] == '> 100.0 ms' and cells['core-days'].startswith('> ') and cells['MFU'].startswith('< ')
  text = table.render(found)
  assert '24 x attend_fwd, 1,200 x other: the compiler counts no cycles for these' in text
  assert found.to_json()['uncounted_kernels'] == {'attend_fwd': 24, 'other': 1_200}
  tried = [search.Tried(search.candidates(found)[0], found, 'fits')]
  assert '> 101.0' in search.render(tried)
  without = table.render(planned(monkeypatch, answer()))
  assert '> ' not in without and '| kernels' not in without


def test_what_goes_between_slices_is_listed_with_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
  rows = [*answer().costs.collectives, compiled.Collective(compiled.BETWEEN_SLICES, 2, 2**20, 2**20)]
  given = answer()._replace(costs=answer().costs._replace(collectives=rows))
  monkeypatch.setattr(topologies, 'missing', lambda topology: '')
  monkeypatch.setattr(compile, 'ask', lambda request: given)
  one = subject('vit_l16_jft', 'v5e:16x16', FLAT, 'mesh.slices=2')
  assert one.topology.num_devices == one.request().parse().num_devices == 512
  found = plan.make(one)
  text, content = table.render(found), found.to_json()
  assert 'on 2 slices of v5e:16x16, 512 devices' in text and 'data-center network' in text
  ms = 1e3 * 2**20 / 3.125e9
  assert any([cell.strip() for cell in line.split('|')][1:6:4] == ['between slices', f'{ms:.2f}']
             for line in text.splitlines() if line.count('|') == 7)
  assert f'| {ms:.3f} ms ' in text and 'at 3.125 GB/s a device; not included in other figures' in text
  assert content['between_slices_ms'] == pytest.approx(ms)
  assert content['slices'] == 2 and content['collectives_ms'] == pytest.approx(.7)
  assert content['collectives'][-1] == {'kind': 'between slices', 'count': 2, 'bytes': 2**20, 'sent_bytes': 2**20}
  unknown = plan.make(subject('vit_l16_jft', 'v3:16x16', FLAT, 'mesh.slices=2'))
  assert unknown.between_slices_ms is None and '| -  ' in table.collectives(unknown)


def test_slices_that_do_not_divide_the_mesh_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
  words = ['--config=vit_l16_jft', '--topology=v5e:4x4', '--config.mesh.slices=2', '--config.mesh.fsdp=32',
           f'--config.{FLAT}']
  assert main.run(['--job=plan', *words]) == 2
  assert 'mesh.slices: expected a divisor of data=1' in capsys.readouterr().err


def test_gpus_that_are_not_here_leave_the_arithmetic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setattr(topologies.glob, 'glob', lambda pattern: ['/dev/nvidia0', '/dev/nvidia1'])
  monkeypatch.setattr(cards, 'is_installed', lambda: False)
  found = run(tmp_path, '--config=vit_l16_jft', f'--config.{FLAT}', '--config.model.dtype=float32', '--topology=h200:8')
  assert not found['compiled'] and found['fits'] and found['estimated_step_ms'] > 0
  out = capsys.readouterr().out
  assert "XLA's compiler for GPUs is not installed (Linux; no GPU is needed). Run: pip install" in out
  assert found['assumed_mfu'] == plan.GPU_MFU and 'of the peak for float32, 494.5 TFLOP/s' in out  # TF32


def test_a_program_that_does_not_fit_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
  lost = compile.Answer(compiled.Overflow(50.49, 15.48, 'temporaries'))
  found = planned(monkeypatch, lost)
  text, content = table.render(found), found.to_json()
  assert '**Does not fit**: temporaries need 50.49 GiB, 35.01 GiB more than the 15.48 GiB of a device' in text
  assert not content['fits'] and content['estimated_step_ms'] is None and content['peak_gib_per_device'] > 50.49
  assert content['step_ms_source'] is None and content['assumed_mfu'] is None and content['roofline_ms'] > 0
  assert content['overflow'] == {'need_gib': 50.49, 'have_gib': 15.48, 'what': 'temporaries'}


def test_a_peak_above_the_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
  found = planned(monkeypatch, answer(peak_gib=16.))
  assert not found.fits and '0.52 GiB too much, as compiled' in table.verdict(found)


@pytest.mark.slow(reason='4 s: traces tens of layouts; one in which nothing fits is below')
def test_the_search_finds_the_fastest_that_fits_and_says_its_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  """A compiler that only fits with accumulation, and is faster unrolled."""
  def ask(request: compile.Request) -> compile.Answer:
    c = request.config
    if c.train.accumulate < 4:
      return compile.Answer(compiled.Overflow(20., 15.48, 'temporaries'))
    return answer(cycles=94_000_000 + 1_000_000 * (c.model.execution.value == 'scan') + 1000 * c.train.accumulate)

  monkeypatch.setattr(topologies, 'missing', lambda topology: '')
  monkeypatch.setattr(compile, 'ask', ask)
  monkeypatch.setattr(search, 'MAX_COMPILES', 1000)
  found = run(tmp_path, '--config=vit_b16_jft', f'--config.{FLAT}', '--config.batch_size=16384', '--topology=v3:2x2',
              '--search')['search']
  assert '--config.train.accumulate=4 ' in found['flags'] and 'execution=unrolled' in found['flags']
  assert sum(row['fits'] for row in found['tried']) == search.ENOUGH + 1  # and the best of them unrolled
  text = capsys.readouterr().out
  assert '4.52 GiB more than the 15.48 GiB' in text and 'skipped:' in text and f'{found["flags"]}' in text
  overrides = [word.removeprefix('--config.') for word in found['flags'].split()]
  assert files.load('vit_b16_jft', overrides).train.accumulate == 4


def test_a_search_in_which_nothing_fits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(search, 'MAX_COMPILES', 2)
  tried = search.search(planned(monkeypatch, compile.Answer(compiled.Overflow(20., 15.48, 'temporaries'))))
  assert search.best(tried) is None and 'Use more devices' in search.render(tried)
  assert sum(t.plan is not None for t in tried) == search.MAX_COMPILES


def test_a_search_in_which_nothing_was_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
  found = planned(monkeypatch, answer())
  skipped = [search.Tried(candidate, None, 'skipped: 99.0 GiB by arithmetic') for candidate in search.candidates(found)]
  assert f'None of the {len(skipped)} candidates fits by arithmetic, so none was compiled. Use more' in search.render(
      skipped)


@pytest.mark.parametrize(('tensor', 'flag'), [(2, ''), (-1, ' --config.mesh.tensor=2')])
def test_the_flags_of_a_search_set_the_axis_that_took_the_rest(
    no_compiler: None, tensor: int, flag: str) -> None:
  overrides = ['mesh.data=4', 'mesh.fsdp=1', f'mesh.tensor={tensor}', FLAT]
  found = plan.make(subject('vit_b16_jft', 'v3:2x2', *overrides))
  candidate = search.candidates(found)[0]
  assert found.parts.mesh.shape['tensor'] == 2 and candidate.flags().endswith(f'--config.mesh.data=-1{flag}')
  changes = [word.removeprefix('--config.') for word in candidate.flags().split()]
  config = files.load('vit_b16_jft', [*overrides, *changes])
  assert config.mesh == candidate.apply(found.parts.config).mesh
  assert not check.problems(config) and config.mesh.tensor == 2 and config.mesh.data == -1


def test_a_search_without_the_compiler_is_refused(no_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--job=plan', *JFT, f'--config.{FLAT}', '--search']) == 2
  assert '--search: expected the compiler for the hardware. The TPU compiler is not' in capsys.readouterr().err


@pytest.mark.parametrize(('words', 'said'), [
    (['--config=vit_l16_jft', '--topology=v3:16x17'], "one of the topologies below, got 'v3:16x17'"),
    (['--config=vit_l16_jft'], 'The plan job needs --topology=TEXT: hardware'),
    (['--config=vit_l16_jft:mesh=v9', '--topology=v3:2x2'], 'laid out for the devices it runs on'),
    (['--config=vit_l16_jft:S/16', '--topology=v3:2x2'], "as this config takes none, got 'S/16'"),
    (['--config=vit_l16_jft', '--topology=v3:2x2', '--search=yes'], "--search: expected no value, got 'yes'"),
    (['--config=vit_l16_jft', f'--config.{FLAT}', '--topology=v3:2x2', '--config.mesh.fsdp=3'],
     'expected sizes whose product is 8'),
    (['--config=vit_l16_jft', '--topology=v3:2x2', '--config.data.num_classes=0'], 'to plan without the data')])
def test_mistakes_are_messages(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--job=plan', *words]) == 2
  assert said in capsys.readouterr().err


def test_the_planned_step_is_the_one_that_train_runs(no_compiler: None) -> None:
  """Equal programs: the text lowered for the planner's mesh without devices and for a real one."""
  words = [w.removeprefix('--config.') for w in TINY[1:]]
  config = files.load('digits', [*words, 'mesh.fsdp=2'])
  one = plan.Subject(config, topologies.parse('cpu:8'), 1437, 10, False)
  import jax

  from vit_jax.parallel import mesh as meshes
  real = build.parts(config, mesh=meshes.make(config.mesh, jax.devices()), num_examples=1437, num_classes=10,
                     in_memory=False)
  planned_ = plan.abstract_parts(one)
  assert planned_.program.abstract_state == real.program.abstract_state
  assert jax.tree.map(lambda s: s.spec, planned_.program.shardings) == jax.tree.map(
      lambda s: s.spec, real.program.shardings)


@pytest.mark.slow(reason='6 s: starts a program; one that is killed is below')
def test_a_compiler_that_fails_shows_the_end_of_what_it_said() -> None:
  config = files.load('digits', [])
  with pytest.raises(UserError, match=r'Compiling for cpu:2 failed \(status 1\):\n(.*\n)+.*Error'):
    compile.ask(compile.Request(config, 'cpu:2', 1437, -10, False))
  with pytest.raises(UserError, match='^batch_size: expected a multiple of 2 batch shards .* got 127'):
    compile.ask(compile.Request(dataclasses.replace(config, batch_size=127), 'cpu:2', 1437, 10, False))


def test_a_compiler_that_is_killed_says_what_may_be_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(compile, '_run', lambda *args: (-9, ['noise']))
  with pytest.raises(UserError, match=r'failed \(status -9\):\nthe process was killed, .* out of memory'):
    compile.ask(compile.Request(files.load('digits', []), 'cpu:2', 1437, 10, False))


@pytest.mark.slow  # 30 s
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler (libtpu) is not installed')
def test_the_tpu_compiler_counts_cycles_and_collectives(tmp_path: pathlib.Path) -> None:
  found = run(tmp_path, *TINY, '--topology=v3:2x2', '--config.model.execution=scan')
  assert found['fits'] and found['step_ms_source'] == 'compiler_cycles' and found['estimated_step_ms'] > 0
  assert {row['kind'] for row in found['collectives']} == {'all-reduce'} and not found['unknown_loops']['loops']


@pytest.mark.slow  # 30 s
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler (libtpu) is not installed')
def test_the_tpu_compiler_plans_several_slices(tmp_path: pathlib.Path) -> None:
  found = run(tmp_path, *TINY, '--topology=v5e:2x2', '--config.mesh.slices=2', '--config.mesh.fsdp=2',
              '--config.model.width=128', '--config.model.mlp.hidden=128')  # the compiler sends whole tiles of 4 KiB
  assert found['num_devices'] == 8 and found['mesh'] == {'data': 4, 'fsdp': 2, 'tensor': 1}
  between = {row['kind']: row for row in found['collectives']}['between slices']
  params = found['num_params'] * 4
  assert 0 < between['sent_bytes'] < params * 1.2  # gradients, scattered over fsdp as far as they are


@pytest.mark.slow  # 60 s
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler (libtpu) is not installed')
def test_all_loops_of_a_step_over_all_devices_are_counted(tmp_path: pathlib.Path) -> None:
  words = ['--config=vit_s16_i1k', '--config.model.execution=scan', '--config.model.depth=3',
           '--config.model.dtype=bf16', '--config.data.recipe.mixup=0', '--config.batch_size=256',
           '--config.mesh.fsdp=-1', '--config.mesh.data=1']
  found = run(tmp_path, *words, '--topology=v5e:4x4')
  assert found['fits'] and found['unknown_loops']['loops'] == 0
  assert found['mfu'] < 1 and {row['kind'] for row in found['collectives']} >= {'all-gather', 'all-reduce'}


def test_the_time_by_schedule_stands_beside_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
  second = schedule.Schedule(47_000_000, 23_500_000, 5, 940_000, 3, ['fused'])
  parts = [compiled.Operation('backward', 'Block/mlp/up/dot_general', 48, 94_000_000, 47_000_000)]
  found = planned(monkeypatch, answer()._replace(schedule=second, operations=parts))
  content, text = found.to_json(), table.render(found)
  assert content['estimated_step_ms'] == 100. and content['scheduled_step_ms'] == 50.
  assert content['schedule']['uncounted'] == 5 and content['operations'][0]['scheduled'] == 47_000_000
  cells = {row[1].strip(): row[2].strip() for row in (line.split('|') for line in text.splitlines()) if len(row) == 5}
  assert (cells['step'], cells['lower bound, by schedule'], cells['not in it']) == ('100.0 ms', '> 50.0 ms', '1 ms')
  assert '(50% of the time)' in text and 'estimate for 5 operations without a schedule' in text
  assert '| 100.00 | 100.0% | 50.00           |' in text
  assert 'by schedule |' not in table.render(planned(monkeypatch, answer()))


def test_the_step_with_collectives_has_those_that_the_core_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
  """One of the 3 all-reduces' milliseconds is exposed; without a schedule all of them count."""
  second = schedule.Schedule(47_000_000, 0, 0, 0, 0, [])
  waits = [overlap.Wait('all-reduce', 3, 3_000_000, 1_000_000)]
  found = planned(monkeypatch, answer()._replace(schedule=second, waits=waits))
  content, text = found.to_json(), table.render(found)
  assert content['collectives_ms'] == 3. and content['exposed_collectives_ms'] == 1.
  assert content['step_ms_with_collectives'] == 101. and found.step_ms_with_collectives == 101.
  assert content['collectives'][0]['ms'] == 3. and content['collectives'][0]['exposed_ms'] == 1.
  cells = {row[1].strip(): row[2:4] for row in (line.split('|') for line in text.splitlines()) if len(row) == 5}
  assert cells['exposed'][0].strip() == '1 ms' and '1.0% of the step with them' in cells['exposed'][1]
  assert '| 3.00 | 1.00       |' in text
  before = planned(monkeypatch, answer())
  assert before.to_json()['exposed_collectives_ms'] is None and before.step_ms_with_collectives == 101.
  assert '| exposed |' not in table.render(before)


def test_a_program_without_estimates_takes_the_time_of_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
  second = schedule.Schedule(47_000_000, 0, 0, 0, 0, [])
  none = answer()._replace(costs=answer().costs._replace(cycles=0), schedule=second, waits=[])
  found = planned(monkeypatch, none)
  content = found.to_json()
  assert content['step_ms_source'] == 'schedule' and content['assumed_mfu'] is None
  assert content['estimated_step_ms'] == content['scheduled_step_ms'] == 50.
  text = table.render(found)
  assert 'lower bound, by schedule, because the text of the program has no estimates' in text
  cells = {row[1].strip(): row[2].strip() for row in (line.split('|') for line in text.splitlines()) if len(row) == 5}
  assert all(cells[name].startswith('> ') for name in ('step', 'hours', 'core-days')) and cells['MFU'].startswith('< ')


def test_where_jaxlib_cannot_print_a_program_the_compilers_dump_is_read(tmp_path: pathlib.Path) -> None:
  class Offloaded:
    def as_text(self) -> str:
      raise jax.errors.JaxRuntimeError('async-update instruction should have 1 operands but sees 2')

  with pytest.raises(jax.errors.JaxRuntimeError, match='async-update'):
    compile.scheduled_text(Offloaded(), tmp_path)  # type: ignore[arg-type]
  for name, content in (('1-TLP-hlo.txt', 'small'), ('2-TLP-hlo.txt', 'the step'), ('3-fusion-hlo.txt', 'x' * 99)):
    (tmp_path / name).write_text(content)
  assert compile.scheduled_text(Offloaded(), tmp_path) == 'the step'  # type: ignore[arg-type]


@pytest.mark.slow(reason='25 s: compiles')
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler (libtpu) is not installed')
def test_a_plan_with_sparsecores_reads_the_dump_and_finds_gathers_hidden(tmp_path: pathlib.Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '')  # which the flags change
  found = run(tmp_path, *TINY, '--config.model.width=512', '--config.model.heads=4', '--config.model.mlp.hidden=2048',
              '--config.model.dtype=bfloat16', '--config.model.execution=unrolled', '--config.batch_size=512',
              '--config.data.in_memory=no', '--config.mesh.fsdp=4', '--config.mesh.data=-1', '--topology=v6e:2x4',
              '--flags=sparsecore')
  rows = {row['kind']: row for row in found['collectives']}
  assert found['step_ms_source'] == 'schedule' and found['estimated_step_ms'] > 0
  assert rows['all-gather']['exposed_ms'] < .5 * rows['all-gather']['ms']
  assert rows['reduce-scatter']['count'] >= 6  # the kernels of a block


def test_the_stages_of_the_compiling_process_are_shown_with_their_time_and_no_other_output() -> None:
  program = f'print("{compile._STAGE}compiling it for x", flush=True); print("noise"); raise SystemExit(3)'
  shown = io.StringIO()
  with console.stages_shown(shown):
    assert compile._run([sys.executable, '-c', program], {}) == (3, ['noise'])
  assert re.fullmatch(r' +\d+\.\d s  compiling it for x …\n', shown.getvalue()), shown.getvalue()


@pytest.mark.slow(reason='10 s: compiles')
def test_a_plan_shows_each_of_its_stages_once(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['plan', *TINY, '--topology=cpu:1']) == 0
  shown = [line.split(' s  ')[1] for line in capsys.readouterr().err.splitlines() if ' s  ' in line]
  assert shown[-5:] == ['choosing the layout …', 'building the network …', 'tracing the step of 1 blocks …',
                        'compiling it for cpu:1 …', 'reading the compiled program …']
