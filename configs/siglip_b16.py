"""SigLIP B/16 from scratch: an image and a text tower of size B, trained on pairs with the sigmoid loss.

Data:     The paper's pairs (WebLI) are internal to Google: set --config.data.source=wds:DIR, tar files with images and
          their captions, and --config.objective.text.tokenizer=FILE, a SentencePiece model of 32,000 pieces.
Source:   arXiv 2303.15343: lr 1e-3, decay 1e-4, b2 0.95, cosine to 0, batch 32,768, 40 G examples of 224 px, which are
          only resized, 64 tokens, t' = ln 10, b = -10. Clipping at norm 1 and a warm-up of 20,000
          steps are those of SigLIP 2 (arXiv 2502.14786, section 2).
Differs:  AdamW replaces Adafactor, which the paper finds equal. The paper does not state warm-up and clipping of its
          longest runs.
Run:      python -m vit_jax.main --config=configs/siglip_b16.py --config.data.source=wds:DIR \
              --config.objective.text.tokenizer=FILE --workdir=runs/siglip_b16
Plan:     python -m vit_jax.main --job=plan --config=configs/siglip_b16.py --topology=v5e:16x16
Expected: the paper has 73.4 % zero-shot on ImageNet with this batch after 9 G examples. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config() -> s.Config:
  model = sizes.vit('B/16')
  model.pool, model.init, model.dtype = s.Map(), s.Init.BIG_VISION, s.DType.BF16
  return s.Config(
      name='siglip B/16', length='40e9 examples', batch_size=32_768, image_px=(224, 224),
      data=s.Data(source='wds:PATH', num_examples=1_000_000_000, any_num_examples=True,
                  recipe=s.Recipe(exif_orientation=s.Exif.FALSE,
                                  crop=s.Crop.RESIZE, flip=False)),
      model=model,
      objective=s.Contrastive(
          loss=s.PairLoss.SIGMOID, scale_init=10., bias_init=-10.,
          text=s.Text(tokens=s.Tokens.SIGLIP, vocabulary=32_000, length=64, width=768, depth=12, heads=12, mlp=3072)),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.95, weight_decay=1e-4, clip_norm=1., decay_by=s.DecayBy.SCHEDULE,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='20_000 steps', warmup_form=s.Warmup.FROM_ZERO)),
      evals={'imagenet': s.ZeroShot(every='5 %', source='tfds:imagenet2012', split='validation', batch_size=1024,
                                    names='clip_imagenet')},
      checkpoints=s.Checkpoints(every='1 %'))
