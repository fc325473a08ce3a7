"""Objects of S3 are read by the same ranges, with a signature, from an address in the environment."""
from __future__ import annotations

import http.server
import os
import pathlib
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import pytest
import runs

from tests.data import packed, prepared_sets

SCRIPT = """
import sys
from tests.data import prepared_sets
from vit_jax.data.source import read_one
from vit_jax.config import schema
from vit_jax.data import storage
from vit_jax.data import opening
address, local = sys.argv[1:]
one, other = (prepared_sets.open_all(where).train for where in (address, local))
assert one.digest == other.digest and len(one) == len(other)
assert all(read_one(one, i).image == read_one(other, i).image for i in range(0, len(one), 50))
assert storage.read('s3://bucket/set/info.json', 10**6, 10) == b''
assert 'info.json' in storage.list_names('s3://bucket/set')
for kind, pattern in (('wds', 'set-train-{000..002}.tar'), ('tfrecord', 'train-0000?-of-00003')):
  one, other = (opening.open_split(schema.Data(source=f'{kind}:{where}/{pattern}'), 'train', image_px=(8, 8))
                for where in (address, local))
  assert one.digest == other.digest and list(one.read(range(23))) == list(other.read(range(23)))
  assert one.describe(0).startswith('s3://bucket/set/')
try:
  storage.read('s3://bucket/secret/x', 0, 10)
except ValueError as error:
  print(error)
try:
  storage.read('s3://bucket/set/none', 0, 10)
except FileNotFoundError as error:
  print(error)
"""


class Handler(http.server.BaseHTTPRequestHandler):
  """GET and HEAD of the files of a folder; listing."""
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True
  folder = pathlib.Path()
  signed: list[bool] = []

  def log_message(self, *args: object) -> None:
    pass

  def do_GET(self) -> None:
    url = urllib.parse.urlsplit(self.path)
    self.signed.append('AWS4-HMAC-SHA256' in self.headers.get('Authorization', ''))
    name = urllib.parse.unquote(url.path).removeprefix('/bucket').strip('/')
    if 'list-type=2' in url.query:
      prefix = dict(urllib.parse.parse_qsl(url.query)).get('prefix', '')
      keys = ''.join(f'<Contents><Key>set/{path.name}</Key><Size>{path.stat().st_size}</Size></Contents>'
                     for path in sorted(self.folder.iterdir()) if f'set/{path.name}'.startswith(prefix))
      return self.answer(200, f'<?xml version="1.0"?><ListBucketResult><KeyCount>1</KeyCount><IsTruncated>false'
                              f'</IsTruncated>{keys}</ListBucketResult>'.encode())
    if name.startswith('secret'):
      return self.answer(403, b'<Error><Code>AccessDenied</Code></Error>')
    path = self.folder / name.removeprefix('set/')
    if not name or not path.is_file():
      return self.answer(404 if name else 200, b'')
    content = path.read_bytes()
    first, _, last = self.headers.get('Range', 'bytes=0-').removeprefix('bytes=').partition('-')
    if int(first or 0) >= len(content):
      return self.answer(416, b'')
    part = content[int(first):int(last) + 1] if first and last else content[int(first):]
    end = int(first) + len(part) - 1
    return self.answer(206 if 'Range' in self.headers else 200, part, f'bytes {first}-{end}/{len(content)}')

  do_HEAD = do_GET

  def answer(self, status: int, content: bytes, bounds: str = '') -> None:
    self.send_response(status)
    self.send_header('Content-Length', str(len(content)))
    self.send_header('ETag', '"1"')
    self.send_header('x-amz-bucket-region', 'us-east-1')
    if bounds and status == 206:
      self.send_header('Content-Range', bounds)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(content)


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[str]:
  Handler.folder = prepared_sets.write(tmp_path / 'set')
  packed.write_tars(Handler.folder, 'train', packed.examples(23))
  packed.write_tfrecords(Handler.folder, 'train', packed.examples(23))
  Handler.signed = []
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as found:
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, kwargs={'poll_interval': .05}, daemon=True)
    thread.start()
    yield f'http://127.0.0.1:{found.server_address[1]}'
    found.shutdown()
    thread.join()


def test_records_errors_and_names_are_those_of_the_files(server: str, tmp_path: pathlib.Path) -> None:
  environment = runs.environment() | {'AWS_ENDPOINT_URL': server, 'AWS_ACCESS_KEY_ID': 'me', 'HOME': str(tmp_path),
                                      'AWS_SECRET_ACCESS_KEY': 'secret', 'AWS_EC2_METADATA_DISABLED': 'true',
                                      'PYTHONPATH': os.pathsep.join(['.', 'tests'])}
  found = subprocess.run([sys.executable, '-c', SCRIPT, 's3://bucket/set', str(tmp_path / 'set')], env=environment,
                         capture_output=True, text=True, check=False, timeout=60, cwd=runs.ROOT)
  assert found.returncode == 0, found.stderr[-3000:]
  assert 's3://bucket/secret/x: expected permission to read it' in found.stdout
  assert 's3:GetObject' in found.stdout and "No such file or directory: 's3://bucket/set/none'" in found.stdout
  assert Handler.signed and all(Handler.signed)
