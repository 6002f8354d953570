r"""Three variants from other papers, for attentionx_gpt.py, and one for admm_detr.py.

    python experiments/compare.py attentionx_gpt --with experiments/variants.py \
        --sweep attention=softmax,differential,gated,laplacian
    python experiments/compare.py admm_detr --with experiments/variants.py \
        --sweep cross_attention=admm,relu

    attention       what reaches the output projection                            source
    differential    (1 - lambda_init) RMSNorm(MH_1 - lambda MH_2)                 arXiv 2410.05258
    gated           MH * sigmoid(X W_g)                                           arXiv 2505.06708
    laplacian       V - MH in one half of the heads, MH in the other              arXiv 2602.09297

A variant that needs only MH and V is a formula; one with its own parameters is a subclass of
CausalSelfAttention. In DETR `relu` is what `admm` becomes as --ridge grows: no solver.
Loading this file adds these rows to both tables ATTENTION and does nothing else.
"""
import functools
import math
import sys
import zlib
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import admm_detr as detr
import attentionx_gpt as gpt

def drawn(*shape, std, name):
    """A tensor of normal numbers, the same ones for the same name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, std, generator=generator)

class Differential(gpt.CausalSelfAttention):
    """(softmax(Q_1 K_1^T / sqrt(hs)) - lambda softmax(Q_2 K_2^T / sqrt(hs))) V, normalised.

    T. Ye et al., Differential Transformer, arXiv 2410.05258: the difference cancels the noise that
    both maps share. Two of softmax's heads become one, so n_head must be even: the first gives Q_1
    and K_1, the second Q_2 and K_2, and both give V. In each layer, counted from 0,

        lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_init
        lambda_init = 0.8 - 0.6 exp(-0.3 layer)

    with learned a_1, b_1, a_2, b_2, which its heads share. RMSNorm is over the channels of a head;
    [choice] eps and a learned scale as in the authors' code.
    """
    def __init__(self, c, layer):
        super().__init__(c, layer)
        hs = c.n_embd // c.n_head
        self.vectors = nn.Parameter(drawn(4, hs, std=0.1, name=f'{c.seed} lambda {layer}'))
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.norm = nn.RMSNorm(2 * hs, eps=1e-5)

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)."""
        c = self.config
        dropout = c.dropout if self.training else 0.0
        q, k, v = self.c_attn(x).unflatten(2, (3, c.n_head, -1)).unbind(2)  # (B, T, nh, hs)
        if c.arch == 'rotary':
            q, k = gpt.rotate(q), gpt.rotate(k)
        q1, q2 = q.chunk(2, dim=2)  # (B, T, nh/2, hs)
        k1, k2 = k.chunk(2, dim=2)
        v = torch.cat(v.chunk(2, dim=2), dim=3)  # (B, T, nh/2, 2 hs)
        mh1 = gpt.multi_head(q1, k1, v, c.zero_diag, dropout)  # (B, T, nh/2, 2 hs)
        mh2 = gpt.multi_head(q2, k2, v, c.zero_diag, dropout)
        a1, b1, a2, b2 = self.vectors
        lam = (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + self.lambda_init
        heads = (1 - self.lambda_init) * self.norm(mh1 - lam * mh2)
        return self.c_proj(heads.flatten(2))

class Gated(gpt.CausalSelfAttention):
    """MH * sigmoid(X W_g), elementwise; X is the input of attention, after the norm.

    Z. Qiu et al., Gated Attention for Large Language Models, arXiv 2505.06708.
    """
    def __init__(self, c, layer):
        super().__init__(c, layer)
        self.c_gate = nn.Linear(c.n_embd, c.n_embd, bias=False)  # W_g
        name = f'{c.seed} transformer.h.{layer}.attn.c_gate.weight'
        self.c_gate.weight = nn.Parameter(drawn(c.n_embd, c.n_embd, std=0.02, name=name))

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)."""
        mh, _ = self.heads(x)  # (B, T, nh, hs)
        gate = torch.sigmoid(self.c_gate(x))  # (B, T, C)
        return self.c_proj(mh.flatten(2) * gate)

def laplacian(mh, v, gamma):
    """AttentionX with gamma 1 in the first half of the heads, softmax in the second.

    mh and v (B, T, nh, hs) -> (B, T, nh, hs).  arXiv 2602.09297
    """
    half = mh.size(2) // 2
    return torch.cat([(v - mh)[:, :, :half], mh[:, :, half:]], dim=2)

def relu(q, k, c, is_self=False):
    """x = relu(q K^T - lambda / 2), with the lambda of `lasso` -> x (B, nh, Q, N)."""
    products = detr.without_self(q @ k.mT, is_self)
    return F.relu(products - c.sparsity * F.relu(products).amax(-1, keepdim=True))

gpt.ATTENTION.update(differential=Differential, gated=Gated, laplacian=laplacian)
detr.ATTENTION['relu'] = functools.partial(detr.Reconstruction, solve=relu)
