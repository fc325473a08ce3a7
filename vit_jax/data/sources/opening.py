"""Random access to stored images and their labels, by the name of the source.

A source knows nothing of recipes, batches or order; it has a fixed order of its own and pickles small, since
loader processes get a copy. Kinds: `digits`, `synthetic`, `folder:PATH`, `tfds:NAME[/CONFIG][:VERSION]`,
`vtab:TASK` (see `vtab.py`), `array_record:DIR` (see `prepared.py`), and `mix:0.7*SOURCE,0.3*SOURCE` (see
`mixture.py`).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.source import Part, Parts, Source, most_labels
from vit_jax.data.sources import splits

KINDS = ('digits, synthetic, folder:PATH, tfds:NAME[/CONFIG][:VERSION], vtab:TASK, array_record:DIR, '
         'mix:WEIGHT*SOURCE,WEIGHT*SOURCE')


class Sources(NamedTuple):
  """What a run reads."""
  train: Source
  eval: Source
  class_names: tuple[str, ...]


def open_sources(data: schema.Data, *, image_px: tuple[int, int]) -> Sources:
  """The training and the evaluation split of `data`.

  Raises:
    UserError: the source, a split or a class is missing, or `data.num_classes` says otherwise.
  """
  train = check_labels(open_split(data, data.train_split, image_px=image_px), data)
  evaluation = check_labels(open_split(data, data.eval_split, image_px=image_px), data)
  if data.num_classes not in (0, len(train.class_names)):
    raise UserError(f'data.num_classes={data.num_classes}, but {train.name} has {len(train.class_names)} '
                    'classes; right would be that number, or 0 to ask the source')
  if data.pseudo.source:
    from vit_jax.data.sources import pseudo
    train = pseudo.beside(train, data, image_px=image_px)
  return Sources(train, evaluation, train.class_names)


def open_split(data: schema.Data, split: str, *, image_px: tuple[int, int]) -> Source:
  """One split of `data` by its name or slice. Of a mixture, that of each of its sources.

  Raises:
    UserError: the source or the split is missing, or the classes of a mixture do not agree.
  """
  kind, _, where = data.source.partition(':')
  if kind != 'mix' or not where:
    return _in_order(select(_opener(data.source, data, image_px), split), data.classes)
  from vit_jax.data.sources import mixture
  terms = mixture.parse(where)
  found = [_in_order(select(_opener(t.source, data, image_px), split), data.classes) for t in terms]
  names, labels = mixture.join_classes(found, apart=data.mix_classes is schema.MixClasses.SEPARATE)
  return mixture.Mixture(found, [t.weight for t in terms], name=f'{data.source}/{split}', class_names=names,
                         labels=labels)


def check_labels(source: Source, data: schema.Data) -> Source:
  """The source.

  Raises:
    UserError: its images have several labels, or more than `data.max_labels`.
  """
  most = most_labels(source)
  if most and (not data.max_labels or most > data.max_labels):
    told = f'at least {most}, the most that an image of {source.name} has' if most > 0 else (
        f'the most labels that an image of {source.name} has')
    raise UserError(f'data.max_labels: expected {told}, got {data.max_labels}. Set it, and for training '
                    'objective.loss=sigmoid, so that the classes of an image do not exclude each other.')
  return source


def _in_order(source: Source, path: str) -> Source:
  """The source with the classes of the file `path`, in its order; as it is where that is ''."""
  if not path:
    return source
  from vit_jax.data.sources import classes
  return classes.renumbered(source, classes.read(path), where=f'data.classes={path}')


def select(open_named: Callable[[str], Source], split: str) -> Source:
  """The source that `split` (such as `train[:800]+val[:200]`) means, given a way to open whole splits."""
  terms = splits.parse(split)
  parts = [Part(source, *splits.bounds(term, len(source)))
           for term in terms for source in [open_named(term.name)]]
  if len(parts) == 1 and not (terms[0].lower or terms[0].upper):
    return parts[0].source
  return Parts(parts, name=f'{parts[0].source.name.rpartition("/")[0]}/{split}')


def _opener(name: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """How to open a whole split of the source `name`, with the other settings of `data`."""
  kind, _, where = name.partition(':')
  match kind, bool(where):
    case 'digits', False:
      from vit_jax.data.sources import builtin
      return builtin.open_digits
    case 'synthetic', False:
      from vit_jax.data.sources import builtin
      return builtin.synthetic_opener(num_examples=data.num_examples, num_classes=data.num_classes,
                                      image_px=image_px)
    case 'folder', True:
      from vit_jax.data.sources import folder, label_file
      return label_file.opener(where, holdout=data.holdout, seed=data.holdout_seed) or folder.opener(
          where, holdout=data.holdout, seed=data.holdout_seed)
    case 'tfds', True:
      from vit_jax.data.sources import tfds
      return tfds.opener(where, data_dir=data.data_dir, label_column=data.label_column)
    case 'vtab', True:
      from vit_jax.data.sources import vtab
      return vtab.opener(where, data_dir=data.data_dir)
    case 'array_record', True:
      from vit_jax.data.sources import prepared
      return prepared.opener(where, verify=data.verify_shards)
  raise UserError(f'the data source {name!r} is not known; right are: {KINDS}')
