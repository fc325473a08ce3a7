"""A stand-in for Google Cloud Storage on this machine: enough of its JSON interface for TensorStore, gcsfs and Orbax.

`Server` keeps objects in memory and answers over HTTP, so that runs in processes of their own can be killed and go on.
Where gcsfs is not installed, `install` puts `bucket_client` in its place. `Server.fail` makes requests go wrong as they
do in a real bucket; listings come in pages of `page_size`.

  python tests/buckets.py --job=train …    the program, with that client
"""
from __future__ import annotations

import dataclasses
import fnmatch
import http.server
import json
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import bucket_client
import fsspec

STATUSES = ('429', '500', '503')
KINDS = (*STATUSES, 'slow', 'lost answer', 'lost session')


@dataclasses.dataclass
class Fault:
  """What goes wrong in the next `count` requests of this method whose object's name (`bucket/…`) fits the pattern.

  kind: `503`, `429` and `500` are answered with `Retry-After: seconds` (0 = without); `slow` answers after `seconds`;
  `lost answer` does what was asked for and closes the connection instead of answering; `lost session` answers a part of
  a resumable upload as if it had never begun. `hits` lists the requests that it has met.
  """
  kind: str
  method: str = '*'
  name: str = '*'
  count: float = 1
  seconds: float = 0.
  hits: list[str] = dataclasses.field(default_factory=list)

  def takes(self, method: str, name: str, is_part: bool) -> bool:
    """Whether it meets this request, which it then counts; `is_part`: of a resumable upload, after its beginning."""
    fits = (fnmatch.fnmatch(method, self.method) and fnmatch.fnmatch(name, self.name)
            and (is_part or self.kind != 'lost session'))
    if not fits or len(self.hits) >= self.count:
      return False
    self.hits.append(f'{method} {name}')
    return True


class Server(http.server.ThreadingHTTPServer):
  """Buckets in memory: `objects[name] = (generation, content)`, with `bucket/…` in the names.

  `requests` counts what was asked for, by method; `sent` the bytes of objects that were read, at most `bytes_per_s` to
  all clients together (0 = as fast as possible); `broken` makes every request fail, as when the network is away;
  `faults` are tried in order, and the first that fits a request meets it.
  """
  daemon_threads = True
  request_queue_size = 1024  # connections that a client opens at once; each that is refused is tried again after 1 s
  page_size = 1000

  def __init__(self) -> None:
    super().__init__(('127.0.0.1', 0), _Handler)
    self.objects: dict[str, tuple[int, bytes]] = {}
    self.requests: dict[str, int] = {}
    self.broken = False
    self.faults: list[Fault] = []
    self.sent, self.bytes_per_s = 0, 0.
    self.lock, self.generation = threading.Lock(), 0

  def fail(self, kind: str, method: str = '*', name: str = '*', *, count: float = 1, seconds: float = 0.) -> Fault:
    """Lets requests go wrong, see `Fault`."""
    assert kind in KINDS, kind
    self.faults.append(Fault(kind, method, name, count, seconds))
    return self.faults[-1]

  def handle_error(self, request: object, client_address: object) -> None:
    if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that no longer wants the answer
      super().handle_error(request, client_address)  # type: ignore[arg-type]

  def send(self, num_bytes: int) -> None:
    """Counts bytes that are read, and waits until the network has carried them."""
    self.sent += num_bytes
    if self.bytes_per_s:
      time.sleep(num_bytes / self.bytes_per_s)

  @property
  def address(self) -> str:
    return f'http://127.0.0.1:{self.server_address[1]}'

  def environment(self) -> dict[str, str]:
    """Variables that lead clients here, without credentials."""
    return {bucket_client.ADDRESS: self.address, 'TENSORSTORE_GCS_HTTP_URL': self.address,
            'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none', 'FSSPEC_GCS_TOKEN': 'anon', 'FSSPEC_GS_TOKEN': 'anon',
            'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false', 'GOOGLE_CLOUD_PROJECT': 'none'}

  def names(self, prefix: str) -> list[str]:
    """Names of the objects under `gs://PREFIX`, without that prefix."""
    start = prefix.removeprefix('gs://').rstrip('/') + '/'
    return sorted(name.removeprefix(start) for name in self.objects if name.startswith(start))

  def read(self, path: object) -> bytes:
    return self.objects[str(path).removeprefix('gs://')][1]


class _Handler(http.server.BaseHTTPRequestHandler):
  """One request. Paths are of cloud.google.com/storage/docs/json_api/v1."""
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True  # which waits 40 ms between the head and the body of an answer
  server: Server

  def log_message(self, *args: object) -> None:
    pass

  def handle_any(self) -> None:
    url = urllib.parse.urlsplit(self.path)
    query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
    body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
    self.server.requests[self.command] = self.server.requests.get(self.command, 0) + 1
    parts = [urllib.parse.unquote(p) for p in url.path.strip('/').split('/')]
    if self.server.broken:
      return self._answer(400, {'error': {'code': 400, 'message': 'the network is away'}})
    if parts[0] == 'batch':
      return self._batch(body)
    where = parts[parts.index('b') + 1:]
    self.fault = self._find_fault(where, query, body)
    if self.fault and self.fault.kind == 'slow':
      time.sleep(self.fault.seconds)
    elif self.fault and self.fault.kind in STATUSES:
      status = int(self.fault.kind)
      return self._answer(status, {'error': {'code': status, 'message': 'not now'}}, retry_s=self.fault.seconds)
    elif self.fault and self.fault.kind == 'lost session':
      self.server.objects.pop(f'.uploads/{where[0]}/{query["name"]}', None)
      return self._answer(410, {'error': {'code': 410, 'message': 'no such upload'}})
    with self.server.lock:
      if parts[0] == 'upload':
        return self._upload(where[0], query, body)
      if len(where) == 1 or where[1] != 'o':
        return self._answer(200, {'kind': 'storage#bucket', 'id': where[0], 'name': where[0]})
      if len(where) == 2:
        return self._list(where[0], query)
      if 'rewriteTo' in where or 'copyTo' in where:
        return self._copy(where)
      return self._object(f'{where[0]}/{"/".join(where[2:])}', query)

  def _find_fault(self, where: list[str], query: dict[str, str], body: bytes) -> Fault | None:
    """Returns the fault that meets this request. An upload may name its object in its body."""
    own = query.get('name') or query.get('prefix', '') if len(where) < 3 else '/'.join(where[2:])
    if not own and b'"name"' in body:
      own = body.split(b'"name"', 1)[1].split(b'"')[1].decode()
    with self.server.lock:
      return next((one for one in self.server.faults if one.takes(
          self.command, f'{where[0]}/{own}', 'upload_id' in query)), None)

  fault: Fault | None = None
  do_GET = do_POST = do_DELETE = do_PUT = do_HEAD = do_PATCH = handle_any

  def _object(self, name: str, query: dict[str, str]) -> None:
    found = self.server.objects.get(name)
    wanted = query.get('ifGenerationMatch')
    if wanted is not None and int(wanted) != (found[0] if found else 0):
      return self._answer(412, {'error': {'code': 412, 'message': 'another generation'}})
    if found is None:
      return self._answer(404, {'error': {'code': 404, 'message': 'no such object'}})
    if self.command == 'DELETE':
      del self.server.objects[name]
      return self._answer(204, b'')
    if query.get('alt') != 'media':
      return self._answer(200, _describe(name, *found))
    if query.get('ifGenerationNotMatch') == str(found[0]):
      return self._answer(304, b'', found[0])
    return self._media(*found)

  def _media(self, generation: int, content: bytes) -> None:
    asked = self.headers.get('Range')
    if not asked:
      self.server.send(len(content))
      return self._answer(200, content, generation)
    first, _, last = asked.removeprefix('bytes=').partition('-')
    begin, end = (int(first), int(last) + 1 if last else len(content)) if first else (
        max(0, len(content) - int(last)), len(content))
    if begin >= len(content):
      return self._answer(416, b'')
    end = min(end, len(content))
    self.server.send(end - begin)
    return self._answer(206, content[begin:end], generation, f'bytes {begin}-{end - 1}/{len(content)}')

  def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
    name = query.get('name', '')
    if query.get('uploadType') == 'multipart':
      _, boundary = self.headers['Content-Type'].split('boundary=')
      parts = body.split(b'--' + boundary.strip('"\'').encode())
      about, body = (part.partition(b'\r\n\r\n' if b'\r\n\r\n' in part else b'\n\n')[2] for part in parts[1:3])
      body = body.removesuffix(b'\r\n') if body.endswith(b'\r\n') else body.removesuffix(b'\n')
      name = name or json.loads(about)['name']
    elif query.get('uploadType') == 'resumable':
      return self._resume(bucket, name, query, body)
    found = self.server.objects.get(f'{bucket}/{name}')
    wanted = query.get('ifGenerationMatch')
    if wanted is not None and int(wanted) != (found[0] if found else 0):
      return self._answer(412, {'error': {'code': 412, 'message': 'another generation'}})
    return self._put(f'{bucket}/{name}', body)

  def _resume(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
    """An upload in pieces: the first request names it, and the last piece says how long the whole is."""
    if 'upload_id' not in query:
      name = name or json.loads(body)['name']
      address = f'{self.server.address}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id=1&name='
      self.server.objects[f'.uploads/{bucket}/{name}'] = (0, b'')
      return self._answer(200, b'', location=address + urllib.parse.quote(name, safe=''))
    part = f'.uploads/{bucket}/{name}'
    if part not in self.server.objects:
      return self._answer(404, {'error': {'code': 404, 'message': 'no such upload'}})
    whole = self.server.objects[part][1] + body
    self.server.objects[part] = (0, whole)
    if self.headers.get('Content-Range', '').endswith('/*'):
      return self._answer(308, b'', bounds=f'bytes=0-{len(whole) - 1}')
    del self.server.objects[part]
    return self._put(f'{bucket}/{name}', whole)

  def _put(self, name: str, content: bytes) -> None:
    self.server.generation += 1
    self.server.objects[name] = (self.server.generation, content)
    self._answer(200, _describe(name, self.server.generation, content))

  def _copy(self, where: list[str]) -> None:
    at = next(i for i, word in enumerate(where) if word in ('rewriteTo', 'copyTo'))
    source, target = f'{where[0]}/{"/".join(where[2:at])}', f'{where[at + 2]}/{"/".join(where[at + 4:])}'
    self.server.generation += 1
    self.server.objects[target] = (self.server.generation, self.server.objects[source][1])
    made = _describe(target, *self.server.objects[target])
    self._answer(200, {'done': True, 'resource': made, 'totalBytesRewritten': made['size'], 'objectSize': made['size']})

  def _list(self, bucket: str, query: dict[str, str]) -> None:
    prefix, cut = query.get('prefix', ''), query.get('delimiter', '')
    items: list[dict[str, Any]] = []
    folders: dict[str, None] = {}
    last, after = '', query.get('pageToken', '')
    most, token = min(self.server.page_size, int(query.get('maxResults', self.server.page_size))), ''
    for name in sorted(self.server.objects):
      own = name.removeprefix(f'{bucket}/')
      inside = name != own and own.startswith(prefix) and query.get('startOffset', '') <= own
      if not inside or ('endOffset' in query and own >= query['endOffset']):
        continue
      head, found, _ = own[len(prefix):].partition(cut) if cut else ('', '', '')
      entry = prefix + head + cut if found else own
      if entry <= after or entry in folders:
        continue
      if len(items) + len(folders) == most:
        token = last
        break
      last = entry
      if found:
        folders[entry] = None
      else:
        items.append(_describe(name, *self.server.objects[name]))
    more = {'nextPageToken': token} if token else {}
    self._answer(200, {'kind': 'storage#objects', 'items': items, 'prefixes': list(folders), **more})

  def _batch(self, body: bytes) -> None:
    """Deletions, many in one request."""
    _, boundary = self.headers['Content-Type'].split('boundary=')
    boundary = boundary.strip('"\'')
    answers = []
    with self.server.lock:
      for line in body.decode().splitlines():
        if line.startswith('DELETE '):
          parts = [urllib.parse.unquote(p) for p in urllib.parse.urlsplit(line.split()[1]).path.strip('/').split('/')]
          where = parts[parts.index('b') + 1:]
          gone = self.server.objects.pop(f'{where[0]}/{"/".join(where[2:])}', None)
          answers.append('204 No Content' if gone else '404 Not Found')
    text = ''.join(f'--{boundary}\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {answer}\r\n\r\n\r\n'
                   for answer in answers)
    self._answer(200, f'{text}--{boundary}--'.encode(), kind=f'multipart/mixed; boundary={boundary}')

  def _answer(self, status: int, content: bytes | dict[str, Any], generation: int = 0, bounds: str = '', *,
              location: str = '', kind: str = 'application/octet-stream', retry_s: float = 0.) -> None:
    if self.fault and self.fault.kind == 'lost answer':
      self.fault, self.close_connection = None, True
      return
    if isinstance(content, dict):
      content, kind = json.dumps(content).encode(), 'application/json'
    self.send_response(status)
    headers = {'Content-Type': kind, 'Content-Length': str(len(content)), 'Location': location,
               'Retry-After': f'{retry_s:g}' if retry_s else '', 'x-goog-generation': str(generation or ''),
               'Content-Range' if status == 206 else 'Range': bounds}
    for name, value in headers.items():
      if value:
        self.send_header(name, value)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(content)


def _describe(name: str, generation: int, content: bytes) -> dict[str, Any]:
  bucket, _, own = name.partition('/')
  return {'kind': 'storage#object', 'id': f'{name}/{generation}', 'name': own, 'bucket': bucket,
          'size': str(len(content)), 'generation': str(generation), 'metageneration': '1',
          'contentType': 'application/octet-stream',
          'updated': '2026-01-01T00:00:00.000Z', 'timeCreated': '2026-01-01T00:00:00.000Z', 'etag': str(generation),
          'mediaLink': f'{name}?alt=media'}


def has_gcsfs() -> bool:
  """Whether the real client is installed; `install` leaves an empty module of its name otherwise."""
  found = sys.modules.get('gcsfs')
  return hasattr(found, '__file__') if found else find_spec('gcsfs') is not None


def install() -> None:
  """Makes `gs://` reach the server: through gcsfs where it is installed, else through `bucket_client`."""
  if has_gcsfs():
    return
  for name in bucket_client.Client.protocol:
    fsspec.register_implementation(name, bucket_client.Client, clobber=True)
  for name in ('gcsfs', 'google.cloud', 'google.cloud.storage'):  # what Orbax imports for gs://, and what is looked for
    sys.modules[name] = module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    if name == 'google.cloud.storage':
      sys.modules['google.cloud'].storage = module  # type: ignore[attr-defined]
  bucket = types.SimpleNamespace(hierarchical_namespace_enabled=False)
  storage: Any = sys.modules['google.cloud.storage']
  storage.Client = lambda: types.SimpleNamespace(get_bucket=lambda name: bucket)


@contextmanager
def serve() -> Iterator[Server]:
  """A server in a thread of its own."""
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': .05}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


if __name__ == '__main__':
  install()
  from vit_jax import main
  sys.exit(main.run())
