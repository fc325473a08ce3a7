"""LiT on CIFAR-10: a small text tower is trained for a frozen ViT-Ti/16, on prompts with the names of the classes.

Data:     CIFAR-10 as `folder:DIR`, or as written by `vit-jax prepare --data=cifar10 --to=DIR`; the argument source=…
Differs:  It follows no paper: LiT (arXiv 2111.07991) trains on captions. Of the 128 images of a batch about 13 have the
          text of any class, and only one of these pairs counts as a match. The bias of sigmoid starts at -ln 127, at
          which an image expects one match in the batch. SigLIP's -10 does so for 22,000 images, and 300 steps of 0.001
          hardly move it.
Run:      python -m vit_jax.main --config=configs/lit_cifar10.py:source=folder:DIR --config.init_from=FILE
Plan:     1 device; a text tower of 0.9 M parameters; about ten minutes on 2 CPU cores.
Expected: see benchmarks/comparisons.md.
"""
import math

from vit_jax.config import schema as s
from vit_jax.recipes import sizes

BATCH = 128
FROZEN = (s.PathRule('backbone/.*', frozen_until='100 %'),)


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=… with loss=sigmoid or softmax."""
  given = s.parse_arg(arguments, source=(), loss=('sigmoid', 'softmax'))
  loss = s.PairLoss(given['loss'])
  recipe = s.Recipe(crop=s.Crop.RESIZE, flip=True, interpolation=s.Interpolation.BICUBIC, antialias=True)
  return s.Config(
      name=f'LiT CIFAR-10 {loss.value}', length='300 steps', batch_size=BATCH, image_px=(64, 64),
      data=s.Data(source=given['source'] or 'tfds:cifar10', recipe=recipe), model=sizes.vit('Ti/16'),
      objective=s.Contrastive(
          loss=loss, prompts='clip_best', bias_init=-math.log(BATCH - 1) if loss is s.PairLoss.SIGMOID else -10.,
          text=s.Text(length=40, width=128, depth=4, heads=4, mlp=512)),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.95, weight_decay=1e-4, clip_norm=1., rules=FROZEN,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(cpu_threads=2),
      evals={'zeroshot': s.ZeroShot(every='100 %', batch_size=200)},
      checkpoints=s.Checkpoints(every='20 %'))
