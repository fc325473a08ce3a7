"""Which pieces of a state are on which process, and what is sent where."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.parallel import mesh as meshes
from vit_jax.train import local_layout
from vit_jax.train.local_layout import ONLY, OWN, Layout, Piece, Send
from vit_jax.train.state import TrainState


class Device(NamedTuple):
  """A device of a process."""
  process_index: int
  id: int


class Split:
  """A sharding of the first dimension of arrays over `parts`; each part is replicated over the other devices."""

  def __init__(self, devices: list[Device], parts: int) -> None:
    self.devices, self.parts = devices, parts

  def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
    size = shape[0] // self.parts
    return {device: (slice(number % self.parts * size, (number % self.parts + 1) * size),)
            if self.parts > 1 else (slice(None),) for number, device in enumerate(self.devices)}


def layout(parts: int, *, hosts: int = 4, each: int = 2) -> Layout:
  """Of one array of 16 numbers in so many parts, and a whole one."""
  devices = [Device(host, host * each + number) for host in range(hosts) for number in range(each)]
  state = TrainState(None, {'w': jax.ShapeDtypeStruct((16,), jnp.float32)},  # type: ignore[arg-type]
                     {'m': jax.ShapeDtypeStruct((3,), jnp.float32)}, {})
  return Layout(state, TrainState(None, {'w': Split(devices, parts)}, {'m': Split(devices, 1)}, {}))  # type: ignore[arg-type]


def received(one: Layout, files: dict[int, list[tuple[int, str]]]) -> bool:
  """Whether every device has its pieces, from the files of its process and what it is sent by those that have them."""
  have = {process: {piece for file in files.get(process, []) for piece in one.pieces[file]} for process in range(4)}
  got = {(device, piece) for device in one.devices for piece in have[device.process_index]}
  for turn in local_layout.missing(one, files):
    for leaf in range(2):
      own = [send for send in turn if send.piece.leaf == leaf]
      assert len({send.source for send in own}) == len({send.target for send in own}) == len(own)
    for send in turn:
      assert send.piece in have[one.devices[send.source].process_index]
      got.add((one.devices[send.target], send.piece))
  return all((device, Piece(leaf, key)) in got for leaf, array in enumerate(one.leaves)
             for device, key in array.places.items())


def test_pieces_of_a_process_and_those_that_it_alone_has() -> None:
  split = layout(8)
  assert split.pieces[1, OWN] == [Piece(0, ((4, 6),)), Piece(0, ((6, 8),)), Piece(1, ((0, 3),))]
  assert split.pieces[1, ONLY] == [Piece(0, ((4, 6),)), Piece(0, ((6, 8),))]
  assert (split.num_bytes(1, OWN), split.num_bytes(1, ONLY), split.devices_of_each) == (28, 16, 2)
  shared = layout(4)  # processes 0 and 2 hold the same
  assert shared.pieces[0, OWN] == shared.pieces[2, OWN]
  assert not any(shared.pieces[host, ONLY] for host in range(4))
  assert len({split.digest(), shared.digest(), layout(8, each=1).digest(), layout(8, hosts=2).digest()}) == 4
  assert split.digest() == layout(8).digest()


def test_a_process_sends_what_it_alone_has_to_the_next() -> None:
  assert local_layout.shifted(layout(4)) == []
  sends = local_layout.shifted(layout(8))
  assert sends == [Send(number, (number + 2) % 8, Piece(0, ((2 * number, 2 * number + 2),))) for number in range(8)]


@pytest.mark.parametrize('parts', [1, 2, 4, 8])
@pytest.mark.parametrize('lost', range(4))
def test_after_the_loss_of_any_host_every_device_gets_its_pieces(parts: int, lost: int) -> None:
  one = layout(parts)
  files = {host: [(host, OWN), ((host - 1) % 4, ONLY)] for host in range(4) if host != lost}
  assert one.is_complete(files) and received(one, files)
  moved = {host - 1: own for host, own in files.items() if host}  # the hosts come back in another order
  assert moved and one.is_complete(files) and received(one, {(host + 1) % 4: own for host, own in files.items()})


def test_the_loss_of_two_hosts_with_the_same_pieces_is_noticed() -> None:
  files = {host: [(host, OWN), ((host - 1) % 4, ONLY)] for host in range(4)}
  for lost in range(4):
    left = {host: own for host, own in files.items() if host not in (lost, (lost + 1) % 4)}
    assert not layout(8).is_complete(left)
    assert layout(2).is_complete(left) and received(layout(2), left)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'bool'])
def test_pieces_arrive_bit_for_bit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
  mesh = meshes.make(schema.Mesh(data=1, fsdp=8))
  values = np.random.default_rng(0).integers(0, 2, (16, 3)).astype(jnp.dtype(dtype))
  if dtype != 'bool':
    values[0] = -0., np.nan, np.inf
  split, whole = NamedSharding(mesh, PartitionSpec('fsdp')), NamedSharding(mesh, PartitionSpec())
  arrays = [jax.device_put(values, split), jax.device_put(values[:1, 0].reshape(()), whole)]
  abstract = TrainState(None, {'a': arrays[0]}, {'b': arrays[1]}, {})  # type: ignore[arg-type]
  one = Layout(abstract, TrainState(None, {'a': split}, {'b': whole}, {}))  # type: ignore[arg-type]
  sends = [Send(source, (source + 3) % 8, Piece(0, one.leaves[0].places[device]))
           for source, device in enumerate(one.devices)] + [Send(0, 5, Piece(1, ()))]
  held = {(shard.device, Piece(leaf, one.leaves[leaf].places[shard.device])): shard.data
          for leaf, array in enumerate(arrays) for shard in array.addressable_shards}
  monkeypatch.setattr(local_layout, 'CHUNK_BYTES', 1)
  got = local_layout.send(one, sends, held)
  assert len(got) == 9
  for send in sends:
    want = held[one.devices[send.source], send.piece]
    found = got[one.devices[send.target], send.piece]
    assert found.device == one.devices[send.target] and found.dtype == want.dtype
    assert np.asarray(found).tobytes() == np.asarray(want).tobytes()
  back = local_layout.assemble(one.leaves[0], {device: held[device, Piece(0, key)]
                                               for device, key in one.leaves[0].places.items()})
  assert np.asarray(back).tobytes() == values.tobytes() and back.sharding == split
