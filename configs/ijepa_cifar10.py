"""I-JEPA on CIFAR-10 at 32 px with a small ViT/4, for one CPU core: predicts features of blocks, from crops alone.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2301.08243 at a small scale; the network is that of `mae_cifar10`.
Differs:  It is a small form of the paper's method: a predictor of 48 channels and 2 blocks, momentum from 0.99, rates
          of this project.
Run:      python -m vit_jax.main --config=configs/ijepa_cifar10.py --workdir=runs/ijepa_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 measures the same network at initialization.
Plan:     1 device, 0.16 M parameters, of which the encoder has 0.10; 2 epochs, minutes of one CPU core.
Expected: 20 nearest neighbors by the teacher 27.4, 27.3 and 27.8 % after each fifth (2,000 test images, 5,000 labeled
          ones, JPEG copies, one seed, stopped after 500 of 781 steps and 5 minutes of a processor): less than the same
          network at initialization, 29.9 % in `mae_cifar10`. Loss 2.04 to 0.1, deviation 0.39 to 0.46. So short a run
          learns no better features.
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source'] or 'tfds:cifar10'
  return s.Config(
      name='ijepa_cifar10', length='2 epochs', batch_size=128, image_px=(32, 32),
      data=s.Data(source=source, recipe=s.Recipe(
          crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.3, 1.), crop_aspect=(.75, 4 / 3),
          flip=False, eval_resize_px=32)),
      model=s.ViT(patch=4, width=64, depth=3, heads=4, mlp=s.Mlp(128), pool=s.Mean(),
                  positions=s.SinCos(s.Frequencies.MAE)),
      objective=s.IJepa(predictor_width=48, predictor_depth=2, predictor_heads=4, num_targets=4, target_area=(.15, .2),
                        target_aspect=(.75, 1.5), context_area=(.85, 1.), context_ratio=.5, min_context=10,
                        loss=s.JepaLoss.L2, momentum=s.Ramp(.99, 1., curve=s.Curve.LINEAR)),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.04,
                        weight_decay_ramp=s.Ramp(1., 10., curve=s.Curve.LINEAR), clip_norm=0.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %', end_lr=1e-6)),
      train=s.Train(cpu_threads=2),
      evals={'knn': s.Knn(every='20 %', views=('teacher',), train_split='train[:10%]', split='test[:20%]',
                          batch_size=500),
             'health': s.Health(every='20 %', images=1000, min_rank=2., views=('teacher',), split='test[:20%]',
                                batch_size=500)},
      checkpoints=s.Checkpoints(every='20 %'))
