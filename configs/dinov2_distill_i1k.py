"""Distillation of DINOv2 on ImageNet-1k: a frozen g/14 with its heads teaches S/14, B/14 or L/14 by the same losses.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the evaluations
          during training use labels.
Source:   arXiv 2304.07193, section 5 ("Model distillation") and Table 16: 625,000 steps of 2,048 images, learning rate
          1e-3 after 100,000 steps of warm-up, decay 0.04 to 0.2, no stochastic depth, nothing masked, an EMA of the
          student by momentum 0.994 to 1, which is the result. The rest is that of `dinov2_i1k:g/14`.
Differs:  The program is not public. What the paper does not state is as in `dinov3_vitl16_lvd1689m_distilled.yaml` of
          facebookresearch/dinov3: iBOT on 10 to 50 % of the patches of half of the global crops, with no patch hidden.
          The paper trains on LVD-142M.
Run:      python -m vit_jax.main --config=configs/dinov2_distill_i1k.py:S/14 --workdir=runs/dinov2_s14
          --config.objective.teacher.weights=runs/dinov2_g14 --config.model.dtype=bfloat16
          Or B/14, L/14. The teacher is a run of `dinov2_i1k` or `dinov3_i1k`, whose own heads teach: their sizes are
          taken from it. `teacher` is then the network to use: --config.init_from=runs/dinov2_s14
          --config.init_view=teacher
Plan:     python -m vit_jax.main --job=plan --config=configs/dinov2_distill_i1k.py:S/14 --topology=v5e:8x8
          --config.model.dtype=bfloat16
Expected: not run here. In the paper, L/14 distilled on LVD-142M has 83.5 and 86.3 % (k-NN, linear), S/14 79.0 and
          81.1 %, B/14 82.1 and 84.5 %.
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

FIRST = 1250  # steps in which the last layers are still, an epoch of the program


def get_config(arguments: str = '') -> s.Config:
  """The run of S/14, B/14 or L/14."""
  name = s.parse_arg(arguments, size=('S/14', 'B/14', 'L/14'))['size']
  model, teacher = sizes.model(f'DINOv2-{name}'), sizes.model('DINOv2-g/14')
  model.init = s.Init.DINOV2
  return s.replaced(files.load('dinov2_i1k:g/14', []), {
      'name': f'dinov2 {name} distilled', 'length': '625_000 steps', 'batch_size': 2048, 'model': model,
      'objective': s.Dinov2Distill(
          teacher=s.FeatureTeacher(model=teacher, mean=(.485, .456, .406), std=(.229, .224, .225)),
          dino_weight=1., local_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=2, mask_share=.5,
          mask_ratio=(.1, .5), group=32, out_dim=131_072, hidden_dim=2048, bottleneck_dim=384, norm_last_layer=False,
          patch_out_dim=131_072, patch_bottleneck_dim=256, student_temperature=.1,
          teacher_temperature=s.Ramp(.04, .07, until=f'{30 * FIRST - 1} steps', curve=s.Curve.LINEAR),
          momentum=s.Ramp(.994, 1.), centering=s.Centering.SINKHORN, center_momentum=.9),
      'optimizer.lr': 1e-3, 'optimizer.schedule.warmup': '100_000 steps',
      'optimizer.weight_decay_mask': ('.*/kernel', 'backbone/cls', 'backbone/positions', '.*projector/prototypes/norm'),
      'optimizer.rules': (s.PathRule('backbone/stem/.*', lr=.2),
                          s.PathRule('.*projector/prototypes/.*', lr=s.Ramp(0., 1., begin=f'{FIRST} steps',
                                                                            until=f'{FIRST} steps'))),
      'evals': {'knn': s.Knn(every='25_000 steps', views=('teacher',)),
                'health': s.Health(every='1_250 steps', images=4096, min_rank=2., views=('teacher',))},
      'checkpoints': s.Checkpoints(every='6_250 steps')})
