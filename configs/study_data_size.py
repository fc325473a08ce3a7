"""A study: which network needs how much data: nested random subsets of a dataset, no extra regularisation.

Data:     scale=jft: JFT-300M, which is internal to Google (point --config.data.source at your data); i1k: TFDS
          `imagenet2012`; few-shot accuracy on TFDS `imagenet2012`. small: TFDS `cifar10` at 32 px, or any other small
          dataset, few-shot accuracy on the same one.
Source:   ViT paper, section 4.3, Figure 4: 9, 30, 90, 303 M images of JFT; B/32 with half of its hidden sizes too;
          settings of Table 3 for all sizes (clipping at norm 1 on ImageNet only) and heads of section 3.1; early
          stopping: the best validation accuracy counts, and the 5-shot accuracy at the same step. The subsets of
          ImageNet are our choice. scale=sets is Figure 3: ImageNet, ImageNet-21k, JFT, each with the settings of Table
          3 (BiT: its own), then fine-tuned on ImageNet at 384 px with the rate of Table 4 that is best on held-out
          examples (BiT: or by BiT-HyperRule), beside Table 5.
Run:      python -m vit_jax.main --job=study --config=configs/study_data_size.py --workdir=runs/data_size --dry_run
          …/study_data_size.py:small,source=folder:PATH,subsets=500+2000,models=ViT+BiT,steps=600 selects other runs;
          …/study_data_size.py:sets,models=B/32+L/16+BiT-R50x1
Plan:     jft: 24 runs of 518,000 steps, 6,750 exaFLOPs. small: 12 runs of 600 steps of 64 images, 2.5e12 FLOPs each,
          about 25 minutes on 2 processor cores
Expected: on 9 M images ResNets are better, from 90 M on ViTs (Figure 4). Small, on CIFAR-10 (JPEG copies), best
          held-out accuracy with 500, 2,000, 8,000, 40,000 images: ViT 27.9, 38.0, 40.0, 40.7 %, hybrid 28.5, 36.6,
          41.2, 41.1 %, BiT 24.5, 37.0, 46.0, 50.4 %; 23 CPU minutes. This is the opposite of the paper's result: 600
          steps are too few for the ViT to benefit from more images, and BiT is better from 8,000 images on.
"""
import dataclasses
from typing import NamedTuple

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import data_size, sizes, transfer

SUBSETS = {'jft': (9_000_000, 30_000_000, 90_000_000, 303_000_000), 'i1k': (100_000, 300_000, 1_268_355),
           'small': (500, 2_000, 8_000, 40_000)}
RATES = {'B/32': 8e-4, 'B/16': 8e-4, 'L/32': 6e-4, 'L/16': 4e-4, 'H/14': 3e-4,  # of JFT, Table 3
         'BiT-R50x1': 1e-3, 'BiT-R152x2': 6e-4}
FIGURE_4 = ('B/32', 'L/32', 'L/16', 'BiT-R50x1', 'BiT-R152x2')
HALVED = s.ViT(patch=32, width=384, depth=12, heads=6, mlp=1536)  # the paper's b/32: B/32 with all widths halved
RECIPE = s.Recipe(
    crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.), crop_aspect=(.75, 1.33),
    flip=True, mean=(.5, .5, .5), std=(.5, .5, .5))


class Set(NamedTuple):
  """A row of Table 3: pre-training of a ViT on one dataset. `lr` 0 = that of the network, on JFT."""
  data: s.Data
  epochs: int
  lr: float
  decay: s.Decay
  end_lr: float
  weight_decay: float
  dropout: float
  clip_norm: float
  loss: s.Loss
  head_bias: float


SETS = {
    'i1k': Set(s.Data(source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
                      recipe=RECIPE),
               300, 3e-3, s.Decay.COSINE, 0., .3, .1, 1., s.Loss.SOFTMAX, 0.),
    'i21k': Set(s.Data(source='folder:imagenet21k', num_examples=14_197_122, num_classes=21_841, recipe=RECIPE),
                90, 1e-3, s.Decay.LINEAR, 1e-5, .03, .1, 0., s.Loss.SIGMOID, -10.),
    'jft': Set(s.Data(source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291, max_labels=8,
                      recipe=RECIPE),
               7, 0., s.Decay.LINEAR, 0., .1, 0., 0., s.Loss.SIGMOID, -10.)}  # H/14: 14 epochs


def get_config(arguments: str = '') -> s.Study:
  """The study: scale, then source=… subsets=… models=… steps=… (of small)."""
  given = s.parse_arg(arguments, scale=('jft', 'i1k', 'small', 'sets'), source=('',), subsets=('',), models=('',),
                      steps=('',))
  scale, source = given['scale'], given['source']
  if scale == 'sets':
    return sets(given['models'])
  networks: dict[str, s.Model] = {name: sizes.small(name) for name in sizes.SMALL} if scale == 'small' else {
      'b/32': HALVED, **{name: sizes.model(name) for name in FIGURE_4}}
  networks = data_size.chosen(networks, given['models'])
  if scale == 'small':
    base = {name: small_run(one, source or 'tfds:cifar10', given['steps'] or '600') for name, one in networks.items()}
  else:
    base = {name: large_run(name, one, source, is_jft=scale == 'jft') for name, one in networks.items()}
  runs = data_size.runs(base, data_size.sizes(given['subsets'], SUBSETS[scale]))
  return s.Study(f'data size {scale}', runs, table=data_size.rows, figures=data_size.FIGURES)


def sets(models: str) -> s.Study:
  """Figure 3: pre-training on each dataset, and fine-tuning on ImageNet."""
  first: dict[str, s.Config] = {}
  pretrained: dict[str, str] = {}
  for name in data_size.chosen({name: sizes.model(name) for name in RATES}, models):
    for one in SETS:
      run = f'{name.replace("/", "_")}_{one}'
      pretrained[run] = name
      first[run] = files.load(f'bit_pretrain:{name},{one}', []) if name.startswith('BiT') else set_run(name, one)
  return s.Study(
      'pre-training sets', first, transfer.stages(pretrained, ('imagenet2012',), px=384, real='no', seeds=1),
      lambda results: data_size.set_rows(results, {one: SETS[one].data.num_examples for one in SETS}),
      data_size.SET_FIGURES)


def set_run(name: str, dataset: str) -> s.Config:
  """Pre-training of a ViT on one dataset: batch 4,096, 224 px, 10,000 steps of warm-up."""
  row = SETS[dataset]
  model = sizes.vit(name)
  model.dropout = row.dropout
  evals = {'i1k': ('val', '10 epochs'), 'i21k': ('val', '10_000 steps'), 'jft': ('test', '25_000 steps')}[dataset]
  config = s.Config(
      name=f'{name} {dataset}', length=f'{14 if (name, dataset) == ("H/14", "jft") else row.epochs} epochs',
      batch_size=4096, image_px=(224, 224), data=row.data, model=model,
      head=s.Head(pre_logits=model.width, bias_init=row.head_bias),
      objective=s.Supervised(loss=row.loss, label_smoothing=0.),
      optimizer=s.AdamW(
          lr=row.lr or RATES[name], b1=.9, b2=.999, weight_decay=row.weight_decay, clip_norm=row.clip_norm,
          schedule=s.Schedule(row.decay, warmup='10_000 steps', end_lr=row.end_lr)),
      evals={evals[0]: s.TopK(every=evals[1])},
      checkpoints={'i1k': s.Checkpoints(every='5 epochs', keep_best='val/top1'),
                   'i21k': s.Checkpoints(every='5_000 steps', keep_every='50_000 steps'),
                   'jft': s.Checkpoints(every='5_000 steps', keep_every='100_000 steps')}[dataset])
  if dataset == 'jft':
    config.train.log_every = '200 steps'
    model.dtype = s.DType.BF16
  return config


def large_run(name: str, network: s.Model, source: str, *, is_jft: bool) -> s.Config:
  """As many updates for each subset as 7 epochs of JFT, or 90 of ImageNet, take."""
  model = dataclasses.replace(network, dtype=s.DType.BF16)
  data = s.Data(source=source or 'folder:JFT-300M', eval_split='test', num_classes=18_291, max_labels=8,
                recipe=RECIPE)
  if not is_jft:
    data = s.Data(source=source or 'tfds:imagenet2012', eval_split='train[99%:]', num_classes=1_000, recipe=RECIPE)
  few = s.FewShot(every='5 %', source='tfds:imagenet2012', train_split='train[:65000]', split='validation', shots=(5,))
  return s.Config(
      name=name, length='517_822 steps' if is_jft else '27_869 steps', batch_size=4096, image_px=(224, 224), data=data,
      model=model, head=s.Head(pre_logits=sizes.pretraining_head(model), bias_init=-10. if is_jft else 0.),
      objective=s.Supervised(loss=s.Loss.SIGMOID if is_jft else s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(
          lr=RATES.get(name, 8e-4), b1=.9, b2=.999, weight_decay=.1, clip_norm=0. if is_jft else 1.,
          schedule=s.Schedule(s.Decay.LINEAR, warmup='10_000 steps', end_lr=0.)),
      train=s.Train(log_every='200 steps', early_stop=s.EarlyStop('val/top1', patience=5)),
      evals={'val': s.TopK(every='5 %'), 'fewshot': few},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='100_000 steps'))


def small_run(network: s.Model, source: str, steps: str) -> s.Config:
  """As many updates for each subset; the last 2,000 training examples choose the moment."""
  few = s.FewShot(every='20 %', train_split='train[:2000]', split='test[:20%]', shots=(5,), batch_size=500)
  return s.Config(
      name='small', length=f'{steps} steps', batch_size=64, image_px=(32, 32),
      data=s.Data(source=source, eval_split='train[-2000:]', recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True)),
      model=network,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.LINEAR, warmup='10 %')),
      train=s.Train(early_stop=s.EarlyStop('val/top1', patience=2)),
      evals={'val': s.TopK(every='20 %', batch_size=500), 'fewshot': few},
      checkpoints=s.Checkpoints(every='50 %', keep_latest=1))
