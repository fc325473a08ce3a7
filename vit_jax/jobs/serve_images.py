"""What the live page does with images: classes and attention of one, and the mistakes in a folder.

One image or batch is computed at a time. Files are only read: the weights of a run that is still training are loaded
again when it has saved newer ones.
"""
from __future__ import annotations

import contextlib
import io
import pathlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit_jax.core.errors import UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import HostArray
from vit_jax.data import user_files
from vit_jax.data.formats import image_list
from vit_jax.data.image import decode as decoding
from vit_jax.data.image import headers
from vit_jax.inspect import figures, html_pages
from vit_jax.inspect.images import UPRIGHT
from vit_jax.inspect.model import Model
from vit_jax.inspect.zeroshot import Guess

MAX_BYTES = 32 * 2**20  # of an image that is sent
MAX_PIXELS = 64_000_000
TOP = 5
BATCH = 16  # images of a folder, between which other requests have their turn
MAX_MISTAKES = 200  # that are shown with an image
_THUMBNAIL_PX = 112


class Refused(Exception):
  """A request that is not answered: the HTTP status and a sentence for the person."""

  def __init__(self, status: int, text: str) -> None:
    super().__init__(text)
    self.status = status


class Answer(NamedTuple):
  """The body of an answer and its content type."""
  body: bytes
  kind: str = 'text/html; charset=utf-8'


class Network:
  """A network that threads share, one at a time.

  Args:
    load: loads it.
    newest: what the weights are at the moment, such as the step of a run's newest checkpoint; when it changes, they are
      loaded again. None = there are none yet.
    model: the network, if it is loaded already.
  """

  def __init__(self, load: Callable[[], Model], newest: Callable[[], Hashable | None],
               model: Model | None = None) -> None:
    self._load, self._newest, self._lock = load, newest, threading.Lock()
    self._model, self._loaded = model, newest() if model else None

  @contextlib.contextmanager
  def use(self) -> Iterator[Model]:
    """Yields the network when it is this thread's turn.

    Raises:
      Refused: the run has no weights yet, or they cannot be loaded.
    """
    with self._lock:
      newest = self._newest()
      if newest is None:
        raise Refused(HTTPStatus.CONFLICT, 'The run has saved no checkpoint yet. Try again when it has.')
      if self._model is None or newest != self._loaded:
        try:
          self._model, self._loaded = self._load(), newest
        except (UserError, Damaged, OSError) as error:  # training may have deleted the checkpoint in the meantime
          raise Refused(HTTPStatus.CONFLICT, f'The weights could not be loaded: {error}') from error
      yield self._model

  def classify(self, encoded: bytes) -> dict[str, Any]:
    """Returns the most probable classes of an image file, and the image as the network receives it."""
    with self.use() as model:
      began, image = time.monotonic(), decode(encoded, model.decoding)
      prepared = model.prepare(image)
      found = model.rank(model.logits([prepared], prepared=True)[0], top=TOP) if model.weights.num_classes else []
      return {'classes': [guess.plain() for guess in found],
              'image': html_pages.data_uri(html_pages.to_png(prepared)),
              'size': f'{image.shape[1]:,} × {image.shape[0]:,} px', 'has_attention': model.num_layers > 0,
              'weights': model.weights.source, 'seconds': round(time.monotonic() - began, 3)}

  def attention(self, encoded: bytes) -> dict[str, Any]:
    """Returns the attention of an image file over all layers, as colors over the image and as its brightness."""
    with self.use() as model:
      if not model.num_layers:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'This network has no attention.')
      prepared = model.prepare(decode(encoded, model.decoding))
      heat = model.rollout([prepared], prepared=True)[0]
    return {name: html_pages.data_uri(html_pages.to_png(draw(prepared, heat)))
            for name, draw in (('overlay', figures.overlay), ('shade', figures.shade))}


def decode(encoded: bytes, options: headers.DecodeOptions = UPRIGHT) -> HostArray:
  """Returns the pixels of an image file, `[H, W, 3]` u8; of `options`, whether it is turned.

  Raises:
    Refused: it is no image file that is supported, has too many pixels, or is damaged.
  """
  kind = headers.detect_format(encoded[:256])
  if kind not in headers.FORMATS:
    raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f'Expected a {headers.NAMES} file, got '
                  f'{kind.upper() or "another kind of file"}.')
  try:
    return decoding.decode(encoded, options._replace(max_pixels=MAX_PIXELS))
  except headers.BadImage as error:
    text = str(error).partition(' Shrink')[0].rstrip('.')
    raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f'The image could not be read: {text}.') from error


class Mistake(NamedTuple):
  """A wrongly classified image: its file, what it is and what was predicted, and the image as a small PNG."""
  file: str
  label: Guess
  predicted: Guess
  png: bytes


class Folder:
  """The images of a folder, labeled by the subfolder that they are in, and how a network classifies them.

  Args:
    root: the folder; links that lead out of it are skipped.

  Raises:
    UserError: it is not a folder, or has no images.
  """

  def __init__(self, root: str) -> None:
    self.root = pathlib.Path(root).resolve()
    if not self.root.is_dir():
      raise UserError(f'{root}: expected a folder of images, got no folder. Pass the folder that holds a subfolder for '
                      'each class.')
    found = [pathlib.Path(path) for path in image_list.find([str(self.root)], follow_links=True)]
    self.paths = [path for path in found if path.resolve().is_relative_to(self.root)]
    self.notes = [f'{len(found) - len(self.paths):,} links out of the folder were skipped.'
                  ] if len(self.paths) < len(found) else []
    self.rows: list[tuple[int, list[Guess]]] = []  # of each image its label and the best guesses
    self.mistakes: list[Mistake] = []
    self.class_names: Sequence[str] = ()
    self.num_done, self.error = 0, ''

  def run(self, network: Network) -> None:
    """Classifies all images, in a thread of its own; what is known so far can be read meanwhile."""
    labels: dict[str, int | None] = {}
    try:
      for start in range(0, len(self.paths), BATCH):
        with network.use() as model:
          self._classify(self.paths[start:start + BATCH], labels, model)
        self.num_done = min(start + BATCH, len(self.paths))
    except Refused as error:
      self.error = str(error)

  def _classify(self, paths: Sequence[pathlib.Path], labels: dict[str, int | None], model: Model) -> None:
    """Adds a row for each image; `labels` are the known classes by the names of folders, and are added to."""
    if not model.weights.num_classes:
      raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'The weights have no classification head.')
    self.class_names, images = model.class_names, []
    for path in paths:
      name, file = path.parent.name, str(path.relative_to(self.root))
      try:
        if name not in labels:
          labels[name] = None
          labels[name] = model.find_class(name)
        if (label := labels[name]) is not None:
          images.append((file, label, model.prepare(decode(user_files.read_image(path), model.decoding))))
      except UserError:
        self.notes.append(f'Folder {name}: its images are left out, as it is not named after a class of the weights.')
      except (Refused, headers.BadImage, OSError) as error:
        self.notes.append(f'{file}: {error}')
    logits = model.logits([image for _, _, image in images], prepared=True) if images else ()
    for (file, label, image), row in zip(images, logits, strict=True):
      ranked = model.rank(row, top=len(row))
      self.rows.append((label, ranked[:TOP]))
      if ranked[0].label != label and len(self.mistakes) < MAX_MISTAKES:
        own = next(guess for guess in ranked if guess.label == label)
        self.mistakes.append(Mistake(file, own, ranked[0], _thumbnail(image)))

  def arrays(self) -> dict[str, HostArray]:
    """Returns the results so far, as `predictions.npz` of a run has them; {} if there are none."""
    rows = self.rows.copy()  # another thread appends to them
    if not rows:
      return {}
    return {'class_names': np.array(self.class_names), 'index': np.arange(len(rows)),
            'label': np.array([label for label, _ in rows]),
            'top': np.array([[guess.label for guess in top] for _, top in rows]),
            'probability': np.array([[guess.probability for guess in top] for _, top in rows], np.float32)}


def _thumbnail(image: HostArray) -> bytes:
  small, buffer = Image.fromarray(image), io.BytesIO()
  small.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
  small.save(buffer, 'png')
  return buffer.getvalue()
