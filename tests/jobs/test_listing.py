"""`vit-jax list`: what is printed, and that the pages of the documentation are up to date."""
from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from vit_jax import main
from vit_jax.config import files
from vit_jax.jobs import listing
from vit_jax.recipes import sizes

PAGES = {'configs': 'config_names.md', 'weights': 'published_weights.md'}
REFERENCE = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'reference'
COLUMNS = (listing.Column('name'), listing.Column('about'))


@pytest.mark.parametrize('kind', PAGES)
def test_the_page_of_the_documentation_is_up_to_date(kind: str) -> None:
  command = f'vit-jax list --{kind} --format=markdown > docs/reference/{PAGES[kind]}'
  assert (REFERENCE / PAGES[kind]).read_text() == f'{listing.as_markdown(listing.make_table(kind))}\n', command


def test_configs_are_listed_without_jax(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list']) == 0
  assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == files.list_names()


@pytest.mark.parametrize('words', [['--models', '*b16*'], ['--models=*b16*']])
def test_a_pattern_may_follow_a_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list', *words]) == 0
  head, *lines = capsys.readouterr().out.splitlines()
  assert head.split() == ['model', 'parameters', 'GFLOPs', 'px', 'source']
  assert lines[0].split()[:5] == ['B/16', '86.6', 'M', '35.1', '224'] and all('B/16' in line for line in lines)


def test_lines_fit_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list', '--models', '--weights']) == 0
  assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize('columns', [20, 40, 60, 80, 120])
@pytest.mark.parametrize('kind', listing.KINDS)
def test_rows_are_wrapped_to_the_terminal_and_lose_no_word(kind: str, columns: int) -> None:
  table = listing.make_table(kind, '*')
  shown, whole = listing.as_text(table, columns), listing.as_text(table)
  assert max(map(len, shown.splitlines())) <= columns
  assert ''.join(shown.split()) == ''.join(whole.split())


def test_a_long_text_is_continued_below_itself_or_indented_where_little_room_is_left() -> None:
  def shown(columns: int) -> list[str]:
    table = listing.Table('', '', COLUMNS, [('a', 'b c d e f')], [], has_text_headings=False)
    return listing.as_text(table, columns).splitlines()
  assert shown(12) == ['a  b c d e f'] and shown(8) == ['a  b c d', '   e f']
  table = listing.Table('', '', COLUMNS, [('a' * 9, 'b c d e f')], [])
  assert listing.as_text(table, 12).splitlines()[2:] == ['aaaaaaaaa', '    b c d e', '    f']


def test_json_has_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list', '--models', '--weights=ViT-B_16-sam', '--format=json']) == 0
  found = json.loads(capsys.readouterr().out)
  assert [one['name'] for one in found['models']] == [*sizes.names()] and 'configs' not in found
  assert found['weights'][0] | {'address': ''} == {
      'name': 'ViT-B_16-sam', 'model': 'B/16', 'family': 'ViT', 'parameters': 86_567_656, 'flops': 35_127_656_448,
      'px': 224, 'num_classes': 1_000, 'data': 'ImageNet-1k', 'source': 'arXiv 2106.01548', 'license': 'Apache-2.0',
      'address': ''}


def test_a_pattern_without_a_match_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['list', '--configs=digts', '--weights=augreg']) == 2
  *_, configs, weights = capsys.readouterr().err.splitlines()
  assert configs.endswith(
      "got 'digts'. Did you mean digits or digits_search or deit3_s16_i1k? List all names with vit-jax list --configs.")
  assert weights.startswith('--weights: expected a pattern such as *b16* that matches one of')
  assert 'Other names that work: ' in weights


@pytest.mark.parametrize(('words', 'column', 'kept'), [
    ('--weights --max_params=30M', 'parameters', lambda value: value <= 30e6),
    ('--weights --license=apache*', 'license', lambda value: value == 'Apache-2.0'),
    ('--weights --data=imagenet-21k+1k', 'data', lambda value: value == 'ImageNet-21k+1k'),
    ('--weights --px=384', 'px', lambda value: value == 384),
    ('--weights --family=dinov2', 'family', lambda value: value.startswith('DINOv2')),
    ('--models --family=hybrid', 'family', lambda value: value == 'Hybrid'),
    ('--models --max_params=0.1B', 'parameters', lambda value: value <= 1e8)])
def test_filters_keep_what_matches_and_nothing_else(words: str, column: str, kept: Callable[[Any], bool],
                                                    capsys: pytest.CaptureFixture[str]) -> None:
  kind = words.split()[0].removeprefix('--')
  every = listing.make_table(kind).entries
  assert main.run(['list', *words.split(), '--format=json']) == 0
  found = json.loads(capsys.readouterr().out)[kind]
  assert found == [one for one in every if kept(one[column])] and 0 < len(found) < len(every)


def test_filters_without_an_effect_or_a_match_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
  for words, error in (
      (['--configs', '--px=224'], '--px: expected it with --weights alone, got it with --configs. Set --weights '
       'instead.'),
      (['--models', '--data=x'], '--data: expected it with --weights alone, got it with --models. Set --weights '
       'instead.'),
      (['--models', '--weights', '--px=224'], '--px: expected it with --weights alone, got it with --models, '
       '--weights. Remove --models.'),
      (['--weights', '--models', '--configs', '--max_params=1M'], '--max_params: expected it with --models or '
       '--weights alone, got it with --configs, --models, --weights. Remove --configs.'),
      (['--models', '--max_params=10'], 'got --max_params=10. Set another value.'),
      (['--weights', '--max_params=1.5M', '--px=7'], 'got --max_params=1.5M --px=7. Leave one out. What there'),
      (['--weights', '--px=7'], 'got --px=7. Set another value. What there is: px: 224, 384, '),
      (['--weights', '--family=foo', '--max_params=1K'], 'got --max_params=1K --family=foo. Leave one out. What '
       'there is: family: BiT, DINOv2'),
      (['--family=deit*'], '--family: expected it with --models or --weights, got no such flag. Set --mod'),
      (['--weights', '--max_params=x'], "--max_params: expected a number of parameters such as 30M or 1.2B, got 'x'.")):
    assert main.run(['list', *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize('kind', ['models', 'weights'])
def test_a_pattern_and_filters_without_a_match_are_no_warning(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert main.run(['list', f'--{kind}=zzz', '--max_params=30M']) == 2
  assert f'--{kind}: expected a pattern such as *b16* that matches one of' in capsys.readouterr().err
