"""The mutations of `python -m tests.mutations` are of lines that exist."""
from __future__ import annotations

from mutations import MUTATIONS, ROOT


def test_the_text_that_a_mutation_replaces_stands_once_in_its_file() -> None:
  stale = [one for one in MUTATIONS if (ROOT / 'vit_jax' / one.file).read_text().count(one.old) != 1]
  assert not stale and len(MUTATIONS) >= 40
