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
  assert len(list(checks.switched_off(recipe, 'r', 'here'))) == 2
  assert not list(checks.switched_off(s.PathRule(''), 'r', 'here'))


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
