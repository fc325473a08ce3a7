"""The law of all random streams: another seed, step, epoch or layer draws other bits; the same ones draw the same."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import surface
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.data import order, windows
from vit_jax.data.formats import mixture
from vit_jax.data.text import captions
from vit_jax.jobs import build

NUM = 60
PLACES = np.arange(NUM)


def mixed(seed: int, epoch: int) -> list[int]:
  """Which of two sources has each place of a round."""
  visits = (order.Shuffled(NUM, 0), order.Shuffled(NUM, 0))
  return (mixture.Visit(visits, (NUM, NUM), (500, 500), seed)(epoch * mixture.ROUND + PLACES) < NUM).tolist()


HOST: dict[str, Callable[[int, int], list[Any]]] = {
    'order': lambda seed, epoch: order.Shuffled(NUM, seed)(epoch * NUM + PLACES).tolist(),
    'lengths': lambda seed, step: [order.draw_length_index(seed, NUM * step + i, 5) for i in range(NUM)],
    'row groups': lambda seed, epoch: (
        windows.Windows(np.full(12, 5), seed, span=1, num_lanes=1, window_size=1)(epoch * NUM + PLACES) // 5).tolist(),
    'windows': lambda seed, epoch: windows.Windows(
        np.array([NUM]), seed, span=1, num_lanes=1, window_size=1)(epoch * NUM + PLACES).tolist(),
    'captions': lambda seed, epoch: [captions.draw(seed, 5, i, epoch) for i in range(NUM)],
    'mixture': mixed,
    'augmentations': lambda seed, epoch: order.ExampleRngs(seed).at(epoch * NUM).random(4).tolist(),
}


@pytest.mark.parametrize('name', HOST)
def test_draws_of_the_host_differ_by_seed_and_epoch_and_come_again(name: str) -> None:
  draw = HOST[name]
  found = {str(draw(seed, epoch)) for seed in range(3) for epoch in range(3)}
  assert len(found) == 9 and draw(2, 1) == draw(2, 1)


def test_no_two_streams_of_the_host_draw_alike() -> None:
  permutations = [HOST[name](3, 1) for name in ('order', 'windows')]
  numbers = [HOST[name](3, 1) for name in ('lengths', 'captions')]
  assert permutations[0] != permutations[1] and numbers[0] != numbers[1]


NETWORK = ('image_px=8,8', 'batch_size=4', 'model.patch=2', 'model.depth=2', 'model.width=8', 'model.heads=2',
           'model.mlp.hidden=8', 'data.recipe.crop=resize', 'data.in_memory=yes', 'train.ema=0', 'length=9 steps',
           'data.workers=0')
DROPS = ('model.dropout=.5', 'model.drop_path=.4', 'model.execution=scan')
DEVICE = {
    'dropout': ('digits', *DROPS, 'data.recipe.mixup=0'),
    'augmentation': ('digits', 'data.recipe.mixup=.4', 'data.recipe.shift_px=2', 'data.recipe.erase.probability=.5'),
    'lora': ('digits', 'model.execution=scan', 'lora.rank=2', 'lora.dropout=.5'),
    'mae': ('mae_cifar10:source=digits', 'objective.decoder_width=8', 'objective.decoder_heads=2'),
    'ijepa': ('ijepa_cifar10:source=digits', 'objective.predictor_width=8', 'objective.predictor_heads=2'),
    'ibot': ('dinov2_cifar10:source=digits', 'objective.out_dim=8', 'objective.hidden_dim=8',
             'objective.bottleneck_dim=4', 'data.recipe.views.local_px=4', 'data.in_memory=auto', 'objective.group=4'),
    'masked patch': ('masked_patch_cifar10:source=digits',),
}
"""Config and settings of networks that draw on the device."""


class Keys:
  """Random keys that report each use: an implementation of JAX's keys, around the default one."""

  def __init__(self) -> None:
    self.used: list[tuple[int, ...]] = []
    default = jax.random.key_impl(jax.random.key(0))
    wrap, data = functools.partial(jax.random.wrap_key_data, impl=default), jax.random.key_data

    def random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
      jax.debug.callback(lambda key: self.used.append(tuple(np.asarray(key).tolist())), key)
      return jax.random.bits(wrap(key), shape, jnp.dtype(f'uint{bit_width}'))

    self.implementation = jax.extend.random.define_prng_impl(
        key_shape=(2,), seed=lambda seed: data(jax.random.key(seed, impl=default)),
        split=lambda key, shape: data(jax.random.split(wrap(key), shape)), random_bits=random_bits,
        fold_in=lambda key, number: data(jax.random.fold_in(wrap(key), number)), name='reported', tag='reported')


def keys_of(name: str) -> Iterator[list[tuple[int, ...]]]:
  """Yields the keys that two steps with seed 0 use, one with seed 1, and the first again."""
  base, *settings = DEVICE[name]
  config = surface.read_config(*NETWORK, *settings, base=base)
  data = build.open_data(config)
  mesh, _ = build.open_mesh(config)
  parts = build.parts(config, mesh=mesh, num_examples=len(data.train), num_classes=10, in_memory=data.in_memory)
  state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parts.program.abstract_state)
  [batch] = surface.train_batches(config, range(1))
  keys = Keys()

  @jax.jit
  def loss(seed: Array, step: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(seed, impl=keys.implementation), step)
    own = numerics.split_key(key, 'prepare', 'loss')
    prepared = parts.prepare({name: jnp.asarray(x) for name, x in batch.items()}, own['prepare'], step)
    return parts.objective.loss(state.params, state.extra, prepared, own['loss'], step).loss.value

  for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
    keys.used.clear()
    loss(seed, step).block_until_ready()
    jax.effects_barrier()
    yield sorted(keys.used)


@pytest.mark.usefixtures('one_device')
@pytest.mark.dear('augmentation', 'ibot', 'masked patch', reason='2 to 4 s each')
@pytest.mark.parametrize('name', DEVICE)
def test_each_key_of_the_device_is_used_once_in_all_layers_steps_and_seeds(name: str) -> None:
  *different, again = list(keys_of(name))
  assert different[0] == again and len(again) >= (1 if name not in ('dropout', 'lora') else 2 * 3)
  repeated = [key for key, uses in itertools.groupby(sorted(itertools.chain(*different))) if len(list(uses)) > 1]
  assert not repeated, f'{len(repeated)} of {len(again)} keys are used again'
