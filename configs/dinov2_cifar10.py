"""DINOv2 on CIFAR-10 at 32 px with a small ViT/8, for one CPU core: DINO with masked patches and spread features.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2304.07193 at a small scale: network, crops, rates and heads of `dino_cifar10`, with the weights, shares
          and ratios of masked patches of the paper's program; one head for both, mean centering.
Differs:  It is a small form of the paper's method: 1,024 prototypes, groups of 16 images, 16 patches an image, no blur,
          half the other color changes, momentum from 0.99.
Run:      python -m vit_jax.main --config=configs/dinov2_cifar10.py --workdir=runs/dinov2_cifar10
Plan:     1 device, 0.28 M parameters; 48,000 images, minutes of one CPU core.
Expected: 20 nearest neighbors by the teacher 26.9 % at the end, 28.4 % at step 300 (2,000 test images, 5,000 labeled
          ones, JPEG copies, one seed). `dino_cifar10` on the same images and machine has 29.0 %, the same network at
          initialization 26.4 to 27.2 %: masked patches do not help so small and short a run. With
          --config.objective.ibot_weight=0 29.8 %, with --config.objective.koleo_weight=0 27.9 %.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source']
  return s.replaced(files.load(f'dino_cifar10:source={source}', []), {
      'name': 'dinov2_cifar10',
      'objective': s.Dinov2(
          dino_weight=1., local_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=2, patch_out_dim=0,
          patch_bottleneck_dim=256, mask_share=.5, mask_ratio=(.1, .5), group=16, out_dim=1024, hidden_dim=256,
          bottleneck_dim=64, momentum=s.Ramp(.99, 1.), norm_last_layer=True, student_temperature=.1,
          teacher_temperature=s.Ramp(.04, .06, until='30 %', curve=s.Curve.LINEAR), centering=s.Centering.MEAN,
          center_momentum=.9)})
