"""Fine-tunes by BiT-HyperRule: length, resolution and mixup follow from the data, nothing is tuned.

Data:     cifar10 cifar100 imagenet2012 pets flowers resisc45 from TFDS; or `own`, of which the rule wants the number
          of training examples and the side of a typical picture
Source:   BiT, arXiv 1912.11370, section 3.3: SGD, lr .003, batch 512; 500, 10k or 20k steps; 160 px cropped to 128 for
          pictures below 96 px, else 512 cropped to 480; mixup .1 from 20,000 examples on.
Run:      python -m vit_jax.main --config=configs/bit_hyperrule.py:BiT-R50x1,cifar10 --config.init_from=FILE --workdir=…
          --config=configs/bit_hyperrule.py:BiT-R50x1,own,examples=3000,side=500 --config.data.source=folder:PATH
Plan:     BiT-R152x4 at 480 px is 1.7 TFLOP an image forward
Expected: BiT-M ImageNet R50x1 80.68 %, R152x2 85.15 % (their repository). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, sizes

MODELS = ('BiT-R50x1', *(name for name in finetune.MODELS if name != 'BiT-R50x1'))


def get_config(arguments: str = '') -> s.Config:
  """The run: model and data set; of `own` data also examples=… side=…."""
  given = s.parse_arg(arguments, model=MODELS, dataset=tuple(finetune.DATASETS), examples=('',), side=('',))
  return finetune.build(
      sizes.model(given['model']), given['model'], given['dataset'], protocol='hyperrule', phase='final', px=0,
      num_examples=finetune.number('examples', given['examples']), side_px=finetune.number('side', given['side']))
