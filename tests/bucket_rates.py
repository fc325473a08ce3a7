"""How fast one process reads images from object storage: a server on this machine that answers after 30 ms.

  python -m tests.bucket_rates [LATENCY_MS] [IMAGE_BYTES]

The server is a process of its own. Clients are threads of one process with one connection each, as threads of the
loader would be; every request is a range of an object of 64 MiB, as a record of a shard is. Printed for each number of
requests in flight: images/s, MB/s, and milliseconds of the client's processor time for an image. Not a test; its
figures are quoted in docs/reference/data.md.
"""
from __future__ import annotations

import asyncio
import contextlib
import http.client
import multiprocessing
import random
import re
import sys
import threading
import time
from collections.abc import Iterator

OBJECT_BYTES = 64 * 2**20
SECONDS = 4.
IN_FLIGHT = (1, 16, 64, 256)


def serve(latency_s: float, address: multiprocessing.Queue[int]) -> None:
  """Answers ranges of one object, each after the latency; in a process of its own."""
  content = bytes(OBJECT_BYTES)

  async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
      while request := await reader.readuntil(b'\r\n\r\n'):
        found = re.search(rb'bytes=(\d+)-(\d+)', request)
        assert found
        first, last = int(found[1]), int(found[2])
        await asyncio.sleep(latency_s)
        writer.write(b'HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n\r\n' % (last - first + 1))
        writer.write(memoryview(content)[first:last + 1])
        await writer.drain()

  async def main() -> None:
    server = await asyncio.start_server(answer, '127.0.0.1', 0, backlog=1024)
    address.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()

  asyncio.run(main())


def read(port: int, num_bytes: int, until_s: float, counts: list[int]) -> None:
  """Reads images in random places until the time is over, over one connection."""
  connection, draw, count = http.client.HTTPConnection('127.0.0.1', port), random.Random(), 0
  while time.monotonic() < until_s:
    first = draw.randrange(OBJECT_BYTES - num_bytes)
    connection.request('GET', '/shard', headers={'Range': f'bytes={first}-{first + num_bytes - 1}'})
    assert len(connection.getresponse().read()) == num_bytes
    count += 1
  counts.append(count)


@contextlib.contextmanager
def server(latency_s: float) -> Iterator[int]:
  """The port of a running server."""
  address: multiprocessing.Queue[int] = multiprocessing.Queue()
  process = multiprocessing.Process(target=serve, args=(latency_s, address), daemon=True)
  process.start()
  yield address.get()
  process.terminate()


def measure(port: int, num_bytes: int, in_flight: int) -> tuple[float, float]:
  """Returns images/s, and seconds of this process's processor time for an image."""
  counts: list[int] = []
  began_s, own_s = time.monotonic(), time.process_time()
  threads = [threading.Thread(target=read, args=(port, num_bytes, began_s + SECONDS, counts)) for _ in range(in_flight)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  total = max(1, sum(counts))
  return total / (time.monotonic() - began_s), (time.process_time() - own_s) / total


def main(latency_ms: float = 30., num_bytes: float = 100_000) -> None:
  """Prints the table."""
  with server(latency_ms / 1e3) as port:
    for in_flight in IN_FLIGHT:
      rate, own_s = measure(port, int(num_bytes), in_flight)
      print(f'{in_flight:4} in flight: {rate:7.0f} images/s {rate * num_bytes / 1e6:7.1f} MB/s '
            f'{1e3 * own_s:.2f} ms of the client for an image', flush=True)


if __name__ == '__main__':
  main(*map(float, sys.argv[1:]))
