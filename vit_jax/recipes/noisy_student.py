"""Noisy Student (Xie et al. 2020, arXiv 1911.04252): rounds of a study in which each student is the next teacher."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from vit_jax.config import schema as s

TEACHER, STUDENT, HIGH = 'teacher', 'student', 'at_800px'
FIGURES = (s.Figure('round', 'test %'),)
FILES = ('.npz', '.safetensors', '.pth', '.pt', '.bin', '.msgpack')  # of weights, as `weights.addresses.SUFFIXES`


def name(number: int) -> str:
  """Returns the name of the run of a round; round 0 is that of the teacher."""
  return f'{STUDENT}_{number}' if number else TEACHER


def taught(config: s.Config, teacher: str, pseudo: s.Pseudo, number: int) -> s.Config:
  """Returns the run of a student: `config` with images labeled by the teacher, which is a run or a file of weights.

  Labels lie in the directory of a run, or beside a file; those of each round have a name of their own.
  """
  labels = f'{teacher}{"." if teacher.endswith(FILES) else "/"}pseudo_{number}'
  return s.replaced(config, {
      'name': name(number), 'data.pseudo': dataclasses.replace(pseudo, teacher=teacher, labels=labels)})


def rounds(students: Callable[[int], s.Config], pseudo: Callable[[int], s.Pseudo], num: int, *,
           teacher: str = '') -> tuple[dict[str, s.Config], tuple[Callable[[s.Results], dict[str, s.Config]], ...]]:
  """Returns the runs that can begin at once, and the stages after them.

  Args:
    students: number of a round, from 0, to its run; that of round 0 is the teacher.
    pseudo: likewise to the images that are labeled for it, from 1.
    num: rounds with a student.
    teacher: weights that are there already, in place of round 0; '' = none.
  """
  def stage(number: int) -> Callable[[s.Results], dict[str, s.Config]]:
    def runs(results: s.Results) -> dict[str, s.Config]:
      teacher_run = results.get(name(number - 1))
      if teacher_run is None:
        return {}
      return {name(number): taught(students(number), teacher_run.workdir, pseudo(number), number)}
    return runs

  if not teacher:
    return {TEACHER: students(0)}, tuple(stage(number) for number in range(1, num + 1))
  return ({name(1): taught(students(1), teacher, pseudo(1), 1)},
          tuple(stage(number) for number in range(2, num + 1)))


def rows(results: s.Results) -> list[s.Row]:
  """Returns a row for each round: its accuracy, and the gain over the round before and over the first."""
  rows: list[s.Row] = []
  scores: list[float] = []  # of the rounds before
  for run, result in results.items():
    score = None if result.headline is None else 100 * result.headline
    is_last_again = run == HIGH and bool(rows)  # the last student, evaluated at another size
    rows.append({
        'run': run, 'round': rows[-1]['round'] if is_last_again else int(run.partition('_')[2] or 0), 'test %': score,
        'over its teacher': round(score - scores[-1], 2) if score is not None and scores else None,
        'over the first': round(score - scores[0], 2) if score is not None and scores else None,
        'steps': result.step, 'images a step': result.config.batch_size, 'parameters': result.num_params,
        'exaFLOPs': result.exaflops, 'seconds': round(result.seconds, 1)})
    if score is not None:
      scores.append(score)
  return rows
