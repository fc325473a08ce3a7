"""A data folder reads nothing outside of itself, follows no circles, and reads no file that is too large; addresses."""
from __future__ import annotations

import errno
import os
import pathlib
import shlex
import sys

import pytest

from tests import fuzzing
from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.data import opening, user_files
from vit_jax.data.formats import folder as folders
from vit_jax.data.formats import image_list, tfds
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Source, read_one

LARGE = 2 * 10**9  # so that a test that fails takes no more memory


def image(path: pathlib.Path, seed: int = 0) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(encode(random_image(seed), '.png'))
  return path


def sparse(path: pathlib.Path, size: int = LARGE) -> pathlib.Path:
  """A file of this size that takes no space."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.touch()
  os.truncate(path, size)
  return path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  """Three images of each of two classes."""
  for name in ('cat', 'dog'):
    for number in range(3):
      image(tmp_path / 'data' / name / f'{number}.png', number)
  return tmp_path / 'data'


@pytest.fixture
def secret(tmp_path: pathlib.Path) -> pathlib.Path:
  return image(tmp_path / 'secret' / 'x.png', 9)


def opened(source: str, split: str = 'train', **settings: object) -> Source:
  return opening.open_split(schema.Data(source=source, **settings), split, image_px=(8, 8))  # type: ignore[arg-type]


def names(source: Source) -> list[str]:
  return sorted(os.path.relpath(source.describe(i)).rpartition('/')[2] for i in range(len(source)))


def message(call: object) -> str:
  with pytest.raises(UserError) as error:
    call()  # type: ignore[operator]
  fuzzing.check_message(str(error.value))
  return str(error.value)


def test_a_link_to_an_image_outside_is_skipped_and_counted(
    folder: pathlib.Path, secret: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  (folder / 'cat' / 'link.png').symlink_to(secret)
  (folder / 'cat' / 'below').symlink_to(secret.parent)
  (folder / 'cat' / 'inside.png').symlink_to(folder / 'cat' / '0.png')
  source = f'folder:{folder}'
  found = names(opened(source)) + names(opened(source, 'test'))
  assert sorted(found) == sorted([*('0.png', '1.png', '2.png') * 2, 'inside.png'])
  assert 'ignored 2 files: links out of the folder (2). Links out of the folder are not read; set data.follow_links=' \
      'true (prepare, predict and inspect: --follow_links) to read them' in caplog.text
  found = [name for split in ('train', 'test') for name in names(opened(source, split, follow_links=True))]
  assert 'link.png' in found and 'x.png' in found and len(found) == 9


@pytest.mark.parametrize('place', ['fox', 'train'])
def test_a_class_or_split_that_is_a_link_out_of_the_folder_is_an_error(
    place: str, folder: pathlib.Path, secret: pathlib.Path) -> None:
  if place == 'train':
    secret = image(secret.parent / 'cat' / 'y.png').parent
    image(folder / 'test' / 'cat' / '1.png')
  (folder / place).symlink_to(secret.parent)
  text = message(lambda: opened(f'folder:{folder}'))
  assert f'expected a file or folder inside of {folder}, got a link to {secret.parent}' in text
  assert 'set data.follow_links=true (prepare, predict and inspect: --follow_links)' in text
  assert len(opened(f'folder:{folder}', follow_links=True))


def test_the_folder_itself_may_be_a_link(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'link').symlink_to(folder)
  assert len(opened(f'folder:{tmp_path}/link')) == 5
  (folder / 'labels.csv').write_text('cat/0.png,cat\ndog/0.png,dog\n')
  assert len(opened(f'folder:{tmp_path}/link', holdout=.5)) == 1


@pytest.mark.parametrize('to', ['.', '..', '../data', 'cat/..'])
def test_a_link_to_the_folder_or_above_is_no_class(to: str, folder: pathlib.Path) -> None:
  (folder / 'c').symlink_to(to)
  source = opened(f'folder:{folder}', follow_links=True)
  assert source.class_names == ('cat', 'dog') and len(source) == 5
  (folder / 'cat' / 'd').symlink_to('../' + to)
  assert len(opened(f'folder:{folder}')) == 5


def test_links_to_links_are_read_once(tmp_path: pathlib.Path) -> None:
  """Two links a folder would otherwise be 2^30 folders."""
  for level in range(30):
    for name in 'ab':
      (tmp_path / 'cat' / f'{level:02}').mkdir(parents=True, exist_ok=True)
      (tmp_path / 'cat' / f'{level:02}' / name).symlink_to(f'../{level + 1:02}')
  image(tmp_path / 'cat' / '30' / 'x.png')
  finder = user_files.Finder()
  assert 1 <= len(list(finder.find(str(tmp_path), 'cat'))) <= 3
  assert finder.ignored['links to a folder that another link leads to'] > 20


def test_folders_inside_of_one_another_have_a_limit(folder: pathlib.Path) -> None:
  deep = folder / 'cat' / '/'.join('d' * 400)
  deep.mkdir(parents=True)
  assert 'expected at most 100 folders inside of one another' in message(lambda: opened(f'folder:{folder}'))


@pytest.mark.parametrize(('listed', 'said'), [
    ('/etc/passwd', "line 2: '/etc/passwd', which is not a path inside of the folder"),
    ('../secret/x.png', "line 2: '../secret/x.png', which is not a path inside of the folder"),
    ('cat/../../secret/x.png', 'which is not a path inside of the folder'),
    ('cat/\0', "line 2: 'cat/\\x00', which is not a path inside of the folder"),
    ('link.png', "line 2: 'link.png', a link out of the folder (to read it, set data.follow_links=true"),
    ('below/x.png', "line 2: 'below/x.png', a link out of the folder"),
    ('cat', "line 2: 'cat', which is not a file"), ('.', "line 2: '.', which is not"), ('lost.png', 'does not exist'),
    ('./cat/0.png', "line 2: './cat/0.png' twice"), ('pipe', "line 2: 'pipe', which is not a file"),
    ('/dev/zero', "line 2: '/dev/zero', which is not a path inside of the folder")])
def test_a_label_file_lists_files_of_its_folder_alone(
    listed: str, said: str, folder: pathlib.Path, secret: pathlib.Path) -> None:
  (folder / 'link.png').symlink_to(secret)
  (folder / 'below').symlink_to(secret.parent)
  os.mkfifo(folder / 'pipe')
  (folder / 'labels.csv').write_text(f'cat/0.png,cat\n{listed},xa\n')
  assert said in message(lambda: opened(f'folder:{folder}', holdout=.5))
  is_link = listed in ('link.png', 'below/x.png')
  if is_link:
    assert len(opened(f'folder:{folder}', holdout=.5, follow_links=True)) == 1


@pytest.mark.parametrize('name', ['labels.csv', 'labels.jsonl', 'labels.tsv'])
def test_a_label_file_is_not_a_link_out_of_the_folder_or_a_pipe(
    name: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'outside').write_text('cat/0.png,cat\ncat/1.png,cat\n')
  (folder / name).symlink_to(tmp_path / 'outside')
  assert 'inside of' in message(lambda: opened(f'folder:{folder}'))
  (folder / name).unlink()
  os.mkfifo(folder / name)
  assert 'something that is not a file' in message(lambda: opened(f'folder:{folder}'))


def test_masks_are_those_of_the_folder_alone(tmp_path: pathlib.Path, secret: pathlib.Path) -> None:
  root = tmp_path / 'masks'
  for kind in ('images', 'masks'):
    for number in range(3):
      image(root / kind / f'{number}.png', number)
  (root / 'classes.txt').symlink_to('/etc/passwd')
  assert 'got a link to /etc/passwd' in message(lambda: opened(f'masks:{root}'))
  (root / 'classes.txt').unlink()
  (root / 'masks' / '0.png').unlink()
  (root / 'masks' / '0.png').symlink_to(secret)
  assert 'expected a mask (NAME.png) for every image' in message(lambda: opened(f'masks:{root}'))
  assert len(opened(f'masks:{root}', follow_links=True)) == 2
  (root / 'masks').rename(tmp_path / 'others')
  (root / 'masks').symlink_to(tmp_path / 'others')
  assert 'got a link to' in message(lambda: opened(f'masks:{root}'))


def test_predict_reads_nothing_outside_of_a_folder(folder: pathlib.Path, secret: pathlib.Path) -> None:
  (folder / 'cat' / 'link.png').symlink_to(secret)
  assert len(list(image_list.find([str(folder)]))) == 6
  assert len(list(image_list.find([str(folder)], follow_links=True))) == 7
  assert list(image_list.find([str(folder / 'cat' / 'link.png')])) == [str(folder / 'cat' / 'link.png')]  # as given


def test_a_file_that_is_too_large_is_a_bad_image(folder: pathlib.Path) -> None:
  sparse(folder / 'cat' / '0.png')
  source = opened(f'folder:{folder}', holdout=.2)
  rows = [i for i in range(len(source)) if source.describe(i).endswith('cat/0.png')] or [0]
  if not source.describe(rows[0]).endswith('cat/0.png'):
    source, rows = opened(f'folder:{folder}', 'test', holdout=.2), [0]
  with pytest.raises(BadImage, match='has 2,000,000,000 bytes: expected at most 536,870,912. .* data.max_file_mib'):
    read_one(source, rows[0])
  (folder / 'labels.csv').write_text('cat/0.png,cat\ndog/0.png,dog\n')
  found = [opened(f'folder:{folder}', split, holdout=.5)for split in ('train', 'test')]
  large = next(one for one in found if one.describe(0).endswith('cat/0.png'))
  with pytest.raises(BadImage, match='2,000,000,000 bytes'):
    read_one(large, 0)


def test_the_limit_is_a_setting(folder: pathlib.Path) -> None:
  sparse(folder / 'cat' / '0.png', 2**20 + 1)
  with pytest.raises(BadImage, match='has 1,048,577 bytes: expected at most 1,048,576'):
    for split in ('train', 'test'):
      source = opened(f'folder:{folder}', split, max_file_mib=1)
      [read_one(source, i) for i in range(len(source))]
  source = opened(f'folder:{folder}', max_file_mib=2)
  assert [read_one(source, i) for i in range(len(source))]


@pytest.mark.parametrize('kind', ['a pipe', 'a device'])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'file'
  os.mkfifo(path) if kind == 'a pipe' else path.symlink_to('/dev/zero')
  with pytest.raises(OSError, match=f'{kind} in place of a file'):
    documents.read_bytes(path, 10**7)


@pytest.mark.parametrize(('content', 'said'), [
    (b'\xff', 'got byte 0xff in line 1, which is not UTF-8'), (b'a\nb\n\xe9', 'got byte 0xe9 in line 3')])
def test_the_line_of_a_byte_that_is_no_text_is_named(content: bytes, said: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a.txt'
  path.write_bytes(content)
  assert said in message(lambda: documents.read_text(path, 'x'))
  assert said in message(lambda: list(user_files.read_lines(path, 'x')))


def test_texts_have_a_limit_and_may_begin_with_a_mark(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a.txt'
  path.write_bytes(b'\xef\xbb\xbfcat\r\ndog')
  assert documents.read_text(path, 'x') == 'cat\r\ndog'
  assert list(user_files.read_lines(path, 'x')) == ['cat\r\n', 'dog']
  sparse(path)
  assert 'got a file of 2,000,000,000 bytes; at most 67,108,864 are read' in message(
      lambda: documents.read_text(path, 'x'))
  assert 'at most 1,073,741,824 are read' in message(lambda: list(user_files.read_lines(path, 'x')))
  assert 'No such file' in message(lambda: documents.read_text(tmp_path / 'lost', 'x'))
  assert 'a path with a zero byte' in message(lambda: documents.read_text('a\0b', 'x'))


@pytest.mark.skipif(sys.platform != 'linux', reason='limits memory as Linux does')
def test_files_of_20_gb_take_no_memory(tmp_path: pathlib.Path) -> None:
  """In a process that may take 300 MiB: an image, a class list, labels, descriptions and label maps."""
  program = tmp_path / 'work' / 'large.py'
  program.parent.mkdir()
  program.write_text(
      'import pathlib, sys\n'
      'import numpy as np, cv2\n'
      'from tests import fuzzing\n'
      'from vit_jax.data import user_files\n'
      'from vit_jax.config import schema\n'
      'from vit_jax.data.image.headers import BadImage\n'
      'from vit_jax.data import answers\nfrom vit_jax.data.labels import classes, real\n'
      'from vit_jax.data.formats import label_files\nfrom vit_jax.data.formats import array_record\n'
      'from vit_jax.inspect import images\n'
      f'root = pathlib.Path({str(tmp_path)!r})\n'
      'reads = [lambda: images.decode(str(root / "x.jpg")), lambda: classes.read(str(root / "x.jpg")),\n'
      '         lambda: classes.read_map(str(root / "x.jpg")), lambda: real.read(str(root / "x.jpg")),\n'
      '         lambda: real.read_predictions(str(root / "x.jpg")), lambda: array_record.read_info(root),\n'
      '         lambda: answers.read_info(root), \n'
      '         lambda: label_files.opener(str(root), schema.Data(holdout=.5))("train")]\n'
      'case = lambda number: fuzzing.outcome(reads[number], refusals=(BadImage, fuzzing.UserError))\n'
      'fuzzing.main(case, sys.argv[1:], num_bytes=300 * 2**20)\n')
  sparse(tmp_path / 'x.jpg', 20 * 10**9)
  for name in ('info.json', 'labels.csv'):
    (tmp_path / name).symlink_to(tmp_path / 'x.jpg')
  found = fuzzing.run('large', 0, 8, home=tmp_path)
  assert len(found) == 8 and all('20,000,000,000 bytes' in one['refused'] for one in found), found


@pytest.mark.parametrize('name', [b'caf\xe9', b'a\nb', b'a\x1b[2J', b'\xff\xfe'])
def test_a_class_folder_whose_name_is_no_text_is_an_error(name: bytes, folder: pathlib.Path) -> None:
  image(folder / os.fsdecode(name) / '0.png')
  image(folder / os.fsdecode(name) / '1.png')
  text = message(lambda: opened(f'folder:{folder}'))
  shown = {b'caf\xe9': 'caf\\xe9', b'a\nb': 'a\\nb', b'a\x1b[2J': 'a\\x1b[2J', b'\xff\xfe': '\\xff\\xfe'}[name]
  assert f'expected names of classes in UTF-8, without control characters, got {shown}. Rename the class.' in text


def test_an_image_may_have_any_name(folder: pathlib.Path) -> None:
  image(folder / 'cat' / os.fsdecode(b'\xff\n\x1b.png'))
  source = opened(f'folder:{folder}', holdout=.01)
  assert all(read_one(source, i).image for i in range(len(source)))
  assert [name for i in range(len(source)) if (name := source.describe(i)).endswith(os.fsdecode(b'\xff\n\x1b.png'))]


@pytest.mark.parametrize(('lines', 'said'), [
    ('"cat/0.png', 'at least one class, got none'),
    ('cat/0.png,"' + 'a' * 200_000, 'line 1: expected cells of at most 131,072 characters'),
    ('cat/0.png,a\x1b[2J', 'without control characters, got a\\x1b[2J'), (',,,\n', 'at least one class, got none')])
def test_a_label_file_with_odd_cells_is_an_error(lines: str, said: str, folder: pathlib.Path) -> None:
  (folder / 'labels_train.csv').write_text(lines)
  assert said in message(lambda: opened(f'folder:{folder}'))


@pytest.mark.parametrize(('line', 'said'), [
    ('[' * 100_000, 'JSON that is nested too deep'), ('{"image": "cat/0.png", "labels": ' + '[' * 90_000, 'nested'),
    ('{"image": ["cat/0.png"], "labels": []}', 'line 1, image: expected text without control characters, got a list'),
    ('{"image": "cat/0.png", "labels": [["cat"]]}', 'line 1, labels[0]: expected text'),
    ('{"image": "cat/0.png", "labels": "cat"}', "line 1, labels: expected a list, got 'cat'"),
    ('{"image": "cat/0.png", "labels": ["\\ud800"]}', "labels[0]: expected text without control characters, got '\\u"),
    ('{"image": "cat/0.png", "image": "x", "labels": []}', "the field 'image' twice"),
    ('{"image": "cat/0.png", "labels": [' + '9' * 5_000 + ']}', 'a number of too many digits'),
    ('3', 'expected a JSON object, got 3'), ('{"image": "cat/0.png"', 'no JSON at line 1, column 22'),
    ('{}', 'expected the field labels, got none')])
def test_a_line_of_json_names_its_field(line: str, said: str, folder: pathlib.Path) -> None:
  (folder / 'labels_train.jsonl').write_text(line)
  assert said in message(lambda: opened(f'folder:{folder}'))


def commands(where: str) -> list[str]:
  """The command lines that are offered for an address."""
  with pytest.raises(UserError) as caught:
    user_files.resolve(where, 'data.source')
  text = str(caught.value)
  assert text.startswith(f'data.source: expected a folder of this machine, got the address {where}.')
  return [line.strip() for line in text.splitlines() if line.startswith('  ')]


def test_google_storage_is_refused_with_the_commands_that_mount_and_copy_it() -> None:
  mount, copy, launcher, direct = commands('gs://b/sets/my set/')
  assert shlex.split(mount)[-3:] == ['--only-dir=sets/my set', 'b', '/data'] and '--cache-dir=/cache' in mount
  assert shlex.split(copy) == ['gcloud', 'storage', 'rsync', '--recursive', 'gs://b/sets/my set', '/data']
  assert '--data=gs://BUCKET/FOLDER' in launcher and direct.startswith('array_record:gs://BUCKET/FOLDER')
  assert '--only-dir' not in commands('gs://b')[0]


def test_other_storage_has_its_own_commands() -> None:
  mount, copy, *_ = commands('s3://b/x')
  assert mount == 'mount-s3 --read-only --cache=/cache --prefix=x/ b /data' and copy == 'aws s3 sync s3://b/x /data'
  with pytest.raises(UserError, match='Copy it to a folder'):
    user_files.resolve('hdfs://host/x', 'data.source')


def test_other_kinds_of_sources_refuse_an_address() -> None:
  for opened in (lambda: folders.opener('gs://b/x', schema.Data(), (8, 8)),
                 lambda: tfds.opener('cars', schema.Data(data_dir='gs://b/x'), (8, 8))):
    with pytest.raises(UserError, match='got the address gs://b/x. Mount it with a cache'):
      opened()


def test_prepared_datasets_are_located_in_buckets_and_folders(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', '/home/me')
  found = [user_files.locate(where, 'x') for where in ('gs://b/x/', 's3://b', '~/x')]
  assert found == ['gs://b/x', 's3://b', '/home/me/x']
  for where in ('gs://', 'gs:///x', 'hdfs://b/x', 'gs:/b/x'):
    with pytest.raises(UserError, match='^x: expected'):
      user_files.locate(where, 'x')


def test_paths_become_absolute_and_the_home_folder_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', '/home/me')
  assert user_files.resolve('~/x', 'data.source') == '/home/me/x'


def test_errors_of_the_system_say_what_to_do() -> None:
  error = failures.unreadable(OSError(errno.ENOTCONN, 'x', '/mnt/a'), 'image 3')
  assert 'image 3 (/mnt/a): expected to read it' in str(error) and 'Mount it again' in str(error)


def test_names_of_ignored_files_are_shown_escaped(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  for name in (b'x.\x1b[31mred', b'y.a\nb', b'z.\xff'):
    open(os.fsencode(folder) + b'/cat/' + name, 'wb').close()
  opened(f'folder:{folder}')
  assert r'.\x1b[31mred (1), .a\nb (1), .\xff (1)' in caplog.text and '\x1b' not in caplog.text


def test_the_advice_converts_the_images_that_are_there() -> None:
  assert user_files.describe_ignored({'.jxl': 2, '.txt': 1}).endswith("mogrify -format jpg '*.jxl'")


def test_a_folder_that_does_not_exist_is_an_error_of_the_user() -> None:
  assert '/nonexistent/a' in message(lambda: list(user_files.Finder().walk('/nonexistent/a/b')))


def test_subfolders_are_walked_if_the_files_are_not_read(folder: pathlib.Path) -> None:
  assert sorted(found.path for found in user_files.Finder().walk(str(folder))) == ['', 'cat', 'dog']
