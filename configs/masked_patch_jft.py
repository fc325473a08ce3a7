"""ViT-B/16 on JFT-300M by masked patch prediction, as in the ViT paper: the mean color of masked patches.

Data:     JFT-300M is internal to Google; set another source with --config.data.source=, `synthetic` runs as it is.
Source:   arXiv 2010.11929, Appendix B.1.2: half of the patches corrupted (80/10/10), 3-bit mean color, 1M steps of
          4,096 (14 epochs), Adam 2e-4, 10k steps of warm-up, cosine. The paper names neither weight decay nor
          clipping: both are off here.
Differs:  No program was published. Weight decay is off, as this section names none; section 4.1 has 0.1 for all
          pre-training.
Run:      python -m vit_jax.main --config=configs/masked_patch_jft.py --workdir=runs/masked
          --config.model.dtype=bfloat16
          target=colors predicts 4 x 4 colors a patch, target=pixels the patch itself, the paper's other two.
Plan:     python -m vit_jax.main --job=plan --config=configs/masked_patch_jft.py --topology=v3:16x16
          --config.model.dtype=bfloat16
Expected: the paper reports 79.9 % on ImageNet after fine-tuning: 2 points above training from scratch, 4 below
          supervised pre-training; the other targets a little less. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run; `target=color|colors|pixels`."""
  given = s.parse_arg(arguments, target=('color', 'colors', 'pixels'))
  return s.Config(
      name=f'masked_patch {given["target"]}', length='1_000_000 steps', batch_size=4096, image_px=(224, 224),
      data=s.Data(source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291,
                  recipe=s.Recipe(exif_orientation=s.Exif.FALSE,
                                  crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
                                  crop_aspect=(.75, 1.33), flip=True)),
      model=sizes.vit('B/16'),
      objective=s.MaskedPatch(s.PatchTarget(given['target']), mask_ratio=.5, mask_token_prob=.8, random_patch_prob=.1),
      optimizer=s.AdamW(lr=2e-4, b1=.9, b2=.999, weight_decay=0., clip_norm=0., schedule=s.Schedule(
          s.Decay.COSINE, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO)),
      checkpoints=s.Checkpoints(every='5_000 steps'))
