"""What a run says of itself at its start, after each evaluation and at its end."""
from __future__ import annotations

import dataclasses
import pathlib

from vit_jax.config import files, schema
from vit_jax.evaluate.results import Final, Result
from vit_jax.jobs import build, summary
from vit_jax.record.checkpoint_files import Chosen


def result(score: float) -> Result:
  return Result({'top1': score, 'nll': 1.5}, 1_360, None, 'top1')


FINAL = Final({'test': {'student': result(.7), 'ema': result(.75)}}, result(.75), 'test', 'ema', {})


def test_the_start_says_what_is_trained_on_what_for_how_long(tmp_path: pathlib.Path) -> None:
  config = files.load('digits', ['length=4 epochs', 'model.dtype=bfloat16'])
  data = build.open_data(config)
  *_, parts = build.open_run(config, data)
  text = summary.start(parts, data, tmp_path)
  for said in (f'digits, in {tmp_path}', 'ViT of width 64, depth 3, 4 heads', '105,354 parameters, 0.0103 GFLOP',
               '1,437 images of 10 classes (digits/train), in memory', '360 images (digits/test): test',
               '45 steps of 128 images, 4.0 epochs', 'AdamW, learning rate 0.002, cosine, warm-up of 2 steps',
               '8 x cpu: data=8 fsdp=1 tensor=1, bfloat16, 1 microbatch a step', '1.6 MiB of state'):
    assert said in text, said
  narrow = schema.replaced(parts.config, {'model.quantize': schema.Quantize.FP8})
  assert ', bfloat16 (products of blocks in fp8), 1 microbatch' in summary.start(
      parts._replace(config=narrow), data, tmp_path)
  fewer = parts._replace(config=schema.replaced(parts.config, {'model.patch_dropout': .5}))
  assert ' steps\n          patches left out: 0.5\nLayout' in summary.start(fewer, data, tmp_path)
  masks = schema.Segmentation(source='masks:scenes')
  three = {'test': schema.TopK(), 'dense': masks, 'rest': schema.Knn(split='val')}
  for evals, said in ((three, ': test\n          masks:scenes, test: dense\n          digits, val: rest\nSchedule'),
                      ({'dense': masks}, 'Evaluated masks:scenes, test: dense\n'), ({}, 'Evaluated nothing\n')):
    assert said in summary.start(parts._replace(config=dataclasses.replace(parts.config, evals=evals)), data, tmp_path)
  assert not any(said in text for said in ('frozen for', 'texts such', 'left out', 'Best '))
  watched = schema.replaced(parts.config, {'checkpoints.keep_best': 'test/top1', 'train.early_stop.metric': 'test/nll'})
  assert ('\nBest      the checkpoint with the highest test/top1 is kept, and stands for the run\n'
          '          ends after 5 evaluations without a new best one by the lowest test/nll\nLayout') in summary.start(
              parts._replace(config=watched), data, tmp_path)
  rules = (schema.PathRule('backbone/.*', frozen_until='100 %'), schema.PathRule('head/kernel', frozen_until='100 %'))
  optimizer = dataclasses.replace(parts.config.optimizer, rules=rules)
  text = summary.start(parts._replace(config=dataclasses.replace(parts.config, optimizer=optimizer)), data, tmp_path,
                       text='a photo of a 7.')
  assert '\n          frozen for the whole run: backbone (104,704 of these parameters)\nTraining' in text
  assert "(digits/train), in memory\n          texts such as 'a photo of a 7.'\nEvaluated" in text
  counted = [int(line.split()[-1].replace(',', '')) for line in summary.parameters(parts).splitlines()[1:]]
  assert sum(counted) == 105_354


def test_an_evaluation_is_a_line_with_its_main_metric_and_the_number_of_images() -> None:
  assert summary.evaluated('test', 24, 1_150, FINAL.results['test']) == (
      'step 24/1,150  test/top1 70.00%  test/top1@ema 75.00%  of 1,360 images')
  loss = Result({'loss': .51234}, 7, None, '')
  assert summary.evaluated('val', 1, 2, {'student': loss}) == 'step 1/2  val/loss 0.5123  of 7 images'


def test_the_end_names_a_better_step_and_that_of_the_weights_only_if_they_are_not_the_last() -> None:
  rows = [{'step': 5., 'test/top1@ema': .8, 'test/top1': .9}, {'step': 6., 'test/top1@ema': .75}, {'step': 7.}]
  last, best = Chosen(7, 7), Chosen(5, 7, 'test/top1@ema', .8)
  assert summary.best(FINAL, rows, last) == (
      'The best test/top1@ema was 80.00%, at step 5; the weights of the run are those of step 7.')
  assert 'at step 5; its checkpoint is kept, and predict, evaluate and other jobs use it' in summary.best(
      FINAL, rows, best)
  other = Chosen(6, 7, 'test/nll', 1.5)  # and the best value of the metric has no checkpoint
  assert 'at step 5; the weights of the run are those of step 6, the best test/nll (1.5).' in summary.best(
      FINAL, rows, other)
  assert summary.best(FINAL, rows[1:], last) == summary.best(FINAL, [], last) == summary.best(FINAL, rows, None) == ''
  said = 'The weights of the run are those of step 6, the best test/nll (1.5).'
  assert summary.best(FINAL, [], other) == said  # without a record, the best value is not known
  nothing = FINAL._replace(headline=None)
  assert summary.best(nothing, rows, last) == ''
  assert summary.best(nothing, rows, other) == said


def test_the_end_says_what_the_time_of_all_starts_was_spent_on() -> None:
  start = {'event': 'start', 'devices': 8}
  spent = [start, {'event': 'goodput', 'step': 50, 'total_s': 360.2,
                   'seconds': {'step': 80., 'data_wait': 20., 'evaluate': 260., 'checkpoint': .2}}]
  text = summary.spent(spent, num_steps=50, batch_size=16)
  assert text.startswith('Time: 6 min 00 s (evaluation 4 min 20 s, steps 1 min 20 s, waiting for data 20 s). 8 images')
  assert '0.8 device-hours on 8 x cpu.' in text
  assert 'images/s' not in summary.spent(spent, num_steps=0, batch_size=16)
  again = {**start, 'resumed_from': 50, 'devices': 4}
  text = summary.spent([*spent, again, {**spent[1], 'step': 90}], num_steps=90, batch_size=16)
  assert text.startswith('Time: 12 min 00 s in 2 starts (evaluation 8 min 40 s, ') and ' 1.2 device-hours' in text


def test_the_last_line_has_the_main_result() -> None:
  final = {'step': 1_200, 'seconds': 81.4, 'headline': FINAL.headline_name, 'metrics': FINAL.metrics,
           'num_examples': {'test': 1_360}}
  assert summary.last_line(final, Chosen(1_200, 1_200), 'a/report.html') == (
      'test/top1 of the ema weights: 75.00% of 1,360 images, 81 s. Report: a/report.html')
  assert summary.last_line(final, Chosen(5, 1_200, 'test/nll', 1.), 'r').startswith(
      'test/top1 of the ema weights at the last step, 1,200: 75.00%')
  assert summary.last_line({**final, 'headline': ''}, None, 'r') == 'Done in 81 s, without an evaluation. Report: r'
  del final['headline']  # of an older version
  assert summary.last_line(final, None, 'r') == 'Done in 81 s. Report: r'
