"""A study: one ablation of the ViT paper's Appendix D. positions, pool, shape, or optimizer.

Data:     scale=jft: JFT-300M, which is Google's own (point --config.data.source at your data), and TFDS `imagenet2012`
          for 5-shot accuracy and fine-tuning. scale=small: TFDS `cifar10`, or source=folder:PATH, at 32 px.
Source:   arXiv 2010.11929, Appendix D: positions (D.4, Table 8), class token or mean (D.3, Figure 9), depth, width, MLP
          and patch (D.2, Figure 8), all with the head of D.3: a hidden layer with tanh on a class token, a linear layer
          on the mean; Adam or SGD for pre-training ResNets (D.1, Table 7), which are then fine-tuned on five sets as in
          `transfer.py`: SGD with the rates of Table 4, or BiT-HyperRule where it is better on held-out examples. No
          clipping on JFT (caption of Table 3). Rates of Adam by Table 3; SGD by BiT (1912.11370: .03 for 256 images,
          decay 1e-4, 5,000 steps of warm-up, a tenth of the rate at each of four drops), its 40 epochs of JFT shortened
          to 7, as the paper does not say how.
Run:      python -m vit_jax.main --job=study --config=configs/ablations.py:pool --workdir=runs/pool --dry_run
          …/ablations.py:shape,small,source=folder:PATH; …/ablations.py:optimizer,sets=cifar10+pets
Plan:     a run of B/16 on JFT is 224 exaFLOPs; a small one of 600 steps 2.5e-6
Expected: without positions 61.4, with any 64.0 to 64.3 % (5-shot ImageNet; Table 8, shown beside); class token and
          mean alike, each at its rate; Adam ahead of SGD by 0.54 (R50x1) and 0.29 (R152x2) in the mean over five sets;
          depth pays most, patches next, width least. Not run here.
"""
import dataclasses

from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.recipes import ablations, pretrain, sizes, transfer, vtab

RESNETS = ('BiT-R50x1', 'BiT-R152x2')  # Table 7
RATES = {'BiT-R50x1': 1e-3, 'BiT-R152x2': 6e-4}  # Table 3


def get_config(arguments: str = '') -> s.Study:
  """The study: which, scale, source=… sets=… (of `optimizer`)."""
  given = s.parse_arg(arguments, which=(*ablations.VARIANTS, 'optimizer'), scale=('jft', 'small'), source=('',),
                      sets=('',))
  which, source = given['which'], given['source']
  is_small = given['scale'] == 'small'
  name = f'ablation {which} {given["scale"]}'
  if which == 'optimizer' and is_small:
    return s.Study(name, small_optimizers(source or 'tfds:cifar10'), table=ablations.rows,
                   figures=ablations.figures(which))
  if which == 'optimizer':
    return optimizer_study(name, source, transfer.choose(given['sets']))
  if is_small:
    base = ablations.Base(s.ViT(patch=4, width=64, depth=4, heads=4, mlp=128, pool=s.Pool.MEAN),
                          s.ViT(patch=8, width=32, depth=2, heads=2, mlp=64, pool=s.Pool.MEAN), 1e-3,
                          lambda run, model, rate: small_run(run, model, rate, source or 'tfds:cifar10'))
  else:
    base = ablations.Base(sizes.vit('B/16'), s.ViT(patch=32, width=1024, depth=8, heads=16, mlp=2048), 8e-4,
                          lambda run, model, rate: jft_run(run, model, rate, source))
  return s.Study(name, ablations.VARIANTS[which](base), table=ablations.rows, figures=ablations.figures(which))


def jft_run(name: str, model: s.Model, rate: float, source: str) -> s.Config:
  """7 epochs of JFT, measured by 5-shot accuracy on ImageNet."""
  config = pretrain.jft(name, 'B/16', epochs=7, lr=rate, arguments='', meshes={})
  model = layout.run_as(model, remat=s.Remat.NAMES, execution=s.Execution.SCAN)
  head = pretrain.head(model, bias_init=config.head.bias_init)
  few = s.FewShot(every='10 %', source='tfds:imagenet2012', train_split='train[:65000]', split='validation', shots=(5,))
  return dataclasses.replace(
      config, model=dataclasses.replace(model, dtype=s.DType.BF16), head=head, evals={'fewshot': few},
      data=dataclasses.replace(config.data, source=source or config.data.source))


def optimizers(source: str) -> dict[str, s.Config]:
  """ResNets pre-trained with Adam, and with BiT's SGD."""
  found: dict[str, s.Config] = {}
  for name in RESNETS:
    config = jft_run(name, sizes.model(name), RATES[name], source)
    sgd = s.Sgd(lr=.03, base_batch_size=256, weight_decay=1e-4, clip_norm=0., schedule=s.Schedule(
        s.Decay.STEPS, warmup='5_000 steps', milestones=tuple(f'{100 * epoch / 40:g} %' for epoch in (10, 23, 30, 37))))
    found |= {f'{name}_adam': config, f'{name}_sgd': dataclasses.replace(config, optimizer=sgd)}
  return found


def optimizer_study(name: str, source: str, datasets: tuple[str, ...]) -> s.Study:
  """Table 7: pre-training, the runs that choose how each is fine-tuned on each set, and one final run each."""
  first = optimizers(source)

  def tune(results: s.Results) -> dict[str, s.Config]:
    found: dict[str, s.Config] = {}
    for run in (run for run in first if run in results):
      model = run.partition('_')[0]
      found |= transfer.tunings(sizes.model(model), model, datasets, px=vtab.PX, prefix=f'{run}_',
                                init_from=results[run].workdir)
    return found

  def final(results: s.Results) -> dict[str, s.Config]:
    found: dict[str, s.Config] = {}
    for run in (run for run in first if run in results):
      model = run.partition('_')[0]
      found |= transfer.finals(sizes.model(model), model, datasets, results, px=vtab.PX, real='no', seeds=1,
                               prefix=f'{run}_', init_from=results[run].workdir)
    return found

  return s.Study(name, first, (tune, final), lambda results: ablations.optimizer_rows(results, list(first), datasets),
                 ablations.OPTIMIZER_FIGURES)


def small_optimizers(source: str) -> dict[str, s.Config]:
  """Each small network with AdamW and with SGD, from scratch."""
  sgd = s.Sgd(lr=.05, weight_decay=1e-4, schedule=s.Schedule(warmup='10 %'))
  adam = {f'{name}_adam': small_run(name, sizes.small(name), 1e-3, source) for name in sizes.SMALL}
  return adam | {name.replace('_adam', '_sgd'): dataclasses.replace(config, optimizer=sgd)
                 for name, config in adam.items()}


def small_run(name: str, model: s.Model, rate: float, source: str) -> s.Config:
  """600 steps of 64 images."""
  return s.Config(
      name=name, length='600 steps', batch_size=64, image_px=(sizes.SMALL_PX,) * 2,
      data=s.Data(source=source, recipe=s.Recipe(crop=s.Crop.RESIZE, shift_px=2)), model=model,
      head=pretrain.head(model),
      optimizer=s.AdamW(lr=rate, weight_decay=.1, schedule=s.Schedule(s.Decay.LINEAR, warmup='10 %')),
      evals={'test': s.TopK(every='100 %', batch_size=500)}, checkpoints=s.Checkpoints(every='50 %', keep_latest=1))
