"""`--job=plan`: computes whether a run fits on hardware that is not here, the time of its step, and its cost.

For a study it plans each distinct program once, and computes the cost of all runs together.
"""
from __future__ import annotations

import dataclasses

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.plan import plan as plans
from vit_jax.plan import search as plan_search
from vit_jax.plan import study, table, topologies
from vit_jax.record import console, destination, run_directory, storage


def run(config: schema.Config | schema.Study | None, topology: str, *, workdir: storage.Path | None = None,
        slices: int = 0, to: storage.Path | None, search: bool, quick: bool = False, price: float = 0.,
        source: str = '') -> int:
  """Plans, prints, and writes `plan.md` and `plan.json` into the directory `to` if there is one.

  Args:
    config: the config of `--config`, or of the run in `workdir`; None without both.
    topology: name of the hardware.
    workdir: directory of a run, which has the config; it is only read.
    slices: number of such slices; 0 = as in the config.
    to: directory to write; None = only print.
    search: also search for settings.
    quick: compile shorter networks, and extend the figures.
    price: price of one chip or GPU for an hour; 0 = unknown.
    source: the flag with the config, such as `--config=digits`.
  """
  if to is not None:
    run_directory.check_ours(to, '--to')
    destination.check_writable(to, setting='--to', advice='Choose another folder.')
  if workdir is not None and source.startswith('--config='):
    raise UserError(f'--workdir: expected a run in place of --config, got both. Set --to={workdir} to write plan.md '
                    'and plan.json there.')
  if config is None:
    raise UserError('--config: expected a config or the --workdir of a run, got neither. Set --config=NAME.')
  if isinstance(config, schema.Study):
    if price:
      raise UserError('--price: expected the config of one run, got a study. Plan one of its runs.')
    if search:
      raise UserError('--search: expected the config of one run, got a study. Search for settings of one of its runs.')
    for run_config in config.runs.values():
      topologies.for_run(run_config, topology, slices)  # raises UserError if the slices differ
    text, content = study.make(config, topology, to=to, is_quick=quick, slices=slices)
  else:
    check.check(config)
    subject = plans.Subject(config, topologies.for_run(config, topology, slices), *plans.numbers(config))
    plan = dataclasses.replace(plans.make(plans.lay_out(subject), is_quick=quick), hourly_price=price)
    text, content = table.render(plan), table.to_json(plan)
  console.end_stage()
  print(text, flush=True)
  if search:
    tried = plan_search.search(plan)
    search_text = plan_search.render(tried)
    console.end_stage()
    print(search_text, flush=True)
    text += f'\n{search_text}'
    content['search'] = plan_search.to_json(tried)
  if to is not None:
    with run_directory.hold(to):
      run_directory.write_text(to / 'plan.md', text + '\n')
      run_directory.write_json(to / 'plan.json', content)
  return 0
