"""The Python API: `vit_jax.load(…)` returns a `Model`, whose methods compute classes, features and attention of images.

    model = vit_jax.load('ViT-B_16.npz')
    model.classify('cat.jpg')[0][0].name
    model.features(['cat.jpg', 'dog.jpg'])             # [2, 768]
    model.attention('cat.jpg', layer=12)               # [1, 12, 197, 197]
    model.relevance('cat.jpg', of_class='tabby')       # [1, 14, 14]
"""
from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from vit_jax.core import implementation
from vit_jax.inspect.model import Guess, Model
from vit_jax.parallel import hardware
from vit_jax.weights import inference
from vit_jax.weights.hints import Reading

__all__ = ['Guess', 'Model', 'load']


def load(where: str | os.PathLike[str], *, preprocess: str = '', model: str = '', view: str = '',
         classes: str | os.PathLike[str] | Sequence[str] = (), allow_download: bool = False,
         allow_nonfinite: bool = False, allow_code: bool = False) -> Model:
  """Returns a network, ready to use, from a weight file, a folder, a run directory, a URL or a known name.

  Args:
    where: the weights, see `vit_jax.weights.loading.load`.
    preprocess: preprocessing such as `imagenet` or `resize=248,image=224`; '' = the preprocessing of the weights.
    model: settings that the tensors do not determine, such as `heads=6,gelu=exact`.
    view: which network of a run (student, ema or teacher) or of a file with several; '' = the one for inference.
    classes: names of the outputs in their order, or a file with one name per line; () = the names in the weights.
    allow_download: whether to download the weights that the config of adapters names.
    allow_nonfinite: whether to use weights with infinite or NaN values.
    allow_code: whether to run modules of the current folder that the `config.json` of a run names for its network.

  Raises:
    UserError: the weights cannot be read. If they do not exist, the error is also a FileNotFoundError.
  """
  platforms = hardware.platforms()
  if platforms and not getattr(jax.config, 'jax_platforms', None):
    jax.config.update('jax_platforms', platforms)  # otherwise libtpu logs that this machine has no TPU
  if allow_code:
    implementation.trust_folder(os.getcwd())
  reading = Reading(preprocess, model, view, allow_download, allow_nonfinite)
  if isinstance(classes, str | os.PathLike):
    return Model(inference.load(os.fspath(where), reading, classes=os.fspath(classes)))
  return Model(inference.with_class_names(inference.load(os.fspath(where), reading), tuple(classes)))
