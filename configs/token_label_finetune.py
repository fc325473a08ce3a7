"""Fine-tunes an LV-ViT of token_label_i1k at a higher resolution, with the same label maps.

Data:     as token_label_i1k.py, with its label maps.
Source:   zihangJiang/TokenLabeling@9dbfd59, README.md: S at 384 px with batch 512, a constant rate of 5e-6 after 5
          epochs of warm-up, decay 1e-8, stochastic depth and augmentation as in training, no average. It has no
          command for M at 384 and 448 px and L at 448 and 512 px; these are trained likewise.
          Its command leaves the length at the program's default of 300 epochs; here it is 30, which sail-sg/volo gives
          for the same rate, decay and batch. Positions are resized bicubically, as there.
Differs:  The length is 30 epochs, where the command leaves the program's default of 300. Commands for M and L are not
          published; they are trained as S. Maps, tokens and RandAugment as in token_label_i1k.py.
Run:      python -m vit_jax.main --config=configs/token_label_finetune.py:L,px=448 --config.init_from=runs/lvvit_l
          --config.objective.maps=maps --config.objective.map_grid=18,18 --workdir=runs/lvvit_l_448
Plan:     python -m vit_jax.main --job=plan --config=configs/token_label_finetune.py:L,px=448
          --config.model.dtype=bfloat16
          --topology=v3:8x8
Expected: top-1 84.4 % (S at 384 px), 85.4 and 85.5 % (M at 384 and 448 px), 86.2 and 86.4 % (L at 448 and 512 px), by
          its README. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes

SIDES = {'S': (384,), 'M': (384, 448), 'L': (448, 512)}  # px; README.md
DROP_PATH = {'S': .1, 'M': .2, 'L': .3}  # README.md
CROP = {'S': .9, 'M': 1., 'L': 1.}  # share of the short side that evaluation shows: tlt/models/lvvit.py


def get_config(arguments: str = '') -> s.Config:
  """The run of S, M or L; px=384|448|512."""
  given = s.parse_arg(arguments, size=tuple(SIDES), px=('', '384', '448', '512'))
  size = given['size']
  px = int(given['px'] or SIDES[size][0])
  if px not in SIDES[size]:
    raise UserError(f'px: expected one of {", ".join(map(str, SIDES[size]))} for LV-ViT-{size}, got {px}. Set another '
                    'side with --config.image_px=SIDE,SIDE.')
  model = sizes.published(f'LV-ViT-{size}/16')
  model.drop_path, model.positions = DROP_PATH[size], s.Learned(resize=s.PositionResize.BICUBIC)  # tlt/utils/utils.py
  model.init = s.Init.LVVIT
  return s.Config(
      name=f'token_label finetune LV-ViT-{size} {px} px', length='30 epochs', batch_size=512, image_px=(px, px),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.08, 1.),
              crop_aspect=(.75, 4 / 3), flip=True, randaugment=s.RandAugment(
                  layers=3 if size == 'L' else 2, magnitude=9., magnitude_std=.5, probability=.5, table=s.OpTable.TIMM),
              erase=s.Erase(.25, area=(.02, 1 / 3), aspect=(.3, 1 / .3)),
              interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=int(px / CROP[size]),
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.TokenLabel(
          dense_weight=1., mix_token=True, mix_group=64, label_smoothing=.1, class_target=s.ClassTarget.MAP, top=5,
          map_grid=(18, 18)),
      optimizer=s.AdamW(lr=5e-6, b1=.9, b2=.999, weight_decay=1e-8, clip_norm=0.,
                        schedule=s.Schedule(s.Decay.CONSTANT, warmup='5 epochs')),
      evals={'val': s.TopK(every='5 epochs')},
      checkpoints=s.Checkpoints(every='2 epochs'))
