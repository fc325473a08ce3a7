"""I-JEPA on ImageNet-1k: a ViT predicts the features of blocks of an image from another block, without augmentation.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the k-NN
          evaluation during training uses labels.
Source:   arXiv 2301.08243, Appendix A: AdamW, batch 2,048, 1e-4 to 1e-3 in 15 epochs, cosine to 1e-6, decay 0.04 to 0.4
          linearly, momentum 0.996 to 1 linearly; 600 epochs (H/14: 300), a predictor of 384 channels with the encoder's
          heads and 6 blocks (B) or 12; 4 targets of 0.15 to 0.2 of the image with aspects of 0.75 to 1.5, a context of
          0.85 to 1, at least 10 patches; squared error. The published config of H/14 has another warm-up:
          --config.optimizer.schedule.warmup='40 epochs' --config.optimizer.schedule.warmup_lr=2e-4, and ports of the
          program another loss: --config.objective.loss=smooth_l1
Differs:  The authors' program was not read. The paper does not state what follows, so that it is our own: betas of 0.9
          and 0.999, what weight decay acts on (matrices), initial values (those of DeiT), the aspects of crops. A
          context has at most half of the patches (`objectives/ijepa.py`).
Run:      python -m vit_jax.main --config=configs/ijepa_i1k.py:H/14 --workdir=runs/ijepa_h14
          --config.model.dtype=bfloat16
          Or L/16, B/16. `teacher` is the network to use: --config.init_from=runs/ijepa_h14
          --config.init_view=teacher
Plan:     python -m vit_jax.main --job=plan --config=configs/ijepa_i1k.py:H/14 --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: the paper reports for a linear probe: H/14 79.3 %, L/16 77.5 %, B/16 72.9 %. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

EPOCHS = {'H/14': 300, 'L/16': 600, 'B/16': 600}
DEPTHS = {'H/14': 12, 'L/16': 12, 'B/16': 6}
"""Blocks of the predictor."""


def get_config(arguments: str = '') -> s.Config:
  """The run of H/14, L/16 or B/16."""
  size = s.parse_arg(arguments, size=tuple(EPOCHS))['size']
  model = sizes.vit(size)
  model.positions, model.gelu, model.pool = s.SinCos(s.Frequencies.MAE), s.Gelu.EXACT, s.Mean()
  model.init = s.Init.DEIT
  return s.Config(
      name=f'ijepa {size}', length=f'{EPOCHS[size]} epochs', batch_size=2048, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.3, 1.),
              crop_aspect=(.75, 4 / 3), flip=False, interpolation=s.Interpolation.BICUBIC, antialias=True,
              eval_resize_px=256, eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406),
              std=(.229, .224, .225))),
      model=model,
      objective=s.IJepa(predictor_width=384, predictor_depth=DEPTHS[size], predictor_heads=model.heads, num_targets=4,
                        target_area=(.15, .2), target_aspect=(.75, 1.5), context_area=(.85, 1.), context_ratio=.5,
                        min_context=10, loss=s.JepaLoss.L2, momentum=s.Ramp(.996, 1., curve=s.Curve.LINEAR)),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.04,
                        weight_decay_ramp=s.Ramp(1., 10., curve=s.Curve.LINEAR), clip_norm=0.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='15 epochs', warmup_lr=1e-4, end_lr=1e-6)),
      evals={'knn': s.Knn(every='20 epochs', views=('teacher',)),
             'health': s.Health(every='1 epoch', images=4096, min_rank=2., views=('teacher',))},
      checkpoints=s.Checkpoints(every='5 epochs'))
