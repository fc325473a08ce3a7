"""LeJEPA on CIFAR-10 at 32 px with a small ViT/8, for one CPU core: 2 crops of 32 px and 2 of 16 px, no teacher.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2511.08544 at a small scale; network, crops and colors are those of `dino_cifar10`.
Differs:  It is a small form of the paper's method: 256 directions, embeddings of 64, hidden layers of 256, no blur,
          half the other color changes, weight 0.02 as in the authors' minimal program.
Run:      python -m vit_jax.main --config=configs/lejepa_cifar10.py --workdir=runs/lejepa_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 --config.optimizer.schedule.end_lr=0 measures the same
          network at initialization.
Plan:     1 device, 0.20 M parameters; 48,000 images, minutes of one CPU core.
Expected: 20 nearest neighbors 27.7, 27.7, 28.9, 28.2 and 28.4 % (2,000 test images, 5,000 labeled ones, JPEG copies,
          one seed, 112 processor seconds); SIGReg 20 to 6.9, deviation 0.33 to 0.63, invariance 0.09 to 0.13. Of the
          same network at initialization, as in `dino_cifar10`, 26.4 to 27.2 %.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source']
  return s.replaced(files.load(f'dino_cifar10:source={source}', []), {
      'name': 'lejepa_cifar10',
      'objective': s.LeJepa(hidden_dim=256, out_dim=64, weight=.02, directions=256, t_max=5., t_points=9),
      'optimizer': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=0.,
                           schedule=s.Schedule(s.Decay.COSINE, warmup='10 %', end_lr=1e-6)),
      'evals': {'knn': s.Knn(every='20 %', train_split='train[:10%]', split='test[:20%]', batch_size=500),
                'health': s.Health(every='20 %', images=1000, min_rank=2., split='test[:20%]', batch_size=500)}})
