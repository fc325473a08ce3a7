"""Files of the Hugging Face hub, through the package huggingface_hub.

`parse` reads an address `hf://…`, `list_files` lists the files of a revision, `fetch` returns one of the files, and
`upload` writes a commit. Sources of data, loading of weights and `vit-jax push` call these functions. huggingface_hub
reads `HF_TOKEN` and the token of `hf auth login`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`, and keeps files in the
cache that other programs share. Importing huggingface_hub takes 0.2 s, so the import waits until a file is needed.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.core import lazy
from vit_jax.core.errors import TemporaryError, UserError

if TYPE_CHECKING:
  import huggingface_hub
  from huggingface_hub import constants, errors
else:
  huggingface_hub, constants, errors = (
      lazy.Module(name) for name in ('huggingface_hub', 'huggingface_hub.constants', 'huggingface_hub.errors'))

_NAME = re.compile(r'[A-Za-z0-9_](?!.*(?:--|\.\.))[\w.-]{0,95}', re.ASCII)  # of an owner or a repository
_REVISION = re.compile(r'[A-Za-z0-9_](?!.*\.\.)[\w./-]{0,199}', re.ASCII)  # refs/pr/1


class Repository(NamedTuple):
  """A repository of the hub.

  owner, name: as in `hf://OWNER/NAME`.
  revision: a branch, tag or commit.
  kind: `model` or `dataset`.
  """
  owner: str
  name: str
  revision: str = 'main'
  kind: str = 'model'

  def __str__(self) -> str:
    return f'hf://{self.owner}/{self.name}' + (f'@{self.revision}' if self.revision != 'main' else '')

  @property
  def id(self) -> str:
    """The name of the repository in calls of huggingface_hub."""
    return f'{self.owner}/{self.name}'

  @property
  def page(self) -> str:
    """The address of the repository's page."""
    return f'{constants.ENDPOINT}/{"datasets/" if self.kind == "dataset" else ""}{self.owner}/{self.name}'


class NoRepository(UserError):
  """There is no repository of this name, or none that the token may read."""


class _NoAccess(UserError):
  """There is no token, or the token does not permit the request."""


class NoRevision(UserError):
  """The repository has no branch, tag or commit of this name."""


class File(NamedTuple):
  """A file in the cache of the hub.

  path: the path of the file, in the cache's folder for the commit.
  commit: the commit of the repository, in hexadecimal digits.
  is_new: whether this call downloaded the file.
  """
  path: pathlib.Path
  commit: str
  is_new: bool


class Listing(NamedTuple):
  """The commit of a revision, in hexadecimal digits, and the paths of the files in the repository."""
  commit: str
  files: tuple[str, ...]


def parse(text: str, *, kind: str = 'model') -> tuple[Repository, str]:
  """Returns the repository of `OWNER/NAME[@REVISION][/FILE]`, and FILE, which is '' if the text has none.

  Raises:
    UserError: the text is not of this form.
  """
  owner, _, after_owner = text.partition('/')
  if '@' in after_owner.partition('/')[0]:
    name, _, after_name = after_owner.partition('@')
    revision, _, file = after_name.partition('/')
  else:
    name, _, file = after_owner.partition('/')
    revision = 'main'
  if not (_NAME.fullmatch(owner) and _NAME.fullmatch(name) and _REVISION.fullmatch(revision)):
    raise UserError(f'hf://{text}: expected hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME/FILE, got '
                    'other names. Give one such as hf://google/vit-base-patch16-224.')
  return Repository(owner, name, revision, kind), file


@contextlib.contextmanager
def _converted_errors(repository: Repository, *, use: str = 'read') -> Iterator[None]:
  """Raises errors with advice in place of the errors of a request to read or write (`use`) a repository.

  `EntryNotFoundError` is not converted; it says that the repository does not have the file.

  Raises:
    UserError: the repository or the revision does not exist, or may not be read or written with this token.
    TemporaryError: the hub cannot be reached.
  """
  try:
    yield
  except (errors.HTTPError, errors.LocalTokenNotFoundError, ConnectionError, TimeoutError,
          errors.LocalEntryNotFoundError) as error:
    status = getattr(getattr(error, 'response', None), 'status_code', 0)
    tokens = f'{constants.ENDPOINT}/settings/tokens'
    token = ('the token of HF_TOKEN' if os.environ.get('HF_TOKEN') else
             'the token of `hf auth login`' if huggingface_hub.get_token() else 'no token')
    if isinstance(error, errors.GatedRepoError):
      raise UserError(f'{repository}: expected access to this gated {repository.kind}, got status {status or 403} with '
                      f'{token}.\n'
                      f'  1. Sign in at {repository.page} and accept the license there.\n'
                      f'  2. Create a token that may read it at {tokens}.\n'
                      '  3. Run `hf auth login`, or set HF_TOKEN to the token.\n'
                      'Then run the same command again.') from error
    if isinstance(error, errors.RevisionNotFoundError):
      raise NoRevision(f'{repository}: expected a branch, tag or commit of {repository.page}, got '
                       f'{repository.revision!r}. Leave it out for the newest one.') from error
    if isinstance(error, errors.RepositoryNotFoundError):
      raise NoRepository(f'{repository}: expected a {repository.kind} of {constants.ENDPOINT}, got none of this name '
                         f'that can be read with {token}. Check the name. For a private one, run `hf auth login` or '
                         'set HF_TOKEN.') from error
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
      raise
    if status in (401, 403, 404) or isinstance(error, errors.LocalTokenNotFoundError):
      raise _NoAccess(f'{repository}: expected a token that may {use} there, got status {status or 401} with {token}. '
                      f'Create one with {use} access at {tokens}, and run `hf auth login` or set HF_TOKEN.') from error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    raise TemporaryError(f'{repository}: expected an answer of {constants.ENDPOINT}, got "{reason}". Check the '
                         'network, or download the files elsewhere and give the path of their folder.') from error


def fetch(repository: Repository, file: str, *, most_bytes: int, offline: bool = False) -> File | None:
  """Returns a file of a repository, downloaded unless the cache has it; None if there is no such file.

  Args:
    repository: the repository, with the revision to read.
    file: the path of the file in the repository.
    most_bytes: the largest size of a file to download.
    offline: whether only the cache is used, as with `HF_HUB_OFFLINE=1`.

  Raises:
    UserError: the repository does not exist, or may not be read with this token, or the file is too large.
    TemporaryError: the hub cannot be reached, and the cache does not have the file.
  """
  if offline or is_offline():
    return _cached(repository, file)
  request: dict[str, Any] = {'repo_id': repository.id, 'filename': file, 'repo_type': repository.kind,
                             'revision': repository.revision, 'endpoint': constants.ENDPOINT}
  try:
    with _converted_errors(repository):
      metadata = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**request))
      if (metadata.size or 0) > most_bytes:
        raise UserError(f'{repository}/{file}: expected at most {most_bytes:,} bytes, got {metadata.size:,}. Use '
                        'another address.')
      cached = _cached(repository._replace(revision=metadata.commit_hash or repository.revision), file)
      # The download also stores the commit of the revision in the cache, so that the revision is found offline.
      return _file(huggingface_hub.hf_hub_download(**request), is_new=cached is None)
  except errors.EntryNotFoundError:
    return None
  except (TemporaryError, _NoAccess):
    if (cached := _cached(repository, file)) is None:
      raise
    return cached


def _cached(repository: Repository, file: str) -> File | None:
  """Returns a file of a revision from the cache, without a request; None if the cache does not have the file."""
  path = huggingface_hub.try_to_load_from_cache(repository.id, file, repo_type=repository.kind,
                                                revision=repository.revision)
  return _file(path, is_new=False) if isinstance(path, str) else None


def _file(path: str, *, is_new: bool) -> File:
  """Returns the file of the cache at a path `…/models--OWNER--NAME/snapshots/COMMIT/…`."""
  return File(pathlib.Path(path), pathlib.Path(path).relative_to(constants.HF_HUB_CACHE).parts[2], is_new)


def list_files(repository: Repository) -> Listing | None:
  """Returns the commit and the files of a revision, and stores the commit in the cache; None if there is no revision.

  If the hub is not used or cannot be reached, the commit and the files that are in the cache are returned.

  Raises:
    UserError: the repository does not exist, or may not be read with this token.
    TemporaryError: the hub cannot be reached, and the cache does not have the revision.
  """
  folder = pathlib.Path(constants.HF_HUB_CACHE) / f'{repository.kind}s--{repository.owner}--{repository.name}'
  commit_file = folder / 'refs' / repository.revision
  if is_offline():
    return _cached_listing(folder, commit_file)
  try:
    with _converted_errors(repository):
      info = huggingface_hub.HfApi(endpoint=constants.ENDPOINT).repo_info(
          repository.id, repo_type=repository.kind, revision=repository.revision)
  except NoRevision:
    return None
  except (TemporaryError, _NoAccess):
    if (cached := _cached_listing(folder, commit_file)) is None:
      raise
    return cached
  if info.sha != repository.revision:
    with contextlib.suppress(OSError):  # as huggingface_hub does when it downloads a file
      commit_file.parent.mkdir(parents=True, exist_ok=True)
      commit_file.write_text(str(info.sha))
  return Listing(str(info.sha), tuple(file.rfilename for file in getattr(info, 'siblings', None) or ()))


def _cached_listing(folder: pathlib.Path, commit_file: pathlib.Path) -> Listing | None:
  """Returns the commit and the files of a revision from the cache; None if the cache has no files of the revision.

  `folder` is the repository's folder in the cache. `commit_file` has the commit; without it, its name is the commit.
  """
  commit = commit_file.read_text().strip() if commit_file.is_file() else commit_file.name
  snapshot = folder / 'snapshots' / commit
  if not commit or not snapshot.is_dir():
    return None
  files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob('*') if path.is_file()]
  return Listing(commit, tuple(sorted(files)))


def upload(repository: Repository, folder: pathlib.Path, *, private: bool, message: str) -> str:
  """Uploads the files of a folder as one commit, and returns the address of the repository.

  Args:
    repository: the repository, which is created if it does not exist.
    folder: the folder with the files.
    private: whether a new repository is private.
    message: the message of the commit.

  Raises:
    UserError: there is no token, or the token does not permit writing.
    TemporaryError: the hub cannot be reached.
  """
  if is_offline():
    raise UserError(f'{repository}: expected a network, as the files are uploaded, got HF_HUB_OFFLINE=1. Unset it.')
  api = huggingface_hub.HfApi(endpoint=constants.ENDPOINT)
  with _converted_errors(repository, use='write'):
    api.create_repo(repository.id, repo_type=repository.kind, private=private, exist_ok=True)
    api.upload_folder(repo_id=repository.id, folder_path=folder, repo_type=repository.kind, commit_message=message)
  return repository.page


def is_offline() -> bool:
  """Returns whether `HF_HUB_OFFLINE=1` forbids requests to the hub."""
  return bool(constants.HF_HUB_OFFLINE)


def remove(file: File) -> None:
  """Removes a file from the cache: the link at its path, and the content to which the link leads."""
  file.path.resolve().unlink(missing_ok=True)
  file.path.unlink(missing_ok=True)
