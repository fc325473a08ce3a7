"""Tables of steps on TPUs: which programs are compiled, what is kept, and the figures at the complete depth."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax.bench import tpu_tables
from vit_jax.bench.tpu_tables import Figures, Row
from vit_jax.config import schema
from vit_jax.core.errors import UserError

PLAIN, FUSED = Row('L/16', 'v6e:4x4', 'plain'), Row('L/16', 'v6e:4x4', 'fused')
OTHER = Row('L/16', 'v6e:4x4', 'big_vision')


def test_rows_are_all_or_those_that_are_named() -> None:
  every = tpu_tables.rows()
  assert len(every) == len(set(every)) == 3 * (4 * 6 - 1)
  assert not [row for row in every if row.program == 'fused' and row.topology.startswith('v3')]
  assert tpu_tables.rows(['L/16', 'v6e', 'plain', 'fused', 'big_vision']) == [PLAIN, FUSED, OTHER]
  assert {row.batch for row in tpu_tables.rows(['L/16'])} == {16 * 64, 8 * 32}
  with pytest.raises(UserError, match="--only: expected words of .*'v6e'.*, got B/16, v9"):
    tpu_tables.rows(['v9', 'B/16', 'v6e'])


@pytest.mark.slow(reason='1 s of tracing')
def test_our_programs_have_the_sizes_of_a_row_and_no_rematerialization() -> None:
  config = tpu_tables._request(Row('H/14', 'v3:2x2', 'plain'), 2).config
  model = config.model
  assert isinstance(model, schema.ViT)
  assert (model.width, model.depth, model.mlp, model.heads, model.stem) == (1280, 2, 5120, 16, schema.PatchStem())
  assert (model.remat, model.attention, model.pool) == (
      schema.Remat.NONE, schema.AttentionKernel.XLA, schema.Pool.MEAN)
  assert config.batch_size == 8 * 16 and config.mesh.fsdp == 8
  assert tpu_tables._request(FUSED, 2).config.model.attention is schema.AttentionKernel.FUSED


def test_figures_at_the_complete_depth_lie_on_a_line() -> None:
  # 1 + 2 depth, 3 + depth, 5, and depth / 2
  at_two, at_four = Figures(5., 5., 5., 1.), Figures(9., 7., 5., 2.)
  assert at_two.at(24, own_depth=2, other=at_four, other_depth=4) == Figures(49., 27., 5., 12.)


def test_only_what_is_missing_is_compiled_and_tables_have_what_is_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  compiled = []

  def measure(row: Row, depth: int, *, checkout: str) -> Figures:
    compiled.append((row, depth))
    each = {'plain': 3., 'fused': 2., 'big_vision': 4., 'big_vision, scanned': 6.}[row.program]
    return Figures(10. + depth * each, depth * each, 1., 1.)

  monkeypatch.setattr(tpu_tables, 'measure', measure)
  assert tpu_tables.main([str(tmp_path), '--only=L/16,v6e,plain,fused,big_vision']) == 0
  assert compiled == [(row, depth) for row in (PLAIN, FUSED) for depth in (2, 4)]
  shown = capsys.readouterr().out
  assert '| plain' in shown and '| big_vision' not in shown.replace('best big_vision', '') and '| –' in shown
  words = '--only=L/16,v6e,plain,fused,big_vision,big_vision, scanned'.replace(', scanned', '')
  assert tpu_tables.main([str(tmp_path), words, '--big_vision=/checkout']) == 0
  assert compiled[4:] == [(OTHER, 2), (OTHER, 4)]
  text = (tmp_path / 'tables.md').read_text()
  # 24 blocks: 10 + 72 and 10 + 96 by the estimate, 72 and 96 by schedule.
  plain = next(line for line in text.splitlines() if '| plain' in line)
  assert [cell.strip() for cell in plain.split('|')][1:-1] == [
      'v6e:4x4, 64', 'plain', '82.0', '72.0', '1.0', '1.00', '1.29, 1.33', '2, 4']
  assert '58.0 without the kernels' in text and text.startswith('L/16, 24 blocks, 224 px:')


def test_a_program_that_fails_is_told_and_what_was_found_before_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  def measure(row: Row, depth: int, *, checkout: str) -> Figures:
    if depth == 4:
      raise UserError('temporaries need 40.00 GiB')
    return Figures(1., 1., 1., 1.)

  monkeypatch.setattr(tpu_tables, 'measure', measure)
  assert tpu_tables.main([str(tmp_path), '--only=L/16,v6e,plain']) == 2
  assert 'error: temporaries need 40.00 GiB' in capsys.readouterr().err
  assert len(list(tmp_path.glob('*.json'))) == 1 and tpu_tables.complete(PLAIN, tmp_path) is None
