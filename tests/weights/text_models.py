"""Small CLIP, SigLIP, SigLIP 2 and TIPSv2 models as folders, with what transformers computes with them."""
from __future__ import annotations

import functools
import json
import pathlib
import shutil
from typing import Any

import numpy as np

from tests.weights import drawn, make_golden_text
from vit_jax.weights import files

HERE = pathlib.Path(__file__).resolve().parent
FAMILIES = tuple(make_golden_text.LENGTHS)
TEXTS = make_golden_text.TEXTS


@functools.cache
def golden() -> dict[str, np.ndarray]:
  with np.load(HERE / 'golden_text.npz') as file:
    return dict(file)


def about(family: str) -> dict[str, Any]:
  return json.loads(str(golden()[f'{family}/about']))


def tensors(family: str) -> dict[str, np.ndarray]:
  """The tensors of a model under the names of transformers."""
  return {name: make_golden_text.tensor(name, tuple(shape)) for name, shape in about(family)['shapes'].items()}


def write(family: str, folder: pathlib.Path, *, own: dict[str, np.ndarray] | None = None,
          has_tokenizer: bool = True) -> str:
  """Writes a model with its config and its tokenizer, and returns the folder; `own` replaces its tensors."""
  folder.mkdir(parents=True, exist_ok=True)
  files.write_safetensors(folder / 'model.safetensors', tensors(family) if own is None else own)
  (folder / 'config.json').write_text(json.dumps(about(family)['config']))
  if has_tokenizer:
    for file in (HERE / 'text_files' / make_golden_text.TOKENIZERS.get(family, family)).iterdir():
      shutil.copy(file, folder)
  return str(folder)


def image() -> np.ndarray:
  """Three normalized images."""
  return drawn.image(32, 3)
