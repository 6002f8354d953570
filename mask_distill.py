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

The report does not number its sections; we count them. It does not say how W enters attention:
READINGS has three ways. In the default one only the ratios of the c_k matter, so L1 can lower them
all at no cost, and every alpha keeps falling, as the report observed.

    python mask_distill.py                              # a teacher, then a student: 3 minutes
    python mask_distill.py --resume                     # continue the last run
    python mask_distill.py --init FILE --masks last5    # another student of the teacher in FILE
    python mask_distill.py sample --prompt "def main("  # teacher and student continue a text
    python mask_distill.py criteria --eval-rows 0       # judge the last run on all validation text
    python mask_distill.py teacher --n-layer 6          # train a teacher alone
    python mask_distill.py --preset report004           # the report's experiment, from GPT-2

The first run keeps 48 % of the token pairs, with 1.005 times the teacher's accuracy, KL 0.0102 and
gradient cosine 0.977, and passes 2 of 4 criteria (644,224 parameters, one seed). [choice] marks
where the report is silent, [deviation] where we differ on purpose. You can stop reading at the
banner `runs`: all four scripts share the rest.
"""
import argparse
import copy
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
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

SCRIPT = 'mask_distill'
RANK = int(os.environ.get('RANK', 0))         # index of this process, set by torchrun
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # number of processes, set by torchrun

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the report's method ------------------------------------
KINDS = {  # kind:N in --masks: does token i see token j? (It never sees a later one.)
    # far, which only sinks need, is the smallest i - j that no window or offset reaches
    # your own kind is a line: 'stride': lambda i, j, n, far: (i - j) % n == 0,  # i, i - N, ...
    'all': lambda i, j, n, far: i >= j,                       # every token, whatever N is
    'window': lambda i, j, n, far: i - j < n,                 # the last N
    'offset': lambda i, j, n, far: i - j == n,                # the one N tokens back
    'first': lambda i, j, n, far: j < n,                      # the first N
    'sinks': lambda i, j, n, far: (i - j >= far) & (j < n),   # the first N, where no window reaches
}
NAMED = {
    'all': 'all:1',
    'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4',  # the report's five masks
    'windows': 'window:5+window:10+first:5',                  # its earlier three
    'first-all': 'first:1+all:1',                             # its experiment with L1
}

def candidates(masks):
    """'window:64+sinks:4' -> [('window', 64), ('sinks', 4)]."""
    written_out = '+'.join(NAMED.get(term, term) for term in masks.split('+'))
    found = []
    for term in written_out.split('+'):
        kind, _, n = term.partition(':')
        if kind not in KINDS or not n.isdecimal() or (int(n) == 0 and kind != 'offset'):
            choices = [*(f'{kind}:N' for kind in KINDS), *NAMED]
            fail(f'--masks {masks}: {term!r} is none of {", ".join(choices)}')
        found.append((kind, int(n)))
    return found

def window_and_first(masks):
    """The smallest window that holds all windows and offsets, and the number of first tokens."""
    largest = dict.fromkeys(KINDS, 0)
    for kind, n in candidates(masks):
        largest[kind] = max(largest[kind], n)
    return max(largest['window'], largest['offset'] + 1), max(largest['first'], largest['sinks'])

def is_local(masks):
    """Whether all masks hold only near or first tokens, as blocked_attention requires."""
    return all(kind in ('window', 'offset', 'first', 'sinks') for kind, _ in candidates(masks))

def log_coefficients(alpha):
    """log c_k of c_k = sigmoid(alpha_k), (K,).  [MA Sec. 3] [choice] As no c_k is ever 0, a mask is
    closed (-inf) where its c_k is below a thousandth of the largest."""
    log_c = F.logsigmoid(alpha)
    return log_c.masked_fill(log_c < log_c.max() + math.log(1e-3), -math.inf)

def mixture(coef, M):
    """W = sum_k c_k M_k from K coefficients and masks (..., Tq, T) -> (..., Tq, T).  [MA Sec. 3]"""
    return sum(c_k * m for c_k, m in zip(coef, M))

def masks_at(masks, log_c, i, j):
    """What queries at positions i (..., Tq) see of keys at j (..., T): K + 1 masks (..., Tq, T) and
    their coefficients, divided by the largest, (K + 1,). [choice] The last mask lets a token see
    itself where no open mask does, so that no row is empty."""
    i, j = i[..., None], j[..., None, :]
    causal = (0 <= j) & (j <= i)  # blocked_attention pads with keys at j < 0
    far, _ = window_and_first(masks)
    M = [KINDS[kind](i, j, n, far) & causal for kind, n in candidates(masks)]
    coef = (log_c - log_c.max()).exp()  # (K,)
    itself = (i == j) & (mixture(coef.detach(), M) == 0)
    return [*M, itself], torch.cat([coef, coef.new_ones(1)])

def safe_log(w):
    """log w; where w is 0, -inf with a gradient of 0."""
    return w.clamp_min(torch.finfo(w.dtype).tiny).log().masked_fill(w == 0, -math.inf)

def separate_softmaxes(S, M, coef):
    """sum_k c_k softmax(S on M_k), where a mask without tokens adds nothing."""
    least = torch.finfo(S.dtype).min  # -inf would give such a mask nan
    return sum(c_k * (F.softmax(S.masked_fill(~m, least), -1) * m) for c_k, m in zip(coef, M))

READINGS = {  # attention weights from scores S (B, nh, Tq, T), masks M and coefficients of masks_at
    # [choice] the first is the default: its rows add up to 1
    'renormalised': lambda S, M, coef: F.softmax(S + safe_log(mixture(coef, M)), -1),
    'unnormalised': lambda S, M, coef: mixture(coef, M) * F.softmax(S, -1),
    'separate': separate_softmaxes,
}

def attention_weights(q, k, masks, log_c=None, reading='renormalised', i=None, j=None):
    """q (B, nh, Tq, hs) at positions i, by default the last Tq of T, and k (B, nh, T, hs) at j ->
    (B, nh, Tq, T). log_c (K,): logarithms of the masks' coefficients, by default 0."""
    if i is None:
        j = torch.arange(k.size(2), device=k.device)
        i = j[-q.size(2):]
    if log_c is None:
        log_c = torch.zeros(len(candidates(masks)), device=q.device)
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (B, nh, Tq, T)
    M, coef = masks_at(masks, log_c, i, j)
    if reading != 'renormalised':  # which needs neither: log W hides the future, c's scale cancels
        S = S.masked_fill(i[..., None] < j[..., None, :], -math.inf)
        coef = coef * log_c.max().exp()
    return READINGS[reading](S, M, coef)

def dense_attention(q, k, v, masks='all', log_c=None, reading='renormalised'):
    """The definition, for any masks, in O(T^2). q (B, nh, Tq, hs) of the last Tq tokens, k and v
    (B, nh, T, hs) -> (B, nh, Tq, hs)."""
    return attention_weights(q, k, masks, log_c, reading).to(v.dtype) @ v

def blocked_attention(q, k, v, masks='window:64', log_c=None, block=0):
    """dense_attention for local masks and the default reading, in O(T window).

    A block of b queries sees the keys near it, b + window - 1 of them, and those of the first
    tokens. With b = 3, window = 4 and one first token:
        position  0 1 2 3 4 5 6 7 8
        queries               q q q
        keys      f     k k k k k k
    """
    B, nh, T, hs = q.shape
    window, first = [min(size, T) for size in window_and_first(masks)]
    b = min(block or max(16, min(window, 128)), T)  # queries in a block: by default, about a window
    n = math.ceil(T / b)  # blocks
    padding = n * b - T  # after the last token
    i = torch.arange(n * b, device=q.device).view(n, b)
    near = torch.arange(1 - window, b, device=q.device) + i[:, :1]  # (n, b + window - 1)
    front = torch.arange(first, device=q.device).repeat(n, 1)  # (n, first)
    front = front.masked_fill(front >= near[:, :1], -1)  # near has it, and -1 is in no mask
    j = torch.cat([near, front], 1)

    def blocks_of_keys(t):  # (B, nh, T, hs) -> (B, nh, n, b + window - 1 + first, hs)
        nearby = F.pad(t, (0, 0, window - 1, padding)).unfold(2, b + window - 1, b).mT
        firsts = t[:, :, None, :first].expand(-1, -1, n, -1, -1)
        return torch.cat([nearby, firsts], 3)

    queries = F.pad(q, (0, 0, 0, padding)).view(B, nh, n, b, hs)
    p = attention_weights(queries, blocks_of_keys(k), masks, log_c, i=i, j=j)
    return (p.to(v.dtype) @ blocks_of_keys(v)).view(B, nh, n * b, hs)[:, :, :T]

def token_kl(teacher_logits, logits):
    """Logits (B, T, V) -> KL(teacher || student) of each token (B, T), in nats.  [MA Sec. 2.1]"""
    log_p, log_q = F.log_softmax(teacher_logits, dim=-1), F.log_softmax(logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)

@torch.no_grad()
def kept_pairs(alphas, masks, T):
    """The share of the T (T + 1) / 2 pairs j <= i that open masks hold, averaged over layers."""
    shares = []
    i = torch.arange(T, device=alphas[0].device)
    for alpha in alphas:
        M, coef = masks_at(masks, log_coefficients(alpha), i, i)
        shares.append((mixture(coef, M) > 0).sum().item() / (T * (T + 1) / 2))
    return sum(shares) / len(shares)

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --compile, --no-compile. --help prints this."""
    # the report's method
    masks: str = 'window:32+sinks:4'  # window:N, offset:N, first:N, sinks:N, or in NAMED; join by +
    reading: str = 'renormalised'  # a name in READINGS: how the masks enter attention
    learn: str = 'attention'       # alphas: only those; attention: c_attn and c_proj, too
    l1: float = 0.0                # weight of the report's penalty on coefficients
    alpha_lr: float = 0.03         # learning rate of the alphas
    # teacher and model
    stage: str = 'student'         # student or teacher: which is trained; the action sets it
    init: str = ''                 # a teacher's best.pt or a GPT-2's weights; '': train one first
    teacher_iters: int = 600       # optimiser steps of a teacher trained here
    teacher_lr: float = 2e-3       # its learning rate at its peak
    n_layer: int = 3               # from here to vocab_size: sizes of a teacher trained here
    n_head: int = 0                # 0: one for every 64 channels, at least 4
    n_embd: int = 128
    positions: int = 0             # 0: as many as block_size
    vocab_size: int = 0            # 0: that of the data's tokenizer
    block_size: int = 128          # tokens in a sequence
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = 'bytes'       # bytes or gpt2, for text; prepared data come with theirs
    samples: int = 0               # sequences to distil on, drawn with replacement; 0: all the text
    # training
    seed: int = 1337               # of weights and batches
    max_iters: int = 150           # optimiser steps
    batch_size: int = 16           # sequences in memory at once, shared among the processes
    grad_accum_steps: int = 1      # batches per optimiser step
    learning_rate: float = 5e-4    # at its peak; of a student's c_attn and c_proj
    min_lr_ratio: float = 0.1      # final cosine rate / learning_rate
    warmup_iters: int = 20
    weight_decay: float = 0.1      # AdamW's, on a teacher's matrices
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 50        # steps between evaluations, and between checkpoints
    eval_rows: int = 64            # validation sequences, the same ones every time; 0: all
    dtype: str = 'auto'            # float32, bfloat16 or float16, for matmuls
    # machine: from here on, settings may change when a run is resumed
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0 for PyTorch's default
    log_interval: int = 10         # steps between lines of progress
    resume: bool = False           # continue --folder or the last run; if there is none, start one
    out_dir: str = 'out'           # where runs are written
    # actions
    folder: str = ''               # sample, criteria, --resume: a run's folder; default: the last
    prompt: str = ''               # sample: a text to continue; default: four of the report's
    new_tokens: int = 100          # sample
    temperature: float = 0.8       # sample: 0 takes the likeliest token

    def __post_init__(self):
        candidates(self.masks)  # fails where there is no such mask
        if not self.init and self.n_embd % self.heads:
            fail(f'--n-embd {self.n_embd} must be a multiple of --n-head {self.heads}')

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
    # [choice] batch size, learning rates, weight of L1; 512 tokens (the report: "up to 512"); and
    # attention is trained, since otherwise the loss does not drop as the report's does
    'report004': dict(masks='last5', l1=1e-3, init='data/weights/gpt2/model.safetensors',
                      n_head=12, block_size=512, data='wikitext-2', samples=1000, batch_size=4,
                      grad_accum_steps=2, max_iters=12500,  # 100 epochs of 125 steps
                      learning_rate=1e-4, eval_interval=250, threads=0),
}
# smallest and largest values; where none is given, 0 and no limit
LOWEST = dict.fromkeys(('n_layer', 'n_embd', 'block_size', 'batch_size', 'grad_accum_steps',
                        'eval_interval', 'log_interval'), 1)
HIGHEST = dict(min_lr_ratio=1)
CHOICES = {
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
        self.masks, self.reading, self.alpha = 'all', 'renormalised', None

    def attend(self, q, k, v, maps=None):
        """q (B, nh, Tq, hs), k and v (B, nh, T, hs) -> like q. Tq is T or, with a cache, 1."""
        whole = q.size(2) == k.size(2)  # a single query is the newest token's and sees every key
        log_c = None if self.alpha is None else log_coefficients(self.alpha)
        if maps is not None:
            with torch.no_grad():
                maps.append(attention_weights(q, k, self.masks, log_c, self.reading))
        if self.alpha is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=whole)
        if whole and self.reading == 'renormalised' and is_local(self.masks):
            return blocked_attention(q, k, v, self.masks, log_c)
        return dense_attention(q, k, v, self.masks, log_c, self.reading)

    def forward(self, x, cache=None, maps=None):
        """x (B, T, C) -> like x. A cache, {} at first, keeps k and v."""
        qkv = self.c_attn(x).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        if cache:  # {} is false: nothing to join yet
            k, v = torch.cat([cache['k'], k], 2), torch.cat([cache['v'], v], 2)
        if cache is not None:
            cache.update(k=k, v=v)
        y = self.attend(q, k, v, maps)  # (B, nh, T, hs)
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

    def forward(self, idx, cache=None, maps=None, last=False):
        """idx (B, T) -> logits (B, T, V) or, if last, (B, 1, V). cache: a dict for each layer.
        maps: a list that gets every layer's attention weights (B, nh, T, T)."""
        past = cache[0]['k'].size(2) if cache and cache[0] else 0
        x = self.wte(idx) + self.wpe(torch.arange(past, past + idx.size(1), device=idx.device))
        for i, block in enumerate(self.h):
            x = block(x, cache[i] if cache else None, maps)
        x = self.ln_f(x[:, -1:] if last else x)
        # GPT-2's logits are near -100, where bfloat16 rounds to 0.5, which alone is a KL of 5e-3
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.wte.weight)

    def alphas(self):
        return [block.attn.alpha for block in self.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0):
        """idx (B, T) -> (B, T + max_new_tokens); temperature 0 takes the likeliest token."""
        unread, cache = idx, [{} for _ in self.h]  # each layer's keys and values
        positions = len(self.wpe.weight)
        for _ in range(max_new_tokens):
            if idx.size(1) > positions:
                # the window slides, so all positions change and no cached key or value holds
                unread, cache = idx[:, -positions:], None
            logits = self(unread, cache, last=True)[:, -1]  # (B, V)
            if temperature:
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)  # (B, 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, token], dim=1)
            unread = token
        return idx

def substitute(teacher, c):
    """A student: a copy of the teacher, with masks. --learn says which of its parameters train."""
    model = copy.deepcopy(teacher)
    model.config = c
    for block in model.h:
        block.attn.masks, block.attn.reading = c.masks, c.reading
        alpha = model.wte.weight.new_zeros(len(candidates(c.masks)))
        block.attn.alpha = nn.Parameter(alpha)  # [choice] all masks start alike, c = 1/2
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

VOCAB_SIZE = dict(bytes=256, gpt2=50257)  # tokenizer -> number of its tokens

def get_tokenizer(name):
    """Functions encode, text -> ids, and decode, ids -> text. tiktoken downloads gpt2's once."""
    if name == 'bytes':
        return lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors='replace')
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
    if not Path(c.data).is_file():
        fail(f'--data {c.data}: no such file and no folder data/{c.data}; '
             f'`python prepare_data.py {c.data}` may make one; without a name it lists all')
    try:
        text = Path(c.data).read_text('utf-8-sig')
    except UnicodeDecodeError:
        fail(f'--data {c.data} is not text in UTF-8')
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]

def read_tokens(path, tokenizer):
    """A file of uint16 token ids, as nanoGPT writes them. Its first 8 million are checked."""
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

def read_meta(folder):
    """meta.json, which prepare_data.py writes. Without it, tokens are GPT-2's, as in nanoGPT."""
    path = folder / 'meta.json'
    if not path.exists() and (folder / 'meta.pkl').exists():
        fail(f'{folder}/meta.pkl defines its own characters, and a pickle could run code: make '
             'tokens from the text with `python prepare_data.py text FILE --tokenizer bytes`')
    if not path.exists():
        return dict(tokenizer='gpt2')
    try:
        meta = dict(json.loads(path.read_text('utf-8')))
    except (ValueError, TypeError):
        fail(f'{path} is not a JSON object')
    if meta.get('tokenizer') not in VOCAB_SIZE:
        fail(f'{path} names the tokenizer {meta.get("tokenizer")}: it must be bytes or gpt2')
    return meta

def load_data(c):
    """c.data -> train and val (uint16 tokens), their tokenizer, the size of its vocabulary."""
    folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
    if folder.is_dir():
        tokenizer = read_meta(folder)['tokenizer']
        train, val = [read_tokens(folder / name, tokenizer) for name in ('train.bin', 'val.bin')]
    else:
        tokenizer = c.tokenizer
        encode, _ = get_tokenizer(tokenizer)
        train, val = [np.array(encode(text), dtype=np.uint16) for text in read_text(c)]
    if min(len(train), len(val)) <= c.block_size + 1:
        fail(f'--data {c.data} does not fill a sequence of --block-size {c.block_size}')
    vocab_size = VOCAB_SIZE[tokenizer]
    if c.vocab_size not in (0, vocab_size):
        fail(f'--vocab-size {c.vocab_size}: the vocabulary of {tokenizer} has {vocab_size} tokens')
    return SimpleNamespace(train=train, val=val, tokenizer=tokenizer, vocab_size=vocab_size,
                           about=c.data)

# ------------------------------------ training ------------------------------------
GPT2_FORM = dict(  # fields of config.json that change what a model computes, as GPT-2 has them
    activation_function='gelu_new', layer_norm_epsilon=1e-5,
    scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)

def heads_of(path, n_head):
    """The number of heads, which weights do not show: our checkpoints say it, for other files
    config.json does, and otherwise it is n_head. A config.json of another model is refused."""
    about = load_checkpoint(path, foreign=True).get('config', {})
    beside = Path(path).with_name('config.json')
    if not about and beside.exists():
        about = json.loads(beside.read_text('utf-8'))
    for field, value in GPT2_FORM.items():
        if about.get(field, value) != value:
            fail(f'{beside} has {field} {about[field]}: GPT-2, as computed here, has {value}')
    heads = about.get('n_head', n_head)
    if not heads:
        fail(f'--init {path} does not say how many heads it has: put its config.json beside it, '
             'or give --n-head, 12 for the smallest GPT-2')
    return heads

def load_gpt2(path, n_head=0):
    """A GPT-2 of any size, from one of our checkpoints or a file saved by transformers."""
    if not Path(path).is_file():
        fail(f'--init {path} is not a file; `python {SCRIPT}.py teacher` trains a small GPT-2, '
             '`python prepare_data.py gpt2` downloads one')
    weights = {name.removeprefix('transformer.'): tensor
               for name, tensor in read_weights(path).items()
               if not name.endswith(('.attn.bias', '.attn.masked_bias'))}  # these are causal masks
    if 'wte.weight' not in weights or 'wpe.weight' not in weights:
        fail(f'--init {path} is not a GPT-2: it has no wte.weight, or no wpe.weight')
    wte, wpe = weights['wte.weight'], weights['wpe.weight']
    if not torch.equal(weights.pop('lm_head.weight', wte), wte):
        fail(f'--init {path}: its lm_head.weight must equal its wte.weight, as in GPT-2')
    n_layer = sum(name.startswith('h.') and name.endswith('.ln_1.weight') for name in weights)
    model = GPT2(Config(stage='teacher', n_layer=n_layer, n_head=heads_of(path, n_head),
                        n_embd=wte.size(1), positions=len(wpe), vocab_size=len(wte)))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        fail(f'--init {path} is not a GPT-2: {" ".join(str(error).split())[:200]}')
    return model

def make_model(c, data):
    """A model on the CPU: a new teacher, or a student of --init's teacher. Its config is c with the
    tokenizer of the data and the sizes of the teacher. Without data, c is saved and has them."""
    c = replace(c, tokenizer=getattr(data, 'tokenizer', c.tokenizer))  # your own data may not say
    if c.stage == 'teacher':
        return GPT2(replace(c, vocab_size=c.vocab_size or data.vocab_size, n_head=c.heads))
    if c.resume or not data:  # the caller then loads the weights of both from a checkpoint
        return substitute(GPT2(c), c)
    teacher = load_gpt2(c.init, c.n_head)
    t = teacher.config
    V = getattr(data, 'vocab_size', t.vocab_size)
    if V != t.vocab_size or t.positions < c.block_size:
        fail(f'--init {c.init} has {t.vocab_size} tokens and {t.positions} positions; tokenizer '
             f'{c.tokenizer} needs {V} tokens, and --block-size {c.block_size} as many positions')
    sizes = {name: getattr(t, name) for name in ('n_layer', 'n_head', 'n_embd', 'positions')}
    for name, size in sizes.items():
        if getattr(c, name) not in (size, getattr(Config, name)):  # a default asks for nothing
            fail(f'--init {c.init} has {name} {size}: give --{name.replace("_", "-")} {size}')
    return substitute(teacher, replace(c, vocab_size=t.vocab_size, **sizes))

def make_optimizer(model, c):
    """AdamW. Only a teacher's matrices decay: a student's should stay near its teacher's."""
    groups = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            lr = c.alpha_lr if name.endswith('alpha') else c.learning_rate
            decay = c.weight_decay if c.stage == 'teacher' and p.dim() == 2 else 0.0
            groups.append(dict(params=[p], lr=lr, peak=lr, weight_decay=decay))
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))

def sequences(tokens, starts, c, device):
    """The tokens from each start on, and those one step later, both (B, T) int64."""
    x = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    x = torch.from_numpy(x).to(device)
    return x[:, :-1], x[:, 1:]

def get_batch(data, c, step, micro, device):
    """This process's rows of a micro-batch, the same for every variant and in a resumed run."""
    n = len(data.train) - c.block_size  # places where a sequence fits
    size = c.grad_accum_steps, c.batch_size
    drawn = stream('batch', c.seed, step).integers(c.samples or n, size=size)
    if c.samples:
        samples = stream('samples', c.seed).integers(n, size=c.samples)  # the same in every step
        drawn = samples[drawn]
    return sequences(data.train, drawn[micro, RANK::WORLD], c, device)

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
    """Batches of the same c.eval_rows sequences every time, spread evenly over the validation text;
    with 0, all that fit side by side."""
    last = len(data.val) - c.block_size - 1
    rows = c.eval_rows or (len(data.val) - 1) // c.block_size
    starts = np.unique(np.linspace(0, last, rows).astype(np.int64))
    for i in range(0, len(starts), c.batch_size):
        yield sequences(data.val, starts[i:i + c.batch_size], c, device)

@torch.no_grad()
def evaluate(model, data, c, device):
    """Loss on the validation sequences, without L1; for a student also the share of pairs that it
    keeps and every coefficient, such as 0.window:32 for layer 0."""
    c = replace(c, l1=0.0)
    total = rows = 0
    # float32: under autocast to bfloat16 a student that equals its teacher has a KL of 3.7e-4
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
    'cosine': ('>=', 0.95),    # of their gradients for c_attn and c_proj, of [choice] cross-entropy
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
              if name.startswith('h.') and '.attn.c_' in name}
    maps = []
    logits = torch.func.functional_call(model, params, x, dict(maps=maps))
    log_p = F.log_softmax(logits, dim=-1)[y >= 0]
    loss = F.nll_loss(log_p, y[y >= 0], reduction='sum')
    gradient = torch.autograd.grad(loss, list(params.values()))
    return log_p.detach(), maps, torch.cat([g.flatten() for g in gradient])

def fidelity(model, batches):
    """How close a student is to its teacher on batches of (x, y), both (B, T), where y = -1 is
    padding: CRITERIA's figures and how many pass, and both perplexities.  [MA Sec. 2.4]"""
    tokens = pairs = kl = squared_error = 0
    right, nll, gradient = [0, 0], [0, 0], [0, 0]  # of teacher and student
    for x, y in batches:
        real = y >= 0  # (B, T)
        target = y[real]  # (N,)
        both = [forward_backward(net, x, y) for net in (model.teacher, model)]
        for who, (log_p, _, g) in enumerate(both):
            right[who] += (log_p.argmax(-1) == target).sum()
            nll[who] += F.nll_loss(log_p, target, reduction='sum')
            gradient[who] += g
        (log_p, teacher_maps, _), (log_q, maps, _) = both
        tokens += len(target)
        kl += (log_p.exp() * (log_p - log_q)).sum()
        for teacher_P, P in zip(teacher_maps, maps):
            gap = (teacher_P - P).transpose(1, 2)[real]  # (N, nh, T)
            squared_error += gap.square().sum()
            pairs += gap.size(1) * (real.nonzero()[:, 1] + 1).sum()  # j <= i
    tokens = max(1, tokens)  # a batch may be all padding
    teacher_perplexity, perplexity = [(total / tokens).exp() for total in nll]
    figures = dict(
        kl=(kl / tokens).clamp_min(0), accuracy=right[1] / right[0].clamp_min(1),
        mse=squared_error / pairs.clamp_min(1), cosine=F.cosine_similarity(*gradient, dim=0),
        perplexity=perplexity, teacher_perplexity=teacher_perplexity)
    figures = {name: value.item() for name, value in figures.items()}
    figures['passed'] = sum(passes(name, figures[name]) for name in CRITERIA)
    return figures

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
    """One optimiser step on all micro-batches -> mean loss, gradient norm before clipping."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with autocast:
            loss = loss_of(net, batch, c) / (c.grad_accum_steps * WORLD)
        scaler.scale(loss).backward()
        total += loss.detach()
    if WORLD > 1:  # sum over the processes
        for tensor in [total, *(p.grad for p in net.parameters() if p.grad is not None)]:
            dist.all_reduce(tensor)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip or math.inf)
    scaler.step(optimizer)  # in float16, a step whose gradients overflowed is skipped
    scaler.update()
    return total.item(), norm.item()

def train(c, folder=None, data=None):
    """Train a model as c says -> model, log (a list of dicts of figures). Checkpoints and log.csv
    go to `folder`, if any. Your own data need two arrays of ids, data.train and data.val."""
    device, dtype = pick_device(c)
    data = data or load_data(c)
    torch.manual_seed(c.seed)  # for parameters of your own
    model = make_model(c, data).to(device)
    optimizer = make_optimizer(model, c)
    autocast, scaler = mixed_precision(device, dtype)
    net = torch.compile(model) if c.compile else model
    start, seconds, log, losses = 0, 0.0, [], []
    if c.resume:
        saved = load_checkpoint(Path(folder, 'ckpt.pt'))
        model.load_state_dict(saved['model'])
        # only its moments: weight decay and the like are those of c
        optimizer.load_state_dict({**optimizer.state_dict(), 'state': saved['optimizer']})
        if saved['scaler']:  # it was trained in float16
            scaler.load_state_dict(saved['scaler'])
        start, seconds, log, losses = saved['progress']
    print(f'model   {c.variant}, {count(model):,} parameters, on {device} in {str(dtype)[6:]}\n'
          f'data    {getattr(data, "about", "your own")}, {len(data.train):,} tokens to train on, '
          f'{len(data.val):,} held out\n'
          f'folder  {folder}' + (f', from step {start}' if start else ''))

    for step in range(start, c.max_iters + 1):
        if step % c.eval_interval == 0 or step == c.max_iters:
            # save first; a run that is resumed from here evaluates again
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict()['state'],
                         scaler=scaler.state_dict(), config=asdict(model.config),
                         progress=(step, seconds, log, losses))
            save(folder, 'ckpt.pt', state)
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            with autocast:
                row.update(evaluate(model.eval(), data, c, device))
            if step == c.max_iters and model.teacher:
                row.update(fidelity(model, validation(data, c, device)))
            log, losses = [*log, row], []
            best = min(past['val_loss'] for past in log)  # this row included
            if row['val_loss'] <= best or math.isnan(best):
                save(folder, 'best.pt', state)
            write_log(folder, log)
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
        if step == c.max_iters:
            break

        # one step; seed and step decide its batches, so a resumed run repeats them
        clock = time.time()
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(step, c, group['peak'])
        batches = (get_batch(data, c, step, micro, device) for micro in range(c.grad_accum_steps))
        loss, norm = train_step(net.train(), batches, c, optimizer, scaler, autocast)
        # in float16, a step that overflows is skipped and halves the scale, down to 1
        overflow = not math.isfinite(norm) and scaler.get_scale() > 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or overflow):
            raise FloatingPointError(f'loss {loss:g}, gradient norm {norm:g} in step {step}: try a '
                                     'lower --learning-rate, or check any formula you edited')
        losses.append(loss)
        seconds += time.time() - clock
        done = step + 1
        if done % c.log_interval == 0:
            pace = seconds / done
            print(f'step {done}/{c.max_iters} ({done / c.max_iters:.0%}), batch loss {loss:.4f}, '
                  f'{1000 * pace:.0f} ms a step, {(c.max_iters - done) * pace / 60:.1f} min left',
                  flush=True)
    return model, log

# -------------------------- teacher, report, sample, criteria --------------------------
TEACHERS = SCRIPT + '-teacher'  # where teachers go, under out/

def as_teacher(c):
    """Settings for training a teacher: a plain GPT-2 that learns the text."""
    return replace(c, stage='teacher', init='', max_iters=c.teacher_iters, warmup_iters=100,
                   learning_rate=c.teacher_lr, samples=0)

def train_student(c):
    """Train a student of --init's teacher or, without --init, a teacher first."""
    if not c.init and not c.resume:
        print('stage 1 of 2: a small GPT-2, the teacher, learns the text')
        folder = [train_and_report(as_teacher(c), TEACHERS)['folder']]
        if WORLD > 1:
            dist.broadcast_object_list(folder)  # only the first process knows it
        print('\nstage 2 of 2: the student, a copy with masks, learns to predict what it predicts')
        c = replace(c, init=str(folder[0] / 'best.pt'))
    return train_and_report(c)

def train_teacher(c):
    """Train a teacher alone."""
    if c.resume and c.stage != 'teacher':
        fail(f'{c.folder} is a student\'s: name the teacher\'s with --folder')
    return train_and_report(c if c.resume else as_teacher(c), TEACHERS)

def report(c, model, log, folder, data):
    """The result beside a baseline, as text; and pictures of the run and of its layers."""
    what = 'KL from the teacher' if model.teacher else 'loss'
    draw(folder / 'curves.png', {c.stage: log}, [
        ('training loss (nats per token)', 'loss'),
        (f'validation {what} (nats per token)', 'val_loss')])
    if not model.teacher:
        return (f'result  validation loss {log[-1]["val_loss"]:.3f} nats per token; a uniform '
                f'guess gets {math.log(model.config.vocab_size):.3f}\n'
                f'file    --init {folder}/best.pt makes students of this teacher')
    draw_layers(folder / 'layers.png', model, log)
    text, _ = judge(model, data, c)
    return (f'{side_by_side(c, model, PROMPTS[:2])}\n\n{text}\n'
            f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}\n'
            f'next    python {PROGRAM} criteria --eval-rows 0 --folder {folder}  # on all text\n'
            f'        python {PROGRAM} --masks last5 --init {c.init}  # other masks')

def draw_layers(path, model, log):
    """The report's figures: the coefficients of every layer over the steps."""
    layers = {}
    for i in range(len(model.h)):
        layers[f'layer {i}'] = [{name.removeprefix(f'{i}.'): x for name, x in row.items()}
                                for row in log]
    draw(path, layers, [(f'coefficient of the mask {kind}:{n}', f'{kind}:{n}')
                        for kind, n in candidates(model.config.masks)])

def judge(model, data, c):
    """The report's criteria on c.eval_rows sequences, for the masks alone and for the trained
    student -> text, the student's figures."""
    batches = [*validation(data, c, model.wte.weight.device)]
    text = 'the report wants'
    for name, (sign, limit) in CRITERIA.items():
        text += f'{name} {sign} {limit:g}'.rjust(20)
    for case, net in (('mask only', substitute(model.teacher, c)), ('trained', model)):
        figures = fidelity(net, batches)
        text += f'\n{case:16}'
        for name in CRITERIA:
            verdict = 'PASS' if passes(name, figures[name]) else 'FAIL'
            text += f'{figures[name]:#15.3g} {verdict}'
    kept = kept_pairs(model.alphas(), c.masks, c.block_size)
    rows = sum(len(x) for x, _ in batches)
    text += (f'\nresult  {kept:.0%} of pairs give {figures["accuracy"]:.3f} times the accuracy; '
             f'{figures["passed"]} of {len(CRITERIA)} criteria pass, on {rows} sequences\n'
             f'        perplexity {figures["perplexity"]:.3f}, the teacher\'s '
             f'{figures["teacher_perplexity"]:.3f}')
    return text, figures

def criteria(c):
    """Judge a student by the report's criteria, on as many sequences as you like."""
    saved, model = load_run(c, 'ckpt.pt')  # best.pt was chosen on the text used here to judge
    if not model.teacher:
        fail(f'--folder {c.folder} is a teacher\'s: name a student\'s')
    text, figures = judge(model, load_data(saved), replace(saved, eval_rows=c.eval_rows))
    print(text)
    return figures

PROMPTS = [  # the report's short ones
    'Hello, my name is', 'The meaning of life is', 'In a shocking turn of events,',
    'The future of artificial intelligence']

def side_by_side(c, model, prompts):
    """How teacher and student continue each prompt, from the same seed, as text."""
    encode, decode = get_tokenizer(model.config.tokenizer)
    nets = dict(teacher=model.teacher, student=model) if model.teacher else dict(teacher=model)
    lines = []
    for prompt in prompts:
        idx = torch.tensor([encode(prompt)], device=model.wte.weight.device)  # (1, T)
        for name, net in nets.items():
            torch.manual_seed(c.seed)
            out = net.generate(idx, c.new_tokens, c.temperature)
            lines.append(f'\n{name}: {decode(out[0].tolist())}')
    return '\n'.join(lines)

def sample(c):
    """Let teacher and student continue --prompt or, without it, the report's prompts."""
    _, model = load_run(c, 'ckpt.pt')
    text = side_by_side(c, model, [c.prompt] if c.prompt else PROMPTS)
    print(text)
    return text

# ------------------------------------ runs ------------------------------------
# --- runs (identical in all four scripts; test_all.py checks)
SOURCE = Path(__file__).read_bytes() if '__file__' in globals() else b''  # b'' in a notebook cell
VERSION = hashlib.sha1(b'blob %d\0' % len(SOURCE) + SOURCE).hexdigest()   # git's name for the file
PROGRAM = f'{SCRIPT}.py'  # main changes it where a file of yours calls main()

def pick_device(c):
    """Device, and dtype of matmuls. GPUs below compute capability 8 only emulate bfloat16."""
    name, dtype = c.device, 'float32'
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    if name == 'cuda':
        name = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    if name.startswith('cuda'):
        if not torch.cuda.is_available():
            fail(f'--device {c.device}: PyTorch finds no CUDA device here')
        torch.cuda.set_device(name)
        dtype = 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
    if c.dtype != 'auto':
        dtype = c.dtype
    if c.threads:
        torch.set_num_threads(c.threads)
    return torch.device(name), getattr(torch, dtype)

def mixed_precision(device, dtype):
    """Autocast to dtype, and a loss scaler, which keeps float16 gradients in range."""
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0 ** 9, enabled=dtype == torch.float16)
    return autocast, scaler

def count(model):
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

def show(row):
    """A log row's figures as text, except per-layer ones (0.mh) and nan."""
    return '  '.join(f'{name} {x:.4g}' for name, x in row.items()
                     if name not in ('step', 'seconds') and '.' not in name and not math.isnan(x))

def save(folder, name, state):
    """Write a checkpoint. If killed, or if the disk is full, it leaves the old file intact."""
    if folder and RANK == 0:
        buffer = io.BytesIO()  # on a full disk write_bytes raises OSError, torch.save does not
        torch.save(dict(state, script=SCRIPT, version=VERSION), buffer)
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, name + '.part').write_bytes(buffer.getbuffer())
        os.replace(Path(folder, name + '.part'), Path(folder, name))

def load_checkpoint(path, foreign=False):
    """A checkpoint of this script or, if foreign, of any program. Nothing in the file is run."""
    try:
        if str(path).endswith('.safetensors'):
            from safetensors.torch import load_file
            return load_file(path)
        saved = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # no such file, no safetensors, or any of PyTorch's half a dozen
        held = re.search(r'GLOBAL ([\w.]+)', str(error))
        if held:
            fail(f'{path} holds a {held[1]}, which could run code: save model.state_dict() alone')
        fail(f'{path} cannot be read: {" ".join(str(error).split())[:150]}')
    if not foreign and saved.get('script') != SCRIPT:
        fail(f'{path} is not a checkpoint of {SCRIPT}.py')
    return saved

def read_weights(path, **settings):
    """{name: tensor} from a checkpoint, ours or another program's, without the prefixes that
    wrappers add. `settings`, such as n_head=4, do not show in shapes: the file must agree."""
    saved = load_checkpoint(path, foreign=True)
    theirs = saved.get('config', saved.get('model_args', {}))  # ours, nanoGPT's
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
    """Write all rows of figures to the table folder/log.csv."""
    if folder and RANK == 0:
        with open(Path(folder, 'log.csv'), 'w', newline='') as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in log for name in row))
            writer.writeheader()
            writer.writerows(log)

def draw(path, logs, panels):
    """Plot figures over the steps, a line for each log in {label: log}. A panel is (title, figure)
    or (title, figure, second figure, which is dashed)."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        return print(f'note    no {path.name}: pictures need `pip install matplotlib`')
    colours = colormaps['viridis'](np.linspace(0, 0.8, len(logs)))
    picture = Figure(figsize=(5 * len(panels), 4), layout='tight')
    for i, (title, *names) in enumerate(panels, 1):
        axis = picture.add_subplot(1, len(panels), i, xlabel='step', title=title)
        for (label, log), colour in zip(logs.items(), colours):
            for name, line in zip(names, ('.-', '.--')):
                rows = [row for row in log if name in row and row['step'] > 0]  # 0 is far off
                axis.plot([row['step'] for row in rows], [row[name] for row in rows], line,
                          color=colour, label=label)
                label = None  # once in the legend
        axis.grid(alpha=0.3)
    axis.legend()
    picture.savefig(path)

def new_folder(c, where=SCRIPT):
    """Make a new folder, out/WHERE/VARIANT-sSEED; if it exists, -2, -3, ... is appended."""
    if RANK:
        return None  # only the first process writes
    for n in itertools.count(1):
        folder = Path(c.out_dir, where, f'{c.variant}-s{c.seed}' + (f'-{n}' if n > 1 else ''))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            pass

def last_folder(folder, out_dir):
    """--folder or else the newest checkpoint's folder; None if there is none."""
    if folder:
        return Path(folder)
    checkpoints = sorted(Path(out_dir, SCRIPT).glob('*/ckpt.pt'), key=os.path.getmtime)
    return checkpoints[-1].parent if checkpoints else None

def load_run(c, name='best.pt'):
    """Settings and model of --folder, or of the last run, with its best weights."""
    folder = last_folder(c.folder, c.out_dir)
    if not folder:
        fail(f'there is no run in {c.out_dir}/{SCRIPT} yet: train first')
    if not c.folder:
        print(f'run     {folder}, the newest\n')
    saved = load_checkpoint(folder / name)
    model = make_model(Config(**saved['config']), None).to(pick_device(c)[0])
    try:
        model.load_state_dict(saved['model'])
    except RuntimeError:
        fail(f'{folder} holds weights of another model: {SCRIPT}.py has changed since')
    return model.config, model.eval()

def train_and_report(c, where=SCRIPT):
    """Train in a new folder or, with --resume, in the old one -> its last figures."""
    if c.folder and not c.resume:
        fail('--folder names a run to --resume; a new run picks its own name')
    data = load_data(c)
    folder = Path(c.folder) if c.resume else new_folder(c, where)
    if RANK == 0:
        (folder / 'config.json').write_text(json.dumps(asdict(c), indent=1))
    try:
        model, log = train(c, folder, data)
    except KeyboardInterrupt:
        print(f'\nstopped; continue with: python {PROGRAM} --resume --folder {folder}')
        raise SystemExit(130)
    if RANK == 0:
        print(report(c, model.eval(), log, folder, data))
    return dict(log[-1], log=log, folder=folder)

def parse(argv=None):
    """argv -> action, Config. Flags override the preset; with --resume, settings are the run's."""
    words = list(sys.argv[1:] if argv is None else argv)
    action = words.pop(0) if words and words[0] in ACTIONS else 'train'
    fields_of_config = SOURCE.decode().partition('class Config:\n')[2].partition('    def ')[0]
    p = argparse.ArgumentParser(
        usage=f'{PROGRAM} [{" | ".join(ACTIONS)}] [--preset NAME] [--flag value ...]',
        description=fields_of_config.replace('"""', ''),
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
        allow_abbrev=False)
    p.error = lambda message: fail(f'{message} (see --help)')
    p.add_argument('--preset', choices=PRESETS, help='a set of settings; flags override it')
    kinds = {bool: dict(action=argparse.BooleanOptionalAction), list: dict(nargs='+')}
    for f in fields(Config):
        kind = kinds.get(f.type, dict(type=f.type, choices=CHOICES.get(f.name)))
        spellings = {'--' + f.name, '--' + f.name.replace('_', '-')}  # nanoGPT's --n_layer, too
        p.add_argument(*sorted(spellings), help=argparse.SUPPRESS, **kind)
    given = vars(p.parse_args(words))
    preset = given.pop('preset', 'tiny')
    given = {**PRESETS[preset], **given}
    for name, value in given.items():
        lowest, highest = LOWEST.get(name, 0), HIGHEST.get(name, math.inf)
        if type(value) in (int, float) and not lowest <= value <= highest:  # nor may it be nan
            fail(f'{name} {value}: must be from {lowest} to {highest}')
    folder = last_folder(given.get('folder'), given.get('out_dir', Config.out_dir))
    if given.get('resume') and folder:
        return action, resumed(folder, given)
    if action == 'train' and preset == 'tiny' and torch.cuda.is_available():
        print(f'note    this model is small; for a GPU, try --preset t4: {PRESETS["t4"]}')
    return action, Config(**{**given, 'resume': False})  # there is nothing to resume

def resumed(folder, given):
    """Config of the run in `folder`. `given` may raise max_iters, and set the machine's fields."""
    saved = load_checkpoint(folder / 'ckpt.pt')
    config, step = {**asdict(Config()), **saved['config']}, saved['progress'][0]
    names = list(config)
    for name in names[:names.index('device')]:
        if name != 'max_iters' and given.get(name, config[name]) != config[name]:
            fail(f'--resume: {folder} has --{name.replace("_", "-")} {config[name]}, which stays')
    if given.get('max_iters', step) < step:
        fail(f'--max-iters {given["max_iters"]}: {folder} is at step {step}')
    if saved['version'] != VERSION:
        print(f'note    {SCRIPT}.py has changed since {folder} was saved')
    config['device'] = 'auto'  # this machine may be another
    config.update(given, folder=str(folder))
    return Config(**config)

def main(argv=None):
    """Do what the command line says -> the resulting figures."""
    global PROGRAM
    if RANK:
        sys.stdout = open(os.devnull, 'w')
    if argv is None:
        PROGRAM = Path(sys.argv[0]).name
    action, c = parse(argv)
    if c.compile and not any(map(shutil.which, ('g++', 'clang++', 'cl'))):
        fail('--compile needs a C++ compiler: install one, or give --no-compile')
    if c.batch_size % WORLD:
        fail(f'{WORLD} processes cannot share --batch-size {c.batch_size} evenly')
    if WORLD > 1 and 'MASTER_ADDR' not in os.environ:
        fail(f'WORLD_SIZE={WORLD} is set without the rest of what torchrun sets: unset it')
    if WORLD > 1:
        dist.init_process_group()
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

ACTIONS = {'train': train_student, 'teacher': train_teacher, 'sample': sample,
           'criteria': criteria}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    sys.stdout.reconfigure(errors='replace')  # for terminals that cannot show every character
    main()
