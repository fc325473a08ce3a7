"""The whole run as data: typed settings, each with unit and default.

A config file's `get_config()` returns a `Config`. It holds independent variables only; what follows from
them (steps from epochs, warm-up steps) is computed from the final config by `config/check.py`.
`'' ` means off for text. Durations are text with a unit: `'90 epochs'`, `'20_000 steps'`,
`'30e6 examples'`, `'10 %'` (of the run). Treat configs as read-only after overrides have been applied.

No `from __future__ import annotations` in this package and no `Literal`: `config_flags` needs real types.
"""
from vit_jax.config.schema.arguments import parse_arg as parse_arg
from vit_jax.config.schema.data import Data as Data
from vit_jax.config.schema.data import Decode as Decode
from vit_jax.config.schema.data import InMemory as InMemory
from vit_jax.config.schema.data import MixClasses as MixClasses
from vit_jax.config.schema.data import Pseudo as Pseudo
from vit_jax.config.schema.evals import *  # noqa: F403
from vit_jax.config.schema.layers import AttentionKernel as AttentionKernel
from vit_jax.config.schema.layers import DType as DType
from vit_jax.config.schema.layers import Execution as Execution
from vit_jax.config.schema.layers import Gelu as Gelu
from vit_jax.config.schema.layers import Kernels as Kernels
from vit_jax.config.schema.layers import Remat as Remat
from vit_jax.config.schema.model import EfficientNet as EfficientNet
from vit_jax.config.schema.model import FeatureLayers as FeatureLayers
from vit_jax.config.schema.model import Head as Head
from vit_jax.config.schema.model import Mixer as Mixer
from vit_jax.config.schema.model import Model as Model
from vit_jax.config.schema.model import ResNet as ResNet
from vit_jax.config.schema.objective import *  # noqa: F403
from vit_jax.config.schema.optim import *  # noqa: F403
from vit_jax.config.schema.recipe import Crop as Crop
from vit_jax.config.schema.recipe import CropInterpolation as CropInterpolation
from vit_jax.config.schema.recipe import CropSampler as CropSampler
from vit_jax.config.schema.recipe import Erase as Erase
from vit_jax.config.schema.recipe import Geometry as Geometry
from vit_jax.config.schema.recipe import Interpolation as Interpolation
from vit_jax.config.schema.recipe import Jitter as Jitter
from vit_jax.config.schema.recipe import OpTable as OpTable
from vit_jax.config.schema.recipe import RandAugment as RandAugment
from vit_jax.config.schema.recipe import Recipe as Recipe
from vit_jax.config.schema.recipe import Views as Views
from vit_jax.config.schema.run import Checkpoints as Checkpoints
from vit_jax.config.schema.run import Config as Config
from vit_jax.config.schema.run import EarlyStop as EarlyStop
from vit_jax.config.schema.run import EmaWarmup as EmaWarmup
from vit_jax.config.schema.run import InitSettings as InitSettings
from vit_jax.config.schema.run import Mesh as Mesh
from vit_jax.config.schema.run import OnNonfinite as OnNonfinite
from vit_jax.config.schema.run import Sam as Sam
from vit_jax.config.schema.run import Train as Train
from vit_jax.config.schema.study import Figure as Figure
from vit_jax.config.schema.study import Result as Result
from vit_jax.config.schema.study import Results as Results
from vit_jax.config.schema.study import Row as Row
from vit_jax.config.schema.study import Study as Study
from vit_jax.config.schema.vit import ConvStem as ConvStem
from vit_jax.config.schema.vit import PatchStem as PatchStem
from vit_jax.config.schema.vit import Pool as Pool
from vit_jax.config.schema.vit import PositionResize as PositionResize
from vit_jax.config.schema.vit import Positions as Positions
from vit_jax.config.schema.vit import PositionsAt as PositionsAt
from vit_jax.config.schema.vit import ResNetStem as ResNetStem
from vit_jax.config.schema.vit import ViT as ViT
