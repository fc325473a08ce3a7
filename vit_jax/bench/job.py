"""`--job=bench`: times the parts of a config on this machine.

All measurements are interleaved, so that a machine that is busy for a while slows all of them equally. Medians over the
turns are reported. On CPUs the processor time is reported as well, which depends less on other programs on the machine.
The train step is the one of `--job=train`. `python -m benchmarks.peers`, in a checkout, also times other programs.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence

import jax

from vit_jax.bench import own as bench_own
from vit_jax.bench import results
from vit_jax.bench.results import Report, Row
from vit_jax.bench.timing import Others, Part, Spent
from vit_jax.config import check, layout, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import runtime as startup
from vit_jax.recipes import sizes
from vit_jax.record import clock

log = logging.getLogger('vit_jax.jobs')
MIN_S = .5  # of one part in one turn, so that the clock's resolution and the first call do not matter
PAUSE_S = .2  # before each part, see `take_turns`


def run(config: schema.Config, *, models: Sequence[str], px: Sequence[int], parts: Sequence[str], turns: int,
        search: bool, to: pathlib.Path | None, others: Others | None = None) -> int:
  """Times networks and prints a table.

  Args:
    config: of a train run; its model, batch, data and optimizer are timed.
    models: names of `recipes.sizes.model` to time instead of the config's own.
    px: sides of square images to time instead of the config's own; each network is timed at each.
    parts: names of `own.PARTS` to time; () = all. Only what these need is compiled.
    turns: repetitions of every measurement.
    search: time the largest batch, a power of two, whose step fits in memory.
    to: folder for `bench.md` and `bench.json`, and `sizes.png` for several sides; None = only print.
    others: further programs to time.

  Returns:
    Exit status 0.
  """
  others = others or Others()
  _check_parts(parts)
  networks = [(name, _with_model(config, name)) for name in models] or [(config.name, config)]
  networks = [pair for name, one in networks for pair in _at_sizes(name, one, px)]
  for _, one in networks:
    check.check(one)
    others.check(one)
  startup.start()
  reports = []
  for name, one in networks:
    if search:
      one = layout.plain(one)
      one = dataclasses.replace(one, batch_size=bench_own.largest_batch(one))
    reports.append(_measure(name, one, others, chosen=parts or bench_own.PARTS, turns=turns))
  text = results.render(reports)
  print(text, flush=True)
  if to is not None:
    _write(to, text, reports)
  return 0


def _write(to: pathlib.Path, text: str, reports: Sequence[Report]) -> None:
  to.mkdir(parents=True, exist_ok=True)
  (to / 'bench.md').write_text(text + '\n', encoding='utf-8')
  (to / 'bench.json').write_text(json.dumps(results.describe(reports), indent=2) + '\n', encoding='utf-8')
  if len({report.px for report in reports}) > 1 and any(row.part == 'forward' for row in reports[0].rows):
    (to / 'sizes.png').write_bytes(results.figure(reports))


def _with_model(config: schema.Config, name: str) -> schema.Config:
  """Returns the config with another network that keeps the config's dtypes, execution, remat, pool and attention."""
  fields = ('dtype', 'quantize', 'execution', 'remat', 'pool', 'attention')
  kept = {field: getattr(config.model, field) for field in fields if hasattr(config.model, field)}
  model = sizes.model(name.removeprefix('ViT-'))
  return dataclasses.replace(config, name=name, model=dataclasses.replace(
      model, **{field: value for field, value in kept.items() if hasattr(model, field)}))


def _at_sizes(name: str, config: schema.Config, px: Sequence[int]) -> list[tuple[str, schema.Config]]:
  """Returns the config at each image size, with its name; unchanged without sizes."""
  found = []
  for side in px:
    recipe = config.data.recipe  # the size before the center crop of evaluation is scaled too
    recipe = dataclasses.replace(recipe, eval_resize_px=round(recipe.eval_resize_px * side / config.image_px[0]))
    found.append((f'{name} at {side} px', dataclasses.replace(
        config, image_px=(side, side), data=dataclasses.replace(config.data, recipe=recipe))))
  return found or [(name, config)]


def _check_parts(parts: Sequence[str]) -> None:
  if unknown := [part for part in parts if part not in bench_own.PARTS]:
    raise UserError(f'--parts: expected some of {", ".join(bench_own.PARTS)}, got {", ".join(map(repr, unknown))}. '
                    'Correct the names.')


def _measure(name: str, config: schema.Config, others: Others, *, chosen: Sequence[str], turns: int) -> Report:
  with contextlib.closing(bench_own.Own(config)) as own:
    parts, flops = own.parts(), own.flops()
    with others.opened(config, own.num_classes) as more:
      timed = {part: run for part, run in {**parts, **more}.items()
               if part.partition(' of ')[0] in (*chosen, bench_own.MATMUL)}
      spent = take_turns(timed, turns=turns, min_s=MIN_S)
  matmul = statistics.median(one.clock_s for one in spent.pop(bench_own.MATMUL))
  rows = [_row(name, part, spent, images=config.batch_size, flops=flops) for part in spent]
  device = jax.devices()[0].device_kind
  return Report(name, config.batch_size, rows, own.compiled, clock.find_peak_flops(device, jax.device_count()) or 0.,
                own.matmul_flops / matmul, config.image_px[0])


def _row(model: str, part: str, spent: Mapping[str, Sequence[Spent]], *, images: int,
         flops: Mapping[str, float]) -> Row:
  ours, _, label = part.partition(' of ')
  row = Row(model, part, images, [one.clock_s for one in spent[part]], [one.processor_s for one in spent[part]],
            flops.get(ours, 0.))
  if not label:
    return row
  pairs = list(zip(spent[ours], spent[part], strict=True))
  return row._replace(ratio=statistics.median(b.clock_s / a.clock_s for a, b in pairs),
                      processor_ratio=statistics.median(b.processor_s / max(a.processor_s, 1e-9) for a, b in pairs))


def take_turns(parts: Mapping[str, Part], *, turns: int,
               min_s: float) -> dict[str, list[Spent]]:
  """Returns seconds per call of each part, one for each turn; a turn calls a part for about `min_s` seconds.

  A pause before each part lets other programs finish what follows their answer, such as freeing memory.
  """
  counts = {}
  for name, part in parts.items():
    part(1)  # compiles, fills caches
    counts[name] = max(1, round(min_s / max(part(1).clock_s, 1e-9)))
  spent: dict[str, list[Spent]] = {name: [] for name in parts}
  for turn in range(turns):
    log.info('Turn %d of %d.', turn + 1, turns)
    for name, part in parts.items():
      time.sleep(PAUSE_S)
      spent[name].append(Spent(*(seconds / counts[name] for seconds in part(counts[name]))))
  return spent
