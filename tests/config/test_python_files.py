"""A config that does not run is a message with the file and the line of its own code."""
from __future__ import annotations

import errno
import pathlib

import pytest

from vit_jax.config import files, python_files
from vit_jax.core.errors import TemporaryError, UserError

GOOD = 'from vit_jax.config import schema as s\ndef get_config():\n  return s.Config()\n'


def said(path: pathlib.Path, content: str | bytes, spec: str = '') -> str:
  """The message for a config with this content."""
  path.write_bytes(content.encode() if isinstance(content, str) else content)
  with pytest.raises(UserError) as error:
    files.load(f'{path}{spec}', [])
  assert 'vit_jax/config/' not in str(error.value)  # no line of ours
  return str(error.value)


@pytest.mark.parametrize(('content', 'parts'), [
    ('x = 1\ndef get_config(:\n', [', line 2: expected a config that runs, got SyntaxError', 'def get_config(:']),
    ('if 1:\nx = 1\n', [', line 2:', 'expected an indented block']),
    ('import no_such_package\n', [', line 1:', "ModuleNotFoundError: No module named 'no_such_package'"]),
    ('from vit_jax.config import schema as s\ndef get_config():\n  return s.Config(batch=3)\n',
     [', line 3, in get_config: Config: expected the name of a setting, got', 'return s.Config(batch=3)']),
    ('from vit_jax.config import schema as s\ndef get_config():\n  c = s.Config()\n  c.lenght = "3 epochs"\n',
     [", line 4, in get_config: Config: expected the name of a setting, got 'lenght'. Did you mean length?\n"
      '    c.lenght = "3 epochs"']),
    ('from vit_jax.config import schema as s\nOPTIMIZER = s.AdamW(batch_size=256)\n',
     [", line 2: AdamW: expected the name of a setting, got 'batch_size'. Did you mean base_batch_size?\n"
      "    OPTIMIZER = s.AdamW(batch_size=256)"]),
    ('def helper():\n  return 1 / 0\ndef get_config():\n  return helper()\n', [', line 2, in helper:', 'ZeroDivis']),
    ('def get_config():\n  return get_config()\n', [', line 2, in get_config', 'RecursionError']),
    ('raise SystemExit(3)\n', [', line 1:', 'SystemExit: 3']),
    ('raise Exception("two\\nlines")\n', ['got Exception: two.\n']),
    ('import json\njson.loads("{")\n', [', line 2:', 'JSONDecodeError']),
    ('x = 1\0\n', ['null bytes']),
    (b'x = "\xff\xfe"\n', ['SyntaxError', 'utf-8']),
    (b'\x89PNG\r\n\x1a\n\0\0', ['expected a config that runs, got SyntaxError']),
    ('', ['expected a function get_config() that returns a vit_jax.config.schema.Config, got none.']),
    ('get_config = 3\n', ['expected a function get_config()']),
    ('def get_config():\n  pass\n',
     ['.Config or Study, or an ml_collections.ConfigDict, from get_config(), got NoneType.']),
    ('def get_config(size):\n  pass\n', ['expected arguments after a colon, as get_config(size) takes them'])])
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    tmp_path: pathlib.Path, content: str | bytes, parts: list[str]) -> None:
  path = tmp_path / 'mine.py'
  message = said(path, content)
  assert str(path) in message, message
  for part in parts:
    assert part in message, message


def test_arguments_for_a_config_that_takes_none_are_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match="--config: expected digits alone, as it takes no arguments, got 'foo=3' behind"):
    files.load('digits:foo=3', [])
  assert files.load('digits:', []) == files.load('digits', [])


def test_paths_that_are_no_files_are_refused(tmp_path: pathlib.Path) -> None:
  for spec, part in ((str(tmp_path), 'which is a directory'), ('', "got ''"), ('a\0b', 'got '), ('x' * 5000, 'got '),
                     (':', "got ''"), ('/', 'which is a directory'), (str(tmp_path / 'no.json'), 'no.json')):
    with pytest.raises(UserError, match=part) as error:
      files.load(spec, [])
    assert len(str(error.value)) < 2000


def test_a_file_that_may_not_be_read_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  path = tmp_path / 'mine.py'
  path.write_text(GOOD)
  def denied(self: pathlib.Path) -> bytes:
    raise PermissionError(13, 'Permission denied', str(self))

  monkeypatch.setattr(pathlib.Path, 'read_bytes', denied)
  with pytest.raises(UserError, match='mine.py: expected to read it, got "Permission denied"'):
    files.load(str(path), [])


def test_a_path_may_hold_colons_and_spaces(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'a:b c'
  folder.mkdir()
  (folder / 'mine.py').write_text(GOOD.replace('get_config()', 'get_config(x="")').replace('Config()', 'Config(x)'))
  assert files.load(f'{folder}/mine.py:d:e', []).name == 'd:e'


def test_a_changed_file_is_run_as_it_is_now_and_leaves_nothing_beside_it(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  for name in ('a', 'b'):
    path.write_text(GOOD.replace('Config()', f'Config(name={name!r})'))
    assert files.load(str(path), []).name == name
  assert [p.name for p in tmp_path.iterdir()] == ['mine.py']


def test_a_config_may_define_dataclasses(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n'
                  '  x: int = 3\n' + GOOD.replace('Config()', 'Config(seed=A().x)'))
  assert python_files.run(path, None).seed == 3


@pytest.mark.parametrize('content', [b'', b'{', b'\xff', b'[' * 100_000, b'{"seed": ' + b'9' * 5000 + b'}',
                                     b'{"optimizer": {"lr": 1' + b'0' * 400 + b'}}', b'null', b'\0'])
def test_json_that_holds_no_config_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
  said(tmp_path / 'config.json', content)


@pytest.mark.parametrize('name', ['then', 'table', 'curves'])
def test_functions_of_a_study_that_do_not_run_are_messages_too(name: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'mine.py').write_text(
      'from vit_jax.config import schema as s\ndef choose(results):\n  return results["none"]\n'
      f'def get_config():\n  return s.Study("two", {{"a": s.Config()}}, {name}='
      f'{"(choose,)" if name == "then" else "choose"})\n')
  study = files.load_study(str(tmp_path / 'mine.py'), [])
  with pytest.raises(UserError, match=r"mine.py, line 3, in choose: expected a config that runs, got KeyError: 'no"):
    (study.then[0] if name == 'then' else getattr(study, name))({})


def test_a_temporary_failure_in_a_config_stays_one(tmp_path: pathlib.Path) -> None:
  text = 'from vit_jax.core.errors import TemporaryError\n{}raise TemporaryError("x: expected to read it, got none.")\n'
  for start in ('', 'def get_config():\n  '):
    (tmp_path / 'mine.py').write_text(text.format(start))
    with pytest.raises(TemporaryError, match='^x: expected to read it, got none.$'):
      files.load(str(tmp_path / 'mine.py'), [])


def test_storage_that_fails_in_a_config_may_be_tried_again(tmp_path: pathlib.Path) -> None:
  for number, kind in ((errno.ESTALE, TemporaryError), (errno.ENOENT, UserError)):
    (tmp_path / 'mine.py').write_text(f'raise OSError({number}, "failed")\n')
    with pytest.raises(kind, match='mine.py, line 1: expected a config that runs, got '):
      files.load(str(tmp_path / 'mine.py'), [])
