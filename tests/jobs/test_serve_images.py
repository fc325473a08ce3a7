"""Images on the live page: limits, turns, newer weights, and the mistakes in a folder."""
from __future__ import annotations

import base64
import io
import pathlib
import struct
import threading
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import loaded
import numpy as np
import pytest
from PIL import Image

from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.image import headers
from vit_jax.inspect.model import Guess, Model
from vit_jax.jobs import serve
from vit_jax.jobs.serve import Folder, Network
from vit_jax.jobs.serve_http import Refused


def png(color: int = 0, side: int = 6) -> bytes:
  buffer = io.BytesIO()
  Image.fromarray(np.full((side, side, 3), color, np.uint8)).save(buffer, 'png')
  return buffer.getvalue()


class Fake:
  """A network of three classes; the color of an image is the predicted one."""
  class_names = ('cat', 'dog', 'owl')
  num_layers = 0
  decoding = headers.DecodeOptions(upright=True)

  def __init__(self, num_classes: int = 3) -> None:
    self.weights = types.SimpleNamespace(num_classes=num_classes, source='fake')

  def prepare(self, image: np.ndarray) -> np.ndarray:
    return image

  def logits(self, images: Sequence[np.ndarray], *, prepared: bool) -> np.ndarray:
    assert prepared
    return np.stack([np.eye(3)[image[0, 0, 0]] for image in images])

  def rank(self, logits: np.ndarray, *, top: int) -> list[Guess]:
    return [Guess(int(i), self.class_names[i], float(logits[i])) for i in np.argsort(-logits, kind='stable')[:top]]

  def find_class(self, name: str) -> int:
    if name not in self.class_names:
      raise UserError('no')
    return self.class_names.index(name)


def network(load: Callable[[], Any] = Fake, newest: Callable[[], object] = lambda: 1) -> Network:
  return Network(load, newest)  # type: ignore[arg-type]


def refusal(action: Callable[[], object]) -> tuple[int, str]:
  with pytest.raises(Refused) as caught:
    action()
  return int(caught.value.status), str(caught.value)


@pytest.mark.parametrize('content', [b'', b'hello', b'<svg xmlns="http://www.w3.org/2000/svg"/>', b'%PDF-1.4', b'MZ'])
def test_only_files_that_begin_as_images_are_decoded(content: bytes) -> None:
  assert refusal(lambda: network().classify(content)) == (415, (
      'Expected a JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, JPEG 2000 or PPM file, got another kind of file.'))


def test_formats_that_are_not_supported_are_named() -> None:
  assert refusal(lambda: serve.decode(b'\0\0\0\x18ftypheic' + bytes(12)))[1].endswith('got HEIC.')


def test_an_image_with_too_many_pixels_is_refused_by_its_header() -> None:
  def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))
  bomb = b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 8001, 8000, 8, 2, 0, 0, 0)) + chunk(
      b'IDAT', zlib.compress(bytes(10))) + chunk(b'IEND', b'')
  status, said = refusal(lambda: serve.decode(bomb))
  assert status == 422 and 'at most 64,000,000 pixels, got 64,008,000.' in said and 'data.recipe' not in said


def test_a_damaged_image_is_refused() -> None:
  status, said = refusal(lambda: serve.decode(png()[:-20]))
  assert status == 422 and said.startswith('The image could not be read: ')


def test_classes_have_names_and_probabilities() -> None:
  found = network().classify(png(1))
  assert [one['name'] for one in found['classes']] == ['dog', 'cat', 'owl'] and found['classes'][0]['probability'] == 1.
  assert found['size'] == '6 × 6 px' and not found['has_attention']
  kind, _, body = found['image'].partition(',')
  assert kind == 'data:image/png;base64' and Image.open(io.BytesIO(base64.b64decode(body))).size == (6, 6)
  assert refusal(lambda: network().attention(png())) == (422, 'This network has no attention.')


def test_weights_without_a_head_have_no_classes() -> None:
  assert network(lambda: Fake(num_classes=0)).classify(png())['classes'] == []


@pytest.mark.slow(reason='about 4 s: compiles a network')
def test_attention_is_drawn_over_the_image_that_the_network_gets() -> None:
  found = network(lambda: Model(loaded.weights('vit')))
  shown = found.classify(png(200, side=50))
  assert shown['has_attention'] and shown['classes'][0]['name'].startswith('kind ')
  drawn = found.attention(png(200, side=50))
  for name in ('overlay', 'shade'):
    assert Image.open(io.BytesIO(base64.b64decode(drawn[name].partition(',')[2]))).size == loaded.PX[::-1]


def test_one_image_is_computed_at_a_time() -> None:
  one, is_in, may_go = network(), threading.Event(), threading.Event()

  def hold() -> None:
    with one.use():
      is_in.set()
      may_go.wait(10)
  first, second = threading.Thread(target=hold), threading.Thread(target=one.classify, args=(png(),))
  first.start()
  assert is_in.wait(10)
  second.start()
  second.join(.1)
  assert second.is_alive()
  may_go.set()
  second.join(10)
  assert not second.is_alive()


def test_weights_are_loaded_again_when_the_run_has_saved_newer_ones() -> None:
  steps: list[int | None] = [None]
  loads: list[Fake] = []

  def load() -> Fake:
    loads.append(Fake())
    return loads[-1]
  one = network(load, lambda: steps[-1])
  assert refusal(lambda: one.classify(png()))[0] == 409 and not loads
  for step, expected in ((10, 1), (10, 1), (20, 2)):
    steps.append(step)
    one.classify(png())
    assert len(loads) == expected


def test_weights_that_training_has_just_deleted_are_a_message() -> None:
  def load() -> Fake:
    raise FileNotFoundError('checkpoints/10')
  assert refusal(lambda: network(load).classify(png())) == (
      409, 'The weights could not be loaded: checkpoints/10')


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
  root = tmp_path / 'images'
  for name, color in (('cat/a', 0), ('cat/b', 2), ('dog/a', 1), ('dog/b', 1), ('fish/a', 1)):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / f'{name}.png').write_bytes(png(color))
  (root / 'dog' / 'damaged.png').write_bytes(png()[:30])
  return root


def run(root: pathlib.Path, one: Network | None = None) -> Folder:
  folder = Folder(str(root))
  folder.run(one or network())
  return folder


def test_the_mistakes_of_a_folder_are_those_of_its_subfolders(images: pathlib.Path) -> None:
  folder = run(images)
  assert [(one.file, one.label, one.predicted) for one in folder.mistakes] == [
      ('cat/b.png', Guess(0, 'cat', 0.), Guess(2, 'owl', 1.))]
  assert folder.mistakes[0].png.startswith(b'\x89PNG') and folder.num_done == 6
  arrays = folder.arrays()
  assert sorted(arrays['label']) == [0, 0, 1, 1] and arrays['top'].shape == (4, 3)
  assert len(folder.notes) == 2 and 'Folder fish: its images are left out' in ''.join(folder.notes)
  assert any(note.startswith('dog/damaged.png: The image could not be read') for note in folder.notes)


def test_links_out_of_the_folder_are_skipped(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'secret').mkdir()
  (tmp_path / 'secret' / 'x.png').write_bytes(png(2))
  (images / 'owl').symlink_to(tmp_path / 'secret')
  (images / 'cat' / 'link.png').symlink_to(tmp_path / 'secret' / 'x.png')
  (images / 'cat' / 'inside.png').symlink_to(images / 'cat' / 'a.png')
  folder = run(images)
  assert folder.notes[0] == '2 links out of the folder were skipped.' and len(folder.rows) == 5
  assert {path.name for path in folder.paths} == {'a.png', 'b.png', 'damaged.png', 'inside.png'}


@pytest.mark.parametrize('is_listed', [True, False])
def test_a_folder_says_that_the_storage_of_the_weights_failed(images: pathlib.Path, is_listed: bool) -> None:
  def fail() -> Any:
    raise TemporaryError('runs/x: the storage does not answer')
  folder = run(images, network(fail) if is_listed else network(newest=fail))
  assert folder.error == 'The weights could not be loaded: runs/x: the storage does not answer'


def test_a_folder_says_why_nothing_is_classified(images: pathlib.Path) -> None:
  folder = run(images, network(newest=lambda: None))
  assert folder.error.startswith('The run has saved no checkpoint yet') and folder.arrays() == {}
  assert run(images, network(lambda: Fake(num_classes=0))).error == 'The weights have no classification head.'


def test_a_path_that_is_no_folder_is_an_error(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='nowhere: expected a folder of images, got no folder'):
    run(tmp_path / 'nowhere')
