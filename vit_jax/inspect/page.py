"""The page of an inspection: which pictures are drawn of what was measured, and what is said beside them."""
from __future__ import annotations

import base64
import html
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.inspect import embeddings, figures, reconstruction, render
from vit_jax.inspect.attention import keep_mass
from vit_jax.inspect.measurements import Measured

FILTERS = 28  # ViT paper, Figure 7
MASS = .6  # of the attention that stays in a thresholded map (DINO)
NEIGHBOURS = 5
LEAST_FOR_MAP = 12  # images that a map or classes by depth are drawn of
MOST_ON_MAP = 200  # that are themselves on the map, where their classes are too many for colours


class Seen(NamedTuple):
  """A network and what was seen of it.

  shown: `[K, H, W, 3]` u8, pictures as the network is given them; `images` are all S of them.
  paths, labels, guesses: of all pictures; no guesses without a head, labels '' without folders.
  of_class: name of the class that relevance is for; '' = the one that is predicted for each picture.
  filters: `[P, P, 3, D]`; positions: `[N, D]`; painted: what a masked autoencoder makes of the pictures shown; each
    None where there is none to show.
  """
  name: str
  family: str
  shown: HostArray
  paths: Sequence[str]
  labels: Sequence[str]
  guesses: Sequence[str]
  grid: tuple[int, int]
  filters: HostArray | None
  positions: HostArray | None
  measured: Measured | None
  images: HostArray
  painted: reconstruction.Painted | None
  of_class: str


class Picture(NamedTuple):
  """A PNG file, its name without suffix, and what is said under it; `is_sheet`: it has rows of small pictures."""
  name: str
  png: bytes
  says: str
  is_sheet: bool = False


def write(to: pathlib.Path, seen: Sequence[Seen]) -> str:
  """Writes all pictures and `report.html` into a folder; returns the page's path."""
  sections = [f'<h1>{html.escape(" and ".join(one.name for one in seen))}</h1>', _facts(seen)]
  for title, pictures in _chapters(seen):
    cards = []
    for picture in pictures:
      (to / f'{picture.name}.png').write_bytes(picture.png)
      cards.append(_card(picture))
    if cards:
      sections.append(f'<h2>{html.escape(title)}</h2><div class="plates">{"".join(cards)}</div>')
  page = to / 'report.html'
  page.write_text(render.make_page(f'{seen[0].name} – inspection', sections), encoding='utf-8')
  return str(page)


def _facts(seen: Sequence[Seen]) -> str:
  rows = [[one.name, one.family, len(one.images), f'{one.grid[0]} x {one.grid[1]}',
           '–' if one.measured is None else len(one.measured.distance_px),
           '–' if one.measured is None else one.measured.distance_px.shape[1]] for one in seen]
  return render.make_table(['weights', 'family', 'pictures', 'patches', 'blocks', 'heads'], rows)


def _chapters(seen: Sequence[Seen]) -> Iterator[tuple[str, Iterator[Picture]]]:
  yield 'What the input layer has learned', _input(seen)
  if seen[0].measured is None:
    return
  yield 'What it paints', _paintings(seen)
  yield 'Where it looks', _maps(seen)
  yield 'Attention by depth', _by_depth(seen)
  yield 'Tokens by depth', _tokens(seen)
  yield 'Pictures among each other', _features(seen)


def _named(stem: str, one: Seen, seen: Sequence[Seen]) -> str:
  return stem if len(seen) == 1 else f'{stem}-{seen.index(one) + 1}'


def _says(text: str, one: Seen, seen: Sequence[Seen]) -> str:
  return text if len(seen) == 1 else f'{one.name}: {text}'


def _input(seen: Sequence[Seen]) -> Iterator[Picture]:
  for one in seen:
    if one.filters is not None:
      parts, share = embeddings.filter_components(one.filters, FILTERS)
      yield Picture(_named('filters', one, seen), figures.filters(parts, share), _says(
          'Principal components of the filters that embed patches, the first ones first (ViT paper, Figure 7 left). '
          'Each is scaled on its own.', one, seen))
    if one.positions is not None:
      tiles = embeddings.position_similarity(one.positions, one.grid)
      yield Picture(_named('positions', one, seen), figures.position_tiles(tiles), _says(
          'Each tile compares the position embedding of its patch with those of all patches (ViT paper, Figure 7 '
          'centre).', one, seen))


def _paintings(seen: Sequence[Seen]) -> Iterator[Picture]:
  for one in seen:
    if one.painted is None:
      continue
    captions = [_caption(one, i) for i in range(len(one.shown))]
    yield Picture(_named('reconstructions', one, seen), reconstruction.sheet(one.shown, one.painted, captions), _says(
        f'Masked autoencoding (arXiv 2111.06377, Figure 2): {one.painted.hidden.mean():.0%} of the patches are hidden, '
        'and painted from the others. Where patches were normalised for training, each prediction has the mean and '
        'deviation of the true patch.', one, seen), is_sheet=True)


def _maps(seen: Sequence[Seen]) -> Iterator[Picture]:
  for one in seen:
    m = one.measured
    assert m is not None
    heads = ['input', 'rollout', 'shaded'] + (['relevance'] if m.relevance is not None else []) + ['tokens']
    colors = embeddings.token_colors(m.tokens).reshape(len(m.tokens), *one.grid, 3)
    rows, captions = [], []
    for i, image in enumerate(one.shown):
      row = [image, figures.overlay(image, m.rollout[i]), figures.shade(image, m.rollout[i])]
      row += [] if m.relevance is None else [figures.overlay(image, m.relevance[i])]
      rows.append([*row, figures.blocks(colors[i], image.shape[:2])])
      captions.append(_caption(one, i))
    yield Picture(_named('maps', one, seen), figures.contact_sheet(rows, captions=captions, heads=heads), _says(
        'Attention rollout over all layers, as colours and as light (ViT paper, Figure 6); relevance of patches for '
        f'{one.of_class or "the class that is predicted"} (arXiv 2103.15679); the first three principal components of '
        'the final patch tokens of all these pictures as red, green and blue (DINOv2, Figure 1).', one, seen),
                  is_sheet=True)
    yield Picture(_named('heads', one, seen), _head_sheet(one, m), _says(
        f'Each head of the last block from where the network reads, and the patches that hold {MASS:.0%} of it (DINO, '
        'Figure 1).', one, seen), is_sheet=True)


def _head_sheet(one: Seen, m: Measured, *, most: int = 6, pictures: int = 6) -> bytes:
  rows, captions = [], []
  num_heads = min(most, m.heads.shape[1])
  for i, image in enumerate(one.shown[:pictures]):
    row = [image]
    for head in range(num_heads):
      heat = m.heads[i, head]
      kept = np.asarray(keep_mass(heat.reshape(1, -1), MASS)).reshape(heat.shape)
      row += [figures.overlay(image, heat), figures.shade(image, kept.astype(np.float32))]
    rows.append(row)
    captions.append(_caption(one, i))
  heads = ['input', *(f'head {h + 1}{kind}' for h in range(num_heads) for kind in ('', f', {MASS:.0%}'))]
  return figures.contact_sheet(rows, captions=captions, heads=heads)


def _caption(one: Seen, i: int) -> str:
  own = one.labels[i] or pathlib.Path(one.paths[i]).name
  return f'{own}, predicted: {one.guesses[i]}' if one.guesses else own


def _by_depth(seen: Sequence[Seen]) -> Iterator[Picture]:
  measured = {one.name: one.measured for one in seen if one.measured is not None}
  kinds = (
      ('distance', 'distance_px', 'mean attention distance (px)', 'How far attention reaches',
       'Mean distance in pixels of the prepared picture between a patch and those it attends to; a dot is a head (ViT '
       'paper, Figure 7 right).'),
      ('information', 'information', 'normalised mutual information', 'How much attention depends on the query',
       'Near 0 all patches look at the same places, as in the late layers of contrastive learning (arXiv 2305.00729).'),
      ('entropy', 'entropy', 'entropy (nats)', 'How spread attention is',
       "Entropy of a patch's attention to patches; the most "
       f'that can be is {np.log(seen[0].grid[0] * seen[0].grid[1]):.2f}.'))
  for name, field, ylabel, title, says in kinds:
    tables = {model: np.asarray(getattr(m, field)) for model, m in measured.items()}
    yield Picture(name, figures.heads_by_depth(tables, ylabel=ylabel, title=title), says)


def _tokens(seen: Sequence[Seen]) -> Iterator[Picture]:
  measured = {one.name: one.measured for one in seen if one.measured is not None}
  fourier = {name: m.fourier for name, m in measured.items()}
  n = max(table.shape[1] for table in fourier.values())
  yield Picture('fourier', figures.lines_by_depth(
      fourier, np.linspace(0, 1, n), xlabel='frequency (of the highest)', ylabel='log amplitude',
      title='Frequencies of tokens'),
      "Log amplitude of the token map's frequencies along the diagonal, less that of the constant part (arXiv "
      '2202.06709).')
  singular = {name: m.singular for name, m in measured.items()}
  yield Picture('singular', figures.lines_by_depth(
      singular, np.arange(1, max(t.shape[1] for t in singular.values()) + 1), xlabel='singular value',
      ylabel='log, relative to the first', title='Directions that tokens use'),
      "Singular values of an image's centred patch tokens.")
  first, last = list(measured.values())[0], list(measured.values())[-1]
  table = embeddings.cka_table(list(first.by_depth), list(last.by_depth))
  names = [one.name for one in seen]
  yield Picture('cka', figures.square_table(
      table, xlabel=f'depth in {names[-1]}', ylabel=f'depth in {names[0]}', title='How alike layers are',
      unit='linear CKA'),
      'Centred kernel alignment of the mean patch tokens of all pictures (arXiv 1905.00414).')
  labels = np.unique(np.array(seen[0].labels), return_inverse=True)[1]
  if len(set(seen[0].labels)) > 1 and len(labels) >= LEAST_FOR_MAP and np.bincount(labels).mean() >= 2:
    curves = {}
    for name, m in measured.items():
      shares = [100 * embeddings.leave_one_out(rows, labels, NEIGHBOURS) for rows in m.by_depth]
      curves[name] = (np.arange(len(shares)), np.array(shares))
    yield Picture('separable', figures.lines(
        curves, xlabel='after block (0: before the first)', ylabel='of pictures (%)',
        title='Classes by nearest neighbours'),
        f'Pictures whose folder most of their {NEIGHBOURS} nearest neighbours share, by the mean patch token of each '
        'depth.')


def _features(seen: Sequence[Seen]) -> Iterator[Picture]:
  for one in seen:
    assert one.measured is not None
    if len(one.images) < LEAST_FOR_MAP:
      continue
    places = embeddings.flat_map(one.measured.pooled, seed=0)
    title, kinds = 'Pictures by their features', len(set(one.labels))
    drawn = (figures.scatter(places, list(one.labels), title=title) if 1 < kinds <= 24 or len(places) > MOST_ON_MAP
             else figures.picture_map(places, one.images, title=title))
    yield Picture(_named('map', one, seen), drawn, _says(
        'Features under the head: principal components, then t-SNE. Distances between far groups mean little.', one,
        seen))
    order, _ = embeddings.nearest(one.measured.pooled, NEIGHBOURS)
    rows = [[one.images[i], *(one.images[j] for j in order[i])] for i in range(min(8, len(one.images)))]
    heads = ['picture', *(f'{rank}.' for rank in range(1, NEIGHBOURS + 1))]
    captions = [_caption(one, i) for i in range(len(rows))]
    sheet = figures.contact_sheet(rows, captions=captions, heads=heads)
    yield Picture(_named('neighbours', one, seen), sheet, _says(
        'The nearest other pictures by the cosine of their features.', one, seen), is_sheet=True)


def _card(picture: Picture) -> str:
  data = base64.b64encode(picture.png).decode()
  says = html.escape(picture.says)
  kind = ' class="sheet"' if picture.is_sheet else ''
  return f'<figure{kind}><img src="data:image/png;base64,{data}" alt="{says}"><figcaption>{says}</figcaption></figure>'
