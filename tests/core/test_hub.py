"""Files of the hub: tokens, gated and private repositories, revisions, the cache, offline mode."""
from __future__ import annotations

import pathlib
import types
from collections.abc import Iterator
from typing import Any

import hubs
import pytest

from vit_jax.core import hub
from vit_jax.core.errors import TemporaryError, UserError

MOST = 1000


@pytest.fixture
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
  monkeypatch.delenv('HF_TOKEN', raising=False)
  with hubs.running(tmp_path / 'home') as found:
    found.repos['o/m'] = hubs.Repo({'a.txt': b'first', 'sub/b.txt': b'second'})
    found.repos['datasets/o/d'] = hubs.Repo({'data/x.parquet': b'rows'})
    yield found


def fetch(text: str, *, kind: str = 'model', offline: bool = False) -> hub.File | None:
  repository, file = hub.parse(text, kind=kind)
  return hub.fetch(repository, file, most_bytes=MOST, offline=offline)


@pytest.mark.parametrize(('text', 'found'), [
    ('google/vit', ('google', 'vit', 'main', '')), ('o/m/a/b.npz', ('o', 'm', 'main', 'a/b.npz')),
    ('o/m@v1.0', ('o', 'm', 'v1.0', '')), ('o/m@abc123/a@b.npz', ('o', 'm', 'abc123', 'a@b.npz'))])
def test_an_address_names_a_repository_a_revision_and_a_file(text: str, found: tuple[str, ...]) -> None:
  repository, file = hub.parse(text)
  assert (repository.owner, repository.name, repository.revision, file) == found


@pytest.mark.parametrize('text', ['o', '../m', 'o/..', 'a--b/c', 'o/m@', 'o/m@../x', 'o/m\0', 'o/m@-x', ' /m'])
def test_other_addresses_are_refused(text: str) -> None:
  with pytest.raises(UserError, match='^hf://.*expected hf://OWNER/NAME, hf://OWNER/NAME@REVISION'):
    hub.parse(text)


def test_a_file_is_downloaded_once_and_found_offline(server: hubs.Hub, tmp_path: pathlib.Path) -> None:
  found = fetch('o/m/sub/b.txt')
  assert found is not None and found.path.read_bytes() == b'second' and found.is_new and found.commit == hubs.COMMIT
  assert found.path.is_relative_to(tmp_path / 'home' / 'hub') and found.path.name == 'b.txt'
  again = fetch('o/m/sub/b.txt')
  assert again == found._replace(is_new=False) == fetch('o/m/sub/b.txt', offline=True)
  assert [(method, path) for method, path, _ in server.asked if method == 'GET'
          and 'resolve' in path] == [('GET', '/o/m/resolve/main/sub/b.txt')], server.asked
  assert fetch('o/m/none.txt') is None and fetch('o/m/a.txt', offline=True) is None
  data = fetch('o/d/data/x.parquet', kind='dataset')
  assert data is not None and data.path.read_bytes() == b'rows'


def test_without_an_answer_the_cache_is_used_and_otherwise_the_command_may_be_repeated(server: hubs.Hub) -> None:
  found = fetch('o/m/a.txt')
  assert found is not None
  server.broken = True
  assert fetch('o/m/a.txt') == found._replace(is_new=False)
  with pytest.raises(TemporaryError, match=f'^hf://o/m: expected an answer of {server.address}, got "'):
    fetch('o/m/sub/b.txt')


def test_what_the_cache_has_is_used_where_a_token_may_not_read_it(
    server: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
  found = fetch('o/m/a.txt')
  assert found is not None

  def refuse(*_: object, **__: object) -> None:
    answer: Any = types.SimpleNamespace(status_code=403, headers={}, request=None)
    raise hub.errors.HfHubHTTPError('403 Forbidden', response=answer)
  monkeypatch.setattr(hub.huggingface_hub, 'get_hf_file_metadata', refuse)
  assert fetch('o/m/a.txt') == found._replace(is_new=False)
  with pytest.raises(UserError, match='expected a token that may read there, got status 403'):
    fetch('o/m/sub/b.txt')


def test_a_gated_model_names_its_page_and_the_three_steps(server: hubs.Hub, monkeypatch: pytest.MonkeyPatch,
                                                          tmp_path: pathlib.Path) -> None:
  server.repos['o/gated'] = hubs.Repo({'a.txt': b'x'}, gated=True)
  steps = (f'\n  1. Sign in at {server.address}/o/gated and accept the license there.\n'
           f'  2. Create a token that may read it at {server.address}/settings/tokens.\n'
           '  3. Run `hf auth login`, or set HF_TOKEN to the token.\nThen run the same command again.')
  for token, got in (('', 'status 401 with no token'), ('hf_other', 'status 403 with the token of HF_TOKEN')):
    monkeypatch.setenv('HF_TOKEN', token)
    with pytest.raises(UserError) as caught:
      fetch('o/gated/a.txt')
    assert str(caught.value) == f'hf://o/gated: expected access to this gated model, got {got}.{steps}'
  monkeypatch.setenv('HF_TOKEN', hubs.TOKEN)
  assert fetch('o/gated/a.txt') is not None
  monkeypatch.delenv('HF_TOKEN')
  (tmp_path / 'home' / 'token').write_text('hf_mine')  # `hf auth login` writes it
  server.accepted = {'hf_mine'}
  server.repos['o/hidden'] = hubs.Repo({'a.txt': b'x'}, private=True)
  assert fetch('o/hidden/a.txt') is not None and server.asked[-1][2] == 'hf_mine'


def test_a_token_is_in_no_message(server: hubs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HF_TOKEN', 'hf_secret')
  with pytest.raises(UserError, match='expected a model of .* can be read with the token of HF_TOKEN') as caught:
    fetch('o/unknown/a.txt')
  assert 'hf_secret' not in str(caught.value) and server.asked[-1][2] == 'hf_secret'


def test_a_revision_must_exist(server: hubs.Hub) -> None:
  assert fetch(f'o/m@{hubs.COMMIT}/a.txt') is not None
  with pytest.raises(UserError, match="hf://o/m@v9: expected a branch, tag or commit of .*/o/m, got 'v9'"):
    fetch('o/m@v9/a.txt')


def test_a_file_that_is_too_large_is_not_downloaded(server: hubs.Hub) -> None:
  server.repos['o/m'].files['a.txt'] = bytes(MOST + 1)
  with pytest.raises(UserError, match='hf://o/m/a.txt: expected at most 1,000 bytes, got 1,001'):
    fetch('o/m/a.txt')
  assert 'GET' not in [method for method, _, _ in server.asked]
