"""Reads parts of objects in object storage, `gs://BUCKET/NAME` and `s3://BUCKET/NAME`, with TensorStore.

TensorStore keeps many requests in flight without a thread for each of them, repeats a request after an error of the
server, and finds credentials as the clients of the clouds do: for Google the account of the machine or that of
`gcloud auth application-default login`, for S3 the environment, `~/.aws` or the role of the machine.

`TENSORSTORE_GCS_HTTP_URL` and `AWS_ENDPOINT_URL` lead to another server, such as one for tests or a store that has the
interface of S3.
"""
from __future__ import annotations

import errno
import functools
import os
import re
import resource
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.core import os_errors
from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  import tensorstore

  Future = tensorstore.Future

SCHEMES = ('gs://', 's3://')
ANSWER_S = 120.
"""Seconds until a request without an answer counts as failed."""
_RETRIES = {'max_retries': 5, 'initial_delay': '0.5s', 'max_delay': '8s'}
_FILES_EACH = 16  # open files of the process for each connection
_FEW = 16  # connections of a process that may open few files
_DRIVERS = {'gs': 'gcs', 's3': 's3'}
_ENDPOINTS = ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL')
_TOTAL = re.compile(r'total size (\d+)')
_RIGHTS = re.compile(r"^(PERMISSION_DENIED|UNAUTHENTICATED)\b|http_response_code='40[13]'")
_BEYOND = re.compile(r"^OUT_OF_RANGE\b|http_response_code='416'")


class Answer(NamedTuple):
  """Bytes of an object, and its generation, which changes when the object is written again."""
  content: bytes
  generation: bytes


def is_address(path: str) -> bool:
  """Returns whether a path is an address of object storage that is read directly."""
  return path.startswith(SCHEMES)


def split(address: str) -> tuple[str, str, str]:
  """Returns the scheme, the bucket and the name of `gs://BUCKET/NAME`."""
  scheme, _, rest = address.partition('://')
  bucket, _, name = rest.partition('/')
  return scheme, bucket, name


def connections() -> int:
  """Returns how many requests a process keeps in flight: fewer where it may open few files."""
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return max(4, min(256, soft // _FILES_EACH)) if soft > 0 else 256


@functools.cache
def _context() -> Any:
  import tensorstore
  if connections() < _FEW:
    os.environ.setdefault('TENSORSTORE_HTTP_THREADS', '1')  # each of the usual four needs two files
  found: dict[str, Any] = {}
  for driver in _DRIVERS.values():
    found |= {f'{driver}_request_concurrency': {'limit': connections()}, f'{driver}_request_retries': _RETRIES}
  return tensorstore.Context(found)


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
  """Returns the client of a bucket."""
  import tensorstore
  spec: dict[str, Any] = {'driver': _DRIVERS[scheme], 'bucket': bucket}
  if scheme == 's3' and (endpoint := next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), '')):
    spec |= {'endpoint': endpoint, 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
  address = f'{scheme}://{bucket}'
  try:
    return tensorstore.KvStore.open(spec, context=_context()).result(ANSWER_S)
  except ValueError as error:
    if os_errors.is_temporary(error):
      raise _explained(error, address) from error
    raise UserError(f'{address}: expected the address of a bucket, got "{str(error).splitlines()[0][:200]}". Correct '
                    'it.') from error


def submit(address: str, offset: int, size: int) -> Future:
  """Starts to read `size` bytes from `offset`, or the last -`offset` bytes if it is negative; `take` waits for them.

  Raises:
    UserError: there is no such bucket, or it may not be read.
  """
  scheme, bucket, name = split(address)
  wanted = slice(offset, None) if offset < 0 else slice(offset, offset + size)
  found: Future = _store(scheme, bucket).read(name, byte_range=wanted)
  return found


def take(future: Future, address: str, offset: int) -> Answer:
  """Returns what `submit` reads; fewer bytes at the end of the object.

  Raises:
    FileNotFoundError: there is no such object.
    UserError: it may not be read.
    TimeoutError: there is no answer.
    OSError: the storage has another error.
  """
  try:
    found = future.result(ANSWER_S)
  except ValueError as error:
    text = str(error)
    if not _BEYOND.search(text):
      raise _explained(error, address) from error
    end = int(total[1]) if (total := _TOTAL.search(text)) else 0
    if end <= offset:
      return Answer(b'', b'')
    first = max(0, offset)  # all of an object that is smaller than the end that was asked for
    return take(submit(address, first, end - first), address, first)
  if found.state != 'value':
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address)
  return Answer(bytes(found.value), bytes(found.stamp.generation))


def read_all(address: str) -> Answer:
  """Returns all bytes of an object; raises as `take`."""
  scheme, bucket, name = split(address)
  return take(_store(scheme, bucket).read(name), address, 0)


def list_names(folder: str, start: str = '') -> list[str]:
  """Returns the names of the objects below a folder that begin with `start`, relative to it, in order.

  Raises as `take`.
  """
  import tensorstore
  scheme, bucket, name = split(folder.rstrip('/') + '/')
  keys = os.fsencode(name + start)
  end = keys.rstrip(b'\xff')  # the first key behind all that begin so
  end = end[:-1] + bytes([end[-1] + 1]) if end else b''
  store = _store(scheme, bucket)
  try:
    found = store.list(tensorstore.KvStore.KeyRange(keys, end),
                       strip_prefix_length=len(os.fsencode(name))).result(ANSWER_S)
    # After a refusal, TensorStore's list of GCS ends without an error, which a read then has.
    store.read(os.fsencode(name) + found[0] if found else keys or b'0', byte_range=slice(0, 1)).result(ANSWER_S)
  except ValueError as error:
    if not _BEYOND.search(str(error)):  # an empty object
      raise _explained(error, folder) from error
  return sorted(os.fsdecode(key) for key in found)


def _explained(error: ValueError, address: str) -> UserError | OSError:
  """Returns the error to raise in place of TensorStore's: every one of its kinds is a ValueError."""
  text = str(error)
  if _RIGHTS.search(text):
    right = ('the role roles/storage.objectViewer' if address.startswith('gs://') else
             'the permissions s3:GetObject and s3:ListBucket')
    return UserError(f'{address}: expected permission to read it, got "{text.splitlines()[0][:200]}". Give the account '
                     f'of this machine {right}, or log in as another account.')
  return OSError(f'{address}: {text.splitlines()[0][:300]}')
