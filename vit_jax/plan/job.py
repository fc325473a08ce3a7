"""`--job=plan`: whether a run fits on hardware that is not here, how fast its step is, and what the run costs."""
from __future__ import annotations

from vit_jax.config import check, schema
from vit_jax.plan import plan as plans
from vit_jax.plan import search as plan_search
from vit_jax.plan import table, topologies
from vit_jax.record import run_directory, storage


def run(config: schema.Config, topology: str, *, workdir: storage.Path | None, search: bool) -> int:
  """Plans, prints, and writes `plan.md` and `plan.json` into `workdir` if there is one."""
  check.check(config)
  subject = plans.Subject(config, topologies.parse(topology, slices=config.mesh.slices), *plans.numbers(config))
  plan = plans.make(plans.lay_out(subject))
  text, content = table.render(plan), plan.to_json()
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
