"""Errors whose message is shown to the user. Imports only `redaction`, so that `--help` stays instant."""
from vit_jax.core.redaction import redacted


def printable(text: str) -> str:
  """Returns a text without control characters for a terminal, which names of files and code may contain."""
  return text if text.isprintable() else ''.join(
      letter if letter.isprintable() or letter == '\n' else ascii(letter)[1:-1] for letter in text)


class UserError(ValueError):
  """Reports invalid input or configuration. It is shown as one message, without traceback.

  The message has no passwords, tokens and control characters.
  """

  def __str__(self) -> str:
    return redacted(printable(super().__str__()))


class TemporaryError(RuntimeError):
  """Reports a failure of the environment: storage, the network, or another process of the run.

  The same command may succeed later, so the program ends with status 75, which launchers try again.
  """

  def __str__(self) -> str:
    return redacted(printable(super().__str__()))
