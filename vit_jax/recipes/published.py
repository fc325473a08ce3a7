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


TRANSFER_SETS = ('ImageNet', 'ImageNet ReaL', 'CIFAR-10', 'CIFAR-100', 'Oxford-IIIT Pets', 'Oxford Flowers-102')
"""Order of the accuracies in `TABLE_5` and `TABLE_6`, by the names of the rows of `CELLS`."""

TABLE_5: dict[str, dict[str, tuple[float, ...]]] = {
    'i1k': {'B/16': (77.91, 83.57, 98.13, 87.13, 93.81, 89.49), 'B/32': (73.38, 79.56, 97.77, 86.31, 92.04, 85.43),
            'L/16': (76.53, 82.19, 97.86, 86.35, 93.64, 89.66), 'L/32': (71.16, 77.83, 97.94, 87.07, 91.35, 86.36)},
    'i21k': {'B/16': (83.97, 88.35, 98.95, 91.67, 94.43, 99.38), 'B/32': (81.28, 86.63, 98.79, 91.97, 93.02, 99.11),
             'L/16': (85.15, 88.40, 99.16, 93.44, 94.73, 99.61), 'L/32': (80.99, 85.65, 99.13, 93.04, 93.09, 99.19),
             'H/14': (85.13, 88.70, 99.27, 93.82, 94.82, 99.51)},
    'jft': {'B/16': (84.15, 88.85, 99.00, 91.87, 95.80, 99.56), 'B/32': (80.73, 86.27, 98.61, 90.49, 93.40, 99.27),
            'L/16': (87.12, 89.99, 99.38, 94.04, 97.11, 99.56), 'L/32': (84.37, 88.28, 99.19, 92.52, 95.83, 99.45),
            'H/14': (88.04, 90.33, 99.50, 94.55, 97.56, 99.68)},
}
"""Table 5 of the ViT paper (Appendix C): top-1 accuracy in % by pre-training set and model, in the order of
`TRANSFER_SETS`. Fine-tuned at 384 px without averaging; the paper does not pre-train H/14 on ImageNet."""


class Scaled(NamedTuple):
  """A network pre-trained on JFT-300M for `epochs`: its cost, and accuracies in % after fine-tuning at 384 px.

  `accuracies` are in the order of `TRANSFER_SETS`.
  """
  model: str
  epochs: int
  exaflops: float
  accuracies: tuple[float, ...]

  @property
  def imagenet(self) -> float:
    """Top-1 accuracy on ImageNet in %."""
    return self.accuracies[0]


JFT_CLASSES = 18_291
"""Classes of JFT-300M, of the networks in `TABLE_6`."""

TABLE_6 = (
    Scaled('B/32', 7, 55, (80.73, 86.27, 98.61, 90.49, 93.40, 99.27)),
    Scaled('B/16', 7, 224, (84.15, 88.85, 99.00, 91.87, 95.80, 99.56)),
    Scaled('L/32', 7, 196, (84.37, 88.28, 99.19, 92.52, 95.83, 99.45)),
    Scaled('L/16', 7, 783, (86.30, 89.43, 99.38, 93.46, 96.81, 99.66)),
    Scaled('L/16', 14, 1567, (87.12, 89.99, 99.38, 94.04, 97.11, 99.56)),
    Scaled('H/14', 14, 4262, (88.08, 90.36, 99.50, 94.71, 97.11, 99.71)),
    Scaled('R50+B/32', 7, 106, (84.90, 89.15, 99.01, 92.24, 95.75, 99.46)),
    Scaled('R50+B/16', 7, 274, (85.58, 89.65, 99.14, 92.63, 96.65, 99.40)),
    Scaled('R50+L/32', 7, 246, (85.68, 89.04, 99.24, 92.93, 96.97, 99.43)),
    Scaled('R50+L/16', 7, 859, (86.60, 89.72, 99.18, 93.64, 97.03, 99.40)),
    Scaled('R50+L/16', 14, 1668, (87.12, 89.76, 99.31, 93.89, 97.36, 99.11)),
    Scaled('BiT-R50x1', 7, 50, (77.54, 84.56, 97.67, 86.07, 91.11, 94.26)),
    Scaled('BiT-R50x2', 7, 199, (82.12, 87.94, 98.29, 89.20, 93.43, 97.02)),
    Scaled('BiT-R101x1', 7, 96, (80.67, 87.07, 98.48, 89.17, 94.08, 95.95)),
    Scaled('BiT-R152x1', 7, 141, (81.88, 87.96, 98.82, 90.22, 94.17, 96.94)),
    Scaled('BiT-R152x2', 7, 563, (84.97, 89.69, 99.06, 92.05, 95.37, 98.62)),
    Scaled('BiT-R152x2', 14, 1126, (85.56, 89.89, 99.24, 91.92, 95.75, 98.75)),
    Scaled('BiT-R200x3', 14, 3306, (87.22, 90.15, 99.34, 93.53, 96.32, 99.04)))
"""All 18 rows of Table 6 of the ViT paper (Appendix C).

The 859 of R50+L/16 does not agree with the 1,668 of twice its epochs. The ResNets are 3 to 5 % below three times their
multiply-adds: within 1.5 %, the count without products with the zeros of the padding.
"""

TABLE_7: dict[str, dict[str, float]] = {
    run: dict(zip(('ImageNet', *TRANSFER_SETS[2:], 'mean'), accuracies, strict=True)) for run, accuracies in {
        'BiT-R50x1_adam': (77.54, 97.67, 86.07, 91.11, 94.26, 89.33),
        'BiT-R50x1_sgd': (78.24, 97.46, 85.17, 91.00, 92.06, 88.79),
        'BiT-R152x2_adam': (84.97, 99.06, 92.05, 95.37, 98.62, 94.01),
        'BiT-R152x2_sgd': (84.37, 99.07, 91.06, 94.79, 99.32, 93.72)}.items()}
"""Table 7 of the ViT paper (Appendix D.1): top-1 accuracy in % of ResNets pre-trained with Adam or SGD."""

TABLE_8 = {'none': 61.382, '1d-stem': 64.206, '1d-layers': 63.964, '1d-shared': 64.292, '2d-stem': 64.001,
           '2d-layers': 64.046, '2d-shared': 64.022, 'relative': 64.032}
"""Table 8 of the ViT paper (Appendix D.4): 5-shot accuracy on ImageNet in % of B/16 by its position embeddings."""

TABLE_9_COLUMNS = ('ViT-H/14 JFT', 'ViT-L/16 JFT', 'ViT-L/16 I21k')
TABLE_9: dict[str, tuple[float, float, float]] = {
    'caltech101': (95.3, 95.4, 90.8), 'cifar100': (85.5, 81.9, 84.1), 'dtd': (75.2, 74.3, 74.1),
    'flowers102': (99.7, 99.7, 99.3), 'pets': (97.2, 96.7, 92.7), 'sun397': (65.0, 63.5, 61.0),
    'svhn': (88.9, 87.4, 80.9), 'patch_camelyon': (83.3, 83.6, 82.5), 'eurosat': (96.7, 96.5, 95.6),
    'resisc45': (91.4, 89.7, 85.2), 'retinopathy': (76.6, 77.1, 75.3), 'clevr/count': (91.7, 86.4, 70.3),
    'clevr/distance': (63.8, 63.1, 56.1), 'dmlab': (53.1, 49.7, 41.9), 'dsprites/x_position': (79.4, 74.5, 74.7),
    'dsprites/orientation': (63.3, 60.5, 64.9), 'kitti/distance': (84.5, 82.2, 79.9),
    'smallnorb/azimuth': (33.2, 36.2, 30.5), 'smallnorb/elevation': (51.2, 51.1, 41.7)}
"""Table 9 of the ViT paper (Appendix D.10): top-1 accuracy in % on each task of VTAB-1k."""
TABLE_9_MEAN = (77.6, 76.3, 72.7)
"""Its last column, the mean over the 19 tasks."""
