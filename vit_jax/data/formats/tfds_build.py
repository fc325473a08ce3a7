"""Downloads and prepares a TFDS dataset in its own process: `python -m vit_jax.data.formats.tfds_build NAME DATA_DIR`.

`jobs/prepare.py` calls `build_in_process`, which starts this command; the command runs `main`. Most datasets need
TensorFlow to be prepared, and TensorFlow must not share a process with JAX's devices, so the command has its own
process. The prepared dataset has ArrayRecord files, which `tfds.py` reads.
"""
from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from vit_jax.core import extras, failures
from vit_jax.core.errors import TemporaryError, UserError

MISSING = 3  # exit status if a package is not installed
IN_EXTRA = ('tensorflow',)
"""The modules that the extra `tfds` installs. If one of them is missing, the error says how to install the extra."""


def build_in_process(name: str, *, data_dir: str) -> None:
  """Prepares the dataset NAME[/CONFIG][:VERSION] below `data_dir`, in another process, which prints its errors.

  Raises TemporaryError if the process failed because of the network or the storage, else UserError if it failed.
  """
  command = [sys.executable, '-m', 'vit_jax.data.formats.tfds_build', name, data_dir]
  status = subprocess.run(command, check=False).returncode
  if status:
    error_type = TemporaryError if status == failures.TRY_AGAIN else UserError
    raise error_type(f'tfds:{name}: expected to prepare it in {data_dir}, got exit status {status}; see the message '
                     'above.')


@contextlib.contextmanager
def scratch() -> Iterator[None]:
  """Returns a context in which temporary files of this process are in a folder that is removed at the end.

  Without the context, TFDS leaves an empty folder `/tmp/tmp…tfds` for a dataset that is not prepared
  (`DatasetInfo.initialize_from_bucket` of tensorflow_datasets 4.9).
  """
  previous_folder = tempfile.tempdir
  with tempfile.TemporaryDirectory(prefix='vit_jax_tfds_') as folder:
    tempfile.tempdir = folder
    try:
      yield
    finally:
      tempfile.tempdir = previous_folder


def main(arguments: Sequence[str]) -> int:
  """Prepares a dataset; the arguments are NAME and DATA_DIR. Returns the exit status.

  The status is 0 if the dataset is prepared, `MISSING` if a package is missing, `failures.TRY_AGAIN` if the network or
  the storage failed, else 1.
  """
  import tensorflow_datasets as tfds
  name, data_dir = arguments
  try:
    with scratch():
      tfds.builder(name, data_dir=data_dir, file_format='array_record').download_and_prepare()
  except ModuleNotFoundError as error:
    package = (error.name or '').partition('.')[0]
    advice = f'Run: {extras.install("tfds")}' if package in IN_EXTRA else 'Install the package that has this module.'
    print(f'error: preparing tfds:{name} needs the Python module {error.name}, which is not installed. It is needed to '
          f'prepare the dataset, not to read it. {advice}', file=sys.stderr)
    return MISSING
  except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError, OSError) as error:
    print(f'error: tfds:{name}: {error}', file=sys.stderr)
    return failures.TRY_AGAIN if failures.is_temporary(error) else 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
