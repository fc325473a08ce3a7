"""The comparison of sources: a ratio to the first one, and messages in place of a traceback."""
from __future__ import annotations

import pathlib

import pytest

from benchmarks import sources
from tests.data import packed
from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.data import opening
from vit_jax.data.source import read_one


def test_sources_are_compared_with_the_first(tmp_path: pathlib.Path) -> None:
  packed.write_tars(tmp_path / 'tars', 'train', packed.examples(9))
  tars = opening.open_split(schema.Data(source=f'wds:{tmp_path / "tars"}'), 'train', image_px=(32, 32))
  found = sources.measure({'one': tars, 'two': tars}, num_images=5, rounds=2)
  assert list(found) == ['read', 'read, decode and crop']
  for speeds in found.values():
    assert speeds['one'].ratio == 1 and speeds['two'].median > 0


def test_a_source_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
  assert sources.main(['wds:/none']) == 2 and sources.main([]) == 2
  said = capsys.readouterr().err
  assert 'error: /none: expected this file' in said and 'usage: python -m benchmarks.sources' in said


def test_images_are_written_in_every_format_and_compared(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(sources, 'ROUNDS', 1)
  images = [encode(random_image(i), '.jpg') for i in range(3)]
  for number, image in enumerate(images):
    (tmp_path / f'{number}.jpg').write_bytes(image)
  assert sources.main([f'--images={tmp_path}', '--num=20', '--reads=5', '--held_mib=1']) == 0
  said = capsys.readouterr().out
  for kind in ('array_record', 'wds', 'tfrecord'):
    assert f'/{kind}: 20 images, opened in' in said, kind
  with sources.written(str(tmp_path), 20) as names:
    opened = [opening.open_split(schema.Data(source=name), 'train', image_px=(8, 8)) for name in names]
    stored = {tuple((read_one(source, i).image, read_one(source, i).label) for i in range(20)) for source in opened}
    assert len(stored) == 1
  assert sources.main([f'--images={tmp_path / "none"}']) == 2
  assert 'expected a folder with JPEG files, got none' in capsys.readouterr().err
