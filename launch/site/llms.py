"""The file `llms.txt` of the site: a list of its pages for programs that read text, with the first sentence of each.

`hooks.py` calls `text` with the navigation of `mkdocs.yml` and the generated pages. The format is that of
https://llmstxt.org: a heading, a summary, and sections of links.
"""
from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
ELSEWHERE = {'BENCHMARKS.md': 'benchmarks.md', 'benchmarks/records/TABLES.md': 'tables.md',
             'launch/README.md': 'launch.md', 'AGENTS.md': 'agents.md', 'CONTRIBUTING.md': 'contributing.md',
             'CHANGELOG.md': 'changelog.md'}
"""Pages outside of docs/, and their places on the site."""
NOT_PROSE = re.compile(r'<!--.*?-->|^ *```.*?^ *```|^#.*?$|^[|!<>].*?$|^ *:::.*?$|^---$', re.S | re.M)
"""Comments, code blocks, headings, tables, pictures and HTML."""
LINK = re.compile(r'\[([^]]*)\]\([^)]*\)')
SENTENCE = re.compile(r'.*?[.?](?=\s|$)')


def text(name: str, summary: str, nav: list[Any], generated: Mapping[str, str]) -> str:
  """Returns the file.

  Args:
    name: the name of the site.
    summary: a sentence about it.
    nav: the navigation of `mkdocs.yml`: places of pages, or dictionaries of a title and a place or a list.
    generated: the Markdown of pages that are no files, by their places on the site, such as `'reference/jobs.md'`.
  """
  lines = [f'# {name}', '', f'> {summary}']
  for title, places in sections(nav):
    lines += ['', f'## {title}', '']
    for place in places:
      page = generated.get(place) or source(place).read_text(encoding='utf-8')
      about = first_sentence(page)
      lines.append(f'- [{heading(page)}]({place.removesuffix(".md")}.html)' + (f': {about}' if about else ''))
  return '\n'.join(lines) + '\n'


def source(place: str) -> pathlib.Path:
  """Returns the file of a page by its place on the site."""
  return ROOT / next((path for path, own in ELSEWHERE.items() if own == place), f'docs/{place}')


def sections(nav: list[Any]) -> Iterator[tuple[str, list[str]]]:
  """Yields the title and the places of each top section; a page outside of sections is a section of its own."""
  for entry in nav:
    if isinstance(entry, dict):
      for title, content in entry.items():
        yield title, list(places_of(content))


def places_of(content: Any) -> Iterator[str]:
  """Yields the places of all pages of a part of the navigation, in its order."""
  if isinstance(content, str):
    yield content
  else:
    for entry in content.values() if isinstance(content, dict) else content:
      yield from places_of(entry)


def heading(markdown: str) -> str:
  """Returns the first heading of a page."""
  found = re.search(r'^# +(.*)$', markdown, re.M)
  return found[1].strip() if found else ''


def first_sentence(markdown: str) -> str:
  """Returns the first sentence of a page in one line, without links; '' if it has no prose."""
  for paragraph in NOT_PROSE.sub('', markdown).split('\n\n'):
    words = ' '.join(LINK.sub(r'\1', paragraph).split())
    if words and not words.startswith(('- ', '* ', '1. ')):
      found = SENTENCE.match(words)
      return found[0] if found else re.sub(r':$', '.', words)
  return ''
