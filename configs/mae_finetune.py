"""Fine-tunes a ViT-B, L or H that MAE has pre-trained, on ImageNet-1k; or any other network and dataset.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images of 1,000 classes. Other
          datasets are those of finetune.py: dataset=cifar10.
Source:   arXiv 2111.06377, Table 9, which is BEiT's protocol too, and its code for what depends on the size: AdamW,
          5e-4 (L and H 1e-3) for 256 images, batch 1,024, 100 (50) epochs, layer decay 0.65 (0.75), stochastic depth
          0.1 (0.2, 0.3), RandAugment (9, 0.5), smoothing 0.1, mixup 0.8 or cutmix 1, erasing 0.25. The mean of the
          patch tokens is normalized by a new norm and classified (model.pool=mean, model.last_norm=pooled); the class
          token stays in the sequence unread. Positions are learned and initialized with the fixed ones of pre-training.
          Mixing is drawn for every 32 images (H: 16), the batch of a device in its commands
          (FINETUNE.md).
Differs:  No difference is known.
Run:      python -m vit_jax.main --config=configs/mae_finetune.py:L/16 --config.init_from=runs/mae_l16 --workdir=runs/ft
          --config.init_from takes weight files too.
Plan:     python -m vit_jax.main --job=plan --config=configs/mae_finetune.py:L/16 --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: the paper reports top-1 83.6 % (B/16), 85.9 % (L/16), 86.9 % (H/14) after 1,600 epochs of pre-training; over
          five seeds 83.57 ± 0.08 % and 85.87 ± 0.07 % (its repository). Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, sizes, studies

BY_SIZE = {  # epochs, learning rate for 256 images, layer decay, stochastic depth, images of a device; others as B
    'B': (100, 5e-4, .65, .1, 32), 'L': (50, 1e-3, .75, .2, 32), 'H': (50, 1e-3, .75, .3, 16)}
MODELS = tuple(dict.fromkeys(('L/16', 'B/16', 'H/14', *finetune.MODELS)))


def get_config(arguments: str = '') -> s.Config:
  """The run: model, then dataset=… phase=… px=…."""
  given = s.parse_arg(arguments, size=MODELS, dataset=('imagenet2012', *finetune.DATASETS), phase=finetune.PHASES,
                      px=('',))
  name, dataset, phase = given['size'], given['dataset'], given['phase']
  epochs, rate, layer_decay, drop_path, group = BY_SIZE.get(name.removeprefix('ViT-').partition('/')[0], BY_SIZE['B'])
  model, px = sizes.model(name), studies.number('px', given['px']) or 224
  if isinstance(model, s.ViT):
    model.pool, model.last_norm, model.drop_path = s.Mean(class_token=True), s.LastNorm.POOLED, drop_path
    model.gelu, model.init = s.Gelu.EXACT, s.Init.MAE
    model.positions = s.Learned(resize=s.PositionResize.BICUBIC)
  return s.Config(
      name=f'finetune {name} {dataset} mae', length=f'{epochs} epochs', batch_size=1024,
      image_px=(finetune.side(px, model),) * 2,
      data=finetune.data(dataset, phase, s.Recipe(
          crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.08, 1.), crop_aspect=(.75, 4 / 3),
          flip=True, mixup=.8, cutmix=1., cutmix_share=.5, mix_group=group,
          erase=s.Erase(.25, area=(.02, 1 / 3), aspect=(.3, 1 / .3)),
          randaugment=s.RandAugment(layers=2, magnitude=9., magnitude_std=.5, probability=.5, table=s.OpTable.TIMM),
          interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
          eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1),
      optimizer=s.AdamW(
          lr=rate, base_batch_size=256, b1=.9, b2=.999, weight_decay=.05, layer_decay=layer_decay, clip_norm=0.,
          schedule=s.Schedule(s.Decay.COSINE, warmup='5 epochs', warmup_form=s.Warmup.FROM_ZERO, end_lr=1e-6)),
      evals={'test' if phase == 'final' else 'val': s.TopK(every='10 %')},
      checkpoints=s.Checkpoints(every='10 %'),
      init_settings=s.InitSettings.WEIGHTS if dataset == 'own' else s.InitSettings.NETWORK)
