"""CIFAR-10 from scratch with a small ViT/4 at 32 px: ten minutes on two CPU cores.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`.
Differs:  It follows no paper.
Run:      python -m vit_jax.main --config=configs/cifar10.py --workdir=runs/cifar10
Plan:     1 device, 0.3 M parameters; about ten minutes on 2 CPU cores.
Expected: see docs/explanation/results.md.
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source'] or 'tfds:cifar10'
  return s.Config(
      name='cifar10', length='5 epochs', batch_size=128, image_px=(32, 32),
      data=s.Data(source=source, recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2)),
      model=s.ViT(patch=4, width=96, depth=4, heads=3, mlp=s.Mlp(192), pool=s.Mean()),
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='5 %')),
      train=s.Train(cpu_threads=2, ema=.999),
      evals={'test': s.TopK(every='1 epoch', batch_size=500)},
      checkpoints=s.Checkpoints(every='1 epoch'))
