"""ViT-L/16 pre-trained on JFT-300M for 14 epochs: the L/16 column of Table 2 of the ViT paper.

Data:     JFT-300M, which is internal to Google; vit_paper.py has what to set for other data.
Source:   arXiv 2010.11929, Table 3 (lr 4e-4, decay 0.1, linear, dropout 0; no clipping) and section 3.1: vit_paper.py.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/vit_l16_jft.py --workdir=runs/vit_l16_jft
          Kernels compute attention and the MLP on the TPUs where they are faster (docs/explanation/layout.md).
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_l16_jft.py --topology=v3:16x16
          Compiled without the hardware, not measured on a TPU (benchmarks/plans.sh). Times in ms; core-days of the
          steps without collectives, and with all of them.
          Quick: programs of 2 and 4 blocks, extended to all blocks. Made with --config.model.attention.kernel=xla.
          topology   layout          GiB   step  collectives  core-days  with  made
          v3:16x16   data=64 fsdp=8  1.72  81.1  25.0         498        651   2026-11-23, quick
          v4:4x4x8   data=16 fsdp=8  5.54  82.0  22.7         252        321   2026-11-22, quick
          v5e:16x16  data=32 fsdp=8  2.87  48.5  22.7         149        218   2026-11-22, quick
Expected: the paper reports 87.76 % on ImageNet after fine-tuning at 512 px, and 0.68k TPUv3-core-days. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  changes = {'name': 'vit_l16_jft', 'model.init': s.Init.VISION_TRANSFORMER}
  return s.replaced(files.load('vit_paper:L/16,jft', []), changes)
