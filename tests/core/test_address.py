"""What looks like an address but is none is refused; everything else is a path or an address."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax import main
from vit_jax.core import address
from vit_jax.core.errors import UserError
from vit_jax.data import user_files
from vit_jax.record import destination, storage
from vit_jax.weights import addresses

ALMOST = ('gs:/b/x', 'gs//b/x', 'gs:b/x', 'GS:/b/x', 'gs:///b/x', 'gs:://b/x', 'gs;//b/x', 's3:/b/x', 'hf:owner/x',
          'https:/h/x', 'http//h/x', 'file:/b/x', 'Gcs//b')


@pytest.mark.parametrize('text', ALMOST)
def test_what_is_almost_an_address_is_refused_everywhere(text: str) -> None:
  for read in (lambda: address.check(text, '--workdir'), lambda: storage.open_path(text),
               lambda: user_files.resolve(text, 'folder:PATH'), lambda: destination.checked(text)):
    with pytest.raises(UserError, match=r'expected a path, or an address such as \w+://NAME/PATH, got .*Write \w+://'):
      read()


@pytest.mark.parametrize('text', ['gs:/b/x', 'gs//b/x'])
def test_weights_have_no_such_names(text: str) -> None:
  with pytest.raises(UserError, match='expected a path, or an address such as gs://NAME/PATH'):
    addresses.local(text)


@pytest.mark.parametrize('text', ['runs/x', './gs//b', '/gs:/b', 'gs://b/x', 'gs', 'a b:/x', 'C:/x', 'runs//x',
                                  'gsx//b', '~/x', '..//gs:/'])
def test_paths_and_addresses_are_accepted(text: str) -> None:
  address.check(text, '--workdir')


@pytest.mark.parametrize('words', [
    ['train', '--config=digits', '--workdir=gs:/b/x'], ['train', '--config=digits', '--workdir=gs//b/x'],
    ['study', '--config=digits', '--workdir=gs:b'], ['report', '--workdir=runs/a,gs//b/x'],
    ['average', '--workdir=a', '--to=gs:/b', '--last=2'], ['convert', '--weights=a', '--to=gs//b/x.npz'],
    ['predict', '--weights=gs//b/x.npz', __file__], ['prepare', '--to=gs:/b', '--data=folder:.']])
def test_flags_are_refused_before_anything_is_made(
    words: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
  monkeypatch.chdir(tmp_path)
  assert main.run(words) == 2
  said = capsys.readouterr().err
  assert 'expected a path, or an address such as gs://NAME/PATH' in said
  assert '--' in said or 'weights:' in said  # names the flag
  assert 'error: path:' not in said
  assert not list(tmp_path.iterdir())
