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
    [OA Sec. 4.1]  the same without W_q, W_k, W_v: no-weights              ATTENTION, PROJECTED
    [OA Eq. 1]     min ||q - x^T K||; [choice] squared, + rho ||x||^2      l2, regression
    [OA Eq. 2]     min ||q - x^T K||^2 + lambda ||x||_1                    lasso, admm
    [OA Eq. 3]     the same by an N x N inverse: admm-vanilla              lasso, vanilla_inverse
    [OA Eq. 4]     the inverse in d x d, corrected                         regression, lasso
    ... as they are printed: admm-vanilla-printed, admm-printed            printed
    [OA Sec. 3]    x^5 / sum |x^5|; random tokens; x_ii = 0                sharpen, dictionary,
                                                                           without_own

    python admm_detr.py                                # train: four minutes on a CPU, no network
    python admm_detr.py --cross-attention softmax      # the baseline
    python admm_detr.py detect --images photo.jpg      # what the last run finds in photos
    python admm_detr.py inspect                        # where the decoder looks: OA's Fig. 1
    python admm_detr.py compare --table cross          # what can replace softmax there
    python admm_detr.py compare --table 1 --seeds 0,1  # the paper's tables: 1 and 2
    python admm_detr.py bench                          # what the variants cost
    python admm_detr.py --preset finetune              # detr-r50 with its attention replaced
    python admm_detr.py --preset paper                 # OA's recipe: 300 epochs of COCO train2017

The first ends at AP 0.695, AP50 0.942 on 200 drawings (2000 steps, one CPU thread);
assets/results.md has other seeds, and softmax's.
The default solves (2) made easier: [choice] a ridge term, x >= 0, centred tokens, x^3 for x^5.

What OA leaves open: [choice] x is solved for over tokens with positions (DETR's keys) and mixes
those without (its values); the same for both (--solve-over value) nearly gives back the query. No
output projection (--out-proj), no dropout of x; heads without weights are slices of the channels.
Model and state-dict keys are facebookresearch/detr's.

Below the banner `tools` a reader may stop: from there on the four scripts are the same.
"""
import argparse
import csv
import difflib
import functools
import hashlib
import inspect
import io
import itertools
import json
import linecache
import math
import os
import platform
import sys
import time
import zlib
from collections import defaultdict
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
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many

def fail(message):
    """Stop with one line on what the user can do about it."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the paper's method ------------------------------------
# A query q has coefficients x, one per token, and passes on x^T V. Shapes: q (B, nh, Q, hs), tokens
# k and v (B, nh, N, hs), x (B, nh, Q, N). With `own`, queries and tokens are the same sequence.
def without_own(x, own):
    """x (..., Q, N); if `own`, zero where a query meets itself.  [OA Sec. 3]"""
    if not own:
        return x
    diagonal = torch.eye(*x.shape[-2:], dtype=torch.bool, device=x.device)
    return x.masked_fill(diagonal, 0)

def scales(q, k, own=False, sparsity=0.03, rho=0.1, ridge=0.0, positive=False):
    """lambda (B, nh, Q, 1), rho and e (B, nh, 1, 1) from relative settings.

    [choice] Each query has a lambda of its own: at sparsity 1 it is 2 max |K q|, and x is zero. A
    rho or ridge of 1 is the mean eigenvalue of K^T K. So scaling q, or all of k, only scales x.
    """
    products = without_own(q @ k.mT, own)  # (B, nh, Q, N)
    products = F.relu(products) if positive else products.abs()
    largest = products.amax(-1, keepdim=True)
    mean_eigenvalue = k.square().sum((-2, -1), keepdim=True) / k.size(-1)  # trace / hs
    return 2 * sparsity * largest, (rho * mean_eigenvalue).clamp_min(1e-8), ridge * mean_eigenvalue

def soft(v, t):
    """tau_t, the proximal operator of t |.|: moves v towards zero by t, and no further."""
    return F.relu(v - t) - F.relu(-v - t)

def regression(k, rho):
    """P = (K^T K + rho I)^-1 K^T  (B, nh, hs, N): q P minimises ||q - x^T K||^2 + rho ||x||^2.

    It equals K^T (K K^T + rho I)^-1, so no N x N matrix is ever made.  [OA Eq. 4]
    """
    eye = torch.eye(k.size(-1), dtype=k.dtype, device=k.device)
    factor, _ = torch.linalg.cholesky_ex(k.mT @ k + rho * eye)  # K^T K + rho I >= rho I: it exists
    return torch.cholesky_solve(k.mT, factor)

@torch.compiler.assume_constant_result  # else the generator would break --compile's graph
def fixed(draw, seed, *shape):
    """Random numbers, the same in every call, on the CPU."""
    return draw(shape, generator=torch.Generator().manual_seed(seed))

def vanilla_inverse(k, rho):
    """(K K^T + rho I)^-1  (B, nh, N, N).  [OA Eq. 3]"""
    eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
    return torch.linalg.inv_ex(k @ k.mT + rho * eye)[0]

def lasso(q, k, own=False, sparsity=0.03, rho=0.1, iterations=15, relax=1.6, ridge=0.0,
          positive=False, vanilla=False):
    """argmin_x ||q - x^T K||^2 + lambda ||x||_1 + e ||x||^2, by over-relaxed ADMM  [OA Eq. 2]

    -> x (B, nh, Q, N), >= 0 if `positive`. Tokens that are zero get 0, and so does, with `own`, the
    query's own token. [deviation] That is zeroed in z, not in x as OA has it, because then it is
    (3b) under the constraint x_ii = 0, and ADMM still converges. [choice] OA does not over-relax.
    `vanilla` takes the N x N inverse: the same x up to rounding.  [OA Eq. 3]
    """
    penalty, rho, e = scales(q, k, own, sparsity, rho, ridge, positive)
    t = penalty / (2 * rho)  # (B, nh, Q, 1)
    if vanilla:
        inverse, products = vanilla_inverse(k, rho), q @ k.mT
        regress = lambda w: (products + rho * w) @ inverse
    else:
        P = regression(k, rho)
        regress = lambda w: w + (q - w @ k) @ P  # the same: ridge regression of w's residual
    z = u = v = q.new_zeros(*q.shape[:-1], k.size(-2))  # (B, nh, Q, N)
    for _ in range(iterations):
        x = regress(z - u)  # (3a): argmin ||q - x^T K||^2 + rho ||x - (z - u)||^2
        v = torch.add(v, x - z, alpha=relax)  # v + relax * (x - z): x + u if relax is 1
        # (3b): argmin lambda ||z||_1 + e ||z||^2 + rho ||z - v||^2
        z = F.relu(v - t) if positive else soft(v, t)
        z = without_own(z / (1 + e / rho), own)
        u = v - z  # (3c): the running sum of x - z, the scaled dual of x = z
    return torch.where(t > 0, z, 0)  # lambda is 0 where no token helps

def printed(q, k, own=False, sparsity=0.03, rho=0.1, iterations=15, vanilla=False, sigma=1e-4):
    """Equations (3) or (4) to the letter -> x (B, nh, Q, N). They do not solve the Lasso.

    The sign of mu in (3b) contradicts (3c), so past the threshold the state about doubles in every
    iteration; the fixed point of (3) is ridge regression, whatever lambda is; (4) has D^1/2 where
    the spectrum is D, and omits the complement of V's range.  [OA Eq. 3] [OA Eq. 4]

    Likely misprints: with z - mu for x - z in (3a) and x^(k+1) + mu for x^(k) - mu in (3b), (3) is
    exactly ADMM, but for the Lasso with 2 lambda: (2) asks for the threshold lambda / (2 rho).
    So (3) corrected, with sparsity s, is lasso(sparsity=2 * s, relax=1, vanilla=True).
    """
    penalty, rho, _ = scales(q, k, own, sparsity, rho)
    products = q @ k.mT  # (B, nh, Q, N)
    threshold = penalty / rho
    if vanilla:
        inverse = vanilla_inverse(k, rho)
    else:
        # [choice] sigma: OA calls the jitter on K^T K small
        jitter = sigma * fixed(torch.rand, 1, k.size(-1))
        D, X = torch.linalg.eigh(k.mT @ k + jitter.diag().to(k))  # (B, nh, hs), rising
        D = D.unsqueeze(-2)  # (B, nh, 1, hs)
        # rounding makes some negative where there are fewer tokens than channels
        D = torch.maximum(D, torch.finfo(D.dtype).eps * D[..., -1:])
        Y = k @ X / D.sqrt()  # (B, nh, N, hs)
    x = z = mu = torch.zeros_like(products)
    for _ in range(iterations):
        new = products + rho * (x - z)  # (3a)
        new = new @ inverse if vanilla else new @ Y / (D.sqrt() + rho) @ Y.mT
        new = without_own(new, own).clamp(-1, 1)  # [choice] 1
        z = soft(x - mu, threshold)  # (3b), with the old x
        x, mu = new, mu + new - z  # (3c)
    return x

def sharpen(x, power=5):
    """x^5 / sum |x^5|, safely: rows of zeros stay, tiny ones fade to zero.  [OA Sec. 3]"""
    if not power:
        return x
    # scaled first, so that x^5 neither underflows nor blows the gradient up
    largest = x.detach().abs().amax(-1, keepdim=True)
    y = (x / largest.clamp_min(1e-6)) ** power
    return y / y.abs().sum(-1, keepdim=True).clamp_min(0.5)  # 1 or more, but in rows that fade

def dictionary(k, padding, centre=False, random_tokens=0):
    """The tokens to solve over: padding zeroed, so it gets no weight; minus their mean if `centre`;
    then random tokens from N(0, 1), the same every time.  [OA Sec. 3]

    [deviation] OA's attention reaches padding (its Fig. 1); here not, because DETR's does not.
    [deviation] OA mixes in the random tokens' values; here what they take is lost, because what is
    mixed is DETR's values, and random tokens are keys alone.
    """
    hidden = padding[:, None, :, None]  # (B, 1, N, 1)
    k = k.masked_fill(hidden, 0)
    if centre:
        mean = k.sum(2, keepdim=True) / (~hidden).sum(2, keepdim=True)
        k = (k - mean).masked_fill(hidden, 0)
    if not random_tokens:
        return k
    extra = fixed(torch.randn, 0, random_tokens, k.size(-1)).to(k).expand(*k.shape[:2], -1, -1)
    return torch.cat([k, extra], dim=2)  # (B, nh, N + n, hs)

def softmax(q, k, padding, own, c):
    """softmax(QK^T / sqrt(hs)), standard attention.  [OA Sec. 2]"""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(padding[:, None, None], -math.inf).softmax(-1)

def l2(q, k, padding, own, c):
    """argmin ||q - x^T K||^2 + rho ||x||^2, sharpened; in cross-attention only.  [OA Eq. 1]"""
    tokens = dictionary(k, padding, c.centre, c.random_tokens)
    _, rho, _ = scales(q, tokens, rho=c.rho)
    x = q @ regression(tokens, rho)
    return sharpen(x, c.power)[..., :k.size(2)]

def admm(q, k, padding, own, c, vanilla=False):
    """argmin ||q - x^T K||^2 + lambda ||x||_1, sharpened.  [OA Eq. 2]"""
    tokens = dictionary(k, padding, c.centre, c.random_tokens)
    x = lasso(q, tokens, own, c.sparsity, c.rho, c.iterations,
              ridge=c.ridge, positive=c.positive, vanilla=vanilla)
    return sharpen(x, c.power)[..., :k.size(2)]

def admm_printed(q, k, padding, own, c, vanilla=False):
    """The paper's formulas as they stand, which pay no heed to padding.  [OA Eq. 4]"""
    no_padding = torch.zeros_like(padding)
    tokens = dictionary(k, no_padding, random_tokens=c.random_tokens or 32)  # [choice] 32
    x = printed(q, tokens, own, c.sparsity, c.rho, c.iterations, vanilla)
    return sharpen(x, c.power)[..., :k.size(2)]

ATTENTION = {  # (q, k, padding (B, N), own, config) -> coefficients x (B, nh, Q, N)
    'softmax': softmax,     # for these two MultiheadAttention.forward uses the fused kernel
    'no-weights': softmax,  # no W_q, W_k, W_v, as in all that follow  [OA Sec. 4.1]
    'l2': l2,
    'admm': admm,
    'admm-vanilla': functools.partial(admm, vanilla=True),                  # [OA Eq. 3]
    'admm-printed': admm_printed,
    'admm-vanilla-printed': functools.partial(admm_printed, vanilla=True),  # [OA Eq. 3]
}
PROJECTED = {'softmax'}  # rows with W_q, W_k, W_v and an output projection: name yours too

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
    power: int = 3                 # raise coefficients to it, normalise; 0: do neither; OA has 5
    random_tokens: int = 0         # [OA Sec. 3]; for -printed, 0 means 32
    # [choice] not OA's: they make an easier problem (see assets/results.md)
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
    log_interval: int = 50         # steps between lines of progress
    reuse: bool = False            # take finished runs of these settings, though code has changed
    fresh: bool = False            # restart a stopped or finished run from scratch
    out_dir: str = 'out'           # where runs are written
    # actions
    run: str = ''                  # detect, inspect: a run's folder; default: train's last run
    images: list = ()              # detect, inspect: photos; may be repeated
    threshold: float = 0.5         # detect: lowest score to show
    over: list = ()                # compare, bench: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    from_csv: str = ''             # compare: tabulate these runs.csv, A,B, instead of training
    figure: str = ''               # compare: what to test, e.g. mean_loss; default: the result
    rounds: int = 20               # bench: steps to time

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                flag = '--' + name.replace('_', '-')
                fail(f'{flag} {getattr(self, name)}: choose from {", ".join(map(str, allowed))}')
        for name in POSITIVE:
            if getattr(self, name) < 1:
                fail(f'--{name.replace("_", "-")} {getattr(self, name)}: must be at least 1')
        if self.hidden_dim % self.nheads or self.hidden_dim % 4:
            fail(f'--hidden-dim {self.hidden_dim}: needs a multiple of 4 and of --nheads')
        if self.self_attention == 'l2':
            fail('--self-attention l2 would give back the query: choose another')
        if not (0 < self.sparsity <= 1 and self.rho >= 1e-5 and self.ridge >= 0):
            fail('wanted: 0 < --sparsity <= 1, --rho >= 1e-5 (for float32), --ridge >= 0')
        if 'printed' in self.variant and self.iterations > 20:
            fail('--iterations: printed formulas double their state in each; 20 at most')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')

    @property
    def variant(self):
        return f'sa-{self.self_attention}-ca-{self.cross_attention}'

DETR_R50 = dict(data='coco', backbone='resnet50', hidden_dim=256, nheads=8, enc_layers=6,
                dec_layers=6, dim_feedforward=2048, dropout=0.1, num_queries=100,
                learning_rate=1e-4, lr_backbone=0.1, schedule='step', warmup_iters=0, threads=0)
# OA's problem (2) as it stands, for its tables and recipe; Config's defaults learn more
OA = dict(ridge=0.0, positive=False, centre=False, power=5, rho=0.1, iterations=15)
PRESETS = {
    'tiny': {},
    't4': dict(max_iters=6000, eval_interval=500, threads=0),
    # 1 GiB of memory an image
    'finetune': dict(DETR_R50, init='data/weights/detr-r50.pth', image_size=480, batch_size=2,
                     grad_accum_steps=8, max_iters=600, warmdown_iters=150, eval_interval=200),
    # OA: 4 GPUs with 8 images each and "original" rates; since it states no epochs, DETR's own
    # 300, of 3696 steps, the last 100 at a tenth of the rate. An image takes 3 GiB, or 5 where wide
    # and tall ones meet: on a T4 add --batch-size 2 --grad-accum-steps 16
    'paper': dict(DETR_R50, **OA, init='data/weights/resnet50.pth', image_size=800, batch_size=8,
                  grad_accum_steps=4, max_iters=1108800, warmdown_iters=369600,
                  eval_interval=3696, dtype='float32'),
}
BASELINE = dict(self_attention='softmax', cross_attention='softmax')  # compare's first row
TABLES = {  # `compare --table NAME`
    # OA Table 1: AP 40.6 (300 epochs), 38.5, 36.0, 38.5, 37.7
    '1': {'DETR': BASELINE,
          'no weights SA': dict(BASELINE, self_attention='no-weights'),
          'no weights CA': dict(BASELINE, cross_attention='no-weights'),
          'ADMM SA': dict(BASELINE, **OA, self_attention='admm'),
          'ADMM CA': dict(BASELINE, **OA, cross_attention='admm')},
    # OA Table 2: AP 28.0, 38.0, 38.5
    '2': {'l2 CA': dict(BASELINE, **OA, cross_attention='l2'),
          'vanilla ADMM SA': dict(BASELINE, **OA, self_attention='admm-vanilla'),
          'efficient ADMM SA': dict(BASELINE, **OA, self_attention='admm')},
    # what can replace softmax in cross-attention, with our options
    'cross': {'softmax': BASELINE,
              'no-weights': dict(BASELINE, cross_attention='no-weights'),
              'lasso': dict(BASELINE, cross_attention='admm'),
              'l2': dict(BASELINE, cross_attention='l2')},
    # the paper taken at its word: (2) without our options, over keys or over the values that are
    # mixed; (4) with its misprints; (1); and in self-attention (SA)
    'more': {'softmax': BASELINE,
             'exact Lasso': dict(BASELINE, **OA, cross_attention='admm'),
             'as printed': dict(BASELINE, **OA, cross_attention='admm-printed',
                                solve_over='value'),
             'exact Lasso of values': dict(BASELINE, **OA, cross_attention='admm',
                                           solve_over='value', random_tokens=32),
             'exact l2': dict(BASELINE, **OA, cross_attention='l2'),
             'SA no-weights': dict(BASELINE, self_attention='no-weights'),
             'SA exact Lasso': dict(BASELINE, **OA, self_attention='admm'),
             'SA exact Lasso, N x N': dict(BASELINE, **OA, self_attention='admm-vanilla')},
}
POSITIVE = ('iterations', 'hidden_dim', 'nheads', 'enc_layers', 'dec_layers', 'dim_feedforward',
            'num_queries', 'image_size', 'batch_size', 'grad_accum_steps', 'eval_interval',
            'log_interval', 'rounds')
CHOICES = {
    'self_attention': ATTENTION, 'cross_attention': ATTENTION, 'solve_over': ('key', 'value'),
    'power': (0, 1, 3, 5), 'backbone': ('small', 'resnet50'), 'stride': (4, 8, 16, 32),
    'schedule': ('cosine', 'trapezoid', 'step', 'constant'), 'table': ('', *TABLES),
    'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
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
    """torchvision's keys; 32 pixels per token. As in DETR, its first layers never learn."""
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

class MultiheadAttention(nn.Module):
    """nn.MultiheadAttention's parameters if PROJECTED; else none, or out_proj alone."""
    def __init__(self, c, kind, own=False):
        super().__init__()
        C = c.hidden_dim
        self.config, self.kind, self.own = c, kind, own
        self.projected = kind in PROJECTED
        if self.projected:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * C, C))  # W_q, W_k, W_v
            self.in_proj_bias = nn.Parameter(torch.empty(3 * C))
        self.out_proj = nn.Linear(C, C) if self.projected or c.out_proj else nn.Identity()

    def heads(self, *qkv):
        """q (B, Q, C), k and v (B, N, C) -> (B, nh, Q, hs), (B, nh, N, hs) twice."""
        if self.projected:
            parts = zip(qkv, self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))
            qkv = [F.linear(x, weight, bias) for x, weight, bias in parts]
        return [x.unflatten(2, (self.config.nheads, -1)).transpose(1, 2) for x in qkv]

    def coefficients(self, q, k, v, padding=None):
        """Coefficients (B, nh, Q, N) of the tokens, and what they mix to, (B, nh, Q, hs)."""
        attention = ATTENTION[self.kind]
        over_values = self.config.solve_over == 'value' and attention is not softmax
        if padding is None:
            padding = k.new_zeros(len(k), k.size(2), dtype=torch.bool)
        with torch.autocast(q.device.type, enabled=False):  # sums of squares need float32's range
            q, k, v = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
            x = attention(q, v if over_values else k, padding, self.own, self.config)
            return x, x @ v

    def forward(self, q, k, v, padding=None):
        """q (B, Q, C), k and v (B, N, C), padding (B, N) True where no token is -> (B, Q, C)."""
        q, k, v = self.heads(q, k, v)
        if ATTENTION[self.kind] is softmax:  # the fused kernel makes the same sum
            mask = None if padding is None else ~padding[:, None, None]  # (B, 1, 1, N)
            dropout = self.config.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)
        else:
            _, y = self.coefficients(q, k, v, padding)
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
        init_weights(self, c.seed)

    def encode(self, images, mask=None):
        """-> memory and positions (B, N, C), padding (B, N) or None, grid (h, w)."""
        x = self.input_proj(self.backbone[0]['body'](images))  # (B, C, h, w)
        grid = x.shape[2:]
        padding = x.new_zeros(len(x), *grid, dtype=torch.bool)
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

@torch.no_grad()
def init_weights(model, seed):
    """Fill parameters as DETR does, each from a generator of its own name: what two variants share
    starts out equal. Norms, and parameters you may add, keep the values they were made with."""
    def generator(name):
        return torch.Generator().manual_seed(zlib.crc32(f'{seed} {name}'.encode()))

    def uniform(p, name, bound):
        p.uniform_(-bound, bound, generator=generator(name))

    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(generator=generator(f'{name}.weight'))
        if isinstance(module, MultiheadAttention) and module.projected:
            matrix = module.in_proj_weight
            uniform(matrix, f'{name}.in_proj_weight', math.sqrt(6 / sum(matrix.shape)))  # xavier
            module.in_proj_bias.zero_()
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fan_out, fan_in = len(module.weight), module.weight[0].numel()
            default, xavier = fan_in ** -0.5, math.sqrt(6 / (fan_in + fan_out))
            bound = xavier if name.startswith('transformer') else default
            uniform(module.weight, f'{name}.weight', bound)
            if name.endswith('out_proj'):
                module.bias.zero_()
            elif module.bias is not None:
                uniform(module.bias, f'{name}.bias', default)

# ------------------------------------ data ------------------------------------
# A data set has len, classes, plan(row, rng) and render(plans). A plan says what an image shows
# before it is drawn or read, so that every process can count the objects of a whole step: labels
# (n,); boxes (n, 4), centre and size as fractions of the image; notes, the same in COCO's json
# form; image_id; original, (height, width). render makes the images, (3, H, W) each, normalised.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]  # of ImageNet's colours, 0 to 1
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]

def stream(name, *numbers):
    """A generator of its own: NumPy pads seeds with zeros, so [1, 7] would equal [1, 7, 0]."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

SHAPES = {  # name -> which points (x, y) of its box, 0 to 1, are inside: it should touch all sides
    'rectangle': lambda x, y, tip: True,
    'disc': lambda x, y, tip: (x - 0.5) ** 2 + (y - 0.5) ** 2 <= 0.25,
    'triangle': lambda x, y, tip: (x >= tip * (1 - y)) & (x <= 1 - (1 - tip) * (1 - y)),
}

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

    def __post_init__(self):
        self.classes = list(SHAPES)

    def __len__(self):
        return self.n

    def plan(self, row, rng=None):
        """A fresh drawing or, without a generator, the validation drawing of that row."""
        rng = rng or stream('validation', row)
        boxes = []
        for size in rng.uniform(0.18, 0.5, (rng.integers(1, 5), 2)):
            for centre in rng.uniform(size / 2, 1 - size / 2, (10, 2)):  # ten attempts
                box = [*centre.tolist(), *size.tolist()]
                if not any(overlap(box, other) for other in boxes):
                    boxes.append(box)
                    break
        labels = torch.from_numpy(rng.integers(len(SHAPES), size=len(boxes)))
        boxes = torch.tensor(boxes)
        notes = []
        for label, (cx, cy, w, h) in zip(labels.tolist(), boxes.tolist()):
            box = [self.side * v for v in (cx - w / 2, cy - h / 2, w, h)]
            notes.append(dict(image_id=row + 1, category_id=label, bbox=box))
        return SimpleNamespace(image_id=row + 1, original=(self.side, self.side), notes=notes,
                               labels=labels, boxes=boxes, noise=int(rng.integers(2 ** 32)))

    def draw(self, plan):
        """-> (3, H, W) float32, normalised."""
        rng = stream('pixels', plan.noise)
        grid = (np.arange(self.side, dtype=np.float32) + 0.5) / self.side
        image = np.full((3, self.side, self.side), rng.uniform(0.2, 0.6), np.float32)  # grey
        for label, (cx, cy, w, h) in zip(plan.labels.tolist(), plan.boxes.tolist()):
            x = (grid - cx) / w + 0.5  # 0 to 1 in the box
            y = ((grid - cy) / h + 0.5)[:, None]
            ink = rng.permutation([0.1, rng.random(), 0.9])
            tip = rng.uniform(0.2, 0.8)
            box = (abs(x - 0.5) <= 0.5) & (abs(y - 0.5) <= 0.5)
            inside = box & SHAPES[self.classes[label]](x, y, tip)
            image[:, inside] = ink[:, None]
        image += 0.04 * rng.standard_normal(image.shape, np.float32)
        return torch.from_numpy((image.clip(0, 1) - MEAN) / STD)

    def render(self, plans):
        return [self.draw(plan) for plan in plans]  # threads would only wait for each other

def resized(w, h, side, most=math.inf):
    """Width and height, the shorter `side`, or less if the longer would exceed `most`."""
    short, long = min(w, h), max(w, h)
    side = max(1, round(min(side, most * short / long)))
    long = int(side * long / short)
    return (side, long) if w < h else (long, side)

def read_photo(path, upright=False):
    """Pillow's RGB image. COCO's boxes ignore EXIF rotation; `upright` applies it."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError('photos need `pip install pillow`')
    photo = Image.open(path)
    return (ImageOps.exif_transpose(photo) if upright else photo).convert('RGB')

def to_tensor(photo, size):
    """Pillow's image, resized to (width, height) -> (3, H, W), normalised."""
    x = np.asarray(photo.resize(size, 2), np.float32)  # 2: bilinear
    return torch.from_numpy((x.transpose(2, 0, 1) / 255 - MEAN) / STD)

class CocoFolder:
    """Photos and their annotations; row i is the i-th image by id."""
    def __init__(self, folder, name, image_size):
        path = folder / 'annotations' / f'instances_{name}.json'
        self.photos = folder / name
        self.image_size = image_size
        self.annotations = defaultdict(list)
        self.threads = ThreadPoolExecutor()
        try:
            data = json.loads(path.read_bytes())
            names = {x['id']: x['name'] for x in data['categories']}
            self.images = sorted(data['images'], key=lambda x: x['id'])
            for note in data['annotations']:
                self.annotations[note['image_id']].append(note)
            # labels are category ids, as in DETR, so some labels belong to no class
            self.classes = [names.get(i, '') for i in range(max(names) + 1)]
            unknown = {note['category_id'] for note in data['annotations']} - {*names}
        except (OSError, KeyError, TypeError, ValueError) as error:
            fail(f"{path} is no file of annotations in COCO's form: {error!r:.200}")
        if unknown:
            fail(f'{path}: annotations of category_id {min(unknown)}, which is no category there')

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
        objects = [note for note in notes if not note.get('iscrowd')]
        labels = np.array([note['category_id'] for note in objects], dtype=np.int64)
        boxes = np.array([note['bbox'] for note in objects], dtype=float).reshape(-1, 4)
        low = (boxes[:, :2] / (w, h)).clip(0, 1)  # left, top
        high = ((boxes[:, :2] + boxes[:, 2:]) / (w, h)).clip(0, 1)  # right, bottom
        boxes = np.concatenate([(low + high) / 2, high - low], axis=1)
        if flip:
            boxes[:, 0] = 1 - boxes[:, 0]
        kept = (high > low).all(1)
        return SimpleNamespace(
            image_id=image['id'], original=(h, w), notes=notes, flip=flip,
            path=self.photos / image['file_name'],
            size=resized(w, h, side, 5 * self.image_size // 3),  # DETR's 1333 for 800
            labels=torch.from_numpy(labels[kept]), boxes=torch.from_numpy(boxes[kept]).float())

    def read(self, plan):
        x = to_tensor(read_photo(plan.path), plan.size)
        return x.flip(2) if plan.flip else x

    def render(self, plans):
        return list(self.threads.map(self.read, plans))

def coco_folder(c):
    return Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)

def data_files(c):
    """The files that a run is made from, which are part of its folder's name."""
    files = [Path(c.init)] if c.init else []
    if c.data != 'builtin':
        folder = coco_folder(c)
        files += [*folder.glob('annotations/instances_*'), *folder.glob('*2017/*')]
    return files

def load_data(c):
    """c.data -> train and val: Shapes, or CocoFolder of a folder like COCO's, that is, train2017/
    and val2017/ with photos and annotations/instances_train2017.json, ... Of a single split every
    tenth photo is for evaluation."""
    if c.data == 'builtin':
        return SimpleNamespace(
            train=Shapes(10 ** 6, c.image_size), val=Shapes(200, c.image_size),
            about='drawn shapes, always new; expect AP near 0 for the first 500 steps or more')
    folder = coco_folder(c)
    names = [name for name in ('train2017', 'val2017') if (folder / name).is_dir()]
    if not names:
        fail(f'--data {c.data}: no {folder}/train2017, val2017, annotations/instances_*.json; '
             'python prepare_data.py coco makes data/coco, --parts 2 with train2017')
    train = CocoFolder(folder, names[0], c.image_size)
    val = CocoFolder(folder, names[-1], c.image_size)
    if train.classes != val.classes:
        fail(f'--data {c.data}: the two files of annotations differ in their categories')
    if len(names) == 1:
        val.images = train.images[::10]
        del train.images[::10]
    if not len(train):
        fail(f'--data {c.data}: no images to train on')
    classes = len(train.classes) - train.classes.count('')
    most = max(map(len, train.annotations.values()), default=0)
    about = f'{folder}, {len(train):,} images of {classes} classes, up to {most} objects in one'
    if most > c.num_queries:
        about += f', more than --num-queries {c.num_queries} can find'
    return SimpleNamespace(train=train, val=val, about=about)

# --------------------------- matching, losses, average precision ---------------------------
def assign(cost):
    """cost (n, m) -> rows, columns of the cheapest assignment. Rows are added one by one, each by
    the cheapest chain of changes that ends in a free column (Bellman-Ford)."""
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
        while before[j] >= 0:  # everyone in the chain moves
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

@torch.no_grad()
def match_batch(logits, boxes, targets, c):
    """The cheapest pairing of queries with objects, for each image and layer separately.

    logits (L, B, Q, K + 1), boxes (L, B, Q, 4) and targets, (labels, boxes) of each image ->
    indices of layer, image, query and object; objects are numbered across the batch.
    """
    labels, true_boxes = (torch.cat(parts) for parts in zip(*targets))  # (T,), (T, 4)
    boxes = boxes.unsqueeze(-2)  # (L, B, Q, 1, 4)
    distance = (boxes - true_boxes).abs().sum(-1)  # (L, B, Q, T)
    giou = generalised_iou(corners(boxes), corners(true_boxes))
    cost = c.bbox_loss_coef * distance - c.giou_loss_coef * giou - logits.softmax(-1)[..., labels]
    cost = cost.nan_to_num().cpu().numpy()  # what is not finite shows in the loss
    pairs = []
    first = 0  # object of the image
    for image, (labels, _) in enumerate(targets):
        last = first + len(labels)
        for layer in range(len(cost)):
            queries, objects = match(cost[layer, image, :, first:last])
            pairs += [(layer, image, q, first + n) for q, n in zip(queries, objects)]
        first = last
    return torch.tensor(pairs, dtype=torch.long, device=logits.device).view(-1, 4).T

def divisors(counts, c):
    """What summed losses are divided by, given the number of objects in each image: weight_sum, of
    class weights (object 1, no-object eos_coef), and num_boxes, at least 1."""
    matched = sum(min(n, c.num_queries) for n in counts)
    others = len(counts) * c.num_queries - matched
    return matched + c.eos_coef * others, max(1, sum(counts))

def set_loss(outputs, targets, c, weight_sum, num_boxes):
    """DETR's loss, a number: cross-entropy, L1 distance and GIoU, summed over the decoder layers.

    weight_sum and num_boxes (see divisors) are those of the whole step or, for one of its n parts,
    an nth of them: so parts average to the whole.
    """
    layers = [outputs, *outputs['aux_outputs']]
    logits = torch.stack([layer['pred_logits'] for layer in layers])  # (L, B, Q, K + 1)
    boxes = torch.stack([layer['pred_boxes'] for layer in layers])  # (L, B, Q, 4)
    labels, true_boxes = (torch.cat(parts) for parts in zip(*targets))  # (T,), (T, 4)
    layer, image, query, target = match_batch(logits, boxes, targets, c)
    no_object = logits.size(-1) - 1
    wanted = torch.full(logits.shape[:3], no_object, device=logits.device)  # (L, B, Q)
    wanted[layer, image, query] = labels[target]
    weight = torch.where(wanted == no_object, c.eos_coef, 1.0)
    entropy = F.cross_entropy(logits.movedim(-1, 1), wanted, reduction='none')
    matched, true_boxes = boxes[layer, image, query], true_boxes[target]  # (pairs, 4)
    loss_ce = (weight * entropy).sum() / weight_sum
    loss_bbox = (matched - true_boxes).abs().sum() / num_boxes
    giou = generalised_iou(corners(matched), corners(true_boxes))
    loss_giou = (1 - giou).sum() / num_boxes
    return loss_ce + c.bbox_loss_coef * loss_bbox + c.giou_loss_coef * loss_giou

@torch.no_grad()
def post_process(outputs, sizes, threshold=0.0):
    """Outputs and the (height, width) of each image -> for each image a list of (score, label,
    [left, top, right, bottom] in pixels): of every query the likeliest class, from threshold on."""
    scores, labels = outputs['pred_logits'].softmax(-1)[..., :-1].max(-1)
    boxes = corners(outputs['pred_boxes'])  # (B, Q, 4)
    results = []
    for i, (h, w) in enumerate(sizes):
        pixels = boxes[i] * boxes.new_tensor([w, h, w, h])
        found = zip(scores[i].tolist(), labels[i].tolist(), pixels.tolist())
        results.append([one for one in found if one[0] >= threshold])
    return results

IOUS = np.linspace(0.5, 0.95, 10)  # a box is right if it has this IoU with an object
AREAS = [(0, 1e10), (0, 32 ** 2), (32 ** 2, 96 ** 2), (96 ** 2, 1e10)]  # of all, small, ...

def coco_ap(ground_truth, detections):
    """COCO's twelve numbers, nan where nothing is to be found; both arguments in its json form.

    ground_truth: annotations (image_id, category_id, bbox, area, iscrowd); detections: (image_id,
    category_id, bbox, score). Boxes are x, y, width, height in pixels. Same as pycocotools, which
    however gives -1 for nan and never matches annotation id 0.
    """
    notes = ground_truth['annotations']
    categories = sorted({note['category_id'] for note in notes})
    truth = defaultdict(list)  # the annotations of a category in an image
    for i, note in enumerate(notes):
        truth[note['category_id'], note['image_id']].append(i)
    found = defaultdict(list)  # of each category, the surest first: rank in its image, area, IoUs
    ranks = defaultdict(int)
    for x in sorted(detections, key=lambda x: (-x['score'], x['image_id'])):
        place = x['category_id'], x['image_id']
        if ranks[place] < 100:
            ious = {i: iou(x, notes[i]) for i in truth[place]}
            found[x['category_id']].append((ranks[place], x['bbox'][2] * x['bbox'][3], ious))
        ranks[place] += 1

    areas = [note.get('area', note['bbox'][2] * note['bbox'][3]) for note in notes]
    crowds = [bool(note.get('iscrowd')) for note in notes]
    precision = np.full((4, 10, len(categories)), np.nan)  # (areas, IoUs, K)
    recall = np.full((3, 4, 10, len(categories)), np.nan)  # (detections per image, ...)
    for a, (low, high) in enumerate(AREAS):
        counts = [low <= area <= high and not crowd for area, crowd in zip(areas, crowds)]
        for k, category in enumerate(categories):
            wanted = sum(n for n, note in zip(counts, notes) if note['category_id'] == category)
            for t, threshold in enumerate(IOUS if wanted else []):
                rank, right = right_or_wrong(found[category], counts, crowds, threshold, low, high)
                precision[a, t, k] = average_precision(right, wanted)
                for m, most in enumerate((1, 10, 100)):
                    recall[m, a, t, k] = right[rank < most].sum() / wanted
    figures = dict(AP=precision[0], AP50=precision[0, 0], AP75=precision[0, 5],
                   APs=precision[1], APm=precision[2], APl=precision[3],
                   AR1=recall[0, 0], AR10=recall[1, 0], AR100=recall[2, 0],
                   ARs=recall[2, 1], ARm=recall[2, 2], ARl=recall[2, 3])
    for name, x in figures.items():
        figures[name] = math.nan if np.isnan(x).all() else float(np.nanmean(x))
    return figures

def average_precision(right, wanted):
    """Detections, the surest first, True where right, and how many there are to find -> the mean
    of the precision at 101 recalls, 0 to 1."""
    hits = right.cumsum()
    precision = hits / (np.arange(1, len(hits) + 1) + np.spacing(1))
    precision = np.maximum.accumulate(precision[::-1])[::-1]  # the best at this recall or above
    reached = np.searchsorted(hits / wanted, np.linspace(0, 1, 101))
    return np.append(precision, 0)[reached].mean()  # 0 for recalls that are never reached

def iou(found, true):
    """Of two boxes; where the second is a crowd, the share of the first that is in it."""
    x, y, w, h = found['bbox']
    X, Y, W, H = true['bbox']
    width = max(0, min(x + w, X + W) - max(x, X))
    height = max(0, min(y + h, Y + H) - max(y, Y))
    both = width * height
    union = w * h if true.get('iscrowd') else w * h + W * H - both
    return both / max(union, 1e-99)

def right_or_wrong(found, counts, crowds, threshold, low, high):
    """Detections of one category, the surest first -> of those that count: their ranks, and whether
    each is right, that is, has an annotation for itself."""
    taken, verdicts = set(), []
    for rank, area, ious in found:
        fits = [i for i, share in ious.items() if share >= threshold and i not in taken]
        it_counts = low <= area <= high
        if fits:  # annotations that count come first, then the highest IoU, then the last one
            best = max(fits, key=lambda i: (counts[i], ious[i], i))
            it_counts = counts[best]
            if not crowds[best]:  # a crowd is there for many
                taken.add(best)
        if it_counts:
            verdicts.append((rank, bool(fits)))
    return np.array(verdicts, dtype=int).reshape(-1, 2).T

# ------------------------------------ training ------------------------------------
# What the loop below knows of boxes: these names and functions.
METRIC = 'AP'         # best.pt and `compare --best` go by this validation figure:
BETTER = max          # higher is better
RESULTS = ['AP', 'AP50', 'AP75', 'APs', 'APm', 'APl']  # what `compare` tabulates at the end
LABELS = {'loss': 'training loss', 'AP': 'average precision, 0 to 1',
          'seconds': 'seconds of training steps'}  # of pictures' axes

def make_model(c, data):
    """A model on the CPU. Its config is c plus what the data decide; without data, c has that."""
    if data:
        c = replace(c, num_classes=len(data.train.classes), classes=data.train.classes)
    model = DETR(c)
    if c.init and data:
        load_weights(model, c.init)
    return model

def load_weights(model, path):
    """Fill `model` from a checkpoint of this script, of DETR or of torchvision's ResNet-50, as far
    as it fits, and say what does not: attention that is replaced, or classes of other data."""
    if not Path(path).exists():
        fail(f'--init {path}: no such file; python prepare_data.py detr-r50, or resnet50, makes '
             'those of the presets')
    state = load_checkpoint(path, own=False)
    state = state.get('model', state)
    if 'layer4.0.conv1.weight' in state:
        state = {'backbone.0.body.' + key: p for key, p in state.items()}
    shapes = {key: p.shape for key, p in model.state_dict().items()}
    fits = {key: p for key, p in state.items() if key in shapes and shapes[key] == p.shape}
    if not fits:
        fail(f'--init {path}: not one tensor has the name and shape of one of the model')
    model.load_state_dict(fits, strict=False)
    fresh = sorted({key.split('.layers')[0] for key in shapes if key not in fits})
    print(f'init    {path}: {len(fits)} tensors of {len(shapes)}; '
          f'fresh: {", ".join(fresh) or "none"}')

def make_optimizer(model, c):
    """AdamW on everything, as DETR has it; the backbone has a rate of its own."""
    rest = [p for name, p in model.named_parameters() if not name.startswith('backbone')]
    groups = [dict(params=rest, lr=c.learning_rate),
              dict(params=model.backbone.parameters(), lr=c.learning_rate * c.lr_backbone)]
    return torch.optim.AdamW(groups, weight_decay=c.weight_decay)

def collate(images, device):
    """Images (3, h, w) -> a batch (B, 3, H, W), zeros at right and bottom, and a mask (B, H, W),
    True there, or None where nothing is padded."""
    _, H, W = np.max([x.shape for x in images], axis=0)
    batch = torch.zeros(len(images), 3, H, W)
    mask = torch.ones(len(images), H, W, dtype=torch.bool)
    for i, x in enumerate(images):
        _, h, w = x.shape
        batch[i, :, :h, :w] = x
        mask[i, :h, :w] = False
    return batch.to(device), mask.to(device) if mask.any() else None

def load_batch(dataset, plans, device):
    """Plans -> images, mask (see collate) and targets, (labels, boxes) of each image."""
    targets = [(plan.labels.to(device), plan.boxes.to(device)) for plan in plans]
    return *collate(dataset.render(plans), device), targets

@functools.lru_cache(2)
def shuffled(seed, epoch, n):
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro, device):
    """This process's share of a micro-batch, a function of seed and step: what load_batch makes of
    it, and an even share of the whole step's divisors, which follow from plans alone."""
    n = c.batch_size * c.grad_accum_steps
    plans = []
    for i in range(n):
        epoch, place = divmod(step * n + i, len(data.train))
        row = int(shuffled(c.seed, epoch, len(data.train))[place])
        plans.append(data.train.plan(row, stream('train', c.seed, step, i)))
    weight_sum, num_boxes = divisors([len(plan.labels) for plan in plans], c)
    first = micro * c.batch_size
    plans = plans[first + RANK:first + c.batch_size:WORLD]
    parts = c.grad_accum_steps * WORLD
    return *load_batch(data.train, plans, device), weight_sum / parts, num_boxes / parts

def loss_of(model, batch, c):
    images, mask, targets, weight_sum, num_boxes = batch
    return set_loss(model(images, mask), targets, c, weight_sum, num_boxes)

@torch.no_grad()
def evaluate(model, data, c, device):
    """On validation images: loss, and the six kinds of AP."""
    plans = [data.val.plan(row) for row in range(len(data.val))[:c.eval_rows or None]]
    weight_sum, num_boxes = divisors([len(plan.labels) for plan in plans], c)
    loss, truth, found = 0.0, [], []
    for i in range(0, len(plans), c.batch_size):
        batch = plans[i:i + c.batch_size]
        images, mask, targets = load_batch(data.val, batch, device)
        outputs = model(images, mask)
        loss += set_loss(outputs, targets, c, weight_sum, num_boxes).item()
        results = post_process(outputs, [plan.original for plan in batch])
        for plan, boxes in zip(batch, results):
            truth += plan.notes
            for score, label, (x0, y0, x1, y1) in boxes:
                box = [x0, y0, x1 - x0, y1 - y0]
                found.append(dict(image_id=plan.image_id, category_id=label, score=score, bbox=box))
    figures = coco_ap(dict(annotations=truth), found)
    return dict(val_loss=loss, **{name: figures[name] for name in RESULTS})

def finish(model, data, c, device, folder):
    """What is measured once, when training is over: here nothing."""
    return {}

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

def train_step(net, batches, c, optimizer, scaler, autocast):
    """One optimiser step on the micro-batches together -> loss, norm of the gradients."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with autocast:
            loss = loss_of(net, batch, c) / (c.grad_accum_steps * WORLD)
        scaler.scale(loss).backward()
        total += loss.detach()
    if WORLD > 1:  # sums over the processes
        for tensor in [total, *(p.grad for p in net.parameters() if p.grad is not None)]:
            dist.all_reduce(tensor)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip or math.inf)
    scaler.step(optimizer)  # in float16: not where gradients overflowed
    scaler.update()
    return total.item(), norm.item()

def train(c, folder=None, data=None):
    """Train a model as c says: `for step, model, log in train(c, folder): look at what you like`.

    It yields at once, and after each step with the step's gradients, clipped, still there; log is
    a list of dicts of figures. Batch and dropout of a step follow from seed and step number, so a
    run that was stopped goes on from its last checkpoint, in folder, bit for bit. data: as
    load_data makes them, or a SimpleNamespace of your own with what get_batch and evaluate read.
    """
    device, dtype = pick_device(c)
    this_id = run_id(c, data) if folder else None
    if data is None:
        data = load_data(c)
    torch.manual_seed(c.seed)  # for parameters of your own
    model = make_model(c, data).to(device)
    optimizer = make_optimizer(model, c)
    peak_lrs = [group['lr'] for group in optimizer.param_groups]
    autocast, scaler = mixed_precision(device, dtype)
    print(f'model   {c.variant}, {count(model):,} parameters, on {device} in {str(dtype)[6:]}\n'
          f'data    {getattr(data, "about", "handed in")}\n'
          f'folder  {folder or "none: nothing is kept"}')

    # go on where a run stopped
    start, seconds, skipped, log = 0, 0.0, 0, []
    if folder and Path(folder, 'ckpt.pt').exists() and not c.fresh:
        saved = load_checkpoint(Path(folder, 'ckpt.pt'))
        if saved['run_id'] != this_id and not c.reuse:
            fail(f'{folder} holds a run of other settings, code or data: name another folder')
        model.load_state_dict(saved['model'])
        optimizer.load_state_dict(saved['optimizer'])
        scaler.load_state_dict(saved['scaler'])
        start, seconds, skipped, log = saved['progress']
        state = 'is finished' if start == c.max_iters else f'goes on from step {start}'
        print(f'note    this run {state} ({show(log[-1])}); --fresh trains it anew')
    if folder and (not log or start < c.max_iters):
        write_file(Path(folder, 'config.json'), json.dumps(describe(c, model), indent=1).encode())

    def save(name):
        if folder and RANK == 0:
            save_checkpoint(Path(folder, name), dict(
                model=model.state_dict(), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), config=asdict(model.config), run_id=this_id,
                progress=(step, seconds, skipped, log)))
            write_csv(Path(folder, 'log.csv'), log)

    net = torch.compile(model) if c.compile else model
    losses = []  # since the last evaluation
    for step in range(start, c.max_iters + 1):
        last_step = step == c.max_iters

        # evaluate before the first step, every eval_interval steps, and after the last one
        due = last_step or step % c.eval_interval == 0
        known = log and log[-1]['step'] == step  # from the checkpoint
        if due and not known:
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            with autocast:
                row.update(evaluate(model.eval(), data, c, device))
            log.append(row)
            if row[METRIC] == BETTER(one[METRIC] for one in log):
                save('best.pt')
            if last_step:
                if WORLD > 1:
                    dist.barrier()  # until best.pt is there
                row.update(finish(model, data, c, device, folder))
                if scaler.is_enabled():
                    row['skipped'] = skipped  # steps whose gradients overflowed
            save('ckpt.pt')
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
            losses = []
        yield step, model, log
        if last_step:
            return

        # one step on batches that follow from seed and step number
        clock = time.time()
        torch.manual_seed(((c.seed << 24) + step) * WORLD + RANK)  # for dropout
        for group, peak_lr in zip(optimizer.param_groups, peak_lrs):
            group['lr'] = peak_lr * schedule(step, c)
        batches = (get_batch(data, c, step, micro, device) for micro in range(c.grad_accum_steps))
        loss, norm = train_step(net.train(), batches, c, optimizer, scaler, autocast)
        # in float16 an overflow only skips its step, and halves the scale, until that is 1
        overflow = not math.isfinite(norm) and scaler.get_scale() > 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
            raise FloatingPointError(f'loss {loss:g}, gradient norm {norm:g} in step {step}: '
                                     'try a lower --learning-rate, or look at an edited formula')
        skipped += overflow
        losses.append(loss)
        seconds += time.time() - clock
        if (step + 1) % c.log_interval == 0:
            pace = seconds / (step + 1)
            print(f'step {step + 1}/{c.max_iters}, loss {loss:.4f}, {1000 * pace:.0f} ms a step, '
                  f'{(c.max_iters - step - 1) * pace / 60:.1f} min left', flush=True)
# --- end of training loop

# ------------------------------------ report, detect, inspect ------------------------------------
def draw_images(path, panels, c, title=''):
    """A picture of panels, four in a row: title, pixels (H, W, 3), [(score, label, box), ...]."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print(f'no {path.name}: pictures need `pip install matplotlib`')
    across, down = min(4, len(panels)), math.ceil(len(panels) / 4)
    picture = Figure(figsize=(4 * across, 4 * down + 0.5), layout='constrained')
    picture.suptitle(title)
    for i, (name, pixels, found) in enumerate(panels):
        axis = picture.add_subplot(down, across, i + 1, title=name)
        height, width, _ = pixels.shape
        axis.imshow(pixels, extent=(0, width, height, 0))
        axis.autoscale(False)  # boxes may reach beyond the image
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

def model_input(photo, c):
    """Pillow's image -> (3, H, W), in the size that the model takes."""
    return to_tensor(photo, resized(*photo.size, c.image_size, 5 * c.image_size // 3))

def chance(plans):
    """A yardstick: what each image's objects get as the answer for the next image."""
    truth, guesses = [], []
    for plan, other in zip(plans, plans[1:] + plans[:1]):
        truth += plan.notes
        guesses += [dict(note, image_id=other.image_id, score=1.0) for note in plan.notes]
    return coco_ap(dict(annotations=truth), guesses)

@torch.no_grad()
def report(c, model, log):
    """What came out, beside a yardstick, as text; and a picture of some detections."""
    val = load_data(c).val
    plans = [val.plan(row) for row in range(len(val))[:c.eval_rows or 1000]]
    images = val.render(plans[:4])
    outputs = model.eval()(*collate(images, pick_device(c)[0]))
    found = post_process(outputs, [image.shape[1:] for image in images], c.threshold)
    panels = [('', pixels_of(image), boxes) for image, boxes in zip(images, found)]
    draw_images(run_folder(c) / 'detections.png', panels, model.config,
                f'scores above {c.threshold}; DETR does not suppress duplicates')
    guess = chance(plans)
    other = 'admm' if c.cross_attention == 'softmax' else 'softmax'
    return ('result  AP {AP:.3f}, AP50 {AP50:.3f}; '.format(**log[-1])
            + "another image's objects get {AP:.3f}, {AP50:.3f}\n".format(**guess)
            + f'        to compare with: --cross-attention {other}')

@torch.no_grad()
def detect(c):
    """Boxes around what a run finds in photos."""
    if not c.images:
        fail('detect needs --images PHOTO')
    c, model = load_run(c)
    print('classes', ', '.join(name for name in c.classes if name))
    answers = {}
    for i, path in enumerate(c.images, 1):
        photo = read_photo(path, upright=True)
        image = model_input(photo, c)
        outputs = model(image[None].to(pick_device(c)[0]))
        found, = post_process(outputs, [photo.size[::-1]], c.threshold)
        found.sort(reverse=True)
        answers[path] = [(c.classes[label], score, box) for score, label, box in found]
        print(f'{path}: {len(found)} above --threshold {c.threshold}; '
              'score, class, left, top, right, bottom in pixels')
        for name, score, box in answers[path]:
            print(f'  {score:.2f}  {name:20}' + ''.join(f'{v:8.0f}' for v in box))
        panels = [('what the model sees', pixels_of(image), []), ('', np.asarray(photo), found)]
        draw_images(Path(c.out_dir, SCRIPT, f'found-{i}-{Path(path).stem}.png'), panels, c)
    return answers

@torch.no_grad()
def inspect_run(c):
    """Where the decoder of a run looks (OA's Fig. 1), and how sparsely: in --images, or else in
    validation images."""
    c, model = load_run(c)
    if c.images:
        images = [model_input(read_photo(path, upright=True), c) for path in c.images]
    else:
        val = load_data(c).val
        images = val.render([val.plan(row) for row in range(min(8, len(val)))])
    batch, mask = collate(images, pick_device(c)[0])
    calls = []  # of the decoder's attention: module, (q, k, v, padding)
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
        x = module.coefficients(q, k, v, padding)[0].abs()  # (B, nh, Q, N)
        nonzero = (x > 1e-3 * x.amax(-1, keepdim=True)).sum(-1).float()
        energy = torch.linalg.eigvalsh(k.mT @ k)  # (B, nh, hs), rising
        top = energy[..., -1] / energy.sum(-1)
        rows.append(dict(layer=f'{i // 2} {"self" if module.own else "cross"}',
                         attention=module.kind, nonzero=nonzero.mean().item(),
                         top=top.mean().item()))
        print('{layer:10}{attention:22}{nonzero:10.1f}{top:10.3f}'.format(**rows[-1]))
    out = Path(c.out_dir, SCRIPT)
    folder = Path(c.run or out / (out / 'last').read_text())
    write_csv(folder / 'inspect.csv', rows)
    found = post_process(outputs, [image.shape[1:] for image in images])
    draw_attention(folder / 'attention.png', batch[:4], x, model.encode(batch, mask)[3], found, c)
    return rows

def draw_attention(path, batch, x, grid, found, c):
    """A panel for each image and head: the image, bright where the query of its surest box looks.
    x (B, nh, Q, h w) are the last cross-attention's coefficients, grid is (h, w)."""
    panels = []
    for image, boxes, weights in zip(batch, found, x):
        best = np.argmax([score for score, _, _ in boxes])
        for head, weight in enumerate(weights[:, best]):
            light = F.interpolate(weight.view(1, 1, *grid), batch.shape[2:])[0, 0]
            light = 0.25 + 0.75 * light / light.max().clamp_min(1e-12)
            panels.append((f'head {head}', pixels_of(image) * light.cpu().numpy()[..., None],
                           [boxes[best]]))
    draw_images(path, panels, c, 'last layer: where the query of the surest box looks')

# ------------------------------------ tools ------------------------------------
# --- tools (identical in all four scripts; test_all.py checks)
FILE = fail.__code__.co_filename            # of this script, or of a notebook's cell
FOLDER = Path(FILE).resolve().parent
linecache.checkcache(FILE)                  # forget an older text of it
SOURCE = ''.join(linecache.getlines(FILE))  # as it was loaded
CORES = torch.get_num_threads()             # PyTorch's default number of threads

def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

def show(row):
    """A log row's figures as text, without those of single layers (0.mh)."""
    words = []
    for name, x in row.items():
        if name not in ('step', 'seconds') and '.' not in name and not math.isnan(x):
            words.append(f'{name} {x}' if isinstance(x, int) else f'{name} {x:#.4g}')
    return '  '.join(words)

def pick_device(c):
    """Device and dtype of matmuls. CUDA before compute capability 8 only emulates bfloat16."""
    name, dtype = c.device, c.dtype
    if name == 'auto':  # mps is untested: check against --device cpu
        name = ('cuda' if torch.cuda.is_available() else
                'mps' if torch.backends.mps.is_available() else 'cpu')
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        fail(f'--device {name}: PyTorch finds no such device here')
    if name == 'cuda':
        name = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    if name.startswith('cuda'):
        torch.cuda.set_device(name)
    if dtype == 'auto':
        dtype = 'float32'
        if name.startswith('cuda'):
            dtype = 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
    torch.set_num_threads(c.threads or CORES)
    return torch.device(name), getattr(torch, dtype)

def mixed_precision(device, dtype):
    """Matmuls in dtype, and what scales the loss so that float16 can hold its gradients."""
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    half = dtype == torch.float16
    return autocast, torch.amp.GradScaler(device.type, init_scale=2.0 ** 9, enabled=half)

# -------- files
def save_checkpoint(path, state):
    buffer = io.BytesIO()  # on a full disk, torch.save's own error is no OSError
    torch.save(dict(state, script=SCRIPT), buffer)
    write_file(path, buffer.getbuffer())

def load_checkpoint(path, own=True):
    """A checkpoint, of this script unless own is False. Nothing in the file is run."""
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True)
        if own and saved.get('script') != SCRIPT:
            raise ValueError(f'{SCRIPT}.py did not write it')
        return saved
    except Exception as error:  # PyTorch raises half a dozen kinds
        fail(f'{path} is not a usable checkpoint: {" ".join(str(error).split())[:150]}')

def write_csv(path, rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row))
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())

def read_csv(path):
    """-> a dict for each row, with numbers where they are numbers; a case's name stays text."""
    def number(text):
        try:
            return float(text)
        except ValueError:
            return text
    with open(path, newline='', encoding='utf-8-sig') as file:
        return [{key: text if key == 'case' else number(text) for key, text in row.items() if text}
                for row in csv.DictReader(file)]

def write_file(path, content):
    """A .part file, then renamed: a kill midway, or a full disk, leaves the old file whole."""
    if RANK == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix('.part').write_bytes(content)
        os.replace(path.with_suffix('.part'), path)

def draw(path, logs, panels):
    """A panel for each (x, y) or (x, y, dashed y), with a line per log of {label: [log, ...]}."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print(f'no {path.name}: pictures need `pip install matplotlib`')
    picture = Figure(figsize=(5 * len(panels), 4), layout='tight')
    axes = picture.subplots(1, len(panels), squeeze=False)[0]
    for axis, (x, *names) in zip(axes, panels):
        for i, (label, runs) in enumerate(logs.items()):
            axis.plot([], [], '.-', color=f'C{i}', label=label)
            for log in runs:
                for name, line in zip(names, ('.-', '.--')):
                    rows = [row for row in log if name in row and row.get('step') != 0]  # far off
                    axis.plot([row[x] for row in rows], [row[name] for row in rows], line,
                              color=f'C{i}')
        axis.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(names[0], names[0]),
                 title=', dashed: '.join(names))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    png = io.BytesIO()
    picture.savefig(png)
    write_file(path, png.getvalue())
    print(f'picture {path}')

# -------- what names a run
def settings(c):
    """The fields above `device`: what tells one run from another."""
    names = [f.name for f in fields(c)]
    return {name: getattr(c, name) for name in names[:names.index('device')]}

def sources():
    """The texts of this script, of your modules beside it that it imports, and of the notebook
    cells that put functions, classes, methods or rows of theirs into it."""
    things = [*globals().values()]
    for table in [x for x in things if type(x) is dict]:
        things += table.values()
    for kind in [x for x in things if isinstance(x, type)]:
        things += vars(kind).values()
    functions = [inspect.unwrap(x) for x in things if inspect.isfunction(x)]
    files = {x.__code__.co_filename for x in functions if inspect.isfunction(x)}
    files |= {getattr(x, '__file__', None) or '' for x in things if inspect.ismodule(x)}
    texts = {SOURCE}
    for file in files - {FILE}:
        if Path(file).resolve().parent == FOLDER or not Path(file).exists():  # no file: a cell
            texts.add(''.join(linecache.getlines(file)))
    return sorted(texts - {''})

def checksum(x):
    """Of numbers by what they hold, of containers by their parts, of all else by how it prints."""
    if isinstance(x, SimpleNamespace):
        x = vars(x)
    if isinstance(x, dict):
        x = [*x.items()]
    if isinstance(x, (list, tuple)):
        x = [checksum(part) for part in x]
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().numpy()
    if isinstance(x, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(x).view(np.uint8))
    return zlib.crc32(x if isinstance(x, bytes) else repr(x).encode())

def run_name(c, dtype=None):
    """VARIANT-sSEED-SETTINGS: the last a checksum of c's settings with the dtype in use."""
    facts = {**settings(c), 'dtype': dtype or str(pick_device(c)[1])[6:]}
    return f'{c.variant}-s{c.seed}-{checksum(repr(facts)):08x}'

def run_id(c, data=None):
    """run_name, and a checksum of the code and the data: files, or what was handed to train."""
    content = data
    if data is None:
        paths = [path for path in data_files(c) if path.is_file()]
        small = sum(path.stat().st_size for path in paths) < 2 ** 28
        content = [path.read_bytes() if small else (path.name, path.stat().st_size)
                   for path in paths]
    return f'{run_name(c)}-{checksum([sources(), content]):08x}'

def run_folder(c, data=None):
    """out/SCRIPT/VARIANT-sSEED-SETTINGS-CODE: any change of settings, code or data trains anew.
    --reuse takes the newest finished run of these settings, whatever has been edited since."""
    out = Path(c.out_dir, SCRIPT)
    folder = out / run_id(c, data)
    logs = sorted(out.glob(run_name(c) + '-*/log.csv'), key=os.path.getmtime, reverse=True)
    if c.reuse and not c.fresh:
        for log in logs:
            if read_csv(log)[-1]['step'] == c.max_iters:
                if log.parent != folder:
                    print(f'note    --reuse takes {log.parent}: code or data have changed since')
                return log.parent
    for dtype in ('float32', 'bfloat16', 'float16'):
        if not logs and any(out.glob(run_name(c, dtype) + '-*/log.csv')):
            print(f'note    a run of these settings exists in {dtype}; this one is another')
    return folder

def describe(c, model):
    """What a person, or a row of runs.csv, has to know of a run."""
    device, dtype = pick_device(c)
    machine = platform.processor() or platform.machine()
    if device.type == 'cuda':
        machine = f'cuda {torch.cuda.get_device_capability()}'
    elif Path('/proc/cpuinfo').exists():  # Linux
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        machine = next((x.partition(': ')[2] for x in lines if x.startswith('model name')), machine)
    blob = SOURCE.encode()
    blob = hashlib.sha1(b'blob %d\0' % len(blob) + blob).hexdigest()  # git's name for the script
    return dict(settings(c), dtype=str(dtype)[6:], script=blob, parameters=count(model),
                torch=torch.__version__, python=platform.python_version(), machine=machine)

# -------- train
def load_run(c):
    """The best weights of --run, or of train's last run -> c with its settings, and its model."""
    out = Path(c.out_dir, SCRIPT)
    if not c.run and not (out / 'last').exists():
        fail(f'no run in {out}: train first, or name a folder with --run')
    saved = load_checkpoint(Path(c.run or out / (out / 'last').read_text(), 'best.pt'))
    kept = {name: x for name, x in saved['config'].items() if name in settings(c)}
    c = replace(c, **{**kept, 'seed': c.seed})
    model = make_model(c, None).to(pick_device(c)[0])
    model.load_state_dict(saved['model'])
    return c, model.eval()

def train_to_end(c, folder):
    """Train as far as the run in folder is not yet -> model, log."""
    log = []
    try:
        for step, model, log in train(c, folder):
            pass
    except KeyboardInterrupt:
        where = f' from step {log[-1]["step"]}' if log else ''
        raise KeyboardInterrupt(f'in training; without --fresh, the same command goes on{where}')
    return model, log

def train_and_report(c):
    folder = run_folder(c)
    model, log = train_to_end(c, folder)
    if RANK == 0:
        draw(folder / 'curves.png', {c.variant: [log]}, [('step', 'loss'), ('step', METRIC)])
        write_file(folder.parent / 'last', folder.name.encode())  # for load_run
        print(report(c, model, log))
    return dict(log[-1], log=log, folder=folder)

# -------- compare
def cases_of(c):
    """{name: Config}, the baseline first: rows of --table, every combination of --over FIELD=A,B,
    or both crossed."""
    types = {f.name: f.type for f in fields(c)}
    cases = {'': {}} if c.over and not c.table else TABLES[c.table or next(iter(TABLES))]
    for spec in c.over:
        field, _, texts = spec.partition('=')
        field = field.replace('-', '_')
        if field not in types or types[field] is list or not texts:
            fail(f'--over {spec}: needs FIELD=A,B, a field of --help and its values')
        values = values_of(f'--over {field}', texts, types[field])
        cases = {f'{name} {text}'.strip(): {**case, field: value}
                 for name, case in cases.items() for text, value in values.items()}
    cases = {name: replace(c, **case) for name, case in cases.items()}
    return dict(sorted(cases.items(), key=lambda item: not is_baseline(vars(item[1]))))

def is_baseline(row):
    return all(row[name] == value for name, value in BASELINE.items())

def values_of(flag, text, kind):
    """'1,2' -> {'1': 1, '2': 2}, ints, floats, bools or texts by kind."""
    booleans = dict(true=True, false=False)
    try:
        return {word: booleans[word.lower()] if kind is bool else kind(word)
                for word in text.split(',')}
    except (ValueError, KeyError):
        fail(f'{flag} {text}: needs values of type {kind.__name__}, with commas')

def train_all(cases, seeds, role, path, rows):
    """Train every case with every seed: a row in rows, and in the csv at path, for each run."""
    begin, n = time.time(), len(seeds) * len(cases)
    for i, (seed, (case, c)) in enumerate(itertools.product(seeds, cases.items())):
        left = f', about {(time.time() - begin) / i * (n - i) / 60:.0f} min left' if i else ''
        print(f'\n{case}, seed {seed}: run {i + 1} of {n}{left}')
        c = replace(c, seed=seed)
        folder = run_folder(c)
        try:
            _, log = train_to_end(c, folder)
            figures = {name: x for name, x in log[-1].items() if '.' not in name}
            losses = [row['loss'] for row in log if 'loss' in row] or [math.nan]  # over the steps
            figures['mean_loss'] = sum(losses) / len(losses)
            if math.isnan(figures[METRIC]):
                raise FloatingPointError(f'{METRIC} is nan')
        except FloatingPointError as error:
            print(f'counts as worst: {error}')
            worst = math.inf if BETTER is min else -math.inf
            figures = {**dict.fromkeys([METRIC, *RESULTS], worst), 'seconds': math.nan,
                       'mean_loss': math.nan}
        about = json.loads((folder / 'config.json').read_text('utf-8'))
        rows.append(dict(case=case, role=role, **about, **figures, run=folder.name))
        write_csv(path, rows)

def compare(c):
    """Train every case with every seed on the same batches; differences are paired by seed."""
    out = Path(c.out_dir, SCRIPT)
    folder = out / f'compare-{checksum([repr(c), sources()]):08x}'
    rows, final = [], values_of('--final-seeds', c.final_seeds, int) if c.final_seeds else {}
    if c.from_csv:
        for path in c.from_csv.split(','):
            rows += read_csv(path)
    else:
        cases, seeds = cases_of(c), values_of('--seeds', c.seeds, int)
        if {*seeds.values()} & {*final.values()} or (final and not c.best):
            fail('--final-seeds judge what --best chose by other --seeds')
        if c.best and len({vars(own).get(c.best) for own in cases.values()}) < 2:
            fail(f'--best {c.best}: needs --over {c.best}=A,B, the values to choose from')
        if len({run_name(own) for own in cases.values()}) < len(cases):
            fail('two cases have the same settings: no run can be compared with itself')
        role = 'choosing' if final else 'judging'
        train_all(cases, seeds.values(), role, folder / 'runs.csv', rows)

    if c.best:
        choosing = [row for row in rows if row['role'] == 'choosing'] or rows
        chosen = choose(c.best, choosing, folder)
        if final and not c.from_csv:
            best = {case: cases[case] for case in chosen}
            train_all(best, final.values(), 'judging', folder / 'runs.csv', rows)
        rows = [row for row in rows if row['case'] in chosen]
    judging = [row for row in rows if row['role'] == 'judging']
    if not judging:
        fail('all of these runs chose, and none judges yet')
    table = tabulate(judging, c.figure or RESULTS[0])
    logs = {line['case']: [] for line in table}
    for row in judging:
        if (out / row['run'] / 'log.csv').exists():
            logs[row['case']].append(read_csv(out / row['run'] / 'log.csv'))
    draw(folder / 'compare.png', logs, [('step', METRIC), ('step', 'loss'), ('seconds', METRIC)])
    return table

def choose(field, rows, folder):
    """Of cases that differ only in `field`, those with the best mean METRIC; all are drawn."""
    runs_of, groups, best, lines = {}, {}, [], {}
    for row in rows:
        runs_of.setdefault(row['case'], []).append(row)
    for case, runs in runs_of.items():
        others = [runs[0].get(name) for name in settings(Config()) if name not in (field, 'seed')]
        groups.setdefault(repr(others), []).append(case)
    means = {case: np.mean([run[METRIC] for run in runs]) for case, runs in runs_of.items()}
    print(f'\n{METRIC} by {field}: mean x number of runs. Left: the case they choose.\n'
          '*: at an end of the range, so a better one may lie beyond it')
    for group in groups.values():
        group.sort(key=lambda case: runs_of[case][0][field])
        best.append(BETTER(group, key=means.get))
        end = ' *' if best[-1] in (group[0], group[-1]) else ''
        text = f'{best[-1] + end:24}'
        for case in group:
            value = str(runs_of[case][0][field]).removesuffix('.0')  # a csv has 3.0 for 3
            text += f'{value}: {means[case]:.4f} x {len(runs_of[case])}   '
        print(text.rstrip())
        line = [{field: runs_of[case][0][field], METRIC: means[case]} for case in group]
        lines[best[-1]] = [line]
    draw(folder / f'{field}.png', lines, [(field, METRIC)])
    return best

def deviation(values):
    """Standard deviation, nan of a single value."""
    return np.std(values, ddof=1) if len(values) > 1 else math.nan

def student(gaps, tests=1):
    """Of paired differences: half the interval of their mean that holds at 95 % for all of so many
    tests together (Bonferroni), and the two-sided p that this one's mean is 0.
    With t = sqrt(n - 1) tan(a), the angle a has a density proportional to cos(a)^(n - 2)."""
    n, error = len(gaps), deviation(gaps) / max(1, len(gaps)) ** 0.5  # of the mean
    if not error > 1e-9 * abs(np.mean(gaps)):  # too few, or always the same
        return math.nan, math.nan
    angle = np.linspace(0, math.pi / 2, 100_001)[:-1]
    t = (n - 1) ** 0.5 * np.tan(angle)
    chance = np.cumsum(np.cos(angle) ** (n - 2))
    chance /= chance[-1]  # of a |t| up to this one
    half = error * t[np.searchsorted(chance, 1 - 0.05 / tests)]
    return half, 1 - np.interp(abs(np.mean(gaps)) / error, t, chance)

@np.errstate(all='ignore')  # a diverged run's figures are infinite
def tabulate(rows, figure):
    """Print rows of runs.csv by case, with a figure's differences from the baseline, or else the
    first case -> a dict for each line of the table."""
    if figure not in rows[0]:
        fail(f'--figure {figure}: choose from {", ".join(rows[0])}')
    others = [name for name in (*RESULTS, 'seconds', 'skipped')  # skipped: steps, in float16
              if name in rows[0] and name != figure]
    cases, table = {}, []
    for row in sorted(rows, key=lambda row: not is_baseline(row)):
        if cases.setdefault(row['case'], {}).setdefault(row['seed'], row) is not row:
            fail(f'{row["case"]}, seed {row["seed"]:g}: two runs; tabulate an experiment at a time')
    first, *rest = cases.values()
    tests = max(1, sum(len(runs) > 1 for runs in rest))
    print(f'\n{figure} of {len(first)} seeds. diff: from row 1, paired by seed. +-: at 95 %\n'
          f'together (Bonferroni, {tests} tested). p: for a row alone. Other columns are means.\n'
          f'{"":24}{"size":>7}{"mean":>9}{"sd":>8}{"diff":>9}{"+-":>8}{"p":>8}'
          + ''.join(f' {name:>9}' for name in others))
    for case, runs in cases.items():
        values = [run[figure] for run in runs.values()]
        gaps = [run[figure] - first[seed][figure] for seed, run in runs.items() if seed in first]
        size = next(iter(runs.values()))['parameters'] / 1e6
        half, p = student(gaps, tests)
        line = dict(case=case, size=size, mean=np.mean(values), sd=deviation(values),
                    diff=np.mean(gaps) if gaps else math.nan, interval=half, p=p)
        for name in others:
            line[name] = np.mean([run.get(name, math.nan) for run in runs.values()])
        table.append(line)
        text = '{size:6.2f}M{mean:9.4f}{sd:8.4f}{diff:+9.4f}{interval:8.4f}{p:8.2g}'.format(**line)
        for name in others:
            text += f' {line[name]:{max(9, len(name))}.4g}'
        print(f'{case:24}' + text.replace('nan', '  -'))
    return table

def bench(c):
    """Time a training step of every case in turn, so that noise hits all."""
    cases, data, models, times = cases_of(c), load_data(c), {}, {}
    for case, own in cases.items():
        device, dtype = pick_device(own)
        model = make_model(own, data).to(device).train()
        net = torch.compile(model) if own.compile else model
        models[case] = net, device, make_optimizer(model, own), *mixed_precision(device, dtype)
        times[case] = []
    # the last steps, where a ViT's images are largest; two more to warm up
    for step in range(c.max_iters, c.max_iters + c.rounds + 2):
        for case, (net, device, optimizer, autocast, scaler) in models.items():
            own = cases[case]
            batches = [get_batch(data, own, step, i, device) for i in range(own.grad_accum_steps)]
            clock = time.perf_counter()
            train_step(net, batches, own, optimizer, scaler, autocast)  # ends in .item()
            times[case].append(time.perf_counter() - clock)
    print('\nmedian training step, and its ratio to the first case: median (quartiles)')
    first = np.array(next(iter(times.values())))
    for case, own in times.items():
        low, ratio, high = np.percentile((own / first)[2:], [25, 50, 75])
        print(f'{case:24}{1000 * np.median(own[2:]):9.1f} ms{ratio:8.3f} ({low:.3f}-{high:.3f})')
    return times

# -------- the command line
def parse(argv):
    """argv -> action, Config."""
    words = list(sys.argv[1:] if argv is None else argv)
    action = words.pop(0) if words and not words[0].startswith('-') else 'train'
    if action not in ACTIONS:
        fail(f'{action}: choose from {", ".join(ACTIONS)}')
    p = argparse.ArgumentParser(
        usage=f'{SCRIPT}.py [{" | ".join(ACTIONS)}] [--flag value ...]',
        description=SOURCE.partition('class Config:\n')[2].partition('    def ')[0],
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
        allow_abbrev=False)
    p.error = lambda message: fail(f'{message} (see --help)')
    p.add_argument('--preset', choices=PRESETS, default='tiny', help='settings; flags override')
    flags = ['--preset', *('--' + f.name.replace('_', '-') for f in fields(Config))]
    kinds = {bool: dict(action=argparse.BooleanOptionalAction), list: dict(action='append')}
    for f, flag in zip(fields(Config), flags[1:]):
        p.add_argument(flag, '--' + f.name, help=argparse.SUPPRESS,
                       **kinds.get(f.type, dict(type=f.type)))
    given, unknown = p.parse_known_args(words)
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition('=')[0], flags, 1)
        fail(f'{unknown[0]}: no such flag' + (f'; do you mean {near[0]}?' if near else ''))
    given = vars(given)
    if 'best' in given:
        given['best'] = given['best'].replace('-', '_')
    preset = given.pop('preset')
    if preset == 'tiny' and torch.cuda.is_available():
        print(f'note    a small model; for a GPU there is --preset t4: {PRESETS["t4"]}')
    return action, Config(**{**PRESETS[preset], **given})

def main(argv=None):
    """Do what the command line says -> the figures that came out."""
    if RANK:
        sys.stdout = open(os.devnull, 'w')
    action, c = parse(argv)
    pick_device(c)
    if WORLD > 1:
        dist.init_process_group()
    try:
        return ACTIONS[action](c)
    except KeyboardInterrupt as stop:
        print('\nstopped', stop)
        raise SystemExit(130)
    except torch.OutOfMemoryError:
        message = 'out of memory: a smaller --batch-size with more --grad-accum-steps needs less'
    except (ImportError, OSError, FloatingPointError) as error:  # no package, disk full, loss nan
        message = str(error)
    finally:
        if WORLD > 1:
            dist.destroy_process_group()
    fail(message)  # out here, where a notebook's memory of the error keeps no tensors alive
# --- end of tools

ACTIONS = {'train': train_and_report, 'compare': compare, 'bench': bench, 'inspect': inspect_run,
           'detect': detect}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    sys.stdout.reconfigure(errors='replace')  # for terminals that cannot show every character
    main()
