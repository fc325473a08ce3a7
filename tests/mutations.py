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
COPIED = ('vit_jax', 'configs', 'tests', 'docs', 'launch', 'pyproject.toml', 'setup.py', 'README.md', 'BENCHMARKS.md')


class Mutation(NamedTuple):
  """`old` stands once in `vit_jax/<file>`; `tests` are paths in `tests/`."""
  file: str
  old: str
  new: str
  tests: str


STEP = 'train/test_step.py train/test_randomness.py train/test_plain_training.py train/test_loop.py test_invariance.py'
CHECKPOINT = 'train/test_checkpoint.py train/test_checkpoint_reader.py train/test_damaged_checkpoints.py'
LOADER = 'data/test_loader.py data/test_blocks.py data/test_prefetch.py'
OPTIM = 'optim train/test_step.py test_invariance.py'

MUTATIONS = (
    Mutation('train/step.py', 'jax.random.fold_in(jax.random.key(seed), step)', 'jax.random.key(seed)', STEP),
    Mutation('train/step.py', 'jax.random.fold_in(key, i))', 'key)', STEP),
    Mutation('train/step.py', 'jnp.isfinite(out.loss.value) & jnp.isfinite(grad_norm)', 'jnp.isfinite(out.loss.value)',
             STEP),
    Mutation('train/step.py', 'jnp.where(ok, u, -0.)', 'u', STEP),
    Mutation('train/step.py', 'numerics.select(ok, objective.after_update(params, state.extra, out.stats, state.step), '
             'state.extra)', 'objective.after_update(params, state.extra, out.stats, state.step)', STEP),
    Mutation('train/step.py', 'scale = rows / _weight(out)', 'scale = rows / rows * jnp.ones(())', STEP),
    Mutation('train/step.py', '_squares(state.params), _squares(moved)', '_squares(moved), _squares(state.params)',
             STEP),
    Mutation('train/step.py', 'x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1)',
             'x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:])[:, ::-1]', STEP),
    Mutation('data/pipeline/order.py', '[_SHUFFLE, seed, int(epoch)]', '[_SHUFFLE, seed]', 'data/test_order.py'),
    Mutation('data/pipeline/order.py', 'self._key[1] = position', 'self._key[1] = 0', 'data/test_order.py ' + LOADER),
    Mutation('data/pipeline/order.py', 'different = -(-self.batch_size // self.times)',
             'different = self.batch_size // self.times', 'data/test_order.py ' + LOADER),
    Mutation('data/pipeline/blocks.py', "batch['mask'][row], batch['bad'][row], batch['label'][row] = 0., True",
             "batch['mask'][row], batch['bad'][row], batch['label'][row] = 1., True", LOADER),
    Mutation('data/pipeline/blocks.py', 'inside = positions < num_examples', 'inside = positions <= num_examples - 2',
             LOADER),
    Mutation('data/pipeline/blocks.py', "return batch | {'index': index, 'mask': mask * ~batch['bad']}",
             "return batch | {'index': index, 'mask': mask}", LOADER),
    Mutation('data/pipeline/blocks.py', 'return DecodedExample(transform((index + ahead) % num), ahead > 0)',
             'return DecodedExample(transform((index + ahead) % num), False)', LOADER),
    Mutation('data/pipeline/loader.py', '-(-self.num_examples // self._batch_size)',
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
    Mutation('optim/clipping.py', 'factor = limit / jnp.maximum(grad_norm, limit)',
             'factor = limit / jnp.maximum(grad_norm, 1e-6)', OPTIM),
    Mutation('optim/trust.py', 'is_plain = (over == 0.) | (under == 0.)', 'is_plain = under == 0.', OPTIM),
    Mutation('optim/schedules.py', '(step + 1.) / (warmup + 1.)', 'step / (warmup + 1.)', OPTIM),
    Mutation('optim/schedules.py', 'max(1, at.total - at.hold - start)', 'max(1, at.total - at.hold)', OPTIM),
    Mutation('optim/multipliers.py', 'return decay ** (depth + 1) if', 'return decay ** depth if', OPTIM),
    Mutation('optim/freezing.py', 'jnp.where(step < length, jnp.zeros_like(x), x)',
             'jnp.where(step <= length, jnp.zeros_like(x), x)', OPTIM),
    Mutation('evaluate/classify.py', "mask_B = batch['mask'] * (num_targets_B > 0)", "mask_B = batch['mask'] * 1.",
             'evaluate/test_classify.py evaluate/test_targets.py'),
    Mutation('evaluate/classify.py', '.ceil(p_B * NUM_BINS).astype(jnp.int32) - 1', '.ceil(p_B * NUM_BINS).astype('
             'jnp.int32)', 'evaluate/test_classify.py'),
    Mutation('evaluate/knn.py', 'new_GrS = jnp.where(mask_S[None, None] > 0, new_GrS, -jnp.inf)', '',
             'evaluate/test_knn.py'),
    Mutation('evaluate/knn.py', 'jnp.exp(similarity / temperature)', 'jnp.exp(similarity * temperature)',
             'evaluate/test_knn.py'),
    Mutation('evaluate/ridge.py', '(y - predicted) / np.maximum(1. - hat, 1e-12)[:, None]', '(y - predicted)',
             'evaluate/test_ridge.py evaluate/test_fewshot.py'),
    Mutation('models/vit/interpolate.py', 'np.minimum(whole + 1, old - 1)', 'np.minimum(whole + 1, old - 2)',
             'models/test_interpolate.py models/test_positions.py weights/test_resize.py'),
    Mutation('models/vit/positions.py', 'parts = [xp.sin(angle_x), xp.cos(angle_x), xp.sin(angle_y), xp.cos(angle_y)]',
             'parts = [xp.sin(angle_y), xp.cos(angle_y), xp.sin(angle_x), xp.cos(angle_x)]',
             'models/test_positions.py'),
    Mutation('train/checkpoint_reader.py', "if finish() != meta['digests'][name]:", 'if False:',
             CHECKPOINT),
    Mutation('train/checkpoint_reader.py', "if checkpoint_files.sha256(data) != meta['data_sha256']:", 'if False:',
             CHECKPOINT),
    Mutation('train/checkpoint.py', 'value = -value if name in LOWER_IS_BETTER else value', '', CHECKPOINT),
    Mutation('train/checkpoint.py', 'managers.LatestN(self.latest)', 'managers.LatestN(self.latest + 1)', CHECKPOINT))


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
