"""Modules that are imported on first use."""
from __future__ import annotations

import concurrent.futures
import pathlib
import pickle
import sys

import pytest

from vit_jax.core import lazy


def test_a_module_is_imported_by_its_first_attribute_and_shows_later_changes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'lazy_example.py').write_text('value = 1\n')
  monkeypatch.syspath_prepend(tmp_path)
  module = lazy.Module('lazy_example')
  assert pickle.loads(pickle.dumps(module)) is not None and 'lazy_example' not in sys.modules
  assert module.value == 1
  monkeypatch.setattr(sys.modules['lazy_example'], 'value', 2)
  assert module.value == 2 and pickle.loads(pickle.dumps(module)).value == 2
  with pytest.raises(AttributeError, match='lazy_example'):
    _ = module.missing


def test_threads_wait_for_an_import_that_another_one_has_begun(tmp_path: pathlib.Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'lazy_slow.py').write_text('import time\ntime.sleep(0.1)\nvalue = 1\n')
  monkeypatch.syspath_prepend(tmp_path)
  module = lazy.Module('lazy_slow')
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert [one.result() for one in [pool.submit(lambda: module.value) for _ in range(4)]] == [1] * 4
