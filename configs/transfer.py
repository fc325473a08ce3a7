"""A study: Tables 2 and 5 of the ViT paper from one weight file, beside the published numbers.

Data:     imagenet2012, imagenet2012_real, cifar10, cifar100, oxford_iiit_pet, oxford_flowers102 and the sets of VTAB,
          as TFDS prepares them. A run whose set is not there is reported, and the others continue.
Source:   ViT paper, Table 2 and Table 4: learning rates chosen on held-out training examples, three final runs;
          ImageNet at 512 px (L/16) or 518 px (H/14) with averaged weights, all else at 384 px. ResNets also try
          BiT-HyperRule; the better one on the held-out examples is used (Appendix B.1.1). px=384 is Table 5.
Differs:  As finetune.py and vtab.py.
Run:      python -m vit_jax.main --job=study --config=configs/transfer.py:L/16 --workdir=runs/transfer \
              --config.init_from=FILE
          real=real.json takes the ReaL labels from that file, real=no skips ReaL; sets=cifar10+pets,
          tasks=clevr/count+pets and seeds=1 select a part. --job=report --workdir=runs/transfer prints the table.
Plan:     4 (ResNets: 5) + 3 runs a set; those on ImageNet (20,000 steps) are most of the cost
Expected: L/16 from ImageNet-21k: ImageNet 85.30, ReaL 88.62, CIFAR-10 99.15, CIFAR-100 93.25, Pets 94.67, Flowers
          99.61, VTAB 72.72
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, studies, transfer, vtab


def get_config(arguments: str = '') -> s.Study:
  """The study: the model, then seeds=… px=… real=… sets=… tasks=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, seeds=studies.seeds(3), px=('',), real=('',), sets=('',),
                      tasks=('',))
  name, seeds, px = given['model'], int(given['seeds']), studies.number('px', given['px'])
  tasks, datasets = vtab.choose(given['tasks']), transfer.choose(given['sets'], extra=('vtab',))
  has_vtab = not given['sets'] or 'vtab' in datasets
  datasets = tuple(one for one in datasets if one != 'vtab')
  grid = transfer.grid(name, datasets, px=px, real=given['real'])
  first = grid.tunings()
  if has_vtab:
    of_tasks = files.load_study(
        f'vtab:model={name},protocol=vit,tasks={given["tasks"]},px={given["px"]},seeds={seeds}', []).runs
    first |= {f'{transfer.VTAB_PREFIX}{run}': config for run, config in of_tasks.items()}
  return s.Study(f'Table 2 with {name}', first, (lambda results: grid.finals(results, seeds),),
                 lambda results: transfer.rows(results, name, datasets, tasks if has_vtab else ()))
