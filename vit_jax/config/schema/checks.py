"""What all settings dataclasses share: they refuse unknown names, and check themselves. Arguments of configs."""
import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from vit_jax.core import globs
from vit_jax.core.errors import UserError

Run = Any
"""The `schema.Config` that a part belongs to. Its module imports those of the parts, so they cannot name its type."""


class UnknownSetting(UserError):
  """A name that a settings dataclass does not have."""


class NoEffect(NamedTuple):
  """Settings of a part that have no effect where another setting of the part has certain values.

  They must then have their defaults. `NoEffect('ema', (0.,), ('ema_warmup',))` of the part `train` gives the message
  `train.ema_warmup: expected its default ratio with train.ema=0, got power. It has no effect there.`
  """
  setting: str             # such as `ema`
  values: tuple[Any, ...]  # where it has one of these values
  others: tuple[str, ...] = ()  # have no effect; () = all settings: the part is off, and not checked any further
  note: str = ''    # follows the value in the message, such as `, which takes all`
  advice: str = ''  # a further sentence of the message: what to do, if not to remove the setting


class Settings:
  """Base of all parts of a config, which are dataclasses."""
  implementation: ClassVar[str]  # code of a part that may be of several kinds: `module:name` (core/implementation.py)
  without_effect: ClassVar[tuple[NoEffect, ...]] = ()  # a class has the entries of its base classes, too

  def __init_subclass__(cls, **kwargs: Any) -> None:
    super().__init_subclass__(**kwargs)
    # They are texts in a module with `from __future__ import annotations`.
    cls.__annotations__ = inspect.get_annotations(cls, eval_str=True)

  def __new__(cls, *args: Any, **settings: Any) -> Self:
    for name in settings:
      _refuse_unknown(cls, name)
    return super().__new__(cls)

  def __setattr__(self, name: str, value: Any) -> None:
    _refuse_unknown(type(self), name)
    super().__setattr__(name, value)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    """Yields a message for each combination of settings that cannot work, or has no effect and is no `NoEffect`.

    Args:
      config: the complete run, in which every single setting has a valid value (`ranges.py`).
      name: the dotted path of this part, such as `data.recipe`.
    """
    del config, name
    yield from ()


def _refuse_unknown(kind: Any, name: str) -> None:
  """Raises UnknownSetting, with the nearest name."""
  if name not in (known := names(kind)):
    raise UnknownSetting(f'{kind.__name__}: expected the name of a setting, got {name!r}.{nearest(name, known)}')


@functools.cache
def names(kind: Any) -> tuple[str, ...]:
  """Returns the names of the settings of a dataclass."""
  return tuple(field.name for field in dataclasses.fields(kind))


def nearest(name: str, known: Iterable[str], prefix: str = '') -> str:
  """Returns the end of a message about an unknown name: the nearest known name, or all if none is near."""
  known = list(known)
  if near := globs.similar_names(name, known, cutoff=.5):
    return f' Did you mean {prefix}{near[0]}?'
  return f' Known: {", ".join(known)}.' if len(known) <= 40 else ''


def problem(name: str, expected: str, got: Any, advice: str = '') -> str:
  """Formats a problem: `data.workers: expected 0 with data.in_memory=yes, got 2. Set it to 0.`"""
  return f'{name}: expected {expected}, got {shown(got)}.{" " * bool(advice)}{advice}'


def shown(value: Any) -> str:
  """Formats a value for messages: a choice by its value, a part by its kind, at most 80 characters."""
  if isinstance(value, enum.Enum):
    return str(value.value).lower() if isinstance(value.value, bool) else str(value.value)
  if isinstance(value, Settings) and hasattr(value, 'implementation'):
    return kind(value)
  try:
    text = repr(value)
  except ValueError:  # Python writes no integer of more than 4,300 digits
    return f'an integer of {value.bit_length():,} bits' if isinstance(value, int) else f'a {type(value).__name__}'
  return text if len(text) <= 80 else f'{text[:60]}… ({len(text):,} characters)'


def combinations(part: Any, config: Run, name: str) -> Iterator[str]:
  """Yields problems of settings that do not go together: those of `without_effect`, and those of `problems`."""
  for kind in reversed(type(part).__mro__):
    for entry in vars(kind).get('without_effect', ()):
      value = getattr(part, entry.setting)
      if value in entry.values:
        text = f'{value:g}' if isinstance(value, float) else shown(value)
        yield from no_effect(part, name, entry.others or names(part.__class__),
                             f'with {name}.{entry.setting}={text}{entry.note}', entry.advice)
        if not entry.others:
          return
  yield from part.problems(config, name)


def no_effect(part: Any, name: str, settings: Collection[str], condition: str, advice: str = '') -> Iterator[str]:
  """Yields problems of settings that differ from their defaults where they have no effect.

  Args:
    part: the settings dataclass.
    name: its dotted path.
    settings: names of fields.
    condition: when they have no effect, such as `with crop=resize`.
    advice: a further sentence: what to do, if not to remove the setting.
  """
  for field in dataclasses.fields(part):
    value, default = getattr(part, field.name), default_of(field)
    if field.name in settings and value != default:
      usual_text = '' if dataclasses.is_dataclass(default) else f' {shown(default)}'
      yield problem(f'{name}.{field.name}', f'its default{usual_text} {condition}', value,
                    f'It has no effect there.{" " * bool(advice)}{advice}')


def kind(settings: Any) -> str:
  """Returns the name by which a person chooses this kind of a part, such as `sincos` for `SinCos`."""
  return type(settings).__name__.lower()


def replaced(settings: Any, changes: Mapping[str, Any]) -> Any:
  """Returns settings with other values, by dotted names such as `block.layer_scale` or `evals.test`, in this order."""
  for name, value in changes.items():
    first, dot, rest = name.partition('.')
    is_dict = isinstance(settings, dict)
    if dot:
      value = replaced(settings[first] if is_dict else getattr(settings, first), {rest: value})
    settings = {**settings, first: value} if is_dict else dataclasses.replace(settings, **{first: value})
  return settings


def default_of(field: dataclasses.Field[Any], *, missing: Any = '') -> Any:
  """Returns the default value of a field; `missing` if it has none."""
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return missing if field.default is dataclasses.MISSING else field.default


def true_ones(is_true: Mapping[str, bool]) -> list[str]:
  """Returns the keys whose value is true."""
  return [key for key, value in is_true.items() if value]


def must_be_off(config: Run, settings: Iterable[str], where: str, advice: str = '') -> Iterator[str]:
  """Yields a problem for each of several settings, by dotted names, that is neither 0 nor ''."""
  for name in settings:
    if value := functools.reduce(getattr, name.split('.'), config):
      yield problem(name, f"'' {where}" if isinstance(value, str) else f'0 {where}', value, advice)


def at_most(name: str, value: float, most: float, what: str) -> Iterator[str]:
  """Yields a problem if a number is larger than another setting allows; `what` names that one."""
  if value > most:
    yield problem(name, f'at most {what}={most:g}', value)


def multiple(name: str, value: int | tuple[int, ...], of: int, what: str) -> Iterator[str]:
  """Yields a problem if a number, or one of several, is not a multiple of `of`; `what` says what that is."""
  if any(number % of for number in (value if isinstance(value, tuple) else (value,))):
    yield problem(name, f'a multiple of {what}', value)


def ascending(name: str, pair: tuple[float, float]) -> Iterator[str]:
  """Yields a problem if the first number of a range is the larger one."""
  if pair[0] > pair[1]:
    yield problem(name, 'the smaller number first', pair)


def patterns(name: str, texts: Iterable[str]) -> Iterator[str]:
  """Yields problems of texts that are not regular expressions."""
  for text in texts:
    try:
      re.compile(text)
    except re.error as error:
      yield problem(name, 'a regular expression', text, f'Python reports: {error}.')


def parse_arg(text: str, **kinds: tuple[str, ...]) -> dict[str, str]:
  """Parses the arguments of a config, `file.py:arg,arg,key=value`.

  Args:
    text: everything after the first colon.
    kinds: the known values of each kind, its default first. A bare word goes to the kind that knows it; `()` and
      `('',)` take any value, as `key=value` only, and default to ''.

  Raises:
    UserError: lists every word that is unknown or given twice, and the known ones; or says what replaced `mesh`.
  """
  values: dict[str, str] = {}
  problems = []
  for word in filter(None, (part.strip() for part in text.split(','))):
    key, equals, value = word.partition('=')
    if not equals:
      key, value = next((kind for kind, known in kinds.items() if word in known), ''), word
    if key == 'mesh' and key not in kinds:
      raise UserError(f'arguments: expected none named mesh, got {word!r}: a run is laid out for the devices it runs '
                      'on, and a plan for --topology. Remove the argument. It also set bfloat16, which '
                      '--config.model.dtype=bfloat16 sets.')
    if key not in kinds:
      problems.append(f'  {word!r}: expected one of the known arguments')
    elif any(kinds[key]) and value not in kinds[key]:
      problems.append(f'  {key}: expected one of {", ".join(filter(None, kinds[key]))}, got {value!r}.'
                      f'{globs.nearest(value, kinds[key])}')
    elif key in values:
      problems.append(f'  {key}: expected one value, got {values[key]} and {value}')
    else:
      values[key] = value
  if problems and not kinds:
    raise UserError(f'arguments: expected none after the colon, as this config takes none, got {text!r}. '
                    'Remove the colon and what follows it.')
  if problems:
    lines = [f'arguments: expected known ones, each once, got {text!r}.', *problems, 'Known:']
    for kind, known in kinds.items():
      lines.append(f'  {kind}=' + (' | '.join(filter(None, known)) or '...'))
    raise UserError('\n'.join(lines))
  return {kind: values.get(kind, known[0] if known else '') for kind, known in kinds.items()}
