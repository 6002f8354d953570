"""Every test, on a CPU and, where there is one, on a GPU.

    python test_all.py                 # all of them, two minutes
    python test_all.py belief resume   # those with one of these words in their name
    python test_all.py --device cuda   # on that device; default: a GPU where there is one
    python test_all.py --soak          # kills and full disks, ten minutes
    pytest test_all.py                 # the same, if you have pytest

No network; nothing is written outside temporary folders.
"""
import contextlib
import copy
import dataclasses
import hashlib
import http.server
import importlib
import inspect
import io
import itertools
import json
import linecache
import lzma
import math
import multiprocessing
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import types
import unittest
import zipfile
import zlib
from unittest.mock import patch

os.environ.setdefault('OMP_NUM_THREADS', '1')  # tiny tensors: threads only wait for each other
import numpy as np
import torch
from torch.nn import functional as F

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import admm_detr as detr
import attentionx_gpt as gpt
import belief_vit as vit
import mask_distill as mask
import prepare_data

torch.set_num_threads(1)
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
if '--device' in sys.argv:
    DEVICE = sys.argv[sys.argv.index('--device') + 1]
CPU = '--device', 'cpu'  # for what only a CPU promises: the same to the last bit
QUIET = contextlib.redirect_stdout(io.StringIO())
SCRIPTS = [gpt, vit, detr, mask]
TEXT = 'the quick brown fox jumps over the lazy dog; ' * 60
SHORT = ['--max-iters', 6, '--eval-interval', 3, '--log-interval', 1, '--warmup-iters', 2,
         '--batch-size', 4, '--device', DEVICE, '--dtype', 'float32']
SMALL_GPT = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)
SMALL_VIT = dict(image_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2, head_size=6,
                 mlp_dim=10)
SMALL_DETR = dict(hidden_dim=16, nheads=2, enc_layers=1, dec_layers=2, dim_feedforward=24,
                  num_queries=5, stride=16, image_size=32)
SMALL = {  # settings of a run that takes a second
    gpt: dict(SMALL_GPT, eval_rows=8, new_tokens=4),
    vit: SMALL_VIT,
    detr: dict(SMALL_DETR, iterations=5, eval_rows=8),
    mask: dict(SMALL_GPT, eval_rows=8, new_tokens=4, masks='window:4+sinks:1', teacher_iters=5),
}

# ------------------------------------ helpers ------------------------------------
def tiny(script, path, *more):
    """Flags of a run of a second, in path / 'out', on a small text or on small images."""
    flags = [*SHORT, '--out-dir', path / 'out']
    for name, value in SMALL[script].items():
        flags += ['--' + name, value]
    if script is vit:
        flags += ['--data', vit_data(path / 'data')]
    if script in (gpt, mask):
        (path / 'text.txt').write_text(TEXT)
        flags += ['--data', path / 'text.txt']
    return [str(word) for word in (*flags, *more)]

def run(script, *argv):
    """script.main(argv) in this process -> its exit code, stdout, stderr and result."""
    out, err = io.StringIO(), io.StringIO()
    code, result = 0, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = script.main([str(word) for word in argv])
        except SystemExit as error:
            code = error.code
    return types.SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), result=result)

def done(script, *argv):
    """The result of a command that must end well."""
    end = run(script, *argv)
    assert end.code == 0, end.err
    return end.result

def refuse(script, words, *argv):
    """The command must end with code 2 and one line that has these words."""
    end = run(script, *argv)
    assert end.code == 2 and end.err.count('\n') == 1, (argv, end.code, end.err)
    assert all(word in end.err for word in words), (argv, words, end.err)

def printed_by(end):
    """Lines of a command's output, without those on pictures and presets."""
    return [line for line in end.out.splitlines() if not line.startswith(('picture', 'no ', 'note'))]

def wants(package):
    """A decorator: skip the test where this package is missing."""
    return unittest.skipUnless(importlib.util.find_spec(package), f'{package} is not installed')

@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield pathlib.Path(path)

def close(a, b, tolerance):
    """The largest difference is at most tolerance; a NaN is more."""
    a, b = [torch.as_tensor(x).detach().cpu() for x in (a, b)]
    gaps = (a - b).abs()
    if not gaps.max() <= tolerance:
        at = np.unravel_index(gaps.nan_to_num(math.inf).argmax().item(), gaps.shape)
        a, b = a.expand(gaps.shape)[at].item(), b.expand(gaps.shape)[at].item()
        raise AssertionError(f'{a} and {b}, at {[int(i) for i in at]}, differ by over {tolerance}')

def same(a, b):
    """Two state dicts, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key].cpu(), b[key].cpu()) for key in a)

def has(config, **facts):
    """Fields of a config are those of a paper."""
    for name, value in facts.items():
        assert getattr(config, name) == value, (name, value)

def qkv(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)
    return [draw().to(DEVICE, dtype) for _ in range(3)]

@torch.no_grad()
def fill(net):
    """Weights that anyone can make again from the names of the parameters."""
    for key, p in net.state_dict().items():
        w = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, p.shape)
        if p.dim() > 1:
            large = re.search('c_attn|qkv|in_proj|query_embed', key)
            w *= math.sqrt(3 / p[0].numel()) * (4 if large else 1)
        else:
            w = 0.1 * w + key.endswith(('weight', 'running_var'))
        p.copy_(torch.as_tensor(w))
    return net

def checkpoint(path):
    """The only ckpt.pt below path."""
    found, = path.glob('**/ckpt.pt')
    return torch.load(found, weights_only=True)

# ------------------------------------ attentionx_gpt.py ------------------------------------
def gpt_model(dtype=torch.float64, device=DEVICE, **settings):
    """A small GPT in double precision; its attention is far from uniform."""
    net = gpt.GPT(gpt.Config(**{**SMALL_GPT, 'vocab_size': 40, **settings})).to(dtype).eval()
    for name, p in net.named_parameters():
        if name.endswith('weight') and p.dim() > 1:
            p.data.mul_(6)
    return net.to(device)

def gpt_ids(B, T, V=40):
    return (torch.arange(B * T, device=DEVICE) * 7919 % V).view(B, T)

def gpt_method(name, q, k, v, gamma=1.0, zero_diag=False, script=gpt):
    """A variant on q, k, v (B, nh, T, hs) -> (parts, B, T, nh, hs): belief-star has two parts."""
    mh = script.multi_head(q, k, v, zero_diag)
    out = script.ATTENTION[name](mh, v.transpose(1, 2), gamma)
    return torch.stack(out if type(out) is tuple else [out])

def gpt_weights(q, k, zero_diag=False, script=gpt):
    """softmax(QK^T / sqrt(hs)) written out -> (B, nh, T, T); only the GPT's is causal."""
    e = torch.exp(q @ k.mT / q.size(3) ** 0.5)
    if script is gpt:
        e = e.tril()
    if zero_diag:
        e = e * (1 - torch.eye(q.size(2), device=q.device))
    return e / e.sum(-1, keepdim=True).clamp_min(1e-99)

SLOW = {  # the papers' formulas, from MH, V (B, T, nh, hs), gamma, and rest(dims) = MH - alpha V
    'softmax': lambda MH, V, gamma, rest: [MH],
    'attentionx': lambda MH, V, gamma, rest: [V - gamma * MH],
    'attentionx-learned': lambda MH, V, gamma, rest: [V - gamma * MH],
    'attentionx-v1': lambda MH, V, gamma, rest: [gamma * V - MH],
    'belief': lambda MH, V, gamma, rest: [rest((2, 3))],
    'belief-head': lambda MH, V, gamma, rest: [rest(3)],
    'belief-star': lambda MH, V, gamma, rest: [rest((2, 3)), rest(3)],
    'softmax-scaled': lambda MH, V, gamma, rest: [gamma * MH],
    'value-skip': lambda MH, V, gamma, rest: [MH + V]}

def gpt_slow(name, q, k, v, gamma, zero_diag, script=gpt):
    """A variant by SLOW; shapes as in gpt_method."""
    MH = (gpt_weights(q, k, zero_diag, script) @ v).transpose(1, 2)  # (B, T, nh, hs)
    V = v.transpose(1, 2)
    def rest(dims):
        alpha = (MH * V).sum(dims, True) / (V * V).sum(dims, True)
        return MH - alpha.nan_to_num() * V
    return torch.stack(SLOW[name](MH, V, gamma, rest))

def test_gpt_vit_formulas():
    """Also where V is 0 or small, and where ||V||^2 overflows float16. (A row of your own is not
    in SLOW, and not tested here.)"""
    for name, zero_diag, script in itertools.product(SLOW, (False, True), (gpt, vit)):
        gamma = 0.3 if name == 'attentionx-v1' else 1.7
        if name == 'attentionx-learned':  # one for each head
            gamma = torch.tensor([[1.7], [2.9], [1.2]], dtype=torch.float64, device=DEVICE)
        def method(q, k, v):
            own = gamma[:q.size(1)] if torch.is_tensor(gamma) else gamma
            return gpt_method(name, q, k, v, own, zero_diag, script)
        inputs = [x.requires_grad_() for x in qkv(1, 2, 2, 2)]
        assert torch.autograd.gradcheck(method, inputs), (script.SCRIPT, name)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float16, 4e-3)):
            q, k, v = qkv(2, 3, 5, 64, dtype=dtype)
            v = 30 * v
            v[:, :, 3] = 0
            v[:, :, 4] *= 1e-3
            v.requires_grad_()
            got = method(q, k, v)
            got.sum().backward()
            assert got.dtype == dtype or torch.is_tensor(gamma), (script.SCRIPT, name, got.dtype)
            assert v.grad.isfinite().all(), (script.SCRIPT, name, dtype)
            want = gpt_slow(name, q.double(), k.double(), v.double(), gamma, zero_diag, script)
            size = want.abs().max()
            close(got.double() / size, want / size, tolerance)
        close(script.multi_head(q, k, v), script.multi_head(q, k, v, False), 0)

def test_learned_gamma():
    """It starts at gamma's default, learns, does not decay, and leaves other weights as they are."""
    for script, make, heads in ((gpt, gpt_model, 'n_head'), (vit, vit_model, 'num_heads')):
        plain, net = make(attention='attentionx', gamma=2), make(
            attention='attentionx-learned', gamma=2)
        x = gpt_ids(2, 9) if script is gpt else vit_images(2)
        out = net(x)[0] if script is gpt else net(x)
        close(out, plain(x)[0] if script is gpt else plain(x), 1e-12)
        out.square().sum().backward()
        gammas = [p for name, p in net.named_parameters() if name.endswith('gamma')]
        assert [p.shape for p in gammas] == 2 * [(getattr(net.config, heads), 1)]
        assert all((p == 2).all() and (p.grad != 0).all() for p in gammas), gammas
        kept = script.make_optimizer(net, net.config).param_groups[1]
        assert kept['weight_decay'] == 0
        assert {id(p) for p in gammas} <= {id(p) for p in kept['params']}

def test_gpt_identities():
    """What the papers prove."""
    q, k, v = qkv(2, 3, 6, 4)
    mh, = gpt_method('softmax', q, k, v)  # (B, T, nh, hs)
    delta, delta_s = gpt_method('belief-star', q, k, v)
    phi, = gpt_method('attentionx', q, k, v)
    phi_zd, = gpt_method('attentionx', q, k, v, zero_diag=True)
    # AttentionX's two versions are one, up to a factor  [AX1 Eq. 9, AX2 Eq. 10]
    for gamma in (0.3, 0.5, 1.0):
        v1, v2 = (gpt_method('attentionx-v1', q, k, v, gamma),
                  gpt_method('attentionx', q, k, v, 1 / gamma))
        close(v1, gamma * v2, 1e-14)
    # a zero diagonal makes Phi longer, by 1 / (1 - p_kk)  [AX2 Eq. 13]
    p_own = gpt_weights(q, k).diagonal(dim1=2, dim2=3).mT[..., None]  # (B, T, nh, 1)
    close(phi[:, 1:], ((1 - p_own) * phi_zd)[:, 1:], 1e-13)
    # Delta is no longer than MH  [BF Eq. 11]
    length = lambda x: x.flatten(2).norm(dim=-1)
    assert (length(delta) <= length(mh)).all()
    assert (length(delta_s) <= length(delta)).all()

@wants('x_transformers')
def test_gpt_x_transformers():
    """Another's belief-star, but for its projection, which mixes all tokens: ours in its place."""
    from x_transformers import x_transformers
    theirs = x_transformers.Attention(
        16, dim_head=4, heads=4, causal=True, flash=False, orthog_projected_values=True,
        orthog_projected_values_per_head=True).double().to(DEVICE)
    ours = gpt_model(attention='belief-star', n_head=4).transformer.h[0].attn
    to_out, to_out_s = theirs.to_out.weight.data.split(16, dim=1)
    ours.c_attn.weight.data.copy_(
        torch.cat([x.weight for x in (theirs.to_q, theirs.to_k, theirs.to_v)]))
    ours.c_proj.weight.data.copy_(to_out)
    ours.c_proj_s.weight.data.copy_(to_out_s)
    def project(x, y):
        return x - (x * y).sum(-1, True) / (y * y).sum(-1, True) * y
    x, _, _ = qkv(2, 9, 16)
    with patch.object(x_transformers, 'orthog_project', project):
        close(ours(x), theirs(x), 1e-6)

def test_pdmm():
    """[BF Eq. 1-5] on a ring of five nodes, node i with f_i = (x - a_i)^2 / 2 and the constraint
    x_i = x_j to each neighbour: all find the mean of a."""
    a = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0]).double()
    rho, x, residuals = 0.4, torch.zeros(5), []
    own = {1: x, -1: x}  # multipliers to the next node (A_ij = 1) and to the last one (A_ij = -1)
    for _ in range(150):
        theirs = {d: own[-d].roll(-d) for d in own}
        pull = sum(d * theirs[d] + rho * x.roll(-d) for d in own)
        old, x = x, (a + pull) / (1 + 2 * rho)  # Eq. 2, for two neighbours
        residuals.append({d: d * old.roll(-d) - d * x for d in own})
        own = {d: theirs[d] + rho * residuals[-1][d] for d in own}  # Eq. 3
    close(x, a.mean(), 1e-9)
    # Eq. 4 and 5: a multiplier is the sum of the residuals so far, one's own and the neighbour's
    # by turns (the second sum of Eq. 5 has i and j exchanged)
    total = 0
    for turn, residual in enumerate(reversed(residuals)):
        total = total + (residual[1] if turn % 2 == 0 else residual[-1].roll(-1))
    close(own[1], rho * total, 1e-9)

def test_gamma():
    """The papers' choice, and what they allow."""
    for script in (gpt, vit):
        for name, zero_diag, gamma in (('attentionx', False, 3), ('attentionx', True, 1),
                                       ('attentionx-learned', False, 3),
                                       ('attentionx-v1', False, 0.5 if script is gpt else 1)):
            c = script.Config(attention=name, zero_diag=zero_diag)
            assert script.default_gamma(c) == gamma, (script.SCRIPT, name, script.default_gamma(c))
        for name, gamma in (('attentionx', 0.99), ('attentionx-learned', 'nan'),
                            ('attentionx-v1', 1.01), ('attentionx-v1', 0)):
            refuse(script, ['--gamma'], *SHORT, '--attention', name, '--gamma', gamma)
    x, y, _ = qkv(1, 5, 16)
    for make, size, layer in ((gpt_model, 'n_embd', 'transformer.h.0.attn'),
                              (vit_model, 'embed_dim', 'blocks.0.attn')):
        plain, scaled = [make(attention=name, gamma=2.0, **{size: 16}).get_submodule(layer)
                         for name in ('softmax', 'softmax-scaled')]
        close(scaled(x) - scaled(y), 2 * (plain(x) - plain(y)), 1e-9)  # the bias cancels

def test_gpt_causality_and_cache():
    """A change at token 7 shows only after it; neither cache nor dropout changes what it writes."""
    idx = gpt_ids(2, 12)
    changed = idx.clone()
    changed[:, 7] += 1
    kinds = itertools.product(SLOW, ('gpt2', 'rotary'), (False, True))
    for attention, arch, zero_diag in kinds:
        net = gpt_model(attention=attention, arch=arch, zero_diag=zero_diag, dropout=0.5)
        a, b = net(idx, idx)[0], net(changed, idx)[0]
        close(a[:, :7], b[:, :7], 0)
        assert (a[:, 8:] - b[:, 8:]).abs().amax(-1).min() > 1e-6
        text = net.generate(idx[:, :1], 18, temperature=0)
        for t in (1, 2, 16, 17, 18):  # beyond 16, the block size, the window slides
            window = text[:, max(0, t - 16):t]
            assert torch.equal(net(window)[0].argmax(-1), text[:, [t]])

def test_gpt_golden():
    """Losses and norms of gradients of nanoGPT and modded-nanogpt's `casted`, with weights that
    follow from their names."""
    nano = dict(bias=True), 4.4611826, 7.790621
    casted = dict(arch='rotary'), 4.6812654, 6.873915
    for settings, want_loss, want_norm in (nano, casted):
        net = fill(gpt_model(attention='softmax', n_head=3, n_embd=24, block_size=24,
                             vocab_size=61, device='cpu', **settings))
        if settings == casted[0]:  # it rounds these weights, over their mean magnitude
            for p in net.transformer.h.parameters():
                p.data = (p / p.abs().mean()).to(torch.float8_e5m2).to(p) * p.abs().mean()
        net, idx = net.to(DEVICE), gpt_ids(2, 24, 61)
        _, loss = net(idx, idx.roll(-1, 1))
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        close(loss, want_loss, 1e-5)
        close(norm, want_norm, 1e-5)

def test_gpt_recipes():
    """The papers' presets: sizes, rates, counts of parameters."""
    owt, bf = [gpt.Config(**gpt.PRESETS[name]) for name in ('owt-124m', 'belief-124m')]
    for c in (owt, bf):
        has(c, n_layer=12, n_head=12, n_embd=768, block_size=1024, beta1=0.9, beta2=0.95,
            weight_decay=0.1, data='openwebtext', bias=False, dropout=0)
    tokens = [c.batch_size * c.grad_accum_steps * c.block_size for c in (owt, bf)]
    assert tokens == [491_520, 524_288], tokens  # in a step
    has(owt, attention='attentionx', arch='gpt2', max_iters=600_000, grad_clip=1,
        learning_rate=6e-4, schedule='cosine', warmup_iters=2000)
    has(bf, attention='belief', arch='rotary', max_iters=9536, grad_clip=0,
        learning_rate=1.8e-3, schedule='trapezoid', warmup_iters=256,
        warmdown_iters=2048)
    star = dataclasses.replace(bf, attention='belief-star')
    with torch.device('meta'):
        sizes = [gpt.count(gpt.GPT(c)) for c in (owt, bf, star)]
    assert sizes == [124_373_760, 123_532_032, 130_609_920], sizes

def test_gpt_initialisation():
    """Variants share their weights to the bit; what you add stays as made, and does not decay."""
    def make(**settings):
        return gpt.GPT(gpt.Config(n_layer=2, n_embd=64, vocab_size=40, **settings))
    base = make(attention='softmax').state_dict()
    for name in SLOW:
        state = make(attention=name).state_dict()
        assert same({key: state[key] for key in base}, base), name
    close(base['transformer.h.0.attn.c_attn.weight'].std(), 0.02, 1e-3)
    close(base['transformer.h.0.mlp.c_proj.weight'].std(), 0.01, 1e-3)
    rotary = make(arch='rotary').state_dict()
    close(rotary['transformer.h.0.mlp.c_proj.weight'].max(), 256 ** -0.5, 1e-3)
    net = make(bias=True)
    net.gamma = torch.nn.Parameter(torch.full((4, 4), 3.0))
    for name, p in net.named_parameters():  # as the constructor does
        net.init_parameter(name, p)
    assert (net.gamma == 3).all()
    _, keep = gpt.make_optimizer(net, gpt.Config()).param_groups
    assert any(p is net.gamma for p in keep['params'])

def test_gpt_loss():
    """A mean over the targets >= 0."""
    net, idx = gpt_model(), gpt_ids(3, 16)
    targets = idx.roll(-1, 1).where(idx % 3 > 0, -1)
    logits, loss = net(idx, targets)
    close(loss, F.cross_entropy(logits[targets >= 0], targets[targets >= 0]), 1e-12)

def test_gpt_sampling():
    """Frequencies of 9,999 drawn tokens are their probabilities."""
    net, idx = gpt_model(), torch.zeros(9999, 1, dtype=torch.long, device=DEVICE)
    torch.manual_seed(0)
    logits = net(idx[:1])[0][0, 0].detach()
    drawn = net.generate(idx, 1, temperature=2.0)[:, 1].bincount(minlength=40)
    close(drawn / 9999, F.softmax(logits / 2, dim=0), 0.01)

def test_gpt_mask_data(tmp_path):
    text = 'naïve\n λ\t"\\x00"' * 2
    (tmp_path / 'a.txt').write_text(text * 10, 'utf-8')
    for script, c in ((gpt, gpt.Config(block_size=16)), (mask, mask_config(stage='teacher'))):
        data = script.load_data(dataclasses.replace(c, data=str(tmp_path / 'a.txt')))
        assert bytes(data.train.tolist()) == (text * 9).encode()
        assert bytes(data.val.tolist()) == text.encode()
        assert script is mask or data.val_bytes == len(data.val)
    for name, n in (('train', 50), ('val', 40)):  # as prepare_data.py writes it
        np.arange(n, dtype=np.uint16).tofile(tmp_path / f'{name}.bin')
    (tmp_path / 'meta.json').write_text('{"tokenizer": "gpt2", "bytes": {"val": 200}}')
    data = gpt.load_data(gpt.Config(data=str(tmp_path), block_size=16))
    own = mask.load_data(mask_config(data=str(tmp_path), stage='teacher'))
    assert len(data.train) == len(own.train) == 50 and len(data.val) == len(own.val) == 40
    assert data.vocab_size == own.vocab_size == 50257 and data.val_bytes == 200
    for script in (gpt, mask):  # a change of theirs trains anew
        names = {path.name for path in script.data_files(script.Config(data=str(tmp_path)))}
        assert names >= {'train.bin', 'val.bin'}, (script.SCRIPT, names)
        assert script.get_tokenizer('bytes').n_vocab == 256, script.SCRIPT  # 255 is in no text
    (tmp_path / 'meta.json').unlink()  # nanoGPT's own folders have none
    assert gpt.load_data(gpt.Config(data=str(tmp_path), block_size=16)).vocab_size == 50257
    (tmp_path / 'photo.jpg').write_bytes(bytes(range(256)))
    (tmp_path / 'unfinished').mkdir()
    for script in (gpt, mask):
        refuse(script, ['UTF-8'], *tiny(script, tmp_path, '--data', tmp_path / 'photo.jpg'))
        refuse(script, ['did not finish'], *tiny(script, tmp_path, '--data', tmp_path / 'unfinished'))
    for words in (['--block-size', 40], ['--n-embd', 18]):
        refuse(gpt, words[:1], *tiny(gpt, tmp_path, '--data', tmp_path, *words))
    # every tenth file of Python's own is to validate on
    files = sorted(pathlib.Path(os.__file__).parent.glob('*.py'))
    ninth = files[9].read_text('utf-8')
    for script in (gpt, mask):
        train, val = script.read_text(script.Config())
        assert ninth in val and ninth not in train, script.SCRIPT

def test_gpt_mask_batches():
    """Every variant sees the same windows; step, micro-batch and seed give others."""
    data = types.SimpleNamespace(train=np.arange(20, dtype=np.uint16), teacher=None)
    for script, variant in (gpt, dict(attention='belief')), (mask, dict(masks='last5')):
        def batch(step=5, micro=0, **settings):
            c = script.Config(block_size=16, batch_size=6, grad_accum_steps=2, **settings)
            return script.get_batch(data, c, step, micro, 'cpu')
        x, y = batch()[:2]
        assert torch.equal(y, x + 1) and torch.equal(x, batch(**variant)[0])
        for other in (batch(6), batch(micro=1), batch(seed=1)):
            assert not torch.equal(x, other[0])
        starts = {first.item() for step in range(9) for first in batch(step)[0][:, 0]}
        assert starts == {0, 1, 2, 3}  # wherever a window fits
    starts = {first.item() for step in range(9) for first in batch(step, samples=6)[0][:, 0]}
    drawn = set(mask.stream('samples', 1337).integers(4, size=6).tolist())
    assert starts == drawn and 1 < len(drawn) < 4, (starts, drawn)  # always the same windows

def test_gpt_evaluation():
    """Validation windows are spread evenly, whatever the batch size."""
    net = gpt_model()
    data = types.SimpleNamespace(val=gpt_ids(1, 120)[0].cpu().numpy())
    c = gpt.Config(block_size=16, batch_size=3, eval_rows=5)
    x, y = gpt.windows(data.val, [0, 25, 51, 77, 103], c, DEVICE)
    close(gpt.evaluate(net, data, c, DEVICE)['val_loss'], net(x, y)[1], 1e-6)

def test_gpt_bigram():
    train, val = np.array([0, 1, 0, 2, 0, 1]), np.array([0, 1, 2])
    data = types.SimpleNamespace(train=train, val=val, vocab_size=4)
    p = (2 + 3 / 10) / (3 + 1) * (0 + 2 / 10) / (2 + 1)  # of 1 after 0, and of 2 after 1
    close(gpt.bigram_loss(data), -math.log(p) / 2, 1e-6)

def test_gpt_init_and_actions(tmp_path):
    """A checkpoint of nanoGPT, to start from; what train and inspect say of it."""
    net = gpt_model(torch.float32, 'cpu', vocab_size=256, attention='softmax', bias=True)
    state = {'_orig_mod.' + key: p for key, p in net.state_dict().items()}
    state['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)  # its mask
    torch.save({'model': state, 'iter_num': 7}, tmp_path / 'nano.pt')
    flags = tiny(gpt, tmp_path, '--init', tmp_path / 'nano.pt', '--attention', 'softmax', '--bias')
    refuse(gpt, ['does not fit', 'size mismatch'], *flags, '--n-embd', 32)
    end = run(gpt, *flags, '--max-iters', 0)
    assert same(checkpoint(tmp_path)['model'], net.state_dict())
    nats = end.result['val_loss']
    assert f'{nats:.3f} nats per token, {nats / math.log(2):.3f} bits' in end.out
    end = run(gpt, 'inspect', *flags)
    assert [row['step'] for row in end.result] == [0, 3, 6] and 'layer 1: mh' in end.out, end.out
    assert 'is finished' in run(gpt, 'inspect', *flags).out  # what it shows is kept with the run
    refuse(gpt, ['--prompt'], 'sample', *flags, '--prompt', '')

def test_gpt_diagnose():
    """One layer by hand; belief-star has two matrices, in this order.  [BF Eq. 15]"""
    net, idx = gpt_model(attention='belief-star'), gpt_ids(2, 9)
    block = net.transformer.h[1]
    x = net.transformer.h[0](net.transformer.wte(idx) + net.transformer.wpe.weight[:9])
    qkv = block.attn.c_attn(block.ln_1(x))
    q, k, v = qkv.unflatten(2, (3, net.config.n_head, -1)).permute(2, 0, 3, 1, 4)
    delta, delta_s = gpt_slow('belief-star', q, k, v, 1, False).flatten(3)
    out = block.attn.c_proj(delta) + block.attn.c_proj_s(delta_s)
    close(block.attn(block.ln_1(x)), out, 1e-12)
    got = gpt.diagnose(net, idx)[1]
    mh, v = [t.transpose(1, 2).flatten(2) for t in (gpt_weights(q, k) @ v, v)]  # (B, T, C)
    close(got['alpha'], ((mh * v).sum(-1) / v.square().sum(-1)).mean(), 1e-6)
    close(got['update'], delta.norm(dim=-1).mean(), 1e-6)
    update_out = block.attn.c_proj(delta)  # Delta's part alone
    close(got['update_out'], update_out.norm(dim=-1).mean(), 1e-6)
    close(got['cos_update'], F.cosine_similarity(update_out, x, -1).mean(), 1e-6)

# ------------------------------------ belief_vit.py ------------------------------------
def vit_model(device=DEVICE, dtype=torch.float64, **settings):
    """A small model whose weights are so large that attention is not uniform."""
    net = vit.ViT(vit.Config(**{**SMALL_VIT, 'num_classes': 5, **settings})).to(dtype).eval()
    for block in net.blocks:
        block.attn.qkv.weight.data *= 4
    return net.to(device)

def vit_images(n, size=8):
    images = np.random.RandomState(0).uniform(-1.7, 1.7, (n, 3, size, size))
    return torch.from_numpy(images).to(DEVICE)

def vit_data(path):
    """train.npz and test.npz of three classes: the brightest colour."""
    path.mkdir(exist_ok=True)
    for name, count in (('train', 60), ('test', 30)):
        labels = np.arange(count) % 3
        images = np.random.default_rng(count).integers(0, 120, (count, 3, 8, 8))
        images[np.arange(count), labels] += 100
        np.savez(path / f'{name}.npz', images=images.astype(np.uint8), labels=labels)
    return str(path)

def test_vit_attention():
    """A layer by hand: learned scale, Delta W^o + Delta_s W^s, of which the first has a bias."""
    attn = vit_model(attention='belief-star').blocks[0].attn
    x, _, _ = qkv(2, 5, 12)
    close(attn.temperature.exp(), 6 ** -0.5, 1e-6)
    attn.temperature.data += 1
    q, k, v = attn.qkv(x).view(2, 5, 3, 2, 6).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
    delta, delta_s = gpt_slow('belief-star', math.e * q, k, v, 1, True, vit).flatten(3)
    close(attn(x), attn.proj(delta) + delta_s @ attn.proj_s.weight.T, 1e-6)

def test_vit_logits_of_the_originals():
    """vision-transformers-cifar10, efficient-vit-training and timm, with the same weights."""
    sizes = dict(embed_dim=24, depth=2, num_heads=3, head_size=8, mlp_dim=96, num_classes=7)
    for settings, logits in (
            (dict(model='vit-small', image_size=16, patch_size=4, head_size=64, mlp_dim=20),
             [0.3999968, 0.3932799, 0.5405398]),
            (dict(model='deit-small-local', image_size=64, patch_size=16),
             [-0.2712226, 1.1332006, -1.2900333]),
            (dict(model='deit-small', image_size=32, patch_size=8),
             [-0.3659678, 1.1703037, -0.2167598])):
        c = vit.Config(**{**sizes, **settings}, attention='softmax')
        net = fill(vit.ViT(c).double().eval()).to(DEVICE)
        images = vit_images(2, settings['image_size'])
        close(net(images)[0, :3], logits, 1e-6)
        eps = {layer.eps for layer in net.modules() if isinstance(layer, torch.nn.LayerNorm)}
        assert eps == {1e-5 if c.shifted else 1e-6}, (c.model, eps)

def test_vit_sizes_and_recipes():
    """Sizes, recipes and tables are the papers'."""
    for size, settings in (
            (9_622_512, dict(model='vit-small', num_classes=10)),
            (11_195_376, dict(model='vit-small', num_classes=10, attention='belief-star')),
            (22_050_664, dict(model='deit-small', num_classes=1000)),
            (22_179_688, dict(model='deit-small-local', num_classes=1000))):
        with torch.device('meta'):
            found = vit.count(vit.ViT(vit.Config(**settings)))
        assert found == size, (settings, found)
    has(vit.Config(**vit.PRESETS['cifar-paper']), model='vit-small', zero_diag=True,
        randaugment='paper', batch_size=512, grad_accum_steps=1, optimizer='set-adam',
        learning_rate=1e-4, warmup_iters=0, grad_clip=0, max_iters=math.ceil(400 * 45_000 / 512))
    has(vit.Config(**vit.PRESETS['imagenet-paper']), model='deit-small-local', zero_diag=False,
        first_size=32, batch_size=64, grad_accum_steps=1, optimizer='adamw',
        learning_rate=1.25e-4, min_lr=0.08, mix=True, drop_path=0.1, max_iters=math.ceil(300 * (1_281_167 - 12_812) / 64))
    rows = vit.TABLES['papers'].values()
    assert [row['attention'] for row in rows] == ['softmax', 'attentionx', 'belief', 'belief-star']
    for row in rows:
        assert vit.default_gamma(vit.Config(**{**vit.PRESETS['cifar-paper'], **row})) == 1

def test_vit_initialisation():
    """Variants share their weights to the bit; each model has its original's spread."""
    base = vit_model(attention='softmax').state_dict()
    for name in SLOW:
        state = vit_model(attention=name).state_dict()
        assert all(torch.equal(p, state[key]) for key, p in base.items()), name
    assert not torch.equal(base['pos_embed'], vit_model(seed=1).pos_embed)
    uniform = lambda fan_in: (3 * fan_in) ** -0.5
    for model, expected in {
            'vit-small': {'pos_embed': 1, 'patch_embed.proj.weight': uniform(240)},
            'deit-small': {'pos_embed': 0.02, 'blocks.0.attn.qkv.weight': 0.02},
            'deit-small-local': {'blocks.0.attn.qkv.weight': 384 ** -0.5,
                                 'blocks.0.mlp.conv.weight': uniform(9)}}.items():
        state = vit.ViT(vit.Config(model=model, depth=2)).state_dict()
        for key, std in expected.items():
            assert abs(state[key].std() - std) <= 0.12 * std, (model, key, state[key].std(), std)

def test_vit_positions():
    """Images of other sizes get positions between those learned, the class token its own."""
    ramp = torch.arange(4.0).repeat(4, 1).view(1, 16, 1)  # grows from column to column
    pos = torch.cat([torch.full((1, 1, 1), 9.0), ramp], 1)
    out = vit.resize_positions(pos, (8, 6))[0, :, 0]
    rows = out[1:].view(8, 6)
    assert out[0] == 9 and (rows[0].diff() > 0).all(), out
    close(rows, rows[:1].expand(8, 6), 1e-5)
    assert rows[0, 0] < 0, rows[0]  # bicubic overshoots, bilinear would not

def test_vit_init_file(tmp_path):
    """--init takes DeiT's checkpoint: another grid, other classes, no W^s."""
    big = vit_model('cpu', model='deit-small', num_classes=9, image_size=16,
                    dtype=torch.float32).state_dict()
    torch.save({'model': big}, tmp_path / 'big')
    flags = tiny(vit, tmp_path, '--model', 'deit-small', '--attention', 'belief-star')
    flags += ['--max-iters', '0']
    done(vit, *flags, '--init', tmp_path / 'big')
    state = checkpoint(tmp_path)['model']
    big['pos_embed'] = vit.resize_positions(big['pos_embed'], (2, 2))
    for key, p in state.items():
        new = key.startswith('head') or 'proj_s' in key
        assert new and len(p) in (3, 12) or torch.equal(p, big[key]), key
    torch.save({'encoder': big['norm.bias']}, tmp_path / 'foreign')
    refuse(vit, ['--init', 'foreign', 'encoder'], *flags, '--init', tmp_path / 'foreign')

def test_vit_dropout():
    """In training alone. Stochastic depth leaves out whole images, most in the last block."""
    net, images = vit_model(dropout=0.5), vit_images(2)
    assert torch.equal(net(images), net(images))
    net.train()
    assert not torch.equal(net(images), net(images))
    net = vit_model(dropout=1.0).train()  # of all: tokens, attention and feed-forward network
    close(net(images), net.head.bias.expand(2, -1), 1e-12)
    mlp, (x, _, _) = net.blocks[0].mlp, qkv(2, 5, 12)
    mlp.drop = torch.nn.Tanh()  # twice in a feed-forward network
    close(mlp(x, (2, 2)), mlp.fc2(F.gelu(mlp.fc1(x)).tanh()).tanh(), 1e-12)
    blocks = vit_model(drop_path=0.9).train().blocks
    rates = [block.drop_path for block in blocks]
    assert rates == [0, 0.9], rates
    kept = blocks[1].stochastic_depth(torch.ones(4000, 2, 3, device=DEVICE))
    assert (kept == kept[:, :1, :1]).all()
    close(kept.mean(), 1, 0.3)
    blocks[1].drop_path = 1 - 1e-12  # both branches
    close(blocks[1](x, (2, 2)), x, 0)

def test_vit_optimizers():
    """AdamW decays matrices alone; SET-Adam's constants are the paper's."""
    net = vit_model()
    decay, keep = vit.make_optimizer(net, vit.Config(weight_decay=0.2)).param_groups
    assert (decay['weight_decay'], keep['weight_decay']) == (0.2, 0), (decay, keep)
    decays = {id(p) for p in decay['params']}
    for name, p in net.named_parameters():
        assert (id(p) in decays) == (name.endswith('.weight') and p.dim() > 1), name
    group, = vit.make_optimizer(net, vit.Config(optimizer='set-adam')).param_groups
    found = group['betas'], group['eps'], group['tau']
    assert found == ((0.9, 0.999), 1e-18, 0.5), found

def test_vit_set_adam():
    """The formulas, at gradients from 1e-12 to 1e12; gradients of zero move nothing."""
    rng = np.random.default_rng(0)
    for scale in (1e-12, 1.0, 1e12):
        x, m, v = rng.standard_normal((4, 6)), 0, 0
        p = torch.nn.Parameter(torch.tensor(x).float())
        adam = vit.SETAdam([p], 0.01)
        for t in range(1, 6):
            g = scale * rng.standard_normal((4, 6))
            p.grad = torch.tensor(g).float()
            adam.step()
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g ** 2
            c = v.sum() ** 2 / (v.size * (v ** 2).sum())
            w = np.sqrt(c * v / (1 - 0.999 ** t) + 1e-18)
            x -= 0.01 / (1 - 0.9 ** t) * m / (w - 0.5 * w.min())
        close(p, x, 2e-6)
    before = p.clone()
    p.grad = torch.zeros(4, 6)
    vit.SETAdam([p], 0.01).step()
    assert torch.equal(p, before), (p, before)

def test_vit_shapes():
    """The drawings that our figures come from: the mean red of their first quarters."""
    images, _ = vit.draw_shapes(200, 5)
    close(images[:, 0, :16, :16].mean(), 84.75076, 1e-4)

@wants('PIL')
def test_vit_batches(tmp_path):
    """Batch i follows from seed and i, and an epoch has all images once."""
    c = vit.Config(**SMALL_VIT, data=vit_data(tmp_path / 'data'), batch_size=4,
                   grad_accum_steps=2, val_fraction=0.2, randaugment='fixed')
    data = vit.load_data(c)
    def get(step, micro=0, **new):
        return vit.get_batch(data, dataclasses.replace(c, **new), step, micro, 'cpu')
    x, _, _ = get(3)
    for other, _, _ in (get(4), get(3, 1), get(3, seed=5)):
        assert not torch.equal(x, other)
    with patch.object(vit, 'augment', lambda x, *_: x):
        epoch = torch.cat([get(step, micro)[0] for step in range(6, 12) for micro in range(2)])
    images = vit.normalise(data.train[0], 8, c)
    found = [int((images == x).all((1, 2, 3)).nonzero()) for x in epoch]
    assert sorted(found) == list(range(48)) != found, found
    names = {path.name for path in vit.data_files(c)}  # a change of theirs trains anew
    assert names >= {'train.npz', 'test.npz'}, names
    for step, size in ((29, 8), (30, 16), (99, 32)):  # two patches more after five epochs
        images = get(step, image_size=32, first_size=8)[0]
        assert images.shape == (4, 3, size, size), (step, images.shape)
    (tmp_path / 'data/test.npz').unlink()  # then part of the training images are to test
    data = vit.load_data(c)
    parts = [[x.tobytes() for x in part[0]] for part in (data.train, data.val, data.test)]
    assert [len(set(part)) for part in parts] == [36, 12, 12], [len(part) for part in parts]
    assert len(set(sum(parts, []))) == 60, 'a test image is in training'

def test_vit_evaluation(tmp_path):
    """Loss and accuracy by hand."""
    c = vit.Config(**SMALL_VIT, data=vit_data(tmp_path / 'data'), batch_size=7, eval_rows=12,
                   val_fraction=0.3)
    data = vit.load_data(c)
    linear = vit.linear_accuracy(data, c)
    assert linear > 0.9, linear  # colours are easy
    images, labels = [torch.from_numpy(part[:12]) for part in data.val]
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
    logits = (images.float().mean((2, 3)) / 255 - mean) / std
    loss, accuracy = vit.loss_and_accuracy(
        lambda x: x.mean((2, 3)), images.numpy(), labels.numpy(), c, 'cpu')
    close(loss, F.cross_entropy(logits, labels), 1e-5)
    close(accuracy, (logits.argmax(1) == labels).double().mean(), 1e-9)
    net = vit_model(num_classes=3, dtype=torch.float32)
    figures = vit.evaluate(net, data, c, DEVICE)
    layers, _ = vit.diagnose(net, vit.normalise(data.val[0], 8, c, DEVICE))
    assert figures['1.cos_mh'] == layers[1]['cos_mh'], figures
    want = vit.loss_and_accuracy(net, *[part[:12] for part in data.val], c, DEVICE)
    assert (figures['val_loss'], figures['val_acc']) == want, (figures, want)
    for name, want in (('cifar10', [-2.4291, -2.4183, -2.2214]),
                       ('data/cifar100', [-1.8957, -1.8974, -1.5965])):
        c = vit.Config(data=name)
        black = vit.normalise(np.zeros((1, 3, 1, 1), np.uint8), 1, c)
        close(black.flatten(), want, 1e-3)
        stripes = np.zeros((1, 3, 16, 16), np.uint8)
        stripes[..., ::4] = 255
        close(vit.visible(vit.normalise(stripes, 16, c), c), stripes / 255, 1e-6)
        blurred = vit.visible(vit.normalise(stripes, 4, c), c)  # not every fourth column
        close(blurred, torch.full((1, 3, 4, 4), 0.25), 0.1)

def test_vit_best_weights(tmp_path):
    """best.pt is the best step's; the test set is for the end, for the last weights and these."""
    seen = []
    def judge(model, images, labels, c, device):
        end = len(seen) >= 4  # it has judged steps 0, 3, 6 and 9
        assert len(labels) == (30 if end else 6)
        assert torch.is_autocast_enabled(device.type) != end  # which keeps casts of weights
        seen.append(model.head.bias.tolist())
        return 1.0, len(seen) == 3
    with patch.object(vit, 'loss_and_accuracy', judge):
        figures = done(vit, *tiny(vit, tmp_path, '--max-iters', 9, '--dtype', 'bfloat16'))
        assert figures['test_acc'] == figures['best_test_acc'] == 0, figures  # loss is 1
        assert checkpoint(tmp_path)['model']['head.bias'].tolist() == seen[3]
    last, best = seen[4:]
    assert last == seen[3] != seen[2] == best, seen

@wants('PIL')
def test_vit_photos(tmp_path):
    """A folder of photos trains, and predicts; a file that is none is named."""
    from PIL import Image
    for name, colour in (('blue', (0, 0, 200)), ('red', (200, 0, 0))):
        (tmp_path / 'photos' / name).mkdir(parents=True)
        for i in range(12):
            photo = tmp_path / 'photos' / name / f'{i}.jpg'
            Image.new('RGB', (20, 16), colour).save(photo)
    (tmp_path / 'photos/.ipynb_checkpoints').mkdir()
    flags = tiny(vit, tmp_path, '--data', tmp_path / 'photos', '--val-fraction', 0.25)
    figures = done(vit, *flags, '--max-iters', 30)
    assert figures['test_acc'] == 1, figures
    predict = ['predict', '--out-dir', tmp_path / 'out']
    answer, = done(vit, *predict, '--images', photo)
    assert answer[0][0] == 'red' and answer[0][1] > 0.5 and len(answer) == 2, answer
    photo.write_text('no photo')
    refuse(vit, [str(photo)], *flags, '--fresh')
    noise = Image.effect_noise((120, 80), 99)
    noise.save(tmp_path / 'noise.png')
    for size, chance, box in (  # left, top, right, bottom
            (80, None, (25, 5, 95, 75)),  # to judge: 7/8 of the square
            (8, (0, 1, 1, 0), (88, 0, 120, 24))):  # to train: 8 % of the area, 4:3
        want = noise.resize((size, size), Image.BICUBIC, box)
        got = vit.read_photo(tmp_path / 'noise.png', size, chance)
        assert (got == np.asarray(want)).all(), box
    for draw, flip, image in ((0.9, True, got), (0.1, True, got[..., ::-1]), (0.1, False, got)):
        c = vit.Config(flip=flip)
        crop = vit.augment(str(tmp_path / 'noise.png'), [*chance, draw], c, 8)
        assert (crop == image).all(), (draw, flip)

@wants('PIL')
def test_augment_to_the_byte():
    """The bytes that our figures come from."""
    images = np.random.RandomState(0).randint(0, 256, (200, 3, 48, 64)).astype(np.uint8)
    images[1::3] = images[1::3] // 5 + 60  # dull ones
    images[2::3] = images[2::3, :, :1, :1]  # of a single colour
    chance = np.random.RandomState(2).random_sample((200, vit.DRAWS))
    for policy, want in dict(none=1543007458, paper=3282175803, fixed=1041729097).items():
        c = vit.Config(randaugment=policy)
        got = np.stack([vit.augment(x, row, c) for x, row in zip(images, chance)])
        assert zlib.crc32(got.tobytes()) == want, f'other images by --randaugment {policy}'

def test_augment_mix():
    """What the mean of an image has of another the loss has of its label."""
    labels, shares = torch.arange(10, device=DEVICE), []
    images = labels.float().view(10, 1, 1, 1).expand(10, 3, 16, 24)  # image i is i everywhere
    for seed in range(100):
        x, share = vit.mix(images, np.random.default_rng(seed))
        close(x.mean((1, 2, 3)), share * labels + (1 - share) * labels.flip(0), 1e-4)
        if len(x[0].unique()) == 2:  # cutmix leaves two colours
            shares.append(share)
        else:
            rng = np.random.default_rng(seed)
            rng.random()
            close(share, rng.beta(0.8, 0.8), 0)  # DeiT's
    assert 30 < len(shares) < 70, len(shares)
    # of a uniform area, less what the border cuts off
    close(np.mean(shares), 1 / 2 + 1 / 5 - 1 / 48, 0.05)
    c = vit.Config(mix=True, label_smoothing=0.3)
    logits, _, _ = qkv(10, 10)
    loss = vit.loss_of(torch.nn.Identity(), (logits, labels, 0.8), c)
    one_hot = torch.eye(10, device=DEVICE).double()
    soft = 0.7 * (0.8 * one_hot + 0.2 * one_hot.flip(0)) + 0.3 / 10
    close(loss, F.cross_entropy(logits, soft), 1e-6)

def test_vit_diagnose():
    """Fig. 3's figures, and the map of the class token, by hand."""
    net, images = vit_model(attention='belief'), vit_images(3)
    x, attn = net.embed(images)[0], net.blocks[0].attn
    q, k, v = attn.qkv(net.blocks[0].norm1(x)).view(3, 5, 3, 2, 6).permute(2, 0, 3, 1, 4)
    p = gpt_weights(q, k, True, vit)[:, :, 0]  # of the class token: (B, nh, T)
    mh = torch.einsum('bht,bhtd->bhd', p, v).flatten(1)
    v = v[:, :, 0].flatten(1)
    alpha = (mh * v).sum(1) / (v * v).sum(1)
    delta = mh - alpha[:, None] * v
    mh_out, delta_out = mh @ attn.proj.weight.T, delta @ attn.proj.weight.T
    rows, maps = vit.diagnose(net, images)
    for name, vector in dict(mh=mh, update=delta, mh_out=mh_out, update_out=delta_out).items():
        close(rows[0][name], vector.norm(dim=1).mean(), 1e-6)
    close(rows[0]['cos_update'], F.cosine_similarity(delta_out, x[:, 0]).mean(), 1e-6)
    close(rows[0]['alpha'], alpha.mean(), 1e-6)
    light = p.mean(1)[:, 1:]
    close(maps[0].flatten(1), light / light.amax(1, keepdim=True), 1e-6)
    attn.qkv.weight.data.zero_()
    silent = vit.diagnose(net, images)[0][0]  # where V is 0, nothing is taken from MH
    assert silent['alpha'] == silent['update'] == 0, silent

def test_vit_mistakes(tmp_path):
    flags = tiny(vit, tmp_path)
    refuse(vit, ['--patch-size'], *flags, '--patch-size', 3)
    refuse(vit, ['--images'], 'predict', *flags)
    for name in ('seed', 'max-iters', 'eval-rows', 'first-size'):
        refuse(vit, [name, '0 or more'], *flags, '--' + name, -4)
    train = tmp_path / 'data/train.npz'
    (tmp_path / 'data/meta.json').write_text('{"classes": ["red", "green"]}')
    refuse(vit, ['label 2', '2 classes'], *flags)
    (tmp_path / 'data/meta.json').unlink()
    np.savez(tmp_path / 'data/test.npz', images=np.zeros((2, 3, 8, 8), np.uint8), labels=[0, 3])
    refuse(vit, ['label 3', '3 classes'], *flags)
    np.savez(train, images=np.zeros((30, 3, 8, 8)), labels=range(30))
    refuse(vit, ['train.npz', 'uint8'], *flags)
    np.savez(train, images=np.zeros((30, 8, 8), np.uint8), labels=range(30))  # greys
    refuse(vit, ['train.npz', '(N, 3, H, W)'], *flags)
    train.unlink()
    refuse(vit, ['train.npz', 'CLASS'], *flags)

@wants('PIL')
def test_vit_registers(tmp_path):
    """Tokens that belong to no patch need a change of class ViT alone, in every model and with all
    that a recipe can have."""
    class WithRegisters(vit.ViT):
        def embed(self, images):
            x, grid = super().embed(images)
            return torch.cat([x[:, :1], x[:, :1] * 0 + 0.1, x[:, 1:]], 1), grid
    recipe = ['--mix', '--randaugment', 'paper', '--drop-path', 0.2, '--label-smoothing', 0.1]
    with patch.object(vit, 'ViT', WithRegisters):
        for model in vit.MODELS:
            log = done(vit, 'inspect', *tiny(vit, tmp_path, '--model', model, *recipe))
            assert [row['step'] for row in log] == [0, 3, 6], (model, log)
            assert math.isfinite(log[-1]['1.cos_update']), (model, log[-1])

# ------------------------------------ admm_detr.py ------------------------------------
KINDS = ['softmax', 'no-weights', 'l2', 'admm', 'admm-vanilla', 'admm-printed',
         'admm-vanilla-printed']
EXACT = ['l2', 'admm', 'admm-vanilla']
OPTIONS = [dict(ridge=ridge, positive=positive)
           for ridge in (0.0, 1.0) for positive in (False, True)]

def detr_config(**settings):
    return detr.Config(**{**SMALL_DETR, 'num_classes': len(detr.SHAPES), **detr.OA, **settings})

def tokens(*sizes, d=32, dtype=torch.float64):
    """Layer-normed tokens of two heads of d channels."""
    x = F.layer_norm(qkv(sum(sizes), 2 * d)[0], (2 * d,))
    x = x.view(-1, 2, d).transpose(0, 1)[None]  # (1, 2, N, d)
    return [t.to(dtype) for t in x.split(sizes, 2)]

def no_padding(k):
    return torch.zeros(len(k), k.size(2), dtype=torch.bool, device=k.device)

def numbers(x):
    return x.detach().cpu().numpy()

def slow_lasso(q, k, penalty, e, positive, skip):
    """The elastic net of one query: each coordinate in turn moves to its own best."""
    x = np.zeros(len(k))
    for _ in range(5000):
        before = x.copy()
        for j in range(len(k)):
            if j == skip or not k[j].any():
                continue
            rest = k[j] @ (q - x @ k + x[j] * k[j])
            size = rest if positive else abs(rest)
            x[j] = np.sign(rest) * max(size - penalty / 2, 0) / (k[j] @ k[j] + e)
        if abs(x - before).max() < 1e-13:
            return x

def test_detr_lasso_reference():
    """Every option against coordinate descent; the last token is zero. Where no token helps, the
    solution is zero."""
    for options, own in itertools.product(OPTIONS, (False, True)):
        ridge, positive = options.values()
        q, k = tokens(3, 7, d=5)
        k[:, :, -1] = 0
        q = k if own else q
        x = detr.lasso(q, k, own, 0.1, 0.2, 1500, **options)
        close(x, detr.lasso(q, k, own, 0.1, 0.2, 1500, vanilla=True, **options), 1e-9)
        for head, i in itertools.product(range(2), range(3)):
            Q, K = numbers(q[0, head, i]), numbers(k[0, head])
            products = K @ Q
            if own:
                products[i] = 0
            largest = max(products) if positive else max(abs(products))
            e = ridge * np.linalg.eigvalsh(K.T @ K).mean()
            want = slow_lasso(Q, K, 0.1 * 2 * largest, e, positive, i if own else None)
            close(x[0, head, i], want, 1e-6)
    k = torch.tensor([[[[1.0, 0.0], [1.0, 0.1]]]], device=DEVICE)
    q = torch.tensor([[[[-1.0, 5.0]]]], device=DEVICE)
    x = detr.lasso(q, k, rho=1e-4, positive=True, iterations=3)
    assert not x.any(), x

def objective(x, q, k, penalty, e=0.0):
    """Problem (2), with a ridge term, for every query."""
    left = (q - x @ k).square().sum(-1)
    return left + (penalty * x.abs() + e * x.square()).sum(-1)

def test_detr_iterations():
    """The default ones are enough, and over-relaxation pays: how far the objective is above that
    after 2000 iterations, relative to it."""
    q, k = tokens(10, 100)
    gaps = []
    for c, relax in (detr.Config(), 1.6), (detr_config(), 1.6), (detr_config(), 1.0):
        options = dict(sparsity=c.sparsity, ridge=c.ridge, positive=c.positive)
        penalty, _, e = detr.scales(q, k, **options)
        x = detr.lasso(q, k, rho=c.rho, iterations=c.iterations, relax=relax, **options)
        best = detr.lasso(q, k, iterations=2000, **options)
        gap = objective(x, q, k, penalty, e) / objective(best, q, k, penalty, e) - 1
        gaps.append(gap.clamp_min(0).mean())
    ours, exact, plain = gaps
    assert ours < 1e-4 and 0 < exact < 1e-2 and plain > 1.5 * exact, gaps

def test_detr_attention_reference():
    """With padding, centred and random tokens: the Lasso of tokens put together by hand."""
    hidden = torch.arange(9, device=DEVICE)[None] >= 7
    extra = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for centre, own in itertools.product((False, True), (False, True)):
        c = detr_config(sparsity=0.05, rho=0.2, iterations=9, ridge=1.0, positive=True,
                        centre=centre, random_tokens=3)
        q, k = tokens(3, 9, d=5)
        q = k if own else q
        real = k[:, :, :7]
        if centre:
            real = real - real.mean(2, keepdim=True)
        K = torch.cat([real, 0 * k[:, :, 7:], extra.expand(1, 2, 3, 5)], 2)
        want = detr.lasso(q, K, own, 0.05, 0.2, 9, ridge=1.0, positive=True) ** 5
        want = want / want.abs().sum(-1, keepdim=True).clamp_min(1e-30)
        for name in ('admm', 'admm-vanilla'):
            x = detr.ATTENTION[name](q, k, hidden, own, c)
            close(x, want[..., :9], 1e-8)
            assert not x[..., 7:].any(), name
    attn = detr.DecoderLayer(detr_config(self_attention='admm')).self_attn
    x, _ = attn.coefficients(k, k, k)  # not itself
    assert x.any() and not x.diagonal(dim1=2, dim2=3).any(), x

def test_detr_gradcheck():
    """Every solver; the printed formulas where smooth, in one iteration."""
    q, k = [t.requires_grad_() for t in tokens(2, 4, d=3)]
    cases = [(name, {}) for name in KINDS]
    cases.append(('admm', dict(OPTIONS[-1], centre=True, random_tokens=2, power=3)))
    for name, options in cases:
        solve = detr.ATTENTION[name]
        c = detr_config(iterations=1 if 'printed' in name else 4, **options)
        cross = lambda q, k: solve(q, k, no_padding(k), False, c)
        own = lambda k: solve(k, k, no_padding(k), True, c)
        assert torch.autograd.gradcheck(cross, [q, k], atol=1e-6), name
        assert name == 'l2' or torch.autograd.gradcheck(own, [k], atol=1e-6), name

def test_detr_degenerate_tokens():
    """Rank one, repeated, zero, large and small tokens: finite, with finite gradients. The printed
    formulas too with fewer tokens than channels."""
    q, k = tokens(6, 10, d=8, dtype=torch.float32)
    rank_one = k[..., :1] * torch.ones(8, device=DEVICE)
    all_tokens = (rank_one, k[:, :, :1].expand_as(k), 0 * k, 1e4 * k, 1e-6 * k)
    configs = [detr_config(centre=True, **options) for options in OPTIONS]
    for some, query, kind, c in itertools.product(all_tokens, (q, 0 * q), EXACT, configs):
        a, b = query.clone().requires_grad_(), some.clone().requires_grad_()
        x = detr.ATTENTION[kind](a, b, no_padding(b), False, c)
        x.square().sum().backward()
        assert all(t.isfinite().all() for t in (x, a.grad, b.grad)), (kind, c)
    close(detr.sharpen(torch.tensor([1e-8, 0.0]), 3), 0, 1e-5)  # it fades
    q, k = [t.requires_grad_() for t in tokens(6, 20, d=64, dtype=torch.float32)]
    x = detr.printed(q, 10 * k)
    gradients = torch.autograd.grad(x.square().sum(), [q, k])
    assert all(t.isfinite().all() for t in (x, *gradients)), x

def test_detr_padding_and_precision():
    """Padding changes nothing; float16 and autocast are solved in float32."""
    q, k, hidden = [x.transpose(1, 2).flatten(2).float() for x in tokens(6, 10, 4, d=8)]
    padded = torch.cat([k, 50 * hidden], 1)
    padding = torch.arange(14, device=DEVICE)[None] >= 10
    c = detr_config(centre=True)
    for name in ('softmax', 'no-weights', *EXACT):
        module = detr.MultiheadAttention(c, name).to(DEVICE).eval()
        detr.init_weights(module, 1)
        want = module(q, k, k)
        close(module(q, padded, padded, padding), want, 1e-4)
        if name in EXACT:
            close(module(q, k, -k), -want, 1e-5)
            over_values = dataclasses.replace(c, solve_over='value')
            close(detr.MultiheadAttention(over_values, name)(q, 0 * k, k), want, 1e-5)
            half = module(*[(400 * t).half() for t in (q, k, k)])  # squares overflow
            close(half.float() / 400, want, 0.05)
            with torch.autocast(q.device.type, torch.bfloat16):
                close(module(q, k, k), want, 1e-6)
        else:  # the formula makes the same sum as the fused kernel
            _, y = module.coefficients(*module.heads(q, padded, padded), padding)
            close(module.out_proj(y.transpose(1, 2).flatten(2)), want, 1e-4)

def test_detr_ridge_regression():
    """Ridge regression solved as it is defined."""
    q, k = tokens(5, 9, d=6)
    S = k @ k.mT  # its trace is that of K^T K
    rho = 0.3 * S.diagonal(dim1=2, dim2=3).sum(-1)[..., None, None] / 6
    want = torch.linalg.solve(S + rho * torch.eye(9, device=DEVICE), k @ q.mT).mT
    close(detr.l2(q, k, no_padding(k), False, detr_config(power=0, rho=0.3)), want, 1e-10)

def slow_printed(V, rho, threshold, vanilla, corrected=False):
    """Equations (3) and (4) to the letter, or (3) without its misprints, four iterations; the query
    is token 2."""
    if vanilla:
        inverse = np.linalg.inv(V @ V.T + rho * np.eye(len(V)))
    else:
        D, X = np.linalg.eigh(V.T @ V)
        Y = V @ X / np.sqrt(D)
        inverse = Y @ np.diag(1 / (np.sqrt(D) + rho)) @ Y.T
    x = z = mu = np.zeros(len(V))
    for _ in range(4):
        new = inverse @ (V @ V[2] + rho * (z - mu if corrected else x - z))
        if not corrected:
            new = new.clip(-1, 1)
            new[2] = 0
        before = new + mu if corrected else x - mu
        z = np.sign(before) * (abs(before) - threshold).clip(0)
        x, mu = new, mu + new - z
    return z if corrected else x

def test_detr_printed_equations():
    """(3) and (4) against numpy; 15 iterations end far from the Lasso; (3) corrected is, iteration
    by iteration, ADMM for the Lasso with 2 lambda."""
    k, = tokens(9, d=5)
    V = numbers(k[0, 1])
    penalty, rho, _ = detr.scales(k, k, True, 0.1, 0.2)
    r, threshold = rho[0, 1].item(), (penalty / rho)[0, 1, 2].item()
    c = detr_config(sparsity=0.1, rho=0.2, iterations=4, power=0, random_tokens=1)
    more = detr.dictionary(k, no_padding(k), random_tokens=1)
    for name, vanilla in (('admm-vanilla-printed', True), ('admm-printed', False)):
        x = detr.printed(k, k, True, 0.1, 0.2, 4, vanilla, sigma=0.0)[0, 1, 2]
        close(x, slow_printed(V, r, threshold, vanilla), 1e-9)
        x = detr.printed(k, more, True, 0.1, 0.2, 4, vanilla)[..., :9]
        hidden = ~no_padding(k)  # they pay no heed to it
        close(detr.ATTENTION[name](k, k, hidden, True, c), x, 1e-12)
    penalty, _, _ = detr.scales(k, k, False, 0.1)
    want = slow_printed(V, r, penalty[0, 1, 2].item() / r, True, corrected=True)
    twice = detr.lasso(k, k, False, 2 * 0.1, 0.2, 4, relax=1.0, vanilla=True)[0, 1, 2]
    assert want.any()
    close(twice, want, 1e-12)
    q, k = tokens(10, 100)
    penalty, _, _ = detr.scales(q, k)
    far, near = [objective(f(q, k), q, k, penalty).mean() for f in (detr.printed, detr.lasso)]
    assert far > 100 * near, (far, near)

def test_detr_a_row_with_weights():
    """A row of your own, with W_q, W_k, W_v: a line in ATTENTION and a word in PROJECTED."""
    def sparsemax(q, k, padding, own, c):
        x = (q @ k.mT).relu().masked_fill(padding[:, None, None], 0)
        return x / x.sum(-1, keepdim=True).clamp_min(1e-9)
    with (patch.dict(detr.ATTENTION, sparsemax=sparsemax),
          patch.object(detr, 'PROJECTED', {*detr.PROJECTED, 'sparsemax'})):
        net, like = [detr.DETR(detr_config(self_attention=kind, cross_attention=kind)).to(DEVICE)
                     for kind in ('sparsemax', 'softmax')]
        assert same(net.state_dict(), like.state_dict())
        images = detr_images(2)
        assert (net(images)['pred_boxes'] != like(images)['pred_boxes']).any()

def test_detr_as_facebookresearch():
    """The outputs and the loss of facebookresearch/detr with the same weights, in float64."""
    c = detr.Config(backbone='resnet50', hidden_dim=32, nheads=4, dim_feedforward=48,
                    num_queries=7, num_classes=91, cross_attention='softmax')
    net = fill(detr.DETR(c).double().eval()).to(DEVICE)
    x = np.random.RandomState(0).uniform(-1.7, 1.7, (2, 3, 96, 128))
    mask = torch.zeros(2, 96, 128, dtype=torch.bool, device=DEVICE)
    mask[1, :, 80:] = True
    mask[1, 64:] = True
    with torch.no_grad():
        out = net(torch.from_numpy(x).to(DEVICE).masked_fill(mask[:, None], 0), mask)
    logits, box = out['pred_logits'][0, 0, ::30], out['pred_boxes'][0, 0]
    close(logits, [1.3233768, -2.0759888, -0.0021618, -0.6884133], 1e-5)
    close(box, [0.5540449, 0.5603625, 0.6181914, 0.3576915], 1e-5)
    boxes = [[[0.5, 0.5, 0.4, 0.3], [0.2, 0.3, 0.2, 0.2], [0.8, 0.7, 0.1, 0.5]],
             [[0.4, 0.6, 0.3, 0.3]]]
    targets = [(torch.tensor(labels, device=DEVICE), torch.tensor(own, device=DEVICE).double())
               for labels, own in zip(([3, 17, 44], [1]), boxes)]
    close(detr.set_loss(out, targets, c, *detr.divisors([3, 1], c)), 22.547493929079366, 1e-5)

def test_detr_parameter_counts():
    """The original's, and what attention without weights saves: 3.8 %, both 7.6 %."""
    softmax = dict(self_attention='softmax', cross_attention='softmax')
    one = dict(self_attention='softmax', cross_attention='no-weights')
    both = dict(self_attention='admm', cross_attention='l2')
    for kinds, size in (softmax, 41302368), (one, 39723360), (both, 38144352):
        c = detr.Config(**detr.DETR_R50, **kinds, num_classes=91)
        with torch.device('meta'), patch.object(detr, 'init_weights'):
            assert detr.count(detr.DETR(c)) == size, (kinds, detr.count(detr.DETR(c)))
    grid = detr.DETR(detr_config(stride=4)).encode(torch.zeros(1, 3, 64, 32))[3]
    assert grid == (16, 8), grid
    small = detr.count(detr.DETR(detr_config(stride=8)).backbone)
    assert small == 9 * (3 * 32 + 32 * 64 + 64 * 96 + 96 * 96) + 2 * (32 + 64 + 96 + 96), small

def test_detr_initial_weights():
    """Variants share what they have in common; every learned tensor gets a gradient."""
    nets = {}
    for name in KINDS:
        own = 'admm' if name == 'l2' else name
        nets[name] = detr.DETR(detr_config(self_attention=own, cross_attention=name, out_proj=True))
    full = nets['softmax'].state_dict()
    bound = full['transformer.decoder.layers.0.multihead_attn.in_proj_weight'].abs().max()
    assert 0.9 < bound / math.sqrt(6 / (16 + 48)) <= 1, bound  # Xavier's
    bound = full['backbone.0.body.3.weight'].abs().max()
    assert 0.9 < bound * math.sqrt(32 * 9) <= 1, bound  # PyTorch's
    images, targets = detr_images(2), detr_targets(2, 1)
    for name, net in nets.items():
        assert all(torch.equal(full[key], p) for key, p in net.state_dict().items()), name
        net.to(DEVICE)
        detr.loss_of(net, (images, None, targets, 1.0, 1.0), net.config).backward()
        for key, p in net.named_parameters():
            # the first self-attention sees zeros
            dead = 'decoder.layers.0.self_attn' in key or 'decoder.layers.0.norm1.w' in key
            assert dead or p.grad.abs().max() > 0, (name, key)

def detr_images(n):
    return qkv(n, 3, 32, 32, dtype=torch.float32)[0]

def detr_targets(*counts):
    """For each image that many labels and boxes."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(3, (n,), generator=generator).to(DEVICE),
             (torch.rand(n, 4, generator=generator) * 0.4 + 0.1).to(DEVICE)) for n in counts]

def test_detr_losses_by_hand():
    """Without objects, with more of them than queries, with boxes without area."""
    c = detr_config()
    logits, _, _ = qkv(3, 5, 4)
    boxes = torch.full((3, 5, 4), 0.5, device=DEVICE)
    outputs = dict(pred_logits=logits, pred_boxes=boxes, aux_outputs=[])
    loss = detr.set_loss(outputs, detr_targets(0, 0, 0), c, *detr.divisors((0, 0, 0), c))
    close(loss, -logits.log_softmax(-1)[..., 3].mean(), 1e-7)
    assert detr.divisors([8], c) == (5, 8), detr.divisors([8], c)
    point = boxes[0, 0]
    close(detr.generalised_iou(point, point), 0, 0)
    logits[0, 3, 2] = 99  # of five equal boxes, the surest of the class
    targets = [(torch.tensor([2], device=DEVICE), point[None])]
    pairs = detr.match_batch(logits[None, :1], boxes[None, :1], targets, c)
    assert pairs.T.tolist() == [[0, 0, 3, 0]], pairs

def test_detr_cheapest_pairs():
    """Our own assignment, and scipy's where it is installed, against every other."""
    rng = np.random.default_rng(0)
    for n, m in itertools.product(range(6), range(6)):
        for cost in rng.normal(size=(n, m)), rng.integers(0, 3, (n, m)):
            small = cost if n <= m else cost.T
            sums = [small[range(len(small)), list(chosen)].sum()
                    for chosen in itertools.permutations(range(max(n, m)), min(n, m))]
            for solve in detr.assign, detr.match:
                rows, columns = solve(cost)
                assert len(set(rows)) == len(set(columns)) == min(n, m), (rows, columns)
                # in scipy's order sums have scipy's last bits
                assert list(rows) == sorted(rows), rows
                got = cost[rows, columns].sum()
                assert abs(got - min(sums)) < 1e-9, (cost, got, min(sums))

def test_detr_ap_as_pycocotools():
    """What pycocotools gives: crowds, ties, areas unlike the boxes', a class without truth."""
    rng = np.random.default_rng(0)
    truth, found = [], []
    for image in range(4):
        boxes = 4.0 * rng.integers(1, 40, (6, 4))
        for i, box in enumerate(boxes):
            truth.append(dict(id=len(truth) + 1, image_id=image, category_id=1 + i % 2,
                              bbox=box.tolist(), area=0.7 * box[2] * box[3], iscrowd=int(i == 5)))
        for i in rng.integers(6, size=240):
            box = boxes[i] + rng.integers(-20, 21, 4)
            found.append(dict(image_id=image, category_id=int(1 + i % 2), bbox=box.clip(0).tolist(),
                              score=round(rng.random(), 1)))
    found.append(dict(found[0], category_id=3))
    want = dict(AP=0.0750891, AP50=0.2432015, AP75=0.0244513, APs=0.0027051, APm=0.109371,
                APl=0.3568595, AR1=0.0166667, AR10=0.2291667, AR100=0.4916667, ARs=0.1,
                ARm=0.6361111, ARl=0.75)
    found.sort(key=lambda x: -x['image_id'])  # equal scores go by image, whatever their order here
    got = detr.coco_ap(dict(annotations=truth), found)
    wrong = {name: (x, want[name]) for name, x in got.items() if not abs(x - want[name]) < 1e-6}
    assert got.keys() == want.keys() and not wrong, wrong
    one = dict(image_id=1, category_id=1, bbox=[0, 0, 10, 10])
    crowd = dict(one, bbox=[0, 0, 20, 20], iscrowd=1)  # all of the detection is in it, yet:
    got = detr.coco_ap(dict(annotations=[one, crowd]), [dict(one, bbox=[0, 0, 10, 8], score=1.0)])
    close(got['AP50'], 1, 1e-9)

def test_detr_shapes():
    """Boxes hug what is drawn, a kind of your own included; the same row is the same drawing."""
    areas = dict(rectangle=1, disc=math.pi / 4, triangle=0.5, diamond=0.5)
    with patch.dict(detr.SHAPES, diamond=lambda x, y, tip: abs(x - 0.5) + abs(y - 0.5) <= 0.5):
        data = detr.Shapes(60, 64)
        plans = [data.plan(row) for row in range(60)]
        alone = [plan for plan in plans if len(plan.labels) == 1]
        drawn = {data.classes[plan.labels] for plan in alone}
        assert drawn == {*detr.SHAPES} >= {'diamond'}, drawn
        for plan in alone:
            image = data.draw(plan).numpy() * detr.STD + detr.MEAN
            background = np.median(image[:, 0])
            y, x = np.nonzero(abs(image - background).max(0) > 0.25)
            box = 64 * detr.corners(plan.boxes[0])
            close(box, [x.min(), y.min(), x.max() + 1, y.max() + 1], 5)
            share = areas.get(data.classes[plan.labels])  # a shape of yours may have any
            size = (64 * plan.boxes[0, 2:]).prod() * (share or 1)
            assert not share or abs(len(x) / size - 1) < 0.2, (plan, len(x), size)
        close(data.draw(plans[7]), data.draw(data.plan(7)), 0)
    for plan in plans:
        for a, b in itertools.combinations(detr.corners(plan.boxes).tolist(), 2):
            width, height = [min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
            least = min((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (a, b))
            assert max(0, width) * max(0, height) < 0.16 * least, (a, b)

def test_detr_batches():
    """A function of seed and step; micro-batches average to the whole."""
    c = detr_config(batch_size=8)
    data = detr.load_data(c)
    model = detr.make_model(c, data).to(DEVICE)
    batch = detr.get_batch(data, c, 1, 0, DEVICE)
    images = batch[0]
    for other, step in (c, 2), (dataclasses.replace(c, seed=1), 1):
        assert (detr.get_batch(data, other, step, 0, DEVICE)[0] != images).any(), step
    half = dataclasses.replace(c, batch_size=4, grad_accum_steps=2)
    parts = [detr.get_batch(data, half, 1, micro, DEVICE) for micro in (0, 1)]
    close(torch.cat([part[0] for part in parts]), images, 0)
    mean = sum(detr.loss_of(model, part, c) for part in parts) / 2
    close(mean, detr.loss_of(model, batch, c), 1e-5)

def test_detr_evaluation():
    """A model that answers with the truth has AP 1; another image's objects have less."""
    c = detr_config(eval_rows=8, batch_size=4)
    data = detr.load_data(c)
    plans = [data.val.plan(row) for row in range(8)]
    rest = iter(plans)
    def oracle(images, mask):
        boxes = torch.full((len(images), 5, 4), 0.5)
        logits = torch.zeros(len(images), 5, c.num_classes + 1)
        for i in range(len(images)):
            plan = next(rest)
            n = len(plan.labels)
            boxes[i, :n] = plan.boxes
            logits[i, range(n), plan.labels] = 20.0
        return dict(pred_logits=logits.to(DEVICE), pred_boxes=boxes.to(DEVICE), aux_outputs=[])
    figures = detr.evaluate(oracle, data, c, DEVICE)
    assert figures['AP'] == figures['AP50'] == 1, figures
    guesses = [detr.chance(some)['AP'] for some in (plans, plans[:1])]
    assert guesses[0] < 0.2 and guesses[1] == 1, guesses

def test_detr_post_process():
    """The likeliest class but for no-object, and pixels: left, top, right, bottom."""
    logits = torch.tensor([[[0.0, 2.0, 5.0]]], device=DEVICE)
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4]]], device=DEVICE)
    outputs = dict(pred_logits=logits, pred_boxes=boxes)
    (score, label, box), = detr.post_process(outputs, [(100, 200)], threshold=0.04)[0]
    assert label == 1, label
    close(score, 0.04712, 1e-5)
    close(box, [80, 30, 120, 70], 1e-4)
    assert detr.post_process(outputs, [(100, 200)], threshold=0.05) == [[]]

COCO = dict(  # ids in no order: the labels of 9 and 4 are 1 and 0
    images=[dict(id=8, file_name='b.png', width=40, height=30),
            dict(id=5, file_name='a.png', width=30, height=60)],
    categories=[dict(id=9, name='dot'), dict(id=4, name='cat')],
    annotations=[dict(image_id=8, category_id=9, bbox=[10, 5, 20, 10]),
                 dict(image_id=8, category_id=4, bbox=[-4, 20, 14, 20.5]),
                 dict(image_id=8, category_id=4, bbox=[0, 0, 40, 30], iscrowd=1),
                 dict(image_id=8, category_id=4, bbox=[7, 7, 0, 3])])

def coco_data(path, image_size):
    for name in ('train2017', 'val2017'):
        (path / name).mkdir()
        write_annotations(path, name, COCO)
    return detr.load_data(detr_config(data=str(path), image_size=image_size)).train

def write_annotations(path, name, data):
    (path / 'annotations').mkdir(exist_ok=True)
    (path / 'annotations' / f'instances_{name}.json').write_text(json.dumps(data))

def test_detr_annotations(tmp_path):
    """No crowds, no empty boxes, cut at the edges; a photo may show nothing."""
    train = coco_data(tmp_path, 60)
    assert train.classes == [''] * 4 + ['cat'] + [''] * 4 + ['dot'], train.classes
    empty, plan = train.plan(0), train.plan(1)
    assert empty.boxes.shape == (0, 4) and plan.labels.tolist() == [9, 4], (empty, plan)
    assert (empty.size, empty.original, empty.image_id) == ((50, 100), (60, 30), 5), empty
    close(plan.boxes, [[0.5, 1 / 3, 0.5, 1 / 3], [0.125, 5 / 6, 0.25, 1 / 3]], 1e-6)
    assert empty.notes + plan.notes == COCO['annotations'], (empty.notes, plan.notes)
    flags = tiny(detr, tmp_path, '--data', tmp_path)
    refuse(detr, ['train2017'], *flags, '--data', tmp_path / 'annotations')
    few = detr.load_data(detr_config(data=str(tmp_path), num_queries=3)).about
    assert few.endswith('up to 4 objects in one, more than --num-queries 3 can find'), few
    write_annotations(tmp_path, 'train2017', {**COCO, 'images': []})
    refuse(detr, ['no images'], *flags)
    write_annotations(tmp_path, 'train2017', COCO)
    for words, wrong in ((['differ'], dict(categories=COCO['categories'][1:], annotations=[])),
                         (['category_id 4'], dict(categories=COCO['categories'][:1])),
                         (['instances_val2017.json'], dict(categories=[]))):
        write_annotations(tmp_path, 'val2017', {**COCO, **wrong})
        refuse(detr, words, *flags)
    (tmp_path / 'val2017').rmdir()  # every tenth photo is then for evaluation
    alone = detr.load_data(detr_config(data=str(tmp_path)))
    ids = [[image['id'] for image in split.images] for split in (alone.train, alone.val)]
    assert ids == [[8], [5]], ids
    images = [dict(COCO['images'][0], id=i) for i in range(20)]
    write_annotations(tmp_path, 'train2017', {**COCO, 'images': images})
    alone = detr.load_data(detr_config(data=str(tmp_path)))
    assert [image['id'] for image in alone.val.images] == [0, 10] and len(alone.train) == 18

def test_detr_transforms(tmp_path):
    """What DETR's flip and size do to a box, worked out from the photo's shares."""
    data = coco_data(tmp_path, 800)
    data.images = [dict(id=8, file_name='b.png', width=640, height=480)]
    data.annotations = {8: [dict(category_id=4, bbox=[96, 48, 320, 240])]}
    plans = [data.plan(0, np.random.default_rng([1, i])) for i in range(400)]
    flips, sizes = sum(p.flip for p in plans), {p.size for p in plans}
    assert 160 < flips < 240, flips
    assert sizes == {(int(s * 640 / 480), s) for s in range(480, 801, 32)}, sizes
    for p in plans:
        close(p.boxes[0], [0.6 if p.flip else 0.4, 0.35, 0.5, 0.5], 1e-6)
    data.images[0].update(width=2000, height=500)
    close(data.plan(0).size, [1332, 333], 0)

def test_detr_collate():
    """Photos of different sizes are padded at right and bottom."""
    batch, mask = detr.collate([torch.ones(3, 50, 25), torch.ones(3, 30, 40)], DEVICE)
    assert not mask[0, :, :25].any() and not mask[1, :30].any()
    assert mask.sum() == 50 * 15 + 20 * 40 and (batch == ~mask[:, None]).all(), mask.sum()

@wants('PIL')
def test_detr_photos(tmp_path):
    """What is read is what was drawn, and flipped; then a run on photos finds things there."""
    from PIL import Image
    train = coco_data(tmp_path, 30)
    for name, (w, h) in ('a.png', (30, 60)), ('b.png', (40, 30)):
        y, x = np.mgrid[:h, :w]
        drawn = np.stack([x * 6, y * 4, (x + y) * 2], -1).astype(np.uint8)
        for split in ('train2017', 'val2017'):
            Image.fromarray(drawn).save(tmp_path / split / name)
    plan = train.plan(1)
    plan.flip, plan.size = True, (40, 30)
    got = train.render([plan])[0].numpy() * detr.STD + detr.MEAN
    want = drawn.transpose(2, 0, 1)[:, :, ::-1]
    close((got * 255).round(), want.astype(np.float32), 0)
    less = detr.to_tensor(Image.fromarray(drawn), (25, 19)).numpy() * detr.STD + detr.MEAN
    want = np.asarray(Image.fromarray(drawn).resize((25, 19), Image.BILINEAR)).transpose(2, 0, 1)
    close((less * 255).round(), want.astype(np.float32), 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.fromarray(drawn).save(tmp_path / 'turned.jpg', exif=exif)
    sizes = [detr.read_photo(tmp_path / 'turned.jpg', upright).size for upright in (False, True)]
    assert sizes == [(40, 30), (30, 40)], sizes
    flags = tiny(detr, tmp_path, '--data', tmp_path, '--random-tokens', 4)
    names = {path.name for path in detr.data_files(detr.parse(flags)[1])}
    assert names == {'a.png', 'b.png', 'instances_train2017.json', 'instances_val2017.json'}, names
    done(detr, *flags)
    photo = tmp_path / 'val2017' / 'b.png'
    own = ['--images', photo, '--out-dir', tmp_path / 'out', '--device', DEVICE]
    (tmp_path / 'train2017' / 'copy').mkdir()
    twin = shutil.copy(photo, tmp_path / 'train2017' / 'copy')
    end = run(detr, 'detect', *own, '--images', twin, '--threshold', 0)
    assert len(end.result[str(photo)]) == 5, end  # one for each query
    assert 'classes cat, dot' in end.out, end.out
    pictures = re.findall('picture (.+)', end.out)
    assert len(set(pictures)) == 2 or not importlib.util.find_spec('matplotlib'), pictures
    assert len(done(detr, 'inspect', *own)) == 4

@wants('matplotlib')
def test_detr_pictures_stay_in_place(tmp_path):
    """A box that reaches beyond an image moves nothing, and pixels start at 0; attention is that of
    the surest box, bright where it is largest."""
    seen, c = [], detr.Config(classes=['dot'])
    found = [[(0.2, 0, [-9, -9, 60, 60]), (0.9, 0, [0, 0, 9, 9])]]
    x = torch.zeros(1, 1, 2, 6)
    x[0, 0, 0, 0] = x[0, 0, 1, 3] = 0.1  # grid (2, 3): query 1 looks at the second row's start
    with patch('matplotlib.figure.Figure.savefig', lambda picture, _: seen.append(picture)), QUIET:
        detr.draw_images(tmp_path / 'a.png', [('', np.zeros((30, 40, 3)), found[0])], c)
        detr.draw_attention(tmp_path / 'b.png', torch.ones(1, 3, 20, 30), x, (2, 3), found, c)
    boxes, attention = [picture.axes[0] for picture in seen]
    limits = *boxes.get_xlim(), *boxes.get_ylim()
    assert limits == (0, 40, 30, 0), limits
    assert [text.get_text() for text in attention.texts] == ['dot 0.90'], attention.texts
    light = attention.images[0].get_array()
    close(light[[0, 19], [0, 0]] / light[15, 29], [[1, 1, 1], [4, 4, 4]], 1e-5)

def test_detr_actions(tmp_path):
    """Train, and look inside; the printed formulas run, too."""
    for kind in 'admm-printed', 'admm-vanilla-printed', 'admm-vanilla':
        end = run(detr, *tiny(detr, tmp_path, '--cross-attention', kind))
        assert math.isnan(end.result['APl']) and ' nan' not in end.out, end.out  # none is large
    own = ['--out-dir', tmp_path / 'out', '--device', DEVICE]
    rows = done(detr, 'inspect', *own)
    assert [row['attention'] for row in rows] == 2 * ['softmax', 'admm-vanilla'], rows
    assert all(row['nonzero'] >= 1 and 0 < row['top'] <= 1 for row in rows), rows
    faint = lambda q, k, *_: 1e-4 * torch.ones(*q.shape[:-1], k.size(2), device=q.device)
    with patch.dict(detr.ATTENTION, {'admm-vanilla': faint}):
        rows = done(detr, 'inspect', *own)
    assert rows[-1]['nonzero'] == 4, rows  # all of them: what counts is their ratio
    refuse(detr, ['--images'], 'detect', *own)

def test_detr_init_files(tmp_path):
    """--init takes DETR's layout and torchvision's backbone."""
    file = tmp_path / 'some.pth'
    plain = detr.DETR(detr_config(cross_attention='softmax'))
    state = {key: p + 1 for key, p in plain.state_dict().items()}
    torch.save(dict(model=state), file)
    flags = tiny(detr, tmp_path, '--cross-attention', 'softmax', '--max-iters', 0, '--init')
    assert '--cross-attention admm' in run(detr, *flags, file).out  # to compare with
    assert same(checkpoint(tmp_path / 'out')['model'], state)
    body = {key: p + 2 for key, p in detr.ResNet50().state_dict().items()}
    torch.save({**body, 'fc.weight': torch.ones(1)}, file)
    net = detr.DETR(detr_config(backbone='resnet50'))
    with QUIET:
        detr.load_weights(net, file)
    assert same(net.backbone[0]['body'].state_dict(), body)
    refuse(detr, ['missing.pth'], *flags, tmp_path / 'missing.pth')

def test_detr_mistakes():
    for words, *argv in (
            (['--cross-attention', 'admm-printed'], '--cross-attention', 'lasso'),
            (['--self-attention l2'], '--self-attention', 'l2'), (['--rho'], '--rho', 1e-6),
            (['--power', '5'], '--power', 2), (['--sparsity'], '--sparsity', 0),
            (['--hidden-dim 64'], '--nheads', 5), (['--num-queries 0'], '--num-queries', 0),
            (['prepare_data.py coco'], '--preset', 'paper', '--max-iters', 0),
            (['--iterations'], '--cross-attention', 'admm-printed', '--iterations', 21)):
        refuse(detr, words, *argv)

def test_detr_facts_of_the_paper():
    """Rows of its tables; 300 epochs of 118,287 photos, the last 100 at a tenth of the rate."""
    rows = [*detr.TABLES['1'].values(), *detr.TABLES['2'].values()]
    kinds = [f"{row['self_attention']} {row['cross_attention']}" for row in rows]
    assert kinds == ['softmax softmax', 'no-weights softmax', 'softmax no-weights', 'admm softmax',
                     'softmax admm', 'softmax l2', 'admm-vanilla softmax', 'admm softmax'], kinds
    assert all(row.items() >= detr.OA.items() for row in rows[3:])
    c = detr.Config(**detr.PRESETS['paper'])
    epoch = 118287 // 32
    assert detr.schedule(200 * epoch - 1, c) == 1 and detr.schedule(200 * epoch, c) == 0.1
    has(c, max_iters=300 * epoch, warmdown_iters=100 * epoch, batch_size=8, grad_accum_steps=4,
        grad_clip=0.1, learning_rate=1e-4, lr_backbone=0.1, weight_decay=1e-4, bbox_loss_coef=5,
        giou_loss_coef=2, eos_coef=0.1, num_queries=100, enc_layers=6, dec_layers=6, ridge=0,
        positive=False, centre=False, power=5)
    has(detr.Config(), ridge=3, positive=True, centre=True, power=3)
    model = detr.DETR(detr_config(learning_rate=1e-3, lr_backbone=0.01))
    rest, backbone = detr.make_optimizer(model, model.config).param_groups
    assert (rest['lr'], backbone['lr'], rest['weight_decay']) == (1e-3, 1e-5, 1e-4)
    assert len(backbone['params']) == len(list(model.backbone.parameters()))

# ------------------------------------ mask_distill.py ------------------------------------
DENSE, BLOCKED = mask.dense_attention, mask.blocked_attention

def mask_config(**settings):
    return mask.Config(**{**SMALL_GPT, 'vocab_size': 40, 'masks': 'window:4', **settings})

def mask_matrices(T):
    """Which pairs the candidates hold, written out -> {--masks: (K, T, T) of 0 and 1}."""
    j = torch.arange(T, device=DEVICE)
    i = j[:, None]
    window, offset = lambda n: i - j < n, lambda n: i - j == n
    first = lambda n: (j < n).expand(T, T)
    found = {'all': [j <= i],
             'last5': [offset(n) for n in range(5)],
             'windows': [window(5), window(10), first(5)],
             'first-all': [first(1), j <= i],
             'window:64+sinks:4': [window(64), first(4) & ~window(64)],
             'window:3+sinks:2': [window(3), first(2) & ~window(3)],
             'first:3+window:2+sinks:1': [first(3), window(2), first(1) & ~window(2)],
             'offset:1+first:2': [offset(1), first(2)]}
    return {masks: torch.stack(own).double().tril() for masks, own in found.items()}

def mask_slowly(reading, q, k, v, M, c):
    """The three readings by their formulas; M (K, T, T), c (K,) -> (B, nh, T, hs)."""
    lonely = torch.diag(1 - M.amax(0).diagonal())  # tokens whose own pair no mask holds
    M, c = torch.cat([M, lonely[None]]), torch.cat([c, c.max().view(1)])
    normal = lambda w: w / w.sum(-1, keepdim=True).clamp_min(1e-99)
    e = (q @ k.mT / math.sqrt(q.size(3))).exp().tril()  # (B, nh, T, T)
    W = sum(c_k * m for c_k, m in zip(c, M))  # (T, T)
    p = dict(renormalised=normal(W * e), unnormalised=W * normal(e),
             separate=sum(c_k * normal(m * e) for c_k, m in zip(c, M)))
    return p[reading] @ v

def test_mask_readings_by_their_formulas():
    q, k, v = qkv(1, 2, 12, 3)
    for masks, M in mask_matrices(12).items():
        alpha = torch.linspace(-2, 1.5, len(M), dtype=torch.float64, device=DEVICE)
        log_c = mask.log_coefficients(alpha)
        for reading in mask.READINGS:
            if reading in ('renormalised', 'unnormalised', 'separate'):  # not a row of your own
                want = mask_slowly(reading, q, k, v, M, alpha.sigmoid())
                close(DENSE(q, k, v, masks, log_c, reading), want, 1e-12)
            if reading == 'renormalised' and mask.is_local(masks):
                for block in (0, 1, 5, 16):
                    close(BLOCKED(q, k, v, masks, log_c, block), want, 1e-12)

def test_mask_gradients():
    inputs = [t.requires_grad_() for t in (*qkv(1, 2, 5, 2), qkv(3)[0])]
    log_c = mask.log_coefficients
    for reading in mask.READINGS:
        dense = lambda q, k, v, alpha: DENSE(q, k, v, 'windows', log_c(alpha), reading)
        assert torch.autograd.gradcheck(dense, inputs), reading
    blocked = lambda q, k, v, alpha: BLOCKED(q, k, v, 'windows', log_c(alpha))
    assert torch.autograd.gradcheck(blocked, inputs)

def test_mask_no_row_is_empty():
    """With a kind of your own, too, every token attends to something, for every n."""
    own = dict(stride=lambda i, j, n, far: (i - j) % n == 0,
               multiples=lambda i, j, n, far: j % n == 0,
               later=lambda i, j, n, far: (j % n == 0) & (j > 0))
    q, k, v = [t.requires_grad_() for t in qkv(1, 2, 24, 4)]
    i = torch.arange(24, device=DEVICE)
    with patch.dict(mask.KINDS, own):
        for kind, n, reading in itertools.product(own, range(1, 12), mask.READINGS):
            p = mask.attention_weights(q, k, f'{kind}:{n}', None, reading)
            held = own[kind](i[:, None], i, n, 1) & (i <= i[:, None])
            wrong = (p > 0) != (held | torch.diag(~held.diagonal()))
            assert not wrong.any(), (kind, n, reading, wrong.nonzero()[:3])
            g, = torch.autograd.grad((p @ v).sum(), q)
            assert g.isfinite().all(), (kind, n, reading)
            if reading == 'renormalised':
                close(p.sum(-1), 1.0, 1e-9)

def test_mask_blocked_equals_dense():
    """In every precision; gradients are finite."""
    cases = ('window:64+sinks:4', 200), ('offset:3+offset:5', 12)
    kinds = (torch.float, 2e-6), (torch.bfloat16, 3e-2), (torch.half, 3e-3)
    for (masks, T), (dtype, tolerance) in itertools.product(cases, kinds):
        log_c = torch.tensor([0.0, -0.5], device=DEVICE)
        q, k, v = [t.requires_grad_() for t in qkv(2, 3, T, 8, dtype=dtype)]
        y, z = [f(q, k, v, masks, log_c) for f in (DENSE, BLOCKED)]
        close(y.double(), z.double(), tolerance)
        for g in torch.autograd.grad((y + z).sum(), (q, k, v)):
            assert g.isfinite().all(), (masks, dtype)

def test_mask_small_coefficients():
    """A mask below a thousandth of the largest is closed; only ratios count, also where c
    underflows."""
    q, k, v = qkv(1, 2, 12, 4)
    opened = mask.log_coefficients(torch.tensor([0.0, -7.5, -7.7])).isfinite().tolist()
    assert opened == [True, True, False], opened  # 1 / 905 and 1 / 1105 of the first
    closed = mask.log_coefficients(torch.tensor([-20.0, 3.0], device=DEVICE))
    far = torch.tensor([-200.1, -200.5, -201.0], device=DEVICE)
    for f in (DENSE, BLOCKED):
        close(f(q, k, v, 'window:3+first:1', closed), f(q, k, v, 'first:1'), 1e-6)
        close(f(q, k, v, 'windows', far), f(q, k, v, 'windows', far + 200), 1e-5)

def test_mask_kept_pairs():
    """0.460 of the pairs at 256 tokens for window:64+sinks:4; 0.039 for last5."""
    window, sinks = mask_matrices(256)['window:64+sinks:4'].sum((1, 2)) / (256 * 257 / 2)
    half_closed = torch.tensor([[0.0, -20.0], [0.0, 0.0]], device=DEVICE)  # sinks, in one layer
    close(mask.kept_pairs(half_closed, 'window:64+sinks:4', 256), window + sinks / 2, 1e-6)
    close(mask.kept_pairs([torch.zeros(5, device=DEVICE)] * 3, 'last5', 256), 1270 / 32896, 1e-6)

def mask_golden_model():
    """A frozen teacher, and tokens."""
    net = mask.GPT2(mask_config(n_head=3, n_embd=24, block_size=24, vocab_size=61))
    return fill(net.double().requires_grad_(False)).to(DEVICE), gpt_ids(2, 24, 61)

def test_mask_logits_of_transformers():
    """Logits as transformers' GPT2LMHeadModel gives them."""
    net, idx = mask_golden_model()
    close(net(idx)[1, -1, :4], [0.879413, 0.831994, -0.276339, -1.175988], 1e-5)
    close(net(idx, last=True), net(idx)[:, -1:], 1e-12)

def test_mask_teacher_files(tmp_path):
    """The repository's teacher knows some English; transformers' files need a config.json beside
    them or --n-head; one line for a damaged or missing one."""
    own = mask.load_gpt2(HERE / 'assets' / 'teacher.pt')
    idx = torch.tensor([list(TEXT[:250].encode())])
    loss = F.cross_entropy(own(idx)[0, :-1], idx[0, 1:])
    assert own.config.n_head == 4 and loss < 3.5, (own.config, loss)  # log 256 is 5.5

    net, idx = mask.GPT2(mask_config(vocab_size=61)), torch.arange(12)[None]
    file = tmp_path / 'model.bin'
    state = {f'transformer.{key}': p for key, p in net.state_dict().items()}
    state['transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)
    torch.save(state, file)
    flags = tiny(mask, tmp_path, '--init', file)
    refuse(mask, ['heads', '--n-head'], *flags, '--n-head', 0)
    close(mask.load_gpt2(file, 2)(idx), net(idx), 0)
    (tmp_path / 'config.json').write_text('{"n_head": 2}')
    close(mask.load_gpt2(file, 4)(idx), net(idx), 0)  # the file knows better
    refuse(mask, ['61 tokens'], *flags)
    if importlib.util.find_spec('safetensors'):
        from safetensors.torch import save_file
        save_file({key: p.clone() for key, p in state.items()}, tmp_path / 'x.safetensors')
        close(mask.load_gpt2(tmp_path / 'x.safetensors')(idx), net(idx), 0)
    torch.save({**state, 'wte.weight': torch.zeros(400, 16)}, file)
    refuse(mask, ['400 tokens'], *flags)
    del state['transformer.wte.weight']
    for damaged in (b'', b'no checkpoint', state):
        file.write_bytes(damaged) if type(damaged) is bytes else torch.save(damaged, file)
        refuse(mask, [str(file)], *flags)
    file.unlink()
    refuse(mask, ['prepare_data.py gpt2'], *flags)

def test_mask_initial_weights():
    """A matrix of the teacher follows from the seed and its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(b'1337 h.1.mlp.c_proj.weight'))
    want = torch.empty(64, 16).normal_(0.0, 0.02 / math.sqrt(2 * 2), generator=generator)
    close(mask.GPT2(mask_config()).h[1].mlp.c_proj.weight, want, 0)

def test_mask_what_a_student_trains():
    """It is a copy of the teacher, with masks. --learn says what trains, alphas have a rate of
    their own, and only a teacher's matrices decay."""
    teacher, idx = mask_golden_model()
    neutral = mask.substitute(teacher, mask_config(masks='window:24'))
    close(neutral(idx), teacher(idx), 1e-12)
    def rates(net, stage):
        c = mask_config(stage=stage, weight_decay=0.3, learning_rate=2e-3, alpha_lr=0.2)
        groups = mask.make_optimizer(net, c).param_groups
        return {(group['lr'], group['weight_decay']) for group in groups}
    for learn, trained in (('alphas', {'alpha'}), ('attention', {'alpha', 'c_attn', 'c_proj'})):
        model = mask.substitute(teacher, mask_config(masks='windows', learn=learn))
        assert model.h[0].attn.alpha.shape == (3,), model.h[0].attn.alpha
        assert model.h[0].attn.c_attn.weight is not teacher.h[0].attn.c_attn.weight
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert {name.split('.')[3] for name in names} == trained, (learn, names)
    assert rates(model, 'student') == {(2e-3, 0), (0.2, 0)}, rates(model, 'student')
    teacher = mask.GPT2(mask_config())
    assert rates(teacher, 'teacher') == {(2e-3, 0.3), (2e-3, 0)}, rates(teacher, 'teacher')

def test_mask_loss():
    """Mean KL(teacher || student) and L1, by their formulas; logits are float32 under autocast."""
    teacher, idx = mask_golden_model()
    c = mask_config(masks='windows', l1=0.5)
    model = mask.substitute(teacher, c)
    p, q = teacher(idx).softmax(-1), model(idx).softmax(-1)
    want = (p * (p / q).log()).sum(-1)
    close(mask.token_kl(teacher(idx), model(idx)), want, 1e-9)
    l1 = 0.5 * sum(alpha.sigmoid().sum() for alpha in model.alphas())
    close(mask.loss_of(model, (idx, idx), c), want.mean() + l1, 1e-6)
    with torch.autocast(idx.device.type, torch.bfloat16):
        logits = mask.GPT2(mask_config()).to(DEVICE)(idx[:, :16] % 40)
        assert logits.dtype == torch.float32, logits.dtype

def test_mask_evaluation_in_float32():
    """A student that equals its teacher has KL 0 under bfloat16 too, and its text; a KL of nan is
    no 0; every window counts alike."""
    c = mask_config(vocab_size=256, masks='all', eval_rows=4, batch_size=3, l1=1.0, new_tokens=9)
    teacher = fill(mask.GPT2(c)).requires_grad_(False).to(DEVICE)
    data = types.SimpleNamespace(val=np.arange(900) ** 2 // 7 % 40)
    def val_loss(model):
        return mask.evaluate(model, data, c, torch.device(DEVICE))['val_loss']
    model = mask.substitute(teacher, c)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        close(val_loss(model), 0, 1e-7)
    texts = mask.side_by_side(c, model, ['a']).split('\nstudent')
    first, second = [text.partition(': ')[2].strip() for text in texts]
    assert first == second != '', (first, second)
    near = mask.substitute(teacher, dataclasses.replace(c, masks='window:2'))
    x = torch.cat([x for x, _ in mask.validation(data, c, DEVICE)])
    close(val_loss(near), mask.token_kl(teacher(x), near(x)).mean(), 1e-6)
    model.h[0].attn.c_proj.bias.data[0] = math.nan
    assert math.isnan(val_loss(model)), val_loss(model)

def test_mask_one_graph():
    """--compile turns a student's step into one graph, whatever the masks mean."""
    teacher, idx = mask_golden_model()
    for reading, masks in itertools.product(mask.READINGS, ('windows', 'offset:1')):
        model = mask.substitute(teacher, mask_config(masks=masks, reading=reading))
        found = torch._dynamo.explain(model)(idx)
        assert found.graph_count < 2, (reading, masks, found.break_reasons)

def test_mask_cache():
    """The student's has a constant size, but where what masks leave out is divided by, too."""
    teacher, idx = mask_golden_model()
    for masks, reading, kept in (('window:4+sinks:2', 'renormalised', 5),
                                 ('last5', 'unnormalised', 20)):
        model = mask.substitute(teacher, mask_config(masks=masks, reading=reading))
        out, size = model.generate(idx[:, :3], 18, temperature=0)
        assert size == 2 * 2 * 2 * 24 * 8 * kept, (masks, reading, size)
        whole, cache = model(out), [{} for _ in model.h]
        for t in range(21):  # every token by a pass over all before it
            close(model(out[:, [t]], cache)[:, -1], whole[:, t], 1e-9)
        close(whole[:, 2:-1].argmax(-1), out[:, 3:], 0)
        close(model.generate(idx[:, :3], 18, temperature=1e-9)[0], out, 0)  # hardly any chance
    out, size = teacher.generate(idx[:, :3], 60)  # positions begun afresh, half of them
    assert out.shape == (2, 63) and size == 2 * 2 * 2 * 24 * 8 * 23, (out.shape, size)
    torch.manual_seed(0)
    drawn = teacher.generate(idx[:1, :3].expand(9999, -1), 1)[0][:, 3].bincount(minlength=61)
    close(drawn / 9999, teacher(idx[:1, :3])[0, -1].softmax(0), 0.02)

def mask_figures(model, teacher, x, y):
    """The report's criteria once more, in the plainest way."""
    real = y >= 0
    target = y[real]
    maps, logs, right, gradients = [[], []], [], [], []
    for net, own in zip((teacher, model), maps):
        net = copy.deepcopy(net).requires_grad_(True)
        log_p = net(x, maps=own)[real].log_softmax(-1)  # (N, V)
        F.nll_loss(log_p, target, reduction='sum').backward()
        logs.append(log_p.detach())
        right.append((log_p.argmax(-1) == target).sum())
        gradients.append(torch.cat([p.grad.flatten() for name, p in net.named_parameters()
                                    if 'attn.c_attn' in name or 'attn.c_proj' in name]))
    p, q = logs
    gaps = torch.cat([(P - Q)[b, :, i, :i + 1].flatten() for P, Q in zip(*maps)
                      for b, i in real.nonzero()])
    return dict(kl=(p.exp() * (p - q)).sum(-1).mean(), accuracy=right[1] / max(1, right[0]),
                mse=gaps.square().mean(), cosine=F.cosine_similarity(*gradients, dim=0),
                teacher_perplexity=F.nll_loss(p, target).exp(),
                perplexity=F.nll_loss(q, target).exp())

def test_mask_criteria_and_edge_cases():
    """The report's edge cases: a padded batch, a token that is repeated, one constant token."""
    teacher, _ = mask_golden_model()
    c = mask_config(masks='window:3+sinks:1', batch_size=3, eval_rows=6)
    data = types.SimpleNamespace(val=np.arange(900) ** 2 // 7 % 40)
    model = mask.substitute(teacher, c)
    text = list(mask.validation(data, c, DEVICE))  # two batches
    close(torch.cat([x for x, _ in text])[:, 0], data.val[np.linspace(0, 883, 6).astype(int)], 0)
    x, y = text[0]
    padded, repeated = y.clone(), x.clone()
    padded[0, 5:], padded[1] = -1, -1
    repeated[:, 4:12] = x[:, [4]]
    for batches in (text, [(x, padded)], [(repeated, y)], [(x * 0, y * 0)]):
        got = mask.fidelity(model, batches)
        x, y = map(torch.cat, zip(*batches))
        for key, value in mask_figures(model, teacher, x, y).items():
            close(got[key], value, 2e-5 * (1 + abs(value)))
    nothing = mask.fidelity(model, [(x, y * 0 - 1)])  # all padding
    assert (nothing['kl'], nothing['mse'], nothing['accuracy']) == (0, 0, 0), nothing

def test_mask_memory():
    """Eager attention holds its scores and more; blocks need far less."""
    c = mask_config(n_head=4, n_embd=64, vocab_size=20_000, masks='window:64+sinks:4', device='cpu')
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ways = mask.scaling(c)[1024]
    eager, sdpa, masks = [way['attention, MiB'] for way in ways]
    weights = sum(p.nbytes for p in mask.GPT2(c).parameters()) / 2**20
    assert ways[1]['inference, MiB'] > weights + 1, (ways[1], weights)
    assert 32 < eager < 128, eager  # the scores of four heads alone are 16 MiB
    assert masks < 0.3 * eager and sdpa < 0.3 * eager, (eager, sdpa, masks)
    assert 'PASS' in out.getvalue() and 'FAIL' in out.getvalue(), out.getvalue()

def test_mask_two_stages(tmp_path):
    """A teacher, found again whatever the masks; KL falls; then the actions sample and criteria."""
    flags = tiny(mask, tmp_path, '--teacher-iters', 30, '--teacher-lr', 0.03)
    out = run(mask, *flags, '--max-iters', 0).out
    assert out.index('step 30/30') < out.index('stage 2 of 2')
    end = run(mask, *flags, '--max-iters', 40, '--learning-rate', 0.003, '--masks', 'window:1')
    result, log = end.result, end.result['log']
    assert 'step 29/30' not in end.out and log[-1]['val_loss'] < 0.7 * log[0]['val_loss'], end.out
    close(result['kl'], result['val_loss'], 1e-6)
    refuse(mask, ['alpha'], *flags, '--init', result['folder'] / 'ckpt.pt')
    last = ['--out-dir', tmp_path / 'out', '--device', DEVICE, '--run', result['folder']]
    texts = done(mask, 'sample', *last, '--new-tokens', 5)
    assert all(prompt in texts for prompt in mask.PROMPTS), texts
    with patch.dict(mask.CRITERIA, perplexity=('<=', 1e9)):  # a criterion of your own
        end = run(mask, 'criteria', *last, '--lengths', '32,64')
    assert set(end.result) == {32, 64} and 'of 5 criteria' in end.out, end.out

def test_mask_no_old_teacher(tmp_path):
    """--fresh, an edited script and other data train the teacher anew; --reuse says it does not.
    A comparison has one teacher."""
    student = dict(masks='last5', reading='separate', learn='alphas', l1=1.0, alpha_lr=0.1,
                   samples=9, max_iters=3, learning_rate=1.0, min_lr=0.5, schedule='constant',
                   warmup_iters=1, warmdown_iters=3, grad_clip=0.5)
    assert mask.stage_1(mask_config(**student)) == mask.stage_1(mask_config())
    flags = tiny(mask, tmp_path)
    done(mask, *flags)
    assert 'step 5/5: loss' not in run(mask, *flags).out
    assert 'step 5/5: loss' in run(mask, *flags, '--fresh').out
    with patch.object(mask, 'SOURCE', mask.SOURCE.replace('F.gelu', 'F.relu')):
        end = run(mask, *flags, '--reuse')
        assert end.out.count('--reuse takes') == 2 and 'step 5/5: loss' not in end.out, end.out
        assert 'step 5/5: loss' in run(mask, *flags).out
    (tmp_path / 'init.pt').write_bytes(b'a')
    c = mask_config(init=str(tmp_path / 'init.pt'))
    before = mask.run_folder(c)
    (tmp_path / 'init.pt').write_bytes(b'b')
    assert mask.run_folder(c) != before
    (tmp_path / 'text.txt').write_text(TEXT + 'a')
    cases = ['compare', *flags, '--over', 'masks=window:2,window:4']
    end = run(mask, *cases, '--seeds', '0,1', '--figure', 'kept')
    assert end.out.count('step 5/5: loss') == 1, end.out
    close([row['mean'] for row in end.result], [31 / 136, 58 / 136], 1e-6)
    teachers = ','.join(map(str, [*tmp_path.glob('out/*/teacher*/ckpt.pt')][:2]))
    again = run(mask, 'compare', *flags, '--over', f'init={teachers}', '--seeds', '0')
    assert again.code == 0 and 'stage 1' not in again.out, again.out + again.err

def test_mask_l1_in_training(tmp_path):
    """The action inspect: L1 lets both alphas of 'first-all' fall, as the report saw."""
    flags = tiny(mask, tmp_path, '--masks', 'first-all', '--learn', 'alphas', '--l1', 0.5)
    found = done(mask, 'inspect', *flags, '--alpha-lr', 0.2)
    rows, = found.values()
    start, middle, end = rows[:3]  # the first of two layers, at steps 0, 3 and 6
    for name in ('first:1', 'all:1'):
        assert 0.5 == start[name] > middle[name] > end[name], (name, start, middle, end)

def test_mask_mistakes(tmp_path):
    flags = tiny(mask, tmp_path)
    for bad in ('nonsense', '', 'window', 'window:0'):
        refuse(mask, ['--masks', 'window:N'], *flags, '--masks', bad)
    for bad in (3, -1):
        refuse(mask, ['--n-head'], *flags, '--n-head', bad)
    refuse(mask, ['block-size'], *flags, '--block-size', 5000)
    for flag, bad in (('--lengths', '64,x'), ('--samples', -1), ('--temperature', -0.1)):
        refuse(mask, [flag, str(bad)], 'scaling', *flags, flag, bad)
    refuse(mask, ['one teacher'], 'compare', *flags, '--over', 'n-layer=1,2')

def test_mask_report004():
    """1,000 samples of 512 tokens, 100 epochs, L1; the report's criteria."""
    c = mask.Config(**mask.PRESETS['report004'])
    has(c, masks='last5', samples=1000, block_size=512, data='wikitext-2')
    assert c.max_iters * c.batch_size * c.grad_accum_steps == 100 * c.samples and c.l1 > 0, c
    for name, good, bad in (('accuracy', 0.95, 0.94), ('cosine', 0.95, 0.94), ('mse', 1e-4, 2e-4),
                            ('kl', 1e-3, 2e-3)):
        assert mask.passes(name, good) and not mask.passes(name, bad), name

# ------------------------------------ prepare_data.py ------------------------------------
PROSE = 'Zwölf Boxkämpfer — 日本 🎉\r\n\n  jagen\tViktor <|endoftext|> \x00\n' * 200

def content(path):
    if path.suffix != '.npz':
        return path.read_bytes()
    z = np.load(path, allow_pickle=False)
    return z['labels'].tolist(), z['images'].shape[1:], z['images'].tobytes()

def contents(path):
    return {p.relative_to(path).as_posix(): content(p) for p in path.rglob('*') if p.is_file()}

def archive(kind, members):
    """A zip, or a tar with this mode, of {name: bytes} -> bytes."""
    buffer = io.BytesIO()
    if kind == 'zip':
        with zipfile.ZipFile(buffer, 'w') as out:
            for name, data in members.items():
                out.writestr(name, data)
    else:
        with tarfile.open(None, kind, buffer) as out:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                out.addfile(info, io.BytesIO(data))
    return buffer.getvalue()

@contextlib.contextmanager
def serving(body, cuts=0):
    """A server whose first answers break off -> its url, the Range headers that came."""
    log = []
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get('Range')  # bytes=N-
            log.append(wanted)
            rest = body[int(wanted[6:-1]):] if wanted else body
            self.send_response(206 if wanted and rest else 200 if rest else 416)
            if not rest:
                self.send_header('Content-Range', f'bytes */{len(body)}')
            self.send_header('Content-Length', str(len(rest)))
            self.end_headers()
            self.wfile.write(rest[:len(rest) // 2] if len(log) <= cuts else rest)
        log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/x', log
        server.shutdown()

def test_prep_text_and_mistakes(tmp_path):
    notes, out = tmp_path / 'my.notes.txt', tmp_path / 'data' / 'my.notes'
    flags = ['text', notes, '--data-dir', tmp_path / 'data', '--tokenizer', 'bytes']
    notes.write_bytes(b'\xef\xbb\xbf' + PROSE.encode())
    meta, cut = done(prepare_data, *flags), int(0.9 * len(PROSE))
    for split, part in (('train', PROSE[:cut].encode()), ('val', PROSE[cut:].encode())):
        assert np.fromfile(out / f'{split}.bin', '<u2').tolist() == list(part)
        assert meta['tokens'][split] == meta['bytes'][split] == len(part)
    before = contents(tmp_path / 'data')
    assert meta == json.loads(before['my.notes/meta.json']) and meta['vocab_size'] == 256
    mistakes = {'text': 'FILE', 'pile': 'choice', 'coco --parts 3': '1 to 2',
                'gpt2 --tokenizer gpt2': 'none', 'cifar10 --from x': 'no such file'}
    for words, answer in mistakes.items():
        refuse(prepare_data, [answer], *words.split(), '--data-dir', tmp_path / 'data')
    notes.write_bytes(b'\xe9' * 99)
    refuse(prepare_data, ['my.notes.txt', 'utf-8'], *flags)
    assert contents(tmp_path / 'data') == before
    notes.write_text('changed ' * 10)
    assert done(prepare_data, *flags)['tokens'] == {'train': 72, 'val': 8}

@patch('prepare_data.PAUSE', 0)
def test_prep_downloads(tmp_path):
    """They go on where they broke off; a wrong file is thrown away, and the next mirror asked."""
    body = b'to be or not to be\n' * 20_000
    size, digest = len(body), 'sha256:' + hashlib.sha256(body).hexdigest()
    def get(name, *urls):
        row = (*prepare_data.DATASETS[name][:3], [(size, digest, *urls)])
        with patch.dict(prepare_data.DATASETS, {name: row}):
            return run(prepare_data, name, '--data-dir', tmp_path)
    with serving(body, cuts=2) as (url, log):
        file = tmp_path / 'weights/gpt2/model.safetensors'
        for _ in range(2):  # the second time there is nothing left to do
            assert get('gpt2', url).code == 0
        assert len(log) == 3 and log[0] is None and 'bytes=0-' < log[1] < log[2]
        file.rename(f'{file}.part')  # stopped when all had come, before it was checked
        assert get('gpt2', url).code == 0
        assert content(file) == body and len(log) == 4
    with serving(body[:-1] + b'?') as (bad, log), serving(body) as (good, _):
        end = get('resnet50', bad)
        assert end.code == 2 and digest[7:] in end.err and len(log) == 1
        assert get('resnet50', bad, good).code == 0
        assert content(tmp_path / 'weights/resnet50.pth') == body

EVIL = dict.fromkeys(('../../1.jpg', '/etc/000000000001.jpg', 'x.pkl'), b'cos\nsystem\n.')

def check_archives(name, raw, want, *flags):
    """Members of raw files with the expected names end where they should, and no others."""
    with folder() as path:
        (path / 'raw').mkdir()
        for file, data in raw.items():
            (path / 'raw' / file).write_bytes(data)
        done(prepare_data, name, '--no-verify', '--data-dir', path / 'data',
             '--from', path / 'raw', *flags)
        found = contents(path / 'data' / name)
        assert b'(unverified)' in found.pop('meta.json') and found == want, name
        assert {p.name for p in path.iterdir()} == {'raw', 'data'}

def test_prep_images():
    pixels = bytes(range(256)) * 12
    ten = {f'cifar-10-batches-bin/data_batch_{i}.bin': bytes([i]) + pixels for i in range(1, 6)}
    ten['cifar-10-batches-bin/test_batch.bin'] = b'\7' + pixels[::-1]
    ten['cifar-10-batches-bin/batches.meta.txt'] = b'cat\ndog\n\n'
    check_archives('cifar10', {'cifar-10-binary.tar.gz': archive('w:gz', EVIL | ten)},
                   {'train.npz': ([1, 2, 3, 4, 5], (3, 32, 32), 5 * pixels),
                    'test.npz': ([7], (3, 32, 32), pixels[::-1])})
    hundred = {'cifar-100-binary/train.bin': b'\3\7' + pixels,  # a coarse label, a fine one
               'cifar-100-binary/test.bin': b'',
               'cifar-100-binary/fine_label_names.txt': b'apple\n'}
    check_archives('cifar100', {'cifar-100-binary.tar.gz': archive('w:gz', hundred)},
                   {'train.npz': ([7], (3, 32, 32), pixels), 'test.npz': ([], (3, 32, 32), b'')})
    photos = {'imagenette2-160/train/n01440764/1.JPEG': b'a tench',
              'imagenette2-160/val/n03888257/1.JPEG': b'a parachute'}
    check_archives('imagenette', {'imagenette2-160.tgz': archive('w:gz', EVIL | photos)},
                   {'train/tench/1.JPEG': b'a tench', 'val/parachute/1.JPEG': b'a parachute'})
    jpegs = {f'val2017/{i:012d}.jpg': b'x' * i for i in range(3)}
    boxes = {'annotations/instances_val2017.json': b'{}'}
    zips = {'val2017.zip': archive('zip', EVIL | jpegs),
            'annotations_trainval2017.zip': archive('zip', EVIL | boxes)}
    check_archives('coco', zips, jpegs | boxes)

def test_prep_texts():
    def tokens(data):
        return np.array([*data], '<u2').tobytes()
    wiki = {'wikitext-2-raw/wiki.train.raw': b'a b', 'wikitext-2-raw/wiki.valid.raw': b'ab'}
    check_archives('wikitext-2', {'wikitext-2-raw-v1.zip': archive('zip', EVIL | wiki)},
                   {'train.bin': tokens(b'a b'), 'val.bin': tokens(b'ab')}, '--tokenizer', 'bytes')
    head = np.array([20240520, 1, 3, *253 * [0]], '<i4').tobytes()
    check_archives('fineweb', {'fineweb_train_000001.bin': head + tokens([1, 2, 50256]),
                               'fineweb_val_000000.bin': head + tokens([3, 4, 5])},
                   {'train.bin': tokens([1, 2, 50256]), 'val.bin': tokens([3, 4, 5])})
    # of OpenWebText every 2000th document is to validate on
    pages = {f'{i}.txt': b'\n %d\n\n\n\nb ' % i for i in range(2001)}
    texts = [b'%d\n\nb\n\n' % i for i in range(2001)]
    packed = {'owt/1.xz': lzma.compress(archive('w:', pages), preset=0)}
    check_archives('openwebtext', {'urlsf_subset00.tar': archive('w:', EVIL | packed)},
                   {'train.bin': tokens(b''.join(texts[1:2000])),
                    'val.bin': tokens(texts[0] + texts[2000])}, '--tokenizer', 'bytes')

def test_prep_tokens():
    """Cuts are where GPT-2's pattern starts anew: at the last white space before a word."""
    pieces = list(prepare_data.pieces(io.StringIO(PROSE, newline=''), 50))
    assert ''.join(pieces) == PROSE and len(pieces) > len(PROSE) / 100
    assert all(re.match(r'[ \n]\S', piece) for piece in pieces[1:])

# -------------------------------- what all four scripts share --------------------------------
def source(script):
    return pathlib.Path(script.__file__).read_text('utf-8')

def test_blocks_are_identical():
    """(If you have changed one script for yourself, it need not stay like the others.)"""
    for name in ('training loop', 'tools'):
        block = rf'# --- {name} \(identical.*?# --- end of {name}\n'
        first, *others = [re.search(block, source(script), re.S)[0] for script in SCRIPTS]
        for script, text in zip(SCRIPTS[1:], others):
            for a, b in zip(first.splitlines(), text.splitlines()):
                assert a == b, f'{name}: attentionx_gpt.py has {a!r}, {script.SCRIPT}.py {b!r}'
            assert first == text, f'{name}: {script.SCRIPT}.py has more or fewer lines'

def test_docstrings():
    """Every equation that one names is marked in the code, and the other way round."""
    for script in SCRIPTS:
        _, docstring, code = source(script).split('"""', 2)
        tag = r'\[\w+ (?:Eq|Sec|Alg)\. [\d.]+\]'
        told, marked = set(re.findall(tag, docstring)), set(re.findall(tag, code))
        assert told == marked != set(), (script.SCRIPT, told ^ marked)

def test_commands_in_the_texts():
    """What README.md, results.md and the docstrings tell to type is what the scripts take."""
    texts = [(HERE / name).read_text('utf-8') for name in ('README.md', 'assets/results.md')]
    texts += [script.__doc__ for script in SCRIPTS]
    command = r'(?:python|uv run|nproc-per-node 2) (\w+)\.py([^`\n#]*)'
    scripts, seen = {script.SCRIPT: script for script in SCRIPTS}, 0
    for name, flags in re.findall(command, '\n'.join(texts)):
        if name in scripts:
            with QUIET:
                scripts[name].parse(shlex.split(flags.split(' && ')[0]))
            seen += 1
    assert seen > 30, seen

def test_tables_of_the_record(tmp_path):
    """Each table of results.md under `compare --from-csv` is what that prints, and intervals and
    other figures of README and of the claims stand in such a table, or at least in results.md."""
    readme, results = [(HERE / name).read_text('utf-8') for name in ('README.md', 'assets/results.md')]
    command = r'    python (\w+)\.py (compare --from-csv [^\n]*)\n\n```text\n(.*?)\n```'
    intervals, seen = set(), 0
    for name, flags, table in re.findall(command, results, re.S):
        flags = flags.replace('assets/', f'{HERE.as_posix()}/assets/')
        end = run(importlib.import_module(name), *shlex.split(flags), '--out-dir', tmp_path)
        for ours, theirs in zip(table.splitlines(), printed_by(end)[1:], strict=True):
            assert ours == theirs, f'{flags}: results.md has\n{ours}\nand the csv gives\n{theirs}'
        for line in end.result:
            low, high = line['diff'] - line['interval'], line['diff'] + line['interval']
            intervals |= {f'{low:+.3f} to {high:+.3f}', f'{100 * low:+.1f} to {100 * high:+.1f}'}
        seen += 1
    assert seen > 5 and results.count('compare --from-csv') == seen, seen
    for text in (readme, results):
        claimed = re.findall(r'[+-][\d.]+ to [+-][\d.]+', text.replace('\N{MINUS SIGN}', '-'))
        assert claimed and set(claimed) <= intervals, set(claimed) - intervals
    log = gpt.read_csv(HERE / 'assets/runs/gpt-belief-log.csv')
    for i in range(3):  # BeliefFormer's lengths, layer by layer
        ratios = [row[f'{i}.update_out'] / row[f'{i}.mh_out'] for row in log if row['step'] == 1000]
        found = f'| {i} | {np.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |'
        assert found in results, found
    figures = set(re.findall(r'(?<![\d.])\d\.\d\d+(?![\d.])', readme.partition('## Use it')[0]))
    figures -= set(re.findall(r'\d\.\d\d+', results))
    assert not figures, f'README has {figures}, results.md does not'

def test_streams_have_names():
    """[1, 7] and [1, 7, 0] are one seed to NumPy: what is drawn for different ends has a name."""
    for script in (vit, detr, mask):
        assert source(script).count('default_rng(') == 1, script.SCRIPT
        draws = {script.stream(name, *numbers).random() for name in ('batch', 'validation')
                 for numbers in ((1, 7), (1, 7, 0), (1, 70), (17,))}
        assert len(draws) == 8, script.SCRIPT
    assert source(gpt).count('default_rng(') == 1  # a single stream needs no name

def test_configs():
    """Presets and rows of tables are valid, every field is a flag, and --help is Config."""
    for script in SCRIPTS:
        for settings in script.PRESETS.values():
            script.Config(**settings)
        for table, rows in script.TABLES.items():
            cases = script.cases_of(script.Config(table=table, over=['max_iters=3,4']))
            assert {*cases} == {f'{name} {n}' for name in rows for n in (3, 4)}, [*cases]
        out = run(script, '--help').out
        for field in dataclasses.fields(script.Config):
            assert f'{field.name}: ' in out

def test_pasted_into_a_notebook():
    """Where there is no file, a script only defines things."""
    for script in SCRIPTS:
        module = types.ModuleType('cell')
        with patch.dict(sys.modules, cell=module):
            exec(source(script), module.__dict__)
            assert module.Config().max_iters > 0

@wants('nbclient')
@wants('ipykernel')
def test_notebook(tmp_path):
    """README's Colab cell in a real kernel: pictures appear, a second run goes on, an interrupt
    leaves the kernel alive, a loop over train draws live, a pasted script defines all."""
    nbclient, nbformat = map(importlib.import_module, ('nbclient', 'nbformat'))
    shutil.copytree(HERE, tmp_path / 'attention', ignore=shutil.ignore_patterns('.git', 'out', 'data'))
    (tmp_path / 'text.txt').write_text(TEXT)
    readme = (HERE / 'README.md').read_text('utf-8')
    cell = re.search(r'    from google.colab.*?curves.png.\)\n', readme, re.S)[0]
    cell = '\n'.join(line.strip() for line in cell.splitlines() if 'google.colab' not in line)
    cell = re.sub('(?m)^!git clone.*$', '', cell).replace('/content/drive/MyDrive', str(tmp_path))
    flags = [str(x) for x in tiny(gpt, tmp_path, *CPU)]
    cell = cell.replace("'--gamma', '3'", f"'--gamma', '3', *{flags}")
    interrupt = ('import threading, os, signal\n'
                 'threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()\n'
                 f"main([*{flags}, '--max-iters', '1000000'])")
    live = ('%matplotlib inline\nimport matplotlib.pyplot as plt, attentionx_gpt as g\n'
            'from IPython.display import display\n'
            f'_, c = g.parse({flags})\n'
            'for step, model, log in g.train(c):\n    if step % 3 == 0:\n'
            "        plt.plot([row['val_loss'] for row in log]); display(plt.gcf())")
    cells = [cell, cell.replace('%cd attention', ''), interrupt, 'print(1 + 1)', live,
             source(gpt), f'_, c = parse({flags}); print(Config().n_layer, run_folder(c).name)']
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(book, timeout=120, allow_errors=True, kernel_name='python3',
                            resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    outs = [json.dumps(cell.outputs) for cell in book.cells]
    assert 'image/png' in outs[0] and 'step 6/6' in outs[0], outs[0][-2000:]
    assert 'image/png' in outs[1] and 'is finished' in outs[1], outs[1][-2000:]
    assert 'the same command goes on from step' in outs[2], outs[2][-2000:]
    assert '2\\n' in outs[3], outs[3]
    assert outs[4].count('image/png') >= 3, outs[4][-2000:]
    assert '"error"' not in outs[5] + outs[6] and 'attentionx-s1337' in outs[6], outs[6]

def test_a_variant_of_your_own(tmp_path):
    """README's example, put into the script, trains; so does the code to paste into a model."""
    readme = (HERE / 'README.md').read_text('utf-8')
    first, second = re.findall(r'```python\n(.*?)```', readme, re.S)
    head, row = first.splitlines()
    assert head in source(gpt)
    (tmp_path / 'mine.py').write_text(source(gpt).replace(head, head + '\n' + row))
    with patch.object(sys, 'path', [str(tmp_path), *sys.path]):
        mine = importlib.import_module('mine')
    done(mine, *tiny(gpt, tmp_path, '--attention', 'laplacian'))
    q, k, v = qkv(2, 3, 6, 4)
    names = dict(q=q, k=k, v=v, w_o=torch.nn.Identity())
    exec(second, names)
    want = gpt.ATTENTION['belief'](gpt.multi_head(q, k, v), v.transpose(1, 2), None)
    close(names['out'], want.flatten(2), 1e-6)

# ------------------------------------ the training loop ------------------------------------
def test_schedules():
    """Cosine is in the test after this one."""
    c = gpt.Config(schedule='trapezoid', warmup_iters=10, max_iters=110, warmdown_iters=20)
    close([gpt.schedule(step, c) for step in (0, 10, 90, 100, 110)], [1 / 11, 1, 1, 0.5, 0], 1e-7)
    c = dataclasses.replace(c, schedule='step')
    close([gpt.schedule(step, c) for step in (4, 10, 89, 90)], [5 / 11, 1, 1, 0.1], 1e-7)

def test_training_by_hand(tmp_path):
    """Five steps of Adam: accumulation, clipping, decay, warmup and cosine."""
    flags = tiny(gpt, tmp_path, '--grad-accum-steps', 2, '--max-iters', 5, '--grad-clip', 0.5,
                 '--eval-interval', 1, *CPU, '--bias', '--beta1', 0.8, '--beta2', 0.9, '--weight-decay', 0.3)
    log = done(gpt, *flags)['log']
    with QUIET:
        _, c = gpt.parse(flags)
        data = gpt.load_data(c)
    model = gpt.make_model(c, data)
    adam = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 3)) / 2 for i in range(3)]
    for step, factor in enumerate([1 / 3, 2 / 3, *cosine]):
        lr = adam.param_groups[0]['lr'] = c.learning_rate * factor
        batches = [gpt.get_batch(data, c, step, micro, 'cpu') for micro in (0, 1)]
        x, y = [torch.cat(pair) for pair in zip(*batches)]
        model.zero_grad()
        loss = F.cross_entropy(model(x, y)[0].flatten(0, 1), y.flatten())
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        close(log[step + 1]['loss'], loss, 1e-4)
        for p in model.parameters():
            p.data *= 1 - lr * 0.3 * (p.dim() > 1)
        adam.step()
    for name, p in checkpoint(tmp_path)['model'].items():
        close(p, model.state_dict()[name], 2e-5)

def test_dropout_differs_from_step_to_step(tmp_path):
    flags = tiny(gpt, tmp_path, '--dropout', 0.5, '--learning-rate', 1e-30, '--eval-interval', 1)
    (tmp_path / 'text.txt').write_text('a' * 2000)  # every batch is the same
    losses = [row['loss'] for row in done(gpt, *flags)['log'][1:]]
    assert len(set(losses)) == len(losses) == 6, losses

def interrupted(script, step, error=KeyboardInterrupt):
    """A patch: Ctrl-C, or another end, while the process prepares this step."""
    whole = script.get_batch
    def get_batch(data, c, now, micro, device):
        if now == step and micro == 0:
            raise error
        return whole(data, c, now, micro, device)
    # as code of this file, which stands beside the script, it would name another run
    get_batch.__code__ = get_batch.__code__.replace(co_filename=script.__file__)
    return patch.object(script, 'get_batch', get_batch)

def test_resume_bit_for_bit(tmp_path):
    """Stopped between two evaluations, and given again: the same weights, and in float16 the same
    scale of the loss."""
    for script, dtype in [*((script, 'float32') for script in SCRIPTS), (gpt, 'float16')]:
        flags = tiny(script, tmp_path, '--grad-accum-steps', 2, *CPU, '--dtype', dtype)
        where = done(script, *flags)['folder']
        want = checkpoint(where)
        shutil.rmtree(where)
        with interrupted(script, 5):
            end = run(script, *flags)
            assert (end.code, 'from step 3' in end.out) == (130, True), (script.SCRIPT, end.out)
        assert 'goes on from step 3' in run(script, *flags).out, script.SCRIPT
        got = checkpoint(where)
        assert same(want['model'], got['model']), script.SCRIPT
        for a, b in zip(want['progress'][3], got['progress'][3], strict=True):
            a['seconds'] = b['seconds'] = 0
            assert repr(a) == repr(b)  # repr: there may be nan
        assert want['scaler'] == got['scaler']
        assert want['scaler'].get('scale', 1) > 1 or dtype == 'float32'
        assert 'is finished' in run(script, *flags).out
        assert 'step 0/6' in run(script, *flags, '--fresh').out

def test_notebook_loop(tmp_path):
    """for step, model, log in train(c, folder, data): gradients, data and a folder of one's own."""
    with QUIET:
        _, c = gpt.parse(tiny(gpt, tmp_path, '--data', 'is-not-read'))
        data = types.SimpleNamespace(train=np.arange(999) % 50, val=np.arange(99) % 50)
        where = str(tmp_path / 'mine')
        for step, model, log in gpt.train(c, where, data):
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            assert (len(norms) > 0) == (step > 0), step
            assert step == 0 or torch.stack(norms).norm() <= 1.0001  # clipped
        assert [row['step'] for row in log] == [0, 3, 6]
        assert model.config.vocab_size == 50, model.config.vocab_size  # the data's tokens
        steps = [step for step, _, _ in gpt.train(c, where, data)]
        assert steps == [6], steps  # it is finished
    data.train = data.train[::-1].copy()  # other data are another run
    refuse(types.SimpleNamespace(main=lambda _: [*gpt.train(c, where, data)]), ['another folder'])
    x, y = data.train, data.val  # also deep in them
    names = {gpt.run_folder(c, types.SimpleNamespace(train=x, val=val)) for val in (
        x, y, [y], dict(a=y), dict(b=y), '1')}
    long = np.zeros((2, 5000))  # its middle is not in what it prints
    long[1, 2500] = 1
    names |= {gpt.run_folder(c, types.SimpleNamespace(a=types.SimpleNamespace(b=z))) for z in long}
    assert len(names) == 8, names

def test_not_finite(tmp_path):
    """A loss or gradient that is not finite stops in that step with one line, and the checkpoint is
    from before; in float16 a gradient skips that step alone."""
    flags, loss_of = tiny(gpt, tmp_path, '--fresh'), gpt.loss_of
    def broken(model, batch, c):
        loss = loss_of(model, batch, c)
        if model.training and next(steps) == 4:
            if bad == 'loss':
                return loss * math.nan
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss
    with patch.object(gpt, 'loss_of', broken):
        for bad, words in (('loss', 'loss nan'), ('gradient', 'gradient norm')):
            steps = itertools.count()
            refuse(gpt, [words, 'step 4'], *flags)
            assert checkpoint(tmp_path)['progress'][0] == 3
        steps = itertools.count()
        end = run(gpt, *flags, *CPU, '--dtype', 'float16')
        assert end.result['step'] == 6 and math.isfinite(end.result['loss']), end.result
        assert end.result['skipped'] == 1 and 'skipped 1\n' in end.out, end.out
        steps = itertools.repeat(4)  # in every step: the scale falls to 1
        refuse(gpt, ['gradient norm', 'step 8'], *flags, *CPU, '--dtype', 'float16', '--max-iters', 12)

def test_no_clipping(tmp_path):
    """--grad-clip 0, as the papers' presets have it, is no limit, not a limit of 0."""
    none, wide = [done(gpt, *tiny(gpt, tmp_path, '--grad-clip', limit)) for limit in (0, 1e9)]
    assert none['val_loss'] == wide['val_loss']

def test_killed(tmp_path):
    """SIGKILL at any moment, and the same command: the weights of a run that nobody disturbed."""
    def start(out):
        flags = tiny(gpt, tmp_path, *CPU, '--max-iters', 200, '--eval-interval', 20)
        return subprocess.Popen([sys.executable, gpt.__file__, *flags, '--out-dir', tmp_path / out],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole, part = start('whole'), start('part')
    while not list(tmp_path.glob('part/*/*/ckpt.pt')):
        assert part.poll() is None
        time.sleep(0.01)
    time.sleep(0.15)
    part.kill()
    assert part.wait() == -signal.SIGKILL
    assert checkpoint(tmp_path / 'part')['progress'][0] < 200
    assert (start('part').wait(), whole.wait()) == (0, 0)
    assert same(*(checkpoint(tmp_path / out)['model'] for out in ('whole', 'part')))

TORCHRUN = '''
import importlib, json, os, sys
os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'
for name, argv in json.loads(sys.argv[1]).items():
    os.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + 1)  # each meets at its own
    importlib.import_module(name).main(argv)
'''

def test_two_processes(tmp_path):
    """Two processes with the flags of one end with its weights."""
    (tmp_path / 'run.py').write_text(TORCHRUN)
    argv = {script.SCRIPT: tiny(script, tmp_path, *CPU) for script in SCRIPTS}
    alone = {}
    for script in SCRIPTS:
        where = done(script, *argv[script.SCRIPT])['folder']
        alone[where.parent] = checkpoint(where)
        shutil.rmtree(where.parent)
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2',
               '--master-port', str(20000 + os.getpid() % 10000), str(tmp_path / 'run.py')]
    try:
        ended = subprocess.run([*command, json.dumps(argv)], capture_output=True, text=True,
                               env={**os.environ, 'PYTHONPATH': str(HERE)}, timeout=120)
    except subprocess.TimeoutExpired:
        raise unittest.SkipTest('two processes did not meet in 2 minutes: no loopback interface?')
    assert ended.returncode == 0, ended.stderr
    for where, want in alone.items():
        student, = [path for path in where.glob('*/ckpt.pt') if 'teacher' not in str(path)]
        both = torch.load(student, weights_only=True)
        assert both['progress'][0] == 6
        for a, b in zip(both['progress'][3][1:], want['progress'][3][1:]):
            assert abs(a['loss'] - b['loss']) < 1e-4 * (0.01 + b['loss']), (a, b)
        for name, p in both['model'].items():  # Adam makes steps of rounding, too
            close(p, want['model'][name], 1e-3)

VARIANTS = {  # settings of every variant of each script
    gpt: [dict(attention=name, arch=arch, zero_diag=zero_diag) for name in gpt.ATTENTION
          for arch, zero_diag in (('gpt2', False), ('rotary', True))],
    vit: [dict(attention=name, zero_diag=zero_diag) for name in vit.ATTENTION
          for zero_diag in (False, True)]
         + [dict(model=name) for name in ('deit-small', 'deit-small-local')]
         + [dict(optimizer='set-adam', mix=True)],
    detr: [dict(self_attention=a, cross_attention=a) for a in detr.ATTENTION if a != 'l2']
          + [dict(cross_attention='l2'), dict(random_tokens=3), dict(solve_over='value')],
    mask: [dict(masks=masks, reading=reading) for reading in mask.READINGS
           for masks in ('window:4+sinks:1', 'last5', 'offset:1', 'all')],
}

def small_case(script, path, device, **settings):
    """Model, first batch and Config of a small run."""
    with QUIET:
        _, c = script.parse(tiny(script, path, *CPU))
        if script is mask and not any(path.glob('teacher.pt')):
            teacher = mask.GPT2(mask_config(vocab_size=256))
            torch.save(dict(model=teacher.state_dict(), config=dict(n_head=2)), path / 'teacher.pt')
        if script is mask:
            settings['init'] = str(path / 'teacher.pt')
        c = dataclasses.replace(c, **settings)
        data = script.load_data(c)
        model = script.make_model(c, data)
        if script is mask:  # no part of the model, so that checkpoints are without it
            model.teacher[0].to(device)
        return model.to(device).train(), script.get_batch(data, c, 0, 0, device), c

def test_meta_device(tmp_path):
    """A training step of every variant where tensors have no values: one that was left on the CPU
    raises. (Not as an index or a mask: those need a GPU.)"""
    pairs = torch.zeros(4, 1, dtype=torch.long, device='meta')
    no_autocast = patch('torch.autocast', lambda *a, **k: contextlib.nullcontext())
    with patch.object(detr, 'match_batch', lambda *_: pairs), no_autocast:
        for script in SCRIPTS:
            for settings in VARIANTS[script]:
                model, batch, c = small_case(script, tmp_path, 'meta', **settings)
                for x in torch.utils._pytree.tree_leaves(batch):
                    where = x.device.type if torch.is_tensor(x) else 'meta'
                    assert where == 'meta', f'{script.SCRIPT} {settings}: a batch on {where}'
                optimizer = script.make_optimizer(model, c)
                try:
                    script.loss_of(model, batch, c).backward()
                    optimizer.step()
                except RuntimeError as error:
                    raise AssertionError(f'{script.SCRIPT} {settings}: {error}')

def test_one_graph(tmp_path):
    """--compile makes one graph of each script's model."""
    for script in SCRIPTS:
        for settings in VARIANTS[script][:1]:
            model, batch, c = small_case(script, tmp_path, 'cpu', **settings)
            inputs = batch[:2] if script in (gpt, detr) else batch[:1]
            found = torch._dynamo.explain(model)(*inputs)
            assert found.graph_count <= 1, (script.SCRIPT, found.break_reasons)

# ------------------------------------ the tools ------------------------------------
class Trap:
    """Unpickled it would make a folder."""
    def __reduce__(self):
        return os.mkdir, ('trapped',)

def full(path, data):
    """Path.write_bytes on a disk that has room for half of the data."""
    with open(path, 'wb') as file:
        file.write(data[:len(data) // 2])
    raise OSError('No space left on device')

def test_mistakes(tmp_path):
    """The likely ones, in every script: one line, exit code 2, nothing lost."""
    for script in SCRIPTS:
        flags = tiny(script, tmp_path)
        refuse(script, ['--sed: ', '--seed'], *flags, '--sed', '3')
        refuse(script, ['trane', 'train, compare'], 'trane')
        for name in script.POSITIVE:
            refuse(script, ['--' + name.replace('_', '-'), 'at least 1'], '--' + name, 0)
        refuse(script, ['--schedule zigzag', 'cosine'], '--schedule', 'zigzag')
        refuse(script, ['no-such-data', 'prepare_data.py'], *flags, '--data', 'no-such-data')
        refuse(script, ['--over'], 'compare', *flags, '--over', 'nothing=1')
        refuse(script, ['--final-seeds'], 'compare', *flags, '--final-seeds', '1')
        refuse(script, ['seeds', 'a,b'], 'compare', *flags, '--seeds', 'a,b')
        refuse(script, ['--device gpu'], *flags, '--device', 'gpu')
        if not torch.cuda.is_available():
            refuse(script, ['--device cuda'], *flags, '--device', 'cuda')
        with patch.object(script, 'WORLD', 2):
            refuse(script, ['--batch-size 3', '2 processes'], '--batch-size', 3)
        file = done(script, *flags)['folder'] / 'ckpt.pt'
        saved = {p: p.read_bytes() for p in file.parent.glob('*.pt')}
        with patch('pathlib.Path.write_bytes', full):
            refuse(script, ['No space left on device'], *flags, '--fresh')
        assert all(p.read_bytes() == before for p, before in saved.items())
        torch.save(dict(model=Trap()), tmp_path / 'trap.pt')
        for damage in (b'', file.read_bytes()[:-100], (tmp_path / 'trap.pt').read_bytes()):
            file.write_bytes(damage)
            refuse(script, ['ckpt.pt'], *flags)
            assert file.read_bytes() == damage and not os.path.exists('trapped')
        with patch.object(script, 'loss_of', side_effect=torch.OutOfMemoryError('memory')):
            refuse(script, ['out of memory', '--batch-size'], *flags, '--fresh')

def edited(script, before, after):
    """A patch: the script with this edit, as far as the names of its runs are concerned."""
    text = source(script)
    changed = text.replace(before, after, 1)
    if changed == text:  # that line has been changed already
        changed += '# an edit'
    return patch.object(script, 'SOURCE', changed)

def test_any_edit_trains_anew(tmp_path):
    """No figures of other code or data, wherever the change is; --reuse takes them, and says so."""
    for script, before, after in (
            (gpt, 'v - gamma * mh', 'v - 2 * gamma * mh'), (gpt, 'F.gelu', 'F.silu'),
            (gpt, 'F.cross_entropy', '2 * F.cross_entropy'), (gpt, 'optim.AdamW', 'optim.Adam'),
            (gpt, '# ----', '# a comment\n# ----'), (vit, '0.866 * abs(x)', '0.8 * abs(x)'),
            (vit, '0.08 + 0.92', '0.1 + 0.9'), (vit, 'ops.invert(image)', 'image'),
            (detr, 'x >= tip * (1 - y)', 'x >= tip'), (detr, '(1 - giou)', '(2 - giou)'),
            (detr, 'F.relu(self.bn3', 'F.gelu(self.bn3'), (mask, 'p.exp() * (p - q)', 'p - q'),
            (mask, "('<=', 1e-3)", "('<=', 1e-2)"),
            (mask, 'learning_rate=c.teacher_lr', 'learning_rate=1e-3')):
        c = script.Config()
        old = script.run_folder(c)
        with edited(script, before, after):
            assert script.run_folder(c) != old, before
        assert script.run_folder(c) == old
    flags = tiny(gpt, tmp_path, *CPU)
    old = done(gpt, *flags)
    with edited(gpt, 'v - gamma * mh', 'v - 2 * gamma * mh'):
        new = run(gpt, *flags)
        assert 'is finished' not in new.out and new.result['folder'] != old['folder']
        shutil.rmtree(new.result['folder'])
        reused = run(gpt, *flags, '--reuse')
        assert 'code or data have changed' in reused.out and 'is finished' in reused.out
        assert reused.result['folder'] == old['folder']
        fresh = done(gpt, *flags, '--reuse', '--fresh')  # not new code into the old folder
        assert fresh['folder'] == new.result['folder'] != old['folder']
    (tmp_path / 'text.txt').write_text(TEXT + TEXT)
    assert 'is finished' not in run(gpt, *flags).out
    assert 'exists in float32' in run(gpt, *flags, '--dtype', 'float16').out
    facts = json.loads((old['folder'] / 'config.json').read_text())
    assert (facts['attention'], facts['dtype'], facts['n_layer']) == ('attentionx', 'float32', 2)
    blob = subprocess.run(['git', 'hash-object', gpt.__file__], capture_output=True, text=True)
    assert blob.returncode or facts['script'] == blob.stdout.strip(), facts['script']

def test_notebook_cells_count(tmp_path):
    """A row put into ATTENTION, or a class or method replaced, counts with the text of its cell;
    so does a module of one's own beside the script."""
    def cell(number, text):
        name = f'cell-{number}'
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        exec(compile(text, name, 'exec'), names)
    names = dict(gpt=gpt, torch=torch, __name__='__main__')
    c = gpt.Config(attention='softmax')
    folders = [gpt.run_folder(c)]
    with patch.dict(gpt.ATTENTION), patch.object(gpt, 'MLP', gpt.MLP), \
            patch.object(gpt.Block, 'forward', gpt.Block.forward):
        for number, text in enumerate((
                "gpt.ATTENTION['mine'] = lambda mh, v, gamma: mh - v",
                "gpt.ATTENTION['mine'] = lambda mh, v, gamma: mh + v",
                'class MLP(gpt.nn.Module):\n    def forward(self, x):\n        return x\ngpt.MLP = MLP',
                'def forward(self, x, cache=None):\n    return x\ngpt.Block.forward = forward')):
            cell(number, text)
            folders.append(gpt.run_folder(c))
    assert len(set(folders)) == 5 and gpt.run_folder(c) == folders[0], folders
    own = types.ModuleType('own')
    own.__file__ = str(tmp_path / 'own.py')
    with patch.object(gpt, 'FOLDER', tmp_path.resolve()), \
            patch.object(gpt, 'own', own, create=True):
        for text in ('a = 1', 'a = 2'):
            (tmp_path / 'own.py').write_text(text)
            linecache.checkcache()
            folders.append(gpt.run_folder(c))
    assert folders[-2] != folders[-1], folders
    entry = linecache.cache[gpt.FILE]  # the file is edited, what has been loaded is not
    with patch.dict(linecache.cache, {gpt.FILE: (*entry[:2], ['# edited'], entry[3])}):
        assert gpt.run_folder(c) == folders[0]

def test_student():
    """Student's intervals and p: the textbook's 5 % points, and 5 % over four tests."""
    for n, t, t4 in ((2, 12.706, 50.923), (3, 4.303, 8.860), (8, 2.365, 3.335)):
        gaps = np.linspace(-1, 1, n)
        error = gaps.std(ddof=1) / n ** 0.5
        half, p = gpt.student(gaps + t * error)
        close([half / error / t, p], [1, 0.05], 1e-3)
        close(gpt.student(gaps + 1, 4)[0] / error / t4, 1, 1e-3)
    assert math.isnan(gpt.student([1.0])[1])

def fake(figure):
    """A patch of train: a run ends at once, with figure(c)."""
    def train(c, path=None):
        log = [dict(step=0, seconds=0.0, val_loss=9.0, loss=9.0)]
        gpt.write_csv(path / 'log.csv', log)
        facts = gpt.describe(c, torch.nn.Linear(2, 2))
        gpt.write_file(path / 'config.json', json.dumps(facts).encode())
        value = figure(c)
        log.append(dict(step=c.max_iters, seconds=1.0, val_loss=value, loss=value))
        yield c.max_iters, torch.nn.Linear(2, 2), log
    return patch.object(gpt, 'train', train)

def test_compare_at_best(tmp_path):
    """Each at its best rate: one run diverges, one best lies at the end, both are said; the csv
    gives the same table."""
    best = {'softmax': 4e-3, 'belief': 1e-3}
    def figure(c):
        if c.learning_rate == 8e-3 and c.attention == 'belief':
            raise FloatingPointError('loss nan')
        gap = abs(math.log2(c.learning_rate / best[c.attention]))
        return 2 + 0.1 * gap - 0.02 * (c.attention == 'belief') + 0.001 * (c.seed % 3)
    with fake(figure):
        flags = ['compare', '--over', 'learning-rate=1e-3,2e-3,4e-3,8e-3', '--over',
                 'attention=belief,softmax', '--seeds', '0,1', '--out-dir', tmp_path]
        end = run(gpt, *flags, '--best', 'learning_rate', '--final-seeds', '5,6,7')
        rows, out = end.result, end.out
        assert [row['case'] for row in rows] == ['4e-3 softmax', '1e-3 belief'], rows
        close(rows[0]['mean'], 2.001, 1e-6)
        close(rows[1]['diff'], -0.02, 1e-6)
        assert 'val_loss of 3 seeds' in out and '8e-3 belief, seed 1: run 16' in out, out
        assert out.count('counts as worst: loss nan') == 2
        assert out.count('8e-3: ') == 0 and out.count('0.008: ') == 2, out
        assert '1e-3 belief *' in out and '4e-3 softmax  ' in out, out
        runs, = tmp_path.glob('*/compare-*/runs.csv')
        again = run(gpt, 'compare', '--from-csv', runs, '--best', 'learning_rate', *flags[-2:])
        tables = out[out.index('\nval_loss by learning_rate'):].splitlines()
        found = printed_by(again)
        assert len(found) > 9 and set(found) <= set(tables), set(found) - set(tables)
        losses = done(gpt, 'compare', '--from-csv', runs, '--figure', 'mean_loss', *flags[-2:])
        close(losses[0]['diff'], 0, 0)
        refuse(gpt, ['--figure', 'val_loss'], 'compare', '--from-csv', runs, '--figure', 'x')
        refuse(gpt, ['two runs'], 'compare', '--from-csv', f'{runs},{runs}', *flags[-2:])
        whole = ['--best', 'warmup_iters', '--attention', 'softmax', *flags[-2:]]  # a csv has 2.0
        end = run(gpt, 'compare', '--over', 'warmup-iters=1,2', '--seeds', '0', *whole)
        later, = {*tmp_path.glob('*/compare-*/runs.csv')} - {runs}
        for out in (end.out, run(gpt, 'compare', '--from-csv', later, *whole).out):
            assert '   2: 2.1000 x 1\n' in out, out
        with patch.object(gpt, 'BETTER', max):
            rows = done(gpt, *flags, '--best', 'learning_rate')
        assert [row['case'] for row in rows] == ['1e-3 softmax', '4e-3 belief'], rows

def test_intervals(tmp_path):
    """Paired by seed, and wider by the number of rows tested; one seed has none."""
    shifts = {'softmax': (0, 0, 0), 'attentionx': (1, 2, 3), 'belief': (1, 1.1, 1.2)}
    with fake(lambda c: 2.0 + shifts[c.attention][c.seed] + 10 * c.seed):
        over = 'attention=' + ','.join(shifts)
        flags = 'compare', '--over', over, '--out-dir', tmp_path
        rows = done(gpt, *flags)
        one = run(gpt, *flags, '--seeds', '0')
    for row, mean, sd in zip(rows[1:], (2, 1.1), (1, 0.1)):
        close([row['diff'], row['interval']], [mean, 6.205 * sd / 3 ** 0.5], 2e-3)  # t at 1 - .05 / 2
    refuse(gpt, ['same settings'], *flags, '--over', 'threads=1,2')
    refuse(gpt, ['type bool'], *flags, '--over', 'zero_diag=0,1')
    assert 'nan' not in one.out and '+1.0000       -       -' in one.out, one.out

def test_compare_untrained(tmp_path):
    """Runs of no steps at all are compared too: masks are judged untrained."""
    rows = done(mask, 'compare', *tiny(mask, tmp_path, '--over', 'max_iters=0,2', '--seeds', '0'))
    assert len(rows) == 2 and rows[0]['mean'] != rows[1]['mean'], rows

def test_compare_and_bench(tmp_path):
    """Each script's, once; a second time everything is found."""
    for script in SCRIPTS:
        flags = [*tiny(script, tmp_path), '--over', 'learning_rate=1e-3,1e-2']
        rows = done(script, 'compare', *flags, '--seeds', '0,1')
        again = run(script, 'compare', *flags, '--seeds', '0,1')
        assert again.out.count('is finished') >= 4
        assert again.result[1]['diff'] == rows[1]['diff']
        assert list(tmp_path.glob(f'out/{script.SCRIPT}/compare-*/runs.csv'))
        if importlib.util.find_spec('matplotlib'):
            assert list(tmp_path.glob(f'out/{script.SCRIPT}/compare-*/compare.png'))
        bench = run(script, 'bench', *flags, '--rounds', 2)
        first, second = bench.result.values()
        assert len(first) == len(second) == 4 and min(first + second) > 0
        assert f'{np.median(np.divide(second, first)[2:]):.3f} (' in bench.out

def test_recipes_need_their_data(tmp_path):
    """A recipe without its data names the command that makes them; nothing else is trained."""
    for script, preset, name in ((gpt, 'owt-124m', 'openwebtext'), (vit, 'cifar-paper', 'cifar10'),
                                 (detr, 'paper', 'coco'), (mask, 'report004', 'wikitext')):
        with contextlib.chdir(tmp_path) if hasattr(contextlib, 'chdir') else contextlib.nullcontext():
            refuse(script, ['prepare_data.py', name], '--preset', preset, '--max-iters', 2, *CPU)

def test_baseline_comes_first():
    """A row of your own, put before softmax, is no baseline."""
    rows = {'mine': lambda mh, v, gamma: v, **gpt.ATTENTION}
    with patch.dict(gpt.TABLES, all={name: dict(attention=name) for name in rows}), \
            patch.dict(gpt.CHOICES, attention=rows):
        assert next(iter(gpt.cases_of(gpt.Config(table='all')))) == 'softmax'

def test_the_last_run_is_trains(tmp_path):
    """sample uses the last run of train, whatever inspect and compare have left."""
    refuse(gpt, ['no run', '--run'], 'sample', *tiny(gpt, tmp_path))
    trained = done(gpt, *tiny(gpt, tmp_path))['folder']
    run(gpt, 'inspect', *tiny(gpt, tmp_path, '--seed', 3))
    run(gpt, 'compare', *tiny(gpt, tmp_path, '--over', 'gamma=2', '--seeds', '4'))
    assert (trained.parent / 'last').read_text() == trained.name
    end = run(gpt, 'sample', *tiny(gpt, tmp_path, '--seed', 3))
    assert end.code == 0 and len(end.result) > 4, end.err

@unittest.skipUnless(DEVICE.startswith('cuda'), 'no CUDA GPU is here')
def test_cuda(tmp_path):
    """Each script in float16 and bfloat16, and a run begun on a CPU."""
    for script in SCRIPTS:
        begun = tiny(script, tmp_path, '--max-iters', 9)
        with interrupted(script, 5):
            run(script, *begun, *CPU)
        end = run(script, *begun)
        assert end.code == 0 and 'goes on' in end.out, (end.out, end.err)
        capability = torch.cuda.get_device_capability()
        for dtype in ('float16', 'bfloat16') if capability >= (8, 0) else ('float16',):
            end = run(script, *begun, '--dtype', dtype)
            assert end.code == 0 and math.isfinite(end.result['loss']), (end.out, end.err)
            assert end.result.get('skipped', 0) <= 1, end.result

def test_float16_skips_few_steps(tmp_path):
    """Of the first steps of a default run, at most one: variants should lose none to overflows."""
    for script in SCRIPTS:
        end = run(script, *tiny(script, tmp_path, *CPU, '--dtype', 'float16'))
        assert end.code == 0 and end.result['skipped'] <= 1, (script.SCRIPT, end.err, end.result)

# ------------------------------------ soak ------------------------------------
def outcome(function, limit=2**40, seconds=None):
    """Of a fork of this process, killed after so many seconds -> exit code, standard error."""
    out, into = os.pipe()
    def child():
        import resource  # not on Windows
        os.dup2(into, 2)
        sys.stdout, sys.stderr = open(os.devnull, 'w'), open(2, 'w', closefd=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # no file may grow past it
        function()
    process = multiprocessing.get_context('fork').Process(target=child)
    process.start()
    os.close(into)
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode, open(out).read()

def last(script, out):
    return out / script.SCRIPT / (out / script.SCRIPT / 'last').read_text() / 'ckpt.pt'

def soak_kills(script, path, argv, rng, n=20):
    kills, steps = 0, set()
    for seed in itertools.count():
        flags, part, code = [*argv, '--seed', str(seed)], path / f'part{seed}', None
        whole = done(script, *flags)
        while code != 0:
            wait = rng.uniform(0, 2 * whole['seconds']) if kills < n else None
            code, err = outcome(lambda: script.main([*flags, '--out-dir', str(part)]), seconds=wait)
            assert code in (0, -signal.SIGKILL) and err == '', (code, err)
            kills += code != 0
            steps |= {script.load_checkpoint(p)['progress'][0] for p in part.glob('*/*/ckpt.pt')}
        whole, part = whole['folder'] / 'ckpt.pt', last(script, part)
        assert same(*(script.load_checkpoint(p)['model'] for p in (whole, part)))
        if kills == n:
            return f'{n} kills, {len(steps)} steps to go on from, weights equal bit for bit'

def soak_saves(script, path, argv, rng, n=50):
    save = lambda i: script.save_checkpoint(path / 'ckpt.pt', dict(w=torch.full((10**6,), i), i=i))
    save(0)
    for _ in range(n):
        outcome(lambda: [*map(save, itertools.count())], seconds=rng.uniform(0.02, 0.1))
        saved = script.load_checkpoint(path / 'ckpt.pt')
        assert (saved['w'] == saved['i']).all()
    return f'{n} kills while checkpoints are written, no unreadable one'

def soak_full_disk(script, path, argv, rng, n=10):
    with interrupted(script, 50):
        run(script, *argv)
    file, = [p for p in path.glob('out/*/*/ckpt.pt') if 'teacher' not in p.parent.name]
    for i in range(n):
        code, err = outcome(lambda: script.main(argv), limit=file.stat().st_size * i // n)
        assert (code, err.count('\n'), script.load_checkpoint(file)['progress'][0]) == (2, 1, 50)
    return f'{n} full disks, one line each, the older checkpoint intact'

def soak():
    for script, figure in itertools.product(SCRIPTS, (soak_kills, soak_saves, soak_full_disk)):
        with folder() as path:
            argv = tiny(script, path, *CPU, '--max-iters', 200, '--eval-interval', 5)
            print(script.SCRIPT, figure(script, path, argv, np.random.default_rng(0)), flush=True)

# ------------------------------------ runner ------------------------------------
def main(words):
    if '--device' in words:  # read above
        at = words.index('--device')
        words = words[:at] + words[at + 2:]
    names = [name for name in globals() if name.startswith('test_')]
    found = dict(ok=[], FAIL=[], skip=[])
    for name in names:
        if words and not any(word in name for word in words):
            continue
        clock, how, test = time.perf_counter(), 'ok', globals()[name]
        try:
            if 'tmp_path' in inspect.signature(test).parameters:  # as in pytest
                with folder() as path:
                    test(path)
            else:
                test()
        except unittest.SkipTest as reason:
            how = 'skip'
            print(reason)
        except (Exception, SystemExit):
            how = 'FAIL'
            traceback.print_exc()
        found[how].append(name)
        print(f'{how:6}{name} ({time.perf_counter() - clock:.1f} s)', flush=True)
    for name in found['FAIL']:
        print(f'failed: {name}')
    passed, failed, skipped = [len(own) for own in found.values()]
    print(f'{passed} passed, {failed} failed, {skipped} skipped')
    return failed > 0

if __name__ == '__main__':
    sys.exit(soak() if '--soak' in sys.argv else main(sys.argv[1:]))
