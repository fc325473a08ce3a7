"""The server of the live page answers its own page only, and only within limits."""
from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vit_jax.core.errors import UserError
from vit_jax.jobs import serve_http
from vit_jax.jobs.serve_http import MAX_BYTES, Answer, Refused, Site

MARK = {serve_http.MARK: '1'}


def count(body: bytes) -> dict[str, Any]:
  if body == b'bad':
    raise Refused(422, 'No.')
  if body == b'worse':
    raise ZeroDivisionError('by 0')
  return {'bytes': len(body)}


@contextlib.contextmanager
def running(host: str = '127.0.0.1', page: Callable[[], Answer] = lambda: Answer(b'<p>page')) -> Iterator[Site]:
  with serve_http.listen(host, 0) as listening:
    site = Site(listening, host, pages={'/': page}, actions={'/count': count})
    server = site.server()
    thread = threading.Thread(target=server.run, kwargs={'sockets': [listening]})
    thread.start()
    try:
      yield site
    finally:
      server.should_exit = True
      thread.join()


@pytest.fixture(scope='module')
def server() -> Iterator[Site]:
  with running() as found:
    yield found


def ask(server: Site, method: str, address: str, body: bytes | None = None,
        **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
  connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=10)
  connection.request(method, address, body, {name.replace('_', '-'): value for name, value in headers.items()})
  answer = connection.getresponse()
  return answer.status, answer.read(), answer.headers


def post(server: Site, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
  status, text, _ = ask(server, 'POST', '/count', body, **MARK, **headers)
  return status, json.loads(text)


def test_a_page_says_that_nothing_may_be_loaded_from_elsewhere(server: Site) -> None:
  status, body, headers = ask(server, 'GET', '/?x=1')
  assert (status, body, headers['Content-Type']) == (200, b'<p>page', 'text/html; charset=utf-8')
  policy = headers['Content-Security-Policy']
  assert "default-src 'none'" in policy and "script-src 'self'" in policy and 'http' not in policy
  assert headers['X-Content-Type-Options'] == 'nosniff' and 'Access-Control-Allow-Origin' not in headers
  assert 'Python' not in headers['Server'] and ask(server, 'HEAD', '/')[1] == b''


@pytest.mark.parametrize('address', [
    '/../etc/passwd', '/%2e%2e/etc/passwd', '//etc/passwd', '/etc/passwd', '/.', '/count', '/\\..\\x',
    'file:///etc/passwd'])
def test_addresses_are_no_paths(server: Site, address: str) -> None:
  status, body, _ = ask(server, 'GET', address)
  assert (status, json.loads(body)) == (404, {'error': 'There is no such page.'})


@pytest.mark.parametrize('host', [
    'evil.example', 'evil.example:{port}', '127.0.0.1', '127.0.0.1:1', '10.0.0.7:{port}', '', '[::1]',
    '127.0.0.1.evil.example:{port}', 'x@127.0.0.1:{port}:'])
def test_another_name_for_this_machine_is_refused(server: Site, host: str) -> None:
  status, body, _ = ask(server, 'GET', '/', Host=host.format(port=server.port))
  assert status == 421 and server.url in json.loads(body)['error']


@pytest.mark.parametrize('host', ['localhost', '127.0.0.1', '[::1]', 'LOCALHOST'])
def test_the_names_of_the_local_machine_are_answered(server: Site, host: str) -> None:
  assert ask(server, 'GET', '/', Host=f'{host}:{server.port}')[0] == 200


def test_a_server_for_others_is_known_by_its_addresses_and_the_name_of_the_machine() -> None:
  with running('0.0.0.0') as server:
    port = server.port
    assert not server.is_local
    assert server.accepts(f'10.0.0.7:{port}') and server.accepts(f'{socket.gethostname()}:{port}')
    assert not server.accepts(f'evil.example:{port}') and not server.accepts('10.0.0.7')


def test_a_name_of_the_machine_with_capitals_is_known_as_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(socket, 'gethostname', lambda: 'DESKTOP-Of.Ann')
  with running('0.0.0.0') as server:
    assert server.url == f'http://DESKTOP-Of.Ann:{server.port}/'
    assert all(server.accepts(f'{host}:{server.port}') for host in ('DESKTOP-Of.Ann', 'desktop-of.ann'))


@pytest.mark.parametrize('headers', [
    {'Origin': 'https://evil.example'}, {'Origin': 'null'}, {'Origin': 'http://127.0.0.1:1'},
    {'Sec_Fetch_Site': 'cross-site'}, {'Sec_Fetch_Site': 'same-site'}])
def test_a_post_of_another_site_is_refused(server: Site, headers: dict[str, str]) -> None:
  assert post(server, b'12345', **headers) == (
      403, {'error': 'Only the page of this server, or a program with the header X-Vit-Jax, may send images.'})


def test_a_post_without_the_mark_of_the_page_is_refused_and_no_other_site_is_allowed_to_set_it(server: Site) -> None:
  assert ask(server, 'POST', '/count', b'12345')[0] == 403
  status, _, headers = ask(server, 'OPTIONS', '/count', Origin='https://evil.example')
  assert status == 501 and not any(name.startswith('Access-Control') for name in headers)


def test_the_page_itself_may_post(server: Site) -> None:
  origin = f'http://127.0.0.1:{server.port}'
  assert post(server, b'12345', Origin=origin, Sec_Fetch_Site='same-origin') == (200, {'bytes': 5})
  assert ask(server, 'POST', '/other', b'1', **MARK)[0] == 404


@pytest.mark.parametrize(('length', 'status', 'said'), [
    (str(MAX_BYTES + 1), 413, 'at most 32 MiB, got 32.0 MiB'), ('9' * 20, 413, 'at most 32 MiB'), ('9' * 40, 400, ''),
    ('-1', 400, ''), ('1e3', 400, ''), (None, 411, 'length'), ('²', 400, '')])
def test_the_length_is_checked_before_a_byte_is_read(server: Site, length: str | None, status: int,
                                                     said: str) -> None:
  with socket.create_connection(('127.0.0.1', server.port), timeout=10) as client:
    line = '' if length is None else f'Content-Length: {length}\r\n'
    client.sendall(f'POST /count HTTP/1.1\r\nHost: localhost:{server.port}\r\nX-Vit-Jax: 1\r\n{line}\r\n'
                   .encode('latin-1', 'replace'))
    answer = client.makefile('rb').read().decode()
  assert f' {status} ' in answer.splitlines()[0] and said in answer


def test_an_image_that_does_not_arrive_is_refused_and_the_server_goes_on(
    server: Site, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(serve_http, 'BODY_TIMEOUT_S', .2)
  for is_closed in (True, False):
    with connect(server) as client:
      client.sendall(f'POST /count HTTP/1.1\r\nHost: localhost:{server.port}\r\nX-Vit-Jax: 1\r\n'
                     'Content-Length: 9\r\n\r\nabc'.encode())
      if not is_closed:
        assert b' 408 ' in client.recv(100)
  assert post(server, b'fine') == (200, {'bytes': 4})


def test_what_an_action_refuses_and_errors_of_the_program_reach_the_person(
    server: Site, caplog: pytest.LogCaptureFixture) -> None:
  assert post(server, b'bad') == (422, {'error': 'No.'})
  status, found = post(server, b'worse')
  assert status == 500 and 'ZeroDivisionError: by 0' in found['error'] and 'Traceback' in caplog.text
  assert post(server, b'fine')[0] == 200  # it goes on


def connect(server: Site) -> socket.socket:
  return socket.create_connection(('127.0.0.1', server.port), timeout=10)


def test_no_more_requests_are_answered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(serve_http, 'MAX_ANSWERS', 1)
  held, free = threading.Event(), threading.Event()

  def wait() -> Answer:
    held.set()
    free.wait(10)
    return Answer(b'late')

  with running(page=wait) as server:
    first = threading.Thread(target=ask, args=(server, 'GET', '/'))
    first.start()
    held.wait(10)
    status, body, _ = ask(server, 'GET', '/')
    assert status == 503 and 'Try again' in json.loads(body)['error']
    free.set()
    first.join()
    assert ask(server, 'GET', '/')[0] == 200


@pytest.mark.parametrize('line', ['GET', 'GET /', 'x' * 70_000, '\x00\x01', 'GET / HTTP/1.1'])
def test_what_is_not_http_is_refused(server: Site, line: str, caplog: pytest.LogCaptureFixture) -> None:
  with connect(server) as client:
    with contextlib.suppress(OSError):
      client.sendall(f'{line}\r\n\r\n'.encode())
    assert client.recv(100).startswith(b'HTTP/1.1 400 ')
  assert not caplog.text and ask(server, 'GET', '/')[0] == 200


@pytest.mark.parametrize('line', ['PUT / HTTP/1.1', 'OPTIONS /count HTTP/1.1', 'DELETE / HTTP/1.1', 'POST / HTTP/1.1',
                                  'GET / HTTP/1.1\r\nHost: evil', 'GET / HTTP/1.0', 'GET / HTTP/9.9',
                                  'GET /x HTTP/1.1'])
def test_every_error_has_the_headers_of_a_page(server: Site, line: str) -> None:
  with connect(server) as client:
    with contextlib.suppress(OSError):
      named = '' if 'Host' in line else f'\r\nHost: localhost:{server.port}' * line.endswith('1.1')
      client.sendall(f'{line}{named}\r\nConnection: close\r\n\r\n'.encode())
    answer = client.makefile('rb').read().decode()
  head, _, body = answer.partition('\r\n\r\n')
  assert head.split()[1][0] in '45' and 'error' in json.loads(body)
  for name, value in serve_http.SECURITY.items():
    assert f'{name.lower()}: {value}' in head.replace(name, name.lower())
  assert 'Access-Control' not in head and '<' not in body


@pytest.mark.parametrize('headers', [
    {'Host': 'evil.example:{port}'}, {'Host': 'evil.example'}, {'Origin': 'http://evil.example'},
    {'Origin': 'http://evil.example:{port}'}, {'Origin': 'null'}, {'Sec_Fetch_Site': 'cross-site'},
    {'Host': 'evil.example:{port}', 'Origin': 'http://evil.example:{port}'}])
def test_a_server_for_all_networks_refuses_other_names_and_sites_too(headers: dict[str, str]) -> None:
  """As a browser sends them for a name that its owner lets point here, and for a page of another site."""
  with running('0.0.0.0') as server:
    port = server.port
    found = {name: value.format(port=port) for name, value in headers.items()}
    assert ask(server, 'POST', '/count', b'1', **MARK, **found)[0] in (403, 421)
    assert post(server, b'1', Host=f'127.0.0.1:{port}', Origin=f'http://127.0.0.1:{port}')[0] == 200


def test_a_port_in_use_is_named_with_what_to_do() -> None:
  with running() as server, pytest.raises(UserError, match=(
      rf'--port={server.port}: expected a free port of 127.0.0.1, got .*in use. Set another, such as --port=0')):
    serve_http.listen('127.0.0.1', server.port)


def test_an_address_that_this_machine_does_not_have_is_an_error() -> None:
  with pytest.raises(UserError, match='--port=0: expected a free port of 192.0.2.1'):
    serve_http.listen('192.0.2.1', 0)


@pytest.mark.parametrize('host', ['my..host', '.local', 'a' * 64], ids=['dots', 'begin', 'long'])
def test_what_no_host_can_be_called_is_an_error(host: str) -> None:
  with pytest.raises(UserError, match=f'--host: expected a name or an address of this machine, got {host}. Set'):
    serve_http.listen(host, 0)
