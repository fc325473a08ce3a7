"""The HTTP server of the live page: a fixed set of pages and actions, and what it refuses.

No address is turned into a path of the disk. A page is answered to this machine's own browser only: requests whose
`Host` is another name are refused (DNS rebinding), and so are posts that another site's page has sent (cross-site
request forgery). Bodies need a length, which is checked before they are read. Nothing is loaded from another server,
which the content security policy of every answer also says to the browser.

A request must be complete within a time, however its bytes arrive. Incomplete ones take no place among those that are
answered: there may be a few, and a further one closes the oldest.
"""
from __future__ import annotations

import contextlib
import http.server
import io
import ipaddress
import json
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from vit_jax.core import json_text
from vit_jax.core.errors import UserError

log = logging.getLogger('vit_jax.jobs')
MAX_BYTES = 32 * 2**20  # of a posted image
MAX_ANSWERS = 32  # at the same time; a browser opens about six connections
MAX_INCOMPLETE = 32  # requests whose header or body is still arriving
HEADER_S = 10.  # until the header of a request is complete
BODY_S = 120.  # until the body is complete too: 32 MiB at 2.2 Mbit/s
ANSWER_S = 60.  # to send an answer
MARK = 'X-Vit-Jax'  # header that our script sets; another site's page cannot without asking, which is not answered
SECURITY = {
    'Content-Security-Policy': "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
                               "style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer', 'Cache-Control': 'no-store',
    'Cross-Origin-Resource-Policy': 'same-origin'}
LOOPBACK = ('localhost', '127.0.0.1', '::1')


class Refused(Exception):
  """A request that is not answered: the HTTP status and a sentence for the person."""

  def __init__(self, status: int, text: str) -> None:
    super().__init__(text)
    self.status = status


class Answer(NamedTuple):
  """The body of an answer and its content type."""
  body: bytes
  kind: str = 'text/html; charset=utf-8'


Page = Callable[[], Answer]
Action = Callable[[bytes], Mapping[str, Any]]
"""Takes the body of a post, and returns what is sent as JSON; may raise `Refused`."""


class Server(http.server.ThreadingHTTPServer):
  """Serves pages and actions by their exact address, each request in its own thread.

  Args:
    host, port: to listen on; port 0 = any free one.
    pages: of GET requests, by address.
    actions: of POST requests, by address.

  Raises:
    UserError: the address cannot be used.
  """
  daemon_threads = True
  allow_reuse_address = True

  def __init__(self, host: str, port: int, *, pages: Mapping[str, Page], actions: Mapping[str, Action]) -> None:
    self.pages, self.actions = pages, actions
    self._slots = threading.BoundedSemaphore(MAX_ANSWERS)
    self._incomplete: dict[socket.socket, None] = {}  # in the order of their arrival
    self._lock = threading.Lock()
    try:
      self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
      super().__init__((host, port), Handler)
    except OSError as error:
      raise UserError(f'--port={port}: expected a free port of {host}, got {error.strerror or error}. Set another, '
                      'such as --port=0 for any free one.') from error
    self._names = {host, *LOOPBACK, socket.gethostname()} if not _is_loopback(host) else {host, *LOOPBACK}

  @property
  def url(self) -> str:
    host = str(self.server_address[0])
    shown = {'0.0.0.0': socket.gethostname(), '::': socket.gethostname()}.get(host, host)
    return f'http://{f"[{shown}]" if ":" in shown else shown}:{self.server_port}/'

  @property
  def is_local(self) -> bool:
    """Whether only this machine can reach the server."""
    return _is_loopback(str(self.server_address[0]))

  def knows(self, host: str) -> bool:
    """Returns whether a `Host` header names this server: no other name, which its owner could let point here."""
    try:
      parsed = urllib.parse.urlsplit(f'//{host}')
      name, port = parsed.hostname or '', parsed.port or 80
    except ValueError:
      return False
    is_address = not self.is_local and _is_address(name)
    return port == self.server_port and (name in self._names or is_address)

  def process_request(self, request: Any, client_address: Any) -> None:
    with self._lock:
      oldest = next(iter(self._incomplete)) if len(self._incomplete) >= MAX_INCOMPLETE else None
      if oldest is not None:
        del self._incomplete[oldest]
      self._incomplete[request] = None
    if oldest is not None:
      with contextlib.suppress(OSError):  # it ended meanwhile
        oldest.shutdown(socket.SHUT_RDWR)  # its thread, which waits for bytes, ends
    super().process_request(request, client_address)

  def process_request_thread(self, request: Any, client_address: Any) -> None:
    try:
      super().process_request_thread(request, client_address)
    finally:
      self.complete(request)

  def complete(self, request: socket.socket) -> None:
    """Notes that no more bytes of a request are expected."""
    with self._lock:
      self._incomplete.pop(request, None)

  @contextlib.contextmanager
  def answering(self, request: socket.socket) -> Iterator[None]:
    """Takes a place among the requests that are answered. Raises Refused if all are taken."""
    self.complete(request)
    if not self._slots.acquire(blocking=False):
      raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f'{MAX_ANSWERS} requests are answered already. Try again.')
    try:
      yield
    finally:
      self._slots.release()

  def handle_error(self, request: Any, client_address: Any) -> None:
    log.debug('a connection of the live page ended early', exc_info=True)


class _Arriving(io.RawIOBase):
  """The bytes of a connection until a deadline on the clock `time.monotonic`, however slowly they arrive."""

  def __init__(self, connection: socket.socket, until_s: float) -> None:
    self._connection, self.until_s = connection, until_s

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    left_s = self.until_s - time.monotonic()
    if left_s <= 0:
      raise TimeoutError('the request took too long')
    self._connection.settimeout(left_s)
    return self._connection.recv_into(buffer)


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers one request."""
  server: Server
  server_version, sys_version = 'vit_jax', ''

  def setup(self) -> None:
    super().setup()
    self._arriving = _Arriving(self.connection, time.monotonic() + HEADER_S)
    self.rfile.close()
    self.rfile = io.BufferedReader(self._arriving)

  def do_GET(self) -> None:
    self._reply(self._get)

  def do_HEAD(self) -> None:
    self._reply(self._get)

  def do_POST(self) -> None:
    self._reply(self._post)

  def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
    """Answers a request that is not HTTP, or has another method, as any other that is refused."""
    self.close_connection = True
    self.request_version = 'HTTP/1.0'  # an answer to an older version would have no headers
    phrase = HTTPStatus(code).phrase
    self._send(code, _to_json({'error': f'{phrase}: expected a GET or POST request of HTTP/1.'}))

  def _reply(self, make: Callable[[], Callable[[], Answer]]) -> None:
    if self.request_version == 'HTTP/0.9':
      self.send_error(HTTPStatus.BAD_REQUEST)
      return
    try:
      self._check_host()
      answer = make()
      with self.server.answering(self.connection):
        self._send(HTTPStatus.OK, answer())
    except Refused as error:
      self._send(error.status, _to_json({'error': str(error)}))
    except OSError:
      raise  # the connection ended
    except Exception as error:  # of any library: the server goes on, and the page shows the error
      log.exception('%s %s failed', self.command, self.path)
      self._send(HTTPStatus.INTERNAL_SERVER_ERROR, _to_json(
          {'error': f'This is an error of the program: {type(error).__name__}: {error}. Its console shows more.'}))

  def _check_host(self) -> None:
    if not self.server.knows(self.headers.get('Host', '')):
      raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f'Open the page at {self.server.url}, not by another name.')

  def _get(self) -> Callable[[], Answer]:
    """Returns what makes the answer."""
    page = self.server.pages.get(self.path.partition('?')[0])
    if page is None:
      raise Refused(HTTPStatus.NOT_FOUND, 'There is no such page.')
    return page

  def _post(self) -> Callable[[], Answer]:
    """Reads the body, and returns what makes the answer."""
    self._check_origin()
    action = self.server.actions.get(self.path)
    if action is None:
      raise Refused(HTTPStatus.NOT_FOUND, 'There is no such action.')
    body = self._read()
    return lambda: _to_json(action(body))

  def _check_origin(self) -> None:
    origin, site = self.headers.get('Origin'), self.headers.get('Sec-Fetch-Site', 'same-origin')
    own = origin is None or origin == f'http://{self.headers.get("Host")}'
    if not own or site not in ('same-origin', 'none') or self.headers.get(MARK) is None:
      raise Refused(HTTPStatus.FORBIDDEN,
                    f'Only the page of this server, or a program with the header {MARK}, may send images.')

  def _read(self) -> bytes:
    text = self.headers.get('Content-Length', '')
    if not text.isdecimal():  # of Latin-1, as headers are
      raise Refused(HTTPStatus.LENGTH_REQUIRED, 'The length of the image is missing.')
    if len(text) > 15 or int(text) > MAX_BYTES:
      self.close_connection = True
      raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f'Expected a file of at most {MAX_BYTES / 2**20:.0f} MiB, got {int(text[:15]) / 2**20:,.1f} MiB.')
    self._arriving.until_s = time.monotonic() + BODY_S
    body = self.rfile.read(int(text))
    if len(body) < int(text):
      raise Refused(HTTPStatus.BAD_REQUEST, 'The image is incomplete.')
    return body

  def _send(self, status: int, answer: Answer) -> None:
    self.connection.settimeout(ANSWER_S)
    self.send_response(status)
    for name, value in {**SECURITY, 'Content-Type': answer.kind, 'Content-Length': str(len(answer.body))}.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(answer.body)

  def log_message(self, format: str, *args: object) -> None:
    log.debug(format, *args)


def _to_json(value: Mapping[str, Any]) -> Answer:
  text = json.dumps(json_text.finite(value), ensure_ascii=False, allow_nan=False)
  return Answer(text.encode(errors='backslashreplace'), 'application/json')


def _is_address(host: str) -> bool:
  try:
    ipaddress.ip_address(host)
  except ValueError:
    return False
  return True


def _is_loopback(host: str) -> bool:
  return host == 'localhost' or _is_address(host) and ipaddress.ip_address(host).is_loopback
