"""Exports both towers of weights that compare images and texts, and their tokenizer.

`--to=NAME.onnx --texts` writes four files, which need neither this package nor jax:

  NAME.onnx            images to vectors of unit length
  NAME.text.onnx       ids of texts (and with TIPS their mask) to vectors of unit length
  NAME.tokenizer.json  texts to these ids, for the package `tokenizers` (`data/text/exported.py`)
  NAME.pairs.json      scale and bias of the logits `scale * image · text + bias`, and whether a probability is their
                       sigmoid or a softmax over texts

Each file of a network is run beside it, with several batch sizes, and must give the same results; so must the
tokenizer, for texts of many kinds.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray
from vit_jax.data.text import exported
from vit_jax.data.text.tokenizer import Tokenizer
from vit_jax.export import functions, onnx
from vit_jax.models import heads
from vit_jax.record import destination
from vit_jax.weights import card, inference, text_encoder
from vit_jax.weights import text as texts
from vit_jax.weights.network import Weights
from vit_jax.weights.text import TextWeights

OUTPUT = 'embedding'
SAMPLES = ('a photo of a cat', 'A photo of TWO dogs, on a beach!', 'Ein Café in Köln', '猫の写真', 'x' * 400, '',
           'under_score  and   spaces ', "it's a bird's-eye view (2019)", '50% of 1,000.5 €', 'emoji 🐱 and\ttabs')
"""Texts that the exported tokenizer must map to the ids of the original."""


class Files(NamedTuple):
  """Paths of the four files."""
  image: pathlib.Path
  text: pathlib.Path
  tokenizer: pathlib.Path
  pairs: pathlib.Path


def files(to: pathlib.Path) -> Files:
  """Returns the paths of all files, of which `to` is that of the image tower."""
  return Files(to, *(to.with_name(f'{to.stem}.{name}') for name in (
      f'text{to.suffix}', 'tokenizer.json', 'pairs.json')))


def check(to: pathlib.Path) -> Files:
  """Checks the paths before anything is read, and returns them. Raises UserError as `functions.check`."""
  outputs = files(functions.check(to))
  functions.check(outputs.text)
  for path in (outputs.tokenizer, outputs.pairs):
    if path.exists():
      raise UserError(f'--to: expected a new path, got {to}, and {path.name} exists. Choose another path.')
  return outputs


def write(weights: Weights, to: pathlib.Path, *, from_pixels: bool, any_size: bool, tokenizer: str) -> None:
  """Exports both towers of weights and their tokenizer, and prints a description.

  Args:
    weights: loaded, of the image tower.
    to: a new file for the image tower; its suffix selects the format.
    from_pixels, any_size: of the image tower, see `job.write`.
    tokenizer: its file; '' = beside the weights.

  Raises UserError if the weights have no text tower or no tokenizer, or a file gives other results; then none is kept.
  """
  check(to)
  text = texts.load(weights.given or weights.source, image=weights)
  encoder = text_encoder.TextEncoder(text, weights, tokenizer_file=tokenizer)
  image = functions.make_subject(weights, from_pixels=from_pixels, any_size=any_size)
  image = image._replace(function=_vectors(weights, encoder, from_pixels=from_pixels), output=OUTPUT)
  text_tokenizer = Tokenizer(texts.find_tokenizer(text, tokenizer), family=text.family, length=text.tower.length)
  with destination.staged(to, shown=str(to), is_ours=card.is_ours) as folder:
    part = files(folder / to.name)
    about = functions.describe(weights, from_pixels=from_pixels, multiple=image.multiple)
    worst = [functions.write_subject(image, part.image, params=inference.parameters(weights), about=about)]
    exported.write(text_tokenizer, text.rule, part.tokenizer, samples=SAMPLES)
    worst.append(_write_text(text, text_tokenizer, part.text))
    part.pairs.write_text(json.dumps(_pairs(text), indent=1) + '\n')
    card.place(card.text(weights, to.name, written_as=to.suffix[1:], how=functions.checked(max(worst), image.multiple),
                         from_pixels=from_pixels), part.image, to)
  outputs = files(to)
  print(f'Exported {weights.source} to {to} ({image.image.dtype} images to {OUTPUT}), {outputs.text.name} '
        f'(ids of {text.tower.length} tokens to {OUTPUT}), {outputs.tokenizer.name} and {outputs.pairs.name}. '
        f'The results of images and texts differ from those of the networks by at most {worst[0]:.1e} and '
        f'{worst[1]:.1e} of the largest value (allowed: {functions.TOLERANCE:.0e}); the tokenizer gives the same ids '
        f'for {len(SAMPLES)} texts.', flush=True)


def _vectors(weights: Weights, encoder: text_encoder.TextEncoder, *, from_pixels: bool) -> Callable[[Array], Array]:
  """Returns the function of images whose results are vectors of unit length."""
  features = functions.make_function(weights, from_pixels=from_pixels, is_pooled=True)
  return lambda image: encoder.project(features(image))


def _pairs(text: TextWeights) -> dict[str, Any]:
  return {'scale': text.scale, 'bias': text.bias, 'probability': 'sigmoid' if text.is_sigmoid else 'softmax',
          'tokens': text.tower.length, 'inputs': list(_inputs(text))}


def _inputs(text: TextWeights) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the inputs of the text tower for any number of texts."""
  shape = export.symbolic_shape(f'batch, {text.tower.length}')
  names = ['tokens', 'mask'] if text.tower.pool is schema.TextPool.MEAN else ['tokens']
  return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}


def _write_text(text: TextWeights, tokenizer: Tokenizer, path: pathlib.Path) -> float:
  """Writes the text tower, and returns the largest difference from its results. Raises UserError if it is large."""
  tower = dataclasses.replace(text.tower, dtype=jnp.float32, execution=schema.Execution.UNROLLED)

  def function(tokens: Array, mask: Array | None = None) -> Array:
    is_token = jnp.ones(tokens.shape, bool) if mask is None else mask > 0
    return heads.normalize(tower.apply(text.params, tokens, is_token), axis=-1)

  inputs = _inputs(text)
  if path.suffix == '.onnx':
    onnx.write_graph(path, function, {'text': text.params}, inputs, factors={'batch': 1}, output=OUTPUT,
                     about={'source': text.source, **{name: json.dumps(value) for name, value in _pairs(text).items()}})
    run: Callable[[dict[str, HostArray]], HostArray] = lambda arrays: onnx.run_graph(path, arrays)
  else:
    content = bytes(export.export(jax.jit(function), platforms=functions.PLATFORMS)(*inputs.values()).serialize())
    path.write_bytes(content)
    call = jax.jit(export.deserialize(bytearray(content)).call)
    run = lambda arrays: np.asarray(call(*arrays.values()))
  ids, mask = tokenizer(SAMPLES[:max(functions.NUM_IMAGES) + 2])
  samples = {'tokens': ids, 'mask': mask.astype(np.int32)}
  arrays = {name: samples[name] for name in inputs}
  expected, worst = np.asarray(jax.jit(function)(*arrays.values())), 0.
  for num in (*functions.NUM_IMAGES, len(ids)):
    got = run({name: x[:num] for name, x in arrays.items()})
    worst = float(np.maximum(worst, functions.difference(expected[:num], got, what=OUTPUT)))  # keeps nan
  return functions.within(worst, what=OUTPUT)
