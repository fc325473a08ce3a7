"""Errors whose message is shown to the user, without passwords. This module imports only `re`: `--help` stays fast."""
from __future__ import annotations

import re

HIDDEN = '***'
"""Replaces secrets in an address: the user name with the password, the query, and the fragment."""
_ADDRESS = re.compile(r'(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:///?|(?:gs|s3|hf|ftp|https?):/)'
                      r'(?P<location>(?:[^\s"<>`/?#@]*@)?[^\s\'"<>`]+)', re.I)  # https://user:password@host/path?key=x


def printable(text: str, *, keep: str = '') -> str:
  """Returns a text with its control characters escaped, except those in `keep`, such as '\\n'.

  The name of a file may have control characters, which a terminal would execute.
  """
  return text if text.isprintable() else ''.join(
      letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text)


def redacted(text: str) -> str:
  """Returns a text in which no address has a user name, a password, a query or a fragment."""
  return _ADDRESS.sub(_hide, text) if ':/' in text else text


def _hide(address: re.Match[str]) -> str:
  """Returns an address that matches `_ADDRESS` with `HIDDEN` in place of what may be secret."""
  location = address['location']
  authority = re.split('[/?#]', location, maxsplit=1)[0]  # user:password@host:port
  if '@' in authority:
    location = f'{HIDDEN}@{authority.rpartition("@")[2]}{location[len(authority):]}'
  elif '@' in location and re.search(r':(?!\d*$)', authority):  # a password with /, ? or #, which should be escaped
    location = f'{HIDDEN}@{location.rpartition("@")[2]}'
  query = re.search(r'[?#]', location)
  return address['scheme'] + (f'{location[:query.end()]}{HIDDEN}' if query else location)


def is_redacted(text: str) -> bool:
  """Returns whether a text has an address in which `redacted` has replaced the password, the query or the fragment."""
  return '://' in text and (f'//{HIDDEN}@' in text or text.endswith((f'?{HIDDEN}', f'#{HIDDEN}')))


class _WithoutSecrets:
  """Removes the secrets of addresses, and control characters except line ends, from the message of an exception."""

  def __str__(self) -> str:
    return redacted(printable(super().__str__(), keep='\n'))


class UserError(_WithoutSecrets, ValueError):
  """Reports invalid input or configuration. It is shown as one message, without traceback."""


class TemporaryError(_WithoutSecrets, RuntimeError):
  """Reports a failure of the environment: storage, the network, or another process of the run.

  The same command may succeed later, so the program ends with status 75, which launchers try again.
  """
