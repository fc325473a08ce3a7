"""A study: DINO on 10,000 images of CIFAR-10: one change of its settings at a time.

Data:     CIFAR-10 as written by `vit-jax prepare --data=cifar10 --to=DIR`, with the argument source=array_record:DIR;
          or a TFDS `cifar10` (the default), or source=folder:PATH. Training reads its first 10,000 images, of which
          only the evaluations use labels.
Source:   the settings of `dino_cifar10`; `ibot` and `dinov2` are those of `dinov2_cifar10`
Differs:  It follows no paper. With a batch of b images the papers have momentum from 0.996 for 1,024; the values here
          are between 0.97 and 0.9995.
Run:      python -m vit_jax.main --job=study --config=configs/study_small_data.py --workdir=runs/small_data
          …/study_small_data.py:images=200000,network=small,variants=base+batch_256,seeds=3 selects runs
Plan:     as study_selfsup.py; every run uses one core
Expected: see benchmarks/comparisons.md.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import selfsup, studies

IMAGES, SPLIT = 100_000, selfsup.LABELED
VARIANTS: dict[str, dict[str, object]] = {
    'base': {},
    'batch_128': {'batch_size': 128}, 'batch_256': {'batch_size': 256},
    'prototypes_256': {'objective.out_dim': 256}, 'prototypes_4096': {'objective.out_dim': 4096},
    'temperature_0.04': {'objective.teacher_temperature.end': .04},
    'temperature_0.07': {'objective.teacher_temperature.end': .07},
    'momentum_0.97': {'objective.momentum.start': .97}, 'momentum_0.996': {'objective.momentum.start': .996},
    'momentum_0.9995': {'objective.momentum.start': .9995},
    'rate_half': {'optimizer.lr': 5e-4}, 'rate_double': {'optimizer.lr': 2e-3},
    'sinkhorn': {'objective.centering': s.Centering.SINKHORN}}
OBJECTIVES = {'ibot': 'dino_ibot', 'dinov2': 'dinov2', 'lejepa': 'lejepa'}
"""Other objectives, by their names in `study_selfsup`."""


def get_config(arguments: str = '') -> s.Study:
  """The study, with network=… images=… variants=… seeds=… source=…."""
  given = s.parse_arg(arguments, network=('tiny', 'small'), images=('',), variants=('',),
                      seeds=studies.seeds(1, most=10), source=('',))
  names = studies.choose('variants', given['variants'], (*VARIANTS, *OBJECTIVES))
  length = f'{studies.number("images", given["images"]) or IMAGES} examples'

  def run(name: str, seed: int) -> s.Config:
    config = selfsup.run(OBJECTIVES.get(name, 'dino'), size=given['network'], seed=seed, length=length,
                         source=given['source'] or 'tfds:cifar10', train_split=SPLIT)
    return s.replaced(config, {'name': name, **VARIANTS.get(name, {})})

  runs = {f'{name}_seed{seed}': run(name, seed) for seed in range(int(given['seeds'])) for name in names}
  views = {name: selfsup.POINTS[OBJECTIVES.get(name, 'dino')].view for name in names}
  return s.Study('self-supervision on small data', runs,
                 table=lambda results: selfsup.rows(results, views, 'variant'), figures=())
