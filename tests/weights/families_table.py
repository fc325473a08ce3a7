"""Prints the largest difference of features from timm or transformers, which `docs/reference/weights.md` sums up.

python -m tests.weights.families_table
"""
from __future__ import annotations

import math
import pathlib
import tempfile

from tests.weights import make_golden_families as golden
from tests.weights import make_golden_tips, test_families_scenic
from tests.weights import test_golden_families as measured

FAMILIES = ('dinov3', 'dinov2', 'clip', 'siglip', 'eva02', 'ropevit', 'pe', 'aimv2', 'tipsv2', 'ijepa', 'mae')
TITLES = {'dinov3': 'DINOv3', 'dinov2': 'DINOv2', 'clip': 'CLIP, OpenCLIP', 'siglip': 'SigLIP, SigLIP 2',
          'eva02': 'EVA-02', 'ropevit': 'RoPE-ViT', 'pe': 'Perception Encoder', 'aimv2': 'AIMv2', 'tipsv2': 'TIPSv2',
          'ijepa': 'I-JEPA', 'mae': 'MAE, fine-tuned'}
FORMATS = {'timm': 'timm', 'hf': 'transformers', 'original': "authors' names"}


def family(name: str) -> str:
  """Returns the family of a file of the reference, one of `FAMILIES`."""
  return next(one for one in FAMILIES if one in name.replace('openclip', 'clip').replace('_eva02_clip', '_eva02'))


def row(name: str) -> str:
  """Returns the row of a file of the reference."""
  with tempfile.TemporaryDirectory() as folder:
    found = measured.load(name, pathlib.Path(folder))
  sizes = [measured.difference(found, name, size) for size in golden.SIZES
           if name != 'hf_aimv2' or size == golden.SIZES[0]]
  shown = [f'{one:.1e}' if not math.isnan(one) else '' for one in sizes]
  kind, _, rest = name.partition('_')
  cells = [TITLES[family(name)], FORMATS[kind], rest.replace('_', ' '), *shown, *[''] * (3 - len(shown))]
  return '| ' + ' | '.join(cells) + ' |'


def scenic_row(name: str) -> str:
  """Returns the row of a network of `make_golden_tips.py`, whose reference is the program of its authors."""
  with tempfile.TemporaryDirectory() as folder:
    found = test_families_scenic.load(name, pathlib.Path(folder))
  sizes = [f'{test_families_scenic.difference(found, name, size):.1e}' for size in make_golden_tips.SIZES]
  return '| ' + ' | '.join(['TIPSv2', "the authors' JAX program", name, *sizes]) + ' |'


def main() -> None:
  heads = ['family', 'format', 'network', *(f'{h} x {w} px' for h, w in golden.SIZES)]
  print('| ' + ' | '.join(heads) + ' |\n' + '|---' * len(heads) + '|')
  for name in sorted(measured.NAMES, key=lambda name: (FAMILIES.index(family(name)), name)):
    print(row(name), flush=True)
    if name == 'timm_tipsv2_giant':
      print('\n'.join(map(scenic_row, make_golden_tips.NETWORKS)), flush=True)


if __name__ == '__main__':
  main()
