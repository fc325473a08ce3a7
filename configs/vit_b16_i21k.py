"""ViT-B/16 pre-trained on ImageNet-21k for 90 epochs, as released with the ViT paper.

Data:     ImageNet-21k as a folder of classes: 14.2 M images, 21,841 classes. The published heads have 21,843
          outputs, two of them for classes without images.
Source:   arXiv 2010.11929, Table 3 (lr 1e-3, decay 0.03, linear, dropout 0.1; no clipping: the caption gives
          clipping for ImageNet only). Sigmoid loss, head bias -10 and a tanh layer before the logits as in the
          released weights.
Differs:  No program was published for it; batch, rate and its end are of an author's statement (issue 2 of the
          repository vision_transformer). The head has 21,841 outputs, there 21,843, two of them without images.
Run:      python -m vit_jax.main --config=configs/vit_b16_i21k.py --config.data.source=folder:PATH
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_b16_i21k.py --topology=v3:8x8
          --config.model.dtype=bfloat16
          2026-11-21, compiled without the hardware, not measured on a TPU. Step time, MFU, hours and core-days exclude
          collectives, whose times are summed without any overlap.
          topology           devices  peak GiB        step ms  collectives   MFU        steps   hours  core-days
          v3:8x8                 128   2.94 of 15.48    193.4          6.8   28.4%    311,948    16.8         89
          The table was made with clipping at norm 1 and has not been renewed.
Expected: the paper reports 83.97 % on ImageNet after fine-tuning at 384 px. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  model = sizes.vit('B/16')
  model.dropout = .1
  model.init = s.Init.VISION_TRANSFORMER
  return s.Config(
      name='vit_b16_i21k', length='90 epochs', batch_size=4096, image_px=(224, 224),
      data=s.Data(
          source='folder:imagenet21k', num_examples=14_197_122, num_classes=21_841,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
              crop_aspect=(.75, 1.33), flip=True, mean=(.5, .5, .5), std=(.5, .5, .5))),
      model=model,
      head=s.Head(pre_logits=768, bias_init=-10.),  # a hidden layer with tanh, as in the released weights
      objective=s.Supervised(loss=s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.AdamW(
          lr=1e-3, b1=.9, b2=.999, weight_decay=.03, clip_norm=0.,
          schedule=s.Schedule(s.Decay.LINEAR, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO, end_lr=1e-5)),
      evals={'val': s.TopK(every='10_000 steps')},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='50_000 steps'))
