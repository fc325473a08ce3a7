"""The networks of the ViT paper's scaling study on JFT-300M: ResNets (BiT) and hybrids, the rivals, and all ViTs.

Data:     JFT-300M: 303 M images, 18,291 classes, several labels per image (data.max_labels). It is internal to Google:
          point --config.data.source at your data, and set data.num_examples and data.num_classes to match.
Source:   arXiv 2010.11929, Table 3, as vit_paper.py has it. The studies take their runs from there.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/rivals_jft.py:R50+B/16 --workdir=runs/r50_b16_jft
          epochs=14 trains R50+L/16 for as long as its second row.
Plan:     python -m vit_jax.main --job=plan --config=configs/rivals_jft.py:R50+B/16 --topology=v3:16x16
Expected: ImageNet after fine-tuning, 7 epochs (Table 6): R50+B/32 84.90 %, R50+B/16 85.58 %, R50+L/32 85.68 %, R50+L/16
          86.60 % (14 epochs: 87.12 %), R50x1 77.54 %, R152x2 84.97 %. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s

MODELS = ('R50+B/16', 'R50+B/32', 'R50+L/32', 'R50+L/16', 'BiT-R50x1', 'BiT-R50x2', 'BiT-R101x1', 'BiT-R152x1',
          'BiT-R152x2', 'BiT-R200x3', 'B/32', 'B/16', 'L/32', 'L/16', 'H/14')


def get_config(arguments: str = '') -> s.Config:
  """The run: model; epochs=7|14."""
  given = s.parse_arg(arguments, model=MODELS, epochs=('7', '14'))
  return files.load(f'vit_paper:{given["model"]},jft,epochs={given["epochs"]}', [])
