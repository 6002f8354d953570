"""Every test of the repository, on CPU and, where there is one, on a GPU.

    python test_all.py                 # all of them, two minutes
    python test_all.py belief resume   # those with one of these words in their name
    python test_all.py --soak          # kills and full disks by the dozen instead, ten minutes
    pytest test_all.py                 # the same tests, if you have pytest

No network, no files but this repository's, nothing written outside temporary folders.
"""
import ast
import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import http.server
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import types
import unittest
import unittest.mock
import zipfile
import zlib

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
SCRIPTS = [gpt, vit, detr, mask]
TEXT = 'the quick brown fox jumps over the lazy dog; ' * 60
SHORT = ['--preset', 'tiny', '--max-iters', 6, '--eval-interval', 3, '--log-interval', 1,
         '--warmup-iters', 2, '--batch-size', 4, '--device', 'cpu']
SMALL_GPT = ['--n-layer', 2, '--n-head', 2, '--n-embd', 16, '--block-size', 16, '--eval-rows', 8,
             '--new-tokens', 4]
SMALL = {  # flags of a run that takes a second
    gpt: SHORT + SMALL_GPT,
    detr: SHORT + ['--hidden-dim', 16, '--nheads', 2, '--enc-layers', 1, '--dec-layers', 2,
                   '--dim-feedforward', 24, '--num-queries', 5, '--stride', 16,
                   '--image-size', 32, '--iterations', 5, '--eval-rows', 8],
    mask: SHORT + SMALL_GPT + ['--masks', 'window:4+sinks:1', '--teacher-iters', 5],
}

# ------------------------------------ helpers ------------------------------------
def tiny(script, path, *more):
    """Flags of a run of a second, in path / 'out', on a small text where it is about text."""
    if script is vit:
        return vit_tiny(path, *more)
    flags = SMALL[script] + ['--out-dir', path / 'out']
    if script in (gpt, mask):
        (path / 'text.txt').write_text(TEXT)
        flags += ['--data', path / 'text.txt']
    return [*flags, *more]

def run(*argv, script=gpt):
    """script.main(argv) in this process -> exit code, stdout, stderr, result."""
    out, err = io.StringIO(), io.StringIO()
    code, result = 0, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = script.main([str(word) for word in argv])
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue(), result

def refuse(words, *argv, script=gpt):
    """The command must end with code 2 and one line that has these words."""
    code, _, err, _ = run(*argv, script=script)
    assert code == 2 and err.count('\n') == 1 and 'Traceback' not in err, (argv, code, err)
    assert all(word in err for word in words), (argv, words, err)

@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield pathlib.Path(path)

def close(a, b, tolerance):
    """The largest difference is at most tolerance; a NaN is more."""
    worst = (torch.as_tensor(a) - torch.as_tensor(b)).abs().max().item()
    assert worst <= tolerance, worst

def same(a, b):
    """Two state dicts, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

def qkv(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return [draw().to(dtype) for _ in range(3)]

def checkpoint(path):
    """The only ckpt.pt below path."""
    found, = path.glob('**/ckpt.pt')
    return torch.load(found, weights_only=True)

# ------------------------------------ attentionx_gpt.py ------------------------------------
def gpt_model(**settings):
    small = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=40)
    net = gpt.GPT(gpt.Config(**{**small, **settings})).double().eval()
    for p in net.parameters():
        p.data.mul_(6 if p.dim() > 1 else 1)  # attention is far from uniform
    return net

def gpt_ids(B, T, V=40):
    return (torch.arange(B * T) * 7919 % V).view(B, T)

def gpt_method(name, q, k, v, gamma=None, zero_diag=False, script=gpt):
    """A variant on q, k, v (B, nh, T, hs) -> (parts, B, T, nh, hs): belief-star has two parts."""
    c = script.Config(attention=name, gamma=gamma, zero_diag=zero_diag)
    mh = script.multi_head(q, k, v, zero_diag)
    out = script.ATTENTION[name](mh, v.transpose(1, 2), script.default_gamma(c))
    return torch.stack(out if type(out) is tuple else [out])

def gpt_weights(q, k, zero_diag=False, script=gpt):
    e = torch.exp(q @ k.mT / q.size(3) ** 0.5) * (1 - zero_diag * torch.eye(q.size(2)))
    e = e.tril() if script is gpt else e
    return e / e.sum(-1, keepdim=True).clamp_min(1e-99)  # (B, nh, T, T)

def gpt_slow(name, q, k, v, gamma, zero_diag, script=gpt):  # the formulas -> as gpt_method
    MH, V = (x.transpose(1, 2) for x in (gpt_weights(q, k, zero_diag, script) @ v, v))
    def rest(dims):
        alpha = torch.einsum(f'bthd,bthd->{dims}', MH, V) / torch.einsum(f'bthd,bthd->{dims}', V, V)
        return MH - torch.einsum(f'{dims},bthd->bthd', alpha.nan_to_num(), V)
    return torch.stack({
        'softmax': [MH], 'attentionx': [V - gamma * MH], 'attentionx-v1': [gamma * V - MH],
        'belief': [rest('bt')], 'belief-head': [rest('bth')], 'softmax-scaled': [gamma * MH],
        'belief-star': [rest('bt'), rest('bth')], 'value-skip': [MH + V]}[name])

def test_gpt_vit_formulas():
    """In every precision and size, also where V is 0 or ||V||^2 overflows float16."""
    for name, *more in itertools.product(gpt.ATTENTION, (False, True), (gpt, vit)):
        gamma = 0.3 if name == 'attentionx-v1' else 1.7
        f = lambda *x: gpt_method(name, *x, gamma, *more)
        assert torch.autograd.gradcheck(f, [x.requires_grad_() for x in qkv(1, 2, 2, 2)])
        for dtype, scale, bound in ((torch.float64, 1e-8, 1e-12), (torch.float32, 1e4, 1e-5),
                                    (torch.float16, 30, 4e-3), (torch.bfloat16, 30, 3e-2)):
            q, k, v = (x.to(dtype) for x in qkv(2, 3, 5, 64))
            v = (v * scale * (torch.arange(5) != 3)[:, None]).requires_grad_()
            got = f(q, k, v)
            got.sum().backward()
            assert got.dtype == dtype and v.grad.isfinite().all()
            want = gpt_slow(name, q.double(), k.double(), v.double(), gamma, *more)
            close(got.double() / want.abs().max(), want / want.abs().max(), bound)

def test_gpt_identities():
    q, k, v = qkv(2, 3, 6, 4)
    f = lambda name, *more: gpt_method(name, q, k, v, *more)[0]  # (B, T, nh, hs)
    # the papers' two versions are one, at another scale
    for g in (0.4, 1.0):
        close(f('attentionx-v1', g), g * f('attentionx', 1 / g), 1e-14)
    # a zero diagonal makes Phi longer, by 1 / (1 - p_kk)  [AX2 Eq. 13]
    shrink = 1 - gpt_weights(q, k).diagonal(dim1=2, dim2=3).mT[..., None]  # (B, T, nh, 1)
    close(f('attentionx', 1.0)[:, 1:], (shrink * f('attentionx', 1.0, True))[:, 1:], 1e-13)
    # Delta is no longer than MH, and nothing for a token that has only itself  [BF Eq. 11]
    star = gpt_method('belief-star', q, k, v)  # (2, B, T, nh, hs)
    close(star[:, :, 0], 0, 1e-14)
    delta, delta_s, mh = (x.flatten(2).norm(dim=-1) for x in (*star, f('softmax')))
    assert (delta_s <= delta + 1e-12).all() and (delta <= mh + 1e-12).all()
    # gamma by default  [AX2 Sec. 3.2]
    for name, zero_diag, gamma in (('', False, 3.0), ('', True, 1.0), ('-v1', True, 0.5)):
        close(f('attentionx' + name, None, zero_diag), f('attentionx' + name, gamma, zero_diag), 0)

def test_gpt_causality_and_cache():
    """What changes at token 7 shows only after it; cached generation is that of whole passes."""
    idx = gpt_ids(2, 12)
    other = idx.roll(1, 0).where(torch.arange(12) == 7, idx)
    for kind in itertools.product(gpt.ATTENTION, ('gpt2', 'rotary'), (False, True)):
        net = gpt_model(**dict(zip(('attention', 'arch', 'zero_diag'), kind)))
        a, b = net(idx, idx)[0], net(other, idx)[0]
        close(a[:, :7], b[:, :7], 0)
        assert (a[:, 8:] - b[:, 8:]).abs().amax(-1).min() > 1e-6, kind
        text = net.generate(idx[:, :1], 18, temperature=0)
        for t in (1, 2, 12, 16, 17, 18):
            assert torch.equal(net(text[:, max(0, t - 16):t])[0].argmax(-1), text[:, [t]]), kind

def test_gpt_x_transformers():
    """Another's belief-star, but for its projection, which mixes all tokens: ours in its place."""
    try:
        from x_transformers import x_transformers
    except ImportError:
        raise unittest.SkipTest('x-transformers is not installed')
    project = lambda x, y: x - (x * y).sum(-1, True) / (y * y).sum(-1, True) * y
    theirs = x_transformers.Attention(
        16, dim_head=4, heads=4, causal=True, flash=False, orthog_projected_values=True,
        orthog_projected_values_per_head=True).double()
    ours = gpt_model(attention='belief-star', n_head=4).transformer.h[0].attn
    ours.c_attn.weight.data = torch.cat([x.weight for x in (theirs.to_q, theirs.to_k, theirs.to_v)])
    ours.c_proj.weight.data, ours.c_proj_s.weight.data = theirs.to_out.weight.data.split(16, dim=1)
    x, _, _ = qkv(2, 9, 16)
    with unittest.mock.patch.object(x_transformers, 'orthog_project', project):
        close(ours(x), theirs(x), 1e-6)

def test_pdmm():
    """[BF Eq. 1-5] on a ring, with f_i = (x - a_i)^2 / 2 and x_i = x_j: all find the mean of a."""
    a, rho, x = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0]).double(), 0.4, torch.zeros(5)
    own, residuals = {1: x, -1: x}, []  # multipliers to the next node and the last; A_ij = -A_ji
    for _ in range(150):
        theirs = {d: own[-d].roll(-d) for d in own}
        pull = sum(d * theirs[d] + rho * x.roll(-d) for d in own)
        x, old = (a + pull) / (1 + 2 * rho), x  # Eq. 2, for two neighbours
        residuals.append({d: d * old.roll(-d) - d * x for d in own})
        own = {d: theirs[d] + rho * residuals[-1][d] for d in own}  # Eq. 3
    close(x, a.mean(), 1e-9)
    total = sum(r[-1].roll(-1) if k % 2 else r[1] for k, r in enumerate(reversed(residuals)))
    close(own[1], rho * total, 1e-9)  # Eq. 5, which has i and j exchanged in its second sum

def test_gpt_golden():
    """With weights that follow from their names nanoGPT, and modded-nanogpt's `casted`, gave these:
    loss, mean |logit|, norm of the gradient, mean logarithm of each parameter's."""
    for settings, *want in ((dict(bias=True), 4.4611826, 0.8588198, 7.790621, -1.840933),
                            (dict(), 4.4296956, 0.8527315, 4.495669, -1.053446),
                            (dict(arch='rotary'), 4.6139193, 0.8249403, 4.576499, -0.358091),
                            (dict(arch='rotary', fp8_weights=True),
                             4.6812654, 0.8305371, 6.873915, -0.287804)):
        settings |= dict(attention='softmax', n_head=3, n_embd=24, block_size=24, vocab_size=61)
        net = gpt_model(**settings)
        for key, p in net.state_dict().items():
            w = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, p.shape)
            size = math.sqrt(3 * len(p) / p.numel()) * (4 if 'c_attn' in key else 1)
            w = w * size if p.dim() > 1 else 0.1 * w + key.endswith('weight')
            p.copy_(torch.from_numpy(w))
        logits, loss = net(gpt_ids(2, 24, 61), gpt_ids(2, 24, 61).roll(-1, 1))
        norms = torch.stack([g.norm() for g in torch.autograd.grad(loss, [*net.parameters()])])
        got = [loss, logits.abs().mean(), norms.norm(), norms.log().mean()]
        close(torch.stack(got), torch.tensor(want), 1e-5)

def test_gpt_recipes():
    names = ('n_layer n_head n_embd block_size beta1 beta2 weight_decay dropout bias data arch '
             'attention vocab_size fp8_weights max_iters learning_rate schedule warmup_iters '
             'warmdown_iters grad_clip units_per_step').split()
    with torch.device('meta'):
        for preset, size, early, last, own in (
                ('owt-124m', 124_373_760, 100 / 2001, 0.1,
                 'gpt2 attentionx 50304 False 600000 0.0006 cosine 2000 0 1.0 491520'),
                ('belief-124m', 123_532_032, 100 / 256, 1 / 2048,
                 'rotary belief 50257 True 9536 0.0018 trapezoid 256 2048 0.0 524288')):
            c = gpt.Config(**gpt.PRESETS[preset])
            got = ' '.join(str(getattr(c, name)) for name in names)
            assert got == '12 12 768 1024 0.9 0.95 0.1 0.0 False openwebtext ' + own
            assert abs(gpt.schedule(99, c) - early) < 1e-9 and gpt.count(gpt.GPT(c)) == size
            assert abs(gpt.schedule(c.max_iters - 1, c) - last) < 1e-6
        star = gpt.GPT(dataclasses.replace(c, attention='belief-star'))
        small = gpt.GPT(gpt.Config(**gpt.PRESETS['t4'], vocab_size=65))
    assert (gpt.count(star), gpt.count(small)) == (130_609_920, 10_745_088)
    rows = dict(ax1=['softmax', 'attentionx-v1'], ax2=['softmax', 'attentionx'],
                bf=['softmax', 'belief', 'belief-star'], all=gpt.ATTENTION)
    for key in rows:
        assert gpt.TABLES[key] == {x: dict(attention=x) for x in rows[key]}
    assert all(name == row['attention'] for name, row in gpt.TABLES['best'].items())

def test_gpt_initialisation():
    """Variants share weights to the bit; what you add stays as made, and does not decay."""
    make = lambda **more: gpt.GPT(gpt.Config(n_layer=2, n_embd=64, vocab_size=40, **more))
    base = make(attention='softmax').state_dict()
    for name in gpt.ATTENTION:
        state = make(attention=name).state_dict()
        extra = [state.pop(key) for key in set(state) - set(base)]
        assert same(state, base) and len(extra) == 2 * (name == 'belief-star')
        assert all(abs(p.std() - 0.01) < 1e-3 for p in extra)
    sizes = [base[f'transformer.h.0.{x}.weight'].std() for x in ('attn.c_attn', 'mlp.c_proj')]
    sizes.append(make(arch='rotary').transformer.h[0].mlp.c_proj.weight.abs().max())
    close(torch.stack(sizes), torch.tensor([0.02, 0.01, 256 ** -0.5]), 1e-3)
    net = make(bias=True, seed=1)
    assert not torch.equal(net.lm_head.weight, base['lm_head.weight'])
    own = [torch.nn.Parameter(torch.full(shape, 3.0)) for shape in ((4, 1), (4, 4))]
    net.transformer.h[0].attn.gamma, net.transformer.h[1].attn.mix = own
    for name, p in net.named_parameters():  # as the constructor does
        net.init_parameter(name, p)
        assert p.dim() > 1 or (p == name.endswith('weight')).all(), name
    assert all((p == 3).all() for p in own)
    decay, keep = gpt.make_optimizer(net, gpt.Config(weight_decay=0.3)).param_groups
    assert (decay['weight_decay'], keep['weight_decay']) == (0.3, 0)
    assert {*keep['params']} == {*own} | {p for p in net.parameters() if p.dim() == 1}
    assert {*decay['params']} == {*net.parameters()} - {*keep['params']}

def test_gpt_loss_in_chunks():
    net, idx = gpt_model(), gpt_ids(3, 16)
    targets = idx.roll(-1, 1).where(idx % 3 > 0, -1)
    want = F.cross_entropy(net(idx, idx)[0][targets >= 0], targets[targets >= 0])
    gradient = lambda loss: torch.autograd.grad(loss, net.lm_head.weight, retain_graph=True)[0]
    for limit in (2 ** 25, 200, 40):
        with unittest.mock.patch.object(gpt, 'LOGITS', limit):
            logits, loss = net(idx, targets)
        assert (logits is None) == (limit < 2 ** 25)
        close(loss, want, 1e-12)
        close(gradient(loss), gradient(want), 1e-12)

def test_gpt_sampling():
    net, idx = gpt_model(), torch.zeros(9999, 1, dtype=torch.long)
    torch.manual_seed(0)
    logits = net(idx[:1])[0][0, -1].detach()
    for temperature, k in ((0.5, 0), (2.0, 0), (1.0, 3), (1.0, 99)):
        drawn = net.generate(idx, 1, temperature, k)[:, 1].bincount(minlength=40) / 9999
        left = logits.where(logits >= logits.sort().values[-k:][0], -math.inf)
        close(drawn, F.softmax(left / temperature, dim=-1), 0.02)

def test_gpt_dropout():
    net, seen = gpt_model(dropout=0.5), []
    attend = lambda q, k, v, dropout_p, is_causal: seen.append(dropout_p) or v
    drop = lambda x, p, training, inplace: seen.append(p * training) or x
    with unittest.mock.patch.multiple(F, scaled_dot_product_attention=attend, dropout=drop):
        net.train()(gpt_ids(1, 8)), net.eval()(gpt_ids(1, 8))
    assert seen == 7 * [0.5] + 7 * [0.0]  # embedding; in 2 layers weights and both branches

def test_gpt_data_and_mistakes():
    text = 'naïve\n λ\t"\\x00"'
    with folder() as path:
        (path / 'a.txt').write_text(text * 20, 'utf-8')
        data = gpt.load_data(gpt.Config(data=str(path / 'a.txt'), block_size=16))
        assert bytes(data.train.tolist()) == (text * 18).encode()
        assert gpt.get_tokenizer('bytes').decode(data.val.tolist()) == text * 2
        assert (data.val_bytes, data.vocab_size) == (len(data.val), 256)
        assert gpt.make_model(gpt.Config(vocab_size=300), data).config.vocab_size == 300
        for name, n in (('train', 50), ('val', 40)):  # nanoGPT's format
            np.arange(n, dtype=np.uint16).tofile(path / f'{name}.bin')
        (path / 'meta.json').write_text('{"tokenizer": "gpt2", "bytes": {"val": 200}}')
        data = gpt.load_data(gpt.Config(data=str(path), block_size=16))
        assert (len(data.val), data.val_bytes, data.vocab_size) == (40, 200, 50257)
        v1 = ' --attention attentionx-v1'
        for words in ('--block-size 40', '--vocab-size 256', '--n-embd 18', '--gamma 0.99',
                      '--gamma nan', '--gamma 0' + v1, '--gamma 1.01' + v1, '--gamma nan' + v1):
            refuse([words.removesuffix(v1)], *tiny(gpt, path, '--data', path, *words.split()))
    own, texts = sorted(pathlib.Path(os.__file__).parent.glob('*.py')), gpt.read_text(gpt.Config())
    for i in (0, 8, 9, 10, 19):  # every tenth of Python's own is to validate on
        assert [own[i].read_text('utf-8') in x for x in texts] == [i % 10 < 9, i % 10 == 9]

def test_gpt_batches():
    data = types.SimpleNamespace(train=np.arange(20, dtype=np.uint16))
    c = gpt.Config(block_size=16, batch_size=6, grad_accum_steps=2)
    batch = lambda step=5, micro=0, **new: gpt.get_batch(
        data, dataclasses.replace(c, **new), step, micro, 'cpu')[0]
    x, y = gpt.get_batch(data, c, 5, 0, 'cpu')
    assert torch.equal(x, batch(attention='belief')) and torch.equal(y, x + 1)
    assert not any(torch.equal(x, other) for other in (batch(6), batch(5, 1), batch(seed=1)))
    assert {start for step in range(9) for start in batch(step)[:, 0].tolist()} == {0, 1, 2, 3}
    for rank in (0, 1):  # two processes share the rows
        with unittest.mock.patch.multiple(gpt, WORLD=2, RANK=rank):
            assert torch.equal(batch(), x[rank::2])

def test_gpt_bigram_and_evaluation():
    train, val = np.array([0, 1, 0, 2, 0, 1]), np.array([0, 1, 2])
    data = types.SimpleNamespace(train=train, val=val, vocab_size=4)
    p = (2 + 3 / 10) / (3 + 1) * (0 + 2 / 10) / (2 + 1)  # of 1 after 0, and of 2 after 1
    close(gpt.bigram_loss(data), -math.log(p) / 2, 1e-6)
    net, data = gpt_model(), types.SimpleNamespace(val=gpt_ids(1, 120)[0].numpy())
    for rows, starts in ((5, [0, 25, 51, 77, 103]), (999, range(104))):
        c = gpt.Config(block_size=16, batch_size=3, eval_rows=rows)
        x, y = gpt.windows(data.val, starts, c, 'cpu')
        close(gpt.evaluate(net, data, c, 'cpu')['val_loss'], net(x, y)[1], 1e-6)

def test_gpt_init_and_actions():
    net = gpt_model(vocab_size=256, attention='softmax', bias=True).float()
    state = {'_orig_mod.' + key: p for key, p in net.state_dict().items()}
    state['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)  # nanoGPT's mask
    with folder() as path:
        torch.save({'model': state, 'iter_num': 7}, path / 'nano.pt')
        flags = tiny(gpt, path, '--init', path / 'nano.pt', '--attention', 'softmax', '--bias')
        refuse(['nano.pt', 'size mismatch'], *flags, '--n-embd', 32)
        _, out, _, result = run(*flags, '--max-iters', 0)
        assert same(checkpoint(path)['model'], net.state_dict())
        nats = result['val_loss']
        assert f'{nats:.3f} nats per token, {nats / math.log(2):.3f} bits' in out
        torch.manual_seed(1337)
        tokens = net.generate(torch.tensor([list(b'\ndef ')]), 4, temperature=0.8)[0].tolist()
        assert run('sample', *flags)[3] == bytes(tokens).decode('utf-8', 'replace')
        rows = run('inspect', *flags)[3]
        assert [(row['step'], row['layer']) for row in rows[:3]] == [(0, 0), (0, 1), (3, 0)]

def test_gpt_diagnose():
    """One layer by hand; belief-star has two matrices, in this order.  [BF Eq. 15]"""
    net, idx = gpt_model(attention='belief-star'), gpt_ids(2, 9)
    attn, norm = net.transformer.h[1].attn, net.transformer.h[1].ln_1
    x = net.transformer.h[0](net.transformer.wte(idx) + net.transformer.wpe.weight[:9])
    q, k, v = (t.transpose(1, 2) for t in attn.qkv(norm(x)))
    p = gpt_weights(q, k)
    delta, delta_s = gpt_slow('belief-star', q, k, v, 1, False).flatten(3)
    mh, v = torch.stack([p @ v, v]).transpose(2, 3).flatten(3)
    out_mh, out = attn.c_proj(mh), attn.c_proj(delta) + attn.c_proj_s(delta_s)
    close(attn(norm(x)), out, 1e-12)
    got = gpt.diagnose(net, idx)[1]
    for name, vector in dict(mh=mh, update=delta, mh_out=out_mh, update_out=out).items():
        close(got[name], vector.norm(dim=-1).mean(), 1e-6)
    for name, vector in dict(cos_mh=out_mh, cos_update=out).items():
        close(got[name], F.cosine_similarity(vector, x, -1).mean(), 1e-6)
    close(got['alpha'], ((mh * v).sum(-1) / (v * v).sum(-1)).mean(), 1e-6)
    close(got['p_own'], p.diagonal(dim1=2, dim2=3).mean(), 1e-6)
    got = gpt.diagnose(gpt_model(zero_diag=True), idx)[1]
    assert (got['p_own'], got['gamma']) == (0, 1)

# ------------------------------------ belief_vit.py ------------------------------------
SMALL_VIT = dict(image_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2, head_size=6,
                 mlp_dim=10)

def vit_model(**settings):
    """A small model whose weights are so large that attention is not uniform."""
    net = vit.ViT(vit.Config(**{**SMALL_VIT, 'num_classes': 5, **settings})).double().eval()
    for block in net.blocks:
        block.attn.qkv.weight.data *= 4
    return net

def vit_images(n, size=8):
    return torch.from_numpy(np.random.RandomState(0).uniform(-1.7, 1.7, (n, 3, size, size)))

def vit_data(path):
    """train.npz and test.npz of three classes: the brightest colour."""
    path.mkdir()
    for name, count in (('train', 60), ('test', 30)):
        labels = np.arange(count) % 3
        images = np.random.default_rng(count).integers(0, 120, (count, 3, 8, 8))
        images[np.arange(count), labels] += 100
        np.savez(path / f'{name}.npz', images=images.astype(np.uint8), labels=labels)
    return str(path)

def vit_tiny(path, *more):
    """Flags of a run of half a second."""
    if not (path / 'data').exists():
        vit_data(path / 'data')
    sizes = [word for name, size in SMALL_VIT.items() for word in ('--' + name, size)]
    return [*SHORT, *sizes, '--data', path / 'data', '--out-dir', path / 'out', *more]

def vit_run(*argv):
    """run() without the yardstick, which takes a second."""
    with unittest.mock.patch.object(vit, 'linear_accuracy', lambda *_: 0):
        return run(*argv, script=vit)

def test_vit_attention():
    """A layer by hand: learned scale, Delta W^o + Delta_s W^s, of which the first has a bias."""
    attn, (x, _, _) = vit_model(attention='belief-star').blocks[0].attn, qkv(2, 5, 12)
    close(attn.temperature.exp(), 6 ** -0.5, 1e-6)
    q, k, v = attn.qkv(x).view(2, 5, 3, 2, 6).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
    attn.temperature.data += 1
    delta, delta_s = gpt_slow('belief-star', math.e * q, k, v, 1, True, vit).flatten(3)
    close(attn(x), attn.proj(delta) + delta_s @ attn.proj_s.weight.T, 1e-6)

VIT_GOLDEN = {  # settings, names of the original's parameters for ours, the original's logits
    'vit_small': (dict(model='vit-small', image_size=16, patch_size=4, head_size=64, mlp_dim=20), (
        ('^pos_embed', 'pos_embedding'), ('^norm', 'mlp_head.0'), ('^head', 'mlp_head.1'),
        ('^patch_embed.norm', 'to_patch_embedding.to_patch_tokens.1'),
        ('^patch_embed.proj', 'to_patch_embedding.to_patch_tokens.2'),
        ('^blocks', 'transformer.layers'), ('norm1', '0.norm'), ('norm2', '1.norm'),
        ('attn.temperature', '0.fn.temperature'), ('attn.qkv', '0.fn.to_qkv'),
        ('attn.proj', '0.fn.to_out.0'), ('mlp.fc1', '1.fn.net.0'), ('mlp.fc2', '1.fn.net.3')), [
        -0.2876340, -0.2904149, 0.8388182, 0.5144193, 0.9584070, -1.3805051, 1.8897740]),
    'localvit_hs': (dict(model='deit-small-local', image_size=64, patch_size=16), (
        ('norm2', 'conv.layernorm'), ('mlp.conv', 'conv.conv.0'), ('mlp.fc', 'conv.fc')), [
        0.1886144, 0.4249878, 0.6711958, 1.4330803, 0.8061749, -1.4793075, -1.1048520]),
    'deit_timm': (dict(model='deit-small', image_size=32, patch_size=8), (), [
        -0.3659678, 1.1703037, -0.2167598, -1.4045696, -0.2318807, 0.9726332, 0.3376579]),
}

def vit_fill(key, p):
    """Weights that anyone can make again from the original's name of the parameter."""
    w = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, p.shape)
    if p.dim() < 2:
        return torch.as_tensor(0.1 * w + (p.dim() == 1 and key.endswith('weight')))
    size = math.sqrt(3 * len(p) / p.numel()) * (4 if re.search(r'qkv|attn\.to[qk]\.', key) else 1)
    return torch.from_numpy(w * size)

def test_vit_golden():
    """Weights of the three originals give their logits."""
    sizes = dict(embed_dim=24, depth=2, num_heads=3, head_size=8, mlp_dim=96, num_classes=7)
    for name, (settings, names, logits) in VIT_GOLDEN.items():
        c = vit.Config(**{**sizes, **settings}, attention='softmax')
        net = vit.ViT(c).double().eval()
        for key, p in net.state_dict().items():
            for ours, theirs in names:
                key = re.sub(ours, theirs, key)
            if name == 'localvit_hs' and 'qkv' in key:
                for part, third in zip(('toq', 'tok', 'tov'), p.chunk(3)):
                    third.copy_(vit_fill(key.replace('qkv', part), third))
            else:
                p.copy_(vit_fill(key, p))
        close(net(vit_images(2, c.image_size))[0], torch.tensor(logits).double(), 1e-6)

def test_vit_facts():
    """Sizes, recipes and tables are the papers'."""
    small, local = dict(model='vit-small', num_classes=10), dict(model='deit-small-local')
    for settings, expected in (
            (small, 9_622_512), (dict(small, patch_size=8), 9_968_016),
            (dict(small, attention='belief-star'), 11_195_376),
            (dict(model='deit-small', num_classes=1000), 22_050_664),
            (dict(local, num_classes=1000), 22_226_776 - 47_088)):
        with torch.device('meta'):
            assert vit.count(vit.ViT(vit.Config(**settings))) == expected, settings
    names = ('optimizer learning_rate beta1 beta2 eps schedule min_lr warmup_iters units_per_step '
             'zero_diag randaugment drop_path label_smoothing first_size max_minutes').split()
    for preset, epochs, images, want in (
            ('cifar-paper', 400, 45_000,
             'set-adam 0.0001 0.9 0.999 1e-18 cosine 0.0 0 512 True paper 0.0 0.0 0 0.0'),
            ('imagenet-paper', 300, 1_281_167 - 12_812,
             'adamw 0.000125 0.9 0.999 1e-18 cosine 0.08 0 64 False none 0.1 0.1 32 0.0')):
        c = vit.Config(**vit.PRESETS[preset])
        assert ' '.join(str(getattr(c, name)) for name in names) == want
        assert c.max_iters == math.ceil(epochs * images / c.units_per_step)
    rows = [row['attention'] for row in vit.TABLES['3'].values()]
    assert rows == ['softmax', 'belief', 'belief-star'] and len(vit.TABLES['all']) == 8
    assert vit.TABLES['1']['attentionx'] == dict(attention='attentionx', gamma=1.0)
    for name, sizes in vit.TABLES['models'].items():  # whatever they were before
        assert dataclasses.replace(vit.Config(model='vit-small'), **sizes) == vit.Config(model=name)
    for name, zero_diag, gamma in (('', True, 1), ('', False, 3), ('-v1', True, 0.5)):
        c = vit.Config(attention='attentionx' + name, zero_diag=zero_diag)
        assert vit.ViT(c).blocks[0].attn.gamma == gamma

def test_vit_initialisation():
    """Variants share their weights to the bit, each model has its original's spread, and no
    parameter is dead but LocalViT's last feed-forward network, which the class token passes by."""
    uniform = lambda fan_in: (3 * fan_in) ** -0.5
    for model, expected in {
            'vit-small': {'pos_embed': 1, 'cls_token': 1, 'patch_embed.proj.weight': uniform(240),
                          'blocks.1.mlp.fc1.bias': uniform(512)},
            'deit-small': {'pos_embed': 0.02, 'blocks.0.attn.qkv.weight': 0.02,
                           'blocks.0.attn.qkv.bias': 0, 'patch_embed.proj.weight': uniform(768)},
            'deit-small-local': {
                'pos_embed': 0.00513, 'cls_token': 0.051, 'blocks.0.attn.qkv.weight': 384 ** -0.5,
                'blocks.0.mlp.fc1.weight': 960 ** -0.5, 'blocks.0.mlp.conv.weight': uniform(9),
                'blocks.0.attn.proj.bias': uniform(384)}}.items():
        state = vit.ViT(vit.Config(model=model, depth=2)).state_dict()
        for key, std in expected.items():
            assert abs(state[key].std() - std) <= 0.12 * std, (model, key, state[key].std())
    last = {'blocks.1.' + key for key in (
        'norm2.weight', 'norm2.bias', 'mlp.fc1.weight', 'mlp.conv.weight', 'mlp.fc2.weight')}
    for model, name in itertools.product(vit.MODELS, vit.ATTENTION):
        base = vit_model(model=model, attention='softmax').state_dict()
        net = vit_model(model=model, attention=name)
        state = net.state_dict()
        new = [state.pop(key) for key in set(state) - set(base)]
        assert same(state, base) and len(new) == 2 * (name == 'belief-star')
        assert not torch.equal(net.pos_embed, vit_model(model=model, seed=1).pos_embed)
        net(vit_images(3)).square().sum().backward()
        dead = {key for key, p in net.named_parameters() if p.grad.abs().max() == 0}
        assert dead == (last if model == 'deit-small-local' else set()), (model, name, dead)

def test_vit_positions():
    """Images of other sizes get positions between those learned, and the gradient returns."""
    ramp = torch.arange(4.0).repeat(4, 1).view(1, 16, 1)                    # grows with the columns
    pos = torch.cat([torch.full((1, 1, 1), 9.0), ramp], 1)
    out = vit.resize_positions(pos, (8, 6))[0, :, 0]
    rows = out[1:].view(8, 6)
    assert out[0] == 9 and (rows[0].diff() > 0).all()
    close(rows, rows[:1].expand(8, 6), 1e-5)
    close(rows[0, 0], -0.75 * ((7 / 6) ** 3 - 5 * (7 / 6) ** 2 + 8 * 7 / 6 - 4), 1e-5)  # the kernel
    net = vit_model()
    net(vit_images(2, 24)[:, :, :16]).square().sum().backward()
    assert net.pos_embed.grad[0].norm(dim=-1).min() > 0

def test_vit_init_file():
    """--init takes DeiT's checkpoint: another grid, other classes."""
    with folder() as path:
        big = vit_model(model='deit-small', num_classes=9, image_size=16).float().state_dict()
        torch.save({'model': big}, path / 'big')
        flags = vit_tiny(path, '--model', 'deit-small', '--max-iters', 0, '--init', path / 'big')
        assert '9 classes' in vit_run(*flags)[1]
        state = checkpoint(path)['model']
        big['pos_embed'] = vit.resize_positions(big['pos_embed'], (2, 2))
        fresh = [state.pop('head.weight'), state.pop('head.bias')]
        assert len(fresh[0]) == 3 and all(torch.equal(state[key], big[key]) for key in state)
        refuse(['big', 'size mismatch'], *flags, '--embed-dim', 24, script=vit)

def test_vit_dropout_and_optimizers():
    """Rates and flags reach their places; AdamW alone decays, and matrices alone."""
    net, images = vit_model(dropout=0.5, drop_path=0.9), vit_images(2)
    assert torch.equal(net(images), net(images)) and [b.drop_path for b in net.blocks] == [0, 0.9]
    assert not torch.equal(net.train()(images), net(images))
    kept = net.blocks[1].keep(torch.ones(4000, 2, 3))
    assert abs(kept.mean() - 1) < 0.2 and set(kept[:, 0, 0].round().tolist()) == {0.0, 10.0}
    assert (kept == kept[:, :1, :1]).all()
    c = vit.Config(learning_rate=3e-3, beta1=0.8, weight_decay=0.2, tau=0.3, eps=1e-9)
    for name in ('adamw', 'adam', 'set-adam'):
        optimizer, decays = vit.make_optimizer(net, dataclasses.replace(c, optimizer=name)), set()
        for group in optimizer.param_groups:
            assert (group['lr'], group['betas']) == (3e-3, (0.8, 0.999))
            assert name != 'set-adam' or (group['eps'], group['tau']) == (1e-9, 0.3)
            decays |= set(group['params']) if group.get('weight_decay') else set()
        assert decays == {p for key, p in net.named_parameters() if name == 'adamw'
                          and p.dim() > 1 and key not in ('pos_embed', 'cls_token')}

def test_vit_set_adam():
    """Against the formulas, one number at a time, from gradients of 1e-12 to 1e12; and zeros."""
    rng = np.random.default_rng(0)
    for shape, scale, dtype in itertools.product(
            ((), (4, 6)), (1e-12, 1.0, 1e12), (torch.float64, torch.float32)):
        p = torch.nn.Parameter(torch.tensor(rng.standard_normal(shape), dtype=dtype))
        adam = vit.SETAdam([p, torch.nn.Parameter(torch.ones(2))], 0.01)    # one has no gradient
        x, m, v = p.detach().double().numpy().copy(), 0, 0
        for t in range(1, 6):
            g = scale * rng.standard_normal(shape)
            p.grad = torch.tensor(g, dtype=dtype)
            adam.step()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            c = np.sum(v) ** 2 / (np.size(v) * np.sum(v * v))
            w = np.sqrt(c * v / (1 - 0.999 ** t) + 1e-18)
            x -= 0.01 / (1 - 0.9 ** t) * m / (w - 0.5 * np.min(w))
        close(p.double(), torch.tensor(x), 1e-12 if dtype == torch.float64 else 2e-6)
    for g in (torch.zeros(5), torch.full((5,), 1e-30), torch.full((5,), 1e15), torch.eye(5)[0]):
        p = torch.nn.Parameter(torch.ones(5))
        p.grad = g
        vit.SETAdam([p], 0.01).step()
        assert (p - 1).abs().max() <= 0.02 * math.sqrt(5) + 1e-6 and (g.any() or (p == 1).all())

# ------------------------------------ belief_vit.py: images ------------------------------------
def test_vit_shapes():
    """The drawings that our figures come from."""
    images, labels = vit.draw_shapes(200, 5)
    marks = (images * np.random.RandomState(0).uniform(-1, 1, (3, 32, 32))).sum((1, 2, 3))
    close([marks[labels == k].mean() for k in range(10)], [
        3284.1, 2109.8, 3588.7, 2922.6, 3237.8, 2958.4, 3121.1, 2490.7, 1754.2, 2120.7], 2)

def test_vit_batches():
    """Batch i follows from seed and i, processes share its rows, an epoch has all images once."""
    with folder() as path:
        c = vit.Config(**SMALL_VIT, data=vit_data(path / 'd'), batch_size=4, grad_accum_steps=2,
                       val_fraction=0.2, randaugment='fixed')
        data = vit.load_data(c)
    def get(step, micro=0, **new):
        data.ahead.clear()
        return vit.get_batch(data, dataclasses.replace(c, **new), step, micro, 'cpu')
    assert [len(part[1]) for part in (data.train, data.val, data.test)] == [48, 12, 30]
    x, y, _ = get(3)
    for other, _, _ in (get(4), get(3, 1), get(3, seed=5)):
        assert not torch.equal(x, other)
    assert len({get(step, mix=True)[2] for step in range(9)}) > 4
    for rank in range(2):
        with unittest.mock.patch.multiple(vit, RANK=rank, WORLD=2):
            assert torch.equal(get(3)[0], x[rank::2]) and torch.equal(get(3)[1], y[rank::2])
    with unittest.mock.patch.object(vit, 'augment', lambda x, *_: x):
        epoch = torch.cat([get(step, micro)[0] for step in range(6, 12) for micro in range(2)])
    every = vit.normalise(torch.from_numpy(data.train[0]), 8, c)
    found = [int((every == x).all((1, 2, 3)).nonzero()) for x in epoch]
    assert sorted(found) == list(range(48)) != found
    sizes = [get(i, image_size=32, first_size=8, size_epochs=2.0)[0].size(3)
             for i in (0, 11, 12, 24, 36, 99)]
    assert sizes == [8, 8, 16, 24, 32, 32]

def test_vit_evaluation():
    """Loss and accuracy by hand; best.pt is the best step's, and both are tested at the end."""
    with folder() as path:
        c = vit.Config(**SMALL_VIT, data=vit_data(path / 'data'), batch_size=7, val_fraction=0.3)
        data = vit.load_data(c)
        assert vit.linear_accuracy(data, c) > 0.9  # colours are easy
        images, labels = [torch.from_numpy(part) for part in data.val]
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
        logits = (images.float().mean((2, 3)) / 255 - mean) / std
        for rows in (0, 12):
            c.eval_rows, n = rows, rows or 18
            figures = vit.evaluate(lambda x: x.mean((2, 3)), data, c, 'cpu')
            close(F.cross_entropy(logits[:n], labels[:n]), figures['val_loss'], 1e-5)
            right = (logits.argmax(1) == labels)[:n].double().mean()
            assert abs(right - figures['val_acc']) < 1e-9 and right > 0.9
        black = vit.normalise(torch.zeros(1, 3, 1, 1), 1, vit.Config(data='data/cifar10'))
        close(black.flatten(), torch.tensor([-2.4291, -2.4183, -2.2214]), 1e-3)
        seen = []
        def noted(model, data, part, c, device):
            seen.append((len(part[1]), model.head.bias.tolist(), torch.is_autocast_enabled('cpu')))
            return 1.0, len(seen) == 3
        with unittest.mock.patch.object(vit, 'judge', noted):
            vit_run(*vit_tiny(path, '--max-iters', 9, '--val-fraction', 0.3, '--dtype', 'bfloat16'))
        rows, biases, autocast = zip(*seen)
        assert rows == (18, 18, 18, 18, 30, 30)  # in steps 0, 3, 6 and 9, and at the end
        assert biases[4] == biases[3] != biases[2] == biases[5]
        assert autocast[0] and not autocast[5]  # it keeps copies of weights: not of the last
        assert checkpoint(path)['model']['head.bias'].tolist() == biases[3]

def test_vit_photos():
    """A folder of photos trains, grows, predicts; a file that is none is named."""
    try:
        from PIL import Image
    except ImportError:
        raise unittest.SkipTest('Pillow is not installed')
    with folder() as path:
        for name, colour in (('blue', (0, 0, 200)), ('red', (200, 0, 0))):
            (path / 'photos' / name).mkdir(parents=True)
            for i in range(12):
                found = path / 'photos' / name / f'{i}.jpg'
                Image.new('RGB', (20, 16), colour).save(found)
        wide = Image.new('RGB', (30, 10))
        wide.paste((255, 255, 255), (10, 0, 20, 10))
        wide.getexif()[0x0112] = 6  # to be turned by 90 degrees
        wide.save(path / 'wide.png', exif=wide.getexif())
        read = lambda *more: vit.read_photo(path / 'wide.png', *more)[0]
        assert read(80).min() == 255 and read(8).min() < 255  # the middle, of small ones all
        assert read(8, (0, 0, 0, 0)).max() == 0  # the top left corner
        whole = read(6, (1, 0, 0.5, 0.5))  # as far as it reaches
        assert (whole[0] < 60).all() and (whole[2:4] > 200).all()
        photo = np.arange(192).reshape(3, 8, 8)
        with unittest.mock.patch.object(vit, 'read_photo', lambda *_: photo):
            for flip, want in ((0.4, photo[..., ::-1]), (0.6, photo)):
                chance = np.where(np.arange(vit.DRAWS) == 4, flip, 1 - flip)
                assert (vit.augment(np.str_('a.jpg'), chance, 'none', 8) == want).all()
        flags = vit_tiny(path, '--data', path / 'photos', '--val-fraction', 0.25, '--max-iters', 30)
        code, out, err, result = vit_run(*flags, '--learning-rate', 0.01, '--first-size', 4,
                                         '--size-epochs', 2.0)
        assert code == 0 and result['test_acc'] == 1 and '12 images of 2' in out, (err, out)
        predict = ['predict', '--out-dir', path / 'out', '--images']
        answer, = run(*predict, found, script=vit)[3]
        assert answer[0][0] == 'red' and answer[0][1] > 0.5
        refuse(['--images'], *predict[:-1], script=vit)
        refuse(['gone.png'], *predict, path / 'gone.png', script=vit)
        with unittest.mock.patch.dict('sys.modules', PIL=None):
            refuse(['pillow'], *predict, found, script=vit)
        found.write_text('no photo')
        refuse([str(found)], *flags, '--seed', 3, script=vit)

# ------------------------------------ belief_vit.py: augmentation -----------------------------
def kinds_of_images(n, H=32, W=32):
    """Images (n, 3, H, W) uint8 of all kinds: noise, dull, smooth, sparse, and constant ones."""
    rng = np.random.RandomState(0)
    noise, level = rng.randint(0, 256, (n, 3, H, W)), rng.randint(0, 200, (n, 3, 1, 1))
    slope = (np.arange(H)[:, None] * level // H + np.arange(W) + level) % 256
    kinds = [noise, noise // 5 + level, slope, (noise > 250) * level, level + 0 * noise]
    return np.stack([kinds[i % 5][i] for i in range(n)]).astype(np.uint8)

AUGMENT_GOLDEN = {
    'AutoContrast': 4019741991, 'Equalize': 2489273705, 'Invert': 4022891167, 'Rotate': 2691225402,
    'Posterize': 2111807424, 'Solarize': 4123043457, 'SolarizeAdd': 3190793648,
    'Color': 4030092094, 'Contrast': 1530319734, 'Brightness': 4017858369, 'Sharpness': 3865526779,
    'ShearX': 2306034410, 'ShearY': 2468420990, 'Cutout': 1508438316, 'TranslateX': 1596493001,
    'TranslateY': 1596493001, 'none': 2487034875, 'paper': 3775748059, 'fixed': 3858557487,
}

def test_augment_golden():
    """Each operation gives Pillow's bytes (compared once, on a thousand images), each policy what
    it gave with them; the crops and flips of 'none' are all there are."""
    images, before = kinds_of_images(40), kinds_of_images(40)
    digest = lambda parts: zlib.crc32(np.stack(list(parts)).tobytes())
    chance = np.random.RandomState(2).random_sample((40, 3))
    found = {}
    for name, (operation, low, high) in vit.RANDAUGMENT.items():
        v = low + (high - low) * vit.MAGNITUDE
        found[name] = digest(operation(x, v, v if sign < 0.5 else -v, at)
                             for x, (sign, *at) in zip(images, chance))
    chance = np.random.RandomState(3).random_sample((40, vit.DRAWS))
    for policy in ('none', 'paper', 'fixed'):
        found[policy] = digest(vit.augment(x, r, policy) for x, r in zip(images, chance))
    assert found == AUGMENT_GOLDEN and (images == before).all(), found

def test_augment_mix():
    """What a pixel, or their mean, has of another image the loss has of its label."""
    place, shares, kinds = torch.arange(10.0), [], set()
    images = place.view(10, 1, 1, 1).expand(10, 3, 16, 24)
    for seed in range(200):
        x, share = vit.mix(images, np.random.default_rng(seed))
        close(x.mean((1, 2, 3)), share * place + (1 - share) * place.flip(0), 1e-4)
        kinds.add(min(2, x[0].unique().numel()))
        shares.append(share)
    assert kinds == {1, 2} and 0.4 < np.mean(shares) < 0.7 and 0 <= min(shares) < max(shares) <= 1
    c, (logits, _, _) = vit.Config(mix=True, label_smoothing=0.3), qkv(10, 10)
    soft = 0.7 * (share * torch.eye(10) + (1 - share) * torch.eye(10).flip(0)) + 0.3 / 10
    loss = vit.loss_of(torch.nn.Identity(), (logits, place.long(), share), c)
    close(loss, F.cross_entropy(logits, soft.double()), 1e-6)

def test_augment_erase():
    """In a quarter of the images a rectangle of noise."""
    x = vit.erase(torch.full((800, 3, 24, 32), 9.0), np.random.default_rng(0))
    holes = (x != 9).all(1)
    area = holes.float().mean((1, 2))
    assert torch.equal(holes, (x != 9).any(1)) and 0.2 < (area > 0).float().mean() < 0.3
    assert torch.equal(holes, holes.any(2)[:, :, None] & holes.any(1)[:, None])  # rectangles
    assert 0.01 < area[area > 0].min() < 0.05 and 0.25 < area.max() < 0.36
    assert abs(x[x != 9].mean()) < 0.1 and abs(x[x != 9].std() - 1) < 0.1

# ------------------------------------ belief_vit.py: actions ------------------------------------
def test_vit_training():
    """Every model and optimizer learns colours; recipes run."""
    flags = ['--max-iters', 40, '--eval-interval', 20, '--learning-rate', 0.01, '--batch-size', 8]
    recipe = ['--mix', '--randaugment', 'paper', '--drop-path', 0.2, '--label-smoothing', 0.1]
    with folder() as path, unittest.mock.patch.object(vit, 'draw', lambda *_: 0):
        for least, model, attention, optimizer, *more in (
                (0.8, 'tiny', 'attentionx', 'adam'), (0.8, 'deit-small-local', 'belief', 'adamw'),
                (0.8, 'vit-small', 'belief-star', 'set-adam'),
                (0.2, 'deit-small', 'belief', 'adamw', *recipe)):
            code, out, err, result = vit_run(*vit_tiny(
                path, '--model', model, '--attention', attention, '--optimizer', optimizer, *flags,
                *more))
            assert code == 0 and result['test_acc'] > least, (model, attention, result, err)
        assert 'a linear model' in out and 'chance: 33.3 %' in out

def test_vit_inspect():
    """Fig. 3's figures, and the map of the class token, by hand in both kinds of attention."""
    for model in ('deit-small', 'tiny'):
        net, images = vit_model(model=model, attention='belief-star'), vit_images(3)
        attn, x = net.blocks[0].attn, net.embed(images)[0]
        q, k, v = attn.qkv(net.blocks[0].norm1(x)).view(3, 5, 3, 2, 6).permute(2, 0, 3, 1, 4)
        if model == 'tiny':
            q = q * attn.temperature.exp() * 6 ** 0.5
        p = gpt_weights(q, k, model == 'tiny', vit)[:, :, 0]  # (B, nh, T)
        mh, own = torch.einsum('bht,bhtd->bhd', p, v).flatten(1), v[:, :, 0].flatten(1)
        alpha = (mh * own).sum(1) / (own * own).sum(1)
        delta = mh - alpha[:, None] * own
        outs = [t @ attn.proj.weight.T for t in (mh, delta)]
        want = [t.norm(dim=1) for t in (mh, delta, *outs)]
        want += [*(F.cosine_similarity(t, x[:, 0]) for t in outs), alpha]
        rows, maps = vit.diagnose(net, images)
        assert ' '.join(rows[0]) == 'mh update mh_out update_out cos_mh cos_update alpha'
        close([*rows[0].values()], [t.mean().item() for t in want], 1e-6)
        want = p.mean(1)[:, 1:]
        close(maps[0].flatten(1), want / want.amax(1, keepdim=True), 1e-12)
    with folder() as path:
        code, _, err, rows = run('inspect', *vit_tiny(path), script=vit)
        steps = [(row['step'], row['layer']) for row in rows]
        assert code == 0 and steps == list(itertools.product((0, 3, 6), (0, 1))), err
        assert len(list(path.glob('out/*/inspect-*/inspect.csv'))) == 1
        if importlib.util.find_spec('matplotlib'):
            assert len(list(path.glob('out/*/inspect-*/attention.png'))) == 1

def test_vit_mistakes():
    with folder() as path:
        flags = vit_tiny(path)
        for words, *argv in (
                (['--gamma 0.5', '1 or more'], '--gamma', 0.5, '--attention', 'attentionx'),
                (['--gamma 2', '(0, 1]'], '--gamma', 2, '--attention', 'attentionx-v1'),
                (['--patch-size'], '--patch-size', 3), (['--patch-size'], '--first-size', 6),
                (['--val-fraction'], '--val-fraction', 0.001),
                (['--val-fraction'], '--val-fraction', 1.0),
                (['--table models'], '--over', 'model=tiny,vit-small')):
            refuse(words, *flags, *argv, script=vit)
        train, images = path / 'data/train.npz', np.zeros((30, 3, 8, 8), np.uint8)
        for images, labels in ((images / 255, range(30)), (images[:, 0], range(30)),
                               (images, range(9)), (np.array([{}]), [0])):
            np.savez(train, images=images, labels=labels)
            refuse(['train.npz', 'uint8'], *flags, script=vit)
        train.unlink()
        refuse(['train.npz', 'CLASS'], *flags, script=vit)

# ------------------------------------ admm_detr.py ------------------------------------
SOLVING = [name for name in detr.ATTENTION if name not in ('softmax', 'no-weights')]
EXACT = ['l2', 'admm', 'admm-vanilla']
OPTIONS = [dict(ridge=ridge, positive=positive)
           for ridge in (0.0, 1.0) for positive in (False, True)]

def detr_config(**settings):
    small = dict(hidden_dim=16, nheads=2, enc_layers=1, dec_layers=2, dim_feedforward=24,
                 num_queries=5, num_classes=3, stride=16, image_size=32, **detr.OA)
    return detr.Config(**{**small, **settings})

def tokens(*sizes, d=32, seed=0, rank=0, dtype=torch.float64):
    """Layer-normed tokens of two heads of d channels; of that rank, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 2 * d, generator=generator, dtype=torch.float64)
    if rank:
        x = 0.3 * x + x[:, :rank] @ torch.randn(rank, 2 * d, generator=generator).double()
    x = F.layer_norm(x, (2 * d,)).view(-1, 2, d).transpose(0, 1)[None]      # (1, 2, N, d)
    return [t.to(dtype) for t in x.split(sizes, 2)]

def shooting(q, k, penalty, e=0.0, positive=False, skip=None):
    """The elastic net one coordinate at a time, each by its own formula; numpy, one query."""
    x = np.zeros(len(k))
    for _ in range(5000):
        change = 0.0
        for j in range(len(k)):
            if j == skip or not k[j].any():
                continue
            rest = k[j] @ (q - x @ k + x[j] * k[j])
            size = rest if positive else abs(rest)
            new = np.sign(rest) * max(size - penalty / 2, 0) / (k[j] @ k[j] + e)
            change = max(change, abs(new - x[j]))
            x[j] = new
        if change < 1e-13:
            return x
    raise AssertionError('the reference has not converged')

def test_detr_lasso_reference():
    """Every option against coordinate descent, on tokens more and fewer than d, one of them 0; and
    lambda, rho and e against their formulas."""
    for options, own, N in itertools.product(OPTIONS, (False, True), (4, 7)):
        q, k = tokens(3, N, d=5, seed=N)
        k[:, :, -1] = 0
        q = k if own else q
        x, y = (detr.lasso(q, k, own, 0.1, 0.2, 1500, vanilla=vanilla, **options)
                for vanilla in (False, True))
        close(x, y, 1e-9)
        assert 0.1 < (x != 0).double().mean() < 0.9
        penalty, rho, e = detr.scales(q, k, own, 0.1, 0.2, **options)
        for h, i in itertools.product(range(2), range(3)):
            Q, K, skip = q[0, h, i].numpy(), k[0, h].numpy(), i if own else None
            products = [K[j] @ Q for j in range(N) if j != skip]
            largest = max(products) if options['positive'] else max(map(abs, products))
            mean = np.linalg.eigvalsh(K.T @ K).mean()
            assert abs(penalty[0, h, i] - 0.2 * max(0, largest)) < 1e-12
            assert abs(rho[0, h] - 0.2 * mean) + abs(e[0, h] - options['ridge'] * mean) < 1e-12
            want = shooting(Q, K, 0.2 * max(0, largest), options['ridge'] * mean,
                            options['positive'], skip)
            close(x[0, h, i], torch.from_numpy(want), 1e-6)

def test_detr_elastic_net_of_scikit_learn():
    try:
        from sklearn.linear_model import ElasticNet
    except ImportError:
        raise unittest.SkipTest('scikit-learn is not installed')
    q, k = tokens(2, 50, rank=8)
    for options in OPTIONS:
        penalty, _, e = detr.scales(q, k, False, 0.1, 0.2, **options)
        x = detr.lasso(q, k, False, 0.1, 0.2, 4000, **options)
        first, second = float(penalty[0, 1, 1]) / 64, float(e[0, 1]) / 32
        net = ElasticNet(first + second, l1_ratio=first / (first + second), tol=1e-14,
                         fit_intercept=False, max_iter=10**6, positive=options['positive'])
        want = net.fit(k[0, 1].T.numpy(), q[0, 1, 1].numpy()).coef_
        close(x[0, 1, 1], torch.from_numpy(want), 1e-6)

def test_detr_objective():
    """Its value by a loop, and the gap that `inspect` shows, whatever rho is."""
    q, k = tokens(3, 7, d=5)
    for options in OPTIONS:
        penalty, _, e = detr.scales(q, k, False, 0.1, **options)
        solve = lambda *how: detr.lasso(q, k, False, 0.1, *how, **options)
        f = lambda *how: detr.objective(solve(*how), q, k, penalty, e)
        x = solve(0.2, 1500)[0, 1, 2]
        left = q[0, 1, 2] - sum(a * token for a, token in zip(x, k[0, 1]))
        best = sum(left * left) + penalty[0, 1, 2, 0] * sum(abs(x)) + e[0, 1, 0, 0] * sum(x * x)
        close(f(0.2, 1500)[0, 1, 2], best, 1e-12)
        for rho in (0.1, 20.0):
            c = detr_config(rho=rho, sparsity=0.1, iterations=9, **options)
            want = (f(rho, 9) / f(0.2, 1500) - 1).mean()
            assert abs(detr.solver_gap(q, k, False, c) - want) < 1e-6

def test_detr_default_iterations():
    """At the default settings the objective is within 1 % of the best (3 % if tokens correlate);
    over-relaxation pays; relaxation and rho do not change where it ends; lengths only scale x."""
    for rank, most in ((0, 1e-2), (8, 3e-2)):
        q, k = tokens(10, 100, rank=rank)
        penalty, _, _ = detr.scales(q, k)
        f = lambda **how: detr.objective(detr.lasso(q, k, **how), q, k, penalty).mean()
        best = f(iterations=1500)
        assert f() / best - 1 < most and f(relax=1.0) - best > 1.5 * (f() - best)
    for n in (20, 100, 850):  # Config's problem is easier, and takes fewer
        q, k = tokens(10, n, rank=8)
        assert detr.solver_gap(q, k, False, detr.Config()) < 1e-4
    q, k = tokens(5, 12, d=6)
    x = detr.lasso(q, k, iterations=5000)
    close(detr.lasso(q, k, rho=1.0, relax=1.0, iterations=5000), x, 1e-6)
    close(detr.lasso(7 * q, 3 * k, ridge=1.0), 7 / 3 * detr.lasso(q, k, ridge=1.0), 1e-12)
    assert not detr.lasso(q, k, sparsity=1.0, iterations=3000).abs().max() > 1e-9

def test_detr_attention_reference():
    """Every combination of options, padding too, is the Lasso of tokens put together by hand."""
    hidden = torch.arange(9)[None] >= 7
    for options, centre, n, own in itertools.product(OPTIONS, (False, True), (0, 3), (False, True)):
        c = detr_config(centre=centre, random_tokens=n, rho=0.2, iterations=9, **options)
        q, k = tokens(3, 9, d=5)
        q = k if own else q
        real = k[:, :, :7] - centre * k[:, :, :7].mean(2, keepdim=True)
        extra = torch.randn(n, 5, generator=torch.Generator().manual_seed(0)).expand(1, 2, n, 5)
        K = torch.cat([real, torch.zeros(1, 2, 2, 5), extra], 2)
        want = detr.lasso(q, K, own, 0.03, 0.2, 9, **options)**5
        want = want / want.abs().sum(-1, keepdim=True).clamp_min(1e-30)
        for name in ('admm', 'admm-vanilla'):
            x = detr.ATTENTION[name](q, k, hidden, own, c)
            close(x, want[..., :9], 1e-8)
            assert not x[..., 7:].any()

def test_detr_gradcheck():
    """All solvers and options: the printed formulas, too, where they are smooth."""
    q, k = (t.requires_grad_() for t in tokens(2, 4, d=3))
    cases = [(name, {}) for name in SOLVING]
    cases += [(name, dict(options, centre=True, random_tokens=2, power=3))
              for name in ('admm', 'admm-vanilla') for options in OPTIONS]
    for name, options in cases:
        c = detr_config(iterations=1 if 'printed' in name else 4, **options)
        f = lambda own, q, k: detr.ATTENTION[name](q, k, None, own, c)
        assert torch.autograd.gradcheck(functools.partial(f, False), [q, k], atol=1e-6), name
        assert torch.autograd.gradcheck(lambda k: f(True, k, k), [k], atol=1e-6), name

def test_detr_degenerate_tokens():
    """Rank-deficient, repeated and zero tokens, zero queries: finite, with finite gradients."""
    q, k = tokens(6, 10, d=8, dtype=torch.float32)
    cases = (k[..., :1] * torch.ones(8), k[:, :, :1].expand_as(k), 0 * k,
             torch.eye(8).repeat(1, 2, 2, 1) * 3, k * 1e4, k * 1e-6)
    for own, kind, zero, centre, options in itertools.product(cases, EXACT, (0, 1), (False, True),
                                                              OPTIONS):
        a, b = (t.clone().requires_grad_() for t in (q * zero, own))
        x = detr.ATTENTION[kind](a, b, None, False, detr_config(centre=centre, **options))
        x.square().sum().backward()
        assert all(t.isfinite().all() for t in (x, a.grad, b.grad)), (own, kind, options)

def test_detr_padding_and_precision():
    """Padding changes nothing in any layer; float16, whose squares overflow, and autocast are
    solved in float32; bfloat16's steps are too large for boxes."""
    q, k, hidden = (x.transpose(1, 2).flatten(2).float() for x in tokens(6, 10, 4, d=8))
    padding = torch.arange(14)[None] >= 10
    for name in ('softmax', 'no-weights', *EXACT):
        module = detr.MultiheadAttention(detr_config(centre=True), name).eval()
        for p in module.parameters():
            torch.nn.init.uniform_(p, -0.5, 0.5)
        want = module(q, k, k)
        padded = torch.cat([k, 50 * hidden], 1)
        close(module(q, padded, padded, padding), want, 1e-5)
        if name in EXACT:
            half = module(*((400 * t).half() for t in (q, k, k)))
            close(half.float() / 400, want, 0.05)
            with torch.autocast('cpu', torch.bfloat16):
                close(module(q, k, k), want, 1e-6)
        else:  # the fused kernel makes the same sum
            y = module.coefficients(*module.heads(q, padded, padded), padding)[1]
            close(module.out_proj(y.transpose(1, 2).flatten(2)), want, 1e-5)
    with torch.autocast('cpu', torch.bfloat16):
        out = detr.DETR(detr_config())(torch.randn(1, 3, 32, 32))
    assert out['pred_boxes'].dtype == torch.float32

def test_detr_sharpen():
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for power in (1, 3, 5):
        close(detr.sharpen(x, power), x**power / (x**power).abs().sum(1, keepdim=True), 1e-12)
    assert detr.sharpen(x, 0) is x
    for size in (0.0, 1e-30, 1e-9, 1e-4, 1e30):  # the printed formula is NaN for half of these
        x = torch.full((1, 4), size, requires_grad=True)
        y = detr.sharpen(x)
        y.square().sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert size < 1e-6 or abs(y.sum() - 1) < 1e-6

def test_detr_l2():
    """Ridge regression as least squares with more rows; with `own`, without the query's token."""
    q, k = tokens(5, 9, d=6)
    for own in (False, True):
        q = k if own else q
        x = detr.l2(q, k, None, own, detr_config(power=0))
        for h, i in itertools.product(range(2), range(q.size(2))):
            rho = 0.1 * float(k[0, h].square().sum()) / 6
            left = [j for j in range(9) if not own or j != i]
            A = np.concatenate([k[0, h, left].numpy().T, math.sqrt(rho) * np.eye(len(left))])
            b = np.concatenate([q[0, h, i].numpy(), np.zeros(len(left))])
            close(x[0, h, i, left], torch.from_numpy(np.linalg.lstsq(A, b, rcond=None)[0]), 1e-10)
            assert not own or x[0, h, i, i] == 0

def test_detr_printed_equations():
    """(3) and (4) with numpy, one query at a time, and why they fail: the first step of (3) is
    ridge regression, and after 15 x is at the clamp, far from the best."""
    for own, vanilla in itertools.product((False, True), (True, False)):
        q, k = tokens(4, 9, d=5)
        q = k if own else q
        penalty, rho, _ = detr.scales(q, k, own, 0.1, 0.2)
        with unittest.mock.patch.object(detr, 'SIGMA', 0.0):
            got = detr.printed(q, k, own, 0.1, 0.2, 4, vanilla)[0, 1, 2]
        V, r, t = k[0, 1].numpy(), float(rho[0, 1]), float(penalty[0, 1, 2] / rho[0, 1])
        D, X = np.linalg.eigh(V.T @ V)
        Y = V @ X / np.sqrt(D)
        inverse = Y @ np.diag(1 / (np.sqrt(D) + r)) @ Y.T
        inverse = np.linalg.inv(V @ V.T + r * np.eye(9)) if vanilla else inverse
        x = z = mu = np.zeros(9)
        for _ in range(4):
            new = inverse @ (V @ q[0, 1, 2].numpy() + r * (x - z))
            new[2] = 0 if own else new[2]
            new = new.clip(-1, 1)
            z = np.sign(x - mu) * (abs(x - mu) - t).clip(0)
            x, mu = new, mu + new - z
        close(got, torch.from_numpy(x), 1e-9)
    q, k = tokens(10, 100)
    penalty, rho, _ = detr.scales(q, k, False, 0.1, 0.2)
    close(detr.printed(q, k, False, 1.0, 0.2, 1, vanilla=True), q @ detr.regression(k, rho), 1e-12)
    f = lambda x: detr.objective(x, q, k, penalty).mean()
    for vanilla in (True, False):
        x = detr.printed(q, k, False, 0.1, 0.2, 15, vanilla)
        assert x.abs().max() == 1 and f(x) > 100 * f(detr.lasso(q, k, False, 0.1, 0.2))
    a, b = (detr.admm_printed(q, k, None, False, detr_config(random_tokens=n)) for n in (None, 32))
    close(a, b, 0)

def test_detr_recompute():
    """Solving again in the backward pass: the same gradients."""
    grads = []
    for recompute in (False, True):
        x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        module = detr.MultiheadAttention(detr_config(recompute=recompute), 'admm', own=True)
        with unittest.mock.patch.object(detr, 'lasso', wraps=detr.lasso) as solver:
            module(x, x, x).square().sum().backward()
        assert solver.call_count == 1 + recompute
        grads.append(x.grad)
    close(*grads, 1e-6)

# ------------------------------------ model and losses ------------------------------------
DETR_GOLDEN = dict(  # facebookresearch/detr, ResNet-50, small transformer, in float64
    logits=[1.3233768, -2.0759888, -0.0021618, -0.6884133, 1.3223249, -2.0661018, -0.009956],
    boxes=[0.5540449, 0.5603625, 0.6181914, 0.3576915, 0.5536385, 0.5609043, 0.6188352, 0.3555136],
    total=22.547493929079366,
    losses={'class': [5.380897302367627, 5.339293100901858],
            'bbox': [0.7935184912997751, 0.7816251518432951],
            'giou': [0.949098149243916, 1.0266945058033494]})

def test_detr_golden():
    """The same weights give what DETR gave: outputs, auxiliary ones, losses and matching."""
    c = detr.Config(backbone='resnet50', hidden_dim=32, nheads=4, dim_feedforward=48,
                    num_queries=7, num_classes=91, cross_attention='softmax')
    net, g = detr.DETR(c).double().eval(), DETR_GOLDEN
    for key, p in net.state_dict().items():  # uniform numbers of a generator named by the key
        v = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, p.numel())
        v *= math.sqrt(3 / (p.numel() / len(p))) if p.dim() >= 2 else 0.1
        v *= 4 if p.dim() >= 2 and ('in_proj' in key or 'query_embed' in key) else 1
        v += key.endswith('running_var') or p.dim() == 1 and key.endswith('.weight')
        p.copy_(torch.from_numpy(v).view_as(p))
    x = np.random.RandomState(0).uniform(-1.7, 1.7, 2 * 3 * 96 * 128).reshape(2, 3, 96, 128)
    x, mask = torch.from_numpy(x), torch.zeros(2, 96, 128, dtype=torch.bool)
    mask[1, :, 80:] = mask[1, 64:] = True
    with torch.no_grad():
        out = net(x.masked_fill(mask[:, None], 0), mask)
    close(out['pred_logits'][:, ::3, ::30].flatten()[:7], torch.tensor(g['logits']), 1e-5)
    close(out['pred_boxes'][:, ::3].flatten()[:8], torch.tensor(g['boxes']), 1e-5)
    boxes = [[[0.5, 0.5, 0.4, 0.3], [0.2, 0.3, 0.2, 0.2], [0.8, 0.7, 0.1, 0.5]],
             [[0.4, 0.6, 0.3, 0.3]]]
    targets = [(torch.tensor(labels), torch.tensor(b).double())
               for labels, b in zip(([3, 17, 44], [1]), boxes)]
    losses = detr.set_losses(out, targets, c, *detr.norms([3, 1], c))
    for name, want in g['losses'].items():
        close(losses[name], torch.tensor(want).double(), 1e-5)
    close(detr.total(losses, c), g['total'], 1e-5)

def test_detr_parameter_counts():
    """The original's, and what attention without weights saves: 3.8 %, both 7.6 %."""
    def size(self_attention='softmax', cross_attention='softmax', **more):
        c = detr.Config(**detr.DETR_R50, self_attention=self_attention, num_classes=91,
                        cross_attention=cross_attention, **more)
        with torch.device('meta'), unittest.mock.patch.object(detr.DETR, 'init_parameter'):
            net = detr.DETR(c)
        return detr.count(net), len(net.state_dict())
    assert size() == (41302368, 458) and size('l2', out_proj=True) == (40118112, 446)
    assert size('admm') == size('softmax', 'no-weights') == (39723360, 434)
    assert size('l2', 'admm')[0] == 38144352

def test_detr_initial_weights():
    """Variants share what they have in common; every learned tensor gets a gradient."""
    nets = {name: detr.DETR(detr_config(self_attention=name, cross_attention=name, out_proj=True))
            for name in detr.ATTENTION}
    full = nets['softmax'].state_dict()
    generator = torch.Generator().manual_seed(zlib.crc32(b'1337 query_embed.weight'))
    close(full['query_embed.weight'], torch.randn(5, 16, generator=generator), 0)
    bound = full['transformer.decoder.layers.0.multihead_attn.in_proj_weight'].abs().max()
    assert 0.9 < bound / math.sqrt(6 / 64) <= 1  # Xavier's, 16 in and 48 out
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    targets = [(labels, boxes.float()) for labels, boxes in detr_targets(2, 1)]
    for name, net in nets.items():
        assert all(torch.equal(full[key], p) for key, p in net.state_dict().items())
        detr.loss_of(net, (x, None, targets, 1.0, 1.0), net.config).backward()
        for key, p in net.named_parameters():
            dead = 'decoder.layers.0.self_attn' in key or 'decoder.layers.0.norm1.w' in key
            assert dead or p.grad.abs().max() > 0, (name, key)              # there x = 0

def detr_outputs(B=3, Q=5, K=3, layers=2):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    *aux, last = [dict(pred_logits=draw(B, Q, K + 1).requires_grad_(),
                       pred_boxes=draw(B, Q, 4).sigmoid().requires_grad_()) for _ in range(layers)]
    return dict(last, aux_outputs=aux)

def detr_targets(*counts):
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.rand(n, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.1
    return [(torch.randint(3, (n,), generator=generator), draw(n)) for n in counts]

def slow_giou(a, b):
    def span(i, low, high):  # along one axis
        (x, w), (y, v) = (a[i], a[i + 2]), (b[i], b[i + 2])
        return low(x + w / 2, y + v / 2) - high(x - w / 2, y - v / 2)
    both = max(0, span(0, min, max)) * max(0, span(1, min, max))
    union, hull = a[2] * a[3] + b[2] * b[3] - both, span(0, max, min) * span(1, max, min)
    return both / union - (hull - union) / hull

def test_detr_losses_by_hand():
    """One image, query and box at a time, every assignment tried; images without objects too."""
    c = detr_config()
    for counts in ((2, 0, 3), (0, 0, 0)):
        outputs, targets = detr_outputs(), detr_targets(*counts)
        losses = detr.set_losses(outputs, targets, c, *detr.norms(counts, c))
        for i, layer in enumerate([outputs, *outputs['aux_outputs']]):
            want = torch.zeros(4, dtype=torch.float64)
            for b, (labels, boxes) in enumerate(targets):
                p, mine = layer['pred_logits'][b].softmax(-1), layer['pred_boxes'][b]
                l1 = lambda q, t: (mine[q] - boxes[t]).abs().sum()
                giou = lambda q, t: slow_giou(mine[q].tolist(), boxes[t].tolist())
                cost = lambda q, t: 5 * l1(q, t) - p[q, labels[t]] - 2 * giou(q, t)
                best = min(itertools.permutations(range(5), len(labels)),
                           key=lambda qs: sum(cost(q, t) for t, q in enumerate(qs)))
                for t, q in enumerate(best):
                    entropy = -p[q, labels[t]].log()
                    want += torch.stack([entropy, l1(q, t), torch.tensor(1 - giou(q, t)), entropy])
                want[0] -= 0.1 * sum(p[q, 3].log() for q in range(5) if q not in best)
            n = sum(counts)
            want /= torch.tensor([n + 0.1 * (15 - n), *[max(1, n)] * 3])
            close(torch.stack([x[i] for x in losses.values()]), want, 1e-7)
        whole = losses['class'] + 5 * losses['bbox'] + 2 * losses['giou']
        close(detr.total(losses, c), whole.sum(), 1e-12)
    point = torch.tensor([[0.5, 0.5, 0.0, 0.0]])  # boxes without area on the same spot
    assert detr.generalised_iou(detr.corners(point), detr.corners(point)).item() == 0
    assert detr.norms([8], c) == (5, 8)  # more objects than queries
    outputs = detr_outputs(B=1)
    outputs['pred_boxes'] = outputs['pred_boxes'] * math.nan
    assert detr.total(detr.set_losses(outputs, detr_targets(8), c, 5, 8), c).isnan()

def test_detr_match():
    """Our own assignment, and scipy's where it is installed, against every other."""
    rng = np.random.default_rng(0)
    for case in range(200):
        n, m = map(int, rng.integers(0, 6, 2))
        cost = rng.normal(size=(n, m)) * 1e8 - 1e9 if case % 2 else rng.integers(0, 3, (n, m)) * 1.0
        small = cost if n <= m else cost.T
        want = min(sum(small[i, j] for i, j in enumerate(chosen))
                   for chosen in itertools.permutations(range(max(n, m)), min(n, m)))
        for solve in detr.assign, detr.match:
            rows, columns = solve(cost)
            assert len(rows) == min(n, m) and len(set(columns)) == len(columns), (case, solve)
            assert (np.diff(rows) > 0).all(), case
            assert abs(cost[rows, columns].sum() - want) <= 1e-12 * (1 + abs(cost).sum())

# ------------------------------------ data, training, actions ------------------------------------
def random_detections(seed):
    """Crowds, ties, areas that differ from the boxes', images without either, more than 100
    detections, boxes without area, IoUs at a threshold."""
    rng = np.random.default_rng(seed)
    truth, found = [], []
    def add(to, image, box, **more):
        to.append(dict(id=len(to) + 1, image_id=image, category_id=int(rng.integers(1, 3)),
                       bbox=[float(v) for v in box], **more))
    for image in range(6):
        for _ in range(rng.integers(0, 12) * (image > 0)):
            box = (rng.uniform(0, rng.choice([20, 60, 130, 300]), 4) / 4).round() * 4
            box[2:] *= rng.random(2) > 0.05
            add(truth, image, box, area=float(box[2] * box[3] * rng.choice([1, 0.7])),
                iscrowd=int(rng.random() < 0.15))
            for _ in range(rng.integers(0, 4)):
                near = np.maximum(box + (rng.normal(size=4) * rng.choice([0, 5])).round(), 0)
                add(found, image, near, score=round(float(rng.random()), 1))
                found[-1]['category_id'] = truth[-1]['category_id']
        for _ in range(250 if image == 3 else 3):
            add(found, image, rng.uniform(0, 100, 4), score=round(float(rng.random()), 1))
    return dict(images=[dict(id=i) for i in range(6)], annotations=truth,
                categories=[dict(id=c) for c in (1, 2, 3)]), found

AP_GOLDEN = (  # of seeds 0 and 1, by pycocotools
    [0.0726018, 0.0825671, 0.078365, 0.1125443, 0.0289033, 0.8917492,
     0.1125, 0.5725, 0.65125, 0.5761905, 0.7333333, 0.975],
    [0.0734718, 0.0877156, 0.0738972, 0.0414044, 0.0874966, 0.8985148,
     0.0901316, 0.4556579, 0.5911842, 0.3708333, 0.7875, 0.9875])

def test_detr_ap():
    for seed, want in enumerate(AP_GOLDEN):
        ours = [*detr.coco_ap(*random_detections(seed)).values()]
        assert np.abs(np.array(ours) - want).max() < 1e-6, ours
    box = lambda x, **more: dict(image_id=1, category_id=1, bbox=[x, 0, 10, 10], **more)
    both = [box(2, score=0.9), box(4, score=0.8)]
    for places, want in ((0, 4), 51 / 101), ((4, 0), 1):  # of equal IoUs the last one counts
        truth = dict(images=[dict(id=1)], categories=[dict(id=1)], annotations=[*map(box, places)])
        assert abs(detr.coco_ap(truth, both)['AP50'] - want) < 1e-12
    crowd = dict(box(0), bbox=[-50, -50, 100, 100], iscrowd=1)  # comes second, though it fits best
    truth['annotations'] = [box(4), crowd]
    assert detr.coco_ap(truth, both[:1])['AP50'] > 0.99

def test_detr_shapes():
    """Boxes hug what is drawn; the same row is the same drawing; its own truth has AP 1."""
    data = detr.Shapes(30, 64)
    plans = [data.plan(row) for row in range(30)]
    errors = []
    for row, plan in enumerate(plans):
        image = data.render(plan)
        close(image, data.render(data.plan(row)), 0)
        box = 64 * detr.corners(plan.boxes).numpy()
        assert 1 <= len(plan.labels) <= 4 and box.min() >= 0 and box.max() <= 64
        if len(plan.labels) == 1:
            pixels = image.numpy() * detr.STD + detr.MEAN
            y, x = np.nonzero(abs(pixels - np.median(pixels[:, 0])).max(0) > 0.25)
            errors.append(abs([x.min(), y.min(), x.max() + 1, y.max() + 1] - box[0]).max())
    assert len(errors) > 2 and max(errors) < 5, errors
    truth = detr.truth_of(plans, data.ids)
    assert {note['category_id'] for note in truth['annotations']} == {1, 2, 3}
    assert detr.coco_ap(truth, [dict(a, score=1.0) for a in truth['annotations']])['AP'] == 1

def test_detr_no_validation_drawing_is_trained_on():
    data = detr.load_data(detr_config(image_size=16))
    val = {tuple(plan.boxes.flatten().tolist()) for plan in data.plans}
    for seed, step in itertools.product((0, 1, 2), range(200)):
        c = detr_config(batch_size=2, seed=seed, image_size=16)
        for _, boxes in detr.get_batch(data, c, step, 0, 'cpu')[2]:
            assert tuple(boxes.flatten().tolist()) not in val

def test_detr_batches():
    """A function of seed and step; parts, micro-batches or processes', average to the whole."""
    c = detr_config(batch_size=8)
    data = detr.load_data(c)
    model = detr.make_model(c, data)
    images, mask, targets, *norms = batch = detr.get_batch(data, c, 1, 0, 'cpu')
    assert mask is None and (*norms,) == detr.norms([len(labels) for labels, _ in targets], c)
    for other, step in (c, 2), (dataclasses.replace(c, seed=1), 1):
        assert (detr.get_batch(data, other, step, 0, 'cpu')[0] != images).any()
    four = dataclasses.replace(c, batch_size=4, grad_accum_steps=2)
    micro = [detr.get_batch(data, four, 1, i, 'cpu') for i in (0, 1)]
    shares = []
    for rank in (0, 1):
        with unittest.mock.patch.multiple(detr, RANK=rank, WORLD=2):
            shares.append(detr.get_batch(data, c, 1, 0, 'cpu'))
    for parts, order in (micro, [*range(8)]), (shares, [0, 2, 4, 6, 1, 3, 5, 7]):
        close(torch.cat([part[0] for part in parts]), images[order], 0)
        mean = sum(detr.loss_of(model, part, c) for part in parts) / 2
        close(mean, detr.loss_of(model, batch, c), 1e-5)
    groups = detr.make_optimizer(model, dataclasses.replace(c, lr_backbone=0.01)).param_groups
    assert [g['lr'] for g in groups] == [1e-3, 1e-5] and groups[0]['weight_decay'] == 1e-4
    assert len(groups[1]['params']) == len(list(model.backbone.parameters()))

def test_detr_evaluation():
    """A model that answers with the truth has AP 1, the loss of the paired queries, and no l1."""
    c = detr_config(eval_rows=8, batch_size=4)
    data = detr.load_data(c)
    plans = iter(data.plans)
    def oracle(images, mask):
        logits, boxes = torch.zeros(len(images), 5, 4), torch.full((len(images), 5, 4), 0.5)
        logits[..., 3] = 20.0
        for i, plan in enumerate(itertools.islice(plans, len(images))):
            n = len(plan.labels)
            logits[i, :n, 3], boxes[i, :n] = 0, plan.boxes
            logits[i, range(n), plan.labels] = 20.0
        return dict(pred_logits=logits, pred_boxes=boxes, aux_outputs=[])
    figures = detr.evaluate(oracle, data, c, 'cpu')
    assert figures['AP'] == figures['AP50'] == 1
    close(torch.tensor([figures['l1'], figures['giou'], figures['paired']]), torch.zeros(3), 1e-6)
    coco = detr.finish(None, data, c, 'cpu', None)
    assert coco['AR100'] == 1 and math.isnan(coco['APl']) and len(coco) == 12
    logits = torch.tensor([[[0.0, 2.0, 5.0], [3.0, 1.0, 0.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.1, 0.2, 0.2, 0.2]]])
    found = detr.post_process(dict(pred_logits=logits, pred_boxes=boxes), [[100, 200]])[0]
    assert [label for _, label, _ in found] == [1, 0]  # the likeliest, but for no-object
    close(torch.tensor([box for *_, box in found]),
          torch.tensor([[80.0, 30, 120, 70], [0, 10, 40, 30]]), 1e-4)

# a photo of three boxes, one without a box; ids in no order, the labels of 9 and 4 are 1 and 0
COCO = dict(
    images=[dict(id=8, file_name='b.png', width=40, height=30),
            dict(id=5, file_name='a.png', width=30, height=60)],
    categories=[dict(id=9, name='dot'), dict(id=4, name='cat')],
    annotations=[
        dict(id=1, image_id=8, category_id=9, bbox=[10, 5, 20, 10], area=150, iscrowd=0),
        dict(id=2, image_id=8, category_id=4, bbox=[-4, 20, 14, 20.5]),
        dict(id=3, image_id=8, category_id=4, bbox=[0, 0, 40, 30], area=900.5, iscrowd=1),
        dict(id=6, image_id=8, category_id=4, bbox=[7, 7, 0, 3], area=0, iscrowd=0)])

def coco_folder(path, names=('train2017', 'val2017'), coco=COCO):
    (path / 'annotations').mkdir(exist_ok=True)
    for name in names:
        (path / name).mkdir(exist_ok=True)
        (path / 'annotations' / f'instances_{name}.json').write_text(json.dumps(coco))
    return path

def test_detr_annotations():
    with folder() as path:
        train, _ = detr.load_coco(coco_folder(path), 60)
        assert len(train) == 2 and train.ids == [4, 9] and train.classes == ['cat', 'dot']
        empty, plan = train.plan(0), train.plan(1)
        truth = detr.truth_of([empty, plan], train.ids)
        assert [a['id'] for a in truth['annotations']] == [1, 2, 3, 6]
        assert empty.boxes.shape == (0, 4) and plan.labels.tolist() == [1, 0] and not plan.flip
        assert (empty.size, empty.original, empty.image_id) == ((50, 100), (60, 30), 5)
        want = torch.tensor([[0.5, 1 / 3, 0.5, 1 / 3], [0.125, 5 / 6, 0.25, 1 / 3]])
        close(plan.boxes, want, 1e-6)
        coco_folder(path, coco=dict(COCO, annotations=[dict(bbox=[1, 2, 3, 4])]))
        refuse(['instances_train2017.json'], *tiny(detr, path, '--data', path), script=detr)
        refuse(['train2017/'], *tiny(detr, path, '--data', path / 'annotations'), script=detr)
    with folder() as path:  # of one split every tenth is kept
        train, val = detr.load_coco(coco_folder(path, ['val2017']))
        assert [x['id'] for x in val.images] == [5] and [x['id'] for x in train.images] == [8]

def test_detr_transforms():
    """What DETR's flip, crop and size do to a box, worked out from the photo's shares."""
    with folder() as path:
        data, _ = detr.load_coco(coco_folder(path), 800)
    data.images = [dict(id=8, file_name='b.png', width=640, height=480)]
    data.annotations = {8: [dict(category_id=4, bbox=[96, 48, 320, 240], iscrowd=0)]}
    plans = [data.plan(0, np.random.default_rng([1, i])) for i in range(400)]
    whole = [p for p in plans if tuple(p.window) == (0, 0, 1, 1)]
    assert 160 < len(whole) < 240 and 160 < sum(p.flip for p in plans) < 240
    assert {p.size for p in whole} == {(int(s * 640 / 480), s) for s in range(480, 801, 32)}
    for p in plans:
        x0, y0, x1, y1 = p.window
        left, right, top, bottom = max(0.15, x0), min(0.65, x1), max(0.1, y0), min(0.6, y1)
        cx = ((left + right) / 2 - x0) / (x1 - x0)
        want = [1 - cx if p.flip else cx, ((top + bottom) / 2 - y0) / (y1 - y0),
                (right - left) / (x1 - x0), (bottom - top) / (y1 - y0)]
        close(p.boxes[0], torch.tensor(want), 1e-6)
    assert detr.resized(640, 480, 800, 1333) == (1066, 800)
    assert detr.resized(2000, 500, 800, 1333) == (1332, 333)

def test_detr_photos():
    """What is read is what was drawn, flipped, cut and padded; then a whole run on photos."""
    try:
        from PIL import Image
    except ImportError:
        raise unittest.SkipTest('Pillow is not installed')
    with folder() as path:
        train, _ = detr.load_coco(coco_folder(path), 30)
        for name, size in ('a.png', (30, 60)), ('b.png', (40, 30)):
            y, x = np.mgrid[:size[1], :size[0]]
            drawn = np.stack([x * 6, y * 4, (x + y) * 2])                   # (3, 30, 40) at last
            for split in ('train2017', 'val2017'):
                Image.fromarray(drawn.transpose(1, 2, 0).astype(np.uint8)).save(path / split / name)
        empty, plan = train.plan(0), train.plan(1)
        batch, mask, _ = detr.collate([], [train.render(empty), train.render(plan)], 'cpu')
        assert batch.shape == (2, 3, 50, 40) and not batch[0, :, :, 25:].any()
        assert mask[0, :, 25:].all() and not mask[0, :, :25].any() and mask[1].sum() == 20 * 40
        for plan.flip in (False, True):
            for window, size in ((0, 0, 1, 1), (40, 30)), ((0.25, 0.2, 0.75, 0.8), (20, 18)):
                plan.window, plan.size = np.array(window), size
                want = drawn[:, 6:24, 10:30] if size[0] == 20 else drawn
                got = ((train.render(plan).numpy() * detr.STD + detr.MEAN) * 255).round()
                assert (got == (want[:, :, ::-1] if plan.flip else want)).all()
        code, _, err, result = run(*tiny(detr, path, '--data', path, '--random-tokens', 4),
                                   script=detr)
        assert code == 0 and 'APl' in result, err

def test_detr_actions():
    """Train, look inside, find things in photos; the formulas as they are printed run, too."""
    with folder() as path:
        printed = ['--cross-attention', 'admm-printed', '--self-attention', 'admm-vanilla-printed']
        for flags in (printed, ['--cross-attention', 'admm-vanilla', '--ridge', 1]):
            code, out, err, result = run(*tiny(detr, path, *flags), script=detr)
            assert code == 0 and 'AP near 0' in out and 'AP50 at step' in out, err
        assert {'AP', 'APs', 'ARl'} <= set(result)
        own = ['--out-dir', path / 'out']
        code, _, err, rows = run('inspect', *own, script=detr)
        gaps = [row['gap'] for row in rows if row['attention'] == 'admm-vanilla']
        assert code == 0 and len(gaps) == 2 and all(0 <= gap < 1 for gap in gaps)
        assert all(1 / 8 < row['top'] < 1 for row in rows)  # heads have 8 channels
        refuse(['--images'], 'detect', *own, script=detr)
        if not importlib.util.find_spec('PIL'):
            return
        from PIL import Image
        Image.new('RGB', (90, 60), 'red').save(path / 'red.png')
        for action, count in ('detect', 1), ('inspect', 4):
            code, _, err, found = run(action, '--images', path / 'red.png', '--threshold', 0, *own,
                                      script=detr)
            assert code == 0 and len(found) == count, err
        log = result['folder'] / 'log.csv'
        refuse(['log.csv'], 'detect', '--images', log, *own, script=detr)

def test_detr_init():
    """--init takes DETR's layout, COCO's classes by their ids, torchvision's backbone, our own."""
    data = types.SimpleNamespace(ids=[1, 3, 90], classes=['person', 'car', 'toothbrush'])
    def load(net, state):
        torch.save(state, path / 'some.pth')
        with contextlib.redirect_stdout(io.StringIO()):
            detr.load_weights(net, path / 'some.pth', data)
        return net
    with folder() as path:
        plain = detr.DETR(detr_config(cross_attention='softmax'))
        state = {key: p + 1 for key, p in plain.state_dict().items()}
        assert same(load(plain, dict(model=state)).state_dict(), state)
        head = torch.arange(92.0)
        state.update({'class_embed.bias': head, 'class_embed.weight': head[:, None].repeat(1, 16)})
        assert load(plain, dict(model=state)).class_embed.bias.tolist() == [1, 3, 90, 91]
        body = {key: p + 2 for key, p in detr.ResNet50().state_dict().items()}
        net = load(detr.DETR(detr_config(backbone='resnet50')), {**body, 'fc.weight': head})
        assert same(net.backbone[0]['body'].state_dict(), body)
        code, out, err, _ = run(*tiny(detr, path, '--init', path / 'some.pth', '--max-iters', 0,
                                      '--backbone', 'resnet50'), script=detr)
        saved = checkpoint(path / 'out')['model']['backbone.0.body.layer3.2.bn2.bias']
        assert code == 0 and torch.equal(saved, body['layer3.2.bn2.bias']), err
        torch.save(dict(model={'x': torch.zeros(1)}), path / 'other.pth')
        for name in ('missing.pth', 'other.pth'):
            refuse([name], *tiny(detr, path, '--init', path / name), script=detr)

def test_detr_mistakes():
    for words, *argv in (
            (['--cross-attention', 'admm-printed'], '--cross-attention', 'lasso'),
            (['--dict', 'value'], '--dict', 'query'), (['--power', '5'], '--power', 2),
            (['--sparsity'], '--sparsity', 0), (['--relax'], '--relax', 2),
            (['--ridge'], '--ridge', -1), (['--hidden-dim 64'], '--nheads', 5),
            (['--stride'], '--stride', 7),
            (['20 at most'], '--cross-attention', 'admm-printed', '--iterations', 21)):
        refuse(words, *argv, script=detr)

def test_detr_facts_of_the_paper():
    """Rows of its two tables, the recipe: 300 epochs of 118,287 photos, 32 at a time, the last 100
    at a tenth of the rate; 100 queries, weights of the losses 1, 5, 2, no-object 0.1."""
    rows = [*detr.TABLES['1'].values(), *detr.TABLES['2'].values()]
    kinds = [f'{row["self_attention"]} {row["cross_attention"]}' for row in rows]
    assert kinds == ['softmax softmax', 'no-weights softmax', 'softmax no-weights', 'admm softmax',
                     'softmax admm', 'softmax l2', 'admm-vanilla softmax', 'admm softmax']
    assert all(row.items() >= detr.OA.items() for row in rows[3:])
    c = detr.Config(**detr.OA)
    assert (c.ridge, c.positive, c.centre, c.power) == (0, False, False, 5)
    c = detr.Config()
    assert (c.ridge, c.positive, c.centre, c.random_tokens) == (3, True, True, None)
    c = detr.Config(**detr.PRESETS['paper'])
    epoch = 118287 // 32
    assert (c.max_iters, c.warmdown_iters, c.units_per_step) == (300 * epoch, 100 * epoch, 32)
    assert (c.learning_rate, c.lr_backbone * c.learning_rate, c.weight_decay) == (1e-4, 1e-5, 1e-4)
    assert (c.bbox_loss_coef, c.giou_loss_coef, c.eos_coef, c.num_queries) == (5, 2, 0.1, 100)
    assert (c.grad_clip, c.power, c.enc_layers, c.dec_layers) == (0.1, 5, 6, 6)
    assert detr.schedule(200 * epoch - 1, c) == 1 and detr.schedule(200 * epoch, c) == 0.1

# ------------------------------------ mask_distill.py ------------------------------------
MASKS = ['all', 'last5', 'windows', 'first-all', 'window:3', 'window:3+sinks:2', 'sinks:2',
         'first:3', 'offset:2', 'offset:1+first:2', 'window:2+window:5+sinks:1']
DENSE, BLOCKED = mask.dense_attention, mask.blocked_attention

def mask_config(**settings):
    small = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=40, masks='window:4')
    return mask.Config(**{**small, **settings})

def mask_data(c, teacher=None):
    """What load_data gives, without files."""
    tokens = (np.arange(4000) ** 2 // 7 % 40).astype(np.uint16)
    return mask.SimpleNamespace(train=tokens, val=tokens[:900], tokenizer='bytes', teacher=teacher,
                                pool=np.arange(c.samples) * 7,
                                val_starts=np.linspace(0, 800, c.eval_rows).astype(np.int64))

def mask_matrices(masks, T):
    """Which pairs the candidates hold, by the words of the grammar -> (K, T, T) of 0 and 1."""
    names = {'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4', 'first-all': 'first:1+all:0',
             'windows': 'window:5+window:10+first:5', 'all': 'all:0'}  # the report's three
    terms = [term.split(':') for term in names.get(masks, masks).split('+')]
    ends = [int(n) + (kind == 'offset') for kind, n in terms if kind in ('window', 'offset')]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    holds = {'all': lambda n: i >= j, 'window': lambda n: i - j < n, 'offset': lambda n: i - j == n,
             'first': lambda n: j < n, 'sinks': lambda n: (j < n) & (i - j >= max(ends, default=1))}
    return torch.stack([(holds[kind](int(n)) & (i >= j)).double() for kind, n in terms])

def mask_slowly(reading, q, k, v, masks, c):
    """The three readings by their formulas; c (nh, K) -> (B, nh, T, hs)."""
    M = mask_matrices(masks, q.size(2))
    if not any(m.diagonal().all() for m in M):  # the own token, where no mask surely holds it
        M, c = torch.cat([M, torch.eye(12)[None]]), torch.cat([c, c.amax(1, True)], 1)
    e = (q @ k.mT / math.sqrt(q.size(3))).exp().tril()[:, :, None]          # (B, nh, 1, T, T)
    parts = c[:, :, None, None] * M * e                                     # (B, nh, K, T, T)
    total = dict(renormalised=parts.sum(2, True), unnormalised=e, separate=M * e)[reading]
    return (parts / total.sum(-1, True).clamp_min(1e-99)).sum(2) @ v

def test_mask_reference():
    q, k, v = qkv(1, 2, 12, 3)
    for masks, reading in itertools.product(MASKS, mask.READINGS):
        K = len(mask_matrices(masks, 1))
        alpha = torch.linspace(-2, 1.5, 2 * K, dtype=torch.float64).view(2, K)
        want = mask_slowly(reading, q, k, v, masks, alpha.sigmoid())
        log_c = mask.coefficients(alpha)
        close(DENSE(q, k, v, masks, log_c, reading), want, 1e-12)
        if reading == 'renormalised' and mask.bounded(masks):
            for block in (0, 1, 2, 5, 16):
                close(BLOCKED(q, k, v, masks, log_c, block), want, 1e-12)
    inputs = [t.requires_grad_() for t in (*qkv(1, 2, 5, 2), qkv(2, 3)[0])]
    for f, *reading in ((BLOCKED,), *itertools.product([DENSE], mask.READINGS)):
        y = lambda q, k, v, alpha: f(q, k, v, 'windows', mask.coefficients(alpha), *reading)
        assert torch.autograd.gradcheck(y, inputs)

def test_mask_blocked_equals_dense():
    """Also on a GPU. The own token is always there: rows add up to 1, no NaN, also backward."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    kinds = (torch.double, 1e-11), (torch.float, 2e-6), (torch.bfloat16, 3e-2), (torch.half, 3e-3)
    cases = (('window:64+sinks:4', 200), ('window:33', 129), ('offset:7+first:2', 37),
             ('offset:3+offset:5', 12), ('first:3', 12), ('sinks:1', 12))
    for (masks, T), (dtype, tolerance) in itertools.product(cases, kinds):
        log_c = mask.coefficients(qkv(3, len(mask.candidates(masks)))[0]).to(device)
        q, k, v = [t.to(device).requires_grad_() for t in qkv(2, 3, T, 8, dtype=dtype)]
        y, z = [f(q, k, v, masks, log_c) for f in (DENSE, BLOCKED)]
        assert y.dtype == z.dtype == dtype
        close(y.double(), z.double(), tolerance)
        close(mask.attention_weights(q, k, masks, log_c).double().sum(-1), 1.0, tolerance)
        assert all(g.isfinite().all() for g in torch.autograd.grad((y + z).sum(), (q, k, v)))
    q, k, v = qkv(1, 2, 12, 4)
    closed = mask.coefficients(torch.tensor([[-20.0, 3.0]]))  # the window of `window:3+first:1`
    far = torch.tensor([[-200.1, -200.5, -201.0]])  # c below what float32 has
    for f in (DENSE, BLOCKED):
        close(f(q, k, v, 'window:3+first:1', closed), f(q, k, v, 'first:1'), 1e-6)
        close(f(q, k, v, 'windows', far), f(q, k, v, 'windows', far + 200), 1e-5)

def test_mask_kept_pairs():
    """0.460 of the pairs at 256 tokens for window:64+sinks:4, none twice; 0.039 for last5."""
    masks = 'window:64+sinks:4'
    M = mask_matrices(masks, 256)
    assert M.sum(0).max() == 1
    window, sinks = M.sum((1, 2)) / (256 * 257 / 2)
    half_closed = torch.tensor([[0.0, -20.0], [0.0, 0.0]])
    for alpha, masks, T, want in ((torch.zeros(1, 2), masks, 256, window + sinks),
                                  (half_closed, masks, 256, window + sinks / 2),
                                  (torch.zeros(1, 5), 'last5', 256, 1270 / 32896),
                                  (torch.zeros(1, 1), 'offset:1', 16, 31 / 136)):
        close(mask.kept_pairs([alpha] * 3, masks, T), want, 1e-6)

def test_mask_l1_and_budget():
    """L1 pulls at the common scale of the coefficients, the budget does not."""
    def penalty(alpha, **settings):
        return mask.penalty([alpha, alpha], mask_config(masks='windows', **settings))
    alpha = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    c = alpha.sigmoid()[0]
    close(penalty(alpha, l1=0.5), 2 * 0.5 * c.sum(), 1e-6)
    lost = (1 - (c / c.max())[:, None, None] * mask_matrices('windows', 16)).prod(0)
    kept = (1 - lost).sum().item() / 136
    loss = penalty(alpha, budget=0.3, budget_weight=3.0)
    close(loss, 3 * (kept - 0.3), 1e-5)
    g = torch.autograd.grad(loss, alpha)[0][0]
    assert (g[:2] > 0).all() and g[2] < 0  # the others against the largest
    close((g / (1 - c)).sum(), 0.0, 1e-6)  # d / d log c: no common pull
    assert penalty(alpha, budget=kept + 1e-3) == 0
    both = dict(l1=0.5, budget=0.2)  # heads alike: the same penalty
    close(penalty(alpha.repeat(2, 1), **both), penalty(alpha, **both), 1e-6)

def mask_golden_model():
    """Weights that anyone can make again from the names of the parameters, frozen, and tokens."""
    net = mask.GPT2(mask_config(n_head=3, n_embd=24, block_size=24, vocab_size=61))
    for key, p in net.double().requires_grad_(False).named_parameters():
        w = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, p.numel())
        if p.dim() > 1:
            w *= math.sqrt(3 / (p.numel() / len(p))) * (4 if 'c_attn' in key else 1)
        else:
            w = 0.1 * w + key.endswith('weight')
        p.copy_(torch.from_numpy(w).view_as(p))
    return net, (torch.arange(48) * 7919 % 61).view(2, 24)

def test_mask_golden():
    """Logits and attention weights as transformers' GPT2LMHeadModel gives them."""
    net, idx = mask_golden_model()
    watch = []
    got = net(idx, watch=watch)
    close(got[1, -1, :4], torch.tensor([0.879413, 0.831994, -0.276339, -1.175988]), 1e-5)
    weights = torch.stack(watch)  # (layers, B, nh, T, T)
    close(weights[1, 0, 2, 23, :4], torch.tensor([0.003405, 1e-05, 2.9e-05, 1e-06]), 1e-6)
    close(weights.square().sum(), 181.07434, 1e-3)
    for block in net.h:  # eager, as there, and the fused kernel agree
        block.attn.fused = False
    close(net(idx), got, 1e-12)

def safetensors(tensors, n_head=None, pad=0):
    """Bytes of a safetensors file from {name: array}."""
    header, data = {'__metadata__': {'n_head': n_head}} if n_head else {}, b''
    for name, a in tensors.items():
        header[name] = dict(dtype=f'F{8 * a.itemsize}', shape=list(a.shape),
                            data_offsets=[len(data), len(data) + a.nbytes])
        data += a.tobytes()
    head = json.dumps(header).encode() + b' ' * pad
    return struct.pack('<Q', len(head)) + head + data

def test_mask_safetensors():
    """The hub's keys and those of transformers, headers of any length; one line for a bad file."""
    net, idx = mask_golden_model()
    state = {key: p.float().numpy() for key, p in net.state_dict().items()}
    hub = {**state, 'h.0.attn.bias': np.tril(np.ones((1, 1, 24, 24), '<f4'))}
    half = {'transformer.' + key: value.astype('<f2') for key, value in state.items()}
    half['lm_head.weight'] = state['wte.weight']
    whole = safetensors(hub, '3')
    opened = types.SimpleNamespace(main=lambda argv: mask.load_teacher(argv[0]))
    with folder() as path:
        file = path / 'x.safetensors'
        for pad, (tensors, bound) in itertools.product(range(8), ((hub, 1e-5), (half, 0.05))):
            file.write_bytes(safetensors(tensors, '3', pad))
            got = mask.load_gpt2(file)
            c = got.config
            assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size) == (2, 3, 24, 24, 61)
            close(got(idx), net(idx), bound)
        for word, damaged in (
                ('', whole[:-1]), ('', b''), ('', whole[8:]), ('', struct.pack('<Q', 2) + b'[]'),
                ('F8', whole.replace(b'"F32"', b'"F8" ')), ('wte', whole.replace(b'wte', b'wta')),
                ('n_head', safetensors(state)), ('n_head', safetensors(state, '5')),
                ('c_fc.bias', whole.replace(b'h.1.mlp.c_fc.bias', b'h.1.mlp.c_fc.tail'))):
            file.write_bytes(damaged)
            refuse([str(file), word], file, script=opened)
    own = mask.load_gpt2(HERE / 'assets' / 'teacher.safetensors')
    assert sum(p.numel() for p in own.parameters()) == 858_880 and own.config.n_head == 4

def test_mask_substitute():
    """The student is the teacher with masks; what is not trained is shared, and stays."""
    generator = torch.Generator().manual_seed(zlib.crc32(b'1337 h.1.mlp.c_proj.weight'))
    want = torch.empty(64, 16).normal_(0.0, 0.02 / 2, generator=generator)
    assert torch.equal(mask.GPT2(mask_config()).h[1].mlp.c_proj.weight, want)
    teacher, _ = mask_golden_model()
    rates = dict(weight_decay=0.3, learning_rate=2e-3, alpha_lr=0.2)
    for learn, trained in (('alphas', {'alpha'}), ('attention', {'alpha', 'c_attn', 'c_proj'})):
        c = mask_config(masks='windows', learn=learn, per_head=learn == 'alphas', **rates)
        model = mask.substitute(teacher, c)
        attn = model.h[0].attn
        assert attn.alpha.shape == (3 if c.per_head else 1, 3)
        assert model.wte.weight is teacher.wte.weight
        assert attn.c_attn.weight is not teacher.h[0].attn.c_attn.weight
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert {name.split('.')[3] for name in names} == trained
    assert teacher.h[0].attn.alpha is None and teacher.h[0].attn.masks == 'all'
    for stage, net in (('student', model), ('teacher', mask.GPT2(c))):
        names = {id(p): name for name, p in net.named_parameters() if p.requires_grad}
        for group in mask.make_optimizer(net, dataclasses.replace(c, stage=stage)).param_groups:
            p, = group['params']
            assert group['lr'] == (0.2 if names.pop(id(p)).endswith('alpha') else 2e-3)
            assert group['weight_decay'] == (0.3 if stage == 'teacher' and p.dim() > 1 else 0)
        assert not names

def test_mask_kl():
    """KL(teacher || student) by the formula; in pieces, the same; in bfloat16, still exact."""
    x, y, w = [t.float().requires_grad_() for t in qkv(1, 11, 6)]
    p, q = (y @ w[0].T).softmax(-1), (x @ w[0].T).softmax(-1)
    want = (p * (p / q).log()).sum(-1)[0]
    for limit in (mask.LOGITS, 30):
        with unittest.mock.patch.object(mask, 'LOGITS', limit):
            got = mask.token_kl(x, y, w[0])
            close(got, want, 1e-5)
            for g in torch.autograd.grad((got - want).sum(), (x, w), retain_graph=True):
                close(g, 0.0, 1e-5)
    x, w = torch.randn(1, 50, 32), torch.randn(500, 32)
    x[..., 0], w[:, 0] = 10, -10  # logits near -100, as GPT-2's are
    y = x + 0.01 * torch.randn(1, 50, 32)
    want = mask.token_kl(x, y, w)
    with torch.autocast('cpu', torch.bfloat16):
        close(mask.token_kl(x, y, w) / want, torch.ones(50), 1e-3)

def test_mask_cache():
    """The student's has a constant size, but where what masks leave out is divided by, too."""
    teacher, idx = mask_golden_model()
    for masks, reading, kept in (('all', 'renormalised', 20), ('offset:3', 'renormalised', 3),
                                 ('window:4+sinks:2', 'renormalised', 5),
                                 ('last5', 'unnormalised', 20), ('windows', 'separate', 14)):
        model = mask.substitute(teacher, mask_config(masks=masks, reading=reading))
        out, size = model.generate(idx[:, :3], 18, temperature=0)
        assert size == 2 * 2 * 2 * 24 * 8 * kept, (masks, reading, size)
        whole, cache = model(out), [{} for _ in model.h]
        assert torch.equal(whole[:, 2:-1].argmax(-1), out[:, 3:])
        for t in range(21):  # every token by a pass over all before it
            close(model(out[:, [t]], cache)[:, -1], whole[:, t], 1e-9)
    assert teacher.generate(idx[:, :3], 60)[0].shape == (2, 63)  # positions begun afresh

def mask_figures(model, teacher, x, y):
    """fidelity once more, in the plainest way."""
    real, maps, ps, gradients = y >= 0, [[], []], [], []
    at = range(real.sum()), y[real]  # the target's place in ps (N, V)
    for net, watch in zip((teacher, model), maps):
        net = mask.copy.deepcopy(net).requires_grad_(True)
        p = net(x, watch=watch)[real].softmax(-1)
        p[at].log().sum().backward()
        ps.append(p.detach())
        gradients.append(torch.cat([p.grad.flatten() for name, p in net.named_parameters()
                                    if 'attn.c_attn' in name or 'attn.c_proj' in name]))
    p, q = ps
    right = [(m.argmax(-1) == y[real]).sum() for m in ps]
    rows = [a[b, h, t, :t + 1] - s[b, h, t, :t + 1] for a, s in zip(*maps)
            for h in range(3) for b, t in real.nonzero()]
    gaps = torch.cat(rows)
    return dict(kl=(p * (p / q).log()).sum(-1).mean(), ppl=(p[at] / q[at]).log().mean().exp(),
                accuracy=right[1] / max(1, right[0]), mse=gaps.square().mean(),
                tv=gaps.abs().sum() / 2 / len(rows), cosine=F.cosine_similarity(*gradients, dim=0))

def test_mask_fidelity_and_edge_cases():
    """The report's edge cases: a padded batch, a token that is repeated, one constant token."""
    teacher, _ = mask_golden_model()
    c = mask_config(masks='window:3+sinks:1', batch_size=3, eval_rows=6)
    data = mask_data(c, teacher)
    model = mask.make_model(c, data)
    alike = mask.substitute(teacher, mask_config(masks='window:16'))
    text = list(mask.validation(data, 3, c, 'cpu'))
    assert len(text) == 2
    x, y = text[0]
    targets, repeated = y.clone(), x.clone()
    targets[0, 5:], targets[1], repeated[:, 4:12] = -1, -1, x[:, [4]]
    for batches in (text, [(x, targets)], [(repeated, y)], [(x * 0, y * 0)]):
        got = mask.fidelity(model, teacher, batches)
        for key, value in mask_figures(model, teacher, *map(torch.cat, zip(*batches))).items():
            close(got[key], value, 2e-5 * max(1, abs(value)))
        assert got['passed'] == (got['accuracy'] >= 0.95) + (got['cosine'] >= 0.95) + (
            got['mse'] <= 1e-4) + (got['kl'] <= 1e-3)
        assert got['kept'] == mask.kept_pairs(model.alphas(), c.masks, 16)
        got = mask.fidelity(alike, teacher, batches)
        assert max(got['kl'], got['mse'], got['tv'], abs(1 - got['cosine'])) < 1e-12, got

def test_mask_batches():
    """A function of seed, step and micro alone; with samples, of so many windows."""
    def batch(step=5, micro=0, batch_size=8, grad_accum_steps=2, **settings):
        c = mask_config(batch_size=batch_size, grad_accum_steps=grad_accum_steps, **settings)
        return mask.get_batch(mask_data(c), c, step, micro, 'cpu')
    seen = {tuple(row.tolist()) for step in range(20) for row in batch(step, samples=3)[0]}
    assert len(seen) == 3
    x, y, _ = batch()
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(batch()[0], x)
    z = batch(batch_size=16, grad_accum_steps=1)[0]  # one teacher for every batch size
    assert torch.equal(z, torch.cat([x, batch(micro=1)[0]]))
    for other in (batch(micro=1), batch(step=6), batch(seed=1)):
        assert not torch.equal(other[0], x)

def test_mask_memory():
    """What peak() says is what is allocated; blocks need far less than eager attention."""
    def f():
        a = torch.zeros(1000, 1000)
        del a
        return torch.zeros(500, 1000) + 1
    cpu = torch.device('cpu')
    assert 4_000_000 <= mask.peak(f, cpu) < 4_001_000
    c = mask_config(n_head=4, n_embd=64, masks='window:64+sinks:4')
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rows = mask.memory(c, 1024, cpu)
    eager, sdpa, masks = [row['attention, MiB'] for row in rows.values()]
    assert eager > 2 * 4 * 4 and masks < 0.3 * eager and sdpa < 0.3 * eager
    size = sum(p.nbytes for p in mask.GPT2(c).parameters()) / 2**20
    for row in rows.values():  # a step has gradients, too
        assert row['training step, MiB'] > 2 * size and row['inference, MiB'] > size
    assert out.getvalue().count('PASS') + out.getvalue().count('FAIL') == 3

def test_mask_two_stages():
    """One teacher, found again; KL falls; L1 lets both alphas fall, as the report saw."""
    go = functools.partial(run, script=mask)
    with folder() as path:
        flags = tiny(mask, path, '--teacher-iters', 30, '--teacher-lr', 0.03)
        _, out, _, before = go(*flags, '--max-iters', 0)
        assert out.index('step 30/30') < out.index('stage 2 of 2')
        _, out, _, result = go(*flags, '--max-iters', 40, '--learning-rate', 0.003,
                               '--masks', 'window:1', '--batch-size', 8)
        log = result['log']
        assert 'step 29/30' not in out and log[-1]['val_loss'] < 0.7 * log[0]['val_loss']
        assert abs(result['kl'] - result['val_loss']) < 1e-6
        assert out.count('PASS') + out.count('FAIL') == 2 * 4 and 'result: ' in out
        a, b = [torch.load(r['folder'] / 'ckpt.pt', weights_only=True)['model']
                for r in (before, result)]
        moved = {key.partition('attn.')[2] for key in b if not torch.equal(a[key], b[key])}
        assert moved == {'alpha', 'c_attn.weight', 'c_attn.bias', 'c_proj.weight', 'c_proj.bias'}
        refuse(['student'], *flags, '--init', result['folder'] / 'ckpt.pt', script=mask)
        refuse(['one teacher'], 'compare', *flags, '--over', 'n-layer=1,2', script=mask)
        last = ['--out-dir', path / 'out', '--device', 'cpu', '--run', result['folder']]
        _, _, _, texts = go('sample', *last, '--new-tokens', 5)
        assert [text[0] for text in texts] == mask.PROMPTS
        _, _, _, found = go('criteria', *last, '--lengths', '32,64')
        assert set(found['memory']) == {32, 64}
        assert abs(found['trained']['kl'] - min(r['val_loss'] for r in log if 'kept' in r)) < 1e-6
        _, _, _, found = go('inspect', *flags, '--masks', 'first-all', '--learn', 'alphas',
                            '--max-iters', 20, '--alpha-lr', 0.2, '--eval-interval', 10,
                            '--over', 'l1=0.5')
        rows = found['0.5']  # two layers, steps 0, 10 and 20
        for name, n in itertools.product(('first:1', 'all:1'), range(2)):
            assert 0.5 == rows[n][name] > rows[n + 2][name] > rows[n + 4][name]

def test_mask_mistakes():
    for bad in ('nonsense', '', 'window', 'window:0', 'window:-3', 'window:4+', 'sinks:1e3'):
        refuse(['--masks', 'window:N', 'last5'], '--masks', bad, script=mask)
    teacher = ['--init', HERE / 'assets' / 'teacher.safetensors']
    with folder() as path:
        for word, *bad in (('--reading', '--reading', 'other'), ('--budget', '--budget', 1.5),
                           ('--n-head', '--n-head', 3), ('block-size', '--block-size', 5000),
                           ('256 positions', '--block-size', 257, *teacher)):
            refuse([word], *tiny(mask, path, *bad), script=mask)

def test_mask_facts_of_the_report():
    """1,000 samples of 512 tokens, 100 epochs, L1; its prompts and criteria."""
    c = mask.Config(**mask.PRESETS['report004'])
    assert (c.masks, c.samples, c.block_size, c.data) == ('last5', 1000, 512, 'wikitext-2')
    assert c.max_iters * c.batch_size * c.grad_accum_steps == 100 * c.samples and c.l1 > 0
    assert mask.CRITERIA == dict(accuracy=0.95, cosine=0.95, mse=1e-4, kl=1e-3)
    assert 'saved >= 0.3' in inspect.getsource(mask.memory)
    assert zlib.crc32('\n'.join(mask.PROMPTS).encode()) == 2326627579 and len(mask.PROMPTS) == 7

# ------------------------------------ prepare_data.py ------------------------------------
PROSE = 'Zwölf Boxkämpfer — 日本 🎉\r\n\n  jagen\tViktor <|endoftext|> \x00\n' * 200
refuse_data = functools.partial(refuse, script=prepare_data)

def prepare(*argv):
    return run(*argv, script=prepare_data)[3]

def content(path):
    if path.suffix != '.npz':
        return path.read_bytes()
    z = np.load(path, allow_pickle=False)
    return z['labels'].tolist(), z['images'].shape[1:], z['images'].tobytes()

def contents(path):
    return {p.relative_to(path).as_posix(): content(p) for p in path.rglob('*') if p.is_file()}

def archive(kind, members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') if kind == 'zip' else tarfile.open(None, kind, buffer) as out:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.writestr(name, data) if kind == 'zip' else out.addfile(info, io.BytesIO(data))
    return buffer.getvalue()

@contextlib.contextmanager
def serving(body, cuts=0, ranges=True):
    """A server whose first answers break off half-way -> its url, the Range headers that came."""
    log = []
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            log.append(self.headers.get('Range'))
            first = int(log[-1][6:-1]) if ranges and log[-1] else 0
            self.send_response(416 if first >= len(body) else 206 if first else 200)
            self.send_header('Content-Length', str(max(0, len(body) - first)))
            self.end_headers()
            self.wfile.write(body[first:(first + len(body)) // 2 if len(log) <= cuts else None])
        log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/', log
        server.shutdown()

def test_prep_text_and_mistakes():
    with folder() as path:
        notes, out = path / 'my.notes.txt', path / 'data' / 'my.notes'
        flags = ['text', notes, '--data-dir', path / 'data', '--tokenizer', 'bytes']
        notes.write_bytes(b'\xef\xbb\xbf' + PROSE.encode())
        meta, cut = prepare(*flags), int(0.9 * len(PROSE))
        for split, part in (('train', PROSE[:cut].encode()), ('val', PROSE[cut:].encode())):
            assert np.fromfile(out / f'{split}.bin', '<u2').tolist() == list(part)
            assert meta['tokens'][split] == meta['bytes'][split] == len(part)
        before = contents(path / 'data')
        assert meta == json.loads(before['my.notes/meta.json']) and meta['vocab_size'] == 256
        mistakes = {'text': 'FILE', 'pile': 'choice', 'gpt2 --tokenizer gpt2': 'none',
                    'gpt2 x': '--from', 'coco --parts 3': '1 to 2', '--tok': 'tok',
                    'cifar10 --from x': 'no such file', 'fineweb --parts 0': '1 to 103'}
        for line, word in mistakes.items():
            refuse_data([word], *line.split(), *flags[2:4])
        for words in (b'', b'ab', b'\xe9' * 99):
            notes.write_bytes(words)
            refuse_data(['my.notes.txt', 'utf-8'], *flags)
        notes.write_text('changed ' * 10)
        with unittest.mock.patch('prepare_data.tell', side_effect=OSError(28, 'No space left')):
            refuse_data(['No space left'], *flags)
        assert contents(path / 'data') == before
        with unittest.mock.patch('os.replace') as moved:  # the worst moment: there is no dataset
            assert prepare(*flags) and content(out / 'meta.json') == b''
        assert moved.call_args.args[1] == out / 'meta.json'  # it comes last
        assert prepare(*flags)['tokens'] == {'train': 72, 'val': 8}
        (out / 'meta.json').unlink()
        refuse_data(['elsewhere'], *flags)  # files without one are somebody else's

@unittest.mock.patch('prepare_data.PAUSE', 0)
def test_prep_downloads():
    """A server that cuts, ignores Range, has less, has another file, or breaks off for ever."""
    body = b'to be or not to be\n' * 20_000
    size, good = len(body), 'sha256:' + hashlib.sha256(body).hexdigest()
    with folder() as path:
        file, part = path / 'a', path / 'a.part'
        def error(size, digest, *urls):
            get = lambda argv: prepare_data.download([*urls], file, size, digest)
            return run(script=types.SimpleNamespace(main=get))[2]
        for known in ((size, good), (size, good[:15]), (None, None)):
            with serving(body, cuts=2) as (url, log):
                assert error(*known, url) == '' and content(file) == body
            assert log[0] is None and 'bytes=0-' < log[1] < log[2] and len(log) == 3, log
            file.unlink()
        with serving(body[:-1] + b'?') as (bad, log), serving(body, 1, False) as (url, _):
            assert good[7:] in error(size, good, bad) and log == [None] and not part.exists()
            assert error(size, good, bad, url) == '' and content(file) == body
        with serving(body, 99) as (url, log), serving(b'<html>log in', 0, False) as (page, _):
            assert 'run this again' in error(size, good, url) and len(log) == prepare_data.ATTEMPTS
            have = content(part)
            assert f'12 bytes, not {size:,}' in error(size, good, page) and content(part) == have
        part.write_bytes(body + b'!')
        with serving(body) as (url, log):  # the part is no part of it
            assert error(size, good, url) == '' and log == [f'bytes={size + 1}-', None]
            for name in ('resnet50', 'detr-r50', 'gpt2', 'shakespeare'):
                row = (*prepare_data.DATASETS[name][:3], [(size, good, url + 'x')])
                flags = [name, '--data-dir', path] + ['--tokenizer', 'bytes'] * (name[0] == 's')
                refuse_data([', not '], *flags, '--from', __file__)
                with unittest.mock.patch.dict(prepare_data.DATASETS, {name: row}):
                    result = prepare(*flags)
                    with unittest.mock.patch('prepare_data.get_tokenizer', None):
                        assert result and prepare(*flags) == result  # nothing left to do
        assert len(log) == 6 and content(path / 'weights/gpt2/model.safetensors') == body

EVIL = {name: b'cos\nsystem\n.' for name in (
    '../../1.jpg', '/etc/000000000001.jpg', 'val2017/../000000000001.jpg', 'x.pkl')}

def check_archives(cases):
    """{dataset: (files that come, files that are wanted)}: members with the expected names end
    where they should, whatever else is there; half a file is refused, and what was there stays."""
    with folder() as path:
        for name, (raw, want) in cases.items():
            (path / name).mkdir()
            flags = [name, '--no-verify', '--data-dir', path / 'data', '--from', path / name]
            flags += ['--tokenizer', 'bytes'] * (prepare_data.DATASETS[name][1] == '')
            for half in (False, True):
                for file, data in raw.items():
                    (path / name / file).write_bytes(data[:len(data) // 2] if half else data)
                refuse_data(['whole'], *flags) if half else prepare(*flags)
                found = contents(path / 'data' / name)
                assert b'(unverified)' in found.pop('meta.json') and found == want, name
        assert {p.name for p in path.iterdir()} == {'data', *cases}

def test_prep_cifar_and_coco():
    pixels = bytes(range(256)) * 12
    cifar = {f'cifar-10-batches-bin/data_batch_{i}.bin': bytes([i]) + pixels for i in range(1, 6)}
    cifar |= {'cifar-10-batches-bin/test_batch.bin': b'\7' + pixels[::-1],
              'cifar-10-batches-bin/batches.meta.txt': b'cat\ndog\n\n'}
    jpegs = {f'val2017/{i:012d}.jpg': b'x' * i for i in range(3)}
    boxes = {'annotations/instances_val2017.json': b'{}'}
    check_archives({
        'cifar10': ({'cifar-10-binary.tar.gz': archive('w:gz', EVIL | cifar)}, {
            'train.npz': ([1, 2, 3, 4, 5], (3, 32, 32), 5 * pixels),
            'test.npz': ([7], (3, 32, 32), pixels[::-1])}),
        'coco': ({'val2017.zip': archive('zip', EVIL | jpegs), 'annotations_trainval2017.zip':
                  archive('zip', EVIL | boxes)}, jpegs | boxes)})
def test_prep_tokens():
    for size in (50, 333):  # GPT-2's pattern starts anew at the last white space before a word
        pieces = list(prepare_data.pieces(io.StringIO(PROSE, newline=''), size))
        assert ''.join(pieces) == PROSE and len(pieces) > len(PROSE) / size / 2
        assert all(re.match(r'[ \n]\S', piece) for piece in pieces[1:])
    with folder() as path:
        (path / 'text').write_text(PROSE)
        flags = ['text', path / 'text', '--data-dir', path / 'data']
        with unittest.mock.patch('tiktoken.get_encoding', side_effect=OSError('a\nb')):
            refuse_data(['TIKTOKEN_CACHE_DIR'], *flags)
        with unittest.mock.patch('prepare_data.write_bins', side_effect=KeyboardInterrupt):
            assert run(*flags, '--tokenizer', 'bytes', script=prepare_data)[0] == 130
    out, data = prepare_data.get_tokenizer('bytes'), PROSE.encode()
    assert out.encode_ordinary(PROSE) == list(data) and out.decode(list(data)) == PROSE

def test_prep_other_archives():
    pixels, wide = bytes(range(256)) * 12, lambda data: np.array([*data], '<u2').tobytes()
    fine = {'cifar-100-binary/train.bin': b'\3\7' + pixels, 'cifar-100-binary/test.bin': b'',
            'cifar-100-binary/fine_label_names.txt': b'apple\n'}
    evil = {'x/imagenette2-160/val/n01440764/2.JPEG': b'x', '../imagenette2-160/val/1.JPEG': b'x',
            'imagenette2-160/val/n99999999/1.JPEG': b'x', **EVIL}
    photos, by_word = {}, {}
    for split, (label, word) in itertools.product(('train', 'val'), prepare_data.WORDS.items()):
        photos[f'imagenette2-160/{split}/{label}/1.JPEG'] = label.encode()
        by_word[f'{split}/{word}/1.JPEG'] = label.encode()
    pages = {f'{i}.txt': b'\n %d\n\n\n\nb ' % i**9 for i in range(2001)}
    texts = [b'%d\n\nb\n\n' % i**9 for i in range(2001)]
    packed = prepare_data.lzma.compress(archive('w:', {'x.pkl': b''} | pages), preset=0)
    shard = np.array([20240520, 1, 1000] + [0] * 253, '<i4').tobytes() + 1000 * b'\x50\xc4'
    wiki = {'wikitext-2-raw/wiki.train.raw': b'a b', 'wikitext-2-raw/wiki.valid.raw': b'ab'}
    check_archives({
        'wikitext-2': ({'wikitext-2-raw-v1.zip': archive('zip', EVIL | wiki)},
                       {'train.bin': wide(b'a b'), 'val.bin': wide(b'ab')}),
        'fineweb': ({f'fineweb_{name}.bin': shard for name in ('train_000001', 'val_000000')},
                    {'train.bin': shard[1024:], 'val.bin': shard[1024:]}),
        'openwebtext': ({'urlsf_subset00.tar': archive('w:', {'x.pkl': b'', 'owt/1.xz': packed})}, {
            'train.bin': wide(b''.join(texts[1:2000])), 'val.bin': wide(texts[0] + texts[2000])}),
        'cifar100': ({'cifar-100-binary.tar.gz': archive('w:gz', EVIL | fine)}, {
            'train.npz': ([7], (3, 32, 32), pixels), 'test.npz': ([], (3, 32, 32), b'')}),
        'imagenette': ({'imagenette2-160.tgz': archive('w:gz', evil | photos)}, by_word)})
    with folder() as path:
        (path / 'fineweb_val_000000.bin').write_bytes(shard)
        for bad in (b'\0' + shard[1:], shard[:-1] + b'\xff', shard + b'ab'):
            (path / 'fineweb_train_000001.bin').write_bytes(bad)
            refuse_data(['000001.bin has'], 'fineweb', '--from', path, '--no-verify',
                        '--data-dir', path / 'data')

# ------------------------------------ what all four scripts share ------------------------------------
def source(script):
    return pathlib.Path(script.__file__).read_text('utf-8')

def test_blocks_are_identical():
    for name in ('training loop', 'tools'):
        block = rf'# --- {name} \(identical.*?# --- end of {name}\n'
        texts = {re.search(block, source(script), re.S)[0] for script in SCRIPTS}
        assert len(texts) == 1, f'the scripts differ in their block "{name}"'
    heads = {source(script).split('"""')[0] for script in SCRIPTS}
    assert len(heads) == 1 and '# /// script' in heads.pop()

def test_reading_map():
    """The last line of the paper, as each docstring names it, is the one before the banner."""
    for script in SCRIPTS:
        last = int(re.search(r'^Lines 1-(\d+)', script.__doc__, re.M)[1])
        assert source(script).splitlines()[last].startswith('# ---------'), (script.SCRIPT, last)
        assert 'tools' in source(script).splitlines()[last]

def test_equation_tags():
    """Every equation that a docstring names is marked in the code, and the other way round."""
    for script in SCRIPTS:
        _, docstring, code = source(script).split('"""', 2)
        tag = r'\[\w+ (?:Eq|Sec|Alg)\. [\d.]+\]'
        assert set(re.findall(tag, docstring)) == set(re.findall(tag, code)) != set(), script.SCRIPT

def test_commands_in_the_texts():
    """What README.md, results.md and the docstrings tell to type is what the scripts take."""
    texts = [(HERE / name).read_text('utf-8') for name in ('README.md', 'assets/results.md')]
    texts += [script.__doc__ for script in SCRIPTS]
    by_name = {script.SCRIPT: script for script in SCRIPTS}
    seen = 0
    for line in re.findall(r'(?:python|uv run|nproc-per-node 2) (\w+\.py[^`\n#]*)', '\n'.join(texts)):
        name, *argv = shlex.split(line.split(' && ')[0])
        if name[:-3] in by_name:
            with contextlib.redirect_stdout(io.StringIO()):
                by_name[name[:-3]].parse(argv)
            seen += 1
    assert seen > 30, seen

def test_streams_have_names():
    """[1, 7] and [1, 7, 0] are one seed to NumPy: what is drawn for different ends has a name."""
    assert (np.random.default_rng([1, 7]).random() == np.random.default_rng([1, 7, 0]).random())
    for script in (vit, detr, mask):
        assert source(script).count('default_rng(') == 1, script.SCRIPT
        draws = [script.stream(name, *numbers).random() for name in ('batch', 'validation')
                 for numbers in ((1, 7), (1, 7, 0), (1, 70), (17,))]
        assert len(set(draws)) == len(draws)
    assert source(gpt).count('default_rng(') == 1  # one stream needs no name

def test_configs():
    """Presets and rows of tables are valid, every field is a flag, and --help is Config itself."""
    for script in SCRIPTS:
        for settings in (*script.PRESETS.values(), *itertools.chain.from_iterable(
                rows.values() for rows in script.TABLES.values())):
            script.Config(**settings)
        code, out, _, _ = run('--help', script=script)
        assert code == 0 and max(map(len, out.splitlines())) <= 125
        for field in dataclasses.fields(script.Config):
            assert f'{field.name}: ' in out
        names = [field.name for field in dataclasses.fields(script.Config)]
        shared = ['seed', 'max_iters', 'batch_size', 'device', 'out_dir', 'over', 'seeds', 'rounds']
        assert [name for name in names if name in shared] == shared

def test_pasted_into_a_notebook():
    """Where there is no file, a script only defines things."""
    for script in SCRIPTS:
        module = types.ModuleType('cell')
        with unittest.mock.patch.dict(sys.modules, cell=module):
            exec(source(script), module.__dict__)
            assert module.Config().max_iters > 0

def test_a_variant_of_your_own():
    """README's example, put into the script, trains; so does the code to paste into a model."""
    first, second = re.findall(r'```python\n(.*?)```', (HERE / 'README.md').read_text('utf-8'), re.S)
    head, row = first.splitlines()
    assert head in source(gpt)
    with folder() as path:
        (path / 'mine.py').write_text(source(gpt).replace(head, head + '\n' + row))
        with unittest.mock.patch.object(sys, 'path', [str(path), *sys.path]):
            mine = importlib.import_module('mine')
        mh, v, _ = qkv(2, 3, 4, 5)
        close(mine.ATTENTION['laplacian'](mh, v, None)[:, :, 2:], mh[:, :, 2:], 0)
        close(mine.ATTENTION['laplacian'](mh, v, None)[:, :, :2], (v - mh)[:, :, :2], 0)
        code, out, err, _ = run(*tiny(gpt, path, '--attention', 'laplacian'), script=mine)
        assert code == 0 and 'model   laplacian' in out, err
    q, k, v = qkv(2, 3, 6, 4, dtype=torch.float32)
    names = dict(q=q, k=k, v=v, w_o=torch.nn.Identity())
    exec(second, names)
    own = v.transpose(1, 2)
    close(names['out'], gpt.ATTENTION['belief'](gpt.multi_head(q, k, v), own, None).flatten(2), 1e-6)

# ------------------------------------ the training loop ------------------------------------
def test_schedules():
    c = gpt.Config(warmup_iters=10, max_iters=110, learning_rate=6e-4)
    factor = [gpt.schedule(i, c) for i in range(111)]
    close(torch.tensor([factor[i] for i in (0, 9, 10, 60, 110)]),
          torch.tensor([1 / 11, 10 / 11, 1, 0.55, 0.1]), 1e-7)
    c = dataclasses.replace(c, schedule='trapezoid', warmdown_iters=20)
    factor = [gpt.schedule(i, c) for i in range(111)]
    assert [factor[i] for i in (0, 9, 10, 90, 100, 110)] == [0.1, 1, 1, 1, 0.5, 0]
    c = dataclasses.replace(c, schedule='constant')
    assert [gpt.schedule(i, c) for i in (4, 10, 110)] == [0.5, 1, 1]
    c = dataclasses.replace(c, schedule='step')
    assert [gpt.schedule(i, c) for i in (4, 10, 89, 90, 109)] == [0.5, 1, 1, 0.1, 0.1]

def test_training_by_hand():
    """Five steps of AdamW written out: accumulation, clipping, decay, warmup and cosine."""
    with folder() as path:
        flags = tiny(gpt, path, '--grad-accum-steps', 2, '--max-iters', 5, '--grad-clip', 0.5,
                     '--bias', '--beta1', 0.8, '--beta2', 0.9, '--weight-decay', 0.3)
        result = run(*flags)[3]
        with contextlib.redirect_stdout(io.StringIO()):
            _, c = gpt.parse([str(flag) for flag in flags])
            data = gpt.load_data(c)
        model = gpt.make_model(c, data)
        moments = {}
        cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 3)) / 2 for i in range(3)]
        for step, factor in enumerate([1 / 3, 2 / 3, *cosine]):
            lr = c.learning_rate * factor
            batches = [gpt.get_batch(data, c, step, micro, 'cpu') for micro in (0, 1)]
            x, y = [torch.cat(pair) for pair in zip(*batches)]
            model.zero_grad()
            loss = F.cross_entropy(model(x, y)[0].flatten(0, 1), y.flatten())
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            assert norm > 0.5 and abs(result['log'][step + 1]['loss'] - loss.item()) < 1e-4
            with torch.no_grad():
                for p in model.parameters():
                    g = p.grad * 0.5 / norm
                    m, v = moments.get(p, (0, 0))
                    moments[p] = m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
                    p.mul_(1 - lr * 0.3 * (p.dim() > 1))
                    m, v = m / (1 - 0.8 ** (step + 1)), v / (1 - 0.9 ** (step + 1))
                    p.sub_(lr * m / (v.sqrt() + 1e-8))
        for name, p in checkpoint(path)['model'].items():
            close(p, model.state_dict()[name], 2e-5)

def test_dropout_differs_from_step_to_step():
    with folder() as path:
        flags = tiny(gpt, path, '--dropout', 0.5, '--learning-rate', 1e-30)
        (path / 'text.txt').write_text('a' * 2000)  # every batch is the same
        losses = [row['loss'] for row in run(*flags)[3]['log'][1:]]
        assert len(set(losses)) == len(losses) == 6

def interrupted(script, step, number):
    """A patch: the process gets this signal while it prepares this step."""
    whole = script.get_batch
    def get_batch(data, c, now, micro, device):
        if now == step and micro == 0:
            os.kill(os.getpid(), number)
        return whole(data, c, now, micro, device)
    return unittest.mock.patch.object(script, 'get_batch', get_batch)

def test_resume_bit_for_bit():
    """Stopped in the middle, between two lines of the log, and given again: the same weights."""
    for script in SCRIPTS:
        with folder() as path:
            flags = tiny(script, path, '--log-interval', 3, '--grad-accum-steps', 2)
            whole = run(*flags, script=script)[3]
            want = torch.load(whole['folder'] / 'ckpt.pt', weights_only=True)
            shutil.rmtree(whole['folder'])
            before = signal.getsignal(signal.SIGTERM)
            with interrupted(script, 4, signal.SIGTERM):
                code, out, err, _ = run(*flags, script=script)
            assert code == 128 + signal.SIGTERM and 'the same command goes on' in out, (out, err)
            assert signal.getsignal(signal.SIGTERM) is before
            code, out, err, part = run(*flags, script=script)
            assert code == 0 and 'goes on from step 5' in out, (script.SCRIPT, out, err)
            got = torch.load(part['folder'] / 'ckpt.pt', weights_only=True)
            assert same(want['model'], got['model']), script.SCRIPT
            rows = [[{**row, 'seconds': 0} for row in saved['progress'][3]] for saved in (want, got)]
            assert repr(rows[0]) == repr(rows[1])  # repr: there may be nan
            code, out, _, again = run(*flags, script=script)  # nothing left to do
            assert code == 0 and 'is finished' in out and again['folder'] == part['folder']
            assert 'step 0/6' in run(*flags, '--fresh', script=script)[1]
            with open(part['folder'] / 'log.csv', newline='') as file:
                assert [row['step'] for row in csv.DictReader(file)] == ['0', '3', '6']

def test_float16():
    """In float16 too a stopped run goes on with its loss scale, and gradients that stay infinite
    stop it."""
    with folder() as path:
        flags = tiny(gpt, path, '--dtype', 'float16')
        whole = run(*flags)[3]
        want = checkpoint(path)
        shutil.rmtree(whole['folder'])
        with interrupted(gpt, 4, signal.SIGINT):
            assert run(*flags)[0] == 128 + signal.SIGINT
        run(*flags)
        assert same(want['model'], checkpoint(path)['model'])
        assert want['scaler'] == checkpoint(path)['scaler'] and want['scaler']['scale'] > 1
        huge = lambda model, batch, c: model(*batch)[1] + (model.lm_head.weight * 1e30).sum() * 1e30
        shrink = lambda model, batch, c: huge(model, batch, c) - huge(model, batch, c).detach()
        with unittest.mock.patch.object(gpt, 'loss_of', shrink):
            refuse(['gradient norm', 'step'], *flags, '--seed', 5, '--max-iters', 40)

def test_loss_that_is_not_finite():
    """It stops in that step with one line; the checkpoint is from before."""
    for script in (gpt, vit, detr):  # mask_distill trains a teacher first
        with folder() as path:
            steps = iter([1, 1, 1, 1, math.nan])
            loss_of = script.loss_of
            broken = lambda *batch: loss_of(*batch) * next(steps)
            evaluate = unittest.mock.patch.object(
                script, 'evaluate', lambda *_: {script.METRIC: 1.0, 'AP50': 0.0})
            with unittest.mock.patch.object(script, 'loss_of', broken), evaluate:
                refuse(['loss nan', 'step 4'], *tiny(script, path), script=script)
            assert checkpoint(path)['progress'][0] == 3
            assert all(p.isfinite().all() for p in checkpoint(path)['model'].values())

def test_time_limit():
    """--max-minutes stops a run, in a comparison too; the same command goes on."""
    with folder() as path:
        flags = tiny(gpt, path, '--over', 'gamma=1,2', '--seeds', '0')
        code, out, _, rows = run('compare', *flags, '--max-minutes', 1e-9)
        assert code == 0 and 'stopped; the same command goes on' in out and rows == []
        rows = run('compare', *flags)[3]
        assert [row['case'] for row in rows] == ['1', '2']

def test_killed():
    """SIGKILL at any moment, and the same command: the weights of a run that nobody disturbed."""
    with folder() as path:
        flags = [str(flag) for flag in tiny(gpt, path, '--max-iters', 300, '--eval-interval', 20)]
        whole = run(*flags)[3]
        want = checkpoint(path)['model']
        shutil.rmtree(whole['folder'])
        process = subprocess.Popen([sys.executable, str(HERE / 'attentionx_gpt.py'), *flags],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (whole['folder'] / 'ckpt.pt').exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.15)
        process.kill()
        process.wait()
        assert checkpoint(path)['progress'][0] < 300
        run(*flags)
        assert same(want, checkpoint(path)['model'])

TORCHRUN = '''
import importlib, json, os, sys
os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'
for name, argv in json.loads(sys.argv[1]).items():
    os.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + 1)  # each meets at its own
    importlib.import_module(name).main(argv)
'''

def test_two_processes():
    """Two processes with the flags of one end with its weights; a stopped pair goes on."""
    with folder() as path:
        (path / 'run.py').write_text(TORCHRUN)
        argv = {script.SCRIPT: [str(flag) for flag in tiny(script, path)] for script in SCRIPTS}
        results = [run(*argv[script.SCRIPT], script=script)[3] for script in SCRIPTS]
        alone = [torch.load(r['folder'] / 'ckpt.pt', weights_only=True)['model'] for r in results]
        for result in results:
            shutil.rmtree(result['folder'])
        command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2',
                   '--master-port', str(20000 + os.getpid() % 10000), str(path / 'run.py')]
        done = subprocess.run([*command, json.dumps(argv)], capture_output=True, text=True,
                              env={**os.environ, 'PYTHONPATH': str(HERE)})
        assert done.returncode == 0, done.stderr
        for result, want in zip(results, alone):
            both = torch.load(result['folder'] / 'ckpt.pt', weights_only=True)
            assert both['progress'][0] == 6
            for a, b in zip(both['progress'][3][1:], result['log'][1:]):
                assert abs(a['loss'] - b['loss']) < 1e-4 * (0.01 + b['loss']), (a, b)
            for name, p in both['model'].items():  # Adam makes steps of rounding where nothing else is
                close(p.double().mean(), want[name].double().mean(), 1e-4)
                close(p, want[name], 1e-3)

def test_full_disk():
    """A checkpoint that cannot be written: one line, and the one before is intact."""
    with folder() as path:
        flags = tiny(gpt, path, '--n-embd', 64)
        with interrupted(gpt, 4, signal.SIGTERM):
            run(*flags)
        before = checkpoint(path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            refuse(['cannot write', 'intact'], *flags)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert same(before['model'], checkpoint(path)['model'])
        assert not list(path.glob('**/*.part'))

# ------------------------------------ the tools ------------------------------------
def test_mistakes():
    """The likely ones, in every script: one line, exit code 2, nothing lost."""
    for script in SCRIPTS:
        with folder() as path:
            refuse(['--help'], '--no-such-flag', script=script)
            refuse(['--max'], '--max', 3, script=script)  # no abbreviations
            refuse(['--seed', 'many'], '--seed', 'many', script=script)
            refuse(['--preset', 'huge'], '--preset', 'huge', script=script)
            refuse(['--schedule zigzag', 'cosine'], '--schedule', 'zigzag', script=script)
            refuse(['no-such-data'], *tiny(script, path), '--data', 'no-such-data', script=script)
            refuse(['--over'], 'compare', *tiny(script, path, '--over', 'nothing=1'), script=script)
            refuse(['--over'], 'compare', *tiny(script, path, '--over', 'seed=x'), script=script)
            refuse(['--final-seeds'], 'compare', *tiny(script, path, '--seeds', '0,1'),
                   '--final-seeds', '1', script=script)
            if not torch.cuda.is_available():
                refuse(['CUDA'], *tiny(script, path), '--device', 'cuda', script=script)
            with unittest.mock.patch.object(script, 'WORLD', 2):
                refuse(['--batch-size 3', '2 processes'], '--batch-size', 3, script=script)
            done = run(*tiny(script, path), script=script)[3]['folder']
            for damage in (b'', b'no checkpoint', (done / 'ckpt.pt').read_bytes()[:-100],
                           pickle_of_code()):
                (done / 'ckpt.pt').write_bytes(damage)
                refuse(['ckpt.pt'], *tiny(script, path), script=script)
                assert (done / 'ckpt.pt').read_bytes() == damage
            torch.save(dict(script='another'), done / 'ckpt.pt')
            refuse(['ckpt.pt', 'another.py'], *tiny(script, path), script=script)
            full = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20 GiB')
            with unittest.mock.patch.object(script, 'loss_of', side_effect=full):
                refuse(['out of memory', '--batch-size'], *tiny(script, path), '--fresh', script=script)

def pickle_of_code():
    """A file that would run code if it were unpickled without care."""
    class Evil:
        def __reduce__(self):
            return exec, ('raise SystemError("code has run")',)
    out = io.BytesIO()
    torch.save(Evil(), out)
    return out.getvalue()

def test_texts_retrain_nothing():
    """A comment, a docstring, another variant: the same run. A formula, a setting: another."""
    def name(before='', after='', **settings):
        text = source(gpt)
        assert before in text
        with unittest.mock.patch.object(gpt, 'SOURCE', text.replace(before, after, 1)):
            return gpt.run_folder(gpt.Config(**settings))
    row = "    'belief': lambda"
    assert name() == name('# ------', '# a comment\n# ------') == name('def schedule(', '\n\ndef schedule(')
    assert name() == name('"""Factor on', '"""A factor on') == name('def report', 'def report_it')
    assert name() == name(row, "    'mine': lambda mh, v, gamma: v,\n" + row)
    assert name() == name(row, "    'belief': lambda mh, v, gamma: mh,\n    'old': lambda")
    assert name() != name('v - gamma * mh', 'v - gamma * mh * 1')
    assert name() != name('F.gelu', 'F.silu') and name() != name(gamma=2.0)
    assert name(attention='belief') != name(row, "    'old': lambda", attention='belief')
    changed = source(vit).replace('255 - x', '254 - x')  # an operation of RandAugment
    with unittest.mock.patch.object(vit, 'SOURCE', changed):
        other = vit.run_folder(vit.Config())
    assert other != vit.run_folder(vit.Config())

def test_student():
    """Student's t and p: the textbook's 5 % points."""
    for n, t in ((2, 12.706), (3, 4.303), (5, 2.776), (8, 2.365)):
        gaps = np.linspace(-1, 1, n)
        gaps += t * gaps.std(ddof=1) / n ** 0.5
        got_t, p = gpt.student(gaps)
        assert abs(got_t - t) < 1e-9 and abs(p - 0.05) < 1e-4, (n, got_t, p)
    assert all(map(math.isnan, gpt.student(np.zeros(3)))) and math.isnan(gpt.student([1.0])[1])

def fake(figure):
    """A patch of train: a run ends at once, with figure(c)."""
    def train(c, path=None):
        value = figure(c)
        if value is None:
            raise FloatingPointError('loss nan, gradient norm nan in step 3')
        log = [dict(step=0, seconds=0.0, val_loss=9.0, loss=9.0),
               dict(step=c.max_iters, seconds=1.0, val_loss=value, loss=value)]
        yield c.max_iters, torch.nn.Linear(2, 2), log
    return unittest.mock.patch.object(gpt, 'train', train)

def test_compare_at_best():
    """One rate flips the order, one run diverges, one best lies at the end: all are said."""
    best = {'softmax': 4e-3, 'belief': 1e-3}
    def figure(c):
        if c.learning_rate == 8e-3 and c.attention == 'belief':
            return None
        gap = abs(math.log2(c.learning_rate / best[c.attention]))
        return 2 + 0.1 * gap - 0.02 * (c.attention == 'belief') + 0.001 * (c.seed % 3)
    flags = ['compare', '--over', 'learning_rate=1e-3,2e-3,4e-3,8e-3', '--over',
             'attention=softmax,belief', '--seeds', '0,1', '--best', 'learning_rate']
    with folder() as path, fake(figure):
        code, out, err, rows = run(*flags, '--final-seeds', '5,6,7', '--out-dir', path)
        assert code == 0, err
        assert [row['case'] for row in rows] == ['softmax 4e-3', 'belief 1e-3']
        assert abs(rows[0]['mean'] - 2.001) < 1e-9 and abs(rows[1]['diff'] + 0.02) < 1e-9
        assert 'seeds 5,6,7' in out and 'belief 8e-3, seed 1 counts as worst' in out
        assert out.count('at the end of the range') == 1 and 'Holm' in out
        assert max(map(len, out.split('that choose')[1].splitlines()[1:-2])) <= 80
        if importlib.util.find_spec('matplotlib'):
            assert len(list(path.glob('*/*/choice.png'))) == 1
        refuse(['--best gamma', '--over gamma'], *flags, '--best', 'gamma', '--out-dir', path)
        equal_rates = run(*flags[:2], 'learning_rate=1e-3', *flags[3:7], '--out-dir', path)[3]
        assert equal_rates[1]['diff'] < -0.2  # at that one rate belief seems far ahead
        with unittest.mock.patch.object(gpt, 'BETTER', max):
            rows = run(*flags, '--out-dir', path)[3]
            assert rows[1]['case'] == 'belief 4e-3'  # the worst that has not diverged
            assert [row['case'] for row in rows][0] == 'softmax 1e-3'

def test_holm():
    """Three comparisons: the smallest p counts three times, no p is less than one before it."""
    shifts = {'softmax': (0, 0, 0), 'attentionx': (1, 2, 3), 'belief': (1, 1.1, 1.2),
              'belief-head': (1, 2, 2.9)}
    with folder() as path, fake(lambda c: 2.0 + shifts[c.attention][c.seed]):
        rows = run('compare', '--over', 'attention=' + ','.join(shifts), '--out-dir', path)[3]
    p = [row['p'] for row in rows]
    assert p[2] < p[1] and abs(rows[2]['holm'] - 3 * p[2]) < 1e-12
    ordered = sorted(rows[1:], key=lambda row: row['p'])
    assert abs(ordered[1]['holm'] - 2 * ordered[1]['p']) < 1e-12
    assert abs(ordered[2]['holm'] - max(ordered[2]['p'], 2 * ordered[1]['p'])) < 1e-12

def test_compare():
    """Each script's, once; figures by hand; a second time everything is found."""
    for script in SCRIPTS:
        with folder() as path:
            flags = ['compare', *tiny(script, path), '--over', 'learning_rate=1e-3,1e-2',
                     '--seeds', '0,1']
            code, out, err, rows = run(*flags, script=script)
            assert code == 0 and len(rows) == 2, (script.SCRIPT, err)
            runs = {}
            for found in path.glob('out/*/*/ckpt.pt'):
                saved = torch.load(found, weights_only=True)
                c = saved['config']
                runs[c['learning_rate'], c['seed']] = saved['progress'][3][-1]
            figure = script.RESULTS[0]
            gaps = [runs[1e-2, seed][figure] - runs[1e-3, seed][figure] for seed in (0, 1)]
            close(rows[1]['diff'], np.mean(gaps), 1e-9)
            close(rows[1]['diff_sd'], abs(gaps[0] - gaps[1]) / 2 ** 0.5, 1e-9)
            table = out[out.rindex('\n\n'):].splitlines()
            assert max(map(len, table)) <= 80, max(table, key=len)
            again = run(*flags, script=script)
            assert again[1].count('is finished') >= 4 and again[3][1]['diff'] == rows[1]['diff']
            made, = path.glob('out/*/compare-*')
            assert (made / 'compare.csv').exists()
            if importlib.util.find_spec('matplotlib'):
                assert (made / 'compare.png').stat().st_size > 10_000

def test_bench():
    for script in SCRIPTS:
        with folder() as path:
            flags = [*tiny(script, path), '--over', 'learning_rate=1e-3,1e-2', '--rounds', 2]
            code, out, err, times = run('bench', *flags, script=script)
            assert code == 0 and len(times) == 4, (script.SCRIPT, err)
            assert all(len(own) == 4 and min(own) > 0 for own in times.values())
            assert max(map(len, out.splitlines())) < 100 and 'training' in out

def test_data_of_a_preset():
    """A recipe without its data says so, and runs on what is built in."""
    with folder() as path, contextlib.chdir(path) if hasattr(contextlib, 'chdir') else folder():
        for script, preset in ((gpt, 'owt-124m'), (vit, 'cifar-paper')):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                _, c = script.parse(['--preset', preset])
            assert c.data == 'builtin' and 'python prepare_data.py' in out.getvalue()

def test_the_last_run_is_trains():
    """sample uses the last run of train, whatever inspect and compare have left."""
    with folder() as path:
        refuse(['no run', '--run'], 'sample', *tiny(gpt, path))
        trained = run(*tiny(gpt, path))[3]['folder']
        run('inspect', *tiny(gpt, path, '--seed', 3))
        run('compare', *tiny(gpt, path, '--over', 'gamma=2', '--seeds', '4'))
        code, out, _, _ = run('sample', *tiny(gpt, path))
        assert code == 0 and str(trained) in out
        texts = [run('sample', *tiny(gpt, path, '--seed', seed))[3] for seed in (1, 2, 2)]
        assert texts[0] != texts[1] == texts[2]
        refuse(['--prompt'], 'sample', *tiny(gpt, path, '--prompt', ''))

def test_cuda():
    """Everything once more where there is a GPU: float16 and bfloat16, and a run begun on a CPU."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest('no CUDA GPU is here')
    for script in SCRIPTS:
        for dtype in ('float32', 'float16', 'bfloat16'):
            with folder() as path:
                flags = tiny(script, path, '--dtype', dtype, '--max-iters', 9)
                with interrupted(script, 4, signal.SIGTERM):
                    run(*flags, script=script)
                code, out, err, result = run(*flags, '--device', 'cuda', script=script)
                assert code == 0 and 'goes on' in out, err
                assert all(math.isfinite(x) for x in result['log'][-1].values())

# ------------------------------------ soak, only with --soak ------------------------------------
def outcome(function, limit=2**40, seconds=None):
    """Of a fork of this process, killed after so many seconds -> exit code, standard error."""
    out, into = os.pipe()
    def child():
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
    return pathlib.Path((out / script.SCRIPT / 'last').read_text(), 'ckpt.pt')

def soak_kills(script, path, argv, rng, n=20):
    kills, steps = 0, set()
    for seed in itertools.count():
        flags, part, code = [*argv, '--seed', str(seed)], path / f'part{seed}', None
        whole = run(*flags, script=script)[3]
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
    with interrupted(script, 50, signal.SIGTERM):
        run(*argv, script=script)
    file = last(script, path / 'out')
    for i in range(n):
        code, err = outcome(lambda: script.main(argv), limit=file.stat().st_size * i // n)
        assert (code, err.count('\n'), script.load_checkpoint(file)['progress'][0]) == (2, 1, 51)
    return f'{n} full disks, one line each, the older checkpoint intact'

def soak():
    for script, figure in itertools.product(SCRIPTS, (soak_kills, soak_saves, soak_full_disk)):
        with folder() as path:
            argv = tiny(script, path)
            argv = [str(word) for word in (*argv, '--max-iters', 200, '--eval-interval', 10)]
            print(script.SCRIPT, figure(script, path, argv, np.random.default_rng(0)), flush=True)

# ------------------------------------ runner ------------------------------------
def main(words):
    tests = [(name, f) for name, f in globals().items() if name.startswith('test_')]
    passed, failed, skipped = 0, [], 0
    for name, test in tests:
        if words and not any(word in name for word in words):
            continue
        clock = time.perf_counter()
        try:
            test()
            passed += 1
            print(f'ok    {name} ({time.perf_counter() - clock:.1f} s)', flush=True)
        except unittest.SkipTest as reason:
            skipped += 1
            print(f'skip  {name}: {reason}', flush=True)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(name)
            traceback.print_exc()
            print(f'FAIL  {name}', flush=True)
    for name in failed:
        print(f'failed: {name}')
    print(f'{passed} passed, {len(failed)} failed, {skipped} skipped')
    return len(failed) > 0

if __name__ == '__main__':
    sys.exit(soak() if '--soak' in sys.argv else main(sys.argv[1:]))
