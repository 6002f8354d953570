# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "matplotlib", "pillow"]
# ///
"""A ViT whose attention passes on a belief: BeliefFormer and AttentionX beside plain softmax.

Attention tells a patch of an image what the others say: MH = softmax(QK^T / sqrt(d)) V, a weighted
sum of values. BeliefFormer passes on the part of MH that is orthogonal to the patch's own value V,
AttentionX the difference V - MH. (The docstring of attentionx_gpt.py says where both come from.)

    BF   G. Zhang, BeliefFormer: Belief Attention in Transformer, OpenReview Ard2QzPAUK
    AX1  G. Zhang, R. Heusdens, AttentionX, first version   AX2  its revision, arXiv 2409.04275
    SA   G. Zhang, SET-Adam, arXiv 2302.01029: the optimiser the other three name

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief, orthogonal
    [BF Eq. 13]     Delta_s: the same in every head, beta for alpha      belief-head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, BeliefStar
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX2 Sec. 5]    a learned parameter: [choice] one gamma per head     attentionx-learned
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [AX1 Sec. 4.1]  gamma = 1 in a ViT                                   default_gamma
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma
    [BF Eq. 11]     ||Delta|| <= ||MH||, measured as in BF's Fig. 3      diagnose
    [BF Sec. 5.3]   SET-Adam at 1e-4, betas 0.9 and 0.999, eps 1e-18     SETAdam, cifar-paper

    python belief_vit.py                           # train: a minute on two cores, no network
    python belief_vit.py --attention softmax       # the baseline, on the same batches
    python belief_vit.py --resume                  # continue the newest run
    python belief_vit.py predict --images a.png    # classify a picture with the last run
    python belief_vit.py --preset imagenet-paper   # BF's recipe for ImageNet
    python experiments/compare.py belief_vit --table papers --preset cifar-paper  # on CIFAR-10

The first command gets 96.4 % of 2,000 drawn shapes right (95.5 % on another CPU), a linear model on
the same pixels 26.2 %, and the majority class is 11.1 % (563 steps, 154,030 parameters, one seed).
[choice] marks where a paper is silent, [deviation] where we differ on purpose. Below the banner
`runs` is plumbing, identical in all four scripts.

The papers' models are vit-small, from vision-transformers-cifar10, and deit-small-local, from
efficient-vit-training; deit-small is timm's. With their weights the logits are theirs to 1e-6.
[deviation] We leave out efficient-vit-training's EMA, repeated augmentation, random erasing,
RandAugment of photos and unused parameters, and train position embeddings, which it never changes.
"""
import argparse
import csv
import functools
import glob
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
TORCHRUN = all(os.environ.get(name)  # elsewhere, some of them may be left over
               for name in ('WORLD_SIZE', 'RANK', 'MASTER_ADDR', 'MASTER_PORT'))
WORLD = int(os.environ['WORLD_SIZE']) if TORCHRUN else 1  # number of processes
RANK = int(os.environ['RANK']) if WORLD > 1 else 0        # index of this one

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False):
    """MH = softmax(QK^T / sqrt(hs)) V [BF Eq. 9]: q, k, v (B, nh, T, hs) -> (B, T, nh, hs)."""
    mask = None
    if zero_diag:  # a token attends only to the others
        mask = ~torch.eye(q.size(2), dtype=torch.bool, device=q.device)  # (T, T)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

def orthogonal(mh, v, dims):
    """MH - alpha V, the part of MH orthogonal to V. alpha = <MH,V> / <V,V>, over `dims`."""
    dtype, wide = mh.dtype, torch.promote_types(v.dtype, torch.float32)
    mh, v = mh.to(wide), v.to(wide)  # ||V||^2 easily overflows float16
    mh_v = (mh * v).sum(dims, keepdim=True)
    v_v = (v * v).sum(dims, keepdim=True).clamp_min(1e-30)  # [choice] alpha = 0 where V = 0
    alpha = mh_v / v_v
    return (mh - alpha * v).to(dtype)

ATTENTION = {  # from MH and V (B, T, nh, hs): what reaches the output projection
    # Your own variant is a line here or, with parameters of its own, a subclass like BeliefStar,
    # which overrides update, project or forward. (diagnose skips a class with its own forward.)
    'softmax': lambda mh, v, gamma: mh,                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,             # [AX2 Eq. 10]
    'attentionx-learned': lambda mh, v, gamma: v - gamma * mh,     # [AX2 Sec. 5], gamma (nh, 1)
    'attentionx-v1': lambda mh, v, gamma: gamma * v - mh,          # [AX1 Eq. 9]
    'belief': lambda mh, v, gamma: orthogonal(mh, v, (-2, -1)),    # [BF Eq. 10]
    'belief-head': lambda mh, v, gamma: orthogonal(mh, v, (-1,)),  # [BF Eq. 13], in every head
    'softmax-scaled': lambda mh, v, gamma: gamma * mh,             # a control: is it the scale?
    'value-skip': lambda mh, v, gamma: mh + v,                     # a control: is it V?
}  # and belief-star, a class below

def default_gamma(c):
    """The papers' gamma, unless --gamma is given. AX2 wants 1 or more, AX1 more than 0, up to 1."""
    if c.gamma is not None:
        return float(c.gamma)
    # softmax-scaled keeps 3: times 1 it would be softmax
    if c.attention == 'attentionx-v1' or (c.zero_diag and c.attention != 'softmax-scaled'):
        return 1.0  # [AX1 Sec. 4.1] [AX2 Sec. 3.2]
    return 3.0  # [choice] AX2's value for a GPT

# ------------------------------------ configuration ------------------------------------
# arXiv 2112.13492: patches also see shifted images, and attention learns its temperature
SHIFTED = dict(image_size=32, patch_size=4, zero_diag=True, shifted=True, local=False,
               qkv_bias=False, eps=1e-5, weight_init='normal')
DEIT = dict(image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6, head_size=64,
            mlp_dim=1536, dropout=0.0, zero_diag=False, shifted=False, eps=1e-6)
MODELS = {  # sizes that Config leaves open, and what else tells the models apart
    'tiny': dict(SHIFTED, embed_dim=64, depth=4, num_heads=4, head_size=16, mlp_dim=128,
                 dropout=0.0),
    'vit-small': dict(SHIFTED, embed_dim=512, depth=6, num_heads=8, head_size=64, mlp_dim=512,
                      dropout=0.1),
    'deit-small': dict(DEIT, local=False, qkv_bias=True, weight_init='truncated'),
    'deit-small-local': dict(DEIT, local=True, qkv_bias=False, weight_init='xavier'),
}

@dataclass
class Config:
    """Every field but num_classes is a flag: --num-heads 6, --no-zero-diag. --help prints this."""
    # the papers' method
    attention: str = 'belief'      # a name in ATTENTION: what reaches the output projection
    gamma: float = None            # default: 3; with zero_diag or attentionx-v1: 1
    zero_diag: bool = None         # no token attends to itself; default: on in tiny, vit-small
    # model
    model: str = 'tiny'            # a name in MODELS, which sets the sizes you do not give
    image_size: int = None         # side of the square image, in pixels
    patch_size: int = None         # pixels
    embed_dim: int = None          # channels of a token
    depth: int = None              # blocks
    num_heads: int = None
    head_size: int = None          # channels of a head
    mlp_dim: int = None            # hidden channels of the feed-forward network
    dropout: float = None
    drop_path: float = 0.0         # chance to skip a branch: 0 in the first block, this in the last
    num_classes: int = 0           # set from the data
    init: str = ''                 # file with weights to start from: a checkpoint of DeiT, say
    # data
    data: str = 'builtin'          # name under data/, a folder of photos, or builtin: drawn shapes
    val_fraction: float = 0.1      # of the training images, for validation
    flip: bool = True              # mirror half of the images in training
    randaugment: str = 'none'      # none, paper, or fixed: smaller shifts; not for photos
    mix: bool = False              # mixup and cutmix, as in DeiT
    label_smoothing: float = 0.0   # probability spread evenly over the classes
    first_size: int = 0            # side of images at first; they grow to image_size; 0: fixed
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 563           # optimiser steps: 5 epochs of 7,200 drawn shapes
    batch_size: int = 64           # images per forward pass
    grad_accum_steps: int = 1      # forward passes per step, shared among the processes
    optimizer: str = 'adamw'       # adamw, or set-adam as in the papers
    learning_rate: float = 4e-3    # at its peak
    min_lr_ratio: float = 0.0      # final rate / learning_rate; 1 keeps it constant
    warmup_iters: int = 50         # steps before the cosine
    weight_decay: float = 0.05     # AdamW's, on matrices
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations, and between checkpoints
    eval_rows: int = 0             # validation images; 0 for all
    dtype: str = 'auto'            # float32, bfloat16 or float16, for matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 0               # CPU threads; 0: up to four
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the last run with these settings, or start one
    out_dir: str = 'out'           # where runs are written
    # actions
    folder: str = ''               # predict, --resume: a run's folder; default: found by settings
    images: list = ()              # predict: photos, one or more

    def __post_init__(self):
        if self.attention not in ATTENTION:
            fail(f'--attention {self.attention} is not in ATTENTION: run the file that adds it')
        c = self.sized()
        if c.image_size % c.patch_size or c.first_size % c.patch_size:
            fail(f'--patch-size {c.patch_size} must divide --image-size and --first-size')

    def sized(self):
        """These settings, with the sizes of their model where none are given."""
        # a copy, so that replace(c, model=...) gets the sizes of the other model
        model = MODELS[self.model]
        sizes = {name: model[name] for name, x in vars(self).items() if x is None and name in model}
        return replace(self, **sizes) if sizes else self

    @property
    def variant(self):  # names folders and curves: add a field of yours to see it there
        return f'{self.model}-{self.attention}' + ('-zd' if self.sized().zero_diag else '')

PRESETS = {
    'tiny': {},
    't4': dict(model='vit-small', data='cifar10', randaugment='fixed', max_iters=2637,  # 30 epochs
               batch_size=256, grad_accum_steps=2, learning_rate=5e-4, warmup_iters=200,
               eval_interval=200),
    # The papers' settings are vision-transformers-cifar10's, with SET-Adam.
    # [choice] 400 epochs are BF's: AX1 and AX2 name no number
    # [deviation] validated on a tenth of the training images, not on the test set
    'cifar-paper': dict(model='vit-small', data='cifar10', randaugment='paper',
                        optimizer='set-adam', learning_rate=1e-4, max_iters=35157,
                        batch_size=512, warmup_iters=0, grad_clip=0.0, eval_interval=88),
    # BF takes its model and settings from efficient-vit-training.
    # [deviation] validated on a hundredth of the training images, not on ImageNet's val
    'imagenet-paper': dict(model='deit-small-local', data='imagenet', batch_size=64,
                           max_iters=5945415,  # 300 epochs
                           learning_rate=1.25e-4, min_lr_ratio=0.08, warmup_iters=0, grad_clip=0.0,
                           drop_path=0.1, mix=True, label_smoothing=0.1, first_size=32,
                           val_fraction=0.01, eval_interval=10000),
}
MACHINE = {  # a resumed run may change these settings
    'max_iters', 'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder',
    'images'}
CHOICES = {  # what a text may be; one that is not here may be anything
    'attention': ATTENTION, 'model': MODELS, 'randaugment': ('none', 'paper', 'fixed'),
    'optimizer': ('adamw', 'set-adam'), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
class PatchEmbed(nn.Module):
    """Images (B, 3, H, W) -> tokens (B, h w, C), one for each of the h by w patches."""
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Conv2d(3, c.embed_dim, c.patch_size, c.patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).mT  # (B, h w, C)

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
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, 15, h, p, w, p)
        x = x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, h w, p p 15)
        return self.proj(self.norm(x))

class Attention(nn.Module):
    def __init__(self, c, layer):  # layer, counted from 0, is for subclasses
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)
        if c.attention == 'attentionx-learned':
            self.gamma = nn.Parameter(torch.full((c.num_heads, 1), self.gamma))
        width = c.num_heads * c.head_size
        self.qkv = nn.Linear(c.embed_dim, 3 * width, bias=MODELS[c.model]['qkv_bias'])
        self.proj = nn.Linear(width, c.embed_dim)  # W^o
        self.temperature = None
        if MODELS[c.model]['shifted']:
            self.temperature = nn.Parameter(torch.tensor(math.log(c.head_size ** -0.5)))
        self.drop = nn.Dropout(c.dropout)

    def heads(self, x):
        """x (B, T, C) -> q, k, v, MH, each (B, T, nh, hs)."""
        c = self.config
        q, k, v = self.qkv(x).unflatten(2, (3, c.num_heads, -1)).unbind(2)
        if self.temperature is not None:  # log of a learned scale, in place of 1 / sqrt(hs)
            q = q * (self.temperature.exp() * c.head_size ** 0.5)
        mh = multi_head(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), c.zero_diag)
        return q, k, v, mh

    def update(self, mh, v):
        """What the layer passes on to W^o, (B, T, nh, hs). diagnose calls it, too."""
        variant = ATTENTION[self.config.attention]  # a class passes on MH, unless it overrides this
        return mh if isinstance(variant, type) else variant(mh, v, self.gamma)

    def project(self, mh, v):
        """MH and V -> what the layer adds to the residual stream, (B, T, C)."""
        return self.proj(self.update(mh, v).flatten(2))

    def forward(self, x):
        """x (B, T, C), the layer's normalised input -> (B, T, C)."""
        _, _, v, mh = self.heads(x)
        return self.drop(self.project(mh, v))

class BeliefStar(Attention):
    """Delta W^o + Delta_s W^s.  [BF Eq. 15]"""
    def __init__(self, c, layer):
        super().__init__(c, layer)
        # W^s  [choice] no bias
        self.proj_s = nn.Linear(self.proj.in_features, c.embed_dim, bias=False)

    def update(self, mh, v):
        return orthogonal(mh, v, (-2, -1))  # Delta

    def project(self, mh, v):
        out = super().project(mh, v)
        delta_s = orthogonal(mh, v, (-1,))
        return out + self.proj_s(delta_s.flatten(2))

ATTENTION['belief-star'] = BeliefStar

class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, grid):  # grid is for LocalMlp
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))

class LocalMlp(nn.Module):
    """LocalViT's, arXiv 2104.05707: a depthwise 3x3 convolution mixes neighbouring patches. The
    class token skips it, as in efficient-vit-training: attention alone changes that token."""
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.conv = nn.Conv2d(c.mlp_dim, c.mlp_dim, 3, padding=1, groups=c.mlp_dim, bias=False)
        self.fc2 = nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x, grid):
        prefix = x.size(1) - math.prod(grid)  # tokens before the patches: 1, the class token
        x = F.hardswish(self.fc1(x[:, prefix:])).mT.unflatten(2, grid)  # (B, D, h, w)
        x = F.hardswish(self.conv(x)).flatten(2).mT  # (B, h w, D)
        return F.pad(self.fc2(x), (0, 0, prefix, 0))  # (B, 1 + h w, C)

class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.drop_path = c.drop_path * layer / max(1, c.depth - 1)
        model, variant = MODELS[c.model], ATTENTION[c.attention]
        attention = variant if isinstance(variant, type) else Attention
        self.norm1 = nn.LayerNorm(c.embed_dim, model['eps'])
        self.attn = attention(c, layer)
        self.norm2 = nn.LayerNorm(c.embed_dim, model['eps'])
        self.mlp = LocalMlp(c) if model['local'] else Mlp(c)

    def stochastic_depth(self, branch):
        """In training, skip the branch for some of the images."""
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)

    def forward(self, x, grid):
        """x (B, 1 + h w, C), grid (h, w) -> (B, 1 + h w, C)."""
        x = x + self.stochastic_depth(self.attn(self.norm1(x)))
        return x + self.stochastic_depth(self.mlp(self.norm2(x), grid))

def resize_positions(pos, grid):
    """Position embeddings (1, 1 + g g, C) -> (1, 1 + h w, C) for a grid (h, w), bicubic."""
    g = math.isqrt(pos.size(1))  # side of the learned grid, which a few extra tokens do not change
    if grid == (g, g):
        return pos
    prefix, patches = pos.split([pos.size(1) - g * g, g * g], dim=1)  # prefix: the class token
    patches = patches.mT.unflatten(2, (g, g))  # (1, C, g, g)
    patches = F.interpolate(patches, grid, mode='bicubic').flatten(2).mT  # (1, h w, C)
    return torch.cat([prefix, patches], dim=1)

class ViT(nn.Module):
    """The model that config.model names, with timm's state-dict keys."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config.sized()
        model = MODELS[c.model]
        self.patch_embed = ShiftedPatchEmbed(c) if model['shifted'] else PatchEmbed(c)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.embed_dim))
        tokens = 1 + (c.image_size // c.patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, c.embed_dim))
        self.drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.depth))
        self.norm = nn.LayerNorm(c.embed_dim, model['eps'])
        self.head = nn.Linear(c.embed_dim, c.num_classes)
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p as its model's repository does, from a seed and its name: parameters that
        variants share start equal."""
        c, how = self.config, MODELS[self.config.model]['weight_init']
        generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
        token = '.' not in name  # cls_token, pos_embed, and tokens you may add
        layer = self.get_submodule(name.rpartition('.')[0])
        linear = isinstance(layer, nn.Linear)
        matrix = linear and name.endswith('weight')
        if how == 'normal' and token:
            p.normal_(generator=generator)
        elif how == 'truncated' and (token or matrix):
            nn.init.trunc_normal_(p, std=0.02, generator=generator)
        elif how == 'truncated' and linear:  # a bias
            p.zero_()
        elif how == 'xavier' and (token or matrix):
            for part in p.chunk(3 if 'qkv' in name else 1):  # q, k and v one by one
                nn.init.xavier_normal_(part, generator=generator)
        elif linear or isinstance(layer, nn.Conv2d):  # PyTorch's own: 1 / sqrt(inputs of a unit)
            bound = layer.weight[0].numel() ** -0.5
            p.uniform_(-bound, bound, generator=generator)
        # norms, and any other parameter you add, keep the values they were made with

    def embed(self, images):
        """Images (B, 3, H, W) of whole patches -> tokens (B, 1 + h w, C), their grid (h, w)."""
        p = self.config.patch_size
        grid = images.size(2) // p, images.size(3) // p
        x = self.patch_embed(images)  # (B, h w, C)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)  # (B, 1 + h w, C)
        x = x + resize_positions(self.pos_embed, grid)
        # tokens of your own, such as registers, go in here, between class token and patches
        return self.drop(x), grid

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
        theta -= lr / (1 - beta1^t) m / (w - tau min w)          [choice] tau = 0.5
    A tensor is a PyTorch parameter: separate ones for q, k and v would train differently.
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
                # v in units of its largest entry leaves c as it is; but v^2 stays in range, and a
                # tensor without gradients does not divide 0 by 0
                unit = v / v.max().clamp_min(1e-37)
                c = unit.sum().square() / (v.numel() * unit.square().sum().clamp_min(1.0))
                w = (c * (v / (1 - beta2 ** t)) + group['eps']).sqrt()
                update = m / (w - group['tau'] * w.min())
                p.sub_(update * (group['lr'] / (1 - beta1 ** t)))

# ------------------------------------ data ------------------------------------
def stream(name, *numbers):
    """A separate generator for each purpose. NumPy treats seeds [1, 7] and [1, 7, 0] as equal,
    hence the final 1."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

# Signed distance of (x, y) from a shape's edge, about, in half its size; turned by any angle.
# One more changes all drawings.
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
    and noise are random, so that no single pixel gives a shape away."""
    rng = stream('shapes', seed)
    images = np.empty((n, 3, 32, 32), np.uint8)
    labels = rng.integers(len(SHAPES), size=n)
    shapes = list(SHAPES.values())
    ramp = np.linspace(-1, 1, 32)
    row, column = ramp[:, None], ramp[None]  # (32, 1), (1, 32)
    for image, label in zip(images, labels):
        half, angle = rng.uniform(8, 13), rng.uniform(0, 2 * math.pi)  # half the size, in pixels
        right, down = rng.uniform(half - 15, 15 - half, 2)  # of the middle, in pixels
        x = (15.5 * column - right) / half  # in units of half the size
        y = (15.5 * row - down) / half
        cos, sin = math.cos(angle), math.sin(angle)
        distance = shapes[label](cos * x + sin * y, cos * y - sin * x)  # (32, 32)
        cover = np.clip(0.5 - half * distance, 0, 1)  # of a pixel by the shape
        paper, ink = rng.uniform(0, 130, (3, 1, 1)), rng.uniform(60, 120, (3, 1, 1))
        light_x, light_y = rng.uniform(-40, 40, (2, 3, 1, 1))
        light = light_x * column + light_y * row  # (3, 32, 32)
        noise = rng.normal(0, 10, (3, 32, 32))
        image[:] = (paper + light + ink * cover + noise).clip(0, 255)
    return images, labels

def load_arrays(path):
    """An .npz file -> images (N, 3, H, W) uint8, labels (N,) int64."""
    try:
        with np.load(path) as file:
            images, labels = file['images'], file['labels'].squeeze()  # (N, 1) is as good as (N,)
    except Exception as error:  # numpy and zipfile raise half a dozen kinds
        fail(f'{path} needs arrays `images` and `labels`: {str(error)[:150]}')
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != np.uint8 or not len(images):
        fail(f'{path}: images must be bytes (N, 3, H, W), not {images.dtype} {images.shape}')
    if labels.shape != (len(images),) or labels.dtype.kind not in 'biu' or labels.min() < 0:
        fail(f'{path}: labels must be {len(images)} integers from 0 on, not {labels.dtype} '
             f'{labels.shape}: {np.unique(labels)[:3]} ...')
    return images, labels.astype(np.int64)

def list_photos(root):
    """Photos in root/CLASS, at any depth -> paths (N,), names of their classes (N,)."""
    from PIL import Image
    endings = tuple(Image.registered_extensions())
    files = glob.glob('*/**/*.*', root_dir=root, recursive=True)  # follows links; no hidden files
    photos = sorted(Path(file) for file in files if file.lower().endswith(endings))
    left_out = len(files) - len(photos)
    if left_out:
        print(f'note    {root}: left out {left_out} of {len(files)} files, which are not photos')
    names = [photo.parts[0] for photo in photos]
    return np.array([str(root / photo) for photo in photos]), np.array(names)

def load_npz(folder):
    """train.npz and, if they exist, test.npz and meta.json -> train, test or None, class names."""
    images, labels = load_arrays(folder / 'train.npz')
    test, meta = None, folder / 'meta.json'
    if (folder / 'test.npz').exists():
        test = load_arrays(folder / 'test.npz')
    classes = [str(i) for i in range(labels.max() + 1)]
    if meta.exists():
        try:
            classes = list(json.loads(meta.read_text('utf-8-sig'))['classes'])
        except (ValueError, KeyError, TypeError):
            fail(f'{meta} must be a JSON object with "classes", a list of names')
    return (images, labels), test, classes

def load_photos(folder):
    """Photos CLASS/*, or train/CLASS/* and, to test, val/CLASS/* -> as load_npz."""
    held_out = 'val', 'valid', 'validation', 'test'
    folders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    root = folders.get('train', folder)
    paths, names = list_photos(root)
    classes, labels = np.unique(names, return_inverse=True)
    # folders that are splits, but by other names than ours, are no classes
    if len(classes) < 2 or {'training', *held_out} & {x.lower() for x in classes}:
        fail(f'{folder} needs train.npz, CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg')
    train, test = (paths, labels), None
    found = [folders[name] for name in held_out if name in folders]
    if root != folder and found:
        paths, names = list_photos(found[0])
        unknown = sorted(set(names) - set(classes))
        if unknown or not len(names):
            fail(f'{found[0]} needs the class folders of {root}, but has '
                 + (', '.join(unknown[:5]) or 'no photos in any'))
        test = paths, np.searchsorted(classes, names)
        print(f'note    the test set is {found[0]}')
    return train, test, classes.tolist()

def load_data(c):
    """c.data -> train, val and test, each a pair of images and labels (N,) int64, the names of
    classes, facts, which a run saves so that --resume recognises its data, and about, its name in
    print. Images are bytes (N, 3, H, W) or paths of photos (N,)."""
    folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
    if c.data == 'builtin':
        train, test, classes = draw_shapes(8000, 0), draw_shapes(2000, 1), list(SHAPES)
    elif folder.is_dir():
        load = load_npz if (folder / 'train.npz').exists() else load_photos
        train, test, classes = load(folder)
    else:
        fail(f'--data {c.data}: no such folder of photos (CLASS/*.jpg), and no folder {folder}; '
             f'`python prepare_data.py {c.data}` may make one; without a name it lists them')
    images, labels = train
    order = stream('split').permutation(len(labels))
    cut = round(c.val_fraction * len(labels))
    val, rest = order[:cut], order[cut:]
    if test is None:  # hold out as many images as for validation
        held_out, rest = rest[:cut], rest[cut:]
        test = images[held_out], labels[held_out]
    if cut < 1 or len(rest) < 1:
        fail(f'--data {c.data}: validation takes {cut} of {len(labels)} images: set --val-fraction')
    highest = max(labels.max(), test[1].max())
    if highest >= len(classes):
        fail(f'--data {c.data}: label {highest} has no name: there are {len(classes)} classes')
    missing = [classes[i] for i in np.setdiff1d(range(len(classes)), labels)]
    if missing:
        print(f'note    {len(missing)} of {len(classes)} classes have no images: {missing[0]} ...')
    known = images[::len(images) // 100 + 1]
    if images.ndim == 1:  # of photos all names, wherever the folder may be
        known = [os.path.basename(path) for path in images]
    checksum = zlib.crc32(labels.tobytes() + np.array(known).tobytes())
    facts = dict(classes=classes, train=len(rest), test=len(test[1]), checksum=checksum)
    return SimpleNamespace(train=(images[rest], labels[rest]), val=(images[val], labels[val]),
                           test=test, classes=classes, facts=facts, about=c.data)

# ------------------------------------ images ------------------------------------
POOL = ThreadPoolExecutor()  # to decode photos

MEAN_STD = {  # mean and standard deviation of red, green and blue, as in the repositories
    'cifar10': ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    'cifar100': ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # and all others
}

def read_photo(path, size, rng=None):
    """A photo -> (3, size, size) uint8: its centre, as in ImageNet's evaluation, or, given a random
    generator, a crop with 8 to 100 % of its area and an aspect of 3:4 to 4:3, cut to the photo."""
    from PIL import Image, ImageOps  # matplotlib brings Pillow
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
            if image.mode == 'F':
                raise ValueError('its pixels are floats of unknown range')
            if image.mode[0] == 'I':  # greys of more than 8 bits, which convert would cut off
                image = Image.fromarray(eight_bits(np.asarray(image)))
            image = image.convert('RGB')
    except Exception as error:  # Pillow raises half a dozen kinds
        raise OSError(f'cannot read {path} as a photo: {error}')
    width, height = image.size
    if rng is None:
        w = h = min(width, height) * (0.875 if size > 64 else 1.0)  # 224 of 256
        left, top = (width - w) / 2, (height - h) / 2
    else:
        area = width * height * (0.08 + 0.92 * rng.random())
        aspect = (4 / 3) ** (2 * rng.random() - 1)  # log-uniform
        w, h = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
        left, top = rng.random() * (width - w), rng.random() * (height - h)
    image = image.resize((size, size), Image.BICUBIC, (left, top, left + w, top + h))
    return np.asarray(image).transpose(2, 0, 1)

def eight_bits(greys):
    """Whole greys (H, W) of 8, 12, 16 or 31 bits, as the lightest needs -> uint8."""
    bits = next(n for n in (8, 12, 16, 31) if greys.max() < 2 ** n)
    return (greys.clip(0) >> (bits - 8)).astype(np.uint8)

def normalise(images, size, c, device='cpu'):
    """Bytes (B, 3, H, W), or paths (B,) of photos to crop at their centre -> (B, 3, size, size)
    float32, with a mean near 0 and a standard deviation near 1."""
    if images.ndim == 1:
        images = np.stack(list(POOL.map(lambda path: read_photo(path, size), images)))
    if images.dtype != np.uint8:
        fail(f'images must be bytes (uint8), not {images.dtype}')
    colours = torch.tensor(MEAN_STD.get(Path(c.data).name, MEAN_STD['imagenet']), device=device)
    mean, std = 255 * colours[:, :, None, None]  # of bytes, (3, 1, 1)
    x = (torch.from_numpy(images).to(device).float() - mean) / std
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode='bicubic', antialias=True)
    return x

def randaugment(image, rng, policy):
    """One of 16 operations on a Pillow image, at strength 14/30. By policy `paper`, as in
    vision-transformers-cifar10, two of them shift by 47 pixels, which turns 23.4 % of 32-pixel
    images black; by `fixed` they shift in proportion to the image."""
    from PIL import Image, ImageEnhance as enhance, ImageOps as ops
    which, sign, at_y, at_x = rng.random(4)
    width, height = image.size
    strength = 14 / 30
    signed = strength if sign < 0.5 else -strength
    far_x = far_y = 100 * signed  # pixels, meant for images of 224
    if policy == 'fixed':
        far_x, far_y = 0.45 * width * signed, 0.45 * height * signed  # timm's

    def affine(*matrix):  # output (x, y) is taken from input (ax + by + c, dx + ey + f)
        return image.transform((width, height), Image.AFFINE, matrix)

    def cutout():  # a grey square; at the top and left it is moved inside, as in the original
        side = 40 * strength
        left, top = int(max(0, at_x * width - side / 2)), int(max(0, at_y * height - side / 2))
        image.paste((125, 123, 114), (left, top, left + int(side) + 1, top + int(side) + 1))
        return image

    operations = [
        lambda: ops.autocontrast(image),
        lambda: ops.equalize(image),
        lambda: ops.invert(image),
        lambda: image.rotate(30 * signed),
        lambda: ops.posterize(image, 1),  # keeps one bit
        lambda: ops.solarize(image, 256 * strength),
        lambda: ops.solarize(image.point(lambda level: min(255, level + 51)), 128),
        lambda: enhance.Color(image).enhance(0.94),  # 0.1 + 1.8 * 14 / 30; 1 changes nothing
        lambda: enhance.Contrast(image).enhance(0.94),
        lambda: enhance.Brightness(image).enhance(0.94),
        lambda: enhance.Sharpness(image).enhance(0.94),
        lambda: affine(1, 0.3 * signed, 0, 0, 1, 0),  # shear
        lambda: affine(1, 0, 0, 0.3 * signed, 1, 0),
        cutout,
        lambda: affine(1, 0, far_x, 0, 1, 0),  # translate
        lambda: affine(1, 0, 0, 0, 1, far_y),
    ]
    return operations[int(which * len(operations))]()

def augment(x, rng, c, size):
    """The path of a photo -> a random crop (3, size, size). An image (3, H, W), after c.randaugment
    -> a random crop of it with 4 black pixels on each side. c.flip mirrors half of both kinds."""
    if isinstance(x, str):
        x = read_photo(x, size, rng)
        mirror = rng.random() < 0.5
    else:
        top, left = (9 * rng.random(2)).astype(int)
        mirror = rng.random() < 0.5
        if c.randaugment != 'none':
            from PIL import Image
            image = Image.fromarray(x.transpose(1, 2, 0))
            for _ in range(2):
                image = randaugment(image, rng, c.randaugment)
            x = np.asarray(image).transpose(2, 0, 1)
        padded = np.pad(x, ((0, 0), (4, 4), (4, 4)))
        x = padded[:, top:top + x.shape[1], left:left + x.shape[2]]
    return x[..., ::-1] if mirror and c.flip else x

def mix(images, rng):
    """Mix images (B, 3, H, W) with the same batch reversed, by mixup or cutmix (equally likely) ->
    images, and lam, the share that each keeps of itself. Each micro-batch is mixed by itself, as on
    each of DeiT's GPUs."""
    other = images.flip(0)
    if rng.random() < 0.5:
        lam = rng.beta(0.8, 0.8)
        return other.lerp(images, lam), lam
    size = np.array(images.shape[2:])
    half = math.sqrt(1 - rng.beta(1.0, 1.0)) / 2
    centre = rng.random(2)
    corners = np.clip([centre - half, centre + half], 0, 1) * size
    (top, left), (bottom, right) = corners.round().astype(int)
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / size.prod()  # borders may cut the box

# ------------------------------------ training ------------------------------------
def make_model(c, data):
    """A model on the CPU for the classes of data, which may be what a saved run knows of it."""
    return ViT(replace(c, num_classes=len(data.classes)))

def load_weights(model, path):
    """Start from a checkpoint of this script, timm or DeiT. Their keys match ours. Positions are
    resized. What the file lacks, such as W^s, and a head for other classes start fresh."""
    weights = read_weights(path, num_heads=model.config.num_heads)
    own = model.state_dict()
    if 'pos_embed' in weights:
        g = math.isqrt(own['pos_embed'].size(1))
        weights['pos_embed'] = resize_positions(weights['pos_embed'], (g, g))
    if len(weights.get('head.weight', ())) != len(own['head.weight']):
        weights = {name: p for name, p in weights.items() if not name.startswith('head.')}
    new = [name for name in own if name not in weights]
    if new:
        print(f'note    not loaded from {path}: {", ".join(new)}')
    try:
        model.load_state_dict({**own, **weights})
    except RuntimeError as error:
        fail(f'--init {path} does not fit the model: {" ".join(str(error).split())[:200]}')

def make_optimizer(model, c):
    """SET-Adam [BF Sec. 5.3], or AdamW, with weight decay for matrices and convolutions only."""
    if c.optimizer == 'set-adam':
        return SETAdam(model.parameters(), c.learning_rate)
    matrices, others = [], []
    for name, p in model.named_parameters():
        group = matrices if name.endswith('.weight') and p.dim() >= 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=c.weight_decay),
              dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, c.learning_rate)  # betas 0.9 and 0.999, as SET-Adam's

@functools.lru_cache(2)  # a batch may begin in one epoch and end in the next
def shuffled(seed, epoch, n):
    return stream('shuffle', seed, epoch).permutation(n)

def get_batch(data, c, step, micro, device):
    """A micro-batch of a step, the same for every variant and in a resumed run: images
    (B, 3, size, size), labels (B,), and lam, the share that each image keeps of itself."""
    c = c.sized()
    images, labels = data.train
    n = len(labels)
    begin = step * c.batch_size * c.grad_accum_steps  # in an endless sequence of shuffled epochs
    rows = range(micro * c.batch_size, (micro + 1) * c.batch_size)  # of this step
    index = [shuffled(c.seed, (begin + row) // n, n)[(begin + row) % n] for row in rows]
    growth = 2 * c.patch_size * (begin // (5 * n))  # two patches more every five epochs
    size = min(c.image_size, (c.first_size or c.image_size) + growth)  # in pixels

    def example(i, row):
        rng = stream('chance', c.seed, step)
        rng.bit_generator.advance(11 * row)  # augment draws at most 11 numbers
        return augment(images[i], rng, c, size)

    apply = POOL.map if images.ndim == 1 else map  # only decoding photos gains from threads
    x = normalise(np.stack(list(apply(example, index, rows))), size, c, device)
    y = torch.from_numpy(labels[index]).to(device)
    lam = 1.0
    if c.mix:
        x, lam = mix(x, stream('mix', c.seed, step, micro))
    return x, y, lam

def loss_of(model, batch, c):
    """Cross-entropy; where images are mixed, of both labels."""
    images, labels, lam = batch
    logits = model(images)  # (B, K)
    loss = F.cross_entropy(logits, labels, label_smoothing=c.label_smoothing)
    if c.mix:
        other = F.cross_entropy(logits, labels.flip(0), label_smoothing=c.label_smoothing)
        loss = lam * loss + (1 - lam) * other
    return loss

@torch.no_grad()
def loss_and_accuracy(model, images, labels, c, device):
    """Loss in nats per image, and the share of images that the model gets right."""
    loss, correct = 0.0, 0
    for i in range(0, len(labels), c.batch_size):
        rows = slice(i, i + c.batch_size)
        x = normalise(images[rows], model.config.image_size, c, device)
        y = torch.from_numpy(labels[rows]).to(device)
        logits = model(x).float()  # (B, K)
        loss += F.cross_entropy(logits, y, reduction='sum').item()
        correct += (logits.argmax(1) == y).sum().item()
    return loss / len(labels), correct / len(labels)

@torch.no_grad()
def diagnose(model, images):
    """Images (B, 3, H, W) -> metrics of attention at the class token, means over the images (0.mh
    is mh in layer 0), and for each layer a map (B, h, w) of where it looks: softmax weights on the
    patches, means over the heads, the largest scaled to 1.

    mh is ||MH||; update is ||Phi|| or ||Delta||, and ||Delta|| <= ||MH||  [BF Eq. 11]. mh_out and
    update_out are these norms after W^o (BF claims the inequality there, too, but it can fail);
    cos_mh and cos_update: cosines of those vectors with the input X; alpha is <MH,V> / <V,V>.
    """
    c, metrics, maps = model.config, {}, []
    x, grid = model.embed(images)  # (B, T, C)
    for i, block in enumerate(model.blocks):
        attn = block.attn
        if type(attn).forward is not Attention.forward:
            return {}, []  # it need not have MH and V
        q, k, v, mh = attn.heads(block.norm1(x))  # (B, T, nh, hs)
        update = attn.update(mh, v)
        mh, v, update = [t[:, 0].flatten(1).to(x) for t in (mh, v, update)]  # (B, nh hs), x's dtype
        mh_out, update_out = [(t @ attn.proj.weight.T).to(x) for t in (mh, update)]
        layer = dict(
            mh=mh.norm(dim=1), update=update.norm(dim=1),
            mh_out=mh_out.norm(dim=1), update_out=update_out.norm(dim=1),
            cos_mh=F.cosine_similarity(mh_out, x[:, 0]),
            cos_update=F.cosine_similarity(update_out, x[:, 0]),
            alpha=(mh * v).sum(1) / (v * v).sum(1).clamp_min(1e-30),
            gamma=torch.as_tensor(attn.gamma))
        for name, values in layer.items():
            metrics[f'{i}.{name}'] = values.float().mean().item()
        scores = torch.einsum('bnh,btnh->bnt', q[:, 0], k) * c.head_size ** -0.5  # (B, nh, T)
        if c.zero_diag:
            scores[..., 0] = -math.inf
        p = scores.softmax(-1).mean(1)[:, -math.prod(grid):]  # (B, h w): patches come last
        maps.append((p / p.amax(1, keepdim=True)).unflatten(1, grid))
        x = block(x, grid)
    return metrics, maps

def evaluate(model, data, c, device):
    """Validation loss and accuracy, and diagnose's metrics on 64 images."""
    images, labels = data.val
    n = c.eval_rows or len(labels)
    loss, accuracy = loss_and_accuracy(model, images[:n], labels[:n], c, device)
    metrics, _ = diagnose(model, normalise(images[:64], model.config.image_size, c, device))
    return dict(val_loss=loss, val_acc=accuracy, **metrics)

def learning_rate(step, c):
    """The learning rate of a step, counted from 0. [deviation] The papers' repositories change it
    once an epoch."""
    if step < c.warmup_iters:
        return c.learning_rate * ((step + 1) / (c.warmup_iters + 1))
    done = 1 - (c.max_iters - step) / (c.max_iters - c.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
    return c.learning_rate * (c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine)

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
    go to `folder`, if any. Your own data must look like what load_data returns."""
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
    print(f'model   {c.variant}, {count(model):,} parameters, on {device} in {dtype}\n'
          f'data    {getattr(data, "about", "your own")}, {len(data.train[1]):,} images of '
          f'{len(data.classes)} classes, {len(data.val[1]):,} for validation, '
          f'{len(data.test[1]):,} for testing'
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
            if step == c.max_iters:  # the test set is used only at the end
                row['test_acc'] = loss_and_accuracy(model, *data.test, c, device)[1]
            log, losses = [*log, row], []
            if row['val_acc'] >= max(past['val_acc'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
        if step == c.max_iters:
            break

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        clock = time.time()
        torch.manual_seed(((c.seed << 24) + step) * WORLD + RANK)  # for dropout
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(step, c)
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

# ------------------------------------ report, predict ------------------------------------
def report(c, model, log, folder, data):
    """Print the result, beside a linear model's and the majority class's, and draw the run, its
    layers, and where their class tokens look."""
    best_model, _ = load_run(replace(c, folder=str(folder)))
    device, labels = model.head.weight.device, data.test[1]
    _, best = loss_and_accuracy(best_model, *data.test, c, device)
    majority = np.bincount(labels).max() / len(labels)
    print(f'\nresult  test accuracy {100 * log[-1]["test_acc"]:.1f} % on {len(labels):,} test '
          f'images, with the best weights {100 * best:.1f} %;\n        a linear model on the same '
          f'pixels gets {100 * linear_accuracy(data, c):.1f} %, and always guessing the majority '
          f'class {100 * majority:.1f} %')
    draw(folder / 'curves.png', {c.variant: log}, [
        ('training loss (nats per image)', 'loss'),
        ('validation accuracy (0 to 1)', 'val_acc')])
    x = normalise(data.val[0][:8], model.config.image_size, c, device)
    _, maps = diagnose(model, x)
    if maps:  # none for a class with its own forward
        draw_layers(folder / 'layers.png', log, model.config.depth)
        draw_attention(folder / 'attention.png', x, maps)
    other = 'softmax' if c.attention != 'softmax' else 'belief'
    files_and_next(c, folder, 'attention', [other, c.attention], 'predict --images PHOTO')

def linear_accuracy(data, c):
    """Test accuracy of ridge regression on the pixels of up to 10,000 images, evenly spread."""
    def pixels_and_labels(images, labels):
        rows = np.unique(np.linspace(0, len(labels) - 1, 10000).astype(np.int64))
        x = normalise(images[rows], 32, c).flatten(1)
        return F.pad(x, (0, 1), value=1.0), torch.from_numpy(labels[rows])  # a 1 for the bias
    x, y = pixels_and_labels(*data.train)  # (N, 3 32^2 + 1), (N,)
    test_x, test_y = pixels_and_labels(*data.test)
    ridge = x.T @ x + len(x) * torch.eye(x.size(1))
    weights = torch.linalg.solve(ridge, x.T @ F.one_hot(y).float())
    return ((test_x @ weights).argmax(1) == test_y).float().mean().item()

def draw_layers(path, log, depth):
    """What diagnose finds, layer by layer over the steps, as in BF's Fig. 3."""
    layers = {}
    for i in range(depth):
        rows = [{name.removeprefix(f'{i}.'): x for name, x in row.items()} for row in log]
        layers[f'layer {i}'] = rows
    draw(path, layers, [
        ('mean length: MH, dashed: update', 'mh', 'update'),
        ('both after the output projection', 'mh_out', 'update_out'),
        ('their cosine with the input X', 'cos_mh', 'cos_update'),
        ('alpha = <MH,V> / <V,V>', 'alpha')])

def draw_attention(path, x, maps):
    """Draw images x (B, 3, H, W) and below, for each layer, brightest where its class token looks:
    maps (B, h, w)."""
    colours = (x - x.min()) / (x.max() - x.min())  # from 0 to 1
    rows = [colours]
    for weights in maps:
        weights = F.interpolate(weights[:, None], x.shape[2:])  # (B, 1, H, W)
        rows.append((0.2 + 0.8 * weights) * colours)
    sheet = torch.stack(rows).permute(0, 3, 1, 4, 2)  # (rows, H, B, W, 3)

    def paint(figure):
        axis = figure.subplots()
        axis.imshow(sheet.flatten(2, 3).flatten(0, 1).cpu())  # (rows H, B W, 3)
        axis.set(title='brightest where the class token attends most', xticks=[],
                 yticks=[(i + 0.5) * x.size(2) for i in range(len(rows))],
                 yticklabels=['image', *(f'layer {i}' for i in range(len(maps)))])
    picture(path, paint, figsize=(1.5 * len(x), 1.5 * len(rows)))

@torch.no_grad()
def predict(c):
    """The five likeliest classes of each of --images, for the model of --folder or the last run."""
    if not c.images:
        fail('predict needs --images PHOTO')
    model, data = load_run(c)
    device = model.head.weight.device
    images = normalise(np.array(c.images), model.config.image_size, c, device)
    answers = []
    for path, p in zip(c.images, model(images).softmax(-1)):
        best = [(data.classes[i], p[i].item()) for i in p.argsort(descending=True)[:5]]
        print(f'{path}: ' + ', '.join(f'{name} {100 * share:.1f} %' for name, share in best))
        answers.append(best)
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

ACTIONS = {'train': train_and_report, 'predict': predict}
# actions that start a run, and settings they imply; others, and --resume, look for an old one
NEW = {'train': {}}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
