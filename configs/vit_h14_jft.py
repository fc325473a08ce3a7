"""ViT-H/14 pre-trained on JFT-300M for 14 epochs: the H/14 column of Table 2 of the ViT paper.

Data:     JFT-300M, which is internal to Google; vit_paper.py has what to set for other data.
Source:   arXiv 2010.11929, Table 3 (lr 3e-4, decay 0.1, linear, dropout 0; no clipping) and section 3.1: vit_paper.py.
Differs:  As vit_paper.py.
Run:      python -m vit_jax.main --config=configs/vit_h14_jft.py --workdir=runs/vit_h14_jft
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_h14_jft.py --topology=v3:16x16
          Compiled without the hardware, not measured on a TPU (benchmarks/plans.sh). Times in ms; core-days of the
          steps without collectives, and with all of them.
          Quick: programs of 2 and 4 blocks, extended to all blocks.
          topology   layout          GiB    step   collectives  core-days  with   made
          v3:16x16   data=64 fsdp=8  3.88   212.2  48.8         1,302      1,602  2026-11-23, quick
          v4:4x4x8   data=16 fsdp=8  13.17  237.4  38.7         729        847    2026-11-23, quick
          v5e:16x16  data=32 fsdp=8  7.10   147.0  38.8         451        570    2026-11-23, quick
Expected: the paper reports 88.55 % on ImageNet after fine-tuning at 518 px, and 2.5k TPUv3-core-days. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  changes = {'name': 'vit_h14_jft', 'model.init': s.Init.VISION_TRANSFORMER}
  return s.replaced(files.load('vit_paper:H/14,jft', []), changes)
