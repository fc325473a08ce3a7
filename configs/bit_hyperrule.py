"""Fine-tunes by BiT-HyperRule: length, resolution and mixup follow from the data, nothing is tuned.

Data:     cifar10 cifar100 imagenet2012 pets flowers resisc45 kitti from TFDS; or `own`, for which the rule needs the
          number of training examples and the side of a typical image
Source:   BiT, arXiv 1912.11370, section 3.3: SGD, lr 0.003, batch 512; 500, 10k or 20k steps; 160 px cropped to 128 for
          images below 96 px, else 512 cropped to 480; mixup 0.1 from 20,000 examples on.
Differs:  Images are cropped before they are resized, there after: equal up to fractions of a pixel.
Run:      python -m vit_jax.main --config=configs/bit_hyperrule.py:BiT-R50x1,cifar10 --config.init_from=FILE --workdir=…
          --config=configs/bit_hyperrule.py:BiT-R50x1,own,examples=3000,side=500 --config.data.source=folder:PATH
Plan:     BiT-R152x4 at 480 px is 1.7 TFLOP an image forward
Expected: BiT-M ImageNet R50x1 80.68 %, R152x2 85.15 % (their repository). Not run here.
"""
import math

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import finetune, sizes, studies

MODELS = ('BiT-R50x1', *(name for name in finetune.MODELS if name != 'BiT-R50x1'))
LENGTHS = (  # up to so many examples: steps, last steps before the drops, steps of warm-up
    (20_000, 500, (200, 300, 400), 100), (500_000, 10_000, (3_000, 6_000, 9_000), 500),
    (math.inf, 20_000, (6_000, 12_000, 18_000), 500))
SMALL_PX, MIXUP_FROM = 96, 20_000


def get_config(arguments: str = '') -> s.Config:
  """The run: model and dataset, then phase=… px=…; of `own` data also examples=… side=…."""
  given = s.parse_arg(arguments, model=MODELS, dataset=tuple(finetune.DATASETS), phase=finetune.PHASES, px=('',),
                      examples=('',), side=('',))
  name, dataset, phase = given['model'], given['dataset'], given['phase']
  model, known = sizes.model(name), finetune.DATASETS[dataset]
  num_examples = studies.number('examples', given['examples']) or known.num_examples
  if not num_examples:
    raise UserError(f'examples, side: expected the number of training examples and the side of a typical image of '
                    f'{known.source}, got none. Add examples=N,side=PX to the arguments of the config.')
  resize, crop = (160, 128) if (studies.number('side', given['side']) or known.side_px) < SMALL_PX else (512, 480)
  _, steps, drops, warmup = next(row for row in LENGTHS if num_examples < row[0])
  return s.Config(
      name=f'finetune {name} {dataset} hyperrule', length=f'{steps} steps', batch_size=512,
      image_px=(finetune.side(studies.number('px', given['px']) or crop, model),) * 2,
      data=finetune.data(dataset, phase, s.Recipe(
          crop=s.Crop.WINDOW, crop_area=((crop / resize)**2,) * 2, flip=True,
          mixup=.1 if num_examples >= MIXUP_FROM else 0.)),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.Sgd(
          lr=.003, momentum=.9, weight_decay=0., clip_norm=0., schedule=s.Schedule(
              s.Decay.STEPS, warmup=f'{warmup} steps', warmup_form=s.Warmup.FROM_ZERO,
              milestones=tuple(f'{step + 1} steps' for step in drops), gamma=.1)),
      evals={'test' if phase == 'final' else 'val': s.TopK(every='10 %')},
      checkpoints=s.Checkpoints(every='10 %'),
      init_settings=s.InitSettings.NETWORK)  # BiT resizes images without preserving the aspect ratio
