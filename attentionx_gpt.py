# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""A GPT whose attention passes on a residual: AttentionX and BeliefFormer beside plain softmax.

Attention tells a token what its neighbours say: MH = softmax(QK^T / sqrt(d)) V, a weighted sum of
values. The papers argue that a layer should pass on how far that sum disagrees with the token's own
value V. AttentionX subtracts one from the other; BeliefFormer keeps the part of MH that is
orthogonal to V. Both need only MH and V, so fused kernels still serve.

    AX1  G. Zhang, R. Heusdens, AttentionX, first version   AX2  its revision, arXiv 2409.04275
    BF   G. Zhang, BeliefFormer: Belief Attention in Transformer, OpenReview Ard2QzPAUK

Where the residual comes from: PDMM minimises a sum of f_i(x_i) over the nodes of a graph subject to
A_ij x_i + A_ji x_j = b_ij on its edges (BF Eq. 1). Each node minimises f_i plus what its edges'
multipliers charge (2); each edge moves its multiplier by a step size rho times the residual
b_ij - A_ji x_j - A_ij x_i (3, 4), so a multiplier adds up the residuals so far (5). With tokens as
nodes, V as x, softmax(QK^T) as edges and the MLP as f_i, a token's residual is V - MH.

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX2 Sec. 5]    the same with a gamma that each head learns          attentionx-learned
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief, orthogonal
    [BF Eq. 13]     the same in every head, with a beta of its own       belief-head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, forward
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma
    [BF Eq. 11]     ||Delta|| <= ||MH|| (Fig. 3 has both, after W^o)     diagnose

AttentionX's two versions are one: gamma V - MH is gamma (V - MH / gamma), so that the first at
gamma and the revised one at 1 / gamma differ by a factor that W^o can absorb.

    python attentionx_gpt.py --gamma 3                    # train: two minutes on a CPU, no network
    python attentionx_gpt.py sample --prompt "def main("  # that run continues a text
    python attentionx_gpt.py compare --over attention=softmax,attentionx,belief --seeds 0,1,2
    python attentionx_gpt.py bench                        # what each variant costs
    python attentionx_gpt.py inspect --attention belief   # the discrepancy, layer by layer
    python attentionx_gpt.py --preset owt-124m            # AttentionX's recipe: nanoGPT's GPT-2

The first ends at a validation loss of 1.643 nats per byte; a bigram model of bytes gets 2.438
(800 steps, 631,680 parameters, one seed). A stopped command, run again, goes on.

Below the banner `tools` a reader may stop: from there on the four scripts are the same.
"""
import argparse
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
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = 'attentionx_gpt'
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many

def fail(message):
    """Stop with one line on what the user can do about it."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False, dropout=0.0):
    """MH = softmax(QK^T / sqrt(hs)) V, causal.  [BF Eq. 9]

    q (B, nh, Tq, hs), k and v (B, nh, T, hs) with Tq = T, or 1 with a cache -> (B, Tq, nh, hs).
    With zero_diag a token attends only to those before it; the first has none and gets zeros.
    """
    whole = q.size(2) == k.size(2)  # no cache: as many queries as keys
    if zero_diag:
        q = q[:, :, 1:] if whole else q    # the first token has no key
        k, v = k[:, :, :-1], v[:, :, :-1]  # query t sees keys 0..t-1, which is causal once more
    mh = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=whole)
    mh = mh.transpose(1, 2)  # (B, Tq, nh, hs)
    return F.pad(mh, (0, 0, 0, 0, 1, 0)) if zero_diag and whole else mh

def orthogonal(mh, v, dims):
    """MH - <MH,V> / <V,V> V, inner products over `dims`: the part of MH orthogonal to V."""
    dtype = torch.promote_types(v.dtype, torch.float32)  # ||V||^2 soon overflows float16
    x, y = mh.to(dtype), v.to(dtype)
    mh_v = (x * y).sum(dims, keepdim=True)
    v_v = (y * y).sum(dims, keepdim=True).clamp_min(1e-30)  # [choice] V = 0 takes nothing
    return (x - mh_v / v_v * y).to(mh.dtype)

ATTENTION = {  # from MH and V (B, T, nh, hs): what reaches the output projection
    # (cached sampling passes no other token's: a variant looks at one token at a time)
    'softmax': lambda mh, v, gamma: mh,                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,             # [AX2 Eq. 10]
    'attentionx-learned': lambda mh, v, gamma: v - gamma * mh,     # [AX2 Sec. 5] learns gamma
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
        return float(c.gamma)
    if c.attention == 'attentionx-v1':
        return 0.5
    return 1.0 if c.zero_diag else 3.0

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --zero-diag, --no-zero-diag. --help prints this."""
    # the papers' method
    attention: str = 'attentionx'  # a name in ATTENTION: what reaches the output projection
    gamma: float = None            # default: 0.5 for v1; others 1 with zero_diag, 3 without
    zero_diag: bool = False        # a token does not attend to itself [AX2 Sec. 3.2]
    # model
    arch: str = 'gpt2'             # gpt2: nanoGPT's; rotary: modded-nanogpt's, as in BeliefFormer
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64           # tokens in a window
    vocab_size: int = 0            # 0: as many as the data's tokenizer has
    bias: bool = False             # biases in linear and norm layers (GPT-2 has them)
    dropout: float = 0.0
    init: str = ''                 # file with weights to start from: a checkpoint of nanoGPT, say
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = 'bytes'       # of text files: bytes or gpt2; prepared data know theirs
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 800           # optimiser steps
    batch_size: int = 32           # windows in memory at once, shared among the processes
    grad_accum_steps: int = 1      # batches in an optimiser step
    learning_rate: float = 2e-3    # at its peak
    min_lr: float = 0.1            # final cosine rate, as a fraction of learning_rate
    schedule: str = 'cosine'       # cosine, trapezoid, step or constant, after warmup
    warmup_iters: int = 100
    warmdown_iters: int = 0        # steps at the end: to 0 (trapezoid) or at a tenth (step)
    weight_decay: float = 0.1      # AdamW's, on matrices
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations, and between checkpoints
    eval_rows: int = 640           # validation windows, the same ones every time
    dtype: str = 'auto'            # of matmuls: float32, bfloat16, float16
    # machine: from here on, settings may differ when a run resumes
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0 for PyTorch's default
    log_interval: int = 50         # steps between lines of progress
    reuse: bool = False            # take finished runs of these settings, even of other code
    fresh: bool = False            # restart a stopped or finished run from scratch
    out_dir: str = 'out'           # where runs are written
    # actions
    run: str = ''                  # sample: a run's folder; default: train's last run
    prompt: str = '\ndef '         # sample: a text to continue
    new_tokens: int = 300          # sample
    temperature: float = 0.8       # sample: 0 takes the likeliest token
    over: list = ()                # compare, bench: FIELD=A,B; may be repeated
    table: str = ''                # compare, bench: a name in TABLES; default: the first
    seeds: str = '0,1,2'           # compare: a run per case and seed
    best: str = ''                 # compare: --over FIELD, e.g. learning_rate, to tune per variant
    final_seeds: str = ''          # compare --best: other seeds to judge the choice
    from_csv: str = ''             # compare: files A,B (runs.csv) to tabulate; trains nothing
    figure: str = ''               # compare: what to test, e.g. mean_loss; default: the result
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(f'--{name} {getattr(self, name)}: choose from {", ".join(allowed)}')
        for name in POSITIVE:
            if getattr(self, name) < 1:
                fail(f'--{name.replace("_", "-")} {getattr(self, name)}: must be at least 1')
        for name in ('seed', 'max_iters'):
            if getattr(self, name) < 0:
                fail(f'--{name.replace("_", "-")} {getattr(self, name)}: must be 0 or more')
        gamma = default_gamma(self)
        if self.attention in ('attentionx', 'attentionx-learned') and not gamma >= 1:
            fail(f'--gamma {gamma:g}: {self.attention} takes 1 or more')
        if self.attention == 'attentionx-v1' and not 0 < gamma <= 1:
            fail(f'--gamma {gamma:g}: attentionx-v1 takes more than 0, up to 1')
        if self.n_embd % (2 * self.n_head):
            fail(f'--n-embd {self.n_embd} must be an even multiple of --n-head {self.n_head}')
        if not self.prompt:
            fail('--prompt is empty: the model continues at least one token')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')

    @property
    def variant(self):
        return self.attention + ('-zd' if self.zero_diag else '')

GPT2_SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, data='openwebtext',
                  beta2=0.95, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2,
               max_iters=3000, learning_rate=1e-3, eval_interval=250, threads=0),
    # AX1 and AX2 name nanoGPT and "a small subset of openwebtext", no more: [choice] its recipe
    # (a T4's memory: --batch-size 6 --grad-accum-steps 80)
    'owt-124m': dict(GPT2_SMALL, vocab_size=50304, batch_size=12, grad_accum_steps=40,
                     max_iters=600000, learning_rate=6e-4, warmup_iters=2000, eval_interval=1000,
                     eval_rows=2400),
    # BF names `casted` and 5B tokens of OpenWebText: 9536 steps of 524,288 tokens
    # [deviation] `casted` computes with weights rounded to float8
    # (a T4's memory: --batch-size 4 --grad-accum-steps 128)
    'belief-124m': dict(GPT2_SMALL, attention='belief', arch='rotary', vocab_size=50257,
                        batch_size=16, grad_accum_steps=32, max_iters=9536, learning_rate=1.8e-3,
                        schedule='trapezoid', warmup_iters=256, warmdown_iters=2048,
                        grad_clip=0.0, eval_interval=128, eval_rows=1280),
}
TABLES = {  # rows for `compare --table NAME`
    'all': {name: dict(attention=name) for name in ATTENTION},
    'papers': {name: dict(attention=name)
               for name in ('softmax', 'attentionx', 'belief', 'belief-star')},
    'record': {  # assets/results.md
        'softmax': dict(attention='softmax'),
        'attentionx': dict(attention='attentionx'),
        'attentionx-zd': dict(attention='attentionx', zero_diag=True),  # gamma 1  [AX2 Sec. 3.2]
        'attentionx-learned': dict(attention='attentionx-learned'),
        'belief': dict(attention='belief'),
        'belief-head': dict(attention='belief-head'),
        'belief-star': dict(attention='belief-star'),
        'value-skip': dict(attention='value-skip'),
    },
}
POSITIVE = ('n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size', 'grad_accum_steps',
            'eval_interval', 'eval_rows', 'log_interval', 'new_tokens', 'rounds')
CHOICES = {
    'attention': ATTENTION, 'arch': ('gpt2', 'rotary'), 'tokenizer': ('bytes', 'gpt2'),
    'schedule': ('cosine', 'trapezoid', 'step', 'constant'), 'table': ('', *TABLES),
    'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
def rotate(x, past=0):
    """Rotary position embedding, base 10000, of x (B, T, nh, hs) from position `past` on."""
    hs = x.size(3)
    inv_freq = 10000 ** -(torch.arange(0, hs, 2, device=x.device).float() / hs)
    position = torch.arange(past, past + x.size(1), device=x.device).float()
    angle = torch.outer(position, inv_freq)  # (T, hs/2)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)

def make_norm(c):
    """LayerNorm or, in the rotary model, x / rms(x) over the channels, without parameters."""
    if c.arch == 'rotary':
        return nn.RMSNorm(c.n_embd, eps=1e-6, elementwise_affine=False)
    return nn.LayerNorm(c.n_embd, bias=c.bias)

class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        gamma = default_gamma(c)
        if c.attention == 'attentionx-learned':  # one per head, without weight decay
            gamma = nn.Parameter(torch.full((c.n_head, 1), gamma))
        self.gamma = gamma  # (yours, by head: self.register_buffer('gamma', TENSOR (nh, 1)))
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)  # W^o
        if c.attention == 'belief-star':
            self.c_proj_s = nn.Linear(c.n_embd, c.n_embd, bias=False)  # W^s

    def heads(self, x, cache=None):
        """x (B, T, C) -> MH, V, both (B, T, nh, hs). A cache, {} at first, keeps k and v.
        (A variant that needs Q or K takes them from here.)"""
        c = self.config
        q, k, v = self.c_attn(x).unflatten(2, (3, c.n_head, -1)).unbind(2)
        if c.arch == 'rotary':
            past = cache['k'].size(1) if cache else 0
            q, k = rotate(q, past), rotate(k, past)
        keys, values = k, v  # of all tokens so far
        if cache:  # {} is false: nothing to join yet
            keys, values = torch.cat([cache['k'], k], 1), torch.cat([cache['v'], v], 1)
        if cache is not None:
            cache.update(k=keys, v=values)
        by_head = [t.transpose(1, 2) for t in (q, keys, values)]  # (B, nh, T, hs)
        return multi_head(*by_head, c.zero_diag, c.dropout if self.training else 0.0), v

    def forward(self, x, cache=None):
        """x (B, T, C) -> (B, T, C)."""
        mh, v = self.heads(x, cache)
        update = ATTENTION[self.config.attention](mh, v, self.gamma)  # (B, T, nh, hs)
        if self.config.attention == 'belief-star':
            delta, delta_s = update
            return self.c_proj(delta.flatten(2)) + self.c_proj_s(delta_s.flatten(2))  # [BF Eq. 15]
        return self.c_proj(update.flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = make_norm(c)
        self.attn = CausalSelfAttention(c)
        self.ln_2 = make_norm(c)
        self.mlp = MLP(c)
        self.drop = nn.Dropout(c.dropout)
        self.attn_scale = (2 * c.n_layer) ** -0.5 if c.arch == 'rotary' else 1.0

    def forward(self, x, cache=None):
        x = x + self.drop(self.attn_scale * self.attn(self.ln_1(x), cache))
        return x + self.drop(self.mlp(self.ln_2(x)))

class GPT(nn.Module):
    """nanoGPT's GPT-2 or, by config.arch, the rotary one, with the originals' state-dict keys."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd),
            wpe=nn.Embedding(c.block_size, c.n_embd) if c.arch == 'gpt2' else None,
            drop=nn.Dropout(c.dropout),
            h=nn.ModuleList(Block(c) for _ in range(c.n_layer)),
            ln_f=make_norm(c)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p from its own generator: what two variants share starts out equal."""
        c = self.config
        generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
        matrix = name.endswith('.weight') and p.dim() == 2
        if name.endswith('.bias'):
            p.zero_()
        elif matrix and c.arch == 'rotary':
            p.uniform_(-p.size(1) ** -0.5, p.size(1) ** -0.5, generator=generator)
        elif matrix:
            std = 0.02 / math.sqrt(2 * c.n_layer) if 'c_proj' in name else 0.02
            p.normal_(0.0, std, generator=generator)
        # any other parameter, such as a gamma you add, keeps the value it was made with

    def embed(self, idx, past=0):
        """idx (B, T) from position `past` on -> (B, T, C)."""
        x = self.transformer.wte(idx)
        if self.config.arch == 'gpt2':
            position = torch.arange(past, past + idx.size(1), device=idx.device)
            x = self.transformer.drop(x + self.transformer.wpe(position))
        return x

    def forward(self, idx, targets=None, cache=None):
        """idx, targets (B, T) -> logits (B, T, V), loss in nats per token, over targets >= 0.
        Without targets: logits of the last position (B, 1, V), and None."""
        x = self.embed(idx, cache[0]['k'].size(1) if cache and cache[0] else 0)
        for i, block in enumerate(self.transformer.h):
            x = block(x, cache[i] if cache else None)
        x = self.transformer.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0):
        """idx (B, T) -> (B, T + max_new_tokens); temperature 0 takes the likeliest token. Past
        block_size the window slides, all positions shift, and nothing cached holds any longer."""
        new, cache = idx, [{} for _ in self.transformer.h]
        for _ in range(max_new_tokens):
            if idx.size(1) > self.config.block_size:
                new, cache = idx[:, -self.config.block_size:], None
            logits = self(new, cache=cache)[0][:, -1].float()  # (B, V)
            new = logits.argmax(-1, keepdim=True)  # (B, 1)
            if temperature:
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            idx = torch.cat([idx, new], dim=1)
        return idx

# ------------------------------------ data ------------------------------------
def get_tokenizer(name):
    """`bytes`, 256 tokens, no files, or `gpt2`, which tiktoken fetches once."""
    import tiktoken
    if name == 'gpt2':
        return tiktoken.get_encoding('gpt2')
    return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},  # short: faster
                             mergeable_ranks={bytes([i]): i for i in range(256)})

def read_text(c):
    """Training and validation text: the latter is every tenth file, or the last tenth of one."""
    if c.data == 'builtin':
        files = sorted(Path(os.__file__).parent.glob('*.py'))
        texts = [path.read_text('utf-8', errors='replace') for path in files]
        train = [text for i, text in enumerate(texts) if i % 10 < 9]
        return ''.join(train), ''.join(texts[9::10])
    if not Path(c.data).is_file():
        fail(f'--data {c.data}: no such file and no folder data/{c.data}; '
             f'`python prepare_data.py {c.data}` makes one; without a name it lists what there is')
    try:
        text = Path(c.data).read_text('utf-8-sig')
    except UnicodeDecodeError:
        fail(f'--data {c.data} is no text in UTF-8')
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]

def data_files(c):
    """The files that data and first weights come from: when one changes, a run starts anew."""
    folder = Path(os.__file__).parent if c.data == 'builtin' else Path('data', c.data)
    files = sorted(folder.glob('*.py' if c.data == 'builtin' else '*'))
    return [*files, Path(c.data), Path(c.init)]

def load_data(c):
    """c.data -> train and val (uint16 tokens), their tokenizer, val's bytes (None: unknown)."""
    folder = Path('data', c.data)
    if folder.is_dir():  # nanoGPT's format, as prepare_data.py writes it, which adds meta.json
        meta = dict(tokenizer='gpt2')
        if (folder / 'meta.json').exists():
            meta = json.loads((folder / 'meta.json').read_text('utf-8'))
        if not (folder / 'val.bin').exists():
            fail(f'{folder} has no val.bin: prepare_data.py {c.data} did not finish')
        tokenizer, val_bytes = meta['tokenizer'], meta.get('bytes', {}).get('val')
        train, val = [np.memmap(folder / f, np.uint16, 'r') for f in ('train.bin', 'val.bin')]
    else:
        texts = read_text(c)
        tokenizer, val_bytes = c.tokenizer, len(texts[1].encode())
        encode = get_tokenizer(tokenizer).encode_ordinary
        train, val = [np.array(encode(text), dtype=np.uint16) for text in texts]
    vocab_size = dict(bytes=256, gpt2=50257)[tokenizer]
    if min(len(train), len(val)) <= c.block_size + 1:
        fail(f'--data {c.data} does not fill a window of --block-size {c.block_size}')
    about = f'{c.data}, {len(train):,} tokens ({tokenizer})'
    return SimpleNamespace(train=train, val=val, tokenizer=tokenizer, vocab_size=vocab_size,
                           val_bytes=val_bytes, about=about)

# ------------------------------------ training ------------------------------------
# What the loop below knows of GPTs: these names and functions.
METRIC = 'val_loss'   # best.pt and `compare --best` go by this validation figure:
BETTER = min          # lower is better
RESULTS = ['val_loss', 'mean_loss']    # what `compare` tabulates: differences of the first
BASELINE = dict(attention='softmax')   # the case that `compare` and `bench` put first
LABELS = {'loss': 'training loss (nats per token)', 'val_loss': 'validation loss (nats per token)',
          'seconds': 'seconds of training steps', 'mh': 'mean length, before the output projection',
          'mh_out': 'mean length, after the output projection', 'cos_mh': 'cosine with X'}

def make_model(c, data):
    """A model on the CPU. What c leaves open comes from data; a saved c, with none, is complete."""
    if data:
        size = c.vocab_size or getattr(data, 'vocab_size', 0)  # data of your own may not say
        size = size or 1 + max(int(data.train.max()), int(data.val.max()))
        c = replace(c, vocab_size=size, tokenizer=getattr(data, 'tokenizer', c.tokenizer))
    model = GPT(c)
    if c.init and data:
        load_weights(model, c.init)
    return model

def load_weights(model, path):
    """Load a checkpoint of this script, nanoGPT or `casted`. Their keys are ours, apart from
    torch.compile's prefix, masks and rotary frequencies."""
    saved = load_checkpoint(path, own=False)
    weights = {key.removeprefix('_orig_mod.'): p for key, p in saved.get('model', saved).items()
               if not key.endswith(('.attn.bias', '.inv_freq'))}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        fail(f'--init {path} does not fit the model: {" ".join(str(error).split())[:200]}')

def make_optimizer(model, c):
    """AdamW; weights of matrices and embeddings decay, and nothing else does."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        group = matrices if name.endswith('.weight') and p.dim() == 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=c.weight_decay),
              dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))

def windows(tokens, starts, c, device):
    """The tokens from each start on, and the same one step later: two of (B, T), int64."""
    x = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    x = torch.from_numpy(x).to(device)
    return x[:, :-1], x[:, 1:]

def get_batch(data, c, step, micro, device):
    """This process's rows of micro-batch `micro`. They depend on seed and step alone: every
    variant sees the same, and a resumed run sees what an unbroken one would."""
    n = len(data.train) - c.block_size  # places where a window fits
    size = c.grad_accum_steps, c.batch_size
    starts = np.random.default_rng([c.seed, step]).integers(n, size=size)
    return windows(data.train, starts[micro, RANK::WORLD], c, device)

def loss_of(model, batch, c):
    return model(*batch)[1]

@torch.no_grad()
def diagnose(model, idx):
    """What attention does with idx (B, T): for each layer a dict of means over the tokens.

    mh = ||MH||, update = ||Phi|| or ||Delta||, *_out: of the same after W^o, cos_* its cosine with
    the layer's input X, alpha = <MH,V> / <V,V>, gamma. Delta is never longer than MH [BF Eq. 11].
    """
    rows = []
    x = model.embed(idx)  # (B, T, C)
    for block in model.transformer.h:
        attn = block.attn
        mh, v = attn.heads(block.ln_1(x))  # (B, T, nh, hs)
        update = ATTENTION[model.config.attention](mh, v, attn.gamma)
        update = update[0] if type(update) is tuple else update  # of belief-star: Delta
        mh, v, update = [t.flatten(2).to(x) for t in (mh, v, update)]  # (B, T, C), in x's dtype
        mh_out, update_out = mh @ attn.c_proj.weight.T, update @ attn.c_proj.weight.T
        figures = dict(
            mh=mh.norm(dim=-1), update=update.norm(dim=-1),
            mh_out=mh_out.float().norm(dim=-1), update_out=update_out.float().norm(dim=-1),
            cos_mh=F.cosine_similarity(mh_out, x, -1),
            cos_update=F.cosine_similarity(update_out, x, -1),
            alpha=(mh * v).sum(-1) / (v * v).sum(-1), gamma=torch.as_tensor(attn.gamma))
        rows.append({name: figure.float().mean().item() for name, figure in figures.items()})
        x = block(x)
    return rows

@torch.no_grad()
def evaluate(model, data, c, device):
    """Loss on the same windows every time, spread evenly over the validation text; and, as 0.mh
    for layer 0, what diagnose finds in eight windows."""
    last = len(data.val) - c.block_size - 1
    starts = np.unique(np.linspace(0, last, c.eval_rows).astype(np.int64))
    total = 0.0
    for i in range(0, len(starts), c.batch_size):
        x, y = windows(data.val, starts[i:i + c.batch_size], c, device)
        total += loss_of(model, (x, y), c).item() * len(x)
    figures = dict(val_loss=total / len(starts))
    idx, _ = windows(data.val, np.linspace(0, last, 8).astype(np.int64), c, device)
    for i, layer in enumerate(diagnose(model, idx)):
        figures.update({f'{i}.{name}': x for name, x in layer.items()})
    return figures

def finish(model, data, c, device, folder):
    """What is measured once, when training is over: here nothing."""
    return {}

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

# ------------------------------------ report, sample, inspect ------------------------------------
def report(c, model, log):
    """What came out, beside a yardstick, as text."""
    data, loss, bits = load_data(c), log[-1]['val_loss'], ''
    if data.val_bytes:  # comparable across tokenizers
        bits = f', {loss / math.log(2) * len(data.val) / data.val_bytes:.3f} bits per byte'
    return (f'result  validation loss {loss:.3f} nats per token{bits}\n'
            f'        counting pairs of tokens gives {bigram_loss(data):.3f} nats\n'
            f'sample of what it writes after {c.prompt!r}:\n{complete(c, model)}')

def bigram_loss(data):
    """Nats per validation token for a model that has only counted pairs: a yardstick."""
    train, val = data.train[:5 * 10**6].tolist(), data.val[:10**6].tolist()
    single, pair = Counter(train), Counter(zip(train, train[1:]))
    total = 0.0
    for x, y in zip(val, val[1:]):
        prior = (single[y] + 1) / (len(train) + data.vocab_size)
        total -= math.log((pair[x, y] + prior) / (single[x] + 1))
    return total / (len(val) - 1)

def complete(c, model):
    """--prompt and the model's continuation of it."""
    encoding = get_tokenizer(model.config.tokenizer)
    prompt = encoding.encode_ordinary(c.prompt)
    torch.manual_seed(c.seed)
    idx = torch.tensor([prompt], device=model.lm_head.weight.device)  # (1, T)
    tokens = model.eval().generate(idx, c.new_tokens, c.temperature)[0].tolist()
    return encoding.decode([t for t in tokens if t < encoding.n_vocab])

def sample(c):
    text = complete(*load_run(c))
    print(text)
    return text

def inspect_layers(c):
    """The layers of a run, trained first if it is not yet: BF's Fig. 3, over the steps."""
    folder = run_folder(c)
    _, log = train_to_end(c, folder)
    layers = {}
    for i in range(c.n_layer):
        own, rows = f'{i}.', []
        for row in log:
            figures = {name.removeprefix(own): x for name, x in row.items() if name.startswith(own)}
            rows.append(dict(step=row['step'], **figures))
        layers[f'layer {i}'] = [rows]
        print(f'layer {i}: {show(figures)}')
    print(diagnose.__doc__.partition('\n\n')[2].rstrip())
    draw(folder / 'inspect.png', layers, [
        ('step', 'mh', 'update'), ('step', 'mh_out', 'update_out'),
        ('step', 'cos_mh', 'cos_update'), ('step', 'alpha')])
    return log

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

ACTIONS = {'train': train_and_report, 'compare': compare, 'bench': bench,
           'inspect': inspect_layers, 'sample': sample}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    sys.stdout.reconfigure(errors='replace')  # for terminals that cannot show every character
    main()
