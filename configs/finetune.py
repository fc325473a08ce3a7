"""Fine-tunes published weights on a data set, by the protocol of a paper: any model, any data.

Data:     cifar10 cifar100 imagenet2012 pets flowers resisc45 kitti from TFDS; or `own`: a folder, a TFDS set or
          prepared shards, whose classes are counted: --config.data.source=folder:PATH
Source:   protocol=vit: ViT paper, Table 4 (SGD, cosine, 384 px; weights averaged on ImageNet from px=512 on).
          augreg: arXiv 2106.10270, section 3.4. mae: arXiv 2111.06377, Table 9. hyperrule: see bit_hyperrule.py.
          finetune_sweep.py makes the whole grid of it. kitti is AugReg's Kitti-distance: VTAB's task on the whole set.
Run:      python -m vit_jax.main --config=configs/finetune.py:B/16,cifar10 --config.init_from=FILE --workdir=runs/ft
          …/finetune.py:L/16,imagenet2012,px=512 and …/finetune.py:H/14,imagenet2012,px=518 are those of Table 2;
          --config=configs/finetune.py:B/16,imagenet2012,protocol=mae, or
          --config=configs/finetune.py:Ti/16,own --config.data.source=folder:PATH --config.length='500 steps'
          …,phase=tune holds part of the training examples out, for choosing: --config.optimizer.lr=.003
Plan:     B/16 at 384 px is 111 GFLOP an image forward; 10k steps of 512 are 1.7 exaFLOPs of training
Expected: B/16 from ImageNet-21k: CIFAR-10 98.95 %, CIFAR-100 91.67 %, ImageNet 83.97 %, Pets 94.43 %, Flowers 99.38 %
          (the paper's Table 5). What was measured here: README.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, sizes


def get_config(arguments: str = '') -> s.Config:
  """The run: model and data set, then protocol=… phase=… px=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, dataset=tuple(finetune.DATASETS), protocol=finetune.PROTOCOLS,
                      phase=finetune.PHASES, px=('',))
  return finetune.build(
      sizes.model(given['model']), given['model'], given['dataset'], protocol=given['protocol'], phase=given['phase'],
      px=finetune.number('px', given['px']))
