"""The networks of the ViT paper's scaling study on JFT-300M: ResNets (BiT) and hybrids, the rivals, and all ViTs.

Data:     JFT-300M: 303 M images, 18,291 classes, several labels per image (data.max_labels). It is internal to Google:
          point --config.data.source at your data, and set data.num_examples and data.num_classes to match.
Source:   arXiv 2010.11929, Table 3 (length and rate by model; Adam for ResNets too, decay 0.1, batch 4,096, warm-up
          10,000, linear decay; no clipping: the caption gives clipping for ImageNet only). Table 3 has no R200x3, which
          is trained as R152x2. The head of a ViT or hybrid has the hidden layer of section 3.1, the head of a ResNet is
          linear. Sigmoid loss and head bias -10 as in the released code. The studies take their runs from here.
Differs:  No program was published for JFT. Not stated by the paper and chosen here: the learning rate falls to 0, where
          that of ImageNet-21k ends at 1e-5 (an author's statement), at most 8 labels of an image are used, and
          BiT-R200x3 is trained as R152x2.
Run:      python -m vit_jax.main --config=configs/rivals_jft.py:R50+B/16 --workdir=runs/r50_b16_jft
          epochs=14 trains R50+L/16 for as long as its second row.
Plan:     python -m vit_jax.main --job=plan --config=configs/rivals_jft.py:R50+B/16 --topology=v3:16x16
Expected: ImageNet after fine-tuning, 7 epochs (Table 6): R50+B/32 84.90 %, R50+B/16 85.58 %, R50+L/32 85.68 %, R50+L/16
          86.60 % (14 epochs: 87.12 %), R50x1 77.54 %, R152x2 84.97 %. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

RATES = {  # Table 3
    'R50+B/16': 8e-4, 'R50+B/32': 8e-4, 'R50+L/32': 2e-4, 'R50+L/16': 4e-4, 'BiT-R50x1': 1e-3, 'BiT-R50x2': 1e-3,
    'BiT-R101x1': 8e-4, 'BiT-R152x1': 6e-4, 'BiT-R152x2': 6e-4, 'BiT-R200x3': 6e-4, 'B/32': 8e-4, 'B/16': 8e-4,
    'L/32': 6e-4, 'L/16': 4e-4, 'H/14': 3e-4}


def get_config(arguments: str = '') -> s.Config:
  """The run: model; epochs=7|14."""
  given = s.parse_arg(arguments, model=tuple(RATES), epochs=('7', '14'))
  model = sizes.model(given['model'])
  model.dtype = s.DType.BF16
  return s.Config(
      name=f'{given["model"]} jft', length=f'{given["epochs"]} epochs', batch_size=4096, image_px=(224, 224),
      data=s.Data(
          source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291, max_labels=8,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
              crop_aspect=(.75, 1.33), flip=True, mean=(.5, .5, .5), std=(.5, .5, .5))),
      model=model,
      head=s.Head(pre_logits=sizes.pretraining_head(model), bias_init=-10.),
      objective=s.Supervised(loss=s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.AdamW(
          lr=RATES[given['model']], b1=.9, b2=.999, weight_decay=.1, clip_norm=0.,
          schedule=s.Schedule(s.Decay.LINEAR, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO, end_lr=0.)),
      train=s.Train(log_every='200 steps'),
      evals={'test': s.TopK(every='25_000 steps')},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='100_000 steps'))
