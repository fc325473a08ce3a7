"""The address of the repository. `repo_url` in `mkdocs.yml` sets it; README, notebooks and others repeat it.

    python launch/site/repository.py                 prints OWNER/NAME
    python launch/site/repository.py OWNER/NAME      writes another one everywhere

While the address is the placeholder, badges and lines that need one are hidden in comments,
`<!-- with an address: … -->`. Writing another address removes the comments around them.
"""
from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTING = 'launch/site/mkdocs.yml'
SLUG = r'[\w.-]+/[\w.-]+'
HIDDEN = re.compile(r'<!-- with an address: (.*?) -->', re.S)
"""Text of a page that is shown once there is an address."""


def read(root: pathlib.Path = ROOT) -> str:
  """Returns OWNER/NAME of the setting."""
  found = re.search(rf'^repo_url: https://github\.com/({SLUG})$', (root / SETTING).read_text(encoding='utf-8'), re.M)
  if found is None:
    raise SystemExit(f'repo_url: expected https://github.com/OWNER/NAME in {SETTING}, got none.')
  return found[1]


def pages(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """Returns the tracked files that repeat the address, and the file with the setting."""
  done = subprocess.run(['git', 'grep', '--files-with-matches', '--fixed-strings', '-I', read(root)], cwd=root,
                        capture_output=True, text=True, check=True)
  return [root / line for line in done.stdout.splitlines()]


def write(slug: str, root: pathlib.Path = ROOT) -> None:
  """Writes another address into all of them, and shows what needs one."""
  if re.fullmatch(SLUG, slug) is None:
    raise SystemExit(f'repository: expected OWNER/NAME, got {slug!r}.')
  old = read(root)
  for path in pages(root):
    text = path.read_text(encoding='utf-8').replace(old, slug)
    path.write_text(HIDDEN.sub(r'\1', text) if path.suffix == '.md' else text, encoding='utf-8')


if __name__ == '__main__':
  if sys.argv[1:]:
    write(*sys.argv[1:])
  print(read())
