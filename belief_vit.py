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
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, forward
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma
    [BF Eq. 11]     ||Delta|| <= ||MH||, and both after W^o (Fig. 3)     diagnose
    [BF Sec. 5.3]   SET-Adam at 1e-4, betas 0.9 and 0.999, eps 1e-18     SETAdam, cifar-paper

    python belief_vit.py                               # train: two minutes on a CPU, no network
    python belief_vit.py predict --images cat.png      # what that run sees in an image
    python belief_vit.py compare --over attention=softmax,attentionx,belief --seeds 0,1,2
    python belief_vit.py bench                         # what each variant costs
    python belief_vit.py inspect                       # BeliefFormer's Fig. 3, attention maps
    python belief_vit.py compare --preset cifar-paper --table 3    # the papers' tables: 1 and 3
    python belief_vit.py --preset imagenet-paper       # DeiT-small, images growing from 32 to 224

The first gets 96.4 % of the test images right (another CPU: 95.5 %), a linear model 26.2 % (563
steps, 154,030 parameters, one seed). A stopped command, run again, goes on where it stopped.

vit-small is from vision-transformers-cifar10, deit-small from timm, deit-small-local from
efficient-vit-training, [deviation] without EMA, repeated augmentation, random erasing, RandAugment
of photos and unused parameters, but with position embeddings that stay in the optimiser.

Lines 1-795 are the paper: method, configuration, model, data, training. What follows is tools.
"""
import argparse
import ast
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
STOP = []                                     # signals that came: finish the step, save, stop

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
    wide = torch.promote_types(v.dtype, torch.float32)  # ||V||^2 soon overflows float16
    x, y = mh.to(wide), v.to(wide)
    mh_v = (x * y).sum(dims, keepdim=True)
    v_v = (y * y).sum(dims, keepdim=True).clamp_min(1e-30)  # [choice] nothing to take where V = 0
    return (x - mh_v / v_v * y).to(mh.dtype)

ATTENTION = {  # from MH and V (B, T, nh, hs): what reaches the output projection
    'softmax': lambda mh, v, gamma: mh,                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,             # [AX2 Eq. 10]
    'attentionx-v1': lambda mh, v, gamma: gamma * v - mh,          # [AX1 Eq. 9]
    'belief': lambda mh, v, gamma: orthogonal(mh, v, (-2, -1)),    # [BF Eq. 10]
    'belief-head': lambda mh, v, gamma: orthogonal(mh, v, (-1,)),  # [BF Eq. 13], in every head
    # both, each with an output matrix of its own  [BF Eq. 15]
    'belief-star': lambda mh, v, gamma: (orthogonal(mh, v, (-2, -1)), orthogonal(mh, v, (-1,))),
    'softmax-scaled': lambda mh, v, gamma: gamma * mh,             # two controls
    'value-skip': lambda mh, v, gamma: mh + v,
}

def default_gamma(c):
    """c.gamma or, where that is None, the papers' choice.  [AX2 Sec. 3.2]"""
    if c.gamma is not None:
        return c.gamma
    if c.attention == 'attentionx-v1':
        return 0.5
    return 1.0 if c.zero_diag else 3.0

# ------------------------------------ configuration ------------------------------------
MODELS = {  # what fields of Config left at None default to
    'tiny': dict(image_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=4, head_size=16,
                 mlp_dim=128, dropout=0.0, zero_diag=True),
    'vit-small': dict(image_size=32, patch_size=4, embed_dim=512, depth=6, num_heads=8,
                      head_size=64, mlp_dim=512, dropout=0.1, zero_diag=True),
    'deit-small': dict(image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6,
                       head_size=64, mlp_dim=1536, dropout=0.0, zero_diag=False),
}
MODELS |= {'deit-small-local': MODELS['deit-small']}  # with LocalViT's feed-forward network

@dataclass
class Config:
    """Every field is a flag: --num-heads 6, --zero-diag, --no-zero-diag. --help prints this."""
    # the papers' method
    attention: str = 'belief'      # a name in ATTENTION: what reaches the output projection
    gamma: float = None            # default: 0.5 for v1; others 1 with zero_diag, 3 without
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
    num_classes: int = 0           # at least as many as the data has
    classes: list = ()             # their names; the data know them
    init: str = ''                 # file with weights to start from: a checkpoint of DeiT, say
    # data
    data: str = 'builtin'          # name under data/, a folder of photos, or builtin: drawn shapes
    val_fraction: float = 0.1      # of the training images, for validation
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
    warmdown_iters: int = 0        # final steps: falling to 0 (trapezoid), at a tenth (step)
    weight_decay: float = 0.05     # AdamW's, on matrices
    eps: float = 1e-18             # SET-Adam's, inside its square root
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations, and between checkpoints
    eval_rows: int = 0             # validation images; 0: all there are
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
    run: str = ''                  # predict: a run's folder; default: train's last run
    images: list = ()              # predict: photos; may be repeated
    over: list = ()                # compare, bench: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(f'--{name} {getattr(self, name)}: choose from {", ".join(allowed)}')
        for name, size in MODELS[self.model].items():
            if getattr(self, name) is None:
                setattr(self, name, size)
        gamma = default_gamma(self)
        fits = {'attentionx': gamma >= 1, 'attentionx-v1': 0 < gamma <= 1}
        if not fits.get(self.attention, True):
            fail(f'--gamma {gamma:g}: attentionx takes 1 or more, attentionx-v1 (0, 1]')
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

    @property
    def units_per_step(self):
        return self.batch_size * self.grad_accum_steps

PRESETS = {
    'tiny': {},
    't4': dict(model='vit-small', data='cifar10', randaugment='fixed', max_iters=2637,  # 30 epochs
               batch_size=512, learning_rate=5e-4, warmup_iters=200, eval_interval=200, threads=0),
    # the papers name a repository and SET-Adam's settings, BF 400 epochs; the rest is that repo's
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
TABLES = {  # rows for `compare --table NAME`, the papers' experiments among them
    'all': {name: dict(attention=name) for name in ATTENTION},
    # AX1 and AX2 Table 1: CIFAR-10 88.15 and 89.41 %, CIFAR-100 61.86 and 64.00 %
    '1': {'softmax': dict(attention='softmax'),
          'attentionx': dict(attention='attentionx', gamma=1.0)},
    # BF Table 3: CIFAR-10 88.15, 89.14 and 88.64 %
    '3': {'transformer': dict(attention='softmax'), 'beliefformer': dict(attention='belief'),
          'beliefformer*': dict(attention='belief-star')},
}
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
        moves = (0, 0, 0, 0), (1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1)
        x = torch.cat([F.pad(images, move) for move in moves], dim=1)  # (B, 15, H, W)
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, 15, h, p, w, p)
        x = x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, h w, p p 15)
        return self.proj(self.norm(x))

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)
        width = c.num_heads * c.head_size
        self.qkv = nn.Linear(c.embed_dim, 3 * width, bias=c.model == 'deit-small')
        self.proj = nn.Linear(width, c.embed_dim)  # W^o
        if c.attention == 'belief-star':
            self.proj_s = nn.Linear(width, c.embed_dim, bias=False)  # W^s
        if c.shifted:
            self.temperature = nn.Parameter(torch.tensor(math.log(c.head_size ** -0.5)))
        self.drop = nn.Dropout(c.dropout)

    def heads(self, x):
        """x (B, T, C) -> q, k, v, MH, each (B, T, nh, hs)."""
        c = self.config
        q, k, v = self.qkv(x).unflatten(2, (3, c.num_heads, -1)).unbind(2)
        if c.shifted:  # a learned scale; the kernel's own, 1 / sqrt(hs), is undone
            q = q * (self.temperature.exp() * c.head_size ** 0.5)
        by_head = [t.transpose(1, 2) for t in (q, k, v)]  # (B, nh, T, hs)
        return q, k, v, multi_head(*by_head, c.zero_diag)

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
    """LocalViT's: a depthwise 3x3 convolution mixes neighbours; the class token gets nothing."""
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.conv = nn.Conv2d(c.mlp_dim, c.mlp_dim, 3, padding=1, groups=c.mlp_dim, bias=False)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x, grid):
        x = F.hardswish(self.fc1(x[:, 1:])).mT.unflatten(2, grid)  # (B, D, h, w)
        x = F.hardswish(self.conv(x)).flatten(2).mT  # (B, h w, D)
        return F.pad(self.fc2(x), (0, 0, 1, 0))  # (B, 1 + h w, C)

class Block(nn.Module):
    def __init__(self, c, drop_path):
        super().__init__()
        self.drop_path = drop_path
        eps = 1e-5 if c.shifted else 1e-6
        self.norm1 = nn.LayerNorm(c.embed_dim, eps)
        self.attn = Attention(c)
        self.norm2 = nn.LayerNorm(c.embed_dim, eps)
        self.mlp = LocalMlp(c) if c.model == 'deit-small-local' else Mlp(c)

    def keep(self, branch):
        """Stochastic depth: in training the branch is left out for some of the images."""
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)

    def forward(self, x, grid):
        """x (B, 1 + h w, C), grid (h, w) -> (B, 1 + h w, C)."""
        x = x + self.keep(self.attn(self.norm1(x)))
        return x + self.keep(self.mlp(self.norm2(x), grid))

def resize_positions(pos, grid):
    """Position embeddings pos (1, 1 + g g, C) -> (1, 1 + h w, C) for a grid (h, w), bicubic."""
    g = math.isqrt(pos.size(1) - 1)
    if grid == (g, g):
        return pos
    patches = pos[:, 1:].mT.unflatten(2, (g, g))  # (1, C, g, g)
    patches = F.interpolate(patches, grid, mode='bicubic').flatten(2).mT  # (1, h w, C)
    return torch.cat([pos[:, :1], patches], dim=1)

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
        """Each tensor has a generator of its own, so that variants start with the same weights.
        vit-small has PyTorch's initialisation, deit-small timm's, deit-small-local Xavier's."""
        c = self.config
        generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
        layer = self.get_submodule(name.rpartition('.')[0])
        token = name in ('pos_embed', 'cls_token')
        local = c.model == 'deit-small-local'
        if not token and not isinstance(layer, (nn.Linear, nn.Conv2d)):
            pass  # norms, and what you may add, keep the values they were made with
        elif token and c.shifted:
            p.normal_(generator=generator)
        elif c.shifted or isinstance(layer, nn.Conv2d) or local and p.dim() == 1:
            bound = layer.weight[0].numel() ** -0.5
            p.uniform_(-bound, bound, generator=generator)
        elif local:
            for part in p.chunk(3 if 'qkv' in name else 1):
                nn.init.xavier_normal_(part, generator=generator)
        elif p.dim() == 1:
            p.zero_()
        else:
            nn.init.trunc_normal_(p, std=0.02, generator=generator)

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
        theta -= lr / (1 - beta1^t) m / (w - tau min w)          tau = 0.5 is a [choice]
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

def load_data(c):
    """-> train, val, test: images, bytes (N, 3, H, W) or paths of photos (N,), and labels (N,)."""
    folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
    if c.data == 'builtin':
        train, test, classes = draw_shapes(8000, 0), draw_shapes(2000, 1), list(SHAPES)
    elif (folder / 'train.npz').exists():
        train, test, classes = load_arrays(folder)
    elif folder.is_dir():
        train, test, classes = load_photos(folder)
    else:
        fail(f'--data {c.data}: no such folder; python prepare_data.py lists what there is')
    images, labels = train
    order = stream('split').permutation(len(labels))
    cut = round(c.val_fraction * len(labels))
    val, rest = order[:cut], order[cut:]
    if test is None:  # hold out as many images as for validation
        test, rest = (images[rest[:cut]], labels[rest[:cut]]), rest[cut:]
    if not 0 < len(rest) < len(order):
        fail(f'--data {c.data}: validation takes {cut} of {len(labels)} images: set --val-fraction')
    about = (f'{c.data}, {len(rest):,} images of {len(classes)} classes, {cut:,} for validation, '
             f'{len(test[1]):,} to test')
    return SimpleNamespace(
        train=(images[rest], labels[rest]), val=(images[val], labels[val]), test=test,
        classes=classes, about=about, threads=ThreadPoolExecutor(), ahead={})

COLOURS = {  # mean and standard deviation of red, green and blue, as in the repositories
    'cifar10': ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    'cifar100': ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # and all others
}

def normalise(images, size, c, device='cpu'):
    """Bytes (B, 3, H, W), or paths (B,) of photos, which are centre-cropped -> float32
    (B, 3, size, size), mean about 0 and sd about 1."""
    if images.ndim == 1:
        with ThreadPoolExecutor() as threads:
            photos = threads.map(lambda path: read_photo(path, size), images)
            images = np.stack(list(photos))
    colours = torch.tensor(COLOURS.get(Path(c.data).name, COLOURS['imagenet']), device=device)
    mean, std = 255 * colours[:, :, None, None]  # (3, 1, 1) each
    x = (torch.from_numpy(images).to(device).float() - mean) / std
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode='bicubic', antialias=True)
    return x

# ------------------------------------ augmentation ------------------------------------
def randaugment(x, chance, policy):
    """Two operations, drawn with replacement, on an image, bytes (3, H, W)."""
    try:
        from PIL import Image, ImageDraw, ImageEnhance, ImageOps
    except ImportError:
        raise ImportError('--randaugment needs `pip install pillow`')
    image = Image.fromarray(x.transpose(1, 2, 0).copy())
    far_x = far_y = 100  # pixels, meant for images of 224
    if policy == 'fixed':
        far_x, far_y = 0.45 * image.width, 0.45 * image.height
    strength = 14 / 30
    enhance = 0.94  # that share of the way from 0.1 to 1.9; 1 would leave all as it is

    def affine(x, *matrix):  # output (x, y) is taken from input (ax + by + c, dx + ey + f)
        return x.transform(x.size, Image.AFFINE, matrix)

    def cutout(x, at):  # moved inside at the top and left borders only, as in its source
        side = 40 * strength
        top, left = [int(max(0, a * n - side / 2)) for a, n in zip(at, (x.height, x.width))]
        box = left, top, left + int(side), top + int(side)
        ImageDraw.Draw(x).rectangle(box, (125, 123, 114))
        return x

    operations = [  # of an image, s = strength or -strength, and a point
        lambda x, s, at: ImageOps.autocontrast(x),
        lambda x, s, at: ImageOps.equalize(x),
        lambda x, s, at: ImageOps.invert(x),
        lambda x, s, at: x.rotate(30 * s),
        lambda x, s, at: ImageOps.posterize(x, int(4 * strength)),
        lambda x, s, at: ImageOps.solarize(x, 256 * strength),
        lambda x, s, at: ImageOps.solarize(x.point(lambda i: i + 110 * strength), 128),
        lambda x, s, at: ImageEnhance.Color(x).enhance(enhance),
        lambda x, s, at: ImageEnhance.Contrast(x).enhance(enhance),
        lambda x, s, at: ImageEnhance.Brightness(x).enhance(enhance),
        lambda x, s, at: ImageEnhance.Sharpness(x).enhance(enhance),
        lambda x, s, at: affine(x, 1, 0.3 * s, 0, 0, 1, 0),  # shear
        lambda x, s, at: affine(x, 1, 0, 0, 0.3 * s, 1, 0),
        lambda x, s, at: cutout(x, at),
        lambda x, s, at: affine(x, 1, 0, far_x * s, 0, 1, 0),  # translate
        lambda x, s, at: affine(x, 1, 0, 0, 0, 1, far_y * s),
    ]
    for which, sign, *at in chance.reshape(2, 4):
        operation = operations[int(which * len(operations))]
        image = operation(image, strength if sign < 0.5 else -strength, at)
    return np.asarray(image).transpose(2, 0, 1)

DRAWS = 11  # random numbers for an image: crop y, x; flip; twice: operation, sign, point y, x

def augment(x, chance, policy, size=None):
    """A photo's path -> a random crop (3, size, size), maybe flipped. An image (3, H, W) gets two
    RandAugment operations, a crop after padding with 4 black pixels, maybe a flip."""
    if isinstance(x, str):
        x = read_photo(x, size, chance)
        return x[..., ::-1] if chance[4] < 0.5 else x
    H, W = x.shape[1:]
    if policy != 'none':
        x = randaugment(x, chance[3:], policy)
    top, left = (9 * chance[:2]).astype(int)
    x = np.pad(x, ((0, 0), (4, 4), (4, 4)))[:, top:top + H, left:left + W]
    return x[..., ::-1] if chance[2] < 0.5 else x

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
METRIC = 'val_acc'                       # best.pt and `compare --best` go by this figure:
BETTER = max                             # higher is better
RESULTS = ['test_acc', 'best_test_acc']  # what `compare` tabulates at the end
UNIT = 'images'                          # what c.units_per_step counts

def make_model(c, data):
    """A model on the CPU. Its config is c plus what the data decide; without data, c has that."""
    if data:
        c = replace(c, classes=data.classes, num_classes=max(c.num_classes, len(data.classes)))
    model = ViT(c)
    if c.init and data:
        load_weights(model, c.init)
    return model

def make_optimizer(model, c):
    """SET-Adam [BF Sec. 5.3], or AdamW, which decays matrices named `weight`."""
    if c.optimizer == 'set-adam':
        return SETAdam(model.parameters(), c.learning_rate, eps=c.eps)
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

def begin_batch(data, c, step, micro):
    """This process's rows of a micro-batch, from seed and step alone -> futures of the images'
    bytes, labels, size. Images come from an endless sequence of shuffled epochs."""
    images, labels = data.train
    n, begin = len(labels), step * c.units_per_step
    grown = 2 * c.patch_size * int(begin / n / 5)  # two patches more every five epochs
    size = min(c.image_size, (c.first_size or c.image_size) + grown)  # in pixels
    rows = slice(micro * c.batch_size + RANK, (micro + 1) * c.batch_size, WORLD)
    chance = stream('chance', c.seed, step).random((c.units_per_step, DRAWS))[rows]
    places = range(begin, begin + c.units_per_step)[rows]
    index = [shuffled(c.seed, place // n, n)[place % n] for place in places]
    futures = [data.threads.submit(augment, images[i], row, c.randaugment, size)
               for i, row in zip(index, chance)]
    return futures, torch.from_numpy(labels[index]), size

def get_batch(data, c, step, micro, device):
    """Images (B, 3, size, size), labels (B,), and the share that each image keeps of itself."""
    for s in (step, step + 1):  # the threads already start on the next step's
        if (s, micro) not in data.ahead:
            data.ahead[s, micro] = begin_batch(data, c, s, micro)
    futures, labels, size = data.ahead.pop((step, micro))
    images = np.stack([future.result() for future in futures])
    images, share = normalise(images, size, c, device), 1.0
    if c.mix:  # pairs images within a process: here the number of processes matters
        rng = stream('mix', c.seed, step, micro, RANK)
        images, share = mix(images, rng)
    return images, labels.to(device), share

def loss_of(model, batch, c):
    images, labels, share = batch
    logits = model(images)  # (B, K)
    loss = F.cross_entropy(logits, labels, label_smoothing=c.label_smoothing)
    if c.mix:
        other = F.cross_entropy(logits, labels.flip(0), label_smoothing=c.label_smoothing)
        loss = share * loss + (1 - share) * other
    return loss

@torch.no_grad()
def judge(model, part, c, device):
    """Loss in nats per image, and accuracy, on part (images, labels)."""
    images, labels = part
    loss, right = 0.0, 0
    for i in range(0, len(labels), c.batch_size):
        x = normalise(images[i:i + c.batch_size], c.image_size, c, device)
        y = torch.from_numpy(labels[i:i + c.batch_size]).to(device)
        logits = model(x).float()  # (B, K)
        loss += F.cross_entropy(logits, y, reduction='sum').item()
        right += (logits.argmax(1) == y).sum().item()
    return loss / len(labels), right / len(labels)

def evaluate(model, data, c, device):
    """On images held out from training. Nothing here looks at the test set."""
    part = [x[:c.eval_rows or None] for x in data.val]
    loss, accuracy = judge(model, part, c, device)
    return dict(val_loss=loss, val_acc=accuracy)

def finish(model, data, c, device, folder):
    """Once, when training is over: accuracy on the test set, of the last and the best weights."""
    figures = dict(test_acc=judge(model, data.test, c, device)[1])
    if folder:
        best = make_model(model.config, None).to(device).eval()
        best.load_state_dict(load_checkpoint(folder / 'best.pt')['model'])
        figures['best_test_acc'] = judge(best, data.test, c, device)[1]
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

@functools.lru_cache(2)
def draw_shapes(n, seed):
    """n drawings -> images (n, 3, 32, 32) uint8, labels (n,). Place, size, angle, colours, light
    and noise are random, so that only many pixels together reveal a shape."""
    rng = stream('shapes', seed)
    images = np.empty((n, 3, 32, 32), np.uint8)
    labels = rng.integers(10, size=n)
    ramp = np.linspace(-1, 1, 32)
    for image, label in zip(images, labels):
        half, turn = rng.uniform(8, 13), rng.uniform(0, 2 * math.pi)  # size in pixels, angle
        x, y = (15.5 * ramp - rng.uniform(half - 15, 15 - half, (2, 1))) / half
        y = y[:, None]
        cos, sin = math.cos(turn), math.sin(turn)
        outside = list(SHAPES.values())[label](cos * x + sin * y, cos * y - sin * x)
        cover = np.clip(0.5 - half * outside, 0, 1)  # (32, 32)
        paper, ink = rng.uniform(0, 130, (3, 1, 1)), rng.uniform(60, 120, (3, 1, 1))
        across, down = rng.uniform(-40, 40, (2, 3, 1, 1))
        light = across * ramp + down * ramp[:, None]  # (3, 32, 32)
        noise = rng.normal(0, 10, (3, 32, 32))
        image[:] = (paper + light + ink * cover + noise).clip(0, 255)
    return images, labels

def load_arrays(folder):
    """train.npz, perhaps test.npz: images (N, 3, H, W) uint8, labels (N,); perhaps meta.json."""
    parts = {}
    for path in sorted(folder.glob('t*.npz')):
        try:
            with np.load(path, allow_pickle=False) as file:
                images, labels = file['images'], file['labels'].astype(np.int64)
            if images.dtype != np.uint8 or images.shape[:2] != (len(labels), 3):
                raise ValueError(f'images are {images.dtype} {images.shape}')
        except Exception as error:  # numpy and zipfile raise half a dozen kinds
            fail(f'{path} needs images (N, 3, H, W) uint8 and labels (N,): {str(error)[:150]}')
        parts[path.stem] = images, labels
    classes = [str(i) for i in range(parts['train'][1].max() + 1)]
    if (folder / 'meta.json').exists():
        classes = json.loads((folder / 'meta.json').read_text('utf-8'))['classes']
    return parts['train'], parts.get('test'), classes

def load_photos(folder):
    """Photos in CLASS/*, or in train/CLASS/* and, as the test set, val/CLASS/*, as in ImageNet."""
    root = folder / 'train' if (folder / 'train').is_dir() else folder
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    def photos(root):
        found = [(str(path), label) for label, name in enumerate(classes)
                 for path in sorted((root / name).rglob('*.*'))
                 if path.suffix.lower() in ('.jpg', '.jpeg', '.png', '.bmp', '.webp')]
        if len(classes) < 2 or not found:
            fail(f'{folder} needs train.npz, CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg')
        paths, labels = zip(*found)
        return np.array(paths), np.array(labels)
    test = photos(folder / 'val') if root != folder and (folder / 'val').is_dir() else None
    return photos(root), test, classes

def read_photo(path, size, chance=None):
    """A photo -> (3, size, size) uint8: its centre, as in ImageNet evaluation, or, given four
    random numbers, a crop of 8 to 100 % of its area, aspect 3:4 to 4:3."""
    try:
        from PIL import Image, ImageOps
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert('RGB')
    except ImportError:
        raise ImportError('photos need `pip install pillow`')
    except OSError as error:
        raise OSError(f'{path} is no photo: {error}')
    width, height = image.size
    w = h = min(width, height) * (0.875 if size > 64 else 1.0)
    left, top = (width - w) / 2, (height - h) / 2
    if chance is not None:
        area = width * height * (0.08 + 0.92 * chance[0])
        aspect = (4 / 3) ** (2 * chance[1] - 1)
        w, h = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
        left, top = chance[2] * (width - w), chance[3] * (height - h)
    image = image.resize((size, size), Image.BICUBIC, (left, top, left + w, top + h))
    return np.asarray(image).transpose(2, 0, 1)

def load_weights(model, path):
    """A checkpoint of this script, of timm or of DeiT, which share keys. Positions are resized."""
    saved = load_checkpoint(path, own=False)
    weights = dict(saved.get('model', saved))
    if 'pos_embed' in weights:
        g = math.isqrt(model.pos_embed.size(1) - 1)
        weights['pos_embed'] = resize_positions(weights['pos_embed'], (g, g))
    if len(weights.get('head.weight', ())) != len(model.head.weight):
        print(f'note    {path} is for other classes: output layer starts anew')
        weights.update({'head.weight': model.head.weight, 'head.bias': model.head.bias})
    model.load_state_dict(weights)

def linear_accuracy(data, c):
    """A yardstick: test accuracy of ridge regression on the pixels of up to 10,000 images."""
    x, y = [], []
    for images, labels in (data.train, data.test):
        pixels = normalise(images[:10000], 32, c).flatten(1)
        x.append(F.pad(pixels, (0, 1), value=1.0))  # (N, 3 32^2 + 1)
        y.append(torch.from_numpy(labels[:10000]))
    ridge = x[0].T @ x[0] + len(x[0]) * torch.eye(x[0].size(1))
    weights = torch.linalg.solve(ridge, x[0].T @ F.one_hot(y[0]).float())
    return ((x[1] @ weights).argmax(1) == y[1]).float().mean().item()

def report(c, model, log):
    """What came out, beside a yardstick."""
    data, last = load_data(c), log[-1]
    print(f'result  test accuracy {100 * last["test_acc"]:.1f} %, with the best weights '
          f'{100 * last["best_test_acc"]:.1f} %\n'
          f'        a linear model of the same pixels: {100 * linear_accuracy(data, c):.1f} %, '
          f'chance: {100 / len(data.classes):.1f} %')

@torch.no_grad()
def predict(c):
    """The classes that train's last run, or --run, finds likeliest in each of --images."""
    if not c.images:
        fail('predict needs --images PHOTO')
    run, model = load_run(c)
    answers = []
    for image in c.images:
        x = normalise(np.array([image]), run.image_size, run, model.head.weight.device)
        chances = model(x)[0, :len(run.classes)].softmax(-1)
        best = [(run.classes[i], chances[i].item()) for i in chances.argsort(descending=True)[:5]]
        print(f'{image}: ' + ', '.join(f'{name} {100 * p:.1f} %' for name, p in best))
        answers.append(best)
    return answers

@torch.no_grad()
def diagnose(model, images):
    """What the class token's attention does: for each layer a dict of means over the images, and
    maps (B, h, w), the heads' mean softmax weight on each patch, 1 for the largest.

    mh: ||MH||; update: ||Phi|| or ||Delta||; *_out: the same after W^o; cos_*: its cosine with the
    layer's input X; alpha. Delta is never longer than MH [BF Eq. 11]; after W^o it can, despite BF.
    """
    c, rows, maps = model.config, [], []
    x, grid = model.embed(images)
    for block in model.blocks:
        attn = block.attn
        q, k, v, mh = attn.heads(block.norm1(x))  # (B, T, nh, hs)
        update = ATTENTION[c.attention](mh, v, attn.gamma)
        update = update[0] if type(update) is tuple else update
        v, mh, update = [t[:, 0].flatten(1) for t in (v, mh, update)]  # (B, nh hs)
        mh_out, update_out = mh @ attn.proj.weight.T, update @ attn.proj.weight.T
        figures = dict(
            mh=mh.norm(dim=1), update=update.norm(dim=1), mh_out=mh_out.norm(dim=1),
            update_out=update_out.norm(dim=1), cos_mh=F.cosine_similarity(mh_out, x[:, 0]),
            cos_update=F.cosine_similarity(update_out, x[:, 0]),
            alpha=(mh * v).sum(1) / (v * v).sum(1))
        rows.append({name: value.mean().item() for name, value in figures.items()})
        scores = torch.einsum('bnh,btnh->bnt', q[:, 0], k) * c.head_size ** -0.5  # (B, nh, T)
        if c.zero_diag:
            scores[..., 0] = -math.inf
        p = scores.softmax(-1).mean(1)[:, 1:]  # (B, h w)
        maps.append((p / p.amax(1, keepdim=True)).unflatten(1, grid))
        x = block(x, grid)
    return rows, maps

def draw_maps(path, images, maps):
    """A row of images, and for each layer a row of them lit where the class token looks."""
    try:
        from matplotlib.image import imsave
    except ImportError:
        return
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    rows = [(images - low) / (high - low)]
    for light in maps:
        light = F.interpolate(light[:, None], images.shape[2:])  # (B, 1, H, W)
        rows.append((0.2 + 0.8 * light) * rows[0])
    tiles = F.pad(torch.stack(rows), (1, 1, 1, 1), value=1.0)  # (rows, B, 3, H, W)
    sheet = tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # (height, width, 3)
    imsave(path, sheet.repeat_interleave(3, 0).repeat_interleave(3, 1).cpu().numpy())
    print(f'picture {path}')

def inspect_layers(c):
    """Train and measure each layer: BF's Fig. 3, which shows the first epoch, and maps."""
    data = load_data(c)
    images = normalise(data.val[0][:64], c.image_size, c, pick_device(c)[0])
    rows = []
    for step, model, log in train(c):
        if step % c.eval_interval == 0 or step == c.max_iters:
            layers, maps = diagnose(model.eval(), images)
            rows += [dict(step=step, layer=i, **figures) for i, figures in enumerate(layers)]
    for row in rows[-c.depth:]:
        print(f'layer {row["layer"]}: {show(row)}')
    print(diagnose.__doc__.partition('\n\n')[2].rstrip())
    folder = run_folder(c, 'inspect-')
    write_csv(folder / 'inspect.csv', rows)
    logs = {f'layer {i}': [rows[i::c.depth]] for i in range(c.depth)}
    draw(folder / 'inspect.png', logs, [('step', name) for name in layers[0]])
    if RANK == 0:
        draw_maps(folder / 'attention.png', images[:8], [map[:8] for map in maps])
    return rows

ACTIONS = {'train': train_and_report, 'compare': compare, 'bench': bench,
           'inspect': inspect_layers, 'predict': predict}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
