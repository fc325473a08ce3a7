"""DINO on ImageNet-1k: a ViT-S or B learns to predict from one crop what its EMA predicts from another.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the
          k-NN evaluation during training uses labels.
Source:   arXiv 2104.14294, section 3.2 and Appendix C, and its program, facebookresearch/dino main_dino.py: 2 crops of
          224 px of 25 to 100 % of the area and 10 of 96 px of 5 to 25 %, 65,536 prototypes, AdamW for 256 images, batch
          1,024, decay 0.04 to 0.4, 10 epochs of warm-up, cosine, teacher's momentum 0.996 to 1 and temperature 0.04 to
          0.07, stochastic depth 0.1, each tensor's gradient clipped. B/16: 400 epochs, lr 7.5e-4 to 2e-6, clipping at
          0.3, temperature over 50 epochs, last layer frozen for 3 epochs, prototypes of length 1: the arguments
          published with the weights (dino_vitbase16_pretrain/args.txt, as the DINO README of the DyT repository
          repeats them). S/16 and S/8: 800 epochs, lr 5e-4 to 1e-6, clipping at 3, temperature over 30 epochs, last
          layer frozen for 1 epoch, learned lengths. Not verified for S: clipping, freezing and the end of the learning
          rate are the program's defaults (an author's run of S/16 without small crops had no clipping and ended at
          1e-5; issue 122 of the repository).
Differs:  The program raises the temperature once an epoch; here it rises every step (0.001 apart at most). The
          program's first step has a learning rate of 0; here it is 1 / (warm-up + 1) of the highest.
Run:      python -m vit_jax.main --config=configs/dino_i1k.py:S/16 --workdir=runs/dino_s16
          --config.model.dtype=bfloat16
          Or S/8, B/16. `teacher` is the network to use: --config.init_from=runs/dino_s16
          --config.init_view=teacher
          A collapse is logged, and ends the run with --config.objective.collapse.action=stop. Centring as in DINOv2:
          --config.objective.centering=sinkhorn
Plan:     python -m vit_jax.main --job=plan --config=configs/dino_i1k.py:S/16 --topology=v3:8x8
          --config.model.dtype=bfloat16
          An image and step costs 124 GFLOP (S/16), 557 (S/8), 474 (B/16).
Expected: k-NN and linear probe of the published weights: 74.5 / 77.0 % (S/16), 78.3 / 79.7 % (S/8), 76.1 / 78.2 %
          (B/16). The README's shorter run, S/16 with --config.length='300 epochs'
          --config.data.recipe.views.num_local=8 --config.data.recipe.views.global_area=0.4,1
          --config.data.recipe.views.local_area=0.05,0.4: 73.3 / 76.0 %. Not run here.
"""
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.recipes import sizes

DECAYED = ('.*/kernel', 'backbone/cls', 'backbone/positions')
"""What has two axes or more in the authors' code, where the lengths of prototypes do so too."""
LENGTHS = ('projector/prototypes/norm',)


class Size(NamedTuple):
  """What differs by the network: length of the run, learning rate for 256 images and at the end, limit of each
  tensor's gradient, epochs with a frozen last layer and of the teacher's warm-up, and whether prototypes have learned
  lengths."""
  epochs: int
  lr: float
  end_lr: float
  clip: float
  frozen: int
  warming: int
  learned_norm: bool


SIZES = {'S/16': Size(800, 5e-4, 1e-6, 3., 1, 30, learned_norm=True),
         'S/8': Size(800, 5e-4, 1e-6, 3., 1, 30, learned_norm=True),
         'B/16': Size(400, 7.5e-4, 2e-6, .3, 3, 50, learned_norm=False)}


def get_config(arguments: str = '') -> s.Config:
  """The run of S/16, S/8 or B/16."""
  given = s.parse_arg(arguments, size=tuple(SIZES))
  size, model = SIZES[given['size']], sizes.vit(given['size'])
  model.gelu, model.drop_path = s.Gelu.EXACT, .1
  model.position_resize = s.PositionResize.BICUBIC_OFFSET  # of local crops, which see positions of 6 x 6 tokens
  return s.Config(
      name=f'dino {given["size"]}', length=f'{size.epochs} epochs', batch_size=1024, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True,
              views=s.Views(on=True, num_local=10, global_area=(.25, 1.), local_area=(.05, .25), local_px=96,
                            blur=(1., .1, .5), solarize=(0., .2, 0.), grayscale=.2,
                            jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
              interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Dino(
          norm_last_layer=not size.learned_norm,
          teacher_temperature=s.Ramp(.04, .07, until=f'{size.warming} epochs', curve=s.Curve.LINEAR), out_dim=65_536,
          hidden_dim=2048, bottleneck_dim=256, student_temperature=.1, momentum=s.Ramp(.996, 1.),
          centering=s.Centering.MEAN, center_momentum=.9),
      optimizer=s.AdamW(
          lr=size.lr, base_batch_size=256, b1=.9, b2=.999, weight_decay=.04, weight_decay_ramp=s.Ramp(1., 10.),
          clip_norm=0.,
          clip_tensor=size.clip, weight_decay_mask=DECAYED + (LENGTHS if size.learned_norm else ()),
          schedule=s.Schedule(s.Decay.COSINE, warmup='10 epochs', end_lr=size.end_lr),
          rules=(s.PathRule('projector/prototypes/.*', frozen_until=f'{size.frozen} epochs'),)),
      evals={'knn': s.Knn(every='20 epochs', views=('teacher',))},
      checkpoints=s.Checkpoints(every='5 epochs'))
