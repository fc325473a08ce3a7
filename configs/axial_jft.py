"""Axial-ViT and AxialResNet on JFT-300M: attention along rows, then along columns (ViT paper, Appendix D.6).

Data:     JFT-300M is internal to Google; set another source with --config.data.source=, `synthetic` runs as it is.
          TFDS `imagenet2012` for the 5-shot accuracy that is compared.
Source:   arXiv 2010.11929, Appendix D.6, which compares Axial-ViT-B/32 and B/16 with ViT by 5-shot ImageNet accuracy;
          training as B of Table 3, without clipping. It does not state how the network pools: here it is the mean, and
          the head is linear, as Appendix D.3 has it for the mean. AxialResNet50 is the network of the program of
          Axial-DeepLab; the paper states neither its size (S, M or L) nor its training: here it is that of the others.
Differs:  Not stated by the paper and chosen here: pooling of Axial-ViT (the mean), size of AxialResNet, and its
          training.
Run:      python -m vit_jax.main --config=configs/axial_jft.py:size=Axial-ViT-B/16 --workdir=runs/axial
          The other points of Figure 13: size=B/32 and size=B/16 (with mean pooling), size=Axial-ResNet50-S, -M or -L.
Expected: the paper reports that Axial-ViT is better, at a higher cost. Not run here.
"""
import dataclasses

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import sizes

AXIAL_RESNETS = ('Axial-ResNet50-S', 'Axial-ResNet50-M', 'Axial-ResNet50-L')


def get_config(arguments: str = '') -> s.Config:
  """The run of `size=NAME`."""
  size = s.parse_arg(arguments, size=('Axial-ViT-B/32', 'Axial-ViT-B/16', 'B/32', 'B/16', *AXIAL_RESNETS))['size']
  model = sizes.model(size)
  if isinstance(model, s.ViT) and not isinstance(model.block, s.Axial):
    model = dataclasses.replace(model, pool=s.Mean())
  return s.replaced(files.load('vit_paper:B/16,jft', []), {
      'name': f'axial {size}', 'model': model, 'head.pre_logits': 0, 'train': s.Train(),
      'evals': {'imagenet': s.FewShot(
          every='50_000 steps', source='tfds:imagenet2012', train_split='train[:65000]', split='validation', shots=(5,),
          protocol=s.FewShotProtocol.BIG_VISION)},
      'checkpoints': s.Checkpoints(every='5_000 steps')})
