"""DINOv3 on ImageNet-1k: DINOv2 with rotary positions; then Gram anchoring, and larger images, as stages of their own.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the evaluations
          during training use labels.
Source:   arXiv 2508.10104, and its program, facebookresearch/dinov3@6876159, `configs/train/`. L/16 is
          `vitl_im1k_lin834.yaml`: 125,000 steps of 2,048 images of 224 and 96 px, 4e-3 times the root of batch / 1,024
          after 12,500 steps of warm-up, weight decay 0.04 to 0.4, layers decayed by 0.9, momentum 0.992 to 1, Sinkhorn,
          two heads of 65,536 and 256, no registers, and no Gram anchoring. The other stages are `gram_anchor` and
          `high_res_adapt` of its network of 7 billion parameters, with these heads: no flips, layers decayed by 0.98,
          clipping at 30, momentum 0.999, pairs with local crops at half their weight, KoLeo in groups of 16, boxes of
          positions scaled by 0.5 to 2. stage=gram is 40,000 steps of 4,096 images of 256 and 112 px at 2.4e-4, with
          Gram anchoring of weight 2 to crops of 512 px without changes of color; the Gram teacher becomes the teacher
          three times, every 10,000 steps. stage=highres is 30,000 steps at px=512 or 768, at a rate that rises in
          10,000 of them, by a cosine, to 1e-4, with weight 1.5 and a Gram teacher that stays and sees 1.5 times the
          size.
Differs:  A head's last layer has directions and lengths, which start at 1; there it is a matrix from N(0, 0.02). The
          class token starts at N(0, 1e-6), there at N(0, 0.02). Drop path and blur differ as in dinov2_i1k.py. S/16 and
          B/16 are not among its configs: they have the numbers of L/16 except stochastic depth 0.1. Later stages begin
          with the teacher and new moments, there with student and optimizer, and the rate of stage=gram rises in 1,000
          steps. Their batch is the paper's. Weight 2 of the Gram term and the half weight of local crops apply at once,
          there after 1,000 steps of a cosine. The first Gram teacher is the network that the stage begins with, in the
          paper that of step 200,000. stage=highres has one pair of crop sizes, there five at random.
Run:      python -m vit_jax.main --config=configs/dinov3_i1k.py:L/16 --workdir=runs/dinov3_l16
          --config.model.dtype=bfloat16
          Or S/16, B/16. The next stage begins with the teacher of the one before:
          python -m vit_jax.main --config=configs/dinov3_i1k.py:L/16,stage=gram --config.init_from=runs/dinov3_l16
          --config.init_view=teacher --config.model.dtype=bfloat16 --workdir=runs/dinov3_l16_gram
          So does stage=highres. Their Gram teacher has these weights, too, or --config.objective.gram.weights=…
Plan:     python -m vit_jax.main --job=plan --config=configs/dinov3_i1k.py:L/16 --topology=v5e:16x16
          --config.model.dtype=bfloat16
Expected: the program's config of L/16 states 82.2 % (k-NN) and 83.3 % (linear). Not run here. In the paper's ablation
          of 7 billion parameters, Gram anchoring takes ADE20k from 50.3 to 53.6 mIoU, and with the Gram teacher at
          twice the size to 55.7; ImageNet is 88.2, 88.0 and 88.0 % (linear).
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

DROP_PATH = {'L/16': .3, 'S/16': .1, 'B/16': .1}
EPOCH = 1250  # steps that the program calls an epoch
RISE = '10_000 steps'  # of the rate of stage=highres


def get_config(arguments: str = '') -> s.Config:
  """The run of L/16, S/16 or B/16, on stage=pretrain, gram or highres, the last one at px=512 or 768."""
  given = s.parse_arg(arguments, size=tuple(DROP_PATH), stage=('pretrain', 'gram', 'highres'), px=('512', '768'))
  name, stage, px = given['size'], given['stage'], int(given['px'])
  model = _model(name, is_first=stage == 'pretrain')
  config = _pretrain(model) if stage == 'pretrain' else _gram(model) if stage == 'gram' else _highres(model, px)
  config.name = f'dinov3 {name} {stage}'
  return config


def _model(name: str, *, is_first: bool) -> s.ViT:
  model = sizes.model(f'DINOv3-{name}')
  assert isinstance(model, s.ViT), model
  model.registers, model.attention.qkv_bias, model.norm.eps = 0, s.QkvBias.ALL, 1e-6
  model.drop_path, model.drop_path_even, model.init = DROP_PATH[name], True, s.Init.DINOV2
  model.positions = s.Rotary(base=100., coordinates=s.UnitInterval(rescale=1. if is_first else 2.))
  return model


def _data(px: int, local_px: int, *, flip: bool, gram_scale: float = 1.) -> s.Data:
  return s.Data(
      source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
      recipe=s.Recipe(
          exif_orientation=s.Exif.FALSE, crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=flip,
          views=s.Views(on=True, num_local=8, global_area=(.32, 1.), local_area=(.05, .32), local_px=local_px,
                        blur=(0., .9, .5), solarize=(0., .2, 0.), grayscale=.2, gram_scale=gram_scale,
                        gram_colors=gram_scale == 1., jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
          interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256 if px == 224 else px,
          eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225)))


def _optimizer(model: s.ViT, *, lr: float, b2: float, clip: float, layer_decay: float, schedule: s.Schedule,
               rise: str = '', decay_ramp: s.Ramp | None = None, still: str = '') -> s.AdamW:
  """AdamW of the program. `rise`: the rate rises for so long by a cosine. `still`: the last layers wait for so long."""
  def factor(value: float) -> float | s.Ramp:
    return s.Ramp(0., value, until=rise) if rise else value

  lowest = layer_decay ** (model.depth + 1)  # the mask token counts to the first layer
  rules = [s.PathRule('backbone/stem/.*', lr=factor(.2)), s.PathRule('mask_token', lr=factor(lowest))]
  if still:
    rules.append(s.PathRule('.*projector/prototypes/.*', lr=s.Ramp(0., 1., begin=still, until=still)))
  if rise:
    rules.append(s.PathRule('.*', lr=factor(1.)))
  return s.AdamW(
      lr=lr, b1=.9, b2=b2, weight_decay=.04, weight_decay_ramp=decay_ramp or s.Ramp(), clip_norm=clip,
      clip_parts=('projector/.*', 'patch_projector/.*'), layer_decay=layer_decay,
      weight_decay_mask=('.*/kernel', 'backbone/cls', 'mask_token', '.*projector/prototypes/norm'),
      schedule=schedule, rules=tuple(rules))


def _evals(every: str) -> dict[str, s.Eval]:
  return {'knn': s.Knn(every=every, views=('teacher',)),
          'health': s.Health(every='1 %', images=4096, min_rank=2., views=('teacher',))}


def _pretrain(model: s.ViT) -> s.Config:
  """`vitl_im1k_lin834.yaml`."""
  return s.Config(
      name='', length=f'{100 * EPOCH} steps', batch_size=2048, image_px=(224, 224), data=_data(224, 96, flip=True),
      model=model,
      objective=s.Dinov2(
          dino_weight=1., local_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=2, mask_share=.5,
          mask_ratio=(.1, .5), group=64, out_dim=65_536, hidden_dim=2048, bottleneck_dim=256, norm_last_layer=False,
          patch_out_dim=65_536, patch_bottleneck_dim=256, student_temperature=.1,
          teacher_temperature=s.Ramp(.04, .07, until=f'{30 * EPOCH - 1} steps', curve=s.Curve.LINEAR),
          momentum=s.Ramp(.992, 1.), centering=s.Centering.SINKHORN, center_momentum=.9),
      optimizer=_optimizer(
          model, lr=4e-3 * 2 ** .5, b2=.999, clip=3., layer_decay=.9, decay_ramp=s.Ramp(1., 10.),
          still=f'{EPOCH} steps', schedule=s.Schedule(s.Decay.COSINE, warmup=f'{10 * EPOCH} steps',
                                                      warmup_form=s.Warmup.LINSPACE, end_lr=1e-6)),
      evals=_evals(f'{20 * EPOCH} steps'), checkpoints=s.Checkpoints(every='3_750 steps'))


def _anchored(gram: s.Gram) -> s.Dinov3:
  return s.Dinov3(
      dino_weight=1., local_weight=.5, ibot_weight=1., koleo_weight=.1, koleo_crops=2, mask_share=.5,
      mask_ratio=(.1, .5), group=16, out_dim=65_536, hidden_dim=2048, bottleneck_dim=256, norm_last_layer=False,
      patch_out_dim=65_536, patch_bottleneck_dim=256, student_temperature=.1, teacher_temperature=s.Ramp(.07, .07),
      momentum=s.Ramp(.999, .999), centering=s.Centering.SINKHORN, center_momentum=.9, gram=gram)


def _gram(model: s.ViT) -> s.Config:
  """`dinov3_vit7b16_gram_anchor.yaml`, from its 1,000 epochs on."""
  return s.Config(
      name='', length='40_000 steps', batch_size=4096, image_px=(256, 256),
      data=_data(256, 112, flip=False, gram_scale=2.), model=model,
      objective=_anchored(s.Gram(weight=2., start='0 steps', step='0 steps', refresh='10_000 steps', refreshes=3)),
      optimizer=_optimizer(model, lr=2.4e-4, b2=.99, clip=30., layer_decay=.98,
                           schedule=s.Schedule(s.Decay.CONSTANT, warmup='1_000 steps')),
      evals=_evals('5_000 steps'), checkpoints=s.Checkpoints(every='1_000 steps'))


def _highres(model: s.ViT, px: int) -> s.Config:
  """`dinov3_vit7b16_high_res_adapt.yaml`, at one of its sizes."""
  return s.Config(
      name='', length='30_000 steps', batch_size=4096, image_px=(px, px),
      data=_data(px, 112, flip=False, gram_scale=1.5), model=model,
      objective=_anchored(s.Gram(weight=1.5, start='0 steps', step='0 steps')),
      optimizer=_optimizer(model, lr=1e-4, b2=.99, clip=30., layer_decay=.98, rise=RISE,
                           schedule=s.Schedule(s.Decay.CONSTANT, warmup='0 steps')),
      evals=_evals('5_000 steps'), checkpoints=s.Checkpoints(every='1_000 steps'))
