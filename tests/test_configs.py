"""Every config of the project loads, checks, and builds its full-size model in shapes alone."""
from __future__ import annotations

import ast
import re

import jax
import programs
import pytest

from vit_jax.config import check, durations, files, schema
from vit_jax.core import trees
from vit_jax.jobs import build, listing

NAMES = files.list_names()
EXAMPLES = 1_281_167
COUNTS = {'digits': 105_354, 'from_folder': None, 'cifar10': None,
          'token_label_i1k': 26_151_824 - 2 * (384 + 1) * 990}  # 26.15 M with both heads for 1,000 classes; here 10


@pytest.mark.parametrize('name', NAMES)
def test_a_config_loads_checks_and_builds(name: str) -> None:
  runs = list(files.load_study(name, []).runs.values())
  for config in runs:
    check.check(config)
  config = runs[0]
  mesh = programs.mesh(schema.Mesh(1, 1, 1))
  parts = build.parts(config, mesh=mesh, num_examples=config.data.num_examples or EXAMPLES, num_classes=10,
                      in_memory=False)
  state = parts.program.abstract_state
  assert trees.flatten(state.params) and isinstance(jax.tree.leaves(state.params)[0], jax.ShapeDtypeStruct)
  lengths = parts.lengths
  durations_ = [config.checkpoints.every, config.train.log_every,
                *(e.every for e in config.evals.values())]
  assert all(0 < lengths.steps(d) <= lengths.total_steps for d in durations_), durations_
  assert 0 <= lengths.steps(config.optimizer.schedule.warmup) <= lengths.total_steps
  assert isinstance(lengths, durations.Lengths)
  if COUNTS.get(name):
    assert trees.num_elements(state.params) == COUNTS[name]


@pytest.mark.parametrize('name', NAMES)
def test_a_config_says_what_it_is(name: str) -> None:
  doc = ast.get_docstring(ast.parse(files.find(name)[0].read_text()))
  assert doc
  for part in (r'^Data: ', r'^Run: .*--config=configs/' + name + r'\.py', r'^Expected: '):
    assert re.search(part, doc, re.MULTILINE), part


def test_the_list_shows_each_with_its_first_line() -> None:
  lines = listing.table().splitlines()
  assert [line.split()[0] for line in lines] == NAMES and all(len(line.split()) > 4 for line in lines)


TORCHVISION = {
    'deit_b16_i1k', 'deit3_s16_i1k', 'dino_i1k', 'dino_cifar10', 'mae_i1k', 'mae_finetune', 'mae_scratch_i1k',
    'token_label_i1k', 'token_label_finetune', 'distill_i1k', 'from_folder', 'evaluate', 'features', 'bench',
    'imagenet_tests'}


@pytest.mark.parametrize('name', NAMES)
def test_random_crops_are_those_of_the_authors_program(name: str) -> None:
  recipe = next(iter(files.load_study(name, []).runs.values())).data.recipe
  if recipe.crop is schema.Crop.INCEPTION:
    others = {'linear_probe': schema.CropSampler.CLIPPED, **dict.fromkeys(TORCHVISION, schema.CropSampler.TORCHVISION)}
    assert recipe.crop_sampler is others.get(name, schema.CropSampler.TENSORFLOW)
