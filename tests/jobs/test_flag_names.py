"""Messages name the flags that a person gave, in place of the settings that they set."""
from __future__ import annotations

import pathlib
import tarfile

import pytest

from vit_jax import main
from vit_jax.core.errors import UserError
from vit_jax.data import splits
from vit_jax.jobs import flag_names

FLAGS = {'data.source': '--data', 'data.label_column': '--label_column', 'data.classes': '--classes'}


@pytest.mark.parametrize(('text', 'shown'), [
    ('data.source: expected one. Set --config.data.source=folder:P.', '--data: expected one. Set --data=folder:P.'),
    ('Set data.label_column.', 'Set --label_column.'),
    ('config.data.classes=a.txt: no', '--classes=a.txt: no'),
    ('/x/data.source, data.source_px and data.classes.txt', '/x/data.source, data.source_px and data.classes.txt')])
def test_settings_are_replaced_where_they_are_complete_names(text: str, shown: str) -> None:
  with pytest.raises(UserError) as error, flag_names.naming_flags(FLAGS):
    raise UserError(text)
  assert str(error.value) == shown


def test_the_kind_of_an_error_stays() -> None:
  with pytest.raises(splits.NoSplit), flag_names.naming_flags(FLAGS):
    raise splits.NoSplit('x')


@pytest.mark.parametrize(('words', 'says'), [
    (['prepare', '--data=wds:{here}', '--label_column=json'], '--label_column: expected an extension such as cls, or '),
    (['prepare', '--data=folder:PATH'], '--data: expected a folder of images, got the placeholder folder:PATH. Set '
     '--data=folder:PATH, where'),
    (['prepare', '--data=photos'], '--data: expected one of '),
    (['finetune', '--weights=x', '--data=photos'], '--data: expected one of ')])
def test_jobs_name_their_flags(words: list[str], says: str, tmp_path: pathlib.Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
  with tarfile.open(tmp_path / 'a.tar', 'w') as archive:
    archive.addfile(tarfile.TarInfo('1.png'))
  words = [word.format(here=tmp_path) for word in words]
  to = f'--workdir={tmp_path}/run' if words[0] == 'finetune' else f'--to={tmp_path}/set'
  assert main.run([*words, to]) == 2
  error = capsys.readouterr().err
  assert says in error and 'data.' not in error
