"""The HTTP server of the live page: a fixed set of pages and actions, and what it refuses.

No address is turned into a path of the disk. A page is answered to this machine's own browser only: requests whose
`Host` is another name are refused (DNS rebinding), and so are posts that another site's page has sent (cross-site
request forgery). Bodies need a length, which is checked before they are read. Nothing is loaded from another server,
which the content security policy of every answer also says to the browser.
"""
from __future__ import annotations

import http.server
import ipaddress
import json
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from vit_jax.core import json_text
from vit_jax.core.errors import UserError

log = logging.getLogger('vit_jax.jobs')
MAX_BYTES = 32 * 2**20  # of a posted image
MAX_CONNECTIONS = 32  # at the same time; a browser opens about six
TIMEOUT_S = 30.  # without a byte from the client
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
    self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
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
    if not self._slots.acquire(blocking=False):
      self.shutdown_request(request)
      return
    super().process_request(request, client_address)

  def process_request_thread(self, request: Any, client_address: Any) -> None:
    try:
      super().process_request_thread(request, client_address)
    finally:
      self._slots.release()

  def handle_error(self, request: Any, client_address: Any) -> None:
    log.debug('a connection of the live page ended early', exc_info=True)


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers one request."""
  server: Server
  timeout = TIMEOUT_S
  server_version, sys_version = 'vit_jax', ''

  def do_GET(self) -> None:
    self._reply(self._get)

  def do_HEAD(self) -> None:
    self._reply(self._get)

  def do_POST(self) -> None:
    self._reply(self._post)

  def _reply(self, make: Callable[[], Answer]) -> None:
    try:
      self._check_host()
      self._send(HTTPStatus.OK, make())
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

  def _get(self) -> Answer:
    page = self.server.pages.get(self.path.partition('?')[0])
    if page is None:
      raise Refused(HTTPStatus.NOT_FOUND, 'There is no such page.')
    return page()

  def _post(self) -> Answer:
    self._check_origin()
    action = self.server.actions.get(self.path)
    if action is None:
      raise Refused(HTTPStatus.NOT_FOUND, 'There is no such action.')
    return _to_json(action(self._read()))

  def _check_origin(self) -> None:
    origin, site = self.headers.get('Origin'), self.headers.get('Sec-Fetch-Site', 'same-origin')
    own = origin is None or origin == f'http://{self.headers.get("Host")}'
    if not own or site not in ('same-origin', 'none') or self.headers.get(MARK) is None:
      raise Refused(HTTPStatus.FORBIDDEN, 'Only the page of this server may send images.')

  def _read(self) -> bytes:
    text = self.headers.get('Content-Length', '')
    if not text.isdecimal():  # of Latin-1, as headers are
      raise Refused(HTTPStatus.LENGTH_REQUIRED, 'The length of the image is missing.')
    if len(text) > 15 or int(text) > MAX_BYTES:
      self.close_connection = True
      raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f'Expected a file of at most {MAX_BYTES / 2**20:.0f} MiB, got {int(text[:15]) / 2**20:,.1f} MiB.')
    body = self.rfile.read(int(text))
    if len(body) < int(text):
      raise Refused(HTTPStatus.BAD_REQUEST, 'The image is incomplete.')
    return body

  def _send(self, status: int, answer: Answer) -> None:
    self.send_response(status)
    for name, value in {**SECURITY, 'Content-Type': answer.kind, 'Content-Length': str(len(answer.body))}.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(answer.body)

  def log_message(self, format: str, *args: object) -> None:
    log.debug(format, *args)


def _to_json(value: Mapping[str, Any]) -> Answer:
  return Answer(json.dumps(json_text.finite(value), ensure_ascii=False, allow_nan=False).encode(), 'application/json')


def _is_address(host: str) -> bool:
  try:
    ipaddress.ip_address(host)
  except ValueError:
    return False
  return True


def _is_loopback(host: str) -> bool:
  return host == 'localhost' or _is_address(host) and ipaddress.ip_address(host).is_loopback
