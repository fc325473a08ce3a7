"""`--job=convert`: converts weights between formats, with a report of every tensor.

`commands.Command.run` calls `run`. `weights/saving.py` writes the formats, and reads each file back to compare it.
"""
from __future__ import annotations

import logging

from vit_jax.core.errors import UserError
from vit_jax.jobs import startup
from vit_jax.weights import inference, loading, peft, saving
from vit_jax.weights.hints import Reading

log = logging.getLogger('vit_jax.jobs')


def run(weights: str, to: str, *, family: str, reading: Reading, classes: str, overwrite: bool) -> int:
  """Converts weights, prints where they are, and returns the exit status 0.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to: the local path to write, see `saving.save`.
    family: the format, one of `saving.FORMATS`, or `peft` for the adapters of a run; '' = by the suffix of `to`.
    overwrite: whether to replace a file or folder at `to`.
  """
  if family == peft.FAMILY:
    for name, value in {**reading._asdict(), 'view': '', 'classes': classes}.items():
      if value:
        raise UserError(f'--{name}: expected none with --family={peft.FAMILY}, got {value}. Leave it out, as adapters '
                        'are written as they are in the run.')
    startup.start()
    path = saving.save_adapters(weights, to, view=reading.view, overwrite=overwrite)
    print(f'Written to {path} in the format of PEFT, and read back: the merged weights are those of the run.',
          flush=True)
    return 0
  saving.check(to, family=family, overwrite=overwrite)
  startup.start()
  loaded = inference.load(weights, reading, classes=classes)
  print(loading.text(loaded))
  path, lost = saving.save(loaded, to, family=family, overwrite=overwrite, with_card=True)
  for name in lost:
    log.warning('This format cannot store: %s', name)
  print(f'Written to {path} in the format of {saving.choose_family(loaded, path, family)}, and read back without a '
        'difference.', flush=True)
  return 0
