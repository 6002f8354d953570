# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "matplotlib", "pillow>=10.1"]
# ///
"""A ViT whose attention outputs how MH differs from V: BeliefFormer and AttentionX, and softmax.

In multi-head attention a token gets a weighted sum of values, MH = softmax(QK^T / sqrt(hs)) V.
The papers argue that a layer should output how MH differs from the token's own value V. The idea
comes from PDMM, an algorithm by which the nodes of a graph agree on a solution: in each round,
neighbours exchange how their solutions differ [BF Eq. 1-5].

[choice]: the paper does not say, so we chose. [deviation]: we differ from it on purpose.

    BF   G. Zhang, BeliefFormer: Belief Attention in Transformer, OpenReview Ard2QzPAUK
    AX1  G. Zhang, R. Heusdens, AttentionX, arXiv 2409.04275, version 1
    AX2  its version 3
    SA   G. Zhang, SET-Adam, arXiv 2302.01029: the optimiser of the other three on CIFAR

    equation        what reaches the output projection W^o                    --attention
    [BF Eq. 9]      MH                                                        softmax
    [BF Eq. 10]     Delta = MH - alpha V,       alpha = <MH,V> / <V,V>        belief
    [BF Eq. 13]     Delta_s: in head m, MH_m - beta_m V_m,
                    beta_m = <MH_m,V_m> / <V_m,V_m>                           belief-head
    [BF Eq. 15]     Delta and, through a second matrix W^s, Delta_s           belief-star
    [AX2 Eq. 10]    Phi = V - gamma MH,         gamma >= 1                    attentionx
    [AX1 Eq. 9]     Phi = gamma V - MH,         0 < gamma <= 1                attentionx-v1
    [choice]        V - gamma MH, where each head learns its gamma            attentionx-learned

<a,b> is a token's dot product: over all its channels in BF Eq. 10, over head m's in BF Eq. 13.
By default no token attends to itself: the attention matrix has a zero diagonal [AX2 Sec. 3.2], of
which AX1 and BF do not speak. gamma is then 1 [AX2 Sec. 3.2], and else 3 [choice]. In attentionx-v1
it is 1 [AX1 Sec. 4.1]. On CIFAR the papers train with --optimizer set-adam [BF Sec. 5.3].

    python belief_vit.py                          # train: a minute on two cores, no network
    python belief_vit.py --attention softmax      # the baseline, also with a zero diagonal
    python belief_vit.py predict --images FOLDER  # the newest run classifies its photos
    python belief_vit.py --preset t4 --resume     # on a T4; needs prepare_data.py cifar10
    python belief_vit.py --help                   # every setting

The first command gets 96.4 % of 2,000 drawn shapes right (one seed; 95.5 % on another CPU). To try
a formula of your own, add a row to ATTENTION.

Two presets are the papers' models: vit-small from the repository vision-transformers-cifar10,
deit-small-local from efficient-vit-training. With softmax and the originals' weights they give the
originals' logits. [deviation] Of the latter's training we leave out EMA, RandAugment, random
erasing and repeated augmentation. Its position embeddings are fixed, ours are trained.
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

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False):
    """MH = softmax(QK^T / sqrt(hs)) V.  [BF Eq. 9]

    q, k, v and MH are (B, T, nh, hs). With zero_diag no token attends to itself.  [AX2 Sec. 3.2]
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh, T, hs)
    # Written out:
    #     scores = q @ k.mT / hs ** 0.5                                    # (B, nh, T, T)
    #     seen = ~torch.eye(T, dtype=torch.bool)                           # with zero_diag
    #     mh = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v        # (B, nh, T, hs)
    seen = None
    if zero_diag:
        seen = ~torch.eye(q.size(2), dtype=torch.bool, device=q.device)  # (T, T)
    mh = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return mh.transpose(1, 2)

def orthogonal(mh, v):
    """MH - alpha V, the part of MH orthogonal to V, with alpha = <MH,V> / <V,V> over the last
    dimension: one alpha for each token of (B, T, C), one for each head of (B, T, nh, hs)."""
    dtype = mh.dtype
    wide = torch.promote_types(v.dtype, torch.float32)  # <V,V> easily overflows in float16
    mh, v = mh.to(wide), v.to(wide)
    mh_v = (mh * v).sum(-1, keepdim=True)
    v_v = (v * v).sum(-1, keepdim=True).clamp_min(1e-30)  # [choice] where V = 0, alpha = 0
    alpha = mh_v / v_v
    return (mh - alpha * v).to(dtype)

class Attention(nn.Module):
    """Attention with a formula of ATTENTION between MH and the output projection W^o."""
    def __init__(self, c, layer):  # layer: 0, 1, ..., for a class of yours
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)
        hs = c.head_size or c.embed_dim // c.num_heads
        self.qkv = nn.Linear(c.embed_dim, 3 * c.num_heads * hs, bias=c.model == 'deit')
        self.proj = nn.Linear(c.num_heads * hs, c.embed_dim)  # W^o
        if c.model == 'shifted':  # it learns log(scale), in place of the scale 1 / sqrt(hs)
            self.temperature = nn.Parameter(torch.tensor(math.log(hs ** -0.5)))

    def heads(self, x):
        """x (B, T, C) -> MH and V, both (B, T, nh, hs)."""
        c = self.config
        q, k, v = self.qkv(x).chunk(3, dim=2)  # (B, T, nh hs)
        q, k, v = [t.unflatten(2, (c.num_heads, -1)) for t in (q, k, v)]  # (B, T, nh, hs)
        if c.model == 'shifted':  # times sqrt(hs), since multi_head divides by it
            q = q * (self.temperature.exp() * q.size(3) ** 0.5)
        return multi_head(q, k, v, c.zero_diag), v

    def forward(self, x):
        """x (B, T, C), the layer's normalised input -> (B, T, C)."""
        mh, v = self.heads(x)
        formula = ATTENTION[self.config.attention]
        update = formula(mh, v, self.gamma)  # (B, T, nh, hs) or (B, T, nh hs)
        return self.proj(update.flatten(2))

class LearnedGamma(Attention):
    """Phi = V - gamma MH. Each head learns its gamma.  [choice] AX2 learns none (Sec. 3.2)."""
    def __init__(self, c, layer):
        super().__init__(c, layer)
        gamma = torch.full((c.num_heads, 1), self.gamma)  # (nh, 1), one start for all heads
        self.gamma = nn.Parameter(gamma)

    def forward(self, x):
        mh, v = self.heads(x)
        return self.proj((v - self.gamma * mh).flatten(2))

class BeliefStar(Attention):
    """Delta W^o + Delta_s W^s.  [BF Eq. 15]"""
    def __init__(self, c, layer):
        super().__init__(c, layer)
        # W^s. [choice] without bias
        self.proj_s = nn.Linear(self.proj.in_features, c.embed_dim, bias=False)

    def forward(self, x):
        nh = self.config.num_heads
        mh, v = [t.flatten(2) for t in self.heads(x)]  # (B, T, nh hs)
        delta = orthogonal(mh, v)
        mh, v = [t.unflatten(2, (nh, -1)) for t in (mh, v)]  # (B, T, nh, hs)
        delta_s = orthogonal(mh, v)
        return self.proj(delta) + self.proj_s(delta_s.flatten(2))

# To try your own, add a row. Then: --attention NAME, and python test_all.py every_variant
# A function of mh, v (B, T, nh, hs) and gamma returns W^o's input: (B, T, nh, hs) or (B, T, nh hs).
# For parameters, settings or a mask of your own, write a class with a forward, as LearnedGamma is;
# for a mask, write its method `heads`, too.
ATTENTION = {
    'softmax': lambda mh, v, gamma: mh,                                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,                             # [AX2 Eq. 10]
    'attentionx-v1': lambda mh, v, gamma: gamma * v - mh,                          # [AX1 Eq. 9]
    'attentionx-learned': LearnedGamma,                                            # [choice]
    'belief': lambda mh, v, gamma: orthogonal(mh.flatten(2), v.flatten(2)),        # [BF Eq. 10]
    'belief-head': lambda mh, v, gamma: orthogonal(mh, v),            # [BF Eq. 13], alone: [choice]
    'belief-star': BeliefStar,                                                     # [BF Eq. 15]
    'softmax-scaled': lambda mh, v, gamma: gamma * mh,   # a control: only the scale
    'value-skip': lambda mh, v, gamma: mh + v,           # a control: V is added
}

def default_gamma(c):
    """--gamma, or the papers' value."""
    if c.gamma is not None:
        return float(c.gamma)
    if c.attention == 'attentionx-v1':
        return 1.0  # [AX1 Sec. 4.1]
    if c.zero_diag and c.attention != 'softmax-scaled':  # with 1 that would be softmax
        return 1.0  # [AX2 Sec. 3.2]
    return 3.0  # [choice] AX2's value for a GPT

class SETAdam(torch.optim.Optimizer):
    """Adam that narrows the range of its step sizes, tensor by tensor.  [SA] [BF Sec. 5.3]

    With Adam's moments m and v of a tensor of d entries, in step t:
        shrink = (sum v)^2 / (d sum v^2)            1 where all v are equal, 1/d where one dominates
        w = sqrt(shrink v / (1 - beta2^t) + eps)    smaller than Adam's, so steps are larger
        theta -= lr m / (1 - beta1^t) / (w - tau min w)          [choice] tau = 0.5
    Each tensor has its own shrink: with three tensors in place of qkv, training would differ.
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
                unit = v / v.max().clamp_min(1e-37)  # shrink is the same; no square overflows
                squares = unit.square().sum().clamp_min(1.0)  # it is 1 or more, unless v = 0
                shrink = unit.sum().square() / (v.numel() * squares)
                w = (shrink * (v / (1 - beta2 ** t)) + group['eps']).sqrt()
                update = m / (w - group['tau'] * w.min())
                p.sub_(update * (group['lr'] / (1 - beta1 ** t)))

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --num-heads 6, --flip, --no-flip. --help prints this.
    A field of yours needs a type: int, float, str, bool, Literal, or float | None (not set)."""
    # the papers' method
    attention: str = 'belief'      # a row of ATTENTION
    gamma: float | None = None     # default: 1; --no-zero-diag, softmax-scaled: 3; attentionx-v1: 1
    zero_diag: bool = True         # no token attends to itself, with softmax too [AX2 Sec. 3.2]
    # model
    # shifted: patches also see shifted images, and attention learns a scale, arXiv 2112.13492
    # deit-local: the feed-forward network has a convolution, arXiv 2104.05707
    model: Literal['shifted', 'deit', 'deit-local'] = 'shifted'
    image_size: int = 32           # side of the square image, in pixels
    patch_size: int = 4            # pixels
    embed_dim: int = 64            # channels of a token
    depth: int = 4                 # blocks
    num_heads: int = 4
    head_size: int = 0             # channels of a head; 0: embed_dim / num_heads
    mlp_dim: int = 128             # hidden channels of the feed-forward network
    dropout: float = 0.0
    drop_path: float = 0.0         # chance to skip a branch of the last block; earlier blocks less
    init: str = ''                 # weights to start from: RUN/best.pt, or prepare_data.py's file
    # data
    data: str = 'builtin'          # a folder in data/, or builtin: drawn shapes
    val_fraction: float = 0.1      # of the training images, if the data have no val.npz
    flip: bool = True              # mirror half of the images in training
    randaugment: Literal['none', 'paper', 'fixed'] = 'none'  # fixed: paper's with smaller shifts
    mix: bool = False              # mixup and cutmix, as in DeiT
    label_smoothing: float = 0.0   # probability spread evenly over the classes
    first_size: int = 0            # images start at this side and grow to image_size; 0: no growth
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 563           # optimiser steps: 5 epochs of 7,200 drawn shapes
    batch_size: int = 64           # images per forward pass
    grad_accum_steps: int = 1      # forward passes per step, of all processes together
    optimizer: Literal['adamw', 'set-adam'] = 'adamw'  # on CIFAR the papers use set-adam
    learning_rate: float = 4e-3    # at its peak
    min_lr_ratio: float = 0.0      # final cosine rate / learning_rate; 1 keeps it constant
    warmup_iters: int = 50         # steps up to the peak rate; set fewer for short runs
    weight_decay: float = 0.05     # AdamW's, on matrices
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations and checkpoints; 0: only at the end
    eval_rows: int = 0             # validation images, the same ones every time; 0: all
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matmuls in training
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 0               # CPU threads; 0: PyTorch's choice
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the newest run of the same flags, or start one
    out_dir: str = 'out'           # where runs are written
    # predict
    folder: str = ''               # a run's folder; default: the newest
    images: tuple = ()             # photos to classify, or folders of them

    def __post_init__(self):
        if min(self.num_heads, self.patch_size, self.batch_size, self.grad_accum_steps) < 1:
            fail('--num-heads, --patch-size, --batch-size and --grad-accum-steps are 1 or more')
        if self.image_size % self.patch_size or self.first_size % self.patch_size:
            fail(f'--patch-size {self.patch_size} must divide --image-size and --first-size')
        if not self.head_size and self.embed_dim % self.num_heads:
            fail(f'--num-heads {self.num_heads} must divide --embed-dim {self.embed_dim}')
        if not (0 <= self.dropout < 1 and 0 <= self.drop_path < 1):
            fail('--dropout and --drop-path must be at least 0, and less than 1')

CHOICES = {'attention': ATTENTION}  # flags whose values are the rows of a table
MACHINE = {  # settings that are not in a run's name, and may differ when it is resumed
    'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder', 'images'}

VIT_SMALL = dict(embed_dim=512, depth=6, num_heads=8, mlp_dim=512, dropout=0.1)
# as the originals are: without a zero diagonal
DEIT_SMALL = dict(model='deit', zero_diag=False, image_size=224, patch_size=16, embed_dim=384,
                  depth=12, num_heads=6, mlp_dim=1536)
PRESETS = {
    'tiny': {},
    # the next three only choose a model
    'vit-small': VIT_SMALL,
    'deit-small': DEIT_SMALL, 'deit-small-local': dict(DEIT_SMALL, model='deit-local'),
    't4': dict(VIT_SMALL, data='cifar10', randaugment='fixed', max_iters=2637,  # 30 epochs
               batch_size=256, grad_accum_steps=2, learning_rate=5e-4, warmup_iters=200,
               eval_interval=200),
    # The papers' settings are vision-transformers-cifar10's, with SET-Adam.
    # [choice] 400 epochs are BF's: AX1 and AX2 name no number
    # [deviation] validated on a tenth of the training images, not on the test set
    'cifar-paper': dict(VIT_SMALL, data='cifar10', randaugment='paper', max_iters=35157,
                        batch_size=512, optimizer='set-adam', learning_rate=1e-4, warmup_iters=0,
                        grad_clip=0.0, eval_interval=88),
    # BF takes its model, settings and 300 epochs from efficient-vit-training.
    # [deviation] validated on a hundredth of the training images, not on ImageNet's val
    'imagenet-paper': dict(DEIT_SMALL, model='deit-local', drop_path=0.1, data='imagenet',
                           val_fraction=0.01, mix=True, label_smoothing=0.1, first_size=32,
                           max_iters=5945415, learning_rate=1.25e-4, min_lr_ratio=0.08,
                           warmup_iters=0, grad_clip=0.0, eval_interval=10000),
}

# ------------------------------------ model ------------------------------------
class PatchEmbed(nn.Module):
    """Images (B, 3, H, W) -> tokens (B, T - 1, C), one for each patch."""
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Conv2d(3, c.embed_dim, c.patch_size, c.patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).mT

class ShiftedPatchEmbed(nn.Module):
    """PatchEmbed, but each patch also sees the image shifted by a pixel in four directions."""
    def __init__(self, c):
        super().__init__()
        self.patch_size = c.patch_size
        values = 5 * 3 * c.patch_size ** 2  # of a patch
        self.norm = nn.LayerNorm(values)
        self.proj = nn.Linear(values, c.embed_dim)

    def forward(self, images):
        p = self.patch_size
        # padding on the left, right, top and bottom; -1 cuts a column or row off
        shifts = [(0, 0, 0, 0), (1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1)]
        x = torch.cat([F.pad(images, shift) for shift in shifts], dim=1)  # (B, 15, H, W)
        # a token is made from one patch: 15 values of its first pixel, 15 of its second, ...
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, 15, h, p, w, p), h = H / p
        x = x.permute(0, 2, 4, 3, 5, 1)  # (B, h, w, p, p, 15)
        x = x.flatten(3).flatten(1, 2)  # (B, h w, p p 15)
        return self.proj(self.norm(x))

class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))

class LocalMlp(nn.Module):
    """A depthwise 3x3 convolution mixes neighbouring patches. The class token skips all of this, as
    in efficient-vit-training: attention alone changes that token."""
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.conv = nn.Conv2d(c.mlp_dim, c.mlp_dim, 3, padding=1, groups=c.mlp_dim, bias=False)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x):
        g = math.isqrt(x.size(1) - 1)  # patches in a row: T = 1 + g g
        x = F.hardswish(self.fc1(x[:, 1:])).mT.unflatten(2, (g, g))  # (B, D, g, g), D = mlp_dim
        x = F.hardswish(self.conv(x)).flatten(2).mT  # (B, g g, D)
        return F.pad(self.fc2(x), (0, 0, 1, 0))  # (B, T, C), 0 for the class token

def make_norm(c):
    return nn.LayerNorm(c.embed_dim, eps=1e-5 if c.model == 'shifted' else 1e-6)  # the originals'

class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        variant = ATTENTION[c.attention]
        attention = variant if isinstance(variant, type) else Attention
        self.norm1 = make_norm(c)
        self.attn = attention(c, layer)
        self.norm2 = make_norm(c)
        self.mlp = LocalMlp(c) if c.model == 'deit-local' else Mlp(c)
        self.drop = nn.Dropout(c.dropout)
        self.drop_path = c.drop_path * layer / max(1, c.depth - 1)  # this block's chance

    def skip_some(self, branch):
        """Stochastic depth: in training, some of the images skip the branch."""
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)

    def forward(self, x):
        x = x + self.skip_some(self.drop(self.attn(self.norm1(x))))
        return x + self.skip_some(self.mlp(self.norm2(x)))

def resize_positions(pos, g):
    """Position embeddings (1, T, C) -> (1, 1 + g g, C) for g patches in a row, bicubic."""
    old = math.isqrt(pos.size(1) - 1)
    if old == g:
        return pos
    patches = pos[:, 1:].mT.unflatten(2, (old, old))  # (1, C, old, old)
    patches = F.interpolate(patches, (g, g), mode='bicubic').flatten(2).mT  # (1, g g, C)
    return torch.cat([pos[:, :1], patches], dim=1)  # the class token's stays

class ViT(nn.Module):
    """The design that config.model names. State-dict keys are timm's."""
    def __init__(self, config, num_classes):
        super().__init__()
        self.config = c = config
        self.patch_embed = ShiftedPatchEmbed(c) if c.model == 'shifted' else PatchEmbed(c)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.embed_dim))
        tokens = 1 + (c.image_size // c.patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, c.embed_dim))
        self.drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.depth))
        self.norm = make_norm(c)
        self.head = nn.Linear(c.embed_dim, num_classes)
        known = (r'^(cls_token|pos_embed|head|patch_embed\.proj|blocks\.\d+\.'
                 r'(attn\.(qkv|proj|proj_s)|mlp\.(fc1|conv|fc2)))(\.weight|\.bias)?$')
        for name, p in self.named_parameters():
            if re.search(known, name):  # others, such as yours, stay as their class made them
                self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p by seed and name alone: layers that variants share start equal. As in the
        originals, where `uniform` is PyTorch's own:

                        cls_token, pos_embed   matrices           their biases   convolutions
            shifted     normal, std 1          uniform            uniform        (none)
            deit        truncated normal       truncated normal   0              uniform
            deit-local  Xavier normal          Xavier normal      uniform        uniform
        """
        model, bias = self.config.model, name.endswith('.bias')
        rng = torch.Generator().manual_seed(zlib.crc32(f'{self.config.seed} {name}'.encode()))
        owner = self.get_submodule(name.rpartition('.')[0])  # of cls_token and pos_embed: self
        if model == 'shifted' and owner is self:
            p.normal_(generator=rng)
        elif model == 'shifted' or isinstance(owner, nn.Conv2d) or (model == 'deit-local' and bias):
            bound = owner.weight[0].numel() ** -0.5
            p.uniform_(-bound, bound, generator=rng)
        elif model == 'deit-local':
            for part in p.chunk(3) if 'qkv' in name else [p]:  # q, k and v, each by itself
                nn.init.xavier_normal_(part, generator=rng)
        elif bias:
            p.zero_()
        else:
            nn.init.trunc_normal_(p, std=0.02, generator=rng)

    def forward(self, images):
        """Normalised images (B, 3, S, S), S a multiple of patch_size -> logits (B, classes)."""
        x = self.patch_embed(images)  # (B, g g, C)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)  # (B, T, C)
        g = images.size(2) // self.config.patch_size
        x = self.drop(x + resize_positions(self.pos_embed, g))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

# ------------------------------------ data ------------------------------------
def stream(name, *numbers):
    """Random numbers for one purpose. To NumPy seeds [7] and [7, 0] are the same: hence the 1."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

# Roughly the distance from (x, y) to a shape, negative inside. The shape lies between -1 and 1.
# A new row changes all drawings.
SHAPES = {
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
    """Draw n images (n, 3, 32, 32) uint8, and their labels (n,). Place, size, angle, colours, light
    and noise are random, so that no single pixel reveals a shape."""
    rng = stream('shapes', seed)
    shapes, images = list(SHAPES.values()), np.empty((n, 3, 32, 32), np.uint8)
    labels = rng.integers(len(shapes), size=n)
    column = np.linspace(-1, 1, 32)
    row = column[:, None]
    for image, label in zip(images, labels):
        radius, angle = rng.uniform(8, 13), rng.uniform(0, 2 * math.pi)  # radius in pixels
        right, down = rng.uniform(radius - 15, 15 - radius, 2)  # where its middle is, in pixels
        x, y = (15.5 * column - right) / radius, (15.5 * row - down) / radius
        cos, sin = math.cos(angle), math.sin(angle)
        distance = shapes[label](cos * x + sin * y, cos * y - sin * x)  # (32, 32)
        cover = np.clip(0.5 - radius * distance, 0, 1)  # share of each pixel inside the shape
        background = rng.uniform(0, 130, (3, 1, 1))
        ink = rng.uniform(60, 120, (3, 1, 1))
        light_x, light_y = rng.uniform(-40, 40, (2, 3, 1, 1))
        light = light_x * column + light_y * row  # (3, 32, 32)
        noise = rng.normal(0, 10, (3, 32, 32))
        image[:] = (background + light + ink * cover + noise).clip(0, 255)
    return images, labels

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
    """c.data -> train, val and test, each a pair of images and labels (N,) int64; and meta, with
    classes, checksum, and mean and std of red, green and blue (from 0 to 1). Images are bytes
    (N, 3, H, W), or paths of photos (N,)."""
    if c.data == 'builtin':
        splits = dict(train=draw_shapes(8000, 0), test=draw_shapes(2000, 1))
        meta = dict(classes=list(SHAPES), checksum=zlib.crc32(splits['train'][0]),
                    mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])  # ImageNet's
    else:
        folder, meta = read_meta(c.data, 'arrays', 'photos')
        splits = {}
        for split in 'train', 'val', 'test':
            if split in meta:  # as the number of its images
                with np.load(folder / f'{split}.npz') as file:
                    splits[split] = file['images'], file['labels']
    if 'val' not in splits:  # it is cut off the training images
        images, labels = splits['train']
        order = stream('split').permutation(len(labels))
        cut = round(c.val_fraction * len(labels))
        if not 0 < cut < len(labels):
            fail(f'--val-fraction {c.val_fraction} takes {cut} of {len(labels)} images')
        splits['val'] = images[order[:cut]], labels[order[:cut]]
        splits['train'] = images[order[cut:]], labels[order[cut:]]
    return SimpleNamespace(**splits, meta=meta)

def spread(total, n):
    """Row numbers of n of `total` images, evenly spread; all if n is 0."""
    rows = np.linspace(0, total - 1, n or total).astype(np.int64)
    return np.unique(rows)  # if n is above total, some are equal

# ------------------------------------ images ------------------------------------
POOL = ThreadPoolExecutor()  # it decodes photos

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

def read_photo(path, size, crop=None):
    """A photo -> (3, size, size) uint8: its centre, as in ImageNet's evaluation, or a part that
    `crop`, four random numbers, chooses: 8 to 100 % of its area, with an aspect of 3:4 to 4:3."""
    photo = open_photo(path)
    width, height = photo.size
    if crop is None:
        w = h = min(width, height) * (0.875 if size > 64 else 1.0)  # 224 of 256; all, if small
        left, top = (width - w) / 2, (height - h) / 2
    else:
        area, aspect, right, down = crop
        pixels = width * height * (0.08 + 0.92 * area)
        ratio = (4 / 3) ** (2 * aspect - 1)  # log-uniform
        w, h = min(width, math.sqrt(pixels * ratio)), min(height, math.sqrt(pixels / ratio))
        left, top = right * (width - w), down * (height - h)
    photo = photo.resize((size, size), box=(left, top, left + w, top + h))  # bicubic
    return np.asarray(photo).transpose(2, 0, 1)

def normalise(images, size, meta, device='cpu'):
    """Images as load_data gives them -> (B, 3, size, size) float32 of mean 0 and standard deviation
    1. Of photos it reads the centres."""
    if images.ndim == 1:
        images = np.stack(list(POOL.map(lambda path: read_photo(path, size), images)))
    mean = 255 * torch.tensor(meta['mean'], device=device).view(3, 1, 1)  # of bytes
    std = 255 * torch.tensor(meta['std'], device=device).view(3, 1, 1)
    x = (torch.from_numpy(images).to(device).float() - mean) / std
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode='bicubic', antialias=True)
    return x

def randaugment(image, which, sign, at_y, at_x, policy):
    """One of 16 operations on a Pillow image, at strength 14/30. Four random numbers choose. Policy
    `paper` is that of vision-transformers-cifar10: two operations shift by 47 pixels, which turns
    23.4 % of 32-pixel images black. With `fixed` they shift in proportion to the image."""
    from PIL import Image, ImageEnhance as enhance, ImageOps as ops
    width, height = image.size
    strength = 14 / 30
    signed = strength if sign < 0.5 else -strength
    # the largest shift: the original's 100 pixels, for images of 224, or timm's 45 %
    far_x, far_y = (100, 100) if policy == 'paper' else (0.45 * width, 0.45 * height)

    def affine(*matrix):  # output (x, y) is taken from input (ax + by + c, dx + ey + f)
        return image.transform((width, height), Image.AFFINE, matrix)

    def cutout():  # a grey square; at the top and left it is moved inside, as in the original
        side = 40 * strength
        left, top = int(max(0, at_x * width - side / 2)), int(max(0, at_y * height - side / 2))
        image.paste((125, 123, 114), (left, top, left + int(side) + 1, top + int(side) + 1))
        return image

    operations = {
        'autocontrast': lambda: ops.autocontrast(image),
        'equalize': lambda: ops.equalize(image),
        'invert': lambda: ops.invert(image),
        'rotate': lambda: image.rotate(30 * signed),
        'posterize': lambda: ops.posterize(image, 1),  # keeps one bit
        'solarize': lambda: ops.solarize(image, 256 * strength),
        'solarize_add': lambda: ops.solarize(image.point(lambda x: min(255, x + 51)), 128),
        'color': lambda: enhance.Color(image).enhance(0.94),  # 0.1 + 1.8 strength
        'contrast': lambda: enhance.Contrast(image).enhance(0.94),
        'brightness': lambda: enhance.Brightness(image).enhance(0.94),
        'sharpness': lambda: enhance.Sharpness(image).enhance(0.94),
        'shear_x': lambda: affine(1, 0.3 * signed, 0, 0, 1, 0),
        'shear_y': lambda: affine(1, 0, 0, 0.3 * signed, 1, 0),
        'cutout': cutout,
        'translate_x': lambda: affine(1, 0, far_x * signed, 0, 1, 0),
        'translate_y': lambda: affine(1, 0, 0, 0, 1, far_y * signed),
    }
    return list(operations.values())[int(which * len(operations))]()

def augment(x, chance, c, size):
    """The path of a photo -> a random part of it (3, size, size); an image (3, H, W) -> the same,
    shifted by up to 4 pixels each way. c.randaugment changes it, c.flip mirrors half of all.
    `chance` are random numbers from 0 to 1: four for the place (two for an image), one to mirror,
    and, at the end, eight for randaugment."""
    photo = isinstance(x, str)
    n = 4 if photo else 2
    place, mirror = chance[:n], chance[n]
    if photo:
        x = read_photo(x, size, place)
    if c.randaugment != 'none':
        from PIL import Image
        image = Image.fromarray(x.transpose(1, 2, 0))
        image = randaugment(image, *chance[-8:-4], c.randaugment)
        image = randaugment(image, *chance[-4:], c.randaugment)
        x = np.asarray(image).transpose(2, 0, 1)
    if not photo:
        top, left = [int(9 * number) for number in place]
        H, W = x.shape[1:]
        x = np.pad(x, ((0, 0), (4, 4), (4, 4)))[:, top:top + H, left:left + W]
    return x[..., ::-1] if mirror < 0.5 and c.flip else x

def mix(images, rng):
    """Mix images (B, 3, S, S) with the same batch reversed, by mixup or cutmix (equally likely) ->
    images, and lam, the share that each keeps of itself. Each micro-batch is mixed by itself, as on
    each of DeiT's GPUs."""
    other, size = images.flip(0), images.size(2)
    if rng.random() < 0.5:
        lam = rng.beta(0.8, 0.8)
        return other.lerp(images, lam), lam
    half = math.sqrt(1 - rng.beta(1.0, 1.0)) / 2  # of a box's side; the image's is 1
    centre = rng.random(2)
    corners = np.clip([centre - half, centre + half], 0, 1) * size
    (top, left), (bottom, right) = corners.round().astype(int)
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / size ** 2  # borders may cut the box

@functools.lru_cache(2)  # a batch may begin in one epoch and end in the next
def shuffled(seed, epoch, n):
    """The order of n images in an epoch."""
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro_step, device):
    """A micro-batch of a step, the same for every variant and in a resumed run: images
    (B, 3, size, size), labels (B,), and lam, the share that each image keeps of itself."""
    images, labels = data.train
    n, photos = len(labels), images.ndim == 1
    per_step = c.grad_accum_steps * c.batch_size  # 2 x 32 are the same images as 1 x 64
    first = step * per_step + micro_step * c.batch_size  # the first image, counted over all epochs
    index = [shuffled(c.seed, i // n, n)[i % n] for i in range(first, first + c.batch_size)]
    size = c.image_size
    if c.first_size:  # two patches more every five epochs
        now = step * per_step // n  # the epoch
        size = min(size, c.first_size + 2 * c.patch_size * (now // 5))
    count = 13 if photos and c.randaugment != 'none' else 11  # random numbers for an image
    chance = stream('chance', c.seed, step).random((c.grad_accum_steps, c.batch_size, count))

    def example(i, numbers):
        return augment(images[i], numbers, c, size)
    apply = POOL.map if photos else map  # only decoding photos gains from threads
    x = apply(example, index, chance[micro_step])
    x = normalise(np.stack(list(x)), size, data.meta, device)
    y = torch.from_numpy(labels[index]).to(device)
    lam = 1.0
    if c.mix:
        x, lam = mix(x, stream('mix', c.seed, step, micro_step))
    return x, y, lam

# ------------------------------------ training ------------------------------------
def make_model(c, meta):
    """A model on the CPU for the classes of the data, with the weights of c.init, if any."""
    model = ViT(c, len(meta['classes']))
    if c.init and not c.resume:  # a resumed run has weights of its own
        load_weights(model, c.init, optional='^head|proj_s|gamma')  # add your parameters' names
    return model

def load_weights(model, path, optional):
    """Load a checkpoint into a model. Parameters whose names match the pattern `optional` may be
    missing in either. Shapes do not show the number of heads, so it is compared."""
    saved, num_heads = load(path), model.config.num_heads
    if saved['config'].get('num_heads', num_heads) != num_heads:
        fail(f'--init {path} has --num-heads {saved["config"]["num_heads"]}')
    try:
        missing, unexpected = model.load_state_dict(fitted(saved['model'], model), strict=False)
    except RuntimeError as error:  # other shapes
        fail(f'--init {path}: {" ".join(str(error).split())[:200]}')
    wrong = [name for name in missing + unexpected if not re.search(optional, name)]
    if wrong:
        fail(f'--init {path} does not fit: {", ".join(wrong[:5])} (see make_model)')
    print(f'init    {path}; not in it, or of another size: {", ".join(missing) or "none"}; '
          f'left out: {", ".join(unexpected) or "none"}')

def fitted(weights, model):
    """Another model's weights: positions are resized; a head of another size is left out."""
    g = math.isqrt(model.pos_embed.size(1) - 1)
    if 'pos_embed' in weights:
        weights = dict(weights, pos_embed=resize_positions(weights['pos_embed'], g))
    if len(weights.get('head.weight', ())) != len(model.head.weight):
        weights = {name: p for name, p in weights.items() if not name.startswith('head.')}
    return weights

def make_optimizer(model, c):
    """SET-Adam or AdamW. AdamW's weight decay is for matrices and kernels named `weight` only."""
    if c.optimizer == 'set-adam':
        return SETAdam(model.parameters(), c.learning_rate)
    matrices, others = [], []
    for name, p in model.named_parameters():
        group = matrices if name.endswith('.weight') and p.dim() >= 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=c.weight_decay),
              dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c.learning_rate)  # betas: 0.9 and 0.999

def loss_of(net, batch, c):
    """The loss of a micro-batch, in nats per image. train_step is the same in three scripts."""
    images, labels, lam = batch
    logits = net(images)  # (B, K)
    loss = F.cross_entropy(logits, labels, label_smoothing=c.label_smoothing)
    if c.mix:
        other = F.cross_entropy(logits, labels.flip(0), label_smoothing=c.label_smoothing)
        loss = lam * loss + (1 - lam) * other
    return loss

@torch.no_grad()
def loss_and_accuracy(model, images, labels, meta, device):
    """Loss in nats per image, and the share of images that the model gets right. It computes in
    float32, whatever c.dtype is, so that runs can be compared."""
    c = model.config
    loss, correct = 0.0, 0
    for i in range(0, len(labels), c.batch_size):
        rows = slice(i, i + c.batch_size)
        x = normalise(images[rows], c.image_size, meta, device)
        y = torch.from_numpy(labels[rows]).to(device)
        logits = model(x)  # (B, K)
        loss += F.cross_entropy(logits, y, reduction='sum').item()
        correct += (logits.argmax(1) == y).sum().item()
    return loss / len(labels), correct / len(labels)

def evaluate(model, data, c, device):
    """Loss and accuracy on validation images."""
    images, labels = data.val
    rows = spread(len(labels), c.eval_rows)
    loss, accuracy = loss_and_accuracy(model, images[rows], labels[rows], data.meta, device)
    return dict(val_loss=loss, val_acc=accuracy)

def get_lr(step, c):
    """The learning rate of a step, counted from 0. [deviation] The papers' repositories change it
    once an epoch."""
    if step < c.warmup_iters:
        return c.learning_rate * ((step + 1) / (c.warmup_iters + 1))  # as in nanoGPT
    left = c.max_iters - step
    done = 1 - left / (c.max_iters - c.warmup_iters)  # from 0 to 1
    cosine = 0.5 * (1 + math.cos(math.pi * done))     # from 1 to 0
    return c.learning_rate * (c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine)

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
    print(f'model   {c.attention}, {sum(p.numel() for p in model.parameters()):,} parameters, '
          f'on {device} in {dtype}\n'
          f'data    {c.data}, {len(data.train[1]):,} images to train on, {len(data.val[1]):,} held '
          f'out, {len(data.test[1]):,} to test')

    def make_batches(step):  # this process's share
        return [get_batch(data, c, step, micro_step, device)
                for micro_step in range(RANK, c.grad_accum_steps, WORLD)]
    thread, coming = ThreadPoolExecutor(1), None
    while True:
        due = step >= c.max_iters or (c.eval_interval and step % c.eval_interval == 0)
        if due and (not log or log[-1]['step'] < step):  # not twice in a resumed run
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            model.eval()
            row.update(evaluate(model, data, c, device))
            if step >= c.max_iters:  # the test set is used only at the end
                print(f'testing on {len(data.test[1]):,} images', flush=True)
                row['test_acc'] = loss_and_accuracy(model, *data.test, data.meta, device)[1]
            model.train()
            if math.isnan(row['val_loss']):
                raise FloatingPointError(f'the validation loss of step {step} is nan: try a lower '
                                         '--learning-rate, or check any formula you edited')
            # plain numbers: load would refuse those of NumPy
            log.append({name: float(x) for name, x in row.items()} | dict(step=step))
            losses = []
            weights = dict(model=model.state_dict(), config=asdict(model.config), data=data.meta,
                           code=CODE)
            if row['val_acc'] == max(past['val_acc'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            save(folder, 'ckpt.pt', dict(
                weights, settings=asdict(c), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), progress=(step, seconds, log)))
            print(f'step {step}/{c.max_iters}: val_loss {row["val_loss"]:.4f}, '
                  f'val_acc {row["val_acc"]:.1%}', flush=True)
        if step >= c.max_iters:
            return model, log

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        start = time.perf_counter()
        torch.manual_seed(zlib.crc32(f'{c.seed} {step} {RANK}'.encode()))  # for dropout
        for group in optimizer.param_groups:
            group['lr'] = get_lr(step, c)
        batches = coming.result() if coming else make_batches(step)
        if step + 1 < c.max_iters:  # the thread makes the next ones while the model trains
            coming = thread.submit(make_batches, step + 1)
        losses.append(train_step(net, batches, c, optimizer, scaler, autocast))
        seconds += time.perf_counter() - start
        step += 1
        if c.log_interval and step % c.log_interval == 0:
            pace = (seconds - first_seconds) / (step - first_step)
            print(f'step {step}/{c.max_iters}: batch loss {losses[-1]:.4f}, {1000 * pace:.0f} ms '
                  f'a step, {(c.max_iters - step) * pace / 60:.1f} min left', flush=True)

# ------------------------------------ report, predict ------------------------------------
def report(c, model, log, folder, data):
    """Print the result beside a linear model's and that of one class for all; draw the curves."""
    images, labels = data.test
    model.load_state_dict(load(folder / 'best.pt')['model'])  # until now: the last weights
    _, accuracy = loss_and_accuracy(model, images, labels, data.meta, model.head.weight.device)
    commonest = np.bincount(labels).max() / len(labels)
    print(f'\nresult  test accuracy {log[-1]["test_acc"]:.1%} on {len(labels):,} images, and '
          f'{accuracy:.1%} with the weights best in validation\n'
          '        (a linear model on 32 x 32 pixels: '
          f'{linear_accuracy(data):.1%}; the commonest class of the test set for all: '
          f'{commonest:.1%})')
    draw(draw_curves, folder / 'curves.png', log, {
        'training loss (nats per image)': 'loss', 'validation accuracy (0 to 1)': 'val_acc'})
    print(f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}\n'
          f'next    python {SCRIPT}.py predict --folder "{folder}" --images PHOTO ...')

def linear_accuracy(data):
    """Test accuracy of a linear model on 32 x 32 pixels, on up to 10,000 images of each split."""
    def pixels_and_labels(images, labels):
        rows = spread(len(labels), 10000)
        x = [normalise(images[some], 32, data.meta).flatten(1)  # all at once may need much memory
             for some in np.split(rows, range(500, len(rows), 500))]
        x = F.pad(torch.cat(x), (0, 1), value=1.0)  # a 1 for the bias
        return x, torch.from_numpy(labels[rows])
    x, y = pixels_and_labels(*data.train)  # (N, D), (N,), D = 3 32^2 + 1
    test_x, test_y = pixels_and_labels(*data.test)
    # ridge regression: W makes ||x W - one_hot(y)||^2 + N ||W||^2 smallest
    ridge = x.T @ x + len(x) * torch.eye(x.size(1))  # (D, D)
    W = torch.linalg.solve(ridge, x.T @ F.one_hot(y).float())  # (D, classes)
    return ((test_x @ W).argmax(1) == test_y).float().mean().item()

@torch.no_grad()
def predict(c):
    """The five likeliest classes of each of --images -> {photo: [(class, probability)]}."""
    photos = []
    for path in map(Path, c.images):
        photos += sorted(path.rglob('*.*')) if path.is_dir() else [path]
    if not photos:
        fail('predict needs --images PHOTO ..., or a folder with photos')
    model, meta = load_run(c)
    size, answers = model.config.image_size, {}
    for path in map(str, photos):
        try:
            image = read_photo(path, size)
        except Exception as error:  # Pillow raises many kinds
            print(f'note    {path} cannot be read: {error}')
            continue
        x = normalise(np.stack([image]), size, meta, model.head.weight.device)
        p = model(x)[0].softmax(-1)  # (classes,)
        best = [(meta['classes'][i], p[i].item()) for i in p.argsort(descending=True)[:5]]
        print(f'{path}: ' + ', '.join(f'{name} {share:.1%}' for name, share in best))
        answers[path] = best
    if not answers:
        fail('none of --images can be read')
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

ACTIONS = {'train': train_and_report, 'predict': predict}

if __name__ == '__main__':
    if hasattr(sys.stdout, 'reconfigure'):  # a console, which may lack a character
        sys.stdout.reconfigure(errors='replace')
    main(sys.argv[1:])
