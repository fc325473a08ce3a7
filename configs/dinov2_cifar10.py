"""DINOv2 on CIFAR-10 at 32 px with a small ViT/8, for one CPU core: DINO with masked patches and spread features.

Data:     CIFAR-10 as written by `vit-jax prepare --data=cifar10 --to=DIR`, with the argument source=array_record:DIR,
          such as --config=dinov2_cifar10:source=array_record:DIR; or a TFDS `cifar10` (the default), or
          source=folder:PATH; labels are used by the evaluations alone.
Source:   arXiv 2304.07193 at a small scale: network, crops, rates and heads of `dino_cifar10`, with the weights, shares
          and ratios of masked patches of the paper's program; one head for both, mean centering.
Differs:  It is a small form of the paper's method: 1,024 prototypes, groups of 16 images, 16 patches an image, no blur,
          half the other changes of color, momentum from 0.99.
Run:      python -m vit_jax.main --config=configs/dinov2_cifar10.py --workdir=runs/dinov2_cifar10
Plan:     1 device, 0.28 M parameters; 48,000 images, minutes of one CPU core.
Expected: 20 nearest neighbors by the teacher 26.9 % at the end, 28.4 % at step 300 (2,000 test images, 5,000 labeled
          ones, JPEG copies, one seed). `dino_cifar10` on the same images and machine has 29.0 %, the same network at
          initialization 26.4 to 27.2 %: masked patches do not help so small and short a run. With
          --config.objective.ibot_weight=0 29.8 %, with --config.objective.koleo_weight=0 27.9 %.
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source'] or 'tfds:cifar10'
  views = s.Views(on=True, num_local=2, local_px=16, local_area=(.1, .4), blur=(0., 0., 0.), solarize=(0., .1, 0.),
                  grayscale=.1, jitter=s.Jitter(.4, .4, .2, .1, probability=.5), global_area=(.4, 1.))
  return s.Config(
      name='dinov2_cifar10', length='48e3 examples', batch_size=64, image_px=(32, 32),
      data=s.Data(source=source, recipe=s.Recipe(crop_sampler=s.CropSampler.TORCHVISION,
                                                         crop_aspect=(.75, 4 / 3), flip=True, views=views,
                                                         eval_resize_px=32)),
      model=s.ViT(patch=8, width=64, depth=3, heads=4, mlp=s.Mlp(128), pool=s.Mean(),
                  positions=s.Learned(resize=s.PositionResize.BICUBIC_OFFSET)),
      objective=s.Dinov2(
          dino_weight=1., local_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=2, patch_out_dim=0,
          patch_bottleneck_dim=256,
          mask_share=.5, mask_ratio=(.1, .5), group=16,
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
