"""ViT-L/16 pre-trained on JFT-300M for 14 epochs: the L/16 column of Table 2 of the ViT paper.

Data:     JFT-300M: 303 M images, 18,291 classes, several labels per image (data.max_labels). It is internal to Google:
          point --config.data.source at your data, or at `synthetic`, and set data.num_examples and data.num_classes
          to match.
Source:   arXiv 2010.11929, Table 3 (lr 4e-4, decay 0.1, linear, dropout 0; no clipping: the caption gives
          clipping for ImageNet only) and section 3.1 (the head has a hidden layer with tanh during pre-training).
          Sigmoid loss and head bias -10 as in the released code.
Differs:  No program was published for JFT. Not stated by the paper and chosen here: the learning rate falls to 0, where
          that of ImageNet-21k ends at 1e-5 (an author's statement), and at most 8 labels of an image are used.
Run:      python -m vit_jax.main --config=configs/vit_l16_jft.py --workdir=runs/vit_l16_jft
          Kernels compute attention and the MLP on the TPUs where they are faster (docs/explanation/layout.md).
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_l16_jft.py --topology=v3:16x16
          Compiled without the hardware, not measured on a TPU (benchmarks/plans.sh). Times in ms; core-days of the
          steps without collectives, and with all of them.
          Quick: programs of 2 and 4 blocks, extended to all blocks. Made with --config.model.attention.kernel=xla.
          topology   layout          GiB   step  collectives  core-days  with  made
          v3:16x16   data=64 fsdp=8  1.72  81.1  25.0         498        651   2026-11-23, quick
          v4:4x4x8   data=16 fsdp=8  5.54  82.0  22.7         252        321   2026-11-22, quick
          v5e:16x16  data=32 fsdp=8  2.87  48.5  22.7         149        218   2026-11-22, quick
Expected: the paper reports 87.76 % on ImageNet after fine-tuning at 512 px, and 0.68k TPUv3-core-days. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run."""
  s.parse_arg(arguments)
  model = sizes.vit('L/16')
  model.dropout = 0.
  model.dtype = s.DType.BF16
  model.init = s.Init.VISION_TRANSFORMER
  return s.Config(
      name='vit_l16_jft', length='14 epochs', batch_size=4096, image_px=(224, 224),
      data=s.Data(
          source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291,
          max_labels=8,  # 1.26 on average; the highest number is not published
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
              crop_aspect=(.75, 1.33), flip=True, mean=(.5, .5, .5), std=(.5, .5, .5))),
      model=model,
      head=s.Head(pre_logits=1024, bias_init=-10.),  # section 3.1: a hidden layer with tanh
      objective=s.Supervised(loss=s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.AdamW(
          lr=4e-4, b1=.9, b2=.999, weight_decay=.1, clip_norm=0.,
          schedule=s.Schedule(s.Decay.LINEAR, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO, end_lr=0.)),
      train=s.Train(log_every='200 steps'),
      evals={'test': s.TopK(every='25_000 steps')},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='100_000 steps'))
