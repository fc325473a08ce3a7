"""Continues the pre-training of released weights on your own images, without their labels.

Data:     a folder PATH/<class>/*.jpg (a single class is enough), a TFDS set or prepared shards; labels are used by the
          k-NN evaluation alone. `vit-jax pretrain --weights=FILE --data=folder:PATH` is this config with the network of
          the weights and examples=N counted.
Source:   objective=dino, lejepa, mae, ijepa: crops, colors and temperatures of `dino_i1k`, `lejepa_i1k`, `mae_i1k` and
          `ijepa_i1k`, which cite their papers.
Differs:  It follows no paper: batch, length, rate, widths of heads, 4,096 prototypes, a constant temperature of the
          teacher and the time for which the backbone is frozen are chosen here for small sets. The teacher is an
          average over about a tenth of the run: its momentum rises from 1 - 10 / steps, at least 0.99, to 1.
Run:      python -m vit_jax.main --config=configs/pretrain.py:Ti/16,objective=dino --config.data.source=folder:photos
          --config.init_from=FILE --workdir=runs/continued
          As one command: vit-jax pretrain --weights=FILE --data=folder:photos --workdir=runs/continued
          --warm_heads='2 epochs' freezes the backbone for longer or shorter, --objective=lejepa learns something else
Plan:     with dino an image and step costs about 13 times a forward pass of the network, with lejepa 11, with mae 3
Expected: depends on weights and images; an example is in docs/guides/continue_pretraining.md.
"""
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import finetune, sizes, studies

WARM_HEADS = '10 %'  # the part of a run in which the backbone is frozen, while the new heads learn
BATCHES = (8, 64)  # the smallest and the largest batch
STEPS = (300, 50_000)  # the shortest and the longest run; between them it is 20 epochs
EVERY = '10 %'  # between evaluations


class Method(NamedTuple):
  """What differs by the objective; `view` is the network that is evaluated, and to use afterwards."""
  objective: s.Objective
  recipe: s.Recipe
  view: str = 'student'
  b2: float = .999


def get_config(arguments: str = '') -> s.Config:
  """The run: the network, then objective=… and examples=…, the number of training images."""
  given = s.parse_arg(arguments, model=finetune.MODELS, objective=tuple(METHODS), examples=('',))
  model, num_images = sizes.model(given['model']), studies.number('examples', given['examples'])
  if 0 < num_images < BATCHES[0]:
    raise UserError(f'examples: expected at least {BATCHES[0]} training images, got {num_images}. Add images.')
  batch_size, steps = finetune.fitted(num_images, batches=BATCHES, epochs=20, steps=STEPS) if num_images else (
      BATCHES[1], STEPS[0])  # before the images are counted
  method = METHODS[given['objective']](steps)
  return s.Config(
      name=f'pretrain {given["objective"]}', length=f'{steps} steps', batch_size=batch_size,
      image_px=(224, 224), data=s.Data(source='folder:PATH', recipe=method.recipe), model=model,
      objective=method.objective,
      optimizer=s.AdamW(
          lr=1e-4, base_batch_size=64, b1=.9, b2=method.b2, weight_decay=.04, clip_norm=3.,
          schedule=s.Schedule(s.Decay.COSINE, warmup='10 %', end_lr=1e-6),
          rules=(s.PathRule('backbone/.*', frozen_until=WARM_HEADS),)),
      evals={'knn': s.Knn(every=EVERY, neighbors=(1, 5, 20), views=(method.view,)),
             'health': s.Health(every=EVERY, views=(method.view,))},
      checkpoints=s.Checkpoints(every=EVERY))


def _momentum(steps: int, curve: s.Curve = s.Curve.COSINE) -> s.Ramp:
  return s.Ramp(round(max(1 - 10 / steps, .99), 6), 1., curve=curve)


def _dino(steps: int) -> Method:
  views = s.Views(on=True, num_local=6, global_area=(.4, 1.), local_area=(.05, .4), local_px=96, blur=(1., .1, .5),
                  solarize=(0., .2, 0.), grayscale=.2, jitter=s.Jitter(.4, .4, .2, .1, probability=.8))
  return Method(
      s.Dino(norm_last_layer=True, out_dim=4096, hidden_dim=2048, bottleneck_dim=256, student_temperature=.1,
             teacher_temperature=s.Ramp(.04, .04, until='100 %', curve=s.Curve.LINEAR),
             momentum=_momentum(steps), centering=s.Centering.MEAN, center_momentum=.9),
      s.Recipe(crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True, views=views), 'teacher')


def _lejepa(steps: int) -> Method:
  views = s.Views(on=True, num_local=4, global_area=(.3, 1.), local_area=(.05, .3), local_px=96, blur=(.5, .5, .5),
                  solarize=(.2, .2, .2), grayscale=.2, jitter=s.Jitter(.4, .4, .2, .1, probability=.8))
  return Method(
      s.LeJepa(hidden_dim=2048, out_dim=64, weight=.05, directions=1024, t_max=5., t_points=17),
      s.Recipe(crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True, views=views))


def _mae(steps: int) -> Method:
  return Method(s.Mae(mask_ratio=.75, norm_pix_loss=True, decoder_width=256, decoder_depth=4, decoder_heads=8),
                s.Recipe(crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.2, 1.),
                         crop_aspect=(.75, 4 / 3), flip=True), b2=.95)


def _ijepa(steps: int) -> Method:
  return Method(
      s.IJepa(predictor_width=192, predictor_depth=6, predictor_heads=6, num_targets=4, target_area=(.15, .2),
              target_aspect=(.75, 1.5), context_area=(.85, 1.), context_ratio=.5, min_context=10, loss=s.JepaLoss.L2,
              momentum=_momentum(steps, s.Curve.LINEAR)),
      s.Recipe(crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.3, 1.),
               crop_aspect=(.75, 4 / 3), flip=False), 'teacher')


METHODS = {'dino': _dino, 'lejepa': _lejepa, 'mae': _mae, 'ijepa': _ijepa}
