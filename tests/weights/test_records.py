"""The records of the families of published weights."""
from __future__ import annotations

import re

import pytest

from vit_jax.weights import known_weights, preprocess, recognize
from vit_jax.weights.families import FAMILIES

NEEDED = {'mean', 'std', 'geometry', 'interpolation', 'antialias', 'resize'}


def test_every_name_of_weights_has_one_address_and_one_meaning() -> None:
  assert sum(len(one.addresses) for one in FAMILIES) == len(known_weights.NAMES)
  for family in FAMILIES:
    for name in family.addresses:
      assert any(re.fullmatch(rule.pattern, name) for rule in family.published), name
      others = [rule.pattern for one in FAMILIES if one is not family for rule in one.published]
      assert not [pattern for pattern in others if re.fullmatch(pattern, name)], name


@pytest.mark.parametrize('name', [
    'facebook/dinov2-base', 'facebook/dinov3-vits16', 'openai/clip-vit-base', 'laion/CLIP-ViT-B-32',
    'timm/vit_base_patch16_clip_224.metaclip_400m', 'timm/eva02_base_patch14.mim', 'facebook/PE-Core',
    'timm/vit_small_patch16_rope_224.naver_in1k', 'apple/aimv2-large', 'google/tipsv2-b14',
    'facebook/ijepa_vith14_1k', 'google/siglip2-base-patch16-224'])
def test_no_license_of_one_family_is_said_of_another(name: str) -> None:
  assert len([one for family in FAMILIES for one in family.licenses if re.fullmatch(one.pattern, name)]) == 1


@pytest.mark.parametrize('label', recognize.LABELS)
def test_the_images_of_a_format_are_prepared_as_its_record_says(label: str) -> None:
  values = recognize.usual(label).values
  assert values.keys() >= NEEDED and any(
      (values['mean'], values['std']) == (norm['mean'], norm['std']) for norm in preprocess.NORMS.values())
  found = preprocess.decide([], usual=recognize.usual(label), own_px=(448, 448))[0]
  assert (found.mean, found.interpolation) == (values['mean'], values['interpolation'])


def test_files_of_the_authors_have_a_family_with_usual_images() -> None:
  """A file with the names of no program is reported under the name of its family."""
  for family in FAMILIES:
    for files in family.files:
      label = files.label or ({'transformers': 'huggingface'}.get(files.program, family.name))
      assert label in recognize.LABELS, (family.name, files.program)
