"""The page of an inspection: which figures are drawn from the measurements, and their captions.

`job.py` makes an `Inspection` of each network and calls `write`. A function for each section of the page yields its
figures; `figures.py` draws them.
"""
from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.inspect import embeddings, figures, html_pages
from vit_jax.inspect.measurements import Measurements, keep_mass

FILTERS = 28  # ViT paper, Figure 7
MASS = 0.6  # share of the attention that a thresholded map keeps (DINO)
NEIGHBORS = 5
MIN_FOR_MAP = 12  # images: below that, no map and no classes by depth are drawn
MAX_HEADS, MAX_HEAD_IMAGES = 6, 6  # of the sheet of attention by head
MAX_ON_MAP = 200  # images that are drawn as thumbnails where there are too many classes for colors


class Inspection(NamedTuple):
  """A network and what was measured on it.

  name, family: of the weights.
  shown: `[K, H, W, 3]` u8, images as the network gets them; `images` holds all S of them.
  paths, labels, predictions: for all images; no predictions without a head, labels '' without class folders.
  grid: (h, w) of the patches.
  filters: `[P, P, 3, D]`; positions: `[N, D]`; reconstruction: by a masked autoencoder, of the images shown; each is
    None where the network has none.
  measured: None without images.
  of_class: name of the class that relevance is computed for; '' = the predicted class of each image.
  """
  name: str
  family: str
  shown: HostArray
  paths: Sequence[str]
  labels: Sequence[str]
  predictions: Sequence[str]
  grid: tuple[int, int]
  filters: HostArray | None
  positions: HostArray | None
  measured: Measurements | None
  images: HostArray
  reconstruction: figures.Reconstruction | None
  of_class: str


class Figure(NamedTuple):
  """A PNG file, its name without suffix, and its caption; `is_sheet`: it has rows of small images."""
  name: str
  png: bytes
  caption: str
  is_sheet: bool = False


def write(to: pathlib.Path, inspections: Sequence[Inspection]) -> str:
  """Writes all figures and `report.html` into a folder; returns the path of the page.

  Networks of equal names are numbered.
  """
  names = distinct([inspection.name for inspection in inspections])
  inspections = [inspection._replace(name=name) for inspection, name in zip(inspections, names, strict=True)]
  sections, rows = [], []
  for title, drawn in _sections(inspections):
    section = list(drawn)
    for figure in section:
      (to / f'{figure.name}.png').write_bytes(figure.png)
    if section:
      sections.append((title, section))
  for one in inspections:
    num_blocks, num_heads = ('–', '–') if one.measured is None else one.measured.distance_px.shape
    rows.append([one.name, one.family, len(one.images), f'{one.grid[0]} × {one.grid[1]}', num_blocks, num_heads])
  page = to / 'report.html'
  page.write_text(html_pages.render(
      'inspection.html', title=f'{names[0]} – inspection', names=names,
      head=['weights', 'family', 'images', 'patches', 'blocks', 'heads'], rows=rows, sections=sections),
                  encoding='utf-8', errors='backslashreplace')
  return str(page)


def distinct(names: Sequence[str]) -> list[str]:
  """Returns the names, with a number after those of which there are several: `run (1)`, `run (2)`."""
  taken = {name for name in names if names.count(name) == 1}
  numbered = []
  for number, name in enumerate(names, 1):
    if names.count(name) > 1:
      while f'{name} ({number})' in taken:
        number += len(names)
      name = f'{name} ({number})'
      taken.add(name)
    numbered.append(name)
  return numbered


def _sections(inspections: Sequence[Inspection]) -> Iterator[tuple[str, Iterator[Figure]]]:
  """Yields the title and the figures of each section; without images there is only the first one."""
  yield 'Input layer', _of_each(inspections, _input)
  if inspections[0].measured is None:
    return
  yield 'Reconstruction', _of_each(inspections, _reconstructions)
  yield 'Attention maps', _of_each(inspections, _maps)
  yield 'Attention by depth', _by_depth(inspections)
  yield 'Tokens by depth', _tokens(inspections)
  yield 'Images in feature space', _of_each(inspections, _features)


def _of_each(inspections: Sequence[Inspection], draw: Callable[[Inspection], Iterator[Figure]]) -> Iterator[Figure]:
  """Draws the figures of each network; if there are several, names are numbered and captions begin with its name."""
  for number, one in enumerate(inspections, 1):
    for figure in draw(one):
      if len(inspections) > 1:
        figure = figure._replace(name=f'{figure.name}-{number}', caption=f'{one.name}: {figure.caption}')
      yield figure


def _input(one: Inspection) -> Iterator[Figure]:
  if one.filters is not None:
    yield Figure('filters', figures.filters(*embeddings.filter_components(one.filters, FILTERS)),
                 'Principal components of the patch embedding filters, in decreasing order of variance (ViT paper, '
                 'Figure 7 left). Each is scaled separately.')
  if one.positions is not None:
    yield Figure('positions', figures.position_tiles(embeddings.position_similarity(one.positions, one.grid)),
                 'Each tile shows the similarity of the position embedding of one patch to those of all patches (ViT '
                 'paper, Figure 7 center).')


def _reconstructions(one: Inspection) -> Iterator[Figure]:
  if one.reconstruction is not None:
    sheet = figures.reconstruction_sheet(one.shown, one.reconstruction, _captions(one, len(one.shown)))
    yield Figure('reconstructions', sheet, (
        f'Masked autoencoding (arXiv 2111.06377, Figure 2): {one.reconstruction.hidden.mean():.0%} of the patches are '
        'masked, and reconstructed from the others. If the network was trained on normalized patches, each prediction '
        'gets the mean and standard deviation of the true patch.'), is_sheet=True)


def _maps(one: Inspection) -> Iterator[Figure]:
  m = one.measured
  assert m is not None
  tokens = np.asarray(m.tokens, np.float64).reshape(-1, m.tokens.shape[-1])  # of all images together
  colors = embeddings.to_unit(embeddings.principal(tokens).parts).reshape(len(m.tokens), *one.grid, 3)
  rows = []
  for i, image in enumerate(one.shown):
    columns = {'input': image, 'rollout': figures.overlay(image, m.rollout[i]),
               'shaded': figures.shade(image, m.rollout[i])}
    if m.relevance is not None:
      columns['relevance'] = figures.overlay(image, m.relevance[i])
    columns['tokens'] = figures.blocks(colors[i], image.shape[:2])
    rows.append(columns)
  sheet = figures.contact_sheet([list(columns.values()) for columns in rows], captions=_captions(one, len(rows)),
                                heads=list(rows[0]))
  yield Figure('maps', sheet, (
      'Attention rollout over all layers, as colors and as brightness (ViT paper, Figure 6); relevance of patches for '
      f'{one.of_class or "the predicted class"} (arXiv 2103.15679); the first three principal components of the final '
      'patch tokens of all these images as red, green and blue (DINOv2, Figure 1).'), is_sheet=True)
  num_heads = min(MAX_HEADS, m.heads.shape[1])
  head_rows = []
  for image, maps in zip(one.shown[:MAX_HEAD_IMAGES], m.heads, strict=False):
    head_rows.append([image])
    for heat in maps[:num_heads]:
      kept = keep_mass(heat.reshape(-1), MASS).reshape(heat.shape)
      head_rows[-1] += [figures.overlay(image, heat), figures.shade(image, kept.astype(np.float32))]
  titles = [f'head {head}{kind}' for head in range(1, num_heads + 1) for kind in ('', f', {MASS:.0%}')]
  sheet = figures.contact_sheet(head_rows, captions=_captions(one, len(head_rows)), heads=['input', *titles])
  yield Figure('heads', sheet, (
      f'Attention of each head of the last block from the token that is read out, and the patches with {MASS:.0%} of '
      'it (DINO, Figure 1).'), is_sheet=True)


def _captions(one: Inspection, count: int) -> list[str]:
  """Returns the label, or else the file name, of the first images, with the predicted class."""
  captions = [label or pathlib.Path(path).name for label, path in zip(one.labels, one.paths, strict=True)][:count]
  if not one.predictions:
    return captions
  return [f'{caption}, predicted: {name}' for caption, name in zip(captions, one.predictions, strict=False)]


def _by_depth(inspections: Sequence[Inspection]) -> Iterator[Figure]:
  measured = {one.name: one.measured for one in inspections if one.measured is not None}
  max_nats = {one.name: f'{np.log(one.grid[0] * one.grid[1]):.2f} nats' for one in inspections}  # log of the patches
  if len(set(max_nats.values())) == 1:
    maximum = max_nats[inspections[0].name]
  else:
    maximum = ', '.join(f'{nats} of {name}' for name, nats in max_nats.items())
  kinds = (
      ('distance', 'distance_px', 'mean attention distance (px)', 'Mean attention distance',
       'Mean distance between a patch and those that it attends to, in pixels of the prepared image; one dot for each '
       'head (ViT paper, Figure 7 right).'),
      ('information', 'information', 'normalized mutual information', 'Dependence of attention on the query',
       'Near 0, all patches attend to the same places, as in the late layers of contrastive learning (arXiv '
       '2305.00729).'),
      ('entropy', 'entropy', 'entropy (nats)', 'Entropy of attention',
       f"Entropy of a patch's attention to patches; the maximum is {maximum}."))
  for name, field, ylabel, title, caption in kinds:
    tables = {model: np.asarray(getattr(m, field)) for model, m in measured.items()}
    yield Figure(name, figures.heads_by_depth(tables, ylabel=ylabel, title=title), caption)


def _tokens(inspections: Sequence[Inspection]) -> Iterator[Figure]:
  measured = {one.name: one.measured for one in inspections if one.measured is not None}
  yield Figure('fourier', figures.lines_by_depth(
      {name: m.fourier for name, m in measured.items()}, lambda n: np.linspace(0, 1, n),
      xlabel='frequency (of the highest)', ylabel='log amplitude', title='Frequencies of tokens'),
      "Log amplitude of the token map's frequencies along the diagonal, relative to that of frequency 0 (arXiv "
      '2202.06709).')
  yield Figure('singular', figures.lines_by_depth(
      {name: m.singular for name, m in measured.items()}, lambda n: np.arange(1, n + 1), xlabel='singular value',
      ylabel='log of the ratio to the first', title='Singular values of the tokens'),
      "Singular values of an image's centered patch tokens.")
  names = list(measured)
  first, last = measured[names[0]], measured[names[-1]]
  similarity = np.array([[embeddings.linear_cka(a, b) for b in last.by_depth] for a in first.by_depth])
  more = f' Of the {len(names)} networks, only the first and the last are compared.' if len(names) > 2 else ''
  yield Figure('cka', figures.layer_similarity(
      similarity, xlabel=f'depth in {names[-1]}', ylabel=f'depth in {names[0]}'),
      f'Centered kernel alignment of the mean patch tokens of all images (arXiv 1905.00414).{more}')
  labels = np.unique(np.array(inspections[0].labels), return_inverse=True)[1]
  has_classes = len(set(inspections[0].labels)) > 1
  if has_classes and len(labels) >= MIN_FOR_MAP and np.bincount(labels).mean() >= 2:
    curves = {}
    for name, m in measured.items():
      shares = [100 * embeddings.leave_one_out(rows, labels, NEIGHBORS) for rows in m.by_depth]
      curves[name] = (np.arange(len(shares)), np.array(shares))
    yield Figure('separable', figures.panels(
        {'Classes by nearest neighbors': ('share of images (%)', curves)}, xlabel='after block (0: before the first)'),
        f'Share of the images whose folder is that of most of their {NEIGHBORS} nearest neighbors, by the mean patch '
        'token at each depth.')


def _features(one: Inspection) -> Iterator[Figure]:
  assert one.measured is not None
  if len(one.images) < MIN_FOR_MAP:
    return
  points = embeddings.flat_map(one.measured.pooled, seed=0)
  drawn = figures.scatter(points, one.labels, one.images if len(points) <= MAX_ON_MAP else one.images[:0])
  yield Figure('map', drawn, 'Features before the head, by principal components and t-SNE. Distances between distant '
               'groups mean little.')
  order, _ = embeddings.nearest(one.measured.pooled, NEIGHBORS)
  rows = [[one.images[i], *(one.images[j] for j in order[i])] for i in range(min(8, len(one.images)))]
  heads = ['image', *(f'{rank}.' for rank in range(1, NEIGHBORS + 1))]
  yield Figure('neighbors', figures.contact_sheet(rows, captions=_captions(one, len(rows)), heads=heads),
               'The nearest other images by cosine similarity of their features.', is_sheet=True)
