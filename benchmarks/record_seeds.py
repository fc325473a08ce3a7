"""Tables that compare studies: a row for each record, with the median and the range of some metrics over its seeds.

The runs of such a record are named `NAME_seedN`, all of one name. Records of one table belong to each other: the same
network and evaluations, and equal images or processor seconds.
"""
from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import durations
from vit_jax.core.errors import UserError
from vit_jax.replay.records import Record

_SOURCE = re.compile(r'source=[^,]*,?')


class Seeds(NamedTuple):
  """The results of a record: the name of its runs, and values by metric, one for each seed."""
  name: str
  values: dict[str, list[float]]


def read(record: Record, metrics: Sequence[str]) -> Seeds:
  """Returns the values of a record; a metric may have a view, as in `knn/top1_k20@teacher`.

  Raises:
    UserError: its runs have several names, or none of the form NAME_seedN.
  """
  found: dict[str, list[float]] = {metric: [] for metric in metrics}
  names: set[str] = set()
  for key, value in record.values.items():
    run, _, metric = key.partition(' ')
    name, is_seed, _ = run.rpartition('_seed')
    if is_seed and (known := metric.partition('@')[0]) in found:
      names.add(name)
      found[known].append(value)
  if len(names) != 1:
    raise UserError(f'{record.id}: expected runs NAME_seedN of one name with {", ".join(metrics)}, got '
                    f'{", ".join(sorted(names)) or "none"}. Record such runs.')
  return Seeds(names.pop(), found)


def table(records: Sequence[Record], headings: Mapping[str, str], against: Record,
          places: Mapping[str, tuple[str, str]]) -> str:
  """Returns the table, best median of the first metric first.

  Args:
    records: a row each.
    headings: of the columns, by metric.
    against: the record whose median of the first metric is subtracted in a column of its own.
    places: where each record was made and how it is replayed, as cells, by id.
  """
  metrics = list(headings)
  base = read(against, metrics)
  first = metrics[0]

  def median(one: Seeds) -> float:
    return statistics.median(one.values[first])

  rows = sorted(((read(record, metrics), record) for record in records), key=lambda row: -median(row[0]))
  head = ['method', 'images', 'processor s', *headings.values(), f'against {base.name}', 'seeds', 'command', 'made on',
          'replay']
  lines = [head, ['---'] * len(head)]
  for seeds, record in rows:
    number = len(seeds.values[first])
    spent = record.made.get('training_processor_s', 0) / number
    lines.append([
        f'`{seeds.name}`', _images(record), f'{spent:,.0f}' if spent >= .5 else '0',
        *(_spread(seeds.values[metric]) for metric in metrics),
        '' if seeds.name == base.name else f'{100 * (median(seeds) - median(base)):+.1f}', str(number),
        f'`{_config(record)}`', *places[record.id]])
  return ''.join(f'| {" | ".join(line)} |\n' if line[0] != '---' else f'|{"|".join(line)}|\n' for line in lines)


def _spread(values: list[float]) -> str:
  """Returns the median in percent, and the range of several values."""
  low, middle, high = (f'{100 * value:.1f}' for value in (min(values), statistics.median(values), max(values)))
  return f'{middle} %' if len(values) == 1 else f'{middle} % ({low} to {high})'


def _images(record: Record) -> str:
  length = durations.parse(record.settings['length'])
  return f'{length.value:,.0f}' if length.unit == 'examples' else 'none'


def _config(record: Record) -> str:
  """Returns the config of the last command, without the source of its images."""
  (found,) = (word.partition('=')[2] for word in record.words()[-1] if word.startswith('--config='))
  return _SOURCE.sub('', found).rstrip(':,')
