"""Settings of data: sources, and how they are read."""
import dataclasses
import enum
import functools
from collections.abc import Iterator
from dataclasses import field

from vit_jax.config.schema.checks import NoEffect, Run, Settings, must_be_off, no_effect, problem
from vit_jax.config.schema.ranges import BELOW_1, COUNT, COUNT_OR_0, INSIDE, SEED, THREADS, Range, ranged
from vit_jax.config.schema.recipe import Crop, Recipe

RGB = 3
"""Channels of images in 8 bits, which the published recipes are for."""
__all__ = ('AUTO_WORKERS', 'Data', 'Decode', 'InMemory', 'MixClasses', 'Pseudo')


class MixClasses(enum.Enum):
  """How the classes of a mixture of sources are numbered."""
  SAME = 'same'          # all sources have the same class names
  SEPARATE = 'separate'  # the classes of each source follow those of the sources before it


AUTO_WORKERS = -1
"""`data.workers=auto`."""


class InMemory(enum.Enum):
  """Whether decoded images are held in memory and augmented on the device."""
  AUTO = 'auto'  # when the recipe's crop is `resize`, nothing needs the host, and images take less than 2 GiB
  YES = 'yes'
  NO = 'no'


class Decode(enum.Enum):
  """How much of a stored JPEG is decoded where a recipe crops it at random."""
  AUTO = 'auto'  # crop if its library is installed and gives the pixels of full on this machine; else full
  FULL = 'full'
  CROP = 'crop'  # what the crop shows, by nvImageCodec (extra `crop`; no GPU needed)


@dataclasses.dataclass
class Pseudo(Settings):
  """Images without labels, which a teacher labels before training begins (Noisy Student, arXiv 1911.04252)."""
  source: str = ''                        # like data.source; labels that it has are not used; '' = none
  split: str = 'train'  # of that source
  teacher: str = ''                       # its weights: like init_from
  labels: str = ''                        # directory of its answers: written where missing, used where there
  top: int = ranged(10, COUNT)            # classes of an answer that count, with their probabilities; 1 = hard labels
  threshold: float = ranged(.3, BELOW_1)  # probability of the most likely class that an image needs to be taken
  # Images taken of each class, the most confident ones, repeated where there are too few; 0 = all.
  per_class: int = ranged(0, COUNT_OR_0)
  share: float = ranged(.5, INSIDE)       # of these images in training
  without_effect = (NoEffect('source', ('',)),)

  def problems(self, config: Run, name: str) -> Iterator[str]:
    for setting, what in (('teacher', 'weights, which label the images'), ('labels', 'a directory for the labels')):
      if not getattr(self, setting):
        yield problem(f'{name}.{setting}', what, '')
    for setting, source in ((f'{name}.source', self.source), ('data.source', config.data.source)):
      if source.startswith('mix:'):
        yield problem(setting, f'one source beside {name}, as examples of a mixture have no fixed order', source)
    objective = config.objective
    if not objective.has_head or objective.needs_tokens:  # learns no classes, or those of every token
      yield problem(f'{name}.source', f"'' for objective {type(objective).__name__}, which does not learn from the "
                    'classes that a teacher gives', self.source, 'Use objective Supervised or Distill.')
    if config.data.max_labels:
      yield problem('data.max_labels', f'0 beside {name}, whose answers are of one class each', config.data.max_labels,
                    f'Set it to 0, or leave {name}.source empty.')
    if config.data.recipe.views.on:
      yield problem('data.recipe.views.on', f'False with {name}.source', True)


WITHOUT_COLUMNS = ('digits', 'synthetic', 'array_record')
"""Kinds of sources whose files have no columns to choose from."""
WITHOUT_CAPTION_COLUMNS = (*WITHOUT_COLUMNS, 'folder')


@dataclasses.dataclass
class Data(Settings):
  """Where images come from, and how they are read."""
  # digits | synthetic | folder:PATH | tfds:NAME[/CONFIG][:VERSION] | vtab:TASK | array_record:DIR | wds:PATH |
  # tfrecord:PATH | parquet:PATH | mix:0.7*SOURCE,0.3*SOURCE | masks:PATH | masks:tfds:NAME[/CONFIG][:VERSION]
  source: str = 'digits'
  train_split: str = 'train'                       # TFDS syntax: train[:98%]
  eval_split: str = 'test'  # that evaluations use
  data_dir: str = ''                               # of TFDS; '' = its default
  num_examples: int = ranged(0, Range(0, 10**12))  # of the training split; 0 = ask the source
  any_num_examples: bool = False  # train also if the source has more than 1 % more or fewer than num_examples
  num_classes: int = ranged(0, COUNT_OR_0)         # 0 = ask the source
  max_labels: int = ranged(0, Range(0, 1_000))     # of one image that may have several (multi-hot); 0 = each has one
  # Feature of a TFDS dataset with the class or classes, or its path (`objects/label`); '' = `label`, or the only one.
  # wds: cls, or json/FIELD; '' = cls, or else json/label. tfrecord: '' = image/class/label, or else label.
  # parquet: a column; '' = label, or the only one of the type ClassLabel. folder: a column of a label file with a
  # header, or a field of .jsonl; '' = the only one, or labels.
  label_column: str = ''
  # wds: the extension of the images, such as jpg; '' = the only image of each key.
  # tfrecord: the feature with the image; '' = image/encoded, or else image.
  # parquet: a column; '' = that of the type Image, or image, or the only one with bytes. folder: as label_column; '' =
  # the one with paths of images.
  image_column: str = ''
  # Captions. wds: the extension of texts, a caption in each line, or json/FIELD; '' = txt. parquet: a column of texts
  # or lists of texts; tfrecord: a feature; TFDS: a feature or its path (`captions/text`); '' = caption, captions, text.
  caption_column: str = ''
  label_offset: int = ranged(0, Range(-(2**31), 2**31 - 1))  # number of the first class in the files, such as 1
  classes: str = ''  # file of the classes in the order of the network's outputs, a line each: n01440764 tench
  holdout: float = ranged(0.1, BELOW_1)            # part held out of a source that has a single split
  holdout_seed: int = ranged(0, SEED)  # of the choice of held-out examples
  mix_classes: MixClasses = MixClasses.SAME
  pseudo: Pseudo = field(default_factory=Pseudo)
  # Of the images; 3 = RGB in 8 bits. Others keep their type: TIFF, .npy, gray images; only geometry augments them.
  channels: int = ranged(3, Range(1, 1024))
  recipe: Recipe = field(default_factory=Recipe)
  in_memory: InMemory = InMemory.AUTO
  decode: Decode = Decode.AUTO                    # of a JPEG that is cropped at random
  # Loader processes; 0 = threads of this process; -1 or auto = by cores and dataset.
  workers: int = ranged(AUTO_WORKERS, Range(0, 1024, also=(AUTO_WORKERS,)))
  threads: int = ranged(0, THREADS)                # reading and decoding; 0 = one a core, at most 16 in a process
  max_bad_images: int = ranged(100, COUNT_OR_0)    # undecodable images (distinct, on one host) that stop the run
  follow_links: bool = False  # also read files outside of a data folder to which symbolic links in it lead
  max_file_mib: int = ranged(512, Range(1, 2**20))  # MiB of an image or mask file; larger ones count as bad images
  read_ahead_mib: int = ranged(256, Range(1, 2**20))  # of gs:// and s3://, read before they are needed, a process
  # MiB of decoded row groups that a process holds, among which images of parquet: are shuffled.
  shuffle_mib: int = ranged(1024, Range(1, 2**20))

  def problems(self, config: Run, name: str) -> Iterator[str]:
    sources = [self.source, *(one.source for one in config.evals.values())]
    if self.data_dir and not any(kind in source for source in sources for kind in ('tfds:', 'vtab:')):
      yield problem(f'{name}.data_dir', f"'' with {name}.source={self.source!r}, which is not a TFDS dataset",
                    self.data_dir)
    if not self.source.startswith('mix:'):
      yield from no_effect(self, name, ('mix_classes',), f'with {name}.source={self.source!r}, which is not a mixture')
    yield from self.column_problems(name)
    yield from self._channel_problems(config, name)
    if self.in_memory is InMemory.YES:
      if self.recipe.crop is not Crop.RESIZE:
        crop = self.recipe.crop.value
        yield problem(f'{name}.in_memory', f'no or auto with {name}.recipe.crop={crop}, which crops the stored image',
                      self.in_memory, f'Set {name}.recipe.crop=resize, or in_memory=no.')
      if self.workers > 0:
        yield problem(f'{name}.workers', f'auto or 0 with {name}.in_memory=yes', self.workers)
      for augmentation in self.recipe.on_host():
        yield problem(f'{name}.in_memory', f'no or auto with {name}.recipe.{augmentation}, which is applied on the '
                      'host', self.in_memory)
    if self.decode is Decode.CROP and self.recipe.views.on:
      yield problem(f'{name}.decode', f'auto or full with {name}.recipe.views.on=True, which takes several crops',
                    self.decode)
    elif self.decode is Decode.CROP and self.recipe.crop is Crop.RESIZE:
      yield problem(f'{name}.decode', f'auto or full with {name}.recipe.crop=resize, which does not crop', self.decode)

  def column_problems(self, name: str) -> Iterator[str]:
    """Yields the columns that are set for a source without columns."""
    terms = self.source.removeprefix('mix:').split(',') if self.source.startswith('mix:') else [self.source]
    kinds = {term.rpartition('*')[2].partition(':')[0] for term in (*terms, self.pseudo.source) if term}
    for setting in ('label_column', 'image_column', 'caption_column'):
      without = WITHOUT_CAPTION_COLUMNS if setting == 'caption_column' else WITHOUT_COLUMNS
      if (value := getattr(self, setting)) and kinds <= set(without):
        advice = 'Leave it out.' + (' Captions of a folder are in captions_train.jsonl and so on.'
                                    if kinds == {'folder'} and setting == 'caption_column' else '')
        yield problem(f'{name}.{setting}', f"'' with {name}.source={self.source!r}, which has no columns", value,
                      advice)

  def _channel_problems(self, config: Run, name: str) -> Iterator[str]:
    """Yields problems of images that are not RGB: only their geometry can be changed."""
    recipe = self.recipe
    is_rgb = self.channels == RGB
    for setting in ('mean', 'std'):
      value = getattr(recipe, setting)
      if len(value) != self.channels and (is_rgb or not recipe.is_unmeasured):
        yield problem(f'{name}.recipe.{setting}', f'{self.channels} values, one for each of {name}.channels',
                      tuple(value), '' if is_rgb else 'Leave both out to use those that vit-jax prepare measures.')
    if is_rgb:
      return
    only = f'with {name}.channels={self.channels}, as it is for RGB images'
    off = {'randaugment.layers': '0', 'jitter': 'none', 'rotate_degrees': '0', 'scale': '0', 'shear': '0'}
    geometry = (one for one in ('truncate', 'rotate_degrees', 'scale', 'shear') if getattr(recipe, one))
    for setting in (*recipe.on_host(), *geometry):
      value = functools.reduce(getattr, setting.split('.'), recipe)
      yield problem(f'{name}.recipe.{setting}', f'{off.get(setting, "False")} {only}', value)
    if self.decode is Decode.CROP:
      yield problem(f'{name}.decode', f'auto or full {only}', self.decode)
    yield from must_be_off(config, (f'{name}.pseudo.source', 'trackers.images'), only)
    if (objective := type(config.objective).__name__) != 'Supervised':
      yield problem('objective', f'Supervised {only}', objective)
    for key, one in config.evals.items():
      if (kind := type(one).__name__) in ('CaptionRetrieval', 'Segmentation', 'ZeroShot'):
        yield problem(f'evals.{key}', f'another evaluation {only}', kind)
