"""The times of the hosts of a run for its report, from the events `hosts` of its record (`train/host_times.py`)."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.record.progress import format_duration
from vit_jax.record.reader import Event

COLUMNS = ('host', 'step', 'deviation', 'waiting for data', 'other work', 'memory', 'intervals late')
_CAUSES = {'data': 'waiting for data', 'host': 'by other work on the host'}


class Hosts(NamedTuple):
  """A sentence for each host that was late, and a table of all hosts with the names of its columns."""
  sentences: list[str]
  columns: tuple[str, ...]
  rows: list[tuple[str, ...]]


def summarize(events: Sequence[Event]) -> Hosts | None:
  """Returns means over all intervals of the newest number of hosts; None without such events."""
  found = [one for one in events if one.get('event') == 'hosts' and _numbers(one, 'step_s')]
  num = len(_numbers(found[-1], 'step_s')) if found else 0
  found = [one for one in found if len(_numbers(one, 'step_s')) == num]
  if not found:
    return None
  late: dict[int, list[Event]] = {host: [] for host in range(num)}
  for one in found:
    host = one.get('slowest')
    if one.get('cause') and isinstance(host, int) and host in late:
      late[host].append(one)

  def mean(name: str, host: int) -> float:
    values = [numbers[host] for one in found if len(numbers := _numbers(one, name)) == num]
    return math.fsum(values) / len(values) if values else math.nan

  rows = [(str(host), *(f'{1000 * mean(name, host):,.3g} ms' for name in ('step_s', 'deviation_s', 'data_s', 'host_s')),
           f'{mean("memory_gib", host):.2f} GiB', f'{len(late[host])} of {len(found)}') for host in range(num)]
  sentences = [_sentence(host, late[host], len(found)) for host in range(num) if late[host]]
  return Hosts(sentences, COLUMNS, rows)


def _sentence(host: int, late: Sequence[Event], num: int) -> str:
  causes = [str(one['cause']) for one in late]
  cause = max(set(causes), key=causes.count)
  seconds = [_number(one.get('late_s')) for one in late]
  total_s = math.fsum(_number(one.get('late_s')) * _number(one.get('steps')) for one in late)
  return (f'Host {host} ({late[-1].get("slowest_name", "")}) was late in {len(late)} of {num} intervals, '
          f'{_CAUSES.get(cause, cause)}: it launched a step {1000 * math.fsum(seconds) / len(seconds):,.3g} ms after '
          f'the others on average, which cost the run up to {format_duration(total_s)}.')


def _numbers(event: Mapping[str, object], name: str) -> list[float]:
  values = event.get(name)
  return [_number(value) for value in values] if isinstance(values, list) else []


def _number(value: object) -> float:
  return float(value) if isinstance(value, int | float) else math.nan
