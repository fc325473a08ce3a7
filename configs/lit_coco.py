"""LiT on COCO captions: a text tower of size B is trained for a frozen ViT-B/16, in minutes on a TPU host.

Data:     COCO captions as tar files, wds:DIR, with the captions of an image as lines of `.txt`.
Source:   google-research/big_vision configs/proj/image_text/siglip_lit_coco.py: batch 512, 5,000 steps, lr 1e-3, decay
          0.01, cosine, warm-up 3 %, clipping at norm 1, t' = ln 10, b = -2.71, flips and RandAugment (2, 10), 16
          tokens, a frozen B/16 of AugReg without its head.
Differs:  The paper's text tower is a trained BERT-base, whose weights are not read: here it has the same size and
          SigLIP's tokens, and starts at random or from --config.objective.text.weights=FILE of a SigLIP.
Run:      python -m vit_jax.main --config=configs/lit_coco.py --config.init_from=FILE --config.data.source=wds:DIR \
              --config.objective.text.tokenizer=FILE --workdir=runs/lit_coco
          FILE: a ViT-B/16 of AugReg such as vit_base_patch16_224.augreg_in21k; a SentencePiece model.
Plan:     python -m vit_jax.main --job=plan --config=configs/lit_coco.py --topology=v5e:2x2
Expected: LiT's model that was trained on COCO, with a BERT of size B, has 20.7 % zero-shot on ImageNet (big_vision's
          README). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

FROZEN = (s.PathRule('backbone/.*', frozen_until='100 %'),)


def get_config() -> s.Config:
  model = sizes.vit('B/16')
  model.dtype = s.DType.BF16
  return s.Config(
      name='LiT COCO B/16', length='5000 steps', batch_size=512, image_px=(224, 224),
      data=s.Data(source='wds:PATH', num_examples=82_783, any_num_examples=True,
                  recipe=s.Recipe(exif_orientation=s.Exif.FALSE,
                                  crop=s.Crop.RESIZE, flip=True,
                                  randaugment=s.RandAugment(layers=2, magnitude=10., table=s.OpTable.AUGREG))),
      model=model,
      objective=s.Contrastive(
          loss=s.PairLoss.SIGMOID, scale_init=10., bias_init=-2.71,
          text=s.Text(tokens=s.Tokens.SIGLIP, vocabulary=32_000, length=16, width=768, depth=12, heads=12, mlp=3072)),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.01, clip_norm=1., decay_by=s.DecayBy.SCHEDULE,
                        rules=FROZEN,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='3 %', warmup_form=s.Warmup.FROM_ZERO)),
      checkpoints=s.Checkpoints(every='10 %'))
