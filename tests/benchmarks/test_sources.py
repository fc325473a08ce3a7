"""The comparison of sources: a ratio to the first one, and messages in place of a traceback."""
from __future__ import annotations

import pathlib

import pytest

from benchmarks import sources
from tests.data import packed
from vit_jax.config import schema
from vit_jax.data.sources import opening


def test_sources_are_compared_with_the_first(tmp_path: pathlib.Path) -> None:
  packed.write_tars(tmp_path / 'tars', 'train', packed.examples(9))
  tars = opening.open_split(schema.Data(source=f'wds:{tmp_path / "tars"}'), 'train', image_px=(32, 32))
  found = sources.measure({'one': tars, 'two': tars}, num_images=5, rounds=2)
  assert list(found) == ['read', 'read, decode and crop']
  for speeds in found.values():
    assert speeds['one'].ratio == 1 and speeds['two'].median > 0


def test_a_source_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
  assert sources.main(['wds:/none']) == 2 and sources.main([]) == 2
  said = capsys.readouterr().err
  assert 'error: /none: expected this file' in said and 'usage: python -m benchmarks.sources' in said
