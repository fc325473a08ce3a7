"""Masked patch prediction on CIFAR-10 at 32 px with a small ViT/4, for one CPU core: the ViT paper's self-supervision.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2010.11929, Appendix B.1.2; sizes and rates are our own.
Differs:  It is a small form of the paper's method, with sizes and rates of this project.
Run:      python -m vit_jax.main --config=configs/masked_patch_cifar10.py:pixels --workdir=runs/masked_patch_cifar10
          Targets: color (the mean color of 3 bits a channel, the default), colors (of 16 cells), pixels.
          --config.length='1 steps' --config.optimizer.lr=0 measures the same network at initialization.
Plan:     1 device, 0.14 M parameters; 9 epochs, about 15 minutes of one CPU core (500 images/s).
Expected: logistic regression on 5,000 labeled images (JPEG copies), all 10,000 test images: at initialization 33.6,
          33.3 and 33.1 % (seeds 0, 1, 2); pixels: 39.1, 38.2, 39.6, 39.9 % after each quarter. Neighbors do not gain
          from the last block (20 of them: 27.9 to 28.9 at initialization, 25.3 %), but from the first
          (--config.evals.knn.features.blocks=1: 28.2, then 28.4, 32.3, 32.9, 33.4, 33.0 in 5 epochs, 2,000 images).
          color, with three blocks, gained less: 34.1 at initialization, then 37.0, 37.7, 36.7 %.
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, for `color`, `colors` or `pixels`."""
  given = s.parse_arg(arguments, target=('color', 'colors', 'pixels'), source=())
  target = given['target']
  seen, test = 'train[:10%]', 'test'
  return s.Config(
      name=f'masked_patch_cifar10 {target}', length='9 epochs', batch_size=128, image_px=(32, 32),
      data=s.Data(source=given['source'] or 'tfds:cifar10', recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=4)),
      model=s.ViT(patch=4, width=64, depth=4, heads=4, mlp=s.Mlp(128), pool=s.Mean()),
      objective=s.MaskedPatch(target=s.PatchTarget(target), mask_ratio=.5, mask_token_prob=.8, random_patch_prob=.1),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(cpu_threads=2),
      evals={'knn': s.Knn(every='25 %', train_split=seen, split=test, batch_size=500),
             'logistic': s.Logistic(every='25 %', l2=(1e-4, 1e-3, 1e-2, .1), train_split=seen, split=test,
                                    batch_size=500),
             'health': s.Health(every='20 %', images=1000, min_rank=2., split='test[:20%]', batch_size=500)},
      checkpoints=s.Checkpoints(every='25 %'))
