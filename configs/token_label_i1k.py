"""LV-ViT on ImageNet-1k by token labeling: each patch has its own target, from a teacher's label map of the image.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images of 1,000 classes; and
          label maps of the training images, 6.5 KB each at 18 x 18, by any trained classifier:
          python -m vit_jax.main --job=prepare --config=configs/token_label_i1k.py --weights=TEACHER --to=maps
Source:   arXiv 2104.10858, section 4.1 and Table 2, and its program (zihangJiang/TokenLabeling@9dbfd59, README.md and
          main.py): AdamW 1.6e-3 (L 1e-3) for 1,024 images, batch 1,024, 300 epochs and 10 more at 1e-5, 5 of warm-up,
          decay 0.05, RandAugment m9-mstd0.5-inc1 (L: three operations), erasing 0.25, no mixup, MixToken (a box for
          every 128 images, the batch of a device), stochastic depth by size, moving average 0.99992; targets of class
          and tokens by RoIAlign of a map's logits, softmax and smoothing 0.1; both losses count the same (the paper's
          eq. 3 has the image's label as the target of the class: --config.objective.class_target=label).
Differs:  Maps come from your teacher, of the whole image, there from NFNet-F6 at 576 px, of the central square. Tokens
          and maps differ as `data/device/token_targets.py` says. RandAugment comes after the crop. Images are always
          resized bicubically, there bilinearly half of the time.
Run:      python -m vit_jax.main --config=configs/token_label_i1k.py:S --config.objective.maps=maps
          --config.objective.map_grid=18,18 --workdir=runs/lvvit_s
          Or T, M, L. Higher resolutions are fine-tuned from such a run: token_label_finetune.py.
Plan:     python -m vit_jax.main --job=plan --config=configs/token_label_i1k.py:S --topology=v3:4x4
          --config.model.dtype=bfloat16
Expected: the paper reports top-1 79.1 % (T), 83.3 % (S), 84.0 % (M). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

DROP_PATH = {'T': 0., 'S': .1, 'M': .2, 'L': .3}  # README.md
CROP = {'T': .9, 'S': .9, 'M': 1., 'L': 1.}  # share of the short side that evaluation shows: tlt/models/lvvit.py


def get_config(arguments: str = '') -> s.Config:
  """The run of T, S, M or L."""
  given = s.parse_arg(arguments, size=('S', 'T', 'M', 'L'))
  size, px = given['size'], 224
  model = sizes.published(f'LV-ViT-{size}/16')
  model.drop_path, model.positions = DROP_PATH[size], s.Learned(resize=s.PositionResize.BICUBIC)  # tlt/utils/utils.py
  model.init = s.Init.LVVIT
  return s.Config(
      name=f'token_label LV-ViT-{size}', length='310 epochs', batch_size=1024, image_px=(px, px),
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
          dense_weight=1., mix_token=True, mix_group=128, label_smoothing=.1, class_target=s.ClassTarget.MAP, top=5,
          map_grid=(18, 18)),
      optimizer=s.AdamW(
          lr=1e-3 if size == 'L' else 1.6e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=0.,
          schedule=s.Schedule(
              s.Decay.COSINE, warmup='5 epochs', warmup_form=s.Warmup.FROM_ZERO, warmup_lr=1e-6, decay_from_start=True,
              stairs='1 epoch', end_lr=1e-5, hold='10 epochs')),
      train=s.Train(ema=.99992, ema_warmup=s.EmaWarmup.NONE),
      evals={'val': s.TopK(every='10 epochs')},
      checkpoints=s.Checkpoints(every='2 epochs'))
