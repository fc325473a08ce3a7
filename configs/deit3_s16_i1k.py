"""ViT-S/16 on ImageNet-1k for 800 epochs as in DeiT III: LAMB, binary cross-entropy, three simple augmentations.

Data:     TFDS `imagenet2012`: 1,281,167 images, 1,000 classes.
Source:   arXiv 2204.07118, Table 1, and its published command for ViT-S (facebookresearch/deit README_revenge.md,
          augment.py, models_v2.py): batch 2,048, lr 4e-3 to 1e-5, decay 0.05, repeated augmentation, 3-Augment with
          jitter 0.3, mixup 0.8 or cutmix 1, drop path 0.05 in every block alike, LayerScale 1e-4; every class that a
          mixed image has is a target of 1. apex's LAMB clips at norm 1 and scales only decayed kernels by trust ratios.
          Mixing is drawn for every 256 images, the batch of a device in its command; copies of an image are on
          different ones.
          Crop ratio 1 in evaluation (the command's --eval-crop-ratio 1.0). The learning rate changes once an epoch, one
          epoch late, along a cosine from epoch 0, as timm's scheduler and the program's loop have it.
Differs:  The class token has a position: 384 more parameters, which start at zero.
Run:      python -m vit_jax.main --config=configs/deit3_s16_i1k.py --workdir=runs/deit3_s16_i1k
Expected: the repository's table has top-1 81.4 % (ImageNet-v2 70.5 %). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config() -> s.Config:
  """The run."""
  model = sizes.vit('S/16')
  model.block, model.gelu = s.Plain(layer_scale=1e-4), s.Gelu.EXACT
  model.positions = s.Learned(resize=s.PositionResize.BICUBIC)
  model.drop_path, model.drop_path_even = .05, True
  model.init = s.Init.DEIT3
  return s.Config(
      name='deit3_s16_i1k', length='800 epochs', batch_size=2048, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.08, 1.),
              crop_aspect=(.75, 4 / 3), flip=True, three_augment=True, jitter=s.Jitter(.3, .3, .3), mixup=.8, cutmix=1.,
              mix_group=256, repeats=3,
              eval_resize_px=224, eval_geometry=s.Geometry.TORCHVISION,
              interpolation=s.Interpolation.BICUBIC, antialias=True,
              mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Supervised(loss=s.Loss.BCE, threshold=0., label_smoothing=0.),
      optimizer=s.Lamb(lr=4e-3, b1=.9, b2=.999, weight_decay=.05, clip_norm=1., eps=1e-8,
                       trust_ratio_mask=('.*/kernel',),
                       schedule=s.Schedule(
                           s.Decay.COSINE, warmup='5 epochs', warmup_form=s.Warmup.FROM_ZERO, warmup_lr=1e-6,
                           decay_from_start=True, stairs='1 epoch', lag='1 epoch', end_lr=1e-5)),
      evals={'val': s.TopK(every='10 epochs', metrics=('ece',))},
      checkpoints=s.Checkpoints(every='5 epochs'))
