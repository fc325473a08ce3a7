"""The table of published names says what timm and open_clip say, for all of their pretrained tags, and networks with
these names compute what timm computes (`make_golden_published.py`).
"""
from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import drawn, made
from tests.weights import make_golden_published as golden
from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Geometry
from vit_jax.core.errors import UserError
from vit_jax.weights import files, hints, infer, inference, loading, preprocess, published, recognize
from vit_jax.weights.network import Weights

FILE = np.load(pathlib.Path(__file__).with_name('golden_published.npz'))
TIMM, OLDER, OPEN_CLIP, KINDS = (json.loads(str(FILE[name])) for name in ('timm', 'older', 'open_clip', 'kinds'))
CLOSE = 1e-5  # logits are of about unit size; two blocks of products of up to 512 terms in f32, on both sides
HYBRID = 1e-4  # up to 16 units of a ResNet more; timm itself differs by 6e-5 between f32 and f64
CONTRADICTED = 'vit_base_patch16_clip_224.dfn2b'  # quick in open_clip; timm has no note of it


def refused(name: str) -> bool:
  try:
    published.find([name])
  except UserError:
    return True
  return False


READ = {name: known for name, known in TIMM.items() if not refused(f'{name}.{known["default"]}')}


def decided(name: str) -> preprocess.Preprocess:
  found = published.find([name])
  how, warnings = preprocess.decide(found.rules, usual=recognize.usual('timm'), own_px=None)
  assert not warnings, (name, warnings)
  return how


def test_all_tags_of_timm_have_the_preprocessing_of_timm() -> None:
  wrong, count = [], 0
  for network, known in READ.items():
    for tag, (height, width, crop, mode, how, mean, std, _) in known['tags'].items():
      p, name, count = decided(f'timm/{network}.{tag}'), f'{network}.{tag}', count + 1
      resized = 0 if mode == 'squash' and crop == 1. else int(min(height, width) / crop)
      geometry = Geometry.HUGGINGFACE if mode == 'squash' and crop != 1. else Geometry.TORCHVISION
      wanted = ((height, width), resized, geometry, how, True, tuple(mean), tuple(std))
      found = (p.image_px, p.resize_px, p.geometry, p.interpolation.value, p.antialias, p.mean, p.std)
      wrong += [f'{name}: {found}, in timm {wanted}'] if found != wanted else []
  assert not wrong, '\n'.join(wrong)
  assert count > 400


def test_all_tags_of_timm_have_its_gelu_heads_epsilon_and_pooling() -> None:
  wrong = []
  for network, known in READ.items():
    for tag, (*_, is_quick) in known['tags'].items():
      name = f'{network}.{tag}'
      found = published.find([f'hf://timm/{name}'])
      gelu = 'quick' if is_quick or name == CONTRADICTED else known['act'] or 'exact'
      heads = found.hints.heads if known['class'] in golden.VITS else known['heads']
      facts = (found.hints.gelu and found.hints.gelu.value, heads, found.hints.norm_eps or known['eps'],
               found.hints.settings.get('last_norm') is not schema.LastNorm.NONE)
      if known['class'] in golden.VITS and facts != (gelu, known['heads'], known['eps'], known['has_norm']):
        wrong.append(f'{name}: {facts}, in timm {gelu, known["heads"], known["eps"], known["has_norm"]}')
      if known['class'] in golden.VITS and found.hints.timm_pool != known['pool']:
        wrong.append(f'{name}: {found.hints.timm_pool}, in timm {known["pool"]}')
  assert not wrong, '\n'.join(wrong)


def test_every_network_of_timm_is_in_the_table_or_refused_with_its_reason() -> None:
  assert set(READ) == set(published.table().networks)
  for name in TIMM.keys() - READ.keys():
    for tag in TIMM[name]['tags']:
      with pytest.raises(UserError, match=f'{name}.{tag}: expected a network that is available here, got one with'):
        published.find([f'timm/{name}.{tag}'])
  for network, known in READ.items():
    assert list(published.table().networks[network].tags)[0] == known['default'], network
    assert set(published.table().networks[network].tags) == set(known['tags']), network


def test_older_names_of_timm_are_those_of_the_tags() -> None:
  known = {old: new for old, new in OLDER.items() if new.partition('.')[2] in READ.get(
      new.partition('.')[0], {'tags': ()})['tags']}
  assert published.table().older == known
  assert published.find(['tf_efficientnet_b0_ap']).rules[0].values['mean'] == (.5, .5, .5)


def test_all_pretrained_vits_of_open_clip_have_its_gelu_and_preprocessing() -> None:
  wrong = []
  for one in OPEN_CLIP:
    if one['model'].startswith('coca') or one['timm'] and one['timm'] not in READ:
      continue  # networks that are not read here
    gelu = TIMM[one['timm']]['act'] or 'exact' if one['timm'] else 'quick' if one['is_quick'] else 'exact'
    for name in filter(None, (one['hub'], one['file'])):
      found = published.find([name])
      own = found.hints.gelu and found.hints.gelu.value
      if own != gelu:
        wrong.append(f'{name}: GELU {own}, in open_clip {gelu}')
      p, is_timm = decided(name), name.partition('/')[2].partition('.')[0] in TIMM
      facts = (p.mean, p.std, p.interpolation.value)
      if facts != (tuple(one['mean']), tuple(one['std']), one['interpolation']):
        wrong.append(f'{name}: {facts}')
      if not is_timm and (p.resize_px == 0) != (one['resize_mode'] == 'squash'):
        wrong.append(f'{name}: short side {p.resize_px}, in open_clip {one["resize_mode"]}')
      if not is_timm and one['resize_mode'] == 'shortest' and p.resize_px != p.image_px[0]:
        wrong.append(f'{name}: short side {p.resize_px} for {p.image_px}')
  assert not wrong, '\n'.join(wrong)


def test_heads_by_size_are_those_of_timm_or_unknown() -> None:
  for name, known in READ.items():
    if known['width'] and known['has_norm']:
      mlp = schema.SwiGlu(known['mlp']) if known['is_gated'] else schema.Mlp(known['mlp'])
      assert infer.known_heads(known['width'], known['depth'], mlp) in (0, known['heads']), name


@pytest.mark.parametrize(('names', 'known'), [
    (('hf://timm/vit_tiny_patch16_224.augreg_in21k/model.safetensors',), 'vit_tiny_patch16_224.augreg_in21k'),
    (('/cache/models--timm--vit_tiny_patch16_224.augreg_in21k/snapshots/1a2b/model.safetensors',),
     'vit_tiny_patch16_224.augreg_in21k'),
    (('', '/weights/model.safetensors', 'timm/vit_tiny_patch16_224.augreg_in21k'),
     'vit_tiny_patch16_224.augreg_in21k'),
    (('VIT_TINY_PATCH16_224.augreg_in21k.PTH',), 'vit_tiny_patch16_224.augreg_in21k'),
    (('vit_tiny_patch16_224_in21k',), 'vit_tiny_patch16_224.augreg_in21k'),
    (('vit_tiny_patch16_224-finetuned.pt',), 'vit_tiny_patch16_224')])
def test_names_are_found_in_paths_and_addresses(names: tuple[str, ...], known: str) -> None:
  assert published.find(names).rules[0].rule == f'the name {known}'


@pytest.mark.parametrize('name', ['model.safetensors', 'weights.npz', '', 'demining.pth', 'resnetv2_50', 'vit_tiny',
                                  'my_dino.pth', 'vit_base_patch16_22', '/runs/mae/checkpoint.pth'])
def test_other_names_say_nothing(name: str) -> None:
  assert published.find([name]) == preprocess.Known()


def test_a_network_without_a_known_tag_says_what_all_its_tags_have_in_common() -> None:
  found = published.find(['vit_base_patch16_clip_224.newest'])
  assert found.hints.gelu is None and found.hints.heads == 12 and found.hints.timm_pool == 'token'
  p, warnings = preprocess.decide(found.rules, usual=recognize.usual('timm'), own_px=None)
  assert p.mean == preprocess.NORMS['clip']['mean']
  assert warnings == (
      'The preprocessing of images is a guess: short side resized to 235 px, center crop of 224 x 224 px (geometry '
      'torchvision) is that of vit_base_patch16_clip_224.laion2b_ft_in12k_in1k, the default tag of timm for '
      'vit_base_patch16_clip_224, whose tags differ. If it is wrong, set it with --preprocess=half, imagenet or clip, '
      'and resize=, geometry=, interpolation=.',)
  rules = published.find(['vit_tiny_patch16_224.mine']).rules
  assert preprocess.decide(rules, usual=recognize.usual('timm'), own_px=None)[1] == ()


def test_a_line_that_cannot_be_understood_is_an_error_of_the_table() -> None:
  with pytest.raises(ValueError, match="unknown word 'soft'"):
    published.parse(['vit_x heads=2x8 soft'])


# Through the loader

def tiny(folder: pathlib.Path, name: str, config: dict[str, Any] | None = None, **changes: Any) -> Weights:
  """Loads a small network of timm with this name, and this config beside it."""
  path = folder / f'{name}.safetensors'
  files.write_safetensors(path, recognize.to_tensors(made.network(**changes), 'timm'))
  if config is not None:
    path.with_name('config.json').write_text(json.dumps(config))
  return loading.load(str(path), model='' if config and 'model_args' in config else 'heads=4')


CLIP = {'norm_before': True, 'stem.bias': False}


@pytest.mark.parametrize(('name', 'gelu', 'is_guess'), [
    ('vit_base_patch16_clip_224.openai', Gelu.QUICK, False),
    ('vit_base_patch16_clip_224.openai_ft_in1k', Gelu.EXACT, False),
    ('vit_large_patch14_clip_224.dfn2b_s39b', Gelu.EXACT, False),
    ('vit_huge_patch14_clip_224.metaclip_altogether', Gelu.EXACT, False),
    ('vit_huge_patch14_clip_224.metaclip2_worldwide', Gelu.QUICK, False),
    ('vit_huge_patch14_clip_378.metaclip2_worldwide', Gelu.EXACT, False),
    ('vit_base_patch32_clip_224.laion400m_e32', Gelu.QUICK, False),
    ('vit_base_patch16_clip_224', Gelu.EXACT, True), ('my_clip', Gelu.EXACT, True)])
def test_the_gelu_of_clip_is_that_of_the_tag_or_exact_with_a_warning(
    name: str, gelu: Gelu, is_guess: bool, tmp_path: pathlib.Path) -> None:
  found = tiny(tmp_path, name, **CLIP)
  assert isinstance(found.model, schema.ViT) and found.model.gelu is gelu
  assert any('its GELU is a guess: exact' in one for one in found.report.warnings) == is_guess


def test_a_config_that_names_its_architecture_gives_heads_gelu_epsilon_and_preprocessing(
    tmp_path: pathlib.Path) -> None:
  config = {'architecture': 'vit_base_patch32_clip_224', 'pretrained_cfg': {'tag': 'openai'}, 'model_args': {
      'num_heads': 2}}
  found = tiny(tmp_path, 'model', config, **CLIP)
  assert isinstance(found.model, schema.ViT)
  assert (found.model.gelu, found.model.heads, found.model.norm.eps) == (Gelu.QUICK, 2, 1e-5)
  assert found.preprocess.mean == preprocess.NORMS['clip']['mean'] and not found.report.warnings
  assert 'the name vit_base_patch32_clip_224.openai' in found.preprocess.rule
  assert loading.load(str(tmp_path / 'model.safetensors'), model='gelu=exact').model.gelu is Gelu.EXACT  # type: ignore


@pytest.mark.parametrize('name', ['vit_mediumd_patch16_reg4_gap_256', 'vit_little_patch16_reg4_gap_256',
                                  'vit_wee_patch16_reg1_gap_256', 'vit_xsmall_patch16_clip_224'])
def test_heads_are_those_of_the_architecture_where_sizes_do_not_tell(name: str) -> None:
  known, found = TIMM[name], published.find([f'{name}.any'])
  assert not infer.known_heads(known['width'], known['depth'], schema.Mlp(known['mlp']))
  assert found.hints.of_width(known['width']).heads == known['heads']
  assert found.hints.of_width(known['width'] // 2).heads == 0  # another network with this name


def test_timms_global_pool_is_honored_and_said(tmp_path: pathlib.Path) -> None:
  for pool, wanted in (('avg', 'patches'), ('token', 'cls')):
    found = tiny(tmp_path, 'model', {'architecture': 'vit_tiny_patch16_224', 'global_pool': pool})
    assert isinstance(found.model, schema.ViT) and hints.pool_word(found.model.pool) == wanted
    assert any('Pooling: the mean of the patch tokens, as in timm' in note for note in found.report.notes) == (
        pool == 'avg')
  with pytest.raises(UserError, match="global_pool: expected token, avg or map in the config of timm, got 'avgmax'"):
    tiny(tmp_path, 'model', {'architecture': 'vit_tiny_patch16_224', 'global_pool': 'avgmax'})


def test_the_config_of_open_clip_gives_gelu_heads_and_preprocessing(tmp_path: pathlib.Path) -> None:
  config = {'model_cfg': {'quick_gelu': True, 'vision_cfg': {'width': 32, 'head_width': 8, 'image_size': 32}},
            'preprocess_cfg': {'mean': [.1, .2, .3], 'std': [.4, .5, .6], 'interpolation': 'bilinear',
                               'resize_mode': 'squash'}}
  (tmp_path / 'open_clip_config.json').write_text(json.dumps(config))
  files.write_safetensors(tmp_path / 'open_clip_model.safetensors', recognize.to_tensors(made.network(**CLIP), 'timm'))
  found = loading.load(str(tmp_path / 'open_clip_model.safetensors'))
  assert isinstance(found.model, schema.ViT) and (found.model.gelu, found.model.heads) == (Gelu.QUICK, 4)
  assert (found.preprocess.mean, found.preprocess.resize_px, found.preprocess.interpolation.value) == (
      (.1, .2, .3), 0, 'bilinear') and not found.report.warnings


def test_squashed_images_of_timm_may_be_cropped(tmp_path: pathlib.Path) -> None:
  found = tiny(tmp_path, 'model', {'architecture': 'x', 'pretrained_cfg': {
      'crop_mode': 'squash', 'crop_pct': .5, 'mean': [.5] * 3, 'std': [.5] * 3, 'interpolation': 'bicubic'}})
  assert (found.preprocess.resize_px, found.preprocess.geometry) == (2 * found.preprocess.image_px[0],
                                                                     Geometry.HUGGINGFACE)


def test_networks_with_the_tensors_of_others_are_refused_by_name(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='vit_base_patch16_rpn_224.sw_in1k: expected a network that is available here, '
                     'got one with blocks whose norms come after attention and MLP. Use other weights'):
    tiny(tmp_path, 'vit_base_patch16_rpn_224.sw_in1k')


def test_names_of_timm_say_nothing_about_the_network_in_files_of_other_programs(tmp_path: pathlib.Path) -> None:
  found = recognize.to_tensors(made.network(), 'vision_transformer')
  np.savez(tmp_path / 'vit_base_patch16_clip_224.openai.npz', **found)
  model = loading.load(str(tmp_path / 'vit_base_patch16_clip_224.openai.npz')).model
  assert isinstance(model, schema.ViT) and (model.gelu, model.norm.eps) == (Gelu.TANH, 1e-6)


@functools.cache
def read_kinds() -> list[str]:
  return [name for name in KINDS if name in READ]


@pytest.mark.slow(reason='90 s: a program for each of 60 kinds of networks')
@pytest.mark.parametrize('name', read_kinds())
def test_networks_of_all_kinds_compute_what_timm_computes(name: str, tmp_path: pathlib.Path) -> None:
  known = KINDS[name]
  tag = next((tag for tag, (*_, is_quick) in TIMM[name]['tags'].items()
              if not is_quick or TIMM[name]['act'] == 'quick'), TIMM[name]['default'])
  path = tmp_path / f'{name}.{tag}.safetensors'
  files.write_safetensors(path, {key: np.asarray(drawn.tensor(key, tuple(x))) for key, x in known['shapes'].items()})
  heads = f'heads={TIMM[name]["heads"]}' if TIMM[name]['heads'] else ''
  is_unplaced = name.startswith(('deit3', 'vit_base_patch16_rope_ape'))  # no row for the class token; 224 px by name
  found = loading.load(str(path), model=heads + f',image={known["px"]}' * is_unplaced)
  out = jax.jit(inference.function(found))(inference.parameters(found), jnp.asarray(drawn.image(known['px'], 1)))
  is_hybrid = any('stages.' in key for key in known['shapes'])
  np.testing.assert_allclose(out.logits, FILE[f'logits/{name}'], rtol=0, atol=HYBRID if is_hybrid else CLOSE)


@pytest.mark.slow(reason='2 min: makes all networks of timm; where timm and open_clip are installed')
def test_the_listing_is_that_of_the_installed_timm_and_open_clip() -> None:
  if not all(importlib.util.find_spec(name) for name in ('timm', 'open_clip')):
    pytest.skip('timm and open_clip are not installed')
  assert golden.timm_networks() == TIMM
  assert golden.open_clip_tags() == OPEN_CLIP
