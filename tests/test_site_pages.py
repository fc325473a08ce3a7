"""The built documentation site in a browser: contrast, width, links, requests and search."""
from __future__ import annotations

import functools
import html.parser
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import browser
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow(reason='builds the site and opens each page'),
              pytest.mark.xdist_group('documents')]
needs_browser = pytest.mark.skipif(browser.find() is None, reason='Chromium is not installed')
EXTEND = 'Extend with your own code'
DATASETS = 'Large datasets, other formats and other images'
SEARCHES = {'wandb': 'Runs', 'list_models': 'Python API', 'HF_TOKEN': 'Pretrained weights',
            'offline': 'Pretrained weights', 'proxy': 'Pretrained weights', 'throughput': 'Benchmarks',
            'citation': 'vit_jax', 'imbalance': 'Data', 'Kaggle': 'Data', 'macOS': 'Data',
            'gradient checkpointing': 'Networks', 'custom loss': EXTEND, 'Equinox': EXTEND, 'WebDataset': DATASETS}
"""Words that people search for, and a page that must be among the first three."""


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns the folder of the built site."""
  pytest.importorskip('mkdocs', reason='needs the extra docs')
  folder = tmp_path_factory.mktemp('site')
  subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--strict', '-f', 'launch/site/mkdocs.yml', '-d',
                  folder], cwd=ROOT, env={**os.environ, 'NO_MKDOCS_2_WARNING': '1'}, check=True)
  return folder


def pages(site: pathlib.Path) -> list[pathlib.Path]:
  return [path for path in sorted(site.rglob('*.html')) if path.name != '404.html']


class Links(html.parser.HTMLParser):
  """The addresses that a page refers to, and the names of its anchors."""

  def __init__(self, text: str) -> None:
    super().__init__()
    self.addresses: set[str] = set()
    self.anchors: set[str] = {''}
    self.feed(text)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    for name, value in attrs:
      if name in ('href', 'src') and value:
        self.addresses.add(value)
      elif name in ('id', 'name') and value:
        self.anchors.add(value)


def test_every_link_of_the_built_pages_leads_to_a_file_and_an_anchor(site: pathlib.Path) -> None:
  found = {path: Links(path.read_text()) for path in pages(site)}
  missing = []
  for path, links in found.items():
    for address in links.addresses:
      place, _, anchor = urllib.parse.unquote(address).partition('#')
      if ':' in place:
        continue
      target = (path.parent / place).resolve() if place else path
      target = target / 'index.html' if target.is_dir() else target
      if not target.exists() or target in found and anchor not in found[target].anchors:
        missing.append(f'{path.relative_to(site)}: {address}')
  assert not missing and len(found) > 40


@needs_browser
@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
def test_every_text_of_every_page_has_a_contrast_of_4_5(site: pathlib.Path, dark: bool, tmp_path: pathlib.Path) -> None:
  script = (ROOT / 'tests' / 'contrast.js').read_text()
  found = set()
  with browser.Page(tmp_path) as page:
    page.show(width=1440, dark=dark)
    for path in pages(site):
      page.open(path.as_uri())
      assert page.run('document.body.dataset.mdColorScheme') == ('slate' if dark else 'default')
      found |= {(path.name, *one) for one in page.run(f'({script})(4.5)')}
  assert sorted(found, key=str) == []


@needs_browser
@pytest.mark.parametrize('width', [390, 1440])
def test_no_page_is_wider_than_the_screen_or_asks_another_host(
    site: pathlib.Path, width: int, tmp_path: pathlib.Path) -> None:
  wide = []
  with browser.Page(tmp_path) as page:
    page.show(width=width, dark=False)
    for path in pages(site):
      page.open(path.as_uri())
      if page.run('document.documentElement.scrollWidth > document.documentElement.clientWidth + 1'):
        wide.append(path.name)
    assert [url for url in page.requests if not url.startswith(('file:', 'data:'))] == []
  assert wide == []


@pytest.fixture
def address(site: pathlib.Path) -> Iterator[str]:
  """Returns the address of a server with the site."""
  handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
  handler.func.log_message = lambda *_: None  # type: ignore[attr-defined]
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


def search(page: browser.Page, word: str) -> list[str]:
  """Returns the titles of the first three pages that the search of the open page finds."""
  page.wait('document.querySelector(".md-search__input")')
  page.run('document.querySelector("[data-md-toggle=search]").click()')  # opens the field, as a click into it does
  page.run(f"""(e => {{
      e.focus();
      e.value = {json.dumps(word)};
      e.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}));
    }})(document.querySelector('.md-search__input'))""")
  page.wait('document.querySelector(".md-search-result__item h1")')
  return page.run('[...document.querySelectorAll(".md-search-result__item h1")].slice(0, 3).map(e => e.innerText)')


@needs_browser
def test_search_finds_what_people_look_for(address: str, tmp_path: pathlib.Path) -> None:
  with browser.Page(tmp_path) as page:
    page.show(width=1440, dark=False)
    for word, wanted in SEARCHES.items():
      page.open(f'{address}/index.html')
      found = search(page, word)
      assert wanted in found, (word, found)


@needs_browser
def test_search_works_in_pages_that_are_opened_as_files(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
  with browser.Page(tmp_path) as page:
    page.show(width=1440, dark=False)
    page.open((site / 'reference' / 'runs.html').as_uri())
    assert SEARCHES['HF_TOKEN'] in search(page, 'HF_TOKEN')
    assert [url for url in page.requests if not url.startswith(('file:', 'data:', 'about:'))] == []
