"""Published names of weights and their addresses, as given by their authors and by timm.

AugReg's files have their own names, `{model}-{data}-{epochs}ep-lr_…-wd_…-do_…-sd_…[--{dataset}-steps_…]`.
"""
from __future__ import annotations

import re

from vit_jax.core import globs
from vit_jax.weights import published
from vit_jax.weights.families import FAMILIES

_AUGREG = re.compile(r'(R_Ti|R26_S|R50_L|Ti|S|B|L)_\d+-i(1|21)k-\d+ep-lr_[\w.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+'
                     r'(--\w+-steps_\d+k-lr_[\d.]+-res_\d+)?')
NAMES: dict[str, str] = {name: address for family in FAMILIES for name, address in family.addresses.items()}
"""Known names and their addresses."""


def terms(where: str) -> str:
  """Returns a sentence on the license of weights at a name or address; '' if it is not known."""
  name = where.removeprefix('hf://').removeprefix('hf-hub:')
  found = next((one for family in FAMILIES for one in family.licenses if re.fullmatch(one.pattern, name)), None)
  if found is None:
    return ''
  gated = ' Its publisher gives it out on request only.' if found.is_on_request else ''
  return f'License of {name}: {found.license}.{gated}'


def address(name: str) -> str:
  """Returns the address of a known name, for `addresses.local`; '' for other names."""
  plain = name.removesuffix('.npz')
  if plain in NAMES:
    return NAMES[plain]
  if _AUGREG.fullmatch(plain):
    return f'gs://vit_models/augreg/{plain}.npz'
  if re.fullmatch(r'(timm|google|facebook|openai|laion|apple)/[\w.+-]+', name):
    return f'hf://{name}'
  return ''


def nearest(name: str) -> list[str]:
  """Returns known names that are similar to this one; for a name of timm, those of its weights on the hub."""
  plain = published.candidates(name)[0] if published.candidates(name) else ''
  networks = published.table().networks
  network, _, tag = published.table().older.get(plain, plain).partition('.')
  if network in networks:
    tags = networks[network].tags
    return [f'timm/{published.full_name(network, one)}' for one in ([tag] if tag in tags else list(tags)[:3])]
  known = {**dict.fromkeys(NAMES, ''), **dict.fromkeys(networks, 'timm/')}
  found = globs.similar_names(name, known, most=3)
  return [f'timm/{published.full_name(one, next(iter(networks[one].tags)))}' if known[one] else one for one in found]
