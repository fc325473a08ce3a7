"""The code blocks of the documentation: reads them, and runs them in a folder of their own.

A block is a fence with a language: `sh`, `python`, or `text`, which is only read. A block with `title="FILE"` is
written to that file. Comments directly before a block say how a test runs it; they do not show on the page:

    <!-- runs with: train @digits --config.seed=3 -->      these flags replace or extend those of each `vit-jax train`;
                                                           `@digits`, `@photos`, `@knn` are sets that make a run tiny
    <!-- not run: needs a TPU -->                          not run, for this reason
    <!-- exit status: 2 -->                                the page shows an error

`python -m tests.blocks` lists the pages with the number of blocks that run and the reasons of the others.
"""
from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md'), ROOT / 'launch' / 'README.md',
                ROOT / 'benchmarks' / 'records' / 'TABLES.md'])
DIGITS = ('--config.model.depth=2', '--config.model.width=16', '--config.model.heads=2', '--config.model.mlp.hidden=16',
          '--config.length=4 steps', '--config.evals.test.every=4 steps', '--config.checkpoints.every=2 steps')
PHOTOS = ('--config.image_px=32,32', '--config.data.recipe.eval_resize_px=36', '--config.model.patch=16',
          '--config.model.width=16', '--config.model.depth=2', '--config.model.heads=2', '--config.model.mlp.hidden=16',
          '--config.batch_size=8', '--config.length=4 steps', '--config.optimizer.schedule.warmup=1 steps',
          '--config.model.pool=class_token', '--config.evals.test.every=4 steps', '--config.checkpoints.every=4 steps')
KNN = ('--config.length=4 steps', '--config.batch_size=8', '--config.checkpoints.every=4 steps', '--config.evals=knn',
       '--config.evals.knn.every=4 steps', '--config.evals.knn.neighbors=3,5', '--config.evals.knn.headline=5',
       '--config.evals.knn.train_split=train', '--config.evals.knn.split=test', '--config.evals.knn.batch_size=8')
SETS = {'@digits': DIGITS, '@photos': PHOTOS, '@knn': KNN}
"""Flags that make a run tiny, by the name that comments use. Blocks with the same set compile the same programs."""
LANGUAGES = ('sh', 'python', 'text')
FENCE = re.compile(r'((?:^ *<!-- (?:(?!-->).)* -->\n+)*)^( *)```([^\n]*)\n(.*?)^ *```$', re.M | re.S)
COMMENT = re.compile(r'<!-- (runs with|not run|exit status): (.*?) -->', re.S)
TIMEOUT_S = 600


class Block(NamedTuple):
  """A block: its page, its line, its language, the file it is written to ('' = none), and its text.

  flags: of jobs, which replace or extend those of the block.    reason: why it is not run; '' = it is.
  """
  page: pathlib.Path
  line: int
  language: str
  title: str
  text: str
  flags: Mapping[str, list[str]]
  reason: str
  status: int

  @property
  def where(self) -> str:
    return f'{self.page.relative_to(ROOT)}:{self.line}'

  @property
  def runs(self) -> bool:
    return self.language != 'text' and not self.reason


def read(page: pathlib.Path) -> Iterator[Block]:
  """Yields the blocks of a page in their order.

  Raises:
    ValueError: a comment beside a block says something else than the three that are known.
  """
  text = page.read_text(encoding='utf-8')
  for match in FENCE.finditer(text):
    comments, indent, info, code = match.groups()
    said = COMMENT.findall(comments)
    if len(said) != comments.count('<!--'):
      raise ValueError(f'{page}: {comments}')
    language, _, rest = info.partition(' ')
    title = re.search(r'title="([^"]+)"', rest)
    flags = dict(_flags(value) for kind, value in said if kind == 'runs with')
    named = dict(said)
    yield Block(page, text.count('\n', 0, match.start(3)) + 1, language, title[1] if title else '',
                re.sub(f'(?m)^{indent}', '', code), flags, named.get('not run', ''),
                int(named.get('exit status', '0')))


def _flags(text: str) -> tuple[str, list[str]]:
  """The job and the flags of a comment, in which later ones replace those of a set."""
  job, *words = shlex.split(text)
  found: list[str] = []
  for word in words:
    found = words_with(found, list(SETS.get(word, [word])))
  return job, found


def problem(block: Block) -> str:
  """What is wrong with a block before it runs: its language or its syntax; '' if nothing is."""
  if block.language not in LANGUAGES:
    return f'{block.where}: expected one of {", ".join(LANGUAGES)}, got {block.language!r}'
  if block.language == 'sh':
    done = subprocess.run(['bash', '-n'], input=block.text, text=True, capture_output=True)
    return f'{block.where}: {done.stderr}' if done.returncode else ''
  if block.language == 'python':
    try:
      ast.parse(block.text)
    except SyntaxError as error:
      return f'{block.where}: {error}'
  return ''


def words_with(words: list[str], flags: list[str]) -> list[str]:
  """The words of a command, in which flags are replaced by those given, and the others given are added."""
  for flag in flags:
    name = flag.partition('=')[0]
    at = next((i for i, word in enumerate(words) if word.partition('=')[0] == name), len(words))
    words = [*words[:at], flag, *words[at + 1:]]
  return words


def run(block: Block, folder: pathlib.Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
  """Runs a block in a folder, or writes its file there; `environment` has the programs of the block on its PATH."""
  if block.title:
    path = folder / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    return subprocess.CompletedProcess([], 0, '')
  match block.language:
    case 'sh':
      command = ['bash', '-euc', block.text]
    case _:
      (folder / 'block.py').write_text(block.text)
      command = ['python', 'block.py']
  return subprocess.run(command, cwd=folder, env={**environment, 'BLOCK_FLAGS': json.dumps(dict(block.flags))},
                        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)


def summary() -> str:
  """A line for each page, and one for each block that does not run."""
  lines, total = [], [0, 0, 0]
  for page in PAGES:
    found = list(read(page))
    counts = [sum(one.runs for one in found), sum(bool(one.reason) for one in found),
              sum(one.language == 'text' for one in found)]
    total = [a + b for a, b in zip(total, counts, strict=True)]
    if found:
      lines.append(f'{page.relative_to(ROOT)}: {counts[0]} run, {counts[1]} not, {counts[2]} are output')
      lines += [f'  line {one.line}: {one.reason}' for one in found if one.reason]
  return '\n'.join([*lines, f'All pages: {total[0]} run, {total[1]} not, {total[2]} are output'])


if __name__ == '__main__':
  os.chdir(ROOT)
  print(summary())
