from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError

R, D, M, V = schema.Recipe, schema.Data, schema.Mesh, schema.ViT
GOOD = schema.Config(name='x', evals={'test': schema.TopK()})


def test_a_good_config_passes() -> None:
  check.check(GOOD)


@pytest.mark.parametrize(('changes', 'said'), [
    ({'length': '10 %'}, 'length: expected steps, epochs or examples, as a percentage is of the run itself'),
    ({'length': 'long'}, 'length: expected a number and a unit'),
    ({'seed': -1}, 'seed: expected 0 to 4294967295, got -1'),
    ({'optimizer': schema.Sgd(layer_decay=.7), 'model': schema.ResNet((1,))},
     'layer_decay: expected 1 for ResNet, which'),
    ({'data': D(data_dir='/x')},
     "data.data_dir: expected '' with data.source='digits', which is not a TFDS dataset, got '/x'"),
    ({'data': D(in_memory=schema.InMemory.YES, workers=2)}, 'data.workers: expected auto or 0 with data.in_me'),
    ({'checkpoints': schema.Checkpoints(keep_best='test/ece')},
     "checkpoints.keep_best: expected one of the metrics of evals.test, top1, top5, nll, got 'test/ece'. Others are "),
    ({'checkpoints': schema.Checkpoints(keep_best='test/top1@student')},
     'keep_best: expected test/top1 for the raw weights, without @'),
    ({'checkpoints': schema.Checkpoints(keep_best='test/top1'), 'train': schema.Train(ema=.9),
      'evals': {'test': schema.TopK(views=('ema',))}}, "expected one of the views of evals.test, ema, got 'test/top1'"),
    ({'batch_size': 0}, 'batch_size: expected at least 1, got 0'),
    ({'train': schema.Train(accumulate=3)}, 'batch_size: expected a multiple of train.accumulate=3, got 128'),
    ({'train': schema.Train(ema=1.)}, 'train.ema: expected 0 to below 1, got 1.0'),
    ({'model': V(heads=5)}, 'model.width: expected a multiple of model.heads=5, got 768.'),
    ({'model': V(depth=0)}, 'model.depth: expected 1 to 10000, got 0'),
    ({'model': V(patch=32, width=774, heads=6, positions=schema.SinCos())},
     'model.width: expected a multiple of 4, at least 8'),
    ({'image_px': (224, 225)}, 'image_px: expected multiples of model.patch=16 px, such as (224, 224), got (224, 225)'),
    ({'model': V(norm=schema.LayerNorm(0.))}, 'model.norm.eps: expected more than 0, got 0.0'),
    ({'model': V(dropout=1.)}, 'model.dropout: expected 0 to below 1, got 1.0'),
    ({'data': D(recipe=R(crop_area=(0., 1.)))}, 'data.recipe.crop_area: expected numbers, each more than 0 to 1'),
    ({'data': D(recipe=R(crop_aspect=(2., 1.)))}, 'data.recipe.crop_aspect'),
    ({'data': D(recipe=R(mixup=.2)), 'batch_size': 7}, 'batch_size: expected an even number with data.recipe.mixup'),
    ({'data': D(recipe=R(eval_resize_px=200))}, 'eval_resize_px: expected 0, or at least image_px=(224, 224)'),
    ({'data': D(recipe=R(std=(1., 0., 1.)))}, 'data.recipe.std'),
    ({'data': D(in_memory=schema.InMemory.YES)}, 'data.in_memory: expected no or auto with data.recipe.crop=incep'),
    ({'optimizer': schema.AdamW(lr=-1.)}, 'optimizer.lr: expected at least 0, got -1.0'),
    ({'optimizer': schema.Sgd(momentum=1.)}, 'optimizer.momentum: expected 0 to below 1, got 1.0'),
    ({'optimizer': schema.AdamW(schedule=schema.Schedule(end_lr=1.))}, 'optimizer.schedule.end_lr: expected at most'),
    ({'objective': schema.Supervised(label_smoothing=1.)}, 'objective.label_smoothing: expected 0 to below 1, got 1.0'),
    ({'train': schema.Train(retry='5 steps')}, "train.retry: expected minutes or hours, such as '5 minutes', or '0'"),
    ({'checkpoints': schema.Checkpoints(every='soon')}, 'checkpoints.every: expected a number and a unit'),
    ({'checkpoints': schema.Checkpoints(keep_latest=0)}, 'checkpoints.keep_latest: expected at least 1, got 0'),
    ({'checkpoints': schema.Checkpoints(keep_best='val/top1')}, 'expected EVALUATION/METRIC with one of the eval'),
    ({'mesh': M(-1, -1, 1)}, 'mesh: expected -1 (the remaining devices) for at most one axis'),
    ({'mesh': M(0, 1, 1)}, 'mesh.data: expected 1 to 1048576, or -1, got 0'),
    ({'mesh': M(slices=-1)}, 'mesh.slices: expected at least 0, got -1'),
    ({'mesh': M(9, 1, 1, slices=2)}, 'mesh.data: expected a multiple of mesh.slices=2, or -1, got 9.'),
    ({'evals': {'test': schema.TopK(views=('ema',))}}, 'evals.test.views: expected no ema with train.ema=0'),
    ({'evals': {'test': schema.TopK(every='often')}}, 'evals.test.every'),
], ids=lambda x: x if isinstance(x, str) else '')
def test_a_problem_names_the_setting_and_its_value(changes: dict[str, object], said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(dataclasses.replace(GOOD, **changes))
  assert said in str(error.value)


def test_all_problems_come_in_one_error() -> None:
  with pytest.raises(UserError, match='batch_size: expected at least 1, got -1') as error:
    check.check(dataclasses.replace(GOOD, batch_size=-1, model=V(heads=5), optimizer=schema.AdamW(lr=-1.)))
  assert str(error.value).count('\n') == 3


def test_a_wrong_setting_hides_what_follows_from_it_and_no_other_of_the_same_name() -> None:
  lora = schema.Lora(dropout=.1)
  with pytest.raises(UserError, match=r'model.dropout: (.|\n)*lora.dropout: expected its default 0.0 with lora.rank=0'):
    check.check(dataclasses.replace(GOOD, model=V(dropout=1.), lora=lora))
  assert check.problems(dataclasses.replace(GOOD, model=V(width=-1, heads=5))) == [
      'model.width: expected at least 1, got -1.']


@pytest.mark.parametrize(('text', 'is_named'), [
    ('model.mlp: expected', True), ('of mlp.', True), ('Set --config.model.mlp.width=3.', True),
    ("(model.mlp='x')", True), ('model.mlps: expected', False), ('objective.mlp: expected', False),
    ('model: expected', False), ('mlp.width', False), ('…', False)])
def test_a_text_names_a_setting_in_full_or_by_its_end_or_a_setting_in_it(text: str, is_named: bool) -> None:
  assert check._names(text, 'model.mlp') is is_named


def test_each_part_checks_itself_and_gets_its_path_and_the_complete_config(monkeypatch: pytest.MonkeyPatch) -> None:
  config = dataclasses.replace(
      GOOD, model=schema.ResNet(), objective=schema.Distill(schema.Teacher('w', schema.Mixer())),
      optimizer=schema.AdamW(rules=(schema.PathRule('head/.*'),)))
  for kind in (schema.Config, schema.Mixer, schema.PathRule, schema.TopK):
    monkeypatch.setattr(kind, 'problems', lambda part, whole, name: [f'{name}: {type(part).__name__} of {whole.name}'],
                        raising=False)
  found = [text for text in check.problems(config) if text.endswith(' of x')]
  assert found == [': Config of x', 'objective.teacher.model: Mixer of x', 'optimizer.rules[0]: PathRule of x',
                   'evals.test: TopK of x']


def test_problems_of_one_part_are_found_without_those_of_the_others() -> None:
  config = dataclasses.replace(GOOD, batch_size=-1, mesh=M(-1, -1, 1, slices=-1))
  assert check.problems(config, of='mesh') == [
      'mesh.slices: expected at least 0, got -1.',
      "mesh: expected -1 (the remaining devices) for at most one axis, got {'data': -1, 'fsdp': -1, 'tensor': 1}."]
