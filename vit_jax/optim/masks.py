"""Which parameters a setting applies to, by path pattern."""
from __future__ import annotations

import re
from collections.abc import Sequence

from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree


def mask(params: PyTree, patterns: Sequence[str], *, what: str) -> PyTree:
  """True for each leaf whose whole path name matches one of `patterns`.

  Args:
    params: any tree with the paths of the parameters.
    patterns: regular expressions, matched whole (`re.fullmatch`).
    what: the setting's name, for the error.

  Raises:
    UserError: lists the patterns that match no parameter.
  """
  names = list(trees.flatten(params))
  idle = [p for p in patterns if not any(re.fullmatch(p, name) for name in names)]
  if idle:
    raise UserError(f'{what}: {", ".join(map(repr, idle))} matches no parameter; parameters are named like '
                    f'{", ".join(names[:3])}')
  return trees.map_named(lambda name, _: any(re.fullmatch(p, name) for p in patterns), params)
