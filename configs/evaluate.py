"""Evaluates weights on a set of images: top-1, top-5, NLL; with --config.evals=knn,logistic probes of the features.

Data:     a folder, a TFDS set or prepared shards. Where a folder has only some of the classes, or the weights have no
          class names, --config.data.classes=FILE lists them in the order of the outputs: n01440764 tench, a line each
Source:   images are resized, cropped and normalized as the weights expect, unless --preprocess= or
          --config.data.recipe.… is given. Evaluations: topk real fewshot knn retrieval logistic probe_mae
          probe_dino segmentation zeroshot (needs a text tower; --config.evals.zeroshot.prompts=clip_paper for all
          templates of CLIP)
Differs:  It follows no single paper; docs/explanation/preprocessing.md has the images of each family of weights.
Run:      python -m vit_jax.main --job=evaluate --config=configs/evaluate.py --weights=FILE \
              --config.data.source=folder:PATH
Plan:     any machine; ViT-Ti/16 about 35 images/s on two CPU cores
Expected: the numbers that the authors of the weights report
"""
from vit_jax.config import schema as s


def get_config() -> s.Config:
  return s.Config(
      name='evaluate', batch_size=64,
      data=s.Data(source='folder:PATH', in_memory=s.InMemory.NO),
      evals={'test': s.TopK()})
