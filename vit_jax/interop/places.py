"""From what a person writes to a file on this machine: paths, addresses and known names, fetched once and kept.

What is fetched lies in `$XDG_CACHE_HOME/vit_jax/weights` (or `~/.cache/…`), in a folder a source. A download is taken
only whole: its length, and its checksum where one is published, are compared first.
"""
from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import pathlib
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from vit_jax.core.types import UserError
from vit_jax.interop import known

Opener = Callable[[str], Any]
"""From an address to a response with `headers`, to be read, as `open_address` is."""

HUB = 'https://huggingface.co'
STORAGE = 'https://storage.googleapis.com'
MODEL_FILES = ('model.safetensors', 'pytorch_model.bin')
SIDE_FILES = ('config.json', 'preprocessor_config.json')
INDEX = 'model.safetensors.index.json'
SUFFIXES = ('.npz', '.safetensors', '.pth', '.pt', '.bin')
TIMEOUT_S = 60.  # without a byte
_CHUNK = 1 << 20


class _Redirects(urllib.request.HTTPRedirectHandler):
  """Follows a hub to where its files lie, and keeps the checksum that only the hub itself tells."""
  tag = ''

  def redirect_request(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any,
                       newurl: str) -> urllib.request.Request | None:
    self.tag = headers.get('X-Linked-Etag') or self.tag
    return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_address(address: str) -> Any:
  """The response of a server, after redirections."""
  redirects = _Redirects()
  response = urllib.request.build_opener(redirects).open(address, timeout=TIMEOUT_S)
  if redirects.tag:
    response.headers['X-Linked-Etag'] = redirects.tag
  return response


def local(where: str, *, opener: Opener = open_address) -> pathlib.Path:
  """The file or folder that `where` is, fetched if it is elsewhere and not here yet.

  Args:
    where: a path, `gs://bucket/file`, `https://…`, `hf://owner/name[/file]`, or a known name.
    opener: of addresses.

  Raises:
    UserError: there is nothing there.
  """
  path = pathlib.Path(where).expanduser()
  if path.exists():
    return path
  scheme, _, rest = where.partition('://')
  match scheme if rest else '':
    case 'http' | 'https':
      return _file(where, opener)
    case 'gs':
      return _file(f'{STORAGE}/{urllib.parse.quote(rest)}', opener)
    case 'hf':
      return _model(rest, opener)
    case '':
      address = known.address(where)
      if address:
        return local(address, opener=opener)
  near = known.nearest(where)
  raise UserError(f'there is no file or folder {where!r}, and it is no known name'
                  + (f'; did you mean {" or ".join(near)}?' if near else ';') + ' want a path, gs://…, https://…, '
                  'hf://owner/name, or a name such as ViT-B_16-i21k, timm/vit_… or an AugReg file name')


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  """The weight file that `path` is, or those of the model in the folder that it is.

  Raises:
    UserError: the folder holds none, or several models.
  """
  if not path.is_dir():
    return [path]
  if (path / INDEX).is_file():
    return [path / name for name in _shard_names(path / INDEX)]
  for name in MODEL_FILES:
    if (path / name).is_file():
      return [path / name]
  found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
  if len(found) == 1:
    return found
  inside = ', '.join(p.name for p in found[:6]) or ', '.join(sorted(p.name for p in path.iterdir())[:6]) or 'nothing'
  raise UserError(f'{path} holds {"several weight files" if found else "no weights"}: {inside}; want the path of one '
                  'file, the folder of a model, or the directory of a run')


def cache() -> pathlib.Path:
  """Where fetched files are kept."""
  base = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')
  return base / 'vit_jax' / 'weights'


def _file(address: str, opener: Opener) -> pathlib.Path:
  name = urllib.parse.unquote(address.partition('?')[0].rstrip('/').rsplit('/', 1)[-1])
  return _once(address, cache() / hashlib.sha256(address.encode()).hexdigest()[:16] / name, opener)


def _model(name: str, opener: Opener) -> pathlib.Path:
  """A model of the hub as a folder, or one of its files."""
  owner, _, rest = name.partition('/')
  model, _, file = rest.partition('/')
  if not model:
    raise UserError(f'hf://{name}: want hf://OWNER/NAME, such as hf://google/vit-base-patch16-224')
  address = f'{HUB}/{owner}/{model}/resolve/main'
  folder = cache() / f'{owner}--{model}'
  if file:
    return _once(f'{address}/{file}', folder / file, opener)
  if not (folder / '.whole').exists():
    for side in SIDE_FILES:
      _try(f'{address}/{side}', folder / side, opener)
    if not any(_try(f'{address}/{main}', folder / main, opener) for main in MODEL_FILES):
      _shards(address, folder, opener, name)
    (folder / '.whole').touch()
  return folder


def _shards(address: str, folder: pathlib.Path, opener: Opener, name: str) -> None:
  if not _try(f'{address}/{INDEX}', folder / INDEX, opener):
    raise UserError(f'hf://{name} has none of {", ".join((*MODEL_FILES, INDEX))}')
  for shard in _shard_names(folder / INDEX):
    _once(f'{address}/{shard}', folder / shard, opener)


def _shard_names(index: pathlib.Path) -> list[str]:
  """The files that an index of shards names, which lie beside it.

  Raises:
    UserError: it is damaged, or names a file elsewhere.
  """
  try:
    found = sorted(set(json.loads(index.read_text())['weight_map'].values()))
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f'{index} is no index of shards: {error}; fetch it again') from error
  if odd := [name for name in found if not isinstance(name, str) or pathlib.PurePath(name).name != name]:
    raise UserError(f'{index} names {odd[0]!r}, which is no file beside it')
  return found


def _once(address: str, path: pathlib.Path, opener: Opener) -> pathlib.Path:
  """A file that must exist, fetched if it is not here yet."""
  if not _try(address, path, opener):
    raise UserError(f'{address} does not exist: its server knows no such file; want another address or name')
  return path


def _try(address: str, path: pathlib.Path, opener: Opener) -> bool:
  """Fetches a file that may not exist, if it is not here yet; whether it does."""
  try:
    if not path.exists():
      fetch(address, path, opener=opener)
  except FileNotFoundError:
    return False
  return True


def fetch(address: str, path: pathlib.Path, *, opener: Opener = open_address) -> None:
  """Fetches an address to `path`, whole and compared, or not at all.

  Raises:
    FileNotFoundError: the server knows no such file.
    UserError: it cannot be had, ends early, or its checksum is wrong.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{os.getpid()}.part')
  try:
    with opener(address) as response, open(part, 'wb') as out:
      digests = _copy(response, out, path.name)
      wrong = _wrong(address, response.headers, digests, out.tell())
    if wrong:
      raise UserError(f'{address} was not fetched as it should be: {wrong}. Nothing was kept; try again')
    part.replace(path)
  except urllib.error.HTTPError as error:
    if error.code == 404:
      raise FileNotFoundError(f'{address} does not exist') from error
    advice = '; fetch it with your account and give its path' if error.code in (401, 403) else ''
    raise UserError(f'{address}: the server says {error.code} {error.reason}{advice}') from error
  except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
    raise UserError(f'{address} cannot be fetched: {getattr(error, "reason", None) or error}; fetch it on a machine '
                    'with a network and give its path') from error
  finally:
    part.unlink(missing_ok=True)


def _copy(response: Any, out: BinaryIO, name: str) -> dict[str, bytes]:
  """Copies in pieces, showing how far it is; the digests of what came."""
  total = int(response.headers.get('Content-Length') or 0)
  hashes = {'sha256': hashlib.sha256(), 'md5': hashlib.md5(usedforsecurity=False)}
  done, shown = 0, time.monotonic()
  while piece := response.read(_CHUNK):
    out.write(piece)
    done += len(piece)
    for one in hashes.values():
      one.update(piece)
    if time.monotonic() - shown > (.2 if sys.stderr.isatty() else 10.):
      shown = time.monotonic()
      _show(name, done, total)
  if sys.stderr.isatty() and done > 10 * _CHUNK:
    _show(name, done, total)
    print(file=sys.stderr)
  return {kind: one.digest() for kind, one in hashes.items()}


def _show(name: str, done: int, total: int) -> None:
  """A bar on a terminal, else a line."""
  share = f' of {total / 2**20:,.0f}' if total else ''
  bar = f' [{"=" * (30 * done // total):30}]' if total else ''
  is_terminal = sys.stderr.isatty()
  print(f'{chr(13) if is_terminal else ""}{name}{bar} {done / 2**20:,.0f}{share} MiB', file=sys.stderr,
        end='' if is_terminal else '\n', flush=True)


def _wrong(address: str, headers: Mapping[str, str], digests: Mapping[str, bytes], size: int) -> str:
  """What is wrong with a download by what its server and its name say of it; ''."""
  length = int(headers.get('Content-Length') or size)
  if size != length:
    return f'{size:,} bytes came of {length:,}'
  tag = (headers.get('X-Linked-Etag') or '').strip('"')
  if re.fullmatch(r'[0-9a-f]{64}', tag) and digests['sha256'].hex() != tag:
    return f'its SHA-256 is {digests["sha256"].hex()}, the server says {tag}'
  for word in (headers.get('x-goog-hash') or '').replace(' ', '').split(','):
    if word.startswith('md5=') and base64.b64decode(word[4:]) != digests['md5']:
      return 'its MD5 is not the one that the server says'
  # The published names of DeiT and timm end in the first digits of their SHA-256.
  named = re.search(r'-([0-9a-f]{8})\.(pth|safetensors)$', address)
  if named and not digests['sha256'].hex().startswith(named[1]):
    return f'its SHA-256 begins with {digests["sha256"].hex()[:8]}, its name says {named[1]}'
  return ''
