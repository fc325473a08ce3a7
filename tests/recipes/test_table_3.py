"""The runs of the ViT paper's Table 3, cell by cell, and the heads of sections 3.1 and D.3."""
from __future__ import annotations

import pytest

from vit_jax.config import files
from vit_jax.config import schema as s

# arXiv 2010.11929, Table 3: epochs, base learning rate, its decay, weight decay, dropout. Loss and bias of the head are
# those of the released code. The caption of Table 3 has clipping at global norm 1 for ImageNet, not for the other two.
CLIP_NORM = {'jft': 0., 'i21k': 0., 'i1k': 1.}
TABLE3 = {
    'vit_b16_jft': (7, 8e-4, s.Decay.LINEAR, .1, 0., s.Loss.SIGMOID, -10.),
    'vit_l16_jft': (14, 4e-4, s.Decay.LINEAR, .1, 0., s.Loss.SIGMOID, -10.),
    'vit_h14_jft': (14, 3e-4, s.Decay.LINEAR, .1, 0., s.Loss.SIGMOID, -10.),
    'vit_b16_i21k': (90, 1e-3, s.Decay.LINEAR, .03, .1, s.Loss.SIGMOID, -10.),
    'vit_l16_i21k': (90, 1e-3, s.Decay.LINEAR, .03, .1, s.Loss.SIGMOID, -10.),
    'vit_b16_i1k': (300, 3e-3, s.Decay.COSINE, .3, .1, s.Loss.SOFTMAX, 0.),
    'vit_l16_i1k': (300, 3e-3, s.Decay.COSINE, .3, .1, s.Loss.SOFTMAX, 0.),
}


@pytest.mark.parametrize('name', TABLE3)
def test_a_run_is_what_table_3_says(name: str) -> None:
  epochs, lr, decay, weight_decay, dropout, loss, bias = TABLE3[name]
  c = files.load(name, [])
  assert (c.name, c.length, c.batch_size, c.image_px) == (name, f'{epochs} epochs', 4096, (224, 224))
  assert isinstance(c.optimizer, s.AdamW) and isinstance(c.model, s.ViT) and isinstance(c.objective, s.Supervised)
  assert (c.optimizer.lr, c.optimizer.weight_decay, c.optimizer.clip_norm) == (
      lr, weight_decay, CLIP_NORM[name.rpartition('_')[2]])
  assert (c.optimizer.schedule.decay, c.optimizer.schedule.warmup) == (decay, '10_000 steps')
  assert (c.model.dropout, c.objective.loss, c.head.bias_init) == (dropout, loss, bias)
  width, depth, patch = {'b16': (768, 12, 16), 'l16': (1024, 24, 16), 'h14': (1280, 32, 14)}[name.split('_')[1]]
  assert (c.model.width, c.model.depth, c.model.patch) == (width, depth, patch)
  assert c.head.pre_logits == width  # section 3.1: an MLP with one hidden layer at pre-training time


# Clipping: the caption of Table 3 has it for ImageNet only.
@pytest.mark.parametrize(('spec', 'hidden'), [
    ('rivals_jft:R50+L/32', 1024), ('rivals_jft:BiT-R50x1', 0), ('axial_jft:size=B/16', 0)])
def test_other_networks_on_jft_have_their_head_and_no_clipping(spec: str, hidden: int) -> None:
  c = files.load(spec, [])
  assert (c.head.pre_logits, c.head.bias_init, c.optimizer.clip_norm) == (hidden, -10., 0.)


@pytest.mark.parametrize(('spec', 'heads'), [
    ('ablations:pool', {'cls': 768, 'mean': 0, 'mean_lower_rate': 0}),  # Appendix D.3: tanh MLP, and a linear layer
    ('ablations:pool,small', {'cls': 64, 'mean': 0}), ('ablations:shape', {'base': 1024, 'width_2': 2048}),
    ('ablations:optimizer', {'BiT-R50x1_adam': 0, 'BiT-R50x1_sgd': 0}), ('ablations:positions', {'relative': 768}),
    ('study_scaling', {'R50+L_16_7ep': 1024, 'BiT-R50x1_7ep': 0}), ('study_data_size:sets', {'H_14_i21k': 1280}),
    ('study_data_size', {'b_32_9000000': 384, 'L_16_9000000': 1024, 'BiT-R50x1_9000000': 0})])
def test_studies_take_the_head_of_each_network(spec: str, heads: dict[str, int]) -> None:
  runs = files.load_study(spec, []).runs
  assert {name: runs[name].head.pre_logits for name in heads} == heads
  assert 'small' in spec or all(runs[name].optimizer.clip_norm == 0. for name in heads)


def test_subsets_of_imagenet_are_clipped_as_imagenet_is() -> None:
  run = files.load_study('study_data_size:i1k', []).runs['B_32_100000']
  assert (run.optimizer.clip_norm, run.head.pre_logits, run.head.bias_init) == (1., 768, 0.)
