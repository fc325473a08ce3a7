"""Hooks of the documentation site: adds the pages that lie elsewhere or are generated, and leads their links there.

Links of a page are written for its file in the repository, so that pages can be read there. On the site a link to a
file of the repository leads to its page; a link to a file that has none stops a strict build.
"""
from __future__ import annotations

import logging
import pathlib
import posixpath
import re
import sys
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import llms
import reference
from llms import ELSEWHERE

ROOT = pathlib.Path(__file__).resolve().parents[2]
log = logging.getLogger('mkdocs.hooks')
INSTEAD = {'README.md': 'index.md', 'configs': 'reference/config_names.md'}
"""Files of the repository, and the pages to which links to them lead."""
LINK = re.compile(r'(\]\(|(?:src|href)=")([^)"\s:#]+)(?=[)"#])')
CELL = re.compile(r'<td.*?</td>', re.S)
CODE = re.compile(r'(?<=<code>)[^<]+(?=</code>)')
BREAK = re.compile(r'(?<=\w)(?:_|::|/|\.|,)(?=\w)')
CSS = """.md-grid { max-width: 80rem; }
.md-typeset h1, .md-typeset h2 { color: inherit; font-weight: 500; }
.md-typeset table:not([class]) { font-size: 0.7rem; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.4em 0.8em; }
.md-typeset table:not([class]) td:last-child { min-width: 10rem; }
.md-typeset table:not([class]) td:first-child:nth-last-child(4) { min-width: 9rem; }
.md-typeset table:not([class]) td:nth-child(3) { min-width: 5rem; }
.md-typeset table code { white-space: nowrap; }
.md-typeset table td:nth-child(n + 2) code { white-space: normal; overflow-wrap: break-word; word-break: normal; }
.md-tabs__item:not(.md-tabs__item--active) .md-tabs__link { opacity: 0.85; }
[data-md-color-scheme="slate"][data-md-color-primary="indigo"] { --md-typeset-a-color: #82aaff;
  --md-code-hl-number-color: #f08a7d; --md-code-hl-constant-color: #ab9df2; }
.md-typeset img[width$="%"] { vertical-align: top; }
@media (max-width: 44rem) {
  .md-typeset img[width$="%"] { width: 100%; }
  .md-typeset table:not([class]) :is(th, td):nth-child(n + 2) { min-width: 8rem; }
}
"""


def on_files(files: Files, config: Any) -> Files:
  """Adds pages, generated pages, the list of all pages, images and styles."""
  for path, place in ELSEWHERE.items():
    files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding='utf-8')))
  generated = reference.pages()
  for place, text in generated.items():
    files.append(File.generated(config, place, content=text))
  files.append(File.generated(config, 'llms.txt', content=llms.text(
      config.site_name, config.site_description, config.nav, generated)))
  for image in sorted((ROOT / '.github' / 'gallery').iterdir()):
    files.append(File.generated(config, f'gallery/{image.name}', abs_src_path=str(image)))
  files.append(File.generated(config, 'site.css', content=CSS))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
  """Leads the links of a page, written for the repository, to pages of the site."""
  place = page.file.src_uri
  source = str(llms.source(place).relative_to(ROOT))

  def led(match: re.Match[str]) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
    target = site_place(path)
    if files.get_file_from_path(target) is None:
      log.warning('%s: expected a link to a page of the site, got %s. Add its page to ELSEWHERE or INSTEAD.', source,
                  match[2])
    if match[1] != '](':  # HTML, which mkdocs leaves as it is
      target = target.removesuffix('.md') + '.html' * target.endswith('.md')
    return match[1] + posixpath.relpath(target, posixpath.dirname(place) or '.')

  return re.sub(r'(```.*?```|`[^`\n]*`)|' + LINK.pattern,
                lambda m: m[0] if m[1] else led(LINK.match(m[0] + m.string[m.end()])), markdown, flags=re.S)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
  """Lets names in cells of tables break after `_`, `::`, `/`, `.` and `,`, and nowhere else."""
  return CELL.sub(lambda cell: CODE.sub(lambda code: BREAK.sub(r'\g<0><wbr>', code[0]), cell[0]), html)


def site_place(path: str) -> str:
  """The place on the site of a file of the repository."""
  if path.startswith('docs/'):
    return path.removeprefix('docs/')
  if path.startswith('.github/gallery/'):
    return path.removeprefix('.github/')
  return ELSEWHERE.get(path) or INSTEAD.get(path.split('/')[0]) or path
