"""BiT pre-training of a ResNet-v2 with GroupNorm: SGD with steps, on ImageNet-1k, ImageNet-21k or JFT-300M.

Data:     i1k: TFDS `imagenet2012` (BiT-S). i21k: ImageNet-21k as a folder of classes (BiT-M). jft: 303 M images of
          18,291 classes (BiT-L); it is internal to Google: point --config.data.source at your data.
Source:   arXiv 1912.11370, section 3.2: SGD with momentum 0.9, lr 0.03 for 256 images, batch 4,096, decay 1e-4, 5,000
          steps of warm-up; 90 epochs with a tenth of the rate from epochs 30, 60, 80 on, of JFT 40 epochs with drops at
          10, 23, 30, 37. The numbers were not checked again, except rate, batch, warm-up, clipping, sigmoid loss and
          head bias of i21k, as google-research/big_vision configs/bit_i21k.py has them (with a cosine); evaluation as
          there. Clipping at norm 1 is of both programs (bit_i1k.py, bit_i21k.py); the paper names none, and JFT follows
          them. The decay is coupled: it is part of the gradient, before the momentum (decay_by=gradient).
          --config.optimizer.decay_by=lr decouples it (SGDW), decay_by=schedule as big_vision's `momentum` does.
Differs:  The paper is followed. The programs are later: both have a cosine and a decoupled decay, bit_i1k.py also lr
          0.1 for 256 images, 1,000 steps of warm-up and 99 % of train.
Run:      python -m vit_jax.main --config=configs/bit_pretrain.py:BiT-R50x1,i21k --workdir=runs/bit
          --config.model.dtype=bfloat16
Plan:     python -m vit_jax.main --job=plan --config=configs/bit_pretrain.py:BiT-R50x1,i1k --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: after fine-tuning by bit_hyperrule.py on ImageNet, BiT-M R50x1 80.68 % and R152x2 85.15 % (the repository's
          table). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

MODELS = ('BiT-R50x1', 'BiT-R50x3', 'BiT-R101x1', 'BiT-R101x3', 'BiT-R152x2', 'BiT-R152x4')
_RECIPE = s.Recipe(
    exif_orientation=s.Exif.FALSE,
    crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TENSORFLOW, crop_area=(.05, 1.), crop_aspect=(.75, 1.33),
    flip=True, eval_resize_px=256, eval_area=True, truncate=True)
DATA = {
    'i1k': s.Data(source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
                  recipe=_RECIPE),
    'i21k': s.Data(source='folder:imagenet21k', num_examples=14_197_122, num_classes=21_841, recipe=_RECIPE),
    'jft': s.Data(source='folder:JFT-300M', num_examples=303_000_000, num_classes=18_291, max_labels=8,
                  recipe=_RECIPE),
}


def get_config(arguments: str = '') -> s.Config:
  """The run: model and data in any order."""
  given = s.parse_arg(arguments, model=MODELS, data=tuple(DATA))
  is_i1k, is_jft = given['data'] == 'i1k', given['data'] == 'jft'
  drops = ('10', '23', '30', '37') if is_jft else ('30', '60', '80')
  return s.Config(
      name=f'{given["model"]} {given["data"]}', length='40 epochs' if is_jft else '90 epochs', batch_size=4096,
      image_px=(224, 224),
      data=DATA[given['data']], model=sizes.model(given['model']),
      head=s.Head(bias_init=0. if is_i1k else -10.),
      objective=s.Supervised(loss=s.Loss.SOFTMAX if is_i1k else s.Loss.SIGMOID, label_smoothing=0.),
      optimizer=s.Sgd(lr=.03, base_batch_size=256, momentum=.9, weight_decay=1e-4, clip_norm=1., schedule=s.Schedule(
          s.Decay.STEPS, warmup='5_000 steps', warmup_form=s.Warmup.FROM_ZERO,
          milestones=tuple(f'{drop} epochs' for drop in drops), gamma=.1)),
      evals={'val': s.TopK(every='5 epochs')},
      checkpoints=s.Checkpoints(every='1 epochs'))
