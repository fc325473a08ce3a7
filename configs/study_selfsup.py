"""A study: every self-supervised objective on CIFAR-10, at equal images or at equal processor seconds.

Data:     CIFAR-10 as written by `vit-jax prepare --data=cifar10 --to=DIR`, with the argument source=array_record:DIR;
          or a TFDS `cifar10` (the default), or source=folder:PATH. Only the supervised runs and the evaluations use
          labels.
Source:   each objective has the settings of its own recipe (`dino_cifar10`, `mae_cifar10` and so on)
Differs:  It follows no paper. All runs have one network, the crops of `dino_cifar10` where the objective compares crops
          (`byol` without the small ones), and the same evaluations of mean-pooled features: 20 nearest neighbors and
          logistic regression, with the labels of 10,000 images. `dino_ibot` is `dinov2` without KoLeo.
Run:      python -m vit_jax.main --job=study --config=configs/study_selfsup.py --workdir=runs/selfsup
          …/study_selfsup.py:images=300000,network=small,objectives=dino+mae,seeds=3 selects images, network, runs
          …/study_selfsup.py:seconds=300 gives each run as many processor seconds of training, by the cost of a step
          that a short run measures first; every run uses one core.
Plan:     network=tiny: 0.2 M parameters, for one CPU core; small: 2.7 M parameters, for one GPU, where one core reads
          the crops
Expected: see benchmarks/comparisons.md.
"""
import functools
from collections.abc import Callable, Sequence

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import selfsup, studies

IMAGES = 100_000


def get_config(arguments: str = '') -> s.Study:
  """The study, with network=… images=… seconds=… objectives=… seeds=… source=…."""
  given = s.parse_arg(arguments, network=('tiny', 'small'), images=('',), seconds=('',), objectives=('',),
                      seeds=studies.seeds(1, most=10), source=('',))
  names = studies.choose('objectives', given['objectives'], selfsup.POINTS)
  source = given['source'] or 'tfds:cifar10'
  images, seconds = (studies.number(one, given[one]) for one in ('images', 'seconds'))
  if images and seconds:
    raise UserError(f'images: expected it without seconds={seconds}, got {images}. Leave one of them out.')
  run = functools.partial(selfsup.run, size=given['network'], source=source)

  def runs(names: Sequence[str], length: Callable[[str], str]) -> dict[str, s.Config]:
    return {f'{name}_seed{seed}': run(name, seed=seed, length=length(name))
            for seed in range(int(given['seeds'])) for name in names}

  def equal_seconds(results: s.Results) -> dict[str, s.Config]:
    return runs(trained, lambda name: f'{selfsup.images(results, name, seconds)} examples')

  trained = [name for name in names if name != selfsup.UNTRAINED]
  if seconds and trained:
    first = {f'{name}_cost': selfsup.cost_run(name, size=given['network'], source=source) for name in trained}
    first |= runs([name for name in names if name not in trained], lambda name: '1 steps')
    then: tuple[Callable[[s.Results], dict[str, s.Config]], ...] = (equal_seconds,)
  else:
    first, then = runs(names, lambda name: f'{images or IMAGES} examples'), ()
  views = {name: selfsup.POINTS[name].view for name in names}
  return s.Study('self-supervision', first, then, lambda results: selfsup.rows(results, views), selfsup.FIGURES)
