"""Numbers of the papers, to be shown beside those measured here: accuracies in per cent, deviations over runs."""
from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
  """A published number; `std` None where the paper gives none, `text` in place of both where it is no such number."""
  mean: float | None
  std: float | None = None
  text: str = ''

  def __str__(self) -> str:
    if self.mean is None:
      return self.text or '–'
    return f'{self.mean:.2f}' + ('' if self.std is None else f' ± {self.std:.2f}')


TABLE_2 = 'arXiv 2010.11929, Table 2: mean and deviation over three fine-tuning runs'
COLUMNS = ('ViT-H/14 JFT', 'ViT-L/16 JFT', 'ViT-L/16 I21k', 'BiT-L R152x4', 'Noisy Student EfficientNet-L2')
_NONE = Cell(None)
CELLS: dict[str, tuple[Cell, ...]] = {
    'ImageNet': (Cell(88.55, .04), Cell(87.76, .03), Cell(85.30, .02), Cell(87.54, .02), Cell(None, text='88.4/88.5')),
    'ImageNet ReaL': (Cell(90.72, .05), Cell(90.54, .03), Cell(88.62, .05), Cell(90.54), Cell(90.55)),
    'CIFAR-10': (Cell(99.50, .06), Cell(99.42, .03), Cell(99.15, .03), Cell(99.37, .06), _NONE),
    'CIFAR-100': (Cell(94.55, .04), Cell(93.90, .05), Cell(93.25, .05), Cell(93.51, .08), _NONE),
    'Oxford-IIIT Pets': (Cell(97.56, .03), Cell(97.32, .11), Cell(94.67, .15), Cell(96.62, .23), _NONE),
    'Oxford Flowers-102': (Cell(99.68, .02), Cell(99.74, .00), Cell(99.61, .02), Cell(99.63, .03), _NONE),
    'VTAB (19 tasks)': (Cell(77.63, .23), Cell(76.28, .46), Cell(72.72, .21), Cell(76.29, 1.70), _NONE),
    'TPUv3-core-days': (Cell(None, text='2.5k'), Cell(None, text='0.68k'), Cell(None, text='0.23k'),
                        Cell(None, text='9.9k'), Cell(None, text='12.3k')),
}
"""Rows of Table 2 of the ViT paper."""


class Scaled(NamedTuple):
  """A network pre-trained on JFT-300M for some epochs: ImageNet accuracy in % after fine-tuning at 384 px, and cost."""
  model: str
  epochs: int
  imagenet: float
  exaflops: float


TABLE_6 = (
    Scaled('B/32', 7, 80.73, 55), Scaled('B/16', 7, 84.15, 224), Scaled('L/32', 7, 84.37, 196),
    Scaled('L/16', 7, 86.30, 783), Scaled('L/16', 14, 87.12, 1567), Scaled('H/14', 14, 88.08, 4262),
    Scaled('R50+B/32', 7, 84.90, 106), Scaled('R50+B/16', 7, 85.58, 274), Scaled('R50+L/32', 7, 85.68, 246),
    Scaled('R50+L/16', 7, 86.60, 859), Scaled('R50+L/16', 14, 87.12, 1668),
    Scaled('BiT-R50x1', 7, 77.54, 50), Scaled('BiT-R152x2', 7, 84.97, 563), Scaled('BiT-R200x3', 14, 87.22, 3306))
"""Rows of Table 6 of the ViT paper (Appendix D.5); of its ResNets those that were looked up.

The 859 of R50+L/16 does not go with the 1,668 of twice its epochs. The ResNets are 3 to 5 % below three times their
multiply-adds: to 1.5 % the count without products with the zeros of the padding.
"""
