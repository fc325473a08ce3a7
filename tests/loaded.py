"""Small networks of every family with random weights, as if they had been loaded."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Geometry, Interpolation
from vit_jax.jobs import build
from vit_jax.weights.network import Report, Weights
from vit_jax.weights.preprocess import Preprocess

PX = (32, 48)
CLASSES = 7
MODELS: dict[str, schema.Model] = {
    'vit': schema.ViT(patch=16, width=32, depth=2, heads=4, mlp=schema.Mlp(48)),
    'dinov2': schema.ViT(patch=16, width=32, depth=2, heads=4, mlp=schema.SwiGlu(48), registers=2,
                         block=schema.Plain(.5), gelu=Gelu.EXACT),
    'map': schema.ViT(patch=16, width=32, depth=2, heads=4, mlp=schema.Mlp(48), pool=schema.Map(),
                      attention=schema.Attention(qk_norm=True), block=schema.Parallel()),
    'deit': schema.ViT(patch=16, width=32, depth=1, heads=4, mlp=schema.Mlp(48),
                       pool=schema.ClassToken(distillation=True), gelu=Gelu.EXACT),
    'hybrid': schema.ViT(patch=16, width=32, depth=1, heads=4, mlp=schema.Mlp(48), pool=schema.Mean(),
                         stem=schema.ResNetStem((1, 1), 32)),
    'mixer': schema.Mixer(patch=16, width=32, depth=2, tokens_mlp=24, channels_mlp=40),
    'bit': schema.ResNet(layers=(1, 2), width=32),
    'efficientnet': schema.EfficientNet(width_factor=.25, depth_factor=.3, dropout=.2, drop_path=.2),
}


@functools.cache
def weights(name: str, *, pre_logits: int = 0, num_classes: int = CLASSES, names: bool = True) -> Weights:
  """Weights in which nothing is zero or one: a mistake anywhere shows."""
  model, head = MODELS[name], schema.Head(pre_logits=pre_logits)
  backbone = build.build_backbone(schema.Config(model=model, head=head, image_px=PX))
  shapes, state = jax.eval_shape(backbone.init, jax.random.key(0), jnp.zeros((1, *PX, 3)))
  pooled = jax.eval_shape(lambda p, s: backbone.apply(p, s, jnp.zeros((1, *PX, 3)), train=False, key=None)[0].pooled,
                          shapes, state)
  params = {'backbone': shapes}
  if num_classes:
    one = {'kernel': jax.ShapeDtypeStruct((pre_logits or pooled.shape[1], num_classes), jnp.float32),
           'bias': jax.ShapeDtypeStruct((num_classes,), jnp.float32)}
    if pre_logits:
      one['pre_logits'] = {'kernel': jax.ShapeDtypeStruct((pooled.shape[1], pre_logits), jnp.float32),
                           'bias': jax.ShapeDtypeStruct((pre_logits,), jnp.float32)}
    params |= {'head': one} | ({'head_dist': one} if isinstance(model, schema.ViT) and model.pool.distillation else {})
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: np.asarray(.3 * rng.normal(size=x.shape), np.float32), params)
  state = jax.tree.map(lambda x: np.asarray(rng.uniform(.5, 2., x.shape), np.float32), state)
  how = Preprocess(Geometry.TORCHVISION, 40, PX, Interpolation.BICUBIC, True, (.5, .4, .3), (.2, .3, .4), 'given')
  class_names = tuple(f'kind {i}' for i in range(num_classes)) if names else ()
  return Weights(model, head, num_classes, params, state, None, how, class_names, 'run', f'small {name}', Report())


def pictures(num: int = 3) -> list[np.ndarray]:
  """Pictures of different sizes, u8."""
  rng = np.random.default_rng(1)
  return [rng.integers(0, 256, (60 + 10 * i, 90 - 5 * i, 3), dtype=np.uint8) for i in range(num)]
