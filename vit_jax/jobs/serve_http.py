"""The HTTP server of the live pages: a fixed set of pages and actions, and rules that refuse requests.

`serve.py` opens a socket with `listen`, makes a `Site` of pages and actions, and runs the server of `Site.server`.

No address is mapped to a path on the disk. Requests whose `Host` header does not name this server are refused (DNS
rebinding), and so are posts from the page of another site (cross-site request forgery). The length of a body is checked
before the body is read. Headers of every answer forbid the browser to load anything from another server.
"""
from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.core import documents, lazy
from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  import uvicorn
  from starlette import concurrency, requests, responses
  from starlette.types import Receive, Scope, Send
else:  # packages of an optional extra; `serve.run` checks that they are installed
  uvicorn, concurrency, requests, responses = map(lazy.Module, (
      'uvicorn', 'starlette.concurrency', 'starlette.requests', 'starlette.responses'))

log = logging.getLogger('vit_jax.jobs')
MAX_BYTES = 32 * 2**20  # size of the body of a request, an image file
MAX_ANSWERS = 32  # requests that are answered at the same time; a browser opens about six connections
BODY_TIMEOUT_S = 120.  # until the body of a request must be complete: 32 MiB at 2.2 Mbit/s
MARK = 'X-Vit-Jax'  # header that the script of the page sets; pages of other sites cannot set this header
SECURITY = {
    'Content-Security-Policy': "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
                               "style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer', 'Cache-Control': 'no-store',
    'Cross-Origin-Resource-Policy': 'same-origin', 'Server': 'vit_jax'}
LOOPBACK = ('localhost', '127.0.0.1', '::1')


class Refused(Exception):
  """Is raised to refuse a request, with the HTTP status of the answer and a sentence that the page shows."""

  def __init__(self, status: int, text: str) -> None:
    super().__init__(text)
    self.status = status


class Answer(NamedTuple):
  """The body of an answer and its content type."""
  body: bytes
  kind: str = 'text/html; charset=utf-8'


def listen(host: str, port: int) -> socket.socket:
  """Opens a listening socket; port 0 = any free port. Raises UserError if the address cannot be used."""
  try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
  except (OSError, UnicodeError) as error:  # UnicodeError: not the name of a host, such as `a..b`
    raise UserError(f'--host: expected a name or an address of this machine, got {host}. Set another, such as '
                    '--host=localhost.') from error
  try:
    return socket.create_server((host, port), family=family)
  except OSError as error:
    reason = str(error.strerror or error).partition(' (while')[0]
    raise UserError(f'--port={port}: expected a free port of {host}, got {reason}. Set another, such as --port=0 for '
                    'any free one.') from error


class Site:
  """Answers pages and actions by their exact address; an ASGI application.

  Args:
    listening: the socket that `listen` returned.
    host: the value of `--host`, which requests may use as the name of the server.
    pages: for each address, a function that returns the answer to a GET request.
    actions: for each address, a function from the body of a POST request to the JSON of the answer.
  """

  def __init__(self, listening: socket.socket, host: str, *, pages: Mapping[str, Callable[[], Answer]],
               actions: Mapping[str, Callable[[bytes], Mapping[str, Any]]]) -> None:
    self._pages, self._actions, self._num_answers = pages, actions, 0
    address, self.port = listening.getsockname()[:2]
    self.is_local = ipaddress.ip_address(address).is_loopback
    names = {host, *LOOPBACK} if self.is_local else {host, *LOOPBACK, socket.gethostname()}
    self._names = {name.lower() for name in names}  # `urlsplit` returns names in lower case
    url_host = socket.gethostname() if address in ('0.0.0.0', '::') else address  # these two mean all addresses
    self.url = f'http://{f"[{url_host}]" if ":" in url_host else url_host}:{self.port}/'

  def server(self) -> uvicorn.Server:
    """Returns the server; `run(sockets=[listening])` answers until Ctrl-C."""
    return uvicorn.Server(uvicorn.Config(
        self, loop='asyncio', http='h11', ws='none', lifespan='off', log_config=None, log_level='error',
        access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=1))

  def accepts(self, host: str) -> bool:
    """Returns whether a `Host` header names this server; a server that is not local accepts any IP address."""
    try:
      parsed = urllib.parse.urlsplit(f'//{host}')
      name, port = parsed.hostname or '', parsed.port or 80
      return port == self.port and (name in self._names or (not self.is_local and bool(ipaddress.ip_address(name))))
    except ValueError:  # the port is not a number, or the name is not an IP address
      return False

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    request = requests.Request(scope, receive)
    self._num_answers += 1  # needs no lock: only the thread of the event loop changes the number
    try:
      if self._num_answers > MAX_ANSWERS:
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f'{MAX_ANSWERS} requests are answered already. Try again.')
      answer, status = await self._page_or_action(request), 200
    except requests.ClientDisconnect:
      return
    except Refused as error:
      answer, status = _to_json({'error': str(error)}), error.status
    except Exception as error:  # from any library: the server continues, and the page shows the error
      log.exception('%s %s failed', request.method, request.url.path)
      answer, status = _to_json({'error': f'This is an error of the program: {type(error).__name__}: {error}. '
                                          'Its console shows more.'}), 500
    finally:
      self._num_answers -= 1
    headers = {**SECURITY, 'Content-Type': answer.kind}
    await responses.Response(answer.body, status, headers)(scope, receive, send)

  async def _page_or_action(self, request: requests.Request) -> Answer:
    """Runs the page or the action at the address of a request. Raises Refused for all other requests."""
    path, headers = request.scope['path'], request.headers
    if not self.accepts(headers.get('Host', '')):
      raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f'Open the page at {self.url}, not by another name.')
    if request.method in ('GET', 'HEAD') and path in self._pages:
      return await concurrency.run_in_threadpool(self._pages[path])
    if request.method == 'POST':
      is_same_origin = headers.get('Origin') in (None, f'http://{headers["Host"]}')
      is_same_site = headers.get('Sec-Fetch-Site', 'same-origin') in ('same-origin', 'none')
      if MARK not in headers or not is_same_origin or not is_same_site:
        raise Refused(HTTPStatus.FORBIDDEN,
                      f'Only the page of this server, or a program with the header {MARK}, may send images.')
      if path in self._actions:
        return _to_json(await concurrency.run_in_threadpool(self._actions[path], await _read_body(request)))
    elif request.method not in ('GET', 'HEAD'):
      raise Refused(HTTPStatus.NOT_IMPLEMENTED, f'Expected a GET or POST request, got {request.method}.')
    raise Refused(HTTPStatus.NOT_FOUND, 'There is no such page.')


async def _read_body(request: requests.Request) -> bytes:
  """Returns the body of a request. Raises Refused if it is too large, too slow or of unknown length."""
  length = request.headers.get('Content-Length', '')
  if not length.isdecimal():
    raise Refused(HTTPStatus.LENGTH_REQUIRED, 'The length of the image is missing.')
  if int(length) > MAX_BYTES:
    raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                  f'Expected a file of at most {MAX_BYTES / 2**20:.0f} MiB, got {int(length) / 2**20:,.1f} MiB.')
  try:
    async with asyncio.timeout(BODY_TIMEOUT_S):
      return await request.body()
  except TimeoutError:
    raise Refused(HTTPStatus.REQUEST_TIMEOUT, f'The image was not complete after {BODY_TIMEOUT_S:g} s.') from None


def _to_json(value: Mapping[str, Any]) -> Answer:
  text = json.dumps(documents.finite(value), ensure_ascii=False, allow_nan=False)
  return Answer(text.encode(errors='backslashreplace'), 'application/json')
