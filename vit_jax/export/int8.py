"""Quantizes the products of an ONNX file to int8, with ranges that are measured on images (static quantization).

A product is a `MatMul` node of tokens with a kernel, such as `backbone/blocks/3/attn/query/kernel`. Each gets int8
kernels with a scale for each output channel, and uint8 inputs with one range, as pairs of QuantizeLinear and
DequantizeLinear. Norms, softmax, GELU, sums and the products inside of attention stay in float32. `quantize` finds the
products, measures their inputs on the images, smooths, and chooses; then onnxruntime's own tool writes the file.

  Smoothing: the range of an input is that of its largest channel. Where a LayerNorm feeds nothing but products, its
    scale and bias are divided by `sqrt(max|x_j| / max|w_j|)` for each channel, and the rows of the kernels multiplied
    with it, which changes nothing in float32 (SmoothQuant, arXiv 2211.10438, eq. 4 with alpha = 0.5).
  Choice: the error of each product alone is computed on tokens of the images. A product whose signal-to-quantization-
    noise ratio (SQNR) is too low stays in float32. Some networks have a few hidden units of very large values, which
    leave no steps for all others: in one ViT-Ti a single product of 74 makes nearly all of the error.

Kernels take 7 of 8 bits (-64 to 64): processors without VNNI add two products of u8 and s8 in 16 bits, which 8 bits
exceed, so that onnxruntime's results would depend on the processor. Ranges are not clipped: the largest values of a
Vision Transformer matter, and percentiles made results worse.
"""
from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core import documents, extras
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.export import onnx as export_onnx

STEPS = 255    # steps of uint8 from the lowest to the highest value
KERNEL_TOP = 64  # largest int8 of a kernel: 2 * 255 * 64 is less than 2**15
ROWS = 32      # tokens of each image on which errors are computed
LEAST_SQNR = 15.  # dB, the least ratio of the outputs of the file


class Product(NamedTuple):
  """A product of tokens with a kernel.

  node: its name in the graph, such as `MatMul_7`.
  source: name of the tensor of tokens.
  kernel: path of the parameter.
  sqnr: signal-to-quantization-noise ratio of the product alone, as the mean over tokens, in dB; inf = no error.
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

  products: all, with their errors; those below `min_sqnr` are in float32.
  min_sqnr: dB.
  num_images: number of images that were measured.
  sqnr: ratio of the outputs, in dB.
  agreement: share of the images whose largest output is the same.
  """
  products: Sequence[Product]
  min_sqnr: float
  num_images: int
  sqnr: float
  agreement: float

  def rows(self) -> dict[str, dict[str, float]]:
    """Returns the ratio of each product by block and name, `{'3': {'attn/query': 31.4}}`.

    Products outside of blocks have the block ''.
    """
    ratios: dict[str, dict[str, float]] = {}
    for product in self.products:
      before, is_in_block, path = product.kernel.partition('/blocks/')
      block, name = '', before.removeprefix('backbone/')
      if is_in_block:
        block, _, name = path.partition('/')
      ratios.setdefault(block, {})[name.removesuffix('/kernel')] = round(product.sqnr, 2)
    return ratios

  def table(self) -> str:
    """Returns the ratios as text, a line for each block; `*`: stays in float32."""
    cells = {block: {name: f'{ratio:.1f}{"*" if ratio < self.min_sqnr else " "}' for name, ratio in row.items()}
             for block, row in self.rows().items()}
    outside = cells.pop('', {})
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    lines = []
    if names:
      lines.append(f'{"block":>5} ' + ' '.join(f'{name:>10}' for name in names))
    for block, row in cells.items():
      lines.append(f'{block:>5} ' + ' '.join(f'{row.get(name, "-"):>10}' for name in names))
    if outside:
      lines.append('  '.join(f'{name} {cell}' for name, cell in outside.items()))
    return '\n'.join(line.rstrip() for line in lines)

  def plain(self) -> dict[str, Any]:
    """Returns all of it, as JSON has it: the infinite ratio of a product without error is None."""
    content: dict[str, Any] = documents.finite({
        'images': self.num_images, 'min_sqnr_db': self.min_sqnr, 'output_sqnr_db': round(self.sqnr, 2),
        'agreement': round(self.agreement, 4),
        'float32': [product.kernel for product in self.products if product.sqnr < self.min_sqnr],
        'sqnr_db': self.rows()})
    return content


def quantize(path: pathlib.Path, to: pathlib.Path, images: HostArray, *, min_sqnr: float) -> Quantized:
  """Writes an ONNX file of this package with products in int8.

  Args:
    path: the file in float32, in a folder for other files that are needed meanwhile.
    to: the file to write.
    images: `[N, H, W, C]`, as the file takes them.
    min_sqnr: dB, products with a lower ratio stay in float32.

  Raises UserError if a package is not installed, all products stay in float32, or the outputs of the new file are far
  from those of the file. Then `to` may exist: the caller stages its folder, which an error removes (`export/job.py`).
  """
  model = _load_onnx().load(str(path))
  products = find(model.graph)
  sources = list(dict.fromkeys(product.source for product in products))
  values = measure(model, sources, images, path.with_name('measured.onnx'))
  values = smooth(model.graph, products, values)
  kernels = _read_tensors(model.graph)
  kernel_of_node = {node.name: node.input[1] for node in model.graph.node if node.op_type == 'MatMul'}  # smoothed ones
  products = [product._replace(sqnr=ratio(values[product.source], kernels[kernel_of_node[product.node]]))
              for product in products]
  nodes = [product.node for product in products if product.sqnr >= min_sqnr]
  if not nodes:
    best = max((product.sqnr for product in products), default=-math.inf)
    raise UserError(f'--min_sqnr: expected at most {best:.1f} dB, the best of {len(products)} products, got '
                    f'{min_sqnr:g}. Set a lower one, or leave --quantize out.')
  _write(model, nodes, to, images, path.parent)
  exact, quantized = _run(path, images), _run(to, images)
  result = Quantized(
      products, min_sqnr, num_images=len(images), sqnr=decibel((exact ** 2).sum(), ((exact - quantized) ** 2).sum()),
      agreement=float((exact.argmax(-1) == quantized.argmax(-1)).mean()))
  if not result.sqnr >= LEAST_SQNR:  # also if it is not a number
    raise UserError(f'--quantize: expected outputs with a signal-to-noise ratio of at least {LEAST_SQNR:g} dB, got '
                    f'{result.sqnr:.1f}, with {result.agreement:.1%} equal predictions. The file was not kept. Set '
                    f'--min_sqnr above {min_sqnr:g}, or leave --quantize out. Products in dB:\n{result.table()}')
  return result


def _run(path: pathlib.Path, images: HostArray) -> HostArray:
  """Returns the outputs `[N, …]` of a file for images, which it gets one by one."""
  session = export_onnx.session(path)
  return np.concatenate([session.run(None, {'image': image[None]})[0] for image in images])


def _load_onnx() -> ModuleType:
  return extras.load('onnx', 'onnx', '--quantize=int8')


def find(graph: Any) -> list[Product]:
  """Returns the products with a parameter of the network in a graph."""
  stored = {tensor.name: tensor for tensor in graph.initializer}
  return [Product(node.name, node.input[0], node.input[1]) for node in graph.node
          if node.op_type == 'MatMul' and node.input[1].endswith('/kernel') and len(stored[node.input[1]].dims) == 2]


def measure(model: Any, names: Sequence[str], images: HostArray, part: pathlib.Path) -> dict[str, Values]:
  """Returns the values of tensors of a graph over images; `part` is a temporary file."""
  onnx = _load_onnx()
  with_outputs = onnx.ModelProto()
  with_outputs.CopyFrom(model)
  del with_outputs.graph.output[:]
  with_outputs.graph.output.extend(
      onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
  export_onnx.save(with_outputs, part)
  session = export_onnx.session(part)
  by_image: dict[str, list[Values]] = {name: [] for name in names}
  for image in images:
    for name, value in zip(names, session.run(None, {'image': image[None]}), strict=True):
      tokens = value.reshape(-1, value.shape[-1])
      indices = np.linspace(0, len(tokens) - 1, min(ROWS, len(tokens))).astype(int)
      by_image[name].append(Values(tokens.min(0), tokens.max(0), tokens[indices]))
  values_by_name = {}
  for name, values_by_image in by_image.items():
    lowest, highest, rows = zip(*values_by_image, strict=True)
    values_by_name[name] = Values(np.min(lowest, 0), np.max(highest, 0), np.concatenate(rows))
  return values_by_name


def smooth(graph: Any, products: Sequence[Product], values: Mapping[str, Values]) -> dict[str, Values]:
  """Moves a factor for each channel from the LayerNorms of a graph to kernels, and returns the values after it."""
  onnx = _load_onnx()
  tensors, product_nodes = _read_tensors(graph), {product.node for product in products}
  smoothed = dict(values)

  def replace_input(node: Any, index: int, value: HostArray) -> None:
    name = f'{node.input[index]}/{node.name}'  # equal parameters of several layers are stored once
    graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    node.input[index] = name

  for norm in [node for node in graph.node if node.op_type == 'LayerNormalization' and node.output[0] in values]:
    readers = [node for node in graph.node if norm.output[0] in node.input]
    if not all(node.name in product_nodes for node in readers):
      continue
    lowest, highest, rows = values[norm.output[0]]
    max_input = np.maximum(np.abs(lowest), np.abs(highest))
    max_weight = np.max([np.abs(tensors[node.input[1]]).max(1) for node in readers], 0)
    has_both = (max_input > 0) & (max_weight > 0)
    factor = np.where(has_both, np.sqrt(max_input / np.where(max_weight > 0, max_weight, 1.)), 1.)
    for index in (1, 2):  # scale and bias
      replace_input(norm, index, tensors[norm.input[index]] / factor)
    for node in readers:
      replace_input(node, 1, tensors[node.input[1]] * factor[:, None])
    smoothed[norm.output[0]] = Values(lowest / factor, highest / factor, rows / factor)
  used = {name for node in graph.node for name in node.input}
  used_tensors = [tensor for tensor in graph.initializer if tensor.name in used]
  del graph.initializer[:]
  graph.initializer.extend(used_tensors)
  return smoothed


def ratio(values: Values, kernel: HostArray) -> float:
  """Returns the ratio of a product with a kernel `[C, D]` to its error in int8, as the mean over tokens, in dB."""
  lowest, highest = min(0., float(values.lowest.min())), max(0., float(values.highest.max()))
  step = (highest - lowest) / STEPS or 1.
  zero = round(-lowest / step)
  rounded_rows = (np.clip(np.round(values.rows / step) + zero, 0, STEPS) - zero) * step
  scale = np.abs(kernel).max(0) / KERNEL_TOP
  scale[scale == 0] = 1.
  rounded_kernel = np.round(kernel / scale) * scale
  exact = values.rows @ kernel
  noise = ((rounded_rows @ rounded_kernel - exact) ** 2).sum(1)
  signal = (exact ** 2).sum(1)
  counts = ~(signal <= 0)  # also rows that are not a number, which the result then is
  return decibel(1., float((noise[counts] / signal[counts]).mean()) if counts.any() else 0.)


def decibel(signal: float, noise: float) -> float:
  """Returns a ratio of energies in dB: infinite without noise, NaN if one of them is not a number."""
  if math.isnan(signal) or math.isnan(noise):
    return math.nan
  if noise <= 0:
    return math.inf
  return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _read_tensors(graph: Any) -> dict[str, HostArray]:
  """Returns the stored tensors of a graph by name."""
  to_array = _load_onnx().numpy_helper.to_array
  return {tensor.name: to_array(tensor) for tensor in graph.initializer}


class _Images:
  """Gives one image at a time, as the reader of onnxruntime's tool does."""

  def __init__(self, images: HostArray) -> None:
    self._images = iter(images)

  def get_next(self) -> dict[str, HostArray] | None:
    image = next(self._images, None)
    return None if image is None else {'image': image[None]}


def _write(model: Any, nodes: Sequence[str], to: pathlib.Path, images: HostArray, scratch: pathlib.Path) -> None:
  """Writes the graph with these products in int8; `scratch` is a folder for temporary files."""
  onnx = _load_onnx()
  tool = extras.load('onnxruntime.quantization', 'onnx', '--quantize=int8')
  properties = {prop.key: prop.value for prop in model.metadata_props}
  smoothed, written = scratch / 'smoothed.onnx', scratch / 'written.onnx'
  onnx.helper.set_model_props(model, {'onnx.quant.pre_process': 'onnxruntime.quant'})  # the tool asks for it otherwise
  export_onnx.save(model, smoothed)
  tool.quantize_static(
      str(smoothed), str(written), _Images(images), quant_format=tool.QuantFormat.QDQ, op_types_to_quantize=['MatMul'],
      per_channel=True, reduce_range=True, activation_type=tool.QuantType.QUInt8, weight_type=tool.QuantType.QInt8,
      nodes_to_quantize=list(nodes), use_external_data_format=export_onnx.is_large(model),
      extra_options={'OpTypesToExcludeOutputQuantization': ['MatMul'], 'WeightSymmetric': True})
  quantized = onnx.load(str(written))
  quantized.producer_name = model.producer_name
  onnx.helper.set_model_props(quantized, properties)
  export_onnx.save(quantized, to)
  onnx.checker.check_model(str(to), full_check=True)
