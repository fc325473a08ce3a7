"""Every config says what differs, and the page of fidelity has the differences of every docstring."""
from __future__ import annotations

import re

import deviations
import pytest

CONFIGS = deviations.of_configs()


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_says_what_differs_or_that_nothing_is_known(name: str) -> None:
  text = CONFIGS[name]
  assert text, f'configs/{name}.py: a section "Differs:", if only "No difference is known."'
  assert text.endswith('.') and '|' not in text


def test_the_page_has_every_difference_and_every_config() -> None:
  lines = deviations.tables()
  text = '\n'.join(lines)
  for name, difference in CONFIGS.items():
    assert f'`{name}`' in text
    is_shown = difference and not re.match('No difference|It follows|As ', difference)
    assert not is_shown or difference.removeprefix("It is a small form of the paper's method") in text, name
  for one in deviations.of_package():
    assert one.in_short() in text and len(one.in_short()) > 40
  assert text.count('| `vit_paper` |') == 0 and '`vit_h14_jft`' in next(line for line in lines if '`vit_paper`' in line)


def test_a_difference_of_the_package_names_a_program_or_a_paper() -> None:
  known = ('big_vision', 'vision_transformer', 'timm', 'DeiT', 'dino', 'MAE', 'TokenLabeling', 'paper', 'PyTorch',
           'torchvision', 'Pillow', 'TensorFlow', 'noisystudent', 'transformers', 'DINO', 'CLIP')
  found = deviations.of_package()
  assert len(found) >= 8
  for one in found:
    assert any(name in one.of for name in known) and one.text.endswith('.') and '|' not in one.text, one


def test_no_docstring_tells_of_a_difference_in_other_words() -> None:
  words = re.compile(r'[Ww]here this differs|Differences?: |^ *Differs:', re.M)
  found = [path for path in (deviations.ROOT / 'vit_jax').rglob('*.py') if words.search(path.read_text())]
  assert found == []


def test_sections_and_paragraphs_end_where_the_next_begins() -> None:
  section = deviations._SECTION.search('Title.\n\nDiffers:  One thing,\n          and another.\nRun:      x\n')
  assert section and deviations.joined(section[1]) == 'One thing, and another.'
  text = 'About.\n\nDiffers from big_vision: one\nthing.\n\nDiffers from timm, and MAE: another.\n\nThe end.'
  assert deviations._PARAGRAPH.findall(text) == [('big_vision', 'one\nthing.'), ('timm, and MAE', 'another.')]
