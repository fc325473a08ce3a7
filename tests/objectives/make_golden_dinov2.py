"""Makes `golden_dinov2.npz`: steps of DINOv2's own training program on a tiny network, for `test_dinov2_steps.py`.

Run where PyTorch is, with a checkout of facebookresearch/dinov2 (made with b8931f7, torch 2.13):
  python tests/objectives/make_golden_dinov2.py CHECKOUT
The program's classes SSLMetaArch, DinoVisionTransformer and DINOHead, its losses, groups of parameters, schedules and
AdamW take STEPS steps on the crops, masks and weights below, in float32 on one CPU process. Only what needs a GPU is
replaced: tensors stay on the CPU, nothing is sharded, the backbone sees one size of crops after the other, and the head
gets its inputs in one row, as xFormers' mask of blocks would have them. Paths are dropped with probability 0.

Kept are, for each case, the terms of the loss at every step, the gradient of the first one and the parameters of
student and teacher after the last one, each as its product with a random vector of `probe`, and the centers.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import sys
import types
import zlib
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
NUM, LOCAL, PX, LOCAL_PX, PATCH, WIDTH, HEADS, DEPTH, HIDDEN = 4, 3, 16, 8, 4, 8, 2, 2, 12
EPOCH, EPOCHS, STEPS = 2, 4, 4  # an epoch has two steps; the first four steps of eight are taken
LR, END_LR, DECAY, END_DECAY, CLIP, LAYER_DECAY, STEM_LR = .02, 1e-6, .04, .4, .3, .9, .2
MOMENTUM, TEMPERATURE, END_TEMPERATURE, WARMING = .9, .04, .07, 30
CASES = {  # name: centering, prototypes and bottleneck of DINO's head, those of the head of patches
    'shared, mean': ('centering', 11, 5, 11, 5), 'separate, sinkhorn': ('sinkhorn_knopp', 11, 5, 9, 6)}


def shapes(case: str) -> dict[str, tuple[int, ...]]:
  """The parameters by their names here."""
  _, num, bottleneck, num_patch, patch_bottleneck = CASES[case]
  d, heads, block = WIDTH, (HEADS, WIDTH // HEADS), 'backbone/blocks/'
  found = {f'{block}attn/{one}/{leaf}': (DEPTH, *((d,) if leaf == 'kernel' else ()), *heads)
           for one in ('query', 'key', 'value') for leaf in ('kernel', 'bias')}
  found |= {f'{block}attn/out/kernel': (DEPTH, *heads, d), f'{block}attn/out/bias': (DEPTH, d),
            f'{block}mlp/up/kernel': (DEPTH, d, 4 * d), f'{block}mlp/up/bias': (DEPTH, 4 * d),
            f'{block}mlp/down/kernel': (DEPTH, 4 * d, d), f'{block}mlp/down/bias': (DEPTH, d)}
  found |= {f'{block}{name}': (DEPTH, d) for name in (
      'norm1/scale', 'norm1/bias', 'norm2/scale', 'norm2/bias', 'scale1', 'scale2')}
  found |= {'backbone/cls': (1, 1, d), 'backbone/positions': (1, 1 + (PX // PATCH) ** 2, d),
            'backbone/norm/scale': (d,), 'backbone/norm/bias': (d,), 'mask_token': (1, 1, d),
            'backbone/stem/kernel': (PATCH, PATCH, 3, d), 'backbone/stem/bias': (d,)}
  for head, size, out in (('projector', bottleneck, num), ('patch_projector', patch_bottleneck, num_patch)):
    if head == 'projector' or case.startswith('separate'):
      sides = {'mlp1': (d, HIDDEN), 'mlp2': (HIDDEN, HIDDEN), 'mlp3': (HIDDEN, size)}
      found |= {f'{head}/{name}/kernel': side for name, side in sides.items()}
      found |= {f'{head}/{name}/bias': side[1:] for name, side in sides.items()}
      found |= {f'{head}/prototypes/kernel': (size, out), f'{head}/prototypes/norm': (out,)}
  return dict(sorted(found.items()))


def weights(case: str, whose: str) -> dict[str, np.ndarray]:
  """The parameters of `student` or `teacher` at the start, none of which is 0 or 1."""
  found = {}
  for name, shape in shapes(case).items():
    rng, is_norm = np.random.default_rng(zlib.crc32(f'{whose}/{name}'.encode())), name.endswith(('scale', 'norm'))
    found[name] = (is_norm + (.2 if is_norm or 'scale' in name else .5) * rng.normal(size=shape)).astype(np.float32)
  return found


def probe(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """A random vector, whose product with a parameter is kept."""
  return np.random.default_rng(zlib.crc32(name.encode()) + 1).normal(size=shape)


def crops(step: int) -> dict[str, np.ndarray]:
  """Crops `[NUM, V, px, px, 3]`, and the masks of the global ones, `[NUM, 2, N]`: half of these have some."""
  rng = np.random.default_rng(step)
  masks = rng.random((NUM, 2, (PX // PATCH) ** 2)) < .4
  masks[rng.permutation(NUM)[:NUM // 2], rng.integers(0, 2, NUM // 2)] = False
  masks[0, step % 2] = False
  return {'views_global': rng.normal(size=(NUM, 2, PX, PX, 3)).astype(np.float32), 'masks': masks,
          'views_local': rng.normal(size=(NUM, LOCAL, LOCAL_PX, LOCAL_PX, 3)).astype(np.float32)}


def _pairs(module: str) -> dict[str, str]:
  """Names in the program's module by names here; `blocks` and query, key and value are treated apart."""
  if module != 'backbone':
    layers = {f'mlp{n + 1}/{here}': f'mlp.{2 * n}.{there}' for n in range(3) for here, there in (
        ('kernel', 'weight'), ('bias', 'bias'))}
    return {**layers, 'prototypes/kernel': 'last_layer.weight_v', 'prototypes/norm': 'last_layer.weight_g'}
  return {'cls': 'cls_token', 'positions': 'pos_embed', 'norm/scale': 'norm.weight', 'norm/bias': 'norm.bias',
          'stem/kernel': 'patch_embed.proj.weight', 'stem/bias': 'patch_embed.proj.bias'}


BLOCK = {'attn/out/kernel': 'attn.proj.weight', 'attn/out/bias': 'attn.proj.bias', 'mlp/up/kernel': 'mlp.fc1.weight',
         'mlp/up/bias': 'mlp.fc1.bias', 'mlp/down/kernel': 'mlp.fc2.weight', 'mlp/down/bias': 'mlp.fc2.bias',
         'norm1/scale': 'norm1.weight', 'norm1/bias': 'norm1.bias', 'norm2/scale': 'norm2.weight',
         'norm2/bias': 'norm2.bias', 'scale1': 'ls1.gamma', 'scale2': 'ls2.gamma'}


def exported(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Parameters under the program's names, `MODULE.NAME`."""
  out = {'backbone.mask_token': w['mask_token'][0]}
  for module, ours in (('backbone', 'backbone'), ('dino_head', 'projector'), ('ibot_head', 'patch_projector')):
    for here, there in _pairs(module).items():
      if (x := w.get(f'{ours}/{here}')) is not None:
        x = x.transpose(3, 2, 0, 1) if here == 'stem/kernel' else x
        x = x.T if here.endswith('kernel') and x.ndim == 2 else x[:, None] if here == 'prototypes/norm' else x
        out[f'{module}.{there}'] = x
  for i in range(DEPTH):
    own = {name.removeprefix('backbone/blocks/'): x[i] for name, x in w.items() if '/blocks/' in name}
    qkv = [np.concatenate([own[f'attn/{one}/{leaf}'].reshape(*shape, WIDTH) for one in ('query', 'key', 'value')], -1)
           for leaf, shape in (('kernel', (WIDTH,)), ('bias', ()))]
    own_out = {'attn.qkv.weight': qkv[0].T, 'attn.qkv.bias': qkv[1]}
    for here, there in BLOCK.items():
      x = own[here].reshape(WIDTH, WIDTH) if here == 'attn/out/kernel' else own[here]
      own_out[there] = x.T if here.endswith('kernel') else x
    out |= {f'backbone.blocks.{i}.{name}': x for name, x in own_out.items()}
  return out


def imported(tensors: dict[str, np.ndarray], case: str) -> dict[str, np.ndarray]:
  """Parameters under their names here: `exported` backwards, by the places of numbered elements."""
  like, start = {}, 0
  for name, shape in shapes(case).items():
    size = int(np.prod(shape))
    like[name] = np.arange(start, start + size, dtype=np.float64).reshape(shape)
    start += size
  values = np.full(start, np.nan)
  for name, places in exported(like).items():
    values[places.astype(int)] = tensors[name]
  return {name: values[x.astype(int)] for name, x in like.items()}


def settings(case: str) -> Any:
  """The program's config."""
  centering, num, bottleneck, num_patch, patch_bottleneck = CASES[case]

  def of(**values: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**values)

  class Optim(types.SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
      return getattr(self, name)

  return of(
      compute_precision=of(grad_scaler=False), train=of(centering=centering, OFFICIAL_EPOCH_LENGTH=EPOCH),
      dino=of(loss_weight=1., head_n_prototypes=num, head_bottleneck_dim=bottleneck, head_nlayers=3,
              head_hidden_dim=HIDDEN, koleo_loss_weight=.1),
      ibot=of(loss_weight=1., mask_sample_probability=.5, mask_ratio_min_max=(.1, .5),
              separate_head=case.startswith('separate'), head_n_prototypes=num_patch,
              head_bottleneck_dim=patch_bottleneck, head_nlayers=3, head_hidden_dim=HIDDEN),
      student=of(arch='tiny', pretrained_weights=''), crops=of(local_crops_number=LOCAL, global_crops_size=PX),
      teacher=Optim(momentum_teacher=MOMENTUM, final_momentum_teacher=1., warmup_teacher_temp=TEMPERATURE,
                    teacher_temp=END_TEMPERATURE, warmup_teacher_temp_epochs=WARMING),
      optim=Optim(epochs=EPOCHS, weight_decay=DECAY, weight_decay_end=END_DECAY, lr=LR, warmup_epochs=1, min_lr=END_LR,
                  clip_grad=CLIP, freeze_last_layer_epochs=1, patch_embed_lr_mult=STEM_LR,
                  layerwise_decay=LAYER_DECAY, adamw_beta1=.9, adamw_beta2=.999))


def load(checkout: pathlib.Path) -> Any:
  """The program's module, with what needs a GPU replaced."""
  import torch
  import torch.distributed

  class Rows:
    """Inputs of the head in one row, and its outputs apart again."""

    def __init__(self, lengths: list[int]) -> None:
      self.lengths = lengths

    @classmethod
    def from_tensor_list(cls, tensors: list[Any]) -> Any:
      return cls([x.shape[1] for x in tensors]), torch.cat(tensors, 1)

    def split(self, x: Any) -> list[Any]:
      return list(x.split(self.lengths, 1))

  fmha = types.SimpleNamespace(BlockDiagonalMask=Rows)
  for name, values in {'xformers': {}, 'xformers.ops': {'fmha': fmha}, 'fvcore': {}, 'fvcore.common': {},
                       'fvcore.common.checkpoint': {'Checkpointer': object}}.items():
    module: Any = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
  os.environ['XFORMERS_DISABLED'] = '1'
  sys.path.insert(0, str(checkout))
  torch.distributed.init_process_group('gloo', init_method='tcp://127.0.0.1:29507', rank=0, world_size=1)
  tensor: Any = torch.Tensor
  tensor.cuda = lambda self, **_: self
  package: Any = types.ModuleType('dinov2.train')
  package.__path__ = [str(checkout / 'dinov2/train')]  # without what its __init__ imports
  sys.modules['dinov2.train'] = package
  import dinov2.models.vision_transformer as vits  # type: ignore[import-not-found]
  import dinov2.train.ssl_meta_arch as program  # type: ignore[import-not-found]

  class Apart(vits.DinoVisionTransformer):  # type: ignore[misc]
    """The backbone, which sees one size of crops after the other."""

    def forward_features_list(self, images: list[Any], masks: list[Any]) -> list[Any]:
      return [self.forward_features(*pair) for pair in zip(images, masks, strict=True)]

  def build(_: Any) -> tuple[Any, Any, int]:
    made = [Apart(img_size=PX, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, init_values=1e-5,
                  block_chunks=0) for _ in range(2)]
    return made[0], made[1], WIDTH

  program.build_model_from_cfg = build
  program.get_fsdp_modules = lambda module: [types.SimpleNamespace(params=list(module.parameters()))]
  program.reshard_fsdp_model = lambda module: None
  return program


def run(case: str, program: Any, checkout: pathlib.Path) -> dict[str, np.ndarray]:
  """The numbers of one case."""
  import torch
  sys.path.insert(0, str(HERE.parent))
  from taken import taken
  cfg = settings(case)
  scheduler = sys.modules['dinov2.utils.utils'].CosineScheduler
  known = {'torch': torch, 'CosineScheduler': scheduler, 'logger': types.SimpleNamespace(info=lambda *_: None)}
  train = checkout / 'dinov2/train/train.py'
  model = program.SSLMetaArch(cfg)
  for whose in ('student', 'teacher'):
    state = {name: torch.from_numpy(x.copy()) for name, x in exported(weights(case, whose)).items()}
    getattr(model, whose).load_state_dict(state)
  model.need_to_synchronize_fsdp_streams = False
  model.train()
  optimizer = taken(train, 'build_optimizer', **known)(cfg, model.get_params_groups())
  plan, apply = taken(train, 'build_schedulers', **known)(cfg), taken(train, 'apply_optim_scheduler', **known)
  found: dict[str, np.ndarray] = {}

  def keep(prefix: str, tensors: dict[str, Any]) -> None:
    values = imported({name: x.detach().numpy() for name, x in tensors.items()}, case)
    found[prefix] = np.array([float((x * probe(name, x.shape)).sum()) for name, x in values.items()])

  terms = []
  for step in range(STEPS):
    data = crops(step)
    masks = torch.from_numpy(data['masks'].swapaxes(0, 1).reshape(2 * NUM, -1))  # one crop after the other
    number = masks.flatten().nonzero().flatten()
    images = {'collated_masks': masks, 'mask_indices_list': number, 'upperbound': len(number) + 3,
              'n_masked_patches': torch.full((1,), len(number)),
              'masks_weight': (1 / masks.sum(-1).clamp(min=1.)).unsqueeze(-1).expand_as(masks)[masks]}
    for size in ('global', 'local'):
      x = data[f'views_{size}'].swapaxes(0, 1)
      images[f'collated_{size}_crops'] = torch.from_numpy(x.reshape(-1, *x.shape[2:]).transpose(0, 3, 1, 2).copy())
    rate, decay, momentum, temperature, last_rate = (one[step] for one in plan)
    apply(optimizer, rate, decay, last_rate)
    optimizer.zero_grad(set_to_none=True)
    out = model.forward_backward(images, teacher_temp=temperature)
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), cfg.optim.clip_grad) if step else torch.sqrt(sum(
        p.grad.square().sum() for p in one.parameters())) for one in model.student.values()]
    if not step:
      keep('gradient', {name: p.grad for name, p in model.student.named_parameters()})
      norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), cfg.optim.clip_grad) for one in model.student.values()]
    print(case, step, [round(float(x), 3) for x in norms])
    optimizer.step()
    model.update_teacher(momentum)
    terms.append([float(out['dino_local_crops_loss'] + out['dino_global_crops_loss']), 2 * float(out['ibot_loss']),
                  20 * float(out['koleo_loss'])])  # of the shown terms one is halved, and one is halved and weighted
  for whose in ('student', 'teacher'):
    keep(whose, dict(getattr(model, whose).named_parameters()))
  if cfg.train.centering == 'centering':
    model.dino_loss.apply_center_update()
    model.ibot_patch_loss.apply_center_update()
  found['center'] = model.dino_loss.center.numpy().reshape(-1)
  found['patch_center'] = model.ibot_patch_loss.center.numpy().reshape(-1)
  return {'terms': np.array(terms), **found}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('checkout', type=pathlib.Path)
  checkout = parser.parse_args().checkout
  program = load(checkout)
  found = {f'{case}/{name}': x for case in CASES for name, x in run(case, program, checkout).items()}
  np.savez_compressed(HERE / 'golden_dinov2.npz', **found)


if __name__ == '__main__':
  main()
