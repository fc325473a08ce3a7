"""Parts of a config refuse unknown names, and say what is wrong in one form."""
from __future__ import annotations

import copy
import dataclasses
import pickle

import options
import pytest

from vit_jax.config import check
from vit_jax.config import schema as s
from vit_jax.config.schema import checks
from vit_jax.core.errors import UserError


@pytest.mark.parametrize('kind', options.classes(),
                         ids=lambda kind: kind.__name__)
def test_no_part_takes_an_unknown_name(kind: type) -> None:
  given = {'paths': '.*'} if kind is s.PathRule else {}
  part = kind(**given)
  with pytest.raises(checks.UnknownSetting, match=f"^{kind.__name__}: expected the name of a setting, got 'no_such'"):
    part.no_such = 1
  with pytest.raises(checks.UnknownSetting, match="got 'no_such'"):
    kind(**given, no_such=1)


def test_the_message_has_the_nearest_name_or_all() -> None:
  with pytest.raises(checks.UnknownSetting, match="got 'lenght'. Did you mean length"):
    s.Config(lenght='3 epochs')
  with pytest.raises(checks.UnknownSetting, match="got 'xyz'. Known: metric, patience, min_delta."):
    s.EarlyStop().xyz = 1


def test_known_names_can_be_set_copied_and_saved() -> None:
  config = s.Config(seed=3)
  config.data.recipe.mixup = .2
  for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
    assert again == config and again.data.recipe.mixup == .2


def test_a_setting_without_effect_is_named_with_its_default() -> None:
  recipe = s.Recipe(crop_area=(.5, 1.), antialias=True)
  assert list(checks.no_effect(recipe, 'data.recipe', ('crop_area', 'flip'), 'with x=1', 'Do that.')) == [
      'data.recipe.crop_area: expected its default (0.05, 1.0) with x=1, got (0.5, 1.0). It has no effect there. Do '
      'that.']


def test_all_settings_of_a_part_that_is_switched_off_have_no_effect() -> None:
  part = s.RandAugment(layers=0, magnitude=9., probability=.5)
  assert list(checks.combinations(part, s.Config(), 'data.recipe.randaugment')) == [
      f'data.recipe.randaugment.{name}: expected its default {default} with data.recipe.randaugment.layers=0, got '
      f'{value}. It has no effect there.' for name, default, value in (
          ('magnitude', 10., 9.), ('probability', 1., .5))]
  assert not list(checks.combinations(s.RandAugment(), s.Config(), 'r'))


def test_a_kind_also_has_the_settings_without_effect_of_its_base_classes() -> None:
  assert [text.partition(':')[0] for text in checks.combinations(s.Sgd(clip_parts=('.*',), decay_by=s.DecayBy.LR),
                                                                 s.Config(), 'o')] == ['o.clip_parts', 'o.decay_by']


@pytest.mark.parametrize(('value', 'text'), [
    (s.Crop.RESIZE, 'resize'), ('a', "'a'"), (10**5000, 'an integer of 16,610 bits'), ('x' * 100, "'xxx"),
    (True, 'True')], ids=lambda x: x if isinstance(x, str) else '')
def test_values_are_shown_as_they_are_set(value: object, text: str) -> None:
  message = checks.problem('a.b', 'c', value, 'Do that.')
  assert message.startswith(f'a.b: expected c, got {text}') and message.endswith('. Do that.') and len(message) < 130


@pytest.mark.parametrize('source, setting', [
    ('folder:photos', 'caption_column'), ('digits', 'label_column'), ('array_record:x', 'image_column'),
    ('mix:0.5*folder:a,0.5*folder:b', 'caption_column')])
def test_a_column_of_a_source_without_columns_is_refused(source: str, setting: str) -> None:
  found = check.problems(s.Config(data=dataclasses.replace(s.Data(source=source), **{setting: 'x'})))
  said = f"data.{setting}: expected '' with data.source={source!r}, which has no columns, got 'x'. Leave it out."
  assert len(found) == 1 and found[0].startswith(said)
  assert ('captions_train.jsonl' in found[0]) == (setting == 'caption_column')


@pytest.mark.parametrize('source', ['parquet:x', 'mine:x', 'mix:0.5*folder:a,0.5*parquet:b', 'hf:a/b', 'tfds:x'])
def test_a_column_of_other_sources_is_not_refused(source: str) -> None:
  data = s.Data(source=source, caption_column='x', label_column='y', image_column='z')
  assert check.problems(s.Config(data=data)) == []


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
