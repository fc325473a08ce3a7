"""The list of published weights."""
from __future__ import annotations

import pytest

import vit_jax
from vit_jax.core.errors import UserError
from vit_jax.weights import addresses, published


def test_every_known_name_is_described() -> None:
  found = vit_jax.list_weights()
  assert [one.name for one in found] == [*published.NAMES]
  assert all(one.address == published.address(one.name) and one.parameters > 0 and one.data for one in found)


@pytest.mark.parametrize(('name', 'model', 'px', 'num_classes', 'license'), [
    ('R50+ViT-B_16-i21k', 'R50+B/16', 224, 21_843, 'Apache-2.0'), ('ViT-L_16-i1k', 'L/16', 384, 1_000, 'Apache-2.0'),
    ('ViT-L_16-224-i1k', 'L/16', 224, 1_000, 'Apache-2.0'), ('ViT-B_8-i1k', 'B/8', 0, 1_000, 'Apache-2.0'),
    ('BiT-M-R152x4-ILSVRC2012', 'BiT-R152x4', 480, 1_000, 'Apache-2.0'),
    ('deit_base_distilled_patch16_384', 'DeiT-distilled-B/16', 384, 1_000, 'Apache-2.0'),
    ('deit_3_huge_224_1k', 'DeiT-III-H/14', 224, 1_000, 'Apache-2.0'),
    ('mae_finetuned_vit_huge', 'H/14', 224, 1_000, 'CC-BY-NC-4.0'),
    ('mae_visualize_vit_base', 'B/16', 224, 0, 'CC-BY-NC-4.0'),
    ('dino_deitsmall8_pretrain', 'S/8', 224, 0, 'Apache-2.0'),
    ('dinov2_vitg14_reg4', 'DINOv2-reg-g/14', 518, 0, 'Apache-2.0'),
    ('tips_v2_so14_vision', 'TIPSv2-So400m/14', 448, 0, 'CC-BY-4.0')])
def test_a_name_says_what_a_file_is(name: str, model: str, px: int, num_classes: int, license: str) -> None:
  (found,) = [one for one in vit_jax.list_weights(name) if one.name == name]
  assert (found.model, found.px, found.num_classes, found.license) == (model, px, num_classes, license)


def test_parameters_include_the_hidden_layer_of_pre_training() -> None:
  # The size of this published file, 393.69 MiB, is that of 103,186,515 numbers in f32 and the names.
  (found,) = [one for one in vit_jax.list_weights('ViT-B_16-i21k') if one.name == 'ViT-B_16-i21k']
  assert found.parameters == 103_186_515


def test_weights_are_found_by_name_and_by_network() -> None:
  assert [one.name for one in vit_jax.list_weights('*s16*sam*')] == ['ViT-S_16-sam', 'ViT-S_16-gsam']
  assert {one.model for one in vit_jax.list_weights('dinov2-reg*')} == {
      'DINOv2-reg-S/14', 'DINOv2-reg-B/14', 'DINOv2-reg-L/14', 'DINOv2-reg-g/14'}


def test_a_listed_name_is_asked_for_at_its_address() -> None:
  asked: list[str] = []

  def opener(address: str, *_: object, **__: object) -> None:
    asked.append(address)
    raise OSError('no network in tests')
  for one in published.list_weights('mixer*i21k'):
    with pytest.raises((UserError, OSError)):
      addresses.local(one.name, opener=opener)  # type: ignore[arg-type]
  assert [address.rpartition('/')[2] for address in dict.fromkeys(asked)] == ['Mixer-B_16.npz', 'Mixer-L_16.npz']


@pytest.mark.parametrize(('where', 'says'), [
    ('facebook/dinov3-vits16-pretrain-lvd1689m', 'License of facebook/dinov3-vits16-pretrain-lvd1689m: DINOv3 License. '
     'Its publisher gives it out on request only.'),
    ('hf://google/siglip2-base-patch16-224', 'License of google/siglip2-base-patch16-224: Apache-2.0.'),
    ('timm/eva02_base_patch14_224.mim_in22k', 'License of timm/eva02_base_patch14_224.mim_in22k: MIT.'),
    ('mae_pretrain_vit_base', 'License of mae_pretrain_vit_base: CC-BY-NC-4.0.'), ('own.safetensors', '')])
def test_the_license_of_a_known_name_is_said(where: str, says: str) -> None:
  assert published.terms(where) == says


def test_an_empty_list_of_weights_is_explained_by_a_warning() -> None:
  with pytest.warns(UserWarning, match=r"list_weights: .* got 'clip'.* Other names that work: .*AugReg.*timm/NAME"):
    assert vit_jax.list_weights('clip') == []
  assert 'deit_tiny_patch16_224' in [one.name for one in vit_jax.list_weights('*vit_tiny*')]  # by its network
