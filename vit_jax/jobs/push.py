"""`--job=push`: publishes weights on the Hugging Face hub, with a model card.

`commands.Command.run` calls `run`. It loads the weights, finds the license under which they may be published
(`find_license`), writes them as `convert` does into a temporary folder, which is read back, adds the card, and uploads
the folder. Nothing is uploaded before the license is known.
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
from vit_jax.weights.reading import Reading

OPEN_LICENSES = re.compile(r'apache-2\.0|mit|bsd\b.*|cc0-1\.0|cc-by(-sa)?-\d.*', re.I)
"""Names of licenses that allow anyone to publish changed weights for any use, such as `apache-2.0`, `bsd-3-clause` and
`cc-by-sa-4.0`. For weights with another license, a person reads it and sets `--license`."""
_MAX_README_BYTES = 2**22
_METHOD = 'Published with vit_jax; the files were read back before, and no bit of a parameter differs.'


def run(weights: str, to: str, *, family: str, license: str, private: bool, message: str, reading: Reading,
        classes: str) -> int:
  """Publishes weights; exit status 0.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to: `hf://OWNER/NAME`, which is created if it does not exist.
    family: format, one of `huggingface`, `timm` and `run`.
    license: the license of the published weights; '' = see `find_license`.
    private: whether a new repository is private.
    message: the message of the commit.

  Raises:
    UserError: `to` is no repository, the license must be stated, the format cannot hold the weights, or the hub does
      not accept them.
  """
  repository = _parse_repository(to)
  startup.start()
  loaded = inference.load(weights, reading, classes=classes)
  print(loading.text(loaded))
  published_license = license or find_license(weights)  # after loading, which reports a name that is misspelt
  keeps_readme = _has_own_readme(repository)
  with tempfile.TemporaryDirectory(prefix='vit_jax_push_') as temporary:
    # Not the name of the repository: a suffix in it would choose a file in place of a folder.
    folder, lost = saving.save(loaded, str(pathlib.Path(temporary) / 'weights'), family=family)
    (folder / saving.REPORT).unlink(missing_ok=True)  # it names folders of this machine
    if not keeps_readme:  # an upload leaves the files of the repository that the folder does not have
      content = card.text(loaded, str(repository), written_as=family, is_folder=True, license=published_license,
                          is_stated=bool(license), how=_METHOD)
      card.place(content, folder, folder)
    for name in lost:
      print(f'This format cannot store: {name}')
    address = hub.upload(repository, folder, private=private, message=message)
  print(f'Published: {address}' + (' (its README.md, which a person wrote, is unchanged)' if keeps_readme else ''),
        flush=True)
  return 0


def _parse_repository(to: str) -> hub.Repository:
  """Returns the repository that `--to` names. Raises UserError if it names something else."""
  scheme, _, rest = to.partition('://')
  if scheme != 'hf':
    raise UserError(f'--to: expected hf://OWNER/NAME, got {to}. Files and folders are written by vit-jax convert.')
  repository, file = hub.parse(rest)
  if file or repository.revision != 'main':
    raise UserError(f'--to: expected hf://OWNER/NAME without a file or revision, got {to}. '
                    'Leave out what follows the name.')
  return repository


def _has_own_readme(repository: hub.Repository) -> bool:
  """Returns whether the repository exists and has a README.md that a person wrote, or changed."""
  try:
    readme = hub.fetch(repository, 'README.md', most_bytes=_MAX_README_BYTES)
  except hub.NoRepository:
    return False
  return readme is not None and not card.is_ours(readme.path)


def find_license(source: str) -> str:
  """Returns the license of weights. For a run, it is the one license of all weights that the run began with; '' = none.

  Teachers count as well, also those that labeled images. Their values are not published, but their license may restrict
  what is made with them.

  Raises:
    UserError: some of these weights have no open license, or none that is known, or their licenses differ.
  """
  licenses = {original: _find_own_license(original) for original in _find_originals(source)}
  for original, license in licenses.items():
    if not OPEN_LICENSES.fullmatch(license):
      raise UserError(f'--license: expected the license under which the weights may be published, got none. They are '
                      f'made from {card.shown_source(original)}, whose license is {license or "not known"}. Read it, '
                      'and if it allows this, set --license=NAME.')
  if len({license.lower() for license in licenses.values()}) > 1:
    shown = ', '.join(f'{card.shown_source(original)} ({license})' for original, license in licenses.items())
    raise UserError(f'--license: expected the license under which the weights may be published, got none. They are '
                    f'made from weights with several: {shown}. Read them, and set --license=NAME.')
  return list(licenses.values())[0] if licenses else ''


def _find_own_license(original: str) -> str:
  """Returns the license of weights that are no run, if need be from their card on the hub; '' if it is not known."""
  license = card.find_license(original)
  scheme, _, rest = original.partition('://')
  if license or scheme != 'hf':
    return license
  try:
    readme = hub.fetch(hub.parse(rest)[0], 'README.md', most_bytes=_MAX_README_BYTES)
  except (hub.NoRepository, hub.NoRevision):  # it was removed after a run began with it
    return ''
  return card.license_of(readme.path.parent) if readme else ''


def _find_originals(source: str) -> list[str]:
  """Returns the weights that were not trained here, from which `source` was made, and their teachers.

  For a run, these are the weights that it began with. Where they are of another run, that run is followed in turn.
  Raises UserError if `init.json` or `config.json` of a run is damaged.
  """
  originals, names = [], [source]
  for name in names:  # the loop appends the weights that a run used, and then visits them too
    folder = card.run_of(name)
    if not (folder / 'config.json').is_file() or not (folder / 'checkpoints').is_dir():
      originals.append(name)
    elif (folder / saving.REPORT).is_file():  # `convert` wrote it from weights whose license is in its card
      originals.append(str(folder))
    else:
      sources = _find_labelers(folder)
      if (folder / 'init.json').is_file():
        record = documents.read(folder / 'init.json', advice='Restore the file.')
        sources += [entry.field('source').text() for _, entry in record.fields()]
      names += [used for used in sources if used not in names]
  return originals


def _find_labelers(run: pathlib.Path) -> list[str]:
  """Returns the teachers that labeled images of a run; for label maps of an unknown teacher, the folder of the maps."""
  config = documents.read(run / 'config.json', advice='Restore the file.')
  teacher = config.part('data').part('pseudo').field('teacher', default='').text()
  maps = config.part('objective').field('maps', default='').text()
  info = pathlib.Path(os.path.expanduser(maps), answers.INFO)
  if maps and info.is_file():
    maps = documents.read(info, advice='Copy the label maps again.').part('made').field('weights', default=maps).text()
  return [labeler for labeler in (teacher, maps) if labeler]
