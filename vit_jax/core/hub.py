"""Files of the Hugging Face hub, through the package huggingface_hub.

The package reads `HF_TOKEN` and the token of `hf auth login`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`, and keeps
files in the cache that other programs share. It takes 0.2 s to import, so it is imported when a file is needed.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import re
from typing import TYPE_CHECKING, NamedTuple

from vit_jax.core import lazy
from vit_jax.core.errors import TemporaryError, UserError

if TYPE_CHECKING:
  import huggingface_hub
  from huggingface_hub import constants, errors
else:
  huggingface_hub, constants, errors = (
      lazy.Module(name) for name in ('huggingface_hub', 'huggingface_hub.constants', 'huggingface_hub.errors'))

_PART = re.compile(r'[A-Za-z0-9_](?!.*(?:--|\.\.))[\w.-]{0,95}', re.ASCII)
_REVISION = re.compile(r'[A-Za-z0-9_](?!.*\.\.)[\w./-]{0,199}', re.ASCII)


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
  def page(self) -> str:
    """The address of its page."""
    return f'{constants.ENDPOINT}/{"datasets/" if self.kind == "dataset" else ""}{self.owner}/{self.name}'


class NoRepository(UserError):
  """There is no repository of this name, or none that the token may read."""


class File(NamedTuple):
  """A file in the cache of the hub.

  path: of the file, in a folder of its commit.
  commit: of the repository, in hexadecimal digits.
  is_new: whether it was downloaded now.
  """
  path: pathlib.Path
  commit: str
  is_new: bool


def parse(text: str, *, kind: str = 'model') -> tuple[Repository, str]:
  """Returns the repository of `OWNER/NAME[@REVISION][/FILE]`, and the file, or ''.

  Raises:
    UserError: it is not of this form.
  """
  owner, _, rest = text.partition('/')
  if '@' in rest.partition('/')[0]:
    name, _, rest = rest.partition('@')
    revision, _, file = rest.partition('/')
  else:
    name, _, file = rest.partition('/')
    revision = 'main'
  if not (_PART.fullmatch(owner) and _PART.fullmatch(name) and _REVISION.fullmatch(revision)):
    raise UserError(f'hf://{text}: expected hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME/FILE, got '
                    'other names. Give one such as hf://google/vit-base-patch16-224.')
  return Repository(owner, name, revision, kind), file


def fetch(repository: Repository, file: str, *, most_bytes: int, offline: bool = False) -> File | None:
  """Returns a file of a repository, downloaded unless the cache has it; None if there is no such file.

  Args:
    repository: of the file.
    file: its path in the repository.
    most_bytes: the largest size of a file to download.
    offline: whether only the cache is used, as with `HF_HUB_OFFLINE=1`.

  Raises:
    UserError: the repository does not exist, or may not be read with this token, or the file is too large.
    TemporaryError: the hub cannot be reached, and the cache does not have the file.
  """
  if offline or is_offline():
    return _cached(repository, file)
  repo, kind, revision = f'{repository.owner}/{repository.name}', repository.kind, repository.revision
  try:
    found = huggingface_hub.get_hf_file_metadata(
        huggingface_hub.hf_hub_url(repo, file, repo_type=kind, revision=revision, endpoint=constants.ENDPOINT))
    if (found.size or 0) > most_bytes:
      raise UserError(f'{repository}/{file}: expected at most {most_bytes:,} bytes, got {found.size:,}. Use another '
                      'address.')
    known = _cached(repository._replace(revision=found.commit_hash or revision), file)
    # This also stores which commit the revision is, so that it is found offline.
    path = huggingface_hub.hf_hub_download(repo, file, repo_type=kind, revision=revision, endpoint=constants.ENDPOINT)
    return File(pathlib.Path(path), _commit(pathlib.Path(path)), is_new=known is None)
  except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
    raise _refused(repository, error) from error
  except errors.LocalEntryNotFoundError as error:  # a kind of EntryNotFoundError, but the hub did not answer
    raise _unreachable(repository, error) from error
  except errors.EntryNotFoundError:
    return None
  except (errors.HTTPError, ConnectionError, TimeoutError) as error:
    if (known := _cached(repository, file)) is not None:
      return known
    raise _unreachable(repository, error) from error


class Listing(NamedTuple):
  """The commit of a revision, in hexadecimal digits, and the names of its files."""
  commit: str
  files: tuple[str, ...]


def find(repository: Repository) -> Listing | None:
  """Returns the commit and the files of a revision, which is kept in the cache; None if there is no such revision.

  Where the hub is not used or cannot be reached, these are the commit and the files that the cache has.

  Raises:
    UserError: the repository does not exist, or may not be read with this token.
    TemporaryError: the hub cannot be reached, and the cache does not have the revision.
  """
  if is_offline():
    return _cached_listing(repository)
  try:
    found = huggingface_hub.HfApi(endpoint=constants.ENDPOINT).repo_info(
        f'{repository.owner}/{repository.name}', repo_type=repository.kind, revision=repository.revision)
  except errors.RevisionNotFoundError:
    return None
  except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
    raise _refused(repository, error) from error
  except (errors.HTTPError, ConnectionError, TimeoutError) as error:
    if (known := _cached_listing(repository)) is not None:
      return known
    raise _unreachable(repository, error) from error
  if found.sha != repository.revision:
    with contextlib.suppress(OSError):  # as the package does when it downloads a file
      place = _cache_folder(repository) / 'refs' / repository.revision
      place.parent.mkdir(parents=True, exist_ok=True)
      place.write_text(str(found.sha))
  return Listing(str(found.sha), tuple(one.rfilename for one in getattr(found, 'siblings', None) or ()))


def list_files(repository: Repository) -> list[str]:
  """Returns the names of all files of a repository.

  Raises:
    TemporaryError: the hub cannot be reached.
  """
  try:
    found = huggingface_hub.HfApi(endpoint=constants.ENDPOINT).repo_info(
        f'{repository.owner}/{repository.name}', repo_type=repository.kind, revision=repository.revision)
    return [one.rfilename for one in getattr(found, 'siblings', None) or ()]
  except (errors.HTTPError, ConnectionError, TimeoutError) as error:
    raise _unreachable(repository, error) from error


def upload(repository: Repository, folder: pathlib.Path, *, private: bool, message: str) -> str:
  """Uploads the files of a folder as one commit, and returns the address of the repository.

  Args:
    repository: created if it does not exist.
    folder: of the files.
    private: whether a new repository is private.
    message: of the commit.

  Raises:
    UserError: there is no token, or it may not write there.
    TemporaryError: the hub cannot be reached.
  """
  if is_offline():
    raise UserError(f'{repository}: expected a network, as the files are uploaded, got HF_HUB_OFFLINE=1. Unset it.')
  api, repo = huggingface_hub.HfApi(endpoint=constants.ENDPOINT), f'{repository.owner}/{repository.name}'
  try:
    api.create_repo(repo, repo_type=repository.kind, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=folder, repo_type=repository.kind, commit_message=message)
  except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
    status = getattr(getattr(error, 'response', None), 'status_code', 401)
    if status in (401, 403, 404):
      raise UserError(f'{repository}: expected a token that may write there, got status {status} with '
                      f'{_whose_token()}. Create one with write access at {constants.ENDPOINT}/settings/tokens, and '
                      'run `hf auth login` or set HF_TOKEN.') from error
    raise _unreachable(repository, error) from error
  except (errors.HTTPError, ConnectionError, TimeoutError) as error:
    raise _unreachable(repository, error) from error
  return repository.page


def is_offline() -> bool:
  """Returns whether the hub is not used: `HF_HUB_OFFLINE=1`."""
  return bool(constants.HF_HUB_OFFLINE)


def remove(file: File) -> None:
  """Removes a file from the cache, with its content."""
  file.path.resolve().unlink(missing_ok=True)
  file.path.unlink(missing_ok=True)


def _cached(repository: Repository, file: str) -> File | None:
  found = huggingface_hub.try_to_load_from_cache(f'{repository.owner}/{repository.name}', file,
                                                 repo_type=repository.kind, revision=repository.revision)
  return File(pathlib.Path(found), _commit(pathlib.Path(found)), is_new=False) if isinstance(found, str) else None


def _cache_folder(repository: Repository) -> pathlib.Path:
  return pathlib.Path(constants.HF_HUB_CACHE) / f'{repository.kind}s--{repository.owner}--{repository.name}'


def _cached_listing(repository: Repository) -> Listing | None:
  """Returns the commit and the files that the cache has of a revision; None if it has none."""
  folder, commit = _cache_folder(repository), repository.revision
  with contextlib.suppress(OSError):
    commit = (folder / 'refs' / repository.revision).read_text().strip()
  if not commit or not (snapshot := folder / 'snapshots' / commit).is_dir():
    return None
  return Listing(commit, tuple(sorted(
      path.relative_to(snapshot).as_posix() for path in snapshot.rglob('*') if path.is_file())))


def _refused(repository: Repository, error: Exception) -> UserError:
  """Returns the error about a repository that may not be read, or that is not there."""
  if isinstance(error, errors.GatedRepoError):
    return UserError(_gated(repository, error))
  if isinstance(error, errors.RevisionNotFoundError):
    return UserError(f'{repository}: expected a branch, tag or commit of {repository.page}, got '
                     f'{repository.revision!r}. Leave it out for the newest one.')
  return NoRepository(f'{repository}: expected a {repository.kind} of {constants.ENDPOINT}, got none of this name '
                      f'that can be read with {_whose_token()}. Check the name. For a private one, run `hf auth '
                      'login` or set HF_TOKEN.')


def _commit(path: pathlib.Path) -> str:
  """Returns the commit of a file of the cache, `…/models--OWNER--NAME/snapshots/COMMIT/…`."""
  return path.relative_to(constants.HF_HUB_CACHE).parts[2]


def _gated(repository: Repository, error: Exception) -> str:
  """Returns the message about a repository whose license must be accepted: its page and the three steps."""
  status = getattr(getattr(error, 'response', None), 'status_code', 403)
  return (f'{repository}: expected access to this gated {repository.kind}, got status {status} with '
          f'{_whose_token()}.\n'
          f'  1. Sign in at {repository.page} and accept the license there.\n'
          f'  2. Create a token that may read it at {constants.ENDPOINT}/settings/tokens.\n'
          '  3. Run `hf auth login`, or set HF_TOKEN to the token.\n'
          'Then run the same command again.')


def _whose_token() -> str:
  if os.environ.get('HF_TOKEN'):
    return 'the token of HF_TOKEN'
  return 'the token of `hf auth login`' if huggingface_hub.get_token() else 'no token'


def _unreachable(repository: Repository, error: Exception) -> TemporaryError:
  reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
  return TemporaryError(f'{repository}: expected an answer of {constants.ENDPOINT}, got "{reason}". Check the network, '
                        'or download the files elsewhere and give the path of their folder.')
