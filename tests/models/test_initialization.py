"""Every parameter starts by the law of the authors' program: mean, deviation, kurtosis and support of all leaves."""
from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import engine, provenance, schema
from vit_jax.config.schema import Init
from vit_jax.core import trees
from vit_jax.jobs import build
from vit_jax.models import heads, initialization

GOLDEN: dict[str, dict[str, list[float]]] = json.loads(
    pathlib.Path(__file__).with_name('golden_initialization.json').read_text())
SEEDS, GOLDEN_SEEDS, CLASSES, PX = 24, 400, 10, 32
SIGMAS = 5.  # about 1,500 comparisons are made, so that 5 deviations are passed by chance once in 1,000 versions


def vit(init: Init, **more: Any) -> schema.ViT:
  return schema.ViT(**{'patch': 8, 'width': 32, 'depth': 2, 'heads': 4, 'mlp': schema.Mlp(128), 'init': init, **more})


def timm(init: Init, **more: Any) -> schema.ViT:
  return vit(init, mlp=schema.SwiGlu(128), block=schema.Plain(1e-5), **more)


TEACHER = schema.Teacher(model=schema.Mixer(patch=16, width=8, depth=1, tokens_mlp=4, channels_mlp=4))
CASES: dict[str, dict[str, Any]] = {  # as the networks of make_golden_initialization.py
    'vision_transformer': {'model': vit(Init.VISION_TRANSFORMER), 'head': schema.Head(pre_logits=24, bias_init=-3.)},
    'vision_transformer, hybrid': {'model': vit(Init.VISION_TRANSFORMER, stem=schema.ResNetStem((1,), 32))},
    'big_vision': {'model': vit(Init.BIG_VISION), 'head': schema.Head(pre_logits=24)},
    'big_vision, attention pooling': {'model': vit(Init.BIG_VISION, pool=schema.Map())},
    'mae': {'model': vit(Init.MAE, positions=schema.SinCos(schema.Frequencies.MAE)), 'objective': schema.Mae(
        decoder_width=16, decoder_depth=1, decoder_heads=2)},
    'dino': {'model': vit(Init.DINO), 'objective': schema.Dino(
        out_dim=64, hidden_dim=48, bottleneck_dim=16, norm_last_layer=False)},
    'dinov2': {'model': vit(Init.DINOV2, mlp=schema.SwiGlu(88), registers=3, block=schema.Plain(1e-5)),
               'objective': schema.Dino(out_dim=64, hidden_dim=48, bottleneck_dim=16, norm_last_layer=False)},
    'deit': {'model': vit(Init.DEIT, pool=schema.ClassToken(distillation=True)), 'objective': schema.Distill(TEACHER)},
    'deit3': {'model': vit(Init.DEIT3, block=schema.Plain(1e-4))},
    'lvvit': {'model': vit(Init.LVVIT, attention=schema.Attention(schema.QkvBias.NONE), stem=schema.ConvStem(64)),
              'objective': schema.TokenLabel()},
    'timm': {'model': timm(Init.TIMM, registers=3)},
    'timm, attention pooling': {'model': timm(Init.TIMM, pool=schema.Map())},
    'timm_jax': {'model': timm(Init.TIMM_JAX, registers=3)},
    'timm_jax, attention pooling': {'model': timm(Init.TIMM_JAX, pool=schema.Map())},
    'mixer': {'model': schema.Mixer(patch=8, width=32, depth=2, tokens_mlp=24, channels_mlp=48)},
    'bit': {'model': schema.ResNet(layers=(1,), width=32)},
    'axial': {'model': schema.AxialResNet(layers=(1,), width=16, heads=4), 'image_px': (224, 224)},
}
"""A program, or a second network of it, and the parts of a run that are like it."""
FAST = ('deit', 'mae')
Law = initialization.Initializer
LEAVES: dict[str, tuple[Callable[[initialization.Laws], Law], tuple[int, ...]]] = {  # the law, and the shape it sees
    'backbone/stem/kernel': (lambda laws: laws.patches.kernel, (192, 32)),
    'backbone/stem/bias': (lambda laws: laws.patches.bias(192), (32,)),
    'backbone/cls': (lambda laws: laws.cls, (1, 1, 32)), 'backbone/dist': (lambda laws: laws.dist, (1, 1, 32)),
    'backbone/registers': (lambda laws: laws.registers, (1, 3, 32)), 'mask_token': (lambda laws: laws.mask, (1, 1, 32)),
    'backbone/positions/patches': (lambda laws: laws.positions, (1, 16, 32)),
    'backbone/blocks/attn/query/kernel': (lambda laws: laws.attention.query.kernel, (32, 32)),
    'backbone/blocks/attn/out/kernel': (lambda laws: laws.attention.out.kernel, (32, 32)),
    'backbone/blocks/attn/key/bias': (lambda laws: laws.attention.key.bias(32), (32,)),
    'backbone/blocks/mlp/up/kernel': (lambda laws: laws.mlp.kernel, (32, 128)),
    'backbone/blocks/mlp/up/bias': (lambda laws: laws.mlp.bias(32), (128,)),
    'backbone/blocks/mlp/gate/kernel': (lambda laws: laws.gate.kernel, (32, 128)),
    'backbone/blocks/mlp/gate/bias': (lambda laws: laws.gate.bias(32), (128,)),
    'backbone/pool/probe': (lambda laws: laws.map_probe, (1, 1, 32)),
    'backbone/pool/attn/query/kernel': (lambda laws: laws.pool.query.kernel, (32, 32)),
    'backbone/pool/attn/value/kernel': (lambda laws: laws.pool.value.kernel, (32, 32)),
    'head/kernel': (lambda laws: laws.head.kernel, (32, 10)),
    'probe/kernel': (lambda laws: laws.probe.kernel, (32, 10)),
    'projector/mlp1/kernel': (lambda laws: laws.projector.kernel, (32, 48)),
    'projector/prototypes/kernel': (lambda laws: initialization.torch_kernel, (16, 64)),
}


def seeds(number: int) -> jax.Array:
  """Keys of the generator that compiles fastest."""
  return jax.random.split(jax.random.key(0, impl='unsafe_rbg'), number)


@functools.cache
def of_law(law: Law, shape: tuple[int, ...], number: int) -> np.ndarray:
  """Draws of one law, `[number, *shape]`."""
  return np.asarray(jax.vmap(lambda key: law(key, shape))(seeds(number)), np.float64)


@functools.cache
def drawn(name: str) -> dict[str, np.ndarray]:
  """All values of each leaf over the seeds; of the heads also those that the objective does not have."""
  config = schema.Config(**{'image_px': (PX, PX), 'batch_size': 2, **CASES[name]})
  task = build.build_objective(config, build.build_backbone(config), CLASSES, lengths=programs.LENGTHS)
  image = jnp.zeros((1, *config.image_px, 3))
  batch = {'image': image, 'views_global': jnp.stack([image, image], axis=1)}
  laws = initialization.laws(config.model)

  def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    others = {name: heads.build(schema.Head(probe=name == 'probe'), config.model).init(keys[i], 32, CLASSES)
              for i, name in enumerate(('head', 'probe'))}
    return {**others, 'mask_token': laws.mask(keys[2], (1, 1, 32)), **task.init(keys[3], batch)[0]}

  leaves = trees.flatten(jax.jit(jax.vmap(init))(seeds(SEEDS)))
  found = {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}
  if 'backbone/positions' in found:
    table, num_first = found.pop('backbone/positions'), config.model.num_first
    found['backbone/positions/patches'] = table[:, :, num_first:]
    found |= {'backbone/positions/first': table[:, :, :num_first]} if num_first else {}
  return found


def wrong(values: np.ndarray, golden: list[float]) -> str:
  """What differs from the statistics of a program's leaf; '' if all agree within the error of sampling."""
  size, mean, std, kurtosis, largest = golden[:5]
  if values[0].size != size / GOLDEN_SEEDS:
    return f'{values[0].size} values, there {size / GOLDEN_SEEDS:g}'
  if not std:
    return '' if np.all(values == np.float32(mean)) else f'not all are {mean:g}'
  if not values.std():
    return f'all are {values.mean():g}'
  x, share = values.ravel(), 1 / values.size + 1 / size
  center = x.mean()
  moments = {'mean': (center, mean, std * math.sqrt(share)),
             'deviation': (x.std(), std, std * math.sqrt((kurtosis - 1) / 4 * share)),
             'kurtosis': (((x - center) ** 4).mean() / x.std() ** 4, kurtosis, math.sqrt(24 * share))}  # of a normal
  found = [f'{name} {ours:.4g}, there {theirs:.4g} ± {error:.2g}' for name, (ours, theirs, error) in moments.items()
           if not abs(ours - theirs) <= SIGMAS * error]
  # Of laws with an end, the largest of n values misses it by more than 60 / n with a probability below e^-13.
  if largest < 2.4 * std and not -60 / values.size <= np.abs(x).max() / largest - 1 <= 60 / size:
    found.append(f'largest {np.abs(x).max():.4g}, there {largest:.4g}')
  return '; '.join(found)


def differences(name: str, program: str) -> dict[str, str]:
  """Leaves that both have, and that differ."""
  ours, golden = drawn(name), GOLDEN[program]
  return {leaf: text for leaf in sorted(ours.keys() & golden.keys()) if (text := wrong(ours[leaf], golden[leaf]))}


@pytest.mark.parametrize('name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow(
    reason='2 to 4 s: compiles the init of a network; the laws themselves are compared by the next test'))
    for name in CASES])
def test_every_parameter_starts_as_in_the_authors_program(name: str) -> None:
  missing = GOLDEN[name].keys() - drawn(name).keys()
  unknown = {leaf for leaf in drawn(name).keys() - GOLDEN[name].keys() if leaf.startswith(('backbone', 'decoder'))}
  assert not missing
  assert unknown <= {'backbone/positions/first'}  # in big_vision and DeiT III the class token has no position
  assert not any(np.any(drawn(name)[leaf]) for leaf in unknown)
  assert not differences(name, name)
  ratios = [drawn(name)[leaf].std() / row[2] for leaf, row in GOLDEN[name].items() if row[2]]
  # A token has the fewest values: 32 in each of 24 networks.
  np.testing.assert_allclose(ratios, 1., atol=SIGMAS * math.sqrt((1 / 768 + 1 / 12_800) / 2))


def of_program(laws: initialization.Laws, program: str) -> dict[str, str]:
  """What differs between these laws and the leaves of a program, where it has leaves of these shapes."""
  found, leaves = {}, GOLDEN[program]
  for leaf, (law, shape) in LEAVES.items():
    golden = leaves.get(leaf.replace('bias', 'kernel') if 'stem' in leaf else leaf, [1])  # whose size says what it is
    if golden[0] % (GOLDEN_SEEDS * math.prod(LEAVES['backbone/stem/kernel'][1] if 'stem' in leaf else shape)) == 0:
      copies = round(leaves[leaf][0] / GOLDEN_SEEDS / math.prod(shape))  # layers
      found[leaf] = wrong(of_law(law(laws), shape, SEEDS * copies).reshape(SEEDS, -1), leaves[leaf])
  return {leaf: text for leaf, text in found.items() if text}


OF_VITS = [name for name in CASES if name.partition(',')[0] in {one.value for one in Init}]


@pytest.mark.parametrize('program', OF_VITS)
def test_the_laws_of_the_table_are_those_of_the_program(program: str) -> None:
  laws = initialization.LAWS[Init(program.partition(',')[0])]
  assert not of_program(laws, program)


def test_another_program_s_laws_are_seen() -> None:
  laws = initialization.LAWS
  assert set(of_program(laws[Init.BIG_VISION], 'vision_transformer')) == {'backbone/positions/patches'}
  assert set(of_program(laws[Init.VISION_TRANSFORMER], 'deit')) == {
      'backbone/stem/kernel', 'backbone/stem/bias', 'backbone/cls', 'backbone/blocks/attn/query/kernel',
      'backbone/blocks/attn/out/kernel', 'backbone/blocks/mlp/up/kernel', 'backbone/blocks/mlp/up/bias', 'head/kernel'}
  assert set(of_program(laws[Init.VISION_TRANSFORMER], 'mae')) == {
      'backbone/stem/kernel', 'backbone/stem/bias', 'backbone/cls', 'backbone/blocks/attn/query/kernel',
      'backbone/blocks/mlp/up/bias', 'head/kernel', 'probe/kernel'}
  assert set(of_program(laws[Init.TIMM], 'dino')) == {'backbone/cls', 'probe/kernel'}
  assert differences('deit', 'timm').keys() >= {'backbone/cls'}


def test_a_run_of_an_earlier_version_starts_as_it_did_and_weights_do_not_depend_on_the_law() -> None:
  config = schema.Config(model=vit(Init.DINO))
  plain = json.loads(engine.to_json(config))
  assert plain['model'].pop('init') == 'dino'
  older = engine.from_json(json.dumps(plain))
  assert older.model == vit(Init.VISION_TRANSFORMER)
  assert not provenance.differences({provenance.SETTINGS: provenance.settings(older)}, config)


def test_each_program_has_its_laws_and_a_comparison() -> None:
  assert set(initialization.LAWS) == set(Init)
  programs_of_authors = {one.value for one in Init} - {'mimetic'}  # tests/models/test_mimetic.py
  assert programs_of_authors <= set(CASES) == set(GOLDEN)
