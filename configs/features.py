"""Evaluates the features of weights without their head: k-NN, few shots, logistic regression, linear probes.

Data:     a folder with the splits train and test, a TFDS set or prepared shards
Source:   k-NN and probe_dino: arXiv 2104.14294, section 4.1; few shots: ViT paper, section 4.1; probe_mae: arXiv
          2111.06377, Appendix A.1; the images are not augmented, as they are in configs/linear_probe.py
Differs:  The linear probes see images without augmentation; in the papers they see random crops and flips, which
          linear_probe.py has.
Run:      python -m vit_jax.main --job=evaluate --config=configs/features.py --weights=FILE \
              --config.data.source=folder:PATH
          --config.evals=knn,fewshot takes some of them; --config.evals.knn.limit=500 is a quick evaluation on a part
Plan:     any machine; one pass over both splits for all but probe_dino, which reads features after the last four blocks
          and needs a pass of its own; ViT-Ti/16 about 35 images/s on two CPU cores
Expected: on ImageNet, DINO's ViT-S/16: k-NN 74.5, linear 77.0; MAE's ViT-B/16: linear 68.0 (the papers, with
          augmentation)
"""
from vit_jax.config import schema as s

NAMES = ('knn', 'fewshot', 'logistic', 'probe_mae', 'probe_dino')


def get_config() -> s.Config:
  return s.Config(
      name='features', batch_size=64, data=s.Data(source='folder:PATH', in_memory=s.InMemory.NO),
      evals={name: s.EVALUATIONS[name]() for name in NAMES})
