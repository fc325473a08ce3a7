"""MLP-Mixer from scratch on ImageNet-1k for 300 epochs.

Data:     TFDS `imagenet2012`, 99 % of train: 1,268,355 images; the other 1 % is `minival`. 1,000 classes.
Source:   arXiv 2105.01601, Table 4 (300 epochs, lr 1e-3, decay 0.1, RandAugment magnitude 15, mixup 0.5, stochastic
          depth 0.1); two operations, batch 4,096, warm-up 10,000, linear decay to 1e-8, sigmoid loss and head bias
          -6.9 as in google-research/big_vision configs/mlp_mixer_i1k.py.
Differs:  A branch that is kept under stochastic depth is scaled up, by at most 1 / 0.9 in the last block; there it is
          not.
Run:      python -m vit_jax.main --config=configs/mixer_i1k.py:B/16 --workdir=runs/mixer_b16
          --config.model.dtype=bfloat16
          S/32, S/16, B/32 and L/16 too; epochs=60 is the short run.
Plan:     python -m vit_jax.main --job=plan --config=configs/mixer_i1k.py:B/16 --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: B/16 76.3 % after 300 epochs, in 2 h 11 min on 128 v3 cores; 70.5 % after 60 (big_vision). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

SIZES = ('B/16', 'S/32', 'S/16', 'B/32', 'L/16')


def get_config(arguments: str = '') -> s.Config:
  """The run: size; epochs=300|60."""
  given = s.parse_arg(arguments, size=SIZES, epochs=('300', '60'))
  model = sizes.mixer(given['size'])
  model.drop_path = .1
  return s.Config(
      name=f'mixer {given["size"]} i1k', length=f'{given["epochs"]} epochs', batch_size=4096, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', train_split='train[:99%]', eval_split='validation', num_examples=1_268_355,
          num_classes=1_000, recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
              crop_aspect=(.75, 1.33), flip=True,
              randaugment=s.RandAugment(layers=2, magnitude=15., table=s.OpTable.AUGREG), mixup=.5, eval_resize_px=256,
              eval_area=True, truncate=True)),
      model=model, head=s.Head(bias_init=-6.9), objective=s.Supervised(loss=s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1., schedule=s.Schedule(
          s.Decay.LINEAR, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO, end_lr=1e-8)),
      evals={'val': s.TopK(every='10 epochs'), 'minival': s.TopK(every='10 epochs', split='train[99%:]')},
      checkpoints=s.Checkpoints(every='5 epochs'))
