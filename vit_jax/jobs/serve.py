"""`--job=serve`: live pages in the browser: the report of a run, classes and attention of images, mistakes in a folder.

`commands.Command.run` calls `run`, which starts the server of `serve_http.py`. The server answers this machine only,
unless `--host` is set, and writes no files. The network of a run computes on the CPU, as training may use the
accelerator, and is loaded again when a newer checkpoint is saved. One thread at a time uses the network:

  main thread          runs the event loop of the server, which passes each request to a thread of a pool
  threads of the pool  make the pages (`Pages`), and classify uploaded images (`Network.classify`, `Network.attention`)
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
from vit_jax.weights.hints import Reading

log = logging.getLogger('vit_jax.jobs')
_REPORT_FILES = ('metrics.jsonl', 'config.json', 'final.json', 'evaluate.json', 'predictions.npz')  # of a run
MAX_PIXELS = 64_000_000  # of an image before resizing
TOP = 5  # classes that are shown for an image
BATCH = 16  # images of a folder that are classified together; other requests are answered between two batches
MAX_MISTAKES = 200  # on the page of a folder
_THUMBNAIL_PX = 112


def run(weights: str, workdir: storage.Path | None, files: Sequence[str], *, host: str, port: int,
        reading: Reading, classes: str) -> int:
  """Serves the pages until Ctrl-C; returns the exit status 0.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    workdir: a run directory, in place of weights.
    files: at most one folder of images, with a subfolder for each class.
    host, port: the address on which the server listens.

  Raises UserError if neither or both of weights and a run are given, one of them cannot be read, the port is in use, or
  a package is missing.
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

  folder = Folder(user_files.expand_home(files[0])) if files else None
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
  """The pages of the server: the report of a run, a page for uploaded images, and the mistakes in a folder.

  Without `workdir`, there is no report, and without `folder`, no page of mistakes. `title` is for the page for images.
  """

  def __init__(self, workdir: storage.Path | None, folder: Folder | None, *, title: str) -> None:
    self._workdir, self._folder = workdir, folder
    self._report_lock = threading.Lock()  # one thread makes the report; others wait for the same report
    self._report, self._report_signature = b'', ''  # the page, and `_signature()` at the time when it was made
    self._pages: dict[str, Callable[[], Answer]] = {}  # by address, in the order of the menu
    if workdir is not None:
      self._pages['/report'] = self._show_report
    self._pages['/images'] = functools.partial(
        self._render, '/images', 'live_images.html', title=title, max_mib=serve_http.MAX_BYTES // 2**20,
        max_megapixels=MAX_PIXELS // 10**6)
    if folder is not None:
      self._pages['/folder'] = functools.partial(self._show_folder, folder)
    self._menu = [(address, address[1:].capitalize()) for address in self._pages]

  def by_address(self) -> dict[str, Callable[[], Answer]]:
    """Returns the functions that make the answers, by address. The address `/` has the first page of the menu."""
    def script(name: str) -> Answer:
      return Answer(html_pages.read(name).encode(), 'text/javascript; charset=utf-8')
    first_page, *_ = self._pages.values()
    return {**self._pages, '/': first_page, '/state': self._state, '/live.js': functools.partial(script, 'live.js'),
            '/sort.js': functools.partial(script, 'sort.js')}

  def _state(self) -> Answer:
    """Returns a text that changes with the report and the folder's page; `live.js` then loads the page again."""
    num_done = self._folder.num_done if self._folder else 0
    return Answer(f'{self._signature()} {num_done}'.encode(), 'text/plain; charset=utf-8')

  def _signature(self) -> str:
    """Returns times and sizes of the files of the report; a growing file may have several blocks on the disk."""
    paths = [] if self._workdir is None else [os.path.join(self._workdir, name) for name in _REPORT_FILES]
    stats = [[block.stat() for block in growing.blocks(path)] for path in paths if storage.is_local(path)]
    return str([[(stat.st_mtime_ns, stat.st_size) for stat in stats_of_file] for stats_of_file in stats])

  def _show_report(self) -> Answer:
    """Returns the report, which is made again only if its files have changed."""
    with self._report_lock:
      signature = self._signature()  # before the report reads the files, so that the next request sees later changes
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
  """A network that threads share; a lock ensures that one thread at a time uses the network.

  Args:
    load: loads the network with the newest weights.
    newest_step: returns the step of the newest weights, None before the first. Weights of a new step are loaded.
    model: the network, if it is loaded already.
  """

  def __init__(self, load: Callable[[], Model], newest_step: Callable[[], int | None],
               model: Model | None = None) -> None:
    self._load, self._newest_step, self._lock = load, newest_step, threading.Lock()
    self._model, self._loaded_step = model, newest_step() if model else None

  @contextlib.contextmanager
  def use(self) -> Iterator[Model]:
    """Holds the lock and yields the network with the newest weights. Raises Refused if no weights can be loaded."""
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
      began_s = time.monotonic()
      image = decode(encoded, model.decoding)
      prepared = model.prepare(image)
      guesses = model.rank(model.logits([prepared], prepared=True)[0], top=TOP) if model.weights.num_classes else []
      return {'classes': [guess.plain() for guess in guesses],
              'image': html_pages.data_uri(html_pages.encode(prepared)),
              'size': f'{image.shape[1]:,} × {image.shape[0]:,} px', 'has_attention': model.num_layers > 0,
              'weights': model.weights.source, 'seconds': round(time.monotonic() - began_s, 3)}

  def attention(self, encoded: bytes) -> dict[str, Any]:
    """Returns two pictures of the attention over all layers: as colors over the image, and as its brightness."""
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
  file_format = headers.detect_format(encoded[:256])
  if file_format not in headers.FORMATS:
    raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f'Expected a {headers.NAMES} file, got '
                  f'{file_format.upper() or "another kind of file"}.')
  try:
    return decoding.decode(encoded, options._replace(max_pixels=MAX_PIXELS))
  except headers.BadImage as error:
    problem = str(error).partition(' Shrink')[0].rstrip('.')  # without advice that does not apply to uploads
    raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f'The image could not be read: {problem}.') from error


class Mistake(NamedTuple):
  """A wrongly classified image: the file, the guess for the label, the best guess, and a small PNG of the image."""
  file: str
  label: Guess
  predicted: Guess
  png: bytes


class Folder:
  """The images of a folder with the guesses of a network; the name of an image's subfolder is its class.

  The thread that calls `run` fills the attributes; other threads read them and copy the lists first.

  Args:
    root: the folder; links that lead out of the folder are skipped.

  Raises UserError if `root` is not a folder, or has no images.
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
    self.num_done = 0  # images that were classified or left out
    self.error = ''  # why `run` ended early

  def run(self, network: Network) -> None:
    """Classifies all images, batch by batch. If the weights cannot be used, ends early and sets `error`."""
    label_by_subfolder: dict[str, int | None] = {}  # None = the subfolder is not named after a class
    try:
      for start in range(0, len(self.paths), BATCH):
        with network.use() as model:
          self._classify(self.paths[start:start + BATCH], label_by_subfolder, model)
        self.num_done = min(start + BATCH, len(self.paths))
    except Refused as error:
      self.error = str(error)

  def _classify(self, paths: Sequence[pathlib.Path], label_by_subfolder: dict[str, int | None], model: Model) -> None:
    """Adds rows and mistakes of the images, and labels of new subfolders. Raises Refused if there is no head."""
    if not model.weights.num_classes:
      raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, 'The weights have no classification head.')
    self.class_names = model.class_names
    labeled = []  # file, label and image as the network receives it
    for path in paths:
      subfolder, file = path.parent.name, str(path.relative_to(self.root))
      try:
        if subfolder not in label_by_subfolder:
          label_by_subfolder[subfolder] = None  # remains if `find_class` raises UserError, so that one note is written
          label_by_subfolder[subfolder] = model.find_class(subfolder)
        label = label_by_subfolder[subfolder]
        if label is not None:
          labeled.append((file, label, model.prepare(decode(user_files.read_image(path), model.decoding))))
      except UserError:
        self.notes.append(f'Folder {subfolder}: its images are left out, as it is not named after a class of the '
                          'weights.')
      except (Refused, headers.BadImage, OSError) as error:
        self.notes.append(f'{file}: {error}')
    logits = model.logits([image for _, _, image in labeled], prepared=True) if labeled else ()
    for (file, label, image), row in zip(labeled, logits, strict=True):
      ranked = model.rank(row, top=len(row))
      self.rows.append((label, ranked[:TOP]))
      if ranked[0].label != label and len(self.mistakes) < MAX_MISTAKES:
        guess_of_label = next(guess for guess in ranked if guess.label == label)
        thumbnail = Image.fromarray(image)
        thumbnail.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
        self.mistakes.append(Mistake(file, guess_of_label, ranked[0], html_pages.encode(np.asarray(thumbnail))))

  def arrays(self) -> dict[str, HostArray]:
    """Returns the results so far as arrays named as in a run's `predictions.npz`; {} without results."""
    rows = self.rows.copy()  # another thread appends to them
    if not rows:
      return {}
    return {'class_names': np.array(self.class_names), 'index': np.arange(len(rows)),
            'label': np.array([label for label, _ in rows]),
            'top': np.array([[guess.label for guess in top] for _, top in rows]),
            'probability': np.array([[guess.probability for guess in top] for _, top in rows], np.float32)}
