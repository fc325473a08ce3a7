"""What the live page does with images: classes and attention of one, and the mistakes in a folder.

One image or batch is computed at a time; a few requests wait for their turn, and more are refused. Reads files only:
the weights of a run that is still training are loaded again when it has saved newer ones.
"""
from __future__ import annotations

import contextlib
import io
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit_jax.core.errors import UserError
from vit_jax.core.os_errors import Damaged
from vit_jax.core.types import HostArray
from vit_jax.data.files import user_files
from vit_jax.data.image import decode as decoding
from vit_jax.data.image import headers
from vit_jax.inspect import figures, html_pages
from vit_jax.inspect.model import Model
from vit_jax.jobs.serve_http import Refused

log = logging.getLogger('vit_jax.jobs')
MAX_PIXELS = 64_000_000
MAX_WAITING = 8  # requests
TOP = 5
BATCH = 16  # images of a folder, between which other requests have their turn
MAX_MISTAKES = 200  # that are shown with an image
_THUMBNAIL_PX = 112
_OPTIONS = headers.DecodeOptions(max_pixels=MAX_PIXELS, upright=True)


class Network:
  """A network that threads share, one at a time.

  Args:
    load: loads it.
    newest: what the weights are at the moment, such as the step of a run's newest checkpoint; when it changes, they are
      loaded again. None = there are none yet.
  """

  def __init__(self, load: Callable[[], Model], newest: Callable[[], Hashable | None]) -> None:
    self._load, self._newest = load, newest
    self._lock, self._waiting = threading.Lock(), threading.BoundedSemaphore(MAX_WAITING)
    self._model: Model | None = None
    self._loaded: Hashable | None = None

  def preload(self) -> Model:
    """Loads and returns the network.

    Raises:
      UserError: the weights cannot be read.
    """
    with self._lock:
      self._model, self._loaded = self._load(), self._newest()
      return self._model

  @contextlib.contextmanager
  def use(self) -> Iterator[Model]:
    """Yields the network when it is this thread's turn.

    Raises:
      Refused: too many requests wait, or the weights cannot be loaded.
    """
    if not self._waiting.acquire(blocking=False):
      raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f'{MAX_WAITING} images wait already. Try again in a moment.')
    try:
      with self._lock:
        yield self._current()
    finally:
      self._waiting.release()

  def _current(self) -> Model:
    newest = self._newest()
    if newest is None:
      raise Refused(HTTPStatus.CONFLICT, 'The run has saved no checkpoint yet. Try again when it has.')
    if self._model is None or newest != self._loaded:
      try:
        self._model, self._loaded = self._load(), newest
      except (UserError, Damaged, OSError) as error:  # training may have deleted the checkpoint in the meantime
        raise Refused(HTTPStatus.CONFLICT, f'The weights could not be loaded: {error}') from error
    return self._model

  def classify(self, encoded: bytes) -> dict[str, Any]:
    """Returns the most probable classes of an image file, and the image as the network receives it."""
    with self.use() as model:
      began, image = time.monotonic(), decode(encoded)
      prepared = model.prepare(image)
      found = model.rank(model.logits([prepared], prepared=True)[0], top=TOP) if model.weights.num_classes else []
      return {'classes': [guess._asdict() for guess in found],
              'image': html_pages.data_uri(html_pages.to_png(prepared)),
              'size': f'{image.shape[1]:,} × {image.shape[0]:,} px', 'has_attention': model.num_layers > 0,
              'weights': model.weights.source, 'seconds': round(time.monotonic() - began, 3)}

  def attention(self, encoded: bytes) -> dict[str, Any]:
    """Returns the attention of an image file over all layers, as colors over the image and as its brightness."""
    with self.use() as model:
      if not model.num_layers:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'This network has no attention.')
      prepared = model.prepare(decode(encoded))
      heat = model.rollout([prepared], prepared=True)[0]
    return {name: html_pages.data_uri(html_pages.to_png(draw(prepared, heat)))
            for name, draw in (('overlay', figures.overlay), ('shade', figures.shade))}


def decode(encoded: bytes) -> HostArray:
  """Returns the pixels of an image file, `[H, W, 3]` u8.

  Raises:
    Refused: it is no image file that is supported, has too many pixels, or is damaged.
  """
  kind = headers.detect_format(encoded[:256])
  if not kind or kind in ('heic', 'jxl'):
    raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, 'Expected a JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF or JPEG 2000 '
                  f'file, got {kind.upper() or "another kind of file"}.')
  try:
    return decoding.decode(encoded, _OPTIONS)
  except headers.BadImage as error:
    text = str(error).partition(' Shrink')[0].rstrip('.')
    raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f'The image could not be read: {text}.') from error


class Mistake(NamedTuple):
  """A wrongly classified image: file, label, the probability of the label, the predicted class, its probability."""
  file: str
  label: str
  label_probability: float
  predicted: str
  probability: float
  png: bytes


class Folder:
  """The images of a folder, labeled by the subfolder that they are in, and how a network classifies them.

  Args:
    root: the folder; links that lead out of it are skipped.
    network: classifies them, in a thread of its own.

  Raises:
    UserError: it is not a folder, or has no images.
  """

  def __init__(self, root: str, network: Network, *, find: Callable[..., Iterator[str]]) -> None:
    self.root, self._network = pathlib.Path(root).resolve(), network
    if not self.root.is_dir():
      raise UserError(f'{root}: expected a folder of images, got no folder. Pass the folder that holds a subfolder for '
                      'each class.')
    found = [pathlib.Path(path) for path in find([str(self.root)], follow_links=True)]
    self.paths = [path for path in found if path.resolve().is_relative_to(self.root)]
    self.notes = [f'{len(found) - len(self.paths):,} links out of the folder were skipped.'
                  ] if len(self.paths) < len(found) else []
    self.mistakes: list[Mistake] = []
    self.labels: list[int] = []
    self.tops: list[HostArray] = []
    self.probabilities: list[HostArray] = []
    self.class_names: Sequence[str] = ()
    self.num_done, self.error = 0, ''
    self._of_label: dict[str, int | None] = {}

  def run(self) -> None:
    """Classifies all images; what is known so far can be read meanwhile."""
    for start in range(0, len(self.paths), BATCH):
      try:
        self._classify(self.paths[start:start + BATCH])
      except Refused as error:
        if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
          self.error = str(error)
          return
        time.sleep(1.)  # others wait
        self._classify(self.paths[start:start + BATCH])

  def _classify(self, paths: Sequence[pathlib.Path]) -> None:
    with self._network.use() as model:
      if not model.weights.num_classes:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'The weights have no classification head.')
      self.class_names, good = model.class_names, []
      for path in paths:
        label = self._find_label(path.parent, model)
        try:
          if label is not None:
            good.append((path, label, model.prepare(decode(user_files.read_image(path)))))
        except (Refused, headers.BadImage, OSError) as error:
          self.notes.append(f'{path.relative_to(self.root)}: {error}')
      logits = model.logits([image for _, _, image in good], prepared=True) if good else ()
      for (path, label, image), row in zip(good, logits, strict=True):
        self._note(path, label, image, row, model)
    self.num_done += len(paths)

  def _find_label(self, folder: pathlib.Path, model: Model) -> int | None:
    """Returns the class that a folder is named after; None, with a note, if there is none."""
    name = folder.name
    if name not in self._of_label:
      try:
        self._of_label[name] = model.find_class(name)
      except UserError:
        self._of_label[name] = None
        self.notes.append(f'Folder {name}: its images are left out, as it is not named after a class of the weights.')
    return self._of_label[name]

  def _note(self, path: pathlib.Path, label: int, image: HostArray, logits: HostArray, model: Model) -> None:
    ranked = model.rank(logits, top=len(logits))
    best = ranked[0]
    self.labels.append(label)
    self.tops.append(np.array([guess.label for guess in ranked[:TOP]]))
    self.probabilities.append(np.array([guess.probability for guess in ranked[:TOP]], np.float32))
    if best.label != label and len(self.mistakes) < MAX_MISTAKES:
      own = next(guess for guess in ranked if guess.label == label)
      self.mistakes.append(Mistake(str(path.relative_to(self.root)), own.name, own.probability, best.name,
                                   best.probability, _thumbnail(image)))

  def arrays(self) -> dict[str, HostArray]:
    """Returns the results so far, as `predictions.npz` of a run has them; {} if there are none."""
    num = min(len(self.labels), len(self.tops), len(self.probabilities))  # another thread appends to them
    if not num:
      return {}
    return {'class_names': np.array(self.class_names), 'index': np.arange(num), 'label': np.array(self.labels[:num]),
            'top': np.stack(self.tops[:num]), 'probability': np.stack(self.probabilities[:num])}


def _thumbnail(image: HostArray) -> bytes:
  small, buffer = Image.fromarray(image), io.BytesIO()
  small.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
  small.save(buffer, 'png')
  return buffer.getvalue()
