"""Tokenizers from the files that models are published with: texts become ids of a fixed length.

`weights/text.py` calls `find` for the file beside weights, then makes a `Tokenizer`; `captions.py` and `stored.py` call
`open_tokenizer`. The packages of the extra `text` read a file: `tokenizers` (`tokenizer.json`; `vocab.json` with
`merges.txt`) or `sentencepiece` (`*.model`). Only some files add the special tokens of their family. Therefore only
plain ids, those of the text alone, are taken from the packages, and this module adds the special tokens:

  CLIP      start, text, end; padded with the end; a long text is cut before the end
  SigLIP    text, end; padded with the end, or with `<pad>` if the vocabulary is Gemma's (SigLIP 2)
  TIPS      text; padded with 0
  bytes     the bytes of UTF-8, each plus 3, end (1); padded with 0, as ByT5 (arXiv 2105.13626); there is no file
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core import documents, extras, failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray

CLIP, SIGLIP, TIPS, BYTES = 'clip', 'siglip', 'tips', 'bytes'
FAMILIES = (CLIP, SIGLIP, TIPS, BYTES)
FILES = {CLIP: ('tokenizer.json', 'vocab.json'), SIGLIP: ('spiece.model', 'tokenizer.json', 'tokenizer.model'),
         TIPS: ('tokenizer.model', 'tokenizer.json'), BYTES: ()}
"""Names of tokenizer files by family; the first that exists is used. `vocab.json` needs `merges.txt` beside it."""
_MAX_FILE_BYTES = documents.MAX_BYTES  # twice the size of the largest known file, of 256,000 tokens
_CLIP_WORDS = (r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
"""Matches the words that CLIP's vocabulary was made for: `it's 42!` is split into `it`, `'s`, `4`, `2` and `!`."""


class _Encoder(NamedTuple):
  """The functions of a tokenizer of any package.

  plain_ids: maps a text to its ids, without special tokens.
  find_id: maps a token to its id; None if the vocabulary does not have the token.
  """
  plain_ids: Callable[[str], list[int]]
  find_id: Callable[[str], int | None]


class EncodedTexts(NamedTuple):
  """The tokens of T texts: `ids [T, N] i32`, and `mask [T, N] bool`, which is False for padding."""
  ids: HostArray
  mask: HostArray


class Tokenizer:
  """The tokenizer of a family, which maps texts to `EncodedTexts`. It can be pickled; a copy reads the file again.

  `special` is (start, end, padding): the ids of the special tokens, 0 for a token that the family does not have. Raises
  UserError if the file cannot be read, lacks the special tokens of the family, or its package is not installed.

  Args:
    path: the path of the file; None for `BYTES`, which has no file.
    family: one of `FAMILIES`.
    length: N, the number of ids of a text after it is cut or padded.
  """

  def __init__(self, path: pathlib.Path | None, *, family: str, length: int) -> None:
    assert family in FAMILIES, family
    self.path, self.family, self.length = path, family, length
    self._encoder = _open_encoder(path) if path else _Encoder(
        lambda text: [byte + 3 for byte in text.encode(errors='replace')], lambda token: None)
    start = end = pad = 0
    if family == CLIP:
      start, end = self._find_id('<|startoftext|>'), self._find_id('<|endoftext|>')
      pad = end
    elif family == SIGLIP:
      is_gemma = self._encoder.find_id('<eos>') is not None
      end = self._find_id('<eos>' if is_gemma else '</s>')
      pad = self._find_id('<pad>') if is_gemma else end
    elif family == BYTES:
      end = 1
    self.special = start, end, pad

  @property
  def has_end(self) -> bool:
    """Whether a special token follows a text."""
    return self.family != TIPS

  @property
  def digest(self) -> str:
    """Identifies the ids that this tokenizer returns: family, length and digest of the file."""
    return f'{self.family} {self.length} {file_digest(self.path)}'

  def check(self, vocabulary: int, setting: str) -> None:
    """Raises UserError, which names `setting`, if the size of a vocabulary excludes the id of a special token."""
    if (highest := max(self.special)) >= vocabulary:
      raise UserError(f'{setting}: expected more than {highest:,}, the id of a special token of {self.path}, got '
                      f'{vocabulary:,}. Set it to the number of tokens of the tokenizer.')

  def __getstate__(self) -> dict[str, Any]:
    return {'path': self.path, 'family': self.family, 'length': self.length}

  def __setstate__(self, state: dict[str, Any]) -> None:
    Tokenizer.__init__(self, **state)

  def plain_ids(self, text: str) -> list[int]:
    """Returns the ids of a text without special tokens, neither cut nor padded."""
    return self._encoder.plain_ids(text)

  def __call__(self, texts: Sequence[str]) -> EncodedTexts:
    """Returns the ids of texts with special tokens, padded or cut to the length."""
    return add_special_tokens([self.plain_ids(text) for text in texts], family=self.family, length=self.length,
                              special=self.special)

  def _find_id(self, token: str) -> int:
    """Returns the id of a special token. Raises UserError if the vocabulary does not have the token."""
    token_id = self._encoder.find_id(token)
    if token_id is None:
      raise UserError(f'{self.path}: expected the tokenizer of a {self.family} model, got one without the token '
                      f'{token}. Use the file that was published with the weights.')
    return token_id


def file_digest(path: pathlib.Path | None) -> str:
  """Returns 16 digits of the SHA-256 of a tokenizer file, or of an empty file for None, the path for `BYTES`."""
  return hashlib.sha256(path.read_bytes() if path else b'').hexdigest()[:16]


def open_tokenizer(family: str, file: str, *, length: int, source: str) -> Tokenizer:
  """Opens the tokenizer of a family in a file that a user names; '' for `BYTES`. Raises as `find` and `Tokenizer`."""
  path = None if family == BYTES else find(pathlib.Path(), family, requested=file, source=source)
  return Tokenizer(path, family=family, length=length)


def add_special_tokens(plain_ids: Sequence[Sequence[int]], *, family: str, length: int,
                       special: tuple[int, int, int]) -> EncodedTexts:
  """Returns texts with the special tokens of a family, padded or cut to a length.

  Args:
    plain_ids: the ids of each text, without special tokens.
    family: determines which special tokens are added; see the top of this module.
    length: N.
    special: the ids of start, end and padding.
  """
  start, end, pad = special
  all_ids = np.full((len(plain_ids), length), pad, np.int32)
  mask = np.zeros((len(plain_ids), length), bool)
  for row, ids in enumerate(plain_ids):
    if family == CLIP:
      ids = [start, *ids[:length - 2], end]
    elif family != TIPS:
      ids = [*ids[:length - 1], end]
    ids = ids[:length]  # `length` may be 1
    all_ids[row, :len(ids)] = ids
    mask[row, :len(ids)] = True
  return EncodedTexts(all_ids, mask)


def find(folder: pathlib.Path, family: str, *, requested: str = '', source: str) -> pathlib.Path:
  """Returns the path of the tokenizer file of a family. Raises UserError if there is no such file.

  Args:
    folder: the folder of the weights, in which the file is searched if `requested` is ''.
    family: one of `FAMILIES` except `BYTES`.
    requested: the path of the file or of its folder that a user names; '' = none.
    source: the name of the weights or of the setting, for messages.
  """
  if requested:
    path = pathlib.Path(os.path.expanduser(requested))
    if path.is_dir():
      file_names = [name for name in FILES[family] if (path / name).is_file()]
      path = path / (file_names[0] if file_names else FILES[family][0])
    if not path.is_file():
      raise UserError(f'tokenizer: expected the tokenizer file of {source}, got {requested}, which does not exist. '
                      'Check the path.')
    return path
  for name in FILES[family]:
    if (folder / name).is_file():
      return folder / name
  names = ', or '.join(f'{name} and merges.txt' if name == 'vocab.json' else name for name in FILES[family])
  raise UserError(f'tokenizer: expected the tokenizer of {source} beside its weights, got none. Put {names} of the '
                  f'published model into {folder}, or set the path of the file.')


def _open_encoder(path: pathlib.Path) -> _Encoder:
  """Returns the functions of the tokenizer in a file. Raises UserError as `Tokenizer` does."""
  for file in (path, path.with_name('merges.txt')):
    if file.is_file() and file.stat().st_size > _MAX_FILE_BYTES:
      raise UserError(f'{file}: expected a tokenizer of at most {_MAX_FILE_BYTES:,} bytes, got '
                      f'{file.stat().st_size:,}. Fetch it again.')
  try:
    if path.suffix == '.model':
      return _open_sentencepiece(path)
    return _open_tokenizers(path)
  except ModuleNotFoundError as error:
    raise extras.missing(error.name or 'tokenizers', 'text', str(path)) from None
  except UserError:
    raise
  except OSError as error:
    raise failures.unreadable(error, str(path)) from error
  except Exception as error:  # `tokenizers` raises `Exception` itself for a damaged file
    raise UserError(f'{path}: expected a tokenizer, got a damaged file: {ascii(str(error))[1:-1][:200]}. Fetch it '
                    'again.') from error


def _open_sentencepiece(path: pathlib.Path) -> _Encoder:
  import sentencepiece
  content = path.read_bytes()
  if not content:  # the package would return a processor without a model
    raise ValueError('an empty file')
  model = sentencepiece.SentencePieceProcessor(model_proto=content)

  def find_id(token: str) -> int | None:
    token_id = model.piece_to_id(token)  # the id of the unknown token if the vocabulary does not have the token
    return token_id if model.id_to_piece(token_id) == token else None
  return _Encoder(lambda text: list(model.encode(text)), find_id)


def _open_tokenizers(path: pathlib.Path) -> _Encoder:
  opened = open_file(path)

  def plain_ids(text: str) -> list[int]:
    with _refuse_panic(path):
      return list(opened.encode(text, add_special_tokens=False).ids)
  return _Encoder(plain_ids, opened.token_to_id)


@contextlib.contextmanager
def _refuse_panic(path: pathlib.Path) -> Iterator[None]:
  """Raises UserError in place of a panic of the package `tokenizers`, such as for a pattern that matches too slowly.

  A panic is a `PanicException` of the Rust code of the package, which is a `BaseException` and not an `Exception`.
  """
  try:
    yield
  except BaseException as error:
    if type(error).__name__ != 'PanicException':
      raise
    raise UserError(f'{path}: expected patterns that split texts, got one that fails: {ascii(str(error))[1:-1][:200]}. '
                    'Use the file that was published with the weights.') from None


def open_file(path: pathlib.Path) -> Any:
  """Returns the `tokenizers.Tokenizer` of a file, which neither pads nor cuts texts. Raises as `_open_encoder`."""
  import tokenizers
  try:
    documents.parse(path.read_bytes())
  except ValueError as error:
    raise UserError(f'{path}: expected a tokenizer as JSON, got {error}. Fetch it again.') from None
  with _refuse_panic(path):
    opened: Any = _open_clip(path) if path.name == 'vocab.json' else tokenizers.Tokenizer.from_file(str(path))
  opened.no_padding()
  opened.no_truncation()
  return opened


def _open_clip(path: pathlib.Path) -> Any:
  """Returns the `tokenizers.Tokenizer` of CLIP's vocabulary in `vocab.json` and its merges in `merges.txt`."""
  from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
  merges = path.with_name('merges.txt')
  if not merges.is_file():
    raise UserError(f'{path}: expected merges.txt beside it, got none. Put that file of the published model there.')
  opened = Tokenizer(models.BPE.from_file(str(path), str(merges), continuing_subword_prefix='',
                                          end_of_word_suffix='</w>', unk_token='<|endoftext|>'))
  opened.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r'\s+'), ' '),
                                            normalizers.Lowercase()])
  opened.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior='removed', invert=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False)])
  return opened
