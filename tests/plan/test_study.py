"""Plans of studies: which runs share a program, what all runs cost, and what is not compiled again."""
from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from vit_jax import main
from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.plan import compile, compiled, plan, study, topologies


def config(*overrides: str) -> schema.Config:
  return files.load('digits', ['data.num_examples=1000', 'data.num_classes=10', 'length=50 steps', 'model.depth=1',
                               'data.source=folder:none', 'optimizer.schedule.warmup=0 steps', *overrides])


def tiny(then: tuple = ()) -> schema.Study:
  return schema.Study('tiny', {'low': config('optimizer.lr=0.01'), 'high': config('optimizer.lr=0.1', 'seed=7'),
                               'large': config('batch_size=64', 'length=20 steps')}, then)


def finals(results: schema.Results) -> dict[str, schema.Config]:
  best = max(results, key=lambda name: results[name].metrics['test/top1'])
  return {f'final{seed}': dataclasses.replace(results[best].config, seed=seed) for seed in range(3)}


@pytest.fixture
def compiled_requests(monkeypatch: pytest.MonkeyPatch) -> list[compile.Request]:
  """Requests to the compiler, which answers all with 94 M cycles: 100 ms on v3."""
  asked: list[compile.Request] = []

  def ask(request: compile.Request) -> compile.Answer:
    asked.append(request)
    costs = compiled.NOTHING._replace(cycles=94_000_000, collectives=[
        compiled.Collective('all-reduce', 1, 7_000_000, 7_000_000)])
    return compile.Answer(None, 1, 1, 2**30, costs, 1., 2.)

  monkeypatch.setattr(topologies, 'missing', lambda topology: '')
  monkeypatch.setattr(compile, 'ask', ask)
  return asked


def test_runs_that_differ_in_numbers_only_share_a_program() -> None:
  found, note = study.expand(tiny((finals,)))
  assert list(found) == ['low', 'high', 'large', 'final0', 'final1', 'final2'] and not note
  small, large = study.programs(found)
  assert small.steps == dict.fromkeys(('low', 'high', 'final0', 'final1', 'final2'), 50)
  assert large.steps == {'large': 20} and large.config.batch_size == 64
  assert small.numbers[1] == study.SAME_CLASSES


@pytest.mark.parametrize('override', ['batch_size=64', 'model.width=48', 'image_px=(32, 32)', 'train.ema=0.9',
                                      'model.remat=full', 'train.accumulate=2', 'optimizer.mu_dtype=bf16',
                                      'data.num_classes=2000'])
def test_runs_with_other_programs_are_compiled_apart(override: str) -> None:
  assert len(study.programs({'a': config(), 'b': config(override)})) == 2


def test_a_study_costs_what_the_steps_of_all_its_runs_cost(
    compiled_requests: list[compile.Request], tmp_path: pathlib.Path) -> None:
  text, content = study.make(tiny((finals,)), 'v3:2x2', to=tmp_path, is_quick=False)
  assert len(compiled_requests) == 2 and [one['runs'] for one in content['programs']] == [
      {'low': 50, 'high': 50, 'final0': 50, 'final1': 50, 'final2': 50}, {'large': 20}]
  assert content['programs'][0]['core_days'] == pytest.approx(5 * 50 * .1 * 8 / 86_400)
  more = content['programs'][1]['core_days_with_collectives']
  assert more == pytest.approx(20 * (.1 + 7e6 / 70e9) * 8 / 86_400)
  assert '# Plan: tiny, 6 runs of 2 programs on v3:2x2' in text
  (total,) = (line for line in text.splitlines() if line.startswith('| all '))
  assert '| 6 ' in total and '| 270 ' in total
  study.make(tiny((finals,)), 'v3:2x2', to=tmp_path, is_quick=False)
  assert len(compiled_requests) == 2, 'what the folder has is not compiled again'
  study.make(tiny((finals,)), 'v3:4x4', to=tmp_path, is_quick=False)
  assert len(compiled_requests) == 4


def test_plans_with_other_flags_or_compilers_are_not_reused(
    compiled_requests: list[compile.Request], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  one = schema.Study('one', {'run': config()})
  monkeypatch.setattr(topologies, 'missing', lambda topology: 'no compiler')
  _, content = study.make(one, 'v3:2x2', to=tmp_path, is_quick=False)
  assert content['programs'][0]['plan']['reason'] == 'no compiler'
  monkeypatch.setattr(topologies, 'missing', lambda topology: '')
  for flags, count in (('', 1), ('--xla_a=1', 2), ('--xla_a=1', 2), ('', 2)):
    monkeypatch.setenv('LIBTPU_INIT_ARGS', flags)
    _, content = study.make(one, 'v3:2x2', to=tmp_path, is_quick=False)
    assert len(compiled_requests) == count and content['programs'][0]['plan']['compiled']


def test_runs_with_class_weights_are_planned_with_their_classes(compiled_requests: list[compile.Request]) -> None:
  weighted = config(f'objective.class_weights={(1.,) * 10}')
  _, content = study.make(schema.Study('one', {'run': weighted}), 'v3:2x2', to=None, is_quick=False)
  assert not content['programs'][0]['problem'] and compiled_requests[0].num_classes == 10


def test_a_study_is_planned_on_as_many_slices_as_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(topologies, 'missing', lambda topology: 'no compiler')
  words = ['--job=plan', '--config=study_data_size:small,models=ViT,subsets=1000,source=folder:none',
           f'--to={tmp_path}', '--topology=v5e:2x2', '--config.data.num_classes=10', '--config.mesh.slices=0']
  for more, count in (([], 1), (['--slices=2'], 2)):
    assert main.run([*words, *more]) == 0
    (one,) = json.loads((tmp_path / 'plan.json').read_text())['programs']
    assert (one['plan']['slices'], one['plan']['num_devices']) == (count, 4 * count)
  assert 'on 2 slices of v5e:2x2' in capsys.readouterr().out


def test_a_run_that_does_not_divide_over_the_devices_is_left_out_of_the_sum(
    compiled_requests: list[compile.Request]) -> None:
  odd = schema.Study('odd', {'good': config('batch_size=64'), 'bad': config('batch_size=36')})
  text, content = study.make(odd, 'v3:2x2', to=None, is_quick=False)
  assert content['programs'][1]['plan'] is None and 'expected a multiple of 8' in content['programs'][1]['problem']
  assert '**Not in the sum**: bad. ' in text


def test_a_stage_that_needs_results_is_noted() -> None:
  def later(results: schema.Results) -> dict[str, schema.Config]:
    raise UserError('no run has a result')

  assert 'Stage 2 is only known when the runs before it are finished: no run has' in study.expand(tiny((later,)))[1]


def test_the_job_plans_a_study_by_its_config(compiled_requests: list[compile.Request], tmp_path: pathlib.Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
  words = ['--job=plan', '--config=study_data_size:small,models=ViT,source=folder:none', '--topology=v3:2x2']
  assert main.run([*words, '--config.data.num_classes=10', f'--to={tmp_path}']) == 0
  found = json.loads((tmp_path / 'plan.json').read_text())
  assert len(compiled_requests) == 1 and len(found['programs'][0]['runs']) == 4
  assert (tmp_path / 'plan.md').read_text().startswith('# Plan: data size small, 4 runs of 1 programs on v3:2x2')
  assert main.run([*words, '--search']) == 2
  assert 'expected the config of one run, got a study' in capsys.readouterr().err


@pytest.mark.slow(reason='5 s: traces three networks at their size; no test above is of fine-tuning')
def test_fine_tuning_at_high_resolution_is_planned_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(topologies, 'missing', lambda topology: 'not here')
  for spec, px in (('finetune:L/16,imagenet2012,px=512', 512), ('finetune:H/14,imagenet2012,px=518', 518),
                   ('finetune:B/16,cifar10', 384)):
    one = files.load(spec, ['model.depth=1'])
    found = plan.make(plan.lay_out(plan.Subject(one, topologies.parse('v3:4x4'), *plan.numbers(one))))
    assert found.parts.config.image_px == (px, px) and found.step_ms and found.parts.lengths.total_steps >= 10_000
