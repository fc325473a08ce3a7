"""Writes a tokenizer as one file for the package `tokenizers`, for exported text towers.

`export/towers.py` calls `write`. The file contains all steps of this package: it simplifies a text by the rule of its
family, tokenizes it, adds the special tokens, cuts it and pads it to the length of the text tower. A SentencePiece file
with unigrams (SigLIP) is converted; for another kind, the `tokenizer.json` beside it is used.
"""
from __future__ import annotations

import pathlib
import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.config.schema import TextRule
from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.data.text import prompts
from vit_jax.data.text.tokenizer import CLIP, Tokenizer, open_file

_PIECES = {0: '<pad>', 1: '</s>', 2: '<unk>'}
"""Special tokens of bytes (ByT5)."""


def write(tokenizer: Tokenizer, rule: TextRule, path: pathlib.Path, *, samples: Sequence[str]) -> None:
  """Writes a tokenizer, with the simplification of texts before it.

  Raises:
    UserError: it is a SentencePiece model of another kind than unigrams without a `tokenizer.json` beside it,
      `tokenizers` is not installed, or the file gives other ids for a sample.
  """
  package, own = extras.load('tokenizers', 'text', '--texts'), tokenizer.path
  if own and own.suffix == '.model' and own.with_name('tokenizer.json').is_file():
    own = own.with_name('tokenizer.json')
  found = _bytes(package) if not own else _unigram(package, own) if own.suffix == '.model' else open_file(own)
  _simplify(package, found, rule)
  start, end, pad = tokenizer.special
  before = [found.id_to_token(start)] if tokenizer.family == CLIP else []
  after = [found.id_to_token(end)] if tokenizer.has_end else []
  found.post_processor = package.processors.TemplateProcessing(
      single=[*before, '$A', *after], special_tokens=[*((one, start) for one in before),
                                                      *((one, end) for one in after)])
  found.enable_truncation(tokenizer.length)
  found.enable_padding(length=tokenizer.length, pad_id=pad, pad_token=found.id_to_token(pad) or '<pad>')
  found.save(str(path))
  again = package.Tokenizer.from_file(str(path))
  ids, mask = tokenizer([prompts.simplify(text, rule) for text in samples])
  for text, row, seen in zip(samples, ids, mask, strict=True):
    got = again.encode(text)
    if list(got.ids) != row.tolist() or not np.array_equal(got.attention_mask, seen):
      raise UserError(f'--tokenizer: expected a tokenizer whose file gives the same ids, got others for {text[:60]!r} '
                      f'with {own or "bytes"}. Use the tokenizer.json that was published with the weights.')


def _unigram(package: Any, path: pathlib.Path) -> Any:
  """Returns the tokenizer of a SentencePiece file with unigrams. Raises UserError if it is of another kind."""
  content = extras.load('sentencepiece.sentencepiece_model_pb2', 'text', '--texts').ModelProto()
  content.ParseFromString(path.read_bytes())
  trained, normal, kinds = content.trainer_spec, content.normalizer_spec, package.normalizers
  if trained.model_type != trained.UNIGRAM:
    raise UserError('--tokenizer: expected tokenizer.json, vocab.json with merges.txt, or a SentencePiece model with '
                    f'unigrams, got {path}. Put the tokenizer.json of the same model beside it, or set --tokenizer to '
                    'it.')
  found = package.Tokenizer(package.models.Unigram(
      [(one.piece, one.score) for one in content.pieces], trained.unk_id, trained.byte_fallback))
  steps = [kinds.Precompiled(normal.precompiled_charsmap)] if normal.precompiled_charsmap else []
  if normal.remove_extra_whitespaces:
    steps += [kinds.Strip(), kinds.Replace(package.Regex(' {2,}'), ' ')]
  found.normalizer = kinds.Sequence(steps)
  found.pre_tokenizer = package.pre_tokenizers.Metaspace(
      prepend_scheme='always' if normal.add_dummy_prefix else 'never')
  return found


def _bytes(package: Any) -> Any:
  """Returns the tokenizer of bytes, each plus 3."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = iter(range(256, 512))  # letters that stand for the other bytes in `ByteLevel`
  letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
  found = package.Tokenizer(package.models.BPE(
      {**{piece: number for number, piece in _PIECES.items()},
       **{letters[byte]: byte + len(_PIECES) for byte in range(256)}}, []))
  found.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return found


def _simplify(package: Any, found: Any, rule: TextRule) -> None:
  """Puts the simplification of `prompts.simplify` before the own normalization of a tokenizer."""
  kinds, steps = package.normalizers, []
  if rule is not TextRule.NONE:
    steps = [kinds.Replace('_', ' ')]
  if rule is TextRule.CANONICAL:
    steps += [kinds.Replace(package.Regex(f'[{re.escape(string.punctuation)}]'), ''), kinds.Lowercase(),
              kinds.Replace(package.Regex(r'\s+'), ' '), kinds.Strip()]
  elif rule is TextRule.LOWER:
    steps.append(kinds.Lowercase())
  if own := found.normalizer:
    steps.append(own)
  if steps:
    found.normalizer = kinds.Sequence(steps)
