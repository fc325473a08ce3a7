"""Prompts against those of big_vision, and the names of classes."""
from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

from tests import fuzzing
from tests.data import make_golden_prompts as golden
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.data.labels import imagenet
from vit_jax.data.text import prompts

FOUND = json.loads(pathlib.Path(__file__).with_name('golden_prompts.json').read_text())


def test_prompts_are_those_of_big_vision() -> None:
  assert prompts.build(golden.NAMES, golden.TEMPLATES, TextRule.CANONICAL) == FOUND['own']
  assert [prompts.simplify(name, TextRule.CANONICAL) for name in golden.NAMES] == FOUND['canonical']


@pytest.mark.parametrize('name', ['class_name_only', 'clip_paper', 'clip_best'])
def test_all_prompts_of_imagenet_are_those_of_big_vision(name: str) -> None:
  templates = prompts.find_templates(name, setting='x')
  found = prompts.build(prompts.clip_imagenet_names(), templates, TextRule.CANONICAL)
  assert hashlib.sha256(json.dumps(found).encode()).hexdigest() == FOUND[name]


def test_synonyms_are_all_used_when_asked_for() -> None:
  every = prompts.build(['T-shirt, Tee'], ['a {}.'], TextRule.CANONICAL, synonyms=True)
  assert every == [['a tshirt', 'a tee']]


def test_other_rules_keep_punctuation_and_case() -> None:
  assert prompts.simplify('A_Big T-shirt.', TextRule.LOWER) == 'a big t-shirt.'
  assert prompts.simplify('A_Big T-shirt.', TextRule.NONE) == 'A_Big T-shirt.'


def test_names_are_those_of_the_data_or_of_clip_for_the_ids_of_imagenet() -> None:
  assert prompts.class_names(['b', 'a'], '', setting='x') == ('b', 'a')
  known = imagenet.by_count(1_000)
  assert known is not None and prompts.class_names(known.ids, '', setting='x') == prompts.clip_imagenet_names()
  some = ['n01443537', 'n01440764 tench, in words']
  assert prompts.class_names(some, '', setting='x') == ('goldfish', 'tench')
  assert prompts.class_names(some, 'clip_imagenet', setting='x') == ('goldfish', 'tench')
  assert prompts.class_names(['c'] * 1000, 'clip_imagenet', setting='x')[0] == 'tench'


def test_names_of_a_file_replace_those_of_the_data(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'names.txt').write_text('cat\ndog\n')
  assert prompts.class_names(['n1', 'n2'], str(tmp_path / 'names.txt'), setting='x') == ('cat', 'dog')
  with pytest.raises(UserError, match=r'evals.z.names: expected 3 names, one for each class of the data, got 2\.'):
    prompts.class_names(['a', 'b', 'c'], str(tmp_path / 'names.txt'), setting='evals.z.names')


def test_names_of_a_command_line_may_be_a_list_or_a_file(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'names').write_text('cat\nred boat, at sea\n')
  assert prompts.resolve_names([str(tmp_path / 'names')], setting='--names') == ('cat', 'red boat, at sea')
  found = prompts.resolve_names(['clip_imagenet'], setting='--names')
  prompts.check_names(found)
  assert len(found) == 998 and found[:2] == ('tench', 'goldfish') and set(found) == set(prompts.clip_imagenet_names())
  for names in ([], ['cat'], ['N/A'], ['red_boat'], ['cat', 'dog/wolf']):
    assert prompts.resolve_names(names, setting='--names') == tuple(names)


@pytest.mark.parametrize(('names', 'message'), [
  (['none.txt'], "or clip_imagenet, got 'none.txt', and there is no such file. Correct the path."),
  (['./none'], "got './none', and there is no such file"),
  (['cat', 'none.txt'], "got 'none.txt' as one of 2 names. Give the file or list alone."),
  (['clip_imagenet', 'cat'], "got 'clip_imagenet' as one of 2 names"),
  (['imagenet'], "got 'imagenet'. Did you mean clip_imagenet[?]"),
  (['clip_best'], "got 'clip_best', a list of templates. Set --prompts=clip_best, and name the classes."),
])
def test_files_and_lists_that_do_not_exist_are_no_names_of_classes(names: list[str], message: str) -> None:
  with pytest.raises(UserError, match=f'--names: expected names with commas, a file with one name .*{message}'):
    prompts.resolve_names(names, setting='--names')


def test_wordnet_ids_of_other_classes_are_refused() -> None:
  with pytest.raises(UserError, match='x: expected names in words, got WordNet ids such as n00000001'):
    prompts.class_names(['n00000001', 'n00000002'], '', setting='x')


def test_a_template_needs_one_place_for_the_name() -> None:
  assert prompts.find_templates('a {}', setting='x') == ('a {}',)
  for wrong in ('a photo', '{} and {}', ()):
    with pytest.raises(UserError, match=r'x: expected one of class_name_only, clip_paper, clip_best, or a template'):
      prompts.find_templates(wrong, setting='x')


@pytest.mark.parametrize(('names', 'said'), [
    ([], 'names of classes in words, got []'), ('cat', "in words, got 'cat'"),
    (['cat', 3], 'in words, got other values'),
    (['cat', ''], "got '' as number 2 of 2"), (['cat', ' \t'], 'as number 2'), (['a' * 5_000], 'as number 1 of 1'),
    (['cat\ud800'], 'without control characters'), (['a\x1b[2J'], "got 'a\\x1b[2J'"),
    (['cat', 'dog', 'cat '], 'expected each name once, got cat twice'),
    ([f'class {i % 9_000}' for i in range(10_000)], 'got class 0, class 1, class 2, class 3, class 4 and 995 more'),
    ([''] * 10_000, "got '' as number 1 of 10,000"), ([str(i) for i in range(200_000)], 'at most 100,000 names, got')])
def test_names_that_cannot_be_classes_are_refused(names: list[str], said: str) -> None:
  with pytest.raises(UserError) as error:
    prompts.check_names(names)
  assert said in str(error.value)
  fuzzing.check_message(str(error.value))


def test_ten_thousand_names_are_accepted() -> None:
  prompts.check_names([f'class {i}' for i in range(10_000)])
