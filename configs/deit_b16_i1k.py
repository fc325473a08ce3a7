"""DeiT-B/16 on ImageNet-1k for 300 epochs, without a teacher: the recipe of most later ViTs.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images of 1,000 classes.
Source:   arXiv 2012.12877, Table 9, and the defaults of its released program, facebookresearch/deit main.py: batch
          1,024, AdamW 5e-4 for 512 images down to 1e-5, decay 0.05, 5 epochs of warm-up, no clipping, smoothing 0.1,
          stochastic depth 0.1, three repeats of each image in a batch, RandAugment m9-mstd0.5-inc1, mixup 0.8 or cutmix
          1, erasing 0.25. timm's conventions throughout: ImageNet's mean and deviation, bicubic with antialias, exact
          GELU. The learning rate changes once an epoch, one epoch late, along a cosine from epoch 0, as timm's
          scheduler and the program's loop have it. Mixing is drawn for every 64 images (S and Ti: 256), the batch of a
          device in its commands (README_deit.md); copies of an image are on different ones.
Differs:  No difference is known.
Run:      python -m vit_jax.main --config=configs/deit_b16_i1k.py --workdir=runs/deit_b16_i1k
          --config.model.dtype=bfloat16
          size=S/16 or size=Ti/16 trains a smaller model.
Plan:     python -m vit_jax.main --job=plan --config=configs/deit_b16_i1k.py --topology=v3:4x4
          --config.model.dtype=bfloat16
Expected: the released weights have top-1 81.8 % (S/16 79.9 %, Ti/16 72.2 %; the repository's table). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  given = s.parse_arg(arguments, size=('B/16', 'S/16', 'Ti/16'))
  model = sizes.vit(given['size'])
  model.gelu, model.drop_path, model.positions = s.Gelu.EXACT, .1, s.Learned(resize=s.PositionResize.BICUBIC)
  model.init = s.Init.DEIT
  return s.Config(
      name=f'deit {given["size"]}', length='300 epochs', batch_size=1024, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.08, 1.),
              crop_aspect=(.75, 4 / 3), flip=True, interpolation=s.Interpolation.BICUBIC, antialias=True,
              eval_resize_px=256,
              eval_geometry=s.Geometry.TORCHVISION,
              randaugment=s.RandAugment(2, 9., .5, probability=.5, table=s.OpTable.TIMM),
              erase=s.Erase(.25, area=(.02, 1 / 3), aspect=(.3, 1 / .3)),
              mixup=.8, cutmix=1., mix_group=64 if given['size'] == 'B/16' else 256, repeats=3,
              mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1),
      optimizer=s.AdamW(lr=5e-4, base_batch_size=512, b1=.9, b2=.999, weight_decay=.05, clip_norm=0.,
                        schedule=s.Schedule(
                            s.Decay.COSINE, warmup='5 epochs', warmup_form=s.Warmup.FROM_ZERO, warmup_lr=1e-6,
                            decay_from_start=True, stairs='1 epoch', lag='1 epoch', end_lr=1e-5)),
      evals={'val': s.TopK(every='10 epochs')},
      checkpoints=s.Checkpoints(every='2 epochs'))
