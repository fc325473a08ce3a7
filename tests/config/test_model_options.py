"""Tests of what is asked of a backbone before it is built."""
from __future__ import annotations

import pytest

from vit_jax.config import check, model_options, schema
from vit_jax.config.schema import AttentionKernel, Execution, Remat
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes


@pytest.mark.parametrize('name, has', [('EfficientNet-B0', True), ('LV-ViT-T/16', True), ('R50+B/16', False),
                                       ('BiT-R50x1', False), ('Mixer-B/16', False), ('B/16', False)])
def test_batchnorm_and_accumulation_are_refused_together(name: str, has: bool) -> None:
  model = sizes.model(name)
  assert model_options.has_statistics(model) is has
  config = schema.Config(batch_size=32, model=model, train=schema.Train(accumulate=2))
  if has:
    with pytest.raises(UserError, match='train.accumulate=2 would give the BatchNorm of the model the statistics of a '
                                        'part of the batch; want train.accumulate=1'):
      check.check(config)
  else:
    check.check(config)


def test_networks_of_convolutions_have_no_execution_and_compute_units_again_or_not() -> None:
  assert model_options.ways_to_run(sizes.model('EfficientNet-B0')) == ((Remat.NONE, Remat.FULL), (None,))
  assert model_options.ways_to_run(sizes.model('B/16')) == (
      (Remat.NONE, Remat.NAMES, Remat.QKV, Remat.MLP, Remat.FULL), (Execution.SCAN, Execution.UNROLLED))


@pytest.mark.parametrize('model, said', [
    (schema.ResNet(layers=()), 'model.layers=() has no stage; want a number of units for each, such as 3,4,6,3'),
    (schema.ResNet(width=16), 'model.width=16 is not a multiple of the 32 groups of its norms'),
    (schema.EfficientNet(depth_factor=0.), 'model.depth_factor: expected more than 0 to 100, got 0.0'),
    (schema.Mixer(patch=15), 'image_px=(224, 224) is not a multiple of model.patch=15'),
    (schema.ViT(stem=schema.ResNetStem(), patch=24), 'model.patch=24 is not a multiple of the 16 px'),
    (schema.ViT(unroll=2, execution=Execution.UNROLLED),
     'model.unroll=2 is for a scan, but model.execution=unrolled; want unroll=1'),
    (schema.ViT(depth=3, full_remat=4), 'model.full_remat=4 are not some of model.depth=3 blocks; want 0 to 3'),
    (schema.ViT(norm_after_pool=True), 'model.norm_after_pool: expected False with model.pool=cls, got True. Set'),
    (schema.ViT(pool=schema.Pool.PATCHES, axial=True), 'model.pool=patches has a class token, which lies in no row'),
    (schema.ViT(distilled=True, pool=schema.Pool.MAP), 'but model.pool=map has none'),
    (schema.ViT(attention=AttentionKernel.CUDNN),
     'model.attention=cudnn multiplies bf16 only, but model.dtype=float32; want model.dtype=bfloat16'),
    (schema.ViT(attention=AttentionKernel.CUDNN, width=60, heads=5, dtype=schema.DType.BF16),
     'knows heads of 8, 16, … 256 channels, but model.width=60 gives model.heads=5 12 each'),
    (schema.ViT(attention=AttentionKernel.SPLASH, positions=schema.Positions.RELATIVE),
     'model.attention=splash never holds the weights that relative positions would change; want model.attention=xla'),
    (schema.ViT(attention=AttentionKernel.SPLASH, attention_dropout=.1),
     'model.attention=splash never holds the weights that attention_dropout would change')])
def test_faults_reach_the_check_of_a_config(model: schema.Model, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(schema.Config(model=model))
  assert said in str(error.value)
