# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests", "scipy", "matplotlib", "nbclient",
#                 "ipykernel"]
# ///
"""Every test, on a CPU and, where there is one, on a GPU.

    python test_all.py                 # all of them, a minute and a half
    python test_all.py belief resume   # those with one of these words in their name
    python test_all.py --device cuda   # on that device; default: a GPU where there is one
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
import lzma
import math
import os
import pathlib
import re
import runpy
import shlex
import shutil
import signal
import socket
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
sys.path[:0] = [str(HERE), str(HERE / 'experiments')]
import admm_detr as detr
import attentionx_gpt as gpt
import belief_vit as vit
import mask_distill as mask
import prepare_data
importlib.import_module('variants')  # adds its rows to gpt.ATTENTION
printed = importlib.import_module('printed')  # and this to detr.ATTENTION
Image = importlib.import_module('PIL.Image')  # matplotlib needs it
if importlib.util.find_spec('scipy'):
    compare = importlib.import_module('compare')

torch.set_num_threads(1)
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
if '--device' in sys.argv:
    DEVICE = sys.argv[sys.argv.index('--device') + 1]
CPU = '--device', 'cpu'  # for what only a CPU promises: the same to the last bit
QUIET = contextlib.redirect_stdout(io.StringIO())
SCRIPTS = [gpt, vit, detr, mask]
TEXT = 'the quick brown fox jumps over the lazy dog; ' * 60
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
    flags = ['--max-iters', 6, '--eval-interval', 3, '--log-interval', 1, '--warmup-iters', 2,
             '--batch-size', 4, '--device', DEVICE, '--dtype', 'float32', '--threads', 1,
             '--out-dir', path / 'out']
    for name, value in SMALL[script].items():
        flags += ['--' + name, value]
    if script is vit:
        flags += ['--data', vit_data(path / 'data')]
    if script in (gpt, mask):
        (path / 'text.txt').write_text(TEXT)
        flags += ['--data', path / 'text.txt']
    return [str(word) for word in (*flags, *more)]

@contextlib.contextmanager
def quick_report():
    """Pictures are empty files, and a ViT is compared with no linear model: both would take longer
    than a short run."""
    with contextlib.ExitStack() as patches:
        for script in SCRIPTS:
            patches.enter_context(patch.object(script, 'picture', no_picture))
        patches.enter_context(patch.object(vit, 'linear_accuracy', lambda data, c: 0.5))
        yield

def no_picture(path, paint, **size):
    path.touch()

def run(script, *argv, report=quick_report):
    """script.main(argv) in this process -> its exit code, stdout, stderr and result."""
    out, err = io.StringIO(), io.StringIO()
    code, result = 0, None
    with report(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
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

def checked(path, word=''):
    """The first fault that `prepare_data.py check` finds in a folder has this word; else, none."""
    end = run(prepare_data, 'check', path)
    faults = [line for line in end.out.splitlines() if not line.startswith('note: ')]
    assert end.code == 2 * bool(word) and word in faults[0], (path, word, end.out, end.err)

def wants(*packages):
    """A decorator: skip the test where one of these is missing."""
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    return unittest.skipIf(missing, f'not installed: {" ".join(missing)}')

def loopback():
    """A decorator: skip the test where processes of this machine cannot meet."""
    try:
        with socket.create_server(('127.0.0.1', 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    except OSError:
        return unittest.skip('this machine has no loopback device')
    return lambda test: test

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

def load(path):
    return torch.load(path, weights_only=True)

def interrupted(script, step):
    """A patch: Ctrl-C while the process prepares this step."""
    whole = script.get_batch
    def get_batch(data, c, now, micro, device):
        if now == step and micro == 0:
            raise KeyboardInterrupt
        return whole(data, c, now, micro, device)
    return patch.object(script, 'get_batch', get_batch)

# ------------------------------------ attentionx_gpt.py ------------------------------------
EXTRA_ROWS = 'differential', 'gated', 'laplacian'  # of experiments/variants.py

def gpt_model(dtype=torch.float64, device=DEVICE, **settings):
    """A small GPT in double precision; its attention is far from uniform."""
    net = gpt.GPT(gpt.Config(**{**SMALL_GPT, 'vocab_size': 40, **settings})).to(dtype).eval()
    for name, p in net.named_parameters():
        if name.endswith('weight') and p.dim() > 1:
            p.data.mul_(6)
    return net.to(device)

def gpt_ids(B, T, V=40):
    return (torch.arange(B * T, device=DEVICE) * 7919 % V).view(B, T)

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
        if isinstance(script.ATTENTION[name], type):
            continue  # belief-star: see diagnose's tests
        gamma = 0.3 if name == 'attentionx-v1' else 1.7
        if name == 'attentionx-learned':  # one for each head
            gamma = torch.tensor([[1.7], [2.9], [1.2]], dtype=torch.float64, device=DEVICE)
        def method(q, k, v):
            mh = script.multi_head(q, k, v, zero_diag)
            return script.ATTENTION[name](mh, v.transpose(1, 2), gamma)
        inputs = [x.requires_grad_() for x in qkv(1, 3, 2, 2)]
        assert torch.autograd.gradcheck(method, inputs), (script.SCRIPT, name)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float16, 4e-3)):
            q, k, v = qkv(2, 3, 5, 64, dtype=dtype)
            v *= 30
            v[:, :, 3] = 0
            v[:, :, 4] *= 1e-3
            got = method(q, k, v.requires_grad_())
            got.sum().backward()
            assert got.dtype == dtype or torch.is_tensor(gamma), (script.SCRIPT, name, got.dtype)
            assert v.grad.isfinite().all(), (script.SCRIPT, name, dtype)
            want, = gpt_slow(name, q.double(), k.double(), v.double(), gamma, zero_diag, script)
            size = want.abs().max()
            close(got.double() / size, want / size, tolerance)

def test_gpt_identities():
    """What the papers prove."""
    q, k, v = qkv(2, 3, 6, 4)
    def passed_on(name, gamma=1.0, zero_diag=False):
        mh = gpt.multi_head(q, k, v, zero_diag)
        return gpt.ATTENTION[name](mh, v.transpose(1, 2), gamma)
    # AttentionX's two versions are one, up to a factor  [AX1 Eq. 9, AX2 Eq. 10]
    close(passed_on('attentionx-v1', 0.3), 0.3 * passed_on('attentionx', 1 / 0.3), 1e-14)
    # a zero diagonal makes Phi longer, by 1 / (1 - p_kk)  [AX2 Eq. 13]
    phi, phi_zd = [passed_on('attentionx', zero_diag=zd) for zd in (False, True)]
    p_own = gpt_weights(q, k).diagonal(dim1=2, dim2=3).mT[..., None]  # (B, T, nh, 1)
    close(phi[:, 1:], ((1 - p_own) * phi_zd)[:, 1:], 1e-13)
    # Delta is no longer than MH  [BF Eq. 11]
    mh, delta = [passed_on(name).flatten(2) for name in ('softmax', 'belief')]
    assert (delta.norm(dim=-1) <= mh.norm(dim=-1)).all(), (delta, mh)

def test_pdmm():
    """The algorithm behind the papers, where f_i(x) = (x - a_i)^2 / 2 and every edge wants equal x:
    nodes of a ring with chords agree on the mean; a multiplier sums residuals.  [BF Eq. 2-5]"""
    n, rho, A = 7, 0.6, np.zeros((7, 7))  # A_ij x_i + A_ji x_j = 0
    for i, j in [(0, 3), (2, 5), *((i, (i + 1) % n) for i in range(n))]:
        A[i, j], A[j, i] = 1, -1
    a, x, lam = np.random.default_rng(0).standard_normal(n), [np.zeros(n)], [np.zeros((n, n))]
    def residual(p, q):  # of edge (i, j), from x_i^p and x_j^q
        return -A * x[p][:, None] - A.T * x[q]
    for k in range(200):
        total = a + (A * lam[k].T).sum(1) - rho * (A * A.T * x[k]).sum(1)
        x.append(total / (1 + rho * (A != 0).sum(1)))  # Eq. 2
        lam.append(lam[k].T + rho * residual(k + 1, k))  # Eq. 3: lam[i, j] is lambda_i|j
    close(x[-1], a.mean(), 1e-6)
    for k in range(1, 20):  # Eq. 4
        close(lam[k + 1], lam[k - 1] + rho * (residual(k - 1, k) + residual(k + 1, k)), 1e-6)
    ones, twos = [[residual(2 * m + d, 2 * m - 1) for m in range(1, 5)] for d in (-2, 0)]
    swapped = [residual(2 * m - 1, 2 * m) for m in range(1, 5)]  # as Eq. 5 is printed
    close(lam[8], rho * sum(ones + twos), 1e-6)
    assert np.abs(lam[8] - rho * sum(ones + swapped)).max() > 0.01

def test_gamma():
    """The papers' choice. A learned one starts there in each head, learns, and does not decay."""
    for script, make, x, gamma_v1 in ((gpt, gpt_model, gpt_ids(2, 9), 0.5),
                                      (vit, vit_model, vit_images(2), 1)):
        for name, zero_diag, gamma in (('attentionx', False, 3), ('attentionx', True, 1),
                                       ('attentionx-v1', False, gamma_v1)):
            c = script.Config(attention=name, zero_diag=zero_diag)
            assert script.default_gamma(c) == gamma, (script.SCRIPT, name, script.default_gamma(c))
        net = make(attention='attentionx-learned', gamma=2)
        net(x)[0].square().sum().backward()
        _, kept = script.make_optimizer(net, net.config).param_groups
        gammas = [p for name, p in net.named_parameters() if name.endswith('gamma')]
        assert kept['weight_decay'] == 0 and len(gammas) == 2 and {*gammas} <= {*kept['params']}
        for p in gammas:
            assert p.shape == (2, 1) and (p == 2).all() and (p.grad != 0).all(), (p, p.grad)

def test_gpt_causality():
    """A change at token 7 shows only after it; the likeliest text is of the last window."""
    idx = gpt_ids(2, 12)
    changed = idx.clone()
    changed[:, 7] += 1
    rows = *SLOW, *EXTRA_ROWS
    for name, arch, zero_diag in itertools.product(rows, ('gpt2', 'rotary'), (False, True)):
        net = gpt_model(attention=name, arch=arch, zero_diag=zero_diag, dropout=0.5)
        a, b = net(idx, idx)[0], net(changed, idx)[0]
        close(a[:, :7], b[:, :7], 0)
        assert (a[:, 8:] - b[:, 8:]).abs().amax(-1).min() > 1e-6, (name, arch, zero_diag)
    text = net.generate(idx[:, :1], 18, temperature=0)
    for t in (1, 2, 16, 17, 18):  # beyond 16, the block size, the window slides
        close(net(text[:, max(0, t - 16):t])[0].argmax(-1), text[:, [t]], 0)
    net, idx = gpt_model(dropout=1.0).train(), gpt_ids(2, 9)  # only the residual stream is left
    assert not net.embed(idx).any()
    x = qkv(2, 9, 16)[0]
    close(net.transformer.h[0](x), x, 0)

def test_gpt_golden():
    """Losses and norms of gradients of nanoGPT and of modded-nanogpt's `casted`. A loss is a mean
    over the targets >= 0."""
    nano = dict(bias=True), 4.4611826, 7.790621
    casted = dict(arch='rotary'), 4.6812654, 6.873915
    for settings, want_loss, want_norm in (nano, casted):
        net = fill(gpt_model(attention='softmax', n_head=3, n_embd=24, block_size=24,
                             vocab_size=61, device='cpu', **settings))
        if settings == casted[0]:  # it rounds these weights, over their mean magnitude
            for p in net.transformer.h.parameters():
                p.data = (p / p.abs().mean()).to(torch.float8_e5m2).to(p) * p.abs().mean()
        net, idx = net.to(DEVICE), gpt_ids(2, 24, 61)
        logits, loss = net(idx, idx.roll(-1, 1))
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        close(loss, want_loss, 1e-5)
        close(norm, want_norm, 1e-5)
        targets = idx.roll(-1, 1).where(idx % 3 > 0, -1)
        want_loss = F.cross_entropy(logits[targets >= 0], targets[targets >= 0])
        close(net(idx, targets)[1], want_loss, 1e-12)

def test_gpt_recipes():
    """The papers' presets: tokens in a step and, for BeliefFormer, in all; counts of parameters."""
    owt, bf = [gpt.Config(**gpt.PRESETS[name]) for name in ('owt-124m', 'belief-124m')]
    tokens = [c.batch_size * c.grad_accum_steps * c.block_size for c in (owt, bf)]
    assert tokens == [491_520, 524_288], tokens
    close(bf.max_iters * tokens[1] / 1e9, 5, 1e-3)
    star = dataclasses.replace(bf, attention='belief-star')
    with torch.device('meta'):
        sizes = [gpt.count(gpt.GPT(c)) for c in (owt, bf, star)]
    assert sizes == [124_373_760, 123_532_032, 130_609_920], sizes

def test_gpt_initialisation():
    """Variants share their weights to the bit, which follow from the seed."""
    def make(**settings):
        return gpt.GPT(gpt.Config(n_layer=2, n_embd=64, vocab_size=40, **settings))
    base = make(attention='softmax').state_dict()
    for name in (*SLOW, *EXTRA_ROWS):
        state = make(attention=name).state_dict()
        assert same({key: state[key] for key in base}, base), name
    rotary = make(arch='rotary').state_dict()
    for want, got in ((0.02, base['transformer.h.0.attn.c_attn.weight'].std()),
                      (0.01, base['transformer.h.0.mlp.c_proj.weight'].std()),
                      (256 ** -0.5, rotary['transformer.h.0.mlp.c_proj.weight'].max())):
        close(got, want, 1e-3)
    # what a subclass adds stays as it was made, and does not decay
    net, other = [make(attention='differential', seed=seed) for seed in (1, 2)]
    vectors = torch.stack([b.attn.vectors for b in (*net.transformer.h, *other.transformer.h)])
    assert len(vectors[:, 0, 0].unique()) == 4, vectors[:, 0, 0]
    assert not torch.equal(net.lm_head.weight, other.lm_head.weight)
    close(vectors.std(), 0.1, 0.02)
    _, kept = gpt.make_optimizer(net, net.config).param_groups
    assert net.transformer.h[0].attn.vectors in {*kept['params']}

def test_sampling(tmp_path):
    """Frequencies of 9,999 drawn tokens are their probabilities, or those of the likeliest three;
    a prompt may be a file, and there may be several samples."""
    for script, net, texts in (gpt, gpt_model(), 2), (mask, mask_golden_model()[0], 4):
        idx = torch.zeros(9999, 1, dtype=torch.long, device=DEVICE)
        torch.manual_seed(0)
        logits = net(idx[:1])[0].detach().flatten()
        def drawn(**how):
            return net.generate(idx, 1, **how)[:, 1].bincount(minlength=len(logits)) / 9999
        close(drawn(temperature=2.0), F.softmax(logits / 2, 0), 0.01)
        best, found = logits.topk(3), drawn(top_k=3)
        close(found[best.indices], F.softmax(best.values, 0), 0.02)
        assert found.count_nonzero() == 3, (script.SCRIPT, found)
        close(net.generate(idx[:9], 1, temperature=1e-40)[:, 1], logits.argmax(), 0)
        folder = done(script, *short_run(script, tmp_path))['folder']
        text = done(script, 'sample', '--folder', folder, '--num-samples', 2, '--prompt',
                    f'FILE:{tmp_path / "text.txt"}', *CPU)
        continued = [rest[:4] for rest in text.split(TEXT)[1:]]
        assert len(continued) == texts and len({*continued}) > 1, (script.SCRIPT, text)

def test_gpt_mask_texts(tmp_path):
    """The last tenth of a file is to validate on, and every tenth file of Python's own. A file may
    have Windows' line ends and byte order mark. Bytes need no tokenizer's file; GPT-2's tokens take
    <|endoftext|> as one."""
    text = 'naïve\n λ\t"\\x00"' * 2
    (tmp_path / 'unix.txt').write_bytes((10 * text).encode())
    windows = (10 * text).replace('\n', '\r\n').encode('utf-8-sig')
    (tmp_path / 'windows.txt').write_bytes(windows)
    (tmp_path / 'photo.jpg').write_bytes(bytes(range(256)))
    library = pathlib.Path(os.__file__).parent
    own = [file.read_text('utf-8') for file in sorted(library.glob('*.py'))]
    val = ''.join(own[9::10])
    del own[9::10]
    for script in (gpt, mask):
        assert script.read_text(script.Config()) == (''.join(own), val), script.SCRIPT
        for name in ('unix.txt', 'windows.txt'):
            data = script.load_data(script.Config(data=str(tmp_path / name), block_size=32))
            assert bytes(data.train.tolist()) == (9 * text).encode(), (script.SCRIPT, name)
            assert bytes(data.val.tolist()) == text.encode(), (script.SCRIPT, name)
        refuse(script, ['UTF-8'], *tiny(script, tmp_path, '--data', tmp_path / 'photo.jpg'))
        encode, decode = script.get_tokenizer('bytes')
        assert list(encode('é')) == [195, 169] and decode([195, 169, 255]) == 'é\ufffd'
        with patch('tiktoken.get_encoding') as gpt2:
            script.get_tokenizer('gpt2')[0]('text')
            prepare_data.get_encoder('gpt2')('texts')
        for call in gpt2().encode.call_args, gpt2().encode_batch.call_args:
            assert call.kwargs == dict(allowed_special={'<|endoftext|>'}), (script.SCRIPT, call)

def test_gpt_mask_tokens(tmp_path):
    """Folders of token files: right ones are read; others are refused by the scripts, and found by
    prepare_data.py check."""
    ids = np.arange(3000, dtype=np.uint16) % 256
    nanogpt = {'train.bin': ids, 'val.bin': ids[:300]}  # GPT-2's tokens
    ours = {**nanogpt, 'meta.json': b'{"tokenizer": "bytes"}'}
    header = np.array([20240520, 1, 4000], '<i4').tobytes()
    wrong = {  # by a word of what the scripts and `check` say of it
        '32 or 64': ('64 bits', {**ours, 'train.bin': ids.astype(np.int64)}),
        '(uint16)': ('3 bytes', {**ours, 'val.bin': b'abc'}),
        'empty': (' 0 bytes', {**ours, 'train.bin': b''}),
        'val.bin': ('val.bin: 0 bytes', {'train.bin': ids}),
        'block-size': ('', {**ours, 'val.bin': ids[:16]}),
        '50355': ('id 50355, first at 255', {**nanogpt, 'val.bin': ids[:300] + 50100}),
        'header': ('header', {**ours, 'train.bin': header + ids.tobytes()}),
        'not a JSON': ('JSON', {**ours, 'meta.json': b''}),
        'JSON object': ('JSON', {**ours, 'meta.json': b'[1]'}),
        'llama': ('llama', {**ours, 'meta.json': b'{"tokenizer": "llama"}'}),
        'with a tokenizer': ('None', {**ours, 'meta.json': b'{}'}),
        'pickle': ('character level', {**nanogpt, 'meta.pkl': b''})}
    for name, (word, files) in {**wrong, 'ours': ('', ours), 'nanogpt': ('', nanogpt)}.items():
        (tmp_path / 'data' / name).mkdir(parents=True)
        for file, content in files.items():
            (tmp_path / 'data' / name / file).write_bytes(content)
        checked(tmp_path / 'data' / name, word)
    for script in (gpt, mask):
        with patch.object(script, 'Path', tmp_path.joinpath):  # as if started there
            for name, vocab_size in (('ours', 256), ('data/ours', 256), ('nanogpt', 50257),
                                     (str(tmp_path / 'data/ours'), 256)):
                data = script.load_data(script.Config(data=name, block_size=16))
                assert (data.train == ids).all() and (data.val == ids[:300]).all(), name
                assert data.vocab_size == vocab_size, (name, data.vocab_size)
            assert len(script.load_data(script.Config(data='ours', block_size=299)).val) == 300
            for word in wrong:
                refuse(script, [word], *tiny(script, tmp_path, '--data', word))

def test_gpt_mask_batches():
    """Every variant sees the same windows; step, micro-batch and seed give others."""
    data = types.SimpleNamespace(train=np.arange(20, dtype=np.uint16), teacher=None)
    for script, variant in (gpt, dict(attention='belief')), (mask, dict(masks='last5')):
        def batch(step=5, micro=0, **settings):
            c = script.Config(block_size=16, batch_size=6, grad_accum_steps=2, **settings)
            return script.get_batch(data, c, step, micro, 'cpu')
        def starts(**settings):
            return {x.item() for step in range(9) for x in batch(step, **settings)[0][:, 0]}
        x, y = batch()[:2]
        assert torch.equal(y, x + 1) and torch.equal(x, batch(**variant)[0])
        assert x.shape == (6, 16), (script.SCRIPT, x.shape)
        for other in (batch(6), batch(micro=1), batch(seed=1)):
            assert not torch.equal(x, other[0])
        assert starts() == {0, 1, 2, 3}, starts()  # wherever a window fits
    drawn = {*mask.stream('samples', 1337).integers(4, size=6).tolist()}
    assert starts(samples=6) == drawn != {0, 1, 2, 3}, drawn  # always the same windows

def test_gpt_evaluation():
    """Validation windows are spread evenly, whatever the batch size. The bigram model by hand."""
    net = gpt_model()
    data = types.SimpleNamespace(val=gpt_ids(1, 120)[0].cpu().numpy())
    c = gpt.Config(block_size=16, batch_size=3, eval_rows=5)
    x, y = gpt.windows(data.val, [0, 25, 51, 77, 103], c, DEVICE)
    close(gpt.evaluate(net, data, c, DEVICE)['val_loss'], net(x, y)[1], 1e-6)
    data = types.SimpleNamespace(train=np.array([0, 1, 0, 2, 0, 1]), val=np.array([0, 1, 2]),
                                 vocab_size=4)
    p = (2 + 3 / 10) / (3 + 1) * (0 + 2 / 10) / (2 + 1)  # of 1 after 0, and of 2 after 1
    close(gpt.bigram_loss(data), -math.log(p) / 2, 1e-6)

def test_gpt_init(tmp_path):
    """A checkpoint of nanoGPT, with the prefixes of wrappers; what does not fit is refused."""
    net, file = gpt_model(torch.float32, 'cpu', vocab_size=256, bias=True), tmp_path / 'nano.pt'
    flags = tiny(gpt, tmp_path, '--bias', '--max-iters', 0, '--init', file)
    state = net.state_dict()
    theirs = {**state, 'transformer.h.0.attn.bias': torch.ones(1, 1, 16, 16),  # its mask
              'transformer.h.0.attn.rotary.inv_freq': torch.ones(4)}
    for prefix, container in (('', 'model'), ('model.', 'state_dict'),
                              ('_orig_mod.module.', 'model_state_dict')):
        weights = {prefix + key: p for key, p in theirs.items()}
        torch.save({container: weights, 'model_args': dict(n_head=2)}, file)
        end = run(gpt, *flags)
        assert end.code == 0, end.err
        assert same(load(end.result['folder'] / 'ckpt.pt')['model'], state), prefix
    nats = end.result['val_loss']
    assert f'{nats:.3f} nats per token' in end.out and 'writes:\n\ndef ' in end.out, end.out
    refuse(gpt, ['does not fit', 'size mismatch'], *flags, '--n-embd', 32)
    refuse(gpt, ['n_head 2', '--n-head 2'], *flags, '--n-head', 4)
    for words, saved in ((['numpy', 'state_dict'], dict(model=state, best=np.float64(2))),
                         (['extra'], dict(state, extra=torch.ones(2)))):
        torch.save(saved, file)
        refuse(gpt, words, *flags)
    torch.save(dict(model=state, config=dict(n_head=3), model_args=dict(n_head=2)), file)
    done(gpt, *flags)  # nanoGPT's fine-tunes keep settings of train.py, unused, under config
    refuse(gpt, ['none.pt', 'No such file'], *flags, '--init', 'none.pt')
    file.write_bytes(file.read_bytes()[:999])
    refuse(gpt, ['nano.pt', 'cannot be read'], *flags)

def test_gpt_diagnose():
    """One layer by hand; belief-star has two matrices, in this order.  [BF Eq. 15] A subclass is
    looked into if it says what it passes on."""
    net, idx = gpt_model(attention='belief-star'), gpt_ids(2, 9)
    block, attn = net.transformer.h[1], net.transformer.h[1].attn
    x = net.transformer.h[0](net.transformer.wte(idx) + net.transformer.wpe.weight[:9])
    qkv = attn.c_attn(block.ln_1(x))
    q, k, v = qkv.unflatten(2, (3, net.config.n_head, -1)).permute(2, 0, 3, 1, 4)
    delta, delta_s = gpt_slow('belief-star', q, k, v, 1, False).flatten(3)
    close(attn(block.ln_1(x)), attn.c_proj(delta) + attn.c_proj_s(delta_s), 1e-12)
    got = gpt.diagnose(net, idx)
    mh, v = [t.transpose(1, 2).flatten(2) for t in (gpt_weights(q, k) @ v, v)]  # (B, T, C)
    update_out = attn.c_proj(delta)  # Delta's part alone
    for name, want in dict(
            alpha=(mh * v).sum(-1) / v.square().sum(-1), update=delta.norm(dim=-1),
            mh=mh.norm(dim=-1), update_out=update_out.norm(dim=-1),
            cos_update=F.cosine_similarity(update_out, x, -1)).items():
        close(got[f'1.{name}'], want.mean(), 1e-6)
    inputs = [x.detach()[:1, :3].clone().requires_grad_(), *attn.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: attn(x), inputs, fast_mode=True)
    assert gpt.diagnose(gpt_model(attention='gated'), idx) == {}

def variants_slow(name, layer, attn, x, zero_diag):
    """A row of experiments/variants.py by its paper's formula: x (B, T, C) -> (B, T, C)."""
    qkv = x @ attn.c_attn.weight.T
    q, k, v = qkv.unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
    p = gpt_weights(q, k, zero_diag)  # (B, nh, T, T)
    heads = p @ v
    if name == 'differential':
        first = 0.8 - 0.6 * math.exp(-0.3 * layer)
        a1, b1, a2, b2 = attn.vectors
        lam = torch.exp(a1 @ b1) - torch.exp(a2 @ b2) + first
        y = (p[:, :2] - lam * p[:, 2:]) @ torch.cat([v[:, :2], v[:, 2:]], 3)  # (B, 2, T, 2 hs)
        length = torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5)
        heads = (1 - first) * attn.norm.weight * y / length
    if name == 'laplacian':
        heads[:, :2] = v[:, :2] - heads[:, :2]
    heads = heads.transpose(1, 2).flatten(2)  # (B, T, C)
    if name == 'gated':
        heads = heads / (1 + torch.exp(-x @ attn.c_gate.weight.T))
    return heads @ attn.c_proj.weight.T

def test_gpt_variants():
    """Their formulas, and derivatives of these."""
    x, _, _ = qkv(2, 5, 8)
    for name, zero_diag in itertools.product(EXTRA_ROWS, (False, True)):
        net = gpt_model(attention=name, n_head=4, n_embd=8, zero_diag=zero_diag)
        for layer, attn in enumerate(block.attn for block in net.transformer.h):
            if name == 'differential':
                attn.norm.weight.data *= torch.linspace(0.5, 2, 4).to(DEVICE)
            close(attn(x), variants_slow(name, layer, attn, x, zero_diag), 1e-12)
            inputs = [x.clone().requires_grad_(), *attn.parameters()]
            assert torch.autograd.gradcheck(lambda x, *_: attn(x), inputs, fast_mode=True), name

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

def vit_photos(root, **counts):
    """Photos in root/COLOUR/*."""
    for colour, n in counts.items():
        (root / colour).mkdir(parents=True)
        for i in range(n):
            Image.new('RGB', (20, 16), colour).save(root / colour / f'{i}.jpg')

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
        assert eps == {1e-5 if c.model == 'vit-small' else 1e-6}, (c.model, eps)

def test_vit_sizes(tmp_path):
    """Sizes and lengths of training are the papers'. A Config has its model's sizes, however it is
    made, where none are given."""
    small = dataclasses.replace(vit.Config(), model='vit-small')
    for size, c, classes in (
            (9_622_512, small, 10),
            (11_195_376, vit.Config(model='vit-small', attention='belief-star'), 10),
            (22_050_664, vit.Config(model='deit-small'), 1000),
            (22_179_688, vit.Config(model='deit-small-local'), 1000)):
        with torch.device('meta'):
            found = vit.count(vit.ViT(dataclasses.replace(c, num_classes=classes)))
        assert found == size, (c, found)
    assert small.variant == 'vit-small-belief-zd', small.variant
    assert dataclasses.replace(small, model='deit-small').variant == 'deit-small-belief'
    scaled = vit_model(attention='softmax-scaled').blocks[0].attn
    assert scaled.config.zero_diag and scaled.gamma == 3, scaled.gamma  # with 1 it is softmax
    for preset, images in ('cifar-paper', 400 * 45_000 / 512), ('imagenet-paper',
                                                                300 * 1_268_355 / 64):
        assert vit.PRESETS[preset]['max_iters'] == math.ceil(images), preset
    refuse(vit, ['--num-classes'], '--num-classes', 5)  # the data's, not a setting

def test_vit_initialisation():
    """Variants share their weights to the bit; each model has its original's spread."""
    base = vit_model(attention='softmax').state_dict()
    for name in SLOW:
        state = vit_model(attention=name).state_dict()
        assert same({key: state[key] for key in base}, base), name
    assert not torch.equal(base['pos_embed'], vit_model(seed=1).pos_embed)
    for model, key, std, normal in (  # a uniform's largest is 3 ** 0.5 std
            ('tiny', 'pos_embed', 1, True),
            ('vit-small', 'patch_embed.proj.weight', 720 ** -0.5, False),
            ('deit-small', 'blocks.0.attn.qkv.weight', 0.02, True),
            ('deit-small-local', 'blocks.0.attn.qkv.weight', 384 ** -0.5, True),
            ('deit-small-local', 'blocks.0.mlp.conv.weight', 27 ** -0.5, False)):
        state = vit.ViT(vit.Config(model=model, depth=1, num_classes=9)).state_dict()
        close(state[key].std() / std, 1, 0.12)
        assert (state[key].abs().max() > 2 * std) == normal, (model, key)
        assert state['head.bias'].any() == (model != 'deit-small'), model

def test_vit_init_file(tmp_path):
    """--init takes DeiT's checkpoint: other classes, no W^s, and another grid, whose positions lie
    between those learned; the class token has its own."""
    ramp = torch.arange(4.0).repeat(4, 1).view(1, 16, 1)  # grows from column to column
    out = vit.resize_positions(torch.cat([torch.full((1, 1, 1), 9.0), ramp], 1), (8, 6))[0, :, 0]
    rows = out[1:].view(8, 6)
    assert out[0] == 9 and (rows[0].diff() > 0).all(), out
    close(rows, rows[:1].expand(8, 6), 1e-5)
    assert rows[0, 0] < 0, rows[0]  # bicubic overshoots, bilinear would not
    assert vit_model().embed(qkv(1, 3, 8, 16)[0])[1] == (2, 4)

    deit = vit_model('cpu', torch.float32, model='deit-small', num_classes=9, image_size=16)
    want, file = deit.state_dict(), tmp_path / 'deit.pth'
    flags = tiny(vit, tmp_path, '--model', 'deit-small', '--attention', 'belief-star',
                 '--init', file, '--max-iters', 0)
    torch.save(dict(model={'module.' + key: p for key, p in want.items()}, epoch=3), file)
    end = run(vit, *flags)
    assert 'pth: blocks.0.attn.proj_s.weight' in end.out, end
    want['pos_embed'] = vit.resize_positions(want['pos_embed'], (2, 2))
    for key, p in load(end.result['folder'] / 'ckpt.pt')['model'].items():
        new = key.startswith('head') or 'proj_s' in key
        assert new and len(p) in (3, 12) or torch.equal(p.cpu(), want[key]), key
    for words, saved in ((['norm.bias', 'more'],
                          {**want, 'norm.bias': torch.zeros(7), 'more': torch.ones(1)}),
                         (['num_heads 3', '--num-heads 3'],
                          dict(model=want, config=dict(num_heads=3)))):
        torch.save(saved, file)
        refuse(vit, words, *flags)

def test_vit_dropout(tmp_path):
    """In training alone. Stochastic depth leaves out whole images, most in the last block."""
    net, images = vit_model(dropout=1.0, drop_path=0.9), vit_images(2)
    close(net(images), vit_model()(images), 0)
    net.train()  # drops all: tokens, attention and feed-forward network
    close(net(images), net.head.bias.expand(2, -1), 1e-12)
    mlp, (x, _, _) = net.blocks[0].mlp, qkv(2, 5, 12)
    mlp.drop = torch.nn.Tanh()  # twice in a feed-forward network
    close(mlp(x, (2, 2)), mlp.fc2(F.gelu(mlp.fc1(x)).tanh()).tanh(), 1e-12)
    blocks = vit_model(drop_path=0.9).train().blocks
    assert [block.drop_path for block in blocks] == [0, 0.9]
    kept = blocks[1].stochastic_depth(torch.ones(4000, 2, 3, device=DEVICE))
    assert (kept == kept[:, :1, :1]).all()
    close(kept.mean(), 1, 0.3)
    blocks[1].drop_path = 1 - 1e-12  # both branches
    close(blocks[1](x, (2, 2)), x, 0)
    get_batch = vit.get_batch  # every step has the first one's images, and other noise
    with patch.object(vit, 'get_batch', lambda data, c, step, *rest: get_batch(data, c, 0, *rest)):
        log = done(vit, *tiny(vit, tmp_path, '--dropout', 0.5, '--learning-rate', 1e-30,
                              '--eval-interval', 1))['log']
    assert len({row['loss'] for row in log[1:]}) == 6, log

def test_vit_optimizers():
    """AdamW decays matrices alone; warmup and cosine. SET-Adam by its formulas, at gradients from
    1e-12 to 1e12; gradients of zero move nothing."""
    net = vit_model()
    assert type(vit.make_optimizer(net, vit.Config(optimizer='set-adam'))) is vit.SETAdam
    decay, keep = vit.make_optimizer(net, vit.Config(weight_decay=0.2)).param_groups
    assert (decay['weight_decay'], keep['weight_decay']) == (0.2, 0), (decay, keep)
    decays = {*decay['params']}
    for name, p in net.named_parameters():
        assert (p in decays) == (name.endswith('.weight') and p.dim() > 1), name
    c = vit.Config(learning_rate=1, min_lr_ratio=0.2, warmup_iters=9, max_iters=109)
    close([vit.learning_rate(step, c) for step in (0, 9, 59, 109)], [0.1, 1, 0.6, 0.2], 1e-6)
    rng = np.random.default_rng(0)
    for scale in (1e-12, 1.0, 1e12, 0.0):
        x, m, v = rng.standard_normal((4, 6)), 0, 0
        p = torch.nn.Parameter(torch.tensor(x).float())
        adam = vit.SETAdam([p], 0.01)
        for t in range(1, 6):
            g = scale * rng.standard_normal((4, 6)).round()
            p.grad = torch.tensor(g).float()
            adam.step()
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g ** 2
            c = v.sum() ** 2 / (v.size * (v ** 2).sum()) if scale else 0
            w = np.sqrt(c * v / (1 - 0.999 ** t) + 1e-18)
            x -= 0.01 / (1 - 0.9 ** t) * m / (w - 0.5 * w.min())
        close(p, x, 2e-6)
    net = vit_model(model='deit-small-local')  # its convolutions' kernels decay, too
    decay, _ = vit.make_optimizer(net, vit.Config(weight_decay=0.2)).param_groups
    for name, p in net.named_parameters():
        decays = any(p is other for other in decay['params'])
        assert decays == (name.endswith('.weight') and p.dim() > 1), name

def test_vit_batches(tmp_path):
    """Batch i follows from seed and i, and an epoch has all images once. Without a test set, part
    of the training images are to test, and in training no more."""
    c = vit.Config(**SMALL_VIT, data=vit_data(tmp_path / 'data'), batch_size=4,
                   grad_accum_steps=2, val_fraction=0.2)
    data = vit.load_data(c)
    def get(step, micro=0, **new):
        return vit.get_batch(data, dataclasses.replace(c, **new), step, micro, 'cpu')[0]
    for other in (get(4), get(3, 1), get(3, seed=5)):
        assert not torch.equal(get(3), other)
    with patch.object(vit, 'augment', lambda x, *_: x):
        epoch = torch.cat([get(step, micro) for step in range(6, 12) for micro in range(2)])
    images, half = vit.normalise(data.train[0], 8, c), dict(batch_size=8, grad_accum_steps=1)
    assert torch.equal(torch.cat([get(3), get(3, 1)]), get(3, **half))  # one step has one set
    found = [int((images == x).all((1, 2, 3)).nonzero()) for x in epoch]
    assert sorted(found) == list(range(48)) != found, found
    for step, size in ((29, 8), (30, 16), (199, 32)):  # two patches more every five epochs
        images = get(step, image_size=32, first_size=8)
        assert images.shape == (4, 3, size, size), (step, images.shape)
    (tmp_path / 'data/test.npz').unlink()
    data = vit.load_data(c)
    parts = [[x.tobytes() for x in part[0]] for part in (data.train, data.val, data.test)]
    assert [len(part) for part in parts] == [36, 12, 12] and len(set(sum(parts, []))) == 60

def test_vit_evaluation(tmp_path):
    """Loss and accuracy by hand, in batches that differ in size, and those of a linear model.
    Colours are CIFAR-100's or ImageNet's; smaller images are not every fourth column."""
    black = vit.normalise(np.zeros((1, 3, 1, 1), np.uint8), 1, vit.Config(data='data/cifar100'))
    close(black.flatten(), [-1.8957, -1.8974, -1.5965], 1e-3)
    stripes = np.zeros((1, 3, 16, 16), np.uint8)
    stripes[..., ::4] = 255
    close(vit.normalise(stripes, 4, vit.Config())[:, 0] * 0.229 + 0.485, 0.25, 0.1)
    with unittest.TestCase().assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        vit.normalise(np.zeros((2, 3, 8, 8)), 8, vit.Config())
    c = vit.Config(**SMALL_VIT, data=vit_data(tmp_path / 'data'), batch_size=7, eval_rows=12,
                   val_fraction=0.3)
    data = vit.load_data(c)
    assert vit.linear_accuracy(data, c) > 0.9  # colours are easy
    with patch.object(vit, 'normalise', lambda images, *_: torch.from_numpy(images).float()):
        labels = np.arange(40_000) // 20_000  # sorted by class
        images = np.zeros((40_000, 3, 1, 1))
        images[:, 0, 0, 0] = labels
        test = images[::-1].copy(), labels[::-1].copy()
        both = types.SimpleNamespace(train=(images, labels), test=test)
        assert vit.linear_accuracy(both, c) == 1
    net = vit_model(num_classes=3, dtype=torch.float32)
    images, labels = vit.normalise(data.val[0], 8, c, DEVICE), torch.from_numpy(data.val[1])
    logits, labels = net(images[:12]), labels[:12].to(DEVICE)
    figures, (layers, _) = vit.evaluate(net, data, c, DEVICE), vit.diagnose(net, images)
    close(figures['val_loss'], F.cross_entropy(logits, labels), 1e-5)
    close(figures['val_acc'], (logits.argmax(1) == labels).double().mean(), 1e-6)
    assert figures['1.cos_mh'] == layers['1.cos_mh'], figures
    black = vit.normalise(np.zeros((1, 3, 1, 1), np.uint8), 1, vit.Config(data='cifar10'))
    close(black.flatten(), [-2.4291, -2.4183, -2.2214], 1e-3)

def test_vit_best_weights(tmp_path):
    """best.pt is the best step's, the last of several as good. The test set is for the end: for the
    last weights and, in the report, for the best."""
    def judge(model, images, labels, c, device):
        end = len(seen) >= 4  # it has judged steps 0, 3, 6 and 9
        assert len(labels) == (30 if end else 6)
        assert torch.is_autocast_enabled(device.type) != end  # which keeps casts of weights
        seen.append(model.head.bias.tolist())
        return 1.0, accuracies[len(seen) - 1]
    for accuracies, best in ([0] * 6, 3), ([0, 0, 1, 0, 0.3, 0.7], 2):
        seen = []
        with patch.multiple(vit, loss_and_accuracy=judge, picture=lambda *_, **__: 0):
            end = run(vit, *tiny(vit, tmp_path, '--max-iters', 9, '--dtype', 'bfloat16'))
        assert seen[4] == seen[3] != seen[2] and seen[5] == seen[best], (best, seen)
    assert 'accuracy 30.0 % on 30 test images, with the best weights 70.0 %' in end.out, end.out
    with patch.object(vit, 'loss_and_accuracy', lambda *_: (math.nan, 0.5)):
        refuse(vit, ['validation loss nan', 'step 0'], *tiny(vit, tmp_path))

def test_vit_knows_its_data(tmp_path):
    """--resume refuses other data, and predict has the names of the classes from the run."""
    flags, data = tiny(vit, tmp_path), tmp_path / 'data'
    saved = load(done(vit, *flags)['folder'] / 'best.pt')
    assert {*saved} == {'model', 'config', 'data'}, saved.keys()
    assert saved['data']['classes'] == ['0', '1', '2'], saved['data']
    with np.load(data / 'train.npz') as file:
        x, y = file['images'], file['labels']
    def resume(images, labels, names):
        np.savez(data / 'train.npz', images=images, labels=labels)
        text = '\ufeff' + json.dumps(dict(classes=list(names)))
        (data / 'meta.json').write_text(text, 'utf-8')
        return run(vit, '--resume', *flags, '--max-iters', 9)
    for changed in ((x[:-1], y[:-1], '012'), (x, (y + 1) % 3, '012'), (255 - x, y, '012'),
                    (x, y, 'abc')):
        assert 'trained on other data' in resume(*changed).err
    assert resume(x, y, '012').result['step'] == 9
    for text in ('{}', '<html>', '[]', '{"classes": 3}'):
        (data / 'meta.json').write_text(text)
        refuse(vit, ['meta.json', 'classes'], *flags)
        checked(data, 'meta.json')

def test_vit_arrays(tmp_path):
    """Labels (N, 1) are as good as (N,); all else is refused by file and reason, and found by
    prepare_data.py check."""
    flags, data = tiny(vit, tmp_path), tmp_path / 'data'
    train = data / 'train.npz'
    with np.load(train) as file:
        x, y = file['images'], file['labels']
    np.savez(train, images=x, labels=y[:, None])
    with QUIET:
        found = vit.load_data(vit.Config(data=str(data)))
    assert found.train[1].shape == (54,) and found.classes == ['0', '1', '2']
    checked(data)
    for word, found, images, labels in (
            ('(60, 3)', 'labels are', x, np.eye(3, dtype=int)[y]),
            ('-1', 'label -1 of image 0', x, y - (y == 0)), ('float64', 'labels are', x, y + 0.5),
            ('allow_pickle', 'allow_pickle', x, y.astype(object)),
            ('(60, 3, 8)', 'images are', x[..., 0], y), ('float64', 'images are', x / 255, y),
            ('(60, 8, 8, 3)', 'images are', x.transpose(0, 2, 3, 1), y)):
        np.savez(train, images=images, labels=labels)
        refuse(vit, ['train.npz', word], *flags)
        checked(data, found)
    np.savez(train, images=x, labels=y % 2)  # test.npz has the label 2
    refuse(vit, ['label 2', '2 classes'], *flags)
    checked(data, 'test.npz: label 2 of image 2')
    np.savez(train, images=x, labels=y // 2 * 2)
    checked(data, 'class 1 (1) has no')
    np.savez(train, images=x[:0], labels=y[:0])
    refuse(vit, ['train.npz', '(0, 3, 8, 8)'], *flags)
    (data / 'meta.json').write_text('{"classes": ["red", "green"]}')
    np.savez(train, images=x, labels=y)
    refuse(vit, ['label 2', '2 classes'], *flags)
    train.write_bytes(b'no archive')
    refuse(vit, ['train.npz', 'images', 'labels'], *flags)
    checked(data, 'train.npz')

def test_vit_photos(tmp_path):
    """Folders of photos train and predict; val, valid or test is the test set, and its classes are
    those of train; links are followed; hidden files are passed over, others counted, and
    prepare_data.py check lists them."""
    root, flags = tmp_path / 'photos', tiny(vit, tmp_path, '--data', tmp_path / 'photos')
    vit_photos(root / 'train', blue=12, red=4)
    vit_photos(tmp_path / 'more', red=9)
    (root / 'train/red/more').symlink_to(tmp_path / 'more/red')
    vit_photos(root / 'test', red=5, blue=1)
    checked(root)
    vit_photos(root / 'train', green=0)
    for name in ('.ipynb_checkpoints/0.jpg', '__MACOSX/red/._0.jpg', 'red/._0.jpg', 'red/a.txt'):
        (root / 'train' / name).parent.mkdir(parents=True, exist_ok=True)
        (root / 'train' / name).write_bytes(b'no photo')
    told = run(prepare_data, 'check', root).out.splitlines()
    for line, words in zip(told, ('checkpoints/0.jpg: hidden', '._0.jpg: hidden', '._0.jpg: hidden',
                                  'red/a.txt', 'train/green: a class without',
                                  'test/green: a class without'), strict=True):
        assert words in line, told
    end = run(vit, *flags, '--val-fraction', 0.25, '--max-iters', 30)
    for words in ('left out 1 of 26 files', 'majority class 83.3 %',
                  '19 images of 2 classes, 6 for validation, 6 for testing'):
        assert words in end.out, (words, end.out, end.err)
    assert end.result['test_acc'] == 1, end.result
    photos = root / 'train/red/0.jpg', root / 'train/blue/0.jpg'
    red, blue = done(vit, 'predict', '--out-dir', tmp_path / 'out', '--images', *photos)
    assert red[0][0] == 'red' and red[0][1] > 0.5 and blue[0][0] == 'blue', (red, blue)
    refuse(vit, ['--images'], 'predict', '--out-dir', tmp_path / 'out')
    with QUIET:
        assert vit.load_data(vit.Config(data=str(root / 'train'))).classes == ['blue', 'red']
    refuse(vit, ['train/CLASS'], *flags, '--data', root / 'train/red')  # a single class
    vit_photos(tmp_path / 'kaggle/training', red=9)
    vit_photos(tmp_path / 'kaggle/Validation', red=9)
    refuse(vit, ['train/CLASS'], *flags, '--data', tmp_path / 'kaggle')
    (root / 'test').rename(root / 'Valid')
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert len(vit.load_data(vit.Config(data=str(root))).test[1]) == 6
    assert 'Valid' in out.getvalue(), out.getvalue()
    (root / 'val').mkdir()
    refuse(vit, [str(root / 'val'), 'no photos'], *flags)
    vit_photos(root / 'val', yellow=2)
    refuse(vit, [str(root / 'val'), 'yellow'], *flags)
    assert 'val/yellow: train has no' in run(prepare_data, 'check', root).out

def test_vit_read_photo(tmp_path):
    """The crop by hand; forms of one photo are read alike; a damaged one is named."""
    noise, path = Image.effect_noise((120, 80), 99), str(tmp_path / 'noise.png')
    noise.save(path)
    for size, chance, box in (  # left, top, right, bottom
            (80, None, (25, 5, 95, 75)),  # to judge: 7/8 of the square
            (40, None, (20, 0, 100, 80)),  # all of it, where photos are that small
            (8, (0, 1, 0.5, 0.25), (44, 14, 76, 38))):  # to train: 8 % of the area, 4:3
        want = np.asarray(noise.resize((size, size), Image.BICUBIC, box))
        rng = chance and types.SimpleNamespace(random=iter(chance).__next__)
        assert (vit.read_photo(path, size, rng) == want).all(), box
    for flip, draw, step in (True, 0.1, -1), (True, 0.9, 1), (False, 0.1, 1):
        rng = types.SimpleNamespace(random=iter([*chance, draw]).__next__)
        crop = vit.augment(path, rng, vit.Config(flip=flip), 8)
        assert (crop == want[:, ::step]).all(), (flip, draw)
    greys, exif = np.asarray(noise), Image.Exif()
    exif[0x0112] = 6  # on its side
    noise.transpose(Image.ROTATE_90).save(tmp_path / 'b.png', exif=exif)
    for name, deep in (  # 16 bits would be white if cut off at 255, and 12 black if divided by 256
            ('a.png', greys.astype(np.uint16) * 256 + 99), ('c.png', greys.astype(np.uint16) * 16),
            ('d.tif', greys.astype(np.int32) * 2 ** 23)):
        Image.fromarray(deep).save(tmp_path / name)
    for name in ('a.png', 'b.png', 'c.png', 'd.tif'):
        assert (vit.read_photo(tmp_path / name, 40) == vit.read_photo(path, 40)).all(), name
    Image.fromarray(np.float32(greys)).save(tmp_path / 'f.tif')
    with unittest.TestCase().assertRaisesRegex(OSError, 'f.tif.*floats'):
        vit.read_photo(tmp_path / 'f.tif', 8)
    (tmp_path / 'a.png').write_bytes((tmp_path / 'b.png').read_bytes()[:999])
    with unittest.TestCase().assertRaisesRegex(OSError, 'a.png'):
        vit.read_photo(tmp_path / 'a.png', 8)

def test_augment_to_the_byte():
    """The bytes that our figures come from, and the mean red of the drawings' first quarters."""
    images, _ = vit.draw_shapes(200, 5)
    close(images[:, 0, :16, :16].mean(), 84.75076, 1e-4)
    images = np.random.RandomState(0).randint(0, 256, (200, 3, 48, 64)).astype(np.uint8)
    images[1::3] = images[1::3] // 5 + 60  # dull ones
    images[2::3] = images[2::3, :, :1, :1]  # of a single colour
    data = types.SimpleNamespace(train=(images, np.arange(200)))
    for policy, want in dict(none=1902692715, paper=1505479055, fixed=1006865697).items():
        c = vit.Config(randaugment=policy, batch_size=50, grad_accum_steps=4)
        with patch.object(vit, 'normalise', lambda images, *_: images):
            got = np.stack([vit.get_batch(data, c, 3, micro, 'cpu')[0] for micro in range(4)])
        assert zlib.crc32(got.tobytes()) == want, f'other images by --randaugment {policy}'

def test_augment_mix():
    """What the mean of an image has of another the loss has of its label."""
    labels, shares = torch.arange(10, device=DEVICE), []
    images = labels.float().view(10, 1, 1, 1).expand(10, 3, 16, 24)  # image i is i everywhere
    for seed in range(6):
        x, share = vit.mix(images, np.random.default_rng(seed))
        close(x.mean((1, 2, 3)), share * labels + (1 - share) * labels.flip(0), 1e-4)
        shares.append(share)
    mixup, cutmix = shares[2:4], shares[:2] + shares[4:]
    close(mixup, [0.221944, 0.17892], 1e-6)
    close(cutmix, [0.929688, 0.765625, 0.416667, 0.84375], 1e-6)
    logits, _, _ = qkv(10, 10)
    loss = vit.loss_of(torch.nn.Identity(), (logits, labels, 0.8),
                       vit.Config(mix=True, label_smoothing=0.3))
    one_hot = torch.eye(10, device=DEVICE).double()
    soft = 0.7 * (0.8 * one_hot + 0.2 * one_hot.flip(0)) + 0.3 / 10
    close(loss, F.cross_entropy(logits, soft), 1e-6)

def test_vit_diagnose():
    """A layer by hand, Delta W^o + Delta_s W^s [BF Eq. 15], where W^s has no bias; Fig. 3's figures
    and the map of its class token."""
    net, images = vit_model(attention='belief-star'), vit_images(3)
    block, attn, (x, _) = net.blocks[0], net.blocks[0].attn, net.embed(images)
    close(attn.temperature.exp(), 6 ** -0.5, 1e-6)
    attn.temperature.data -= 1  # the scale is learned
    q, k, v = attn.qkv(block.norm1(x)).view(3, 5, 3, 2, 6).permute(2, 0, 3, 1, 4)
    q = q / math.e  # (B, nh, T, hs)
    p = gpt_weights(q, k, True, vit)
    delta, delta_s = gpt_slow('belief-star', q, k, v, 1, True, vit).flatten(3)
    out = attn.proj(delta) + delta_s @ attn.proj_s.weight.T
    close(attn(block.norm1(x)), out, 1e-6)
    figures, maps = vit.diagnose(net, images)
    # of the class token, (B, nh hs)
    mh, v = (p @ v)[:, :, 0].flatten(1), v[:, :, 0].flatten(1)
    delta, x = delta[:, 0], x[:, 0]
    mh_out, delta_out = mh @ attn.proj.weight.T, delta @ attn.proj.weight.T
    for name, vector in dict(mh=mh, update=delta, mh_out=mh_out, update_out=delta_out).items():
        close(figures[f'0.{name}'], vector.norm(dim=1).mean(), 1e-6)
    close(figures['0.cos_update'], F.cosine_similarity(delta_out, x).mean(), 1e-6)
    close(figures['0.alpha'], ((mh * v).sum(1) / (v * v).sum(1)).mean(), 1e-6)
    light = p[:, :, 0, 1:].mean(1)
    close(maps[0].flatten(1), light / light.amax(1, keepdim=True), 1e-6)

def test_vit_subclasses(tmp_path):
    """A subclass with another update is looked into; one with its own forward is skipped. Tokens
    that belong to no patch need a change of class ViT alone, in every model."""
    class Half(vit.Attention):
        def update(self, mh, v):
            return mh / 2
    class Own(vit.Attention):
        def forward(self, x):
            return self.proj(x)
    class OtherHeads(vit.Attention):  # and no update: it passes on its MH
        def heads(self, x):
            q, k, v, mh = super().heads(x)
            return q, k, v, mh / 2
    class WithRegisters(vit.ViT):
        def embed(self, images):
            x, grid = super().embed(images)
            return torch.cat([x[:, :1], x[:, :1] * 0 + 0.1, x[:, 1:]], 1), grid
    with patch.dict(vit.ATTENTION, half=Half, own=Own, heads=OtherHeads):
        figures, maps = vit.diagnose(vit_model(attention='half'), vit_images(3))
        logits = [vit_model(attention=name)(vit_images(3)) for name in ('half', 'heads')]
        close(*logits, 1e-12)
        assert vit.diagnose(vit_model(attention='own'), vit_images(3)) == ({}, [])
    close(figures['1.update'], figures['1.mh'] / 2, 1e-6)
    assert len(maps) == 2
    for model in vit.MODELS:  # with all that a recipe can have
        _, c = vit.parse(tiny(vit, tmp_path, '--model', model, '--mix', '--drop-path', 0.2))
        with QUIET, patch.object(vit, 'ViT', WithRegisters):
            _, log = vit.train(c)
        assert math.isfinite(log[-1]['1.cos_update']), (model, log[-1])

# ------------------------------------ admm_detr.py ------------------------------------
EXACT = ['l2', 'admm', 'admm-vanilla']
OPTIONS = [dict(ridge=ridge, positive=positive)
           for ridge in (0.0, 1.0) for positive in (False, True)]

def detr_config(**settings):
    """A small model with OA's attention, but for its random tokens; rho is 0.1."""
    return detr.Config(**{**SMALL_DETR, **detr.OA, 'rho': 0.1, 'random_tokens': 0, **settings})

def detr_model(c):
    return detr.DETR(dataclasses.replace(c, num_classes=len(detr.SHAPES)))

def tokens(*sizes, d=32, dtype=torch.float64):
    """Layer-normed tokens of two heads of d channels."""
    x = F.layer_norm(qkv(sum(sizes), 2 * d)[0], (2 * d,))
    x = x.view(-1, 2, d).transpose(0, 1)[None]  # (1, 2, N, d)
    return [t.to(dtype) for t in x.split(sizes, 2)]

def no_padding(k):
    return k.new_zeros(len(k), k.size(2), dtype=torch.bool)

def test_detr_lasso_ends_at_the_minimum():
    """With every option ADMM finds what coordinate descent finds."""
    def slow_lasso(q, k, penalty, e, positive, skip):
        """The elastic net of one query: each coordinate in turn moves to its own best."""
        x = np.zeros(len(k))
        for _, j in itertools.product(range(200), range(len(k))):
            if j != skip and k[j].any():
                rest = k[j] @ (q - x @ k + x[j] * k[j])
                size = rest if positive else abs(rest)
                x[j] = np.sign(rest) * max(size - penalty / 2, 0) / (k[j] @ k[j] + e)
        return x

    for options, is_self in itertools.product(OPTIONS, (False, True)):
        q, k = tokens(3, 7, d=5)
        k[:, :, -1] = 0
        q = k if is_self else q
        c = detr_config(sparsity=0.1, rho=0.2, iterations=400, **options)
        def solve(sparsity=0.1, **more):
            return detr.lasso(q, k, dataclasses.replace(c, sparsity=sparsity), is_self, **more)
        x = solve()
        close(x, solve(vanilla=True), 1e-9)
        lam, _, penalty = detr.scales(q, k, c, is_self)
        for head, i in itertools.product(range(2), range(2)):
            Q, K, most, ridge = [np.array(t.tolist()) for t in (
                q[0, head, i], k[0, head], lam[0, head, i, 0], penalty[0, head, 0, 0])]
            want = slow_lasso(Q, K, most, ridge, options['positive'], i if is_self else None)
            close(x[0, head, i], want, 1e-6)
        assert not solve(1.01).any(), options
        assert solve(0.99)[:, :, :3].any(-1).all(), options
        close(solve(0), solve(1e-9), 1e-4)  # no penalty is not no x
        assert solve(0).any(), options
    k = torch.tensor([[[[1.0, 0.0], [1.0, 0.1]]]], device=DEVICE)
    q = torch.tensor([[[[-1.0, 5.0]]]], device=DEVICE)
    assert not detr.lasso(q, k, detr.Config(rho=1e-4, ridge=0.0, iterations=3)).any()

def test_detr_how_far_iterations_get():
    """Relative to its length, x is within 1 % of the optimum by default, and its gradient points
    where the optimum's does. With OA's settings it is off by 30 %, as published by more than its
    length, and its gradient points elsewhere."""
    generator = torch.Generator().manual_seed(1)
    for settings, low, high, alike in ({}, 0, 0.01, (0.999, 1)), (detr.OA, 0.25, 0.35, (0.25, 0.5)):
        c, solved = detr.Config(**settings), {}
        weight = torch.randn(6, 64, generator=generator, dtype=torch.float64).to(DEVICE)
        for n in (c.iterations, 1000):
            q, k = [t.requires_grad_() for t in tokens(6, 64, d=16)]
            some = dataclasses.replace(c, iterations=n)
            K = detr.dictionary(k, no_padding(k), c.centre, c.random_tokens)
            x = detr.lasso(q, K, some)
            solved[n] = x, *torch.autograd.grad((x[..., :64] * weight).sum(), (q, k))
        (x, *gradients), (best, *those) = solved.values()
        gap, published = [((some - best).norm(dim=-1) / best.norm(dim=-1)).mean().item()
                          for some in (x, printed.as_published(q, K, detr.Config(iterations=15)))]
        cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0).item()
                   for a, b in zip(gradients, those)]
        assert low < gap < high and published > 2, (gap, published)
        assert all(alike[0] < cosine <= alike[1] + 1e-9 for cosine in cosines), cosines

def test_detr_attention_by_hand():
    """Tokens put together by hand: without padding, centred, with random ones."""
    hidden = torch.arange(9, device=DEVICE)[None] >= 7
    extra = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for is_self, centre in (False, True), (True, False):
        c = detr_config(sparsity=0.05, rho=0.2, iterations=9, ridge=1.0, positive=centre,
                        centre=centre, random_tokens=3)
        q, k = tokens(3, 9, d=5)
        q = k if is_self else q
        real = k[:, :, :7]
        if centre:
            real = real - real.mean(2, keepdim=True)
        K = torch.cat([real, 0 * k[:, :, 7:], extra.expand(1, 2, 3, 5)], 2)
        x = detr.lasso(q, K, c, is_self)
        S = K @ K.mT  # of which the trace is that of K^T K
        e = 1.0 * S.diagonal(dim1=2, dim2=3).sum(-1)[..., None, None] / 5
        ridge = torch.linalg.solve(S + e * torch.eye(12, device=DEVICE), K @ q.mT).mT
        for name, want in (('admm', x), ('admm-vanilla', x), ('l2', ridge)):
            c.rho = 0.3 if name == 'l2' else 0.2  # which is nothing to l2
            got = detr.ATTENTION[name](q, k, hidden, is_self, c)
            close(got, (want ** 5 / (want ** 5).abs().sum(-1, keepdim=True))[..., :9], 1e-8)
            assert not got[..., 7:].any(), name
    attn = detr.DecoderLayer(detr_config(self_attention='admm')).self_attn
    x, _ = attn.attend(k, k, k)
    assert x.any() and not x.diagonal(dim1=2, dim2=3).any(), x

def test_detr_degenerate_tokens():
    """Tokens of rank one, repeated, zero, large and small give finite x and gradients; so do the
    printed formulas with fewer tokens than channels. Gradients of ordinary ones are right, those
    of the printed formulas where smooth, in one iteration."""
    q, k = [t.requires_grad_() for t in tokens(2, 4, d=3)]
    options = dict(OPTIONS[-1], centre=True, random_tokens=2, power=3)
    for name, more in [*((name, {}) for name in detr.ATTENTION), ('admm', options)]:
        c = detr_config(iterations=1 if 'printed' in name else 4, **more)
        solve = lambda q, k: detr.ATTENTION[name](q, k, no_padding(k), False, c)
        assert torch.autograd.gradcheck(solve, [q, k], atol=1e-6), name
    q, k = tokens(6, 10, d=8, dtype=torch.float32)
    rank_one = k[..., :1] * torch.ones(8, device=DEVICE)
    all_tokens = (rank_one, k[:, :, :1].expand_as(k), 0 * k, 1e4 * k, 1e-6 * k)
    cases = [*itertools.product(EXACT, (q, 0 * q), all_tokens, OPTIONS)]
    q, k = tokens(6, 20, d=64, dtype=torch.float32)
    for name, q, k, options in [*cases, ('admm-printed', q, 10 * k, {})]:
        q, k = [t.detach().requires_grad_() for t in (q, k)]
        c = detr_config(centre=True, **options)
        x = detr.ATTENTION[name](q, k, no_padding(k), False, c)
        for t in x, *torch.autograd.grad(x.square().sum(), (q, k)):
            assert t.isfinite().all(), (name, options, k)
    close(detr.sharpen(torch.tensor([1e-8, 0.0]), 3), 0, 1e-5)  # it fades

def test_detr_padding_and_precision():
    """Padding changes nothing; values are mixed, or solved over; float16 and autocast are solved in
    float32; the fused softmax is the formula's."""
    q, k, hidden = [x.transpose(1, 2).flatten(2).float() for x in tokens(6, 10, 4, d=8)]
    padded = torch.cat([k, 50 * hidden], 1)
    padding = torch.arange(14, device=DEVICE)[None] >= 10
    c = detr_config(centre=True, dropout=0.5)
    for name in ('softmax', 'no-weights', *EXACT):
        module = detr.MultiheadAttention(c, name).eval()
        detr.init_weights(module, 1)
        module.to(DEVICE)
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
        else:
            _, y = module.attend(*module.heads(q, padded, padded), padding)
            close(module.out_proj(y.transpose(1, 2).flatten(2)), want, 1e-4)
            assert (module.train()(q, k, k) != want).any(), name  # dropout

def test_detr_published_equations():
    """(3) and (4), query by query, against numpy to the letter."""
    k, = tokens(9, d=5)
    V = np.array(k[0, 1].tolist())
    c = detr_config(sparsity=0.1, rho=0.2, iterations=4, power=0)
    lam, rho, _ = detr.scales(k, k, c, True)
    r, threshold = rho[0, 1].item(), (lam / rho)[0, 1, 2].item()
    D, X = np.linalg.eigh(V.T @ V)
    Y = V @ X / np.sqrt(D)
    more = detr.dictionary(k, no_padding(k), False, 32)  # not centred; by default 32
    for name, vanilla, inverse in (
            ('admm-vanilla-printed', True, np.linalg.inv(V @ V.T + r * np.eye(9))),
            ('admm-printed', False, Y @ np.diag(1 / (np.sqrt(D) + r)) @ Y.T)):
        x = z = mu = np.zeros(9)
        for _ in range(4):  # the query is token 2
            new = (inverse @ (V @ V[2] + r * (x - z))).clip(-1, 1)
            new[2] = 0
            z = np.sign(x - mu) * (abs(x - mu) - threshold).clip(0)
            x, mu = new, mu + new - z
        whatever = dataclasses.replace(c, positive=vanilla)  # they know no such option
        close(printed.as_published(k, k, whatever, True, vanilla, sigma=0.0)[0, 1, 2], x, 1e-9)
        x = printed.as_published(k, more, c, True, vanilla)[..., :9]
        close(detr.ATTENTION[name](k, k, ~no_padding(k), True, c), x, 1e-12)  # padding is ignored

def test_detr_printed_file(tmp_path):
    """The printed equations are rows of a file of their own; without it, its runs are refused."""
    argv = [printed.__file__, *tiny(detr, tmp_path, *CPU, '--max-iters', 0),
            '--cross-attention', 'admm-printed']
    with patch.object(sys, 'argv', argv), quick_report(), \
            contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(printed.__file__, run_name='__main__')
    assert f'--with {printed.__file__}' in out.getvalue(), out.getvalue()
    with patch.dict(detr.ATTENTION):
        del detr.ATTENTION['admm-printed']
        refuse(detr, ['admm-printed', 'run the file that adds it'], 'detect', '--images', 'a.png',
               '--out-dir', tmp_path / 'out')

def test_detr_as_facebookresearch():
    """The outputs and losses of facebookresearch/detr with the same weights, in float64."""
    c = detr.Config(backbone='resnet50', hidden_dim=32, nheads=4, dim_feedforward=48,
                    num_queries=7, num_classes=91, cross_attention='softmax')
    net = fill(detr.DETR(c).double().eval()).to(DEVICE)
    x = np.random.RandomState(0).uniform(-1.7, 1.7, (2, 3, 96, 128))
    mask = torch.ones(2, 96, 128, dtype=torch.bool, device=DEVICE)
    mask[0] = mask[1, :64, :80] = False
    with torch.no_grad():
        out = net(torch.from_numpy(x).to(DEVICE).masked_fill(mask[:, None], 0), mask)
    close(out['pred_logits'][0, 0, ::30], [1.3233768, -2.0759888, -0.0021618, -0.6884133], 1e-5)
    close(out['pred_boxes'][0, 0], [0.5540449, 0.5603625, 0.6181914, 0.3576915], 1e-5)
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.3], [0.2, 0.3, 0.2, 0.2], [0.8, 0.7, 0.1, 0.5],
                          [0.4, 0.6, 0.3, 0.3]], dtype=torch.float64, device=DEVICE)
    labels = torch.tensor([3, 17, 44, 1], device=DEVICE)
    targets = [dict(labels=labels[part], boxes=boxes[part]) for part in (slice(3), slice(3, 4))]
    losses = dict(loss=22.547493929079366, loss_ce=5.380897302367627, class_error=100.0,
                  loss_bbox=0.7935184912997751, loss_giou=0.949098149243916)
    found = detr.set_loss(out, targets, c)
    for name, want in losses.items():
        close(found.pop(name), want, 1e-5)
    assert not found and out['grid'] == (3, 4), (found, out['grid'])
    x = qkv(1, 3, 2, 2, dtype=torch.float32)[0]
    close(detr.FrozenBatchNorm2d(3).to(DEVICE)(x), x, 1e-4)
    out['pred_logits'][0, 5, 3] += 99  # now two of the four objects find their class
    out['pred_logits'][1, 3, 1] += 99
    close(detr.set_loss(out, targets, c)['class_error'], 50, 1e-5)

def test_detr_initial_weights():
    """Variants start from the same weights, and every one learns: a row of your own, too, which has
    softmax's projections if PROJECTED."""
    net_of = lambda name: detr_model(detr_config(
        self_attention='admm' if name == 'l2' else name, cross_attention=name, out_proj=True))
    full = net_of('softmax').state_dict()
    for key, want in (  # Xavier's for the transformer's matrices, else PyTorch's
            ('transformer.decoder.layers.0.multihead_attn.in_proj_weight', (6 / (16 + 48)) ** 0.5),
            ('transformer.encoder.layers.0.linear1.bias', 16 ** -0.5),
            ('backbone.0.body.3.weight', (32 * 9) ** -0.5)):
        assert 0.9 < full[key].abs().max() / want <= 1, key
    another = detr_model(detr_config(seed=1)).query_embed.weight
    assert (full['query_embed.weight'] != another).any()
    images, targets = qkv(2, 3, 32, 32, dtype=torch.float32)[0], detr_targets(2, 1)
    with (patch.dict(detr.ATTENTION, mine=lambda q, k, padding, is_self, c: q @ k.mT),
          patch.object(detr, 'PROJECTED', {'softmax', 'mine'})):
        for name in detr.ATTENTION:
            net = net_of(name).to(DEVICE)
            assert same(net.state_dict(), {key: full[key] for key in net.state_dict()}), name
            assert (len(full) == len(net.state_dict())) == (name in ('softmax', 'mine')), name
            detr.loss_of(net, (images, None, targets), net.config).backward()
            for key, p in net.named_parameters():
                # the first self-attention sees zeros
                dead = 'decoder.layers.0.self_attn' in key or 'decoder.layers.0.norm1.w' in key
                assert dead or p.grad.abs().max() > 0, (name, key)
    softmax = detr_model(detr_config(cross_attention='softmax')).transformer.decoder.layers[0]
    assert not softmax.multihead_attn.out_proj.bias.any()

def test_detr_dropout():
    """It stands between the feed-forward layers, and before each residual sum."""
    x = qkv(1, 5, 16, dtype=torch.float32)[0].cpu()
    layer = detr_model(detr_config()).transformer.decoder.layers[0]
    layer.drop = torch.nn.Tanh()
    close(layer.feed_forward(x), layer.linear2(F.relu(layer.linear1(x)).tanh()).tanh(), 1e-6)
    layer = detr_model(detr_config(dropout=1.0)).transformer.decoder.layers[0].train()
    close(layer(x, x[0], 99 * x, x, None), layer.norm3(layer.norm2(layer.norm1(x))), 1e-5)

def detr_targets(*counts):
    """For each image that many labels and boxes."""
    generator = torch.Generator().manual_seed(1)
    return [dict(labels=torch.randint(3, (n,), generator=generator).to(DEVICE),
                 boxes=(torch.rand(n, 4, generator=generator) * 0.4 + 0.1).to(DEVICE))
            for n in counts]

def test_detr_losses_by_hand():
    """Without objects, with more of them than queries, with boxes without area. A micro-batch is
    divided by its own objects, in whichever process."""
    c = detr_config()
    logits, _, _ = qkv(3, 5, 4)
    boxes = torch.full((3, 5, 4), 0.5, device=DEVICE)
    def losses_of(images, targets):
        outputs = dict(pred_logits=logits[images], pred_boxes=boxes[images], aux_outputs=[])
        return detr.set_loss(outputs, targets[images], c)
    found = losses_of(slice(3), detr_targets(0, 0, 0))
    close(found['loss'], -logits.log_softmax(-1)[..., 3].mean(), 1e-7)
    assert found['loss_bbox'] == found['loss_giou'] == 0 and found['class_error'] == 100, found
    targets = detr_targets(1, 8, 2)
    found = losses_of(slice(1, 2), targets)  # five of eight are matched
    close(found['loss'], sum(found[name] * coef for name, coef in (
        ('loss_ce', 1), ('loss_bbox', 5), ('loss_giou', 2))), 1e-5)
    with patch.object(detr, 'WORLD', 2):
        close(losses_of(slice(1, 2), targets)['loss'], found['loss'], 0)
    point = boxes[0, 0]
    close(detr.generalized_box_iou(0 * point, 0 * point), 0, 0)
    logits[0, 3, 2] = 99  # of five equal boxes, the surest of the class
    two = torch.tensor([2], device=DEVICE)
    pairs = detr.hungarian_match(logits[None, :1], boxes[None, :1], two, point[None], [1], c)
    assert pairs.T.tolist() == [[0, 0, 3, 0]], pairs

def test_detr_cheapest_pairs():
    """Our own assignment, and scipy's where it is installed, against every other one."""
    rng = np.random.default_rng(0)
    for n, m in [*itertools.product(range(6), range(6)), *20 * [(5, 6)]]:
        for cost in rng.normal(size=(n, m)), rng.integers(0, 3, (n, m)):
            small = cost if n <= m else cost.T
            least = min(small[range(len(small)), list(chosen)].sum()
                        for chosen in itertools.permutations(range(max(n, m)), min(n, m)))
            for solve in detr.assign, detr.match:
                rows, columns = solve(cost)
                # in scipy's order sums have scipy's last bits
                assert list(rows) == sorted(set(rows)) and len(set(columns)) == min(n, m), cost
                assert abs(cost[rows, columns].sum() - least) < 1e-9, (cost, rows, columns)

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
                APl=0.3568595)
    found.sort(key=lambda x: -x['image_id'])  # equal scores go by image, whatever their order here
    got = detr.coco_ap(dict(annotations=truth), found)
    wrong = {name: (x, want[name]) for name, x in got.items() if not abs(x - want[name]) < 1e-6}
    assert got.keys() == want.keys() and not wrong, wrong
    one = dict(image_id=1, category_id=1, bbox=[0, 0, 10, 10])
    crowd = dict(one, bbox=[0, 0, 20, 20], iscrowd=1)  # all of the detection is in it, yet:
    got = detr.coco_ap(dict(annotations=[one, crowd]), [dict(one, bbox=[0, 0, 10, 8], score=1.0)])
    close([got['AP50'], got['AP']], [1, 0.7], 1e-9)  # an IoU of 0.8 fits 0.8

def test_detr_shapes():
    """Boxes hug what is drawn, a kind of your own included, and do not overlap."""
    areas, drawn = dict(rectangle=1, disc=math.pi / 4, triangle=0.5, diamond=0.5), set()
    with patch.dict(detr.SHAPES, diamond=lambda x, y, tip: abs(x - 0.5) + abs(y - 0.5) <= 0.5):
        data = detr.Drawings(60, 64)
        for row in range(60):
            image, target = data.example(row)
            assert data.target(row)['annotations'] == target['annotations']
            for pair in itertools.combinations(target['boxes'].tolist(), 2):
                assert not detr.overlap(*pair), pair
            if len(target['boxes']) == 1:
                image, name = image.numpy() * detr.STD, data.classes[target['labels']]
                y, x = np.nonzero(abs(image - np.median(image[:, 0])).max(0) > 0.25)
                left, top, w, h = target['annotations'][0]['bbox']
                corners = detr.box_cxcywh_to_xyxy(target['boxes'][0])
                for box in 64 * corners, [left, top, left + w, top + h]:
                    close(box, [x.min(), y.min(), x.max() + 1, y.max() + 1], 5)
                # a shape of yours may have any area
                assert abs(len(x) / (w * h) / areas.get(name, len(x) / (w * h)) - 1) < 0.2, name
                drawn.add(name)
        assert drawn == {*detr.SHAPES}, drawn
    for shift, answer in (0.33, True), (0.35, False):  # at 0.34 15 % are shared
        assert detr.overlap([0, 0, 0.4, 0.4], [shift, 0.2, 0.4, 0.8]) == answer, shift

def test_detr_batches():
    """A function of seed and step, in any micro-batches; padding is at right and bottom."""
    c = detr_config(batch_size=8)
    data = detr.load_data(c)
    images, mask, _ = detr.get_batch(data, c, 1, 0, DEVICE)
    assert mask is None
    other = detr.get_batch(data, dataclasses.replace(c, seed=1), 1, 0, DEVICE)[0]
    assert (images != other).any() and (images[0] != images[1]).any()
    half = dataclasses.replace(c, batch_size=4, grad_accum_steps=2)
    parts = [detr.get_batch(data, half, 1, micro, DEVICE)[0] for micro in (0, 1)]
    close(torch.cat(parts), images, 0)
    shapes = (3, 50, 25), (3, 30, 40)
    two = [(torch.ones(shape), target) for shape, target in zip(shapes, detr_targets(1, 2))]
    mine = types.SimpleNamespace(example=lambda row, rng: two[row])
    batch, mask, _ = detr.load_batch(mine, [(0, None), (1, None)], DEVICE)
    assert not mask[0, :, :25].any() and not mask[1, :30].any()
    assert mask.sum() == 50 * 15 + 20 * 40 and (batch == ~mask[:, None]).all(), mask.sum()
    c = detr_config(batch_size=4, grad_accum_steps=2)
    with patch.object(detr, 'load_batch', lambda data, keys, device: [row for row, _ in keys]):
        data = types.SimpleNamespace(train=range(24))  # an epoch has every row once
        epoch = [detr.get_batch(data, c, *n, 'cpu') for n in itertools.product(range(3), (0, 1))]
    assert sorted(sum(epoch, [])) == [*range(24)] != sum(epoch, []), epoch

def test_detr_evaluation():
    """Answers that are the truth have AP 1, though no-object is likelier in them."""
    c = detr_config(eval_rows=8, batch_size=3)
    data = detr.load_data(c)
    targets = [data.val.target(row) for row in range(8)]
    rest = iter(targets)
    def oracle(images, mask):
        boxes = torch.full((len(images), 5, 4), 0.5)
        logits = torch.tensor([0.0, 0.0, 0.0, 25.0]).repeat(len(images), 5, 1)
        for i, target in zip(range(len(images)), rest):
            n = len(target['labels'])
            boxes[i, :n] = target['boxes']
            logits[i, range(n), target['labels']] = 20.0
        return dict(pred_logits=logits.to(DEVICE), pred_boxes=boxes.to(DEVICE), aux_outputs=[])
    def losses(outputs, targets, c):
        return dict(loss=torch.tensor(len(targets)), loss_ce=torch.tensor(targets[0]['image_id']))
    with patch.object(detr, 'set_loss', losses):
        figures = detr.evaluate(oracle, data, c, DEVICE)
    assert figures['AP'] == figures['AP50'] == 1, figures
    assert figures['val_loss'] == (3 * 3 + 3 * 3 + 2 * 2) / 8, figures  # every image counts alike
    assert figures['loss_ce'] == (3 * 0 + 3 * 3 + 2 * 6) / 8, figures
    assert detr.chance(targets)['AP'] < 0.2 and detr.chance(targets[:1])['AP'] == 1

COCO = dict(  # ids in no order: the labels of 9 and 4 are 1 and 0
    images=[dict(id=8, file_name='b.png', width=40, height=30),
            dict(id=5, file_name='a.png', width=30, height=60)],
    categories=[dict(id=9, name='dot'), dict(id=4, name='cat')],
    annotations=[dict(id=1, image_id=8, category_id=9, bbox=[10, 5, 20, 10]),
                 dict(id=2, image_id=8, category_id=4, bbox=[-4, 20, 14, 20.5]),
                 dict(id=3, image_id=8, category_id=4, bbox=[0, 0, 40, 30], iscrowd=1),
                 dict(id=6, image_id=8, category_id=4, bbox=[7, 7, 0, 3]),
                 dict(id=7, image_id=8, category_id=4, bbox=[7, 7, 3, 0])])

def drawn(w, h):
    """A photo (h, w, 3) whose colours tell places apart."""
    y, x = np.mgrid[:h, :w]
    return np.stack([x * 6, y * 4, (x + y) * 2], -1).astype(np.uint8)

def coco_folder(path):
    """Photos and annotations in COCO's layout -> the flags of a run on them."""
    for name in ('train2017', 'val2017'):
        (path / name).mkdir()
        annotate(path, name)
        Image.fromarray(drawn(40, 30)).save(path / name / 'b.png')
        Image.fromarray(drawn(30, 60)).save(path / name / 'a.png')
    return tiny(detr, path, '--data', path, '--image-size', 30)

def annotate(path, name, **changes):
    (path / 'annotations').mkdir(exist_ok=True)
    file = path / 'annotations' / f'instances_{name}.json'
    file.write_text(json.dumps({**COCO, **changes}))

def test_detr_annotations(tmp_path):
    """Boxes are cut at the edges; crowds, and boxes without area, are not learned; ids may be text
    or floats; a photo may show nothing; of a single split every tenth photo is for evaluation."""
    end = run(detr, *coco_folder(tmp_path), '--max-iters', 0, '--num-queries', 1)
    assert 'up to 2 objects in one, to be found by --num-queries 1' in end.out, end.out
    c = detr_config(data=str(tmp_path), image_size=60)
    for id_as in r'\1', r'"\1"', r'\1.0':
        text = re.sub(r'(?<=id": )(\d+)', id_as, json.dumps(COCO))
        annotate(tmp_path, 'train2017', **json.loads(text))
        with QUIET:
            train = detr.load_data(c).train
        assert train.classes == [''] * 4 + ['cat'] + [''] * 4 + ['dot'], train.classes
        (tall, empty), (wide, target) = train.example(0), train.example(1)
        assert tall.shape == (3, 100, 50) and wide.shape == (3, 60, 80), wide.shape
        assert empty['orig_size'] == (60, 30), empty
        assert empty['boxes'].shape == (0, 4) and target['labels'].tolist() == [9, 4], target
        close(target['boxes'], [[0.5, 1 / 3, 0.5, 1 / 3], [0.125, 5 / 6, 0.25, 1 / 3]], 1e-6)
        assert len(target['annotations']) == 5, target
    shutil.rmtree(tmp_path / 'val2017')
    images = [dict(COCO['images'][0], id=i) for i in range(20)]
    annotations = [dict(COCO['annotations'][0], image_id=i) for i in (3, 10)]
    annotate(tmp_path, 'train2017', images=images, annotations=annotations)
    with QUIET:
        alone = detr.load_data(c)
    assert [image['id'] for image in alone.val.images] == [0, 10] and len(alone.train) == 18

def test_detr_annotations_that_do_not_fit(tmp_path):
    """They are refused before a run has a folder, by file and, where it is one, annotation, and
    prepare_data.py check finds them."""
    flags = coco_folder(tmp_path)
    image, other = COCO['images']
    one, *rest = COCO['annotations']
    categories = COCO['categories']
    checked(tmp_path)
    def refused(words, check='', split='val2017', more=(), **changes):
        """Without a word, `check` knows no such fault."""
        annotate(tmp_path, split, **changes)
        refuse(detr, [split, *words.split()], *flags, *more)
        if check:
            checked(tmp_path, check)
        annotate(tmp_path, split)
    for words, changes in (
            ('bbox None', dict(bbox=None)), ("bbox '5'", dict(bbox=['10', '5', '20', '10'])),
            ('outside nan', dict(bbox=[1, 2, math.nan, 4])),
            *(('outside 40 x 30', dict(bbox=box)) for box in (
                [41, 2, 3, 4], [-4, 2, 3, 4], [1, 31, 3, 4], [1, -5, 3, 4])),
            ('image_id 99', dict(image_id=99))):
        refused(f'annotation 1: {words}', 'annotation 1: ' + words.split()[0].replace(
            'outside', 'bbox'), annotations=[{**one, **changes}, *rest])
    touching = [40, 2, 3, 4], [-3, 2, 3, 4], [1, 30, 3, 4], [1, -4, 3, 4]  # an edge: no fault
    annotate(tmp_path, 'val2017', annotations=[*(dict(one, bbox=[*box]) for box in touching), one])
    checked(tmp_path)
    detr.CocoFolder(tmp_path, 'val2017', 30)
    annotate(tmp_path, 'val2017')
    tiny_boxes = 4 * [dict(one, bbox=[0.1, 0.1, 0.2, 0.3])]
    for words, check, changes in (
            ('annotation 2: category_id 4', '', dict(categories=categories[:1])),
            ('category ids -1', '', dict(categories=[dict(id=-1, name='no')])),
            ('fractions', 'fractions', dict(annotations=tiny_boxes)),
            ('corners', '', dict(annotations=12 * [dict(one, bbox=[9, 9, 39, 29])])),
            ('b.png width', '', dict(images=[dict(image, width=0), other])),
            ('images same', '', dict(images=[image, dict(other, id='8')])),
            ('categories same', 'same id', dict(categories=[*categories, dict(id=4, name='cow')])),
            ('has no c.png', 'c.png', dict(images=[image, dict(other, file_name='c.png')])),
            ('(30, 60) (20, 30)', 'a.png', dict(images=[image, dict(other, width=20, height=30)])),
            ("COCO's form image_id", '', dict(annotations=[dict(id=1)])),
            ("COCO's form", "COCO's form", dict(annotations=None))):
        refused(words, check, **changes)
    refused('no object', 'no objects', annotations=[])
    refused('no object', split='train2017', annotations=rest[1:])
    refused('no object first 1', more=['--eval-rows', 1])  # a.png
    annotate(tmp_path, 'val2017', categories=[*categories, dict(id=1, name='cow')])
    refuse(detr, ['differ'], *flags)
    checked(tmp_path, 'different categories')
    (tmp_path / 'annotations/instances_val2017.json').write_text('{"images": [')
    refuse(detr, ['val2017.json', 'JSON'], *flags)
    refuse(detr, ['train2017'], *flags, '--data', tmp_path / 'annotations')
    assert not (tmp_path / 'out').exists()
    # no fault, but said: COCO itself has a box without width
    annotate(tmp_path, 'val2017', annotations=[dict(one, category_id=4, area=0)])
    annotate(tmp_path, 'train2017', annotations=[one, dict(one, bbox=[1, 2, 0, 4])])
    end = run(prepare_data, 'check', tmp_path)
    assert end.code == 0 and 'classes that train2017 lacks: cat' in end.out, end
    assert '1 have no width' in end.out and 'of 1 boxes 1 have no area' in end.out, end
    for split in 'train2017', 'val2017':
        shutil.rmtree(tmp_path / split)
    checked(tmp_path, 'no folder train2017')

def test_detr_photos(tmp_path):
    """Flips and sizes are DETR's; photos that lie on their side or have 16 bits are read."""
    coco_folder(tmp_path)
    images = [dict(image, file_name=f'train2017\\{image["file_name"]}')  # some tools' names
              for image in COCO['images']]
    annotate(tmp_path, 'train2017', images=images)
    checked(tmp_path)
    with QUIET:
        train = detr.load_data(detr_config(data=str(tmp_path), image_size=50)).train
    sizes, flips = set(), 0
    for i in range(200):
        image, target = train.example(1, np.random.default_rng([1, i]))
        flip = bool(image[0, 0, 0] > image[0, 0, -1])
        close(target['boxes'][1], [0.875 if flip else 0.125, 5 / 6, 0.25, 1 / 3], 1e-6)
        flips += flip
        sizes.add(image.shape[1:])
    assert 75 < flips < 125 and sizes == {(s, s * 40 // 30) for s in range(30, 51, 2)}, sizes
    photo, flat = Image.fromarray(drawn(40, 30)), drawn(40, 30)
    want = np.asarray(photo.resize((25, 19), Image.BILINEAR)).transpose(2, 0, 1)
    got = detr.to_tensor(photo, 19).numpy() * detr.STD + detr.MEAN
    close((got * 255).round(), want.astype(np.float32), 0)
    assert detr.to_tensor(photo.resize((2000, 500)), 800).shape == (3, 333, 1332)
    path, exif = tmp_path / 'photo.png', Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    photo.save(path, exif=exif)
    shutil.copy(path, tmp_path / 'val2017/b.png')
    wide, tall = COCO['images']
    annotate(tmp_path, 'val2017', images=[dict(wide, width=30, height=40), tall])
    checked(tmp_path)
    upright = np.rot90(flat, -1)
    for size, want in (None, upright), ((40, 30), flat), ((30, 40), upright):
        assert np.array_equal(detr.read_photo(path, size), want), size
    greys = np.arange(0, 60000, 50, np.uint16).reshape(30, 40)
    Image.fromarray(greys).save(path)
    assert np.array_equal(np.asarray(detr.read_photo(path))[..., 0], greys // 256)
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / 'float.tif')
    with unittest.TestCase().assertRaisesRegex(OSError, 'float.tif.*unknown range'):
        detr.read_photo(tmp_path / 'float.tif')

def test_detr_detects(tmp_path):
    """A run on photos finds things in others and draws them; light is where the surest query
    looks; nothing is said of objects of a size that no photo has."""
    trained = run(detr, *coco_folder(tmp_path), '--random-tokens', 4)
    assert ' nan' not in trained.out.partition('result')[0], trained.out
    photos = [tmp_path / 'val2017' / name for name in ('a.png', 'b.png')]
    detect = ['detect', '--out-dir', tmp_path / 'out', '--device', DEVICE]
    end = run(detr, *detect, '--threshold', 0, '--images', *photos)
    assert [len(end.result[str(photo)]) for photo in photos] == [5, 5], end  # one for each query
    assert 'classes cat, dot' in end.out, end.out
    names = {file.name for file in tmp_path.glob('out/*/*/*.png')}
    assert names == {'curves.png', 'detections.png', 'found-1-a.png', 'found-2-b.png'}, names
    photos[0].write_bytes(photos[0].read_bytes()[:-99])
    end = run(detr, *detect, '--images', *photos)
    assert [*end.result] == [str(photos[1])] and 'cannot read' in end.out and 'a.png' in end.out
    refuse(detr, ['a.png'], *detect, '--images', photos[0])
    refuse(detr, ['--images'], *detect)
    model = detr_model(detr_config(stride=8, cross_attention='no-weights')).to(DEVICE).eval()
    x = torch.zeros(1, 2, 5, 16, device=DEVICE)
    image = torch.ones(3, 32, 32)
    outputs = model(image[None].to(DEVICE))
    surest = outputs['pred_logits'][0].softmax(-1)[:, :-1].amax(-1).argmax()
    x[0, 1, surest, 7] = 0.1  # of a grid of 4 x 4: the second row's last
    with (patch.object(detr.MultiheadAttention, 'attend', lambda *_: (x, x[..., :8])),
          patch.object(model, 'encode', wraps=model.encode) as encode):
        found, light = detr.find(model, image, dict(image_id=0, orig_size=(9, 18)), 0.0)
    assert len(found) == 5 and found == sorted(found, key=lambda one: -one['score']), found
    left, top, w, h = found[0]['bbox']
    box = outputs['pred_boxes'][0, surest].cpu() * torch.tensor([18, 9, 18, 9])
    close([left + w / 2, top + h / 2, w, h], box, 1e-5)
    assert light.sum() == light[8:16, 24:].sum() == 64 and encode.call_count == 1, light

def test_detr_a_run_knows_its_data(tmp_path):
    """best.pt has the classes, and no optimiser; other data are refused; a report decodes four
    photos; each part of the loss is logged."""
    flags = coco_folder(tmp_path)
    images = [dict(COCO['images'][0], id=i) for i in range(20)]
    notes = [dict(COCO['annotations'][0], image_id=3)]
    annotate(tmp_path, 'val2017', images=images, annotations=notes)
    with patch.object(detr, 'read_photo', wraps=detr.read_photo) as read, \
            patch.object(detr, 'train', lambda *_: (model, [dict(step=0, AP=0.0, AP50=0.0)])):
        model = detr_model(detr_config())
        run(detr, *flags, '--out-dir', tmp_path / 'reports')
    assert read.call_count == 4 + 2, read.call_count  # two of them by load_data
    end = run(detr, *flags, '--max-iters', 3)
    assert end.code == 0, end.err
    parts = {'loss_ce', 'loss_bbox', 'loss_giou', 'class_error'}
    assert parts <= end.result.keys() and all(f'  {name} ' in end.out for name in parts), end.out
    saved = load(end.result['folder'] / 'best.pt')
    assert saved.keys() == {'model', 'config', 'data'}, saved.keys()
    assert saved['data']['classes'] == [''] * 4 + ['cat'] + [''] * 4 + ['dot'], saved['data']
    for name in ('train2017', 'val2017'):
        annotate(tmp_path, name, images=images, annotations=notes,
                 categories=[dict(id=9, name='dot'), dict(id=4, name='dog')])
    refuse(detr, ['other data', 'classes', 'dog'], *flags, '--resume')

@patch.object(detr, 'vanilla_inverse', None)  # admm never makes N x N
def test_detr_init_files(tmp_path):
    """--init takes DETR's layout and torchvision's backbone; what has no place is named."""
    file = tmp_path / 'some.pth'
    plain = detr_model(detr_config(cross_attention='softmax'))
    state = {key: p + 1 for key, p in plain.state_dict().items()}
    torch.save(dict(model=state, config=dict(nheads=2)), file)
    flags = tiny(detr, tmp_path, '--cross-attention', 'softmax', '--max-iters', 0, '--init', file)
    end = run(detr, *flags)
    assert same(load(end.result['folder'] / 'ckpt.pt')['model'], state)
    end = run(detr, *flags, '--cross-attention', 'admm', '--num-queries', 4)
    assert 'fresh: query_embed.weight' in end.out, end.out
    for word, *wrong in (('layers.1', '--dec-layers', 1), ('nheads 2', '--nheads', 1),
                         ('linear1', '--dim-feedforward', 8),
                         ('prepare_data.py detr-r50', '--init', 'none.pth')):
        refuse(detr, [word], *flags, *wrong)
    with torch.device('meta'), patch.object(detr, 'init_weights'):
        net = detr_model(detr_config(backbone='resnet50')).to_empty(device='cpu')
    body = {key: torch.full_like(p, 2) for key, p in net.backbone[0].body.state_dict().items()}
    torch.save({**body, 'fc.weight': torch.ones(1)}, file)
    with QUIET:
        detr.load_weights(net, file)
    assert same(net.backbone[0].body.state_dict(), body)
    torch.save({**body, 'layer3.6.conv1.weight': torch.ones(1)}, file)  # a ResNet-101
    refuse(detr, ['layer3.6.conv1.weight'], *flags, '--backbone', 'resnet50')

def test_detr_paper_preset():
    """300 epochs of 118,287 photos, the last 100 at a tenth of the rate; DETR's own settings and
    number of parameters, and what attention without weights saves: 3.8 %, both 7.6 %."""
    c = detr.Config(**detr.PRESETS['paper'])
    epoch = 118287 // 32
    rates = [detr.learning_rate(step, c, 0.5) for step in (200 * epoch - 1, 200 * epoch)]
    close(rates, [0.5e-4, 0.5e-5], 1e-12)
    assert vars(c).items() >= dict(
        max_iters=300 * epoch, batch_size=8, grad_accum_steps=4, grad_clip=0.1, bbox_loss_coef=5,
        giou_loss_coef=2, eos_coef=0.1, num_queries=100, enc_layers=6, dec_layers=6, ridge=0,
        positive=False, centre=False, power=5, random_tokens=32).items(), c
    c = detr.Config(max_iters=9, warmup_iters=3)
    rates = [detr.learning_rate(step, c) for step in (0, 2, 3, 6, 9)]
    close(rates, np.array([0.25, 0.75, 1, 0.525, 0.05]) / 1000, 1e-9)
    model = detr_model(detr_config(lr_backbone_ratio=0.01, stride=4))
    rest, backbone = detr.make_optimizer(model, model.config).param_groups
    assert (rest['ratio'], backbone['ratio'], rest['weight_decay']) == (1, 0.01, 1e-4)
    assert len(backbone['params']) == len(list(model.backbone.parameters()))
    assert model.encode(torch.zeros(1, 3, 64, 32))[3] == (16, 8)
    for own, cross, size in (('softmax', 'softmax', 41302368), ('softmax', 'no-weights', 39723360),
                             ('admm', 'l2', 38144352)):
        c = detr.Config(**detr.DETR_R50, num_classes=91, self_attention=own,
                        cross_attention=cross)
        with torch.device('meta'), patch.object(detr, 'init_weights'):
            assert detr.count(detr.DETR(c)) == size, (own, cross, detr.count(detr.DETR(c)))
    assert detr.count(detr_model(detr.Config())) == 308200

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
             'first:3+window:1+sinks:1': [first(3), window(1), first(1) & ~window(1)],
             'offset:1+first:2': [offset(1), first(2)],
             'later:5': [((j > 0) & (j % 5 == 0)).expand(T, T)]}
    return {masks: torch.stack(held).double().tril() for masks, held in found.items()}

def mask_slowly(reading, q, k, v, M, coef):
    """The three readings by their formulas; M (K, T, T), coef (K,) -> (B, nh, T, hs)."""
    lonely = torch.diag((M.sum((0, 2)) == 0).double())  # tokens that no mask lets see any
    M, coef = torch.cat([M, lonely[None]]), torch.cat([coef, coef.max().view(1)])
    normal = lambda w: w / w.sum(-1, keepdim=True).clamp_min(1e-99)
    e = (q @ k.mT / math.sqrt(q.size(3))).exp().tril()  # (B, nh, T, T)
    W = sum(c_k * m for c_k, m in zip(coef, M))  # (T, T)
    p = dict(renormalised=normal(W * e), unnormalised=W * normal(e),
             separate=sum(c_k * normal(m * e) for c_k, m in zip(coef, M)))
    return p[reading] @ v

@patch.dict(mask.KINDS, later=lambda i, j, n, far: (j % n == 0) & (j > 0))
def test_mask_readings_by_their_formulas():
    """Also with a kind of mask of your own, and in blocks; a token that no mask lets see any sees
    itself, and gradients are finite, and right."""
    q, k, v = [t.requires_grad_() for t in qkv(1, 2, 12, 3)]
    for text, M in mask_matrices(12).items():
        masks = mask.candidates(text)
        alpha = torch.linspace(-2, 1.5, len(M), dtype=torch.float64, device=DEVICE)
        log_c = mask.log_coefficients(alpha)
        for reading in mask.READINGS:
            want = mask_slowly(reading, q, k, v, M, alpha.sigmoid())
            got = DENSE(q, k, v, masks, log_c, reading)
            close(got, want, 1e-12)
            assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), (q, k, v)))
            if reading == 'renormalised' and mask.is_local(masks):
                for block in (0, 1, 5, 16):
                    close(BLOCKED(q, k, v, masks, log_c, block), want, 1e-12)
    assert not mask.is_local(mask.candidates('window:2+later:5'))  # blocks of keys would miss some
    inputs, windows = [*qkv(1, 2, 5, 2), qkv(3)[0]], mask.candidates('windows')
    for f, *reading in (BLOCKED,), *((DENSE, name) for name in mask.READINGS):
        attend = lambda q, k, v, alpha: f(q, k, v, windows, mask.log_coefficients(alpha), *reading)
        assert torch.autograd.gradcheck(attend, [t.requires_grad_() for t in inputs]), reading

def test_mask_that_is_pruned_stays_so():
    """As alpha of one's own pair falls through the threshold its weight never rises; it ends at 0,
    but in rows that would be empty. A closed mask has no gradient."""
    q, k, v = qkv(1, 1, 9, 4)
    for text, empty in (('last5', 1), ('offset:0+offset:2', 2), ('offset:0+first:1', 0)):
        masks, before = mask.candidates(text), torch.ones(9, dtype=torch.float64, device=DEVICE)
        for fall in torch.linspace(0, -12, 49).tolist():
            alpha = torch.zeros(len(masks), dtype=torch.float64, device=DEVICE)
            alpha[0] = fall
            log_c = mask.log_coefficients(alpha.requires_grad_())
            own = mask.attention_weights(q, k, masks, log_c)[0, 0].diagonal()
            assert (own <= before + 1e-12).all(), (text, fall, own, before)
            close(DENSE(q, k, v, masks, log_c), BLOCKED(q, k, v, masks, log_c, 4), 1e-15)
            before = own.detach()
        assert own[:empty].eq(1).all() and own[max(1, empty):].eq(0).all(), (text, own)
        DENSE(q, k, v, masks, log_c)[..., 0].sum().backward()
        assert alpha.grad[0] == 0 and not log_c[0].isfinite(), (text, alpha.grad)
    one, want = mask.attention_weights(q, k, mask.candidates('offset:1'))[0, 0], torch.zeros(9, 9)
    want[range(9), [0, *range(8)]] = 1
    close(one, want, 0)

def test_mask_in_multihead_attention():
    """log W as attn_mask of PyTorch's module is the default reading; gradients reach alpha."""
    x, alpha = qkv(2, 9, 8)[0], torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, device=DEVICE)
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, device=DEVICE)
    masks, found = mask.candidates('windows'), []
    for theirs in (True, False):
        log_c = mask.log_coefficients(alpha.requires_grad_())
        if theirs:
            y, _ = module(x, x, x, attn_mask=mask.attn_mask(masks, log_c, 9))
        else:
            heads = F.linear(x, module.in_proj_weight, module.in_proj_bias)
            heads = heads.unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            y = module.out_proj(DENSE(*heads, masks, log_c).transpose(1, 2).flatten(2))
        found.append((y, *torch.autograd.grad(y.square().sum(), alpha)))
    for a, b in zip(*found):
        close(a, b, 1e-12)
    assert found[0][1].abs().min() > 1e-4, found
    assert mask.attn_mask(masks, log_c.half(), 9).dtype == torch.float16

def test_mask_small_coefficients():
    """A mask below a thousandth of the largest is closed, and then keeps no pairs; only ratios
    count, also where c underflows."""
    opened = mask.log_coefficients(torch.tensor([0.0, -7.5, -7.7])).isfinite().tolist()
    assert opened == [True, True, False], opened  # 1 / 905 and 1 / 1105 of the first
    q, k, v = qkv(1, 2, 12, 4)
    far = torch.tensor([-200.1, -200.5, -201.0], device=DEVICE)
    near, first, windows = map(mask.candidates, ('window:3+first:1', 'first:1', 'windows'))
    for f in (DENSE, BLOCKED):
        closed = f(q, k, v, near, mask.log_coefficients(far[[2, 0]] * 50))
        close(closed, f(q, k, v, first), 1e-6)
        close(f(q, k, v, windows, far), f(q, k, v, windows, far + 200), 1e-5)
    # of 256 tokens' pairs the window holds 14,368 and sinks, open in one of two layers, 762 more
    alphas = torch.tensor([[0.0, -20.0], [0.0, 0.0]], device=DEVICE)
    kept = mask.kept_pairs(alphas, mask.candidates('window:64+sinks:4'), 256)
    close(kept, (14368 + 762 / 2) / (256 * 257 / 2), 1e-6)

def mask_golden_model():
    """A teacher with weights that anyone can make again, and tokens."""
    net = mask.GPT2(mask_config(n_head=3, n_embd=24, block_size=24, vocab_size=61))
    return fill(net.double().requires_grad_(False)).to(DEVICE), gpt_ids(2, 24, 61)

def test_mask_teacher_as_transformers():
    """transformers' logits; initial weights follow from seed and name alone."""
    net, idx = mask_golden_model()
    close(net(idx)[1, -1, :4], [0.879413, 0.831994, -0.276339, -1.175988], 1e-5)
    close(net(idx, last=True), net(idx)[:, -1:], 1e-12)
    generator = torch.Generator().manual_seed(zlib.crc32(b'1337 h.1.mlp.c_proj.weight'))
    want = torch.empty(64, 16).normal_(0.0, 0.02 / math.sqrt(2 * 2), generator=generator)
    close(mask.GPT2(mask_config()).h[1].mlp.c_proj.weight, want, 0)

def test_mask_teacher_files(tmp_path):
    """The record's teacher knows some English. Of other files config.json or --n-head tells the
    heads; a field or a tensor that makes another function of a GPT-2 is refused by its name."""
    idx = torch.tensor([list(TEXT[:250].encode())])
    own = mask.load_gpt2(HERE / 'experiments' / 'teacher.pt')
    assert F.cross_entropy(own(idx)[0, :-1], idx[0, 1:]) < 3.5  # log 256 is 5.5

    net, idx = mask.GPT2(mask_config(vocab_size=256)), torch.arange(12)[None]
    plain = {f'transformer.{key}': p for key, p in net.state_dict().items()}
    plain.update({'transformer.h.0.attn.bias': torch.ones(1, 1, 16, 16),
                  'transformer.h.0.attn.masked_bias': torch.tensor(-1e4),
                  'lm_head.weight': plain['transformer.wte.weight'].clone()})
    file, config = tmp_path / 'model.bin', tmp_path / 'config.json'
    torch.save({f'module.{key}': p for key, p in plain.items()}, file)
    flags = tiny(mask, tmp_path, '--init', file)
    refuse(mask, ['heads', '--n-head'], *flags, '--n-head', 0)
    close(mask.load_gpt2(file, 2)(idx), net(idx), 0)
    for word, text in (('activation_function', '{"activation_function": "relu"}'),
                       ('layer_norm_epsilon', '{"layer_norm_epsilon": 1e-3}'),
                       ('by_inverse_layer', '{"scale_attn_by_inverse_layer_idx": true}'),
                       ('scale_attn_weights', '{"scale_attn_weights": false}'),
                       ('JSON', '<!doctype html>'), ('JSON', '[1]')):
        config.write_text(text)
        refuse(mask, [word], *flags)
    config.write_text('{"n_head": 2}')
    close(mask.load_gpt2(file, 4)(idx), net(idx), 0)
    refuse(mask, ['16 positions'], *flags, '--block-size', 17)
    refuse(mask, ['has n_layer 2', '--n-layer 2'], *flags, '--n-layer', 5)
    refuse(mask, ['has n_head 2', '--n-head 2'], *flags, '--n-head', 4)
    larger = mask.GPT2(mask_config(vocab_size=400)).state_dict()
    for word, weights in (('lm_head.weight', {**plain, 'lm_head.weight': torch.ones(256, 16)}),
                          ('h.0.x', {**plain, 'h.0.x': torch.ones(1)}),
                          ('400 tokens', larger), ('wte.weight', {'wpe': torch.ones(1)})):
        torch.save(weights, file)
        refuse(mask, [word], *flags)
    file.unlink()
    refuse(mask, ['prepare_data.py gpt2'], *flags)
    refuse(mask, ['8 positions'], 'teacher', '--positions', 8, '--block-size', 16)

def test_mask_safetensors(tmp_path):
    """GPT-2's file as transformers writes it, with the buffers of the hub's, read without a
    package; one that is cut off, has no JSON or points beyond its end is refused in one line."""
    def as_safetensors(tensors):
        """A file of that format, as its page describes it."""
        data, header = b'', dict(__metadata__=dict(format='pt'))
        for name, t in tensors.items():
            kind = {torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16',
                    torch.uint8: 'U8', torch.bool: 'BOOL'}[t.dtype]
            raw = bytes(t.contiguous().flatten().view(torch.uint8).tolist())
            header[name] = dict(dtype=kind, shape=list(t.shape),
                                data_offsets=[len(data), len(data) + len(raw)])
            data += raw
        head = json.dumps(header).encode()
        head += b' ' * (-len(head) % 8 + 3)  # the hub's file does not align its tensors either
        return len(head).to_bytes(8, 'little') + head + data

    net, file = mask.GPT2(mask_config(vocab_size=256)), tmp_path / 'model.safetensors'
    plain = {f'transformer.{key}': p for key, p in net.state_dict().items()}
    plain['transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    plain['transformer.h.1.attn.bias'] = torch.ones(1, 1, 16, 16, dtype=torch.uint8).tril()
    plain['transformer.h.0.attn.masked_bias'] = torch.tensor(-1e4)
    for half in (torch.float16, torch.bfloat16, torch.float32):
        tensors = {key: p.to(half) if p.dim() == 2 else p for key, p in plain.items()}
        raw = as_safetensors(tensors)
        file.write_bytes(raw)
        assert same(mask.load_gpt2(file, 2).state_dict(), {
            key: tensors[f'transformer.{key}'].float() for key in net.state_dict()}), half
    flags = tiny(mask, tmp_path, '--init', file)
    with patch.dict(sys.modules, {'safetensors': None}):
        assert done(mask, *flags)['step'] == 6
    if importlib.util.find_spec('safetensors'):
        importlib.import_module('safetensors.torch').save_file(plain, file)
        assert same(mask.load_gpt2(file, 2).state_dict(), net.state_dict())
    n = int.from_bytes(raw[:8], 'little')
    far = raw[:8 + n].replace(b'"data_offsets": [0, ', b'"data_offsets": [9, ')
    for wrong in (raw[:-9999], raw[:99], raw[:5], b'', raw[:8] + b'<' * n + raw[8 + n:],
                  far + raw[8 + n:], b'<!doctype html>' * 99):
        file.write_bytes(wrong)
        refuse(mask, ['model.safetensors', 'cannot be read'], *flags)

def test_mask_what_a_student_trains():
    """It is a copy of the teacher, with masks. --learn says what trains, alphas have a rate of
    their own, and only a teacher's matrices decay. The report: 100 epochs of 1,000 samples of 512
    tokens, five masks, L1."""
    teacher, idx = mask_golden_model()
    teacher.requires_grad_()
    for learn, trained in (('alphas', {'alpha'}), ('attention', {'alpha', 'c_attn', 'c_proj'})):
        model = mask.make_student(teacher, mask_config(masks='window:24', learn=learn))
        close(model(idx), teacher(idx), 1e-12)  # a window of all 24 tokens
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert {name.split('.')[3] for name in names} == trained, (learn, names)

    def rates(net, c):
        groups = mask.make_optimizer(net, c).param_groups
        return {(g['peak'], g['weight_decay']) for g in groups if g['params']}
    c = mask_config(weight_decay=0.3, learning_rate=2e-3, alpha_lr=0.2)
    assert rates(model, c) == {(2e-3, 0), (0.2, 0)}, rates(model, c)
    c = dataclasses.replace(c, stage='teacher', max_iters=9, warmup_iters=3)
    assert rates(mask.GPT2(c), c) == {(2e-3, 0.3), (2e-3, 0)}, rates(mask.GPT2(c), c)
    close([mask.learning_rate(step, c, 8.0) for step in (0, 2, 3, 6, 9)], [2, 6, 8, 4.4, 0.8], 1e-6)
    c = mask.Config(**mask.PRESETS['report004'])
    assert (c.masks, c.samples, c.block_size, c.data) == ('last5', 1000, 512, 'wikitext-2'), c
    assert c.max_iters * c.batch_size * c.grad_accum_steps == 100 * c.samples and c.l1 > 0, c
    assert len(mask.PROMPTS) == 7 and sum(len(text) > 99 for text in mask.PROMPTS) == 3
    teacher = mask.make_optimizer(teacher, mask_config(stage='teacher'))
    assert teacher.defaults['betas'] == (0.9, 0.99), teacher.defaults

def test_mask_loss():
    """Mean KL(teacher || student) and L1, by their formulas; logits are float32 under autocast."""
    teacher, idx = mask_golden_model()
    c = mask_config(masks='windows', l1=0.1)
    model = mask.make_student(teacher, c)
    p, q = teacher(idx).softmax(-1), model(idx).softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    close(mask.token_kl(teacher(idx), model(idx)), kl, 1e-9)
    close(mask.loss_of(model, (idx, idx), c), kl.mean() + 0.1 * 2 * 3 * 0.5, 1e-6)
    with torch.autocast(idx.device.type, torch.bfloat16):
        logits = mask.GPT2(mask_config()).to(DEVICE)(idx[:, :16] % 40)
        assert logits.dtype == torch.float32, logits.dtype

def test_mask_evaluation():
    """A student that equals its teacher has KL 0; every sequence counts alike, and --eval-rows 0
    takes all that lie side by side. The likeliest text is that of a pass over the last 24 tokens,
    which are the positions."""
    c = mask_config(masks='all', batch_size=3, l1=1.0)
    teacher = fill(mask.GPT2(c)).to(DEVICE)
    data = types.SimpleNamespace(val=np.arange(900) ** 2 // 7 % 40)
    def val_loss(model, c):
        return mask.evaluate(model, data, c, torch.device(DEVICE))['val_loss']
    close(val_loss(mask.make_student(teacher, c), c), 0, 1e-7)
    near = mask.make_student(teacher, dataclasses.replace(c, masks='window:2'))
    for rows, starts in ((4, [0, 294, 588, 883]), (0, np.linspace(0, 883, 56).astype(int))):
        c = dataclasses.replace(c, eval_rows=rows)
        x = torch.cat([x for x, _ in mask.validation(data, c, DEVICE)])
        close(x, np.stack([data.val[s:s + 16] for s in starts]), 0)
        close(val_loss(near, c), mask.token_kl(teacher(x), near(x)).mean(), 1e-6)
    teacher, idx = mask_golden_model()
    for settings in dict(masks='window:4+sinks:2'), dict(masks='last5', reading='unnormalised'):
        model = mask.make_student(teacher, mask_config(**settings))
        out = model.generate(idx[:, :3], 30, temperature=0)
        for t in (3, 23, 24, 25, 32):
            close(model(out[:, max(0, t - 24):t])[:, -1].argmax(-1), out[:, t], 0)
    c = mask_config(masks='last5', batch_size=3)
    student = mask.make_student(fill(mask.GPT2(c)).to(DEVICE), c)
    figures = mask.evaluate(student, data, c, torch.device(DEVICE))
    assert figures['0.offset:0'] == figures['1.offset:4'] == 0.5, figures

def mask_figures(model, x, y):
    """The report's criteria once more, in the plainest way."""
    real = y >= 0
    maps, logs, right, gradients = [[], []], [], [], []
    attend = mask.SelfAttention.attend
    def keep_map(self, q, k, v):
        with torch.no_grad():
            of_net.append(mask.attention_weights(q, k, self.masks, self.log_c(), self.reading))
        return attend(self, q, k, v)
    for net, of_net in zip((model.teacher, model), maps):
        net = copy.deepcopy(net).requires_grad_(True)
        with patch.object(mask.SelfAttention, 'attend', keep_map):
            log_p = net(x)[real].log_softmax(-1)  # (N, V)
        F.nll_loss(log_p, y[real], reduction='sum').backward()
        logs.append(log_p.detach())
        right.append((log_p.argmax(-1) == y[real]).sum())
        gradients.append(torch.cat([p.grad.flatten() for name, p in net.h.named_parameters()
                                    if 'attn.c_attn' in name or 'attn.c_proj' in name]))
    p, q = logs
    gaps = torch.cat([(P - Q)[b, :, i, :i + 1].flatten() for P, Q in zip(*maps)
                      for b, i in real.nonzero()])
    return dict(kl=(p.exp() * (p - q)).sum(-1).mean(), accuracy=right[1] / max(1, right[0]),
                mse=gaps.square().mean(), cosine=F.cosine_similarity(*gradients, dim=0),
                teacher_perplexity=F.nll_loss(p, y[real]).exp(),
                perplexity=F.nll_loss(q, y[real]).exp())

def test_mask_criteria_and_edge_cases():
    """The report's edge cases: a padded batch, a token that is repeated, one constant token."""
    teacher, idx = mask_golden_model()
    model = mask.make_student(teacher, mask_config(masks='window:3+sinks:1'))
    x, y = idx[:, :-1], idx[:, 1:]
    padded, repeated = y.clone(), x.clone()
    padded[0, 5:] = -1
    repeated[:, 4:12] = x[:, [4]]
    for batches in ([(x, y), (y, x)], [(x, y), (x, padded)], [(repeated, y)], [(x * 0, y * 0)]):
        got = mask.fidelity(model, batches)
        for key, value in mask_figures(model, *map(torch.cat, zip(*batches))).items():
            close(got[key], value, 2e-5 * (1 + abs(value)))
    nothing = mask.fidelity(model, [(x, y * 0 - 1)])  # all padding
    assert (nothing['kl'], nothing['mse'], nothing['accuracy']) == (0, 0, 0), nothing
    for name, limit, worse in (('accuracy', 0.95, 0.94), ('cosine', 0.95, 0.94),
                               ('mse', 1e-4, 2e-4), ('kl', 1e-3, 2e-3)):
        assert mask.passes(name, limit) and not mask.passes(name, worse), name

def test_mask_two_stages(tmp_path):
    """A teacher, then its student, whose KL falls. The teacher's file serves the next command; a
    student does without it, wherever `out` is moved."""
    flags = tiny(mask, tmp_path, '--teacher-iters', 30, '--teacher-lr', 0.03, *CPU)
    flags += '--max-iters', '40', '--learning-rate', '0.003', '--masks', 'window:1'
    end = run(mask, *flags, '--samples', 99)
    file = end.result['folder'] / 'teacher.pt'
    kept = load(file)['config']  # the teacher's own: it sees all of the text
    assert (kept['learning_rate'], kept['warmup_iters'], kept['samples']) == (0.03, 100, 0), kept
    assert f'--init={file}' in end.out, end.out
    losses = [row['val_loss'] for row in end.result['log']]
    assert losses[-1] < 0.7 * losses[0], losses
    close([end.result['kl'], end.result['kept']], [losses[-1], 16 / (16 * 17 / 2)], 1e-6)
    init = [*flags, '--init', file, '--max-iters', 0]
    equal = done(mask, *init, '--masks', 'all', '--dtype', 'bfloat16')
    close(equal['val_loss'], 0, 1e-7)  # evaluated in float32
    short = done(mask, *init, '--block-size', 9)['folder']
    assert done(mask, 'sample', '--folder', short, *CPU)  # with all of the teacher's positions
    alone = [*flags[:-4], '--out-dir', tmp_path / 'alone']  # the same teacher, in a run of its own
    for more in ['teacher', '--init', file], ['teacher', '--init', file, '--resume']:
        told = run(mask, *more, *alone)
        assert told.code == 0 and len([*tmp_path.glob('alone/*/*')]) == 1, (more, told)
        assert ('from step 30' in told.out) == ('--resume' in more), told.out
        assert f'--init={told.result["folder"] / "best.pt"}' in told.out, told.out
    assert same(load(told.result['folder'] / 'best.pt')['model'], load(file)['model'])
    refuse(mask, ['no student'], 'criteria', '--out-dir', tmp_path / 'alone')

    file.unlink()
    last = ['--out-dir', (tmp_path / 'out').rename(tmp_path / 'moved'), '--masks', 'window:1', *CPU]
    shutil.rmtree(tmp_path / 'moved/mask_distill' / short.name)
    folder = tmp_path / 'moved/mask_distill' / end.result['folder'].name
    longer = done(mask, '--resume', '--folder', folder, *CPU, '--max-iters', 50)
    assert done(mask, 'sample', *last, '--new-tokens', 2).count('The meaning of life') == 2
    few, whole = [run(mask, 'criteria', *last, '--judge-rows', rows) for rows in (8, 0)]
    assert few.result['kl'] == longer['kl'] != whole.result['kl'], (few.result, longer)
    assert 'on 16 windows' in whole.out, whole.out

def test_mask_stopped_in_either_stage(tmp_path):
    """Ctrl-C in the teacher's stage, between the stages and in the student's: its last line, or the
    same command with --resume, ends with the weights of a run that nobody disturbed. Settings,
    data and teacher are compared."""
    flags = tiny(mask, tmp_path, '--teacher-iters', 8, *CPU)
    whole = load(done(mask, *flags)['folder'] / 'ckpt.pt')['model']
    get_batch = mask.get_batch
    def at(stage, step):
        def stop(data, c, now, micro, device):
            if (c.stage, now) == (stage, step):
                raise KeyboardInterrupt
            return get_batch(data, c, now, micro, device)
        return patch.object(mask, 'get_batch', stop)
    between = [patch.object(mask.shutil, 'copyfile', side_effect=KeyboardInterrupt),
               patch.object(mask, 'make_student', side_effect=KeyboardInterrupt)]
    for i, (stop, step) in enumerate(zip((at('teacher', 7), *between, at('student', 5)),
                                         (6, 8, 8, 3))):
        out = tmp_path / f'{i}'
        with stop:
            end = run(mask, *flags, '--out-dir', out)
        line = end.out.splitlines()[-1]
        assert end.code == 130 and f'from step {step}: ' in line, (i, line)
        words = shlex.split(line.partition('.py ')[2]) if i % 2 else [*flags, '--resume']
        end = run(mask, *words, *CPU, '--out-dir', out)
        assert end.code == 0 and f'from step {step}' in end.out, (i, end)
        assert same(load(end.result['folder'] / 'ckpt.pt')['model'], whole), i
        assert len([*out.glob('*/*')]) == 1, [*out.glob('*/*')]
    out, text = tmp_path / 'other', tmp_path / 'text.txt'
    with at('teacher', 7):
        run(mask, *flags, '--out-dir', out)
    text.write_text(TEXT[::-1])
    refuse(mask, ['other data', 'checksum'], *flags, '--resume', '--out-dir', out)
    told = run(mask, *flags, '--resume', '--out-dir', out, '--teacher-lr', 0.01).out
    assert 'from step' not in told and len([*out.glob('*/*')]) == 2, told
    file, flags = mask_teacher(tmp_path), short_run(mask, tmp_path, *CPU)
    done(mask, *flags)
    saved = load(file)
    saved['model']['wte.weight'][7] += 1
    torch.save(saved, file)
    refuse(mask, ['other data', 'teacher'], *flags, '--resume')

def test_mask_best_teacher(tmp_path):
    """A student is taught by its teacher's best weights, not the last, in every process."""
    c = mask_config()
    best, last = mask.GPT2(c), mask.GPT2(dataclasses.replace(c, seed=1))
    mask.save(tmp_path, 'best.pt', dict(model=best.state_dict()))
    with patch.object(mask, 'train', lambda *_: (last, [])), patch.object(mask, 'WORLD', 2), \
            patch('torch.distributed.broadcast') as broadcast, QUIET:
        teacher = mask.train_teacher(c, tmp_path, None)
    assert same(teacher.state_dict(), best.state_dict()) and (tmp_path / 'teacher.pt').exists()
    assert broadcast.call_count == len([*teacher.parameters()]), broadcast.call_count

# ------------------------------------ prepare_data.py ------------------------------------
def contents(path):
    """{name: bytes of a file, or labels and pixels of an .npz}, without hidden files."""
    files = {p.relative_to(path).as_posix(): p for p in path.rglob('[!.]*') if p.is_file()}
    return {name: [np.load(file)[key].tobytes() for key in ('labels', 'images')]
            if file.suffix == '.npz' else file.read_bytes() for name, file in files.items()}

def test_prep_text_and_mistakes(tmp_path):
    """A text is read as the scripts read --data FILE, and what is there is never changed."""
    prose = 'Zwölf Boxkämpfer — 日本 🎉\r\n\n  jagen\tViktor <|endoftext|> \x00\n' * 200
    notes, latin = tmp_path / 'my.notes.txt', tmp_path / 'latin.txt'
    notes.write_bytes(b'\xef\xbb\xbf' + prose.encode())
    latin.write_bytes(b'\xe9' * 99)
    with patch('prepare_data.DATA', tmp_path / 'data'), prepare_data.lock('coco'):
        meta = done(prepare_data, 'text', notes, '--tokenizer', 'bytes')
        before = contents(tmp_path / 'data')
        mistakes = {f'text {notes}': 'already', f'text {latin}': 'UTF-8', 'text': 'FILE',
                    f'text {tmp_path}': 'not a file', 'check': 'FOLDER',
                    'check x': 'no such folder', 'pile': 'choice',
                    'cifar10 --from x': 'no such file', 'coco --parts 3': '1 to 2',
                    'coco': 'another run', f'gpt2 --from {notes}': '--init'}
        for words, answer in mistakes.items():
            refuse(prepare_data, [answer], *words.split())
        assert contents(tmp_path / 'data') == before
        latin.write_bytes(b'short')
        refuse(prepare_data, ['longer text'], 'text', latin, '--tokenizer', 'bytes')
    text = prose.replace('\r\n', '\n')
    cut = len(text) * 9 // 10
    for split, part in (('train', text[:cut].encode()), ('val', text[cut:].encode())):
        assert np.frombuffer(before[f'my.notes/{split}.bin'], '<u2').tolist() == [*part]
        assert meta['tokens'][split] == len(part)
    assert meta == json.loads(before['my.notes/meta.json']) and meta['vocab_size'] == 256
    pieces = [piece for _, piece in prepare_data.pieces({'train': prose}, 50)]
    assert ''.join(pieces) == prose and len(pieces) > len(prose) / 200
    assert all(re.match(r'\n\S', piece) for piece in pieces[1:])  # there a new token starts

@loopback()
@patch('prepare_data.PAUSE', 0)
@loopback()
def test_prep_downloads(tmp_path):
    """They go on where they broke off; a wrong file is thrown away, and the next mirror asked."""
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
                self.send_header('Content-Length', str(len(rest)))
                self.end_headers()
                self.wfile.write(rest[:len(rest) // 2] if len(log) <= cuts else rest)
            log_message = lambda *_: None
        with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield f'http://127.0.0.1:{server.server_port}/x', log
            server.shutdown()

    body = b'to be or not to be\n' * 20_000
    size, digest = len(body), 'sha256:' + hashlib.sha256(body).hexdigest()
    def get(name, *urls):
        row = (*prepare_data.DATASETS[name][:3], [(size, digest, *urls)])
        with patch.dict(prepare_data.DATASETS, {name: row}), patch('prepare_data.DATA', tmp_path):
            return run(prepare_data, name)
    with serving(body, cuts=2) as (url, log):
        file = tmp_path / 'weights/gpt2/model.safetensors'
        for _ in range(2):  # the second time there is nothing left to do
            assert get('gpt2', url).code == 0
        assert len(log) == 3 and log[0] is None and 'bytes=0-' < log[1] < log[2]
        file.rename(f'{file}.part')  # stopped when all had come, before it was checked
        assert get('gpt2', url).code == 0 and len(log) == 4
    with serving(body[:-1] + b'?') as (bad, log), serving(body) as (good, _):
        end = get('resnet50', bad)
        assert end.code == 2 and digest[7:] in end.err and len(log) == prepare_data.ATTEMPTS
        assert get('resnet50', bad, good).code == 0
    assert [*contents(tmp_path).values()] == [body, body]

def test_prep_archives(tmp_path):
    """Members with the expected names end where they should, and no others."""
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

    def uint16(data):
        return np.array([*data], '<u2').tobytes()

    evil = dict.fromkeys(('../../1.jpg', '/etc/000000000001.jpg', 'x.pkl'), b'cos\nsystem\n.')
    pixels = bytes(range(256)) * 12
    hundred = {'train.bin': b'\3\7' + pixels, 'test.bin': b'', 'fine_label_names.txt': b'apple'}
    hundred = {f'cifar-100-binary/{file}': data for file, data in hundred.items()}
    photos = {'imagenette2-160/train/n01440764/1.JPEG': b'a tench',
              'imagenette2-160/val/n03888257/1.JPEG': b'a parachute'}
    jpegs = {f'val2017/{i:012d}.jpg': b'x' * i for i in range(3)}
    boxes = {'annotations/instances_val2017.json': b'{}'}
    pages = {f'{i}.txt': b'\n %d\n\n\n\nb ' % i for i in range(2001)}
    packed = {'owt/1.xz': lzma.compress(archive('w:', pages), preset=0)}
    texts = [b'%d\n\nb\n\n' % i for i in range(2001)]  # every 2000th is to validate on
    for name, kind, raw, want in [
            ('cifar100', 'w:gz', {'cifar-100-binary.tar.gz': hundred},
             {'train.npz': [np.array([7]).tobytes(), pixels], 'test.npz': [b'', b'']}),
            ('imagenette', 'w:gz', {'imagenette2-160.tgz': photos},
             {'train/tench/1.JPEG': b'a tench', 'val/parachute/1.JPEG': b'a parachute'}),
            ('coco', 'zip', {'val2017.zip': jpegs, 'annotations_trainval2017.zip': boxes},
             jpegs | boxes),
            ('openwebtext', 'w:', {'urlsf_subset00.tar': packed},
             {'train.bin': uint16(b''.join(texts[1:-1])),
              'val.bin': uint16(texts[0] + texts[-1])})]:
        path = tmp_path / name
        path.mkdir()
        for file, members in raw.items():
            (path / file).write_bytes(archive(kind, evil | members))
        with patch('prepare_data.DATA', path / 'data'):
            done(prepare_data, name, '--no-verify', '--from', path, '--tokenizer', 'bytes')
        found = contents(path / 'data' / name)
        assert b'"verified": false' in found.pop('meta.json') and found == want, name
        assert {p.name for p in path.iterdir()} == {*raw, 'data'}

# -------------------------------- what all four scripts share --------------------------------
def source(script):
    return pathlib.Path(script.__file__).read_text('utf-8')

def texts():
    return [(HERE / name).read_text('utf-8') for name in (
        'README.md', 'experiments/results.md', 'experiments/runs/README.md')]

def test_blocks_are_identical():
    """(If you have changed one script for yourself, it need not stay like the others.) Every
    equation that a docstring names is marked in the code, and the other way round."""
    block = r'# --- runs \(identical.*?# --- end of runs\n'
    first = re.search(block, source(gpt), re.S)[0].splitlines()
    for script in SCRIPTS:
        lines = re.search(block, source(script), re.S)[0].splitlines()
        for a, b in itertools.zip_longest(first, lines):
            assert a == b, f'attentionx_gpt.py has {a!r}, {script.SCRIPT}.py {b!r}'
        tag = r'\[\w+ (?:Eq|Sec|Alg)\. [\d.]+\]'
        told, marked = [{*re.findall(tag, text)} for text in source(script).split('"""', 2)[1:]]
        assert told == marked != set(), (script.SCRIPT, told ^ marked)

@wants('scipy')
def test_commands_in_the_texts():
    """What the texts and docstrings tell to type is what the scripts take."""
    told = '\n'.join([*texts(), compare.__doc__.replace('\\\n', ' '),
                      *(script.__doc__ for script in SCRIPTS)])
    command = r'(?:python|uv run|nproc-per-node \d) ([\w/]+)\.py([^`\n#]*)'
    scripts, seen = {script.SCRIPT: script for script in SCRIPTS}, 0
    for name, flags in re.findall(command, told):
        words = shlex.split(flags.split(' && ')[0])
        with QUIET:
            if name in scripts:
                new = dict.fromkeys(scripts[name].ACTIONS, {})  # so that none looks for a run
                with patch.object(scripts[name], 'NEW', new):
                    scripts[name].parse(words)
            # --with names a file of your own
            elif name == 'experiments/compare' and not {'--from-csv', '--with'} & {*words}:
                o, rest = compare.parse(words)
                compare.cases_of(scripts[o.script], rest, o.table, o.sweep)
            else:
                continue
        seen += 1
    assert seen > 40, seen

def rows_of(name):
    return compare.read_rows(HERE / f'experiments/runs/{name}.csv')

@wants('scipy')
def test_tables_of_the_record():
    """Each table of results.md under `compare.py --from-csv` is what that prints. Every interval of
    README and results.md is one of such a table's, or of one that runs/README.md names, with any
    row --against the others. A verdict is no more than its interval says. README's other figures
    stand in results.md or a script's docstring."""
    readme, results, runs = texts()
    command = r'\$ python experiments/compare.py (.*?)\n(.*?)\n```'
    tables = re.findall(command, results, re.S)
    assert results.count(' --from-csv ') == len(tables) > 9, len(tables)
    tables += [(flags, '') for flags in re.findall(r'compare.py (.* --from-csv .*)', runs)]
    halves, signed = {}, {}  # interval: half its width; and differences with theirs
    def add(low, high):
        for scale, digits in (1, 6), (1, 4), (1, 3), (100, 1):
            text = f'{scale * low:+.{digits}f} to {scale * high:+.{digits}f}'
            halves.setdefault(text, set()).add(f'{scale * (high - low) / 2:.{digits}f}')
        signed[f'{abs(low + high) / 2:.3f} \N{PLUS-MINUS SIGN} {(high - low) / 2:.3f}'] = 0

    for flags, table in tables:
        flags = shlex.split(flags.replace('experiments/', f'{HERE.as_posix()}/experiments/'))
        end = run(compare, *flags)
        assert end.code == 0, end.err
        for ours, theirs in zip(table.splitlines(), end.out.splitlines()[1:], strict=bool(table)):
            assert ours == theirs, f'{flags}: results.md has\n{ours}\nand the csv gives\n{theirs}'
        if '--bench' in flags:
            continue
        lines = [*end.result]
        for line in end.result:
            lines += run(compare, *flags, '--against', line['case']).result
        if flags[0] == 'attentionx_gpt':
            lines += run(compare, *flags, '--metric', 'mean_loss').result
        for line in lines:
            add(line['diff'] - line['interval'], line['diff'] + line['interval'])

    # equal time: softmax's loss after so many steps lies on a line
    losses, gaps = {}, {}
    for row in [*rows_of('gpt-common'), *rows_of('gpt-equal-time'), *rows_of('gpt-factor')]:
        losses.setdefault(row['case'], {})[row['seed']] = row['val_loss']
    for case, steps in (('attentionx', 1009), ('attentionx-v1 gamma 1/2', 1009),
                        ('attentionx-v1 gamma 1/3', 1009), ('belief', 1029), ('belief', 1017),
                        ('belief', 1023), ('belief', 1036), ('belief', 1064), ('belief', 1092),
                        ('belief-star', 1136), ('belief-star', 1064), ('belief-star', 1084),
                        ('belief-star', 1091)):
        gaps[case, steps] = [losses[case][seed] - np.interp(steps, (1000, 1092, 1290), [
            losses[name][seed] for name in ('softmax', 'softmax 1092', 'softmax 1290')])
            for seed in losses['softmax 1092']]
    gaps['star, belief'] = np.subtract(gaps['belief-star', 1136], gaps['belief', 1029])
    for values in gaps.values():
        add(*compare.stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 5))

    fresh = {}  # after 19 seeds, and after all: paired, and the first time as planned, too
    for row in rows_of('detr-fresh'):
        fresh.setdefault(row['seed'], {})[row['case']] = row['AP']
    early = [pair for seed, pair in fresh.items() if seed < 69 or seed == 71]
    for pairs in early, [*fresh.values()]:
        lasso, none = [[pair[case] for pair in pairs] for case in ('admm', 'no-weights')]
        for test in (compare.stats.ttest_rel(lasso, none),
                     compare.stats.ttest_ind(lasso, none, equal_var=False)):
            add(*test.confidence_interval())

    for text in readme, results:  # behind a plus-minus sign, results.md has others' figures, too
        text = ' '.join(text.split()).replace('\N{MINUS SIGN}', '-')
        claimed = set(re.findall(r'[+-]\d+\.\d+ to [+-]\d+\.\d+', text))
        assert len(claimed) > 9 and claimed <= halves.keys(), claimed - halves.keys()
        claimed = set(re.findall(r'\d\.\d{3} \N{PLUS-MINUS SIGN} \d\.\d{3}', text))
        assert claimed and claimed <= signed.keys(), claimed - signed.keys()

    claims = results.partition('## Claims')[2].partition('## Goals')[0]
    claims = claims.replace('\N{MINUS SIGN}', '-').replace('**', '')
    verdicts = re.findall(r'(?m)^\| (\d+)[ab]? .*? ([+-][\d.]+) to ([+-][\d.]+)[^|]*\| '
                          r'([\d.]+)[^|]*\| (\w+) \|', claims)
    assert len(verdicts) > 20, len(verdicts)
    for number, low, high, half, verdict in verdicts:
        assert half in halves[f'{low} to {high}'], (number, low, high, half)
        up, down = ('worse', 'better') if int(number) < 5 else ('better', 'worse')
        says = up if float(low) > 0 else down if float(high) < 0 else 'open'
        assert verdict in (says, 'open'), (number, low, high, verdict)

    told = re.findall(r'\d\.\d\d+', results + ''.join(script.__doc__ for script in SCRIPTS))
    told += [f'{float(x):.{n}f}' for x in told for n in (2, 3)]
    figures = set(re.findall(r'(?<![\d.])\d\.\d\d+(?![\d.])', readme.partition('## Your own')[0]))
    assert figures <= {*told}, figures - {*told}

@wants('scipy')
def test_sentences_of_the_record():
    """Figures of results.md that stand in no printed table are what the csv files give."""
    _, results, _ = texts()
    finer = {}
    for row in rows_of('gpt-fine-rates'):
        finer.setdefault(row['case'], []).append(row['val_loss'])
    assert f'{np.mean(finer["softmax 1.13e-2"]):.4f} at 1.13e-2' in results, finer

    cells = {}  # what a step and inference cost, compiled and not
    for name in 'compiled', 'eager':
        out = run(compare, 'attentionx_gpt', '--bench', '--from-csv',
                  HERE / f'experiments/runs/gpt-cost-{name}.csv').out
        for case, cell in re.findall(r'(?m)^([a-z-]+) .* (\d\.\d{3} \(.*\))$', out):
            cells.setdefault(case, []).append(cell)
    assert len(cells.pop('softmax')) == 4 and len(cells) == 3, cells
    for row in cells.values():
        assert f'| {" | ".join(row)} |' in results, row

    last = [row for row in rows_of('gpt-belief-log') if row['step'] == 1000]
    apart = [[np.degrees(np.arccos(row[f'{i}.cos_mh']) - np.arccos(row[f'{i}.cos_update']))
              for row in last] for i in range(3)]
    told = (f'{np.abs(np.mean(apart, 1)).max():.1f}\N{DEGREE SIGN} apart (8) | '
            f'in a run up to {np.abs(apart).max():.1f}\N{DEGREE SIGN}')
    assert told in results, told
    for i in range(3):  # BeliefFormer's lengths and angles, layer by layer
        ratios = [row[f'{i}.update_out'] / row[f'{i}.mh_out'] for row in last]
        mh, update = [np.mean([row[f'{i}.cos_{x}'] for row in last]) for x in ('mh', 'update')]
        found = (f'| {i} | {np.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | '
                 f'{mh:.2f} | {update:.2f} |')
        assert found in results, found
    last = [row for row in rows_of('vit-depth-log') if row['step'] == 703]
    ratios = [np.mean([row[f'{i}.update_out'] / row[f'{i}.mh_out'] for row in last])
              for i in range(12)]
    for told in (f'falls from {ratios[0]:.2f} in layer 0 to {ratios[11]:.2f} in layer 11',
                 f'12 layers {100 - 100 * max(ratios):.0f} to {100 - 100 * min(ratios):.0f} %'):
        assert told in ' '.join(results.split()), ratios
    last = [row for row in rows_of('gpt-depth-log') if row['step'] == 1000]
    lengths = [[row[f'{i}.update'] for row in last] for i in range(6)]  # of Phi
    assert ' | '.join(f'{np.mean(layer):.2f} ({min(layer):.2f} to {max(layer):.2f})'
                      for layer in lengths) in results, lengths

    rates = {}
    for name in 'detr-rates', 'detr-softmax-31-33', 'detr-cross':
        for row in rows_of(name):
            if row['seed'] in (31, 32):
                at = rates.setdefault(row['cross_attention'], {})
                at.setdefault(row['learning_rate'], []).append(row['AP'])
    for kind in 'softmax', 'no-weights', 'admm':
        means = [f'{np.mean(rates[kind][rate]):.3f}' for rate in (3e-4, 1e-3, 3e-3)]
        assert f'| {" | ".join(means)} |' in results, (kind, means)
    own = [row['AP'] for row in rows_of('detr-own')]
    assert f'{min(own):.4f} to {max(own):.4f}' in results, own

@wants('scipy')
def test_pictures_of_the_texts():
    """A text shows only pictures that figures.py draws, or that stand above their command. The code
    in method.png stands in the scripts: drawing it asserts that. Links find their section."""
    figures, (readme, results, runs) = importlib.import_module('figures'), texts()
    with patch.object(figures, 'save') as save:
        figures.main()
    made = {f'{name}.png' for (_, name), _ in save.call_args_list}
    headings = {re.sub(r'[^\w -]', '', line.strip('# ').lower()).replace(' ', '-')
                for line in (readme + results).splitlines() if line.startswith('#')}
    links = set(re.findall(r'\]\((?:experiments/results\.md)?#([^)]*)\)', readme + results))
    assert links <= headings, links - headings
    links = set(re.findall(r'runs/README\.md#(\w+)', results))
    assert links <= {line[3:].lower() for line in runs.splitlines() if line.startswith('## ')}
    for text in readme, results:
        picture = r'!\[[^\]]*\]\((?:experiments/)?([\w.]+\.png)\)(.{0,600})'
        for name, after in re.findall(picture, text, re.S):
            assert (HERE / 'experiments' / name).exists(), name
            assert name in made or 'python ' in after, name

def test_configs():
    """Presets are valid, every field is a flag, --help is Config. Two T4s share the micro-batches
    of their presets, and 8 processes those of AttentionX's and BeliefFormer's."""
    for script in SCRIPTS:
        presets = {name: script.Config(**flags) for name, flags in script.PRESETS.items()}
        assert presets['t4'].grad_accum_steps % 2 == 0, script.SCRIPT
        out, names = run(script, '--help').out, vars(script.Config())
        assert all(f'{name}: ' in out for name in names), (script.SCRIPT, out)
        assert script.MACHINE <= {*names}, script.SCRIPT
    for preset in 'owt-124m', 'belief-124m':
        assert gpt.Config(**gpt.PRESETS[preset]).grad_accum_steps % 8 == 0, preset
    for script in SCRIPTS:
        _, c = script.parse(['--preset', 't4', '--max-iters', '7', '--init=~/x'])
        assert (c.max_iters, c.init) == (7, os.path.expanduser('~/x')), c

def test_pasted_into_a_notebook(tmp_path):
    """Where there is no file, a script trains. torchrun's variables, not all of them or empty,
    change nothing."""
    left = (dict(WORLD_SIZE='2'), dict(RANK='1'), dict(WORLD_SIZE='2', RANK='1'),
            dict(WORLD_SIZE='', RANK=''), dict(WORLD_SIZE='1', RANK='3', LOCAL_RANK='3',
                                               MASTER_ADDR='127.0.0.1', MASTER_PORT='1'))
    for script, variables in itertools.product(SCRIPTS, left):
        module = types.ModuleType('__main__')
        with patch.dict(sys.modules, __main__=module), patch.dict(os.environ, variables):
            exec(source(script), module.__dict__)
        module.picture = no_picture
        assert (module.WORLD, module.RANK) == (1, 0), (script.SCRIPT, variables)
        if variables == left[0]:
            assert done(module, *short_run(script, tmp_path, '--max-iters', 2))['step'] == 2

@wants('nbclient', 'ipykernel')
@loopback()
def test_notebook(tmp_path):
    """README's Colab cell in a real kernel: pictures appear, and run again it continues. Then %run
    of every script, !python, and main() in a cell."""
    without = shutil.ignore_patterns('.git', 'out', 'data')
    shutil.copytree(HERE, tmp_path / 'attention', ignore=without)
    cell = re.search(r'    from google.colab.*?curves.png.*?\n', texts()[0], re.S)[0]
    cell = '\n'.join(line.strip() for line in cell.splitlines() if 'google.colab' not in line)
    cell = re.sub('(?m)^!git clone.*$', '', cell).replace('/content/drive/MyDrive', str(tmp_path))
    cell = cell.replace("'--preset', 't4'", repr(tiny(gpt, tmp_path, *CPU))[1:-1])
    assert "'--max-iters', '6'" in cell and '--resume' in cell, cell
    cells = [(cell, 'step 6/6', 'image/png'),
             (cell.replace('%cd attention', ''), 'from step 6', 'image/png'),
             ('import sys; sys.modules["matplotlib"] = None', '[]')]  # no more pictures: faster
    for script in SCRIPTS:
        flags = ' '.join(short_run(script, tmp_path, '--max-iters', 2, *CPU))
        cells.append((f'%run {script.__file__} {flags}', 'step 2/2'))
    cells += [(f'!python {prepare_data.__file__}', 'shakespeare'),
              (f'%run {prepare_data.__file__}', 'shakespeare'),
              ('import attentionx_gpt as gpt, dataclasses\n'
               'gpt.Config.__init__.__defaults__ = dataclasses.astuple(gpt.Config(max_iters=0, '
               f'threads=1, new_tokens=1, data={str(tmp_path / "text.txt")!r}))\ngpt.main()',
               'step 0/0')]
    nbclient, nbformat = map(importlib.import_module, ('nbclient', 'nbformat'))
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text, *_ in cells])
    nbclient.NotebookClient(book, timeout=120, allow_errors=True, kernel_name='python3',
                            resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    for cell, (text, *words) in zip(book.cells, cells, strict=True):
        out = json.dumps(cell.outputs)
        assert all(word in out for word in words) and '"error"' not in out, (text, out[-2000:])

def test_a_variant_of_your_own(tmp_path):
    """README's row, put into the script, trains; so does the code to paste into a model."""
    first, *_, last = re.findall(r'```python\n(.*?)```', texts()[0], re.S)
    head, row = first.splitlines()
    assert head in source(gpt)
    (tmp_path / 'mine.py').write_text(source(gpt).replace(head, head + '\n' + row))
    with patch.object(sys, 'path', [str(tmp_path), *sys.path]):
        mine = importlib.import_module('mine')
    argv = ['a/mine.py', *tiny(gpt, tmp_path, '--attention', re.search(r"'([\w-]+)'", row)[1])]
    with patch.object(sys, 'argv', argv), contextlib.redirect_stdout(io.StringIO()) as told:
        mine.main()
    assert 'python a/mine.py sample --folder' in told.getvalue(), told.getvalue()
    assert '--with a/mine.py' in told.getvalue().splitlines()[-1], told.getvalue()
    q, k, v = qkv(2, 3, 6, 4)
    names = dict(q=q, k=k, v=v, w_o=torch.nn.Identity())
    exec(last, names)
    want = gpt.ATTENTION['belief'](gpt.multi_head(q, k, v), v.transpose(1, 2), None)
    close(names['out'], want.flatten(2), 1e-6)

def test_arrays_of_your_own(tmp_path):
    """train(c, folder, data), as in a notebook."""
    def train(train, val, path=None):
        data = types.SimpleNamespace(train=train, val=val)
        with QUIET:
            return gpt.train(gpt.parse(tiny(gpt, tmp_path, '--data', 'none'))[1], path, data)
    model, log = train(np.arange(999) % 40, np.arange(99) % 50, tmp_path / 'mine')
    assert [row['step'] for row in log] == [0, 3, 6] and model.config.vocab_size == 50, log
    assert same(load(tmp_path / 'mine/ckpt.pt')['model'], model.state_dict())
    mine = gpt.Config(folder=str(tmp_path / 'mine'))
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.suppress(SystemExit):
        gpt.resume_run(mine, model, None, None, types.SimpleNamespace(facts=dict(train=9)))
    assert 'other data' in told.getvalue(), told.getvalue()
    train([1, 2, 3] * 99, [0, 1, 2, 3] * 9)
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.suppress(SystemExit):
        train([1, 2, 3] * 99, [1, 2, 3, -100] * 9)
    assert 'ids below 0' in told.getvalue(), told.getvalue()
def test_best_weights(tmp_path):
    """best.pt has those of the best evaluation, compiled or not. What is evaluated, and loaded, is
    in eval mode, what trains in autocast. The weights of a model that has changed are refused."""
    falls, rises = (3, 1, 2), (0.1, 0.3, 0.2)
    for script, metric, figures in ((gpt, 'val_loss', falls), (vit, 'val_acc', rises),
                                    (detr, 'AP', rises), (mask, 'val_loss', falls)):
        seen = []
        def judge(model, *_):
            assert not model.training
            seen.append({key: p.clone() for key, p in model.state_dict().items()})
            return {'val_loss': 1.0, 'AP50': 0.0, metric: figures[(len(seen) - 1) % 3]}
        def loss_of(*args, whole=script.loss_of):
            assert torch.is_autocast_enabled('cpu'), script.SCRIPT
            return whole(*args)
        flags = short_run(script, tmp_path, *CPU, '--dtype', 'bfloat16', '--compile')
        with (torch.compiler.set_stance('force_eager'), patch.object(script, 'loss_of', loss_of),
              patch.object(script, 'evaluate', judge), patch.object(script, 'report')):
            folder = done(script, *flags)['folder']
        assert same(load(folder / 'best.pt')['model'], seen[-2]), script.SCRIPT
        c = dataclasses.replace(script.Config(), folder=str(folder), device='cpu')
        assert not script.load_run(c)[0].training, script.SCRIPT
        for name in ('best.pt', 'ckpt.pt'):
            saved = load(folder / name)
            saved['model'].popitem()
            torch.save(saved, folder / name)
        for use in (lambda: script.load_run(c),
                    lambda: done(script, '--resume', '--folder', folder, '--max-iters', 9, *CPU)):
            with unittest.TestCase().assertRaisesRegex(RuntimeError, 'Missing key'):
                use()

# ------------------------------------ the training loop ------------------------------------
def mask_teacher(path):
    """A small teacher's file."""
    file = path / 'teacher.pt'
    if not file.exists():
        teacher = mask.GPT2(mask_config(vocab_size=256))
        torch.save(dict(model=teacher.state_dict(), config=dict(n_head=2)), file)
    return file

def short_run(script, path, *more):
    """Flags of tiny and, for mask_distill.py, a teacher, so that no run has to train one."""
    return tiny(script, path, *(('--init', mask_teacher(path)) if script is mask else ()), *more)

def checkpoint(script, out):
    """That of the only run in a folder."""
    found, = out.glob(f'{script.SCRIPT}/*/ckpt.pt')
    return load(found)

def test_training_by_hand(tmp_path):
    """Five steps of Adam: accumulation, clipping, decay, warmup and cosine, or a trapezoid.
    --grad-clip 0, as the papers' presets have it, is no limit, not a limit of 0. Dropout differs
    from step to step."""
    flags = tiny(gpt, tmp_path, '--grad-accum-steps', 2, '--max-iters', 5, '--grad-clip', 0.5,
                 '--eval-interval', 1, *CPU, '--bias', '--beta1', 0.8, '--beta2', 0.9,
                 '--weight-decay', 0.3)
    result = done(gpt, *flags)
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
        close(result['log'][step + 1]['loss'], loss, 1e-4)
        for p in model.parameters():
            p.data *= 1 - lr * 0.3 * (p.dim() > 1)
        adam.step()
    for name, p in load(result['folder'] / 'ckpt.pt')['model'].items():
        close(p, model.state_dict()[name], 2e-5)
    c = gpt.Config(schedule='trapezoid', warmup_iters=10, max_iters=110, warmdown_iters=20,
                   learning_rate=1)
    rates = [gpt.learning_rate(step, c) for step in (0, 10, 90, 100, 110)]
    close(rates, [1 / 11, 1, 1, 0.5, 0], 1e-7)
    assert gpt.learning_rate(109, dataclasses.replace(c, warmdown_iters=0)) == 1
    none, wide = [done(gpt, *flags, '--grad-clip', limit)['val_loss'] for limit in (0, 1e9)]
    assert none == wide != result['val_loss'], (none, wide)
    (tmp_path / 'text.txt').write_text('a' * 2000)  # every batch is the same
    log = done(gpt, *flags, '--dropout', 0.5, '--learning-rate', 1e-30)['log']
    assert len({row['loss'] for row in log[1:]}) == 5, log

def test_resume_bit_for_bit(tmp_path):
    """Stopped between two evaluations, then resumed as the last line says: weights, log and best
    weights and, in float16, the scale of the loss are those of a run that was not stopped, which
    has drawn its pictures. It has lost no step but, perhaps, the first to an overflow."""
    for script, dtype in [*((script, 'float16') for script in SCRIPTS), (gpt, 'float32')]:
        flags = short_run(script, tmp_path, '--grad-accum-steps', 2, *CPU, '--dtype', dtype)
        flags += ['--dropout', '0.1'] * (script is not mask)
        whole = run(script, *flags, report=contextlib.nullcontext).result
        sizes = {file.name: file.stat().st_size for file in whole['folder'].glob('*.png')}
        assert 'curves.png' in sizes and len(sizes) > 1 and min(sizes.values()) > 5000, sizes
        with interrupted(script, 5):
            end = run(script, *flags)
        assert end.code == 130 and 'from step 3' in end.out.splitlines()[-1], (end.out, end.err)
        words = shlex.split(end.out.splitlines()[-1].partition('.py ')[2])
        end = run(script, *words, *CPU)
        assert end.code == 0 and 'from step 3' in end.out, (script.SCRIPT, end.err)
        for name in ('best.pt', 'ckpt.pt'):
            want, got = load(whole['folder'] / name), load(end.result['folder'] / name)
            assert same(want['model'], got['model']), (script.SCRIPT, name)
            assert ('optimizer' in got) == (name == 'ckpt.pt'), (script.SCRIPT, [*got])
        assert want['scaler'] == got['scaler'], (want['scaler'], got['scaler'])
        if dtype == 'float16' and script is not detr:  # whose losses overflow at first
            assert want['scaler']['_growth_tracker'] >= 5, want['scaler']
        logs = [[{**row, 'seconds': 0} for row in result['log']] for result in (whole, end.result)]
        assert repr(logs[0]) == repr(logs[1]), script.SCRIPT  # repr: there may be nan
        text = (end.result['folder'] / 'log.csv').read_text()
        assert text.count('\n') == 4 and text.startswith('step,'), text

def test_resume_and_folders(tmp_path):
    """Every command trains in a folder of its own. The same command with --resume continues its own
    run, extends it, or starts one; without settings it is the newest run's. Other data under the
    same name are refused."""
    flags, out = tiny(gpt, tmp_path, *CPU), ['--out-dir', tmp_path / 'out']
    first = done(gpt, '--resume', *flags)['folder']
    config = json.loads((first / 'config.json').read_text())
    assert config['max_iters'] == 6 and config['learning_rate'] == gpt.Config().learning_rate
    second = done(gpt, *flags)['folder']
    assert second == first.with_name(first.name + '-2')
    again = run(gpt, '--resume', *flags)  # the newest of its settings; a cell, run again
    assert 'from step 6' in again.out and again.result['folder'] == second, again
    longer = run(gpt, '--resume', *flags, '--max-iters', 9)
    assert longer.result['step'] == 9 and re.search('from step 6(?s:.*)9/9 .100', longer.out)
    for words, *more in ((['--max-iters 6', 'step 9'], '--resume'),
                         (['--batch-size 4', 'stays'], '--resume', '--batch-size', 2,
                          '--folder', second),
                         (['--folder'], '--folder', second),
                         (['not a run'], '--resume', '--folder', tmp_path / 'nowhere')):
        refuse(gpt, words, *flags, *more)
    other = done(gpt, '--resume', *flags, '--seed', 5, '--max-iters', 3,
                 '--log-interval', 0)['folder']
    assert other.name == first.name.replace('1337', '5'), other  # none had this seed
    newest = run(gpt, '--resume', *out, '--max-iters', 6)
    assert newest.result['folder'] == other and 'from step 3' in newest.out, newest.out
    own = run(gpt, '--resume', *flags, '--max-iters', 9)
    assert own.result['folder'] == second and 'from step 9' in own.out, own.out
    with patch.object(gpt, 'RANK', 1), patch.object(gpt, 'train', side_effect=KeyboardInterrupt):
        assert run(gpt, *flags).code == 130  # a process that has no folder
    with patch.object(gpt, 'train', side_effect=KeyboardInterrupt):
        assert run(gpt, *flags).out == '\nstopped\n'  # and nothing to continue from

    def folder(*words):
        return done(gpt, *words, *out)['folder']
    softmax = ['--attention', 'softmax']
    slow = folder('--resume', *flags, *softmax, '--learning-rate', 1e-4)
    assert folder('--resume', *flags, '--max-iters', 9) == second  # not softmax's
    soft = folder('--resume', *flags, *softmax)
    assert soft != slow, soft
    os.utime(slow / 'ckpt.pt')  # the newest
    assert folder('--resume', *flags, *softmax) == folder('--resume') == soft
    told = run(gpt, 'sample', '--learning-rate', 1e-4, *out).out
    assert f'run     {slow}' in told, told
    refuse(gpt, ['train first'], 'sample', '--seed', 3, *out)
    saved = load(second / 'ckpt.pt')
    saved['progress'] = 9, 1e9, *saved['progress'][2:]  # seconds, on a slow machine
    torch.save(saved, second / 'ckpt.pt')
    told = run(gpt, '--resume', *flags, '--max-iters', 12).out
    assert float(re.search(r'10/12 .*?(\d+) ms a step', told)[1]) < 1e6, told
    assert '--max-iters=12 ' in told.splitlines()[-1], told
    config = json.loads((second / 'config.json').read_text())
    del config['top_k']  # a run of an older script
    (second / 'config.json').write_text(json.dumps(config))
    assert folder('--resume', *flags, '--max-iters', 12) == second
    text = (tmp_path / 'text.txt').read_text()
    for changed, word in ((text[:-9], 'train was'), ('T' + text[1:], 'checksum was')):
        (tmp_path / 'text.txt').write_text(changed)
        refuse(gpt, ['other data', word], *flags, '--resume', '--max-iters', 12)

def test_prefetch():
    """The next batch is made while the step runs, never more than one, and errors come through."""
    made = []
    def make(step):
        made.append(step)
        return [(torch.tensor(1 / (9 - step)), step)]
    batches = gpt.prefetch(make, range(5, 12), 'meta')
    for step in range(5, 9):
        (x, number), = next(batches)
        assert x.is_meta and number == step, (x, number)
        until = time.time() + 5
        while len(made) < step - 3 and time.time() < until:
            time.sleep(0.001)
        assert made == [*range(5, step + 2)], (step, made)
    with unittest.TestCase().assertRaises(ZeroDivisionError):
        next(batches)
    few = gpt.prefetch(lambda step: [(step,)], range(3), 'cpu')
    assert [*few] == [[[0]], [[1]], [[2]]]

def test_float16_starts_with_gradients():
    """In owt-124m, at most a few gradients of the 50,304 logits are zeros at the start."""
    c, n = gpt.Config(**gpt.PRESETS['owt-124m']), 8  # of the micro-batch's tokens
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 768, generator=generator).half()
    weight = torch.empty(c.vocab_size, 768).normal_(0, 0.02, generator=generator).half()
    logits = (hidden @ weight.T).requires_grad_()
    loss = F.cross_entropy(logits.float(), torch.arange(n), reduction='sum')
    _, scaler = gpt.mixed_precision(torch.device('cpu'), torch.float16)
    assert not gpt.mixed_precision(torch.device('cpu'), torch.bfloat16)[1].is_enabled()
    scaler.scale(loss / (c.batch_size * c.block_size * c.grad_accum_steps)).backward()
    zeros = (logits.grad == 0).float().mean().item()
    assert zeros < 0.01, zeros

def test_not_finite(tmp_path):
    """A loss or gradient that is not finite stops in that step with one line, and the checkpoint is
    from before; in float16 a gradient skips that step alone."""
    def break_step(bad, *numbers):
        """A patch of loss_of, for these steps of training."""
        loss_of, steps = script.loss_of, itertools.count()
        def broken(model, batch, c):
            loss = loss_of(model, batch, c)
            if model.training and next(steps) in numbers:
                if bad == 'loss':
                    return loss * math.nan
                loss.register_hook(lambda gradient: gradient * math.inf)
            return loss
        return patch.object(script, 'loss_of', broken)
    for script in SCRIPTS:
        flags = short_run(script, tmp_path)
        for bad, words in (('loss', 'loss nan'), ('gradient', 'gradient norm')):
            with break_step(bad, 4):
                refuse(script, [words, 'step 4'], *flags, '--out-dir', tmp_path / bad)
            assert checkpoint(script, tmp_path / bad)['progress'][0] == 3
    script, half = gpt, tiny(gpt, tmp_path, *CPU, '--dtype', 'float16')
    with break_step('gradient', 4):
        end = done(gpt, *half)
    assert end['step'] == 6 and math.isfinite(end['loss']), end
    assert checkpoint(gpt, tmp_path / 'out')['scaler']['scale'] == 2 ** 15  # halved once
    with break_step('gradient', *range(99)):  # the scale falls to 1
        refuse(gpt, ['gradient norm', 'step 16'], *half, '--max-iters', 20)
    with patch.object(gpt, 'bigram_loss', lambda data: 0):  # the step is finite, its outcome not
        refuse(gpt, ['validation loss nan', 'step 1'], *half[:-1], 'float32', '--max-iters', 1,
               '--warmup-iters', 0, '--learning-rate', 4e9, '--eval-interval', 1)

def test_killed(tmp_path):
    """SIGKILL at any moment, then --resume: the weights of a run that nobody disturbed."""
    flags = tiny(gpt, tmp_path, *CPU, '--max-iters', 120, '--eval-interval', 20)
    out = tmp_path / 'part'
    part = subprocess.Popen([sys.executable, gpt.__file__, *flags, '--out-dir', str(out)],
                            stdout=subprocess.DEVNULL)
    while not list(out.glob('*/*/ckpt.pt')):
        assert part.poll() is None
        time.sleep(0.01)
    time.sleep(0.15)
    part.kill()
    assert part.wait() == -signal.SIGKILL and checkpoint(gpt, out)['progress'][0] < 120
    for more in ['--resume', '--out-dir', out], []:
        done(gpt, *flags, *more)
    assert same(checkpoint(gpt, out)['model'], checkpoint(gpt, tmp_path / 'out')['model'])

TWO_PROCESSES = '''
import importlib, json, os, sys
sys.modules['matplotlib'] = None  # no pictures
for name, argv in json.loads(sys.argv[1]):
    os.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + 1)  # each meets at its own
    importlib.import_module(name).main(argv)
'''

@loopback()
def test_two_processes(tmp_path):
    """Two processes share 2 or 4 micro-batches and end with the weights of one, also where they
    have resumed."""
    commands, both = [], tmp_path / 'both'
    for script in SCRIPTS:
        flags = short_run(script, tmp_path, *CPU, '--warmup-iters', 3, '--batch-size', 2,
                          '--grad-accum-steps', 4 if script is gpt else 2)
        flags += ['--mix'] * (script is vit)
        done(script, *flags)
        flags += '--out-dir', str(both)
        if script is gpt:
            commands.append((script.SCRIPT, [*flags, '--max-iters', '3']))
        commands.append((script.SCRIPT, ['--resume', *flags]))
    command = [sys.executable, '-c', TWO_PROCESSES, json.dumps(commands)]
    env = dict(os.environ, PYTHONPATH=str(HERE), WORLD_SIZE='2',  # as torchrun sets them
               MASTER_ADDR='127.0.0.1', MASTER_PORT=str(20000 + os.getpid() % 10000))
    two = [subprocess.Popen(command, env={**env, 'RANK': rank}, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for rank in '01']
    try:
        for process in two:
            _, err = process.communicate(timeout=200)
            assert process.returncode == 0, err
    finally:
        for process in two:
            process.kill()
    for script in SCRIPTS:
        got, want = checkpoint(script, both), checkpoint(script, tmp_path / 'out')
        assert got['progress'][0] == 6
        for a, b in zip(got['progress'][2][1:], want['progress'][2][1:]):  # of the logs
            assert abs(a['loss'] - b['loss']) < 1e-4 * (0.01 + b['loss']), (a, b)
        for name, p in got['model'].items():  # Adam makes steps of rounding, too
            close(p, want['model'][name], 1e-3)

VARIANTS = {  # settings of every variant of each script
    gpt: [dict(attention=name, arch=arch, zero_diag=arch == 'rotary', n_layer=1)
          for name in gpt.ATTENTION for arch in ('gpt2', 'rotary')],
    vit: [dict(attention=name, zero_diag=zero_diag, depth=1) for name in vit.ATTENTION
          for zero_diag in (False, True)]
         + [dict(model=name) for name in ('deit-small', 'deit-small-local')]
         + [dict(optimizer='set-adam', mix=True)],
    detr: [dict(self_attention=a, cross_attention=a, iterations=2)
           for a in detr.ATTENTION if a != 'l2']
          + [dict(cross_attention='l2', **more) for more in
             ({}, dict(random_tokens=3), dict(solve_over='value'))],
    mask: [dict(masks=masks) for masks in ('window:4+sinks:1', 'last5', 'offset:1', 'all')]
          + [dict(masks='last5', reading=reading) for reading in mask.READINGS]}

def test_meta_device(tmp_path):
    """A training step of every variant where tensors have no values: one that was left on the CPU
    raises. (Not as an index or a mask: those need a GPU.)"""
    pairs = torch.zeros(4, 1, dtype=torch.long, device='meta')
    no_autocast = patch('torch.autocast', lambda *a, **k: contextlib.nullcontext())
    with patch.object(detr, 'hungarian_match', lambda *_: pairs), no_autocast, QUIET:
        for script in SCRIPTS:
            _, c = script.parse(short_run(script, tmp_path, *CPU))
            data = script.load_data(c)
            for settings in VARIANTS[script]:
                own = dataclasses.replace(c, **settings)
                model = script.make_model(own, data).to('meta').train()
                batch = script.get_batch(data, own, 0, 0, 'meta')
                inputs = batch[:2] if script is detr else batch  # its targets go there together
                for x in filter(torch.is_tensor, torch.utils._pytree.tree_leaves(inputs)):
                    assert x.is_meta, f'{script.SCRIPT} {settings}: a batch on {x.device}'
                optimizer = script.make_optimizer(model, own)
                try:
                    script.loss_of(model, batch, own).backward()
                    optimizer.step()
                except RuntimeError as error:
                    raise AssertionError(f'{script.SCRIPT} {settings}: {error}')

def test_one_graph(tmp_path):
    """--compile makes one graph of each script's model. DETR's random tokens need several."""
    for script in (gpt, vit, mask, detr):
        with QUIET:
            _, c = script.parse(short_run(script, tmp_path, *CPU))
            data = script.load_data(c)
            model, batch = script.make_model(c, data), script.get_batch(data, c, 0, 0, 'cpu')
        inputs = batch[:2] if script in (gpt, detr) else batch[:1]
        found = torch._dynamo.explain(model)(*inputs)
        assert found.graph_count <= 1, (script.SCRIPT, found.break_reasons)
    k = tokens(5)[0]
    twice = lambda k: sum(detr.dictionary(k, no_padding(k), random_tokens=n) for n in (3, 3))
    close(torch.compile(twice, backend='aot_eager')(k), twice(k), 0)

@unittest.skipUnless(DEVICE.startswith('cuda'), 'no CUDA GPU is here')
def test_cuda(tmp_path):
    """Each script in float16 and bfloat16, and a run begun on a CPU."""
    for script in SCRIPTS:
        begun = short_run(script, tmp_path, '--max-iters', 9)
        with interrupted(script, 5):
            run(script, *begun, *CPU)
        end = run(script, '--resume', *begun)
        assert end.code == 0 and 'from step' in end.out, (end.out, end.err)
        for dtype in ('float16', 'bfloat16'):
            end = run(script, *begun, '--dtype', dtype)
            assert end.code == 0 and math.isfinite(end.result['loss']), (end.out, end.err)

# ------------------------------------ mistakes ------------------------------------
def test_mistakes(tmp_path):
    """The likely ones: one line, exit code 2, nothing lost. Block `runs` answers the first. A
    recipe without its data names the command that makes them; nothing else is trained."""
    flags = tiny(gpt, tmp_path)
    for words, *mistake in (
            (['no run'], 'sample', *flags), (['--sed'], *flags, '--sed', '3'), (['trane'], 'trane'),
            (['dtype', 'float32'], '--dtype', 'float8'),
            *(([name, 'must be from'], '--' + name, value) for name, value in (
                ('max_iters', -1), ('learning_rate', 'nan'), ('learning_rate', 1e34),
                ('seed', 20261105123456))),
            *(([f'--device {name}'], *flags, '--device', name)
              for name in ('gpu', 'CPU', '0'))):
        refuse(gpt, words, *mistake)
    with patch.object(gpt, 'WORLD', 4):
        refuse(gpt, ['4 processes', '6 micro-batches', '-steps 8 --batch-size 3'],
               *flags, '--grad-accum-steps', 6)
    with (patch.object(gpt, 'WORLD', 2), patch('torch.cuda.is_available', lambda: True),
          patch('torch.distributed.init_process_group', gpt.fail)):  # its argument is the backend
        refuse(gpt, ['error: gloo'], *flags, *CPU, '--grad-accum-steps', 2)
    with patch.object(gpt, 'loss_of', side_effect=torch.OutOfMemoryError('memory')):
        refuse(gpt, ['out of memory', '--batch-size'], *flags)
    for script, preset, name, *mistakes in (
            (gpt, 'owt-124m', 'openwebtext', '--block-size 4000', '--n-embd 18',
             '--vocab-size 100'),
            (vit, 'cifar-paper', 'cifar10', '--patch-size 3', '--model vit'),
            (detr, 'paper', 'coco', '--self-attention l2', '--power 2', '--nheads 5'),
            (mask, 'report004', 'wikitext', '--masks nonsense', "--masks ''", '--masks window',
             '--masks window:0', '--n-head 3', '--vocab-size 100', '--block-size 5000')):
        flags = tiny(script, tmp_path)
        for mistake in map(shlex.split, mistakes):  # each is answered with the first flag's name
            refuse(script, mistake[:1], *flags, *mistake)
        refuse(script, ['none.pt'], *flags, '--init', tmp_path / 'none.pt')
        refuse(script, ['no-such-data', 'prepare_data.py'], *flags, '--data', 'no-such-data')
        with patch('pathlib.Path.is_dir', lambda path: False):
            refuse(script, ['prepare_data.py', name], '--preset', preset, *CPU)

def test_mistakes_lose_no_checkpoint(tmp_path):
    """A full disk leaves the older file; one that is damaged, foreign or a trap is refused."""
    class Trap:
        """Unpickled it would make a folder."""
        def __reduce__(self):
            return os.mkdir, ('trapped',)

    def full(path, data):
        """Path.write_bytes on a disk that has room for half of the data."""
        with open(path, 'wb') as file:
            file.write(data[:len(data) // 2])
        raise OSError('No space left on device')

    flags = tiny(gpt, tmp_path)
    folder = done(gpt, *flags)['folder']
    file, saved = folder / 'ckpt.pt', {p: p.read_bytes() for p in folder.glob('*.pt')}
    with patch('pathlib.Path.write_bytes', full):
        refuse(gpt, ['No space left on device'], '--resume', *flags, '--max-iters', 9)
    with patch('pathlib.Path.write_text', lambda path, text, _: full(path, text.encode())):
        refuse(gpt, ['No space left on device'], '--resume', *flags, '--max-iters', 9)
    assert json.loads((folder / 'config.json').read_text())['max_iters'] == 9
    assert all(p.read_bytes() == before for p, before in saved.items())
    for damage in (b'', saved[file][:-100], dict(model=Trap())):
        if type(damage) is bytes:
            file.write_bytes(damage)
        else:
            torch.save(damage, file)
        before = file.read_bytes()
        refuse(gpt, ['ckpt.pt'], '--resume', *flags)
        assert file.read_bytes() == before and not os.path.exists('trapped')

# ------------------------------------ experiments/compare.py ------------------------------------
def fake(figure):
    """A patch of train and load_data: a run ends at once, with figure(c). And the runs."""
    def train(c, folder=None, data=None):
        value = figure(c)
        runs.append(c)
        return torch.nn.Linear(2, 2), [dict(step=3, seconds=0.5, val_loss=9.0, loss=3.0),
                                       dict(step=6, seconds=1.0, val_loss=value, loss=value)]
    runs, data = [], types.SimpleNamespace(facts=dict(train=9))
    return patch.multiple(gpt, train=train, load_data=lambda c: data), runs

@wants('scipy')
def test_compare_at_best(tmp_path):
    """Each at its best rate: one run diverges, one best lies at the end, both are said; the csv
    gives the same table; a second time nothing is trained."""
    best = {'softmax': 4e-3, 'belief': 1e-3}
    def figure(c):
        if c.learning_rate == 8e-3 and c.attention == 'belief':
            raise FloatingPointError('loss nan')
        gap = abs(math.log2(c.learning_rate / best[c.attention]))
        return 2 + 0.1 * gap - 0.02 * (c.attention == 'belief') + 0.001 * (c.seed % 3)
    patched, runs = fake(figure)
    tuned = ['attentionx_gpt', '--sweep', 'learning-rate=1e-3,2e-3,4e-3,8e-3', '--sweep',
             'attention=belief,softmax', '--seeds', '0,1', '--csv', tmp_path / 'a.csv',
             '--tune', 'learning_rate', '--test-seeds', '5,6,7']
    with patched:
        end = run(compare, *tuned)
        rows, out = end.result, end.out
        assert [row['case'] for row in rows] == ['4e-3 softmax', '1e-3 belief'], rows
        close([rows[0]['mean'], rows[1]['diff']], [2.001, -0.02], 1e-6)
        assert 'val_loss, seeds: 3' in out and '16 runs to do' in out and '6 runs to do' in out
        assert out.count('counts as worst: loss nan') == 2
        assert '0.008: inf x 2' in out and '1e-3 belief *' in out and '4e-3 softmax  ' in out, out
        assert len(runs) == 20, len(runs)
        assert done(compare, *tuned) == rows and len(runs) == 20, len(runs)
        both = run(compare, *tuned[:-2], '--csv', tmp_path / 'b.csv').out
        assert 'also judge' in both and 'also judge' not in out, both
    tables = out[out.index('\nval_loss by learning_rate'):].splitlines()
    again = 'attentionx_gpt', '--from-csv', tmp_path / 'a.csv', '--tune', 'learning_rate'
    found = run(compare, *again).out.splitlines()
    assert len(found) > 9 and set(found) <= set(tables), set(found) - set(tables)
    close(done(compare, *again, '--metric', 'mean_loss')[1]['diff'], -0.01, 1e-6)

@wants('scipy')
def test_compare_mistakes(tmp_path):
    file, text = tmp_path / 'a.csv', lambda name: tmp_path / f'{name}.csv'
    flags, read = ['attentionx_gpt', '--csv', file, '--seeds', '0'], ['--from-csv', file]
    record = HERE / 'experiments/runs'
    with fake(lambda c: 1.0)[0]:
        run(compare, *flags, '--sweep', 'gamma=2')
        for words, *more in (
                (['--sweep', 'FIELD'], '--sweep', 'nothing'),
                (['--nothing'], '--sweep', 'nothing=1'), (['--seeds'], '--sweep', 'seed=0,1'),
                (['same settings'], '--sweep', 'threads=1,2'), (['0-2'], '--seeds', '0-2'),
                (['without it'], '--resume'), (['--seeds 0,1'], '--seed=7'),
                (['--tune x'], *read, '--tune', 'x'), (['--test-seeds'], '--test-seeds', '1'),
                (['--tune', '--sweep'], '--tune', 'gamma'),
                (['no such file'], '--from-csv', text('none')),
                (['runs of attentionx_gpt'], '--from-csv', record / 'detr-cross.csv'),
                (['--csv', 'Is a directory'], '--sweep', 'gamma=4', '--csv', tmp_path),
                (['no such Python file'], '--with', tmp_path / 'none.py'),
                (['--attention', 'mine'], '--sweep', 'attention=mine'),
                (['--metric val_los'], *read, '--metric', 'val_los'),
                (['--against x'], *read, '--against', 'x'), (['two rows'], *read, file)):
            refuse(compare, words, *flags, *more)
        rows = file.read_text()
        text('excel').write_text('\ufeff' + rows.replace('True', 'TRUE').replace('False', 'FALSE'),
                                 'utf-8')
        again = run(compare, *flags, '--sweep', 'gamma=2', '--csv', text('excel'))
        assert ' 0 runs to do' in again.out, again
        with patch.object(compare, 'version', lambda script: 'another'):
            refuse(compare, ['another version', 'a.csv'], *flags, '--sweep', 'gamma=2')
        with patch.object(gpt, 'load_data', lambda c: types.SimpleNamespace(facts=dict(train=8))):
            refuse(compare, ['other data', 'a.csv'], *flags, '--sweep', 'gamma=2')
    for name, other in (('semicolons', rows.replace(',', ';')), ('cut', rows + 'x,judging,'),
                        ('empty', '')):
        text(name).write_text(other)
        refuse(compare, [f'{name}.csv', 'commas'], 'attentionx_gpt', '--from-csv', text(name))

@wants('scipy')
def test_compare_intervals(tmp_path):
    """Paired by seed, and wider by the number of rows tested; one seed has none. Softmax comes
    first, wherever it was named, or the row --against. (The record's tables hold Welch's.)"""
    shifts = {'attentionx': (1, 2, 3) * 2, 'belief': (1, 1.1, 1.2) * 2, 'softmax': [0] * 6}
    patched, _ = fake(lambda c: 2.0 + shifts[c.attention][c.seed] + 10 * c.seed)
    flags = ['attentionx_gpt', '--sweep', 'attention=' + ','.join(shifts), '--csv', tmp_path / 'a']
    with patched:
        end = run(compare, *flags)
        one = run(compare, *flags, '--seeds', '0')
        done(compare, *flags, '--max-iters', 7, '--seeds', '3,4,5')
        refuse(compare, ['softmax differ in max_iters'], flags[0], '--from-csv', tmp_path / 'a')
        against = done(compare, *flags, '--against', 'belief')
    rows = end.result
    assert 'or one seed): attentionx\n' in end.out, end.out  # and not belief
    assert [row['case'] for row in rows + against][::3] == ['softmax', 'belief'], rows
    for row, mean, sd in zip(rows[1:], (2, 1.1), (1, 0.1)):
        half = 6.205 * sd / 3 ** 0.5  # t at 1 - .05 / 2
        close([row['diff'], row['interval']], [mean, half], 2e-3)
    assert 'nan' not in one.out and '+1.0000                       -' in one.out, one.out

@wants('scipy')
def test_compare_and_bench(tmp_path):
    """Each script's, once; what is in the csv is not trained again; a ratio above 1 is slower."""
    for script in SCRIPTS:
        flags = [script.SCRIPT, *short_run(script, tmp_path), '--sweep', 'learning_rate=1e-3,1e-2']
        rows = done(compare, *flags, '--seeds', '0,1')
        again = run(compare, *flags, '--seeds', '0,1')
        assert ' 0 runs to do' in again.out and repr(again.result) == repr(rows), again.out
        done(compare, *flags, '--seeds', '0', '--max-iters', 3)
        for kind, n in ('csv', 1), ('png', 2):
            found = [*tmp_path.glob(f'out/{script.SCRIPT}/compare-*.{kind}')]
            assert len(found) == n, found
        bench = run(compare, *flags, '--bench', '--rounds', 1, '--csv', tmp_path / 'bench.csv')
        for what in 'training step', 'inference':
            first, second = [row for row in bench.result if row['role'] == what]
            close(second['ratio'], second['ms'] / first['ms'], 1e-9)
            assert '{ms:9.1f} ms{per_second:12,.0f}{ratio:8.3f} ('.format(**second) in bench.out
        shown = run(compare, script.SCRIPT, '--bench', '--from-csv', tmp_path / 'bench.csv')
        assert bench.out.endswith(shown.out), (bench.out, shown.out)
        (tmp_path / 'bench.csv').unlink()

@wants('scipy')
def test_bench_times_the_forward_pass(tmp_path):
    """Inference is the model's forward pass, and nothing else, by a clock that only these move."""
    clock = [0.0]
    def takes(seconds, whole):
        def slower(*inputs):
            clock[0] += seconds
            return whole(*inputs)
        return slower
    flags = ['attentionx_gpt', *tiny(gpt, tmp_path), '--bench', '--rounds', 1, '--sweep',
             'attention=softmax,belief']
    with (patch.object(time, 'perf_counter', lambda: clock[0]),
          patch.object(gpt.GPT, 'forward', takes(1, gpt.GPT.forward)),
          patch.multiple(gpt, get_batch=takes(100, gpt.get_batch), loss_of=takes(10, gpt.loss_of))):
        times = {row['role']: row['ms'] for row in done(compare, *flags)}
    assert times == {'training step': 11000, 'inference': 1000}, times

@wants('scipy')
def test_compare_draws(tmp_path):
    """Both figures of every case over steps and over seconds are those of the logs: a mean and a
    range over the seeds; the baseline is black. The last line is the picture's name."""
    file, drawn = tmp_path / 'a.csv', []
    end = run(compare, 'attentionx_gpt', *tiny(gpt, tmp_path), '--seeds', '0,1', '--csv', file,
              '--sweep', 'attention=belief,softmax', report=contextlib.nullcontext)
    assert end.out.splitlines()[-1] == str(tmp_path / 'a.png')
    assert (tmp_path / 'a.png').stat().st_size > 20000
    def plot(ax, x, y, *_, color, label, **__):
        drawn.append((x, y, color, label))
    def fill_between(ax, x, low, high, **_):
        drawn.append((low, high))
    with patch.multiple('matplotlib.axes.Axes', plot=plot, fill_between=fill_between):
        again = run(compare, 'attentionx_gpt', '--from-csv', file)
    assert again.out.splitlines()[-1] == str(tmp_path / 'a.png')
    logs = {'softmax': [], 'belief': []}
    for row in compare.read_rows(file):
        logs[row['case']].append(compare.read_rows(tmp_path / f'a.logs/{row["log"]}/log.csv')[1:])
    curves = itertools.product(('loss', 'val_loss'), ('step', 'seconds'), logs)
    for (figure, x, case), line, band in zip(curves, drawn[::2], drawn[1::2], strict=True):
        across, mean, colour, label = line
        assert (label, colour == '#000000') == (compare.VARIANTS[case][0], case == 'softmax')
        rows = [*zip(*logs[case])]  # of both seeds, step by step
        close(across, [(a[x] + b[x]) / 2 for a, b in rows], 1e-6)
        close(mean, [(a[figure] + b[figure]) / 2 for a, b in rows], 1e-6)
        for edge, of in zip(band, (min, max)):
            close(edge, [of(a[figure], b[figure]) for a, b in rows], 1e-6)
    shutil.rmtree(tmp_path / 'a.logs')
    assert '.png' not in run(compare, 'attentionx_gpt', '--from-csv', file).out

@wants('scipy')
def test_compare_with_a_file(tmp_path):
    """--with adds a variant, in other processes too; its version stands in the rows. It is loaded
    once. Without a training step there is no picture."""
    mine = tmp_path / 'mine.py'
    text = ("import attentionx_gpt as gpt\ngpt.ATTENTION['mine'] = lambda mh, v, gamma: mh - v\n"
            "gpt.loaded = getattr(gpt, 'loaded', 0) + 1\n")
    mine.write_text(text)
    flags = ['attentionx_gpt', *tiny(gpt, tmp_path, *CPU), '--with', mine, '--seeds', '0',
             '--csv', tmp_path / 'a.csv', '--sweep']
    with patch.dict(gpt.ATTENTION):
        done(compare, *flags, 'attention=softmax')
        assert gpt.loaded == 1, gpt.loaded
        flags.append('attention=softmax,mine')
        rows = done(compare, *flags, '--workers', 2)  # only one run is left
        assert [row['case'] for row in rows] == ['softmax', 'mine'] and rows[1]['diff'] != 0
        for row in compare.read_rows(tmp_path / 'a.csv'):
            assert (row['script'], row['with']) == (compare.blob(gpt.__file__), compare.blob(mine))
        mine.write_text(text + '# edited\n')
        refuse(compare, ['another version'], *flags)
        flags[flags.index('--csv') + 1] = tmp_path / 'b.csv'
        assert not run(compare, *flags, '--max-iters', 0).out.endswith('.png\n')

@wants('scipy')
def test_memory_by_length(tmp_path):
    """Only eager attention's grows as T squared; the table, the csv and the picture agree. Blocks
    need far less for a training step, too."""
    memory, figures = [importlib.import_module(name) for name in ('memory', 'figures')]
    with (patch.object(figures, 'HERE', tmp_path), patch.object(figures, 'save') as save,
          contextlib.redirect_stdout(io.StringIO()) as out):
        memory.lengths('--n-head 1 --n-embd 8 --block-size 512 --device cpu'.split())
        found = memory.masks('--n-layer 1 --n-head 4 --n-embd 64 --masks window:64+sinks:4 '
                             '--block-size 512 --device cpu'.split())
        memory.lasso(queries=3, tokens=9)
    rows = compare.read_rows(tmp_path / 'runs/lengths.csv')
    assert [row['tokens'] for row in rows[::3]] == [32, 64, 128, 256, 512], rows
    last = next(line for line in out.getvalue().splitlines() if line.startswith('   512'))
    assert last.split()[1:7] == [f'{row[field]:,.1f}' for field in ('mib', 'ms')
                                 for row in rows[-3:]], last
    for i, kind in enumerate(('eager', 'fused', 'masks')):
        growth = rows[i - 3]['mib'] / rows[i - 6]['mib']
        assert abs(growth - (4 if kind == 'eager' else 2)) < 0.3, (kind, growth)
        for ax, field in zip(save.call_args[0][0].axes, ('ms', 'mib'), strict=True):
            assert list(ax.lines[i].get_ydata()) == [row[field] for row in rows[i::3]], kind
    eager, fused, blocks = [mib['training step'] for mib in found.values()]
    assert 8 < eager < 32 and max(fused, blocks) < 0.5 * eager, (eager, fused, blocks)

# ------------------------------------ runner ------------------------------------
def main(words):
    if '--device' in words:  # read above
        at = words.index('--device')
        words = words[:at] + words[at + 2:]
    found = dict(ok=0, FAIL=0, skip=0)
    for name, test in [*globals().items()]:
        if not name.startswith('test_') or words and not any(word in name for word in words):
            continue
        clock, how = time.perf_counter(), 'ok'
        try:
            with tempfile.TemporaryDirectory() as path:  # as in pytest
                takes_one = 'tmp_path' in inspect.signature(test).parameters
                test(*[pathlib.Path(path)] * takes_one)
        except unittest.SkipTest as reason:
            how = 'skip'
            print(reason)
        except (Exception, SystemExit):
            how = 'FAIL'
            traceback.print_exc()
        found[how] += 1
        print(f'{how:6}{name} ({time.perf_counter() - clock:.1f} s)', flush=True)
    print('{ok} passed, {FAIL} failed, {skip} skipped'.format(**found))
    return found['FAIL'] > 0

if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
