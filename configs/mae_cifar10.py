"""MAE on CIFAR-10 at 32 px with a small ViT/4, for one CPU core: self-supervised features without labels.

Data:     CIFAR-10: a TFDS `cifar10` (the default), source=folder:PATH, or source=array_record:DIR, as written by
          `vit-jax prepare --data=cifar10 --to=DIR`. Only the evaluations use labels.
Differs:  It is a small form of the paper's method, with sizes and rates of this project.
Run:      python -m vit_jax.main --config=configs/mae_cifar10.py --workdir=runs/mae_cifar10
          --config.length='1 steps' --config.optimizer.lr=0 measures the same network at initialization.
Plan:     1 device, 0.14 M parameters, of which the encoder has 0.10; 5 epochs, about 8 minutes of one CPU core (500
          images/s).
Expected: on 2,000 test images, from 5,000 labeled ones: 36.2 % by 20 nearest neighbors, 37.5 % by 100, 44.6 % by
          logistic regression; of the same network at initialization 29.9, 30.0 and 39.3 % (measured once, on a folder
          of JPEG copies, 2 shared CPU cores).
"""
from vit_jax.config import schema as s


def get_config(arguments: str = '') -> s.Config:
  """The run, on source=…."""
  source = s.parse_arg(arguments, source=())['source'] or 'tfds:cifar10'
  seen, test = 'train[:10%]', 'test[:20%]'
  return s.Config(
      name='mae_cifar10', length='5 epochs', batch_size=128, image_px=(32, 32),
      data=s.Data(source=source, recipe=s.Recipe(crop=s.Crop.RESIZE, flip=True, shift_px=4)),
      model=s.ViT(patch=4, width=64, depth=3, heads=4, mlp=s.Mlp(128), pool=s.Mean(),
                  positions=s.SinCos(s.Frequencies.MAE)),
      objective=s.Mae(decoder_width=48, decoder_depth=1, decoder_heads=4, mask_ratio=.75, norm_pix_loss=True),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.95, weight_decay=.05, clip_norm=0.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(cpu_threads=2),
      evals={'knn': s.Knn(every='20 %', train_split=seen, split=test, batch_size=500),
             'logistic': s.Logistic(every='100 %', l2=(1e-4, 1e-3, 1e-2, .1), train_split=seen, split=test,
                                    batch_size=500)},
      checkpoints=s.Checkpoints(every='20 %'))
