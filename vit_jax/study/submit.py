"""Writes the job of a cluster that works on a study: an array of Slurm, or an indexed Job of Kubernetes.

Each task takes its share of the runs by its index (`--share=INDEX/TASKS`), so that the file system of the study
needs no locks. A task that is requeued resumes its runs.
"""
from __future__ import annotations

import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from vit_jax.core import failures
from vit_jax.record import run_directory

KINDS = ('slurm', 'k8s')
ALL = (0, 1)
"""The share of a process that works alone: (index, number of tasks)."""
_SLURM = """#!/usr/bin/env bash
# The study {name}: {tasks} tasks, each with its share of the runs. Submit it with: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --output={folder}/%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
{options}
cd {cwd}
{command} --share="$SLURM_ARRAY_TASK_ID/{tasks}" &
child=$! status=0
trap 'kill -TERM "$child" 2>/dev/null' TERM
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child" || status=$?  # also of a child that has ended before
case "$status" in  # 75 = stopped, or the environment failed; 134, 137 and 139 = killed
  {retried})
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ]; then
      scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
    fi ;;
esac
exit "$status"
"""
_K8S = """# The study {name}: {tasks} pods, each with its share of the runs. Apply it with: kubectl apply -f {file}
# Set the image, and mount the data and the directory of the study, which all pods share, at the paths of the command.
apiVersion: batch/v1
kind: Job
metadata:
  name: {label}
spec:
  completionMode: Indexed
  completions: {tasks}
  parallelism: {tasks}
  backoffLimitPerIndex: 100
  podFailurePolicy:
    rules:
      - action: FailIndex
        onExitCodes: {{containerName: study, operator: In, values: [{final}]}}
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      containers:
        - name: study
          image: REGION-docker.pkg.dev/PROJECT/REPOSITORY/vit_jax:gpu  # built with launch/Dockerfile
          command: [sh, -c]
          args:
            - exec {command} --share="$JOB_COMPLETION_INDEX/{tasks}"
          volumeMounts:
            - {{name: study, mountPath: {workdir}}}
      volumes:
        - name: study
          persistentVolumeClaim: {{claimName: study}}  # ReadWriteMany
"""


def write(kind: str, words: Sequence[str], workdir: pathlib.Path, *, name: str, tasks: int, options: str) -> str:
  """Writes the job, and returns how to submit it.

  Args:
    kind: one of `KINDS`.
    words: the arguments of the study's command, without `--submit` and `--share`.
    workdir: directory of the study, in which the job is written.
    name: of the study.
    tasks: number of tasks.
    options: of sbatch, such as '--partition=gpu --gpus=1', written into the job.
  """
  folder = workdir / 'submit'
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / ('job.sbatch' if kind == 'slurm' else 'job.yaml')
  program = sys.executable if kind == 'slurm' else 'python'
  label = run_directory.default_name(name).lower().replace('_', '-').strip('-.=+') or 'study'
  content = (_SLURM if kind == 'slurm' else _K8S).format(
      name=run_directory.default_name(name), label=label, tasks=tasks, last=tasks - 1, folder=folder, file=file,
      cwd=shlex.quote(os.getcwd()), workdir=workdir, final=failures.USER_ERROR,
      command=shlex.join([program, '-m', 'vit_jax.main', 'study', *words]),
      retried='|'.join(map(str, (failures.TRY_AGAIN, 134, 137, 139))),
      options=''.join(f'#SBATCH {word}\n' for word in shlex.split(options)))
  file.write_text(content)
  return f'sbatch {file}' if kind == 'slurm' else f'kubectl apply -f {file}'
