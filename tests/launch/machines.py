"""Machines that are not there: programs on the PATH that note their arguments and answer as the real ones do."""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASH = shutil.which('bash') or '/bin/bash'
HANGS_S = 540
"""No script takes so long, however busy the machine is."""

GCLOUD = r"""
printf '%s\n' "$*" >> "$FAKE/calls"
on_hosts() { for host in "$FAKE"/host*; do (cd "$host" && "$@"); done; }
for word in "$@"; do case "$word" in
  --worker=*) worker="${word#*=}" ;;
  --command=*) command="${word#*=}" ;;
  --node-count=*) nodes="${word#*=}" ;;
esac; done
case "$3 $4" in
  "queued-resources describe")
    if [ -e "$FAKE/broken" ]; then cat "$FAKE/broken" >&2; exit 1; fi
    if [ ! -e "$FAKE/states" ]; then echo 'ERROR: NOT_FOUND: no such resource' >&2; exit 1; fi
    head -n 1 "$FAKE/states"
    if [ "$(wc -l < "$FAKE/states")" -gt 1 ]; then sed -i 1d "$FAKE/states"; fi ;;
  "queued-resources create")
    if [ -e "$FAKE/refuse" ]; then echo 'ERROR: Quota exceeded' >&2; exit 1; fi
    cat "$FAKE/new" > "$FAKE/states"
    for ((i = 0; i < 2 * ${nodes:-1}; i++)); do mkdir -p "$FAKE/host$i"; done ;;
  "queued-resources delete") rm -rf "$FAKE"/states "$FAKE"/host* ;;
  "tpu-vm describe") echo READY ;;
  "tpu-vm scp" | "queued-resources scp") for host in "$FAKE"/host*; do cp "$5" "$host/${6#*:}"; done ;;
  "tpu-vm ssh" | "queued-resources ssh")
    for host in "$FAKE"/host*; do
      if [ "$worker" = all ] || [ "$host" = "$FAKE/host$worker" ]; then
        i="${host##*host}"  # two hosts in a slice
        (cd "$host" && HOME="$host" INDEX=$((i % 2)) SLICE=$((i / 2)) bash -c "$command")
      fi
    done ;;
esac
"""
CURL = r"""
case "$*" in
  *worker-network-endpoints) echo "a:1:${ADDRESS:-10.0.$SLICE.1},b:2:10.0.$SLICE.2" ;;
  *agent-worker-number) echo "$INDEX" ;;
  *tpu-env)
    if [ ! -e "$FAKE/host2" ]; then exit 22; fi
    printf "%s: '%s'\\n" ZONE here MEGASCALE_NUM_SLICES 2 MEGASCALE_SLICE_ID "$SLICE" \
      MEGASCALE_COORDINATOR_ADDRESS 10.0.0.1:8080 ;;
esac
"""
NOTE = r'printf "%s %s\n" "${0##*/}" "$*" >> "$FAKE/calls"'


class Machines:
  """A folder of programs, put first on the PATH, and what they noted."""

  def __init__(self, folder: pathlib.Path) -> None:
    self.folder = folder
    (folder / 'bin').mkdir()
    self.env = {**os.environ, 'PATH': f'{folder / "bin"}:{os.environ["PATH"]}', 'FAKE': str(folder),
                'PYTHON': sys.executable, 'VIT_JAX_PAUSE_S': '0.05', 'TMPDIR': str(folder)}
    for name in list(self.env):
      if name.startswith(('SLURM_', 'VIT_JAX_JOB')):
        del self.env[name]

  def add(self, name: str, body: str) -> None:
    """A program of that name."""
    path = self.folder / 'bin' / name
    path.write_text(f'#!{BASH}\n{body}\n')
    path.chmod(0o755)

  def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BASH, str(ROOT / 'launch' / script), *arguments], env={**self.env, **env}, text=True,
                          capture_output=True, check=False, timeout=HANGS_S, cwd=self.folder)

  @property
  def calls(self) -> list[str]:
    path = self.folder / 'calls'
    return path.read_text().splitlines() if path.exists() else []

  def count(self, words: str) -> int:
    """How many calls hold these words."""
    return sum(words in call for call in self.calls)


@pytest.fixture
def machines(tmp_path: pathlib.Path) -> Machines:
  return Machines(tmp_path)
