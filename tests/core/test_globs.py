"""Patterns that find names."""
from __future__ import annotations

import pytest

from vit_jax.core import globs


@pytest.mark.parametrize(('name', 'pattern'), [
    ('B/16', '*b16*'), ('DINOv2-reg-B/14', 'dinov2*b14'), ('ViT-B_16-i21k', 'vitb16*'), ('ViT-B_16-i21k', '*-i21k'),
    ('R50+B/16', 'r50b16'), ('S/8', '?/8'), ('B/16', '[A-C]/16'), ('mae_i1k', 'i1k'), ('B/16', '*')])
def test_case_and_separators_may_be_left_out(name: str, pattern: str) -> None:
  assert globs.matches(name, pattern)


@pytest.mark.parametrize(('name', 'pattern'), [
    ('B/16', '*b32*'), ('B/16', '16*'), ('S/16', '[A-C]/16'), ('Ti/16', '?/16'), ('mae_i1k', 'i21k')])
def test_other_names_do_not_match(name: str, pattern: str) -> None:
  assert not globs.matches(name, pattern)


def test_a_pattern_without_a_match_gets_the_most_similar_names() -> None:
  names = ['B/16', 'DINOv2-B/14', 'Mixer-B/16']
  text = globs.no_match('*dinov2_vitb14*', names)
  assert text.endswith("of 3 names, got '*dinov2_vitb14*'. Did you mean DINOv2-B/14?")
  assert 'Did you mean' not in globs.no_match('zzz', names)
