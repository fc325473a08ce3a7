"""`--job=plan`: whether a run fits on hardware that is not here, how fast its step is, and what the run costs.

Of a study it plans each distinct program once, and gives the cost of all runs together.
"""
from __future__ import annotations

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.plan import plan as plans
from vit_jax.plan import search as plan_search
from vit_jax.plan import study, table, topologies
from vit_jax.record import run_directory, storage


def run(config: schema.Config | schema.Study, topology: str, *, workdir: storage.Path | None, search: bool,
        quick: bool = False) -> int:
  """Plans, prints, and writes `plan.md` and `plan.json` into `workdir` if there is one."""
  if isinstance(config, schema.Study):
    if search:
      raise UserError('--search: expected the config of one run, got a study. Search for settings of one of its runs.')
    text, content = study.make(config, topology, workdir=workdir, is_quick=quick)
  else:
    check.check(config)
    subject = plans.Subject(config, topologies.parse(topology, slices=config.mesh.slices), *plans.numbers(config))
    plan = plans.make(plans.lay_out(subject), is_quick=quick)
    text, content = table.render(plan), table.to_json(plan)
  print(text, flush=True)
  if search:
    tried = plan_search.search(plan)
    found = plan_search.render(tried)
    print(found, flush=True)
    text, content = f'{text}\n{found}', {**content, 'search': plan_search.to_json(tried)}
  if workdir is not None:
    with run_directory.hold(workdir):
      run_directory.write_text(workdir / 'plan.md', text + '\n')
      run_directory.write_json(workdir / 'plan.json', content)
  return 0
