"""`--job=push`: publishes weights on the Hugging Face hub, with a model card.

`commands.Command.run` calls `run`, which loads the weights, finds the license under which they may be published
(`find_license`), and writes them into a temporary folder, which `saving.save` reads back and compares. Then `run` adds
the card and uploads the folder. Nothing is uploaded before the license is known.
"""
from __future__ import annotations

import os
import pathlib
import re
import tempfile

from vit_jax.core import documents, hub
from vit_jax.core.errors import UserError
from vit_jax.data import answers
from vit_jax.jobs import startup
from vit_jax.weights import card, inference, loading, saving
from vit_jax.weights.hints import Reading

OPEN_LICENSES = re.compile(r'apache-2\.0|mit|bsd\b.*|cc0-1\.0|cc-by(-sa)?-\d.*', re.I)
"""Names of licenses that allow anyone to publish changed weights for any use, such as `apache-2.0`, `bsd-3-clause` and
`cc-by-sa-4.0`. For weights with another license, a person reads it and sets `--license`."""
_MAX_README_BYTES = 2**22
_METHOD = 'Published with vit_jax; the files were read back before, and no bit of a parameter differs.'


def run(weights: str, to: str, *, family: str, license: str, private: bool, message: str, reading: Reading,
        classes: str) -> int:
  """Publishes weights; returns the exit status 0.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to: `hf://OWNER/NAME`, which is created if it does not exist.
    family: the format, one of `huggingface`, `timm` and `run`.
    license: the license of the published weights; '' = the result of `find_license`.
    private: whether a new repository is private.
    message: the message of the commit.

  Raises UserError if `to` is not a repository, the license must be stated, the format cannot hold the weights, or the
  hub rejects the upload.
  """
  scheme, _, name = to.partition('://')
  if scheme != 'hf':
    raise UserError(f'--to: expected hf://OWNER/NAME, got {to}. Files and folders are written by vit-jax convert.')
  repository, file = hub.parse(name)
  if file or repository.revision != 'main':
    raise UserError(f'--to: expected hf://OWNER/NAME without a file or revision, got {to}. '
                    'Leave out what follows the name.')
  startup.start()
  loaded = inference.load(weights, reading, classes=classes)
  print(loading.text(loaded))
  published_license = license or find_license(weights)  # after `inference.load`, which reports misspelled names
  is_readme_kept = _has_edited_readme(repository)
  with tempfile.TemporaryDirectory(prefix='vit_jax_push_') as temporary:
    # The folder is not named after the repository: with a suffix in the name, `save` would write a single file.
    folder, unsaved_names = saving.save(loaded, str(pathlib.Path(temporary) / 'weights'), family=family)
    (folder / saving.REPORT).unlink(missing_ok=True)  # the report names folders of this machine
    if not is_readme_kept:  # an upload keeps files of the repository that the folder does not have
      content = card.text(loaded, str(repository), written_as=family, is_folder=True, license=published_license,
                          is_stated=bool(license), how=_METHOD)
      card.place(content, folder, folder)
    for unsaved_name in unsaved_names:
      print(f'This format cannot store: {unsaved_name}')
    address = hub.upload(repository, folder, private=private, message=message)
  print(f'Published: {address}' + (' (its README.md, which a person wrote, is unchanged)' if is_readme_kept else ''),
        flush=True)
  return 0


def _has_edited_readme(repository: hub.Repository) -> bool:
  """Returns whether the repository exists and has a README.md that a person wrote or changed."""
  try:
    readme = hub.fetch(repository, 'README.md', most_bytes=_MAX_README_BYTES)
  except hub.NoRepository:
    return False
  return readme is not None and not card.is_ours(readme.path)


def find_license(source: str) -> str:
  """Returns the license of weights. For a run, this is the license of the weights from which it was made; '' = none.

  Teachers count as well, also teachers that only labeled images: the weights of a teacher are not published, but their
  license may restrict what is made with them.

  Raises UserError if a license is not open or not known, or the licenses of several weights differ.
  """
  license_by_weights = {original: _find_stated_license(original) for original in _find_originals(source)}
  for original, license in license_by_weights.items():
    if not OPEN_LICENSES.fullmatch(license):
      raise UserError(f'--license: expected the license under which the weights may be published, got none. They are '
                      f'made from {card.shown_source(original)}, whose license is {license or "not known"}. Read it, '
                      'and if it allows this, set --license=NAME.')
  if len({license.lower() for license in license_by_weights.values()}) > 1:
    shown = ', '.join(f'{card.shown_source(original)} ({license})' for original, license in license_by_weights.items())
    raise UserError(f'--license: expected the license under which the weights may be published, got none. They are '
                    f'made from weights with several: {shown}. Read them, and set --license=NAME.')
  return next(iter(license_by_weights.values()), '')


def _find_stated_license(original: str) -> str:
  """Returns the license that a local card, or else the card on the hub, states for weights; '' = none is stated."""
  license = card.find_license(original)
  scheme, _, name = original.partition('://')
  if license or scheme != 'hf':
    return license
  try:
    readme = hub.fetch(hub.parse(name)[0], 'README.md', most_bytes=_MAX_README_BYTES)
  except (hub.NoRepository, hub.NoRevision):  # the repository was removed after a run had begun with its weights
    return ''
  return card.license_of(readme.path.parent) if readme else ''


def _find_originals(source: str) -> list[str]:
  """Returns the weights from which `source` was made: `source` itself, unless it is a run that was trained here.

  For such a run, these are its teachers and the weights that it began with. Runs among them are replaced in turn.
  Raises UserError if `init.json` or `config.json` of a run is damaged.
  """
  originals = []
  to_visit = [source]
  for weights in to_visit:  # the loop also visits the weights that it appends
    folder = card.run_of(weights)
    if not (folder / 'config.json').is_file() or not (folder / 'checkpoints').is_dir():
      originals.append(weights)
    elif (folder / saving.REPORT).is_file():  # `convert` wrote this run; its card has the license
      originals.append(str(folder))
    else:
      used_weights = _find_labelers(folder)
      if (folder / 'init.json').is_file():
        record = documents.read(folder / 'init.json', advice='Restore the file.')
        used_weights += [entry.field('source').text() for _, entry in record.fields()]
      to_visit += [used for used in used_weights if used not in to_visit]
  return originals


def _find_labelers(run: pathlib.Path) -> list[str]:
  """Returns the teachers that labeled the images of a run; for label maps of an unknown teacher, their folder."""
  config = documents.read(run / 'config.json', advice='Restore the file.')
  teacher = config.object_or_empty('data').object_or_empty('pseudo').field('teacher', default='').text()
  map_teacher = map_folder = config.object_or_empty('objective').field('maps', default='').text()
  path = pathlib.Path(os.path.expanduser(map_folder), answers.INFO)
  if map_folder and path.is_file():
    info = documents.read(path, advice='Copy the label maps again.')
    map_teacher = info.object_or_empty('made').field('weights', default=map_folder).text()
  return [labeler for labeler in (teacher, map_teacher) if labeler]
