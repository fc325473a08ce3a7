"""How fast one process reads the records of a prepared dataset from object storage, compared with local files.

  python -m benchmarks.object_store [--latency_ms=20] [--images=FOLDER] [--num=6000] [--cores=2] [--tls]

A server on this machine, in a process of its own, answers each request for a range after the latency, as `gs://`
(TENSORSTORE_GCS_HTTP_URL). The images are files below FOLDER, repeated, or random bytes of ImageNet's sizes (110 kB on
average, log-normal). The reader takes batches of 128 in the order of training with as many threads as cores, without
decoding: images/s of two epochs, its processor time for an image, and its peak memory. The server shares the cores with
the reader. `--tls` encrypts, with a certificate that `openssl` makes.
"""
from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import re
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np

BATCH = 128
NUM_SHARDS = 16


def write(folder: pathlib.Path, images: str, num: int) -> None:
  """Writes a prepared dataset of `num` records: files below a folder, repeated, or random bytes."""
  rng = np.random.default_rng(0)
  files = [path.read_bytes() for path in sorted(pathlib.Path(images).rglob('*.[jJ]*'))] if images else []
  sizes = np.clip(rng.lognormal(11.5, .5, num), 5e3, 2e6).astype(int).tolist()
  write_records(folder, [files[row % len(files)] if files else rng.bytes(sizes[row]) for row in range(num)], NUM_SHARDS)


def write_records(folder: pathlib.Path, images: Sequence[bytes], num_shards: int) -> None:
  """Writes a prepared dataset of these images."""
  from array_record.python import array_record_module

  from vit_jax.data import user_files
  from vit_jax.data.formats import example
  folder.mkdir(parents=True)
  listed = []
  for number, rows in enumerate(np.array_split(np.arange(len(images)), num_shards)):
    path = folder / f'train-{number:05d}-of-{num_shards:05d}.array_record'
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for row in rows.tolist():
      writer.write(example.serialize({'image': images[row], 'label': row % 10, 'name': str(row).encode()}))
    writer.close()
    listed.append({'file': path.name, 'num_examples': len(rows), 'num_bytes': path.stat().st_size,
                   'sha256': user_files.sha256(path)})
  (folder / 'info.json').write_text(json.dumps({'format': 'vit_jax images 1', 'made': {}, 'splits': {'train': listed},
                                                'class_names': list('abcdefghij')}))


def serve(folder: str, latency_s: float, certificate: str, address: multiprocessing.Queue[int]) -> None:
  """Answers ranges of the files of a folder, each after the latency."""
  files = {path.name: os.open(path, os.O_RDONLY) for path in pathlib.Path(folder).iterdir()}
  sizes = {name: os.fstat(file).st_size for name, file in files.items()}

  async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
      while request := await reader.readuntil(b'\r\n\r\n'):
        name = re.split(r'%2F|/', request.split(b' ')[1].decode().partition('?')[0])[-1]
        await asyncio.sleep(latency_s)
        if name not in files:
          writer.write(b'HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n')
          continue
        found = re.search(rb'[Rr]ange: *bytes=(\d+)-(\d+)', request)
        first, last = (int(found[1]), min(int(found[2]), sizes[name] - 1)) if found else (0, sizes[name] - 1)
        writer.write(b'HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nx-goog-generation: 1\r\n'
                     b'Content-Range: bytes %d-%d/%d\r\n\r\n' % (last - first + 1, first, last, sizes[name]))
        writer.write(os.pread(files[name], last - first + 1, first))
        await writer.drain()

  async def main() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
    if context:
      context.load_cert_chain(certificate)
    server = await asyncio.start_server(answer, '127.0.0.1', 0, backlog=2048, ssl=context)
    address.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()

  with contextlib.suppress(ImportError):
    import uvloop
    return uvloop.run(main())
  return asyncio.run(main())


@contextlib.contextmanager
def served(folder: pathlib.Path, latency_s: float, certificate: str) -> Iterator[str]:
  """Yields the address of a running server."""
  address: multiprocessing.Queue[int] = multiprocessing.Queue()
  process = multiprocessing.Process(target=serve, args=(str(folder), latency_s, certificate, address), daemon=True)
  process.start()
  yield f'http{"s" if certificate else ""}://127.0.0.1:{address.get()}'
  process.terminate()


def certify(folder: str) -> str:
  """Returns the path of a certificate of this machine and its key."""
  path = f'{folder}/certificate.pem'
  subprocess.run(['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-keyout', path, '-out', f'{path}.part',
                  '-days', '2', '-subj', '/CN=localhost', '-addext', 'subjectAltName=IP:127.0.0.1'], check=True,
                 capture_output=True)
  with open(path, 'ab') as file:
    file.write(pathlib.Path(f'{path}.part').read_bytes())
  return path


def read(where: str, threads: int, num_epochs: int) -> None:
  """Reads epochs of a dataset, and prints what each took."""
  from vit_jax.config import schema
  from vit_jax.data import opening, order
  data = schema.Data(source=f'array_record:{where}')
  source = opening.open_split(data, 'train', image_px=(224, 224))
  num_batches = len(source) // BATCH

  def batch(number: int) -> int:
    indexes = order.Shuffled(len(source), 0)(number * BATCH + np.arange(BATCH)).tolist()
    return sum(len(record.image) for record in source.read(indexes))

  for epoch in range(num_epochs):
    began_s, own_s = time.monotonic(), time.process_time()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      total = sum(pool.map(batch, range(epoch * num_batches, (epoch + 1) * num_batches)))
    num, seconds = num_batches * BATCH, time.monotonic() - began_s
    print(f'epoch {epoch + 1}: {num / seconds:6.0f} images/s {total / seconds / 1e6:6.1f} MB/s '
          f'{1e3 * (time.process_time() - own_s) / num:.2f} ms of the reader for an image, peak memory '
          f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB', flush=True)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--latency_ms', type=float, default=20.)
  parser.add_argument('--images', default='', help='a folder of JPEG files; default: random bytes of such sizes')
  parser.add_argument('--num', type=int, default=6_000)
  parser.add_argument('--cores', type=int, default=2)
  parser.add_argument('--tls', action='store_true')
  parser.add_argument('--read', nargs=2, help=argparse.SUPPRESS)  # in a process of its own
  flags = parser.parse_args()
  if flags.read:
    where, num_epochs = flags.read
    return read(where, flags.cores, int(num_epochs))
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch) / 'set'
    write(folder, flags.images, flags.num)
    size = sum(path.stat().st_size for path in folder.iterdir()) / flags.num
    print(f'{flags.num:,} records of {size / 1e3:.0f} kB on average in {NUM_SHARDS} shards, {flags.cores} threads')
    certificate = certify(scratch) if flags.tls else ''
    with served(folder, flags.latency_ms / 1e3, certificate) as address:
      remote = f'object storage, {flags.latency_ms:g} ms'
      for title, where in (('local files', str(folder)), (remote, 'gs://bucket/set')):
        print(f'{title}:', flush=True)
        subprocess.run([sys.executable, '-m', 'benchmarks.object_store', f'--cores={flags.cores}', '--read', where,
                        '2'], check=True, env=os.environ | {
                            'TENSORSTORE_GCS_HTTP_URL': address, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',
                            'TENSORSTORE_CA_BUNDLE': certificate})
  return None


if __name__ == '__main__':
  main()
