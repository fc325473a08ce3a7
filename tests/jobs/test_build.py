"""What building a run checks before anything is allocated."""
from __future__ import annotations

import io
import logging
import pathlib
import tarfile

import jax
import pytest

from tests.data.images import encode, random_image
from vit_jax.config import engine, files, schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.source import Source
from vit_jax.jobs import build
from vit_jax.parallel import layout
from vit_jax.parallel import mesh as meshes


def digits(num_examples: int, **settings: bool) -> tuple[schema.Data, Source]:
  data = schema.Data(source='digits', num_examples=num_examples, **settings)
  return data, opening.open_split(data, 'train', image_px=(8, 8))


@pytest.mark.parametrize('num_examples', [1_281_167, 1_000, 1_422, 1_452])
def test_a_dataset_of_another_size_than_the_config_says_is_refused(num_examples: int) -> None:
  with pytest.raises(UserError, match=f'data.num_examples: expected 1,437, the size of train of digits, got '
                                      f'{num_examples:,}.*data.num_examples=0.*data.any_num_examples=true'):
    build.check_size(*digits(num_examples))


@pytest.mark.parametrize('num_examples', [0, 1_437, 1_424, 1_451])
def test_one_percent_more_or_less_and_unknown_sizes_are_accepted(num_examples: int,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
  build.check_size(*digits(num_examples))
  assert len(caplog.records) == (num_examples not in (0, 1_437))  # a warning


def test_another_size_can_be_intended(caplog: pytest.LogCaptureFixture) -> None:
  build.check_size(*digits(60_000, any_num_examples=True))
  assert 'data.num_examples=60,000, by which epochs are counted, but digits/train has 1,437' in caplog.text
  with caplog.at_level(logging.WARNING):
    build.check_size(schema.Data(source='synthetic', num_examples=60_000), digits(0)[1])
  assert len(caplog.records) == 1


def fake_devices(monkeypatch: pytest.MonkeyPatch, memory_gib: float) -> None:
  """The eight simulated devices, described as accelerators with so much memory."""
  monkeypatch.setattr(meshes, 'find_hardware', lambda slices: layout.Hardware(
      f'fake {memory_gib} GiB', 'tpu', 8, memory_gib, slices))


@pytest.mark.slow(reason='4 s: a run is built four times; tests/parallel/test_layout.py chooses layouts')
def test_a_run_is_laid_out_for_its_devices_and_keeps_its_layout_on_the_same_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  config = files.load('digits', [])
  data = build.open_data(config)
  fake_devices(monkeypatch, .01)  # an eighth is less than the 2 MB of state and gradients
  with caplog.at_level(logging.INFO, logger='vit_jax'):
    mesh, shard, parts = build.open_run(config, data)
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 4, 'tensor': 1} and shard.count == 8
  assert 'Layout for 8 x fake 0.01 GiB: data=2 fsdp=4 tensor=1' in caplog.text
  written = parts.config
  assert written.mesh.fsdp == 4 and not layout.auto(written)
  (tmp_path / 'config.json').write_text(engine.to_json(layout.put(written, {'train.accumulate': 4})))
  assert build.open_run(config, data, workdir=tmp_path)[2].config.train.accumulate == 4
  fake_devices(monkeypatch, 16.)
  with caplog.at_level(logging.INFO, logger='vit_jax'):
    changed = build.open_run(config, data, workdir=tmp_path)[2].config
  assert changed.mesh.fsdp == changed.train.accumulate == 1
  assert 'laid out for 8 x fake 0.01 GiB before; it is laid out anew for 8 x fake 16.0 GiB' in caplog.text
  (tmp_path / 'config.json').write_text('{')
  assert build.open_run(config, data, workdir=tmp_path)[2].config == changed
  assert build.open_run(written, data, overridden=['mesh.fsdp'])[0].shape['fsdp'] == 4


def test_images_without_labels_train_no_classifier(tmp_path: pathlib.Path) -> None:
  with tarfile.open(tmp_path / 'x.tar', 'w') as archive:
    for number in range(20):
      content = encode(random_image(number, height=16, width=16), '.jpg')
      info = tarfile.TarInfo(f'{number:04d}.jpg')
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  data = schema.Data(source=f'wds:{tmp_path}')
  with pytest.raises(UserError, match='data.source: expected images with labels for Supervised, got wds:.*have none'):
    build.open_data(schema.Config(data=data, image_px=(16, 16)))
  assert len(build.open_data(schema.Config(data=data, image_px=(16, 16), objective=schema.Mae())).train) == 18


@pytest.mark.parametrize('until, weights, is_random', [('100 %', '', True), ('50 %', '', False),
                                                       ('100 %', 'some.npz', False)])
def test_a_network_that_is_frozen_for_the_whole_run_needs_weights(until: str, weights: str, is_random: bool) -> None:
  rules = (schema.PathRule('backbone/.*', frozen_until=until),)
  model = schema.ViT(patch=8, width=16, depth=1, heads=2, mlp=schema.Mlp(16))
  config = schema.Config(batch_size=8, image_px=(16, 16), length='10 steps', model=model, init_from=weights,
                         optimizer=schema.AdamW(rules=rules))
  parts = build.parts(config, mesh=meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1]), num_examples=80, num_classes=3,
                      in_memory=False)
  assert build.keeps_random_network(parts) is is_random
