"""What a person writes becomes a file here: fetched once, compared, and never half of it."""
from __future__ import annotations

import base64
import hashlib
import http.client
import http.server
import io
import json
import pathlib
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from email import message
from typing import Any

import hubs
import numpy as np
import pytest

from vit_jax.core import documents, failures
from vit_jax.core import hub as core_hub
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.weights import addresses, download, published


def made(**tensors: int) -> bytes:
  """An npz of arrays of these lengths."""
  out = io.BytesIO()
  np.savez(out, **{name: np.zeros(length, np.float32) for name, length in tensors.items()})
  return out.getvalue()


CONTENT = made(a=2000)


class Response(io.BytesIO):
  """A web server's answer."""

  def __init__(self, content: bytes, headers: dict[str, str] | message.Message) -> None:
    super().__init__(content)
    self.headers = headers


class Web:
  """An opener of a few addresses; keeps what was asked for."""

  def __init__(self, files: dict[str, bytes], headers: dict[str, str] | None = None) -> None:
    self.files, self.headers, self.asked = files, headers or {}, []

  def __call__(self, address: str) -> Response:
    self.asked.append(address)
    if address not in self.files:
      raise urllib.error.HTTPError(address, 404, 'Not Found', {}, None)  # type: ignore[arg-type]
    content = self.files[address]
    return Response(content, {'Content-Length': str(len(content)), **self.headers})


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> Iterator[hubs.Hub]:
  with hubs.running(tmp_path / 'home') as found:
    yield found


def files_in(folder: pathlib.Path) -> list[str]:
  return sorted(p.name for p in folder.rglob('*') if p.is_file())


def test_a_path_is_taken_as_it_is(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.npz').write_bytes(b'x')
  assert addresses.local(str(tmp_path / 'a.npz')) == tmp_path / 'a.npz'


@pytest.mark.parametrize(('where', 'address'), [
    ('https://host/x/net.npz', 'https://host/x/net.npz'),
    ('gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz',
     'https://storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/ViT-B_16.npz'),
    ('ViT-B_16-i21k', 'https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz'),
    ('Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224.npz',
     'https://storage.googleapis.com/vit_models/augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--'
     'imagenet2012-steps_20k-lr_0.03-res_224.npz'),
    ('R50_L_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0',
     'https://storage.googleapis.com/vit_models/augreg/R50_L_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0.npz'),
    ('Mixer-B_16-i1k', 'https://storage.googleapis.com/mixer_models/imagenet1k/Mixer-B_16.npz')])
def test_addresses_and_known_names_are_fetched_once_and_kept(where: str, address: str, cache: pathlib.Path) -> None:
  web = Web({address: CONTENT})
  path = addresses.local(where, opener=web)
  assert path.read_bytes() == CONTENT and path.is_relative_to(cache)
  assert addresses.local(where, opener=web) == path and web.asked == [address]
  assert files_in(cache) == [path.name]


def test_a_model_of_the_hub_becomes_a_folder_with_what_tells_of_it(hub: hubs.Hub) -> None:
  hub.repos['google/vit-base-patch16-224'] = hubs.Repo({'config.json': b'{}', 'model.safetensors': CONTENT})
  folder = addresses.local('hf://google/vit-base-patch16-224')
  assert files_in(folder) == ['config.json', 'model.safetensors']
  assert addresses.local('google/vit-base-patch16-224') == folder
  assert addresses.local('google/vit-base-patch16-224', offline=True) == folder
  hub.repos['timm/vit_x'] = hubs.Repo({'pytorch_model.bin': CONTENT})
  assert 'pytorch_model.bin' in files_in(addresses.local('timm/vit_x'))
  hub.repos['a/b'] = hubs.Repo({'sub.npz': CONTENT}, commit='f' * 40)
  assert addresses.local('hf://a/b/sub.npz').name == 'sub.npz'
  assert addresses.local(f'hf://a/b@{"f" * 40}/sub.npz').read_bytes() == CONTENT


def test_shards_are_fetched_by_their_index(hub: hubs.Hub) -> None:
  index = json.dumps({'weight_map': {'x': 'model-1.safetensors', 'y': 'model-2.safetensors'}}).encode()
  hub.repos['a/large'] = hubs.Repo({'model.safetensors.index.json': index, 'model-1.safetensors': CONTENT,
                                    'model-2.safetensors': CONTENT, 'pytorch_model.bin': CONTENT})
  found = addresses.weight_files(addresses.local('hf://a/large'))
  assert [p.name for p in found] == ['model-1.safetensors', 'model-2.safetensors']
  del hub.repos['a/large'].files['model-2.safetensors']
  hub.repos['a/large'].commit = 'e' * 40
  with pytest.raises(UserError, match='hf://a/large@e*: expected model-2.safetensors, which .* names, got no such'):
    addresses.local('hf://a/large')
  hub.repos['a/none'] = hubs.Repo({'x.txt': b''})
  with pytest.raises(UserError, match='hf://a/none: expected a model with one of .*, pytorch_model.bin'):
    addresses.local('hf://a/none')


def test_files_of_a_model_are_those_of_one_commit(hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
  hub.repos['a/b'] = hubs.Repo({'config.json': b'{}', 'model.safetensors': CONTENT})
  real, asked = core_hub.fetch, []

  def fetch(repository: core_hub.Repository, file: str, **options: Any) -> core_hub.File | None:
    asked.append((repository.revision, file))
    return real(repository, file, **options)

  monkeypatch.setattr(core_hub, 'fetch', fetch)
  addresses.local('hf://a/b')
  assert asked[0] == ('main', 'config.json') and asked[-1] == (hubs.COMMIT, 'model.safetensors')


@pytest.mark.parametrize(('address', 'headers', 'says'), [
    ('https://h/a.npz', {'Content-Length': '99999'}, f'{len(CONTENT):,} bytes came of 99,999'),
    ('https://h/a.npz', {'X-Linked-Etag': '"' + '0' * 64 + '"'}, 'its SHA-256 is '),
    ('https://h/a.npz', {'x-goog-hash': 'crc32c=AAAA, md5=' + base64.b64encode(b'0' * 16).decode()}, 'its MD5 is not'),
    ('https://h/deit_tiny-a1311bcf.pth', {}, 'its name says a1311bcf')])
def test_a_download_that_is_not_whole_or_another_is_not_kept(
    address: str, headers: dict[str, str], says: str, cache: pathlib.Path) -> None:
  with pytest.raises(TemporaryError, match=f'expected the whole file, got another: .*{says}.*Nothing was kept'):
    addresses.local(address, opener=Web({address: CONTENT}, headers))
  assert files_in(cache) == []


def test_each_checksum_of_google_storage_may_be_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
  headers = message.Message()
  headers['Content-Length'] = str(len(CONTENT))
  headers['x-goog-hash'] = 'crc32c=AAAA'
  headers['x-goog-hash'] = 'md5=' + base64.b64encode(b'0' * 16).decode()
  web = Web({'https://h/a.npz': CONTENT})
  monkeypatch.setattr(web, 'headers', headers)
  monkeypatch.setattr(Web, '__call__', lambda self, address: Response(self.files[address], self.headers))
  with pytest.raises(TemporaryError, match='its MD5 is not'):
    addresses.local('https://h/a.npz', opener=web)


def test_published_checksums_that_are_right_are_accepted() -> None:
  sha = hashlib.sha256(CONTENT).hexdigest()
  md5 = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
  address = f'https://h/net-{sha[:8]}.pth'
  web = Web({address: CONTENT}, {'X-Linked-Etag': f'"{sha}"', 'x-goog-hash': f'crc32c=AAAA,md5={md5}'})
  assert addresses.local(address, opener=web).read_bytes() == CONTENT


def test_what_no_server_knows_is_a_message(cache: pathlib.Path, hub: hubs.Hub) -> None:
  with pytest.raises(UserError, match='https://h/none.npz: expected a file, got "not found" from its server'):
    addresses.local('https://h/none.npz', opener=Web({}))
  hub.repos['a/b'] = hubs.Repo({'x.txt': b''})
  with pytest.raises(UserError, match=f'hf://a/b/none.npz: expected a file of {hub.address}/a/b, got none of this'):
    addresses.local('hf://a/b/none.npz')
  assert files_in(cache) == []


def test_an_address_of_another_kind_is_no_missing_path() -> None:
  expected = r's3://b/x: expected weights as a path, gs://…, https://…, hf://OWNER/NAME or a known name \(.*\), got an '
  with pytest.raises(addresses.NoWeights, match=f'{expected}address of s3://. Download the file and give its path.'):
    addresses.local('s3://b/x')


def test_without_downloads_a_message_says_that_only_the_cache_was_searched(hub: hubs.Hub) -> None:
  hub.repos['a/b'] = hubs.Repo({'config.json': b'{}', 'model.safetensors': CONTENT})
  with pytest.raises(UserError, match='hf://a/b: expected a model .*, got one without in the cache. Choose another'):
    addresses.local('hf://a/b', offline=True)
  with pytest.raises(UserError, match='a/b/x.npz: expected a file of .*, got none of this name in the cache. Use'):
    addresses.local('hf://a/b/x.npz', offline=True)
  with pytest.raises(UserError, match='https://h/a.npz: .*got "not in the cache"'):
    addresses.local('https://h/a.npz', offline=True)


class Terminal(io.StringIO):
  """A standard error that a person looks at."""

  def isatty(self) -> bool:
    return True


def test_a_long_download_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
  large = made(a=(11 << 18) - 100)
  clock = iter(range(100))
  monkeypatch.setattr(download, 'time', types.SimpleNamespace(monotonic=lambda: float(next(clock))))
  for screen, name, wanted in ((Terminal(), 'a.npz', f'\ra.npz [=={" " * 28}] 1 of 11 MiB\r'),
                               (io.StringIO(), 'b.npz', f'b.npz [{"=" * 30}] 11 of 11 MiB\n')):
    monkeypatch.setattr(download, 'sys', types.SimpleNamespace(stderr=screen))
    addresses.local(f'https://h/{name}', opener=Web({f'https://h/{name}': large}))
    assert wanted in screen.getvalue()
  assert screen.getvalue() == wanted  # a line every ten seconds


OUTSIDE = ('%2f..%2fprobe.npz', '..%2f..%2fX.npz', '%2e%2e', '..', '', '%00.npz', 'a%00b.npz', '%252f..%252fX.npz',
           '%25252fX.npz', 'a%5cb.npz', '.npz', '%2ewhole', 'a%0ab.npz', 'x' * 300 + '.npz', '%20')


@pytest.mark.parametrize('last', OUTSIDE)
@pytest.mark.parametrize('place', ['http://host/x/', 'https://host/', 'gs://bucket/x/', 'hf://owner/model/',
                                   'hf://owner/model/sub/'])
def test_a_name_that_leads_elsewhere_is_refused_before_a_byte_is_fetched(
    place: str, last: str, tmp_path: pathlib.Path) -> None:
  web = Web({})
  with pytest.raises(UserError, match=r'expected (names of plain files|hf://OWNER/NAME)'):
    addresses.local(place + last + ('/' if last == '' else ''), opener=web)
  assert web.asked == [] and not list(tmp_path.rglob('*'))


@pytest.mark.parametrize('name', ['../..', '..', 'o/..', '../m', 'o/m/../../x', 'o/m/a/../b', 'o/m//x', 'o/m/a%2fb',
                                  'a--b/c', '/m/x', 'o/m/.whole', '%2e%2e/m', 'o/m\0', 'o\n/m'])
def test_a_name_of_the_hub_is_that_of_one_model(name: str, tmp_path: pathlib.Path) -> None:
  web = Web({})
  with pytest.raises(UserError, match='^hf://'):
    addresses.local(f'hf://{name}', opener=web)
  assert web.asked == [] and not list(tmp_path.rglob('*'))


def test_a_link_in_the_cache_does_not_lead_out_of_it(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'outside').mkdir()
  addresses.cache().mkdir(parents=True)
  address = 'https://host/a.npz'
  folder = hashlib.sha256(address.encode()).hexdigest()[:16]
  (addresses.cache() / folder).symlink_to(tmp_path / 'outside')
  web = Web({address: CONTENT})
  with pytest.raises(UserError, match='expected a path inside of .*, got one that leads to .*outside'):
    addresses.local(address, opener=web)
  assert web.asked == [] and not list((tmp_path / 'outside').iterdir())
  (tmp_path / 'disk').mkdir()
  (tmp_path / 'moved').symlink_to(tmp_path / 'disk')  # the whole cache may lie on another disk
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path / 'moved'))
    assert addresses.local(address, opener=web).read_bytes() == CONTENT


@pytest.mark.parametrize(('content', 'says'), [
    (b'<!DOCTYPE html><title>Sign in</title>', 'got a web page'), (b'', 'got an empty file'),
    (CONTENT[:-30], 'damaged or cut'),
    (CONTENT[:3000] + b'x' + CONTENT[3001:], 'damaged or cut short: Bad CRC-32'),
    (b'\x80\x02cposix\nsystem\n.', 'asks to run posix.system')])
def test_what_is_not_weights_does_not_stay(content: bytes, says: str, hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  hub.repos['o/m'] = hubs.Repo({'net.pth': content, 'model.safetensors': content})
  for where, shown in (('https://h/net.npz', 'https://h/net.npz'), ('hf://o/m/net.pth', 'hf://o/m/net.pth'),
                       ('hf://o/m', 'hf://o/m/model.safetensors')):
    with pytest.raises(UserError, match=f'^{shown}: expected .*{says}'):
      addresses.local(where, opener=Web({'https://h/net.npz': content}))
    assert not list(addresses.cache().iterdir())
    assert not [path for path in (tmp_path / 'home').rglob('*')
                if path.is_file() and path.suffix != '.lock' and path.read_bytes() == content]


def test_a_side_file_is_json_of_a_limited_size(hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
  for content, says in ((b'<html>', 'expected a JSON object'), (b'[1]', 'got \\[1\\]'),
                        (b'[' * 100_000, 'nested too deep')):
    hub.repos['o/m'] = hubs.Repo({'config.json': content})
    with pytest.raises(UserError, match=f'^hf://o/m/config.json: .*{says}'):
      addresses.local('hf://o/m')
  monkeypatch.setattr(documents, 'MAX_BYTES', 100)
  hub.repos['o/m'] = hubs.Repo({'config.json': b' ' * 101 + b'{}'})
  with pytest.raises(UserError, match='expected at most 100 bytes, got 103'):
    addresses.local('hf://o/m')


def test_a_damaged_index_of_shards_is_said(tmp_path: pathlib.Path) -> None:
  for content, says in (('{', 'expected an index of shards, got no JSON'),
                        ('{"weight_map": [1]}', 'weight_map: expected an object'),
                        ('{"weight_map": {}}', 'expected 1 to 1,000 shards, got 0'), ('[' * 100_000, 'nested too deep'),
                        ('{"weight_map": {"a": "../../key"}}', "expected names of plain files, got '../../key'"),
                        *((f'{{"weight_map": {{"a": {json.dumps(name)}}}}}', 'expected names of plain files')
                          for name in ('..', '.', '', '/etc/passwd', 'a\0b', 7, 'sub/a', '.whole', 'a' * 300))):
    (tmp_path / addresses.INDEX).write_text(content)
    with pytest.raises(UserError, match=says):
      addresses.weight_files(tmp_path)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(failures, 'PATIENCE_S', 0.)


def refusal(code: int, reason: str) -> urllib.error.HTTPError:
  return urllib.error.HTTPError('a', code, reason, {}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(('error', 'kind', 'says'), [
    (urllib.error.URLError('no host'), UserError, 'expected an address that can be reached, got "no host". Download'),
    (TimeoutError('timed out'), TemporaryError, 'expected an address that can be reached, got "timed out". Download'),
    (http.client.IncompleteRead(b''), TemporaryError, 'expected an address that can be reached, got "IncompleteRead'),
    (refusal(401, 'Unauthorized'), UserError, 'got status 401 Unauthorized from its server. Fetch it with your acc'),
    (refusal(500, 'Broken'), TemporaryError, 'got status 500 Broken')])
def test_what_a_server_or_the_network_says_is_passed_on(
    error: Exception, kind: type[Exception], says: str, cache: pathlib.Path) -> None:
  def broken(address: str) -> None:
    raise error

  with pytest.raises(kind, match=says):
    addresses.local('https://host/a.npz', opener=broken)
  assert files_in(cache) == []


def test_an_unknown_name_shows_the_nearest_ones() -> None:
  with pytest.raises(UserError, match=r'^ViT-B_16-i21: expected weights as a path, .* Did you mean ViT-B_16-i21k or'):
    addresses.local('ViT-B_16-i21')
  with pytest.raises(UserError, match='hf://owner: expected hf://OWNER/NAME'):
    addresses.local('hf://owner')


def test_a_folder_must_hold_one_model(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'notes.txt').write_text('x')
  with pytest.raises(UserError, match='got no weights: notes.txt. Give the path of one file'):
    addresses.weight_files(tmp_path)
  (tmp_path / 'a.npz').write_bytes(CONTENT)
  assert addresses.weight_files(tmp_path) == [tmp_path / 'a.npz']
  (tmp_path / 'b.npz').write_bytes(CONTENT)
  with pytest.raises(UserError, match='got several weight files: a.npz, b.npz'):
    addresses.weight_files(tmp_path)


class Server(http.server.BaseHTTPRequestHandler):
  """Sends `CONTENT`, in two halves, or half of it."""
  seen: list[str] = []

  def do_GET(self) -> None:
    self.seen.append(self.headers.get('Authorization', ''))
    if self.path.startswith('/to/'):
      self.send_response(302)
      self.send_header('Location', self.path.removeprefix('/to/').replace('_', ':'))
      self.end_headers()
      return
    if self.path.startswith('/hub/'):
      self.send_response(302)
      self.send_header('Location', self.path.removeprefix('/hub'))
      tag = hashlib.sha256(CONTENT).hexdigest() if 'good' in self.path else '0' * 64
      self.send_header('X-Linked-Etag', f'"{tag}"')
      self.end_headers()
      return
    self.send_response(200 if 'missing' not in self.path else 404)
    self.send_header('Content-Length', str(len(CONTENT)))
    self.end_headers()
    self.wfile.write(CONTENT[:len(CONTENT) // (2 if 'half' in self.path else 1)])

  def log_message(self, *arguments: object) -> None:
    del arguments


@pytest.fixture
def server() -> Iterator[str]:
  with http.server.HTTPServer(('127.0.0.1', 0), Server) as found:
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f'http://127.0.0.1:{found.server_address[1]}'
    found.shutdown()
    thread.join()


def test_a_real_server_is_read_and_one_that_breaks_off_is_noticed(server: str, cache: pathlib.Path) -> None:
  assert addresses.local(f'{server}/net.npz').read_bytes() == CONTENT
  with pytest.raises(TemporaryError, match='bytes came of|expected a file, got'):
    addresses.local(f'{server}/half.npz')
  with pytest.raises(FileNotFoundError):
    download.fetch(f'{server}/missing.npz', cache / 'x', prove=lambda *_: None)
  assert files_in(cache) == ['net.npz']


@pytest.mark.parametrize('target', ['ftp_//h/a.npz', 'file_///etc/passwd', 'data_,x', 'http_//[', 'http_//a..b/x.npz'])
def test_redirects_lead_to_web_servers_alone(target: str, server: str, cache: pathlib.Path) -> None:
  expected = '(a redirect to http or https|a file|an address that can be reached)'
  with pytest.raises(UserError, match=f'^http://127.0.0.1.*expected {expected}, got'):
    addresses.local(f'{server}/to/{target}?x=/a.npz')
  assert files_in(cache) == []


def test_the_checksum_of_a_hub_that_sends_one_elsewhere_is_compared(server: str, cache: pathlib.Path) -> None:
  assert addresses.local(f'{server}/hub/good.npz').read_bytes() == CONTENT
  with pytest.raises(TemporaryError, match='its SHA-256 is .*, the server says 0000'):
    addresses.local(f'{server}/hub/bad.npz')
  assert files_in(cache) == ['good.npz']


def test_known_names_are_addresses_of_public_places() -> None:
  assert all(address.split('://')[0] in ('gs', 'https') for address in published.NAMES.values())
  assert published.address('vit.npz') == '' and published.address('ViT-L_16-sam') == 'gs://vit_models/sam/ViT-L_16.npz'


def test_the_first_tokenizer_of_a_model_of_the_hub_is_fetched_once(hub: hubs.Hub, cache: pathlib.Path) -> None:
  hub.repos['a/b'] = hubs.Repo({'vocab.json': b'{"a": 0}', 'merges.txt': b'#version: 0.2', 'x.model': b'x',
                                'model.safetensors': CONTENT})
  for _ in range(2):
    addresses.fetch_tokenizer('hf://a/b', ('tokenizer.json', 'vocab.json', 'x.model'))
  got = [path.rsplit('/', 1)[1] for method, path, _ in hub.asked if method == 'GET' and '/resolve/' in path]
  assert got == ['vocab.json', 'merges.txt']
  assert files_in(addresses.local('hf://a/b')) == ['merges.txt', 'model.safetensors', 'vocab.json']
  addresses.fetch_tokenizer(str(cache), ('x.model',))  # elsewhere nothing is fetched
  hub.repos['a/c'] = hubs.Repo({'t.json': b'<html>'})
  with pytest.raises(UserError, match='hf://a/c/t.json: expected a tokenizer, got a web page'):
    addresses.fetch_tokenizer('hf://a/c', ('t.json',))


@pytest.mark.parametrize(('old', 'new', 'says'), [
    ('https://8.8.8.8/a', 'http://8.8.8.8/a', 'expected a redirect to https, got one to http://8.8.8.8/a'),
    ('https://8.8.8.8/a', 'https://169.254.169.254/latest', 'expected a redirect to a public server'),
    ('http://8.8.8.8/a', 'http://127.0.0.1:1/a', 'expected a redirect to a public server'),
    ('http://8.8.8.8/a', 'http://[::1]/a', 'expected a redirect to a public server'),
    ('http://8.8.8.8/a', 'http://[::ffff:10.0.0.1]/a', 'expected a redirect to a public server'),
    ('http://8.8.8.8/a', 'http://192.168.0.1/a', 'expected a redirect to a public server'),
    ('http://8.8.8.8/a', 'http://localhost/a', 'expected a redirect to a public server'),
    ('https://8.8.8.8/a', 'https://1.1.1.1/b', ''), ('http://8.8.8.8/a', 'https://1.1.1.1/b', ''),
    ('http://127.0.0.1/a', 'http://10.0.0.1/b', '')])
def test_a_redirect_leaves_neither_https_nor_the_public_network(old: str, new: str, says: str) -> None:
  handler = download._Redirects()
  request = urllib.request.Request(old)
  request.add_unredirected_header('Authorization', 'Basic x')
  if says:
    with pytest.raises(UserError, match=says):
      handler.redirect_request(request, None, 302, 'Found', {}, new)
  else:
    found = handler.redirect_request(request, None, 302, 'Found', {}, new)
    assert found is not None and found.full_url == new and not found.has_header('Authorization')


def test_a_password_of_an_address_is_sent_and_not_shown(server: str, cache: pathlib.Path) -> None:
  address = server.replace('http://', 'http://me:hunter2%21@')
  assert addresses.local(f'{address}/net.npz?token=hunter2').read_bytes() == CONTENT
  assert Server.seen[-1] == f'Basic {base64.b64encode(b"me:hunter2!").decode()}'
  for path in ('/half.npz?token=hunter2', '/missing.npz?token=hunter2', '/to/ftp_//h/a.npz?token=hunter2'):
    with pytest.raises((UserError, TemporaryError)) as caught:
      addresses.local(f'{address}{path}')
    assert 'hunter2' not in str(caught.value) and '***' in str(caught.value)
  assert not [name for name in files_in(cache) if 'hunter2' in name]
  with pytest.raises(UserError, match='expected an address with its password or token, got one without'):
    addresses.local('https://***@host/a.npz')
