"""Tables of steps on TPUs: which programs are compiled, what is kept, and the figures at the complete depth."""
from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import tpu_block, tpu_tables
from benchmarks.tpu_tables import Figures, Row
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.models.vit import block
from vit_jax.plan import compile, compiled, overlap, schedule

PLAIN, FUSED = Row('L/16', 'v6e:4x4', 'plain'), Row('L/16', 'v6e:4x4', 'fused')
OTHER = Row('L/16', 'v6e:4x4', 'big_vision')


def test_rows_are_all_or_those_that_are_named() -> None:
  every = tpu_tables.rows()
  assert len(every) == len(set(every)) == 3 * (4 * 10 - 1 - 3 - 4)
  assert not [row for row in every if row.program == 'fused' and row.topology.startswith('v3')]
  assert {row.topology for row in every if row.program == 'fused_mlp'} == {'v6e:4x4', 'v5e:4x4'}
  assert tpu_tables.rows(['L/16', 'v6e', 'plain', 'fused', 'big_vision']) == [PLAIN, FUSED, OTHER]
  assert {row.batch for row in tpu_tables.rows(['L/16'])} == {16 * 64, 8 * 32}
  with pytest.raises(UserError, match="--only: expected words of .*'v6e'.*, got B/16, v9"):
    tpu_tables.rows(['v9', 'B/16', 'v6e'])


@pytest.mark.slow(reason='6 s of tracing and layouts')
def test_our_programs_have_the_sizes_of_a_row_and_no_rematerialization() -> None:
  config = tpu_tables._request(Row('H/14', 'v3:2x2', 'plain'), 2).config
  model = config.model
  assert isinstance(model, schema.ViT)
  assert (model.width, model.depth, model.mlp.hidden, model.heads, model.stem) == (
      1280, 2, 5120, 16, schema.PatchStem())
  assert (model.remat, model.attention.kernel, model.pool) == (
      schema.Remat.NONE, schema.AttentionKernel.XLA, schema.Mean())
  assert config.batch_size == 8 * 16 and config.mesh.fsdp == 8
  for program, mlp_kernel in (('fused', schema.MlpKernel.XLA), ('fused_mlp', schema.MlpKernel.FUSED)):
    model = tpu_tables._request(FUSED._replace(program=program), 2).config.model
    assert isinstance(model, schema.ViT)
    assert (model.attention.kernel, model.mlp.kernel) == (schema.AttentionKernel.FUSED, mlp_kernel)
  config = tpu_tables._request(FUSED._replace(program='auto'), 2).config
  assert isinstance(config.model, schema.ViT)
  assert 'mesh.fsdp' in config.mesh.chosen and config.model.attention.kernel is schema.AttentionKernel.FUSED
  assert (config.model.mlp.kernel, config.model.execution) == (schema.MlpKernel.FUSED, schema.Execution.UNROLLED)


def test_figures_at_the_complete_depth_lie_on_a_line() -> None:
  # 1 + 2 depth, 3 + depth, 5, depth / 2, 2 depth, and depth
  at_two, at_four = Figures(5., 5., 5., 1., 4., 2., 1.), Figures(9., 7., 5., 2., 8., 4., 3.)
  assert at_two.at(24, own_depth=2, other=at_four, other_depth=4) == Figures(49., 27., 5., 12., 48., 24., 23.)
  # From one depth alone: the same times, collectives in proportion, memory as it is.
  assert at_two.scaled(24, 2) == Figures(49., 27., 60., 1., 48., 24., 12.)


def test_figures_have_kernels_by_schedule_and_know_what_blocks_and_the_update_take(
    monkeypatch: pytest.MonkeyPatch) -> None:
  operations = [compiled.Operation('forward', f'{block.Plain.__name__}/mlp/up/dot_general', 4, 400, 100),
                compiled.Operation('backward', 'Transformer/encoderblock_1/dot_general', 1, 40, 10),
                compiled.Operation('forward', f'{block.Plain.__name__}/attn/fused_attention', 4, 0, 7),
                compiled.Operation('update', 'sqrt', 1, 2, 1), compiled.Operation('forward', 'Dense/dot', 1, 8, 3)]
  sent = [compiled.Collective('all-gather', 1, 10, 400), compiled.Collective(compiled.BETWEEN_SLICES, 1, 1, 10**9)]
  answer = compile.Answer(costs=compiled.NOTHING._replace(cycles=450, collectives=sent), peak_bytes=2**31,
                          operations=operations, waits=[overlap.Wait('all-gather', 1, 3 * 10**6, 2 * 10**6)],
                          schedule=schedule.Schedule(121, 0, 0, 0, 0, []))
  monkeypatch.setattr(compile, 'ask', lambda _: answer)
  monkeypatch.setattr(tpu_tables, '_request', lambda row, depth: None)
  cycles, chip = 1e3 / 1.75e9, 200e9
  assert tpu_tables.measure(FUSED, 4, checkout='') == pytest.approx(Figures(
      457 * cycles, 121 * cycles, 1e3 * 400 / chip, 2., 449 * cycles, 118 * cycles, 2.))


def checkout(folder: pathlib.Path) -> str:
  """The path of something that looks like a checkout of big_vision."""
  (folder / 'clone' / 'big_vision').mkdir(parents=True, exist_ok=True)
  return str(folder / 'clone')


def test_a_folder_that_is_no_checkout_is_refused_before_anything_is_compiled(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert tpu_tables.main([str(tmp_path), '--only=L/16,v6e,big_vision', f'--big_vision={tmp_path}']) == 2
  assert 'error: --big_vision: expected a checkout, a folder that has' in capsys.readouterr().err


def test_only_what_is_missing_is_compiled_and_tables_have_what_is_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  compiled = []

  def measure(row: Row, depth: int, *, checkout: str) -> Figures:
    compiled.append((row, depth))
    each = {'plain': 3., 'fused': 2., 'big_vision': 4., 'big_vision, scanned': 6.}[row.program]
    return Figures(10. + depth * each, depth * each, 1., 1., depth * each, depth * each, .5)

  monkeypatch.setattr(tpu_tables, 'measure', measure)
  assert tpu_tables.main([str(tmp_path), '--only=L/16,v6e,plain,fused,big_vision', '--depths=2,4']) == 0
  assert compiled == [(row, depth) for row in (PLAIN, FUSED) for depth in (2, 4)]
  shown = capsys.readouterr().out
  assert '| plain' in shown and '| big_vision' not in shown.replace('best big_vision', '') and '| –' in shown
  words = '--only=L/16,v6e,plain,fused,big_vision,big_vision, scanned'.replace(', scanned', '')
  assert tpu_tables.main([str(tmp_path), words, f'--big_vision={checkout(tmp_path)}', '--depths=2,4']) == 0
  assert compiled[4:] == [(OTHER, 2), (OTHER, 4)]
  text = (tmp_path / 'tables.md').read_text()
  # 24 blocks: 10 + 72 and 10 + 96 by the estimate, 72 and 96 by schedule.
  plain = next(line for line in text.splitlines() if '| plain' in line)
  assert [cell.strip() for cell in plain.split('|')][1:-1] == [
      'v6e:4x4, 64', 'plain', '82.0', '72.0', '1.0', '0.5', '1.00', '1.29, 1.33', '2, 4']
  assert '58.0' in text and text.startswith('L/16, 24 blocks, 224 px:')


def test_a_program_of_the_complete_depth_counts_alone(tmp_path: pathlib.Path) -> None:
  lines = [{'row': PLAIN, 'depth': depth, **Figures(ms, ms, 1., 9., ms, ms)._asdict()}
           for depth, ms in ((4, 7.), (24, 50.))]
  del lines[1]['exposed_ms']  # a file of before this figure
  (tmp_path / tpu_tables.FILE).write_text(''.join(json.dumps(line) + '\n' for line in lines))
  row = tpu_tables.render(tmp_path).splitlines()[-1]
  assert [cell.strip() for cell in row.split('|')][3:-1] == ['50.0', '50.0', '1.0', '–', '9.00', '–', '24, all']


def test_a_program_that_fails_is_told_and_what_was_found_before_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  def measure(row: Row, depth: int, *, checkout: str) -> Figures:
    if depth == 4:
      raise UserError('temporaries need 40.00 GiB')
    return Figures(1., 1., 1., 1., 1., 1.)

  monkeypatch.setattr(tpu_tables, 'measure', measure)
  assert tpu_tables.main([str(tmp_path), '--only=L/16,v6e,plain', '--depths=2,4']) == 2
  assert 'error: temporaries need 40.00 GiB' in capsys.readouterr().err
  assert [*tpu_tables.found(PLAIN, tmp_path)] == [2] and tpu_tables.complete(FUSED, tmp_path) is None


def test_tables_of_what_is_known_are_put_between_the_comments_of_a_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(tpu_tables, 'measure', lambda row, depth, checkout: Figures(9., 8., 1., 2.5, 8., 7.))
  assert tpu_tables.main([str(tmp_path), '--only=L/16,v6e,plain']) == 0
  page = tmp_path / 'page.md'
  page.write_text(f'before\n{tpu_tables.BEGIN}\nold\n{tpu_tables.END}\nafter\n')
  monkeypatch.setattr(tpu_tables, 'measure', None)
  assert tpu_tables.main([str(tmp_path), '--known', f'--into={page}']) == 0
  text = page.read_text()
  assert text.startswith('before\n') and text.endswith('\nafter\n') and 'old' not in text
  # 24 of 4 blocks: 1 + 6 * 8 and 1 + 6 * 7 ms; memory is that of 4.
  assert '| 49.0 ' in text and '| 43.0 ' in text and '2.50 with 4 blocks' in text
  (tmp_path / 'other.md').write_text('text')
  assert tpu_tables.main([str(tmp_path), '--known', f'--into={tmp_path}/other.md']) == 2
  assert '--into: expected a file with' in capsys.readouterr().err


def test_one_block_alone_is_compiled_once_for_each_network_and_has_a_table_of_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  asked = []

  def ask(request: tpu_block.Request) -> compile.Answer:
    asked.append(request)
    cycles = {'xla': 1_750_000, 'fused': 1_050_000}[request.attention] * (2 if request.checkout else 1)
    return compile.Answer(costs=compiled.NOTHING._replace(cycles=cycles), peak_bytes=2**32, temp_bytes=2**31,
                          schedule=schedule.Schedule(cycles // 2, 0, 0, 0, 0, []))

  monkeypatch.setattr(tpu_block, 'ask', ask)
  words = '--only=H/14,v6e,v3,plain,fused,fused_mlp,big_vision,big_vision'
  assert tpu_tables.main([str(tmp_path), words, '--depths=0', f'--big_vision={checkout(tmp_path)}']) == 0
  wide = {'tokens': 256, 'width': 1280, 'heads': 16, 'mlp': 5120}
  assert asked == [
      tpu_block.Request('v6e:1x1', 32, **wide), tpu_block.Request('v6e:1x1', 32, **wide, attention='fused'),
      tpu_block.Request('v6e:1x1', 32, **wide, attention='fused', mlp_kernel='fused'),
      tpu_block.Request('v6e:1x1', 32, **wide, checkout=checkout(tmp_path)),
      tpu_block.Request('v3:2x2', 16, **wide), tpu_block.Request('v3:2x2', 16, **wide, checkout=checkout(tmp_path))]
  text = (tmp_path / 'tables.md').read_text()
  assert text.startswith('One block of H/14, 224 px, on one device:') and 'compiled blocks' not in text
  assert '| v6e, 32      | fused      | 0.60         | 0.30            | 2.00                 | 3.33, 3.33' in text
  assert tpu_tables.complete(Row('H/14', 'v6e:4x4', 'plain'), tmp_path) is None
  every = [row for row in tpu_tables.rows(['H/14', 'v6e']) if row.program.startswith('big_vision')]
  tpu_tables.collect(every, [tpu_tables.BLOCK], tmp_path, checkout=checkout(tmp_path))
  assert len(every) == 4 and len(asked) == 6, 'settings of sharding make no other block'


def test_the_tables_of_the_page_are_those_of_the_figures_that_are_kept(tmp_path: pathlib.Path) -> None:
  root = pathlib.Path(__file__).resolve().parents[2]
  page = tmp_path / 'page.md'
  page.write_text(text := (root / 'benchmarks' / 'records' / 'TABLES.md').read_text())
  tpu_tables.put(tpu_tables.render(root / 'launch' / 'tpu_tables'), page)
  assert page.read_text() == text, ('python -m benchmarks.tpu_tables launch/tpu_tables --known '
                                    '--into=benchmarks/records/TABLES.md')
