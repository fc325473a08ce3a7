"""MAE on CIFAR-10 at 32 px with a small ViT/4, for one CPU core: does it learn what a picture is without labels?

Data:     an ArrayRecord-prepared TFDS `cifar10`, or a folder: --config.data.source=folder:PATH; labels are used by the
          evaluations alone.
Run:      python -m vit_jax.main --config=configs/mae_cifar10.py --workdir=runs/mae_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 measures the same network as it begins.
Plan:     1 device, 0.5 M parameters, of which the encoder has 0.45; 20 epochs, about 40 minutes on one CPU core.
Expected: k-NN and logistic regression well above those of the same network at random. See the README for what was
          measured.
"""
from vit_jax.config import schema as s


def get_config() -> s.Config:
  """The run."""
  return s.Config(
      name='mae_cifar10', length='20 epochs', batch_size=256, image_px=(32, 32),
      data=s.Data(source='tfds:cifar10', recipe=s.Recipe(crop=s.Crop.RESIZE, shift_px=4)),
      model=s.ViT(patch=4, width=96, depth=4, heads=3, mlp=384, pool=s.Pool.MEAN, positions=s.Positions.SINCOS2D_MAE),
      objective=s.Mae(decoder_width=64, decoder_depth=1, decoder_heads=4),
      optimizer=s.AdamW(lr=1.5e-3, b2=.95, weight_decay=.05, clip_norm=0., schedule=s.Schedule(warmup='10 %')),
      evals={'knn': s.Knn(every='20 %', train_split='train[:40%]', batch_size=500),
             'logistic': s.Logistic(every='50 %', train_split='train[:40%]', batch_size=500)},
      checkpoints=s.Checkpoints(every='20 %'))
