"""Fine-tunes an LV-ViT of token_label_i1k at a higher resolution, with the same label maps.

Data:     as token_label_i1k.py, with its label maps.
Source:   zihangJiang/TokenLabeling@9dbfd59, README.md: S at 384 px with batch 512, a constant rate of 5e-6 after 5
          epochs of warm-up, decay 1e-8, stochastic depth and augmentation as in training, no average. It gives no
          command for M at 384 and 448 px and L at 448 and 512 px; they are done likewise.
          Its command leaves the length at the program's default of 300 epochs; here it is 30, which sail-sg/volo gives
          for the same rate, decay and batch. Positions are resized bicubically, as there.
Run:      python -m vit_jax.main --config=configs/token_label_finetune.py:L,px=448 --config.init_from=runs/lvvit_l
          --config.objective.maps=maps --config.objective.map_grid=18,18 --workdir=runs/lvvit_l_448
Plan:     python -m vit_jax.main --job=plan --config=configs/token_label_finetune.py:L,px=448,mesh=v3:8x8
          --topology=v3:8x8
Expected: top-1 84.4 % (S at 384 px), 85.4 and 85.5 % (M at 384 and 448 px), 86.2 and 86.4 % (L at 448 and 512 px), by
          its README. Not run here.
"""
from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import token_label

MESHES = {'v3:8x8': layout.Placement(), 'v3:16x16': layout.Placement(), 'v5e:8x8': layout.Placement()}


def get_config(arguments: str = '') -> s.Config:
  """The run of S, M or L; px=384|448|512, mesh=…."""
  given = s.parse_arg(arguments, size=tuple(token_label.FINE_TUNED), px=('', '384', '448', '512'), mesh=('',))
  size = given['size']
  px = int(given['px'] or token_label.FINE_TUNED[size][0])
  if px not in token_label.FINE_TUNED[size]:
    raise UserError(f'px: expected one of {", ".join(map(str, token_label.FINE_TUNED[size]))} for LV-ViT-{size}, got '
                    f'{px}. Set another side with --config.image_px=SIDE,SIDE.')
  return layout.place(token_label.finetune(size, px), given['mesh'], MESHES)
