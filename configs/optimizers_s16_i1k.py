"""ViT-S/16 on ImageNet-1k with one change of its optimization: an ablation, one run per change.

Data:     TFDS `imagenet2012`, 99 % of train: 1,268,355 images; the other 1 % is `minival`. 1,000 classes.
Source:   the better plain ViT baseline (arXiv 2205.01580; vit_s16_i1k.py), 90 epochs, and the advice of each change's
          paper: Lion a tenth of the rate and ten times the decay (2302.06675, section 5); LAMB as DeiT III
          (2204.07118, for batch 2,048); Adafactor with Adam's settings (2106.04560); adaptive clipping at 0.01
          (2102.06171, for batch 4,096); drops at 30, 60, 80 epochs (1706.02677); the last fifth of a constant rate as
          cooldown, and L2 in Adam's gradient of the size of AdamW's, which are our choices.
Differs:  change=none is vit_s16_i1k.py; all others are choices of this project.
Run:      python -m vit_jax.main --config=configs/optimizers_s16_i1k.py:change=lion --workdir=runs/s16_lion
Expected: 76.5 % for change=none (the paper); the others are the object of the study. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s

WARM = '10_000 steps'
COSINE = s.Schedule(s.Decay.COSINE, warmup=WARM, warmup_form=s.Warmup.FROM_ZERO)
CHANGES: dict[str, s.AdamW | s.Adam | s.Adafactor | s.Lamb | s.Lion] = {
    'none': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1., mu_dtype=s.DType.BF16, schedule=COSINE),
    'adam': s.Adam(lr=1e-3, b1=.9, b2=.999, weight_decay=1e-4, clip_norm=1., schedule=COSINE),
    'adafactor': s.Adafactor(lr=1e-3, b1=.9, b2_cap=.999, weight_decay=.1, clip_norm=1., schedule=COSINE),
    'lamb': s.Lamb(lr=4e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., trust_ratio_mask=('.*/kernel',),
                   schedule=COSINE),
    'lion': s.Lion(lr=1e-4, b1=.9, b2=.99, weight_decay=1., clip_norm=1., schedule=COSINE),
    'agc': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, mu_dtype=s.DType.BF16, schedule=COSINE, clip_norm=0.,
                   clip_adaptive=.01),
    'wsd': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1., mu_dtype=s.DType.BF16, schedule=s.Schedule(
        s.Decay.CONSTANT, warmup=WARM, warmup_form=s.Warmup.FROM_ZERO, cooldown='20 %')),
    'steps': s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1., mu_dtype=s.DType.BF16, schedule=s.Schedule(
        s.Decay.STEPS, warmup=WARM, warmup_form=s.Warmup.FROM_ZERO,
        milestones=('30 epochs', '60 epochs', '80 epochs'), gamma=.1)),
}


def get_config(arguments: str = '') -> s.Config:
  """The run, with `change=NAME`."""
  change = s.parse_arg(arguments, change=tuple(CHANGES))['change']
  return s.replaced(files.load('vit_s16_i1k', []), {
      'name': f's16_{change}', 'optimizer': CHANGES[change],
      'evals': {'val': s.TopK(every='10 epochs', metrics=('ece',)),
                'minival': s.TopK(every='10 epochs', split='train[99%:]')}})
