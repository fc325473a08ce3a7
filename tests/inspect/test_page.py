"""Which figures the page of an inspection has."""
from __future__ import annotations

import io
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_jax.inspect import page
from vit_jax.inspect.measurements import Measurements


def network(name: str, side: int) -> page.Inspection:
  """What the figures by depth read of a network with `side x side` patches and two blocks."""
  rng = np.random.default_rng(side)
  measured: dict[str, object] = dict.fromkeys(Measurements._fields)
  measured |= {'by_depth': rng.normal(size=(3, 4, 8)), 'fourier': rng.normal(size=(3, side // 2 + 1)),
               'singular': rng.normal(size=(3, side)), 'distance_px': np.ones((2, 3)), 'information': np.ones((2, 3)),
               'entropy': np.ones((2, 3))}
  return page.Inspection(name, 'ours', np.zeros((4, 8, 8, 3), np.uint8), ['a'] * 4, [''] * 4, [], (side, side), None,
                         None, Measurements(**measured), np.zeros((4, 8, 8, 3), np.uint8),  # type: ignore[arg-type]
                         None, '')


def test_the_highest_frequency_of_each_network_is_drawn_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
  drawn: list[Any] = []
  monkeypatch.setattr(page.figures, 'encode', lambda figure: drawn.append(
      [ax.lines[0].get_xdata().tolist() for ax in figure.axes if ax.lines]) or b'')
  list(page._tokens([network('large', 8), network('small', 4)]))
  fourier, singular, *_ = drawn
  assert fourier == [[0., .25, .5, .75, 1.], [0., .5, 1.]] and singular == [[*range(1, 9)], [*range(1, 5)]]


def test_networks_of_equal_names_are_two_networks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  drawn: list[list[str]] = []
  for name in ('heads_by_depth', 'lines_by_depth'):
    monkeypatch.setattr(page.figures, name, lambda tables, *_, **__: drawn.append(list(tables)) or b'')
  monkeypatch.setattr(page, '_maps', lambda one: iter(()))
  text = pathlib.Path(page.write(tmp_path, [network('run', 8), network('run', 4)])).read_text()
  assert len(drawn) == 5 and all(names == ['run (1)', 'run (2)'] for names in drawn)
  assert 'run (1)' in text and 'run (2)' in text


@pytest.mark.parametrize('names, distinct', [
    (['a', 'b'], ['a', 'b']), (['a', 'b', 'a'], ['a (1)', 'b', 'a (3)']),
    (['a', 'a', 'a (1)'], ['a (4)', 'a (2)', 'a (1)']),
    (['a', 'a (4)', 'a (1)', 'a'], ['a (5)', 'a (4)', 'a (1)', 'a (8)'])])
def test_a_number_makes_each_name_another(names: list[str], distinct: list[str]) -> None:
  found = page.distinct(names)
  assert len(set(found)) == len(names) and found == distinct


def test_captions_say_what_belongs_to_which_network() -> None:
  def captions(*networks: page.Inspection) -> dict[str, str]:
    return {one.name: one.caption for one in (*page._by_depth(networks), *page._tokens(networks))}

  large, same, small = network('large', 8), network('same', 8), network('small', 4)
  assert captions(large, same)['entropy'].endswith('the maximum is 4.16 nats.')
  assert captions(large, small)['entropy'].endswith('the maximum is 4.16 nats of large, 2.77 nats of small.')
  assert 'compared' not in captions(large, small)['cka']
  assert captions(large, same, small)['cka'].endswith('Of the 3 networks, only the first and the last are compared.')


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
