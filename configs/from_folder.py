"""A ViT from scratch on your own images.

Data:     PATH/{train,val|test}/<class>/*.jpg, or PATH/<class>/… (then 10 % are held out). Also PNG, WebP, BMP, GIF,
          TIFF, AVIF, JPEG 2000 and PPM. The EXIF orientation is applied.
Differs:  It follows no paper.
Run:      python -m vit_jax.main --config=configs/from_folder.py --config.data.source=folder:PATH --workdir=runs/mine
Sizes:    --config=configs/from_folder.py:S/16 selects another model, --config=configs/from_folder.py:DINOv2-reg-S/14 or
          --config=configs/from_folder.py:Axial-ViT-B/32 a published architecture, or another network such as
          --config=configs/from_folder.py:EfficientNet-B0; also those of weights to start from, such as
          --config=configs/from_folder.py:DINOv3-S/16, --config=configs/from_folder.py:CLIP-B/16,
          --config=configs/from_folder.py:EVA02-CLIP-B/16, --config=configs/from_folder.py:PE-Spatial-B/16,
          --config=configs/from_folder.py:PE-Core-G/14 and --config=configs/from_folder.py:AIMv2-L/14.
          --config.image_px=64,64 sets another image size.
          Rare classes count more with --config.objective.class_weights=1,1,5 (one number a class); a run that no longer
          improves ends by itself with --config.train.early_stop.metric=test/top1@ema, after
          --config.train.early_stop.patience=5 evaluations without a gain above --config.train.early_stop.min_delta=0.
          Several folders: --config.data.source=mix:0.7*folder:A,0.3*folder:B; where each has classes of its own, also
          --config.data.mix_classes=separate. Several labels an image, from a file such as PATH/labels_train.csv
          with lines `some/1.jpg,cat,sofa`: --config.data.max_labels=5 --config.objective.loss=sigmoid.
Expected: depends on the images; without pre-training a ViT needs many, or a smaller model.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(size: str = 'Ti/16') -> s.Config:
  """The run, with a model of `size`."""
  model = sizes.model(size)
  if isinstance(model, s.ViT) and size not in sizes.PUBLISHED:
    model.pool = s.Mean()
  if not isinstance(model, s.ResNet):
    model.drop_path = .1
  return s.Config(
      name=f'from_folder {size}', length='100 epochs', batch_size=64, image_px=(224, 224),
      data=s.Data(source='folder:PATH', recipe=s.Recipe(
          crop=s.Crop.INCEPTION, crop_sampler=s.CropSampler.TORCHVISION, crop_area=(.25, 1.), crop_aspect=(.75, 4 / 3),
          flip=True, mixup=.2, eval_resize_px=256)),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1),
      optimizer=s.AdamW(lr=5e-4, b1=.9, b2=.999, weight_decay=.1, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(ema=.999),
      evals={'test': s.TopK(every='5 epochs', metrics=('ece', 'class_mean'))},
      checkpoints=s.Checkpoints(every='5 %', keep_best='test/top1@ema'))
