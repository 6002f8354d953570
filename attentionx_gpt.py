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

    equation        what reaches the output projection                   function
    [BF Eq. 9]      MH                                                   multi_head, softmax
    [AX2 Eq. 10]    Phi = V - gamma MH,        gamma >= 1                attentionx
    [AX2 Sec. 5]    one learned parameter: [choice] gamma, per head      attentionx-learned
    [AX1 Eq. 9]     Phi = gamma V - MH,        0 < gamma <= 1            attentionx-v1
    [BF Eq. 10]     Delta = MH - alpha V,      alpha = <MH,V> / <V,V>    belief, orthogonal
    [BF Eq. 13]     the same in every head, each with its own beta       belief-head
    [BF Eq. 15]     Delta W^o + Delta_s W^s                              belief-star, forward
    [AX2 Sec. 3.2]  gamma = 1 where no token attends to itself           default_gamma
    [AX2 Sec. 4]    gamma = 3 elsewhere; [AX1 Sec. 4.2]: 0.5             default_gamma
    [BF Eq. 11]     ||Delta|| <= ||MH|| (compare BF's Fig. 3)            diagnose

AttentionX's first version at gamma computes the same functions as its revision at 1 / gamma, since
W^o can absorb the factor between them. The two do not train alike: the factor scales the update.

    python attentionx_gpt.py                              # train: two minutes on a CPU, no network
    python attentionx_gpt.py --attention softmax          # the baseline, on the same batches
    python attentionx_gpt.py --resume                     # continue the last run
    python attentionx_gpt.py sample --prompt "def main("  # let the model continue a text
    python attentionx_gpt.py --preset owt-124m            # AttentionX's recipe: nanoGPT's GPT-2
    python experiments/compare.py attentionx_gpt --sweep attention=softmax,attentionx,belief

The first command ends at a validation loss of 1.643 nats per token, here a byte, softmax at 1.676,
and a bigram model at 2.438 (Python 3.11's library, 800 steps, 631,680 parameters, one seed).
[choice] marks where a paper is silent, [deviation] where we differ on purpose. You can stop reading
at the banner `runs`: all four scripts share the rest.
"""
import argparse
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
RANK = int(os.environ.get('RANK', 0))         # index of this process, set by torchrun
WORLD = int(os.environ.get('WORLD_SIZE', 1))  # number of processes, set by torchrun

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False, dropout=0.0):
    """MH = softmax(QK^T / sqrt(hs)) V, causal.  [BF Eq. 9]

    q (B, nh, T, hs), k and v (B, nh, S, hs) -> (B, T, nh, hs). S = T or, with a cache, T = 1.
    With zero_diag no token attends to itself; the first token, which sees no other, gets 0.
    """
    causal = q.size(2) == k.size(2)  # a single query is the newest token's and sees every key
    if zero_diag:
        k, v = k[:, :, :-1], v[:, :, :-1]
        if causal:
            q = q[:, :, 1:]  # query t + 1 sees keys 0..t: causal again
    mh = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    mh = mh.transpose(1, 2)
    if zero_diag and causal:
        mh = F.pad(mh, (0, 0, 0, 0, 1, 0))  # the first token's 0
    return mh

def orthogonal(mh, v, dims):
    """MH - alpha V, the part of MH orthogonal to V. alpha = <MH,V> / <V,V>, over `dims`."""
    wide = torch.promote_types(v.dtype, torch.float32)  # ||V||^2 easily overflows float16
    x, y = mh.to(wide), v.to(wide)
    mh_v = (x * y).sum(dims, keepdim=True)
    v_v = (y * y).sum(dims, keepdim=True).clamp_min(1e-30)  # [choice] alpha = 0 where V = 0
    return (x - mh_v / v_v * y).to(mh.dtype)

ATTENTION = {  # from MH and V (B, T, nh, hs): what reaches the output projection
    # Your own variant is a line here or a subclass of CausalSelfAttention. A line must treat each
    # token by itself: sampling passes only the newest.
    'softmax': lambda mh, v, gamma: mh,                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,             # [AX2 Eq. 10]
    'attentionx-learned': lambda mh, v, gamma: v - gamma * mh,     # [AX2 Sec. 5], gamma (nh, 1)
    'attentionx-v1': lambda mh, v, gamma: gamma * v - mh,          # [AX1 Eq. 9]
    'belief': lambda mh, v, gamma: orthogonal(mh, v, (-2, -1)),    # [BF Eq. 10]
    'belief-head': lambda mh, v, gamma: orthogonal(mh, v, (-1,)),  # [BF Eq. 13], in every head
    # [BF Eq. 15]: both, each with its own output matrix
    'belief-star': lambda mh, v, gamma: (orthogonal(mh, v, (-2, -1)), orthogonal(mh, v, (-1,))),
    'softmax-scaled': lambda mh, v, gamma: gamma * mh,             # control: is it the scale?
    'value-skip': lambda mh, v, gamma: mh + v,                     # control: is it the added V?
}

def default_gamma(c):
    """The papers' gamma, unless --gamma is given."""
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
    batch_size: int = 32           # windows in memory at once, shared among the processes
    grad_accum_steps: int = 1      # batches per optimiser step
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
    # machine: from here on, settings may change when a run is resumed
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 1               # CPU threads; 0 for PyTorch's default
    log_interval: int = 50         # steps between lines of progress
    resume: bool = False           # continue --folder or the last run; if there is none, start one
    out_dir: str = 'out'           # where runs are written
    # actions
    folder: str = ''               # sample, --resume: a run's folder; default: the last run's
    prompt: str = '\ndef '         # sample: a text to continue
    new_tokens: int = 300          # sample
    temperature: float = 0.8       # sample: 0 takes the likeliest token

    def __post_init__(self):
        if self.attention not in ATTENTION:
            fail(f'--attention {self.attention} is not in ATTENTION: run the file that adds it')
        gamma = default_gamma(self)
        if self.attention in ('attentionx', 'attentionx-learned') and not gamma >= 1:
            fail(f'--gamma {gamma:g}: {self.attention} takes 1 or more')
        if self.attention == 'attentionx-v1' and not 0 < gamma <= 1:
            fail(f'--gamma {gamma:g}: attentionx-v1 takes more than 0, up to 1')
        if self.n_embd % (2 * self.n_head):
            fail(f'--n-embd {self.n_embd} must be an even multiple of --n-head {self.n_head}')
        if not self.prompt:
            fail('--prompt is empty: the model continues at least one token')

    @property
    def variant(self):
        return self.attention + ('-zd' if self.zero_diag else '')

GPT2_SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, data='openwebtext',
                  beta2=0.95, threads=0)
PRESETS = {
    'tiny': {},
    't4': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2,
               max_iters=3000, learning_rate=1e-3, eval_interval=250, threads=0),
    # [choice] nanoGPT's recipe: AX1 and AX2 give only the repository, the data and gamma
    'owt-124m': dict(GPT2_SMALL, vocab_size=50304, batch_size=12, grad_accum_steps=40,
                     max_iters=600000, learning_rate=6e-4, warmup_iters=2000, eval_interval=1000,
                     eval_rows=2400),
    # BF trains modded-nanogpt's branch `casted` on 5B tokens of OpenWebText
    # [choice] `casted` on eight GPUs: 9536 steps of 524,288 tokens, 5B in all
    # [deviation] unlike those of `casted`, our weights are not rounded to float8
    'belief-124m': dict(GPT2_SMALL, attention='belief', arch='rotary', vocab_size=50257,
                        batch_size=16, grad_accum_steps=32, max_iters=9536, learning_rate=1.8e-3,
                        schedule='trapezoid', warmup_iters=256, warmdown_iters=2048,
                        grad_clip=0.0, eval_interval=128, eval_rows=1280),
}
# smallest and largest values; where none is given, 0 and no limit
LOWEST = dict.fromkeys(('n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size',
                        'grad_accum_steps', 'eval_interval', 'eval_rows', 'log_interval'), 1)
HIGHEST = dict(min_lr_ratio=1, beta1=0.9999, beta2=0.999999, dropout=0.99)
CHOICES = {
    'attention': ATTENTION, 'arch': ('gpt2', 'rotary'), 'tokenizer': ('bytes', 'gpt2'),
    'schedule': ('cosine', 'trapezoid'), 'dtype': ('auto', 'float32', 'bfloat16', 'float16'),
}

# ------------------------------------ model ------------------------------------
def rotate(x, past=0):
    """Rotary position embedding of x (B, T, nh, hs), whose first token is at position `past`."""
    hs = x.size(3)
    inv_freq = 10000 ** -(torch.arange(0, hs, 2, device=x.device).float() / hs)
    position = torch.arange(past, past + x.size(1), device=x.device).float()
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
    def __init__(self, c, layer):  # layer, counted from 0, is for subclasses
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)
        if c.attention == 'attentionx-learned':
            self.gamma = nn.Parameter(torch.full((c.n_head, 1), self.gamma))
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)  # W^o
        if c.attention == 'belief-star':
            self.c_proj_s = nn.Linear(c.n_embd, c.n_embd, bias=False)  # W^s

    def qkv(self, x, cache=None):
        """x (B, T, C) -> q (B, nh, T, hs), k and v (B, nh, S, hs). With a cache, {} at first, k and
        v are those of all S tokens so far; without one, S = T."""
        c = self.config
        q, k, v = self.c_attn(x).unflatten(2, (3, c.n_head, -1)).unbind(2)  # (B, T, nh, hs)
        past = cache['k'].size(1) if cache else 0  # number of tokens before x's
        if c.arch == 'rotary':
            q, k = rotate(q, past), rotate(k, past)
        if past:
            k, v = torch.cat([cache['k'], k], 1), torch.cat([cache['v'], v], 1)
        if cache is not None:
            cache.update(k=k, v=v)
        return [t.transpose(1, 2) for t in (q, k, v)]

    def heads(self, x, cache=None):
        """x (B, T, C) -> MH and V of x's tokens, both (B, T, nh, hs)."""
        c = self.config
        q, k, v = self.qkv(x, cache)
        mh = multi_head(q, k, v, c.zero_diag, c.dropout if self.training else 0.0)
        return mh, v[:, :, -x.size(1):].transpose(1, 2)

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
    def __init__(self, c, layer):
        super().__init__()
        self.ln_1 = make_norm(c)
        variant = ATTENTION[c.attention]
        attention = variant if isinstance(variant, type) else CausalSelfAttention
        self.attn = attention(c, layer)
        self.ln_2 = make_norm(c)
        self.mlp = MLP(c)
        self.drop = nn.Dropout(c.dropout)
        self.attn_scale = (2 * c.n_layer) ** -0.5 if c.arch == 'rotary' else 1.0

    def forward(self, x, cache=None):
        x = x + self.drop(self.attn_scale * self.attn(self.ln_1(x), cache))
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

    def embed(self, idx, past=0):
        """idx (B, T), whose first token is at position `past` -> (B, T, C)."""
        x = self.transformer.wte(idx)
        if self.config.arch == 'gpt2':
            position = torch.arange(past, past + idx.size(1), device=idx.device)
            x = self.transformer.drop(x + self.transformer.wpe(position))
        return x

    def forward(self, idx, targets=None, cache=None):
        """idx, targets (B, T) -> logits (B, T, V), loss in nats per token (not of targets -1).
        Without targets: logits of the last position (B, 1, V), and None. With a cache, a dict for
        each layer ({} at first), idx are the tokens that it lacks."""
        past = cache[0]['k'].size(1) if cache and cache[0] else 0
        x = self.embed(idx, past)
        for i, block in enumerate(self.transformer.h):
            x = block(x, cache[i] if cache else None)
        x = self.transformer.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0):
        """idx (B, T) -> (B, T + max_new_tokens); temperature 0 takes the likeliest token."""
        unread, cache = idx, [{} for _ in self.transformer.h]  # each layer's keys and values
        for _ in range(max_new_tokens):
            if idx.size(1) > self.config.block_size:
                # the window slides, so all positions change and no cached key or value holds
                unread, cache = idx[:, -self.config.block_size:], None
            logits = self(unread, cache=cache)[0][:, -1].float()  # (B, V)
            if temperature:
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)  # (B, 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, token], dim=1)
            unread = token
        return idx

# ------------------------------------ data ------------------------------------
VOCAB_SIZE = dict(bytes=256, gpt2=50257)  # of each tokenizer

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
    """c.data -> an object with train and val (uint16 tokens), tokenizer (a name), vocab_size."""
    folder = Path(c.data) if Path(c.data).is_dir() else Path('data', c.data)
    if folder.is_dir():
        tokenizer = read_meta(folder)['tokenizer']
        train, val = [read_tokens(folder / name, tokenizer) for name in ('train.bin', 'val.bin')]
    else:
        tokenizer = c.tokenizer
        encode, _ = get_tokenizer(tokenizer)
        train, val = [np.array(encode(text), dtype=np.uint16) for text in read_text(c)]
    if min(len(train), len(val)) <= c.block_size + 1:
        fail(f'--data {c.data} does not fill a window of --block-size {c.block_size}')
    vocab_size = VOCAB_SIZE[tokenizer]
    if 0 < c.vocab_size < vocab_size:
        fail(f'--vocab-size {c.vocab_size}: the vocabulary of {tokenizer} has {vocab_size} tokens')
    return SimpleNamespace(train=train, val=val, tokenizer=tokenizer, vocab_size=vocab_size,
                           about=c.data)

# ------------------------------------ training ------------------------------------
def make_model(c, data):
    """A model on the CPU. data completes c, and is None if c comes from a saved model."""
    if data:
        size = c.vocab_size or getattr(data, 'vocab_size', 0)
        if not size:  # your own data may not say
            size = 1 + max(int(data.train.max()), int(data.val.max()))
        c = replace(c, vocab_size=size, tokenizer=getattr(data, 'tokenizer', c.tokenizer))
    model = GPT(c)
    if c.init and data and not c.resume:
        load_weights(model, c.init)
    return model

def load_weights(model, path):
    """Start from a checkpoint of this script, nanoGPT or `casted`, which have the same keys."""
    weights = {key: p for key, p in read_weights(path, n_head=model.config.n_head).items()
               if not key.endswith(('.attn.bias', '.inv_freq'))}  # masks, rotary frequencies
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        fail(f'--init {path} does not fit the model: {" ".join(str(error).split())[:200]}')

def make_optimizer(model, c):
    """AdamW, with weight decay for matrices and embeddings only. train sets all groups' rates."""
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
    """This process's rows of a micro-batch, the same for every variant and in a resumed run."""
    n = len(data.train) - c.block_size  # places where a window fits
    size = c.grad_accum_steps, c.batch_size
    starts = np.random.default_rng([c.seed, step]).integers(n, size=size)
    return windows(data.train, starts[micro, RANK::WORLD], c, device)

def loss_of(model, batch, c):
    return model(*batch)[1]

@torch.no_grad()
def diagnose(model, idx):
    """idx (B, T) -> means over all tokens of figures of attention: 0.mh is mh in layer 0.

    mh is ||MH||; update is ||Phi|| or ||Delta||, and ||Delta|| <= ||MH||  [BF Eq. 11]. mh_out and
    update_out are these norms after W^o; cos_mh and cos_update are the cosines of those vectors
    with the layer's input X; alpha is <MH,V> / <V,V>.
    """
    figures = {}
    x = model.embed(idx)  # (B, T, C)
    for i, block in enumerate(model.transformer.h):
        attn = block.attn
        if type(attn).forward is not CausalSelfAttention.forward:
            return {}  # a subclass need not have MH and V
        mh, v = attn.heads(block.ln_1(x))  # (B, T, nh, hs)
        update = ATTENTION[model.config.attention](mh, v, attn.gamma)
        if model.config.attention == 'belief-star':
            update, _ = update  # Delta, without Delta_s
        mh, v, update = [t.flatten(2).to(x) for t in (mh, v, update)]  # (B, T, C), in x's dtype
        mh_out, update_out = [(t @ attn.c_proj.weight.T).to(x) for t in (mh, update)]
        layer = dict(
            mh=mh.norm(dim=-1), update=update.norm(dim=-1),
            mh_out=mh_out.norm(dim=-1), update_out=update_out.norm(dim=-1),
            cos_mh=F.cosine_similarity(mh_out, x, -1),
            cos_update=F.cosine_similarity(update_out, x, -1),
            alpha=(mh * v).sum(-1) / (v * v).sum(-1), gamma=torch.as_tensor(attn.gamma))
        for name, values in layer.items():
            figures[f'{i}.{name}'] = values.mean().item()
        x = block(x)
    return figures

@torch.no_grad()
def evaluate(model, data, c, device):
    """Loss on evenly spread windows, and diagnose's figures on eight."""
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
    go to `folder`, if any. Your own data need two arrays of ids, data.train and data.val, each
    longer than a window."""
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
            log, losses = [*log, row], []
            best = min(past['val_loss'] for past in log)  # this row included
            if row['val_loss'] <= best or math.isnan(best):
                save(folder, 'best.pt', state)
            write_log(folder, log)
            print(f'step {step}/{c.max_iters}: {show(row)}', flush=True)
        if step == c.max_iters:
            break

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        clock = time.time()
        torch.manual_seed(((c.seed << 24) + step) * WORLD + RANK)  # for dropout
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(step, c)
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

# ------------------------------------ report, sample ------------------------------------
def report(c, model, log, folder, data):
    """Draw the run and its layers -> text: the result, beside that of a bigram model."""
    draw(folder / 'curves.png', {c.variant: log}, [
        ('training loss (nats per token)', 'loss'),
        ('validation loss (nats per token)', 'val_loss')])
    draw_layers(folder / 'layers.png', log, c.n_layer)
    other = 'softmax' if c.attention != 'softmax' else 'attentionx'
    return (f'\nAfter {c.prompt!r} the model writes:\n{complete(c, model)}\n\n'
            f'result  validation loss {log[-1]["val_loss"]:.3f} nats per token '
            f'(a bigram model: {bigram_loss(data):.3f})\n'
            f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}\n'
            f'next    compare with --attention {other}, or: '
            f'python {PROGRAM} sample --folder {folder}')

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
        return  # diagnose skips subclasses
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
    """--prompt and the model's continuation of it."""
    tokenizer = model.config.tokenizer
    encode, decode = get_tokenizer(tokenizer)
    torch.manual_seed(c.seed)
    idx = torch.tensor([encode(c.prompt)], device=model.lm_head.weight.device)  # (1, T)
    tokens = model.generate(idx, c.new_tokens, c.temperature)[0].tolist()
    return decode([t for t in tokens if t < VOCAB_SIZE[tokenizer]])  # owt-124m has spare ids

def sample(c):
    _, model = load_run(c)
    text = complete(c, model)
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

ACTIONS = {'train': train_and_report, 'sample': sample}

if __name__ == '__main__' and '__file__' in globals():  # pasted into a notebook: only define things
    sys.stdout.reconfigure(errors='replace')  # for terminals that cannot show every character
    main()
