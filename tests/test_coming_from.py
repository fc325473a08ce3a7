"""The page for people who come from other programs names commands, settings and functions that exist."""
from __future__ import annotations

import pathlib
import re
import shlex
import sys

import pytest

import vit_jax
from vit_jax import commands, main
from vit_jax.inspect.model import Model

ROOT = pathlib.Path(__file__).resolve().parents[1]
RIGHT = [row.rsplit(' | ', 1)[1].removesuffix(' |') for row in
         (ROOT / 'docs' / 'guides' / 'coming_from.md').read_text().splitlines() if row.startswith('| ')]
CODE = [code for cell in RIGHT for code in re.findall(r'`([^`]+)`', cell)]
sys.path.insert(0, str(ROOT / 'launch' / 'site'))


@pytest.fixture(scope='module')
def settings() -> set[str]:
  import reference
  return set(re.findall(r'^\| `([^`]+)`', ''.join(reference.pages().values()), re.M))


def test_settings_exist(settings: set[str]) -> None:
  parts = {name.rpartition('.')[0] for name in settings}
  named = {name for code in CODE for name in re.findall(r'--config\.([a-z_][\w.]*)', code)}
  named |= {code.partition('=')[0] for code in CODE if re.match(r'(data|optimizer)\.[a-z]', code)}
  assert len(named) >= 20 and named <= settings | parts, named - settings - parts


def test_commands_are_read() -> None:
  lines = [code for code in CODE if code.startswith('vit-jax ') and '…' not in code]
  assert len(lines) >= 6
  for command in lines:
    words = [word for word in shlex.split(command)[1:] if not word.startswith('--config.')]
    job = commands.JOBS[words[0]]
    given = {word.removeprefix('--').partition('=')[0] for word in words[1:]}
    assert given <= set(job.flags), command
    if {flag.name for flag in job.required} <= given:
      main.parse(words)


def test_functions_exist() -> None:
  names = {name for code in CODE for name in re.findall(r'\bmodel\.(\w+)', code) if 'config' not in code}
  assert len(names) >= 9 and all(hasattr(Model, name) or name == 'weights' for name in names), names
  package = {name for code in CODE for name in re.findall(r'\bvit_jax\.(\w+)', code)}
  assert package <= set(vit_jax.__all__)
