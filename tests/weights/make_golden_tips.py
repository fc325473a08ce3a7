"""Makes `golden_tips.npz`: what the JAX program of the authors of TIPS computes with the weights of `drawn.py`.

Run where flax and ml_collections are, with the repositories google-deepmind/tips and google-research/scenic:
  PYTHONPATH=FOLDER_WITH_tips:FOLDER_OF_scenic python tests/weights/make_golden_tips.py
Made with tips 4db271d, scenic 4a38d47, flax 0.12.8; to be made anew when the networks below change. The file has the
shapes of the parameters by their paths, and for one image of each of SIZES the class tokens and the patch tokens.
"""
from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import drawn  # noqa: E402

SIZES = ((32, 32), (16, 16), (48, 32))  # native, half, not square
TINY = {'hidden_size': 32, 'num_layers': 2, 'mlp_dim': 48, 'num_heads': 2, 'patch_size': (8, 8)}
NETWORKS = {'mlp': {**TINY, 'ffn_layer': 'mlp'}, 'swiglu': {**TINY, 'mlp_dim': 60, 'ffn_layer': 'swiglu'}}
Tensors = dict[str, np.ndarray]


def tensors(shapes: dict[str, list[int]]) -> Tensors:
  """The drawn parameters."""
  return {name: drawn.tensor(name, tuple(shape)) for name, shape in shapes.items()}


def main() -> None:
  import flax
  import jax
  from tips.scenic.models import vit
  held: dict[str, Any] = {}
  for name, config in NETWORKS.items():
    vit.get_vit_config = lambda _, config=config: config  # sizes that the program does not name
    model = vit.ViT(variant=name, num_cls_tokens=2, posembs=(4, 4))
    image = drawn.image(48, 1)
    made = model.init(jax.random.key(0), image[:, :32, :32], train=False)['params']
    shapes = {f'encoder/{k}': list(x.shape) for k, x in flax.traverse_util.flatten_dict(made, sep='/').items()}
    drawn_params = {k.removeprefix('encoder/'): x for k, x in tensors(shapes).items()}
    params = flax.traverse_util.unflatten_dict(drawn_params, sep='/')
    held[f'{name}/shapes'] = np.array(json.dumps(shapes))
    for h, w in SIZES:
      found = np.asarray(model.apply({'params': params}, image[:, :h, :w], train=False))
      held |= {f'{name}/{h}x{w}/cls': found[:, :2], f'{name}/{h}x{w}/tokens': found[:, 2:]}
    print(name, float(found.std()))
  np.savez_compressed(HERE / 'golden_tips.npz', **held)
  print((HERE / 'golden_tips.npz').stat().st_size, 'bytes')


if __name__ == '__main__':
  main()
