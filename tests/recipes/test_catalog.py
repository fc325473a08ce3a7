"""The list of networks."""
from __future__ import annotations

import network_costs
import pytest

import vit_jax
from vit_jax.core.errors import UserError
from vit_jax.recipes import catalog, finetune, sizes


def test_every_name_is_listed_once_and_has_a_source() -> None:
  found = vit_jax.list_models()
  names = [one.name for one in found]
  assert names == [*sizes.names()] and len({*names}) == len(names)
  assert {*finetune.MODELS} <= {*names} and all(one.source and one.family for one in found)


def test_parameters_are_those_of_the_authors_programs() -> None:
  # of vision_transformer, timm (BiT, DeiT with one head, EfficientNet) and the Mixer paper's program
  known = {'B/16': 86_567_656, 'B/8': 86_576_872, 'Ti/16': 5_717_416, 'BiT-R50x1': 25_549_352,
           'EfficientNet-B0': 5_288_548, 'Mixer-B/16': 59_880_472}
  # and of timm 1.0.31, for images of 224 px
  known |= {'DINOv3-S/16': 21_981_160, 'DINOv3-H+/16': 841_872_360, 'DINOv3-7B/16': 6_720_127_976,
            'CLIP-B/32': 88_225_000, 'OpenCLIP-bigG/14': 1_844_442_344, 'EVA02-S/14': 22_006_120,
            'EVA02-L/14': 304_293_800, 'EVA02-CLIP-L/14': 304_342_952, 'PE-Core-L/14': 316_799_976,
            'PE-Core-G/14': 1_880_423_912, 'PE-Lang-L/14': 291_653_608, 'AIMv2-1B/14': 1_237_007_336,
            'AIMv2-H/14': 682_388_968, 'SigLIP2-So400m/16': 428_971_944, 'I-JEPA-g/16': 1_012_777_576,
            'RoPE-ViT-S/16': 21_599_232 + 385_000, 'RoPE-Mixed-B/16': 85_675_008 + 769_000,
            # which has no position for the class token
            'RoPE-Mixed-APE-L/16': 303_374_336 + 1024 + 1_025_000}
  assert {name: catalog.model(name).parameters for name in known} == known


def test_flops_are_two_per_multiply_add_of_an_image_of_the_usual_side() -> None:
  layer = 197 * 768 * (4 * 768 + 2 * 3072) + 2 * 197 * 197 * 768  # projections and MLP; attention
  assert catalog.model('B/16').flops == 2 * (12 * layer + 196 * 768 * 768 + 768 * 1000)
  assert (catalog.model('B/16').px, catalog.model('EfficientNet-B3').px) == (224, 300)


@pytest.mark.parametrize(('name', 'family', 'source'), [
    ('Ti/16', 'ViT', 'arXiv 2012.12877'), ('ViT-22B/14', 'ViT', 'arXiv 2302.05442'),
    ('R50+L/32', 'Hybrid', 'arXiv 2010.11929'), ('RoPE-APE-S/16', 'RoPE-ViT', 'arXiv 2403.13298'),
    ('DINOv2-B/14', 'DINOv2', 'arXiv 2304.07193'), ('EfficientNet-L2', 'EfficientNet', 'arXiv 1911.04252')])
def test_a_network_has_the_source_of_its_sizes(name: str, family: str, source: str) -> None:
  assert catalog.model(name)[1:2] + catalog.model(name)[-1:] == (family, source)


def test_a_pattern_chooses_names_and_any_size_can_be_looked_up() -> None:
  assert [one.name for one in vit_jax.list_models('mixer*16')] == ['Mixer-S/16', 'Mixer-B/16', 'Mixer-L/16']
  assert catalog.model('B/20').parameters > 0
  with pytest.raises(UserError, match='expected SIZE/PATCH'):
    catalog.model('X/16')


@pytest.mark.parametrize(('pattern', 'name'), [('*vit_tiny*', 'Ti/16'), ('vit_base_patch16_224', 'B/16'),
                                               ('vit_giant*', 'g/14'), ('vit_gigantic*', 'G/14')])
def test_a_plain_vit_is_found_by_its_name_in_timm(pattern: str, name: str) -> None:
  assert [one.name for one in vit_jax.list_models(pattern)] == [name]


def test_an_empty_list_of_networks_is_explained_by_a_warning() -> None:
  with pytest.warns(UserWarning, match="list_models: .* got 'dinov2_vitb14'. Did you mean DINOv2-B/14") as caught:
    assert vit_jax.list_models('dinov2_vitb14') == []
  assert caught[0].filename == __file__  # the line of the caller


def test_the_file_of_costs_has_what_is_listed_and_nothing_else() -> None:
  assert {*catalog._known_costs()} == {str(one) for one in network_costs.needed()}


@pytest.mark.parametrize('name', ['Ti/16, 224 px, 1000 classes', 'Mixer-B/16, 224 px, 21843 classes'])
def test_a_cost_in_the_file_is_that_of_the_network(name: str) -> None:
  one = next(one for one in network_costs.needed() if str(one) == name)
  assert one.derive() == catalog._known_costs()[name]


@pytest.mark.slow(reason='80 s of tracing')
def test_all_costs_in_the_file_are_those_of_the_networks() -> None:
  assert {str(one): one.derive() for one in network_costs.needed()} == catalog._known_costs()


def test_every_published_network_is_of_a_family_with_a_title() -> None:
  recent = sizes.PUBLISHED[sizes.PUBLISHED.index('DINOv3-S/16'):]
  assert len(recent) > 40 and {catalog.model(name).family for name in recent} == {
      'DINOv3', 'CLIP', 'OpenCLIP', 'SigLIP 2', 'EVA-02', 'EVA-02-CLIP', 'Perception Encoder', 'AIMv2', 'TIPSv2',
      'RoPE-ViT', 'I-JEPA'}
