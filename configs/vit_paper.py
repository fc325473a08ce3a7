"""The networks of the ViT paper, pre-trained as its Table 3 has it: ViTs, hybrids and ResNets, on one of three sets.

Data:     jft: JFT-300M: 303 M images, 18,291 classes, several labels per image (data.max_labels). It is internal to
          Google: point --config.data.source at your data, or at `synthetic`, and set data.num_examples and
          data.num_classes to match. i21k: ImageNet-21k as a folder of classes: 14.2 M images, 21,841 classes. i1k: TFDS
          `imagenet2012`: 1,281,167 training and 50,000 validation images, 1,000 classes.
Source:   arXiv 2010.11929, Table 3: `JFT` and `SETS` have its numbers. Batch 4,096, warm-up 10,000, Adam for ResNets
          too; its caption gives clipping at norm 1 for ImageNet only. The head of a ViT or hybrid has the hidden layer
          with tanh of section 3.1, the head of a ResNet is linear. Sigmoid loss and head bias -10 on jft and i21k as in
          the released code. On i21k batch, rate and its end are of an author's statement (issue 2 of the repository
          vision_transformer).
Differs:  No program was published. Chosen here: on jft the learning rate ends at 0 (on ImageNet-21k at 1e-5, an
          author's statement), at most 8 labels of an image are used, and BiT-R200x3, which Table 3 does not have, is
          trained as R152x2; on i1k the loss is softmax and the rate ends at 0. On i21k the head has 21,841 outputs,
          that of the released weights two more, without images.
Run:      python -m vit_jax.main --config=configs/vit_paper.py:L/16,jft --workdir=runs/l16_jft
          epochs=7 and epochs=14 on jft, epochs=30 on i21k are the other lengths of the paper.
          `vit_l16_jft` and so on are the same with the initialization of the released code.
Expected: Table 5 of the paper, as the configs of single networks have it. Not run here.
"""
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes

JFT = {  # epochs and learning rate, Table 3
    'B/16': (7, 8e-4), 'B/32': (7, 8e-4), 'L/32': (7, 6e-4), 'L/16': (14, 4e-4), 'H/14': (14, 3e-4),
    'R50+B/32': (7, 8e-4), 'R50+B/16': (7, 8e-4), 'R50+L/32': (7, 2e-4), 'R50+L/16': (7, 4e-4), 'BiT-R50x1': (7, 1e-3),
    'BiT-R50x2': (7, 1e-3), 'BiT-R101x1': (7, 8e-4), 'BiT-R152x1': (7, 6e-4), 'BiT-R152x2': (7, 6e-4),
    'BiT-R200x3': (7, 6e-4)}


class Set(NamedTuple):
  """How all networks are trained on a set of images, Table 3. What `JFT` has is not here.

  end_lr: learning rate at the end.    bias_init: of the head.    lengths: epochs; the first one is the default.
  """
  data: s.Data
  lengths: tuple[int, ...]
  lr: float
  weight_decay: float
  dropout: float
  decay: s.Decay
  end_lr: float
  clip_norm: float
  loss: s.Loss
  bias_init: float
  evals: dict[str, s.Eval]
  checkpoints: s.Checkpoints


SETS = {
    'jft': Set(
        s.Data(source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291,
               max_labels=8),  # 1.26 on average; the highest number is not published
        (7, 14), 0., .1, 0., s.Decay.LINEAR, 0., 0., s.Loss.SIGMOID, -10., {'test': s.TopK(every='25_000 steps')},
        s.Checkpoints(every='5_000 steps', keep_every='100_000 steps')),
    'i21k': Set(
        s.Data(source='folder:imagenet21k', num_examples=14_197_122, num_classes=21_841),
        (90, 30), 1e-3, .03, .1, s.Decay.LINEAR, 1e-5, 0., s.Loss.SIGMOID, -10., {'val': s.TopK(every='10_000 steps')},
        s.Checkpoints(every='5_000 steps', keep_every='50_000 steps')),
    'i1k': Set(
        s.Data(source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000),
        (300,), 3e-3, .3, .1, s.Decay.COSINE, 0., 1., s.Loss.SOFTMAX, 0., {'val': s.TopK(every='10 epochs')},
        s.Checkpoints(every='5 epochs', keep_best='val/top1'))}


def get_config(arguments: str = '') -> s.Config:
  """The run: model and set; epochs=7|14|30|90|300."""
  given = s.parse_arg(arguments, model=tuple(JFT), set=tuple(SETS), epochs=('', '7', '14', '30', '90', '300'))
  model, one, is_jft = sizes.model(given['model']), SETS[given['set']], given['set'] == 'jft'
  epochs, lr = JFT[given['model']] if is_jft else (one.lengths[0], one.lr)
  if int(given['epochs'] or epochs) not in one.lengths:
    raise UserError(f'epochs: expected one of {", ".join(map(str, one.lengths))} on {given["set"]}, got '
                    f'{given["epochs"]}. Set another length with --config.length.')
  if isinstance(model, s.ViT):
    model.dropout = one.dropout
  if is_jft:
    model.dtype = s.DType.BF16
  one.data.recipe = s.Recipe(
      exif_orientation=s.Exif.FALSE, crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
      crop_aspect=(.75, 1.33), flip=True, mean=(.5, .5, .5), std=(.5, .5, .5))
  return s.Config(
      name=f'{given["model"]} {given["set"]}', length=f'{given["epochs"] or epochs} epochs', batch_size=4096,
      image_px=(224, 224), data=one.data, model=model,
      head=s.Head(pre_logits=sizes.pretraining_head(model), bias_init=one.bias_init),
      objective=s.Supervised(loss=one.loss, label_smoothing=0.),
      optimizer=s.AdamW(
          lr=lr, b1=.9, b2=.999, weight_decay=one.weight_decay, clip_norm=one.clip_norm,
          schedule=s.Schedule(one.decay, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO, end_lr=one.end_lr)),
      train=s.Train(log_every='200 steps') if is_jft else s.Train(),
      evals=one.evals, checkpoints=one.checkpoints)
