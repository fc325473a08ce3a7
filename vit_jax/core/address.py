"""Refuses mistyped addresses, such as `gs:/BUCKET/x` in place of `gs://BUCKET/x`, which would be local paths."""
from __future__ import annotations

import re

from vit_jax.core.errors import UserError

_SCHEMES = 'gs|gcs|s3|s3a|hf|http|https|ftp|sftp|file|abfs|abfss|az|azure|wasb|hdfs|adl|oss'
_MISTYPED = re.compile(r'([A-Za-z][A-Za-z0-9+.-]+):/(?!/)|'  # one slash: gs:/b/x, x:/y
                       rf'({_SCHEMES})(?:/{{2}}|:(?!//)|;/|:{{2}}/)|'  # another separator: gs//b, gs:b, gs;/b, gs::/b
                       r'([A-Za-z][A-Za-z0-9+.-]+):/{3}', re.I)  # three slashes: gs:///b


def check(text: str, setting: str) -> None:
  """Checks that a text is an address, or a path that does not look like a mistyped address.

  Raises:
    UserError: the text looks like a mistyped address. The message begins with `setting`.
  """
  if match := _MISTYPED.match(text):
    scheme = next(filter(None, match.groups())).lower()
    location = text[match.end():].lstrip('/:')
    raise UserError(f'{setting}: expected a path, or an address such as {scheme}://NAME/PATH, got {text!r}, which is '
                    f'neither. Write {scheme}://{location} for the address, or ./{text} for a local path with this '
                    'name.')
