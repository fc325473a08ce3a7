"""A study: the grid of a fine-tuning protocol on held-out data, then final runs with the best point, mean and spread.

Data:     as finetune.py: cifar10 cifar100 imagenet2012 pets flowers resisc45 kitti, or `own`
Source:   ViT paper, Appendix B.1.1 and Table 4: learning rates 0.001, 0.003, 0.01, 0.03, on ImageNet 0.003, 0.01,
          0.03, 0.06. protocol=augreg: arXiv 2106.10270, section 3.4: 0.001, 0.003, 0.01 (ImageNet 0.01, 0.03) and two
          lengths. All else as in finetune.py. Table 2 gives the mean and deviation of three final runs.
Differs:  As finetune.py.
Run:      python -m vit_jax.main --job=study --config=configs/finetune_sweep.py:B/16,cifar10 --workdir=runs/sweep \
              --config.init_from=FILE
          --dry_run shows the cost first; --config.NAME=VALUE applies to all runs. seeds=5 makes five final runs.
Plan:     B/16 on CIFAR-10 at 384 px: 4 + 3 runs of 1.7 exaFLOPs
Expected: B/16 from ImageNet-21k: CIFAR-10 98.95 % (the paper's Table 5)
"""
import dataclasses

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, studies


def get_config(arguments: str = '') -> s.Study:
  """The study: model and dataset, then protocol=… px=… seeds=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, dataset=tuple(finetune.DATASETS), protocol=finetune.PROTOCOLS,
                      px=('',), seeds=studies.seeds(3))
  model, dataset, protocol = given['model'], given['dataset'], given['protocol']

  def one(phase: str, point: studies.Point | None) -> s.Config:
    config = files.load(
        f'finetune:model={model},dataset={dataset},protocol={protocol},phase={phase},px={given["px"]}', [])
    return point.apply(config) if point else config

  grid = {f'tune_{point.name}': point for point in finetune.grid(dataset, protocol)}

  def final(results: s.Results) -> dict[str, s.Config]:
    best = grid[studies.best(results, grid)] if grid else None
    config = one('final', best)
    return {f'final_{best.name + "_" if best else ""}seed{seed}': dataclasses.replace(config, seed=seed)
            for seed in range(int(given['seeds']))}

  def table(results: s.Results) -> list[s.Row]:
    groups: dict[tuple[str, float, int], list[str]] = {}
    for name, done in results.items():
      groups.setdefault((name.partition('_')[0], done.config.optimizer.lr, done.step), []).append(name)
    rows: list[s.Row] = []
    for (phase, rate, steps), names in groups.items():
      found = studies.spread(results, names)
      rows.append({'model': model, 'data': dataset, 'phase': phase, 'lr': rate, 'steps': steps,
                   'top-1 %': 100 * found.mean, 'deviation': 100 * found.std if found.num > 1 else None,
                   'runs': found.num})
    return rows

  first = {name: one('tune', point) for name, point in grid.items()}
  return s.Study(f'finetune {model} {dataset} {protocol}', first or final({}), (final,) if grid else (), table,
                 (s.Figure('lr', 'top-1 %', series='phase', error='deviation', log_x=True),))
