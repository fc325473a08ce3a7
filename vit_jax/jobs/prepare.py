"""`--job=prepare`: writes images as ArrayRecord shards, which `array_record:DIR` reads; or the label maps of a teacher.

`commands.Command.run` calls `run`. With a config, `teacher_labels.run` writes label maps. Without a config, `run` opens
the splits of a source, or of an archive, which is downloaded if it is missing; then `data/prepare.py`, here `writing`,
writes shards in processes of this machine or with Apache Beam. If a command was stopped, the same command resumes.
"""
from __future__ import annotations

import functools
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import TextRule, Tokens
from vit_jax.config.schema.data import RGB
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data import beam, opening, user_files
from vit_jax.data import prepare as writing
from vit_jax.data import splits as splitting
from vit_jax.data.formats import archives, array_record, tfds, tfds_build
from vit_jax.data.source import Source, has_captions, origins, title
from vit_jax.data.text import stored
from vit_jax.data.text.stored import Encoder
from vit_jax.jobs import flag_names, teacher_labels
from vit_jax.record import progress, storage
from vit_jax.weights import download
from vit_jax.weights.hints import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')
SPLITS = ('train', 'test')
_ANY_PX = (32, 32)  # `open_split` needs a size, but only sources that generate images use the size


def run(to: storage.Path, *, data: str = '', short_px: int = 0, shards: int = 0, quality: int | None = None,
        seed: int | None = None, splits: Sequence[str] = (), data_dir: str = '', archive: str = '', processes: int = 0,
        follow_links: bool = False, label_column: str = '', image_column: str = '', label_offset: int = 0,
        classes: str = '', num_classes: int = 0, channels: int = RGB, caption_column: str = '', tokens: str = '',
        tokenizer: str = '', text_rule: str = TextRule.AUTO.value, runner: str = '', runner_options: str = '',
        share: tuple[int, int] = writing.ALL, config: schema.Config | None = None, weights: str = '',
        reading: Reading = AS_FOUND, build: Callable[..., None] = tfds_build.build_in_process) -> int:
  """Writes shards of `data`, or label maps for a config with the teacher `weights`; returns the exit status 0.

  Args:
    to: the directory to write.
    data: one source that is not a mixture, such as `folder:PATH`, or one of `archives.ARCHIVES`; '' with a config.
    short_px, shards, quality, seed: see `data.prepare.Settings`. A quality of None is 90. A seed of None is 0, except
      for an archive, whose examples then keep the order of its files.
    splits: names of splits; () = train and test.
    data_dir: the folder of TFDS datasets.
    archive: a file of `archives.ARCHIVES`, or the folder with the files; '' = the user's cache, downloaded if missing.
    processes: the number of processes that write shards; 0 = as many as the cores of this machine allow.
    follow_links: also read files outside of the folder to which links in the folder lead.
    label_column, image_column, label_offset, classes, num_classes, channels, caption_column: as in `schema.Data`.
    tokens, tokenizer, text_rule: as in `schema.Text`; captions are stored with token ids. '' = without captions.
    runner, runner_options: a runner of Apache Beam, see `data.beam`; '' = this machine writes.
    share: `(host, num_hosts)` if several hosts write shards of the same dataset, see `data.prepare.Share`.
    config, weights, reading: see `teacher_labels.run`.
    build: builds a TFDS dataset that is missing, `build(name, data_dir=…)`.

  Raises UserError if flags cannot be combined, or the data or `to` cannot be used.
  """
  shard_flags = {'data': data, 'short_px': short_px, 'shards': shards, 'quality': quality, 'seed': seed,
                 'splits': splits, 'data_dir': data_dir, 'archive': archive, 'processes': processes,
                 'follow_links': follow_links, 'runner': runner, 'runner_options': runner_options, 'tokens': tokens,
                 'tokenizer': tokenizer, 'share': share if share != writing.ALL else None}
  column_flags: dict[str, Any] = {
      'label_column': label_column, 'image_column': image_column, 'label_offset': label_offset, 'classes': classes,
      'num_classes': num_classes, 'channels': channels, 'caption_column': caption_column}
  if config is not None or weights:
    flags = {**shard_flags, **column_flags, 'channels': channels != RGB}
    if problems := [f'--{name}: expected no flag of shards with --config, got one. Remove it.'
                    for name, value in flags.items() if value]:
      raise UserError('\n'.join(problems))
    if config is None or not weights:
      raise UserError('--config: expected both --config and --weights, which label maps need, got one of them. '
                      'Set both.')
    return teacher_labels.run(config, weights, _require_local(to), reading)
  _check_flags(data, short_px=short_px, quality=quality, processes=processes, channels=channels, archive=archive,
               runner=runner, runner_options=runner_options, share=share)
  encoder = _open_encoder(tokens, tokenizer, text_rule, caption_column, runner=runner, data=data)
  is_archive = data in archives.ARCHIVES
  settings = writing.Settings(short_px=short_px, quality=quality or 90, num_shards=shards,
                              seed=seed if is_archive else (seed or 0), channels=channels, captions=encoder)
  engine = Engine(processes, runner, runner_options, writing.Share(*share))
  if not runner:
    _require_local(to)
  if is_archive:
    return _write_splits(functools.partial(_open_archive, data, archive, splits or SPLITS), to, settings, engine)
  with flag_names.naming_flags({'data.source': '--data', 'data.data_dir': '--data_dir',
                                **{f'data.{name}': f'--{name}' for name in column_flags}}):
    source_settings = schema.Data(source=data, data_dir=data_dir, follow_links=follow_links, **column_flags)
    if problems := list(source_settings.column_problems('data')):
      raise UserError('\n'.join(problems))
    return _write_source(source_settings, to, settings, splits=splits, build=build, engine=engine)


def _check_flags(data: str, *, short_px: int, quality: int | None, processes: int, channels: int, archive: str,
                 runner: str, runner_options: str, share: tuple[int, int]) -> None:
  """Raises UserError if flags of shards are missing, or cannot be combined."""
  if not data:
    raise UserError('--data: expected images to write as shards, got none. Set --data=folder:PATH, --data=tfds:NAME or '
                    '--data=cifar10; or --config and --weights for label maps.')
  if quality and not short_px:
    raise UserError('--quality: expected --short_px as well, got --quality alone. Images that are not resized keep '
                    'their bytes.')
  if runner_options and not runner:
    raise UserError('--runner_options: expected --runner as well, got --runner_options alone. Set --runner, such as '
                    'DataflowRunner.')
  if share[1] > 1 and runner:
    raise UserError(f'--share: expected no share with --runner, got {share[0]}/{share[1]}. The runner shares the work.')
  if processes and runner:
    raise UserError(f'--processes: expected no number with --runner, got {processes}. Set the number of workers in '
                    '--runner_options.')
  for flag, is_set in (('--short_px', short_px), ('--runner', runner), (f'--data={data}', data in archives.ARCHIVES)):
    if is_set and channels != RGB:
      raise UserError(f'--channels: expected {RGB} with {flag}, got {channels}. Files with other channels are stored '
                      'unchanged, by this machine.')
  if archive and data not in archives.ARCHIVES:
    raise UserError(f'--archive: expected --data={", ".join(archives.ARCHIVES)}, got --data={data}. Remove it.')


def _open_encoder(tokens: str, tokenizer: str, text_rule: str, caption_column: str, *, runner: str,
                  data: str) -> Encoder | None:
  """Returns the encoder of the captions; None without `tokens`. Raises UserError for flags that cannot be combined."""
  if not tokens:
    for name, value in (('tokenizer', tokenizer), ('caption_column', caption_column)):
      if value:
        raise UserError(f'--{name}: expected --tokens as well, got --{name} alone. Set --tokens to store the captions.')
    return None
  if runner or data in archives.ARCHIVES:
    raise UserError(f'--tokens: expected none with {"--runner" if runner else f"--data={data}"}, got {tokens}. '
                    'Captions are encoded by this machine, from a source that has captions.')
  if tokenizer and tokens == Tokens.BYTES.value:
    raise UserError(f'--tokenizer: expected no file with --tokens=bytes, got {tokenizer}. Remove --tokenizer.')
  if not tokenizer and tokens != Tokens.BYTES.value:
    raise UserError('--tokenizer: expected a file, got none. Set --tokenizer.')
  return stored.open_encoder(Tokens(tokens), tokenizer, TextRule(text_rule))


class Engine(NamedTuple):
  """How to write shards: a `share`, by `processes` of this machine, or all by a `runner` of Beam with `options`."""
  processes: int
  runner: str
  options: str
  share: writing.Share


def _write_source(data: schema.Data, to: storage.Path, settings: writing.Settings, *, splits: Sequence[str],
                  build: Callable[..., None], engine: Engine) -> int:
  """Writes splits of a source as shards; returns the exit status 0. A missing TFDS dataset is built first.

  Without `splits`, train and test are written, and a warning names the other splits of the source.
  """
  kind, _, address = data.source.partition(':')
  if kind == 'tfds':
    try:
      tfds.find(address, data_dir=data.data_dir)
    except tfds.NotPrepared:
      build(address, data_dir=tfds.data_folder(data.data_dir))
  root = user_files.resolve(address, '--data') if kind == 'folder' else None
  try:
    if not splits:  # a source that has splits then raises NoSplit, which has the names of all splits
      opening.open_split(data, splitting.ALL, image_px=_ANY_PX)
  except splitting.NoSplit as error:
    # Where a source has no split `test`, a synonym of `val` is opened in its place.
    written_names = SPLITS if 'test' in error.known else (*SPLITS, *splitting.SYNONYMS)
    left_out = [name for name in error.known if name not in written_names]
    if left_out:
      log.warning('%s has other splits, which are left out: %s. Set --splits=%s to write all.', data.source,
                  documents.listed(left_out, 20), ','.join(error.known))
  except UserError:  # `_open` raises the same error below
    pass
  return _write_splits(functools.partial(_open, data, splits or SPLITS), to, settings, engine, root=root)


def _require_local(to: storage.Path) -> pathlib.Path:
  """Returns the folder `to` as a local path. Raises UserError if the folder is in object storage."""
  if not isinstance(to, pathlib.Path):
    raise UserError(f'--to: expected a folder of this machine, got {to}. With --runner=DirectRunner or another runner '
                    'of Apache Beam, shards are written to object storage.')
  return to


def _write_splits(opener: Callable[[], Mapping[str, Source]], to: storage.Path, settings: writing.Settings,
                  engine: Engine, *, root: str | None = '') -> int:
  """Writes the splits that `opener` returns by name, and prints the numbers of images and how to use the shards.

  Names of examples are stored relative to `root`; None = relative to the `root` of the opened source, if it has one.
  Raises UserError if the labels of a source may be wrong, or captions are to be stored and a source has none.
  """
  source_by_split = opener()
  parts = [part for source in source_by_split.values() for part in origins(source)]
  for part in parts:
    if doubt := getattr(part, 'doubt', ''):  # why the labels of this part may be wrong
      raise UserError(doubt)
  for source in source_by_split.values():
    if settings.captions and not all(map(has_captions, origins(source))):
      raise UserError(f'--tokens: expected a source with captions, got {title(source)}. Set --caption_column, or leave '
                      'out --tokens.')
  if root is None:
    root = getattr(parts[0], 'root', '')
  if engine.runner:
    outcome = writing.write(source_by_split, to, settings, name_of=functools.partial(_shorten, root=root),
                            run=beam.Beam(opener, engine.runner, engine.options))
  else:
    outcome = _write_here(source_by_split, _require_local(to), settings, root=root, engine=engine)
  if outcome is writing.Outcome.INCOMPLETE:
    print(f'Share {engine.share.host}/{engine.share.num_hosts} of {to} is written. The dataset is complete when all '
          'shares are.')
    return 0
  with storage.local(str(to / array_record.INFO)) as info:
    shards_by_split = array_record.read_info(info.parent).splits
  num_written = {split: sum(shard.num_examples for shard in shards) for split, shards in shards_by_split.items()}
  for split, source in source_by_split.items():
    if num_left_out := len(source) - num_written[split]:
      log.warning('%s of the %s images of %s were left out, as the image or its label cannot be used; the warnings '
                  'above say why.', f'{num_left_out:,}', f'{len(source):,}', split)
  counts = ', '.join(f'{split} {num:,}' for split, num in num_written.items())
  channels_flag = f' --config.data.channels={settings.channels}' if settings.channels != RGB else ''
  print(f'{"Already in" if outcome is writing.Outcome.UNCHANGED else "Written to"} {to}: {counts} images. '
        f'Use them with --config.data.source=array_record:{to}{channels_flag}')
  return 0


def _write_here(source_by_split: Mapping[str, Source], folder: pathlib.Path, settings: writing.Settings, *, root: str,
                engine: Engine) -> writing.Outcome:
  """Writes the splits in processes of this machine, and shows a progress bar."""
  total = sum(len(source) for source in source_by_split.values()) // engine.share.num_hosts
  num_done = num_at_first_call = 0
  first_call_s: float | None = None
  with progress.Progress(total, start=0, shown=True, unit='images') as bar:
    def count(num_images: int) -> None:
      nonlocal num_done, num_at_first_call, first_call_s
      num_done += num_images
      if first_call_s is None:  # images that an earlier command has written do not count for the speed
        num_at_first_call, first_call_s = num_done, time.monotonic()
        bar.update(num_done, {})
      else:
        seconds = max(1e-9, time.monotonic() - first_call_s)
        bar.update(num_done, {'train/images_per_s': (num_done - num_at_first_call) / seconds})
    return writing.write(source_by_split, folder, settings, name_of=functools.partial(_shorten, root=root),
                         run=writing.LocalRunner(count, engine.processes), share=engine.share)


def _shorten(name: str, *, root: str) -> str:  # no closure, as worker processes unpickle this function
  return name.removeprefix(root).lstrip('/')


def _open(data: schema.Data, names: Sequence[str]) -> dict[str, Source]:
  """Opens splits of a source, and returns each one by the name of the split in the source."""
  if data.source.startswith(('mix:', 'masks:')):
    raise UserError(f'--data: expected one source of images with classes, such as folder:PATH, got {data.source!r}. '
                    'Prepare the sources of a mixture one by one.')
  if any(character in name for name in names for character in '[]+'):
    raise UserError(f'--splits: expected names of complete splits, got {",".join(names)}. Slice a split when it is '
                    'read: data.train_split=train[:98%].')
  opened = [opening.open_split(data, name, image_px=_ANY_PX) for name in names]
  return {source.name.rpartition('/')[2]: source for source in opened}


def _open_archive(name: str, archive: str, splits: Sequence[str]) -> dict[str, Source]:
  """Opens splits in the files of the dataset's authors. Raises UserError for an unknown split or a bad file."""
  if unknown := sorted(set(splits) - set(archives.SPLITS)):
    raise UserError(f'--splits: expected some of {", ".join(archives.SPLITS)}, got {", ".join(unknown)}. '
                    'Name some of these splits.')
  folder = pathlib.Path(user_files.resolve(archive, '--archive')) if archive else user_files.cache_folder('archives')
  paths = [_find_or_download(name, file, folder, archive) for file in archives.ARCHIVES[name].files]
  return {split: archives.Archived(name, paths, split) for split in splits}


def _find_or_download(name: str, file: archives.File, folder: pathlib.Path, archive: str) -> pathlib.Path:
  """Returns the path of a published file, whose checksum is right; `folder` may also be the path of the file."""
  path = folder if folder.is_file() else archives.find(file, folder)
  if path:
    archives.check(file, path)
    return path
  if archive:
    raise UserError(f'--archive: expected {file.name}, or a folder with it, got {archive}. Download it from '
                    f'{file.address}')
  path = folder / file.name
  try:
    download.fetch(file.address, path, prove=lambda part, _: archives.check(file, part))
  except (UserError, FileNotFoundError) as error:
    raise UserError(f'--data={name}: expected to download {file.name}, got: {error} The flag of a path is '
                    f'--archive=PATH; files in {folder} are found without it.') from error
  return path
