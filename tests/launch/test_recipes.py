"""What else lies in launch/: the cluster description, the image, the notebook and the page that explains them."""
from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import yaml

from vit_jax import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCH = ROOT / 'launch'


def test_the_page_names_every_file() -> None:
  text = (LAUNCH / 'README.md').read_text()
  for path in LAUNCH.rglob('*'):
    if path.is_file() and path.name != 'README.md' and '__pycache__' not in path.parts:
      assert f'`{path.relative_to(LAUNCH)}`' in text, path


def test_configs_named_here_exist() -> None:
  named = [(path.name, name) for path in LAUNCH.glob('*.*')
           for name in re.findall(r'--config=(?:configs/)?([a-z][\w]*)', path.read_text())]
  assert named and [one for one in named if not (ROOT / 'configs' / f'{one[1]}.py').exists()] == []


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
  extras = re.search(r'([a-z0-9|]+)\) pip install --editable "', text)
  assert extras and extras[1] == 'tpu|gpu|gpu12'
  for extra in extras[1].split('|'):
    assert f"'{extra}': [" in (ROOT / 'setup.py').read_text()


def test_the_last_target_of_the_image_is_the_job_and_compose_names_another() -> None:
  targets = re.findall(r'^FROM \S+ AS (\w+)$', (LAUNCH / 'Dockerfile').read_text(), re.MULTILINE)
  assert targets == ['base', 'serve', 'job']
  service = yaml.safe_load((LAUNCH / 'compose.yaml').read_text())['services']['serve']
  assert service['build']['target'] in targets and (LAUNCH / service['build']['context']).resolve() == ROOT
  assert service['ports'] == ['127.0.0.1:8471:8471']  # of this machine alone
  words = re.findall(r'^ENTRYPOINT (.*)$', (LAUNCH / 'Dockerfile').read_text(), re.MULTILINE)
  assert json.loads(words[0])[3:] == ['serve', '--host=0.0.0.0']
  assert main.parse([*json.loads(words[0])[3:], *service['command']]).values['port'] == 8471


def test_the_conda_environment_installs_the_project() -> None:
  found = yaml.safe_load((LAUNCH / 'environment.yml').read_text())
  (pip,) = [one['pip'] for one in found['dependencies'] if isinstance(one, dict)]
  assert pip == ['-e ..'] and (LAUNCH / '..' / 'setup.py').is_file()
