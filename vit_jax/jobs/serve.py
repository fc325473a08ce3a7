"""`serve`: a page in the browser: the report of a run while it grows, classes and attention of images, mistakes.

The server answers this machine only, unless --host says otherwise. It only reads the run, also while it trains, and
then computes on the CPU, as training holds the accelerator.
"""
from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.data import user_files
from vit_jax.data.image import opencv
from vit_jax.inspect import html_pages, predictions
from vit_jax.inspect.model import Model
from vit_jax.jobs import report, report_page
from vit_jax.jobs import runtime as startup
from vit_jax.jobs.serve_images import MAX_BYTES, MAX_PIXELS, Answer, Folder, Network
from vit_jax.parallel import hardware
from vit_jax.record import checkpoint_files, console, growing, storage
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
  from vit_jax.jobs import serve_http  # needs both packages
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
  """What the server shows.

  Args:
    workdir: of a run, whose report is a page; None without a run.
    folder: of images, whose mistakes are a page; None without one.
    title: of the pages.
  """

  def __init__(self, workdir: storage.Path | None, folder: Folder | None, *, title: str) -> None:
    self._workdir, self._folder, self._title = workdir, folder, title
    self._lock, self._seen, self._report = threading.Lock(), '', b''
    self._pages: dict[str, Callable[[], Answer]] = {}
    if workdir is not None:
      self._pages['/report'] = self._show_report
    self._pages['/images'] = self._show_images
    if folder is not None:
      self._pages['/folder'] = functools.partial(self._show_folder, folder)

  def by_address(self) -> dict[str, Callable[[], Answer]]:
    """Returns what makes the answer to each address."""
    return {**self._pages, '/': next(iter(self._pages.values())), '/state': self._state,
            **{f'/{name}': functools.partial(_script, name) for name in ('live.js', 'sort.js')}}

  def _named(self, here: str) -> dict[str, Any]:
    return {'menu': [(address, address[1:].capitalize()) for address in self._pages], 'here': here}

  def _state(self) -> Answer:
    """What the report and the folder's page depend on: the script loads them again when it changes."""
    done = self._folder.num_done if self._folder else 0
    return Answer(f'{self._signature()} {done}'.encode(), 'text/plain; charset=utf-8')

  def _signature(self) -> str:
    """Sizes and times of the files that a report is made of."""
    paths = [] if self._workdir is None else [os.path.join(self._workdir, name) for name in _WATCHED]
    found = [[block.stat() for block in growing.blocks(path)] for path in paths if storage.is_local(path)]
    return str([[(stat.st_mtime_ns, stat.st_size) for stat in stats] for stats in found])

  def _show_report(self) -> Answer:
    with self._lock:
      if (signature := self._signature()) != self._seen or not self._report:
        page = report_page.to_html([str(self._workdir)], **self._named('/report'))
        self._report, self._seen = page.encode(errors='backslashreplace'), signature
      return Answer(self._report)

  def _show_images(self) -> Answer:
    return _rendered('live_images.html', title=self._title, max_mib=MAX_BYTES // 2**20,
                     max_megapixels=MAX_PIXELS // 10**6, **self._named('/images'))

  def _show_folder(self, folder: Folder) -> Answer:
    arrays = folder.arrays()
    return _rendered(
        'live_folder.html', title=folder.root.name, root=str(folder.root), num_done=folder.num_done,
        num_images=len(folder.paths), error=folder.error, notes=list(folder.notes),
        mistakes=sorted(folder.mistakes.copy(), key=lambda one: -one.predicted.probability),
        num_right=int((arrays['top'][:, 0] == arrays['label']).sum()) if arrays else 0,
        num_labeled=len(arrays.get('label', ())),
        confusion=predictions.summarize(arrays).confusion if arrays else None, **self._named('/folder'))


def _rendered(template: str, **values: Any) -> Answer:
  return Answer(html_pages.render(template, **values).encode(errors='backslashreplace'))


def _script(name: str) -> Answer:
  return Answer(html_pages.read(name).encode(), 'text/javascript; charset=utf-8')
