"""Downloads one address to one file, which is verified under a temporary name and then moved to its path."""
from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import ipaddress
import pathlib
import re
import shutil
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from email import message
from typing import Any, BinaryIO

from vit_jax.core import failures, files
from vit_jax.core.errors import TemporaryError, UserError, printable, redacted

Opener = Callable[[str], Any]
"""Maps an address to a readable response with `headers`, like `open_address`."""
Proof = Callable[[pathlib.Path, str], None]
"""Raises UserError if a file is not of the expected kind; takes its path and its name for messages."""

SCHEMES = ('http', 'https')
TIMEOUT_S = 60.  # of waiting for the next bytes
MOST_BYTES = 64 << 30  # of one file; the largest published ViT takes 12 GB in f32
_CHUNK = 1 << 20
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO, errno.ENOTDIR,
            errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EEXIST)


class _Redirects(urllib.request.HTTPRedirectHandler):
  """Follows the redirects of a hub to its file server, and keeps the checksum that only the hub itself sends.

  A redirect never leaves https, and leads to an address of a private network only from such an address: a server of the
  internet must not make this machine read from its own network.
  """
  tag = ''

  def redirect_request(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any,
                       newurl: str) -> urllib.request.Request | None:
    old, new = (urllib.parse.urlsplit(address) for address in (req.full_url, newurl))
    if new.scheme not in (SCHEMES if old.scheme == 'http' else ('https',)):
      raise UserError(f'{_shown(req.full_url)}: expected a redirect to {"http or " * (old.scheme == "http")}https, got '
                      f'one to {_shown(newurl)}. Use another address.')
    if is_private(new.hostname or '') and not is_private(old.hostname or ''):
      raise UserError(f'{_shown(req.full_url)}: expected a redirect to a public server, got one to {_shown(newurl)}, '
                      'which is in a private network. If you trust it, give that address itself.')
    self.tag = headers.get('X-Linked-Etag') or self.tag
    return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_private(host: str) -> bool:
  """Whether a host is, or has, an address of this machine or of a private or link-local network."""
  try:
    found = {ipaddress.ip_address(host)}
  except ValueError:
    try:
      found = {ipaddress.ip_address(str(one[4][0]).partition('%')[0])
               for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):  # unknown here, as behind a proxy
      return False
  found = {one.ipv4_mapped or one if isinstance(one, ipaddress.IPv6Address) else one for one in found}
  return any(not one.is_global for one in found)


def open_address(address: str) -> Any:
  """Returns the response of a server after redirects; `https://NAME:PASSWORD@…` is sent to this server alone."""
  redirects = _Redirects()
  parts = urllib.parse.urlsplit(address)
  name, at, host = parts.netloc.rpartition('@')
  request = urllib.request.Request(parts._replace(netloc=host, fragment='').geturl())
  if at:
    plain = ':'.join(urllib.parse.unquote(part) for part in (name if ':' in name else f'{name}:').split(':', 1))
    request.add_unredirected_header('Authorization', f'Basic {base64.b64encode(plain.encode()).decode()}')
  response = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_S)
  if redirects.tag:
    response.headers['X-Linked-Etag'] = redirects.tag
  return response


def fetch(address: str, path: pathlib.Path, *, prove: Proof, opener: Opener = open_address,
          most_bytes: int = MOST_BYTES) -> None:
  """Downloads an address to `path`; the file exists only if it is complete and verified.

  Args:
    address: http or https.
    path: of the new file.
    prove: checks the downloaded file before it is moved to `path`.
    opener: opens addresses.
    most_bytes: limit of the file's size.

  Raises:
    FileNotFoundError: the server has no such file.
    UserError: the file cannot be downloaded or written, or is of another kind.
    TemporaryError: the server or the network failed, or the file is truncated or has a wrong checksum.
  """
  def once(part: pathlib.Path) -> str:
    with opener(address) as response, open(part, 'wb') as out:
      if wrong := _unfit(response.headers, path.parent, most_bytes):
        raise UserError(f'{_shown(address)}: {wrong}')
      digests = _copy(response, out, path.name, most_bytes)
      wrong = _wrong(address, response.headers, digests, out.tell())
    return wrong

  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as part:
      if wrong := failures.retried(lambda: once(part), f'downloading {_shown(address)}'):
        raise TemporaryError(f'{_shown(address)}: expected the whole file, got another: {wrong}. Nothing was kept. Try '
                             'again.')
      prove(part, _shown(address))
  except (UserError, TemporaryError):
    raise
  except urllib.error.HTTPError as error:
    if error.code == 404:
      raise FileNotFoundError(f'{_shown(address)} does not exist') from error
    advice = 'Fetch it with your account and give its path.' if error.code in (401, 403) else 'Try again later.'
    raise failures.error_class(error)(
        f'{_shown(address)}: expected a file, got status {error.code} {_shown(str(error.reason))} from its server. '
        f'{advice}') from error
  except (http.client.HTTPException, OSError, ValueError) as error:  # ValueError: an invalid address, as with two dots
    is_cut = isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.InvalidURL)
    raise (TemporaryError if is_cut else failures.error_class(error))(_unreachable(address, path, error)) from error
  finally:
    with contextlib.suppress(OSError):
      path.parent.rmdir()  # if it is empty


def _unreachable(address: str, path: pathlib.Path, error: Exception) -> str:
  if isinstance(error, OSError) and not isinstance(error, urllib.error.URLError) and error.errno in _OF_DISK:
    return (f'{path}: expected a file that can be written, got "{error.strerror}". Free some space or change the '
            'permissions, or set XDG_CACHE_HOME to another directory.')
  reason = _shown(str(getattr(error, 'reason', None) or error or type(error).__name__))
  return (f'{_shown(address)}: expected an address that can be reached, got "{reason}". Download the file elsewhere '
          'and pass its path.')


def _unfit(headers: Mapping[str, str], folder: pathlib.Path, most_bytes: int) -> str:
  """Returns why a file of this size is not downloaded; '' if it can be."""
  length, free = _length(headers), shutil.disk_usage(folder).free
  if length > most_bytes:
    return f'expected at most {most_bytes:,} bytes, got {length:,}. Use another address.'
  if length > free:
    return (f'expected at most the {free / 2**20:,.0f} MiB that are free in {folder}, got {length / 2**20:,.0f} MiB. '
            'Free some space, or set XDG_CACHE_HOME to another directory.')
  return ''


def _length(headers: Mapping[str, str]) -> int:
  """Returns the size that the server reports; 0 = unknown."""
  text = (headers.get('Content-Length') or '').strip()
  return int(text) if re.fullmatch(r'[0-9]{1,18}', text) else 0


def _copy(response: Any, out: BinaryIO, name: str, most_bytes: int) -> dict[str, bytes]:
  """Copies in pieces with progress, and returns digests of the bytes. Raises UserError if there are too many."""
  total = _length(response.headers)
  hashes = {'sha256': hashlib.sha256(), 'md5': hashlib.md5(usedforsecurity=False)}
  done, shown = 0, time.monotonic()
  while piece := response.read(_CHUNK):
    done += len(piece)
    if done > (total or most_bytes):
      raise UserError(f'{name}: expected at most {total or most_bytes:,} bytes, got more. Use another address.')
    out.write(piece)
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
  """Shows a bar on a terminal, otherwise a line."""
  share = f' of {total / 2**20:,.0f}' if total else ''
  bar = f' [{"=" * (30 * done // total):30}]' if total else ''
  is_terminal = sys.stderr.isatty()
  print(f'{chr(13) if is_terminal else ""}{name}{bar} {done / 2**20:,.0f}{share} MiB', file=sys.stderr,
        end='' if is_terminal else '\n', flush=True)


def _wrong(address: str, headers: Mapping[str, str], digests: Mapping[str, bytes], size: int) -> str:
  """Returns how a download differs from the size and checksums in its headers and its name; '' if it does not."""
  length = _length(headers) or size
  if size != length:
    return f'{size:,} bytes came of {length:,}'
  tag = (headers.get('X-Linked-Etag') or '').strip('"')
  if re.fullmatch(r'[0-9a-f]{64}', tag) and digests['sha256'].hex() != tag:
    return f'its SHA-256 is {digests["sha256"].hex()}, the server says {tag}'
  # Google Storage sends a line for each checksum, and `get` returns the first one.
  lines = headers.get_all('x-goog-hash') if isinstance(headers, message.Message) else [headers.get('x-goog-hash')]
  for word in ','.join(line or '' for line in lines or ()).replace(' ', '').split(','):
    if word.startswith('md5=') and word[4:] != base64.b64encode(digests['md5']).decode():
      return 'its MD5 is not the one that the server says'
  # The published file names of DeiT and timm end in the first digits of the file's SHA-256.
  named = re.search(r'-([0-9a-f]{8})\.(pth|safetensors)$', urllib.parse.urlsplit(address).path)
  if named and not digests['sha256'].hex().startswith(named[1]):
    return f'its SHA-256 begins with {digests["sha256"].hex()[:8]}, its name says {named[1]}'
  return ''


def _shown(text: str) -> str:
  """Returns a server's text on one line of a message, without passwords and control characters for a terminal."""
  return redacted(printable(text))[:500]
