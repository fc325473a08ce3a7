"""The documentation site: generated pages have every flag and setting; links lead to pages, or stop a strict build."""
from __future__ import annotations

import html
import importlib.util
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
from typing import Any

import pytest

import vit_jax
from vit_jax.commands import JOBS
from vit_jax.config import files
from vit_jax.recipes import sizes

SITE = pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'site'


def load(name: str) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(f'site_{name}', SITE / f'{name}.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_page_of_jobs_has_every_flag_with_its_range_and_default() -> None:
  text = load('reference').jobs()
  for name, job in JOBS.items():
    part = re.split(r'(?m)^## ', text.split(f'\n## {name}\n')[1])[0]
    assert job.summary in part
    for flag in job.flags.values():
      assert f'| `--{flag.name}` |' in part, (name, flag.name)
  assert '| `--processes` | `N`, 1 to 1,024 | `1` | Runs at the same time. |' in text


def all_settings() -> str:
  return '\n'.join(load('reference').settings().values())


def test_each_section_of_the_settings_has_a_page_and_nothing_is_on_two() -> None:
  pages = load('reference').settings()
  assert list(pages) == ['settings', *(f'settings_{name}' for name in load('reference').SECTIONS)]
  rows = re.findall(r'^\| `([^`]+)`', all_settings(), re.M)
  assert max(len(text) for text in pages.values()) < 0.5 * len(all_settings())
  assert all(re.match(rf'{name.removeprefix("settings_")}\b', row) for name, text in pages.items() if name != 'settings'
             for row in re.findall(r'^\| `([^`]+)`', text, re.M))
  assert 'batch_size' in rows


@pytest.mark.parametrize('config', [
    'digits', 'mae_cifar10', 'dino_cifar10', 'distill_i1k', 'bit_hyperrule:BiT-R50x1,pets'])
def test_the_page_of_settings_has_every_setting_of_a_config(config: str) -> None:
  listed = set(re.findall(r'^\| `([^`]+)`', all_settings(), re.M))
  for name in files.known_settings(config):
    if not name.startswith('objective.teacher.'):  # settings of a network, listed under `model`
      assert re.sub(r'^evals\.\w+', 'evals.NAME', name) in listed, name


@pytest.mark.parametrize('text', [
    'mix:0.7*SOURCE,0.3*SOURCE', 'the word {data}', 'FILE<suffix> & more > 0', '_seed_ and a_b', r'a\*b', 'one ` alone',
    'two **stars** and [a](b)', '<script>x</script>', '![x](y)'])
def test_a_generated_text_is_shown_as_it_is(text: str) -> None:
  markdown = pytest.importorskip('markdown')
  page = load('reference')
  shown = markdown.markdown('\n'.join(page.table(('a', 'b'), [(text, '`0.7*x_`')])), extensions=['tables', 'attr_list'])
  assert f'<td>{html.escape(text, quote=False)}</td>\n<td><code>0.7*x_</code></td>' in shown
  assert markdown.markdown(page.escaped(text)) == f'<p>{html.escape(text, quote=False)}</p>'


def test_brackets_of_a_cell_are_no_link() -> None:
  row = load('reference').row
  assert row('tfds:NAME[/CONFIG]', '`a[0]`', 'x|y') == r'| tfds:NAME\[/CONFIG\] | `a[0]` | x\|y |'
  assert row('mix:0.7*A', '{data}', '<b>') == r'| mix:0.7\*A | \{data\} | &lt;b&gt; |'


def test_a_setting_is_described_by_type_range_unit_default_and_comment() -> None:
  text = all_settings()
  for row in ('| `image_px` | 2 whole numbers, with commas; 1 to 65535 px | `224,224` |',
              '| `model.gelu` | `tanh`, `exact`', '| `train.log_every` | text; duration, not 0 | `50 steps` |',
              '| `optimizer.lr` | number; at least 0 | `0.001` |', ' `bicubic`: '):
    assert row in text


@pytest.mark.parametrize(('comment', 'wanted'), [
    ('height, width', 'Height, width.'), ('a metric, such as test/top1', 'A metric, such as test/top1.'), ('', ''),
    ('It is read.', 'It is read.'), ('0 = off', '0 = off.'), ('timm and others', 'timm and others.'),
    ('digits | synthetic', 'digits | synthetic.'), ('test/top1 is best', 'test/top1 is best.'),
    ('r, the size', 'r, the size.'),
    ('wds: the extension', 'wds: the extension.'), ('of a probe: what it sees', 'Of a probe: what it sees.')])
def test_a_comment_is_shown_as_a_sentence(comment: str, wanted: str) -> None:
  assert load('reference').sentence(comment) == wanted


def test_notes_of_settings_and_flags_begin_with_a_capital_letter_or_a_name() -> None:
  rows = re.findall(r'^\| `[^`]+` .* \| ([^|]+) \|$', all_settings() + load('reference').jobs(), re.M)
  assert len(rows) > 600
  assert [row for row in rows if not row.endswith(('.', '!', '?', ':', '…'))] == []
  assert sum(row[0].islower() for row in rows) < 25


def test_every_setting_has_a_meaning() -> None:
  assert re.findall(r'^\| `([^`]+)`.*\|  \|$', all_settings(), re.M) == []


def test_the_page_of_networks_is_up_to_date_and_has_every_name() -> None:
  page = (SITE.parents[1] / 'docs' / 'reference' / 'models.md').read_text()
  assert page == load('reference').models(), 'python launch/site/reference.py models > docs/reference/models.md'
  found = re.findall(r'(?m)^\| ([^ |]+)(?: \(\d+ px\))? \| [\d,.]+ \| [\d,.]+ \|$', page)
  assert sorted(found) == sorted(sizes.names()) and len(found) > 100


def test_every_page_is_in_the_navigation() -> None:
  listed = set(re.findall(r'[\w/]+\.md', (SITE / 'mkdocs.yml').read_text()))
  docs = SITE.parents[1] / 'docs'
  own = {str(path.relative_to(docs)) for path in docs.rglob('*.md')}
  assert own <= listed and listed - own >= set(load('reference').pages()), own - listed


def test_the_list_for_programs_has_each_page_of_the_navigation_with_its_first_sentence() -> None:
  yaml = pytest.importorskip('yaml')
  llms = load('llms')
  nav = yaml.safe_load((SITE / 'mkdocs.yml').read_text().partition('\nnav:\n')[2])
  places = list(llms.places_of(nav))
  lines = llms.text('vit_jax', 'Vision Transformers.', nav, load('reference').pages()).splitlines()
  assert lines[:3] == ['# vit_jax', '', '> Vision Transformers.'] and '## Tutorials' in lines
  links = [re.fullmatch(r'- \[(.+)\]\(([\w/]+)\.html\)(?:: (.+))?', line) for line in lines if line.startswith('- ')]
  assert [f'{link[2]}.md' for link in links if link] == places and len(links) == len(places)
  about = {link[2]: link[3] for link in links if link}
  assert about['tutorials/own_images'].endswith('.') and about['guides/read_a_plan'].startswith('`vit-jax plan` ')
  assert [place for place, said in about.items() if not said and place != 'changelog'] == []
  assert max(len(said or '') for said in about.values()) < 400 and '](' not in ''.join(filter(None, about.values()))


def test_a_first_sentence_is_prose() -> None:
  llms = load('llms')
  page = ('# A title\n\n![picture](a.png)\n\n<!-- a\ncomment -->\n```sh\nrun\n```\n\n| a |\n|---|\n\n'
          'Use `a.b` of [that\npage](x.md). More.\n')
  assert llms.heading(page) == 'A title' and llms.first_sentence(page) == 'Use `a.b` of that page.'
  assert llms.first_sentence('# Only a title\n\n- a list\n') == '' and llms.first_sentence('Do:\n\n1. It') == 'Do.'


class Fakes(dict[str, str]):
  """The files of a site, by their places."""

  def get_file_from_path(self, path: str) -> str | None:
    return self.get(path)


def page(place: str) -> Any:
  return types.SimpleNamespace(file=types.SimpleNamespace(src_uri=place))


def test_links_of_the_repository_become_links_of_the_site(caplog: pytest.LogCaptureFixture) -> None:
  pytest.importorskip('mkdocs')
  hooks = load('hooks')
  known = Fakes.fromkeys(['benchmarks.md', 'gallery/a.png', 'guides/x.md', 'index.md', 'launch.md'], '')
  with caplog.at_level(logging.WARNING):
    assert hooks.on_page_markdown('[a](../../BENCHMARKS.md#x) `[b](no.md)` <img src="../../.github/gallery/a.png"> '
                                  '[c](https://a.b/c.md) [d](x.md)', page('guides/y.md'), None, known) == (
        '[a](../benchmarks.md#x) `[b](no.md)` <img src="../gallery/a.png"> [c](https://a.b/c.md) [d](x.md)')
    assert hooks.on_page_markdown('[a](docs/guides/x.md)', page('benchmarks.md'), None, known) == '[a](guides/x.md)'
    assert not caplog.records
    hooks.on_page_markdown('[a](../setup.py)', page('index.md'), None, known)
  assert 'docs/index.md: expected a link to a page of the site, got ../setup.py.' in caplog.text


def test_names_in_tables_may_break_between_their_words_and_code_elsewhere_stays() -> None:
  pytest.importorskip('mkdocs')
  found = load('hooks').on_page_content('<p><code>a_b</code></p><td>a_b <code>t/test_a.py::test_b</code></td>',
                                        None, None, Fakes())
  assert found == ('<p><code>a_b</code></p><td>a_b <code>t/<wbr>test_<wbr>a.<wbr>py::<wbr>test_<wbr>b</code></td>')


def test_the_address_of_the_repository_is_written_everywhere_from_one_setting(tmp_path: pathlib.Path) -> None:
  repository, root = load('repository'), SITE.parents[1]
  slug = repository.read()
  names = [str(path.relative_to(root)) for path in repository.pages()]
  assert {'README.md', 'CITATION.cff', 'docs/index.md', 'launch/site/mkdocs.yml', 'setup.py'} <= set(names)
  assert len([name for name in names if name.endswith('.ipynb')]) == 6
  for name in names:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes((root / name).read_bytes())
  for words in (['init', '-q'], ['add', '.']):
    subprocess.run(['git', *words], cwd=tmp_path, check=True)
  repository.write('someone/else', tmp_path)
  assert repository.read(tmp_path) == 'someone/else'
  for name in names:
    text = (tmp_path / name).read_text()
    assert text.count('someone/else') == (root / name).read_text().count(slug) and slug not in text
    assert not name.endswith('.md') or repository.HIDDEN.search(text) is None


def test_the_readme_shows_no_address_while_it_is_the_placeholder() -> None:
  repository = load('repository')
  readme = (SITE.parents[1] / 'README.md').read_text()
  assert '/actions/workflows/test.yml/badge.svg' in readme
  if repository.read().startswith('OWNER/'):
    assert repository.read() not in repository.HIDDEN.sub('', readme)


def test_no_address_of_the_repository_differs_from_the_setting() -> None:
  own = re.compile(r'(?:github\.com|colab\.research\.google\.com/github|img\.shields\.io/github/[\w/]+?/status)/'
                   r'([\w.-]+/vit[_-]jax)\b')
  done = subprocess.run(['git', 'grep', '-hI', 'vit[_-]jax'], cwd=SITE, capture_output=True, text=True, check=True)
  found = set(own.findall(done.stdout))
  assert found <= {load('repository').read()}


@pytest.mark.parametrize('slug', ['someone', 'https://github.com/a/b', 'a/b c'])
def test_an_address_that_is_no_repository_is_an_error(slug: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(SystemExit, match='repository: expected OWNER/NAME'):
    load('repository').write(slug, tmp_path)


def test_the_version_stands_on_the_first_page_and_where_the_software_is_cited() -> None:
  root = SITE.parents[1]
  page = (root / 'docs' / 'index.md').read_text()
  assert f'Version {vit_jax.__version__} ·' in page and f'version = {{{vit_jax.__version__}}}' in page
  assert f'\nversion: {vit_jax.__version__}\n' in (root / 'CITATION.cff').read_text()


def test_the_first_page_has_three_pictures_and_five_ways_to_begin() -> None:
  page = (SITE.parents[1] / 'docs' / 'index.md').read_text()
  pictures = re.findall(r'[("](\.\./\.github/gallery/[\w.]+)[)"]', page)
  ways = re.findall(r'^- \*\*\[([^]]+)\]\(([\w/]+\.md)\)\*\*$', page, re.M)
  assert len(set(pictures)) == 3 and len(ways) == 5
  assert [path for _, path in ways] == ['tutorials/own_images.md', 'tutorials/finetuning.md', 'tutorials/pod.md',
                                        'guides/convert.md', 'guides/extend.md']


@pytest.mark.slow(reason='builds the site twice')
@pytest.mark.skipif(not shutil.which('mike', path=pathlib.Path(sys.executable).parent), reason='needs the extra docs')
def test_versions_of_the_site_are_deployed_beside_each_other(tmp_path: pathlib.Path) -> None:
  clone = tmp_path / 'clone'
  subprocess.run(['git', 'clone', '-q', '--depth=1', f'file://{SITE.parents[1]}', clone], check=True)
  env = {**os.environ, 'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}', 'GIT_AUTHOR_NAME': 'a',
         'GIT_COMMITTER_NAME': 'a', 'GIT_AUTHOR_EMAIL': 'a@b.c', 'GIT_COMMITTER_EMAIL': 'a@b.c',
         'PYTHONPATH': str(clone), 'NO_MKDOCS_2_WARNING': '1'}
  version = vit_jax.__version__.rpartition('.')[0]
  for words in (['dev'], ['latest']):
    subprocess.run(['bash', 'launch/site/deploy.sh', *words], cwd=clone, env=env, check=True)

  def show(path: str) -> str:
    return subprocess.run(['git', 'show', f'gh-pages:{path}'], cwd=clone, text=True, capture_output=True,
                          check=True).stdout

  assert [(one['version'], one['aliases']) for one in json.loads(show('versions.json'))] == [
      ('dev', []), (version, ['latest'])]
  assert 'latest' in show('index.html')
  for name in ('dev', version):
    assert '"version": {"alias": true, "provider": "mike"}' in show(f'{name}/index.html')
  done = subprocess.run(['bash', 'launch/site/deploy.sh', 'newest'], cwd=clone, env=env, capture_output=True, text=True)
  assert done.returncode == 2 and "expected dev or latest, got 'newest'" in done.stderr
