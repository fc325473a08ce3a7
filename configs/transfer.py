"""A study: Table 2 of the ViT paper from one weight file, beside the published numbers.

Data:     imagenet2012, imagenet2012_real, cifar10, cifar100, oxford_iiit_pet, oxford_flowers102 and the sets of VTAB,
          as TFDS prepares them. A run whose set is not there is reported, and the others go on.
Source:   ViT paper, Table 2 and Table 4: learning rates chosen on held-out training examples, three final runs;
          ImageNet at 512 px (L/16) or 518 px (H/14) with averaged weights, all else at 384 px
Run:      python -m vit_jax.main --job=study --config=configs/transfer.py:L/16 --workdir=runs/transfer \
              --config.init_from=FILE
          real=real.json takes the ReaL labels from that file, real=no none; sets=cifar10+pets, tasks=clevr/count+pets
          and seeds=1 make it smaller. --job=report --workdir=runs/transfer prints the table.
Plan:     4 + 3 runs a set; those on ImageNet (20,000 steps) are most of it
Expected: L/16 from ImageNet-21k: ImageNet 85.30, ReaL 88.62, CIFAR-10 99.15, CIFAR-100 93.25, Pets 94.67, Flowers
          99.61, VTAB 72.72
"""
from vit_jax.config import finetune, sizes, transfer, vtab
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

SEEDS = ('3', *(str(number) for number in range(1, 21)))


def get_config(arguments: str = '') -> s.Study:
  """The study: the model, then seeds=… px=… real=… sets=… tasks=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, seeds=SEEDS, px=('',), real=('',), sets=('',), tasks=('',))
  name, seeds, px = given['model'], int(given['seeds']), finetune.number('px', given['px'])
  network, tasks = sizes.model(name), vtab.choose(given['tasks'])
  datasets = tuple(filter(None, given['sets'].split('+'))) or tuple(transfer.ROWS)
  if unknown := [one for one in datasets if one not in (*transfer.ROWS, 'vtab')]:
    raise UserError(f'sets={given["sets"]}: {", ".join(unknown)} is not in Table 2; want some of '
                    f'{", ".join(transfer.ROWS)}, vtab')
  has_vtab = not given['sets'] or 'vtab' in datasets
  datasets = tuple(one for one in datasets if one != 'vtab')

  def final(results: s.Results) -> dict[str, s.Config]:
    return transfer.finals(network, name, datasets, results, px=px, real=given['real'], seeds=seeds)

  first = {run: transfer.build(network, name, dataset, phase='tune', point=point, px=px, real='no')
           for dataset in datasets for run, point in transfer.points(dataset).items()}
  if has_vtab:
    first |= vtab.finals(network, tasks, {}, protocol='vit', px=px or vtab.PX, seeds=seeds)
  return s.Study(f'Table 2 with {name}', first, (final,), lambda results: transfer.rows(
      results, name, datasets, tasks if has_vtab else ()))
