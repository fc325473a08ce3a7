"""ViT-S/16 on ImageNet-1k for 90 epochs: the better plain ViT baseline.

Data:     TFDS `imagenet2012`, 99 % of train: 1,268,355 images; the other 1 % is `minival`. 1,000 classes.
Source:   arXiv 2205.01580: batch 1,024, mean pooling, fixed 2-D sine-cosine positions, RandAugment (2, 10), mixup 0.2,
          a hidden layer in the head; lr 1e-3, decay 1e-4 as a product, that is 0.1 times the learning rate. As its
          program has it (google-research/big_vision configs/vit_s16_i1k.py, pp/ops_image.py), crops are drawn by
          TensorFlow's sampler and resampled bilinearly without antialias, RandAugment's operations are the program's to
          the pixel, and evaluation shrinks to 256 px by area. Adam's first moment is kept in bfloat16.
Differs:  No difference of this recipe alone is known.
Run:      python -m vit_jax.main --config=configs/vit_s16_i1k.py --workdir=runs/vit_s16_i1k
          --config.model.dtype=bfloat16
          epochs=150 or epochs=300 trains longer. evals=all also measures ReaL and ImageNet-v2, which needs TFDS's
          `imagenet2012_real` and `imagenet_v2`; evals=fewshot has big_vision's six few-shot datasets.
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_s16_i1k.py --topology=v3:2x2
          --config.model.dtype=bfloat16
          2026-11-21, compiled for hardware that was not there, not measured on a TPU. Step, MFU, hours and core-days
          without collectives; those one after the other, hidden behind nothing.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:2x2                   8   2.89 of 15.48    235.1          1.1   24.3%    111,477     7.3          2
Expected: the paper reports top-1 76.5 % / 78.5 % / 80.0 % after 90 / 150 / 300 epochs (ReaL 83.1 / 84.5 / 85.4, v2
          64.2 / 66.4 / 68.3); 6 h 30 min for 90 epochs on eight v3 cores. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

FEW_SHOT = {  # big_vision configs/common_fewshot.py
    'caltech': ('caltech101', 'train', 'test'), 'cars': ('cars196', 'train', 'test'),
    'cifar100': ('cifar100', 'train', 'test'), 'dtd': ('dtd', 'train', 'test'),
    'pets': ('oxford_iiit_pet', 'train', 'test'), 'uc_merced': ('uc_merced', 'train[:1000]', 'train[1000:]')}


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  given = s.parse_arg(arguments, epochs=('90', '150', '300'), evals=('own', 'all', 'fewshot'))
  model = sizes.vit('S/16')
  model.pool, model.positions, model.init = s.Mean(), s.SinCos(), s.Init.BIG_VISION
  config = s.Config(
      name='vit_s16_i1k', length=f'{given["epochs"]} epochs', batch_size=1024, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', train_split='train[:99%]', eval_split='validation', num_examples=1_268_355,
          num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
              crop_aspect=(.75, 1.33), flip=True,
              randaugment=s.RandAugment(layers=2, magnitude=10., table=s.OpTable.AUGREG), mixup=.2, eval_resize_px=256,
              eval_area=True, truncate=True)),
      model=model,
      head=s.Head(pre_logits=384, bias_init=0.),  # a hidden layer with tanh
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1., mu_dtype=s.DType.BF16,
                        schedule=s.Schedule(
          s.Decay.COSINE, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO)),
      evals={'val': s.TopK(every='10 epochs'), 'minival': s.TopK(every='10 epochs', split='train[99%:]')},
      checkpoints=s.Checkpoints(every='2 epochs'))
  if given['evals'] == 'all':
    config.evals['real'] = s.Real(every='10 epochs', source='tfds:imagenet2012_real', split='validation')
    config.evals['v2'] = s.TopK(every='10 epochs', source='tfds:imagenet_v2', split='test')
  if given['evals'] == 'fewshot':
    config.evals |= {name: s.FewShot(every='25_000 steps', source=f'tfds:{source}', train_split=train, split=test,
                                     shots=(1, 5, 10, 25), num_seeds=3, l2=1024., protocol=s.FewShotProtocol.BIG_VISION)
                     for name, (source, train, test) in FEW_SHOT.items()}
  return config
