"""The live page of a run and of images: its pages, what it reads, and in a browser with real clicks."""
from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import browser
import pytest
import runs
import saved
from PIL import Image

from vit_jax import main
from vit_jax.jobs import serve
from vit_jax.jobs.serve_http import Answer
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
