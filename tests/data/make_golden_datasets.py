"""Writes `golden_datasets.parquet` with the package `datasets`, and what that package reads in it, as JSON.

  python -m venv /tmp/datasets && /tmp/datasets/bin/pip install datasets pillow && \\
    /tmp/datasets/bin/python tests/data/make_golden_datasets.py

Made with datasets 5.2.0 and pyarrow 26.0.1. The images are random.
"""
from __future__ import annotations

import hashlib
import io
import json
import pathlib

import datasets
import numpy as np
from PIL import Image

FILE = pathlib.Path(__file__).with_name('golden_datasets.parquet')
NAMES = ['cat', 'ant', 'bee']


def main() -> None:
  """Writes both files."""
  rng, rows = np.random.default_rng(0), []
  for number in range(7):
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (6, 5 + number, 3), np.uint8)).save(file, 'PNG' if number % 2 else 'JPEG')
    rows.append({'image': {'bytes': file.getvalue(), 'path': f'{number}.{"png" if number % 2 else "jpg"}'},
                 'label': number * 2 % 3, 'tags': [number % 3, (number + 1) % 3][:number % 3],
                 'text': f'number {number}'})
  label = datasets.ClassLabel(names=NAMES)
  features = datasets.Features({'image': datasets.Image(), 'label': label, 'tags': datasets.List(label),
                                'text': datasets.Value('string')})
  made = datasets.Dataset.from_list(rows, features=features)
  made.to_parquet(FILE, batch_size=3)
  read = datasets.Dataset.from_parquet(str(FILE), cache_dir='/tmp/golden_datasets_cache')
  stored = read.cast_column('image', datasets.Image(decode=False))
  found = {'names': read.features['label'].names, 'label': read['label'][:], 'tags': read['tags'][:],
           'text': read['text'][:], 'path': [one['path'] for one in stored['image']],
           'sha256': [hashlib.sha256(one['bytes']).hexdigest() for one in stored['image']],
           'size': [list(one.size) for one in read['image']]}
  FILE.with_suffix('.json').write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
