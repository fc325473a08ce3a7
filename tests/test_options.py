"""The table of settings: each is named in a test, but for those listed here with the reason."""
from __future__ import annotations

import options

NOT_BY_NAME = {
    'Adafactor.b2_power',  # the recurrence test takes the default
    'Views.global_area',   # likewise the crops of the views
}


def test_every_setting_is_named_in_a_test() -> None:
  rows = options.table()
  assert len(rows) > 150
  assert {row.name for row in rows if not row.tests} <= NOT_BY_NAME


def test_the_table_finds_the_configs_that_set_an_option() -> None:
  rows = {row.name: row for row in options.table()}
  assert 'digits' in rows['ViT.patch'].configs and 'from_folder:Axial-ViT-B/32' in rows['ViT.axial'].configs
