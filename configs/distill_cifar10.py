"""Distillation on CIFAR-10 at 32 px with 1,000 labels, for one CPU core: a small ViT/4 and a trained ViT-Ti.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Teacher and `alone` get the first 1,000 training images with
          labels; the distilled student all 50,000, with the teacher's outputs.
Source:   arXiv 2012.12877, eq. 2 (soft), with all weight on the teacher; sizes and rates are our own.
Differs:  It is a small form of the paper's method, with sizes and rates of this project.
Run:      python -m vit_jax.main --config=configs/distill_cifar10.py:teacher --config.init_from=FILE
          --workdir=runs/teacher
          python -m vit_jax.main --config=configs/distill_cifar10.py --config.objective.teacher.weights=runs/teacher
          --workdir=runs/taught
          python -m vit_jax.main --config=configs/distill_cifar10.py:alone --workdir=runs/alone
          FILE: a ViT-Ti/16, such as vit_tiny_patch16_224.augreg_in21k_ft_in1k. Its patch kernel is resized to 8 px and
          its positions to 4 x 4, and it is fine-tuned on the same 1,000 labels. `alone` has no teacher.
Plan:     1 device; the teacher has 5.5 M parameters, the student 0.1 M; 3, 8 and 11 minutes of one CPU core
Expected: of 2,000 test images (JPEG copies) the teacher has 69.2 % after 3 CPU minutes; the distilled student 37.9,
          47.9, 51.5 and 53.4 % after each quarter of 8 CPU minutes; the student alone 36.9, 36.3, 37.8 and 38.1 % after
          each quarter of 11. With the same 2,000 labeled images for both and no others, distillation did not help:
          45.0 % after 30 epochs with a teacher of 63 %, while the student alone has 48.5 % after 70 epochs in less
          time.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run of `taught` (the default), `teacher` or `alone`."""
  given = s.parse_arg(arguments, part=('taught', 'teacher', 'alone'), source=())
  part = given['part']
  teacher = sizes.vit('Ti/16')
  teacher.patch, teacher.gelu = 8, s.Gelu.EXACT
  student = s.ViT(patch=4, width=64, depth=3, heads=4, mlp=s.Mlp(128), pool=s.Mean())
  taught = s.Distill(s.Teacher(model=teacher), s.DistillType.SOFT, weight=1., temperature=2., label_smoothing=0.)
  length = {'teacher': '15 epochs', 'taught': '1800 steps', 'alone': '7000 steps'}[part]
  own = part == 'teacher'
  return s.Config(
      name=f'distill_cifar10 {part}', length=length, batch_size=32 if own else 64, image_px=(32, 32),
      data=s.Data(source=given['source'] or 'tfds:cifar10', train_split='train' if part == 'taught' else 'train[:2%]',
                  recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=4)),
      model=teacher if own else student,
      objective=taught if part == 'taught' else s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=2e-4 if own else 2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(cpu_threads=2),
      evals={'test': s.TopK(every='25 %', split='test[:20%]', batch_size=500)},
      checkpoints=s.Checkpoints(every='25 %'))
