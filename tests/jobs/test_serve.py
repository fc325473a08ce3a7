"""The live page: its pages, in a browser with real clicks; images, their limits, turns and newer weights; a folder."""
from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import browser
import loaded
import numpy as np
import pytest
import runs
import saved
from PIL import Image

from vit_jax import main
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.image import headers
from vit_jax.inspect.model import Guess, Model
from vit_jax.jobs import serve
from vit_jax.jobs.serve import Folder, Network
from vit_jax.jobs.serve_http import Answer, Refused
from vit_jax.record import storage


def write_run(workdir: pathlib.Path) -> pathlib.Path:
  workdir.mkdir()
  (workdir / 'config.json').write_text('{"name": "mine"}')
  (workdir / 'metrics.jsonl').write_text('{"step": 1, "time_s": 1.0, "train/loss": 2.5}\n')
  return workdir


def pages_of(workdir: pathlib.Path) -> dict[str, Callable[[], Answer]]:
  return serve.Pages(storage.open_path(workdir), None, title='mine').by_address()


@pytest.mark.parametrize(('words', 'said'), [
    ([], '--weights: expected either --weights or --workdir, got none'),
    (['--weights=a', '--workdir=b'], 'got both'),
    (['--weights=a', 'x', 'y'], 'folder: expected at most one folder of images, got 2'),
    (['--weights=a', '--port=65536'], '--port: expected a whole number, 0 to 65,535'),
    (['--workdir=/nowhere'], '--workdir=/nowhere: expected the directory of a run')])
def test_arguments_that_do_not_fit_are_named(words: list[str], said: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['serve', *words]) == 2
  assert said in capsys.readouterr().err


def test_the_report_is_drawn_again_when_the_run_has_grown_and_the_run_stays_as_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  workdir = write_run(tmp_path / 'run')
  drawn = []
  to_html = serve.report.to_html
  monkeypatch.setattr(serve.report, 'to_html', lambda *args, **named: drawn.append(1) or to_html(*args, **named))
  pages, before = pages_of(workdir), saved.snapshot(workdir)
  first, state = pages['/report']().body, pages['/state']().body
  assert b'train/loss <b>2.5</b>' in first and b'aria-current="page">Report' in first
  assert pages['/']().body == first and pages['/state']().body == state and len(drawn) == 1
  assert saved.snapshot(workdir) == before
  with open(workdir / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "time_s": 2.0, "train/loss": 1.25}\n')
  assert pages['/state']().body != state and b'train/loss <b>1.25</b>' in pages['/report']().body and len(drawn) == 2


def test_pages_load_only_the_script_of_this_server(tmp_path: pathlib.Path) -> None:
  pages = pages_of(write_run(tmp_path / 'run'))
  for name in ('/live.js', '/sort.js'):
    script = pages[name]()
    assert script.kind.startswith('text/javascript') and b'http' not in script.body and b'innerHTML' not in script.body
  for address in ('/report', '/images'):
    body = pages[address]().body.decode()
    assert '<script src="/live.js" defer>' in body and body.count('<script src="/') == body.count('<script') == 2
    assert 'http' not in body


@pytest.mark.parametrize('package', ['starlette', 'uvicorn'])
def test_a_missing_package_is_named_with_the_command(package: str, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setitem(sys.modules, package, None)
  assert main.run(['serve', '--weights=a']) == 2
  assert f'vit-jax serve: expected the Python package {package}, got' in (said := capsys.readouterr().err)
  assert 'Run: pip install' in said


@pytest.fixture(scope='module')
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp('runs') / 'a'
  runs.finish(runs.start(workdir, '--config.length=6 steps', '--config.checkpoints.every=2 steps'))
  return workdir


@pytest.fixture(scope='module')
def images(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  from sklearn.datasets import load_digits

  root, digits = tmp_path_factory.mktemp('digits'), load_digits()
  for i in range(20):
    path = root / str(digits.target[i]) / f'{i}.png'
    path.parent.mkdir(exist_ok=True)
    Image.fromarray((15 * digits.images[i]).astype('uint8')).resize((32, 32)).save(path)
  return root


@contextlib.contextmanager
def serving(*words: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
  """Yields the process and the address of its page."""
  process = subprocess.Popen([sys.executable, '-m', 'vit_jax.main', 'serve', '--port=0', *map(str, words)],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=runs.environment())
  try:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith('Open http://127.0.0.1:'), line + process.communicate()[1]
    yield process, line.split()[1].rstrip('/')
  finally:
    process.kill()
    process.communicate()


@pytest.mark.slow(reason='about 15 s: a run, and a server in a process of its own')
def test_a_server_reads_the_run_only_and_ends_with_ctrl_c(workdir: pathlib.Path, images: pathlib.Path) -> None:
  before = saved.snapshot(workdir)
  with serving(f'--workdir={workdir}') as (process, url):
    connection = http.client.HTTPConnection(url.removeprefix('http://'), timeout=120)
    connection.request('POST', '/classify', next(images.glob('3/*.png')).read_bytes(), {'X-Vit-Jax': '1'})
    found = json.loads(connection.getresponse().read())
    assert len(found['classes']) == 5 and found['has_attention']
    connection.request('GET', '/report')
    assert b'finished at step 6' in connection.getresponse().read()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and 'Traceback' not in error
  assert saved.snapshot(workdir) == before


@pytest.mark.slow(reason='about 40 s: a run, a server and a browser')
@pytest.mark.skipif(browser.find() is None, reason='needs Chromium, which is not installed')
def test_in_a_browser_images_are_classified_and_their_attention_opens(
    workdir: pathlib.Path, images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """At the widths of a phone and of a desktop, with light and dark colors, by clicks and by dropping files."""
  shots = os.environ.get('VIT_JAX_SCREENSHOTS')
  (tmp_path / 'note.png').write_text('no image')
  with serving(f'--workdir={workdir}', images) as (process, url), browser.Page(tmp_path / 'profile') as page:
    for width in (390, 1280):
      for dark in (False, True):
        page.show(width=width, dark=dark)
        page.open(f'{url}/')
        page.wait('document.querySelectorAll("svg.chart").length >= 4')
        page.click('nav a[href="/images"]')
        page.wait('document.getElementById("drop")')
        page.choose('#drop', [next(images.glob('3/*.png'))])
        page.wait('document.querySelectorAll(".guesses li").length === 5')
        names = page.run('[...document.querySelectorAll(".guesses span")].map(e => e.textContent)')
        assert set(names) < set('0123456789')
        assert page.run('document.querySelector(".guesses b").textContent').endswith(' %')
        page.click('.attention')
        page.wait('document.querySelectorAll(".maps img").length === 2')
        page.wait('[...document.images].every(one => one.complete && one.naturalWidth === 16)')
        page.drop('#drop', [tmp_path / 'note.png'])
        page.wait('document.querySelector(".card .wrong")')
        assert 'got another kind of file' in page.run('document.querySelector(".card .wrong").textContent')
        check_look(page, width, dark)
        page.click('nav a[href="/folder"]')
        page.wait('document.querySelectorAll(".mistakes tbody tr").length > 0 && !document.querySelector("progress")')
        check_look(page, width, dark)
        if shots:
          page.save(pathlib.Path(shots) / f'folder-{width}-{"dark" if dark else "light"}.png')
    assert all(one.startswith((url, 'data:', 'about:', 'blob:')) for one in page.requests)
    assert [one for one in page.errors() if '/classify' not in one] == []  # the refused file is one
    process.kill()
    page.wait('getComputedStyle(document.getElementById("lost")).display === "block"')


@pytest.mark.slow(reason='about 25 s: a run, a server and a browser')
@pytest.mark.skipif(browser.find() is None, reason='needs Chromium, which is not installed')
def test_in_a_browser_the_report_grows_with_the_run_and_what_is_unfolded_stays_so(
    workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
  grown = pathlib.Path(shutil.copytree(workdir, tmp_path / 'run'))
  with serving(f'--workdir={grown}') as (_, url), browser.Page(tmp_path / 'profile') as page:
    page.show(width=390, dark=False)
    page.open(f'{url}/report')
    assert 'train/loss 0.125' not in page.run('document.body.innerText')
    assert page.run('document.querySelector("details[open]") !== null')  # mistakes of a class
    page.click('details:not([open]) > summary')
    unfolded = page.run('[...document.querySelectorAll("details")].map(one => one.open).join()')
    page.click('details[open] > summary')
    folded = page.run('[...document.querySelectorAll("details")].map(one => one.open).join()')
    assert unfolded != folded
    page.run('window.same = document.documentElement')
    with open(grown / 'metrics.jsonl', 'a') as file:
      file.write('{"step": 7, "time_s": 9999.0, "train/loss": 0.125}\n')
    page.wait('document.body.innerText.includes("train/loss 0.125")')
    assert page.run('[...document.querySelectorAll("details")].map(one => one.open).join()') == folded
    assert page.run('window.same === document.documentElement')
    assert page.errors() == []


def check_look(page: browser.Page, width: int, dark: bool) -> None:
  """Nothing is wider than the screen, and colors are those of the scheme."""
  assert page.run('document.documentElement.scrollWidth') <= width
  red = page.run('getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]')
  assert (int(red) < 60) == dark


def png(color: int = 0, side: int = 6) -> bytes:
  buffer = io.BytesIO()
  Image.fromarray(np.full((side, side, 3), color, np.uint8)).save(buffer, 'png')
  return buffer.getvalue()


class Fake:
  """A network of three classes; the color of an image is the predicted one."""
  class_names = ('cat', 'dog', 'owl')
  num_layers = 0
  decoding = headers.DecodeOptions(upright=True)

  def __init__(self, num_classes: int = 3) -> None:
    self.weights = types.SimpleNamespace(num_classes=num_classes, source='fake')

  def prepare(self, image: np.ndarray) -> np.ndarray:
    return image

  def logits(self, images: Sequence[np.ndarray], *, prepared: bool) -> np.ndarray:
    assert prepared
    return np.stack([np.eye(3)[image[0, 0, 0]] for image in images])

  def rank(self, logits: np.ndarray, *, top: int) -> list[Guess]:
    return [Guess(int(i), self.class_names[i], float(logits[i])) for i in np.argsort(-logits, kind='stable')[:top]]

  def find_class(self, name: str) -> int:
    if name not in self.class_names:
      raise UserError('no')
    return self.class_names.index(name)


def network(load: Callable[[], Any] = Fake, newest: Callable[[], object] = lambda: 1) -> Network:
  return Network(load, newest)  # type: ignore[arg-type]


def refusal(action: Callable[[], object]) -> tuple[int, str]:
  with pytest.raises(Refused) as caught:
    action()
  return int(caught.value.status), str(caught.value)


@pytest.mark.parametrize('content', [b'', b'hello', b'<svg xmlns="http://www.w3.org/2000/svg"/>', b'%PDF-1.4', b'MZ'])
def test_only_files_that_begin_as_images_are_decoded(content: bytes) -> None:
  assert refusal(lambda: network().classify(content)) == (415, (
      'Expected a JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, JPEG 2000 or PPM file, got another kind of file.'))


def test_formats_that_are_not_supported_are_named() -> None:
  assert refusal(lambda: serve.decode(b'\0\0\0\x18ftypheic' + bytes(12)))[1].endswith('got HEIC.')


def test_an_image_with_too_many_pixels_is_refused_by_its_header() -> None:
  def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))
  bomb = b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 8001, 8000, 8, 2, 0, 0, 0)) + chunk(
      b'IDAT', zlib.compress(bytes(10))) + chunk(b'IEND', b'')
  status, said = refusal(lambda: serve.decode(bomb))
  assert status == 422 and 'at most 64,000,000 pixels, got 64,008,000.' in said and 'data.recipe' not in said


def test_a_damaged_image_is_refused() -> None:
  status, said = refusal(lambda: serve.decode(png()[:-20]))
  assert status == 422 and said.startswith('The image could not be read: ')


def test_classes_have_names_and_probabilities() -> None:
  found = network().classify(png(1))
  assert [one['name'] for one in found['classes']] == ['dog', 'cat', 'owl'] and found['classes'][0]['probability'] == 1.
  assert found['size'] == '6 × 6 px' and not found['has_attention']
  kind, _, body = found['image'].partition(',')
  assert kind == 'data:image/png;base64' and Image.open(io.BytesIO(base64.b64decode(body))).size == (6, 6)
  assert refusal(lambda: network().attention(png())) == (422, 'This network has no attention.')


def test_weights_without_a_head_have_no_classes() -> None:
  assert network(lambda: Fake(num_classes=0)).classify(png())['classes'] == []


@pytest.mark.slow(reason='about 4 s: compiles a network')
def test_attention_is_drawn_over_the_image_that_the_network_gets() -> None:
  found = network(lambda: Model(loaded.weights('vit')))
  shown = found.classify(png(200, side=50))
  assert shown['has_attention'] and shown['classes'][0]['name'].startswith('kind ')
  drawn = found.attention(png(200, side=50))
  for name in ('overlay', 'shade'):
    assert Image.open(io.BytesIO(base64.b64decode(drawn[name].partition(',')[2]))).size == loaded.PX[::-1]


def test_one_image_is_computed_at_a_time() -> None:
  one, is_in, may_go = network(), threading.Event(), threading.Event()

  def hold() -> None:
    with one.use():
      is_in.set()
      may_go.wait(10)
  first, second = threading.Thread(target=hold), threading.Thread(target=one.classify, args=(png(),))
  first.start()
  assert is_in.wait(10)
  second.start()
  second.join(.1)
  assert second.is_alive()
  may_go.set()
  second.join(10)
  assert not second.is_alive()


def test_weights_are_loaded_again_when_the_run_has_saved_newer_ones() -> None:
  steps: list[int | None] = [None]
  loads: list[Fake] = []

  def load() -> Fake:
    loads.append(Fake())
    return loads[-1]
  one = network(load, lambda: steps[-1])
  assert refusal(lambda: one.classify(png()))[0] == 409 and not loads
  for step, expected in ((10, 1), (10, 1), (20, 2)):
    steps.append(step)
    one.classify(png())
    assert len(loads) == expected


def test_weights_that_training_has_just_deleted_are_a_message() -> None:
  def load() -> Fake:
    raise FileNotFoundError('checkpoints/10')
  assert refusal(lambda: network(load).classify(png())) == (
      409, 'The weights could not be loaded: checkpoints/10')


@pytest.fixture
def colors(tmp_path: pathlib.Path) -> pathlib.Path:
  root = tmp_path / 'images'
  for name, color in (('cat/a', 0), ('cat/b', 2), ('dog/a', 1), ('dog/b', 1), ('fish/a', 1)):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / f'{name}.png').write_bytes(png(color))
  (root / 'dog' / 'damaged.png').write_bytes(png()[:30])
  return root


def run(root: pathlib.Path, one: Network | None = None) -> Folder:
  folder = Folder(str(root))
  folder.run(one or network())
  return folder


def test_the_mistakes_of_a_folder_are_those_of_its_subfolders(colors: pathlib.Path) -> None:
  folder = run(colors)
  assert [(one.file, one.label, one.predicted) for one in folder.mistakes] == [
      ('cat/b.png', Guess(0, 'cat', 0.), Guess(2, 'owl', 1.))]
  assert folder.mistakes[0].png.startswith(b'\x89PNG') and folder.num_done == 6
  arrays = folder.arrays()
  assert sorted(arrays['label']) == [0, 0, 1, 1] and arrays['top'].shape == (4, 3)
  assert len(folder.notes) == 2 and 'Folder fish: its images are left out' in ''.join(folder.notes)
  assert any(note.startswith('dog/damaged.png: The image could not be read') for note in folder.notes)


def test_links_out_of_the_folder_are_skipped(colors: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'secret').mkdir()
  (tmp_path / 'secret' / 'x.png').write_bytes(png(2))
  (colors / 'owl').symlink_to(tmp_path / 'secret')
  (colors / 'cat' / 'link.png').symlink_to(tmp_path / 'secret' / 'x.png')
  (colors / 'cat' / 'inside.png').symlink_to(colors / 'cat' / 'a.png')
  folder = run(colors)
  assert folder.notes[0] == '2 links out of the folder were skipped.' and len(folder.rows) == 5
  assert {path.name for path in folder.paths} == {'a.png', 'b.png', 'damaged.png', 'inside.png'}


@pytest.mark.parametrize('is_listed', [True, False])
def test_a_folder_says_that_the_storage_of_the_weights_failed(colors: pathlib.Path, is_listed: bool) -> None:
  def fail() -> Any:
    raise TemporaryError('runs/x: the storage does not answer')
  folder = run(colors, network(fail) if is_listed else network(newest=fail))
  assert folder.error == 'The weights could not be loaded: runs/x: the storage does not answer'


def test_a_folder_says_why_nothing_is_classified(colors: pathlib.Path) -> None:
  folder = run(colors, network(newest=lambda: None))
  assert folder.error.startswith('The run has saved no checkpoint yet') and folder.arrays() == {}
  assert run(colors, network(lambda: Fake(num_classes=0))).error == 'The weights have no classification head.'


def test_a_path_that_is_no_folder_is_an_error(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='nowhere: expected a folder of images, got no folder'):
    run(tmp_path / 'nowhere')
