"""ViT-B, L or H from scratch on ImageNet-1k as in the MAE paper: the supervised baseline of pre-training.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images of 1,000 classes.
Source:   arXiv 2111.06377, Appendix A.2 (from scratch): AdamW 0.9/0.95, 1e-4 for 256 images, batch 4,096, decay 0.3, 20
          epochs of warm-up, 300 epochs (L and H 200), RandAugment (9, 0.5), smoothing 0.1, mixup 0.8 or cutmix 1,
          stochastic depth 0.1 (L and H 0.2), moving average 0.9999. For B, mmpretrain's
          vit-base-p16_pt-32xb128-mae_in1k-224.py has the same numbers; those of L and H were not checked again.
          timm's conventions, as deit_b16_i1k.py. Initialization is that of the authors' fine-tuning program
          (facebookresearch/mae main_finetune.py) without weights, which is timm 0.3.2's; the paper does not state it.
Differs:  The authors published no program for it. Mixing is drawn for every 128 images, as on each device of
          mmpretrain's file.
Run:      python -m vit_jax.main --config=configs/mae_scratch_i1k.py --workdir=runs/mae_scratch
          --config.model.dtype=bfloat16
          size=L/16 or size=H/14 trains a larger model.
Plan:     python -m vit_jax.main --job=plan --config=configs/mae_scratch_i1k.py --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: the paper reports top-1 82.3 % for B/16, 82.6 % for L/16 and 83.1 % for H/14, of averaged weights. Not run
          here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run of `size=B/16|L/16|H/14`."""
  given = s.parse_arg(arguments, size=('B/16', 'L/16', 'H/14'))
  length, drop_path = ('300 epochs', .1) if given['size'] == 'B/16' else ('200 epochs', .2)
  model = sizes.vit(given['size'])
  model.gelu, model.drop_path = s.Gelu.EXACT, drop_path
  model.init = s.Init.DEIT  # main_finetune.py without --finetune
  return s.replaced(files.load('deit_b16_i1k', []), {
      'name': f'mae_scratch {given["size"]}', 'length': length, 'batch_size': 4096, 'model': model,
      'data.recipe.erase': s.Recipe().erase, 'data.recipe.mix_group': 128, 'data.recipe.repeats': 1,
      'optimizer': s.AdamW(
          lr=1e-4, base_batch_size=256, b1=.9, weight_decay=.3, b2=.95, clip_norm=0.,
          schedule=s.Schedule(s.Decay.COSINE, warmup='20 epochs', warmup_form=s.Warmup.FROM_ZERO)),
      'train.ema': .9999})
