"""Texts without the passwords and tokens of addresses. Imports only `re`, so that `--help` stays instant."""
from __future__ import annotations

import re

HIDDEN = '***'
"""Takes the place of a name with a password, of a query and of a fragment."""
_ADDRESS = re.compile(r'(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/{1,3})(?P<rest>[^\s\'"<>`]+)')


def redacted(text: str) -> str:
  """Returns a text in which no address has a user name, a password, a query or a fragment."""
  return _ADDRESS.sub(_hide, text) if ':/' in text else text


def _hide(found: re.Match[str]) -> str:
  rest, cut = found['rest'], re.search(r'[?#]', found['rest'])
  tail = f'{rest[cut.start()]}{HIDDEN}' if cut else ''
  if cut:
    rest = rest[:cut.start()]
  authority, slash, path = rest.partition('/')
  if '@' in authority:
    authority = f'{HIDDEN}@{authority.rpartition("@")[2]}'
  elif '@' in path and re.search(r':(?!\d*$)', authority):  # a password with a slash, which no address may have
    authority, slash, path = HIDDEN, '@', path.rpartition('@')[2]
  return f'{found["scheme"]}{authority}{slash}{path}{tail}'


def is_redacted(text: str) -> bool:
  """Returns whether an address lost its password or its query by `redacted`."""
  return '://' in text and (f'//{HIDDEN}@' in text or text.endswith((f'?{HIDDEN}', f'#{HIDDEN}')))
