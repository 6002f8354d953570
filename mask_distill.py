# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""A GPT-2 that attends to few tokens: masks learned by distillation, and what that is worth.

The report (MA: Optimizing Attention Mechanisms in Transformer Models; no author named) replaces the
causal mask of GPT-2, the teacher, with a linear combination of candidate masks, and trains this
student to match its teacher's distributions. It names five criteria, measured here as well.

    the report     what                                                  function
    [MA Sec. 3]    W = sum_k c_k M_k with c_k = sigmoid(alpha_k)         mixture, log_coefficients
    [MA Sec. 2.1]  KL(P_base || P_custom), mean over tokens              token_kl
    [MA Sec. 2.5]  L1, the sum of the c_k                                loss_of
    [MA Sec. 2.4]  accuracy, attention MSE, gradient cosine, KL          CRITERIA, fidelity
    [MA Sec. 2.4]  peak memory of attention, training step, inference    memory

(The numbers of its sections are our count.) "A linear combination of masks" has three READINGS.
Under the default only ratios of the c_k count, so L1 drives every alpha to minus infinity, as the
report saw.

    python mask_distill.py                                  # train: 3 minutes on a CPU
    python mask_distill.py sample --prompt "def main("      # teacher and student, side by side
    python mask_distill.py criteria                         # that run's five criteria
    python mask_distill.py compare --table masks --seeds 0  # the criteria for ten choices of masks
    python mask_distill.py inspect --table l1               # coefficients in training, under L1
    python mask_distill.py scaling --lengths 1024,4096      # memory and time of attention
    python mask_distill.py --preset report004               # the report's experiment

The first ends with 48 % of the pairs kept, 1.005 of the teacher's accuracy, KL 0.0102, gradient
cosine 0.977; 2 of 4 criteria pass (644,224 parameters, one seed, 174 seconds of one CPU thread).

Stage 1 of 2 trains a small GPT-2, the teacher, or takes the one that --init names; stage 2 trains
the student. Where the report is silent the code says [choice].
What stands below the banner `tools` is the same in all four scripts.
"""
import argparse
import copy
import csv
import difflib
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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

SCRIPT = 'mask_distill'
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many

def fail(message):
    """Stop with one line on what the user can do about it."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the report's method ------------------------------------
KINDS = {  # term of --masks: may token i attend to j <= i? `far`: where windows and offsets end
    # for `--masks stride:N` add a line of your own, say (i - j) % n == 0: dense, with a full cache
    'all': lambda i, j, n, far: i >= j,
    'window': lambda i, j, n, far: i - j < n,
    'offset': lambda i, j, n, far: i - j == n,
    'first': lambda i, j, n, far: j < n,
    'sinks': lambda i, j, n, far: (i - j >= far) & (j < n),  # first tokens, no pair twice
}
NAMED = {
    'all': 'all:1',
    'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4',  # the report's five masks
    'windows': 'window:5+window:10+first:5',                  # its previous three
    'first-all': 'first:1+all',                               # its experiment with L1
}

def candidates(masks):
    """'window:64+sinks:4' -> [('window', 64), ('sinks', 4)]."""
    found = []
    for term in masks.split('+'):
        if term in NAMED:
            found += candidates(NAMED[term])
            continue
        kind, _, n = term.partition(':')
        if kind not in KINDS or not n.isdecimal() or (int(n) == 0 and kind != 'offset'):
            fail(f'--masks {masks}: {term!r} is none of {":N, ".join(KINDS)}:N, {", ".join(NAMED)}')
        found.append((kind, int(n)))
    return found

def window_and_first(masks):
    """The smallest window that holds all windows and offsets, and the number of first tokens."""
    window, first = 1, 0
    for kind, n in candidates(masks):
        if kind == 'window':
            window = max(window, n)
        if kind == 'offset':
            window = max(window, n + 1)
        if kind in ('first', 'sinks'):
            first = max(first, n)
    return window, first

def is_local(masks):
    """Only windows, offsets and first tokens, which blocks of keys and a small cache can hold?"""
    return {kind for kind, _ in candidates(masks)} <= {'window', 'offset', 'first', 'sinks'}

def log_coefficients(alpha):
    """log sigmoid(alpha), (K,). [choice] A mask whose coefficient is below a thousandth of the
    largest is closed: -inf.  [MA Sec. 3]"""
    log_c = F.logsigmoid(alpha)
    return log_c.masked_fill(log_c < log_c.max() + math.log(1e-3), -math.inf)

def mixture(c, M):
    """W = sum_k c_k M_k from c (K,) and K masks (..., Tq, T) -> (..., Tq, T).  [MA Sec. 3]"""
    return sum(c_k * m for c_k, m in zip(c, M))

def open_masks(masks, log_c, i, j):
    """For queries at i (..., Tq) and keys at j (..., T): K + 1 masks (..., Tq, T), and c / max c
    (K + 1,). [choice] So that no row is empty, the last mask holds a token's own pair wherever
    no open mask does, with the largest coefficient."""
    i, j = i[..., None], j[..., None, :]
    causal = (0 <= j) & (j <= i)
    far, _ = window_and_first(masks)
    M = [KINDS[kind](i, j, n, far) & causal for kind, n in candidates(masks)]
    c = (log_c - log_c.max()).exp()  # (K,)
    own_token = (i == j) & (mixture(c.detach(), M) == 0)
    return [*M, own_token], torch.cat([c, c.new_ones(1)])

def safe_log(w):
    """log w, and -inf with gradient 0 where w is 0."""
    return w.clamp_min(torch.finfo(w.dtype).tiny).log().masked_fill(w == 0, -math.inf)

def each_softmax(S, M, c):
    """sum_k c_k softmax(S on M_k), where a mask without tokens adds nothing."""
    least = torch.finfo(S.dtype).min
    return sum(c_k * (F.softmax(S.masked_fill(~m, least), -1) * m) for c_k, m in zip(c, M))

READINGS = {  # from scores S (B, nh, Tq, T), K + 1 masks M (Tq, T) and coefficients c (K + 1,)
    # [choice] the first: rows add up to 1, and a coefficient is a bias on the scores
    'renormalised': lambda S, M, c: F.softmax(S + safe_log(mixture(c, M)), -1),
    'unnormalised': lambda S, M, c: mixture(c, M) * F.softmax(S, -1),
    'separate': each_softmax,
}

def attention_weights(q, k, masks, log_c=None, reading='renormalised', i=None, j=None):
    """q (B, nh, Tq, hs), k (B, nh, T, hs) at positions i, j (default 0, 1, ...) -> (B, nh, Tq, T).
    log_c (K,): logarithms of the masks' coefficients, by default 0."""
    if i is None:
        i, j = torch.arange(q.size(2), device=q.device), torch.arange(k.size(2), device=q.device)
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (B, nh, Tq, T)
    future = i[..., None] < j[..., None, :]  # (Tq, T)
    if log_c is None and masks == 'all':  # plain attention
        return F.softmax(S.masked_fill(future, -math.inf), dim=-1)
    if log_c is None:
        log_c = torch.zeros(len(candidates(masks)), device=q.device)
    M, c = open_masks(masks, log_c, i, j)
    if reading != 'renormalised':  # for that one only ratios of the c count
        S, c = S.masked_fill(future, -math.inf), c * log_c.max().exp()
    return READINGS[reading](S, M, c)

def dense_attention(q, k, v, masks='all', log_c=None, reading='renormalised', i=None, j=None):
    """The definition, any masks: O(T^2). q, k, v (B, nh, T, hs) -> (B, nh, T, hs)."""
    return attention_weights(q, k, masks, log_c, reading, i, j).to(v.dtype) @ v

def blocked_attention(q, k, v, masks='window:64', log_c=None, block=0):
    """dense_attention, renormalised, of local masks, in O(T window): b queries at a time.

    A block's queries q see the b + window - 1 keys k `near` them and the first tokens f. With
    b = 3, window = 4 and one first token:
        position  0 1 2 3 4 5 6 7 8
        queries               q q q
        keys      f     k k k k k k
    """
    B, nh, T, hs = q.shape
    window, first = [min(size, T) for size in window_and_first(masks)]
    b = min(block or max(16, min(window, 128)), T)
    n = math.ceil(T / b)  # blocks
    end = n * b - T  # padding after the last token
    i = torch.arange(n * b, device=q.device).view(n, b)
    near = torch.arange(1 - window, b, device=q.device) + i[:, :1]  # (n, b + window - 1)
    front = torch.arange(first, device=q.device).repeat(n, 1)  # (n, first)
    front = front.masked_fill(front >= near[:, :1], -1)  # in no mask: `near` already has it
    j = torch.cat([near, front], 1)

    def blocks_of_keys(t):  # (B, nh, T, hs) -> (B, nh, n, b + window - 1 + first, hs)
        local = F.pad(t, (0, 0, window - 1, end)).unfold(2, b + window - 1, b).mT
        firsts = t[:, :, None, :first].expand(-1, -1, n, -1, -1)
        return torch.cat([local, firsts], 3)

    queries = F.pad(q, (0, 0, 0, end)).view(B, nh, n, b, hs)
    p = attention_weights(queries, blocks_of_keys(k), masks, log_c, i=i, j=j)
    return (p.to(v.dtype) @ blocks_of_keys(v)).view(B, nh, n * b, hs)[:, :, :T]

def token_kl(teacher_logits, logits):
    """KL(teacher || student) of every token in nats, from logits (B, T, V) -> (B, T).
    [MA Sec. 2.1]"""
    p, q = F.log_softmax(teacher_logits, dim=-1), F.log_softmax(logits, dim=-1)
    return (p.exp() * (p - q)).sum(-1)

@torch.no_grad()
def kept_pairs(alphas, masks, T):
    """Share of the T (T + 1) / 2 causal pairs that open masks hold, mean over layers."""
    shares = []
    i = torch.arange(T, device=alphas[0].device)
    for alpha in alphas:
        M, c = open_masks(masks, log_coefficients(alpha), i, i)
        shares.append((mixture(c, M) > 0).sum().item() / (T * (T + 1) / 2))
    return sum(shares) / len(shares)

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --compile, --no-compile. --help prints this."""
    # the report's method
    masks: str = 'window:32+sinks:4'  # all, window:N, offset:N, first:N, sinks:N, names; join by +
    reading: str = 'renormalised'  # a name in READINGS: what the combination of masks means
    learn: str = 'attention'       # alphas: only those; attention: also c_attn and c_proj
    l1: float = 0.0                # weight of the report's penalty on coefficients
    alpha_lr: float = 0.03         # learning rate of the alphas
    # teacher and model
    stage: str = 'student'         # set by the script: teacher in stage 1
    init: str = ''                 # teacher: a checkpoint of stage 1, or a file of GPT-2's weights
    teacher_iters: int = 600       # stage 1: optimiser steps
    teacher_lr: float = 2e-3       # stage 1: learning rate at its peak
    n_layer: int = 3               # this and the next three: of a teacher trained here
    n_head: int = 0                # 0: of 64 channels, at least 4; a file's: --init must say it
    n_embd: int = 128
    vocab_size: int = 0            # 0: as many as the data's tokenizer has
    block_size: int = 128          # tokens in a window
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = 'bytes'       # of text files: bytes or gpt2; prepared data know theirs
    samples: int = 0               # windows to distil on, drawn with replacement; 0: all the text
    # training
    seed: int = 1337               # of weights and batches
    max_iters: int = 150           # optimiser steps
    batch_size: int = 16           # windows in memory at once, shared among the processes
    grad_accum_steps: int = 1      # batches in an optimiser step
    learning_rate: float = 5e-4    # of the attention's weights, at its peak
    min_lr: float = 0.1            # final cosine rate, as a fraction of learning_rate
    schedule: str = 'cosine'       # cosine, trapezoid, step or constant, after warmup
    warmup_iters: int = 20
    warmdown_iters: int = 0        # final steps: falling to 0 (trapezoid), at a tenth (step)
    weight_decay: float = 0.1      # AdamW's, on matrices of a teacher trained here
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 50        # steps between evaluations, and between checkpoints
    eval_rows: int = 64            # validation windows, the same ones every time
    dtype: str = 'auto'            # of matmuls: float32, bfloat16, float16
    # machine: from here on, settings may differ when a run resumes
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0 for PyTorch's default
    log_interval: int = 10         # steps between lines of progress
    reuse: bool = False            # take runs of these settings though the script has changed
    fresh: bool = False            # restart a stopped or finished run, and its teacher's
    out_dir: str = 'out'           # where runs are written
    # actions
    run: str = ''                  # sample, criteria: a run's folder; default: the last one
    prompt: str = ''               # sample: a text to continue; default: four of the report's
    new_tokens: int = 100          # sample
    temperature: float = 0.8       # sample: 0 takes the likeliest token
    lengths: str = '1024'          # criteria, scaling: tokens of the sequences measured
    over: list = ()                # compare, bench, inspect: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench, inspect: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    from_csv: str = ''             # compare: tabulate these runs.csv files, A,B, not training
    figure: str = ''               # compare: what to test, e.g. mean_loss; default: the result
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(f'--{name} {getattr(self, name)}: choose from {", ".join(allowed)}')
        for name in POSITIVE + NOT_NEGATIVE:
            value, least = getattr(self, name), 1 if name in POSITIVE else 0
            if value < least:
                fail(f'--{name.replace("_", "-")} {value}: must be at least {least}')
        candidates(self.masks)  # fails where there is no such mask
        if not self.init and self.n_embd % self.heads:
            fail(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.heads}')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')

    @property
    def heads(self):
        return self.n_head or max(4, self.n_embd // 64)

    @property
    def variant(self):
        masks = self.masks.replace(':', '').replace('+', '-')
        return 'teacher' if self.stage == 'teacher' else f'{masks}-{self.reading}-{self.learn}'

PRESETS = {
    'tiny': {},
    't4': dict(masks='window:96+sinks:4', teacher_iters=3000, teacher_lr=1e-3, n_layer=6,
               n_embd=384, block_size=256, data='wikitext-2', max_iters=600, learning_rate=1e-4,
               eval_interval=100, threads=0),
    # [choice] batch, rates, weight of L1, 512 tokens, of which the report has "up to 512"; and
    # trained attention: the report's loss drop needs it
    'report004': dict(masks='last5', l1=1e-3, init='data/weights/gpt2/model.safetensors',
                      n_head=12, block_size=512, data='wikitext-2', samples=1000, batch_size=4,
                      grad_accum_steps=2, max_iters=12500,  # 100 epochs of 125 steps
                      learning_rate=1e-4, eval_interval=250, threads=0),
}
WIDTHS = 'last5 windows window:16+sinks:4 window:32+sinks:4 window:64 window:64+sinks:4'.split()
TABLES = {  # rows for `compare --table NAME` and `inspect --table NAME`
    'masks': {
        **{masks: dict(masks=masks) for masks in WIDTHS},
        'last5, alphas': dict(masks='last5', learn='alphas'),
        'last5, mask only': dict(masks='last5', learn='alphas', max_iters=0),
        '64+4, alphas': dict(masks='window:64+sinks:4', learn='alphas'),
        '64+4, mask only': dict(masks='window:64+sinks:4', learn='alphas', max_iters=0)},
    'l1': {'no L1': dict(masks='first-all', learn='alphas'),
           'L1': dict(masks='first-all', learn='alphas', l1=0.1),
           'a tenth of it': dict(masks='first-all', learn='alphas', l1=0.01)},
}
CHOICES = {
    'reading': READINGS, 'learn': ('alphas', 'attention'), 'stage': ('teacher', 'student'),
    'tokenizer': ('bytes', 'gpt2'), 'schedule': ('cosine', 'trapezoid', 'step', 'constant'),
    'table': ('', *TABLES), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}
POSITIVE = ('n_layer', 'n_embd', 'block_size', 'batch_size', 'grad_accum_steps', 'eval_interval',
            'eval_rows', 'log_interval', 'new_tokens', 'rounds')
NOT_NEGATIVE = ('n_head', 'teacher_iters', 'samples', 'max_iters', 'warmup_iters', 'temperature')

# ------------------------------------ model ------------------------------------
class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as GPT-2's files have it."""
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return F.linear(x, self.weight.mT, self.bias)

class SelfAttention(nn.Module):
    """GPT-2's, by PyTorch's fused kernel; a student has masks and alpha instead."""
    def __init__(self, c):
        super().__init__()
        self.n_head = c.heads
        self.fused, self.masks, self.reading = True, 'all', 'renormalised'
        self.c_attn = Conv1D(c.n_embd, 3 * c.n_embd)
        self.c_proj = Conv1D(c.n_embd, c.n_embd)
        self.alpha = None

    def attend(self, q, k, v, i, j, maps=None):
        """q, k, v (B, nh, T, hs), positions i of queries and j of keys -> (B, nh, Tq, hs)."""
        log_c = None if self.alpha is None else log_coefficients(self.alpha)
        if maps is not None:
            with torch.no_grad():
                maps.append(attention_weights(q, k, self.masks, log_c, self.reading, i, j))
        if self.fused and len(i) in (1, len(j)):  # the newest token alone, or all of them
            return F.scaled_dot_product_attention(q, k, v, is_causal=len(i) > 1)
        if self.reading == 'renormalised' and is_local(self.masks) and len(i) == len(j):
            return blocked_attention(q, k, v, self.masks, log_c)
        return dense_attention(q, k, v, self.masks, log_c, self.reading, i, j)

    def forward(self, x, cache=None, maps=None):
        """x (B, T, C) -> like x."""
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        past = cache['past'] if cache else 0
        i = j = torch.arange(past, past + x.size(1), device=x.device)
        if cache:
            k, v = torch.cat([cache['k'], k], 2), torch.cat([cache['v'], v], 2)
            j = torch.cat([cache['j'], i])
        y = self.attend(q, k, v, i, j, maps)  # (B, nh, T, hs)
        if cache is not None:  # even if still empty
            if is_local(self.masks) and self.reading != 'unnormalised':  # whose softmax needs all
                window, first = window_and_first(self.masks)
                needed = (j > j[-1] + 1 - window) | (j < first)  # by the tokens to come
                k, v, j = k[:, :, needed], v[:, :, needed], j[needed]
            cache.update(k=k, v=v, j=j, past=past + len(i))
        return self.c_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = Conv1D(c.n_embd, 4 * c.n_embd)
        self.c_proj = Conv1D(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = SelfAttention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.mlp = MLP(c)

    def forward(self, x, cache=None, maps=None):
        x = x + self.attn(self.ln_1(x), cache, maps)
        return x + self.mlp(self.ln_2(x))

class GPT2(nn.Module):
    """GPT-2 with the keys of its published files; block_size is the number of its positions."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.teacher = None
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        for name, p in self.named_parameters():
            if name.endswith('.weight') and p.dim() == 2:  # what else there is stays as made
                # a generator for each, so that models start alike
                generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
                std = 0.02 / math.sqrt(2 * c.n_layer) if 'c_proj' in name else 0.02
                nn.init.normal_(p, 0.0, std, generator=generator)

    def forward(self, idx, cache=None, maps=None, last=False):
        """idx (B, T) -> logits (B, T, V) or, of the last token alone, (B, 1, V). cache: a dict for
        each layer; maps: a list that gets every layer's attention weights (B, nh, T, T)."""
        past = cache[0].get('past', 0) if cache else 0
        x = self.wte(idx) + self.wpe(torch.arange(past, past + idx.size(1), device=idx.device))
        for block, layer in zip(self.h, cache or [None] * len(self.h)):
            x = block(x, layer, maps)
        x = self.ln_f(x[:, -1:] if last else x)
        # GPT-2's logits are near -100, where bfloat16 rounds to halves: a KL of 5e-3
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.wte.weight)

    def alphas(self):
        return [block.attn.alpha for block in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0):
        """idx (B, T) -> (B, T + max_new_tokens), and the cache's bytes at the end. [choice] Cached
        entries cannot move: when positions run out, the last half is encoded afresh."""
        positions = len(self.wpe.weight)
        new, cache = idx[:, -positions:], [{} for _ in self.h]
        for _ in range(max_new_tokens):
            if cache[0].get('past') == positions:
                new, cache = idx[:, -(positions // 2):], [{} for _ in self.h]
            logits = self(new, cache, last=True)[:, -1]  # (B, V)
            new = logits.argmax(-1, keepdim=True)  # (B, 1)
            if temperature:
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat([idx, new], dim=1)
        return idx, sum(layer['k'].nbytes + layer['v'].nbytes for layer in cache)

def substitute(teacher, c):
    """A copy of the teacher whose attention has masks. Only what --learn says is trained."""
    model = copy.deepcopy(teacher)
    model.config = c
    model.teacher = (teacher,)  # in a tuple: no part of the model, so neither trained nor saved
    for block in model.h:
        block.attn.fused, block.attn.masks, block.attn.reading = False, c.masks, c.reading
        alpha = torch.zeros(len(candidates(c.masks)), device=model.wte.weight.device)
        block.attn.alpha = nn.Parameter(alpha)  # [choice] all masks start alike, c = 1/2
    trained = '.attn.' if c.learn == 'attention' else '.alpha'
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    return model

# ------------------------------------ data ------------------------------------
def stream(name, *numbers):
    """A generator of its own: NumPy pads seeds with zeros, so [1, 7] would equal [1, 7, 0]."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

def read_text(c):
    """Training and validation text: the latter is every tenth file, or the last tenth of one."""
    if c.data == 'builtin':
        files = sorted(Path(os.__file__).parent.glob('*.py'))
        texts = [f.read_text('utf-8', errors='replace') for f in files]
        train = ''.join(text for i, text in enumerate(texts) if i % 10 < 9)
        return train, ''.join(texts[9::10])
    if not Path(c.data).is_file():
        fail(f'--data {c.data}: no such file, no folder data/{c.data}; `python prepare_data.py '
             f'{c.data}` makes one, or, without a name, lists what there is')
    try:
        text = Path(c.data).read_text('utf-8-sig')
    except UnicodeDecodeError:
        fail(f'--data {c.data} is no text in UTF-8')
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]

def data_files(c):
    """The files that the data and, in stage 2, the teacher come from: a change trains anew."""
    folder = Path(os.__file__).parent if c.data == 'builtin' else Path('data', c.data)
    files = folder.glob('*.py' if c.data == 'builtin' else '*')
    return [*sorted(files), Path(c.data), Path(c.init)]

def get_tokenizer(name):
    """`bytes`, 256 tokens, no files, or `gpt2`, which tiktoken fetches once."""
    import tiktoken
    if name == 'gpt2':
        return tiktoken.get_encoding('gpt2')
    return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},
                             mergeable_ranks={bytes([i]): i for i in range(256)})

def load_data(c):
    """c.data -> train and val (uint16 tokens), and their tokenizer."""
    folder, tokenizer = Path('data', c.data), c.tokenizer
    if folder.is_dir():  # nanoGPT's format, as prepare_data.py writes it
        meta = folder / 'meta.json'  # nanoGPT's own folders of GPT-2's tokens have none
        tokenizer = json.loads(meta.read_text('utf-8'))['tokenizer'] if meta.exists() else 'gpt2'
        if not (folder / 'val.bin').exists():
            fail(f'{folder} has no val.bin: prepare_data.py {c.data} did not finish')
        train, val = [np.memmap(folder / f, np.uint16, 'r') for f in ('train.bin', 'val.bin')]
    else:
        encode = get_tokenizer(tokenizer).encode_ordinary
        train, val = [np.array(encode(text), dtype=np.uint16) for text in read_text(c)]
    V = dict(bytes=256, gpt2=50257)[tokenizer]
    if min(len(train), len(val)) <= c.block_size + 1:
        fail(f'--data {c.data} does not fill a window of --block-size {c.block_size}')
    about = f'{c.data}, {len(train):,} tokens ({tokenizer})'
    return SimpleNamespace(train=train, val=val, tokenizer=tokenizer, vocab_size=V, about=about)

def windows(tokens, starts, c, device):
    """The tokens from each start on, and the same one step later: two of (B, T), int64."""
    x = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    x = torch.from_numpy(x).to(device)
    return x[:, :-1], x[:, 1:]

# ------------------------------------ training ------------------------------------
METRIC = 'val_loss'   # best.pt and `compare --best` go by this validation figure:
BETTER = min          # lower is better
RESULTS = ['kl', 'accuracy', 'mse', 'cosine', 'kept', 'perplexity', 'teacher_perplexity']
BASELINE = {}         # settings of the case that `compare` puts first; {}: as a table has them
LABELS = {'loss': 'training loss (nats per token)', 'val_loss': 'validation KL (nats per token)',
          'seconds': 'seconds of training steps', 'kept': 'share of the pairs kept',
          'kl': 'KL(teacher || student) (nats per token)'}

def load_gpt2(path, n_head=0):
    """A file with the weights of a GPT-2 of any size -> GPT2. Heads: as our checkpoint says, or the
    config.json that transformers writes beside others' files, or n_head."""
    path = Path(path)
    beside = path.with_name('config.json')
    if not path.is_file():
        fail(f'--init {path}: no such file; `python prepare_data.py gpt2` downloads GPT-2. In a '
             'notebook, train(with_teacher(c)) trains a small one first')
    try:
        if path.suffix == '.safetensors':
            from safetensors.torch import load_file  # an optional package
            saved = load_file(path)
        else:
            saved = load_checkpoint(path, own=False)
        if 'config' in saved:
            n_head = saved['config']['n_head']
        elif beside.exists():
            n_head = json.loads(beside.read_text('utf-8'))['n_head']
        if not n_head:
            fail(f'--init {path} does not say how many heads it has: put its config.json beside '
                 'it, or give --n-head, 12 for the smallest GPT-2')
        state = {}
        for key, tensor in saved.get('model', saved).items():
            if not key.endswith(('.attn.bias', '.attn.masked_bias', 'lm_head.weight')):
                state[key.removeprefix('transformer.')] = tensor.float()  # transformers' prefix
        V, C = state['wte.weight'].shape
        n_layer = sum(key.endswith('.ln_1.weight') for key in state)
        model = GPT2(Config(n_layer=n_layer, n_head=n_head, n_embd=C, vocab_size=V,
                            block_size=len(state['wpe.weight'])))
        model.load_state_dict(state)
        return model
    except Exception as error:  # a damaged file, or a student: half a dozen kinds
        fail(f'--init {path} cannot be read as a GPT-2: {" ".join(str(error).split())[:150]}')

def make_model(c, data):
    """A new teacher or, in stage 2, a copy of --init's with masks; its config has what teacher and
    data decide."""
    c = replace(c, tokenizer=getattr(data, 'tokenizer', c.tokenizer))
    if c.stage == 'teacher':
        return GPT2(replace(c, vocab_size=c.vocab_size or data.vocab_size, n_head=c.heads))
    teacher = load_gpt2(c.init, c.n_head).requires_grad_(False).eval().to(pick_device(c)[0])
    t = teacher.config
    V = getattr(data, 'vocab_size', t.vocab_size)
    if V != t.vocab_size or t.block_size < c.block_size:
        fail(f'--init {c.init} has {t.vocab_size} tokens and {t.block_size} positions; the data '
             f'need {V}, of the tokenizer {c.tokenizer}, and --block-size {c.block_size}')
    return substitute(teacher, replace(c, n_layer=t.n_layer, n_head=t.n_head, n_embd=t.n_embd,
                                       vocab_size=t.vocab_size))

def make_optimizer(model, c):
    """AdamW. Only a teacher's matrices decay: a student's should tend to its teacher's, not 0."""
    groups = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            lr = c.alpha_lr if name.endswith('alpha') else c.learning_rate
            decay = c.weight_decay if c.stage == 'teacher' and p.dim() == 2 else 0.0
            groups.append(dict(params=[p], lr=lr, weight_decay=decay))
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))

def get_batch(data, c, step, micro, device):
    """This process's rows of micro-batch `micro`, from seed and step alone."""
    n = len(data.train) - c.block_size
    size = c.grad_accum_steps, c.batch_size
    starts = stream('batch', c.seed, step).integers(c.samples or n, size=size)
    if c.samples:  # of these windows, the same ones in every step
        starts = stream('samples', c.seed).integers(n, size=c.samples)[starts]
    return windows(data.train, starts[micro, RANK::WORLD], c, device)

def loss_of(model, batch, c):
    """In stage 1 cross-entropy, in stage 2 KL and L1 on the coefficients [MA Sec. 2.5]. [deviation]
    KL is the mean over tokens, where the report has a sum, because l1 and learning rate would
    depend on the batch."""
    x, y = batch  # (B, T) each
    if model.teacher is None:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    with torch.no_grad():
        teacher_logits = model.teacher[0](x)  # (B, T, V)
    l1 = sum(alpha.sigmoid().sum() for alpha in model.alphas())
    return token_kl(teacher_logits, model(x)).mean() + c.l1 * l1

def validation(data, c, device):
    """The same windows every time, spread evenly over the text, batch by batch."""
    last = len(data.val) - c.block_size - 1
    starts = np.unique(np.linspace(0, last, c.eval_rows).astype(np.int64))
    for i in range(0, len(starts), c.batch_size):
        yield windows(data.val, starts[i:i + c.batch_size], c, device)

@torch.no_grad()
def evaluate(model, data, c, device):
    """The loss without penalty and, in stage 2, the share of the pairs that is kept, and every
    coefficient, such as 0.window:32 in layer 0."""
    c = replace(c, l1=0.0)
    total = rows = 0
    # in float32: with autocast to bfloat16 a student that equals its teacher has a KL of 3.7e-4
    with torch.autocast(device.type, enabled=False):
        for x, y in validation(data, c, device):
            total += loss_of(model, (x, y), c).item() * len(x)
            rows += len(x)
    figures = dict(val_loss=total / rows)
    if model.teacher:
        figures['kept'] = kept_pairs(model.alphas(), c.masks, c.block_size)
        for layer, alpha in enumerate(model.alphas()):
            for (kind, n), c_k in zip(candidates(c.masks), alpha.sigmoid().tolist()):
                figures[f'{layer}.{kind}:{n}'] = c_k
    return figures

CRITERIA = {  # what the report wants of a student  [MA Sec. 2.4]
    'accuracy': ('>=', 0.95),  # its next-token accuracy / the teacher's
    'cosine': ('>=', 0.95),    # of both gradients of [choice] cross-entropy for c_attn and c_proj
    'mse': ('<=', 1e-4),       # mean (P - P')^2 over layers, heads and [choice] pairs j <= i
    'kl': ('<=', 1e-3),        # KL(teacher || student) in nats, mean over tokens
}

def passes(name, value):
    sign, limit = CRITERIA[name]
    return value >= limit if sign == '>=' else value <= limit

def forward_backward(model, x, y):
    """Log-probabilities (N, V) at the N targets y that are not -1, every layer's attention weights
    (B, nh, T, T), and the gradient of the summed cross-entropy for all parameters of attention."""
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()
              if '.attn.c_' in name}
    maps = []
    logits = torch.func.functional_call(model, params, x, dict(maps=maps))
    log_p = F.log_softmax(logits, dim=-1)[y >= 0]
    loss = F.nll_loss(log_p, y[y >= 0], reduction='sum')
    gradient = torch.autograd.grad(loss, list(params.values()))
    return log_p.detach(), maps, torch.cat([g.flatten() for g in gradient])

def fidelity(model, batches):
    """How close a student is to its teacher on batches of (x, y), both (B, T); y = -1 is padding
    and never counts. Perplexity is exp of the cross-entropy with the text.  [MA Sec. 2.4]"""
    tokens = pairs = kl = squared_error = 0
    teacher_right = student_right = teacher_nll = student_nll = 0
    teacher_gradient = student_gradient = 0
    for x, y in batches:
        real = y >= 0  # (B, T)
        target = y[real]  # (N,)
        log_p, P, gradient = forward_backward(model.teacher[0], x, y)
        teacher_right += (log_p.argmax(-1) == target).sum()
        teacher_nll += F.nll_loss(log_p, target, reduction='sum')
        teacher_gradient += gradient
        log_q, Q, gradient = forward_backward(model, x, y)
        student_right += (log_q.argmax(-1) == target).sum()
        student_nll += F.nll_loss(log_q, target, reduction='sum')
        student_gradient += gradient
        tokens += len(target)
        kl += (log_p.exp() * (log_p - log_q)).sum()
        for P_layer, Q_layer in zip(P, Q):
            gap = (P_layer - Q_layer).transpose(1, 2)[real]  # (N, nh, T)
            squared_error += gap.square().sum()
            pairs += gap.size(1) * (real.nonzero()[:, 1] + 1).sum()  # j <= i
    tokens = max(1, tokens)  # a batch may be all padding
    figures = dict(
        kl=(kl / tokens).clamp_min(0), accuracy=student_right / teacher_right.clamp_min(1),
        mse=squared_error / pairs.clamp_min(1),
        cosine=F.cosine_similarity(teacher_gradient, student_gradient, dim=0),
        perplexity=(student_nll / tokens).exp(), teacher_perplexity=(teacher_nll / tokens).exp())
    figures = {name: value.item() for name, value in figures.items()}
    figures['passed'] = sum(passes(name, figures[name]) for name in CRITERIA)
    figures['kept'] = kept_pairs(model.alphas(), model.config.masks, x.size(1))
    return figures

def finish(model, data, c, device, folder):
    """The report's criteria except memory, once a student is trained."""
    return fidelity(model, validation(data, c, device)) if model.teacher else {}

def stage_1(c):
    """The run that makes the teacher, the same one whatever c says of the student."""
    student = ('masks', 'reading', 'learn', 'l1', 'alpha_lr', 'samples', 'min_lr', 'schedule',
               'warmdown_iters', 'grad_clip')
    return replace(c, **{name: getattr(Config, name) for name in student}, stage='teacher',
                   max_iters=c.teacher_iters, learning_rate=c.teacher_lr, warmup_iters=100)

def with_teacher(c):
    """Stage 1 of 2 -> c with its teacher, the one that --init names or one trained here."""
    varied = [spec.partition('=')[0].replace('-', '_') for spec in c.over]  # seed, data may be
    for field in ('tokenizer', 'n_layer', 'n_head', 'n_embd', 'vocab_size', 'teacher_iters',
                  'teacher_lr', 'weight_decay'):
        if field in varied:
            fail(f'--over {field}: all cases share one teacher; --over init=A,B compares two')
    if c.init or 'init' in varied or c.from_csv:
        return c
    folder = run_folder(stage_1(c))
    print('stage 1 of 2: a small GPT-2 learns the text; with full attention, it is the teacher')
    train_to_end(stage_1(c), folder)
    if WORLD > 1:
        dist.barrier()  # until the checkpoint is there
    print('stage 2 of 2: its copy with masks, the student, learns to predict what the teacher does')
    return replace(c, init=str(folder / 'ckpt.pt'))

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

# -------------------------- report, inspect, sample, criteria, memory --------------------------
def report(c, model, log):
    """What came out, the masks alone and after training, and two samples, as text."""
    device, _ = pick_device(c)
    data = load_data(c)
    wanted = [f'{name} {sign} {limit:g}' for name, (sign, limit) in CRITERIA.items()]
    text = 'the report wants' + ''.join(f'{words:>20}' for words in wanted)
    untrained = substitute(model.teacher[0], model.config)
    for case, net in (('mask only', untrained), ('trained', model)):
        figures = finish(net.eval(), data, c, device, None)
        text += f'\n{case:16}'
        for name in CRITERIA:
            verdict = 'PASS' if passes(name, figures[name]) else 'FAIL'
            text += f'{figures[name]:#15.3g} {verdict}'
    text += (f'\nresult  {figures["kept"]:.0%} of the pairs give {figures["accuracy"]:.3f} of the '
             f'accuracy; {figures["passed"]} of {len(CRITERIA)} criteria pass')
    if figures['passed'] < len(CRITERIA):
        text += '; at the defaults, --masks window:96+sinks:4 keeps 95 % and passes'
    text += (f'\n        perplexity {figures["perplexity"]:.3f}, '
             f'the teacher\'s {figures["teacher_perplexity"]:.3f}\n')
    return text + side_by_side(c, model, PROMPTS[:2])

PROMPTS = [  # the report's
    'Hello, my name is', 'The meaning of life is', 'In a shocking turn of events,',
    'The future of artificial intelligence']

def side_by_side(c, model, prompts):
    """How teacher and student continue each prompt, from the same seed, as text."""
    encoding = get_tokenizer(model.config.tokenizer)
    device = model.wte.weight.device
    lines = []
    for prompt in prompts:
        idx = torch.tensor([encoding.encode_ordinary(prompt)], device=device)  # (1, T)
        for name, net in (('teacher', model.teacher[0]), ('student', model)):
            torch.manual_seed(c.seed)
            out, size = net.generate(idx, c.new_tokens, c.temperature)
            text = encoding.decode(out[0].tolist())
            lines.append(f'\n{name}, with a cache of {size:,} bytes: {text}')
    return '\n'.join(lines)

def sample(c):
    """Teacher and student continue --prompt, or the report's short prompts."""
    c, model = load_run(c)
    text = side_by_side(c, model, [c.prompt] if c.prompt else PROMPTS)
    print(text)
    return text

def inspect_masks(c):
    """The coefficients of every layer in training, of this run or of each case of a table."""
    cases = cases_of(c) if c.over or c.table else {c.variant: c}
    found = {}
    for name, case in cases.items():
        print(f'\n{name}')
        folder = run_folder(case)
        model, log = train_to_end(case, folder)
        masks = [f'{kind}:{n}' for kind, n in candidates(case.masks)]
        layers, found[name] = {}, []
        for i in range(len(model.h)):
            rows = [dict(step=row['step'], layer=i, **{mask: row[f'{i}.{mask}'] for mask in masks})
                    for row in log]
            print(f'coefficients: {show(rows[-1])}')
            layers[f'layer {i}'] = [rows]
            found[name] += rows
        write_csv(folder / 'inspect.csv', found[name])
        draw(folder / 'inspect.png', layers, [('step', mask) for mask in masks])
    return found

def compare_masks(c):
    """compare, and a picture of what the masks cost: KL over the share of pairs kept."""
    table = compare(with_teacher(c))
    if not c.figure:  # the mean is KL's
        points = {row['case']: [[dict(kept=row['kept'], kl=row['mean'])]] for row in table}
        draw(Path(c.out_dir, SCRIPT, 'kl_over_pairs.png'), points, [('kept', 'kl')])
    return table

def peak(f, device):
    """The most bytes that f() holds at once. CUDA counts them. A CPU does not, but PyTorch's
    profiler notes every allocation and, as a negative size, every release: the largest sum of
    those so far is the peak."""
    if device.type == 'cuda':
        f()  # so that cuBLAS has its workspace
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ['KINETO_LOG_LEVEL'] = '99'  # some builds of the profiler talk
    with torch.profiler.profile(profile_memory=True) as profile:
        f()
    events = profile.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == '[memory]']
    return max(np.cumsum([size for _, size in sorted(sizes)]))

def memory(c, T, device):
    """Peak memory of attention alone, and of a model with its (random) parameters, for a sequence
    of T tokens in float32; also attention's time -> {what: figure} for full attention as defined
    (eager), for PyTorch's fused kernel (sdpa), and with masks.  [MA Sec. 2.4]"""
    model = GPT2(replace(c, block_size=T)).to(device)
    weights = sum(p.nbytes for p in model.parameters())
    i = torch.arange(T, device=device)
    idx = i[None] % c.vocab_size  # (1, T)
    attn = model.h[0].attn
    shape = (1, c.heads, T, c.n_embd // c.heads)
    q, k, v = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]

    def attention():
        torch.autograd.grad(attn.attend(q, k, v, i, i).sum(), (q, k, v))

    def step():
        loss_of(model, (idx, idx), c).backward()
        model.zero_grad()

    def infer():
        with torch.no_grad():
            model(idx, last=True)

    timer = Timer('f()', globals=dict(f=attention), num_threads=torch.get_num_threads())
    found = []
    for fused, masks, reading in ((False, 'all', 'renormalised'), (True, 'all', 'renormalised'),
                                  (False, c.masks, c.reading)):
        for block in model.h:
            block.attn.fused, block.attn.masks, block.attn.reading = fused, masks, reading
        found.append({'attention, MiB': peak(attention, device) / 2**20,
                      'training step, MiB': (peak(step, device) + weights) / 2**20,
                      'inference, MiB': (peak(infer, device) + weights) / 2**20,
                      'attention, ms': 1000 * timer.timeit(3).mean})
    return found

def scaling(c):
    """Memory and time of a model with the sizes that the flags say -> {length: its memory()}."""
    c = replace(c, vocab_size=c.vocab_size or 256)
    device, _ = pick_device(c)
    found = {}
    for T in values_of('--lengths', c.lengths, int).values():
        eager, sdpa, masks = found[T] = memory(c, T, device)
        print(f'\n{T:5} tokens{"":15}eager{"":6}sdpa{"":5}masks   30 % of the memory saved?')
        for name in eager:
            line = f'{name:20}{eager[name]:10.1f}{sdpa[name]:10.1f}{masks[name]:10.1f}'
            if 'MiB' in name:
                saved = 1 - masks[name] / eager[name]
                line += f'{saved:9.0%} less, ' + ('PASS' if saved >= 0.3 else 'FAIL')
            print(line)
    print('sdpa, the fused kernel, stores no T x T matrix either; no mask saves weights or logits')
    return found

def criteria(c):
    """All five criteria of a run that is done."""
    c, model = load_run(c)
    print(report(c, model, []))
    return scaling(c)

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

ACTIONS = {'train': lambda c: train_and_report(with_teacher(c)), 'compare': compare_masks,
           'bench': lambda c: bench(with_teacher(c)),
           'inspect': lambda c: inspect_masks(with_teacher(c)),
           'sample': sample, 'criteria': criteria, 'scaling': scaling}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    sys.stdout.reconfigure(errors='replace')  # for terminals that cannot show every character
    main()
