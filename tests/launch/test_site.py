"""The documentation site: generated pages have every flag and setting; links lead to pages, or stop a strict build."""
from __future__ import annotations

import importlib.util
import logging
import pathlib
import re
import types
from typing import Any

import pytest

from vit_jax.commands import JOBS
from vit_jax.config import files

SITE = pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'site'


def load(name: str) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(f'site_{name}', SITE / f'{name}.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_page_of_jobs_has_every_flag_with_its_range_and_default() -> None:
  text = load('reference').jobs()
  for name, job in JOBS.items():
    part = re.split(r'(?m)^## ', text.split(f'\n## {name}\n')[1])[0]
    assert job.line in part
    for flag in job.flags.values():
      assert f'| `--{flag.name}` |' in part, (name, flag.name)
  assert '| `--turns` | `N`, 1 to 10,000 | `7` | repetitions of every measurement |' in text


def all_settings() -> str:
  return '\n'.join(load('reference').settings().values())


def test_each_section_of_the_settings_has_a_page_and_nothing_is_on_two() -> None:
  pages = load('reference').settings()
  assert list(pages) == ['settings', *(f'settings_{name}' for name in load('reference').SECTIONS)]
  rows = re.findall(r'^\| `([^`]+)`', all_settings(), re.M)
  assert max(len(text) for text in pages.values()) < 0.5 * len(all_settings())
  assert all(re.match(rf'{name.removeprefix("settings_")}\b', row) for name, text in pages.items() if name != 'settings'
             for row in re.findall(r'^\| `([^`]+)`', text, re.M))
  assert 'batch_size' in rows


@pytest.mark.parametrize('config', [
    'digits', 'mae_cifar10', 'dino_cifar10', 'distill_i1k', 'bit_hyperrule:BiT-R50x1,pets'])
def test_the_page_of_settings_has_every_setting_of_a_config(config: str) -> None:
  listed = set(re.findall(r'^\| `([^`]+)`', all_settings(), re.M))
  for name in files.known_settings(config):
    if not name.startswith('objective.teacher.'):  # settings of a network, listed under `model`
      assert re.sub(r'^evals\.\w+', 'evals.NAME', name) in listed, name


def test_brackets_of_a_cell_are_no_link() -> None:
  assert load('reference').row('tfds:NAME[/CONFIG]', '`a[0]`', 'x|y') == r'| tfds:NAME\[/CONFIG\] | `a[0]` | x\|y |'


def test_a_setting_is_described_by_type_range_unit_default_and_comment() -> None:
  text = all_settings()
  for row in ('| `image_px` | 2 times: whole number; 1 to 65535 px | `(224, 224)` | height, width |',
              '| `model.gelu` | `tanh`, `exact`', "| `train.log_every` | text; duration, not 0 | `'50 steps'`",
              '| `optimizer.lr` | number; at least 0 | `0.001` | at the peak of the schedule |'):
    assert row in text


def test_every_setting_has_a_meaning() -> None:
  assert re.findall(r'^\| `([^`]+)`.*\|  \|$', all_settings(), re.M) == []


def test_every_page_is_in_the_navigation() -> None:
  listed = set(re.findall(r'[\w/]+\.md', (SITE / 'mkdocs.yml').read_text()))
  docs = SITE.parents[1] / 'docs'
  own = {str(path.relative_to(docs)) for path in docs.rglob('*.md')}
  assert own <= listed and listed - own >= set(load('reference').pages()), own - listed


class Fakes(dict[str, str]):
  """The files of a site, by their places."""

  def get_file_from_path(self, path: str) -> str | None:
    return self.get(path)


def page(place: str) -> Any:
  return types.SimpleNamespace(file=types.SimpleNamespace(src_uri=place))


def test_links_of_the_repository_become_links_of_the_site(caplog: pytest.LogCaptureFixture) -> None:
  pytest.importorskip('mkdocs')
  hooks = load('hooks')
  known = Fakes.fromkeys(['benchmarks.md', 'gallery/a.png', 'guides/x.md', 'index.md', 'launch.md'], '')
  with caplog.at_level(logging.WARNING):
    assert hooks.on_page_markdown('[a](../../BENCHMARKS.md#x) `[b](no.md)` <img src="../../.github/gallery/a.png"> '
                                  '[c](https://a.b/c.md) [d](x.md)', page('guides/y.md'), None, known) == (
        '[a](../benchmarks.md#x) `[b](no.md)` <img src="../gallery/a.png"> [c](https://a.b/c.md) [d](x.md)')
    assert hooks.on_page_markdown('[a](docs/guides/x.md)', page('benchmarks.md'), None, known) == '[a](guides/x.md)'
    assert not caplog.records
    hooks.on_page_markdown('[a](../setup.py)', page('index.md'), None, known)
  assert 'docs/index.md: expected a link to a page of the site, got ../setup.py.' in caplog.text
