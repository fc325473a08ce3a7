"""Resolves paths, addresses and known names of weights to local files; files are downloaded once and cached.

Files of the Hugging Face hub are in its own cache (`core/hub.py`). Others are in `$XDG_CACHE_HOME/vit_jax/weights` (or
`~/.cache/…`), with one folder per source. No name of a server or file can lead out of a cache: names are checked before
the download, and paths again after links are resolved.
"""
from __future__ import annotations

import hashlib
import os
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.core import documents, failures, hub
from vit_jax.core.address import check as check_address
from vit_jax.core.errors import UserError, is_redacted
from vit_jax.weights import download, files, published
from vit_jax.weights.download import Opener, open_address

STORAGE = 'https://storage.googleapis.com'
SIDE_FILES = ('config.json', 'preprocessor_config.json', 'adapter_config.json')
INDEX = 'model.safetensors.index.json'
MODEL_FILES = ('model.safetensors', INDEX, 'pytorch_model.bin', 'adapter_model.safetensors', 'flax_model.msgpack')
"""Weight files of a model, or their index; the first one that exists is used."""
SUFFIXES = ('.npz', '.safetensors', '.pth', '.pt', '.bin', '.msgpack')
MOST_SHARDS = 1000  # files of one model
MOST_TOKENIZER_BYTES = 64 << 20  # Gemma's vocabulary takes 34 MB
_MOST_NAME = 200  # bytes; the limit of file systems is 255, and temporary names are longer


class NoWeights(UserError, FileNotFoundError):
  """There is neither a file nor known weights of a name."""


def local(where: str, *, opener: Opener = open_address, offline: bool = False) -> pathlib.Path:
  """Returns the local file or folder for `where`, downloaded first if it is remote and not in the cache.

  Args:
    where: a path, `gs://bucket/file`, `https://…`, `hf://owner/name[@revision][/file]`, or a known name.
    opener: opens addresses of other servers than the hub.
    offline: whether only the cache is used.

  Raises:
    NoWeights: the file does not exist, or the address is of another kind.
    UserError: the download failed, or its name would lead out of the cache.
  """
  try:
    path = pathlib.Path(where).expanduser()
    if path.exists():
      return path
  except (OSError, RuntimeError) as error:  # no permission, a name that is too long, or ~ with an unknown user
    reason = getattr(error, 'strerror', None) or error
    raise failures.error_class(error)(f'{where}: expected the path of a file or folder, got "{reason}". Check the '
                                      'path.') from error
  if is_redacted(where):
    raise UserError(f'{where}: expected an address with its password or token, got one without, as records have it. '
                    'Give the complete address, or download the file and give its path.')
  scheme, _, rest = where.partition('://')
  if not rest:
    check_address(where, 'weights')
  match scheme if rest else '':
    case 'http' | 'https':
      return _file(where, _refuse if offline else opener)
    case 'gs':
      return _file(f'{STORAGE}/{urllib.parse.quote(rest)}', _refuse if offline else opener)
    case 'hf':
      return _model(rest, offline)
    case '':
      if known := published.address(where):
        return local(known, opener=opener, offline=offline)
  expected = (f'{where}: expected weights as a path, gs://…, https://…, hf://OWNER/NAME or a known name '
              '(ViT-B_16-i21k, timm/vit_…, or the name of an AugReg file)')
  if rest:
    raise NoWeights(f'{expected}, got an address of {scheme}://. Download the file and give its path.')
  near = published.nearest(where)
  advice = f'Did you mean {" or ".join(near)}?' if near else (
      'Check the path, or list the known names with vit-jax list --weights.')
  raise NoWeights(f'{expected}, got a path where there is no file or folder. {advice}')


def exists(where: str | pathlib.Path) -> bool:
  """Whether there is a file or folder of this name; False also for a name that no file can have."""
  try:
    return pathlib.Path(where).exists()
  except (OSError, ValueError):  # no permission, a part that is too long, or a NUL
    return False


def is_remote(where: str) -> bool:
  """Whether weights are an address, or a known name, which stands for one."""
  return '://' in where or bool(published.address(where))


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns `path` if it is a file; for a folder, the weight files of its model.

  Raises:
    UserError: the folder holds no model, or several.
  """
  if not path.is_dir():
    return [path]
  for name in MODEL_FILES:
    if (path / name).is_file():
      return [path / shard for shard in _shard_names(path / INDEX)] if name == INDEX else [path / name]
  content = sorted(path.iterdir())
  weights = [file for file in content if file.suffix in SUFFIXES]
  if len(weights) == 1:
    return weights
  models = sorted(file.parent for name in MODEL_FILES for file in path.glob(f'*/{name}'))
  if models and not weights:
    raise UserError(f'{path}: expected the folder of one model or of a run, got one with models in its folders: '
                    f'{", ".join(dict.fromkeys(model.name for model in models))}. Give the path of one of them, such '
                    f'as {models[-1]}.')
  kind = 'several weight files' if weights else 'no weights'
  names = ', '.join(file.name for file in (weights or content)[:6]) or 'nothing'
  raise UserError(f'{path}: expected the folder of one model or of a run, got {kind}: {names}. Give the path of one '
                  'file.')


def cache() -> pathlib.Path:
  """Returns the folder of downloaded files. Raises UserError if there is no home directory."""
  try:
    base = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')
  except RuntimeError as error:
    raise UserError('XDG_CACHE_HOME: expected a directory for fetched files, got none, and there is no home directory. '
                    'Set it.') from error
  return base / 'vit_jax' / 'weights'


def plain_name(name: object, *, said: str) -> str:
  """Returns the name if it names a single file or folder, also after any number of URL decodings.

  Raises:
    UserError: the name is empty, hidden or too long, or contains a separator or a control character.
  """
  text = name if isinstance(name, str) else ''
  for _ in range(8):
    if (len(text.encode(errors='replace')) > _MOST_NAME or not text.isprintable() or text.startswith('.')
        or not text.strip() or re.search(r'[/\\]', text)):
      break
    unquoted = urllib.parse.unquote(text)
    if unquoted == text:
      return str(name)
    text = unquoted
  raise UserError(f'{said}: expected names of plain files, got {ascii(name)[:100]}. Use another address or file.')


def _file(address: str, opener: Opener) -> pathlib.Path:
  """Returns the local file of an https address, in a folder of the cache that is named by the address's hash."""
  try:
    last = urllib.parse.urlsplit(address).path.rsplit('/', 1)[-1]
  except ValueError as error:  # such as http://[
    raise UserError(f'{address}: expected an address, got one whose server cannot be read. Check it.') from error
  name = urllib.parse.unquote(plain_name(last, said=address))
  path = _inside(f'{hashlib.sha256(address.encode(errors="replace")).hexdigest()[:16]}/{name}')
  try:
    if not path.exists():
      download.fetch(address, path, opener=opener, prove=files.verify)
  except FileNotFoundError as error:
    raise UserError(f'{address}: expected a file, got "not found" from its server. Use another address or '
                    'name.') from error
  return path


def fetch_tokenizer(where: str, names: Sequence[str]) -> None:
  """Downloads the first of these files that a model of the hub has into its folder, unless one is there.

  Does nothing for weights elsewhere, whose tokenizer is put beside them by hand.

  Raises:
    UserError: a download failed.
  """
  scheme, _, rest = (published.address(where) or where).partition('://')
  if scheme != 'hf':
    return
  repository, _ = hub.parse(rest)
  for name in names:
    parts = [name, 'merges.txt'] if name == 'vocab.json' else [name]
    if all(_from_hub(repository, part, prove=_prove_tokenizer, most_bytes=MOST_TOKENIZER_BYTES) for part in parts):
      return


def _model(name: str, offline: bool) -> pathlib.Path:
  """Returns the folder of a model of the hub, or one of the model's files."""
  repository, file = hub.parse(name)
  if file:
    for part in file.split('/'):
      plain_name(part, said=f'hf://{name}')
    if (found := _from_hub(repository, file, offline=offline)) is None:
      raise UserError(f'{repository}/{file}: expected a file of {repository.page}, got none of this name'
                      f'{_cache_only(offline)}. Use another address or name.')
    return found.path
  for side in SIDE_FILES:
    if found := _from_hub(repository, side, offline=offline):
      repository = repository._replace(revision=found.commit)  # all files of one commit
      content = documents.read(found.path).object() if side == 'config.json' else {}
      if content.get('type') == 'Config' and 'objective' in content:  # a run, which consists of many files
        listing = None if offline or hub.is_offline() else hub.list_files(repository)
        for name_in_run in listing.files if listing else ():
          hub.fetch(repository, name_in_run, most_bytes=download.MOST_BYTES)
        return found.path.parent
  for main in MODEL_FILES:
    if found := _from_hub(repository, main, offline=offline):
      if main == INDEX:
        repository = repository._replace(revision=found.commit)
        for shard in _shard_names(found.path):
          if _from_hub(repository, shard, offline=offline) is None:
            raise UserError(f'{repository}: expected {shard}, which {INDEX} names, got no such file'
                            f'{_cache_only(offline)}. Use another model.')
      return found.path.parent
  raise UserError(f'hf://{name}: expected a model with one of {", ".join(MODEL_FILES)}, got one without'
                  f'{_cache_only(offline)}. Choose another model.')


def _cache_only(offline: bool) -> str:
  """Returns the end of a message about a missing file where only the cache was searched, else ''."""
  if hub.is_offline():
    return ' in the cache (HF_HUB_OFFLINE is set)'
  return ' in the cache' if offline else ''


def _from_hub(repository: hub.Repository, file: str, *, prove: Callable[[pathlib.Path, str], None] | None = None,
              most_bytes: int = 0, offline: bool = False) -> hub.File | None:
  """Returns a file of the hub, or None; a downloaded file that is of another kind is removed again.

  `prove` and `most_bytes` are by default those of weights, or of JSON by its suffix.
  """
  is_json = file.endswith('.json')
  prove = prove or (_prove_json if is_json else files.verify)
  most_bytes = most_bytes or (documents.MAX_BYTES if is_json else download.MOST_BYTES)
  found = hub.fetch(repository, file, offline=offline, most_bytes=most_bytes)
  if found is not None and found.is_new:
    try:
      prove(found.path, f'{repository}/{file}')
    except UserError:
      hub.remove(found)
      raise
  return found


def _prove_json(path: pathlib.Path, said: str) -> None:
  """Raises UserError if a file is not an object of JSON; `said` names it in the message."""
  documents.read(path, subject=said, advice='Try again later.').object()


def _refuse(address: str) -> Any:
  """Opens nothing: an opener for `offline`."""
  raise OSError('not in the cache')


def _shard_names(index: pathlib.Path) -> list[str]:
  """Returns the files that an index of shards names; they must be in the folder of the index. Raises UserError if the
  index is damaged, or names a file in another folder."""
  content = documents.read(index, expected='an index of shards', advice='Fetch it again.')
  found = sorted({plain_name(name, said=str(index)) for name in content.field('weight_map').object().values()})
  if not 0 < len(found) <= MOST_SHARDS:
    raise UserError(f'{index}: expected 1 to {MOST_SHARDS:,} shards, got {len(found):,}. Use another model.')
  return found


def _inside(name: str) -> pathlib.Path:
  """Returns the path of a name in the cache. Raises UserError if the path leads out of the cache, for example through a
  symbolic link."""
  base = cache()
  path = base / name
  try:
    if path.resolve().is_relative_to(base.resolve()):
      return path
    reason = f'one that leads to {path.resolve()}'
  except (OSError, RuntimeError) as error:
    reason = str(error)
  raise UserError(f'{path}: expected a path inside of {base}, got {reason}. Remove the link, or set XDG_CACHE_HOME.')


def _prove_tokenizer(path: pathlib.Path, said: str) -> None:
  """Raises UserError for a web page or an empty file; the reader of tokenizers checks the rest."""
  with open(path, 'rb') as file:
    start = file.read(200).lstrip().lower()
  if not start or start.startswith((b'<!doctype', b'<html', b'version https://git-lfs')):
    raise UserError(f'{said}: expected a tokenizer, got {files.describe(start, path.stat().st_size)}. Fetch it '
                    'by hand.')
