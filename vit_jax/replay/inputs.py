"""What the commands of a record read: datasets and weight files, their paths, and digests of their content.

A record has names in braces in place of paths: `--config.data.source=folder:{photos}`. `recording` replaces paths by
names (`named`) and stores digests (`contents`, `files`). `job` finds the path of each name (`find`), replaces names by
paths (`filled`), and compares the digests with those of the record (`changes`, `files`) before a command runs.
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
"""An environment variable with a folder of data and weights: `$VIT_JAX_DATA/NAME`, or a file NAME with any suffix."""
WORK = 'work'  # the name of the directory of the replay: `--workdir={work}/result`
_NAME = re.compile(r'\{(\w[\w.-]*)\}')  # in a word of a command
_WEIGHTS = re.compile(r'^--(?:weights|config\.(?:[\w.]+\.)?(?:init_from|teacher))=(.+)$')
"""An argument with weights, such as `--weights=PATH` or `--config.model.init_from=PATH`."""


class Missing(UserError):
  """The path of data or weights of a record is not given."""


def names(commands: Sequence[Sequence[str]]) -> list[str]:
  """Returns the names of paths in the arguments of commands, without `WORK`, each once."""
  used = [name for words in commands for word in words for name in _NAME.findall(word)]
  return [name for name in dict.fromkeys(used) if name != WORK]


def find(wanted: Sequence[str], given: Mapping[str, str], about: Mapping[str, str]) -> dict[str, str]:
  """Returns the path of each wanted name: the one in `given` (`--data`), or else the one in `$VIT_JAX_DATA`.

  Raises:
    Missing: a name has no path; the message has its text in `about`.
    UserError: a given path does not exist, or its name is not wanted.
  """
  if unknown := [name for name in given if name not in wanted]:
    needed = f'the names {", ".join(wanted)}' if wanted else 'no names, as the commands need no data'
    raise UserError(f'--data: expected {needed}, got {unknown[0]!r}. {"Correct" if wanted else "Remove"} it.')
  if absent := [name for name, path in given.items() if not pathlib.Path(path).exists()]:
    raise UserError(f'--data: expected the path of {absent[0]}, got {given[absent[0]]}, which does not exist. Correct '
                    'the path.')
  folder = os.environ.get(VARIABLE)
  paths = {name: given.get(name) or (_in_folder(folder, name) if folder else '') for name in wanted}
  if missing := [name for name, path in paths.items() if not path]:
    explained = '; '.join(f'{name}: {about[name]}' for name in missing if name in about)
    raise Missing(f'--data: expected the path of {" and ".join(missing)}, got none. Add --data='
                  f'{",".join(f"{name}=PATH" for name in missing)}, or set {VARIABLE} to a folder with '
                  f'{" and ".join(missing)}.{f" ({explained})" if explained else ""}')
  return paths


def _in_folder(folder: str, name: str) -> str:
  """Returns the path of NAME, or of the only file NAME.*, in a folder; '' if there is none, or several."""
  path = pathlib.Path(folder, name)
  if path.exists():
    return str(path)
  with_suffix = list(path.parent.glob(f'{name}.*'))
  return str(with_suffix[0]) if len(with_suffix) == 1 else ''


def filled(text: str, paths: Mapping[str, str]) -> str:
  """Returns a text with paths in place of names: `folder:{photos}` becomes `folder:/data/photos`."""
  return _NAME.sub(lambda match: paths.get(match[1], match[0]), text)


def named(text: str, paths: Mapping[str, str]) -> str:
  """Returns a text with names in place of whole paths, relative or absolute: the inverse of `filled`."""
  pairs = [(form, name) for name, path in paths.items() for form in (path, os.path.abspath(path))]
  for path, name in sorted(pairs, key=lambda pair: -len(pair[0])):  # the longest first, as one may contain another
    text = re.sub(rf'(?<![\w./-]){re.escape(path.rstrip("/"))}(?![\w.-])', f'{{{name}}}', text)
  return text


def check_unchanged(config: schema.Config, fingerprints: Mapping[str, resources.Fingerprint]) -> None:
  """Checks that the data still have the fingerprints, by 'SOURCE SPLIT', that a run or an evaluation noted.

  A fingerprint is of the names, number and sizes of files. Raises UserError if data are missing or were changed.
  """
  def text(fingerprint: resources.Fingerprint) -> str:
    digest = f' with digest {fingerprint.digest[:12]}' if fingerprint.digest else ''
    return f'{fingerprint.examples:,} images{digest}'

  changed = []
  for source_and_split, before in fingerprints.items():
    source, _, split = source_and_split.rpartition(' ')
    now = resources.fingerprint(open_split(config, source, split))
    now = now if before.digest else now._replace(digest='')
    if now != before:
      changed.append(f'{source_and_split}: expected the {text(before)} that the result is of, got {text(now)}. Put the '
                     'data back as they were, or run the command again.')
  if changed:
    raise UserError('\n'.join(changed))


def contents(config: schema.Config, *, is_trained: bool, paths: Mapping[str, str]) -> dict[str, content.Content]:
  """Returns the content of all images that a run (`is_trained`) or an evaluation reads, by 'SOURCE SPLIT' with names.

  Raises UserError if a source is missing or damaged.
  """
  return {f'{named(source, paths)} {split}': content.read(open_split(config, source, split))
          for source, split in dict.fromkeys(_splits(config, is_trained=is_trained))}


def _splits(config: schema.Config, *, is_trained: bool) -> Iterator[tuple[str, str]]:
  """Yields source and split of all images that a run (`is_trained`) or an evaluation reads."""
  data = config.data
  if is_trained:
    yield from ((data.source, data.train_split), (data.source, data.eval_split))
  for evaluation in config.evals.values():
    yield evaluation.source or data.source, evaluation.split or data.eval_split
    if isinstance(evaluation, schema.FrozenEvaluation):
      yield evaluation.source or data.source, evaluation.train_split or data.train_split
  if is_trained and data.pseudo.source:
    yield data.pseudo.source, data.pseudo.split


def open_split(config: schema.Config, source: str, split: str) -> Source:
  """Returns a split, opened as a run does it; `data.classes` and the like count only for the config's own source."""
  if source == config.data.pseudo.source:
    data = dataclasses.replace(config.data, source=source, classes='', num_classes=0, num_examples=0)
    return opening.open_split(data, split, image_px=config.image_px)
  return resources.open_split(config, '' if source == config.data.source else source, split)


def changes(settings: Mapping[str, Any], recorded: Mapping[str, content.Content],
            paths: Mapping[str, str]) -> list[str]:
  """Returns the differences between the images now and the recorded ones, as lines of text.

  Args:
    settings: of the record, by dotted name; those of `data` and `image_px` decide how images are read.
    recorded: content by 'SOURCE SPLIT'.
    paths: by name.
  """
  nested: dict[str, Any] = {}
  for setting, value in settings.items():
    if setting.startswith('data.') or setting == 'image_px':
      *parts, last = setting.split('.')
      part_of_config = nested
      for part in parts:
        part_of_config = part_of_config.setdefault(part, {})
      part_of_config[last] = filled(value, paths) if isinstance(value, str) else value
  config = json_files.from_json(json.dumps(nested))
  lines = []
  for source_and_split, before in recorded.items():
    source, _, split = source_and_split.rpartition(' ')
    opened = open_split(config, filled(source, paths), split)
    differences = content.differences(before, content.read(opened), opened.class_names)
    lines += [f'{source_and_split}: {difference}' for difference in differences]
  return lines


def files(commands: Sequence[Sequence[str]], paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """Returns `bytes` and `sha256` of the weights and other files that commands read, by name, or by path without a name.

  A folder has those of all its files together; a run has `step` and `params_digest` of the checkpoint that stands for
  it. Raises UserError if a file cannot be read.
  """
  path_of = {name: pathlib.Path(path) for name, path in paths.items() if pathlib.Path(path).is_file()}
  for words in commands:
    for match in filter(None, map(_WEIGHTS.match, words)):
      used_names, path = _NAME.findall(match[1]), pathlib.Path(filled(match[1], paths))
      if WORK not in used_names and path.exists():
        path_of[used_names[0] if used_names else match[1]] = path
  try:
    return {name: _digest(path) for name, path in path_of.items()}
  except OSError as error:
    raise failures.unreadable(error, str(error.filename)) from error


def _digest(path: pathlib.Path) -> dict[str, Any]:
  """Returns the digest of a file, a folder or a run, as in `files`."""
  if checkpoint_files.steps(path / 'checkpoints'):
    chosen, _ = runs.find_whole(path, json_files.read(path / 'config.json', code='model').checkpoints.keep_best)
    if chosen:
      meta = checkpoint_files.read_meta(path / 'checkpoints' / str(chosen.step))
      return {'step': chosen.step, 'params_digest': meta['digests']['params']}
  if path.is_file():
    return {'bytes': path.stat().st_size, 'sha256': user_files.sha256(path)}
  in_folder = sorted(file for file in path.rglob('*') if file.is_file())
  text = ''.join(f'{user_files.sha256(file)} {file.relative_to(path)}\n' for file in in_folder)
  return {'bytes': sum(file.stat().st_size for file in in_folder), 'sha256': hashlib.sha256(text.encode()).hexdigest()}
