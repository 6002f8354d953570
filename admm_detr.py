# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""DETR whose decoder attends by solving a Lasso: sparse reconstruction instead of softmax.

Attention mixes values with coefficients softmax(QK^T). Here a query's coefficients x are instead
those that rebuild it from few tokens: min ||q - x^T K||^2 + lambda ||x||_1, with no weights at all.
The equations printed in the paper do not solve this problem; textbook ADMM does, and it is exact,
differentiable and linear in the number of tokens with one d x d Cholesky factor per head.

    OA   Ackermann et al., Optimizing Attention; K is what it calls V

    equation       what                                                      function
    [OA Sec. 2]    softmax(QK^T / sqrt(d)), with weights                     softmax
    [OA Sec. 4.1]  the same of the tokens as they are                        no_weights
    [OA Eq. 1]     min ||q - x^T K||; [choice] squared, + rho ||x||^2        l2, ridge
    [OA Eq. 2]     min ||q - x^T K||^2 + lambda ||x||_1                      lasso, admm, objective
    [OA Eq. 3]     the same by an N x N inverse                              admm_vanilla
    [OA Eq. 4]     the inverse in d x d, as it should read                   ridge, lasso
    [OA Eq. 3], [OA Eq. 4] to the letter: --updates printed                  printed
    [OA Sec. 3]    x^5 / sum |x^5|; random tokens; clamp; x_ii = 0           sharpen, printed, lasso

    python admm_detr.py                                  # train: 5 minutes on a CPU, no network
    python admm_detr.py detect photo.jpg other.png       # what the newest run finds in images
    python admm_detr.py compare --table 1 --seeds 0,1    # the paper's tables: 1 and 2
    python admm_detr.py bench                            # time and memory of solvers and variants
    python admm_detr.py inspect                          # where the decoder looks: OA's Fig. 1
    python admm_detr.py --preset t4                      # detr-r50, attention replaced, fine-tuned
    python admm_detr.py --preset paper                   # OA's recipe: 300 epochs of COCO train2017

What OA leaves open: [choice] tokens with positions (DETR's keys) are what is solved over, those
without (its values) are what is mixed, because solving and mixing over the same tokens nearly gives
back the query (--dict value does); no output projection (--out-proj keeps it); no dropout of what
is solved for; no weights means that heads are slices of the channels. The model follows
facebookresearch/detr, with its keys; the tests hold it against outputs of the original. What was
measured, and on what, stands in README.md.
"""
import argparse, concurrent.futures, contextlib, copy, csv, functools, hashlib, inspect
import itertools, json, math, os, re, shutil, signal, statistics, struct, sys, zipfile, zlib
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter as now
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ------------------------------------ configuration ------------------------------------

@dataclass
class Config:
    """Every flag of the command line. A comment may open with a condition on the value x."""
    # the paper's method
    self_attention: str = 'softmax'  # x in ATTENTION: of the decoder's queries to each other
    cross_attention: str = 'admm'  # x in ATTENTION: of the decoder's queries to the image
    dict: str = 'key'              # x in ('key', 'value'): tokens to solve over; mixed are values
    out_proj: bool = False         # keep the output projection of attention without weights
    updates: str = 'textbook'      # x in ('textbook', 'printed'): ADMM, or the paper's own formulas
    iterations: int = 15           # 1 <= x <= 10000: of ADMM
    sparsity: float = 0.03         # 0 < x <= 1: lambda, as a share of the least that makes x zero
    rho: float = 0.1               # 1e-3 <= x <= 1e3: in units of K^T K's mean eigenvalue
    relax: float = 1.6             # 0 < x < 2: over-relaxation; 1 for none
    power: int = 5                 # x in (0, 1, 3, 5): of coefficients, then normalised; 0: as is
    recompute: bool = False        # gradient checkpointing: solve again in the backward pass
    # model
    backbone: str = 'small'        # x in ('small', 'resnet50'): small: convolutions with GroupNorm
    stride: int = 8                # x in (4, 8, 16, 32): pixels per token of the small backbone
    hidden_dim: int = 64           # x >= 4 and x % 4 == 0: channels
    nheads: int = 4                # x >= 1: heads
    enc_layers: int = 2            # x >= 0: encoder layers
    dec_layers: int = 2            # x >= 1: decoder layers
    dim_feedforward: int = 128     # x >= 1: hidden channels of the feed-forward networks
    dropout: float = 0.0           # 0 <= x < 1: probability
    num_queries: int = 12          # x >= 1: object queries, several times the most objects
    num_classes: int = 0           # 0 <= x <= 1e6: at least as many as the data has
    classes: str = ''              # names of the classes, a comma between; the data knows them
    class_ids: str = ''            # their ids in the data's annotations
    init: str = ''                 # file with weights to start from: detr-r50, or a ResNet-50
    # losses; the matching weighs alike
    bbox_loss_coef: float = 5.0    # 0 <= x < 1e9: weight of the L1 distance in the loss
    giou_loss_coef: float = 2.0    # 0 <= x < 1e9: weight of generalised IoU in the loss
    eos_coef: float = 0.1          # 0 < x <= 1: weight of the class no-object in the loss
    # data
    data: str = 'builtin'          # name under data/, a folder like COCO's, or builtin: shapes
    image_size: int = 64           # 16 <= x <= 4096: pixels of the shorter side
    # training
    max_iters: int = 2000          # x >= 0: optimiser steps
    batch_size: int = 32           # 1 <= x <= 1e6: images in memory at once, per process
    grad_accum_steps: int = 1      # 1 <= x <= 1e6: batches in an optimiser step, over all processes
    learning_rate: float = 1e-3    # 0 < x <= 100: at its peak
    lr_backbone: float = 1e-3      # 0 <= x <= 100: of the backbone
    min_lr: float = 5e-5           # 0 <= x <= 100: where the cosine ends, below that peak
    schedule: str = 'cosine'       # x in ('cosine', 'trapezoid', 'step', 'constant'): after warmup
    warmup_iters: int = 100        # x >= 0: steps of linear warmup
    warmdown_iters: int = 0        # x >= 0: last steps, down to 0 (trapezoid) or at 0.1 (step)
    weight_decay: float = 1e-4     # 0 <= x <= 100: AdamW's, on everything
    beta1: float = 0.9             # 0 <= x < 1: AdamW's first moment
    beta2: float = 0.999           # 0 <= x < 1: AdamW's second moment
    grad_clip: float = 0.1         # 0 <= x < 1e9: largest gradient norm; 0 for no clipping
    eval_interval: int = 250       # x >= 1: steps between evaluations, and between checkpoints
    eval_rows: int = 0             # 0 <= x <= 1e6: validation images; 0 for all there are
    log_interval: int = 10         # x >= 1: steps between lines in log.csv
    max_minutes: float = 0.0       # 0 <= x < 1e9: save and stop a run after so long; 0: never
    # machine
    seed: int = 1337               # 0 <= x < 2**32: of weights, batches and dropout
    device: str = 'auto'           # x.startswith(('auto', 'cpu', 'cuda', 'mps')): say cuda:1
    dtype: str = 'auto'            # x in ('auto', 'float32', 'bfloat16', 'float16'): of matmuls
    compile: bool = False          # torch.compile the model
    threads: int = 1               # 0 <= x <= 1024: CPU threads; 0 for PyTorch's default
    out_dir: str = 'out'           # where runs are written

    def __post_init__(self):
        check(self)
        if self.hidden_dim % self.nheads:
            raise ValueError(f'--hidden-dim {self.hidden_dim} must be a multiple of --nheads '
                             f'{self.nheads}')
        if self.updates == 'printed' and self.iterations > 20:
            raise ValueError(f'--iterations {self.iterations}: --updates printed doubles its state '
                             'in each, and takes 20 at most')

    @property
    def variant(self):
        return (f'sa-{self.self_attention}-ca-{self.cross_attention}' + '-out' * self.out_proj
                + '-value' * (self.dict == 'value') + '-printed' * (self.updates == 'printed'))

DETR_R50 = dict(backbone='resnet50', hidden_dim=256, nheads=8, enc_layers=6, dec_layers=6,
                dim_feedforward=2048, dropout=0.1, num_queries=100, learning_rate=1e-4,
                lr_backbone=1e-5, schedule='step', warmup_iters=0, recompute=True, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(DETR_R50, data='coco', init='data/weights/detr-r50.pth',
               image_size=480, batch_size=2, grad_accum_steps=8, max_iters=600, warmdown_iters=150,
               eval_interval=200),
    # OA: 4 GPUs with 8 images each and "original" rates; DETR's own 300 epochs of 3696 steps,
    # the last 100 of them at a tenth of the rate, since OA states none
    'paper': dict(DETR_R50, data='coco', init='data/weights/resnet50.pth',
                  image_size=800, batch_size=8, grad_accum_steps=4, max_iters=1108800,
                  warmdown_iters=369600, eval_interval=3696, dtype='float32'),
}
TABLES = {  # `compare --table NAME`: rows of settings, the paper's experiments
    # OA Table 1: AP 40.6 (300 epochs), 38.5, 36.0, 38.5, 37.7
    '1': {'DETR': dict(self_attention='softmax', cross_attention='softmax'),
          'no weights SA': dict(self_attention='no-weights', cross_attention='softmax'),
          'no weights CA': dict(self_attention='softmax', cross_attention='no-weights'),
          'ADMM SA': dict(self_attention='admm', cross_attention='softmax'),
          'ADMM CA': dict(self_attention='softmax', cross_attention='admm')},
    # OA Table 2: AP 28.0, 38.0, 38.5
    '2': {'l2 CA': dict(self_attention='softmax', cross_attention='l2'),
          'vanilla ADMM SA': dict(self_attention='admm-vanilla', cross_attention='softmax'),
          'efficient ADMM SA': dict(self_attention='admm', cross_attention='softmax')},
}

# ------------------------------------ the paper's method ------------------------------------
# A query q has coefficients x, one per token, and passes on x^T V. Shapes: q (B, nh, Q, hs), tokens
# k and v (B, nh, N, hs), x (B, nh, Q, N). With `own`, queries and tokens are the same sequence.

def without_own(x, own=True):
    """x (..., Q, N), with `own` zero where a query meets itself."""
    diagonal = torch.eye(*x.shape[-2:], dtype=torch.bool, device=x.device)
    return x.masked_fill(diagonal, 0) if own else x

def scales(q, k, sparsity, rho, own=False):
    """lambda (B, nh, Q, 1) and rho (B, nh, 1, 1) from relative settings.

    At sparsity 1, lambda = 2 max |K q|, nothing is left of x; a rho of 1 is the mean eigenvalue of
    K^T K. So a solution changes with the lengths of q and k by a factor alone, down to some 1e-4.
    """
    products = without_own((q @ k.mT).abs(), own)
    mean = k.square().sum((-2, -1), keepdim=True) / k.size(-1)
    return 2 * sparsity * products.amax(-1, keepdim=True), (rho * mean).clamp_min(1e-8)

def ridge(k, rho):
    """P = (K^T K + rho I)^-1 K^T  (B, nh, hs, N): q P minimises ||q - x^T K||^2 + rho ||x||^2.

    It equals K^T (K K^T + rho I)^-1, so no N x N matrix is ever made.  [OA Eq. 4]
    """
    eye = torch.eye(k.size(-1), dtype=k.dtype, device=k.device)
    factor, _ = torch.linalg.cholesky_ex(k.mT @ k + rho * eye)  # K^T K + rho I >= rho I: it exists
    return torch.cholesky_solve(k.mT, factor)

def lasso(q, k, own=False, sparsity=0.03, rho=0.1, iterations=15, relax=1.6, vanilla=False):
    """argmin_x ||q - x^T K||^2 + lambda ||x||_1, by over-relaxed ADMM  [OA Eq. 2]

    -> x (B, nh, Q, N). Tokens that are zero get 0, and so does, with `own`, the query's own token:
    the proximal step of the l1 norm under the constraint x_ii = 0 zeroes that entry, and ADMM still
    converges. `vanilla` takes the N x N inverse: the same x up to rounding.  [OA Eq. 3]
    """
    penalty, rho = scales(q, k, sparsity, rho, own)
    unit = penalty / (2 * rho)                                              # (B, nh, Q, 1)
    q = q / torch.where(unit > 0, unit, 1)  # so that in these units the threshold of (3b) is 1
    if vanilla:
        eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
        products, inverse = q @ k.mT, torch.linalg.inv_ex(k @ k.mT + rho * eye)[0]
        nearest = lambda w: (products + rho * w) @ inverse
    else:
        P = ridge(k, rho)
        nearest = lambda w: w + (q - w @ k) @ P  # the same: ridge regression of what w leaves over
    sparse = lambda v: without_own(F.softshrink(v, 1.0), own)
    v = q.new_zeros(()).expand(*q.shape[:-1], k.size(-2))
    for _ in range(iterations):
        z = sparse(v)                # argmin lambda ||z||_1 + rho ||z - v||^2              (3b)
        u = v - z                    # the running sum of x - z: what the constraint costs  (3c)
        x = nearest(z - u)           # argmin ||q - x^T K||^2 + rho ||x - (z - u)||^2       (3a)
        v = torch.add(v, x - z, alpha=relax)                                # x + u if relax is 1
    return sparse(v) * unit

def objective(x, q, k, penalty):
    """||q - x^T K||^2 + lambda ||x||_1 of every query, (B, nh, Q).  [OA Eq. 2]"""
    return (q - x @ k).square().sum(-1) + penalty.squeeze(-1) * x.abs().sum(-1)

def printed(q, k, own=False, sparsity=0.03, rho=0.1, iterations=15, vanilla=False, tokens=32,
            sigma=1e-4):
    """Equations (3) or (4) to the letter -> x (B, nh, Q, N + tokens). They do not solve the Lasso.

    The sign of mu in (3b) contradicts (3c), so that past the threshold the state doubles, or worse,
    in every iteration; the fixed point of (3) is ridge regression, whatever lambda is; (4) has
    D^1/2 where the spectrum is D, and no complement of the range of V.  [OA Eq. 3] [OA Eq. 4]
    Random tokens, a jitter of up to sigma and clamping are as in [OA Sec. 3]; [choice] 32, 1e-4, 1.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(tokens, k.size(-1), generator=generator)
    k = torch.cat([k, random.to(k).expand(*k.shape[:2], -1, -1)], dim=2)    # (B, nh, N + n, hs)
    penalty, rho = scales(q, k, sparsity, rho, own)
    products, threshold = q @ k.mT, penalty / rho
    if vanilla:
        eye = torch.eye(k.size(-2), dtype=k.dtype, device=k.device)
        inverse = torch.linalg.inv_ex(k @ k.mT + rho * eye)[0]
        solve = lambda r: r @ inverse
    else:
        jitter = torch.diag(sigma * torch.rand(k.size(-1), generator=generator)).to(k)
        D, X = torch.linalg.eigh(k.mT @ k + jitter)
        Y, S = k @ X * D.rsqrt()[..., None, :], D.sqrt() + rho.squeeze(-1)
        solve = lambda r: (r @ Y / S[..., None, :]) @ Y.mT
    x = z = mu = torch.zeros_like(products)
    for _ in range(iterations):
        new = solve(products + rho * (x - z))                               # (3a)
        new = without_own(new, own).clamp(-1, 1)
        z = x - mu - (x - mu).clamp(-threshold, threshold)                  # (3b), x of before
        x, mu = new, mu + new - z                                           # (3c)
    return x

def sharpen(x, power=5):
    """x^5 / sum |x^5|, safely: rows of zeros stay, tiny ones fade to zero.  [OA Sec. 3]

    Scaled by its largest entry first (the result does not change), x^5 neither underflows nor blows
    the gradient up. Power 0 leaves x as it is.
    """
    if not power:
        return x
    y = (x / x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-6)) ** power
    return y / y.abs().sum(-1, keepdim=True).clamp_min(1)

# One signature: q, k, padding (B, N) or None, own, config -> coefficients x (B, nh, Q, N). The two
# with softmax train through the fused kernel instead, in MultiheadAttention.forward.

def softmax(q, k, padding, own, c):
    """softmax(QK^T / sqrt(hs)), standard attention.  [OA Sec. 2]"""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return (scores if padding is None
            else scores.masked_fill(padding[:, None, None], -math.inf)).softmax(-1)

def no_weights(q, k, padding, own, c):
    """softmax(QK^T / sqrt(hs)) of the tokens as they are.  [OA Sec. 4.1]"""
    return softmax(q, k, padding, own, c)

def real(k, padding):
    """Tokens, with zeros for padding: the Lasso and ridge regression give those no weight."""
    return k if padding is None else k.masked_fill(padding[:, None, :, None], 0)

def l2(q, k, padding, own, c):
    """argmin ||q - x^T K||^2 + rho ||x||^2, sharpened.  [OA Eq. 1]"""
    k = real(k, padding)
    P = ridge(k, scales(q, k, c.sparsity, c.rho)[1])
    x = q @ P
    if own:  # the best x with x_ii = 0 moves along column i of rho (K K^T + rho I)^-1 = I - K P
        column = torch.eye(x.size(-1), dtype=x.dtype, device=x.device) - k @ P
        share = x.diagonal(0, -2, -1) / column.diagonal(0, -2, -1)
        x = without_own(x - column * share[..., None])
    return sharpen(x, c.power)

def admm(q, k, padding, own, c, vanilla=False):
    """argmin ||q - x^T K||^2 + lambda ||x||_1, sharpened.  [OA Eq. 2]"""
    if c.updates == 'printed':  # pays no heed to padding; what random tokens take is lost
        x = printed(q, k, own, c.sparsity, c.rho, c.iterations, vanilla)
        return sharpen(x, c.power)[..., :k.size(-2)]
    x = lasso(q, real(k, padding), own, c.sparsity, c.rho, c.iterations, c.relax, vanilla)
    return sharpen(x, c.power)

def admm_vanilla(q, k, padding, own, c):
    """argmin ||q - x^T K||^2 + lambda ||x||_1 by an N x N inverse, sharpened.  [OA Eq. 3]"""
    return admm(q, k, padding, own, c, vanilla=True)

ATTENTION = {'softmax': softmax, 'no-weights': no_weights, 'l2': l2, 'admm': admm,
             'admm-vanilla': admm_vanilla}

# ------------------------------------ model ------------------------------------

def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))

class MultiheadAttention(nn.Module):
    """nn.MultiheadAttention's parameters for softmax; none, or out_proj alone, for the others."""

    def __init__(self, c, kind='softmax', own=False):
        super().__init__()
        self.config, self.kind, self.own, C = c, kind, own, c.hidden_dim
        self.solves = kind not in ('softmax', 'no-weights')
        if kind == 'softmax':
            self.in_proj_weight = nn.Parameter(torch.empty(3 * C, C))       # W_q, W_k, W_v
            self.in_proj_bias = nn.Parameter(torch.empty(3 * C))
        self.out_proj = nn.Linear(C, C) if kind == 'softmax' or c.out_proj else nn.Identity()

    def heads(self, *qkv):
        """q (B, Q, C), k and v (B, N, C) -> (B, nh, Q, hs), (B, nh, N, hs) twice."""
        if self.kind == 'softmax':
            parts = zip(qkv, self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))
            qkv = [F.linear(t, weight, bias) for t, weight, bias in parts]
        return [t.unflatten(2, (self.config.nheads, -1)).transpose(1, 2) for t in qkv]

    def coefficients(self, q, k, v, padding=None):
        """Coefficients (B, nh, Q, N) of the tokens, and what they mix to, (B, nh, Q, hs)."""
        with torch.autocast(q.device.type, enabled=False):  # sums of squares need float32's range
            q, k, v = wide(q), wide(k), wide(v)
            over = v if self.solves and self.config.dict == 'value' else k
            x = ATTENTION[self.kind](q, over, padding, self.own, self.config)
            return x, x @ v

    def forward(self, q, k, v, padding=None):
        """q (B, Q, C), k and v (B, N, C), padding (B, N) True where no token is -> (B, Q, C)."""
        c, (q, k, v) = self.config, self.heads(q, k, v)
        if not self.solves:  # the fused kernel makes the same sum
            y = F.scaled_dot_product_attention(
                q, k, v, None if padding is None else ~padding[:, None, None],
                dropout_p=c.dropout if self.training else 0.0)
        elif c.recompute and torch.is_grad_enabled():  # q, k and v are all that waits for backward
            y = checkpoint(lambda *a: self.coefficients(*a)[1], q, k, v, padding,
                           use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.coefficients(q, k, v, padding)[1]
        return self.out_proj(y.to(q.dtype).transpose(1, 2).flatten(2))      # (B, Q, C)

class EncoderLayer(nn.Module):

    def __init__(self, c, attention='softmax'):
        super().__init__()
        self.self_attn = MultiheadAttention(c, attention, own=True)
        self.linear1 = nn.Linear(c.hidden_dim, c.dim_feedforward)
        self.linear2 = nn.Linear(c.dim_feedforward, c.hidden_dim)
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden_dim), nn.LayerNorm(c.hidden_dim)
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

class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose four vectors never change."""

    def __init__(self, channels):
        super().__init__()
        for name, value in dict(weight=1.0, bias=0.0, running_mean=0.0, running_var=1.0).items():
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        bias = self.bias - self.running_mean * scale
        return (x * scale[:, None, None] + bias[:, None, None]).to(x.dtype)

class Bottleneck(nn.Module):

    def __init__(self, inside, width, stride=1):
        super().__init__()
        outside = 4 * width
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = map(FrozenBatchNorm2d, (width, width, outside))
        self.downsample = nn.Identity() if inside == outside else nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), FrozenBatchNorm2d(outside))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))

class ResNet50(nn.Module):
    """torchvision's keys. As in DETR, its first layers never learn."""
    channels = 2048

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), FrozenBatchNorm2d(64)
        stages = (64, 64, 1, 3), (256, 128, 2, 4), (512, 256, 2, 6), (1024, 512, 2, 3)
        for i, (inside, width, stride, blocks) in enumerate(stages, 1):
            rest = [Bottleneck(4 * width, width) for _ in range(blocks - 1)]
            self.add_module(f'layer{i}', nn.Sequential(Bottleneck(inside, width, stride), *rest))
        for p in [*self.conv1.parameters(), *self.layer1.parameters()]:
            p.requires_grad_(False)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

class SmallBackbone(nn.Sequential):
    """A few convolutions with group norm, which learn from scratch; `stride` pixels per token."""
    channels = 96

    def __init__(self, stride):
        inside, layers, halvings = 3, [], stride.bit_length() - 1
        for i in range(halvings + 1):
            width = min(96, 32 * (i + 1))
            layers += [nn.Conv2d(inside, width, 3, 2 if i < halvings else 1, 1, bias=False),
                       nn.GroupNorm(8, width), nn.ReLU()]
            inside = width
        super().__init__(*layers)

def sine_positions(padding, channels):
    """padding (B, h, w), True where no image is -> (B, h w, channels), first those of y, then x.

    Sines and cosines, by turns, of the place in the image, 0 to 2 pi, at 1 to 1/10000 of that.
    """
    rate = 10000 ** -(torch.arange(channels // 2, device=padding.device) // 2 * 4 / channels)
    parts = []
    for axis in (1, 2):
        place = (~padding).cumsum(axis, dtype=torch.float32)                # (B, h, w)
        last = place.amax(axis, keepdim=True)
        angle = (2 * math.pi * place / (last + 1e-6))[..., None] * rate     # (B, h, w, C / 2)
        parts.append(torch.stack([angle[..., ::2].sin(), angle[..., 1::2].cos()], -1).flatten(3))
    return torch.cat(parts, -1).flatten(1, 2)

class MLP(nn.Module):

    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

class DETR(nn.Module):
    """facebookresearch/detr, with its state-dict keys; config.num_classes without no-object."""

    def __init__(self, config):
        super().__init__()
        self.config, c, C = config, config, config.hidden_dim
        body = ResNet50() if c.backbone == 'resnet50' else SmallBackbone(c.stride)
        encoder = nn.ModuleDict(dict(layers=nn.ModuleList(
            EncoderLayer(c) for _ in range(c.enc_layers))))
        decoder = nn.ModuleDict(dict(layers=nn.ModuleList(
            DecoderLayer(c) for _ in range(c.dec_layers)), norm=nn.LayerNorm(C)))
        self.transformer = nn.ModuleDict(dict(encoder=encoder, decoder=decoder))
        self.class_embed = nn.Linear(C, c.num_classes + 1)
        self.bbox_embed = MLP(C, C, C, 4)
        self.query_embed = nn.Embedding(c.num_queries, C)
        self.input_proj = nn.Conv2d(body.channels, C, 1)
        self.backbone = nn.ModuleList([nn.ModuleDict(dict(body=body))])
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Each tensor has a generator of its own, so that variants start alike where they are."""
        generator = torch.Generator().manual_seed(zlib.crc32(f'{self.config.seed} {name}'.encode()))
        layer, _, kind = name.rpartition('.')
        if kind not in ('weight', 'bias', 'in_proj_weight', 'in_proj_bias'):
            return  # what you may add keeps the values it was made with
        matrix = p if kind.startswith('in_proj') else self.get_parameter(layer + '.weight')
        if matrix.dim() == 1 or name.endswith('out_proj.bias'):
            if kind.endswith('bias'):
                p.zero_()  # and the weights of norms are 1 already
        elif layer == 'query_embed':
            p.normal_(generator=generator)
        elif self.config.backbone == 'resnet50' and p.dim() == 4 and layer != 'input_proj':
            p.normal_(0.0, math.sqrt(2 / (len(p) * p[0, 0].numel())), generator=generator)
        else:
            fan_in = matrix[0].numel()
            xavier = layer.startswith('transformer') and p.dim() == 2
            bound = math.sqrt(6 / (fan_in + len(p))) if xavier else fan_in ** -0.5
            p.uniform_(-bound, bound, generator=generator)

    def encode(self, images, mask=None):
        """-> memory and positions (B, N, C), padding (B, N) or None, grid (h, w)."""
        x = self.input_proj(self.backbone[0]['body'](images))               # (B, C, h, w)
        grid = x.shape[2:]
        padding = torch.zeros(len(x), *grid, dtype=torch.bool, device=x.device)
        if mask is not None:
            padding = F.interpolate(mask[None].float(), grid)[0].bool()     # (B, h, w)
        pos = sine_positions(padding, x.size(1)).to(x.dtype)
        padding = None if mask is None else padding.flatten(1)
        x = x.flatten(2).transpose(1, 2)                                    # (B, h w, C)
        for layer in self.transformer.encoder['layers']:
            x = layer(x, pos, padding)
        return x, pos, padding, grid

    def forward(self, images, mask=None):
        """Normalised images (B, 3, H, W), mask (B, H, W) True on padding -> pred_logits (B, Q,
        classes + 1), the last for no-object, pred_boxes (B, Q, 4), centre and size in fractions of
        the image, and aux_outputs, the same from every earlier decoder layer."""
        memory, pos, padding, _ = self.encode(images, mask)
        decoder, outs = self.transformer.decoder, []
        query_pos = self.query_embed.weight
        x = torch.zeros_like(query_pos).expand(len(images), -1, -1)         # (B, Q, C)
        for layer in decoder['layers']:
            x = layer(x, query_pos, memory, pos, padding)
            outs.append(decoder.norm(x))
        x = torch.stack(outs).to(query_pos.dtype)                           # (L, B, Q, C)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16's boxes are off by pixels
            both = zip(self.class_embed(x), self.bbox_embed(x).sigmoid())
        *aux, last = [dict(pred_logits=logits, pred_boxes=boxes) for logits, boxes in both]
        return dict(last, aux_outputs=aux)

# ------------------------------------ matching and losses ------------------------------------

def assign(cost):
    """The assignment of least total cost -> rows, columns, by shortest augmenting paths.

    cost (n, m), n <= m. One row after the other enters: Dijkstra's algorithm, on the reduced costs
    cost - u - v >= 0, finds the cheapest chain of changes that ends in a free column.
    """
    n, m = cost.shape
    if n > m:
        columns, rows = assign(cost.T)
        order = rows.argsort()
        return rows[order], columns[order]
    u, v, owner = np.zeros(n), np.zeros(m), np.full(m, -1)
    for row in range(n):
        length, before, done = np.full(m, np.inf), np.full(m, -1), np.zeros(m, bool)
        i, j, shortest = row, -1, 0.0
        while i >= 0:  # the column that is nearest now leads to its owner, until it has none
            through = shortest + cost[i] - u[i] - v
            closer = ~done & (through < length)
            length[closer], before[closer] = through[closer], j
            j = np.where(done, np.inf, length).argmin()
            shortest, i, done[j] = length[j], owner[j], owner[j] >= 0
        slack = shortest - length[done]
        v[done] -= slack
        u[owner[done]] += slack
        u[row] += shortest
        while j >= 0:
            last = before[j]
            owner[j], j = row if last < 0 else owner[last], last
    return np.arange(n), owner.argsort()[m - n:]

def match(cost):
    """cost (num_queries, num_targets) -> rows, columns of the cheapest pairs, rows ascending.

    ValueError where a cost is not finite. scipy, where it is installed, is some 20 times faster.
    """
    cost = np.asarray(cost, dtype=np.float64)
    if not np.isfinite(cost).all():
        raise ValueError('a matching cost is not finite: the predictions or the boxes are not')
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return assign(cost)
    return linear_sum_assignment(cost)

def corners(boxes):
    """Centre and size (..., 4) -> left, top, right, bottom."""
    centre, size = boxes.chunk(2, -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)

def generalised_iou(a, b):
    """Of boxes (..., 4), corners, as they broadcast: IoU less the empty share of their hull."""
    area = lambda low, high: (high - low).clamp_min(0).prod(-1)
    (a0, a1), (b0, b1) = a.split(2, -1), b.split(2, -1)
    tiny = torch.finfo(a.dtype).tiny
    both = area(torch.maximum(a0, b0), torch.minimum(a1, b1))
    union = area(a0, a1) + area(b0, b1) - both
    hull = area(torch.minimum(a0, b0), torch.maximum(a1, b1))
    return both / union.clamp_min(tiny) - (hull - union) / hull.clamp_min(tiny)

def norms(counts, c):
    """What the sums of losses are divided by, of images with that many objects each: the sum of
    class weights (an object 1, no-object eos_coef), and the number of objects, 1 at least."""
    matched = sum(min(n, c.num_queries) for n in counts)
    weights = matched + c.eos_coef * (len(counts) * c.num_queries - matched)
    return weights, max(1, sum(counts))

@torch.no_grad()
def pair_up(logits, boxes, targets, c):
    """The cheapest pairs of queries and objects, in every layer and image on its own.

    logits (L, B, Q, K + 1), boxes (L, B, Q, 4) and targets, (labels, boxes) of each image ->
    indices of layer, image, query and object, the last one counted through the batch.
    """
    labels, truth = (torch.cat(parts) for parts in zip(*targets))           # (T,), (T, 4)
    cost = (c.bbox_loss_coef * (boxes[..., None, :] - truth).abs().sum(-1)
            - logits.softmax(-1)[..., labels]
            - c.giou_loss_coef * generalised_iou(corners(boxes)[..., None, :], corners(truth)))
    cost = np.nan_to_num(cost.cpu().numpy())  # (L, B, Q, T); what is not finite shows in the loss
    pairs, at = [], 0
    for i, (own, _) in enumerate(targets):
        for layer, table in enumerate(cost[:, i, :, at:at + len(own)]):
            pairs += [(layer, i, query, at + thing) for query, thing in zip(*match(table))]
        at += len(own)
    return torch.tensor(pairs, dtype=torch.long, device=logits.device).view(-1, 4).T

def set_losses(outputs, targets, c, weights, count):
    """DETR's losses, a dict of (L,), one for every decoder layer, the last first.

    `weights` and `count` (see norms) are those of the global batch or, where this is only a part of
    it, that part's even share: so parts average to the whole. class: cross-entropy, nats; bbox: L1
    distance; giou: 1 - generalised IoU; paired: the cross-entropy of paired queries alone.
    """
    layers = [outputs, *outputs['aux_outputs']]
    logits, boxes = (wide(torch.stack([layer[key] for layer in layers]))
                     for key in ('pred_logits', 'pred_boxes'))
    layer, image, query, thing = pair_up(logits, boxes, targets, c)
    labels, truth = (torch.cat(parts) for parts in zip(*targets))
    wanted = torch.full(logits.shape[:3], c.num_classes, device=logits.device)
    wanted[layer, image, query] = labels[thing]                             # (L, B, Q)
    weight = torch.where(wanted == c.num_classes, c.eos_coef, 1.0)
    entropy = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction='none')
    entropy = entropy.view_as(weight)
    mine, truth = boxes[layer, image, query], truth[thing]                  # (pairs, 4)
    sums = lambda x: x.new_zeros(len(layers)).index_add(0, layer, x) / count
    return {'class': (weight * entropy).sum((1, 2)) / weights,
            'bbox': sums((mine - truth).abs().sum(-1)),
            'giou': sums(1 - generalised_iou(corners(mine), corners(truth))),
            'paired': sums(entropy[layer, image, query])}

def total(losses, c):
    return (losses['class'] + c.bbox_loss_coef * losses['bbox']
            + c.giou_loss_coef * losses['giou']).sum()

@torch.no_grad()
def post_process(outputs, sizes):
    """Outputs and the (height, width) of each image -> a list of (scores, labels, boxes), the
    boxes' corners in pixels. Every query gives one, as the class it finds likeliest: no threshold,
    and no suppression of neighbours."""
    scores, labels = wide(outputs['pred_logits']).softmax(-1)[..., :-1].max(-1)
    size = torch.as_tensor(sizes, device=labels.device).flip(-1).repeat(1, 2)[:, None]
    return list(zip(scores, labels, corners(wide(outputs['pred_boxes'])) * size))

# ------------------------------------ data ------------------------------------

class Shapes:
    """Drawings of one to four shapes, with boxes. They need no files and no network.

    Like CocoFolder: plan(row) says what is in an image, plan(row, rng) in a fresh one; render(plan)
    draws it. Boxes (n, 4): centre and size in fractions of the image.
    """
    classes, ids = ['rectangle', 'disc', 'triangle'], [1, 2, 3]

    def __init__(self, n, seed, size):
        self.n, self.seed, self.side = n, seed, size
        self.stamp = [n, seed, size]

    def __len__(self):
        return self.n

    def plan(self, row, rng=None):
        rng = rng or np.random.default_rng([self.seed, row])
        boxes = []
        for size in rng.uniform(0.18, 0.5, (rng.integers(1, 5), 2)):
            for centre in rng.uniform(size / 2, 1 - size / 2, (10, 2)):
                overlap = [np.clip((size + other[2:]) / 2 - abs(centre - other[:2]), 0, None)
                           for other in boxes]
                if all(o.prod() < 0.15 * min(size.prod(), other[2:].prod())
                       for o, other in zip(overlap, boxes)):
                    boxes.append(np.concatenate([centre, size]))
                    break
        return SimpleNamespace(
            row=row, image_id=row + 1, original=(self.side,) * 2, size=(self.side,) * 2,
            labels=torch.from_numpy(rng.integers(3, size=len(boxes))),
            boxes=torch.tensor(np.array(boxes), dtype=torch.float32), noise=rng.integers(2 ** 32))

    def render(self, plan):
        """-> (3, H, W) float32, normalised."""
        rng = np.random.default_rng(plan.noise)
        grid = (np.arange(self.side, dtype=np.float32) + 0.5) / self.side
        image = np.full((3, self.side, self.side), rng.uniform(0.2, 0.6), np.float32)  # grey
        for label, (cx, cy, w, h) in zip(plan.labels.tolist(), plan.boxes.tolist()):
            x, y = (grid - cx) / w + 0.5, ((grid - cy) / h + 0.5)[:, None]  # 0 to 1 in the box
            ink, top = rng.permutation([0.1, rng.random(), 0.9]), rng.uniform(0.2, 0.8)
            inside = (abs(x - 0.5) <= 0.5) & (abs(y - 0.5) <= 0.5)
            if label == 1:
                inside = (x - 0.5) ** 2 + (y - 0.5) ** 2 <= 0.25
            elif label == 2:
                inside &= (x >= top * (1 - y)) & (x <= 1 - (1 - top) * (1 - y))
            image[:, inside] = ink[:, None]
        image += 0.04 * rng.standard_normal(image.shape, np.float32)
        return torch.from_numpy((image.clip(0, 1) - MEAN) / STD)

    def truth(self, plans):
        """What is in the images of plan(row), in COCO's json form."""
        notes = [dict(image_id=plan.image_id, category_id=self.ids[label],
                      bbox=[self.side * v for v in (cx - w / 2, cy - h / 2, w, h)])
                 for plan in plans
                 for label, (cx, cy, w, h) in zip(plan.labels.tolist(), plan.boxes.tolist())]
        return dict(images=[dict(id=plan.image_id) for plan in plans], annotations=notes,
                    categories=[dict(id=i) for i in self.ids])

MEAN, STD = (np.array(x, np.float32).reshape(3, 1, 1) for x in  # of ImageNet's colours, 0 to 1
             ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
COCO = {'categories': 'id name', 'images': 'id file_name width height',
        'annotations': 'id image_id category_id bbox area iscrowd'}
finite = lambda x: type(x) in (int, float) and abs(x) < 1e9
FIELDS = {  # what they should be, and a test
    **dict.fromkeys(('id', 'image_id', 'category_id'), (
        'a whole number', lambda x: type(x) is int and 0 <= x < 2 ** 53)),
    **dict.fromkeys(('width', 'height'), (
        'a whole number of pixels', lambda x: type(x) is int and 0 < x < 1e6)),
    'name': ('a name', lambda x: type(x) is str and x.isprintable() and x.strip()),
    'file_name': ('a path below the photos', lambda x: type(x) is str and x and not (
        Path(x).anchor or '..' in x.replace('\\', '/').split('/'))),
    'bbox': ('x, y, width >= 0, height >= 0', lambda x: type(x) is list and len(x) == 4
             and all(map(finite, x)) and min(x[2:]) >= 0),
    'area': ('a number >= 0', lambda x: x is None or finite(x) and x >= 0),
    'iscrowd': ('0 or 1', lambda x: x in (None, 0, 1)),
}

def read_coco(path, photos):
    """An annotation file in COCO's form -> {list: {id: entry}}, every field that counts checked."""
    try:
        data, lists = json.loads(path.read_bytes()), {}
    except (OSError, ValueError, RecursionError) as e:
        fail(f'{path} is no json file that can be read ({str(e)[:150]})')
    for name, keys in COCO.items():
        entries, known = data.get(name) if isinstance(data, dict) else None, {}
        if not isinstance(entries, list) or not entries and name != 'annotations':
            fail(f'{path} has no list of {name}: give one in COCO\'s form')
        for i, x in enumerate(entries):
            x = {key: x.get(key) if isinstance(x, dict) else None for key in keys.split()}
            wrong = [f'{key} {x[key]!r:.60} should be {FIELDS[key][0]}' for key in x
                     if not FIELDS[key][1](x[key])]
            if not wrong and known.setdefault(x['id'], x) is not x:
                wrong = ['another one has the same id']
            if wrong:
                where = ', '.join(f'{key} {x[key]!r:.40}' for key in keys.split()[:2])
                fail(f'{path}: {name}[{i}] ({where}): {wrong[0]}')
        lists[name] = known
    for x in lists['images'].values():
        if not os.path.isfile(photos / x['file_name']):
            fail(f'{path}: image {x["id"]}: {photos} has no {x["file_name"]!r:.60}')
    for a in lists['annotations'].values():
        which = f'{path}: annotation {a["id"]} of image {a["image_id"]}'
        if a['image_id'] not in lists['images']:
            fail(f'{which}: there is no such image')
        if a['category_id'] not in lists['categories']:
            fail(f'{which}: there is no category {a["category_id"]}')
        x, (left, top, w, h) = lists['images'][a['image_id']], a['bbox']
        if not (-w <= left <= x['width'] and -h <= top <= x['height']):
            fail(f'{which}: bbox {a["bbox"]} (x, y, width, height) lies outside of '
                 f'{x["file_name"]!r:.60}, {x["width"]} x {x["height"]}')
        a['area'] = w * h if a['area'] is None else a['area']
    return lists

def resized(w, h, side, most=math.inf):
    """Width and height, the shorter `side` or, where the longer would pass `most`, less."""
    short, long = min(w, h), max(w, h)
    if long / short * side > most:
        side = max(1, round(most * short / long))
    long = int(side * long / short)
    return (side, long) if w < h else (long, side)

class CocoFolder:
    """Photos and their annotations; row i is the i-th image by id, label i the i-th category.

    What a row's boxes become needs only annotations and a generator: so every process can count
    the boxes of the whole batch, and only who trains on a photo reads it.
    """

    def __init__(self, photos, annotations, image_size=800):
        self.photos, self.image_size = Path(photos), image_size
        lists = read_coco(Path(annotations), self.photos)
        self.stamp = zlib.crc32(Path(annotations).read_bytes())
        self.images = [x for _, x in sorted(lists['images'].items())]
        self.ids = sorted(lists['categories'])                              # label -> category
        self.classes = [lists['categories'][i]['name'] for i in self.ids]   # label -> name
        self.annotations = defaultdict(list)
        for a in lists['annotations'].values():
            self.annotations[a['image_id']].append(a)

    def __len__(self):
        return len(self.images)

    def truth(self, plans):
        """What coco_ap compares with: nothing clipped, nothing left out."""
        images = [self.images[plan.row] for plan in plans]
        return dict(images=images, categories=[dict(id=i) for i in self.ids],
                    annotations=[a for x in images for a in self.annotations[x['id']]])

    def plan(self, row, rng=None):
        """What becomes of a row: with a generator DETR's random flip, crop and size, else none.

        Returns size (width, height), window (x0 y0 x1 y1, shares of the photo) and flip for render;
        labels (n,) and boxes (n, 4), cx cy w h as shares of size, without crowds and without what
        is cut off; row, image_id, original (height, width). Sizes are DETR's at an image_size of
        800 pixels, else in proportion.
        """
        x, px = self.images[row], lambda n: max(1, round(n * self.image_size / 800))
        w, h = full = x['width'], x['height']
        side, window, flip = self.image_size, np.array([0, 0, 1, 1]), False
        if rng is not None:
            flip, side = rng.random() < 0.5, px(32 * rng.integers(15, 26))  # 480, 512, ..., 800
            if rng.random() < 0.5:
                first = resized(w, h, px(rng.choice([400, 500, 600])))
                w, h = (int(rng.integers(min(px(384), n), min(px(600), n) + 1)) for n in first)
                left, top = rng.integers(first[0] - w + 1), rng.integers(first[1] - h + 1)
                # [deviation] cut out of the photo itself, because resizing it twice blurs it
                window = np.divide([left, top, left + w, top + h], first * 2)
        some = [a for a in self.annotations[x['id']] if not a['iscrowd']]
        labels = np.array([self.ids.index(a['category_id']) for a in some], dtype=np.int64)
        boxes = np.array([a['bbox'] for a in some], dtype=float).reshape(-1, 2, 2)
        boxes[:, 1] += boxes[:, 0]                                          # (n, 2 corners, x y)
        boxes = ((boxes / full - window[:2]) / (window[2:] - window[:2])).clip(0, 1)
        kept = (boxes[:, 1] > boxes[:, 0]).all(1)
        boxes = np.concatenate([boxes[kept].mean(1), boxes[kept, 1] - boxes[kept, 0]], axis=1)
        boxes[:, 0] = abs(flip - boxes[:, 0])
        return SimpleNamespace(
            row=row, size=resized(w, h, side, px(1333)), window=window, flip=flip,
            labels=torch.from_numpy(labels[kept]), boxes=torch.from_numpy(boxes).float(),
            image_id=x['id'], original=full[::-1])

    def render(self, plan):
        """A plan's photo, normalised (3, H, W). ValueError where it is not the one annotated."""
        path = self.photos / self.images[plan.row]['file_name']
        image = read_photo(path)
        if image.size != plan.original[::-1]:
            raise ValueError(f'{path}, image {plan.image_id}, has (width, height) {image.size}, '
                             f'its annotation says {plan.original[::-1]}')
        x = to_tensor(image, plan.size, plan.window)
        return x.flip(2) if plan.flip else x

def read_photo(path, upright=False):
    """Pillow's RGB image, as COCO's boxes want it: only `upright` heeds its EXIF data."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError('photos want `pip install pillow`')
    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image) if upright else image
            if image.mode[0] == 'I':  # 16 bits, of which convert() would cut the upper ones off
                image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
            return image.convert('RGB')
    except Exception as e:  # each format raises its own
        raise ValueError(f'{path} is no photo that Pillow can read ({str(e)[:150]})')

def to_tensor(image, size, window=(0, 0, 1, 1)):
    """The window of Pillow's image, resized to (width, height) -> (3, H, W), normalised."""
    window = np.multiply(window, image.size * 2)
    x = np.asarray(image.resize(size, 2, tuple(window)), np.float32)        # 2: bilinear
    return torch.from_numpy((x.transpose(2, 0, 1) / 255 - MEAN) / STD)

def collate(images):
    """Images (3, h, w) -> (B, 3, H, W), zeros at right and bottom, and mask (B, H, W): there."""
    H, W = (max(x.size(i) for x in images) for i in (1, 2))
    batch, mask = torch.zeros(len(images), 3, H, W), torch.ones(len(images), H, W, dtype=torch.bool)
    for x, room, hidden in zip(images, batch, mask):
        room[:, :x.size(1), :x.size(2)], hidden[:x.size(1), :x.size(2)] = x, False
    return batch, mask

def load_coco(folder, image_size=800):
    """Train and val of a folder as COCO's, or with train/ and val/ or valid/, as tools export it.

    Of a single split every tenth photo is for evaluation and the others for training.
    """
    folder, splits = Path(folder), []
    for names in ('train2017', 'train'), ('val2017', 'val', 'valid'):
        found = [(folder / name, folder / file) for name in names for file in (
            f'annotations/instances_{name}.json', f'annotations/{name}.json', f'{name}.json',
            f'{name}/annotations.json', f'{name}/_annotations.coco.json')
            if (folder / name).is_dir() and (folder / file).is_file()]
        splits += [CocoFolder(*found[0], image_size)] if found else []
    if not splits or len(splits) * len(splits[0]) < 2:
        fail(f'{folder} is no detection data: it needs train2017/, val2017/ and annotations/'
             'instances_train2017.json, ..., or train/, val/ and train.json, val.json')
    if len(splits) == 1:
        splits, images = [splits[0], copy.copy(splits[0])], splits[0].images
        splits[0].images = [x for i, x in enumerate(images) if i % 10]
        splits[1].images = images[::10]
    if splits[0].ids != splits[1].ids or splits[0].classes != splits[1].classes:
        fail(f'{folder}: the categories of its two annotation files differ')
    return splits

def load_data(config):
    """config.data -> what to train on and what to judge by: two of Shapes or of CocoFolder."""
    if config.data == 'builtin':
        return Shapes(10 ** 6, 0, config.image_size), Shapes(200, 1, config.image_size)
    path = Path(config.data)
    path = path if path.is_dir() else Path('data', config.data)
    if not path.is_dir():
        fail(f'--data {path}: no such folder; `python prepare_data.py --list` names more')
    return load_coco(path, config.image_size)

@functools.lru_cache(2)
def shuffled(seed, epoch, n):
    return np.random.default_rng([seed, epoch, 7]).permutation(n)

def write_png(path, pixels):
    """pixels (H, W, 3) uint8 -> a file: a header, the zipped lines, an end."""
    H, W, _ = pixels.shape
    lines = np.pad(pixels.reshape(H, W * 3), ((0, 0), (1, 0))).tobytes()  # 0: a line is unfiltered
    header = struct.pack('>2I5B', W, H, 8, 2, 0, 0, 0)  # 8 bits, RGB
    with open(os.devnull if RANK else path, 'wb') as f:
        f.write(b'\x89PNG\r\n\x1a\n')
        for name, data in (b'IHDR', header), (b'IDAT', zlib.compress(lines)), (b'IEND', b''):
            f.write(struct.pack('>I', len(data)) + name + data)
            f.write(struct.pack('>I', zlib.crc32(name + data)))

# --- harness (identical in all four scripts; test_all.py checks)
SCRIPT, SOURCE = Path(__file__).stem, Path(__file__).read_text('utf-8')  # as it runs
RANK, WORLD = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
FREE = {'max_iters', 'eval_interval', 'eval_rows', 'log_interval', 'max_minutes', 'device',
        'dtype', 'compile', 'threads', 'out_dir'}  # flags that may change when a run is resumed

def fail(message):
    print(f'{SCRIPT}: error: {" ".join(str(message).split())}', file=sys.stderr, flush=True)
    raise SystemExit(2)

@functools.cache
def flags():
    """{field: (type, default, condition on x, help)}, read from the lines of Config."""
    line = r'^    (\w+): \w+ = .+?(?: +# ?(?:([^:\n]*\bx\b[^:\n]*): )?(.*))?$'
    known = {f.name: (f.type, f.default) for f in fields(Config)}
    return {name: (*known[name], condition, words)
            for name, condition, words in re.findall(line, inspect.getsource(Config), re.M)}

def check(config):
    """ValueError where a field breaks the condition that its comment opens with."""
    for name, (_, default, condition, _) in flags().items():
        x = getattr(config, name)
        if condition and x is not default and not eval(condition, globals(), dict(x=x)):
            condition = re.sub('[A-Z]{2,}', lambda m: ', '.join(globals()[m[0]]), condition)
            raise ValueError(f'--{name.replace("_", "-")} {x}: wants {condition}')
    if config.schedule == 'cosine' and config.min_lr > config.learning_rate:
        raise ValueError(f'--min-lr {config.min_lr:g}: the cosine should end below its peak, '
                         f'--learning-rate {config.learning_rate:g}')

def parse(argv, actions):
    """argv -> function of the action, its options, Config, the Config fields given explicitly."""
    argv = [re.sub(r'^--[a-z]\w*', lambda m: m[0].replace('_', '-'), word)
            for word in (sys.argv[1:] if argv is None else argv)]
    action = argv.pop(0) if argv and argv[0][:1] != '-' else 'train'
    if action not in actions:
        fail(f'unknown action {action!r}: choose from {", ".join(actions)}')
    function, options, words = actions[action]
    p = argparse.ArgumentParser(f'{SCRIPT}.py {action}', allow_abbrev=False,
                                description=f'{words} Actions: {", ".join(actions)}.')
    p.error = lambda message: fail(f'{message} (see --help)')
    for name, how in options.items():
        p.add_argument(name, **how)
    p.add_argument('--preset', choices=PRESETS, help='named settings (default: tiny; t4 on CUDA)')
    for name, (kind, default, condition, words) in flags().items():
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind)
        condition = re.sub('[A-Z]{2,}', lambda m: ', '.join(globals()[m[0]]), condition)
        words = f'{words} {condition and f"({condition})"} [{default}]'
        p.add_argument('--' + name.replace('_', '-'), *['--lr'] * (name == 'learning_rate'),
                       default=argparse.SUPPRESS, help=words.replace('%', '%%'), **how)
    chosen = vars(p.parse_args(argv))
    given = {name: chosen.pop(name) for name in flags() if name in chosen}
    try:
        device = pick_device(Config(device=given.get('device', 'auto')))[0]
        preset = chosen['preset'] or ('t4' if device.type == 'cuda' else 'tiny')
        return function, chosen, Config(**{**PRESETS[preset], **given}), given
    except ValueError as e:
        fail(e)

def pick_device(config):
    """Device, dtype of matmuls, and why. CUDA before capability 8 only emulates bfloat16."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = config.device if config.device != 'auto' else 'cuda' if cuda else 'mps' if mps else 'cpu'
    name = f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if name == 'cuda' else name
    dtype, why = 'float32', f'CPU threads: {torch.get_num_threads()}'
    try:
        device = torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as e:
        fail(f'--device {name} cannot be used here: {str(e).splitlines()[0]}')
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        major, minor = torch.cuda.get_device_capability(device)
        dtype = 'bfloat16' if major >= 8 else 'float16'
        why = f'{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}'
    return device, getattr(torch, dtype if config.dtype == 'auto' else config.dtype), why

def save_checkpoint(path, state):
    """Write beside `path`, flush to the disk, rename: whatever happens, a whole file is there."""
    temporary = path.with_suffix('.tmp')
    try:
        with open(temporary, 'wb') as f:
            torch.save(dict(state, script=SCRIPT), f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:
        temporary.unlink(missing_ok=True)
        fail(f'cannot write {path} ({str(e).splitlines()[0]}); an older checkpoint there is intact')

def load_checkpoint(path):
    """A checkpoint of this script, or one line on why it is none. Runs no code from the file."""
    try:
        archive = zipfile.ZipFile(path)  # every tensor in it has a CRC-32; a folder has no bytes
        folders = [x.filename for x in archive.infolist() if x.external_attr & 16]
        if damaged := folders or archive.testzip():
            raise ValueError(f'{damaged} does not match its checksum')
        state = torch.load(path, map_location='cpu', weights_only=True)
        if state['script'] != SCRIPT:
            raise ValueError(f'{state["script"]}.py wrote it')
        it, seconds, losses, log = json.loads(state['progress'])
        progress = int(it), float(seconds), [*losses], [*log]
        return dict(state, config=Config(**state['config']), progress=progress, path=path)
    except Exception as e:  # the two raise any of half a dozen kinds
        fail(f'{path} is no whole checkpoint of this {SCRIPT}.py: {str(e)[:200]}')

def restore(parts, state):
    """Fill parts, {name: model, optimiser, ...}, from a checkpoint."""
    try:
        for name, part in parts.items():
            if name != 'scaler' or state[name]:  # a run in float32 has no scale
                part.load_state_dict(state[name])
    except Exception as e:  # PyTorch raises half a dozen kinds
        fail(f'{state["path"]} does not fit; has the script been changed? {str(e)[:200]}')

def write_csv(path, rows):
    names = list(dict.fromkeys(itertools.chain(*rows)))
    with open(os.devnull if RANK else path, 'w', newline='', encoding='utf-8') as f:
        csv.DictWriter(f, names).writerows([dict(zip(names, names)), *rows])

def schedule(it, c):
    """Factor on the learning rate in step `it`, counted from 0."""
    if it < c.warmup_iters:
        return (it + 1) / (c.warmup_iters + (c.schedule == 'cosine'))  # as the originals count
    if c.schedule == 'cosine':
        done = min(1, (it - c.warmup_iters) / max(1, c.max_iters - c.warmup_iters))
        return 1 - (1 - c.min_lr / c.learning_rate) * 0.5 * (1 - math.cos(math.pi * done))
    left, last = c.max_iters - it, c.warmdown_iters
    trapezoid, step = min(1, left / (last or 1)), 1 if left > last else 0.1
    return dict(constant=1, trapezoid=trapezoid, step=step)[c.schedule]

def fit(task, config, folder, state=None, label=''):
    """Train `task` in `folder`, from checkpoint `state` if there is one -> latest figures and log.
    A task has model, optimizer(), batch(step, rows), loss(model, batch), evaluate() -> {name: x},
    `unit`, `per_row` (units in a row) and maybe finish() -> {name: x}, for the end. Batch, dropout
    and learning rate follow from seed and step: model, optimiser, scaler are all to resume."""
    device, dtype, _ = pick_device(config)
    autocast = functools.partial(torch.autocast, device.type, dtype, dtype != torch.float32)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    parts = dict(model=task.model, optimizer=task.optimizer(), scaler=scaler)
    model, optimizer = task.model, parts['optimizer']
    it, seconds, losses, log = state['progress'] if state else (0, 0.0, [], [])
    restore(parts if state else {}, state)
    if state and state.get('stamp') != json.dumps(task.stamp):
        print('note    the data, or their dates, are not those that this run has seen so far')
    for group in optimizer.param_groups:  # fused where this device wants it, not where it was saved
        group.update({k: v for k, v in optimizer.defaults.items() if k == 'fused'})
    optimizer.load_state_dict(optimizer.state_dict())  # and its step counters where that wants them
    n = config.batch_size * config.grad_accum_steps
    if n % WORLD:
        fail(f'--batch-size x --grad-accum-steps is {n}: {WORLD} processes cannot share it evenly')
    micros = [range(n)[RANK::WORLD][i:i + config.batch_size]
              for i in range(0, n // WORLD, config.batch_size)]
    wrapped = torch.compile(model) if config.compile else model
    wrapped = nn.parallel.DistributedDataParallel(wrapped) if WORLD > 1 else wrapped
    caught, halt, saved, task.folder = [], False, it if state else -1, folder
    spoke = wrote = began = now()
    def catch(signum, _):  # the first one waits for the end of the step
        sys.exit(128 + signum) if caught else caught.append(signum)
    handlers = {s: signal.signal(s, catch) for s in (signal.SIGINT, signal.SIGTERM)}
    while True:
        due = (done := it >= config.max_iters) or it % config.eval_interval == 0
        if (due or it % config.log_interval == 0) and (not log or log[-1]['iter'] < it):
            row = dict(iter=it, seconds=seconds, loss=statistics.fmean(losses) if losses else None)
            if due:
                model.eval()
                with torch.no_grad(), autocast():
                    row.update(task.evaluate())
                model.train()
            line = f'{label}step {it}/{config.max_iters}' + ''.join(
                f' | {k} {v:.4f}' for k, v in list(row.items())[2:] if v is not None)
            if losses:
                pace = (seconds - log[-1]['seconds']) / len(losses)
                line += (f' | {n * task.per_row / pace:,.0f} {task.unit}/s'
                         f' | {(config.max_iters - it) * pace / 60:.1f} min left')
            cut = None if (keep := due or now() - spoke > 30) else shutil.get_terminal_size()[0] - 1
            if (tty := sys.stdout.isatty()) or keep:  # a line that wraps could not be redrawn
                print('\r\033[K' * tty + line[:cut], end='\n' * keep, flush=True)
            spoke = now() if keep else spoke
            losses, log = [], [*log, row]
        if RANK == 0 and it != saved and (due or halt or now() - wrote > 300):
            save_checkpoint(folder / 'ckpt.pt', dict(
                {name: part.state_dict() for name, part in parts.items()}, config=asdict(config),
                stamp=json.dumps(task.stamp), progress=json.dumps([it, seconds, losses, log])))
            write_csv(folder / 'log.csv', log)
            saved, wrote = it, now()
        if done or halt:
            break
        clock = now()
        torch.manual_seed(((config.seed << 24) + it) * WORLD + RANK)
        for group in optimizer.param_groups:
            group['lr'] = group.setdefault('initial_lr', group['lr']) * schedule(it, config)
        loss = torch.zeros((), device=device)
        for rows in micros:
            wrapped.require_backward_grad_sync = rows == micros[-1]  # processes talk once per step
            with autocast():
                part = task.loss(wrapped, task.batch(it, rows)) * (len(rows) * WORLD / n)
            scaler.scale(part).backward()
            loss += part.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        stop = caught or 0 < config.max_minutes < (now() - began) / 60
        figures = torch.stack([loss, norm, torch.full_like(loss, bool(stop))]) / WORLD
        if WORLD > 1:
            dist.all_reduce(figures)
        loss, norm, halt = figures.tolist()
        overflow = scaler.is_enabled() and scaler.get_scale() > 1e-9  # float16's, to be skipped
        if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
            fail(f'loss {loss:g} with gradient norm {norm:g} in step {it}: lower --learning-rate; '
                 f'{folder / "ckpt.pt"} holds step {saved}, from before')
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        it, seconds, losses = it + 1, seconds + now() - clock, losses + [loss]
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    if halt:
        way = 'the same command' if label else f'--resume {folder}'
        print(f'stopped after step {it} and saved; go on with {way}')
    if caught:
        raise SystemExit(128 + caught[0])
    final = task.finish() if done and hasattr(task, 'finish') else {}
    return dict({k: v for row in log for k, v in row.items()}, **final, folder=folder, log=log)
# --- end of harness

# ------------------------------------ evaluation and pictures ------------------------------------

say_once = functools.cache(print)

class Task:
    """Object detection as the harness sees it."""
    unit, per_row, metrics = 'images', 1, ['AP', 'AP50']

    def __init__(self, config, resumed=False):
        config = without_files(config)
        self.device, (self.train, self.val) = pick_device(config)[0], load_data(config)
        self.stamp, names = [self.train.stamp, self.val.stamp], self.train.classes
        c = replace(config, num_classes=max(config.num_classes, len(names)),
                    classes=','.join(name.replace(',', ' ') for name in names),
                    class_ids=','.join(map(str, self.train.ids)))
        if resumed and (c.classes, c.class_ids) != (config.classes, config.class_ids):
            fail(f'--data {config.data} has other classes than the run to go on with: {c.classes}')
        self.config, self.model, self.coco, self.resumed = c, DETR(c), None, resumed
        if c.init and not resumed:
            load_weights(self.model, c.init, self.train)
        self.model.to(self.device)
        self.pool, self.ahead = concurrent.futures.ThreadPoolExecutor(os.cpu_count()), {}
        rows = range(len(self.val))[:c.eval_rows or None]
        self.plans = [self.val.plan(row) for row in rows]

    def optimizer(self):
        """AdamW; the backbone has a rate of its own."""
        c, groups = self.config, {}
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                rate = c.lr_backbone if name.startswith('backbone') else c.learning_rate
                groups.setdefault(rate, []).append(p)
        return torch.optim.AdamW([dict(params=p, lr=rate) for rate, p in groups.items()],
                                 lr=c.learning_rate, betas=(c.beta1, c.beta2),
                                 weight_decay=c.weight_decay, fused=self.device.type == 'cuda')

    def prepare(self, step, rows):
        """Plans of some rows of a step's global batch, their images, which threads begin to draw or
        read, and their share of the batch's norms, known from plans alone: no process has to ask
        another. Batches follow one endless row of shuffles."""
        c, N = self.config, len(self.train)
        n = c.batch_size * c.grad_accum_steps
        plans = [self.train.plan(shuffled(c.seed, at // N, N)[at % N],
                                 np.random.default_rng([c.seed, step, r]))
                 for r, at in enumerate(range(step * n, step * n + n))]
        weights, count = norms([len(plan.labels) for plan in plans], c)
        share, plans = len(rows) / n, [plans[r] for r in rows]
        return plans, self.pool.map(self.train.render, plans), weights * share, count * share

    def batch(self, step, rows):
        """Images, mask, targets and their share of the global batch's norms."""
        plans, images, *shares = self.ahead.pop((step, rows), None) or self.prepare(step, rows)
        if step + 1 < self.config.max_iters:
            self.ahead[step + 1, rows] = self.prepare(step + 1, rows)
        return *self.collate(plans, images), *shares

    def collate(self, plans, images):
        """Images, mask (None if there is no padding) and targets of these plans, on the device."""
        try:
            images, mask = collate([*images])
        except ValueError as e:
            fail(e)
        targets = [(plan.labels.to(self.device), plan.boxes.to(self.device)) for plan in plans]
        return images.to(self.device), mask.to(self.device) if mask.any() else None, targets

    def loss(self, model, batch):
        images, mask, targets, weights, count = batch
        return total(set_losses(model(images, mask), targets, self.config, weights, count),
                     self.config)

    def evaluate(self):
        """On validation images: loss; of paired queries cross-entropy, L1 distance and 1 - GIoU;
        AP. All twelve numbers of COCO's are kept in self.coco."""
        c, plans, found, sums = self.config, self.plans, [], torch.zeros(4, device=self.device)
        if not (self.resumed or c.init):
            say_once('note    AP stays near zero for the first several hundred steps, and the loss '
                     'hides what goes on:\n        watch cross-entropy, L1 distance and 1 - GIoU '
                     'of matched pairs (paired, l1, giou) fall')
        weights, count = norms([len(plan.labels) for plan in plans], c)
        for i in range(0, len(plans), c.batch_size):
            part = plans[i:i + c.batch_size]
            images, mask, targets = self.collate(part, self.pool.map(self.val.render, part))
            outputs = self.model(images, mask)
            losses = set_losses(outputs, targets, c, weights, count)
            of_last = [losses[key][0] for key in ('paired', 'bbox', 'giou')]
            sums += torch.stack([total(losses, c), *of_last])
            found += self.detections(outputs, part)
        loss, paired, l1, giou = sums.tolist()
        found = found if math.isfinite(loss) else []
        self.coco = coco_ap(self.val.truth(plans), found)
        return dict(val_loss=loss, paired=paired, l1=l1, giou=giou, AP=self.coco['AP'],
                    AP50=self.coco['AP50'])

    def finish(self):
        """COCO's twelve numbers."""
        if not self.coco:  # a run that was over already
            device, dtype, _ = pick_device(self.config)
            self.model.eval()
            with torch.no_grad(), torch.autocast(device.type, dtype, dtype != torch.float32):
                self.evaluate()
        return self.coco

    def detections(self, outputs, plans):
        """In COCO's json form."""
        ids, rows = self.val.ids, []
        for plan, found in zip(plans, post_process(outputs, [plan.original for plan in plans])):
            for score, label, (x0, y0, x1, y1) in zip(*(t.tolist() for t in found)):
                if label < len(ids):
                    rows.append(dict(image_id=plan.image_id, category_id=ids[label], score=score,
                                     bbox=[x0, y0, x1 - x0, y1 - y0]))
        return rows

def without_files(config):
    """A recipe that has fallen back to drawn shapes, and lacks its weights too, takes what the tiny
    preset has in place of its own settings."""
    recipe = next((r for r in PRESETS.values() if r.get('init') == config.init), None)
    if not recipe or config.data != 'builtin' or Path(config.init).exists():
        return config
    print(f'{config.init} is not there either (`python prepare_data.py {Path(config.init).stem}`): '
          'so this is a small model from scratch')
    return replace(config, **{name: flags()[name][1] for name, value in recipe.items()
                              if getattr(config, name) == value and name != 'threads'})

def load_weights(model, path, data):
    """Fill `model` from a checkpoint of this script, of DETR or of torchvision's ResNet-50, as far
    as it fits, and say what does not: attention that is replaced, or classes of other data."""
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
        state = {key: p for key, p in state.get('model', state).items()
                 if not key.endswith('num_batches_tracked') and not key.startswith('fc.')}
        if 'layer4.0.conv1.weight' in state:
            state = {'backbone.0.body.' + key: p for key, p in state.items()}
        own, head = model.state_dict(), state.get('class_embed.bias', torch.empty(0))
        coco, known = {1: 'person', 2: 'bicycle', 3: 'car'}, dict(zip(data.ids, data.classes))
        if len(head) == 92 and max(known) < 91 and known.get(1) and all(
                known.get(i, name) == name for i, name in coco.items()):
            for key in ('class_embed.weight', 'class_embed.bias'):  # the rows in use
                state[key] = state[key][[*data.ids, -1]]
        fits = {key: p for key, p in state.items() if key in own and own[key].shape == p.shape}
        if not fits:
            raise ValueError('not one tensor has the name and shape of one of the model')
        model.load_state_dict(fits, strict=False)
    except Exception as e:
        fail(f'--init {path} does not fit: {str(e)[:200]}')
    short = lambda keys: ', '.join(dict.fromkeys(re.sub(r'\.\d+\.', '.*.', key) for key in keys))
    print(f'init    {path}: {len(fits)} tensors\n'
          f'        fresh: {short(k for k in own if k not in fits) or "none"}\n'
          f'        left out: {short(k for k in state if k not in fits) or "none"}')

IOUS, RECALLS, DEEPEST = np.linspace(0.5, 0.95, 10), np.linspace(0, 1, 101), (1, 10, 100)
AREAS = np.array([[0, 1e10], [0, 32 ** 2], [32 ** 2, 96 ** 2], [96 ** 2, 1e10]])

def coco_ap(ground_truth, detections):
    """COCO's twelve numbers, -1 where there is nothing to find, both arguments in its json form.

    ground_truth: images (id), categories (id), annotations (image_id, category_id, bbox, area,
    iscrowd); detections: (image_id, category_id, bbox, score). Boxes are x, y, width, height in
    pixels. The result is pycocotools' own, but that an annotation with id 0 may be found as well.
    ValueError where a box has no known image, or is not finite.
    """
    images = sorted({x['id'] for x in ground_truth['images']})
    known, truth, found = set(images), defaultdict(list), defaultdict(list)
    for boxes, groups in (ground_truth['annotations'], truth), (detections, found):
        for x in boxes:
            if x['image_id'] not in known or not np.isfinite([*x['bbox'], x.get('score', 0)]).all():
                raise ValueError(f'a box of no known image, or one that is not finite: {x}')
            groups[x['category_id'], x['image_id']].append(x)
    classes = sorted({x['id'] for x in ground_truth['categories']})
    precision = np.full((4, 10, len(classes), 101), -1.0)                   # (areas, IoUs, K, R)
    recall = np.full((3, 4, 10, len(classes)), -1.0)                        # (at most, ...)
    for k, c in enumerate(classes):
        judged = [judge(truth[c, i], found[c, i]) for i in images if truth[c, i] or found[c, i]]
        wanted = sum(n for *_, n in judged)                                 # (areas,)
        for m, most in enumerate(DEEPEST if judged else ()):
            scores, hit, ignored = (np.concatenate([x[j][..., :most] for x in judged], -1)
                                    for j in range(3))
            order = np.argsort(-scores, kind='stable')
            hit, ignored = hit[..., order], ignored[..., order]             # (areas, IoUs, D)
            tp, fp = (np.cumsum(x & ~ignored, -1, dtype=float) for x in (hit, ~hit))
            for a in np.flatnonzero(wanted):
                share = tp[a] / wanted[a]
                recall[m, a, :, k] = share.max(-1, initial=0)
                if most == 100:
                    p = tp[a] / (tp[a] + fp[a] + np.spacing(1))
                    p = np.maximum.accumulate(p[:, ::-1], axis=1)[:, ::-1]  # never rises again
                    p = np.pad(p, ((0, 0), (0, 1)))  # 0 for what is never reached
                    for t in range(10):
                        precision[a, t, k] = p[t, np.searchsorted(share[t], RECALLS)]
    mean = lambda x: float(x[x > -1].mean()) if (x > -1).any() else -1.0
    return dict(AP=mean(precision[0]), AP50=mean(precision[0, 0]), AP75=mean(precision[0, 5]),
                **{f'AP{s}': mean(precision[a + 1]) for a, s in enumerate('sml')},
                **{f'AR{most}': mean(recall[m, 0]) for m, most in enumerate(DEEPEST)},
                **{f'AR{s}': mean(recall[2, a + 1]) for a, s in enumerate('sml')})

def judge(truth, found):
    """The boxes of one image and class -> scores (D,) of the best 100, falling; which of them hit
    something and which don't count, (areas, IoUs, D); how many are wanted (areas,)."""
    scores = np.array([x['score'] for x in found], dtype=float)
    order = np.argsort(-scores, kind='stable')[:100]
    dt = np.array([x['bbox'] for x in found], dtype=float).reshape(-1, 4)[order]
    gt = np.array([x['bbox'] for x in truth], dtype=float).reshape(-1, 4)
    crowd = np.array([bool(x.get('iscrowd')) for x in truth], dtype=bool)   # (G,)
    area = np.array([x.get('area', x['bbox'][2] * x['bbox'][3]) for x in truth], dtype=float)
    outside = lambda size: (size < AREAS[:, :1]) | (size > AREAS[:, 1:])    # (areas, n)
    ignore = crowd | outside(area)
    first = np.maximum(dt[:, None, :2], gt[:, :2])                          # (D, G, 2)
    sides = (np.minimum(dt[:, None, :2] + dt[:, None, 2:], gt[:, :2] + gt[:, 2:]) - first).clip(0)
    both, size = sides.prod(-1), dt[:, 2] * dt[:, 3]
    union = size[:, None] + np.where(crowd, 0, gt[:, 2] * gt[:, 3] - both)  # a crowd's is the box
    iou = np.divide(both, union, out=np.zeros_like(both), where=both > 0)
    hit = np.zeros((4, 10, len(dt)), bool)
    ignored = np.repeat(outside(size)[:, None], 10, axis=1)
    free = np.ones((4, 10, len(gt)), bool)
    for d in range(len(dt) if len(gt) else 0):
        fits = free & (iou[d] >= IOUS[:, None])                         # (areas, IoUs, G)
        best = fits & ~ignore[:, None]
        best = np.where(best.any(-1, keepdims=True), best, fits)  # what is ignored comes second
        m = len(gt) - 1 - np.where(best, iou[d], -1)[..., ::-1].argmax(-1)  # the last of equals
        a, t = np.nonzero(fits.any(-1))
        m = m[a, t]
        hit[a, t, d], ignored[a, t, d], free[a, t, m] = True, ignore[a, m], crowd[m]
    return scores[order], hit, ignored, (~ignore).sum(1)

FONT = dict(zip('ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-', (  # rows of 3 pixels, octal digits
    '25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 '
    '65644 25563 65655 34216 72222 55557 55552 55775 55255 55222 71247 25552 26227 61247 61216 '
    '55711 74616 34757 71222 75757 75716 00002 00700').split()))
COLOURS = np.array([[230, 60, 50], [40, 130, 240], [250, 190, 20], [40, 180, 90], [180, 80, 220],
                    [250, 130, 30], [30, 190, 200], [240, 110, 170]], np.uint8)

def draw_boxes(image, boxes, labels, names, scores):
    """image (3, H, W) uint8 -> the same with boxes (n, 4), x0 y0 x1 y1 in pixels, and labels."""
    out, (_, H, W) = image.copy(), image.shape
    unit = max(1, min(H, W) // 200)
    for i in np.argsort(scores):  # the surest on top
        colour = COLOURS[labels[i] % len(COLOURS), :, None, None]           # (3, 1, 1)
        left, top, right, bottom = np.clip(np.round(boxes[i]), 0, [W, H, W, H]).astype(int)
        part = out[:, top:bottom, left:right]
        for edge in part[:, :2], part[:, -2:], part[:, :, :2], part[:, :, -2:]:
            edge[:] = colour
        text = f'{names[labels[i]]} {scores[i]:.2f}'.upper()
        rows = [[int(FONT.get(letter, '00000')[y]) >> x & 1 for letter in text
                 for x in (3, 2, 1, 0)] + [0] for y in range(5)]
        ink = np.pad(rows, ((1, 1), (0, 0))).repeat(unit, 0).repeat(unit, 1)  # (7, ...) units
        top, left = max(0, top - len(ink)), max(0, min(left, W - ink.shape[1]))
        part = out[:, top:top + len(ink), left:left + ink.shape[1]]
        ink = ink[:part.shape[1], :part.shape[2]]
        part[:] = np.where(ink, 255 if colour.mean() < 150 else 0, colour)
    return out

@torch.no_grad()
def solver_gaps(q, k, own, c, most):
    """[mean of f / f* - 1 after 1, 2, ..., `most` iterations], for f of [OA Eq. 2]; f* is that of
    2000 iterations in float64 at a rho that suits them, since it does not depend on rho."""
    q, k = q.cpu().double(), k.cpu().double()
    penalty, _ = scales(q, k, c.sparsity, c.rho, own)
    reached = lambda n: objective(lasso(q, k, own, c.sparsity, c.rho, n, c.relax), q, k, penalty)
    best = objective(lasso(q, k, own, c.sparsity, 0.1, 2000), q, k, penalty).clamp_min(1e-12)
    return [(reached(n) / best - 1).clamp_min(0).mean().item() for n in range(1, most + 1)]

@torch.no_grad()
def diagnose(model, images, mask):
    """How the decoder chooses -> outputs; rows, for each attention means over queries and heads;
    {layer: the solver's gaps}; x (B, nh, Q, N) of the last one.

    nonzero: tokens with a coefficient of at least 1e-3 of the largest; cosine: between x^T V and q,
    1 where attention gives back the query; gap: f / f* - 1, of the solver's objective to the best.
    """
    seen, rows, gaps, c = [], [], {}, model.config
    def keep(module, args):
        seen.append((module, *module.heads(*args[:3]), *(args[3:] or [None])))
    hooks = [m.register_forward_pre_hook(keep) for m in model.transformer.decoder.modules()
             if isinstance(m, MultiheadAttention)]
    outputs = model(images, mask)
    for hook in hooks:
        hook.remove()
    for i, (module, q, k, v, padding) in enumerate(seen):
        x, y = module.coefficients(q, k, v, padding)
        layer = f'{i // 2} {"self" if module.own else "cross"}'
        nonzero = (x.abs() > 1e-3 * x.abs().amax(-1, keepdim=True)).sum(-1)
        cosine = F.cosine_similarity(y, q, dim=-1)
        rows.append(dict(layer=layer, attention=module.kind, nonzero=nonzero.float().mean().item(),
                         cosine=cosine.mean().item(), gap=None))
        over = real(v if c.dict == 'value' else k, padding)
        if module.kind.startswith('admm') and c.updates == 'textbook' and over.any():
            gaps[layer] = solver_gaps(q[:2], over[:2], module.own, c, 2 * c.iterations)
            rows[-1]['gap'] = gaps[layer][c.iterations - 1]
    return outputs, rows, gaps, x

def mark(pixels, found, config, threshold):
    """pixels (3, H, W) uint8 -> the same, small ones enlarged, with boxes around what was found."""
    scores, labels, boxes = (t.cpu().numpy() for t in found)
    keep, times = scores >= threshold, max(1, -(-256 // min(pixels.shape[1:])))
    names = config.classes.split(',') + ['?'] * config.num_classes
    return draw_boxes(pixels.repeat(times, 1).repeat(times, 2), boxes[keep] * times, labels[keep],
                      names, scores[keep])

def bytes_of(images):
    """Normalised images -> uint8, in numpy."""
    return ((images.cpu().numpy() * STD + MEAN).clip(0, 1) * 255).astype(np.uint8)

# ------------------------------------ actions ------------------------------------

def start(config, given, resume=None):
    """Announce a run -> its task, its folder, its checkpoint if it goes on from one."""
    task = None if resume else Task(config)  # first, so that bad data leave no empty folder
    config, folder, state = open_run(config, given, resume)
    task = task or Task(config, resumed=bool(state))
    c, (device, dtype, why) = task.config, pick_device(config)
    formula = lambda kind: (ATTENTION[kind].__doc__ or kind).split('  ')[0].rstrip('.')
    source = f'{c.data}: {len(task.train):,} images'
    source = 'drawn shapes, new ones every step,' if c.data == 'builtin' else source
    print(f'model   {c.variant}\n'
          f'        self-attention of the decoder: {formula(c.self_attention)}\n'
          f'        its cross-attention: {formula(c.cross_attention)}\n'
          f'        {c.backbone} backbone, {c.enc_layers} + {c.dec_layers} layers, {c.hidden_dim} '
          f'wide, {c.num_queries} queries, {count(task.model):,} parameters\n'
          f'data    {source} of {len(task.train.classes)} classes; {len(task.val):,} for '
          f'validation\n'
          f'device  {device}, {str(dtype)[6:]} ({why})\n'
          f'run     {folder}' + (f', resumed, step {state["progress"][0]}' if state else ''))
    if c.updates == 'printed':
        print('warning --updates printed: these formulas do not solve the Lasso and diverge: past '
              'the threshold by a factor of 2 and more in every iteration')
    if c.backbone == 'resnet50' and not c.init:
        print('warning --backbone resnet50 without --init: its frozen batch norm hardly learns')
    return task, folder, state

@torch.no_grad()
def report(task, folder, result):
    """What came out: losses, AP, some detections, and where everything is."""
    c, log = task.config, result['log']
    lines = {name: points(log, 'iter', key) for name, key in
             (('training', 'loss'), ('validation', 'val_loss'))}
    values = [y for _, y in lines['training'] or lines['validation']]
    print(f'loss    {sparkline(values)} {values[0]:.2f} to {values[-1]:.2f}')
    figures = task.coco or result  # the latter where this run of the script has evaluated nothing
    print('result  ' + ', '.join(f'{key} {value:.3f}' for key, value in figures.items()
                                 if key[:2] == 'AP' and value >= 0))
    curves = lambda *keys: {key: points(log, 'iter', key) for key in keys}
    files = draw(folder / 'curves.png', [
        ('loss', 'step', lines), ('average precision', 'step', curves('AP', 'AP50')),
        ('paired with an object', 'step', curves('paired', 'l1', 'giou'))])
    plans = task.plans[:4]
    images, mask, _ = task.collate(plans, map(task.val.render, plans))
    found = post_process(task.model.eval()(images, mask), [plan.size[::-1] for plan in plans])
    pictures = [mark(pixels, f, c, 0.5) for pixels, f in zip(bytes_of(images), found)]
    write_png(folder / 'detections.png', np.concatenate(pictures, 2).transpose(1, 2, 0))
    print(f'files   {folder}: {", ".join(["ckpt.pt", "log.csv", "detections.png"] + files)}')

def load_run(config, given, resume):
    """A run that is there -> its model, ready to use, its config, folder and device."""
    config, folder, state = open_run(config, given, resume)
    device = pick_device(config)[0]
    model = DETR(config)
    restore(dict(model=model), state)
    return model.to(device).eval(), config, folder, device

@torch.no_grad()
def detect(options, config, given):
    """Boxes around what a run finds in images."""
    if not 0 <= options['threshold'] <= 1:
        fail(f'--threshold {options["threshold"]}: wants 0 to 1')
    try:
        photos = [read_photo(path, upright=True) for path in options['image']]
    except ValueError as e:
        fail(e)
    model, config, folder, device = load_run(config, given, options['resume'])
    names, answers = config.classes.split(',') + ['?'] * config.num_classes, {}
    stems = [Path(path).stem for path in options['image']]
    for n, (path, photo, stem) in enumerate(zip(options['image'], photos, stems)):
        size = resized(*photo.size, config.image_size, round(config.image_size * 1333 / 800))
        outputs = model(to_tensor(photo, size)[None].to(device))
        found = post_process(outputs, [photo.size[::-1]])[0]
        surest_first = sorted(zip(*(t.tolist() for t in found)), reverse=True)
        answers[path] = [(names[label], score, box) for score, label, box in surest_first
                         if score >= options['threshold']]
        print(f'{path}: {len(answers[path])} found'
              + '; score, class, left, top, right, bottom in pixels' * bool(answers[path]))
        for name, score, box in answers[path]:
            print(f'  {score:.2f}  {name:20}' + ''.join(f'{v:8.0f}' for v in box))
        target = folder / f'{stem}{f"-{n}" * (stems.count(stem) > 1)}-found.png'
        pixels = mark(np.asarray(photo).transpose(2, 0, 1), found, config, options['threshold'])
        write_png(target, pixels.transpose(1, 2, 0))
        print(f'  {target}')
    return dict(found=answers, folder=folder)

@torch.no_grad()
def inspect_run(options, config, given):
    """Where the decoder of a run looks (OA's Fig. 1), how sparsely, and how exact its solver is."""
    model, config, folder, device = load_run(config, given, options['resume'])
    task = Task(config, resumed=True)
    plans = task.plans[:8]
    images, mask, _ = task.collate(plans, map(task.val.render, plans))
    outputs, rows, gaps, x = diagnose(model, images, mask)
    write_csv(folder / 'inspect.csv', rows)
    lines = {layer: [(n, math.log10(gap + 1e-16)) for n, gap in enumerate(line, 1)]
             for layer, line in gaps.items()}
    panel = 'log10 of f / f* - 1', 'iterations', lines
    files = draw(folder / 'inspect.png', [panel]) if lines else []
    found, pictures = post_process(outputs, [plan.size[::-1] for plan in plans]), []
    *_, grid = model.encode(images, mask)
    for pixels, f, own in zip(bytes_of(images[:4]), found, x.abs().mean(1)):
        best = f[0].topk(min(3, len(f[0]))).indices
        plain = mark(pixels, f, config, 2.0)                                # (3, H, W), no boxes
        light = own[best].unflatten(1, grid)[None]                          # (1, best, h, w)
        light = F.interpolate(light / light.amax((2, 3), True).clamp_min(1e-12), plain.shape[1:])[0]
        pictures.append(np.concatenate([mark(pixels, [t[best] for t in f], config, 0.0), *(
            (plain * (0.25 + 0.75 * part)).astype(np.uint8) for part in light.cpu().numpy())], 2))
    write_png(folder / 'attention.png', np.concatenate(pictures, 1).transpose(1, 2, 0))
    print(diagnose.__doc__.split('\n\n')[-1].rstrip())
    table(rows)
    print('attention.png: images, the surest boxes in each, and where these look')
    print(f'files   {folder}: {", ".join(["inspect.csv", "attention.png"] + files)}')
    return dict(rows=rows, folder=folder)

def kept_bytes(f):
    """Bytes that f() keeps for its backward pass -> those, and f()'s result."""
    kept = {}
    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = f()
    return sum(kept.values()), y

SOLVER_SIZES = tuple(itertools.product((100, 850, 4096), (5, 10, 20)))

def bench_solvers(options, config, given):
    """Time and memory of the solvers for one image and head, 100 queries and N tokens, forward and
    backward; then what whole models cost."""
    if options['rounds'] < 2:
        fail(f'--rounds {options["rounds"]}: wants at least 2')
    device, rows = pick_device(config)[0], []
    print(' '.join(bench_solvers.__doc__.split(';')[0].split()) + ' (blank: too slow):')
    generator = torch.Generator().manual_seed(config.seed)
    for N, iterations in SOLVER_SIZES:
        q, k, v = (F.layer_norm(torch.randn(1, n, 256, generator=generator), (256,))[..., :32]
                   .to(device).requires_grad_() for n in (100, N, N))              # (1, n, 32)
        row = dict(N=N, iterations=iterations)
        for name in ('admm', 'admm-vanilla', 'recomputed'):
            c = replace(config, nheads=1, hidden_dim=32, iterations=iterations,
                        updates='textbook', recompute=name == 'recomputed')
            module = MultiheadAttention(c, 'admm' if c.recompute else name)
            slow = name == 'admm-vanilla' and N * iterations > 850 * 30
            times, kept = [], math.nan
            while not slow and len(times) <= options['rounds'] and sum(times[1:]) < 1:
                clock = now()
                kept, y = kept_bytes(lambda: module(q, k, v))
                y.square().sum().backward()
                if device.type == 'cuda':
                    torch.cuda.synchronize()
                times.append(now() - clock)
            row[f'{name} ms'] = 1e3 * min(times[1:], default=math.nan)  # the first one warms up
            row[f'{name} MB'] = kept / 1e6
        rows.append(row)
    table(rows)
    return dict(solvers=rows, variants=bench(options, config, given))

# ------------------------------------ main ------------------------------------

# --- workbench (identical in all four scripts; test_all.py checks)
def points(rows, x, y):
    """The (x, y) of the rows that have both."""
    return [(row[x], row[y]) for row in rows if row.get(y) is not None]

def sparkline(values):
    """A curve in one line of text."""
    values = values[::-(-len(values) // 60)]
    low, high = min(values), max(values)
    return ''.join('▁▂▃▄▅▆▇█'[int(7.99 * (v - low) / (high - low or 1))] for v in values)

def draw(path, panels, ordered=False):
    """panels: (title, x label, {line: [(x, y), ...]}), `ordered` lines in shades -> files made."""
    if RANK:
        return []
    try:
        from matplotlib import colormaps, figure
    except ImportError:
        print(f'no {path.name}: pictures want `pip install matplotlib`')
        return []
    across, down = min(4, len(panels)), -(-len(panels) // 4)
    picture = figure.Figure(figsize=(5 * across, 3.6 * down), layout='tight')
    axes = picture.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.axis('off')
    for axis, (title, label, lines) in zip(axes.flat, panels):
        for i, (name, line) in enumerate(lines.items()):
            shade = colormaps['viridis'](0.9 * i / max(1, len(lines) - 1))
            axis.plot(*zip(*line), label=name, color=shade if ordered else f'C{i}')
        axis.set(title=title, xlabel=label)
        axis.locator_params('x', integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, framealpha=0.5)
    picture.savefig(path, dpi=110)
    return [path.name]

def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

def table(rows):
    """Print rows, dicts of the same keys."""
    forms = {float: '{:.3f}', int: '{:,}'}
    show = lambda v: '' if v is None or v != v else forms.get(type(v), '{}').format(v)
    lines = [list(rows[0]), *([show(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*lines)]
    for first, *line in lines:
        print(first.ljust(widths[0]) + ''.join(map(str.rjust, line, widths[1:])))

def agreed(x):
    """What the first process has for x, in all of them."""
    box = [x]
    if WORLD > 1:
        dist.broadcast_object_list(box)
    return box[0]

def open_run(config, given, resume=None):
    """Config, folder and checkpoint of a run: a fresh folder and None or, where `resume` is a path,
    'newest' (of the runs the flags name) or 'auto' (the same, if any), the run to go on with."""
    base, name = Path(config.out_dir, SCRIPT), f'{config.variant}-s{config.seed}'
    if resume in ('auto', 'newest'):
        wanted = re.escape(name) + r'(-\d+)?' if set(given) - FREE else '.*'
        runs = [path for path in base.glob('*/ckpt.pt') if re.fullmatch(wanted, path.parent.name)]
        if not runs and resume == 'newest':
            fail(f'no run in {base} fits these flags: train first, or give --resume a folder')
        resume = agreed(max(runs, key=os.path.getmtime, default=None))
    if resume:
        path = Path(resume, 'ckpt.pt') if Path(resume).is_dir() else Path(resume)
        state = load_checkpoint(path)
        for key in set(given) - FREE:
            if given[key] != getattr(state['config'], key):
                fail(f'--{key.replace("_", "-")} {given[key]} contradicts {path}')
        free = {key: given[key] for key in FREE & set(given)}
        return replace(state['config'], **free), path.parent, state
    for n in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            folder = base / (name + f'-{n}' * (n > 1))
            if RANK == 0:
                folder.mkdir(parents=True)
            return config, agreed(folder), None

def train(options, config, given):
    task, folder, state = start(config, given, options['resume'])
    result = fit(task, task.config, folder, state)
    if RANK == 0:
        report(task, folder, result)
    return result

def cases_of(options, config):
    """{name: Config}: every combination of --over FIELD=A,B, or a table, by default the first."""
    if options['table'] and options['over']:
        fail('--table and --over exclude each other')
    cases = {'': {}} if options['over'] else TABLES[options['table'] or next(iter(TABLES))]
    taken = {'seed', 'data', 'tokenizer', 'threads', 'out_dir'}
    try:
        for spec in options['over'] or ():
            field, _, values = spec.partition('=')
            field = 'learning_rate' if field == 'lr' else field.replace('-', '_')
            kind = flags()[field][0]
            kind = {'true': True, 'false': False}.__getitem__ if kind is bool else kind
            if field in taken:
                fail(f'--over {spec}: {field} cannot be compared, or is twice there')
            taken.add(field)
            cases = {f'{name} {text}'.strip(): {**case, field: kind(text)}
                     for name, case in cases.items() for text in values.split(',')}
        return {name: replace(config, **case) for name, case in cases.items()}
    except KeyError as e:
        fail(f'--over {spec}: wants FIELD=VALUE,VALUE, a field that --help names and values it '
             f'takes (true, false), not {e}')
    except ValueError as e:
        fail(f'--over: {e}')

def compare(options, config, given):
    """Train every case with every seed on equal batches. A run is named by all that it depends on,
    so one that is finished is not repeated, and one that was interrupted goes on."""
    base, runs = Path(config.out_dir, SCRIPT, 'compare'), {}
    try:
        seeds = dict.fromkeys(map(int, options['seeds'].split(',')))
        plan = [(name, replace(c, seed=seed)) for seed in seeds
                for name, c in cases_of(options, config).items()]
    except ValueError as e:
        fail(f'--seeds {options["seeds"]}: {e}')
    print(f'{len(plan)} runs on --data {config.data}, but for what is finished already')
    for i, (name, c) in enumerate(plan):
        task, label = Task(c), f'[{i + 1}/{len(plan)}] {name} seed {c.seed}: '
        facts = [asdict(replace(c, max_minutes=0.0, out_dir='')), task.stamp, torch.__version__,
                 str(pick_device(c)[1:]), SOURCE,
                 Path(task.config.init).stat().st_mtime if task.config.init else '']
        mark = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
        folder = base / f'{re.sub("[^a-zA-Z0-9.-]+", "-", name)}-s{c.seed}-{mark}'
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / 'ckpt.pt'
        if state := load_checkpoint(path) if path.exists() else None:
            print(f'{label}found in {folder}')
        result = fit(task, task.config, folder, state, label)
        if result['iter'] < task.config.max_iters:
            fail('the time limit, --max-minutes, is reached; the same command goes on from here')
        runs.setdefault(name, []).append(dict(result, parameters=count(task.model)))
    return tabulate(runs, base, Task.metrics)

def tabulate(runs, base, metrics):
    """Print a comparison, {case: [result of each seed]}, and write it as csv and png."""
    rows, reference, wide = [], next(iter(runs.values())), max(19, *map(len, runs))
    every = [r for mine in runs.values() for r in mine]
    mean, kept = statistics.fmean, [m for m in metrics if all(m in r for r in every)]
    spread = lambda values: statistics.stdev(values) if len(values) > 1 else math.nan
    for metric, (case, mine) in itertools.product(kept, runs.items()):
        gaps = [r[metric] - first[metric] for r, first in zip(mine, reference)]
        rows.append(dict(
            case=case, metric=metric, seeds=len(mine), parameters=mine[0]['parameters'],
            mean=mean(r[metric] for r in mine), sd=spread([r[metric] for r in mine]),
            difference=mean(gaps), difference_sd=spread(gaps),
            t=mean(gaps) / (spread(gaps) / len(gaps) ** 0.5 or math.nan),
            seconds=mean(r['seconds'] for r in mine)))
        if case == next(iter(runs)):
            print(f'\n{metric:{wide}}{"parameters":>11}{"mean ± sd":>18}{"against first row":>18}'
                  f'{"t":>6}{"seconds":>8}')
        line = (' {parameters:10,} {mean:8.4f} ± {sd:6.4f} {difference:+8.4f} ± '
                '{difference_sd:6.4f} {t:5.1f} {seconds:7.0f}').format(**rows[-1])
        line = re.sub('(± )? *nan', lambda m: ' ' * len(m[0]), line)  # one seed, or no difference
        print(f'{case:{wide}}{line}')
    write_csv(base / 'compare.csv', rows)
    metric, late = kept[0], lambda r: [row for row in r['log'] if row['iter'] >= r['iter'] / 5]
    lines = lambda x: {case: [tuple(map(mean, zip(*at)))  # over the seeds, past the first fall
                              for at in zip(*(points(late(r), x, metric) for r in mine))]
                       for case, mine in runs.items()}
    steps = lines('iter')
    first = dict(steps[rows[0]['case']])
    less = {case: [(x, y - first[x]) for x, y in line if x in first]
            for case, line in steps.items()}
    files = draw(base / 'compare.png', [
        (metric, 'step', steps), (metric, 'seconds of training', lines('seconds')),
        (f'{metric} less that of {rows[0]["case"]}', 'step', less)])
    print(f'files   {base}: {", ".join(["compare.csv"] + files)}')
    return {m: {row['case']: row for row in rows if row['metric'] == m} for m in kept}

def bench(options, config, given):
    """Time training step and inference of the cases in turn, so that noise meets all alike."""
    device, dtype, why = pick_device(config)
    rounds, cases, times, rows = options['rounds'], cases_of(options, config), {}, {}
    if rounds < 2:
        fail(f'--rounds {rounds}: wants at least 2')

    def step(task, training):
        forward = task.loss if training else getattr(task, 'infer', task.loss)
        with task.autocast, torch.set_grad_enabled(training):
            loss = forward(task.wrapped.train(training), task.one_batch)
        if training:
            loss.backward()
            task.steps.step()
            task.steps.zero_grad()
        return loss.item()  # waits for the device

    print(f'{device}, {str(dtype)[6:]} ({why}); medians of {rounds} rounds, ratio to the first row '
          'and its interquartile range, MB kept for the backward pass')
    for name, c in cases.items():
        cases[name] = task = Task(c)
        device, dtype, _ = pick_device(c)
        task.autocast = torch.autocast(device.type, dtype, dtype != torch.float32)
        task.wrapped = torch.compile(task.model) if c.compile else task.model
        task.steps, last = task.optimizer(), task.config.max_iters  # when images are largest
        task.one_batch = task.batch(last, range(c.batch_size))
        kept = {}  # what the backward pass needs, by the place where it lies
        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            step(task, True)
        for p in task.model.parameters():
            kept.pop(p.data_ptr(), None)
        rows[name] = {'case': name, 'parameters': count(task.model),
                      'kept_MB': round(sum(kept.values()) / 1e6)}
    for _ in range(rounds + 2):  # two to warm up
        for name, task in cases.items():
            for training in (True, False):
                clock = now()
                step(task, training)
                times.setdefault((name, training), []).append(now() - clock)
    for (name, training), own in times.items():
        first, word = times[next(iter(cases)), training], 'train' if training else 'infer'
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(own[2:], first[2:])], n=4)
        median = statistics.median(own[2:])
        amount = cases[name].config.batch_size * cases[name].per_row
        rows[name].update({f'{word}_ms': 1e3 * median, f'{word}_ratio': ratio,
                           f'{word}_iqr': high - low,
                           f'{word}_{cases[name].unit}/s': round(amount / median)})
    table(list(rows.values()))
    return rows

def number(default, words):
    return dict(type=type(default), default=default, help=f'{words} [{default}]')

RESUME = {'--resume': dict(nargs='?', const='newest', metavar='PATH', help='go on with the run in '
                           'PATH; alone: with the newest; auto: with the newest, if any')}
NEWEST = {'--resume': dict(RESUME['--resume'], default='newest', help='the run to use [the newest]',
                           type=lambda path: 'newest' if path == 'auto' else path)}
OVER = {'--over': dict(action='append', metavar='FIELD=A,B', help='values to compare; repeatable'),
        '--table': dict(choices=TABLES, help='named rows of settings [the first]')}
ACTIONS = {
    'train': (train, RESUME, 'Train a model.'),
    'compare': (compare, {**OVER, '--seeds': dict(default='0,1,2', help='a run each [0,1,2]')},
                'Train variants on the same batches.'),
    'bench': (bench, {**OVER, '--rounds': number(20, 'measurements')}, 'Time the variants.'),
}

def main(argv=None):
    """Do what the command line says -> the figures that came out."""
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, 'reconfigure', lambda **_: None)(errors='replace', line_buffering=True)
    if RANK or not sys.stdout:
        sys.stdout = open(os.devnull, 'w')
    function, options, config, given = parse(argv, ACTIONS)
    there = config.data == 'builtin' or os.path.isdir(Path('data', config.data))
    missing = 'data' not in given and not there
    if missing and not options.get('resume'):
        print(f'data/{config.data} is not there, so this runs on the built-in data; the recipe '
              f'wants `python prepare_data.py {config.data}` (see README.md, Data)')
        config = replace(config, data='builtin')
    elif options['preset'] and not missing:
        given = {**PRESETS[options['preset']], **given}
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(config.threads or before[0])
    torch.set_float32_matmul_precision('high')  # TF32 where there is any
    if WORLD > 1:
        on_cuda = pick_device(config)[0].type == 'cuda'
        dist.init_process_group('nccl' if on_cuda else 'gloo')
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        return function(options, config, given)
    except OSError as e:
        fail(f'{e.filename or "system"}: {e.strerror or e}')
    except ImportError as e:
        fail(f'{e.name} is missing: pip install {e.name}')
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not re.search('out of memory|allocate memory', str(e)):
            raise
        fail(f'out of memory ({str(e).splitlines()[0][:90]}): a smaller --batch-size, with more '
             '--grad-accum-steps for it, takes the same steps')
    except KeyboardInterrupt:
        raise SystemExit(130)
    finally:  # a notebook goes on as it was
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if WORLD > 1:
            dist.destroy_process_group()
# --- end of workbench

IMAGES = {'image': dict(nargs='+', metavar='IMAGE', help='photos'), **NEWEST,
          '--threshold': number(0.5, 'least score of what is shown')}
ACTIONS.update({
    'bench': (bench_solvers, ACTIONS['bench'][1], 'Time the solvers and the variants.'),
    'inspect': (inspect_run, NEWEST, 'Where the decoder of a run looks, and how exact it is.'),
    'detect': (detect, IMAGES, 'Draw boxes around what is in images.'),
})

if __name__ == '__main__':
    main()
