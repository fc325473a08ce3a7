"""A study: VTAB-1k, fine-tuning on 1,000 examples of each of 19 tasks; group means, mean and deviation over seeds.

Data:     sets of TFDS as they are prepared, in --config.data.data_dir or $TFDS_DATA_DIR. A task whose set is not there
          is reported with what gets it, and the others go on.
Source:   protocol=vit: ViT paper, Table 4 (2,500 steps, SGD .01, batch 512, 384 px; squashed, no augmentation);
          augreg: arXiv 2106.10270, section 3.4: four rates, 500 or 2,500 steps, chosen for each task by val200
Run:      python -m vit_jax.main --job=study --config=configs/vtab.py:L/16 --workdir=runs/vtab --config.init_from=FILE
          …/vtab.py:B/16,protocol=augreg,seeds=5,px=224; …/vtab.py:Ti/16,tasks=clevr/count+pets takes some tasks only
Plan:     19 x 3 runs of 1.28 million images: for B/16 at 384 px .43 exaFLOPs each
Expected: L/16 from ImageNet-21k 72.72, from JFT 76.28; H/14 from JFT 77.63 (the paper's Table 2)
"""
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, sizes, vtab

SEEDS = ('3', *(str(number) for number in range(1, 21)))


def get_config(arguments: str = '') -> s.Study:
  """The study: the model, then protocol=… seeds=… px=… tasks=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, protocol=vtab.PROTOCOLS, seeds=SEEDS, px=('',), tasks=('',))
  network, protocol = sizes.model(given['model']), given['protocol']
  tasks, px = vtab.choose(given['tasks']), finetune.number('px', given['px']) or vtab.PX

  def final(results: s.Results) -> dict[str, s.Config]:
    return vtab.finals(network, tasks, results, protocol=protocol, px=px, seeds=int(given['seeds']))

  first = vtab.tunings(network, tasks, protocol=protocol, px=px)
  return s.Study(f'VTAB-1k {given["model"]} {protocol}', first or final({}), (final,) if first else (),
                 lambda results: vtab.rows(results, tasks))
