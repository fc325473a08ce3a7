"""The table of settings: each is named in a test and used by a config, but for those listed here with the reason."""
from __future__ import annotations

import options
import pytest

NOT_BY_NAME = {
    'Views.global_area',  # tests of the crops of views take the default
}

WITHOUT_A_CONFIG = {
    'said for a machine, for data or for an occasion, not by a recipe': {
        'Data.data_dir', 'Data.label_column', 'Data.image_column', 'Data.caption_column', 'Data.label_offset',
        'Data.holdout',
        'Data.holdout_seed', 'Data.workers',
        'Data.threads', 'Data.max_bad_images', 'Data.follow_links', 'Data.max_file_mib',
        'Data.read_ahead_mib',
        'Data.shuffle_mib', 'Data.decode', 'Train.on_nonfinite',
        'Train.progress', 'Train.profile', 'Train.profile_port', 'Train.dump_hlo', 'Evaluation.limit',
        'Data.any_num_examples',
        'Recipe.max_image_pixels', 'Checkpoints.keep_latest', 'Mesh.data', 'Mesh.fsdp',
        'Mesh.tensor', 'Mesh.slices', 'Config.mesh', 'Config.trackers', 'Trackers.tensorboard', 'Trackers.wandb',
        'Train.portable', 'Train.retry', 'Trackers.mlflow', 'Trackers.images', 'Trackers.histograms',
        'TextEvaluation.weights',
        'TextEvaluation.tokenizer', 'TextEvaluation.text_rule', 'ZeroShot.prompts', 'ZeroShot.names',
        'ZeroShot.synonyms', 'CaptionRetrieval.captions', 'Data.channels'},
    'for research on networks, which no recipe here needs': {
        'ViT.kernels', 'Rotary.base', 'Rotary.mixed', 'Plain.mlp_scale', 'Mlp.bias', 'Mlp.inner_norm',
        'UnitInterval.shift', 'UnitInterval.jitter'},
    'written by the program': {'Mesh.chosen', 'Mesh.chosen_for', 'Mesh.chosen_slices', 'Mesh.chosen_parts'},
    'the same in every recipe here: its default': {'AdamW.b1', 'AdamW.eps', 'Attention.dropout'},
    'to go on with recipes of others: DINOv2, whose patch embedding learns at a fifth of the rate': {
        'PathRule.lr', 'Head.bias'},
}


@pytest.mark.slow(reason='6 s: makes the runs of all configs; which setting a recipe uses changes no result')
def test_every_setting_is_used_by_a_config() -> None:
  excused = set().union(*WITHOUT_A_CONFIG.values())
  unused = {row.name for row in options.table() if not row.configs}
  assert unused <= excused, unused - excused


def test_every_setting_is_named_in_a_test() -> None:
  tests = options.named()
  assert len(tests) > 150
  assert {name for name, found in tests.items() if not found} <= NOT_BY_NAME


@pytest.mark.slow(reason='6 s: makes the runs of all configs')
def test_the_table_finds_the_configs_that_set_an_option() -> None:
  rows = {row.name: row for row in options.table()}
  assert 'digits' in rows['ViT.patch'].configs and 'from_folder:Axial-ViT-B/32' in rows['ViT.block'].configs
  assert 'from_folder' in rows['Supervised.class_weights'].configs  # by an override that the docstring shows
  assert 'linear_probe' in rows['Lars.trust_coefficient'].configs
  assert 'dino_i1k' in rows['Views.grayscale'].configs and 'mae_i1k' not in rows['Views.grayscale'].configs
