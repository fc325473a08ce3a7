"""Our path names of all parameters, which are a public format; those that objectives add are in `objectives/`."""
from __future__ import annotations

PATHS = {
    # Vision Transformer; leaves under `blocks` are stacked, depth first
    'backbone/stem/kernel': '[P, P, C, D]',
    'backbone/stem/bias': '[D]',
    'backbone/cls': '[1, 1, D]',
    'backbone/dist': '[1, 1, D]',
    'backbone/registers': '[1, R, D]',
    'backbone/positions': '[1, M, D]: class and distillation token first, none for registers',
    'backbone/positions/(row|column)': '[h, D / 2], [w, D / 2]',
    'backbone/blocks/positions(/(row|column))?': 'as above, of each layer',
    'backbone/blocks/((row|column)/)?norm[12]/(scale|bias)': '[L, D]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/kernel': '[L, D, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/bias': '[L, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key)_norm/(scale|bias)': '[L, K]',
    'backbone/blocks/attn/relative': '[L, 2 N - 1, A, K]',
    'backbone/blocks/((row|column)/)?attn/out/kernel': '[L, A, K, D]',
    'backbone/blocks/((row|column)/)?attn/out/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/kernel': '[L, D, F]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/bias': '[L, F]',
    'backbone/blocks/((row|column)/)?mlp/down/kernel': '[L, F, D]',
    'backbone/blocks/((row|column)/)?mlp/down/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?scale[12]': '[L, D]',
    'backbone/blocks/((row|column)/)?(attn|mlp)/norm/(scale|bias)': '[L, D], [L, F]',
    'backbone/(norm|norm_before|stem_norm)/(scale|bias)': '[D]',
    'backbone/pool/probe': '[1, 1, D]',
    'backbone/pool/(attn/(query|key|value|out)|mlp/(up|down)|norm)/(kernel|scale|bias)': 'as in a block, without L',
    # the stem of LV-ViT
    'backbone/stem/conv[123]/kernel': '[side, side, I, W]',
    'backbone/stem/norm[123]/(scale|bias)': '[W]',
    # hybrids and BiT: stages and units from 1
    'backbone/(stem/)?root/kernel': '[7, 7, 3, W]',
    'backbone/stem/root_norm/(scale|bias)': '[W]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(conv[123]|proj)/kernel': '[side, side, I, O]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(norm[123]|proj_norm)/(scale|bias)': '[C]',
    # Mixer
    'backbone/blocks/(tokens|channels)/(up|down)/(kernel|bias)': '[L, in, out], [L, out]',
    # EfficientNet: stages and blocks from 1
    'backbone/(stem|top)/(conv/kernel|norm/(scale|bias))': '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/(expand|depthwise|project)/(conv/kernel|norm/(scale|bias))':
        '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/gate/(down|up)/(kernel|bias)': '[in, out], [out]',
    # running statistics of BatchNorm, in the stem of LV-ViT and in EfficientNet
    'state/stem/norm[123]/(mean|var)': '[W]',
    'state/(stem|top|stage[0-9]+/block[0-9]+/(expand|depthwise|project))/norm/(mean|var)': '[C]',
    # heads; the input of `head_dist` is the distillation token
    '(head|head_dist)/kernel': '[D, C]',
    '(head|head_dist)/bias': '[C]',
    '(head|head_dist)/pre_logits/(kernel|bias)': '[D, D], [D]',
    # the decoder of a masked autoencoder, of width E
    'mask_token': '[1, 1, E]',
    'decoder/(embed|predict)/(kernel|bias)': '[in, out], [out]',
    'decoder/norm/(scale|bias)': '[E]',
    'decoder/blocks/.*': 'as in the backbone',
}
"""Patterns of our path names, with shapes. Axis letters: `core/types.py`. For conditions see the networks' modules."""
