"""Fine-tunes an LV-ViT of token_label_i1k at a higher resolution, with the same label maps.

Data:     as token_label_i1k.py, with its label maps.
Source:   zihangJiang/TokenLabeling@9dbfd59, README.md: S at 384 px with batch 512, a constant rate of 5e-6 after 5
          epochs of warm-up, decay 1e-8, stochastic depth and augmentation as in training, no average. It has no
          command for M at 384 and 448 px and L at 448 and 512 px; these are trained likewise.
          Its command leaves the length at the program's default of 300 epochs; here it is 30, which sail-sg/volo gives
          for the same rate, decay and batch. Positions are resized bicubically, as there.
Differs:  30 epochs, where the published command leaves the default of 300. Commands for M and L are not published; they
          are trained as S. Maps, tokens and RandAugment are as in token_label_i1k.py.
Run:      python -m vit_jax.main --config=configs/token_label_finetune.py:L,px=448 --config.init_from=runs/lvvit_l
          --config.objective.maps=maps --config.objective.map_grid=18,18 --workdir=runs/lvvit_l_448
Plan:     python -m vit_jax.main --job=plan --config=configs/token_label_finetune.py:L,px=448
          --config.model.dtype=bfloat16
          --topology=v3:8x8
Expected: top-1 84.4 % (S at 384 px), 85.4 and 85.5 % (M at 384 and 448 px), 86.2 and 86.4 % (L at 448 and 512 px), by
          its README. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

SIDES = {'S': (384,), 'M': (384, 448), 'L': (448, 512)}  # px; README.md
CROP = {'S': .9, 'M': 1., 'L': 1.}  # share of the short side that evaluation shows: tlt/models/lvvit.py


def get_config(arguments: str = '') -> s.Config:
  """The run of S, M or L; px=384|448|512."""
  given = s.parse_arg(arguments, size=tuple(SIDES), px=('', '384', '448', '512'))
  size = given['size']
  px = int(given['px'] or SIDES[size][0])
  if px not in SIDES[size]:
    raise UserError(f'px: expected one of {", ".join(map(str, SIDES[size]))} for LV-ViT-{size}, got {px}. Set another '
                    'side with --config.image_px=SIDE,SIDE.')
  return s.replaced(files.load(f'token_label_i1k:{size}', []), {
      'name': f'token_label finetune LV-ViT-{size} {px} px', 'length': '30 epochs', 'batch_size': 512,
      'image_px': (px, px), 'data.recipe.eval_resize_px': int(px / CROP[size]), 'objective.mix_group': 64,
      'optimizer': s.AdamW(lr=5e-6, b1=.9, b2=.999, weight_decay=1e-8, clip_norm=0.,
                           schedule=s.Schedule(s.Decay.CONSTANT, warmup='5 epochs')),
      'train': s.Train(), 'evals': {'val': s.TopK(every='5 epochs')}})
