"""I-JEPA on ImageNet-1k: a ViT predicts the features of blocks of an image from another block, without augmentation.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the k-NN
          evaluation during training uses labels.
Source:   arXiv 2301.08243, and its program, facebookresearch/ijepa@52c1ae9. H/14 is `in1k_vith14_ep300.yaml`: AdamW,
          batch 2,048, 300 epochs, 2e-4 to 1e-3 in 40 epochs, cosine to 1e-6, weight decay 0.04 to 0.4 by a cosine,
          momentum 0.996 to 1 linearly; a predictor of 384 channels with the encoder's heads and 12 blocks; 4 targets of
          0.15 to 0.2 of the image with aspects of 0.75 to 1.5, a context of 0.85 to 1, at least 10 patches; smooth L1;
          bilinear crops. L/16 and B/16, which have no config there, are those of the paper's Appendix A: 600 epochs, of
          which 15 from 1e-4; B/16 has 6 blocks in the predictor. The paper states the squared error
          (--config.objective.loss=l2), and that weight decay rises linearly.
Differs:  A context has at most 0.27 of the patches, chosen at random (16 px: 0.26); the program cuts it to the shortest
          of the 128 images of a device and keeps the upper rows. Area and aspect of a block are drawn separately, there
          by one number. A context of too few patches is drawn again with its targets. Patch embeddings start as in
          PyTorch, there at N(0, 0.02).
Run:      python -m vit_jax.main --config=configs/ijepa_i1k.py:H/14 --workdir=runs/ijepa_h14
          --config.model.dtype=bfloat16
          Or L/16, B/16. `teacher` is the network to use: --config.init_from=runs/ijepa_h14
          --config.init_view=teacher
Plan:     python -m vit_jax.main --job=plan --config=configs/ijepa_i1k.py:H/14 --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: the paper reports for a linear probe: H/14 79.3 %, L/16 77.5 %, B/16 72.9 %. Not run here.
"""
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.recipes import sizes


class Size(NamedTuple):
  """What differs by the network: epochs, warm-up and its first rate, blocks of the predictor, context at most."""
  epochs: int
  warmup: int
  warmup_lr: float
  depth: int
  context_ratio: float


SIZES = {'H/14': Size(300, 40, 2e-4, 12, .27), 'L/16': Size(600, 15, 1e-4, 12, .26),
         'B/16': Size(600, 15, 1e-4, 6, .26)}


def get_config(arguments: str = '') -> s.Config:
  """The run of H/14, L/16 or B/16."""
  name = s.parse_arg(arguments, size=tuple(SIZES))['size']
  size, model = SIZES[name], sizes.vit(name)
  model.positions, model.gelu, model.pool = s.SinCos(s.Frequencies.MAE), s.Gelu.EXACT, s.Mean()
  model.init = s.Init.DEIT
  return s.Config(
      name=f'ijepa {name}', length=f'{size.epochs} epochs', batch_size=2048, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.3, 1.),
              crop_aspect=(.75, 4 / 3), flip=False, interpolation=s.Interpolation.BILINEAR, antialias=True,
              eval_resize_px=256, eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406),
              std=(.229, .224, .225))),
      model=model,
      objective=s.IJepa(predictor_width=384, predictor_depth=size.depth, predictor_heads=model.heads, num_targets=4,
                        target_area=(.15, .2), target_aspect=(.75, 1.5), context_area=(.85, 1.), min_context=10,
                        context_ratio=size.context_ratio, loss=s.JepaLoss.SMOOTH_L1,
                        momentum=s.Ramp(.996, 1., curve=s.Curve.LINEAR)),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.04,
                        weight_decay_ramp=s.Ramp(1., 10.), weight_decay_mask=('.*/kernel', 'mask_token'), clip_norm=0.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup=f'{size.warmup} epochs',
                                            warmup_lr=size.warmup_lr, end_lr=1e-6)),
      evals={'knn': s.Knn(every='20 epochs', views=('teacher',)),
             'health': s.Health(every='1 epoch', images=4096, min_rank=2., views=('teacher',))},
      checkpoints=s.Checkpoints(every='5 epochs'))
