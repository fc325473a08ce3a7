"""Slice syntax and hold-outs."""
from __future__ import annotations

import logging

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.data import splits


@pytest.mark.parametrize(('text', 'expected'), [
    ('train', (0, 37)), ('train[:50%]', (0, 19)), ('train[50%:]', (19, 37)), ('train[:5]', (0, 5)),
    ('train[-5:]', (32, 37)), ('train[:-10%]', (0, 33)), ('train[3:7]', (3, 7)), ('train[:]', (0, 37)),
    ('train[0:3_0]', (0, 30))])
def test_bounds_are_examples_or_per_cent(text: str, expected: tuple[int, int]) -> None:
  [term] = splits.parse(text)
  assert term.name == 'train' and splits.bounds(term, 37) == expected


@pytest.mark.parametrize('percent', range(1, 100, 7))
def test_complementary_slices_share_nothing_and_lose_nothing(percent: int) -> None:
  [low], [high] = splits.parse(f'train[:{percent}%]'), splits.parse(f'train[{percent}%:]')
  assert splits.bounds(low, 1281)[1] == splits.bounds(high, 1281)[0]


def test_terms_may_be_added() -> None:
  assert splits.parse('train[:8] + val[:2]') == [('train', '', '8'), ('val', '', '2')]


@pytest.mark.parametrize('text', ['', 'train[', 'train[1]', 'train[a:b]', 'train+', 'train[:5%%]', 'a[:_]',
                                  f'a[:{"9" * 5000}]'])
def test_what_is_not_a_split_is_refused_with_examples(text: str) -> None:
  with pytest.raises(UserError, match='split: expected a name or a slice such as train, train.:98%.'):
    splits.parse(text)


@pytest.mark.parametrize(('text', 'numbers'), [
    ('train[:99]', '0 to 99'), ('train[5:5]', '5 to 5'), ('train[-99:]', '-62 to 37'),
    ('train[:1%]', '0 to 0')])
def test_empty_and_outlying_slices_are_refused(text: str, numbers: str) -> None:
  with pytest.raises(UserError, match=f'expected at least one of 37 examples, got {numbers}'):
    splits.bounds(*splits.parse(text), 37)


def test_validation_stands_in_for_test_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
  assert splits.resolve('test', ('train', 'test', 'val'), source='x') == 'test'
  assert splits.resolve('val', ('train', 'validation'), source='x') == 'validation'
  with caplog.at_level(logging.INFO, 'vit_jax.data'):
    assert splits.resolve('test', ('train', 'valid'), source='x') == 'valid'
  assert 'x has no split test; using valid instead' in caplog.text


def test_an_unknown_split_lists_the_known_and_the_nearest() -> None:
  with pytest.raises(UserError, match="split of x: expected one of test, train, got 'tset'. Did you mean test"):
    splits.resolve('tset', ('train', 'test'), source='x')


def test_held_out_classes_keep_their_share() -> None:
  labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [50, 30, 11, 5, 1]))
  kept, held = splits.hold_out(labels, .1)
  assert sorted([*kept, *held]) == list(range(97))
  assert len(held) == 10
  counts = np.bincount(labels[held], minlength=5)
  assert np.abs(counts - np.array([5., 3., 1.1, .5, .1])).max() < 1
  assert counts[4] == 0  # a class keeps its only example


def test_the_order_of_names_does_not_matter() -> None:
  names = [f'{i}.jpg' for i in range(50)]
  forward = [names[i] for i in splits.scattered(map(str.encode, names), len(names), seed=1)]
  backward = [names[::-1][i] for i in splits.scattered(map(str.encode, names[::-1]), len(names), seed=1)]
  assert forward == backward != names
  assert [names[i] for i in splits.scattered(map(str.encode, names), len(names), seed=2)] != forward


def test_another_split_in_place_of_test_is_a_warning_once_of_each_source(caplog: pytest.LogCaptureFixture) -> None:
  for source in ('folder:warned', 'folder:warned', 'folder:another', 'folder:warned'):
    assert splits.resolve('test', ['train', 'val'], source=source) == 'val'
  assert [record.message for record in caplog.records] == [
      f'{source} has no split test; using val instead.' for source in ('folder:warned', 'folder:another')]
