"""Classifying files: what is printed, what is skipped, and what the exit status says."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import time

import loaded
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import flag_kinds, main
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.formats import image_list
from vit_jax.inspect import images
from vit_jax.inspect.model import Model
from vit_jax.jobs import predict, predict_table
from vit_jax.weights import loading, runs, saving
from vit_jax.weights.network import Report


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
  """Weights by the name of a small network."""
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights(
      where.removesuffix('-unnamed').removesuffix('-headless'), names='-unnamed' not in where,
      num_classes=0 if '-headless' in where else loaded.CLASSES))
  monkeypatch.setattr(loading, 'text', lambda found: 'what was loaded')


@pytest.fixture
def pictures(tmp_path: pathlib.Path) -> list[str]:
  """Five pictures in folders, and what is none."""
  found = []
  for name, image in zip(('a/1.png', 'a/2.jpg', 'b/c/1.png', 'b/3.webp', '4.bmp'), loaded.pictures(5), strict=True):
    path = tmp_path / 'in' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    found.append(str(path))
  (tmp_path / 'in' / 'a' / 'notes.txt').write_text('none')
  return found


def run(*words: str) -> int:
  weights = [] if any(word.startswith('--weights') for word in words) else ['--weights=vit']
  return main.run(['predict', *weights, *words])


def test_files_and_folders_are_classified_in_order(
    tmp_path: pathlib.Path, pictures: list[str], capsys: pytest.CaptureFixture[str]) -> None:
  assert run(pictures[4], str(tmp_path / 'in' / 'a'), str(tmp_path / 'in' / 'b'), '--top=2') == 0
  lines = capsys.readouterr().out.splitlines()
  want = [pictures[i] for i in (4, 0, 1, 3, 2)]
  assert lines[::3] == want and list(image_list.find([str(tmp_path / 'in')])) == sorted(pictures)
  model = Model(loaded.weights('vit'))
  for i, path in enumerate(want):
    for line, guess in zip(lines[3 * i + 1:3 * i + 3], model.classify(path, top=2)[0], strict=True):
      shown, _, name = line.strip().partition(' %  ')
      assert name == guess.name
      # Two decimals are shown, of a batch of another size, whose sums round apart.
      assert abs(float(shown) - 100 * guess.probability) < .0051


def test_json_is_a_line_about_the_network_and_one_for_each_file(
    pictures: list[str], capsys: pytest.CaptureFixture[str]) -> None:
  assert run(*pictures[:2], '--json', '--top', '3') == 0
  head, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert set(head) == {'preprocessing', 'class_names', 'warnings'} and {*rows[0], *rows[1]} == {'file', 'classes'}
  assert [row['file'] for row in rows] == pictures[:2] and all(len(row['classes']) == 3 for row in rows)
  assert set(rows[0]['classes'][0]) == {'label', 'name', 'probability'}
  assert head['preprocessing'] == {
      'geometry': 'torchvision', 'resize_px': 40, 'image_px': list(loaded.PX), 'interpolation': 'bicubic',
      'antialias': True, 'truncate': False, 'mean': [.5, .4, .3], 'std': [.2, .3, .4], 'exif_orientation': True,
      'rule': 'given'}
  assert head['warnings'] == []
  chances = [guess['probability'] for guess in rows[0]['classes']]
  assert chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1


def test_json_carries_the_warnings_about_the_weights() -> None:
  warned = loaded.weights('vit')._replace(report=Report((), (), ('The preprocessing of images is a guess.',)))
  assert predict.describe(Model(warned))['warnings'] == ['The preprocessing of images is a guess.']


def test_what_cannot_be_read_is_told_and_skipped(
    tmp_path: pathlib.Path, pictures: list[str], capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture) -> None:
  (tmp_path / 'page.jpg').write_text('<html>not here</html>')
  (tmp_path / 'cut.jpg').write_bytes(pathlib.Path(pictures[1]).read_bytes()[:300])
  bad = [str(tmp_path / name) for name in ('page.jpg', 'cut.jpg', 'none.png')]
  assert run(bad[0], pictures[0], bad[1], bad[2], pictures[4], '--top=1') == 2
  out, err = capsys.readouterr()
  assert out.splitlines()[::2] == [pictures[0], pictures[4]]
  assert f'{bad[0]}: not an image' in err and f'{bad[1]}: the JPEG is truncated' in err
  assert f'{bad[2]}: No such file or directory' in err and '3 of 5 files could not be read' in caplog.text
  assert f'1 of 5 files do not exist: {bad[2]}\n' in caplog.text
  assert run(bad[0], pictures[0], '--json') == 2
  head, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert 'preprocessing' in head and rows[0]['error'].startswith('not an image') and 'classes' in rows[1]


def test_a_pipe_in_place_of_a_file_is_refused_at_once(
    tmp_path: pathlib.Path, pictures: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  pipes = [str(tmp_path / name) for name in ('image.png', 'weights.npz', 'weights.safetensors', 'weights.pth')]
  for one in pipes:
    os.mkfifo(one)
  assert run(pictures[0], pipes[0]) == 2
  assert f'{pipes[0]}: a pipe in place of a file' in capsys.readouterr().err
  monkeypatch.undo()
  for one in pipes[1:]:
    assert run(f'--weights={one}', pictures[0]) == 2
    assert f'{one}: expected to read it, got "a pipe in place of a file"' in capsys.readouterr().err


def test_files_that_do_not_exist_are_an_error_before_weights_are_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(predict, 'load', None)
  assert run('none.png', 'neither.png') == 2
  assert capsys.readouterr().err.endswith('none.png, neither.png: expected image files or folders of images, got no '
                                          'such file. Check the paths.\n')


def test_only_unreadable_files_are_no_crash(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'page.jpg').write_text('<html>not here</html>')
  assert run(str(tmp_path / 'page.jpg'), '--overlay', f'--to={tmp_path / "out"}') == 2
  assert capsys.readouterr().out == '' and not (tmp_path / 'out').exists()


@pytest.mark.slow(reason='3 s: several batch sizes')
def test_any_number_of_files_gives_the_same(
    pictures: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
  assert run(*pictures * 2, '--json') == 0
  many = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
  monkeypatch.setattr(predict, 'BATCH', 3)
  assert run(*pictures * 2, '--json') == 0
  few = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
  assert [row['file'] for row in few] == pictures * 2
  for a, b in zip(many, few, strict=True):
    np.testing.assert_allclose([g['probability'] for g in a['classes']], [g['probability'] for g in b['classes']],
                               rtol=1e-4)


@pytest.mark.slow(reason='2 s; tests/inspect/test_attention.py has the maps')
def test_overlays_show_where_the_network_looked(
    tmp_path: pathlib.Path, pictures: list[str], capsys: pytest.CaptureFixture[str]) -> None:
  assert run(str(tmp_path / 'in'), '--overlay', f'--to={tmp_path / "out"}') == 0
  assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == ['1.png', '1_2.png', '2.png', '3.png', '4.png']
  shown, model = np.asarray(Image.open(tmp_path / 'out' / '2.png')).astype(float), Model(loaded.weights('vit'))
  plain = model.prepare(pictures[1]).astype(float)
  assert shown.shape == (32, 48, 3)
  changed = np.abs(shown - plain).mean(-1).reshape(2, 16, 3, 16).mean((1, 3))
  heat = model.rollout(pictures[1])[0]
  assert changed[np.unravel_index(heat.argmax(), heat.shape)] > 0 and np.ptp(changed) > 1


@pytest.mark.slow(reason='1 s: compiles another network')
def test_names_come_from_a_file_if_the_weights_have_none(
    tmp_path: pathlib.Path, pictures: list[str], capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture) -> None:
  assert run(pictures[0], '--weights=vit-unnamed', '--top=1') == 0
  assert 'class ' in capsys.readouterr().out and 'does not name its 7 classes' in caplog.text
  (tmp_path / 'names').write_text('\n'.join(f'n{i} sort {i}' for i in range(loaded.CLASSES)))
  assert run(pictures[0], '--weights=vit-unnamed', f'--classes={tmp_path / "names"}', '--top=1') == 0
  assert ' sort ' in capsys.readouterr().out


@pytest.mark.slow(reason='1 s: another network')
def test_weights_with_1000_outputs_get_the_names_of_imagenet_and_it_is_said(
    pictures: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: loaded.weights('vit', num_classes=1_000, names=False))
  assert run(pictures[0], '--json', '--top=1000') == 0
  head, row = map(json.loads, capsys.readouterr().out.splitlines())
  assert {guess['name'] for guess in row['classes'] if guess['label'] == 281} == {'tabby'}
  assert head['class_names'] == 'ImageNet-1k, assumed' and 'the names of ImageNet-1k are used' in caplog.text
  assert predict.load('x').find_class('tench') == 0
  (tmp_path / 'names').write_text('\n'.join(f'sort {i}' for i in range(1_000)))
  assert run(pictures[0], '--json', '--top=1000', f'--classes={tmp_path / "names"}') == 0
  head, row = map(json.loads, capsys.readouterr().out.splitlines())
  assert all(guess['name'] == f'sort {guess["label"]}' for guess in row['classes']) and head['class_names'] == 'given'


@pytest.mark.parametrize(('words', 'said'), [
    (['--top=0', 'a.jpg'], "--top: expected a whole number, at least 1, got '0'."),
    (['--to=x', 'a.jpg'], '--to: expected a table, FILE.csv or FILE.parquet, or --overlay as well'),
    (['--overwrite', '--to=x.csv', 'a.jpg'], '--overwrite: expected --overlay as well, .* got --overwrite alone'),
    (['--overwrite', 'a.jpg'], '--overwrite: expected --overlay as well'),
    ([], 'command line: expected FILES and folders, got none'),
    (['--weights=vit-headless', 'a.jpg'], 'vit-headless: expected weights with a classification head'),
    (['--classes=NAMES', 'a.jpg'], 'expected 7 names, one per output of the weights, got 2'),
    (['--config=digits', 'a.jpg'], '--config: expected a flag of this job, got one of train, evaluate'),
    (['EMPTY'], 'EMPTY: expected images with the extension .jpg .* in or below it, got none'),
])
def test_mistakes_are_reported(
    words: list[str], said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'NAMES').write_text('a\nb\n')
  (tmp_path / 'EMPTY').mkdir()
  (tmp_path / 'a.jpg').touch()
  assert run(*words) == 2
  import re
  assert re.search(said, capsys.readouterr().err)


def test_other_jobs_take_no_files() -> None:
  with pytest.raises(UserError, match="expected a job such as train or a flag such as --config=digits, got 'a.jpg'"):
    main.parse(['evaluate', '--workdir=x', 'a.jpg'])


def test_files_with_one_name_get_overlays_of_their_own() -> None:
  found = predict.name_overlays(['a/x.jpg', 'b/x.png', 'x_2.jpg', 'c/x.jpg'], pathlib.Path('o'))
  assert [str(path) for path in found.values()] == ['o/x.png', 'o/x_2.png', 'o/x_2_2.png', 'o/x_3.png']


def test_a_file_that_is_named_twice_has_one_overlay() -> None:
  found = predict.name_overlays(['a/x.jpg', 'b/y.png', 'a/x.jpg'], pathlib.Path('o'))
  assert found == {'a/x.jpg': pathlib.Path('o/x.png'), 'b/y.png': pathlib.Path('o/y.png')}


def test_overlays_of_many_files_with_one_name_are_named_in_linear_time() -> None:
  began = time.process_time()
  found = predict.name_overlays([f'{folder}/image.jpg' for folder in range(20_000)], pathlib.Path('o'))
  assert len(set(found.values())) == 20_000 and found['19999/image.jpg'].name == 'image_20000.png'
  # One try for each name takes 0.2 s; a try for each number that is taken took 40 s.
  assert time.process_time() - began < 5


def test_each_suffix_of_a_table_has_a_format() -> None:
  assert tuple(predict_table.SUFFIXES) == predict.TABLES


def test_a_tilde_in_the_name_of_an_image_is_the_home_directory(
    pictures: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setenv('HOME', str(pathlib.Path(pictures[0]).parent))
  monkeypatch.chdir(tmp_path)
  name = pathlib.Path(pictures[0]).name
  assert run(f'~/{name}', '--json') == 0
  assert json.loads(capsys.readouterr().out.splitlines()[1])['file'] == pictures[0]
  np.testing.assert_array_equal(images.decode(f'~/{name}'), images.decode(pictures[0]))
  shutil.copytree(pathlib.Path(pictures[0]).parent, tmp_path / '~')  # is what is named
  assert run(f'~/{name}', '--json') == 0
  assert json.loads(capsys.readouterr().out.splitlines()[1])['file'] == f'~/{name}'


@pytest.mark.parametrize(('flag', 'given', 'expected'), [
    ('FILE', '~/x.txt', '{home}/x.txt'), ('PATHS', 'a=~/x,b=y', {'a': '{home}/x', 'b': 'y'}),
    ('LOCAL_PATH', '~/x.csv', '{home}/x.csv'), ('FILE', 'hf://a/b', 'hf://a/b')])
def test_a_tilde_in_a_flag_is_the_home_directory(flag: str, given: str, expected: object, tmp_path: pathlib.Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', str(tmp_path))
  found = getattr(flag_kinds, flag).convert(given)
  assert str(found) == str(expected).replace('{home}', str(tmp_path))


def test_a_class_that_is_a_decision_of_its_own_has_its_sigmoid(
    pictures: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture) -> None:
  config = schema.Config(model=loaded.MODELS['vit'], image_px=loaded.PX,
                         objective=schema.Supervised(loss=schema.Loss.SIGMOID))
  one = loaded.weights('vit')
  runs.write(tmp_path / 'run', config, one.params, one.state, class_names=one.class_names, image_px=loaded.PX)
  monkeypatch.undo()
  for where in (tmp_path / 'run', tmp_path / 'one.npz', tmp_path / 'again'):  # converted files keep it
    model = vit_jax.load(where)
    want = 1 / (1 + np.exp(-model.logits(pictures[:1])[0].astype(np.float64)))
    for path in (tmp_path / 'one.npz', tmp_path / 'again'):
      if not path.exists():
        saving.save(model.weights, str(path), family='run' if path.name == 'again' else '')
    caplog.clear()
    assert run(f'--weights={where}', pictures[0], '--json', '--top=9') == 0
    head, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert 'sigmoid of one class alone' in head['probability'] and head['probability'] in caplog.text
    found = {one['label']: one['probability'] for one in row['classes']}
    assert found == pytest.approx(dict(enumerate(want)), abs=1e-5)
    assert set(row['classes'][0]) == {'label', 'name', 'probability'}
    assert run(f'--weights={where}', pictures[0], f'--to={where}.csv', '--top=1') == 0
    assert float(pathlib.Path(f'{where}.csv').read_text().split(',')[-1]) == pytest.approx(want.max(), abs=1e-5)
    model.embed(pictures[0], to=f'{where}_p.npz', what='probabilities')
    np.testing.assert_allclose(np.load(f'{where}_p.npz')['probabilities'][0], want, atol=1e-5)
    capsys.readouterr()
