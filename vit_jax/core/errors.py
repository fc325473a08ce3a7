"""Errors whose message is shown to the user. Imports nothing, so that `--help` stays instant."""


class UserError(ValueError):
  """Invalid input or configuration: shown as one message, without a traceback."""


class DataStopped(UserError):
  """No more batches can be loaded, but the state of the run is valid and can be saved."""
