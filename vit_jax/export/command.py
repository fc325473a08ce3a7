"""`--job=export`: writes one network (`job.py`), or both towers of weights for images and texts (`towers.py`)."""
from __future__ import annotations

import pathlib

from vit_jax.core.errors import UserError
from vit_jax.export import job, towers
from vit_jax.jobs import runtime as startup
from vit_jax.record import console
from vit_jax.weights import loading
from vit_jax.weights.reading import Reading


def run(weights: str, to: pathlib.Path, *, reading: Reading, from_pixels: bool, any_size: bool, texts: bool = False,
        tokenizer: str = '') -> int:
  """Exports weights, given as for `weights.loading.load`; exit status 0.

  With `texts`, the text tower and the tokenizer (a file; '' = beside the weights) are exported too.
  """
  if tokenizer and not texts:
    raise UserError('--tokenizer: expected --texts as well, got --tokenizer alone. Set --texts to export the text '
                    'tower.')
  if texts:
    towers.check(to)
  job.check(to)
  startup.start()
  console.begin_stage('loading the weights')
  found = loading.load(weights, **reading._asdict())
  console.end_stage()
  print(loading.text(found))
  console.begin_stage('exporting, running the result beside the network')
  if texts:
    towers.write(found, to, from_pixels=from_pixels, any_size=any_size, tokenizer=tokenizer)
    return 0
  job.write(found, to, from_pixels=from_pixels, any_size=any_size)
  return 0
