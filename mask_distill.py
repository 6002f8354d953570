# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "matplotlib"]
# ///
"""A GPT-2 that sees few tokens: masks learned by distillation, and what they cost in quality.

A mask says which tokens a token sees. A report (MA: Optimizing Attention Mechanisms in Transformer
Models; no author named) gives every layer of GPT-2 a weighted sum of masks. Their coefficients c_k
and the attention layers are trained so that this student predicts as its teacher, GPT-2, does.

[choice]: the report does not say, so we chose. [deviation]: we differ from it on purpose. MA does
not number its sections; we count them.

    MA             what                                                      here
    [MA Sec. 3]    W = sum_k c_k M_k with c_k = sigmoid(alpha_k)             mixture
    [MA Sec. 2.1]  KL(P_base || P_custom): training makes it small           token_kl
    [MA Sec. 2.5]  an L1 penalty: the sum of all c_k                         loss_of
    [MA Sec. 2.5]  evaluation without fine-tuning: of the masks alone        print_criteria
    [MA Sec. 2.4]  four goals: accuracy, attention matrices, gradients, KL   CRITERIA, measure
    [MA Sec. 2.4]  the fifth goal: memory                                    experiments/memory.py
    [MA Sec. 3]    figures: the c_k of each layer during training            draw_layers
    [MA Sec. 1.4]  masks for nn.MultiheadAttention                           attn_mask

MA does not say how W enters attention: READINGS has three ways. The default is softmax(S + log W),
where S are the scores. If all c_k are halved, this softmax stays the same. So an L1 penalty lowers
all c_k at no cost in KL, and every alpha keeps falling, as MA observed.

    python mask_distill.py                              # a teacher, then a student: a minute
    python mask_distill.py sample --prompt "def main("  # teacher and student continue a text
    python mask_distill.py criteria                     # judge it on all of the validation text
    python mask_distill.py --masks last5                # another student of the same teacher
    python mask_distill.py teacher --n-layer 6          # train a teacher alone
    python mask_distill.py --preset report004 --resume  # needs prepare_data.py wikitext-2, and gpt2
    python mask_distill.py --help                       # every setting

The student of the first command keeps 48 % of the pairs of tokens. On all of the validation text,
two of four goals are met: accuracy (0.999 times the teacher's) and gradients (cosine 0.984). Two
are missed: KL (0.0105, goal 0.001) and attention matrices. (One seed; the text is Python 3.11's.)
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
import sys
import time
import zlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = Path(__file__).stem
CODE = zlib.crc32(Path(__file__).read_bytes())  # of this file's text: see resume_run

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ MA's method ------------------------------------
# A kind of mask, kind:N in --masks, has two functions. The first gets positions i and j (tensors)
# and N, and says whether token i sees token j; masks_at adds j <= i. Join with & and |, not `and`
# and `or`. The second gives the reach (last, first): only the last `last` and the first `first`
# tokens are shown, so blocked_attention computes no others. None instead of it: there is no limit.
KINDS = {
    'all': (lambda i, j, n: j <= i, None),  # N means nothing. True alone would be no tensor
    'window': (lambda i, j, n: i - j < n, lambda n: (n, 0)),       # the last N
    'offset': (lambda i, j, n: i - j == n, lambda n: (n + 1, 0)),  # the one N tokens back
    'first': (lambda i, j, n: j < n, lambda n: (0, n)),            # the first N
    'sinks': (lambda i, j, n: j < n, lambda n: (0, n)),  # those of the first N that no other shows
    # a kind of your own: 'even': (lambda i, j, n: (j % 2 == 0) | (i - j < n), None),
}
NAMED = {  # [choice] MA's "last token" is the token itself: offset:0
    'all': 'all:1',
    'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4',  # MA's five masks
    'windows': 'window:5+window:10+first:5',                  # its earlier three
    'first-all': 'first:1+all:1',                             # its experiment with L1
}

def parse_masks(masks):
    """'window:64+sinks:4' -> [('window', 64), ('sinks', 4)]."""
    parsed = []
    for term in masks.split('+'):
        kind, _, n = term.partition(':')
        if term in NAMED:
            parsed += parse_masks(NAMED[term])
        elif kind in KINDS and n.isdecimal():
            parsed.append((kind, int(n)))
        else:
            choices = [*(f'{kind}:N' for kind in KINDS), *NAMED]
            fail(f'--masks {masks}: {term!r} is none of {", ".join(choices)}')
    return parsed

def check_masks(masks):
    """If a kind does not work, or a mask is there twice, stop before a teacher is trained."""
    j = torch.arange(1024)
    i = j[:, None]
    parsed = parse_masks(masks)
    for kind, n in parsed:
        if parsed.count((kind, n)) > 1:
            fail(f'--masks {masks}: {kind}:{n} is there twice')
        try:
            formula, reach_of = KINDS[kind]
            mask = formula(i, j, n)
            last, first = reach_of(n) if reach_of else (1024, 0)
        except Exception as error:
            fail(f'--masks {kind}:{n}: its row in KINDS does not work: {error}')
        if not torch.is_tensor(mask) or mask.dtype != torch.bool:
            fail(f'--masks {kind}:{n}: its formula in KINDS must be a tensor, true or false for '
                 'each i and j')
        beyond = mask & (j <= i) & (i - j >= last) & (j >= first)
        if beyond.any():
            fail(f'--masks {kind}:{n}: it shows tokens beyond its reach in KINDS')

def reach(masks):
    """The reach (last, first) of all masks together, or None."""
    kinds = parse_masks(masks)
    if None in [KINDS[kind][1] for kind, _ in kinds]:
        return None
    sizes = [(1, 0), *(KINDS[kind][1](n) for kind, n in kinds)]  # (1, 0): the token itself
    return max(last for last, _ in sizes), max(first for _, first in sizes)

def masks_at(masks, i, j):
    """The K masks M_k, each (..., Tq, T): does token i (..., Tq, 1) see token j (..., 1, T)?"""
    kinds = parse_masks(masks)
    causal = (0 <= j) & (j <= i)  # in blocked_attention, j < 0 is no token
    M = [KINDS[kind][0](i, j, n) & causal for kind, n in kinds]
    shown = torch.zeros_like(causal)  # by any kind but sinks
    for m, (kind, _) in zip(M, kinds):
        if kind != 'sinks':
            shown = shown | m
    # sinks leave out what other kinds show, so that it counts once. All other masks may overlap
    return [m & ~shown if kind == 'sinks' else m for m, (kind, _) in zip(M, kinds)]

def log_coefficients(alpha):
    """alpha (K,) -> log c_k (K,), where c_k = sigmoid(alpha_k).  [MA Sec. 3]
    With L1, c_k can become 0 in float32, so we keep log c_k.
    [choice] A mask whose c_k is less than 1/1000 of the largest c is closed: log c_k = -inf. The KL
    then has no gradient for its alpha. If the largest c falls to 1000 c_k, the mask opens again."""
    log_c = F.logsigmoid(alpha)
    return log_c.masked_fill(log_c < log_c.max() + math.log(1e-3), -math.inf)

def mixture(coefficients, M, i, j):
    """W = sum_k c_k M_k of coefficients (K,) and masks (..., Tq, T) -> (..., Tq, T).  [MA Sec. 3]
    [choice] A token that would see none sees itself."""
    W = sum(c_k * m for c_k, m in zip(coefficients, M))
    sees_some = W.sum(-1, keepdim=True) > 0  # (..., Tq, 1)
    itself = (i == j).to(W.dtype)  # 1 where j is token i itself, else 0
    return torch.where(sees_some, W, itself)

def log_mixture(log_c, M, i, j):
    """log W, with all c_k divided by the largest: no softmax changes, and tiny c_k stay > 0."""
    W = mixture((log_c - log_c.max()).exp(), M, i, j)
    log_W = W.clamp_min(torch.finfo(W.dtype).tiny).log()  # log 0 would have the gradient nan
    return log_W.masked_fill(W == 0, -math.inf)

# A reading is a function of scores S (..., Tq, T), log c (K,), masks_at's M, and the positions i of
# queries and j of keys. It gives attention weights (..., Tq, T): 0 where no M shows a token. S has
# scores of tokens j > i, too: yours must not let them matter. To try it, add a row to READINGS.
def renormalised(S, log_c, M, i, j):
    """softmax(S + log W): rows add up to 1. [choice] This is the default."""
    return F.softmax(S + log_mixture(log_c, M, i, j), -1)

def unnormalised(S, log_c, M, i, j):
    """W * softmax(S): a row lacks the weights of tokens that the masks hide."""
    return mixture(log_c.exp(), M, i, j) * F.softmax(S.masked_fill(j > i, -math.inf), -1)

def separate(S, log_c, M, i, j):
    """sum_k c_k softmax(S on M_k): every mask has a softmax of its own."""
    least = torch.finfo(S.dtype).min  # with -inf a row that shows no token would be nan
    P = [F.softmax(S.masked_fill(~m, least), -1) * m for m in M]
    return mixture(log_c.exp(), P, i, j)  # sum_k c_k P_k

READINGS = {'renormalised': renormalised, 'unnormalised': unnormalised, 'separate': separate}
IN_BLOCKS = {'renormalised', 'separate'}  # they use no score of a hidden token

def attention_weights(q, k, masks, log_c=None, reading='renormalised', i=None, j=None):
    """q (..., Tq, hs), k (..., T, hs) -> attention weights (..., Tq, T). log_c (K,): by default all
    c_k are 1. i (..., Tq), j (..., T): positions of q and k, by default 0, 1, ..."""
    if log_c is None:
        log_c = torch.zeros(len(parse_masks(masks)), device=q.device)
    if i is None:
        i = j = torch.arange(k.size(-2), device=k.device)
    i, j = i[..., None], j[..., None, :]  # (..., Tq, 1), (..., 1, T)
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (..., Tq, T)
    return READINGS[reading](S, log_c, masks_at(masks, i, j), i, j)

def dense_attention(q, k, v, masks, log_c=None, reading='renormalised'):
    """The definition, for any masks, in O(T^2). q, k, v (B, nh, T, hs) -> (B, nh, T, hs)."""
    return attention_weights(q, k, masks, log_c, reading).to(v.dtype) @ v

def blocked_attention(q, k, v, masks, log_c=None, reading='renormalised', block=0):
    """dense_attention, for masks that have a reach, in O(T * window).

    A block of b queries takes b + window - 1 keys near it, and those of the first tokens. With
    b = 3, window = 4 and one first token:
        position  0 1 2 3 4 5 6 7 8
        queries               q q q
        keys      f     k k k k k k
    """
    B, nh, T, hs = q.shape
    window, first = [min(size, T) for size in reach(masks)]
    b = min(T, block or max(16, min(window, 128)))  # queries in a block: about a window
    n = math.ceil(T / b)  # number of blocks
    padding = n * b - T  # after the last token
    # Positions, a row for each block. masks_at hides j < 0: what is before the text
    i = torch.arange(n * b, device=q.device).view(n, b)
    j_near = torch.arange(1 - window, b, device=q.device) + i[:, :1]  # (n, b + window - 1)
    j_first = torch.arange(first, device=q.device).repeat(n, 1)  # (n, first)
    j_first = j_first.masked_fill(j_first >= j_near[:, :1], -1)  # in j_near already: hidden here
    j = torch.cat([j_near, j_first], 1)

    def blocks_of(t):  # keys or values (B, nh, T, hs) -> (B, nh, n, b + window - 1 + first, hs)
        padded = F.pad(t, (0, 0, window - 1, padding))
        near = padded.unfold(2, b + window - 1, b).mT  # pieces of axis 2; unfold moves it last
        firsts = t[:, :, None, :first].expand(-1, -1, n, -1, -1)  # the same for every block
        return torch.cat([near, firsts], 3)

    queries = F.pad(q, (0, 0, 0, padding)).view(B, nh, n, b, hs)
    p = attention_weights(queries, blocks_of(k), masks, log_c, reading, i, j)
    return (p.to(v.dtype) @ blocks_of(v)).view(B, nh, n * b, hs)[:, :, :T]

def blocks_help(masks, reading, T):
    """Whether blocked_attention gives what dense_attention gives, and faster."""
    sizes = reach(masks)
    if reading not in IN_BLOCKS or sizes is None:
        return False
    window, first = sizes
    keys = 2 * max(16, window) + first  # a block takes at most these
    return keys < 0.6 * T  # where it was faster on a CPU

def attn_mask(masks, log_c, T):
    """log W (T, T) for attn_mask of nn.MultiheadAttention: its softmax(S + attn_mask) is the
    default reading.  [MA Sec. 1.4]"""
    j = torch.arange(T, device=log_c.device)
    i = j[:, None]
    return log_mixture(log_c, masks_at(masks, i, j), i, j)

def token_kl(teacher_logits, logits):
    """Logits (B, T, V) -> KL(teacher || student) of each token (B, T), in nats.  [MA Sec. 2.1]"""
    log_p, log_q = F.log_softmax(teacher_logits, dim=-1), F.log_softmax(logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)

@torch.no_grad()
def kept_pairs(masks, alphas, T):
    """The share of the pairs j <= i that tokens see, averaged over layers."""
    shares = []
    for alpha in alphas:
        seen = attn_mask(masks, log_coefficients(alpha), T).isfinite()
        shares.append(seen.sum().item() / (T * (T + 1) / 2))
    return sum(shares) / len(shares)

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --compile, --no-compile. --help prints this.
    A field of yours needs a type: int, float, str, bool, Literal, or float | None (not set).
    A student's model has the values of its teacher (or of --init), except those in STUDENT."""
    # the student, and MA's method
    masks: str = 'window:32+sinks:4'  # kinds, joined by +, or all, last5, windows, first-all
    reading: str = 'renormalised'  # a row of READINGS: how W enters attention
    learn: Literal['attention', 'alphas'] = 'attention'  # train alphas with attention, or alone
    l1: float = 0.0                # weight of MA's penalty on coefficients
    samples: int = 0               # sequences to distil on, drawn with replacement; 0: all the text
    max_iters: int = 150           # optimiser steps
    alpha_lr: float = 0.03         # learning rate of the alphas at its peak
    learning_rate: float = 5e-4    # of attention layers
    warmup_iters: int = 20         # steps up to the peak rates
    init: str = ''                 # teacher's file, of a run or of prepare_data.py; '': train one
    # the teacher, without --init. Its own run calls the first three max_iters, learning_rate and
    # warmup_iters
    teacher_iters: int = 600       # optimiser steps
    teacher_lr: float = 2e-3       # learning rate at its peak
    teacher_warmup: int = 100      # steps until it is there
    n_layer: int = 3               # with --init, these sizes are the file's
    n_head: int = 4
    n_embd: int = 128
    vocab_size: int = 0            # 0: that of the data
    weight_decay: float = 0.1      # AdamW's, on matrices
    # both
    data: str = 'builtin'          # a folder in data/, or builtin: Python's own source
    block_size: int = 128          # tokens in a sequence
    seed: int = 1337               # of weights and batches
    batch_size: int = 16           # sequences per forward pass
    grad_accum_steps: int = 1      # forward passes per step
    min_lr_ratio: float = 0.1      # final cosine rate / peak
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 50        # steps between evaluations and checkpoints; 0: only at the end
    eval_rows: int = 64            # validation sequences, the same ones every time; 0: all
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 0               # CPU threads; 0: PyTorch's choice
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the newest run of the same flags, or start one
    out_dir: str = 'out'           # where runs are written
    # sample, criteria
    folder: str = ''               # a run's folder; default: the newest
    judge_rows: int = 0            # criteria: validation sequences to judge on; 0: all
    prompt: str = '\n'             # text to continue
    new_tokens: int = 100          # in its continuation
    temperature: float = 0.8       # 0 takes the likeliest token

    def __post_init__(self):
        if min(self.n_head, self.batch_size, self.grad_accum_steps, self.block_size) < 1:
            fail('--n-head, --batch-size, --grad-accum-steps and --block-size are 1 or more')
        if self.masks:  # a teacher has ''
            check_masks(self.masks)
        if self.masks and self.reading not in READINGS:
            fail(f'--reading {self.reading} is none of {", ".join(READINGS)}')
        if not self.init and self.n_embd % self.n_head:
            fail(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head}')

CHOICES = {'reading': READINGS}  # flags whose values are the rows of a table
MACHINE = {  # settings that are not in a run's name, and may differ when it is resumed
    'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder', 'judge_rows',
    'prompt', 'new_tokens', 'temperature'}
STUDENT = {  # a student's own settings; its model copies all others from its teacher
    'masks', 'reading', 'learn', 'l1', 'samples', 'max_iters', 'alpha_lr', 'learning_rate',
    'warmup_iters', 'init'}

PRESETS = {
    'tiny': {},  # [choice] Config's masks, and no L1
    't4': dict(masks='window:96+sinks:4', teacher_iters=3000, teacher_lr=1e-3, n_layer=6, n_head=6,
               n_embd=384, block_size=256, data='wikitext-2', max_iters=600, batch_size=8,
               grad_accum_steps=2, learning_rate=1e-4, eval_interval=100),
    # [choice] MA does not give batch size, learning rates, warmup, cosine, clipping, l1. It has "up
    # to 512" tokens. Attention trains, since with alphas alone the loss falls less than MA's.
    # [deviation] samples are drawn with replacement, as batches are
    'report004': dict(masks='last5', l1=1e-3, init='data/weights/gpt2.pt', block_size=512,
                      data='wikitext-2', samples=1000, batch_size=4, grad_accum_steps=2,
                      max_iters=12500,  # 100 epochs of 125 steps
                      learning_rate=1e-4, eval_interval=250),
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
    """GPT-2's attention or, with c.masks, a student's, which has an alpha for each mask."""
    def __init__(self, c):
        super().__init__()
        self.n_head, self.reading = c.n_head, c.reading
        self.c_attn = Conv1D(c.n_embd, 3 * c.n_embd)
        self.c_proj = Conv1D(c.n_embd, c.n_embd)
        self.masks = c.masks or 'all:1'
        self.alpha = None
        if c.masks:  # [choice] all masks start alike, with c_k = 1/2
            self.alpha = nn.Parameter(torch.zeros(len(parse_masks(c.masks))))

    def qkv(self, x):
        """x (B, T, C) -> q, k, v, each (B, nh, T, hs)."""
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, nh, hs)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    @torch.no_grad()
    def weights(self, x):
        """x (B, T, C) -> attention weights (B, nh, T, T)."""
        q, k, _ = self.qkv(x)
        log_c = None if self.alpha is None else log_coefficients(self.alpha)
        return attention_weights(q, k, self.masks, log_c, self.reading)

    def attend(self, q, k, v):  # each (B, nh, T, hs)
        if self.alpha is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        in_blocks = blocks_help(self.masks, self.reading, q.size(2))
        attention = blocked_attention if in_blocks else dense_attention
        return attention(q, k, v, self.masks, log_coefficients(self.alpha), self.reading)

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
    """GPT-2 with the state-dict keys of its published files; with config.masks, a student."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        # These weights follow from seed and name alone, so that what two models share starts equal.
        # Others, such as norms or a layer of yours, keep the values that they were made with.
        for name, p in self.named_parameters():
            if re.search(r'(wte|wpe|c_attn|c_fc|c_proj)\.weight$', name):
                generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
                std = 0.02 / math.sqrt(2 * c.n_layer) if 'c_proj' in name else 0.02
                nn.init.normal_(p, 0.0, std, generator=generator)

    def forward(self, idx, last=False, maps=None):
        """idx (B, T) -> logits (B, T, V) or, if last, of the last position alone (B, 1, V). If maps
        is a list, each layer's attention weights (B, nh, T, T) are appended to it."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))  # (B, T, C)
        for block in self.h:
            if maps is not None:
                maps.append(block.attn.weights(block.ln_1(x)))
            x = block(x)
        x = self.ln_f(x[:, -1:] if last else x)
        # in float32: bfloat16 rounds logits near -100 to steps of 0.5, which adds a KL of 5e-3
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.wte.weight)

    def alphas(self):
        return [block.attn.alpha for block in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0 takes the likeliest token. As in
        nanoGPT, nothing is cached."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:], last=True)[:, -1].float()  # (B, V)
            if temperature > 1e-6:  # if it is smaller, softmax would overflow
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)  # (B, 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, token], dim=1)
        return idx

# ------------------------------------ data ------------------------------------
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
    """c.data -> train and val (tokens), and meta: tokenizer, vocab_size, checksum."""
    if c.data == 'builtin':  # every tenth file of Python's standard library is for validation
        files = sorted(Path(os.__file__).parent.glob('*.py'))
        text = [path.read_text('utf-8', errors='replace').encode() for path in files]
        val = np.frombuffer(b''.join(text[9::10]), np.uint8)
        del text[9::10]
        train = np.frombuffer(b''.join(text), np.uint8)
        meta = dict(tokenizer='bytes', vocab_size=256, checksum=zlib.crc32(train))
    else:
        folder, meta = read_meta(c.data, 'tokens')
        train = np.memmap(folder / 'train.bin', np.uint16, 'r')
        val = np.memmap(folder / 'val.bin', np.uint16, 'r')
    if min(len(train), len(val)) <= c.block_size:
        fail(f'--data {c.data} is shorter than a window of --block-size {c.block_size}')
    return SimpleNamespace(train=train, val=val, meta=meta)

def windows(tokens, starts, c, device):
    """Inputs (B, T) from each start on, and targets (B, T): the token after each. Both int64."""
    rows = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    rows = torch.from_numpy(rows).to(device)  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]

def get_tokenizer(name):
    """encode (text -> ids) and decode (ids -> text). tiktoken downloads gpt2's files once."""
    if name == 'bytes':
        return (lambda text: list(text.encode(errors='replace')),
                lambda ids: bytes(i for i in ids if i < 256).decode(errors='replace'))
    import tiktoken
    try:
        gpt2 = tiktoken.get_encoding('gpt2')
    except OSError:
        raise OSError("tiktoken could not download GPT-2's tokenizer, which it needs once")
    return (lambda text: gpt2.encode(text, allowed_special={'<|endoftext|>'}),
            lambda ids: gpt2.decode([i for i in ids if i < 50257]))  # a padding id has no text

# ------------------------------------ training ------------------------------------
def make_teacher(c, meta):
    """A new GPT-2 on the CPU, for the vocabulary of the data."""
    if 0 < c.vocab_size < meta['vocab_size']:
        fail(f'--vocab-size {c.vocab_size}: the data have {meta["vocab_size"]} tokens')
    return GPT2(replace(c, masks='', vocab_size=c.vocab_size or meta['vocab_size']))

def make_student(teacher, c):
    """A copy of the teacher, with c's masks. --learn says what trains in it."""
    model = GPT2(replace(teacher.config, **{name: getattr(c, name) for name in STUDENT}))
    model.to(teacher.wte.weight)  # its device and dtype
    model.load_state_dict(teacher.state_dict(), strict=False)  # which has no alphas
    part = '.attn.' if c.learn == 'attention' else '.alpha'
    for name, p in model.named_parameters():
        p.requires_grad_(part in name)
    return model

def known(settings):
    """Their Config, without fields that you have removed since."""
    return Config(**{name: x for name, x in settings.items() if hasattr(Config, name)})

def load_pair(path, device='cpu'):
    """A file -> teacher, student (None in a teacher's file) and all that is in the file."""
    saved, student = load(path), None
    try:
        config = saved.get('teacher_config', saved['config'])
        teacher = GPT2(replace(known(config), masks=''))
        teacher.load_state_dict(saved.get('teacher', saved['model']))  # model: in a teacher's file
        if 'teacher' in saved:
            student = GPT2(known(saved['config'])).to(device).eval()
            student.load_state_dict(saved['model'])
    except (KeyError, TypeError, RuntimeError) as error:  # a field, a row, a shape
        fail(f'{path} is of another script, or needs a row, field or shape that is gone: '
             f'{" ".join(str(error).split())[:200]}')
    return teacher.to(device).eval(), student, saved

def train_teacher(c):
    """Train the teacher of c's students, or finish it -> its last metrics, log and folder. Its run
    is named by its settings and by checksums of the data and of this file: so the same command
    finds it, and after an edit a new one is trained (to keep the old: --init its best.pt). To start
    two commands at once, first run the action `teacher`."""
    print(f'teacher a small GPT-2 learns the text in {c.teacher_iters} steps (--teacher-iters)')
    given = {name: x for name, x in asdict(c).items()
             if name not in (STUDENT | MACHINE) and x != getattr(Config, name)}
    given.update(checksum=load_data(c).meta['checksum'], code=CODE)
    unused = {name: getattr(Config, name) for name in STUDENT}
    own = dict(unused, masks='', max_iters=c.teacher_iters, learning_rate=c.teacher_lr,
               warmup_iters=c.teacher_warmup, resume=True)
    return train_and_report(run_folder(replace(c, **own), 'teacher', given))

def find_teacher(c, data):
    """The teacher of c's student: from its checkpoint, from --init or from a teacher's run, which
    is made or finished first."""
    if c.resume:
        file = Path(c.folder, 'ckpt.pt')
    elif c.init:
        file = c.init
    else:
        file = train_teacher(c)['folder'] / 'best.pt'
    teacher, _, _ = load_pair(file)
    sizes = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
                 vocab_size=c.vocab_size or data.meta['vocab_size'])
    for name, size in sizes.items():  # a default counts as not typed: then the file's size is taken
        found = getattr(teacher.config, name)
        if size not in (found, getattr(Config, name)):
            hint = ', that of --data or --vocab-size' * (name == 'vocab_size')
            fail(f'{file} has {name} {found}, not {size}{hint}')
    if c.block_size > teacher.config.block_size:
        fail(f'--block-size {c.block_size}: {file} has {teacher.config.block_size} positions')
    return teacher

def make_optimizer(model, c):
    """AdamW. Only a teacher's matrices decay: a student's should stay near its teacher's."""
    alphas, matrices, others = [], [], []
    for name, p in model.named_parameters():
        if name.endswith('.alpha'):
            alphas.append(p)
        elif p.requires_grad:
            group = matrices if p.dim() == 2 else others
            group.append(p)
    decay = 0.0 if alphas else c.weight_decay  # only a student has alphas
    groups = [dict(params=alphas, peak=c.alpha_lr, weight_decay=0.0),
              dict(params=matrices, peak=c.learning_rate, weight_decay=decay),
              dict(params=others, peak=c.learning_rate, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(0.9, 0.99))

def get_batch(data, c, step, micro_step, device):
    """A micro-batch of a step, the same for every variant and in a resumed run."""
    n = len(data.train) - c.block_size  # places where a sequence fits
    size = c.grad_accum_steps, c.batch_size
    # the last 1 of both seeds means nothing; the runs in experiments/results.md were made with it
    rng = np.random.default_rng([zlib.crc32(b'batch'), c.seed, step, 1])
    drawn = rng.integers(c.samples or n, size=size)[micro_step]
    if c.samples:  # drawn are indices of samples, whose starts are always the same
        rng = np.random.default_rng([zlib.crc32(b'samples'), c.seed, 1])
        drawn = rng.integers(n, size=c.samples)[drawn]
    return windows(data.train, drawn, c, device)

def loss_of(net, teacher, batch, c):
    """A teacher's cross-entropy; a student's KL and L1 on the coefficients [MA Sec. 2.5].
    [deviation] The KL is a mean over tokens. MA's is a sum: with it, the right --l1 and
    --learning-rate would depend on the batch size."""
    x, y = batch  # (B, T) each
    if teacher is None:
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    with torch.no_grad():
        teacher_logits = teacher(x)  # (B, T, V)
    l1 = sum(alpha.sigmoid().sum() for alpha in net.alphas())
    return token_kl(teacher_logits, net(x)).mean() + c.l1 * l1

def validation(data, c, device):
    """Batches of c.eval_rows sequences, spread evenly over the validation text. If that is 0, all
    that fit side by side."""
    last = len(data.val) - c.block_size - 1
    n = c.eval_rows or (len(data.val) - 1) // c.block_size
    starts = np.unique(np.linspace(0, last, n).astype(np.int64))
    for i in range(0, len(starts), c.batch_size):
        yield windows(data.val, starts[i:i + c.batch_size], c, device)

@torch.no_grad()
def evaluate(model, teacher, data, c, device):
    """Loss on the validation sequences, without L1. Of a student also the share of pairs that it
    keeps, and every coefficient: 0.window:32 is that of the mask window:32 in layer 0."""
    c = replace(c, l1=0.0)  # for loss_of
    total = rows = 0
    for x, y in validation(data, c, device):
        total += loss_of(model, teacher, (x, y), c).item() * len(x)
        rows += len(x)
    metrics = dict(val_loss=total / rows)
    if teacher:
        metrics['kept'] = kept_pairs(c.masks, model.alphas(), c.block_size)
        for layer, alpha in enumerate(model.alphas()):
            for (kind, n), c_k in zip(parse_masks(c.masks), alpha.sigmoid().tolist()):
                metrics[f'{layer}.{kind}:{n}'] = c_k
    return metrics

CRITERIA = {  # MA's goals for a student. The figure of a new row goes into measure  [MA Sec. 2.4]
    'accuracy': ('>=', 0.95),  # of the next token, divided by the teacher's
    'cosine': ('>=', 0.95),    # of gradients for c_attn and c_proj; [choice] of the cross-entropy
    'mse': ('<=', 1e-4),       # mean (P - P')^2 over layers, heads and pairs; [choice] those j <= i
    'kl': ('<=', 1e-3),        # KL(teacher || student) in nats, mean over tokens
}

def meets(name, value):
    """Whether a figure meets its goal."""
    sign, limit = CRITERIA[name]
    return value >= limit if sign == '>=' else value <= limit

def look_inside(model, x, y):
    """x and y (B, T) -> log-probabilities (B, T, V), their summed cross-entropy, its gradient for
    c_attn and c_proj of all layers, and every layer's attention weights (B, nh, T, T)."""
    params = [p for name, p in model.named_parameters() if '.attn.c_' in name]
    maps = []
    log_p = F.log_softmax(model(x, maps=maps), dim=-1)
    nll = F.nll_loss(log_p.flatten(0, 1), y.flatten(), reduction='sum')
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(nll, params)])
    return SimpleNamespace(log_p=log_p.detach(), nll=nll.detach(), gradient=gradient, maps=maps)

def measure(model, teacher, batches):
    """How close a student is to its teacher on batches of (x, y), both (B, T): CRITERIA's figures,
    how many meet their goal, and both perplexities.  [MA Sec. 2.4]"""
    nets = [copy.deepcopy(net).requires_grad_() for net in (teacher, model)]  # all have gradients
    tokens = pairs = right = nll = gradient = kl = squares = 0
    for x, y in batches:
        both = [look_inside(net, x, y) for net in nets]
        theirs, ours = both
        tokens += y.numel()
        # of these three, row 0 is the teacher's and row 1 the student's
        right += torch.stack([(net.log_p.argmax(-1) == y).sum() for net in both])
        nll += torch.stack([net.nll for net in both])
        gradient += torch.stack([net.gradient for net in both])
        kl += (theirs.log_p.exp() * (theirs.log_p - ours.log_p)).sum()
        for P, Q in zip(theirs.maps, ours.maps):  # (B, nh, T, T)
            # summed in this order, its digits are those of experiments/results.md
            gap = (P - Q).transpose(1, 2).contiguous()  # (B, T, nh, T)
            squares += gap.square().sum()
            pairs += y.numel() * P.size(1) * (P.size(2) + 1) / 2  # j <= i
    metrics = dict(
        kl=(kl / tokens).clamp_min(0), accuracy=right[1] / right[0].clamp_min(1),
        mse=squares / pairs, cosine=F.cosine_similarity(*gradient, dim=0),
        perplexity=(nll[1] / tokens).exp(), teacher_perplexity=(nll[0] / tokens).exp())
    metrics = {name: value.item() for name, value in metrics.items()}
    metrics['passed'] = sum(meets(name, metrics[name]) for name in CRITERIA)
    return metrics

def get_lr(step, c, peak):
    """The learning rate of a step, counted from 0."""
    if step < c.warmup_iters:
        return peak * ((step + 1) / (c.warmup_iters + 1))  # as in nanoGPT
    left = c.max_iters - step
    done = 1 - left / (c.max_iters - c.warmup_iters)  # from 0 to 1
    cosine = 0.5 * (1 + math.cos(math.pi * done))     # from 1 to 0
    return peak * (c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine)

def train_step(net, teacher, batches, c, optimizer, scaler, autocast):
    """One optimiser step on all micro-batches -> their mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with autocast:
            loss = loss_of(net, teacher, batch, c) / c.grad_accum_steps
        scaler.scale(loss).backward()
        total += loss.detach()
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
                                 '--learning-rate (of a teacher: --teacher-lr), or check any '
                                 'formula you edited')
    return total.item()

def train(c, folder=None, data=None, teacher=None):
    """Train a student as c says or, if c.masks is '', a teacher -> model, log (a list of dicts of
    metrics). Checkpoints and log.csv go to `folder`, if any."""
    device, dtype = pick_device(c)
    data = data or load_data(c)
    if c.masks:
        teacher = (teacher or find_teacher(c, data)).to(device).eval()
    torch.manual_seed(c.seed)  # for layers of your own
    model = (make_student(teacher, c) if c.masks else make_teacher(c, data.meta)).to(device)
    optimizer = make_optimizer(model, c)
    autocast, scaler = mixed_precision(device, dtype)
    net = torch.compile(model) if c.compile else model  # the same parameters
    step, seconds, log, losses = 0, 0.0, [], []
    if c.resume:
        step, seconds, log = resume_run(c, data.meta, model, optimizer, scaler)
    first_step, first_seconds = step, seconds  # of this process, for its pace
    role = f'student with {c.masks}' if teacher else 'teacher'
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f'model   {role}, {size:,} parameters to train, on {device} in {dtype}\n'
          f'data    {c.data}, {len(data.train):,} tokens to train on, {len(data.val):,} held out')
    while True:
        due = step >= c.max_iters or (c.eval_interval and step % c.eval_interval == 0)
        if due and (not log or log[-1]['step'] < step):  # not twice in a resumed run
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            model.eval()
            # without autocast: in bfloat16 the KL of two equal models is 3.7e-4, not 0
            row.update(evaluate(model, teacher, data, c, device))
            if teacher and step >= c.max_iters:
                row.update(measure(model, teacher, validation(data, c, device)))
            model.train()
            if math.isnan(row['val_loss']):
                raise FloatingPointError(f'the validation loss of step {step} is nan: try a lower '
                                         '--learning-rate (of a teacher: --teacher-lr), or check '
                                         'any formula you edited')
            # plain numbers: load would refuse those of NumPy
            log.append({name: float(x) for name, x in row.items()} | dict(step=step))
            losses = []
            weights = dict(model=model.state_dict(), config=asdict(model.config), data=data.meta,
                           code=CODE)
            if teacher:  # a student needs no other file
                weights.update(teacher=teacher.state_dict(), teacher_config=asdict(teacher.config))
            if row['val_loss'] == min(past['val_loss'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            save(folder, 'ckpt.pt', dict(
                weights, settings=asdict(c), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), progress=(step, seconds, log)))
            print(f'step {step}/{c.max_iters}: {"KL to the teacher" if teacher else "val_loss"} '
                  f'{row["val_loss"]:.4g}', flush=True)
        if step >= c.max_iters:
            return model, log

        # one step; seed and step decide its batch, so a resumed run repeats it
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group['lr'] = get_lr(step, c, group['peak'])
        batches = [get_batch(data, c, step, micro_step, device)
                   for micro_step in range(c.grad_accum_steps)]
        losses.append(train_step(net, teacher, batches, c, optimizer, scaler, autocast))
        seconds += time.perf_counter() - start
        step += 1
        if c.log_interval and step % c.log_interval == 0:
            pace = (seconds - first_seconds) / (step - first_step)
            print(f'step {step}/{c.max_iters}: batch loss {losses[-1]:.4g}, {1000 * pace:.0f} ms '
                  f'a step, {(c.max_iters - step) * pace / 60:.1f} min left', flush=True)

# ------------------------------------ report, sample, criteria ------------------------------------
def report(c, model, log, folder, data):
    """Print the result and draw the run. A student and its teacher also write a text."""
    judged = 'KL' if c.masks else 'loss'  # a teacher has no masks
    panels = {'training loss': 'loss', f'validation {judged} (nats per token)': 'val_loss'}
    if not c.masks:
        print(f'\nresult  validation loss {log[-1]["val_loss"]:.3f} nats per token '
              f'(a uniform guess: {math.log(model.config.vocab_size):.3f})')
        draw(draw_curves, folder / 'curves.png', log, panels)
        print(f'files   {folder}, whose best.pt --init takes\n')
        return
    teacher, _, _ = load_pair(folder / 'ckpt.pt', model.wte.weight.device)
    print_criteria(c, model, teacher, data, log[-1])
    draw(draw_curves, folder / 'curves.png', log, panels)
    draw(draw_layers, folder / 'layers.png', log, len(model.h), c.masks)
    try:
        print(write_on(c, teacher, model, data.meta['tokenizer']), '\n')
    except (ImportError, OSError) as error:  # GPT-2's tokenizer needs tiktoken and, once, a network
        print(f'note    no sample: {error}')
    print(f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}\n'
          f'next    python {SCRIPT}.py criteria --folder "{folder}"\n'
          f'        python {SCRIPT}.py sample --folder "{folder}" --prompt TEXT')

def print_criteria(c, model, teacher, data, trained=None):
    """Print MA's goals beside the figures of the masks alone [MA Sec. 2.5] and of the trained
    student, on c.eval_rows sequences -> the student's. `trained`: its log's last row has these."""
    print(f'\ngoals   beside the teacher, whose accuracy counts as 1\n'
          f'{"":20}{"before training":20}trained', flush=True)  # what follows takes its time
    batches = [*validation(data, c, teacher.wte.weight.device)]
    trained = trained or measure(model, teacher, batches)
    alone = measure(make_student(teacher, c).eval(), teacher, batches)
    for name, (sign, limit) in CRITERIA.items():
        row = f'{name:9}{sign} {limit:<8g}'
        for value in alone[name], trained[name]:
            verdict = 'PASS' if meets(name, value) else 'FAIL'
            row += f'{value:<#9.3g}{verdict:11}'
        print(row.rstrip())
    kept = kept_pairs(c.masks, model.alphas(), c.block_size)
    print(f'result  it sees {kept:.0%} of the token pairs: {trained["accuracy"]:.3f} times its '
          f'teacher\'s accuracy, perplexity {trained["perplexity"]:.3f} (the teacher: '
          f'{trained["teacher_perplexity"]:.3f}),\n        {trained["passed"]:.0f} of '
          f'{len(CRITERIA)} goals met, on {sum(len(x) for x, _ in batches)} validation sequences')
    return trained

def draw_layers(path, log, n_layer, masks):
    """MA's figures, turned round: a panel for each mask, a line for each layer's coefficient."""
    from matplotlib import colormaps, figure
    kinds, steps = parse_masks(masks), [row['step'] for row in log]
    page = figure.Figure(figsize=(5 * len(kinds), 4), layout='tight')
    for k, (kind, n) in enumerate(kinds, 1):
        axis = page.add_subplot(1, len(kinds), k, xlabel='step', ylim=(0, 1),
                                title=f'coefficient of the mask {kind}:{n}')
        for layer in range(n_layer):
            axis.plot(steps, [row[f'{layer}.{kind}:{n}'] for row in log], '.-',
                      color=colormaps['viridis'](layer / n_layer), label=f'layer {layer}')
        axis.grid(alpha=0.3)
        axis.legend()
    page.savefig(path)

def write_on(c, teacher, student, tokenizer):
    """How the teacher and, if any, the student continue --prompt from the same seed, as text."""
    encode, decode = get_tokenizer(tokenizer)
    idx = torch.tensor([encode(c.prompt or '\n')], device=teacher.wte.weight.device)  # (1, T)
    nets = {'teacher': teacher, 'student': student} if student else {'teacher': teacher}
    texts = []
    for name, net in nets.items():
        torch.manual_seed(c.seed)
        out = net.generate(idx, c.new_tokens, c.temperature)[0].tolist()
        texts.append(f'\n{name}: {decode(out)}')
    return '\n'.join(texts)

def sample(c):
    """Let teacher and student continue --prompt -> the text."""
    teacher, student, saved = load_run(c)
    text = write_on(c, teacher, student, saved['data']['tokenizer'])
    print(text)
    return text

def criteria(c):
    """Judge a student by MA's goals, on --judge-rows validation sequences -> its figures."""
    teacher, student, saved = load_run(c)
    if student is None:
        fail('that run is a teacher: name a student\'s --folder')
    c = replace(known(saved['settings']), eval_rows=c.judge_rows)  # that run's settings
    data = load_data(c)
    if data.meta['checksum'] != saved['data']['checksum']:
        print('note    that run was trained on other data')
    hint = '' if 0 < c.eval_rows <= 64 else ' (--judge-rows 64 is quicker)'
    print(f'judging on {c.eval_rows or "all"} validation sequences{hint}', flush=True)
    return print_criteria(c, student, teacher, data)

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
    """load_pair of --folder, or of the newest run. It takes the last weights: the best ones were
    chosen on the text that criteria judges on."""
    file = newest(c, 'ckpt.pt')
    print(f'run     {file.parent}')
    teacher, student, saved = load_pair(file, pick_device(c)[0])
    if saved.get('code') != CODE:
        print(f'note    {SCRIPT}.py has changed since that run was trained')
    return teacher, student, saved

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
        print('note    the warmup fills all steps: the rate has no peak')
    model, log = train(c, folder, data)
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
        if zlib.crc32(Path(__file__).read_bytes()) != CODE:
            print(f'note    {SCRIPT}.py was edited after it was imported: restart the notebook')
        action, c = parse(argv)
        if action == 'train' and not c.masks:
            fail("--masks '': a student needs one, such as all (`teacher` trains a GPT-2 alone)")
        if c.threads:
            torch.set_num_threads(c.threads)
        return ACTIONS[action](c)
    except KeyboardInterrupt:
        print('\nstopped; a training command with --resume continues at its last checkpoint')
        raise SystemExit(130)
    except (ImportError, OSError, FloatingPointError) as error:  # no package, disk full, loss nan
        fail(error)

ACTIONS = {'train': train_and_report, 'teacher': train_teacher, 'sample': sample,
           'criteria': criteria}

if __name__ == '__main__':
    if hasattr(sys.stdout, 'reconfigure'):  # a console, which may lack a character
        sys.stdout.reconfigure(errors='replace')
    main(sys.argv[1:])
