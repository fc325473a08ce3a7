"""Which figures the page of an inspection has."""
from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vit_jax.inspect import page
from vit_jax.inspect.measurements import Measurements


@pytest.mark.slow(reason='4 s: a map of many points')
def test_with_many_classes_the_map_shows_the_images() -> None:
  rng = np.random.default_rng(0)
  images = np.stack([np.full((32, 32, 3), (250, 10 * i, 0), np.uint8) for i in range(26)])
  measured = dict.fromkeys(Measurements._fields)
  measured |= {'pooled': rng.normal(size=(26, 8)), 'by_depth': rng.normal(size=(2, 26, 8)),
               'fourier': np.zeros((2, 3)), 'singular': np.zeros((2, 4))}
  one = page.Inspection('net', 'ours', images[:2], [f'{i}.png' for i in range(26)], [f'class{i}' for i in range(26)],
                        [], (4, 4), None, None, Measurements(**measured), images, None, '')  # type: ignore[arg-type]
  found = {figure.name: figure.png for figure in page._features(one)}
  assert set(found) == {'map', 'neighbors'}
  drawn = np.asarray(Image.open(io.BytesIO(found['map'])).convert('RGB')).reshape(-1, 3).astype(int)
  own = [(np.abs(drawn - (250, 10 * i, 0)).max(1) <= 4).sum() for i in range(26)]
  assert min(own) > 100  # pixels of each image
  names = {figure.name for figure in page._tokens([one])}
  assert names == {'fourier', 'singular', 'cka'}  # one image of each class says nothing about neighbors
