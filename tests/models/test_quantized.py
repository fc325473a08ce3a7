"""Products in int8 and fp8: the arithmetic, against NumPy and qwix, and which products of a network are quantized."""
from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vits
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.config.schema import Execution, Kernels, Quantize, Remat
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Params
from vit_jax.models import adapters, decoders
from vit_jax.models.kernels import dense
from vit_jax.models.vit import vit

SPLIT = {'query': ((3, 5, 24), (24, 4, 6)), 'out': ((3, 5, 4, 6), (4, 6, 24)), 'mlp': ((15, 24), (24, 40))}
"""Shapes of input and kernel: one input axis and two of outputs, the reverse, and matrices."""
MODEL = schema.ViT(**vits.PLAIN)
EIGHT = {Quantize.NONE: (), Quantize.INT8: ('int8',), Quantize.FP8: ('float8_e4m3fn',)}


def drawn(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any = jnp.float32) -> tuple[Array, ...]:
  """Input, kernel, bias and gradient of the output, of magnitudes that differ by token and by output."""
  x_shape, w_shape = shapes
  num_in = 2 if len(x_shape) == 4 else 1
  rng, out = np.random.default_rng(0), w_shape[num_in:]
  lead = x_shape[:len(x_shape) - num_in]
  x, w, b, dy = (rng.normal(size=s) for s in (x_shape, w_shape, out, (*lead, *out)))
  x *= np.exp(rng.normal(size=(*lead, *(1,) * num_in)))
  w *= np.exp(rng.normal(size=(*(1,) * num_in, *out)))
  return tuple(jnp.asarray(a, dtype) for a in (x, w, b, 1e-6 * dy))


def rows(a: Any, num_columns: int) -> np.ndarray:
  return np.asarray(jnp.asarray(a, jnp.float32)).reshape(-1, num_columns)


def integers(a: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
  """The integers of a matrix with one scale along `axis`, and the scales in f64."""
  most = np.abs(a).max(axis, keepdims=True)
  return np.rint(a * (np.float32(127.) / most)).astype(np.int64), most.astype(np.float64) / 127.


def all_of(how: Quantize, x: Array, w: Array, b: Array, dy: Array) -> tuple[Array, ...]:
  y, pull = jax.vjp(lambda *args: dense.quantized_dense(*args, how), x, w, b)
  return (y, *pull(dy))


@pytest.mark.parametrize('name', SPLIT)
def test_int8_products_are_those_of_the_integers_with_nothing_rounded_in_the_sum(name: str) -> None:
  x, w, b, dy = drawn(SPLIT[name])
  y, dx, dw, db = jax.jit(all_of, static_argnums=0)(Quantize.INT8, x, w, b, dy)
  x_RI, w_IO, dy_RO = rows(x, x.size * b.size // dy.size), rows(w, b.size), rows(dy, b.size)
  (qx, sx), (qw, sw) = integers(x_RI, 1), integers(w_IO, 0)
  u = 2.**-24  # a scale has two roundings, the product with both two more, the bias one
  want = (qx @ qw) * sx * sw
  np.testing.assert_allclose(rows(y, b.size), want + np.asarray(b).reshape(1, -1), rtol=6 * u,
                             atol=6 * u * np.abs(want).max())
  qg, sg = integers(dy_RO * np.float32(sw), 1)
  np.testing.assert_allclose(rows(dx, x_RI.shape[1]), (qg @ qw.T) * sg, rtol=6 * u)
  np.testing.assert_allclose(rows(dw, b.size), x_RI.T.astype(np.float64) @ dy_RO, rtol=1e-5,  # 15 terms, not quantized
                             atol=1e-5 * np.abs(dw).max())
  np.testing.assert_allclose(np.asarray(db).ravel(), dy_RO.sum(0), rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(('how', 'most'), [(Quantize.INT8, .015), (Quantize.FP8, .05)])
def test_results_are_near_those_of_the_compute_dtype(how: Quantize, most: float, dtype: Any) -> None:
  """int8 rounds by 1/254 of the largest of 24 entries, 0.29 of it on average; e4m3 each entry by up to 1/16."""
  args = drawn(SPLIT['query'], dtype)
  found = all_of(how, *args)
  y, pull = jax.vjp(dense.plain_dense, *(a.astype(jnp.float32) for a in args[:3]))
  for one, own in zip(found, (y, *pull(args[3].astype(jnp.float32))), strict=True):
    assert one.dtype == dtype and one.shape == own.shape
    error = np.linalg.norm(np.float32(one) - own) / np.linalg.norm(own)
    assert error < most, error
  assert np.linalg.norm(np.float32(found[0]) - y) / np.linalg.norm(y) > most / 10, 'nothing was quantized'


@pytest.mark.parametrize('how', dense.NARROW)
def test_an_entry_that_is_not_finite_is_not_hidden_and_zeros_stay_zeros(how: Quantize) -> None:
  x, w, b, _ = drawn(SPLIT['mlp'])
  for bad in (np.inf, np.nan):
    y = dense.quantized_dense(x.at[3, 2].set(bad), w, b, how)
    assert not np.isfinite(y[3]).any() and np.isfinite(np.delete(y, 3, 0)).all()
  y = dense.quantized_dense(x.at[3].set(0.), w.at[:, 1].set(0.), b, how)
  np.testing.assert_array_equal(y[3], b)
  np.testing.assert_array_equal(y[:, 1], np.broadcast_to(b[1], len(y)))


@pytest.mark.parametrize('how', dense.NARROW)
def test_products_of_arrays_that_are_split_over_devices_have_the_same_bits(how: Quantize) -> None:
  x, w, b, dy = drawn(((16, 24), (24, 40)))
  mesh = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
  specs = PartitionSpec(('data', 'fsdp')), PartitionSpec('tensor', 'fsdp'), PartitionSpec(), PartitionSpec('data')
  form = jax.jit(all_of, static_argnums=0)
  whole = form(how, x, w, b, dy)
  with jax.set_mesh(mesh):
    split = form(how, *(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, b, dy), specs,
                                                                                        strict=True)))
  exact = how is Quantize.INT8  # sums in f32 have another order
  for one, own in zip(whole[:2], split[:2], strict=True):
    np.testing.assert_allclose(one, own, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5 * np.abs(one).max())


@pytest.mark.parametrize(('how', 'qtype', 'bound'), [(Quantize.INT8, jnp.int8, 127.5),
                                                     (Quantize.FP8, jnp.float8_e4m3fn, 448.)])
def test_forward_and_gradient_of_the_input_equal_qwix(how: Quantize, qtype: Any, bound: float) -> None:
  """qwix maps the largest int8 entry to 127.5, here it is 127: a factor of its calibration makes both equal."""
  qwix = pytest.importorskip('qwix', reason='the oracle, qwix 0.1.8, is not installed: pip install qwix')
  method = f'absmax,{bound / dense.NARROW[how].largest}'
  rule = {'weight_qtype': qtype, 'act_qtype': qtype, 'weight_calibration_method': method,
          'act_calibration_method': method}
  x, w, b, dy = drawn(SPLIT['mlp'])
  found = all_of(how, x, w, b, dy)

  def theirs(**more: Any) -> tuple[Array, ...]:
    module = qwix.quantize_model(nn.Dense(w.shape[1]), qwix.QtProvider([qwix.QtRule(
        module_path='.*', **rule, **more)]))
    y, pull = jax.vjp(lambda x, w, b: module.apply({'params': {'kernel': w, 'bias': b}}, x), x, w, b)
    return (y, *pull(dy))

  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    only_forward = theirs()
    all_narrow = theirs(bwd_qtype=qtype, bwd_calibration_method=method)
  for i, what in enumerate(('output', 'gradient of the input')):
    # An entry between two narrow ones may be rounded to the other: a step of at most 1/16 of one of 24 or 40 products.
    gap = np.abs(found[i] - all_narrow[i])
    assert np.quantile(gap, .95) < 1e-6 * np.abs(found[i]).max(), what
    assert gap.max() < .02 * np.abs(found[i]).max(), what
  for one, own in zip(found[2:], only_forward[2:], strict=True):  # where they are of the input as it is
    np.testing.assert_allclose(one, own, rtol=1e-5, atol=1e-6 * np.abs(own).max())


def products(jaxpr: Any) -> Iterator[tuple[str, ...]]:
  """Yields the dtypes of both operands of every product in a program and in the programs it calls."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield tuple(str(v.aval.dtype) for v in equation.invars)
    times = equation.params.get('length', 1) if equation.primitive.name == 'scan' else 1
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        if hasattr(inner, 'eqns') or hasattr(inner, 'jaxpr'):
          yield from [*products(getattr(inner, 'jaxpr', inner))] * times


def traced(model: schema.ViT, params: Params | None = None) -> Any:
  """The gradient of a loss of a network, as a jaxpr."""
  backbone, params = vit.build(model, vits.PX), params or vits.shapes_of(model)

  def loss(params: Params, image: Array) -> Array:
    return backbone.apply(params, {}, image, train=True, key=jax.random.key(0))[0].pooled.sum()

  return jax.make_jaxpr(jax.grad(loss))(params, vits.some_image()).jaxpr


_COUNTS: dict[str, collections.Counter] = {}


def count(model: schema.ViT, params: Params | None = None) -> collections.Counter:
  """How many products there are with operands of each pair of dtypes."""
  if (text := f'{model} {params and jax.tree.structure(params)}') not in _COUNTS:
    _COUNTS[text] = collections.Counter(products(traced(model, params)))
  return _COUNTS[text]


def with_adapters(model: schema.ViT) -> Params:
  """Shapes of parameters with adapters of every layer of the blocks."""
  shapes, lora = vits.shapes_of(model), schema.Lora(rank=3)
  added = jax.eval_shape(lambda p: adapters.init(jax.random.key(0), p, lora), shapes)
  return jax.eval_shape(lambda p, a: adapters.network(a, {'backbone': p}, lora, key=None), shapes, added)['backbone']


@pytest.mark.quick('plain-Quantize.INT8', reason='1 to 3 s: two or three traces of a network')
@pytest.mark.parametrize('how', dense.NARROW)
@pytest.mark.parametrize(('changes', 'a_block'), [
    ({}, 6), ({'mlp': schema.SwiGlu(48)}, 7), ({'block': schema.Parallel()}, 6), ({'pool': schema.Map()}, 6),
    ({'block': schema.Axial(), 'pool': schema.Mean()}, 12), ({'execution': Execution.UNROLLED, 'dropout': .1}, 6)],
    ids=['plain', 'swiglu', 'parallel', 'map', 'axial', 'unrolled'])
def test_each_product_of_the_blocks_is_quantized_in_both_directions_and_no_other(changes: dict, a_block: int,
                                                                                 how: Quantize) -> None:
  model = dataclasses.replace(MODEL, **changes)
  found, plain = count(dataclasses.replace(model, quantize=how)), count(model)
  (dtype,) = EIGHT[how]
  narrow = 2 * a_block * model.depth  # forward, and the gradient of the input
  assert found[dtype, dtype] == narrow
  assert {*found} == {(dtype, dtype), ('float32', 'float32')} and {*plain} == {('float32', 'float32')}
  # The fast form has two programs in place of each product, for CPUs and for other devices.
  blocks = 3 * a_block * model.depth * 2
  assert found['float32', 'float32'] == plain['float32', 'float32'] - blocks + a_block * model.depth


@pytest.mark.slow(reason='2 s: two traces of a network')
def test_under_remat_the_forward_products_are_quantized_again() -> None:
  model = dataclasses.replace(MODEL, quantize=Quantize.INT8)
  assert count(dataclasses.replace(model, remat=Remat.FULL))['int8', 'int8'] > count(model)['int8', 'int8']


@pytest.mark.slow(reason='2 s: two traces of a network')
def test_products_of_adapters_are_not_quantized() -> None:
  params = with_adapters(MODEL)
  found = count(dataclasses.replace(MODEL, quantize=Quantize.INT8), params)
  assert found['int8', 'int8'] == 2 * 6 * MODEL.depth
  assert found['float32', 'float32'] > count(dataclasses.replace(MODEL, quantize=Quantize.INT8))['float32', 'float32']


def test_the_blocks_of_the_decoder_are_quantized_and_its_other_products_are_not() -> None:
  model = dataclasses.replace(MODEL, quantize=Quantize.INT8)
  decoder = decoders.Decoder(encoder=model, width=16, depth=2, heads=2)
  tokens, places = jnp.zeros((2, 3, 32)), jnp.zeros((2, 6), jnp.int32)
  params = jax.eval_shape(decoder.init, jax.random.key(0))
  found = collections.Counter(products(jax.make_jaxpr(lambda p, x: decoder.apply(
      p, jnp.zeros((1, 1, 16)), x, None, places=places, grid=(2, 3)))(params, tokens).jaxpr))
  assert found['int8', 'int8'] == 6 * 2 and found['float32', 'float32'] >= 2


def test_networks_with_and_without_quantized_products_in_one_process_share_no_trace() -> None:
  settings = (Quantize.INT8, Quantize.NONE, Quantize.FP8, Quantize.INT8)
  models = [dataclasses.replace(MODEL, depth=1, quantize=how) for how in settings]
  traces = [traced(model) for model in models]
  assert [{d for pair in products(trace) for d in pair} - {'float32'} for trace in traces] == [
      {*EIGHT[how]} for how in settings]
  assert str(traces[0]) == str(traces[-1])


@pytest.mark.parametrize(('changes', 'message'), [
    ({'kernels': Kernels.PLAIN}, 'model.kernels: expected fast with model.quantize=int8, whose gradients are written '
     'by hand, got plain. Set model.kernels=fast or model.quantize=none.'),
    ({'mlp': schema.Mlp(48, kernel=schema.MlpKernel.FUSED)}, 'model.mlp.kernel: expected auto or xla with '
     'model.quantize=int8, as the fused kernel multiplies in model.dtype, got fused. Set model.mlp.kernel=xla.')])
def test_what_cannot_be_quantized_is_refused(changes: dict, message: str) -> None:
  model = dataclasses.replace(MODEL, quantize=Quantize.INT8, **changes)
  with pytest.raises(UserError) as error:
    vit.build(model, vits.PX)
  assert message in str(error.value)
