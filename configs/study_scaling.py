"""A study: accuracy against the compute of pre-training, a law for each family, and the cost of the next size.

Data:     scale=jft: JFT-300M, which is internal to Google (point --config.data.source at your data), and the TFDS
          sets of the paper for fine-tuning: imagenet2012, imagenet2012_real, cifar10, cifar100, oxford_iiit_pet,
          oxford_flowers102. scale=small: TFDS `cifar10`, or source=folder:PATH.
Source:   ViT paper, section 4.4, Figure 5 and all 18 rows of Table 6; settings of Table 3 (R200x3, which is missing
          there, as R152x2); fine-tuning at 384 px by Table 4 with its learning rates tried on held-out examples, for
          ResNets also BiT-HyperRule, whichever is better (Appendix B.1.1). The paper does not state over how many final
          runs a number of Table 6 is averaged; here it is one (seeds=3 for three). The law, E = c + a C^-b, is that of
          arXiv 2106.04560 without its shift.
Differs:  The paper does not state how many runs are behind a number of Table 6; here it is one. scale=small is of this
          project.
Run:      python -m vit_jax.main --job=study --config=configs/study_scaling.py --workdir=runs/scaling --dry_run
          …/study_scaling.py:models=ViT+R50+B/16,sets=imagenet2012+cifar10 selects some networks or families, and some
          datasets; real=no skips ReaL. The table has exaFLOPs (3 x forward x images) and the accuracies beside the
          published ones, whether a run is on the frontier, and the prediction of its family's law.
          …/study_scaling.py:small,source=folder:PATH is a ladder of small networks at 32 px
Plan:     15,900 exaFLOPs of pre-training; B/32 alone is 56. small: 8 runs, 2e-4 exaFLOPs
Expected: exaFLOPs of Table 6: 55, 224, 196, 783, 1567, 4262 of the ViTs. With its accuracies the law of ViT is
          9.9 + 37.3 C^-0.346 %. Not run here at this scale.
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import catalog, published, scaling, sizes, studies, transfer
from vit_jax.recipes.scaling import Next, Run

JFT = [Run(row.model, row.epochs) for row in published.TABLE_6]
NEXT = ('ViT-g/14', 'BiT-R200x4')  # of hybrids there is no larger one by name
SMALL = [Run(f'{family}x{factor}', epochs) for family in ('ViT', 'hybrid') for factor in (1, 2)
         for epochs in (1, 3)]


def get_config(arguments: str = '') -> s.Study:
  """The study: scale, then source=… models=… sets=… real=… seeds=…."""
  given = s.parse_arg(arguments, scale=('jft', 'small'), source=('',), models=('',), sets=('',), real=('',),
                      seeds=studies.seeds(1))
  is_small = given['scale'] == 'small'
  runs = scaling.choose(SMALL if is_small else JFT, given['models'])
  following: list[Next] = []
  stages: tuple[transfer.Stage, ...] = ()
  if is_small:
    name = 'scaling of small networks'
    first = {run.name: small_run(run, given['source'] or 'tfds:cifar10') for run in runs}
  else:
    name, first = 'scaling', {run.name: jft_run(run, given['source']) for run in runs}
    families = {scaling.family(run.model) for run in runs}
    following = [Next(one, 14, exaflops(one, 14)) for one in NEXT if scaling.family(one) in families]
    stages = transfer.stages({run.name: run.model for run in runs}, transfer.choose(given['sets']), px=384,
                             real=given['real'], seeds=int(given['seeds']))
  return s.Study(name, first, stages, lambda results: scaling.rows(results, runs, following), scaling.FIGURES,
                 lambda results: scaling.curves(results, runs, following))


def exaflops(model: str, epochs: int) -> float:
  """Of pre-training on JFT-300M: 3 x forward x images, at 224 px."""
  return 3 * catalog.model(model, num_classes=published.JFT_CLASSES).flops * epochs * 303e6 / 1e18


def jft_run(run: Run, source: str) -> s.Config:
  """Pre-training on JFT-300M as `vit_paper.py` has it."""
  config = files.load(f'vit_paper:{run.model},jft,epochs={run.epochs}', [])
  return s.replaced(config, {'name': run.name, 'data.source': source or config.data.source})


def small_run(run: Run, source: str) -> s.Config:
  """A run of the small ladder."""
  family, factor = run.model.split('x')
  return s.Config(
      name=run.name, length=f'{run.epochs} epochs', batch_size=64, image_px=(32, 32),
      data=s.Data(source=source, recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2)),
      model=sizes.small(family, int(factor)),
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      evals={'test': s.TopK(every='100 %', batch_size=500)}, checkpoints=s.Checkpoints(every='50 %'))
