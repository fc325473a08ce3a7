"""Fine-tunes a ViT-B, L or H that MAE has pre-trained, on ImageNet-1k; or any other ViT, by the same recipe.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images of 1,000 classes.
Source:   arXiv 2111.06377, Table 9, and its code for what goes by size: AdamW, 5e-4 (L and H 1e-3) for 256 images,
          batch 1,024, 100 (50) epochs, layer decay .65 (.75), stochastic depth .1 (.2, .3), RandAugment (9, .5),
          smoothing .1, mixup .8 or cutmix 1, erasing .25; the mean of the patch tokens is normalised by a new norm and
          classified, and the class token stays in the sequence unread. Positions are learned, beginning with the fixed
          ones of pre-training. The new head begins at zero here, at a normal of standard deviation 2e-5 there.
Run:      python -m vit_jax.main --config=configs/mae_finetune.py:L/16 --config.init_from=runs/mae_l16 --workdir=runs/ft
          --config.init_from takes weight files too.
Plan:     python -m vit_jax.main --job=plan --config=configs/mae_finetune.py:L/16,mesh=v3:8x8 --topology=v3:8x8
Expected: the paper reports top-1 83.6 % (B/16), 85.9 % (L/16), 86.9 % (H/14) after 1,600 epochs of pre-training; over
          five seeds 83.57 +- .08 and 85.87 +- .07 (its repository). Not run here.
"""
from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, sizes

MESHES = {'v3:8x8': layout.Placement(), 'v3:16x16': layout.Placement(), 'v5e:8x8': layout.Placement()}


def get_config(arguments: str = '') -> s.Config:
  """The run of B/16, L/16 or H/14; `mesh=v3:8x8` lays it out for that slice."""
  given = s.parse_arg(arguments, size=('L/16', 'B/16', 'H/14'), mesh=('',))
  config = finetune.build(sizes.vit(given['size']), given['size'], 'imagenet2012', protocol='mae', phase='final', px=0)
  return layout.place(config, given['mesh'], MESHES)
