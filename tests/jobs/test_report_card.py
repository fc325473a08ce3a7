"""The report card: several weights side by side, the reasons for what they cannot have, and the protocols."""
from __future__ import annotations

import json
import pathlib

import pytest

from tests.data import images
from tests.weights import made, text_models
from vit_jax import main
from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.evaluate.results import Result
from vit_jax.jobs import report_card
from vit_jax.weights import saving

pytestmark = pytest.mark.usefixtures('one_device')


def column(title: str, metrics: dict[str, float], reasons: dict[str, str] | None = None) -> report_card.Column:
  found = {'knn': Result({'top1_k20': metrics['top1'], 'top1_k10': .5}, 37, None, 'top1_k20'),
           'topk': Result({'top1': .25, 'nll': metrics['nll']}, 37, None, 'top1')}
  return report_card.Column(f'dir/{title}', title, 'a ViT', 'at 32 px', 1_234, found, reasons or {}, {'knn': 1.5})


COLUMNS = (column('a', {'top1': .75, 'nll': 1.5}), column('<b>', {'top1': .5, 'nll': 1.25}, {'zeroshot': 'no texts'}))


def test_the_best_value_of_a_row_is_the_largest_share_or_the_smallest_nll() -> None:
  rows = {name: (cells, best) for name, cells, best in report_card.table(COLUMNS)}
  assert rows == {'knn/top1_k20': (['75.00 %', '50.00 %'], 0), 'knn/top1_k10': (['50.00 %', '50.00 %'], -1),
                  'topk/top1': (['25.00 %', '25.00 %'], -1), 'topk/nll': (['1.5', '1.25'], 1)}
  assert list(rows) == ['knn/top1_k20', 'knn/top1_k10', 'topk/top1', 'topk/nll']
  few, knn = COLUMNS[0].results['topk'], Result({'top1_k5': .5}, 9, None, 'top1_k5')
  more = COLUMNS[1]._replace(results={'few': few, 'knn': knn})
  assert [name for name, *_ in report_card.table((COLUMNS[0], more))] == [
      'knn/top1_k20', 'knn/top1_k10', 'knn/top1_k5', 'topk/top1', 'topk/nll', 'few/top1', 'few/nll']
  one = report_card.table(COLUMNS[:1])
  assert all(best == -1 for *_, best in one)


def test_the_text_has_a_column_for_each_of_the_weights_and_the_reasons() -> None:
  lines = report_card.text(COLUMNS).splitlines()
  assert lines[0].split() == ['a', '<b>'] and lines[1].split() == ['knn/top1_k20', '75.00', '%', '50.00', '%']
  assert lines[-1] == 'zeroshot of <b> is not measured: no texts'


def test_the_page_has_protocols_numbers_and_escaped_names() -> None:
  config = files.load('report_card', [])
  page = report_card.render(report_card.plain(config, COLUMNS), COLUMNS)
  assert '75.00 %' in page and '&lt;b&gt;' in page and '<b>' not in page.split('<h2>Results')[1]
  assert 'zeroshot: no texts' in page and 'arXiv 2104.14294' in page and '37 images' in page
  assert 'http://' not in page and 'https://' not in page


def test_a_protocol_names_splits_and_settings() -> None:
  config = schema.Config(data=schema.Data(source='folder:x', train_split='tr', eval_split='te'))
  knn = report_card.protocol(config, schema.Knn(neighbors=(3, 5), headline=3, limit=50))
  assert knn == ('Weighted k nearest neighbors by cosine (DINO, arXiv 2104.14294). folder:x, tr to te; limit=50, '
                 'neighbors=3,5, temperature=0.07, headline=3')
  assert ' folder:x, te; gallery=rest' in report_card.protocol(config, schema.Retrieval())
  assert ' folder:x, tr to te;' in report_card.protocol(config, schema.Retrieval(gallery=schema.Gallery.TRAIN))
  assert '; features.blocks=-2,-1, ' in report_card.protocol(config, schema.Knn(
      features=schema.FeatureLayers((-2, -1)), neighbors=(20, 30)))


@pytest.mark.parametrize(('places', 'titles'), [
    (['a/x.npz', 'b/y.npz'], ['x.npz', 'y.npz']), (['a/x', 'b/x'], ['a/x', 'b/x']), (['x', 'x'], ['x', 'x'])])
def test_titles_are_as_short_as_they_can_be(places: list[str], titles: list[str]) -> None:
  assert report_card.short(places) == titles


def test_weights_are_split_at_commas_but_for_a_file_with_one(tmp_path: pathlib.Path) -> None:
  name = tmp_path / 'a,b.npz'
  assert report_card.split_weights(str(name)) == [f'{tmp_path}/a', 'b.npz']
  name.touch()
  assert report_card.split_weights(str(name)) == [str(name)]


@pytest.mark.slow(reason='5 s: evaluations of an image tower and of texts')
def test_weights_with_texts_are_classified_by_names_and_their_projection_is_no_head(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  saving.save(made.network(), str(tmp_path / 'none.npz'))
  places = f'{text_models.write("clip", tmp_path / "clip")},{tmp_path / "none.npz"}'
  for label in range(16):
    place = tmp_path / 'photos' / 'test' / f'red boat {label}'
    place.mkdir(parents=True)
    (place / '0.png').write_bytes(images.encode(images.random_image(label, height=40, width=36)))
  (tmp_path / 'pairs').mkdir()
  for label in range(5):
    (tmp_path / 'pairs' / f'{label}.png').write_bytes(images.encode(images.random_image(label, height=40, width=36)))
  (tmp_path / 'pairs' / 'captions_test.jsonl').write_text('\n'.join(
      json.dumps({'image': f'{label}.png', 'captions': [f'boat {label}']}) for label in range(5)))
  assert main.run(['evaluate', f'--weights={places}', '--config=report_card',
                   '--config.evals=topk,zeroshot,caption_retrieval',
                   f'--config.evals.caption_retrieval.source=folder:{tmp_path / "pairs"}',
                   f'--config.data.source=folder:{tmp_path / "photos"}', '--config.batch_size=8',
                   f'--workdir={tmp_path / "card"}']) == 0
  clip, none = json.loads((tmp_path / 'card' / 'report_card.json').read_text())['weights']
  assert clip['num_examples'] == {'zeroshot': 16, 'caption_retrieval': 5}
  assert clip['metrics']['caption_retrieval/recall5_text'] == 1.
  assert 'recall1_text' in (tmp_path / 'card' / 'report_card.html').read_text().replace('<wbr>', '')
  assert 'zeroshot/top1_clip_best_lower' in clip['metrics']
  assert 'a projection to 16 numbers' in clip['not_measured']['topk']
  assert 'text tower' in none['not_measured']['zeroshot'] and not none['metrics']
  assert 'zeroshot of none.npz is not measured' in capsys.readouterr().out


@pytest.mark.slow(reason='about 30 s: evaluations of two networks')
def test_two_weights_of_other_classes_are_compared_by_their_features(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.chdir(tmp_path)
  for name in ('one', 'two'):
    saving.save(made.network(), f'{name}.npz')
  for split in ('train', 'test'):
    for label in ('ant', 'bee', 'cat'):
      place = tmp_path / 'photos' / split / label
      place.mkdir(parents=True)
      for i in range(4):
        (place / f'{i}.png').write_bytes(images.encode(images.random_image(len(label) + i, height=40, width=36)))
  words = ['evaluate', '--weights=one.npz,two.npz', '--config=report_card', '--config.data.source=folder:photos',
           '--config.evals=topk,knn,retrieval', '--config.evals.knn.neighbors=3,5', '--config.evals.knn.headline=3',
           '--config.batch_size=8']
  assert main.run(words) == 0
  out = capsys.readouterr().out
  found = json.loads(pathlib.Path('runs/report_card/report_card.json').read_text())
  one, two = found['weights']
  assert one['metrics'] == two['metrics'] and {'knn/top1_k3', 'retrieval/recall1_loo'} <= one['metrics'].keys()
  assert one['num_examples'] == {'knn': 12, 'retrieval': 12} and 'classes of the data' in one['not_measured']['topk']
  assert found['protocols'].keys() == {'topk', 'knn', 'retrieval'} and 'topk of one.npz is not measured' in out
  assert '<h1>Report card</h1>' in pathlib.Path('runs/report_card/report_card.html').read_text()
  assert main.run([*words[:1], *words[2:], '--weights=one.npz', '--config.evals=topk']) == 2


@pytest.mark.parametrize('text', [',', ' , ,', ',,'])
def test_a_list_of_no_weights_is_refused(text: str) -> None:
  with pytest.raises(UserError, match='--weights: expected weights, or several with commas, got'):
    report_card.split_weights(text)
