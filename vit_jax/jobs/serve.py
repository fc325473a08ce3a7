"""`--job=serve`: pages in the browser: the report of a run while it trains, classes and attention of images, mistakes.

`commands.Command.run` calls `run`, which starts the server of `serve_http.py`. The server answers this machine only,
unless `--host` is set, and writes no files. The network of a run computes on the CPU, as training may use the
accelerator, and is loaded again when a newer checkpoint is saved. These threads run, of which one computes at a time:

  main thread          the event loop of the server, which hands each request to a thread of a pool
  threads of the pool  `Pages` make the pages; `Network.classify` and `Network.attention` answer for sent images
  thread of `Folder`   classifies the images of a folder; the page of mistakes shows the results so far
"""
from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
_REPORT_FILES = ('metrics.jsonl', 'config.json', 'final.json', 'evaluate.json', 'predictions.npz')  # of a run
MAX_PIXELS = 64_000_000  # of an image, before it is resized
TOP = 5  # classes that are shown of an image
BATCH = 16  # images of a folder; other requests are computed between two batches
MAX_MISTAKES = 200  # of a folder, that the page shows
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

  def newest_step() -> int | None:
    return 0 if workdir is None else max(checkpoint_files.steps(workdir / 'checkpoints'), default=None)

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
    self._lock = threading.Lock()  # so that one thread makes the report, and the others return the same one
    self._report_signature, self._report = '', b''
    self._pages: dict[str, Callable[[], Answer]] = {}
    if workdir is not None:
      self._pages['/report'] = self._show_report
    self._pages['/images'] = functools.partial(
        self._render, '/images', 'live_images.html', title=title, max_mib=serve_http.MAX_BYTES // 2**20,
        max_megapixels=MAX_PIXELS // 10**6)
    if folder is not None:
      self._pages['/folder'] = functools.partial(self._show_folder, folder)
    self._menu = [(address, address[1:].capitalize()) for address in self._pages]

  def by_address(self) -> dict[str, Callable[[], Answer]]:
    """Returns, for each address, the function that makes its answer. `/` has the first page of the menu."""
    def script(name: str) -> Answer:
      return Answer(html_pages.read(name).encode(), 'text/javascript; charset=utf-8')

    first_page, *_ = self._pages.values()
    return {**self._pages, '/': first_page, '/state': self._state, '/live.js': functools.partial(script, 'live.js'),
            '/sort.js': functools.partial(script, 'sort.js')}

  def _state(self) -> Answer:
    """Returns a text that changes when the report or the folder's page does; `live.js` then loads the page again."""
    num_done = self._folder.num_done if self._folder else 0
    return Answer(f'{self._signature()} {num_done}'.encode(), 'text/plain; charset=utf-8')

  def _signature(self) -> str:
    """Returns times and sizes of the files that the report is made of; a growing file may have several blocks."""
    paths = [] if self._workdir is None else [os.path.join(self._workdir, name) for name in _REPORT_FILES]
    stats_by_path = [[block.stat() for block in growing.blocks(path)] for path in paths if storage.is_local(path)]
    return str([[(stat.st_mtime_ns, stat.st_size) for stat in stats] for stats in stats_by_path])

  def _show_report(self) -> Answer:
    with self._lock:
      signature = self._signature()  # before the files are read, so that a later change is seen at the next request
      if signature != self._report_signature or not self._report:
        page = report.to_html([str(self._workdir)], menu=self._menu, here='/report')
        self._report, self._report_signature = page.encode(errors='backslashreplace'), signature
      return Answer(self._report)

  def _show_folder(self, folder: Folder) -> Answer:
    arrays = folder.arrays()
    return self._render(
        '/folder', 'live_folder.html', title=folder.root.name, root=str(folder.root), num_done=folder.num_done,
        num_images=len(folder.paths), error=folder.error, notes=list(folder.notes),
        mistakes=sorted(folder.mistakes.copy(), key=lambda mistake: -mistake.predicted.probability),
        num_right=int((arrays['top'][:, 0] == arrays['label']).sum()) if arrays else 0,
        num_labeled=len(arrays.get('label', ())),
        confusion=predictions.summarize(arrays).confusion if arrays else None)

  def _render(self, here: str, template: str, **values: Any) -> Answer:
    page = html_pages.render(template, menu=self._menu, here=here, **values)
    return Answer(page.encode(errors='backslashreplace'))


class Network:
  """A network that threads share: a lock lets one of them use it at a time.

  Args:
    load: loads the network.
    newest_step: returns the step of the newest weights, None before the first. When it changes, they are loaded again.
    model: the network, if it is loaded already.
  """

  def __init__(self, load: Callable[[], Model], newest_step: Callable[[], int | None],
               model: Model | None = None) -> None:
    self._load, self._newest_step, self._lock = load, newest_step, threading.Lock()
    self._model, self._loaded_step = model, newest_step() if model else None

  @contextlib.contextmanager
  def use(self) -> Iterator[Model]:
    """Holds the lock and yields the network with the newest weights. Raises Refused if it cannot load any."""
    with self._lock:
      try:
        if (newest_step := self._newest_step()) is None:
          raise Refused(HTTPStatus.CONFLICT, 'The run has saved no checkpoint yet. Try again when it has.')
        if self._model is None or newest_step != self._loaded_step:
          self._model, self._loaded_step = self._load(), newest_step
      except (UserError, TemporaryError, Damaged, OSError) as error:  # training may have deleted the checkpoint
        raise Refused(HTTPStatus.CONFLICT, f'The weights could not be loaded: {error}') from error
      yield self._model

  def classify(self, encoded: bytes) -> dict[str, Any]:
    """Returns the most probable classes of an image file, and the image as the network receives it, as JSON."""
    with self.use() as model:
      began, image = time.monotonic(), decode(encoded, model.decoding)
      prepared = model.prepare(image)
      guesses = model.rank(model.logits([prepared], prepared=True)[0], top=TOP) if model.weights.num_classes else []
      return {'classes': [guess.plain() for guess in guesses],
              'image': html_pages.data_uri(html_pages.encode(prepared)),
              'size': f'{image.shape[1]:,} × {image.shape[0]:,} px', 'has_attention': model.num_layers > 0,
              'weights': model.weights.source, 'seconds': round(time.monotonic() - began, 3)}

  def attention(self, encoded: bytes) -> dict[str, Any]:
    """Returns the attention of an image file over all layers, as colors over the image and as its brightness."""
    with self.use() as model:
      if not model.num_layers:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'This network has no attention.')
      prepared = model.prepare(decode(encoded, model.decoding))
      heat = model.rollout([prepared], prepared=True)[0]
    return {'overlay': html_pages.data_uri(html_pages.encode(figures.overlay(prepared, heat))),
            'shade': html_pages.data_uri(html_pages.encode(figures.shade(prepared, heat)))}


def decode(encoded: bytes, options: headers.DecodeOptions = UPRIGHT) -> HostArray:
  """Returns the pixels of an image file, `[H, W, 3]` u8.

  Raises Refused if the format is not supported, or the image is damaged or has more than `MAX_PIXELS`.
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
  """A wrongly classified image: its file, the guesses for its label and for the predicted class, and a small PNG."""
  file: str
  label: Guess
  predicted: Guess
  png: bytes


class Folder:
  """The images of a folder, labeled by the subfolder that they are in, and their classes by a network.

  The thread of `run` appends to `rows`, `mistakes` and `notes`, and sets the other attributes. Other threads copy them.

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
    num_skipped = len(paths) - len(self.paths)
    self.notes = [f'{num_skipped:,} links out of the folder were skipped.'] if num_skipped else []
    self.rows: list[tuple[int, list[Guess]]] = []  # the label and the `TOP` best guesses of each image
    self.mistakes: list[Mistake] = []
    self.class_names: Sequence[str] = ()
    self.num_done, self.error = 0, ''

  def run(self, network: Network) -> None:
    """Classifies all images, batch by batch. An error of the weights ends it, and is kept as `error`."""
    labels: dict[str, int | None] = {}  # by the name of a subfolder; None = it is not named after a class
    try:
      for start in range(0, len(self.paths), BATCH):
        with network.use() as model:
          self._classify(self.paths[start:start + BATCH], labels, model)
        self.num_done = min(start + BATCH, len(self.paths))
    except Refused as error:
      self.error = str(error)

  def _classify(self, paths: Sequence[pathlib.Path], labels: dict[str, int | None], model: Model) -> None:
    """Adds a row for each image, and to `labels` the label of each subfolder that is new."""
    if not model.weights.num_classes:
      raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'The weights have no classification head.')
    self.class_names, images = model.class_names, []
    for path in paths:
      name, file = path.parent.name, str(path.relative_to(self.root))
      try:
        if name not in labels:
          labels[name] = None  # stays None if there is no such class, so that the note below is written once
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
                                     html_pages.encode(np.asarray(thumbnail))))

  def arrays(self) -> dict[str, HostArray]:
    """Returns the results so far in the arrays of a run's `predictions.npz`; {} if there are none."""
    rows = self.rows.copy()  # another thread appends to them
    if not rows:
      return {}
    return {'class_names': np.array(self.class_names), 'index': np.arange(len(rows)),
            'label': np.array([label for label, _ in rows]),
            'top': np.array([[guess.label for guess in top] for _, top in rows]),
            'probability': np.array([[guess.probability for guess in top] for _, top in rows], np.float32)}
