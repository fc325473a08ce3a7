"""The documentation: links lead somewhere, commands name jobs, configs and flags that exist, code blocks can be run."""
from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import blocks
import pytest

from vit_jax.commands import JOBS
from vit_jax.config import check, engine, files
from vit_jax.config.schema import ranges
from vit_jax.core import implementation
from vit_jax.data import opening

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = blocks.PAGES
OWN = ROOT / 'docs' / 'guides' / 'extend.md'
"""The guide to code in a person's own files."""
LINK = re.compile(r'\[[^]]*\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"')
CODE = re.compile(r'^ *```[^\n]*\n(.*?)^ *```|`([^`\n]+)`', re.M | re.S)
MODULE = re.compile(r'-m["\'\s,]+((?:vit_jax|configs|benchmarks|tests|launch)(?:\.\w+)+)')
TEXTS = ('.md', '.sh', '.json', '.py', '.yaml', '.yml', '.ipynb', '')
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
    if anchor and path == ROOT / 'README.md' and page != path:  # on the site, the page Home stands for README
      assert anchor in anchors(ROOT / 'docs' / 'index.md'), f'{page.name}: #{anchor} of Home'


@pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_jobs_flags_and_configs_that_exist(page: pathlib.Path) -> None:
  text = page.read_text().replace('\\\n', ' ')
  code = '\n'.join(re.sub(r'(?m) *# .*$', '', match[1] or match[2]) for match in CODE.finditer(text))
  for job, rest in COMMAND.findall(code):
    assert job in JOBS, f'{page.name}: {job}'
    own = re.sub(r"--(runner)_options='[^']*'?", r'--\1_options=x', rest)  # flags of another program
    for flag in re.findall(r' --([a-z_]+)[ =]', f'{own} '):
      assert flag in JOBS[job].flags or flag == 'config', f'{page.name}: {job} --{flag}'
    for config in re.findall(r'--config=(?:configs/)?([a-z]\w*)', rest):
      assert (ROOT / 'configs' / f'{config}.py').exists() or f'title="{config}.py"' in text, f'{page.name}: {config}'


def test_modules_that_commands_run_can_be_run() -> None:
  """On pages, in scripts and records, and in docstrings of programs."""
  names = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
  found: dict[str, str] = {}
  for name in names:
    path = ROOT / name
    if path.is_file() and path.suffix in TEXTS and not path.name.startswith('test_'):
      found |= {module: name for module in MODULE.findall(path.read_text())}
  assert {'vit_jax.main', 'benchmarks.bench', 'benchmarks.loaders', 'tests.changed'} <= found.keys()
  for module, name in found.items():
    path = ROOT / f'{module.replace(".", "/")}.py'
    assert path.is_file() and "if __name__ == '__main__':" in path.read_text(), f'{name}: python -m {module}'


def test_the_config_of_the_guide_is_a_config(tmp_path: pathlib.Path) -> None:
  guide = blocks.read(ROOT / 'docs' / 'guides' / 'write_a_config.md')
  (text,) = [block.text for block in guide if block.title == 'mine.py']
  (tmp_path / 'mine.py').write_text(text)
  config = files.load(f'{tmp_path / "mine.py"}:B/16', ['data.source=synthetic', 'data.num_examples=9000',
                                                       'data.num_classes=10'])
  assert config.model.width == 768
  check.check(config)


def test_the_readme_is_read_in_a_few_minutes() -> None:
  assert len((ROOT / 'README.md').read_text().splitlines()) <= 200


def test_every_code_block_runs_or_says_why_not_and_is_valid() -> None:
  found = [block for page in PAGES for block in blocks.read(page)]
  fences = sum(len(re.findall(r'^ *```', page.read_text(), re.M)) for page in PAGES)
  assert 2 * len(found) == fences  # none is missed
  assert [text for text in map(blocks.problem, found) if text] == []
  run = sum(block.runs for block in found)
  assert run + sum(bool(block.reason) or block.language == 'text' for block in found) == len(found)
  assert run >= 50, blocks.summary()
  assert all(block.reason == '' or len(block.reason) > 10 for block in found)


def test_the_guide_to_own_code_runs_as_printed_in_an_empty_folder() -> None:
  found = list(blocks.read(OWN))
  end = OWN.read_text().partition('\n## Training loop')[0].count('\n')  # from there on, it needs weights and photos
  before = [block for block in found if block.line < end]
  assert {block.language for block in found} == {'python', 'sh'} and len(found) - len(before) == 4
  assert all(block.runs and not block.flags for block in found) and 'checkout' not in OWN.read_text()
  assert any('vit-jax train' in block.text for block in before)


def test_the_code_of_the_guide_is_found_beside_its_config(tmp_path: pathlib.Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.chdir(tmp_path)
  for block in blocks.read(OWN):
    if block.title:
      (tmp_path / block.title).write_text(block.text)
  config = files.load('with_own.py', [])
  check.check(config)
  assert engine.from_json(engine.to_json(config)) == config
  own = [part for _, part in ranges.walk(config) if implementation.is_own_type(type(part))]
  assert {type(part).__name__ for part in own} == {'Rotation', 'Sandwich', 'Centroid', 'Signum'}
  assert all(callable(implementation.of(part)) for part in own)
  implementation.note_command_line(config.data.source)  # as the command line does
  assert callable(opening.find_opener(config.data.source))


def test_the_problem_of_a_block_names_its_line(tmp_path: pathlib.Path) -> None:
  page = blocks.ROOT / 'docs' / 'index.md'
  bad = blocks.Block(page, 7, 'python', '', 'x = (\n', {}, '', 0)
  assert blocks.problem(bad).startswith('docs/index.md:7: ')
  assert "expected one of sh, python, text, got ''" in blocks.problem(bad._replace(language=''))
  assert 'unexpected end of file' in blocks.problem(bad._replace(language='sh', text='if true; then\n'))


def test_flags_of_a_comment_replace_those_of_a_block_and_extend_it() -> None:
  words = ['train', '--config=a', '--config.seed=1']
  assert blocks.words_with(words, ['--config.seed=2', '--x']) == ['train', '--config=a', '--config.seed=2', '--x']
