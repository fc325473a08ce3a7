"""What can be said of checkpoints from their names and JSON files."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.core import checkpoint_files
from vit_jax.core.os_errors import Damaged


def test_steps_are_folders_that_are_called_like_numbers(tmp_path: pathlib.Path) -> None:
  for name in ('10', '2', '007', '3.orbax-checkpoint-tmp', 'x', '٣'):
    (tmp_path / name).mkdir()
  (tmp_path / '5').write_text('')
  assert checkpoint_files.steps(tmp_path) == [2, 10]
  assert checkpoint_files.steps(tmp_path / 'absent') == checkpoint_files.steps(tmp_path / '5') == []


def test_a_description_is_read_if_its_digest_fits(tmp_path: pathlib.Path) -> None:
  path = tmp_path / checkpoint_files.META
  path.parent.mkdir()
  path.write_text(json.dumps(checkpoint_files.seal({'step': 3})))
  assert checkpoint_files.read_meta(tmp_path) == {'step': 3}
  for text in (path.read_text().replace('3', '4', 1), '[]', '{}', '', '{"body": 1}', '[' * 100_000):
    path.write_text(text)
    with pytest.raises(Damaged):
      checkpoint_files.read_meta(tmp_path)
