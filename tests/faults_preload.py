"""What the process imports from which `faults.py` forks the processes of runs: most of a start is imports."""
import etils.epath  # noqa: F401
import orbax.checkpoint  # noqa: F401
import PIL.PngImagePlugin  # noqa: F401
import tensorstore  # noqa: F401

import vit_jax.commands
import vit_jax.jobs.report
import vit_jax.jobs.train
import vit_jax.main
import vit_jax.parallel.hardware  # noqa: F401
