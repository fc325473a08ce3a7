"""`--job=push`: publishes weights on the Hugging Face hub, with a model card.

The weights are written into a temporary folder, as `convert` does, and read back. A license must allow it: that of the
weights, and, for a run, that of the weights it began with (`find_license`).
"""
from __future__ import annotations

import pathlib
import re
import tempfile

from vit_jax.core import documents, hub
from vit_jax.core.errors import UserError
from vit_jax.jobs import runtime as startup
from vit_jax.weights import card, inference, loading, saving
from vit_jax.weights.reading import Reading

OPEN = re.compile(r'apache-2\.0|mit|bsd\b.*|cc0-1\.0|cc-by(-sa)?-\d.*', re.I)
"""Licenses that allow anyone to publish changed weights for any use."""


def run(weights: str, to: str, *, family: str, license: str, private: bool, message: str, reading: Reading,
        classes: str) -> int:
  """Publishes weights; exit status 0.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to: `hf://OWNER/NAME`, which is created if it does not exist.
    family: format, one of `huggingface`, `timm` and `run`.
    license: the license of the published weights; '' = that of the weights, and of those that a run began with.
    private: whether a new repository is private.
    message: the message of the commit.

  Raises:
    UserError: `to` is no repository, the license must be stated, the format cannot hold the weights, or the hub does
      not accept them.
  """
  scheme, _, rest = to.partition('://')
  if scheme != 'hf':
    raise UserError(f'--to: expected hf://OWNER/NAME, got {to}. Files and folders are written by vit-jax convert.')
  repository, file = hub.parse(rest)
  if file or repository.revision != 'main':
    raise UserError(f'--to: expected hf://OWNER/NAME without a file or revision, got {to}. '
                    'Leave out what follows the name.')
  startup.start()
  loaded = inference.load(weights, reading, classes=classes)
  print(loading.text(loaded))
  stated = license or find_license(loaded.given or loaded.source)
  with tempfile.TemporaryDirectory(prefix='vit_jax_push_') as temporary:
    folder, lost = saving.save(loaded, str(pathlib.Path(temporary) / repository.name), family=family)
    content = card.text(loaded, f'hf://{repository.owner}/{repository.name}', written_as=family, is_folder=True,
                        license=stated, how='Published with vit_jax; the files were read back before, and no bit of a '
                        'parameter differs.')
    (folder / saving.REPORT).unlink(missing_ok=True)  # it names folders of this machine
    try:
      page = hub.fetch(repository, 'README.md', most_bytes=2**22)
    except hub.NoRepository:
      page = None
    kept = page is not None and not card.is_ours(page.path)  # a person has written or changed it
    if not kept:
      card.place(content, folder, folder)
    for name in lost:
      print(f'This format cannot store: {name}')
    address = hub.upload(repository, folder, private=private, message=message)
  print(f'Published: {address}' + (' (its README.md, which a person wrote, is unchanged)' if kept else ''), flush=True)
  return 0


def find_license(source: str) -> str:
  """Returns the license of weights, and of the weights that a run began with; '' for a run that began with none.

  Raises:
    UserError: these weights are not published under an open license, or their license is not known.
  """
  base = _base(source)
  if base is None:
    return ''
  found, (scheme, _, rest) = card.find_license(base), base.partition('://')
  if not found and scheme == 'hf' and (page := hub.fetch(hub.parse(rest)[0], 'README.md', most_bytes=2**22)):
    found = card.license_of(page.path.parent)
  if OPEN.fullmatch(found):
    return found
  raise UserError(f'--license: expected the license under which the weights may be published, got none. They are made '
                  f'from {card.shown_source(base)}, whose license is {found or "not known"}. Read it, and if it allows '
                  'this, set --license=NAME.')


def _base(source: str) -> str | None:
  """Returns the weights that others made: those of `source`, or those that a run began with; None if there are none."""
  folder = pathlib.Path(source)
  if not (folder / 'config.json').is_file() or not (folder / 'checkpoints').is_dir():
    return source
  if not (folder / 'init.json').is_file():
    return None
  record = documents.read(folder / 'init.json', advice='Restore the file.')
  return _base(record.part('init_from').field('source').text())
