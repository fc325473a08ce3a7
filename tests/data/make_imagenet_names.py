"""Makes the lists of ImageNet class names in `vit_jax/data/labels/`: `imagenet_1k.txt` and `imagenet_21k.txt`.

Run where timm is:  python tests/data/make_imagenet_names.py
Made with timm 1.0.31, whose package data has the WordNet ids of both sets in the order of their outputs, and the lemmas
of each. Other lists with the same ids and lemmas give the same files.

A line is `WNID NAME`. The name is the first lemma. Where several classes of a list share it, ignoring case, each has
the first of its lemmas that no other class has, if there is one. Names that are still shared are followed by the id in
parentheses, or are those of `DISTINGUISHED`.
"""
from __future__ import annotations

import collections
import importlib.util
import pathlib

HERE = pathlib.Path(__file__).resolve().parents[2] / 'vit_jax' / 'data' / 'labels'
LISTS = {'imagenet_1k.txt': 'imagenet_synsets.txt', 'imagenet_21k.txt': 'imagenet21k_goog_synsets.txt'}
DISTINGUISHED = {'n02012849': 'crane (bird)', 'n03126707': 'crane (machine)'}
HEADER = """# Names of the {count:,} classes of {title}, in the order of the outputs: WordNet id and first lemma.
# From WordNet 3.0, Copyright 2006 by Princeton University; see LICENSE_WORDNET in this folder.
"""


def names(ids: list[str], lemmas: dict[str, list[str]]) -> list[str]:
  """A name for each id, no two alike."""
  owners = collections.Counter(lemma for one in ids for lemma in {word.casefold() for word in lemmas[one]})
  firsts = collections.Counter(lemmas[one][0].casefold() for one in ids)
  chosen = []
  for one in ids:
    own = [word for word in lemmas[one] if owners[word.casefold()] == 1]
    first = lemmas[one][0]
    chosen.append(own[0] if own and firsts[first.casefold()] > 1 else first)
  shared = collections.Counter(name.casefold() for name in chosen)
  found = [name if shared[name.casefold()] == 1 else DISTINGUISHED.get(one, f'{name} ({one})')
           for one, name in zip(ids, chosen, strict=True)]
  assert len({name.casefold() for name in found}) == len(found)
  return found


def main() -> None:
  found = importlib.util.find_spec('timm')
  assert found and found.origin, 'timm is not installed'
  folder = pathlib.Path(found.origin).parent / 'data' / '_info'
  rows = [line.split('\t') for line in (folder / 'imagenet_synset_to_lemma.txt').read_text().splitlines()]
  lemmas = {one: [word.strip() for word in words.split(',')] for one, words in rows}
  for to, source in LISTS.items():
    ids = (folder / source).read_text().split()
    header = HEADER.format(count=len(ids), title='ImageNet-' + to.removeprefix('imagenet_').removesuffix('.txt'))
    lines = [f'{one} {name}' for one, name in zip(ids, names(ids, lemmas), strict=True)]
    (HERE / to).write_text(header + '\n'.join(lines) + '\n')


if __name__ == '__main__':
  main()
