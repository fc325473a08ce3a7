"""Errors whose message is shown to the user. Imports only `redaction`, so that `--help` stays instant."""
from vit_jax.core.redaction import redacted


class UserError(ValueError):
  """Invalid input or configuration: shown as one message, without a traceback, passwords and tokens."""

  def __str__(self) -> str:
    return redacted(super().__str__())


class DataStopped(UserError):
  """No more batches can be loaded, but the state of the run is valid and can be saved."""
