"""Whether the devices of a run have the kernels that its model asks for."""
from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from vit_jax.config import schema
from vit_jax.models.kernels import attend_kernels, mlp_kernels


def check_devices(model: schema.Model, mesh: Mesh | AbstractMesh, *, name: str) -> None:
  """Makes sure that the devices run the kernels of a model, or logs that XLA's forms run in their place.

  `name` is the dotted path of the model in its config.

  Raises:
    UserError: the attention kernel is for such devices, but not for these.
  """
  attend_kernels.check_devices(model, mesh, name=name)
  mlp_kernels.check_devices(model, mesh, name=name)
