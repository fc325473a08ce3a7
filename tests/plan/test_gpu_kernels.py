"""Times of the kernels of a GPU program, by hand computation; and the description of cards for XLA's compiler."""
from __future__ import annotations

import pytest

from vit_jax.core.errors import UserError
from vit_jax.plan import cards, compiled, gpu_kernels, hlo, overlap, topologies

BANDWIDTH = 1e12
TEXT = """HloModule step

%fused_add (p0: bf16[64,128], p1: bf16[64,128]) -> bf16[64,128] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[64,128]{1,0} parameter(1)
  ROOT %sum = bf16[64,128]{1,0} add(%p0, %p1)
}

%fused_slice (p2: bf16[4,64,128]) -> bf16[64,128] {
  %p2 = bf16[4,64,128]{2,1,0} parameter(0)
  %cut = bf16[1,64,128]{2,1,0} slice(%p2), slice={[0:1], [0:64], [0:128]}
  ROOT %flat = bf16[64,128]{1,0} bitcast(%cut)
}

%body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %state = (s32[], bf16[64,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[64,128]{1,0} get-tuple-element(%state), index=1
  %loop_add_fusion = bf16[64,128]{1,0} fusion(%x, %x), kind=kLoop, calls=%fused_add
  ROOT %next = (s32[], bf16[64,128]{1,0}) tuple(%i, %loop_add_fusion)
}

%condition (state.1: (s32[], bf16[64,128])) -> pred[] {
  %state.1 = (s32[], bf16[64,128]{1,0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (a: bf16[4096,4096], b: bf16[4096,4096], c: bf16[4,64,128], q: bf16[8,12,198,64]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  %c = bf16[4,64,128]{2,1,0} parameter(2)
  %q = bf16[8,12,198,64]{3,2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %cut.1 = bf16[64,128]{1,0} fusion(%c), kind=kLoop, calls=%fused_slice
  %start = bf16[4096,4096]{1,0} all-reduce-start(%a), replica_groups=[1,8]<=[8], to_apply=%add
  %product = (bf16[4096,4096]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(step)/jvp(Block)/mlp/dot_general"}, backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"epilogue":"BIAS"}}
  %attention = (bf16[8,12,198,64]{3,2,1,0}, f32[8,12,198]{2,1,0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax"
  %done = bf16[4096,4096]{1,0} all-reduce-done(%start)
  %pair = (s32[], bf16[64,128]{1,0}) tuple(%zero, %cut.1)
  %loop = (s32[], bf16[64,128]{1,0}) while(%pair), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  ROOT %end = bf16[4096,4096]{1,0} get-tuple-element(%product), index=0
}
"""
SMALL = 64 * 128 * 2
"""Bytes of a small array."""


def memory_ns(num_bytes: float) -> float:
  return 1e9 * (gpu_kernels.LAUNCH_S + num_bytes / (gpu_kernels.REACHED * BANDWIDTH))


def test_each_kernel_takes_the_time_of_its_operations_or_of_its_bytes() -> None:
  text, _ = gpu_kernels.annotate(TEXT, BANDWIDTH)
  cycles = {one.name: one.cycles for rows in hlo.parse(text).computations.values() for one in rows.values()}
  product = 1e9 * (gpu_kernels.LAUNCH_S + 2 * 4096**3 / gpu_kernels.PRODUCTS['bf16'])
  attention = memory_ns(4 * 8 * 12 * 198 * 64 * 2 + 8 * 12 * 198 * 4)  # more than its operations take
  assert cycles['product'] == pytest.approx(product, abs=1) and cycles['attention'] == pytest.approx(attention, abs=1)
  assert cycles['loop_add_fusion'] == pytest.approx(memory_ns(3 * SMALL), abs=1)
  assert cycles['cut.1'] == pytest.approx(memory_ns(2 * SMALL), abs=1)  # a quarter of what it is cut from, and written
  assert not any(cycles[name] for name in ('start', 'done', 'loop', 'pair', 'end', 'a', 'sum', 'cut'))


def test_the_body_of_a_loop_counts_as_often_as_it_runs() -> None:
  text, kinds = gpu_kernels.annotate(TEXT, BANDWIDTH)
  found = {one.name: one for one in kinds}
  loop = found['elementwise and sums, update']
  assert loop.calls == 13 and loop.num_bytes == 12 * 3 * SMALL + 2 * SMALL
  assert found['products, forward'].flops == 2 * 4096**3 and found['attention, update'].calls == 1
  assert compiled.read(text, num_devices=8).cycles == pytest.approx(sum(one.ns for one in kinds), abs=20)


def test_a_collective_is_hidden_by_the_kernels_between_its_start_and_its_end() -> None:
  text, _ = gpu_kernels.annotate(TEXT, BANDWIDTH)

  def seconds(program: hlo.Program) -> object:
    return lambda one, within: one.cycles / gpu_kernels.HZ

  size = 4096**2 * 2
  wait, = overlap.read(text, overlap.Links(450e9, 8), seconds)  # type: ignore[arg-type]
  assert wait.kind == 'all-reduce' and wait.ns == pytest.approx(1e9 * 2 * 7 / 8 * size / 450e9, abs=1)
  hidden = sum(one.ns for one in gpu_kernels.annotate(TEXT, BANDWIDTH)[1] if one.name.startswith(('products', 'atten')))
  assert wait.exposed_ns == pytest.approx(max(0, wait.ns - hidden), abs=2)


@pytest.mark.parametrize(('groups', 'expected'), [
    ('[2,8]<=[16]', 450e9),          # within a node
    ('[1,16]<=[16]', 400e9),         # over both nodes, which it leaves by all eight network cards
    ('[8,2]<=[2,8]T(1,0)', 50e9),    # of one GPU in each node
    ('{{0,8},{1,9}}', 50e9), ('{{0,1,8,9}}', 100e9)])
def test_a_collective_over_nodes_is_as_fast_as_the_network_cards_of_its_gpus(groups: str, expected: float) -> None:
  links = overlap.Links(450e9, 16, cards.A_NODE, cards.NIC_BYTES_S)
  assert links.rate(f'all-reduce(%a), replica_groups={groups}, to_apply=%add') == expected
  assert overlap.Links(450e9, 16).rate(f'replica_groups={groups}') == 450e9


def test_products_of_eight_bits_are_faster_and_those_of_float32_slower() -> None:
  def time(dtype: str) -> int:
    changed = TEXT.replace('%a = bf16[4096,4096]', f'%a = {dtype}[4096,4096]')
    return {one.name: one for one in gpu_kernels.annotate(changed, BANDWIDTH)[1]}['products, forward'].ns

  assert time('f8e4m3fn') < time('bf16') < time('f32')
  launch = gpu_kernels.HZ * gpu_kernels.LAUNCH_S
  assert (time('f32') - launch) / (time('bf16') - launch) == pytest.approx(2, rel=1e-4)


def test_nodes_with_different_numbers_of_gpus_are_refused() -> None:
  with pytest.raises(UserError, match=r'at most 8 GPUs, got h200:9. Set --topology=h200:16'):
    cards.open_devices('h200', 9)


@pytest.mark.parametrize('kind', cards.CARDS)
def test_a_card_is_described_with_its_memory(kind: str) -> None:
  text = cards.describe(kind)
  chip = topologies.CHIPS[kind]
  assert f'memory_bandwidth: {cards.CARDS[kind].bandwidth}' in text and text.count('{') == text.count('}')
  assert cards.CARDS[kind].bandwidth == pytest.approx(chip.hbm_bytes_s, rel=.01)
  assert cards.CARDS[kind].memory / 2**30 > chip.hbm_gib


@pytest.mark.slow(reason='about 20 s: XLA compiles a step for a GPU')
@pytest.mark.skipif(not cards.is_installed(), reason="needs XLA's compiler for GPUs: pip install -e '.[plan-gpu]'")
def test_a_step_is_compiled_for_gpus_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
  from vit_jax import main
  assert main.run(['--job=plan', '--config=digits', '--topology=h100:2', '--config.model.dtype=bfloat16']) == 0
  out = capsys.readouterr().out
  assert 'as compiled' in out and 'all-reduce' in out
