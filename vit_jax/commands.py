"""The table of jobs with their typed flags, and how a job is run.

The table `JOBS` at the end determines parsing and `--help` (`main.py`) and shell completion (`completion.py`).
`main.parse` turns a command line into a `Command`, and `main.run` calls `Command.run`. `Command.run` imports the module
of the job and calls the module's function `run`, which returns the exit status. To add a job, add a module and an
entry in `JOBS`.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vit_jax.config import files, schema
from vit_jax.core import address, globs, implementation
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.flag_kinds import (
  BLOCKS,
  DIRECTORIES,
  DIRECTORY,
  FILE,
  FRACTION,
  GLOB,
  LOCAL_PATH,
  NAMES,
  NUM_PARAMS,
  NUMBER,
  PATHS,
  RUNNER,
  SEARCH,
  TASK,
  TEXT,
  Kind,
  choice,
  choices,
  whole,
  wholes,
)
from vit_jax.parallel import xla_flags
from vit_jax.record import console, storage
from vit_jax.weights.hints import Reading


class Flag(NamedTuple):
  """A flag of a job."""
  name: str
  kind: Kind | None  # of the flag's value; None = a switch, which takes no value
  help: str  # what the flag sets, for the help and for messages
  default: Any = None  # the value if the flag is not given; a switch is then False
  default_text: str = ''  # in place of `default` in the help, such as 'the run directory'; '' = `default` is shown
  bare_value: str = ''  # what a flag without a value stands for: `--lora` means `--lora=8`; '' = a value is required

  def read(self, text: str) -> Any:
    """Returns the value for a text from the command line. The flag must not be a switch.

    Raises:
      UserError: the text is empty, or the kind of the flag expects another text.
      TemporaryError: the storage of a path failed.
    """
    assert self.kind is not None
    if not text:
      raise UserError(f'--{self.name}: expected {self.kind.expected}, got none. Set --{self.name}={self.kind.metavar}: '
                      f'{self.help}.')
    if self.kind.is_utf8 and any('\udc80' <= c <= '\udcff' for c in text):  # bytes that are not UTF-8
      raise UserError(f'--{self.name}: expected a path in UTF-8, as the libraries that write there need it, got '
                      f'{os.fsencode(text).decode(errors="backslashreplace")}. Choose another name.')
    for part in text.split(',') if self.kind.is_path else ():
      address.check(part, f'--{self.name}')
    try:
      return self.kind.convert(text)
    except storage.UnknownHome:
      raise UserError(f'--{self.name}: expected {self.kind.expected}, got {text[:40]!r}, whose home directory is not '
                      'known. Correct the path.') from None
    except (UserError, TemporaryError):
      raise
    except ValueError:
      raise UserError(f'--{self.name}: expected {self.kind.expected}, got {text[:40]!r}.'
                      f'{globs.nearest(text, self.kind.choices)}') from None


class Job(NamedTuple):
  """A job of the command line."""
  summary: str  # one sentence for the help
  module: str  # the name, below `vit_jax`, of the module whose function `run` does the job
  required: tuple[Flag, ...] = ()  # flags that must be given
  optional: tuple[Flag, ...] = ()  # flags that may be given
  files: str = ''  # describes the arguments that are not flags; in brackets if they are optional; '' = it takes none
  base: str = ''  # for a job without --config: the config whose settings can be overridden; '' = no overrides
  is_on_cpu: bool = False  # whether the job leaves accelerators to other processes
  is_quick: bool = False  # whether the job takes few seconds, so that it shows no stages

  @property
  def flags(self) -> dict[str, Flag]:
    """All flags of the job by name."""
    return {flag.name: flag for flag in (*self.required, *self.optional)}

  @property
  def has_settings(self) -> bool:
    """Whether --config.NAME=VALUE overrides settings."""
    return bool(self.base) or 'config' in self.flags


class Command(NamedTuple):
  """A parsed command line: the name of the job, the value of every flag by name (the default if the flag is not given),
  overrides of the config (`name=value` each), and the arguments that are not flags."""
  job: str
  values: dict[str, Any]
  overrides: tuple[str, ...] = ()
  files: tuple[str, ...] = ()

  def run(self, parse: Callable[[Sequence[str]], Command]) -> int:
    """Runs the job and returns the exit status. `parse` is `main.parse`, for jobs that read other command lines.

    The function `run` of a job's module has a parameter for each flag of the job except `flags`, and any of these:

      config       the `schema.Config` or `schema.Study` with its overrides; None if the command line names none
      source       where the config is from, for messages: `--config=digits`
      changes      the overrides on the command line, `name=value` each
      overridden   the names of the overridden settings
      files        the arguments that are not flags
      reading      a `Reading` with the values of the flags `READING`, in place of a parameter for each of them
      read_line    the function `read_line` of this module, without its first argument
    """
    from vit_jax.parallel import hardware
    values = dict(self.values)
    if values.get('allow_code'):
      implementation.trust_folder(os.getcwd())
    implementation.note_command_line(str(values.get('data') or ''))
    flags = values.pop('flags', ())
    check_xla_flags(flags, values.get('topology') or os.environ.get('TPU_ACCELERATOR_TYPE', ''))
    hardware.choose(flags=flags)  # before any job imports jax
    job = JOBS[self.job]
    extra: dict[str, Any] = {'files': self.files, 'changes': self.overrides,
                             'overridden': {text.partition('=')[0] for text in self.overrides},
                             'read_line': functools.partial(read_line, parse)}
    if 'config' in job.flags:
      extra['config'], extra['source'] = load_config(self)
    if job.is_on_cpu:
      hardware.use_cpu()
    with contextlib.nullcontext() if job.is_quick else console.stages_shown():
      console.begin_stage('importing jax')
      run = importlib.import_module(f'vit_jax.{job.module}').run
      parameters = inspect.signature(run).parameters
      if 'reading' in parameters:
        values['reading'] = Reading(**{flag.name: values.pop(flag.name) for flag in READING})
      if 'allow_code' not in parameters:
        values.pop('allow_code', None)
      return run(**values | {name: value for name, value in extra.items() if name in parameters})


def check_xla_flags(names: Sequence[str], hardware: str) -> None:
  """Raises UserError if `hardware` names TPUs, such as `v5litepod-16`, and a set of XLA flags is for other chips."""
  limited = [name for name in names if xla_flags.SETS[name].chips]
  if not limited or not hardware:
    return
  from vit_jax.plan import topologies
  nickname = re.split('[:-]', hardware.strip().lower())[0]
  chip = topologies.NICKNAMES.get(nickname, nickname)
  for name in limited:
    if chip in topologies.GRIDS and chip not in xla_flags.SETS[name].chips:
      raise UserError(f'--flags: expected sets of flags for {chip}, got {name}, which is for '
                      f'{" and ".join(xla_flags.SETS[name].chips)}. Leave it out.')


def load_config(command: Command) -> tuple[schema.Config | schema.Study | None, str]:
  """Returns the config with its overrides, and where the config is from; (None, '') if no flag names a config.

  The config is that of `--config`, or else that of the run in `--workdir`. The job `evaluate` with `--weights` but
  without `--config` uses the config `evaluate`.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  overrides = list(command.overrides)
  name = command.values['config']
  if not name and command.job == 'evaluate' and command.values['weights']:
    name = 'evaluate'
  if name:
    loaders = {'study': files.load_study, 'settings': files.load_study, 'plan': files.load_any}
    load = loaders.get(command.job, files.load)
    return load(name, overrides, models=find_model), f'--config={name}'
  workdir = command.values.get('workdir')
  if workdir is None:
    return None, ''
  path = workdir / 'config.json'
  if not path.is_file():
    raise UserError(f'--workdir: expected the directory of a run, got {workdir}, which has no config.json. Pass the '
                    '--workdir of a run, or --config=NAME as well.')
  with storage.local(path) as local:
    return files.load(str(local), overrides, models=find_model), str(path)


def find_model(name: str) -> schema.Model:
  """Returns the settings of the network with a name such as `B/16`, for `--config.model=NAME`."""
  from vit_jax.recipes import sizes  # only here: few command lines name a network
  return sizes.model(name)


def read_line(parse: Callable[[Sequence[str]], Command], words: Sequence[str]) -> tuple[str, list[schema.Config]]:
  """Returns the name of the job of another command line, and the configs of its run, or of all runs of a study.

  The list is empty for a job without the flag --config, such as `finetune`, which makes the config itself.
  """
  command = parse(words)
  config = load_config(command)[0] if 'config' in JOBS[command.job].flags else None
  if isinstance(config, schema.Study):
    return command.job, list(config.runs.values())
  return command.job, [config] if config else []


CONFIG = Flag('config', Kind('NAME', 'the name or path of a config', str),
              'name or path of a config, with arguments after a colon: digits, configs/digits.py', '')
RUN = Flag('workdir', DIRECTORY, 'directory of the run')
WEIGHTS = Flag('weights', TEXT, 'weight file, folder, run directory, gs://…, https://…, hf://OWNER/NAME, or a known '
               'name such as ViT-B_16-i21k', '')
READING = (
    Flag('preprocess', TEXT, 'preprocessing of images: half, imagenet, clip, zero_one, or resize=248,image=224', '',
         'detected from the weights'),
    Flag('model', TEXT, 'settings that tensors do not determine, such as heads=6,gelu=exact,norm_eps=1e-6', ''),
    Flag('view', Kind('NAME', 'student, ema, teacher, or the name of a network in a file', str,
                      choices=('student', 'ema', 'teacher')),
         'which weights of a run: student, ema or teacher; or which network of a file with several', '',
         'ema if the run has one; of a file, the network for inference'),
    Flag('allow_download', None, 'also download weights that only a file names: those that adapters of PEFT are for'),
    Flag('allow_nonfinite', None, 'also use weights with values that are not finite'))
IMAGES = Flag('data', TEXT, 'images: folder:PATH, tfds:NAME or array_record:DIR')
FLAGS = Flag('flags', choices(*xla_flags.SETS), 'sets of XLA flags: python -m vit_jax.parallel.xla_flags lists them',
             [], 'none')
FOLLOW_LINKS = Flag('follow_links', None, 'also read files outside of a folder to which symbolic links in it lead')
SLICES = Flag('slices', whole(1, 10_000), 'number of such slices', 0, 'mesh.slices of the config')
ALLOW_CODE = Flag('allow_code', None, 'also run modules of the current folder that files such as config.json name')
OVERWRITE = Flag('overwrite', None, 'replace what is at --to')
CLASSES = Flag('classes', FILE, 'file of class names, one line per output', '', 'those of the weights')

JOBS = {
    'train': Job('Pre-train or fine-tune; evaluates, saves checkpoints, and resumes.', 'jobs.train', (CONFIG,), (
        Flag('workdir', DIRECTORY, 'directory of the run, which is resumed if it exists', None, 'runs/CONFIG'),
        Flag('until', TEXT, "pause after this part of the run, such as '25 %': evaluate, save, and end", '',
             'the end of the run'), FLAGS)),
    'finetune': Job('Fine-tune weights on your images; everything else follows from both.', 'jobs.finetune', (
        WEIGHTS, IMAGES), (
        Flag('workdir', DIRECTORY, 'directory of the run, which is resumed if it exists', None,
             'runs/finetune_WEIGHTS_DATA'),
        Flag('lora', whole(1, 1024), 'rank of adapters (LoRA) to train in place of the weights; 8 without a number', 0,
             'all weights are trained', bare_value='8'),
        Flag('compare', choice('yes', 'no'), 'whether to compare the finished run with k-NN and logistic regression on '
             'frozen features, if there are at most 5,000 images', 'yes'), FLAGS), base='finetune:B/16,own'),
    'pretrain': Job('Continue the pre-training of weights on your images, without their labels.', 'jobs.pretrain', (
        WEIGHTS, IMAGES), (
        Flag('objective', choice('dino', 'lejepa', 'mae', 'ijepa'), 'what is learned', 'dino'),
        Flag('warm_heads', TEXT, 'how long the backbone is frozen while the new heads learn', '', '10 %'),
        Flag('workdir', DIRECTORY, 'directory of the run, which is resumed if it exists', None,
             'runs/pretrain_WEIGHTS_DATA'), FLAGS), base='pretrain:B/16'),
    'evaluate': Job('Evaluate a run, or any weights: top-1, top-5, NLL; writes evaluate.json.', 'jobs.evaluate', (), (
        RUN, WEIGHTS._replace(help=f'{WEIGHTS.help}; several with commas are compared on one page'), CONFIG, *READING,
        Flag('embedded', Kind('PATH', 'paths with commas', lambda text: [*map(storage.expand_home, text.split(','))],
                              is_path=True, is_utf8=True),
             'output of vit-jax embed, read instead of computing features; several with commas', []),
        Flag('to', DIRECTORY, 'directory for the results', None, 'the run directory'),
        Flag('by_class', None, 'also print precision, recall and F1 of each class'),
        Flag('csv', LOCAL_PATH, 'file for precision, recall and F1 of each class, FILE.csv'),
        Flag('overwrite', None, 'replace the file of --csv, and results of other weights or data'), FLAGS)),
    'predict': Job('Classify images; optionally save their attention overlays.', 'jobs.predict', (WEIGHTS,), (
        *READING, CLASSES, Flag('tokenizer', FILE, 'tokenizer file for --names', '', 'beside the weights'),
        Flag('names', NAMES, 'for CLIP, SigLIP and TIPS: classes in words, a file with one per line, or clip_imagenet',
             [], 'the classes of the head'),
        Flag('prompts', TEXT, 'template for --names, or clip_best, clip_paper', '', "'a photo of a {}.'"),
        Flag('top', whole(1), 'classes per image', 5),
        Flag('json', None, 'print JSON: a line about preprocessing and classes, then one line per image'),
        Flag('overlay', None, 'also save each image with its attention overlay, in --to'), FOLLOW_LINKS,
        Flag('to', LOCAL_PATH, 'table to write, FILE.csv or FILE.parquet; or the folder of the overlays', None,
             'predictions are printed; overlays'),
        Flag('overwrite', None, 'replace overlays that are in --to')), 'FILES and folders'),
    'embed': Job('Write features, probabilities or tokens of images as files; resumes.', 'jobs.embed', (
        WEIGHTS, Flag('to', LOCAL_PATH, 'folder to write, or FILE.npz, FILE.parquet')), (
        Flag('data', TEXT, 'images of a source, in place of files: folder:PATH, tfds:NAME, array_record:DIR; or '
             'texts:FILE, a text in each line', ''),
        Flag('split', TEXT, 'split of --data, or a part of it such as train[:10%]', '', 'train; all images of data '
             'without splits'),
        Flag('what', choice('features', 'probabilities', 'tokens', 'vectors', 'texts'), 'what to write of each image; '
             'vectors are compared with texts, which are the captions', '', 'features'),
        Flag('tokenizer', FILE, 'tokenizer file for vectors and texts', '', 'beside the weights'),
        Flag('blocks', BLOCKS, 'features after these blocks, from 1 or from the end as -1, one after the other', [],
             'of the head'),
        Flag('format', choice('parquet', 'npz'), 'of the files', '', 'the suffix of --to; of a folder parquet'),
        *READING, CLASSES, FOLLOW_LINKS), '[FILES and folders]', base='evaluate'),
    'inspect': Job('Analyze a network: filters, positions, attention, features; writes a page.', 'inspect.job', (
        Flag('to', LOCAL_PATH, 'folder to write'),), (
        WEIGHTS._replace(help=f'{WEIGHTS.help}; several with commas are compared'), RUN, *READING, CLASSES,
        FOLLOW_LINKS,
        Flag('discard', FRACTION, 'share of the smallest weights in each row of attention that rollout ignores', 0.),
        Flag('of_class', TEXT, 'class of the relevance maps, by index or name', '', 'the predicted class'),
        Flag('dense', None, 'draw the patch tokens of each image instead: principal components, and classes'),
        Flag('foreground', FRACTION, 'with --dense: also draw the foreground alone, where the first component of an '
             'image, scaled to [0, 1], exceeds this, such as 0.5', 0., 'not drawn'),
        Flag('block', whole(1, 10_000), 'with --dense: take tokens after this block', 0, 'the last one'),
        Flag('probe', FILE, 'with --dense: run of evaluate --config=dense_probe, whose classes are drawn', '', 'none'),
        Flag('masks', FILE, "with --dense: folder of masks with the images' names, to draw errors of --probe", '',
             'none'), OVERWRITE), '[FILES and folders]'),
    'convert': Job('Convert weights between formats, with a report of every tensor.', 'jobs.convert', (
        WEIGHTS, Flag('to', FILE, 'file or folder to write')), (
        Flag('family', choice('vision_transformer', 'big_vision', 'timm', 'huggingface', 'bit', 'run', 'peft'),
             'format to write', '', 'by the suffix of --to'),
        *READING, CLASSES, OVERWRITE), is_on_cpu=True),
    'push': Job('Publish weights on the Hugging Face hub, with a model card.', 'jobs.push', (
        WEIGHTS, Flag('to', TEXT, 'hf://OWNER/NAME, which is created if it does not exist')), (
        Flag('family', choice('huggingface', 'timm', 'run'), 'format: for transformers, timm, or this package',
             'huggingface'),
        Flag('license', TEXT, 'license of what is published', '', 'that of the weights from which it was made'),
        Flag('private', None, 'a new repository is private'),
        Flag('message', TEXT, 'message of the commit', 'Weights written by vit_jax'), *READING, CLASSES),
                is_on_cpu=True),
    'export': Job('Export a network as StableHLO or ONNX, to run without this package.', 'export.job', (
        WEIGHTS, Flag('to', LOCAL_PATH, 'file to write: NAME.stablehlo or NAME.onnx')), (
        *READING, Flag('from_pixels', None, 'the input is uint8, and normalized inside'),
        Flag('any_size', None, 'the input has any height and width that are multiples of the patch side'),
        Flag('texts', None, 'export the text tower and its tokenizer too, and vectors of unit length'),
        Flag('tokenizer', FILE, 'file of the tokenizer of --texts', '', 'the one beside the weights'),
        Flag('quantize', choice('int8'), 'products of the ONNX file, with ranges measured on --data', '', 'float32'),
        Flag('data', TEXT, 'images for --quantize: folder:PATH, tfds:NAME, array_record:DIR', ''),
        Flag('split', TEXT, 'split of --data', '', 'train'),
        Flag('images', whole(1, 10_000), 'number of images of --data to measure', None, '64'),
        Flag('min_sqnr', NUMBER, 'products whose signal-to-noise ratio in int8 is below this, in dB, stay in float32',
             None, '20')),
        is_on_cpu=True),  # so that the file does not depend on this machine
    'average': Job('Average several checkpoints of a run into a new run directory, to evaluate it.', 'jobs.average', (
        RUN, Flag('to', DIRECTORY, 'directory of the averaged run')), (
        Flag('last', whole(2), 'number of the newest checkpoints to average; set this or --steps'),
        Flag('steps', wholes(0), 'steps of the checkpoints to average'), CONFIG)),
    'prepare': Job('Write images as ArrayRecord shards; or label maps by a network.', 'jobs.prepare', (
        Flag('to', DIRECTORY, 'directory to write'),), (
        Flag('data', TEXT, 'images to write: folder:PATH, tfds:NAME, wds:PATH or another source; or cifar10, cifar100, '
             'mnist', ''),
        Flag('channels', whole(1, 1024), 'channels of the images; of others than 3 mean and deviation are measured', 3),
        Flag('archive', FILE, "file of CIFAR, or folder of MNIST's files", '', 'downloaded from the authors'),
        Flag('short_px', whole(1, 65_535), 'resize images to this short side', 0, 'files stay unchanged'),
        Flag('shards', whole(1, 100_000), 'number of files per split', 0, 'one per 256 MiB, or 8,192 images'),
        Flag('processes', whole(1, 1024), 'processes that write shards', 0, 'one per 8 cores'),
        Flag('share', TASK, 'write only the shards of this host of several, counted from 0', (0, 1), 'all shards'),
        Flag('runner', RUNNER, f'runner of Apache Beam that writes shards: {", ".join(RUNNER.choices)}', '',
             'processes of this machine'),
        Flag('runner_options', TEXT, "its options, such as '--project=P --region=R'", ''),
        Flag('quality', whole(1, 100), 'JPEG quality of resized images', None, '90'),
        Flag('seed', whole(0, 2**32 - 1), 'seed of the order of the examples', None,
             '0; of cifar10, cifar100 and mnist the order of their files'),
        Flag('splits', NAMES, 'splits to write', [], 'train,test'), FOLLOW_LINKS,
        Flag('data_dir', FILE, 'folder of TFDS datasets', '', '$TFDS_DATA_DIR, or ~/tensorflow_datasets'),
        *(Flag(name, kind, f'as data.{name} of a config', default) for name, kind, default in (
            ('label_column', TEXT, ''), ('image_column', TEXT, ''), ('label_offset', whole(-2**31), 0),
            ('classes', FILE, ''), ('num_classes', whole(0), 0), ('caption_column', TEXT, ''))),
        Flag('tokens', choice('bytes', 'siglip', 'clip', 'tips'), 'store captions too, and the ids of their tokens', '',
             'without captions'),
        Flag('tokenizer', FILE, 'file of the tokenizer of --tokens, but for bytes', ''),
        Flag('text_rule', choice('auto', 'canonical', 'lower', 'none'), 'how captions are simplified', 'auto'),
        CONFIG._replace(help='for label maps: config of the run that will use them'),
        WEIGHTS._replace(help=f'for label maps: the teacher; {WEIGHTS.help}'), *READING)),
    'report': Job('Write report.html of a run, or one page that compares several.', 'study.table', (
        Flag('workdir', DIRECTORIES, 'directory of the run; several with commas'),), (
        Flag('to', FILE, 'page to write', '', 'report.html in the run directory'), OVERWRITE)),
    'serve': Job('Serve a live page: the report of a run, classes of your images, mistakes.', 'jobs.serve', (), (
        WEIGHTS, RUN, *READING, CLASSES,
        Flag('host', TEXT, 'address to listen on; 0.0.0.0 = all networks, without a password', '127.0.0.1'),
        Flag('port', whole(0, 65_535), 'port to listen on; 0 = any free one', 8471)), '[FOLDER of images]'),
    'plan': Job('Compile the train step for other hardware: memory, speed and cost.', 'plan.job', (
        Flag('topology', TEXT, 'hardware: v3:16x16, v3-512, v5e:16x16, v4:4x4x8, h200:8, cpu:8'),), (
        CONFIG, RUN._replace(help='directory of a run to plan, in place of --config'), SLICES,
        Flag('to', DIRECTORY, 'directory for plan.md and plan.json; of a study, what it has is not compiled again'),
        Flag('quick', None, 'compile unrolled networks with 2 and 4 blocks, and extend the figures to all blocks'),
        Flag('search', None, 'also search for settings that fit, and the fastest of them'),
        Flag('price', NUMBER, 'price of one chip or GPU for an hour, in any currency', 0., 'unknown'), FLAGS),
                is_on_cpu=True),
    'study': Job('Run several configs, in order or in parallel, and write one table; resumes.', 'study.job', (
        CONFIG,), (
        Flag('workdir', LOCAL_PATH, 'directory of the study, which is resumed if it exists', None, 'runs/STUDY'),
        Flag('processes', whole(1, 1024), 'runs at the same time', 1),
        Flag('dry_run', None, 'list the runs with their cost, and run nothing'),
        Flag('topology', TEXT, 'with --dry_run: hardware for which to estimate hours, such as v3:4x4', '',
             'this machine'),
        Flag('search', SEARCH, 'method for the ranges of the config: sobol:16 or halving:16,factor=4,rungs=3', None,
             'as the config has it'),
        Flag('share', TASK, 'take only the runs of this task of several, counted from 0', (0, 1), 'all runs'),
        FLAGS), is_on_cpu=True),  # devices are for the runs, which are processes of their own
    'check': Job('Find problems of a run before hardware is requested for it; compiles nothing.', 'check', (), (
        CONFIG, Flag('line', TEXT, "command to check in place of --config: 'python -m vit_jax.main --config=…'", ''),
        Flag('topology', TEXT, 'also check mesh, batch and memory for this hardware, such as v3-512', ''),
        SLICES, RUN, Flag('data', TEXT, 'address of data that a launcher puts on the hosts, for the word {data}', ''),
        Flag('elsewhere', None, 'the run is on other hosts, with a copy of this checkout'),
        Flag('manifest', FILE, 'JobSet to check in place of --config', '')), is_quick=True, is_on_cpu=True),
    'record': Job('Write the record of a run or an evaluation, with which it can be replayed.', 'replay.recording', (
        Flag('claim', TEXT, 'the result as a sentence; {test/top1:.1%} stands for the value of that metric'),
        Flag('to', LOCAL_PATH, 'file to write, NAME.json')), (
        Flag('data', PATHS, 'paths of data and weights by the names that replace them in the record', {}, 'none'),
        Flag('command', TEXT, 'lines that make the result, joined by &&, with {work} for a fresh directory', '',
             'the one that made it'),
        Flag('values', GLOB, 'only values of such names, several patterns with commas, and those that the claim names',
             '*', 'all'),
        Flag('tolerance', NUMBER, 'how far values may differ on a machine with the same bits; 0 = not one bit', 0.),
        Flag('elsewhere', NUMBER, 'how far values may differ on any other machine', 0.),
        Flag('reason', TEXT, 'why values may differ', ''), OVERWRITE),
        'RUN, a directory or an evaluate.json', is_on_cpu=True),
    'replay': Job('Run the command of a record again, and compare every number and every bit.', 'replay.job', (), (
        Flag('data', PATHS, 'paths of the data and the weights of the record, by name', {}, '$VIT_JAX_DATA/NAME'),
        Flag('to', LOCAL_PATH, 'directory to keep the run in', None, 'a temporary one, kept if it differs'),
        Flag('mark', None, 'write the date of an equal replay into the record'),
        Flag('segment', whole(0), 'in place of a record: train the run in --workdir from the checkpoint of this step '
             'to the next one'),
        Flag('workdir', LOCAL_PATH, 'directory of the run of --segment')), '[RECORD, an id or a JSON file]'),
    'list': Job('List configs, networks, published weights and records by name.', 'jobs.listing', (), (
        Flag('configs', GLOB, 'the configs (the default)', '', bare_value='*'),
        Flag('models', GLOB, 'the networks, for --config.model=NAME', '', bare_value='*'),
        Flag('weights', GLOB, 'the published weights, for --weights=NAME', '', bare_value='*'),
        Flag('records', GLOB, 'the published numbers that can be replayed, for vit-jax replay ID', '', bare_value='*'),
        Flag('max_params', NUM_PARAMS, 'only networks and weights with at most so many parameters', None, 'any number'),
        Flag('family', GLOB, 'only networks and weights of this family, such as deit*', '', 'all'),
        Flag('data', GLOB, 'only weights trained on this, such as imagenet-21k*', '', 'all'),
        Flag('license', GLOB, 'only weights under this license, such as apache*', '', 'all'),
        Flag('px', whole(1, 100_000), 'only weights for images of this side', 0, 'any'),
        Flag('format', choice('text', 'markdown', 'json'), 'of the output', 'text')), is_quick=True),
    'settings': Job('Show every setting of a config, its type, range and default, and where it was set.',
                    'jobs.settings', (), (
        CONFIG, Flag('json', None, 'print one JSON object'), Flag('changed', None, 'only settings that the '
             'config or the command line sets')), '[CONFIG] [PARTS such as optimizer or lr]', is_quick=True),
    'completion': Job('Print a completion script: eval "$(vit-jax completion bash)".', 'completion', (), (),
                      'bash or zsh', is_quick=True),
}
JOBS |= {name: job._replace(optional=(*job.optional, ALLOW_CODE)) for name, job in JOBS.items()
         if name not in ('report', 'list', 'completion')}
