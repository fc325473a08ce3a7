"""Model cards: what they say, and that those of a person stay."""
from __future__ import annotations

import json
import pathlib

import pytest

from tests.weights import made
from vit_jax.core.errors import UserError
from vit_jax.weights import card, saving


def front(content: str) -> dict[str, object]:
  """The front matter of a card."""
  _, head, _ = content.split('---\n', 2)
  return {key: json.loads(value) for key, _, value in (line.partition(': ') for line in head.splitlines())}


def test_a_card_says_what_the_weights_are_and_how_they_are_used(tmp_path: pathlib.Path) -> None:
  found = made.network()
  saving.save(found, str(tmp_path / 'net'), with_card=True)
  content = (tmp_path / 'net' / 'README.md').read_text()
  p = found.preprocess
  assert f'{found.num_classes}: {", ".join(found.class_names)}.' in content
  assert f'| size | {p.image_px[0]} x {p.image_px[1]} px, RGB |' in content
  assert f'| mean | {", ".join(f"{x:g}" for x in p.mean)} |' in content and f'| known from | {p.rule} |' in content
  assert "AutoModelForImageClassification.from_pretrained('net')" in content and "vit_jax.load('net')" in content
  assert 'no bit of a parameter differs' in content and 'Not measured by this program.' in content
  assert front(content) == {'license': 'other', 'library_name': 'transformers', 'tags': ['vision', 'vit'],
                            'pipeline_tag': 'image-classification'}


@pytest.mark.parametrize(('name', 'family', 'shown', 'not_shown'), [
    ('a.npz', '', "vit_jax.load('a.npz')", 'timm'),
    ('net', 'timm', "timm.create_model('local-dir:net'", 'transformers'),
    ('a.safetensors', '', "vit_jax.load('a.safetensors')", 'local-dir')])
def test_a_card_shows_how_its_format_is_loaded(
    name: str, family: str, shown: str, not_shown: str, tmp_path: pathlib.Path) -> None:
  saving.save(made.network(), str(tmp_path / name), family=family, with_card=True)
  path = card.path_of(tmp_path / name)
  assert path.name == ('README.md' if name == 'net' else f'{name}.md')
  _, _, use = path.read_text().partition('## Use')
  assert shown in use and not_shown not in use


@pytest.mark.parametrize('name', ['net', 'a.npz'])
def test_the_card_of_a_person_stays_and_one_of_ours_is_renewed(name: str, tmp_path: pathlib.Path) -> None:
  def save() -> str:
    saving.save(made.network(), str(tmp_path / name), overwrite=True, with_card=True)
    return card.path_of(tmp_path / name).read_text()
  first = save()
  path = card.path_of(tmp_path / name)
  assert card.is_ours(path) and save() == first
  changed = first.replace('## Source', 'My words.\n\n## Source')
  path.write_text(changed)
  assert not card.is_ours(path) and save() == changed
  path.write_text('# Mine\n')
  assert save() == '# Mine\n'


def test_a_card_that_cannot_be_kept_is_an_error(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(), str(tmp_path / 'net'))
  (tmp_path / 'net' / 'README.md').mkdir()
  with pytest.raises(UserError, match=r'README.md: expected a file'):
    saving.save(made.network(), str(tmp_path / 'net'), overwrite=True, with_card=True)
  assert (tmp_path / 'net' / 'model.safetensors').is_file()


def test_the_license_is_that_of_the_source(tmp_path: pathlib.Path) -> None:
  assert card.find_license('mae_pretrain_vit_base') == 'CC-BY-NC-4.0'
  assert card.find_license('ViT-B_16-i21k.npz') == 'Apache-2.0'
  (tmp_path / 'config.json').write_text(json.dumps({'pretrained_cfg': {'license': 'mit'}}))
  (tmp_path / 'model.safetensors').touch()
  assert card.find_license(str(tmp_path)) == card.find_license(str(tmp_path / 'model.safetensors')) == 'mit'
  (tmp_path / 'README.md').write_text('---\nlicense: cc-by-4.0\n---\n')
  assert card.find_license(str(tmp_path)) == 'cc-by-4.0'
  for bad in ('[]', '{', '{"pretrained_cfg": 3}'):
    (tmp_path / 'README.md').unlink(missing_ok=True)
    (tmp_path / 'config.json').write_text(bad)
    assert card.find_license(str(tmp_path)) == ''


def test_weights_that_are_not_here_have_no_license_and_nothing_is_downloaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'README.md').write_text('---\nlicense: mit\n---\n')
  for source in ('made', 'timm/vit_tiny_patch16_224', 'https://127.0.0.1:9/net.npz'):
    assert card.find_license(source) == ''


def test_the_accuracy_is_that_of_the_step_of_the_run(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'config.json').write_text(json.dumps({'data': {'source': 'digits', 'eval_split': 'test'}}))
  assert card.measured(str(tmp_path), 7) is None
  rows = [{'step': 7, 'test/top1@ema': .75, 'test/top1': .5, 'test/nll': 'nan', 'x': 1.}, {'step': 9, 'test/top1': .6}]
  (tmp_path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  assert card.measured(str(tmp_path), 7) == ('digits test', {'test/top1@ema': .75, 'test/top1': .5})
  assert card.measured(str(tmp_path / 'checkpoints' / '9'), 9) == ('digits test', {'test/top1': .6})
  assert card.measured(str(tmp_path), 8) is None
  found = made.network()._replace(source=str(tmp_path), step=7)
  content = card.text(found, 'a.npz', written_as='timm', how='Made.')
  assert 'at step 7 of training' in content and '| test/top1@ema | 0.7500 |' in content
  (index,) = front(content)['model-index']  # type: ignore[misc, attr-defined]
  assert index['results'][0]['metrics'][0] == {'type': 'test/top1@ema', 'value': .75}
