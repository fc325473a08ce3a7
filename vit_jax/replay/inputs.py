"""What the commands of a record read: datasets and weight files, where a person has them, and digests of their content.

A record has names such as `{photos}` in place of paths. `recording` puts them there (`named`) and stores `contents` and
`files`. `job` looks for the path of each name (`find`), puts the paths back (`filled`), and compares the content with
that of the record, before a command runs.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax.config import json_files, schema
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data import content, opening, user_files
from vit_jax.data.source import Source
from vit_jax.evaluate import resources
from vit_jax.record import checkpoint_files
from vit_jax.weights import runs

VARIABLE = 'VIT_JAX_DATA'
"""A folder with what records read, by name: `$VIT_JAX_DATA/NAME`, or a file with any suffix."""
WORK = 'work'
"""The name of the fresh directory in commands."""
_NAME = re.compile(r'\{(\w[\w.-]*)\}')
_WEIGHTS = re.compile(r'^--(?:weights|config\.(?:[\w.]+\.)?(?:init_from|teacher))=(.+)$')


class Missing(UserError):
  """The path of data or weights of a record is not given."""


def names(commands: Sequence[Sequence[str]]) -> list[str]:
  """Returns the names of the paths that commands need."""
  used = [name for words in commands for word in words for name in _NAME.findall(word)]
  return [name for name in dict.fromkeys(used) if name != WORK]


def find(wanted: Sequence[str], given: Mapping[str, str], about: Mapping[str, str]) -> dict[str, str]:
  """Returns the path of each wanted name: the given one, or else the one in `$VIT_JAX_DATA`.

  Raises:
    Missing: a name has no path; the message has the text of `about` for it.
    UserError: a path that was given does not exist, or its name is not needed.
  """
  if unknown := [name for name in given if name not in wanted]:
    needed = f'the names {", ".join(wanted)}' if wanted else 'no names, as the commands need no data'
    raise UserError(f'--data: expected {needed}, got {unknown[0]!r}. {"Correct" if wanted else "Remove"} it.')
  if absent := [name for name, path in given.items() if not pathlib.Path(path).exists()]:
    raise UserError(f'--data: expected the path of {absent[0]}, got {given[absent[0]]}, which does not exist. Correct '
                    'the path.')
  folder = os.environ.get(VARIABLE)
  paths = {name: path for name in wanted if (path := given.get(name) or (_in_folder(folder, name) if folder else ''))}
  if left := [name for name in wanted if name not in paths]:
    what = '; '.join(f'{name}: {about[name]}' for name in left if name in about)
    raise Missing(f'--data: expected the path of {" and ".join(left)}, got none. Add --data='
                  f'{",".join(f"{name}=PATH" for name in left)}, or set {VARIABLE} to a folder with '
                  f'{" and ".join(left)}.' + f' ({what})' * bool(what))
  return paths


def _in_folder(folder: str, name: str) -> str:
  """Returns the path of what a folder has by this name; '' if it has nothing, or several files with other suffixes."""
  path = pathlib.Path(folder, name)
  if path.exists():
    return str(path)
  files_of_name = list(path.parent.glob(f'{name}.*'))
  return str(files_of_name[0]) if len(files_of_name) == 1 else ''


def filled(text: str, paths: Mapping[str, str]) -> str:
  """Returns a text with paths in place of their names."""
  return _NAME.sub(lambda match: paths.get(match[1], match[0]), text)


def named(text: str, paths: Mapping[str, str]) -> str:
  """Returns a text with names in place of paths: the opposite of `filled`."""
  pairs = [(form, name) for name, path in paths.items() for form in (path, os.path.abspath(path))]
  for path, name in sorted(pairs, key=lambda pair: -len(pair[0])):
    text = re.sub(rf'(?<![\w./-]){re.escape(path.rstrip("/"))}(?![\w.-])', f'{{{name}}}', text)
  return text


def check_unchanged(config: schema.Config, fingerprints: Mapping[str, resources.Fingerprint]) -> None:
  """Checks that sources are those that a run or an evaluation read, by the names, number and sizes of their files.

  Raises:
    UserError: one is missing or was changed since.
  """
  def text(one: resources.Fingerprint) -> str:
    return f'{one.examples:,} images' + f' with digest {one.digest[:12]}' * bool(one.digest)

  changed = []
  for where, before in fingerprints.items():
    source, _, split = where.rpartition(' ')
    now = resources.fingerprint(open_split(config, source, split))
    now = now if before.digest else now._replace(digest='')
    if now != before:
      changed.append(f'{where}: expected the {text(before)} that the result is of, got {text(now)}. Put the data back '
                     'as they were, or run the command again.')
  if changed:
    raise UserError('\n'.join(changed))


def contents(config: schema.Config, *, is_trained: bool, paths: Mapping[str, str]) -> dict[str, content.Content]:
  """Returns the content of all images that a run or an evaluation reads, by source and split, with names for paths.

  Raises:
    UserError: a source is missing or damaged.
  """
  return {f'{named(source, paths)} {split}': content.read(open_split(config, source, split))
          for source, split in dict.fromkeys(_splits(config, is_trained=is_trained))}


def _splits(config: schema.Config, *, is_trained: bool) -> Iterator[tuple[str, str]]:
  """Yields source and split of all images that a run (`is_trained`) or an evaluation reads."""
  data = config.data
  if is_trained:
    yield from ((data.source, data.train_split), (data.source, data.eval_split))
  for one in config.evals.values():
    yield one.source or data.source, one.split or data.eval_split
    if isinstance(one, schema.FrozenEvaluation):
      yield one.source or data.source, one.train_split or data.train_split
  if is_trained and data.pseudo.source:
    yield data.pseudo.source, data.pseudo.split


def open_split(config: schema.Config, source: str, split: str) -> Source:
  """Opens a split as a run does, with the classes of the config only if it is of the config's source."""
  if source == config.data.pseudo.source:
    data = dataclasses.replace(config.data, source=source, classes='', num_classes=0, num_examples=0)
    return opening.open_split(data, split, image_px=config.image_px)
  return resources.open_split(config, '' if source == config.data.source else source, split)


def changes(settings: Mapping[str, Any], recorded: Mapping[str, content.Content],
            paths: Mapping[str, str]) -> list[str]:
  """Returns how images differ from the `recorded` ones, a line for each source and split.

  Args:
    settings: of the record, by dotted name; those of `data` and the image size decide how images are read.
    recorded: content by source and split.
    paths: by name.
  """
  plain: dict[str, Any] = {}
  for setting, value in settings.items():
    if setting.startswith('data.') or setting == 'image_px':
      *parts, last = setting.split('.')
      place = plain
      for part in parts:
        place = place.setdefault(part, {})
      place[last] = filled(value, paths) if isinstance(value, str) else value
  config = json_files.from_json(json.dumps(plain))
  lines = []
  for where, before in recorded.items():
    source, _, split = where.rpartition(' ')
    opened = open_split(config, filled(source, paths), split)
    lines += [f'{where}: {one}' for one in content.differences(before, content.read(opened), opened.class_names)]
  return lines


def files(commands: Sequence[Sequence[str]], paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """Returns size and SHA-256 of the weights, and of all other files, that commands read; by name or path.

  Of a folder, all files count; of a run, only the parameters in its newest checkpoint.

  Raises:
    UserError: one cannot be read.
  """
  read = {name: pathlib.Path(path) for name, path in paths.items() if pathlib.Path(path).is_file()}
  for weights in (match[1] for words in commands for word in words if (match := _WEIGHTS.match(word))):
    used, path = _NAME.findall(weights), pathlib.Path(filled(weights, paths))
    if WORK not in used and path.exists():
      read[used[0] if used else weights] = path
  try:
    return {name: _digest(path) for name, path in read.items()}
  except OSError as error:
    raise failures.unreadable(error, str(error.filename)) from error


def _digest(path: pathlib.Path) -> dict[str, Any]:
  if checkpoint_files.steps(path / 'checkpoints'):
    used, _ = runs.find_whole(path, json_files.read(path / 'config.json', code='model').checkpoints.keep_best)
    if used:
      meta = checkpoint_files.read_meta(path / 'checkpoints' / str(used.step))
      return {'step': used.step, 'params_digest': meta['digests']['params']}
  if path.is_file():
    return {'bytes': path.stat().st_size, 'sha256': user_files.sha256(path)}
  found = sorted(one for one in path.rglob('*') if one.is_file())
  text = ''.join(f'{user_files.sha256(one)} {one.relative_to(path)}\n' for one in found)
  return {'bytes': sum(one.stat().st_size for one in found), 'sha256': hashlib.sha256(text.encode()).hexdigest()}
