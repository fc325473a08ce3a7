"""HTML pages made from the Jinja templates in `templates/`, and how values are shown on them.

A page is one file that opens without a network: styles, SVG charts and PNG images are inside it. Jinja escapes every
value but `Markup`, which only `charts.py` and `breakable` make. Nothing here needs matplotlib.
"""
from __future__ import annotations

import base64
import functools
import io
import math
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup, escape

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate import results

if TYPE_CHECKING:
  import jinja2

_PAGE_LINES = b'<html lang="en"><head><meta charset="utf-8"><title>', b'<link rel="icon" href="data:,">'
"""Lines of `templates/layout.html`, which every page has in its first 4 KiB."""


def render(template: str, **values: object) -> str:
  """Returns the page that `templates/<template>` makes of the values."""
  return _environment().get_template(template).render(values)


def check_ours(page: pathlib.Path) -> None:
  """Raises UserError if there is a page at this path that `render` has not made."""
  if not page.exists():
    return
  head = b''
  if not page.is_dir():
    with page.open('rb') as file:
      head = file.read(2**12)
  if not all(line in head for line in _PAGE_LINES):
    raise UserError(f'--to: expected none or a page of vit-jax at {page}, got another file. Move it away, or set '
                    '--to=FILE.html.')


def read(template: str) -> str:
  """Returns the text of `templates/<template>`, such as a script."""
  environment = _environment()
  assert environment.loader is not None
  return environment.loader.get_source(environment, template)[0]


@functools.cache
def _environment() -> jinja2.Environment:
  import jinja2
  environment = jinja2.Environment(
      loader=jinja2.PackageLoader('vit_jax.inspect'), autoescape=True, undefined=jinja2.StrictUndefined,
      trim_blocks=True, lstrip_blocks=True)
  environment.filters |= {'format_value': format_value, 'breakable': breakable, 'data_uri': data_uri,
                          'branches': _branches, 'px': lambda value: f'{value:.1f}'.removesuffix('.0')}
  environment.tests['numeric'] = _is_numeric
  return environment


def data_uri(file: bytes) -> str:
  """Returns a PNG or JPEG file as the `src` of an `<img>`."""
  kind = 'jpeg' if file.startswith(b'\xff\xd8') else 'png'
  return f'data:image/{kind};base64,{base64.b64encode(file).decode()}'


def encode(image: HostArray, kind: str = 'png') -> bytes:
  """Returns an image `[H, W, 3]` uint8 as a PNG file, or as a JPEG file, a tenth of the PNG of a photo.

  Raises:
    ValueError: the array has another shape or dtype.
  """
  image = np.asarray(image)
  if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape or image.dtype != np.uint8:
    raise ValueError(f'image: expected [H, W, 3] uint8, got {list(image.shape)} {image.dtype}')
  from PIL import Image
  buffer = io.BytesIO()
  Image.fromarray(image).save(buffer, kind, **({'quality': 85} if kind == 'jpeg' else {}))
  return buffer.getvalue()


def breakable(text: str) -> Markup:
  """Returns text whose lines may break within long paths and file names, as `runs/<wbr>my_<wbr>run.<wbr>json`."""
  return Markup(re.sub(r'(?<=\w)([/\\:=,]+|[_.-](?=[^\W\d]))', r'\1<wbr>', str(escape(text))))


def shortest_ends(paths: Sequence[Sequence[str]]) -> list[str]:
  """Returns the last parts of each path, as many as make them different; [] if equal paths are among them.

  The paths `runs/a/net` and `runs/b/net`, split into parts, have the ends `a/net` and `b/net`.
  """
  for count in range(1, max(map(len, paths)) + 1):
    ends = ['/'.join(parts[-count:]) for parts in paths]
    if len(set(ends)) == len(ends):
      return ends
  return []


def format_value(value: object) -> str:
  """Returns a value as text: four significant digits of a fraction, thousands separated by commas."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, int) or (np.isfinite(value) and value == int(value) and abs(value) < 1e15):
    return f'{int(value):,}'
  is_large = 9999.5 <= abs(value) < 1e15  # four digits of 9999.5 would be 1e+04
  return f'{value:,.0f}' if is_large else f'{value:.4g}'


def format_metric(name: str, value: object) -> str:
  """Returns the value of a metric as text; shares of images are in percent, as everywhere on the pages."""
  number = to_float(value)
  return f'{100 * number:.2f} %' if results.is_share(name) and math.isfinite(number) else format_value(value)


def to_float(value: object) -> float:
  """Returns a number, also from text such as 'inf'; nan for anything that is not a number."""
  try:
    return float(value)  # type: ignore[arg-type]
  except (TypeError, ValueError):
    return math.nan


def _is_numeric(value: object) -> bool:
  """Returns whether a cell of a table is a number, or a percentage such as `97.31 %`."""
  if isinstance(value, str):
    return re.fullmatch(r'[\d.,]+ %', value) is not None
  return isinstance(value, int | float)


def _branches(value: object) -> object:
  """Returns a value as a tree shows it: a mapping with its branches, or text; a flat list becomes one line."""
  if isinstance(value, dict):
    return value or ''
  if not isinstance(value, list):
    return format_value(value)
  if any(isinstance(item, dict | list) for item in value):
    return dict(enumerate(value))
  return ', '.join(map(format_value, value))
