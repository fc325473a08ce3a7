"""A study: which network needs how much data: nested random subsets of a dataset, no extra regularization.

Data:     scale=jft: JFT-300M, which is internal to Google (point --config.data.source at your data); i1k: TFDS
          `imagenet2012`; few-shot accuracy on TFDS `imagenet2012`. small: TFDS `cifar10` at 32 px, or any other small
          dataset, few-shot accuracy on the same one.
Source:   ViT paper, section 4.3, Figure 4: 9, 30, 90, 303 M images of JFT; B/32 with half of its hidden sizes too;
          settings of Table 3 for all sizes (clipping at norm 1 on ImageNet only) and heads of section 3.1; early
          stopping: the best validation accuracy counts, and the 5-shot accuracy at the same step. The subsets of
          ImageNet are our choice. scale=sets is Figure 3: ImageNet, ImageNet-21k, JFT, each with the settings of Table
          3 (BiT: its own), then fine-tuned on ImageNet at 384 px with the rate of Table 4 that is best on held-out
          examples (BiT: or by BiT-HyperRule), beside Table 5.
Differs:  The paper does not state which subsets of JFT it drew; here they are nested and random. scale=i1k and small
          are of this project.
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

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import data_size, sizes, transfer

SUBSETS = {'jft': (9_000_000, 30_000_000, 90_000_000, 303_000_000), 'i1k': (100_000, 300_000, 1_268_355),
           'small': (500, 2_000, 8_000, 40_000)}
SETS = ('B/32', 'B/16', 'L/32', 'L/16', 'H/14', 'BiT-R50x1', 'BiT-R152x2')
FIGURE_4 = ('B/32', 'L/32', 'L/16', 'BiT-R50x1', 'BiT-R152x2')
HALVED = s.ViT(patch=32, width=384, depth=12, heads=6, mlp=s.Mlp(1536))  # the paper's b/32: B/32 with all widths halved
IMAGES = {'i1k': 1_281_167, 'i21k': 14_197_122, 'jft': 303_000_000}


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
  subsets = [data_size.Subset(name, images) for images in data_size.sizes(given['subsets'], SUBSETS[scale])
             for name in base]
  return s.Study(f'data size {scale}', {one.name: one.run(base[one.model]) for one in subsets},
                 table=lambda results: data_size.rows(results, subsets), figures=data_size.FIGURES)


def sets(models: str) -> s.Study:
  """Figure 3: pre-training on each dataset, and fine-tuning on ImageNet."""
  pretrained = {f'{name.replace("/", "_")}_{dataset}': (name, dataset) for name in data_size.chosen(
      {name: sizes.model(name) for name in SETS}, models) for dataset in IMAGES}
  return s.Study(
      'pre-training sets', {run: set_run(name, dataset) for run, (name, dataset) in pretrained.items()},
      transfer.stages({run: name for run, (name, _) in pretrained.items()}, ('imagenet2012',), px=384, real='no',
                      seeds=1),
      lambda results: data_size.set_rows(results, pretrained, IMAGES), data_size.SET_FIGURES)


def set_run(name: str, dataset: str) -> s.Config:
  """Pre-training on one dataset: `bit_pretrain.py` for ResNets, `vit_paper.py` for ViTs."""
  if name.startswith('BiT'):
    return files.load(f'bit_pretrain:{name},{dataset}', [])
  length = ',epochs=7' if (name, dataset) == ('L/16', 'jft') else ''
  return files.load(f'vit_paper:{name},{dataset}{length}', [])


def large_run(name: str, network: s.Model, source: str, *, is_jft: bool) -> s.Config:
  """As many updates for each subset as 7 epochs of JFT, or 90 of ImageNet, take; otherwise as `vit_paper.py`."""
  config = files.load(f'vit_paper:{"B/32" if name == "b/32" else name},jft', [])
  few = s.FewShot(every='5 %', source='tfds:imagenet2012', train_split='train[:65000]', split='validation', shots=(5,),
                  protocol=s.FewShotProtocol.BIG_VISION)
  config = s.replaced(config, {
      'name': name, 'length': '517_822 steps', 'model': dataclasses.replace(network, dtype=s.DType.BF16),
      'data.source': source or config.data.source, 'data.num_examples': 0,
      'head.pre_logits': sizes.pretraining_head(network), 'train.early_stop': s.EarlyStop('val/top1', patience=5),
      'evals': {'val': s.TopK(every='5 %'), 'fewshot': few}})
  return config if is_jft else s.replaced(config, {
      'length': '27_869 steps', 'head.bias_init': 0., 'data.source': source or 'tfds:imagenet2012',
      'data.eval_split': 'train[99%:]', 'data.num_classes': 1_000, 'data.max_labels': 0,
      'objective': s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.), 'optimizer.clip_norm': 1.})


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
