"""A study: AdamW, Muon, schedule-free AdamW and Lion, at equal steps and at equal processor seconds, with two recipes.

Data:     CIFAR-10 as written by `vit-jax prepare --data=cifar10 --to=DIR`, with the argument source=array_record:DIR;
          or a TFDS `cifar10` (the default), or source=folder:PATH.
Differs:  It follows no paper. The middle rates were the best of earlier single runs of 400 steps of 128 images. Lion
          has ten times the decay of AdamW (arXiv 2302.06675, section 5).
Run:      python -m vit_jax.main --job=study --config=configs/study_optimizers.py --workdir=runs/optimizers
          …/study_optimizers.py:steps=800,optimizers=adamw+muon,seeds=1 selects runs
Plan:     72 runs of 300 steps of 64 images, one for each optimizer, recipe, rate and seed. Then the best rate of each
          optimizer but AdamW again, for as many steps as take the processor seconds of AdamW: 18 runs. 0.3 M
          parameters; two to three hours of one processor core
Expected: see docs/guides/choose_an_optimizer.md.
"""
import dataclasses
import statistics

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import studies

CONSTANT, COSINE = s.Schedule(s.Decay.CONSTANT, warmup='5 %'), s.Schedule(s.Decay.COSINE, warmup='5 %')
OPTIMIZERS: dict[str, s.AnyOptimizer] = {
    'adamw': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., schedule=COSINE),
    'muon': s.Muon(lr=6e-3, momentum=.95, b1=.9, b2=.95, weight_decay=.05, clip_norm=1., scale=s.MuonScale.RMS,
                   polynomials=s.NewtonSchulz.KELLER, dtype=s.DType.F32, schedule=COSINE),
    'schedule_free': s.ScheduleFree(lr=2.5e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., schedule=CONSTANT),
    'lion': s.Lion(lr=8e-4, b1=.9, b2=.99, weight_decay=.5, clip_norm=1., schedule=COSINE)}
FACTORS = (.5, 1., 2.)
RECIPES = {
    'light': s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2),
    'full': s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2, mixup=.2,
                     randaugment=s.RandAugment(layers=2, magnitude=10., table=s.OpTable.AUGREG))}
REFERENCE, EQUAL = 'adamw', '_equal_seconds'  # whose processor seconds the others get, and the end of their names
FIGURES = (s.Figure('learning rate', 'top1 %', series='optimizer', error='half of the range', log_x=True),)
Seeds = list[s.Config]
"""The runs of one optimizer, recipe and rate."""


def get_config(arguments: str = '') -> s.Study:
  """The study, with source=… steps=… optimizers=… seeds=…."""
  given = s.parse_arg(arguments, source=('',), steps=('',), optimizers=('',), seeds=('3', '1', '2', '4', '5'))
  chosen = studies.choose('optimizers', given['optimizers'], OPTIMIZERS)
  base = files.load('cifar10:source=' + given['source'] if given['source'] else 'cifar10', [])
  steps = studies.number('steps', given['steps']) or 300
  base.length, base.batch_size = f'{steps} steps', 64
  base.train = dataclasses.replace(base.train, ema=0., cpu_threads=1)
  base.evals = {'test': s.TopK(every='100 %', batch_size=500)}
  base.checkpoints = s.Checkpoints(every='50 %')
  groups = {(name, kind): [[run(base, name, kind, factor, seed) for seed in range(int(given['seeds']))]
                           for factor in FACTORS] for name in chosen for kind in RECIPES}

  def equal_seconds(results: s.Results) -> dict[str, s.Config]:
    found = {}
    for (name, kind), rates in groups.items():
      if name != REFERENCE:
        own, other = best(results, rates), best(results, groups[REFERENCE, kind])
        share = processor_s(results, other) / (processor_s(results, own) or 1.)
        for one in own:
          new = f'{one.name}{EQUAL}'
          found[new] = dataclasses.replace(one, name=new, length=f'{max(1, round((share or 1.) * steps))} steps')
    return found

  everything = {one.name: one for rates in groups.values() for seeds in rates for one in seeds}
  return s.Study('optimizers', everything, (equal_seconds,) if REFERENCE in chosen else (),
                 lambda results: rows(results, groups), FIGURES)


def run(base: s.Config, name: str, kind: str, factor: float, seed: int) -> s.Config:
  """A run with an optimizer, a recipe, a multiple of the optimizer's rate, and a seed."""
  optimizer = dataclasses.replace(OPTIMIZERS[name], lr=OPTIMIZERS[name].lr * factor)
  return dataclasses.replace(base, name=f'{name}_{kind}_lr{optimizer.lr:g}_seed{seed}', seed=seed, optimizer=optimizer,
                             data=dataclasses.replace(base.data, recipe=RECIPES[kind]))


def finished(results: s.Results, seeds: Seeds, suffix: str = '') -> list[s.Result]:
  """Returns the results of the finished runs with an evaluation."""
  found = (results.get(one.name + suffix) for one in seeds)
  return [one for one in found if one is not None and one.headline is not None]


def processor_s(results: s.Results, seeds: Seeds) -> float:
  """Returns the median of the processor seconds of training of the finished runs; 0 in an estimate."""
  return statistics.median(one.training_processor_s for one in finished(results, seeds))


def best(results: s.Results, rates: list[Seeds]) -> Seeds:
  """Returns the runs of the rate with the highest median accuracy; the first of equals.

  Raises:
    UserError: none of them is finished.
  """
  if known := [seeds for seeds in rates if finished(results, seeds)]:
    return max(known, key=lambda seeds: statistics.median(one.headline or 0. for one in finished(results, seeds)))
  raise UserError(f'results: expected a finished run among those of {rates[0][0].name}, got none. See why they failed.')


def rows(results: s.Results, groups: dict[tuple[str, str], list[Seeds]]) -> list[s.Row]:
  """Returns a row for each optimizer, recipe and rate: median and range over seeds; of the best rate also at equal
  processor seconds."""
  found: list[s.Row] = []
  for (name, kind), rates in groups.items():
    for seeds in (seeds for seeds in rates if finished(results, seeds)):
      is_best = seeds is best(results, rates)
      equal = finished(results, seeds if is_best else [], '' if name == REFERENCE else EQUAL)
      found.append({'optimizer': f'{name}, {kind}', 'learning rate': seeds[0].optimizer.lr,
                    **summary(finished(results, seeds)), 'best rate': 'yes' if is_best else 'no',
                    **{f'{column} at equal seconds': value for column, value in summary(equal).items()}})
  return found


def summary(found: list[s.Result]) -> s.Row:
  """Returns median and range of the accuracies, and the medians of steps and processor seconds; None without runs."""
  if not found:
    return dict.fromkeys(('top1 %', 'lowest', 'highest', 'half of the range', 'seeds', 'steps', 'processor s'))
  top1 = [100 * (one.headline or 0.) for one in found]
  return {'top1 %': round(statistics.median(top1), 2), 'lowest': round(min(top1), 2), 'highest': round(max(top1), 2),
          'half of the range': round((max(top1) - min(top1)) / 2, 2), 'seeds': len(found),
          'steps': round(statistics.median(one.step for one in found)),
          'processor s': round(statistics.median(one.training_processor_s for one in found), 1)}
