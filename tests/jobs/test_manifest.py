"""JobSet manifests: what they run, and what would make their pods fail."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax.core.errors import UserError
from vit_jax.data.pipeline import shared
from vit_jax.jobs import manifest

TEXT = (pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'k8s.yaml').read_text()
FILLED = (('REGION-docker.pkg.dev/PROJECT/REPOSITORY/', 'eu-docker.pkg.dev/p/r/'), ('MY-DATA-BUCKET', 'data'),
          ('MY-RUNS-BUCKET', 'runs'))


def written(folder: pathlib.Path, *changes: tuple[str, str]) -> str:
  """The path of the template with names filled in, and these changes."""
  text = TEXT
  for old, new in (*FILLED, *changes):
    assert old in text, old
    text = text.replace(old, new)
  (folder / 'run.yaml').write_text(text)
  return str(folder / 'run.yaml')


def test_the_template_runs_its_command_on_its_slices_once_its_names_are_filled_in(tmp_path: pathlib.Path) -> None:
  found = manifest.read(written(tmp_path, ('replicas: 1', 'replicas: 2')))
  assert found.topology == 'v5e:4x4' and found.slices == 2
  assert found.line.startswith('vit-jax --config=vit_s16_i1k --config.data.data_dir=/data/tfds')


@pytest.mark.parametrize(('old', 'new'), [
  ('emptyDir:\n                    medium: Memory', 'emptyDir: {}'), ('mountPath: /dev/shm', 'mountPath: /shm'),
], ids=['medium', 'mount'])
def test_a_volume_for_shared_memory_is_not_needed_as_loader_processes_use_none(tmp_path: pathlib.Path, old: str,
                                                                               new: str) -> None:
  assert manifest.read(written(tmp_path, (old, new))).topology == 'v5e:4x4'
  assert shared.is_possible()  # on Linux, which the image has: batches are in memory without a name


@pytest.mark.parametrize(('old', 'new', 'message'), [
  ('gke-tpu-topology: 4x4', 'gke-tpu-topology: 4x8', 'parallelism and completions: expected 8, the hosts of a 4x8'),
  ('tpu-v5-lite-podslice', 'tpu-v9', 'gke-tpu-accelerator: expected one of tpu-v4-podslice'),
  ('kind: JobSet', 'kind: Job', 'expected a JobSet with one job on TPUs'),
  ('name: vit-jax', 'name: [', 'expected a JobSet with one job on TPUs'),
], ids=['hosts', 'chip', 'kind', 'yaml'])
def test_a_manifest_whose_pods_would_fail_is_refused(tmp_path: pathlib.Path, old: str, new: str, message: str) -> None:
  with pytest.raises(UserError) as caught:
    manifest.read(written(tmp_path, (old, new)))
  assert message in str(caught.value)


def test_placeholders_and_missing_files_are_named(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'run.yaml').write_text(TEXT)
  with pytest.raises(UserError, match='got the placeholder MY-DATA-BUCKET'):
    manifest.read(str(tmp_path / 'run.yaml'))
  with pytest.raises(UserError, match='expected a manifest, got "No such file or directory"'):
    manifest.read(str(tmp_path / 'none.yaml'))
