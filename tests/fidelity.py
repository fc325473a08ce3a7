"""The page of what is compared with the authors' programs, the papers or an independent computation, and what differs.

`python -m tests.fidelity` runs the tests that are named here, stores the tolerance that each of them demands in
`fidelity_bounds.json`, and writes `docs/explanation/fidelity.md`. `python -m tests.fidelity knn` runs those with that
word in their names and new ones; `python -m tests.fidelity page` only writes the page. What an authors' program
computed lies beside its test as a small file, with the script that made it. `test_fidelity.py` checks that what a row
claims to be compared is in its test or in that script. The differences are those of `deviations.py`.
"""
from __future__ import annotations

import json
import pathlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import deviations

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'explanation' / 'fidelity.md'
BOUNDS = pathlib.Path(__file__).with_name('fidelity_bounds.json')
"""The bound of each test, as `Seen` prints it."""
HEAD = """# Fidelity

This page lists every known difference of a recipe from the program of its authors, or from its paper where no program
was published, and then what is tested to be equal. `python -m tests.fidelity` runs the comparisons and writes the page.

Random numbers, the order of images, and the order in which devices sum always differ. Training is in float32, or in
bfloat16 with `model.dtype=bfloat16`; programs in PyTorch scale losses to train in float16. The effect on accuracy was
measured where a number says so, and nowhere else.
"""
EQUAL = """In brackets is what the test demands of every pair of numbers, on every machine: (1e-5, ±1e-7) stands for
|here - there| <= 1e-7 + 1e-5 |there|, and (equal) for the same numbers. Without brackets, the test compares settings,
counts, checksums, or pixels to a gray level. `tests/fidelity.py` names the test of each comparison. The programs are
{commits}."""
MEASURED = pathlib.Path(__file__).with_name('fidelity_measured.md')
"""The end of the page: initialization, and runs with real weights, which no test repeats."""
COMMITS = {
    'big_vision': '0127fb6', 'vision_transformer': 'c6de1e5', 'mae': 'efb2a80', 'dino': '7c446df', 'dinov2': 'b8931f7',
    'deit': '7e160fe', 'TokenLabeling': '9dbfd59', 'noisystudent': 'aac52bf', 'axial-deeplab': '79088ed',
    'big_transfer': '140de6e', 'tips': '4db271d', 'timm': '1.0.31', 'transformers': '5.23', 'PEFT': '0.21',
    'stable-pretraining': '0.1.8'}


class Row(NamedTuple):
  """One comparison.
  what: of this project.   oracle: what it is compared with.   how: what is compared.
  test: `file::name` under `tests/`.   made: the script there that ran the oracle; '' = the test has its numbers.
  """
  what: str
  oracle: str
  how: str
  test: str
  made: str = ''


ROWS: dict[str, tuple[Row, ...]] = {
    'Networks and weights': (
        Row('ViT, DeiT, hybrids, Mixer, BiT, EfficientNet, DINOv2, MAE encoder; small networks read from files',
            'timm, transformers', 'pooled features, tokens and logits, random weights',
            'weights/test_golden.py::test_outputs_are_those_of_the_reference',
            'weights/make_golden.py'),
        Row('networks of the families of docs/reference/weights.md', 'timm, transformers',
            'features, random weights', 'weights/test_golden_families.py::test_features_are_those_of_the_reference',
            'weights/make_golden_families.py'),
        Row('TIPS and TIPSv2', 'tips, on scenic', 'class and patch tokens at three sizes, random weights',
            'weights/test_families_scenic.py::test_outputs_are_those_of_the_jax_program_of_the_authors',
            'weights/make_golden_tips.py'),
        Row('adapters of a folder, merged', 'PEFT on timm and transformers', 'logits, random weights',
            'weights/test_peft.py::test_a_folder_of_peft_is_read_merged_with_the_outputs_of_peft',
            'weights/make_golden_peft.py'),
        Row('adapters: LoRA, rsLoRA, DoRA', 'PEFT on timm and transformers', 'logits and gradients, random weights',
            'weights/test_peft.py::test_the_unmerged_network_has_the_outputs_and_gradients_of_peft',
            'weights/make_golden_peft.py'),
        Row('AxialResNet, evaluation and training', 'axial-deeplab', 'last map, random weights',
            'models/rivals/test_axial_resnet.py::test_the_last_map_is_that_of_the_authors_program',
            'models/rivals/make_golden_axial.py'),
        Row('number of parameters, AxialResNet', 'axial-deeplab', 'count',
            'models/rivals/test_axial_resnet.py::test_costs_count_as_many_parameters_as_the_authors_program_has',
            'models/rivals/make_golden_axial.py'),
        Row('MAE decoder', 'transformers', 'reconstruction',
            'weights/test_golden.py::test_the_decoder_of_a_masked_autoencoder_reconstructs_what_the_reference_does',
            'weights/make_golden.py'),
        Row('number of parameters, ViT with a class token', 'published checkpoints', 'count',
            'models/test_cost.py::test_sizes_with_class_token_have_the_published_number_of_parameters'),
        Row('number of parameters, DINOv2', 'published checkpoints', 'count',
            'models/test_cost.py::test_dinov2_has_the_published_number_of_parameters'),
        Row('FLOPs', 'published GMACs', 'count', 'models/test_cost.py::test_flops_equal_the_published_ones'),
        Row('pre-training cost, the seven rows that count as we do', 'ViT paper, Table 6', 'exaFLOPs',
            'config/test_exaflops.py::test_the_published_column_comes_out'),
        Row('sine-cosine positions', 'published formula', 'tables',
            'models/test_positions.py::test_sincos_is_the_published_formula'),
        Row('position table at another resolution, aligned corners', 'SciPy', 'bilinear',
            'weights/test_resize.py::test_bilinear_is_what_the_published_loaders_mean'),
        Row('MAE fine-tuned network: fc_norm, mean of the patches', 'timm', 'logits, random weights',
            'weights/test_golden.py::test_outputs_are_those_of_the_reference',
            'weights/make_golden.py'),
        Row('resizing of positions: PyTorch bicubic with and without antialias, DINO with its offset, bilinear',
            'torch, dino', 'tables of several grids',
            'models/test_interpolate.py::test_the_other_conventions_are_those_of_pytorch_and_dino',
            'models/make_golden_positions.py'),
        Row('convention of positions by family', 'programs of the families', 'settings',
            'weights/test_resize.py::test_the_convention_is_that_of_the_program_that_weights_are_from'),
        Row('LV-ViT with both heads', 'LV-ViT paper, Table 1', 'number of parameters of a run',
            'models/rivals/test_rival_costs.py::test_lv_vit_has_the_size_of_the_papers_table'),
        Row('initialization, every parameter of 17 networks of nine programs',
            'vision_transformer, big_vision, mae, dino, dinov2, deit, TokenLabeling, timm, axial-deeplab',
            "standard deviation divided by the program's, random; also mean, kurtosis and support",
            'models/test_initialization.py::test_every_parameter_starts_as_in_the_authors_program',
            'models/make_golden_initialization.py'),
    ),
    'Images': (
        Row('ReaL labels and their score', "ReaL's program and label file", 'counts and score',
            'data/test_real.py::test_a_score_is_exact'),
        Row('antialiased resizing', 'Pillow', 'pixels',
            'data/test_photometric.py::test_resizing_with_antialias_is_pillows'),
        Row('resizing and cropping of evaluation: torchvision, huggingface', 'timm, transformers',
            'pixels of odd sizes (checksums)',
            'data/test_geometry.py::test_the_pixels_are_those_of_the_programs_themselves',
            'data/make_golden_geometry.py'),
        Row('resizing without antialias, bilinear and area, up and down; center crop of evaluation',
            'big_vision, TensorFlow', 'pixels of odd sizes (checksums)',
            'data/test_resample.py::test_every_pixel_is_that_of_the_program',
            'data/make_tensorflow_resize.py'),
        Row('preprocessing by family', 'programs of the families', 'settings',
            'weights/test_preprocess.py::test_geometry_is_that_of_the_familys_own_program'),
        Row("random crops of TensorFlow, Noisy Student's with a covered part",
            'TensorFlow sample_distorted_bounding_box', 'every window, with its random numbers',
            'data/test_crops.py::test_with_tensorflow_s_numbers_every_window_is_tensorflow_s',
            'data/make_tensorflow_crops.py'),
        Row('random crops of TensorFlow', 'TensorFlow sample_distorted_bounding_box',
            'quantiles of area, aspect and place, 50,000 draws',
            'data/test_crops.py::test_area_aspect_and_place_are_distributed_as_tensorflow_s',
            'data/make_tensorflow_crops.py'),
        Row("crops of MAE's linear probe", 'mae', 'windows on images of five shapes',
            'data/test_crops.py::test_a_clipped_crop_is_that_of_maes_probe'),
        Row('RandAugment, every operation at M 0, 5, 10, 15, 20', 'big_vision', 'pixels (checksums)',
            'data/test_tensorflow_ops.py::test_every_pixel_is_that_of_the_program',
            'data/make_tensorflow_pixels.py'),
        Row('RandAugment of timm: rotation, shears, translations', 'timm', 'pixels, both filters, within a level',
            'data/test_photometric.py::test_geometry_is_that_of_timm_itself', 'data/make_golden_pillow_ops.py'),
        Row('Gaussian blur of DINO and DeiT III', 'Pillow', 'pixels, within a level',
            'data/test_photometric.py::test_blur_has_the_pixels_of_pillow', 'data/make_golden_pillow_ops.py'),
        Row('mixup and cutmix of the batch of a device', 'timm', 'deciles of the weights of labels; share of cutmix',
            'data/test_mix.py::test_draws_of_groups_have_the_law_of_timm', 'data/make_golden_mixing.py'),
        Row('repeated augmentation: devices of the copies', 'deit', 'example of each row of three batches',
            'data/test_order.py::test_copies_are_dealt_to_groups_as_deits_sampler_deals_them_to_devices',
            'data/make_golden_mixing.py'),
        Row('token targets: RoIAlign, softmax, smoothing', 'TokenLabeling',
            'class and token targets of five boxes on three grids',
            'data/test_token_targets.py::test_targets_are_those_of_the_authors_program',
            'data/make_token_targets.py'),
    ),
    'Objectives': (
        Row('MAE', 'mae', 'loss of given reconstructions, pixels normalized or not', 'objectives/test_mae.py::'
            'test_the_loss_of_given_reconstructions_is_that_of_the_authors_program', 'objectives/make_golden_mae.py'),
        Row('MAE', 'transformers', 'loss and reconstruction',
            'objectives/test_mae.py::test_loss_and_reconstruction_are_those_of_transformers'),
        Row('DINO', 'dino', 'loss and center over three steps',
            'objectives/test_dino.py::test_loss_and_center_are_those_of_the_authors_class',
            'objectives/make_golden_dino.py'),
        Row('DINO', 'NumPy, float64', 'loss, center and teacher over three steps',
            'objectives/test_dino.py::test_loss_center_and_teacher_are_those_of_numpy_over_three_steps'),
        Row('DINOv2', 'NumPy, float64', 'loss and its terms, one head or two, both kinds of centering',
            'objectives/test_dinov2.py::test_every_term_is_that_of_numpy'),
        Row('DINOv2, steps of the recipe: terms, gradient, AdamW, clipping, schedules, teacher', 'dinov2',
            'four steps from equal weights, crops and masks, both kinds of centering',
            'objectives/test_dinov2_steps.py::test_steps_of_the_recipe_are_those_of_the_authors_program',
            'objectives/make_golden_dinov2.py'),
        Row('distillation with the losses of DINOv2', 'NumPy, float64', 'loss, its terms and gradient',
            'objectives/test_dinov2_distill.py::'
            'test_every_term_and_the_gradient_are_those_of_numpy_with_the_frozen_network'),
        Row('DINOv3: Gram anchoring', 'NumPy, float64', 'term and gradient, crops of the same and of twice the size',
            'objectives/test_dinov3.py::test_the_term_and_its_gradient_are_those_of_numpy'),
        Row('feature distillation', 'NumPy, float64', 'loss, its terms and gradient, both distances',
            'objectives/test_feature_distill.py::'
            'test_loss_and_gradient_are_those_of_numpy_and_rows_that_do_not_count_change_nothing'),
        Row('LeJEPA', 'stable-pretraining', 'both terms of the loss, and its gradient, on two grids',
            'objectives/test_lejepa.py::test_terms_and_gradient_are_those_of_stable_pretraining',
            'objectives/make_golden_lejepa.py'),
        Row("LeJEPA, the paper's definition", 'NumPy, float64', 'loss and its terms',
            'objectives/test_lejepa.py::test_loss_and_metrics_are_those_of_numpy'),
        Row('I-JEPA', 'NumPy, float64', 'loss, each block with its own patches alone, without padding',
            'objectives/test_ijepa.py::test_the_loss_is_that_of_numpy_without_padding'),
        Row('Sinkhorn-Knopp', 'NumPy, float64', 'assignments',
            'objectives/test_dino.py::test_sinkhorn_is_that_of_the_authors_and_takes_large_logits'),
        Row('distillation, hard and soft', 'deit', 'loss',
            'objectives/test_distill.py::test_the_loss_is_that_of_deits_program'),
        Row('masked patches', 'NumPy, float64', 'loss',
            'objectives/test_masked_patch.py::test_the_loss_is_that_of_numpy'),
        Row('token labeling', 'NumPy, float64', 'loss',
            'objectives/test_token_label.py::test_the_loss_is_that_of_numpy_with_tokens_exchanged_and_back'),
        Row('SAM and GSAM', 'NumPy, float64', 'gradient',
            'objectives/test_sam.py::test_gradient_loss_and_stats_are_those_of_the_papers'),
        Row('sigmoid and softmax cross-entropy', 'NumPy, float64', 'loss',
            'objectives/test_losses.py::test_sigmoid_cross_entropy_sums_over_classes'),
    ),
    'Optimizers': (
        Row('AdamW', 'optax', 'parameters over steps', 'optim/test_adam.py::test_equals_optax'),
        Row('Adafactor, layer by layer', 'NumPy, float64', 'parameters over steps',
            'optim/test_optimizers.py::test_adafactor_factors_large_matrices_layer_by_layer'),
        Row('SGD with decoupled decay', 'NumPy, float64', 'parameters over steps',
            'optim/test_optimizers.py::test_sgd_can_decay_beside_its_momentum'),
        Row('learning rates of cosine, linear and rsqrt with warm-up and cooldown',
            'big_vision, vision_transformer, mae', 'every update of 400',
            'optim/test_schedules.py::test_every_rate_is_that_of_the_program',
            'optim/make_golden_schedules.py'),
        Row('learning rates of DeiT, LV-ViT and DINO',
            'timm in the loops of deit and TokenLabeling, dino', 'every update of 400',
            'optim/test_schedules.py::test_every_rate_is_that_of_the_program',
            'optim/make_golden_schedules.py'),
        Row('learning rates of BiT-HyperRule', 'big_transfer', 'every update of 500',
            'optim/test_schedules.py::test_bit_hyperrule_warms_up_and_drops_as_its_program',
            'optim/make_golden_schedules.py'),
        Row('temperature of the teacher', 'dino', 'every epoch of 40',
            'optim/test_schedules.py::test_the_temperature_of_dino_rises_once_an_epoch',
            'optim/make_golden_schedules.py'),
        Row("clipping of query, key and value as DINO's one tensor", 'dino', 'gradients',
            'optim/test_clipping.py::test_query_key_and_value_are_clipped_as_the_one_tensor_that_dino_has'),
        Row('RMSProp of TensorFlow', 'NumPy, float64', 'parameters over steps',
            'optim/test_optimizers.py::'
            'test_rmsprop_has_the_rate_in_its_momentum_eps_below_the_root_and_squares_that_begin_at_one'),
        Row('exponential decay', 'formula', 'rates',
            'optim/test_schedules.py::test_exponential_decay_is_a_staircase_from_the_start_of_the_run'),
        Row('what MAE decays', 'mae', 'every parameter of encoder and decoder',
            'config/test_published_recipes.py::test_mae_decays_what_its_program_decays'),
    ),
    'Evaluations': (
        Row('k nearest neighbors', 'dino', 'top-1 and top-5 of three k',
            'evaluate/test_knn.py::test_accuracies_are_those_of_dinos_program', 'evaluate/make_golden_knn.py'),
        Row('k nearest neighbors', 'NumPy, float64', 'similarities and votes',
            'evaluate/test_knn.py::test_similarities_and_votes_are_those_of_numpy'),
        Row('few-shot regression', 'NumPy, float64', 'weights',
            'evaluate/test_ridge.py::test_both_forms_solve_the_normal_equations'),
        Row("few-shot accuracy by big_vision's protocol: shots, small classes, regression", 'big_vision',
            'accuracy of every seed', 'evaluate/test_fewshot.py::'
            'test_big_vision_s_protocol_has_the_accuracies_of_its_program', 'evaluate/make_golden_fewshot.py'),
        Row("images of big_vision's few-shot protocol", 'big_vision', 'pixels of odd sizes',
            'evaluate/test_fewshot.py::test_big_vision_s_protocol_squashes_and_crops_images',
            'evaluate/make_golden_fewshot.py'),
        Row('few-shot accuracy', 'NumPy, float64', 'accuracies',
            'evaluate/test_fewshot.py::test_it_equals_numpy_for_any_batch_and_mesh'),
        Row('logistic regression', 'scikit-learn', 'weights at the optimum',
            'evaluate/test_linear.py::test_the_optimum_is_that_of_scikit_learn'),
        Row('choice of the penalty', 'scikit-learn', 'held-out NLL of every penalty, accuracy with the best',
            'evaluate/test_linear.py::test_the_penalty_with_the_smallest_held_out_nll_is_chosen'),
        Row('linear probes of MAE (LARS) and DINO (SGD)', 'NumPy, float64', 'weights after training',
            'evaluate/test_probe.py::test_training_is_that_of_numpy'),
        Row('prompts of zero-shot classification, all classes of ImageNet', 'big_vision', 'texts (digests)',
            'data/test_prompts.py::test_all_prompts_of_imagenet_are_those_of_big_vision',
            'data/make_golden_prompts.py'),
        Row('text towers of CLIP, SigLIP and SigLIP 2 with their tokenizers', 'transformers',
            'ids and vectors of texts, logits of images, random weights',
            'weights/test_text.py::test_vectors_of_texts_are_those_of_transformers', 'weights/make_golden_text.py'),
        Row('zero-shot accuracy', 'NumPy', 'accuracies on uneven splits',
            'evaluate/test_zeroshot.py::test_it_equals_numpy_for_any_batch_and_mesh_and_counts_each_example_once'),
        Row('top-1, top-5, NLL, calibration error', 'NumPy', 'metrics on uneven splits',
            'evaluate/test_classify.py::test_metrics_are_exact_for_any_batch_and_mesh'),
    ),
    'Recipes': (
        Row('pre-training on JFT, ImageNet-21k, ImageNet-1k', 'ViT paper, Table 3', 'settings',
            'recipes/test_table_3.py::test_a_run_is_what_table_3_says'),
        Row('hidden layer of the head', 'ViT paper, 3.1 and D.3', 'settings of pre-training, hybrids and studies',
            'recipes/test_table_3.py::test_studies_take_the_head_of_each_network'),
        Row('clipping on ImageNet alone', 'ViT paper, Table 3', 'settings',
            'recipes/test_table_3.py::test_other_networks_on_jft_have_their_head_and_no_clipping'),
        Row('fine-tuning', 'ViT paper, Table 4', 'settings', 'recipes/test_finetune.py::test_table_4_of_the_vit_paper'),
        Row('fine-tuning, 12 steps on the same batches', 'timm', 'loss and norm of the gradient of each step',
            'jobs/test_finetune.py::test_fine_tuning_on_the_same_batches_is_timms',
            'jobs/make_golden_finetuning.py'),
        Row('dropout of fine-tuning', 'vision_transformer', 'settings',
            'recipes/test_finetune.py::test_dropout_is_that_of_the_program_that_fine_tunes'),
        Row('crops and flips of VTAB', 'BiT paper, Appendix F', 'settings and windows',
            'recipes/test_vtab.py::test_tasks_are_cropped_and_flipped_as_in_bit'),
        Row('BiT-HyperRule', 'BiT paper', 'settings', 'recipes/test_finetune.py::test_bit_hyperrule'),
        Row('MAE fine-tuning', 'mae', 'settings by size',
            'recipes/test_finetune.py::test_mae_by_the_size_of_the_model'),
        Row('DINO S/16, S/8, B/16, B/8', 'dino, its published arguments as others repeat them', 'settings',
            'config/test_published_recipes.py::test_dino_has_the_arguments_that_others_repeat_of_its_published_weights'),
        Row('DeiT distillation', 'deit', 'settings',
            'config/test_published_recipes.py::test_distillation_weighs_the_teacher_as_its_program_does'),
        Row('consistent distillation, but for its rate', 'big_vision', 'settings', 'config/test_published_recipes.py::'
            'test_consistent_distillation_has_the_numbers_of_its_program_but_for_the_rate_of_its_resnet'),
        Row('GSAM', 'big_vision', 'settings',
            'config/test_published_recipes.py::test_gsam_has_the_numbers_of_its_program'),
        Row("DINO's linear probe", 'dino', 'settings',
            'config/test_published_recipes.py::test_a_linear_probe_crops_and_reads_as_its_program'),
        Row('LV-ViT T, S, M, L', 'TokenLabeling', 'settings',
            'recipes/test_token_label.py::test_training_has_the_settings_of_the_program'),
        Row('LV-ViT at 384 to 512 px', 'TokenLabeling', 'settings',
            'recipes/test_token_label.py::test_fine_tuning_has_the_settings_of_the_program'),
        Row('Noisy Student', 'noisystudent', 'settings, 800 px stage',
            'config/test_paper_studies.py::test_noisy_student_of_the_paper_goes_from_b7_to_l2'),
        Row('scaling study: 18 rows', 'ViT paper, Table 6', 'networks, epochs and rates',
            'config/test_paper_studies.py::'
            'test_the_scaling_study_has_the_eighteen_runs_of_table_six_with_the_rates_of_table_three'),
        Row('ablation of optimizers', 'ViT paper, Table 7', 'numbers beside ours',
            'config/test_paper_studies.py::'
            'test_the_ablation_of_optimizers_is_measured_on_five_sets_beside_table_seven'),
        Row('ablation of positions', 'ViT paper, Table 8', 'numbers beside ours',
            'config/test_paper_studies.py::test_the_ablation_of_positions_stands_beside_table_eight'),
        Row('VTAB', 'ViT paper, Table 9', 'numbers beside ours, mean',
            'recipes/test_vtab.py::test_table_nine_stands_beside_the_tasks_and_its_mean_is_that_of_the_paper'),
        Row('data size', 'ViT paper, Table 5', 'numbers beside ours',
            'recipes/test_vtab.py::test_table_five_stands_beside_a_network_that_is_in_it'),
        Row('ResNets take the better of two protocols', 'ViT paper, B.1.1', 'settings',
            'recipes/test_vtab.py::test_a_resnet_takes_the_better_of_both_protocols'),
        Row('AugReg levels', 'AugReg paper', 'settings', 'recipes/test_augreg.py::test_the_levels_of_the_paper'),
    ),
}


class Seen(NamedTuple):
  """What a test demands of numbers: its loosest tolerances, and the largest number compared; None if it has none."""
  rtol: float | None = None
  atol: float = 0.
  largest: float = 0.

  def joined(self, other: Seen) -> Seen:
    if self.rtol is None or other.rtol is None:
      return other if self.rtol is None else self
    return Seen(max(self.rtol, other.rtol), max(self.atol, other.atol), max(self.largest, other.largest))

  def __str__(self) -> str:
    if self.rtol is None:
      return 'passed'
    bounds = [f'{name} {value:.0e}' for name, value in (('rtol', self.rtol), ('atol', self.atol)) if value]
    return f'{", ".join(bounds)} ({self.largest:.2g})' if bounds else 'equal'


class Recorder:
  """A plugin of pytest: notes which tolerances each test demands, and which tests did not pass."""

  def __init__(self) -> None:
    self.seen: dict[str, Seen] = {}
    self.failed: list[str] = []
    self.ran: set[str] = set()
    self._now = ''

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item: pytest.Item) -> Any:
    self._now = item.nodeid.split('[')[0].removeprefix('tests/')
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(np.testing, 'assert_allclose', self._allclose(np.testing.assert_allclose))
      patch.setattr(np.testing, 'assert_array_equal', self._equal(np.testing.assert_array_equal))
      patch.setattr(pytest, 'approx', self._approx(pytest.approx))
      return (yield)

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    name = report.nodeid.split('[')[0].removeprefix('tests/')
    if report.failed:
      self.failed.append(report.nodeid)
    elif report.when == 'call' and report.passed:
      self.ran.add(name)

  def _note(self, desired: Any, rtol: Any, atol: Any) -> None:
    found = demanded(desired, rtol, atol)
    self.seen[self._now] = self.seen.get(self._now, Seen()).joined(found)

  def _allclose(self, check: Any) -> Any:
    def noted(actual: Any, desired: Any, rtol: Any = 1e-7, atol: Any = 0., **more: Any) -> None:
      check(actual, desired, rtol, atol, **more)
      self._note(desired, rtol, atol)
    return noted

  def _equal(self, check: Any) -> Any:
    def noted(actual: Any, desired: Any, **more: Any) -> None:
      check(actual, desired, **more)
      self._note(desired, 0., 0.)
    return noted

  def _approx(self, approx: Any) -> Any:
    def noted(expected: Any, rel: Any = None, abs: Any = None, **more: Any) -> Any:
      self._note(list(expected.values()) if isinstance(expected, dict) else expected,
                 (0. if abs else 1e-6) if rel is None else rel, abs or 0.)
      return approx(expected, rel=rel, abs=abs, **more)
    return noted


def demanded(desired: Any, rtol: Any, atol: Any) -> Seen:
  """The tolerances of a comparison with numbers; none if they are not numbers."""
  b = np.asarray(desired)
  if not b.size or not (np.issubdtype(b.dtype, np.number) or b.dtype == bool or b.dtype.name == 'bfloat16'):
    return Seen()
  largest = float(np.abs(np.nan_to_num(b.astype(np.float64), posinf=0., neginf=0.)).max())
  return Seen(float(np.max(rtol)), float(np.max(atol)), largest)


def stored_bounds() -> dict[str, str]:
  """The bound of each test when it last ran."""
  return json.loads(BOUNDS.read_text())


def in_brackets(bound: str) -> str:
  """A bound as the page shows it: `rtol 1e-05, atol 1e-07 (17)` is ` (1e-5, ±1e-7)`, and `passed` is nothing."""
  if bound == 'passed':
    return ''
  text = bound.partition(' (')[0].replace('rtol ', '').replace('atol ', '±').replace('e-0', 'e-')
  return f' ({text})'


def page(bounds: Mapping[str, str]) -> str:
  """The text of `docs/explanation/fidelity.md`, with the bound of each test but without the largest number compared."""
  commits = ', '.join(f'{name} {commit}' for name, commit in COMMITS.items())
  parts = [HEAD, *deviations.tables(), '\n## Compared and equal\n', textwrap.fill(EQUAL.format(commits=commits), 120)]
  for title, rows in ROWS.items():
    by_oracle: dict[str, list[str]] = {}
    for row in rows:
      by_oracle.setdefault(row.oracle, []).append(row.what + in_brackets(bounds[row.test]))
    parts += [f'\n### {title}\n', '| compared with | what is equal |', '|---|---|']
    parts += [f'| {oracle} | {"; ".join(items)} |' for oracle, items in by_oracle.items()]
  return '\n'.join(parts) + '\n\n' + MEASURED.read_text()


def main(words: Sequence[str]) -> int:
  """Runs the tests, or those whose names have one of the words, and writes the page; status 1 if one did not pass."""
  recorder, bounds = Recorder(), stored_bounds()
  named = dict.fromkeys(row.test for rows in ROWS.values() for row in rows)
  wanted = [test for test in named if not words or test not in bounds or any(word in test for word in words)]
  if wanted and words != ['page']:
    status = pytest.main(['-q', '-m', '', '-p', 'no:cacheprovider', *(f'tests/{test}' for test in wanted)],
                         plugins=[recorder])
    missing = [test for test in wanted if test not in recorder.ran]
    if status or recorder.failed or missing:
      print('Not written, since these did not pass or were skipped:', *(recorder.failed or missing), sep='\n  ')
      return 1
    bounds |= {test: str(recorder.seen.get(test, Seen())) for test in wanted}
    BOUNDS.write_text(json.dumps({test: bounds[test] for test in sorted(named)}, indent=1) + '\n')
  PAGE.write_text(page(bounds))
  print(f'Written: {PAGE}')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
