"""What is known about published weights by their names: `published.txt`, the one table of it.

Tensors do not show the form of the GELU, the number of heads, an epsilon, how tokens are pooled, or how images are
prepared. The table has these facts for every pretrained tag of timm whose network can be read here, for the names of
open_clip, and for the files of the authors, with their sources. Names that are not in the table are not guessed from:
what they leave open is a default of the family, with a warning.
"""
from __future__ import annotations

import fnmatch
import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config.schema import Gelu, Geometry, Interpolation, LastNorm, PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PreprocessRule

_TABLE = pathlib.Path(__file__).with_name('published.txt')
_SUFFIXES = r'\.(npz|safetensors|pth|pt|bin|msgpack)$'
_GENERIC = re.compile(r'(model|pytorch_model|open_clip_(model|pytorch_model)|flax_model|adapter_model|weights|'
                      r'checkpoint)(-\d+-of-\d+)?')
"""Names of files that are named by their folder."""
POOLS = ('token', 'avg', 'map')
_GEOMETRY = {one.value: one for one in Geometry}


class Facts(NamedTuple):
  """What one row says; empty: nothing.

  name: of the weights, for messages.
  hints: settings of the network; the pooling is in `pool`, as it depends on whether there is a class token.
  width: of the network, if the heads are known.
  pool: in timm's words, one of `POOLS`.
  values: of the preprocessing, as in `PreprocessRule`.
  refused: why networks here cannot compute it.
  source: where the facts are from.
  """
  name: str
  hints: Hints = Hints()
  width: int = 0
  pool: str = ''
  values: Mapping[str, Any] = {}
  refused: str = ''
  source: str = ''


class Network(NamedTuple):
  """The rows of one network of timm: facts of the network, and of its tags, the default one first."""
  facts: Facts
  tags: dict[str, Facts]


class Table(NamedTuple):
  """Rows by name of a network of timm, rows by pattern of a name, and older names of timm's tags."""
  networks: dict[str, Network]
  patterns: list[tuple[re.Pattern[str], Facts]]
  older: dict[str, str]


class Found(NamedTuple):
  """What is known about weights by their names.

  hints, width, pool: as in `Facts`.
  rules: of the preprocessing, the first one that has a value decides.
  """
  hints: Hints = Hints()
  width: int = 0
  pool: str = ''
  rules: tuple[PreprocessRule, ...] = ()

  def applied(self, family: str, width: int) -> Found:
    """Returns what holds for tensors of this family and width; heads are those of one width."""
    if family in ('vision_transformer', 'big_vision', 'bit'):
      return self._replace(hints=Hints(), pool='')  # files of programs that have these settings themselves
    return self if width == self.width else self._replace(hints=self.hints._replace(heads=0))


def find(names: Iterable[str]) -> Found:
  """Returns what the first known one of these names says: names, addresses or paths of weights.

  Raises:
    UserError: a name is that of a network that cannot be computed here.
  """
  for name in names:
    for plain in candidates(name):
      if found := _exact(plain) or _by_network(plain):
        return found
  return Found()


def candidates(where: str) -> list[str]:
  """Returns the names under which weights at an address may be known, in lower case: of the file, then its folder."""
  parts = [part for part in re.split(r'[/\\]', where.strip().lower()) if part]
  if not parts:
    return []
  last = re.sub(_SUFFIXES, '', parts[-1])
  found = [last]
  if _GENERIC.fullmatch(last):
    found = [part for part in reversed(parts[:-1])][:1]
    found += [part.split('--', 2)[2] for part in parts if part.startswith('models--') and part.count('--') >= 2]
  return found


def full_name(network: str, tag: str) -> str:
  """Returns timm's name of weights, of a network and a tag."""
  return f'{network}.{tag}' if tag and '.' not in network else network


def _exact(name: str) -> Found | None:
  """Returns the facts of a name that is in the table as it stands, or that a pattern matches."""
  rows = table()
  name = rows.older.get(name, name)
  network, _, tag = name.partition('.')
  if network in rows.networks and tag in rows.networks[network].tags:
    return _found(rows.networks[network].tags[tag])
  return next((_found(facts._replace(name=name)) for pattern, facts in rows.patterns if pattern.fullmatch(name)), None)


def _by_network(name: str) -> Found | None:
  """Returns the facts of timm's network that a name begins with; None for another name.

  Where tags of the network differ in a value, that of timm's default tag is used, and it is a guess; no form of the
  GELU is chosen then.
  """
  networks = table().networks
  known = [one for one in networks if name == one or name.startswith(one) and name[len(one)] in '._-']
  if not known:
    return None
  facts, tags = networks[max(known, key=len)]
  every, default = list(tags.values()), next(iter(tags.values()))
  same = {key: value for key, value in default.values.items() if all(one.values.get(key) == value for one in every)}
  gelu = default.hints.gelu if all(one.hints.gelu == default.hints.gelu for one in every) else None
  rest = PreprocessRule(f'that of {default.name}, the default tag of timm for {facts.name}, whose tags differ',
                        default.values, is_guess=True)
  found = _found(default._replace(name=facts.name, values=same, hints=default.hints._replace(gelu=gelu)))
  return found._replace(rules=(*found.rules, rest))


def _found(facts: Facts) -> Found:
  if facts.refused:
    raise UserError(f'{facts.name}: expected a network that is available here, got one with {facts.refused}. Use other '
                    'weights; docs/reference/families.md lists the families.')
  return Found(facts.hints, facts.width, facts.pool, (PreprocessRule(f'the name {facts.name}', facts.values),))


# The table

@functools.cache
def table() -> Table:
  """Returns the parsed table."""
  return parse(_TABLE.read_text(encoding='utf-8').splitlines())


def parse(lines: Sequence[str]) -> Table:
  """Parses the lines of `published.txt`; its first lines describe them."""
  found, source, network = Table({}, [], {}), '', Facts('')
  for line in lines:
    head, _, names = line.partition(': ')
    if line.startswith('@'):
      source = line[1:].strip()
    elif not line.strip() or line.startswith('#'):
      continue
    elif not line.startswith(' ') and not names:
      name, *words = line.split()
      network = _facts(Facts(name, Hints(gelu=Gelu.EXACT, norm_eps=1e-6), pool='token', source=source), words)
      found.networks[name] = Network(network, {})
    elif not line.startswith(' '):
      facts = (Facts('', refused=head.removeprefix('!').strip(), source=source) if head.startswith('!') else
               _facts(Facts('', source=source), head.split()))
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
    if word in NORMS:
      values |= NORMS[word]
    elif word in POOLS:
      facts = facts._replace(pool=word)
    elif word in _GEOMETRY:
      values['geometry'] = _GEOMETRY[word]
    elif word in ('bilinear', 'bicubic', 'area'):
      values['interpolation'] = Interpolation(word)
    elif word in ('exact', 'tanh', 'quick'):
      hints = hints._replace(gelu=Gelu(word))
    elif word == 'squash':
      values['resize'] = 0
    elif re.fullmatch(r'\d+(x\d+)?', word):
      height, _, width = word.partition('x')
      values['image_px'] = (int(height), int(width or height))
    elif re.fullmatch(r'\d\.\d+', word):
      values |= {'resize': float(word)} | ({'geometry': Geometry.HUGGINGFACE} if values.get('resize') == 0 else {})
    elif word == 'no_antialias':
      values['antialias'] = False
    elif word == 'no_norm':
      settings['last_norm'] = LastNorm.NONE
    elif key == 'heads':
      heads, channels = (int(number) for number in value.split('x'))
      hints, facts = hints._replace(heads=heads), facts._replace(width=heads * channels)
    elif key == 'eps':
      hints = hints._replace(norm_eps=float(value))
    elif key == 'rotary_base':
      settings['positions.base'] = float(value)
    elif key == 'positions':
      hints = hints._replace(position_resize=PositionResize(value))
    else:
      raise ValueError(f'published.txt: unknown word {word!r}')
  return facts._replace(hints=hints._replace(settings=settings), values=values)
