"""DINO on CIFAR-10 at 32 px with a small ViT/8, for one CPU core: 2 crops of 32 px and 2 of 16 px.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2104.14294 at a small scale: 1,024 prototypes, no blur (2 px are too much for 32), half the other
          changes of color, momentum from 0.99; sizes and rates are our own.
Differs:  It is a small form of the paper's method: 1,024 prototypes, no blur, half the other color changes, momentum
          from 0.99.
Run:      python -m vit_jax.main --config=configs/dino_cifar10.py --workdir=runs/dino_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 --config.optimizer.schedule.end_lr=0 measures the same
          network at initialization.
          --config.objective.centering=none --config.objective.teacher_temperature.start=0.1
          --config.objective.teacher_temperature.end=0.1 collapses, and raises the alarm.
Plan:     1 device, 0.28 M parameters; 48,000 images, minutes of one CPU core.
Expected: 20 nearest neighbors by the teacher 28.6, 28.8, 29.4, 29.9 and 30.2 % (2,000 test images, 5,000 labeled
          ones, JPEG copies); with --config.length='360e3 examples' 29.8, 30.6, 31.5 and 31.6 % after each quarter. Of
          the same network at initialization 26.4, 27.2 and 27.1 % (three seeds).
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source'] or 'tfds:cifar10'
  views = s.Views(on=True, num_local=2, local_px=16, local_area=(.1, .4), blur=(0., 0., 0.), solarize=(0., .1, 0.),
                  grayscale=.1, jitter=s.Jitter(.4, .4, .2, .1, probability=.5), global_area=(.4, 1.))
  return s.Config(
      name='dino_cifar10', length='48e3 examples', batch_size=64, image_px=(32, 32),
      data=s.Data(source=source, recipe=s.Recipe(crop_sampler=s.CropSampler.TORCHVISION,
                                                         crop_aspect=(.75, 4 / 3), flip=True, views=views,
                                                         eval_resize_px=32)),
      model=s.ViT(patch=8, width=64, depth=3, heads=4, mlp=s.Mlp(128), pool=s.Mean(),
                  positions=s.Learned(resize=s.PositionResize.BICUBIC_OFFSET)),
      objective=s.Dino(
          out_dim=1024, hidden_dim=256, bottleneck_dim=64, momentum=s.Ramp(.99, 1.),
          teacher_temperature=s.Ramp(.04, .06, until='30 %', curve=s.Curve.LINEAR), norm_last_layer=True,
          student_temperature=.1, centering=s.Centering.MEAN, center_momentum=.9),
      optimizer=s.AdamW(
          lr=1e-3, b1=.9, b2=.999, weight_decay=.04, weight_decay_ramp=s.Ramp(1., 10.), clip_norm=0., clip_tensor=3.,
          schedule=s.Schedule(s.Decay.COSINE, warmup='10 %', end_lr=1e-6),
          rules=(s.PathRule('projector/prototypes/.*', frozen_until='5 %'),)),
      train=s.Train(cpu_threads=2),
      evals={'knn': s.Knn(every='20 %', views=('teacher',), train_split='train[:10%]', split='test[:20%]',
                          batch_size=500)},
      checkpoints=s.Checkpoints(every='20 %'))
