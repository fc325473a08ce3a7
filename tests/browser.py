"""Chromium without a window, for tests of pages: real clicks, files, screen sizes and color schemes.

It is driven by the DevTools protocol over two pipes, which needs no package and no port.
"""
from __future__ import annotations

import base64
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

# What the protocol answers if the page that was asked gives way to the next one meanwhile.
BETWEEN_PAGES = ('Inspected target navigated or closed', 'Cannot find context with specified id',
                 'Execution context was destroyed.', 'Cannot find default execution context')
NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
# Chromium reads commands from file descriptor 3 and answers on 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = ('--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--remote-debugging-pipe', 'about:blank')


def find() -> str | None:
  """Returns the path of Chromium; None if it is not installed."""
  return next((path for name in NAMES if (path := shutil.which(name))), None)


class ProtocolError(AssertionError):
  """An answer of the browser that is an error; `message` is its own text."""

  def __init__(self, message: str, shown: str) -> None:
    super().__init__(shown)
    self.message = message


class Page:
  """A page in a browser of its own, as a context manager.

  Args:
    folder: for the browser's profile, new.
    timeout_s: for whatever is waited for.
  """

  def __init__(self, folder: pathlib.Path, *, timeout_s: float = 60.) -> None:
    command, self._timeout_s, self._number = find(), timeout_s, 0
    assert command is not None
    theirs, self._write = os.pipe()
    self._read, answers = os.pipe()
    self._process = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, str(theirs), str(answers), command, f'--user-data-dir={folder}', *FLAGS],
        pass_fds=(theirs, answers), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(theirs)
    os.close(answers)
    self._pending, self.events, self._session = b'', [], ''
    self.requests: list[str] = []
    target = next(t for t in self.call('Target.getTargets')['targetInfos'] if t['type'] == 'page')
    self._session = self.call('Target.attachToTarget', targetId=target['targetId'], flatten=True)['sessionId']
    for domain in ('Page', 'Runtime', 'DOM', 'Network', 'Log'):
      self.call(f'{domain}.enable')
    self.call('Page.setInterceptFileChooserDialog', enabled=True)

  def __enter__(self) -> Page:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    os.close(self._read)
    os.close(self._write)

  def call(self, method: str, **params: Any) -> dict[str, Any]:
    """Sends a command of the protocol and returns its result."""
    self._number += 1
    message = {'id': self._number, 'method': method, 'params': params}
    message |= {'sessionId': self._session} if self._session else {}
    os.write(self._write, json.dumps(message).encode() + b'\0')
    while (answer := self._next()).get('id') != self._number:
      self._note(answer)
    if 'error' in answer:
      raise ProtocolError(answer['error']['message'], f'{method}: {answer["error"]}')
    return answer['result']

  def _next(self) -> dict[str, Any]:
    while b'\0' not in self._pending:
      found = os.read(self._read, 2**20)
      assert found, 'the browser has ended'
      self._pending += found
    message, _, self._pending = self._pending.partition(b'\0')
    return json.loads(message)

  def _note(self, event: dict[str, Any]) -> None:
    self.events.append(event)
    if event.get('method') == 'Network.requestWillBeSent':
      self.requests.append(event['params']['request']['url'])

  def show(self, *, width: int, height: int = 900, dark: bool) -> None:
    """Sets the size of the screen, in px, and the color scheme that the person prefers."""
    self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
    self.call('Emulation.setEmulatedMedia', features=[
        {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}])

  def open(self, url: str) -> None:
    self.call('Page.navigate', url=url)
    self.wait('document.readyState === "complete"')

  def run(self, script: str) -> Any:
    """Returns the value of a JavaScript expression."""
    found = self.call('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
    assert 'exceptionDetails' not in found, found['exceptionDetails']
    return found['result'].get('value')

  def wait(self, script: str) -> None:
    """Waits until a page is complete and an expression true, such as an element that exists, also on the next page.

    Before a page is complete, its scripts may not have run: what is clicked or chosen would be lost.
    """
    until = time.monotonic() + self._timeout_s
    while not self._is_true(script):
      assert time.monotonic() < until, f'{script}: still false. The page: {self.run("document.body.innerText")}'
      time.sleep(.05)

  def _is_true(self, script: str) -> bool:
    try:
      return bool(self.run(f'Boolean(document.readyState === "complete" && ({script}))'))
    except ProtocolError as error:
      if error.message in BETWEEN_PAGES:
        return False
      raise

  def click(self, selector: str) -> None:
    """Moves the mouse to the middle of an element, which must be on top there, and clicks."""
    x, y = self._middle(selector)
    for kind in ('mousePressed', 'mouseReleased'):
      self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

  def choose(self, selector: str, paths: Sequence[pathlib.Path]) -> None:
    """Clicks what opens the dialog for files, and chooses some."""
    self.click(selector)
    until = time.monotonic() + self._timeout_s
    while not (opened := self._taken('Page.fileChooserOpened')):
      assert time.monotonic() < until, f'{selector} opened no dialog for files'
      self.run('true')
    self.call('DOM.setFileInputFiles', files=list(map(str, paths)), backendNodeId=opened[0]['backendNodeId'])

  def drop(self, selector: str, paths: Iterable[pathlib.Path]) -> None:
    """Drags files over an element and drops them."""
    x, y = self._middle(selector)
    data = {'items': [], 'files': list(map(str, paths)), 'dragOperationsMask': 1}
    for kind in ('dragEnter', 'dragOver', 'drop'):
      self.call('Input.dispatchDragEvent', type=kind, x=x, y=y, data=data)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a PNG of the whole page."""
    size = self.call('Page.getLayoutMetrics')['cssContentSize']
    clip = {'x': 0, 'y': 0, 'width': size['width'], 'height': size['height'], 'scale': 1}
    found = self.call('Page.captureScreenshot', format='png', captureBeyondViewport=True, clip=clip)
    pathlib.Path(path).write_bytes(base64.b64decode(found['data']))

  def errors(self) -> list[str]:
    """What the browser has logged as errors: of scripts, of refused content, of missing files."""
    self.run('true')
    return [json.dumps(event['params']) for event in self.events
            if event['method'] == 'Runtime.exceptionThrown'
            or event['method'] == 'Log.entryAdded' and event['params']['entry']['level'] == 'error']

  def _taken(self, method: str) -> list[dict[str, Any]]:
    found = [event['params'] for event in self.events if event.get('method') == method]
    self.events = [event for event in self.events if event.get('method') != method]
    return found

  def _middle(self, selector: str) -> tuple[float, float]:
    name = json.dumps(selector)
    box = self.run(f"""(e => {{
        e.scrollIntoView({{block: 'center'}});
        const box = e.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
        const top = document.elementFromPoint(x, y);
        return [x, y, top === e || e.contains(top)];
      }})(document.querySelector({name}))""")
    assert box[2], f'{selector} is covered by something else'
    return box[0], box[1]
