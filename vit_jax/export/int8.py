"""Quantizes the products of an ONNX file to int8, with ranges that are measured on images (static quantization).

Each product of tokens with a kernel gets int8 kernels with a scale for each output channel, and uint8 inputs with one
range, as pairs of QuantizeLinear and DequantizeLinear. Norms, softmax, GELU, sums and the products inside of attention
stay in float32. onnxruntime's own tool writes the file; what precedes it is here:

  Smoothing: the range of an input is that of its largest channel. Where a LayerNorm feeds nothing but products, its
    scale and bias are divided by `sqrt(max|x_j| / max|w_j|)` for each channel, and the rows of the kernels multiplied
    with it, which changes nothing in float32 (SmoothQuant, arXiv 2211.10438, eq. 4 with alpha = 0.5).
  Choice: the error of each product alone is computed on tokens of the images. A product whose signal-to-quantization-
    noise ratio is too low stays in float32. Some networks have a few hidden units of very large values, which leave no
    steps for all others: in one ViT-Ti a single product of 74 makes nearly all of the error.

Kernels take 7 of 8 bits (-64 to 64): processors without VNNI add two products of u8 and s8 in 16 bits, which 8 bits
exceed, so that onnxruntime's results would depend on the processor. Ranges are not clipped: the largest values of a
Vision Transformer matter, and percentiles made results worse.
"""
from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core import documents, extras
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.export import onnx as export_onnx

STEPS = 255    # of uint8, from the lowest to the highest value
KERNEL_TOP = 64  # largest int8 of a kernel: 2 * 255 * 64 is less than 2**15
ROWS = 32      # tokens of each image, on which errors are computed
LEAST_SQNR = 15.  # dB, of the outputs of the file


class Product(NamedTuple):
  """A product of tokens with a kernel.

  node: its name in the graph.    source: the tensor of tokens.    kernel: the path of the parameter.
  sqnr: signal-to-quantization-noise ratio of the product alone, as the mean over tokens, in dB.
  """
  node: str
  source: str
  kernel: str
  sqnr: float = math.inf


class Values(NamedTuple):
  """Values of a tensor over images: lowest and highest of each channel `[C]`, and some of its tokens `[R, C]`."""
  lowest: HostArray
  highest: HostArray
  rows: HostArray


class Quantized(NamedTuple):
  """What was quantized, and how near the outputs of the file are to those in float32.

  products: all, with their errors; those below `min_sqnr` are in float32.    sqnr: of the outputs, in dB.
  agreement: share of the images whose largest output is the same.
  """
  products: Sequence[Product]
  min_sqnr: float
  num_images: int
  sqnr: float
  agreement: float

  def rows(self) -> dict[str, dict[str, float]]:
    """Returns the ratio of each product, by block and then by product; products outside of blocks have the block ''."""
    found: dict[str, dict[str, float]] = {}
    for one in self.products:
      _, is_block, rest = one.kernel.partition('/blocks/')
      block, _, name = rest.partition('/') if is_block else ('', '', one.kernel.removeprefix('backbone/'))
      found.setdefault(block, {})[name.removesuffix('/kernel')] = round(one.sqnr, 2)
    return found

  def table(self) -> str:
    """Returns the ratios as text, a line for each block; `*`: stays in float32."""
    rows = self.rows()
    shown = {block: {name: f'{x:.1f}{"*" if x < self.min_sqnr else " "}' for name, x in row.items()}
             for block, row in rows.items()}
    names = list(dict.fromkeys(name for block, row in rows.items() if block for name in row))
    lines = [f'{"block":>5} ' + ' '.join(f'{name:>10}' for name in names)] if names else []
    lines += [f'{block:>5} ' + ' '.join(f'{row.get(name, "-"):>10}' for name in names)
              for block, row in shown.items() if block]
    lines.append('  '.join(f'{name} {x}' for name, x in shown.get('', {}).items()))
    return '\n'.join(line.rstrip() for line in lines if line)

  def plain(self) -> dict[str, Any]:
    """Returns all of it, as JSON has it: the infinite ratio of a product without error is None."""
    kept = [one.kernel for one in self.products if one.sqnr < self.min_sqnr]
    found: dict[str, Any] = documents.finite({
        'images': self.num_images, 'min_sqnr_db': self.min_sqnr, 'output_sqnr_db': round(self.sqnr, 2),
        'agreement': round(self.agreement, 4), 'float32': kept, 'sqnr_db': self.rows()})
    return found


def quantize(path: pathlib.Path, to: pathlib.Path, images: HostArray, *, min_sqnr: float) -> Quantized:
  """Writes an ONNX file of this package with products in int8.

  Args:
    path: the file in float32, in a folder for other files that are needed meanwhile.
    to: the file to write.
    images: `[N, H, W, C]`, as the file takes them.
    min_sqnr: dB, products with a lower ratio stay in float32.

  Raises:
    UserError: a package is not installed, all products stay in float32, or the outputs of the new file are far from
      those of the file.
  """
  onnx = extras.load('onnx', 'onnx', '--quantize=int8')
  model = onnx.load(str(path))
  products = find(model.graph)
  values = measure(model, list(dict.fromkeys(one.source for one in products)), images, path.with_name('measured.onnx'))
  values = smooth(model.graph, products, values)
  kernels = _tensors(model.graph)
  inputs = {node.name: node.input[1] for node in model.graph.node if node.op_type == 'MatMul'}
  products = [one._replace(sqnr=ratio(values[one.source], kernels[inputs[one.node]])) for one in products]
  chosen = [one.node for one in products if one.sqnr >= min_sqnr]
  if not chosen:
    best = max((one.sqnr for one in products), default=-math.inf)
    raise UserError(f'--min_sqnr: expected at most {best:.1f} dB, the best of {len(products)} products, got '
                    f'{min_sqnr:g}. Set a lower one, or leave --quantize out.')
  _write(model, chosen, to, images, path.parent)
  wanted, found = (np.concatenate([run.run(None, {'image': image[None]})[0] for image in images])
                   for run in map(export_onnx.session, (path, to)))
  result = Quantized(products, min_sqnr, len(images), decibel((wanted ** 2).sum(), ((wanted - found) ** 2).sum()),
                     float((wanted.argmax(-1) == found.argmax(-1)).mean()))
  if not result.sqnr >= LEAST_SQNR:
    raise UserError(f'--quantize: expected outputs with a signal-to-noise ratio of at least {LEAST_SQNR:g} dB, got '
                    f'{result.sqnr:.1f}, with {result.agreement:.1%} equal predictions. The file was not kept. Set '
                    f'--min_sqnr above {min_sqnr:g}, or leave --quantize out. Products in dB:\n{result.table()}')
  return result


def find(graph: Any) -> list[Product]:
  """Returns the products with a parameter of the network in a graph."""
  stored = {tensor.name: tensor for tensor in graph.initializer}
  return [Product(node.name, node.input[0], node.input[1]) for node in graph.node
          if node.op_type == 'MatMul' and node.input[1].endswith('/kernel') and len(stored[node.input[1]].dims) == 2]


def measure(model: Any, names: Sequence[str], images: HostArray, part: pathlib.Path) -> dict[str, Values]:
  """Returns the values of tensors of a graph over images; `part` is a file to write meanwhile."""
  onnx = extras.load('onnx', 'onnx', '--quantize=int8')
  seen = onnx.ModelProto()
  seen.CopyFrom(model)
  del seen.graph.output[:]
  seen.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
  export_onnx.save(seen, part)
  session = export_onnx.session(part)
  found: dict[str, list[Values]] = {name: [] for name in names}
  for image in images:
    for name, value in zip(names, session.run(None, {'image': image[None]}), strict=True):
      flat = value.reshape(-1, value.shape[-1])
      some = np.linspace(0, len(flat) - 1, min(ROWS, len(flat))).astype(int)
      found[name].append(Values(flat.min(0), flat.max(0), flat[some]))
  return {name: Values(np.min([one.lowest for one in each], 0), np.max([one.highest for one in each], 0),
                       np.concatenate([one.rows for one in each])) for name, each in found.items()}


def smooth(graph: Any, products: Sequence[Product], values: Mapping[str, Values]) -> dict[str, Values]:
  """Moves a factor for each channel from the LayerNorms of a graph to kernels, and returns the values after it."""
  onnx = extras.load('onnx', 'onnx', '--quantize=int8')
  stored, ours = _tensors(graph), {one.node for one in products}
  smoothed = dict(values)

  def put(node: Any, place: int, value: HostArray) -> None:
    name = f'{node.input[place]}/{node.name}'  # equal parameters of several layers are stored once
    graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    node.input[place] = name

  for norm in [node for node in graph.node if node.op_type == 'LayerNormalization' and node.output[0] in values]:
    readers = [node for node in graph.node if norm.output[0] in node.input]
    if not all(node.name in ours for node in readers):
      continue
    lowest, highest, rows = values[norm.output[0]]
    largest = np.maximum(np.abs(lowest), np.abs(highest))
    weight = np.max([np.abs(stored[node.input[1]]).max(1) for node in readers], 0)
    factor = np.where((largest > 0) & (weight > 0), np.sqrt(largest / np.where(weight > 0, weight, 1.)), 1.)
    for place in (1, 2):
      put(norm, place, stored[norm.input[place]] / factor)
    for node in readers:
      put(node, 1, stored[node.input[1]] * factor[:, None])
    smoothed[norm.output[0]] = Values(lowest / factor, highest / factor, rows / factor)
  used = {name for node in graph.node for name in node.input}
  kept = [tensor for tensor in graph.initializer if tensor.name in used]
  del graph.initializer[:]
  graph.initializer.extend(kept)
  return smoothed


def ratio(values: Values, kernel: HostArray) -> float:
  """Returns the ratio of a product with a kernel `[C, D]` to its error in int8, as the mean over tokens, in dB."""
  lowest, highest = min(0., float(values.lowest.min())), max(0., float(values.highest.max()))
  step = (highest - lowest) / STEPS or 1.
  zero = round(-lowest / step)
  rows = (np.clip(np.round(values.rows / step) + zero, 0, STEPS) - zero) * step
  scale = np.abs(kernel).max(0) / KERNEL_TOP
  scale[scale == 0] = 1.
  exact = values.rows @ kernel
  error = ((rows @ (np.round(kernel / scale) * scale) - exact) ** 2).sum(1)
  size = (exact ** 2).sum(1)
  counts = ~(size <= 0)  # also rows that are not a number, which the result then is
  return decibel(1., float((error[counts] / size[counts]).mean()) if counts.any() else 0.)


def decibel(signal: float, noise: float) -> float:
  """Returns a ratio of energies in dB: infinite without noise, NaN if one of them is not a number."""
  if math.isnan(signal) or math.isnan(noise):
    return math.nan
  if noise <= 0:
    return math.inf
  return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _tensors(graph: Any) -> dict[str, HostArray]:
  onnx = extras.load('onnx', 'onnx', '--quantize=int8')
  return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


class _Images:
  """Gives one image at a time, as the reader of onnxruntime's tool does."""

  def __init__(self, images: HostArray) -> None:
    self._left = iter(images)

  def get_next(self) -> dict[str, HostArray] | None:
    image = next(self._left, None)
    return None if image is None else {'image': image[None]}


def _write(model: Any, nodes: Sequence[str], to: pathlib.Path, images: HostArray, scratch: pathlib.Path) -> None:
  """Writes the graph with these products in int8; `scratch` is a folder for files that are needed meanwhile."""
  onnx = extras.load('onnx', 'onnx', '--quantize=int8')
  tool = extras.load('onnxruntime.quantization', 'onnx', '--quantize=int8')

  about = {one.key: one.value for one in model.metadata_props}
  part, written = scratch / 'smoothed.onnx', scratch / 'written.onnx'
  onnx.helper.set_model_props(model, {'onnx.quant.pre_process': 'onnxruntime.quant'})  # the tool asks for it otherwise
  export_onnx.save(model, part)
  tool.quantize_static(
      str(part), str(written), _Images(images), quant_format=tool.QuantFormat.QDQ, op_types_to_quantize=['MatMul'],
      per_channel=True, reduce_range=True, activation_type=tool.QuantType.QUInt8, weight_type=tool.QuantType.QInt8,
      nodes_to_quantize=list(nodes), use_external_data_format=export_onnx.is_large(model),
      extra_options={'OpTypesToExcludeOutputQuantization': ['MatMul'], 'WeightSymmetric': True})
  found = onnx.load(str(written))
  found.producer_name = model.producer_name
  onnx.helper.set_model_props(found, about)
  export_onnx.save(found, to)
  onnx.checker.check_model(str(to), full_check=True)
