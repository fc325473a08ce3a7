"""Compares the outcome of a replay with its record: EQUAL, or what differs and by how much."""
from __future__ import annotations

import enum
from typing import NamedTuple

from vit_jax.record import machine
from vit_jax.replay.outcomes import Outcome
from vit_jax.replay.records import Record


class Status(enum.IntEnum):
  """The exit statuses of a replay, beside those of every job."""
  EQUAL = 0
  RESULT = 3  # another result, on a machine and packages that have the same bits
  MACHINE = 4  # another result, and a machine or packages with other bits
  DATA = 5  # other data or weights; nothing ran
  CONFIG = 6  # other settings
  MISSING = 7  # data or weights are not given; nothing ran


class Verdict(NamedTuple):
  """The status, and lines that say what was compared and what differs."""
  status: Status
  lines: list[str]


def compare(record: Record, found: Outcome) -> Verdict:
  """Compares values, and where the machine allows it the parameters, with the record."""
  changed = {**machine.differences(record.made.get('machine', {}), found.machine)}
  is_same = bool(record.made.get('machine')) and not changed
  allowed = record.tolerance.same if is_same else record.tolerance.elsewhere
  wrong = _values(record, found, allowed)
  if is_same and not record.tolerance.same:
    wrong += _digests(record, found)
  about = [f'{name}: {old} -> {new}' for name, (old, new) in changed.items()]
  commit = record.made.get('commit', '')
  if commit != found.commit:
    about.append(f'commit: {commit[:12] or "unknown"} -> {found.commit[:12] or "unknown"}')
  note = f' ({record.tolerance.reason})' if record.tolerance.reason and allowed else ''
  if not wrong:
    return Verdict(Status.EQUAL, [f'EQUAL: {_extent(record, is_same, allowed)}{note}.', *_since(about)])
  status = Status.RESULT if is_same else Status.MACHINE
  return Verdict(status, [f'DIFFERS from the record{note}:', *(f'  {line}' for line in wrong), *_since(about)])


def _since(about: list[str]) -> list[str]:
  return ['Changed since the record was made:', *(f'  {line}' for line in about)] if about else []


def _extent(record: Record, is_same: bool, allowed: float) -> str:
  values = f'{len(record.values)} value{"s" * (len(record.values) > 1)}'
  if allowed or not is_same:
    which = 'another kind of machine, so the bits are not compared' if not is_same else 'as the record allows'
    return f'{values} within {allowed:g}; {which}'
  digests = len(record.checkpoints) + bool(record.params_digest)
  return f'{values} and {digests} digest{"s" * (digests != 1)} of parameters, bit for bit'


def _values(record: Record, found: Outcome, allowed: float) -> list[str]:
  measured = found.history | found.values
  lines = []
  for name, value in record.values.items():
    if name not in measured:
      lines.append(f'value {name}: {value!r} -> not measured')
    elif not abs(measured[name] - value) <= allowed:
      by = f', within {allowed:g} allowed' if allowed else ''
      lines.append(f'value {name}: {value!r} -> {measured[name]!r}, by {measured[name] - value:+.3g}{by}')
  return lines


def _digests(record: Record, found: Outcome) -> list[str]:
  pairs = {'at the end': (record.params_digest, found.params_digest)} if record.params_digest else {}
  pairs |= {f'at {name}': (digest, found.checkpoints.get(name, '')) for name, digest in record.checkpoints.items()}
  return [f'parameters {where}: {old[:12]} -> {new[:12] or "not saved"}' for where, (old, new) in pairs.items()
          if old != new]


def header(record: Record) -> str:
  """Returns the text before a replay: the claim, and where it is from."""
  made = record.made
  machine = made.get('machine', {})
  device = machine.get('device_kind', 'cpu')
  parts = [made.get('date', ''), f'commit {made["commit"][:12]}' if made.get('commit') else '',
           '' if device == 'cpu' else device, machine.get('cpu_model', ''),
           f'{made["processor_s"]:,.0f} processor seconds' if made.get('processor_s') else '']
  return f'{record.sentence}\nRecorded: {", ".join(filter(None, parts)) or "without a machine"}'


