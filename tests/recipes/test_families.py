"""The rows of the families that people start from now."""
from __future__ import annotations

import re

from vit_jax.recipes import catalog, families
from vit_jax.weights import preprocess


def test_every_named_network_is_of_a_family_with_a_row() -> None:
  kinds = [kind for family in families.FAMILIES for kind in family.networks]
  for name in families.PUBLISHED:
    found = [(title, source) for pattern, title, source in kinds if re.match(pattern, name)]
    assert (catalog.model(name).family, catalog.model(name).source) == found[0], name


def test_no_license_of_one_family_is_said_of_another() -> None:
  repositories = ('facebook/dinov2-base', 'facebook/dinov3-vits16', 'openai/clip-vit-base', 'laion/CLIP-ViT-B-32',
                  'timm/vit_base_patch16_clip_224.metaclip_400m', 'timm/eva02_base_patch14.mim', 'facebook/PE-Core',
                  'timm/vit_small_patch16_rope_224.naver_in1k', 'apple/aimv2-large', 'google/tipsv2-b14',
                  'facebook/ijepa_vith14_1k', 'google/siglip2-base-patch16-224')
  for name in repositories:
    assert len([f.key for f in families.FAMILIES for pattern, *_ in f.hub if re.fullmatch(pattern, name)]) == 1, name


def test_the_images_of_a_family_are_prepared_as_its_row_says() -> None:
  row = next(family for family in families.FAMILIES if family.key == 'tips')
  found = preprocess.decide([], family='tips', own_px=(448, 448))[0]
  assert (found.mean, found.resize_px, found.interpolation) == (
      preprocess.NORMS[row.norm]['mean'], row.resize, row.interpolation)
  assert all(family.norm in preprocess.NORMS for family in families.FAMILIES if family.key)
