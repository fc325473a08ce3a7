"""Captions in prepared datasets: stored with their ids, read without the tokenizer, and refused with another one."""
from __future__ import annotations

import json
import pathlib
import pickle
import shutil
from typing import Any

import numpy as np
import pytest

from tests.data import packed
from tests.weights import text_models
from vit_jax import main
from vit_jax.config import schema
from vit_jax.config.schema import TextRule, Tokens
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.source import Source
from vit_jax.data.text import captions, prompts, stored, tokenizer
from vit_jax.evaluate import caption_retrieval

EMPTY = 4
TEXTS = {i: f'One, {i}\n\n  two_{i} é\nthree {i} {"long " * 30}'.encode() for i in range(13)} | {EMPTY: b' \n'}
FAMILIES = [('bytes', ''), pytest.param('clip', 'clip', marks=pytest.mark.slow(reason='2 s')),
            pytest.param('siglip', 'siglip2', marks=pytest.mark.slow(reason='2 s'))]


@pytest.fixture
def tars(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  packed.write_tars(tmp_path / 'tars', 'train', packed.examples(13), texts=TEXTS)
  return f'wds:{tmp_path}/tars'


def prepare(tars: str, to: pathlib.Path, *flags: str) -> int:
  return main.run(['prepare', f'--data={tars}', f'--to={to}', '--splits=train', *flags])


def opened(source: str) -> Source:
  return opening.open_split(schema.Data(source=source), 'train', image_px=(8, 8))


def texts_of(source: Source, **settings: Any) -> Any:
  return captions.open_texts(source, schema.Text(**{'length': 24, **settings}), prompts='', names='', seed=3)


@pytest.mark.parametrize(('family', 'folder'), FAMILIES)
def test_ids_are_those_of_the_tokenizer_which_training_does_not_need(tars: str, tmp_path: pathlib.Path, family: str,
                                                                     folder: str) -> None:
  pytest.importorskip('tokenizers')
  files = tmp_path / 'files'
  path = pathlib.Path(text_models.write(folder, files)) if folder else None
  flags = [f'--tokenizer={path}'] if path else []
  assert prepare(tars, tmp_path / 'set', f'--tokens={family}', *flags) == 0
  kept = {'tokens': Tokens(family), 'vocabulary': 60_000}
  origin = texts_of(opened(tars), tokenizer=str(path or ''), **kept)
  names = {opened(tars).describe(i).rpartition('/')[2]: i for i in range(13)}
  if path:
    shutil.rmtree(path)
  source = opened(f'array_record:{tmp_path}/set')
  assert len(source) == 12  # one has no caption
  stored = pickle.loads(pickle.dumps(texts_of(source, **kept)))
  for index in range(12):
    own = names[source.describe(index).rpartition('/')[2].rstrip(')')]
    assert source.captions(index) == opened(tars).captions(own)  # type: ignore[attr-defined]
    for epoch in range(4):
      got = stored.add({'label': np.int32(0)}, index, epoch * 12)
      chosen = captions.draw(3, 3, index, epoch)
      ids, mask = origin.encode([prompts.simplify(origin.read_texts(own, 0)[chosen], origin.rule)])
      assert got['text'].tolist() == ids[0].tolist() and got['text_mask'].tolist() == mask[0].tolist()


def test_another_tokenizer_family_or_rule_than_that_of_the_dataset_is_refused(tars: str,
                                                                              tmp_path: pathlib.Path) -> None:
  pytest.importorskip('tokenizers')
  first, second = (pathlib.Path(text_models.write('clip', tmp_path / name)) for name in 'ab')
  assert prepare(tars, tmp_path / 'set', '--tokens=clip', f'--tokenizer={first}') == 0
  source, kept = opened(f'array_record:{tmp_path}/set'), {'tokens': Tokens.CLIP, 'vocabulary': 60_000}
  texts_of(source, tokenizer=str(second), **kept)  # an equal file elsewhere
  (second / 'vocab.json').write_text((second / 'vocab.json').read_text() + ' ')
  info = json.loads((tmp_path / 'set' / 'info.json').read_text())['texts']
  digests = [tokenizer.file_digest(folder / 'vocab.json') for folder in (first, second)]
  assert info['tokenizer'] == digests[0] != digests[1]
  differs = f'tokenizer: expected the file with the SHA-256 {info["tokenizer"]}'
  for settings, said in (({'tokenizer': str(second)}, differs),
                         ({'text_rule': TextRule.NONE}, 'text_rule: expected lower, with which'),
                         ({'tokens': Tokens.BYTES}, 'tokens: expected clip, with which'),
                         ({'vocabulary': 260}, 'vocabulary: expected more than')):
    with pytest.raises(UserError, match=f'objective.text.{said}'):
      texts_of(source, **{**kept, **settings})


def test_a_run_and_retrieval_read_the_stored_captions(tars: str, tmp_path: pathlib.Path) -> None:
  assert prepare(tars, tmp_path / 'set', '--tokens=bytes') == 0
  source = opened(f'array_record:{tmp_path}/set')
  found = caption_retrieval.read_texts(source, TextRule.NONE, 5, 'evals.x')
  assert [len(one) for one in found] == [3] * 12
  assert texts_of(source).digest != texts_of(source, length=25).digest
  plain = tmp_path / 'plain'
  assert prepare(tars, plain) == 0
  info = json.loads((plain / 'info.json').read_text())
  assert 'texts' not in info and 'captions' not in info['made'] and 'texts' not in info['made']
  with pytest.raises(UserError, match='takes captions, and .* has none'):
    texts_of(opened(f'array_record:{plain}'))


@pytest.mark.parametrize(('flags', 'said'), [
    (['--tokenizer=x'], '--tokenizer: expected --tokens as well'),
    (['--tokens=clip'], '--tokenizer: expected a file, got none'),
    (['--tokens=bytes', '--tokenizer=x'], '--tokenizer: expected no file with --tokens=bytes, got x'),
    (['--tokens=bytes', '--data=digits', '--splits=train'], '--tokens: expected a source with captions, got digits')])
def test_flags_that_do_not_go_together_are_named(tars: str, tmp_path: pathlib.Path, flags: list[str], said: str,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
  given = [] if any(flag.startswith('--data') for flag in flags) else [f'--data={tars}', '--splits=train']
  assert main.run(['prepare', f'--to={tmp_path}/set', *given, *flags]) == 2
  assert said in capsys.readouterr().err


def test_damaged_ids_are_a_bad_image() -> None:
  for found in ({'tokens': [1, 2], 'token_ends': [3]}, {'tokens': [1]}, {'tokens': [1, 2], 'token_ends': [2, 1, 2]}):
    with pytest.raises(stored.BadImage, match='expected the ids of captions'):
      stored.ids(found, 'set')
  assert stored.ids({'tokens': [1, 2, 3], 'token_ends': [2, 2, 3]}, 'set') == [[1, 2], [], [3]]
