"""DeiT with distillation on ImageNet-1k: a small ViT learns from labels and from a trained network.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images of 1,000 classes.
Source:   arXiv 2012.12877, section 4 and Table 9: as deit_b16_i1k.py, with a distillation token and its own head, which
          learns the teacher's most likely class (teach=hard) with weight 0.5; teach=soft: temperature 3, weight 0.1,
          the teacher's term divided by examples times classes as facebookresearch/deit losses.py divides it, where the
          paper's eq. 2 divides by examples: --config.objective.soft_mean=paper. consistent: arXiv 2106.05237, and
          google-research/big_vision configs/proj/distill/bit_i1k.py: the teacher's probabilities alone, mixup always,
          batch 4,096, 5,000 steps of warm-up, clipping at norm 1, 98 % of train, its crops and evaluation; far longer
          there (--config.length='1200 epochs', the paper up to 9,600).
Differs:  teach=consistent trains a ViT, there a BiT-R50x1 with a learning rate of 0.03: here it is 1e-3, our choice.
          The teacher is a ViT-B/16 unless you set another, in the papers a RegNetY-16GF or a BiT-M R152x2.
Run:      python -m vit_jax.main --config=configs/distill_i1k.py:S/16,teach=hard --config.objective.teacher.weights=FILE
          --workdir=runs/deit_s16_distilled
          Or Ti/16, B/16. The teacher is a ViT-B/16 unless --config.objective.teacher.model.width=… and its
          other settings select another; images are normalized as the teacher expects (objective.teacher.mean, std).
Plan:     python -m vit_jax.main --job=plan --config=configs/distill_i1k.py:S/16 --topology=v3:4x4
          --config.model.dtype=bfloat16
Expected: the repository reports 74.5 % (Ti/16), 81.2 % (S/16), 83.4 % (B/16) with a RegNetY-16GF as the teacher: 2.3,
          1.3 and 1.6 points more than its models without a teacher. Not run here.
"""
import dataclasses

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run of S/16, Ti/16 or B/16; `teach=hard|soft|consistent`."""
  given = s.parse_arg(arguments, size=('S/16', 'Ti/16', 'B/16'), teach=('hard', 'soft', 'consistent'))
  size, teach, teacher = given['size'], given['teach'], sizes.vit('B/16')
  teacher.gelu = s.Gelu.EXACT
  learned = {'hard': s.Distill(s.Teacher(model=teacher), s.DistillType.HARD, weight=.5, label_smoothing=.1),
             'soft': s.Distill(s.Teacher(model=teacher), s.DistillType.SOFT, weight=.1, temperature=3.,
                               label_smoothing=.1, soft_mean=s.SoftMean.CODE),
             'consistent': s.Distill(s.Teacher(model=teacher), s.DistillType.SOFT, weight=1., label_smoothing=0.,
                                     temperature=1.)}[teach]
  config = s.replaced(files.load(f'deit_b16_i1k:{size}', []), {
      'name': f'distill {size} {teach}', 'objective': learned})
  if teach != 'consistent':
    model = sizes.published(f'DeiT-distilled-{size}')
    return s.replaced(config, {'model': dataclasses.replace(model, drop_path=.1, init=s.Init.DEIT)})
  model = dataclasses.replace(sizes.vit(size), gelu=s.Gelu.EXACT, init=s.Init.BIG_VISION)
  return s.replaced(config, {
      'batch_size': 4096, 'model': model, 'data.train_split': 'train[:98%]', 'data.num_examples': 1_255_544,
      'data.recipe': s.Recipe(
          exif_orientation=s.Exif.FALSE, crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW,
          crop_area=(.05, 1.), crop_aspect=(.75, 1.33), flip=True, mixup=1., eval_resize_px=256, eval_area=True,
          truncate=True),
      'optimizer': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.01, clip_norm=1., mu_dtype=s.DType.BF16,
                           schedule=s.Schedule(s.Decay.COSINE, warmup='5_000 steps', warmup_form=s.Warmup.FROM_ZERO))})
