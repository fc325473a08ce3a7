"""Breaks one line of the product at a time and says whether tests notice: `python -m tests.mutations [-m EXPR] [WORD]`.

Each mutation is made in a copy of the checkout and must be caught by the tests named beside it, which are tests of the
default suite. `-m slow` and the like are passed to pytest; WORD selects mutations whose file contains it. Exit status 1
if a mutation is not caught.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ('vit_jax', 'configs', 'benchmarks', 'tests', 'docs', 'launch', 'pyproject.toml', 'setup.py', 'README.md',
          'BENCHMARKS.md')


class Mutation(NamedTuple):
  """`old` stands once in `vit_jax/<file>`; `tests` are paths in `tests/`."""
  file: str
  old: str
  new: str
  tests: str


STEP = 'train/test_step.py train/test_randomness.py train/test_plain_training.py train/test_loop.py test_invariance.py'
CHECKPOINT = 'train/test_checkpoint.py train/test_checkpoint_reader.py train/test_damaged_checkpoints.py'
LOADER = 'data/test_loader.py data/test_batches.py data/test_workers.py'
AUGMENT = 'data/test_augment.py data/test_erase.py'
HOOKS = 'train/test_hooks.py train/test_early_stop.py'
DROPPED = 'models/test_layers.py models/test_vit.py models/test_stack.py'
OPTIM = 'optim train/test_step.py test_invariance.py'

MUTATIONS = (
    Mutation('models/kernels/dense.py', 'jnp.round(scaled)', 'jnp.trunc(scaled)', 'models/test_quantized.py'),
    Mutation('models/kernels/dense.py', 'return dx.astype(x.dtype), contract(x, dy, rows, rows), dbias',
             'return contract(dy, kernel, range(len(rows), dy.ndim), outputs), contract(x, dy, rows, rows), dbias',
             'models/test_quantized.py'),
    Mutation('models/kernels/dense.py', 'jnp.abs(x).max(tuple(axes), keepdims=True)',
             'jnp.abs(x).max(keepdims=True) * jnp.ones_like(x.max(tuple(axes), keepdims=True))',
             'models/test_quantized.py'),
    Mutation('models/kernels/dense.py', 'narrow.sums).astype(jnp.float32)\n  y =',
             'jnp.bfloat16).astype(jnp.float32)\n  y =', 'models/test_quantized.py'),
    Mutation('models/kernels/forms.py', 'return FAST._replace(dense=_once(form))', 'return FAST',
             'models/test_quantized.py'),
    Mutation('models/vit/vit.py', 'context=context.of_blocks(s)', 'context=self._context', 'models/test_quantized.py'),
    Mutation('models/decoders.py', 'context.of_blocks(self.encoder)', 'context.of(self.encoder)',
             'models/test_quantized.py'),
    Mutation('parallel/kernels.py', "return '' if model.quantize is Quantize.NONE else", "return '' if True else",
             'parallel/test_layout.py'),
    Mutation('config/schema/vit.py', 'if self.kernel is MlpKernel.FUSED and model.quantize is not Quantize.NONE:',
             'if False:', 'models/test_quantized.py'),
    Mutation('config/schema/vit.py', 'if self.quantize is not Quantize.NONE and self.kernels is Kernels.PLAIN:',
             'if False:', 'models/test_quantized.py'),
    Mutation('record/storage.py', 'return is_local(path) and not _is_bucket(file_system(path))',
             'return is_local(path)', 'record/test_storage.py'),
    Mutation('record/storage.py', 'len(folder) >= longest', 'len(folder) > longest', 'record/test_storage.py'),
    Mutation('record/growing.py', 'numbered.reverse()', 'pass', 'record/test_growing.py'),
    Mutation('record/writer.py', 'growing.join(self._path)', 'pass', 'record/test_writer.py record/test_growing.py'),
    Mutation('record/writer.py', 'self._mirror.settle()', 'pass', 'record/test_growing.py'),
    Mutation('record/run_directory.py', "if owner.get('token') == self._token:", 'if owner:',
             'record/test_run_directory.py train/test_checkpoint.py'),
    Mutation('record/run_directory.py', '  check_owned(path)\n', '', 'record/test_run_directory.py'),
    Mutation('train/checkpoint.py', 'temporary_path_class=self._commit_class()', 'temporary_path_class=None',
             'train/test_checkpoint.py'),
    Mutation('train/host_times.py', 'now_s - self._arrived_s', 'now_s - self._launched_s', 'train/test_host_times.py'),
    Mutation('train/host_times.py', 'if late_s >= LATE_SHARE * step_s else 0.', '', 'train/test_host_times.py'),
    Mutation('train/host_times.py', 'done.step >= self._gathered.step + 2', 'True', 'train/test_host_times.py'),
    Mutation('train/step.py', 'jax.random.fold_in(jax.random.key(seed), step)', 'jax.random.key(seed)', STEP),
    Mutation('train/step.py', 'return jax.random.fold_in(key, i)', 'return key', STEP),
    Mutation('train/step.py', 'jnp.isfinite(out.loss.value) & jnp.isfinite(grad_norm)', 'jnp.isfinite(out.loss.value)',
             STEP),
    Mutation('train/step.py', 'jnp.where(ok, u, -0.)', 'u', STEP),
    Mutation('train/step.py', 'numerics.select(ok, objective.after_update(params, state.extra, out.stats, state.step), '
             'state.extra)', 'objective.after_update(params, state.extra, out.stats, state.step)', STEP),
    Mutation('train/step.py', 'scale = num_rows / _weight(out)', 'scale = jnp.ones(())', STEP),
    Mutation('train/step.py', '_squares(state.params), _squares(moved)', '_squares(moved), _squares(state.params)',
             STEP),
    Mutation('train/grad_cache.py', 'own_key(i), state.step', 'own_key(i * 0), state.step', 'train/test_grad_cache.py'),
    Mutation('train/grad_cache.py', 'x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)',
             'x.reshape(count, x.shape[0] // count, *x.shape[1:])[:, ::-1]', STEP),
    Mutation('data/order.py', 'Stream.ORDER, self.seed, int(epoch)', 'Stream.ORDER, self.seed', 'data/test_order.py'),
    Mutation('data/order.py', 'self._key[1] = position', 'self._key[1] = 0', 'data/test_order.py ' + LOADER),
    Mutation('data/order.py', 'num_different = -(-self.batch_size // self.times)',
             'num_different = self.batch_size // self.times', 'data/test_order.py ' + LOADER),
    Mutation('data/loader.py', 'mask[row] = 0.', 'mask[row] = 1.', LOADER),
    Mutation('data/loader.py', 'inside = positions < num_examples', 'inside = positions <= num_examples - 2',
             LOADER),
    Mutation('data/loader.py', "return batch | {'index': index, 'mask': mask * ~batch['bad']}",
             "return batch | {'index': index, 'mask': mask}", LOADER),
    Mutation('data/loader.py', '_make_next(self.source, index, error, make), is_bad=True)',
             '_make_next(self.source, index, error, make), is_bad=False)', LOADER),
    Mutation('data/loader.py', '-(-self.num_examples // self._batch_size)',
             'self.num_examples // self._batch_size', LOADER),
    Mutation('data/device/mix.py', 'weight = jnp.where(has_partner_B.reshape((-1,) + (1,) * (values.ndim - 1)), '
             'weight, 1.)', 'weight = weight * 1.', 'data/test_mix.py'),
    Mutation('data/device/mix.py', 'area=1. - jax.random.beta(area_key', 'area=jax.random.beta(area_key',
             'data/test_mix.py'),
    Mutation('objectives/losses.py', 'amount / targets_BC.shape[-1]', 'amount / (targets_BC.shape[-1] - 1)',
             'objectives/test_losses.py'),
    Mutation('objectives/losses.py', '(1. - targets_BC) * jax.nn.log_sigmoid(-z_BC)',
             '(1. - targets_BC) * jax.nn.log_sigmoid(z_BC)', 'objectives/test_losses.py'),
    Mutation('objectives/losses.py', '(weight_B >= targets_BC.max(-1))', '(weight_B >= 0)', 'objectives/test_losses.py '
             'objectives/test_supervised.py'),
    Mutation('objectives/ema.py', 'a + (1. - decay) * (p - a)', 'p + (1. - decay) * (a - p)', 'objectives/test_ema.py'),
    Mutation('objectives/ema.py', '(1. + s) / (10. + s)', 's / (10. + s)', 'objectives/test_ema.py'),
    Mutation('optim/adam.py', '1. - decay ** count.astype(jnp.float32) for decay in (b1, b2)',
             '1. - decay ** count.astype(jnp.float32) for decay in (b1, b1)', OPTIM),
    Mutation('optim/adam.py', 'count = jnp.where(ok, optax.safe_increment(state.count), state.count)',
             'count = optax.safe_increment(state.count)', OPTIM),
    Mutation('optim/clipping.py', "if re.fullmatch(pattern, name)), '')", 'if re.match(pattern, name)), name)',
             'optim/test_clipping.py'),
    Mutation('optim/clipping.py', 'factor = limit / jnp.maximum(grad_norm, limit)',
             'factor = limit / jnp.maximum(grad_norm, 1e-6)', OPTIM),
    Mutation('optim/per_layer.py', 'is_plain = (param_norms == 0.) | (update_norms == 0.)',
             'is_plain = update_norms == 0.', OPTIM),
    Mutation('optim/schedules.py', '(step + 1.) / (at.warmup + 1.)', 'step / (at.warmup + 1.)', OPTIM),
    Mutation('optim/schedules.py', 'max(1, at.total - at.hold - start)', 'max(1, at.total - at.hold)', OPTIM),
    Mutation('optim/schedules.py', 'share = step / max(1, at.warmup - 1)', 'share = step / max(1, at.warmup)', OPTIM),
    Mutation('optim/schedules.py', 'at.stairs) - at.lag, 0.)', 'at.stairs), 0.)', OPTIM),
    Mutation('data/image/crops.py', '_f32(height * width) >= _f32(covered)', '_f32(height * width) >= _f32(0)',
             'data/test_crops.py'),
    Mutation('evaluate/fewshot.py', 'if short and not is_big_vision', 'if short', 'evaluate/test_fewshot.py'),
    Mutation('optim/rules.py', 'return decay ** (depth + 1) if', 'return decay ** depth if', OPTIM),
    Mutation('optim/rules.py', 'jnp.where(step < length, jnp.zeros_like(x), x)',
             'jnp.where(step <= length, jnp.zeros_like(x), x)', OPTIM),
    Mutation('evaluate/classify.py', "mask_B = batch['mask'] * (num_targets_B > 0)", "mask_B = batch['mask'] * 1.",
             'evaluate/test_classify.py evaluate/test_targets.py'),
    Mutation('evaluate/classify.py', '.ceil(p_B * NUM_BINS).astype(jnp.int32) - 1', '.ceil(p_B * NUM_BINS).astype('
             'jnp.int32)', 'evaluate/test_classify.py'),
    Mutation('evaluate/knn.py', 'new_GrS = jnp.where(mask_S[None, None] > 0, new_GrS, -jnp.inf)', '',
             'evaluate/test_knn.py'),
    Mutation('evaluate/knn.py', 's_GrK = similarity / temperature', 's_GrK = similarity * temperature',
             'evaluate/test_knn.py'),
    Mutation('evaluate/health.py', '(total - self_pairs) / (num * (num - 1))', 'total / num ** 2',
             'evaluate/test_health.py'),
    Mutation('evaluate/health.py', "'bilinear')[:, :, ::-1]", "'bilinear')", 'evaluate/test_health.py'),
    Mutation('objectives/dino.py', '.max(counts_R)', '.add(counts_R)', 'objectives/test_dino.py'),
    Mutation('evaluate/fewshot.py', '(y - x @ w) / np.maximum(1. - h, 1e-12)[:, None]', '(y - x @ w)',
             'evaluate/test_ridge.py evaluate/test_fewshot.py'),
    Mutation('models/vit/interpolate.py', 'np.minimum(whole + 1, old - 1)', 'np.minimum(whole + 1, old - 2)',
             'models/test_interpolate.py models/test_positions.py weights/test_resize.py'),
    Mutation('models/vit/positions.py', 'parts = [xp.sin(angle_x), xp.cos(angle_x), xp.sin(angle_y), xp.cos(angle_y)]',
             'parts = [xp.sin(angle_y), xp.cos(angle_y), xp.sin(angle_x), xp.cos(angle_x)]',
             'models/test_positions.py'),
    Mutation('train/checkpoint_reader.py', "if finish() != about['digests'][name]:", 'if False:',
             CHECKPOINT),
    Mutation('train/checkpoint_reader.py', "if checkpoint_files.sha256(about['data']) != about['data_sha256']:",
             'if False:', CHECKPOINT),
    Mutation('train/checkpoint.py', 'checkpoint_files.metric_values(self.folder.parent, best, self.reader.steps())',
             '{}', 'test_restarts.py'),
    Mutation('record/checkpoint_files.py', '-1. if reader.is_lower_better(metric) else 1.', '1.',
             'record/test_checkpoint_files.py'),
    Mutation('train/checkpoint.py', 'managers.LatestN(self.latest)', 'managers.LatestN(self.latest + 1)', CHECKPOINT),
    Mutation('data/loader.py', 'transform(record, rngs.at(position))',
             'transform(record, rngs.at(position % self.batch_size))', LOADER),
    Mutation('data/loader.py', 'if first_step != self._first_step:', 'if self._first_step < 0:', LOADER),
    Mutation('data/order.py', 'Stream.AUGMENTATION, seed', 'Stream.AUGMENTATION, 0',
             'data/test_order.py ' + LOADER),
    Mutation('data/order.py', 'rows % num_different)', 'rows // self.times)', 'data/test_order.py ' + LOADER),
    Mutation('data/loader.py', 'range(start, _LAST_STEP)', 'range(start + (start > 0), _LAST_STEP)', LOADER),
    Mutation('data/loader.py', 'self._visit(step * self.info.batch_size + np', 'self._visit(step + np',
             LOADER),
    Mutation('data/workers.py', 'UserError if status == _BUS_ERROR else TemporaryError', 'UserError',
             LOADER),
    Mutation('data/device/prepare.py', "jax.random.bernoulli(flip_key, 0.5, batch['image'].shape[:1])",
             "jnp.repeat(jax.random.bernoulli(flip_key, 0.5, (1,)), batch['image'].shape[0])",
             'train/test_randomness.py'),
    Mutation('data/device/prepare.py', "(batch['image'].shape[0], 2), -limit, limit + 1)",
             "(batch['image'].shape[0], 2), -limit, limit)", AUGMENT),
    Mutation('data/device/prepare.py', 'jax.random.uniform(key, (shape[0], 3), jnp.float32, -1., 1.)',
             'jnp.tile(jax.random.uniform(key, (1, 3), jnp.float32, -1., 1.), (shape[0], 1))', AUGMENT),
    Mutation('data/device/prepare.py', 'jax.random.bernoulli(chosen_key, settings.probability, (num_images,))',
             'jnp.repeat(jax.random.bernoulli(chosen_key, settings.probability, (1,)), num_images)', AUGMENT),
    Mutation('data/device/prepare.py', 'jax.random.uniform(key, (TRIES, num_images, 4), jnp.float32)',
             'jnp.repeat(jax.random.uniform(key, (TRIES, 1, 4), jnp.float32), num_images, 1)', AUGMENT),
    Mutation('data/device/mix.py', 'lam.reshape(lam.shape[0], -1).mean(1)', 'lam.reshape(lam.shape[0], -1).max(1)',
             'data/test_mix.py'),
    Mutation('data/device/mix.py', 'jnp.floor(jnp.sqrt(area) * jnp', 'jnp.floor(area * jnp', 'data/test_mix.py'),
    Mutation('train/step.py', "keys['prepare'], step), keys['loss']", "keys['prepare'], step), keys['prepare']", STEP),
    Mutation('train/step.py', '(jax.lax.stop_gradient(_weight(out)) if accumulate == 1 else num_rows)',
             'num_rows', STEP),
    Mutation('train/hooks.py', 'self.learning_rates.at(step - 1)', 'self.learning_rates.at(step)', HOOKS),
    Mutation('train/hooks.py', "row['step'] <= up_to", "row['step'] < up_to", HOOKS),
    Mutation('train/hooks.py', 'self._best + self._min_delta:', 'self._best:', HOOKS),
    Mutation('jobs/train.py', 'self.loader.batches(start)', 'self.loader.batches(start + (start > 0))',
             'jobs/test_train.py'),
    Mutation('core/numerics.py', 'values_B * mask_B, 0.).sum()', 'values_B, 0.).sum()',
             'core/test_numerics.py objectives/test_losses.py objectives/test_supervised.py'),
    Mutation('core/numerics.py', 'mask_B.sum())', '(mask_B > 0).sum().astype(jnp.float32))',
             'core/test_numerics.py objectives/test_losses.py objectives/test_supervised.py'),
    Mutation('objectives/losses.py', 'sigmoid_xent(logits_BC, targets_BC) / logits_BC.shape[-1]',
             'sigmoid_xent(logits_BC, targets_BC)', 'objectives/test_losses.py'),
    Mutation('objectives/losses.py', '/ jnp.where(total_B > 0., total_B, 1.)', '/ 1.', 'objectives/test_losses.py '
             'objectives/test_supervised.py'),
    Mutation('objectives/supervised.py', 'weights_B * mask_B', 'weights_B', 'objectives/test_supervised.py'),
    Mutation('objectives/ema.py', 'inner = self._inner.after_update(params, extra.get(INNER, {}), stats, step)',
             'inner = extra.get(INNER, {})', 'objectives/test_ema.py'),
    Mutation('objectives/ema.py', 's = step.astype(jnp.float32)', 's = step.astype(jnp.float32) + 1.',
             'objectives/test_ema.py'),
    Mutation('objectives/mae.py', 'jnp.where(choice.rank >= num_visible, error_BN, 0.).sum(-1) / '
             'choice.others.shape[1]', 'error_BN.mean(-1)', 'objectives/test_mae.py'),
    Mutation('objectives/mae.py', '/ choice.others.shape[1]', '/ choice.rank.shape[1]', 'objectives/test_mae.py'),
    Mutation('objectives/patches.py', '/ (patches.shape[-1] - 1)', '/ patches.shape[-1]', 'objectives/test_mae.py'),
    Mutation('objectives/patches.py', 'jax.random.uniform(key, (num_images, num_patches))',
             'jnp.tile(jax.random.uniform(key, (1, num_patches)), (num_images, 1))',
             'objectives/test_mae.py objectives/test_masked_patch.py'),
    Mutation('objectives/dino.py', 'sum((1, 2)) / counts_tV.sum()', 'sum((1, 2)) / counts_tV.size',
             'objectives/test_dino.py'),
    Mutation('objectives/networks.py', 'momentum * a + (1. - momentum) * b', 'momentum * b + (1. - momentum) * a',
             'objectives/test_dino.py objectives/test_byol.py objectives/test_ijepa.py'),
    Mutation('objectives/networks.py', 'self._momentum(step)', 'self._momentum(step + 1)',
             'objectives/test_byol.py objectives/test_ijepa.py'),
    Mutation('objectives/dino.py', 'self._momentum(step)', 'self._momentum(step + 1)', 'objectives/test_dino.py'),
    Mutation('objectives/dino.py', "'count': teacher_BtK.shape[1] * weight_B.sum()", "'count': weight_B.sum()",
             'objectives/test_dino.py'),
    Mutation('objectives/dino.py', 'outputs - center_1K[None]', 'outputs', 'objectives/test_dino.py'),
    Mutation('objectives/dino.py', 'log_q_RK + out_R1, axis=0', 'log_q_RK, axis=0', 'objectives/test_dino.py'),
    Mutation('objectives/byol.py', 'z_BVE[:, ::-1]', 'z_BVE', 'objectives/test_byol.py'),
    Mutation('objectives/ijepa.py', '& ~covered(targets, grid).any(2)', '& ~covered(targets, grid)[:, :, 0]',
             'objectives/test_ijepa.py'),
    Mutation('objectives/ijepa.py', 'jnp.where(masks.is_target, error_BMt, 0.)', 'error_BMt',
             'objectives/test_ijepa.py'),
    Mutation('objectives/ijepa.py', 'places = most - size + 1', 'places = most - size', 'objectives/test_ijepa.py'),
    Mutation('objectives/ijepa.py', 'mask=masks.is_context)', 'mask=None)', 'objectives/test_ijepa.py'),
    Mutation('models/decoders.py', 'mask.reshape(x.shape[0], 1, 1, -1)', 'None', 'objectives/test_ijepa.py'),
    Mutation('objectives/dinov2.py', "terms['ibot'] +", "terms['dino'] +", 'objectives/test_dinov2.py'),
    Mutation('objectives/dinov2.py', '.sum() / NUM_GLOBAL,', '.sum(),', 'objectives/test_dinov2.py'),
    Mutation('objectives/dinov2.py', 'jnp.eye(group, dtype=bool)[None, None], -1.',
             'jnp.eye(group, dtype=bool)[None, None], 2.', 'objectives/test_dinov2.py'),
    Mutation('objectives/dinov2.py', 'extra[PATCH_CENTER], weight_Gs, step)', 'extra[PATCH_CENTER], None, step)',
             'objectives/test_dinov2.py'),
    Mutation('objectives/dinov2.py', 'new_R <= room_R', 'new_R <= most', 'objectives/test_dinov2.py'),
    Mutation('objectives/dinov2_distill.py', 'hides = False', 'hides = True', 'objectives/test_dinov2_distill.py'),
    Mutation('objectives/dinov2_distill.py', 'TRAINED: extra[TRAINED]}', 'TRAINED: {**extra[TRAINED], **params}}',
             'objectives/test_dinov2_distill.py'),
    Mutation('objectives/dinov3.py', 'gram_matrix(fixed)).mean((-2, -1))', 'gram_matrix(fixed)).sum(-1).mean(-1)',
             'objectives/test_dinov3.py'),
    Mutation('objectives/dinov3.py', 'step >= self._moments.start', 'step > self._moments.start',
             'objectives/test_dinov3.py'),
    Mutation('objectives/dinov3.py', 'self._moments.changes(step + 1)', 'self._moments.changes(step)',
             'objectives/test_dinov3.py'),
    Mutation('objectives/dinov3.py', 'PositionResize.BICUBIC)', 'PositionResize.BILINEAR)',
             'objectives/test_dinov3.py'),
    Mutation('data/image/transform.py', 'copy.deepcopy(rng), view', 'rng, view', 'objectives/test_dinov3.py'),
    Mutation('models/vit/rotary.py', 'jnp.exp(draws[2:4] + draws[4:])', 'jnp.exp(draws[2:4])',
             'models/test_positions.py'),
    Mutation('objectives/lejepa.py', '2. * gap * phi.at[..., jnp.array([0, t_points - 1])].divide(2.)',
             '2. * gap * phi', 'objectives/test_lejepa.py'),
    Mutation('objectives/lejepa.py', 'z[:, :NUM_GLOBAL].mean', 'z.mean', 'objectives/test_lejepa.py'),
    Mutation('objectives/lejepa.py', "jax.random.normal(keys['directions'],", 'jax.random.normal(jax.random.key(0),',
             'objectives/test_lejepa.py'),
    Mutation('objectives/lejepa.py', 'mean, variance = moments(x, weight)', 'mean, variance = moments(x, weight + 1.)',
             'objectives/test_lejepa.py'),
    Mutation('objectives/feature_distill.py', 'return each.reshape(len(each), -1).mean(1)',
             'return each.reshape(len(each), -1).sum(1)', 'objectives/test_feature_distill.py'),
    Mutation('objectives/feature_distill.py', 'image = resized(image, self._px)',
             'image = resized(image[::-1], self._px)', 'objectives/test_feature_distill.py'),
    Mutation('objectives/distill.py', 't ** 2 * jnp.exp', 't * jnp.exp', 'objectives/test_distill.py'),
    Mutation('objectives/networks.py', '(image * old_std + old_mean - new_mean) / new_std', 'image',
             'objectives/test_distill.py objectives/test_feature_distill.py'),
    Mutation('objectives/masked_patch.py', '(num_images, num_patches), 1, max(num_patches, 2))',
             '(num_images, num_patches), 0, max(num_patches, 2))', 'objectives/test_masked_patch.py'),
    Mutation('objectives/masked_patch.py', 'fate_BN < s.mask_token_prob + s.random_patch_prob',
             'fate_BN < s.random_patch_prob',
             'objectives/test_masked_patch.py'),
    Mutation('objectives/token_label.py', '/ jnp.maximum(counts_BN.sum(1), 1)', '/ counts_BN.shape[1]',
             'objectives/test_token_label.py'),
    Mutation('objectives/token_label.py', '(1. - amount + off) * targets + off', '(1. - amount) * targets + off',
             'objectives/test_token_label.py'),
    Mutation('objectives/sam.py', 'h - self._alpha * (g', 'h + self._alpha * (g', 'objectives/test_sam.py'),
    Mutation('objectives/sam.py', 'self._rho(step) / (_norm(g) + TINY)', 'self._rho(step)', 'objectives/test_sam.py'),
    Mutation('optim/adam.py', '(jnp.sqrt(v / nu_sum) + eps)', 'jnp.sqrt(v / nu_sum + eps)', OPTIM),
    Mutation('optim/schedules.py', '(at.total - step) / at.cooldown', '(at.total - 1. - step) / at.cooldown', OPTIM),
    Mutation('optim/schedules.py', 'step >= drop', 'step > drop', OPTIM),
    Mutation('optim/schedules.py', 'jnp.floor(step / at.every)', 'step / at.every', OPTIM),
    Mutation('optim/schedules.py', '(step - begin) / (until - begin)', '(step + 1. - begin) / (until - begin)', OPTIM),
    Mutation('optim/schedules.py', 'config.lr * batch_size / config.base_batch_size if', 'config.lr if', OPTIM),
    Mutation('optim/rules.py', 'config.weight_decay / over * ramp', 'config.weight_decay * ramp', OPTIM),
    Mutation('optim/rules.py', 'below = depth - jnp', 'below = depth - 1 - jnp', OPTIM),
    Mutation('optim/masks.py', 're.fullmatch(pattern, one) for pattern', 're.search(pattern, one) for pattern', OPTIM),
    Mutation('optim/masks.py', "names = [name, f'{name}/kernel'] if name in matrices else [name]", 'names = [name]',
             'optim/test_matrices.py'),
    Mutation('optim/muon.py', 'leaf.reshape(-1, *shape_of(leaf.shape, matrix))',
             'leaf.reshape(len(leaf), -1, shape_of(leaf.shape, matrix)[1])', OPTIM),
    Mutation('core/axes.py', "Axes(equation.params['names'], equation.params['matrix'])",
             "Axes(equation.params['names'])", 'optim/test_matrices.py'),
    Mutation('config/schema/optim.py', "weight_decay_mask: tuple[str, ...] = ('.*/kernel',)",
             "weight_decay_mask: tuple[str, ...] = ('.*',)", OPTIM),
    Mutation('optim/rules.py', 'numerics.select(step < length, state, new_state)',
             'numerics.select(step <= length, state, new_state)', OPTIM),
    Mutation('optim/adafactor.py', 'row_factor / row_factor.mean(small, keepdims=True)',
             'row_factor', OPTIM),
    Mutation('optim/per_layer.py', 'first = x.ndim - sum(matrix) if matrix else int(trees.is_stacked(name))',
             'first = 0', OPTIM),
    Mutation('optim/per_layer.py', 'first = x.ndim - sum(matrix) if matrix else int', 'first = int',
             'optim/test_matrices.py'),
    Mutation('models/layers.py', '1. / (1. - rate), 0.)', '1., 0.)', DROPPED),
    Mutation('models/layers.py', 'jax.random.bernoulli(key, 1. - rate, (num_images,))',
             'jnp.repeat(jax.random.bernoulli(key, 1. - rate, (1,)), num_images)', DROPPED),
    Mutation('models/layers.py', 'x / (1. - rate), jnp', 'x, jnp', DROPPED),
    Mutation('models/vit/vit.py', 'np.linspace(first, s.drop_path, s.depth)',
             'np.linspace(s.drop_path, first, s.depth)', DROPPED),
    Mutation('models/vit/vit.py', 'jax.random.split(key, s.depth)', 'jnp.stack([key] * s.depth)', DROPPED),
    Mutation('models/vit/block.py', 'keys.mlp_path, num_images=num_images), carry, captured',
             'keys.attention_path, num_images=num_images), carry, captured', DROPPED),
    Mutation('evaluate/classify.py', '.sum(-1) / jnp.maximum(num_targets_B, 1.)', '.sum(-1)',
             'evaluate/test_classify.py evaluate/test_targets.py'),
    Mutation('evaluate/classify.py', 'target_BC * (mask_B / jnp.maximum(target_BC.sum(-1), 1.))[:, None]',
             'target_BC * mask_B[:, None]', 'evaluate/test_classify.py'),
    Mutation('config/durations.py', 'int(steps + .5)', 'int(steps)', 'config/test_durations.py'),
    Mutation('core/types.py', 'np.array(self.parts, np.int64)[:, None] * rows_per_part',
             'np.arange(len(self.parts))[:, None] * rows_per_part', LOADER),
    Mutation('data/device/token_targets.py', "'labels': labels_BC / labels_BC.sum(-1, keepdims=True)",
             "'labels': labels_BC", 'data/test_token_targets.py data/test_pseudo.py'),
    Mutation('train/loop.py', '_Dispatched(step, metrics, batch)', '_Dispatched(step - 1, metrics, batch)',
             'train/test_loop.py'),
    Mutation('train/hooks.py', 'done.step <= watch.after', 'done.step < watch.after', 'train/test_alarm.py'),
    Mutation('train/hooks.py', 'self._num_since < self._patience', 'self._num_since <= self._patience', HOOKS),
    Mutation('train/save_times.py', 'left_s < step_s / 2', 'left_s < step_s', 'train/test_save_times.py'),
    Mutation('optim/adafactor.py', '(state.updates + 1).astype', '(state.updates + 2).astype', OPTIM),
    Mutation('objectives/ema.py', '(extra[AVERAGE], extra.get(INNER, {}))', '(extra[AVERAGE], {})',
             'objectives/test_ema.py'),
    Mutation('objectives/contrastive.py', "return all(self._is_frozen(f'{part}/{name}')",
             "return any(self._is_frozen(f'{part}/{name}')", 'objectives/test_contrastive.py'),
    Mutation('data/order.py', 'streams.choice(Stream.LENGTHS, seed, step,',
             'streams.choice(Stream.LENGTHS, 0, step,', 'test_random_streams.py'),
    Mutation('data/windows.py', 'Stream.ROW_GROUPS, visit.seed, epoch',
             'Stream.ROW_GROUPS, 0, epoch', 'test_random_streams.py'),
    Mutation('objectives/adapters.py', 'dropout_key = jax.random.fold_in(key, self._settings.rank) if',
             'dropout_key = jax.random.key(self._settings.rank, impl=jax.random.key_impl(key)) if',
             'test_random_streams.py'),
    Mutation('models/adapters.py', 'jax.random.split(jax.random.fold_in(key, i), a.shape[0])',
             'jax.random.split(key, a.shape[0])', 'test_random_streams.py'),
    Mutation('objectives/dinov2.py', 'jnp.exp(np.log(ASPECT[0]) + noise_R4[:, 1] * np.log(ASPECT[1] / ASPECT[0]))',
             'ASPECT[0] + noise_R4[:, 1] * (ASPECT[1] - ASPECT[0])', 'objectives/test_dinov2.py'),
    Mutation('export/int8.py', 'np.sqrt(max_input / np.where(max_weight > 0, max_weight, 1.))',
             '(max_input / np.where(max_weight > 0, max_weight, 1.))', 'export/test_int8.py'),
    Mutation('export/int8.py', 'scale = np.abs(kernel).max(0) / KERNEL_TOP',
             'scale = np.full(kernel.shape[1], np.abs(kernel).max() / KERNEL_TOP)', 'export/test_int8.py'),
    Mutation('objectives/contrastive.py', 'math.log(s.scale_init or SCALES[s.loss])',
             '(s.scale_init or SCALES[s.loss])', 'objectives/test_contrastive.py'),
    Mutation('objectives/contrastive.py', 'train=not is_frozen,', 'train=True,', 'objectives/test_contrastive.py'),
    Mutation('objectives/contrastive.py', "batch['label'] if s.same_class else None",
             'None', 'objectives/test_contrastive.py'),
    Mutation('objectives/contrastive.py',
             'pair_losses.mean_loss(pairs, s.loss, form=s.form, chunk=s.chunk)',
             'pair_losses.mean_loss(pairs._replace(mask=None), s.loss, form=s.form, chunk=s.chunk)',
             'objectives/test_contrastive.py objectives/test_masked_rows.py'),
    Mutation('optim/muon.py', 'ahead = trees.map_once(lambda m, g: beta * m + (1. - beta) * g, momentum, grads)',
             'ahead = momentum', 'optim'),
    Mutation('optim/muon.py', 'factor = _scale(config.scale, *shape_of(leaf.shape, matrices[name]))',
             'factor = _scale(config.scale, *shape_of(leaf.shape, matrices[name])[::-1])', 'optim'),
    Mutation('optim/muon.py', 'jnp.where(ok, beta * m.astype(jnp.float32) + (1. - beta) * g, m)',
             'beta * m.astype(jnp.float32) + (1. - beta) * g', OPTIM),
    Mutation('optim/schedule_free.py', 'largest = jnp.maximum(weights.largest, rate)', 'largest = rate', OPTIM),
    Mutation('optim/schedule_free.py', 'total = weights.total + largest**2', 'total = weights.total + largest', OPTIM),
    Mutation('optim/schedule_free.py', 'jnp.where(ok, (1. - c) * (d + config.b1 * u), d)',
             '(1. - c) * (d + config.b1 * u)', OPTIM),
    Mutation('optim/schedule_free.py', 'return 1. - c / (1. - self._b1 * (1. - c)), weights._asdict()',
             'return 1. - c, weights._asdict()', 'optim objectives/test_ema.py'),
    Mutation('optim/schedule_free.py', 'nu_sum = 1. - config.b2 ** count.astype(jnp.float32)', 'nu_sum = 1.', OPTIM),
    Mutation('evaluate/embedding.py', 'for row in np.flatnonzero(batch.mask == 0).tolist():',
             'for row in ():', 'jobs/test_embed.py'),
    Mutation('evaluate/embedding.py', 'range(process, 0 if has_all_shards',
             'range(0, 0 if has_all_shards', 'jobs/test_embed.py jobs/test_embed_processes.py'),
    Mutation('evaluate/embedding.py', 'or user_files.sha256(path) != content',
             'or False and user_files.sha256(path) != content', 'jobs/test_embed.py'),
    Mutation('evaluate/embedding.py', 'id=self.ids[rows.start:rows.stop]',
             'id=self.ids[:rows.stop - rows.start]', 'jobs/test_embed.py'),
    Mutation('record/writer.py', "if size and file.read() != b'\\n':", 'if False:', 'record'),
    Mutation('record/writer.py', 'if is_durable and self._owner:\n      self._owner.check()',
             'if False:\n      self._owner.check()', 'record'),
    Mutation('record/writer.py', 'return value if math.isfinite(value) else str(value)',
             'return value if math.isfinite(value) else None', 'record'),
    Mutation('record/writer.py', 'self._time_offset_s = reader.last_time_s(self._path) - time.monotonic()',
             'self._time_offset_s = -time.monotonic()', 'record'),
    Mutation('record/writer.py', 'redacted(json.dumps(', '(json.dumps(', 'record'),
    Mutation('evaluate/embedding.py', 'start = number * self.batch_size',
             'start = number % 2 * self.batch_size', 'jobs/test_embed.py'))


def main() -> int:
  """Runs the selected mutations and prints one line for each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('-m', default='not slow', help='the tests to run, as for pytest')
  parser.add_argument('word', nargs='?', default='', help='part of the name of the mutated file')
  arguments = parser.parse_args()
  chosen = [m for m in MUTATIONS if arguments.word in m.file]
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    for name in COPIED:
      path = ROOT / name
      (shutil.copytree if path.is_dir() else shutil.copy)(path, root / name)
    caught = sum([_is_caught(mutation, root, arguments.m) for mutation in chosen])
  print(f'{caught} of {len(chosen)} mutations were caught.')
  return int(caught < len(chosen))


def _is_caught(mutation: Mutation, root: pathlib.Path, marks: str) -> bool:
  """Runs the tests of a mutation in the copy `root`, and prints what caught it."""
  path = root / 'vit_jax' / mutation.file
  text = path.read_text()
  assert text.count(mutation.old) == 1, f'{mutation.file}: expected {mutation.old!r} once, {text.count(mutation.old)=}'
  path.write_text(text.replace(mutation.old, mutation.new or 'pass'))
  tests = [f'tests/{name}' for name in mutation.tests.split() if (root / 'tests' / name).exists()]
  start = time.monotonic()
  try:
    done = subprocess.run([sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', '-m', marks, *tests],
                          cwd=root, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True,
                          check=False)
  finally:
    path.write_text(text)
  found = re.search(r'^(?:FAILED|ERROR) (\S+)', done.stdout, re.M)
  assert done.returncode in (0, 1, 2), done.stdout + done.stderr
  print(f'{"caught" if found else "NOT CAUGHT":10} {time.monotonic() - start:5.0f} s  {mutation.file}: '
        f'{mutation.old[:60]!r} -> {mutation.new[:40]!r}  {found[1] if found else ""}', flush=True)
  return found is not None


if __name__ == '__main__':
  sys.exit(main())
