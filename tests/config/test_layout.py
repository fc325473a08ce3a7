"""The rules by which a run is laid out on its hardware."""
from __future__ import annotations

import dataclasses
import json

import pytest

from vit_jax.config import check, files, json_files, layout
from vit_jax.config import schema as s
from vit_jax.jobs import build
from vit_jax.recipes import sizes

GIB = 2**30
V3 = layout.Hardware('v3', 'tpu', 8, 15.48, counts=(8, 16, 32))
H200 = layout.Hardware('h200', 'gpu', 12, 134.)
AUTO = ('mesh.fsdp', 'mesh.tensor', 'train.accumulate', 'model.remat', 'model.execution')


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


@pytest.mark.parametrize('name, platform, model, expected', [
    ('TPU v4', 'tpu', s.ViT(), 'fused'), ('v6e', 'tpu', s.ViT(width=1408, heads=16), 'fused'),
    ('TPU v3', 'tpu', s.ViT(), 'xla'), ('v2', 'tpu', s.ViT(), 'xla'), ('h100', 'gpu', s.ViT(), 'xla'),
    ('v6e', 'tpu', s.ViT(width=768, heads=16), 'xla'), ('v6e', 'tpu', s.ViT(attention=s.Attention(dropout=.1)), 'xla'),
    ('v6e', 'tpu', s.ViT(kernels=s.Kernels.PLAIN), 'xla'), ('cpu', 'cpu', s.ViT(), 'xla')])
def test_attention_is_chosen_by_chip_and_model_where_it_is_auto(
    name: str, platform: str, model: s.ViT, expected: str) -> None:
  config = s.Config(model=s.replaced(model, {'attention.kernel': s.AttentionKernel.AUTO}))
  check.check(config)
  found = layout.choose(config, layout.Hardware(name, platform, 8, 30.), needs(1., .01))
  assert isinstance(found.config.model, s.ViT) and found.config.model.attention.kernel.value == expected
  assert (', attention.kernel=fused' in found.text) == (expected == 'fused')
  assert 'model.attention.kernel' in found.config.mesh.chosen
  again = layout.unchosen(found.config).model
  assert isinstance(again, s.ViT) and again.attention.kernel is s.AttentionKernel.AUTO
  plain = layout.choose(s.Config(model=model), layout.Hardware(name, platform, 8, 30.), needs(1., .01)).config
  assert isinstance(plain.model, s.ViT)
  assert plain.model.attention.kernel is s.AttentionKernel.XLA, 'only where it is asked for'


HALF = s.ViT(dtype=s.DType.BF16)


@pytest.mark.parametrize('capability, model, expected', [
    (9., HALF, 'cudnn'), (8., HALF, 'cudnn'), (7.5, HALF, 'xla'), (0., HALF, 'xla'), (9., s.ViT(), 'xla'),
    (9., s.replaced(HALF, {'attention.dropout': .1}), 'xla'),
    (9., s.replaced(HALF, {'kernels': s.Kernels.PLAIN}), 'xla'),
    (9., s.replaced(HALF, {'positions': s.Relative()}), 'xla'), (9., s.replaced(HALF, {'heads': 64}), 'xla'),
    (9., s.replaced(HALF, {'heads': 3}), 'cudnn'), (8.9, s.replaced(HALF, {'heads': 3}), 'xla'),
    (8.9, s.replaced(HALF, {'heads': 6}), 'cudnn'), (9., s.replaced(HALF, {'heads': 2}), 'xla')])
def test_attention_on_gpus_is_that_of_cudnn_where_it_has_it_and_the_config_asks(
    capability: float, model: s.ViT, expected: str) -> None:
  gpu = layout.Hardware('gpu', 'gpu', 8, 76., capability=capability)
  config = s.Config(model=s.replaced(model, {'attention.kernel': s.AttentionKernel.AUTO}))
  found = layout.choose(config, gpu, needs(1., .01)).config
  assert isinstance(found.model, s.ViT) and found.model.attention.kernel.value == expected
  check.check(found)
  found = layout.choose(s.Config(model=model), gpu, needs(1., .01)).config
  assert isinstance(found.model, s.ViT) and found.model.attention.kernel is s.AttentionKernel.XLA


@pytest.mark.parametrize('name, platform, model, expected', [
    ('TPU v6 lite', 'tpu', s.ViT(), 'fused'), ('v6e', 'tpu', s.ViT(dropout=.1), 'xla'),
    ('v6e', 'tpu', s.ViT(mlp=s.SwiGlu()), 'xla'), ('v6e', 'tpu', s.ViT(kernels=s.Kernels.PLAIN), 'xla'),
    ('v5e', 'tpu', s.ViT(), 'xla'), ('v4', 'tpu', s.ViT(), 'xla'), ('cpu', 'cpu', s.ViT(), 'xla')])
def test_the_kernel_of_the_mlp_is_chosen_likewise(name: str, platform: str, model: s.ViT, expected: str) -> None:
  config = s.Config(model=s.replaced(model, {'mlp.kernel': s.MlpKernel.AUTO} if isinstance(model.mlp, s.Mlp) else {}))
  found = layout.choose(config, layout.Hardware(name, platform, 8, 30.), needs(1., .01))
  assert isinstance(found.config.model, s.ViT) and found.config.model.mlp.kernel.value == expected
  assert (', mlp.kernel=fused' in found.text) == (expected == 'fused')
  assert isinstance(model.mlp, s.SwiGlu) or 'model.mlp.kernel' in found.config.mesh.chosen
  assert 'model.attention.kernel' not in found.config.mesh.chosen


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
  assert way(found.config) == (4, 1, 2, 'qkv', 'scan') and found.config.mesh.chosen == ('mesh.tensor',)
  assert 'Set in the config: mesh.fsdp, train.accumulate, model.remat, model.execution.' in found.text
  explicit = dataclasses.replace(config, mesh=s.Mesh(-1, 4, 1))
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
  saved = json_files.from_json(json_files.to_json(written))
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
  old = json.loads(json_files.to_json(s.Config(mesh=s.Mesh(-1, 2, 1))))
  del old['mesh']['chosen'], old['mesh']['chosen_for']
  read = json_files.from_json(json.dumps(old))
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
