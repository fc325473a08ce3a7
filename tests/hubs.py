"""A stand-in for the Hugging Face hub on this machine: repositories whose files are downloaded and uploaded over HTTP.

`Hub` answers as the hub does: commits and checksums in headers, 401 and 403 for gated and private repositories, 404
with the reason in a header.
"""
from __future__ import annotations

import base64
import dataclasses
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

TOKEN = 'hf_valid'
COMMIT = '0123456789abcdef0123456789abcdef01234567'


@dataclasses.dataclass
class Repo:
  """The files of a repository at one commit; `gated`: needs a token whose owner accepted the license."""
  files: dict[str, bytes]
  gated: bool = False
  private: bool = False
  commit: str = COMMIT
  others: dict[str, Repo] = dataclasses.field(default_factory=dict)
  """Other revisions."""

  def at(self, revision: str) -> Repo | None:
    """Returns the repository at a branch, tag or commit; None if there is no such revision."""
    if revision in ('main', self.commit):
      return self
    return next((one for name, one in self.others.items() if revision in (name, one.commit)), None)


class Hub(http.server.ThreadingHTTPServer):
  """`repos['OWNER/NAME']`, or `datasets/OWNER/NAME`; `asked` has the method, path and token of each request.

  `accepted` are the tokens that may read and write everything; `commits` has the repository and message of each commit.
  """
  daemon_threads = True

  def __init__(self) -> None:
    super().__init__(('127.0.0.1', 0), _Handler)
    self.repos: dict[str, Repo] = {}
    self.asked: list[tuple[str, str, str]] = []
    self.accepted = {TOKEN}
    self.broken = False
    self.uploads: dict[str, bytes] = {}
    self.commits: list[tuple[str, str]] = []

  @property
  def address(self) -> str:
    return f'http://127.0.0.1:{self.server_address[1]}'

  def environment(self, home: pathlib.Path) -> dict[str, str]:
    """Variables by which programs use this hub, with their cache in `home`."""
    return {'HF_ENDPOINT': self.address, 'HF_HOME': str(home), 'HF_HUB_OFFLINE': '0', 'HF_HUB_DISABLE_XET': '1'}


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  server: Hub

  def log_message(self, *arguments: object) -> None:
    del arguments

  def do_HEAD(self) -> None:
    self._answer_file(with_body=False)

  def do_GET(self) -> None:
    found = re.fullmatch(r'/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?',
                         urllib.parse.urlsplit(self.path).path)
    name = f'{"datasets/" if found[1] == "datasets" else ""}{found[2]}' if found else ''
    if found is None or (name not in self.server.repos and found[1] == 'models') or self.server.broken:
      return self._answer_file(with_body=True)
    token = self.headers.get('Authorization', '').removeprefix('Bearer ')
    self.server.asked.append(('GET', self.path, token))
    if name not in self.server.repos:
      return self._send(401, {'X-Error-Code': 'RepoNotFound'}, b'')
    repo = self.server.repos[name].at(urllib.parse.unquote(found[3] or 'main'))
    if repo is None:
      return self._send(404, {'X-Error-Code': 'RevisionNotFound'}, b'')
    if repo.gated and token not in self.server.accepted:
      return self._send(403, {'X-Error-Code': 'GatedRepo'}, b'')
    return self._send_json({'id': found[2], 'sha': repo.commit, 'private': repo.private, 'tags': [], 'downloads': 0,
                            'siblings': [{'rfilename': name} for name in repo.files]})

  def do_PUT(self) -> None:
    self.server.uploads[self.path.rpartition('/')[2]] = self._body()
    self._send(200, {}, b'')

  def do_POST(self) -> None:
    path, body = urllib.parse.urlsplit(self.path).path, self._body()
    token = self.headers.get('Authorization', '').removeprefix('Bearer ')
    self.server.asked.append(('POST', path, token))
    if token not in self.server.accepted:
      return self._send(401, {}, b'{"error": "Invalid credentials"}')
    if path == '/api/repos/create':
      asked = json.loads(body)
      name = f'{asked["organization"]}/{asked["name"]}'
      if name in self.server.repos:
        return self._send(409, {}, json.dumps({'url': f'{self.server.address}/{name}'}).encode())
      self.server.repos[name] = Repo({}, private=bool(asked.get('private') or asked.get('visibility') == 'private'))
      return self._send_json({'url': f'{self.server.address}/{name}'})
    if path.endswith('/info/lfs/objects/batch'):
      return self._send_json({'transfer': 'basic', 'objects': [
          {**one, 'actions': {'upload': {'href': f'{self.server.address}/lfs/{one["oid"]}'}}}
          for one in json.loads(body)['objects']]})
    if path == '/api/validate-yaml':
      return self._send_json({'errors': [], 'warnings': []})
    if '/preupload/' in path:
      return self._send_json({'files': [
          {'path': one['path'], 'shouldIgnore': False, 'uploadMode': 'lfs' if one['path'].endswith('.safetensors')
           else 'regular'} for one in json.loads(body)['files']]})
    return self._commit(path.removeprefix('/api/models/').rpartition('/commit/')[0], body)

  def _commit(self, name: str, body: bytes) -> None:
    repo = self.server.repos[name]
    for line in body.splitlines():
      one = json.loads(line)
      value = one['value']
      if one['key'] == 'header':
        self.server.commits.append((name, value['summary']))
      elif one['key'] == 'file':
        repo.files[value['path']] = base64.b64decode(value['content'])
      else:
        repo.files[value['path']] = self.server.uploads[value['oid']]
    repo.commit = hashlib.sha1(body).hexdigest()
    self._send_json({'commitUrl': f'{self.server.address}/{name}/commit/{repo.commit}', 'commitOid': repo.commit,
                     'hookOutput': ''})

  def _body(self) -> bytes:
    return self.rfile.read(int(self.headers.get('Content-Length') or 0))

  def _send_json(self, content: object) -> None:
    self._send(200, {'Content-Type': 'application/json'}, json.dumps(content).encode())

  def _answer_file(self, with_body: bool) -> None:
    token = self.headers.get('Authorization', '').removeprefix('Bearer ')
    path = self.path
    self.server.asked.append((self.command, urllib.parse.unquote(path), token))
    if self.server.broken:
      return self._send(503, {}, b'')
    found = re.fullmatch(r'/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)', path)
    repo = self.server.repos.get(found[1]) if found else None
    if repo is None or (repo.private and token not in self.server.accepted):
      return self._send(401, {'X-Error-Code': 'RepoNotFound', 'X-Error-Message': 'Repository not found'}, b'')
    if repo.gated and token not in self.server.accepted:
      return self._send(403 if token else 401, {'X-Error-Code': 'GatedRepo', 'X-Error-Message': 'Access is restricted'},
                        b'')
    assert found is not None
    repo, name = repo.at(urllib.parse.unquote(found[2])), urllib.parse.unquote(found[3])
    if repo is None:
      return self._send(404, {'X-Error-Code': 'RevisionNotFound'}, b'')
    if name not in repo.files:
      return self._send(404, {'X-Error-Code': 'EntryNotFound', 'X-Repo-Commit': repo.commit}, b'')
    content = repo.files[name]
    tag = hashlib.sha256(content).hexdigest()
    return self._send(200, {'ETag': f'"{tag}"', 'X-Repo-Commit': repo.commit, 'X-Linked-Size': str(len(content))},
                      content, with_body)

  def _send(self, status: int, headers: dict[str, str], body: bytes, with_body: bool = True) -> None:
    self.send_response(status)
    for name, value in {**headers, 'Content-Length': str(len(body))}.items():
      self.send_header(name, value)
    self.end_headers()
    if with_body:
      self.wfile.write(body)


@contextmanager
def running(home: pathlib.Path) -> Iterator[Hub]:
  """A hub for programs of this process and, by its `environment`, of others."""
  import huggingface_hub
  from huggingface_hub import constants
  with Hub() as hub:
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    template = hub.address + '/{repo_id}/resolve/{revision}/{filename}'
    with mock.patch.multiple(constants, ENDPOINT=hub.address, HUGGINGFACE_CO_URL_TEMPLATE=template,
                             HF_HUB_CACHE=str(home / 'hub'), HF_HUB_OFFLINE=False,
                             HF_TOKEN_PATH=str(home / 'token'), HF_HUB_DISABLE_XET=True):
      huggingface_hub.close_session()
      yield hub
      huggingface_hub.close_session()
    hub.shutdown()
    thread.join()


def config(**values: object) -> bytes:
  """A JSON file with these values."""
  return json.dumps(values).encode()
