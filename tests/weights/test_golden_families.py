"""Networks of CLIP, SigLIP, DINOv3, AIMv2, EVA-02, PE, TIPSv2 and others compute what timm and transformers compute
with the same files, at three sizes of images (`make_golden_families.py`).
"""
from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import drawn
from tests.weights import make_golden_families as golden
from vit_jax.config import schema
from vit_jax.config.schema import Execution, PositionResize, checks
from vit_jax.core.errors import UserError
from vit_jax.core.types import Outputs
from vit_jax.weights import files, inference, loading, saving
from vit_jax.weights.network import Weights

FOUND = np.load(pathlib.Path(__file__).with_name('golden_families.npz'))
NAMES = [*dict.fromkeys(name.split('/')[0] for name in FOUND.files), *golden.ORIGINALS]
CLOSE = 1e-5  # features are of about unit size; two blocks of products of up to 192 terms in f32, on both sides
BY_NAME = {'timm_clip_openai': 'vit_base_patch16_clip_quickgelu_224.openai', 'original_clip_openai': 'ViT-B-16',
           'timm_clip_laion': 'vit_base_patch32_clip_224.laion2b', 'timm_tipsv2': 'vit_base_patch14_reg1_tipsv2.webli',
           'timm_tipsv2_giant': 'vit_giant_patch14_reg1_tipsv2.webli',
           'timm_ropevit_ape': 'vit_base_patch16_rope_ape_224.naver_in1k'}
SAID = dict.fromkeys(  # what timm does with them, which is not what their authors do
    ('timm_dinov2', 'timm_tipsv2', 'timm_tipsv2_giant', 'timm_mae_finetuned', *golden.ORIGINALS),
    ',position_resize=bicubic_antialias') | {'timm_ropevit_ape': ',image=32'}
PROGRAMS: dict[str, Callable[..., Outputs]] = {}


@functools.cache
def about(name: str) -> dict[str, Any]:
  return json.loads(str(FOUND[f'{golden.ORIGINALS.get(name, (name,))[0]}/about']))


def write(name: str, folder: pathlib.Path) -> pathlib.Path:
  """A file of the reference's weights."""
  tensors = golden.tensors(about(name)['shapes'])
  if name in golden.ORIGINALS:
    tensors = golden.ORIGINALS[name][1](tensors)
  path = folder / f'{BY_NAME.get(name, name)}.safetensors'
  files.write_safetensors(path, tensors)
  if about(name)['config']:
    path.with_name('config.json').write_text(json.dumps(about(name)['config']))
  return path


def load(name: str, folder: pathlib.Path) -> Weights:
  said = '' if name.startswith('hf') else f'heads=2{SAID.get(name, "")}'
  return loading.load(str(write(name, folder)), model=said, preprocess='half')


def aligned(model: schema.ViT) -> schema.ViT:
  """The network as others resize its positions."""
  changes = {'positions.resize': PositionResize.ALIGNED} if model.positions.has_rows else {}
  return checks.replaced(model, changes)


def compute(found: Weights, size: tuple[int, int]) -> Outputs:
  """The outputs for the reference's image, by one program for all files of a network."""
  model = found.model
  if size == golden.SIZES[0]:  # where positions are not resized
    model = aligned(model)
  model = dataclasses.replace(model, execution=Execution.SCAN)
  network = repr((model, found.head, found.num_classes, size))
  if network not in PROGRAMS:
    PROGRAMS[network] = jax.jit(inference.function(found._replace(model=model)))
  image = jnp.asarray(drawn.image(48, 1)[:, :size[0], :size[1]])
  return PROGRAMS[network](inference.parameters(found), image)


def difference(found: Weights, name: str, size: tuple[int, int]) -> float:
  """The largest difference from the reference; not a number if it has none of this size."""
  source, out = golden.ORIGINALS.get(name, (name,))[0], compute(found, size)
  ours = {'pooled': out.features.pooled, 'tokens': out.features.tokens, 'logits': out.logits}
  return max((float(np.abs(x - FOUND[key]).max()) for kind, x in ours.items()
              if (key := f'{source}/{size[0]}x{size[1]}/{kind}') in FOUND), default=math.nan)


ALIKE = {  # whose networks another file's test computes, or all of whose switches other files have
    'timm_clip_laion', 'timm_dinov2', 'timm_tipsv2_giant', 'timm_ijepa', 'timm_mae_finetuned', 'timm_dinov3',
    'timm_pe_core_giant', 'timm_pe_lang', 'timm_siglip', 'hf_openclip', 'hf_dinov2', 'hf_dinov3', 'hf_tipsv2',
    'hf_ijepa'}


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow(reason='1 s of CPU to compile')) if name in ALIKE else name
    for name in NAMES if name not in golden.ORIGINALS])
def test_features_are_those_of_the_reference(name: str, tmp_path: pathlib.Path) -> None:
  assert difference(load(name, tmp_path), name, golden.SIZES[0]) < CLOSE


@pytest.mark.parametrize('name', golden.ORIGINALS)
def test_files_of_the_authors_are_the_same_network_as_those_of_timm(name: str, tmp_path: pathlib.Path) -> None:
  for folder in ('authors', 'timm'):
    (tmp_path / folder).mkdir()
  one, two = load(name, tmp_path / 'authors'), load(golden.ORIGINALS[name][0], tmp_path / 'timm')
  assert aligned(one.model) == aligned(two.model)
  chex.assert_trees_all_equal(one.params, two.params)


@pytest.mark.slow(reason='50 s: a program for each network and size')
@pytest.mark.parametrize('name', [name for name in NAMES if name not in (*golden.ORIGINALS, 'hf_aimv2')])
def test_features_are_those_of_the_reference_at_other_sizes(name: str, tmp_path: pathlib.Path) -> None:
  found = load(name, tmp_path)
  for size in golden.SIZES[1:]:
    assert difference(found, name, size) < CLOSE, size


WRITTEN = {  # by format: the formats that can hold the network, besides a run directory
    **{name: ('x.safetensors', 'folder') for name in ('timm_clip_openai', 'timm_siglip', 'timm_aimv2', 'timm_tipsv2',
                                                      'timm_dinov3_plus_qkvb', 'timm_ijepa', 'hf_aimv2_native')},
    **{name: ('x.safetensors',) for name in (
        'timm_dinov3', 'timm_eva02_small', 'timm_eva02_base', 'timm_eva02_clip', 'timm_ropevit', 'timm_ropevit_mixed',
        'timm_ropevit_mixed_ape', 'timm_ropevit_sbb', 'timm_pe_core', 'timm_pe_core_giant', 'timm_pe_lang')}}


@pytest.mark.parametrize('name', WRITTEN)
def test_networks_are_written_and_read_without_a_differing_bit(name: str, tmp_path: pathlib.Path) -> None:
  found = load(name, tmp_path)
  for to in WRITTEN[name]:
    family = 'huggingface' if to == 'folder' else ''
    if family and name == 'timm_tipsv2':  # it is known by how its authors resize positions
      found = found._replace(model=checks.replaced(
          found.model, {'positions.resize': PositionResize.BILINEAR_ANTIALIAS}))
    path, lost = saving.save(found, str(tmp_path / to), family=family)  # raises if a bit differs when read back
    assert path.exists() and not [one for one in lost if 'positions' not in one and 'preprocessing' not in one], lost


@pytest.mark.parametrize(('name', 'said'), [
    ('timm_dinov3', 'positions rotary'),
    ('timm_pe_core', 'positions learnedrotary, a norm before the blocks, a pool over the class token'),
    ('timm_aimv2', 'RMSNorm, a norm after the stem, no bias of the output matrices'),
    ('timm_clip_laion', 'a norm before the blocks')])
def test_a_folder_of_timm_is_refused_where_its_config_cannot_describe_the_network(
    name: str, said: str, tmp_path: pathlib.Path) -> None:
  found = load(name, tmp_path)
  with pytest.raises(UserError, match=f'a network that a timm config.json can describe, got one with ({said})'):
    saving.save(found, str(tmp_path / 'folder'), family='timm')
