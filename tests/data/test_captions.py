"""Texts in training batches: drawn by seed, example and epoch, for any number of workers, and replaced if unusable."""
from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

from tests.data import packed
from vit_jax.config import schema
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader, opening
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, first_label, read_one
from vit_jax.data.text import captions
from vit_jax.data.text.tokenizer import Tokenizer

TEXT = schema.Text(length=24)
ALONE = Shard((0,), 1)
RECIPE = schema.Recipe(crop=schema.Crop.RESIZE)
EMPTY, BROKEN = 4, 9
"""Examples whose caption is white space, and no UTF-8."""


@pytest.fixture
def tars(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Source:
  """A source with three captions an image."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  texts = {i: f'one {i}\n\n  two {i}\nthree {i}'.encode() for i in range(23)} | {EMPTY: b' \n', BROKEN: b'\xff\xfe'}
  packed.write_tars(tmp_path / 'tars', 'train', packed.examples(23), texts=texts)
  return opening.open_split(schema.Data(source=f'wds:{tmp_path}/tars'), 'train', image_px=(8, 8))


def decoded(ids: np.ndarray) -> str:
  """What the tokens of bytes spell."""
  return bytes(int(i) - 3 for i in ids if i >= 3).decode()


def opened(source: Source, seed: int = 0, **settings: Any) -> captions.Texts:
  return captions.open_texts(source, TEXT, **{'prompts': '', 'names': '', 'seed': seed, **settings})


def batches(source: Source, num: int, start: int = 0, *, workers: int = 0, bad: int = 100,
            shard: Shard = ALONE) -> list[dict[str, np.ndarray]]:
  made = loader.train_loader(
      source, recipe=RECIPE, image_px=(8, 8), batch_size=6, seed=0, shard=shard, workers=workers, threads=2,
      in_memory=False, max_bad_images=bad, texts=opened(source))
  found = [{k: np.array(v) for k, v in b.items()} for b in itertools.islice(made.batches(start), num)]
  made.close()
  return found


def test_bytes_are_tokens_with_an_end_and_padding() -> None:
  made = Tokenizer(None, family='bytes', length=6)
  ids, mask = made(['é', 'abcdefgh'])
  assert ids.tolist() == [[0xC3 + 3, 0xA9 + 3, 1, 0, 0, 0], [100, 101, 102, 103, 104, 1]]
  assert mask.tolist() == [[True] * 3 + [False] * 3, [True] * 6]
  again = pickle.loads(pickle.dumps(made))
  assert again(['é']).ids.tolist() == ids[:1].tolist() and again.digest == made.digest


def test_a_caption_is_drawn_by_seed_example_and_epoch(tars: Source) -> None:
  def drawn(position: int, index: int = 2, seed: int = 0) -> str:
    return decoded(opened(tars, seed).add({'label': np.int32(0)}, index, position)['text'])
  epochs = [drawn(position) for position in range(0, 23 * 30, 23)]
  assert set(epochs) == {'one 2', 'two 2', 'three 2'}
  assert [drawn(position + 11) for position in range(0, 23 * 30, 23)] == epochs  # anywhere in the same epoch
  assert [drawn(position, seed=1) for position in range(0, 23 * 30, 23)] != epochs
  assert [drawn(position, 3).split()[0] for position in range(0, 23 * 30, 23)] != [one.split()[0] for one in epochs]


def test_batches_have_the_text_of_their_image_for_any_shards_and_after_a_restart(tars: Source) -> None:
  found = batches(tars, 8)
  for batch in found:
    assert batch['text'].shape == (6, 24) and batch['text_mask'].sum(1).tolist() == [
        len(decoded(row)) + 1 for row in batch['text']]
    for row, index in enumerate(batch['index'].tolist()):
      replaced = {EMPTY: EMPTY + 1, BROKEN: BROKEN + 1}.get(index, index)
      assert decoded(batch['text'][row]).split()[1] == str(replaced) and batch['bad'][row] == (replaced != index)
  later = batches(tars, 3, start=5)
  halves = [batches(tars, 8, shard=Shard((part,), 2)) for part in (0, 1)]
  for name in ('text', 'text_mask', 'image', 'index'):
    assert all((a[name] == b[name]).all() for a, b in zip(later, found[5:], strict=True))
    joined = [np.concatenate([a[name], b[name]]) for a, b in zip(*halves, strict=True)]
    assert all((a == b[name]).all() for a, b in zip(joined, found, strict=True))


@pytest.mark.slow(reason='5 s: starts processes')
def test_loader_processes_make_the_same_texts(tars: Source) -> None:
  for a, b in zip(batches(tars, 4, workers=2), batches(tars, 4), strict=True):
    assert (a['text'] == b['text']).all() and (a['index'] == b['index']).all()


def test_captions_that_cannot_be_used_are_counted_and_named(tars: Source, caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.WARNING):
    batches(tars, 8)
  assert 'expected a caption, got an empty text' in caplog.text and 'complete text in UTF-8' in caplog.text
  with pytest.raises(UserError, match='at most data.max_bad_images=1 images'):
    batches(tars, 8, bad=1)


def test_prompts_are_templates_with_the_names_of_the_classes(tars: Source) -> None:
  named = opening.open_split(schema.Data(source=tars.name.rpartition('/')[0], label_column='json/label'), 'train',
                             image_px=(8, 8))
  texts = opened(named, prompts='a {}!')
  assert {decoded(texts.add({'label': np.int32(c)}, c, 0)['text']) for c in range(3)} == {
      f'a {name.lower()}!'.replace('_', ' ') for name in named.class_names}
  many = opened(named, prompts='clip_best')
  assert len({decoded(many.add({'label': np.int32(0)}, 0, 23 * e)['text']) for e in range(40)}) == 8
  assert len(pickle.dumps(texts)) < 20_000
  others = many, opened(named), captions.open_texts(
      named, dataclasses.replace(TEXT, text_rule=TextRule.NONE), prompts='a {}!', names='', seed=0)
  assert len({made.digest for made in (texts, *others)}) == 4
  assert texts.sample() == f'a {named.class_names[first_label(named, 0)].lower()}!'.replace('_', ' ')
  assert opened(tars).sample() == 'one 0'
  with pytest.raises(BadImage, match='expected a class'):
    texts.add({'label': np.int32(-1)}, 0, 0)


@pytest.mark.parametrize('line', ['{"image": "0.png"}', 'no json', '{"image": "x.png", "captions": []}'])
def test_messages_about_a_file_of_captions_speak_of_captions(line: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'captions_train.jsonl').write_text(line)
  with pytest.raises(UserError, match='Write lines as .*"captions": ') as caught:
    opening.open_split(schema.Data(source=f'folder:{tmp_path}'), 'train', image_px=(32, 32))
  assert 'label' not in str(caught.value).replace(str(tmp_path), '')


def test_a_folder_has_captions_in_lines_of_json(tmp_path: pathlib.Path) -> None:
  lines = [{'image': f'{i}.png', 'captions': [f'one {i}', ' ', f'two {i}']} for i in range(6)]
  lines[4]['captions'] = []
  for example, line in zip(packed.examples(6), lines, strict=True):
    (tmp_path / str(line['image'])).write_bytes(example.image)
  (tmp_path / 'captions_train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  source = opening.open_split(schema.Data(source=f'folder:{tmp_path}'), 'train', image_px=(8, 8))
  again = pickle.loads(pickle.dumps(source))
  assert source.class_names == ('unlabeled',) and len(source) == 6 and opening.check_labels(source, schema.Data())
  for index in range(6):
    number = pathlib.Path(source.describe(index)).stem
    assert again.captions(index) == ((f'one {number}', f'two {number}') if number != '4' else ())
    assert read_one(source, index).image == packed.examples(6)[int(number)].image
  lines[0]['captions'] = ['other']
  (tmp_path / 'captions_train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  other = opening.open_split(schema.Data(source=f'folder:{tmp_path}'), 'train', image_px=(8, 8))
  assert other.digest != source.digest
  found = batches(source, 2)
  assert all(decoded(row).split()[0] in ('one', 'two') for batch in found for row in batch['text'])


def test_a_source_without_captions_or_without_classes_is_named(tars: Source, monkeypatch: pytest.MonkeyPatch) -> None:
  with pytest.raises(UserError, match='objective.prompts: expected a template .* takes captions, and digits'):
    opened(opening.open_split(schema.Data(source='digits'), 'train', image_px=(8, 8)))
  source = opening.open_split(schema.Data(source='digits'), 'train', image_px=(8, 8))
  monkeypatch.setattr(source, 'class_names', ('unlabeled',))  # the program opens digits once
  with pytest.raises(UserError, match="objective.prompts: expected '' with digits"):
    opened(source, prompts='a {}')
  with pytest.raises(UserError, match='objective.text.tokenizer: expected the file of a tokenizer, got none'):
    captions.open_texts(tars, dataclasses.replace(TEXT, tokens=schema.Tokens.SIGLIP), prompts='', names='', seed=0)


TEXTS: list[Any] = [['a cat', ' ', 'a pet'], ['é'], [], ['one'], ['two\nlines'], ['x']]
"""Captions of six images, some of them empty."""
FOUND = packed.examples(6)
EXPECTED = [('a cat', 'a pet'), ('é',), (), ('one',), ('two\nlines',), ('x',)]


def in_parquet(folder: pathlib.Path, name: str) -> None:
  pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  values = pa.array(TEXTS, pa.list_(pa.string()))
  if name == 'text':
    values = pa.array([' '.join(one) or None for one in TEXTS], pa.string())
  pq.write_table(pa.table({'image': [one.image for one in FOUND], name: values}), folder / 'train.parquet',
                 row_group_size=4)


def in_tfrecords(folder: pathlib.Path, name: str) -> None:
  (folder / 'train.tfrecord').write_bytes(packed.tfrecord(
      packed.tf_example({'image': one.image, name: [text.encode() for text in texts]})
      for one, texts in zip(FOUND, TEXTS, strict=True)))


def in_tars(folder: pathlib.Path, name: str) -> None:
  members = []
  for one, texts in zip(FOUND, TEXTS, strict=True):
    members += [(f'{one.key}.json', json.dumps({'a': {name: texts[0] if len(texts) == 1 else texts}}).encode()),
                (f'{one.key}.png', one.image)]
  (folder / 'train.tar').write_bytes(packed.tar(members))


@pytest.mark.parametrize(('kind', 'write', 'name', 'column'), [
    ('parquet', in_parquet, 'captions', ''), ('parquet', in_parquet, 'sentences', 'sentences'),
    ('tfrecord', in_tfrecords, 'caption', ''), ('tfrecord', in_tfrecords, 'image/words', 'image/words'),
    ('wds', in_tars, 'caption', 'json/a/caption')])
def test_captions_are_read_from_columns_features_and_fields(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str, write: Any, name: str, column: str) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  write(tmp_path, name)
  data = schema.Data(source=f'{kind}:{tmp_path}', caption_column=column)
  source = opening.open_split(data, 'train', image_px=(8, 8))
  again = pickle.loads(pickle.dumps(source))
  assert [again.captions(i) for i in range(6)] == EXPECTED and source.class_names == ('unlabeled',)
  assert [read_one(source, i).image for i in range(6)] == [one.image for one in FOUND]
  texts = opened(source)
  assert decoded(texts.add({'label': np.int32(0)}, 3, 0)['text']) == 'one'
  with pytest.raises(BadImage, match='expected a caption, got an empty text'):
    texts.add({'label': np.int32(0)}, 2, 0)


def test_a_column_with_a_text_an_image_is_read_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  in_parquet(tmp_path, 'text')
  source = opening.open_split(schema.Data(source=f'parquet:{tmp_path}'), 'train', image_px=(8, 8))
  assert [source.captions(i) for i in range(4)] == [('a cat   a pet',), ('é',), (), ('one',)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(('kind', 'write', 'said'), [
    ('parquet', in_parquet, "data.caption_column: expected one column of .*, got 'words'"),
    ('tfrecord', in_tfrecords, "data.caption_column: expected a feature with captions, got 'words'"),
    ('wds', in_tars, 'expected a text of at most 1 MiB beside the image, got none')])
def test_columns_that_are_not_there_are_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                              write: Any, said: str) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  write(tmp_path, 'caption')
  with pytest.raises((UserError, BadImage), match=said):
    source = opening.open_split(schema.Data(source=f'{kind}:{tmp_path}', caption_column='words'), 'train',
                                image_px=(8, 8))
    opened(source).add({'label': np.int32(0)}, 0, 0)
  if kind == 'wds':
    with pytest.raises(UserError, match='data.caption_column: expected an extension such as txt, or json/FIELD'):
      opening.open_split(schema.Data(source=f'wds:{tmp_path}', caption_column='json'), 'train', image_px=(8, 8))


def test_captions_that_are_no_text_are_bad(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (tmp_path / 'train.tfrecord').write_bytes(packed.tfrecord(
      packed.tf_example({'image': one.image, 'caption': [b'\xff\xfe']}) for one in FOUND))
  (tmp_path / 'train.tar').write_bytes(packed.tar([
      (f'{one.key}.{kind}', content) for one in FOUND
      for kind, content in (('json', b'{"text": 3}'), ('png', one.image))]))
  for source, column in (('tfrecord', ''), ('wds', 'json/text')):
    found = opening.open_split(schema.Data(source=f'{source}:{tmp_path}', caption_column=column), 'train',
                               image_px=(8, 8))
    with pytest.raises(BadImage, match='expected captions in UTF-8 in .*, got others'):
      found.captions(0)  # type: ignore[attr-defined]


def test_a_column_of_captions_may_have_a_point_in_its_name(tmp_path: pathlib.Path) -> None:
  pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  found = packed.examples(3)
  table = pa.table({'image': pa.array([one.image for one in found]), 'text.en': ['a', 'b', 'c'],
                    'text': ['d', 'e', 'f']})
  pq.write_table(table, tmp_path / 'train.parquet')
  for column, caption in (('text.en', 'c'), ('text', 'f')):
    data = schema.Data(source=f'parquet:{tmp_path}/train.parquet', caption_column=column)
    assert opening.open_split(data, 'train', image_px=(8, 8)).captions(2) == (caption,)  # type: ignore[attr-defined]
