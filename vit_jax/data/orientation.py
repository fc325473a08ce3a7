"""The decision whether the EXIF orientation of images is applied, where neither a person nor a run has made it.

Phones store photos as the sensor saw them, and the EXIF orientation says how they are to be turned. It is applied to a
person's own files: folders, shards that were prepared from them, and files that are named. Published datasets, prepared
or from a hub, are read as their authors' programs read them, without it.

A job that opens a source calls `decide` once, before the recipe is used; a job that reads named files calls `named`.
"""
from __future__ import annotations

import dataclasses
import logging

from vit_jax.config import schema
from vit_jax.config.schema import Exif
from vit_jax.data.source import Source, origins, title

log = logging.getLogger('vit_jax.data')


def decide(recipe: schema.Recipe, source: Source) -> schema.Recipe:
  """Returns the recipe with `exif_orientation` true or false: `auto` follows from the source, which is logged."""
  if recipe.exif_orientation is not Exif.AUTO:
    return recipe
  is_applied = has_own_files(source)
  if getattr(origins(source)[0], 'encoded', True):
    what = ('applied, as these are your own files. To ignore it' if is_applied else
            'ignored, as in published pipelines. To apply it')
    log.info('%s: the EXIF orientation of images is %s, set data.recipe.exif_orientation=%s.', title(source), what,
             str(not is_applied).lower())
  return dataclasses.replace(recipe, exif_orientation=Exif(is_applied))


def named(recipe: schema.Recipe) -> schema.Recipe:
  """Returns the recipe for files that a person names: what is `auto` is applied."""
  return recipe if recipe.exif_orientation is not Exif.AUTO else dataclasses.replace(recipe, exif_orientation=Exif.TRUE)


def has_own_files(source: Source) -> bool:
  """Returns whether images of a source are files of a person's own; of a mixture, whether those of any part are."""
  return any(getattr(stored, 'own_files', False) for stored in origins(source))
