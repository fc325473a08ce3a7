"""The ViT speedrun: 75 % or 80 % on CIFAR-10 from scratch with a plain ViT, at the least cost on two CPU cores.

Data:     CIFAR-10 as a folder of images, train/CLASS and test/CLASS, with source=folder:PATH; as written by `vit-jax
          prepare --data=cifar10 --to=DIR`, with source=array_record:DIR; or a TFDS `cifar10` (the default).
Source:   docs/guides/speedrun.md has the rules and the records. Each entry of CHANGES is one change, kept by all later
          ones: Muon (Jordan et al. 2024), mimetic initialization (arXiv 2305.09828), PatchDropout (arXiv 2208.07220),
          norms of query and key (arXiv 2302.05442), no random shifts, and a faster embedding of patches, by Muon for
          its matrix and pixel values divided by about their standard deviation.
Differs:  The papers' networks are larger and train for longer.
Run:      python -m vit_jax.main --config=configs/speedrun_cifar10.py --workdir=runs/speedrun
          …/speedrun_cifar10.py:80 trains to 80 %; …:upto=baseline is the recipe without any change
Plan:     1 device, 0.6 M parameters; about 9 minutes of one CPU core
Expected: see docs/guides/speedrun.md.
"""
from typing import Any

from vit_jax.config import schema as s
from vit_jax.config.schema import checks

LINEAR = s.Schedule(s.Decay.LINEAR, warmup='5 %')
CHANGES: dict[str, dict[str, Any]] = {
    'baseline': {},
    'muon': {'optimizer': s.Muon(lr=4e-3, momentum=.95, b1=.9, b2=.95, weight_decay=.05, clip_norm=1.,
                                 scale=s.MuonScale.RMS, polynomials=s.NewtonSchulz.KELLER, dtype=s.DType.F32,
                                 schedule=LINEAR)},
    'mimetic': {'model.init': s.Init.MIMETIC, 'model.positions': s.SinCos()},
    'patch_dropout': {'model.patch_dropout': .5},
    'qk_norm': {'model.attention.qk_norm': True},
    'no_shift': {'data.recipe.shift_px': 0},
    'muon_patches': {'optimizer.matrices': ('(.*/)?blocks/.*kernel', '(.*/)?stem/kernel'),
                     'data.recipe.std': (.25, .25, .25)}}
# To 75 % from patch_dropout on, and to 80 % with all changes, these are the lengths of the records. The others are
# estimates from the runs on the page.
LENGTHS = {
    '75': {'baseline': '40 epochs', 'muon': '13 epochs', 'mimetic': '6 epochs', 'patch_dropout': '7 epochs',
           'qk_norm': '5.25 epochs', 'no_shift': '4.5 epochs', 'muon_patches': '4 epochs'},
    '80': {'baseline': '80 epochs', 'muon': '26 epochs', 'mimetic': '10 epochs', 'patch_dropout': '14 epochs',
           'qk_norm': '13 epochs', 'no_shift': '12 epochs', 'muon_patches': '10 epochs'}}


def get_config(arguments: str = '') -> s.Config:
  """The run, with `75` or `80`, `upto=CHANGE` and `source=…`."""
  given = s.parse_arg(arguments, target=tuple(LENGTHS), upto=tuple(reversed(CHANGES)), source=())
  names = list(CHANGES)
  config = s.Config(
      name=f'speedrun_{given["target"]}', batch_size=128, image_px=(32, 32),
      length=LENGTHS[given['target']][given['upto']],
      data=s.Data(source=given['source'] or 'tfds:cifar10',
                  recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=2)),
      model=s.ViT(patch=4, width=128, depth=4, heads=4, mlp=s.Mlp(256), pool=s.Mean()),
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., schedule=LINEAR),
      train=s.Train(cpu_threads=1, ema=0.),
      evals={'test': s.TopK(every='100 %', batch_size=500)},
      checkpoints=s.Checkpoints(every='100 %'))
  for name in names[:names.index(given['upto']) + 1]:
    config = checks.replaced(config, CHANGES[name])
  return config
