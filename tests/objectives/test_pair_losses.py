"""Losses over all pairs: the matrix and the ring are equal to NumPy's in f64, on every mesh, with their gradients."""
from __future__ import annotations

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import make_golden_pair_losses as golden
from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.objectives import pair_losses
from vit_jax.objectives.pair_losses import Pairs
from vit_jax.parallel import mesh as meshes

B, E = 32, 12
SCALE, BIAS = 9., -4.
MASK = np.array([1.] * 27 + [0.] * 5, np.float32)
MESHES = ('data=8', 'data=2,fsdp=4', 'data=2,fsdp=2,tensor=2')


def vectors() -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  text = rng.normal(size=(B, E))
  image = text + rng.normal(size=(B, E))
  return tuple((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (image, text))  # type: ignore[return-value]


def wanted(loss: PairLoss, mask: np.ndarray | None) -> dict[str, Any]:
  """Loss and gradients in f64, from the definitions with labels: of the whole matrix, without the masked rows."""
  image, text = (x.astype(np.float64) for x in vectors())
  kept = np.flatnonzero(np.ones(B) if mask is None else mask)
  x, y, n = image[kept], text[kept], len(kept)
  dots = x @ y.T
  logits = SCALE * dots + BIAS
  if loss is PairLoss.SIGMOID:
    signs = 2 * np.eye(n) - 1
    value = np.log1p(np.exp(-signs * logits)).sum() / n
    slope = -signs / (1 + np.exp(signs * logits)) / n
  else:
    by_row, by_column = (np.exp(logits) / np.exp(logits).sum(axis, keepdims=True) for axis in (1, 0))
    value = -(np.log(np.diag(by_row)) + np.log(np.diag(by_column))).mean() / 2
    slope = ((by_row + by_column) / 2 - np.eye(n)) / n
  dimage, dtext = np.zeros((B, E)), np.zeros((B, E))
  dimage[kept], dtext[kept] = SCALE * slope @ y, SCALE * slope.T @ x
  return {'value': value, 'image': dimage, 'text': dtext, 'scale': (slope * dots).sum(), 'bias': slope.sum()}


@functools.cache
def found(loss: PairLoss, form: PairForm, mesh: str, *, masked: bool = False, chunk: int = 2) -> dict[str, Any]:
  image, text = vectors()
  on = programs.mesh(programs.MESHES[mesh])

  @jax.jit
  def both(given: dict[str, Any]) -> tuple[Any, Any]:
    def mean(given: dict[str, Any]) -> Any:
      pairs = Pairs(**given, mask=jnp.asarray(MASK) if masked else None)
      return pair_losses.mean_loss(pairs, loss, form=form, chunk=chunk).value
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
      return jax.value_and_grad(mean)(given)

  rows, whole = meshes.batch_sharding(on), meshes.replicated(on)
  given = {name: jax.device_put(x, rows) for name, x in (('image', image), ('text', text))}
  given |= {name: jax.device_put(jnp.float32(x), whole) for name, x in (('scale', SCALE), ('bias', BIAS))}
  value, gradients = jax.device_get(both(given))
  return {'value': value, **gradients}


def check(got: dict[str, Any], want: dict[str, Any]) -> None:
  """Equal up to f32: a logit is a sum of E products and two roundings more, at most |s| + |b| large.

  Its error of (E + 2) u (|s| + |b|), u = 2^-24, is that of the exponential, relative to it. A gradient has B such
  terms, whose magnitudes sum to at most 2 for each row, times s or 1; the sums add B u.
  """
  relative = (E + 2 + 2 * B) * 2.**-24 * (SCALE + abs(BIAS))
  for name, x in want.items():
    size = {'value': abs(want['value']), 'image': 2 * SCALE / B, 'text': 2 * SCALE / B}.get(name, 2.)
    np.testing.assert_allclose(got[name], x, rtol=0, atol=relative * size, err_msg=name)


@pytest.mark.parametrize('loss', PairLoss)
@pytest.mark.parametrize('form', [PairForm.MATRIX, PairForm.RING])
def test_a_loss_on_one_device_is_its_definition_in_f64(loss: PairLoss, form: PairForm) -> None:
  check(found(loss, form, 'one'), wanted(loss, None))


@pytest.mark.parametrize('loss', PairLoss)
@pytest.mark.parametrize('mesh', MESHES)
def test_the_ring_on_a_mesh_is_the_definition_in_f64(loss: PairLoss, mesh: str) -> None:
  check(found(loss, PairForm.RING, mesh), wanted(loss, None))


@pytest.mark.parametrize('loss', PairLoss)
def test_the_matrix_on_a_mesh_is_the_definition_in_f64(loss: PairLoss) -> None:
  check(found(loss, PairForm.MATRIX, MESHES[1]), wanted(loss, None))


@pytest.mark.parametrize('loss', PairLoss)
@pytest.mark.parametrize(('form', 'mesh'), [(PairForm.MATRIX, 'one'), (PairForm.RING, 'data=8')])
def test_rows_with_mask_0_are_neither_images_nor_texts(loss: PairLoss, form: PairForm, mesh: str) -> None:
  check(found(loss, form, mesh, masked=True), wanted(loss, MASK))


@pytest.mark.parametrize('loss', PairLoss)
@pytest.mark.parametrize(('form', 'mesh'), [(PairForm.MATRIX, 'one'), (PairForm.RING, 'data=8')])
def test_losses_and_gradients_are_those_of_open_clip(loss: PairLoss, form: PairForm, mesh: str) -> None:
  want = {'bias': 0.} | json.loads(golden.FILE.read_text())[loss.value]
  on, (image, text) = programs.mesh(programs.MESHES[mesh]), golden.vectors()
  given = (jnp.asarray(image, jnp.float32), jnp.asarray(text, jnp.float32), jnp.float32(golden.SCALE),
           jnp.float32(golden.BIAS if loss is PairLoss.SIGMOID else 0.))

  @jax.jit
  def both(given: Any) -> Any:
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
      return jax.value_and_grad(lambda given: pair_losses.mean_loss(Pairs(*given), loss, form=form).value)(given)

  value, slopes = jax.device_get(both(jax.device_put(given, (*[meshes.batch_sharding(on)] * 2,
                                                             *[meshes.replicated(on)] * 2))))
  # As in `check`: a logit is off by (E + 2) u (|s| + |b|), and sums of B terms by B u, relative to magnitudes below 10.
  atol = 10 * (golden.E + 2 + 2 * golden.B) * 2.**-24 * (golden.SCALE + abs(golden.BIAS))
  for name, x in {'loss': value, **dict(zip(('image', 'text', 'scale', 'bias'), slopes, strict=True))}.items():
    np.testing.assert_allclose(x, want[name], rtol=0, atol=atol, err_msg=name)


def test_a_chunk_that_does_not_divide_the_rows_is_made_smaller() -> None:
  assert [pair_losses._divisor(rows, 256) for rows in (1, 7, 256, 384, 2048, 514)] == [1, 7, 256, 192, 256, 2 * 1]


def test_logits_that_would_overflow_alone_have_a_finite_softmax() -> None:
  image = jnp.eye(4)
  pairs = Pairs(image, image, jnp.float32(100.), jnp.float32(0.))
  for form in (PairForm.MATRIX, PairForm.RING):
    value, slope = jax.value_and_grad(lambda scale, form=form: pair_losses.mean_loss(
        pairs._replace(scale=scale), PairLoss.SOFTMAX, form=form, chunk=1).value)(pairs.scale * 10)
    assert float(value) == 0. and math.isfinite(float(slope))


def test_the_form_follows_from_the_logits_of_a_device() -> None:
  auto = PairForm.AUTO
  assert pair_losses.choose(512, 1, auto) is PairForm.MATRIX
  assert pair_losses.choose(32_768, 256, auto) is PairForm.MATRIX
  assert pair_losses.choose(32_768, 16, auto) is PairForm.RING
  assert pair_losses.choose(4_096, 1, PairForm.MATRIX) is PairForm.MATRIX
  assert pair_losses.choose(8, 8, PairForm.RING) is PairForm.RING


@pytest.mark.parametrize('mesh', ['one', 'data=8'])
@pytest.mark.parametrize('loss', PairLoss)
def test_all_pairs_of_a_group_match(loss: PairLoss, mesh: str) -> None:
  """Against the definitions in f64, over the rows that count; with groups of one, the loss is that of single pairs."""
  image, text = vectors()
  group = np.random.default_rng(4).integers(0, 9, B)
  on = programs.mesh(programs.MESHES[mesh])

  @jax.jit
  def mean(group: Any) -> Any:
    pairs = Pairs(*map(jnp.asarray, (image, text, np.float32(SCALE), np.float32(BIAS), MASK)), group)
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
      return pair_losses.mean_loss(pairs, loss).value

  kept = MASK > 0
  logits = SCALE * image[kept].astype(np.float64) @ text[kept].T + BIAS
  same = group[kept][:, None] == group[kept]
  if loss is PairLoss.SIGMOID:
    want = np.log1p(np.exp(-np.where(same, 1, -1) * logits)).sum(1).mean()
  else:
    rows, columns = (logits - np.log(np.exp(logits).sum(axis, keepdims=True)) for axis in (1, 0))
    want = -np.mean((np.where(same, rows, 0).sum(1) / same.sum(1)
                     + np.where(same, columns, 0).sum(0) / same.sum(0)) / 2)
  assert float(mean(group)) == pytest.approx(want, rel=2e-5)
  assert float(mean(np.arange(B))) == pytest.approx(float(wanted(loss, MASK)['value']), rel=2e-5)
