"""DINO on ImageNet-1k: a ViT-S or B learns to predict from one crop what its EMA predicts from another.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the
          k-NN evaluation during training uses labels.
Source:   arXiv 2104.14294, section 3.2 and Appendix C, and its program, facebookresearch/dino main_dino.py: 2 crops of
          224 px and 10 of 96 px, 65,536 prototypes, AdamW for 256 images, batch 1,024 (B/8: 1,056), decay 0.04 to 0.4,
          10 epochs of warm-up, cosine, teacher's momentum 0.996 to 1, its temperature raised once an epoch, stochastic
          depth 0.1, each tensor's gradient clipped. `SIZES` has what depends on the network. These numbers are those of
          the args.txt published with the weights, which was not read itself. B/16 and B/8: as repositories repeat it
          that cite its address (the DINO README of DyT). S/16 and S/8: two copies by third parties that agree in every
          field, crops of S/16 also in lightly's benchmarks; an author's run of S/16 without small crops has the same
          clipping (none), end of the learning rate (1e-5) and freezing (1 epoch; issue 122 of the repository).
Differs:  No difference of this recipe alone is known, apart from what its published arguments rest on (Source).
Run:      python -m vit_jax.main --config=configs/dino_i1k.py:S/16 --workdir=runs/dino_s16
          --config.model.dtype=bfloat16
          Or S/8, B/16, B/8. `teacher` is the network to use: --config.init_from=runs/dino_s16
          --config.init_view=teacher
          A collapse is logged, and ends the run with --config.objective.collapse.action=stop. Centering as in DINOv2:
          --config.objective.centering=sinkhorn
Plan:     python -m vit_jax.main --job=plan --config=configs/dino_i1k.py:S/16 --topology=v3:8x8
          --config.model.dtype=bfloat16
          An image and step costs 124 GFLOP (S/16), 557 (S/8), 474 (B/16), 2,016 (B/8).
Expected: k-NN and linear probe of the published weights: 74.5 / 77.0 % (S/16), 78.3 / 79.7 % (S/8), 76.1 / 78.2 %
          (B/16), 77.4 / 80.1 % (B/8). The README's shorter run, S/16 with --config.length='300 epochs'
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
  """What differs by the network.

  epochs, batch_size: of the run.    lr, end_lr: learning rate, for 256 images and at the end.
  clip: limit of each tensor's gradient; 0 = none.    cut: area that parts small crops from large ones.
  frozen: epochs without updates of the last layer.    learned_norm: whether prototypes have learned lengths.
  temperature: of the teacher at first.    warming: epochs until it is the last one.
  """
  epochs: int
  batch_size: int
  lr: float
  end_lr: float
  clip: float
  cut: float
  frozen: int
  learned_norm: bool
  temperature: float
  warming: int


SIZES = {'S/16': Size(800, 1024, 5e-4, 1e-5, 0., .25, 1, True, .04, 30),
         'S/8': Size(800, 1024, 5e-4, 1e-6, 3., .4, 1, True, .04, 30),
         'B/16': Size(400, 1024, 7.5e-4, 2e-6, .3, .25, 3, False, .04, 50),
         'B/8': Size(300, 1056, 5e-4, 2e-6, 3., .25, 3, False, .03, 50)}


def get_config(arguments: str = '') -> s.Config:
  """The run of S/16, S/8, B/16 or B/8."""
  given = s.parse_arg(arguments, size=tuple(SIZES))
  size, model = SIZES[given['size']], sizes.vit(given['size'])
  model.gelu, model.drop_path, model.init = s.Gelu.EXACT, .1, s.Init.DINO
  model.positions = s.Learned(resize=s.PositionResize.BICUBIC_OFFSET)  # local crops see positions of 6 x 6 tokens
  return s.Config(
      name=f'dino {given["size"]}', length=f'{size.epochs} epochs', batch_size=size.batch_size, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True,
              views=s.Views(on=True, num_local=10, global_area=(size.cut, 1.), local_area=(.05, size.cut), local_px=96,
                            blur=(1., .1, .5), solarize=(0., .2, 0.), grayscale=.2,
                            jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
              interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Dino(
          norm_last_layer=not size.learned_norm,
          teacher_temperature=s.Ramp(  # one value an epoch: np.linspace(temperature, .07, warming)
              size.temperature, .07, until=f'{size.warming - 1} epochs', curve=s.Curve.LINEAR, stairs='1 epoch'),
          out_dim=65_536, hidden_dim=2048, bottleneck_dim=256, student_temperature=.1, momentum=s.Ramp(.996, 1.),
          centering=s.Centering.MEAN, center_momentum=.9),
      optimizer=s.AdamW(
          lr=size.lr, base_batch_size=256, b1=.9, b2=.999, weight_decay=.04, weight_decay_ramp=s.Ramp(1., 10.),
          clip_norm=0.,
          clip_tensor=size.clip, weight_decay_mask=DECAYED + (LENGTHS if size.learned_norm else ()),
          schedule=s.Schedule(s.Decay.COSINE, warmup='10 epochs', warmup_form=s.Warmup.LINSPACE, end_lr=size.end_lr),
          rules=(s.PathRule('projector/prototypes/.*', frozen_until=f'{size.frozen} epochs'),)),
      evals={'knn': s.Knn(every='20 epochs', views=('teacher',)),
             'health': s.Health(every='1 epoch', images=4096, min_rank=2., views=('teacher',))},
      checkpoints=s.Checkpoints(every='5 epochs'))
