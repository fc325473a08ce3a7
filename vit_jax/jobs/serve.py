"""`serve`: a page in the browser: the report of a run while it grows, classes and attention of images, mistakes.

The server answers this machine only, unless --host says otherwise. It only reads the run, also while it trains, and
then computes on the CPU, as training holds the accelerator.
"""
from __future__ import annotations

import functools
import logging
import os
import pathlib
import threading
from collections.abc import Hashable, Sequence
from typing import Any

from vit_jax.core.errors import UserError
from vit_jax.data.image import opencv
from vit_jax.data.sources import image_list
from vit_jax.inspect import html_pages, predictions
from vit_jax.inspect.model import Model
from vit_jax.jobs import report, report_page, serve_http
from vit_jax.jobs import runtime as startup
from vit_jax.jobs.serve_http import Answer
from vit_jax.jobs.serve_images import MAX_PIXELS, Folder, Network
from vit_jax.parallel import hardware
from vit_jax.record import checkpoint_files, console, storage
from vit_jax.weights import inference
from vit_jax.weights.reading import Reading

log = logging.getLogger('vit_jax.jobs')
_WATCHED = ('metrics.jsonl', 'config.json', 'final.json', 'evaluate.json', 'predictions.npz')


def run(weights: str, workdir: storage.Path | None, files: Sequence[str], *, host: str, port: int,
        reading: Reading, classes: str) -> int:
  """Serves the page until Ctrl-C.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    workdir: a run, instead of weights.
    files: at most one folder of images, with a subfolder for each class.
    host, port: to listen on.

  Raises:
    UserError: neither or both of weights and a run are given, they cannot be read, or the port is in use.
  """
  if bool(weights) == (workdir is not None):
    raise UserError(f'--weights: expected either --weights or --workdir, got {"both" if weights else "none"}. Set one '
                    'of them to the network, or to the run, to show.')
  if len(files) > 1:
    raise UserError(f'folder: expected at most one folder of images, got {len(files)}. Pass the folder that holds a '
                    'subfolder for each class.')
  if workdir is not None:
    report.check(workdir)
    hardware.use_cpu()
  startup.start()
  opencv.quieten()

  def load() -> Model:
    return Model(inference.load(weights or str(workdir), reading, classes=classes))

  def newest_step() -> Hashable | None:
    return True if workdir is None else max(checkpoint_files.steps(workdir / 'checkpoints'), default=None)

  network = Network(load, newest_step)
  folder = Folder(files[0], network, find=image_list.find) if files else None
  with Site(network, workdir, folder, title=weights or str(workdir)).serve(host, port) as server:
    if workdir is None:
      console.begin_stage('loading the weights')
      log.info('%s', inference.describe_class_names(network.preload().weights, classes=classes))
    console.end_stage()
    if not server.is_local:
      log.warning('--host=%s: everyone who can reach this machine can open the page and send images to it.', host)
    print(f'Open {server.url} in a browser. Ctrl-C ends the server.', flush=True)
    if folder:
      threading.Thread(target=folder.run, daemon=True).start()
    server.serve_forever()
  return 0


class Site:
  """The pages of a server.

  Args:
    network: classifies images.
    workdir: of a run, whose report is a page; None without a run.
    folder: of images, whose mistakes are a page; None without one.
    title: of the pages.
  """

  def __init__(self, network: Network, workdir: storage.Path | None, folder: Folder | None, *, title: str) -> None:
    self._network, self._workdir, self._folder, self._title = network, workdir, folder, title
    self._lock = threading.Lock()
    self._seen: object = None
    self._report = b''
    pages: dict[str, tuple[str, serve_http.Page]] = {}
    if workdir is not None:
      pages['/report'] = ('Report', self._show_report)
    pages['/images'] = ('Images', self._show_images)
    if folder is not None:
      pages['/folder'] = ('Folder', self._show_folder)
    self._menu = [(address, name) for address, (name, _) in pages.items()]
    self._pages = {address: page for address, (_, page) in pages.items()}

  def pages(self) -> dict[str, serve_http.Page]:
    """Returns what makes the answer to each address."""
    return {**self._pages, '/': next(iter(self._pages.values())), '/state': self._state,
            **{f'/{name}': functools.partial(_script, name) for name in ('live.js', 'sort.js')}}

  def serve(self, host: str, port: int) -> serve_http.Server:
    """Returns the server, which listens but does not answer yet.

    Raises:
      UserError: the address cannot be used.
    """
    return serve_http.Server(host, port, pages=self.pages(), actions={
        '/classify': self._network.classify, '/attention': self._network.attention})

  def _render(self, template: str, here: str, **values: Any) -> bytes:
    return html_pages.render(template, menu=self._menu, here=here, **values).encode(errors='backslashreplace')

  def _state(self) -> Answer:
    """What the report and the folder's page depend on: the script loads them again when it changes."""
    done = self._folder.num_done if self._folder else 0
    return Answer(repr((self._signature(), done)).encode(), 'text/plain; charset=utf-8')

  def _signature(self) -> object:
    """Sizes and times of the files that a report is made of."""
    found: list[object] = []
    for name in _WATCHED if self._workdir is not None else ():
      path = os.path.join(self._workdir, name)  # type: ignore[arg-type]
      stats = [block.stat() for block in storage.blocks(path)] if storage.is_local(path) else []
      found.append(tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))
    return tuple(found)

  def _show_report(self) -> Answer:
    with self._lock:
      if (signature := self._signature()) != self._seen or not self._report:
        page = report_page.to_html([str(self._workdir)], menu=self._menu, here='/report')
        self._report = page.encode(errors='backslashreplace')
        self._seen = signature
      return Answer(self._report)

  def _show_images(self) -> Answer:
    return Answer(self._render('live_images.html', '/images', title=self._title,
                               max_mib=serve_http.MAX_BYTES // 2**20, max_megapixels=MAX_PIXELS // 10**6))

  def _show_folder(self) -> Answer:
    folder = self._folder
    assert folder is not None
    arrays = folder.arrays()
    right = int((arrays['top'][:, 0] == arrays['label']).sum()) if arrays else 0
    mistakes = sorted(folder.mistakes.copy(), key=lambda one: -one.probability)
    return Answer(self._render(
        'live_folder.html', '/folder', title=pathlib.Path(folder.root).name, root=str(folder.root),
        num_done=folder.num_done, num_images=len(folder.paths), num_right=right, num_labeled=len(folder.labels),
        error=folder.error, notes=list(folder.notes), mistakes=mistakes,
        confusion=predictions.summarize(arrays).confusion if arrays else None))


def _script(name: str) -> Answer:
  return Answer(html_pages.read(name).encode(), 'text/javascript; charset=utf-8')
