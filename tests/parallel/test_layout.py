"""The rules by which a run is laid out on its hardware."""
from __future__ import annotations

import dataclasses
import json

import pytest

from vit_jax.config import check, engine, files
from vit_jax.config import schema as s
from vit_jax.jobs import build
from vit_jax.parallel import layout
from vit_jax.recipes import sizes

GIB = 2**30
V3 = layout.Hardware('v3', 'tpu', 8, 15.48, counts=(8, 16, 32))
H200 = layout.Hardware('h200', 'gpu', 12, 134.)
AUTO = ('mesh.fsdp', 'mesh.tensor', 'train.accumulate', 'model.remat', 'model.execution', 'model.attention.kernel',
        'model.mlp.kernel')
KERNELS = AUTO[5:]
HALF = s.ViT(dtype=s.DType.BF16)


def needs(state_gib: float, image_gib: float) -> layout.Sizes:
  """A run whose activations are as many bytes for each image as its `remat` keeps of `image_gib`."""
  share = {s.Remat.NONE: 1., s.Remat.NAMES: .8, s.Remat.QKV: .6, s.Remat.MLP: .4, s.Remat.FULL: .1}
  return layout.Sizes(int(.75 * state_gib * GIB), int(.25 * state_gib * GIB),
                      lambda model: share[model.remat] * image_gib * GIB)


def way(config: s.Config) -> tuple[int, int, int, str, str]:
  model = config.model
  return (config.mesh.fsdp, config.mesh.tensor, config.train.accumulate, model.remat.value,
          getattr(model, 'execution', s.Execution.AUTO).value)


def test_every_setting_of_the_layout_is_auto_by_default() -> None:
  assert layout.auto(s.Config()) == list(AUTO)
  assert layout.auto(s.Config(model=s.ResNet())) == list(AUTO[:4])


@pytest.mark.parametrize('hardware', [layout.Hardware('cpu', 'cpu', 8, 0.), layout.Hardware('new', 'gpu', 8, 0.)])
def test_on_cpus_and_without_a_known_memory_nothing_is_split_or_recomputed(hardware: layout.Hardware) -> None:
  found = layout.choose(s.Config(), hardware, None)
  assert way(found.config) == (1, 1, 1, 'none', 'unrolled') and found.fits
  assert found.text.count('\n') == 0 and 'data=8 fsdp=1' in found.text


def test_a_run_that_fits_on_one_device_runs_as_it_is_written() -> None:
  found = layout.choose(s.Config(), V3._replace(num_devices=1), needs(4., .05))
  assert way(found.config) == (1, 1, 1, 'none', 'unrolled')


def chosen(model: s.ViT, hardware: layout.Hardware) -> layout.Layout:
  check.check(s.Config(model=model))
  found = layout.choose(s.Config(model=model), hardware, needs(1., .01))
  check.check(found.config)
  return found


NO_TIMES = 'the times of the fused kernel are known only for bfloat16, not for float32'
OLD_GPU = "cuDNN's attention needs compute capability 8.0, and that of this GPU is"


@pytest.mark.parametrize('name, platform, changes, expected', [
    ('TPU v4', 'tpu', {}, ''), ('v6e', 'tpu', {'width': 1408, 'heads': 16}, ''),
    ('TPU v3', 'tpu', {}, 'the fused kernel runs only on TPU v4 and later, not on TPU v3'),
    ('v2', 'tpu', {}, 'the fused kernel runs only on TPU v4 and later, not on v2'),
    ('h100', 'gpu', {}, f'{OLD_GPU} not known'),
    ('v6e', 'tpu', {'heads': 16}, 'the heads have 48 channels, and the fused kernel takes 64, 72, … 128'),
    ('v6e', 'tpu', {'attention.dropout': .1}, 'only XLA has dropout of attention weights (attention.dropout=0.1)'),
    ('v6e', 'tpu', {'positions': s.Relative()}, 'only XLA has relative positions'),
    ('v6e', 'tpu', {'dtype': s.DType.F32}, NO_TIMES),
    ('v6e', 'tpu', {'kernels': s.Kernels.PLAIN}, 'model.kernels=plain is set')])
def test_attention_is_chosen_by_chip_and_model_and_the_layout_says_why_not(
    name: str, platform: str, changes: dict, expected: str) -> None:
  found = chosen(s.replaced(HALF, changes), layout.Hardware(name, platform, 8, 30.))
  assert isinstance(found.config.model, s.ViT)
  kernel = found.config.model.attention.kernel
  assert kernel is (s.AttentionKernel.XLA if expected else s.AttentionKernel.FUSED)
  assert (', attention.kernel=fused' in found.text) == (not expected)
  assert (f'\n  attention.kernel=xla was chosen: {expected}.' in found.text) == bool(expected)
  assert 'model.attention.kernel' in found.config.mesh.chosen
  again = layout.unchosen(found.config).model
  assert isinstance(again, s.ViT) and again.attention.kernel is s.AttentionKernel.AUTO
  set_by_hand = chosen(s.replaced(HALF, {**changes, 'attention.kernel': s.AttentionKernel.XLA}),
                       layout.Hardware(name, platform, 8, 30.))
  assert isinstance(set_by_hand.config.model, s.ViT)
  assert set_by_hand.config.model.attention.kernel is s.AttentionKernel.XLA
  assert 'attention.kernel' not in set_by_hand.text


@pytest.mark.parametrize('capability, changes, expected', [
    (9., {}, ''), (8., {}, ''), (7.5, {}, f'{OLD_GPU} 7.5'),
    (0., {}, f'{OLD_GPU} not known'),
    (9., {'dtype': s.DType.F32}, "cuDNN's attention takes bfloat16, not float32"),
    (9., {'attention.dropout': .1}, 'only XLA has dropout of attention weights (attention.dropout=0.1)'),
    (9., {'kernels': s.Kernels.PLAIN}, 'model.kernels=plain is set'),
    (9., {'positions': s.Relative()}, 'only XLA has relative positions'),
    (9., {'heads': 64}, "the heads have 12 channels, and cuDNN's attention takes 8, 16, … 256"), (9., {'heads': 3}, ''),
    (8.9, {'heads': 3}, "the heads have 256 channels, and cuDNN's attention takes 8, 16, … 128"),
    (8.9, {'heads': 6}, ''),
    (9., {'heads': 2}, "the heads have 384 channels, and cuDNN's attention takes 8, 16, … 256")])
def test_attention_on_gpus_is_that_of_cudnn_where_it_has_it(capability: float, changes: dict, expected: str) -> None:
  gpu = layout.Hardware('gpu', 'gpu', 8, 76., capability=capability)
  found = chosen(s.replaced(HALF, changes), gpu)
  assert isinstance(found.config.model, s.ViT)
  assert found.config.model.attention.kernel.value == ('xla' if expected else 'cudnn')
  assert (f'\n  attention.kernel=xla was chosen: {expected}.' in found.text) == bool(expected)
  assert '\n  mlp.kernel=xla was chosen: ' in found.text


@pytest.mark.parametrize('name, platform, changes, expected', [
    ('TPU v6 lite', 'tpu', {}, ''), ('v6e', 'tpu', {'dropout': .1}, 'the fused kernel takes an MLP with biases'),
    ('v6e', 'tpu', {'kernels': s.Kernels.PLAIN}, 'model.kernels=plain is set'),
    ('v6e', 'tpu', {'dtype': s.DType.F32}, NO_TIMES),
    ('v6e', 'tpu', {'quantize': s.Quantize.INT8}, 'the products of the fused kernel are not quantized'),
    ('v5e', 'tpu', {}, 'the fused kernel is faster than XLA only on TPU v6e, not on v5e'),
    ('v4', 'tpu', {}, 'the fused kernel is faster than XLA only on TPU v6e, not on v4')])
def test_the_kernel_of_the_mlp_is_chosen_likewise(name: str, platform: str, changes: dict, expected: str) -> None:
  found = chosen(s.replaced(HALF, changes), layout.Hardware(name, platform, 8, 30.))
  assert isinstance(found.config.model, s.ViT)
  assert found.config.model.mlp.kernel is (s.MlpKernel.XLA if expected else s.MlpKernel.FUSED)
  assert (', mlp.kernel=fused' in found.text) == (not expected)
  assert (f'\n  mlp.kernel=xla was chosen: {expected}' in found.text) == bool(expected)
  assert 'model.mlp.kernel' in found.config.mesh.chosen


@pytest.mark.parametrize('name, platform, kernel, expected', [
    ('h200', 'gpu', 'fused', 'this kernel runs only on TPUs from v4 on, not on h200'), ('h200', 'gpu', 'cudnn', ''),
    ('v5e', 'tpu', 'cudnn', 'this kernel runs only on NVIDIA GPUs, not on v5e'),
    ('cpu', 'cpu', 'fused', 'this kernel runs only on TPUs from v4 on, not on cpu'), ('v4', 'tpu', 'fused', ''),
    ('v3', 'tpu', 'fused', 'the fused kernel runs only on TPU v4 and later, not on v3')])
def test_a_kernel_that_is_set_for_other_devices_is_not_named_as_used_and_the_layout_says_which_have_it(
    name: str, platform: str, kernel: str, expected: str) -> None:
  model = s.replaced(HALF, {'attention.kernel': s.AttentionKernel(kernel)})
  hardware, line = layout.Hardware(name, platform, 8, 30.), f'attention.kernel={kernel} has no effect, and XLA computes'
  found = chosen(model, hardware)
  assert (f', attention.kernel={kernel}' in found.text) == (not expected)
  assert (f'\n  {line} in its place: {expected}.' in found.text) == bool(expected)
  assert (line in layout.choose(found.config, hardware, None).text) == bool(expected)  # where nothing is auto


@pytest.mark.parametrize('how', s.Quantize)
def test_the_layout_says_which_products_are_quantized_and_keeps_the_kernel_of_attention(how: s.Quantize) -> None:
  found = chosen(s.replaced(HALF, {'quantize': how}), layout.Hardware('v6e', 'tpu', 8, 30.)).text
  assert (f', bfloat16 (products of blocks in {how.value}), ' in found) == (how is not s.Quantize.NONE)
  assert ', attention.kernel=fused' in found and 'none' not in found.replace('remat=none', '')


@pytest.mark.parametrize('how, slow, fast', [
    (s.Quantize.INT8, ('v3', 'v4', 'TPU v4'), ('v5e', 'TPU v5 lite', 'v5p', 'v6e', 'tpu7x', 'h200')),
    (s.Quantize.FP8, ('v4', 'v5e', 'v5p', 'TPU v6 lite', 'a100'), ('tpu7x', 'gb200')),
    (s.Quantize.NONE, (), ('v4', 'a100'))])
def test_products_that_are_no_faster_on_a_device_are_reported(
    how: s.Quantize, slow: tuple[str, ...], fast: tuple[str, ...]) -> None:
  for name in (*slow, *fast):
    platform, capability = ('gpu', {'a100': 8., 'h200': 9., 'gb200': 10.}[name]) if name[0] in 'ahg' else ('tpu', 0.)
    hardware = layout.Hardware(name, platform, 8, 30., capability=capability)
    text = chosen(s.replaced(HALF, {'quantize': how}), hardware).text
    line = f'model.quantize={how.value} makes no step faster here: {name} multiplies no faster in {how.value} than in'
    assert (line in text) == (name in slow), name


def test_fp8_on_hopper_is_said_to_be_slower_by_estimate() -> None:
  hardware = layout.Hardware('h200', 'gpu', 1, 134., capability=9.)
  text = chosen(s.replaced(HALF, {'quantize': s.Quantize.FP8}), hardware).text
  assert 'quantize=fp8 makes no step faster here: by the estimate of the compiler a step of L/16 takes 12 % lon' in text


def test_a_kernel_of_the_mlp_that_is_set_for_other_devices_is_explained_likewise() -> None:
  model = s.replaced(HALF, {'mlp.kernel': s.MlpKernel.FUSED})
  text = chosen(model, layout.Hardware('h200', 'gpu', 8, 30.)).text
  assert '\n  mlp.kernel=fused has no effect, and XLA computes in its place: the fused kernel runs only on TPU ' in text
  assert ', mlp.kernel=fused' not in text
  assert ', mlp.kernel=fused' in chosen(model, layout.Hardware('v5e', 'tpu', 8, 30.)).text


@pytest.mark.parametrize('name, platform', [('v5e', 'tpu'), ('h200', 'gpu')])
def test_training_at_the_own_aspect_uses_no_kernel_of_attention_as_padding_needs_a_mask(name: str,
                                                                                         platform: str) -> None:
  native = s.Config(model=HALF, data=s.Data(recipe=s.Recipe(native_lengths=(4,), eval_native_patch=HALF.patch)))
  hardware, why = layout.Hardware(name, platform, 8, 30., capability=9.), 'padding needs a mask, which only XLA has.'
  found = layout.choose(native, hardware, needs(1., .01))
  assert isinstance(found.config.model, s.ViT) and found.config.model.attention.kernel is s.AttentionKernel.XLA
  assert '\n  attention.kernel=xla was chosen: images at their own aspect' in found.text and why in found.text
  kernel = s.AttentionKernel.CUDNN if platform == 'gpu' else s.AttentionKernel.FUSED
  by_hand = layout.choose(s.replaced(native, {'model.attention.kernel': kernel}), hardware, needs(1., .01))
  assert f', attention.kernel={kernel.value}' not in by_hand.text
  assert f'attention.kernel={kernel.value} has no effect' in by_hand.text and why in by_hand.text


def test_swiglu_and_networks_without_attention_have_no_kernel_to_choose() -> None:
  swiglu = chosen(s.replaced(HALF, {'mlp': s.SwiGlu()}), V3._replace(name='v6e'))
  assert 'model.mlp.kernel' not in swiglu.config.mesh.chosen and 'mlp.kernel' not in swiglu.text
  mixer = layout.choose(s.Config(model=s.Mixer()), V3, needs(1., .01))
  assert not set(KERNELS) & set(mixer.config.mesh.chosen) and 'kernel' not in mixer.text


@pytest.mark.parametrize('hardware', [layout.Hardware('cpu', 'cpu', 1, 0.), layout.Hardware('new', 'gpu', 8, 0.)])
def test_xla_computes_on_cpus_and_where_memory_is_not_known(hardware: layout.Hardware) -> None:
  model = layout.choose(s.Config(model=HALF), hardware, None).config.model
  assert isinstance(model, s.ViT)
  assert model.attention.kernel is s.AttentionKernel.XLA and model.mlp.kernel is s.MlpKernel.XLA


def test_a_run_that_was_laid_out_before_kernels_were_chosen_keeps_its_layout_and_its_kernels() -> None:
  v6e = layout.Hardware('v6e', 'tpu', 8, 30.)
  now = layout.choose(s.Config(model=HALF), v6e, needs(1., .01)).config
  old = s.replaced(now, {'model.attention.kernel': s.AttentionKernel.XLA, 'model.mlp.kernel': s.MlpKernel.XLA,
                         'model.remat': s.Remat.QKV, 'mesh.chosen': AUTO[:5]})
  kept = layout.keep(s.Config(model=HALF), old, v6e).model
  assert isinstance(kept, s.ViT) and kept.remat is s.Remat.QKV
  assert (kept.attention.kernel, kept.mlp.kernel) == (s.AttentionKernel.XLA, s.MlpKernel.XLA)


@pytest.mark.parametrize('state_gib, fsdp', [(1.9, 1), (2., 8), (15.4, 8), (15.6, 16), (31.5, 16), (900., 32)])
def test_the_state_is_split_until_an_eighth_of_the_memory_holds_it(state_gib: float, fsdp: int) -> None:
  hardware = layout.Hardware('v3', 'tpu', 32, 15.48)
  assert layout.choose(s.Config(), hardware, needs(state_gib, 0.)).config.mesh.fsdp == fsdp


@pytest.mark.parametrize('devices, slices, platform, image_gib, expected', [
    (8, 1, 'tpu', .01, (4, 'none')),    # state takes 4.5 of 15.48 GiB with half of the devices, which is enough
    (8, 1, 'tpu', .08, (8, 'none')),    # over all of them without recomputation, over half of them with
    (8, 2, 'tpu', .01, (4, 'none')), (32, 1, 'tpu', .01, (16, 'none')), (8, 1, 'gpu', .01, (8, 'none'))])
def test_fsdp_has_half_of_a_slice_of_tpus_where_that_is_not_slower(
    devices: int, slices: int, platform: str, image_gib: float, expected: tuple[int, str]) -> None:
  """Over all devices the compiler sums gradients whole."""
  hardware = layout.Hardware('v3', platform, devices, 15.48, slices)
  found = layout.choose(s.Config(batch_size=128 * devices), hardware, needs(18., image_gib))
  assert found.fits and (found.config.mesh.fsdp, found.config.model.remat.value) == expected


def test_fsdp_stays_inside_a_slice_and_divides_the_width() -> None:
  hardware = layout.Hardware('v3', 'tpu', 32, 15.48, slices=2)
  assert layout.choose(s.Config(), hardware, needs(900., 0.)).config.mesh.fsdp == 16
  config = s.Config(model=s.ViT(width=24, heads=2))
  assert layout.choose(config, hardware, needs(900., 0.)).config.mesh.fsdp == 8


@pytest.mark.parametrize('devices, width, expected', [
    (12, 6144, [1, 12]), (24, 6144, [1, 8, 12, 24]), (20, 1280, [1, 10, 20]), (72, 1152, [1, 8, 9, 12, 18, 24, 36, 72]),
    (12, 1024, [1, 2, 4]), (6, 768, [1, 6]), (6, 1024, [1, 2]), (7, 768, [1])])
def test_every_divisor_of_the_devices_that_divides_the_width_is_a_size_of_fsdp(
    devices: int, width: int, expected: list[int]) -> None:
  config = s.Config(model=s.ViT(width=width, heads=8))
  assert layout.fsdp_sizes(config, layout.Hardware('h200', 'gpu', devices, 134.), 1) == expected


@pytest.mark.parametrize('name, devices, slices, gib, expected', [
    ('h100', 8, 1, 1.61, 8), ('NVIDIA H200', 4, 1, 1.61, 4), ('NVIDIA H100 80GB HBM3', 8, 1, 5., 8),
    ('h100', 8, 1, .4, 1),  # S/16: 2 % by the estimate
    ('h100', 16, 1, 1.61, 1), ('h100', 8, 2, 1.61, 1),  # several nodes
    ('NVIDIA H100 PCIe', 8, 1, 1.61, 1), ('NVIDIA H200 NVL', 4, 1, 1.61, 1), ('NVIDIA L40S', 8, 1, 1.61, 1)])
def test_gpus_of_one_node_divide_the_state_of_networks_from_b16_on(name: str, devices: int, slices: int, gib: float,
                                                                   expected: int) -> None:
  hardware = layout.Hardware(name, 'gpu', devices, 76., slices, capability=9.)
  found = layout.choose(s.Config(batch_size=128 * devices), hardware, needs(gib, .01))
  assert found.config.mesh.fsdp == expected
  assert (f'which no GPU has timed: blocks on joined rows, the XLA flags cublas, fsdp={expected}.' in found.text) == (
      expected > 1)
  assert 'which no GPU has timed' in found.text


def test_what_a_config_sets_is_not_said_to_be_estimated() -> None:
  config = s.Config(batch_size=1024, mesh=s.Mesh(fsdp=8), model=s.ViT(dropout=.1))
  found = layout.choose(config, layout.Hardware('h100', 'gpu', 8, 76., capability=9.), needs(1.61, .01))
  assert 'which no GPU has timed: the XLA flags cublas.' in found.text


@pytest.mark.parametrize('exponent', range(11))
def test_sizes_of_fsdp_of_powers_of_two_begin_with_the_devices_of_a_host(exponent: int) -> None:
  found = layout.fsdp_sizes(s.Config(model=s.ViT(width=1024, heads=8)),
                            layout.Hardware('h200', 'gpu', 2**exponent, 134.), 1)
  assert found == sorted({1, *([2**exponent] if exponent < 3 else (2**i for i in range(3, exponent + 1)))})


def test_a_run_that_needs_all_of_twelve_devices_is_split_over_all_of_them() -> None:
  found = layout.choose(s.Config(batch_size=4080), H200, needs(332., .2))
  assert found.fits and found.config.mesh.fsdp == 12 and found.config.train.accumulate == 1


@pytest.mark.parametrize('image_gib, accumulate, batch_size', [  # 12 x 341, 24 x 171, 48 x 85
    (.1, 1, 4092), (3., 2, 4104), (8., 4, 4080)])
def test_a_batch_that_does_not_divide_gets_the_microbatches_of_the_nearest_one_that_does(
    image_gib: float, accumulate: int, batch_size: int) -> None:
  found = layout.choose(s.Config(batch_size=4096), H200, needs(332., image_gib))
  assert found.fits and found.config.train.accumulate == accumulate
  assert layout.nearest_batch(4096, 12 * accumulate) == batch_size
  again = layout.choose(s.Config(batch_size=batch_size), H200, needs(332., image_gib))
  assert way(again.config) == way(found.config)


@pytest.mark.parametrize('batch_size, parts, nearest', [(4096, 12, 4092), (4096, 24, 4104), (4096, 48, 4080), (5, 8, 8),
                                                        (12, 8, 8), (13, 8, 16), (64, 8, 64)])
def test_the_nearest_batch_is_a_multiple_and_the_smaller_one_of_two(batch_size: int, parts: int, nearest: int) -> None:
  assert layout.nearest_batch(batch_size, parts) == nearest


@pytest.mark.parametrize('hardware, batch_size, advice', [
    (H200._replace(num_devices=2), 4096, '4 x h200'),      # 332 / 4 = 83 GiB
    (H200._replace(num_devices=1), 4080, '3 x h200'),      # 111 GiB of 134 x 0.9, and 3 divides 4,080
    (V3, 4096, '32 x v3'), (V3._replace(counts=(8, 32, 64)), 4096, '32 x v3'),
    (V3._replace(counts=(8,)), 4096, 'more devices'), (V3._replace(counts=()), 4096, 'more devices'),
    (layout.Hardware('v3', 'tpu', 32, 15.48, 4, (4, 8, 16)), 4096, '64 x v3')])
def test_a_run_that_does_not_fit_is_told_how_many_devices_it_needs(
    hardware: layout.Hardware, batch_size: int, advice: str) -> None:
  state = 332. if hardware.platform == 'gpu' else 440. if hardware.slices == 1 else 160.
  config = s.Config(batch_size=batch_size, model=s.ViT(width=6144, heads=48))
  found = layout.choose(config, hardware, needs(state, .001))
  assert not found.fits and f'Use {advice}, a smaller batch_size' in found.text
  if advice[0].isdigit():
    enough = layout.choose(config, hardware._replace(num_devices=int(advice.split()[0])), needs(state, .001))
    assert enough.fits, 'the number that the message names'


@pytest.mark.parametrize('image_gib, expected', [
    (.8, (1, 'none')),     # 16 images: 12.8 of 13.9 GiB
    (1., (2, 'none')),     # 0.98 x 1.02 of two microbatches is less than 1.00 of names
    (1.8, (2, 'names')),   # 11.5 GiB, where none needs 14.4 and four microbatches are 0.98 x 1.06
    (13., (2, 'full')), (30., (4, 'full'))])
def test_the_fastest_rematerialization_and_accumulation_that_fit_are_taken(
    image_gib: float, expected: tuple[int, str]) -> None:
  found = layout.choose(s.Config(), V3, needs(0., image_gib))
  assert found.fits and (found.config.train.accumulate, found.config.model.remat.value) == expected
  check.check(found.config)


@pytest.mark.parametrize('batch_size, image_gib, expected', [
    (128, 1., (1, 'names')),  # 16 images, 3,136 tokens: 1.00 + 1,000 / 3,136; two microbatches 1.00 + 2,000 / 3,136
    (512, .5, (2, 'names')),  # 12,544 tokens: 1.02 + 0.16, and one with full 1.16 + 0.08
    (512, 1., (1, 'full'))])  # 1.16 + 0.08, and eight with names 1.14 + 0.64
def test_where_kernels_are_gathered_a_microbatch_costs_more(
    batch_size: int, image_gib: float, expected: tuple[int, str]) -> None:
  found = layout.choose(s.Config(batch_size=batch_size), V3, needs(4., image_gib))
  assert found.config.mesh.fsdp == 4
  assert (found.config.train.accumulate, found.config.model.remat.value) == expected


def test_a_layout_that_fits_nowhere_is_the_smallest_and_says_so() -> None:
  found = layout.choose(s.Config(), V3, needs(0., 1e4))
  assert not found.fits and found.config.model.remat is s.Remat.FULL and found.config.train.accumulate == 16
  assert 'No layout needs less than 90% of the memory. Use more devices' in found.text


def test_fsdp_grows_where_activations_leave_no_room_for_its_share() -> None:
  config = s.Config(train=s.Train(accumulate=1), model=s.ViT(remat=s.Remat.NONE))
  found = layout.choose(config, V3._replace(num_devices=128), needs(15., 12.5))
  assert found.fits and found.config.mesh.fsdp == 16


def test_settings_with_a_value_keep_it() -> None:
  config = s.Config(mesh=s.Mesh(fsdp=4), train=s.Train(accumulate=2),
                    model=s.ViT(remat=s.Remat.QKV, execution=s.Execution.SCAN))
  found = layout.choose(config, V3, needs(12., .1))
  assert way(found.config) == (4, 1, 2, 'qkv', 'scan') and found.config.mesh.chosen == ('mesh.tensor', *KERNELS)
  assert 'Set in the config: mesh.fsdp, train.accumulate, model.remat, model.execution.' in found.text
  explicit = layout.put(dataclasses.replace(config, mesh=s.Mesh(-1, 4, 1)), layout.XLA)
  assert layout.choose(explicit, V3, None) == layout.Layout(explicit, layout.choose(explicit, V3, None).text)
  data = layout.choose(s.Config(mesh=s.Mesh(data=2)), V3, needs(12., .1)).config.mesh
  assert (data.data, data.fsdp, data.tensor) == (2, 4, 1)


def test_a_batch_smaller_than_the_devices_is_split_over_tensor() -> None:
  hardware = layout.Hardware('v3', 'tpu', 512, 15.48)
  assert layout.choose(s.Config(batch_size=128), hardware, needs(1., .1)).config.mesh.tensor == 4
  assert layout.choose(s.Config(batch_size=512), hardware, needs(1., .1)).config.mesh.tensor == 1


@pytest.mark.parametrize('config', [
    s.Config(model=sizes.model('EfficientNet-B0')),  # BatchNorm
    s.Config(train=s.Train(sam=s.Sam(rho=.1))),      # each microbatch has a perturbation of its own
    s.Config(objective=s.TokenLabel(mix_token=True))], ids=['batchnorm', 'sam', 'token mixing'])
def test_microbatches_that_would_change_results_are_not_chosen(config: s.Config) -> None:
  found = layout.choose(config, V3, needs(0., 13.))
  assert found.config.train.accumulate == 1 and found.config.model.remat is s.Remat.FULL


def test_deep_networks_are_scanned() -> None:
  assert layout.choose(s.Config(model=s.ViT(depth=32)), V3, None).config.model.execution is s.Execution.UNROLLED
  assert layout.choose(s.Config(model=s.ViT(depth=33)), V3, None).config.model.execution is s.Execution.SCAN
  assert layout.choose(s.Config(model=s.ViT(unroll=2)), V3, None).config.model.execution is s.Execution.SCAN


def test_a_saved_layout_is_kept_on_its_hardware_and_chosen_anew_on_other_hardware() -> None:
  written = layout.choose(s.Config(), V3, needs(12., 1.8)).config
  saved = engine.from_json(engine.to_json(written))
  assert saved == written and saved.mesh.chosen == AUTO and saved.mesh.chosen_for == '8 x v3'
  assert layout.reopen(saved, V3) == saved
  other = layout.Hardware('v4', 'tpu', 8, 30.75)
  assert layout.reopen(saved, other) == s.Config()
  assert layout.reopen(saved, other, ['mesh.fsdp']).mesh.fsdp == written.mesh.fsdp  # given on the command line
  marked = dataclasses.replace(saved, model=dataclasses.replace(saved.model, remat=s.Remat.QKV))
  assert layout.keep(s.Config(), marked, V3).model.remat is s.Remat.QKV
  assert layout.keep(s.Config(), marked, other) == s.Config()
  explicit = s.Config(train=s.Train(accumulate=4))
  assert layout.keep(explicit, marked, V3) == explicit


def test_a_config_of_before_layouts_were_chosen_keeps_its_own() -> None:
  old = json.loads(engine.to_json(s.Config(mesh=s.Mesh(-1, 2, 1))))
  del old['mesh']['chosen'], old['mesh']['chosen_for']
  read = engine.from_json(json.dumps(old))
  assert layout.reopen(read, V3).mesh == s.Mesh(-1, 2, 1)


@pytest.mark.quick('vit_l16_jft-v3', reason='2 to 5 s each: traces of training')
@pytest.mark.parametrize('name, hardware', [
    pytest.param(name, hardware, id=f'{name}-{hardware.name}') for name, hardware in (
        ('finetune:L/16,imagenet2012,px=512', V3), ('finetune:H/14,imagenet2012,px=518', V3), ('vit_l16_jft', V3),
        ('mae_finetune:H/14', V3), ('bit_hyperrule:BiT-R152x4,imagenet2012', V3),
        ('vit_l16_i21k', layout.Hardware('h200', 'gpu', 1, 134.)))])
def test_published_runs_fit_on_eight_cores_and_on_one_gpu_by_arithmetic(
    name: str, hardware: layout.Hardware) -> None:
  assert_fits(files.load(name, []), hardware)


@pytest.mark.slow(reason='2 to 20 s each: traces of training')
@pytest.mark.parametrize('study', ['vtab', 'finetune_sweep', 'ablations:positions', 'study_data_size:i1k'])
def test_the_runs_of_studies_fit_on_eight_cores_by_arithmetic(study: str) -> None:
  runs = {repr((one.model, one.image_px, one.batch_size)): one for one in files.load_study(study, []).runs.values()}
  for config in runs.values():
    assert_fits(config, V3)


def assert_fits(config: s.Config, hardware: layout.Hardware) -> None:
  found = build.lay_out(config, hardware, build.Numbers(config.data.num_examples or 1_000_000, 1_000, False))
  assert found.fits, found.text
  check.check(found.config)


@pytest.mark.parametrize('px, kernel', [(32, s.AttentionKernel.XLA), (96, s.AttentionKernel.XLA),
                                        (64, s.AttentionKernel.CUDNN)])
def test_cudnn_is_not_chosen_for_images_that_end_with_half_a_tile(px: int, kernel: s.AttentionKernel) -> None:
  model = s.ViT(patch=4, width=192, heads=3, pool=s.Mean(), dtype=s.DType.BF16)
  config = s.Config(batch_size=64, image_px=(px, px), length='10 steps', model=model)
  found = layout.choose(config, layout.Hardware('h100', 'gpu', 1, 80., capability=9.), None)
  assert layout._kernels(found.config, layout.Hardware('h100', 'gpu', 1, 80., capability=9.)).attention is kernel


def test_settings_that_a_part_does_not_have_are_left_out() -> None:
  config = s.Config(model=s.ViT(mlp=s.SwiGlu()))
  assert layout.put(config, {'model.mlp.kernel': s.MlpKernel.FUSED}) == config
  assert layout.put(config, {'model.mlp.hidden': 8}).model.mlp.hidden == 8  # type: ignore[union-attr]
