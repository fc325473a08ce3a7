"""Writes a tokenizer as one file for the package `tokenizers`, for exported text towers.

`export/towers.py` calls `write`. With the written file, the package `tokenizers` alone encodes a text as this project
does: it simplifies the text by the rule of the family, tokenizes it, adds special tokens, and cuts or pads the ids to
the length of the text tower. If a SentencePiece model (`*.model`) has a `tokenizer.json` beside it, `tokenizer.json` is
used in its place. Else a model with unigrams, such as SigLIP's, is converted, and other models raise UserError.
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

_BYTE_TOKENS = {0: '<pad>', 1: '</s>', 2: '<unk>'}
"""Special tokens of the family `bytes` (ByT5); the ids of the 256 bytes follow them."""


def write(tokenizer: Tokenizer, rule: TextRule, path: pathlib.Path, *, samples: Sequence[str]) -> None:
  """Writes a tokenizer to one file, reads the file, and compares its ids with those of the tokenizer.

  Raises UserError if a SentencePiece model cannot be converted, `tokenizers` is not installed, or ids differ.

  Args:
    tokenizer: the tokenizer to write.
    rule: how the written tokenizer simplifies texts before it tokenizes them.
    path: the path of the new file.
    samples: texts whose ids are compared.
  """
  package = extras.load('tokenizers', 'text', '--texts')
  source = tokenizer.path
  if source and source.suffix == '.model' and source.with_name('tokenizer.json').is_file():
    source = source.with_name('tokenizer.json')
  if not source:
    exported = _build_byte_tokenizer(package)
  elif source.suffix == '.model':
    exported = _convert_unigrams(package, source)
  else:
    exported = open_file(source)
  _add_simplification(package, exported, rule)
  start, end, pad = tokenizer.special
  id_before = {exported.id_to_token(start): start} if tokenizer.family == CLIP else {}
  id_after = {exported.id_to_token(end): end} if tokenizer.has_end else {}
  exported.post_processor = package.processors.TemplateProcessing(  # $A stands for the tokens of the text
      single=[*id_before, '$A', *id_after], special_tokens=[*id_before.items(), *id_after.items()])
  exported.enable_truncation(tokenizer.length)
  exported.enable_padding(length=tokenizer.length, pad_id=pad, pad_token=exported.id_to_token(pad) or '<pad>')
  exported.save(str(path))
  saved = package.Tokenizer.from_file(str(path))
  all_ids, all_masks = tokenizer([prompts.simplify(text, rule) for text in samples])
  for text, ids, mask in zip(samples, all_ids, all_masks, strict=True):
    encoding = saved.encode(text)
    if list(encoding.ids) != ids.tolist() or not np.array_equal(encoding.attention_mask, mask):
      raise UserError(f'--tokenizer: expected a tokenizer whose file gives the same ids, got others for {text[:60]!r} '
                      f'with {source or "bytes"}. Use the tokenizer.json that was published with the weights.')


def _convert_unigrams(package: Any, path: pathlib.Path) -> Any:
  """Converts a SentencePiece file to a `tokenizers.Tokenizer`. Raises UserError if the model has no unigrams."""
  model = extras.load('sentencepiece.sentencepiece_model_pb2', 'text', '--texts').ModelProto()
  model.ParseFromString(path.read_bytes())
  trainer, normalizer, normalizers = model.trainer_spec, model.normalizer_spec, package.normalizers
  if trainer.model_type != trainer.UNIGRAM:
    raise UserError('--tokenizer: expected tokenizer.json, vocab.json with merges.txt, or a SentencePiece model with '
                    f'unigrams, got {path}. Put the tokenizer.json of the same model beside it, or set --tokenizer to '
                    'it.')
  exported = package.Tokenizer(package.models.Unigram(
      [(entry.piece, entry.score) for entry in model.pieces], trainer.unk_id, trainer.byte_fallback))
  steps = [normalizers.Precompiled(normalizer.precompiled_charsmap)] if normalizer.precompiled_charsmap else []
  if normalizer.remove_extra_whitespaces:
    steps += [normalizers.Strip(), normalizers.Replace(package.Regex(' {2,}'), ' ')]
  exported.normalizer = normalizers.Sequence(steps)
  exported.pre_tokenizer = package.pre_tokenizers.Metaspace(
      prepend_scheme='always' if normalizer.add_dummy_prefix else 'never')
  return exported


def _build_byte_tokenizer(package: Any) -> Any:
  """Returns the `tokenizers.Tokenizer` of the family `bytes`: the id of a byte is the byte plus 3.

  `ByteLevel` replaces each byte by one character: a printable byte by the character with this code, the others by the
  characters from code 256 on, in the order of the bytes (as GPT-2 does).
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  other_codes = iter(range(256, 512))
  characters = [chr(byte if byte in printable else next(other_codes)) for byte in range(256)]
  vocabulary = {token: token_id for token_id, token in _BYTE_TOKENS.items()}
  vocabulary |= {character: byte + len(_BYTE_TOKENS) for byte, character in enumerate(characters)}
  exported = package.Tokenizer(package.models.BPE(vocabulary, []))
  exported.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return exported


def _add_simplification(package: Any, exported: Any, rule: TextRule) -> None:
  """Puts the steps of `prompts.simplify` before the steps of the normalizer of a `tokenizers.Tokenizer`."""
  normalizers, steps = package.normalizers, []
  if rule is not TextRule.NONE:
    steps = [normalizers.Replace('_', ' ')]
  if rule is TextRule.CANONICAL:
    steps += [normalizers.Replace(package.Regex(f'[{re.escape(string.punctuation)}]'), ''), normalizers.Lowercase(),
              normalizers.Replace(package.Regex(r'\s+'), ' '), normalizers.Strip()]
  elif rule is TextRule.LOWER:
    steps.append(normalizers.Lowercase())
  if exported.normalizer:
    steps.append(exported.normalizer)
  if steps:
    exported.normalizer = normalizers.Sequence(steps)
