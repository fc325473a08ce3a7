"""A report card of weights: what their features and their head reach on one dataset, for several weights side by side.

Data:     a folder with the splits train and test, a TFDS set or prepared shards
Source:   k-NN: arXiv 2104.14294, section 4.1; few shots: ViT paper, section 4.1; recall@1, leave-one-out: arXiv
          1511.06452, section 5; logistic regression: the optimum that CLIP's evaluation takes (2103.00020, section 3.2)
Differs:  It follows no single paper.
Run:      python -m vit_jax.main --job=evaluate --config=configs/report_card.py --weights=A.safetensors,B.npz \
              --config.data.source=folder:PATH
          writes runs/report_card/report_card.html and report_card.json; --config.evals=knn,retrieval takes some.
          Zero-shot needs a text tower; so does the retrieval of captions, and captions:
          --config.evals.caption_retrieval.source=wds:PATH; and segmentation masks:
          --config.evals.segmentation.source=masks:PATH
Plan:     any machine; one pass over both splits for each of the weights
Expected: a number for each evaluation that the weights can have, and the reason for the others
"""
from vit_jax.config import schema as s

NAMES = ('topk', 'zeroshot', 'caption_retrieval', 'knn', 'retrieval', 'logistic', 'fewshot', 'segmentation')


def get_config() -> s.Config:
  return s.Config(
      name='report card', batch_size=64, data=s.Data(source='folder:PATH', in_memory=s.InMemory.NO),
      evals={name: s.EVALUATIONS[name]() for name in NAMES})
