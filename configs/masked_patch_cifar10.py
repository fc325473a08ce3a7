"""Masked patch prediction on CIFAR-10 at 32 px with a small ViT/4, for one CPU core: the ViT paper's self-supervision.

Data:     an ArrayRecord-prepared TFDS `cifar10`, or a folder: --config.data.source=folder:PATH; labels are used by the
          evaluations alone.
Source:   arXiv 2010.11929, Appendix B.1.2; sizes and rates are our own.
Run:      python -m vit_jax.main --config=configs/masked_patch_cifar10.py --workdir=runs/masked_patch_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 measures the same network as it begins.
Plan:     1 device, 0.14 M parameters; 80,000 pictures, about 4 minutes of one CPU core (400 images/s).
Expected: 20 nearest neighbours 26.8, 26.3, 27.6, 27.3, 27.8 % (2,000 test pictures, 5,000 labelled ones, JPEG copies),
          with --config.length='9 epochs' 30.4, 30.3 and 30.4 %, and logistic regression 37.0, 37.7 and 36.7 %; of the
          same network as it begins 27.8 and 34.1 %. A small gain that does not grow: MAE's is larger.
"""
from vit_jax.config import schema as s


def get_config() -> s.Config:
  """The run."""
  seen, test = 'train[:10%]', 'test[:20%]'
  return s.Config(
      name='masked_patch_cifar10', length='80e3 examples', batch_size=128, image_px=(32, 32),
      data=s.Data(source='tfds:cifar10', recipe=s.Recipe(crop=s.Crop.RESIZE, shift_px=4)),
      model=s.ViT(patch=4, width=64, depth=3, heads=4, mlp=128, pool=s.Pool.MEAN),
      objective=s.MaskedPatch(),
      optimizer=s.AdamW(lr=2e-3, weight_decay=.05, schedule=s.Schedule(warmup='10 %')),
      evals={'knn': s.Knn(every='20 %', train_split=seen, split=test, batch_size=500),
             'logistic': s.Logistic(every='100 %', l2=(1e-4, 1e-3, 1e-2, .1), train_split=seen, split=test,
                                    batch_size=500)},
      checkpoints=s.Checkpoints(every='20 %'))
