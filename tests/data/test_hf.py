"""Datasets of the Hugging Face hub: which files are a split, at which commit, from the cache, and what is refused."""
from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import hubs
import pytest

from tests.data import packed, parquets
from tests.data.packed import NAMES, Example
from tests.data.parquets import pa, pq
from vit_jax.config import schema
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import opening
from vit_jax.data.formats import hf
from vit_jax.data.source import Source, first_label, read_one

FOUND, HELD = packed.examples(9), packed.examples(4, first=20)


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.delenv('HF_TOKEN', raising=False)
  with hubs.running(tmp_path / 'home') as found:
    yield found


def content(found: list[Example], table: Any = None) -> bytes:
  made = pa.BufferOutputStream()
  pq.write_table(parquets.table(found) if table is None else table, made, row_group_size=4)
  return made.getvalue().to_pybytes()


def pets(**others: bytes) -> hubs.Repo:
  """A dataset as `push_to_hub` of the package `datasets` stores it."""
  return hubs.Repo({'data/train-00000-of-00002.parquet': content(FOUND[:5]),
                    'data/train-00001-of-00002.parquet': content(FOUND[5:]),
                    'data/validation-00000-of-00001.parquet': content(HELD), **others})


def opened(where: str, split: str = 'train', **settings: Any) -> Source:
  return opening.open_split(schema.Data(source=f'hf:{where}', **settings), split, image_px=(8, 8))


def images(source: Source) -> list[bytes]:
  return [bytes(read_one(source, i).image) for i in range(len(source))]


def downloads(hub: hubs.Hub) -> list[str]:
  """The files that were downloaded since the last call."""
  found = [path.rpartition('/')[2] for method, path, _ in hub.asked if method == 'GET' and path.endswith('.parquet')]
  hub.asked.clear()
  return found


def test_a_split_is_downloaded_once_and_only_when_it_is_opened(hub: hubs.Hub) -> None:
  hub.repos['datasets/me/pets'] = pets()
  source = opened('me/pets')
  assert images(source) == [e.image for e in FOUND] and source.class_names == NAMES
  assert [first_label(source, i) for i in range(9)] == [e.label for e in FOUND] and source.name == 'hf:me/pets/train'
  assert sorted(downloads(hub)) == ['train-00000-of-00002.parquet', 'train-00001-of-00002.parquet']
  assert images(opened('me/pets', 'test')) == [e.image for e in HELD]  # it has no split of this name
  assert downloads(hub) == ['validation-00000-of-00001.parquet']  # which names the classes, too
  assert opened('me/pets').digest == source.digest and not downloads(hub)


def test_training_files_define_classes_without_names(hub: hubs.Hub) -> None:
  def named(found: list[Example]) -> bytes:
    return content(found, pa.table({'image': parquets.images(found), 'label': [NAMES[e.label] for e in found]}))
  hub.repos['datasets/me/pets'] = hubs.Repo({'train.parquet': named(FOUND), 'test.parquet': named(HELD[:1])})
  assert opened('me/pets', 'test').class_names == NAMES
  assert sorted(downloads(hub)) == ['test.parquet', 'train.parquet']


def test_subsets_are_folders_or_listed_in_the_readme(hub: hubs.Hub) -> None:
  one, other = content(FOUND), content(HELD)
  hub.repos['datasets/me/pets'] = hubs.Repo({'small/train-00000-of-00001.parquet': one,
                                             'large/train-00000-of-00001.parquet': other})
  assert (len(opened('me/pets/small')), len(opened('me/pets/large'))) == (9, 4)
  assert len(opened('me/pets@main/large')) == 4
  for where, got in (('me/pets', "''"), ('me/pets/huge', "'huge'")):
    with pytest.raises(UserError, match=f'hf:{where}: expected one of the subsets large, small, got {got}. Write '
                       'hf:me/pets/SUBSET'):
      opened(where)
  readme = ('---\nlicense: mit\nconfigs:\n- config_name: tiny\n  data_files:\n  - split: train\n    path: a/*.parquet\n'
            '  - split: unseen\n    path:\n    - b/0.parquet\n- config_name: all\n  default: true\n'
            '  data_files: "*/*.parquet"\n---\n# Pets\n')
  hub.repos['datasets/me/listed'] = hubs.Repo({'README.md': readme.encode(), 'a/0.parquet': one, 'b/0.parquet': other})
  assert (len(opened('me/listed/tiny')), len(opened('me/listed/tiny', 'unseen'))) == (9, 4)
  whole, held = opened('me/listed', holdout=.25), opened('me/listed', 'test', holdout=.25)
  assert len(whole) + len(held) == 13  # no split is named
  for damaged in (b'---\n{[\n---\n', b'---\nconfigs: 3\n---\n', b'---\nconfigs: [3, {data_files: [4]}]\n---\n',
                  b'text'):
    hub.repos['datasets/me/bad'] = pets(**{'README.md': damaged})
    hub.repos['datasets/me/bad'].commit = f'{hash(damaged) % 2**160:040x}'
    assert len(opened('me/bad')) == 9


def test_files_without_a_split_are_left_out_beside_others(hub: hubs.Hub, caplog: pytest.LogCaptureFixture) -> None:
  hub.repos['datasets/me/pets'] = pets(**{'data/extra.parquet': content(HELD)})
  assert [len(opened('me/pets', split)) for split in ('train', 'test')] == [9, 4]
  assert 'hf:me/pets: files are of the splits train, validation; not read: data/extra.parquet.' in caplog.text


def test_the_default_subset_has_its_name_too(hub: hubs.Hub) -> None:
  readme = '---\nconfigs:\n- config_name: all\n  default: true\n  data_files: "data/train-*"\n---\n'
  hub.repos['datasets/me/pets'] = pets(**{'README.md': readme.encode()})
  assert len(opened('me/pets')) == len(opened('me/pets/all')) == 9


def test_the_files_that_the_hub_has_made_are_read_where_a_dataset_has_others(hub: hubs.Hub) -> None:
  made = hubs.Repo({'default/train/0000.parquet': content(FOUND[:4]), 'default/train/0001.parquet': content(FOUND[4:]),
                    'default/test/0000.parquet': content(HELD)}, commit='f' * 40)
  hub.repos['datasets/me/zipped'] = hubs.Repo({'images.zip': b'PK'}, others={hf.CONVERTED: made})
  assert images(opened('me/zipped')) == [e.image for e in FOUND] and len(opened('me/zipped', 'test')) == 4
  hub.repos['datasets/me/none'] = hubs.Repo({'images.zip': b'PK', 'pets.py': b'', 'README.md': b'---\n---\n'})
  with pytest.raises(UserError, match=r'hf:me/none: expected a dataset with Parquet files, or with the branch '
                     r'refs/convert/parquet, got files .md, .py, .zip. Download it, .*snapshot_download\('):
    opened('me/none')
  hub.repos['datasets/me/texts'] = hubs.Repo({'train.parquet': content([], pa.table({'text': ['a'], 'n': [1]}))})
  with pytest.raises(UserError, match=r'expected a column of images, .*got the columns text \(string\), n \(int64\)'):
    opened('me/texts')


def test_a_commit_is_kept_while_the_branch_moves_on(hub: hubs.Hub) -> None:
  hub.repos['datasets/me/pets'] = before = pets()
  pinned = opening.pin('hf:me/pets')
  assert pinned == f'hf:me/pets@{hubs.COMMIT}' and opening.pin(pinned) == pinned
  hub.repos['datasets/me/pets'] = hubs.Repo({'train.parquet': content(HELD)}, commit='e' * 40,
                                            others={'v1': before})
  assert len(opened('me/pets')) == 4 and len(opened(pinned.removeprefix('hf:'))) == 9
  assert opening.pin('hf:me/pets', [pinned]) == pinned  # of the run that resumes
  assert opening.pin('hf:me/pets', [f'{pinned}/small']) == f'hf:me/pets@{"e" * 40}'
  assert opening.pin('hf:me/pets@v1', [f'hf:me/pets@{"e" * 40}']) == pinned
  mixed = opening.pin('mix:0.5*hf:me/pets,0.5*folder:a', [f'mix:0.5*{pinned},0.5*folder:a'])
  assert mixed == f'mix:0.5*{pinned},0.5*folder:a'
  assert opening.pin('mix:0.50*folder:a,1*folder:b') == 'mix:0.50*folder:a,1*folder:b'
  with pytest.raises(UserError, match=r"hf://me/pets@v2: expected a branch, tag or commit of .*got 'v2'"):
    opened('me/pets@v2')


def test_without_the_hub_the_cache_is_read_if_it_has_all_files_of_the_split(
    hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  from huggingface_hub import constants
  hub.repos['datasets/me/pets'] = pets()
  images(opened('me/pets'))
  hub.asked.clear()
  with monkeypatch.context() as patch:
    patch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert images(opened('me/pets')) == images(opened(f'me/pets@{hubs.COMMIT}')) == [e.image for e in FOUND]
    assert opening.pin('hf:me/pets') == f'hf:me/pets@{hubs.COMMIT}' and not hub.asked
    with pytest.raises(UserError, match="split of hf:me/pets: expected one of train, got 'test'"):
      opened('me/pets', 'test')
    [file] = (tmp_path / 'home').rglob('train-00001-of-00002.parquet')
    file.unlink()
    with pytest.raises(UserError, match='expected the 2 files of the split of data/train-00000.*parquet, got 1'):
      opened('me/pets')
    with pytest.raises(UserError, match='hf://me/other: expected a dataset and revision in the cache.* Unset it'):
      opened('me/other')
  hub.broken = True
  with pytest.raises(TemporaryError, match='hf://me/other: expected an answer of'):
    opened('me/other')


def test_repositories_that_are_not_there_or_not_ours_are_explained(hub: hubs.Hub) -> None:
  with pytest.raises(UserError, match='hf://me/gone: expected a dataset of .*, got none of this name'):
    opened('me/gone')
  hub.repos['datasets/me/gated'] = pets()
  hub.repos['datasets/me/gated'].gated = True
  with pytest.raises(UserError, match=r'expected access to this gated dataset, got status 403 with no token[^!]*'
                     r'accept the license there'):
    opened('me/gated')
  for where in ('pets', 'me', 'a/b c', '../..', 'me/pets@'):
    with pytest.raises(UserError, match='data.source: expected hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER'):
      opened(where)


def test_a_run_keeps_its_commit_when_it_resumes(hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  from vit_jax.jobs import resume
  from vit_jax.record import run_directory
  hub.repos['datasets/me/pets'] = pets()
  config = schema.Config(data=schema.Data(source='hf:me/pets', pseudo=schema.Pseudo(source='hf:me/pets')),
                         evals={'other': schema.TopK(source='hf:me/pets/default'), 'same': schema.TopK()})
  found = resume.pin_sources(config, tmp_path / 'run')
  assert found.data.source == found.data.pseudo.source == f'hf:me/pets@{hubs.COMMIT}'
  assert found.evals['other'].source == f'hf:me/pets@{hubs.COMMIT}/default' and found.evals['same'].source == ''
  run_directory.write_text(tmp_path / 'run' / 'config.json', json.dumps(None))
  resume.write_config(tmp_path / 'run', found)
  hub.repos['datasets/me/pets'].commit = 'd' * 40
  assert resume.pin_sources(config, tmp_path / 'run') == found
  assert resume.pin_sources(config, tmp_path / 'other').data.source == f'hf:me/pets@{"d" * 40}'
  plain = schema.Config()
  assert resume.pin_sources(plain, tmp_path / 'run') == plain
