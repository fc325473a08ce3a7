"""A study: AdamW, Muon, schedule-free AdamW and Lion, at several rates, with light and with full augmentation.

Data:     CIFAR-10 as written by `vit-jax prepare --data=cifar10 --to=DIR`, with the argument source=array_record:DIR;
          or a TFDS `cifar10` (the default), or source=folder:PATH.
Differs:  It follows no paper. Rates of Muon and schedule-free AdamW are around those of AdamW and of the program of the
          latter's authors; those of Lion are a tenth, with ten times the decay (arXiv 2302.06675, section 5).
Run:      python -m vit_jax.main --job=study --config=configs/study_optimizers.py --workdir=runs/optimizers
          …/study_optimizers.py:steps=800,optimizers=adamw+muon,seeds=1 selects runs
Plan:     24 runs of 400 steps of 128 images, one for each rate, then two more seeds of each optimizer's best rate: 40
          runs, 0.3 M parameters; two to three hours of one processor core
Expected: not run whole.
"""
import dataclasses

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import studies

CONSTANT, COSINE = s.Schedule(s.Decay.CONSTANT, warmup='5 %'), s.Schedule(s.Decay.COSINE, warmup='5 %')
OPTIMIZERS: dict[str, s.AnyOptimizer] = {
    'adamw': s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., schedule=COSINE),
    'muon': s.Muon(lr=2e-3, momentum=.95, b1=.9, b2=.95, weight_decay=.05, clip_norm=1., scale=s.MuonScale.RMS,
                   polynomials=s.NewtonSchulz.KELLER, dtype=s.DType.F32, schedule=COSINE),
    'schedule_free': s.ScheduleFree(lr=5e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., schedule=CONSTANT),
    'lion': s.Lion(lr=2e-4, b1=.9, b2=.99, weight_decay=.5, clip_norm=1., schedule=COSINE)}
FACTORS = (.5, 1., 2.)
RECIPES = {
    'light': s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2),
    'full': s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2, mixup=.2,
                     randaugment=s.RandAugment(layers=2, magnitude=10., table=s.OpTable.AUGREG))}
FIGURES = (s.Figure('learning rate', 'top1 %', series='optimizer', error='deviation', log_x=True),)


def get_config(arguments: str = '') -> s.Study:
  """The study, with source=… steps=… optimizers=… seeds=…."""
  given = s.parse_arg(arguments, source=('',), steps=('',), optimizers=('',), seeds=('3', '1', '2', '4', '5'))
  chosen = studies.choose('optimizers', given['optimizers'], OPTIMIZERS)
  base = files.load('cifar10:source=' + given['source'] if given['source'] else 'cifar10', [])
  base.length, base.train.ema = f'{studies.number("steps", given["steps"]) or 400} steps', 0.
  base.evals = {'test': s.TopK(every='100 %', batch_size=500)}
  base.checkpoints = s.Checkpoints(every='50 %')
  groups = {f'{name}_{kind}': [run(base, name, kind, factor) for factor in FACTORS]
            for name in chosen for kind in RECIPES}

  def repeated(results: s.Results) -> dict[str, s.Config]:
    found = {}
    for members in groups.values():
      best = results[studies.best(results, [one.name for one in members])].config
      for seed in range(1, int(given['seeds'])):
        found[f'{best.name}_seed{seed}'] = dataclasses.replace(best, seed=seed)
    return found

  return s.Study('optimizers', {one.name: one for members in groups.values() for one in members}, (repeated,),
                 lambda results: rows(results, groups), FIGURES)


def run(base: s.Config, name: str, kind: str, factor: float) -> s.Config:
  """A run with an optimizer, an augmentation, and a multiple of the optimizer's rate."""
  optimizer = dataclasses.replace(OPTIMIZERS[name], lr=OPTIMIZERS[name].lr * factor)
  return dataclasses.replace(base, name=f'{name}_{kind}_lr{optimizer.lr:g}', optimizer=optimizer,
                             data=dataclasses.replace(base.data, recipe=RECIPES[kind]))


def rows(results: s.Results, groups: dict[str, list[s.Config]]) -> list[s.Row]:
  """Returns a row for each optimizer, augmentation and rate: mean and deviation over its seeds."""
  found: list[s.Row] = []
  for group, members in groups.items():
    for one in members:
      names = [name for name in results if name == one.name or name.startswith(f'{one.name}_seed')]
      if not names:
        continue
      spread = studies.spread(results, names)
      name, _, kind = group.rpartition('_')
      found.append({'optimizer': f'{name}, {kind}', 'learning rate': one.optimizer.lr,
                    'top1 %': round(100 * spread.mean, 2),
                    'deviation': round(100 * spread.std, 2) if spread.num > 1 else None, 'seeds': spread.num,
                    'seconds': round(sum(results[name].seconds for name in names) / len(names), 1)})
  return found
