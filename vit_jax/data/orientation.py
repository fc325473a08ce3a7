"""Decides whether the EXIF orientation of images is applied if `data.recipe.exif_orientation` is `auto`.

Phones store photos as the sensor recorded them. The EXIF orientation states how to turn a photo so that it is upright.
`auto` applies the orientation to files of the user: folders, shards that were prepared from folders, and images that
are named on the command line. `auto` ignores it in published datasets, prepared or from a hub, like their authors.

A job that opens a source calls `decide` once, before the recipe is used. A job that reads images that are named on the
command line calls `decide_for_named_files`. `formats/pseudo.py` calls `has_own_files`.
"""
from __future__ import annotations

import dataclasses
import logging

from vit_jax.config import schema
from vit_jax.config.schema import Exif
from vit_jax.data.source import Source, origins, title

log = logging.getLogger('vit_jax.data')


def decide(recipe: schema.Recipe, source: Source) -> schema.Recipe:
  """Returns the recipe with `exif_orientation` true or false. `has_own_files` decides `auto`; the choice is logged."""
  if recipe.exif_orientation is not Exif.AUTO:
    return recipe
  is_applied = has_own_files(source)
  if getattr(origins(source)[0], 'encoded', True):  # no message for arrays of pixels: they have no EXIF orientation
    decision = ('applied, as these are your own files. To ignore it' if is_applied else
                'ignored, as in published pipelines. To apply it')
    log.info('%s: the EXIF orientation of images is %s, set data.recipe.exif_orientation=%s.', title(source), decision,
             str(not is_applied).lower())
  return dataclasses.replace(recipe, exif_orientation=Exif(is_applied))


def decide_for_named_files(recipe: schema.Recipe) -> schema.Recipe:
  """Returns the recipe with `exif_orientation` true instead of `auto`, for images named on the command line."""
  is_auto = recipe.exif_orientation is Exif.AUTO
  return dataclasses.replace(recipe, exif_orientation=Exif.TRUE) if is_auto else recipe


def has_own_files(source: Source) -> bool:
  """Returns whether the images of a source, or of one part of a mixture, are files of the user."""
  return any(getattr(stored, 'own_files', False) for stored in origins(source))
