# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "matplotlib"]
# ///
"""A GPT-2 that sees few tokens: masks learned by distillation, and what they cost in quality.

The report (MA: Optimizing Attention Mechanisms in Transformer Models; no author named) gives every
layer of GPT-2 a linear combination of candidate masks, and trains this student to predict what its
teacher, the unchanged GPT-2, predicts. Of its five goals, four are about quality and measured here;
experiments/memory.py measures the fifth, memory.

    the report     what                                                  function
    [MA Sec. 3]    W = sum_k c_k M_k with c_k = sigmoid(alpha_k)         mixture, log_coefficients
    [MA Sec. 2.1]  KL(P_base || P_custom)                                token_kl
    [MA Sec. 2.5]  L1, the sum of the c_k                                loss_of
    [MA Sec. 2.4]  accuracy, attention MSE, gradient cosine, KL          CRITERIA, fidelity
    [MA Sec. 3]    its figures: the c_k of a layer during training       draw_layers
    [MA Sec. 1.4]  its masks in nn.MultiheadAttention                    attn_mask

The report does not number its sections; we count them. It does not say how W enters attention:
READINGS has three ways. The default is softmax(scores + log W). There only the ratios of the c_k
matter, so L1 can lower them all at no cost, and every alpha keeps falling, as the report observed.

    python mask_distill.py                              # a teacher, then a student: a minute
    python mask_distill.py --resume                     # continue the newest run, in either stage
    python mask_distill.py --init FILE --masks last5    # another student of the teacher in FILE
    python mask_distill.py sample --prompt "def main("  # teacher and student continue a text
    python mask_distill.py criteria                     # judge it on all of the validation text
    python mask_distill.py teacher --n-layer 6          # train a teacher alone
    python mask_distill.py --preset report004           # the report's experiment, from GPT-2

The first run keeps 48 % of the token pairs, with 1.005 times the teacher's accuracy, KL 0.0102 and
gradient cosine 0.977, and passes 2 of 4 criteria (644,224 parameters, one seed). [choice] marks
where the report is silent, [deviation] where we differ on purpose. Below the banner `runs` is
plumbing, identical in all four scripts.
"""
import argparse
import copy
import csv
import inspect
import io
import json
import math
import os
import re
import shlex
import shutil
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

SCRIPT = 'mask_distill'
TORCHRUN = all(os.environ.get(name)  # elsewhere, some of them may be left over
               for name in ('WORLD_SIZE', 'RANK', 'MASTER_ADDR', 'MASTER_PORT'))
WORLD = int(os.environ['WORLD_SIZE']) if TORCHRUN else 1  # number of processes
RANK = int(os.environ['RANK']) if WORLD > 1 else 0        # index of this one

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the report's method ------------------------------------
KINDS = {  # kind:N in --masks: does token i see token j? (It never sees a later one.)
    # far: the smallest distance i - j beyond every window and offset
    # your own kind is a line: 'stride': lambda i, j, n, far: (i - j) % n == 0,  # i, i - N, ...
    # (it takes O(T^2), unless is_local and window_and_first know it, too)
    'all': lambda i, j, n, far: i >= j,                       # every token, whatever N is
    'window': lambda i, j, n, far: i - j < n,                 # the last N
    'offset': lambda i, j, n, far: i - j == n,                # the one N tokens back
    'first': lambda i, j, n, far: j < n,                      # the first N
    'sinks': lambda i, j, n, far: (i - j >= far) & (j < n),   # the first N, beyond those
}
NAMED = {
    'all': 'all:1',
    'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4',  # the report's five masks
    'windows': 'window:5+window:10+first:5',                  # its earlier three
    'first-all': 'first:1+all:1',                             # its experiment with L1
}

def candidates(masks):
    """'window:64+sinks:4' -> [('window', 64), ('sinks', 4)], which is returned as it is."""
    if isinstance(masks, list):
        return masks
    written_out = '+'.join(NAMED.get(term, term) for term in masks.split('+'))
    pairs = []
    for term in written_out.split('+'):
        kind, _, n = term.partition(':')
        if kind not in KINDS or not n.isdecimal() or (int(n) == 0 and kind != 'offset'):
            choices = [*(f'{kind}:N' for kind in KINDS), *NAMED]
            fail(f'--masks {masks}: {term!r} is none of {", ".join(choices)}')
        pairs.append((kind, int(n)))
    return pairs

def window_and_first(masks):
    """The smallest window that holds all windows and offsets, and the number of first tokens."""
    largest = dict.fromkeys(KINDS, 0)
    for kind, n in masks:
        largest[kind] = max(largest[kind], n)
    return max(largest['window'], largest['offset'] + 1), max(largest['first'], largest['sinks'])

def is_local(masks):
    """Whether all masks hold only near or first tokens, as blocked_attention requires."""
    return all(kind in ('window', 'offset', 'first', 'sinks') for kind, _ in masks)

def log_coefficients(alpha):
    """log c_k of c_k = sigmoid(alpha_k), (K,).  [MA Sec. 3] [choice] A mask is pruned (-inf) while
    its c_k is below a thousandth of the largest. The KL then has no gradient for its alpha."""
    log_c = F.logsigmoid(alpha)
    return log_c.masked_fill(log_c < log_c.max() + math.log(1e-3), -math.inf)

def mixture(coef, M):
    """W = sum_k c_k M_k from coefficients and masks (..., Tq, T) -> (..., Tq, T).  [MA Sec. 3]"""
    return sum(c_k * m for c_k, m in zip(coef, M))

def masks_at(masks, log_c, i, j):
    """The K masks for queries at positions i (..., Tq) and keys at j (..., T), and one more, in
    which a token sees itself if the open masks show it nothing [choice]: each (..., Tq, T)."""
    i, j = i[..., None], j[..., None, :]
    causal = (0 <= j) & (j <= i)  # blocked_attention pads with keys at j < 0
    far, _ = window_and_first(masks)
    M = [KINDS[kind](i, j, n, far) & causal for kind, n in masks]
    seen = sum(m & is_open for m, is_open in zip(M, log_c.isfinite())) > 0
    return [*M, (i == j) & ~seen.any(-1, keepdim=True)]

def log_mixture(M, log_c):
    """log W up to a constant, from masks_at's K + 1 masks; where W is 0, -inf with gradient 0."""
    coef = (log_c - log_c.max()).exp()  # (K,), divided by the largest: they may all underflow
    W = mixture([*coef, coef.max()], M)
    return W.clamp_min(torch.finfo(W.dtype).tiny).log().masked_fill(W == 0, -math.inf)

def coefficients(log_c):
    """The c_k, and for the last mask of masks_at the largest, (K + 1,)."""
    return torch.cat([log_c, log_c.max()[None]]).exp()

def separate_softmaxes(S, M, log_c):
    """sum_k c_k softmax(S on M_k), where a mask without tokens adds nothing."""
    least = torch.finfo(S.dtype).min  # -inf would give such a mask nan
    return mixture(coefficients(log_c), [F.softmax(S.masked_fill(~m, least), -1) * m for m in M])

READINGS = {  # attention weights from scores S (B, nh, Tq, T), masks_at's M, and log_c (K,)
    # [choice] the first is the default: its rows add up to 1
    'renormalised': lambda S, M, log_c: F.softmax(S + log_mixture(M, log_c), -1),
    'unnormalised': lambda S, M, log_c: mixture(coefficients(log_c), M) * F.softmax(S, -1),
    'separate': separate_softmaxes,
}

def attention_weights(q, k, masks, log_c=None, reading='renormalised', i=None, j=None):
    """q (B, nh, Tq, hs) at positions i, k (B, nh, T, hs) at j, both by default 0, 1, ... ->
    (B, nh, Tq, T). log_c (K,): log c_k, by default 0 for every mask."""
    if i is None:
        i = j = torch.arange(k.size(2), device=k.device)
    if log_c is None:
        log_c = torch.zeros(len(masks), device=q.device)
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (B, nh, Tq, T)
    if reading != 'renormalised':  # there log W hides the future
        S = S.masked_fill(i[..., None] < j[..., None, :], -math.inf)
    return READINGS[reading](S, masks_at(masks, log_c, i, j), log_c)

def dense_attention(q, k, v, masks, log_c=None, reading='renormalised'):
    """The definition, for any masks, in O(T^2). q, k, v (B, nh, T, hs) -> (B, nh, T, hs)."""
    return attention_weights(q, k, candidates(masks), log_c, reading).to(v.dtype) @ v

def blocked_attention(q, k, v, masks, log_c=None, block=0):
    """dense_attention for local masks and the default reading, in O(T window).

    A block of b queries sees the keys near it, b + window - 1 of them, and those of the first
    tokens. With b = 3, window = 4 and one first token:
        position  0 1 2 3 4 5 6 7 8
        queries               q q q
        keys      f     k k k k k k
    """
    masks, (B, nh, T, hs) = candidates(masks), q.shape
    window, first = [min(size, T) for size in window_and_first(masks)]
    b = min(block or max(16, min(window, 128)), T)  # queries in a block: by default, about a window
    n = math.ceil(T / b)  # blocks
    padding = n * b - T  # after the last token
    i = torch.arange(n * b, device=q.device).view(n, b)
    j_near = torch.arange(1 - window, b, device=q.device) + i[:, :1]  # (n, b + window - 1)
    j_first = torch.arange(first, device=q.device).repeat(n, 1)  # (n, first)
    # not those that are near, too: -1 is in no mask
    j_first = j_first.masked_fill(j_first >= j_near[:, :1], -1)
    j = torch.cat([j_near, j_first], 1)

    def blocks_of_keys(t):  # (B, nh, T, hs) -> (B, nh, n, b + window - 1 + first, hs)
        near = F.pad(t, (0, 0, window - 1, padding)).unfold(2, b + window - 1, b).mT
        firsts = t[:, :, None, :first].expand(-1, -1, n, -1, -1)
        return torch.cat([near, firsts], 3)

    queries = F.pad(q, (0, 0, 0, padding)).view(B, nh, n, b, hs)
    p = attention_weights(queries, blocks_of_keys(k), masks, log_c, i=i, j=j)
    return (p.to(v.dtype) @ blocks_of_keys(v)).view(B, nh, n * b, hs)[:, :, :T]

def attn_mask(masks, log_c, T):
    """log W, up to a constant, (T, T), for attn_mask of nn.MultiheadAttention: softmax(S + log W)
    is the default reading.  [MA Sec. 1.4]"""
    i = torch.arange(T, device=log_c.device)
    return log_mixture(masks_at(candidates(masks), log_c, i, i), log_c)

def token_kl(teacher_logits, logits):
    """Logits (B, T, V) -> KL(teacher || student) of each token (B, T), in nats.  [MA Sec. 2.1]"""
    log_p, log_q = F.log_softmax(teacher_logits, dim=-1), F.log_softmax(logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)

@torch.no_grad()
def kept_pairs(alphas, masks, T):
    """The share of the T (T + 1) / 2 pairs j <= i that tokens see, averaged over layers."""
    kept = [attn_mask(masks, log_coefficients(alpha), T).isfinite().sum() for alpha in alphas]
    return sum(n.item() / (T * (T + 1) / 2) for n in kept) / len(alphas)

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --compile, --no-compile. --help prints this."""
    # the report's method
    masks: str = 'window:32+sinks:4'  # + joins window:N, offset:N, first:N, sinks:N; or last5, all
    reading: str = 'renormalised'  # or unnormalised, separate: how W enters attention
    learn: str = 'attention'       # alphas: only those; attention: c_attn and c_proj, too
    l1: float = 0.0                # weight of the report's penalty on coefficients
    alpha_lr: float = 0.03         # learning rate of the alphas
    # teacher and model
    stage: str = 'student'         # student, after a teacher if there is no init; or teacher alone
    init: str = ''                 # a run's teacher.pt, a teacher's best.pt, GPT-2; '': train one
    teacher_iters: int = 600       # optimiser steps of a teacher trained here
    teacher_lr: float = 2e-3       # its learning rate at its peak
    n_layer: int = 3               # these five: of a teacher trained here; --init has its own
    n_head: int = 0                # 0: one for every 64 channels, at least 4
    n_embd: int = 128
    positions: int = 0             # 0: as many as block_size
    vocab_size: int = 0            # 0: that of the data's tokenizer
    block_size: int = 128          # tokens in a window
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = 'bytes'       # bytes or gpt2, for text; prepared data come with theirs
    samples: int = 0               # windows to distil on, drawn with replacement; 0: all the text
    # training
    seed: int = 1337               # of weights and batches
    max_iters: int = 150           # a student's optimiser steps
    batch_size: int = 16           # windows per forward pass
    grad_accum_steps: int = 1      # forward passes per step, shared among the processes
    learning_rate: float = 5e-4    # at its peak; of a student's c_attn and c_proj
    min_lr_ratio: float = 0.1      # final cosine rate / learning_rate
    warmup_iters: int = 20         # a student's; a teacher has 100
    weight_decay: float = 0.1      # AdamW's, on a teacher's matrices
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 50        # steps between evaluations, and between checkpoints
    eval_rows: int = 64            # validation windows, the same ones every time; 0: all
    dtype: str = 'auto'            # float32, bfloat16 or float16, for matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 0               # CPU threads; 0: up to four
    log_interval: int = 10         # steps between lines of progress; 0: none
    resume: bool = False           # continue the last run with these settings, or start one
    out_dir: str = 'out'           # where runs are written
    # actions
    folder: str = ''               # sample, criteria, --resume: a run; default: found by settings
    judge_rows: int = 0            # criteria: validation windows to judge on; 0: all
    prompt: str = ''               # text to continue, or FILE:notes.txt; '': the report's seven
    num_samples: int = 1           # sample: continuations
    new_tokens: int = 100          # in each
    temperature: float = 0.8       # 0 takes the likeliest token
    top_k: int = 0                 # only so many likeliest tokens; 0 for all

    def __post_init__(self):
        candidates(self.masks)  # fails where there is no such mask
        if not self.init and self.n_embd % self.heads:
            fail(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.heads}')
        if 0 < self.positions < self.block_size:
            fail(f'--block-size {self.block_size}: the model has only {self.positions} positions')

    @property
    def heads(self):
        return self.n_head or max(4, self.n_embd // 64)

    @property
    def variant(self):  # names folders and curves: add a field of yours to see it there
        masks = self.masks.replace(':', '').replace('+', '-')
        return 'teacher' if self.stage == 'teacher' else f'{masks}-{self.reading}-{self.learn}'

PRESETS = {
    'tiny': {},
    't4': dict(masks='window:96+sinks:4', teacher_iters=3000, teacher_lr=1e-3, n_layer=6,
               n_embd=384, block_size=256, data='wikitext-2', max_iters=600, batch_size=8,
               grad_accum_steps=2, learning_rate=1e-4, eval_interval=100),
    # [choice] batch size, rates (of the alphas, too), warmup, cosine and its floor, clipping,
    # weight of L1; 512 tokens (the report: "up to 512"); and attention is trained, since otherwise
    # the loss does not drop as the report's does
    'report004': dict(masks='last5', l1=1e-3, init='data/weights/gpt2/model.safetensors',
                      n_head=12, block_size=512, data='wikitext-2', samples=1000, batch_size=4,
                      grad_accum_steps=2, max_iters=12500,  # 100 epochs of 125 steps
                      learning_rate=1e-4, eval_interval=250),
}
MACHINE = {  # a resumed run may change these settings
    'max_iters', 'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder',
    'judge_rows', 'prompt', 'num_samples', 'new_tokens', 'temperature', 'top_k'}
CHOICES = {  # what a text may be; one that is not here may be anything
    'reading': READINGS, 'learn': ('alphas', 'attention'), 'stage': ('teacher', 'student'),
    'tokenizer': ('bytes', 'gpt2'), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
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
    """GPT-2's attention, with a fused kernel; a student's has masks, and an alpha for each."""
    def __init__(self, c):
        super().__init__()
        self.n_head = c.heads
        self.c_attn = Conv1D(c.n_embd, 3 * c.n_embd)
        self.c_proj = Conv1D(c.n_embd, c.n_embd)
        self.masks, self.reading, self.alpha = candidates('all'), 'renormalised', None

    def add_masks(self, c):
        self.masks, self.reading = candidates(c.masks), c.reading
        # [choice] all masks start alike, c = 1/2
        self.alpha = nn.Parameter(self.c_attn.bias.new_zeros(len(self.masks)))

    def log_c(self):
        return None if self.alpha is None else log_coefficients(self.alpha)

    def qkv(self, x):
        """x (B, T, C) -> q, k, v, each (B, nh, T, hs)."""
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, nh, hs)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def attend(self, q, k, v):  # each (B, nh, T, hs)
        if self.alpha is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.reading == 'renormalised' and is_local(self.masks):
            return blocked_attention(q, k, v, self.masks, self.log_c())
        return dense_attention(q, k, v, self.masks, self.log_c(), self.reading)

    def forward(self, x):  # (B, T, C)
        y = self.attend(*self.qkv(x))  # (B, nh, T, hs)
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

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT2(nn.Module):
    """GPT-2 with the state-dict keys of its published files."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.teacher = None  # a student has one
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.positions or c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        for name, p in self.named_parameters():
            if name.endswith('.weight') and p.dim() == 2:  # biases and norms stay as they are
                # from its own generator: parameters that models share start equal
                generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
                std = 0.02 / math.sqrt(2 * c.n_layer) if 'c_proj' in name else 0.02
                nn.init.normal_(p, 0.0, std, generator=generator)

    def embed(self, idx):
        """idx (B, T) -> (B, T, C)."""
        return self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))

    def forward(self, idx, last=False):
        """idx (B, T) -> logits (B, T, V) or, if last, of the last position alone (B, 1, V)."""
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x[:, -1:] if last else x)
        # GPT-2's logits are near -100, where bfloat16 rounds to 0.5, which alone is a KL of 5e-3
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.wte.weight)

    def alphas(self):
        return [block.attn.alpha for block in self.h]

    @torch.no_grad()
    def attention_maps(self, idx):
        """idx (B, T) -> yields each layer's attention weights (B, nh, T, T)."""
        x = self.embed(idx)
        for block in self.h:
            attn = block.attn
            q, k, _ = attn.qkv(block.ln_1(x))
            yield attention_weights(q, k, attn.masks, attn.log_c(), attn.reading)
            x = block(x)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0 takes the likeliest token; top_k
        leaves only so many to choose from. As in nanoGPT, nothing is cached."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -len(self.wpe.weight):], last=True)[:, -1].float()  # (B, V)
            if top_k:
                least = logits.topk(min(top_k, logits.size(1))).values[:, [-1]]
                logits[logits < least] = -math.inf
            if temperature > 1e-6:  # below, softmax would overflow
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)  # (B, 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, token], dim=1)
        return idx

def make_student(teacher, c):
    """A copy of the teacher, with masks. --learn says which of its parameters train."""
    model = copy.deepcopy(teacher)
    model.config = c
    for block in model.h:
        block.attn.add_masks(c)
    trained = '.attn.' if c.learn == 'attention' else '.alpha'
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    model.teacher = teacher.requires_grad_(False)  # moved and saved with the student
    return model

# ------------------------------------ data ------------------------------------
def stream(name, *numbers):
    """A separate generator for each purpose. NumPy treats seeds [1, 7] and [1, 7, 0] as equal,
    hence the final 1."""
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers, 1])

VOCAB_SIZE = dict(bytes=256, gpt2=50257)  # of each tokenizer

def get_tokenizer(name):
    """Functions encode, text -> ids, and decode, ids -> text. tiktoken downloads gpt2's once."""
    if name == 'bytes':
        return (lambda text: list(text.encode(errors='replace')),
                lambda ids: bytes(ids).decode(errors='replace'))
    import tiktoken
    gpt2 = tiktoken.get_encoding('gpt2')
    return lambda text: gpt2.encode(text, allowed_special={'<|endoftext|>'}), gpt2.decode

def read_text(c):
    """Training and validation text; the latter is every tenth file, or one file's last tenth."""
    if c.data == 'builtin':
        files = sorted(Path(os.__file__).parent.glob('*.py'))
        texts = [path.read_text('utf-8', errors='replace') for path in files]
        train = [text for i, text in enumerate(texts) if i % 10 != 9]
        return ''.join(train), ''.join(texts[9::10])
    if not Path(c.data).exists():
        fail(f'--data {c.data}: no such file and no folder data/{c.data}; '
             f'`python prepare_data.py {c.data}` may make one; without a name it lists them')
    try:
        text = Path(c.data).read_text('utf-8-sig')
    except UnicodeDecodeError:
        fail(f'--data {c.data} is not text in UTF-8')
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]

def read_tokens(path, tokenizer):
    """A file of uint16 token ids, as nanoGPT writes them. Its first 8 million are checked."""
    if not path.exists():
        fail(f'{path} is missing: for text, name one file, or '
             '`python prepare_data.py text FILE` makes a folder of it')
    try:
        tokens = np.memmap(path, np.uint16, 'r')
    except ValueError as error:  # it is empty, or has an odd number of bytes
        fail(f'{path} does not hold 16-bit ids (uint16): {error}')
    first = tokens[:2 ** 23]
    if first.max() >= VOCAB_SIZE[tokenizer]:
        fail(f'{path} has the id {first.max()}; {tokenizer} has {VOCAB_SIZE[tokenizer]} tokens. '
             'The file must hold 16-bit ids (uint16) without a header')
    if not first[1::2].any():
        fail(f'{path}: every other id is 0, so they seem to have 32 or 64 bits, not 16 (uint16)')
    return tokens

def read_tokenizer(folder):
    """The tokenizer in meta.json, which prepare_data.py writes. Without it gpt2, as in nanoGPT."""
    path = folder / 'meta.json'
    if not path.exists() and (folder / 'meta.pkl').exists():
        fail(f'{folder}/meta.pkl defines its own characters, and a pickle could run code: make '
             'tokens from the text with `python prepare_data.py text FILE --tokenizer bytes`')
    if not path.exists():
        return 'gpt2'
    try:
        name = json.loads(path.read_text('utf-8-sig'))['tokenizer']
    except (ValueError, TypeError, KeyError):
        fail(f'{path} is not a JSON object with a tokenizer')
    if name not in VOCAB_SIZE:
        fail(f'{path} names the tokenizer {name}: it must be bytes or gpt2')
    return name

def load_data(c):
    """c.data -> an object with train and val (uint16 tokens), tokenizer (a name), vocab_size, and
    facts, which a run saves so that --resume recognises its data."""
    folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
    if folder.is_dir():
        tokenizer = read_tokenizer(folder)
        train, val = [read_tokens(folder / name, tokenizer) for name in ('train.bin', 'val.bin')]
    else:
        tokenizer = c.tokenizer
        encode, _ = get_tokenizer(tokenizer)
        train, val = [np.array(encode(text), dtype=np.uint16) for text in read_text(c)]
    if min(len(train), len(val)) <= c.block_size:
        fail(f'--data {c.data} does not fill a window of --block-size {c.block_size}')
    vocab_size = VOCAB_SIZE[tokenizer]
    if 0 < c.vocab_size < vocab_size:
        fail(f'--vocab-size {c.vocab_size}: the vocabulary of {tokenizer} has {vocab_size} tokens')
    ends = np.concatenate([part for t in (train, val) for part in (t[:9999], t[-9999:])])
    facts = dict(tokenizer=tokenizer, vocab_size=vocab_size, train=len(train), val=len(val),
                 checksum=zlib.crc32(ends.tobytes()))
    return SimpleNamespace(train=train, val=val, tokenizer=tokenizer, vocab_size=vocab_size,
                           facts=facts, about=c.data)

# ------------------------------------ training ------------------------------------
GPT2_FORM = dict(  # fields of config.json that change what a model computes, as GPT-2 has them
    activation_function='gelu_new', layer_norm_epsilon=1e-5,
    scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)

def load_gpt2(path, n_head=0):
    """A GPT-2 of any size, from one of our checkpoints or a file saved by transformers. n_head
    is used where neither the checkpoint nor a config.json beside it says how many heads it has."""
    if not Path(path).is_file():
        fail(f'--init {path} is not a file; `python {SCRIPT}.py teacher` trains a small GPT-2, '
             '`python prepare_data.py gpt2` downloads one')
    weights = {name.removeprefix('transformer.'): tensor
               for name, tensor in read_weights(path).items()
               if not name.endswith(('.attn.bias', '.attn.masked_bias'))}  # those are causal masks
    wte, wpe = weights.get('wte.weight'), weights.get('wpe.weight')
    if wte is None or wpe is None:
        fail(f'--init {path} is not a GPT-2: it has no wte.weight, or no wpe.weight')
    if not torch.equal(weights.pop('lm_head.weight', wte), wte):
        fail(f'--init {path}: its lm_head.weight must equal its wte.weight, as in GPT-2')

    config = load_checkpoint(path).get('config', {})
    beside = Path(path).with_name('config.json')
    if not config and beside.exists():
        try:
            config = dict(json.loads(beside.read_text('utf-8')))
        except (ValueError, TypeError):
            fail(f'{beside} is not a JSON object')
    for field, value in GPT2_FORM.items():
        if config.get(field, value) != value:
            fail(f'{path} has {field} {config[field]}: GPT-2, as computed here, has {value}')
    n_head = config.get('n_head', n_head)
    if not n_head:
        fail(f'--init {path} does not say how many heads it has: put its config.json beside it, '
             'or give --n-head, 12 for the smallest GPT-2')
    n_layer = sum(name.startswith('h.') and name.endswith('.ln_1.weight') for name in weights)
    model = GPT2(Config(stage='teacher', n_layer=n_layer, n_head=n_head, n_embd=wte.size(1),
                        positions=len(wpe), block_size=len(wpe), vocab_size=len(wte)))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        fail(f'--init {path} is not a GPT-2: {" ".join(str(error).split())[:200]}')
    return model

def make_model(c, data, teacher=None):
    """A model on the CPU: a new teacher, or a student of `teacher` or of --init's. Its config has
    the teacher's sizes in place of --init, so a saved student needs no other file."""
    c = replace(c, tokenizer=getattr(data, 'tokenizer', c.tokenizer))
    size = c.vocab_size or getattr(data, 'vocab_size', 0)
    if c.init:
        teacher = load_gpt2(c.init, c.n_head)
    if teacher:
        t = teacher.config
        if size not in (0, t.vocab_size):
            fail(f'--init {c.init} has {t.vocab_size} tokens; tokenizer {c.tokenizer} has {size}')
        for name in ('n_layer', 'n_head', 'n_embd'):
            x = getattr(t, name)
            if getattr(c, name) not in (x, getattr(Config, name)):  # a default asks for nothing
                fail(f'--init {c.init} has {name} {x}: give --{name.replace("_", "-")} {x}')
        c = replace(c, init='', n_layer=t.n_layer, n_head=t.n_head, n_embd=t.n_embd,
                    positions=t.positions)
        size = t.vocab_size
    if not size:  # your own arrays do not say
        size = 1 + int(max(np.max(data.train), np.max(data.val)))
        if min(np.min(data.train), np.min(data.val)) < 0:
            fail('your data have ids below 0: leave padding out')
    c = replace(c, vocab_size=size, n_head=c.heads)
    return GPT2(c) if c.stage == 'teacher' else make_student(teacher or GPT2(c), c)

def make_optimizer(model, c):
    """AdamW. Only a teacher's matrices decay: a student's should stay near its teacher's."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    alphas = [p for name, p in trained.items() if name.endswith('.alpha')]
    matrices = [p for p in trained.values() if p.dim() == 2]
    others = [p for name, p in trained.items() if p.dim() != 2 and not name.endswith('.alpha')]
    decay = c.weight_decay if c.stage == 'teacher' else 0.0
    groups = [dict(params=alphas, peak=c.alpha_lr, weight_decay=0.0),
              dict(params=matrices, peak=c.learning_rate, weight_decay=decay),
              dict(params=others, peak=c.learning_rate, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(0.9, 0.99))  # train sets the rates

def windows(tokens, starts, c, device):
    """The tokens from each start on, and those one step later, both (B, T) int64."""
    x = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    x = torch.from_numpy(x).to(device)
    return x[:, :-1], x[:, 1:]

def get_batch(data, c, step, micro, device):
    """A micro-batch of a step, the same for every variant and in a resumed run."""
    n = len(data.train) - c.block_size  # places where a window fits
    size = c.grad_accum_steps, c.batch_size
    drawn = stream('batch', c.seed, step).integers(c.samples or n, size=size)
    if c.samples:
        samples = stream('samples', c.seed).integers(n, size=c.samples)  # the same in every step
        drawn = samples[drawn]
    return windows(data.train, drawn[micro], c, device)

def loss_of(model, batch, c):
    """A teacher's cross-entropy; a student's KL and L1 on the coefficients [MA Sec. 2.5].
    [deviation] The KL is a mean over tokens, not the report's sum, because with a sum the right
    --l1 and --learning-rate would depend on the batch size."""
    x, y = batch  # (B, T) each
    if model.teacher is None:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    with torch.no_grad():
        teacher_logits = model.teacher(x)  # (B, T, V)
    l1 = sum(alpha.sigmoid().sum() for alpha in model.alphas())
    return token_kl(teacher_logits, model(x)).mean() + c.l1 * l1

def validation(data, c, device):
    """Batches of the same c.eval_rows windows every time, spread evenly over the validation text;
    with 0, all that fit side by side."""
    last = len(data.val) - c.block_size - 1
    rows = c.eval_rows or (len(data.val) - 1) // c.block_size
    starts = np.unique(np.linspace(0, last, rows).astype(np.int64))
    for i in range(0, len(starts), c.batch_size):
        yield windows(data.val, starts[i:i + c.batch_size], c, device)

@torch.no_grad()
def evaluate(model, data, c, device):
    """Loss on the validation windows, without L1. Of a student also the share of pairs that it
    keeps, and every coefficient, such as 0.window:32 in layer 0."""
    c = replace(c, l1=0.0)
    total = rows = 0
    for x, y in validation(data, c, device):
        total += loss_of(model, (x, y), c).item() * len(x)
        rows += len(x)
    metrics = dict(val_loss=total / rows)
    if model.teacher:
        metrics['kept'] = kept_pairs(model.alphas(), c.masks, c.block_size)
        for layer, alpha in enumerate(model.alphas()):
            for (kind, n), c_k in zip(candidates(c.masks), alpha.sigmoid().tolist()):
                metrics[f'{layer}.{kind}:{n}'] = c_k
    return metrics

CRITERIA = {  # what the report wants of a student  [MA Sec. 2.4]
    'accuracy': ('>=', 0.95),  # its next-token accuracy / the teacher's
    'cosine': ('>=', 0.95),    # of their gradients for c_attn and c_proj, of [choice] cross-entropy
    'mse': ('<=', 1e-4),       # mean (P - P')^2 over layers, heads and [choice] pairs j <= i
    'kl': ('<=', 1e-3),        # KL(teacher || student) in nats, mean over tokens
}

def passes(name, value):
    sign, limit = CRITERIA[name]
    return value >= limit if sign == '>=' else value <= limit

def forward_backward(model, x, y):
    """Log-probabilities (N, V) at the N targets y that are not -1, and the gradient of the summed
    cross-entropy for all parameters of attention."""
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()
              if name.startswith('h.') and '.attn.c_' in name}
    logits = torch.func.functional_call(model, params, x)
    log_p = F.log_softmax(logits, dim=-1)[y >= 0]
    loss = F.nll_loss(log_p, y[y >= 0], reduction='sum')
    gradient = torch.autograd.grad(loss, list(params.values()))
    return log_p.detach(), torch.cat([g.flatten() for g in gradient])

def fidelity(model, batches):
    """How close a student is to its teacher on batches of (x, y), both (B, T), where y = -1 is
    padding: CRITERIA's metrics and how many pass, and both perplexities.  [MA Sec. 2.4]"""
    tokens = pairs = kl = squared_error = 0
    right, nll, gradient = [0, 0], [0, 0], [0, 0]  # of teacher and student
    for x, y in batches:
        real = y >= 0  # (B, T)
        target = y[real]  # (N,)
        both = [forward_backward(net, x, y) for net in (model.teacher, model)]
        for who, (log_p, g) in enumerate(both):
            right[who] += (log_p.argmax(-1) == target).sum()
            nll[who] += F.nll_loss(log_p, target, reduction='sum')
            gradient[who] += g
        (log_p, _), (log_q, _) = both
        tokens += len(target)
        kl += (log_p.exp() * (log_p - log_q)).sum()
        for teacher_P, P in zip(model.teacher.attention_maps(x), model.attention_maps(x)):
            gap = (teacher_P - P).transpose(1, 2)[real]  # (N, nh, T)
            squared_error += gap.square().sum()
            pairs += gap.size(1) * (real.nonzero()[:, 1] + 1).sum()  # j <= i
    tokens = max(1, tokens)  # the report's edge case: all padding
    teacher_perplexity, perplexity = [(total / tokens).exp() for total in nll]
    metrics = dict(
        kl=(kl / tokens).clamp_min(0), accuracy=right[1] / right[0].clamp_min(1),
        mse=squared_error / pairs.clamp_min(1), cosine=F.cosine_similarity(*gradient, dim=0),
        perplexity=perplexity, teacher_perplexity=teacher_perplexity)
    metrics = {name: value.item() for name, value in metrics.items()}
    metrics['passed'] = sum(passes(name, metrics[name]) for name in CRITERIA)
    return metrics

def learning_rate(step, c, peak):
    """The learning rate of a step, counted from 0."""
    if step < c.warmup_iters:
        factor = (step + 1) / (c.warmup_iters + 1)  # as in nanoGPT
    else:
        done = 1 - (c.max_iters - step) / (c.max_iters - c.warmup_iters)
        cosine = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
        factor = c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine
    return peak * factor

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

def train_teacher(c, folder, data):
    """Train a teacher for a new student, in the student's folder, and keep it as teacher.pt."""
    print('stage 1 of 2: a small GPT-2, the teacher, learns the text (--teacher-iters)')
    teacher, _ = train(replace(c, stage='teacher'), folder, data)
    teacher.zero_grad()  # it stays a part of the student, and clipping would count its gradients
    if folder and RANK == 0:
        shutil.copyfile(Path(folder, 'best.pt'), Path(folder, 'teacher.pt'))
        teacher.load_state_dict(load_checkpoint(Path(folder, 'best.pt'))['model'])
    if WORLD > 1:
        for p in teacher.parameters():
            dist.broadcast(p.data, 0)
    print('\nstage 2 of 2: the student, a copy with masks, learns to predict what it predicts')
    return teacher

def train(c, folder=None, data=None):
    """Train a model as c says -> model, log (a list of dicts of metrics). Checkpoints and log.csv
    go to `folder`, if any. Your own data need two arrays of ids, data.train and data.val, each
    longer than a window. A student without --init gets a teacher first."""
    device, dtype = pick_device(c)
    data, teacher = data or load_data(c), None
    saved = load_checkpoint(Path(c.folder, 'ckpt.pt'))['config'] if c.resume else {}
    if c.stage == 'teacher':
        c = replace(c, init='', max_iters=c.teacher_iters, learning_rate=c.teacher_lr,
                    warmup_iters=100, samples=0)
    elif not c.init and saved.get('stage') != 'student':  # there is no student to resume yet
        teacher = train_teacher(c, folder, data)
        c = replace(c, resume=False)
    torch.manual_seed(c.seed)  # for parameters of your own
    model = make_model(c, data, teacher).to(device)
    facts = dict(getattr(data, 'facts', {}))
    if c.init:
        facts['teacher'] = zlib.crc32(Path(c.init).read_bytes())
    optimizer = make_optimizer(model, c)
    autocast, scaler = mixed_precision(device, dtype)
    net = torch.compile(model) if c.compile else model
    start, seconds, log, losses = 0, 0.0, [], []
    if c.resume:
        start, seconds, log, losses = resume_run(c, model, optimizer, scaler,
                                                 SimpleNamespace(facts=facts))
    before = seconds
    print(f'model   {c.variant}, {count(model):,} parameters, on {device} in {dtype}\n'
          f'data    {getattr(data, "about", "your own")}, {len(data.train):,} tokens to train on, '
          f'{len(data.val):,} held out'
          + (f'\nfolder  {folder}' if folder else '')
          + (f', from step {start}' if start else ''))

    def make(step):  # this process's share of a step's micro-batches
        return [get_batch(data, c, step, micro, 'cpu')
                for micro in range(RANK, c.grad_accum_steps, WORLD)]
    batches = prefetch(make, range(start, c.max_iters), device)
    for step in range(start, c.max_iters + 1):
        if step % c.eval_interval == 0 or step == c.max_iters:
            # save first; a run that is resumed from here evaluates again
            weights = dict(model=model.state_dict(), config=asdict(model.config), data=facts)
            save(folder, 'ckpt.pt', dict(
                weights, optimizer=optimizer.state_dict()['state'], scaler=scaler.state_dict(),
                progress=(step, seconds, log, losses)))
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            # in float32: in bfloat16 a student that equals its teacher has a KL of 3.7e-4
            row.update(evaluate(model.eval(), data, c, device))
            if math.isnan(row['val_loss']):
                raise FloatingPointError(f'validation loss nan at step {step}: try a lower '
                                         '--learning-rate, or check any formula you edited')
            if step == c.max_iters and model.teacher:
                row.update(fidelity(model, validation(data, c, device)))
            log, losses = [*log, row], []
            if row['val_loss'] == min(past['val_loss'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
        if step == c.max_iters:
            break

        # one step; seed and step decide its batches, so a resumed run repeats them
        clock = time.time()
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(step, c, group['peak'])
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

# ------------------------------ report, sample, criteria ------------------------------
def report(c, model, log, folder, data):
    """Print the result beside a reference, and samples; draw the run and the coefficients."""
    print()
    if model.teacher:
        judge(model, data, c)
        try:
            print(side_by_side(c, model, PROMPTS[:2]))
        except (ImportError, OSError) as error:  # GPT-2's tokenizer needs tiktoken and a network
            print(f'note    no samples: {str(error)[:100]}')
        draw_layers(folder / 'layers.png', model, log)
    else:
        print(f'result  validation loss {log[-1]["val_loss"]:.3f} nats per token; a uniform '
              f'guess gets {math.log(model.config.vocab_size):.3f}')
    draw(folder / 'curves.png', {c.stage: log}, [
        ('training loss (nats per token)', 'loss'),
        ('validation loss (nats per token; a student\'s: KL)', 'val_loss')])
    teacher = str(folder / 'best.pt') if not model.teacher else c.init or str(folder / 'teacher.pt')
    c = replace(c, stage='student', init=teacher)
    other = 'last5' if c.masks != 'last5' else 'windows'
    actions = ['criteria', 'sample'] if model.teacher else ['sample']
    files_and_next(c, folder, 'masks', [other, c.masks], *actions)

def draw_layers(path, model, log):
    """The report's figures: the coefficients of every layer over the steps."""
    layers = {}
    for i in range(len(model.h)):
        rows = [{name.removeprefix(f'{i}.'): x for name, x in row.items()} for row in log]
        layers[f'layer {i}'] = rows
    draw(path, layers, [(f'coefficient of the mask {kind}:{n}', f'{kind}:{n}')
                        for kind, n in candidates(model.config.masks)])

def judge(model, data, c):
    """Print the report's criteria for the masks alone and for the trained student, on c.eval_rows
    windows -> the student's metrics."""
    batches = [*validation(data, c, model.wte.weight.device)]
    rows = sum(len(x) for x, _ in batches)
    print(f'judging both, one after the other, on {rows} windows')
    print('the report wants', *(f'{name} {sign} {limit:g}'.rjust(19)
                                for name, (sign, limit) in CRITERIA.items()))
    for case, net in (('mask only', make_student(model.teacher, c)), ('trained', model)):
        metrics = fidelity(net, batches)
        print(f'{case:16}', end='')
        for name in CRITERIA:
            verdict = 'PASS' if passes(name, metrics[name]) else 'FAIL'
            print(f'{metrics[name]:#15.3g} {verdict}', end='')
        print()
    kept = kept_pairs(model.alphas(), c.masks, c.block_size)
    print(f'result  {kept:.0%} of pairs give {metrics["accuracy"]:.3f} times the accuracy; '
          f'{metrics["passed"]} of {len(CRITERIA)} criteria pass, on {rows} windows\n'
          f'        perplexity {metrics["perplexity"]:.3f}, the teacher\'s '
          f'{metrics["teacher_perplexity"]:.3f}')
    return metrics

def criteria(c):
    """Judge a student by the report's criteria, on --judge-rows windows."""
    model, _ = load_run(c, 'ckpt.pt')  # best.pt was chosen on the text used here to judge
    if not model.teacher:
        fail(f'--folder {c.folder} has no student yet: name another, or --resume it')
    return judge(model, load_data(c), replace(c, eval_rows=c.judge_rows))

PROMPTS = [  # the report's, short and longer ones
    'Hello, my name is', 'The meaning of life is', 'In a shocking turn of events,',
    'The future of artificial intelligence',
    'In the year 2157, humanity had finally perfected interstellar travel. The first colony ship, '
    'brimming with hope and thousands of eager settlers',
    'The scientist stared at the glowing vial on the laboratory table, her fingers trembling with '
    'anticipation. After years of relentless experimentation',
    'The detective pushed open the heavy oak door, stepping into a room thick with the scent of '
    'old books and something more sinister—fear']

def side_by_side(c, model, prompts):
    """How teacher and student continue each prompt, from the same seed, as text."""
    tokenizer = model.config.tokenizer
    encode, decode = get_tokenizer(tokenizer)
    nets = dict(teacher=model.teacher, student=model) if model.teacher else dict(teacher=model)
    lines = []
    for prompt in prompts:
        if prompt.startswith('FILE:'):  # as in nanoGPT
            prompt = Path(prompt.removeprefix('FILE:')).read_text('utf-8', 'replace')
        idx = torch.tensor([encode(prompt or '\n')], device=model.wte.weight.device)  # (1, T)
        for name, net in nets.items():
            torch.manual_seed(c.seed)
            for _ in range(c.num_samples):
                out = net.generate(idx, c.new_tokens, c.temperature, c.top_k)[0].tolist()
                text = decode([t for t in out if t < VOCAB_SIZE[tokenizer]])  # not those that pad
                lines.append(f'\n{name}: {text}')
    return '\n'.join(lines)

def sample(c):
    """Let teacher and student continue --prompt or, without it, the report's prompts."""
    model, _ = load_run(c, 'ckpt.pt')
    text = side_by_side(c, model, [c.prompt] if c.prompt else PROMPTS)
    print(text)
    return text

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

ACTIONS = {'train': train_and_report, 'teacher': train_and_report, 'sample': sample,
           'criteria': criteria}
# actions that start a run, and settings they imply; others, and --resume, look for an old one
NEW = {'train': {}, 'teacher': dict(stage='teacher')}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
