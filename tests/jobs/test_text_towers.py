"""Zero-shot evaluation and prediction from the command line, with small models as folders."""
from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.weights import text_models
from vit_jax import main
from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import text_towers
from vit_jax.parallel import mesh as meshes
from vit_jax.weights import loading

pytest.importorskip('tokenizers')
pytest.importorskip('sentencepiece')
pytestmark = pytest.mark.usefixtures('one_device', 'no_page')
CLASSES = ('Red_boat', 'cat', 'white horse')
TEMPLATE = 'a photo of a {}.'


@pytest.fixture(scope='module')
def here(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A folder with models, and images of three classes."""
  root = tmp_path_factory.mktemp('here')
  for family in ('clip', 'siglip'):
    text_models.write(family, root / family)
  rng = np.random.default_rng(0)
  for name in CLASSES:
    (root / 'set' / 'test' / name).mkdir(parents=True)
    for k in range(3):
      Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(root / 'set' / 'test' / name / f'{k}.png')
  return root


def evaluate(here: pathlib.Path, family: str, to: pathlib.Path, *words: str) -> dict[str, float]:
  assert main.run(['evaluate', f'--weights={here / family}', '--config=evaluate', '--config.batch_size=4',
                   f'--config.data.source=folder:{here / "set"}', '--config.data.eval_split=test', f'--workdir={to}',
                   *words]) == 0
  found = json.loads((to / 'evaluate.json').read_text())
  assert found['num_examples'] == 9
  return found['metrics']


def by_hand(here: pathlib.Path, family: str, names: tuple[str, ...]) -> float:
  """Top-1 by the Python interface, with names as they reach the prompts."""
  classify = vit_jax.load(here / family).zero_shot(names, prompts=TEMPLATE)
  hits = [classify.classify(str(here / 'set' / 'test' / name / f'{k}.png'), top=1)[0][0].label == label
          for label, name in enumerate(CLASSES) for k in range(3)]
  return float(np.mean(hits))


@pytest.mark.slow(reason='3 s each: compiles both towers of a model, twice')
@pytest.mark.parametrize(('family', 'rule'), [('clip', 'lower'), ('siglip', 'canonical')])
def test_evaluation_of_weights_equals_the_python_interface(family: str, rule: str, here: pathlib.Path,
                                                           tmp_path: pathlib.Path) -> None:
  words = ('--config.evals=zeroshot', f'--config.evals.zeroshot.prompts={TEMPLATE}')
  found = evaluate(here, family, tmp_path, *words)
  assert found[f'zeroshot/top1_template_{rule}'] == pytest.approx(by_hand(here, family, ('red boat', *CLASSES[1:])))
  assert found[f'zeroshot/top5_template_{rule}'] == 1.


def test_all_settings_of_the_evaluation_act(here: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'names.txt').write_text('boat, ship\ncat, Cat\nhorse\n')
  found = evaluate(here, 'clip', tmp_path / 'a', '--config.evals=zeroshot',
                   f'--config.evals.zeroshot.weights={here / "clip"}',
                   '--config.evals.zeroshot.prompts=class_name_only',
                   f'--config.evals.zeroshot.tokenizer={here / "clip" / "vocab.json"}',
                   f'--config.evals.zeroshot.names={tmp_path / "names.txt"}', '--config.evals.zeroshot.synonyms=true',
                   '--config.evals.zeroshot.text_rule=none')
  assert set(found) == {f'zeroshot/{k}_class_name_only_none_synonyms' for k in ('top1', 'top5')}


def settled(model: schema.Model, px: tuple[int, int], **more: object) -> schema.Config:
  return dataclasses.replace(files.load('evaluate', []), model=model, image_px=px, **more)  # type: ignore[arg-type]


def test_a_run_uses_the_weights_that_it_began_with(here: pathlib.Path) -> None:
  image = loading.load(str(here / 'siglip'))
  mesh = meshes.make(schema.Mesh(1, 1, 1))
  config = settled(image.model, image.preprocess.image_px, init_from=str(here / 'siglip'))
  found = text_towers.find(config, None, 'z', schema.ZeroShot(), mesh=mesh)
  assert found.is_sigmoid and found.embed(['a cat']).shape == (1, 32)
  with pytest.raises(UserError, match=r'evals\.z\.weights: expected weights with a text tower, got none\. Set'):
    text_towers.find(dataclasses.replace(config, init_from=''), None, 'z', schema.ZeroShot(), mesh=mesh)


def test_a_text_tower_of_another_width_is_refused(here: pathlib.Path) -> None:
  config = settled(schema.ViT(patch=8, width=48, depth=1, heads=2, mlp=schema.Mlp(48)), (32, 32))
  with pytest.raises(UserError, match=r'evals\.z\.weights: expected weights of a network with 48 features'):
    text_towers.find(config, None, 'z', schema.ZeroShot(weights=str(here / 'clip')),
                     mesh=meshes.make(schema.Mesh(1, 1, 1)))


@pytest.mark.slow(reason='3 s: both towers, twice; tests/inspect/test_zeroshot.py has guesses and probabilities')
def test_files_are_classified_by_names_on_the_command_line(
    here: pathlib.Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level('INFO')
  image = here / 'set' / 'test' / 'cat' / '0.png'
  assert main.run(['predict', f'--weights={here / "siglip"}', '--names=cat, red boat', '--top=2', str(image)]) == 0
  out = capsys.readouterr().out
  guesses = vit_jax.load(here / 'siglip').classify(image, names=['cat', 'red boat'])[0]
  assert out.splitlines() == [str(image), *(
      f'  {100 * g.probability:6.2f} %  (share {100 * g.share:6.2f} %)  {g.name}' for g in guesses)]
  assert 'Each probability is the sigmoid of one name alone' in caplog.text
  (here / 'names.txt').write_text('cat\nred boat\n')
  words = [f'--weights={here / "siglip"}', f'--names={here / "names.txt"}', '--top=2', str(image)]
  assert main.run(['predict', *words]) == 0 and capsys.readouterr().out == out
  assert main.run(['predict', f'--weights={here / "siglip"}', '--names=cat', '--prompts={}', '--json', str(image)]) == 0
  head, line = map(json.loads, capsys.readouterr().out.splitlines())
  assert line['classes'][0]['name'] == 'cat' and 'sigmoid' in head['probability'] and head['class_names'] == 'given'


@pytest.mark.parametrize(('words', 'message'), [
    (['--prompts=a {}'], '--prompts: expected --names as well, got --prompts=a {} alone.'),
    (['--names=cat', '--classes=x.txt'], '--classes: expected none with --names, got x.txt.'),
    (['--names=none.txt'], "or clip_imagenet, got 'none.txt', and there is no such file. Correct the path.")])
def test_flags_that_do_not_fit_together_are_refused(words: list[str], message: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['predict', '--weights=nowhere', *words, 'a.png']) == 2
  assert message in capsys.readouterr().err
