"""Which parameters a setting applies to, by path pattern."""
from __future__ import annotations

import re
from collections.abc import Sequence

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree


def matches(name: str, patterns: Sequence[str]) -> bool:
  """Returns whether a whole path name matches one of `patterns` (`re.fullmatch`)."""
  return any(re.fullmatch(pattern, name) for pattern in patterns)


def find_rule(name: str, rules: Sequence[schema.PathRule]) -> schema.PathRule | None:
  """Returns the first rule for a path name."""
  return next((rule for rule in rules if re.fullmatch(rule.paths, name)), None)


def mask(params: PyTree, patterns: Sequence[str], *, what: str) -> PyTree:
  """Returns True for each leaf whose whole path name matches one of `patterns`.

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
  return trees.map_named(lambda name, _: matches(name, patterns), params)


def check_rules(params: PyTree, rules: Sequence[schema.PathRule]) -> None:
  """Raises UserError if a rule decides no parameter: it matches none, or others come first for all it matches."""
  used = [find_rule(name, rules) for name in trees.flatten(params)]
  idle = [rule.paths for rule in rules if not any(rule is one for one in used)]
  if idle:
    raise UserError(f'optimizer.rules: {", ".join(map(repr, idle))} decides no parameter; parameters are named like '
                    f'{", ".join(list(trees.flatten(params))[:3])}, and the first rule that matches decides')
