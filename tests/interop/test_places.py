"""What a person writes becomes a file here: fetched once, compared, and never half of it."""
from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import pathlib
import threading
import types
import urllib.error
from collections.abc import Iterator

import pytest

from vit_jax.core.errors import UserError
from vit_jax.interop import known, places

CONTENT = bytes(range(256)) * 40


class Response(io.BytesIO):
  """A web server's answer."""

  def __init__(self, content: bytes, headers: dict[str, str]):
    super().__init__(content)
    self.headers = headers


class Web:
  """An opener of a few addresses; keeps what was asked for."""

  def __init__(self, files: dict[str, bytes], headers: dict[str, str] | None = None):
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


def files_in(folder: pathlib.Path) -> list[str]:
  return sorted(p.name for p in folder.rglob('*') if p.is_file())


def test_a_path_is_taken_as_it_is(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.npz').write_bytes(b'x')
  assert places.local(str(tmp_path / 'a.npz')) == tmp_path / 'a.npz'


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
  path = places.local(where, opener=web)
  assert path.read_bytes() == CONTENT and path.is_relative_to(cache)
  assert places.local(where, opener=web) == path and web.asked == [address]
  assert files_in(cache) == [path.name]


def test_a_model_of_the_hub_becomes_a_folder_with_what_tells_of_it(cache: pathlib.Path) -> None:
  main = 'https://huggingface.co/google/vit-base-patch16-224/resolve/main/'
  web = Web({f'{main}config.json': b'{}', f'{main}model.safetensors': CONTENT})
  folder = places.local('hf://google/vit-base-patch16-224', opener=web)
  assert files_in(folder) == ['.whole', 'config.json', 'model.safetensors']
  asked = len(web.asked)
  assert places.local('google/vit-base-patch16-224', opener=web) == folder and len(web.asked) == asked
  old = Web({'https://huggingface.co/timm/vit_x/resolve/main/pytorch_model.bin': CONTENT})
  assert 'pytorch_model.bin' in files_in(places.local('timm/vit_x', opener=old))
  one = Web({'https://huggingface.co/a/b/resolve/main/sub.npz': b'1'})
  assert places.local('hf://a/b/sub.npz', opener=one).name == 'sub.npz'


def test_shards_are_fetched_by_their_index() -> None:
  main = 'https://huggingface.co/a/large/resolve/main/'
  index = json.dumps({'weight_map': {'x': 'model-1.safetensors', 'y': 'model-2.safetensors'}}).encode()
  web = Web({f'{main}model.safetensors.index.json': index, f'{main}model-1.safetensors': b'1',
             f'{main}model-2.safetensors': b'2'})
  found = places.weight_files(places.local('hf://a/large', opener=web))
  assert [p.name for p in found] == ['model-1.safetensors', 'model-2.safetensors']
  with pytest.raises(UserError, match='hf://a/none has none of model.safetensors, pytorch_model.bin'):
    places.local('hf://a/none', opener=Web({}))


@pytest.mark.parametrize(('address', 'headers', 'says'), [
    ('https://h/a.npz', {'Content-Length': '99999'}, '10,240 bytes came of 99,999'),
    ('https://h/a.npz', {'X-Linked-Etag': '"' + '0' * 64 + '"'}, 'its SHA-256 is '),
    ('https://h/a.npz', {'x-goog-hash': 'crc32c=AAAA, md5=' + base64.b64encode(b'0' * 16).decode()}, 'its MD5 is not'),
    ('https://h/deit_tiny-a1311bcf.pth', {}, 'its name says a1311bcf')])
def test_a_download_that_is_not_whole_or_another_is_not_kept(
    address: str, headers: dict[str, str], says: str, cache: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'was not fetched as it should be: .*{says}.*Nothing was kept'):
    places.local(address, opener=Web({address: CONTENT}, headers))
  assert files_in(cache) == []


def test_published_checksums_that_are_right_are_accepted() -> None:
  sha = hashlib.sha256(CONTENT).hexdigest()
  md5 = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
  address = f'https://h/net-{sha[:8]}.pth'
  web = Web({address: CONTENT}, {'X-Linked-Etag': f'"{sha}"', 'x-goog-hash': f'crc32c=AAAA,md5={md5}'})
  assert places.local(address, opener=web).read_bytes() == CONTENT


def test_what_no_server_knows_is_a_message(cache: pathlib.Path) -> None:
  for where, address in (('https://h/none.npz', 'https://h/none.npz'),
                         ('hf://a/b/none.npz', 'https://huggingface.co/a/b/resolve/main/none.npz')):
    with pytest.raises(UserError, match=f'{address} does not exist: its server knows no such file'):
      places.local(where, opener=Web({}))
  assert files_in(cache) == []


class Terminal(io.StringIO):
  """A standard error that a person looks at."""

  def isatty(self) -> bool:
    return True


def test_a_long_download_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
  large = bytes(11 << 20)
  clock = iter(range(100))
  monkeypatch.setattr(places, 'time', types.SimpleNamespace(monotonic=lambda: float(next(clock))))
  for screen, name, wanted in ((Terminal(), 'a.npz', f'\ra.npz [=={" " * 28}] 1 of 11 MiB\r'),
                               (io.StringIO(), 'b.npz', f'b.npz [{"=" * 30}] 11 of 11 MiB\n')):
    monkeypatch.setattr(places, 'sys', types.SimpleNamespace(stderr=screen))
    places.local(f'https://h/{name}', opener=Web({f'https://h/{name}': large}))
    assert wanted in screen.getvalue()
  assert screen.getvalue() == wanted  # a line every ten seconds


def test_a_damaged_index_of_shards_is_said(tmp_path: pathlib.Path) -> None:
  for content, says in (('{', 'is no index of shards'), ('{"weight_map": {"a": "../../key"}}', "names '../../key'")):
    (tmp_path / places.INDEX).write_text(content)
    with pytest.raises(UserError, match=says):
      places.weight_files(tmp_path)


def refusal(code: int, reason: str) -> urllib.error.HTTPError:
  return urllib.error.HTTPError('a', code, reason, {}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(('error', 'says'), [
    (urllib.error.URLError('no route'), 'cannot be fetched: no route; fetch it on a machine with a network'),
    (refusal(401, 'Unauthorized'), 'the server says 401 Unauthorized; fetch it with your account'),
    (refusal(500, 'Broken'), 'the server says 500 Broken')])
def test_what_a_server_or_the_network_says_is_passed_on(error: Exception, says: str, cache: pathlib.Path) -> None:
  def broken(address: str) -> None:
    raise error

  with pytest.raises(UserError, match=says):
    places.local('https://host/a.npz', opener=broken)
  assert files_in(cache) == []


def test_an_unknown_name_shows_the_nearest_ones() -> None:
  with pytest.raises(UserError, match=r"there is no file or folder 'ViT-B_16-i21', .* did you mean ViT-B_16-i21k or"):
    places.local('ViT-B_16-i21')
  with pytest.raises(UserError, match='hf://owner: want hf://OWNER/NAME'):
    places.local('hf://owner')


def test_a_folder_must_hold_one_model(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'notes.txt').write_text('x')
  with pytest.raises(UserError, match='holds no weights: notes.txt; want the path of one file'):
    places.weight_files(tmp_path)
  (tmp_path / 'a.npz').write_bytes(b'1')
  assert places.weight_files(tmp_path) == [tmp_path / 'a.npz']
  (tmp_path / 'b.npz').write_bytes(b'1')
  with pytest.raises(UserError, match='holds several weight files: a.npz, b.npz'):
    places.weight_files(tmp_path)


class Server(http.server.BaseHTTPRequestHandler):
  """Sends `CONTENT`, in two halves, or half of it."""

  def do_GET(self) -> None:
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
  assert places.local(f'{server}/net.npz').read_bytes() == CONTENT
  with pytest.raises(UserError, match='bytes came of 10,240|cannot be fetched'):
    places.local(f'{server}/half.npz')
  with pytest.raises(FileNotFoundError):
    places.fetch(f'{server}/missing.npz', cache / 'x')
  assert files_in(cache) == ['net.npz']


def test_the_checksum_of_a_hub_that_sends_one_elsewhere_is_compared(server: str, cache: pathlib.Path) -> None:
  assert places.local(f'{server}/hub/good.npz').read_bytes() == CONTENT
  with pytest.raises(UserError, match='its SHA-256 is .*, the server says 0000'):
    places.local(f'{server}/hub/bad.npz')
  assert files_in(cache) == ['good.npz']


def test_known_names_are_addresses_of_public_places() -> None:
  assert all(address.split('://')[0] in ('gs', 'https') for address in known.NAMES.values())
  assert known.address('vit.npz') == '' and known.address('ViT-L_16-sam') == 'gs://vit_models/sam/ViT-L_16.npz'
