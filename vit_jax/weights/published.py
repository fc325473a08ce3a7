"""What is known about published weights by their names: addresses, licenses, and the facts of `published.txt`.

Tensors do not show the form of the GELU, the number of heads, an epsilon, how tokens are pooled, or how images are
prepared. The table has these facts for every pretrained tag of timm whose network can be read here, for the names of
open_clip, and for the files of the authors, with their sources. Names that are not in the table are not guessed from:
what they leave open is a default of the family, with a warning. Names, addresses and licenses are in the records of
the families; AugReg's files have names of their own, `{model}-{data}-{epochs}ep-lr_…-wd_…-do_…-sd_…[--{dataset}-…]`.
Licenses are those of the repositories that publish the files, as far as known; not all were looked up.

`loading.py` calls `find` and `terms`, `addresses.py` calls `address`, and `vit_jax.list_weights` is `list_weights`.
"""
from __future__ import annotations

import fnmatch
import functools
import math
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config.schema import Gelu, Geometry, Interpolation, LastNorm, PositionResize
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.recipes import catalog
from vit_jax.weights.families import FAMILIES
from vit_jax.weights.families.record import Published
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, Known, PreprocessRule

_TABLE = pathlib.Path(__file__).with_name('published.txt')
_SUFFIXES = r'\.(npz|safetensors|pth|pt|bin|msgpack)$'
_GENERIC = re.compile(r'(model|pytorch_model|open_clip_(model|pytorch_model)|flax_model|adapter_model|weights|'
                      r'checkpoint)(-\d+-of-\d+)?')
"""Names of files that are named by their folder."""
_LETTERS = {'tiny': 'Ti', 'small': 'S', 'base': 'B', 'large': 'L', 'huge': 'H', 's': 'S', 'b': 'B', 'l': 'L', 'g': 'g',
            'so': 'So400m'}
_AUGREG = re.compile(r'(R_Ti|R26_S|R50_L|Ti|S|B|L)_\d+-i(1|21)k-\d+ep-lr_[\w.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+'
                     r'(--\w+-steps_\d+k-lr_[\d.]+-res_\d+)?')
NAMES: dict[str, str] = {name: address for family in FAMILIES for name, address in family.addresses.items()}
"""Known names and their addresses."""
_IMAGES: dict[str, dict[str, Any]] = {
    **NORMS, **{one.value: {'geometry': one} for one in Geometry},
    **{one.value: {'interpolation': one} for one in Interpolation}, 'squash': {'resize': 0},
    'no_antialias': {'antialias': False}}
_NETWORKS: dict[str, dict[str, Any]] = {
    **{one.value: {'gelu': one} for one in Gelu}, **{one: {'timm_pool': one} for one in ('token', 'avg', 'map')}}
"""Words of the table that stand alone: of the preprocessing, and of `Hints`."""


class Facts(NamedTuple):
  """What one row says; empty: nothing.

  name: of the weights, for messages.
  hints: settings of the network, with the pooling in timm's words.
  values: of the preprocessing, as in `PreprocessRule`.
  refused: why networks here cannot compute it.
  """
  name: str
  hints: Hints = Hints()
  values: Mapping[str, Any] = {}
  refused: str = ''


class Network(NamedTuple):
  """The rows of one network of timm: facts of the network, and of its tags, the default one first."""
  facts: Facts
  tags: dict[str, Facts]


class Table(NamedTuple):
  """Rows by name of a network of timm, rows by pattern of a name, and older names of timm's tags."""
  networks: dict[str, Network]
  patterns: list[tuple[re.Pattern[str], Facts]]
  older: dict[str, str]


def find(names: Iterable[str]) -> Known:
  """Returns what the first known one of these names says: names, addresses or paths of weights.

  Raises:
    UserError: a name is that of a network that cannot be computed here.
  """
  for name in names:
    for plain in candidates(name):
      if found := _exact(plain) or _by_network(plain):
        return found
  return Known()


def candidates(where: str) -> list[str]:
  """Returns the names under which weights at an address may be known, in lower case: of the file, then its folder."""
  parts = [part for part in re.split(r'[/\\]', where.strip().lower()) if part]
  if not parts:
    return []
  last = re.sub(_SUFFIXES, '', parts[-1])
  if not _GENERIC.fullmatch(last):
    return [last]
  in_cache = [part.split('--', 2)[2] for part in parts if part.startswith('models--') and part.count('--') >= 2]
  return parts[-2:-1] + in_cache  # the cache of the hub has folders such as `models--google--vit-base-patch16-224`


def full_name(network: str, tag: str) -> str:
  """Returns timm's name of weights, of a network and a tag."""
  return f'{network}.{tag}' if tag and '.' not in network else network


def _exact(name: str) -> Known | None:
  """Returns the facts of a name that is in the table as it stands, or that a pattern matches."""
  rows = table()
  name = rows.older.get(name, name)
  network, _, tag = name.partition('.')
  if network in rows.networks and tag in rows.networks[network].tags:
    return _known(rows.networks[network].tags[tag])
  return next((_known(facts._replace(name=name)) for pattern, facts in rows.patterns if pattern.fullmatch(name)), None)


def _by_network(name: str) -> Known | None:
  """Returns the facts of timm's network that a name begins with; None for another name.

  Where tags of the network differ in a value, that of timm's default tag is used, and it is a guess; no form of the
  GELU is chosen then.
  """
  networks = table().networks
  prefixes = [network for network in networks if name.startswith(network) and name[len(network):][:1] in ('', *'._-')]
  if not prefixes:
    return None
  facts, tags = networks[max(prefixes, key=len)]
  every, default = list(tags.values()), next(iter(tags.values()))
  common = {key: value for key, value in default.values.items() if all(tag.values.get(key) == value for tag in every)}
  gelu = default.hints.gelu if all(tag.hints.gelu == default.hints.gelu for tag in every) else None
  known = _known(default._replace(name=facts.name, values=common, hints=default.hints._replace(gelu=gelu)))
  guess = PreprocessRule(f'that of {default.name}, the default tag of timm for {facts.name}, whose tags differ',
                         default.values, is_guess=True)
  return known._replace(rules=(*known.rules, guess))


def _known(facts: Facts) -> Known:
  """Returns what facts say. Raises UserError if networks here cannot compute the network."""
  if facts.refused:
    raise UserError(f'{facts.name}: expected a network that is available here, got one with {facts.refused}. Use other '
                    'weights; docs/reference/weights.md lists the families.')
  return Known(facts.hints, (PreprocessRule(f'the name {facts.name}', facts.values),))


# Addresses and licenses

def rule(name: str) -> tuple[Published, str]:
  """Returns the rule of a known name, and the name of its network."""
  for family in FAMILIES:
    for meaning in family.published:
      if match := re.fullmatch(meaning.pattern, name):
        return meaning, meaning.model.format(*(_LETTERS.get(group, group) for group in match.groups()))
  raise KeyError(name)


def terms(where: str) -> str:
  """Returns a sentence on the license of weights at a name or address; '' if it is not known."""
  if where in NAMES:
    return f'License of {where}: {rule(where)[0].license}.'
  name = where.removeprefix('hf://').removeprefix('hf-hub:')
  for family in FAMILIES:
    for known in family.licenses:
      if re.fullmatch(known.pattern, name):
        gated = ' Its publisher gives it out on request only.' if known.is_on_request else ''
        return f'License of {name}: {known.license}.{gated}'
  return ''


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
  plain, networks = next(iter(candidates(name)), ''), table().networks
  network, _, tag = table().older.get(plain, plain).partition('.')
  if network in networks:
    tags = networks[network].tags
    return [f'timm/{full_name(network, known)}' for known in ([tag] if tag in tags else list(tags)[:3])]
  similar = globs.similar_names(name, {**dict.fromkeys(NAMES), **dict.fromkeys(networks)}, most=3)
  return [f'timm/{full_name(known, next(iter(networks[known].tags)))}' if known in networks else known
          for known in similar]


# The list of known weights

PATTERNS = (
    ('{R_Ti,R26_S,R50_L,Ti,S,B,L}_…-i21k-300ep-lr_…-aug_…', 'all files of AugReg (arXiv 2106.10270), by their names'),
    ('timm/NAME, google/NAME, facebook/NAME, openai/NAME, laion/NAME, apple/NAME', 'models of the hub, as hf://OWNER/NAME'))
"""Names that are not listed one by one."""


class KnownWeights(NamedTuple):
  """Published weights that are known by name.

  name: for `--weights=NAME`, `--config.init_from=NAME` and `vit_jax.load`.
  model: name of the network.
  family: of the network.
  parameters: of the network with its head.
  flops: of a forward pass of one image of `px` (of the usual side if that is not known), two per multiply-add.
  px: side of the images that they were last trained on; 0 = not known from the name.
  num_classes: outputs; 0 = no head.
  data: that they were trained on; `ImageNet-21k+1k` is pre-training and fine-tuning.
  source: the paper.
  license: of the authors' repository.
  address: of the file.
  """
  name: str
  model: str
  family: str
  parameters: int
  flops: int
  px: int
  num_classes: int
  data: str
  source: str
  license: str
  address: str


def list_weights(pattern: str = '*', *, max_params: float = math.inf, family: str = '*', data: str = '*',
                 license: str = '*', px: int = 0) -> list[KnownWeights]:
  """Returns the published weights whose names or models match a pattern such as `*dino*`.

  `max_params` is the largest number of parameters, such as 30e6. `family`, `data` and `license` are patterns such as
  `dinov*`, `ImageNet-1k` and `apache*`, and `px` is the side of the images (0 = any).

  `PATTERNS` has further names. Without a match, the list is empty and a warning names the most similar ones.
  """
  names = [name for name in NAMES if globs.matches(name, pattern) or catalog.matches(rule(name)[1], pattern)]
  if not names:
    warnings.warn(f'list_weights: {globs.no_match(pattern, NAMES)} {other_names()}', stacklevel=2)
  listed = []
  for name in names:
    meaning, model = rule(name)
    network = catalog.model(model, px=meaning.px, num_classes=meaning.num_classes, is_hidden=meaning.is_hidden)
    listed.append(KnownWeights(
        name=name, model=model, family=network.family, parameters=network.parameters, flops=network.flops,
        px=meaning.px, num_classes=meaning.num_classes, data=meaning.data, source=meaning.source,
        license=meaning.license, address=NAMES[name]))
  return [known for known in listed if known.parameters <= max_params and globs.matches(known.family, family)
          and globs.matches(known.data, data) and globs.matches(known.license, license) and px in (0, known.px)]


def other_names() -> str:
  """Returns a sentence on names that work and are not listed."""
  return f'Other names that work: {"; ".join(f"{names} ({what})" for names, what in PATTERNS)}.'


# The table

@functools.cache
def table() -> Table:
  """Returns the parsed table."""
  return parse(_TABLE.read_text(encoding='utf-8').splitlines())


def parse(lines: Sequence[str]) -> Table:
  """Parses the lines of `published.txt`; its first lines describe them."""
  found, network = Table({}, [], {}), Facts('')
  for line in lines:
    head, _, names = line.partition(': ')
    if not line.strip() or line.startswith(('#', '@')):
      continue
    elif not line.startswith(' ') and not names:
      name, *words = line.split()
      network = _facts(Facts(name, Hints(gelu=Gelu.EXACT, norm_eps=1e-6, timm_pool='token')), words)
      found.networks[name] = Network(network, {})
    elif not line.startswith(' '):
      facts = (Facts('', refused=head.removeprefix('!').strip()) if head.startswith('!') else
               _facts(Facts(''), head.split()))
      found.patterns.extend((re.compile(fnmatch.translate(one)), facts._replace(name=one)) for one in names.split())
    else:
      for word in names.split():
        tag, *older = word.split('=')
        whole = full_name(network.name, tag)
        found.networks[network.name].tags[tag] = _facts(network._replace(name=whole), head.split())
        found.older.update(dict.fromkeys(older, whole))
  return found


def _facts(facts: Facts, words: Sequence[str]) -> Facts:
  """Returns the facts with those of these words."""
  hints, settings, values = facts.hints, dict(facts.hints.settings), {
      'geometry': Geometry.TORCHVISION, 'interpolation': Interpolation.BICUBIC, 'antialias': True, **facts.values}
  for word in words:
    key, _, value = word.partition('=')
    if word in _IMAGES:
      values |= _IMAGES[word]
    elif word in _NETWORKS:
      hints = hints._replace(**_NETWORKS[word])
    elif re.fullmatch(r'\d+(x\d+)?', word):
      height, _, width = word.partition('x')
      values['image_px'] = (int(height), int(width or height))
    elif re.fullmatch(r'\d\.\d+', word):
      values |= {'resize': float(word)} | ({'geometry': Geometry.HUGGINGFACE} if values.get('resize') == 0 else {})
    elif word == 'no_norm':
      settings['last_norm'] = LastNorm.NONE
    elif key == 'heads':
      heads, channels = (int(number) for number in value.split('x'))
      hints = hints._replace(heads=heads, heads_width=heads * channels)
    elif key == 'eps':
      hints = hints._replace(norm_eps=float(value))
    elif key == 'rotary_base':
      settings['positions.base'] = float(value)
    elif key == 'positions':
      hints = hints._replace(position_resize=PositionResize(value))
    else:
      raise ValueError(f'published.txt: unknown word {word!r}')
  return facts._replace(hints=hints._replace(settings=settings), values=values)
