"""DINOv2 on ImageNet-1k: DINO between crops, prediction of masked patches (iBOT), and spread features (KoLeo).

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the evaluations
          during training use labels.
Source:   arXiv 2304.07193, and its program, facebookresearch/dinov2 `ssl_default_config.yaml`, `vitl16_short.yaml`,
          `vitl14.yaml` and `vitg14.yaml`. L/16 is the short recipe: 125,000 steps of 2,048 images, 4e-3 times the root
          of batch / 1,024, layers decayed by 0.9, mean centering, one head of 65,536. L/14 and g/14 are the long one:
          625,000 steps of 3,072 images (g/14: Table 16 of the paper), Sinkhorn, two heads of 131,072, SwiGLU. Lengths
          of prototypes are learned and decay, gradients are clipped at norm 3 for the backbone and each head apart, and
          the last layer has learning rate 0 in the first 1,250 steps, as in the program. Probabilities of blur are
          those that the program has, whose class inverts the ones it is given.
Differs:  Drop path acts on each image alone, and centers of patches are means over all devices, in the program on a set
          number of images and for each device. The blur is Pillow's, there torchvision's, cut at 9 px. S and B are not
          published as recipes: they have the numbers of L/16 except stochastic depth 0.1. The program trains L/14 and
          g/14 on ImageNet-22k.
Run:      python -m vit_jax.main --config=configs/dinov2_i1k.py:L/16 --workdir=runs/dinov2_l16
          --config.model.dtype=bfloat16
          Or S/16, B/16, S/14, B/14, L/14, g/14. `teacher` is the network to use: --config.init_from=runs/dinov2_l16
          --config.init_view=teacher
          A collapse is logged, and ends the run with --config.objective.collapse.action=stop.
Plan:     python -m vit_jax.main --job=plan --config=configs/dinov2_i1k.py:L/16 --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: the program's README has 81.6 % (k-NN) and 82.9 % (linear) for L/16, 82.0 and 84.5 % for L/14 with
          ImageNet-22k. Not run here.
"""
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.recipes import sizes

EPOCH = 1250  # steps that the program calls an epoch, whatever the data
HEADS = ('projector/.*', 'patch_projector/.*')
"""Modules that the program clips apart from the backbone."""


class Size(NamedTuple):
  """What differs by the network.

  epochs, batch_size, group: of the run, and of a device of it.    lr: for 1,024 images.    warmup: epochs.
  end_decay: of weights, at the end, times that at the start.    layer_decay, drop_path: of the network.
  momentum: of the teacher at first.    centering, patch_out_dim: of the heads, with their outputs and widths.
  """
  epochs: int
  batch_size: int
  group: int
  lr: float
  warmup: int
  end_decay: float
  layer_decay: float
  drop_path: float
  momentum: float
  centering: s.Centering
  out_dim: int
  bottleneck_dim: int
  patch_out_dim: int
  local_px: int


_SHORT = Size(100, 2048, 64, 4e-3, 10, 10., .9, .3, .992, s.Centering.MEAN, 65_536, 256, 0, 96)
_LONG = Size(500, 3072, 32, 2e-4, 80, 5., 1., .4, .994, s.Centering.SINKHORN, 131_072, 384, 131_072, 98)
_OWN = _SHORT._replace(drop_path=.1, local_px=98)
_SIXTEEN = _SHORT._replace(drop_path=.1)
SIZES = {'L/16': _SHORT, 'S/16': _SIXTEEN, 'B/16': _SIXTEEN, 'S/14': _OWN, 'B/14': _OWN,
         'L/14': _LONG, 'g/14': _LONG._replace(group=12)}


def _model(name: str, size: Size) -> s.ViT:
  model = sizes.model('DINOv2-g/14' if name == 'g/14' else name)
  assert isinstance(model, s.ViT), model
  model.gelu, model.drop_path, model.drop_path_even = s.Gelu.EXACT, size.drop_path, True
  model.init, model.block.layer_scale = s.Init.DINOV2, 1e-5
  model.positions = s.Learned(resize=s.PositionResize.BICUBIC_OFFSET)  # local crops see fewer positions
  if name == 'L/14':  # from scratch; the published L/14 is distilled, with a plain MLP
    model.mlp = s.SwiGlu(sizes.swiglu_hidden(model.width))
  return model


def get_config(arguments: str = '') -> s.Config:
  """The run of L/16, S/16, B/16, S/14, B/14, L/14 or g/14."""
  given = s.parse_arg(arguments, size=tuple(SIZES))
  size, model = SIZES[given['size']], _model(given['size'], SIZES[given['size']])
  lowest = size.layer_decay ** (model.depth + 1)  # the mask token counts to the first layer
  return s.Config(
      name=f'dinov2 {given["size"]}', length=f'{size.epochs * EPOCH} steps', batch_size=size.batch_size,
      image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True,
              views=s.Views(on=True, num_local=8, global_area=(.32, 1.), local_area=(.05, .32), local_px=size.local_px,
                            blur=(0., .9, .5), solarize=(0., .2, 0.), grayscale=.2,
                            jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
              interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Dinov2(
          dino_weight=1., local_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=2, mask_share=.5,
          mask_ratio=(.1, .5),
          group=size.group, out_dim=size.out_dim, hidden_dim=2048, bottleneck_dim=size.bottleneck_dim,
          norm_last_layer=False, patch_out_dim=size.patch_out_dim, patch_bottleneck_dim=256, student_temperature=.1,
          teacher_temperature=s.Ramp(.04, .07, until=f'{30 * EPOCH - 1} steps', curve=s.Curve.LINEAR),
          momentum=s.Ramp(size.momentum, 1.), centering=size.centering, center_momentum=.9),
      optimizer=s.AdamW(
          lr=size.lr * (size.batch_size / 1024) ** .5, b1=.9, b2=.999, weight_decay=.04,
          weight_decay_ramp=s.Ramp(1., size.end_decay), clip_norm=3.,
          clip_parts=HEADS if size.patch_out_dim else HEADS[:1], layer_decay=size.layer_decay,
          weight_decay_mask=('.*/kernel', 'backbone/cls', 'backbone/positions', 'mask_token',
                             '.*projector/prototypes/norm'),
          schedule=s.Schedule(s.Decay.COSINE, warmup=f'{size.warmup * EPOCH} steps', warmup_form=s.Warmup.LINSPACE,
                              end_lr=1e-6),
          rules=(s.PathRule('backbone/stem/.*', lr=.2), s.PathRule('mask_token', lr=lowest),
                 s.PathRule('.*projector/prototypes/.*', lr=s.Ramp(0., 1., begin=f'{EPOCH} steps',
                                                                   until=f'{EPOCH} steps')))),
      evals={'knn': s.Knn(every=f'{20 * EPOCH} steps', views=('teacher',)),
             'health': s.Health(every=f'{EPOCH} steps', images=4096, min_rank=2., views=('teacher',))},
      checkpoints=s.Checkpoints(every=f'{5 * EPOCH} steps'))
