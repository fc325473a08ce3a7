"""The inputs of the commands of a record: the paths of datasets and weight files, and digests of their content.

A record has placeholders such as `{photos}` in place of paths: `--config.data.source=folder:{photos}`. A placeholder is
represented by its name, `photos`; dictionaries `paths` map names to paths. `recording` replaces paths by placeholders
(`with_placeholders`) and stores digests (`read_contents`, `digest_files`). `job` finds the path of each name
(`find_paths`), replaces placeholders by paths (`with_paths`), and compares the digests with those of the record
(`find_changes`, `digest_files`) before a command runs.
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

from vit_jax.config import engine, schema
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data import content, opening, user_files
from vit_jax.data.source import Source
from vit_jax.evaluate import resources
from vit_jax.record import checkpoint_files
from vit_jax.weights import runs

FOLDER_VARIABLE = 'VIT_JAX_DATA'
"""The environment variable with a folder of data and weights, which are named `NAME`, or `NAME` and a suffix."""
WORK = 'work'  # the name of the directory of the replay, in `--workdir={work}/result`
_PLACEHOLDER = re.compile(r'\{(\w[\w.-]*)\}')
_WEIGHTS = re.compile(r'^--(?:weights|config\.(?:[\w.]+\.)?(?:init_from|teacher))=(.+)$')
"""An argument with weights, such as `--weights=PATH` or `--config.model.init_from=PATH`."""


class MissingPath(UserError):
  """The path of data or weights of a record is not given."""


def find_names(commands: Sequence[Sequence[str]]) -> list[str]:
  """Returns the names of the placeholders in the arguments of commands, each once, without `WORK`."""
  names = [name for words in commands for word in words for name in _PLACEHOLDER.findall(word)]
  return [name for name in dict.fromkeys(names) if name != WORK]


def find_paths(names: Sequence[str], given: Mapping[str, str], about: Mapping[str, str]) -> dict[str, str]:
  """Returns the path of each name: the path in `given` (`--data`), or else a path in the folder `$VIT_JAX_DATA`.

  Raises:
    MissingPath: a name has no path; the message has the sentence about the name in `about`.
    UserError: a given path does not exist, or its name is not one of `names`.
  """
  if unknown := [name for name in given if name not in names]:
    expected = f'the names {", ".join(names)}' if names else 'no names, as the commands need no data'
    raise UserError(f'--data: expected {expected}, got {unknown[0]!r}. {"Correct" if names else "Remove"} it.')
  for name, path in given.items():
    if not pathlib.Path(path).exists():
      raise UserError(f'--data: expected the path of {name}, got {path}, which does not exist. Correct the path.')
  folder = os.environ.get(FOLDER_VARIABLE)
  paths = {name: given.get(name) or (_find_in_folder(folder, name) if folder else '') for name in names}
  if missing := [name for name, path in paths.items() if not path]:
    explained = '; '.join(f'{name}: {about[name]}' for name in missing if name in about)
    raise MissingPath(f'--data: expected the path of {" and ".join(missing)}, got none. Add --data='
                      f'{",".join(f"{name}=PATH" for name in missing)}, or set {FOLDER_VARIABLE} to a folder with '
                      f'{" and ".join(missing)}.{f" ({explained})" if explained else ""}')
  return paths


def _find_in_folder(folder: str, name: str) -> str:
  """Returns the path of NAME, or of the only file NAME.*, in a folder; '' if there are none or several."""
  path = pathlib.Path(folder, name)
  if path.exists():
    return str(path)
  paths_with_suffix = list(path.parent.glob(f'{name}.*'))
  return str(paths_with_suffix[0]) if len(paths_with_suffix) == 1 else ''


def with_paths(text: str, paths: Mapping[str, str]) -> str:
  """Returns a text with paths in place of placeholders: `folder:{photos}` becomes `folder:/data/photos`."""
  return _PLACEHOLDER.sub(lambda match: paths.get(match[1], match[0]), text)


def with_placeholders(text: str, paths: Mapping[str, str]) -> str:
  """Returns a text with placeholders in place of complete paths, relative or absolute: the inverse of `with_paths`."""
  pairs = [(form, name) for name, path in paths.items() for form in (path, os.path.abspath(path))]
  for path, name in sorted(pairs, key=lambda pair: -len(pair[0])):  # long paths first, as they may contain short paths
    text = re.sub(rf'(?<![\w./-]){re.escape(path.rstrip("/"))}(?![\w.-])', f'{{{name}}}', text)
  return text


def check_unchanged(config: schema.Config, fingerprints: Mapping[str, resources.Fingerprint]) -> None:
  """Raises UserError if data are missing or have other fingerprints than those that a run or an evaluation wrote.

  `fingerprints` are by 'SOURCE SPLIT'. A fingerprint covers the names, number and sizes of files.
  """
  def describe(fingerprint: resources.Fingerprint) -> str:
    digest = f' with digest {fingerprint.digest[:12]}' if fingerprint.digest else ''
    return f'{fingerprint.examples:,} images{digest}'

  problems = []
  for source_and_split, before in fingerprints.items():
    source, _, split = source_and_split.rpartition(' ')
    now = resources.fingerprint(open_split(config, source, split))
    if not before.digest:  # only the number of images is known
      now = now._replace(digest='')
    if now != before:
      problems.append(f'{source_and_split}: expected the {describe(before)} that the result is of, got '
                      f'{describe(now)}. Put the data back as they were, or run the command again.')
  if problems:
    raise UserError('\n'.join(problems))


def read_contents(config: schema.Config, *, is_run: bool, paths: Mapping[str, str]) -> dict[str, content.Content]:
  """Returns the content of all images that a run (`is_run`) or an evaluation reads, by 'SOURCE SPLIT'.

  The sources in the keys have placeholders. Raises UserError if a source is missing or damaged.
  """
  return {f'{with_placeholders(source, paths)} {split}': content.read(open_split(config, source, split))
          for source, split in dict.fromkeys(_splits(config, is_run=is_run))}


def _splits(config: schema.Config, *, is_run: bool) -> Iterator[tuple[str, str]]:
  """Yields source and split of all images that a run (`is_run`) or an evaluation reads; a pair may repeat."""
  data = config.data
  if is_run:
    yield from ((data.source, data.train_split), (data.source, data.eval_split))
  for evaluation in config.evals.values():
    yield evaluation.source or data.source, evaluation.split or data.eval_split
    if isinstance(evaluation, schema.FrozenEvaluation):
      yield evaluation.source or data.source, evaluation.train_split or data.train_split
  if is_run and data.pseudo.source:
    yield data.pseudo.source, data.pseudo.split


def open_split(config: schema.Config, source: str, split: str) -> Source:
  """Returns a split, opened as a run opens it: `data.classes` and the like apply only to `data.source`."""
  if source == config.data.pseudo.source:
    data = dataclasses.replace(config.data, source=source, classes='', num_classes=0, num_examples=0)
    return opening.open_split(data, split, image_px=config.image_px)
  return resources.open_split(config, '' if source == config.data.source else source, split)


def find_changes(settings: Mapping[str, Any], recorded: Mapping[str, content.Content],
                 paths: Mapping[str, str]) -> list[str]:
  """Returns a line of text for each difference between the present images and `recorded`, by 'SOURCE SPLIT'.

  Of the record's `settings`, by dotted name, `data` and `image_px` determine how images are read.
  """
  nested: dict[str, Any] = {}  # 'data.source' is at nested['data']['source']
  for setting, value in settings.items():
    if setting.startswith('data.') or setting == 'image_px':
      *parents, last = setting.split('.')
      parent_node = nested
      for parent in parents:
        parent_node = parent_node.setdefault(parent, {})
      parent_node[last] = with_paths(value, paths) if isinstance(value, str) else value
  config = engine.from_json(json.dumps(nested))
  lines = []
  for source_and_split, before in recorded.items():
    source, _, split = source_and_split.rpartition(' ')
    opened = open_split(config, with_paths(source, paths), split)
    differences = content.differences(before, content.read(opened), opened.class_names)
    lines += [f'{source_and_split}: {difference}' for difference in differences]
  return lines


def digest_files(commands: Sequence[Sequence[str]], paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
  """Returns `bytes` and `sha256` of the weights and other files that commands read.

  The keys are names, or paths if a path has no placeholder. The files of a folder are added up; a run has `step` and
  `params_digest` of the checkpoint that would be loaded. Raises UserError if a file cannot be read.
  """
  path_by_key = {name: pathlib.Path(path) for name, path in paths.items() if pathlib.Path(path).is_file()}
  for match in filter(None, [_WEIGHTS.match(word) for words in commands for word in words]):
    names = _PLACEHOLDER.findall(match[1])
    path = pathlib.Path(with_paths(match[1], paths))
    if WORK not in names and path.exists():
      path_by_key[names[0] if names else match[1]] = path
  try:
    return {key: _digest(path) for key, path in path_by_key.items()}
  except OSError as error:
    raise failures.unreadable(error, str(error.filename)) from error


def _digest(path: pathlib.Path) -> dict[str, Any]:
  """Returns the digest of a file, a folder or a run for `digest_files`."""
  if checkpoint_files.steps(path / 'checkpoints'):
    chosen, _ = runs.find_whole(path, engine.read_file(path / 'config.json', code='model').checkpoints.keep_best)
    if chosen:
      meta = checkpoint_files.read_meta(path / 'checkpoints' / str(chosen.step))
      return {'step': chosen.step, 'params_digest': meta['digests']['params']}
  if path.is_file():
    return {'bytes': path.stat().st_size, 'sha256': user_files.sha256(path)}
  files = sorted(file for file in path.rglob('*') if file.is_file())
  listing = ''.join(f'{user_files.sha256(file)} {file.relative_to(path)}\n' for file in files)
  return {'bytes': sum(file.stat().st_size for file in files), 'sha256': hashlib.sha256(listing.encode()).hexdigest()}
