"""Semantic segmentation on frozen tokens of weights: logistic regression and k-NN, mIoU over all pixels of the masks.

Data:     a folder PATH/images/{train,test}/NAME.jpg with PATH/masks/{train,test}/NAME.png and the class names in
          PATH/classes.txt, or masks:tfds:oxford_iiit_pet, masks:tfds:scene_parse150
Source:   linear classifiers of patch tokens as in DINOv2 (arXiv 2304.07193, section 7.4), fitted to the
          optimum; k-NN after arXiv 2306.01667
Differs:  DINOv2 trains its classifiers by SGD with BatchNorm: its numbers are not comparable with these.
Run:      python -m vit_jax.main --job=evaluate --config=configs/dense_probe.py --weights=FILE \
              --config.data.source=masks:PATH
          --config.evals.dense.features.blocks=9,12 concatenates layers; --config.evals.dense.resize_px=448 slides
          windows, --config.evals.dense.stride_px=149 with overlap; --config.evals.dense.overlays=8 saves images with
          their masks; --config.evals.dense.tokens_per_image=64 draws tokens of each training image
Plan:     any machine; ViT-Ti/16 about 35 images/s on two CPU cores, and the fits
Expected: DINOv2's ViT-S/14 on ADE20K, linear, single scale: 44.3 mIoU (its paper, Table 10, not checked again;
          with multiple scales its repository has 47.2)
"""
from vit_jax.config import schema as s


def get_config() -> s.Config:
  return s.Config(
      name='dense_probe', batch_size=16, data=s.Data(source='masks:PATH', in_memory=s.InMemory.NO),
      evals={'dense': s.Segmentation()})
