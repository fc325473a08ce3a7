"""Ids of texts against those of transformers, by the same tokenizer files."""
from __future__ import annotations

import builtins
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from tests.weights import make_golden_text, text_models
from vit_jax.config.schema import TextRule
from vit_jax.core.errors import UserError
from vit_jax.data.text import prompts, tokenizer
from vit_jax.data.text.tokenizer import Tokenizer

pytest.importorskip('tokenizers')
pytest.importorskip('sentencepiece')

FILES = text_models.HERE / 'text_files'
KINDS = {'clip': tokenizer.CLIP, 'siglip': tokenizer.SIGLIP, 'siglip2': tokenizer.SIGLIP, 'naflex': tokenizer.SIGLIP,
         'tips': tokenizer.TIPS}
RULES = {'siglip': TextRule.CANONICAL}  # transformers' tokenizer removes punctuation for the first SigLIP alone


def opened(family: str, length: int = 0) -> Tokenizer:
  path = tokenizer.find(FILES / make_golden_text.TOKENIZERS.get(family, family), KINDS[family], source='the model')
  return Tokenizer(path, family=KINDS[family], length=length or make_golden_text.LENGTHS[family])


@pytest.mark.parametrize('family', text_models.FAMILIES)
def test_ids_are_those_of_transformers(family: str) -> None:
  texts = [prompts.simplify(text, RULES.get(family, TextRule.LOWER)) for text in text_models.TEXTS]
  np.testing.assert_array_equal(opened(family)(texts).ids, text_models.golden()[f'{family}/ids'])


def test_a_long_text_is_cut_before_its_end() -> None:
  long = ['a photo of the old wooden house ' * 9]
  clip, siglip, tips = (opened(family, 7)(long) for family in ('clip', 'siglip', 'tips'))
  end = opened('clip')(['x']).ids[0, -1]
  assert clip.ids[0, -1] == end and clip.ids[0, 0] == end - 1 and (clip.ids[0, 1:-1] < end - 1).all()
  assert siglip.ids[0, -1] == 1 and (siglip.ids[0, :-1] > 1).all()
  assert tips.mask.all() and (tips.ids > 1).all()


def test_padding_is_not_part_of_the_mask() -> None:
  found = opened('tips')(['a cat', ''])
  np.testing.assert_array_equal(found.mask, found.ids > 0)
  assert found.mask[0].sum() == 3 and not found.mask[1].any()


def test_a_missing_tokenizer_is_reported_with_the_file_to_put(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError) as caught:
    tokenizer.find(tmp_path, tokenizer.CLIP, source='hf://a/b')
  assert str(caught.value) == (
      'tokenizer: expected the tokenizer of hf://a/b beside its weights, got none. Put tokenizer.json, or vocab.json '
      f'and merges.txt of the published model into {tmp_path}, or set the path of the file.')
  with pytest.raises(UserError, match='tokenizer: expected the tokenizer file of x, got nowhere, which does not exi'):
    tokenizer.find(tmp_path, tokenizer.CLIP, requested='nowhere', source='x')
  with pytest.raises(UserError, match='tokenizer: expected the tokenizer file of x, got ~nobody99/a, which does not e'):
    tokenizer.find(tmp_path, tokenizer.CLIP, requested='~nobody99/a', source='x')


def test_a_given_file_or_folder_is_used(tmp_path: pathlib.Path) -> None:
  file = FILES / 'siglip' / 'spiece.model'
  assert tokenizer.find(tmp_path, tokenizer.SIGLIP, requested=str(file), source='x') == file
  assert tokenizer.find(tmp_path, tokenizer.SIGLIP, requested=str(file.parent), source='x') == file


def test_the_tokenizer_of_another_family_is_refused() -> None:
  with pytest.raises(UserError, match=r'expected the tokenizer of a clip model, got one without the token <\|start'):
    Tokenizer(FILES / 'siglip2' / 'tokenizer.json', family=tokenizer.CLIP, length=7)


def test_damaged_and_incomplete_files_are_reported(tmp_path: pathlib.Path) -> None:
  for name in ('tokenizer.json', 'spiece.model'):
    (tmp_path / name).write_text('no tokenizer')
    with pytest.raises(UserError, match='expected a tokenizer( as JSON)?, got (no JSON at line 1|a damaged file)'):
      Tokenizer(tmp_path / name, family=tokenizer.SIGLIP, length=7)
  shutil.copy(FILES / 'clip' / 'vocab.json', tmp_path)
  with pytest.raises(UserError, match=r'expected merges\.txt beside it'):
    Tokenizer(tmp_path / 'vocab.json', family=tokenizer.CLIP, length=7)
  (tmp_path / 'spiece.model').write_bytes(b'')
  with pytest.raises(UserError, match='spiece.model: expected a tokenizer, got a damaged file: an empty file. Fet'):
    tokenizer.open_tokenizer(tokenizer.SIGLIP, str(tmp_path), length=8, source='x')


def test_a_missing_package_is_reported_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
  real = builtins.__import__

  def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    if name == 'sentencepiece':
      raise ModuleNotFoundError(name='sentencepiece')
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', refuse)
  with pytest.raises(UserError, match=r"the Python package sentencepiece, got none\. Run: pip install 'senten"):
    opened('siglip')


def test_a_tokenizer_has_a_largest_size(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'tokenizer.json'
  path.touch()
  os.truncate(path, 300 * 10**6)
  with pytest.raises(UserError, match='expected a tokenizer of at most 67,108,864 bytes, got 300,000,000'):
    tokenizer.Tokenizer(path, family=tokenizer.CLIP, length=8)


def test_a_pattern_that_takes_too_long_is_an_error_of_its_file(tmp_path: pathlib.Path) -> None:
  """`tokenizers` ends with a panic then, which is no `Exception`."""
  from tokenizers import Regex, Tokenizer, models, pre_tokenizers
  made = Tokenizer(models.BPE({'a': 0, '<|startoftext|>': 1, '<|endoftext|>': 2}, []))
  made.pre_tokenizer = pre_tokenizers.Split(Regex('(a+)+$'), 'isolated')
  made.save(str(tmp_path / 'tokenizer.json'))
  found = tokenizer.Tokenizer(tmp_path / 'tokenizer.json', family=tokenizer.CLIP, length=9)
  assert found(['aaa']).ids.shape == (1, 9)
  with pytest.raises(UserError, match=r'tokenizer.json: expected patterns that split texts, got one that fails'):
    found(['a' * 40 + '!'])
