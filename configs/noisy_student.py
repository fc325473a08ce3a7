"""A study: Noisy Student. A student learns, with noise, from images that its teacher labels, and is the next teacher.

Data:     set=imagenet: TFDS `imagenet2012`, and JFT-300M without its labels, which is internal to Google: any folder or
          TFDS set does, unlabeled=folder:PATH. set=cifar10: TFDS `cifar10`, or source=folder:PATH; a tenth of its
          labels is used, and all other training images without theirs.
Source:   arXiv 1911.04252 and its program (google-research/noisystudent@aac52bf: main.py, utils.py, preprocessing.py,
          local_scripts/imagenet): EfficientNet-B7 teaches L2 at 475 px, three rounds; of each class 130,000 images with
          a probability of at least 30 %, soft labels; 14 (in the last round 28) such images for each labeled one,
          2,048 of these a step; RandAugment of two operations and magnitude 27, dropout 0.5, stochastic depth to 0.2;
          350 epochs of the labeled images; RMSProp (0.9, momentum 0.9, eps 0.001), 0.016 for 256 labeled images,
          times 0.97 every 2.4 epochs, 5 epochs of warm-up, L2 penalty 1e-5 on all but BatchNorm, average 0.9999. Then
          1.5 epochs at 800 px of labeled images without augmentation, at the final learning rate of the run, the first
          layers fixed. The program divides the sum of the losses of all images by the number of labeled ones; here it
          is the mean, with eps, the squares that RMSProp begins with and the penalty divided to match, which gives the
          same updates. Ratios, rounds and the length at 800 px are of the paper and were not checked again.
Differs:  Labeled images of a student have no label smoothing (0.1 there); the head starts at zero (there uniform in ±1
          / sqrt(classes)); BatchNorm is over the whole batch. Which layers are fixed is not published: here the stem
          and stages 1 to 4, whose running statistics are still updated.
Run:      python -m vit_jax.main --job=study --config=configs/noisy_student.py:cifar10 --workdir=runs/noisy
          configs/noisy_student.py:cifar10,rounds=2,model=BiT selects another network (ViT, hybrid, BiT, or a name
          such as EfficientNet-B0); --config=configs/noisy_student.py:cifar10,teacher=FILE starts from these weights.
          set=imagenet ends with the run at 800 px, which starts from the last student's average.
Plan:     cifar10: three runs of 900 steps of 64 to 128 images, about 15 minutes on 2 processor cores
Expected: ImageNet 88.4 % with L2 (the paper). CIFAR-10 (JPEG copies, all 10,000 test images): with 900 steps teacher
          35.0, students 34.4 and 33.9 %, too few steps to gain; rounds=1 with --config.length='3600 steps' teacher
          46.3, student 49.3 %, 25 CPU minutes.
"""
import dataclasses

from vit_jax.config import schema as s
from vit_jax.recipes import noisy_student, sizes

ROUNDS = ('', '1', '2', '3', '4', '5')
LABELED = 2_048  # of a step, of ImageNet
EPOCH = 1_281_167 / LABELED  # steps of the labeled images
RATE, DROP = .016, .97  # main.py, utils.py
DECAYED = ('.*/kernel', '.*/gate/.*/bias', 'head/bias')  # all but BatchNorm
FIXED = 'backbone/(stem|stage[1-4])/.*'
PER_CLASS = {'imagenet': 130_000, 'cifar10': 4_000}


def get_config(arguments: str = '') -> s.Study:
  """The study: set, then source=… unlabeled=… model=… rounds=… teacher=…."""
  given = s.parse_arg(arguments, set=('imagenet', 'cifar10'), source=('',), unlabeled=('',), model=('',),
                      rounds=ROUNDS, teacher=('',))
  is_small, model = given['set'] == 'cifar10', given['model']
  source = given['source'] or ('tfds:cifar10' if is_small else 'tfds:imagenet2012')

  def student(number: int) -> s.Config:
    return small_run(model or 'ViT', source, number) if is_small else large_run(model, source, number)

  def pseudo(number: int) -> s.Pseudo:
    unlabeled = given['unlabeled'] or (source if is_small else 'folder:JFT-300M')
    ratio = 1 if is_small else unlabeled_ratio(number)
    return s.Pseudo(source=unlabeled, split='train[10%:]' if is_small and not given['unlabeled'] else 'train',
                    threshold=.5 if is_small else .3, per_class=PER_CLASS[given['set']], share=ratio / (1 + ratio),
                    top=10)

  num_rounds = int(given['rounds'] or (2 if is_small else 3))
  first, then = noisy_student.rounds(student, pseudo, num_rounds, teacher=given['teacher'])
  if not is_small:
    last = noisy_student.name(int(given['rounds'] or 3))
    then = (*then, lambda results: high_resolution(results, last))
  return s.Study(f'Noisy Student {given["set"]}', first, then, noisy_student.rows, noisy_student.FIGURES)


def unlabeled_ratio(number: int) -> int:
  """Unlabeled images for each labeled one."""
  return 28 if number == 3 else 14


def large_run(model: str, source: str, number: int) -> s.Config:
  """On ImageNet: B7, or the given model, and then L2."""
  name = model or ('EfficientNet-L2' if number else 'EfficientNet-B7')
  network, px = sizes.model(name), 224
  if isinstance(network, s.EfficientNet):
    px = 475 if name == 'EfficientNet-L2' else sizes.efficientnet_px(name.removeprefix('EfficientNet-'))
    network.dropout, network.drop_path = .5, .2
  # Images a step for each labeled one. The program's loss is this many times the mean.
  scale = 1 + unlabeled_ratio(number) if number else 1
  return s.Config(
      name=noisy_student.name(number), length='218_949 steps',  # 350 epochs of 1,281,167 labeled images
      batch_size=LABELED * scale, image_px=(px, px),
      data=s.Data(source=source, eval_split='validation', num_examples=1_281_167, num_classes=1_000, recipe=recipe(px)),
      model=network, objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1 if not number else 0.),
      optimizer=s.RMSProp(
          lr=RATE, base_batch_size=256 * scale, b2=.9, weight_decay=1e-5 / scale, clip_norm=0., eps=1e-3 / scale**2,
          initial_scale=1. / scale**2, momentum=.9,
          weight_decay_mask=DECAYED if isinstance(network, s.EfficientNet) else s.Optimizer().weight_decay_mask,
          schedule=s.Schedule(
              s.Decay.EXPONENTIAL, warmup=f'{5 * EPOCH:.0f} steps', warmup_form=s.Warmup.FROM_ZERO,
              gamma=DROP, every=f'{2.4 * EPOCH:.0f} steps')),
      train=s.Train(ema=.9999), evals={'val': s.TopK(every='5 %')}, checkpoints=s.Checkpoints(every='1 %'))


def recipe(px: int) -> s.Recipe:
  """The program's images: TensorFlow's crops, bicubic without antialias, evaluated with 32 px around the center."""
  return s.Recipe(
      exif_orientation=s.Exif.FALSE,
      crop=s.Crop.INCEPTION, crop_area=(.08, 1.), crop_aspect=(.75, 4 / 3), flip=True,
      crop_sampler=s.CropSampler.TENSORFLOW, crop_tries=10, crop_covered=.1,  # preprocessing.py
      randaugment=s.RandAugment(layers=2, magnitude=27., table=s.OpTable.AUGREG),
      interpolation=s.Interpolation.BICUBIC, eval_resize_px=px + 32, mean=(.485, .456, .406), std=(.229, .224, .225))


def high_resolution(results: s.Results, last: str) -> dict[str, s.Config]:
  """1.5 epochs at 800 px from the last student on: labeled images as evaluation sees them, the first layers fixed."""
  student = results.get(last)
  if student is None or not isinstance(student.config.model, s.EfficientNet):
    return {}
  before, px = student.config, 800
  plain = dataclasses.replace(recipe(px), crop=s.Crop.RESIZE, flip=False, crop_area=s.Recipe().crop_area,
                              crop_sampler=s.Recipe().crop_sampler, crop_tries=s.Recipe().crop_tries,
                              crop_covered=s.Recipe().crop_covered, randaugment=s.RandAugment())
  ended = RATE * DROP ** (218_949 // round(2.4 * EPOCH))  # of the schedule's last step
  return {noisy_student.HIGH: dataclasses.replace(
      before, name=noisy_student.HIGH, length='1.5 epochs', batch_size=LABELED, image_px=(px, px),
      init_from=student.workdir,
      data=dataclasses.replace(before.data, recipe=plain, pseudo=s.Pseudo()),
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=.1),
      optimizer=s.RMSProp(lr=ended, base_batch_size=256, b2=.9, eps=.001, initial_scale=1., momentum=.9,
                          weight_decay=1e-5, clip_norm=0., weight_decay_mask=DECAYED,
                          rules=(s.PathRule(FIXED, frozen_until='100 %'),),
                          schedule=s.Schedule(s.Decay.CONSTANT, warmup='0 steps')),
      evals={'val': s.TopK(every='50 %')}, checkpoints=s.Checkpoints(every='20 %'))}


def small_run(model: str, source: str, number: int) -> s.Config:
  """On a tenth of CIFAR-10, at 32 px; a student sees as many labeled images a step as the teacher."""
  network = sizes.small(model) if model in sizes.SMALL else sizes.model(model)
  if isinstance(network, s.ViT):
    network.dropout, network.drop_path = .1, .1
  return s.Config(
      name=noisy_student.name(number), length='900 steps', batch_size=128 if number else 64,
      image_px=(sizes.SMALL_PX,) * 2,
      data=s.Data(source=source, train_split='train[:10%]', num_examples=5_000, num_classes=10, recipe=s.Recipe(
          crop=s.Crop.RESIZE, flip=True, shift_px=2, randaugment=s.RandAugment(
              layers=2, magnitude=9., magnitude_std=.5, probability=.5, table=s.OpTable.TIMM))),
      model=network, objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=2e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='10 %')),
      train=s.Train(ema=.99), evals={'test': s.TopK(every='50 %', batch_size=500)},
      checkpoints=s.Checkpoints(every='50 %', keep_latest=1))
