# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""A GPT whose attention passes on a residual: AttentionX and BeliefFormer beside plain softmax.

Attention tells a token what its neighbours say: MH = softmax(QK^T / sqrt(d)) V, a weighted sum of
values. The papers argue, from distributed optimisation, that a layer should pass on how far that
sum disagrees with the token's own value V. AttentionX subtracts one from the other; BeliefFormer
keeps the part of MH that is orthogonal to V. Both need only MH and V, so fused kernels still serve.

    AX1  Zhang & Heusdens, AttentionX, first version    AX2  the same, revised
    BF   BeliefFormer: Belief Attention in Transformer (anonymous, under review)

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx_v1
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief
    [BF Eq. 13]     the same in every head, with a beta of its own       belief_head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief_star, project
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself, else more    default_gamma

    python attentionx_gpt.py --gamma 3                    # train: 2-3 minutes on a CPU, no network
    python attentionx_gpt.py sample --prompt "def main("  # the newest run continues a text
    python attentionx_gpt.py compare --over attention=softmax,attentionx,belief --seeds 0,1,2
    python attentionx_gpt.py bench                        # what each variant costs
    python attentionx_gpt.py inspect --attention belief   # the discrepancy, layer by layer
    python attentionx_gpt.py --preset owt-124m            # AttentionX's recipe: nanoGPT's GPT-2
    python attentionx_gpt.py --preset belief-124m         # BeliefFormer's: rotary GPT, 5B tokens

Model and recipe follow nanoGPT and, with --arch rotary, modded-nanogpt's branch `casted`; the tests
hold both against outputs of the originals. Where a paper is silent the code says [choice]. What was
measured, and on what, stands in README.md.
"""
import argparse, contextlib, csv, functools, hashlib, inspect, itertools, json, math, os, re
import shutil, signal, statistics, sys, sysconfig, zipfile, zlib
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
    # the papers' method
    attention: str = 'attentionx'  # x in ATTENTION: what reaches the output projection
    gamma: float = None            # 0 < x < 1e6: v1: 0.5; others: 1 with --zero-diag, 3 without
    zero_diag: bool = False        # a token does not attend to itself [AX2 Sec. 3.2]
    # model
    arch: str = 'gpt2'             # x in ('gpt2', 'rotary'): nanoGPT's, or BeliefFormer's model
    n_layer: int = 3               # x >= 1: blocks
    n_head: int = 4                # x >= 1: heads in a block
    n_embd: int = 128              # x >= 1: channels
    block_size: int = 64           # x >= 2: tokens in a window
    vocab_size: int = 0            # x == 0 or 2 <= x <= 65536: tokens; 0 for the data's own
    bias: bool = False             # biases in linear and norm layers (GPT-2 has them)
    dropout: float = 0.0           # 0 <= x < 1: probability
    fp8_weights: bool = False      # round weights to float8 e5m2, as `casted` does (rotary)
    init: str = ''                 # file with weights to start from: a checkpoint of nanoGPT, say
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = ''            # x in ('', 'bytes', 'gpt2'): of text files; default: bytes
    # training
    max_iters: int = 800           # x >= 0: optimiser steps
    batch_size: int = 32           # 1 <= x <= 1e6: windows in memory at once, per process
    grad_accum_steps: int = 1      # 1 <= x <= 1e6: batches in an optimiser step, over all processes
    learning_rate: float = 2e-3    # 0 < x <= 100: at its peak
    min_lr: float = 2e-4           # 0 <= x <= 100: where the cosine ends, below that peak
    schedule: str = 'cosine'       # x in ('cosine', 'trapezoid', 'step', 'constant'): after warmup
    warmup_iters: int = 100        # x >= 0: steps of linear warmup
    warmdown_iters: int = 0        # x >= 0: last steps, down to 0 (trapezoid) or at 0.1 (step)
    weight_decay: float = 0.1      # 0 <= x <= 100: AdamW's, on matrices
    beta1: float = 0.9             # 0 <= x < 1: AdamW's first moment
    beta2: float = 0.99            # 0 <= x < 1: AdamW's second moment
    grad_clip: float = 1.0         # 0 <= x < 1e9: largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # x >= 1: steps between evaluations, and between checkpoints
    eval_rows: int = 640           # 1 <= x <= 1e6: validation windows, the same ones every time
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
        default_gamma(self.attention, self.zero_diag, self.gamma)
        if self.n_embd % self.n_head or self.arch == 'rotary' and self.n_embd // self.n_head % 2:
            raise ValueError(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head},'
                             ' an even one with --arch rotary')
        if self.arch == 'rotary' and (self.bias or self.dropout):
            raise ValueError('--arch rotary has no --bias and no --dropout')
        if self.arch == 'gpt2' and self.fp8_weights:
            raise ValueError('--fp8-weights goes with --arch rotary')

    @property
    def variant(self):
        return self.attention + '-zd' * self.zero_diag

GPT2_SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, data='openwebtext',
                  beta2=0.95, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2,
               max_iters=3000, learning_rate=1e-3, min_lr=1e-4, eval_interval=250, threads=0),
    # AX1 and AX2 name nanoGPT and "a small subset of openwebtext", no more: [choice] its recipe
    'owt-124m': dict(GPT2_SMALL, vocab_size=50304, batch_size=12, grad_accum_steps=40,
                     max_iters=600000, learning_rate=6e-4, min_lr=6e-5, warmup_iters=2000,
                     eval_interval=1000, eval_rows=2400),
    # BF names `casted` and 5B tokens of OpenWebText: 9536 steps of 524,288 tokens
    'belief-124m': dict(GPT2_SMALL, attention='belief', arch='rotary', fp8_weights=True,
                        vocab_size=50257, batch_size=16, grad_accum_steps=32, max_iters=9536,
                        learning_rate=1.8e-3, schedule='trapezoid', warmup_iters=256,
                        warmdown_iters=2048, grad_clip=0.0, eval_interval=128, eval_rows=1280),
}
TABLES = {  # `compare --table NAME`: rows of settings, the papers' experiments among them
    'all': {name: dict(attention=name) for name in (
        'softmax', 'attentionx', 'attentionx-v1', 'belief', 'belief-head', 'belief-star',
        'softmax-scaled', 'value-skip')},
    'ax1': {'softmax': dict(attention='softmax'),
            'attentionx-v1': dict(attention='attentionx-v1', gamma=0.5)},
    'ax2': {'softmax': dict(attention='softmax'),
            'attentionx': dict(attention='attentionx', gamma=3.0)},
    'bf': {'transformer': dict(attention='softmax'), 'beliefformer': dict(attention='belief'),
           'beliefformer*': dict(attention='belief-star')},
}

# ------------------------------------ the papers' method ------------------------------------
# Every variant is s MH + t V with scalars s and t per token, or per token and head.

def multi_head(q, k, v, zero_diag=False, dropout=0.0):
    """MH = softmax(QK^T / sqrt(hs)) V, causal.  [BF Eq. 9]

    q (B, nh, Tq, hs), k and v (B, nh, T, hs) with Tq = T, or 1 with a cache -> (B, Tq, nh, hs).
    With zero_diag a token attends only to those before it; the first has none and gets zeros.
    """
    attend = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
    Tq, T = q.size(2), k.size(2)
    assert Tq in (1, T), 'is_causal would align anything else with the first keys'
    if not zero_diag:
        return attend(q, k, v, is_causal=Tq > 1).transpose(1, 2)
    if T == 1:
        return torch.zeros_like(v).transpose(1, 2)
    # Queries 1..T-1 against keys 0..T-2 are causal once more: no mask, and the fast kernel stays.
    first = int(Tq == T)
    mh = attend(q[:, :, first:], k[:, :, :-1], v[:, :, :-1], is_causal=Tq > 1).transpose(1, 2)
    return F.pad(mh, (0, 0, 0, 0, first, 0))

def inner(mh, v):
    """<MH, V> and <V, V> in every head, (B, T, nh, hs) -> two of (B, T, nh, 1).

    ||V||^2 overflows float16 once V's rms passes 9.2 at 768 channels: both are float32 at least.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    mh, v = mh.to(wide), v.to(wide)
    return (mh * v).sum(-1, keepdim=True), (v * v).sum(-1, keepdim=True)

def ratio(mh_v, v_v):
    """<MH,V> / <V,V>, 0 where V is zero. [choice] The papers divide by zero there."""
    return mh_v / v_v.clamp_min(torch.finfo(v_v.dtype).tiny)

def orthogonal(mh, v, mh_v, v_v):
    """MH - (<MH,V> / <V,V>) V, the part of MH orthogonal to V."""
    return (mh - ratio(mh_v, v_v) * v).to(mh.dtype)

# One signature: MH and V (B, T, nh, hs), gamma -> what reaches the output projection(s).

def softmax(mh, v, gamma):
    """MH, standard attention.  [BF Eq. 9]"""
    return mh

def attentionx(mh, v, gamma):
    """V - gamma MH.  [AX2 Eq. 10]"""
    return v - gamma * mh

def attentionx_v1(mh, v, gamma):
    """gamma V - MH.  [AX1 Eq. 9]"""
    return gamma * v - mh

def belief(mh, v, gamma):
    """MH - alpha V, one projection of the token's whole vector, all heads together.  [BF Eq. 10]"""
    mh_v, v_v = inner(mh, v)
    return orthogonal(mh, v, mh_v.sum(-2, keepdim=True), v_v.sum(-2, keepdim=True))

def belief_head(mh, v, gamma):
    """MH - beta V, a projection in every head; since 2026 Exclusive Self Attention.  [BF Eq. 13]"""
    return orthogonal(mh, v, *inner(mh, v))

def belief_star(mh, v, gamma):
    """MH - alpha V and MH - beta V, each with an output matrix of its own.  [BF Eq. 15]"""
    mh_v, v_v = inner(mh, v)
    delta = orthogonal(mh, v, mh_v.sum(-2, keepdim=True), v_v.sum(-2, keepdim=True))
    return delta, orthogonal(mh, v, mh_v, v_v)

def softmax_scaled(mh, v, gamma):
    """gamma MH, a control: AttentionX's larger term without its V."""
    return gamma * mh

def value_skip(mh, v, gamma):
    """MH + V, a control: AttentionX's V without its minus sign."""
    return mh + v

ATTENTION = {
    'softmax': softmax, 'attentionx': attentionx, 'attentionx-v1': attentionx_v1,
    'belief': belief, 'belief-head': belief_head, 'belief-star': belief_star,
    'softmax-scaled': softmax_scaled, 'value-skip': value_skip,
}

def default_gamma(attention, zero_diag, gamma=None):
    """Gamma, or the papers' choice of it; ValueError out of range.  [AX2 Sec. 3.2]"""
    if gamma is None:
        return 0.5 if attention == 'attentionx-v1' else 1.0 if zero_diag else 3.0
    if attention == 'attentionx' and not gamma >= 1:
        raise ValueError(f'--gamma {gamma:g}: attentionx takes [1, inf), attentionx-v1 (0, 1]')
    if attention == 'attentionx-v1' and not 0 < gamma <= 1:
        raise ValueError(f'--gamma {gamma:g}: attentionx-v1 takes (0, 1], attentionx [1, inf)')
    return gamma

# ------------------------------------ model ------------------------------------

def rotate(x, past=0):
    """Rotary position embedding, base 10000, of x (B, T, nh, hs) from position `past` on."""
    T, hs = x.size(1), x.size(3)
    inv_freq = 10000 ** -(torch.arange(0, hs, 2, device=x.device).float() / hs)
    angle = torch.outer(torch.arange(past, past + T, device=x.device).float(), inv_freq)
    cos, sin = (f(angle)[:, None, :].to(x.dtype) for f in (torch.cos, torch.sin))  # (T, 1, hs/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)

class Float8Linear(nn.Linear):
    """A linear layer whose weights, scaled by their mean size, are rounded to float8 e5m2."""

    def forward(self, x):
        w = self.weight.detach()
        scale = w.abs().mean()
        rounded = (w / scale).to(torch.float8_e5m2).to(w.dtype) * scale
        return F.linear(x, self.weight + (rounded - w))  # the gradient goes straight through

def make_norm(config):
    """LayerNorm or, in the rotary model, x / rms(x) over the channels, without parameters."""
    if config.arch == 'rotary':
        return nn.RMSNorm(config.n_embd, eps=1e-6, elementwise_affine=False)
    return nn.LayerNorm(config.n_embd, bias=config.bias)

class CausalSelfAttention(nn.Module):

    def __init__(self, config, linear):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.gamma = default_gamma(config.attention, config.zero_diag, config.gamma)
        self.c_attn = linear(C, 3 * C, bias=config.bias)
        self.c_proj = linear(C, C, bias=config.bias)                        # W^o
        if config.attention == 'belief-star':
            self.c_proj_s = linear(C, C, bias=False)                        # W^s

    def qkv(self, x, past=0):
        """x (B, T, C), its first token at position `past` -> q, k, v (B, T, nh, hs)."""
        qkv = self.c_attn(x).unflatten(2, (3, self.config.n_head, -1))      # (B, T, 3, nh, hs)
        q, k, v = qkv.unbind(2)                                             # (B, T, nh, hs)
        return (rotate(q, past), rotate(k, past), v) if self.config.arch == 'rotary' else (q, k, v)

    def project(self, update):
        """What a function of ATTENTION returns -> (B, T, C)."""
        if isinstance(update, tuple):
            delta, delta_s = update
            return self.c_proj(delta.flatten(2)) + self.c_proj_s(delta_s.flatten(2))  # [BF Eq. 15]
        return self.c_proj(update.flatten(2))

    def forward(self, x, cache=None):
        """x (B, T, C) -> (B, T, C). `cache`, a dict, keeps k and v of all tokens so far."""
        q, k, v = self.qkv(x, past=cache['k'].size(1) if cache else 0)      # (B, T, nh, hs)
        keys, values = k, v
        if cache:
            keys, values = torch.cat([cache['k'], k], 1), torch.cat([cache['v'], v], 1)
        if cache is not None:
            cache.update(k=keys, v=values)
        heads = (t.transpose(1, 2) for t in (q, keys, values))              # (B, nh, T, hs)
        dropout = self.config.dropout if self.training else 0.0
        mh = multi_head(*heads, self.config.zero_diag, dropout)             # (B, T, nh, hs)
        return self.project(ATTENTION[self.config.attention](mh, v, self.gamma))

class MLP(nn.Module):

    def __init__(self, config, linear):
        super().__init__()
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))

class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        linear = Float8Linear if config.fp8_weights else nn.Linear
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, linear)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config, linear)
        self.drop = nn.Dropout(config.dropout)
        self.attn_scale = (2 * config.n_layer) ** -0.5 if config.arch == 'rotary' else 1.0

    def forward(self, x, cache=None):
        x = x + self.drop(self.attn_scale * self.attn(self.ln_1(x), cache))
        return x + self.drop(self.mlp(self.ln_2(x)))

LOGITS = 2 ** 25  # logits held at once: 128 MB in float32

class GPT(nn.Module):
    """nanoGPT's GPT-2 or, by config.arch, the rotary one, with the originals' state-dict keys."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd) if config.arch == 'gpt2' else None,
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=make_norm(config)))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Each tensor has a generator of its own, so that variants start alike where they are."""
        c, kind = self.config, name.rpartition('.')[2]
        generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
        if kind == 'bias':
            p.zero_()
        elif kind != 'weight' or p.dim() < 2:
            return  # gains of norms, and what you may add, keep the values they were made with
        elif c.arch == 'rotary':
            p.uniform_(-p.size(1) ** -0.5, p.size(1) ** -0.5, generator=generator)
        else:
            std = 0.02 / math.sqrt(2 * c.n_layer) if 'c_proj' in name else 0.02
            p.normal_(0.0, std, generator=generator)

    def features(self, idx, cache=None):
        """idx (B, T) -> what the output layer sees, (B, T, C)."""
        x = self.transformer.wte(idx)                                       # (B, T, C)
        if self.config.arch == 'gpt2':
            past = cache[0]['k'].size(1) if cache and cache[0] else 0
            position = torch.arange(past, past + idx.size(1), device=idx.device)
            x = self.transformer.drop(x + self.transformer.wpe(position))
        for i, block in enumerate(self.transformer.h):
            x = block(x, cache[i] if cache else None)
        return self.transformer.ln_f(x)

    def token_losses(self, x, targets):
        """Cross-entropy in nats, features x (B, T, C) and targets (B, T) -> (B T,).

        With 50,000 tokens the logits outweigh the model. So they are made, used and forgotten chunk
        by chunk, and made again in the backward pass: one more product, and B T may be any number.
        """
        def chunk(x, targets):
            return F.cross_entropy(self.lm_head(x), targets, ignore_index=-1, reduction='none')
        x, targets = x.flatten(0, 1), targets.flatten()                     # (B T, C), (B T,)
        rows = max(1, LOGITS // self.config.vocab_size)
        return torch.cat([checkpoint(chunk, a, b, use_reentrant=False, preserve_rng_state=False)
                          for a, b in zip(x.split(rows), targets.split(rows))])

    def forward(self, idx, targets=None, cache=None):
        """idx, targets (B, T) -> logits (B, T, V), loss in nats per token; targets -1 don't count.

        Without targets: logits of the last position only (B, 1, V), loss None. Where they would be
        more than LOGITS numbers, logits never exist as a whole, and None stands in their place.
        `cache`, one dict per layer, empty at first, lets further calls go on, a token at a time.
        """
        x = self.features(idx, cache)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        if targets.numel() * self.config.vocab_size > LOGITS:
            return None, self.token_losses(x, targets).sum() / (targets != -1).sum()
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, use_cache=True):
        """idx (B, T) -> (B, T + max_new_tokens); temperature 0 (below 1e-3) takes the likeliest.

        Past block_size the window slides as nanoGPT's does: every position shifts, nothing cached
        holds any longer, and each further token costs a pass over the whole window.
        """
        cache, new = [{} for _ in self.transformer.h], idx
        for _ in range(max_new_tokens):
            if use_cache and idx.size(1) <= self.config.block_size:
                logits, _ = self(new, cache=cache)
            else:
                logits, _ = self(idx[:, -self.config.block_size:])
            logits = logits[:, -1].float()                                  # (B, V)
            if temperature < 1e-3:
                new = logits.argmax(-1, keepdim=True)                       # (B, 1)
            else:
                if top_k:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat([idx, new], dim=1)
        return idx

# ------------------------------------ data ------------------------------------

def get_tokenizer(name, needed=True):
    """`bytes` (256 tokens, no files) or `gpt2` (from tiktoken's cache or the network; or None)."""
    import tiktoken
    if name == 'bytes':
        return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as e:  # whatever the network or the cache may raise
        (fail if needed else print)(
            f'tiktoken cannot get its gpt2 files ({type(e).__name__}): go online once, name a '
            'folder that has them in TIKTOKEN_CACHE_DIR, or use --tokenizer bytes')

def load_text(config):
    """config.data -> train and val (tokens), tokenizer, vocab_size, about, stamp (changes with the
    data), bytes_per_token (of the validation text; None: unknown)."""
    path = Path(config.data)
    if config.data == 'builtin':
        files = sorted(Path(sysconfig.get_paths()['stdlib']).glob('*.py'))
        parts = [f.read_text('utf-8', errors='replace') for f in files]
        val = parts[9::10]
        del parts[9::10]
        about = "the source of Python %d.%d's standard library" % sys.version_info[:2]
        text = encode(''.join(parts), ''.join(val), about, config.tokenizer or 'bytes')
    elif path.is_file():
        try:
            whole = path.read_bytes().decode('utf-8-sig')  # without the mark some editors put first
        except ValueError as e:
            fail(f'--data {path} is not utf-8 text ({e})')
        cut = len(whole) * 9 // 10
        text = encode(whole[:cut], whole[cut:], str(path), config.tokenizer or 'bytes')
    else:
        text = load_bins(path if path.is_dir() else Path('data', config.data))
    if config.tokenizer not in ('', text.tokenizer) or 0 < config.vocab_size < text.vocab_size:
        fail(f'--data {config.data} has {text.vocab_size} {text.tokenizer} tokens: no other '
             '--tokenizer and no smaller --vocab-size fit')
    for name, tokens in (('training', text.train), ('validation', text.val)):
        if len(tokens) <= config.block_size + 1:
            fail(f'--data {config.data}: {len(tokens)} {name} tokens do not fill a window; '
                 f'give more text or a --block-size under {config.block_size}')
    return text

def encode(train, val, about, tokenizer):
    encoding = get_tokenizer(tokenizer)
    tokens = [np.array(encoding.encode_ordinary(part), dtype=np.uint16) for part in (train, val)]
    return SimpleNamespace(
        train=tokens[0], val=tokens[1], tokenizer=tokenizer, vocab_size=encoding.n_vocab,
        about=f'{about}, {tokenizer} as tokens', stamp=zlib.crc32((train + val).encode()),
        bytes_per_token=len(val.encode()) / max(1, len(tokens[1])))

def load_bins(folder):
    """A folder with train.bin and val.bin (uint16 tokens, nanoGPT's format) and meta.json."""
    if not folder.is_dir():
        fail(f'--data {folder}: no such file or folder; `python prepare_data.py --list` names more')
    try:
        meta = json.loads((folder / 'meta.json').read_text('utf-8'))
        train, val = (np.memmap(folder / name, np.uint16, 'r') for name in ('train.bin', 'val.bin'))
        known = meta.get('bytes', {}).get('val')
        if meta['tokenizer'] not in ('bytes', 'gpt2') or not 2 <= meta['vocab_size'] <= 65536:
            raise ValueError(f'{meta["tokenizer"]!r} tokens, {meta["vocab_size"]} of them')
        return SimpleNamespace(
            train=train, val=val, tokenizer=meta['tokenizer'], vocab_size=int(meta['vocab_size']),
            about=f'{folder}: {meta.get("source", "")}, {meta["tokenizer"]} as tokens',
            stamp=[(f.stat().st_size, f.stat().st_mtime) for f in sorted(folder.glob('*.bin'))],
            bytes_per_token=known / len(val) if known else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fail(f'{folder} is no prepared text ({type(e).__name__}: {e}): it needs train.bin, val.bin '
             'of uint16 tokens and a meta.json like {"tokenizer": "gpt2", "vocab_size": 50257}')

def windows(tokens, starts, config, device):
    """The tokens from each start on, and the same one step later: two of (B, T), int64."""
    x = np.stack([tokens[s:s + config.block_size + 1] for s in starts]).astype(np.int64)
    if x.max() >= config.vocab_size:
        fail(f'--data {config.data} has token {x.max()} in a vocabulary of {config.vocab_size}: '
             'its meta.json belongs to other .bin files')
    x = torch.from_numpy(x)
    x = x.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else x.to(device)
    return x[:, :-1], x[:, 1:]

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

class Task:
    """Language modelling as the harness sees it."""
    unit, metrics = 'tokens', ['val_loss']

    def __init__(self, config, resumed=False):
        self.text, self.device = load_text(config), pick_device(config)[0]
        self.config = replace(config, tokenizer=self.text.tokenizer,
                              vocab_size=max(config.vocab_size, self.text.vocab_size))
        self.model, self.per_row, self.stamp = GPT(self.config), config.block_size, self.text.stamp
        if config.init and not resumed:
            load_weights(self.model, config.init)
        self.model.to(self.device)
        last, self.by_position = len(self.text.val) - config.block_size - 1, []
        self.val_starts = np.unique(np.linspace(0, last, config.eval_rows).astype(np.int64))

    def optimizer(self):
        """AdamW; matrices and embeddings decay, gains and biases do not."""
        c, params = self.config, list(self.model.parameters())
        groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=c.weight_decay),
                  dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
        return torch.optim.AdamW([g for g in groups if g['params']], lr=c.learning_rate,
                                 betas=(c.beta1, c.beta2), fused=self.device.type == 'cuda')

    def batch(self, step, rows):
        c, last = self.config, len(self.text.train) - self.config.block_size
        n = c.batch_size * c.grad_accum_steps
        starts = np.random.default_rng([c.seed, step]).integers(last, size=n)
        return windows(self.text.train, starts[list(rows)], c, self.device)

    def loss(self, model, batch):
        return model(*batch)[1]

    def evaluate(self):
        """Loss on the same windows every time, spread evenly over the validation text."""
        c, losses = self.config, []
        for i in range(0, len(self.val_starts), c.batch_size):
            x, y = windows(self.text.val, self.val_starts[i:i + c.batch_size], c, self.device)
            losses.append(self.model.token_losses(self.model.features(x), y))
        losses, known = torch.cat(losses).view(-1, c.block_size), self.text.bytes_per_token
        self.by_position, loss = losses.mean(0).tolist(), losses.mean().item()
        return dict(val_loss=loss, **{'val_bpb': loss / math.log(2) / known} if known else {})

def load_weights(model, path):
    """Fill `model` from a checkpoint of this script, of nanoGPT or of `casted`: they share keys."""
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
        model.load_state_dict({  # what they keep besides, masks and frequencies, is computed here
            re.sub(r'^(module\.|_orig_mod\.)+', '', key): value
            for key, value in state.get('model', state).items()
            if not key.endswith(('.attn.bias', '.inv_freq'))})
    except Exception as e:
        fail(f'--init {path} does not fit: {str(e)[:200]}')

def bigram_loss(text, starts, length):
    """Nats per token of a bigram model on validation windows: what pairs of tokens alone can do.

    Counted on 20 million training tokens at most, smoothed by unigrams (Witten and Bell).
    """
    train, V = text.train[:20_000_000].astype(np.int64), text.vocab_size
    unigram = (np.bincount(train, minlength=V) + 1) / (len(train) + V)
    pairs, counts = np.unique(train[:-1] * V + train[1:], return_counts=True)
    times, kinds = np.bincount(train[:-1], minlength=V), np.bincount(pairs // V, minlength=V) + 1
    val = np.stack([text.val[s:s + length + 1] for s in starts]).astype(np.int64)
    x, y = val[:, :-1], val[:, 1:]
    at = np.searchsorted(pairs, x * V + y).clip(max=len(pairs) - 1)
    seen = np.where(pairs[at] == x * V + y, counts[at], 0)
    return -np.log((seen + kinds[x] * unigram[y]) / (times[x] + kinds[x])).mean()

def inputs_of(modules, model, batch):
    """What each of these modules gets while the model sees a batch: a list of tensors."""
    inputs = []
    hooks = [module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
             for module in modules]
    model(batch)
    for hook in hooks:
        hook.remove()
    return inputs

@torch.no_grad()
def diagnose(model, idx):
    """What attention does with idx (B, T): for each layer a dict of means over the tokens.

    [deviation] from BF App. A, which shows token 0: here the first token has no neighbours.

    update ||Phi|| or ||Delta||, mh ||MH||, alpha <MH,V>/<V,V>, p_own the weight of the own token,
    cos_update and cos_mh the cosine between X and either of them after W^o.
    """
    rows, c, blocks = [], model.config, model.transformer.h
    seen = inputs_of([m for block in blocks for m in (block, block.attn.c_proj)], model, idx)
    for block, x, update in zip(blocks, seen[::2], seen[1::2]):             # (B, T, C) each
        q, k, v = block.attn.qkv(block.ln_1(x))                             # (B, T, nh, hs)
        mh = multi_head(*(t.transpose(1, 2) for t in (q, k, v)), zero_diag=c.zero_diag)
        mh_v, v_v = (t.sum(-2) for t in inner(mh, v))                       # (B, T, 1)
        scores = torch.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(q.size(-1))
        scores = scores + torch.full_like(scores, -math.inf).triu(1)        # (B, nh, T, T)
        p_own = scores.softmax(-1).diagonal(dim1=2, dim2=3) * (not c.zero_diag)
        mh, w_o = mh.flatten(2), block.attn.c_proj.weight                   # (B, T, C)
        cosine = lambda t: F.cosine_similarity(F.linear(t, w_o).float(), x, dim=-1)
        figures = dict(update=update.norm(dim=-1), mh=mh.norm(dim=-1), alpha=ratio(mh_v, v_v),
                       p_own=p_own, cos_update=cosine(update), cos_mh=cosine(mh))
        means = {name: t.float().mean().item() for name, t in figures.items()}
        rows.append(dict(layer=len(rows), **means))
    return rows

# ------------------------------------ actions ------------------------------------

def start(config, given, resume=None):
    """Announce a run -> its task, its folder, its checkpoint if it goes on from one."""
    task = None if resume else Task(config)  # first, so that bad data leave no empty folder
    config, folder, state = open_run(config, given, resume)
    task = task or Task(config, resumed=bool(state))
    c, text, (device, dtype, why) = task.config, task.text, pick_device(config)
    formula = (ATTENTION[c.attention].__doc__ or c.attention).split('  ')[0].rstrip('.')
    gamma = f', gamma {default_gamma(c.attention, c.zero_diag, c.gamma):g}' * ('gamma' in formula)
    print(f'model   {c.variant}: {formula}{gamma}\n'
          f'        {c.arch}, {c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, '
          f'{count(task.model):,} parameters\n'
          f'data    {text.about}: {len(text.train):,}, and {len(text.val):,} for validation\n'
          f'device  {device}, {str(dtype)[6:]} ({why})\n'
          f'run     {folder}' + (f', resumed, step {state["progress"][0]}' if state else ''))
    return task, folder, state

def report(task, folder, result):
    """What came out: losses, a sample, and where everything is."""
    c, text = task.config, task.text
    lines = {name: points(result['log'], 'iter', key) for name, key in
             (('training', 'loss'), ('validation', 'val_loss'))}
    values = [y for _, y in lines['training'] or lines['validation']]
    print(f'loss    {sparkline(values)} {values[0]:.2f} to {values[-1]:.2f}')
    if at := task.by_position:
        print(f'        {sparkline(at)} {at[0]:.2f} to {at[-1]:.2f}, along a validation window')
    bits = f', {result["val_bpb"]:.3f} bits per byte' if 'val_bpb' in result else ''
    bigram = bigram_loss(text, task.val_starts, c.block_size)
    print(f'result  validation loss {result["val_loss"]:.3f} nats per token (a bigram model of the '
          f'same text: {bigram:.3f}){bits}')
    files = draw(folder / 'curves.png', [('nats per token', 'step', lines)])
    print(f'files   {folder}: {", ".join(["ckpt.pt", "log.csv"] + files)}')
    if encoding := get_tokenizer(c.tokenizer, needed=False):
        prompt = encoding.encode_ordinary('\ndef ' if c.data == 'builtin' else '\n')
        idx = torch.tensor([prompt], device=task.device)
        out = task.model.eval().generate(idx, 400, temperature=0.7)[0]
        print('sample  ' + decode(encoding, out).strip().replace('\n', '\n        '))

def decode(encoding, tokens):
    """Tokens -> text; those that only pad the vocabulary are left out."""
    return encoding.decode([t for t in tokens.tolist() if t < encoding.n_vocab])

def sample(options, config, given):
    config, folder, state = open_run(config, given, options['resume'])
    prompt, n, length = options['prompt'], options['num_samples'], options['max_new_tokens']
    if prompt.startswith('FILE:'):
        prompt = Path(prompt[5:]).read_bytes().decode('utf-8-sig', errors='replace')
    usable = 0 <= options['temperature'] < math.inf and options['top_k'] >= 0
    if not prompt or min(n, length) < 1 or not usable:
        fail('--prompt must not be empty, --num-samples and --max-new-tokens at least 1, '
             '--temperature and --top-k at least 0, and finite')
    encoding, (device, dtype, _) = get_tokenizer(config.tokenizer), pick_device(config)
    model = GPT(config).to(device).eval()
    restore(dict(model=model), state)
    print(f'run     {folder}, step {state["progress"][0]}\n')
    torch.manual_seed(config.seed)
    idx = torch.tensor([encoding.encode_ordinary(prompt)] * n, device=device)
    with torch.autocast(device.type, dtype, dtype != torch.float32):
        out = model.generate(idx, length, options['temperature'], options['top_k'])
    texts = [decode(encoding, tokens) for tokens in out]
    print(('\n' + '-' * 80 + '\n').join(texts))
    return dict(samples=texts, tokens=out.tolist(), folder=folder)

def inspect_layers(options, config, given):
    """Train and watch the layers. Panel 1 tests AX1's guess that discrepancy shrinks with depth."""
    task, folder, _ = start(config, given)
    idx, _ = windows(task.text.val, task.val_starts[:8], task.config, task.device)
    seen, evaluate = [], task.evaluate
    task.evaluate = lambda: seen.append(diagnose(task.model, idx)) or evaluate()
    result = fit(task, task.config, folder)
    steps = [step for step, _ in points(result['log'], 'iter', 'val_loss')]
    rows = [dict(iter=step, **row) for step, layers in zip(steps, seen) for row in layers]
    write_csv(folder / 'inspect.csv', rows)
    panels = [('update by depth', 'layer', {
        f'step {step}': points([r for r in rows if r['iter'] == step], 'layer', 'update')
        for step in steps[::max(1, len(steps) // 4)]})]
    panels += [(key, 'step', {
        f'layer {i}': points([r for r in rows if r['layer'] == i], 'iter', key)
        for i in range(config.n_layer)}) for key in list(rows[0])[2:]]
    files = draw(folder / 'inspect.png', panels, ordered=True)
    print(diagnose.__doc__.split('\n\n')[-1].rstrip())
    table(rows[-config.n_layer:])
    print(f'files   {folder}: {", ".join(["inspect.csv"] + files)}')
    return dict(result, rows=rows)

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

ACTIONS.update({
    'inspect': (inspect_layers, {}, 'Train and watch what the layers do.'),
    'sample': (sample, {**NEWEST, '--prompt': dict(default='\n', help='text, or FILE:path'),
                        '--num-samples': number(1, 'texts'),
                        '--max-new-tokens': number(300, 'tokens'),
                        '--temperature': number(0.8, '0 takes the likeliest token'),
                        '--top-k': number(0, 'choose among the k likeliest; 0: among all')},
               'Continue a text.'),
})

if __name__ == '__main__':
    main()
