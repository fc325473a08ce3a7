"""A batch that cannot fit into memory is refused before it is allocated."""
from __future__ import annotations

import pathlib

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.pipeline import memory

SHAPES = {'image': ((10, 10, 3), np.uint8), 'box': ((4,), np.float32)}  # 316 bytes, and 8 of its number


@pytest.mark.parametrize(('batch', 'shard', 'fits'), [
    (10, Shard((0,), 1), True), (11, Shard((0,), 1), False), (20, Shard((1,), 2), True), (22, Shard((1,), 2), False),
    (10**9, Shard((0,), 1), False)])
def test_the_part_of_this_process_counts(batch: int, shard: Shard, fits: bool) -> None:
  if fits:
    memory.check('batch_size', batch, shard, SHAPES, limit=3240)
    return
  most = 10 * shard.count
  with pytest.raises(UserError, match=f'^batch_size: expected .* at most {most} examples, got {batch:,},'):
    memory.check('batch_size', batch, shard, SHAPES, limit=3240)


def test_a_container_may_have_less_than_the_machine(tmp_path: pathlib.Path) -> None:
  whole = memory.memory_bytes(tmp_path)
  assert whole > 2**28
  (tmp_path / 'sys/fs/cgroup').mkdir(parents=True)
  for text, found in (('max\n', whole), ('123456789\n', 123456789), (f'{whole * 8}', whole)):
    (tmp_path / 'sys/fs/cgroup/memory.max').write_text(text)
    assert memory.memory_bytes(tmp_path) == found
