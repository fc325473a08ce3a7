"""The arguments of config files."""
from __future__ import annotations

import pytest

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

KINDS = {'size': ('B/16', 'S/16'), 'aug': ('none', 'light1'), 'px': ('',)}


@pytest.mark.parametrize(('text', 'want'), [
    ('', {'size': 'B/16', 'aug': 'none', 'px': ''}),
    ('light1,S/16', {'size': 'S/16', 'aug': 'light1', 'px': ''}),
    (' px=384 , aug=light1,', {'size': 'B/16', 'aug': 'light1', 'px': '384'})])
def test_config_arguments_are_words_or_pairs_in_any_order(text: str, want: dict[str, str]) -> None:
  assert s.parse_arg(text, **KINDS) == want


@pytest.mark.parametrize(('text', 'said'), [
    ('S/17,v3', ["'S/17': expected one of the known", "'v3': expected one of the known", 'size=B/16 | S/16', 'px=...']),
    ('size=M/16', ["size: expected one of B/16, S/16, got 'M/16'. Did you mean S/16?"]),
    ('B/16,S/16', ['size: expected one value, got B/16 and S/16'])])
def test_config_arguments_that_are_wrong_are_all_listed_with_the_known_ones(text: str, said: list[str]) -> None:
  with pytest.raises(UserError) as error:
    s.parse_arg(text, **KINDS)
  assert all(part in str(error.value) for part in said), error.value


def test_a_config_without_arguments_says_so() -> None:
  with pytest.raises(UserError, match="expected none after the colon, as this config takes none, got 'S/16'"):
    s.parse_arg('S/16')


def test_the_former_argument_mesh_is_explained() -> None:
  with pytest.raises(UserError, match=r"'mesh=v3:16x16': a run is laid out for the devices it runs on, .*--topology"):
    s.parse_arg('mesh=v3:16x16', size=('B/16',))
