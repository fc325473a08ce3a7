"""The comparison of complete loaders."""
from __future__ import annotations

import io
import json
import pathlib
import sys

import pytest

from benchmarks import host_images, loaders
from tests.data.images import encode, random_image
from vit_jax.core.errors import UserError

ANSWERS = """
import json, sys
print(json.dumps(dict(label='fake')), flush=True)
for i, line in enumerate(sys.stdin):
  print(json.dumps(dict(processor_s=[1., 1.5, 3.5][i], shape=[64, 224, 224, 3])), flush=True)
"""


def test_a_turn_counts_the_processor_seconds_since_the_last_one() -> None:
  one = loaders.LoaderProcess([sys.executable, '-c', ANSWERS], {})
  try:
    assert one.label == 'fake'
    assert one.turn() == 192 / 0.5
    assert loaders.measure([one], rounds=1) == {'fake': host_images.Speed(96., 96., 96., 1.)}
  finally:
    one.close()


def test_a_python_without_tensorflow_and_a_loader_that_ends_are_reported(tmp_path: pathlib.Path) -> None:
  settings = {'files': [], 'record': str(tmp_path / 'r'), 'dct': '', 'batch': 1, 'image_px': [1, 1]}
  with pytest.raises(UserError, match=r'^--tensorflow: expected a Python with TensorFlow, got a Python without'):
    loaders.LoaderProcess([sys.executable, '-S', str(loaders.CHILD)], settings)
  with pytest.raises(UserError, match=r'^loaders: expected an answer of its process, got exit status 3\.'):
    loaders.LoaderProcess([sys.executable, '-c', 'import sys; sys.exit(3)'], {})
  assert loaders.main([str(tmp_path / 'missing')]) == 2


def test_our_loader_answers_with_batches(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'train' / 'one').mkdir(parents=True)
  for i in range(3):
    (tmp_path / 'train' / 'one' / f'{i}.jpg').write_bytes(encode(random_image(i), '.jpg'))
  monkeypatch.setattr(loaders, 'BATCH', 2)
  monkeypatch.setattr(host_images, 'IMAGE_PX', (8, 8))
  monkeypatch.setattr(sys, 'stdin', io.StringIO('1\n2\n'))
  loaders.serve({'dataset': str(tmp_path), 'kind': 'files', 'decode': 'full'})
  label, first, second = map(json.loads, capsys.readouterr().out.splitlines())
  assert label == {'label': 'vit_jax, files, decode=full'}
  assert first['shape'] == second['shape'] == [2, 8, 8, 3]
  assert 0 < first['processor_s'] <= second['processor_s']
