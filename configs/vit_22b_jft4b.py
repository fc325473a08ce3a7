"""ViT-22B pre-trained on JFT-4B for three epochs: parallel attention and MLP, normalized queries and keys.

Data:     JFT-4B: about 4 G images, about 30,000 classes, several labels per image (data.max_labels). It is internal to
          Google: point --config.data.source at your data, and set data.num_examples and data.num_classes to match.
Source:   arXiv 2302.05442, Table 1 and section 3: batch 65,536, 177,000 steps, lr 1e-3, reciprocal square root, warm-up
          10,000 and cooldown 30,000 steps; decay 0.03, of the head 3; sigmoid loss, attention pooling. Optimizer,
          timescale and clipping as in Scaling ViT (vit_g14_jft3b.py), which its recipe extends. The numbers of section
          3 were not checked again. The paper's model has LayerNorm without bias and centering; ours has both.
Differs:  LayerNorm has bias and centering; the paper's has neither. Not stated by the paper and chosen here: optimizer,
          timescale, clipping.
Run:      python -m vit_jax.main --config=configs/vit_22b_jft4b.py --workdir=runs/vit_22b_jft4b
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_22b_jft4b.py --topology=v4:8x8x8
          Compiled without the hardware, not measured on a TPU (benchmarks/plans.sh). Times in ms; core-days of the
          steps without collectives, and with all of them.
          topology  layout          GiB    step      collectives  core-days  with    made
          v4:8x8x8  data=8 fsdp=64  17.89  25,175.7  2,685.1      52,813     58,446  2026-11-22
Expected: the paper reports 89.51 % on ImageNet with a linear probe on frozen features. Not run here.
"""
from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  model = sizes.published('ViT-22B/14')
  model.dtype, model.init = s.DType.BF16, s.Init.VISION_TRANSFORMER
  return s.replaced(files.load('vit_g14_jft3b', []), {
      'name': 'vit_22b_jft4b', 'length': '177_000 steps', 'batch_size': 65_536, 'model': model,
      'data.source': 'folder:JFT-4B', 'data.num_examples': 4_000_000_000, 'data.num_classes': 30_000,
      'optimizer.lr': 1e-3, 'optimizer.schedule.cooldown': '30_000 steps',
      'evals': {'test': s.TopK(every='10_000 steps')},
      'checkpoints': s.Checkpoints(every='2_000 steps', keep_every='20_000 steps')})
