"""Runs on another number of slices than at their first start: parts of microbatches, and what is refused."""
from __future__ import annotations

import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.parallel import elastic, layout

SLICE = layout.Hardware('TPU v5 lite', 'tpu', 8, 15.75)


def hardware(slices: int, kind: str = 'TPU v5 lite') -> layout.Hardware:
  return elastic.on_slices(SLICE._replace(name=kind), slices)


def config(batch_size: int = 96, accumulate: int = 1, **mesh: object) -> schema.Config:
  return schema.Config(batch_size=batch_size, train=schema.Train(accumulate=accumulate),
                       mesh=schema.Mesh(**{'fsdp': 1, 'tensor': 1, 'slices': 0, **mesh}))  # type: ignore[arg-type]


def parts(first: int, now: int, batch_size: int = 96, accumulate: int = 1, **mesh: object) -> int:
  found = elastic.fit(config(batch_size, accumulate, **mesh), hardware(first), hardware(now))
  assert found.mesh.chosen_slices == first and found.train.accumulate == accumulate
  assert found.microbatches == accumulate * found.mesh.chosen_parts
  return found.mesh.chosen_parts


@pytest.mark.parametrize(('first', 'now', 'batch_size', 'accumulate', 'expected'), [
    (2, 2, 96, 1, 1), (2, 1, 96, 1, 2), (2, 1, 96, 3, 2), (4, 1, 96, 1, 4), (4, 2, 96, 1, 2),
    (4, 3, 96, 1, 2),   # 3 images of a device become 4: 2 parts of 2
    (4, 3, 4 * 3 * 8 * 5, 1, 2),  # 15 become 20: 2 parts of 10
    (8, 3, 8 * 3 * 8 * 5, 1, 4),  # 15 become 40: 3 parts would have 13.3
    (1, 2, 96, 1, 1), (1, 2, 96, 3, 1)])
def test_a_device_never_holds_more_images_than_at_the_first_start(
    first: int, now: int, batch_size: int, accumulate: int, expected: int) -> None:
  found = parts(first, now, batch_size, accumulate)
  held = [batch_size / (8 * slices * accumulate * count) for slices, count in ((first, 1), (now, found))]
  assert found == expected and held[1] <= held[0] and held[1] == int(held[1])


def test_parts_count_the_devices_that_share_images() -> None:
  assert parts(2, 1, 8, tensor=4) == 2  # 4 places on 16 devices, 2 on 8
  assert parts(2, 1, 16, fsdp=4) == 2


def test_slices_over_which_the_batch_does_not_divide_are_tried_again_and_those_that_fit_are_named() -> None:
  with pytest.raises(TemporaryError, match=(
      r'mesh.slices: expected 1 or 2 or 4 slices, over which batch_size=64 divides, got 3; the run began on 4\.')):
    parts(4, 3, 64)


def test_the_first_hardware_is_that_of_the_saved_run_only_for_slices_of_its_kind() -> None:
  first = elastic.fit(config(), hardware(2), hardware(2))
  assert first.mesh.chosen_for == '16 x TPU v5 lite in 2 slices'
  assert elastic.first_hardware(config(), first, hardware(1)) == hardware(2)
  assert elastic.first_hardware(config(), None, hardware(1)) == hardware(1)
  assert elastic.first_hardware(config(), first, hardware(1, 'TPU v6 lite')) == hardware(1, 'TPU v6 lite')
  assert elastic.first_hardware(config(), first, SLICE._replace(num_devices=4)).num_devices == 4
  assert elastic.first_hardware(config(slices=1), first, hardware(1)) == hardware(1)


def test_a_fixed_number_of_slices_has_no_parts_also_in_the_config_of_a_run_that_had_some() -> None:
  saved = elastic.fit(config(), hardware(2), hardware(1))
  assert saved.microbatches == 2
  fixed = elastic.fit(schema.replaced(saved, {'mesh.slices': 1}), hardware(1), hardware(1))
  assert fixed.microbatches == 1 and fixed.mesh.chosen_slices == 0
  assert elastic.describe(fixed, 1) == {}


@pytest.mark.parametrize(('slices', 'first', 'microbatches', 'text'), [
    (1, 2, 2, '1 of 2 slices, 2 microbatches'), (2, 2, 1, '2 slices, 1 microbatch'), (1, 1, 1, '1 slice, 1 microbatch'),
    (2, 1, 1, '2 slices (1 at first), 1 microbatch')])
def test_a_start_names_its_slices_and_microbatches(slices: int, first: int, microbatches: int, text: str) -> None:
  assert elastic.text(slices, first, microbatches) == text


FROZEN = schema.AdamW(rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))
VIEWS = schema.Data(recipe=schema.Recipe(views=schema.Views(on=True)))


@pytest.mark.parametrize(('changes', 'said'), [
    ({'objective': schema.Dino(centering=schema.Centering.SINKHORN, center_momentum=.9), 'data': VIEWS},
     'objective.centering=sinkhorn, which needs the complete batch'),
    ({'model': schema.EfficientNet()}, 'whose BatchNorm needs statistics of the complete batch'),
    ({'head': schema.Head(probe=True, batch_norm=True), 'optimizer': FROZEN}, 'head.batch_norm=true'),
    ({'train': schema.Train(sam=schema.Sam(rho=.1))}, 'train.sam.rho=0.1: each microbatch has'),
    ({'objective': schema.TokenLabel(mix_token=True)}, 'objective.mix_token=True: each microbatch mixes'),
    ({'mesh': schema.Mesh(8, slices=0)}, 'mesh.data: expected -1 with mesh.slices=0')])
def test_what_more_microbatches_or_other_hosts_would_change_is_refused_before_the_first_start(
    changes: dict, said: str) -> None:
  refused = schema.Config(**{'mesh': schema.Mesh(slices=0), **changes})
  with pytest.raises(UserError) as caught:
    check.check(refused)
  assert said in str(caught.value) and 'mesh.slices' in str(caught.value)
  fixed = schema.replaced(refused, {'mesh.slices': 1})
  assert not any('slices' in problem for problem in check.problems(fixed))


@pytest.mark.parametrize('objective', [schema.Supervised(), schema.Mae()])
def test_other_runs_may_continue_on_fewer_slices(objective: schema.Objective) -> None:
  refused = check.problems(schema.Config(objective=objective, mesh=schema.Mesh(slices=0)))
  assert not any('slices' in problem for problem in refused)
