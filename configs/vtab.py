"""A study: VTAB-1k, fine-tuning on 1,000 examples of each of 19 tasks; group means, mean and deviation over seeds.

Data:     sets of TFDS as they are prepared, in --config.data.data_dir or $TFDS_DATA_DIR. A task without
          its dataset is reported with install instructions, and the others continue.
Source:   protocol=vit: ViT paper, Table 4 and Appendix B.1.1: 2,500 steps, SGD 0.01, batch 512, pre-processing of BiT
          (arXiv 1912.11370, section 3 and Appendix F) at 384 px: images are resized to a square, a random smaller
          square is cropped, and flipped at random, except for the tasks in `UNFLIPPED` and `UNCROPPED`. augreg: arXiv
          2106.10270, section 3.4: four rates, 500 or 2,500 steps, chosen for each task by val200
Differs:  Not stated by the paper and chosen here: the square that 384 px are cropped from (448 px, as in BiT) and the
          warm-up (AugReg's). AugReg's crops of VTAB were not checked; here they are those of protocol=vit. Dropout is
          off; the program that fine-tunes on other datasets has 0.1 for L/16 and H/14.
Run:      python -m vit_jax.main --job=study --config=configs/vtab.py:L/16 --workdir=runs/vtab --config.init_from=FILE
          …/vtab.py:B/16,protocol=augreg,seeds=5,px=224; …/vtab.py:Ti/16,tasks=clevr/count+pets selects some tasks
Plan:     19 x 3 runs of 1.28 million images: for B/16 at 384 px 0.43 exaFLOPs each
Expected: L/16 from ImageNet-21k 72.72, from JFT 76.28; H/14 from JFT 77.63 (the paper's Table 2)
"""
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import finetune, sizes, studies, vtab
from vit_jax.recipes.studies import Point

UNFLIPPED = ('dsprites/orientation', 'dsprites/x_position', 'smallnorb/azimuth')  # BiT, Appendix F
UNCROPPED = ('clevr/count', 'clevr/distance', 'dmlab', 'kitti/distance', 'dsprites/x_position')  # likewise
CROPPED_FROM = 448 / 384  # side of the square that is cropped, over that of the crop
POINTS = {  # learning rate, steps, warm-up steps
    'vit': (Point(.01, 2_500, 200),),
    'augreg': tuple(Point(rate, steps, warmup) for steps, warmup in ((500, 100), (2_500, 200))
                    for rate in (.001, .003, .01, .03))}


def get_config(arguments: str = '') -> s.Study:
  """The study: the model, then protocol=… seeds=… px=… tasks=…."""
  given = s.parse_arg(arguments, model=finetune.MODELS, protocol=tuple(POINTS), seeds=studies.seeds(3), px=('',),
                      tasks=('',))
  tasks, points = vtab.choose(given['tasks']), POINTS[given['protocol']]

  def build(task: str, point: Point | None, phase: str) -> s.Config:
    assert point
    return run(given['model'], task, point, phase, px=studies.number('px', given['px']) or 384)

  grid = studies.Grid(build, {task: {point.name: point for point in points} for task in tasks})

  def final(results: s.Results) -> dict[str, s.Config]:
    if found := grid.finals(results, int(given['seeds'])):
      return found
    raise UserError('results: expected at least one finished run to choose by, got none. '
                    'Start the study again, to repeat the runs that failed.')

  is_tried = len(points) > 1
  return s.Study(f'VTAB-1k {given["model"]} {given["protocol"]}', grid.tunings() if is_tried else final({}),
                 (final,) if is_tried else (), lambda results: vtab.rows(results, tasks))


def run(name: str, task: str, point: Point, phase: str, *, px: int) -> s.Config:
  """A run on a task; `phase` is `final`, or `tune` for choosing by val200."""
  model, is_final = sizes.model(name), phase == 'final'
  return s.Config(
      name=f'vtab {task}', length=f'{point.steps} steps', batch_size=512, image_px=(finetune.side(px, model),) * 2,
      data=s.Data(
          source=f'vtab:{task}', train_split='train800val200' if is_final else 'train800',
          eval_split='test' if is_final else 'val200', num_examples=1000 if is_final else 800,
          num_classes=vtab.TASKS[task][1], recipe=recipe(task)),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.Sgd(lr=point.rate, momentum=.9, weight_decay=0., mu_dtype=s.DType.BF16, clip_norm=1.,
                      schedule=s.Schedule(s.Decay.COSINE, warmup=f'{point.warmup} steps',
                                          warmup_form=s.Warmup.FROM_ZERO, end_lr=0.)),
      evals={'test' if is_final else 'val': s.TopK(every='50 %')},
      checkpoints=s.Checkpoints(every='20 %', keep_latest=1),
      init_settings=s.InitSettings.NETWORK)  # VTAB resizes images without preserving the aspect ratio


def recipe(task: str) -> s.Recipe:
  """BiT's pre-processing of a task, with the bilinear resizing of its program."""
  flip = task not in UNFLIPPED
  if task in UNCROPPED:
    return s.Recipe(crop=s.Crop.RESIZE, flip=flip)
  return s.Recipe(crop=s.Crop.WINDOW, crop_area=(CROPPED_FROM**-2,) * 2, flip=flip)
