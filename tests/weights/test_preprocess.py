"""Which rule says how images are made ready: a person, the files beside, the name, and last what is usual."""
from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import pytest

from vit_jax.config.schema import Gelu, Geometry, Interpolation
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.weights import preprocess, published, recognize, sidecars
from vit_jax.weights.preprocess import PreprocessRule

IMAGENET = (.485, .456, .406)


def decide(rules: Sequence[PreprocessRule], family: str = 'timm',
           px: tuple[int, int] | None = (224, 224)) -> preprocess.Preprocess:
  return preprocess.decide(rules, usual=recognize.usual(family), own_px=px)[0]


def by_name(name: str) -> tuple[PreprocessRule, ...]:
  return published.find([name]).rules


def test_the_first_rule_that_knows_a_value_decides_it_and_is_named() -> None:
  person = preprocess.parse('imagenet,resize=256')
  beside = [PreprocessRule('config.json', {'resize': .5, 'antialias': False})]
  found = decide([*person, *beside, *by_name('vit_base_patch16_224.augreg_in1k')])
  assert found.mean == IMAGENET and found.resize_px == 256 and not found.antialias
  assert found.interpolation is Interpolation.BICUBIC
  assert found.rule == ('mean, std, resize by --preprocess; image_px by its positions; geometry, interpolation by '
                        'the name vit_base_patch16_224.augreg_in1k; antialias by config.json')


def test_the_usual_of_a_family_is_a_warning() -> None:
  found, warnings = preprocess.decide([], usual=recognize.usual('timm'), own_px=(224, 224))
  assert found.mean == (.5, .5, .5) and found.resize_px == 248
  assert warnings == (
      'The preprocessing of images is a guess: mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5); short side resized to 248 '
      'px, center crop of 224 x 224 px (geometry torchvision); bicubic, antialiased is what is usual for timm. If it '
      'is wrong, set it with --preprocess=half, imagenet or clip, and resize=, geometry=, interpolation=.',)
  some = preprocess.decide(preprocess.parse('half,resize=0'), usual=recognize.usual('timm'), own_px=None)[1]
  assert some[0].startswith('The preprocessing of images is a guess: bicubic, antialiased is what is usual for timm.')
  rules = preprocess.parse('half,resize=0,interpolation=bicubic')
  assert preprocess.decide(rules, usual=recognize.usual('timm'), own_px=None)[1] == ()


def test_geometry_is_that_of_the_familys_own_program() -> None:
  found = {family: decide([], family=family).geometry.value for family in recognize.LABELS}
  others = {family: how for family, how in found.items() if how != 'torchvision'}
  assert others == {'vision_transformer': 'big_vision', 'big_vision': 'big_vision', 'bit': 'big_vision',
                    'huggingface': 'huggingface'}
  assert decide(preprocess.parse('geometry=torchvision'), family='huggingface').geometry is Geometry.TORCHVISION


def test_only_big_vision_truncates_and_only_without_antialias() -> None:
  assert [family for family in recognize.LABELS if decide([], family=family).truncate] == ['big_vision']
  assert not decide(preprocess.parse('truncate=false'), family='big_vision').truncate
  assert not decide(preprocess.parse('interpolation=bicubic,antialias=true'), family='big_vision').truncate
  assert decide(preprocess.parse('truncate=true'), family='vision_transformer').truncate
  assert preprocess.recipe_values(decide([], family='big_vision'))['truncate']
  assert ', area, truncated, mean' in preprocess.describe(decide([], family='big_vision'))


def test_the_size_of_images_is_that_of_the_positions_unless_a_person_says_otherwise() -> None:
  assert decide([PreprocessRule('config.json', {'image_px': (224, 224)})], px=(384, 384)).image_px == (384, 384)
  assert decide(preprocess.parse('image=320x480'), px=(384, 384)).image_px == (320, 480)
  assert decide([], px=None).image_px == (224, 224)


@pytest.mark.parametrize(('given', 'resize', 'expected'), [
    ('image=336', 256, 384),            # as 256 to 224
    ('image=112', 256, 128),
    ('image=224x320', 256, 320),        # at least as large as the crop
    ('image=336', .875, 384),
    ('image=320x480', .875, 480),
    ('image=336', 0, 0),                # without preserving the aspect ratio
    ('image=336,resize=400', 256, 400)])
def test_the_short_side_follows_the_size_of_images_that_a_person_sets(
    given: str, resize: int | float, expected: int) -> None:
  beside = PreprocessRule('config.json', {'image_px': (224, 224), 'resize': resize})
  assert decide([*preprocess.parse(given), beside], px=(224, 224)).resize_px == expected


@pytest.mark.parametrize(('keeps', 'short_px'), [(.875, 384), (.6, 560), (1., 336), (1.5, 224)])
def test_the_part_that_a_square_crop_keeps_gives_one_short_side_whatever_the_size_is_from(
    keeps: float, short_px: int) -> None:
  px, size = (336, 336), 'image=336x336'
  beside = PreprocessRule('config.json', {'image_px': (224, 224), 'resize': keeps})
  of_file = PreprocessRule('config.json', {'image_px': px, 'resize': keeps})
  found = [decide([beside], px=px), decide([of_file], px=None), decide(preprocess.parse(f'{size},crop={keeps}'))]
  if keeps <= 1.:
    found.append(decide([*preprocess.parse(size), beside]))
  assert [how.resize_px for how in found] == [short_px] * len(found)


@pytest.mark.parametrize(('name', 'mean', 'resize', 'how'), [
    ('vit_tiny_patch16_224.safetensors', .5, 248, 'bicubic'),
    ('deit_tiny_patch16_224-a1311bcf.pth', .485, 256, 'bicubic'),
    ('vit_base_patch16_rope_mixed_224.naver_in1k.safetensors', .485, 248, 'bicubic'),
    ('deit_small_patch16_224.fb_in1k', .485, 248, 'bicubic'),
    ('timm/vit_base_patch16_224.augreg2_in21k_ft_in1k', .5, 248, 'bicubic'),
    ('deit3_base_patch16_224.fb_in1k', .485, 248, 'bicubic'),
    ('deit3_base_patch16_224.fb_in22k_ft_in1k', .485, 224, 'bicubic'),
    ('deit_3_base_224_21k.pth', .485, 224, 'bicubic'),
    ('mae_pretrain_vit_base.pth', .485, 256, 'bicubic'), ('mae_finetuned_vit_huge.pth', .485, 256, 'bicubic'),
    ('dino_deitsmall16_pretrain.pth', .485, 256, 'bicubic'),
    ('hf://timm/vit_small_patch16_224.dino', .485, 248, 'bicubic'),
    ('dinov2_vits14_reg4_pretrain.pth', .485, 224, 'bicubic'), ('ViT-B_16.npz', .5, 0, 'bilinear'),
    ('ViT-B-16.pt', .48145466, 224, 'bicubic'), ('Mixer-B_16.npz', .5, 0, 'bilinear'),
    ('R50+ViT-L_32.npz', .5, 0, 'bilinear'), ('mixer_b16_224', .5, 256, 'bicubic'),
    ('vit_small_r26_s32_224', .5, 248, 'bicubic'), ('vit_base_patch16_dinov3.lvd1689m', .485, 224, 'bicubic'),
    ('dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth', .430, 224, 'bicubic'), ('PE-Core-B16-224.pt', .5, 0, 'bilinear'),
    ('vit_base_patch16_clip_224.openai', .48145466, 248, 'bicubic'), ('siglip2-base-patch16-224', .5, 0, 'bicubic'),
    ('aimv2_large_patch14_224.apple_pt', .48145466, 224, 'bicubic'), ('tipsv2-b14', 0., 0, 'bilinear'),
    ('tips_v2_b14_vision.npz', 0., 0, 'bilinear'),
    ('Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224.npz', .5, 0,
     'bilinear')])
def test_published_names_say_how(name: str, mean: float, resize: int, how: str) -> None:
  found = decide(by_name(name))
  assert (found.mean[0], found.resize_px, found.interpolation.value) == (mean, resize, how)
  assert 'mean, std' in found.rule and 'by the name' in found.rule


@pytest.mark.parametrize(('name', 'mean', 'px', 'resize', 'how'), [
    ('BiT-M-R50x1-ILSVRC2012.npz', .5, 480, 0, 'bilinear'), ('BiT-S-R101x1.npz', .5, 224, 0, 'bilinear'),
    ('resnetv2_50x1_bit.goog_in21k_ft_in1k', .5, 448, 448, 'bilinear'),
    ('resnetv2_152x4_bitm', .5, 480, 480, 'bilinear'), ('resnetv2_101x3_bit.goog_in21k', .5, 224, 256, 'bilinear'),
    ('resnetv2_50x1_bit.goog_distilled_in1k', .5, 224, 256, 'bicubic'),
    ('resnetv2_152x2_bit.goog_teacher_in21k_ft_in1k_384', .5, 384, 384, 'bicubic'),
    ('tf_efficientnet_b0.ap_in1k', .5, 224, 256, 'bicubic'),
    ('tf_efficientnet_b0-0af12548.pth', .485, 224, 256, 'bicubic'),
    ('timm/tf_efficientnet_l2.ns_jft_in1k_475', .485, 475, 507, 'bicubic')])
def test_published_names_of_convolutional_networks_say_how_and_for_which_size(
    name: str, mean: float, px: int, resize: int, how: str) -> None:
  found = decide(by_name(name), px=None)
  assert (found.mean[0], found.image_px, found.resize_px, found.interpolation.value) == (mean, (px, px), resize, how)


@pytest.mark.parametrize('text', ['soft', 'resize=much', 'resize=-1', 'resize=99999', 'image=12y', 'image=0',
                                  'image=224x99999', 'image=１２', 'crop=0', 'crop=nan', 'crop=x',
                                  'interpolation=cubist', 'antialias=yes', 'truncate=1'])
def test_what_cannot_be_understood_is_refused(text: str) -> None:
  with pytest.raises(UserError, match='expected one of|=resize: expected a whole number, 1 to 16,384|'
                     '=image: expected a (size such as|whole)|=crop: expected a number, 0.01 to 10'):
    preprocess.parse(text)


def test_the_short_side_and_the_part_that_the_crop_keeps_are_alternatives() -> None:
  with pytest.raises(UserError, match='--preprocess: expected resize or crop, got both. Leave one of them out.'):
    preprocess.parse('imagenet,resize=256,crop=0.9')


def beside(folder: pathlib.Path, **files: dict) -> preprocess.Known:
  for name, content in files.items():
    (folder / f'{name}.json').write_text(json.dumps(content))
  return sidecars.read(folder / 'model.safetensors')


VIT = {'model_type': 'vit', 'num_attention_heads': 12, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-12, 'image_size': 384,
       'id2label': {'1': 'dog', '0': 'cat'}}


def test_transformers_files_tell_of_heads_gelu_epsilon_size_and_classes(tmp_path: pathlib.Path) -> None:
  told = beside(tmp_path, config=VIT | {'hidden_act': 'gelu_new'}, preprocessor_config={
      'image_mean': [.1, .1, .1], 'image_std': [.2, .2, .2], 'size': 384, 'resample': 2, 'do_normalize': True})
  assert told.hints[:5] == (12, 0, Gelu.TANH, 1e-12, (384, 384)) and told.class_names == ('cat', 'dog')
  assert told.rules[0].values == {'mean': (.1, .1, .1), 'std': (.2, .2, .2), 'interpolation': Interpolation.BILINEAR,
                                  'antialias': True, 'image_px': (384, 384), 'resize': 0,
                                  'geometry': Geometry.HUGGINGFACE}
  assert beside(tmp_path, config=VIT | {'id2label': {'0': 'LABEL_0', '1': 'LABEL_1'}}).class_names == ()


@pytest.mark.parametrize(('content', 'px', 'resize', 'geometry'), [
    ({'size': {'height': 224, 'width': 192}}, (224, 192), 0, 'huggingface'),
    ({'size': [224, 192]}, (224, 192), 0, 'huggingface'),
    ({'size': {'shortest_edge': 256}, 'do_center_crop': True, 'crop_size': {'height': 224, 'width': 224}},
     (224, 224), 256, 'torchvision'),
    ({'size': 256, 'do_center_crop': True, 'crop_size': 224}, (224, 224), 256, 'huggingface'),
    ({'size': 256, 'do_center_crop': True, 'crop_size': 224, 'feature_extractor_type': 'DeiTFeatureExtractor'},
     (224, 224), 256, 'huggingface'),
    ({'size': 224, 'do_center_crop': True, 'crop_size': 224, 'feature_extractor_type': 'CLIPFeatureExtractor'},
     (224, 224), 224, 'torchvision'),  # of openai/clip-vit-base-patch32: one number is the short side there
    ({'size': 256, 'do_center_crop': True, 'crop_size': 224, 'image_processor_type': 'BitImageProcessor'},
     (224, 224), 256, 'torchvision'),
    ({'size': {'height': 256, 'width': 256}, 'do_center_crop': True, 'crop_size': 224,
      'image_processor_type': 'CLIPImageProcessor'}, (224, 224), 256, 'huggingface')])
def test_sizes_in_all_the_ways_they_have_been_written(
    content: dict, px: tuple[int, int], resize: int, geometry: str, tmp_path: pathlib.Path) -> None:
  values = beside(tmp_path, preprocessor_config=content).rules[0].values
  assert (values['image_px'], values['resize'], values['geometry'].value) == (px, resize, geometry)


def test_images_that_are_not_normalized_or_otherwise_scaled(tmp_path: pathlib.Path) -> None:
  rule = beside(tmp_path, preprocessor_config={'do_normalize': False}).rules[0]
  assert rule.values == {'mean': (0., 0., 0.), 'std': (1., 1., 1.)}
  for wrong in ({'rescale_factor': 1 / 127.5}, {'do_rescale': False}):
    with pytest.raises(UserError, match='images here are divided by 255'):
      beside(tmp_path, preprocessor_config=wrong)


def test_an_unknown_activation_is_an_error_and_a_config_of_others_says_nothing(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match="hidden_act: expected an activation .* one of gelu, .*, got 'relu'"):
    beside(tmp_path, config=VIT | {'hidden_act': 'relu'})
  assert beside(tmp_path, config={'name': 'my run'}) == preprocess.Known()


def test_flags_beside_no_size_are_checked_and_null_is_no_setting(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=r"do_center_crop: expected true or false, got 'x'"):
    beside(tmp_path, preprocessor_config={'do_center_crop': 'x', 'crop_size': 224})
  assert sidecars._settings(documents.Field({'positions.coordinates': None}, 'a.json')) == {}
