"""Reads mutated files in processes of their own, which may take only so much memory and time beside their imports.

A fuzzer of a reader is a program with `number -> what became of the case`: it calls `main`, which limits the memory and
prints a line of JSON for each case. Its test calls `run`, which starts the program, and `check`, which expects that
each file was read, or refused with a message that a person can use. A case depends on its number alone.
"""
from __future__ import annotations

import collections
import copy
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.core.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
CASES = 2_000  # of each fuzzer in the slow tests
MEMORY_BYTES = 2 << 30  # beside what the imports take
CPU_S = 10.  # of one case
LONGEST = 10_000  # characters of a message
Rng = np.random.Generator
Result = dict[str, Any]

PYTHON_WORDS = re.compile(
    r"object has no attribute|invalid literal|could not convert|not subscriptable|not iterable|not callable|unhashable"
    r"|positional argument|keyword argument|must be (a |an )?(str|int|real|bytes|sequence|integer|string)\b|NoneType"
    r"|'(list|dict|str|int|float|bool|tuple)'|\b[A-Z]\w*(Error|Exception|Warning)\b|Traceback|codec can't|<class "
    r"|object is not|<\w+ object|Expecting (value|property|',')|Errno|math domain|out of bounds for|DType\b|ufunc")
"""Words of Python and of libraries that say nothing to a person about a file."""


class Hang(BaseException):
  """A case that takes longer than `CPU_S`."""


# The process that reads.

def limit_memory(num_bytes: int = MEMORY_BYTES) -> None:
  """Lets this process map only so much memory more than now; Linux only."""
  used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes,) * 2)


def outcome(read: Callable[[], Any], *, refusals: tuple[type[Exception], ...] = (UserError,),
            cpu_s: float = CPU_S) -> Result:
  """What becomes of a case: `read` with what JSON can express, `refused` with the message, or `error`."""
  def hang(*_: object) -> None:
    raise Hang

  signal.signal(signal.SIGPROF, hang)
  signal.setitimer(signal.ITIMER_PROF, cpu_s)
  start = time.process_time()
  found: Result = {}
  try:
    found = {'read': read()}
  except refusals as error:
    found = {'refused': str(error)}
  except (Exception, Hang):
    signal.setitimer(signal.ITIMER_PROF, 0)
    found = {'error': traceback.format_exc()}
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
  return {**found, 'cpu_s': round(time.process_time() - start, 3)}


def main(case: Callable[[int], Result], arguments: Sequence[str], *, num_bytes: int = MEMORY_BYTES) -> None:
  """Does the cases FIRST to LAST, `arguments`, and prints what became of each; first one without limit, to import."""
  first, last = map(int, arguments)
  case(first)
  limit_memory(num_bytes)
  for number in range(first, last):
    print(json.dumps({'number': number, **case(number)}), flush=True)


# The test.

def run(module: str, *arguments: object, home: pathlib.Path, timeout_s: float = 600.) -> list[Result]:
  """The results of a program that calls `main`. It may write into `home`, where it starts."""
  for name in ('work', 'home', 'cache', 'tmp'):
    (home / name).mkdir(parents=True, exist_ok=True)
  environ = os.environ | {'HOME': str(home / 'home'), 'XDG_CACHE_HOME': str(home / 'cache'),
                          'TMPDIR': str(home / 'tmp'), 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  environ.pop('JAX_COMPILATION_CACHE_DIR', None)
  done = subprocess.run([sys.executable, '-m', module, *map(str, arguments)], capture_output=True, text=True,
                        cwd=home / 'work', env=environ, timeout=timeout_s)
  assert done.returncode == 0, f'status {done.returncode}: {done.stdout[-300:]}{done.stderr[-3000:]}'
  return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]


def check(results: Sequence[Result], num: int) -> None:
  """Every case was read, or refused with a message that a person can use."""
  assert len(results) == num
  for one in results:
    assert 'error' not in one, f'case {one["number"]}: {one["error"]}'
    assert ('read' in one) != ('refused' in one), one
    if 'refused' in one:
      check_message(one['refused'])


def check_message(text: str) -> None:
  """It says what was expected and what was found, in our words, and can be printed."""
  assert 'expected' in text and 'got ' in text, text
  check_words(text)


def check_words(text: str) -> None:
  """It can be printed, and has no words of Python."""
  assert len(text) < LONGEST and text.replace('\n', '').isprintable(), text[:LONGEST]
  assert not (found := PYTHON_WORDS.search(text)), f'{found and found[0]!r} in: {text}'


def shares(results: Sequence[Result], name: str) -> dict[str, tuple[int, int]]:
  """The numbers of cases that were read and refused, by a field such as `mutation`."""
  found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
  for one in results:
    found[one[name]]['refused' in one] += 1
  return {key: (read, refused) for key, (read, refused) in found.items()}


# Mutations of bytes.

_NUMBERS = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_WORDS = ('0', '-1', '1', '7', '4294967296', '9' * 25, '9' * 5000, '1e3', '1e999', 'null', 'true', 'NaN', '"', "'", '[',
          '{}', '..', '../..', '/etc/passwd', '\\u0000', '\\ud800', '', '(', ',', '\n', '\t', '\0', '\x1b[2J', '٣', '²',
          'é', '\u202e', '[' * 20_000)


def flipped(rng: Rng, content: bytes) -> bytes:
  found = bytearray(content)
  for _ in range(rng.integers(1, 9) if found else 0):
    found[int(rng.integers(len(found)))] ^= 1 << int(rng.integers(8))
  return bytes(found)


def truncated(rng: Rng, content: bytes) -> bytes:
  return content[:int(rng.integers(len(content) + 1))]


def inserted(rng: Rng, content: bytes) -> bytes:
  at, length = int(rng.integers(len(content) + 1)), int(rng.integers(1, 40))
  if rng.random() < .3:
    return content[:at] + content[at + length:]
  return content[:at] + (rng.bytes(length) if rng.random() < .5 else bytes(length)) + content[at:]


def repeated(rng: Rng, content: bytes) -> bytes:
  """A part of the file once more, or very often."""
  a, b = sorted(int(rng.integers(len(content) + 1)) for _ in range(2))
  return content[:a] + content[a:b] * (int(rng.integers(2, 5)) if rng.random() < .9 else 1_000) + content[b:]


def numbers(rng: Rng, content: bytes) -> bytes:
  """Numbers of 1, 2, 4 or 8 bytes replaced by others that are of interest."""
  found, size = bytearray(content), int(rng.choice([1, 2, 4, 8]))
  order = 'little' if rng.random() < .5 else 'big'
  for _ in range(rng.integers(1, 4)):
    at = int(rng.integers(max(1, len(found) - size + 1)))
    value = _NUMBERS[int(rng.integers(len(_NUMBERS)))] % 2**(8 * size)
    found[at:at + size] = value.to_bytes(size, order)  # type: ignore[arg-type]
  return bytes(found)


def words(rng: Rng, content: bytes) -> bytes:
  """Numbers and words of a text replaced by others."""
  places = list(re.finditer(rb'[\w./-]+', content))
  for place in sorted(rng.choice(len(places), min(len(places), int(rng.integers(1, 4))), replace=False))[::-1]:
    new = _WORDS[int(rng.integers(len(_WORDS)))].encode()
    content = content[:places[place].start()] + new + content[places[place].end():]
  return content


def lines(rng: Rng, content: bytes) -> bytes:
  """Lines of a text that are lost, repeated, joined, exchanged, very long, or of another encoding."""
  found = content.splitlines(keepends=True) or [b'\n']
  at, other = (int(rng.integers(len(found))) for _ in range(2))
  match rng.integers(8):
    case 0:
      del found[at]
    case 1:
      found.insert(other, found[at])
    case 2:
      found[at] = found[at].rstrip(b'\r\n')
    case 3:
      found[at], found[other] = found[other], found[at]
    case 4:
      found[at] = found[at].rstrip(b'\r\n') * 20_000 + b'\n'
    case 5:
      found[at] = found[at].replace(b'\n', b'\r\n').replace(b',', b'\t')
    case 6:
      return content.decode(errors='replace').encode(str(rng.choice(['utf-16', 'utf-32', 'utf-8-sig'])))
    case _:
      found[at] = b'\xe9\xff' + found[at]
  return b''.join(found)


OF_BYTES: tuple[Callable[[Rng, bytes], bytes], ...] = (flipped, truncated, inserted, repeated, numbers)
OF_TEXT: tuple[Callable[[Rng, bytes], bytes], ...] = (*OF_BYTES, words, words, lines, lines)


def mutate(rng: Rng, content: bytes, mutations: Sequence[Callable[[Rng, bytes], bytes]]) -> tuple[str, bytes]:
  """The name of one of the mutations, and what it makes of a file."""
  chosen = mutations[int(rng.integers(len(mutations)))]
  return chosen.__name__, chosen(rng, content)


# Mutations of values that JSON can express.

def hostile_value(rng: Rng) -> Any:
  """A value of any type that a field may not expect."""
  nested: Any = []
  for _ in range(int(rng.integers(1, 60))):
    nested = [nested] if rng.random() < .5 else {'a': nested}
  values = (None, True, False, -1, 0, 1, 7, 1e3, .5, 1e308, float('nan'), float('inf'), 10**25, 2**31, 2**63, -2**63,
            '', ' ', 'a', '0', '1', '\0', '\ud800', '\x1b[2J', 'a\nb', '..', '../a', '/etc/passwd', 'é' * 300,
            'a' * 100_000, [], [None], [1], ['a', 'a'], [[1, 2], [3]], {}, {'': 0}, {'a': {'b': []}}, nested,
            list(range(10_000)), ['a'] * 10_000)
  return copy.deepcopy(values[int(rng.integers(len(values)))])


def fields(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
  """The paths of all fields of a value, its own () first."""
  yield above
  entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
  for key, one in entries:
    yield from fields(one, (*above, key))


def mutate_json(rng: Rng, value: Any) -> Any:
  """A copy of a value with one to three fields replaced, removed, added, repeated, or with another name."""
  found = copy.deepcopy(value)
  for _ in range(int(rng.integers(1, 4))):
    paths = list(fields(found))[1:]
    if not paths or rng.random() < .02:
      return hostile_value(rng)
    *above, key = paths[int(rng.integers(len(paths)))]
    holder = found
    for step in above:
      holder = holder[step]
    match int(rng.integers(6)):
      case 0:
        del holder[key]
      case 1 if isinstance(holder, list):
        holder.insert(int(rng.integers(len(holder) + 1)), copy.deepcopy(holder[key]))
      case 1:
        holder[str(rng.choice(['', 'a', 'format', f'{key} ', '__class__']))] = holder.pop(key)
      case 2 if isinstance(holder[key], int | float):
        holder[key] = [holder[key] * 10**6, -holder[key], holder[key] + 1, holder[key] + .5, str(holder[key])][
            int(rng.integers(5))]
      case 2 if isinstance(holder[key], str):
        holder[key] = words(rng, holder[key].encode(errors='replace')).decode(errors='replace')
      case _:
        holder[key] = hostile_value(rng)
  return found
