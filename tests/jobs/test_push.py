"""Weights are published on a hub with a card, in formats that come back without a difference."""
from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import hubs
import loaded
import numpy as np
import pytest

import vit_jax
from vit_jax import main
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.jobs import push
from vit_jax.record import checkpoint_files
from vit_jax.weights import saving


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
  monkeypatch.setenv('HF_TOKEN', hubs.TOKEN)
  with hubs.running(tmp_path / 'home') as found:
    yield found


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
  saving.save(loaded.weights('vit')._replace(class_names=()), str(tmp_path / 'net.safetensors'))
  return tmp_path / 'net.safetensors'


def begin_run(folder: pathlib.Path, *, source: str = '') -> pathlib.Path:
  """A run directory as the end of training leaves it, with weights of its own or made from `source`."""
  saving.save(loaded.weights('vit'), str(folder), family='run')
  (folder / saving.REPORT).unlink()  # only conversion writes it
  if source:
    write_origins(folder, init_from=source)
  command = ['/x/vit-jax', 'train', '--config=digits', '--workdir=/home/me/runs/a', '--config.length=4 steps']
  start = {'event': 'start', 'time_s': 0., 'command': command, 'commit': 'abc',
           'machine': {'versions': dict.fromkeys(('vit_jax', 'jax', 'jaxlib', 'flax', 'optax'), '1.0')}}
  (folder / 'metrics.jsonl').write_text(f'{json.dumps(start)}\n{json.dumps({"step": 0, "test/top1": .5})}\n')
  (folder / 'final.json').write_text(json.dumps({'params_digest': 'd1ge57', 'metrics': {'test/top1': .25}}))
  return folder


def write_origins(run: pathlib.Path, **sources: str) -> None:
  """Writes `init.json` with the weights that a run began with."""
  (run / 'init.json').write_text(json.dumps({name: {'source': source} for name, source in sources.items()}))


def publish_license(hub: hubs.Hub, name: str, license: str) -> str:
  """Puts a repository with a card on the hub, and returns its address."""
  hub.repos[name] = hubs.Repo({'README.md': f'---\nlicense: {license}\n---\n'.encode()})
  return f'hf://{name}'


def test_a_run_is_published_in_each_format_and_loaded_from_the_hub(hub: hubs.Hub, tmp_path: pathlib.Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
  run = begin_run(tmp_path / 'run')
  wanted = trees.digest(vit_jax.load(run).functional()[0])
  image = np.random.default_rng(0).integers(0, 256, (*loaded.PX, 3), np.uint8)
  for family, file in (('huggingface', 'model.safetensors'), ('timm', 'config.json'), ('run', 'config.json')):
    assert main.run(['push', f'--weights={run}', f'--to=hf://me/{family}', f'--family={family}', '--private']) == 0
    assert f'Published: {hub.address}/me/{family}\n' in capsys.readouterr().out
    repo = hub.repos[f'me/{family}']
    assert repo.private and file in repo.files and hub.commits[-1] == (f'me/{family}', 'Weights written by vit_jax')
    model = vit_jax.load(f'hf://me/{family}')
    assert trees.digest(model.functional()[0]) == wanted
    np.testing.assert_array_equal(model.logits(image), vit_jax.load(run).logits(image))
    assert not [name for name, content in repo.files.items() if str(tmp_path).encode() in content], family


def test_the_card_has_results_the_command_and_the_digest(hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  run = begin_run(tmp_path / 'run')
  digest = checkpoint_files.read_meta(run / 'checkpoints' / '0')['digests']['params']
  assert main.run(['push', f'--weights={run}', '--to=hf://me/mine', '--license=mit']) == 0
  card = hub.repos['me/mine'].files['README.md'].decode()
  for text in ('license: "mit"', '# mine\n', "vit-jax train --config=digits '--config.length=4 steps'\n", digest,
               'commit `abc`', '| test/top1 | 0.5000 |', "from_pretrained('me/mine')", "vit_jax.load('hf://me/mine')",
               '\nmit, as stated by the publisher.\n'):
    assert text in card, text
  assert '/home/me' not in card
  words = ['push', f'--weights={tmp_path / "run"}', '--to=hf://me/t', '--family=timm', '--license=My License']
  assert main.run(words) == 0
  card = hub.repos['me/t'].files['README.md'].decode()
  assert "timm.create_model('hf-hub:me/t', pretrained=True)" in card
  assert 'license: "other"\nlicense_name: "My License"' in card


def test_weights_of_others_need_an_open_license_or_a_stated_one(hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  for number, (license, is_open) in enumerate((('apache-2.0', True), ('cc-by-4.0', True), ('cc-by-nc-4.0', False),
                                               ('other', False), ('', False))):
    page = f'---\nlicense: {license}\nlicense_name: dinov3-license\n---\n'.encode() if license else b''
    hub.repos[f'base/m{number}'] = hubs.Repo({'README.md': page})
    run = begin_run(tmp_path / f'run{number}', source=f'hf://base/m{number}')
    if is_open:
      assert push.find_license(str(run)) == license
      continue
    shown = 'dinov3-license' if license == 'other' else license or 'not known'
    with pytest.raises(UserError, match=f'--license: expected .* from hf://base/m{number}, whose license is {shown}. '):
      push.find_license(str(run))
    assert main.run(['push', f'--weights={run}', f'--to=hf://me/x{number}']) == 2
    assert f'me/x{number}' not in hub.repos
  assert main.run(['push', f'--weights={run}', '--to=hf://me/stated', '--license=cc-by-nc-4.0']) == 0
  assert b'license: "cc-by-nc-4.0"' in hub.repos['me/stated'].files['README.md']
  assert push.find_license('ViT-B_16-i21k') == 'Apache-2.0'
  (tmp_path / 'net.safetensors').touch()
  with pytest.raises(UserError, match='made from net.safetensors, whose license is not known'):
    push.find_license(str(tmp_path / 'net.safetensors'))


def test_a_checkpoint_of_a_run_has_the_license_of_the_run(
    hub: hubs.Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  run = begin_run(tmp_path / 'run')
  assert main.run(['push', f'--weights={run}/checkpoints/0', '--to=hf://me/scratch']) == 0
  assert push.find_license(f'{run}/checkpoints/0') == ''
  child = begin_run(tmp_path / 'child', source=f'{run}/checkpoints/0')
  assert push.find_license(str(child)) == ''
  write_origins(run, init_from=publish_license(hub, 'base/mit', 'mit'))
  assert push.find_license(str(child)) == 'mit'
  monkeypatch.setenv('HOME', str(tmp_path))  # shells leave ~ as it is in --weights=~/run
  write_origins(child, init_from='~/run')
  assert push.find_license('~/child') == 'mit' and push.find_license('~/child/checkpoints/0') == 'mit'


def test_the_card_of_a_run_below_the_home_directory_has_its_results(
    hub: hubs.Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  begin_run(tmp_path / 'run')
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setenv('HF_HOME', str(tmp_path / 'hub'))
  assert main.run(['push', '--weights=~/run', '--to=hf://me/mine']) == 0
  card = hub.repos['me/mine'].files['README.md'].decode()
  assert '| test/top1 | 0.5000 |' in card and '`run` (format' in card and '~' not in card


def test_every_entry_of_the_weights_that_a_run_began_with_needs_an_open_license(
    hub: hubs.Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  run = begin_run(tmp_path / 'run')
  mit, apache, closed = (publish_license(hub, f'base/{name}', name) for name in ('mit', 'apache-2.0', 'cc-by-nc-4.0'))
  write_origins(run, teacher=mit)  # a student that began with random numbers
  assert push.find_license(str(run)) == 'mit'
  for name in ('teacher', 'gram', 'text'):
    write_origins(run, init_from=mit, **{name: closed})
    with pytest.raises(UserError, match=f'--license: .* made from {closed}, whose license is cc-by-nc-4.0. '):
      push.find_license(str(run))
  write_origins(run, init_from=mit, teacher=apache)
  said = f'--license: .* made from weights with several: {mit} .mit., {apache} .apache-2.0.'
  with pytest.raises(UserError, match=said):
    push.find_license(str(run))
  write_origins(run, init_from=apache, teacher='ViT-B_16-i21k')  # whose license is written Apache-2.0
  assert push.find_license(str(run)) == 'apache-2.0'


def test_teachers_that_labeled_images_need_an_open_license(hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  run, closed = begin_run(tmp_path / 'run'), publish_license(hub, 'base/closed', 'cc-by-nc-4.0')
  config = json.loads((run / 'config.json').read_text())
  (tmp_path / 'maps').mkdir()
  (tmp_path / 'maps' / 'info.json').write_text(json.dumps({'made': {'weights': closed}}))
  for change, shown in (({'data': {'pseudo': {'teacher': closed}}}, f'{closed}, whose license is cc-by-nc-4.0'),
                        ({'objective': {'maps': f'{tmp_path}/maps'}}, f'{closed}, whose license is cc-by-nc-4.0'),
                        ({'objective': {'maps': '~nobody/maps'}}, '~nobody/maps, whose license is not known')):
    (run / 'config.json').write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=f'--license: .* made from {shown}'):
      push.find_license(str(run))
  write_origins(run, teacher=publish_license(hub, 'base/mit', 'mit'))
  (run / 'config.json').write_text(json.dumps(config | {'data': {'pseudo': {'teacher': 'hf://base/mit'}}}))
  assert push.find_license(str(run)) == 'mit'


def test_runs_that_began_with_each_other_are_no_endless_search(hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  run = begin_run(tmp_path / 'a', source=str(tmp_path / 'b'))
  begin_run(tmp_path / 'b', source=str(run))  # under the name of an earlier run
  assert push.find_license(str(run)) == ''


def test_a_run_that_conversion_wrote_has_the_license_of_its_source(hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  saving.save(loaded.weights('vit'), str(tmp_path / 'run'), family='run', with_card=True)
  with pytest.raises(UserError, match='made from run, whose license is not known'):
    push.find_license(f'{tmp_path}/run')
  card = (tmp_path / 'run' / 'README.md').read_text()
  (tmp_path / 'run' / 'README.md').write_text(card.replace('license: "other"', 'license: "mit"'))
  assert push.find_license(f'{tmp_path}/run') == push.find_license(f'{tmp_path}/run/checkpoints/0') == 'mit'


def test_weights_whose_repository_is_gone_have_a_license_that_is_not_known(
    hub: hubs.Hub, tmp_path: pathlib.Path) -> None:
  run = begin_run(tmp_path / 'run', source='hf://gone/model')
  with pytest.raises(UserError, match='--license: .* made from hf://gone/model, whose license is not known'):
    push.find_license(str(run))


@pytest.mark.parametrize(('name', 'family'), [('vit.bin', 'timm'), ('vit.pt', 'huggingface'), ('vit.npz', 'run')])
def test_the_name_of_a_repository_chooses_no_format(name: str, family: str, hub: hubs.Hub,
                                                    file: pathlib.Path) -> None:
  words = ['push', f'--weights={file}', '--model=heads=4', '--license=mit', f'--to=hf://me/{name}']
  assert main.run([*words, f'--family={family}']) == 0
  assert {'config.json', 'README.md'} <= hub.repos[f'me/{name}'].files.keys()


def test_the_card_of_a_person_stays(hub: hubs.Hub, file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  hub.repos['me/mine'] = hubs.Repo({'README.md': b'Mine.'})
  words = ['push', f'--weights={file}', '--model=heads=4', '--license=mit', '--to=hf://me/mine']
  assert main.run(words) == 0
  assert hub.repos['me/mine'].files['README.md'] == b'Mine.' and 'model.safetensors' in hub.repos['me/mine'].files
  assert 'is unchanged' in capsys.readouterr().out
  hub.repos['me/mine'].files.pop('README.md')
  for text in ('bsd', 'mit'):  # one that this job wrote is replaced
    assert main.run([*(word for word in words if 'license' not in word), f'--license={text}']) == 0
  assert b'license: "mit"' in hub.repos['me/mine'].files['README.md']


def test_a_token_that_may_write_is_needed(hub: hubs.Hub, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
  words = ['push', f'--weights={file}', '--model=heads=4', '--license=mit', '--to=hf://me/mine']
  for token, shown in (('hf_reader', 'status 401 with the token of HF_TOKEN'), ('', 'status 401 with no token')):
    monkeypatch.setenv('HF_TOKEN', token)
    assert main.run(words) == 2
    assert f'expected a token that may write there, got {shown}' in capsys.readouterr().err
  hub.broken = True
  monkeypatch.setenv('HF_TOKEN', hubs.TOKEN)
  assert main.run([*words[:-1], '--to=hf://me/other']) == 75


@pytest.mark.parametrize('to', ['me/mine', 'gs://a/b', 'hf://me/mine/file', 'hf://me/mine@v1', 'hf://me'])
def test_another_target_is_refused(to: str, file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['push', f'--weights={file}', f'--to={to}']) == 2
  assert 'expected hf://OWNER/NAME' in capsys.readouterr().err
