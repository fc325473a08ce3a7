"""ViT-B/32 on ImageNet-1k for 300 epochs with GSAM: a flat minimum instead of augmentation.

Data:     TFDS `imagenet2012`, 99 % of train: 1,268,355 images; the other 1 % is `minival`. 1,000 classes.
Source:   arXiv 2203.08065: batch 4,096, lr 3e-3 to 3e-5 linear, rho .6 to .1 with it, alpha .6, decay 1e-3 as a
          product, mean pooling, sigmoid loss, random crops and flips alone; Adam's first moment in f32.
Run:      python -m vit_jax.main --config=configs/gsam_b32_i1k.py --workdir=runs/gsam_b32_i1k
          --config.train.sam.alpha=0 is SAM. A step costs two.
Expected: better than the same run without --config.train.sam, by several points (the paper). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.config import sizes


def get_config() -> s.Config:
  """The run."""
  config = s.Config(
      name='gsam_b32_i1k', length='300 epochs', batch_size=4096,
      data=s.Data(
          source='tfds:imagenet2012', train_split='train[:99%]', eval_split='validation', num_examples=1_268_355,
          num_classes=1_000, recipe=s.Recipe(eval_resize_px=256)),
      model=sizes.vit('B/32'),
      head=s.Head(bias_init=-10.),
      objective=s.Supervised(loss=s.Loss.SIGMOID),
      optimizer=s.AdamW(
          lr=3e-3, weight_decay=1e-3, decay_by=s.DecayBy.SCHEDULE,
          schedule=s.Schedule(s.Decay.LINEAR, warmup='10_000 steps', end_lr=3e-5)),
      train=s.Train(sam=s.Sam(rho=.6, rho_end=.1, alpha=.6)),
      evals={'val': s.TopK(every='10 epochs', metrics=('ece',)),
             'minival': s.TopK(every='10 epochs', split='train[99%:]')},
      checkpoints=s.Checkpoints(every='2 epochs'))
  config.model.pool = s.Pool.MEAN
  return config
