"""Errors whose message is shown to the user. Imports only `redaction`, so that `--help` stays instant."""
from vit_jax.core.redaction import redacted


class UserError(ValueError):
  """Reports invalid input or configuration. It is shown as one message, without traceback, passwords and tokens."""

  def __str__(self) -> str:
    return redacted(super().__str__())


class TemporaryError(RuntimeError):
  """Reports a failure of the environment: storage, the network, or another process of the run.

  The same command may succeed later, so the program ends with status 75, which launchers try again.
  """

  def __str__(self) -> str:
    return redacted(super().__str__())
