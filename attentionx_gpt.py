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

Background, safe to skip: PDMM minimises a sum of f_i(x_i) over the nodes of a graph subject to
A_ij x_i + A_ji x_j = b_ij on its edges (BF Eq. 1). Each node minimises f_i plus what its edges'
multipliers charge (2); each edge moves its multiplier by a step size rho times the residual
b_ij - A_ji x_j - A_ij x_i (3, 4), so a multiplier adds up the residuals so far (5). With tokens as
nodes, V as x, softmax(QK^T) as edges and the MLP as f_i, a token's residual is V - MH.

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief, orthogonal
    [BF Eq. 13]     the same in every head, with a beta of its own       belief-head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, forward
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma

    python attentionx_gpt.py --gamma 3                    # train: two minutes on a CPU, no network
    python attentionx_gpt.py sample --prompt "def main("  # that run continues a text
    python attentionx_gpt.py compare --over attention=softmax,attentionx,belief --seeds 0,1,2
    python attentionx_gpt.py bench                        # what each variant costs
    python attentionx_gpt.py inspect --attention belief   # the discrepancy, layer by layer
    python attentionx_gpt.py --preset owt-124m            # AttentionX's recipe: nanoGPT's GPT-2

The first ends at a validation loss of 1.643 nats per byte; a bigram model of bytes gets 2.438
(800 steps, 631,680 parameters, one seed). A stopped command, run again, goes on where it stopped.

Lines 1-603 are the paper: method, configuration, model, data, training. What follows is tools.
"""
import argparse
import ast
import csv
import io
import json
import linecache
import math
import os
import signal
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
from torch.utils.checkpoint import checkpoint

SCRIPT = 'attentionx_gpt'
RANK = int(os.environ.get('RANK', 0))         # torchrun's: which process this is,
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # of how many
STOP = []                                     # signals that came: finish the step, save, stop

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
    causal = q.size(2) > 1  # one query, with a cache, sees all keys
    first = int(zero_diag and q.size(2) == k.size(2))  # queries without any key
    if zero_diag:  # queries 1..T-1 against keys 0..T-2 are causal once more: no mask is needed
        q, k, v = q[:, :, first:], k[:, :, :-1], v[:, :, :-1]
    mh = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    mh = mh.transpose(1, 2)  # (B, Tq, nh, hs)
    return F.pad(mh, (0, 0, 0, 0, 1, 0)) if first else mh

def orthogonal(mh, v, dims):
    """MH - <MH,V> / <V,V> V, inner products over `dims`: the part of MH orthogonal to V."""
    wide = torch.promote_types(v.dtype, torch.float32)  # ||V||^2 soon overflows float16
    x, y = mh.to(wide), v.to(wide)
    mh_v = (x * y).sum(dims, keepdim=True)
    v_v = (y * y).sum(dims, keepdim=True).clamp_min(1e-30)  # [choice] nothing to take where V = 0
    return (x - mh_v / v_v * y).to(mh.dtype)

ATTENTION = {  # from MH and V (B, T, nh, hs): what reaches the output projection
    # (a variant may use only a token's own MH and V: cached sampling passes it no other V)
    'softmax': lambda mh, v, gamma: mh,                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,             # [AX2 Eq. 10]
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
        return c.gamma
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
    warmdown_iters: int = 0        # final steps: falling to 0 (trapezoid), at a tenth (step)
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
    log_interval: int = 50         # steps between lines of the log
    max_minutes: float = 0.0       # save and stop a run after this long; 0: never
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
    rounds: int = 20               # bench

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(f'--{name} {getattr(self, name)}: choose from {", ".join(allowed)}')
        gamma = default_gamma(self)
        fits = {'attentionx': gamma >= 1, 'attentionx-v1': 0 < gamma <= 1}
        if not fits.get(self.attention, True):
            fail(f'--gamma {gamma:g}: attentionx takes 1 or more, attentionx-v1 (0, 1]')
        if self.n_embd % (2 * self.n_head):
            fail(f'--n-embd {self.n_embd} must be an even multiple of --n-head {self.n_head}')
        if self.batch_size % WORLD:
            fail(f'{WORLD} processes cannot share --batch-size {self.batch_size} evenly')

    @property
    def variant(self):
        return self.attention + ('-zd' if self.zero_diag else '')

    @property
    def units_per_step(self):
        return self.batch_size * self.grad_accum_steps * self.block_size

GPT2_SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, data='openwebtext',
                  beta2=0.95, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2,
               max_iters=3000, learning_rate=1e-3, eval_interval=250, threads=0),
    # AX1 and AX2 name nanoGPT and "a small subset of openwebtext", no more: [choice] its recipe
    'owt-124m': dict(GPT2_SMALL, vocab_size=50304, batch_size=12, grad_accum_steps=40,
                     max_iters=600000, learning_rate=6e-4, warmup_iters=2000, eval_interval=1000,
                     eval_rows=2400),
    # BF names `casted` and 5B tokens of OpenWebText: 9536 steps of 524,288 tokens
    # [deviation] `casted` computes with weights rounded to float8
    'belief-124m': dict(GPT2_SMALL, attention='belief', arch='rotary', vocab_size=50257,
                        batch_size=16, grad_accum_steps=32, max_iters=9536, learning_rate=1.8e-3,
                        schedule='trapezoid', warmup_iters=256, warmdown_iters=2048,
                        grad_clip=0.0, eval_interval=128, eval_rows=1280),
}
TABLES = {'all': {name: dict(attention=name) for name in ATTENTION}}  # `compare --table NAME`
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
        self.gamma = default_gamma(c)
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)  # W^o
        if c.attention == 'belief-star':
            self.c_proj_s = nn.Linear(c.n_embd, c.n_embd, bias=False)  # W^s

    def heads(self, x, cache=None):
        """x (B, T, C) -> MH, V, both (B, T, nh, hs). A cache, {} at first, keeps k and v."""
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

LOGITS = 2 ** 25  # held at once: 128 MB in float32

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

    def chunk_loss(self, x, targets):
        """Features (N, C), targets (N) -> the sum of their losses."""
        return F.cross_entropy(self.lm_head(x), targets, ignore_index=-1, reduction='sum')

    def forward(self, idx, targets=None, cache=None):
        """idx, targets (B, T) -> logits (B, T, V), loss in nats per token, over targets >= 0.

        Without targets: logits of the last position (B, 1, V), and None. More than LOGITS logits
        would fill the memory: then None, and a loss in chunks that the backward pass recomputes.
        """
        x = self.embed(idx, cache[0]['k'].size(1) if cache and cache[0] else 0)
        for i, block in enumerate(self.transformer.h):
            x = block(x, cache[i] if cache else None)
        x = self.transformer.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        if targets.numel() * self.config.vocab_size <= LOGITS:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        total, rows = 0.0, LOGITS // self.config.vocab_size
        for a, b in zip(x.flatten(0, 1).split(rows), targets.flatten().split(rows)):
            total = total + checkpoint(self.chunk_loss, a, b, use_reentrant=False)
        return None, total / (targets != -1).sum()

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
    return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},
                             mergeable_ranks={bytes([i]): i for i in range(256)})

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

def load_data(c):
    """c.data -> train and val (uint16 tokens), their tokenizer, val's bytes (None: unknown)."""
    folder = Path('data', c.data)
    if folder.is_dir():  # nanoGPT's format, as prepare_data.py writes it
        meta = json.loads((folder / 'meta.json').read_text('utf-8'))
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
RESULTS = [METRIC]    # what `compare` tabulates at the end
UNIT = 'tokens'       # what c.units_per_step counts

def make_model(c, data):
    """A model on the CPU. Its config is c plus what the data decide; without data, c has that."""
    if data:
        c = replace(c, vocab_size=c.vocab_size or data.vocab_size, tokenizer=data.tokenizer)
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
    model.load_state_dict(weights)

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
def evaluate(model, data, c, device):
    """Loss on the same windows every time, spread evenly over the validation text."""
    last = len(data.val) - c.block_size - 1
    starts = np.unique(np.linspace(0, last, c.eval_rows).astype(np.int64))
    total = 0.0
    for i in range(0, len(starts), c.batch_size):
        x, y = windows(data.val, starts[i:i + c.batch_size], c, device)
        total += loss_of(model, (x, y), c).item() * len(x)
    return dict(val_loss=total / len(starts))

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
def report(c, model, log):
    """What came out, beside a yardstick, and a sample."""
    data, loss, bits = load_data(c), log[-1]['val_loss'], ''
    if data.val_bytes:  # comparable across tokenizers
        bits = f', {loss / math.log(2) * len(data.val) / data.val_bytes:.3f} bits per byte'
    print(f'result  validation loss {loss:.3f} nats per token{bits}\n'
          f'        counting pairs of tokens gives {bigram_loss(data):.3f} nats')
    complete(c, model)

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
    """Print --prompt and the model's continuation of it."""
    encoding = get_tokenizer(model.config.tokenizer)
    prompt = encoding.encode_ordinary(c.prompt)
    torch.manual_seed(c.seed)
    idx = torch.tensor([prompt], device=model.lm_head.weight.device)  # (1, T)
    tokens = model.eval().generate(idx, c.new_tokens, c.temperature)[0].tolist()
    text = encoding.decode([t for t in tokens if t < encoding.n_vocab])
    print(f'sample of what it writes after {c.prompt!r}:\n{text}')
    return text

@torch.no_grad()
def diagnose(model, idx):
    """What attention does with idx (B, T): for each layer a dict of means over the tokens.

    mh = ||MH||, update = ||Phi|| or ||Delta||, *_out the same after W^o, cos_* its cosine with the
    layer's input X, alpha = <MH,V> / <V,V>, gamma.
    """
    rows = []
    x = model.embed(idx)  # (B, T, C)
    for block in model.transformer.h:
        attn = block.attn
        mh, v = attn.heads(block.ln_1(x))  # (B, T, nh, hs)
        update = ATTENTION[model.config.attention](mh, v, attn.gamma)
        delta = update[0] if type(update) is tuple else update
        out, out_mh = attn(block.ln_1(x)), attn.c_proj(mh.flatten(2))  # (B, T, C)
        figures = dict(
            mh=mh.flatten(2).norm(dim=-1), update=delta.flatten(2).norm(dim=-1),
            mh_out=out_mh.norm(dim=-1), update_out=out.norm(dim=-1),
            cos_mh=F.cosine_similarity(out_mh, x, -1), cos_update=F.cosine_similarity(out, x, -1),
            alpha=(mh * v).sum((2, 3)) / (v * v).sum((2, 3)),
            gamma=torch.as_tensor(attn.gamma).float())
        rows.append({name: value.mean().item() for name, value in figures.items()})
        x = block(x)
    return rows

def inspect_layers(c):
    """Train, and look into the layers. AX1 guesses that the discrepancy shrinks with depth."""
    val = load_data(c).val
    starts = np.linspace(0, len(val) - c.block_size - 1, 8).astype(np.int64)
    idx, _ = windows(val, starts, c, pick_device(c)[0])
    rows = []
    for step, model, log in train(c):
        if step % c.eval_interval == 0 or step == c.max_iters:
            for layer, figures in enumerate(diagnose(model.eval(), idx)):
                rows.append(dict(step=step, layer=layer, **figures))
    for row in rows[-c.n_layer:]:
        print(f'layer {row["layer"]}: {show(row)}')
    print(diagnose.__doc__.partition('\n\n')[2].rstrip())
    folder = run_folder(c, 'inspect-')
    write_csv(folder / 'inspect.csv', rows)
    layers = {f'layer {i}': [rows[i::c.n_layer]] for i in range(c.n_layer)}
    draw(folder / 'inspect.png', layers, [('step', name) for name in figures])
    return rows

ACTIONS = {'train': train_and_report, 'compare': compare, 'bench': bench,
           'inspect': inspect_layers, 'sample': lambda c: complete(*load_run(c))}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
