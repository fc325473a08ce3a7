"""The arguments of a config file, `file.py:arg,arg,key=value`."""

from vit_jax.core import globs
from vit_jax.core.errors import UserError


def parse_arg(text: str, **kinds: tuple[str, ...]) -> dict[str, str]:
  """Parses the arguments of a config, `file.py:arg,arg,key=value`.

  Args:
    text: everything after the first colon.
    kinds: the known values of each kind, its default first. A bare word goes to the kind that knows it; `()` and
      `('',)` take any value, as `key=value` only, and default to ''.

  Raises:
    UserError: lists every word that is unknown or given twice, and the known ones; or says what replaced `mesh`.
  """
  found: dict[str, str] = {}
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
    elif key in found:
      problems.append(f'  {key}: expected one value, got {found[key]} and {value}')
    else:
      found[key] = value
  if problems and not kinds:
    raise UserError(f'arguments: expected none after the colon, as this config takes none, got {text!r}. '
                    'Remove the colon and what follows it.')
  if problems:
    known = [f'  {kind}=' + (f'{" | ".join(filter(None, values))}' if any(values) else '...')
             for kind, values in kinds.items()]
    raise UserError('\n'.join([f'arguments: expected known ones, each once, got {text!r}.', *problems, 'Known:',
                               *known]))
  return {kind: found.get(kind, values[0] if values else '') for kind, values in kinds.items()}
