"""The ViT paper's ResNets (BiT) and hybrids on JFT-300M: what ViT is compared with in its scaling study.

Data:     JFT-300M: 303 M images, 18,291 classes, several an image (data.max_labels). It is Google's own: point
          --config.data.source at your data, and set data.num_examples and data.num_classes to match.
Source:   arXiv 2010.11929, Table 3 (length and rate by model; Adam for ResNets too, decay 0.1, batch 4,096, warm-up
          10,000, linear decay; no clipping, which its caption has for ImageNet alone). Hybrids have the hidden layer of
          section 3.1 in their heads, ResNets a linear one. Sigmoid loss and head bias -10 as in the released code.
Run:      python -m vit_jax.main --config=configs/rivals_jft.py:R50+B/16,mesh=v3:16x16 --workdir=runs/r50_b16_jft
          epochs=14 trains R50+L/16 for as long as its second row.
Plan:     python -m vit_jax.main --job=plan --config=configs/rivals_jft.py:R50+B/16,mesh=v3:16x16 --topology=v3:16x16
Expected: ImageNet after fine-tuning, 7 epochs (Table 6): R50+B/32 84.90 %, R50+B/16 85.58 %, R50+L/32 85.68 %, R50+L/16
          86.60 % (14 epochs: 87.12 %), R50x1 77.54 %, R152x2 84.97 %. Not run here.
"""
from vit_jax.config import layout
from vit_jax.config import schema as s
from vit_jax.recipes import pretrain

RATES = {  # Table 3
    'R50+B/16': 8e-4, 'R50+B/32': 8e-4, 'R50+L/32': 2e-4, 'R50+L/16': 4e-4, 'BiT-R50x1': 1e-3, 'BiT-R50x2': 1e-3,
    'BiT-R101x1': 8e-4, 'BiT-R152x1': 6e-4, 'BiT-R152x2': 6e-4}
MESHES = {'v3:8x8': layout.Placement(), 'v3:16x16': layout.Placement(fsdp=8), 'v5e:8x8': layout.Placement()}


def get_config(arguments: str = '') -> s.Config:
  """The run: model; epochs=7|14 mesh=…."""
  given = s.parse_arg(arguments, model=tuple(RATES), epochs=('7', '14'), mesh=('',))
  model = given['model']
  return pretrain.jft(f'{model} jft', model, epochs=int(given['epochs']), lr=RATES[model],
                      arguments=f'mesh={given["mesh"]}', meshes=MESHES)
