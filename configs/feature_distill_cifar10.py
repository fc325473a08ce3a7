"""Feature distillation on CIFAR-10 at 32 px, for one CPU core: a small ViT/8 learns the features of a trained ViT-Ti.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Source:   sizes and rates are our own; network and evaluation are those of `dino_cifar10`.
Differs:  It follows no paper.
Run:      python -m vit_jax.main --config=configs/feature_distill_cifar10.py --workdir=runs/feature_distill
          --config.objective.teacher.weights=FILE
          FILE: a ViT-Ti/16, such as vit_tiny_patch16_224.augreg_in21k_ft_in1k, which sees the images at 96 px.
Plan:     1 device; the teacher has 5.5 M parameters, the student 0.1 M and linear maps to 192 channels; 10,000 images,
          48,000 crops
Expected: 20 nearest neighbors of the student 28.4, 32.2, 34.0, 35.4 and 36.1 % after each fifth (2,000 test images,
          5,000 labeled ones, JPEG copies, one seed) with stored features, which took 76 CPU seconds, and the run 69.
          Without a teacher the same network has 29.0 % by `dino_cifar10`, in several minutes; at initialization 26.4
          to 27.2 %.
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source'] or 'tfds:cifar10'
  recipe = s.Recipe(crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.4, 1.),
                    crop_aspect=(.75, 4 / 3), flip=True, eval_resize_px=32)
  return s.Config(
      name='feature_distill_cifar10', length='48e3 examples', batch_size=64, image_px=(32, 32),
      data=s.Data(source=source, train_split='train[:20%]', recipe=recipe),
      model=s.ViT(patch=8, width=64, depth=3, heads=4, mlp=s.Mlp(128), pool=s.Mean()),
      objective=s.FeatureDistill(s.FeatureTeacher(px=96), s.FeatureDistance.COSINE, pooled_weight=1., patch_weight=1.),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(cpu_threads=2),
      evals={'knn': s.Knn(every='20 %', views=('student',), train_split='train[:10%]', split='test[:20%]',
                          batch_size=500),
             'health': s.Health(every='20 %', images=1000, min_rank=2., views=('student',))},
      checkpoints=s.Checkpoints(every='20 %'))
