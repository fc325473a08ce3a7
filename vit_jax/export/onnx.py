"""Writes a network as an ONNX file, with its graph and parameters, and runs the file with onnxruntime."""
from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import export

from vit_jax.core import extras, trees
from vit_jax.core.types import Array, HostArray, Params
from vit_jax.export import graph as export_graph
from vit_jax.export import rules

IR_VERSION = 9  # of the file format, as in the ONNX release of OPSET
SIDES = ('rows', 'columns')  # symbols of the trace: the number of multiples in height and width
AXES = ('batch', 'height', 'width')  # names in the file of dimensions of any size, by axis of an input
MAX_BYTES = 1_900_000_000  # of parameters inside the file; larger ones get a file of their own (protobuf limit: 2 GiB)


def write(path: pathlib.Path, function: Callable[[Array], Array], params: Params, image: jax.ShapeDtypeStruct, *,
          output: str, about: Mapping[str, str], multiple: int = 0) -> None:
  """Writes the function of an image as ONNX.

  Args:
    path: of the file; parameters above `MAX_BYTES` go to `<path>.data`.
    function: maps `[B, H, W, 3]` to one array.
    params: the parameters in the function, for the names of its tensors.
    image: one image, `[1, H, W, 3]` of the input's dtype; the file accepts any batch size.
    output: name of the result.
    about: properties to store in the file.
    multiple: px, the file accepts images of any height and width that are multiples of it; 0 = those of `image` alone.

  Raises UserError if onnx is not installed, or the network has an operation without a rule.
  """
  write_graph(path, function, params, {'image': free(image, multiple)}, output=output, about=about,
              factors={'batch': 1, **(dict.fromkeys(SIDES, multiple) if multiple else {})})


def write_graph(path: pathlib.Path, function: Callable[..., Array], params: Params,
                inputs: Mapping[str, jax.ShapeDtypeStruct], *, factors: Mapping[str, int], output: str,
                about: Mapping[str, str]) -> None:
  """Writes a function of several arrays as ONNX, as `write`.

  Args:
    path, params, output, about: see `write`.
    function: of the inputs, in their order.
    inputs: by name; unknown dimensions are symbols, which the first input has.
    factors: of each symbol, the multiple that a dimension is of it.
  """
  onnx = extras.load('onnx', 'onnx', '--to=FILE.onnx')
  traced = jax.make_jaxpr(function)(*inputs.values())
  writer = export_graph.Writer(onnx.helper, names_of(params), rules.RULES)
  values = [export_graph.Value(name, array.shape) for name, array in inputs.items()]
  writer.dimensions.read(values[0].name, values[0].shape, factors)
  result, = writer.write(traced.jaxpr, traced.consts, values)
  writer.nodes.append(onnx.helper.make_node('Identity', [result.name], [output], name='result'))
  symbols = {str(side): name for array in inputs.values() for side, name in zip(array.shape, AXES, strict=False)}

  def declare(name: str, array: Any) -> Any:
    shape = [side if isinstance(side, int) else symbols.get(str(side)) for side in array.shape]  # None: any size
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(array.dtype)), shape)

  graph = onnx.helper.make_graph(
      writer.nodes, 'vit_jax', [declare(name, array) for name, array in inputs.items()],
      [declare(output, traced.out_avals[0])],
      [onnx.numpy_helper.from_array(array, name) for name, array in writer.stored.items()])
  model = onnx.helper.make_model(graph, producer_name='vit_jax', ir_version=IR_VERSION,
                                 opset_imports=[onnx.helper.make_opsetid('', rules.OPSET)])
  onnx.helper.set_model_props(model, {**about, 'opset': str(rules.OPSET)})
  save(model, path)
  onnx.checker.check_model(str(path), full_check=True)


def is_large(model: Any) -> bool:
  """Returns whether the parameters of a model do not go into the file of its graph."""
  return sum(tensor.ByteSize() for tensor in model.graph.initializer) > MAX_BYTES


def save(model: Any, path: pathlib.Path) -> None:
  """Writes a model, with large parameters as a file of their own."""
  onnx = extras.load('onnx', 'onnx', '--to=FILE.onnx')
  has_own_file = is_large(model)
  onnx.save_model(model, str(path), save_as_external_data=has_own_file, location=beside(path) if has_own_file else None)


def free(image: jax.ShapeDtypeStruct, multiple: int) -> jax.ShapeDtypeStruct:
  """Returns the input with symbols, `[batch, 224, 224, 3]`, or `[batch, 16*rows, 16*columns, 3]` with `multiple` 16."""
  sides = [f'{multiple}*{name}' for name in SIDES] if multiple else [str(side) for side in image.shape[1:3]]
  return jax.ShapeDtypeStruct(export.symbolic_shape(', '.join(['batch', *sides, str(image.shape[-1])])), image.dtype)


def beside(path: pathlib.Path) -> str:
  """Returns the name of the file of parameters that are too large for the file of the graph."""
  return f'{path.name}.data'


def run(path: pathlib.Path, image: HostArray) -> HostArray:
  """Runs the file with onnxruntime on the CPU.

  Raises UserError if onnxruntime is not installed.
  """
  return run_graph(path, {'image': image})


def run_graph(path: pathlib.Path, inputs: Mapping[str, HostArray]) -> HostArray:
  """Runs a file of several inputs, as `run`."""
  output, = session(path).run(None, dict(inputs))
  return output


def session(path: pathlib.Path) -> Any:
  """Returns the session of onnxruntime for a file, on the CPU.

  Raises UserError if onnxruntime is not installed.
  """
  onnxruntime = extras.load('onnxruntime', 'onnx', '--to=FILE.onnx')
  return onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])


def names_of(params: Params) -> dict[str, str]:
  """Returns the path names of parameters by digest; each of the stacked blocks has a name, `backbone/blocks/3/…`."""
  name_by_digest: dict[str, str] = {}
  for path, leaf in trees.flatten(params).items():
    if '/blocks/' in f'/{path}':
      before, _, after = path.partition('blocks/')
      for layer, array in enumerate(np.asarray(leaf)):
        name_by_digest.setdefault(export_graph.digest(array), f'{before}blocks/{layer}/{after}')
    name_by_digest.setdefault(export_graph.digest(leaf), path)
  return name_by_digest
