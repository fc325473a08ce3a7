"""Three tiny models that together use every option, and the arithmetic of all options in numpy, image by image."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Execution, Gelu, LastNorm, PositionsAt
from vit_jax.core import traced_costs
from vit_jax.core.types import Array, Features, Params, PyTree
from vit_jax.models.vit import vit

PX, GRID = (16, 24), (2, 3)
PLAIN: dict[str, Any] = {
    'patch': 8, 'width': 32, 'depth': 2, 'heads': 4, 'mlp': schema.Mlp(48), 'execution': Execution.SCAN}
MODELS = {
    'gated': schema.ViT(
        **PLAIN | {'mlp': schema.SwiGlu(48)}, pool=schema.Map(), registers=2, block=schema.Plain(.5),
        positions=schema.Learned2d(PositionsAt.LAYERS), attention=schema.Attention(dropout=.2), dropout=.1,
        drop_path=.3),
    'parallel': schema.ViT(
        **PLAIN, registers=1, block=schema.Parallel(), attention=schema.Attention(qk_norm=True, dropout=.2),
        positions=schema.Relative(), drop_path=.3),
    'axial': schema.ViT(
        **PLAIN, pool=schema.Mean(), block=schema.Axial(.5), attention=schema.Attention(qk_norm=True),
        positions=schema.Learned(PositionsAt.SHARED), dropout=.1, drop_path=.3),
}


_SHAPES: dict[str, Params] = {}
_PROGRAMS: dict[str, Callable[[Params, Array], Features]] = {}


def some_image(px: tuple[int, int] = PX) -> Array:
  return jax.device_put(np.random.default_rng(0).uniform(-1., 1., (6, *px, 3)).astype(np.float32))


def shapes_of(settings: schema.ViT) -> Params:
  if (text := repr(settings)) not in _SHAPES:
    _SHAPES[text], _ = jax.eval_shape(vit.build(settings, PX).init, jax.random.key(0), some_image())
  return _SHAPES[text]


def forward(settings: schema.ViT, params: Params, image: Array) -> Features:
  """In evaluation; one program for all tests."""
  if (text := repr(settings)) not in _PROGRAMS:
    backbone = vit.build(settings, PX)
    _PROGRAMS[text] = jax.jit(lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0])
  return _PROGRAMS[text](params, image)


def kept_bytes(settings: schema.ViT) -> int:
  """Bytes that an image of a batch keeps for the gradient of the pooled features."""
  backbone, shapes = vit.build(settings, PX), shapes_of(settings)

  def loss(params: Params, image: Array) -> Array:
    return backbone.apply(params, {}, image, train=True, key=jax.random.key(0))[0].pooled.sum()

  few, more = (traced_costs.kept_bytes(loss, shapes, jax.ShapeDtypeStruct((rows, *PX, 3), np.float32))
               for rows in (1, 2))
  return more - few


def parameters(settings: schema.ViT) -> Params:
  """Random parameters, in which nothing is zero or one: a mistake anywhere shows."""
  return drawn(shapes_of(settings), deviation=.2)


def drawn(shapes: Params, *, deviation: float) -> Params:
  """Arrays of these shapes, normal, f32, the same each time."""
  rng = np.random.default_rng(0)
  # `jnp.asarray` would compile a program for each shape.
  return jax.tree.map(lambda x: jax.device_put((deviation * rng.normal(size=x.shape)).astype(np.float32)), shapes)


def _norm(x: np.ndarray, p: PyTree) -> np.ndarray:
  """LayerNorm, or RMSNorm without a bias."""
  if 'bias' not in p:
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6) * p['scale']
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']


def _gelu(x: np.ndarray, kind: Gelu) -> np.ndarray:
  if kind is Gelu.QUICK:
    return x / (1 + np.exp(-1.702 * x))
  assert kind is Gelu.TANH
  return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def _attention(y: np.ndarray, p: PyTree, s: schema.ViT) -> np.ndarray:
  """Self-attention of one sequence `[m, D]`, head by head."""
  mixed, extra = [], len(y) - GRID[0] * GRID[1]
  for a in range(s.heads):
    q, k, v = (y @ p[n]['kernel'][:, a] + (p[n]['bias'][a] if 'bias' in p[n] else 0.)
               for n in ('query', 'key', 'value'))
    if s.attention.qk_norm:
      q, k = _norm(q, p['query_norm']), _norm(k, p['key_norm'])
    if s.positions.is_rotary:
      q, k = (np.concatenate([x[:extra], turned(x[extra:], GRID, s.positions)]) for x in (q, k))
    logits = q @ k.T
    if isinstance(s.positions, schema.Relative):
      num_patches = len(y) - extra
      for i in range(num_patches):
        for j in range(num_patches):
          logits[extra + i, extra + j] += q[extra + i] @ p['relative'][num_patches - 1 - (i - j), a]
    weights = np.exp(logits / math.sqrt(q.shape[1]))
    mixed.append(weights / weights.sum(1, keepdims=True) @ v)
  together = np.concatenate(mixed, axis=1)
  together = _norm(together, p['norm']) if s.attention.inner_norm else together
  return together @ p['out']['kernel'].reshape(together.shape[1], -1) + p['out'].get('bias', 0.)


def _place(index: int, side: int, s: schema.ByIndex | schema.UnitInterval) -> float:
  """The angle of a row or column at frequency 1."""
  if isinstance(s, schema.UnitInterval):
    return 2 * math.pi * (2 * (index + .5) / side - 1)
  return (index + s.offset) * s.grid / side if s.grid else index + s.offset


def turned(x: np.ndarray, grid: tuple[int, int], s: schema.Rotary) -> np.ndarray:
  """2-D rotary positions of patch tokens `[N, K]`, pair by pair as complex numbers, in float64."""
  half, out = x.shape[1] // 2, np.array(x, np.float64)
  for token in range(len(x)):
    row, column = divmod(token, grid[1])
    for j in range(half):
      index, side, t = (column, grid[1], j) if j < half // 2 else (row, grid[0], j - half // 2)
      turn = np.exp(1j * _place(index, side, s.coordinates) * s.base ** (-t / (half / 2)))
      number = complex(x[token, j], x[token, j + half]) * turn
      out[token, j], out[token, j + half] = number.real, number.imag
  return out


def _mlp(y: np.ndarray, p: PyTree, s: schema.ViT) -> np.ndarray:
  hidden = y @ p['up']['kernel'] + p['up'].get('bias', 0.)
  if isinstance(s.mlp, schema.SwiGlu):
    gate = y @ p['gate']['kernel'] + p['gate'].get('bias', 0.)
    hidden = gate / (1 + np.exp(-gate)) * hidden
  else:
    hidden = _gelu(hidden, s.gelu)
  hidden = _norm(hidden, p['norm']) if s.mlp.inner_norm else hidden
  return hidden @ p['down']['kernel'] + p['down'].get('bias', 0.)


def pooled_by_attention(tokens: np.ndarray, p: PyTree, s: schema.ViT) -> np.ndarray:
  """What the probe makes of tokens `[m, D]`: `[D]`."""
  y, heads = np.array(p['attn']['out']['bias']), p['attn']['query']['kernel'].shape[1]
  for a in range(heads):
    query, key, value = ((tokens if n != 'query' else p['probe'][0]) @ p['attn'][n]['kernel'][:, a]
                         + p['attn'][n]['bias'][a] for n in ('query', 'key', 'value'))
    weights = np.exp(query @ key.T / math.sqrt(key.shape[1]))[0]
    y = y + weights / weights.sum() @ value @ p['attn']['out']['kernel'][a]
  hidden = _gelu(_norm(y, p['norm']) @ p['mlp']['up']['kernel'] + p['mlp']['up']['bias'], s.gelu)
  return y + hidden @ p['mlp']['down']['kernel'] + p['mlp']['down']['bias']


def _block(z: np.ndarray, p: PyTree, s: schema.ViT, sequences: list[list[int]]) -> np.ndarray:
  """One block whose attention stays within the given sequences of tokens."""
  y, attended = _norm(z, p['norm1']), np.zeros_like(z)
  for tokens in sequences:
    attended[tokens] = _attention(y[tokens], p['attn'], s)
  scale = s.block.branch_scale
  if isinstance(s.block, schema.Parallel):
    return z + scale * (attended + _mlp(y, p['mlp'], s))
  z = z + scale * attended * p.get('scale1', 1.)
  return z + scale * _mlp(_norm(z, p['norm2']), p['mlp'], s) * p.get('scale2', 1.)


def _learned(table: PyTree, s: schema.ViT) -> np.ndarray:
  """Positions `[M, D]` of the whole sequence."""
  if s.positions.has_rows:
    first = s.num_first
    return np.concatenate([table[0, :first], np.zeros((s.registers, s.width)), table[0, first:]])
  patches = [np.concatenate([table['column'][j], table['row'][i]]) for i in range(GRID[0]) for j in range(GRID[1])]
  return np.concatenate([np.zeros((s.num_extra, s.width)), np.stack(patches)])


def numpy_vit(s: schema.ViT, p: PyTree, image: np.ndarray) -> np.ndarray:
  """Pooled features `[D]` of one image, or of a stem's map of it, in float64.

  With a distillation token `[2, D]`: pooled, and its own. With `map` the normed tokens `[N, D]`.
  """
  (h, w), side = GRID, p['stem']['kernel'].shape[0]
  cut = [image[i * side:(i + 1) * side, j * side:(j + 1) * side].ravel() for i in range(h) for j in range(w)]
  z = np.stack(cut) @ p['stem']['kernel'].reshape(-1, s.width) + p['stem'].get('bias', 0.)
  z = _norm(z, p['stem_norm']) if s.stem.norm else z
  z = np.concatenate([p[name][0] for name in ('cls', 'dist', 'registers') if name in p] + [z])
  if 'positions' in p and s.positions.at is PositionsAt.STEM:
    z = z + _learned(p['positions'], s)
  z = _norm(z, p['norm_before']) if s.norm_before else z
  rows = [[i * w + j for j in range(w)] for i in range(h)]
  columns = [[i * w + j for i in range(h)] for j in range(w)]
  for layer in range(s.depth):
    one = jax.tree.map(lambda x, layer=layer: x[layer], p['blocks'])
    if s.positions.at is not PositionsAt.STEM:
      z = z + _learned(p['positions'] if s.positions.at is PositionsAt.SHARED else one['positions'], s)
    if isinstance(s.block, schema.Axial):
      z = _block(_block(z, one['row'], s, rows), one['column'], s, columns)
    else:
      z = _block(z, one, s, [list(range(len(z)))])
  num_extra = sum(name in p for name in ('cls', 'dist')) + s.registers
  if s.last_norm is LastNorm.POOLED:
    return _norm(z[num_extra:].mean(0), p['norm'])
  z = z if s.last_norm is LastNorm.NONE else _norm(z, p['norm'])
  match s.pool:
    case schema.Map(class_token=True):
      return pooled_by_attention(z, p['pool'], s)
    case schema.ClassToken():
      return z[:2] if s.pool.distillation else z[0]
    case schema.Mean(class_token=True):
      return z[num_extra:].mean(0)
    case schema.Mean():
      return z.mean(0)
  return z[s.registers:]
