"""Settings of adapters that cannot work are refused, each with a message."""
from __future__ import annotations

from typing import Any

import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError


def config(lora: schema.Lora, **more: Any) -> schema.Config:
  return schema.Config(lora=lora, **more)


@pytest.mark.parametrize(('wrong', 'message'), [
    (config(schema.Lora(dropout=.1)), 'lora.dropout: expected its default 0.0 with lora.rank=0, got 0.1'),
    (config(schema.Lora(rank=4, targets='quer')),
     'lora.targets: expected the ends of attn/query, attn/key, .*, or patterns, got .quer.'),
    (config(schema.Lora(rank=4, targets='(')), r'lora.targets: expected a regular expression, got .\(.'),
    (config(schema.Lora(rank=4), model=schema.ResNet()),
     'lora.rank: expected 0 for ResNet, which has no blocks of dense layers, got 4'),
    (config(schema.Lora(rank=4), head=schema.Head(probe=True), optimizer=schema.Lars(
        rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))),
     'head.probe: expected false with lora.rank=4, as no gradient reaches the backbone of a probe, got True'),
    (config(schema.Lora(rank=4), optimizer=schema.AdamW(
        rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),))),
     'optimizer.rules: expected none that freezes the adapters with lora.rank=4, got one. Remove it')])
def test_adapters_that_cannot_be_trained_are_refused(wrong: schema.Config, message: str) -> None:
  with pytest.raises(UserError, match=message):
    check.check(wrong)


def test_layers_are_chosen_by_the_end_of_their_path_or_a_pattern() -> None:
  layers = schema.adapted_layers(schema.ViT(mlp=schema.SwiGlu()))
  chosen = {targets: [layer for layer in layers if schema.Lora(rank=1, targets=targets).is_target(layer)]
            for targets in ('', 'query,value', 'mlp/.*', 'attn/out')}
  assert list(chosen.values()) == [[], ['attn/query', 'attn/value'], ['mlp/up', 'mlp/down', 'mlp/gate'], ['attn/out']]
  assert all(schema.Lora(rank=1).is_target(layer) for layer in (*layers, *schema.adapted_layers(schema.Mixer())))
  assert not schema.Lora(rank=1, targets='y').is_target('attn/key')
