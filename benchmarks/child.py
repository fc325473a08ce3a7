"""Times a ViT of another program on request. `peers.py` runs this file with any Python that has the program.

  python child.py NAME SETTINGS

Reads lines `{"part": "step", "count": 3}` and answers each with `{"clock_s": …, "processor_s": …}`; its first line is
its label, or an error. Imports nothing of this package.
"""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

# Other files in this folder may have the names of modules of Python.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or '.') != os.path.dirname(os.path.abspath(__file__))]

Calls = dict[str, Callable[[], Any]]
UNUSED = ('tensorflow', 'tensorflow.io', 'tensorflow.io.gfile', 'einops', 'ml_collections')
"""Packages that big_vision imports beside its networks, for files and configs, and that no network uses."""


class _Unused(types.ModuleType):
  """Takes the place of a package that is not installed; each of its names is another one."""
  __path__: list[str] = []

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    return _Unused(f'{self.__name__}.{name}')


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
  """Lets big_vision be imported inside it where packages of `UNUSED` are missing; they are still missing afterwards."""
  import flax.training.checkpoints  # noqa: F401  it looks for TensorFlow, and uses it if it is there
  absent = [name for name in UNUSED if importlib.util.find_spec(name.partition('.')[0]) is None]
  sys.modules.update({name: _Unused(name) for name in absent})
  try:
    yield
  finally:
    for name in absent:
      del sys.modules[name]


def torch_network(name: str, s: dict[str, Any]) -> tuple[str, Any]:
  """Returns a label and the module that maps images `[B, 3, H, W]` to logits."""
  import torch
  if name == 'timm':
    import timm
    from timm.models.vision_transformer import VisionTransformer
    mean = {} if s['pool'] == 'cls' else {'class_token': False, 'global_pool': 'avg', 'fc_norm': False}
    return f'timm {timm.__version__}', VisionTransformer(
        img_size=tuple(s['px']), patch_size=s['patch'], embed_dim=s['width'], depth=s['depth'], num_heads=s['heads'],
        mlp_ratio=s['mlp'] / s['width'], num_classes=s['classes'],
        act_layer='gelu_tanh' if s['tanh'] else None, **mean)
  import transformers
  if s['pool'] != 'cls':
    raise ValueError('another pooling than the class token, which it needs. Set --config.model.pool=class_token.')
  config = transformers.ViTConfig(
      hidden_size=s['width'], num_hidden_layers=s['depth'], num_attention_heads=s['heads'],
      intermediate_size=s['mlp'], image_size=s['px'], patch_size=s['patch'], num_labels=s['classes'],
      hidden_act='gelu_pytorch_tanh' if s['tanh'] else 'gelu', layer_norm_eps=1e-6)

  class Logits(torch.nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.network = transformers.ViTForImageClassification(config)

    def forward(self, image: Any) -> Any:
      return self.network(image).logits

  return f'transformers {transformers.__version__}', Logits()


def torch_calls(name: str, s: dict[str, Any]) -> tuple[str, Calls, Callable[[], None]]:
  """Returns a label, the functions to time, and a function that waits for the device."""
  import torch
  torch.set_num_threads(s['threads'])
  torch.set_float32_matmul_precision('highest')
  device = 'cuda' if s['device'] == 'gpu' else 'cpu'
  plain, _, compiled = name.partition('-')
  label, network = torch_network(plain, s)
  network = network.to(device)
  forward = torch.compile(network) if compiled else network
  image = torch.randn(s['batch'], 3, *s['px'], device=device)
  target = torch.randint(0, s['classes'], (s['batch'],), device=device)
  optimizer = torch.optim.AdamW(network.parameters(), lr=s['lr'], weight_decay=s['decay'], fused=device == 'cuda')
  half = torch.autocast(device, torch.bfloat16, enabled=s['dtype'] == 'bfloat16')

  def infer() -> Any:
    network.eval()
    with torch.inference_mode(), half:
      return forward(image)

  def gradient() -> Any:
    network.train()
    for parameter in network.parameters():
      parameter.grad = None
    with half:
      loss = torch.nn.functional.cross_entropy(forward(image).float(), target)
    loss.backward()
    return loss

  def step() -> Any:
    loss = gradient()
    if s['clip']:
      torch.nn.utils.clip_grad_norm_(network.parameters(), s['clip'])
    optimizer.step()
    return loss

  wait = torch.cuda.synchronize if device == 'cuda' else lambda: None
  kind, blas = 'compiled' if compiled else 'eager', torch_blas(torch.__config__.show())
  label = f'{label} ({kind}, torch {torch.__version__}{blas})'
  return label, {'forward': infer, 'gradient': gradient, 'step': step}, wait


def torch_blas(built_with: str) -> str:
  """', BLAS: ...' with the library that multiplies matrices on the CPU, from torch's own description; '' if unknown."""
  found = re.search(r'BLAS_INFO=(\w+)', built_with)
  return f', BLAS: {found[1]}' if found else ''


def big_vision_calls(s: dict[str, Any]) -> tuple[str, Calls, Callable[[], None]]:
  """Returns the same as `torch_calls` for big_vision's network in a jitted train step with optax; needs a checkout."""
  if importlib.util.find_spec('big_vision') is None:
    raise ModuleNotFoundError("No module named 'big_vision'")  # before jax is imported, which takes seconds
  with without_unused():
    vit = importlib.import_module('big_vision.models.vit')
  import jax
  import jax.numpy as jnp
  import optax
  network = vit.Model(s['classes'], patch_size=(s['patch'],) * 2, width=s['width'], depth=s['depth'],
                      mlp_dim=s['mlp'], num_heads=s['heads'], pool_type='tok' if s['pool'] == 'cls' else 'gap',
                      dtype_mm=s['dtype'])
  image = jax.random.normal(jax.random.key(0), (s['batch'], *s['px'], 3))
  target = jax.random.randint(jax.random.key(1), (s['batch'],), 0, s['classes'])
  clip = optax.clip_by_global_norm(s['clip']) if s['clip'] else optax.identity()
  optimizer = optax.chain(clip, optax.adamw(s['lr'], weight_decay=s['decay']))
  params = jax.jit(network.init)(jax.random.key(2), image)['params']
  held = {'params': params, 'state': optimizer.init(params), 'last': None}

  def loss(params: Any) -> Any:
    logits = network.apply({'params': params}, image, train=True, rngs={'dropout': jax.random.key(3)})[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), target).mean()

  infer = jax.jit(lambda params: network.apply({'params': params}, image)[0])
  differentiate = jax.jit(jax.grad(loss))

  def update(params: Any, state: Any) -> Any:
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  update = jax.jit(update, donate_argnums=(0, 1))

  def step() -> None:
    held['params'], held['state'] = update(held['params'], held['state'])
    held['last'] = held['params']

  def keep(function: Callable[[Any], Any]) -> Callable[[], None]:
    def call() -> None:
      held['last'] = function(held['params'])
    return call

  calls = {'forward': keep(infer), 'gradient': keep(differentiate), 'step': step}
  return f'big_vision (jax {jax.__version__})', calls, lambda: jax.block_until_ready(held['last'])


def main(name: str, given: str) -> None:
  """Processes requests until the input ends."""
  out = os.fdopen(os.dup(1), 'w')  # the programs print to standard error instead
  os.dup2(2, 1)

  def answer(**content: Any) -> None:
    print(json.dumps(content), file=out, flush=True)

  settings = json.loads(given)
  try:
    label, calls, wait = big_vision_calls(settings) if name == 'big_vision' else torch_calls(name, settings)
  except Exception as error:  # the error is reported, and the other programs are timed
    answer(error=f'{type(error).__name__}: {error}')
    return
  answer(label=label)
  for line in sys.stdin:
    request = json.loads(line)
    try:
      clock_s, processor_s = time.perf_counter(), time.process_time()
      for _ in range(request['count']):
        calls[request['part']]()
      wait()
      answer(clock_s=time.perf_counter() - clock_s, processor_s=time.process_time() - processor_s)
    except Exception as error:
      answer(error=f'{type(error).__name__}: {error}')


if __name__ == '__main__':
  main(*sys.argv[1:])
