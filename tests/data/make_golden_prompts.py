"""Makes `golden_prompts.json`: prompts as big_vision's own functions make them.

Run with a checkout of github.com/google-research/big_vision (made with 0127fb6b):
  python tests/data/make_golden_prompts.py CHECKOUT
The file has all prompts of some names, and a digest of the prompts of all classes of ImageNet-1k.
"""
from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import types
from typing import Any

NAMES = ('cat', 'Great_Pyrenees', 'T-shirt, tee shirt', "jack-o'-lantern", '  white   horse ', 'U.S. dollar (green)',
         'cat,', 'Kätzchen', 'a\tb')
TEMPLATES = ('a photo of a {}.', 'A Photo of the {}!', '{}', 'itap of {}, the_best.')


def load(checkout: pathlib.Path) -> Any:
  """Imports big_vision's module of prompts; TFDS and logging, which it does not need here, are empty."""
  sys.path.insert(0, str(checkout))
  for name in ('tensorflow_datasets', 'absl', 'absl.logging'):
    sys.modules[name] = types.ModuleType(name)
  logging: Any = sys.modules['absl.logging']
  logging.info = lambda *args: None
  absl: Any = sys.modules['absl']
  absl.logging = logging
  from big_vision.evaluators.proj.image_text import prompt_engineering
  return prompt_engineering


def prompts(module: Any, names: Any, templates: list[str]) -> list[list[str]]:
  """As `discriminative_classifier.py`: the first name of each class in each template."""
  first = [name.split(',')[0] for name in names]
  return [[template.split('{}')[0] + name + template.split('{}')[1] for template in templates] for name in first]


def main() -> None:
  module = load(pathlib.Path(sys.argv[1]))
  module._PROMPT_TEMPLATES['own'] = list(TEMPLATES)
  names = module.get_class_names(dataset_name='', source=list(NAMES))
  found: dict[str, Any] = {
      'own': prompts(module, names, module.get_prompt_templates('own')),
      'canonical': [module.canonicalize_text(name) for name in NAMES]}
  imagenet = module.get_class_names(dataset_name='imagenet2012', source='clip')
  for name in ('class_name_only', 'clip_paper', 'clip_best'):
    every = prompts(module, imagenet, module.get_prompt_templates(name))
    found[name] = hashlib.sha256(json.dumps(every).encode()).hexdigest()
  path = pathlib.Path(__file__).with_name('golden_prompts.json')
  path.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
