# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""A ViT whose attention passes on a belief: BeliefFormer and AttentionX beside plain softmax.

Attention tells a patch of an image what the others say: MH = softmax(QK^T / sqrt(d)) V, a weighted
sum of values. BeliefFormer passes on only the part of MH that is orthogonal to the patch's own V,
what the patch did not know yet; AttentionX passes on V minus MH. (Why: PDMM, attentionx_gpt.py.)

    BF   G. Zhang, BeliefFormer: Belief Attention in Transformer, OpenReview Ard2QzPAUK
    AX1  G. Zhang, R. Heusdens, AttentionX, first version   AX2  its revision, arXiv 2409.04275
    SA   G. Zhang, SET-Adam, arXiv 2302.01029: the optimiser the other three name

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief, orthogonal
    [BF Eq. 13]     the same in every head, with a beta of its own       belief-head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, Attention
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX2 Sec. 5]    the same with a gamma that each head learns          attentionx-learned
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [AX1 Sec. 4.1]  gamma = 1 in a ViT                                   default_gamma
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma
    [BF Eq. 11]     ||Delta|| <= ||MH||, and both after W^o (Fig. 3)     diagnose
    [BF Sec. 5.3]   SET-Adam at 1e-4, betas 0.9 and 0.999, eps 1e-18     SETAdam, cifar-paper

AttentionX's two versions are one: gamma V - MH is gamma (V - MH / gamma), so that the first at
gamma and the revised one at 1 / gamma differ by a factor that W^o can absorb.

    python belief_vit.py                               # train: two minutes on a CPU, no network
    python belief_vit.py predict --images cat.png      # what that run sees in an image
    python belief_vit.py compare --over attention=softmax,attentionx,belief --seeds 0,1,2
    python belief_vit.py bench                         # what each variant costs
    python belief_vit.py inspect                       # BeliefFormer's Fig. 3, attention maps
    python belief_vit.py compare --preset cifar-paper --table papers  # AX Table 1 and BF Table 3
    python belief_vit.py --preset imagenet-paper       # DeiT-small, images growing from 32 to 224

The first gets 96.4 % of the test images right (another CPU: 95.5 %), a linear model 26.2 % (563
steps, 154,030 parameters, one seed). A stopped command, run again, goes on.

vit-small is from vision-transformers-cifar10, deit-small from timm, deit-small-local from
efficient-vit-training, [deviation] without EMA, repeated augmentation, random erasing, RandAugment
of photos and unused parameters, but with position embeddings that stay in the optimiser.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = 'belief_vit'
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many

def fail(message):
    """Stop with one line on what the user can do about it."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False):
    """MH = softmax(QK^T / sqrt(hs)) V, q, k, v (B, nh, T, hs) -> (B, T, nh, hs).  [BF Eq. 9]"""
    mask = None
    if zero_diag:  # a token attends only to the others
        mask = ~torch.eye(q.size(2), dtype=torch.bool, device=q.device)  # (T, T)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

def orthogonal(mh, v, dims):
    """MH - <MH,V> / <V,V> V, inner products over `dims`: the part of MH orthogonal to V."""
    dtype = torch.promote_types(v.dtype, torch.float32)  # ||V||^2 soon overflows float16
    x, y = mh.to(dtype), v.to(dtype)
    mh_v = (x * y).sum(dims, keepdim=True)
    v_v = (y * y).sum(dims, keepdim=True).clamp_min(1e-30)  # [choice] V = 0 takes nothing
    return (x - mh_v / v_v * y).to(mh.dtype)

ATTENTION = {  # from MH and V (B, T, nh, hs): what reaches the output projection
    'softmax': lambda mh, v, gamma: mh,                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,             # [AX2 Eq. 10]
    'attentionx-learned': lambda mh, v, gamma: v - gamma * mh,     # [AX2 Sec. 5] learns gamma
    'attentionx-v1': lambda mh, v, gamma: gamma * v - mh,          # [AX1 Eq. 9]
    'belief': lambda mh, v, gamma: orthogonal(mh, v, (-2, -1)),    # [BF Eq. 10]
    'belief-head': lambda mh, v, gamma: orthogonal(mh, v, (-1,)),  # [BF Eq. 13], in every head
    # both, each with an output matrix of its own  [BF Eq. 15]
    'belief-star': lambda mh, v, gamma: (orthogonal(mh, v, (-2, -1)), orthogonal(mh, v, (-1,))),
    'softmax-scaled': lambda mh, v, gamma: gamma * mh,             # two controls
    'value-skip': lambda mh, v, gamma: mh + v,
}

def default_gamma(c):
    """c.gamma or, where that is None, the papers' choice."""
    if c.gamma is not None:
        return float(c.gamma)
    if c.attention == 'attentionx-v1' or c.zero_diag:
        return 1.0  # [AX1 Sec. 4.1] [AX2 Sec. 3.2]
    return 3.0  # [choice] AX2's value for a GPT

# ------------------------------------ configuration ------------------------------------
MODELS = {  # what fields of Config left at None default to
    'tiny': dict(image_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=4, head_size=16,
                 mlp_dim=128, dropout=0.0, zero_diag=True),
    'vit-small': dict(image_size=32, patch_size=4, embed_dim=512, depth=6, num_heads=8,
                      head_size=64, mlp_dim=512, dropout=0.1, zero_diag=True),
    'deit-small': dict(image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6,
                       head_size=64, mlp_dim=1536, dropout=0.0, zero_diag=False),
}
MODELS['deit-small-local'] = MODELS['deit-small']  # with LocalViT's feed-forward network

@dataclass
class Config:
    """Every field is a flag: --num-heads 6, --zero-diag, --no-zero-diag. --help prints this."""
    # the papers' method
    attention: str = 'belief'      # a name in ATTENTION: what reaches the output projection
    gamma: float = None            # default: 1 for v1 and with zero_diag, else 3
    zero_diag: bool = None         # no token attends to itself; default: on in tiny, vit-small
    # model
    model: str = 'tiny'            # a name in MODELS, which sets the sizes not given here
    image_size: int = None         # side of the square image, in pixels
    patch_size: int = None         # pixels
    embed_dim: int = None          # channels of a token
    depth: int = None              # blocks
    num_heads: int = None
    head_size: int = None          # channels of a head
    mlp_dim: int = None            # hidden channels of the feed-forward network
    dropout: float = None
    drop_path: float = 0.0         # chance to drop a branch: 0 in the first block, this in the last
    num_classes: int = 0           # as many as the data has
    classes: list = ()             # their names, from the data
    init: str = ''                 # file with weights to start from: a checkpoint of DeiT, say
    # data
    data: str = 'builtin'          # name under data/, a folder of photos, or builtin: drawn shapes
    val_fraction: float = 0.1      # of the training images, for validation
    flip: bool = True              # mirror half of the images in training
    randaugment: str = 'none'      # none, paper or fixed: for small images, besides crop and flip
    mix: bool = False              # mixup and cutmix, as in DeiT
    label_smoothing: float = 0.0   # probability spread over all classes
    first_size: int = 0            # side of the first images, in pixels; 0: image_size
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 563           # optimiser steps: 5 epochs of 7,200 drawn shapes
    batch_size: int = 64           # images in memory at once, shared among the processes
    grad_accum_steps: int = 1      # batches in an optimiser step
    optimizer: str = 'adamw'       # adamw, or set-adam as in the papers
    learning_rate: float = 4e-3    # at its peak
    min_lr: float = 0.0            # final cosine rate, as a fraction of learning_rate
    schedule: str = 'cosine'       # cosine, trapezoid, step or constant, after warmup
    warmup_iters: int = 50
    warmdown_iters: int = 0        # steps at the end: to 0 (trapezoid) or at a tenth (step)
    weight_decay: float = 0.05     # AdamW's, on matrices
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations, and between checkpoints
    eval_rows: int = 0             # validation images; 0: all there are
    dtype: str = 'auto'            # of matmuls: float32, bfloat16, float16
    # machine: from here on, settings may differ when a run resumes
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0 for PyTorch's default
    log_interval: int = 50         # steps between lines of progress
    reuse: bool = False            # take finished runs of these settings, even of other code
    fresh: bool = False            # restart a stopped or finished run from scratch
    out_dir: str = 'out'           # where runs are written
    # actions
    run: str = ''                  # predict: a run's folder; default: train's last run
    images: list = ()              # predict: photos; may be repeated
    over: list = ()                # compare, bench: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    from_csv: str = ''             # compare: files A,B (runs.csv) to tabulate; trains nothing
    figure: str = ''               # compare: what to test, e.g. mean_loss; default: the result
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(f'--{name} {getattr(self, name)}: choose from {", ".join(allowed)}')
        for name, size in MODELS[self.model].items():
            if getattr(self, name) is None:
                setattr(self, name, size)
        for name in POSITIVE:
            if getattr(self, name) < 1:
                fail(f'--{name.replace("_", "-")} {getattr(self, name)}: must be at least 1')
        for name in ('seed', 'max_iters', 'eval_rows', 'first_size'):
            if getattr(self, name) < 0:
                fail(f'--{name.replace("_", "-")} {getattr(self, name)}: must be 0 or more')
        gamma = default_gamma(self)
        if self.attention in ('attentionx', 'attentionx-learned') and not gamma >= 1:
            fail(f'--gamma {gamma:g}: {self.attention} takes 1 or more')
        if self.attention == 'attentionx-v1' and not 0 < gamma <= 1:
            fail(f'--gamma {gamma:g}: attentionx-v1 takes more than 0, up to 1')
        if self.image_size % self.patch_size or self.first_size % self.patch_size:
            fail(f'--patch-size {self.patch_size} must divide --image-size and --first-size')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')
        if any(spec.startswith('model=') for spec in self.over):
            fail('--over model: each has sizes of its own; compare takes one model')

    @property
    def shifted(self):  # shifted patch embedding, and a learned softmax temperature
        return self.model in ('tiny', 'vit-small')

    @property
    def variant(self):
        return f'{self.model}-{self.attention}' + ('-zd' if self.zero_diag else '')

PRESETS = {
    'tiny': {},
    't4': dict(model='vit-small', data='cifar10', randaugment='fixed', max_iters=2637,  # 30 epochs
               batch_size=512, learning_rate=5e-4, warmup_iters=200, eval_interval=200, threads=0),
    # the papers name a repository and SET-Adam's settings, BF 400 epochs; the rest is that repo's,
    # [deviation] but a tenth of the images is for validation, because the test set may not choose
    'cifar-paper': dict(model='vit-small', data='cifar10', randaugment='paper',
                        max_iters=35157,  # 400 epochs of 45,000 images
                        batch_size=512, optimizer='set-adam', learning_rate=1e-4,
                        warmup_iters=0, grad_clip=0.0, eval_interval=88, threads=0),
    # BF names the repository and the model
    'imagenet-paper': dict(model='deit-small-local', data='imagenet', batch_size=64,
                           max_iters=5945415,  # 300 epochs; the repo's best run stopped at 24 hours
                           learning_rate=1.25e-4, min_lr=0.08, warmup_iters=0, grad_clip=0.0,
                           drop_path=0.1, mix=True, label_smoothing=0.1, first_size=32,
                           val_fraction=0.01, eval_interval=10000, threads=0),
}
TABLES = {  # rows for `compare --table NAME`
    'all': {name: dict(attention=name) for name in ATTENTION},
    # AX1 and AX2 Table 1: CIFAR-10 88.15 and 89.41 %, CIFAR-100 61.86 and 64.00 %
    # BF Table 3: CIFAR-10 88.15, 89.14 and, for belief-star, 88.64 %
    'papers': {name: dict(attention=name)
               for name in ('softmax', 'attentionx', 'belief', 'belief-star')},
}
POSITIVE = ('image_size', 'patch_size', 'embed_dim', 'depth', 'num_heads', 'head_size', 'mlp_dim',
            'batch_size', 'grad_accum_steps', 'eval_interval', 'log_interval', 'rounds')
CHOICES = {
    'attention': ATTENTION, 'model': MODELS, 'randaugment': ('none', 'paper', 'fixed'),
    'optimizer': ('adamw', 'set-adam'), 'table': ('', *TABLES),
    'schedule': ('cosine', 'trapezoid', 'step', 'constant'),
    'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
class PatchEmbed(nn.Module):
    """Images (B, 3, H, W) -> tokens (B, h w, C), one for each patch."""
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Conv2d(3, c.embed_dim, c.patch_size, c.patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).mT  # (B, h w, C)

class ShiftedPatchEmbed(nn.Module):
    """The same from five images stacked: the image, and its shifts by a pixel in 4 directions."""
    def __init__(self, c):
        super().__init__()
        self.patch_size = c.patch_size
        width = 5 * 3 * c.patch_size ** 2
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, c.embed_dim)

    def forward(self, images):
        p = self.patch_size
        shifts = (0, 0, 0, 0), (1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1)
        x = torch.cat([F.pad(images, shift) for shift in shifts], dim=1)  # (B, 15, H, W)
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, 15, h, p, w, p)
        x = x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, h w, p p 15)
        return self.proj(self.norm(x))

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)  # for one of yours per head register a buffer (nh, 1)
        if c.attention == 'attentionx-learned':  # one per head; only weights decay
            self.gamma = nn.Parameter(torch.full((c.num_heads, 1), self.gamma))
        width = c.num_heads * c.head_size
        self.qkv = nn.Linear(c.embed_dim, 3 * width, bias=c.model == 'deit-small')
        self.proj = nn.Linear(width, c.embed_dim)  # W^o
        if c.attention == 'belief-star':
            # [choice] W^s has no bias, as W^o has one, and starts as W^o does
            self.proj_s = nn.Linear(width, c.embed_dim, bias=False)
        if c.shifted:
            self.temperature = nn.Parameter(torch.tensor(math.log(c.head_size ** -0.5)))
        self.drop = nn.Dropout(c.dropout)

    def heads(self, x):
        """x (B, T, C) -> q, k, v, MH, each (B, T, nh, hs).
        (A variant that needs Q or K takes them from here.)"""
        c = self.config
        q, k, v = self.qkv(x).unflatten(2, (3, c.num_heads, -1)).unbind(2)
        if c.shifted:  # a learned scale; the kernel's own, 1 / sqrt(hs), is undone
            q = q * (self.temperature.exp() * c.head_size ** 0.5)
        mh = multi_head(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), c.zero_diag)
        return q, k, v, mh

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)."""
        _, _, v, mh = self.heads(x)
        update = ATTENTION[self.config.attention](mh, v, self.gamma)
        if self.config.attention == 'belief-star':  # [BF Eq. 15]
            delta, delta_s = update
            return self.drop(self.proj(delta.flatten(2)) + self.proj_s(delta_s.flatten(2)))
        return self.drop(self.proj(update.flatten(2)))

class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, grid):
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))

class LocalMlp(nn.Module):
    """LocalViT's: a depthwise 3x3 convolution mixes neighbours; other tokens get nothing."""
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.conv = nn.Conv2d(c.mlp_dim, c.mlp_dim, 3, padding=1, groups=c.mlp_dim, bias=False)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x, grid):
        others = x.size(1) - math.prod(grid)  # 1: the class token; patches are the last ones
        x = F.hardswish(self.fc1(x[:, others:])).mT.unflatten(2, grid)  # (B, D, h, w)
        x = F.hardswish(self.conv(x)).flatten(2).mT  # (B, h w, D)
        return F.pad(self.fc2(x), (0, 0, others, 0))  # (B, 1 + h w, C)

class Block(nn.Module):
    def __init__(self, c, drop_path):
        super().__init__()
        self.drop_path = drop_path
        eps = 1e-5 if c.shifted else 1e-6
        self.norm1 = nn.LayerNorm(c.embed_dim, eps)
        self.attn = Attention(c)
        self.norm2 = nn.LayerNorm(c.embed_dim, eps)
        self.mlp = LocalMlp(c) if c.model == 'deit-small-local' else Mlp(c)

    def stochastic_depth(self, branch):
        """In training, leave the branch out for some of the images."""
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)

    def forward(self, x, grid):
        """x (B, 1 + h w, C), grid (h, w) -> (B, 1 + h w, C)."""
        x = x + self.stochastic_depth(self.attn(self.norm1(x)))
        return x + self.stochastic_depth(self.mlp(self.norm2(x), grid))

def resize_positions(pos, grid):
    """Position embeddings pos (1, 1 + g g, C) -> (1, 1 + h w, C) for a grid (h, w), bicubic."""
    g = math.isqrt(pos.size(1))
    if grid == (g, g):
        return pos
    others, patches = pos.split([pos.size(1) - g * g, g * g], dim=1)  # others: the class token
    patches = patches.mT.unflatten(2, (g, g))  # (1, C, g, g)
    patches = F.interpolate(patches, grid, mode='bicubic').flatten(2).mT  # (1, h w, C)
    return torch.cat([others, patches], dim=1)

def init_vit_small(name, p, layer, generator):
    """Large tokens; PyTorch's own, spread by what a unit takes in, for all else."""
    if name in ('pos_embed', 'cls_token'):
        p.normal_(generator=generator)
    else:
        bound = layer.weight[0].numel() ** -0.5
        p.uniform_(-bound, bound, generator=generator)

def init_deit_small(name, p, layer, generator):
    """timm's: PyTorch's for convolutions alone."""
    if isinstance(layer, nn.Conv2d):
        init_vit_small(name, p, layer, generator)
    elif name.endswith('bias'):
        p.zero_()
    else:
        nn.init.trunc_normal_(p, std=0.02, generator=generator)

def init_deit_small_local(name, p, layer, generator):
    """Xavier's, for q, k and v apart; PyTorch's for convolutions and biases."""
    if isinstance(layer, nn.Conv2d) or name.endswith('bias'):
        init_vit_small(name, p, layer, generator)
    else:
        for part in p.chunk(3 if 'qkv' in name else 1):
            nn.init.xavier_normal_(part, generator=generator)

INIT = {'tiny': init_vit_small, 'vit-small': init_vit_small, 'deit-small': init_deit_small,
        'deit-small-local': init_deit_small_local}

class ViT(nn.Module):
    """The model that config.model names, with timm's state-dict keys."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.patch_embed = ShiftedPatchEmbed(c) if c.shifted else PatchEmbed(c)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.embed_dim))
        tokens = 1 + (c.image_size // c.patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, c.embed_dim))
        self.drop = nn.Dropout(c.dropout)
        rates = [c.drop_path * i / max(1, c.depth - 1) for i in range(c.depth)]
        self.blocks = nn.ModuleList(Block(c, rate) for rate in rates)
        self.norm = nn.LayerNorm(c.embed_dim, 1e-5 if c.shifted else 1e-6)
        self.head = nn.Linear(c.embed_dim, max(1, c.num_classes))
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p from its own generator: what two variants share starts out equal."""
        generator = torch.Generator().manual_seed(zlib.crc32(f'{self.config.seed} {name}'.encode()))
        layer = self.get_submodule(name.rpartition('.')[0])
        if name in ('pos_embed', 'cls_token') or isinstance(layer, (nn.Linear, nn.Conv2d)):
            INIT[self.config.model](name, p, layer, generator)
        # norms, and what you may add, keep the values they were made with

    def embed(self, images):
        """Images (B, 3, H, W), of any size in whole patches -> tokens (B, 1 + h w, C), (h, w)."""
        p = self.config.patch_size
        grid = images.size(2) // p, images.size(3) // p
        x = self.patch_embed(images)  # (B, h w, C)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)  # (B, 1 + h w, C)
        return self.drop(x + resize_positions(self.pos_embed, grid)), grid

    def forward(self, images):
        """Normalised images (B, 3, H, W) -> logits (B, classes)."""
        x, grid = self.embed(images)
        for block in self.blocks:
            x = block(x, grid)
        return self.head(self.norm(x)[:, 0])

class SETAdam(torch.optim.Optimizer):
    """Adam that narrows the range of its step sizes, tensor by tensor.  [SA]

    With Adam's moments m and v of a tensor of d entries, in step t:
        c = (sum v)^2 / (d sum v^2)             1 where all v are equal, 1/d where one dominates
        w = sqrt(c v / (1 - beta2^t) + eps)     below Adam's root, so steps are larger
        theta -= lr / (1 - beta1^t) m / (w - tau min w)          tau = 0.5 may be its source's
    A tensor is one PyTorch parameter, so packing q, k and v differently changes the optimiser.
    """
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.999), eps=1e-18, tau=0.5):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, tau=tau))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group['betas']
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state['step'] += 1
                m, v, t = state['m'], state['v'], state['step']
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                # [choice] v in units of its largest entry: c is the same, and v^2 stays in range
                unit = v / v.max().clamp_min(1e-37)
                c = unit.sum().square() / (v.numel() * unit.square().sum().clamp_min(1.0))
                w = (c * (v / (1 - beta2 ** t)) + group['eps']).sqrt()
                step = m / (w - group['tau'] * w.min())
                p.sub_(step * (group['lr'] / (1 - beta1 ** t)))

# ------------------------------------ data ------------------------------------
def stream(name, *numbers):
    """A generator of its own: NumPy pads seeds with zeros, so [1, 7] would equal [1, 7, 0]."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

SHAPES = {  # how far a point (x, y) lies outside a shape, in units of half its size
    'disc': lambda x, y: np.hypot(x, y) - 0.8,
    'ring': lambda x, y: abs(np.hypot(x, y) - 0.7) - 0.2,
    'square': lambda x, y: np.maximum(abs(x), abs(y)) - 0.7,
    'frame': lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.6) - 0.17,
    'triangle': lambda x, y: np.maximum(0.866 * abs(x) + 0.5 * y, -y) - 0.5,
    'cross': lambda x, y: np.minimum(np.maximum(abs(x) - 0.25, abs(y) - 0.9),
                                     np.maximum(abs(y) - 0.25, abs(x) - 0.9)),
    'star': lambda x, y: np.hypot(x, y) - 0.6 - 0.35 * np.cos(5 * np.arctan2(y, x)),
    'moon': lambda x, y: np.maximum(np.hypot(x, y) - 0.9, 0.75 - np.hypot(x - 0.45, y)),
    'bars': lambda x, y: np.maximum(abs(abs(x) - 0.45) - 0.2, abs(y) - 0.85),
    'dots': lambda x, y: np.hypot(abs(x) - 0.55, y) - 0.38,
}

def draw_shapes(n, seed):
    """n drawings -> images (n, 3, 32, 32) uint8, labels (n,). Place, size, angle, colours, light
    and noise are random, so that only many pixels together reveal a shape."""
    rng = stream('shapes', seed)
    images = np.empty((n, 3, 32, 32), np.uint8)
    labels = rng.integers(len(SHAPES), size=n)
    outside = list(SHAPES.values())
    ramp = np.linspace(-1, 1, 32)
    row, column = ramp[:, None], ramp[None]
    for image, label in zip(images, labels):
        half, turn = rng.uniform(8, 13), rng.uniform(0, 2 * math.pi)  # size in pixels, angle
        right, down = rng.uniform(half - 15, 15 - half, 2)  # of the middle, in pixels
        x = (15.5 * column - right) / half  # in units of half the size
        y = (15.5 * row - down) / half
        cos, sin = math.cos(turn), math.sin(turn)
        distance = outside[label](cos * x + sin * y, cos * y - sin * x)  # (32, 32)
        cover = np.clip(0.5 - half * distance, 0, 1)
        paper, ink = rng.uniform(0, 130, (3, 1, 1)), rng.uniform(60, 120, (3, 1, 1))
        light_x, light_y = rng.uniform(-40, 40, (2, 3, 1, 1))
        light = light_x * column + light_y * row  # (3, 32, 32)
        noise = rng.normal(0, 10, (3, 32, 32))
        image[:] = (paper + light + ink * cover + noise).clip(0, 255)
    return images, labels

def load_arrays(path):
    """An .npz file -> images (N, 3, H, W) uint8, labels (N,)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file['images'], file['labels'].astype(np.int64)
        if images.dtype != np.uint8 or images.shape[:2] != (len(labels), 3):
            raise ValueError(f'images are {images.dtype} {images.shape}')
        return images, labels
    except Exception as error:  # numpy and zipfile raise half a dozen kinds
        fail(f'{path} needs images (N, 3, H, W) uint8 and labels (N,): {str(error)[:150]}')

def list_photos(root, classes):
    """Photos in root/CLASS/* -> paths (N,), labels (N,)."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((root / name).rglob('*.*')):
            if path.suffix.lower() in ('.jpg', '.jpeg', '.png', '.bmp', '.webp'):
                paths.append(str(path))
                labels.append(label)
    return np.array(paths), np.array(labels)

def load_folder(folder):
    """train.npz, perhaps test.npz and meta.json; or photos in CLASS/*, or in train/CLASS/* and, as
    the test set, val/CLASS/*, as in ImageNet -> train, test or None, names of classes."""
    if (folder / 'train.npz').exists():
        train, test = load_arrays(folder / 'train.npz'), None
        if (folder / 'test.npz').exists():
            test = load_arrays(folder / 'test.npz')
        classes = [str(i) for i in range(train[1].max() + 1)]
        if (folder / 'meta.json').exists():
            classes = json.loads((folder / 'meta.json').read_text('utf-8'))['classes']
        return train, test, classes
    root = folder / 'train' if (folder / 'train').is_dir() else folder
    names = [path.name for path in root.iterdir() if path.is_dir()]
    classes = sorted(name for name in names if name[0] != '.')  # no .ipynb_checkpoints
    train, test = list_photos(root, classes), None
    if len(classes) < 2 or not len(train[0]):
        fail(f'{folder} needs train.npz, CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg')
    if root != folder and (folder / 'val').is_dir():
        test = list_photos(folder / 'val', classes)
    return train, test, classes

def pillow():
    """The package that decodes photos and has RandAugment's operations."""
    try:
        import PIL.Image, PIL.ImageEnhance, PIL.ImageOps
        return PIL
    except ImportError:
        raise ImportError('photos and --randaugment need `pip install pillow`')

def read_photo(path, size, draws=None):
    """A photo -> (3, size, size) uint8: its centre, as in ImageNet evaluation, or, given four
    random numbers, a crop of 8 to 100 % of its area, aspect 3:4 to 4:3."""
    PIL = pillow()
    try:
        with PIL.Image.open(str(path)) as file:
            image = PIL.ImageOps.exif_transpose(file).convert('RGB')
    except OSError as error:
        raise OSError(f'{path} is no photo: {error}')
    width, height = image.size
    if draws is None:
        w = h = min(width, height) * (0.875 if size > 64 else 1.0)
        left, top = (width - w) / 2, (height - h) / 2
    else:
        area = width * height * (0.08 + 0.92 * draws[0])
        aspect = (4 / 3) ** (2 * draws[1] - 1)
        w, h = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
        left, top = draws[2] * (width - w), draws[3] * (height - h)
    image = image.resize((size, size), PIL.Image.BICUBIC, (left, top, left + w, top + h))
    return np.asarray(image).transpose(2, 0, 1)

def data_folder(c):
    return Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)

def data_files(c):
    """The files that the data and the first weights come from: a change of theirs trains anew."""
    files = [] if c.data == 'builtin' else sorted(data_folder(c).rglob('*'))
    return files + [Path(c.init)]

def load_data(c):
    """-> train, val and test, each images, bytes (N, 3, H, W) or paths of photos (N,), and labels
    (N,) int64; names of classes; a line about them."""
    if c.data == 'builtin':
        train, test, classes = draw_shapes(8000, 0), draw_shapes(2000, 1), list(SHAPES)
    elif data_folder(c).is_dir():
        train, test, classes = load_folder(data_folder(c))
    else:
        fail(f'--data {c.data}: no such folder, nor data/{c.data}. `python prepare_data.py '
             f'{c.data}` makes that (without a name: a list); photos: FOLDER/CLASS/*.jpg')
    images, labels = train
    order = stream('split').permutation(len(labels))
    cut = round(c.val_fraction * len(labels))
    val, rest = order[:cut], order[cut:]
    if test is None:  # hold out as many images as for validation
        test, rest = (images[rest[:cut]], labels[rest[:cut]]), rest[cut:]
    if cut < 1 or len(rest) < 1:
        fail(f'--data {c.data}: validation takes {cut} of {len(labels)} images: set --val-fraction')
    highest = max(labels.max(), test[1].max())
    if highest >= len(classes):
        fail(f'--data {c.data}: label {highest} has no name: there are {len(classes)} classes')
    about = (f'{c.data}, {len(rest):,} images of {len(classes)} classes, {cut:,} for validation, '
             f'{len(test[1]):,} to test')
    return SimpleNamespace(train=(images[rest], labels[rest]), val=(images[val], labels[val]),
                           test=test, classes=classes, about=about)

COLOURS = {  # mean and standard deviation of red, green and blue, as in the repositories
    'cifar10': ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    'cifar100': ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # and all others
}

THREADS = ThreadPoolExecutor()  # to decode photos

def mean_and_std(c, device):
    """Of a colour's bytes: (3, 1, 1) each."""
    colours = torch.tensor(COLOURS.get(Path(c.data).name, COLOURS['imagenet']), device=device)
    return 255 * colours[:, :, None, None]

def normalise(images, size, c, device='cpu'):
    """Bytes (B, 3, H, W), or paths (B,) of photos, which are centre-cropped -> float32
    (B, 3, size, size), mean about 0 and sd about 1."""
    if images.ndim == 1:
        images = np.stack(list(THREADS.map(lambda path: read_photo(path, size), images)))
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != np.uint8:
        fail(f'images must be bytes (N, 3, H, W), not {images.dtype} {images.shape}')
    mean, std = mean_and_std(c, device)
    x = (torch.from_numpy(images).to(device).float() - mean) / std
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode='bicubic', antialias=True)
    return x

# ------------------------------------ augmentation ------------------------------------
def randaugment(x, draws, policy):
    """Two operations at strength 14 of 30 on an image, bytes (3, H, W)."""
    PIL = pillow()
    ops, enhance = PIL.ImageOps, PIL.ImageEnhance
    _, height, width = x.shape
    strength = 14 / 30
    side = 40 * strength  # of a square, in pixels
    far_x = far_y = 100  # pixels, meant for images of 224
    if policy == 'fixed':
        far_x, far_y = 0.45 * width, 0.45 * height

    def affine(*matrix):  # output (x, y) is taken from input (ax + by + c, dx + ey + f)
        return image.transform((width, height), PIL.Image.AFFINE, matrix)

    def cutout():  # a grey square, moved inside at the top and left only, as in its source
        left, top = int(max(0, at_x * width - side / 2)), int(max(0, at_y * height - side / 2))
        image.paste((125, 123, 114), (left, top, left + int(side) + 1, top + int(side) + 1))
        return image

    image = PIL.Image.fromarray(np.ascontiguousarray(x.transpose(1, 2, 0)))
    for which, sign, at_y, at_x in draws.reshape(2, 4):
        s = strength if sign < 0.5 else -strength
        operations = [
            lambda: ops.autocontrast(image),
            lambda: ops.equalize(image),
            lambda: ops.invert(image),
            lambda: image.rotate(30 * s),
            lambda: ops.posterize(image, 1),  # bits
            lambda: ops.solarize(image, 256 * strength),
            lambda: ops.solarize(image.point(lambda level: min(255, level + 51)), 128),
            lambda: enhance.Color(image).enhance(0.94),  # 1 would leave all as it is
            lambda: enhance.Contrast(image).enhance(0.94),
            lambda: enhance.Brightness(image).enhance(0.94),
            lambda: enhance.Sharpness(image).enhance(0.94),
            lambda: affine(1, 0.3 * s, 0, 0, 1, 0),  # shear
            lambda: affine(1, 0, 0, 0.3 * s, 1, 0),
            cutout,
            lambda: affine(1, 0, far_x * s, 0, 1, 0),  # translate
            lambda: affine(1, 0, 0, 0, 1, far_y * s),
        ]
        image = operations[int(which * len(operations))]()
    return np.asarray(image).transpose(2, 0, 1)

DRAWS = 11  # random numbers for an image: crop y, x; flip; twice: operation, sign, point y, x

def augment(x, draws, c, size=None):
    """A photo's path -> a random crop (3, size, size). An image (3, H, W) gets two RandAugment
    operations and a crop after padding with 4 black pixels. Both are maybe mirrored."""
    if isinstance(x, str):
        x, mirror = read_photo(x, size, draws), draws[4] < 0.5
    else:
        mirror = draws[2] < 0.5
        if c.randaugment != 'none':
            x = randaugment(x, draws[3:], c.randaugment)
        _, H, W = x.shape
        top, left = (9 * draws[:2]).astype(int)
        padded = np.pad(x, ((0, 0), (4, 4), (4, 4)))
        x = padded[:, top:top + H, left:left + W]
    return x[..., ::-1] if mirror and c.flip else x

def mix(images, rng):
    """Mixup or cutmix, equally likely, of images (B, 3, H, W) and the batch reversed -> images, and
    the share that each keeps of itself."""
    other = images.flip(0)
    if rng.random() < 0.5:
        share = rng.beta(0.8, 0.8)
        return other.lerp(images, share), share
    size = np.array(images.shape[2:])
    half = math.sqrt(1 - rng.beta(1.0, 1.0)) / 2
    centre = rng.random(2)
    corners = np.clip([centre - half, centre + half], 0, 1) * size
    (top, left), (bottom, right) = corners.round().astype(int)
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / size.prod()  # the border may cut the box

# ------------------------------------ training ------------------------------------
# What the loop below knows of images: these names and functions.
METRIC = 'val_acc'    # best.pt and `compare --best` go by this validation figure:
BETTER = max          # higher is better
RESULTS = ['test_acc', 'best_test_acc', 'mean_loss']  # what `compare` tabulates: differences of
BASELINE = dict(attention='softmax')  # the first; the case that `compare` and `bench` put first
LABELS = {'loss': 'training loss (nats per image)', 'val_acc': 'validation accuracy (share)',
          'seconds': 'seconds of training steps', 'mh': 'mean length, before the output projection',
          'mh_out': 'mean length, after the output projection', 'cos_mh': 'cosine with X'}

def make_model(c, data):
    """A model on the CPU. Its config is c plus what the data decide; without data, c has that."""
    if data:
        c = replace(c, classes=data.classes, num_classes=len(data.classes))
    model = ViT(c)
    if c.init and data:
        load_weights(model, c.init)
    return model

def load_weights(model, path):
    """A checkpoint of this script, of timm or of DeiT, which share keys. Positions are resized;
    what it lacks, W^s for one, and an output layer for other classes start anew."""
    saved = load_checkpoint(path, own=False)
    weights = dict(saved.get('model', saved))
    if 'pos_embed' in weights:
        g = math.isqrt(model.pos_embed.size(1))
        weights['pos_embed'] = resize_positions(weights['pos_embed'], (g, g))
    if len(weights.get('head.weight', ())) != len(model.head.weight):
        weights.update({'head.weight': model.head.weight, 'head.bias': model.head.bias})
        print(f'note    {path} is for other classes: output layer starts anew')
    new = {name: p for name, p in model.state_dict().items() if name not in weights}
    if new:
        print(f'note    {path} lacks {", ".join(new)}: they start anew')
    try:
        model.load_state_dict({**new, **weights})
    except RuntimeError as error:
        fail(f'--init {path} does not fit the model: {" ".join(str(error).split())[:200]}')

def make_optimizer(model, c):
    """SET-Adam [BF Sec. 5.3], or AdamW, which decays matrices named `weight`."""
    if c.optimizer == 'set-adam':
        return SETAdam(model.parameters(), c.learning_rate)
    matrices, others = [], []
    for name, p in model.named_parameters():
        group = matrices if name.endswith('.weight') and p.dim() >= 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=c.weight_decay),
              dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, c.learning_rate)  # betas 0.9 and 0.999, as SET-Adam's

@functools.lru_cache(2)
def shuffled(seed, epoch, n):
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro, device):
    """Images (B, 3, size, size), labels (B,), and the share that each image keeps of itself: this
    process's rows of micro-batch `micro`, which follow from seed and step alone."""
    images, labels = data.train
    n, per_step = len(labels), c.batch_size * c.grad_accum_steps
    begin = step * per_step  # in an endless sequence of shuffled epochs
    rows = slice(micro * c.batch_size + RANK, (micro + 1) * c.batch_size, WORLD)
    places = range(begin, begin + per_step)[rows]
    index = [shuffled(c.seed, place // n, n)[place % n] for place in places]
    draws = stream('chance', c.seed, step).random((per_step, DRAWS))[rows]
    growth = 2 * c.patch_size * (begin // (5 * n))  # two patches more every five epochs
    size = min(c.image_size, (c.first_size or c.image_size) + growth)  # in pixels
    run = THREADS.map if images.ndim == 1 else map  # only decoding photos gains from threads
    batch = run(lambda x, row: augment(x, row, c, size), images[index], draws)
    x = normalise(np.stack(list(batch)), size, c, device)
    y, share = torch.from_numpy(labels[index]).to(device), 1.0
    if c.mix:  # pairs images within a process: here the number of processes matters
        x, share = mix(x, stream('mix', c.seed, step, micro, RANK))
    return x, y, share

def loss_of(model, batch, c):
    images, labels, share = batch
    logits = model(images)  # (B, K)
    loss = F.cross_entropy(logits, labels, label_smoothing=c.label_smoothing)
    if c.mix:
        other = F.cross_entropy(logits, labels.flip(0), label_smoothing=c.label_smoothing)
        loss = share * loss + (1 - share) * other
    return loss

@torch.no_grad()
def loss_and_accuracy(model, images, labels, c, device):
    """Loss in nats per image, and the share of images that the model gets right."""
    loss, right = 0.0, 0
    for i in range(0, len(labels), c.batch_size):
        x = normalise(images[i:i + c.batch_size], c.image_size, c, device)
        y = torch.from_numpy(labels[i:i + c.batch_size]).to(device)
        logits = model(x).float()  # (B, K)
        loss += F.cross_entropy(logits, y, reduction='sum').item()
        right += (logits.argmax(1) == y).sum().item()
    return loss / len(labels), right / len(labels)

@torch.no_grad()
def diagnose(model, images):
    """What the class token's attention does: for each layer a dict of means over the images, and
    maps (B, h, w), the heads' mean softmax weight on each patch, 1 for the largest.

    mh = ||MH||, update = ||Phi|| or ||Delta||, *_out: of the same after W^o, cos_* its cosine with
    the layer's input X, alpha = <MH,V> / <V,V>, gamma. Delta is never longer than MH [BF Eq. 11];
    after W^o it can be, despite BF.
    """
    c, rows, maps = model.config, [], []
    x, grid = model.embed(images)  # (B, T, C)
    for block in model.blocks:
        attn = block.attn
        q, k, v, mh = attn.heads(block.norm1(x))  # (B, T, nh, hs)
        update = ATTENTION[c.attention](mh, v, attn.gamma)
        if c.attention == 'belief-star':
            update, _ = update  # Delta
        token = x[:, 0]  # (B, C)
        mh, v, update = [t[:, 0].flatten(1).to(x) for t in (mh, v, update)]  # (B, nh hs), not half
        mh_out, update_out = [(t @ attn.proj.weight.T).to(x) for t in (mh, update)]
        figures = dict(
            mh=mh.norm(dim=1), update=update.norm(dim=1),
            mh_out=mh_out.norm(dim=1), update_out=update_out.norm(dim=1),
            cos_mh=F.cosine_similarity(mh_out, token),
            cos_update=F.cosine_similarity(update_out, token),
            alpha=(mh * v).sum(1) / (v * v).sum(1).clamp_min(1e-30),
            gamma=torch.as_tensor(attn.gamma))
        rows.append({name: figure.float().mean().item() for name, figure in figures.items()})
        scores = torch.einsum('bnh,btnh->bnt', q[:, 0], k) * c.head_size ** -0.5  # (B, nh, T)
        if c.zero_diag:
            scores[..., 0] = -math.inf
        p = scores.softmax(-1).mean(1)[:, -math.prod(grid):]  # (B, h w): patches are the last
        maps.append((p / p.amax(1, keepdim=True)).unflatten(1, grid))
        x = block(x, grid)
    return rows, maps

def evaluate(model, data, c, device):
    """On images held out from training, and, as 0.mh for layer 0, what diagnose finds in 64 of
    them. Nothing here looks at the test set."""
    images, labels = data.val
    n = c.eval_rows or len(labels)
    loss, accuracy = loss_and_accuracy(model, images[:n], labels[:n], c, device)
    figures = dict(val_loss=loss, val_acc=accuracy)
    layers, _ = diagnose(model, normalise(images[:64], c.image_size, c, device))
    for i, layer in enumerate(layers):
        figures.update({f'{i}.{name}': x for name, x in layer.items()})
    return figures

def finish(model, data, c, device, folder):
    """Once, when training is over: accuracy on the test set, of the last and the best weights."""
    figures = dict(test_acc=loss_and_accuracy(model, *data.test, c, device)[1])
    if folder:
        best = make_model(model.config, None).to(device).eval()
        best.load_state_dict(load_checkpoint(Path(folder, 'best.pt'))['model'])
        figures['best_test_acc'] = loss_and_accuracy(best, *data.test, c, device)[1]
    return figures

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

# ------------------------------------ report, predict, inspect ------------------------------------
def linear_accuracy(data, c):
    """A yardstick: test accuracy of ridge regression on the pixels of up to 10,000 images."""
    def features(images):  # and a 1 for the bias
        pixels = normalise(images[:10000], 32, c).flatten(1)
        return F.pad(pixels, (0, 1), value=1.0)  # (N, 3 32^2 + 1)
    x, test_x = features(data.train[0]), features(data.test[0])
    y, test_y = [torch.from_numpy(labels[:10000]) for _, labels in (data.train, data.test)]
    ridge = x.T @ x + len(x) * torch.eye(x.size(1))
    weights = torch.linalg.solve(ridge, x.T @ F.one_hot(y).float())
    return ((test_x @ weights).argmax(1) == test_y).float().mean().item()

def report(c, model, log):
    """What came out, beside two yardsticks, as text."""
    data, last = load_data(c), log[-1]
    linear, chance = linear_accuracy(data, c), 1 / len(data.classes)
    return (f'result  test accuracy {100 * last["test_acc"]:.1f} %, with the best weights '
            f'{100 * last["best_test_acc"]:.1f} %\n'
            f'        a linear model of the same pixels: {100 * linear:.1f} %, '
            f'chance: {100 * chance:.1f} %')

def draw_images(path, rows, titles=()):
    """A row of images (B, 3, H, W), colours from 0 to 1, for each label in rows."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print(f'no {path.name}: pictures need `pip install matplotlib`')
    columns = max(len(images) for images in rows.values())
    picture = Figure(figsize=(1 + 1.5 * columns, 1.7 * len(rows)), layout='tight')
    axes = picture.subplots(len(rows), columns, squeeze=False)
    for line, (label, images) in zip(axes, rows.items()):
        line[0].set_ylabel(label)
        for axis, image in zip(line, images.permute(0, 2, 3, 1).cpu().numpy()):
            axis.imshow(image)
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=8)
    png = io.BytesIO()
    picture.savefig(png)
    write_file(path, png.getvalue())
    print(f'picture {path}')

def visible(x, c):
    """Normalised images (B, 3, H, W) -> their colours, from 0 to 1."""
    mean, std = mean_and_std(c, x.device)
    return ((x * std + mean) / 255).clip(0, 1)

@torch.no_grad()
def predict(c):
    """The classes that train's last run, or --run, finds likeliest in each of --images."""
    if not c.images:
        fail('predict needs --images PHOTO')
    run, model = load_run(c)
    images = normalise(np.array(c.images), run.image_size, run, model.head.weight.device)
    chances = model(images).softmax(-1)  # (B, K)
    print(f'a run that knows {len(run.classes)} classes: {", ".join(run.classes)}')
    answers, titles = [], []
    for path, p in zip(c.images, chances):
        best = [(run.classes[i], p[i].item()) for i in p.argsort(descending=True)[:5]]
        words = [f'{name} {100 * share:.1f} %' for name, share in best]
        print(f'{path}: {", ".join(words)}')
        answers.append(best)
        titles.append('\n'.join(words[:3]))
    draw_images(Path(c.out_dir, SCRIPT, 'predict.png'), {'input': visible(images, run)}, titles)
    return answers

def inspect_layers(c):
    """The layers of a run, trained first if it is not yet: BF's Fig. 3, over the steps, and where
    the class token looks in eight images."""
    folder = run_folder(c)
    model, log = train_to_end(c, folder)
    layers = {}
    for i in range(c.depth):
        prefix = f'{i}.'
        rows = [{name.removeprefix(prefix): x for name, x in row.items()
                 if name == 'step' or name.startswith(prefix)} for row in log]
        layers[f'layer {i}'] = [rows]
        print(f'layer {i}: {show(rows[-1])}')
    print(diagnose.__doc__.partition('\n\n')[2].rstrip())
    draw(folder / 'inspect.png', layers, [
        ('step', 'mh', 'update'), ('step', 'mh_out', 'update_out'),
        ('step', 'cos_mh', 'cos_update'), ('step', 'alpha')])
    images = normalise(load_data(c).val[0][:8], c.image_size, c, pick_device(c)[0])
    _, maps = diagnose(model.eval(), images)
    pictures = {'image': visible(images, c)}
    for name, light in zip(layers, maps):
        light = F.interpolate(light[:, None], images.shape[2:])  # (B, 1, H, W)
        pictures[name] = (0.2 + 0.8 * light) * pictures['image']
    draw_images(folder / 'attention.png', pictures)
    return log

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

ACTIONS = {'train': train_and_report, 'compare': compare, 'bench': bench,
           'inspect': inspect_layers, 'predict': predict}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    sys.stdout.reconfigure(errors='replace')  # for terminals that cannot show every character
    main()
