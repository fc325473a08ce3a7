"""Other programs beside ours in `--job=bench`: each in a process of its own, taking turns with us.

A child gets the sizes of a plain ViT, builds that network with its own program, and runs what it is asked for over
a pipe (`bench_child.py`, which needs nothing of ours, so that it runs in any Python that has the program).
"""
from __future__ import annotations

import difflib
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax

from vit_jax.bench.own import Part, Spent
from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Pool, Positions
from vit_jax.core.errors import UserError

PEERS = ('timm', 'timm-compiled', 'transformers', 'transformers-compiled', 'big_vision')
CHILD = pathlib.Path(__file__).with_name('bench_child.py')


class Peer(NamedTuple):
  """A program of `PEERS`, and where it is: a Python that has it, a checkout, or '' for the Python that runs now."""
  name: str
  where: str


def parse(text: str) -> list[Peer]:
  """The peers of `--against=timm,big_vision=PATH`.

  Raises:
    UserError: lists all that are not known, or not there.
  """
  found, faults = [], []
  for word in filter(None, (word.strip() for word in text.split(','))):
    name, _, where = word.partition('=')
    if name not in PEERS:
      near = difflib.get_close_matches(name, PEERS, 1)
      faults.append(f'--against={name}: want some of {", ".join(PEERS)}' + (f'; nearest: {near[0]}' if near else ''))
    elif where and not pathlib.Path(where).exists():
      faults.append(f'--against={word}: there is no {where}; want a Python that has {name}, or a checkout of it')
    found.append(Peer(name, where))
  if faults:
    raise UserError('\n'.join(faults))
  return found


def settings(config: schema.Config, num_classes: int) -> dict[str, Any]:
  """What a child is told of a network and its training.

  Raises:
    UserError: it is not one that the peers have.
  """
  model, optimizer = config.model, config.optimizer
  plain = isinstance(model, schema.ViT) and isinstance(model.stem, schema.PatchStem) and not any((
      model.swiglu, model.registers, model.layer_scale, model.qk_norm, model.distilled, model.axial,
      model.positions is not Positions.LEARNED, model.pool not in (Pool.CLS, Pool.MEAN),
      model.norm_after_pool))
  if not plain or not isinstance(optimizer, schema.AdamW) or not isinstance(config.objective, schema.Supervised):
    raise UserError('--against compares plain ViTs with class token or mean pooling and learned positions, trained on '
                    f'classes by AdamW; the config has {type(model).__name__}, {type(config.objective).__name__} and '
                    f'{type(optimizer).__name__}; want --config=bench')
  assert isinstance(model, schema.ViT)
  return {'px': list(config.image_px), 'patch': model.patch, 'width': model.width, 'depth': model.depth,
          'heads': model.heads, 'mlp': model.mlp, 'pool': model.pool.value, 'classes': num_classes,
          'tanh': model.gelu is Gelu.TANH, 'batch': config.batch_size, 'dtype': model.dtype.value,
          'lr': optimizer.lr, 'decay': optimizer.weight_decay, 'clip': optimizer.clip_norm,
          'threads': len(os.sched_getaffinity(0))}


class Child:
  """A peer at work. `label` says what it is, with its version."""

  def __init__(self, peer: Peer, config: schema.Config, *, num_classes: int):
    told = settings(config, num_classes) | {'device': jax.devices()[0].platform}
    is_checkout = peer.where and pathlib.Path(peer.where).is_dir()
    python = sys.executable if is_checkout or not peer.where else peer.where
    environment = dict(os.environ)
    if is_checkout:
      environment['PYTHONPATH'] = os.pathsep.join([peer.where, *filter(None, [os.environ.get('PYTHONPATH')])])
    self._process = subprocess.Popen(
        [python, str(CHILD), peer.name, json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment)
    self._name, self.label = peer.name, peer.name
    try:
      self.label = self._ask(None)['label']
    except UserError:
      self.close()
      raise

  def parts(self) -> dict[str, Part]:
    """What it can be timed at: `forward`, `gradient` and `step`, as ours."""
    return {name: functools.partial(self._time, name) for name in ('forward', 'gradient', 'step')}

  def _time(self, part: str, count: int) -> Spent:
    return Spent(**self._ask({'part': part, 'count': count}))

  def _ask(self, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Sends a line, unless it is None, and reads the answer.

    Raises:
      UserError: with what the child says, or that it is gone.
    """
    assert self._process.stdin and self._process.stdout
    if wanted is not None:
      self._process.stdin.write(json.dumps(wanted) + '\n')
      self._process.stdin.flush()
    line = self._process.stdout.readline()
    if not line:
      raise UserError(f'--against={self._name}: its process ended with status {self._process.wait()}; its own message '
                      'is above')
    answer = json.loads(line)
    if 'error' in answer:
      raise UserError(f'--against={self._name} cannot be timed: {answer["error"]}')
    return answer

  def close(self) -> None:
    """Ends it."""
    self._process.kill()
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      if pipe:
        pipe.close()
