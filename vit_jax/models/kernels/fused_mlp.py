"""The MLP of a block as one Pallas kernel for each pass, for TPUs with 128 MiB of memory on the chip (v5e, v6e).

The forward pass computes `y = gelu(x W1 + b1) W2 + b2` for several images in each step of the grid: both kernels of the
MLP stay on the chip, and the result of GELU never leaves it. The backward pass computes all four products and the sums
for both biases, again in one pass: the gradients of both kernels are summed in f32 on the chip. XLA computes GELU and
its slope before or after the product that it fuses them with; here they are computed for one part of the hidden width
at a time, beside the products of that part.

Tokens of several images are joined into rows on the chip, as the number of tokens of an image rarely fills tiles, and
never the 256 rows of the matrix unit that a sum over tokens takes at a time.

XLA cannot partition a kernel for several devices, so that each device runs it on its own images (`mlp_on_mesh`), where
it is chosen and applies (`is_fused`, `model.mlp.kernel`). Activation, slope and sums are in f32; products take the
compute dtype. Knows nothing of parameters or dropout.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from vit_jax.config.schema import Gelu, MlpKernel
from vit_jax.core import lazy, numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import norm_act
from vit_jax.models.kernels.fused_attention import LANES, ROWS, dot, padded
from vit_jax.parallel import kernels

if TYPE_CHECKING:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu
else:
  pl, pltpu = lazy.Module('jax.experimental.pallas'), lazy.Module('jax.experimental.pallas.tpu')

DEPTH = 256
"""Terms of a sum that the matrix unit of v6e takes at a time."""
PART = 512
"""Most entries of the hidden width that are computed together."""
VMEM = 112 * 2**20
"""On-chip memory that the kernels may use: that of v5e and v6e, less what the compiler needs."""
PLATFORM = 'tpu'
UNSPLIT = ('tensor',)
"""Mesh axes that the hidden width is split over, which the kernel does not support."""
SHARDS = 'fsdp'
"""Mesh axis that splits both kernels along the width of the network (`parallel/sharding.py`)."""


class Shape(NamedTuple):
  """Sizes: images B of a device, tokens N of an image, width D, hidden width F."""
  images: int
  tokens: int
  width: int
  hidden: int

  @property
  def part(self) -> int:
    """How many entries of the hidden width are computed together: the most that divide it."""
    return next(part for part in range(PART, 0, -LANES) if self.hidden % part == 0)

  def vmem_bytes(self, itemsize: int, together: int = 1) -> int:
    """Returns the bytes on the chip that the backward kernel needs for so many images together.

    These are both kernels and the sums of their gradients; three blocks of images, twice; their rows; the input of
    GELU, twice; and three arrays in f32 of one part of the hidden width.
    """
    rows = padded(together * self.tokens, ROWS)
    image = together * padded(self.tokens, ROWS) * self.width * itemsize
    kernels = 2 * self.width * self.hidden * (itemsize + 4)
    return kernels + 6 * image + rows * (self.width * (2 * itemsize + 4) + 2 * self.hidden * itemsize + 12 * self.part)

  def together(self, itemsize: int, vmem_bytes: int) -> int:
    """Returns the number of images of a grid step: of those that fit, the one with the fewest rows in all products."""
    def num_rows(together: int) -> int:
      num_steps = -(-self.images // together)
      return num_steps * sum(padded(together * self.tokens, side) for side in (ROWS, DEPTH))

    fitting = [n for n in range(1, self.images + 1) if n == 1 or self.vmem_bytes(itemsize, n) <= vmem_bytes]
    return min(fitting, key=lambda n: (num_rows(n), -n))


def activation(x: Array, kind: Gelu) -> tuple[Array, Array]:
  """Returns `gelu(x)` and its slope, f32, with the formulas of `norm_act.slope_of_gelu` and common terms once."""
  if kind is Gelu.QUICK:
    s = jax.nn.sigmoid(norm_act.QUICK * x)
    return x * s, s + norm_act.QUICK * x * s * (1. - s)
  if kind is Gelu.EXACT:
    share = .5 * (1. + lax.erf(x * math.sqrt(.5)))
    return x * share, share + x * jnp.exp(-.5 * x * x) / math.sqrt(2 * math.pi)
  square, factor = x * x, norm_act.SLOPE * norm_act.CUBIC
  t = jnp.tanh(x * (factor * square + norm_act.SLOPE))
  return .5 * x * (1. + t), (1. + t) * (.5 + x * (1.5 * factor * square + .5 * norm_act.SLOPE) * (1. - t))


def _join(images: Any, rows: Any, num_images: int) -> None:
  """Copies `images [b, N, D]` to `rows [b N, D]`; the last block may have too many images, which become zeros."""
  together, tokens = images.shape[:2]
  for i in range(together):
    image = images[i]
    if num_images % together:
      image = jnp.where(pl.program_id(0) * together + i < num_images, image, jnp.zeros_like(image))
    rows[i * tokens:(i + 1) * tokens] = image


def _split(rows: Any, images: Any) -> None:
  """Copies `rows [b N, D]` f32 to `images [b, N, D]`, in their dtype."""
  tokens = images.shape[1]
  for i in range(images.shape[0]):
    images[i] = rows[i * tokens:(i + 1) * tokens].astype(images.dtype)


def _forward_kernel(x: Any, kernel1: Any, bias1: Any, kernel2: Any, bias2: Any, hidden: Any, y: Any, rows: Any,
                    total: Any, *, shape: Shape, gelu: Gelu) -> None:
  """Computes `y` and the input of GELU, `hidden`, for some images."""
  _join(x, rows, shape.images)
  total[...] = jnp.broadcast_to(bias2[...], total.shape)

  count = shape.hidden // shape.part
  step = 2 if count % 2 == 0 else 1

  def add(i: Array, carry: None) -> None:
    """Adds one or two parts of the hidden width; the second product runs beside the activation of the first part."""
    parts = [pl.ds(pl.multiple_of((i * step + k) * shape.part, LANES), shape.part) for k in range(step)]
    inputs = [(dot(rows[...], kernel1[:, part], 1, 0) + bias1[:, part]).astype(x.dtype) for part in parts]
    for part, before_RP in zip(parts, inputs, strict=True):
      hidden[0, :, part] = before_RP
      after_RP = activation(before_RP.astype(jnp.float32), gelu)[0].astype(x.dtype)
      total[...] += dot(after_RP, kernel2[part, :], 1, 0)

  lax.fori_loop(0, count // step, add, None)
  _split(total, y)


def _backward_kernel(x: Any, dy: Any, hidden: Any, kernel1: Any, kernel2: Any, dx: Any, dkernel1: Any, dkernel2: Any,
                     dbias1: Any, dbias2: Any, rows_x: Any, rows_dy: Any, total: Any, *, shape: Shape,
                     gelu: Gelu) -> None:
  """Computes the gradients for some images; those of kernels and biases are added to the sums over earlier images."""
  is_first = pl.program_id(0) == 0

  def add_to(ref: Any, index: Any, term: Array) -> None:
    ref[index] = jnp.where(is_first, 0., ref[index]) + term

  _join(x, rows_x, shape.images)
  _join(dy, rows_dy, shape.images)
  total[...] = jnp.zeros(total.shape, total.dtype)
  add_to(dbias2, ..., rows_dy[...].astype(jnp.float32).sum(0, keepdims=True))

  def add(i: Array, carry: None) -> None:
    own = pl.ds(pl.multiple_of(i * shape.part, LANES), shape.part)
    after, slope = activation(hidden[0, :, own].astype(jnp.float32), gelu)
    dbefore = (dot(rows_dy[...], kernel2[own, :], 1, 1) * slope).astype(x.dtype)
    add_to(dbias1, (slice(None), own), dbefore.astype(jnp.float32).sum(0, keepdims=True))
    total[...] += dot(dbefore, kernel1[:, own], 1, 1)
    add_to(dkernel1, (slice(None), own), dot(rows_x[...], dbefore, 0, 0))
    add_to(dkernel2, (own, slice(None)), dot(after.astype(x.dtype), rows_dy[...], 0, 0))

  lax.fori_loop(0, shape.hidden // shape.part, add, None)
  _split(total, dx)


class _Spec(NamedTuple):
  """An array of a kernel: the block of it in a step of the grid, and shape and dtype of all of it."""
  block: pl.BlockSpec
  shape: tuple[int, ...]
  dtype: Any


def _specs(shape: Shape, together: int, dtype: Any) -> dict[str, _Spec]:
  """Returns kinds of arrays: `x` images, `h` input of GELU, `k`, `l` kernels, `K`, `L` f32 ones, `b`, `c` biases."""
  rows, width, hidden = together * shape.tokens, shape.width, shape.hidden
  tiles = -(-shape.images // together)

  def whole(*sides: int, dtype: Any = jnp.float32) -> _Spec:
    return _Spec(pl.BlockSpec(sides, lambda i: (0, 0), pipeline_mode=pl.Buffered(1)), sides, dtype)

  def own(array: tuple[int, ...], size: int) -> _Spec:
    return _Spec(pl.BlockSpec((size, *array[1:]), lambda i: (i, 0, 0)), array, dtype)

  return {'x': own((shape.images, shape.tokens, width), together), 'h': own((tiles, rows, hidden), 1),
          'k': whole(width, hidden, dtype=dtype), 'l': whole(hidden, width, dtype=dtype), 'K': whole(width, hidden),
          'L': whole(hidden, width), 'b': whole(1, hidden), 'c': whole(1, width)}


def _call(kernel: Callable[..., None], arrays: Sequence[Array], kinds: str, scratch: Sequence[Any], *, shape: Shape,
          gelu: Gelu, together: int, vmem_bytes: int, interpret: bool, name: str) -> tuple[Array, ...]:
  """Runs a kernel over all images; `kinds` has a letter of `_specs` for each input, then for each result."""
  kinds_of_arrays = _specs(shape, together, arrays[0].dtype)
  specs = [kinds_of_arrays[kind] for kind in kinds]
  inputs, results = specs[:len(arrays)], specs[len(arrays):]
  rows = (together * shape.tokens, shape.width)
  return pl.pallas_call(
      functools.partial(kernel, shape=shape, gelu=gelu), grid=(-(-shape.images // together),),
      in_specs=[spec.block for spec in inputs], out_specs=[spec.block for spec in results],
      out_shape=[jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in results],
      scratch_shapes=[pltpu.VMEM(rows, dtype) for dtype in scratch], interpret=interpret, name=name,
      compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',), vmem_limit_bytes=vmem_bytes))(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def mlp(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array, gelu: Gelu, vmem_bytes: int = VMEM,
        interpret: bool = False) -> Array:
  """Returns `gelu(x W1 + b1) W2 + b2`. The input of GELU is named `mlp` for rematerialization.

  Args:
    x: `[B, N, D]`, any float dtype.
    kernel1: `[D, F]`, same dtype.
    bias1: `[F]`, same dtype.
    kernel2: `[F, D]`, same dtype.
    bias2: `[D]`, same dtype.
    gelu: its form.
    vmem_bytes: on-chip memory that the kernels may use.
    interpret: runs the kernel's Python on any device, slowly.

  Returns:
    `[B, N, D]`, same dtype.
  """
  return _forward(x, kernel1, bias1, kernel2, bias2, gelu, vmem_bytes, interpret)[0]


def _shape(x: Array, kernel1: Array) -> Shape:
  images, tokens, width = x.shape
  return Shape(images, tokens, width, kernel1.shape[1])


def _forward(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array, gelu: Gelu, vmem_bytes: int,
             interpret: bool) -> tuple[Array, tuple[Array, ...]]:
  shape, wide = _shape(x, kernel1), [bias[None].astype(jnp.float32) for bias in (bias1, bias2)]
  hidden, y = _call(_forward_kernel, (x, kernel1, wide[0], kernel2, wide[1]), 'xkblchx', (x.dtype, jnp.float32),
                    shape=shape, gelu=gelu, together=shape.together(x.dtype.itemsize, vmem_bytes),
                    vmem_bytes=vmem_bytes, interpret=interpret, name='fused_mlp')
  return y, (x, kernel1, kernel2, checkpoint_name(hidden, 'mlp'))


def _backward(gelu: Gelu, vmem_bytes: int, interpret: bool, saved: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
  x, kernel1, kernel2, hidden = saved
  shape = _shape(x, kernel1)
  dx, dkernel1, dkernel2, dbias1, dbias2 = _call(
      _backward_kernel, (x, dy, hidden, kernel1, kernel2), 'xxhklxKLbc', (x.dtype, x.dtype, jnp.float32), shape=shape,
      gelu=gelu, together=shape.together(x.dtype.itemsize, vmem_bytes), vmem_bytes=vmem_bytes, interpret=interpret,
      name='fused_mlp_backward')
  return dx, *(gradient.astype(x.dtype) for gradient in (dkernel1, dbias1[0], dkernel2, dbias2[0]))


mlp.defvjp(_forward, _backward)


def is_fused(kernel: MlpKernel, shape: tuple[int, ...], hidden: int, dtype: DTypeLike, *, is_adapted: bool) -> bool:
  """Returns whether the fused kernel is chosen for an input `[B, N, D]`, and runs on the devices of the current mesh.

  `is_adapted`: whether adapters (LoRA) are added to the products, which the kernel does not do.
  """
  if kernel is not MlpKernel.FUSED or numerics.mesh_platform() != PLATFORM or len(shape) != 3:
    return False
  reason = problem(jax.sharding.get_abstract_mesh(), shape, hidden, jnp.dtype(dtype).itemsize)
  if is_adapted:
    reason = 'adapters are added to its products'
  if reason:
    kernels.log_once(f'mlp.kernel=fused does not apply, and XLA computes the MLP, as with kernel=xla: {reason}.')
  return not reason


def problem(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], hidden: int, itemsize: int) -> str:
  """Returns why the fused kernel does not run on TPUs of a mesh; '' if it does."""
  device = mesh.abstract_mesh.abstract_device
  kind = device.device_kind if device else ''
  num_parts = math.prod(mesh.shape[axis] for axis in UNSPLIT if axis in mesh.axis_names)
  images, tokens, width = shape
  need = Shape(images, tokens, width, hidden).vmem_bytes(itemsize)
  if wrong_chip := kernels.mlp_chip_problem(kind):
    return wrong_chip
  if num_parts > 1:
    return f'the mesh splits the hidden width over {num_parts} devices (tensor={num_parts})'
  if width % LANES or hidden % LANES:
    return f'widths of {width} and {hidden} do not fill tiles of {LANES}'
  if need > VMEM:
    return (f'widths of {width} and {hidden} need {need / 2**20:.0f} MiB on the chip for an image of {tokens} '
            f'tokens, more than {VMEM / 2**20:.0f}')
  return ''


def mlp_on_mesh(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array, gelu: Gelu) -> Array:
  """Returns `mlp`, which each device computes for its own images with all of both kernels of the MLP.

  Where `fsdp` splits the kernels, each device gathers them itself. So the backward pass scatters their gradients;
  otherwise complete gradients would be summed.
  """
  mesh, whole = jax.sharding.get_abstract_mesh(), PartitionSpec()
  images = PartitionSpec(numerics.dividing(mesh, numerics.BATCH_AXES, x.shape[0]))
  shards = numerics.dividing(mesh, (SHARDS,), x.shape[-1])
  rows, columns = PartitionSpec(shards), PartitionSpec(None, shards)

  def form(x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array) -> Array:
    if shards:
      kernel1 = jax.lax.all_gather(kernel1, SHARDS, axis=0, tiled=True)
      kernel2 = jax.lax.all_gather(kernel2, SHARDS, axis=1, tiled=True)
    return mlp(x, kernel1, bias1, kernel2, bias2, gelu)

  return jax.shard_map(form, in_specs=(images, rows, whole, columns, whole), out_specs=images,
                       check_vma=False)(x, kernel1, bias1, kernel2, bias2)
