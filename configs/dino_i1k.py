"""DINO on ImageNet-1k: a ViT-S or B learns by saying of one crop what a running mean of itself says of another.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, labels are not used
          but by the k-NN on the way.
Source:   arXiv 2104.14294, section 3.2 and Appendix C, and its code: 2 crops of 224 px and 8 of 96 px, 65,536
          prototypes, AdamW 5e-4 for 256 images, batch 1,024, decay .04 to .4, 10 epochs of warm-up, cosine to 1e-6,
          teacher's momentum .996 to 1 and temperature .04 to .07 over 30 epochs, stochastic depth .1, each tensor's
          gradient clipped at 3, last layer frozen for an epoch. S/16 for 300 epochs as in the authors' table of
          ablations; their best weights had 800 epochs and 10 small crops.
Run:      python -m vit_jax.main --config=configs/dino_i1k.py:S/16,mesh=v3:8x8 --workdir=runs/dino_s16
          S/8 or B/16 in its place. `teacher` is the network to use: --config.init_from=runs/dino_s16
          --config.init_view=teacher
          A collapse is said aloud, and stops the run with --config.objective.collapse.then=stop. Centring as in DINOv2:
          --config.objective.centering=sinkhorn
Plan:     python -m vit_jax.main --job=plan --config=configs/dino_i1k.py:S/16,mesh=v3:8x8 --topology=v3:8x8
          An image and step costs 114 GFLOP (S/16), 518 (S/8), 436 (B/16).
Expected: k-NN 73.3 %, linear probe 76.0 % for S/16 after 300 epochs; the best weights 74.5 / 77.0 (S/16), 78.3 / 79.7
          (S/8), 76.1 / 78.2 (B/16). Not run here.
"""
from vit_jax.config import presets, sizes
from vit_jax.config import schema as s

MESHES = {'v3:8x8': presets.Placement(), 'v3:16x16': presets.Placement(), 'v5e:8x8': presets.Placement(),
          'v4:4x4x4': presets.Placement()}
DECAYED = ('.*/kernel', 'backbone/cls', 'backbone/positions')
"""What has two axes or more in the authors' code, where the lengths of prototypes do so too."""
LENGTHS = ('projector/prototypes/norm',)


def get_config(arguments: str = '') -> s.Config:
  """The run of S/16, S/8 or B/16; `mesh=v3:8x8` lays it out for that slice."""
  given = s.parse_arg(arguments, size=('S/16', 'S/8', 'B/16'), mesh=('',))
  model = sizes.vit(given['size'])
  model.gelu, model.drop_path = s.Gelu.EXACT, .1
  learned_norm = given['size'] != 'B/16'
  config = s.Config(
      name=f'dino {given["size"]}', length='300 epochs', batch_size=1024,
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              views=s.Views(on=True), interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
              mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Dino(learned_norm=learned_norm),
      optimizer=s.AdamW(
          lr=5e-4, lr_per=256, weight_decay=.04, weight_decay_ramp=s.Ramp(1., 10.), clip_norm=0., clip_tensor=3.,
          decayed=DECAYED + (LENGTHS if learned_norm else ()),
          schedule=s.Schedule(s.Decay.COSINE, warmup='10 epochs', end_lr=1e-6),
          rules=(s.PathRule('projector/prototypes/.*', frozen_until='1 epoch'),)),
      evals={'knn': s.Knn(every='20 epochs', views=('teacher',))},
      checkpoints=s.Checkpoints(every='5 epochs'))
  return presets.place(config, given['mesh'], MESHES)
