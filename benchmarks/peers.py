"""Other programs beside ours in `benchmarks.bench` and `benchmarks.steps`, timed in the same turns.

`--against` names them: timm, timm-compiled, transformers, transformers-compiled or big_vision, each with the path of a
Python that has it, `NAME=PATH`, unless this one does; for big_vision also of a checkout. Each runs in a process of its
own: it gets the sizes of a plain ViT, builds that network with its own program, and runs parts on request over a pipe
(`child.py`, which imports nothing of ours, so that it runs in any Python).
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.pipe import JsonProcess
from benchmarks.timing import Part, Spent
from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core import globs
from vit_jax.core.errors import UserError

PEERS = ('timm', 'timm-compiled', 'transformers', 'transformers-compiled', 'big_vision')
CHILD = pathlib.Path(__file__).with_name('child.py')


class Peer(NamedTuple):
  """A program of `PEERS`, and where it is: a Python that has it, a checkout, or '' for this Python."""
  name: str
  where: str


def parse(names: Sequence[str]) -> list[Peer]:
  """Returns the peers of names such as `timm` or `big_vision=PATH`.

  Raises:
    UserError: lists all that are unknown, or whose path does not exist.
  """
  found, problems = [], []
  for text in names:
    name, _, where = text.partition('=')
    if name not in PEERS:
      problems.append(f'--against: expected some of {", ".join(PEERS)}, got {name!r}.{globs.nearest(name, PEERS)}')
    elif where and not pathlib.Path(where).exists():
      problems.append(f'--against: expected the path of a Python that has {name}, or of a checkout, got {where}, which '
                      'does not exist.')
    found.append(Peer(name, where))
  if problems:
    raise UserError('\n'.join(problems))
  return found


def settings(config: schema.Config, num_classes: int) -> dict[str, Any]:
  """Returns the settings of a network and its training for a child.

  Raises:
    UserError: the peers do not have such a network.
  """
  model, optimizer = config.model, config.optimizer
  plain = (
      isinstance(model, schema.ViT) and model.block == schema.Plain() and model.stem == schema.PatchStem()
      and isinstance(model.mlp, schema.Mlp) and model.mlp == schema.Mlp(model.mlp.hidden, kernel=model.mlp.kernel)
      and model.attention == schema.Attention(kernel=model.attention.kernel)
      and isinstance(model.norm, schema.LayerNorm) and isinstance(model.positions, schema.Learned)
      and model.positions.at is schema.PositionsAt.STEM
      and model.pool in (schema.ClassToken(), schema.Mean())
      and model.last_norm is schema.LastNorm.TOKENS and model.gelu is not Gelu.QUICK
      and model.quantize is schema.Quantize.NONE and not (model.registers or model.norm_before))
  if not plain or not isinstance(optimizer, schema.AdamW) or not isinstance(config.objective, schema.Supervised):
    raise UserError('--against: expected a plain ViT with class token or mean pooling and learned positions, trained '
                    f'on classes with AdamW, got {type(model).__name__}, {type(config.objective).__name__} and '
                    f'{type(optimizer).__name__}. Use --config=bench.')
  assert isinstance(model, schema.ViT)
  return {'px': list(config.image_px), 'patch': model.patch, 'width': model.width, 'depth': model.depth,
          'heads': model.heads, 'mlp': model.mlp.hidden,
          'pool': 'cls' if model.pool.class_token else 'mean', 'classes': num_classes,
          'tanh': model.gelu is Gelu.TANH, 'batch': config.batch_size, 'dtype': model.dtype.value,
          'lr': optimizer.lr, 'decay': optimizer.weight_decay, 'clip': optimizer.clip_norm,
          'threads': len(os.sched_getaffinity(0))}


class Child:
  """The process of a peer. `label` is its name and version."""

  def __init__(self, peer: Peer, config: schema.Config, *, num_classes: int) -> None:
    import jax  # after the command line has chosen the platform
    given = settings(config, num_classes) | {'device': jax.devices()[0].platform}
    is_checkout = peer.where and pathlib.Path(peer.where).is_dir()
    python = sys.executable if is_checkout or not peer.where else peer.where
    environment = dict(os.environ)
    if is_checkout:
      environment['PYTHONPATH'] = os.pathsep.join([peer.where, *filter(None, [os.environ.get('PYTHONPATH')])])
    self._pipe = JsonProcess([python, str(CHILD), peer.name, json.dumps(given)], name=f'--against={peer.name}',
                             expected='a network to time', environ=environment)
    self.label: str = self._pipe.ready['label']

  def parts(self) -> dict[str, Part]:
    """Returns the parts that it can run: `forward`, `gradient` and `step`, as ours."""
    return {name: functools.partial(self._time, name) for name in ('forward', 'gradient', 'step')}

  def _time(self, part: str, count: int) -> Spent:
    return Spent(**self._pipe.ask({'part': part, 'count': count}))

  def close(self) -> None:
    """Ends the process."""
    self._pipe.close()


class Peers:
  """The peers of a run; `failures` says which could not be timed, and why."""

  def __init__(self, peers: Sequence[Peer]) -> None:
    self._peers = peers
    self.failures: list[str] = []

  def check(self, config: schema.Config) -> None:
    """Raises UserError if they do not have the network of this config."""
    if self._peers:
      settings(config, 0)

  @contextlib.contextmanager
  def opened(self, config: schema.Config, num_classes: int) -> Iterator[dict[str, Part]]:
    """Yields their parts by the names `PART of PROGRAM`, where PART is one of `bench.PARTS`."""
    with contextlib.ExitStack() as stack:
      parts: dict[str, Part] = {}
      for peer in self._peers:
        try:
          child = Child(peer, config, num_classes=num_classes)
        except UserError as error:
          self.failures.append(str(error))
          continue
        stack.callback(child.close)
        parts |= {f'{part} of {child.label}': run for part, run in child.parts().items()}
      yield parts
