"""Model cards: what a weight file is, where it is from, how its images are prepared, its license, and how to use it.

A card is `README.md` in a folder, where hubs look for it, and `FILE.md` beside a single file. Its last line has a
checksum of the rest, so that a card that a person has written or changed is recognized, and never overwritten.
"""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError, redacted
from vit_jax.core.failures import Damaged
from vit_jax.data.labels import imagenet
from vit_jax.models import cost
from vit_jax.record import checkpoint_files, reader
from vit_jax.weights import addresses, published
from vit_jax.weights.network import Weights, setting

_OURS = re.compile(r'<!-- card written by vit-jax, SHA-256 of the lines above: ([0-9a-f]{64}) -->\n?\Z')
_SPDX = re.compile(r'(apache|mit|bsd|cc|cc0|gpl|lgpl|agpl|mpl|openrail)\b[-\w.+]*', re.I)
"""Licenses that hubs know by their short names; others are `other`, with a name."""
_LIBRARIES = {'huggingface': 'transformers', 'timm': 'timm'}
_MOST_CLASSES = 20  # that are listed
_METRICS = re.compile(r'(\w+)/(top1|top5|nll|map)(@\w+)?')
USE = {
    'huggingface': "from transformers import AutoImageProcessor, AutoModel{head}\n"
                   "processor = AutoImageProcessor.from_pretrained('{path}')\n"
                   "model = AutoModel{head}.from_pretrained('{path}')",
    'timm': "import timm\nmodel = timm.create_model('{where}:{path}', pretrained=True)",
    'onnx': "import numpy as np\nimport onnxruntime\nimage = {image}\n"
            "session = onnxruntime.InferenceSession('{path}')\n"
            "{output}, = session.run(None, {{session.get_inputs()[0].name: image}})",
    'stablehlo': "import pathlib\nimport numpy as np\nfrom jax import export\nimage = {image}\n"
                 "network = export.deserialize(bytearray(pathlib.Path('{path}').read_bytes())).call\n"
                 "{output} = network(image)"}
"""How a format is used in Python; other formats are loaded with vit_jax."""


def text(weights: Weights, name: str, *, written_as: str, how: str, is_folder: bool = False,
         from_pixels: bool = False, license: str = '', is_stated: bool = False) -> str:
  """Returns a card in Markdown, with the header that hubs read.

  Args:
    weights: as they were loaded.
    name: of the file or folder, or `hf://OWNER/NAME`.
    written_as: the format: one of `saving.FORMATS`, `onnx` or `stablehlo`.
    how: a sentence on how the file was made and checked.
    is_folder: whether it is a folder; a timm folder is loaded by its path.
    from_pixels: the file takes u8 images, and normalizes them.
    license: of the file; '' = that of its source.
    is_stated: whether the person who publishes the file chose this license.
  """
  license, metrics = license or find_license(weights.source), measured(weights.source, weights.step)
  stem = pathlib.PurePath(name).stem if not is_folder else name.rpartition('/')[2]
  parts = [header(stem, weights, license=license, library=_LIBRARIES.get(written_as, 'vit_jax'), metrics=metrics),
           f'# {stem}', _about(weights), '## Source',
           f'`{shown_source(weights.source)}` (format: {weights.family}). {how}', *_made(weights.source, weights.step),
           *(f'Note: {one}' for one in weights.report.warnings), '## Images', _images(weights, from_pixels),
           '## Classes', _classes(weights), '## Use', _use(weights, name, written_as, is_folder, from_pixels),
           '## License',
           f'{license}, as stated by the publisher.' if is_stated else
           f'{license}, the license of the source. Check it there.' if license else 'Not stated by the source.',
           '## Measured accuracy',
           'Not measured by this program. `vit-jax evaluate --weights=…` measures it.' if not metrics else
           f'On `{metrics[0]}`, at step {weights.step} of training:\n\n' + _table(
               ('metric', 'value'), [(one, f'{value:.4f}') for one, value in metrics[1].items()])]
  return '\n\n'.join(parts) + '\n'


def header(name: str, weights: Weights, *, license: str, library: str,
           metrics: tuple[str, Mapping[str, float]] | None) -> str:
  """The front matter: license, library, task, tags and results, as hubs read them; values are JSON, which is YAML."""
  is_known = bool(_SPDX.fullmatch(license))
  lines: dict[str, Any] = {'license': license.lower() if is_known else 'other',
           **({'license_name': license} if license and not is_known else {}), 'library_name': library,
           'pipeline_tag': 'image-classification' if weights.num_classes else 'image-feature-extraction',
           'tags': ['vision', type(weights.model).__name__.lower()]}
  if metrics:
    dataset, numbers = metrics
    lines['model-index'] = [{'name': name, 'results': [{
        'task': {'type': 'image-classification'}, 'dataset': {'name': dataset, 'type': dataset},
        'metrics': [{'type': metric, 'value': value} for metric, value in numbers.items()]}]}]
  return '\n'.join(['---', *(f'{key}: {json.dumps(value)}' for key, value in lines.items()), '---'])


def shown_source(source: str) -> str:
  """Returns the name of weights as others know it: without the folders of this machine."""
  path = pathlib.Path(os.path.expanduser(source))
  return path.resolve().name if path.exists() else source


def _made(source: str, step: int) -> list[str]:
  """Returns how a step of a run was made, so that others can make it again; [] for other weights."""
  try:
    run = run_of(source)
    digest = checkpoint_files.read_meta(run / 'checkpoints' / str(step))['digests']['params']
    start: Any = next((event for event in reader.read(run, most_rows=1).events if event['event'] == 'start'), {})
    command, versions = start['command'], start['machine']['versions']
    shown = shlex.join(['vit-jax', *(word for word in command[1:] if not word.startswith('--workdir'))])
    named = ', '.join(f'{name} {versions[name]}' for name in ('vit_jax', 'jax', 'jaxlib', 'flax', 'optax'))
    return [f'Trained with {named}, commit `{start["commit"] or "unknown"}`, by', f'```sh\n{shown}\n```',
            f'SHA-256 of the trained parameters at step {step}, bit for bit: `{digest}`.']
  except (OSError, UserError, Damaged, ValueError, AttributeError, LookupError, TypeError):
    return []


def _about(weights: Weights) -> str:
  m, px = weights.model, weights.preprocess.image_px
  found = cost.forward(m, px, head=weights.head, num_classes=weights.num_classes, num_channels=weights.channels)
  parameters, flops = sum(found.parameters.values()), sum(found.flops.values())
  shown = ('patch', 'width', 'depth', 'heads', 'mlp.hidden', 'registers', 'layers')
  sizes = [f'{key.partition(".")[0]} {value}' for key in shown if (value := setting(m, key))]
  kind = 'Vision Transformer' if isinstance(m, schema.ViT) else type(m).__name__
  return (f'{kind} ({", ".join(sizes)}): {parameters / 1e6:,.1f} million parameters, {flops / 1e9:,.2f} GFLOPs for an '
          f'image of {px[0]} x {px[1]} px (two FLOPs per multiply-add).')


def _images(weights: Weights, from_pixels: bool) -> str:
  p = weights.preprocess
  height, width = p.image_px
  resize = f'short side to {p.resize_px} px, then a center crop' if p.resize_px else 'both sides, without a crop'
  values = 'RGB / 255, minus mean, divided by standard deviation'
  if from_pixels:
    values = f'RGB from 0 to 255, u8; {values} inside of the file'
  rows = {'size': f'{height} x {width} px, RGB', 'resize': f'{resize} ({p.geometry.value})',
          'interpolation': f'{p.interpolation.value}, {"" if p.antialias else "not "}antialiased',
          'values': values,
          'mean': ', '.join(f'{x:g}' for x in p.mean), 'standard deviation': ', '.join(f'{x:g}' for x in p.std),
          'known from': p.rule}
  return _table(('preprocessing', 'value'), list(rows.items()))


def _classes(weights: Weights) -> str:
  if not weights.num_classes:
    return 'No head: the network returns features.'
  if not weights.class_names:
    assumed = imagenet.by_count(weights.num_classes)
    guess = f' The number is that of {assumed.title}.' if assumed else ''
    return f'{weights.num_classes:,} outputs, whose names are not saved with the weights.{guess}'
  shown = ', '.join(weights.class_names[:_MOST_CLASSES])
  more = weights.num_classes - _MOST_CLASSES
  return f'{weights.num_classes:,}: {shown}' + (f', … and {more:,} more.' if more > 0 else '.')


def _use(weights: Weights, name: str, written_as: str, is_folder: bool, from_pixels: bool) -> str:
  blocks = []
  if written_as in USE and (written_as != 'timm' or is_folder):
    head = 'ForImageClassification' if weights.num_classes else ''
    height, width = weights.preprocess.image_px
    kind = 'uint8' if from_pixels else 'float32'
    image = (f'np.zeros((1, {height}, {width}, {weights.channels}), np.{kind})  # your images, prepared as above')
    blocks.append(USE[written_as].format(path=name.removeprefix('hf://'), head=head, image=image,
                                         where='hf-hub' if name.startswith('hf://') else 'local-dir',
                                         output='logits' if weights.num_classes else 'features'))
  if written_as not in ('onnx', 'stablehlo'):
    call = "model.classify('image.jpg')" if weights.num_classes else "model.features('image.jpg')"
    blocks.append(f"import vit_jax\nmodel = vit_jax.load('{name}')\n{call}")
  return '\n\n'.join(f'```python\n{block}\n```' for block in blocks)


def run_of(source: str) -> pathlib.Path:
  """Returns the run directory of a path that is one, or one of its checkpoints; for other weights, some path."""
  path = pathlib.Path(os.path.expanduser(source)).absolute()
  return path.parents[1] if path.parent.name == 'checkpoints' else path


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  return '\n'.join(f'| {" | ".join(row)} |' for row in (head, ['---'] * len(head), *rows))


def find_license(source: str) -> str:
  """The license of weights by their known name, or by the card or config in their folder; '' if it is not known."""
  if (name := source.removesuffix('.npz')) in published.NAMES:
    return published.rule(name)[0].license
  try:
    folder = addresses.local(source, offline=True)
  except UserError:  # it is not in the cache
    return ''
  return license_of(folder if folder.is_dir() else folder.parent)


def license_of(folder: pathlib.Path) -> str:
  """Returns the license in the card or the config of timm in a folder; '' if there is none."""
  card = _read(folder / 'README.md')
  if card.startswith('---') and (found := re.search(r'^license: *"?([\w.-]+)"? *$', card, re.M)):
    name = re.search(r'^license_name: *"?([^"\n]+?)"? *$', card, re.M)
    return found[1] if found[1] != 'other' else name[1] if name else ''
  try:
    config = _object(folder / 'config.json').get('pretrained_cfg', {})
    return str(config.get('license', ''))
  except (ValueError, AttributeError):
    return ''


def measured(source: str, step: int) -> tuple[str, dict[str, float]] | None:
  """The dataset and the metrics of a step of a run; None for other weights, and if nothing was measured there."""
  try:
    run = run_of(source)
    config: Any = _object(run / 'config.json')
    numbers = {name: value for name, value in checkpoint_files.measured(run, step).items() if _METRICS.fullmatch(name)}
    return (f'{config["data"]["source"]} {config["data"]["eval_split"]}', numbers) if numbers else None
  except (ValueError, AttributeError, LookupError, TypeError):
    return None


def _read(path: pathlib.Path) -> str:
  try:
    return documents.read_bytes(path).decode()
  except (OSError, ValueError):
    return ''


def _object(path: pathlib.Path) -> Any:
  """Returns the content of a JSON file; {} if there is none."""
  return documents.parse(_read(path) or '{}')


def path_of(target: pathlib.Path) -> pathlib.Path:
  """The path of the card of a file or folder."""
  return target / 'README.md' if target.is_dir() else target.with_name(f'{target.name}.md')


def is_ours(path: pathlib.Path) -> bool:
  """Whether a file is a card of this program that nobody has changed."""
  content = _read(path)
  found = _OURS.search(content)
  return found is not None and hashlib.sha256(content[:found.start()].encode()).hexdigest() == found[1]


def place(content: str, part: pathlib.Path, target: pathlib.Path) -> None:
  """Writes the card of a file or folder that is not yet at its place.

  Args:
    content: of the card.
    part: the new file or folder.
    target: its place, where a card of a person stays as it is.

  Raises:
    UserError: the card of a person cannot be kept.
  """
  new, old = path_of(part), path_of(target)
  if (old.exists() or old.is_symlink()) and not is_ours(old):
    if part.is_dir():  # which replaces the folder with the old card
      if not old.is_file():
        raise UserError(f'{old}: expected a file, got something else. Move it away.')
      shutil.copy2(old, new)
    return
  content = redacted(content)
  digest = hashlib.sha256(content.encode()).hexdigest()
  new.write_text(f'{content}<!-- card written by vit-jax, SHA-256 of the lines above: {digest} -->\n', encoding='utf-8')
