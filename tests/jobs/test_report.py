"""The report: a page that opens without a network, whichever files of a run exist; and the job that writes it."""
from __future__ import annotations

import html.parser
import json
import math
import os
import pathlib
import re
import sys

import browser
import numpy as np
import pytest
import saved

from vit_jax import main
from vit_jax.config import engine, provenance, schema
from vit_jax.jobs import report
from vit_jax.record import checkpoint_files
from vit_jax.record import writer as writer_lib


@pytest.fixture
def begun(tmp_path: pathlib.Path) -> pathlib.Path:
  """A run that was begun, with the description of a checkpoint."""
  config, meta = schema.Config(name='mine'), tmp_path / 'run' / 'checkpoints' / '3' / checkpoint_files.META
  meta.parent.mkdir(parents=True)
  meta.write_text(json.dumps(checkpoint_files.seal({'step': 3, provenance.SETTINGS: provenance.settings(config)})))
  (tmp_path / 'run' / 'config.json').write_text(engine.to_json(config))
  (tmp_path / 'run' / 'final.json').write_text('{"step": 3}')
  return tmp_path / 'run'


def report_job(workdir: pathlib.Path) -> int:
  return main.run(['report', f'--workdir={workdir}'])


def test_the_page_is_all_that_is_written(begun: pathlib.Path) -> None:
  saved.half_write(begun / 'checkpoints')
  before = saved.snapshot(begun)
  assert report_job(begun) == 0
  after = saved.snapshot(begun)
  assert set(after) - set(before) == {'report.html'} and {name: after[name] for name in before} == before


def test_a_folder_that_is_no_run_gets_no_page(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'notes.txt').write_text('x')
  assert report_job(tmp_path) == 2
  assert [p.name for p in tmp_path.iterdir()] == ['notes.txt']
  error = capsys.readouterr().err
  assert f'error: --workdir={tmp_path}: expected the directory of a run, got one without' in error


def test_a_page_of_another_program_is_not_replaced(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'metrics.jsonl').write_text('{"event": "start", "time_s": 1}\n')
  (tmp_path / 'report.html').write_text('mine')
  assert report_job(tmp_path) == 2 and (tmp_path / 'report.html').read_text() == 'mine'
  assert 'expected none or a page of vit-jax at' in capsys.readouterr().err
  (tmp_path / 'report.html').unlink()
  (tmp_path / 'config.json').write_text('{')  # damaged: the page names it, also when it is written again
  for _ in range(2):
    assert report_job(tmp_path) == 2 and (tmp_path / 'report.html').exists()
    assert 'The page was written without the damaged files' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['config.json', 'final.json', 'evaluate.json'])
@pytest.mark.parametrize(('content', 'said'), [
    (b'', 'an empty file'), (b'[]', 'a list of 0'), (b'{"a', 'no JSON at line 1'), (b'\xff\x00', 'text that is not'),
    (b'[' * 100_000, 'JSON that is nested too deep')])
def test_damaged_records_are_named_with_status_2_beside_a_page_of_the_rest(
    begun: pathlib.Path, name: str, content: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  (begun / name).write_bytes(content)
  assert report_job(begun) == 2
  assert f'{begun / name}: expected a JSON object, got {said}' in capsys.readouterr().err
  assert name in (begun / 'report.html').read_text()


@pytest.mark.parametrize('name', ['config.json', 'final.json', 'evaluate.json'])
def test_a_record_that_is_too_large_is_not_read(begun: pathlib.Path, name: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
  (begun / name).touch()
  os.truncate(begun / name, 2**26 + 1)
  assert report_job(begun) == 2
  assert f'{begun / name}: expected a JSON object, got a file of 67,108,865 bytes' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['config.json', 'final.json', 'evaluate.json', 'metrics.jsonl',
                                  'predictions.npz'])
@pytest.mark.parametrize('kind', ['a pipe', 'a device'])
def test_what_is_no_regular_file_is_named_and_not_waited_for(
    begun: pathlib.Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
  (begun / 'metrics.jsonl').write_text('{"step": 3, "time_s": 1, "train/loss": 2}\n')
  (begun / name).unlink(missing_ok=True)
  os.mkfifo(begun / name) if kind == 'a pipe' else (begun / name).symlink_to('/dev/zero')
  assert report_job(begun) == 2 * name.endswith('.json')
  page, said = (begun / 'report.html').read_text(), f'{kind} in place of a file'
  assert said in page or name.endswith('.json') and said in capsys.readouterr().err


def test_a_config_of_another_run_is_refused(begun: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (begun / 'config.json').write_text(engine.to_json(schema.Config(image_px=(64, 64))))
  assert report_job(begun) == 2
  error = capsys.readouterr().err
  assert 'image_px: 224,224 in the checkpoint, 64,64 in the config' in error and not (begun / 'report.html').exists()


VOID = {'meta', 'link', 'img', 'br', 'wbr'}


class Parser(html.parser.HTMLParser):
  """Checks that tags nest, and collects what is shown and what is referred to."""

  def __init__(self) -> None:
    super().__init__()
    self.open: list[str] = []
    self.tags: list[str] = []
    self.references: list[str] = []
    self.text = ''

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    self.tags.append(tag)
    if tag not in VOID:
      self.open.append(tag)
    for name, value in attrs:
      if name in ('src', 'href', 'xlink:href'):
        self.references.append(value or '')

  def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    self.handle_starttag(tag, attrs)
    if tag not in VOID:
      self.open.pop()

  def handle_endtag(self, tag: str) -> None:
    assert self.open.pop() == tag

  def handle_data(self, data: str) -> None:
    self.text += data if self.open[-1:] not in (['style'], ['script']) else ''


def parse(path: str) -> Parser:
  text = pathlib.Path(path).read_text(encoding='utf-8')
  parser = Parser()
  parser.feed(text)
  parser.close()
  assert parser.open == []
  assert all(re.match('data:|#', reference) for reference in parser.references), parser.references
  assert not re.search(r'https?://|@import|url\((?!#)', text)
  return parser


def words(path: str) -> str:
  """The text of a page, with one space between elements."""
  page = pathlib.Path(path).read_text(encoding='utf-8').replace('<wbr>', '').replace('&nbsp;', ' ')
  return ' '.join(re.sub('<[^>]*>', ' ', page).split())


def write_metrics(workdir: pathlib.Path) -> None:
  for resumed_from, steps in ((None, range(1, 8)), (5, range(6, 11))):
    with writer_lib.Writer(workdir, process_index=0, resumed_from=resumed_from, progress_total=10,
                           progress=False) as writer:
      writer.event('start', command=['vit-jax', '--workdir=my run'], versions={'jax': '0.10.2'})
      for step in steps:
        writer.write(step, {'train/loss': math.nan if step == 3 else 2 / step, 'train/lr': 1e-3,
                            'train/grad_norm': 1., 'train/images_per_s': 200. + step})
      writer.write(steps[-1], {'test/top1': .5, 'test/top1@ema': .75})
      norms = {'backbone/blocks/attn/query/kernel': [1., math.nan, 0.], 'head/bias': 2.}
      writer.event('norms', step=steps[-1], grad=norms, param=norms, update=norms)
      writer.event('goodput', step=5, seconds={'step': 50., 'compile': 10.})
      writer.event('goodput', step=steps[-1], seconds={'step': 80., 'compile': 20., 'data_wait': math.nan})


def write_predictions(workdir: pathlib.Path, *, classes: int) -> None:
  label = np.arange(37) % classes
  top = np.stack([label, (label + 1) % classes], 1)
  top[:5] = top[:5, ::-1]
  names = np.array([f'<kind {c}>' for c in range(classes)])
  np.savez(workdir / 'predictions.npz', split='test', view='student', class_names=names,
           index=np.arange(37) + 100, label=label.astype(np.int32), top=top.astype(np.int32),
           probability=np.full((37, 2), .5, np.float32), example_index=np.array([100, 102, 110, 999]),
           example_name=np.array(['a.png', 'b.png', 'c.png', 'd.png']),
           example_image=np.zeros((4, 8, 8, 3), np.uint8))


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
  folder = tmp_path / 'run'
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(
    {'name': 'digits & <more>', 'model': {'depth': 6, 'sizes': [1, {'deep': None}]}, 'evals': {}}))
  (folder / 'final.json').write_text(json.dumps(
    {'step': 10, 'seconds': 200., 'params_digest': 'abc', 'num_params': 2_680_000,
     'metrics': {'test/top1': .9806, 'test/nll': 'nan'}, 'num_examples': {'test': 37}}))
  (folder / 'evaluate.json').write_text(json.dumps({'top1': .98, 'num_examples': 37, 'metrics': {'a/b': 1}}))
  write_metrics(folder)
  write_predictions(folder, classes=7)
  return folder


def test_the_page_shows_all_files_of_a_run(workdir: pathlib.Path) -> None:
  page = parse(report.write_report(workdir))
  for text in ('digits & <more>', 'finished at step 10', 'resumed 1×, 2 steps repeated', '98.06 %',
               'test/top1 of 37 images', '83.3 %', 'Precision, recall and F1 by class', '3 min 20 s', '206',
               '2,680,000', 'learning rate', 'test/top1@ema', 'attn/query/kernel', '2 min 10 s65.0 %', '40 s20.0 %',
               'before a kill30 s15.0 %', '<kind 3>', 'a.png', "vit-jax '--workdir=my run'", '0.10.2', 'deep'):
    assert text in page.text, text
  assert page.tags.count('svg') == 10  # five curves, the updates over time, three heat maps, one confusion matrix
  assert page.tags.count('img') == 3  # the fourth example is in no split
  assert 'Not in this report' not in page.text


def test_the_page_shows_health_and_alarms(workdir: pathlib.Path) -> None:
  with writer_lib.Writer(workdir, process_index=0, resumed_from=10, progress_total=20, progress=False) as writer:
    for step in (11, 12, 13):
      writer.write(step, {'health/rank_me@teacher': 1. + step, 'health/alignment': .1, 'train/teacher_entropy': 2.,
                          'train/used_prototypes': .5, 'train/deviation': .4})
    for step in (12, 13):
      writer.event('alarm', step=step, metric='health/rank_me@teacher', value=1.25, below=2.)
  text = words(report.write_report(workdir))
  assert 'Alarm, 2 times, first at step 12: health/rank_me@teacher was 1.25, below 2' in text
  for title in ('RankMe of features', 'Spread of features', 'Alignment and uniformity', 'Teacher', 'Prototypes in use'):
    assert title in text, title


@pytest.mark.usefixtures('no_charts')
def test_wrong_and_correct_examples_are_shown_separately(workdir: pathlib.Path) -> None:
  text = parse(report.write_report(workdir)).text
  wrong, correct = text[text.index('Wrong: 5 of 37'):].split('Correct: 32 of 37')
  assert 'a.png' in wrong and '<kind 1>, label: <kind 0>' in wrong
  assert 'c.png' in correct[:200]


def write_gallery(workdir: pathlib.Path, *, is_single: bool = True) -> None:
  """Class a has one mistake, class b two, of which the second is the more confident one, and class c none."""
  label, predicted = np.array([0, 0, 1, 1, 1, 2]), np.array([0, 1, 0, 2, 1, 2])
  np.savez(workdir / 'predictions.npz', split='test', view='student', is_single=is_single,
           class_names=np.array(['a', 'b', 'c']), index=np.arange(6), label=label,
           top=np.stack([predicted, (predicted + 1) % 3], 1),
           probability=np.stack([[.9, .8, .6, .7, .9, .9], np.full(6, .1)], 1).astype(np.float32),
           example_index=np.array([1, 2, 3]),
           example_name=np.array(['/data/set/a/1.jpg', '/data/set/b/2.jpg', '/data/set/b/3.jpg']),
           example_image=np.random.default_rng(0).integers(0, 255, (3, 120, 90, 3)).astype(np.uint8))


@pytest.mark.usefixtures('no_charts')
def test_mistakes_are_shown_by_class_the_most_confident_first(workdir: pathlib.Path) -> None:
  write_gallery(workdir)
  path = report.write_report(workdir)
  assert ('Wrong: 3 of 6 images Files are in /data/set/ b: 2 of 3 wrong c , label: b · 70.0 % b/3.jpg a , label: b · '
          '60.0 % b/2.jpg a: 1 of 2 wrong b , label: a · 80.0 % a/1.jpg') in words(path)
  assert pathlib.Path(path).read_text().count('src="data:image/jpeg;base64,/9j/') == 3


@pytest.mark.usefixtures('no_charts')
def test_the_table_of_classes_is_sorted_by_f1_and_has_the_means(workdir: pathlib.Path) -> None:
  write_gallery(workdir)
  text = words(report.write_report(workdir))
  assert ('class precision recall F1 images predicted b 50.0 % 33.3 % 40.0 % 3 2 a 50.0 % 50.0 % 50.0 % 2 2 '
          'c 50.0 % 100.0 % 66.7 % 1 2') in text
  assert 'Macro mean of 3 classes: precision 50.0 %, recall 61.1 %, F1 52.2 %. Weighted by images: precision' in text


@pytest.mark.usefixtures('no_charts')
def test_images_with_several_classes_have_no_table_of_classes(workdir: pathlib.Path) -> None:
  write_gallery(workdir, is_single=False)
  text = parse(report.write_report(workdir)).text
  assert 'Wrong: 3 of 6 images' in text and 'recall' not in text


@pytest.mark.slow(reason='2 s: a browser')
@pytest.mark.skipif(browser.find() is None, reason='needs Chromium')
def test_a_click_on_a_title_sorts_the_table_of_classes(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
  write_gallery(workdir)
  path = report.write_report(workdir)
  with browser.Page(tmp_path / 'profile') as page:
    page.show(width=390, dark=False)
    page.open(pathlib.Path(path).as_uri())
    def order() -> str:
      rows = '[...document.querySelectorAll(".sortable tbody tr")]'
      return page.run(f'{rows}.map(row => row.cells[0].textContent).join()')
    assert order() == 'b,a,c'
    for column, expected in ((1, 'a,b,c'), (1, 'c,b,a'), (3, 'c,a,b'), (4, 'c,a,b'), (4, 'b,a,c'), (5, 'b,a,c')):
      page.click(f'.sortable th:nth-child({column}) button')
      assert order() == expected, column
    assert page.run('document.documentElement.scrollWidth') == 390 and not page.errors()


@pytest.mark.usefixtures('no_charts')
def test_one_table_of_results_is_enough_unless_the_run_was_evaluated_again(workdir: pathlib.Path) -> None:
  metrics = {'test/top1': .9806, 'test/nll': .25}
  (workdir / 'final.json').write_text(json.dumps({'step': 10, 'metrics': metrics}))
  (workdir / 'evaluate.json').write_text(json.dumps({'step': 10, 'top1': .9806, 'metrics': metrics}))
  text = parse(report.write_report(workdir)).text
  assert text.count('test/nll') == 1 and 'evaluated at step' not in text
  (workdir / 'evaluate.json').write_text(json.dumps({
      'step': 9, 'top1': .97, 'metrics': {'test/nll': .5},
      'preprocessing': {'geometry': 'torchvision', 'resize_px': 248}}))
  text = parse(report.write_report(workdir)).text
  assert text.count('test/nll') == 2 and 'evaluated at step 9' in text
  assert 'Evaluated images: geometry torchvision, resize_px 248' in text
  (workdir / 'evaluate.json').write_text(json.dumps({'metrics': metrics, 'preprocessing': {
      'resize_px': 0, 'image_px': [16, 16], 'antialias': False, 'mean': [.5, .25, .5]}}))
  text = parse(report.write_report(workdir)).text
  assert 'Evaluated images: image_px 16 × 16, antialias no, mean 0.5 0.25 0.5, resized without a crop' in text


@pytest.mark.usefixtures('no_charts')
def test_an_evaluation_that_was_written_elsewhere_is_shown_there_beside_the_training_of_the_run(
    workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
  before = {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file()}
  (other := tmp_path / 'other').mkdir()
  (other / 'evaluate.json').write_text(json.dumps({'step': 9, 'metrics': {'test/nll': .5}}))
  path = report.write_report(workdir, evaluated=other)
  text = parse(path).text
  assert path == str(other / 'report.html') and 'evaluated at step 9' in text and 'learning rate' in text
  assert 'predictions.npz: no such file' in text and 'Confusion' not in text
  assert {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file()} == before


def test_the_page_of_weights_that_were_evaluated_has_their_results_and_misses_no_training(
    tmp_path: pathlib.Path) -> None:
  (tmp_path / 'weights.json').write_text(json.dumps({'source': 'vit.npz', 'family': 'timm'}))
  (tmp_path / 'config.json').write_text(json.dumps({'name': 'evaluate'}))
  (tmp_path / 'evaluate.json').write_text(json.dumps({
      'step': 0, 'evaluation': 'test', 'num_examples': 37, 'metrics': {'test/top1': .75, 'test/nll': 1.}}))
  write_predictions(tmp_path, classes=7)
  text = parse(report.write_report(tmp_path)).text
  assert 'an evaluation of vit.npz' in text and '75.00 %test/top1 of 37 images' in text
  assert 'Not in this report' not in text and 'running or stopped' not in text


@pytest.mark.usefixtures('no_charts')
@pytest.mark.parametrize(('step', 'title'), [({'step': 16}, 'evaluated at step 16'),
                                             ({'step': 0}, 'evaluated'), ({}, 'evaluated')])
def test_the_table_of_weights_that_were_evaluated_names_their_step_if_it_is_known(
    step: dict[str, int], title: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'weights.json').write_text(json.dumps({'source': 'vit.npz', 'family': 'timm'}))
  (tmp_path / 'evaluate.json').write_text(json.dumps({**step, 'evaluation': 'test', 'metrics': {'test/nll': 1.}}))
  assert f'<th>{title}</th>' in pathlib.Path(report.write_report(tmp_path)).read_text()


@pytest.mark.usefixtures('no_charts')
def test_predictions_of_other_weights_than_those_of_the_run_say_of_which_step_they_are(workdir: pathlib.Path) -> None:
  meta = workdir / 'checkpoints' / '6' / checkpoint_files.META
  meta.parent.mkdir(parents=True)
  saved_as = {'step': 6, 'digests': {'params': 'a'}, provenance.SETTINGS: provenance.settings(schema.Config())}
  meta.write_text(json.dumps(checkpoint_files.seal(saved_as)))
  note = 'These are predictions at step 10. The weights of the run are those of step 6: vit-jax evaluate --workdir='
  for step, is_said in ((10, True), (6, False)):
    (workdir / 'evaluate.json').write_text(json.dumps({'step': step, 'top1': .98, 'metrics': {'test/top1': .98}}))
    assert (note in words(report.write_report(str(workdir)))) is is_said


@pytest.mark.usefixtures('no_charts')
@pytest.mark.parametrize(('classes', 'is_shown'), [(5, False), (6, True)])
def test_the_best_five_of_at_most_five_classes_are_not_shown(workdir: pathlib.Path, classes: int,
                                                             is_shown: bool) -> None:
  (workdir / 'final.json').write_text(json.dumps({'metrics': {'test/top1': .5, 'test/top5@ema': 1.}}))
  write_predictions(workdir, classes=classes)
  assert ('test/top5@ema' in parse(report.write_report(workdir)).text) == is_shown
  (workdir / 'predictions.npz').unlink()
  (workdir / 'config.json').write_text(json.dumps({'data': {'num_classes': classes}}))
  assert ('test/top5@ema' in parse(report.write_report(workdir)).text) == is_shown


@pytest.mark.usefixtures('no_charts')
def test_long_paths_break_at_their_joints(workdir: pathlib.Path) -> None:
  text = pathlib.Path(report.write_report(workdir)).read_text()
  assert f'{workdir.parent.name}/<wbr>run</code>'.replace('_', '_<wbr>').replace('<wbr>0', '0') in text


@pytest.mark.usefixtures('no_charts')
def test_many_classes_become_a_table_of_confused_pairs(workdir: pathlib.Path) -> None:
  write_predictions(workdir, classes=41)
  page = parse(report.write_report(workdir))
  assert 'Most confused of 41 classes' in page.text
  assert page.tags.count('svg') == 9


def test_an_empty_run_directory_has_a_report_that_names_what_is_missing(tmp_path: pathlib.Path) -> None:
  path = report.write_report(tmp_path)
  assert path == str(tmp_path / 'report.html')
  text = parse(path).text
  assert tmp_path.name in text and 'running or stopped' in text
  for name in ('config.json', 'final.json', 'evaluate.json', 'metrics.jsonl', 'predictions.npz'):
    assert f'{name}: no such file' in text


@pytest.mark.usefixtures('no_charts')
@pytest.mark.parametrize('name', ['config.json', 'final.json', 'metrics.jsonl', 'predictions.npz'])
def test_one_damaged_file_leaves_the_rest(workdir: pathlib.Path, name: str) -> None:
  (workdir / name).write_bytes(b'PK\x03\x04 not what it was \xff')
  text = parse(report.write_report(workdir)).text
  assert re.search(rf'{name}: .*could not be read', text)
  assert '3 min 20 s' in text or name == 'final.json'


@pytest.mark.slow(reason='1 s: draws a report')
def test_values_of_the_wrong_kind_do_not_stop_the_report(workdir: pathlib.Path) -> None:
  (workdir / 'final.json').write_text(
    '{"step": null, "seconds": "x", "metrics": {"test/top1": []}, "num_examples": 3, "goodput": 1}')
  (workdir / 'config.json').write_text('{"name": 7, "a": [[1, [2]], {}]}')
  with open(workdir / 'metrics.jsonl', 'a') as file:
    file.write('{"event": "norms", "grad": {"a": [], "b": ["nan", null], "c": {}}, "param": 3}\n'
               '{"event": "goodput", "seconds": [1]}\n{"event": 3}\n{"step": 11, "train/loss": "nan"}\n')
  parse(report.write_report(workdir))


@pytest.mark.usefixtures('no_charts')
def test_predictions_of_other_shapes_are_left_out(workdir: pathlib.Path) -> None:
  np.savez(workdir / 'predictions.npz', class_names=np.array(['a']), index=np.arange(3), label=np.arange(2),
           top=np.zeros((3, 1), np.int32), probability=np.zeros((3, 1)))
  text = parse(report.write_report(workdir)).text
  shapes = '[S], [S], [S, k], [S, k], got index (3,), label (2,), top (3, 1)'
  assert f'predictions.npz: expected arrays of shapes {shapes}' in text


def test_several_runs_share_their_curves(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
  other = tmp_path / 'other'
  other.mkdir()
  write_metrics(other)
  out = tmp_path / 'both.html'
  page = parse(report.write_report([workdir, other], out))
  assert '2 runs' in page.text
  assert 'other: train/loss' not in page.text  # one metric a run: labeled by the run alone
  assert 'run: test/top1@ema' in page.text
  assert page.text.count('other') >= 5 and 'other: test/top1@ema' in page.text
  assert 'other: config.json: no such file' in page.text


@pytest.mark.usefixtures('no_charts')
def test_runs_of_one_config_are_told_apart_by_directory_and_share_columns(tmp_path: pathlib.Path) -> None:
  for folder, size in (('one/run', 360), ('two/run', 100)):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'config.json').write_text('{"name": "digits"}')
    (tmp_path / folder / 'final.json').write_text(json.dumps(
        {'metrics': {'test/top1': .5}, 'num_examples': {'test': size}, 'params_digest': f'digest{size}'}))
  page = parse(report.write_report([tmp_path / 'one' / 'run', tmp_path / 'two' / 'run'], tmp_path / 'both.html'))
  assert re.search(r'run\s+test/top1\s+one/run50.00 % of 360 images\s+two/run50.00 % of 100 images', page.text)
  assert 'of one/run: digest360' in page.text and 'of two/run: digest100' in page.text


@pytest.mark.parametrize('broken', ['charts.draw_curves', 'charts.draw_heat_map', 'predictions.summarize'])
def test_a_part_that_cannot_be_drawn_is_named_on_the_page_of_the_rest(
    workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
  def fail(*args: object, **named: object) -> None:
    raise ZeroDivisionError('no width')
  monkeypatch.setattr(f'vit_jax.inspect.{broken}', fail)
  text = parse(report.write_report(workdir)).text
  assert 'could not be drawn (ZeroDivisionError: no width)' in text and '98.06 %' in text and 'Where the time' in text


def test_a_page_that_cannot_be_written_is_a_warning_after_training(
    workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  def fail(*args: object, **named: object) -> str:
    raise KeyError('figure')
  assert report.write_or_warn(workdir) == str(workdir / 'report.html')
  monkeypatch.setattr(report, 'to_html', fail)
  assert report.write_or_warn(workdir) == 'not written, see the warning above'
  assert "The report could not be written: KeyError: 'figure'. The results are complete." in caplog.text


def test_a_page_is_written_without_matplotlib(workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, 'matplotlib', None)  # importing it fails; it takes longer than the page
  assert 'could not be drawn' not in parse(report.write_report(workdir)).text


def test_a_folder_that_does_not_exist_is_named(tmp_path: pathlib.Path) -> None:
  with pytest.raises(ValueError, match='expected existing run directories, got .*nowhere. Pass the --workdir'):
    report.write_report([tmp_path, tmp_path / 'nowhere'])
