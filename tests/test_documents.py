"""The documentation: links and anchors lead somewhere, and commands name jobs, configs and flags that exist."""
from __future__ import annotations

import pathlib
import re

import pytest

from vit_jax.commands import JOBS
from vit_jax.config import check, files

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob('*.md')), *sorted((ROOT / 'docs').glob('*.md')), ROOT / 'launch' / 'README.md']
LINK = re.compile(r'\[[^]]*\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"')
CODE = re.compile(r'^```\w*\n(.*?)^```|`([^`\n]+)`', re.M | re.S)
COMMAND = re.compile(r'(?:vit-jax |python -m vit_jax\.main --job=)([a-z]+)([^`|#\n]*)')


def anchors(page: pathlib.Path) -> set[str]:
  """The names that headings of a page get."""
  headings = re.findall(r'^#+ (.*)$', page.read_text(), re.M)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: pathlib.Path) -> None:
  for match in LINK.finditer(page.read_text()):
    target, _, anchor = (match[1] or match[2]).partition('#')
    if ':' in target:
      continue
    path = (page.parent / target).resolve() if target else page
    assert path.exists(), f'{page.name}: {target}'
    assert not anchor or anchor in anchors(path), f'{page.name}: #{anchor} of {path.name}'


@pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_jobs_flags_and_configs_that_exist(page: pathlib.Path) -> None:
  text = page.read_text().replace('\\\n', ' ')
  code = '\n'.join(re.sub(r'(?m) *# .*$', '', match[1] or match[2]) for match in CODE.finditer(text))
  for job, rest in COMMAND.findall(code):
    assert job in JOBS, f'{page.name}: {job}'
    for flag in re.findall(r' --([a-z_]+)[ =]', f'{rest} '):
      assert flag in JOBS[job].flags or flag == 'config', f'{page.name}: {job} --{flag}'
    for config in re.findall(r'--config=(?:configs/)?([a-z]\w*)', rest):
      assert (ROOT / 'configs' / f'{config}.py').exists() or config.isupper(), f'{page.name}: {config}'


def test_the_config_of_the_guide_is_a_config(tmp_path: pathlib.Path) -> None:
  (block,) = re.findall(r'^```\n(from vit_jax.*?)^```', (ROOT / 'docs' / 'configs.md').read_text(), re.M | re.S)
  (tmp_path / 'mine.py').write_text(block)
  config = files.load(f'{tmp_path / "mine.py"}:B/16', ['data.source=synthetic', 'data.num_examples=9000',
                                                       'data.num_classes=10'])
  assert config.model.width == 768
  check.check(config)


def test_the_readme_is_read_in_a_few_minutes() -> None:
  assert len((ROOT / 'README.md').read_text().splitlines()) <= 200
