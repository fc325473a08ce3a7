"""Every config of the project loads, checks, and builds its full-size model in shapes alone."""
from __future__ import annotations

import ast
import dataclasses
import re

import jax
import programs
import pytest

from vit_jax.config import check, durations, files, schema
from vit_jax.core import axes, trees
from vit_jax.jobs import build, listing
from vit_jax.optim import masks

NAMES = files.list_names()
EXAMPLES = 1_281_167
COUNTS = {'digits': 105_354, 'from_folder': None, 'cifar10': None,
          'token_label_i1k': 26_151_824 - 2 * (384 + 1) * 990}  # 26.15 M with both heads for 1,000 classes; here 10


def runs_of(name: str) -> list[schema.Config]:
  found = files.read(name)
  return list(found.runs.values()) if isinstance(found, schema.Study) else [found]


def shallow(model: schema.Model) -> schema.Model:
  """A network of the same kind with few layers."""
  match model:
    case schema.ViT():
      return dataclasses.replace(model, depth=min(model.depth, 2), full_remat=min(model.full_remat, 1))
    case schema.Mixer():
      return dataclasses.replace(model, depth=2)
    case schema.EfficientNet():
      return dataclasses.replace(model, depth_factor=.1)
    case schema.ResNet() | schema.AxialResNet():
      return dataclasses.replace(model, layers=(1,) * len(model.layers))


def build_shapes(config: schema.Config) -> build.Parts:
  parts = build.parts(config, mesh=programs.mesh(schema.Mesh(1, 1, 1)),
                      num_examples=config.data.num_examples or EXAMPLES, num_classes=10, in_memory=False)
  state = parts.program.abstract_state
  assert trees.flatten(state.params) and isinstance(jax.tree.leaves(state.params)[0], jax.ShapeDtypeStruct)
  # In the networks of this project, the matrices are the leaves called `kernel`, as in every checkpoint.
  stated = axes.matrices(axes.trace(parts.program.init_fn)[1].params)
  assert stated == masks.find_matrices(state.params)
  return parts


@pytest.mark.parametrize('name', NAMES)
def test_a_config_loads_and_checks(name: str) -> None:
  for config in runs_of(name):
    check.check(config)


@pytest.mark.quick(
    'byol_cifar10', 'cifar10', 'digits', 'dino_cifar10', 'dinov2_cifar10', 'distill_cifar10', 'ijepa_cifar10',
    'lejepa_cifar10', 'linear_probe', 'mae_i1k', 'masked_patch_cifar10', 'vit_s16_i1k',
    reason='1 s each; the networks, objectives and optimizers of the others have tests of their own')
@pytest.mark.parametrize('name', NAMES)
def test_a_config_builds(name: str) -> None:
  config = runs_of(name)[0]
  if not COUNTS.get(name):
    config = dataclasses.replace(config, model=shallow(config.model))
  if isinstance(config.objective, schema.Distill):
    teacher = dataclasses.replace(config.objective.teacher, model=shallow(config.objective.teacher.model))
    config = dataclasses.replace(config, objective=dataclasses.replace(config.objective, teacher=teacher))
  parts = build_shapes(config)
  lengths = parts.lengths
  durations_ = [config.checkpoints.every, config.train.log_every,
                *(e.every for e in config.evals.values())]
  if lengths.total_steps > 1:  # a run of one step measures the network at initialization
    assert all(0 < lengths.steps(d) <= lengths.total_steps for d in durations_), durations_
  assert 0 <= lengths.steps(config.optimizer.schedule.warmup) <= lengths.total_steps
  assert isinstance(lengths, durations.Lengths)
  if COUNTS.get(name):
    assert trees.num_elements(parts.program.abstract_state.params) == COUNTS[name]


@pytest.mark.slow(reason='60 s for all: large networks are traced')
@pytest.mark.parametrize('name', NAMES)
def test_a_config_builds_with_all_of_its_layers(name: str) -> None:
  build_shapes(runs_of(name)[0])


@pytest.mark.parametrize('name', NAMES)
def test_a_config_says_what_it_is(name: str) -> None:
  doc = ast.get_docstring(ast.parse(files.find(name)[0].read_text()))
  assert doc
  for part in (r'^Data: ', r'^Run: .*--config=configs/' + name + r'\.py', r'^Expected: '):
    assert re.search(part, doc, re.MULTILINE), part


def test_the_list_shows_each_with_its_first_line() -> None:
  lines = listing.as_text(listing.make_table('configs')).splitlines()
  assert [line.split()[0] for line in lines] == NAMES and all(len(line.split()) > 4 for line in lines)


TORCHVISION = {
    'deit_b16_i1k', 'deit3_s16_i1k', 'dino_i1k', 'dino_cifar10', 'dinov2_i1k', 'dinov2_cifar10',
    'dinov2_distill_i1k', 'dinov3_i1k',
    'dinov3_cifar10', 'feature_distill_cifar10', 'ijepa_i1k', 'ijepa_cifar10', 'lejepa_i1k', 'lejepa_cifar10',
    'mae_i1k', 'mae_finetune', 'mae_scratch_i1k',
    'token_label_i1k', 'token_label_finetune', 'distill_i1k', 'from_folder', 'evaluate', 'features', 'bench',
    'dense_probe', 'imagenet_tests', 'report_card', 'pretrain', 'study_small_data', 'naflex_s16_i1k'}


@pytest.mark.parametrize('name', NAMES)
def test_random_crops_are_those_of_the_authors_program(name: str) -> None:
  recipe = runs_of(name)[0].data.recipe
  if recipe.crop is schema.Crop.INCEPTION:
    others = {'linear_probe': schema.CropSampler.CLIPPED, **dict.fromkeys(TORCHVISION, schema.CropSampler.TORCHVISION)}
    assert recipe.crop_sampler is others.get(name, schema.CropSampler.TENSORFLOW)


def test_every_config_of_cifar10_takes_the_prepared_set_as_an_argument() -> None:
  """As docs/reference/data.md says."""
  names = [name for name in NAMES if name.endswith('cifar10')]
  assert len(names) > 10
  for name in names:
    assert files.load(f'{name}:source=array_record:data/cifar10', []).data.source == 'array_record:data/cifar10', name
