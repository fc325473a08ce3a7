"""Mutated files that the program itself writes, and reads again: of runs, studies, prepared and embedded data, indexes.

`python -m tests.fuzz_written KIND FIRST LAST` reads the cases with these numbers, and prints what became of each
(`fuzzing.py`). A case is the files of the kind, one of them mutated. Jobs that take milliseconds are run as a person
runs them; of others, the functions that read the files.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests import fuzzing
from tests.fuzzing import Result, Rng
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.data.source import first_label, read_one

ROOT = pathlib.Path(__file__).parents[1]
TINY = ('--config=digits', '--config.model.depth=1', '--config.model.width=8', '--config.model.heads=2',
        '--config.model.mlp.hidden=8', '--config.batch_size=40', '--config.length=4 steps', '--config.train.ema=.9',
        '--config.evals.test.every=2 steps', '--config.train.log_every=1 step', '--config.checkpoints.every=2 steps')
LONG_AGO_S = 1e9
Files = dict[str, bytes]


class Kind(NamedTuple):
  """Writes whole files into a folder; which of them are mutated; what reads them.

  is_exact: what is read is the same as without a mutation, or refused.
  """
  make: Callable[[pathlib.Path], object]
  mutated: Callable[[str], bool]
  read: Callable[[pathlib.Path], Any]
  is_exact: bool = False


def job(*words: str) -> str:
  """Runs a job in this process; its output. Raises UserError with its message for the statuses 2 and 75."""
  from vit_jax import main
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    status = main.run(list(words))
  text = out.getvalue()
  if status in (2, 75):
    raise UserError(text[text.index('error: '):])
  assert status == 0 and 'Traceback' not in text, f'status {status}: {text}'
  return text


# Runs.

def make_run(folder: pathlib.Path) -> None:
  from vit_jax.jobs import report
  report.write_report = lambda workdir, *_, **__: f'{workdir}/report.html'  # it is written by the cases
  job('train', f'--workdir={folder}', *TINY)
  (folder / 'trackers.json').write_text('{"wandb": "0123abcd"}')
  (folder / 'output.txt').write_text('status 2\nerror: x\n')
  (folder / '.failed').write_text('2 of host a\n')


def read_report(folder: pathlib.Path) -> str:
  from vit_jax.jobs import report
  report.write_report = report_pages()
  return job('report', f'--workdir={folder}')


@functools.cache
def report_pages() -> Any:
  import importlib.util
  spec = importlib.util.find_spec('vit_jax.jobs.report')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.write_report


def read_records(folder: pathlib.Path) -> Any:
  """What the other jobs read of a run directory."""
  from vit_jax.jobs import resume, trackers
  from vit_jax.record import checkpoint_files, clock, reader
  from vit_jax.replay import outcomes
  from vit_jax.study.runs import Task
  from vit_jax.weights import card
  trackers._read_ids(folder)
  card.measured(str(folder), 4)
  card._made(str(folder), 4)
  card.license_of(folder)
  reader.last_time_s(str(folder / 'metrics.jsonl'))
  clock.find_lost(reader.read_end(folder, since=2), resumed_from=2)
  resume.find_machine(folder)
  resume.find_finished(folder, '', 4, 'x')
  checkpoint_files.choose(folder, 'test/top1')
  task = Task('a', config(), folder)
  found = [task.failure, task.has_diverged, task.is_over, task.result().metrics, task._best()]
  return repr((found, outcomes.read(folder).values))


@functools.cache
def config() -> Any:
  from vit_jax.config import files
  return dataclasses.replace(files.load('digits', []), evals={})


def read_weights(folder: pathlib.Path) -> Any:
  from vit_jax.core import trees
  from vit_jax.weights import loading
  return {path: list(x.shape) for path, x in trees.flatten(loading.load(str(folder)).params).items()}


# Records.

def make_records(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  for name in ('digits', 'finetune_cifar10_96px', 'digits_seeds', 'lit_cifar10_softmax'):
    shutil.copy(ROOT / 'benchmarks' / 'records' / f'{name}.json', folder)


def read_record_files(folder: pathlib.Path) -> Any:
  """What `vit-jax replay` shows before it runs anything, and what pages and lists show."""
  from benchmarks import record_ledger
  from vit_jax.replay import planned, records
  from vit_jax.replay.job import with_workdirs
  found = [records.read_file(path) for path in sorted(folder.iterdir())]
  texts = [repr(list(record_ledger.cells(record_ledger.in_order(found))))]
  for record in found:
    texts += [planned.header(record), records.to_plain(record)['claim']]
    planned.check(record, is_shipped=False, allow_code=False)
    texts += [planned.plan(record, with_workdirs(record))]
  return ''.join(texts).encode(errors='surrogateescape').decode(errors='replace')[:200]


# Features: those that `embed` writes, and those that evaluations keep.

NUM, WIDTH, IDENTITY = 11, 3, {'data': 'a', 'network': 'b'}


def values(rows: range) -> np.ndarray:
  return np.arange(len(rows) * WIDTH, dtype=np.float32).reshape(-1, WIDTH) / 7 + rows.start


def embed(name: str, form: str, folder: pathlib.Path) -> None:
  from vit_jax.evaluate import embedding, store
  from vit_jax.evaluate.store import Block

  def compute(rows: range) -> Block:
    block = Block.empty(rows, (WIDTH,))
    return dataclasses.replace(block, name=[f'{i}.png' for i in rows], values=values(rows),
                               label=np.array(rows, np.int32) % 3)
  info = {'format': store.FORMAT, 'what': 'features', 'shape': [WIDTH], 'dtype': 'float32', 'blocks': [],
          'num_examples': NUM, 'per_shard': 4, 'identity': IDENTITY, 'features_digest': 'weights'}
  folder.mkdir(parents=True, exist_ok=True)
  target = folder / name
  assert embedding.write(embedding.Work(target, info, store.choose(target, form)), compute) is not None


def table(store: Any) -> Any:
  from vit_jax.evaluate.features import Layout
  found = store.find(IDENTITY, 'weights', Layout(NUM, 4, 1, (0,)))
  return None if found is None else [np.asarray(x).tolist() for x in found[0]]


def read_embedded(folder: pathlib.Path) -> Any:
  from vit_jax.evaluate.features import Store
  return table(Store(None, [next(folder.iterdir())]))


def make_store(folder: pathlib.Path) -> None:
  from vit_jax.evaluate.features import Layout, Rows, Store
  layout = Layout(NUM, 4, 1, (0,))
  batches = []
  for start in range(0, NUM, 4):
    rows = range(start, start + 4)
    batches.append(Rows(values(rows)[None], np.array([rows], np.int32) % 3, np.array([rows], np.int32),
                        np.array([[row < NUM for row in rows]], np.float32)))
  Store(folder).make(IDENTITY, 'weights', layout, batches)


def read_store(folder: pathlib.Path) -> Any:
  from vit_jax.evaluate.features import Store
  return table(Store(folder))


# Kept indexes.

def make_indexed(kind: str, folder: pathlib.Path) -> None:
  from tests.data import packed
  found = packed.examples(14)
  match kind:
    case 'wds':
      packed.write_tars(folder / 'set', 'train', found)
    case 'tfrecord':
      packed.write_tfrecords(folder / 'set', 'train', found)
    case 'parquet':
      from tests.data import parquets
      parquets.write(folder / 'set', 'train', found)
    case 'folder':
      for one in found:
        path = folder / 'set' / packed.NAMES[one.label] / f'{one.key}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one.image)


def read_indexed(kind: str, folder: pathlib.Path) -> Any:
  """Opens files whose index was kept and then mutated: both are in a folder that stays, as an index names its files."""
  from vit_jax.config import schema
  from vit_jax.data import opening
  from vit_jax.data.formats import listing
  listing.MIN_KEPT_FILES = 1
  place = pathlib.Path('indexed').absolute() / kind
  if not place.exists():
    shutil.copytree(folder, place)
    for path in [*place.rglob('*'), place / 'set']:
      os.utime(path, (LONG_AGO_S, LONG_AGO_S))
  os.environ['XDG_CACHE_HOME'] = str(place / 'cache')

  def content() -> list[Any]:
    source = opening.open_split(schema.Data(source=f'{kind}:{place / "set"}', holdout=.2), 'train', image_px=(8, 8))
    return [source.digest, *((first_label(source, i), len(read_one(source, i).image)) for i in range(len(source)))]
  whole = content()
  mutation = folder / 'mutation'
  if mutation.exists():
    kept = [path for path in sorted(place.rglob('*')) if path.suffix in ('.arrays', '.order')
            or path.is_file() and path.parent.name == '.vit_jax_index']
    number, seed = map(int, mutation.read_text().split())
    path = kept[number % len(kept)]
    changed = fuzzing.mutate(np.random.default_rng(seed), path.read_bytes(), fuzzing.OF_BYTES)[1]
    path.write_bytes(changed)
    assert content() == whole
    if path.read_bytes() == changed:  # of a listing that was replaced
      path.unlink()
  return whole


# Studies and plans.

def make_study(folder: pathlib.Path) -> None:
  from vit_jax.study import halving
  search = search_of()
  halving.check_same(folder, search)
  (folder / halving.FOLDER).mkdir()
  (folder / 'table.csv').write_text('run,headline\na,0.5\nb,\n')
  path = folder / halving.FOLDER / f'{search.method.points}_points_{halving.rungs(search.method)[0].label}.json'
  path.with_name(path.name.replace(' ', '')).write_text(json.dumps({'kept': ['a', 'b'], 'metric': '', 'results': {}}))


def search_of() -> Any:
  from vit_jax.config import schema
  return schema.Search(ranges={'optimizer.lr': schema.LogUniform(1e-4, 1e-2)}, method=schema.Halving(4, 2))


def read_study(folder: pathlib.Path) -> Any:
  from vit_jax.study import halving
  from vit_jax.study import table as tables
  halving.check_same(folder, search_of())
  return [halving.continuing(folder, search_of(), 0, []), tables.show(folder)]


def make_plan(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True)
  plan = {'peak_gib_per_device': 1.5, 'estimated_step_ms': 2.5, 'collectives_ms': 0.5, 'step_ms_with_collectives': 3.,
          'num_cores': 8, 'warnings': ['a warning'], 'name': 'x'}
  (folder / 'plan.json').write_text(json.dumps(plan))


def read_plan(folder: pathlib.Path) -> Any:
  from vit_jax.jobs import build
  from vit_jax.plan import study
  program = study.Program(config(), build.Numbers(100, 10, True), {'a': 5})
  row = study.Row(program, study.read(folder / 'plan.json'), '')
  return [study._cells(row), study._total([row]), study._problems([row])]


# What is left of jobs that were interrupted.

def make_unfinished(folder: pathlib.Path) -> None:
  from vit_jax.evaluate import embedding

  def stop(*_: object) -> None:
    raise KeyboardInterrupt
  finish, embedding._finish = embedding._finish, stop
  with contextlib.suppress(KeyboardInterrupt):
    embed('features', 'parquet', folder)
  embedding._finish = finish


def read_unfinished(folder: pathlib.Path) -> Any:
  try:
    embed('features', 'parquet', folder)
  except TemporaryError:  # the same command writes the shard again
    embed('features', 'parquet', folder)
  return read_embedded(folder)


# Sidecars of weights, probes, and small files.

def make_sidecars(folder: pathlib.Path) -> None:
  from vit_jax.weights import files
  preprocess = {'mean': [.5, .5, .5], 'std': [.5, .5, .5], 'resize_px': 18, 'image_px': [16, 16], 'antialias': True,
                'interpolation': 'bicubic', 'geometry': 'torchvision'}
  ours = {'heads': 2, 'decoder_heads': 0, 'gelu': 'exact', 'norm_eps': 1e-6, 'image_px': [16, 16], 'pool': '',
          'position_resize': 'aligned', 'network': {'positions.base': 100.}, 'preprocess': preprocess,
          'class_names': ['a', 'b']}
  timm = {'architecture': 'vit_tiny_patch16_224', 'num_classes': 2, 'label_names': ['a', 'b'],
          'label_descriptions': {'a': 'A'}, 'model_args': {'num_heads': 3, 'act_layer': 'gelu'},
          'pretrained_cfg': {'mean': [.5] * 3, 'std': [.5] * 3, 'crop_pct': .9, 'input_size': [3, 224, 224],
                             'interpolation': 'bicubic', 'license': 'apache-2.0', 'tag': 'in1k'}}
  hf = {'model_type': 'vit', 'image_size': 224, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-12,
        'num_attention_heads': 12, 'id2label': {'0': 'a', '1': 'b'}}
  processor = {'do_resize': True, 'size': {'height': 224, 'width': 224}, 'image_mean': [.5] * 3, 'image_std': [.5] * 3,
               'resample': 2, 'do_normalize': True, 'rescale_factor': 1 / 255}
  clip = {'model_cfg': {'vision_cfg': {'image_size': 224, 'width': 768, 'layers': 12}, 'text_cfg': {'heads': 8}},
          'preprocess_cfg': {'mean': [.5] * 3, 'std': [.5] * 3, 'interpolation': 'bicubic'}}
  readme = '---\nlicense: other\nlicense_name: "x"\nconfigs:\n- config_name: a\n  data_files: train/*.parquet\n---\nx\n'
  for name, content in {'ours/w.safetensors.json': ours, 'timm/config.json': timm, 'hf/config.json': hf,
                        'hf/preprocessor_config.json': processor, 'clip/open_clip_config.json': clip}.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    (folder / name).with_name('README.md').write_text(readme)
    files.write_safetensors((folder / name).parent / 'w.safetensors', {'a': np.zeros(3, np.float32)})


def read_sidecars(folder: pathlib.Path) -> Any:
  from vit_jax.data.formats import hf
  from vit_jax.weights import card, sidecars, text
  found = []
  for one in sorted(folder.iterdir()):
    hf._configs((one / 'README.md').read_text(errors='replace'))
    found += [sidecars.read(one / 'w.safetensors'), card.license_of(one), text._config(one / 'w.safetensors')]
  return repr(found)


def make_small(folder: pathlib.Path) -> None:
  from vit_jax.evaluate.segmentation import Probe
  folder.mkdir(parents=True)
  array = np.zeros
  probe = Probe(kernel=array((4, 2), np.float32), bias=array(2, np.float32), mean=array(4, np.float32),
                std=np.ones(4, np.float32), class_names=np.array(['a', 'b']), blocks=array(0, np.int64),
                norm=np.array(True), values=np.array([0, 255]))
  np.savez(folder / 'probe.npz', **probe._asdict())
  (folder / 'owner.json').write_text(json.dumps({'host': 'a', 'pid': 3, 'token': 'b'}))
  (folder / 'frozen_features.json').write_text(json.dumps({
      'of': ['w', 'a', 'b'], 'compared': {'knn': .5, 'logistic': .5, 'num_images': 3, 'seconds': 1.}}))


def read_small(folder: pathlib.Path) -> Any:
  from types import SimpleNamespace as Some

  from vit_jax.inspect import dense
  from vit_jax.jobs import frozen_features
  from vit_jax.record import run_directory
  network, data = Some(source='w'), Some(train=Some(digest='a'), eval=Some(digest='b'))
  frozen_features._read_comparison(folder, network, data)
  holder = run_directory._read_owner(folder / 'owner.json')
  found = dense.read_probe(str(folder / 'probe.npz'))
  return [str(holder.get('pid')), found.kernel.shape, [str(name) for name in found.class_names.tolist()]]


def any_file(name: str) -> bool:
  del name
  return True


def is_json(name: str) -> bool:
  return name.endswith(('.json', 'metadata', '_METADATA', '_sharding', 'process_0', '_CHECKPOINT_METADATA')) and (
      '/d/' not in name)


RECORDS = ('config.json', 'final.json', 'evaluate.json', 'metrics.jsonl', 'predictions.npz', 'init.json',
           'trackers.json', 'output.txt', '.failed', 'meta/metadata')
KINDS: dict[str, Kind] = {
    'report': Kind(make_run, lambda name: name.endswith(RECORDS), read_report),
    'run': Kind(make_run, lambda name: name.endswith(RECORDS), read_records),
    'checkpoint': Kind(make_run, lambda name: is_json(name) and name.startswith(('checkpoints', 'config')),
                       read_weights),
    'record': Kind(make_records, any_file, read_record_files),
    **{f'embedded_{form or name}': Kind(functools.partial(embed, name, form), any_file, read_embedded, is_exact=True)
       for name, form in (('a.npz', ''), ('a.parquet', ''), ('a', 'parquet'))},
    'store': Kind(make_store, any_file, read_store, is_exact=True),
    **{f'kept_{kind}': Kind(functools.partial(make_indexed, kind), lambda name: name == 'mutation',
                            functools.partial(read_indexed, kind), is_exact=True)
       for kind in ('wds', 'tfrecord', 'parquet', 'folder')},
    'study': Kind(make_study, any_file, read_study), 'plan': Kind(make_plan, any_file, read_plan),
    'unfinished': Kind(make_unfinished, lambda name: not name.endswith('.parquet'), read_unfinished, is_exact=True),
    'sidecars': Kind(make_sidecars, lambda name: name.endswith(('.json', '.md')), read_sidecars),
    'small': Kind(make_small, any_file, read_small)}


@functools.cache
def whole(kind: str) -> tuple[Files, Any]:
  """The files of a kind, and what is read of them."""
  folder = pathlib.Path('whole') / kind
  folder.parent.mkdir(exist_ok=True)
  KINDS[kind].make(folder.absolute())
  found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}
  if kind.startswith('kept'):
    found['mutation'] = b''
  expected = KINDS[kind].read(place(kind, {name: x for name, x in found.items() if name != 'mutation'}))
  assert expected is not None
  return found, expected


def place(kind: str, files: Files) -> pathlib.Path:
  """Writes the files of a case, always in the same place."""
  folder = pathlib.Path('case').absolute() / kind
  shutil.rmtree(folder, ignore_errors=True)
  for name, content in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
  return folder


def mutated(rng: Rng, name: str, content: bytes, number: int) -> tuple[str, bytes]:
  if name == 'mutation':
    return 'index', f'{rng.integers(9)} {number}'.encode()
  is_text = not any(byte < 9 for byte in content)
  if is_text and content.lstrip()[:1] in (b'{', b'[') and rng.random() < .7:
    lines = content.split(b'\n') if name.endswith('jsonl') else [content]
    at = int(rng.integers(len(lines)))
    with contextlib.suppress(ValueError):
      lines[at] = json.dumps(fuzzing.mutate_json(rng, json.loads(lines[at]))).encode(errors='replace')
      return 'json', b'\n'.join(lines)
  return fuzzing.mutate(rng, content, fuzzing.OF_TEXT if is_text else fuzzing.OF_BYTES)


def case(kind: str, number: int) -> Result:
  content, expected = whole(kind)
  rng = np.random.default_rng([number, *kind.encode()])
  names = sorted(filter(KINDS[kind].mutated, content))
  name = names[number % len(names)]
  mutation, changed = mutated(rng, name, content[name], number)
  folder = place(kind, content | {name: changed})

  def read() -> Any:
    found = KINDS[kind].read(folder)
    assert not KINDS[kind].is_exact or found is None or found == expected, 'other content was read'
    return found is not None
  return {'file': name, 'mutation': mutation,
          **fuzzing.outcome(read, refusals=(UserError, TemporaryError, Damaged))}


if __name__ == '__main__':
  fuzzing.main(functools.partial(case, sys.argv[1]), sys.argv[2:])
