"""Addresses such as gs://BUCKET/PATH: what looks like one but is none."""
from __future__ import annotations

import re

from vit_jax.core.errors import UserError

_SCHEMES = 'gs|gcs|s3|s3a|hf|http|https|ftp|sftp|file|abfs|abfss|az|azure|wasb|hdfs|adl|oss'
_ALMOST = re.compile(rf'(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?!/)|(?P<bare>{_SCHEMES})(?:/{{2}}|:(?!//)|;/|:{{2}}/)|'
                     r'(?P<many>[A-Za-z][A-Za-z0-9+.-]+):/{3}', re.I)


def check(text: str, setting: str) -> None:
  """Refuses a text that looks like an address but is none, such as gs:/b/x or gs//b/x, which would be a local path.

  Raises:
    UserError: it is one; names the setting.
  """
  if found := _ALMOST.match(text):
    scheme = (found['scheme'] or found['bare'] or found['many']).lower()
    rest = text[found.end():].lstrip('/:')
    raise UserError(f'{setting}: expected a path, or an address such as {scheme}://NAME/PATH, got {text!r}, which is '
                    f'neither. Write {scheme}://{rest} for the address, or ./{text} for a local path with this name.')
