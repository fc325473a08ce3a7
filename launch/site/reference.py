"""Pages of the documentation site that are generated from the program: jobs and flags, settings, the Python API.

    python launch/site/reference.py settings       prints one of them
    python launch/site/reference.py models > docs/reference/models.md       this one is kept, to be read as a file
"""
from __future__ import annotations

import dataclasses
import enum
import functools
import html
import importlib
import inspect
import pathlib
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import vit_jax
from vit_jax import commands
from vit_jax.config import describe, engine, schema
from vit_jax.config.schema import checks, ranges
from vit_jax.jobs import listing

PYTHON = {'The package': tuple(f'{getattr(vit_jax, name).__module__}.{name}' for name in vit_jax.__all__),
          'Configs': ('vit_jax.config.files.load', 'vit_jax.recipes.sizes.model', 'vit_jax.recipes.sizes.vit'),
          'Networks': ('vit_jax.models.backbones.build', 'vit_jax.models.vit.vit.ViT', 'vit_jax.core.types.Features'),
          'Weights': ('vit_jax.weights.loading.load', 'vit_jax.weights.loading.Weights')}
"""The public Python API, and further objects that are useful in Python, by topic."""


def pages() -> dict[str, str]:
  """The text of each generated page by its place on the site."""
  return {'reference/jobs.md': jobs(), **{f'reference/{name}.md': text for name, text in settings().items()},
          'reference/python.md': python(), 'reference/contracts.md': contracts()}


_CODE_OR_MARK = re.compile(r'(\[`[^`]*`\]\([\w.#-]+\)|`[^`]*`)|([][*{}\\`]|(?<!\w)_|_(?!\w))|([<>&])')


def escaped(text: str) -> str:
  """Returns plain text with code in backticks, also as links, as Markdown: nothing else is emphasis, a link or HTML."""
  return _CODE_OR_MARK.sub(lambda m: m[1] or (f'\\{m[2]}' if m[2] else html.escape(m[3])), text)


_WORD = re.compile(r"[a-z][a-z'-]+(?=[\s,;)]|$)|a(?= )|[a-z]+(?=: [a-z])")
_NAMES = {'timm', "timm's", 'torchvision', 'tfds', 'wds', 'tfrecord', 'parquet', 'digits', 'synthetic', 'path'}
"""Words in lower case that also begin a sentence so."""


def sentence(text: str) -> str:
  """Returns a comment as a sentence: with a capital letter, unless it begins with a name, and a full stop."""
  text = ' '.join(text.split())
  first = _WORD.match(text)
  if first and first[0] not in _NAMES and not text[first.end():].startswith(' |'):
    text = text[0].upper() + text[1:]
  return text + '.' * bool(text and text[-1] not in '.!?:…')


def row(*cells: str) -> str:
  """A row of a table, in which `|` separates no cells."""
  return '| ' + ' | '.join(escaped(cell).replace('|', '\\|').replace('\n', ' ') for cell in cells) + ' |'


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
  """The lines of a table, with an empty line at its end."""
  return [row(*titles), row(*['---'] * len(titles)), *(row(*one) for one in rows), '']


def jobs() -> str:
  """Every job with its flags, from the table of the command line."""
  lines = ['# Jobs and flags', '', 'A command is `vit-jax JOB --flag=VALUE …`. Generated from `vit_jax/commands.py`; '
           '`vit-jax JOB --help` shows the same.', '']
  for name, job in commands.JOBS.items():
    usage = ' '.join(['vit-jax', name, *(f'--{flag.name}={flag.kind.metavar}' for flag in job.required if flag.kind),
                      '[--flag=VALUE …]' if job.optional else '', job.files]).strip()
    lines += [f'## {name}', '', escaped(job.summary), '', '```text', ' '.join(usage.split()), '```', '']
    rows = [(f'`--{flag.name}`', _flag_type(flag), _default(flag, flag in job.required),
             sentence(flag.help))
            for flag in job.flags.values()]
    lines += table(('flag', 'type and limits', 'default', 'meaning'), rows) if rows else []
    if 'config' in job.flags:
      lines += ['The job also takes overrides `--config.NAME=VALUE` of any [setting](settings.md).', '']
  return '\n'.join(lines)


def _flag_type(flag: commands.Flag) -> str:
  if not flag.kind:
    return 'switch'
  return f'`{flag.kind.metavar}`' + f', {flag.kind.limits}' * bool(flag.kind.limits)


def _default(flag: commands.Flag, is_needed: bool) -> str:
  if is_needed:
    return 'required'
  return flag.default_text or ('' if flag.default in (None, '', []) else f'`{flag.default}`')


SECTIONS = {'model': 'the network', 'objective': 'what is learned', 'data': 'images and augmentation',
            'optimizer': 'optimizer and schedule', 'evals': 'evaluations'}
"""Sections of the settings with a page of their own; the others are on the first page."""


def settings() -> dict[str, str]:
  """Every setting of a config: type, range, default and meaning, by its dotted name; a page for each section."""
  every = sorted(dict.fromkeys(_parts(schema.Config, '')), key=lambda part: part[0])
  links = ', '.join(f'[`{name}`](settings_{name}.md) ({what})' for name, what in SECTIONS.items())
  lines = ['# Settings', '', 'Settings of a config, by the name with which `--config.NAME=VALUE` overrides them. '
           'Where a part may be of several types, `--config.PART=TYPE` selects one (`--config.optimizer=sgd`). '
           'Durations are text with a unit: `300 steps`, `20 epochs`, `1e6 examples`, or `10 %` of the run. A default '
           'of `()` is an empty list. Generated from `vit_jax/config/schema/`.', '',
           f'Sections with pages of their own: {links}.', '']
  places = {part: _place(*part) for part in every}
  found = {'settings': '\n'.join([*lines, *_tables((part for part in every if part[0].split('.')[0] not in SECTIONS),
                                                   places)])}
  for section, what in SECTIONS.items():
    own = [part for part in every if part[0].split('.')[0] == section]
    found[f'settings_{section}'] = '\n'.join([f'# Settings: {section}', '', f'Settings of {what}. '
                                              '[All sections](settings.md)', '', *_tables(own, places)])
  return found


def _place(name: str, kind: type) -> str:
  """The page and the anchor of the table of a part."""
  section = name.split('.')[0]
  anchor = re.sub(r'[^\w -]', '', _title(name, kind)).strip().lower().replace(' ', '-')
  return f'settings{"_" + section if section in SECTIONS else ""}.md#{anchor}'


def _title(name: str, kind: type) -> str:
  return f'{name}: {kind.__name__}' if name else 'The run: Config'


def _tables(chosen: Iterable[tuple[str, type]], places: Mapping[tuple[str, type], str]) -> Iterator[str]:
  """The lines of the tables of some parts; `places` are those of all tables, to which the names of parts lead."""
  for name, kind in chosen:
    told = describe.comments(kind)
    rows = [(f'`{f"{name}.{field.name}".lstrip(".")}`',
             '; '.join(filter(None, [_linked(field, name, places), range_text(field)])),
             f'`{_value(checks.default_of(field))}`', _about(field, told.get(field.name, '')))
            for field in dataclasses.fields(kind)]
    yield from [f'## {_title(name, kind)}', '', escaped(inspect.cleandoc(kind.__doc__ or '')), '',
                *table(('setting', 'type and limits', 'default', 'meaning'), rows)]


def _linked(field: dataclasses.Field[Any], name: str, places: Mapping[tuple[str, type], str]) -> str:
  """The type of a setting, in which the name of a part leads to its table."""
  text = type_text(field.type)
  for inner, suffix in _inside(field.type):
    if place := places.get((f'{name}.{field.name}{suffix}'.lstrip('.'), inner)):
      text = re.sub(rf'(?<!\[)`{inner.__name__.lower()}`', f'[`{inner.__name__.lower()}`]({place})', text)
  return text


def _parts(kind: type, name: str, seen: frozenset[type] = frozenset()) -> Iterator[tuple[str, type]]:
  """A settings dataclass and all those inside it with their dotted names, each once along a path."""
  if kind in seen:
    return
  yield name, kind
  for field in dataclasses.fields(kind):
    for inner, suffix in _inside(field.type):
      if name.startswith('objective.teacher'):
        continue  # the settings of a network, which are listed under `model` and `head`
      yield from _parts(inner, f'{name}.{field.name}{suffix}'.lstrip('.'), seen | {kind})


def _inside(declared: Any) -> Iterator[tuple[type, str]]:
  """Settings dataclasses that a field may hold, and what follows its name: `.NAME` in a dict, `[N]` in a tuple."""
  if isinstance(declared, types.UnionType):
    for one in typing.get_args(declared):
      if one is not engine.base(declared):
        yield from _inside(one)
  elif typing.get_origin(declared) in (dict, tuple):
    suffix = '.NAME' if typing.get_origin(declared) is dict else '[N]'
    for one in typing.get_args(declared):
      yield from ((inner, suffix) for inner, _ in _inside(one))
  elif dataclasses.is_dataclass(declared) and isinstance(declared, type):
    yield declared, ''


def type_text(declared: Any, *, plural: bool = False) -> str:
  """A type as the tables show it: choices by their values, parts by the names of their types."""
  arguments = typing.get_args(declared)
  if isinstance(declared, types.UnionType):
    return ' or '.join('`MODULE:CLASS` of your own' if one is engine.base(declared) else type_text(one)
                       for one in arguments)
  if typing.get_origin(declared) is dict:
    return f'{type_text(arguments[1])}, by name'
  if typing.get_origin(declared) is tuple:
    many = arguments[-1] is Ellipsis
    return f'{"any number of" if many else len(arguments)} {type_text(arguments[0], plural=True)}, with commas'
  if issubclass(declared, enum.Enum):
    return ', '.join(f'`{checks.shown(choice)}`' for choice in declared)
  if dataclasses.is_dataclass(declared):
    return f'`{declared.__name__.lower()}`'
  return {float: 'number', int: 'whole number', bool: '`true` or `false`', str: 'text'}[declared] + 's' * (
      plural and declared is not bool)


def range_text(field: dataclasses.Field[Any]) -> str:
  """The values that a setting allows, with their unit."""
  allowed = field.metadata.get('allowed')
  if isinstance(allowed, ranges.Span):
    return 'duration' + ', or empty = off' * allowed.off + ', not 0' * (not allowed.zero) + (
        '' if allowed.percent else ', no percentage')
  return str(allowed) if allowed else ''


def _about(field: dataclasses.Field[Any], comment: str) -> str:
  """The meaning of a setting in sentences: its comment, or the docstring of its type, and those of its choices."""
  declared = field.type
  is_choice = isinstance(declared, type) and issubclass(declared, enum.Enum)
  if not comment and (is_choice or dataclasses.is_dataclass(declared)):
    comment = inspect.cleandoc(declared.__doc__ or '').partition('\n\n')[0]
  choices = [f'`{checks.shown(choice)}`: {sentence(text)}' for choice in (declared if is_choice else ())
             if (text := _choice_comments(declared).get(choice.name))]
  return ' '.join([sentence(comment), *choices]).strip()


@functools.cache
def _choice_comments(kind: type) -> dict[str, str]:
  """The comments beside the members of an enumeration, by name."""
  return dict(re.findall(r'^ +([A-Z]\w*) = [^#\n]*?# (.+)$', inspect.getsource(kind), re.M))


def _value(value: Any) -> str:
  """A default as it is typed after `--config.NAME=`."""
  if dataclasses.is_dataclass(value):
    return type(value).__name__.lower()
  if isinstance(value, dict):
    return ', '.join(f'{name}: {_value(one)}' for name, one in value.items()) or '{}'
  return describe.text(value)


def models() -> str:
  """Every network that has a name, with its costs, by family."""
  entries = listing.make_table('models').entries
  lines = ['# Networks', '', 'Use a name as `--config.model=NAME`. Parameters, in millions, include a linear head of '
           '1,000 classes. GFLOPs are those of a forward pass of one image of 224 px, or of the size in parentheses, '
           'with two FLOPs per multiply-add. Other patch sides of plain ViTs and Mixers (`B/20`) and other factors of '
           'BiT (`BiT-R101x2`) work too. `vit-jax list --models` prints the same.', '',
           '`--config.model.positions=rotary` rotates queries and keys by row and column (RoPE), on any grid. '
           '`--config.model.kernels=plain` uses forms that JAX differentiates itself, for `jax.jvp`, `jax.linearize` '
           'and Hessian-vector products. `--config.model.remat=full` trades speed for memory (gradient checkpointing).',
           '']
  for family in dict.fromkeys(one['family'] for one in entries):
    own = [one for one in entries if one['family'] == family]
    names = {source: [str(one['name']) for one in own if one['source'] == source]
             for source in dict.fromkeys(one['source'] for one in own)}
    told = '; '.join(f'{source}: {", ".join(found)}' for source, found in names.items()) if len(names) > 1 else own[0][
        'source']
    sizes = {one['name']: f' ({one["px"]} px)' * (one['px'] != 224) for one in own}
    lines += [f'## {family}', '', f'{told}.', '', '| model | parameters | GFLOPs |', '| --- | ---: | ---: |',
              *(f'| {one["name"]}{sizes[one["name"]]} | {one["parameters"] / 1e6:,.1f} | {_gflops(one["flops"])} |'
                for one in own), '']
  return '\n'.join(lines)


def _gflops(flops: float) -> str:
  """The number in billions, with three digits where it is small."""
  billions = flops / 1e9
  return f'{billions:,.2f}' if billions < 9.995 else f'{billions:,.1f}'


def python() -> str:
  """The Python API, from its docstrings."""
  lines = ['# Python API', '', 'Shapes use the letters of `vit_jax/core/types.py`: B batch, H and W height and width '
           'in pixels, N patches, M tokens, D width, A heads, C classes.', '']
  for topic, names in PYTHON.items():
    lines += [f'## {topic}', '', *(f'::: {name}\n' for name in names)]
  return '\n'.join(lines)


def contracts() -> str:
  """The contracts between the packages, from their docstrings."""
  module = importlib.import_module('vit_jax.core.contracts')
  names = [name for name, one in vars(module).items()
           if inspect.isclass(one) and one.__module__ == module.__name__]
  return '\n'.join(['# Contracts', '', inspect.cleandoc(module.__doc__ or ''), '',
                    *(f'::: vit_jax.core.contracts.{name}\n    options:\n      heading_level: 2\n' for name in names)])


if __name__ == '__main__':
  print({**pages(), 'reference/models.md': models()}[f'reference/{sys.argv[1]}.md'], end='')
