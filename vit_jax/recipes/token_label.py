"""LV-ViT by token labelling, as its authors' program trains and fine-tunes it (zihangJiang/TokenLabeling@9dbfd59)."""
from __future__ import annotations

import dataclasses

from vit_jax.config import schema as s
from vit_jax.recipes import sizes

DROP_PATH = {'T': 0., 'S': .1, 'M': .2, 'L': .3}  # README.md
CROP = {'T': .9, 'S': .9, 'M': 1., 'L': 1.}  # share of the short side that evaluation shows: tlt/models/lvvit.py
FINE_TUNED = {'S': (384,), 'M': (384, 448), 'L': (448, 512)}  # px; README.md


def pretrain(size: str) -> s.Config:
  """Training of T, S, M or L at 224 px."""
  return dataclasses.replace(
      _common(size, 224), name=f'token_label LV-ViT-{size}', length='310 epochs', batch_size=1024,
      optimizer=s.AdamW(
          lr=1e-3 if size == 'L' else 1.6e-3, weight_decay=.05, clip_norm=0.,
          schedule=s.Schedule(s.Decay.COSINE, warmup='5 epochs', end_lr=1e-5, hold='10 epochs')),
      train=s.Train(ema=.99992, ema_warmup=s.EmaWarmup.NONE), evals={'val': s.TopK(every='10 epochs')})


def finetune(size: str, px: int) -> s.Config:
  """Fine-tuning of S, M or L at a higher resolution: a constant small rate, hardly any decay, no average."""
  return dataclasses.replace(
      _common(size, px), name=f'token_label finetune LV-ViT-{size} {px} px', length='30 epochs', batch_size=512,
      optimizer=s.AdamW(lr=5e-6, weight_decay=1e-8, clip_norm=0.,
                        schedule=s.Schedule(s.Decay.CONSTANT, warmup='5 epochs')),
      evals={'val': s.TopK(every='5 epochs')})


def _common(size: str, px: int) -> s.Config:
  model = sizes.published(f'LV-ViT-{size}/16')
  model.drop_path, model.position_resize = DROP_PATH[size], s.PositionResize.BICUBIC  # tlt/utils/utils.py
  return s.Config(
      image_px=(px, px),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              crop_area=(.08, 1.), interpolation=s.Interpolation.BICUBIC, antialias=True,
              eval_resize_px=int(px / CROP[size]), eval_geometry=s.Geometry.TORCHVISION,
              randaugment=s.RandAugment(3 if size == 'L' else 2, 9., .5, probability=.5, table=s.OpTable.TIMM),
              erase=s.Erase(.25), mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model, objective=s.TokenLabel(dense_weight=1.), checkpoints=s.Checkpoints(every='2 epochs'))
