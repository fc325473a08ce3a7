"""DINOv3 on CIFAR-10 at 32 px with a small ViT/8, for one CPU core: DINOv2 with Gram anchoring and drawn coordinates.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   arXiv 2508.10104 at a small scale: crops and heads of `dinov2_cifar10`; rotary positions whose box is scaled
          by 0.5 to 2, registers, Sinkhorn, a constant learning rate after the warm-up, KoLeo on the first global crop.
          The teacher of a third of the run is the Gram teacher of the last half, at twice the size.
Differs:  It is a small form of the paper's method: 1,024 prototypes in one head, groups of 16 images, 16 patches an
          image, no blur, half the other color changes, momentum 0.99.
Run:      python -m vit_jax.main --config=configs/dinov3_cifar10.py --workdir=runs/dinov3_cifar10
Plan:     1 device, 0.28 M parameters; 48,000 images, minutes of one CPU core.
Expected: 20 nearest neighbors by the teacher 28.9, 29.8, 29.9, 29.9 and 30.0 % after each fifth (2,000 test images,
          5,000 labeled ones, JPEG copies, one seed), in 5 CPU minutes. With --config.objective.gram.start='100 %',
          without Gram anchoring, the last three are 30.1, 30.4 and 30.5 %: so short a run does not need it.
          `dino_cifar10` on the same images has 29.0 %, `dinov2_cifar10` 26.9 %, the networks at initialization 26.4 to
          27.2 %.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source']
  return s.replaced(files.load(f'dino_cifar10:source={source}', []), {
      'name': 'dinov3_cifar10', 'data.recipe.views.gram_scale': 2., 'model.registers': 2,
      'model.positions': s.Rotary(coordinates=s.UnitInterval(rescale=2.)),
      'objective': s.Dinov3(
          dino_weight=1., local_weight=1., ibot_weight=1., koleo_weight=.1, koleo_crops=1, patch_out_dim=0,
          patch_bottleneck_dim=256, mask_share=.5, mask_ratio=(.1, .5), group=16, out_dim=1024, hidden_dim=256,
          bottleneck_dim=64, momentum=s.Ramp(.99, .99), norm_last_layer=True, student_temperature=.1,
          teacher_temperature=s.Ramp(.04, .06, until='30 %', curve=s.Curve.LINEAR), centering=s.Centering.SINKHORN,
          center_momentum=.9, gram=s.Gram(weight=2., start='50 %', step='33 %')),
      'optimizer.weight_decay_ramp': s.Ramp(), 'optimizer.schedule': s.Schedule(s.Decay.CONSTANT, warmup='10 %'),
      'evals': {'knn': s.Knn(every='20 %', views=('teacher',), train_split='train[:10%]', split='test[:20%]',
                             batch_size=500),
                'health': s.Health(every='20 %', images=1000, min_rank=2., views=('teacher',))}})
