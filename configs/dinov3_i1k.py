"""DINOv3 on ImageNet-1k: DINOv2 with rotary positions, a constant learning rate and Gram anchoring; then larger images.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the evaluations
          during training use labels.
Source:   arXiv 2508.10104, sections 3 to 5 and Appendix C, for its network of 7 billion parameters: 1,000,000 steps of
          4,096 images with 256 and 112 px, learning rate 4e-4 after 100,000 steps of warm-up, weight decay 0.04, layers
          decayed by 0.98, momentum 0.999, Sinkhorn, KoLeo on the first global crop in groups of 16, boxes of positions
          scaled by 0.5 to 2. Gram anchoring with weight 2 from the end of these steps on, for 40,000 more: the Gram
          teacher is the teacher of step 200,000, and becomes the one of then three times, every 10,000 steps.
          stage=highres is the last stage: 10,000 steps at px=512 or 768, and 1.5 times as many for the Gram teacher.
Differs:  S/16, B/16 and L/16 are distilled from that network in the paper; here they are trained by its method, on
          ImageNet-1k, with heads, clipping, rate of patches and crops of `dinov2_i1k:L/14`, and stochastic depth 0.1 (L
          0.4). Not published: temperatures of the teacher (here those of DINOv2, over the warm-up), the law of scaled
          boxes (here uniform in the logarithm, for each pass), the warm-up of the last stage (here 1,000 steps). Images
          of the last stage have one size, in the paper one of five pairs at random. The Gram term is a mean over pairs
          of patches, in the paper a sum. Local and global crops share the last norm.
Run:      python -m vit_jax.main --config=configs/dinov3_i1k.py:L/16 --workdir=runs/dinov3_l16
          --config.model.dtype=bfloat16
          Or S/16, B/16. steps=300000 or 100000 shortens the first stage, and all that is a share of it.
          The last stage, from the teacher of the first one:
          python -m vit_jax.main --config=configs/dinov3_i1k.py:L/16,stage=highres --config.init_from=runs/dinov3_l16
          --config.init_view=teacher --config.model.dtype=bfloat16 --workdir=runs/dinov3_l16_512
          Its Gram teacher has these weights, too, or those of --config.objective.gram.weights=…
Plan:     python -m vit_jax.main --job=plan --config=configs/dinov3_i1k.py:L/16 --topology=v5e:16x16
          --config.model.dtype=bfloat16
Expected: not run here. In the paper's ablation of 7 billion parameters, Gram anchoring takes ADE20k from 50.3 to 53.6
          mIoU, and with the Gram teacher at twice the size to 55.7; ImageNet is 88.2, 88.0 and 88.0 % (linear).
"""
import dataclasses

from vit_jax.config import schema as s
from vit_jax.recipes import sizes

DROP_PATH = {'S/16': .1, 'B/16': .1, 'L/16': .4}


def get_config(arguments: str = '') -> s.Config:
  """The run of S/16, B/16 or L/16, on stage=pretrain or highres, with steps=… before Gram anchoring, or at px=…."""
  given = s.parse_arg(arguments, size=tuple(DROP_PATH), stage=('pretrain', 'highres'),
                      steps=('1000000', '300000', '100000'), px=('512', '768'))
  name, steps, is_high = given['size'], int(given['steps']), given['stage'] == 'highres'
  px, scale = (int(given['px']), 1.5) if is_high else (256, 2.)
  model = sizes.model(f'DINOv3-{name}')
  assert isinstance(model, s.ViT), model
  model.drop_path, model.drop_path_even, model.init = DROP_PATH[name], True, s.Init.DINOV2
  model.positions = s.Rotary(base=100., coordinates=s.UnitInterval(rescale=2.))
  warmup = '1_000 steps' if is_high else f'{steps // 10} steps'
  gram = s.Gram(weight=2., start='0 steps' if is_high else f'{steps} steps',
                step='0 steps' if is_high else f'{steps // 5} steps')
  if not is_high:
    gram = dataclasses.replace(gram, refresh=f'{steps // 100} steps', refreshes=3)
  still = (s.PathRule('.*projector/prototypes/.*', lr=s.Ramp(0., 1., begin='1_250 steps', until='1_250 steps')),)
  return s.Config(
      name=f'dinov3 {name} {given["stage"]}', length='10_000 steps' if is_high else f'{steps * 26 // 25} steps',
      batch_size=4096, image_px=(px, px),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True,
              views=s.Views(on=True, num_local=8, global_area=(.32, 1.), local_area=(.05, .32), local_px=112,
                            blur=(0., .9, .5), solarize=(0., .2, 0.), grayscale=.2, gram_scale=scale,
                            jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
              interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=px,
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Dinov3(
          dino_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=1, mask_share=.5, mask_ratio=(.1, .5), group=16,
          out_dim=131_072, hidden_dim=2048, bottleneck_dim=384, norm_last_layer=False, patch_out_dim=131_072,
          patch_bottleneck_dim=256, student_temperature=.1,
          teacher_temperature=s.Ramp(.07 if is_high else .04, .07, until=warmup, curve=s.Curve.LINEAR),
          momentum=s.Ramp(.999, .999), centering=s.Centering.SINKHORN, center_momentum=.9, gram=gram),
      optimizer=s.AdamW(
          lr=4e-4, b1=.9, b2=.999, weight_decay=.04, clip_norm=3., clip_parts=('projector/.*', 'patch_projector/.*'),
          layer_decay=.98,
          weight_decay_mask=('.*/kernel', 'backbone/cls', 'backbone/registers', 'mask_token',
                             '.*projector/prototypes/norm'),
          schedule=s.Schedule(s.Decay.CONSTANT, warmup=warmup),
          rules=(s.PathRule('backbone/stem/.*', lr=.2),
                 s.PathRule('mask_token', lr=.98 ** (model.depth + 1)),  # it counts to the first layer
                 *(() if is_high else still))),
      evals={'knn': s.Knn(every='5 %', views=('teacher',)),
             'health': s.Health(every='1 %', images=4096, min_rank=2., views=('teacher',))},
      checkpoints=s.Checkpoints(every='1_000 steps'))
