"""Linear probe of frozen weights on ImageNet-1k with augmentation, by the protocol of MAE or DINO.

Data:     tfds:imagenet2012; any other by --config.data.source=folder:PATH
Source:   protocol=mae: arXiv 2111.06377, Table 10 (LARS, BatchNorm without scale and bias, batch 16,384, 90 epochs; 50
          of L and H), with the crops of its program (facebookresearch/mae main_linprobe.py: bicubic, drawn once); dino:
          arXiv 2104.14294, section 4.1, and facebookresearch/dino eval_linear.py (SGD, class tokens of the last four
          blocks, of B that of the last with the mean patch token, batch 1,024, 100 epochs, torchvision's bilinear
          crops; evaluation is bicubic in both)
Run:      python -m vit_jax.main --config=configs/linear_probe.py:B/16 --config.init_from=FILE --workdir=runs/probe
          …/linear_probe.py:S/16,protocol=dino
Differs:  Both programs report the best epoch on the test split; here it is the last.
Plan:     the backbone runs forward only: B/16 35 GFLOP an image
Expected: MAE 1,600 epochs: B/16 68.0, L/16 75.8, H/14 76.6; DINO: S/16 77.0, S/8 79.7, B/16 78.2, B/8 80.1 (the papers)
"""
import dataclasses

from vit_jax.config import schema as s
from vit_jax.recipes import finetune, sizes

FROZEN = (s.PathRule('backbone/.*', frozen_until='100 %'),)


def get_config(arguments: str = '') -> s.Config:
  """The run: the model, then protocol=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, protocol=('mae', 'dino'))
  size = given['model'].rpartition('-')[2][:1]
  network = sizes.model(given['model'])
  is_mae = given['protocol'] == 'mae'
  if isinstance(network, s.ViT):
    network = dataclasses.replace(network, gelu=s.Gelu.EXACT, init=s.Init.MAE if is_mae else s.Init.DINO)
  recipe = s.Recipe(
      exif_orientation=s.Exif.FALSE,
      crop=s.Crop.INCEPTION, crop_area=(.08, 1.), crop_aspect=(.75, 4 / 3), flip=True,
      crop_sampler=s.CropSampler.CLIPPED if is_mae else s.CropSampler.TORCHVISION,
      crop_interpolation=s.CropInterpolation.SAME if is_mae else s.CropInterpolation.BILINEAR,
      interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
      eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))
  config = s.Config(
      name=f'probe {given["model"]} {given["protocol"]}', batch_size=16_384, image_px=(224, 224),
      length='50 epochs' if size in 'LH' else '90 epochs',
      data=s.Data(source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
                  recipe=recipe),
      model=network, head=s.Head(probe=True, batch_norm=True),
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.Lars(lr=.1, base_batch_size=256, momentum=.9, trust_coefficient=.001, weight_decay=0., clip_norm=0.,
                       rules=FROZEN, schedule=s.Schedule(s.Decay.COSINE, warmup='10 epochs',
                                                         warmup_form=s.Warmup.FROM_ZERO)),
      evals={'val': s.TopK(every='10 epochs')})
  if is_mae:
    return config
  tap = s.FeatureLayers((-1,), patches=True) if size == 'B' else s.FeatureLayers(s.LAST_FOUR)
  return dataclasses.replace(
      config, batch_size=1_024, length='100 epochs', head=s.Head(probe=True, features=tap),
      optimizer=s.Sgd(lr=.001, base_batch_size=256, momentum=.9, weight_decay=0., clip_norm=0., rules=FROZEN,
                      schedule=s.Schedule(s.Decay.COSINE, warmup='0 steps', stairs='1 epoch')))
