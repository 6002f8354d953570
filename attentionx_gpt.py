# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "matplotlib"]
# ///
"""A GPT whose attention outputs how MH differs from V: AttentionX and BeliefFormer, and softmax.

Multi-head attention gives a token a weighted sum of values, MH = softmax(QK^T / sqrt(hs)) V. The
papers argue that a layer should output how MH differs from the token's own value V. The idea comes
from PDMM, an algorithm by which the nodes of a graph agree on a solution: in each round, neighbours
exchange how their solutions differ [BF Eq. 1-5].

[choice]: the paper does not say, so we chose. [deviation]: we differ from it on purpose.

    AX1  G. Zhang, R. Heusdens, AttentionX, arXiv 2409.04275, version 1
    AX2  its version 3
    BF   G. Zhang, BeliefFormer: Belief Attention in Transformer, OpenReview Ard2QzPAUK

    equation        what reaches the output projection W^o                    --attention
    [BF Eq. 9]      MH                                                        softmax
    [AX2 Eq. 10]    Phi = V - gamma MH,         gamma >= 1                    attentionx
    [AX1 Eq. 9]     Phi = gamma V - MH,         0 < gamma <= 1                attentionx-v1
    [choice]        V - gamma MH, where each head learns its gamma            attentionx-learned
    [BF Eq. 10]     Delta = MH - alpha V,       alpha = <MH,V> / <V,V>        belief
    [BF Eq. 13]     Delta_s: in head m, MH_m - beta_m V_m,
                    beta_m = <MH_m,V_m> / <V_m,V_m>                           belief-head
    [BF Eq. 15]     Delta and, through a second matrix W^s, Delta_s           belief-star

<a,b> is a token's dot product: over all its channels in BF Eq. 10, over head m's in BF Eq. 13.
The default gamma is 3 [AX2 Sec. 4.2]. It is 1 if --zero-diag is set [AX2 Sec. 3.2], and in
attentionx-v1 it is 0.5 [AX1 Sec. 4.2]. As g V - MH = g (V - MH / g), attentionx-v1 with gamma g is
g times attentionx with gamma 1 / g. W^o can learn the factor g, but the two train differently.

    python attentionx_gpt.py                              # train: a minute on two cores, no network
    python attentionx_gpt.py --attention softmax          # the baseline, on the same batches
    python attentionx_gpt.py sample --prompt "def main("  # the newest run continues a text
    python attentionx_gpt.py --preset t4 --resume         # start or, after a stop, continue
    python attentionx_gpt.py --help                       # every setting

The first two end with validation losses of 1.643 and 1.676 nats per token, here a byte (on Python
3.11's standard library): one seed at one learning rate, so not yet a result. To try a formula of
your own, add a row to ATTENTION.
"""
import argparse
import atexit
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
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

SCRIPT = Path(__file__).stem
CODE = zlib.crc32(Path(__file__).read_bytes())  # of this file's text: see resume_run
WORLD, RANK = 1, 0  # number of processes, and index of this one
if dist.is_available() and dist.is_torchelastic_launched():  # torchrun --nproc-per-node 2 ...
    WORLD, RANK = int(os.environ['WORLD_SIZE']), int(os.environ['RANK'])

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{SCRIPT}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ the papers' method ------------------------------------
def multi_head(q, k, v, zero_diag=False, dropout=0.0):
    """MH = softmax(QK^T / sqrt(hs)) V, where no token sees a later one.  [BF Eq. 9]

    q, k, v and MH are (B, T, nh, hs). With zero_diag no token attends to itself [AX2 Sec. 3.2]; the
    first, which then sees none, gets 0 [choice].
    """
    if zero_diag:  # without the first query and the last key, token t + 1 sees 0..t
        mh = multi_head(q[:, 1:], k[:, :-1], v[:, :-1], dropout=dropout)
        return torch.cat([torch.zeros_like(v[:, :1]), mh], dim=1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh, T, hs)
    # Written out:
    #     scores = q @ k.mT / hs ** 0.5                                    # (B, nh, T, T)
    #     later = torch.ones(T, T, dtype=torch.bool).triu(1)
    #     mh = scores.masked_fill(later, -math.inf).softmax(-1) @ v        # (B, nh, T, hs)
    mh = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return mh.transpose(1, 2)

def orthogonal(mh, v):
    """MH - alpha V, the part of MH orthogonal to V, with alpha = <MH,V> / <V,V> over the last
    dimension: one alpha for each token of (B, T, C), one for each head of (B, T, nh, hs)."""
    dtype = mh.dtype
    wide = torch.promote_types(v.dtype, torch.float32)  # <V,V> easily overflows in float16
    mh, v = mh.to(wide), v.to(wide)
    mh_v = (mh * v).sum(-1, keepdim=True)
    v_v = (v * v).sum(-1, keepdim=True).clamp_min(1e-30)  # [choice] where V = 0, alpha = 0
    alpha = mh_v / v_v
    return (mh - alpha * v).to(dtype)

class CausalSelfAttention(nn.Module):
    """Attention with a formula of ATTENTION between MH and the output projection W^o."""
    def __init__(self, c, layer):  # layer: 0, 1, ..., for a class of yours
        super().__init__()
        self.config = c
        self.gamma = default_gamma(c)
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)  # W^o

    def heads(self, x):
        """x (B, T, C) -> MH and V, both (B, T, nh, hs)."""
        c = self.config
        q, k, v = self.c_attn(x).split(c.n_embd, dim=2)  # (B, T, C)
        q, k, v = [t.unflatten(2, (c.n_head, -1)) for t in (q, k, v)]  # (B, T, nh, hs)
        if c.arch == 'rotary':
            q, k = rotate(q), rotate(k)
        dropout = c.dropout if self.training else 0.0
        return multi_head(q, k, v, c.zero_diag, dropout), v

    def forward(self, x):
        """x (B, T, C), the layer's normalised input -> (B, T, C)."""
        mh, v = self.heads(x)
        formula = ATTENTION[self.config.attention]
        update = formula(mh, v, self.gamma)  # (B, T, nh, hs) or (B, T, C)
        return self.c_proj(update.flatten(2))

class LearnedGamma(CausalSelfAttention):
    """Phi = V - gamma MH. Each head learns its gamma.  [choice] AX2 learns none (Sec. 3.2)."""
    def __init__(self, c, layer):
        super().__init__(c, layer)
        gamma = torch.full((c.n_head, 1), self.gamma)  # (nh, 1), one start for all heads
        self.gamma = nn.Parameter(gamma)

    def forward(self, x):
        mh, v = self.heads(x)
        return self.c_proj((v - self.gamma * mh).flatten(2))

class BeliefStar(CausalSelfAttention):
    """Delta W^o + Delta_s W^s.  [BF Eq. 15]"""
    def __init__(self, c, layer):
        super().__init__(c, layer)
        self.c_proj_s = nn.Linear(c.n_embd, c.n_embd, bias=False)  # W^s. [choice] without bias

    def forward(self, x):
        nh = self.config.n_head
        mh, v = [t.flatten(2) for t in self.heads(x)]  # (B, T, C)
        delta = orthogonal(mh, v)
        mh, v = [t.unflatten(2, (nh, -1)) for t in (mh, v)]  # (B, T, nh, hs)
        delta_s = orthogonal(mh, v)
        return self.c_proj(delta) + self.c_proj_s(delta_s.flatten(2))

# To try your own, add a row. Then: --attention NAME, and python test_all.py every_variant
# A function of mh, v (B, T, nh, hs) and gamma returns W^o's input: (B, T, nh, hs) or (B, T, C).
# For parameters, settings or a mask of your own, write a class with a forward, as LearnedGamma is;
# for a mask, write its method `heads`, too.
ATTENTION = {
    'softmax': lambda mh, v, gamma: mh,                                            # [BF Eq. 9]
    'attentionx': lambda mh, v, gamma: v - gamma * mh,                             # [AX2 Eq. 10]
    'attentionx-v1': lambda mh, v, gamma: gamma * v - mh,                          # [AX1 Eq. 9]
    'attentionx-learned': LearnedGamma,                                            # [choice]
    'belief': lambda mh, v, gamma: orthogonal(mh.flatten(2), v.flatten(2)),        # [BF Eq. 10]
    'belief-head': lambda mh, v, gamma: orthogonal(mh, v),            # [BF Eq. 13], alone: [choice]
    'belief-star': BeliefStar,                                                     # [BF Eq. 15]
    'softmax-scaled': lambda mh, v, gamma: gamma * mh,   # a control: only the scale
    'value-skip': lambda mh, v, gamma: mh + v,           # a control: V is added
}  # experiments/variants.py has more, from other papers

def default_gamma(c):
    """--gamma, or the papers' value."""
    if c.gamma is not None:
        return float(c.gamma)
    if c.attention == 'attentionx-v1':
        return 0.5  # [AX1 Sec. 4.2]
    if c.zero_diag and c.attention != 'softmax-scaled':  # with 1 that would be softmax
        return 1.0  # [AX2 Sec. 3.2]
    return 3.0  # [AX2 Sec. 4.2]

# ------------------------------------ configuration ------------------------------------
@dataclass
class Config:
    """Every field is a flag: --n-layer 6, --zero-diag, --no-zero-diag. --help prints this.
    A field of yours needs a type: int, float, str, bool, Literal, or float | None (not set)."""
    # the papers' method
    attention: str = 'attentionx'  # a row of ATTENTION
    gamma: float | None = None     # default: 3; zero_diag: 1; attentionx-v1: 0.5
    zero_diag: bool = False        # a token does not attend to itself [AX2 Sec. 3.2]
    # model
    arch: Literal['gpt2', 'rotary'] = 'gpt2'  # nanoGPT's, or modded-nanogpt's as in BeliefFormer
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64           # tokens in a window
    vocab_size: int = 0            # 0: that of the data
    bias: bool = False             # biases in linear and norm layers (GPT-2 has them)
    dropout: float = 0.0
    init: str = ''                 # weights to start from: RUN/best.pt, or prepare_data.py's file
    # data
    data: str = 'builtin'          # a folder in data/, or builtin: Python's own source
    # training
    seed: int = 1337               # of weights, batches and dropout
    max_iters: int = 800           # optimiser steps
    batch_size: int = 32           # windows per forward pass
    grad_accum_steps: int = 1      # forward passes per step, of all processes together
    learning_rate: float = 2e-3    # at its peak
    min_lr_ratio: float = 0.1      # final cosine rate / learning_rate
    schedule: Literal['cosine', 'trapezoid'] = 'cosine'  # after warmup; see get_lr
    warmup_iters: int = 100        # steps up to the peak rate; set fewer for short runs
    warmdown_iters: int = 0        # trapezoid: steps of linear decay at the end
    weight_decay: float = 0.1      # AdamW's, on matrices
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0         # largest gradient norm; 0 for no clipping
    eval_interval: int = 100       # steps between evaluations and checkpoints; 0: only at the end
    eval_rows: int = 640           # validation windows, the same ones every time; 0: all
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matmuls
    # machine
    device: str = 'auto'           # cpu, cuda, cuda:1, mps
    compile: bool = False          # torch.compile the model
    threads: int = 0               # CPU threads; 0: PyTorch's choice
    log_interval: int = 50         # steps between lines of progress; 0: none
    resume: bool = False           # continue the newest run of the same flags, or start one
    out_dir: str = 'out'           # where runs are written
    # sample
    folder: str = ''               # a run's folder; default: the newest
    prompt: str = '\n'             # text to continue, or FILE:notes.txt
    num_samples: int = 1           # continuations
    new_tokens: int = 300          # in each
    temperature: float = 0.8       # 0 takes the likeliest token
    top_k: int = 0                 # only so many likeliest tokens; 0 for all

    def __post_init__(self):
        if min(self.n_head, self.batch_size, self.grad_accum_steps, self.block_size) < 1:
            fail('--n-head, --batch-size, --grad-accum-steps and --block-size are 1 or more')
        if self.n_embd % (2 * self.n_head):  # rotate() cuts each head into halves
            fail(f'--n-embd {self.n_embd} must be a multiple of twice --n-head {self.n_head}')
        if not 0 <= self.dropout < 1:
            fail(f'--dropout {self.dropout} must be at least 0, and less than 1')
        if self.prompt.startswith('FILE:'):  # as in nanoGPT
            self.prompt = Path(self.prompt.removeprefix('FILE:')).read_text('utf-8', 'replace')

CHOICES = {'attention': ATTENTION}  # flags whose values are the rows of a table
MACHINE = {  # settings that are not in a run's name, and may differ when it is resumed
    'device', 'compile', 'threads', 'log_interval', 'resume', 'out_dir', 'folder', 'prompt',
    'num_samples', 'new_tokens', 'temperature', 'top_k'}

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
    # BF: 5B tokens of OpenWebText (prepare_data.py openwebtext --parts 12), with the code of
    # modded-nanogpt's branch `casted`. [choice] 524,288 tokens a step, as on its eight GPUs, and as
    # many validation windows as one of them has.
    # [deviation] no weights are rounded to float8, windows may repeat, warmup is a step longer
    'belief-124m': dict(GPT2_SMALL, attention='belief', arch='rotary', vocab_size=50257,
                        batch_size=16, grad_accum_steps=32, max_iters=9536, learning_rate=1.8e-3,
                        schedule='trapezoid', warmup_iters=256, warmdown_iters=2048,
                        grad_clip=0.0, eval_interval=128, eval_rows=1280),
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
        variant = ATTENTION[c.attention]
        attention = variant if isinstance(variant, type) else CausalSelfAttention
        self.ln_1 = make_norm(c)
        self.attn = attention(c, layer)
        self.ln_2 = make_norm(c)
        self.mlp = MLP(c)
        self.drop = nn.Dropout(c.dropout)
        self.attn_scale = (2 * c.n_layer) ** -0.5 if c.arch == 'rotary' else 1.0  # as in `casted`

    def forward(self, x):
        x = x + self.drop(self.attn_scale * self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))

class GPT(nn.Module):
    """nanoGPT's GPT-2 or, if arch is 'rotary', modded-nanogpt's. State-dict keys are theirs."""
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
        ours = r'\.(wte|wpe|c_attn|c_fc|c_proj|c_proj_s)\.(weight|bias)$'  # lm_head has wte's
        for name, p in self.named_parameters():
            if re.search(ours, name):  # others, such as yours, stay as their class made them
                self.init_parameter(name, p)

    @torch.no_grad()
    def init_parameter(self, name, p):
        """Initialise p by seed and name alone: layers that variants share start equal."""
        c = self.config
        generator = torch.Generator().manual_seed(zlib.crc32(f'{c.seed} {name}'.encode()))
        if name.endswith('.bias'):
            p.zero_()
        elif c.arch == 'rotary':
            bound = p.size(1) ** -0.5  # PyTorch's default
            p.uniform_(-bound, bound, generator=generator)
        else:
            std = 0.02 / math.sqrt(2 * c.n_layer) if 'c_proj' in name else 0.02
            p.normal_(0.0, std, generator=generator)

    def forward(self, idx, targets=None):
        """idx, targets (B, T) -> logits (B, T, vocab_size), loss in nats per token. Without
        targets: logits of the last position (B, 1, vocab_size), and None."""
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.arch == 'gpt2':
            position = torch.arange(idx.size(1), device=idx.device)
            x = self.transformer.drop(x + self.transformer.wpe(position))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0):
        """idx (B, T) -> (B, T + max_new_tokens). temperature 0 takes the likeliest token; top_k
        leaves only so many to choose from. As in nanoGPT, nothing is cached."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1].float()  # (B, vocab_size)
            if top_k > 0:
                least = logits.topk(min(top_k, logits.size(1))).values[:, [-1]]
                logits[logits < least] = -math.inf
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
def make_model(c, meta):
    """A model on the CPU for the vocabulary of the data, with the weights of c.init, if any."""
    if 0 < c.vocab_size < meta['vocab_size']:
        fail(f'--vocab-size {c.vocab_size}: the data have {meta["vocab_size"]} tokens')
    model = GPT(replace(c, vocab_size=c.vocab_size or meta['vocab_size']))
    if c.init and not c.resume:  # a resumed run has weights of its own
        load_weights(model, c.init, optional='c_proj_s|gamma')  # add the names of your parameters
    return model

def load_weights(model, path, optional):
    """Load a checkpoint into a model. Parameters whose names match the pattern `optional` may be
    missing in either. Shapes do not show the number of heads, so it is compared."""
    saved, n_head = load(path), model.config.n_head
    if saved['config'].get('n_head', n_head) != n_head:
        fail(f'--init {path} has --n-head {saved["config"]["n_head"]}')
    try:
        missing, unexpected = model.load_state_dict(saved['model'], strict=False)
    except RuntimeError as error:  # other shapes
        fail(f'--init {path}: {" ".join(str(error).split())[:200]}')
    wrong = [name for name in missing + unexpected if not re.search(optional, name)]
    if wrong:
        fail(f'--init {path} does not fit: {", ".join(wrong[:5])} (see make_model)')
    print(f'init    {path}; not in it: {", ".join(missing) or "none"}; '
          f'left out: {", ".join(unexpected) or "none"}')

def make_optimizer(model, c):
    """AdamW. Only matrices named `weight`, of layers and embeddings, have weight decay."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        group = matrices if name.endswith('.weight') and p.dim() == 2 else others
        group.append(p)
    groups = [dict(params=matrices, weight_decay=c.weight_decay),
              dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))

def get_batch(data, c, step, micro_step, device):
    """A micro-batch of a step, the same for every variant and in a resumed run."""
    n = len(data.train) - c.block_size  # places where a window fits
    size = c.grad_accum_steps, c.batch_size  # 2 x 32 are the same windows as 1 x 64
    starts = np.random.default_rng([c.seed, step]).integers(n, size=size)
    return windows(data.train, starts[micro_step], c, device)

def loss_of(net, batch, c):
    """The loss of a micro-batch, in nats per token. train_step is the same in three scripts."""
    x, y = batch
    return net(x, y)[1]

@torch.no_grad()
def evaluate(model, data, c, device):
    """Mean loss of evenly spread validation windows, in nats per token."""
    last = len(data.val) - c.block_size - 1
    n = c.eval_rows or (len(data.val) - 1) // c.block_size
    starts = np.unique(np.linspace(0, last, n).astype(np.int64))  # in a short text some are equal
    total = 0.0
    for i in range(0, len(starts), c.batch_size):
        x, y = windows(data.val, starts[i:i + c.batch_size], c, device)
        total += model(x, y)[1].item() * len(x)
    return dict(val_loss=total / len(starts))

def get_lr(step, c):
    """The learning rate of a step, counted from 0."""
    if step < c.warmup_iters:
        return c.learning_rate * ((step + 1) / (c.warmup_iters + 1))  # as in nanoGPT
    left = c.max_iters - step
    if c.schedule == 'trapezoid':  # constant until warmdown_iters before the end
        return c.learning_rate * min(1.0, left / max(1, c.warmdown_iters))
    if c.schedule == 'cosine':
        done = 1 - left / (c.max_iters - c.warmup_iters)  # from 0 to 1
        cosine = 0.5 * (1 + math.cos(math.pi * done))     # from 1 to 0
        return c.learning_rate * (c.min_lr_ratio + (1 - c.min_lr_ratio) * cosine)
    fail(f'--schedule {c.schedule} needs a branch in get_lr')

def train_step(net, batches, c, optimizer, scaler, autocast):
    """One optimiser step on all micro-batches -> their mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with autocast:
            loss = loss_of(net, batch, c) / c.grad_accum_steps
        scaler.scale(loss).backward()
        total += loss.detach()
    if WORLD > 1:  # sum over the processes, each of which had its own micro-batches
        dist.all_reduce(total)
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
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
                                 '--learning-rate, or check any formula you edited')
    return total.item()

def train(c, folder=None, data=None):
    """Train a model as c says -> model, log (a list of dicts of metrics). Checkpoints and log.csv
    go to `folder`, if any."""
    if c.schedule == 'trapezoid' and 0 < c.max_iters <= c.warmdown_iters:
        print('note    --warmdown-iters fill all steps: the rate has no peak')
    device, dtype = pick_device(c)
    data = data or load_data(c)
    torch.manual_seed(c.seed)  # for layers of your own
    model = make_model(c, data.meta).to(device)
    optimizer = make_optimizer(model, c)
    autocast, scaler = mixed_precision(device, dtype)
    net = torch.compile(model) if c.compile else model  # the same parameters
    step, seconds, log, losses = 0, 0.0, [], []
    if c.resume:
        step, seconds, log = resume_run(c, data.meta, model, optimizer, scaler)
    first_step, first_seconds = step, seconds  # of this process, for its pace
    print(f'model   {c.attention}, {sum(p.numel() for p in model.parameters()):,} parameters, '
          f'on {device} in {dtype}\n'
          f'data    {c.data}, {len(data.train):,} tokens to train on, {len(data.val):,} held out')
    while True:
        due = step >= c.max_iters or (c.eval_interval and step % c.eval_interval == 0)
        if due and (not log or log[-1]['step'] < step):  # not twice in a resumed run
            row = dict(step=step, seconds=seconds)
            if losses:
                row['loss'] = sum(losses) / len(losses)
            model.eval()
            with autocast:
                row.update(evaluate(model, data, c, device))
            model.train()
            if math.isnan(row['val_loss']):
                raise FloatingPointError(f'the validation loss of step {step} is nan: try a lower '
                                         '--learning-rate, or check any formula you edited')
            # plain numbers: load would refuse those of NumPy
            log.append({name: float(x) for name, x in row.items()} | dict(step=step))
            losses = []
            weights = dict(model=model.state_dict(), config=asdict(model.config), data=data.meta,
                           code=CODE)
            if row['val_loss'] == min(past['val_loss'] for past in log):
                save(folder, 'best.pt', weights)
            write_log(folder, log)
            save(folder, 'ckpt.pt', dict(
                weights, settings=asdict(c), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), progress=(step, seconds, log)))
            print(f'step {step}/{c.max_iters}: val_loss {row["val_loss"]:.4f}', flush=True)
        if step >= c.max_iters:
            return model, log

        # one step; seed and step decide batch and dropout, so a resumed run repeats them
        start = time.perf_counter()
        torch.manual_seed(zlib.crc32(f'{c.seed} {step} {RANK}'.encode()))  # for dropout
        for group in optimizer.param_groups:
            group['lr'] = get_lr(step, c)
        batches = [get_batch(data, c, step, micro_step, device)  # this process's share
                   for micro_step in range(RANK, c.grad_accum_steps, WORLD)]
        losses.append(train_step(net, batches, c, optimizer, scaler, autocast))
        seconds += time.perf_counter() - start
        step += 1
        if c.log_interval and step % c.log_interval == 0:
            pace = (seconds - first_seconds) / (step - first_step)
            print(f'step {step}/{c.max_iters}: batch loss {losses[-1]:.4f}, {1000 * pace:.0f} ms '
                  f'a step, {(c.max_iters - step) * pace / 60:.1f} min left', flush=True)

# ------------------------------------ report, sample ------------------------------------
def report(c, model, log, folder, data):
    """Print the result beside a bigram model's, draw the curves, sample from the best weights."""
    print(f'\nresult  validation loss {log[-1]["val_loss"]:.3f} nats per token '
          f'(a bigram model: {bigram_loss(data):.3f})')
    draw(draw_curves, folder / 'curves.png', log, {
        'training loss (nats per token)': 'loss', 'validation loss (nats per token)': 'val_loss'})
    model.load_state_dict(load(folder / 'best.pt')['model'])
    try:
        text = complete(c, model, data.meta['tokenizer'])
        print(f'\nAfter {c.prompt!r} the model writes:\n{text}\n')
    except (ImportError, OSError) as error:  # GPT-2's tokenizer needs tiktoken and, once, a network
        print(f'note    no sample: {error}')
    print(f'files   {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}\n'
          f'next    python {SCRIPT}.py sample --folder "{folder}" --prompt TEXT')

def bigram_loss(data):
    """Loss of a smoothed bigram model, in nats per token, on up to a million validation tokens."""
    train, val = data.train[:5 * 10**6].tolist(), data.val[:10**6].tolist()
    single, pair = Counter(train), Counter(zip(train, train[1:]))
    total = 0.0
    for x, y in zip(val, val[1:]):
        unigram = (single[y] + 1) / (len(train) + data.meta['vocab_size'])
        total -= math.log((pair[x, y] + unigram) / (single[x] + 1))
    return total / (len(val) - 1)

def complete(c, model, tokenizer):
    """--prompt and the model's continuations of it, as text."""
    encode, decode = get_tokenizer(tokenizer)
    torch.manual_seed(c.seed)
    idx = torch.tensor([encode(c.prompt or '\n')], device=model.lm_head.weight.device)  # (1, T)
    return '\n---------------\n'.join(
        decode(model.generate(idx, c.new_tokens, c.temperature, c.top_k)[0].tolist())
        for _ in range(c.num_samples))

def sample(c):
    """Let a run's best weights continue --prompt -> the text."""
    model, meta = load_run(c)
    text = complete(c, model, meta['tokenizer'])
    print(text)
    return text

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
    """The best model of --folder, or of the newest run, and the meta of its data."""
    file = newest(c, 'best.pt')
    saved = load(file)
    print(f'run     {file.parent}, trained on {saved["config"].get("data")}')
    if saved.get('code') != CODE:
        print(f'note    {SCRIPT}.py has changed since that run was trained')
    try:
        model = make_model(Config(**dict(saved['config'], init='')), saved['data'])
        model.load_state_dict(saved['model'])
    except (KeyError, TypeError, RuntimeError) as error:  # a field, a row, a shape
        fail(f'{file} is of another script, or needs a row, field or shape that is gone (--folder '
             f'takes another run): {" ".join(repr(error).split())[:200]}')
    return model.to(pick_device(c)[0]).eval(), saved['data']

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
        print('note    --warmup-iters fill all steps: the rate has no peak')
    model, log = train(c, folder if RANK == 0 else None, data)
    if RANK == 0:
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
        if RANK:
            sys.stdout = open(os.devnull, 'w')  # only the first process prints
        if zlib.crc32(Path(__file__).read_bytes()) != CODE:
            print(f'note    {SCRIPT}.py was edited after it was imported: restart the notebook')
        action, c = parse(argv)
        if c.threads:
            torch.set_num_threads(c.threads)
        if c.grad_accum_steps % WORLD:
            fail(f'{WORLD} processes cannot share --grad-accum-steps {c.grad_accum_steps} evenly')
        if WORLD > 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ['LOCAL_RANK']))  # pick_device takes it
            dist.init_process_group()  # gloo for CPUs, nccl for GPUs
            atexit.register(dist.destroy_process_group)
        return ACTIONS[action](c)
    except KeyboardInterrupt:
        print('\nstopped; a training command with --resume continues at its last checkpoint')
        raise SystemExit(130)
    except (ImportError, OSError, FloatingPointError) as error:  # no package, disk full, loss nan
        fail(error)

ACTIONS = {'train': train_and_report, 'sample': sample}

if __name__ == '__main__':
    if hasattr(sys.stdout, 'reconfigure'):  # a console, which may lack a character
        sys.stdout.reconfigure(errors='replace')
    main(sys.argv[1:])
