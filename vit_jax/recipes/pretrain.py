"""Pre-training as in the ViT paper (arXiv 2010.11929, Table 3): what its runs on one set of data have in common.

All: batch 4,096, AdamW, 10,000 steps of warm-up, 224 px. Runs differ in size, length and rate. The gradient is clipped
at global norm 1 on ImageNet-1k alone (caption of Table 3). The head of pre-training has one hidden layer with tanh
(section 3.1 and Appendix D.3), hybrids included; ResNets have the linear head of BiT (arXiv 1912.11370).
"""
from __future__ import annotations

from collections.abc import Mapping

from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

BATCH_SIZE = 4096  # Table 3
WARMUP = '10_000 steps'  # Table 3
JFT_LABELS = 8  # room for the labels of an image: 1.26 on average, the most is not published
CLIP_NORM = 1.  # caption of Table 3: for ImageNet; the other two datasets have no clipping
Meshes = Mapping[str, layout.Placement]


def head(model: s.Model, *, bias_init: float = 0.) -> s.Head:
  """The head of pre-training: a hidden layer of the model's width with tanh on a class token (ViT paper, section 3.1).

  A linear head for mean pooling (Appendix D.3), attention pooling (Scaling ViT), and networks without tokens.
  """
  hidden = model.width if isinstance(model, s.ViT) and model.pool is s.Pool.CLS else 0
  return s.Head(bias_init=bias_init, pre_logits=hidden)


def jft(name: str, size: str, *, epochs: int, lr: float, arguments: str, meshes: Meshes) -> s.Config:
  """A run on JFT-300M: linear decay of the learning rate, weight decay 0.1, no dropout, no clipping.

  The sigmoid loss and the head bias of -10 are those of the released code.

  Args:
    name: of the run.
    size: of the model, as `sizes.model` knows it.
    epochs: over 303 M images.
    lr: highest learning rate.
    arguments: of the config; `mesh=…` lays the run out.
    meshes: what `mesh` may be.
  """
  # A pod run on any mesh: products in bf16, quick to compile, activations small.
  model = layout.run_as(sizes.model(size), remat=s.Remat.NAMES, execution=s.Execution.SCAN)
  model.dtype = s.DType.BF16
  return _placed(s.Config(
      name=name, length=f'{epochs} epochs', batch_size=BATCH_SIZE,
      data=s.Data(source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291, max_labels=JFT_LABELS,
                  recipe=crops()),
      model=model, head=head(model, bias_init=-10.),
      objective=s.Supervised(loss=s.Loss.SIGMOID),
      optimizer=s.AdamW(lr=lr, weight_decay=.1, clip_norm=0., schedule=s.Schedule(s.Decay.LINEAR, warmup=WARMUP)),
      train=s.Train(log_every='200 steps'),
      evals={'test': s.TopK(every='25_000 steps')},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='100_000 steps')), arguments, meshes)


def i21k(name: str, size: str, *, arguments: str, meshes: Meshes) -> s.Config:
  """A run of 90 epochs on ImageNet-21k: linear decay of the rate to 1e-5, weight decay 0.03, dropout 0.1, no clipping.

  The sigmoid loss, the head bias of -10 and the hidden layer of the head are those of the released weights. Arguments
  as of `jft`.
  """
  model = sizes.vit(size)
  model.dropout = .1
  return _placed(s.Config(
      name=name, length='90 epochs', batch_size=BATCH_SIZE,
      data=s.Data(source='folder:imagenet21k', num_examples=14_197_122, num_classes=21_841, recipe=crops()),
      model=model, head=head(model, bias_init=-10.),
      objective=s.Supervised(loss=s.Loss.SIGMOID),
      optimizer=s.AdamW(lr=1e-3, weight_decay=.03, clip_norm=0., schedule=s.Schedule(
          s.Decay.LINEAR, warmup=WARMUP, end_lr=1e-5)),
      evals={'val': s.TopK(every='10_000 steps')},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='50_000 steps')), arguments, meshes)


def i1k(name: str, size: str, *, arguments: str, meshes: Meshes) -> s.Config:
  """A run of 300 epochs on ImageNet-1k: cosine decay of the rate, weight decay 0.3, dropout 0.1, clipping at norm 1.

  Arguments as of `jft`.
  """
  model = sizes.vit(size)
  model.dropout = .1
  return _placed(s.Config(
      name=name, length='300 epochs', batch_size=BATCH_SIZE,
      data=s.Data(source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
                  recipe=crops()),
      model=model, head=head(model),
      optimizer=s.AdamW(lr=3e-3, weight_decay=.3, clip_norm=CLIP_NORM, schedule=s.Schedule(
          s.Decay.COSINE, warmup=WARMUP)),
      evals={'val': s.TopK(every='10 epochs')},
      checkpoints=s.Checkpoints(every='5 epochs', keep_best='val/top1')), arguments, meshes)


def _placed(config: s.Config, arguments: str, meshes: Meshes) -> s.Config:
  return layout.place(config, s.parse_arg(arguments, mesh=('',))['mesh'], meshes)


def crops() -> s.Recipe:
  """Random crops and flips alone, by TensorFlow's sampler with its default aspect ratios: the authors' program."""
  return s.Recipe(crop_sampler=s.CropSampler.TENSORFLOW, crop_aspect=(.75, 1.33))
