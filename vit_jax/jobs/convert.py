"""`--job=convert`: reads weights of any format and writes them in any other, with a report of every tensor."""
from __future__ import annotations

import logging

from vit_jax import api
from vit_jax.data.sources import classes as naming
from vit_jax.jobs import runtime as startup
from vit_jax.weights import loading, saving

log = logging.getLogger('vit_jax.jobs')


def run(where: str, to: str, *, family: str, preprocess: str, model: str, view: str, classes: str,
        overwrite: bool) -> int:
  """Converts; exit status 0.

  Args:
    where: as `weights.load` has it.
    to: a local path, as `saving.save` has it.
    family: of `saving.FAMILIES`; '' = by `to`.
    preprocess, model, view: as `weights.load` has them.
    classes: a file of class names in the order of the outputs; '' = those of the weights.
    overwrite: replaces what is at `to`.
  """
  saving.check(to, family=family, overwrite=overwrite)
  names = naming.read(classes, said='--classes') if classes else ()
  startup.start()
  found = loading.load(where, preprocess=preprocess, model=model, view=view)
  print(loading.text(found))
  found = api.named(found, names, said=f'--classes={classes}')
  path, lost = saving.save(found, to, family=family, overwrite=overwrite)
  for one in lost:
    log.warning('Not carried by this format: %s', one)
  written = saving.choose_family(found, path, family)
  print(f'Written to {path} in the format of {written}, read back, every bit the same.', flush=True)
  return 0
