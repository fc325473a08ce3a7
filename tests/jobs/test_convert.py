"""`convert` on the command line: what it prints, writes, and refuses to write."""
from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from tests.weights import made
from vit_jax import main
from vit_jax.weights import loading, recognize, saving


def convert(*words: str) -> int:
  return main.run(['convert', *words])


@pytest.fixture(scope='module')
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('written')
  saving.save(made.network(class_names=()), str(folder / 'net.safetensors'))
  return folder


@pytest.fixture
def timm(written: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(written, tmp_path / 'in')) / 'net.safetensors'


def test_weights_are_read_written_and_told_of(timm: pathlib.Path, tmp_path: pathlib.Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'words.txt').write_text('\n'.join(made.CLASSES))
  assert convert(f'--weights={timm}', f'--to={tmp_path / "out.npz"}', f'--classes={tmp_path / "words.txt"}') == 0
  said = capsys.readouterr().out
  for part in ('ViT of width 32, depth 2, 4 heads', 'Tensors: 24 taken', 'Images: short side resized to 36 px'):
    assert part in said
  assert said.endswith(
      f'Written to {tmp_path / "out.npz"} in the format of vision_transformer, and read back without a '
      'difference.\n')
  again = loading.load(str(tmp_path / 'out.npz'))
  made.assert_same(again, made.network())
  assert again.class_names == made.CLASSES
  assert '`net.safetensors` (format: timm)' in (tmp_path / 'out.npz.md').read_text()
  report = json.loads((tmp_path / 'out.npz.json').read_text())['report']
  assert len(report['tensors']) == 24 and {t['what'] for t in report['tensors']} == {'taken'}


def truncated(path: pathlib.Path) -> None:
  np.savez(path, **recognize.to_tensors(made.network(), 'vision_transformer'))
  path.write_bytes(path.read_bytes()[:5000])


def misshapen(path: pathlib.Path) -> None:
  found = recognize.to_tensors(made.network(), 'vision_transformer')
  np.savez(path, **found | {'Transformer/encoder_norm/scale': np.ones(31, np.float32)})


def evil(path: pathlib.Path) -> None:
  path.write_bytes(b'\x80\x02cposix\nsystem\n(U\x05touchtR.')


@pytest.mark.parametrize(('write', 'says'), [
    (truncated, 'expected a whole weight file, got 5,000 bytes that are damaged or cut short'),
    (misshapen, '~ backbone/norm/scale: float32[31] in the file, float32[32] in the network'),
    (evil, 'expected weights alone, got a pickle that asks to run posix.system'),
    (lambda p: p.write_text('These are my notes.'), "got text: 'These are my notes.'"),
    (lambda p: p.write_text('<!DOCTYPE html><title>404</title>'), 'got a web page'),
    (lambda p: None, 'got a path where there is no file or folder'),
], ids=['truncated', 'wrong shape', 'code', 'text', 'html', 'missing'])
def test_bad_input_is_a_message_and_nothing_is_written(
    write: Callable[[pathlib.Path], object], says: str, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'in').mkdir()
  write(tmp_path / 'in' / 'a.npz')
  assert convert(f'--weights={tmp_path / "in" / "a.npz"}', f'--to={tmp_path / "out.npz"}') == 2
  captured = capsys.readouterr()
  assert '\nerror: ' in f'\n{captured.err}' and says in captured.err and 'Traceback' not in captured.err
  assert [p.name for p in tmp_path.iterdir()] == ['in']


@pytest.mark.parametrize(('words', 'says'), [
    (['--family=timm', '--to=x.npz'], '.pt or .bin with --family=timm, got x.npz.'),
    (['--to=x.npz', '--classes=words.txt'], 'expected 7 names, one per output of the weights, got 2'),
    (['--to=back.foo'], '--to: expected a name that ends in .npz, .safetensors, .pth, .pt, .bin, or that of a folder'),
    (['--to=x.npz', '--family=big_vison'], 'Did you mean big_vision?'),
    (['--to=x.npz', '--classes=nofile.txt'], '--classes=nofile.txt: expected a text file'),
    (['--to=net.safetensors'], 'net.safetensors exists. Choose another, or add --overwrite.'),
    (['--to=gs://bucket/x.npz'], '--to: expected a path on this machine, got the address gs://bucket/x.npz.'),
    (['--to=/no-such/vit/x.npz'], '--to: expected a path in an existing directory, got /no-such/vit/x.npz'),
    (['--to=net.safetensors', '--overwrite', '--family=big_vision'], '--to: expected .npz with --family=big_vision'),
    (['--to=x.npz', '--preprocess=soft'], "expected known ones, each once, got 'soft'")])
def test_what_cannot_be_is_said(words: list[str], says: str, timm: pathlib.Path, capsys: pytest.CaptureFixture[str],
                                monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(timm.parent)
  pathlib.Path('words.txt').write_text('a\nb\n')
  before = {p.name: p.read_bytes() for p in timm.parent.iterdir()}
  assert convert(f'--weights={timm}', *words) == 2
  assert says in capsys.readouterr().err
  assert {p.name: p.read_bytes() for p in timm.parent.iterdir()} == before
