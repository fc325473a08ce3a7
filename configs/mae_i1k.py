"""MAE pre-training of ViT-B, L or H on ImageNet-1k for 800 epochs: three quarters of the patches are masked.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the k-NN
          evaluation during training uses labels.
Source:   arXiv 2111.06377, Table 8: AdamW 0.9/0.95, 1.5e-4 for 256 images, batch 4,096, decay 0.05, 40 epochs of
          warm-up, cosine, crops of 0.2 to 1 and flips alone, normalized pixels. As in its program (facebookresearch/mae
          main_pretrain.py) all but biases and norms are decayed, class token and mask token too. The authors' best
          weights had --config.length='1600 epochs'.
Differs:  No difference of this recipe alone is known.
Run:      python -m vit_jax.main --config=configs/mae_i1k.py:L/16 --workdir=runs/mae_l16 --config.model.dtype=bfloat16
          Or B/16, H/14. Then configs/mae_finetune.py:L/16 --config.init_from=runs/mae_l16, and
          python -m vit_jax.main --job=evaluate --config=configs/evaluate.py --weights=runs/mae_l16 for probes.
Plan:     python -m vit_jax.main --job=plan --config=configs/mae_i1k.py:L/16 --topology=v3:8x8
          --config.model.dtype=bfloat16
          An image and step costs 58.2 GFLOP (B), 124 (L) and 291 (H): 55, 34 and 29 % of one of supervised training;
          the encoder alone is 25 %.
Expected: the paper reports, fine-tuned / linear probe: B/16 83.6 / 68.0 %, L/16 85.9 / 75.8 %, H/14 86.9 / 76.6 %
          (1,600 epochs). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

DECAYED = ('.*/kernel', 'backbone/cls', 'mask_token')
"""What has more than one axis in the authors' program; positions are fixed."""


def get_config(arguments: str = '') -> s.Config:
  """The run of B/16, L/16 or H/14."""
  given = s.parse_arg(arguments, size=('L/16', 'B/16', 'H/14'))
  model = sizes.vit(given['size'])
  model.positions, model.gelu = s.SinCos(s.Frequencies.MAE), s.Gelu.EXACT
  model.init = s.Init.MAE
  return s.Config(
      name=f'mae {given["size"]}', length='800 epochs', batch_size=4096, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.2, 1.),
              crop_aspect=(.75, 4 / 3), flip=True, interpolation=s.Interpolation.BICUBIC, antialias=True,
              eval_resize_px=256,
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Mae(mask_ratio=.75, norm_pix_loss=True, decoder_width=512, decoder_depth=8, decoder_heads=16),
      optimizer=s.AdamW(lr=1.5e-4, base_batch_size=256, b1=.9, weight_decay=.05, weight_decay_mask=DECAYED, b2=.95,
                        clip_norm=0.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='40 epochs', warmup_form=s.Warmup.FROM_ZERO)),
      evals={'knn': s.Knn(every='100 epochs'),
             'health': s.Health(every='5 epochs', images=4096, min_rank=2.)},
      checkpoints=s.Checkpoints(every='5 epochs'))
