"""A small client of object storage for `fsspec`, for tests where gcsfs is not installed.

As gcsfs does, it follows the pages of listings, and repeats what was answered with 408, 429 or 5xx, or not at all.
"""
from __future__ import annotations

import http.client
import io
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from fsspec import spec

REPEATED = (408, 429, 500, 502, 503, 504)
WAITS_S = (.1, .2, .4, .8, 1.6)
ADDRESS = 'STORAGE_EMULATOR_HOST'  # the variable that Google's own clients and gcsfs read, too


class Client(spec.AbstractFileSystem):
  """A file system over the server: whole objects, no folders, nothing appended."""
  protocol = ('gcs', 'gs')
  cachable = False

  def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
    path = self._strip_protocol(path)
    bucket, _, prefix = path.partition('/')
    prefix = f'{prefix}/' if prefix else ''
    quoted, infos, token = urllib.parse.quote(prefix, safe=''), [], ''
    while not infos or token:
      found = json.loads(_ask('GET', f'/storage/v1/b/{bucket}/o?delimiter=/&prefix={quoted}&pageToken={token}'))
      infos += [{'name': f'{bucket}/{one["name"]}', 'size': int(one['size']), 'type': 'file'} for one in found['items']]
      infos += [{'name': f'{bucket}/{name}'.rstrip('/'), 'size': 0, 'type': 'directory'} for name in found['prefixes']]
      token = urllib.parse.quote(found.get('nextPageToken', ''), safe='')
      if not token:
        break
    if not infos:
      infos = [self.info(path)]
    return infos if detail else [one['name'] for one in infos]

  def info(self, path: str, **kwargs: object) -> dict[str, Any]:
    path = self._strip_protocol(path)
    bucket, _, name = path.partition('/')
    quoted = urllib.parse.quote(f'{name}/', safe='')
    if json.loads(_ask('GET', f'/storage/v1/b/{bucket}/o?prefix={quoted}'))['items']:
      return {'name': path, 'size': 0, 'type': 'directory'}
    return {'name': path, 'size': int(json.loads(_ask('GET', _address(path)))['size']), 'type': 'file'}

  def rm_file(self, path: str) -> None:
    _ask('DELETE', _address(self._strip_protocol(path)))

  def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
    found = self.find(path, maxdepth=maxdepth)
    if not found:
      raise FileNotFoundError(path)
    for one in found:
      self.rm_file(one)

  def cp_file(self, path1: str, path2: str, **kwargs: object) -> None:
    self.pipe_file(path2, self.cat_file(path1))

  def mkdir(self, path: str, create_parents: bool = True, **kwargs: object) -> None:
    pass

  makedirs = mkdir

  def _open(self, path: str, mode: str = 'rb', **kwargs: object) -> io.BytesIO:
    path = self._strip_protocol(path)
    if mode == 'rb':
      return io.BytesIO(_ask('GET', _address(path) + '?alt=media'))
    if mode != 'wb':
      raise NotImplementedError(f'mode={mode!r}: an object is read, or written whole')
    return _Upload(path)


class _Upload(io.BytesIO):
  """An object that is there once it is closed."""

  def __init__(self, path: str) -> None:
    super().__init__()
    self._path = path

  def close(self) -> None:
    if not self.closed:
      bucket, _, name = self._path.partition('/')
      _ask('POST', f'/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(name, safe="")}',
           self.getvalue())
    super().close()


def _address(path: str) -> str:
  bucket, _, name = path.partition('/')
  return f'/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe="")}'


def _ask(method: str, address: str, body: bytes | None = None) -> bytes:
  for wait_s in (*WAITS_S, None):
    try:
      with urllib.request.urlopen(urllib.request.Request(os.environ[ADDRESS] + address, body, method=method)) as answer:
        return answer.read()
    except urllib.error.HTTPError as error:
      if error.code == 404:
        raise FileNotFoundError(address) from None
      if error.code not in REPEATED:
        raise OSError(f'{method} {address}: {error.code}') from None
      if wait_s is None:
        raise OSError(f'{method} {address}: HTTP {error.code}') from None
    except (ConnectionError, http.client.HTTPException, urllib.error.URLError) as error:
      if wait_s is None:
        raise ConnectionError(f'{method} {address}: {error}') from None
    time.sleep(wait_s)
  raise AssertionError('the last try returns or raises')
