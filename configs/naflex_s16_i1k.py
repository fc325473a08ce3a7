"""ViT-S/16 on ImageNet-1k at the own aspect of each image, with several lengths of sequences (NaFlex).

Data:     TFDS `imagenet2012`: 1,281,167 images, 1,000 classes.
Source:   timm's NaFlex training (pytorch-image-models train.py, `--naflex-loader`): batches of at most 128, 256, 576,
          784 or 1,024 patches of 16 px, one of these lengths drawn for each batch; evaluation with 576; crops whose
          aspect is relative to that of the image. Learned positions are resized for each image as in SigLIP 2 (arXiv
          2502.14786, section 2.4.2). Rate, decay, warm-up and RandAugment are those of `vit_s16_i1k`.
Differs:  Only lengths and evaluation of timm's published runs are known, which are of size B. Each batch has the same
          number of images; timm gives shorter sequences larger batches and scales their loss. There is no mixup.
Run:      python -m vit_jax.main --config=configs/naflex_s16_i1k.py --workdir=runs/naflex_s16_i1k
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/naflex_s16_i1k.py --topology=v5e:4x4
          --config.model.dtype=bfloat16
Expected: not known; not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config() -> s.Config:
  """The run."""
  model = sizes.vit('S/16')
  model.pool, model.init = s.Mean(), s.Init.BIG_VISION
  model.positions = s.Learned(resize=s.PositionResize.BILINEAR_ANTIALIAS)
  return s.Config(
      name='naflex_s16_i1k', length='300 epochs', batch_size=1024, image_px=(384, 384),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              eval_native_patch=16, native_lengths=(128, 256, 576, 784, 1024),
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.05, 1.),
              crop_aspect=(.75, 4 / 3), flip=True, interpolation=s.Interpolation.BICUBIC, antialias=True,
              randaugment=s.RandAugment(layers=2, magnitude=10., table=s.OpTable.AUGREG))),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO)),
      evals={'val': s.TopK(every='10 epochs')},
      checkpoints=s.Checkpoints(every='2 epochs'))
