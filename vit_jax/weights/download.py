"""Downloads one address to one file, which is verified under a temporary name and then moved to its path.

`addresses.py` calls `fetch` for files of servers and of Google Storage; those of the Hugging Face hub are fetched by
`core/hub.py`.
"""
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
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO,
                errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EEXIST)


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
    addresses = [ipaddress.ip_address(host)]
  except ValueError:
    try:
      entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)  # (…, (address, port, …))
      addresses = [ipaddress.ip_address(str(entry[4][0]).partition('%')[0]) for entry in entries]
    except (OSError, ValueError):  # unknown here, as behind a proxy
      return False
  return any(not (getattr(address, 'ipv4_mapped', None) or address).is_global for address in addresses)


def open_address(address: str) -> Any:
  """Returns the response of a server after redirects; `https://NAME:PASSWORD@…` is sent to this server alone."""
  redirects = _Redirects()
  parts = urllib.parse.urlsplit(address)
  user, has_user, host = parts.netloc.rpartition('@')
  request = urllib.request.Request(parts._replace(netloc=host, fragment='').geturl())
  if has_user:
    name, _, password = user.partition(':')
    login = f'{urllib.parse.unquote(name)}:{urllib.parse.unquote(password)}'
    request.add_unredirected_header('Authorization', f'Basic {base64.b64encode(login.encode()).decode()}')
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
  shown = _shown(address)

  def download(part: pathlib.Path) -> str:
    """Writes the content of the address to `part`, and returns how it differs from what the server says."""
    with opener(address) as response, open(part, 'wb') as out:
      _check_size(response.headers, path.parent, shown, most_bytes)
      digests = _copy(response, out, path.name, most_bytes)
      return _difference(address, response.headers, digests, out.tell())

  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as part:
      if difference := failures.retried(lambda: download(part), f'downloading {shown}'):
        raise TemporaryError(f'{shown}: expected the whole file, got another: {difference}. Nothing was kept. Try '
                             'again.')
      prove(part, shown)
  except (UserError, TemporaryError):
    raise
  except urllib.error.HTTPError as error:
    if error.code == 404:
      raise FileNotFoundError(f'{shown} does not exist') from error
    advice = 'Fetch it with your account and give its path.' if error.code in (401, 403) else 'Try again later.'
    raise failures.error_class(error)(
        f'{shown}: expected a file, got status {error.code} {_shown(str(error.reason))} from its server. {advice}'
    ) from error
  except (http.client.HTTPException, OSError, ValueError) as error:  # ValueError: an invalid address, as with two dots
    error_class = failures.error_class(error)
    if isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.InvalidURL):
      error_class = TemporaryError  # the connection was cut
    raise error_class(_unreachable(shown, path, error)) from error
  finally:
    with contextlib.suppress(OSError):
      path.parent.rmdir()  # if it is empty


def _unreachable(shown: str, path: pathlib.Path, error: Exception) -> str:
  """Returns the message that the file at `path` cannot be written, or that an address cannot be reached."""
  if isinstance(error, OSError) and not isinstance(error, urllib.error.URLError) and error.errno in _DISK_ERRORS:
    return (f'{path}: expected a file that can be written, got "{error.strerror}". Free some space or change the '
            'permissions, or set XDG_CACHE_HOME to another directory.')
  reason = _shown(str(getattr(error, 'reason', None) or error or type(error).__name__))
  return (f'{shown}: expected an address that can be reached, got "{reason}". Download the file elsewhere '
          'and pass its path.')


def _check_size(headers: Mapping[str, str], folder: pathlib.Path, shown: str, most_bytes: int) -> None:
  """Raises UserError if the server reports a size that is too large, or for which `folder` has no space."""
  length, free = _length(headers), shutil.disk_usage(folder).free
  if length > most_bytes:
    raise UserError(f'{shown}: expected at most {most_bytes:,} bytes, got {length:,}. Use another address.')
  if length > free:
    raise UserError(f'{shown}: expected at most the {free / 2**20:,.0f} MiB that are free in {folder}, got '
                    f'{length / 2**20:,.0f} MiB. Free some space, or set XDG_CACHE_HOME to another directory.')


def _length(headers: Mapping[str, str]) -> int:
  """Returns the size that the server reports; 0 = unknown."""
  text = (headers.get('Content-Length') or '').strip()
  return int(text) if re.fullmatch(r'[0-9]{1,18}', text) else 0


def _copy(response: Any, out: BinaryIO, name: str, most_bytes: int) -> dict[str, bytes]:
  """Copies in pieces with progress, and returns the SHA-256 and the MD5 of the bytes, by `sha256` and `md5`. Raises
  UserError if there are more bytes than the server reports, or than `most_bytes`."""
  total, num_bytes = _length(response.headers), 0
  hashes = {'sha256': hashlib.sha256(), 'md5': hashlib.md5(usedforsecurity=False)}
  is_terminal, shown_at = sys.stderr.isatty(), time.monotonic()
  while piece := response.read(_CHUNK):
    num_bytes += len(piece)
    if num_bytes > (total or most_bytes):
      raise UserError(f'{name}: expected at most {total or most_bytes:,} bytes, got more. Use another address.')
    out.write(piece)
    for digest in hashes.values():
      digest.update(piece)
    if time.monotonic() - shown_at > (.2 if is_terminal else 10.):
      shown_at = time.monotonic()
      _show(name, num_bytes, total, is_terminal=is_terminal)
  if is_terminal and num_bytes > 10 * _CHUNK:
    _show(name, num_bytes, total, is_terminal=True)
    print(file=sys.stderr)
  return {kind: digest.digest() for kind, digest in hashes.items()}


def _show(name: str, num_bytes: int, total: int, *, is_terminal: bool) -> None:
  """Shows a bar on a terminal, otherwise a line."""
  text = f'{name} {num_bytes / 2**20:,.0f} MiB'
  if total:
    text = f'{name} [{"=" * (30 * num_bytes // total):30}] {num_bytes / 2**20:,.0f} of {total / 2**20:,.0f} MiB'
  print(f'\r{text}' if is_terminal else text, file=sys.stderr, end='' if is_terminal else '\n', flush=True)


def _difference(address: str, headers: Mapping[str, str], digests: Mapping[str, bytes], size: int) -> str:
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
