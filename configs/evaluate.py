"""Measures weights on a set of pictures: top-1, top-5, NLL; with --config.evals=knn,logistic what features hold.

Data:     a folder, a TFDS set or prepared shards. Where a folder has some of the classes only, or the weights do not
          name theirs, --config.data.classes=FILE lists them in the order of the outputs: n01440764 tench, a line each
Source:   images are resized, cropped and normalised as the weights want it, unless --preprocess= or
          --config.data.recipe.… says otherwise. Evaluations: topk real fewshot knn logistic probe_mae probe_dino
Run:      python -m vit_jax.main --job=evaluate --config=configs/evaluate.py --weights=FILE \
              --config.data.source=folder:PATH
Plan:     any machine; ViT-Ti/16 about 35 images/s on two CPU cores
Expected: what the weights' authors report
"""
from vit_jax.config import schema as s


def get_config() -> s.Config:
  return s.Config(
      name='evaluate', batch_size=64,
      data=s.Data(source='folder:PATH', in_memory=s.InMemory.NO),
      evals={'test': s.TopK()})
