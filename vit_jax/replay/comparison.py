"""Compares the outcome of a replay with its record: EQUAL, CLOSE, or what differs and by how much."""
from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.record import machine
from vit_jax.replay.outcomes import Outcome
from vit_jax.replay.records import Record


class Status(enum.IntEnum):
  """The exit statuses of a replay, beside those of every job."""
  EQUAL = 0  # and CLOSE
  RESULT = 3  # another result, on a machine and packages that have the same bits
  MACHINE = 4  # another result, and a machine or packages with other bits
  DATA = 5  # other data or weights; nothing ran
  CONFIG = 6  # other settings
  MISSING = 7  # data or weights are not given; nothing ran


class Verdict(NamedTuple):
  """The status, lines that say what was compared and what differs, and whether all is equal bit for bit."""
  status: Status
  lines: list[str]
  is_equal: bool = False


def compare(record: Record, found: Outcome) -> Verdict:
  """Compares values and parameters with the record, bit for bit.

  What is not equal may be close, within the tolerance of each value, on another kind of machine or where the record
  allows it on the same one too.
  """
  changed = {**machine.differences(record.made.get('machine', {}), found.machine)}
  is_same = bool(record.made.get('machine')) and not changed
  exact = [*_values(record, found, lambda name: 0.), *_digests(record, found)]
  about = [f'{name}: {old} -> {new}' for name, (old, new) in changed.items()]
  commit = record.made.get('commit', '')
  if commit != found.commit:
    about.append(f'commit: {commit[:12] or "unknown"} -> {found.commit[:12] or "unknown"}')
  digests = len(_pairs(record, found))
  if not exact and digests:
    return Verdict(Status.EQUAL, [f'EQUAL: {_count(record)} and {digests} digest{"s" * (digests != 1)} of parameters, '
                                  'bit for bit.', *_since(about)], is_equal=True)
  tolerance = record.tolerance
  note = f' ({tolerance.reason})' if tolerance.reason and (tolerance.same if is_same else tolerance.elsewhere) else ''
  wrong = exact if is_same and not tolerance.same else _values(
      record, found, lambda name: tolerance.of(name, is_same=is_same))
  if not wrong:
    return Verdict(Status.EQUAL, [f'CLOSE: {_count(record)} within {_range(record, is_same)}{note}. Not equal:',
                                  *(f'  {line}' for line in exact or ['no digest of parameters was recorded']),
                                  *_since(about)])
  status = Status.RESULT if is_same else Status.MACHINE
  return Verdict(status, [f'DIFFERS from the record{note}:', *(f'  {line}' for line in wrong), *_since(about)])


def _count(record: Record) -> str:
  return f'{len(record.values)} value{"s" * (len(record.values) > 1)}'


def _range(record: Record, is_same: bool) -> str:
  """Returns the smallest and the largest tolerance of the values of a record."""
  found = [record.tolerance.of(name, is_same=is_same) for name in record.values]
  return ' to '.join(dict.fromkeys(f'{one:.2g}' for one in (min(found), max(found))))


def _since(about: list[str]) -> list[str]:
  return ['Changed since the record was made:', *(f'  {line}' for line in about)] if about else []


def _values(record: Record, found: Outcome, allowed: Callable[[str], float]) -> list[str]:
  """Returns the values that differ by more than what is allowed by their names."""
  measured = found.history | found.values
  lines = []
  for name, value in record.values.items():
    most = allowed(name)
    if name not in measured:
      lines.append(f'value {name}: {value!r} -> not measured')
    elif not abs(measured[name] - value) <= most:
      by = f', within {most:.2g} allowed' if most else ''
      lines.append(f'value {name}: {value!r} -> {measured[name]!r}, by {measured[name] - value:+.3g}{by}')
  return lines


def _digests(record: Record, found: Outcome) -> list[str]:
  return [f'parameters {where}: {old[:12]} -> {new[:12] or "not saved"}'
          for where, (old, new) in _pairs(record, found).items() if old != new]


def _pairs(record: Record, found: Outcome) -> dict[str, tuple[str, str]]:
  """Returns the digests of the record and of the replay, by where the parameters are from."""
  pairs = {'at the end': (record.params_digest, found.params_digest)} if record.params_digest else {}
  return pairs | {f'at {name}': (digest, found.checkpoints.get(name, ''))
                  for name, digest in record.checkpoints.items()}


def header(record: Record) -> str:
  """Returns the text before a replay: the claim, and where it is from."""
  made = record.made
  machine = made.get('machine', {})
  device = machine.get('device_kind', 'cpu')
  parts = [made.get('date', ''), f'commit {made["commit"][:12]}' if made.get('commit') else '',
           '' if device == 'cpu' else device, machine.get('cpu_model', ''),
           f'{made["processor_s"]:,.0f} processor seconds' if made.get('processor_s') else '']
  return f'{record.sentence}\nRecorded: {", ".join(filter(None, parts)) or "without a machine"}'


