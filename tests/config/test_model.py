"""Tests of the checks of the settings of networks."""
from __future__ import annotations

import functools
from typing import Any

import pytest

from vit_jax.config import check, schema
from vit_jax.config.schema import AttentionKernel, Execution, Remat
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes

HALF_CUDNN = functools.partial(
    schema.ViT, dtype=schema.DType.BF16, attention=schema.Attention(kernel=AttentionKernel.CUDNN))


@pytest.mark.parametrize('name, has', [('EfficientNet-B0', True), ('LV-ViT-T/16', True), ('R50+B/16', False),
                                       ('BiT-R50x1', False), ('Mixer-B/16', False), ('B/16', False)])
def test_batchnorm_and_accumulation_are_refused_together(name: str, has: bool) -> None:
  model = sizes.model(name)
  assert model.has_batch_norm is has
  config = schema.Config(batch_size=32, model=model, train=schema.Train(accumulate=2))
  if has:
    with pytest.raises(UserError, match='train.accumulate: expected 1 for .*, whose BatchNorm needs .* got 2'):
      check.check(config)
  else:
    check.check(config)


def test_networks_of_convolutions_have_no_execution_and_compute_units_again_or_not() -> None:
  b0, vit = sizes.model('EfficientNet-B0'), sizes.model('B/16')
  assert (b0.remats, b0.executions) == ((Remat.NONE, Remat.FULL), (None,))
  assert (vit.remats, vit.executions) == (
      (Remat.NONE, Remat.NAMES, Remat.QKV, Remat.MLP, Remat.FULL), (Execution.SCAN, Execution.UNROLLED))


@pytest.mark.parametrize('model, said', [
    (schema.ResNet(layers=()), 'model.layers: expected a number of units for each stage, such as 3,4,6,3, got ().'),
    (schema.ResNet(width=16), 'model.width: expected a multiple of the 32 groups of its norms, got 16.'),
    (schema.EfficientNet(depth_factor=0.), 'model.depth_factor: expected more than 0 to 100, got 0.0'),
    (schema.Mixer(patch=15), 'image_px: expected multiples of model.patch=15 px, such as (225, 225), got (224, 224).'),
    (schema.ViT(stem=schema.ResNetStem(), patch=24), 'model.patch: expected a multiple of 16 px, the stride of'),
    (schema.ViT(unroll=2, execution=Execution.UNROLLED),
     'model.unroll: expected its default 1 with model.execution=unrolled, got 2. It has no'),
    (schema.ViT(depth=3, full_remat=4), 'model.full_remat: expected at most model.depth=3, got 4.'),
    (schema.ViT(last_norm=schema.LastNorm.POOLED),
     'model.last_norm: expected tokens or none with model.pool=classtoken, got pooled. Set model.pool=mean'),
    (schema.ViT(pool=schema.Mean(class_token=True), block=schema.Axial()),
     "model.pool: expected mean or map, without a class token, with model.block=axial, got 'one with a class"),
    (schema.ViT(patch_dropout=.5, block=schema.Axial(), pool=schema.Mean()),
     'model.patch_dropout: expected 0 with model.block=axial, which needs all patches, got 0.5.'),
    (schema.ViT(patch_dropout=.5, positions=schema.Relative()), 'expected 0 with model.positions=relative, which'),
    (schema.ViT(patch_dropout=.5, positions=schema.Learned(schema.PositionsAt.LAYERS)),
     'model.patch_dropout: expected 0 with model.positions.at=layers, which needs all patches, got 0.5.'),
    (schema.ViT(drop_path_even=True), 'model.drop_path_even: expected its default False with model.drop_path=0'),
    (schema.ViT(attention=schema.Attention(kernel=AttentionKernel.CUDNN)),
     'model.attention.kernel: expected xla with model.dtype=float32, got cudnn. Set model.dtype=bfloat16 to use '
     'cuDNN.'),
    (schema.ViT(attention=schema.Attention(kernel=AttentionKernel.CUDNN), width=60, heads=5, dtype=schema.DType.BF16),
     'expected xla unless heads have 8, 16, … 256 channels (model.width=60 and model.heads=5 give 12), got cudnn.'),
    (HALF_CUDNN(positions=schema.Relative()),
     'model.attention.kernel: expected xla with model.positions=relative, got cudnn. Set model.attention.kernel=xla.'),
    (HALF_CUDNN(kernels=schema.Kernels.PLAIN),
     'model.attention.kernel: expected xla with model.kernels=plain, got cudnn. Set model.attention.kernel=xla.'),
    (HALF_CUDNN(attention=schema.Attention(kernel=AttentionKernel.CUDNN, dropout=.1)),
     'model.attention.kernel: expected xla with model.attention.dropout=0.1, got cudnn.')])
def test_problems_of_a_network_are_found_by_the_check_of_a_config(model: schema.Model, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(schema.Config(model=model))
  assert said in str(error.value)


def test_patch_dropout_is_refused_for_objectives_that_choose_patches() -> None:
  with pytest.raises(UserError, match='model.patch_dropout: expected 0 with objective Mae, which needs all patches'):
    check.check(schema.Config(model=schema.ViT(patch_dropout=.5), objective=schema.Mae()))


def config(lora: schema.Lora, **more: Any) -> schema.Config:
  return schema.Config(lora=lora, **more)


@pytest.mark.parametrize(('wrong', 'message'), [
    (config(schema.Lora(dropout=.1)), 'lora.dropout: expected its default 0.0 with lora.rank=0, got 0.1'),
    (config(schema.Lora(rank=4, targets='quer')),
     'lora.targets: expected the ends of attn/query, attn/key, .*, or patterns, got .quer.'),
    (config(schema.Lora(rank=4, targets='(')), r'lora.targets: expected a regular expression, got .\(.'),
    (config(schema.Lora(rank=4), model=schema.ResNet()),
     'lora.rank: expected 0 for ResNet, which has no blocks of dense layers, got 4'),
    (config(schema.Lora(rank=4), head=schema.Head(probe=True), optimizer=schema.Lars(
        rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))),
     'head.probe: expected false with lora.rank=4, as no gradient reaches the backbone of a probe, got True'),
    (config(schema.Lora(rank=4), optimizer=schema.AdamW(
        rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))),
     'optimizer.rules: expected none that freezes the adapters with lora.rank=4, got one. Remove it')])
def test_adapters_that_cannot_be_trained_are_refused(wrong: schema.Config, message: str) -> None:
  with pytest.raises(UserError, match=message):
    check.check(wrong)


def test_the_first_rule_that_matches_decides_whether_adapters_are_frozen() -> None:
  rules = (schema.PathRule('.*/lora_.*', lr=.5), schema.PathRule('backbone/.*', frozen_until='100 %'))
  check.check(config(schema.Lora(rank=4), optimizer=schema.AdamW(rules=rules)))


def test_layers_are_chosen_by_the_end_of_their_path_or_a_pattern() -> None:
  layers = schema.adapted_layers(schema.ViT(mlp=schema.SwiGlu()))
  chosen = {targets: [layer for layer in layers if schema.Lora(rank=1, targets=targets).is_target(layer)]
            for targets in ('', 'query,value', 'mlp/.*', 'attn/out')}
  assert list(chosen.values()) == [[], ['attn/query', 'attn/value'], ['mlp/up', 'mlp/down', 'mlp/gate'], ['attn/out']]
  assert all(schema.Lora(rank=1).is_target(layer) for layer in (*layers, *schema.adapted_layers(schema.Mixer())))
  assert not schema.Lora(rank=1, targets='y').is_target('attn/key')
