"""What a command reads: datasets and weight files, where a person has them, and digests of their content."""
from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
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
  """Data or weights of a record that nobody has given."""


def names(commands: Sequence[Sequence[str]]) -> list[str]:
  """Returns the names of the paths that commands need."""
  found = [name for words in commands for word in words for name in _NAME.findall(word)]
  return [name for name in dict.fromkeys(found) if name != WORK]


def find(wanted: Sequence[str], given: Mapping[str, str], about: Mapping[str, str]) -> dict[str, str]:
  """Returns the path of each name: given, or else in `$VIT_JAX_DATA`.

  Raises:
    Missing: there is none of a name.
    UserError: a path that was given does not exist, or its name is not needed.
  """
  if odd := [name for name in given if name not in wanted]:
    needed = f'the names {", ".join(wanted)}' if wanted else 'no names, as the commands need no data'
    raise UserError(f'--data: expected {needed}, got {odd[0]!r}. {"Correct" if wanted else "Remove"} it.')
  found = {name: given[name] for name in wanted if name in given}
  if absent := [name for name, path in found.items() if not pathlib.Path(path).exists()]:
    raise UserError(f'--data: expected the path of {absent[0]}, got {found[absent[0]]}, which does not exist. Correct '
                    'the path.')
  if folder := os.environ.get(VARIABLE):
    found |= {name: path for name in wanted if name not in found and (path := _in_folder(folder, name))}
  if left := [name for name in wanted if name not in found]:
    what = '; '.join(f'{name}: {about[name]}' for name in left if name in about)
    raise Missing(f'--data: expected the path of {" and ".join(left)}, got none. Add --data='
                  f'{",".join(f"{name}=PATH" for name in left)}, or set {VARIABLE} to a folder with '
                  f'{" and ".join(left)}.' + f' ({what})' * bool(what))
  return found


def _in_folder(folder: str, name: str) -> str:
  """Returns the path of what a folder has by this name; '' if it has nothing, or several files with other suffixes."""
  path = pathlib.Path(folder, name)
  others = sorted(path.parent.glob(f'{name}.*')) if not path.exists() else []
  return str(path) if path.exists() else str(others[0]) if len(others) == 1 else ''


def filled(words: Sequence[str], found: Mapping[str, str]) -> list[str]:
  """Returns a command with paths in place of their names."""
  return [_NAME.sub(lambda match: found.get(match[1], match[0]), word) for word in words]


def named(text: str, found: Mapping[str, str]) -> str:
  """Returns a text with names in place of paths: the opposite of `filled`."""
  pairs = [(path, name) for name, own in found.items() for path in (own, os.path.abspath(own))]
  for path, name in sorted(pairs, key=lambda pair: -len(pair[0])):
    text = re.sub(rf'(?<![\w./-]){re.escape(path.rstrip("/"))}(?![\w.-])', f'{{{name}}}', text)
  return text


def splits(config: schema.Config, *, is_trained: bool) -> list[tuple[str, str]]:
  """Returns source and split of all images that a run or an evaluation reads, each once."""
  data = config.data
  found = [(data.source, data.train_split), (data.source, data.eval_split)] if is_trained else []
  for one in config.evals.values():
    found.append((one.source or data.source, one.split or data.eval_split))
    if isinstance(one, schema.FrozenEvaluation):
      found.append((one.source or data.source, one.train_split or data.train_split))
  if is_trained and data.pseudo.source:
    found.append((data.pseudo.source, data.pseudo.split))
  return list(dict.fromkeys(found))


def open_split(config: schema.Config, source: str, split: str) -> Source:
  """Opens a split as a run does, with the classes of the config only if it is of the config's source."""
  if source == config.data.pseudo.source:
    data = dataclasses.replace(config.data, source=source, classes='', num_classes=0, num_examples=0)
    return opening.open_split(data, split, image_px=config.image_px)
  return resources.open_split(config, '' if source == config.data.source else source, split)


def check_unchanged(config: schema.Config, read: Mapping[str, resources.Fingerprint]) -> None:
  """Checks that sources are those that a run or an evaluation read, by the names, number and sizes of their files.

  Raises:
    UserError: one is missing or was changed since.
  """
  changed = []
  for where, before in read.items():
    source, _, split = where.rpartition(' ')
    now = resources.fingerprint(open_split(config, source, split))
    if before.examples != now.examples or before.digest not in ('', now.digest):
      now = now if before.digest else now._replace(digest='')
      changed.append(f'{where}: expected the {_shown(before)} that the result is of, got {_shown(now)}. Put the data '
                     'back as they were, or run the command again.')
  if changed:
    raise UserError('\n'.join(changed))


def _shown(one: resources.Fingerprint) -> str:
  return f'{one.examples:,} images' + f' with digest {one.digest[:12]}' * bool(one.digest)


def contents(config: schema.Config, *, is_trained: bool, found: Mapping[str, str]) -> dict[str, content.Content]:
  """Returns the content of all images that a run or an evaluation reads, by source and split.

  Args:
    config: of the run.
    is_trained: whether it trains; otherwise it evaluates.
    found: paths by name, which replace them in the names of sources.

  Raises:
    UserError: a source is missing or damaged.
  """
  return {f'{named(source, found)} {split}': content.read(open_split(config, source, split))
          for source, split in splits(config, is_trained=is_trained)}


def changes(config: schema.Config, recorded: Mapping[str, content.Content], found: Mapping[str, str]) -> list[str]:
  """Returns how images differ from recorded ones, a line for each source and split.

  Args:
    config: with the data settings of the record, where sources have names in place of paths.
    recorded: by source and split.
    found: paths by name.
  """
  lines = []
  config = dataclasses.replace(config, data=dataclasses.replace(
      config.data, source=filled([config.data.source], found)[0], data_dir=filled([config.data.data_dir], found)[0]))
  for where, before in recorded.items():
    source, _, split = where.rpartition(' ')
    opened = open_split(config, filled([source], found)[0], split)
    lines += [f'{where}: {one}' for one in content.differences(before, content.read(opened), opened.class_names)]
  return lines


def files(commands: Sequence[Sequence[str]], found: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """Returns size and SHA-256 of the weights, and of all other files, that commands read; by name or path.

  Of a run, the digest is that of the parameters in its newest checkpoint.

  Raises:
    UserError: one cannot be read.
  """
  paths = {name: path for name, path in found.items() if pathlib.Path(path).is_file()}
  for words in commands:
    for word in words:
      if (match := _WEIGHTS.match(word)) and WORK not in (own := _NAME.findall(match[1])):
        path = filled([match[1]], found)[0]
        if pathlib.Path(path).exists():
          paths[own[0] if own else match[1]] = path
  try:
    return {name: digest(pathlib.Path(path)) for name, path in paths.items()}
  except OSError as error:
    raise failures.unreadable(error, str(error.filename)) from error


def digest(path: pathlib.Path) -> dict[str, Any]:
  """Returns size and SHA-256 of a file or of all files of a folder; of a run, those of its parameters."""
  if checkpoint_files.steps(path / 'checkpoints'):
    used, _ = runs.find_whole(path, json_files.read(path / 'config.json', code='model').checkpoints.keep_best)
    if used:
      return {'step': used.step, 'params_digest': checkpoint_files.read_meta(
          path / 'checkpoints' / str(used.step))['digests']['params']}
  if path.is_file():
    return {'bytes': path.stat().st_size, 'sha256': user_files.sha256(path)}
  found = sorted(one for one in path.rglob('*') if one.is_file())
  text = ''.join(f'{user_files.sha256(one)} {one.relative_to(path)}\n' for one in found)
  return {'bytes': sum(one.stat().st_size for one in found), 'sha256': hashlib.sha256(text.encode()).hexdigest()}
