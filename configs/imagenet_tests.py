"""Evaluates weights of 1,000 ImageNet classes on ImageNet, ReaL, V2, -A, -R, Sketch and ObjectNet, as their papers do.

Data:     sets of TFDS as they are prepared. --config.evals=val,real selects those that you have; a folder in place of
          one: --config.evals.a.source=folder:PATH with the WordNet ids as names of its folders. ObjectNet: a folder,
          and a file that maps each of its classes to ImageNet classes, `alarm_clock: n02708093; n03196217` a line
Source:   ReaL: arXiv 2006.07159, any of an image's labels counts as correct and 3,163 images have none; -A and -R:
          1907.07174, 2006.16241, only their 200 classes can be predicted; V2 (matched frequency): 1902.10811; Sketch:
          1905.13549; ObjectNet: Barbu et al. 2019, its 113 classes that ImageNet has
Differs:  No difference is known.
Run:      python -m vit_jax.main --job=evaluate --config=configs/imagenet_tests.py --weights=FILE --config.evals=val,v2
          --config.evals.real.labels=real.json takes the ReaL labels from the authors' file
          …--config.data.recipe.eval_native_patch=16 shows complete images at their own aspect; patches of 16
          …--config.evals=object --config.evals.object.source=folder:PATH --config.evals.object.classes=FILE
Plan:     any machine; 50,000 images each of val, real and Sketch, 10,000 of V2, 7,500 of -A, 30,000 of -R
Expected: ViT-B/16 AugReg at 224 px: 84.53, ReaL 88.89, V2 74.10, -A 43.13, -R 56.86, Sketch 43.26 (timm's tables)
"""
from vit_jax.config import schema as s


def get_config() -> s.Config:
  return s.Config(
      name='imagenet tests', batch_size=64,
      data=s.Data(source='tfds:imagenet2012', eval_split='validation', in_memory=s.InMemory.NO),
      evals={
          'val': s.TopK(metrics=('ece',)),
          'real': s.Real(source='tfds:imagenet2012_real', split='validation'),
          'v2': s.TopK(source='tfds:imagenet_v2/matched-frequency', split='test'),
          'a': s.TopK(source='tfds:imagenet_a', split='test', only_present=True),
          'r': s.TopK(source='tfds:imagenet_r', split='test', only_present=True),
          'sketch': s.TopK(source='tfds:imagenet_sketch', split='test'),
          'object': s.TopK(source='folder:OBJECTNET', split='test', classes='objectnet.txt', only_present=True)})
