"""`serve`: a page in the browser: the report of a run while it grows, classes and attention of images, mistakes.

`run` starts the server (`serve_http.py`) with what it answers: `Pages` by address, and the actions of the `Network` on
an image that is sent. A thread classifies the images of the `Folder`, whose page shows what is known so far. One image
or batch is computed at a time.

The server answers this machine only, unless --host says otherwise. Files are only read, also while the run trains: the
network then computes on the CPU, as training holds the accelerator, and is loaded again when newer weights are saved.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit_jax.core import extras
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import HostArray
from vit_jax.data import user_files
from vit_jax.data.formats import image_list
from vit_jax.data.image import decode as decoding
from vit_jax.data.image import headers, opencv
from vit_jax.inspect import figures, html_pages, predictions
from vit_jax.inspect.images import UPRIGHT
from vit_jax.inspect.model import Model
from vit_jax.inspect.zeroshot import Guess
from vit_jax.jobs import report, serve_http, startup
from vit_jax.jobs.serve_http import Answer, Refused
from vit_jax.parallel import hardware
from vit_jax.record import checkpoint_files, console, growing, storage
from vit_jax.weights import inference
from vit_jax.weights.reading import Reading

log = logging.getLogger('vit_jax.jobs')
_WATCHED = ('metrics.jsonl', 'config.json', 'final.json', 'evaluate.json', 'predictions.npz')
MAX_PIXELS = 64_000_000
TOP = 5
BATCH = 16  # images of a folder, between which other requests have their turn
MAX_MISTAKES = 200  # that are shown with an image
_THUMBNAIL_PX = 112


def run(weights: str, workdir: storage.Path | None, files: Sequence[str], *, host: str, port: int,
        reading: Reading, classes: str) -> int:
  """Serves the page until Ctrl-C.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    workdir: a run, instead of weights.
    files: at most one folder of images, with a subfolder for each class.
    host, port: the address on which the server listens.

  Raises:
    UserError: neither or both of weights and a run are given, they cannot be read, the port is in use, or a package is
      missing.
  """
  if bool(weights) == (workdir is not None):
    raise UserError(f'--weights: expected either --weights or --workdir, got {"both" if weights else "none"}. Set one '
                    'of them to the network, or to the run, to show.')
  if len(files) > 1:
    raise UserError(f'folder: expected at most one folder of images, got {len(files)}. Pass the folder that holds a '
                    'subfolder for each class.')
  for package in ('starlette', 'uvicorn'):
    extras.load(package, 'serve', 'vit-jax serve')
  if workdir is not None:
    report.check(workdir)
    hardware.use_cpu()
  startup.start()
  opencv.quieten()

  def load() -> Model:
    return Model(inference.load(weights or str(workdir), reading, classes=classes))

  def newest_step() -> Hashable | None:
    return True if workdir is None else max(checkpoint_files.steps(workdir / 'checkpoints'), default=None)

  folder = Folder(user_files.expanded(files[0])) if files else None
  with serve_http.listen(host, port) as listening:
    model = None
    if workdir is None:
      console.begin_stage('loading the weights')
      model = load()
      log.info('%s', inference.describe_class_names(model.weights, classes=classes))
    network = Network(load, newest_step, model)
    site = serve_http.Site(listening, host, pages=Pages(workdir, folder, title=weights or str(workdir)).by_address(),
                           actions={'/classify': network.classify, '/attention': network.attention})
    console.end_stage()
    if not site.is_local:
      log.warning('--host=%s: everyone who can reach this machine can open the page and send images to it.', host)
    print(f'Open {site.url} in a browser. Ctrl-C ends the server.', flush=True)
    if folder:
      threading.Thread(target=folder.run, args=(network,), daemon=True).start()
    site.server().run(sockets=[listening])
  return 0


class Pages:
  """The pages of the server: the report of a run, the page for images, and the mistakes in a folder.

  Args:
    workdir: the directory of a run, whose report is a page; None without a run.
    folder: the folder of images whose mistakes are a page; None without one.
    title: the title of the pages.
  """

  def __init__(self, workdir: storage.Path | None, folder: Folder | None, *, title: str) -> None:
    self._workdir, self._folder = workdir, folder
    self._lock, self._seen, self._report = threading.Lock(), '', b''
    self._pages: dict[str, Callable[[], Answer]] = {}
    if workdir is not None:
      self._pages['/report'] = self._show_report
    self._pages['/images'] = functools.partial(
        self._rendered, '/images', 'live_images.html', title=title, max_mib=serve_http.MAX_BYTES // 2**20,
        max_megapixels=MAX_PIXELS // 10**6)
    if folder is not None:
      self._pages['/folder'] = functools.partial(self._show_folder, folder)
    self._menu = [(address, address[1:].capitalize()) for address in self._pages]

  def by_address(self) -> dict[str, Callable[[], Answer]]:
    """Returns what makes the answer to each address."""
    def script(name: str) -> Answer:
      return Answer(html_pages.read(name).encode(), 'text/javascript; charset=utf-8')

    return {**self._pages, '/': next(iter(self._pages.values())), '/state': self._state,
            **{f'/{name}': functools.partial(script, name) for name in ('live.js', 'sort.js')}}

  def _state(self) -> Answer:
    """Returns what the report and the folder's page depend on; the script loads them again when it changes."""
    done = self._folder.num_done if self._folder else 0
    return Answer(f'{self._signature()} {done}'.encode(), 'text/plain; charset=utf-8')

  def _signature(self) -> str:
    """Returns sizes and times of the files that a report is made of."""
    paths = [] if self._workdir is None else [os.path.join(self._workdir, name) for name in _WATCHED]
    blocks = [[block.stat() for block in growing.blocks(path)] for path in paths if storage.is_local(path)]
    return str([[(stat.st_mtime_ns, stat.st_size) for stat in stats] for stats in blocks])

  def _show_report(self) -> Answer:
    with self._lock:
      if (signature := self._signature()) != self._seen or not self._report:
        page = report.to_html([str(self._workdir)], menu=self._menu, here='/report')
        self._report, self._seen = page.encode(errors='backslashreplace'), signature
      return Answer(self._report)

  def _show_folder(self, folder: Folder) -> Answer:
    arrays = folder.arrays()
    return self._rendered(
        '/folder', 'live_folder.html', title=folder.root.name, root=str(folder.root), num_done=folder.num_done,
        num_images=len(folder.paths), error=folder.error, notes=list(folder.notes),
        mistakes=sorted(folder.mistakes.copy(), key=lambda mistake: -mistake.predicted.probability),
        num_right=int((arrays['top'][:, 0] == arrays['label']).sum()) if arrays else 0,
        num_labeled=len(arrays.get('label', ())),
        confusion=predictions.summarize(arrays).confusion if arrays else None)

  def _rendered(self, here: str, template: str, **values: Any) -> Answer:
    page = html_pages.render(template, menu=self._menu, here=here, **values)
    return Answer(page.encode(errors='backslashreplace'))


class Network:
  """A network that threads share, one at a time.

  Args:
    load: loads the network.
    newest: returns which weights are the newest, such as the step of a run's newest checkpoint; when it changes, they
      are loaded again. None = there are none yet.
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
      try:
        if (newest := self._newest()) is None:
          raise Refused(HTTPStatus.CONFLICT, 'The run has saved no checkpoint yet. Try again when it has.')
        if self._model is None or newest != self._loaded:
          self._model, self._loaded = self._load(), newest
      except (UserError, TemporaryError, Damaged, OSError) as error:  # training may have deleted it in the meantime
        raise Refused(HTTPStatus.CONFLICT, f'The weights could not be loaded: {error}') from error
      yield self._model

  def classify(self, encoded: bytes) -> dict[str, Any]:
    """Returns the most probable classes of an image file, and the image as the network receives it."""
    with self.use() as model:
      began, image = time.monotonic(), decode(encoded, model.decoding)
      prepared = model.prepare(image)
      guesses = model.rank(model.logits([prepared], prepared=True)[0], top=TOP) if model.weights.num_classes else []
      return {'classes': [guess.plain() for guess in guesses],
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
    paths = [pathlib.Path(path) for path in image_list.find([str(self.root)], follow_links=True)]
    self.paths = [path for path in paths if path.resolve().is_relative_to(self.root)]
    self.notes = [f'{len(paths) - len(self.paths):,} links out of the folder were skipped.'
                  ] if len(self.paths) < len(paths) else []
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
        thumbnail = Image.fromarray(image)
        thumbnail.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
        self.mistakes.append(Mistake(file, next(guess for guess in ranked if guess.label == label), ranked[0],
                                     html_pages.to_png(np.asarray(thumbnail))))

  def arrays(self) -> dict[str, HostArray]:
    """Returns the results so far, as `predictions.npz` of a run has them; {} if there are none."""
    rows = self.rows.copy()  # another thread appends to them
    if not rows:
      return {}
    return {'class_names': np.array(self.class_names), 'index': np.arange(len(rows)),
            'label': np.array([label for label, _ in rows]),
            'top': np.array([[guess.label for guess in top] for _, top in rows]),
            'probability': np.array([[guess.probability for guess in top] for _, top in rows], np.float32)}
