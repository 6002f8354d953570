# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "matplotlib"]
# ///
"""A GPT whose attention passes on a residual: AttentionX and BeliefFormer beside plain softmax.

Attention tells a token what its neighbours say: MH = softmax(QK^T / sqrt(d)) V, a weighted sum of
values. The papers argue that a layer should pass on how far that sum disagrees with the token's own
value V. AttentionX passes on V - gamma MH; BeliefFormer passes on the part of MH that is orthogonal
to V. Both need only MH and V, so fused attention kernels still work.

    AX1  G. Zhang, R. Heusdens, AttentionX, first version   AX2  its revision, arXiv 2409.04275
    BF   G. Zhang, BeliefFormer: Belief Attention in Transformer, OpenReview Ard2QzPAUK

The idea comes from PDMM, an algorithm by which the nodes of a graph solve a problem together
[BF Eq. 1-5]: each node minimises its own cost, and neighbours keep reporting how far their
solutions disagree. In a transformer the tokens are the nodes, attention gathers what the neighbours
found, the MLP works token by token, and V - MH is how far a token disagrees with its neighbours.
(test_pdmm runs it. BF Eq. 5, AX Eq. 4, is printed with i and j swapped in its second sum.)

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX2 Sec. 5]    a learned parameter: [choice] one gamma per head     attentionx-learned
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief, orthogonal
    [BF Eq. 13]     Delta_s: the same in every head, beta for alpha      belief-head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, BeliefStar
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma
    [AX2 Sec. 4]    gamma = 3 elsewhere; [AX1 Sec. 4.2]: 0.5             default_gamma
    [BF Eq. 11]     ||Delta|| <= ||MH|| (compare BF's Fig. 3)            diagnose

AttentionX's first version with gamma and its revision with 1 / gamma can represent the same
functions, as W^o absorbs the factor, but train differently: the factor scales the update.

    python attentionx_gpt.py                              # train: a minute on two cores, no network
    python attentionx_gpt.py --attention softmax          # the baseline, on the same batches
    python attentionx_gpt.py --resume                     # continue the newest run
    python attentionx_gpt.py sample --prompt "def main("  # let the model continue a text
    python attentionx_gpt.py --preset owt-124m            # AttentionX's recipe: nanoGPT's GPT-2
    python experiments/compare.py attentionx_gpt --sweep attention=softmax,attentionx,belief

Expected validation loss in nats per token, here a byte: attentionx 1.643, softmax 1.676, a bigram
model 2.438 (Python 3.11's library, 800 steps, 631,680 parameters, one seed).
[choice] marks where a paper is silent, [deviation] where we differ on purpose. Below the banner
`runs` is plumbing, identical in all four scripts.
"""
import argparse
import csv
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = 'attentionx_gpt'
TORCHRUN = all(os.environ.get(name)  # elsewhere, some of them may be left over
               for name in ('WORLD_SIZE', 'RANK', 'MASTER_ADDR', 'MASTER_PORT'))
WORLD = int(os.environ['WORLD_SIZE']) if TORCHRUN else 1  # number of processes
RANK = int(os.environ['RANK']) if WORLD > 1 else 0        # index of this one

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False, dropout=0.0):
    """MH = softmax(QK^T / sqrt(hs)) V, causal.  [BF Eq. 9]

    q, k, v (B, nh, T, hs) -> (B, T, nh, hs). With zero_diag no token attends to itself; the first
    token, which sees no other, gets 0.
    """
    if zero_diag:
        q, k, v = q[:, :, 1:], k[:, :, :-1], v[:, :, :-1]  # token t + 1 sees 0..t: causal again
    mh = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2)
    if zero_diag:
        mh = F.pad(mh, (0, 0, 0, 0, 1, 0))  # the first token's 0
    return mh

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
    if c.attention == 'attentionx-v1':
        return 0.5  # [AX1 Sec. 4.2]
    return 1.0 if c.zero_diag else 3.0  # [AX2 Sec. 3.2], [AX2 Sec. 4]

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --zero-diag, --no-zero-diag. --help prints this."""
    # the papers' method
    attention: str = 'attentionx'  # a name in ATTENTION: what reaches the output projection
    gamma: float = None            # default: 3, or 1 with zero_diag; attentionx-v1: 0.5
    zero_diag: bool = False        # a token does not attend to itself [AX2 Sec. 3.2]
    # model
    arch: str = 'gpt2'             # gpt2: nanoGPT's; rotary: modded-nanogpt's, as in BeliefFormer
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64           # tokens in a window
    vocab_size: int = 0            # 0: that of the data's tokenizer
    bias: bool = False             # biases in linear and norm layers (GPT-2 has them)
    dropout: float = 0.0
    init: str = ''                 # file with weights to start from: a checkpoint of nanoGPT, say
    # data
    data: str = 'builtin'          # name under data/, a text file, or builtin: Python's own source
    tokenizer: str = 'bytes'       # bytes or gpt2, for text; prepared data come with theirs
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 800           # optimiser steps
    batch_size: int = 32           # windows per forward pass
    grad_accum_steps: int = 1      # forward passes per step, shared among the processes
    learning_rate: float = 2e-3    # at its peak
    min_lr_ratio: float = 0.1      # final cosine rate / learning_rate
    schedule: str = 'cosine'       # cosine or trapezoid, after warmup
    warmup_iters: int = 100
    warmdown_iters: int = 0        # trapezoid: steps of linear decay at the end
    weight_decay: float = 0.1      # AdamW's, on matrices
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations, and between checkpoints
    eval_rows: int = 640           # validation windows, the same ones every time
    dtype: str = 'auto'            # float32, bfloat16 or float16, for matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 0               # CPU threads; 0: up to four
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the last run with these settings, or start one
    out_dir: str = 'out'           # where runs are written
    # actions
    folder: str = ''               # sample, --resume: a run's folder; default: found by settings
    prompt: str = '\ndef '         # text to continue, or FILE:notes.txt
    num_samples: int = 1           # sample: continuations
    new_tokens: int = 300          # in each
    temperature: float = 0.8       # 0 takes the likeliest token
    top_k: int = 0                 # only so many likeliest tokens; 0 for all

    def __post_init__(self):
        if self.attention not in ATTENTION:
            fail(f'--attention {self.attention} is not in ATTENTION: run the file that adds it')
        if self.n_embd % (2 * self.n_head):
            fail(f'--n-embd {self.n_embd} must be an even multiple of --n-head {self.n_head}')

    @property
    def variant(self):  # names folders and curves: add a field of yours to see it there
        return self.attention + ('-zd' if self.zero_diag else '')

GPT2_SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, data='openwebtext',
                  beta2=0.95)
PRESETS = {
    'tiny': {},
    't4': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, grad_accum_steps=2, dropout=0.2,
               max_iters=3000, learning_rate=1e-3, eval_interval=250),
    # [choice] nanoGPT's recipe: AX1 and AX2 give only the repository, the data and gamma
    'owt-124m': dict(GPT2_SMALL, vocab_size=50304, batch_size=12, grad_accum_steps=40,
                     max_iters=600000, learning_rate=6e-4, warmup_iters=2000, eval_interval=1000,
                     eval_rows=2400),
    # BF trains modded-nanogpt's branch `casted` on 5B tokens of OpenWebText, as many as
    # `python prepare_data.py openwebtext --parts 12` makes
    # [choice] `casted` on eight GPUs: 9536 steps of 524,288 tokens, 5B in all
    # [deviation] unlike in `casted`, weights are not rounded to float8, windows are drawn with
    # replacement, warmup ends a step later, and validation is what one of its eight GPUs evaluates
    'belief-124m': dict(GPT2_SMALL, attention='belief', arch='rotary', vocab_size=50257,
                        batch_size=16, grad_accum_steps=32, max_iters=9536, learning_rate=1.8e-3,
                        schedule='trapezoid', warmup_iters=256, warmdown_iters=2048,
                        grad_clip=0.0, eval_interval=128, eval_rows=1280),
}
MACHINE = {  # a resumed run may change these settings
    'max_iters', 'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder',
    'prompt', 'num_samples', 'new_tokens', 'temperature', 'top_k'}
CHOICES = {  # what a text may be; one that is not here may be anything
    'attention': ATTENTION, 'arch': ('gpt2', 'rotary'), 'tokenizer': ('bytes', 'gpt2'),
    'schedule': ('cosine', 'trapezoid'), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
def rotate(x):
    """Rotary position embedding of x (B, T, nh, hs)."""
    hs = x.size(3)
    inv_freq = 10000 ** -(torch.arange(0, hs, 2, device=x.device).float() / hs)
    position = torch.arange(x.size(1), device=x.device).float()
    angle = torch.outer(position, inv_freq)  # (T, hs/2)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)

def make_norm(c):
    """LayerNorm or, in the rotary model, RMSNorm without parameters."""
    if c.arch == 'rotary':
        return nn.RMSNorm(c.n_embd, eps=1e-6, elementwise_affine=False)
    return nn.LayerNorm(c.n_embd, bias=c.bias)

class CausalSelfAttention(nn.Module):
    """forward is project(MH, V), from heads(x); project is W^o of update(MH, V), the row of
    ATTENTION. A variant of your own overrides the smallest of these that it needs."""
    def __init__(self, c, layer):  # layer, counted from 0, is for subclasses
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)
        if c.attention == 'attentionx-learned':
            self.gamma = nn.Parameter(torch.full((c.n_head, 1), self.gamma))
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)  # W^o

    def qkv(self, x):
        """x (B, T, C) -> q, k, v (B, nh, T, hs)."""
        q, k, v = self.c_attn(x).unflatten(2, (3, self.config.n_head, -1)).unbind(2)
        if self.config.arch == 'rotary':
            q, k = rotate(q), rotate(k)  # (B, T, nh, hs)
        return [t.transpose(1, 2) for t in (q, k, v)]

    def heads(self, x):
        """x (B, T, C) -> MH and V, both (B, T, nh, hs)."""
        q, k, v = self.qkv(x)
        c = self.config
        mh = multi_head(q, k, v, c.zero_diag, c.dropout if self.training else 0.0)
        return mh, v.transpose(1, 2)

    def update(self, mh, v):
        """What the layer passes on to W^o, (B, T, nh, hs). diagnose calls it, too."""
        variant = ATTENTION[self.config.attention]  # a class passes on MH, unless it overrides this
        return mh if isinstance(variant, type) else variant(mh, v, self.gamma)

    def project(self, mh, v):
        """MH and V -> what the layer adds to the residual stream, (B, T, C)."""
        return self.c_proj(self.update(mh, v).flatten(2))

    def forward(self, x):
        """x (B, T, C), the layer's normalised input -> (B, T, C)."""
        return self.project(*self.heads(x))

class BeliefStar(CausalSelfAttention):
    """Delta W^o + Delta_s W^s.  [BF Eq. 15]"""
    def __init__(self, c, layer):
        super().__init__(c, layer)
        self.c_proj_s = nn.Linear(c.n_embd, c.n_embd, bias=False)  # W^s

    def update(self, mh, v):
        return orthogonal(mh, v, (-2, -1))  # Delta

    def project(self, mh, v):
        out = super().project(mh, v)
        delta_s = orthogonal(mh, v, (-1,))
        return out + self.c_proj_s(delta_s.flatten(2))

ATTENTION['belief-star'] = BeliefStar

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))

class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.ln_1 = make_norm(c)
        variant = ATTENTION[c.attention]
        attention = variant if isinstance(variant, type) else CausalSelfAttention
        self.attn = attention(c, layer)
        self.ln_2 = make_norm(c)
        self.mlp = MLP(c)
        self.drop = nn.Dropout(c.dropout)
        self.attn_scale = (2 * c.n_layer) ** -0.5 if c.arch == 'rotary' else 1.0  # as in `casted`

    def forward(self, x):
        x = x + self.drop(self.attn_scale * self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))

class GPT(nn.Module):
    """nanoGPT's GPT-2 or, if arch is 'rotary', modded-nanogpt's, with their state-dict keys."""
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd),
            wpe=nn.Embedding(c.block_size, c.n_embd) if c.arch == 'gpt2' else None,
            drop=nn.Dropout(c.dropout),
            h=nn.ModuleList(Block(c, layer) for layer in range(c.n_layer)),
            ln_f=make_norm(c)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p from seed and name alone: parameters that variants share start equal."""
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
        # any other parameter, such as gamma, keeps the value it was made with

    def embed(self, idx):
        """idx (B, T) -> (B, T, C)."""
        x = self.transformer.wte(idx)
        if self.config.arch == 'gpt2':
            position = torch.arange(idx.size(1), device=idx.device)
            x = self.transformer.drop(x + self.transformer.wpe(position))
        return x

    def forward(self, idx, targets=None):
        """idx, targets (B, T) -> logits (B, T, vocab_size), loss in nats per token; targets of -1
        are ignored. Without targets: logits of the last position (B, 1, vocab_size), and None."""
        x = self.embed(idx)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0 takes the likeliest token; top_k
        leaves only so many to choose from. As in nanoGPT, nothing is cached."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1].float()  # (B, vocab_size)
            if top_k:
                least = logits.topk(min(top_k, logits.size(1))).values[:, [-1]]
                logits[logits < least] = -math.inf
            if temperature > 1e-6:  # below, softmax would overflow
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)  # (B, 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, token], dim=1)
        return idx

# ------------------------------------ data ------------------------------------
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
def make_model(c, data):
    """A model on the CPU for the vocabulary of data, which may be what a saved run knows of it."""
    size = c.vocab_size or getattr(data, 'vocab_size', 0)
    if not size:  # your own arrays do not say
        size = 1 + int(max(np.max(data.train), np.max(data.val)))
        if min(np.min(data.train), np.min(data.val)) < 0:
            fail('your data have ids below 0: leave padding out')
    return GPT(replace(c, vocab_size=size, tokenizer=getattr(data, 'tokenizer', c.tokenizer)))

def load_weights(model, path):
    """Start from a checkpoint of this script, nanoGPT or `casted`, which have the same keys."""
    weights = {key: p for key, p in read_weights(path, n_head=model.config.n_head).items()
               if not key.endswith(('.attn.bias', '.inv_freq'))}  # masks, rotary frequencies
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        fail(f'--init {path} does not fit the model: {" ".join(str(error).split())[:200]}')

def make_optimizer(model, c):
    """AdamW, with weight decay for matrices and embeddings only. train needs one optimiser, no
    subclass of AdamW: it sets every group's lr and saves its `state`."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        group = matrices if name.endswith('.weight') and p.dim() == 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=c.weight_decay),
              dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))

def windows(tokens, starts, c, device):
    """Inputs (B, T) from each start on, and targets (B, T), shifted by one token. int64."""
    rows = np.stack([tokens[s:s + c.block_size + 1] for s in starts]).astype(np.int64)
    rows = torch.from_numpy(rows).to(device)  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]

def get_batch(data, c, step, micro, device):
    """A micro-batch of a step, the same for every variant and in a resumed run."""
    n = len(data.train) - c.block_size  # places where a window fits
    size = c.grad_accum_steps, c.batch_size  # 2 micro-batches of 32 are 1 of 64
    starts = np.random.default_rng([c.seed, step]).integers(n, size=size)
    return windows(data.train, starts[micro], c, device)

def loss_of(model, batch, c):
    """Loss of a batch, in training and validation."""
    return model(*batch)[1]

@torch.no_grad()
def diagnose(model, idx):
    """idx (B, T) -> means over all tokens of metrics of attention: 0.mh is mh in layer 0.

    mh is ||MH||; update is ||Phi|| or ||Delta||, and ||Delta|| <= ||MH||  [BF Eq. 11]. mh_out and
    update_out are these norms after W^o; cos_mh and cos_update are the cosines of those vectors
    with the layer's input X; alpha is <MH,V> / <V,V>.
    """
    metrics = {}
    x = model.embed(idx)  # (B, T, C)
    for i, block in enumerate(model.transformer.h):
        attn = block.attn
        if type(attn).forward is not CausalSelfAttention.forward:
            return {}  # it need not have MH and V
        mh, v = attn.heads(block.ln_1(x))  # (B, T, nh, hs)
        update = attn.update(mh, v)
        mh, v, update = [t.flatten(2).to(x) for t in (mh, v, update)]  # (B, T, C), in x's dtype
        mh_out, update_out = [(t @ attn.c_proj.weight.T).to(x) for t in (mh, update)]
        layer = dict(
            mh=mh.norm(dim=-1), update=update.norm(dim=-1),
            mh_out=mh_out.norm(dim=-1), update_out=update_out.norm(dim=-1),
            cos_mh=F.cosine_similarity(mh_out, x, -1),
            cos_update=F.cosine_similarity(update_out, x, -1),
            alpha=(mh * v).sum(-1) / (v * v).sum(-1))
        if torch.is_tensor(attn.gamma):  # a learned one
            layer['gamma'] = attn.gamma
        for name, values in layer.items():
            metrics[f'{i}.{name}'] = values.mean().item()
        x = block(x)
    return metrics

@torch.no_grad()
def evaluate(model, data, c, device):
    """Loss on evenly spread windows, and diagnose's metrics on eight."""
    last = len(data.val) - c.block_size - 1
    starts = np.unique(np.linspace(0, last, c.eval_rows).astype(np.int64))
    total = 0.0
    for i in range(0, len(starts), c.batch_size):
        x, y = windows(data.val, starts[i:i + c.batch_size], c, device)
        total += loss_of(model, (x, y), c).item() * len(x)
    idx, _ = windows(data.val, np.linspace(0, last, 8).astype(np.int64), c, device)
    return dict(val_loss=total / len(starts), **diagnose(model, idx))

def learning_rate(step, c):
    """The learning rate of a step, counted from 0."""
    left = c.max_iters - step
    if step < c.warmup_iters:
        factor = (step + 1) / (c.warmup_iters + 1)  # as in nanoGPT
    elif c.schedule == 'trapezoid':  # constant until warmdown_iters before the end
        factor = min(1.0, left / max(1, c.warmdown_iters))
    else:
        done = 1 - left / (c.max_iters - c.warmup_iters)
        cosine = 0.5 * (1 + math.cos(math.pi * done))  # from 1 to 0
        factor = c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine
    return c.learning_rate * factor

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
    go to `folder`, if any. Your own data need two arrays of ids, data.train and data.val, each
    longer than a window."""
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
            weights = dict(model=model.state_dict(), config=asdict(model.config),
                           data=getattr(data, 'facts', {}))
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
            log, losses = [*log, row], []
            if row['val_loss'] == min(past['val_loss'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
        if step == c.max_iters:
            break

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        clock = time.time()
        torch.manual_seed(((c.seed << 24) + step) * WORLD + RANK)  # dropout
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

# ------------------------------------ report, sample ------------------------------------
def report(c, model, log, folder, data):
    """Print the result beside a bigram model's and a sample, and draw the run and its layers."""
    print(f'\nresult  validation loss {log[-1]["val_loss"]:.3f} nats per token '
          f'(a bigram model: {bigram_loss(data):.3f})')
    try:
        text = complete(replace(c, num_samples=1), model)
        print(f'\nAfter {c.prompt!r} the model writes:\n{text}\n')
    except (ImportError, OSError) as error:  # GPT-2's tokenizer needs tiktoken and, once, a network
        print(f'note    no sample: {str(error)[:100]}')
    draw(folder / 'curves.png', {c.variant: log}, [
        ('training loss (nats per token)', 'loss'),
        ('validation loss (nats per token)', 'val_loss')])
    draw_layers(folder / 'layers.png', log, c.n_layer)
    other = 'softmax' if c.attention != 'softmax' else 'attentionx'
    files_and_next(c, folder, 'attention', [other, c.attention], 'sample')

def bigram_loss(data):
    """Validation loss of a smoothed bigram model, in nats per token."""
    train, val = data.train[:5 * 10**6].tolist(), data.val[:10**6].tolist()
    single, pair = Counter(train), Counter(zip(train, train[1:]))
    total = 0.0
    for x, y in zip(val, val[1:]):
        prior = (single[y] + 1) / (len(train) + data.vocab_size)
        total -= math.log((pair[x, y] + prior) / (single[x] + 1))
    return total / (len(val) - 1)

def draw_layers(path, log, n_layer):
    """What diagnose finds, layer by layer over the steps. (BF's Fig. 3 shows token 0 of a ViT.)"""
    if '0.mh' not in log[-1]:
        return print('note    no layers.png: diagnose skips a class with its own forward')
    layers = {}
    for i in range(n_layer):
        rows = [{name.removeprefix(f'{i}.'): x for name, x in row.items()} for row in log]
        layers[f'layer {i}'] = rows
    draw(path, layers, [
        ('mean length: MH, dashed: update', 'mh', 'update'),
        ('both after the output projection', 'mh_out', 'update_out'),
        ('their cosine with the input X', 'cos_mh', 'cos_update'),
        ('alpha = <MH,V> / <V,V>', 'alpha')])

def complete(c, model):
    """--prompt and the model's continuations of it."""
    tokenizer = model.config.tokenizer
    encode, decode = get_tokenizer(tokenizer)
    prompt = c.prompt
    if prompt.startswith('FILE:'):  # as in nanoGPT
        prompt = Path(prompt.removeprefix('FILE:')).read_text('utf-8', 'replace')
    torch.manual_seed(c.seed)
    idx = torch.tensor([encode(prompt or '\n')], device=model.lm_head.weight.device)  # (1, T)
    texts = []
    for _ in range(c.num_samples):
        tokens = model.generate(idx, c.new_tokens, c.temperature, c.top_k)[0].tolist()
        known = [t for t in tokens if t < VOCAB_SIZE[tokenizer]]  # vocab_size may be padded
        texts.append(decode(known))
    return '\n---------------\n'.join(texts)

def sample(c):
    model, _ = load_run(c)
    text = complete(c, model)
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

ACTIONS = {'train': train_and_report, 'sample': sample}
# actions that start a run, and settings they imply; others, and --resume, look for an old one
NEW = {'train': {}}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    main()
