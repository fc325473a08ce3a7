"""Addresses in place of folders, and errors of the operating system."""
from __future__ import annotations

import errno
import shlex

import pytest

from vit_jax.config import schema
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data import user_files
from vit_jax.data.formats import folder, tfds


def commands(where: str) -> list[str]:
  """The command lines that are offered for an address."""
  with pytest.raises(UserError) as caught:
    user_files.resolve(where, 'data.source')
  text = str(caught.value)
  assert text.startswith(f'data.source: expected a folder of this machine, got the address {where}.')
  return [line.strip() for line in text.splitlines() if line.startswith('  ')]


def test_google_storage_is_refused_with_the_commands_that_mount_and_copy_it() -> None:
  mount, copy, launcher, direct = commands('gs://b/sets/my set/')
  assert shlex.split(mount)[-3:] == ['--only-dir=sets/my set', 'b', '/data'] and '--cache-dir=/cache' in mount
  assert shlex.split(copy) == ['gcloud', 'storage', 'rsync', '--recursive', 'gs://b/sets/my set', '/data']
  assert '--data=gs://BUCKET/FOLDER' in launcher and direct.startswith('array_record:gs://BUCKET/FOLDER')
  assert '--only-dir' not in commands('gs://b')[0]


def test_other_storage_has_its_own_commands() -> None:
  mount, copy, *_ = commands('s3://b/x')
  assert mount == 'mount-s3 --read-only --cache=/cache --prefix=x/ b /data' and copy == 'aws s3 sync s3://b/x /data'
  with pytest.raises(UserError, match='Copy it to a folder'):
    user_files.resolve('hdfs://host/x', 'data.source')


def test_other_kinds_of_sources_refuse_an_address() -> None:
  for opened in (lambda: folder.opener('gs://b/x', schema.Data(), (8, 8)),
                 lambda: tfds.opener('cars', schema.Data(data_dir='gs://b/x'), (8, 8))):
    with pytest.raises(UserError, match='got the address gs://b/x. Mount it with a cache'):
      opened()


def test_prepared_datasets_are_located_in_buckets_and_folders(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', '/home/me')
  found = [user_files.locate(where, 'x') for where in ('gs://b/x/', 's3://b', '~/x')]
  assert found == ['gs://b/x', 's3://b', '/home/me/x']
  for where in ('gs://', 'gs:///x', 'hdfs://b/x', 'gs:/b/x'):
    with pytest.raises(UserError, match='^x: expected'):
      user_files.locate(where, 'x')


def test_paths_become_absolute_and_the_home_folder_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', '/home/me')
  assert user_files.resolve('~/x', 'data.source') == '/home/me/x'


def test_errors_of_the_system_say_what_to_do() -> None:
  error = failures.unreadable(OSError(errno.ENOTCONN, 'x', '/mnt/a'), 'image 3')
  assert 'image 3 (/mnt/a): expected to read it' in str(error) and 'Mount it again' in str(error)
