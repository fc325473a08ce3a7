"""Settings of recipes that make no sense, alone or together."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, recipe_options, schema
from vit_jax.core.errors import UserError

R, RA, V = schema.Recipe, schema.RandAugment, schema.Views
TIMM = RA(2, 9., .5, .5, schema.OpTable.TIMM)
GOOD = R(randaugment=TIMM, jitter=schema.Jitter(.3, .3, .3), erase=schema.Erase(.25), mixup=.8, cutmix=1., repeats=2,
         mix_probability=.9, cutmix_share=.3, interpolation=schema.Interpolation.BICUBIC, antialias=True)


def config(recipe: schema.Recipe, **changes: object) -> schema.Config:
  return dataclasses.replace(schema.Config(data=schema.Data(recipe=recipe)), **changes)


def test_a_recipe_with_everything_that_goes_together_passes() -> None:
  check.check(config(GOOD))
  check.check(config(R(three_augment=True)))
  assert not list(recipe_options.faults(config(R())))


@pytest.mark.parametrize(('recipe', 'said'), [
    (R(randaugment=RA(-1)), 'data.recipe.randaugment.layers: expected 0 to 100, got -1'),
    (R(randaugment=RA(2, -1.)), 'data.recipe.randaugment.magnitude: expected at least 0, got -1.0'),
    (R(randaugment=RA(2, 12., table=schema.OpTable.TIMM)), 'magnitude=12 is more than the table timm knows; want at '
     'most 10'),
    (R(randaugment=RA(2, 9., .5)), 'magnitude_std=0.5 is for the table timm; want 0, or table=timm'),
    (R(randaugment=RA(2, probability=1.5)), 'data.recipe.randaugment.probability: expected 0 to 1, got 1.5'),
    (R(randaugment=RA(2), three_augment=True), 'three_augment=true takes the place of RandAugment'),
    (R(jitter=schema.Jitter(-.1)), 'data.recipe.jitter.brightness: expected at least 0, got -0.1'),
    (R(jitter=schema.Jitter(hue=.6)), 'data.recipe.jitter.hue: expected 0 to 0.5, got 0.6'),
    (R(jitter=schema.Jitter(.1, probability=2.)), 'data.recipe.jitter.probability: expected 0 to 1, got 2.0'),
    (R(erase=schema.Erase(1.2)), 'data.recipe.erase.probability: expected 0 to 1, got 1.2'),
    (R(erase=schema.Erase(.2, area=(.2, 1.5))), 'data.recipe.erase.area: expected numbers, each more than 0 to 1'),
    (R(erase=schema.Erase(.2, aspect=(2., 1.))), 'data.recipe.erase.aspect: expected the smaller number first'),
    (R(cutmix=-1.), 'data.recipe.cutmix: expected at least 0, got -1.0'),
    (R(mix_probability=.5), 'mix_probability=0.5 changes nothing, as mixup and cutmix are 0'),
    (R(mixup=.2, mix_probability=1.5), 'data.recipe.mix_probability: expected 0 to 1, got 1.5'),
    (R(mixup=.2, cutmix_share=.7), 'cutmix_share=0.7 chooses between mixup and cutmix, but they are not both on'),
    (R(repeats=0), 'data.recipe.repeats: expected at least 1, got 0'),
    (R(repeats=65), 'batch_size=128 has not two different examples with data.recipe.repeats=65; want at least 130'),
    (R(randaugment=RA(0, 15.)), 'randaugment.magnitude is set, but changes nothing with layers=0'),
    (R(erase=schema.Erase(area=(.1, .2))), 'erase.area is set, but changes nothing with probability=0'),
    (R(jitter=schema.Jitter(probability=.8)), 'jitter.probability is set, but changes nothing with no spread'),
    (R(views=V(num_local=2, grayscale=.1)), 'views.num_local, grayscale is set, but changes nothing with on=false'),
    (R(crop=schema.Crop.RESIZE, crop_area=(.5, 1.)), 'crop_area=(0.5, 1.0) changes nothing with crop=resize'),
    (R(crop=schema.Crop.WINDOW, crop_aspect=(1., 1.)), 'crop_aspect=(1.0, 1.0) changes nothing with crop=window'),
    (R(crop=schema.Crop.WINDOW, crop_sampler=schema.CropSampler.TENSORFLOW),
     'crop_sampler: expected crop=inception beside tensorflow, got crop=window'),
    (R(interpolation=schema.Interpolation.AREA, antialias=True), 'interpolation=area covers every pixel as it is'),
    (R(eval_area=True, interpolation=schema.Interpolation.AREA), 'eval_area=true changes nothing with interpolation='),
    (R(crop_interpolation=schema.CropInterpolation.BILINEAR),
     'data.recipe.crop_interpolation: expected same with crop=inception, views.on=False and interpolation=bili'),
    (R(crop_interpolation=schema.CropInterpolation.BICUBIC, crop=schema.Crop.RESIZE), 'got bicubic, which changes not'),
    (R(eval_area=True, crop=schema.Crop.RESIZE), 'eval_area=true with crop=resize: training sees what evaluation'),
    (R(views=V(on=True)), 'views.on=true makes views instead of images, which objective Supervised does not take'),
])
def test_a_fault_is_named_with_its_value(recipe: schema.Recipe, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(config(recipe))
  assert said in str(error.value)


@pytest.mark.parametrize(('recipe', 'said'), [
    (R(views=V(on=True), mixup=.2, crop=schema.Crop.RESIZE), 'want it without data.recipe.{crop=resize, mixup}'),
    (R(views=V(on=True, local_px=90)), 'views.local_px=90 is not a multiple of model.patch=16'),
    (R(views=V(on=True, num_local=-1)), 'views.num_local: expected 0 to 1000, got -1'),
    (R(views=V(on=True, blur=(1., 2., 0.))), 'views.blur: expected numbers, each 0 to 1'),
    (R(views=V(on=True, local_area=(0., .4))), 'views.local_area: expected numbers, each more than 0 to 1'),
])
def test_views_are_checked_where_a_task_takes_them(recipe: schema.Recipe, said: str) -> None:
  task = config(recipe, objective=schema.Dino())
  assert any(said in problem for problem in check.problems(task)), check.problems(task)
  assert not list(recipe_options.faults(config(R(views=V(on=True)), objective=schema.Dino())))


def test_an_odd_batch_cannot_be_mixed_in_pairs() -> None:
  with pytest.raises(UserError, match='batch_size=7 is odd, but cutmix mixes pairs; want an even batch'):
    check.check(config(R(cutmix=1.), batch_size=7))


@pytest.mark.parametrize('changes', [{'randaugment': RA(2)}, {'three_augment': True}, {'jitter': schema.Jitter(.1)}])
def test_memory_and_host_do_not_go_together(changes: dict[str, object]) -> None:
  data = schema.Data(recipe=R(crop=schema.Crop.RESIZE, **changes), in_memory=schema.InMemory.YES)
  with pytest.raises(UserError, match='in_memory=yes augments on the device, but data.recipe.*happens on the host'):
    check.check(schema.Config(data=data))


def test_classes_apart_need_a_mixture() -> None:
  data = schema.Data(mix_classes=schema.MixClasses.SEPARATE)
  with pytest.raises(UserError, match="mix_classes=separate is for mixtures, not data.source='digits'"):
    check.check(schema.Config(data=data))


def test_pseudo_labels_are_of_one_class_each() -> None:
  pseudo = schema.Pseudo(source='folder:A', teacher='T', labels='L')
  with pytest.raises(UserError, match='data.max_labels: expected 0 beside data.pseudo, .* got 2. Set it to 0'):
    check.check(schema.Config(data=schema.Data(max_labels=2, pseudo=pseudo)))
