"""What else lies in launch/: the cluster description, the image, the notebook and the page that explains them."""
from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCH = ROOT / 'launch'


def test_the_page_names_every_file() -> None:
  text = (LAUNCH / 'README.md').read_text()
  for path in LAUNCH.rglob('*'):
    if path.is_file() and path.name != 'README.md' and '__pycache__' not in path.parts:
      assert f'`{path.relative_to(LAUNCH)}`' in text, path


def test_configs_named_here_exist() -> None:
  for path in LAUNCH.glob('*.*'):
    for name in re.findall(r'--config=(?:configs/)?([a-z][\w]*)', path.read_text()):
      assert (ROOT / 'configs' / f'{name}.py').exists(), f'{path.name}: {name}'


def read_jobset() -> dict[str, Any]:
  yaml = pytest.importorskip('yaml')
  found = yaml.safe_load((LAUNCH / 'k8s.yaml').read_text())
  assert isinstance(found, dict)
  return found


def test_the_jobset_stops_on_2_and_restarts_on_anything_else() -> None:
  spec = read_jobset()['spec']
  assert spec['failurePolicy'] == {
    'maxRestarts': 100, 'rules': [{'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}]}
  job = spec['replicatedJobs'][0]['template']['spec']
  assert job['backoffLimit'] == 0
  container = job['template']['spec']['containers'][0]
  assert job['podFailurePolicy']['rules'] == [
    {'action': 'FailJob', 'onExitCodes': {'containerName': container['name'], 'operator': 'In', 'values': [2]}}]
  assert job['template']['spec']['restartPolicy'] == 'Never'  # required beside a podFailurePolicy


def test_the_jobset_fills_its_slice() -> None:
  job = read_jobset()['spec']['replicatedJobs'][0]['template']['spec']
  pod = job['template']['spec']
  x, y = pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  resources = pod['containers'][0]['resources']
  assert resources['limits'] == resources['requests']
  assert job['parallelism'] == job['completions']
  assert job['parallelism'] * resources['limits']['google.com/tpu'] == int(x) * int(y)
  mounted = {mount['name'] for mount in pod['containers'][0]['volumeMounts']}
  assert mounted == {volume['name'] for volume in pod['volumes']}
  assert ' ' not in ''.join(v['csi']['volumeAttributes']['mountOptions'] for v in pod['volumes'] if 'csi' in v)


def test_the_image_copies_what_exists_and_knows_the_extras_of_setup() -> None:
  text = (LAUNCH / 'Dockerfile').read_text()
  for line in re.findall(r'^COPY (.*)$', text, re.MULTILINE):
    for name in line.split()[:-1]:
      assert (ROOT / name).exists(), name
  extras = re.search(r'in ([a-z0-9|]+)\) ;;', text)
  assert extras
  for extra in extras[1].split('|'):
    assert f"'{extra}': [" in (ROOT / 'setup.py').read_text()
