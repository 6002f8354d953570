# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "matplotlib", "pillow>=10.1", "scipy"]
# ///
"""DETR whose decoder attends by solving a Lasso: sparse reconstruction instead of softmax.

DETR asks a fixed set of learned queries what is in an image. Softmax attention weighs the image's
tokens by softmax(q K^T) and returns the weighted sum of their values V. Here coefficients x rebuild
the query q from the tokens as well as they can, while a penalty makes many of them zero: a Lasso.
The layer returns x^T V and needs no weight matrices. ADMM solves the Lasso by repeating a ridge
regression and a shrinkage; the cost is O(N) for N tokens. The paper's equations for ADMM have
misprints; as printed, it mostly diverges.

[choice]: the paper does not say, so we chose. [deviation]: we differ from it on purpose.

    OA   H. Ackermann, H. Cai, M. Nagel, L. Mirvakhabova, F. Zanjani, F. Porikli (Qualcomm AI
         Research), Optimizing Attention. Its V (tokens that rebuild q) is K here: keys or values

    equation        what                                         --cross-attention, or function
    [OA Sec. 2]     softmax(QK^T / sqrt(hs)) V, with weights     softmax
    [OA Sec. 4.1]   the same without W_q, W_k, W_v               no-weights
    [OA Eq. 1]      min ||q - x^T K||                            l2
    [OA Eq. 2, 4]   min ||q - x^T K||^2 + lambda ||x||_1         admm
    [OA Eq. 2, 3]   the same with an N x N inverse               admm-vanilla
    [OA Eq. 3, 4]   as printed                                   experiments/printed.py
    [OA Sec. 3]     x_ii = 0; random tokens; x^5 / sum |x^5|     without_self, add_random, sharpen
    [OA Fig. 1]     where a query of the decoder looks           find

    python admm_detr.py                            # train: four minutes on a CPU, no network
    python admm_detr.py --cross-attention softmax  # the baseline
    python admm_detr.py detect --images photo.jpg  # what the newest run finds in photos
    python admm_detr.py --preset finetune          # needs prepare_data.py coco, and detr-r50
    python admm_detr.py --preset paper --resume    # OA's; needs coco --parts 2, and resnet50
    python admm_detr.py --help                     # every setting

The first command ends with AP 0.671, AP50 0.923 on 200 drawings (2000 steps, one seed). Over 12
seeds its mean AP is 0.619, softmax's 0.696 (experiments/results.md). Half of the trained model's x
is zero. That comes mostly from x >= 0: with lambda = 0, half is zero, too. And x rebuilds only a
little of q: |q - x^T K| is still 0.9 |q|. The large ridge term makes x nearly a multiple of
relu(q K^T - lambda / 2), which needs no solver (in experiments/variants.py; its AP is 0.610).

[deviation] By default the problem is easier than OA's: x rebuilds q from the keys (they hold
positions), not from the values; there is a ridge term; x >= 0; tokens are centred; and x^3 replaces
x^5. --preset paper has OA's own problem. For a problem of your own see ATTENTION.
"""
import argparse
import atexit
import csv
import functools
import inspect
import io
import json
import math
import os
import re
import sys
import time
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = Path(__file__).stem
CODE = zlib.crc32(Path(__file__).read_bytes())  # of this file's text: see resume_run
WORLD, RANK = 1, 0  # number of processes, and index of this one
if dist.is_available() and dist.is_torchelastic_launched():  # torchrun --nproc-per-node 2 ...
    WORLD, RANK = int(os.environ['WORLD_SIZE']), int(os.environ['RANK'])

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the paper's method ------------------------------------
# A query q gets coefficients x, one for each token, and outputs x^T V. Shapes: q (B, nh, Q, hs);
# k, v (B, nh, N, hs); x (B, nh, Q, N), of B images, nh heads, Q queries, N tokens, and hs channels
# in a head. is_self: self-attention, where token i is query i.
class Attention(nn.Module):
    """softmax(QK^T / sqrt(hs)) V without weights; a head is a slice of channels.  [OA Sec. 4.1]
    [choice] There is no output projection, either. All other classes of attention extend this."""
    def __init__(self, c, is_self=False):
        super().__init__()
        self.config, self.is_self = c, is_self
        self.out_proj = nn.Identity()

    def forward(self, q, k, v, padding=None):
        """q (B, Q, C), k and v (B, N, C), padding (B, N) True where padded -> (B, Q, C)."""
        y = self.mix(*self.heads(q, k, v), padding).to(q.dtype)  # (B, nh, Q, hs)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def heads(self, *qkv):
        """q (B, Q, C), k and v (B, N, C) -> (B, nh, Q, hs), (B, nh, N, hs) twice."""
        return [x.unflatten(2, (self.config.nheads, -1)).transpose(1, 2) for x in qkv]

    def mix(self, q, k, v, padding):
        """x^T V (B, nh, Q, hs). The fused kernel never makes x."""
        mask = None if padding is None else ~padding[:, None, None]  # (B, 1, 1, N)
        dropout = self.config.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)

    def coefficients(self, q, k, v, padding):
        """x (B, nh, Q, N), which pictures need."""
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        return scores.softmax(-1)

class MultiheadAttention(Attention):
    """The same with weights: nn.MultiheadAttention, with its names.  [OA Sec. 2]"""
    def __init__(self, c, is_self=False):
        super().__init__(c, is_self)
        C = c.hidden_dim
        # W_q, W_k, W_v. The class DETR fills them, by their names; give yours values here
        self.in_proj_weight = nn.Parameter(torch.empty(3 * C, C))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * C))
        self.out_proj = nn.Linear(C, C)

    def heads(self, *qkv):
        parts = zip(qkv, self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))
        return super().heads(*[F.linear(x, weight, bias) for x, weight, bias in parts])

class Reconstruction(Attention):
    """x^T V, where x rebuilds q from the tokens: solve(q, tokens, c, is_self) -> x."""
    def __init__(self, c, is_self=False, *, solve):
        super().__init__(c, is_self)
        self.solve = solve
        generator = torch.Generator().manual_seed(0)  # [choice] the same in all layers and heads
        random = torch.randn(c.random_tokens, c.hidden_dim // c.nheads, generator=generator)
        self.register_buffer('random', random, persistent=False)  # (n, hs)

    def mix(self, q, k, v, padding):
        with torch.autocast(q.device.type, enabled=False):  # sums of squares need float32's range
            dtype = torch.promote_types(q.dtype, torch.float32)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            x = self.coefficients(q, k, v, padding)
            x = F.dropout(x, self.config.dropout, self.training)  # [choice] as softmax has it
            if self.config.mix_random:
                v = add_random(v, self.random)
            else:
                x = x[..., :v.size(2)]  # what random tokens take is lost
            return x @ v

    def coefficients(self, q, k, v, padding):
        """x (B, nh, Q, N + n), the last n for random tokens."""
        tokens = self.tokens_to_solve_over(k, v, padding)
        return sharpen(self.solve(q, tokens, self.config, self.is_self), self.config.power)

    def tokens_to_solve_over(self, k, v, padding):
        """(B, nh, N + n, hs): keys or values, less their mean, then n random tokens.
        [deviation] OA rebuilds q from values. But in DETR q holds positions, which keys have, too,
        and values have not. In OA's Fig. 1 padding has weight; here its tokens and x are zero."""
        tokens = k if self.config.rebuild_from == 'keys' else v
        if padding is None:
            padding = torch.zeros(len(k), k.size(2), dtype=torch.bool, device=k.device)
        hide = padding[:, None, :, None]  # (B, 1, N, 1)
        tokens = tokens.masked_fill(hide, 0)
        if self.config.centre:
            mean = tokens.sum(2, keepdim=True) / (~hide).sum(2, keepdim=True)
            tokens = (tokens - mean).masked_fill(hide, 0)
        return add_random(tokens, self.random)

def add_random(tokens, random):
    """tokens (B, nh, N, hs), random (n, hs) -> (B, nh, N + n, hs).  [OA Sec. 3]"""
    return torch.cat([tokens, random.expand(*tokens.shape[:2], -1, -1)], dim=2)

# A row is (prox, size) of a penalty >= 0 that doubles when x does, as a norm does:
#     prox(a, t), of a's shape: the z that minimises t penalty(z) + ||z - a||^2 / 2
#     size(q K^T) >= 0: a query's x is 0 if lambda / 2 is at least its largest size. One for each
#     token (B, nh, Q, N) or, of a penalty that joins tokens, the dual norm (B, nh, Q, 1)
PENALTY = {
    'l1': (lambda a, t: F.relu(a - t) - F.relu(-a - t), torch.abs),  # ||x||_1  [OA Eq. 2]
    'positive': (lambda a, t: F.relu(a - t), F.relu),                # the same, and x >= 0
}

def lasso(q, k, c, is_self=False, vanilla=False):
    """argmin_x ||q - x^T K||^2 + lambda penalty(x) + e ||x||^2, by ADMM -> x  [OA Eq. 2]

    `vanilla` takes the N x N inverse: the same x up to rounding.
    [choice] lambda is --sparsity times the smallest lambda for which a query's x is zero. rho and e
    are --rho and --ridge times the mean eigenvalue of K^T K. So scaling q or k only scales x.
    Gradients flow through lambda, rho and e, too.
    [deviation] OA's (3a) and (3b) are misprinted (experiments/printed.py), and OA's threshold is
    twice our t. OA sets x_ii to 0 and clamps x after (3a); then ADMM need not converge. Here both
    are done to z, in (3b). Our steps are over-relaxed: 4 come as close as 8 of plain ADMM. We
    return z: its zeros are exact.
    """
    prox, size = PENALTY[c.penalty]
    products = q @ k.mT  # (B, nh, Q, N)
    largest = size(without_self(products, is_self)).amax(-1, keepdim=True)  # (B, nh, Q, 1)
    unit = mean_eigenvalue(k)  # (B, nh, 1, 1)
    lam = 2 * c.sparsity * largest
    rho, e = c.rho * unit, c.ridge * unit
    t = lam / (2 * rho)
    if vanilla:
        inverse = vanilla_inverse(k, rho)
    else:
        P = ridge_matrix(k, rho)
    z = u = torch.zeros_like(products)
    for _ in range(c.iterations):
        # (3a): x minimises ||q - x^T K||^2 + rho ||x - w||^2
        w = z - u
        if vanilla:
            x = (products + rho * w) @ inverse  # [OA Eq. 3]
        else:
            x = w + (q - w @ k) @ P  # the same x: w rebuilds w @ k, and P the rest
        relaxed = 1.6 * x - 0.6 * z  # 1.6 times the way from z to x; plain ADMM: x
        # (3b): z minimises lambda penalty(z) + e ||z||^2 + rho ||z - a||^2
        a = relaxed + u
        z = prox(without_self(a, is_self), t) / (1 + e / rho)  # e only shrinks it
        if c.clamp:
            z = z.clamp(-c.clamp, c.clamp)
        u = a - z  # (3c): u + relaxed - z
    return z.masked_fill(largest == 0, 0)  # there x is 0 for every lambda

def without_self(x, is_self):
    """x (..., Q, N); with is_self, zero where a query meets itself.  [OA Sec. 3]"""
    if is_self:
        x = x.masked_fill(torch.eye(*x.shape[-2:], dtype=torch.bool, device=x.device), 0)
    return x

def mean_eigenvalue(k):
    """The mean eigenvalue of K^T K  (B, nh, 1, 1): its trace / hs."""
    return (k.square().sum((-2, -1), keepdim=True) / k.size(-1)).clamp_min(1e-8)

def ridge_matrix(k, shift):
    """P = (K^T K + shift I)^-1 K^T  (B, nh, hs, N). x = q P minimises ||q - x^T K||^2 + shift times
    ||x||^2. P equals K^T (K K^T + shift I)^-1, but needs no N x N matrix.  [OA Eq. 4]
    [deviation] OA's (4) has roots of the eigenvalues, leaves out eigenvectors whose eigenvalue is
    0, and adds random noise to K^T K. Cholesky needs no noise."""
    eye = torch.eye(k.size(-1), dtype=k.dtype, device=k.device)
    factor, _ = torch.linalg.cholesky_ex(k.mT @ k + shift * eye)  # _ex does not wait for the GPU
    return torch.cholesky_solve(k.mT, factor)

def vanilla_inverse(k, shift):
    """(K K^T + shift I)^-1  (B, nh, N, N).  [OA Eq. 3]"""
    eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
    return torch.linalg.inv_ex(k @ k.mT + shift * eye)[0]

def l2(q, k, c, is_self=False):
    """argmin_x ||q - x^T K||^2 + e ||x||^2 -> x  [OA Eq. 1]
    [choice] The norm is squared, and e > 0: with more tokens than channels, many x are best."""
    e = max(c.ridge, 1e-5) * mean_eigenvalue(k)  # with a smaller --ridge, e is lost in rounding
    x = q @ ridge_matrix(k, e)  # (B, nh, Q, N)
    if is_self:  # for the best x with x_ii = 0, add a multiple of the inverse's row i to x's row i
        rows = vanilla_inverse(k, e)[:, :, :x.size(2)]
        pull = -x.diagonal(dim1=2, dim2=3) / rows.diagonal(dim1=2, dim2=3)
        x = without_self(x + pull.unsqueeze(-1) * rows, is_self)
    return x

def sharpen(x, power):
    """x^power / sum |x^power|, or x if power is 0.  [OA Sec. 3]
    [choice] Where all |x| < 1e-6, the sum of |result| may be below 1."""
    if not power:
        return x
    # divided by the largest, x^power is not too small for float32
    y = (x / x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-6)) ** power
    # the largest |y| is now 1, so the sum is 1 or more; only if all |x| < 1e-6 can it be less
    return y / y.abs().sum(-1, keepdim=True).clamp_min(0.5)

# To try your own problem, write solve(q, k, c, is_self) -> x as l2 is, and add a row like l2's. Run
# it with --cross-attention NAME. k (B, nh, N + n, hs) are keys or values, as --rebuild-from says,
# centred if --centre; then n random tokens. x (B, nh, Q, N + n) must be 0 where k is 0, on padding.
# It is sharpened afterwards, unless --power 0. row(c, is_self) returns a layer. A class extends
# Attention; if you write its `mix`, write its `coefficients`, too: pictures show them.
vanilla_lasso = functools.partial(lasso, vanilla=True)
ATTENTION = {
    'softmax': MultiheadAttention,                                           # [OA Sec. 2]
    'no-weights': Attention,                                                 # [OA Sec. 4.1]
    'l2': functools.partial(Reconstruction, solve=l2),                       # [OA Eq. 1]
    'admm': functools.partial(Reconstruction, solve=lasso),                  # [OA Eq. 2, 4]
    'admm-vanilla': functools.partial(Reconstruction, solve=vanilla_lasso),  # [OA Eq. 2, 3]
}

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --enc-layers 3, --mix-random, --no-mix-random. --help prints this.
    A field of yours needs a type: int, float, str, bool, Literal, or float | None (not set)."""
    # the paper's method: attention in the decoder. A default unlike OA's is a [deviation]
    self_attention: str = 'softmax'  # of its queries to each other: a row of ATTENTION
    cross_attention: str = 'admm'    # of its queries to the image
    rebuild_from: Literal['keys', 'values'] = 'keys'  # what x rebuilds q from; OA: values
    penalty: str = 'positive'      # of x, a row of PENALTY; OA: l1
    sparsity: float = 0.03         # lambda / the smallest lambda for which x is zero
    iterations: int = 4            # of ADMM; --ridge 0 needs many more, and a smaller --rho
    rho: float = 3.0               # of ADMM, in mean eigenvalues of K^T K; best near --ridge
    ridge: float = 3.0             # e of e ||x||^2, in the same unit; OA: 0
    clamp: float = 0.0             # largest |x|; 0: any; OA clamps x
    centre: bool = True            # subtract the tokens' mean, which dominates K^T K; OA: no
    power: Literal[0, 1, 3, 5] = 3  # x to this power, normalised; 0: x as it is; OA: 5
    random_tokens: int = 0         # appended to the tokens; OA has some
    mix_random: bool = False       # they have values, too, as in OA; else they only take weight
    # model
    backbone: Literal['small', 'resnet50'] = 'small'  # resnet50 needs --init
    hidden_dim: int = 64           # channels, a multiple of 4 and of nheads
    nheads: int = 4
    enc_layers: int = 2
    dec_layers: int = 2
    dim_feedforward: int = 128     # hidden channels of the feed-forward networks
    dropout: float = 0.0           # also of x
    num_queries: int = 12          # object queries, several times as many as objects in an image
    init: str = ''                 # weights to start from: RUN/best.pt, or prepare_data.py's file
    # losses; matching uses the same weights
    bbox_loss_coef: float = 5.0    # of the L1 distance
    giou_loss_coef: float = 2.0    # of generalised IoU
    eos_coef: float = 0.1          # weight of the class no-object
    # data
    data: str = 'builtin'          # a folder in data/, or builtin: drawn shapes
    image_size: int = 64           # pixels of the shorter side
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 2000          # optimiser steps
    batch_size: int = 32           # images per forward pass
    grad_accum_steps: int = 1      # forward passes per step, of all processes together
    learning_rate: float = 1e-3    # at its peak
    lr_backbone_ratio: float = 1.0  # the backbone's rate / learning_rate
    min_lr_ratio: float = 0.05     # final cosine rate / learning_rate
    schedule: Literal['cosine', 'step'] = 'cosine'  # after warmup; step: see warmdown_iters
    warmup_iters: int = 100        # steps up to the peak rate; set fewer for short runs
    warmdown_iters: int = 0        # last steps, at a tenth of the rate; for --schedule step
    weight_decay: float = 1e-4     # AdamW's, on everything
    grad_clip: float = 0.1         # largest gradient norm; 0 for no clipping
    eval_interval: int = 250       # steps between evaluations and checkpoints; 0: only at the end
    eval_rows: int = 0             # validation images, the first ones; 0: all
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0: PyTorch's choice, for larger models
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the newest run of the same flags, or start one
    out_dir: str = 'out'           # where runs are written
    # detect
    folder: str = ''               # a run's folder; default: the newest
    images: tuple = ()             # photos, or folders of photos
    threshold: float = 0.5         # lowest score to show

    def __post_init__(self):
        if min(self.nheads, self.batch_size, self.grad_accum_steps) < 1:
            fail('--nheads, --batch-size and --grad-accum-steps are 1 or more')
        if self.hidden_dim % self.nheads or self.hidden_dim % 4:  # sine_positions has four parts
            fail(f'--hidden-dim {self.hidden_dim} must be a multiple of 4 and of --nheads')
        if not 0 <= self.dropout < 1:
            fail(f'--dropout {self.dropout} must be at least 0, and less than 1')

CHOICES = {  # flags whose values are the rows of a table
    'self_attention': ATTENTION, 'cross_attention': ATTENTION, 'penalty': PENALTY}
MACHINE = {  # settings that are not in a run's name, and may differ when it is resumed
    'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder', 'images',
    'threshold'}

# OA's own problem. In cross-attention it hardly learns: on drawings, Lassos of this kind had a mean
# AP of 0.00 to 0.07, and softmax had 0.7 (experiments/results.md). [choice] OA gives no numbers for
# the last four, nor for lambda. Random tokens: as many as a head has channels. After 15 iterations
# x is still some 40 % from the optimum, at DETR's sizes
OA = dict(rebuild_from='values', penalty='l1', ridge=0.0, centre=False, power=5, mix_random=True,
          clamp=1.0, random_tokens=32, rho=0.01, iterations=15)
DETR_R50 = dict(data='coco', backbone='resnet50', hidden_dim=256, nheads=8, enc_layers=6,
                dec_layers=6, dim_feedforward=2048, dropout=0.1, num_queries=100,
                learning_rate=1e-4, lr_backbone_ratio=0.1, schedule='step', warmup_iters=0)
PRESETS = {
    'tiny': {},
    't4': dict(batch_size=16, grad_accum_steps=2, max_iters=6000, eval_interval=500),
    # 1 GiB of memory per image. [choice] every number here
    'finetune': dict(DETR_R50, init='data/weights/detr-r50.pt', image_size=480, batch_size=2,
                     grad_accum_steps=8, max_iters=600, warmdown_iters=150, eval_interval=200),
    # OA: 4 GPUs with 8 images each, DETR's rates. [choice] DETR's 300 epochs of 3696 steps, the
    # last 100 at a tenth of the rate. 3 to 5 GiB of memory per image
    # (on a T4: --batch-size 2 --grad-accum-steps 16)
    'paper': dict(DETR_R50, **OA, init='data/weights/resnet50.pt', image_size=800, batch_size=8,
                  grad_accum_steps=4, max_iters=1108800, warmdown_iters=369600,
                  eval_interval=3696, dtype='float32'),
}

# ------------------------------------ model ------------------------------------
class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose four vectors never change."""
    def __init__(self, channels):
        super().__init__()
        self.register_buffer('weight', torch.ones(channels))
        self.register_buffer('bias', torch.zeros(channels))
        self.register_buffer('running_mean', torch.zeros(channels))
        self.register_buffer('running_var', torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)

class Bottleneck(nn.Module):
    def __init__(self, c_in, width, stride):
        super().__init__()
        c_out = 4 * width
        self.conv1 = nn.Conv2d(c_in, width, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = FrozenBatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, c_out, 1, bias=False)
        self.bn3 = FrozenBatchNorm2d(c_out)
        self.downsample = nn.Identity()
        if c_in != c_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), FrozenBatchNorm2d(c_out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))

class ResNet50(nn.Sequential):
    """With torchvision's keys; 32 pixels per token. As in DETR, the first layers are frozen."""
    channels = 2048  # of its output

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        c_in = 64
        for i, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
            first = Bottleneck(c_in, width, stride=1 if i == 1 else 2)
            c_in = 4 * width
            rest = [Bottleneck(c_in, width, stride=1) for _ in range(blocks - 1)]
            self.add_module(f'layer{i}', nn.Sequential(first, *rest))
        self.conv1.requires_grad_(False)
        self.layer1.requires_grad_(False)

class SmallBackbone(nn.Sequential):
    """Four convolutions that learn from scratch; 8 pixels per token. Group norm sees padding, too,
    so a photo's features depend a little on the other photos of its batch."""
    channels = 96  # of its output

    def __init__(self):
        super().__init__()
        for c_in, c_out, stride in [(3, 32, 2), (32, 64, 2), (64, 96, 2), (96, 96, 1)]:
            self.append(nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False))
            self.append(nn.GroupNorm(8, c_out))
            self.append(nn.ReLU())

def sine_positions(inside, channels):
    """inside (B, h, w), False on padding -> (B, h w, channels). y and x are scaled to 2 pi. Half of
    the channels are sines and cosines of y at several rates, the others of x."""
    rate = 10000 ** -(torch.arange(channels // 4, device=inside.device) * 4 / channels)
    parts = []
    for axis in (1, 2):
        place = inside.cumsum(axis, dtype=torch.float32)  # (B, h, w)
        place = 2 * math.pi * place / (place.amax(axis, keepdim=True) + 1e-6)
        angle = place[..., None] * rate  # (B, h, w, C / 4)
        parts.append(torch.stack([angle.sin(), angle.cos()], -1).flatten(3))
    return torch.cat(parts, -1).flatten(1, 2)

class EncoderLayer(nn.Module):
    def __init__(self, c, attention='softmax'):
        super().__init__()
        self.self_attn = ATTENTION[attention](c, is_self=True)
        self.linear1 = nn.Linear(c.hidden_dim, c.dim_feedforward)
        self.linear2 = nn.Linear(c.dim_feedforward, c.hidden_dim)
        self.norm1 = nn.LayerNorm(c.hidden_dim)
        self.norm2 = nn.LayerNorm(c.hidden_dim)
        self.drop = nn.Dropout(c.dropout)

    def feed_forward(self, x):
        return self.drop(self.linear2(self.drop(F.relu(self.linear1(x)))))

    def forward(self, x, pos, padding):
        """x, pos (B, N, C) -> (B, N, C). Positions go to queries and keys, not to values."""
        x = self.norm1(x + self.drop(self.self_attn(x + pos, x + pos, x, padding)))
        return self.norm2(x + self.feed_forward(x))

class DecoderLayer(EncoderLayer):
    def __init__(self, c):
        super().__init__(c, c.self_attention)
        self.multihead_attn = ATTENTION[c.cross_attention](c)
        self.norm3 = nn.LayerNorm(c.hidden_dim)

    def forward(self, x, query_pos, memory, pos, padding):
        """x (B, Q, C), its positions (Q, C), the encoder's memory and pos (B, N, C) -> (B, Q, C)"""
        q = k = x + query_pos
        x = self.norm1(x + self.drop(self.self_attn(q, k, x)))
        y = self.multihead_attn(x + query_pos, memory + pos, memory, padding)
        x = self.norm2(x + self.drop(y))
        return self.norm3(x + self.feed_forward(x))

class MLP(nn.Module):
    def __init__(self, C, out):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, out)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

class DETR(nn.Module):
    """facebookresearch/detr, with its state-dict keys. num_classes does not count no-object."""
    def __init__(self, config, num_classes):
        super().__init__()
        self.config = c = config
        C = c.hidden_dim
        body = ResNet50() if c.backbone == 'resnet50' else SmallBackbone()
        encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.enc_layers))
        decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.dec_layers))
        self.transformer = nn.ModuleDict(dict(
            encoder=nn.ModuleDict(dict(layers=encoder)),
            decoder=nn.ModuleDict(dict(layers=decoder, norm=nn.LayerNorm(C)))))
        self.class_embed = nn.Linear(C, num_classes + 1)
        self.bbox_embed = MLP(C, 4)
        self.query_embed = nn.Embedding(c.num_queries, C)
        self.input_proj = nn.Conv2d(body.channels, C, 1)
        self.backbone = nn.ModuleList([nn.ModuleDict(dict(body=body))])
        ours = r'backbone|input_proj|(class|bbox|query)_embed|linear[12]|in_proj_weight|out_proj'
        for name, p in self.named_parameters():
            if re.search(ours, name):  # others, such as yours, stay as their class made them
                self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p by seed and name alone: layers that variants share start equal."""
        generator = torch.Generator().manual_seed(zlib.crc32(f'{self.config.seed} {name}'.encode()))
        layer, _, kind = name.rpartition('.')  # kind: weight, bias or in_proj_weight
        weight = self.get_parameter(f'{layer}.weight') if kind == 'bias' else p  # of the same layer
        fan_out, fan_in = len(weight), weight[0].numel()
        bound = fan_in ** -0.5  # PyTorch's default
        if name.startswith('transformer') and kind != 'bias':
            bound = math.sqrt(6 / (fan_in + fan_out))  # Xavier's, as in DETR
        if name == 'query_embed.weight':
            p.normal_(generator=generator)
        elif name.endswith('out_proj.bias'):
            p.zero_()
        elif weight.dim() > 1:  # norms, which have no matrix, stay as they are
            p.uniform_(-bound, bound, generator=generator)

    def encode(self, images, mask=None):
        """-> memory and positions (B, N, C), padding (B, N) or None, grid (h, w); N is h w."""
        x = self.input_proj(self.backbone[0].body(images))  # (B, C, h, w)
        grid = x.shape[2:]
        padding = None
        inside = torch.ones(len(x), *grid, dtype=torch.bool, device=x.device)
        if mask is not None:
            inside = ~F.interpolate(mask[None].float(), grid)[0].bool()  # (B, h, w)
            padding = ~inside.flatten(1)
        pos = sine_positions(inside, x.size(1)).to(x.dtype)
        x = x.flatten(2).transpose(1, 2)  # (B, h w, C)
        for layer in self.transformer.encoder.layers:
            x = layer(x, pos, padding)
        return x, pos, padding, grid

    def forward(self, images, mask=None):
        """Normalised images (B, 3, H, W), mask (B, H, W) True on padding -> a dict.
        pred_logits: (B, Q, classes + 1), the last for no-object. pred_boxes: (B, Q, 4), centre and
        size as fractions. aux_outputs: both from each earlier layer. grid: h, w of the tokens."""
        memory, pos, padding, grid = self.encode(images, mask)
        decoder = self.transformer.decoder
        query_pos = self.query_embed.weight
        x = torch.zeros_like(query_pos).expand(len(images), -1, -1)  # (B, Q, C)
        outs = []
        for layer in decoder.layers:
            x = layer(x, query_pos, memory, pos, padding)
            outs.append(decoder.norm(x))
        x = torch.stack(outs).to(query_pos.dtype)  # (L, B, Q, C)
        with torch.autocast(x.device.type, enabled=False):  # in bfloat16 boxes are off by pixels
            logits = self.class_embed(x)
            boxes = self.bbox_embed(x).sigmoid()
        layers = [dict(pred_logits=a, pred_boxes=b) for a, b in zip(logits, boxes)]
        return dict(layers[-1], aux_outputs=layers[:-1], grid=grid)

# ------------------------------------ data ------------------------------------
# A data set has a length and two methods. example(row, rng=None) gives a normalised image (3, H, W)
# and its target; in training, a NumPy generator, rng, decides the shapes, or a photo's flip and
# size. target(row) gives the target alone, a dict: labels (n,); boxes (n, 4), centre and size as
# fractions of the image; and for AP image_id, orig_size (h, w) and annotations in COCO's form.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]  # of ImageNet's colours, 0 to 1
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]

def stream(name, *numbers):
    """Random numbers for one purpose. To NumPy seeds [7] and [7, 0] are the same: hence the 1."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

# Which points (x, y) of its box, 0 to 1, a shape covers. It must touch all four sides of the box.
# The random `tip` is where a triangle's tip is: at (tip, 0). A new row changes all drawings.
SHAPES = {
    'rectangle': lambda x, y, tip: True,
    'disc': lambda x, y, tip: (x - 0.5) ** 2 + (y - 0.5) ** 2 <= 0.25,
    'triangle': lambda x, y, tip: (x >= tip * (1 - y)) & (x <= 1 - (1 - tip) * (1 - y)),
}

class Drawings:
    """n drawings of one to four shapes, which need no files and no network."""
    def __init__(self, n, side):
        self.n, self.side = n, side

    def __len__(self):
        return self.n

    def example(self, row, rng=None):
        """A fresh drawing or, without rng, the validation drawing of that row."""
        rng = rng or stream('validation', row)
        target = self.target(row, rng)
        pixels = stream('pixels', int(rng.integers(2 ** 32)))  # for greys, colours, tips and noise
        return self.draw(target, pixels), target

    def target(self, row, rng=None):
        """What a drawing shows."""
        rng = rng or stream('validation', row)
        boxes = []  # centre and size, 0 to 1
        n = rng.integers(1, 5)
        for size in rng.uniform(0.18, 0.5, (n, 2)):
            for centre in rng.uniform(size / 2, 1 - size / 2, (10, 2)):  # ten attempts
                box = [*centre.tolist(), *size.tolist()]
                if not any(overlap(box, other) for other in boxes):
                    boxes.append(box)
                    break
        boxes = torch.tensor(boxes)
        labels = torch.from_numpy(rng.integers(len(SHAPES), size=len(boxes)))
        annotations = []
        for label, (cx, cy, w, h) in zip(labels.tolist(), boxes.tolist()):
            bbox = [self.side * v for v in (cx - w / 2, cy - h / 2, w, h)]  # in pixels
            annotations.append(dict(image_id=row, category_id=label, bbox=bbox, iscrowd=0))
        return dict(labels=labels, boxes=boxes, annotations=annotations, image_id=row,
                    orig_size=(self.side, self.side))

    def draw(self, target, rng):
        """-> (3, H, W) float32, normalised."""
        shapes = [*SHAPES.values()]
        grid = (np.arange(self.side, dtype=np.float32) + 0.5) / self.side
        image = np.full((3, self.side, self.side), rng.uniform(0.2, 0.6), np.float32)  # grey
        for label, (cx, cy, w, h) in zip(target['labels'].tolist(), target['boxes'].tolist()):
            x = (grid - cx) / w + 0.5  # 0 to 1 in the box
            y = ((grid - cy) / h + 0.5)[:, None]
            ink = rng.permutation([0.1, rng.random(), 0.9])
            tip = rng.uniform(0.2, 0.8)
            box = (abs(x - 0.5) <= 0.5) & (abs(y - 0.5) <= 0.5)
            image[:, box & shapes[label](x, y, tip)] = ink[:, None]
        image += 0.04 * rng.standard_normal(image.shape, np.float32)
        return torch.from_numpy((image.clip(0, 1) - MEAN) / STD)

def overlap(a, b):
    """Whether two boxes (centre, size) share at least 15 % of the smaller one."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    width = max(0, (aw + bw) / 2 - abs(ax - bx))
    height = max(0, (ah + bh) / 2 - abs(ay - by))
    return width * height >= 0.15 * min(aw * ah, bw * bh)

def open_photo(path, size=None):
    """A photo as a viewer shows it -> Pillow's RGB image. It is turned upright as its EXIF says,
    but not if its stored (width, height) is `size`, for which objects' boxes were drawn.
    Transparent pixels are white."""
    from PIL import Image, ImageOps
    with Image.open(path) as photo:
        photo = photo.copy() if photo.size == size else ImageOps.exif_transpose(photo)
    if photo.mode[0] in 'FI':  # greys, whose white is not known
        raise ValueError('its pixels have more than 8 bits: save it with 8')
    if photo.has_transparency_data:
        photo = photo.convert('RGBA')
        photo = Image.alpha_composite(Image.new('RGBA', photo.size, 'white'), photo)
    return photo.convert('RGB')

def to_tensor(photo, image_size, share=1.0):
    """Pillow's image -> (3, H, W), normalised. The shorter side becomes share * image_size; less
    where the longer one would have more than 5/3 of image_size (1333 for 800, as in DETR)."""
    short, long = sorted(photo.size)
    limit = (5 * image_size // 3) * short / long
    side = max(1, round(min(image_size * share, limit)))
    other = int(side * long / short)
    size = (side, other) if photo.width < photo.height else (other, side)
    x = np.asarray(photo.resize(size, 2), np.float32) / 255  # 2: bilinear
    return torch.from_numpy((x.transpose(2, 0, 1) - MEAN) / STD)

class Objects:
    """Photos and what they show, as prepare_data.py lists them in COCO's form."""
    def __init__(self, file, image_size):
        content = json.loads(file.read_text('utf-8'))
        self.images = content['images']
        self.image_size = image_size
        self.annotations = defaultdict(list)  # {image id: its objects}
        for one in content['annotations']:
            self.annotations[one['image_id']].append(one)

    def __len__(self):
        return len(self.images)

    def target(self, row, flip=False):
        """What a photo shows. labels and boxes, to learn from, have no empty boxes and no crowds
        (many objects in one box), and boxes end at the photo's edges. annotations have all."""
        image = self.images[row]
        W, H = image['width'], image['height']
        annotations = self.annotations[image['id']]
        labels, boxes = [], []
        for one in annotations:
            x, y, w, h = one['bbox']
            left, right = max(x / W, 0), min((x + w) / W, 1)
            top, bottom = max(y / H, 0), min((y + h) / H, 1)
            if left < right and top < bottom and not one['iscrowd']:
                centre = (left + right) / 2
                boxes.append([1 - centre if flip else centre, (top + bottom) / 2,
                              right - left, bottom - top])
                labels.append(one['category_id'])
        return dict(labels=torch.tensor(labels, dtype=torch.long),
                    boxes=torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
                    annotations=annotations, image_id=image['id'], orig_size=(H, W))

    def example(self, row, rng=None):
        """A photo; with rng, flipped and resized at random, as in DETR. [deviation] DETR also crops
        half of the photos first: left out for brevity."""
        flip = rng.random() < 0.5 if rng else False
        share = rng.integers(15, 26) / 25 if rng else 1.0  # 480, 512, ..., 800 of 800
        image = self.images[row]
        photo = open_photo(image['file_name'], (image['width'], image['height']))
        photo = to_tensor(photo, self.image_size, share)
        return photo.flip(2) if flip else photo, self.target(row, flip)

def read_meta(name, *kinds):
    """The folder data/NAME of prepare_data.py, and its meta.json, whose kind must be in `kinds`."""
    folder = Path('data', name.removeprefix('data/'))
    if not folder.is_dir():
        fail(f'--data {name}: there is no {folder}. python prepare_data.py lists the commands '
             'that make one, also from your own files')
    try:
        meta = json.loads((folder / 'meta.json').read_text('utf-8'))
    except (OSError, ValueError):  # there is none, or it was cut
        meta = {}
    if meta.get('format') != 1:
        fail(f'{folder} is not by this version of prepare_data.py: move it away, and prepare the '
             'data again')
    if meta['kind'] not in kinds:
        fail(f'{folder} holds {meta["kind"]}, and {SCRIPT}.py reads {" or ".join(kinds)}')
    for file, size in meta.get('files', {}).items():  # in bytes
        if not (folder / file).exists() or (folder / file).stat().st_size != size:
            fail(f'{folder / file} was cut or changed since: prepare the data again')
    return folder, meta

def load_data(c):
    """c.data -> data sets train and val, and meta: classes, checksum."""
    if c.data == 'builtin':
        train = Drawings(10 ** 6, c.image_size)
        val = Drawings(c.eval_rows or 200, c.image_size)
        meta = dict(classes=[*SHAPES], checksum=zlib.crc32(repr([*SHAPES]).encode()))
        return SimpleNamespace(train=train, val=val, meta=meta)
    folder, meta = read_meta(c.data, 'objects')
    train = Objects(folder / 'train.json', c.image_size)
    val = Objects(folder / 'val.json', c.image_size)
    val.images = val.images[:c.eval_rows or None]
    if not any(len(val.target(row)['labels']) for row in range(len(val))):
        fail(f'--data {c.data}: the first {len(val)} validation photos show no object')
    return SimpleNamespace(train=train, val=val, meta=meta)

# ------------------------------------ matching and losses ------------------------------------
def set_loss(outputs, targets, c):
    """DETR's losses, a dict. loss, which training minimises: the weighted sum of cross-entropy, L1
    distance and GIoU over all decoder layers. loss_ce, loss_bbox, loss_giou: its parts in the last
    layer, unweighted. class_error: the % of matched queries whose class is wrong there.
    [deviation] Each micro-batch's loss is divided by its own objects and class weights, so 2 x 16
    images give another loss than 8 x 4. DETR has no micro-batches, and counts the objects of all
    processes."""
    outs = [outputs, *outputs['aux_outputs']]  # of L layers; index 0 is the last layer's
    logits = torch.stack([out['pred_logits'] for out in outs])  # (L, B, Q, classes + 1)
    boxes = torch.stack([out['pred_boxes'] for out in outs])  # (L, B, Q, 4)
    labels = torch.cat([target['labels'] for target in targets]).to(logits.device)  # (T,)
    true_boxes = torch.cat([target['boxes'] for target in targets]).to(logits.device)  # (T, 4)
    counts = [len(target['labels']) for target in targets]  # T is their sum
    layer, image, query, obj = hungarian_match(logits, boxes, labels, true_boxes, counts, c)
    matched = sum(min(n, c.num_queries) for n in counts)  # pairs in each layer
    num_boxes = max(1, sum(counts))

    # classes: a query without an object should say no-object
    no_object = logits.size(-1) - 1
    classes = torch.full(logits.shape[:3], no_object, device=logits.device)  # (L, B, Q)
    classes[layer, image, query] = labels[obj]
    class_weight = torch.where(classes == no_object, c.eos_coef, 1.0)
    total_weight = matched + c.eos_coef * (classes[0].numel() - matched)  # in each layer
    loss_ce = class_weight * F.cross_entropy(logits.movedim(-1, 1), classes, reduction='none')
    right = logits[layer, image, query].argmax(-1) == labels[obj]  # (pairs,)

    # boxes, of the pairs alone
    boxes, true_boxes = boxes[layer, image, query], true_boxes[obj]  # (pairs, 4)
    loss_bbox = (boxes - true_boxes).abs()
    loss_giou = 1 - generalized_box_iou(boxes, true_boxes)  # (pairs,)

    loss = (loss_ce.sum() / total_weight + c.bbox_loss_coef * (loss_bbox.sum() / num_boxes)
            + c.giou_loss_coef * (loss_giou.sum() / num_boxes))
    is_last = layer == 0
    return dict(loss=loss, loss_ce=loss_ce[0].sum() / total_weight,
                loss_bbox=(loss_bbox.sum(-1) * is_last).sum() / num_boxes,
                loss_giou=(loss_giou * is_last).sum() / num_boxes,
                class_error=100 * (1 - (right & is_last).sum() / max(1, matched)))

@torch.no_grad()
def hungarian_match(logits, boxes, labels, true_boxes, counts, c):
    """The cheapest pairs of queries and objects, for each image and layer separately -> four
    indices (pairs,): layer, image, query, object.

    logits (L, B, Q, classes + 1), boxes (L, B, Q, 4). labels (T,) and true_boxes (T, 4) are of all
    objects, image by image; counts says how many each image has."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        fail('the matching of boxes needs scipy: pip install scipy')
    boxes = boxes.unsqueeze(-2)  # (L, B, Q, 1, 4)
    distance = (boxes - true_boxes).abs().sum(-1)  # (L, B, Q, T)
    giou = generalized_box_iou(boxes, true_boxes)
    probability = logits.softmax(-1)[..., labels]
    # DETR's 1 - probability: the 1 makes no difference
    cost = c.bbox_loss_coef * distance - c.giou_loss_coef * giou - probability
    cost = cost.nan_to_num().cpu().numpy()  # the loss will say if something is not finite
    pairs, first = [], 0  # the image's first object
    for image, n in enumerate(counts):
        for layer in range(len(cost)):
            queries, objects = linear_sum_assignment(cost[layer, image, :, first:first + n])
            pairs += [(layer, image, q, first + i) for q, i in zip(queries, objects)]
        first += n
    return torch.tensor(pairs, dtype=torch.long, device=logits.device).view(-1, 4).T

def generalized_box_iou(a, b):
    """IoU of boxes (..., 4), less the empty share of the smallest box around both; broadcasts."""
    area = lambda low, high: (high - low).clamp_min(0).prod(-1)
    a0, a1 = box_cxcywh_to_xyxy(a).chunk(2, -1)
    b0, b1 = box_cxcywh_to_xyxy(b).chunk(2, -1)
    intersection = area(torch.maximum(a0, b0), torch.minimum(a1, b1))
    union = area(a0, a1) + area(b0, b1) - intersection
    around = area(torch.minimum(a0, b0), torch.maximum(a1, b1))
    return intersection / union.clamp_min(1e-30) - (around - union) / around.clamp_min(1e-30)

def box_cxcywh_to_xyxy(boxes):
    """Centre and size (..., 4) -> left, top, right, bottom."""
    centre, size = boxes.chunk(2, -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)

@torch.no_grad()
def post_process(outputs, targets):
    """What each query finds, in COCO's json form: its likeliest class other than no-object, and
    its box (left, top, width, height) in pixels of the original."""
    probability = outputs['pred_logits'].softmax(-1)
    scores, labels = probability[..., :-1].max(-1)  # (B, Q)
    boxes = box_cxcywh_to_xyxy(outputs['pred_boxes'])  # (B, Q, 4)
    found = []
    for i, target in enumerate(targets):
        h, w = target['orig_size']
        pixels = boxes[i] * boxes.new_tensor([w, h, w, h])
        parts = zip(scores[i].tolist(), labels[i].tolist(), pixels.tolist())
        for score, label, (x0, y0, x1, y1) in parts:
            found.append(dict(image_id=target['image_id'], category_id=label, score=score,
                              bbox=[x0, y0, x1 - x0, y1 - y0]))
    return found

# ------------------------------------ average precision ------------------------------------
IOUS = np.linspace(0.5, 0.95, 10).tolist()  # a box is right if it has this IoU with an object

def coco_ap(ground_truth, detections):
    """COCO's average precision over ten IoUs, at 0.5 and at 0.75; nan if there is nothing to find.

    ground_truth: {annotations: [{image_id, category_id, bbox, iscrowd}]}; detections: [{image_id,
    category_id, bbox, score}]; bbox: left, top, width, height in pixels: COCO's json form.
    pycocotools gives the same. It has AP by size, too (OA's Tables 1 and 2)."""
    truth, found = defaultdict(list), defaultdict(list)  # by category
    for one in ground_truth['annotations']:
        truth[one['category_id']].append(one)
    for one in sorted(detections, key=lambda one: (-one['score'], one['image_id'])):
        found[one['category_id']].append(one)
    AP = []  # of each category, at ten IoUs
    for category, objects in sorted(truth.items()):
        wanted = sum(not one['iscrowd'] for one in objects)
        if wanted == 0:
            continue
        in_image = defaultdict(list)  # {image_id: indices in objects}
        for i, one in enumerate(objects):
            in_image[one['image_id']].append(i)
        overlaps, kept = [], defaultdict(int)  # at most 100 in an image and category
        for one in found[category]:
            kept[one['image_id']] += 1
            if kept[one['image_id']] <= 100:
                overlaps.append({i: box_iou(one, objects[i]) for i in in_image[one['image_id']]})
        AP.append([average_precision(match_detections(overlaps, objects, least), wanted)
                   for least in IOUS])
    if not AP:
        return dict(AP=math.nan, AP50=math.nan, AP75=math.nan)
    AP = np.stack(AP, axis=1)  # (10, categories)
    return dict(AP=AP.mean().item(), AP50=AP[0].mean().item(), AP75=AP[5].mean().item())

def box_iou(found, true):
    """IoU of two boxes or, if the true one is a crowd, the share of the found one inside it."""
    (x, y, w, h), (X, Y, W, H) = found['bbox'], true['bbox']
    width = max(0, min(x + w, X + W) - max(x, X))
    height = max(0, min(y + h, Y + H) - max(y, Y))
    intersection = width * height
    union = w * h if true['iscrowd'] else w * h + W * H - intersection
    return intersection / max(union, 1e-99)

def match_detections(overlaps, objects, least):
    """Match the detections of a category with its objects -> whether each one is right. Those that
    match only a crowd do not count, and are left out.

    overlaps: for each detection, the highest-scoring first, a dict {index in objects: IoU} of the
    objects in its image. least: the IoU that makes a match."""
    claimed, right = set(), []
    for ious in overlaps:
        fits = [i for i, iou in ious.items() if iou >= least and i not in claimed]
        single = [i for i in fits if not objects[i]['iscrowd']]
        if single:
            claimed.add(max(single, key=lambda i: (ious[i], i)))  # of equal ones the last
        if single or not fits:
            right.append(bool(single))
    return right

def average_precision(right, wanted):
    """The mean precision at 101 recalls from 0 to 1. right: of match_detections; wanted: the number
    of objects."""
    hits = np.cumsum(right, dtype=int)
    precision = hits / (np.arange(1, len(hits) + 1) + np.spacing(1))  # as in pycocotools
    precision = np.maximum.accumulate(precision[::-1])[::-1]  # the best at this recall or above
    reached = np.searchsorted(hits / wanted, np.linspace(0, 1, 101))
    return np.append(precision, 0)[reached].mean()  # 0 for recalls that are never reached

# ------------------------------------ training ------------------------------------
def make_model(c, meta):
    """A model on the CPU for the classes of the data, with the weights of c.init, if any."""
    model = DETR(c, len(meta['classes']))
    if c.init and not c.resume:  # a resumed run has weights of its own
        load_weights(model, c.init)
    return model

def load_weights(model, path):
    """Load a checkpoint, of a whole model or of a backbone alone. Projections of attention, classes
    and queries are left out where they do not fit; all else in the file must fit."""
    saved, own, nheads = load(path), model.state_dict(), model.config.nheads
    if saved['config'].get('nheads', nheads) != nheads:  # no shape would show it
        fail(f'--init {path} has --nheads {saved["config"]["nheads"]}')
    fits = {name: p for name, p in saved['model'].items()
            if name in own and p.shape == own[name].shape}
    wrong = [name for name in saved['model'] if name not in fits
             and not re.search(r'attn\.(in|out)_proj|^(class|query)_embed', name)]
    if wrong:
        fail(f'--init {path} does not fit: {", ".join(wrong[:5])}')
    model.load_state_dict(fits, strict=False)
    # transformer.decoder stands for all of its parameters
    missing = {name.partition('.layers')[0] for name in own if name not in fits}
    print(f'init    {path}; not in it or of another size, all or in part: '
          f'{", ".join(sorted(missing)) or "none"}')

def make_optimizer(model, c):
    """AdamW on everything, as in DETR; the backbone has its own rate."""
    rest = [p for name, p in model.named_parameters() if not name.startswith('backbone')]
    groups = [dict(params=rest, ratio=1.0),
              dict(params=model.backbone.parameters(), ratio=c.lr_backbone_ratio)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, weight_decay=c.weight_decay)

POOL = ThreadPoolExecutor()  # it decodes photos

def load_batch(dataset, rows, device):
    """rows: [(row, rng), ...] for dataset.example -> images (B, 3, H, W), filled with zeros at the
    right and bottom to the largest size; mask (B, H, W), True on these zeros, or None if there are
    none; and targets, on the CPU."""
    apply = POOL.map if isinstance(dataset, Objects) else map  # only photos gain from threads
    images, targets = zip(*apply(lambda pair: dataset.example(*pair), rows))
    H, W = max(x.size(1) for x in images), max(x.size(2) for x in images)
    batch = torch.zeros(len(images), 3, H, W)
    mask = torch.ones(len(images), H, W, dtype=torch.bool)
    for i, x in enumerate(images):
        _, h, w = x.shape
        batch[i, :, :h, :w] = x
        mask[i, :h, :w] = False
    return batch.to(device), mask.to(device) if mask.any() else None, targets

@functools.lru_cache(2)  # a batch may begin in one epoch and end in the next
def shuffled(seed, epoch, n):
    """The order of n images in an epoch."""
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro_step, device):
    """A micro-batch of a step, the same for every variant and in a resumed run."""
    n = c.batch_size * c.grad_accum_steps  # images in a step
    rows = []
    for i in range(micro_step * c.batch_size, (micro_step + 1) * c.batch_size):
        epoch, place = divmod(step * n + i, len(data.train))
        row = int(shuffled(c.seed, epoch, len(data.train))[place])
        rows.append((row, stream('train', c.seed, step, i)))
    return load_batch(data.train, rows, device)

def get_batches(data, c, step, device):
    """The micro-batches of a step that are this process's."""
    return [get_batch(data, c, step, micro_step, device)
            for micro_step in range(RANK, c.grad_accum_steps, WORLD)]

def loss_of(net, batch, c):
    """The loss of a micro-batch. train_step is the same in three scripts."""
    images, mask, targets = batch
    return set_loss(net(images, mask), targets, c)['loss']

@torch.no_grad()
def evaluate(model, data, c, device):
    """Losses and AP of validation images. [choice] As in DETR, each batch is divided by its own
    objects, so the losses depend a little on --batch-size."""
    n, means, truth, detections = len(data.val), defaultdict(float), [], []
    for first in range(0, n, c.batch_size):
        rows = [(row, None) for row in range(first, min(first + c.batch_size, n))]
        images, mask, targets = load_batch(data.val, rows, device)
        outputs = model(images, mask)
        for name, x in set_loss(outputs, targets, c).items():
            means[name] += len(targets) / n * x.item()
        for target in targets:
            truth += target['annotations']
        detections += post_process(outputs, targets)
    return dict(val_loss=means.pop('loss'), **means,
                **coco_ap(dict(annotations=truth), detections))

def get_lr(step, c):
    """The learning rate of a step, counted from 0."""
    if step < c.warmup_iters:
        return c.learning_rate * ((step + 1) / (c.warmup_iters + 1))  # as in nanoGPT
    left = c.max_iters - step
    if c.schedule == 'step':
        return c.learning_rate * (0.1 if left <= c.warmdown_iters else 1.0)
    if c.schedule == 'cosine':
        done = 1 - left / (c.max_iters - c.warmup_iters)  # from 0 to 1
        cosine = 0.5 * (1 + math.cos(math.pi * done))     # from 1 to 0
        return c.learning_rate * (c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine)
    fail(f'--schedule {c.schedule} needs a branch in get_lr')

def train_step(net, batches, c, optimizer, scaler, autocast):
    """One optimiser step on all micro-batches -> their mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with autocast:
            loss = loss_of(net, batch, c) / c.grad_accum_steps
        scaler.scale(loss).backward()
        total += loss.detach()
    if WORLD > 1:  # sum over the processes, each of which had its own micro-batches
        dist.all_reduce(total)
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
    scaler.unscale_(optimizer)
    largest = c.grad_clip if c.grad_clip > 0 else math.inf  # inf: the norm is only measured
    norm = nn.utils.clip_grad_norm_(net.parameters(), largest)
    # In float16 gradients may overflow: the scaler then skips the step, and halves its scale. That
    # is an error only when the scale has come down to 1. In other dtypes it always is 1.
    overflow = not math.isfinite(norm) and scaler.get_scale() <= 1
    scaler.step(optimizer)
    scaler.update()
    if overflow or not math.isfinite(total):
        raise FloatingPointError(f'loss {total:g}, gradient norm {norm:g}: try a lower '
                                 '--learning-rate, or check any formula you edited')
    return total.item()

def train(c, folder=None, data=None):
    """Train a model as c says -> model, log (a list of dicts of metrics). Checkpoints and log.csv
    go to `folder`, if any."""
    if c.backbone == 'resnet50' and not c.init:  # its first layers do not learn
        fail('--backbone resnet50 needs --init data/weights/resnet50.pt')
    if c.schedule == 'step' and 0 < c.max_iters <= c.warmdown_iters:
        print('note    --warmdown-iters fill all steps: the rate has no peak')
    device, dtype = pick_device(c)
    data = data or load_data(c)
    torch.manual_seed(c.seed)  # for layers of your own
    model = make_model(c, data.meta).to(device)
    optimizer = make_optimizer(model, c)
    autocast, scaler = mixed_precision(device, dtype)
    net = torch.compile(model) if c.compile else model  # the same parameters
    step, seconds, log, losses = 0, 0.0, [], []
    if c.resume:
        step, seconds, log = resume_run(c, data.meta, model, optimizer, scaler)
    first_step, first_seconds = step, seconds  # of this process, for its pace
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f'model   self-attention {c.self_attention}, cross-attention {c.cross_attention}, '
          f'{size:,} parameters to learn, on {device} in {dtype}\n'
          f'data    {c.data}, {len(data.train):,} images to train on, {len(data.val):,} held out'
          + ('' if c.init or step else '; expect AP near 0 for the first 500 steps or more'))
    thread, coming = ThreadPoolExecutor(1), None  # makes batches while the model trains
    while True:
        due = step >= c.max_iters or (c.eval_interval and step % c.eval_interval == 0)
        if due and (not log or log[-1]['step'] < step):  # not twice in a resumed run
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            model.eval()
            with autocast:
                row.update(evaluate(model, data, c, device))
            model.train()
            if math.isnan(row['val_loss']):
                raise FloatingPointError(f'the validation loss of step {step} is nan: try a lower '
                                         '--learning-rate, or check any formula you edited')
            # plain numbers: load would refuse those of NumPy
            log.append({name: float(x) for name, x in row.items()} | dict(step=step))
            losses = []
            weights = dict(model=model.state_dict(), config=asdict(model.config), data=data.meta,
                           code=CODE)
            if row['AP'] == max(past['AP'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            save(folder, 'ckpt.pt', dict(
                weights, settings=asdict(c), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), progress=(step, seconds, log)))
            print(f'step {step}/{c.max_iters}: val_loss {row["val_loss"]:.3f}, '
                  f'AP {row["AP"]:.3f}, AP50 {row["AP50"]:.3f}', flush=True)
        if step >= c.max_iters:
            return model, log

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        start = time.perf_counter()
        torch.manual_seed(zlib.crc32(f'{c.seed} {step} {RANK}'.encode()))  # for dropout
        for group in optimizer.param_groups:
            group['lr'] = group['ratio'] * get_lr(step, c)
        batches = coming.result() if coming else get_batches(data, c, step, device)
        if step + 1 < c.max_iters:
            coming = thread.submit(get_batches, data, c, step + 1, device)
        losses.append(train_step(net, batches, c, optimizer, scaler, autocast))
        seconds += time.perf_counter() - start
        step += 1
        if c.log_interval and step % c.log_interval == 0:
            pace = (seconds - first_seconds) / (step - first_step)
            print(f'step {step}/{c.max_iters}: batch loss {losses[-1]:.4f}, {1000 * pace:.0f} ms '
                  f'a step, {(c.max_iters - step) * pace / 60:.1f} min left', flush=True)

# ------------------------------------ report, detect ------------------------------------
def report(c, model, log, folder, data):
    """Print the result beside a yardstick; draw the curves, and what the best weights find."""
    last, n = log[-1], len(data.val)
    print(f'\nresult  AP {last["AP"]:.3f}, AP50 {last["AP50"]:.3f} on {n} images')
    if n > 1:
        guess = chance([data.val.target(row) for row in range(n)])
        print(f'        (with the objects of another image as the answer: AP {guess["AP"]:.3f}, '
              f'AP50 {guess["AP50"]:.3f})')
    draw(draw_curves, folder / 'curves.png', log, {
        'training loss': 'loss', 'validation loss': 'val_loss', 'AP': 'AP'})
    model.load_state_dict(load(folder / 'best.pt')['model'])
    examples = [data.val.example(row) for row in range(min(n, 4))]
    answers = [find(model, *example, c.threshold) for example in examples]
    draw(draw_found, folder / 'detections.png', examples, answers, data.meta['classes'])
    print(f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}')
    if c.data == 'builtin':
        print(f'next    python {SCRIPT}.py --cross-attention softmax\n'
              '        python prepare_data.py objects FOLDER_WITH_PHOTOS')
    else:
        print(f'next    python {SCRIPT}.py detect --folder "{folder}" --images PHOTO ...')

def chance(targets):
    """A yardstick: the AP if the answer to each image is the objects of another one."""
    truth, guesses = [], []
    for target, other in zip(targets, targets[1:] + targets[:1]):
        for one in target['annotations']:
            truth.append(one)
            guesses.append(dict(one, image_id=other['image_id'], score=1.0))
    return coco_ap(dict(annotations=truth), guesses)

@torch.no_grad()
def find(model, image, target, threshold):
    """What a model finds in an image (3, H, W): post_process's dicts, the highest-scoring first;
    and a map (H, W), 0 to 1, of where the highest-scoring query looks in the last decoder layer.
    [OA Fig. 1]"""
    attn = model.transformer.decoder.layers[-1].multihead_attn
    inputs = []  # q, k, v, padding, which a forward pass gives attn
    hook = attn.register_forward_pre_hook(lambda module, args: inputs.extend(args))
    outputs = model(image[None].to(model.query_embed.weight.device))
    hook.remove()
    q, k, v, padding = inputs
    x = attn.coefficients(*attn.heads(q, k, v), padding)  # (1, nh, Q, N or more)
    found = post_process(outputs, [target])  # one for each query
    best = np.argmax([one['score'] for one in found])
    h, w = outputs['grid']
    seen = x[0, :, best, :h * w].abs().mean(0).view(1, 1, h, w)  # the mean of the heads
    seen = F.interpolate(seen, image.shape[1:])[0, 0].cpu().numpy()  # (H, W)
    found = sorted(found, key=lambda one: -one['score'])
    return [one for one in found if one['score'] >= threshold], seen / seen.max().clip(1e-12)

def draw_found(path, examples, answers, classes):
    """Draw what is found in images, and dotted what is there, if that is known; below, where each
    one's highest-scoring query looks. examples: [(image, target), ...]; answers: what `find`
    returns for each."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    side = 6 if len(examples) == 1 else 4  # of one picture, in inches
    figure = Figure(figsize=(side * len(examples), 2 * side), layout='tight')
    axes = figure.subplots(2, len(examples), squeeze=False)
    dotted = '; dotted: what is there' if 'annotations' in examples[0][1] else ''
    axes[0, 0].set_title(f'what is found{dotted}')
    axes[1, 0].set_title('where the highest-scoring query looks')
    for column, (image, target), (found, seen) in zip(axes.T, examples, answers):
        height, width = target['orig_size']
        pixels = (image.numpy() * STD + MEAN).clip(0, 1).transpose(1, 2, 0)  # (H, W, 3)
        lit = pixels * (0.25 + 0.75 * seen[..., None])
        for axis, shown in zip(column, (pixels, lit)):
            axis.imshow(shown, extent=(0, width, height, 0))
            axis.axis('off')
        for one in target.get('annotations', []):
            x, y, w, h = one['bbox']
            column[0].add_patch(Rectangle((x, y), w, h, color='white', fill=False, ls=':'))
        draw_boxes(column[0], found, classes)
        draw_boxes(column[1], found[:1], classes)
        if not found:
            column[0].text(0, height, 'no score reaches --threshold', color='white', va='bottom',
                           bbox=dict(color='black', pad=1))
    figure.savefig(path)

def draw_boxes(axis, found, classes):
    """Draw boxes, the highest-scoring first, and their labels. A label that would hide an
    earlier one moves down."""
    from matplotlib.patches import Rectangle
    width, height = axis.get_xlim()[1], axis.get_ylim()[0]
    places = []  # of labels
    for one in found:
        (x, y, w, h), k = one['bbox'], one['category_id']
        axis.add_patch(Rectangle((x, y), w, h, color=f'C{k % 10}', fill=False, lw=1.5))
        while any(abs(x - a) < width / 4 and abs(y - b) < height / 20 for a, b in places):
            y += height / 20
        places.append((x, y))
        axis.text(x, y, f'{classes[k]} {one["score"]:.2f}', color='white', fontsize=8,
                  parse_math=False, bbox=dict(color=f'C{k % 10}', pad=1))

def detect(c):
    """Print and draw what a run finds in photos -> {photo: [dict of category_id, score, bbox]}."""
    photos = []
    for path in map(Path, c.images):
        photos += sorted(path.rglob('*.*')) if path.is_dir() else [path]
    if not photos:
        fail('detect needs --images PHOTO ..., or a folder with photos')
    model, meta = load_run(c)
    folder, answers = Path(c.out_dir, 'found', newest(c, 'best.pt').parent.name), {}
    folder.mkdir(parents=True, exist_ok=True)
    for path in map(str, photos):
        try:
            photo = open_photo(path)
        except Exception as error:  # Pillow raises many kinds
            print(f'note    {path} cannot be read: {error}')
            continue
        image = to_tensor(photo, model.config.image_size)
        target = dict(image_id=path, orig_size=photo.size[::-1])
        answers[path], seen = find(model, image, target, c.threshold)
        columns = '; score, class, left, top, width, height in pixels' if answers[path] else ''
        print(f'{path}: {len(answers[path])} found with --threshold {c.threshold:g}{columns}')
        for one in answers[path]:
            name, box = meta['classes'][one['category_id']], one['bbox']
            print(f'  {one["score"]:.2f}  {name:20}', *(f'{x:7.0f}' for x in box))
        file = re.sub(r'[^\w.-]+', '_', path)[-100:].lstrip('._') + '.png'  # a/b.jpg: a_b.jpg.png
        draw(draw_found, folder / file, [(image, target)], [(answers[path], seen)],
             meta['classes'])
    if not answers:
        fail('none of --images can be read')
    print(f'files   {folder}: what was found, drawn; the last in {file}')
    return answers

# ------------------------------------ runs ------------------------------------
# This section is the same in all four scripts, but for load_run, train_and_report and main. A run
# is a folder out/SCRIPT/NAME: ckpt.pt (to continue from), best.pt (the best evaluation's weights),
# log.csv and pictures. NAME is the preset and the flags, sorted, without those in MACHINE. With
# --resume a command continues the newest of NAME, NAME+2, ..., if this file has not changed since.
# Without, it takes the next free name.
def pick_device(c):
    """Device, and dtype of matmuls. GPUs below compute capability 8 only emulate bfloat16."""
    name, dtype = c.device, 'float32'
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        device = torch.empty(0, device=name).device  # with an index: cuda:0
    except Exception as error:  # PyTorch raises many kinds
        fail(f'--device {name}: {" ".join(str(error).split())[:200]}')
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        dtype = 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
    return device, getattr(torch, dtype if c.dtype == 'auto' else c.dtype)

def mixed_precision(device, dtype):
    """Autocast to dtype, and a loss scaler, which keeps float16 gradients in range. In float32 both
    change nothing."""
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    return autocast, torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

def save(folder, name, state):
    """Write a checkpoint. If writing fails or is killed, the old one is still there."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()  # on a full disk torch.save raises no OSError
        torch.save(state, buffer)
        (folder / f'{name}.part').write_bytes(buffer.getbuffer())
        os.replace(folder / f'{name}.part', folder / name)

def load(path):
    """A checkpoint {model, config, data, ...}. With weights_only no code in it is run."""
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True)
        if {'model', 'config', 'data'} <= saved.keys():
            return saved
    except Exception:  # torch.load raises many kinds
        pass
    fail(f'{path} is no checkpoint: it is missing, damaged, or to be converted by prepare_data.py')

def newest(c, name):
    """The file `name` of --folder or, without it, of the newest run."""
    if c.folder:
        return Path(c.folder, name)
    files = [*Path(c.out_dir, SCRIPT).glob(f'*/{name}')]
    if not files:
        fail(f'no run in {Path(c.out_dir, SCRIPT)}: train first')
    return max(files, key=os.path.getmtime)

def load_run(c):
    """The best model of --folder, or of the newest run, and the meta of its data."""
    file = newest(c, 'best.pt')
    saved = load(file)
    print(f'run     {file.parent}, trained on {saved["config"].get("data")}')
    if saved.get('code') != CODE:
        print(f'note    {SCRIPT}.py has changed since that run was trained')
    try:
        model = make_model(Config(**dict(saved['config'], init='')), saved['data'])
        model.load_state_dict(saved['model'])
    except (KeyError, TypeError, RuntimeError) as error:  # a field, a row, a shape
        fail(f'{file} is of another script, or needs a row, field or shape that is gone (--folder '
             f'takes another run): {" ".join(repr(error).split())[:200]}')
    return model.to(pick_device(c)[0]).eval(), saved['data']

def resume_run(c, meta, model, optimizer, scaler):
    """Load the last checkpoint -> its progress: step, seconds, log."""
    saved = load(Path(c.folder, 'ckpt.pt'))
    if saved.get('code') != CODE:
        fail(f'{SCRIPT}.py has changed since {c.folder} began: undo that, or start anew '
             'without --resume')
    then = dict(saved['settings'], data_checksum=saved['data']['checksum'])
    now = dict(asdict(c), data_checksum=meta['checksum'])
    for name in sorted(now.keys() - MACHINE):
        if then[name] != now[name]:
            fail(f'{c.folder} began with {name} {then[name]}, and now it is {now[name]}: '
                 'start anew without --resume')
    model.load_state_dict(saved['model'])
    optimizer.load_state_dict(saved['optimizer'])
    if saved['scaler']:  # none where it was saved in float32 or bfloat16
        scaler.load_state_dict(saved['scaler'])
    print(f'resumed at step {saved["progress"][0]}/{c.max_iters}')
    return saved['progress']

def write_log(folder, log):
    """Write all rows of metrics to the table folder/log.csv."""
    if folder:
        with open(folder / 'log.csv', 'w', newline='') as file:
            names = dict.fromkeys(name for row in reversed(log) for name in row)
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(log)

def draw(picture, path, *what):
    """Make a picture. Whatever goes wrong, from fonts to a full disk, does not end the run."""
    try:
        picture(path, *what)
    except Exception as error:
        print(f'note    no {path.name}: {error} (pictures need `pip install matplotlib`)')

def draw_curves(path, log, panels):
    """Metrics over the steps. panels: {title: metric}."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5 * len(panels), 4), layout='tight')
    for i, (title, metric) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(1, len(panels), i, title=title, xlabel='step')
        first = 1 if len(log) > 2 else 0  # step 0, untrained, would hide what follows
        rows = [row for row in log[first:] if metric in row]
        axis.plot([row['step'] for row in rows], [row[metric] for row in rows], '.-')
        low, high = axis.get_ylim()  # a tenth of the value or more: noise should look small
        more = max(0, 0.1 * abs(high) - (high - low)) / 2
        axis.set_ylim(low - more, high + more)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    figure.savefig(path)

def run_folder(c, preset, given):
    """-> c with the folder of its run; resume becomes False if there is none to continue. `given`
    are the flags that were typed, {field: value}."""
    flags = [f'{key}={value}' for key, value in sorted(given.items()) if key not in MACHINE]
    words = ','.join([preset, *flags])
    name = re.sub(r'[^\w.,=-]', '_', words)
    if name != words or len(name) > 80:  # a checksum keeps two commands apart
        name = f'{name[:70]}-{zlib.crc32(words.encode()):08x}'
    root = Path(c.out_dir, SCRIPT)
    runs = [*root.glob(f'{name}/ckpt.pt'), *root.glob(f'{name}+*/ckpt.pt')]
    if c.resume and runs:
        return replace(c, folder=str(max(runs, key=os.path.getmtime).parent))
    if given.get('resume'):
        print('note    no run of just these flags is there: a new one starts')
    folder, n = root / name, 1
    while folder.exists():
        n += 1
        folder = root / f'{name}+{n}'
    return replace(c, folder=str(folder), resume=False)

def train_and_report(c):
    """Train in c.folder, or finish what is there -> the last metrics, log and folder."""
    data, folder = load_data(c), Path(c.folder)
    print(f'folder  {folder}')
    if 0 < c.max_iters <= c.warmup_iters:
        print('note    --warmup-iters fill all steps: the rate has no peak')
    model, log = train(c, folder if RANK == 0 else None, data)
    if RANK == 0:
        report(c, model.eval(), log, folder, data)
    return dict(log[-1], log=log, folder=folder)

def parse(argv):
    """argv -> action, and its Config: flags override the preset."""
    words = [*map(str, argv)]
    action = words.pop(0) if words and words[0] in ACTIONS else 'train'
    p = argparse.ArgumentParser(
        prog=f'{SCRIPT}.py', allow_abbrev=False, argument_default=argparse.SUPPRESS,
        usage=f'%(prog)s [{" | ".join(ACTIONS)}] [--preset NAME] [--flag value ...]',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.description = inspect.getsource(Config).partition('    def ')[0]  # fields and their comments
    p.add_argument('--preset', choices=PRESETS, help='a set of settings')
    for f in fields(Config):
        options = get_args(f.type)  # of Literal['a', 'b'] and of float | None
        kind = dict(type=options[0] if options else f.type, choices=CHOICES.get(f.name))
        if get_origin(f.type) is Literal:
            kind = dict(type=type(options[0]), choices=options)
        elif f.type is bool:
            kind = dict(action=argparse.BooleanOptionalAction)
        elif f.type is tuple:  # such as photos
            kind = dict(nargs='+')
        if f.name not in CHOICES:  # Config's source, printed above, says enough of these
            kind['help'] = argparse.SUPPRESS
        p.add_argument('--' + f.name.replace('_', '-'), **kind)
    given, trains = vars(p.parse_args(words)), action in ('train', 'teacher')
    for name, x in given.items():
        flag = '--' + name.replace('_', '-')
        if type(x) is int and x < 0 <= (getattr(Config, name) or 0):  # its default is not negative
            fail(f'{flag} {x} is less than 0')
        if trains and name in ('folder', 'images'):
            fail(f'{flag} goes with a trained run: say {SCRIPT}.py {[*ACTIONS][-1]}')
        if not trains and name not in MACHINE | {'seed'}:
            fail(f'{action} has the settings of a run, which --folder names: leave out {flag}')
    preset = given.pop('preset', 'tiny')
    c = Config(**{**PRESETS[preset], **given})
    return action, run_folder(c, preset, given) if action == 'train' else c

def main(argv=()):
    """Do what the command line says -> what the action returns."""
    torch.set_default_dtype(torch.float32)  # in a notebook, others may have changed these two
    torch.set_default_device(None)
    try:
        if RANK:
            sys.stdout = open(os.devnull, 'w')  # only the first process prints
        if zlib.crc32(Path(__file__).read_bytes()) != CODE:
            print(f'note    {SCRIPT}.py was edited after it was imported: restart the notebook')
        action, c = parse(argv)
        if c.threads:
            torch.set_num_threads(c.threads)
        if c.grad_accum_steps % WORLD:
            fail(f'{WORLD} processes cannot share --grad-accum-steps {c.grad_accum_steps} evenly')
        if WORLD > 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ['LOCAL_RANK']))  # pick_device takes it
            dist.init_process_group()  # gloo for CPUs, nccl for GPUs
            atexit.register(dist.destroy_process_group)
        return ACTIONS[action](c)
    except KeyboardInterrupt:
        print('\nstopped; a training command with --resume continues at its last checkpoint')
        raise SystemExit(130)
    except (ImportError, OSError, FloatingPointError) as error:  # no package, disk full, loss nan
        fail(error)

ACTIONS = {'train': train_and_report, 'detect': detect}

if __name__ == '__main__':
    if hasattr(sys.stdout, 'reconfigure'):  # a console, which may lack a character
        sys.stdout.reconfigure(errors='replace')
    main(sys.argv[1:])
