"""ViT-g/14 pre-trained on JFT-3B for a million steps: Scaling Vision Transformers, with its Adafactor.

Data:     JFT-3B: about 3 G images, 29,593 classes, several labels per image (data.max_labels). It is internal to
          Google: point --config.data.source at your data, and set data.num_examples and data.num_classes to match.
Source:   arXiv 2106.04560, sections 3.1 to 3.5, as google-research/big_vision configs/proj/scaling_laws/train_vit_g.py
          has it: batch 16,384, lr 8e-4, reciprocal square root of timescale 10,000, warm-up 10,000 and cooldown 50,000
          steps; decay 0.03, of the head 3; clipping at norm 1; attention pooling; bf16 first moment.
Differs:  At most 8 labels of an image are used.
Run:      python -m vit_jax.main --config=configs/vit_g14_jft3b.py --workdir=runs/vit_g14_jft3b
          The length need not be known at the start: stop the run and shorten --config.length to begin the cooldown.
          size=G/14 trains the model of 1.8 B parameters with the same settings.
Plan:     python -m vit_jax.main --job=plan --config=configs/vit_g14_jft3b.py:G/14 --topology=v5e:16x16
          Compiled without the hardware, not measured on a TPU (benchmarks/plans.sh). Times in ms; core-days of the
          steps without collectives, and with all of them.
          topology   layout           GiB   step     collectives  core-days  with   made
          v5e:16x16  data=16 fsdp=16  4.73  1,572.7  118.9        4,660      5,012  2026-11-23
Expected: the paper's abstract has 90.45 % on ImageNet after fine-tuning G/14. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run, of `size=g/14` or `size=G/14`."""
  given = s.parse_arg(arguments, size=('g/14', 'G/14'))
  size = given['size']
  model = sizes.vit(size)
  model.pool, model.dtype = s.Map(), s.DType.BF16
  model.init = s.Init.BIG_VISION
  return s.Config(
      name=f'{size} jft3b', length='1_000_000 steps', batch_size=16_384, image_px=(224, 224),
      data=s.Data(source='folder:JFT-3B', num_examples=3_000_000_000, num_classes=29_593, max_labels=8,
                  recipe=s.Recipe(exif_orientation=s.Exif.FALSE,
                                  crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.),
                                  crop_aspect=(.75, 1.33), flip=True,
                                  eval_resize_px=256, eval_area=True, truncate=True)),
      model=model,
      head=s.Head(bias_init=-10.),
      objective=s.Supervised(loss=s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.Adafactor(
          lr=8e-4, b1=.9, b2_cap=.999, weight_decay=.03, clip_norm=1.,
          rules=(s.PathRule('head/.*', weight_decay=100.),),
          schedule=s.Schedule(s.Decay.RSQRT, warmup='10_000 steps', warmup_form=s.Warmup.FROM_ZERO,
                              timescale='10_000 steps', cooldown='50_000 steps')),
      train=s.Train(log_every='200 steps'),
      evals={'test': s.TopK(every='50_000 steps')},
      checkpoints=s.Checkpoints(every='5_000 steps', keep_every='100_000 steps'))
