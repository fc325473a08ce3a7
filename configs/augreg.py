"""Pre-training as in "How to train your ViT": any size, ImageNet-1k or -21k, seven strengths of augmentation.

Data:     i1k: TFDS `imagenet2012`, 300 epochs. i21k: ImageNet-21k as a folder of classes, 30 or 300 epochs.
Source:   arXiv 2106.10270, sections 3.1 to 3.3: batch 4,096, lr 1e-3, cosine, warm-up 10k, clipping at norm 1; AUG is
          RandAugment (layers, magnitude) and mixup alpha; `reg` is dropout 0.1 and stochastic depth up to 0.1. The
          paper multiplies its decay with the learning rate: 0.1 here is its 0.1. Crops, RandAugment's pixels, and the
          evaluation, which shrinks to 256 px by area, as in google-research/big_vision configs/vit_i1k.py and
          vit_i21k.py.
Differs:  The head is linear, as in the paper and most released weights; the programs have a hidden layer with tanh
          (vit_i1k.py) or mean pooling (vit_i21k.py). vit_i21k.py holds 51,200 images out; here all train.
Levels:   none, light1, light2, medium1, medium2, strong1, strong2 by the paper's names; by those in file names of the
          released weights aug_none, aug_light0, aug_light1, aug_medium1 …: aug_light1 is the paper's light2.
Run:      python -m vit_jax.main --config=configs/augreg.py:B/16,i21k,medium1,wd=0.1 --workdir=runs/augreg
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/augreg.py:B/16,i21k --topology=v3:8x8
          --config.model.dtype=bfloat16
          2026-11-21, compiled for hardware that was not there, not measured on a TPU. Step, MFU, hours and core-days
          without collectives; those one after the other, hidden behind nothing.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   2.92 of 15.48    129.4          6.8   42.4%  1,039,828    37.4        199
          The table was made with Adam's first moment in float32, and has not been renewed.
Expected: ImageNet top-1 after 300 epochs of i21k and fine-tuning at 384 px: Ti/16 78.22 %, S/16 83.73 %, B/16 85.49 %,
          L/16 85.59 %, R50+L/32 85.99 % (their Table 3, recommended settings). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import augreg, sizes

SIZES = ('B/16', 'Ti/16', 'S/32', 'S/16', 'B/32', 'L/16', 'R+Ti/16', 'R26+S/32', 'R50+L/32')


def get_config(arguments: str = '') -> s.Config:
  """The run: size, data, augmentation in any order; reg=off|on wd=0.1|0.03 epochs=300|30."""
  given = s.parse_arg(arguments, size=SIZES, data=('i1k', 'i21k'), aug=tuple(augreg.LEVELS), reg=('off', 'on'),
                      wd=('0.1', '0.03'), epochs=('300', '30'))
  level = augreg.LEVELS[given['aug']]
  recipe = s.Recipe(
      exif_orientation=s.Exif.FALSE,
      crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.), crop_aspect=(.75, 1.33),
      flip=True,
      randaugment=level.randaugment(), mixup=level.mixup, eval_resize_px=256, eval_area=True, truncate=True)
  many = given['data'] == 'i21k'
  data = (s.Data(source='folder:imagenet21k', num_examples=14_197_122, num_classes=21_841, recipe=recipe) if many else
          s.Data(source='tfds:imagenet2012', train_split='train[:99%]', eval_split='validation',
                 num_examples=1_268_355, num_classes=1_000, recipe=recipe))
  size = given['size']
  model = sizes.published(size) if size in sizes.PUBLISHED else sizes.vit(size)
  model.dropout = model.drop_path = .1 if given['reg'] == 'on' else 0.
  model.init = s.Init.BIG_VISION
  return s.Config(
      name=f'augreg {given["size"]} {given["data"]} {given["aug"]}', length=f'{given["epochs"]} epochs',
      batch_size=4096, image_px=(224, 224), data=data, model=model,
      head=s.Head(bias_init=-10. if many else -6.9),
      objective=s.Supervised(loss=s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=float(given['wd']), clip_norm=1., mu_dtype=s.DType.BF16,
                        schedule=s.Schedule(
          s.Decay.COSINE, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO)),
      evals={'val': s.TopK(every='10 epochs')},
      checkpoints=s.Checkpoints(every='2 epochs'))
