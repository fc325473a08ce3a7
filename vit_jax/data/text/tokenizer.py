"""Tokenizers from the files that models are published with: texts become ids of a fixed length.

`weights/text.py` calls `find` for the file beside weights, then makes a `Tokenizer`; `captions.py` and `stored.py` call
`open_given`. A file is read by `tokenizers` (`tokenizer.json`; `vocab.json` with `merges.txt`) or by `sentencepiece`
(`*.model`), the packages of the extra `text`. The special tokens of a family are added here, because files differ in
whether they add them:

  CLIP      start, text, end; padded with the end; a long text is cut before the end
  SigLIP    text, end; padded with the end, or with `<pad>` if the vocabulary is Gemma's (SigLIP 2)
  TIPS      text; padded with 0
  bytes     the bytes of UTF-8, each plus 3, end (1); padded with 0: ByT5 (arXiv 2105.13626). It has no file.
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
_MOST_BYTES = documents.MAX_BYTES  # twice the size of the largest known file, of 256,000 tokens
_CLIP_WORDS = (r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
"""Matches the words that CLIP's vocabulary was made for: `it's 42!` is split into `it`, `'s`, `4`, `2` and `!`."""


class _Encoder(NamedTuple):
  """The functions of a tokenizer of any package.

  ids: maps a text to its ids, without special tokens.
  find: maps a token to its id; None if the vocabulary does not have it.
  """
  ids: Callable[[str], list[int]]
  find: Callable[[str], int | None]


class Tokens(NamedTuple):
  """`ids [T, N]` i32, and `mask [T, N]` bool, False for padding."""
  ids: HostArray
  mask: HostArray


class Tokenizer:
  """The tokenizer of a family; maps texts to their `Tokens`. It can be pickled; a copy reads the file again.

  `special` is (start, end, padding): the ids of the special tokens, 0 for those that the family does not have.

  Args:
    path: its file; None for `BYTES`, which has none.
    family: one of `FAMILIES`.
    length: N, the number of ids of a text after it is cut or padded.

  Raises:
    UserError: the file cannot be read, lacks the special tokens of the family, or its package is not installed.
  """

  def __init__(self, path: pathlib.Path | None, *, family: str, length: int) -> None:
    assert family in FAMILIES, family
    self.path, self.family, self.length = path, family, length
    self._encoder = _read(path) if path else _Encoder(
        lambda text: [byte + 3 for byte in text.encode(errors='replace')], lambda token: None)
    start = end = pad = 0
    if family == CLIP:
      start, end = self._find('<|startoftext|>'), self._find('<|endoftext|>')
      pad = end
    elif family == SIGLIP:
      is_gemma = self._encoder.find('<eos>') is not None
      end = self._find('<eos>' if is_gemma else '</s>')
      pad = self._find('<pad>') if is_gemma else end
    elif family == BYTES:
      end = 1
    self.special = start, end, pad

  @property
  def has_end(self) -> bool:
    """Whether a special token follows a text."""
    return self.family != TIPS

  @property
  def digest(self) -> str:
    """Text that is equal for tokenizers that return the same ids: family, length and digest of the file."""
    return f'{self.family} {self.length} {file_digest(self.path)}'

  def check(self, vocabulary: int, setting: str) -> None:
    """Raises UserError, which names `setting`, if the id of a special token is not below the vocabulary's size."""
    if (highest := max(self.special)) >= vocabulary:
      raise UserError(f'{setting}: expected more than {highest:,}, the id of a special token of {self.path}, got '
                      f'{vocabulary:,}. Set it to the number of tokens of the tokenizer.')

  def __getstate__(self) -> dict[str, Any]:
    return {'path': self.path, 'family': self.family, 'length': self.length}

  def __setstate__(self, state: dict[str, Any]) -> None:
    Tokenizer.__init__(self, **state)

  def pieces(self, text: str) -> list[int]:
    """Returns the ids of a text without special tokens, neither cut nor padded."""
    return self._encoder.ids(text)

  def __call__(self, texts: Sequence[str]) -> Tokens:
    """Returns the ids of texts, padded or cut to the length."""
    return frame([self.pieces(text) for text in texts], family=self.family, length=self.length, special=self.special)

  def _find(self, token: str) -> int:
    """Returns the id of a special token. Raises UserError if the file does not have it."""
    token_id = self._encoder.find(token)
    if token_id is None:
      raise UserError(f'{self.path}: expected the tokenizer of a {self.family} model, got one without the token '
                      f'{token}. Use the file that was published with the weights.')
    return token_id


def file_digest(path: pathlib.Path | None) -> str:
  """Returns 16 digits of the SHA-256 of a tokenizer file; None, for `BYTES`, counts as an empty file."""
  return hashlib.sha256(path.read_bytes() if path else b'').hexdigest()[:16]


def open_given(family: str, file: str, *, length: int, source: str) -> Tokenizer:
  """Returns the tokenizer of a family in a file that a user gives; '' for `BYTES`. Raises as `find` and `Tokenizer`."""
  path = None if family == BYTES else find(pathlib.Path(), family, given=file, source=source)
  return Tokenizer(path, family=family, length=length)


def frame(pieces: Sequence[Sequence[int]], *, family: str, length: int, special: tuple[int, int, int]) -> Tokens:
  """Returns the tokens of texts with special tokens, padded or cut to a length.

  Args:
    pieces: ids of each text, without special tokens.
    family: determines which special tokens are added; see the top of this module.
    length: N.
    special: ids of start, end and padding.
  """
  start, end, pad = special
  ids = np.full((len(pieces), length), pad, np.int32)
  mask = np.zeros((len(pieces), length), bool)
  for row, text in enumerate(pieces):
    if family == CLIP:
      text = [start, *text[:length - 2], end]
    elif family != TIPS:
      text = [*text[:length - 1], end]
    text = text[:length]
    ids[row, :len(text)], mask[row, :len(text)] = text, True
  return Tokens(ids, mask)


def find(folder: pathlib.Path, family: str, *, given: str = '', source: str) -> pathlib.Path:
  """Returns the path of the tokenizer file of a family.

  Args:
    folder: that of the weights, in which the file is searched if none is given.
    family: one of `FAMILIES` that have files.
    given: a path of the file or of its folder; '' = none.
    source: name of the weights or the setting, for messages.

  Raises:
    UserError: there is no such file.
  """
  if given:
    path = pathlib.Path(os.path.expanduser(given))
    if path.is_dir():
      existing = [name for name in FILES[family] if (path / name).is_file()]
      path = path / (existing[0] if existing else FILES[family][0])
    if not path.is_file():
      raise UserError(f'tokenizer: expected the tokenizer file of {source}, got {given}, which does not exist. Check '
                      'the path.')
    return path
  for name in FILES[family]:
    if (folder / name).is_file():
      return folder / name
  wanted = ', or '.join(f'{name} and merges.txt' if name == 'vocab.json' else name for name in FILES[family])
  raise UserError(f'tokenizer: expected the tokenizer of {source} beside its weights, got none. Put {wanted} of the '
                  f'published model into {folder}, or set the path of the file.')


def _read(path: pathlib.Path) -> _Encoder:
  """Returns the functions of the tokenizer in a file. Raises UserError as `Tokenizer` does."""
  for file in (path, path.with_name('merges.txt')):
    if file.is_file() and file.stat().st_size > _MOST_BYTES:
      raise UserError(f'{file}: expected a tokenizer of at most {_MOST_BYTES:,} bytes, got {file.stat().st_size:,}. '
                      'Fetch it again.')
  try:
    if path.suffix == '.model':
      return _sentencepiece(path)
    return _tokenizers(path)
  except ModuleNotFoundError as error:
    raise extras.missing(error.name or 'tokenizers', 'text', str(path)) from None
  except UserError:
    raise
  except OSError as error:
    raise failures.unreadable(error, str(path)) from error
  except Exception as error:  # `tokenizers` raises the bare class for a damaged file
    raise UserError(f'{path}: expected a tokenizer, got a damaged file: {ascii(str(error))[1:-1][:200]}. Fetch it '
                    'again.') from error


def _sentencepiece(path: pathlib.Path) -> _Encoder:
  import sentencepiece
  content = path.read_bytes()
  if not content:  # the package would return a processor without a model
    raise ValueError('an empty file')
  model = sentencepiece.SentencePieceProcessor(model_proto=content)

  def find_token(token: str) -> int | None:
    token_id = model.piece_to_id(token)  # that of the unknown token if there is no such token
    return token_id if model.id_to_piece(token_id) == token else None

  return _Encoder(lambda text: list(model.encode(text)), find_token)


def _tokenizers(path: pathlib.Path) -> _Encoder:
  opened = open_file(path)

  def ids(text: str) -> list[int]:
    with _no_panic(path):
      return list(opened.encode(text, add_special_tokens=False).ids)

  return _Encoder(ids, opened.token_to_id)


@contextlib.contextmanager
def _no_panic(path: pathlib.Path) -> Iterator[None]:
  """Raises UserError for a panic of the package `tokenizers`, such as for a pattern that takes too long to match.

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
  """Returns a tokenizer of the package `tokenizers`, which neither pads nor cuts texts. Raises as `_read`."""
  import tokenizers
  try:
    documents.parse(path.read_bytes())
  except ValueError as error:
    raise UserError(f'{path}: expected a tokenizer as JSON, got {error}. Fetch it again.') from None
  with _no_panic(path):
    found: Any = _clip_bpe(path) if path.name == 'vocab.json' else tokenizers.Tokenizer.from_file(str(path))
  found.no_padding()
  found.no_truncation()
  return found


def _clip_bpe(path: pathlib.Path) -> Any:
  """Returns the tokenizer of a vocabulary of CLIP and its merges."""
  from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
  merges = path.with_name('merges.txt')
  if not merges.is_file():
    raise UserError(f'{path}: expected merges.txt beside it, got none. Put that file of the published model there.')
  found = Tokenizer(models.BPE.from_file(str(path), str(merges), continuing_subword_prefix='',
                                         end_of_word_suffix='</w>', unk_token='<|endoftext|>'))
  found.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r'\s+'), ' '),
                                           normalizers.Lowercase()])
  found.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior='removed', invert=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False)])
  return found
