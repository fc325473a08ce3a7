"""A complete run as data: typed settings, each with unit and default.

A config file's `get_config()` returns a `Config`. It holds independent variables only; what follows from them (steps
from epochs, warm-up steps) is computed from the final config. Each dataclass checks itself (`checks.Settings`), and
each module lists its part of the schema in `__all__`. `''` means off for text. Durations are text with a unit:
`'90 epochs'`, `'20_000 steps'`, `'30e6 examples'`, `'10 %'` (of the run). Treat configs as read-only after overrides
have been applied.

No `from __future__ import annotations` in this package and no `Literal`: `config_flags` needs real types.
"""
from vit_jax.config.schema.checks import parse_arg as parse_arg
from vit_jax.config.schema.checks import problem as problem
from vit_jax.config.schema.checks import replaced as replaced
from vit_jax.config.schema.contrastive import *  # noqa: F403
from vit_jax.config.schema.data import *  # noqa: F403
from vit_jax.config.schema.dino import *  # noqa: F403
from vit_jax.config.schema.evals import *  # noqa: F403
from vit_jax.config.schema.layers import *  # noqa: F403
from vit_jax.config.schema.model import *  # noqa: F403
from vit_jax.config.schema.objective import *  # noqa: F403
from vit_jax.config.schema.objective_base import *  # noqa: F403
from vit_jax.config.schema.optim import *  # noqa: F403
from vit_jax.config.schema.positions import *  # noqa: F403
from vit_jax.config.schema.ranges import Range as Range
from vit_jax.config.schema.ranges import duration as duration
from vit_jax.config.schema.ranges import ranged as ranged
from vit_jax.config.schema.recipe import *  # noqa: F403
from vit_jax.config.schema.run import *  # noqa: F403
from vit_jax.config.schema.vit import *  # noqa: F403
