# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "matplotlib", "pillow", "scipy"]
# ///
"""DETR whose decoder attends by solving a Lasso: sparse reconstruction instead of softmax.

DETR asks a fixed set of learned queries what is in an image. Softmax attention mixes the values V
of the image's tokens with the coefficients softmax(q K^T) of a query q. Here the coefficients x
rebuild the query from the tokens' keys, and a penalty makes many of them zero: a Lasso,
min ||q - x^T K||^2 + lambda ||x||_1. The layer returns x^T V and needs no weight matrices. The
equations printed in the paper do not solve this problem. Textbook ADMM does, by ridge regression
and shrinkage in turn: it converges, is differentiable and costs O(N) per query for N tokens, with
one d x d Cholesky factor per head.

    OA   H. Ackermann, H. Cai, M. Nagel, L. Mirvakhabova, F. Zanjani, F. Porikli (Qualcomm AI
         Research), Optimizing Attention; what it calls V is K here

    equation       what                                                    function
    [OA Sec. 2]    softmax(QK^T / sqrt(d)), with weights                   softmax
    [OA Sec. 4.1]  the same without W_q, W_k, W_v: no-weights              ATTENTION, PROJECTED
    [OA Eq. 1]     min ||q - x^T K||; [choice] squared, + e ||x||^2        l2, ridge_matrix
    [OA Eq. 2]     min ||q - x^T K||^2 + lambda ||x||_1                    lasso, admm
    [OA Eq. 3]     its ADMM, corrected, with an N x N inverse              lasso, vanilla_inverse
    [OA Eq. 4]     the inverse in d x d, corrected                         ridge_matrix, lasso
    (3) and (4)    as printed, which do not work                           experiments/printed.py
    [OA Sec. 3]    x_ii = 0; random tokens                                 without_self, dictionary
    [OA Sec. 3]    x^5 / sum |x^5|                                         sharpen
    [OA Fig. 1]    where a query of the decoder looks                      find

    python admm_detr.py                                # train: four minutes on a CPU, no network
    python admm_detr.py --cross-attention softmax      # the baseline
    python admm_detr.py --resume                       # continue the last run
    python admm_detr.py detect --images photo.jpg      # what the last run finds in photos
    python admm_detr.py --preset finetune              # detr-r50, its cross-attention replaced
    python admm_detr.py --preset paper                 # OA's recipe: 300 epochs of COCO train2017
    python experiments/compare.py admm_detr --table 1  # the paper's tables: 1 and 2

Expected of the first run: AP 0.695, AP50 0.942 on 200 drawings (2000 steps, one CPU thread, one
seed). Over 12 seeds its mean AP is 0.619, softmax's 0.696. [choice] By default the problem is
easier than (2): it has a ridge term, x >= 0 and centred tokens, and x^3 replaces x^5. Four
iterations solve it, and half of a trained model's coefficients are zero. On OA's own problem (2)
(`OA` below), x is still 30 % from the optimum after 15 iterations, and the gradient points
elsewhere: its cosine with the Lasso's is about 0.4 (by default 1.000).

[choice] x rebuilds a query from DETR's keys, which hold positions, and mixes DETR's values, which
do not. Solved over the values (--solve-over value), x nearly gives back the query. There is no
output projection (--out-proj adds one) and no dropout on x. Heads without weights are slices of
the channels. The model and its state-dict keys are facebookresearch/detr's. [choice] marks where
OA is silent, [deviation] where we differ on purpose. Below the banner `runs` is plumbing, identical
in all four scripts.
"""
import argparse
import copy
import csv
import functools
import inspect
import io
import json
import math
import os
import re
import shlex
import sys
import time
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = 'admm_detr'
TORCHRUN = all(os.environ.get(name)  # elsewhere, some of them may be left over
               for name in ('WORLD_SIZE', 'RANK', 'MASTER_ADDR', 'MASTER_PORT'))
WORLD = int(os.environ['WORLD_SIZE']) if TORCHRUN else 1  # number of processes
RANK = int(os.environ['RANK']) if WORLD > 1 else 0        # index of this one

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the paper's method ------------------------------------
# A query q gets coefficients x, one per token, and outputs x^T V. Shapes: q (B, nh, Q, hs), k and v
# (B, nh, N, hs), x (B, nh, Q, N). With is_self, queries and tokens are the same sequence.
def without_self(x, is_self):
    """x (..., Q, N); with is_self, zero where a query meets itself.  [OA Sec. 3]"""
    if not is_self:
        return x
    diagonal = torch.eye(*x.shape[-2:], dtype=torch.bool, device=x.device)
    return x.masked_fill(diagonal, 0)

def soft_threshold(v, t):
    """The proximal operator of t |.|: it moves v towards zero by t, but never past it."""
    return F.relu(v - t) - F.relu(-v - t)

def ridge_matrix(k, e):
    """P = (K^T K + e I)^-1 K^T  (B, nh, hs, N): q P minimises ||q - x^T K||^2 + e ||x||^2.

    It equals K^T (K K^T + e I)^-1, so no N x N matrix is ever made.  [OA Eq. 4]
    [deviation] OA adds random jitter r to K^T K; a Cholesky factor with e I needs none.
    """
    eye = torch.eye(k.size(-1), dtype=k.dtype, device=k.device)
    factor, _ = torch.linalg.cholesky_ex(k.mT @ k + e * eye)  # _ex: no check, which waits
    return torch.cholesky_solve(k.mT, factor)

def vanilla_inverse(k, e):
    """(K K^T + e I)^-1  (B, nh, N, N).  [OA Eq. 3]"""
    eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
    return torch.linalg.inv_ex(k @ k.mT + e * eye)[0]

def lasso(q, k, c, is_self=False, vanilla=False):
    """argmin_x ||q - x^T K||^2 + lambda ||x||_1 + e ||x||^2, by over-relaxed ADMM  [OA Eq. 2]

    -> x (B, nh, Q, N), >= 0 if c.positive. Tokens that are zero get 0; with is_self, so does the
    query itself. [deviation] OA zeroes that entry in x; we zero it in z, where (3b) keeps the
    constraint x_ii = 0, so that ADMM still converges. [choice] OA's is not over-relaxed. `vanilla`
    takes the N x N inverse: the same x up to rounding.  [OA Eq. 3]
    """
    lam, rho, e = scales(q, k, c, is_self)
    threshold = lam / (2 * rho)  # (B, nh, Q, 1)
    if vanilla:
        inverse, products = vanilla_inverse(k, rho), q @ k.mT
        regress = lambda w: (products + rho * w) @ inverse
    else:  # the same, as q K^T + rho w = w (K K^T + rho I) + (q - w K) K^T
        P = ridge_matrix(k, rho)
        regress = lambda w: w + (q - w @ k) @ P

    def prox(v):
        z = F.relu(v - threshold) if c.positive else soft_threshold(v, threshold)
        return without_self(z / (1 + e / rho), is_self)

    z = u = v = q.new_zeros(*q.shape[:-1], k.size(-2))  # (B, nh, Q, N)
    for _ in range(c.iterations):
        x = regress(z - u)  # (3a): argmin ||q - x^T K||^2 + rho ||x - (z - u)||^2
        v = torch.add(v, x - z, alpha=1.6)  # z + u becomes 1.6 x - 0.6 z + u; ADMM has x + u
        z = prox(v)         # (3b): argmin lambda ||z||_1 + e ||z||^2 + rho ||z - v||^2
        u = v - z           # (3c): the scaled dual variable of x = z
    # lambda is 0, too, where no token points towards q: the best x is 0
    return torch.where((threshold > 0) | (c.sparsity == 0), z, 0)

def scales(q, k, c, is_self=False):
    """lambda (B, nh, Q, 1), rho and e (B, nh, 1, 1): what --sparsity, --rho and --ridge mean.

    [choice] sparsity is a share of 2 max |K q|, the smallest lambda that makes a query's x zero;
    rho and ridge are in units of the mean eigenvalue of K^T K. So scaling q or k only scales x.
    """
    products = without_self(q @ k.mT, is_self)  # (B, nh, Q, N)
    products = F.relu(products) if c.positive else products.abs()
    lam = 2 * c.sparsity * products.amax(-1, keepdim=True)
    mean = mean_eigenvalue(k)
    return lam, c.rho * mean, c.ridge * mean

def mean_eigenvalue(k):
    """Of K^T K  (B, nh, 1, 1)."""
    trace = k.square().sum((-2, -1), keepdim=True)
    return (trace / k.size(-1)).clamp_min(1e-8)

@torch.compiler.disable  # --compile has no generators
def gaussian(n, channels):
    """Random tokens (n, channels), drawn on the CPU, the same in every call."""
    return torch.randn(n, channels, generator=torch.Generator().manual_seed(0))

def sharpen(x, power):
    """x^power / sum |x^power|, but rows of zeros stay zero, and tiny ones fade to zero. OA's power
    is 5.  [OA Sec. 3]"""
    if not power:
        return x
    # scaled first, so that neither the power underflows nor its gradient blows up
    largest = x.detach().abs().amax(-1, keepdim=True)
    y = (x / largest.clamp_min(1e-6)) ** power
    return y / y.abs().sum(-1, keepdim=True).clamp_min(0.5)  # at least 1, except in tiny rows

def dictionary(k, padding, centre=False, random_tokens=0):
    """The tokens to solve over. Padding is zeroed, so that it gets no weight; `centre` subtracts
    the mean of the rest; then come random tokens from N(0, 1), the same every time.  [OA Sec. 3]

    [deviation] Padding gets weight in OA's Fig. 1; not here, because it gets none in DETR.
    [deviation] Random tokens have values in OA; not here, because only DETR's values are mixed.
    """
    padding = padding[:, None, :, None]  # (B, 1, N, 1)
    k = k.masked_fill(padding, 0)
    if centre:
        mean = k.sum(2, keepdim=True) / (~padding).sum(2, keepdim=True)
        k = (k - mean).masked_fill(padding, 0)
    if not random_tokens:
        return k
    extra = gaussian(random_tokens, k.size(-1)).to(k)  # (n, hs)
    return torch.cat([k, extra.expand(*k.shape[:2], -1, -1)], dim=2)  # (B, nh, N + n, hs)

def softmax(q, k, padding, is_self, c):
    """softmax(QK^T / sqrt(hs)), standard attention.  [OA Sec. 2]"""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(padding[:, None, None], -math.inf).softmax(-1)

def l2(q, k, padding, is_self, c):
    """argmin ||q - x^T K||^2 + e ||x||^2, sharpened; in cross-attention only.  [OA Eq. 1]"""
    tokens = dictionary(k, padding, c.centre, c.random_tokens)
    e = max(c.ridge, 1e-5)  # less would be lost to float32's rounding
    x = q @ ridge_matrix(tokens, e * mean_eigenvalue(tokens))
    return sharpen(x, c.power)[..., :k.size(2)]

def admm(q, k, padding, is_self, c, vanilla=False):
    """argmin ||q - x^T K||^2 + lambda ||x||_1 + e ||x||^2, sharpened; OA has e = 0.  [OA Eq. 2]"""
    tokens = dictionary(k, padding, c.centre, c.random_tokens)
    x = lasso(q, tokens, c, is_self, vanilla)
    return sharpen(x, c.power)[..., :k.size(2)]

ATTENTION = {  # (q, k, padding (B, N), is_self, config) -> coefficients x (B, nh, Q, N)
    'softmax': softmax,     # MultiheadAttention computes this one and the next with a fused kernel
    'no-weights': softmax,  # no W_q, W_k, W_v, as in all but PROJECTED  [OA Sec. 4.1]
    'l2': l2,
    'admm': admm,
    'admm-vanilla': functools.partial(admm, vanilla=True),  # [OA Eq. 3]
}
PROJECTED = {'softmax'}  # rows with W_q, W_k, W_v and an output projection: add yours

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --enc-layers 3, --out-proj, --no-out-proj. --help prints this."""
    # the paper's method: attention in the decoder; names in ATTENTION
    self_attention: str = 'softmax'  # of its queries to each other
    cross_attention: str = 'admm'    # of its queries to the image
    solve_over: str = 'key'        # what rebuilds a query: the tokens' key or value
    out_proj: bool = False         # an output projection for attention without weights, too
    iterations: int = 4            # of ADMM; --ridge 0 needs many more, and a smaller --rho
    sparsity: float = 0.03         # lambda, as a share of the smallest that makes x zero
    rho: float = 3.0               # of ADMM, in mean eigenvalues of K^T K; best near --ridge
    power: int = 3                 # x to this power, normalised; 0: x as it is; OA uses 5
    random_tokens: int = 0         # [OA Sec. 3]
    # [choice] not in OA: they make the problem easier (see experiments/results.md)
    ridge: float = 3.0             # e of e ||x||^2, in mean eigenvalues; l2 has no other penalty
    positive: bool = True          # x >= 0: a token cannot be subtracted, as in softmax
    centre: bool = True            # subtract the tokens' mean, which dominates K^T K
    # model
    backbone: str = 'small'        # small: convolutions with GroupNorm; resnet50: give it --init
    stride: int = 8                # pixels per token of the small backbone: 4, 8, 16, 32
    hidden_dim: int = 64           # channels
    nheads: int = 4
    enc_layers: int = 2
    dec_layers: int = 2
    dim_feedforward: int = 128     # hidden channels of the feed-forward networks
    dropout: float = 0.0
    num_queries: int = 12          # object queries, several times as many as objects in an image
    num_classes: int = 0           # the data's; no flag
    init: str = ''                 # file with weights to start from: detr-r50, or a ResNet-50
    # losses; matching uses the same weights
    bbox_loss_coef: float = 5.0    # of the L1 distance
    giou_loss_coef: float = 2.0    # of generalised IoU
    eos_coef: float = 0.1          # weight of the class no-object
    # data
    data: str = 'builtin'          # name under data/, a folder like COCO's, or builtin: shapes
    image_size: int = 64           # pixels of the shorter side
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 2000          # optimiser steps
    batch_size: int = 32           # images per forward pass
    grad_accum_steps: int = 1      # forward passes per step, shared among the processes
    learning_rate: float = 1e-3    # at its peak
    lr_backbone_ratio: float = 1.0  # the backbone's rate / learning_rate
    min_lr_ratio: float = 0.05     # final cosine rate / learning_rate
    schedule: str = 'cosine'       # cosine, or step: constant, then a tenth
    warmup_iters: int = 100
    warmdown_iters: int = 0        # schedule step: steps at the end, at a tenth of the rate
    weight_decay: float = 1e-4     # AdamW's, on everything
    grad_clip: float = 0.1         # largest gradient norm; 0 for no clipping
    eval_interval: int = 250       # steps between evaluations, and between checkpoints
    eval_rows: int = 0             # validation images, the first ones; 0 for all there are
    dtype: str = 'auto'            # float32, bfloat16 or float16, for matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0: up to four, which pays for larger models
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the last run with these settings, or start one
    out_dir: str = 'out'           # where runs are written
    # actions
    folder: str = ''               # detect, --resume: a run's folder, instead
    images: list = ()              # detect: one or more photos
    threshold: float = 0.5         # detect: lowest score to show

    def __post_init__(self):
        for name in (self.self_attention, self.cross_attention):
            if name not in ATTENTION:
                fail(f'attention {name} is not in ATTENTION: run the file that adds it')
        if self.hidden_dim % self.nheads or self.hidden_dim % 4:
            fail(f'--hidden-dim {self.hidden_dim} must be a multiple of 4 and of --nheads')
        if self.self_attention == 'l2':
            fail('--self-attention l2 would give back the query: choose another')

    @property
    def variant(self):  # names folders and curves: add a field of yours to see it there
        return f'sa-{self.self_attention}-ca-{self.cross_attention}'

DETR_R50 = dict(data='coco', backbone='resnet50', hidden_dim=256, nheads=8, enc_layers=6,
                dec_layers=6, dim_feedforward=2048, dropout=0.1, num_queries=100,
                learning_rate=1e-4, lr_backbone_ratio=0.1, schedule='step', warmup_iters=0)
# (2) as OA has it, for its tables and recipe. [choice] rho, and 15 iterations: x is within 1 % only
# after hundreds. [choice] 32 random tokens  [OA Sec. 3]: as many as a head of detr-r50 has channels
OA = dict(ridge=0.0, positive=False, centre=False, power=5, rho=0.01, iterations=15,
          random_tokens=32)
PRESETS = {
    'tiny': {},
    't4': dict(batch_size=16, grad_accum_steps=2, max_iters=6000, eval_interval=500),
    # takes 1 GiB of memory per image. [choice] every setting but DETR's own
    'finetune': dict(DETR_R50, init='data/weights/detr-r50.pth', image_size=480, batch_size=2,
                     grad_accum_steps=8, max_iters=600, warmdown_iters=150, eval_interval=200),
    # OA: 4 GPUs with 8 images each, DETR's rates. [choice] DETR's 300 epochs of 3696 steps, the
    # last 100 at a tenth of the rate. An image takes 3 to 5 GiB of memory
    # (on a T4: --batch-size 2 --grad-accum-steps 16)
    'paper': dict(DETR_R50, **OA, init='data/weights/resnet50.pth', image_size=800, batch_size=8,
                  grad_accum_steps=4, max_iters=1108800, warmdown_iters=369600,
                  eval_interval=3696, dtype='float32'),
}
MACHINE = {  # settings that a resumed run may change
    'max_iters', 'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder',
    'images', 'threshold'}
CHOICES = {  # what a text may be; one that is not here may be anything
    'self_attention': ATTENTION, 'cross_attention': ATTENTION, 'solve_over': ('key', 'value'),
    'power': (0, 1, 3, 5), 'backbone': ('small', 'resnet50'), 'stride': (4, 8, 16, 32),
    'schedule': ('cosine', 'step'), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose four vectors never change."""
    def __init__(self, channels):
        super().__init__()
        for name, value in dict(weight=1.0, bias=0.0, running_mean=0.0, running_var=1.0).items():
            self.register_buffer(name, torch.full((channels,), value))

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
    """It has torchvision's keys; 32 pixels per token. As in DETR, its first layers are frozen."""
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self.make_layer(3, 64, 64, stride=1)
        self.layer2 = self.make_layer(4, 256, 128, stride=2)
        self.layer3 = self.make_layer(6, 512, 256, stride=2)
        self.layer4 = self.make_layer(3, 1024, 512, stride=2)
        self.channels = 2048
        self.conv1.requires_grad_(False)
        self.layer1.requires_grad_(False)

    def make_layer(self, blocks, c_in, width, stride):
        rest = [Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)]
        return nn.Sequential(Bottleneck(c_in, width, stride), *rest)

class SmallBackbone(nn.Sequential):
    """A few convolutions with group norm, which learn from scratch; `stride` pixels per token.
    Group norm sees padding, too: what it makes of a photo depends on those beside it."""
    def __init__(self, stride):
        super().__init__()
        halvings = int(math.log2(stride))
        widths = [3, 32, 64, 96, 96, 96, 96]
        for i in range(halvings + 1):
            c_in, c_out = widths[i], widths[i + 1]
            step = 2 if i < halvings else 1
            self.append(nn.Conv2d(c_in, c_out, 3, step, 1, bias=False))
            self.append(nn.GroupNorm(8, c_out))
            self.append(nn.ReLU())
        self.channels = 96

def sine_positions(padding, channels):
    """padding (B, h, w), True outside the image -> (B, h w, channels), y's half first, then x's:
    sines and cosines, interleaved, of positions from 0 to 2 pi, at rates from 1 towards 1/10000."""
    rate = 10000 ** -(torch.arange(channels // 4, device=padding.device) * 4 / channels)
    parts = []
    for axis in (1, 2):
        place = (~padding).cumsum(axis, dtype=torch.float32)  # (B, h, w)
        place = 2 * math.pi * place / (place.amax(axis, keepdim=True) + 1e-6)
        angle = place[..., None] * rate  # (B, h, w, C / 4)
        parts.append(torch.stack([angle.sin(), angle.cos()], -1).flatten(3))
    return torch.cat(parts, -1).flatten(1, 2)

class MultiheadAttention(nn.Module):
    """The parameters are nn.MultiheadAttention's if PROJECTED; else out_proj, or none at all."""
    def __init__(self, c, kind, is_self=False):
        super().__init__()
        C = c.hidden_dim
        self.config, self.kind, self.is_self = c, kind, is_self
        self.projected = kind in PROJECTED
        if self.projected:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * C, C))  # W_q, W_k, W_v
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * C))
        self.out_proj = nn.Linear(C, C) if self.projected or c.out_proj else nn.Identity()

    def heads(self, *qkv):
        """q (B, Q, C), k and v (B, N, C) -> (B, nh, Q, hs), (B, nh, N, hs) twice."""
        if self.projected:
            parts = zip(qkv, self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))
            qkv = [F.linear(x, weight, bias) for x, weight, bias in parts]
        return [x.unflatten(2, (self.config.nheads, -1)).transpose(1, 2) for x in qkv]

    def attend(self, q, k, v, padding=None):
        """-> coefficients x (B, nh, Q, N) of the tokens, and x^T V (B, nh, Q, hs)."""
        attention = ATTENTION[self.kind]
        over_values = self.config.solve_over == 'value' and attention is not softmax
        if padding is None:
            padding = k.new_zeros(len(k), k.size(2), dtype=torch.bool)
        with torch.autocast(q.device.type, enabled=False):  # sums of squares need float32's range
            dtype = torch.promote_types(q.dtype, torch.float32)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            x = attention(q, v if over_values else k, padding, self.is_self, self.config)
            return x, x @ v

    def forward(self, q, k, v, padding=None):
        """q (B, Q, C), k and v (B, N, C), padding (B, N) True where padded -> (B, Q, C)."""
        q, k, v = self.heads(q, k, v)
        if ATTENTION[self.kind] is softmax:  # x^T V with a fused kernel
            mask = None if padding is None else ~padding[:, None, None]  # (B, 1, 1, N)
            dropout = self.config.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)
        else:
            _, y = self.attend(q, k, v, padding)
        return self.out_proj(y.to(q.dtype).transpose(1, 2).flatten(2))  # (B, Q, C)

class EncoderLayer(nn.Module):
    def __init__(self, c, attention='softmax'):
        super().__init__()
        self.self_attn = MultiheadAttention(c, attention, is_self=True)
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
        self.multihead_attn = MultiheadAttention(c, c.cross_attention)
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
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        C = c.hidden_dim
        body = ResNet50() if c.backbone == 'resnet50' else SmallBackbone(c.stride)
        layers = nn.ModuleList(EncoderLayer(c) for _ in range(c.enc_layers))
        encoder = nn.ModuleDict(dict(layers=layers))
        layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.dec_layers))
        decoder = nn.ModuleDict(dict(layers=layers, norm=nn.LayerNorm(C)))
        self.transformer = nn.ModuleDict(dict(encoder=encoder, decoder=decoder))
        self.class_embed = nn.Linear(C, c.num_classes + 1)
        self.bbox_embed = MLP(C, 4)
        self.query_embed = nn.Embedding(c.num_queries, C)
        self.input_proj = nn.Conv2d(body.channels, C, 1)
        self.backbone = nn.ModuleList([nn.ModuleDict(dict(body=body))])
        init_weights(self, c.seed)

    def encode(self, images, mask=None):
        """-> memory and positions (B, N, C), padding (B, N) or None, grid (h, w)."""
        x = self.input_proj(self.backbone[0].body(images))  # (B, C, h, w)
        grid = x.shape[2:]
        padding = x.new_zeros(len(x), *grid, dtype=torch.bool)
        if mask is not None:
            padding = F.interpolate(mask[None].float(), grid)[0].bool()  # (B, h, w)
        pos = sine_positions(padding, x.size(1)).to(x.dtype)
        padding = None if mask is None else padding.flatten(1)
        x = x.flatten(2).transpose(1, 2)  # (B, h w, C)
        for layer in self.transformer.encoder.layers:
            x = layer(x, pos, padding)
        return x, pos, padding, grid

    def forward(self, images, mask=None):
        """Normalised images (B, 3, H, W), mask (B, H, W) True on padding -> pred_logits (B, Q,
        classes + 1), the last for no-object; pred_boxes (B, Q, 4), centre and size as fractions
        of the image; aux_outputs, the same from every earlier decoder layer; grid (h, w), how the
        tokens lie."""
        memory, pos, padding, grid = self.encode(images, mask)
        decoder = self.transformer.decoder
        query_pos = self.query_embed.weight
        x = torch.zeros_like(query_pos).expand(len(images), -1, -1)  # (B, Q, C)
        outs = []
        for layer in decoder.layers:
            x = layer(x, query_pos, memory, pos, padding)
            outs.append(decoder.norm(x))
        x = torch.stack(outs).to(query_pos.dtype)  # (L, B, Q, C)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16's boxes are off by pixels
            logits = self.class_embed(x)
            boxes = self.bbox_embed(x).sigmoid()
        *aux, last = [dict(pred_logits=a, pred_boxes=b) for a, b in zip(logits, boxes)]
        return dict(last, aux_outputs=aux, grid=grid)

@torch.no_grad()
def init_weights(model, seed):
    """Initialise parameters as DETR does, each from its own generator: those that variants
    share start equal. Norms, and any bare nn.Parameter you add, keep their values."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f'{seed} {name}'.encode()))
        module = model.get_submodule(name.rpartition('.')[0])
        if isinstance(module, nn.Embedding):
            p.normal_(generator=generator)
        elif name.endswith('out_proj.bias'):
            p.zero_()
        elif name.endswith('in_proj_weight') or isinstance(module, (nn.Linear, nn.Conv2d)):
            weight = getattr(module, 'weight', p)  # also for its bias
            fan_out, fan_in = len(weight), weight[0].numel()
            bound = fan_in ** -0.5  # PyTorch's default
            if name.startswith('transformer') and p.dim() > 1:
                bound = math.sqrt(6 / (fan_in + fan_out))  # xavier
            p.uniform_(-bound, bound, generator=generator)

# ------------------------------------ data ------------------------------------
# A data set has len and, for the image of a row,
#   example(row, rng=None) -> image (3, H, W), normalised, and target. For training, rng is a NumPy
#       generator: it draws shapes, or the flip and size of a photo
#   target(row) -> the target alone. It has labels (n,); boxes (n, 4), centre and size as fractions
#       of the image; and for AP: annotations in COCO's json form, image_id, orig_size (h, w)
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]  # of ImageNet's colours, 0 to 1
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]

def stream(name, *numbers):
    """A separate generator for each purpose. NumPy treats seeds [1, 7] and [1, 7, 0] as equal,
    hence the final 1."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

# Which points (x, y) of its box a shape covers, 0 to 1. A shape must touch all four sides.
# One more changes all drawings.
SHAPES = {
    'rectangle': lambda x, y, tip: True,
    'disc': lambda x, y, tip: (x - 0.5) ** 2 + (y - 0.5) ** 2 <= 0.25,
    # the tip is at (tip, 0), with tip random
    'triangle': lambda x, y, tip: (x >= tip * (1 - y)) & (x <= 1 - (1 - tip) * (1 - y)),
}

def overlap(a, b):
    """Whether two boxes (centre, size) share 15 % of the smaller one or more."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    width = max(0, (aw + bw) / 2 - abs(ax - bx))
    height = max(0, (ah + bh) / 2 - abs(ay - by))
    return width * height >= 0.15 * min(aw * ah, bw * bh)

class Drawings:
    """n drawings of one to four shapes, which need no files and no network."""
    def __init__(self, n, side):
        self.n, self.side, self.classes = n, side, list(SHAPES)

    def __len__(self):
        return self.n

    def example(self, row, rng=None):
        """A fresh drawing or, without rng, the validation drawing of that row."""
        rng = rng or stream('validation', row)
        target = self.target(row, rng)
        return self.draw(target, stream('pixels', int(rng.integers(2 ** 32)))), target

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
            bbox = [self.side * v for v in (cx - w / 2, cy - h / 2, w, h)]
            annotations.append(dict(image_id=row, category_id=label, bbox=bbox))
        return dict(labels=labels, boxes=boxes, annotations=annotations, image_id=row,
                    orig_size=(self.side, self.side))

    def draw(self, target, rng):
        """-> (3, H, W) float32, normalised."""
        grid = (np.arange(self.side, dtype=np.float32) + 0.5) / self.side
        image = np.full((3, self.side, self.side), rng.uniform(0.2, 0.6), np.float32)  # grey
        for label, (cx, cy, w, h) in zip(target['labels'].tolist(), target['boxes'].tolist()):
            x = (grid - cx) / w + 0.5  # 0 to 1 in the box
            y = ((grid - cy) / h + 0.5)[:, None]
            ink = rng.permutation([0.1, rng.random(), 0.9])
            tip = rng.uniform(0.2, 0.8)
            box = (abs(x - 0.5) <= 0.5) & (abs(y - 0.5) <= 0.5)
            inside = box & SHAPES[self.classes[label]](x, y, tip)
            image[:, inside] = ink[:, None]
        image += 0.04 * rng.standard_normal(image.shape, np.float32)
        return torch.from_numpy((image.clip(0, 1) - MEAN) / STD)

def read_photo(path, size=None):
    """A photo as Pillow's RGB image. It is turned upright as its EXIF says, unless it already has
    the `size` (width, height) in its annotations: those of COCO ignore EXIF."""
    from PIL import Image, ImageOps  # matplotlib brings Pillow
    try:
        with Image.open(path) as photo:
            if photo.size != size:
                photo = ImageOps.exif_transpose(photo)
            if photo.mode == 'F':
                raise ValueError('its pixels are floats of unknown range')
            if photo.mode.startswith('I'):  # 16-bit greys, which convert would cut off at 255
                photo = Image.fromarray((np.asarray(photo) // 256).astype(np.uint8))
            photo = photo.convert('RGB')
    except Exception as error:  # Pillow raises half a dozen kinds
        raise OSError(f'cannot read {path} as a photo: {error}')
    if size and photo.size != size:
        raise OSError(f'{path} has width and height {photo.size}, but its annotations say {size}')
    return photo

def to_tensor(photo, image_size, share=1.0):
    """Pillow's image -> (3, H, W), normalised. The shorter side becomes this share of image_size,
    or less where the longer would exceed 5/3 of image_size, as DETR's 1333 for 800."""
    short, long = sorted(photo.size)
    largest = 5 * image_size // 3 * short / long
    side = max(1, round(min(image_size * share, largest)))
    other = int(side * long / short)
    size = (side, other) if photo.width < photo.height else (other, side)
    x = np.asarray(photo.resize(size, 2), np.float32) / 255  # 2: bilinear
    return torch.from_numpy((x.transpose(2, 0, 1) - MEAN) / STD)

class CocoFolder:
    """Photos and their annotations; row i is the i-th image by id. `annotations` are COCO's, for
    AP. `labels` and `boxes` are the training targets: no crowds, no empty boxes."""
    def __init__(self, folder, name, image_size):
        self.path = folder / 'annotations' / f'instances_{name}.json'
        self.image_size = image_size
        try:
            raw = self.path.read_bytes()
            self.checksum = zlib.crc32(raw)
            content = json.loads(raw)
            names = {int(x['id']): str(x['name']) for x in content['categories']}
            images = {str(x['id']): x for x in content['images']}  # some files have ids as text
            for kind, found in (('categories', names), ('images', images)):
                if len(found) < len(content[kind]):
                    fail(f'{self.path}: some of its {kind} have the same id')
            if min(names) < 0 or max(names) >= 10 ** 5:
                fail(f'{self.path}: category ids are {min(names)} to {max(names)}: use 0 to 99999')
            # labels are category ids, as in DETR, so some labels belong to no class
            self.classes = [names.get(i, '') for i in range(max(names) + 1)]
            self.images = sorted(images.values(), key=lambda image: image['id'])
            for image in self.images:
                if not min(image['width'], image['height']) > 0:
                    fail(f'{self.path}: {image["file_name"]} has no width or no height')
                file = image['file_name'].replace('\\', '/')  # written on Windows
                path = folder / name / file
                image['path'] = path if path.exists() else folder / file  # some name the folder
                if not image['path'].exists():
                    fail(f'{folder / name} has no {file}')
                image.update(annotations=[], labels=[], boxes=[])
            self.add_annotations(content['annotations'], images, names)
        except (OSError, KeyError, TypeError, ValueError) as error:
            fail(f"{self.path} is not an annotation file in COCO's form: {error!r:.200}")

    def add_annotations(self, annotations, images, names):
        """Hand each annotation to its image; refuse those that cannot be used."""
        n, beyond, largest = len(annotations), 0, 0
        for annotation in annotations:
            image = images.get(str(annotation['image_id']))
            label, bbox = int(annotation['category_id']), annotation.get('bbox')
            its = f'{self.path}: annotation {annotation.get("id")}: its'
            if not image or label not in names:
                fail(f'{its} image_id {annotation["image_id"]} or category_id {label} is unknown')
            if not bbox or len(bbox) != 4 or not {*map(type, bbox)} <= {int, float}:
                fail(f'{its} bbox {bbox!r} is not four numbers')
            left, top, w, h = bbox
            right, bottom = left + w, top + h
            W, H = image['width'], image['height']
            if not (left <= W and top <= H and right >= 0 and bottom >= 0):  # nan is not, either
                fail(f'{its} bbox {bbox} is outside its photo of {W} x {H} pixels')
            beyond += min(left, top, W - right, H - bottom) < -1  # by more than a pixel
            largest = max(largest, *bbox)
            left, right = max(left / W, 0), min(right / W, 1)  # cut off at the edges
            top, bottom = max(top / H, 0), min(bottom / H, 1)
            annotation.update(image_id=image['id'], category_id=label)
            image['annotations'].append(annotation)
            if left < right and top < bottom and not annotation.get('iscrowd'):
                image['labels'].append(label)
                image['boxes'].append([(left + right) / 2, (top + bottom) / 2,
                                       right - left, bottom - top])
        if n and largest <= 1 or beyond > max(10, n / 2):
            fail(f'{self.path}: {beyond} of {n} boxes reach beyond their photos, and the largest '
                 f'number is {largest}: boxes must be left, top, width and height in pixels, not '
                 'corners, not fractions')

    def __len__(self):
        return len(self.images)

    def target(self, row, flip=False):
        """The objects of a photo."""
        info = self.images[row]
        boxes = torch.tensor(info['boxes'], dtype=torch.float64).view(-1, 4)
        if flip:
            boxes[:, 0] = 1 - boxes[:, 0]
        return dict(labels=torch.tensor(info['labels'], dtype=torch.long), boxes=boxes.float(),
                    annotations=info['annotations'], image_id=info['id'],
                    orig_size=(info['height'], info['width']))

    def example(self, row, rng=None):
        """A photo or, with rng, what DETR's random flip and size make of it. [deviation] DETR first
        crops half of the photos, at random: left out for brevity."""
        flip = rng.random() < 0.5 if rng else False
        share = rng.integers(15, 26) / 25 if rng else 1.0  # 480, 512, ..., 800 of 800
        info = self.images[row]
        photo = read_photo(info['path'], (info['width'], info['height']))
        image = to_tensor(photo, self.image_size, share)
        return image.flip(2) if flip else image, self.target(row, flip)

def load_data(c):
    """-> data sets train and val, names of the classes, and facts, by which a run knows its data
    again. A folder has photos in train2017/ and val2017/, and annotations/instances_train2017.json,
    ...; with one split alone, every tenth photo is val."""
    if c.data == 'builtin':
        train, val = Drawings(10 ** 6, c.image_size), Drawings(200, c.image_size)
        facts = dict(classes=train.classes, train=len(train), val=len(val))
        return SimpleNamespace(
            train=train, val=val, classes=train.classes, facts=facts,
            about='drawn shapes, always new; expect AP near 0 for the first 500 steps or more')
    folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
    names = [name for name in ('train2017', 'val2017') if (folder / name).is_dir()]
    if not names:
        fail(f'--data {c.data}: no {folder}/train2017, val2017, annotations/instances_*.json; '
             'python prepare_data.py coco makes data/coco, --parts 2 with train2017')
    train = CocoFolder(folder, names[0], c.image_size)
    if len(names) == 2:
        val = CocoFolder(folder, names[1], c.image_size)
    else:
        val = copy.copy(train)
        val.images = train.images[::10]
        del train.images[::10]
    if train.classes != val.classes:
        fail(f'--data {c.data}: the two files of annotations differ in their categories')
    shown = []  # the classes in each split
    for split, n in (train, len(train)), (val, c.eval_rows or len(val)):
        shown.append({split.classes[i] for image in split.images[:n] for i in image['labels']})
        if not shown[-1]:
            fail(f'{split.path} has no object to find (crowds are none) in its first {n} photos')
        split.example(0)  # a photo that does not fit is refused before the run has a folder
    if shown[1] - shown[0]:
        print(f'note    no photo of train shows {", ".join(sorted(shown[1] - shown[0]))}')
    most = max(len(image['labels']) for image in train.images + val.images)
    about = (f'{folder}, {len(train):,} photos, {len(val):,} held out; up to {most} objects in '
             f'one, to be found by --num-queries {c.num_queries}')
    facts = dict(classes=train.classes, train=len(train), val=len(val),
                 checksums=[train.checksum, val.checksum])  # of the annotations
    return SimpleNamespace(train=train, val=val, classes=train.classes, facts=facts, about=about)

# --------------------------- matching, losses, average precision ---------------------------
def assign(cost):
    """cost (n, m) -> rows, columns of the cheapest assignment. Rows are assigned one at a time. To
    make room, a row may push an owner to another column, and so on; Bellman-Ford finds the cheapest
    such chain."""
    n, m = cost.shape
    if n > m:
        columns, rows = assign(cost.T)
        return np.sort(rows), columns[rows.argsort()]  # row by row, as scipy has them
    rounding = 1e-13 * np.abs(cost).max(initial=0)
    owner = np.full(m, -1)  # the row that has a column
    for row in range(n):
        price = cost[row].astype(float)  # of the cheapest chain yet that ends in each column
        before = np.full(m, -1)  # the column ahead of it in that chain
        changed = True
        while changed:
            changed = False
            for j in np.flatnonzero(owner >= 0):  # its owner may change to another column
                through = price[j] - cost[owner[j], j] + cost[owner[j]]
                cheaper = through < price - rounding
                price[cheaper] = through[cheaper]
                before[cheaper] = j
                changed = changed or cheaper.any()
        j = np.where(owner < 0, price, np.inf).argmin()
        while before[j] >= 0:  # every row in the chain moves
            owner[j] = owner[before[j]]
            j = before[j]
        owner[j] = row
    return np.arange(n), owner.argsort()[m - n:]  # -1, free columns, come first

def match(cost):
    """cost (num_queries, num_targets) -> rows, columns of the cheapest pairs."""
    try:
        from scipy.optimize import linear_sum_assignment  # much faster
        return linear_sum_assignment(cost)
    except ImportError:
        return assign(cost)

def box_cxcywh_to_xyxy(boxes):
    """Centre and size (..., 4) -> left, top, right, bottom."""
    centre, size = boxes.chunk(2, -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)

def generalized_box_iou(a, b):
    """IoU of boxes (..., 4), less the empty share of the smallest box around both; broadcasts."""
    area = lambda low, high: (high - low).clamp_min(0).prod(-1)
    a0, a1 = box_cxcywh_to_xyxy(a).chunk(2, -1)
    b0, b1 = box_cxcywh_to_xyxy(b).chunk(2, -1)
    intersection = area(torch.maximum(a0, b0), torch.minimum(a1, b1))
    union = area(a0, a1) + area(b0, b1) - intersection
    around = area(torch.minimum(a0, b0), torch.maximum(a1, b1))
    return intersection / union.clamp_min(1e-30) - (around - union) / around.clamp_min(1e-30)

@torch.no_grad()
def hungarian_match(logits, boxes, labels, true_boxes, counts, c):
    """The cheapest pairing of queries with objects, for each image and layer separately.
    logits (L, B, Q, K + 1), boxes (L, B, Q, 4); labels (T,) and true_boxes (T, 4) of all objects,
    image by image; counts of each -> indices of layer, image, query and object, each (pairs,)."""
    boxes = boxes.unsqueeze(-2)  # (L, B, Q, 1, 4)
    distance = (boxes - true_boxes).abs().sum(-1)  # (L, B, Q, T)
    giou = generalized_box_iou(boxes, true_boxes)
    probability = logits.softmax(-1)[..., labels]
    cost = c.bbox_loss_coef * distance - c.giou_loss_coef * giou - probability
    cost = cost.nan_to_num().cpu().numpy()  # the loss will say if something is not finite
    pairs, first = [], 0  # the image's first object
    for image, n in enumerate(counts):
        for layer in range(len(cost)):
            queries, objects = match(cost[layer, image, :, first:first + n])
            pairs += [(layer, image, q, first + i) for q, i in zip(queries, objects)]
        first += n
    return torch.tensor(pairs, dtype=torch.long, device=logits.device).view(-1, 4).T

def set_loss(outputs, targets, c):
    """DETR's losses -> a dict: `loss`, the weighted sum of cross-entropy, L1 distance and GIoU over
    all decoder layers; and of the last layer loss_ce, loss_bbox, loss_giou, unweighted, and
    class_error, the % of matched queries whose class is wrong (100 where images show nothing, as
    in DETR). [deviation] Each micro-batch is divided by its own objects and class weights: 2 x 16
    images are not 8 x 4. DETR, which has no micro-batches, counts the objects of all processes."""
    layers = [outputs, *outputs['aux_outputs']]  # the last one first
    logits = torch.stack([layer['pred_logits'] for layer in layers])  # (L, B, Q, K + 1)
    boxes = torch.stack([layer['pred_boxes'] for layer in layers])  # (L, B, Q, 4)
    labels = torch.cat([target['labels'] for target in targets]).to(logits.device)  # (T,)
    true_boxes = torch.cat([target['boxes'] for target in targets]).to(logits.device)  # (T, 4)
    counts = [len(target['labels']) for target in targets]
    layer, image, query, truth = hungarian_match(logits, boxes, labels, true_boxes, counts, c)
    places = layer, image, query
    no_object = logits.size(-1) - 1
    classes = torch.full(logits.shape[:3], no_object, device=logits.device)  # (L, B, Q)
    classes[places] = labels[truth]
    class_weight = torch.where(classes == no_object, c.eos_coef, 1.0)
    loss_ce = class_weight * F.cross_entropy(logits.movedim(-1, 1), classes, reduction='none')
    boxes, true_boxes = boxes[places], true_boxes[truth]  # (pairs, 4)
    loss_bbox = (boxes - true_boxes).abs()  # (pairs, 4)
    loss_giou = 1 - generalized_box_iou(boxes, true_boxes)  # (pairs,)

    # divisors: the summed class weights (1, or eos_coef for no-object), the number of objects
    matched = sum(min(n, c.num_queries) for n in counts)
    total_weight = matched + c.eos_coef * (len(counts) * c.num_queries - matched)
    num_boxes = max(1, sum(counts))
    loss = (loss_ce.sum() / total_weight + c.bbox_loss_coef * (loss_bbox.sum() / num_boxes)
            + c.giou_loss_coef * (loss_giou.sum() / num_boxes))
    last = layer == 0  # (pairs,)
    right = (logits[places].argmax(-1) == labels[truth]) & last
    return dict(loss=loss, loss_ce=loss_ce[0].sum() / total_weight,
                loss_bbox=(loss_bbox.sum(-1) * last).sum() / num_boxes,
                loss_giou=(loss_giou * last).sum() / num_boxes,
                class_error=100 * (1 - right.sum() / max(1, matched)))

@torch.no_grad()
def post_process(outputs, targets):
    """What each query finds, in COCO's json form: its likeliest class other than no-object, and
    its box (left, top, width, height) in pixels of the original."""
    scores, labels = outputs['pred_logits'].softmax(-1)[..., :-1].max(-1)  # (B, Q)
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

IOUS = np.linspace(0.5, 0.95, 10)  # a box is right if it has this IoU with an object
AREAS = [(0, 1e10), (0, 32 ** 2), (32 ** 2, 96 ** 2), (96 ** 2, 1e10)]  # of all, small, ...

def iou(detection, true_box):
    """IoU of two boxes or, where the second is a crowd, the share of the first inside it."""
    x, y, w, h = detection['bbox']
    X, Y, W, H = true_box['bbox']
    width = max(0, min(x + w, X + W) - max(x, X))
    height = max(0, min(y + h, Y + H) - max(y, Y))
    intersection = width * height
    union = w * h if true_box['iscrowd'] else w * h + W * H - intersection
    return intersection / max(union, 1e-99)

def compare_boxes(truth, detections):
    """-> (area, ious) of each detection, the highest-scoring first and at most 100 in an image:
    its area; its IoU with each true box there, {index in truth: IoU}."""
    indices = defaultdict(list)  # of the true boxes in each image
    for i, true_box in enumerate(truth):
        indices[true_box['image_id']].append(i)
    compared, kept = [], Counter()
    for detection in sorted(detections, key=lambda one: (-one['score'], one['image_id'])):
        image = detection['image_id']
        kept[image] += 1
        if kept[image] <= 100:
            _, _, w, h = detection['bbox']
            compared.append((w * h, {i: iou(detection, truth[i]) for i in indices[image]}))
    return compared

def right_or_wrong(compared, truth, counts, threshold, low, high):
    """compared: what compare_boxes returns; counts: whether each true box counts -> whether each
    detection that counts is correct: it claims a true box that none before it has claimed."""
    claimed, correct = set(), []
    for area, ious in compared:
        candidates = [i for i, overlap in ious.items() if overlap >= threshold and i not in claimed]
        it_counts = low <= area <= high
        if candidates:  # boxes that count come first, then the highest IoU, then the last one
            best = max(candidates, key=lambda i: (counts[i], ious[i], i))
            it_counts = counts[best]
            if not truth[best]['iscrowd']:  # many detections may match a crowd
                claimed.add(best)
        if it_counts:
            correct.append(bool(candidates))
    return np.array(correct, dtype=int)

def average_precision(correct, wanted):
    """correct: of each detection, the highest-scoring first; wanted: how many objects there are
    -> the mean precision at 101 recalls from 0 to 1."""
    hits = correct.cumsum()
    precision = hits / (np.arange(1, len(hits) + 1) + np.spacing(1))
    precision = np.maximum.accumulate(precision[::-1])[::-1]  # the best at this recall or above
    reached = np.searchsorted(hits / wanted, np.linspace(0, 1, 101))
    return np.append(precision, 0)[reached].mean()  # 0 for recalls that are never reached

def coco_ap(ground_truth, detections):
    """COCO's six average precisions, nan where there is nothing to find, from COCO's json form.

    ground_truth: {annotations: [{image_id, category_id, bbox, area, iscrowd}]}; detections:
    [{image_id, category_id, bbox, score}]; bbox: left, top, width, height in pixels. An area that
    is missing or 0 is width x height. pycocotools gives the same, but -1 for nan, and never matches
    annotation id 0."""
    truth, found = defaultdict(list), defaultdict(list)  # by category
    for annotation in ground_truth['annotations']:
        area = annotation.get('area') or annotation['bbox'][2] * annotation['bbox'][3]
        crowd = annotation.get('iscrowd') or 0
        truth[annotation['category_id']].append(dict(annotation, area=area, iscrowd=crowd))
    for detection in detections:
        found[detection['category_id']].append(detection)
    AP = np.full((len(AREAS), len(IOUS), len(truth)), np.nan)
    for k, category in enumerate(sorted(truth)):
        boxes = truth[category]
        compared = compare_boxes(boxes, found[category])
        for a, (low, high) in enumerate(AREAS):
            counts = [low <= box['area'] <= high and not box['iscrowd'] for box in boxes]
            n = sum(counts)
            if n:
                for t, threshold in enumerate(IOUS):
                    correct = right_or_wrong(compared, boxes, counts, threshold, low, high)
                    AP[a, t, k] = average_precision(correct, n)
    metrics = dict(AP=AP[0], AP50=AP[0, 0], AP75=AP[0, 5], APs=AP[1], APm=AP[2], APl=AP[3])
    for name, x in metrics.items():
        metrics[name] = math.nan if np.isnan(x).all() else float(np.nanmean(x))
    return metrics

# ------------------------------------ training ------------------------------------
def make_model(c, data):
    """A model on the CPU for the classes of data, which may be what a saved run knows of it."""
    return DETR(replace(c, num_classes=len(data.classes)))

def load_weights(model, path):
    """Start from a checkpoint of this script, of DETR or of torchvision's ResNet-50. Attention,
    classes and queries may differ in kind or number; then they start afresh."""
    if not Path(path).exists():
        fail(f'--init {path}: no such file; python prepare_data.py detr-r50, or resnet50, fetches '
             'those that the presets need')
    weights = read_weights(path, nheads=model.config.nheads)
    if 'layer4.0.conv1.weight' in weights:
        weights = {'backbone.0.body.' + key: p for key, p in weights.items()}
    own = model.state_dict()
    fits = {key: p for key, p in weights.items() if key in own and p.shape == own[key].shape}
    spare = r'attn\.(in|out)_proj|^(class_embed|query_embed)|body\.fc\.|num_batches_tracked$'
    odd = [key for key in weights if key not in fits and not re.search(spare, key)]
    if odd:
        fail(f'--init {path}: the model has no place for {len(odd)} of its tensors, such as '
             f'{", ".join(odd[:3])}: the file has another backbone, other layers or sizes')
    model.load_state_dict(fits, strict=False)
    fresh = sorted({key.split('.layers')[0] for key in own if key not in fits})
    print(f'init    {path}: {len(fits)} tensors of {len(own)}; fresh: {", ".join(fresh) or "none"}')

def make_optimizer(model, c):
    """AdamW on everything, as in DETR; the backbone has its own rate."""
    rest = [p for name, p in model.named_parameters() if not name.startswith('backbone')]
    groups = [dict(params=rest, ratio=1.0),
              dict(params=model.backbone.parameters(), ratio=c.lr_backbone_ratio)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, weight_decay=c.weight_decay)

READERS = ThreadPoolExecutor()

def load_batch(dataset, keys, device):
    """keys [(row, rng), ...] of dataset.example -> images (B, 3, H, W), zero-padded at the right
    and bottom if they differ in size; mask (B, H, W), True on these zeros, or None; and targets,
    on the CPU."""
    # photos are decoded in parallel; drawing in threads is slower
    read = READERS.map if isinstance(dataset, CocoFolder) else map
    images, targets = zip(*read(lambda key: dataset.example(*key), keys))
    H, W = max(x.size(1) for x in images), max(x.size(2) for x in images)
    batch = torch.zeros(len(images), 3, H, W)
    mask = torch.ones(len(images), H, W, dtype=torch.bool)
    for i, x in enumerate(images):
        _, h, w = x.shape
        batch[i, :, :h, :w] = x
        mask[i, :h, :w] = False
    return batch.to(device), mask.to(device) if mask.any() else None, targets

@functools.lru_cache(2)
def shuffled(seed, epoch, n):
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro, device):
    """A micro-batch of a step, the same for every variant and in a resumed run."""
    n = c.batch_size * c.grad_accum_steps  # images in a step
    keys = []
    for i in range(micro * c.batch_size, (micro + 1) * c.batch_size):
        epoch, place = divmod(step * n + i, len(data.train))
        row = int(shuffled(c.seed, epoch, len(data.train))[place])
        keys.append((row, stream('train', c.seed, step, i)))
    return load_batch(data.train, keys, device)

def loss_of(model, batch, c):
    images, mask, targets = batch
    return set_loss(model(images, mask), targets, c)['loss']

@torch.no_grad()
def evaluate(model, data, c, device):
    """The loss, its parts in the last decoder layer by DETR's names, and average precision on
    validation images."""
    n = min(len(data.val), c.eval_rows or len(data.val))
    means, truth, detections = defaultdict(float), [], []
    for first in range(0, n, c.batch_size):
        keys = [(row, None) for row in range(first, min(first + c.batch_size, n))]
        images, mask, targets = load_batch(data.val, keys, device)
        outputs = model(images, mask)
        for name, x in set_loss(outputs, targets, c).items():
            means[name] += len(targets) / n * x.item()
        for target in targets:
            truth += target['annotations']
        detections += post_process(outputs, targets)
    return dict(val_loss=means.pop('loss'), **means,
                **coco_ap(dict(annotations=truth), detections))

def learning_rate(step, c, ratio=1.0):
    """The rate of a step, counted from 0: it rises linearly, then falls. ratio scales it all."""
    left = c.max_iters - step
    if step < c.warmup_iters:
        factor = (step + 1) / (c.warmup_iters + 1)  # as in nanoGPT
    elif c.schedule == 'step':  # at its peak until warmdown_iters before the end
        factor = 0.1 if left <= c.warmdown_iters else 1.0
    else:
        done = 1 - left / (c.max_iters - c.warmup_iters)
        cosine = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
        factor = c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine
    return c.learning_rate * ratio * factor

def train_step(net, batches, c, optimizer, scaler, autocast):
    """One optimiser step on all micro-batches -> mean loss, gradient norm before clipping (0 where
    float16 overflows: the scaler then skips the step and halves its scale, down to 1)."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with autocast:
            loss = loss_of(net, batch, c) / c.grad_accum_steps
        scaler.scale(loss).backward()
        total += loss.detach()
    if WORLD > 1:  # sum over the processes, each of which had its own micro-batches
        for tensor in [total, *(p.grad for p in net.parameters() if p.grad is not None)]:
            dist.all_reduce(tensor)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip or math.inf)
    skipped = not norm.isfinite() and scaler.get_scale() > 1
    scaler.step(optimizer)
    scaler.update()
    return total.item(), 0.0 if skipped else norm.item()

def train(c, folder=None, data=None):
    """Train a model as c says -> model, log (a list of dicts of metrics). Checkpoints and log.csv
    go to `folder`, if any. Your own data need data sets train and val, and names of classes."""
    device, dtype = pick_device(c)
    data = data or load_data(c)
    torch.manual_seed(c.seed)  # for parameters of your own
    model = make_model(c, data).to(device)
    if c.init and not c.resume:
        load_weights(model, c.init)
    optimizer = make_optimizer(model, c)
    autocast, scaler = mixed_precision(device, dtype)
    net = torch.compile(model) if c.compile else model
    start, seconds, log, losses = 0, 0.0, [], []
    if c.resume:
        start, seconds, log, losses = resume_run(c, model, optimizer, scaler, data)
    before = seconds
    print(f'model   {c.variant}, {count(model):,} parameters, on {device} in {str(dtype)[6:]}\n'
          f'data    {getattr(data, "about", "your own")}'
          + (f'\nfolder  {folder}' if folder else '')
          + (f', from step {start}' if start else ''))

    def make(step):  # this process's share of a step's micro-batches
        return [get_batch(data, c, step, micro, 'cpu')
                for micro in range(RANK, c.grad_accum_steps, WORLD)]
    batches = prefetch(make, range(start, c.max_iters), device)
    for step in range(start, c.max_iters + 1):
        if step % c.eval_interval == 0 or step == c.max_iters:
            # save first; a run that is resumed from here evaluates again
            weights = dict(model=model.state_dict(), config=asdict(model.config),
                           data=getattr(data, 'facts', dict(classes=data.classes)))
            save(folder, 'ckpt.pt', dict(
                weights, optimizer=optimizer.state_dict()['state'], scaler=scaler.state_dict(),
                progress=(step, seconds, log, losses)))
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            with autocast:
                row.update(evaluate(model.eval(), data, c, device))
            if math.isnan(row['val_loss']):
                raise FloatingPointError(f'validation loss nan at step {step}: try a lower '
                                         '--learning-rate, or check any formula you edited')
            log, losses = [*log, row], []
            if row['AP'] == max(past['AP'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
        if step == c.max_iters:
            break

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        clock = time.time()
        torch.manual_seed(((c.seed << 24) + step) * WORLD + RANK)  # for dropout
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(step, c, group['ratio'])
        loss, norm = train_step(net.train(), next(batches), c, optimizer, scaler, autocast)
        if not math.isfinite(loss + norm):
            raise FloatingPointError(f'loss {loss:g}, gradient norm {norm:g} in step {step}: try a '
                                     'lower --learning-rate, or check any formula you edited')
        losses.append(loss)
        seconds += time.time() - clock
        done = step + 1
        if c.log_interval and done % c.log_interval == 0:
            pace = (seconds - before) / (done - start)  # on this machine
            print(f'step {done}/{c.max_iters} ({done / c.max_iters:.0%}), batch loss {loss:.4f}, '
                  f'{1000 * pace:.0f} ms a step, {(c.max_iters - done) * pace / 60:.1f} min left',
                  flush=True)
    return model, log

# ------------------------------------ report, detect ------------------------------------
@torch.no_grad()
def find(model, image, target, threshold):
    """-> what a model finds in an image (3, H, W), the highest-scoring first, as post_process has
    it; and an attention map (H, W), 0 to 1: where the highest-scoring query looks in the last
    decoder layer.  [OA Fig. 1]"""
    images = image[None].to(model.query_embed.weight.device)  # (1, 3, H, W)
    attn = model.transformer.decoder.layers[-1].multihead_attn
    inputs = []  # of attn: q, k, v, padding
    hook = attn.register_forward_pre_hook(lambda module, args: inputs.extend(args))
    outputs = model(images)
    hook.remove()
    x, _ = attn.attend(*attn.heads(*inputs[:3]))  # (1, nh, Q, N)
    found = post_process(outputs, [target])  # one for each query
    highest = np.argmax([one['score'] for one in found])
    seen = x[0, :, highest].abs().mean(0)  # (N,), the mean of the heads
    seen = seen.view(1, 1, *outputs['grid'])
    attention_map = F.interpolate(seen, image.shape[1:])[0, 0].cpu().numpy()  # (H, W)
    found = [one for one in found if one['score'] >= threshold]
    found.sort(key=lambda one: -one['score'])
    return found, attention_map / attention_map.max().clip(1e-12)

def draw_found(path, examples, answers, classes):
    """Draw what is found in images and, below each, where its highest-scoring query looks.
    examples: [(image, target), ...]; answers: what `find` returns for each."""
    def paint(figure):
        from matplotlib.patches import Rectangle
        axes = figure.subplots(2, len(examples), squeeze=False)
        axes[1, 0].set_title('where the highest-scoring query looks')
        for i, (image, target) in enumerate(examples):
            detections, attention_map = answers[i]
            height, width = target['orig_size']
            pixels = (image.numpy() * STD + MEAN).clip(0, 1).transpose(1, 2, 0)  # (H, W, 3)
            lit = pixels * (0.25 + 0.75 * attention_map[..., None])
            for axis, shown, boxes in zip(axes[:, i], (pixels, lit), (detections, detections[:1])):
                axis.imshow(shown, extent=(0, width, height, 0))
                axis.autoscale(False)  # boxes may reach beyond the image
                axis.axis('off')
                for one in reversed(boxes):  # the highest-scoring on top
                    x, y, w, h = one['bbox']
                    label = one['category_id']
                    colour = f'C{label % 10}'
                    axis.add_patch(Rectangle((x, y), w, h, color=colour, fill=False, lw=1.5))
                    axis.text(x, y, f'{classes[label]} {one["score"]:.2f}', color='white',
                              fontsize=8, parse_math=False, bbox=dict(color=colour, pad=1))
    picture(path, paint, figsize=(4 * len(examples), 8))

def chance(targets):
    """A baseline: the AP of answering each image with the objects of another."""
    truth, guesses = [], []
    for target, other in zip(targets, targets[1:] + targets[:1]):
        truth += target['annotations']
        guesses += [dict(one, image_id=other['image_id'], score=1.0)
                    for one in target['annotations']]
    return coco_ap(dict(annotations=truth), guesses)

def report(c, model, log, folder, data):
    """Print the result beside a baseline's; draw the run and what it finds in four images."""
    n = min(len(data.val), c.eval_rows or len(data.val))
    guess = chance([data.val.target(row) for row in range(n)])
    print(f'\nresult  AP {log[-1]["AP"]:.3f}, AP50 {log[-1]["AP50"]:.3f} on {n} images; '
          f"another image's objects get {guess['AP']:.3f}, {guess['AP50']:.3f}")
    draw(folder / 'curves.png', {c.variant: log}, [
        ('loss: training, dashed: validation', 'loss', 'val_loss'),
        ('validation: loss_ce', 'loss_ce'), ('class_error (%)', 'class_error'),
        ('loss_bbox, dashed: loss_giou', 'loss_bbox', 'loss_giou'),
        ('AP, dashed: AP50', 'AP', 'AP50')])
    examples = [data.val.example(row) for row in range(min(n, 4))]
    answers = [find(model, image, target, c.threshold) for image, target in examples]
    draw_found(folder / 'detections.png', examples, answers, data.classes)
    other = 'softmax' if c.cross_attention != 'softmax' else 'admm'
    files_and_next(c, folder, 'cross_attention', [other, c.cross_attention],
                   'detect --images PHOTO')

def detect(c):
    """Boxes around what a run finds in photos -> {photo: [dict of category_id, score, bbox]}."""
    if not c.images:
        fail('detect needs --images PHOTO ...')
    model, data = load_run(c)
    print('classes', ', '.join(name for name in data.classes if name))
    answers = {}
    for i, path in enumerate(c.images, 1):
        try:
            photo = read_photo(path)
        except OSError as error:
            print(f'note    {error}')
            continue
        image = to_tensor(photo, model.config.image_size)
        target = dict(image_id=path, orig_size=photo.size[::-1])
        detections, attention_map = find(model, image, target, c.threshold)
        print(f'{path}: {len(detections)} above --threshold {c.threshold}; '
              'score, class, left, top, width, height in pixels')
        for one in detections:
            name, box = data.classes[one['category_id']], one['bbox']
            print(f'  {one["score"]:.2f}  {name:20}', *(f'{v:7.0f}' for v in box))
        draw_found(Path(c.folder, f'found-{i}-{Path(path).stem}.png'), [(image, target)],
                   [(detections, attention_map)], data.classes)
        answers[path] = detections
    if not answers:
        fail(f'none of these could be read as a photo: {", ".join(c.images)}')
    return answers

# ------------------------------------ runs ------------------------------------
# --- runs (identical in all four scripts; test_all.py checks)
PROGRAM = f'{SCRIPT}.py'  # main changes it where a file of yours calls main()

def pick_device(c):
    """Device, and dtype of matmuls. GPUs below compute capability 8 only emulate bfloat16."""
    name, dtype = c.device, 'float32'
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    if name == 'cuda':
        name = f'cuda:{os.environ.get("LOCAL_RANK", 0) if WORLD > 1 else 0}'
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError):
        fail(f'--device {c.device}: PyTorch finds none here (names are cpu, cuda, cuda:1, mps)')
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        dtype = 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
    torch.set_num_threads(c.threads or min(4, os.cpu_count()))
    return device, getattr(torch, dtype if c.dtype == 'auto' else c.dtype)

def mixed_precision(device, dtype):
    """Autocast to dtype, and a loss scaler, which keeps float16 gradients in range."""
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    return autocast, torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

def prefetch(make, steps, device):
    """Yield make(step), a list of batches on the CPU, for each step, with their tensors on device.
    A thread makes the next while the caller works (and one too many at the end)."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(make, steps.start)
        for step in steps:
            batches, coming = coming.result(), thread.submit(make, step + 1)
            yield [[x.to(device) if torch.is_tensor(x) else x for x in batch] for batch in batches]

def count(model):
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

def show(row):
    """A log row's metrics as text, except per-layer ones (0.mh) and nan."""
    return '  '.join(f'{name} {x:.4g}' for name, x in row.items()
                     if name not in ('step', 'seconds') and '.' not in name and not math.isnan(x))

def save(folder, name, state):
    """Write a checkpoint. If killed, or if the disk is full, it leaves the old file intact."""
    if folder and RANK == 0:
        buffer = io.BytesIO()  # on a full disk write_bytes raises OSError, torch.save does not
        torch.save(state, buffer)
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, name + '.part').write_bytes(buffer.getbuffer())
        os.replace(Path(folder, name + '.part'), Path(folder, name))

def load_checkpoint(path):
    """A checkpoint of any program. Nothing in the file is run."""
    try:
        if str(path).endswith('.safetensors'):
            return read_safetensors(Path(path).read_bytes())
        return dict(torch.load(path, map_location='cpu', weights_only=True))
    except Exception as error:  # there is no such file, or any of PyTorch's half a dozen
        held = re.search(r'GLOBAL ([\w.]+)', str(error))
        if held:
            fail(f'{path} holds a {held[1]}, which could run code: save model.state_dict() alone')
        fail(f'{path} cannot be read as a checkpoint: {" ".join(str(error).split())[:150]}')

def read_safetensors(raw):
    """{name: tensor} from the length of a JSON header, that header, and the tensors' bytes."""
    kinds = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
                 I64=torch.int64, I32=torch.int32, U8=torch.uint8, BOOL=torch.bool)
    start = 8 + int.from_bytes(raw[:8], 'little')
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != '__metadata__':
            first, last = entry['data_offsets']
            data = bytearray(raw[start + first:start + last])
            tensors[name] = torch.frombuffer(data, dtype=kinds[entry['dtype']]).view(entry['shape'])
    return tensors

def read_weights(path, **settings):
    """{name: tensor} from a checkpoint, ours or another program's, without the prefixes that
    wrappers add. Shapes do not show the number of heads: pass n_head=... to check it."""
    saved = load_checkpoint(path)
    theirs = saved.get('model_args') or saved.get('config') or {}  # nanoGPT's, ours
    for name, value in settings.items():
        if theirs.get(name, value) != value:
            fail(f'{path} has {name} {theirs[name]}, not {value}: '
                 f'give --{name.replace("_", "-")} {theirs[name]}')
    for container in ('model', 'state_dict', 'model_state_dict'):
        if isinstance(saved.get(container), dict):
            saved = saved[container]
    wrappers = re.compile(r'^(module\.|_orig_mod\.|model\.)+')  # DDP, torch.compile, Lightning
    return {wrappers.sub('', name): tensor for name, tensor in saved.items()}

def write_log(folder, log):
    """Write all rows of metrics to the table folder/log.csv."""
    if folder and RANK == 0:
        with open(Path(folder, 'log.csv'), 'w', newline='') as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in log for name in row))
            writer.writeheader()
            writer.writerows(log)

def picture(path, paint, **size):
    """Save what paint(figure) draws. Without matplotlib, or if it fails, print a note."""
    try:
        from matplotlib.figure import Figure
        figure = Figure(layout='tight', **size)
        paint(figure)
        figure.savefig(path)
    except Exception as error:  # a font, or matplotlib's own imports
        print(f'note    no {path.name}: {error} (pictures need `pip install matplotlib`)')

def draw(path, logs, panels):
    """Plot metrics over the steps, a line for each log in {label: log}. A panel is (title, metric)
    or (title, metric, second metric, which is dashed)."""
    def paint(figure):
        from matplotlib import colormaps
        colours = colormaps['viridis'](np.linspace(0, 0.8, len(logs)))
        for i, (title, *names) in enumerate(panels, 1):
            axis = figure.add_subplot(1, len(panels), i, xlabel='step', title=title)
            for (label, log), colour in zip(logs.items(), colours):
                for name, line in zip(names, ('.-', '.--')):
                    rows = [row for row in log if name in row
                            and (row['step'] > 0 or len(log) < 3)]  # step 0 is far off
                    axis.plot([row['step'] for row in rows], [row[name] for row in rows], line,
                              color=colour, label=label)
                    label = None  # once in the legend
            axis.grid(alpha=0.3)
        axis.legend()
    picture(path, paint, figsize=(5 * len(panels), 4))

def new_folder(c):
    """Make a new folder, out/SCRIPT/VARIANT-sSEED; if it exists, -2, -3, ... is appended."""
    name, n = f'{c.variant}-s{c.seed}', 1
    folder = Path(c.out_dir, SCRIPT, name)
    while folder.exists():
        n += 1
        folder = folder.with_name(f'{name}-{n}')
    folder.mkdir(parents=True)
    return folder

def read_config(folder):
    """A run's settings, as a dict, which is empty if this script made none in that folder."""
    file, known = Path(folder, 'config.json'), asdict(Config())
    config = json.loads(file.read_text('utf-8')) if file.exists() else {}
    return {**known, **config} if config and config.keys() <= known.keys() else {}

def find_run(given, resume):
    """--folder, or the newest run with the settings `given` on the command line, or None. With
    --resume the others must be the defaults, unless none are given: a command finds its own run."""
    if given.get('folder'):
        return Path(given['folder'])
    wanted = {name: x for name, x in given.items() if name not in MACHINE}
    if resume and wanted:
        wanted = {name: x for name, x in asdict(Config(**wanted)).items() if name not in MACHINE}
    files = Path(given.get('out_dir', Config.out_dir), SCRIPT).glob('*/ckpt.pt')
    for file in sorted(files, key=os.path.getmtime, reverse=True):
        config = read_config(file.parent)
        if config and wanted.items() <= config.items():
            return file.parent

def load_run(c, name='best.pt'):
    """Model of a run, with its best weights, and what the run knows of its data."""
    saved = load_checkpoint(Path(c.folder, name))
    data = SimpleNamespace(**saved['data'])
    model = make_model(Config(**saved['config']), data).to(pick_device(c)[0])
    model.load_state_dict(saved['model'])  # fails if you have changed the model since
    return model.eval(), data

def resume_run(c, model, optimizer, scaler, data):
    """Load a run's last checkpoint -> its progress: step, seconds, log, losses since the log."""
    saved = load_checkpoint(Path(c.folder, 'ckpt.pt'))
    for name, x in getattr(data, 'facts', {}).items():
        if saved['data'].get(name) != x:
            fail(f'{c.folder} was trained on other data: {name} was {saved["data"].get(name)}, '
                 f'and is {x}'[:300])
    if c.max_iters < saved['progress'][0]:
        fail(f'--max-iters {c.max_iters}: {c.folder} is at step {saved["progress"][0]}')
    model.load_state_dict(saved['model'])
    # restore only the moments; weight decay etc. come from the settings
    optimizer.load_state_dict({**optimizer.state_dict(), 'state': saved['optimizer']})
    if saved['scaler']:  # it was trained in float16
        scaler.load_state_dict(saved['scaler'])
    return saved['progress']

def train_and_report(c):
    """Train in a new folder or, with --resume, in the old one -> its last metrics."""
    data, folder = load_data(c), None
    if RANK == 0:  # only the first process writes
        folder = Path(c.folder) if c.resume else new_folder(c)
        (folder / 'config.part').write_text(json.dumps(asdict(c), indent=1), 'utf-8')
        os.replace(folder / 'config.part', folder / 'config.json')
    try:
        model, log = train(c, folder, data)
    except KeyboardInterrupt:
        print('\nstopped')
        if folder and (folder / 'ckpt.pt').exists():
            step = load_checkpoint(folder / 'ckpt.pt')['progress'][0]
            print(f'to continue from step {step}: '
                  f'python {PROGRAM} --resume --folder {shlex.quote(folder.as_posix())}')
        raise SystemExit(130)
    if RANK == 0:
        report(c, model.eval(), log, folder, data)
    return dict(log[-1], log=log, folder=folder)

def files_and_next(c, folder, field, values, *more):
    """Print the end of a report: its files, further commands, and one that trains variants anew, to
    compare them."""
    print(f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}')
    flags = []
    for f in fields(Config):
        value, flag = getattr(c, f.name), f.name.replace('_', '-')
        if value != f.default and f.name not in (MACHINE - {'max_iters'}) | {'seed', field}:
            flags.append(f'--{flag}={value}' if f.type is not bool else
                         f'--{flag}' if value else f'--no-{flag}')
    if Path(PROGRAM).name != f'{SCRIPT}.py':
        flags += ['--with', PROGRAM]
    compare = shlex.join(['experiments/compare.py', SCRIPT, '--sweep',
                          f'{field}={",".join(values)}', '--seeds', str(c.seed), *flags])
    for command in more:
        print(f'next    python {PROGRAM} {command} --folder {shlex.quote(folder.as_posix())}')
    print(f'next    python {compare}')

def parse(argv=None):
    """argv -> action, Config. Flags override the preset; a run that is found keeps its settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    action = words.pop(0) if words and words[0] in ACTIONS else 'train'
    help_text = inspect.getsource(Config) if {'-h', '--help'} & {*words} else ''  # needs a file
    p = argparse.ArgumentParser(
        usage=f'{PROGRAM} [{" | ".join(ACTIONS)}] [--preset NAME] [--flag value ...]',
        description=help_text.partition('class Config:\n')[2].partition('    def ')[0],
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
        allow_abbrev=False)
    p.error = lambda message: fail(f'{message} (see --help)')
    p.add_argument('--preset', choices=PRESETS, help='a set of settings; flags override it')
    kinds = {bool: dict(action=argparse.BooleanOptionalAction), list: dict(nargs='+')}
    for f in [f for f in fields(Config) if f.name != 'num_classes']:  # that is the data's
        kind = kinds.get(f.type, dict(type=f.type, choices=CHOICES.get(f.name)))
        spellings = {'--' + f.name, '--' + f.name.replace('_', '-')}  # nanoGPT's --n_layer, too
        p.add_argument(*sorted(spellings), help=argparse.SUPPRESS, **kind)
    given = vars(p.parse_args(words))
    given = {**PRESETS[given.pop('preset', 'tiny')], **NEW.get(action, {}), **given}
    for name, value in given.items():
        if type(value) in (int, float) and not 0 <= value < 2 ** 32:  # nor may it be nan
            fail(f'{name} {value}: must be from 0 to {2 ** 32 - 1}')
        if name in ('data', 'init', 'folder', 'out_dir'):
            given[name] = os.path.expanduser(value)  # a shell leaves --data=~/x alone
    new, resume = action in NEW, given.pop('resume', False)
    folder = find_run(given, resume) if resume or not new else None
    if new and not folder:  # with --resume, there is nothing to resume yet
        if given.get('folder'):
            fail('--folder names a run to --resume; a new run picks its own name')
        return action, Config(**given)
    if not folder:
        out = given.get('out_dir', Config.out_dir)
        fail(f'no run with these settings in {out}/{SCRIPT}: train first')
    config = read_config(folder)
    if not config:
        fail(f'{folder} is not a run of {SCRIPT}.py as it is now')
    for name, value in given.items():
        if name not in MACHINE and config[name] != value:
            fail(f'{folder} has --{name.replace("_", "-")} {config[name]}, which stays')
    print(f'run     {folder}')
    return action, Config(**{**config, 'device': 'auto',  # this may be another machine
                             **given, 'folder': str(folder), 'resume': new})

def main(argv=None):
    """Do what the command line says -> what the action returns."""
    global PROGRAM
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):  # a notebook's has not
            stream.reconfigure(errors='replace')  # for consoles that cannot show every character
    if RANK:
        sys.stdout = open(os.devnull, 'w')
    if argv is None and 'kernel_launcher' in sys.argv[0]:
        argv = []  # main() in a notebook's cell: sys.argv is the kernel's
    if argv is None:
        PROGRAM = sys.argv[0]
    action, c = parse(argv)
    if c.grad_accum_steps % WORLD:
        n = WORLD * math.ceil(c.grad_accum_steps / WORLD)
        fail(f'{WORLD} processes cannot share {c.grad_accum_steps} micro-batches evenly: give '
             f'--grad-accum-steps {n} --batch-size {c.batch_size * c.grad_accum_steps // n or 1}')
    if WORLD > 1:
        print(f'waiting for {WORLD} processes')
        dist.init_process_group('nccl' if pick_device(c)[0].type == 'cuda' else 'gloo')
    try:
        return ACTIONS[action](c)
    except torch.OutOfMemoryError:
        message = 'out of memory: use a smaller --batch-size and more --grad-accum-steps'
    except (ImportError, OSError, FloatingPointError) as error:  # no package, disk full, loss nan
        message = str(error)
    finally:
        if WORLD > 1:
            dist.destroy_process_group()
    fail(message)  # not inside `except`: a notebook keeps the error, and with it all tensors
# --- end of runs

ACTIONS = {'train': train_and_report, 'detect': detect}
# actions that start a run, and settings they imply; others, and --resume, look for an old one
NEW = {'train': {}}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
