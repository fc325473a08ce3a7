"""Writes `timm_input_conv.npz`: a first kernel of RGB images as timm adapts it to other numbers of channels.

Run it where timm and torch are installed: python tests/weights/make_timm_input_conv.py
"""
from __future__ import annotations

import pathlib

import numpy as np
import timm
import torch
from timm.models._manipulate import adapt_input_conv

kernel = np.random.default_rng(0).standard_normal((5, 3, 4, 4)).astype(np.float32)  # [D, 3, h, w]
found = {f'channels{num}': adapt_input_conv(num, torch.from_numpy(kernel.copy())).numpy() for num in (1, 2, 4, 13)}
path = pathlib.Path(__file__).with_name('timm_input_conv.npz')
np.savez_compressed(path, kernel=kernel, timm=timm.__version__, **found)
