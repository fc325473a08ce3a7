"""I-JEPA: under the names of transformers and timm its tensors are those of a ViT without a class token."""
from __future__ import annotations

from vit_jax.config.schema import Mean
from vit_jax.weights.families import transformers
from vit_jax.weights.families.record import Family, Kind, License

FAMILY = Family(
    'ijepa', 'I-JEPA', 'checkpoints of the authors; transformers; timm',
    kinds=(Kind('ijepa', ('IJepaModel', ''),
                lambda m, weights, changed: not weights.num_classes and not weights.decoder and (
                    changed == {'pool'} and m.pool == Mean()),
                lambda _: transformers.VIT, transformers.tower_config, lambda tensors, _: tensors),),
    licenses=(License(r'facebook/ijepa_.*|timm/vit_\w+_ijepa.*', 'CC-BY-NC-4.0'),))
