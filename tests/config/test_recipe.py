"""Settings of preprocessing and augmentation that cannot work or have no effect."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError

R, RA, V = schema.Recipe, schema.RandAugment, schema.Views
TIMM = RA(2, 9., .5, .5, schema.OpTable.TIMM)
GOOD = R(randaugment=TIMM, jitter=schema.Jitter(.3, .3, .3), erase=schema.Erase(.25), mixup=.8, cutmix=1.,
         mix_group=256, repeats=2, mix_probability=.9, cutmix_share=.3,
         interpolation=schema.Interpolation.BICUBIC, antialias=True)


def config(recipe: schema.Recipe, **changes: object) -> schema.Config:
  return dataclasses.replace(schema.Config(data=schema.Data(recipe=recipe)), **changes)


def test_a_recipe_with_everything_that_goes_together_passes() -> None:
  check.check(config(GOOD))
  check.check(config(R(three_augment=True)))
  check.check(config(R()))


@pytest.mark.parametrize(('recipe', 'said'), [
    (R(randaugment=RA(-1)), 'data.recipe.randaugment.layers: expected 0 to 100, got -1'),
    (R(randaugment=RA(2, -1.)), 'data.recipe.randaugment.magnitude: expected at least 0, got -1.0'),
    (R(randaugment=RA(2, 12., table=schema.OpTable.TIMM)), 'data.recipe.randaugment.magnitude: expected at '
     'most 10 with data.recipe.randaugment.table=timm, got 12.0.'),
    (R(randaugment=RA(2, 9., .5)), 'magnitude_std: expected its default 0.0 with data.recipe.randaugment.table=aug'),
    (R(randaugment=RA(2, probability=1.5)), 'data.recipe.randaugment.probability: expected 0 to 1, got 1.5'),
    (R(randaugment=RA(2), three_augment=True), 'data.recipe.three_augment: expected False with data.'),
    (R(jitter=schema.Jitter(-.1)), 'data.recipe.jitter.brightness: expected at least 0, got -0.1'),
    (R(jitter=schema.Jitter(hue=.6)), 'data.recipe.jitter.hue: expected 0 to 0.5, got 0.6'),
    (R(jitter=schema.Jitter(.1, probability=2.)), 'data.recipe.jitter.probability: expected 0 to 1, got 2.0'),
    (R(erase=schema.Erase(1.2)), 'data.recipe.erase.probability: expected 0 to 1, got 1.2'),
    (R(erase=schema.Erase(.2, area=(.2, 1.5))), 'data.recipe.erase.area: expected numbers, each more than 0 to 1'),
    (R(erase=schema.Erase(.2, aspect=(2., 1.))), 'data.recipe.erase.aspect: expected the smaller number first'),
    (R(cutmix=-1.), 'data.recipe.cutmix: expected at least 0, got -1.0'),
    (R(mix_probability=.5), 'mix_probability: expected its default 1.0 where mixup and cutmix are 0, got 0.5.'),
    (R(mixup=.2, mix_probability=1.5), 'data.recipe.mix_probability: expected 0 to 1, got 1.5'),
    (R(mixup=.2, mix_group=48),
     'data.recipe.mix_group: expected 0, or an even number that divides batch_size=128, got 48.'),
    (R(mixup=.2, mix_group=127),
     'data.recipe.mix_group: expected 0, or an even number that divides batch_size=128, got 127.'),
    (R(mix_group=64), 'data.recipe.mix_group: expected its default 0 where mixup and cutmix are 0, got 64.'),
    (R(mixup=.2, cutmix_share=.7), 'cutmix_share: expected its default 0.5 unless mixup and cutmix are both on'),
    (R(repeats=0), 'data.recipe.repeats: expected at least 1, got 0'),
    (R(repeats=65), 'batch_size: expected at least 130, two different examples, with data.recipe.repeats=65, got 128'),
    (R(randaugment=RA(0, 15.)), 'randaugment.magnitude: expected its default 10.0 with'),
    (R(erase=schema.Erase(area=(.1, .2))), 'erase.area: expected its default (0.02, 0.33'),
    (R(jitter=schema.Jitter(probability=.8)), 'jitter.probability: expected its default 1.0 where brightness, contra'),
    (R(views=V(num_local=2, grayscale=.1)), 'views.grayscale: expected its default 0.2 with data.recipe.views.on=Fa'),
    (R(crop=schema.Crop.RESIZE, crop_area=(.5, 1.)), 'crop_area: expected its default (0.05, 1.0)'),
    (R(crop=schema.Crop.WINDOW, crop_aspect=(1., 1.)), 'crop_aspect: expected its default (0.75, 1.33'),
    (R(crop=schema.Crop.WINDOW, crop_sampler=schema.CropSampler.TENSORFLOW),
     'crop_sampler: expected its default torchvision with data.recipe.crop=window, got tensorflow. It has no effect '
     'there. Set crop=inception for it.'),
    (R(interpolation=schema.Interpolation.AREA, antialias=True), 'antialias: expected its default False with data.rec'),
    (R(antialias=True, truncate=True), 'data.recipe.truncate: expected its default False with data.recipe.antialias='),
    (R(eval_area=True, interpolation=schema.Interpolation.AREA), 'data.recipe.eval_area: expected its default False w'),
    (R(crop_interpolation=schema.CropInterpolation.BILINEAR),
     'data.recipe.crop_interpolation: expected its default same with data.recipe.interpolation=bilinear, got bilinear'),
    (R(crop_interpolation=schema.CropInterpolation.BICUBIC, crop=schema.Crop.RESIZE), 'with data.recipe.crop=resize'),
    (R(eval_native_patch=8), 'data.recipe.eval_native_patch: expected 0, or the patch of a ViT, here 16, got 8'),
    (R(native_lengths=(4,)), 'data.recipe.eval_native_patch: expected the patch of a ViT, here 16, with data.recipe.'
     'native_lengths, got 0. Set it, or data.recipe.native_lengths=().'),
    (R(eval_native_patch=16, eval_resize_px=256), 'data.recipe.eval_resize_px: expected 0 with data.recipe.eval_nat'),
    (R(eval_area=True, crop=schema.Crop.RESIZE), 'eval_area: expected False with data.recipe.crop=resize, where '),
    (R(views=V(on=True)), 'data.recipe.views.on: expected False for objective Supervised, which takes one image'),
])
def test_a_problem_names_the_setting_and_its_value(recipe: schema.Recipe, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(config(recipe))
  assert said in str(error.value)


@pytest.mark.parametrize(('recipe', 'said'), [
    (R(views=V(on=True), mixup=.2, crop=schema.Crop.RESIZE), 'Switch off crop=resize, mixup.'),
    (R(views=V(on=True, local_px=90)), 'views.local_px: expected a multiple of model.patch=16, got 90'),
    (R(views=V(on=True, num_local=-1)), 'views.num_local: expected 0 to 1000, got -1'),
    (R(views=V(on=True, blur=(1., 2., 0.))), 'views.blur: expected numbers, each 0 to 1'),
    (R(views=V(on=True, local_area=(0., .4))), 'views.local_area: expected numbers, each more than 0 to 1'),
])
def test_views_are_checked_where_a_task_takes_them(recipe: schema.Recipe, said: str) -> None:
  task = config(recipe, objective=schema.Dino())
  assert any(said in problem for problem in check.problems(task)), check.problems(task)
  assert not check.problems(config(R(views=V(on=True)), objective=schema.Dino()), of='data')


def test_an_odd_batch_cannot_be_mixed_in_pairs() -> None:
  with pytest.raises(UserError, match='batch_size: expected an even number with data.recipe.cutmix, .* got 7'):
    check.check(config(R(cutmix=1.), batch_size=7))


@pytest.mark.parametrize('changes', [{'randaugment': RA(2)}, {'three_augment': True}, {'jitter': schema.Jitter(.1)}])
def test_memory_and_host_do_not_go_together(changes: dict[str, object]) -> None:
  data = schema.Data(recipe=R(crop=schema.Crop.RESIZE, **changes), in_memory=schema.InMemory.YES)
  with pytest.raises(UserError,
                     match='data.in_memory: expected no or auto with data.recipe.*, which is applied on the host'):
    check.check(schema.Config(data=data))


def test_separate_classes_need_a_mixture() -> None:
  data = schema.Data(mix_classes=schema.MixClasses.SEPARATE)
  with pytest.raises(UserError, match="mix_classes: expected its default same with data.source='digits', which is not"):
    check.check(schema.Config(data=data))


def test_pseudo_labels_are_of_one_class_each() -> None:
  pseudo = schema.Pseudo(source='folder:A', teacher='T', labels='L')
  with pytest.raises(UserError, match='data.max_labels: expected 0 beside data.pseudo, .* got 2. Set it to 0'):
    check.check(schema.Config(data=schema.Data(max_labels=2, pseudo=pseudo)))
