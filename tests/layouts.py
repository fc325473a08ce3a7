"""How every parameter is sharded, for networks and objectives of every kind, on meshes of CPUs and TPUs.

`python tests/layouts.py` writes `golden_layouts.json`, which a test compares with. A change of a layout shows there,
line by line.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networks
import programs
import vits
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from vit_jax.config import schema
from vit_jax.config.schema import TextPool
from vit_jax.core import axes, trees
from vit_jax.models import backbones
from vit_jax.models.text_tower import TextTower
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
from vit_jax.recipes import sizes

FILE = pathlib.Path(__file__).with_name('golden_layouts.json')
MESHES = {'cpu 2x2x2': ('cpu', 'cpu', 2, 2, 2), 'v3 1x4x2': ('TPU v3', 'tpu', 1, 4, 2),
          'v6e 1x8x1': ('TPU v6 lite', 'tpu', 1, 8, 1)}
"""Data x fsdp x tensor of abstract devices."""
SMALL: dict[str, Any] = {'patch': 8, 'width': 64, 'depth': 2, 'heads': 8, 'mlp': schema.Mlp(128)}
VIT = schema.ViT(**SMALL)
NETWORKS: dict[str, schema.Model] = {
    **{name: dataclasses.replace(model, width=64, heads=8) for name, model in vits.MODELS.items()}, **networks.MODELS,
    'norms': schema.ViT(
        **{**SMALL, 'mlp': schema.Mlp(128, inner_norm=True)}, norm=schema.RmsNorm(), norm_before=True,
        stem=schema.PatchStem(norm=True), attention=schema.Attention(inner_norm=True)),
    'frequencies': schema.ViT(**SMALL, positions=schema.Rotary(mixed=True), pool=schema.ClassToken(distillation=True)),
    'map': schema.ViT(**SMALL, pool=schema.Map(), attention=schema.Attention(schema.QkvBias.NONE)),
    'convolutions': schema.ViT(**SMALL, stem=schema.ConvStem()),
    'hybrid': schema.ViT(**{**SMALL, 'patch': 16}, stem=schema.ResNetStem((1,), 32)),
    'axial resnet': schema.AxialResNet(layers=(1, 1), width=32, heads=8)}
VIEWS = schema.Data(recipe=schema.Recipe(views=schema.Views(on=True, num_local=1, local_px=16)))
OBJECTIVES: dict[str, dict[str, Any]] = {
    'supervised': {'head': schema.Head(pre_logits=64)},
    'mae': {'objective': schema.Mae(decoder_width=64, decoder_depth=1, decoder_heads=8)},
    'masked patch': {'objective': schema.MaskedPatch()},
    'dino': {'objective': schema.Dino(out_dim=64, hidden_dim=32, bottleneck_dim=16, norm_last_layer=False),
             'data': VIEWS},
    'dinov2': {'objective': schema.Dinov2(out_dim=64, hidden_dim=32, bottleneck_dim=16, patch_out_dim=32,
                                          patch_bottleneck_dim=16), 'data': VIEWS},
    'dinov3': {'objective': schema.Dinov3(out_dim=64, hidden_dim=32, bottleneck_dim=16), 'data': VIEWS},
    'dinov2 distill': {'objective': schema.Dinov2Distill(
        out_dim=64, hidden_dim=32, bottleneck_dim=16, teacher=schema.FeatureTeacher(model=VIT)), 'data': VIEWS},
    'byol': {'objective': schema.Byol(hidden_dim=64, out_dim=32), 'data': VIEWS},
    'lejepa': {'objective': schema.LeJepa(hidden_dim=64, out_dim=32), 'data': VIEWS},
    'ijepa': {'objective': schema.IJepa(predictor_width=64, predictor_depth=1, predictor_heads=8)},
    'token label': {'objective': schema.TokenLabel()},
    'distill': {'objective': schema.Distill(),
                'model': dataclasses.replace(VIT, pool=schema.ClassToken(distillation=True))},
    'feature distill': {'objective': schema.FeatureDistill(schema.FeatureTeacher(model=VIT))},
    'lora': {'lora': schema.Lora(rank=4)},
    'dora': {'lora': schema.Lora(rank=4, dora=True), 'model': vits.MODELS['gated']},
    'lora of a mixer': {'lora': schema.Lora(rank=4, targets='up,down'), 'model': networks.MIXER}}
TOWERS = {
    'clip': {'pool': TextPool.END, 'is_causal': True, 'out_width': 32, 'projection_bias': False},
    'siglip': {'pool': TextPool.LAST, 'out_width': 32}, 'tips': {'pool': TextPool.MEAN, 'is_sinusoidal': True}}
CASES = (*(f'network {name}' for name in NETWORKS), *(f'objective {name}' for name in OBJECTIVES),
         *(f'text {name}' for name in TOWERS))

Layout = dict[str, str]
"""For each path the specs on `MESHES`, with `-` for a dimension that is not split."""


def layout(case: str) -> Layout:
  """The layout of one of `CASES`."""
  kind, _, name = case.partition(' ')
  if kind == 'network':
    return _of_network(NETWORKS[name], networks.PX if name in networks.MODELS else (64, 64))
  if kind == 'text':
    tower = TextTower(vocabulary=64, length=8, width=64, depth=2, heads=8, mlp=128, gelu=None, norm_eps=1e-6,
                      **TOWERS[name])  # type: ignore[arg-type]
    return _specs(*axes.trace(tower.init, jax.random.key(0)), differentiated=False)
  config = schema.Config(**{'image_px': (64, 64), 'batch_size': 8, 'model': VIT, **OBJECTIVES[name]})
  parts = programs.abstract_parts(config)
  return _of_init(functools.partial(parts.objective.init, jax.random.key(0)), parts.program.prepared)


def digest(names: tuple[str, ...]) -> str:
  """The SHA-256 of the layouts of published networks."""
  found = {name: _of_network(sizes.model(name), (14 * getattr(sizes.model(name), 'patch', 16),) * 2) for name in names}
  return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _of_network(model: schema.Model, px: tuple[int, int]) -> Layout:
  backbone = backbones.build(model, px)
  return _of_init(lambda: backbone.init(jax.random.key(0), jnp.zeros((1, *px, 3))))


def _of_init(init: Callable[..., Any], *args: Any) -> Layout:
  (params, extra), (labels, extra_labels) = axes.trace(init, *args)
  return _specs(sharding.with_frozen(params, extra), sharding.with_frozen(labels, extra_labels))


def _specs(params: Any, labels: Any, *, differentiated: bool = True) -> Layout:
  found: dict[str, list[str]] = {name: [] for name in trees.flatten(params)}
  for kind, platform, *shape in MESHES.values():
    mesh: Any = AbstractMesh(tuple(shape), meshes.AXES, abstract_device=AbstractDevice(kind, None, platform))
    specs = sharding.param_specs(params, labels, mesh, differentiated=differentiated)
    for specs_of, spec in zip(found.values(), jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
                              strict=True):
      specs_of.append(' '.join('+'.join(axis) if isinstance(axis, tuple) else axis or '-' for axis in spec))
  return {name: ' | '.join(specs_of) for name, specs_of in found.items()}


if __name__ == '__main__':
  found = {'sizes': digest(sizes.names()), **{case: layout(case) for case in CASES}}
  FILE.write_text(json.dumps(found, indent=1) + '\n')
