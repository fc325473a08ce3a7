"""A study: learning rate, weight decay, drop path and batch size of the small ViT on handwritten digits.

Data:     as digits.py; the last tenth of the training images decides, and the test images are not used.
Differs:  It follows no paper.
Run:      python -m vit_jax.main --job=study --config=configs/digits_search.py --workdir=runs/search
          --search=sobol:16 trains 16 points to the end; --search=halving:16,factor=4 trains 16 points for a sixteenth
          of the length, the best four of them for a quarter, and the best one to the end.
Plan:     1 device, 0.1 M parameters, 2 CPU cores: halving takes as many steps as 2.5 runs of 30 epochs, sobol as 16
Expected: halving ends with one run of 99.3 % of the 144 held-out images, learning rate 0.0054, weight decay 0.05
"""
import dataclasses

from vit_jax.config import files
from vit_jax.config import schema as s


def get_config() -> s.Study:
  """The search."""
  base = files.load('digits', [])
  held_out = dataclasses.replace(base.data, train_split='train[:90%]', eval_split='train[90%:]')
  base = dataclasses.replace(base, length='30 epochs', data=held_out, evals={'val': s.TopK(every='100 %')})
  return s.Study('digits search', search=s.Search(base, {
      'optimizer.lr': s.LogUniform(1e-4, 1e-1),
      'optimizer.weight_decay': s.LogUniform(1e-3, 1.),
      'model.drop_path': s.Uniform(0., .3),
      'batch_size': s.Choices((32, 64, 128))}, metric='val/nll', method=s.Halving(16, factor=4)))
