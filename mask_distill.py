# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""A GPT-2 that attends to few tokens: masks learned by distillation, and what that is worth.

The report (MA: Optimizing Attention Mechanisms in Transformer Models; no author named) replaces the
causal mask of GPT-2, the teacher, with a linear combination of candidate masks, and trains this
student to match its teacher's distributions. It names five criteria, measured here as well.

    the report     what                                                  function
    [MA Sec. 3]    W = sum_k c_k M_k with c_k = sigmoid(alpha_k)         mixture, coefficients
    [MA Sec. 2.1]  KL(P_base || P_custom), mean over tokens              token_kl
    [MA Sec. 2.5]  L1, the sum of the c_k; beside it the budget          penalty
    [MA Sec. 2.4]  accuracy, attention MSE, gradient cosine, KL          CRITERIA, fidelity
    [MA Sec. 2.4]  peak memory of attention, training step, inference    memory

"A linear combination of masks" has three READINGS. Under the default only ratios of the c_k count,
so L1 drives every alpha to minus infinity, as the report saw; a budget acts on c / max c instead.

    python mask_distill.py                                  # train: 3 minutes on a CPU
    python mask_distill.py sample --prompt "def main("      # teacher and student, side by side
    python mask_distill.py criteria                         # that run's five criteria
    python mask_distill.py compare --table masks --seeds 0  # the criteria for ten choices of masks
    python mask_distill.py inspect --table l1               # coefficients in training: L1, budget
    python mask_distill.py scaling --lengths 1024,4096      # memory and time of attention
    python mask_distill.py --preset report004               # the report's experiment

The first ends with 48 % of the pairs kept, 1.005 of the teacher's accuracy, KL 0.0102, gradient
cosine 0.977; 2 of 4 criteria pass (644,224 parameters, one seed, 174 seconds of one CPU thread).

Stage 1 of 2 takes a GPT-2 file as the teacher or trains a small one; stage 2 trains the student.
Where the report is silent the code says [choice].
Lines 1-717 are the report: method, configuration, model, data, training. What follows is tools.
"""
import argparse
import ast
import copy
import csv
import io
import json
import linecache
import math
import os
import signal
import sys
import tempfile
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
from torch.utils.checkpoint import checkpoint
from torch.utils.benchmark import Timer

SCRIPT = 'mask_distill'
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many
STOP = []                                     # signals that came: finish the step, save, stop

def fail(message):
    """Stop with one line on what the user can do about it."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the report's method ------------------------------------
KINDS = {  # term of --masks: may token i attend to j <= i? `reach`: how far windows and offsets go
    # to get `--masks stride:N`, just add a line of your own, say (i - j) % n == 0
    'all': lambda i, j, n, reach: i >= j,
    'window': lambda i, j, n, reach: i - j < n,
    'offset': lambda i, j, n, reach: i - j == n,
    'first': lambda i, j, n, reach: j < n,
    'sinks': lambda i, j, n, reach: (i - j >= reach) & (j < n),  # first tokens, no pair twice
}
NAMED = {  # the report's
    'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4',  # "last token ... 5th last token"
    'windows': 'window:5+window:10+first:5',                  # its previous three
    'first-all': 'first:1+all',                               # its experiment with L1
}

def candidates(masks):
    """'window:64+sinks:4' -> [('window', 64), ('sinks', 4)]."""
    for name, terms in NAMED.items():
        masks = masks.replace(name, terms)
    found = []
    for term in masks.split('+'):
        kind, _, n = term.partition(':')
        n = '1' if term == 'all' else n
        if kind not in KINDS or not n.isdecimal() or (int(n) == 0 and kind != 'offset'):
            fail(f'--masks {masks}: {term!r} is none of {":N, ".join(KINDS)}:N, {", ".join(NAMED)}')
        found.append((kind, int(n)))
    return found

def extent(masks):
    """How far windows and offsets go, at least 1, and how many first tokens are kept as well."""
    def largest(*kinds):
        return max([n for kind, n in candidates(masks) if kind in kinds], default=0)

    return max(largest('window'), largest('offset') + 1), largest('first', 'sinks')

def bounded(masks):
    """Are these only windows, offsets and first tokens, which blocks and a small cache can hold?"""
    return {kind for kind, _ in candidates(masks)} <= {'window', 'offset', 'first', 'sinks'}

def coefficients(alpha):
    """log sigmoid(alpha), (K,). [choice] A mask whose coefficient is below a thousandth of the
    largest is closed: -inf.  [MA Sec. 3]"""
    log_c = F.logsigmoid(alpha)
    return log_c.masked_fill(log_c < log_c.max() + math.log(1e-3), -math.inf)

def own_token(masks, log_c):
    """c / max c (K + 1,). [choice] So that no row is empty, a token may attend to itself: if no
    open mask surely holds that pair, an extra one does, with the largest coefficient."""
    relative = (log_c - log_c.max()).exp()  # (K,)
    sure = [KINDS[kind](10**9, 10**9, n, 1) for kind, n in candidates(masks)]  # of late tokens
    own = relative[sure].sum() == 0
    return torch.cat([relative, own.view(1)])

def hold(masks, i, j):
    """Which masks, the own token's last, hold i (..., Tq), j (..., T)? -> (K + 1, ..., Tq, T)."""
    i, j = i[..., None], j[..., None, :]
    reach, _ = extent(masks)
    return torch.stack([KINDS[kind](i, j, n, reach) & (0 <= j) & (j <= i)
                        for kind, n in candidates(masks) + [('offset', 0)]])

def mixture(c, M):
    """W = sum_k c_k M_k from c (K,), M (K, ..., Tq, T) -> (..., Tq, T).  [MA Sec. 3]"""
    return sum(c_k * m for c_k, m in zip(c, M))

def safe_log(w):
    """log w, and -inf with gradient 0 where w is 0."""
    return w.clamp_min(torch.finfo(w.dtype).tiny).log().masked_fill(w == 0, -math.inf)

def each_softmax(S, M, c):
    """sum_k c_k softmax(S on M_k), where a mask without tokens adds nothing."""
    least = torch.finfo(S.dtype).min
    return sum(c_k * (F.softmax(S.masked_fill(~m, least), -1) * m) for c_k, m in zip(c, M))

READINGS = {  # from scores S (B, nh, Tq, T), masks M (K, Tq, T) and coefficients c (K,)
    'renormalised': lambda S, M, c: F.softmax(S.add_(safe_log(mixture(c, M))), -1),
    'unnormalised': lambda S, M, c: mixture(c, M) * F.softmax(S, -1),
    'separate': each_softmax,
}

def attention_weights(q, k, masks, log_c=None, reading='renormalised', i=None, j=None):
    """q (B, nh, Tq, hs), k (B, nh, T, hs) at positions i, j (default 0, 1, ...) -> (B, nh, Tq, T).
    log_c (K,): logarithms of the masks' coefficients, by default 0."""
    i = torch.arange(q.size(2), device=q.device) if i is None else i
    j = torch.arange(k.size(2), device=q.device) if j is None else j
    log_c = torch.zeros(len(candidates(masks)), device=q.device) if log_c is None else log_c
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (B, nh, Tq, T)
    future = i[..., None] < j[..., None, :]  # (Tq, T)
    if masks == 'all' and reading == 'renormalised':  # plain attention
        return F.softmax(S.masked_fill(future, -math.inf), dim=-1)
    c = own_token(masks, log_c)  # c / max c (K + 1,)
    if reading != 'renormalised':
        S, c = S.masked_fill(future, -math.inf), c * log_c.max().exp()
    return READINGS[reading](S, hold(masks, i, j), c)

def dense_attention(q, k, v, masks='all', log_c=None, reading='renormalised', i=None, j=None):
    """The definition, any masks: O(T^2). q, k, v (B, nh, T, hs) -> (B, nh, T, hs)."""
    return attention_weights(q, k, masks, log_c, reading, i, j).to(v.dtype) @ v

def blocked_attention(q, k, v, masks='window:64', log_c=None, block=0):
    """dense_attention, renormalised, of `bounded` masks, in O(T reach): a block of b queries meets
    the b + reach - 1 keys that its windows can hold, and the first keys."""
    B, nh, T, hs = q.shape
    reach, first = [min(n, T) for n in extent(masks)]
    b = min(block or max(16, min(reach, 128)), T)
    n = -(-T // b)  # blocks
    end = n * b - T  # padding
    i = torch.arange(n * b, device=q.device).view(n, b)
    near = torch.arange(1 - reach, b, device=q.device) + i[:, :1]  # (n, b + reach - 1)
    far = torch.arange(first, device=q.device).repeat(n, 1)
    far = far.masked_fill(far >= near[:, :1], -1)  # in no mask: `near` already has it

    def keys(t):  # (B, nh, T, hs) -> (B, nh, n, b + reach - 1 + first, hs)
        windows = F.pad(t, (0, 0, reach - 1, end)).unfold(2, b + reach - 1, b).mT
        firsts = t[:, :, None, :first].expand(-1, -1, n, -1, -1)
        return torch.cat([windows, firsts], 3)

    queries = F.pad(q, (0, 0, 0, end)).view(B, nh, n, b, hs)
    p = attention_weights(queries, keys(k), masks, log_c, i=i, j=torch.cat([near, far], 1))
    return (p.to(v.dtype) @ keys(v)).view(B, nh, n * b, hs)[:, :, :T]

def expected_pairs(chances, masks, T):
    """Share of T tokens' causal pairs in any mask if each is open with its chance (K + 1,)."""
    i = torch.arange(T, device=chances.device)
    lost = 1.0
    for chance, m in zip(chances, hold(masks, i, i)):
        lost = lost * (1 - chance * m)  # (T, T)
    return (1 - lost).sum() / (T * (T + 1) / 2)

def penalty(alphas, c):
    """L1, the sum of the coefficients of every layer's alpha (K,), plus how far the expected share
    of pairs, with chances c / max c, exceeds the budget.  [MA Sec. 2.5]"""
    total = c.l1 * sum(alpha.sigmoid().sum() for alpha in alphas)
    if c.budget:
        for alpha in alphas:
            chances = own_token(c.masks, F.logsigmoid(alpha))
            excess = expected_pairs(chances, c.masks, c.block_size) - c.budget
            total = total + F.relu(excess - 1e-6) / len(alphas)  # rounding is no excess
    return total

def kept_pairs(alphas, masks, T):
    """Share of the causal pairs of T tokens that open masks hold, mean over layers."""
    opened = [(own_token(masks, coefficients(alpha)) > 0).float() for alpha in alphas]
    return sum(expected_pairs(x, masks, T).item() for x in opened) / len(opened)

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --compile, --no-compile. --help prints this."""
    # the report's method
    masks: str = 'window:32+sinks:4'  # all, window:N, offset:N, first:N, sinks:N, names; join by +
    reading: str = 'renormalised'  # a name in READINGS: what the combination of masks means
    learn: str = 'attention'       # alphas: only those; attention: also c_attn and c_proj
    l1: float = 0.0                # weight of the report's penalty on coefficients
    budget: float = 0.0            # share of the causal pairs to keep; 0: no limit
    alpha_lr: float = 0.03         # learning rate of the alphas
    # teacher and model
    stage: str = 'student'         # set by the script: teacher in stage 1
    init: str = ''                 # teacher: a GPT-2's safetensors file, or a checkpoint of stage 1
    teacher_iters: int = 600       # steps of its training
    teacher_lr: float = 2e-3       # its learning rate at the peak
    n_layer: int = 3               # this and the next three: of a teacher trained here
    n_head: int = 4
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
    log_interval: int = 10         # steps between lines of the log
    max_minutes: float = 0.0       # save and stop a run after this long; 0: never
    fresh: bool = False            # restart a run from scratch, but for the teacher
    out_dir: str = 'out'           # where runs are written
    # actions
    run: str = ''                  # sample, criteria: a run's folder; default: the last one
    prompt: str = ''               # sample: a text to continue; default: the report's seven
    new_tokens: int = 100          # sample
    temperature: float = 0.8       # sample: 0 takes the likeliest token
    lengths: str = '1024'          # criteria, scaling: tokens of the sequences measured
    over: list = ()                # compare, bench, inspect: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench, inspect: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(f'--{name} {getattr(self, name)}: choose from {", ".join(allowed)}')
        candidates(self.masks)
        if self.n_embd % self.n_head:
            fail(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head}')
        if not 0 <= self.budget <= 1:
            fail(f'--budget {self.budget:g} must be a share of the pairs, from 0 to 1')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')

    @property
    def variant(self):
        masks = self.masks.replace(':', '').replace('+', '-')
        return 'teacher' if self.stage == 'teacher' else f'{masks}-{self.reading}-{self.learn}'

    @property
    def units_per_step(self):
        return self.batch_size * self.grad_accum_steps * self.block_size

T4 = dict(data='wikitext-2', block_size=256, n_layer=6, n_head=6, n_embd=384, teacher_iters=3000,
          teacher_lr=1e-3, learning_rate=1e-4, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(T4, masks='window:96+sinks:4', max_iters=600, eval_interval=100),
    # [choice] batch, rates, weight of L1; and trained attention: the report's loss drop needs it
    'report004': dict(T4, masks='last5', l1=1e-3, block_size=512, samples=1000, batch_size=8,
                      max_iters=12500, eval_interval=250),  # 100 epochs of 125 steps
}
WIDTHS = 'last5 windows window:16+sinks:4 window:32+sinks:4 window:64 window:64+sinks:4'.split()
TABLES = {  # rows for `compare --table NAME` and `inspect --table NAME`
    'masks': {
        **{masks: dict(masks=masks) for masks in WIDTHS},
        'last5, alphas': dict(masks='last5', learn='alphas'),
        'last5, mask only': dict(masks='last5', learn='alphas', max_iters=0),
        '64+4, alphas': dict(masks='window:64+sinks:4', learn='alphas'),
        '64+4, mask only': dict(masks='window:64+sinks:4', learn='alphas', max_iters=0)},
    'l1': {'nothing': dict(masks='first-all', learn='alphas'),
           'L1': dict(masks='first-all', learn='alphas', l1=0.1),
           'budget': dict(masks='first-all', learn='alphas', budget=1.0)},
}
CHOICES = {
    'reading': READINGS, 'learn': ('alphas', 'attention'), 'stage': ('teacher', 'student'),
    'tokenizer': ('bytes', 'gpt2'), 'schedule': ('cosine', 'trapezoid', 'step', 'constant'),
    'table': ('', *TABLES), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

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
        self.n_head = c.n_head
        self.fused, self.masks, self.reading = True, 'all', 'renormalised'
        self.c_attn = Conv1D(c.n_embd, 3 * c.n_embd)
        self.c_proj = Conv1D(c.n_embd, c.n_embd)
        self.alpha = None

    def attend(self, q, k, v, i, j, watch=None):
        """q, k, v (B, nh, T, hs), positions i of queries and j of keys -> (B, nh, Tq, hs)."""
        log_c = None if self.alpha is None else coefficients(self.alpha)
        if watch is not None:
            with torch.no_grad():
                watch.append(attention_weights(q, k, self.masks, log_c, self.reading, i, j))
        if self.fused and len(i) in (1, len(j)):  # the newest token alone, or all of them
            return F.scaled_dot_product_attention(q, k, v, is_causal=len(i) > 1)
        if self.reading == 'renormalised' and bounded(self.masks) and len(i) == len(j):
            return blocked_attention(q, k, v, self.masks, log_c)
        return dense_attention(q, k, v, self.masks, log_c, self.reading, i, j)

    def forward(self, x, cache=None, watch=None):
        """x (B, T, C) -> like x."""
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        past = cache['past'] if cache else 0
        i = j = torch.arange(past, past + x.size(1), device=x.device)
        if cache:
            k, v = torch.cat([cache['k'], k], 2), torch.cat([cache['v'], v], 2)
            j = torch.cat([cache['j'], i])
        y = self.attend(q, k, v, i, j, watch)  # (B, nh, T, hs)
        if cache is not None:  # even if still empty
            if bounded(self.masks) and self.reading != 'unnormalised':  # whose softmax needs all
                reach, first = extent(self.masks)
                stays = (j < first) | (j > j[-1] + 1 - reach)  # what later tokens may attend to
                k, v, j = k[:, :, stays], v[:, :, stays], j[stays]
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

    def forward(self, x, cache=None, watch=None):
        x = x + self.attn(self.ln_1(x), cache, watch)
        return x + self.mlp(self.ln_2(x))

class GPT2(nn.Module):
    """GPT-2 with the keys of its published files; block_size is the number of its positions."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
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

    def forward(self, idx, cache=None, watch=None, logits=True):
        """idx (B, T) -> logits (B, T, V), or the features (B, T, C) that they come from. cache: one
        dict per layer; watch: a list that gets every layer's attention weights (B, nh, T, T)."""
        past = cache[0].get('past', 0) if cache else 0
        x = self.wte(idx) + self.wpe(torch.arange(past, past + idx.size(1), device=idx.device))
        for block, layer in zip(self.h, cache or [None] * len(self.h)):
            x = block(x, layer, watch)
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight) if logits else x

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
            logits = self(new, cache)[:, -1].float()  # (B, V)
            new = logits.argmax(-1, keepdim=True)  # (B, 1)
            if temperature:
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat([idx, new], dim=1)
        return idx, sum(layer['k'].nbytes + layer['v'].nbytes for layer in cache)

def substitute(teacher, c):
    """A copy of the teacher whose attention has masks. Only what --learn says is trained."""
    model = copy.deepcopy(teacher)
    model.config = c
    for block in model.h:
        block.attn.fused, block.attn.masks, block.attn.reading = False, c.masks, c.reading
        block.attn.alpha = nn.Parameter(torch.zeros(len(candidates(c.masks))))
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
        train = [text for i, text in enumerate(texts) if i % 10 < 9]
        return ''.join(train), ''.join(texts[9::10])
    if not Path(c.data).is_file():
        fail(f'--data {c.data}: no such file; python prepare_data.py lists what there is')
    text = Path(c.data).read_text('utf-8-sig', errors='replace')
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]

def get_tokenizer(name):
    """`bytes`, 256 tokens, no files, or `gpt2`, which tiktoken fetches once."""
    import tiktoken
    if name == 'gpt2':
        return tiktoken.get_encoding('gpt2')
    return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},
                             mergeable_ranks={bytes([i]): i for i in range(256)})

def load_data(c):
    """train, val (uint16 tokens), starts of validation windows, and in stage 2 --init's teacher."""
    folder, tokenizer = Path('data', c.data), c.tokenizer
    if folder.is_dir():  # nanoGPT's format, as prepare_data.py writes it
        tokenizer = json.loads((folder / 'meta.json').read_text('utf-8'))['tokenizer']
        train, val = [np.memmap(folder / f, np.uint16, 'r') for f in ('train.bin', 'val.bin')]
    else:
        encode = get_tokenizer(tokenizer).encode_ordinary
        train, val = [np.array(encode(text), dtype=np.uint16) for text in read_text(c)]
    V = dict(bytes=256, gpt2=50257)[tokenizer]
    if min(len(train), len(val)) <= c.block_size + 1:
        fail(f'--data {c.data} does not fill a window of --block-size {c.block_size}')
    starts = np.linspace(0, len(val) - c.block_size - 1, c.eval_rows).astype(np.int64)
    data = SimpleNamespace(
        train=train, val=val, tokenizer=tokenizer, vocab_size=V, val_starts=np.unique(starts),
        teacher=None, about=f'{c.data}, {len(train):,} tokens ({tokenizer})')
    if c.stage == 'student':
        data.teacher = load_teacher(c)
        data.about += f'\nteacher {c.init}'
        t = data.teacher.config
        fits = V <= t.vocab_size < V + 128  # 50257, or 50304 where a file is padded
        if not fits or t.block_size < c.block_size:
            fail(f'--init {c.init} has {t.vocab_size} tokens and {t.block_size} positions; the '
                 f'data need {V}, --block-size {c.block_size}')
    return data

def windows(tokens, starts, c, device):
    """The tokens from each start on, and the same one step later: two of (B, T), int64."""
    x = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    x = torch.from_numpy(x).to(device)
    return x[:, :-1], x[:, 1:]

# ------------------------------------ training ------------------------------------
METRIC = 'val_loss'   # best.pt and `compare --best` go by this validation figure:
BETTER = min          # lower is better
RESULTS = ['kl', 'accuracy', 'mse', 'cosine', 'kept']  # what `compare` tabulates
LOGITS = 2 ** 25      # held at once for one distribution: 128 MB in float32
UNIT = 'tokens'       # what c.units_per_step counts

def make_model(c, data):
    """A new teacher or, in stage 2, the teacher with masks; its config has what the data decide."""
    if c.stage == 'teacher':
        return GPT2(replace(c, vocab_size=c.vocab_size or data.vocab_size))
    if not data:
        return substitute(load_teacher(c), c)
    t = data.teacher.config
    c = replace(c, n_layer=t.n_layer, n_head=t.n_head, n_embd=t.n_embd, tokenizer=data.tokenizer)
    return substitute(data.teacher, replace(c, vocab_size=t.vocab_size))

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
    """This process's rows of micro-batch `micro`, from seed and step alone, and the teacher."""
    n = len(data.train) - c.block_size
    size = c.grad_accum_steps, c.batch_size
    starts = stream('batch', c.seed, step).integers(c.samples or n, size=size)
    if c.samples:  # of these windows, the same ones in every step
        starts = stream('samples', c.seed).integers(n, size=c.samples)[starts]
    x, y = windows(data.train, starts[micro, RANK::WORLD], c, device)
    return x, y, data.teacher

def token_kl(x, y, weight):
    """KL(teacher || student) in nats, from features y and x (B, T, C) with the same output weights
    (V, C) -> (B T,). The backward pass recomputes the logits.  [MA Sec. 2.1]"""
    def chunk(x, y):  # GPT-2's logits are near -100, where bfloat16 rounds to halves: a KL of 5e-3
        with torch.autocast(x.device.type, enabled=False):
            p = F.log_softmax(F.linear(y.float(), weight.float()), dim=-1)  # (rows, V)
            q = F.log_softmax(F.linear(x.float(), weight.float()), dim=-1)
        return (p.exp() * (p - q)).sum(-1)

    rows = max(1, LOGITS // len(weight))
    pieces = zip(x.flatten(0, 1).split(rows), y.flatten(0, 1).split(rows))
    return torch.cat([checkpoint(chunk, *piece, use_reentrant=False) for piece in pieces])

def text_loss(model, x, y, teacher):
    """Nats per token of x (B, T), a mean where the report has a sum: without a teacher, in stage 1,
    cross-entropy with y (B, T); in stage 2, KL."""
    if teacher is None:
        return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
    with torch.no_grad():
        features = teacher(x, logits=False)  # (B, T, C)
    return token_kl(model(x, logits=False), features, teacher.wte.weight).mean()

def loss_of(model, batch, c):
    loss = text_loss(model, *batch)
    return loss if c.stage == 'teacher' else loss + penalty(model.alphas(), c)

def validation(data, rows, c, device):
    """The same windows every time, `rows` at a time."""
    for i in range(0, len(data.val_starts), rows):
        yield windows(data.val, data.val_starts[i:i + rows], c, device)

@torch.no_grad()
def evaluate(model, data, c, device):
    """The loss without penalty, and the share of the pairs that is kept."""
    total = 0.0
    for x, y in validation(data, c.batch_size, c, device):
        total += text_loss(model, x, y, data.teacher).item() * len(x)
    figures = dict(val_loss=max(0.0, total / len(data.val_starts)))
    if data.teacher:
        figures['kept'] = kept_pairs(model.alphas(), c.masks, c.block_size)
    return figures

def finish(model, data, c, device, folder):
    """The report's criteria except memory, once a student is trained."""
    if c.stage == 'teacher':
        return {}
    rows = max(1, min(c.batch_size, LOGITS // (c.block_size * model.config.vocab_size)))
    return fidelity(model, data.teacher, validation(data, rows, c, device))

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
DTYPES = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}

def read_header(path):
    """A safetensors file -> its json header, sized by the first 8 bytes, and the bytes after it."""
    file = np.memmap(path, np.uint8, 'r')
    n = int.from_bytes(file[:8].tobytes(), 'little')
    return json.loads(file[8:8 + n].tobytes()), file[8 + n:]

def read_safetensors(path):
    """A safetensors file -> {name: tensor}."""
    header, data = read_header(path)
    data = torch.from_numpy(np.array(data))  # a copy, so it is aligned
    header.pop('__metadata__', None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry['data_offsets']
        tensors[name] = data[begin:end].view(DTYPES[entry['dtype']]).view(entry['shape'])
    return tensors

def load_gpt2(path):
    """A safetensors file of a GPT-2 of any size, from the hub or from transformers, which puts
    "transformer." before the keys -> GPT2. Heads are 64 wide unless the metadata have n_head."""
    dropped = ('.attn.bias', '.attn.masked_bias', 'lm_head.weight')  # masks, and a copy of wte
    try:
        state = {key.removeprefix('transformer.'): tensor.float()
                 for key, tensor in read_safetensors(path).items() if not key.endswith(dropped)}
        V, C = state['wte.weight'].shape
        n_head = int(read_header(path)[0].get('__metadata__', {}).get('n_head', C // 64 or 1))
        model = GPT2(Config(n_head=n_head, n_embd=C, vocab_size=V,
                            n_layer=sum(key.endswith('.ln_1.weight') for key in state),
                            block_size=len(state['wpe.weight'])))
        model.load_state_dict(state)
        return model
    except Exception as error:  # a damaged file raises half a dozen kinds
        fail(f'{path} is no GPT-2 in safetensors: {" ".join(str(error).split())[:200]}')

def load_teacher(c):
    """--init, a safetensors file or a checkpoint of stage 1 -> GPT2, frozen."""
    if c.init.endswith('.pt'):
        saved = load_checkpoint(c.init)
        if saved['config']['stage'] != 'teacher':
            fail(f'--init {c.init} is a student: name its teacher')
        model = GPT2(Config(**saved['config']))
        model.load_state_dict(saved['model'])
    else:
        model = load_gpt2(c.init)
    return model.requires_grad_(False).eval().to(pick_device(c)[0])

CRITERIA = {  # what the report wants of a student  [MA Sec. 2.4]
    'accuracy': 0.95,  # at least: its next-token accuracy / the teacher's
    'cosine': 0.95,    # at least: between both gradients for all c_attn and c_proj, as one vector
    'mse': 1e-4,       # at most: mean (P - P')^2 over layers, heads and, by [choice], pairs j <= i
    'kl': 1e-3,        # at most: KL(teacher || student) in nats, mean over tokens
}

def passes(name, value):
    least = name in ('accuracy', 'cosine')
    return value >= CRITERIA[name] if least else value <= CRITERIA[name]

def look(model, x, y):
    """Log-probabilities (N, V) at the N targets y that are not -1, every layer's attention weights
    (B, nh, T, T), and the gradient of the summed cross-entropy for all parameters of attention."""
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()
              if '.attn.c_' in name}
    maps = []
    logits = torch.func.functional_call(model, params, x, dict(watch=maps))
    logs = F.log_softmax(logits.float(), dim=-1)[y >= 0]
    loss = F.nll_loss(logs, y[y >= 0], reduction='sum')
    gradient = torch.autograd.grad(loss, list(params.values()))
    return logs.detach(), maps, torch.cat([g.flatten() for g in gradient])

def fidelity(model, teacher, batches):
    """How close a student is to its teacher on batches of (x, y), both (B, T); y = -1 is padding
    and never counts.  [MA Sec. 2.4]"""
    sums = {}
    for x, y in batches:
        real = y >= 0  # (B, T)
        target = y[real]  # (N,)
        p, P, g = look(teacher, x, y)
        q, Q, h = look(model, x, y)
        gaps = torch.stack([(a - b).float().transpose(1, 2)[real] for a, b in zip(P, Q)])
        figures = dict(  # gaps (layers, N, nh, T)
            tokens=len(target), pairs=(real.nonzero()[:, 1] + 1).sum(), squares=gaps.square().sum(),
            kl=(p.exp() * (p - q)).sum(), gradients=torch.stack([g, h]),
            teacher=(p.argmax(-1) == target).sum(), student=(q.argmax(-1) == target).sum())
        for name, value in figures.items():
            sums[name] = sums.get(name, 0) + value
    s = SimpleNamespace(**sums)
    heads = len(gaps) * gaps.size(2)  # in all layers
    figures = dict(
        kl=(s.kl / s.tokens).clamp_min(0), accuracy=s.student / s.teacher.clamp_min(1),
        mse=s.squares / s.pairs / heads, cosine=F.cosine_similarity(*s.gradients, dim=0))
    figures = {name: value.item() for name, value in figures.items()}
    figures['passed'] = sum(passes(name, figures[name]) for name in CRITERIA)
    figures['kept'] = kept_pairs(model.alphas(), model.config.masks, x.size(1))
    return figures

TEACHER = ('seed', 'block_size', 'data', 'tokenizer', 'n_layer', 'n_head', 'n_embd', 'vocab_size',
           'teacher_iters', 'teacher_lr', 'weight_decay')  # what makes another teacher: not code

def with_teacher(c):
    """Stage 1 of 2 -> c with its teacher: the one named, a prepared GPT-2, or one trained here."""
    for spec in c.over:
        if spec.partition('=')[0] in TEACHER[3:]:  # seed, block_size and data may vary
            fail(f'--over {spec}: all cases share one teacher; --over init=A,B compares two')
    if c.init:
        return c
    rows = math.lcm(16, WORLD)  # windows of a step, whatever --batch-size: one teacher for all
    batch_size = math.gcd(rows, c.batch_size)
    t = replace(c, stage='teacher', batch_size=batch_size, grad_accum_steps=rows // batch_size,
                max_iters=c.teacher_iters, learning_rate=c.teacher_lr, min_lr=0.1, samples=0,
                schedule='cosine', warmup_iters=100, grad_clip=1.0, fresh=False)
    gpt2 = 'data/weights/gpt2/model.safetensors'
    if os.path.exists(gpt2) and load_data(t).tokenizer == 'gpt2':
        return replace(c, init=gpt2)
    size = os.path.getsize(c.data) if os.path.isfile(c.data) else 0
    mark = zlib.crc32(repr([getattr(c, name) for name in TEACHER] + [size]).encode())
    folder = Path(c.out_dir, SCRIPT, f'teacher-s{c.seed}-{mark:08x}')
    print('stage 1 of 2: the teacher')
    for step, model, log in train(t, folder):
        pass
    if step < t.max_iters:
        print('stopped; the same command goes on')
        raise SystemExit(128 + STOP[0] if STOP else 0)
    if WORLD > 1:
        dist.barrier()  # the first process writes the checkpoint, all read it
    print('stage 2 of 2: the student')
    return replace(c, init=str(folder / 'ckpt.pt'))

def peak(f, device):
    """The most bytes that f() holds at once, by CUDA's counter or the CPU profiler's trace."""
    if device.type == 'cuda':
        f()  # so that cuBLAS has its workspace
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ['KINETO_LOG_LEVEL'] = '99'  # some builds of the profiler talk
    with torch.profiler.profile(profile_memory=True) as profile:
        f()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f'{folder}/trace.json')
        events = json.loads(Path(folder, 'trace.json').read_text())['traceEvents']
    events = sorted((e['ts'], e['args']['Bytes']) for e in events if e['name'] == '[memory]')
    return max(np.cumsum([size for _, size in events]))

def memory(c, T, device):
    """Peak memory of attention alone, and of a model with its (random) parameters, for a sequence
    of T tokens in float32; also attention's time -> {way: {what: figure}}.  [MA Sec. 2.4]"""
    model = GPT2(replace(c, block_size=T)).to(device)
    held = sum(p.nbytes for p in model.parameters())
    i = torch.arange(T, device=device)
    idx = i[None] % c.vocab_size  # (1, T)
    shape = (1, c.n_head, T, c.n_embd // c.n_head)
    q, k, v = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]

    def alone():
        torch.autograd.grad(model.h[0].attn.attend(q, k, v, i, i).sum(), (q, k, v))

    def step():
        text_loss(model, idx, idx, None).backward()
        model.zero_grad()

    def infer():
        with torch.no_grad():
            F.linear(model(idx, logits=False)[:, -1:], model.wte.weight)

    timer = Timer('f()', globals=dict(f=alone), num_threads=torch.get_num_threads())
    rows = {}
    for way, masks, reading in (('eager', 'all', 'renormalised'), ('sdpa', 'all', 'renormalised'),
                                ('masks', c.masks, c.reading)):
        for block in model.h:
            block.attn.fused, block.attn.masks, block.attn.reading = way == 'sdpa', masks, reading
        rows[way] = {'attention, MiB': peak(alone, device) / 2**20,
                     'training step, MiB': (peak(step, device) + held) / 2**20,
                     'inference, MiB': (peak(infer, device) + held) / 2**20,
                     'attention, ms': 1000 * timer.timeit(3).mean}
    print(f'\n{T:5} tokens{"":15}eager{"":6}sdpa{"":5}masks   30 % of the memory saved?')
    for name in rows['eager']:
        eager, sdpa, masks = [row[name] for row in rows.values()]
        saved = 1 - masks / eager
        verdict = '' if 'ms' in name else ', PASS' if saved >= 0.3 else ', FAIL'
        print(f'{name:20}{eager:10.1f}{sdpa:10.1f}{masks:10.1f}{saved:8.0%} less{verdict}')
    return rows

def scaling(c):
    """Memory and time of a model with the sizes that the flags say -> {length: figures}."""
    c = replace(c, vocab_size=c.vocab_size or 256)
    return {T: memory(c, T, pick_device(c)[0]) for T in map(int, c.lengths.split(','))}

PROMPTS = [  # the report's
    'Hello, my name is', 'The meaning of life is', 'In a shocking turn of events,',
    'The future of artificial intelligence',
    'In the year 2157, humanity had finally perfected interstellar travel. The first colony ship, '
    'brimming with hope and thousands of eager settlers',
    'The scientist stared at the glowing vial on the laboratory table, her fingers trembling with '
    'anticipation. After years of relentless experimentation',
    'The detective pushed open the heavy oak door, stepping into a room thick with the scent of '
    'old books and something more sinister—fear']

def side_by_side(c, model, teacher, prompts):
    """Print how both continue, from the same seed -> [(prompt, teacher's text, student's text)]."""
    encoding = get_tokenizer(model.config.tokenizer)
    device = model.wte.weight.device
    found = [[prompt] for prompt in prompts]
    for texts in found:
        idx = torch.tensor([encoding.encode_ordinary(texts[0])], device=device)  # (1, T)
        for name, net in (('teacher', teacher), ('student', model)):
            torch.manual_seed(c.seed)
            out, size = net.generate(idx, c.new_tokens, c.temperature)
            texts.append(encoding.decode([t for t in out[0].tolist() if t < encoding.n_vocab]))
            print(f'\n{name}, with a cache of {size:,} bytes: {texts[-1]}')
    return found

def report(c, model, log):
    """Print the criteria, of the masks alone and after training, and two samples -> figures."""
    device, _ = pick_device(c)
    data = load_data(c)
    untrained = substitute(data.teacher, model.config).to(device)
    rows = {}
    print('the report wants' + ''.join(f'{name:>9} {x:<7g}' for name, x in CRITERIA.items()))
    for case, net in (('mask only', untrained), ('trained', model)):
        rows[case] = figures = finish(net.eval(), data, c, device, None)
        words = [f'{figures[name]:#.3g} ' + ('PASS' if passes(name, figures[name]) else 'FAIL')
                 for name in CRITERIA]
        print(f'{case:14}' + ''.join(f'{word:>17}' for word in words))
    advice = '' if figures['passed'] == 4 else (
        '; at the defaults, --masks window:96+sinks:4 keeps 95 % and passes all')
    print(f'result  {figures["kept"]:.0%} of the pairs give {figures["accuracy"]:.3f} of the '
          f'accuracy; {figures["passed"]} of 4 criteria pass{advice}')
    side_by_side(c, model, data.teacher, PROMPTS[:2])
    return rows

def criteria(c):
    """All five criteria of a run that is done."""
    c, model = load_run(c)
    return dict(report(c, model, []), memory=scaling(model.config))

def sample(c):
    """Teacher and student continue --prompt, or the report's seven prompts."""
    c, model = load_run(c)
    return side_by_side(c, model, load_teacher(c), [c.prompt] if c.prompt else PROMPTS)

def inspect_masks(c):
    """Train, and watch the coefficients of every layer; with --table or --over, of each case."""
    found = {}
    for name, case in (cases_of(c) if c.over or c.table else {c.variant: c}).items():
        print(f'\n{name}')
        masks = [f'{kind}:{n}' for kind, n in candidates(case.masks)]
        found[name] = rows = []
        for step, model, log in train(case):
            if step % c.eval_interval == 0 or step == case.max_iters:
                for layer, alpha in enumerate(model.alphas()):
                    c_k = dict(zip(masks, alpha.sigmoid().tolist()))
                    rows.append(dict(step=step, layer=layer, **c_k))
        depth = len(model.h)
        for row in rows[-depth:]:
            print(f'coefficients in layer {row["layer"]}: {show(row)}')
        folder = run_folder(case, 'inspect-')
        write_csv(folder / 'inspect.csv', rows)
        layers = {f'layer {i}': [rows[i::depth]] for i in range(depth)}
        draw(folder / 'inspect.png', layers, [('step', mask) for mask in masks])
    return found

ACTIONS = {'train': lambda c: train_and_report(with_teacher(c)),
           'compare': lambda c: compare(with_teacher(c)), 'bench': lambda c: bench(with_teacher(c)),
           'inspect': lambda c: inspect_masks(with_teacher(c)),
           'sample': sample, 'criteria': criteria, 'scaling': scaling}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
