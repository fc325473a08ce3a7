"""Tests of the sizes of BiT, Mixer and EfficientNet by name, and of all names together."""
from __future__ import annotations

import pytest

from vit_jax.config import model_options, schema
from vit_jax.core.types import UserError
from vit_jax.recipes import rival_sizes, sizes

NAMES = ['B/16', 'R50+B/16', 'ViT-R50+L/32', 'DINOv2-B/14', 'LV-ViT-S/16', 'DeiT-distilled-B/16', 'BiT-R50x1',
         'BiT-R200x3', 'Mixer-S/8', 'Mixer-H/14', *(f'EfficientNet-{name}' for name in rival_sizes.EFFICIENTNET)]


@pytest.mark.parametrize('name', NAMES)
def test_a_model_of_any_kind_is_found_by_its_name_and_fits(name: str) -> None:
  assert not [*model_options.faults(sizes.model(name), (224, 224))]


def test_a_name_gives_the_published_sizes() -> None:
  assert rival_sizes.resnet('R152x4') == schema.ResNet(layers=(3, 8, 36, 3), width=256)
  assert rival_sizes.mixer('B/32') == schema.Mixer(patch=32)
  assert rival_sizes.mixer('H/14').tokens_mlp == 640
  assert rival_sizes.efficientnet('L2') == schema.EfficientNet(width_factor=4.3, depth_factor=5.3, dropout=.5)
  assert rival_sizes.efficientnet_px('L2') == 800


def test_hybrids_have_the_stems_of_their_files() -> None:
  tiny, small, base = (sizes.published(f'ViT-{name}') for name in ('R+Ti/16', 'R26+S/32', 'R50+B/16'))
  assert tiny.stem == schema.ResNetStem(layers=()) and tiny.patch == 32
  assert small.stem == schema.ResNetStem(layers=(2, 2, 2, 2)) and small.patch == 32
  assert base.stem == schema.ResNetStem(layers=(3, 4, 9)) and base.patch == 16 and base.width == 768


def test_two_models_of_a_name_share_nothing() -> None:
  first, second = sizes.published('R50+B/16'), sizes.published('R50+B/16')
  first.stem.width = 32
  assert second.stem.width == 64


@pytest.mark.parametrize('name, said', [
    ('BiT-R34x1', "Unknown ResNet 'R34x1': want DEPTHxFACTOR such as R50x1, with DEPTH one of R50 R101 R152 R200"),
    ('BiT-R50x0', "Unknown ResNet 'R50x0'"), ('Mixer-B', "Unknown Mixer 'B': want SIZE/PATCH such as B/16"),
    ('EfficientNet-B9', "Unknown EfficientNet 'B9': want one of B0 B1 B2 B3 B4 B5 B6 B7 B8 L2"),
    ('ResNet-50', "Unknown model size 'ResNet-50'")])
def test_an_unknown_name_lists_the_known_ones_of_its_kind(name: str, said: str) -> None:
  with pytest.raises(UserError) as error:
    sizes.model(name)
  assert said in str(error.value)
