"""BYOL on CIFAR-10 at 32 px with a small ViT/8, for one CPU core: two crops of 32 px.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2006.07733 at a small scale; sizes and rates are our own.
Differs:  AdamW replaces LARS; projections of 64, not 256; no blur; half of the color changes; LayerNorm replaces
          BatchNorm in the heads.
Run:      python -m vit_jax.main --config=configs/byol_cifar10.py --workdir=runs/byol_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 --config.optimizer.schedule.end_lr=0 measures the same
          network at initialization.
Plan:     1 device, 0.18 M parameters; 48,000 images, minutes of one CPU core.
Expected: loss 4.0 to 0.15 and spread 0.43 to 0.12, without an alarm. So short a run learns no better features: 20
          nearest neighbors by the teacher 26.6 % (2,000 test images, 5,000 labeled ones, JPEG copies, one seed), as
          the same network at initialization in `configs/dino_cifar10.py`.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source']
  return s.replaced(files.load(f'dino_cifar10:source={source}', []), {
      'name': 'byol_cifar10', 'data.recipe.crop_sampler': s.CropSampler.TENSORFLOW,
      'data.recipe.views': s.Views(
          on=True, num_local=0, global_area=(.2, 1.), blur=(0., 0., 0.), solarize=(0., .2, 0.), grayscale=.2,
          jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
      'objective': s.Byol(hidden_dim=256, out_dim=64, momentum=s.Ramp(.99, 1.)),
      'optimizer.weight_decay_ramp': s.Ramp(), 'optimizer.rules': (),
      'evals': {'knn': s.Knn(every='20 %', views=('teacher',), train_split='train[:10%]', split='test[:20%]',
                             batch_size=500),
                'health': s.Health(every='20 %', images=1000, min_rank=2., views=('teacher',), split='test[:20%]',
                                   batch_size=500)}})
