"""The records of the families of published weights."""
from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from tests.weights import made, records_table
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.weights import files, loading, preprocess, published, recognize
from vit_jax.weights.families import FAMILIES
from vit_jax.weights.families.record import Clues

NEEDED = {'mean', 'std', 'geometry', 'interpolation', 'antialias', 'resize'}


def test_every_name_of_weights_has_one_address_and_one_meaning() -> None:
  assert sum(len(one.addresses) for one in FAMILIES) == len(published.NAMES)
  for family in FAMILIES:
    for name in family.addresses:
      assert any(re.fullmatch(rule.pattern, name) for rule in family.published), name
      others = [rule.pattern for one in FAMILIES if one is not family for rule in one.published]
      assert not [pattern for pattern in others if re.fullmatch(pattern, name)], name


@pytest.mark.parametrize('name', [
    'facebook/dinov2-base', 'facebook/dinov3-vits16', 'openai/clip-vit-base', 'laion/CLIP-ViT-B-32',
    'timm/vit_base_patch16_clip_224.metaclip_400m', 'timm/eva02_base_patch14.mim', 'facebook/PE-Core',
    'timm/vit_small_patch16_rope_224.naver_in1k', 'apple/aimv2-large', 'google/tipsv2-b14',
    'facebook/ijepa_vith14_1k', 'google/siglip2-base-patch16-224'])
def test_no_license_of_one_family_is_said_of_another(name: str) -> None:
  assert len([one for family in FAMILIES for one in family.licenses if re.fullmatch(one.pattern, name)]) == 1


@pytest.mark.parametrize('label', recognize.LABELS)
def test_the_images_of_a_format_are_prepared_as_its_record_says(label: str) -> None:
  values = recognize.usual(label).values
  assert values.keys() >= NEEDED and any(
      (values['mean'], values['std']) == (norm['mean'], norm['std']) for norm in preprocess.NORMS.values())
  found = preprocess.decide([], usual=recognize.usual(label), own_px=(448, 448))[0]
  assert (found.mean, found.interpolation) == (values['mean'], values['interpolation'])


def test_files_of_the_authors_have_a_family_with_usual_images() -> None:
  """A file with the names of no program is reported under the name of its family."""
  for family in FAMILIES:
    for form in family.files:
      label = form.label or ({'transformers': 'huggingface'}.get(form.program, family.name))
      assert label in recognize.LABELS, (family.name, form.program)


def test_the_table_of_the_documentation_is_that_of_the_records() -> None:
  page = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'weights.md'
  assert records_table.table() in page.read_text(), 'python -m tests.weights.records_table'


def moco(width: int = 384) -> dict[str, np.ndarray]:
  """A checkpoint of MoCo v3 with two blocks: two encoders with heads of three layers, and a predictor of two."""
  own = recognize.to_tensors(made.network(num_classes=0, class_names=(), width=width, heads=12), 'timm')
  own |= {f'head.{i}.weight': np.ones((4, 4), np.float32) for i in (0, 3, 6)}
  own |= {f'head.{i}.{leaf}': np.ones(4, np.float32) for i in (1, 4, 7) for leaf in ('running_mean', 'running_var')}
  own |= {f'head.{i}.num_batches_tracked': np.ones(1, np.float32) for i in (1, 4, 7)}
  found = {f'module.base_encoder.{name}': x for name, x in own.items()}
  found |= {f'module.momentum_encoder.{name}': x + 1 for name, x in own.items()}
  return found | {f'module.predictor.{i}.weight': np.ones((4, 4), np.float32) for i in (0, 3)}


def test_moco_v3_is_the_encoder_that_its_authors_evaluate(tmp_path: pathlib.Path) -> None:
  tensors = moco()
  files.write_torch(tmp_path / 'vit-s.pth', tensors)
  found = loading.load(str(tmp_path / 'vit-s.pth'))
  assert isinstance(found.model, schema.ViT) and (found.family, found.model.heads, found.num_classes) == ('moco', 12, 0)
  assert (found.preprocess.resize_px, found.preprocess.interpolation.value) == (36, 'bilinear')
  np.testing.assert_array_equal(found.params['backbone']['cls'], tensors['module.base_encoder.cls_token'])
  dropped = {line.name for line in found.report.of('dropped')}
  assert dropped == {name for name in tensors if 'base_encoder' not in name or '.head.' in name}
  del tensors['module.base_encoder.norm.bias']
  files.write_torch(tmp_path / 'cut.pth', tensors)
  with pytest.raises(UserError, match='- backbone/norm/bias'):
    loading.load(str(tmp_path / 'cut.pth'))


def test_efficientnets_are_those_of_the_authors_or_warned_of() -> None:
  stages = {f'blocks.{i}.0.conv_dw.weight': np.ones((8, 1, 3, 3), np.float32) for i in range(2)}
  known = recognize.recognize({'conv_stem.weight': np.ones((8, 3, 3, 3), np.float32), **stages})
  assert stages.keys() <= known.tensors.keys()  # no groups of blocks, as in the training of DINOv2
  def warnings(*names: str, has_config: bool = False) -> list[str]:
    return known.warn(schema.EfficientNet(), Clues(names, has_config, has_gelu=False))

  assert 'assumed to be a tf_efficientnet' in warnings('model.pth')[0]
  assert not warnings('tf_efficientnet_b0.pth') and not warnings('model.pth', has_config=True)
  with pytest.raises(UserError, match='expected a network of the authors, tf_efficientnet_…, got efficientnet_b0'):
    warnings('efficientnet_b0', has_config=True)


TO_MMPRETRAIN = (  # from timm's names of the same tensors
    (r'^(?!head)', 'backbone.'), ('patch_embed.proj', 'patch_embed.projection'), (r'blocks\.(\d+)', r'layers.\1'),
    (r'\.norm([12])', r'.ln\1'), (r'^backbone\.norm', 'backbone.ln1'), (r'mlp\.fc1', 'ffn.layers.0.0'),
    (r'mlp\.fc2', 'ffn.layers.1'), (r'ls1\.gamma', 'attn.gamma1.weight'), (r'ls2\.gamma', 'ffn.gamma2.weight'),
    (r'^(head|head_dist)\.', r'head.layers.\1.'))


@pytest.mark.parametrize('changes', [{}, {'pool.distillation': True}, {'block.layer_scale': .1}])
def test_a_family_of_another_program_is_a_table_of_names_and_a_record(
    changes: dict[str, object], tmp_path: pathlib.Path) -> None:
  """MMPretrain: `mmpretrain/models/backbones/vision_transformer.py`, `deit.py` and `mmcv/cnn/bricks/transformer.py`."""
  source = (pathlib.Path(recognize.__file__).parent / 'families' / 'vit.py').read_text()
  start = source.index('MMPRETRAIN_NAMES =')
  assert source.count('\n', start, source.index('""")', start)) <= 15
  own = made.network(class_names=(), **changes)
  tensors = recognize.to_tensors(own, 'timm')
  for pattern, new in TO_MMPRETRAIN:
    tensors = {re.sub(pattern, new, name): x for name, x in tensors.items()}
  assert 'backbone.layers.1.ffn.layers.0.0.weight' in tensors and 'head.layers.head.bias' in tensors
  files.write_torch(tmp_path / 'epoch_300.pth', {f'state_dict.{name}': x for name, x in tensors.items()})
  found = loading.load(str(tmp_path / 'epoch_300.pth'), model='heads=4')
  made.assert_same(own, found)
  assert isinstance(found.model, schema.ViT) and found.family == 'mmpretrain'
  assert (found.model.gelu, found.model.norm.eps) == (schema.Gelu.EXACT, 1e-6)
  assert (found.preprocess.resize_px, found.preprocess.mean) == (36, (.485, .456, .406))


@pytest.mark.parametrize(('name', 'says'), [
    ('backbone.ln2.weight', 'out_type=avg_featmap'), ('head.fc.weight', 'LinearClsHead'),
    ('backbone.pre_norm.weight', 'a CLIP of MMPretrain')])
def test_what_a_file_of_mmpretrain_does_not_show_is_not_guessed(name: str, says: str, tmp_path: pathlib.Path) -> None:
  tensors = recognize.to_tensors(made.network(), 'timm')
  for pattern, new in TO_MMPRETRAIN:
    tensors = {re.sub(pattern, new, one): x for one, x in tensors.items()}
  files.write_torch(tmp_path / 'a.pth', tensors | {name: np.ones(32, np.float32)})
  with pytest.raises(UserError, match=says):
    loading.load(str(tmp_path / 'a.pth'), model='heads=4')
