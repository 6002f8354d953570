# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""DETR whose decoder attends by solving a Lasso: sparse reconstruction instead of softmax.

Attention mixes values with coefficients softmax(QK^T). Here a query's coefficients x are instead
those that rebuild it from few tokens: min ||q - x^T K||^2 + lambda ||x||_1, with no weights at all.
The equations printed in the paper do not solve this problem; textbook ADMM does, and it is exact,
differentiable and linear in the number of tokens, with one d x d Cholesky factor per head.

    OA   H. Ackermann, H. Cai, M. Nagel, L. Mirvakhabova, F. Zanjani, F. Porikli (Qualcomm AI
         Research), Optimizing Attention; what it calls V is K here

    equation       what                                                    function
    [OA Sec. 2]    softmax(QK^T / sqrt(d)), with weights                   softmax
    [OA Sec. 4.1]  the same without W_q, W_k, W_v: no-weights              ATTENTION
    [OA Eq. 1]     min ||q - x^T K||; [choice] squared, + rho ||x||^2      l2, regression
    [OA Eq. 2]     min ||q - x^T K||^2 + lambda ||x||_1                    lasso, admm
    [OA Eq. 3]     the same by an N x N inverse: admm-vanilla              lasso, ATTENTION
    [OA Eq. 4]     the inverse in d x d, corrected                         regression, lasso
    ... as they are printed: admm-vanilla-printed, admm-printed            printed
    [OA Sec. 3]    x^5 / sum |x^5|; random tokens; clamp; x_ii = 0         sharpen, dictionary

    python admm_detr.py                                # train: six minutes on a CPU, no network
    python admm_detr.py --cross-attention softmax      # the baseline
    python admm_detr.py detect --images photo.jpg      # what the last run finds in photos
    python admm_detr.py inspect                        # where the decoder looks: OA's Fig. 1
    python admm_detr.py compare --table 1 --seeds 0,1  # the paper's tables: 1 and 2
    python admm_detr.py bench                          # what the variants cost
    python admm_detr.py --preset finetune              # detr-r50 with its attention replaced
    python admm_detr.py --preset paper                 # OA's recipe: 300 epochs of COCO train2017

The first ends at AP 0.720, AP50 0.948 on 200 drawings (on another CPU 0.674, 0.925); the means over
16 other seeds are 0.651 and 0.900, for the second 0.681 and 0.918 (2000 steps, one CPU thread).
The default solves (2) made easier: [choice] ridge term, x >= 0, centred tokens. OA's hardly learns.

What OA leaves open: [choice] x is solved for over tokens with positions (DETR's keys) and mixes
those without (its values), since using the same for both nearly gives back the query
(--solve-over value); no output projection (--out-proj), no dropout of x; heads without weights
are slices of the channels. Model and state-dict keys are facebookresearch/detr's.

Lines 1-860 are the paper: method, configuration, model, losses, data, training. What follows is
tools: those of all four scripts, then drawings, average precision, photos, ResNet-50, pictures.
"""
import argparse
import ast
import concurrent.futures
import csv
import functools
import io
import json
import linecache
import math
import os
import signal
import sys
import time
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = 'admm_detr'
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many
STOP = []                                     # signals that came: finish the step, save, stop

def fail(message):
    """Stop with one line on what the user can do about it."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the paper's method ------------------------------------
# A query q has coefficients x, one per token, and passes on x^T V. Shapes: q (B, nh, Q, hs), tokens
# k and v (B, nh, N, hs), x (B, nh, Q, N). With `own`, queries and tokens are the same sequence.
def without_own(x, own):
    """x (..., Q, N); if `own`, zero where a query meets itself."""
    if not own:
        return x
    diagonal = torch.eye(*x.shape[-2:], dtype=torch.bool, device=x.device)
    return x.masked_fill(diagonal, 0)

def scales(q, k, own=False, sparsity=0.03, rho=0.1, ridge=0.0, positive=False):
    """lambda (B, nh, Q, 1), rho and e (B, nh, 1, 1) from relative settings.

    At sparsity 1, lambda = 2 max |K q| and x is zero; a rho or ridge of 1 is the mean eigenvalue
    of K^T K. So scaling q, or all of k, only scales the solution.
    """
    products = without_own(q @ k.mT, own)  # (B, nh, Q, N)
    products = F.relu(products) if positive else products.abs()
    largest = products.amax(-1, keepdim=True)
    mean = k.square().sum((-2, -1), keepdim=True) / k.size(-1)
    return 2 * sparsity * largest, (rho * mean).clamp_min(1e-8), ridge * mean

def regression(k, rho):
    """P = (K^T K + rho I)^-1 K^T  (B, nh, hs, N): q P minimises ||q - x^T K||^2 + rho ||x||^2.

    It equals K^T (K K^T + rho I)^-1, so no N x N matrix is ever made.  [OA Eq. 4]
    """
    eye = torch.eye(k.size(-1), dtype=k.dtype, device=k.device)
    factor, _ = torch.linalg.cholesky_ex(k.mT @ k + rho * eye)  # K^T K + rho I >= rho I: it exists
    return torch.cholesky_solve(k.mT, factor)

def lasso(q, k, own=False, sparsity=0.03, rho=0.1, iterations=15, relax=1.6, ridge=0.0,
          positive=False, vanilla=False):
    """argmin_x ||q - x^T K||^2 + lambda ||x||_1 + e ||x||^2, by over-relaxed ADMM  [OA Eq. 2]

    -> x (B, nh, Q, N), >= 0 if `positive`. Tokens that are zero get 0, and so does, with `own`, the
    query's own token: step (3b) under the constraint x_ii = 0 zeroes that entry. `vanilla` takes
    the N x N inverse: the same x up to rounding.  [OA Eq. 3]
    """
    penalty, rho, e = scales(q, k, own, sparsity, rho, ridge, positive)
    # (3b) has a threshold per query, but F.softshrink takes only one: measure x in thresholds
    unit = penalty / (2 * rho)  # (B, nh, Q, 1)
    q = q / torch.where(unit > 0, unit, 1)
    if vanilla:
        eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
        inverse = torch.linalg.inv_ex(k @ k.mT + rho * eye)[0]  # (B, nh, N, N)
        products = q @ k.mT
    else:
        P = regression(k, rho)

    def shrink(v):  # (3b): argmin lambda |z|_1 + e ||z||^2 + rho ||z - v||^2
        z = F.relu(v - 1) if positive else F.softshrink(v, 1.0)
        return without_own(z / (1 + e / rho), own)

    z = u = v = q.new_zeros(*q.shape[:-1], k.size(-2))  # (B, nh, Q, N)
    for _ in range(iterations):
        w = z - u
        # (3a): argmin ||q - x^T K||^2 + rho ||x - w||^2
        if vanilla:
            x = (products + rho * w) @ inverse
        else:
            x = w + (q - w @ k) @ P  # the same: ridge regression of w's residual
        v = torch.add(v, x - z, alpha=relax)  # x + u if relax is 1
        z = shrink(v)
        u = v - z  # (3c): the running sum of x - z, the scaled dual of x = z
    return z * unit

def printed(q, k, own=False, sparsity=0.03, rho=0.1, iterations=15, vanilla=False, sigma=1e-4):
    """Equations (3) or (4) to the letter -> x (B, nh, Q, N). They do not solve the Lasso.

    The sign of mu in (3b) contradicts (3c), so past the threshold the state at least doubles in
    every iteration; the fixed point of (3) is ridge regression, whatever lambda is; (4) has D^1/2
    where the spectrum is D, and omits the complement of V's range.  [OA Eq. 3] [OA Eq. 4]
    """
    penalty, rho, _ = scales(q, k, own, sparsity, rho)
    products = q @ k.mT  # (B, nh, Q, N)
    threshold = penalty / rho
    if vanilla:
        eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
        inverse = torch.linalg.inv_ex(k @ k.mT + rho * eye)[0]  # (B, nh, N, N)
    else:
        # [choice] sigma: OA calls the jitter on K^T K small
        jitter = sigma * torch.rand(k.size(-1), generator=torch.Generator().manual_seed(1))
        D, X = torch.linalg.eigh(k.mT @ k + jitter.diag().to(k))  # (B, nh, hs)
        D = D.unsqueeze(-2)  # (B, nh, 1, hs)
        Y = k @ X / D.sqrt()  # (B, nh, N, hs)
    x = z = mu = torch.zeros_like(products)
    for _ in range(iterations):
        new = products + rho * (x - z)  # (3a)
        new = new @ inverse if vanilla else new @ Y / (D.sqrt() + rho) @ Y.mT
        new = without_own(new, own).clamp(-1, 1)  # [choice] 1
        z = x - mu - (x - mu).clamp(-threshold, threshold)  # (3b), with the old x
        x, mu = new, mu + new - z  # (3c)
    return x

def sharpen(x, power=5):
    """x^5 / sum |x^5|, safely: rows of zeros stay, tiny ones fade to zero.  [OA Sec. 3]"""
    if not power:
        return x
    # scaled first, so that x^5 neither underflows nor blows the gradient up
    largest = x.detach().abs().amax(-1, keepdim=True)
    y = (x / largest.clamp_min(1e-6)) ** power
    return y / y.abs().sum(-1, keepdim=True).clamp_min(0.5)  # not 1, the sum of one entry alone

def dictionary(k, padding, c):
    """The tokens to solve over: padding zeroed, so it gets no weight; minus their mean if
    --centre; then random tokens from N(0, 1), the same every time.  [OA Sec. 3]"""
    if padding is None:
        padding = torch.zeros(len(k), k.size(2), dtype=torch.bool, device=k.device)
    hidden = padding[:, None, :, None]  # (B, 1, N, 1)
    k = k.masked_fill(hidden, 0)
    if c.centre:
        mean = k.sum(2, keepdim=True) / (~hidden).sum(2, keepdim=True)
        k = (k - mean).masked_fill(hidden, 0)
    extra = torch.randn(c.random_tokens, k.size(-1), generator=torch.Generator().manual_seed(0))
    extra = extra.to(k).expand(*k.shape[:2], -1, -1)  # (B, nh, n, hs)
    return torch.cat([k, extra], dim=2)

def softmax(q, k, padding, own, c):
    """softmax(QK^T / sqrt(hs)), standard attention.  [OA Sec. 2]"""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None], -math.inf)
    return scores.softmax(-1)

def l2(q, k, padding, own, c):
    """argmin ||q - x^T K||^2 + rho ||x||^2, sharpened; in cross-attention only.  [OA Eq. 1]"""
    tokens = dictionary(k, padding, c)
    _, rho, _ = scales(q, tokens, rho=c.rho)
    x = q @ regression(tokens, rho)
    return sharpen(x, c.power)[..., :k.size(2)]

def admm(q, k, padding, own, c, vanilla=False):
    """argmin ||q - x^T K||^2 + lambda ||x||_1, sharpened.  [OA Eq. 2]"""
    tokens = dictionary(k, padding, c)
    x = lasso(q, tokens, own, c.sparsity, c.rho, c.iterations, c.relax, c.ridge, c.positive,
              vanilla)
    return sharpen(x, c.power)[..., :k.size(2)]  # what random tokens take is lost

def admm_printed(q, k, padding, own, c, vanilla=False):
    """The paper's formulas as they stand, which pay no heed to padding.  [OA Eq. 4]"""
    options = replace(c, centre=False, random_tokens=c.random_tokens or 32)  # [choice] 32
    tokens = dictionary(k, None, options)
    x = printed(q, tokens, own, c.sparsity, c.rho, c.iterations, vanilla)
    return sharpen(x, c.power)[..., :k.size(2)]

ATTENTION = {  # (q, k, padding (B, N) or None, own, config) -> coefficients x (B, nh, Q, N)
    'softmax': softmax,     # for these two MultiheadAttention.forward uses the fused kernel
    'no-weights': softmax,  # no W_q, W_k, W_v, as in all that follow  [OA Sec. 4.1]
    'l2': l2,
    'admm': admm,
    'admm-vanilla': functools.partial(admm, vanilla=True),                  # [OA Eq. 3]
    'admm-printed': admm_printed,
    'admm-vanilla-printed': functools.partial(admm_printed, vanilla=True),  # [OA Eq. 3]
}

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --enc-layers 3, --out-proj, --no-out-proj. --help prints this."""
    # the paper's method: attention in the decoder; names in ATTENTION
    self_attention: str = 'softmax'  # of its queries to each other
    cross_attention: str = 'admm'    # of its queries to the image
    solve_over: str = 'key'        # key or value: tokens to solve over; values are mixed
    out_proj: bool = False         # keep the output projection of attention without weights
    iterations: int = 4            # of ADMM; without a ridge 15 or more, at --rho 0.1
    sparsity: float = 0.03         # lambda, as a share of the smallest that makes x zero
    rho: float = 3.0               # in units of the mean eigenvalue of K^T K; best near --ridge
    relax: float = 1.6             # over-relaxation, below 2; 1 for none
    power: int = 3                 # raise coefficients to it, normalise; 0: do neither; OA has 5
    random_tokens: int = 0         # [OA Sec. 3]; for -printed, 0 means 32
    # [choice] not OA's, which hardly learns in cross-attention (see assets/results.md):
    ridge: float = 3.0             # + e ||x||^2, an elastic net: steadier where tokens are alike
    positive: bool = True          # x >= 0: a token cannot be subtracted, as in softmax
    centre: bool = True            # tokens less their mean, which is most of K^T K and says little
    # model
    backbone: str = 'small'        # small: convolutions with GroupNorm; resnet50
    stride: int = 8                # pixels per token of the small backbone: 4, 8, 16, 32
    hidden_dim: int = 64           # channels
    nheads: int = 4
    enc_layers: int = 2
    dec_layers: int = 2
    dim_feedforward: int = 128     # hidden channels of the feed-forward networks
    dropout: float = 0.0
    num_queries: int = 12          # object queries, several times the most objects
    num_classes: int = 0           # as many as the data has
    classes: list = ()             # their names; the data know them
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
    batch_size: int = 32           # images in memory at once, shared among the processes
    grad_accum_steps: int = 1      # batches in an optimiser step
    learning_rate: float = 1e-3    # at its peak
    lr_backbone: float = 1.0       # the backbone's, as a multiple of learning_rate
    min_lr: float = 0.05           # final cosine rate, as a fraction of learning_rate
    schedule: str = 'cosine'       # cosine, trapezoid, step or constant, after warmup
    warmup_iters: int = 100
    warmdown_iters: int = 0        # final steps: falling to 0 (trapezoid), at a tenth (step)
    weight_decay: float = 1e-4     # AdamW's, on everything
    grad_clip: float = 0.1         # largest gradient norm; 0 for no clipping
    eval_interval: int = 250       # steps between evaluations, and between checkpoints
    eval_rows: int = 0             # validation images; 0 for all there are
    dtype: str = 'auto'            # of matmuls: float32, bfloat16, float16
    # machine: from here on, settings may differ when a run resumes
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0 for PyTorch's default
    log_interval: int = 50         # steps between lines of the log
    max_minutes: float = 0.0       # save and stop a run after this long; 0: never
    fresh: bool = False            # restart a stopped or finished run from scratch
    out_dir: str = 'out'           # where runs are written
    # actions
    run: str = ''                  # detect, inspect: a run's folder; default: the last one of train
    images: list = ()              # detect, inspect: photos; may be repeated
    threshold: float = 0.5         # detect: lowest score to show
    over: list = ()                # compare, bench: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                flag = '--' + name.replace('_', '-')
                fail(f'{flag} {getattr(self, name)}: choose from {", ".join(map(str, allowed))}')
        if self.hidden_dim % self.nheads or self.hidden_dim % 4:
            fail(f'--hidden-dim {self.hidden_dim}: needs a multiple of 4 and of --nheads')
        if not (0 < self.sparsity <= 1 and self.rho > 0 and self.ridge >= 0 and 0 < self.relax < 2):
            fail('wanted: 0 < --sparsity <= 1, --rho > 0, --ridge >= 0, 0 < --relax < 2')
        if 'printed' in self.variant and self.iterations > 20:
            fail('--iterations: printed formulas double their state in each; 20 at most')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')

    @property
    def variant(self):
        return f'sa-{self.self_attention}-ca-{self.cross_attention}'

    @property
    def units_per_step(self):
        return self.batch_size * self.grad_accum_steps

DETR_R50 = dict(data='coco', backbone='resnet50', hidden_dim=256, nheads=8, enc_layers=6,
                dec_layers=6, dim_feedforward=2048, dropout=0.1, num_queries=100,
                learning_rate=1e-4, lr_backbone=0.1, schedule='step', warmup_iters=0, threads=0)
# OA's problem (2) as it stands, for its tables and recipe; Config's defaults learn more
OA = dict(ridge=0.0, positive=False, centre=False, power=5, rho=0.1, iterations=15)
PRESETS = {
    'tiny': {},
    't4': dict(max_iters=6000, eval_interval=500, threads=0),
    'finetune': dict(DETR_R50, init='data/weights/detr-r50.pth', image_size=480, batch_size=2,
                     grad_accum_steps=8, max_iters=600, warmdown_iters=150, eval_interval=200),
    # OA: 4 GPUs with 8 images each and "original" rates; since it states no epochs, DETR's own
    # 300, of 3696 steps, the last 100 epochs at a tenth of the rate
    'paper': dict(DETR_R50, **OA, init='data/weights/resnet50.pth', image_size=800, batch_size=8,
                  grad_accum_steps=4, max_iters=1108800, warmdown_iters=369600,
                  eval_interval=3696, dtype='float32'),
}
TABLES = {  # `compare --table NAME`: the paper's experiments
    # OA Table 1: AP 40.6 (300 epochs), 38.5, 36.0, 38.5, 37.7
    '1': {'DETR': dict(self_attention='softmax', cross_attention='softmax'),
          'no weights SA': dict(self_attention='no-weights', cross_attention='softmax'),
          'no weights CA': dict(self_attention='softmax', cross_attention='no-weights'),
          'ADMM SA': dict(OA, self_attention='admm', cross_attention='softmax'),
          'ADMM CA': dict(OA, self_attention='softmax', cross_attention='admm')},
    # OA Table 2: AP 28.0, 38.0, 38.5
    '2': {'l2 CA': dict(OA, self_attention='softmax', cross_attention='l2'),
          'vanilla ADMM SA': dict(OA, self_attention='admm-vanilla', cross_attention='softmax'),
          'efficient ADMM SA': dict(OA, self_attention='admm', cross_attention='softmax')},
}
CHOICES = {
    'self_attention': [name for name in ATTENTION if name != 'l2'],  # l2 would give back the query
    'cross_attention': ATTENTION, 'solve_over': ('key', 'value'),
    'power': (0, 1, 3, 5), 'backbone': ('small', 'resnet50'), 'stride': (4, 8, 16, 32),
    'schedule': ('cosine', 'trapezoid', 'step', 'constant'), 'table': ('', *TABLES),
    'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
class MultiheadAttention(nn.Module):
    """nn.MultiheadAttention's parameters for softmax; none, or out_proj alone, for the others."""
    def __init__(self, c, kind, own=False):
        super().__init__()
        C = c.hidden_dim
        self.config, self.kind, self.own = c, kind, own
        self.solves = kind not in ('softmax', 'no-weights')
        if kind == 'softmax':
            self.in_proj_weight = nn.Parameter(torch.empty(3 * C, C))  # W_q, W_k, W_v
            self.in_proj_bias = nn.Parameter(torch.empty(3 * C))
        self.out_proj = nn.Linear(C, C) if kind == 'softmax' or c.out_proj else nn.Identity()

    def heads(self, *qkv):
        """q (B, Q, C), k and v (B, N, C) -> (B, nh, Q, hs), (B, nh, N, hs) twice."""
        if self.kind == 'softmax':
            parts = zip(qkv, self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))
            qkv = [F.linear(x, weight, bias) for x, weight, bias in parts]
        return [x.unflatten(2, (self.config.nheads, -1)).transpose(1, 2) for x in qkv]

    def coefficients(self, q, k, v, padding=None):
        """Coefficients (B, nh, Q, N) of the tokens, and what they mix to, (B, nh, Q, hs)."""
        with torch.autocast(q.device.type, enabled=False):  # sums of squares need float32's range
            q, k, v = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
            over = v if self.solves and self.config.solve_over == 'value' else k
            x = ATTENTION[self.kind](q, over, padding, self.own, self.config)
            return x, x @ v

    def forward(self, q, k, v, padding=None):
        """q (B, Q, C), k and v (B, N, C), padding (B, N) True where no token is -> (B, Q, C)."""
        q, k, v = self.heads(q, k, v)
        if self.solves:
            _, y = self.coefficients(q, k, v, padding)
        else:  # the fused kernel makes the same sum
            mask = None if padding is None else ~padding[:, None, None]  # (B, 1, 1, N)
            dropout = self.config.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)
        return self.out_proj(y.to(q.dtype).transpose(1, 2).flatten(2))  # (B, Q, C)

class EncoderLayer(nn.Module):
    def __init__(self, c, attention='softmax'):
        super().__init__()
        self.self_attn = MultiheadAttention(c, attention, own=True)
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
        x = self.norm1(x + self.drop(self.self_attn(q, k, x, None)))
        y = self.multihead_attn(x + query_pos, memory + pos, memory, padding)
        x = self.norm2(x + self.drop(y))
        return self.norm3(x + self.feed_forward(x))

class SmallBackbone(nn.Sequential):
    """A few convolutions with group norm, which learn from scratch; `stride` pixels per token."""
    channels = 96

    def __init__(self, stride):
        super().__init__()
        inside, width = 3, 32
        while stride >= 1:  # for 8: 32, 64, 96, 96 channels with strides 2, 2, 2, 1
            self.append(nn.Conv2d(inside, width, 3, 2 if stride > 1 else 1, 1, bias=False))
            self.append(nn.GroupNorm(8, width))
            self.append(nn.ReLU())
            inside, width = width, min(96, width + 32)
            stride //= 2

def sine_positions(padding, channels):
    """padding (B, h, w), True outside the image -> (B, h w, channels), y's half first, then x's.

    Sines and cosines, interleaved, of the position, 0 to 2 pi, times rates of 1 to 1/10000.
    """
    rate = 10000 ** -(torch.arange(channels // 4, device=padding.device) * 4 / channels)
    parts = []
    for axis in (1, 2):
        place = (~padding).cumsum(axis, dtype=torch.float32)  # (B, h, w)
        place = 2 * math.pi * place / (place.amax(axis, keepdim=True) + 1e-6)
        angle = place[..., None] * rate  # (B, h, w, C / 4)
        parts.append(torch.stack([angle.sin(), angle.cos()], -1).flatten(3))
    return torch.cat(parts, -1).flatten(1, 2)

class MLP(nn.Module):
    def __init__(self, C, out):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, out)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

class DETR(nn.Module):
    """facebookresearch/detr, with its state-dict keys; config.num_classes without no-object."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        C = c.hidden_dim
        body = ResNet50() if c.backbone == 'resnet50' else SmallBackbone(c.stride)
        encoder = nn.ModuleDict()
        encoder['layers'] = nn.ModuleList(EncoderLayer(c) for _ in range(c.enc_layers))
        decoder = nn.ModuleDict()
        decoder['layers'] = nn.ModuleList(DecoderLayer(c) for _ in range(c.dec_layers))
        decoder['norm'] = nn.LayerNorm(C)
        self.transformer = nn.ModuleDict(dict(encoder=encoder, decoder=decoder))
        self.class_embed = nn.Linear(C, c.num_classes + 1)
        self.bbox_embed = MLP(C, 4)
        self.query_embed = nn.Embedding(c.num_queries, C)
        self.input_proj = nn.Conv2d(body.channels, C, 1)
        self.backbone = nn.ModuleList([nn.ModuleDict(dict(body=body))])
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p from its own generator: what two variants share starts out equal."""
        generator = torch.Generator().manual_seed(zlib.crc32(f'{self.config.seed} {name}'.encode()))
        layer, _, kind = name.rpartition('.')
        if kind not in ('weight', 'bias', 'in_proj_weight', 'in_proj_bias'):
            return  # what you may add keeps the values it was made with
        matrix = p if kind.startswith('in_proj') else self.get_parameter(layer + '.weight')
        if matrix.dim() == 1 or name.endswith('out_proj.bias'):
            if kind.endswith('bias'):
                p.zero_()  # of norms, in_proj, out_proj; the weights of norms stay 1
        elif layer == 'query_embed':
            p.normal_(generator=generator)
        else:
            fan_in = matrix[0].numel()
            xavier = layer.startswith('transformer') and p.dim() == 2
            bound = math.sqrt(6 / (fan_in + len(p))) if xavier else fan_in ** -0.5
            p.uniform_(-bound, bound, generator=generator)

    def encode(self, images, mask=None):
        """-> memory and positions (B, N, C), padding (B, N) or None, grid (h, w)."""
        x = self.input_proj(self.backbone[0]['body'](images))  # (B, C, h, w)
        grid = x.shape[2:]
        padding = torch.zeros(len(x), *grid, dtype=torch.bool, device=x.device)
        if mask is not None:
            padding = F.interpolate(mask[None].float(), grid)[0].bool()  # (B, h, w)
        pos = sine_positions(padding, x.size(1)).to(x.dtype)
        padding = None if mask is None else padding.flatten(1)
        x = x.flatten(2).transpose(1, 2)  # (B, h w, C)
        for layer in self.transformer.encoder['layers']:
            x = layer(x, pos, padding)
        return x, pos, padding, grid

    def forward(self, images, mask=None):
        """Normalised images (B, 3, H, W), mask (B, H, W) True on padding -> pred_logits (B, Q,
        classes + 1), the last for no-object; pred_boxes (B, Q, 4), centre and size as fractions
        of the image; aux_outputs, the same from every earlier decoder layer."""
        memory, pos, padding, _ = self.encode(images, mask)
        decoder = self.transformer.decoder
        query_pos = self.query_embed.weight
        x = torch.zeros_like(query_pos).expand(len(images), -1, -1)  # (B, Q, C)
        outs = []
        for layer in decoder['layers']:
            x = layer(x, query_pos, memory, pos, padding)
            outs.append(decoder.norm(x))
        x = torch.stack(outs).to(query_pos.dtype)  # (L, B, Q, C)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16's boxes are off by pixels
            logits = self.class_embed(x)
            boxes = self.bbox_embed(x).sigmoid()
        *aux, last = [dict(pred_logits=a, pred_boxes=b) for a, b in zip(logits, boxes)]
        return dict(last, aux_outputs=aux)

# ------------------------------------ matching and losses ------------------------------------
def corners(boxes):
    """Centre and size (..., 4) -> left, top, right, bottom."""
    centre, size = boxes.chunk(2, -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)

def generalised_iou(a, b):
    """IoU of boxes (..., 4), given as corners, minus the empty share of their hull; broadcasts."""
    area = lambda low, high: (high - low).clamp_min(0).prod(-1)
    a0, a1 = a.chunk(2, -1)
    b0, b1 = b.chunk(2, -1)
    both = area(torch.maximum(a0, b0), torch.minimum(a1, b1))
    union = area(a0, a1) + area(b0, b1) - both
    hull = area(torch.minimum(a0, b0), torch.maximum(a1, b1))
    return both / union.clamp_min(1e-30) - (hull - union) / hull.clamp_min(1e-30)

def divisors(counts, c):
    """What summed losses are divided by, given the number of objects in each image: the sum of
    class weights (object 1, no-object eos_coef), and the number of objects, at least 1."""
    matched = sum(min(n, c.num_queries) for n in counts)
    others = len(counts) * c.num_queries - matched
    return matched + c.eos_coef * others, max(1, sum(counts))

@torch.no_grad()
def pair_up(logits, boxes, targets, c):
    """The cheapest pairing of queries with objects, for each layer and image separately.

    logits (L, B, Q, K + 1), boxes (L, B, Q, 4) and targets, (labels, boxes) of each image ->
    indices of layer, image, query and object; objects are numbered across the batch.
    """
    labels, truth = (torch.cat(parts) for parts in zip(*targets))  # (T,), (T, 4)
    boxes = boxes.unsqueeze(-2)  # (L, B, Q, 1, 4)
    distance = (boxes - truth).abs().sum(-1)  # (L, B, Q, T)
    giou = generalised_iou(corners(boxes), corners(truth))
    cost = c.bbox_loss_coef * distance - c.giou_loss_coef * giou - logits.softmax(-1)[..., labels]
    cost = np.nan_to_num(cost.cpu().numpy())  # what is not finite shows in the loss
    pairs = []
    first = 0
    for image, (here, _) in enumerate(targets):
        for layer, table in enumerate(cost[:, image, :, first:first + len(here)]):
            for query, thing in zip(*match(table)):
                pairs.append((layer, image, query, first + thing))
        first += len(here)
    return torch.tensor(pairs, dtype=torch.long, device=logits.device).view(-1, 4).T

def set_loss(outputs, targets, c, weights, count):
    """DETR's loss, a number: cross-entropy, L1 distance and GIoU, summed over the decoder layers.

    `weights` and `count` (see divisors) are those of the whole step or, for one of its n parts,
    an nth of them: so parts average to the whole.
    """
    layers = [outputs, *outputs['aux_outputs']]
    logits = torch.stack([layer['pred_logits'] for layer in layers])  # (L, B, Q, K + 1)
    boxes = torch.stack([layer['pred_boxes'] for layer in layers])  # (L, B, Q, 4)
    labels, truth = (torch.cat(parts) for parts in zip(*targets))  # (T,), (T, 4)
    layer, image, query, thing = pair_up(logits, boxes, targets, c)
    nothing = logits.size(-1) - 1
    wanted = torch.full(logits.shape[:3], nothing, device=logits.device)  # (L, B, Q)
    wanted[layer, image, query] = labels[thing]
    weight = torch.where(wanted == nothing, c.eos_coef, 1.0)
    entropy = F.cross_entropy(logits.movedim(-1, 1), wanted, reduction='none')
    mine, truth = boxes[layer, image, query], truth[thing]  # (pairs, 4)
    loss_ce = (weight * entropy).sum() / weights
    loss_bbox = (mine - truth).abs().sum() / count
    loss_giou = (1 - generalised_iou(corners(mine), corners(truth))).sum() / count
    return loss_ce + c.bbox_loss_coef * loss_bbox + c.giou_loss_coef * loss_giou

@torch.no_grad()
def post_process(outputs, sizes):
    """Outputs and the (height, width) of each image -> for each image a list of (score, label,
    [left, top, right, bottom] in pixels), one from every query, as the class it finds likeliest."""
    scores, labels = outputs['pred_logits'].softmax(-1)[..., :-1].max(-1)
    boxes = corners(outputs['pred_boxes'])  # (B, Q, 4)
    results = []
    for i, (h, w) in enumerate(sizes):
        pixels = boxes[i] * boxes.new_tensor([w, h, w, h])
        results.append(list(zip(scores[i].tolist(), labels[i].tolist(), pixels.tolist())))
    return results

# ------------------------------------ data ------------------------------------
def stream(name, *numbers):
    """A generator of its own: NumPy pads seeds with zeros, so [1, 7] would equal [1, 7, 0]."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]  # of ImageNet's colours, 0 to 1
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]

def load_data(c):
    """train and val, Shapes or CocoFolder, and the plans of the images to evaluate on.

    A plan says what an image shows, so that every process can count the objects of a whole step:
    labels (n,); boxes (n, 4), centre and size as fractions of the image; notes, the same in
    COCO's json form; original, (height, width). render(plan) draws or reads its pixels.
    """
    if c.data == 'builtin':
        train, val = Shapes(10 ** 6, c.image_size), Shapes(200, c.image_size)
        each = map  # threads would only wait for each other
        about = 'drawn shapes, always new; expect AP near 0 for the first 500 steps or more'
    else:
        folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
        train, val = load_coco(folder, c.image_size)
        each = concurrent.futures.ThreadPoolExecutor().map
        kinds = len(train.classes) - train.classes.count('')
        about = f'{folder}, {len(train):,} images of {kinds} classes'
    plans = [val.plan(row) for row in range(len(val))[:c.eval_rows or None]]
    return SimpleNamespace(train=train, val=val, plans=plans, about=about, coco={}, map=each)

# ------------------------------------ training ------------------------------------
# What the loop below knows of boxes: these names and functions.
METRIC = 'AP'         # best.pt and `compare --best` go by this validation figure:
BETTER = max          # higher is better
RESULTS = ['AP', 'AP50', 'AP75', 'APs', 'APm', 'APl']  # what `compare` tabulates at the end
UNIT = 'images'       # what c.units_per_step counts

def make_model(c, data):
    """A model on the CPU. Its config is c plus what the data decide; without data, c has that."""
    if data:
        c = replace(c, num_classes=len(data.train.classes), classes=data.train.classes)
    model = DETR(c)
    if c.init and data:
        load_weights(model, c.init)
    return model

def make_optimizer(model, c):
    """AdamW on everything, as DETR has it; the backbone has a rate of its own."""
    rest = [p for name, p in model.named_parameters() if not name.startswith('backbone')]
    groups = [dict(params=rest, lr=c.learning_rate),
              dict(params=model.backbone.parameters(), lr=c.learning_rate * c.lr_backbone)]
    return torch.optim.AdamW(groups, weight_decay=c.weight_decay)

def collate(plans, images, device):
    """Images (B, 3, H, W), zeros at right and bottom, mask (B, H, W) True there, or None where
    nothing is padded, and targets, (labels, boxes) of each image."""
    images = list(images)
    _, H, W = np.max([x.shape for x in images], axis=0)
    batch = torch.zeros(len(images), 3, H, W)
    mask = torch.ones(len(images), H, W, dtype=torch.bool)
    for i, x in enumerate(images):
        _, h, w = x.shape
        batch[i, :, :h, :w] = x
        mask[i, :h, :w] = False
    targets = [(plan.labels.to(device), plan.boxes.to(device)) for plan in plans]
    return batch.to(device), mask.to(device) if mask.any() else None, targets

@functools.lru_cache(2)
def shuffled(seed, epoch, n):
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro, device):
    """This process's share of a micro-batch, a function of seed and step: what collate makes of
    it, and an even share of the whole step's divisors, which follow from plans alone."""
    n = c.units_per_step
    plans = []
    for i in range(n):
        epoch, place = divmod(step * n + i, len(data.train))
        row = int(shuffled(c.seed, epoch, len(data.train))[place])
        plans.append(data.train.plan(row, stream('train', c.seed, step, i)))
    weights, count = divisors([len(plan.labels) for plan in plans], c)
    first = micro * c.batch_size
    plans = plans[first + RANK:first + c.batch_size:WORLD]
    images, mask, targets = collate(plans, data.map(data.train.render, plans), device)
    parts = c.grad_accum_steps * WORLD
    return images, mask, targets, weights / parts, count / parts

def loss_of(model, batch, c):
    images, mask, targets, weights, count = batch
    return set_loss(model(images, mask), targets, c, weights, count)

@torch.no_grad()
def evaluate(model, data, c, device):
    """On validation images: loss, AP and AP50."""
    weights, count = divisors([len(plan.labels) for plan in data.plans], c)
    loss, found = 0.0, []
    for i in range(0, len(data.plans), c.batch_size):
        plans = data.plans[i:i + c.batch_size]
        images, mask, targets = collate(plans, data.map(data.val.render, plans), device)
        outputs = model(images, mask)
        loss += set_loss(outputs, targets, c, weights, count).item()
        for plan, boxes in zip(plans, post_process(outputs, [plan.original for plan in plans])):
            for score, label, (x0, y0, x1, y1) in boxes:
                found.append(dict(image_id=plan.image_id, category_id=label, score=score,
                                  bbox=[x0, y0, x1 - x0, y1 - y0]))
    truth = [note for plan in data.plans for note in plan.notes]
    data.coco = coco_ap(dict(annotations=truth), found)
    return dict(val_loss=loss, AP=data.coco['AP'], AP50=data.coco['AP50'])

def finish(model, data, c, device, folder):
    """COCO's twelve numbers, of the evaluation just made."""
    return data.coco

# --- training loop (identical in all four scripts; test_all.py checks)
def schedule(step, c):
    """Factor on the learning rate in a step, counted from 0."""
    if step < c.warmup_iters:
        return (step + 1) / (c.warmup_iters + 1)
    left = c.max_iters - step
    if c.schedule == 'cosine':
        done = 1 - left / (c.max_iters - c.warmup_iters)
        return c.min_lr + (1 - c.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if c.schedule == 'trapezoid':
        return min(1.0, left / max(1, c.warmdown_iters))
    return 0.1 if c.schedule == 'step' and left <= c.warmdown_iters else 1.0

def train(c, folder=None):
    """Train a model as c says: `for step, model, log in train(c, folder): look at what you like`.

    It yields before the first step and after each; log is a list of dicts of figures. A step
    depends on weights, optimizer, seed and step number alone: folder keeps what it needs to go on.
    """
    device, dtype = pick_device(c)
    data = load_data(c)
    torch.manual_seed(c.seed)
    model = make_model(c, data).to(device)
    optimizer = make_optimizer(model, c)
    rates = [group['lr'] for group in optimizer.param_groups]
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    print(f'model   {c.variant}, {count(model):,} parameters, on {device} in {str(dtype)[6:]}\n'
          f'data    {data.about}\nfolder  {folder or "none: nothing is kept"}')
    if c.warmup_iters >= c.max_iters > 0:
        print(f'note    all {c.max_iters} steps are warmup, of --warmup-iters {c.warmup_iters}')
    step, seconds, losses, log = 0, 0.0, [], []  # losses: those since the last row of the log
    if folder and (folder / 'ckpt.pt').exists() and not c.fresh:
        saved = load_checkpoint(folder / 'ckpt.pt')
        model.load_state_dict(saved['model'])
        optimizer.load_state_dict(saved['optimizer'])
        if saved['scaler']:  # float16's
            scaler.load_state_dict(saved['scaler'])
        step, seconds, losses, log = saved['progress']
        state = 'is finished' if step >= c.max_iters else f'goes on from step {step}'
        print(f'note    this run {state} ({show(log[-1])}); --fresh trains it anew')
    net = torch.compile(model) if c.compile else model
    began = kept = time.time()
    halt = False

    def keep(name):
        if folder and RANK == 0:
            save_checkpoint(folder / name, dict(
                model=model.state_dict(), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), config=asdict(model.config),
                progress=(step, seconds, losses, log)))
            write_csv(folder / 'log.csv', log)

    while True:
        # log and evaluate before a step, and once more after the last one
        done = step >= c.max_iters
        due = done or step % c.eval_interval == 0
        new = not log or log[-1]['step'] < step
        if new and (due or step % c.log_interval == 0):
            row, line = dict(step=step, seconds=seconds), f'step {step}/{c.max_iters}'
            if losses:
                pace = (seconds - log[-1]['seconds']) / len(losses)
                row['loss'] = sum(losses) / len(losses)
                line += (f', {c.units_per_step / pace:,.0f} {UNIT}/s'
                         f', {(c.max_iters - step) * pace / 60:.1f} min left')
            if due:
                with autocast:
                    row.update(evaluate(model.eval(), data, c, device))
            log.append(row)
            losses = []
            if due and row[METRIC] == BETTER(r[METRIC] for r in log if METRIC in r):
                keep('best.pt')
            if done:  # outside autocast, whose cached casts would miss a change of weights
                row.update(finish(model, data, c, device, folder))
            print(f'{line}: {show(row)}', flush=True)
        if (new and due) or halt or time.time() - kept > 300:
            keep('ckpt.pt')
            kept = time.time()
        yield step, model, log
        if done or halt:
            return

        # one optimiser step
        clock = time.time()
        model.train()
        torch.manual_seed(((c.seed << 24) + step) * WORLD + RANK)  # for dropout
        for group, rate in zip(optimizer.param_groups, rates):
            group['lr'] = rate * schedule(step, c)
        total = 0.0
        for micro in range(c.grad_accum_steps):
            batch = get_batch(data, c, step, micro, device)
            with autocast:
                loss = loss_of(net, batch, c) / (c.grad_accum_steps * WORLD)
            scaler.scale(loss).backward()
            total += loss.detach()
        if WORLD > 1:  # the sum of the processes' gradients
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip or math.inf)

        # all processes stop together: on a signal, out of time, or when something is not finite
        late = 0 < c.max_minutes < (time.time() - began) / 60
        figures = torch.tensor([total.item(), bool(STOP) or late], device=device)
        if WORLD > 1:
            dist.all_reduce(figures)
        loss, halt = figures.tolist()
        may_skip = scaler.get_scale() > 1  # float16: a step whose gradients overflow is skipped
        if not math.isfinite(loss) or not (math.isfinite(norm) or may_skip):
            raise FloatingPointError(f'loss {loss:g}, gradient norm {norm:g} in step {step}: '
                                     'try a lower --learning-rate')
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        seconds += time.time() - clock
        step += 1
# --- end of training loop

# ------------------------------------ tools ------------------------------------
# --- tools (identical in all four scripts; test_all.py checks)
SOURCE = ''.join(linecache.getlines(fail.__code__.co_filename))  # this file, or a notebook's cell

def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

def show(row):
    """The figures of a row of a log, as text."""
    hidden = ('step', 'seconds', 'layer')
    return '  '.join(f'{name} {x:#.4g}' for name, x in row.items()
                     if name not in hidden and not math.isnan(x))

def pick_device(c):
    """Device and dtype of matmuls. CUDA before compute capability 8 only emulates bfloat16."""
    name, dtype, cuda = c.device, c.dtype, torch.cuda.is_available()
    if name == 'auto':  # mps is untested: check against --device cpu
        name = 'cuda' if cuda else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if name.startswith('cuda'):
        if not cuda:
            fail(f'--device {name}: PyTorch finds no CUDA GPU here')
        if name == 'cuda':
            name = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
        torch.cuda.set_device(name)
        if dtype == 'auto':
            dtype = 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
    torch.set_num_threads(c.threads or torch.get_num_threads())
    return torch.device(name), getattr(torch, dtype.replace('auto', 'float32'))

def save_checkpoint(path, state):
    """Write a .part file, then rename it: a kill midway leaves the old file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()  # on a full disk, torch.save's own error is no OSError
    torch.save(dict(state, script=SCRIPT), buffer)
    part = path.with_suffix('.part')
    part.write_bytes(buffer.getvalue())
    os.replace(part, path)

def load_checkpoint(path, own=True):
    """A checkpoint, of this script unless own is False. Nothing in the file is run."""
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True)
        if own and saved['script'] != SCRIPT:
            raise ValueError(f'{saved["script"]}.py wrote it')
        return saved
    except Exception as error:  # PyTorch raises half a dozen kinds
        fail(f'{path} is not a usable checkpoint: {" ".join(str(error).split())[:150]}')

def write_csv(path, rows):
    if RANK == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, 'w', newline='') as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
            writer.writeheader()
            writer.writerows(rows)

def draw(path, logs, panels):
    """A panel for each (x, y) of panels, with a line per log; logs is {label: [log, ...]}."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print(f'no {path.name}: pictures need `pip install matplotlib`')
    across, down = min(4, len(panels)), math.ceil(len(panels) / 4)
    picture = Figure(figsize=(5 * across, 4 * down), layout='tight')
    for i, (x, y) in enumerate(panels):
        scale = 'log' if x == 'learning_rate' else 'linear'
        axis = picture.add_subplot(down, across, i + 1, title=y, xlabel=x, xscale=scale)
        for j, (label, lines) in enumerate(logs.items()):
            for log in lines:  # step 0 would flatten the rest
                rows = [row for row in log if y in row and row.get('step') != 0]
                axis.plot([row[x] for row in rows], [row[y] for row in rows], f'C{j}.-',
                          label=label if log is lines[0] else None)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    if RANK == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path)
        print(f'picture {path}')

def settings(c):
    """The fields above `device`: what tells one run from another."""
    names = [f.name for f in fields(c)]
    return {name: getattr(c, name) for name in names[:names.index('device')]}

def code(c):
    """The script above `tools`, parsed, without docstrings, and with only the table rows c names:
    a changed comment or docstring, or a new variant, retrains nothing."""
    tree = ast.parse(SOURCE.split('- tools -')[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ''  # a docstring
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ''
        if name in ('ATTENTION', 'READINGS', 'CHOICES', 'PRESETS', 'TABLES'):
            rows = zip(node.value.keys, node.value.values)
            node.value = [row for key, row in rows if key.value in settings(c).values()]
    return ast.dump(tree)

def run_folder(c, kind=''):
    """out/SCRIPT/VARIANT-sSEED-HASH, of the settings, the sizes of files they name, and code."""
    facts = settings(c)
    sizes = [os.path.getsize(x) for x in facts.values() if type(x) is str and os.path.isfile(x)]
    mark = zlib.crc32(repr([facts, sizes, code(c)]).encode())
    return Path(c.out_dir, SCRIPT, f'{kind}{c.variant}-s{c.seed}-{mark:08x}')

def load_run(c):
    """The best weights of --run, or of train's last run -> c with its settings, and its model."""
    last = Path(c.out_dir, SCRIPT, 'last')
    if not c.run and not last.exists():
        fail(f'no run in {last.parent}: train first, or name a folder with --run')
    path = Path(c.run or last.read_text(), 'best.pt')
    saved = load_checkpoint(path)
    c = replace(c, **dict(settings(Config(**saved['config'])), seed=c.seed))
    model = make_model(c, None).to(pick_device(c)[0])
    print(f'{path}, step {saved["progress"][0]}')
    model.load_state_dict(saved['model'])
    return c, model.eval()

def train_and_report(c):
    folder = run_folder(c)
    for step, model, log in train(c, folder):
        pass
    if RANK == 0:
        (folder.parent / 'last').write_text(str(folder))  # for load_run
    if step < c.max_iters:
        print(f'stopped after step {step}; the same command goes on')
    elif RANK == 0:
        draw(folder / 'curves.png', {c.variant: [log]}, [('step', 'loss'), ('step', METRIC)])
        report(c, model, log)
    return dict(log[-1], log=log, folder=folder)

def cases_of(c):
    """{name: Config}: rows of --table, every combination of --over FIELD=A,B, or both crossed."""
    types = {f.name: f.type for f in fields(c)}
    cases = {'': {}} if c.over and not c.table else TABLES[c.table or next(iter(TABLES))]
    for spec in sorted(c.over, key=lambda spec: spec.startswith(c.best + '=')):  # --best's last
        field, _, values = spec.partition('=')
        new = {}
        for name, case in cases.items():
            for text in values.split(','):
                try:
                    value = text.lower() == 'true' if types[field] is bool else types[field](text)
                except (KeyError, ValueError):
                    fail(f'--over {spec}: needs FIELD=A,B, a field of --help and its values')
                new[f'{name} {text}'.strip()] = {**case, field: value}
        cases = new
    return {name: replace(c, **case) for name, case in cases.items()}

def train_all(cases, seeds):
    """-> {name: [settings, figures, log and size of each seed's run]}"""
    runs = {name: [] for name in cases}
    for seed in seeds:
        for name, case in cases.items():
            print(f'\n{name}, seed {seed}')
            c = replace(case, seed=seed)
            try:
                for step, model, log in train(c, run_folder(c)):
                    pass
                if step < c.max_iters:
                    print('stopped; the same command goes on')
                    raise SystemExit(128 + STOP[0] if STOP else 0)
                figures = log[-1]
            except FloatingPointError as error:
                print(f'{name}, seed {seed} counts as worst: {error}')
                worst = math.inf if BETTER is min else -math.inf
                figures = dict(dict.fromkeys([METRIC, *RESULTS], worst), seconds=math.nan)
            runs[name].append(dict(asdict(c), **figures, log=log, size=count(model)))
    return runs

@np.errstate(all='ignore')  # a diverged run's figures are infinite
def compare(c):
    """Train every case with every seed on the same batches; differences are paired by seed."""
    cases = cases_of(c)
    seeds = [int(seed) for seed in c.seeds.split(',')]
    final = [int(seed) for seed in c.final_seeds.split(',') if seed]
    if set(seeds) & set(final):
        fail('--final-seeds judge what --seeds chose, so the two must not overlap')
    if c.best and not any(spec.startswith(c.best + '=') for spec in c.over):
        fail(f'--best {c.best}: needs --over {c.best}=A,B, the values to choose from')
    folder = Path(c.out_dir, SCRIPT, f'compare-{zlib.crc32(repr(c).encode()):08x}')
    runs = train_all(cases, seeds)
    if c.best:
        seeds = final or seeds
        runs = train_all(choose(c.best, cases, runs, folder), seeds)
    rows = tabulate(runs, seeds)
    write_csv(folder / 'compare.csv', rows)
    logs = {name: [run['log'] for run in own] for name, own in runs.items()}
    draw(folder / 'compare.png', logs, [('step', METRIC), ('step', 'loss'), ('seconds', METRIC)])
    return rows

def choose(field, cases, runs, folder):
    """Among cases that differ only in `field`, the one with the best mean -> {name: Config}."""
    groups, chosen, logs = {}, {}, {}
    for name in sorted(cases, key=lambda name: getattr(cases[name], field)):
        groups.setdefault(name.rpartition(' ')[0], []).append(name)
    print(f'\n{METRIC}, mean and sd over the seeds that choose {field}')
    for names in groups.values():
        figures = {name: spread([run[METRIC] for run in runs[name]]) for name in names}
        best = BETTER(names, key=lambda name: figures[name][0])
        chosen[best] = cases[best]
        for name, (mean, sd) in figures.items():
            print(f'{name:28}{mean:9.4f}{sd:9.4f}', '*' if name == best else '')
        if best in (names[0], names[-1]):
            print(f'* is at the end of the range: a better {field} may lie beyond it')
        logs[f'{best} is best'] = list(zip(*(runs[name] for name in names)))  # a line per seed
    draw(folder / 'choice.png', logs, [(field, METRIC)])
    return chosen

def spread(values):
    """Mean and standard deviation."""
    return np.mean(values), np.std(values, ddof=1) if len(values) > 1 else math.nan

def student(gaps):
    """t and two-sided p of paired differences: with t = sqrt(n - 1) tan(a), the angle a has
    a density proportional to cos(a)^(n - 2)."""
    n = len(gaps)
    mean, sd = spread(gaps)
    if not sd > 1e-9 * abs(mean):  # one run, or always the same
        return math.nan, math.nan
    t = mean / sd * n ** 0.5
    angle = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (n - 2)
    return t, density[angle > math.atan(abs(t) / (n - 1) ** 0.5)].sum() / density.sum()

def tabulate(runs, seeds):
    """Print {name: [a run's figures for each seed]} -> rows, with differences to the first case."""
    figure, *others = RESULTS
    table = np.array([[run[figure] for run in own] for own in runs.values()])  # (cases, seeds)
    rows = []
    for (name, own), values, gaps in zip(runs.items(), table, table - table[0]):
        row = dict(case=name, size=own[0]['size'] / 1e6, holm=math.nan)
        row['mean'], row['sd'] = spread(values)
        row['diff'], row['diff_sd'] = spread(gaps)
        row['t'], row['p'] = student(gaps)
        for other in [*others, 'seconds']:
            row[other] = np.mean([run[other] for run in own])
        rows.append(row)
    least = 0.0
    tested = sorted((row for row in rows if row['p'] >= 0), key=lambda row: row['p'])
    for i, row in enumerate(tested):  # Holm: multiply the smallest of n by n, the next by n - 1
        row['holm'] = least = max(least, min(1.0, row['p'] * (len(tested) - i)))
    print(f'\n{figure}, seeds {",".join(map(str, seeds))}. Differences from row 1 are paired '
          f'by seed;\np is corrected for {len(tested)} tests (Holm), sec: training steps only.\n'
          f'{"":19}{"size":>7}{"mean":>9}{"sd":>8}{"diff":>9}{"sd":>8}{"t":>7}{"p":>7}{"sec":>6}')
    for row in rows:
        print('{case:19}{size:6.2f}M{mean:9.4f}{sd:8.4f}{diff:+9.4f}{diff_sd:8.4f}{t:7.1f}'
              '{holm:7.3f}{seconds:6.0f}'.format(**row).replace('nan', '  -'))
    for row in rows if others else []:
        print(f'{row["case"]:19}' + show({other: row[other] for other in others}))
    return rows

def bench(c):
    """Time training steps of all cases in turn, so that noise hits all alike."""
    loops, times = {}, {}
    for name, case in cases_of(c).items():  # settings that leave only the steps themselves
        loops[name] = train(replace(case, max_iters=c.rounds + 3, eval_rows=case.batch_size,
                                    eval_interval=10**9, log_interval=10**9, warmup_iters=0))
        next(loops[name])
        times[name] = []
    for _ in range(c.rounds + 2):  # two to warm up
        for name, loop in loops.items():
            begin = time.perf_counter()
            next(loop)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
        if STOP:
            return print('stopped')
    print('\nmedian training step, and its ratio to the first case: median (quartiles)')
    first = np.array(next(iter(times.values())))
    for name, own in times.items():
        low, ratio, high = np.percentile((own / first)[2:], [25, 50, 75])
        print(f'{name:24}{1000 * np.median(own[2:]):9.1f} ms{ratio:8.3f} ({low:.3f}-{high:.3f})')
    return times

def parse(argv):
    """argv -> action, Config."""
    p = argparse.ArgumentParser(
        usage=f'{SCRIPT}.py [{" | ".join(ACTIONS)}] [--flag value ...]',
        description=SOURCE.partition('class Config:\n')[2].partition('    def ')[0],
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
        allow_abbrev=False)
    p.error = lambda message: fail(f'{message} (see --help)')
    p.add_argument('action', nargs='?', choices=ACTIONS, default='train', help=argparse.SUPPRESS)
    p.add_argument('--preset', choices=PRESETS, help='named settings; flags override them',
                   default='t4' if torch.cuda.is_available() else 'tiny')
    kinds = {bool: dict(action=argparse.BooleanOptionalAction), list: dict(action='append')}
    for f in fields(Config):
        p.add_argument('--' + f.name.replace('_', '-'), '--' + f.name, help=argparse.SUPPRESS,
                       **kinds.get(f.type, dict(type=f.type)))
    given = vars(p.parse_args(argv))
    action, preset = given.pop('action'), given.pop('preset')
    print(f'preset  {preset}; by default t4 on a CUDA GPU, else tiny, as in README.md')
    c = Config(**{**PRESETS[preset], **given})
    if 'data' not in given and c.data != 'builtin' and not Path('data', c.data).exists():
        print(f'note    no data/{c.data}, so built-in data; python prepare_data.py has a list')
        c = replace(c, data='builtin')
    return action, c

def catch(number, frame):
    """The first Ctrl-C or SIGTERM stops after the current step; the second kills."""
    STOP.append(number)
    signal.signal(number, signal.SIG_DFL)

def main(argv=None):
    """Do what the command line says -> the figures that came out."""
    if RANK:
        sys.stdout = open(os.devnull, 'w')
    action, c = parse(argv)
    device, _ = pick_device(c)
    if WORLD > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    STOP.clear()
    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = ACTIONS[action](c)
    except (ImportError, OSError, FloatingPointError) as error:  # no package, disk full, loss nan
        fail(error)
    except RuntimeError as error:
        if 'state_dict' in str(error):
            fail(f'weights do not fit the model: {" ".join(str(error).split())[:200]}')
        if 'memory' not in str(error):
            raise
        fail('out of memory: a smaller --batch-size with more --grad-accum-steps needs less')
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if WORLD > 1:
            dist.destroy_process_group()
    if STOP:
        raise SystemExit(128 + STOP[0])
    return result
# --- end of tools

# --- tools of this script alone
def overlap(a, b):
    """Whether two boxes share at least 15 % of the smaller one."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    width = max(0, (aw + bw) / 2 - abs(ax - bx))
    height = max(0, (ah + bh) / 2 - abs(ay - by))
    return width * height >= 0.15 * min(aw * ah, bw * bh)

@dataclass
class Shapes:
    """Drawings of one to four shapes, with boxes. They need no files and no network."""
    n: int     # drawings
    side: int  # pixels
    classes = ['rectangle', 'disc', 'triangle']

    def __len__(self):
        return self.n

    def plan(self, row, rng=None):
        """A fresh drawing or, without a generator, the validation drawing of that row."""
        rng = rng or stream('validation', row)
        boxes = []
        for size in rng.uniform(0.18, 0.5, (rng.integers(1, 5), 2)):
            for centre in rng.uniform(size / 2, 1 - size / 2, (10, 2)):
                box = [*centre.tolist(), *size.tolist()]
                if not any(overlap(box, other) for other in boxes):
                    boxes.append(box)
                    break
        labels = torch.from_numpy(rng.integers(3, size=len(boxes)))
        boxes = torch.tensor(boxes)
        notes = []
        for label, (cx, cy, w, h) in zip(labels.tolist(), boxes.tolist()):
            box = [self.side * v for v in (cx - w / 2, cy - h / 2, w, h)]
            notes.append(dict(image_id=row + 1, category_id=label, bbox=box))
        return SimpleNamespace(image_id=row + 1, original=(self.side, self.side), notes=notes,
                               labels=labels, boxes=boxes, noise=int(rng.integers(2 ** 32)))

    def render(self, plan):
        """-> (3, H, W) float32, normalised."""
        rng = stream('pixels', plan.noise)
        grid = (np.arange(self.side, dtype=np.float32) + 0.5) / self.side
        image = np.full((3, self.side, self.side), rng.uniform(0.2, 0.6), np.float32)  # grey
        for label, (cx, cy, w, h) in zip(plan.labels.tolist(), plan.boxes.tolist()):
            x = (grid - cx) / w + 0.5  # 0 to 1 in the box
            y = ((grid - cy) / h + 0.5)[:, None]
            ink = rng.permutation([0.1, rng.random(), 0.9])
            top = rng.uniform(0.2, 0.8)
            inside = (abs(x - 0.5) <= 0.5) & (abs(y - 0.5) <= 0.5)
            if label == 1:
                inside = (x - 0.5) ** 2 + (y - 0.5) ** 2 <= 0.25
            elif label == 2:
                inside &= (x >= top * (1 - y)) & (x <= 1 - (1 - top) * (1 - y))
            image[:, inside] = ink[:, None]
        image += 0.04 * rng.standard_normal(image.shape, np.float32)
        return torch.from_numpy((image.clip(0, 1) - MEAN) / STD)

def assign(cost):
    """cost (n, m) -> rows, columns of the cheapest assignment. Rows are added one by one, each by
    the cheapest chain of changes that ends in a free column (Bellman-Ford)."""
    n, m = cost.shape
    if n > m:
        columns, rows = assign(cost.T)
        return np.sort(rows), columns[rows.argsort()]  # row by row, as scipy has them
    tiny = 1e-13 * np.abs(cost).max(initial=0)
    owner = np.full(m, -1)
    for row in range(n):
        length = cost[row].astype(float)  # of chains that end in each column
        before = np.full(m, -1)
        changed = True
        while changed:
            changed = False
            for j in np.flatnonzero(owner >= 0):  # its owner may change to another column
                through = length[j] - cost[owner[j], j] + cost[owner[j]]
                closer = through < length - tiny
                length[closer] = through[closer]
                before[closer] = j
                changed = changed or closer.any()
        j = np.where(owner < 0, length, np.inf).argmin()
        while before[j] >= 0:
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

IOUS = np.linspace(0.5, 0.95, 10)
AREAS = [(0, 1e10), (0, 32 ** 2), (32 ** 2, 96 ** 2), (96 ** 2, 1e10)]

def coco_ap(ground_truth, detections):
    """COCO's twelve numbers, nan where nothing is to be found; both arguments in its json form.

    ground_truth: annotations (image_id, category_id, bbox, area, iscrowd); detections: (image_id,
    category_id, bbox, score). Boxes are x, y, width, height in pixels. Same as pycocotools, which
    however gives -1 for nan and never matches annotation id 0.
    """
    notes = ground_truth['annotations']
    classes = sorted({note['category_id'] for note in notes})
    truth, found, rank = defaultdict(list), defaultdict(list), defaultdict(int)
    for i, note in enumerate(notes):
        truth[note['category_id'], note['image_id']].append(i)
    for x in sorted(detections, key=lambda x: (-x['score'], x['image_id'])):
        place = x['category_id'], x['image_id']
        if rank[place] < 100:
            w, h = x['bbox'][2:]
            ious = [(iou(x, notes[i]), i) for i in truth[place]]
            found[x['category_id']].append((rank[place], w * h, ious))
        rank[place] += 1
    areas = [note.get('area', note['bbox'][2] * note['bbox'][3]) for note in notes]
    crowds = [note.get('iscrowd') for note in notes]
    precision = np.full((4, 10, len(classes), 101), -1.0)  # (areas, IoUs, K, R)
    recall = np.full((3, 4, 10, len(classes)), -1.0)  # (at most, ...)
    for a, (low, high) in enumerate(AREAS):
        counts = [low <= area <= high and not crowd for area, crowd in zip(areas, crowds)]
        for k, kind in enumerate(classes):
            wanted = sum(one for one, note in zip(counts, notes) if note['category_id'] == kind)
            for t, threshold in enumerate(IOUS if wanted else []):
                ranks, right = judge(found[kind], crowds, counts, threshold, low, high)
                for m, most in enumerate((1, 10, 100)):
                    recall[m, a, t, k] = right[ranks < most].sum() / wanted
                tp = right.cumsum()
                p = tp / (np.arange(1, len(tp) + 1) + np.spacing(1))
                p = np.maximum.accumulate(p[::-1])[::-1]  # never rises again
                reached = np.searchsorted(tp / wanted, np.linspace(0, 1, 101))
                precision[a, t, k] = np.append(p, 0)[reached]  # 0 for what is never reached
    figures = dict(AP=precision[0], AP50=precision[0, 0], AP75=precision[0, 5],
                   APs=precision[1], APm=precision[2], APl=precision[3],
                   AR1=recall[0, 0], AR10=recall[1, 0], AR100=recall[2, 0],
                   ARs=recall[2, 1], ARm=recall[2, 2], ARl=recall[2, 3])
    return {name: float(x[x > -1].mean()) if (x > -1).any() else math.nan
            for name, x in figures.items()}

def iou(found, true):
    """Of two boxes; where the second is a crowd, the share of the first that is in it."""
    x, y, w, h = found['bbox']
    X, Y, W, H = true['bbox']
    width = max(0, min(x + w, X + W) - max(x, X))
    height = max(0, min(y + h, Y + H) - max(y, Y))
    both = width * height
    union = w * h if true.get('iscrowd') else w * h + W * H - both
    return both / max(union, 1e-99)

def judge(found, crowds, counts, threshold, low, high):
    """Boxes of one class, the surest first -> of those that count: their ranks, and 1 where one is
    right, that is, has a true box for itself."""
    taken, verdicts = set(), []
    for rank, area, ious in found:
        fits = [(counts[i], iou, i) for iou, i in ious if iou >= threshold and i not in taken]
        if fits:
            counted, _, best = max(fits)  # true boxes that count come first
            if not crowds[best]:  # a crowd is there for many
                taken.add(best)
        else:
            counted = low <= area <= high
        if counted:
            verdicts.append((rank, bool(fits)))
    return np.array(verdicts, dtype=int).reshape(-1, 2).T

def resized(w, h, side, most=math.inf):
    """Width and height, the shorter `side`, or less if the longer would exceed `most`."""
    short, long = min(w, h), max(w, h)
    side = max(1, round(min(side, most * short / long)))
    long = int(side * long / short)
    return (side, long) if w < h else (long, side)

class CocoFolder:
    """Photos and their annotations; row i is the i-th image by id."""
    def __init__(self, folder, name, image_size):
        path = folder / 'annotations' / f'instances_{name}.json'
        self.photos = folder / name
        self.image_size = image_size
        self.annotations = defaultdict(list)
        try:
            data = json.loads(path.read_bytes())
            names = {x['id']: x['name'] for x in data['categories']}
            self.images = sorted(data['images'], key=lambda x: x['id'])
            for note in data['annotations']:
                self.annotations[note['image_id']].append(note)
        except (OSError, KeyError, TypeError, ValueError) as error:
            fail(f"{path} is no file of annotations in COCO's form: {error!r:.200}")
        # labels are category ids, as in DETR, so some labels belong to no class
        self.classes = [names.get(i, '') for i in range(max(names) + 1)]

    def __len__(self):
        return len(self.images)

    def plan(self, row, rng=None):
        """A row's plan; with a generator, after DETR's random flip and size. For render: size
        (width, height) and flip; labels and boxes without crowds and what has no area."""
        image = self.images[row]
        w, h = image['width'], image['height']
        side, flip = self.image_size, False
        if rng is not None:
            # [deviation] DETR first crops every other photo: left out, to stay short
            flip = rng.random() < 0.5
            side = round(self.image_size * rng.integers(15, 26) / 25)  # 480, 512, ..., 800
        notes = self.annotations[image['id']]
        things = [note for note in notes if not note.get('iscrowd')]
        labels = np.array([note['category_id'] for note in things], dtype=np.int64)
        boxes = np.array([note['bbox'] for note in things], dtype=float).reshape(-1, 2, 2)
        first, last = (np.stack([boxes[:, 0], boxes.sum(1)]) / (w, h)).clip(0, 1)  # (n, x y) each
        boxes = np.concatenate([(first + last) / 2, last - first], axis=1)
        if flip:
            boxes[:, 0] = 1 - boxes[:, 0]
        kept = (last > first).all(1)
        return SimpleNamespace(
            image_id=image['id'], original=(h, w), notes=notes, flip=flip,
            path=self.photos / image['file_name'],
            size=resized(w, h, side, 5 * self.image_size // 3),  # DETR's 1333 for 800
            labels=torch.from_numpy(labels[kept]), boxes=torch.from_numpy(boxes[kept]).float())

    def render(self, plan):
        """A plan's photo, normalised (3, H, W)."""
        x = to_tensor(read_photo(plan.path), plan.size)
        return x.flip(2) if plan.flip else x

def read_photo(path, upright=False):
    """Pillow's RGB image. COCO's boxes ignore EXIF rotation; `upright` applies it."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError('photos need `pip install pillow`')
    photo = Image.open(path)
    return (ImageOps.exif_transpose(photo) if upright else photo).convert('RGB')

def to_tensor(image, size):
    """Pillow's image, resized to (width, height) -> (3, H, W), normalised."""
    x = np.asarray(image.resize(size, 2), np.float32)  # 2: bilinear
    return torch.from_numpy((x.transpose(2, 0, 1) / 255 - MEAN) / STD)

def load_coco(folder, image_size):
    """Train and val of a folder like COCO's: train2017/, val2017/ with photos and annotations/
    instances_train2017.json, ...; of a single split every tenth photo is for evaluation."""
    names = [name for name in ('train2017', 'val2017') if (folder / name).is_dir()]
    if not names:
        fail(f'{folder} is not detection data; it needs train2017/, val2017/ and annotations/'
             'instances_train2017.json, ...; try python prepare_data.py coco, or --data builtin')
    train = CocoFolder(folder, names[0], image_size)
    val = CocoFolder(folder, names[-1], image_size)
    if len(names) == 1:
        val.images = train.images[::10]
        del train.images[::10]
    return train, val

def load_weights(model, path):
    """Fill `model` from a checkpoint of this script, of DETR or of torchvision's ResNet-50, as far
    as it fits, and say what does not: attention that is replaced, or classes of other data."""
    if not Path(path).exists():
        fail(f'--init {path}: no such file; python prepare_data.py lists what there is')
    state = load_checkpoint(path, own=False)
    state = state.get('model', state)
    if 'layer4.0.conv1.weight' in state:
        state = {'backbone.0.body.' + key: p for key, p in state.items()}
    own = model.state_dict()
    fits = {key: p for key, p in state.items() if key in own and own[key].shape == p.shape}
    if not fits:
        fail(f'--init {path}: not one tensor has the name and shape of one of the model')
    missing, _ = model.load_state_dict(fits, strict=False)
    fresh = sorted({key.split('.layers')[0] for key in missing})
    print(f'init    {path}: {len(fits)} tensors of {len(own)}; fresh: {", ".join(fresh) or "none"}')

class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose four vectors never change."""
    def __init__(self, channels):
        super().__init__()
        for name, value in dict(weight=1.0, bias=0.0, running_mean=0.0, running_var=1.0).items():
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)

class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = FrozenBatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = FrozenBatchNorm2d(outside)
        self.downsample = nn.Identity() if inside == outside else nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), FrozenBatchNorm2d(outside))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))

class ResNet50(nn.Sequential):
    """torchvision's keys. As in DETR, its first layers never learn."""
    channels = 2048

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inside = 64
        for i, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
            stage = nn.Sequential()
            for j in range(blocks):
                stage.append(Bottleneck(inside, width, stride=2 if i > 1 and j == 0 else 1))
                inside = 4 * width
            self.add_module(f'layer{i}', stage)
        self.conv1.requires_grad_(False)
        self.layer1.requires_grad_(False)

def draw_images(path, panels, c):
    """A picture of panels, four in a row: (pixels (H, W, 3), [(score, label, box) to draw])."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print(f'no {path.name}: pictures need `pip install matplotlib`')
    across, down = min(4, len(panels)), math.ceil(len(panels) / 4)
    picture = Figure(figsize=(4 * across, 4 * down), layout='tight')
    for i, (pixels, found) in enumerate(panels):
        axis = picture.add_subplot(down, across, i + 1)
        axis.imshow(pixels)
        axis.axis('off')
        for score, label, (x0, y0, x1, y1) in sorted(found):  # the surest on top
            colour = f'C{label % 10}'
            axis.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], colour)
            axis.text(x0, y0, f'{c.classes[label]} {score:.2f}', color='white', fontsize=8,
                      bbox=dict(color=colour, pad=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)
    print(f'picture {path}')

def pixels_of(image):
    """Normalised (3, H, W) -> (H, W, 3), 0 to 1."""
    return (image.cpu().numpy() * STD + MEAN).clip(0, 1).transpose(1, 2, 0)

@torch.no_grad()
def report(c, model, log):
    """What came out, and some detections."""
    print('result  AP {AP:.3f}, AP50 {AP50:.3f}'.format(**log[-1])
          + '; --cross-attention softmax is the baseline')
    images, batch, mask = some_images(c, 4)
    outputs = model.eval()(batch, mask)
    panels = []
    for image, found in zip(images, post_process(outputs, [image.shape[1:] for image in images])):
        panels.append((pixels_of(image), [one for one in found if one[0] >= c.threshold]))
    draw_images(run_folder(c) / 'detections.png', panels, model.config)

def some_images(c, n):
    """--images, or else n validation images -> a list of (3, H, W), and as a batch."""
    if c.images:
        images = [see(read_photo(path, upright=True), c) for path in c.images]
    else:
        data = load_data(c)
        images = [data.val.render(plan) for plan in data.plans[:n]]
    batch, mask, _ = collate([], images, pick_device(c)[0])
    return images, batch, mask

def see(photo, c):
    """Pillow's image -> what the model sees of it, (3, H, W)."""
    return to_tensor(photo, resized(*photo.size, c.image_size, 5 * c.image_size // 3))

@torch.no_grad()
def detect(c):
    """Boxes around what a run finds in photos."""
    if not c.images:
        fail('detect needs --images PHOTO')
    c, model = load_run(c)
    answers = {}
    for path in c.images:
        photo = read_photo(path, upright=True)
        outputs = model(see(photo, c)[None].to(pick_device(c)[0]))
        found = sorted(post_process(outputs, [photo.size[::-1]])[0], reverse=True)
        found = [one for one in found if one[0] >= c.threshold]
        answers[path] = [(c.classes[label], score, box) for score, label, box in found]
        print(f'{path}: {len(found)} found; score, class, left, top, right, bottom in pixels')
        for name, score, box in answers[path]:
            print(f'  {score:.2f}  {name:20}' + ''.join(f'{v:8.0f}' for v in box))
        picture = Path(c.out_dir, SCRIPT, f'{Path(path).stem}-found.png')
        draw_images(picture, [(np.asarray(photo), found)], c)
    return answers

@torch.no_grad()
def inspect_run(c):
    """Where the decoder of a run looks (OA's Fig. 1), and how sparsely: in --images, or else in
    validation images."""
    c, model = load_run(c)
    images, batch, mask = some_images(c, 8)
    calls = []  # of the decoder's attention: module and arguments
    for module in model.transformer.decoder.modules():
        if isinstance(module, MultiheadAttention):
            module.register_forward_pre_hook(lambda *call: calls.append(call))
    outputs = model(batch, mask)
    print('nonzero: tokens with a coefficient above 1e-3 of the largest\n'
          'top: the largest share of an eigenvalue of K^T K, 1 where all tokens are alike\n'
          f'{"layer":10}{"attention":22}{"nonzero":>10}{"top":>10}')
    rows = []
    for i, (module, (q, k, v, padding)) in enumerate(calls):
        q, k, v = module.heads(q, k, v)
        x, _ = module.coefficients(q, k, v, padding)  # (B, nh, Q, N)
        nonzero = (x.abs() > 1e-3 * x.abs().amax(-1, keepdim=True)).sum(-1).float()
        energy = torch.linalg.eigvalsh(k.mT @ k)  # (B, nh, hs), rising
        top = energy[..., -1] / energy.sum(-1)
        rows.append(dict(layer=f'{i // 2} {"self" if module.own else "cross"}',
                         attention=module.kind, nonzero=nonzero.mean().item(),
                         top=top.mean().item()))
        print('{layer:10}{attention:22}{nonzero:10.1f}{top:10.3f}'.format(**rows[-1]))
    folder = Path(c.run or Path(c.out_dir, SCRIPT, 'last').read_text())
    write_csv(folder / 'inspect.csv', rows)
    grid = model.encode(batch, mask)[3]
    found = post_process(outputs, [image.shape[1:] for image in images])
    panels = []
    for image, boxes, weights in zip(batch[:4], found, x.abs().mean(1)):  # weights (Q, N)
        surest = sorted(zip(boxes, weights), key=lambda pair: pair[0], reverse=True)
        for box, weight in surest[:4]:
            light = F.interpolate(weight.view(1, 1, *grid), batch.shape[2:])[0, 0]
            light = 0.25 + 0.75 * light / light.max().clamp_min(1e-12)
            panels.append((pixels_of(image) * light.cpu().numpy()[..., None], [box]))
    draw_images(folder / 'attention.png', panels, c)
    return rows

ACTIONS = {'train': train_and_report, 'compare': compare, 'bench': bench,
           'inspect': inspect_run, 'detect': detect}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
