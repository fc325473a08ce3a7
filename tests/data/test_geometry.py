"""Resizing and the center crop of evaluation beside torchvision, timm and transformers, pixel by pixel."""
from __future__ import annotations

import hashlib
import pathlib

import numpy as np
import pytest

from tests.data import make_golden_geometry as golden
from vit_jax.config.schema import Crop, Geometry, Interpolation, Recipe
from vit_jax.data.image import geometry

FOUND = np.load(pathlib.Path(__file__).with_name('golden_geometry.npz'))


def test_torchvision_truncates_the_long_side_and_rounds_the_offset_half_to_even() -> None:
  for size, small, resized, offset in zip(*(FOUND[name].tolist() for name in ('sizes', 'small', 'resized', 'offset')),
                                          strict=True):
    assert geometry.resized_size(tuple(size), small, geometry=Geometry.TORCHVISION) == tuple(resized), (size, small)
    outer = size[0] + golden.CROP[0], size[1] + golden.CROP[1]
    window = geometry.center_crop(outer, golden.CROP, geometry=Geometry.TORCHVISION)
    assert [window.top, window.left] == offset and (window.height, window.width) == golden.CROP, size


def test_the_other_geometries_differ_as_they_should() -> None:
  # 500 * 248 / 375 = 330.67: rounded up by big_vision, truncated by torchvision; (331 - 224) / 2 = 53.5.
  sizes = {kind: geometry.resized_size((375, 500), 248, geometry=kind) for kind in Geometry}
  assert sizes == {Geometry.TORCHVISION: (248, 330), Geometry.BIG_VISION: (248, 331), Geometry.HUGGINGFACE: (248, 248)}
  lefts = {kind: geometry.center_crop((248, 331), (224, 224), geometry=kind).left for kind in Geometry}
  assert lefts == {Geometry.TORCHVISION: 54, Geometry.BIG_VISION: 53, Geometry.HUGGINGFACE: 53}


@pytest.mark.parametrize('number', range(len(golden.CASES)))
def test_the_pixels_are_those_of_the_programs_themselves(number: int) -> None:
  whose, size, part = golden.CASES[number]
  kind = Geometry.TORCHVISION if whose == 'timm' else Geometry.HUGGINGFACE
  recipe = Recipe(crop=Crop.RESIZE, eval_resize_px=int(224 / part), eval_geometry=kind, antialias=True,
                  interpolation=Interpolation.BICUBIC)
  image, box = geometry.fit(golden.drawn(size), recipe=recipe, image_px=(224, 224))
  assert hashlib.sha256(np.ascontiguousarray(image)).hexdigest() == str(FOUND['pixels'][number])
  assert (box[:2] < .5).all() and (box[2:] > .5).all()
