from __future__ import annotations

import pytest

from vit_jax.config import durations
from vit_jax.core.errors import UserError


@pytest.mark.parametrize(('text', 'want'), [
    ('90 epochs', (90, 'epochs')), ('1 epoch', (1, 'epochs')), ('20_000 steps', (20000, 'steps')),
    ('30e6 examples', (30e6, 'examples')), ('10 %', (10, '%')), ('2.5%', (2.5, '%')), ('0 steps', (0, 'steps'))])
def test_durations_are_a_number_and_a_unit(text: str, want: tuple[float, str]) -> None:
  assert durations.parse(text) == want


@pytest.mark.parametrize('text', ['', '10', 'epochs', '-3 steps', '3 years', '3 steps 4', 'nan epochs'])
def test_anything_else_is_refused_with_examples(text: str) -> None:
  with pytest.raises(UserError, match='expected a number and a unit'):
    durations.parse(text)


@pytest.mark.parametrize(('length', 'examples', 'batch', 'steps'), [
    ('14 epochs', 303_000_000, 4096, 1_035_645),     # ViT-L/16 on JFT, Table 2
    ('90 epochs', 1_268_355, 1024, 111_477),         # Better plain ViT baselines
    ('150 epochs', 1_268_355, 1024, 185_794),
    ('300 epochs', 1_268_355, 4096, 92_897)])
def test_published_lengths_come_out(length: str, examples: int, batch: int, steps: int) -> None:
  assert durations.lengths(length, num_examples=examples, batch_size=batch).total_steps == steps


def test_parts_of_a_run() -> None:
  lengths = durations.lengths('10 epochs', num_examples=100, batch_size=8)
  assert lengths.total_steps == 125 and lengths.steps_an_epoch == 12.5
  assert [lengths.steps(t) for t in ('10 %', '2 epochs', '40 steps', '80 examples', '0 steps', '0.001 %')] == [
      13, 25, 40, 10, 0, 1]


def test_a_run_cannot_be_a_percentage_of_itself() -> None:
  with pytest.raises(UserError, match='length: expected steps, epochs or examples'):
    durations.lengths('10 %', num_examples=1, batch_size=1)


def test_too_long_a_duration_is_refused_with_the_longest() -> None:
  with pytest.raises(UserError, match=r"expected at most 1,000,000,000 epochs, got '2e9 epochs'. Set a shorter dur"):
    durations.parse('2e9 epochs')


def test_a_run_of_more_steps_than_can_be_counted_names_its_setting() -> None:
  with pytest.raises(UserError, match=r"^length: expected at most 2,147,483,647 steps, got '9e8 epochs'"):
    durations.lengths('9e8 epochs', num_examples=1000, batch_size=8)
