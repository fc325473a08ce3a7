"""Time of collectives, and what of it the core waits: by texts of the TPU compiler, and by small ones made by hand."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.plan import bundles, compile, compiled, overlap, topologies

GOLDEN = json.loads(pathlib.Path(__file__).with_name('golden_collectives.json').read_text())
KERNEL = 1024 * 1024 * 2
"""Bytes of one of the three kernels in bfloat16."""


def golden(name: str) -> tuple[str, dict[str, overlap.Wait]]:
  """The text of a program for eight devices, and its collectives."""
  text = '\n'.join(GOLDEN[name]['text'])
  counts = {key: bundles.Count(cycles) for key, cycles in GOLDEN[name]['cycles'].items()}
  kind, _, _ = name.partition('_')
  topology = topologies.parse({'v4': 'v4:2x2x2'}.get(kind, f'{kind}:2x4'))
  found = compile.waits(text, counts, topology)
  assert found is not None and topology.num_devices == 8
  return text, {one.kind: one for one in found}


def ring_ns(rate: float, times: int = 1) -> float:
  """Time in which a device sends 7/8 of a kernel, so many times."""
  return 1e9 * times * KERNEL * 7 / 8 / rate


def test_on_v6e_the_core_waits_for_every_collective() -> None:
  _, found = golden('v6e')
  assert {kind: one.calls for kind, one in found.items()} == {'all-gather': 3, 'all-reduce': 1, 'reduce-scatter': 1}
  assert all(one.exposed_ns == one.ns for one in found.values())
  assert found['all-gather'].ns == pytest.approx(ring_ns(200e9, 3), abs=1)
  assert found['all-reduce'].ns == pytest.approx(ring_ns(200e9, 2), abs=1)       # one gradient, there and back
  assert found['reduce-scatter'].ns == pytest.approx(ring_ns(200e9, 2), abs=1)   # the other two, in one call


def test_sparsecores_send_beside_products_and_scatter_every_gradient() -> None:
  """The text is the compiler's dump: estimates of cycles are not in it, those of the bundles are."""
  text, found = golden('v6e_sparsecore')
  assert 'custom-call-update' in text and {kind: one.calls for kind, one in found.items()} == {
      'all-gather': 3, 'reduce-scatter': 3}
  for one in found.values():
    # Of the three gathers the first two, of the scatters the last, stand without a product beside them.
    assert one.ns == pytest.approx(ring_ns(200e9, 3), abs=1) and ring_ns(200e9) < one.exposed_ns < .8 * one.ns
  assert {row.kind: row.calls for row in compiled.read(text, num_devices=8).collectives} == {
      'all-gather': 3, 'reduce-scatter': 3}


def test_continuation_fusions_of_v5e_hide_a_gather_and_are_counted_once() -> None:
  text, found = golden('v5e')
  assert text.count(' all-gather(') == 6  # two of them, and the four writings of the third
  assert found['all-gather'].calls == 3 and found['all-gather'].ns == pytest.approx(ring_ns(100e9, 3), abs=1)
  assert found['all-gather'].exposed_ns == pytest.approx(ring_ns(100e9, 2), abs=1)
  assert found['reduce-scatter'].exposed_ns == found['reduce-scatter'].ns == pytest.approx(ring_ns(100e9, 3), abs=1)


def test_permutes_of_one_channel_are_all_counted_with_their_hops_and_directions() -> None:
  """A shift by five places of eight is one by three the other way; a shift by four takes as long as the diameter."""
  text, found = golden('v4_permutes')
  assert text.count('channel_id=1,') == 7
  (one,) = found.values()
  hops = (1 + 2 + 3) + (1 + 2 + 3) + 3
  shard = KERNEL * 2 / 8  # in float32
  assert one.kind == 'collective-permute' and one.calls == 7
  assert one.ns == pytest.approx(1e9 * 2 * hops * shard / 100e9, rel=1e-3)
  assert 0 < one.exposed_ns < .65 * one.ns  # the two directions send at the same time


TEXT = """HloModule jit_step, is_scheduled=true

%body (q: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %one = s32[] constant(1)
  %q = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %next = s32[] add(%i, %one)
  %x = f32[1024]{0} get-tuple-element(%q), index=1
  %begin = (f32[1024]{0}, f32[1024]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %work = f32[1024]{0} fusion(%x), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"WORK"}
  %end = f32[1024]{0} collective-permute-done(%begin)
  ROOT %out = (s32[], f32[1024]{0}) tuple(%next, %end)
}

%condition (r: (s32[], f32[1024])) -> pred[] {
  %five = s32[] constant(5)
  %r = (s32[], f32[1024]{0}) parameter(0)
  %j = s32[] get-tuple-element(%r), index=0
  ROOT %less = pred[] compare(%j, %five), direction=LT
}

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %loop = (s32[], f32[1024]{0}) while(%t), condition=%condition, body=%body
  %sum.1 = (f32[1024]{0}, f32[1024]{0}) all-reduce(%p, %p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %sum = f32[1024]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""  # noqa: E501


def waits(work: int, rate: float) -> dict[str, tuple[int, int, int]]:
  """Kind to calls, time and exposed time in ns: with so many ns of work beside each permute."""
  found = overlap.read(TEXT.replace('WORK', str(work)), overlap.Links(rate, 4),
                       lambda program: lambda one, within: one.cycles / 1e9)
  return {one.kind: tuple(one)[1:] for one in found}


@pytest.mark.parametrize(('work', 'exposed'), [(0, 8_192), (3_000, 5_192), (8_192, 0), (100_000, 0)])
def test_work_between_start_and_done_hides_a_collective_in_each_pass_of_a_loop(work: int, exposed: int) -> None:
  """4 KiB along one of two directions that carry 1 GB/s together."""
  assert waits(work, 1e9)['collective-permute'] == (5, 5 * 8_192, 5 * exposed)


def test_a_collective_takes_at_least_the_time_of_its_hops() -> None:
  found = waits(0, 1e15)
  assert found['collective-permute'] == (5, 5 * 1_000, 5 * 1_000)
  assert found['all-reduce'] == (2, 2 * 4_000, 2 * 4_000)  # half of the ring of four, there and back


def test_the_links_carry_one_collective_after_another() -> None:
  """The second permute begins beside the same work as the first, and has to wait for it."""
  first = TEXT[TEXT.index('  %begin'):TEXT.index('  %work')]
  text = TEXT.replace(first, first + first.replace('%begin', '%again'))
  done = '  %end = f32[1024]{0} collective-permute-done(%begin)\n'
  text = text.replace(done, done + done.replace('%end', '%last').replace('%begin', '%again')).replace('WORK', '10000')
  (one, _) = overlap.read(text, overlap.Links(1e9, 4), lambda program: lambda one, within: one.cycles / 1e9)
  assert tuple(one)[1:] == (10, 10 * 8_192, 5 * (2 * 8_192 - 10_000))


def test_devices_without_a_clock_have_no_waits() -> None:
  text = '\n'.join(GOLDEN['v6e']['text'])
  for name in ('cpu:8', 'a100:8', 'tpu7x:2x2x1'):
    assert compile.waits(text, {}, topologies.parse(name)) is None
