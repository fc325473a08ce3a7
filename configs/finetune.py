"""Fine-tunes published weights on a dataset by the protocol of a paper: any model, any data.

Data:     cifar10 cifar100 imagenet2012 pets flowers resisc45 kitti from TFDS; or `own`: a folder, a TFDS set or
          prepared shards, whose classes are counted: --config.data.source=folder:PATH, at 224 px in batches of 32,
          or with examples=N in batches and steps for N images. `vit-jax finetune --weights=FILE --data=folder:PATH` is
          this config with the network of the weights and examples=N counted
Source:   protocol=vit: ViT paper (arXiv 2010.11929), Table 4: SGD, cosine, batch 512, 384 px, clipping at norm 1; on
          ImageNet weights are averaged from 512 px on (section 4.1: 512 px for L/16, 518 px for H/14). The rate is the
          third of the four that Table 4 tries. augreg: arXiv 2106.10270, section 3.4: the same without averaging.
          Warm-up is AugReg's, as the ViT paper gives none. Both fine-tune with google-research/vision_transformer,
          whose configs/models.py has dropout 0.1 for L/16, H/14, R50+B/16 and R50+L/32, and configs/augreg.py none.
          protocol=mae is mae_finetune.py, protocol=hyperrule is bit_hyperrule.py. finetune_sweep.py runs the full
          grid of a protocol. kitti is AugReg's Kitti-distance: VTAB's task on the complete dataset; Table 4 has no
          rates for it and resisc45, so those of its other small datasets are used.
Differs:  Final runs train on the whole training split, as in the paper; those of the program on 98 % of CIFAR and 99 %
          of ImageNet. `own` and lora are of this project: batch and length follow from the number of images, and the
          rate of the first update is not 0.
Run:      python -m vit_jax.main --config=configs/finetune.py:B/16,cifar10 --config.init_from=FILE --workdir=runs/ft
          …/finetune.py:L/16,imagenet2012,px=512 and …/finetune.py:H/14,imagenet2012,px=518 are those of Table 2;
          --config=configs/finetune.py:B/16,imagenet2012,protocol=mae, or
          --config=configs/finetune.py:Ti/16,own --config.data.source=folder:PATH --config.length='500 steps'
          …,phase=tune holds out part of the training examples, to choose settings: --config.optimizer.lr=0.003
          configs/finetune.py:B/16,own,lora=8 trains adapters of rank 8 and the head in place of all weights, by
          AdamW, as the gradient of adapters is small at their start; --config.lora.alpha=16 --config.lora.dropout=0.1
          --config.lora.targets=query,value --config.lora.rslora=true --config.lora.dora=true
Plan:     B/16 at 384 px is 111 GFLOP an image forward; 10k steps of 512 are 1.7 exaFLOPs of training
Expected: B/16 from ImageNet-21k: CIFAR-10 98.95 %, CIFAR-100 91.67 %, ImageNet 83.97 %, Pets 94.43 %, Flowers 99.38 %
          (the paper's Table 5). Measurements of our own are in docs/explanation/results.md.
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import finetune, sizes, studies

LENGTH_RATE = {  # steps, warm-up steps, learning rate
    'cifar10': (10_000, 500, .01), 'cifar100': (10_000, 500, .01), 'imagenet2012': (20_000, 500, .03),
    'pets': (500, 100, .01), 'flowers': (500, 100, .01), 'resisc45': (2_500, 200, .01), 'kitti': (500, 100, .01),
    'own': (500, 100, .01)}
DROPOUT = {'L/16': .1, 'H/14': .1, 'R50+B/16': .1, 'R50+L/32': .1}  # vision_transformer, configs/models.py; else 0
LORA_LR = 1e-3  # chosen here, see docs/guides/lora.md; no paper fine-tunes ViTs so on small sets of images
OWN_PX = 224  # the side that most published weights are for; 384 px of the papers take 3 times as long
EMA_PX = 512  # from this side on ImageNet runs of protocol=vit are averaged


def get_config(arguments: str = '') -> s.Config:
  """The run: model and dataset, then protocol=… phase=… px=…; examples=… for `own`."""
  given = s.parse_arg(arguments, model=finetune.MODELS, dataset=tuple(LENGTH_RATE), protocol=finetune.PROTOCOLS,
                      phase=finetune.PHASES, px=('',), examples=('',), lora=('',))
  name, dataset, protocol, phase = given['model'], given['dataset'], given['protocol'], given['phase']
  num_examples = studies.number('examples', given['examples'])
  if num_examples and (dataset != 'own' or protocol not in finetune.SCALED):
    raise UserError(f'examples: expected none for {dataset} and protocol={protocol}, got {num_examples}. Remove it, or '
                    f'use the dataset own and protocol={finetune.SCALED[0]}.')
  rank = studies.number('lora', given['lora'])
  if rank and (dataset != 'own' or protocol != 'vit'):
    raise UserError(f'lora: expected none for {dataset} and protocol={protocol}, which trains all weights, got {rank}. '
                    'Remove it, or use the dataset own.')
  if protocol not in finetune.SCALED:
    other = {'mae': 'mae_finetune', 'hyperrule': 'bit_hyperrule'}[protocol]
    return files.load(f'{other}:{name},dataset={dataset},phase={phase},px={given["px"]}', [])
  model, px = sizes.model(name), studies.number('px', given['px']) or (OWN_PX if dataset == 'own' else 384)
  if protocol == 'vit' and dataset != 'own' and isinstance(model, s.ViT):
    model.dropout = DROPOUT.get(name, 0.)
  scale = finetune.scale(num_examples) if num_examples else finetune.published(*LENGTH_RATE[dataset], dataset)
  is_averaged = protocol == 'vit' and dataset == 'imagenet2012' and px >= EMA_PX
  return s.Config(
      name=f'finetune {name} {dataset} {protocol}', length=f'{scale.steps} steps', batch_size=scale.batch_size,
      image_px=(finetune.side(px, model),) * 2,
      data=finetune.data(dataset, phase, s.Recipe(
          crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.), crop_aspect=(.75, 1.33),
          flip=True)),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      lora=s.Lora(rank=rank), optimizer=_optimizer(scale, rank, is_own=dataset == 'own'),
      train=s.Train(ema=.9999 if is_averaged else 0., log_every=scale.log_every),
      evals={'test' if phase == 'final' else 'val': s.TopK(every=scale.every)},
      checkpoints=s.Checkpoints(every='10 %'),
      # The paper resizes images without preserving the aspect ratio; one's own are resized as the weights expect.
      init_settings=s.InitSettings.WEIGHTS if dataset == 'own' else s.InitSettings.NETWORK)


def _optimizer(scale: finetune.Scale, rank: int, *, is_own: bool) -> s.AnyOptimizer:
  """The optimizer of the papers; for adapters AdamW, with the same schedule.

  The first update of one's own run, which may be short, moves; that of the program does not.
  """
  schedule = s.Schedule(s.Decay.COSINE, warmup=scale.warmup, end_lr=0.,
                        warmup_form=s.Warmup.MOVING if is_own else s.Warmup.FROM_ZERO)
  if rank:
    return s.AdamW(lr=LORA_LR, b1=.9, b2=.999, weight_decay=0., clip_norm=1., schedule=schedule)
  return s.Sgd(lr=scale.lr, momentum=.9, weight_decay=0., mu_dtype=s.DType.BF16, clip_norm=1., schedule=schedule)
