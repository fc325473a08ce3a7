"""Mutated image files never end a program, hang or take memory without bound."""
from __future__ import annotations

import pathlib

import pytest

from tests import fuzzing
from tests.data import fuzz_images


def test_mutated_files_are_decoded_or_refused_with_a_reason() -> None:
  found = fuzz_images.run(100, seed=1)
  decoded, refused = found['decoded'], found['refused']
  assert sum(decoded.values()) + sum(refused.values()) == 100  # type: ignore[attr-defined]
  assert sum(decoded.values()) > 10 and sum(refused.values()) > 10  # type: ignore[attr-defined]


@pytest.mark.slow(reason='30 s: 2,000 files')
@pytest.mark.skipif(not pathlib.Path('/proc/self/statm').is_file(), reason='sets a limit of memory as Linux does')
def test_2_000_mutated_files_stay_within_2_gib_and_crash_nothing(tmp_path: pathlib.Path) -> None:
  found, = fuzzing.run('tests.data.fuzz_images', fuzzing.CASES, 0, home=tmp_path)
  assert sum(found['decoded'].values()) + sum(found['refused'].values()) == fuzzing.CASES
  assert set(found['refused']) == {'JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'AVIF', 'JPEG2000', 'PPM'}
