"""Makes `golden_pillow_ops.npz`: what timm's RandAugment, torchvision's ColorJitter and DeiT III's blur make of images.

Run where timm and torchvision are:  python tests/data/make_golden_pillow_ops.py
Made with timm 1.0.31, torchvision 0.28.0, Pillow 13.0; to be renewed when a case is added here.

Each array is named by its case, and holds the pixels of `drawn()` after the operation.
"""
from __future__ import annotations

import pathlib

import numpy as np

FILE = pathlib.Path(__file__).with_name('golden_pillow_ops.npz')
FILL = (124, 116, 104)
GEOMETRY = [(name, how, value) for how in ('bilinear', 'bicubic') for name, values in (
    ('rotate', (-27.31, 11.07)), ('shear_x', (-0.1731, 0.2917)), ('shear_y', (-0.2113, 0.0719)),
    ('translate_x', (-0.41771, 0.13377)), ('translate_y', (-0.0713, 0.3319))) for value in values]
"""Operation, interpolation, and degrees, shear or share of the side."""
HUES, SIGMAS = (-0.0931, 0.0412), (0.13, 0.71, 1.31, 1.93)


def drawn() -> np.ndarray:
  """Slopes, edges and noise `[19, 27, 3] u8`, in integer arithmetic."""
  row, column, channel = np.ogrid[:19, :27, :3]
  noise = ((row * 7919 + column * 104_729 + channel * 1_299_709) ** 2 % 65_521 >> 8).clip(0, 255)
  waves = np.abs(255 - (column * (9 + channel) + row * (13 - channel)) % 512)
  return np.where((column // 9 + row // 7) % 3 == 0, noise, waves).astype(np.uint8)


def main() -> None:
  from PIL import Image, ImageFilter
  from timm.data import auto_augment
  from torchvision.transforms import functional
  image, found = Image.fromarray(drawn()), {}
  operations = {'rotate': auto_augment.rotate, 'shear_x': auto_augment.shear_x, 'shear_y': auto_augment.shear_y,
                'translate_x': auto_augment.translate_x_rel, 'translate_y': auto_augment.translate_y_rel}
  for name, how, value in GEOMETRY:
    resample = {'bilinear': Image.BILINEAR, 'bicubic': Image.BICUBIC}[how]
    found[f'{name} {how} {value}'] = operations[name](image, value, fillcolor=FILL, resample=resample)
  found |= {f'hue {turns}': functional.adjust_hue(image, turns) for turns in HUES}
  found |= {f'blur {sigma}': image.filter(ImageFilter.GaussianBlur(radius=sigma)) for sigma in SIGMAS}
  np.savez_compressed(FILE, **{name: np.asarray(pixels) for name, pixels in found.items()})


if __name__ == '__main__':
  main()
