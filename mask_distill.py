# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""A GPT-2 that attends to few tokens: masks learned by distillation, and what that is worth.

The report (Optimizing Attention Mechanisms in Transformer Models) replaces the causal mask of GPT-2
by a linear combination of candidate masks with coefficients c_k = sigmoid(alpha_k), and trains
the new model to give the old one's distributions. It names five criteria of success and measures
none but the loss. This script does the same with any masks, and measures all five.

    MA   the report; its sections in order, 2.4 being Measure of Success

    section          what                                                 function
    [MA Sec. 3]      W = sum_k c_k M_k with c_k = sigmoid(alpha_k)        mixture, coefficients
    [MA Sec. 2.1]    L = KL(P_base || P_custom)                           token_kl
    [MA Sec. 2.5]    L1, the sum of the c_k; beside it the budget         penalty
    [MA Sec. 2.4]    accuracy, attention MSE, gradient cosine, KL         fidelity
    [MA Sec. 2.4]    peak memory in training, inference, attention alone  memory

"A linear combination of masks" can be read in more than one way, and the text fits several:
--reading renormalised (default)  P = softmax(S + log W)             only ratios of the c_k count
--reading unnormalised            P = W o softmax(S)                 rows add up to less than 1
--reading separate                P = sum_k c_k softmax(S on M_k)    single tokens: no softmax left
Under the first, c -> t c changes nothing, so an L1 penalty finds no optimum and drives every alpha
to minus infinity, as the report saw. The budget acts on c / max c, which such a step leaves alone.

    python mask_distill.py                                   # train: 3-4 minutes on a CPU
    python mask_distill.py sample --prompt "def main("       # teacher and student, side by side
    python mask_distill.py report                            # the five criteria
    python mask_distill.py report --table masks              # for every row of the table
    python mask_distill.py inspect --table l1                # coefficients in training: L1, budget
    python mask_distill.py scaling --lengths 1024,4096       # memory and time of attention
    python mask_distill.py teacher --save teacher.safetensors    # train and publish a teacher
    python prepare_data.py gpt2 && python prepare_data.py wikitext-2
    python mask_distill.py --preset report004                # the report's experiment on GPT-2

The teacher is GPT-2, read from the bytes of its safetensors file, or a small one that is trained on
the spot. Where the report is silent the code says [choice]. What was measured, and on what,
stands in README.md.
"""
import argparse, contextlib, copy, csv, functools, hashlib, inspect, itertools, json, math, os, re
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
    # the report's method
    masks: str = 'window:32+sinks:4'  # terms joined by +: all, window:N, offset:N, first:N, sinks:N
    reading: str = 'renormalised'  # x in READINGS: what the linear combination of masks means
    per_head: bool = False         # coefficients for every head, not only for every layer
    train: str = 'attention'       # x in ('alphas', 'attention'): alone, or with c_attn, c_proj
    l1: float = 0.0                # 0 <= x < 1e6: weight of the report's penalty on coefficients
    budget: float = 0.0            # 0 <= x <= 1: share of the causal pairs to keep; 0 for any
    budget_weight: float = 1.0     # 0 <= x < 1e6: nats for each whole share above the budget
    alpha_lr: float = 0.03         # 0 <= x <= 100: learning rate of the alphas
    execution: str = 'auto'        # x in ('auto', 'dense', 'blocked'): auto is blocked if possible
    # teacher
    init: str = ''                 # safetensors file; default: prepared GPT-2, or one trained here
    n_layer: int = 3               # x >= 1: blocks of a teacher trained here
    n_head: int = 4                # x >= 1: heads in a block
    n_embd: int = 128              # x >= 1: channels
    block_size: int = 128          # x >= 2: tokens in a window
    vocab_size: int = 0            # x == 0 or 2 <= x <= 65536: tokens; 0 for the data's own
    teacher_iters: int = 600       # x >= 0: steps of its training
    teacher_lr: float = 2e-3       # 0 < x <= 100: its learning rate at the peak
    teacher: str = ''              # checksum of its weights: set by the run, not by hand
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = ''            # x in ('', 'bytes', 'gpt2'): of text files; default: bytes
    samples: int = 0               # 0 <= x <= 1e9: windows to distil on; 0 for all the text
    # training
    max_iters: int = 150           # x >= 0: optimiser steps
    batch_size: int = 16           # 1 <= x <= 1e6: windows in memory at once, per process
    grad_accum_steps: int = 1      # 1 <= x <= 1e6: batches in an optimiser step, over all processes
    learning_rate: float = 5e-4    # 0 < x <= 100: of the attention's weights, at its peak
    min_lr: float = 5e-5           # 0 <= x <= 100: where the cosine ends, below that peak
    schedule: str = 'cosine'       # x in ('cosine', 'trapezoid', 'step', 'constant'): after warmup
    warmup_iters: int = 20         # x >= 0: steps of linear warmup
    warmdown_iters: int = 0        # x >= 0: last steps, down to 0 (trapezoid) or at 0.1 (step)
    weight_decay: float = 0.1      # 0 <= x <= 100: AdamW's, on matrices of a teacher trained here
    beta1: float = 0.9             # 0 <= x < 1: AdamW's first moment
    beta2: float = 0.99            # 0 <= x < 1: AdamW's second moment
    grad_clip: float = 1.0         # 0 <= x < 1e9: largest gradient norm; 0 for no clipping
    eval_interval: int = 50        # x >= 1: steps between evaluations, and between checkpoints
    eval_rows: int = 64            # 1 <= x <= 1e6: validation windows, the same ones every time
    log_interval: int = 10         # x >= 1: steps between lines in log.csv
    max_minutes: float = 0.0       # 0 <= x < 1e9: save and stop a run after so long; 0: never
    # machine
    seed: int = 1337               # 0 <= x < 2**32: of weights and batches
    device: str = 'auto'           # x.startswith(('auto', 'cpu', 'cuda', 'mps')): say cuda:1
    dtype: str = 'auto'            # x in ('auto', 'float32', 'bfloat16', 'float16'): of matmuls
    compile: bool = False          # torch.compile the model
    threads: int = 1               # 0 <= x <= 1024: CPU threads; 0 for PyTorch's default
    out_dir: str = 'out'           # where runs are written

    def __post_init__(self):
        check(self)
        candidates(self.masks)
        if self.n_embd % self.n_head:
            raise ValueError(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head}')
        if self.execution == 'blocked' and self.how == 'dense':
            raise ValueError('--execution blocked wants --reading renormalised and masks other than'
                             f' all, not {self.reading} {self.masks}')

    @property
    def how(self):
        """The execution: blocked where that is possible and not ruled out."""
        possible = self.reading == 'renormalised' and bounded(self.masks)
        return 'blocked' if possible and self.execution != 'dense' else 'dense'

    @property
    def variant(self):
        name = re.sub('[^a-z0-9]+', '-', self.masks)
        extra = f'-l1-{self.l1:g}' * (self.l1 > 0) + f'-budget-{self.budget:g}' * (self.budget > 0)
        return f'{name}-{self.reading[:3]}-{self.train}{extra}'

T4 = dict(data='wikitext-2', block_size=256, n_layer=6, n_head=6, n_embd=384, teacher_iters=3000,
          teacher_lr=1e-3, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(T4, masks='window:96+sinks:4', max_iters=600, learning_rate=1e-4, min_lr=1e-5,
               eval_interval=100),
    # 1,000 samples of up to 512 tokens, 100 epochs, five masks, L1: the report says no more, and
    # trained attention is what its fall from 2.14 to 0.40 needs. [choice] batch, rates, weight
    'report004': dict(T4, masks='last5', l1=1e-3, block_size=512, samples=1000, batch_size=8,
                      max_iters=12500, learning_rate=1e-4, min_lr=1e-5, eval_interval=250),
}
TABLES = {  # `compare --table NAME`, or `report`: rows of settings, the report's among them
    'masks': {'last5': dict(masks='last5'),
              'last5, alphas': dict(masks='last5', train='alphas'),
              'last5, mask only': dict(masks='last5', train='alphas', max_iters=0),
              'windows': dict(masks='windows'),
              'window:16+sinks:4': dict(masks='window:16+sinks:4'),
              'window:32+sinks:4': dict(masks='window:32+sinks:4'),
              'window:64': dict(masks='window:64'),
              'window:64+sinks:4': dict(masks='window:64+sinks:4'),
              'window:64+sinks:4, alphas': dict(masks='window:64+sinks:4', train='alphas'),
              'window:64+sinks:4, mask only': dict(masks='window:64+sinks:4', train='alphas',
                                                   max_iters=0)},
    'readings': {name: dict(masks='last5', reading=name)
                 for name in ('renormalised', 'unnormalised', 'separate')},
    'l1': {'nothing': dict(masks='first-all', train='alphas'),
           'L1': dict(masks='first-all', train='alphas', l1=0.1),
           'budget': dict(masks='first-all', train='alphas', budget=1.0)},
}

# ------------------------------------ the report's method ------------------------------------
# Scores S = Q K^T / sqrt(hs); W of a pair of tokens is the sum of the c_k whose masks hold it.

KINDS = {  # term: may token i attend to j <= i, `reach` being where the windows of the sum end?
    # a line of your own is all that `--masks stride:N` takes, say (i - j) % n == 0
    'all': lambda i, j, n, reach: i >= j,
    'window': lambda i, j, n, reach: i - j < n,
    'offset': lambda i, j, n, reach: i - j == n,
    'first': lambda i, j, n, reach: j < n,
    'sinks': lambda i, j, n, reach: (i - j >= reach) & (j < n),  # first tokens, no pair twice
}
NAMED = {  # the report's
    'last5': '+'.join(f'offset:{n}' for n in range(5)),     # "last token ... 5th last token"
    'windows': 'window:5+window:10+first:5',                # its previous three
    'first-all': 'first:1+all',                             # its experiment with L1
}

@functools.cache
def candidates(masks):
    """'window:64+sinks:4' -> [('window', 64), ('sinks', 4)].  ValueError names a bad term."""
    terms = []
    for term in '+'.join(NAMED.get(t, t) for t in masks.split('+')).split('+'):
        kind, _, n = term.partition(':')
        if kind not in KINDS or not re.fullmatch('' if kind == 'all' else r'\d{1,6}', n) or (
                kind not in ('all', 'offset') and int(n) < 1):
            known = [f'{name}:N' if name != 'all' else name for name in KINDS]
            raise ValueError(f'--masks {masks}: {term!r} is none of {", ".join([*known, *NAMED])}')
        terms.append((kind, int(n or 0)))
    return terms

def extent(masks):
    """Where windows and offsets end, at least 1, and how many first tokens are kept besides."""
    ends = {'window': 0, 'offset': 1}
    reach = max([n + ends[kind] for kind, n in candidates(masks) if kind in ends], default=1)
    return reach, max([n for kind, n in candidates(masks) if kind in ('first', 'sinks')], default=0)

def bounded(masks):
    """Are they windows, offsets and first tokens alone, which blocks and a small cache can hold?"""
    return {kind for kind, _ in candidates(masks)} <= {'window', 'offset', 'first', 'sinks'}

def own_token(masks, log_c):
    """c / max c (nh, K + 1), every token sure to attend to itself, so that no row is empty.

    [choice] Where no open mask holds the own token, one more does, with the largest coefficient.
    A closed mask has log c = -inf; only the ratios of a row's coefficients reach the result.
    """
    relative = (log_c - log_c.amax(1, keepdim=True)).exp()                  # (nh, K)
    late = 10 ** 6  # past all that are first tokens
    own = sum((relative[:, k:k + 1] for k, (kind, n) in enumerate(candidates(masks))
               if KINDS[kind](late, late, n, 1)), torch.zeros_like(relative[:, :1]))
    return torch.cat([relative, (own == 0).to(relative.dtype)], 1)

def hold(masks, i, j):
    """Do the masks, the own token's last, hold the pairs of queries i (..., Tq), keys j (..., T)?
    -> (K + 1, ..., Tq, T)."""
    i, j, reach = i[..., None], j[..., None, :], extent(masks)[0]
    return torch.stack([KINDS[kind](i, j, n, reach) & (0 <= j) & (j <= i)
                        for kind, n in [*candidates(masks), ('offset', 0)]])

def mixture(c, M):
    """W = sum_k c_k M_k from c (nh, K), M (K, ..., Tq, T) -> (nh, ..., Tq, T).  [MA Sec. 3]"""
    return sum(c[:, k].view(-1, *[1] * m.dim()) * m for k, m in enumerate(M))

def wide(x):
    """x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

def log(w):
    """log w, and -inf with gradient 0 where w is 0."""
    return w.clamp_min(torch.finfo(w.dtype).tiny).log().masked_fill(w == 0, -math.inf)

# One signature: scores (B, nh, Tq, T), masks, log c (nh or 1, K), positions i (Tq,) and j (T,) ->
# attention weights (B, nh, Tq, T). Bounded masks, renormalised, train in blocked_attention instead,
# which is equal; --execution dense runs these.

def renormalised(scores, masks, log_c, i, j):
    """softmax(S + log W): each row is divided by its sum.  [MA Sec. 3]"""
    if masks == 'all':  # whatever its coefficient
        return F.softmax(scores.masked_fill(i[:, None] < j, -math.inf), dim=-1)
    w = mixture(own_token(masks, log_c), hold(masks, i, j))                 # (nh, Tq, T)
    return F.softmax(scores + log(w).to(scores.dtype), dim=-1)

def unnormalised(scores, masks, log_c, i, j):
    """W o softmax(S): what the masks leave out is lost."""
    c = own_token(masks, log_c) * log_c.amax(1, keepdim=True).exp()
    w = mixture(c, hold(masks, i, j))
    return w.to(scores.dtype) * F.softmax(scores.masked_fill(i[:, None] < j, -math.inf), dim=-1)

def separate(scores, masks, log_c, i, j):
    """sum_k c_k softmax(S on M_k): a softmax for every mask; one without tokens adds nothing."""
    c, out = own_token(masks, log_c) * log_c.amax(1, keepdim=True).exp(), 0
    for k, m in enumerate(hold(masks, i, j)):
        p = F.softmax(scores.masked_fill(~m, torch.finfo(scores.dtype).min), dim=-1)
        out = out + c[:, k, None, None].to(p.dtype) * p * m
    return out

READINGS = {'renormalised': renormalised, 'unnormalised': unnormalised, 'separate': separate}

def attention_weights(q, k, masks, log_c=None, reading='renormalised', i=None, j=None):
    """q (B, nh, Tq, hs), k (B, nh, T, hs) at positions i, j (default 0, 1, ...) -> (B, nh, Tq, T).

    log_c (nh or 1, K), the logarithms of the masks' coefficients, is zeros by default.
    """
    i = torch.arange(q.size(2), device=q.device) if i is None else i
    j = torch.arange(k.size(2), device=q.device) if j is None else j
    log_c = no_preference(masks, q) if log_c is None else log_c
    scores = (q / math.sqrt(q.size(-1))) @ k.mT                             # (B, nh, Tq, T)
    return READINGS[reading](scores, masks, log_c, i, j)

def no_preference(masks, like):
    """Coefficients of 1, so log c = 0, (1, K)."""
    return wide(like.new_zeros(1, len(candidates(masks))))

def dense_attention(q, k, v, masks='all', log_c=None, reading='renormalised', i=None, j=None):
    """The definition, any masks: O(T^2). q, k, v (B, nh, T, hs) -> (B, nh, T, hs)."""
    return attention_weights(q, k, masks, log_c, reading, i, j).to(v.dtype) @ v

def blocked_attention(q, k, v, masks='window:64', log_c=None, block=0):
    """dense_attention, renormalised, of `bounded` masks, in O(T reach): q, k, v, result alike.

    A block of b queries meets the b + reach - 1 keys that its windows can hold, and the first keys
    in columns of their own. The sum over masks is one over columns, so a key may stand in both.
    """
    assert bounded(masks), f'{masks} has no blocks'
    B, nh, T, hs = q.shape
    c = own_token(masks, no_preference(masks, q) if log_c is None else log_c)
    reach, s = (min(n, T) for n in extent(masks))
    b = min(block or max(16, min(reach, 128)), T)
    n, band = -(-T // b), b + reach - 1                                     # blocks; keys of each
    blocks = F.pad(q / math.sqrt(hs), (0, 0, 0, n * b - T)).view(B, nh, n, b, hs)
    K, V = (torch.cat([F.pad(t, (0, 0, reach - 1, n * b - T)).unfold(2, band, b),
                       t[:, :, None, :s].mT.expand(-1, -1, n, -1, -1)], -1)
            for t in (k, v))                                                # (B, nh, n, hs, ...)
    i = torch.arange(n * b, device=q.device).view(n, b)
    column = torch.arange(band + s, device=q.device)                        # of K and V
    j = torch.where(column < band, column - reach + 1 + i[:, :1], column - band)
    near = [kind in ('window', 'offset') for kind, _ in candidates(masks)] + [True]
    M = hold(masks, i, j) & torch.stack([(column < band) == x for x in near])[:, None, None]
    bias = log(mixture(c, M)).to(q.dtype)                                   # (nh, n, b, band + s)
    p = F.softmax((blocks @ K).add_(bias), dim=-1)                          # (B, nh, n, b, ...)
    return (p.to(v.dtype) @ V.mT).reshape(B, nh, n * b, hs)[:, :, :T]

CLOSED = 1e-3  # [choice] a mask with less than this share of its head's largest c is closed

def coefficients(alpha):
    """log sigmoid(alpha), (nh or 1, K); -inf for masks that are closed.  [MA Sec. 3]"""
    log_c = F.logsigmoid(wide(alpha))
    return log_c.masked_fill(log_c < log_c.amax(1, keepdim=True) + math.log(CLOSED), -math.inf)

@functools.cache
def kinds_of_pairs(masks, T, device, dtype):
    """Causal pairs of T tokens by the masks that hold them: which do (P, K + 1), and their share of
    all pairs (P,)."""
    i = torch.arange(T)
    kinds, counts = hold(masks, i, i)[:, i[:, None] >= i].T.unique(dim=0, return_counts=True)
    return kinds.to(device, dtype), (counts / counts.sum()).to(device, dtype)

def expected_pairs(chances, masks, T):
    """Share of the causal pairs of T tokens that at least one mask keeps, if each is there with
    these chances (nh, K + 1), mean over the heads."""
    kinds, share = kinds_of_pairs(masks, T, chances.device, chances.dtype)
    return ((1 - (1 - chances[:, None] * kinds).prod(-1)) * share).sum(-1).mean()

def penalty(alphas, config):
    """What is added to the KL, from the alphas of each layer (nh or 1, K).  [MA Sec. 2.5]

    L1: the sum of the coefficients, over masks and layers. The budget: what the expected pairs are
    over it, with chances c / max c: nothing is won by making all coefficients small.
    """
    c, total = config, 0
    for alpha in alphas:
        total = total + c.l1 * alpha.sigmoid().mean(0).sum()
        if c.budget:
            chances = own_token(c.masks, F.logsigmoid(alpha))
            excess = F.relu(expected_pairs(chances, c.masks, c.block_size) - c.budget - 1e-6)
            total = total + c.budget_weight * excess / len(alphas)
    return total

@torch.no_grad()
def kept_pairs(alphas, masks, T):
    """Share of the causal pairs of T tokens that open masks hold, mean over layers and heads."""
    open_masks = [own_token(masks, coefficients(alpha)) > 0 for alpha in alphas]
    return statistics.fmean(expected_pairs(m.float(), masks, T).item() for m in open_masks)

# ------------------------------------ model ------------------------------------

class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as GPT-2's files have it."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x):
        return F.linear(x, self.weight.mT, self.bias)

class SelfAttention(nn.Module):
    """GPT-2's. `how` names the execution; a student has masks and alpha besides."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.how = config.n_head, 'sdpa'
        self.masks, self.reading = 'all', 'renormalised'
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.register_parameter('alpha', None)

    def log_c(self, like):
        return no_preference(self.masks, like) if self.alpha is None else coefficients(self.alpha)

    def attend(self, q, k, v, i, j):
        """q, k, v (B, nh, T, hs), positions i of queries and j of keys -> (B, nh, Tq, hs)."""
        if self.how == 'sdpa' and len(i) in (1, len(j)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=len(i) > 1)
        if self.how == 'blocked' and len(i) == len(j):
            return blocked_attention(q, k, v, self.masks, self.log_c(q))
        return dense_attention(q, k, v, self.masks, self.log_c(q), self.reading, i, j)

    def forward(self, x, cache=None, watch=None):
        """x (B, T, C) -> (B, T, C). `cache`, a dict, keeps what later tokens may attend to;
        `watch`, a list, gets the attention weights (B, nh, T, T)."""
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for t in self.c_attn(x).split(C, dim=2))                 # (B, nh, T, hs)
        past = cache['past'] if cache else 0
        i = j = torch.arange(past, past + T, device=x.device)
        if cache:
            k, v = torch.cat([cache['k'], k], 2), torch.cat([cache['v'], v], 2)
            j = torch.cat([cache['at'], i])
        if cache is not None:
            reach, s = extent(self.masks)
            stays = (j < s) | (j > past + T - reach)  # those that a later token can attend to
            if self.reading == 'unnormalised' or not bounded(self.masks):
                stays = slice(None)  # the former divides by what the masks leave out, too
            cache.update(k=k[:, :, stays], v=v[:, :, stays], at=j[stays], past=past + T)
        if watch is not None:
            watch.append(attention_weights(q, k, self.masks, self.log_c(q), self.reading))
        return self.c_proj(self.attend(q, k, v, i, j).transpose(1, 2).flatten(2))

class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, 4 * config.n_embd)
        self.c_proj = Conv1D(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))

class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, cache=None, watch=None):
        x = x + self.attn(self.ln_1(x), cache, watch)
        return x + self.mlp(self.ln_2(x))

class GPT2(nn.Module):
    """GPT-2 with the keys of its published files; block_size is the number of its positions."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Each tensor has a generator of its own, so that variants start alike where they are."""
        generator = torch.Generator().manual_seed(zlib.crc32(f'{self.config.seed} {name}'.encode()))
        kind = name.rpartition('.')[2]
        if kind == 'bias':
            p.zero_()
        elif kind == 'weight' and p.dim() == 2:  # others keep the values they were made with
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if 'c_proj' in name else 0.02
            p.normal_(0.0, std, generator=generator)

    def features(self, idx, cache=None, watch=None):
        """idx (B, T) -> what the output layer sees, (B, T, C). `cache`: a dict for every layer."""
        past = cache[0].get('past', 0) if cache else 0
        x = self.wte(idx) + self.wpe(torch.arange(past, past + idx.size(1), device=idx.device))
        for n, block in enumerate(self.h):
            x = block(x, cache[n] if cache else None, watch)
        return self.ln_f(x)

    def forward(self, idx, cache=None, logits=True):
        """idx (B, T) -> logits (B, T, V), or the features (B, T, C) that they come from."""
        x = self.features(idx, cache)
        return F.linear(x, self.wte.weight) if logits else x

    def alphas(self):
        return [block.attn.alpha for block in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) -> (B, T + max_new_tokens), and the bytes of the cache after each token.

        [choice] GPT-2's positions belong to its inputs, so nothing cached can move: where they are
        used up, the last half of them is encoded afresh. Temperature 0 takes the likeliest token.
        """
        positions, cache, sizes = self.config.block_size, None, []
        for _ in range(max_new_tokens):
            if cache is None or cache[0]['past'] == positions:
                new = idx[:, -(positions // 2 if cache else positions):]
                cache = [{} for _ in self.h]
            logits = self(new, cache)[:, -1].float()                        # (B, V)
            sizes.append(sum(t.nbytes for layer in cache for t in (layer['k'], layer['v'])))
            if temperature < 1e-3:
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat([idx, new], dim=1)
        return idx, sizes

def substitute(teacher, config):
    """The teacher with masks in its attention, and every alpha 0. What --train does not name is
    shared with the teacher and frozen."""
    frozen = {id(p): p for name, p in teacher.named_parameters() if '.attn.' not in name}
    student = copy.deepcopy(teacher, frozen)
    for block in student.h:
        attn, K = block.attn, len(candidates(config.masks))
        attn.masks, attn.how, attn.reading = config.masks, config.how, config.reading
        nh = attn.n_head if config.per_head else 1
        attn.alpha = nn.Parameter(torch.zeros(nh, K, device=attn.c_attn.weight.device))
    for name, p in student.named_parameters():
        p.requires_grad_(name.endswith('alpha') or '.attn.' in name and config.train == 'attention')
    return student

LOGITS = 2 ** 25  # logits held at once: 128 MB in float32

def in_chunks(f, V, *tensors):
    """f of rows of the tensors, piece by piece: logits are made, used, forgotten, and made again in
    the backward pass, so their memory does not grow with the number of tokens."""
    rows = max(1, LOGITS // V)
    return torch.cat([checkpoint(f, *part, use_reentrant=False, preserve_rng_state=False)
                      for part in zip(*(t.split(rows) for t in tensors))])

def token_losses(x, weight, targets):
    """Cross-entropy, nats, of features x (..., C), targets (...) under logits x W^T -> (N,)."""
    def chunk(x, targets):
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction='none')
    return in_chunks(chunk, weight.size(0), x.flatten(0, -2), targets.flatten())

def token_kl(x, y, weight):
    """KL(teacher || student), nats, of features y and x (..., C) -> (N,).  [MA Sec. 2.1]

    Both have the same output weights (V, C). A mean over tokens is what the report's threshold can
    mean: its "summed over all training examples" would grow with the text.
    """
    def chunk(x, y):  # GPT-2's logits are near -100, where bfloat16 knows halves: a KL of 5e-3
        with torch.autocast(x.device.type, enabled=False):
            p, q = (F.log_softmax(F.linear(wide(t), wide(weight)), dim=-1) for t in (y, x))
        return (p.exp() * (p - q)).sum(-1)
    return in_chunks(chunk, weight.size(0), x.flatten(0, -2), y.flatten(0, -2))

# ------------------------------------ data ------------------------------------

DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
          'I64': torch.int64, 'I32': torch.int32, 'U8': torch.uint8, 'BOOL': torch.bool}

def read_header(path):
    """A safetensors file -> (where its data begin, metadata, {name: (dtype, shape, begin, stop)}).

    Eight bytes give the length of a json header, which gives for every tensor its dtype, shape and
    place in the data; the data must be filled without gaps. One line on what is wrong, if anything.
    """
    try:
        with open(path, 'rb') as f:
            size, n = os.path.getsize(path), int.from_bytes(f.read(8), 'little')
            if size < 8 or n > min(size - 8, 100_000_000):
                raise ValueError(f'a header of {n:,} bytes in a file of {size:,}')
            header = json.loads(f.read(n).decode('utf-8'))
        metadata, entries, end = dict(header.pop('__metadata__', {})), {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]['data_offsets']):
            dtype, shape, (begin, stop) = (entry[k] for k in ('dtype', 'shape', 'data_offsets'))
            if dtype not in DTYPES:
                raise ValueError(f'{name} is of dtype {dtype}, not one of {", ".join(DTYPES)}')
            if not all(type(x) is int and 0 <= x < 2 ** 62 for x in (*shape, begin, stop)):
                raise ValueError(f'{name} has shape {shape} and place {begin}:{stop}')
            width = DTYPES[dtype].itemsize
            if begin != end or stop - begin != math.prod(shape) * width:
                raise ValueError(f'{name} {shape} at {begin}:{stop}; the last one ends at {end}')
            if begin % width:
                raise ValueError(f'{name} at {begin} is not aligned to {width} bytes')
            entries[name], end = (DTYPES[dtype], tuple(shape), begin, stop), stop
        if end != size - 8 - n:
            raise ValueError(f'{end:,} bytes of tensors where {size - 8 - n:,} follow the header')
        return 8 + n, metadata, entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        fail(f'{path} is no whole safetensors file ({str(e)[:200]}): name or fetch another')

def read_safetensors(path):
    """A safetensors file -> {name: tensor}. The data are read into a buffer of their own, since
    behind a header of odd length they would not be aligned."""
    start, _, entries = read_header(path)
    data = torch.empty(os.path.getsize(path) - start, dtype=torch.uint8)
    with open(path, 'rb') as f:
        f.seek(start)
        f.readinto(data.numpy())
    return {name: data[begin:stop].view(dtype).view(shape)
            for name, (dtype, shape, begin, stop) in entries.items()}

def write_safetensors(path, tensors, metadata):
    """{name: tensor}, all of one dtype, and {name: text} -> a file that read_safetensors takes."""
    header, end = {'__metadata__': metadata}, 0
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, t in tensors.items():
        header[name] = dict(dtype=names[t.dtype], shape=list(t.shape),
                            data_offsets=[end, end := end + t.nbytes])
    head = json.dumps(header).encode()
    head += b' ' * (-len(head) % 8)
    data = [t.cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
            for t in tensors.values()]
    temporary = Path(path).with_suffix('.tmp')
    temporary.write_bytes(b''.join([len(head).to_bytes(8, 'little'), head, *data]))
    os.replace(temporary, path)

def load_gpt2(path, n_head=0):
    """A GPT-2 of any size from its safetensors file, all sizes taken from that -> GPT2.

    Files of the hub and of transformers both do: the latter put "transformer." before the keys.
    Heads are no tensor: n_head, the file's metadata or a config.json beside it, which transformers
    writes, says how many; else they are 64 wide.
    """
    metadata, dropped = read_header(path)[1], ('.attn.bias', '.attn.masked_bias', 'lm_head.weight')
    state = {re.sub(r'^transformer\.', '', key): t for key, t in read_safetensors(path).items()
             if not key.endswith(dropped)}  # causal masks, and an output layer that is wte
    try:
        (V, C), (T, _) = state['wte.weight'].shape, state['wpe.weight'].shape
        n_layer = len({key.split('.')[1] for key in state if key.startswith('h.')})
        beside = Path(path).with_name('config.json')
        known = json.loads(beside.read_text('utf-8')) if beside.exists() else {}
        n_head = n_head or int(metadata.get('n_head', known.get('n_head', 0))) or C // 64
        if not n_head or C % n_head:
            raise ValueError(f'{C} channels are not whole heads of 64, nor {n_head} heads: its '
                             'metadata should say n_head')
        model = GPT2(Config(n_layer=n_layer, n_head=n_head, n_embd=C, block_size=T, vocab_size=V))
        model.load_state_dict({key: t.float() for key, t in state.items()})
        return model
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        fail(f'{path} holds no GPT-2 ({str(e)[:200]})')

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

class Pretraining:
    """Language modelling as the harness sees it: a teacher in the making."""
    unit = 'tokens'

    def __init__(self, config, text):
        self.config, self.text, self.device = config, text, pick_device(config)[0]
        self.model, self.per_row = GPT2(config).to(self.device), config.block_size
        self.stamp = text.stamp
        self.prepare_windows()

    def prepare_windows(self):
        c, last = self.config, len(self.text.val) - self.config.block_size - 1
        self.val_starts = np.unique(np.linspace(0, last, c.eval_rows).astype(np.int64))
        self.pool = np.random.default_rng(c.seed).integers(
            len(self.text.train) - c.block_size, size=c.samples) if c.samples else None

    def optimizer(self):
        """AdamW; matrices and embeddings decay, gains and biases do not."""
        c, params = self.config, list(self.model.parameters())
        groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=c.weight_decay),
                  dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
        return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))

    def batch(self, step, rows):
        c, rng = self.config, np.random.default_rng([self.config.seed, step])
        n, last = c.batch_size * c.grad_accum_steps, len(self.text.train) - c.block_size
        starts = rng.integers(last, size=n) if self.pool is None else rng.choice(self.pool, n)
        return windows(self.text.train, starts[list(rows)], c, self.device)

    def validation(self, rows):
        """The same windows every time, spread evenly over the validation text, some at a time."""
        for i in range(0, len(self.val_starts), rows):
            yield windows(self.text.val, self.val_starts[i:i + rows], self.config, self.device)

    def loss(self, model, batch):
        x, y = batch
        return token_losses(model(x, logits=False), self.model.wte.weight, y).mean()

    def evaluate(self):
        losses = [token_losses(self.model.features(x), self.model.wte.weight, y)
                  for x, y in self.validation(self.config.batch_size)]
        return dict(val_loss=torch.cat(losses).mean().item())

class Task(Pretraining):
    """Distillation: a student, with masks, learns what its teacher says."""
    metrics = ['val_kl', 'accuracy', 'cosine']

    def __init__(self, config):
        c, self.text, self.device = config, load_text(config), pick_device(config)[0]
        self.teacher, self.about, mark = get_teacher(c, self.text)
        t = self.teacher.requires_grad_(False).to(self.device).eval().config
        if t.vocab_size < self.text.vocab_size or t.block_size < c.block_size:
            fail(f'the teacher ({self.about}) has {t.vocab_size} tokens, {t.block_size} positions: '
                 f'too few for {self.text.vocab_size} tokens in windows of --block-size '
                 f'{c.block_size}')
        crc = functools.reduce(lambda crc, p: zlib.crc32(p.cpu().numpy(), crc),
                               self.teacher.parameters(), 0)
        if c.teacher not in ('', f'{crc:08x}'):
            fail(f'--teacher {c.teacher}: that is not the one to be had now ({self.about}, '
                 f'{crc:08x}); name its file in --init, or train anew')
        self.config = c = replace(c, n_layer=t.n_layer, n_head=t.n_head, n_embd=t.n_embd,
                                  vocab_size=t.vocab_size, tokenizer=self.text.tokenizer,
                                  teacher=f'{crc:08x}')
        self.model, self.per_row = substitute(self.teacher, c), c.block_size
        self.stamp = [self.text.stamp, mark]
        self.prepare_windows()

    def optimizer(self):
        """AdamW without decay, which would pull towards zero and not towards the teacher."""
        c = self.config
        groups = [dict(params=[p], lr=c.alpha_lr if name.endswith('alpha') else c.learning_rate)
                  for name, p in self.model.named_parameters() if p.requires_grad]
        return torch.optim.AdamW(groups, betas=(c.beta1, c.beta2), weight_decay=0.0)

    def kl(self, model, x):
        with torch.no_grad():
            y = self.teacher.features(x)
        return token_kl(model(x, logits=False), y, self.teacher.wte.weight)

    def loss(self, model, batch):
        return self.kl(model, batch[0]).mean() + penalty(self.model.alphas(), self.config)

    def infer(self, model, batch):
        """What `bench` times as inference: the student alone, up to the output layer."""
        return model(batch[0], logits=False).mean()

    def evaluate(self):
        kls = [self.kl(self.model, x) for x, _ in self.validation(self.config.batch_size)]
        return dict(val_kl=max(0.0, torch.cat(kls).mean().item()),
                    kept=kept_pairs(self.model.alphas(), self.config.masks, self.per_row))

    def finish(self):
        return fidelity(self, self.model.eval())

def fit_once(task, name, facts, label):
    """Train in a folder of this name and a hash of the facts, all that the result depends on: a
    finished run is not repeated, an interrupted one goes on."""
    mark = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    folder = Path(task.config.out_dir, SCRIPT, name + mark)
    folder.mkdir(parents=True, exist_ok=True)
    found = (folder / 'ckpt.pt').exists()
    state = load_checkpoint(folder / 'ckpt.pt') if found else None
    print(f'{label}{folder}' + ', found' * found)
    result = fit(task, task.config, folder, state, label)
    if result['iter'] < task.config.max_iters:
        fail('the time limit, --max-minutes, is reached; the same command goes on from here')
    return result

def get_teacher(config, text):
    """The model to imitate, its name, and what changes when it does."""
    path = Path(config.init or 'data/weights/gpt2/model.safetensors')
    if config.init or text.tokenizer == 'gpt2' and path.exists():
        model, known = load_gpt2(path), read_header(path)[1].get('tokenizer')
        known = known or ('gpt2' if model.config.vocab_size == 50257 else text.tokenizer)
        if known != text.tokenizer:
            fail(f'--init {path} was made for other tokens than {text.tokenizer}: give a text in '
                 'its own, or another --tokenizer')
        return model, str(path), [path.stat().st_size, path.stat().st_mtime]
    if text.tokenizer == 'gpt2':
        print('data/weights/gpt2 is not there, so a small teacher is trained here; for GPT-2 '
              'itself run `python prepare_data.py gpt2`')
    return train_teacher(config, text)

def train_teacher(config, text, rows=16):
    """-> what get_teacher gives, of a small GPT-2: trained on the text, or found if it was before.
    A step is on `rows` windows, whatever --batch-size: a comparison of those has one teacher."""
    own = ('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size', 'data', 'tokenizer', 'seed',
           'weight_decay')
    rows = math.lcm(rows, WORLD)
    at_once = math.gcd(rows, config.batch_size)
    c = replace(Config(), **{key: getattr(config, key) for key in {*own} | FREE})
    c = replace(c, tokenizer=text.tokenizer, vocab_size=max(config.vocab_size, text.vocab_size),
                max_iters=config.teacher_iters, learning_rate=config.teacher_lr,
                min_lr=config.teacher_lr / 10, warmup_iters=100,
                batch_size=at_once, grad_accum_steps=rows // at_once)
    facts = [{key: getattr(c, key) for key in (*own, 'max_iters', 'learning_rate')}, rows,
             text.stamp,  # and the text of the model and of its training, which you may change
             re.findall(r'(?s)-- model --.*?-- data --|class Pretraining.*?\nclass ', SOURCE)]
    task = Pretraining(c, text)
    result = fit_once(task, 'teachers/', facts, 'teacher: ')
    about = f'trained on {text.about} to {result["val_loss"]:.3f} nats per token'
    return task.model, about, result['folder'].name

CRITERIA = {  # what each figure of fidelity is, and what the report wants of it  [MA Sec. 2.4]
    'accuracy': ("the student's next-token accuracy / the teacher's", '>=', 0.95),
    # [choice] over all n x n pairs, nearly half of them zeros, the mean would be half of this
    'mse': ("mean (P - P')^2 over layers, heads, pairs j <= i, each on its own inputs", '<=', 1e-4),
    'cosine': ('of the gradients of the loss on all windows, c_attn and c_proj in one vector', '>=',
               0.95),
    'kl': ('KL(teacher || student) in nats, mean over tokens', '<=', 1e-3),
}
BESIDE = {
    'kept': 'share of the causal pairs in use',
    'tv': "mean over rows of 1/2 sum_j |P - P'|, which unlike the MSE does not shrink with length",
    'worst': 'the layer with the largest TV', 'agreement': 'how often both name the same token',
    'ppl': "the student's perplexity / the teacher's",
}

def verdict(key, value):
    _, sign, bound = CRITERIA[key]
    passed = value >= bound if sign == '>=' else value <= bound
    return f'{value:#.3g} {"PASS" if passed else "FAIL"}'

def attention_gradient(model, x, y):
    """Gradient of the cross-entropy, a sum, for all of the attention's weights, one vector."""
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()
              if '.attn.c_' in name}  # frozen ones, too
    with torch.enable_grad():
        features = torch.func.functional_call(model, params, x, dict(logits=False))
        loss = token_losses(features, model.wte.weight, y).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*params.values()])])

@torch.no_grad()
def fidelity(task, student):
    """How close a student is to task.teacher on the validation windows.  [MA Sec. 2.4]"""
    c, sums, gradients, models = task.config, {}, [0, 0], (task.teacher, student)
    for x, y in task.validation(max(1, min(c.batch_size, LOGITS // c.block_size // c.vocab_size))):
        maps, log_p = ([], []), []
        for model, watch in zip(models, maps):
            logits = F.linear(model.features(x, watch=watch), model.wte.weight)
            log_p.append(F.log_softmax(logits.float(), dim=-1))             # (B, T, V)
        p, q = log_p
        theirs, its = p.argmax(-1), q.argmax(-1)                            # (B, T)
        gaps = [(a - b).float() for a, b in zip(*maps)]                     # of (B, nh, T, T)
        figures = dict(tokens=y.numel(), kl=(p.exp() * (p - q)).sum(), same=(theirs == its).sum(),
                       teacher=(theirs == y).sum(), student=(its == y).sum(),
                       log_ppl=(p - q).gather(-1, y[..., None]).sum(),
                       squares=sum(g.square().sum() for g in gaps) / len(gaps),
                       tv=torch.stack([g.abs().sum() / 2 for g in gaps]))
        sums = {key: sums.get(key, 0) + value for key, value in figures.items()}
        gradients = [g + attention_gradient(m, x, y) for g, m in zip(gradients, models)]
    n, rows = sums['tokens'], sums['tokens'] * c.n_head
    figures = dict(accuracy=sums['student'] / sums['teacher'].clamp_min(1),
                   mse=sums['squares'] / rows / ((c.block_size + 1) / 2),
                   cosine=F.cosine_similarity(*gradients, dim=0), kl=sums['kl'].clamp_min(0) / n,
                   tv=sums['tv'].mean() / rows, worst=sums['tv'].max() / rows,
                   agreement=sums['same'] / n, ppl=(sums['log_ppl'] / n).exp())
    return dict({key: value.item() for key, value in figures.items()},
                kept=kept_pairs(student.alphas(), student.h[0].attn.masks, c.block_size))

def table_of_criteria(rows, path):
    """Print {case: figures of fidelity} with PASS or FAIL, and write it as csv."""
    for key, (words, sign, bound) in CRITERIA.items():
        print(f'{key:10}{words} {sign} {bound:g}')
    print('\n'.join(f'{key:10}{words}' for key, words in BESIDE.items()))
    table([{'': case, 'kept': f['kept'], **{key: verdict(key, f[key]) for key in CRITERIA},
            **{key: f[key] for key in list(BESIDE)[1:]}} for case, f in rows.items()])
    write_csv(path, [dict(case=case, **{key: f[key] for key in (*CRITERIA, *BESIDE)})
                     for case, f in rows.items()])

def peak(f, device):
    """The most bytes that f() had allocated at once, beyond those that were there before."""
    if device.type == 'cuda':
        f()  # so that cuBLAS has its workspace
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        return torch.cuda.max_memory_allocated(device) - before
    kept, quiet = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:  # some builds' profiler talks to stderr
        os.dup2(quiet, 2)
        with torch.profiler.profile(profile_memory=True) as p:
            f()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(quiet)
    events = [(e.start_ns(), e.nbytes()) for e in p.profiler.kineto_results.events()
              if e.name() == '[memory]']
    return max(itertools.accumulate(size for _, size in sorted(events, key=lambda e: e[0])))

def ways(config):
    """What is measured against what: {name: (masks, execution, reading)}."""
    return {'eager': ('all', 'dense', 'renormalised'), 'sdpa': ('all', 'sdpa', 'renormalised'),
            'masks': (config.masks, config.how, config.reading)}

def operation(config, T, way, device, backward=True):
    """Attention alone on one sequence of T tokens -> a function without arguments."""
    masks, how, reading = ways(config)[way]
    shape = 1, config.n_head, T, config.n_embd // config.n_head
    q, k, v, g = (torch.randn(shape, device=device) for _ in range(4))
    f = {'sdpa': functools.partial(F.scaled_dot_product_attention, is_causal=True),
         'dense': functools.partial(dense_attention, masks=masks, reading=reading),
         'blocked': functools.partial(blocked_attention, masks=masks)}[how]
    if not backward:
        return lambda: f(q, k, v)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    return lambda: torch.autograd.grad(f(*inputs), inputs, g)

def memory(config, T, device):
    """Peak bytes of one sequence of T tokens, float32, no dropout, {what: {way: bytes}}; those of
    the whole model count its parameters, which are random here.  [MA Sec. 2.4]"""
    c, device = replace(config, block_size=T), torch.device(device.type.replace('mps', 'cpu'))
    rows = {what: {way: peak(operation(c, T, way, device, backward), device) for way in ways(c)}
            for what, backward in (('attention, forward', False),
                                   ('attention, forward + backward', True))}
    model, idx = GPT2(c).to(device), torch.arange(T, device=device)[None] % c.vocab_size
    adam = torch.optim.AdamW(model.parameters(), lr=0.0)

    def infer(first):
        with torch.no_grad():
            F.linear(model.features(idx)[:, first:], model.wte.weight)

    def train(step=lambda: None):
        F.cross_entropy(model(idx).flatten(0, 1), idx.flatten()).backward()
        step()
        model.zero_grad()

    def whole(what, f):
        held = [*model.parameters(), *(t for s in adam.state.values() for t in s.values())]
        rows[what] = {}
        for way, setting in ways(c).items():
            for block in model.h:
                block.attn.masks, block.attn.how, block.attn.reading = setting
            rows[what][way] = peak(f, device) + sum(t.nbytes for t in held)

    whole('inference, last logits', lambda: infer(-1))
    whole('inference, all logits', lambda: infer(0))
    whole('training step', train)
    train(adam.step)  # the first step makes the state
    whole('with AdamW', lambda: train(adam.step))
    against = lambda r, way: f'{r["masks"] / r[way] - 1:+.0%}'
    passed = lambda r: ' PASS' if r['masks'] <= 0.7 * r['eager'] else ' FAIL'
    print(f'\npeak memory in MiB at {T} tokens, {c.n_layer} layers, {c.n_head} heads, {c.n_embd} '
          f'wide, {c.masks} as masks; 30 % saved of eager attention pass')
    table([{'': what, **{way: f'{size / 2 ** 20:,.1f}' for way, size in r.items()},
            'against eager': against(r, 'eager') + passed(r), 'against sdpa': against(r, 'sdpa')}
           for what, r in rows.items()])
    return rows

def time_against_length(config, lengths, device):
    """Milliseconds, best of 3, of attention forward + backward -> rows, fitted exponents."""
    rows = []
    for T in lengths:
        f = {way: operation(config, T, way, device) for way, (_, how, _) in ways(config).items()
             if how != 'dense' or config.n_head * T * T <= 2.5e8}           # 3 GB of scores
        row = dict.fromkeys(ways(config), math.nan)
        for way in [*f] * 3:
            clock = now()
            f[way]()
            if device.type != 'cpu':
                getattr(torch, device.type).synchronize()
            row[way] = np.fmin(row[way], 1e3 * (now() - clock)).item()
        rows.append(dict(tokens=T, **row))
    known = {way: [(r['tokens'], r[way]) for r in rows if r[way] == r[way]] for way in ways(config)}
    exponents = {way: np.polyfit(*np.log(np.array(xy)).T, 1)[0].item()
                 for way, xy in known.items() if len(xy) > 1}
    grows = ', '.join(f'{x:.2f} ({way})' for way, x in exponents.items())
    print('\nms, best of 3, of attention forward + backward'
          + f'; it grows as length to the power of {grows}' * bool(grows))
    table([{k: v if k == 'tokens' or v != v else f'{v:.1f}' for k, v in r.items()} for r in rows])
    return dict(times=rows, exponents=exponents)

PROMPTS = [  # the report's
    'Hello, my name is', 'The meaning of life is', 'In a shocking turn of events,',
    'The future of artificial intelligence',
    'In the year 2157, humanity had finally perfected interstellar travel. The first colony ship, '
    'brimming with hope and thousands of eager settlers',
    'The scientist stared at the glowing vial on the laboratory table, her fingers trembling with '
    'anticipation. After years of relentless experimentation',
    'The detective pushed open the heavy oak door, stepping into a room thick with the scent of '
    'old books and something more sinister—fear']

def side_by_side(task, prompts, length, temperature=0.8, top_k=0):
    """Print how teacher and student go on from each prompt -> [(prompt, theirs, its)]."""
    encoding, texts = get_tokenizer(task.config.tokenizer), []
    for prompt in prompts:
        print(f'\nprompt   {prompt}')
        idx = torch.tensor([encoding.encode_ordinary(prompt)], device=task.device)
        for name, model in (('teacher', task.teacher), ('student', task.model.eval())):
            torch.manual_seed(task.config.seed)
            out, sizes = model.generate(idx, length, temperature, top_k)
            tokens = [t for t in out[0, idx.size(1):].tolist() if t < encoding.n_vocab]
            texts.append(encoding.decode(tokens))
            print(f'{name}  ' + texts[-1].replace('\n', '\n         ')
                  + f'\n         [cache {sizes[0]:,} bytes at first, {sizes[-1]:,} at the end]')
    return list(zip(prompts, texts[::2], texts[1::2]))

# ------------------------------------ actions ------------------------------------

def start(config, given, resume=None):
    """Announce a run -> its task, its folder, its checkpoint if it goes on from one."""
    task = None if resume else Task(config)  # first, so that bad data leave no empty folder
    config, folder, state = open_run(config, given, resume)
    task = task or Task(config)
    c, text, (device, dtype, why) = task.config, task.text, pick_device(config)
    formula = (READINGS[c.reading].__doc__ or c.reading).split(':')[0]
    print(f'student {c.masks}, {formula}, {c.how}; trains {c.train}: {count(task.model):,} '
          'parameters\n'
          f'teacher {task.about}\n'
          f'        {c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, '
          f'{sum(p.numel() for p in task.teacher.parameters()):,} parameters\n'
          f'data    {text.about}: {len(text.train):,}, and {len(text.val):,} for validation\n'
          f'device  {device}, {str(dtype)[6:]} ({why})\n'
          f'run     {folder}' + (f', resumed, step {state["progress"][0]}' if state else ''))
    return task, folder, state

def report(task, folder, result):
    """What came out: the five criteria, mask only and trained, and two samples."""
    c = task.config
    lines = {name: points(result['log'], 'iter', key) for name, key in
             (('training', 'loss'), ('validation KL', 'val_kl'))}
    values = [y for _, y in lines['training'] or lines['validation KL']]
    print(f'loss    {sparkline(values)} {values[0]:.4f} to {values[-1]:.4f}\n')
    judge(task, folder)
    files = ['report.csv'] + draw(folder / 'curves.png', [('nats per token', 'step', lines)])
    side_by_side(task, PROMPTS[:1] + ['def '] if c.data == 'builtin' else PROMPTS[:2], 120)
    print(f'\nfiles   {folder}: {", ".join(["ckpt.pt", "log.csv"] + files)}')

def judge(task, folder, T=1024):
    """Print the tables of a run -> what is in them."""
    c = task.config
    rows = {'mask only': fidelity(task, substitute(task.teacher, c)),
            f'trained {c.train}': fidelity(task, task.model)}
    table_of_criteria(rows, folder / 'report.csv')
    end, token = 50256 if c.tokenizer == 'gpt2' else 0, int(task.text.val[0])
    edge = {t: task.kl(task.model, torch.full((1, c.block_size), t, device=task.device)).mean()
            .item() for t in (end, token)}
    print(f'edge cases: KL {edge[end]:.2g} where all is token {end} and '
          f'{edge[token]:.2g} where all is token {token}')
    return dict(rows=rows, edge=edge, memory=memory(c, T, task.device))

def measure(options, config, given):
    """The five criteria of the newest run; with --table or --over those of quality for each case,
    trained first."""
    if options['table'] or options['over']:
        rows = {}
        for name, c in cases_of(options, config).items():
            task = Task(c)
            facts = [asdict(replace(task.config, max_minutes=0.0, out_dir='')), task.stamp, SOURCE,
                     torch.__version__, str(pick_device(c)[1:])]
            rows[name] = fit_once(task, f'report/{c.variant}-', facts, f'{name}: ')
        path = Path(config.out_dir, SCRIPT, 'report', 'report.csv')
        table_of_criteria(rows, path)
        print(f'files   {path}')
        return rows
    if options['length'] < 2:
        fail(f'--length {options["length"]}: wants at least 2')
    task, folder = load_run(options, config, given)
    found = judge(task, folder, options['length'])
    times = time_against_length(task.config, options['lengths'], task.device)
    print(f'\nfiles   {folder}: report.csv')
    return dict(found, **times)

def load_run(options, config, given):
    """The newest run, or the one that --resume names."""
    config, folder, state = open_run(config, given, options['resume'])
    task = Task(config)
    restore(dict(model=task.model), state)
    print(f'run     {folder}, step {state["progress"][0]}, {config.masks}\nteacher {task.about}')
    return task, folder

def scaling(options, config, given):
    """Memory and time of a model with the sizes that the flags say; its weights do not matter."""
    c, device = replace(config, vocab_size=config.vocab_size or 256), pick_device(config)[0]
    sizes = {T: memory(c, T, device) for T in options['lengths']}
    return dict(memory=sizes, **time_against_length(c, options['lengths'], device))

def teach(options, config, given):
    """Train the teacher, or find it, and write it as a safetensors file."""
    text = load_text(config)
    rows = config.batch_size * config.grad_accum_steps
    model, about, _ = train_teacher(config, text, rows)
    print(f'teacher {about}, {count(model):,} parameters')
    if options['save'] and RANK == 0:
        metadata = dict(n_head=str(model.config.n_head), tokenizer=text.tokenizer, about=about)
        write_safetensors(options['save'], model.state_dict(), metadata)
        print(f'files   {options["save"]}: {os.path.getsize(options["save"]):,} bytes')
    return dict(about=about, parameters=count(model))

def sample(options, config, given):
    """Teacher and student go on from a prompt, or from the report's seven."""
    length, top_k = options['max_new_tokens'], options['top_k']
    prompts = [options['prompt']] if options['prompt'] is not None else PROMPTS
    if prompts[0].startswith('FILE:'):
        prompts = [Path(prompts[0][5:]).read_bytes().decode('utf-8-sig', errors='replace')]
    usable = 0 <= options['temperature'] < math.inf and top_k >= 0
    if not prompts[0] or length < 1 or not usable:
        fail('--prompt must not be empty, --max-new-tokens at least 1, --temperature and --top-k '
             'at least 0, and finite')
    task, folder = load_run(options, config, given)
    texts = side_by_side(task, prompts, length, options['temperature'], top_k)
    return dict(samples=texts, folder=folder)

@torch.no_grad()
def sensitivity(task):
    """The KL when only one head attends through the masks, weights as the teacher's -> rows."""
    student, rows = substitute(task.teacher, task.config), []
    x = torch.cat([x for x, _ in task.validation(task.config.batch_size)])[:16]
    for block in student.h:
        block.attn.how = 'sdpa'
    for layer, attn in enumerate(block.attn for block in student.h):
        def attend(q, k, v, i, j):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            masked = dense_attention(q, k, v, attn.masks, attn.log_c(q), attn.reading)
            y[:, head] = masked[:, head]
            return y
        row, attn.attend = dict(layer=layer), attend
        for head in range(attn.n_head):
            row[f'head {head}'] = f'{task.kl(student, x).mean().item():.2g}'
        rows.append(row)
        del attn.attend
    return rows

def inspect_masks(options, config, given):
    """Train, with --table or --over every case, and watch the coefficients."""
    runs, many = {}, options['table'] or options['over']
    for name, c in cases_of(options, config).items() if many else [('', config)]:
        task, folder, _ = start(c, given)
        seen, evaluate = [], task.evaluate
        names = [kind if kind == 'all' else f'{kind}:{n}' for kind, n in candidates(c.masks)]
        task.evaluate = lambda: seen.append([a.sigmoid().mean(0).tolist() for a in
                                             task.model.alphas()]) or evaluate()
        result = fit(task, task.config, folder, label=f'{name}: ' * bool(name))
        steps = [step for step, _ in points(result['log'], 'iter', 'val_kl')]
        rows = [dict(iter=step, layer=layer, **dict(zip(names, c_k)))
                for step, layers in zip(steps, seen) for layer, c_k in enumerate(layers)]
        write_csv(folder / 'inspect.csv', rows)
        panels = [(f'coefficients in layer {layer}', 'step', {
            n: points([r for r in rows if r['layer'] == layer], 'iter', n) for n in names})
            for layer in range(task.config.n_layer)]
        files = draw(folder / 'inspect.png', panels)
        print('coefficients sigmoid(alpha), by layer, at the first, the middle and the last step')
        table([r for r in rows if r['iter'] in (steps[0], steps[len(steps) // 2], steps[-1])])
        print('KL when one head alone attends through the masks')
        table(sensitivity(task))
        print(f'files   {folder}: {", ".join(["inspect.csv"] + files)}')
        runs[name] = dict(result, rows=rows)
    return runs if many else runs['']

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

def lengths(text):
    if min(numbers := [int(n) for n in text.split(',')]) < 2:
        raise argparse.ArgumentTypeError('wants numbers from 2 on')
    return numbers

LENGTHS = dict(type=lengths, default='256,512,1024,2048,4096,8192', metavar='N,N,...',
               help='tokens of sequences to be timed [256,512,...,8192]')
ACTIONS.update({
    'report': (measure, {**NEWEST, **OVER, '--length': number(1024, 'tokens of the memory table'),
                         '--lengths': LENGTHS}, 'Measure the five criteria.'),
    'scaling': (scaling, {'--lengths': dict(LENGTHS, default='1024', help='tokens [1024]')},
                'Measure memory and time of a model of any size.'),
    'inspect': (inspect_masks, OVER, 'Train and watch the coefficients.'),
    'teacher': (teach, {'--save': dict(default='', metavar='FILE', help='safetensors file')},
                'Train a teacher.'),
    'sample': (sample, {**NEWEST, '--prompt': dict(help="text, or FILE:path [the report's seven]"),
                        '--max-new-tokens': number(100, 'tokens'),
                        '--temperature': number(0.8, '0 takes the likeliest token'),
                        '--top-k': number(0, 'choose among the k likeliest; 0: among all')},
               'Continue texts, teacher and student side by side.'),
})

if __name__ == '__main__':
    main()
