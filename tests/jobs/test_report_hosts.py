"""The table of hosts in the report of a run."""
from __future__ import annotations

import pathlib

from vit_jax.jobs import report_hosts, report_page
from vit_jax.record.reader import Event
from vit_jax.record.writer import Writer


def event(step: int, cause: str = 'data', late_s: float = .2, **more: object) -> Event:
  return {'event': 'hosts', 'step': step, 'steps': 10, 'step_s': [.3, .3], 'deviation_s': [.01, .02],
          'data_s': [0., .2], 'host_s': [.001, .003], 'memory_gib': [1.5, 2.], 'slowest': 1, 'slowest_name': 'b',
          'late_s': late_s, 'cause': cause, **more}


def test_means_of_each_host_and_who_was_late_are_shown() -> None:
  found = report_hosts.summarize([event(10), event(20, data_s=[0., .4], late_s=.4), event(30, '', 0.)])
  assert found and found.rows == [
      ('0', '300 ms', '10 ms', '0 ms', '1 ms', '1.50 GiB', '0 of 3'),
      ('1', '300 ms', '20 ms', '267 ms', '3 ms', '2.00 GiB', '2 of 3')]
  assert found.sentences == ['Host 1 (b) was late in 2 of 3 intervals, waiting for data: it launched a step 300 ms '
                             'after the others on average, which cost the run up to 6 s.']


def test_a_run_that_goes_on_with_fewer_hosts_shows_those() -> None:
  now = event(20, '', 0.) | {name: [.1] for name in ('step_s', 'deviation_s', 'data_s', 'host_s', 'memory_gib')}
  found = report_hosts.summarize([event(10), now])
  assert found and [row[0] for row in found.rows] == ['0'] and not found.sentences
  assert report_hosts.summarize([]) is None
  assert report_hosts.summarize([{'event': 'hosts', 'step_s': 'x'}]) is None


def test_the_page_has_the_table(tmp_path: pathlib.Path) -> None:
  with Writer(tmp_path, process_index=0, resumed_from=None, progress_total=10, progress=False) as writer:
    fields = event(10)
    writer.event(str(fields.pop('event')), **fields)
  page = report_page.to_html([tmp_path])
  assert '<h2>Hosts</h2>' in page and 'Host 1 (b) was late in 1 of 1 intervals' in page and '2.00 GiB' in page
