"""What building a run checks before anything is allocated."""
from __future__ import annotations

import logging

import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.source import Source
from vit_jax.data.sources import opening
from vit_jax.jobs import build


def digits(num_examples: int, **settings: bool) -> tuple[schema.Data, Source]:
  data = schema.Data(source='digits', num_examples=num_examples, **settings)
  return data, opening.open_split(data, 'train', image_px=(8, 8))


@pytest.mark.parametrize('num_examples', [1_281_167, 1_000, 1_422, 1_452])
def test_a_dataset_of_another_size_than_the_config_says_is_refused(num_examples: int) -> None:
  with pytest.raises(UserError, match=f'data.num_examples: expected 1,437, the size of train of digits, got '
                                      f'{num_examples:,}.*data.num_examples=0.*data.any_num_examples=true'):
    build.check_size(*digits(num_examples))


@pytest.mark.parametrize('num_examples', [0, 1_437, 1_424, 1_451])
def test_one_percent_more_or_less_and_unknown_sizes_are_accepted(num_examples: int) -> None:
  build.check_size(*digits(num_examples))


def test_another_size_can_be_intended(caplog: pytest.LogCaptureFixture) -> None:
  build.check_size(*digits(60_000, any_num_examples=True))
  assert 'data.num_examples=60,000, by which epochs are counted, but digits/train has 1,437' in caplog.text
  with caplog.at_level(logging.WARNING):
    build.check_size(schema.Data(source='synthetic', num_examples=60_000), digits(0)[1])
  assert len(caplog.records) == 1
