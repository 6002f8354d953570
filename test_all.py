"""Every test of the repository, on CPU and, where there is one, on a GPU.

    python test_all.py                 # all of them
    python test_all.py belief resume   # those with one of these words in their name
    python test_all.py --soak          # hundreds of kills and full disks instead, ten minutes
    pytest test_all.py                 # the same tests, if you have pytest

No network, no files but this repository's, nothing written outside temporary folders.
"""
import contextlib, csv, dataclasses, functools, gzip, hashlib, http.server, inspect, io, itertools
import json, lzma, math, os, pathlib, pickle, re, shlex, signal, struct, subprocess, sys, tarfile
import tempfile, threading, time, traceback, types, unittest, unittest.mock, zipfile, zlib

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
SCRIPTS = [name for name in ('attentionx_gpt.py', 'belief_vit.py', 'admm_detr.py',
                             'mask_distill.py') if (HERE / name).exists()]
VARIANTS = list(gpt.ATTENTION)
TEXT = 'the quick brown fox jumps over the lazy dog; ' * 60

# ------------------------------------ helpers ------------------------------------

def run(*argv, script=gpt):
    """script.main(argv) in this process -> exit code, stdout, stderr, result."""
    out, err, code, result = io.StringIO(), io.StringIO(), 0, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = script.main([str(a) for a in argv])
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue(), result

def refuse(words, *argv, script=gpt):
    """The command must end with code 2 and one line that has these words."""
    code, out, err, _ = run(*argv, script=script)
    assert code == 2 and err.count('\n') == 1 and 'Traceback' not in err, (argv, code, err)
    assert all(word in err for word in words), (argv, words, err)

@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield pathlib.Path(path)

def tiny(path, *more):
    """Flags of a run that takes a second."""
    if not (path / 'text.txt').exists():
        (path / 'text.txt').write_text(TEXT)
    return ['--preset', 'tiny', '--n-layer', 2, '--n-head', 2, '--n-embd', 16, '--block-size', 16,
            '--batch-size', 4, '--max-iters', 6, '--eval-interval', 3, '--eval-rows', 8,
            '--log-interval', 1, '--warmup-iters', 2, '--device', 'cpu', '--data',
            path / 'text.txt', '--out-dir', path / 'out', *more]

def config(**settings):
    small = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=40)
    return gpt.Config(**{**small, **settings})

def model(**settings):
    """A small model with weights large enough that attention is not uniform."""
    net = gpt.GPT(config(**settings))
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() > 1:
                p.mul_(8 if 'c_attn' in name else 4)
    return net

def qkv(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return [draw().to(dtype) for _ in range(3)]

def close(a, b, tolerance):
    worst = (torch.as_tensor(a) - torch.as_tensor(b)).abs().max().item()
    assert worst <= tolerance, worst  # a NaN fails too

def method(name, q, k, v, gamma=None, zero_diag=False):
    """A variant on q, k, v (B, nh, T, hs) -> tuple of (B, T, nh, hs)."""
    gamma = gpt.default_gamma(name, zero_diag, gamma)
    out = gpt.ATTENTION[name](gpt.multi_head(q, k, v, zero_diag), v.transpose(1, 2), gamma)
    return out if isinstance(out, tuple) else (out,)

# ------------------------------------ the papers' method ------------------------------------

def slow(name, q, k, v, gamma, zero_diag, causal=True):
    """The papers' formulas, one token, one head, one number at a time -> (2, B, T, nh, hs)."""
    B, nh, T, hs = q.shape
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    outs = torch.zeros(2, B, T, nh, hs, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            mh = []
            for h in range(nh):
                seen = [s for s in range(t + 1 if causal else T) if s != t or not zero_diag]
                e = [math.exp(dot(q[b][h][t], k[b][h][s]) / math.sqrt(hs)) for s in seen]
                mh.append([sum(w * v[b][h][s][d] for w, s in zip(e, seen)) / sum(e) if e else 0.0
                           for d in range(hs)])
            V = [v[b][h][t] for h in range(nh)]
            alpha = sum(map(dot, mh, V)) / sum(map(dot, V, V))
            for h in range(nh):
                beta = dot(mh[h], V[h]) / dot(V[h], V[h])
                for d in range(hs):
                    m, x = mh[h][d], V[h][d]
                    first, second = {
                        'softmax': (m, 0), 'attentionx': (x - gamma * m, 0),
                        'attentionx-v1': (gamma * x - m, 0), 'belief': (m - alpha * x, 0),
                        'belief-head': (m - beta * x, 0),
                        'belief-star': (m - alpha * x, m - beta * x),
                        'softmax-scaled': (gamma * m, 0), 'value-skip': (m + x, 0)}[name]
                    outs[0, b, t, h, d], outs[1, b, t, h, d] = first, second
    return outs

def test_gpt_reference():
    q, k, v = qkv(2, 3, 5, 4)
    for name in VARIANTS:
        for zero_diag in (False, True):
            gamma = {'attentionx': 2.5, 'attentionx-v1': 0.3}.get(name, 1.7)
            want = slow(name, q, k, v, gamma, zero_diag)
            for got, expected in zip(method(name, q, k, v, gamma, zero_diag), want):
                close(got, expected, 1e-12)

def test_gpt_gradcheck():
    for name in VARIANTS:
        for zero_diag in (False, True):
            inputs = [t.requires_grad_() for t in qkv(1, 2, 4, 3)]
            f = lambda *x: method(name, *x, zero_diag=zero_diag)
            assert torch.autograd.gradcheck(f, inputs)

def test_gpt_versions_of_attentionx():
    """v1(g) = g v2(1/g): the two papers' formulas are one, at another scale."""
    q, k, v = qkv(2, 2, 6, 4)
    for g in (0.1, 1 / 3, 0.5, 1.0):
        first, = method('attentionx-v1', q, k, v, g)
        revised, = method('attentionx', q, k, v, 1 / g)
        close(first, g * revised, 1e-14)

def test_gpt_controls():
    q, k, v = qkv(1, 2, 6, 4)
    mh, own = method('softmax', q, k, v)[0], v.transpose(1, 2)
    close(method('softmax-scaled', q, k, v, 1.0)[0], mh, 0)
    close(method('attentionx', q, k, v, 1.0)[0] + mh, own, 1e-15)
    close(method('value-skip', q, k, v)[0] - mh, own, 1e-15)

def test_gpt_orthogonality():
    """Delta is orthogonal to V and no longer than MH; Delta_s is so in every head.  [BF Eq. 11]"""
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        for scale in (1e-8, 1.0, 1e4):
            q, k, v = qkv(2, 3, 7, 8, dtype=dtype, scale=scale)
            mh, own = gpt.multi_head(q / scale, k / scale, v), v.transpose(1, 2)
            whole, heads = gpt.belief_star(mh, own, None)
            norm = lambda t: t.flatten(2).norm(dim=-1)
            cosine = (whole * own).sum((-2, -1)) / (norm(mh) * norm(own))
            close(cosine, torch.zeros_like(cosine), tolerance)
            cosine = (heads * own).sum(-1) / (mh.norm(dim=-1) * own.norm(dim=-1))
            close(cosine, torch.zeros_like(cosine), tolerance)
            assert (norm(whole) <= norm(mh) * (1 + tolerance)).all()
            assert (norm(heads) <= norm(whole) * (1 + tolerance) + tolerance * norm(mh)).all()

def test_gpt_zero_diagonal_enlarges_phi():
    """Phi with the diagonal = (1 - p_kk) Phi without it, at gamma 1.  [AX2 Eq. 13]"""
    q, k, v = qkv(1, 2, 9, 4)
    own = torch.diagonal((q @ k.mT / 2).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
                         .softmax(-1), dim1=2, dim2=3).transpose(1, 2)[..., None]  # (B, T, nh, 1)
    kept, zeroed = (method('attentionx', q, k, v, 1.0, zd)[0] for zd in (False, True))
    close(kept[:, 1:], ((1 - own) * zeroed)[:, 1:], 1e-13)
    assert (zeroed.norm(dim=-1) > kept.norm(dim=-1))[:, 1:].all()
    kept, zeroed = (method('belief-head', q, k, v, zero_diag=zd)[0] for zd in (False, True))
    close(kept[:, 1:], ((1 - own) * zeroed)[:, 1:], 1e-13)  # and so it does Delta_s

def test_gpt_first_token():
    """The first token has only itself: belief hands on nothing, AttentionX (1 - gamma) V."""
    q, k, v = qkv(2, 2, 5, 8, dtype=torch.float32)
    first = v.transpose(1, 2)[:, 0]
    for name, factor in (('softmax', 1), ('attentionx', -2), ('attentionx-v1', -0.5), ('belief', 0),
                         ('belief-head', 0), ('softmax-scaled', 3), ('value-skip', 2)):
        close(method(name, q, k, v)[0][:, 0], factor * first, 1e-6)
    for name in VARIANTS:  # with a zero diagonal it has nobody
        close(gpt.multi_head(q, k, v, zero_diag=True)[:, 0], torch.zeros_like(first), 0)
        for T in (1, 2):
            for out in method(name, *(t[:, :, :T] for t in (q, k, v)), zero_diag=True):
                assert out.shape == (2, T, 2, 8) and out.isfinite().all()

def test_gpt_zero_value():
    """Where V is zero nothing is projected away; gradients stay finite."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (t.requires_grad_() for t in qkv(1, 2, 5, 4, dtype=dtype))
        hole = torch.ones(5, 1, dtype=dtype)
        hole[2] = 0
        mh, own = gpt.multi_head(q, k, v * hole), (v * hole).transpose(1, 2)
        for out in gpt.belief_star(mh, own, None):
            close(out[:, 2].float(), mh[:, 2].float(), 0)
            for grad in torch.autograd.grad(out.float().sum(), (q, k, v), retain_graph=True):
                assert grad.isfinite().all()
        for out in gpt.belief_star(mh.detach() * 0, own.detach() * 0, None):
            assert (out == 0).all()

def test_gpt_half_precision():
    """float16 and bfloat16 inputs against float64: errors of a few rounding units of the output."""
    for dtype, bound in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
        exact = [t.to(dtype).double() for t in qkv(2, 4, 16, 16)]
        mh, v = gpt.multi_head(*exact).to(dtype), exact[2].transpose(1, 2).to(dtype)
        for name in VARIANTS:
            gamma = gpt.default_gamma(name, False)
            low = gpt.ATTENTION[name](mh, v, gamma)
            high = gpt.ATTENTION[name](mh.double(), v.double(), gamma)
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (low, high))):
                assert a.dtype == dtype
                close(a.double() / b.abs().max(), b / b.abs().max(), bound)

def test_gpt_float16_overflow():
    """||V||^2 = 768 * 20^2 is beyond float16; the projection must not notice."""
    mh, _, v = qkv(1, 3, 12, 64, dtype=torch.float16, scale=20.0)
    assert v.square().sum().isinf()
    exact = gpt.belief_star(mh.double(), v.double(), None)
    with torch.autocast('cpu', torch.float16):
        inside = gpt.belief_star(mh, v, None)
    for outs in (gpt.belief_star(mh, v, None), inside):
        for out, want in zip(outs, exact):
            close(out.double() / 20, want / 20, 4e-3)

def test_gpt_causality():
    """A change at token t shows after t and never before: every variant and architecture."""
    idx = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(0))
    for name in VARIANTS:
        for zero_diag in (False, True):
            for arch in ('gpt2', 'rotary'):
                net = model(attention=name, zero_diag=zero_diag, arch=arch).double().eval()
                other = idx.clone()
                other[0, 7] = (other[0, 7] + 1) % 40
                a, b = (net(i, i)[0] for i in (idx, other))
                close(a[:, :7], b[:, :7], 0)
                assert (a[:, 8:] - b[:, 8:]).abs().amax(-1).min() > 1e-6, (name, zero_diag, arch)

def test_gpt_zero_diagonal_ignores_itself():
    q, k, v = qkv(1, 2, 6, 4)
    before = gpt.multi_head(q, k, v, zero_diag=True)
    k[:, :, 3], v[:, :, 3] = 9.0, -9.0
    after = gpt.multi_head(q, k, v, zero_diag=True)
    close(before[:, :4], after[:, :4], 0)
    assert (before[:, 4:] - after[:, 4:]).abs().amax((2, 3)).min() > 1e-3

def test_gpt_gamma():
    for attention, zero_diag, gamma in (
            ('attentionx', False, 3), ('attentionx', True, 1),
            ('attentionx-v1', False, 0.5), ('attentionx-v1', True, 0.5)):
        assert gpt.default_gamma(attention, zero_diag) == gamma
        assert model(attention=attention, zero_diag=zero_diag).transformer.h[0].attn.gamma == gamma
    for attention, gamma in (('attentionx', 0.99), ('attentionx-v1', 1.01), ('attentionx-v1', -1),
                             ('attentionx', math.nan)):
        try:
            config(attention=attention, gamma=gamma)
        except ValueError as e:
            assert 'gamma' in str(e)
        else:
            raise AssertionError((attention, gamma))

# ------------------------------------ the GPT ------------------------------------

GOLDEN = {  # what the originals computed in float64 for the weights of fill(): loss, mean |logit|,
    # three logits of the first and of the last token, norm of the gradient of every parameter
    'nanogpt_bias': (dict(bias=True), 4.461182594, 0.8588198423, [
        -0.8804947, 0.8907990, -0.1688856, 0.4617892, 0.2262623, -0.3851531], [
        5.094747, 5.049327, 1.365227, 1.223727, 1.750309, 0.284012, 1.392901, 0.050477, 0.055018,
        0.04446, 0.235624, 0.042643, 0.48059, 0.049119, 0.230417, 0.139319, 0.331716, 0.03897,
        0.458533, 0.014643, 0.017509, 0.012227, 0.092764, 0.013356, 0.166866, 0.014352, 0.228439,
        0.116631]),
    'nanogpt_nobias': (dict(bias=False), 4.429695606, 0.8527315259, [
        -0.9231524, 0.8591158, -0.1975765, 0.4018797, 0.1790598, -0.3929003], [
        2.828876, 2.766565, 0.636368, 0.865378, 1.589547, 0.057274, 0.289378, 0.55684, 0.252688,
        0.370375, 0.442526, 0.016978, 0.0895, 0.160738, 0.214547]),
    'rotary_plain': (dict(arch='rotary'), 4.613919258, 0.8249403238, [
        0.4768454, 0.6329638, -1.1606349, 1.1639303, -1.5333440, 0.3431400], [
        3.789936, 0.965854, 1.859917, 0.571371, 1.175935, 0.416079, 0.442793, 0.163859, 0.288511]),
    'rotary_fp8': (dict(arch='rotary', fp8_weights=True), 4.681265354, 0.8305371404, [
        0.4548328, 0.6365103, -1.2132947, 1.3069571, -1.5615274, 0.2072509], [
        6.341718, 1.563596, 1.728811, 0.502149, 0.927981, 0.389663, 0.459612, 0.17089, 0.306778]),
}

def fill(state):
    """Weights that anyone can make again from the names of the parameters."""
    for key, p in state.items():
        n = p.numel()
        w = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, n)
        if p.dim() > 1:
            w *= math.sqrt(3 / (n / len(p))) * (4 if 'c_attn' in key else 1)
        else:
            w = 0.1 * w + key.endswith('weight')
        p.copy_(torch.from_numpy(w).view_as(p))

def test_gpt_golden():
    """The same weights give what nanoGPT and modded-nanogpt's `casted` gave, gradients too."""
    for name, (settings, loss, size, logits, grads) in GOLDEN.items():
        net = gpt.GPT(gpt.Config(attention='softmax', n_layer=2, n_head=3, n_embd=24, block_size=24,
                                 vocab_size=61, **settings)).double()
        fill(net.state_dict())
        idx = (torch.arange(48) * 7919 % 61).view(2, 24)
        got, got_loss = net(idx, idx.roll(-1, 1))
        got_loss.backward()
        close(got_loss, loss, 1e-5)
        close(got.abs().mean(), size, 1e-5)
        close(torch.cat([got[0, 0, :3], got[1, 23, :3]]), torch.tensor(logits).double(), 1e-5)
        norms = torch.stack([p.grad.norm() for p in net.parameters()])
        close(norms / torch.tensor(grads).double(), torch.ones(len(grads)).double(), 1e-4)

def test_gpt_float8():
    """e5m2 keeps two bits of mantissa, and the gradient does not see the rounding."""
    layer = gpt.Float8Linear(8, 4, bias=False)
    x = torch.eye(8)
    w, scale = layer.weight.detach(), layer.weight.detach().abs().mean()
    used = layer(x).T
    mantissa, _ = torch.frexp(used / scale)
    close(mantissa * 8, (mantissa * 8).round(), 1e-4)
    assert 0 < ((used - w) / w).abs().max() <= 0.126
    layer(x).sum().backward()
    close(layer.weight.grad, torch.ones(4, 8), 0)

def test_gpt_parameter_counts():
    small = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024)
    for settings, expected in (
            (dict(arch='rotary', vocab_size=50257, attention='belief'), 123_532_032),
            (dict(arch='rotary', vocab_size=50257, attention='belief-star'), 130_609_920),
            (dict(bias=True, vocab_size=50257), 124_439_808),
            (dict(vocab_size=50304), 124_373_760)):
        with torch.device('meta'):
            net = gpt.GPT(gpt.Config(**small, **settings))
        assert sum(p.numel() for p in net.parameters()) == expected, settings

def test_gpt_initialisation():
    """Variants share their common weights to the bit, and residual projections start smaller."""
    base = gpt.GPT(config(attention='softmax', n_embd=64)).state_dict()
    for name in VARIANTS:
        state = gpt.GPT(config(attention=name, n_embd=64)).state_dict()
        assert all(torch.equal(base[key], state[key]) for key in base)
        extra = set(state) - set(base)
        assert extra == ({f'transformer.h.{i}.attn.c_proj_s.weight' for i in range(2)}
                         if name == 'belief-star' else set())
        for key in extra:
            assert abs(state[key].std() / (0.02 / 2) - 1) < 0.1
    assert abs(base['transformer.h.0.mlp.c_proj.weight'].std() / (0.02 / 2) - 1) < 0.1
    assert abs(base['transformer.h.0.attn.c_attn.weight'].std() / 0.02 - 1) < 0.1
    rotary = gpt.GPT(config(arch='rotary', n_embd=64)).state_dict()
    widest = rotary['transformer.h.0.mlp.c_proj.weight'].abs().max()
    assert abs(widest * math.sqrt(256) - 1) < 0.01
    other = gpt.GPT(config(attention='softmax', n_embd=64, seed=1)).state_dict()
    assert not torch.equal(base['lm_head.weight'], other['lm_head.weight'])

def test_gpt_rotary_is_relative():
    x, y, _ = qkv(1, 6, 1, 8)
    scores = [torch.einsum('bqhd,bkhd->bqk', gpt.rotate(x, p), gpt.rotate(y, p)) for p in (0, 5)]
    close(scores[0], scores[1], 1e-5)  # the angles are float32
    close(gpt.rotate(x, 3)[:, 0], gpt.rotate(torch.cat([x[:, :1]] * 4, 1))[:, 3], 1e-6)
    assert (gpt.rotate(x)[:, 1:] - x[:, 1:]).abs().max() > 0.1

def test_gpt_loss_in_chunks():
    """Losses and gradients do not depend on how many logits are held at once; -1 never counts."""
    net, idx = model().double(), torch.randint(40, (3, 16))
    targets = torch.where(torch.rand(3, 16) < 0.3, -1, idx.roll(-1, 1))
    results = []
    for limit in (2 ** 25, 200, 1):
        with unittest.mock.patch.object(gpt, 'LOGITS', limit):
            logits, loss = net(idx, targets)
        assert (logits is None) == (limit < 2 ** 25)
        net.zero_grad()
        loss.backward()
        results.append([loss.detach()] + [p.grad.clone() for p in net.parameters()])
    for a, b, c in zip(*results):
        close(a, b, 1e-12), close(a, c, 1e-12)
    full = F.cross_entropy(net(idx, idx)[0].flatten(0, 1), targets.flatten(), ignore_index=-1)
    close(full, results[0][0], 1e-12)

def test_gpt_cache():
    """Greedy tokens with and without cache, past the end of the window, for everything there is."""
    idx = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(1))
    for name in VARIANTS:
        for zero_diag in (False, True):
            for arch in ('gpt2', 'rotary'):
                net = model(attention=name, zero_diag=zero_diag, arch=arch).eval()
                a = net.generate(idx, 14, temperature=0)
                b = net.generate(idx, 14, temperature=0, use_cache=False)
                assert torch.equal(a, b) and a.shape == (2, 19), (name, zero_diag, arch)
                cache = [{} for _ in range(2)]
                net.double()
                logits = [net(idx[:, i:i + 1], cache=cache)[0] for i in range(5)]
                close(torch.cat(logits, 1), net(idx, idx)[0], 1e-5 if arch == 'rotary' else 1e-12)
    assert len(set(a[0].tolist())) > 3  # not one token over and over

def test_gpt_sampling():
    net, idx = model().eval(), torch.zeros(1, 1, dtype=torch.long)
    assert torch.equal(net.generate(idx, 8, top_k=1), net.generate(idx, 8, temperature=0))
    likely = set(net(idx)[0][0, -1].topk(3).indices.tolist())
    torch.manual_seed(0)
    drawn = {net.generate(idx, 1, top_k=3)[0, 1].item() for _ in range(60)}
    assert drawn == likely
    assert len({net.generate(idx, 1)[0, 1].item() for _ in range(60)}) > 3

def test_gpt_temperature():
    """The frequencies of 20,000 draws against softmax(logits / temperature)."""
    net, idx = model().eval(), torch.zeros(20000, 1, dtype=torch.long)
    torch.manual_seed(0)
    for temperature in (0.5, 1.0, 2.0):
        drawn = net.generate(idx, 1, temperature)[:, 1].bincount(minlength=40) / 20000
        close(drawn, F.softmax(net(idx[:1])[0][0, -1].detach() / temperature, dim=-1), 0.015)
    assert inspect.signature(net.generate).parameters['temperature'].default == 1

def test_gpt_dropout():
    """On the embedding, the attention weights and both branches of a block; none in evaluation."""
    net, idx, seen = model(dropout=0.5), torch.randint(40, (1, 8)), []
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    attend, weights = F.scaled_dot_product_attention, []
    def record(*args, dropout_p=0.0, **kwargs):
        weights.append(dropout_p)
        return attend(*args, dropout_p=dropout_p, **kwargs)
    with unittest.mock.patch.object(F, 'scaled_dot_product_attention', record):
        assert not torch.equal(net.train()(idx)[0], net(idx)[0])
        assert weights == [0.5] * 4
        branches = [f'transformer.h.{i}.drop' for i in '0011']
        assert sorted(seen[:5]) == ['transformer.drop'] + branches
        assert torch.equal(net.eval()(idx)[0], net(idx)[0]) and weights[4:] == [0.0] * 4

def test_gpt_belief_star_has_two_matrices():
    """Delta W^o + Delta_s W^s, in this order.  [BF Eq. 15]"""
    attn, x = model(attention='belief-star').transformer.h[0].attn, torch.randn(1, 5, 16)
    q, k, v = attn.qkv(x)
    mh = gpt.multi_head(*(t.transpose(1, 2) for t in (q, k, v)))
    delta, delta_s = gpt.belief(mh, v, None).flatten(2), gpt.belief_head(mh, v, None).flatten(2)
    close(attn(x), delta @ attn.c_proj.weight.T + delta_s @ attn.c_proj_s.weight.T, 1e-4)
    star = model(attention='belief-star', arch='rotary', fp8_weights=True).transformer.h[0].attn
    assert isinstance(star.c_proj_s, gpt.Float8Linear)

# ------------------------------------ data ------------------------------------

def test_gpt_tokens():
    text = 'naïve\r\n\n  λ = "\\x00"\t'
    encoding = gpt.get_tokenizer('bytes')
    assert encoding.encode_ordinary(text) == list(text.encode()) and encoding.n_vocab == 256
    assert encoding.decode(list(text.encode())) == text
    assert gpt.decode(encoding, torch.tensor([104, 300, 105])) == 'hi'

def test_gpt_text_file_and_bins():
    with folder() as path:
        (path / 'a.txt').write_text('ab\n' * 100)
        text = gpt.load_text(config(vocab_size=0, data=str(path / 'a.txt')))
        assert len(text.train) == 270 and len(text.val) == 30 and text.bytes_per_token == 1
        np.arange(50, dtype=np.uint16).tofile(path / 'train.bin')
        np.arange(50, dtype=np.uint16).tofile(path / 'val.bin')
        meta = {'tokenizer': 'gpt2', 'vocab_size': 50257, 'bytes': {'train': 9, 'val': 200}}
        (path / 'meta.json').write_text(json.dumps(meta))
        text = gpt.load_text(config(vocab_size=0, data=str(path)))
        assert text.bytes_per_token == 4 and text.vocab_size == 50257
        x, y = gpt.windows(text.train, [0, 7], config(vocab_size=50), torch.device('cpu'))
        assert x.tolist() == [list(range(16)), list(range(7, 23))] and torch.equal(y, x + 1)
        before = text.stamp
        os.utime(path / 'val.bin', (1, 1))
        assert gpt.load_text(config(vocab_size=0, data=str(path))).stamp != before

def test_gpt_builtin_text():
    text = gpt.load_text(config(vocab_size=0))
    assert len(text.train) > 10 * len(text.val) // 2 > 100_000 and text.train.max() < 256
    assert b'import' in text.train.astype(np.uint8).tobytes()
    assert text.val[:2000].tobytes() not in text.train.tobytes()

def test_gpt_batches():
    """Batch i follows from seed and i alone, and processes and micro-batches share it exactly."""
    with folder() as path:
        (path / 't.txt').write_text(TEXT)
        c = config(vocab_size=0, data=str(path / 't.txt'), batch_size=2, grad_accum_steps=4)
        task = gpt.Task(c)
        whole = task.batch(3, range(8))[0]
        assert torch.equal(whole, gpt.Task(c).batch(3, range(8))[0])
        assert torch.equal(whole[1::2], task.batch(3, range(8)[1::2])[0])
        assert not torch.equal(whole, task.batch(4, range(8))[0])
        other = gpt.Task(dataclasses.replace(c, seed=5))
        assert not torch.equal(whole, other.batch(3, range(8))[0])

def test_gpt_bigram():
    """Against counting pairs by hand."""
    with folder() as path:
        (path / 't.txt').write_text('abacabad' * 40)
        text = gpt.load_text(config(vocab_size=0, data=str(path / 't.txt')))
        train, starts, nll = text.train.tolist(), [0, 3], []
        for s in starts:
            for x, y in zip(text.val[s:s + 6].tolist(), text.val[s + 1:s + 7].tolist()):
                after = [b for a, b in zip(train, train[1:]) if a == x]
                kinds = len(set(after)) + 1
                unigram = (train.count(y) + 1) / (len(train) + 256)
                nll.append(-math.log((after.count(y) + kinds * unigram) / (len(after) + kinds)))
        assert abs(gpt.bigram_loss(text, starts, 6) - sum(nll) / 12) < 1e-12

def test_gpt_evaluation():
    """The same windows every time, a mean over all of them; bits follow from nats."""
    with folder() as path:
        (path / 't.txt').write_text(TEXT)
        task = gpt.Task(config(vocab_size=0, data=str(path / 't.txt'), batch_size=3, eval_rows=6))
        a, b = task.evaluate(), task.evaluate()
        assert a == b and abs(a['val_bpb'] - a['val_loss'] / math.log(2)) < 1e-9
        x, y = gpt.windows(task.text.val, task.val_starts, task.config, task.device)
        close(task.model(x, y)[1], a['val_loss'], 1e-5)
        alone = [task.model(x, torch.where(torch.arange(16) == t, y, -1))[1] for t in range(16)]
        close(torch.tensor(task.by_position), torch.stack(alone), 1e-5)
        assert len(task.val_starts) == 6
        assert (task.val_starts[0], task.val_starts[-1]) == (0, len(task.text.val) - 17)
        task.text.bytes_per_token = 4.0
        assert abs(task.evaluate()['val_bpb'] - a['val_bpb'] / 4) < 1e-9

# ------------------------------------ harness ------------------------------------

def block(name, kind):
    text = (HERE / name).read_text('utf-8')
    return re.search(rf'# --- {kind} .*?\n(.*)# --- end of {kind}\n', text, re.S)[1]

def test_shared_blocks_identical():
    for kind, most in (('harness', 220), ('workbench', 285)):
        first = block(SCRIPTS[0], kind)
        assert first.count('\n') <= most, first.count('\n')
        for name in SCRIPTS:
            assert block(name, kind) == first, f'the {kind} of {name} differs from {SCRIPTS[0]}'
    texts = [(HERE / name).read_text('utf-8') for name in SCRIPTS + ['prepare_data.py']]
    heads = {text.split('"""')[0] for text in texts}
    assert len(heads) == 1 and '# /// script' in heads.pop()

def test_equation_tags():
    """Every equation that a docstring names is marked in the code, and the other way round."""
    for name in SCRIPTS:
        text = (HERE / name).read_text('utf-8')
        _, docstring, code = text.split('"""', 2)
        tag = r'\[\w+ (?:Eq|Sec|Alg)\. [\d.]+\]'
        assert set(re.findall(tag, docstring)) == set(re.findall(tag, code)) != set()

def test_commands_in_the_texts():
    """What README.md and the docstrings tell to type is what the scripts take."""
    texts = [(HERE / name).read_text('utf-8') for name in ['README.md', *SCRIPTS]]
    texts[1:] = [text.split('"""')[1] for text in texts[1:]]
    scripts, seen = {script.SCRIPT: script for script in (gpt, vit, detr, mask)}, set()
    command = r'(?:python|uv run|nproc-per-node 2) (\w+\.py[^`\n#]*)'
    for line in re.findall(command, '\n'.join(texts)):
        name, *argv = shlex.split(line.split(' && ')[0])
        if name[:-3] in scripts and '--help' not in argv:
            script = scripts[name[:-3]]
            script.parse([word for word in argv if word != '...'], script.ACTIONS)
            seen.add((name, *argv))
    assert len(seen) > 40, len(seen)

def test_flags_have_help():
    """Every field is a flag with help, and every preset and row of a table is a valid Config."""
    for script in (gpt, vit, detr, mask):
        flags = script.flags()
        assert set(flags) == {f.name for f in dataclasses.fields(script.Config)}
        assert all(len(words) > 3 for *_, words in flags.values())
        for settings in (*script.PRESETS.values(), *itertools.chain.from_iterable(
                rows.values() for rows in script.TABLES.values())):
            script.Config(**settings)
        for action in script.ACTIONS:
            code, out, _, _ = run(action, '--help', script=script)
            assert code == 0 and all('--' + name.replace('_', '-') in out for name in flags)
        lines = '    seed: int = 1\n    dtype: str = "#a"  # x in (1, 2): what\n'
        with unittest.mock.patch('inspect.getsource', lambda _: lines):  # a comment is no duty
            seed, dtype = script.flags.__wrapped__().values()
        assert seed[2:] == ('', '') and dtype[2:] == ('x in (1, 2)', 'what')

def test_schedules():
    c = config(learning_rate=6e-4, min_lr=6e-5, warmup_iters=10, max_iters=110)
    lr = [gpt.schedule(i, c) * c.learning_rate for i in range(111)]
    assert abs(lr[0] - 6e-4 / 11) < 1e-12 and abs(lr[9] - 6e-4 * 10 / 11) < 1e-12
    assert abs(lr[10] - 6e-4) < 1e-12 and abs(lr[60] - 3.3e-4) < 1e-12
    assert abs(lr[110] - 6e-5) < 1e-12
    c = dataclasses.replace(c, schedule='trapezoid', warmdown_iters=20)
    factor = [gpt.schedule(i, c) for i in range(111)]
    assert factor[0] == 0.1 and factor[9] == factor[10] == factor[90] == 1
    assert factor[100] == 0.5 and factor[110] == 0
    c = dataclasses.replace(c, schedule='constant')
    assert [gpt.schedule(i, c) for i in (4, 10, 110)] == [0.5, 1, 1]
    c = dataclasses.replace(c, schedule='step')
    assert [gpt.schedule(i, c) for i in (4, 10, 89, 90, 109)] == [0.5, 1, 1, 0.1, 0.1]
    assert gpt.schedule(109, dataclasses.replace(c, warmdown_iters=0)) == 1

def test_optimizer_groups():
    with folder() as path:
        (path / 't.txt').write_text(TEXT)
        task = gpt.Task(config(vocab_size=0, data=str(path / 't.txt'), bias=True, weight_decay=0.1))
        for group in task.optimizer().param_groups:
            assert {p.dim() >= 2 for p in group['params']} == {group['weight_decay'] == 0.1}

def test_training_by_hand():
    """Five steps of AdamW written out: accumulation, clipping, decay, warmup and cosine."""
    with folder() as path:
        flags = tiny(path, '--grad-accum-steps', 2, '--max-iters', 5, '--grad-clip', 0.5, '--bias',
                     '--beta1', 0.8, '--beta2', 0.9, '--weight-decay', 0.3)
        result = run(*flags)[3]
        _, _, c, _ = gpt.parse([str(f) for f in flags], gpt.ACTIONS)
        task, moments = gpt.Task(c), {}
        for it, lr in enumerate([c.learning_rate / 3, c.learning_rate * 2 / 3] + [
                c.min_lr + (c.learning_rate - c.min_lr) * (1 + math.cos(math.pi * i / 3)) / 2
                for i in range(3)]):
            x, y = task.batch(it, range(8))
            task.model.zero_grad()
            loss = F.cross_entropy(task.model(x, y)[0].flatten(0, 1), y.flatten())
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in task.model.parameters()]).norm()
            assert norm > 0.5 and abs(result['log'][it + 1]['loss'] - loss.item()) < 1e-4
            with torch.no_grad():
                for p in task.model.parameters():
                    g = p.grad * 0.5 / norm
                    m, v = moments.get(p, (0, 0))
                    moments[p] = m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
                    p.mul_(1 - lr * 0.3 * (p.dim() > 1))
                    m, v = m / (1 - 0.8 ** (it + 1)), v / (1 - 0.9 ** (it + 1))
                    p.sub_(lr * m / (v.sqrt() + 1e-8))
        for name, p in weights(result['folder']).items():
            close(p, task.model.state_dict()[name], 2e-5)

def test_dropout_differs_from_step_to_step():
    with folder() as path:
        flags = tiny(path, '--dropout', 0.5, '--lr', 1e-30, '--min-lr', 0)
        (path / 'text.txt').write_text('a' * 2000)  # every batch is the same
        losses = [row['loss'] for row in run(*flags)[3]['log'][1:]]
        assert len(set(losses)) == len(losses) == 6

def test_presets():
    """The recipes' figures, from the code bases that the papers name."""
    for name, tokens, steps, peak, at_1000, last in (
            ('owt-124m', 491_520, 600_000, 6e-4, 1001 / 2001, 0.1),
            ('belief-124m', 524_288, 9_536, 1.8e-3, 1.0, 1 / 2048)):
        c = gpt.Config(**gpt.PRESETS[name])
        assert c.batch_size * c.grad_accum_steps * c.block_size == tokens
        assert (c.max_iters, c.learning_rate, c.weight_decay) == (steps, peak, 0.1)
        assert (c.beta1, c.beta2, c.data) == (0.9, 0.95, 'openwebtext')
        assert abs(gpt.schedule(1000, c) - at_1000) < 1e-9
        assert abs(gpt.schedule(steps - 1, c) - last) < 1e-6
    assert (c.grad_clip, c.warmup_iters, c.arch, c.fp8_weights) == (0, 256, 'rotary', True)
    assert gpt.TABLES['ax1']['attentionx-v1']['gamma'] == 0.5
    assert gpt.TABLES['ax2']['attentionx']['gamma'] == 3

def test_training_learns():
    """Every variant beats the entropy of single letters after 150 small steps."""
    counts = np.bincount(np.frombuffer(TEXT.encode(), np.uint8))
    p = counts[counts > 0] / counts.sum()
    entropy = -(p * np.log(p)).sum()
    with folder() as path:
        for name in VARIANTS:
            flags = ('--max-iters', 150, '--eval-interval', 150, '--lr', 0.01)
            code, out, err, result = run(*tiny(path, '--attention', name, *flags))
            assert code == 0 and result['val_loss'] < 0.6 * entropy, (name, err, result)
            assert 'sample' in out and 'bigram' in out and 'ckpt.pt' in out

def test_training_again_takes_a_new_folder():
    with folder() as path:
        names = [run(*tiny(path, '--max-iters', 1))[3]['folder'].name for _ in range(3)]
        assert names == ['attentionx-s1337', 'attentionx-s1337-2', 'attentionx-s1337-3']
        files = {p.name for p in (path / 'out/attentionx_gpt/attentionx-s1337').iterdir()}
        assert {'ckpt.pt', 'log.csv'} <= files <= {'ckpt.pt', 'log.csv', 'curves.png'}

def weights(path):
    return torch.load(path / 'ckpt.pt', weights_only=True)['model']

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

def interrupted_at(step, *numbers):
    """A patch: the process gets these signals while it prepares this step."""
    batch, left = gpt.Task.batch, list(numbers)
    def interrupt(self, it, rows):
        while it == step and left:
            os.kill(os.getpid(), left.pop())
        return batch(self, it, rows)
    return unittest.mock.patch.object(gpt.Task, 'batch', interrupt)

def test_resume_bit_for_bit():
    """Stopped between two lines of the log and resumed: same weights, same log."""
    with folder() as path:
        flags = tiny(path, '--dropout', 0.2, '--grad-accum-steps', 2, '--max-iters', 9,
                     '--log-interval', 3)
        whole = run(*flags)[3]
        for number in (signal.SIGINT, signal.SIGTERM):
            with interrupted_at(4, number):
                code, out, _, _ = run(*flags, '--out-dir', path / number.name)
            assert code == 128 + number and '--resume' in out
            code, out, err, part = run(*flags, '--out-dir', path / number.name, '--resume')
            assert code == 0 and 'resumed' in out, err
            assert same(weights(whole['folder']), weights(part['folder']))
            rows = [[{**row, 'seconds': 0} for row in r['log']] for r in (whole, part)]
            assert rows[0] == rows[1]
        again = run(*flags, '--resume', whole['folder'])[3]  # nothing left to do
        assert again['val_loss'] == whole['val_loss']
        with interrupted_at(4, signal.SIGINT, signal.SIGINT):  # the second time: at once
            code, out, _, _ = run(*flags, '--out-dir', path / 'twice')
        assert code == 130 and 'stopped' not in out
        with open(whole['folder'] / 'log.csv', newline='') as f:
            assert [row['iter'] for row in csv.DictReader(f)] == ['0', '3', '6', '9']

def test_resume_of_float16():
    """The loss scale goes on where it was."""
    with folder() as path:
        flags = tiny(path, '--dtype', 'float16', '--max-iters', 9)
        whole = run(*flags)[3]
        with interrupted_at(4, signal.SIGINT):
            run(*flags, '--out-dir', path / 'part')
        part = run(*flags, '--out-dir', path / 'part', '--resume')[3]
        a, b = (gpt.load_checkpoint(r['folder'] / 'ckpt.pt') for r in (whole, part))
        assert same(a['model'], b['model'])
        assert a['scaler'] == b['scaler'] and a['scaler']['_growth_tracker'] == 9

def test_resume_after_kill():
    """SIGKILL at any moment, --resume auto: the weights of a run that nobody disturbed."""
    with folder() as path:
        flags = [str(f) for f in tiny(path, '--max-iters', 400, '--eval-interval', 20)]
        whole = run(*flags, '--out-dir', path / 'whole')[3]
        command = [sys.executable, str(HERE / 'attentionx_gpt.py'), *flags, '--resume', 'auto']
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        checkpoint = path / 'out/attentionx_gpt/attentionx-s1337/ckpt.pt'
        while not checkpoint.exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.15)
        process.kill()
        process.wait()
        step = json.loads(torch.load(checkpoint, weights_only=True)['progress'])[0]
        assert 0 <= step < 400
        assert run(*flags, '--resume', 'auto')[3]['folder'] == checkpoint.parent
        assert same(weights(whole['folder']), weights(checkpoint.parent))

def test_resume_with_other_data():
    """It goes on, and says so, once; images whose classes have other names are refused."""
    with folder() as path:
        assert 'note' not in run(*tiny(path, '--max-iters', 2))[1]
        (path / 'text.txt').write_text(TEXT[::-1])
        for iters, said in ((4, True), (6, False)):
            code, out, err, result = run(*tiny(path, '--max-iters', iters, '--resume'))
            assert code == 0 and result['iter'] == iters and ('note    the data' in out) == said
        flags = vit_tiny(path)
        (path / 'data/meta.json').write_text('{"classes": ["a", "b", "c"]}')
        assert vit_run(*flags)[0] == 0
        (path / 'data/meta.json').write_text('{"classes": ["b", "a", "c"]}')
        vit_refuse(['other classes'], *flags, '--resume')

def test_resume_chooses():
    with folder() as path:
        refuse(['no run', '--resume'], *tiny(path, '--resume'))
        first = run(*tiny(path, '--resume', 'auto', '--max-iters', 2))[3]
        second = run(*tiny(path, '--attention', 'belief', '--max-iters', 2))[3]
        refuse(['--gamma 2', 'contradicts'], *tiny(path, '--gamma', 2, '--resume'))
        refuse(['--attention', 'belief'], *tiny(path, '--resume', second['folder']),
               '--attention', 'softmax')
        longer = run(*tiny(path, '--resume', '--max-iters', 4))[3]
        assert longer['iter'] == 4 and longer['folder'] == first['folder']
        assert run(*tiny(path, '--resume', '--max-iters', 1))[3]['iter'] == 4  # nothing left to do
        refuse(['no run'], *tiny(path, '--seed', 1, '--resume'))  # though 1337 begins with a 1
        refuse(['contradicts'], '--preset', 't4', '--resume', '--out-dir', path / 'out')
        code, out, _, _ = run('sample', '--max-new-tokens', 4, '--resume', second['folder'])
        assert code == 0 and len(out) >= 5

def test_checkpoint_refusals():
    """Whatever stands in a checkpoint's place, in all four scripts: one line, exit 2, nothing
    executed, nothing written."""
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(path / 'executed'),)

    def refused(data, *words):
        if isinstance(data, bytes):
            bad.write_bytes(data)
        else:
            torch.save(data, bad)
        refuse(['bad.pt', *words], '--resume', bad, script=script)
        assert bad.parent.exists() and len(list(bad.parent.iterdir())) == 1

    with folder() as path:
        runs, bad = small_runs(path), path / 'bad/bad.pt'
        bad.parent.mkdir()
        with unittest.mock.patch.object(mask, 'memory', lambda *_: {}):
            found = {script: run(*flags, '--max-iters', 1, script=script)[3]['folder'] / 'ckpt.pt'
                     for script, flags in runs.items()}
        for script, good in found.items():
            data, original = good.read_bytes(), torch.load(good, weights_only=True)
            for case in (b'', b'<html>', b'PK\3\4' + bytes(60), data[:len(data) // 2], data[:-1],
                         data[1:], pickle.dumps(Evil()), pickle.dumps(original['progress'])):
                refused(case)
            entry = data.index(b'PK\1\2')  # a bit that makes PyTorch take a tensor for a folder
            refused(data[:entry + 38] + bytes([data[entry + 38] ^ 16]) + data[entry + 39:])
            for at in np.random.default_rng(0).integers(len(data), size=15):
                bad.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1:])
                with contextlib.redirect_stderr(io.StringIO()) as err:
                    try:  # a flipped bit may lie in padding
                        assert same(script.load_checkpoint(bad)['model'], original['model'])
                    except SystemExit as e:
                        assert e.code == 2 and err.getvalue().count('\n') == 1
            for other, checkpoint in found.items():
                if other is not script:
                    refused(checkpoint.read_bytes(), other.SCRIPT)
            for state in ([1, 2], Evil(), {'script': script.SCRIPT, 'x': Evil()}, {'model': {}}):
                refused(state)
            for key in set(original) - {'stamp'}:  # without that it says that data may differ
                refused({k: v for k, v in original.items() if k != key}, key)
            (name, first), *_ = original['model'].items()
            config, fits = original['config'], 'does not fit; has the script been changed?'
            for words, change in (
                    (['novel'], dict(config={**config, 'novel': 1})), (['list'], dict(config=[1])),
                    (['--batch-size'], dict(config={**config, 'batch_size': -1})),
                    (['str'], dict(config={**config, 'batch_size': 'x'})),
                    (['whole'], dict(progress='{')), (['whole'], dict(progress='[1]')),
                    (['whole'], dict(progress='null')), (['whole'], dict(progress='["x",0,[],[]]')),
                    (['whole'], dict(progress='[0,"x",[],[]]')),
                    ([fits], dict(model={**original['model'], name: first[:0]})),
                    ([fits], dict(model={**original['model'], 'novel': first})),
                    ([fits], dict(model=None)), ([fits], dict(optimizer={})),
                    ([fits], dict(optimizer=dict(state={}, param_groups=[])))):
                refused({**original, **change}, *words)
            for state in ([1, 2], {}, Evil(), dict(model=None), dict(model={name: first[:0]})):
                torch.save(state, bad)  # as weights to start from
                refuse(['bad.pt'], *runs[script], '--init', bad, script=script)
            refuse(['nowhere'], '--resume', path / 'nowhere.pt', script=script)
            refuse(['no run'], '--resume', '--out-dir', path / 'nowhere', script=script)
            reader = {gpt: 'sample', vit: 'predict x.png', detr: 'inspect', mask: 'sample'}[script]
            refuse(['no run'], *reader.split(), '--resume', 'auto', '--out-dir', path / 'nowhere',
                   script=script)
        assert not (path / 'executed').exists()

def test_checkpoint_survives_a_failed_write():
    with folder() as path:
        flags = tiny(path)
        def full(f):
            raise OSError(28, 'No space left on device')
        real, calls = os.fsync, []
        def second(f):
            calls.append(f)
            return full(f) if len(calls) > 1 else real(f)
        with unittest.mock.patch.object(os, 'fsync', second):
            refuse(['ckpt.pt', 'No space left'], *flags)
        run_folder = path / 'out/attentionx_gpt/attentionx-s1337'
        assert gpt.load_checkpoint(run_folder / 'ckpt.pt')['progress'][0] == 0
        assert [p.name for p in run_folder.iterdir() if p.suffix == '.tmp'] == []
        (path / 'file').write_text('')
        refuse([str(path / 'file')], *tiny(path, '--out-dir', path / 'file'))

def test_loss_that_is_not_finite():
    """Stops in its step, with one line; the last good checkpoint is intact, in all four scripts."""
    with folder() as path:
        for script, flags in small_runs(path).items():
            def broken(self, model, batch, loss=script.Task.loss):
                self.calls = getattr(self, 'calls', 0) + 1
                return loss(self, model, batch) * (math.nan if self.calls == 5 else 1)
            with unittest.mock.patch.object(script.Task, 'loss', broken):
                refuse(['step 4', 'nan', 'ckpt.pt', 'holds step 3'], *flags, script=script)
            found, = (path / 'out' / script.SCRIPT).glob('*-s1337/ckpt.pt')
            state = script.load_checkpoint(found)
            assert state['progress'][0] == 3
            assert all(p.isfinite().all() for p in state['model'].values())

def test_float16_training():
    """Autocast and loss scaling, on the CPU; the scaler is part of the checkpoint."""
    with folder() as path:
        for name in VARIANTS:
            code, out, err, result = run(*tiny(path, '--dtype', 'float16', '--attention', name))
            assert code == 0 and 'float16' in out and math.isfinite(result['val_loss']), err
        state = gpt.load_checkpoint(result['folder'] / 'ckpt.pt')
        assert state['scaler']['scale'] > 0
        norms, clip = {}, torch.nn.utils.clip_grad_norm_  # it sees gradients without the scale
        for dtype in ('float32', 'float16'):
            record = lambda *a: norms.setdefault(dtype, []).append(clip(*a)) or norms[dtype][-1]
            with unittest.mock.patch('torch.nn.utils.clip_grad_norm_', record):
                run(*tiny(path, '--dtype', dtype))
        close(torch.stack(norms['float16']) / torch.stack(norms['float32']), torch.ones(6), 0.1)
        overflow = gpt.Task.loss  # gradients beyond float16: the step is skipped, the run goes on
        with unittest.mock.patch.object(gpt.Task, 'loss', lambda *a: overflow(*a) * 1e30):
            code, _, err, result = run(*tiny(path, '--dtype', 'float16'))
        assert code == 0, err
        assert gpt.load_checkpoint(result['folder'] / 'ckpt.pt')['scaler']['scale'] < 65536

def test_resume_in_another_precision():
    """A run in float32 goes on in float16, with the optimiser as the new device wants it."""
    adam, load, fused = torch.optim.AdamW, torch.optim.Optimizer.load_state_dict, []
    def loads(self, state):  # PyTorch puts step counters where what it loads says it wants them
        fused.append([group['fused'] for group in state['param_groups']])
        return load(self, state)
    with folder() as path, unittest.mock.patch('torch.optim.Optimizer.load_state_dict', loads):
        for script, flags in small_runs(path).items():
            with unittest.mock.patch.object(mask, 'memory', lambda *_: {}), \
                    unittest.mock.patch('torch.optim.AdamW', lambda *a, fused=0, **kw: adam(
                        *a, **kw, fused=fused == 0 and '--resume' in now)):
                for now in ([], ['--resume', '--dtype', 'float16']):
                    code, out, err, result = run(*(now or [*flags, '--max-iters', 3]), '--device',
                                                 'cpu', '--max-iters', 5 if now else 3, '--out-dir',
                                                 path / 'out', script=script)
                    assert code == 0, err
            state = script.load_checkpoint(result['folder'] / 'ckpt.pt')
            assert state['progress'][0] == 5 and state['scaler']['scale'] > 0
            assert all(fused[-1]) and not any(fused[-2])

def test_short_slices():
    """A run that goes on for less than an evaluation ends in a report like any other."""
    with folder() as path:
        for script, flags in small_runs(path).items():
            long = ['--max-iters', 5000, '--eval-interval', 5000, '--max-minutes', 1e-6]
            with unittest.mock.patch.object(mask, 'memory', lambda *_: {}), \
                    unittest.mock.patch.object(mask, 'train_teacher', lambda *_: (
                        mask_teacher(vocab_size=256), 'a stub', 0)):
                for now in ([*flags, *long], ['--resume', '--max-minutes', 1e-6]):
                    code, out, err, result = run(*now, '--out-dir', path / 'out', script=script)
                    assert code == 0 and 'files   ' in out, err
            assert result['iter'] < 5

def test_time_limit():
    with folder() as path:
        flags = tiny(path, '--max-iters', 100000, '--eval-interval', 100000)
        code, out, _, result = run(*flags, '--max-minutes', 0.01)
        assert code == 0 and '--resume' in out
        assert 0.3 < gpt.load_checkpoint(result['folder'] / 'ckpt.pt')['progress'][1] < 3
        assert gpt.load_checkpoint(result['folder'] / 'ckpt.pt')['progress'][0] < 100000

def test_initial_weights():
    """--init takes nanoGPT's checkpoint: its key names, prefixes and masks."""
    with folder() as path:
        net = model(vocab_size=256, attention='softmax')
        state = {'_orig_mod.' + key: p for key, p in net.state_dict().items()}
        state['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)
        torch.save({'model': state, 'iter_num': 7}, path / 'nano.pt')
        flags = tiny(path, '--attention', 'softmax', '--max-iters', 0, '--init')
        assert same(weights(run(*flags, path / 'nano.pt')[3]['folder']), net.state_dict())
        refuse(['nano.pt', 'size mismatch'], *flags, path / 'nano.pt', '--n-embd', 32)
        refuse(['gone.pt'], *flags, path / 'gone.pt')

def test_bad_flags():
    """Each names the flag in one line, with exit code 2, before anything is written."""
    with folder() as path:
        for words, argv in (
                (['--gamma', '[1, inf)'], ['--gamma', 0.5]),
                (['--gamma', '(0, 1]'], ['--gamma', 3, '--attention', 'attentionx-v1']),
                (['--gamma'], ['--gamma', 'nan']), (['--gamma'], ['--gamma', 'inf']),
                (['--gamma'], ['--gamma', 'three']),
                (['--attention', 'belief-star'], ['--attention', 'x']),
                (['--max'], ['--max', 3]), (['--n-layer'], ['--n-layer', 0]),
                (['--n-layer'], ['--n-layer', 2.5]), (['--n-head'], ['--n-head', 3]),
                (['rotary'], ['--arch', 'rotary', '--n-head', 16]), (['--arch'], ['--arch', 'vit']),
                (['--dropout'], ['--dropout', 1]), (['--dropout'], ['--dropout', -0.1]),
                (['--learning-rate'], ['--lr', 0]), (['--learning-rate'], ['--lr', 'nan']),
                (['--min-lr', '--learning-rate'], ['--lr', 0.1, '--min-lr', 0.2]),
                (['--beta2'], ['--beta2', 1]), (['--batch-size'], ['--batch-size', 0]),
                (['--batch-size'], ['--batch-size', -4]),
                (['--vocab-size'], ['--vocab-size', 65537]),
                (['--seed'], ['--seed', -1]), (['--device', 'toaster'], ['--device', 'toaster']),
                (['--dtype', 'bfloat16'], ['--dtype', 'float8']),
                (['--preset', 'owt-124m'], ['--preset', 'big']),
                (['--schedule'], ['--schedule', 'linear']), (['--fp8-weights'], ['--fp8-weights']),
                (['--bias'], ['--arch', 'rotary', '--bias']),
                (['--eval-interval'], ['--eval-interval', 0]),
                (['--no-comp'], ['--no-comp']), (['--tokenizer'], ['--tokenizer', 'char']),
                (['fly'], ['fly']), (['stray'], ['train', 'stray'])):
            out = ['--out-dir', path / 'out']
            refuse(words, *(argv + out if argv[0] in ('fly', 'train') else tiny(path, *argv)))
        refuse(['--over', 'nothing'], 'compare', '--over', 'nothing=1,2', *tiny(path))
        refuse(['--over', 'abc'], 'compare', '--over', 'n_layer=abc', *tiny(path))
        refuse(['--gamma'], 'compare', '--over', 'gamma=3,0.5', *tiny(path))
        refuse(['--table', 'ax1'], 'compare', '--table', '9', *tiny(path))
        for field in ('seed=1,2', 'out_dir=a,b', 'threads=1,2'):
            refuse(['--over', field], 'compare', '--over', field, *tiny(path))
        refuse(['twice'], 'compare', '--over', 'gamma=3,4', '--over', 'gamma=5', *tiny(path))
        refuse(['--over', 'true'], 'compare', '--over', 'bias=yes,no', *tiny(path))
        refuse(['--seeds', 'one'], 'compare', '--seeds', 'one', *tiny(path))
        refuse(['--rounds'], 'bench', '--rounds', 1, *tiny(path))
        for script in (gpt, vit, detr, mask):
            refuse(['a' * 300], '--data', 'a' * 300, '--out-dir', path / 'out', script=script)
        assert not (path / 'out').exists()
        assert run(*tiny(path, '--max_iters=1', '--zero_diag'))[0] == 0  # underscores are welcome

def test_bad_files():
    """Text and token files that cannot be used: one line that names the file or the flag."""
    with folder() as path:
        def data(name, text, words):
            file = path / name
            file.write_bytes(text)
            refuse(words, *tiny(path), '--data', file)
        data('empty.txt', b'', ['empty.txt', 'fill a window'])
        data('short.txt', b'short', ['short.txt', 'fill a window'])
        data('latin.txt', b'caf\xe9 ' * 200, ['latin.txt', 'utf-8'])
        assert not (path / 'out').exists()
        refuse(['nowhere', 'prepare_data.py'], *tiny(path), '--data', 'nowhere')
        def bins(name, words, train=bytes(200), val=bytes(200),
                 meta='{"tokenizer": "gpt2", "vocab_size": 50257}'):
            (path / name).mkdir()
            contents = {'train.bin': train, 'val.bin': val, 'meta.json': meta and meta.encode()}
            for file, content in contents.items():
                if content is not None:
                    (path / name / file).write_bytes(content)
            refuse(words, *tiny(path), '--data', path / name)
        bins('none', ['train.bin'], train=None)
        bins('odd', ['odd'], train=bytes(201))
        bins('hollow', ['hollow'], val=b'')
        bins('few', ['few', 'fill a window'], val=bytes(30))
        bins('bare', ['meta.json'], meta=None)
        bins('broken', ['broken', 'meta.json'], meta='{')
        bins('list', ['list', 'meta.json'], meta='[1]')
        bins('chars', ['chars', 'tokenizer'], meta='{"tokenizer": "chars", "vocab_size": 65}')
        bins('huge', ['huge'], meta='{"tokenizer": "gpt2", "vocab_size": 100000}')
        refuse(['few', '--tokenizer'], *tiny(path, '--tokenizer', 'bytes'), '--data', path / 'few')
        bins('wrong', ['token 511', '256'], train=b'\xff\x01' * 200,
             meta='{"tokenizer": "bytes", "vocab_size": 256}')

def test_no_network():
    """Without tiktoken's files: a line with two ways out; training does not need them."""
    with folder() as path:
        with unittest.mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=str(path / 'cache')), \
                unittest.mock.patch('requests.get', side_effect=OSError('no network')), \
                unittest.mock.patch.dict(__import__('tiktoken').registry.ENCODINGS, clear=True):
            refuse(['TIKTOKEN_CACHE_DIR', '--tokenizer bytes'], *tiny(path, '--tokenizer', 'gpt2'))
            for name in ('train', 'val'):
                tokens = np.random.default_rng(0).integers(90, size=300)
                tokens.astype(np.uint16).tofile(path / f'{name}.bin')
            (path / 'meta.json').write_text('{"tokenizer": "gpt2", "vocab_size": 100}')
            code, out, err, _ = run(*tiny(path), '--data', path)
            assert code == 0 and 'validation loss' in out and 'sample  ' not in out, err

# ------------------------------------ actions ------------------------------------

def steps_taken():
    """A patch that counts training batches."""
    batch, taken = gpt.Task.batch, []
    return taken, unittest.mock.patch.object(
        gpt.Task, 'batch', lambda self, it, rows: taken.append(it) or batch(self, it, rows))

def test_compare():
    """Table and csv; finished runs are reused, interrupted ones go on, an edit starts over."""
    with folder() as path:
        flags = ['compare', '--over', 'attention=softmax,belief', '--over', 'lr=0.01,0.001',
                 '--seeds', '0,1', *tiny(path)]
        with interrupted_at(4, signal.SIGINT):
            assert run(*flags)[0] == 130
        taken, counting = steps_taken()
        with counting:
            code, out, err, table = run(*flags)
        assert code == 0 and len(taken) == 8 * 6 - 5, (err, len(taken))
        table = table['val_loss']
        assert list(table) == ['softmax 0.01', 'softmax 0.001', 'belief 0.01', 'belief 0.001']
        base = path / 'out/attentionx_gpt/compare'
        with open(base / 'compare.csv', newline='') as f:
            rows = list(csv.DictReader(f))
        assert [float(row['mean']) for row in rows] == [row['mean'] for row in table.values()]
        def final(case):
            found = [next(base.glob(f'{case}-s{seed}-*/ckpt.pt')) for seed in (0, 1)]
            logs = [gpt.load_checkpoint(p)['progress'][3] for p in found]
            return np.array([log[-1]['val_loss'] for log in logs])
        mine, row = final('belief-0.01'), table['belief 0.01']
        gaps = mine - final('softmax-0.01')
        assert abs(row['mean'] - mine.mean()) + abs(row['sd'] - mine.std(ddof=1)) < 1e-12
        assert abs(row['t'] - gaps.mean() / gaps.std(ddof=1) * math.sqrt(2)) < 1e-9
        run(*flags, '--log-interval', 2)  # any other setting is another run
        assert len(list(base.glob('belief-0.01-s1-*'))) == 2
        taken.clear()
        with counting:
            assert repr(run(*flags)[3]['val_loss']) == repr(table) and not taken
        edited = (HERE / 'attentionx_gpt.py').read_text('utf-8') + '# edited\n'
        with counting, unittest.mock.patch.object(gpt, 'SOURCE', edited):
            assert run(*flags)[0] == 0 and len(taken) == 8 * 6
        (path / 'text.txt').write_text(TEXT[::-1])  # other data, other runs
        taken.clear()
        with counting:
            assert run(*flags)[0] == 0 and len(taken) == 8 * 6

def test_compare_is_fair():
    """No seed counts twice; windows do not depend on the batch; gaps are between equal steps; what
    cannot be compared is refused."""
    with folder() as path:
        flags = tiny(path)
        table = run('compare', '--over', 'batch_size=4,8', '--seeds', '0,1,0', *flags,
                    '--max-iters', 0)[3]['val_loss']
        assert {row['seeds'] for row in table.values()} == {2}
        assert abs(table['8']['difference']) < 1e-6
        drawn = {}
        with unittest.mock.patch.object(gpt, 'draw', lambda path, panels: drawn.update(
                {panel[:2]: panel[2] for panel in panels}) or []):
            run('compare', '--over', 'max_iters=4,8', '--seeds', 0, *flags, '--eval-interval', 2)
        steps, gaps = drawn['val_loss', 'step'], drawn['val_loss less that of 4', 'step']
        assert [x for x, _ in gaps['8']] == [2, 4]  # the first fifth of a run is not shown
        for x, gap in gaps['8']:
            assert abs(dict(steps['8'])[x] - dict(steps['4'])[x] - gap) < 1e-9
        for field in ('tokenizer=bytes,gpt2', 'data=a,b'):
            refuse(['--over', field], 'compare', '--over', field, *flags)
        result = dict(run(*flags, '--max-iters', 2)[3], parameters=1)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            gpt.tabulate({'banana': [result]}, path, ['val_loss'])
        assert re.search(r'^banana +1 +\d\.\d{4} +\+0\.0000 +\d+$', out.getvalue(), re.M)

def test_variants_of_your_own():
    """A line in the dict of variants, a parameter, a change in forward: they train, keep their
    values, and inspect shows them. A mask of one's own is what it says."""
    idx = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
    def mine(mh, v, gamma):
        return 2 * mh
    for script, dim in ((gpt, 2), (vit, 2), (detr, 3), (mask, 2)):
        name = {gpt: 'CausalSelfAttention', vit: 'Attention', detr: 'MultiheadAttention',
                mask: 'SelfAttention'}[script]
        init = getattr(script, name).__init__
        def more(self, *args, init=init, **kwargs):
            init(self, *args, **kwargs)
            self.strength = torch.nn.Parameter(torch.full((dim,), 0.5))
            self.rise = torch.nn.PReLU(init=0.5)
            self.gate_weight = torch.nn.Parameter(torch.full((dim,), 0.5))
        with unittest.mock.patch.object(getattr(script, name), '__init__', more):
            net = {gpt: model, vit: vit_model, mask: mask_teacher,
                   detr: lambda: detr.DETR(detr_config())}[script]()
        found = [p for key, p in net.named_parameters()
                 if key.endswith(('strength', 'rise.weight', 'gate_weight'))]
        assert len(found) > 2 and all((p == 0.5).all() for p in found), name
    gamma, (mh, _, v) = torch.tensor(2.0, requires_grad=True), qkv(1, 2, 3, 4)
    for script, name in itertools.product((gpt, vit), ('attentionx', 'attentionx-v1')):
        script.ATTENTION[name](mh, v, gamma).sum().backward()  # gamma may be learned
    with unittest.mock.patch.dict(gpt.ATTENTION, mine=mine), folder() as path:
        code, out, err, result = run(*tiny(path, '--attention', 'mine', '--max-iters', 1))
        assert code == 0 and 'model   mine: mine\n' in out, err
        code, out, err, result = run('inspect', *tiny(path, '--attention', 'mine'))
        assert code == 0 and all(abs(row['update'] - 2 * row['mh']) < 1e-4
                                 for row in result['rows']), err
        again = run(*tiny(path, '--attention', 'mine', '--max-iters', 2, '--resume'))[3]
        assert again['folder'].name.startswith('mine')
    for script, images, attention in ((gpt, idx, 'CausalSelfAttention'),
                                      (vit, vit_images(2), 'Attention')):
        net = (model() if script is gpt else vit_model()).double().eval()
        before = [row['update'] for row in script.diagnose(net, images)]
        project = getattr(script, attention).project
        with unittest.mock.patch.object(getattr(script, attention), 'project',
                                        lambda self, update: project(self, 3 * update)):
            after = script.diagnose(net, images)
        assert abs(after[0]['update'] - 3 * before[0]) < 1e-4
    kinds = dict(mask.KINDS, stride=lambda i, j, n, reach: (i - j) % n == 0)
    with unittest.mock.patch.object(mask, 'KINDS', kinds):
        q, k, v = qkv(1, 2, 12, 4)
        i = torch.arange(12)
        there = ((i[:, None] - i) % 5 == 0) & (i[:, None] >= i)
        scores = (q @ k.mT / 2).masked_fill(~there, -math.inf)
        close(mask.attention_weights(q, k, 'stride:5'), scores.softmax(-1), 1e-12)
        assert mask.Config(masks='window:3+stride:5').how == 'dense'
        try:
            mask.blocked_attention(q, k, v, 'stride:5')
            raise RuntimeError('blocked_attention has taken a mask that it does not know')
        except AssertionError:
            pass
        c = mask_config(masks='stride:5', block_size=16)
        student = mask.substitute(mask_teacher(), c).eval()
        idx = torch.randint(40, (1, 6), generator=torch.Generator().manual_seed(0))
        out, _ = student.generate(idx, 8, 0.0)
        for t in range(6, 14):  # the cache loses nothing that a stride comes back to
            assert student(out[:, :t])[0, -1].argmax() == out[0, t]

def test_notebook_goes_on_as_it_was():
    """main() leaves threads, precision, signal handlers and matplotlib's backend alone, and what
    generate() returns can be trained on."""
    threads, handler, seen = torch.get_num_threads(), signal.getsignal(signal.SIGINT), []
    note = lambda _: seen.append(signal.getsignal(signal.SIGINT)) or ''
    with folder() as path, unittest.mock.patch.object(gpt, 'sparkline', note):
        torch.set_num_threads(2)
        try:
            assert run(*tiny(path, '--threads', 1))[0] == 0
            assert set(seen) == {handler}  # as soon as training is over
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(threads)
    assert torch.get_float32_matmul_precision() == 'highest'
    assert signal.getsignal(signal.SIGINT) is handler
    assert 'matplotlib.pyplot' not in sys.modules
    net = model(block_size=16)
    text = net.generate(torch.zeros(1, 1, dtype=torch.int64), 8)
    net(text[:, :-1], text[:, 1:])[1].backward()

def test_recipe_without_its_data():
    """A preset whose data is not prepared runs on built-in text and says what it wants."""
    before = os.getcwd()
    with folder() as path:
        flags = [f for f in tiny(path) if f not in ('--data', path / 'text.txt')]
        flags += ['--preset', 'owt-124m', '--max-iters', 0, '--vocab-size', 256]
        try:
            os.chdir(path)
            code, out, err, _ = run(*flags)
            assert code == 0 and 'prepare_data.py openwebtext' in out, err
            assert 'standard library' in out
            refuse(['openwebtext'], *flags, '--data', 'openwebtext')
            prepare('text', 'text.txt', '--tokenizer', 'bytes')
            code, out, err, _ = run(*flags, '--data', 'text')  # data/text, by its name alone
            assert code == 0 and 'data/text: ' in out.replace(os.sep, '/'), err
        finally:
            os.chdir(before)

def test_compare_tables():
    with folder() as path:
        for name in gpt.TABLES:
            flags = tiny(path, '--table', name, '--seeds', 0, '--max-iters', 1)
            code, out, err, table = run('compare', *flags)
            assert code == 0 and list(table['val_loss']) == list(gpt.TABLES[name]), err

def test_bench():
    with folder() as path:
        code, out, err, rows = run('bench', '--rounds', 3, *tiny(path))
        assert code == 0 and list(rows) == VARIANTS, err
        assert rows['softmax']['train_ratio'] == 1 and rows['belief']['train_ms'] > 0
        assert rows['belief-star']['parameters'] == rows['belief']['parameters'] + 2 * 16 * 16
        loss = gpt.Task.loss
        def slow_belief(self, *args):
            time.sleep(0.1 * (self.config.attention == 'belief'))
            return loss(self, *args)
        with unittest.mock.patch.object(gpt.Task, 'loss', slow_belief):
            rows = run('bench', '--rounds', 3, *tiny(path), '--over', 'attention=softmax,belief')[3]
        assert rows['belief']['train_ratio'] > 2 and rows['belief']['infer_ratio'] > 2
        seen = set()
        def note(self, *args):
            seen.add((self.config.dtype, torch.is_autocast_enabled('cpu')))
            return loss(self, *args)
        with unittest.mock.patch.object(gpt.Task, 'loss', note):
            run('bench', '--rounds', 2, *tiny(path), '--over', 'dtype=float32,bfloat16')
        assert seen == {('float32', False), ('bfloat16', True)}
        refuse(['--over', 'gamma'], 'bench', '--over', 'gamma=0.5', *tiny(path))
        refuse(['--over', '--table'], 'bench', '--over', 'gamma=3', '--table', 'ax1', *tiny(path))

def test_inspect():
    """The figures of a layer against the attention matrix written out; all variants run."""
    idx = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
    net = model(attention='belief').double().eval()
    row, attn = gpt.diagnose(net, idx)[0], net.transformer.h[0].attn
    x = net.transformer.wte(idx) + net.transformer.wpe(torch.arange(9))
    q, k, v = (t.transpose(1, 2) for t in attn.qkv(net.transformer.h[0].ln_1(x)))
    later = torch.ones(9, 9).triu(1).bool()
    p = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1)
    mh, v = (t.transpose(1, 2).flatten(2) for t in (p @ v, v))
    alpha = (mh * v).sum(-1) / (v * v).sum(-1)
    delta = mh - alpha[..., None] * v
    for key, value in dict(update=delta.norm(dim=-1), mh=mh.norm(dim=-1), alpha=alpha,
                           p_own=p.diagonal(dim1=2, dim2=3),
                           cos_update=F.cosine_similarity(attn.c_proj(delta), x, dim=-1),
                           cos_mh=F.cosine_similarity(attn.c_proj(mh), x, dim=-1)).items():
        assert abs(row[key] - value.mean().item()) < 1e-6, key
    assert gpt.diagnose(model(zero_diag=True), idx)[0]['p_own'] == 0
    with folder() as path:
        for name in ('softmax', 'attentionx', 'belief-star'):
            flags = tiny(path, '--attention', name, '--max-iters', 3)
            code, out, err, result = run('inspect', *flags)
            assert code == 0 and len(result['rows']) == 2 * 2, err
            assert (result['folder'] / 'inspect.csv').exists()

def test_sample():
    with folder() as path:
        trained = run(*tiny(path))[3]
        flags = ['sample', '--out-dir', path / 'out', '--prompt', 'the quick',
                 '--max-new-tokens', 5]
        a, b = (run(*flags, '--num-samples', 2)[3] for _ in range(2))
        assert a['samples'] == b['samples'] and all(s.startswith('the quick') for s in a['samples'])
        assert len(a['tokens'][0]) == 14 and a['folder'] == trained['folder']
        (path / 'prompt.txt').write_text('lazy')
        from_file = run(*flags, '--prompt', f'FILE:{path}/prompt.txt')[3]
        assert from_file['samples'][0].startswith('lazy')
        refuse(['gone.txt'], *flags, '--prompt', f'FILE:{path}/gone.txt')
        refuse(['--prompt'], *flags, '--prompt', '')
        refuse(['--temperature'], *flags, '--temperature', -1)
        refuse(['--temperature'], *flags, '--temperature', 'nan')
        refuse(['--top-k'], *flags, '--top-k', -1)
        refuse(['--gamma'], *flags, '--gamma', 2)

def small_runs(path):
    """{script: flags of a run that takes a second}"""
    vit_data(path / 'data')
    return {gpt: tiny(path), vit: vit_tiny(path), detr: detr_tiny(path), mask: mask_tiny(path)}

def test_two_processes():
    """torchrun with two processes takes the steps of one process at the same global batch, speaks
    and saves once, and goes on with --resume."""
    with folder() as path:
        for script, flags in small_runs(path).items():
            flags = [str(f) for f in (*flags, '--batch-size', 4, '--grad-accum-steps', 2)]
            with unittest.mock.patch.object(mask, 'memory', lambda *_: {}):
                one = run(*flags, script=script)[3]
            command = [sys.executable, '-m', 'torch.distributed.run', '--standalone',
                       '--nproc-per-node', '2', script.__file__, *flags,
                       '--out-dir', str(path / 'two')]
            older = path / 'two' / script.SCRIPT / one['folder'].name  # no process may look there
            older.mkdir(parents=True)
            (older / 'best.pt').write_text('of another run')
            for more in (['--max-iters', '3'], ['--resume']):
                done = subprocess.run(command + more, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, done.stderr[-2000:]
                assert done.stdout.count('files   ') == 1, done.stdout
            two, = (path / 'two' / script.SCRIPT).glob('*-s1337-2')
            for key, p in weights(one['folder']).items():  # AdamW may enlarge a rounding error to
                gap = (p - weights(two)[key]).abs()        # a whole step of an entry, but of few
                assert gap.mean() < 2e-5 and gap.max() < 2e-3, (script.SCRIPT, key, gap.max())
            with open(two / 'log.csv', newline='') as f:
                losses = [float(row['loss']) for row in csv.DictReader(f) if row['loss']]
            want = [row['loss'] for row in one['log'] if row['loss']]
            assert max(abs(a / b - 1) for a, b in zip(losses, want, strict=True)) < 1e-3, losses

def test_processes_take_a_gpu_each():
    """What torchrun starts asks for the GPU of its number, and says so where there is none."""
    for script in (gpt, vit, detr, mask):
        with unittest.mock.patch.object(script, 'WORLD', 98), \
                unittest.mock.patch.dict(os.environ, LOCAL_RANK='97'):
            refuse(['--device cuda:97'], '--device', 'cuda', script=script)

def test_cuda():
    """Every variant on the GPU agrees with the CPU, in its default precision and under compile."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest('no CUDA device')
    idx = torch.randint(40, (4, 16))
    for name in VARIANTS:
        for zero_diag in (False, True):
            net = model(attention=name, zero_diag=zero_diag)
            want = net(idx, idx)[0]
            got = net.cuda()(idx.cuda(), idx.cuda())[0].cpu()
            close(got, want, 2e-2 * want.abs().max())
    with folder() as path:
        for dtype in ('float16', 'auto'):
            code, out, err, result = run(*tiny(path, '--dtype', dtype), '--device', 'cuda')
            assert code == 0 and 'cuda' in out and math.isfinite(result['val_loss']), err

# ------------------------------------ belief_vit.py ------------------------------------

vit_run = functools.partial(run, script=vit)
vit_refuse = functools.partial(refuse, script=vit)
SMALL = dict(image_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2, head_size=6,
             mlp_dim=10, num_classes=5)

def vit_config(**settings):
    return vit.Config(**{**SMALL, **settings})

def vit_model(**settings):
    """A small model with weights large enough that attention is not uniform."""
    net = vit.ViT(vit_config(**settings))
    with torch.no_grad():
        for name, p in net.named_parameters():
            if 'qkv' in name:
                p.mul_(4)
    return net

def vit_images(n, size=8, seed=0):
    return torch.from_numpy(np.random.RandomState(seed).uniform(-1.7, 1.7, (n, 3, size, size)))

def vit_data(path, n=60, size=8, classes=3):
    """A folder with train.npz and test.npz: the class is the brightest colour."""
    path.mkdir(exist_ok=True)
    for name, count in (('train', n), ('test', n // 2)):
        rng = np.random.default_rng(len(name))
        labels = np.arange(count) % classes
        images = rng.integers(0, 120, (count, 3, size, size))
        images[np.arange(count), labels] += 100
        np.savez(path / f'{name}.npz', images=images.astype(np.uint8), labels=labels)
    return path

def vit_tiny(path, *more):
    """Flags of a run that takes a second."""
    if not (path / 'data').exists():
        vit_data(path / 'data')
    flags = ['--preset', 'tiny', '--max-iters', 6, '--batch-size', 8,
             '--eval-interval', 3, '--log-interval', 1, '--warmup-iters', 2, '--device', 'cpu',
             '--data', path / 'data', '--out-dir', path / 'out']
    for key in ('image_size', 'patch_size', 'embed_dim', 'depth', 'num_heads', 'head_size',
                'mlp_dim'):
        flags += ['--' + key, SMALL[key]]
    return flags + list(more)

def vit_method(name, q, k, v, gamma=None, zero_diag=False):
    """A variant on q, k, v (B, nh, T, hs) -> tuple of (B, T, nh, hs)."""
    gamma = vit.default_gamma(name, zero_diag, gamma)
    out = vit.ATTENTION[name](vit.multi_head(q, k, v, zero_diag), v.transpose(1, 2), gamma)
    return out if isinstance(out, tuple) else (out,)

# ------------------------------------ the papers' method ------------------------------------

def test_same_text():
    """The functions that two scripts have in common are the same text."""
    family = ('inner ratio orthogonal softmax attentionx attentionx_v1 belief belief_head '
              'belief_star softmax_scaled value_skip default_gamma')
    for a, b, names in ((gpt, vit, family + ' inputs_of'), (vit, detr, 'write_png shuffled'),
                        (gpt, mask, 'get_tokenizer load_text encode load_bins windows')):
        for name in names.split():
            assert inspect.getsource(getattr(a, name)) == inspect.getsource(getattr(b, name)), name

def test_vit_reference():
    for T in (1, 2, 5):
        q, k, v = qkv(2, 3, T, 4)
        for name in VARIANTS:
            for zero_diag in (False, True):
                gamma = {'attentionx': 2.5, 'attentionx-v1': 0.3}.get(name, 1.7)
                want = slow(name, q, k, v, gamma, zero_diag, causal=False)
                for got, expected in zip(vit_method(name, q, k, v, gamma, zero_diag), want):
                    close(got, expected, 1e-12)

def test_vit_gradcheck():
    for name in VARIANTS:
        for zero_diag in (False, True):
            for T in ((4, 1) if zero_diag else (4,)):
                inputs = [t.requires_grad_() for t in qkv(1, 2, T, 3)]
                f = lambda *x: vit_method(name, *x, zero_diag=zero_diag)
                assert torch.autograd.gradcheck(f, inputs), (name, zero_diag, T)

def test_vit_orthogonality():
    """Delta is orthogonal to V and no longer than MH; Delta_s is so in every head.  [BF Eq. 11]"""
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        for scale in (1e-8, 1.0, 1e4):
            for zero_diag in (False, True):
                q, k, v = qkv(2, 3, 7, 8, dtype=dtype, scale=scale)
                mh = vit.multi_head(q / scale, k / scale, v, zero_diag)
                own = v.transpose(1, 2)
                whole, heads = vit.belief_star(mh, own, None)
                norm = lambda t: t.flatten(2).norm(dim=-1)
                cosine = (whole * own).sum((-2, -1)) / (norm(mh) * norm(own))
                close(cosine, torch.zeros_like(cosine), tolerance)
                cosine = (heads * own).sum(-1) / (mh.norm(dim=-1) * own.norm(dim=-1))
                close(cosine, torch.zeros_like(cosine), tolerance)
                assert (norm(whole) <= norm(mh) * (1 + tolerance)).all()

def test_vit_projection_can_lengthen():
    """||Delta W^o|| <= ||MH W^o|| does not follow from ||Delta|| <= ||MH||, as BF writes."""
    v, mh = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    delta = vit.belief(mh.view(1, 1, 1, 2), v.view(1, 1, 1, 2), None).flatten()
    w = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    assert delta.norm() < mh.norm() and (delta @ w).norm() > 1.4 * (mh @ w).norm()

def test_vit_half_precision():
    """float16 and bfloat16 against float64, and ||V||^2 beyond float16."""
    for dtype, bound in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
        exact = [t.to(dtype).double() for t in qkv(2, 4, 16, 16)]
        mh, v = vit.multi_head(*exact, True).to(dtype), exact[2].transpose(1, 2).to(dtype)
        for name in VARIANTS:
            low = vit.ATTENTION[name](mh, v, 1.0)
            high = vit.ATTENTION[name](mh.double(), v.double(), 1.0)
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (low, high))):
                assert a.dtype == dtype
                close(a.double() / b.abs().max(), b / b.abs().max(), bound)
    mh, _, v = qkv(1, 3, 12, 64, dtype=torch.float16, scale=20.0)
    assert v.square().sum().isinf()
    for out, want in zip(vit.belief_star(mh, v, None),
                         vit.belief_star(mh.double(), v.double(), None)):
        close(out.double() / 20, want / 20, 4e-3)

def test_vit_zero_value():
    """Where V is zero nothing is projected away; gradients stay finite."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (t.requires_grad_() for t in qkv(1, 2, 5, 4, dtype=dtype))
        hole = torch.ones(5, 1, dtype=dtype)
        hole[2] = 0
        mh, own = vit.multi_head(q, k, v * hole, True), (v * hole).transpose(1, 2)
        for out in vit.belief_star(mh, own, None):
            close(out[:, 2].float(), mh[:, 2].float(), 0)
            for grad in torch.autograd.grad(out.float().sum(), (q, k, v), retain_graph=True):
                assert grad.isfinite().all()

def test_vit_permutation():
    """Attention does not know the order of the tokens; only positions and the convolution do."""
    x = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    for name in VARIANTS:
        for model in ('vit-small', 'deit-small'):
            for zero_diag in (False, True):
                net = vit_model(model=model, attention=name, zero_diag=zero_diag).double().eval()
                close(net.blocks[0].attn(x)[:, order], net.blocks[0].attn(x[:, order]), 1e-12)

def test_vit_temperature():
    """The learned scale starts at 1 / sqrt(hs) and its gradient is that of an explicit softmax."""
    net = vit_model(model='vit-small', attention='softmax').double().eval()
    attn, x = net.blocks[0].attn, torch.randn(1, 5, 12, dtype=torch.float64)
    close(attn.temperature.exp(), torch.tensor(6 ** -0.5), 1e-6)
    q, k, v = (t.transpose(1, 2) for t in
               attn.qkv(x).unflatten(2, (3, 2, 6)).unbind(2))               # (B, nh, T, hs)
    scores = (q @ k.mT * attn.temperature.exp()).masked_fill(torch.eye(5).bool(), -math.inf)
    want = attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    close(attn(x), want, 1e-12)
    a, b = (torch.autograd.grad(t.square().sum(), attn.temperature)[0] for t in (attn(x), want))
    close(a, b, 1e-10)

# ------------------------------------ the models ------------------------------------

VIT_GOLDEN = {  # name: settings, names of the original for ours, logits of the original
    'vit_small': (dict(model='vit-small', image_size=16, patch_size=4, head_size=64, mlp_dim=20), (
        ('^pos_embed', 'pos_embedding'), ('^norm', 'mlp_head.0'), ('^head', 'mlp_head.1'),
        ('^patch_embed.norm', 'to_patch_embedding.to_patch_tokens.1'),
        ('^patch_embed.proj', 'to_patch_embedding.to_patch_tokens.2'),
        ('^blocks', 'transformer.layers'), ('norm1', '0.norm'), ('norm2', '1.norm'),
        ('attn.temperature', '0.fn.temperature'), ('attn.qkv', '0.fn.to_qkv'),
        ('attn.proj', '0.fn.to_out.0'), ('mlp.fc1', '1.fn.net.0'), ('mlp.fc2', '1.fn.net.3')), [
        [-0.2876340, -0.2904149, 0.8388182, 0.5144193, 0.9584070, -1.3805051, 1.8897740],
        [0.6991852, -0.5849655, 0.2527528, 1.2068124, -1.7252178, 2.3127195, 0.7696771]]),
    'localvit_hs': (dict(model='deit-small-local', image_size=64, patch_size=16), (
        ('norm2', 'conv.layernorm'), ('mlp.conv', 'conv.conv.0'), ('mlp.fc', 'conv.fc')), [
        [0.1886144, 0.4249878, 0.6711958, 1.4330803, 0.8061749, -1.4793075, -1.1048520],
        [0.2352465, 0.8508767, 1.7852319, 0.5522126, -0.4875855, -1.1603672, 0.1807886]]),
    'deit_timm': (dict(model='deit-small', image_size=32, patch_size=8), (), [
        [-0.3659678, 1.1703037, -0.2167598, -1.4045696, -0.2318807, 0.9726332, 0.3376579],
        [-0.0285890, 1.4024078, -0.2165508, -1.6745202, -1.0904751, 1.4061972, -0.6508214]]),
}

def vit_fill(key, p):
    """Weights that anyone can make again from the original's name of the parameter."""
    n = p.numel()
    w = np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, n)
    if p.dim() > 1:
        w *= math.sqrt(3 / (n / len(p))) * (4 if re.search(r'qkv|attn\.to[qk]\.', key) else 1)
    else:
        w = 0.1 * w + (p.dim() == 1 and key.endswith('.weight'))
    return torch.from_numpy(w).view_as(p)

def vit_golden(name, **settings):
    shape, names, logits = VIT_GOLDEN[name]
    net = vit.ViT(vit.Config(**{**dict(
        attention='softmax', embed_dim=24, depth=2, num_heads=3, head_size=8, mlp_dim=96,
        num_classes=7), **shape, **settings})).double().eval()
    for key, p in net.state_dict().items():
        for ours, theirs in names:
            key = re.sub(ours, theirs, key)
        if name == 'localvit_hs' and 'qkv' in key:
            p.copy_(torch.cat([vit_fill(key.replace('qkv', part), third)
                               for part, third in zip(('toq', 'tok', 'tov'), p.chunk(3))]))
        else:
            p.copy_(vit_fill(key, p))
    return net, vit_images(2, shape['image_size']), torch.tensor(logits, dtype=torch.float64)

def test_vit_golden():
    """The same weights give what the three originals gave."""
    for name in VIT_GOLDEN:
        net, images, logits = vit_golden(name)
        close(net(images), logits, 1e-6)
    net, images, logits = vit_golden('vit_small', zero_diag=False)  # not the original's: it tells
    assert (net(images) - logits).abs().max() > 0.01

def test_vit_parameter_counts():
    for settings, expected in (
            (dict(model='vit-small', num_classes=10), 9_622_512),
            (dict(model='vit-small', num_classes=100), 9_668_682),
            (dict(model='vit-small', num_classes=10, patch_size=8), 9_968_016),
            (dict(model='vit-small', num_classes=10, attention='belief-star'), 11_195_376),
            (dict(model='deit-small', num_classes=1000), 22_050_664),
            (dict(model='deit-small-local', num_classes=1000), 22_179_688),
            (dict(model='deit-small-local', num_classes=1000, attention='belief-star'),
             22_179_688 + 12 * 384 * 384)):
        with torch.device('meta'):
            net = vit.ViT(vit.Config(**settings))
        assert sum(p.numel() for p in net.parameters()) == expected, settings

def test_vit_every_parameter_learns():
    """None is dead, but LocalViT's last feed-forward network: the class token passes it by."""
    for model in vit.MODELS:
        for name in VARIANTS:
            net = vit_model(model=model, attention=name).double()
            net(vit_images(3)).square().sum().backward()
            dead = {key for key, p in net.named_parameters() if p.grad.abs().max() == 0}
            assert dead == ({'blocks.1.' + key for key in (
                'norm2.weight', 'norm2.bias', 'mlp.fc1.weight', 'mlp.conv.weight',
                'mlp.fc2.weight')} if model == 'deit-small-local' else set()), (model, name, dead)

def test_vit_initialisation():
    """Variants share their common weights to the bit; each model has its original's spread."""
    sizes = dict(image_size=None, patch_size=None, embed_dim=None, depth=2, num_heads=None,
                 head_size=None, mlp_dim=None)
    def spread(model, **expected):
        state = vit.ViT(vit_config(model=model, **sizes)).state_dict()
        for key, std in expected.items():
            key = key.replace('__', '.')
            assert abs(state[key].std() / std - 1) < 0.12, (model, key, state[key].std(), std)
        return state
    uniform = lambda fan_in: (3 * fan_in) ** -0.5  # of U(-1, 1) / sqrt(fan_in)
    spread('vit-small', pos_embed=1, cls_token=1, patch_embed__proj__weight=uniform(240),
           patch_embed__proj__bias=uniform(240), blocks__0__attn__qkv__weight=uniform(512),
           blocks__1__mlp__fc1__bias=uniform(512))
    state = spread('deit-small', pos_embed=0.02, blocks__0__attn__qkv__weight=0.02,
                   cls_token=0.02, patch_embed__proj__weight=uniform(768))
    assert state['blocks.0.attn.qkv.bias'].abs().max() == 0
    spread('deit-small-local', pos_embed=0.00513, cls_token=0.051,
           blocks__0__attn__qkv__weight=384 ** -0.5, blocks__0__mlp__fc1__weight=960 ** -0.5,
           blocks__0__mlp__conv__weight=uniform(9), blocks__0__attn__proj__bias=uniform(384))
    base = vit.ViT(vit_config(attention='softmax')).state_dict()
    for name in VARIANTS:
        state = vit.ViT(vit_config(attention=name)).state_dict()
        assert all(torch.equal(base[key], state[key]) for key in base)
        assert set(state) - set(base) == ({f'blocks.{i}.attn.proj_s.weight' for i in range(2)}
                                          if name == 'belief-star' else set())
    other = vit.ViT(vit_config(seed=1)).state_dict()
    assert not torch.equal(base['pos_embed'], other['pos_embed'])
    for name in ('vit-small', 'deit-small', 'deit-small-local'):
        assert same(*(vit.ViT(vit_config(model=name)).state_dict() for _ in range(2))), name

def test_vit_position_resize():
    """Other sizes get positions of their own, between those learned, and the gradient returns."""
    pos = torch.randn(1, 17, 3, dtype=torch.float64)
    assert vit.resize_positions(pos, (4, 4)) is pos
    flat = torch.cat([pos[:, :1], pos[:, 1:2].expand(1, 16, 3)], 1)
    close(vit.resize_positions(flat, (2, 7)), flat[:, :2].repeat(1, 8, 1)[:, :15] * 0
          + torch.cat([flat[:, :1], flat[:, 1:2].expand(1, 14, 3)], 1), 1e-5)
    ramp = torch.arange(4.0).repeat(4, 1).view(1, 16, 1)               # grows along the columns
    out = vit.resize_positions(torch.cat([torch.zeros(1, 1, 1), ramp], 1), (8, 8))[:, 1:]
    out = out.view(8, 8)
    close(out, out[:1].expand(8, 8), 1e-5)
    assert (out[0].diff() > 0).all() and abs(out.mean() - 1.5) < 1e-5
    def cubic(x, a=-0.75):  # the convolution kernel of bicubic interpolation
        x = abs(x)
        return ((a + 2) * x ** 3 - (a + 3) * x ** 2 + 1 if x <= 1
                else a * (x ** 3 - 5 * x ** 2 + 8 * x - 4) if x < 2 else 0.0)
    W = torch.zeros(7, 4)
    for o in range(7):
        at = (o + 0.5) * 4 / 7 - 0.5
        for i in range(math.floor(at) - 1, math.floor(at) + 3):
            W[o, min(max(i, 0), 3)] += cubic(at - i)
    out = vit.resize_positions(pos, (7, 7))[0, 1:].T.reshape(3, 7, 7)
    close(out, W.double() @ pos[0, 1:].T.reshape(3, 4, 4) @ W.double().T, 1e-5)
    for model in vit.MODELS:
        net = vit_model(model=model).double().eval()
        for size in ((4, 4), (8, 8), (16, 24), (12, 4)):
            images = vit_images(2, 24)[:, :, :size[0], :size[1]]
            net.zero_grad()
            logits = net(images)
            logits.square().sum().backward()
            assert logits.shape == (2, 5) and net.pos_embed.grad[0].norm(dim=-1).min() > 0, size

def test_vit_initial_weights():
    """--init takes DeiT's checkpoint: prefix, another grid, other classes."""
    with folder() as path:
        net = vit_model(model='deit-small', attention='softmax', num_classes=3)
        flags = vit_tiny(path, '--model', 'deit-small', '--attention', 'softmax', '--max-iters', 0,
                         '--init')
        torch.save({'model': {'module.' + k: p for k, p in net.state_dict().items()}}, path / 'd')
        assert same(weights(vit_run(*flags, path / 'd')[3]['folder']), net.state_dict())
        big = vit_model(model='deit-small', attention='softmax', num_classes=9, image_size=16)
        torch.save(big.state_dict(), path / 'big')
        code, out, err, result = vit_run(*flags, path / 'big')
        assert code == 0 and '9 classes' in out, err
        state = weights(result['folder'])
        assert state['pos_embed'].shape == (1, 5, 12) and len(state['head.weight']) == 3
        assert torch.equal(state['blocks.0.mlp.fc1.weight'], big.blocks[0].mlp.fc1.weight)
        vit_refuse(['big', 'size mismatch'], *flags, path / 'big', '--embed-dim', 24)
        vit_refuse(['gone'], *flags, path / 'gone')

def test_vit_dropout_and_drop_path():
    net, images = vit_model(model='vit-small', dropout=0.5), vit_images(2).float()
    assert not torch.equal(net.train()(images), net(images))
    assert torch.equal(net.eval()(images), net(images))
    net = vit_model(drop_path=0.9)
    assert net.blocks[0].drop_path == 0 and net.blocks[1].drop_path == 0.9
    branch = torch.ones(4000, 2, 3)
    kept = net.blocks[1].train().keep(branch)
    assert abs(kept.mean() - 1) < 0.2 and set(kept[:, 0, 0].round().tolist()) == {0.0, 10.0}
    assert (kept == kept[:, :1, :1]).all() and net.blocks[1].eval().keep(branch) is branch

# ------------------------------------ SET-Adam ------------------------------------

def slow_set_adam(p, grads, lr, beta1, beta2, eps, tau):
    """One number at a time, in Python's float64."""
    m, v = [0.0] * len(p), [0.0] * len(p)
    for t, g in enumerate(grads, 1):
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g)]
        c = sum(v) ** 2 / (len(v) * sum(a * a for a in v)) if any(v) else 1.0
        w = [math.sqrt(c * a / (1 - beta2 ** t) + eps) for a in v]
        p = [x - lr / (1 - beta1 ** t) * a / (b - tau * min(w)) for x, a, b in zip(p, m, w)]
    return p

def test_vit_optimizer():
    """The flags reach each optimiser; AdamW alone decays, and matrices alone."""
    with folder() as path:
        for name in ('adamw', 'adam', 'set-adam'):
            task = vit.Task(vit_config(
                data=str(vit_data(path / 'd')), optimizer=name, learning_rate=3e-3, beta1=0.8,
                beta2=0.95, weight_decay=0.2, tau=0.3))
            groups, decays = task.optimizer().param_groups, {}
            for group in groups:
                assert (group['lr'], group['betas']) == (3e-3, (0.8, 0.95)), name
                assert group.get('tau') == (0.3 if name == 'set-adam' else None)
                decays.update(dict.fromkeys(group['params'], group.get('weight_decay', 0)))
            for key, p in task.model.named_parameters():
                matrix = p.dim() > 1 and key not in ('pos_embed', 'cls_token')
                assert decays[p] == (0.2 if name == 'adamw' and matrix else 0), (name, key)

def test_vit_set_adam():
    """Against the formulas, from gradients of 1e-12 to 1e12, in float32 too; one entry; zeros."""
    rng = np.random.default_rng(0)
    for shape in ((), (1,), (7,), (4, 6)):
        for scale in (1e-12, 1e-9, 1.0, 1e12):
            grads = [scale * rng.standard_normal(shape) for _ in range(5)]
            start = rng.standard_normal(shape)
            want = slow_set_adam(start.ravel().tolist(), [g.ravel() for g in grads], 0.01, 0.9,
                                 0.999, 1e-18, 0.5)
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
                p = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
                adam = vit.SETAdam([p], 0.01)
                for g in grads:
                    p.grad = torch.tensor(g, dtype=dtype)
                    adam.step()
                close(p.detach().double().flatten(), torch.tensor(want).double(), tolerance)
    for g in (torch.zeros(5), torch.full((5,), 1e-30), torch.full((5,), 1e15),
              torch.tensor([1.0, 0, 0, 0, 0]), torch.tensor([1e-25, 1e15, 0, 1, 1e-8])):
        p = torch.nn.Parameter(torch.ones(5))
        adam = vit.SETAdam([p, torch.nn.Parameter(torch.ones(2))], 0.01)  # one without gradient
        for _ in range(3):
            p.grad = g.clone()
            adam.step()
        assert p.isfinite().all() and (g.abs().max() > 0 or (p == 1).all())
        assert (p - 1).abs().max() <= 3 * 0.01 * 2 * math.sqrt(5) + 1e-6  # 1 / sqrt(c) at most

def test_vit_set_adam_multiplier():
    """A number alone, and equal ones, move twice as far as with Adam."""
    for p in (torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(300))):
        idle = torch.nn.Parameter(torch.zeros(900))  # what does not move has no part in the figures
        adam = vit.SETAdam([p, idle], 0.01)
        p.grad, idle.grad = torch.ones_like(p), torch.zeros(900)
        adam.step()
        close(p.detach(), torch.full_like(p, -0.02), 1e-6)
        assert all(abs(x - 2) < 1e-4 for x in adam.multipliers()) and adam.multipliers()
        half = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
        adam = vit.SETAdam([half], 0.01)
        half.grad = torch.full_like(half, 1e-4)
        adam.step()
        assert adam.state[half]['exp_avg_sq'].dtype == torch.float32
        close(half.detach().float(), torch.full((3,), -0.02), 1e-4)

# ------------------------------------ images ------------------------------------

def test_vit_shapes():
    images, labels = vit.draw_shapes(200, 5)
    assert images.shape == (200, 3, 32, 32) and (images.dtype, labels.dtype) == (np.uint8, np.int64)
    assert set(labels) == set(range(10)) and len(vit.SHAPES.split(',')) == 10
    assert images.std() > 40 and not np.array_equal(images, vit.draw_shapes(200, 6)[0])
    pattern = np.random.RandomState(0).uniform(-1, 1, (3, 32, 32))
    marks = (images * pattern).sum((1, 2, 3))  # of these drawings, in spite of rounding; another
    # numpy may draw others, which would make the README's figures those of an older one
    close([marks[labels == k].mean() for k in range(10)], [
        2641.5, 2040.9, 2925.6, 2227.8, 3173.7, 3405.6, 2953.6, 1607.8, 2362.7, 2263.7], 2)
    vit.draw_shapes.cache_clear()
    assert np.array_equal(images, vit.draw_shapes(200, 5)[0])

def test_vit_batches():
    """Batch i follows from seed and i alone, processes share it, all images come once an epoch."""
    with folder() as path:
        vit_data(path / 'd')
        c = vit_config(data=str(path / 'd'), batch_size=2, grad_accum_steps=4, val_fraction=0.2)
        task = vit.Task(c)
        assert task.steps_per_epoch == 6 and len(task.val[1]) == 12 and len(task.test[1]) == 30
        whole = task.batch(3, range(8))
        assert torch.equal(whole[0], vit.Task(c).batch(3, range(8))[0])
        half = task.batch(3, range(8)[1::2])
        assert torch.equal(whole[0][1::2], half[0]) and torch.equal(whole[1][1::2], half[1])
        assert not torch.equal(whole[0], task.batch(4, range(8))[0])
        other = vit.Task(dataclasses.replace(c, seed=5))
        assert not torch.equal(whole[0], other.batch(3, range(8))[0])
        with unittest.mock.patch.object(vit, 'augment', lambda images, *_: images):
            seen = torch.cat([task.batch(i, range(8))[0] for i in range(6, 12)])
        every = task.normalise(task.train[0], 8)
        close(*(t.sum((1, 2, 3)).sort().values for t in (seen, every)), 1e-4)
        grow = vit.Task(dataclasses.replace(c, image_size=32, first_size=8, size_epochs=2.0))
        assert [grow.size(i) for i in (0, 11, 12, 24, 36, 99)] == [8, 8, 16, 24, 32, 32]
        assert grow.batch(12, range(8))[0].shape == (8, 3, 16, 16)
        assert vit.Task(dataclasses.replace(c, epochs=2.5)).config.max_iters == 15
        mixed = vit.Task(dataclasses.replace(c, mix=True, label_smoothing=0.3))
        close(mixed.batch(0, range(8))[1].min(), 0.3 / 5, 1e-6)

def test_vit_evaluation():
    """Loss and accuracy over the whole split, in batches that need not divide it."""
    for name, colours in dict(cifar10=(0.4914, 0.4822, 0.4465, 0.2023, 0.1994, 0.2010),
                              cifar100=(0.5071, 0.4867, 0.4408, 0.2675, 0.2565, 0.2761),
                              photos=(0.485, 0.456, 0.406, 0.229, 0.224, 0.225)).items():
        close(vit.normalisation('data/' + name).flatten(), colours, 1e-7)
    with folder() as path:
        vit_data(path / 'd')
        task = vit.Task(vit_config(data=str(path / 'd'), batch_size=7, val_fraction=0.3))
        logits = task.model.eval()(task.normalise(*[task.val[0]], 8))
        figures = task.evaluate()
        close(F.cross_entropy(logits, task.val[1]), figures['val_loss'], 1e-5)
        close((logits.argmax(1) == task.val[1]).double().mean(), figures['val_acc'], 1e-6)
        assert vit.linear_accuracy(task) > 0.9  # colours are easy
        task.config = dataclasses.replace(task.config, label_smoothing=0.3)
        x, shares = task.normalise(task.val[0], 8), F.one_hot(task.val[1], 5) * 0.7 + 0.3 / 5
        close(*(task.loss(task.model, (x, y)) for y in (task.val[1], shares)), 1e-6)  # once

def vit_photos(path, size=(20, 16), exif=False):
    """train/CLASS and val/CLASS of two colours."""
    from PIL import Image
    for part, n in (('train', 6), ('val', 2)):
        for name, color in (('blue', (0, 0, 200)), ('red', (200, 0, 0))):
            (path / part / name).mkdir(parents=True)
            for i in range(n):
                image = Image.new('RGB', size, color)
                tags = image.getexif()
                if exif:
                    tags[0x0112] = 6  # to be turned by 90 degrees
                image.save(path / part / name / f'{i}.jpg', exif=tags)
    return path

def test_vit_photos():
    """A folder of photos trains, tests and predicts; a file that is none is named."""
    try:
        from PIL import Image
    except ImportError:
        raise unittest.SkipTest('no Pillow')
    with folder() as path:
        vit_photos(path / 'data', exif=True)
        assert vit.read_photo(path / 'data/train/red/0.jpg', 8).shape == (3, 8, 8)
        wide = Image.new('RGB', (30, 10))
        wide.paste((255, 255, 255), (10, 0, 20, 10))
        wide.save(path / 'wide.png')
        assert vit.read_photo(path / 'wide.png', 8).min() == 255  # the middle
        assert vit.read_photo(path / 'wide.png', 8, (1, 0.5, 0, 0))[0, 0, 0] == 0
        resize, boxes = Image.Image.resize, []
        def note(image, size, how, box):
            boxes.append(box)
            return resize(image, size, how, box)
        with unittest.mock.patch.object(Image.Image, 'resize', note):
            for crop in (0, 0, 0, 0), (0, 1, 1, 1), (1, 0.5, 0.2, 0.2):
                vit.read_photo(path / 'data/train/red/0.jpg', 8, crop)  # 16 wide and 20 high
        w, h = (0.08 * 320 * 0.75) ** 0.5, (0.08 * 320 / 0.75) ** 0.5  # 3:4
        whole = 0, 0.2 * (20 - 320 ** 0.5), 16, 0.2 * (20 - 320 ** 0.5) + 320 ** 0.5
        close(boxes, [(0, 0, w, h), (16 - h, 20 - w, 16, 20), whole], 1e-6)
        flags = vit_tiny(path, '--lr', 0.01, '--val-fraction', 0.25, '--max-iters', 12)
        code, out, err, result = vit_run(*flags, '--first-size', 4, '--patch-size', 2,
                                     '--size-epochs', 2.0, '--attention', 'belief-star')
        assert code == 0 and result['test_acc'] == 1, (err, out)
        with unittest.mock.patch.object(pathlib.Path, 'rglob', lambda folder, _: sorted(
                folder.iterdir(), reverse=True)):  # whatever the order on the disk
            names = vit.load_folders(path / 'data')[0][0].tolist()
        assert len(names) == 12 and names == sorted(names)
        task = vit.Task(vit_config(data=str(path / 'data'), batch_size=4))
        whole = task.batch(2, range(4))[0]
        assert torch.equal(whole[2:], vit.Task(task.config).batch(2, [2, 3])[0])
        code, out, err, answer = vit_run('predict', path / 'data/val/red/0.jpg', '--out-dir',
                                     path / 'out')
        assert code == 0 and answer['top'][0][0] == 'red' and '%  red' in out, err
        (path / 'text.png').write_text('no photo')
        vit_refuse(['text.png'], 'predict', path / 'text.png', '--out-dir', path / 'out')
        vit_refuse(['gone.png'], 'predict', path / 'gone.png', '--out-dir', path / 'out')
        (path / 'data/train/red/1.jpg').write_text('no photo')
        vit_refuse(['1.jpg'], *flags)
        (path / 'data/train/empty').mkdir()
        vit_refuse(['empty', 'no photos'], *flags)
        with unittest.mock.patch.dict('sys.modules', PIL=None):
            vit_refuse(['pillow'], 'predict', path / 'wide.png', '--out-dir', path / 'out')

# ------------------------------------ runs ------------------------------------

def test_vit_training_learns():
    """Every variant and every model, with each optimiser, on colours."""
    cases = [('tiny', name, 'adamw') for name in VARIANTS]
    cases += [(name, 'belief', 'adam') for name in vit.MODELS]
    cases += [('vit-small', name, 'set-adam') for name in ('softmax', 'belief-star')]
    with folder() as path:
        for name, attention, optimizer in cases:
            with unittest.mock.patch.object(vit, 'draw', lambda *a: []):
                code, out, err, result = vit_run(*vit_tiny(
                    path, '--model', name, '--attention', attention, '--optimizer', optimizer,
                    '--max-iters', 40, '--eval-interval', 20, '--lr', 0.005))
            assert code == 0 and result['test_acc'] > 0.8, (name, attention, result, err)
            assert 'linear model' in out and 'best.pt' in out
            assert ('SET-Adam steps' in out) == (optimizer == 'set-adam')
        assert {'ckpt.pt', 'best.pt', 'log.csv'} <= {p.name for p in result['folder'].iterdir()}

def test_vit_augmented_training():
    """Each policy, and the mixtures of the ImageNet recipe; the contact sheet shows them."""
    with folder() as path:
        for flags in (['--randaugment', 'paper'], ['--randaugment', 'fixed', '--mix',
                                                   '--label-smoothing', 0.1]):
            code, out, err, result = vit_run(*vit_tiny(path, *flags))
            assert code == 0 and ('23.4 %' in out) == ('paper' in flags), err
            sheet = (result['folder'] / 'augmented.png').read_bytes()
            assert sheet[:8] == b'\x89PNG\r\n\x1a\n' and math.isfinite(result['loss'])

def test_vit_best_and_last():
    """The best weights are those of the evaluation that did best; the test set is looked at twice:
    once for them, once for the last."""
    accuracy = iter([0.2, 0.9, 0.5])
    judge, seen = vit.Task.judge, []
    def faked(self, images, labels):
        assert not self.model.training
        seen.append(len(labels))
        return (1.0, next(accuracy)) if len(labels) != 30 else judge(self, images, labels)
    with folder() as path:
        with unittest.mock.patch.object(vit.Task, 'judge', faked):
            result = vit_run(*vit_tiny(path))[3]
        assert (result['best_iter'], result['best_val_acc'], result['val_acc']) == (3, 0.9, 0.5)
        assert seen == [6, 6, 6, 30, 30]
        best = vit.load_checkpoint(result['folder'] / 'best.pt')
        assert best['val_acc'] == 0.9 and not same(best['model'], weights(result['folder']))
        flags = vit_tiny(path, '--resume', result['folder'] / 'best.pt')
        vit_refuse(['best.pt', 'predict'], *flags)
        accuracy, tested = iter([0.2, 0.9, 0.5]), []
        def noted(self, images, labels):  # autocast keeps copies of weights: not of the last ones
            loss, right = judge(self, images, labels)
            tested.extend([loss] * (len(labels) == 30))
            return loss, right if len(labels) == 30 else next(accuracy)
        with unittest.mock.patch.object(vit.Task, 'judge', noted):
            result = vit_run(*vit_tiny(path, '--dtype', 'bfloat16', '--lr', 0.01))[3]
        state = vit.load_checkpoint(result['folder'] / 'best.pt')
        task = vit.Task(state['config'])
        task.model.load_state_dict(state['model'])
        with torch.autocast('cpu', torch.bfloat16):
            assert task.judge(*task.test)[0] == tested[1] != tested[0]

def test_vit_resume_bit_for_bit():
    """Stopped and resumed: same weights, same log, same best, with SET-Adam too."""
    batch = vit.Task.batch
    with folder() as path:
        for optimizer in ('adamw', 'set-adam'):
            flags = vit_tiny(path, '--dropout', 0.2, '--drop-path', 0.2, '--grad-accum-steps', 2,
                             '--max-iters', 9, '--optimizer', optimizer)
            whole = vit_run(*flags, '--out-dir', path / optimizer)[3]
            left = [signal.SIGINT]
            def interrupt(self, it, rows):
                while it == 4 and left:
                    os.kill(os.getpid(), left.pop())
                return batch(self, it, rows)
            with unittest.mock.patch.object(vit.Task, 'batch', interrupt):
                code, out, _, _ = vit_run(*flags, '--out-dir', path / f'{optimizer}2')
            assert code == 130 and '--resume' in out
            code, out, err, part = vit_run(*flags, '--out-dir', path / f'{optimizer}2', '--resume')
            assert code == 0 and 'resumed' in out, err
            assert same(weights(whole['folder']), weights(part['folder']))
            rows = [[{**row, 'seconds': 0} for row in r['log']] for r in (whole, part)]
            assert rows[0] == rows[1] and whole['best_test_acc'] == part['best_test_acc']

def test_vit_float16_training():
    with folder() as path:
        for optimizer in ('adamw', 'set-adam'):
            code, out, err, result = vit_run(*vit_tiny(path, '--dtype', 'float16', '--optimizer',
                                                   optimizer, '--model', 'vit-small'))
            assert code == 0 and 'float16' in out and math.isfinite(result['val_loss']), err
        loss = vit.Task.loss  # gradients beyond float16: the step is skipped and not counted
        steps = []
        real = vit.SETAdam.step
        with unittest.mock.patch.object(vit.Task, 'loss', lambda *a: loss(*a) * 1e30), \
                unittest.mock.patch.object(vit.SETAdam, 'step',
                                           lambda *a: steps.append(1) or real(*a)):
            code, _, err, result = vit_run(*vit_tiny(path, '--dtype', 'float16', '--optimizer',
                                                 'set-adam'))
        assert code == 0 and not steps, (err, len(steps))

def test_vit_actions():
    """compare, its tables, bench and inspect."""
    with folder() as path:
        flags = vit_tiny(path, '--max-iters', 3)
        code, out, err, table = vit_run('compare', '--over', 'optimizer=adamw,set-adam', '--over',
                                    'lr=0.01,0.001', '--seeds', '0,1', *flags)
        assert code == 0 and list(table['test_acc']) == [
            'adamw 0.01', 'adamw 0.001', 'set-adam 0.01', 'set-adam 0.001'], err
        for name in vit.TABLES:
            code, out, err, table = vit_run('compare', '--table', name, '--seeds', 0, *flags)
            assert code == 0 and list(table['val_acc']) == list(vit.TABLES[name]), err
        code, out, err, rows = vit_run('bench', '--rounds', 2, *flags)
        assert code == 0 and list(rows) == VARIANTS, err
        assert rows['belief-star']['parameters'] == rows['belief']['parameters'] + 2 * 12 * 12
        for token in (0, -1):
            code, out, err, result = vit_run('inspect', '--token', token, '--attention',
                                             'attentionx', *flags)
            assert code == 0 and len(result['rows']) == 2 * 2, err
            with open(result['folder'] / 'inspect.csv', newline='') as f:
                assert len(list(csv.DictReader(f))) == 4
        vit_refuse(['--token'], 'inspect', '--token', 5, *flags)

def test_vit_diagnose():
    """The figures of a layer against attention written out."""
    net, images = vit_model(model='deit-small').double().eval(), vit_images(3)
    for token in (0, 2, -1):
        row, attn = vit.diagnose(net, images, token)[0], net.blocks[0].attn
        x = torch.cat([net.cls_token.expand(3, -1, -1), net.patch_embed(images)], 1) + net.pos_embed
        q, k, v = (t.transpose(1, 2) for t in attn.heads(net.blocks[0].norm1(x))[:3])
        mh = ((q @ k.mT / math.sqrt(6)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        v = v.transpose(1, 2).flatten(2)
        alpha = (mh * v).sum(-1) / (v * v).sum(-1)
        delta = mh - alpha[..., None] * v
        after = [t @ attn.proj.weight.T for t in (delta, mh)]
        at = slice(None) if token < 0 else token
        for key, value in dict(
                update=delta.norm(dim=-1), mh=mh.norm(dim=-1), alpha=alpha,
                update_o=after[0].norm(dim=-1), mh_o=after[1].norm(dim=-1),
                cos_update=F.cosine_similarity(after[0], x, dim=-1),
                cos_mh=F.cosine_similarity(after[1], x, dim=-1)).items():
            assert abs(row[key] - value[:, at].mean().item()) < 1e-6, (key, token)
    half = vit_model(attention='belief-head', head_size=1).half()  # nothing is orthogonal to V
    assert all(math.isfinite(x) for x in vit.diagnose(half, images.half())[0].values())

def test_vit_attention_maps():
    """The class token's weights, from the whole matrix of scores, of each head."""
    images = vit_images(3)
    for name, zero_diag in (('vit-small', True), ('vit-small', False), ('deit-small', False)):
        net = vit_model(model=name, zero_diag=zero_diag, num_heads=2).double().eval()
        maps = vit.attention_maps(net, images)
        for i, (block, x) in enumerate(zip(net.blocks, vit.inputs_of(net.blocks, net, images))):
            q, k, *_ = block.attn.heads(block.norm1(x))
            mean = 0
            for head in range(2):
                scores = q[:, :, head] @ k[:, :, head].mT / (1 if block.attn.config.shifted
                                                             else q.size(-1) ** 0.5)
                if zero_diag:
                    scores[:, torch.arange(5), torch.arange(5)] = -math.inf
                mean = mean + scores.softmax(-1)[:, 0, 1:] / 2
            close(maps[:, i].flatten(1), mean / mean.amax(1, keepdim=True), 1e-12)
        assert maps.shape == (3, len(net.blocks), 2, 2)
        assert not any(m._forward_pre_hooks for m in net.modules())

def test_vit_bad_flags():
    with folder() as path:
        for words, argv in (
                (['--gamma', '[1, inf)'], ['--gamma', 0.5, '--attention', 'attentionx']),
                (['--attention', 'belief-star'], ['--attention', 'x']),
                (['--model', 'vit-small'], ['--model', 'resnet']),
                (['--patch-size'], ['--patch-size', 3]), (['--patch-size'], ['--first-size', 6]),
                (['--first-size'], ['--first-size', 12]), (['--depth'], ['--depth', 0]),
                (['--dropout'], ['--dropout', 1]), (['--drop-path'], ['--drop-path', -1]),
                (['--optimizer', 'set-adam'], ['--optimizer', 'sgd']),
                (['--tau'], ['--tau', 1]), (['--val-fraction'], ['--val-fraction', 0]),
                (['--val-fraction'], ['--val-fraction', 0.001]),
                (['--epochs'], ['--epochs', -1]), (['--randaugment'], ['--randaugment', 'x']),
                (['--label-smoothing'], ['--label-smoothing', 1]), (['fly'], ['fly']),
                (['IMAGE'], ['predict'])):
            vit_refuse(words, *(argv if argv[0] in ('fly', 'predict') else vit_tiny(path, *argv)))
        assert not (path / 'out').exists() or not list((path / 'out').rglob('ckpt.pt'))
        vit_refuse(['no run'], 'predict', 'x.png', '--out-dir', path / 'nowhere')

def test_vit_bad_data():
    """Image files that cannot be used: one line that names the file."""
    images, labels = np.zeros((30, 3, 8, 8), np.uint8), np.arange(30) % 3
    with folder() as path:
        flags = vit_tiny(path)
        good = (path / 'data/train.npz').read_bytes()
        def data(name, words, **arrays):
            vit_data(path / name)
            np.savez(path / name / 'train.npz', **arrays)
            vit_refuse(words, *flags, '--data', path / name)
        data('none', ['train.npz', 'labels'], images=images)
        data('float', ['train.npz', 'float32'], images=images.astype('f'), labels=labels)
        data('gray', ['train.npz', '(30, 8, 8)'], images=images[:, 0], labels=labels)
        data('short', ['train.npz', 'labels'], images=images, labels=labels[:9])
        data('negative', ['train.npz', 'labels'], images=images, labels=labels - 1)
        data('real', ['train.npz', 'labels'], images=images, labels=labels / 2)
        data('pickled', ['train.npz', 'pickle'], images=np.array([{}]), labels=labels)
        data('two', ['images'], images=images[:2], labels=labels[:2])
        for i, bad in enumerate((b'', good[:100], good[:-9], b'<html>')):
            vit_data(path / f'bad{i}')
            (path / f'bad{i}/train.npz').write_bytes(bad)
            vit_refuse(['train.npz'], *flags, '--data', path / f'bad{i}')
        (path / 'hollow').mkdir()
        vit_refuse(['hollow', 'no image data'], *flags, '--data', path / 'hollow')
        vit_refuse(['nowhere', 'prepare_data.py'], *flags, '--data', 'nowhere')
        vit_data(path / 'named')
        for meta, word in (('{', 'meta.json'), ('{"classes": ["a"]}', 'names 1'), ('[1]', 'meta')):
            (path / 'named/meta.json').write_text(meta)
            vit_refuse([word], *flags, '--data', path / 'named')
        (path / 'named/meta.json').write_text('{"classes": ["a", "b", "c, d"]}')
        result = vit_run(*flags, '--data', path / 'named')[3]
        state = vit.load_checkpoint(result['folder'] / 'ckpt.pt')
        assert state['config'].classes == 'a,b,c  d' and state['config'].num_classes == 3

def test_vit_recipe_without_its_data():
    before = os.getcwd()
    with folder() as path:
        flags = vit_tiny(path, '--max-iters', 0)
        at = flags.index('--data')
        flags = flags[:at] + flags[at + 2:] + ['--preset', 'cifar-paper', '--image-size', 32,
                                               '--patch-size', 16]
        try:
            os.chdir(path)
            with unittest.mock.patch.object(vit, 'draw_shapes', lambda n, seed: (
                    np.zeros((40, 3, 32, 32), np.uint8), np.arange(40) % 10)):
                code, out, err, result = vit_run(*flags)
            assert code == 0 and 'prepare_data.py cifar10' in out and 'drawn shapes' in out, err
            vit_refuse(['cifar10'], *flags, '--data', 'cifar10')
        finally:
            os.chdir(before)

# ------------------------------------ belief_vit.py: augmentation ---------------------------------

def kinds_of_images(n, H=32, W=32, seed=0):
    """Images (n, 3, H, W) uint8 of all kinds: noise, dull, smooth, sparse, and constant ones."""
    rng = np.random.RandomState(seed)
    noise, level = rng.randint(0, 256, (n, 3, H, W)), rng.randint(0, 200, (n, 3, 1, 1))
    slope = (np.arange(H)[:, None] * level // H + np.arange(W) + level) % 256
    kinds = [noise, noise // 5 + level, slope, (noise > 250) * level, level + 0 * noise]
    images = np.stack([kinds[i % 5][i] for i in range(n)])
    return torch.from_numpy(images.astype(np.uint8))

def by_pillow(name, image, v, r):
    """Operation `name` of RandAugment on a Pillow image, by Pillow; r: sign, centre y, x."""
    from PIL import Image, ImageDraw, ImageEnhance, ImageOps
    W, H = image.size
    s, top, left = v if r[0] < 0.5 else -v, r[1] * H - v / 2, r[2] * W - v / 2
    if name == 'SolarizeAdd':
        more = np.clip(np.asarray(image) + v, 0, 255).astype(np.uint8)
        return ImageOps.solarize(Image.fromarray(more), 128)
    if name == 'Cutout':
        left, top = int(max(0, left)), int(max(0, top))
        corners = left, top, min(W, left + v), min(H, top + v)
        ImageDraw.Draw(image).rectangle(corners, (125, 123, 114))
        return image
    if name in ('AutoContrast', 'Equalize', 'Invert'):
        return getattr(ImageOps, name.lower())(image)
    if name in ('Posterize', 'Solarize'):
        return getattr(ImageOps, name.lower())(image, int(v) if name == 'Posterize' else v)
    if name in ('Color', 'Contrast', 'Brightness', 'Sharpness'):
        return getattr(ImageEnhance, name)(image).enhance(v)
    if name == 'Rotate':
        return image.rotate(s)
    matrix = {'ShearX': (1, s, 0, 0, 1, 0), 'ShearY': (1, 0, 0, s, 1, 0),
              'TranslateX': (1, 0, s, 0, 1, 0), 'TranslateY': (1, 0, 0, 0, 1, s)}[name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix)

def test_augment_equals_pillow():
    try:
        from PIL import Image
    except ImportError:
        raise unittest.SkipTest('Pillow is not installed')
    for images in (kinds_of_images(60), kinds_of_images(20, 24, 37), kinds_of_images(5, 112, 96)):
        r = torch.from_numpy(np.random.RandomState(1).random_sample((len(images), 3)))
        for name, (operation, start, end) in vit.RANDAUGMENT.items():
            for magnitude in (vit.MAGNITUDE, 0.3, 0.97):
                v = start + (end - start) * magnitude
                found = operation(images.clone(), v, r).numpy().transpose(0, 2, 3, 1)
                for x, y, s in zip(images.numpy().transpose(0, 2, 3, 1), found, r.tolist()):
                    expected = np.asarray(by_pillow(name, Image.fromarray(x), v, s))
                    assert (expected == y).all(), (name, v)

def test_augment_golden():
    """Without Pillow, too: what the operations gave when they equalled it."""
    images = kinds_of_images(40)
    r = torch.from_numpy(np.random.RandomState(2).random_sample((40, 3)))
    for name, (operation, start, end) in vit.RANDAUGMENT.items():
        found = operation(images, start + (end - start) * vit.MAGNITUDE, r)
        assert found.shape == images.shape and found.dtype == torch.uint8
        assert sha256(found) == AUGMENT_GOLDEN[name], (name, sha256(found))
    draws = np.random.RandomState(3).random_sample((40, vit.DRAWS))
    for policy in vit.POLICIES:
        found = sha256(vit.augment(images, draws, policy))
        assert found == AUGMENT_GOLDEN[policy], (policy, found)

def sha256(images):
    return hashlib.sha256(images.cpu().numpy().tobytes()).hexdigest()[:16]

AUGMENT_GOLDEN = {
    'AutoContrast': '3338bed84051c5d1', 'Equalize': '35fd608634387de4',
    'Invert': 'c823300d15090faf', 'Rotate': 'a909c9c595109786',
    'Posterize': 'cee3b244cfaac3cc', 'Solarize': '6b01f7125d8a81f6',
    'SolarizeAdd': '783cf4a1b2d61c5b', 'Color': '3faf44734116f613',
    'Contrast': '44ee03d760273dbb', 'Brightness': '8e7baa4490790b5f',
    'Sharpness': '814a985b21d4a1a8', 'ShearX': 'cf24b8a76c7282aa',
    'ShearY': 'dd455221a66a17f6', 'Cutout': '1519d7b859fac016',
    'TranslateX': '6d7bd1fa33ee71b2', 'TranslateY': '6d7bd1fa33ee71b2',
    'none': 'b102961ef776987a', 'paper': 'ccb23bcb632c2929',
    'fixed': '306ef495be84fc78',
}

def test_augment_parts_of_a_batch():
    """An image comes out alike alone, in its batch, in another order, and again; input unharmed."""
    images, draws = kinds_of_images(50), np.random.default_rng([0, 1]).random((50, vit.DRAWS))
    before = images.clone()
    for policy in vit.POLICIES:
        whole = vit.augment(images, draws, policy)
        assert whole.shape == images.shape and whole.dtype == torch.uint8
        assert torch.equal(whole, vit.augment(images, torch.as_tensor(draws), policy))
        for rows in (range(7, 8), range(20), range(49, -1, -3)):
            assert torch.equal(vit.augment(images[list(rows)], draws[list(rows)], policy),
                               whole[list(rows)]), (policy, rows)
    assert torch.equal(images, before)

def test_augment_crop_and_flip():
    images = kinds_of_images(2000, 9, 12)
    draws = np.random.RandomState(0).random_sample((2000, vit.DRAWS))
    seen = set()
    for x, y, (dy, dx, flip) in zip(images.numpy(), vit.augment(images, draws, 'none').numpy(),
                                    draws[:, :3]):
        dy, dx, flip = int(dy * 9), int(dx * 9), flip < 0.5
        window = np.pad(x, ((0, 0), (4, 4), (4, 4)))[:, dy:dy + 9, dx:dx + 12]
        assert (y == (window[..., ::-1] if flip else window)).all()
        seen.add((dy, dx, flip))
    assert len(seen) == 9 * 9 * 2

def test_augment_black_images():
    """The paper's policy blackens 1 - (14 / 16)^2 = 23.4 % of all images, the mended one few."""
    images, rng, share = kinds_of_images(1).expand(4000, -1, -1, -1), np.random.default_rng(0), {}
    for policy in vit.POLICIES:
        x = vit.augment(images, rng.random((4000, vit.DRAWS)), policy)[:, :, 4:-4, 4:-4].flatten(2)
        share[policy] = (x == x[:, :, :1]).all(2).all(1).float().mean().item()
    assert abs(share['paper'] - 0.234) < 0.03, share
    assert share['fixed'] < 0.015 and share['none'] == 0, share
    r = torch.rand(4000, 3, dtype=torch.float64)
    assert not vit.RANDAUGMENT['TranslateX'][0](images, 100 * vit.MAGNITUDE, r).any()
    moved = vit.POLICIES['fixed']['TranslateX'][0](images, 0.45 * vit.MAGNITUDE, r)
    assert set((moved == 0).all(1).all(1).sum(1).tolist()) == {7}  # 0.45 * 14 / 30 * 32 = 6.72

def test_augment_mix():
    """Images of one value each: what a pixel, or their mean, has of another image its label has."""
    n, share, kinds = 10, [], set()
    images, labels = torch.arange(n).float().view(n, 1, 1, 1).expand(n, 3, 16, 24), torch.arange(n)
    for seed in range(200):
        x, y = vit.mix(images, labels, n, np.random.default_rng([seed, 0]), smoothing=0.0)
        assert x.shape == images.shape and y.shape == (n, n)
        assert torch.allclose(y.sum(1), torch.ones(n)) and (y >= 0).all()
        assert torch.allclose(x.mean((1, 2, 3)), y @ torch.arange(n).float(), atol=1e-4)
        own = y[0, 0].item()
        if own < 1 and x[0].unique().numel() == 2:  # cutmix: one box
            inside = (x[0, 0] != 0).nonzero()
            (top, left), (bottom, right) = inside.min(0).values, inside.max(0).values
            assert len(inside) == (bottom - top + 1) * (right - left + 1)
        share.append(own)
        kinds.add(min(2, x[0].unique().numel()))
        x, z = vit.mix(images, labels, n, np.random.default_rng([seed, 0]))
        assert torch.allclose(z, 0.9 * y + 0.1 / n, atol=1e-6)
    assert kinds == {1, 2} and 0.4 < np.mean(share) < 0.7
    again = vit.mix(images, labels, n, np.random.default_rng([199, 0]))
    assert torch.equal(again[0], x) and torch.equal(again[1], z)

def test_augment_erase():
    images = torch.full((800, 3, 24, 32), 9.0)
    x = vit.erase(images, np.random.default_rng(0))
    hole = (x != 9).all(1)
    area = hole.float().mean((1, 2))
    assert torch.equal(hole, (x != 9).any(1)) and 0.2 < (area > 0).float().mean() < 0.3
    area = area[area > 0]
    assert 0.01 < area.min() < 0.05 and 0.25 < area.max() < 0.36
    values = x[x != 9]
    assert abs(values.mean()) < 0.1 and abs(values.std() - 1) < 0.1
    for box in hole[hole.any(2).any(1)]:
        assert torch.equal(box, box.any(1)[:, None] & box.any(0)), 'not a rectangle'
    assert torch.equal(x, vit.erase(images, np.random.default_rng(0))) and (images == 9).all()
    assert torch.equal(vit.erase(images, np.random.default_rng(0), p=0), images)
    assert (vit.erase(images, np.random.default_rng(0), p=1) != 9).flatten(1).any(1).all()

def test_augment_contact_sheet_and_png():
    images = kinds_of_images(7, 5, 6)
    sheet = vit.contact_sheet(images, columns=3, scale=2)
    assert sheet.shape == (3 * 12, 3 * 14, 3) and sheet.dtype == np.uint8
    assert (sheet[13:23:2, 15:27:2] == images[4].permute(1, 2, 0).numpy()).all()
    assert (sheet[24:, 14:] == 255).all() and (sheet[0] == 255).all()
    with tempfile.TemporaryDirectory() as path:
        vit.write_png(pathlib.Path(path, 'a.png'), sheet)
        data = pathlib.Path(path, 'a.png').read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    chunks, at = {}, 8
    while at < len(data):
        size, name = struct.unpack_from('>I4s', data, at)
        chunks[name] = data[at + 8:at + 8 + size]
        assert struct.unpack_from('>I', data, at + 8 + size)[0] == zlib.crc32(name + chunks[name])
        at += 12 + size
    assert list(chunks) == [b'IHDR', b'IDAT', b'IEND']
    assert struct.unpack('>2I5B', chunks[b'IHDR']) == (42, 36, 8, 2, 0, 0, 0)
    lines = np.frombuffer(zlib.decompress(chunks[b'IDAT']), np.uint8).reshape(36, 1 + 42 * 3)
    assert (lines[:, 0] == 0).all() and (lines[:, 1:].reshape(sheet.shape) == sheet).all()

def test_augment_cuda():
    if not torch.cuda.is_available():
        raise unittest.SkipTest('no GPU')
    images, draws = kinds_of_images(200), np.random.default_rng(0).random((200, vit.DRAWS))
    for policy in vit.POLICIES:
        found = vit.augment(images.cuda(), draws, policy)
        assert found.is_cuda
        assert torch.equal(found.cpu(), vit.augment(images, draws, policy)), policy
    x, labels = images.float(), torch.arange(200) % 10
    for seed in range(4):
        here = vit.mix(x, labels, 10, np.random.default_rng(seed))
        there = vit.mix(x.cuda(), labels.cuda(), 10, np.random.default_rng(seed))
        assert all(torch.allclose(a, b.cpu(), atol=1e-3) for a, b in zip(here, there))
        here = vit.erase(x, np.random.default_rng(seed))
        assert torch.equal(here, vit.erase(x.cuda(), np.random.default_rng(seed)).cpu())

# ------------------------------------ admm_detr.py ------------------------------------

SOLVING = ['l2', 'admm', 'admm-vanilla']

def detr_config(**settings):
    small = dict(hidden_dim=16, nheads=2, enc_layers=1, dec_layers=2, dim_feedforward=24,
                 num_queries=5, num_classes=3, stride=16, image_size=32)
    return detr.Config(**{**small, **settings})

def detr_tiny(path, *more):
    """Flags of a run that takes a second."""
    return ['--preset', 'tiny', '--hidden-dim', 16, '--nheads', 2, '--enc-layers', 1,
            '--dec-layers', 2, '--dim-feedforward', 24, '--num-queries', 5, '--stride', 16,
            '--image-size', 32, '--iterations', 5, '--batch-size', 4, '--max-iters', 6,
            '--eval-interval', 3, '--eval-rows', 8, '--log-interval', 1, '--warmup-iters', 2,
            '--device', 'cpu', '--out-dir', path / 'out', *more]

def detr_tokens(kind, *sizes, d=32, nh=2, seed=0, dtype=torch.float64):
    """Layer-normed tokens of nh d channels, independent or of rank 8 with noise, by heads."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    x = draw(sum(sizes), nh * d)
    if kind == 'correlated':
        x = draw(sum(sizes), 8) @ draw(8, nh * d) + 0.3 * x
    x = F.layer_norm(x, (nh * d,)).view(-1, nh, d).transpose(0, 1)[None]    # (1, nh, N, d)
    return [t.to(dtype) for t in x.split(sizes, 2)]

def shooting(q, k, penalty, skip=None, sweeps=3000):
    """The Lasso one coordinate at a time, each by its own formula; numpy, one query."""
    N, x = len(k), np.zeros(len(k))
    for _ in range(sweeps):
        change = 0.0
        for j in range(N):
            if j == skip or not k[j].any():
                continue
            rest = k[j] @ (q - x @ k + x[j] * k[j])
            new = np.sign(rest) * max(abs(rest) - penalty / 2, 0) / (k[j] @ k[j])
            change, x[j] = max(change, abs(new - x[j])), new
        if change < 1e-14:
            return x
    raise AssertionError('the reference has not converged')

def proximal_gradient(q, k, penalty, steps=20000):
    """The Lasso by accelerated proximal gradient descent with restarts, until it moves no more."""
    rate = 0.5 / torch.linalg.eigvalsh(k @ k.mT)[..., -1, None, None]
    x = y = torch.zeros(*q.shape[:-1], k.size(-2), dtype=q.dtype)
    t = torch.ones(*q.shape[:-1], 1, dtype=q.dtype)
    for _ in range(steps):
        step = y - 2 * rate * (y @ k - q) @ k.mT
        new = step.sign() * (step.abs() - rate * penalty).clamp_min(0)
        uphill = ((y - new) * (new - x)).sum(-1, keepdim=True) > 0
        t = torch.where(uphill, 1.0, t)
        following = (1 + (1 + 4 * t ** 2).sqrt()) / 2
        y, moved = new + (t - 1) / following * (new - x), (new - x).abs().max()
        x, t = new, following
        if moved < 1e-13:
            break
    return x

def test_detr_lasso_reference():
    """Against coordinate descent, with and without x_ii = 0, on tokens more and fewer than d."""
    for own, N in itertools.product((False, True), (3, 9)):
        q, k = detr_tokens('iid', 4, N, d=5)
        q = k if own else q
        penalty, _ = detr.scales(q, k, 0.1, 0.2, own)
        products = [[abs(float(q[0, h, i] @ k[0, h, j])) for j in range(N) if not own or i != j]
                    for h in range(2) for i in range(q.size(2))]
        close(penalty.flatten(), torch.tensor([0.2 * max(p) for p in products]).double(), 1e-7)
        x = detr.lasso(q, k, own, 0.1, 0.2, iterations=20000)
        for h, i in itertools.product(range(2), range(q.size(2))):
            want = shooting(q[0, h, i].numpy(), k[0, h].numpy(), float(penalty[0, h, i]),
                            skip=i if own else None)
            close(x[0, h, i], torch.from_numpy(want), 1e-9)
            assert not own or x[0, h, i, i] == 0
        assert 0 < (x != 0).float().mean() < 0.9  # sparse, and not nothing

def test_detr_default_iterations():
    """At the default settings the objective is within 1 % of the best (3 % if tokens correlate),
    and run long the coefficients are the best ones."""
    c = detr.Config()
    for kind, most in (('iid', 1e-2), ('correlated', 3e-2)):
        q, k = detr_tokens(kind, 30, 100)
        penalty, _ = detr.scales(q, k, c.sparsity, c.rho)
        best = proximal_gradient(q, k, penalty)
        f = lambda x: detr.objective(x, q, k, penalty)
        gap = f(detr.lasso(q, k, False, c.sparsity, c.rho, c.iterations, c.relax)) / f(best) - 1
        assert -1e-10 < gap.min() and gap.mean() < most, (kind, gap.mean())
        close(detr.lasso(q, k, False, c.sparsity, c.rho, 6000, c.relax), best, 1e-6)
        gaps = detr.solver_gaps(q, k, False, c, c.iterations)
        assert len(gaps) == c.iterations and abs(gaps[-1] - gap.mean()) < 1e-6
        half = detr.lasso(q, k, False, c.sparsity, c.rho, c.iterations // 3, c.relax)
        plain = detr.lasso(q, k, False, c.sparsity, c.rho, c.iterations, 1.0)
        assert gap.mean() < (f(half) / f(best) - 1).mean() / 4
        assert gap.mean() < (f(plain) / f(best) - 1).mean() / 1.5  # over-relaxation pays

def test_detr_lasso_sklearn():
    try:
        from sklearn.linear_model import Lasso
    except ImportError:
        raise unittest.SkipTest('scikit-learn is not installed')
    q, k = detr_tokens('correlated', 4, 100)
    penalty, _ = detr.scales(q, k, 0.1, 0.2)
    x = detr.lasso(q, k, False, 0.1, 0.2, 6000)
    for h, i in itertools.product(range(2), range(4)):
        alpha = float(penalty[0, h, i]) / (2 * 32)
        lasso = Lasso(alpha=alpha, fit_intercept=False, tol=1e-14, max_iter=10 ** 6)
        close(x[0, h, i], torch.from_numpy(lasso.fit(k[0, h].T, q[0, h, i]).coef_), 1e-6)

def test_detr_vanilla_is_the_same():
    for kind, own in itertools.product(('iid', 'correlated'), (False, True)):
        q, k = detr_tokens(kind, 20, 50)
        q = k if own else q
        x = detr.lasso(q, k, own)
        close(x, detr.lasso(q, k, own, vanilla=True), 1e-10)
        assert x.abs().max() > 1e-3
        q, k = q.float(), k.float()
        close(detr.lasso(q, k, own), detr.lasso(q, k, own, vanilla=True), 1e-4)

def test_detr_relaxation_and_scale():
    """Any relaxation and rho lead to the same x; lengths of q and k only scale it."""
    q, k = detr_tokens('iid', 5, 12, d=6)
    x = detr.lasso(q, k, iterations=20000)
    for relax, rho in ((1.0, 0.2), (1.8, 0.2), (1.6, 2.0)):
        close(detr.lasso(q, k, rho=rho, relax=relax, iterations=20000), x, 1e-8)
    close(detr.lasso(7 * q, 3 * k), 7 / 3 * detr.lasso(q, k), 1e-12)
    close(detr.lasso(7e-3 * q, 3e-3 * k), 7 / 3 * detr.lasso(q, k), 1e-9)
    one, _ = detr.scales(q, k, 1.0, 0.2)
    assert not detr.lasso(q, k, sparsity=1.0, iterations=3000).abs().max() > 1e-9
    assert (one / 2 - (q @ k.mT).abs().amax(-1, keepdim=True)).abs().max() < 1e-12

def test_detr_gradcheck():
    q, k = (t.requires_grad_() for t in detr_tokens('iid', 3, 5, d=4))
    c = detr_config(iterations=6)
    for name, own in itertools.product(SOLVING, (False, True)):
        attend = detr.ATTENTION[name]
        if own:
            f = lambda k: attend(k, k, None, True, c)
            assert torch.autograd.gradcheck(f, [k], atol=1e-6)
        else:
            f = lambda q, k: attend(q, k, None, False, c)
            assert torch.autograd.gradcheck(f, [q, k], atol=1e-6)
        assert torch.autograd.gradcheck(lambda k: detr.lasso(q, k, iterations=4), [k], atol=1e-6)

def test_detr_degenerate_tokens():
    """Rank-deficient, repeated and zero tokens, zero queries: finite, with finite gradients."""
    q, k = detr_tokens('iid', 6, 10, d=8, dtype=torch.float32)
    cases = dict(rank=k[..., :1] * torch.ones(8), repeated=k[:, :, :1].expand_as(k),
                 zero=0 * k, frame=torch.eye(8).repeat(1, 2, 2, 1) * 3, huge=k * 1e4,
                 minute=k * 1e-6)
    for (name, tokens), attention, zero in itertools.product(cases.items(), SOLVING, (0, 1)):
        for c in (detr_config(), detr_config(power=0)):
            a, b = (t.clone().requires_grad_() for t in (q * zero, tokens))
            x = detr.ATTENTION[attention](a, b, None, False, c)
            x.square().sum().backward()
            assert all(t.isfinite().all() for t in (x, a.grad, b.grad)), (name, attention)
            if name == 'zero' or not zero:
                assert not x.any() and not a.grad.isnan().any()
    equal = detr.lasso(q, cases['repeated'], iterations=500)
    close(equal, equal.mean(-1, keepdim=True).expand_as(equal), 1e-5)

def test_detr_padding():
    """Tokens that are padding get nothing, and change nothing, in every attention."""
    q, k, hidden = detr_tokens('iid', 6, 10, 4, d=8)
    every = torch.cat([k, 50 * hidden], 2)
    padding = torch.arange(14)[None] >= 10
    for name, attend in detr.ATTENTION.items():
        c = detr_config(iterations=400)
        x = attend(q, every, padding, False, c)
        assert not x[..., 10:].any(), name
        close(x[..., :10], attend(q, k, None, False, c), 1e-10)
        module = detr.MultiheadAttention(detr_config(), name).double().eval()
        for p in module.parameters():
            torch.nn.init.uniform_(p, -0.5, 0.5)
        flat = lambda t: t.transpose(1, 2).flatten(2)
        close(module(flat(q), flat(every), flat(every), padding),
              module(flat(q), flat(k), flat(k)), 1e-12)

def test_detr_half_precision():
    """float16 tokens, whose squares overflow, and autocast: solved in float32."""
    q, k = detr_tokens('iid', 6, 40, d=8, dtype=torch.float32)
    for name in SOLVING:
        module = detr.MultiheadAttention(detr_config(), name)
        flat = [t.transpose(1, 2).flatten(2) for t in (q, k, k)]
        want = module(*flat)
        big = [400 * t for t in flat]
        got = module(*(t.half() for t in big))
        assert got.dtype == torch.float16 and got.isfinite().all()
        close(got.float() / 400, want, 0.05)
        with torch.autocast('cpu', torch.bfloat16):
            close(module(*flat), want, 1e-6)
        for dtype in (torch.float16, torch.bfloat16):  # the whole model, too
            net = detr.DETR(detr_config(cross_attention=name)).to(dtype)
            out = net(torch.randn(1, 3, 32, 32, dtype=dtype))
            assert out['pred_boxes'].dtype == dtype and out['pred_boxes'].isfinite().all()
        with torch.autocast('cpu', torch.bfloat16):  # whose steps would be pixels
            out = detr.DETR(detr_config(cross_attention=name))(torch.randn(1, 3, 32, 32))
        assert out['pred_boxes'].dtype == out['pred_logits'].dtype == torch.float32

def test_detr_sharpen():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    for power in (1, 3, 5):
        want = [[math.copysign(abs(v) ** power, v) for v in row] for row in x.view(-1, 5).tolist()]
        want = torch.tensor([[v / sum(map(abs, row)) for v in row] for row in want], dtype=x.dtype)
        close(detr.sharpen(x, power).view(-1, 5), want, 1e-12)
    assert detr.sharpen(x, 0) is x
    assert torch.autograd.gradcheck(detr.sharpen, [x[0].requires_grad_()])
    for size in (0.0, 1e-30, 1e-9, 1e-4, 1e30):  # the printed formula is NaN for half of these
        x = torch.full((1, 4), size, requires_grad=True)
        y = detr.sharpen(x)
        y.square().sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert y.sum() == 0 if size < 1e-9 else size < 1e-6 or abs(y.sum() - 1) < 1e-6

def test_detr_l2():
    """Ridge regression as least squares with more rows; with `own`, without the query's token."""
    q, k = detr_tokens('iid', 5, 9, d=6)
    c = detr_config(power=0)
    for own in (False, True):
        q = k if own else q
        x = detr.l2(q, k, None, own, c)
        for h, i in itertools.product(range(2), range(q.size(2))):
            rho = c.rho * float(k[0, h].square().sum()) / 6
            left = [j for j in range(9) if not own or j != i]
            A = np.concatenate([k[0, h, left].numpy().T, math.sqrt(rho) * np.eye(len(left))])
            b = np.concatenate([q[0, h, i].numpy(), np.zeros(len(left))])
            close(x[0, h, i, left], torch.from_numpy(np.linalg.lstsq(A, b, rcond=None)[0]), 1e-10)
            assert not own or x[0, h, i, i] == 0

def test_detr_reconstruction_returns_the_query():
    """Solving and mixing over the same tokens hands the query back: least squares all of it, the
    Lasso nearly; the fifth power, or mixing other tokens, is what makes it attention."""
    q, k, v = detr_tokens('iid', 20, 300, 300)
    cosine = lambda name, values, **c: F.cosine_similarity(
        detr.ATTENTION[name](q, k, None, False, detr_config(iterations=100, **c)) @ values,
        q, dim=-1).mean()
    assert cosine('l2', k, power=0, rho=1e-3) > 0.9999
    assert cosine('admm', k, power=0) > 0.98
    assert cosine('admm', k) < 0.9 and cosine('admm', v, power=0).abs() < 0.2

def test_detr_printed_equations_fail():
    """(3): its state grows; where it does not, it is ridge regression and knows no lambda; with mu
    mended it solves (2) for 2 lambda. (4) has D^1/2 for D, and nothing for what V does not span.
    The textbook's iteration, on the same tokens, is within 1 % of the best."""
    q, k = detr_tokens('iid', 10, 100)
    penalty, rho = detr.scales(q, k, 0.1, 0.2)
    f = lambda x: detr.objective(x, q, k, penalty).mean()
    best = f(proximal_gradient(q, k, penalty))
    assert f(detr.lasso(q, k, False, 0.1, 0.2)) < 1.01 * best
    for vanilla in (True, False):
        x = detr.printed(q, k, False, 0.1, 0.2, 15, vanilla, tokens=0)
        assert x.abs().max() == 1 and f(x) > 100 * best  # at the clamp, and far away
    first = [detr.printed(q, k, False, s, 0.2, 1, vanilla=True, tokens=0) for s in (0.1, 1.0)]
    close(first[0], first[1], 0)
    close(first[0], q @ detr.ridge(k, rho), 1e-12)
    other = detr.printed(q, k, False, 0.1, 0.2, 1, tokens=0, sigma=0.0)
    D, X = torch.linalg.eigh(k.mT @ k)
    Y = k @ X * D.rsqrt()[..., None, :]                                     # (B, nh, N, hs)
    solve = lambda r, spectrum: (r @ Y / (spectrum + rho.squeeze(-1))[..., None, :]) @ Y.mT
    close(other, solve(q @ k.mT, D.sqrt()), 1e-9)
    close(first[0], solve(q @ k.mT, D), 1e-9)
    assert abs(other.norm() / first[0].norm() - 1) > 0.5
    outside, inverse = torch.eye(100) - Y @ Y.mT, (k @ k.mT + rho * torch.eye(100)).inverse()
    close(outside, rho * outside @ inverse, 1e-9)
    close(solve(outside, D), 0 * outside, 1e-9)
    x = z = u = torch.zeros_like(other)
    for _ in range(3000):
        x = (q @ k.mT + rho * (z - u)) @ inverse
        z = F.relu((x + u).abs() - penalty / rho) * (x + u).sign()          # lambda / rho of (3b)
        u = u + x - z
    close(z, detr.lasso(q, k, False, 0.2, 0.2, 3000), 1e-6)
    for s in (0.0, 0.3, 1.0, 30.0):  # eigenvalues of V V^T: (3) doubles some error in each step
        a = 1 / (s + 1)
        state = np.array([[a, -a, 0], [1, 0, -1], [a - 1, -a, 2]])
        assert max(abs(np.linalg.eigvals(state))) >= 2 - 1e-9
    states = []
    for n in (5, 10, 15):  # unclamped, as the equations are
        with unittest.mock.patch.object(torch.Tensor, 'clamp', lambda x, a=None, b=None: (
                x if isinstance(a, int) else torch.minimum(torch.maximum(x, a), b))):
            states.append(detr.printed(q, k, iterations=n, vanilla=True, tokens=0).abs().max())
    assert states[1] > 10 * states[0] and states[2] > 10 * states[1]

def test_detr_printed_reference():
    """Equations (3) and (4) with numpy, one query at a time."""
    q, k = detr_tokens('iid', 4, 9, d=5)
    for own, vanilla in itertools.product((False, True), (True, False)):
        a = k if own else q
        penalty, rho = detr.scales(a, k, 0.1, 0.2, own)
        got = detr.printed(a, k, own, 0.1, 0.2, 4, vanilla, tokens=0, sigma=0.0)
        for h, i in itertools.product(range(2), range(a.size(2))):
            V, r, t = k[0, h].numpy(), float(rho[0, h]), float(penalty[0, h, i] / rho[0, h])
            D, X = np.linalg.eigh(V.T @ V)
            Y = V @ X / np.sqrt(D)
            inverse = Y @ np.diag(1 / (np.sqrt(D) + r)) @ Y.T
            inverse = np.linalg.inv(V @ V.T + r * np.eye(9)) if vanilla else inverse
            x = z = mu = np.zeros(9)
            for _ in range(4):
                new = inverse @ (V @ a[0, h, i].numpy() + r * (x - z))
                new[i] = 0 if own else new[i]
                new = new.clip(-1, 1)
                z = np.sign(x - mu) * (abs(x - mu) - t).clip(0)
                x, mu = new, mu + new - z
            close(got[0, h, i], torch.from_numpy(x), 1e-9)
    many = detr.printed(q, k, tokens=6)  # random tokens come last, and are the same every time
    assert many.shape == (1, 2, 4, 15) and many[..., 9:].any()

def test_detr_printed_runs():
    with folder() as path:
        for cross in ('admm', 'admm-vanilla'):
            code, out, _, result = run(*detr_tiny(path, '--updates', 'printed', '--cross-attention',
                                                  cross, '--self-attention', 'admm'), script=detr)
            assert code == 0 and 'warning --updates printed' in out
            assert math.isfinite(result['val_loss']) and 'printed' in result['folder'].name
        refuse(['--iterations 21', 'printed'], '--updates', 'printed', '--iterations', 21,
               script=detr)
    q, k = detr_tokens('iid', 6, 40)
    a, b = (detr.printed(q, k, iterations=5) for _ in range(2))
    close(a, b, 0)  # random tokens and jitter are the same ones, whatever was drawn before

def test_detr_faster_than_vanilla():
    q, k = detr_tokens('iid', 100, 850, dtype=torch.float32)
    times = {}
    for vanilla in (False, True):
        for _ in range(2):
            a, b = (t.clone().requires_grad_() for t in (q, k))
            clock = time.process_time()
            detr.lasso(a, b, iterations=10, vanilla=vanilla).square().sum().backward()
            times[vanilla] = min(times.get(vanilla, 9e9), time.process_time() - clock)
    assert times[True] > 4 * times[False], times

def test_detr_recompute():
    """Forgetting the iterations: the same gradients, and memory that does not grow with them."""
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(0))
    kept, grads = {}, {}
    for recompute, n in itertools.product((True, False), (5, 40)):
        module = detr.MultiheadAttention(detr_config(recompute=recompute, iterations=n), 'admm',
                                         own=True)
        q = x.clone().requires_grad_()
        kept[recompute, n], y = detr.kept_bytes(lambda: module(q, q, q))
        y.square().sum().backward()
        grads[recompute, n] = q.grad
    assert kept[True, 5] == kept[True, 40] < kept[False, 5] < kept[False, 40] / 4
    close(grads[True, 40], grads[False, 40], 1e-6)
    for recompute in (True, False):  # the jitter must be the same when it is drawn again
        module = detr.MultiheadAttention(detr_config(recompute=recompute, iterations=3,
                                                     updates='printed'), 'admm')
        torch.manual_seed(0)
        q = x.clone().requires_grad_()
        with unittest.mock.patch.object(detr.printed, '__defaults__', (
                *detr.printed.__defaults__[:-1], 1.0)):
            module(q, q, q).square().sum().backward()
        grads[recompute] = q.grad
    close(grads[True], grads[False], 1e-6)

def test_detr_fused_softmax():
    """The kernel that layers use is the coefficients times the values."""
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(7).expand(2, 7) >= torch.tensor([[5], [7]])
    for name in ('softmax', 'no-weights'):
        module = detr.MultiheadAttention(detr_config(), name)
        for p in module.parameters():
            torch.nn.init.uniform_(p, -0.5, 0.5)
        weight, y = module.coefficients(*module.heads(x, x, x), padding)
        close(weight.sum(-1), torch.ones(2, 2, 7), 1e-6)
        close(module(x, x, x, padding), module.out_proj(y.transpose(1, 2).flatten(2)), 1e-6)

def test_detr_dropout():
    """Of softmax's coefficients and of every branch, in training only."""
    images = torch.zeros(1, 3, 32, 32)
    for settings in (dict(), dict(cross_attention='softmax')):
        net = detr.DETR(detr_config(dropout=0.5, **settings))
        outs = [net(images)['pred_boxes'] for _ in range(2)]
        assert (outs[0] != outs[1]).any()
        net.eval()
        close(net(images)['pred_boxes'], net(images)['pred_boxes'], 0)

# ------------------------------------ model and losses ------------------------------------

DETR_GOLDEN = dict(  # facebookresearch/detr, ResNet-50, small transformer, in float64
    last_logits=[1.3233768, -2.0759888, -0.0021618, -0.6884133, 1.3223249, -2.0661018,
        -0.009956, -0.7149329, 1.2054665, -2.0065322, 0.1229202, -0.4974339, 1.1891755,
        -2.2990317, -0.10403, -0.8124458, 1.1844296, -2.2853158, -0.0890955, -0.7990324,
        1.1912669, -2.2793088, -0.1304265, -0.8262021],
    last_mean=0.95999676,
    last_boxes=[0.5540449, 0.5603625, 0.6181914, 0.3576915, 0.5536385, 0.5609043, 0.6188352,
        0.3555136, 0.5500973, 0.5662401, 0.6059837, 0.3711182, 0.5670323, 0.5303848, 0.6302439,
        0.3318966, 0.565729, 0.532948, 0.6297381, 0.3332652, 0.5623499, 0.5296358, 0.6314532,
        0.3337952],
    aux_logits=[0.6678671, 1.0521399, -0.8300654, 1.5892522, 0.545943, 1.0497907, -0.7951941,
        1.5578001, 0.6084451, 1.0692803, -0.8362438, 1.5988235, 0.5665957, 1.0140995,
        -0.8303359, 1.6634105, 0.5496818, 1.0474027, -0.8519604, 1.6853131, 0.558598, 1.0498992,
        -0.8391227, 1.6655937],
    aux_mean=0.8280744,
    aux_boxes=[0.5934215, 0.4695922, 0.4397113, 0.5559866, 0.5897427, 0.4580959, 0.4315793,
        0.5658391, 0.5890335, 0.4623903, 0.441367, 0.563253, 0.6130096, 0.4860255, 0.4162437,
        0.5702282, 0.6160483, 0.484771, 0.4167193, 0.5667945, 0.6158311, 0.4868572, 0.4132486,
        0.5704965],
    losses={'class': [5.380897302367627, 5.339293100901858], 'bbox': [0.7935184912997751,
        0.7816251518432951], 'giou': [0.949098149243916, 1.0266945058033494]},
    total=22.547493929079366,
    scores=[[0.10736114, 0.1093095, 0.11356113, 0.10778797, 0.10559472, 0.10994799, 0.1108828],
        [0.14195298, 0.1412552, 0.14081402, 0.14073636, 0.145366, 0.14058951, 0.14090538]],
    labels=[[84, 84, 84, 84, 84, 84, 84], [84, 84, 84, 84, 84, 84, 84]],
    pixels=[[156.7675, 183.128, 552.41, 354.8199, 156.3014, 183.9108, 552.356, 354.5573,
        158.1475, 182.7269, 545.9771, 360.8636], [125.9552, 121.3574, 441.0771, 231.8789,
        125.43, 121.983, 440.299, 232.9603, 123.3117, 120.7918, 439.0382, 231.9456]],
)

def detr_fill(key, p):
    """The rule of `fill` (see GOLDEN), for DETR's names."""
    n, v = p.numel(), np.random.RandomState(zlib.crc32(key.encode())).uniform(-1, 1, p.numel())
    v *= math.sqrt(3 / (n / len(p))) if p.dim() >= 2 else 0.1
    v *= 4 if p.dim() >= 2 and ('in_proj' in key or 'query_embed' in key) else 1
    v += key.endswith('running_var') or p.dim() == 1 and key.endswith('.weight')
    p.copy_(torch.from_numpy(v).view_as(p))

def test_detr_golden():
    """The same weights give what DETR gave: outputs, auxiliary ones, losses, matching, boxes."""
    c = detr.Config(backbone='resnet50', hidden_dim=32, nheads=4, enc_layers=2, dec_layers=2,
                    dim_feedforward=48, num_queries=7, num_classes=91,
                    self_attention='softmax', cross_attention='softmax')
    net, g = detr.DETR(c).double().eval(), DETR_GOLDEN
    for key, p in net.state_dict().items():
        detr_fill(key, p)
    x = np.random.RandomState(0).uniform(-1.7, 1.7, 2 * 3 * 96 * 128).reshape(2, 3, 96, 128)
    x, mask = torch.from_numpy(x), torch.zeros(2, 96, 128, dtype=torch.bool)
    mask[1, :, 80:] = mask[1, 64:] = True
    out = net(x.masked_fill(mask[:, None], 0), mask)
    for name, layer in (('last', out), ('aux', out['aux_outputs'][0])):
        logits, boxes = layer['pred_logits'], layer['pred_boxes']
        close(logits[:, ::3, ::30].flatten(), torch.tensor(g[name + '_logits']).double(), 1e-5)
        close(logits.abs().mean(), g[name + '_mean'], 1e-5)
        close(boxes[:, ::3].flatten(), torch.tensor(g[name + '_boxes']).double(), 1e-5)
    boxes = [[[0.5, 0.5, 0.4, 0.3], [0.2, 0.3, 0.2, 0.2], [0.8, 0.7, 0.1, 0.5]],
             [[0.4, 0.6, 0.3, 0.3]]]
    targets = [(torch.tensor(labels), torch.tensor(b).double())
               for labels, b in zip(([3, 17, 44], [1]), boxes)]
    losses = detr.set_losses(out, targets, c, *detr.norms([3, 1], c))
    for name, want in g['losses'].items():
        close(losses[name], torch.tensor(want).double(), 1e-5)
    close(detr.total(losses, c), g['total'], 1e-5)
    pairs = detr.pair_up(out['pred_logits'][None], out['pred_boxes'][None], targets, c)
    assert pairs.tolist() == [[0] * 4, [0, 0, 0, 1], [2, 5, 6, 3], [0, 1, 2, 3]]
    for i, (scores, labels, b) in enumerate(detr.post_process(out, [[480, 640], [333, 500]])):
        close(scores, torch.tensor(g['scores'][i]).double(), 1e-6)
        assert labels.tolist() == g['labels'][i]
        close(b[::3].flatten(), torch.tensor(g['pixels'][i]).double(), 1e-3)

def detr_count(**settings):
    with torch.device('meta'), unittest.mock.patch.object(detr.DETR, 'init_parameter'):
        net = detr.DETR(detr.Config(**detr.DETR_R50, num_classes=91, **settings))
    return detr.count(net), len(net.state_dict())

def test_detr_parameter_counts():
    """The original's, and of attention without weights the paper's saving."""
    plain = dict(self_attention='softmax', cross_attention='softmax')
    assert detr_count(**plain) == (41302368, 458)
    for name in ('no-weights', *SOLVING):
        for which in plain:
            assert detr_count(**{**plain, which: name}) == (39723360, 434)
            assert detr_count(**{**plain, which: name}, out_proj=True) == (40118112, 446)
        assert detr_count(self_attention=name, cross_attention=name)[0] == 38144352

def test_detr_positions():
    """Sines and cosines by the formula, of places counted within the image alone."""
    padding = torch.zeros(2, 5, 6, dtype=torch.bool)
    padding[1, 3:] = padding[1, :, 4:] = True
    got = detr.sine_positions(padding, 16).view(2, 5, 6, 16)
    for image, (h, w) in enumerate(((5, 6), (3, 4))):
        for y, x in itertools.product(range(h), range(w)):
            want = []
            for place in (y + 1) / h, (x + 1) / w:
                for i in range(8):
                    angle = 2 * math.pi * place / 10000 ** (2 * (i // 2) / 8)
                    want.append(math.cos(angle) if i % 2 else math.sin(angle))
            close(got[image, y, x], torch.tensor(want), 1e-5)

def test_detr_initialisation():
    """Variants share the weights they have in common; sizes are DETR's."""
    nets = [detr.DETR(detr_config(self_attention=a, cross_attention=b))
            for a, b in (('softmax', 'softmax'), ('admm', 'softmax'), ('softmax', 'l2'))]
    full = nets[0].state_dict()
    for net in nets[1:]:
        state = net.state_dict()
        assert set(state) < set(full) and all((full[key] == p).all() for key, p in state.items())
        other = detr.DETR(detr_config(seed=1)).state_dict()
        assert (other['query_embed.weight'] != full['query_embed.weight']).all()
    net = detr.DETR(detr_config(hidden_dim=64, dim_feedforward=256, self_attention='softmax',
                                cross_attention='softmax', num_queries=50))
    bound = lambda name: net.get_parameter(name).abs().max().item()
    for name, want in {
            'transformer.decoder.layers.0.multihead_attn.in_proj_weight': math.sqrt(6 / 256),
            'transformer.encoder.layers.0.linear1.weight': math.sqrt(6 / 320),
            'transformer.encoder.layers.0.linear1.bias': 1 / 8, 'class_embed.weight': 1 / 8,
            'bbox_embed.layers.0.bias': 1 / 8, 'input_proj.weight': 96 ** -0.5,
            'transformer.decoder.layers.0.self_attn.in_proj_bias': 0.0,
            'transformer.decoder.layers.0.self_attn.out_proj.bias': 0.0}.items():
        assert 0.9 * want <= bound(name) <= want, name
    assert 0.9 < net.query_embed.weight.std() < 1.1
    assert net.transformer.decoder.norm.weight.eq(1).all()
    net = detr.DETR(detr_config(backbone='resnet50'))  # He's, by what goes out
    assert abs(net.backbone[0]['body'].conv1.weight.std() * math.sqrt(64 * 49 / 2) - 1) < 0.05
    assert net.input_proj.weight.abs().max() <= 2048 ** -0.5

def test_detr_every_parameter_learns():
    for name in detr.ATTENTION:
        net = detr.DETR(detr_config(self_attention=name, cross_attention=name, enc_layers=1,
                                    out_proj=True))
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        targets = [(labels, boxes.float()) for labels, boxes in detr_targets(2, 1)]
        detr.total(detr.set_losses(net(x), targets, net.config, *detr.norms([2, 1], net.config)),
                   net.config).backward()
        for key, p in net.named_parameters():
            dead = 'decoder.layers.0.self_attn' in key or 'decoder.layers.0.norm1.w' in key  # x = 0
            assert dead or p.grad.abs().max() > 0, (name, key)

def detr_giou(a, b):
    """Of two boxes, centre and size, by areas; numbers only."""
    a, b = ([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2] for cx, cy, w, h in (a, b))
    side = lambda i: max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i]))
    hull = ((max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1])))
    both = side(0) * side(1)
    union = sum((x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)) - both
    return both / union - (hull - union) / hull

def detr_outputs(B=3, Q=5, K=3, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    *aux, last = [dict(pred_logits=draw(B, Q, K + 1).requires_grad_(),
                       pred_boxes=draw(B, Q, 4).sigmoid().requires_grad_()) for _ in range(layers)]
    return dict(last, aux_outputs=aux)

def detr_targets(*counts, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.rand(n, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.1
    return [(torch.randint(3, (n,), generator=generator), draw(n)) for n in counts]

def test_detr_losses_by_hand():
    """One image, query and box at a time, every assignment tried; images without objects too."""
    c = detr_config()
    for counts in ((2, 0, 3), (0, 0, 0), (5, 1, 0)):
        outputs, targets = detr_outputs(), detr_targets(*counts)
        losses = detr.set_losses(outputs, targets, c, *detr.norms(counts, c))
        for i, layer in enumerate([outputs, *outputs['aux_outputs']]):
            entropy = weight = l1 = giou = paired = 0.0
            for b, (labels, boxes) in enumerate(targets):
                p = layer['pred_logits'][b].softmax(-1).tolist()
                mine = layer['pred_boxes'][b].tolist()
                labels, boxes = labels.tolist(), boxes.tolist()
                distance = lambda q, t: sum(abs(x - y) for x, y in zip(mine[q], boxes[t]))
                cost = lambda q, t: (5 * distance(q, t) - p[q][labels[t]]
                                     - 2 * detr_giou(mine[q], boxes[t]))
                best = min(itertools.permutations(range(5), len(labels)),
                           key=lambda qs: sum(cost(q, t) for t, q in enumerate(qs)))
                for q in range(5):
                    label = labels[best.index(q)] if q in best else 3
                    entropy -= (1 if q in best else 0.1) * math.log(p[q][label])
                    weight += 1 if q in best else 0.1
                for t, q in enumerate(best):
                    l1, giou = l1 + distance(q, t), giou + 1 - detr_giou(mine[q], boxes[t])
                    paired -= math.log(p[q][labels[t]])
            n = max(1, sum(counts))
            for key, want in (('class', entropy / weight), ('bbox', l1 / n), ('giou', giou / n),
                              ('paired', paired / n)):
                close(losses[key][i], want, 1e-7)
        detr.total(losses, c).backward()
        for layer in [outputs, *outputs['aux_outputs']]:
            assert all(t.grad.isfinite().all() for t in layer.values() if torch.is_tensor(t))

def test_detr_losses_of_strange_boxes():
    """Boxes without area on the same spot, more objects than queries, NaN from the model."""
    c = detr_config()
    point = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert detr.generalised_iou(detr.corners(point), detr.corners(point)).item() == 0
    outputs, targets = detr_outputs(B=1), detr_targets(8)
    losses = detr.set_losses(outputs, targets, c, *detr.norms([8], c))
    weights, count = detr.norms([8], c)
    assert weights == 5 and count == 8 and all(v.isfinite().all() for v in losses.values())
    outputs['pred_boxes'] = outputs['pred_boxes'] * math.nan
    assert detr.total(detr.set_losses(outputs, targets, c, weights, count), c).isnan()

def test_detr_losses_of_parts():
    """A global batch in parts, however objects fall on them, averages to the whole."""
    c, counts = detr_config(), (4, 0, 0, 1, 2, 0)
    targets, weights, n = detr_targets(*counts), *detr.norms(counts, c)
    whole = detr_outputs(B=6)
    detr.total(detr.set_losses(whole, targets, c, weights, n), c).backward()
    for sizes in ((2, 4), (1, 1, 4), (3, 3)):
        parts, at = detr_outputs(B=6), 0
        for size in sizes:
            rows, share = slice(at, at + size), size / 6
            cut = lambda layer: {k: t[rows] for k, t in layer.items() if torch.is_tensor(t)}
            part = dict(cut(parts), aux_outputs=[cut(x) for x in parts['aux_outputs']])
            losses = detr.set_losses(part, targets[rows], c, weights * share, n * share)
            (detr.total(losses, c) * share).backward()
            at += size
        for a, b in zip([whole, *whole['aux_outputs']], [parts, *parts['aux_outputs']]):
            close(a['pred_logits'].grad, b['pred_logits'].grad, 1e-14)
            close(a['pred_boxes'].grad, b['pred_boxes'].grad, 1e-14)

# ------------------------------------ assignment, AP, photos ------------------------------------

def cheapest(cost):
    """Least total cost over all assignments, one by one."""
    n, m = cost.shape
    if n > m:
        return cheapest(cost.T)
    return min(sum(cost[i, j] for i, j in enumerate(chosen))
               for chosen in itertools.permutations(range(m), n))

def test_detr_match():
    rng = np.random.default_rng(0)
    for case in range(300):
        n, m = rng.integers(0, 6, 2)
        cost = [rng.normal(size=(n, m)), rng.integers(0, 3, (n, m)) * 1.0, np.ones((n, m)),
                1e8 * rng.normal(size=(n, m)) - 1e9, 1e-6 * rng.normal(size=(n, m))][case % 5]
        for solve in detr.assign, detr.match:  # scipy's, where it is installed
            rows, columns = solve(cost)
            assert len(rows) == min(n, m) and len(set(columns)) == len(columns), (case, solve)
            assert (np.diff(rows) > 0).all() and rows.dtype == columns.dtype == np.int64, case
            assert abs(cost[rows, columns].sum() - cheapest(cost)) <= 1e-12 * (
                1 + abs(cost).sum()), (case, solve)
    for bad in np.nan, np.inf, -np.inf:
        cost = np.zeros((4, 2))
        cost[1, 1] = bad
        with contextlib.suppress(ValueError):
            assert False, detr.match(cost)

def test_detr_match_without_scipy():
    cost = torch.from_numpy(np.random.default_rng(1).normal(size=(40, 9)).astype('f'))
    with unittest.mock.patch.dict(sys.modules, {'scipy.optimize': None}):
        rows, columns = detr.match(cost)
    assert rows.tolist() == [2, 13, 19, 21, 25, 29, 30, 37, 39], rows
    assert columns.tolist() == [6, 5, 3, 4, 8, 1, 2, 7, 0], columns
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise unittest.SkipTest('the golden pairs hold; scipy is not installed')
    for n, m in (100, 30), (30, 100), (100, 1), (100, 0), (0, 0):
        cost = np.random.default_rng(n).normal(size=(n, m))
        for ours, scipys in zip(detr.assign(cost), linear_sum_assignment(cost)):
            assert (ours == scipys).all(), (n, m)

def detections(seed):
    """Random ground truth and detections: crowds, ties, areas that differ from the boxes', images
    without either, more than 100 detections, boxes without area, IoUs at a threshold."""
    rng = np.random.default_rng(seed)
    images = rng.permutation(50)[:rng.integers(1, 9)].tolist()
    classes, whole = (1 + rng.permutation(20)[:rng.integers(1, 5)]).tolist(), rng.random() < 0.5
    truth, found = [], []

    def box(scale):
        b = np.concatenate([rng.uniform(0, 100, 2), rng.uniform(0, scale, 2)])
        b = (b / 4).round() * 4 if whole else b
        b[2:] *= rng.random(2) > 0.05
        return b if rng.random() > 0.1 else [*b[:2], *rng.choice([32.0, 96.0], 2)]

    def add(to, image, classes, box, **more):
        to.append(dict(id=len(to) + 1, image_id=image, category_id=int(rng.choice(classes)),
                       bbox=np.array(box).tolist(), **more))

    for image in images:
        for _ in range(rng.integers(0, 12) * (rng.random() > 0.2)):
            b = box(rng.choice([20, 90, 200]))
            add(truth, image, classes, b, area=float(b[2] * b[3] * rng.choice([1, 1, 0.7])),
                iscrowd=int(rng.random() < 0.15))
            for _ in range(rng.integers(0, 4)):
                near = b + rng.normal(size=4) * rng.choice([0, 1, 5, 15])
                near = np.maximum(near.round() if whole else near, [-9, -9, 0, 0])
                add(found, image, [truth[-1]['category_id']] * 9 + [int(rng.integers(1, 22))], near,
                    score=round(float(rng.random()), int(rng.choice([1, 6]))))
        for _ in range(rng.integers(0, 300 if rng.random() < 0.1 else 6)):
            add(found, image, classes, box(100), score=round(float(rng.random()), 1))
    order = rng.permutation(len(found))
    return dict(images=[dict(id=i) for i in images], annotations=truth,
                categories=[dict(id=c) for c in classes]), [found[i] for i in order]

def test_detr_ap_equals_pycocotools():
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise unittest.SkipTest('pycocotools is not installed')
    for seed in range(200):
        truth, found = detections(seed)
        ours = detr.coco_ap(truth, found)
        if found:
            with contextlib.redirect_stdout(io.StringIO()):
                coco = COCO()
                coco.dataset = truth
                coco.createIndex()
                theirs = COCOeval(coco, coco.loadRes(found), 'bbox')
                for step in theirs.evaluate, theirs.accumulate, theirs.summarize:
                    step()
            worst = abs(np.array(list(ours.values())) - theirs.stats).max()
            assert worst <= 1e-9, (seed, worst, ours, theirs.stats)

AP_GOLDEN = {  # of pycocotools 2.0.11, AP to ARl
    0: [0.0348303, 0.062058, 0.0175035, 0.0254675, 0.1216997, 0.0, 0.0166667,
        0.3, 0.3, 0.2333333, 0.5666667, 0.0],
    3: [0.1666667, 0.1666667, 0.1666667, 0.5, 0.0, -1.0, 0.0,
        0.5, 0.5, 0.5, 0.0, -1.0],
    6: [0.2174191, 0.2724599, 0.2546854, 0.158133, 0.2522857, 0.7772277, 0.1581731,
        0.4540865, 0.4822115, 0.315873, 0.62, 0.8333333],
    7: [0.0544925, 0.0682408, 0.055198, 0.0280528, 0.1261126, -1.0, 0.2416667,
        0.2416667, 0.45, 0.1833333, 0.7166667, -1.0],
}

def test_detr_ap_golden():
    for seed, golden in AP_GOLDEN.items():
        close = np.abs(np.array(list(detr.coco_ap(*detections(seed)).values())) - golden)
        assert close.max() < 1e-6, (seed, close)

def test_detr_ap_by_hand():
    truth = dict(images=[dict(id=7), dict(id=3)], categories=[dict(id=1), dict(id=5)], annotations=[
        dict(id=0, image_id=7, category_id=1, bbox=[0, 0, 10, 10], area=100, iscrowd=0),
        dict(id=1, image_id=3, category_id=1, bbox=[0, 0, 50, 50], area=2500, iscrowd=0)])
    hit = dict(image_id=7, category_id=1, bbox=[0, 0, 10, 10], score=0.9)
    other = dict(image_id=3, category_id=1, bbox=[0, 0, 50, 40], score=0.8)   # IoU exactly 0.8
    ap = detr.coco_ap(truth, [hit, other])
    assert abs(ap['AP'] - (7 + 3 * 51 / 101) / 10) < 1e-12, ap  # half found above IoU 0.8
    want = dict(AP50=1, AP75=1, APs=1, APm=0.7, APl=-1, AR1=0.85, AR100=0.85, ARs=1, ARm=0.7)
    assert all(abs(ap[name] - value) < 1e-12 for name, value in want.items()), ap
    assert detr.coco_ap(truth, [])['AP'] == 0 == detr.coco_ap(truth, [])['AR100']
    assert detr.coco_ap(dict(truth, annotations=[]), [hit])['AP'] == -1
    crowd = [dict(a, iscrowd=1) for a in truth['annotations']]
    assert set(detr.coco_ap(dict(truth, annotations=crowd), [hit, other]).values()) == {-1.0}
    others = [dict(hit, category_id=c) for c in (5, 9)]  # of no annotation, of no category
    assert detr.coco_ap(truth, [hit, other, *others]) == ap
    twice = detr.coco_ap(truth, [dict(hit, score=0.95), hit, other])['AP50']
    assert abs(twice - (51 + 50 * 2 / 3) / 101) < 1e-12, twice  # the second of two is a mistake
    one, two = (dict(hit, id=i, bbox=[4 * i, 0, 10, 10], area=100) for i in (0, 1))
    both = [dict(hit, bbox=[2, 0, 10, 10]), dict(hit, bbox=[4, 0, 10, 10], score=0.8)]
    for order, want in ([one, two], 51 / 101), ([two, one], 1):  # of equal IoUs the last one counts
        ap = detr.coco_ap(dict(truth, annotations=order), both)['AP50']
        assert abs(ap - want) < 1e-12, (order, ap)
    for bad in dict(hit, image_id=8), dict(hit, score=np.nan), dict(hit, bbox=[0, 0, np.inf, 1]):
        with contextlib.suppress(ValueError):
            assert False, detr.coco_ap(truth, [bad])

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

def detr_photos(path, coco=COCO, split='train', draw=True):
    """path/split with photos, path/split.json."""
    (path / split).mkdir(exist_ok=True)
    (path / f'{split}.json').write_text(coco if isinstance(coco, str) else json.dumps(coco))
    for name, size in ('a.png', (30, 60)), ('b.png', (40, 30)):
        (path / split / name).touch()
        if draw:
            from PIL import Image
            y, x = np.mgrid[:size[1], :size[0]]
            pixels = np.stack([x * 6, y * 4, (x + y) * 2], -1).astype(np.uint8)
            Image.fromarray(pixels).save(path / split / name)

def test_detr_annotations():
    with folder() as path:
        detr_photos(path, draw=False)
        data = detr.CocoFolder(path / 'train', path / 'train.json', 60)
        assert len(data) == 2 and data.ids == [4, 9] and data.classes == ['cat', 'dot']
        empty, plan = plans = data.plan(0), data.plan(1)
        assert data.truth([plan])['images'][0]['id'] == 8
        assert data.truth([empty])['annotations'] == []
        notes = data.truth(plans)['annotations']
        assert [a['area'] for a in notes] == [150, 14 * 20.5, 900.5, 0]
        assert [bool(a['iscrowd']) for a in notes] == [0, 0, 1, 0]
        assert empty.labels.shape == (0,) and empty.boxes.shape == (0, 4)
        assert (empty.size, empty.original, empty.image_id) == ((50, 100), (60, 30), 5)
        assert (plan.size, plan.original, plan.image_id) == ((80, 60), (30, 40), 8)
        assert plan.labels.tolist() == [1, 0] and not plan.flip
        want = torch.tensor([[0.5, 1 / 3, 0.5, 1 / 3], [0.125, 5 / 6, 0.25, 1 / 3]])
        assert (plan.boxes - want).abs().max() < 1e-6, plan.boxes

def test_detr_transforms():
    """Distributions, and what each does to the boxes, worked out from the pixels."""
    with folder() as path:
        detr_photos(path, draw=False)
        data = detr.CocoFolder(path / 'train', path / 'train.json', 800)
        data.images = [dict(id=8, file_name='b.png', width=640, height=480)]
        data.annotations = {8: [dict(category_id=4, bbox=[96, 48, 320, 240], iscrowd=0),
                                dict(category_id=9, bbox=[0, 0, 6, 6], iscrowd=0)]}
        plans = [data.plan(0, np.random.default_rng([1, i])) for i in range(600)]
        again = data.plan(0, np.random.default_rng([1, 3]))
        assert (again.boxes == plans[3].boxes).all() and again.size == plans[3].size
        whole = [p for p in plans if tuple(p.window) == (0, 0, 1, 1)]
        assert 250 < len(whole) < 350 and 250 < sum(p.flip for p in plans) < 350
        assert {p.size for p in whole} == {(int(s * 640 / 480), s) for s in range(480, 801, 32)}
        widths = []
        for p in plans:
            x0, y0, x1, y1 = p.window
            left, right = max(0.15, x0), min(0.65, x1)                      # of the large box
            top, bottom = max(0.1, y0), min(0.6, y1)
            cx = ((left + right) / 2 - x0) / (x1 - x0)
            want = [1 - cx if p.flip else cx, ((top + bottom) / 2 - y0) / (y1 - y0),
                    (right - left) / (x1 - x0), (bottom - top) / (y1 - y0)]
            assert np.abs(p.boxes[0].numpy() - want).max() < 1e-6, (p, want)
            assert len(p.labels) == 1 + (x0 < 6 / 640 and y0 < 6 / 480), p  # the small one
            assert len(p.labels) == len(p.boxes) and max(p.size) <= 1334
            if (x0, y0, x1, y1) != (0, 0, 1, 1):
                widths.append((x1 - x0) * 640)
        # 384 to 600 pixels of a photo whose shorter side is 400 to 600
        assert 384 * 0.8 - 1e-9 <= min(widths) < 320 and 550 < max(widths) <= 600 * 1.2
        tiny = detr.CocoFolder(path / 'train', path / 'train.json', 8)
        for i in range(50):
            assert min(tiny.plan(i % 2, np.random.default_rng(i)).size) >= 1
    assert detr.resized(640, 480, 800, 1333) == (1066, 800)
    assert detr.resized(480, 640, 800, 1333) == (800, 1066)
    assert detr.resized(2000, 500, 800, 1333) == (1332, 333)
    assert detr.resized(1, 5000, 800, 1333)[0] == 1 and detr.resized(7, 7, 3) == (3, 3)

def test_detr_photos():
    try:
        from PIL import Image
    except ImportError:
        raise unittest.SkipTest('Pillow is not installed')
    with folder() as path:
        detr_photos(path)
        data = detr.CocoFolder(path / 'train', path / 'train.json', 30)
        as_bytes = lambda x: ((x.numpy() * detr.STD + detr.MEAN) * 255).round()
        plan = data.plan(1)
        y, x = np.mgrid[:30, :40]
        want = np.stack([x * 6, y * 4, (x + y) * 2])                        # the drawing itself
        assert plan.size == (40, 30) and (as_bytes(data.render(plan)) == want).all()
        plan.flip = True
        assert (as_bytes(data.render(plan)) == want[:, :, ::-1]).all()
        plan.flip, plan.window, plan.size = False, np.array([0.25, 0.2, 0.75, 0.8]), (20, 18)
        assert (as_bytes(data.render(plan)) == want[:, 6:24, 10:30]).all()
        for i in range(40):
            p = data.plan(i % 2, np.random.default_rng(i))
            assert data.render(p).shape == (3, p.size[1], p.size[0])
        images = [data.render(data.plan(row)) for row in (0, 1)]
        batch, mask = detr.collate(images)
        assert batch.shape == (2, 3, 50, 40) and mask.shape == (2, 50, 40)
        assert (batch[0, :, :, :25] == images[0]).all() and not batch[0, :, :, 25:].any()
        assert mask[0, :, 25:].all() and not mask[0, :, :25].any() and mask[1].sum() == 20 * 40
        deep = np.linspace(0, 65535, 1600).astype(np.uint16).reshape(40, 40)  # 16 bits
        for name in 'deep.png', 'deep.tif':
            Image.fromarray(deep).save(path / name)
            assert (np.asarray(detr.read_photo(path / name)) == (deep // 256)[..., None]).all()
            assert (vit.read_photo(path / name, 40, middle=1.0) == deep // 256).all()
        file = path / 'train' / 'b.png'
        for mode in 'L', 'RGBA', 'P', '1', 'CMYK':  # any kind of photo
            kind = 'TIFF' if mode == 'CMYK' else 'PNG'
            Image.open(path / 'train' / 'a.png').resize((40, 30)).convert(mode).save(file, kind)
            assert data.render(data.plan(1)).shape == (3, 30, 40), mode
        turned = Image.Exif()
        turned[0x0112] = 6
        Image.new('RGB', (40, 30)).save(file, 'JPEG', exif=turned)
        assert data.render(data.plan(1)).shape == (3, 30, 40)  # as COCO: as it is stored
        for change, words in (lambda: Image.new('RGB', (30, 40)).save(file), '(30, 40)'), (
                lambda: file.write_bytes(file.read_bytes()[:60]), 'b.png'), (
                lambda: file.write_text('<html>'), 'b.png'), (file.unlink, 'b.png'):
            change()
            try:
                data.render(data.plan(1))
                assert False, words
            except ValueError as e:
                assert words in str(e) and 'b.png' in str(e) and '\n' not in str(e), e
        with unittest.mock.patch.dict(sys.modules, {'PIL': None}):
            try:
                data.render(data.plan(0))
                assert False
            except ValueError as e:
                assert 'pip install pillow' in str(e)

def detr_line(call):
    """What a call that ends with code 2 says, one line."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            call()
            assert False, 'nothing was wrong'
        except SystemExit as e:
            assert e.code == 2
    assert err.getvalue().count('\n') == 1, err.getvalue()
    return err.getvalue()

def test_detr_bad_annotations():
    def bad(words, change, path):
        coco = json.loads(json.dumps(COCO))
        got = change(coco)
        detr_photos(path, got if isinstance(got, str) else coco, draw=False)
        line = detr_line(lambda: detr.CocoFolder(path / 'train', path / 'train.json'))
        assert all(word in line for word in ['train.json', *words.split('|')]), (words, line)

    def entry(list_, i=0, **fields):
        return lambda coco: coco[list_][i].update(fields)

    annotation = functools.partial(entry, 'annotations', 1)
    image = functools.partial(entry, 'images', 1)
    which = 'id 2, image_id 8|'
    with folder() as path:
        for words, change in (
                ('no json', lambda coco: '<html>'), ('no json', lambda coco: ' '),
                ('no json', lambda coco: '[' * 100000), ('no json', lambda coco: '{"a": 1' * 9),
                ('no list of categories', lambda coco: '[]'),
                ('no list of images', lambda coco: coco.pop('images')),
                ('no list of images', lambda coco: coco['images'].clear()),
                ('no list of annotations', lambda coco: coco.update(annotations={})),
                ('annotations[0]|id None', lambda coco: coco['annotations'].insert(0, 7)),
                ('annotations[4] (id 1,|same id', lambda coco: coco['annotations'].append(
                    coco['annotations'][0])),
                ('images[1] (id 8,|same id', image(id=8)),
                ('categories[0]|name', entry('categories', name='a\nb')),
                ('categories[0]|name 5', entry('categories', name=5)),
                ('categories[1]|same id', entry('categories', id=4)),
                ('id [1]', annotation(id=[1])), ('id True', annotation(id=True)),
                ("id 'x'", annotation(id='x')), ('id -1', annotation(id=-1)),
                ('annotation 2 of image 99: there is no such image', annotation(image_id=99)),
                ('annotation 2 of image 8: there is no category 3', annotation(category_id=3)),
                (which + 'bbox None', annotation(bbox=None)),
                (which + 'bbox [1, 2, 3]', annotation(bbox=[1, 2, 3])),
                (which + 'bbox [1, 2, -3, 4]', annotation(bbox=[1, 2, -3, 4])),
                (which + 'bbox [1, 2, 3, nan]', annotation(bbox=[1, 2, 3, float('nan')])),
                (which + 'bbox [1, 2, inf, 3]', annotation(bbox=[1, 2, float('inf'), 3])),
                (which + 'bbox', annotation(bbox=[1, 2, 3, 10 ** 400])),
                (which + 'bbox', annotation(bbox=[1, 2, 3, '4'])),
                (which + 'bbox', annotation(bbox=[1, 2, 3, True])),
                (which + 'area -1', annotation(area=-1)), (which + 'area', annotation(area='x')),
                (which + 'iscrowd 2', annotation(iscrowd=2)),
                ("annotation 2 of image 8|'b.png', 40 x 30", annotation(bbox=[41, 2, 3, 4])),
                *(('annotation 2 of image 8', annotation(bbox=bbox)) for bbox in (
                    [1, -9, 3, 4], [-4, 1, 3, 4], [1, 31, 3, 4])),
                ('id 5|width 0', image(width=0)), ('id 5|height 2.5', image(height=2.5)),
                ('id 5|width None', image(width=None)), ('id 5|file_name 3', image(file_name=3)),
                ('image 5|gone.png', image(file_name='gone.png')),
                ('image 5', image(file_name='a.png\0')), ('image 5', image(file_name='\ud800')),
                *(('id 5|file_name', image(file_name=name)) for name in (
                    '', '/etc/passwd', '../train.json', 'x/../../train.json', '..\\train.json'))):
            bad(words, change, path)
        line = detr_line(lambda: detr.CocoFolder(path / 'train', path / 'none.json'))
        assert 'none.json' in line, line

def test_detr_folders():
    with folder() as path:
        assert 'train2017' in detr_line(lambda: detr.load_coco(path))
        one = dict(COCO, images=COCO['images'][:1])
        detr_photos(path, one, 'val', draw=False)
        assert str(path) in detr_line(lambda: detr.load_coco(path))
        detr_photos(path, split='val', draw=False)
        train, val = detr.load_coco(path)  # of one split every tenth is kept
        assert [x['id'] for x in val.images] == [5] and [x['id'] for x in train.images] == [8]
        assert len(train.plan(0).labels) == 2 and not val.truth([val.plan(0)])['annotations']
        detr_photos(path, one, draw=False)
        train, val = detr.load_coco(path, 40)
        assert len(train) == 1 and len(val) == 2 and train.image_size == 40
        assert train.stamp != val.stamp
        other = dict(one, categories=[dict(id=9, name='dot'), dict(id=4, name='dog')])
        detr_photos(path, other, draw=False)
        assert 'categories' in detr_line(lambda: detr.load_coco(path))
    for names in ('train2017', 'val2017'), ('train', 'valid'):  # COCO's own layout, and Roboflow's
        with folder() as path:
            for name in names:
                detr_photos(path, split=name, draw=False)
                to = (path / 'annotations' / f'instances_{name}.json' if name[-1] == '7' else
                      path / name / '_annotations.coco.json')
                to.parent.mkdir(exist_ok=True)
                (path / f'{name}.json').rename(to)
            assert [x.photos.name for x in detr.load_coco(path)] == list(names)

def test_detr_drawing():
    image = np.full((3, 40, 64), 9, np.uint8)
    boxes = np.array([[20, 12, 50.4, 30], [-5, 15, 70, 90.0], [70, 50, 80, 60], [8, 8, 8, 8]])
    out = detr.draw_boxes(image, boxes, np.array([0, 1, 2, 0]), ['disc', 'a_b', 'x'],
                          np.array([0.9, 0.8, 0.7, 0.1]))
    assert out.shape == image.shape and out.dtype == np.uint8 and (image == 9).all()
    red, blue = detr.COLOURS[:2]
    for x, y, want in ((20, 20, red), (21, 20, red), (22, 20, [9] * 3), (49, 20, red),
                       (50, 20, [9] * 3), (35, 12, red), (35, 13, red), (35, 14, [9] * 3),
                       (35, 29, red), (35, 30, [9] * 3),
                       (0, 30, blue), (63, 30, blue), (5, 39, blue), (5, 37, [9] * 3)):
        assert (out[:, y, x] == want).all(), (x, y, out[:, y, x])
    letter = (out[:, 6:11, 21:24] == 255).all(0)                            # the D of DISC 0.90
    assert letter.tolist() == [[1, 1, 0], [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 1, 0]], letter
    assert (detr.draw_boxes(image, np.zeros((0, 4)), [], [], []) == image).all()

# ------------------------------------ data, training, actions ------------------------------------

def test_detr_post_process():
    """The likeliest class, though no-object be likelier; boxes in pixels of each image."""
    logits = torch.tensor([[[0.0, 2.0, 5.0], [3.0, 1.0, 0.0]]]).repeat(2, 1, 1)
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.1, 0.2, 0.2, 0.2]]]).repeat(2, 1, 1)
    (scores, labels, first), (*_, second) = detr.post_process(
        dict(pred_logits=logits, pred_boxes=boxes), [[100, 200], [10, 10]])
    assert labels.tolist() == [1, 0]
    close(scores, torch.stack([logits[0, 0].softmax(0)[1], logits[0, 1].softmax(0)[0]]), 1e-6)
    close(first, torch.tensor([[80.0, 30, 120, 70], [0, 10, 40, 30]]), 1e-4)
    close(second, torch.tensor([[4.0, 3, 6, 7], [0, 1, 2, 3]]), 1e-4)

def test_detr_picture():
    """Small images are enlarged, and their boxes with them; what scores too little stays out."""
    found = (torch.tensor([0.9, 0.3]), torch.tensor([0, 1]),
             torch.tensor([[16.0, 32, 48, 60], [2, 2, 9, 9]]))
    config = detr_config(classes='disc,ring')
    drawn = detr.mark(np.zeros((3, 64, 64), np.uint8), found, config, 0.5).any(0)
    assert drawn.shape == (256, 256) and not drawn[:100].any() and not drawn[:, :60].any()
    assert drawn[128:240, 64].all() and drawn[239, 64:192].all()
    assert not drawn[130:238, 66:190].any()
    drawn = detr.mark(np.zeros((3, 400, 400), np.uint8), found, config, 0.5).any(0)
    assert drawn[18:32, 16:90].all() and not drawn[:18].any()  # a name in letters twice as large
    assert not drawn[:, 90:].any()

def test_detr_shapes():
    """Boxes hug what is drawn; the same row is the same image; shapes hardly overlap."""
    data = detr.Shapes(30, 0, 64)
    plain, seen = [], set()
    for row in range(30):
        plan, again = data.plan(row), data.plan(row)
        image = data.render(plan)
        assert image.shape == (3, 64, 64) and image.dtype == torch.float32
        close(image, data.render(again), 0)
        assert 1 <= len(plan.labels) <= 4 and plan.boxes.shape == (len(plan.labels), 4)
        assert plan.boxes.dtype == torch.float32
        x = detr.corners(plan.boxes)
        assert x.min() >= 0 and x.max() <= 1
        seen |= set(plan.labels.tolist())
        pixels = image.numpy() * detr.STD + detr.MEAN
        grey = np.median(pixels[:, [0, 0, -1, -1], [0, -1, 0, -1]])
        if len(plan.labels) == 1:
            on = abs(pixels - grey).max(0) > 0.25
            y, x0 = np.nonzero(on)
            want = (plan.boxes[0] * 64).tolist()
            got = [(x0.min() + x0.max() + 1) / 2, (y.min() + y.max() + 1) / 2,
                   x0.max() + 1 - x0.min(), y.max() + 1 - y.min()]
            plain.append(max(abs(a - b) for a, b in zip(got, want)))
    assert seen == {0, 1, 2} and len(plain) > 2 and max(plain) < 4, plain
    pattern = np.random.RandomState(0).uniform(-1, 1, (3, 64, 64))
    marks = [(data.render(data.plan(row)).numpy() * pattern).sum() for row in range(3)]
    close(marks, [-63.446, -26.918, -118.572], 0.05)  # the drawings that README.md's figures are of
    plans = [data.plan(row) for row in range(30)]
    truth = data.truth(plans[3:4])
    assert [i['id'] for i in truth['images']] == [4]
    assert len(truth['annotations']) == len(plans[3].labels)
    truth = data.truth(plans)
    assert detr.coco_ap(truth, [dict(a, score=1.0) for a in truth['annotations']])['AP'] == 1

def test_detr_batches():
    """A function of seed and step; parts are rows of the whole, and their shares add up."""
    c = detr_config(batch_size=4, grad_accum_steps=2, max_iters=3)
    task, other = detr.Task(c), detr.Task(dataclasses.replace(c, seed=1))
    images, mask, targets, weights, count = task.batch(1, range(8))
    assert mask is None and (weights, count) == detr.norms([len(t[0]) for t in targets], c)
    parts = [task.batch(1, rows) for rows in (range(0, 4), range(4, 8))]
    close(torch.cat([p[0] for p in parts]), images, 0)
    for (a, b), (x, y) in zip(sum((p[2] for p in parts), []), targets):
        assert (a == x).all() and (b == y).all()
    close(sum(p[3] for p in parts), weights, 1e-9)
    close(sum(p[4] for p in parts), count, 1e-9)
    assert (task.batch(2, range(8))[0] != images).any()
    assert (other.batch(1, range(8))[0] != images).any()
    whole = detr.total(detr.set_losses(task.model(images), targets, task.config, weights, count),
                       task.config)
    close(sum(task.loss(task.model, p) for p in parts) / 2, whole, 1e-5)

def test_detr_optimizer():
    task = detr.Task(detr_config(lr_backbone=1e-5, learning_rate=1e-3, beta1=0.8, beta2=0.95,
                                 weight_decay=0.2))
    groups = task.optimizer().param_groups
    assert all((g['betas'], g['weight_decay']) == ((0.8, 0.95), 0.2) for g in groups)
    groups = {g['lr']: g['params'] for g in groups}
    assert set(groups) == {1e-3, 1e-5}
    assert len(groups[1e-5]) == len(list(task.model.backbone.parameters()))
    assert sum(map(len, groups.values())) == len(list(task.model.parameters()))

def test_detr_evaluation():
    """A model that answers with the truth has AP 1, the loss of the paired queries, and no l1."""
    assert len(detr.Task(detr_config(eval_rows=0)).plans) == 200
    task = detr.Task(detr_config(eval_rows=8, batch_size=8))
    assert len(task.plans) == 8
    class Oracle(torch.nn.Module):
        def forward(self, images, mask):
            plans, part = task.plans[self.at:self.at + len(images)], None
            self.at += len(images)
            logits, boxes = torch.zeros(len(plans), 5, 4), torch.full((len(plans), 5, 4), 0.5)
            logits[..., 3] = 20.0
            for i, plan in enumerate(plans):
                n = len(plan.labels)
                logits[i, :n, 3], boxes[i, :n] = 0, plan.boxes
                logits[i, range(n), plan.labels] = 20.0
            part = dict(pred_logits=logits, pred_boxes=boxes)
            return dict(part, aux_outputs=[part])
    task.model = Oracle()
    task.model.at = 0
    with contextlib.redirect_stdout(io.StringIO()):
        figures = task.evaluate()
    assert figures['AP'] == figures['AP50'] == 1 and task.finish()['AR100'] == 1
    close(torch.tensor([figures['l1'], figures['giou'], figures['paired']]), torch.zeros(3), 1e-6)

def test_detr_training():
    """The default recipe, small: it learns, writes everything, and says what to expect."""
    detr.say_once.cache_clear()
    with folder() as path:
        code, out, _, result = run(*detr_tiny(path, '--max-iters', 40, '--eval-interval', 20,
                                              '--lr', '5e-3'), script=detr)
        assert code == 0 and out.count('AP stays near zero') == 1
        loss = [row['val_loss'] for row in result['log'] if 'val_loss' in row]
        assert loss[-1] < 0.9 * loss[0], loss
        assert result['folder'].name == 'sa-softmax-ca-admm-s1337'
        names = {p.name for p in result['folder'].iterdir()}
        assert {'ckpt.pt', 'log.csv', 'detections.png'} <= names
        assert {'AP', 'AP75', 'ARl'} <= set(result)
        assert (result['folder'] / 'detections.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
        code, out, _, found = run('inspect', '--out-dir', path / 'out', script=detr)
        assert code == 0 and len(found['rows']) == 4 and re.search('cosine +gap\n', out)
        gap = [row['gap'] for row in found['rows'] if row['attention'] == 'admm']
        assert len(gap) == 2 and all(0 <= g < 1 for g in gap)
        assert {'attention.png', 'inspect.csv'} <= {p.name for p in result['folder'].iterdir()}
        try:
            from PIL import Image
        except ImportError:
            return
        Image.new('RGB', (90, 60), 'red').save(path / 'red.png')
        Image.new('L', (40, 70), 9).save(path / 'grey.jpg')
        code, out, _, found = run('detect', path / 'red.png', path / 'grey.jpg', '--threshold', 0,
                                  '--out-dir', path / 'out', script=detr)
        assert code == 0 and all(len(v) == 5 for v in found['found'].values())
        with Image.open(result['folder'] / 'red-found.png') as image:
            assert image.size == (450, 300)
        refuse(['no photo', 'log.csv'], 'detect', result['folder'] / 'log.csv', '--out-dir',
               path / 'out', script=detr)

def test_detr_resume_bit_for_bit():
    """Stopped and resumed equals never stopped, dropout and all: weights, log, AP."""
    with folder() as path:
        flags = detr_tiny(path, '--dropout', 0.1, '--grad-accum-steps', 2, '--max-iters', 7)
        whole, batch, left = run(*flags, script=detr)[3], detr.Task.batch, [signal.SIGINT]
        def interrupt(self, it, rows):
            while it == 4 and left:
                os.kill(os.getpid(), left.pop())
            return batch(self, it, rows)
        with unittest.mock.patch.object(detr.Task, 'batch', interrupt):
            code, out, _, _ = run(*flags, '--out-dir', path / 'two', script=detr)
        assert code == 130 and '--resume' in out
        code, out, _, part = run(*flags, '--out-dir', path / 'two', '--resume', script=detr)
        assert code == 0 and 'resumed' in out and 'AP stays' not in out
        assert same(weights(whole['folder']), weights(part['folder']))
        rows = [[{**row, 'seconds': 0} for row in r['log']] for r in (whole, part)]
        assert rows[0] == rows[1] and whole['AR100'] == part['AR100']
        done = run(*flags, '--resume', whole['folder'], script=detr)[3]  # nothing left to do
        assert done['AR100'] == whole['AR100'] and done['AP'] == whole['AP']

def test_detr_accumulation():
    with folder() as path:
        flags = detr_tiny(path, '--max-iters', 3)
        one = run(*flags, '--batch-size', 8, script=detr)[3]['folder']
        four = run(*flags, '--batch-size', 2, '--grad-accum-steps', 4, script=detr)[3]['folder']
        for a, b in zip(weights(one).values(), weights(four).values()):
            close(a, b, 2e-4)

def test_detr_gaps_do_not_depend_on_rho():
    """How far a solver is from the best there is, also where its own rho would never get there."""
    q, k = detr_tokens('correlated', 20, 64, d=16)
    best = torch.stack([detr.objective(detr.lasso(q, k, iterations=2000), q, k,
                                       detr.scales(q, k, 0.03, 0.1)[0])])
    for rho in (0.1, 1000.0):
        gap = detr.solver_gaps(q, k, False, detr_config(rho=rho, iterations=15), 15)[-1]
        x = detr.lasso(q, k, rho=rho)
        found = detr.objective(x, q, k, detr.scales(q, k, 0.03, rho)[0])
        assert abs(gap - (found / best - 1).mean()) < 1e-9

def test_detr_lasso_is_restless():
    """Of two pictures of a scene that differ in pixel noise alone, softmax has much the same
    coefficients and the Lasso others, half of them negative: before training, by default."""
    task = detr.Task(detr.Config(eval_rows=32, device='cpu'))
    c, model = task.config, task.model.eval()
    images = torch.stack([task.val.render(plan) for plan in task.plans[:16]])
    torch.manual_seed(0)
    views = [images + 0.04 / torch.tensor(detr.STD) * torch.randn(images.shape) for _ in range(2)]
    query, agree = model.query_embed.weight.expand(16, -1, -1), {}
    with torch.no_grad():
        for kind in ('no-weights', 'admm'):
            module = detr.MultiheadAttention(c, kind)
            x, y = (module.coefficients(*module.heads(query, memory + pos, memory))[0]
                    for memory, pos, *_ in map(model.encode, views))
            agree[kind] = F.cosine_similarity(x, y, dim=-1).mean()
    assert agree['no-weights'] > 0.9 and agree['admm'] < 0.5, agree
    assert 0.45 < (x < 0).float().mul(x.abs()).sum() / x.abs().sum() < 0.55

def test_detr_initial_weights():
    """--init takes DETR's layout, COCO's classes by their ids, torchvision's backbone, our own."""
    with folder() as path:
        task = detr.Task(detr_config(self_attention='softmax', cross_attention='softmax'))
        state = {key: p + 1 for key, p in task.model.state_dict().items()}
        torch.save(dict(model=state), path / 'whole.pth')
        code, out, _, _ = run(*detr_tiny(path, '--init', path / 'whole.pth', '--max-iters', 0),
                              script=detr)
        assert code == 0 and 'fresh: none' in out and 'multihead_attn.in_proj_weight' in out
        ckpt = weights(next((path / 'out').rglob('ckpt.pt')).parent)
        assert all((p == state[key]).all() for key, p in ckpt.items())

        coco = types.SimpleNamespace(ids=[1, 3, 90], classes=['person', 'car', 'toothbrush'])
        head = torch.arange(92.0)
        big = dict(state, **{'class_embed.bias': head,
                             'class_embed.weight': head[:, None].repeat(1, 16)})
        torch.save(dict(model=big), path / 'coco.pth')
        run_quietly = contextlib.redirect_stdout(io.StringIO())
        with run_quietly:
            detr.load_weights(task.model, path / 'coco.pth', coco)
        assert task.model.class_embed.bias.tolist() == [1, 3, 90, 91]
        fresh = task.model.class_embed.bias.tolist()
        for ids, names in (([1, 3, 90], ['cell', 'dish', 'lamp']),  # other classes: not these rows
                           ([1, 2, 3], ['person', 'helmet', 'car']), ([1, 3, 200], ['person'] * 3)):
            coco.ids, coco.classes = ids, names
            with contextlib.redirect_stdout(io.StringIO()) as out:
                detr.load_weights(task.model, path / 'coco.pth', coco)
            assert task.model.class_embed.bias.tolist() == fresh and 'class_embed' in out.getvalue()

        body = {key.removeprefix('backbone.0.body.'): p.clone() + 2
                for key, p in detr.ResNet50().state_dict().items()}
        body.update({'fc.weight': torch.zeros(1000, 2048),
                     'bn1.num_batches_tracked': torch.tensor(1)})
        torch.save(body, path / 'resnet50.pth')
        net = detr.DETR(detr_config(backbone='resnet50'))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            detr.load_weights(net, path / 'resnet50.pth', coco)
        assert 'left out: none' in out.getvalue()
        close(net.backbone[0]['body'].layer3[2].bn2.bias, body['layer3.2.bn2.bias'], 0)
        (path / 'text.pth').write_text('no weights')
        for bad in ('text.pth', 'missing.pth', 'other.pth'):
            torch.save(dict(model={'x': torch.zeros(1)}), path / 'other.pth')
            refuse(['--init', bad], *detr_tiny(path, '--init', path / bad), script=detr)

def test_detr_recipe_without_its_files():
    """The presets on an empty disk train the small model on drawn shapes, and say so."""
    with folder() as path, contextlib.chdir(path) if hasattr(contextlib, 'chdir') else folder():
        code, out, _, result = run('--preset', 't4', '--max-iters', 0, '--eval-rows', 1,
                                   '--device', 'cpu', '--out-dir', path, script=detr)
        assert code == 0 and 'small backbone' in out and 'prepare_data.py coco' in out
        again = ['--preset', 't4', '--max-iters', 1, '--eval-rows', 1, '--device', 'cpu',
                 '--out-dir', path]
        code, out, err, more = run(*again, '--resume', script=detr)
        assert code == 0 and more['folder'] == result['folder'], err
        code, out, err, _ = run('compare', *again, '--seeds', 0, '--over', 'power=5', script=detr)
        assert code == 0, err
    assert len(detr.Task(detr_config()).train) > 1000
    for name, preset in detr.PRESETS.items():
        detr.Config(**preset)

def test_detr_compare_and_bench():
    with folder() as path:
        few = detr_tiny(path, '--max-iters', 2)
        code, out, _, result = run('compare', '--table', 2, '--seeds', 0, *few, script=detr)
        assert code == 0 and set(result['AP']) == set(detr.TABLES['2']) and 'AP50' in result
        rows = [r for r in csv.DictReader(open(path / 'out/admm_detr/compare/compare.csv'))]
        assert len(rows) == 3 * len(result)
        with unittest.mock.patch.object(detr, 'SOLVER_SIZES', ((20, 3), (20, 6))):
            code, out, _, result = run('bench', '--rounds', 2, *few, script=detr)
        assert code == 0 and len(result['variants']) == 5
        a, b = result['solvers']
        assert a['recomputed MB'] == b['recomputed MB'] < a['admm MB'] < b['admm MB']

def test_detr_bad_flags():
    for words, *argv in (
            (['--cross-attention', 'admm'], '--cross-attention', 'lasso'),
            (['--dict', 'value'], '--dict', 'query'), (['--power', '5'], '--power', 2),
            (['--relax'], '--relax', 2), (['--sparsity'], '--sparsity', 0),
            (['--nheads'], '--nheads', 5), (['--stride'], '--stride', 7),
            (['--data', 'prepare_data'], '--data', 'nowhere'),
            (['--threshold'], 'detect', 'x.png', '--threshold', 2)):
        refuse(words, *argv, script=detr)
    with folder() as path:
        refuse(['train first'], 'inspect', '--out-dir', path, script=detr)
        assert not list(path.iterdir())

# ------------------------------------ mask_distill.py ------------------------------------

def mask_run(*argv, memory=False):
    """Without the memory table, which takes longer than a tiny training."""
    stub = contextlib.nullcontext() if memory else unittest.mock.patch.object(
        mask, 'memory', lambda *_: {})
    with stub:
        return run(*argv, script=mask)

def mask_config(**settings):
    small = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=40, masks='window:4')
    return mask.Config(**{**small, **settings})

def mask_tiny(path, *more):
    """Flags of a run that takes a second."""
    if not (path / 'text.txt').exists():
        (path / 'text.txt').write_text(TEXT)
    return ['--preset', 'tiny', '--n-layer', 2, '--n-head', 2, '--n-embd', 16, '--block-size', 16,
            '--masks', 'window:4+sinks:1', '--batch-size', 4, '--max-iters', 6, '--eval-interval',
            3, '--eval-rows', 8, '--log-interval', 1, '--warmup-iters', 2, '--teacher-iters', 30,
            '--teacher-lr', 0.03, '--device', 'cpu', '--data', path / 'text.txt', '--out-dir',
            path / 'out', *more]

def mask_teacher(seed=0, **settings):
    """A GPT2 whose attention is far from uniform."""
    net = mask.GPT2(mask_config(seed=seed, **settings))
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() > 1:
                p.mul_(30 if 'c_attn' in name else 5)
    return net

def mask_holds(masks, i, j):
    """Which candidates hold the pair i, j <= i, by the words of the grammar -> list of bool."""
    names = {'last5': 'offset:0+offset:1+offset:2+offset:3+offset:4', 'first-all': 'first:1+all',
             'windows': 'window:5+window:10+first:5'}
    terms = [t.split(':') for t in '+'.join(names.get(t, t) for t in masks.split('+')).split('+')]
    ends = [int(n) + (kind == 'offset') for kind, *(n,) in [t for t in terms if len(t) == 2]
            if kind in ('window', 'offset')]
    holds = {'all': lambda n: True, 'window': lambda n: i - j < n, 'offset': lambda n: i - j == n,
             'first': lambda n: j < n, 'sinks': lambda n: j < n and i - j >= max(ends, default=1)}
    return [holds[t[0]](int(t[-1]) if len(t) == 2 else 0) for t in terms]

def slow_mask(reading, q, k, v, masks, c):
    """The three readings, one pair of tokens at a time; c (nh, K) -> (B, nh, T, hs)."""
    B, nh, T, hs = q.shape
    out = torch.zeros_like(q)
    for b, h, i in itertools.product(range(B), range(nh), range(T)):
        e = [math.exp(sum(x * y for x, y in zip(q[b, h, i].tolist(), k[b, h, j].tolist()))
                      / math.sqrt(hs)) for j in range(i + 1)]
        held = [mask_holds(masks, i, j) for j in range(i + 1)]
        coefficients = c[h].tolist()
        if not any(all(mask_holds(masks, x, x)[m] for x in range(T)) for m in range(len(held[0]))):
            coefficients.append(max(coefficients))  # the own token, where no mask surely holds it
            held = [[*row, j == i] for j, row in enumerate(held)]
        W = [sum(x for x, yes in zip(coefficients, row) if yes) for row in held]
        if reading == 'renormalised':
            p = [w * x for w, x in zip(W, e)]
            p = [x / sum(p) for x in p]
        elif reading == 'unnormalised':
            p = [w * x / sum(e) for w, x in zip(W, e)]
        else:
            p = [0.0] * (i + 1)
            for m, x in enumerate(coefficients):
                total = sum(e[j] for j in range(i + 1) if held[j][m])
                p = [a + x * e[j] * held[j][m] / total if total else a for j, a in enumerate(p)]
        out[b, h, i] = sum(w * v[b, h, j] for j, w in enumerate(p))
    return out

MASKS = ['all', 'last5', 'windows', 'first-all', 'window:3', 'window:3+sinks:2', 'sinks:2',
         'first:3', 'offset:2', 'offset:1+first:2', 'window:2+window:5+sinks:1']

def test_mask_reference():
    q, k, v = qkv(1, 2, 7, 3)
    for masks, reading in itertools.product(MASKS, mask.READINGS):
        K = len(mask.candidates(masks))
        alpha = torch.linspace(-2, 1.5, 2 * K, dtype=torch.float64).view(2, K)
        want = slow_mask(reading, q, k, v, masks, alpha.sigmoid())
        close(mask.dense_attention(q, k, v, masks, mask.coefficients(alpha), reading), want, 1e-12)
        if reading == 'renormalised' and 'all' not in masks:
            for block in (0, 1, 2, 5, 16):
                y = mask.blocked_attention(q, k, v, masks, mask.coefficients(alpha), block)
                close(y, want, 1e-12)

def test_mask_gradcheck():
    for masks, reading in (('windows', 'renormalised'), ('last5', 'unnormalised'),
                           ('windows', 'separate'), ('offset:1', 'renormalised')):
        inputs = [t.requires_grad_() for t in qkv(1, 2, 6, 2)]
        alpha = qkv(2, len(mask.candidates(masks)))[0].requires_grad_()
        ways = [lambda q, k, v, a: mask.dense_attention(q, k, v, masks, mask.coefficients(a),
                                                        reading)]
        if reading == 'renormalised':
            ways.append(lambda q, k, v, a: mask.blocked_attention(q, k, v, masks,
                                                                  mask.coefficients(a), 4))
        for f in ways:
            assert torch.autograd.gradcheck(f, (*inputs, alpha))

def test_mask_blocked_equals_dense():
    """fp32 outputs to 1e-6, float64 gradients to 1e-12; any length, any mask, half precision."""
    cases = [('window:64+sinks:4', 200), ('window:64+sinks:4', 30), ('window:33', 129),
             ('last5', 70), ('windows', 41), ('window:1', 5), ('offset:7+first:2', 37),
             ('window:8+window:16+sinks:3', 64), ('sinks:3', 9), ('window:64', 64)]
    for (masks, T), heads in itertools.product(cases, (1, 3)):
        alpha = qkv(heads, len(mask.candidates(masks)))[0]
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6),
                                 (torch.bfloat16, 3e-2), (torch.float16, 3e-3)):
            q, k, v = (t.requires_grad_() for t in qkv(2, 3, T, 8, dtype=dtype))
            a = alpha.clone().requires_grad_()
            g = qkv(2, 3, T, 8, dtype=dtype, seed=1)[0]
            y, z = (f(q, k, v, masks, mask.coefficients(a))
                    for f in (mask.dense_attention, mask.blocked_attention))
            assert y.shape == z.shape and y.dtype == z.dtype == dtype
            close(y.double(), z.double(), tolerance)
            if dtype == torch.float64:
                grads = [torch.autograd.grad(out, (q, k, v, a), g) for out in (y, z)]
                for one, other in zip(*grads):
                    close(one, other, 1e-12)

def test_mask_neutral_settings():
    """All of the mask: plain attention, whatever the coefficient; likewise a window of all."""
    q, k, v = qkv(2, 3, 20, 4)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for masks in ('all', 'window:20', 'window:50', 'window:15+sinks:6'):
        close(mask.dense_attention(q, k, v, masks), plain, 1e-12)
        if masks != 'all':
            close(mask.blocked_attention(q, k, v, masks), plain, 1e-12)
    c = torch.full((3, 1), 0.3, dtype=torch.float64).log()
    close(mask.dense_attention(q, k, v, 'all', c), plain, 1e-12)
    close(mask.dense_attention(q, k, v, 'all', c, 'unnormalised'), 0.3 * plain, 1e-12)
    close(mask.dense_attention(q, k, v, 'all', c, 'separate'), 0.3 * plain, 1e-12)
    teacher, idx = mask_teacher(), torch.arange(32).view(2, 16)
    for masks in ('all', 'window:16', 'first-all'):
        student = mask.substitute(teacher, mask_config(masks=masks, reading='renormalised'))
        logits = teacher(idx)
        (close if masks != 'first-all' else lambda a, b, _: None)(student(idx), logits, 1e-4)

def test_mask_scale():
    """c -> t c leaves the renormalised reading alone, and scales the other two."""
    q, k, v = qkv(1, 2, 9, 4)
    log_c = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.3, 0.4]], dtype=torch.float64).log()
    for reading, scale in (('renormalised', 1.0), ('unnormalised', 0.25), ('separate', 0.25)):
        y, z = (mask.dense_attention(q, k, v, 'windows', c, reading)
                for c in (log_c, log_c + math.log(0.25)))
        close(z, scale * y, 1e-12)
    tiny_c = log_c - 200  # far below the smallest float32
    close(mask.blocked_attention(q, k, v, 'windows', tiny_c.float()),
          mask.dense_attention(q, k, v, 'windows', log_c), 1e-6)

def test_mask_single_tokens_lose_their_softmax():
    """Read separately, last5 is a convolution: queries and keys do not matter."""
    q, k, v = qkv(1, 2, 9, 4)
    c = torch.linspace(-1, 0, 5, dtype=torch.float64)[None]
    y = mask.dense_attention(q, k, v, 'last5', c, 'separate')
    close(y, mask.dense_attention(k, -q, v, 'last5', c, 'separate'), 1e-12)
    close(y[:, :, 6], sum(c[0, m].exp() * v[:, :, 6 - m] for m in range(5)), 1e-12)

def test_mask_no_empty_row():
    """The own token is always there: rows add up to 1, no NaN, forward or backward."""
    for masks, dtype in itertools.product(
            ('offset:7', 'first:3', 'sinks:1', 'offset:3+offset:5'),
            (torch.float32, torch.float16, torch.bfloat16)):
        q, k, v = (t.requires_grad_() for t in qkv(1, 2, 12, 4, dtype=dtype, scale=30.0))
        p = mask.attention_weights(q, k, masks)
        close(p.float().sum(-1), torch.ones(1, 2, 12), 1e-2)
        assert (p.diagonal(dim1=2, dim2=3) >= 0).all() and not p.triu(1).any()
        for f in (mask.dense_attention, mask.blocked_attention):
            y = f(q, k, v, masks)
            assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))
        close(mask.dense_attention(q, k, v, masks)[:, :, 0].float(), v[:, :, 0].float(), 1e-2)
    closed = mask.coefficients(torch.tensor([[-20.0, 3.0]]))  # the window of `window:3+first:1`
    q, k, v = qkv(1, 2, 12, 4, dtype=torch.float32)
    assert closed[0, 0] == -math.inf
    for f in (mask.dense_attention, mask.blocked_attention):
        close(f(q, k, v, 'window:3+first:1', closed), f(q, k, v, 'first:1'), 1e-6)
    for alpha in (-200.0, 0.0, 200.0):
        a = torch.full((1, 5), alpha, requires_grad=True)
        y = mask.dense_attention(q, k, v, 'last5', mask.coefficients(a))
        assert y.isfinite().all() and torch.autograd.grad(y.sum(), a)[0].isfinite().all()

def test_mask_pairs():
    """Every pair once in window:64+sinks:4: 0.460 of the pairs at 256 tokens; 0.039 in last5."""
    masks = 'window:64+sinks:4'
    held = [mask_holds(masks, i, j) for i in range(256) for j in range(i + 1)]
    assert all(sum(row) < 2 for row in held)
    shares = [sum(column) / len(held) for column in zip(*held)]
    assert abs(sum(shares) - 0.460) < 5e-4
    for alphas, want in (([torch.zeros(1, 2)] * 3, sum(shares)),
                         ([torch.tensor([[0.0, -20.0], [0.0, 0.0]])], sum(shares) - shares[1] / 2)):
        assert abs(mask.kept_pairs(alphas, masks, 256) - want) < 1e-6
    assert abs(mask.kept_pairs([torch.zeros(1, 5)], 'last5', 256) - 0.0386) < 5e-4
    own = mask.kept_pairs([torch.zeros(1, 1)], 'offset:1', 16)  # 15 pairs, and the own tokens
    assert abs(own - 31 / 136) < 1e-6

def test_mask_l1_and_budget():
    """L1 pulls at the common scale of the coefficients, the budget does not."""
    alphas = [torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True) for _ in range(2)]
    loss = mask.penalty(alphas, mask_config(masks='windows', l1=0.5))
    close(loss, 2 * 0.5 * alphas[0].sigmoid().sum().item(), 1e-6)
    assert all((g > 0).all() for g in torch.autograd.grad(loss, alphas))
    loss = mask.penalty(alphas, mask_config(masks='windows', budget=0.3, budget_weight=3.0))
    r = (alphas[0][0].sigmoid() / alphas[0].sigmoid().max()).tolist()
    lost = [math.prod(1 - x * yes for x, yes in zip(r, mask_holds('windows', i, j)))
            for i in range(16) for j in range(i + 1)]
    kept = 1 - sum(lost) / len(lost)
    assert kept > 0.4
    close(loss, 3 * (kept - 0.3), 1e-5)
    g = torch.autograd.grad(loss, alphas)[0][0]
    assert (g[:2] > 0).all() and g[2] < 0  # the others against the largest
    close((g / (1 - alphas[0][0].sigmoid())).sum(), 0.0, 1e-6)  # d / d log c: no common pull
    for budget in (1.0, kept + 1e-3):
        assert mask.penalty(alphas, mask_config(masks='windows', budget=budget)) == 0
    many = [torch.cat([a, a]).detach() for a in alphas]  # heads alike: the same penalty
    for settings in (dict(l1=0.5), dict(budget=0.2)):
        c = mask_config(masks='windows', **settings)
        close(mask.penalty(many, c), mask.penalty(alphas, c), 1e-6)

def test_mask_first_and_all():
    """The report's experiment: L1 lets both alphas fall, alpha_2 above alpha_1; the budget closes
    the first token's mask and leaves the full one."""
    with folder() as path:
        flags = mask_tiny(path, '--masks', 'first-all', '--train', 'alphas', '--max-iters', 60,
                          '--alpha-lr', 0.1, '--eval-interval', 30)
        l1 = mask_run('inspect', *flags, '--l1', 0.1)[3]['rows']
        budget = mask_run('inspect', *flags, '--budget', 1.0)[3]['rows']
        early, late = ([r for r in l1 if r['iter'] == it] for it in (30, 60))
        for a, b in zip(early, late):
            assert 0.5 > a['first:1'] > b['first:1'] and 0.5 > a['all'] > b['all']
        assert np.mean([r['all'] for r in late]) > np.mean([r['first:1'] for r in late])
        late = [r for r in budget if r['iter'] == 60]
        assert all(r['all'] > 0.4 and r['first:1'] < 0.2 for r in late), late

# logits[1, -1, :4], their mean size, attentions[1, 0, 2, 23, :4], sum of squares: transformers
MASK_GOLDEN = ([0.879413, 0.831994, -0.276339, -1.175988], 0.7578675150871277,
               [0.003405, 1e-05, 2.9e-05, 1e-06], 181.0743408203125)

def mask_golden_model():
    net = mask.GPT2(mask_config(n_head=3, n_embd=24, block_size=24, vocab_size=61)).double()
    fill(net.state_dict())
    return net, (torch.arange(48) * 7919 % 61).view(2, 24)

def test_mask_golden():
    """Logits and attention weights as transformers' GPT2LMHeadModel gives them."""
    logits, size, weights, squares = MASK_GOLDEN
    net, idx = mask_golden_model()
    watch = []
    net.features(idx, watch=watch)
    got = net(idx)
    close(got[1, -1, :4], torch.tensor(logits), 1e-5)
    close(got.abs().mean(), size, 1e-6)
    maps = torch.stack(watch)
    close(maps[1, 0, 2, 23, :4], torch.tensor(weights), 1e-6)
    close(maps.square().sum(), squares, 1e-3)
    for block in net.h:  # eager, as there, and the fused kernel agree
        block.attn.how = 'dense'
    close(net(idx), got, 1e-12)
    keys = list(net.state_dict())
    assert keys[:4] == ['wte.weight', 'wpe.weight', 'h.0.ln_1.weight', 'h.0.ln_1.bias']
    assert net.h[0].attn.c_attn.weight.shape == (24, 72)  # (in, out)

def safetensors(tensors, metadata=None, pad=0):
    """Bytes of a safetensors file from {name: (dtype, array)}, without the script's help."""
    header, data = {'__metadata__': metadata} if metadata else {}, b''
    for name, (dtype, a) in tensors.items():
        begin, data = len(data), data + a.tobytes()
        header[name] = dict(dtype=dtype, shape=list(a.shape), data_offsets=[begin, len(data)])
    head = json.dumps(header).encode() + b' ' * pad
    return struct.pack('<Q', len(head)) + head + data

def test_mask_safetensors():
    """Written by hand, headers of any length (so data at odd places), all dtypes; and back."""
    arrays = {'c': ('F64', np.array(3.25)), 'd': ('I64', np.array([[7]], '<i8')),
              'a': ('F32', np.arange(6, dtype='<f4').reshape(2, 3)),
              'none': ('F32', np.zeros((0, 3), '<f4')), 'b': ('F16', np.array([1.5, -2], '<f2')),
              'e': ('U8', np.array([1, 2, 255], 'u1'))}
    with folder() as path:
        for pad in range(8):
            (path / 'x.safetensors').write_bytes(safetensors(arrays, {'k': 'v'}, pad))
            got = mask.read_safetensors(path / 'x.safetensors')
            assert set(got) == set(arrays)
            for name, (_, a) in arrays.items():
                assert got[name].shape == a.shape and np.array_equal(got[name].numpy(), a)
        order = {'u': torch.tensor(1.5).double(), 'v': torch.randn(1, 2).double().mT,
                 'w': torch.randn(3, 5).bfloat16()}
        mask.write_safetensors(path / 'y.safetensors', order, {'n': '1'})
        back = mask.read_safetensors(path / 'y.safetensors')
        assert all(torch.equal(back[name], t) for name, t in order.items())
        _, metadata, _ = mask.read_header(path / 'y.safetensors')
        assert metadata == {'n': '1'} and not (path / 'y.tmp').exists()

def test_mask_bad_safetensors():
    """One line that names the file, whatever is wrong with it."""
    good = {'a': ('F32', np.ones((2, 2), '<f4')), 'b': ('F32', np.ones(3, '<f4'))}
    whole = safetensors(good)
    n = struct.unpack('<Q', whole[:8])[0]
    def changed(edit, data=whole[8 + n:]):
        header = json.loads(whole[8:8 + n])
        edit(header)
        head = json.dumps(header).encode()
        return struct.pack('<Q', len(head)) + head + data
    bad = {
        'truncated': whole[:-1], 'longer': whole + b'\0', 'empty': b'', 'short': b'\1\2\3',
        'huge': struct.pack('<Q', 2 ** 63) + whole[8:],
        'beyond': struct.pack('<Q', len(whole)) + whole[8:],
        'text': b'this is no safetensors file at all, is it?', 'zip': b'PK\3\4' + bytes(60),
        'json': struct.pack('<Q', 5) + b'{"a":', 'list': struct.pack('<Q', 2) + b'[]',
        'utf8': struct.pack('<Q', 2) + b'\xff\xfe', 'deep': struct.pack('<Q', 99999) + b'[' * 99999,
        'overlap': changed(lambda h: h['b'].update(data_offsets=[8, 20])),
        'gap': changed(lambda h: h['b'].update(data_offsets=[20, 32]), bytes(32)),
        'backwards': changed(lambda h: h['b'].update(data_offsets=[28, 16])),
        'dtype': changed(lambda h: h['a'].update(dtype='F8_E4M3')),
        'size': changed(lambda h: h['a'].update(shape=[2, 3])),
        'negative': changed(lambda h: h['a'].update(shape=[-2, -2])),
        'words': changed(lambda h: h['a'].update(shape='22')),
        'missing': changed(lambda h: h['a'].pop('shape')),
        'number': changed(lambda h: h.update(a=3)),
        'float': changed(lambda h: h['a'].update(data_offsets=[0.0, 16.0])),
        'align': safetensors({'u': ('U8', np.ones(1, 'u1')), 'a': ('F32', np.ones(1, '<f4'))}),
    }
    with folder() as path:
        for name, data in bad.items():
            (path / name).write_bytes(data)
            refuse([name, 'safetensors'], *mask_tiny(path, '--init', path / name), script=mask)
        refuse(['safetensors', 'absent'], *mask_tiny(path, '--init', path / 'absent'), script=mask)
        refuse([str(path)], *mask_tiny(path, '--init', path), script=mask)
        (path / 'whole').write_bytes(whole)
        refuse(['whole', 'GPT-2'], *mask_tiny(path, '--init', path / 'whole'), script=mask)
        assert not (path / 'out').exists()

def test_mask_load_gpt2():
    """The hub's keys and those of transformers; buffers dropped; sizes from the file."""
    net, idx = mask_golden_model()
    state = {key: ('F32', p.float().numpy()) for key, p in net.state_dict().items()}
    buffers = {f'h.{n}.attn.bias': ('F32', np.tril(np.ones((1, 1, 24, 24), '<f4')))
               for n in range(2)}
    buffers['h.0.attn.masked_bias'] = 'F32', np.array(-1e4, '<f4')
    prefixed = {'transformer.' + key: value for key, value in state.items()}
    with folder() as path:
        for tensors, metadata in (({**state, **buffers}, None), (prefixed, {'format': 'pt'}),
                                  ({**prefixed, 'lm_head.weight': state['wte.weight']}, None),
                                  (state, {'n_head': '3'})):
            (path / 'gpt2').write_bytes(safetensors(tensors, metadata))
            n_head = 0 if metadata and 'n_head' in metadata else 3
            got = mask.load_gpt2(path / 'gpt2', n_head)
            c = got.config
            assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size) == (2, 3, 24, 24, 61)
            close(got(idx), net(idx), 1e-5)
        wide = mask.GPT2(mask_config(n_layer=1, n_embd=128, n_head=2))
        mask.write_safetensors(path / 'wide', wide.state_dict(), {})
        assert mask.load_gpt2(path / 'wide').config.n_head == 2  # heads of 64
        (path / 'config.json').write_text('{"n_head": 4}')  # as transformers saves them
        assert mask.load_gpt2(path / 'wide').config.n_head == 4
        (path / 'config.json').unlink()
        many = {**state, 'h.3000.ln_1.weight': state['ln_f.weight']}
        (path / 'gpt2').write_bytes(safetensors(many, {'n_head': '3'}))
        refuse(['GPT-2'], *mask_tiny(path, '--init', path / 'gpt2'), script=mask)
        for drop, add, words in (('h.1.mlp.c_fc.bias', {}, 'c_fc.bias'), ('wte.weight', {}, 'wte'),
                                 ('', {'extra': state['ln_f.bias']}, 'extra')):
            broken = {key: value for key, value in {**state, **add}.items() if key != drop}
            (path / 'gpt2').write_bytes(safetensors(broken, {'n_head': '3'}))
            refuse(['GPT-2', words], *mask_tiny(path, '--init', path / 'gpt2'), script=mask)
        for metadata in (None, {'n_head': '5'}, {'n_head': 'three'}, {'n_head': [1]}):
            (path / 'gpt2').write_bytes(safetensors(state, metadata))
            refuse(['gpt2', 'GPT-2'], *mask_tiny(path, '--init', path / 'gpt2'), script=mask)
        (path / 'gpt2').write_bytes(safetensors(state, {'n_head': '3'}))
        refuse(['61 tokens'], *mask_tiny(path, '--init', path / 'gpt2'), script=mask)

def test_mask_initialisation():
    """Parameters that variants share are the same, and depend on the seed."""
    a, b, c = mask_teacher(), mask_teacher(n_layer=3), mask_teacher(seed=1)
    assert torch.equal(a.h[1].attn.c_attn.weight, b.h[1].attn.c_attn.weight)
    assert not torch.equal(a.wte.weight, c.wte.weight)

def test_mask_substitute():
    """The student is the teacher with masks; what is not trained is shared, and stays."""
    teacher = mask_teacher().requires_grad_(False)
    for train, names in (('alphas', {'alpha'}), ('attention', {'alpha', 'weight', 'bias'})):
        for per_head in (False, True):
            c = mask_config(masks='windows', train=train, per_head=per_head)
            student = mask.substitute(teacher, c)
            trained = [n for n, p in student.named_parameters() if p.requires_grad]
            assert {n.split('.')[-1] for n in trained} == names
            assert all('.attn.' in n for n in trained)
            assert student.h[0].attn.alpha.shape == (2 if per_head else 1, 3)
            assert student.wte.weight is teacher.wte.weight
            assert student.h[0].attn.c_attn.weight is not teacher.h[0].attn.c_attn.weight
        assert teacher.h[0].attn.alpha is None and teacher.h[0].attn.masks == 'all'

def test_mask_kl_of_shifted_logits():
    """A number common to all logits does not matter, in bfloat16 autocast neither."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 32, generator=generator) for n in (50, 500))
    x[:, 0], w[:, 0] = 10, -10  # logits near -100, as GPT-2's are
    y = x + 0.01 * torch.randn(50, 32, generator=generator)
    want = mask.token_kl(x, y, w)
    with torch.autocast('cpu', torch.bfloat16):
        close(mask.token_kl(x, y, w) / want, torch.ones(50), 1e-3)

def test_mask_kl():
    """KL(teacher || student) by the formula; in pieces, the same; not the other way round."""
    x, y, w = (t[0, 0].requires_grad_() for t in qkv(1, 1, 11, 6))
    p, q = (y @ w.T).softmax(-1), (x @ w.T).softmax(-1)
    want = (p * (p / q).log()).sum(-1)
    close(mask.token_kl(x, y, w), want, 1e-5)
    with unittest.mock.patch.object(mask, 'LOGITS', 30):
        close(mask.token_kl(x, y, w), want, 1e-5)
        grads = [torch.autograd.grad(t.mean(), (x, w), retain_graph=True)
                 for t in (mask.token_kl(x, y, w), want)]
        for a, b in zip(*grads):
            close(a, b, 1e-5)
    assert (mask.token_kl(y, x, w) - want).abs().max() > 1e-3
    assert mask.token_kl(x, x, w).abs().max() < 1e-6

def test_mask_cache():
    """With a cache each token costs one step, and the student's has a constant size, but where the
    reading divides by what the masks leave out, too."""
    teacher = mask_teacher(block_size=40)
    idx = torch.arange(3)[None].repeat(2, 1)
    for masks, reading in itertools.product(('all', 'window:4+sinks:2', 'last5', 'windows',
                                             'offset:3', 'first:2'), mask.READINGS):
        model = mask.substitute(teacher, mask_config(masks=masks, reading=reading)).eval()
        out, sizes = model.generate(idx, 30, temperature=0)
        whole, cache = model(out), [{} for _ in model.h]
        for t in range(33):  # every token by a pass over all before it
            close(model(out[:, [t]], cache)[:, -1], whole[:, t], 1e-4)
            assert t < 3 or torch.equal(whole[:, t - 1].argmax(-1), out[:, t]), (masks, t)
        if masks == 'all' or reading == 'unnormalised':
            assert sizes[-1] > 5 * sizes[0]
        else:
            reach, s = mask.extent(masks)
            assert max(sizes) == sizes[-1] == 2 * 2 * 2 * 16 * 4 * (reach - 1 + s)
    plain, _ = teacher.generate(idx, 30, temperature=0)
    assert torch.equal(plain[:, -1], teacher(plain[:, :-1])[:, -1].argmax(-1))
    long, _ = teacher.generate(idx, 60, temperature=0)  # past the positions: begun afresh
    assert long.shape == (2, 63)
    torch.manual_seed(0)
    only, _ = teacher.generate(idx, 20, temperature=5.0, top_k=1)
    assert torch.equal(only, plain[:, :23])

class MaskStub(mask.Task):
    """A task without data files."""

    def __init__(self, config, teacher):
        self.config, self.teacher, self.device = config, teacher, torch.device('cpu')
        tokens = (np.arange(4000) ** 2 // 7 % 40).astype(np.uint16)
        self.text = mask.SimpleNamespace(train=tokens, val=tokens[:900])
        self.model, self.per_row = mask.substitute(teacher, config), config.block_size
        self.prepare_windows()

def test_mask_fidelity():
    """All figures of the report once more, written out in the plainest way."""
    teacher = mask_teacher().requires_grad_(False)
    c = mask_config(masks='window:3+sinks:1', batch_size=3, eval_rows=6)
    task = MaskStub(c, teacher)
    got = mask.fidelity(task, task.model)
    kl, right, same_, squares, tv, ppl, n = 0.0, [0, 0], 0, 0.0, [0.0, 0.0], 0.0, 0
    gradients, batches = [0, 0], list(task.validation(3))
    assert len(task.val_starts) == 6 and len(batches) == 2
    for x, y in batches:
        for i, net in enumerate((teacher, task.model)):
            params = [p for b in net.h for m in (b.attn.c_attn, b.attn.c_proj)
                      for p in (m.weight, m.bias)]
            for p in params:
                p.requires_grad_(True)
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            gradients[i] += torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])
            if net is teacher:
                teacher.requires_grad_(False)
        with torch.no_grad():
            p, q = teacher(x).softmax(-1), task.model(x).softmax(-1)
            maps = ([], [])
            teacher.features(x, watch=maps[0]), task.model.features(x, watch=maps[1])
        for b, t in itertools.product(range(3), range(16)):
            kl += sum(u * math.log(u / w) for u, w in zip(p[b, t].tolist(), q[b, t].tolist()))
            best = p[b, t].argmax().item(), q[b, t].argmax().item()
            right = [r + (m == y[b, t].item()) for r, m in zip(right, best)]
            same_ += best[0] == best[1]
            ppl += math.log(p[b, t, y[b, t]] / q[b, t, y[b, t]])
            n += 1
            for layer, h in itertools.product(range(2), range(2)):
                gaps = [(maps[0][layer][b, h, t, j] - maps[1][layer][b, h, t, j]).item()
                        for j in range(t + 1)]
                squares += sum(g * g for g in gaps)
                tv[layer] += sum(map(abs, gaps)) / 2
    want = dict(accuracy=right[1] / max(1, right[0]), mse=squares / (6 * 2 * 2 * (16 * 17 / 2)),
                cosine=F.cosine_similarity(*gradients, dim=0).item(), kl=kl / n,
                tv=sum(tv) / (n * 4), worst=max(tv) / (n * 2),
                agreement=same_ / n, ppl=math.exp(ppl / n), kept=sum(
                    any(mask_holds(c.masks, i, j)) for i in range(16) for j in range(i + 1)) / 136)
    for key, value in want.items():
        assert abs(got[key] - value) < 1e-5 * max(1, abs(value)), (key, got[key], value)
    assert want['kl'] > 1e-3 and want['cosine'] < 0.999
    same_figures = mask.fidelity(task, mask.substitute(teacher, mask_config(masks='window:16')))
    assert same_figures['accuracy'] == 1 and same_figures['mse'] < 1e-12
    assert same_figures['cosine'] > 1 - 1e-6 and abs(same_figures['kl']) < 1e-6
    assert mask.verdict('kl', 1e-3).endswith('PASS') and mask.verdict('kl', 2e-3).endswith('FAIL')
    assert mask.verdict('cosine', 0.95).endswith('PASS')
    assert mask.verdict('accuracy', 0.94).endswith('FAIL')

def test_mask_memory():
    """What peak() says is what is allocated; blocks need far less than eager attention."""
    cpu = torch.device('cpu')
    def f():
        a = torch.zeros(1000, 1000)
        del a
        b = torch.zeros(500, 1000)
        return b + 1
    assert 4_000_000 <= mask.peak(f, cpu) < 4_001_000
    c = mask_config(n_head=4, n_embd=64, masks='window:64+sinks:4', vocab_size=1000)
    sizes = {way: mask.peak(mask.operation(c, 1024, way, cpu), cpu)
             for way in ('eager', 'sdpa', 'masks')}
    assert sizes['eager'] > 2 * 4 * 1024 * 1024 * 4
    assert sizes['masks'] < 0.3 * sizes['eager'] and sizes['sdpa'] < 0.3 * sizes['eager']
    with contextlib.redirect_stdout(io.StringIO()):
        rows = mask.memory(c, 512, cpu)
    assert list(rows)[-2:] == ['training step', 'with AdamW'] and len(rows) == 6
    parameters = sum(p.numel() for p in mask.GPT2(mask_config(
        n_head=4, n_embd=64, vocab_size=1000, block_size=512)).parameters())
    assert all(size > 4 * parameters for size in rows['inference, last logits'].values())
    last, every = (rows[f'inference, {what} logits']['sdpa'] for what in ('last', 'all'))
    assert last < every
    forward, both = (rows['attention, forward' + more] for more in ('', ' + backward'))
    assert all(forward[way] < both[way] for way in sizes)
    for way in sizes:  # AdamW keeps two more copies
        extra = rows['with AdamW'][way] - rows['training step'][way]
        assert 7.9 * parameters < extra < 14 * parameters, (extra, parameters)

def test_mask_training():
    """Distillation lowers the KL and moves only what it may."""
    with folder() as path:
        before = mask_run(*mask_tiny(path, '--max-iters', 0))[3]
        flags = mask_tiny(path, '--max-iters', 40, '--learning-rate', 0.003, '--masks', 'window:1')
        code, out, err, result = mask_run(*flags, memory=True)
        assert code == 0, err
        assert result['log'][-1]['val_kl'] < 0.7 * result['log'][0]['val_kl']
        assert out.count('PASS') + out.count('FAIL') == 2 * 4 + 6
        assert out.count('prompt ') == 2 and 'edge cases' in out
        assert abs(result['kl'] - result['val_kl']) < 1e-6
        a, b = weights(before['folder']), weights(result['folder'])
        moved = {k for k in b if not (k.endswith('alpha') or torch.equal(a[k], b[k]))}
        assert moved == {f'h.{n}.attn.{m}.{p}' for n in range(2) for m in ('c_attn', 'c_proj')
                         for p in ('weight', 'bias')}
        result = mask_run(*flags, '--train', 'alphas', '--masks', 'windows')[3]
        b = weights(result['folder'])
        assert all(torch.equal(a[k], b[k]) for k in a if not k.endswith('alpha'))
        assert all(b[k].abs().max() > 1e-3 for k in b if k.endswith('alpha'))
        for row in csv.DictReader(open(result['folder'] / 'report.csv', newline='')):
            assert set(row) >= {'case', *mask.CRITERIA, *mask.BESIDE}

def test_mask_teacher_is_cached():
    """Trained once; another setting, another teacher; interrupted, it goes on."""
    with folder() as path:
        teachers = lambda: sorted((path / 'out' / 'mask_distill').glob('teachers/*'))
        flags = mask_tiny(path, '--max-iters', 1)
        code, out, _, _ = mask_run(*flags)
        assert 'teacher: step 30/30' in out and len(teachers()) == 1
        assert 'prepare_data.py gpt2' not in out  # that is for texts in its tokens
        code, out, _, _ = mask_run(*flags, '--masks', 'last5', '--lr', 1e-3, '--l1', 0.1)
        assert 'teacher: step' not in out and 'found' in out and len(teachers()) == 1
        for n, more in enumerate((('--seed', 2), ('--teacher-iters', 5), ('--n-layer', 1))):
            mask_run(*flags, *more)
            assert len(teachers()) == 2 + n
        for n, part in enumerate(('F.gelu', 'a teacher in the making')):  # of model and training
            assert part in mask.SOURCE
            with unittest.mock.patch.object(mask, 'SOURCE', mask.SOURCE.replace(part, '')):
                mask_run(*flags)
            assert len(teachers()) == 5 + n
        batch, left = mask.Pretraining.batch, [signal.SIGINT]
        def interrupt(self, it, rows):
            while it == 10 and left:
                mask.os.kill(mask.os.getpid(), left.pop())
            return batch(self, it, rows)
        with unittest.mock.patch.object(mask.Pretraining, 'batch', interrupt):
            code, out, _, _ = mask_run(*flags, '--out-dir', path / 'two')
            assert code == 130
            code, out, _, _ = mask_run(*flags, '--out-dir', path / 'two')
            mask_run(*flags, '--out-dir', path / 'three')
        assert code == 0 and 'teacher: step 20/30' not in out
        two, three = (weights(next((path / n / 'mask_distill').glob('teachers/*')))
                      for n in ('two', 'three'))
        assert same(two, three)

def test_mask_run_keeps_its_teacher():
    """A run goes on with the teacher it began with, or not at all; a text in other tokens than the
    teacher's is refused; what `teacher` leaves behind is no run to go on with."""
    with folder() as path:
        flags, file = mask_tiny(path, '--max-iters', 1), path / 't.safetensors'
        newest = ['--out-dir', path / 'out', '--device', 'cpu', '--prompt', 'a']
        for seed in (1, 2):
            save = ['--seed', seed, '--save', path / f'{seed}.st']
            assert mask_run('teacher', *flags, *save)[0] == 0
        file.write_bytes((path / '1.st').read_bytes())
        assert mask_run(*flags, '--init', file)[0] == 0
        assert mask_run('teacher', *flags, '--seed', 3)[0] == 0
        assert mask_run('sample', *newest)[0] == 0
        file.write_bytes((path / '2.st').read_bytes())
        refuse(['--teacher', '--init'], 'sample', *newest, script=mask)
        refuse(['--teacher', '--init'], '--resume', *newest[:4], script=mask)
        state = mask.load_gpt2(file).state_dict()
        mask.write_safetensors(file, state, {'tokenizer': 'gpt2', 'n_head': '2'})
        refuse(['t.safetensors', 'tokens'], *flags, '--init', file, script=mask)
        net = mask.GPT2(mask_config(vocab_size=50257, n_embd=64, n_head=1, n_layer=1))
        mask.write_safetensors(file, net.state_dict(), {})
        refuse(['t.safetensors', 'tokens'], *flags, '--init', file, script=mask)

def test_mask_resume_bit_for_bit():
    with folder() as path:
        flags = mask_tiny(path, '--grad-accum-steps', 2, '--max-iters', 9, '--log-interval', 3,
                          '--samples', 20)
        whole = mask_run(*flags)[3]
        batch, left = mask.Task.batch, [signal.SIGTERM]
        def interrupt(self, it, rows):
            while it == 4 and left and type(self) is mask.Task:
                mask.os.kill(mask.os.getpid(), left.pop())
            return batch(self, it, rows)
        with unittest.mock.patch.object(mask.Task, 'batch', interrupt):
            code, out, _, _ = mask_run(*flags, '--out-dir', path / 'part')
        assert code == 128 + signal.SIGTERM and '--resume' in out
        code, out, err, part = mask_run(*flags, '--out-dir', path / 'part', '--resume')
        assert code == 0 and 'resumed' in out, err
        assert same(weights(whole['folder']), weights(part['folder']))

def test_mask_optimizer():
    """Alphas have a rate of their own and nothing decays; a teacher's matrices do."""
    task = MaskStub(mask_config(learning_rate=2e-3, alpha_lr=0.2, beta1=0.8, beta2=0.95,
                                weight_decay=0.3), mask_teacher())
    found = {p: g for g in task.optimizer().param_groups for p in g['params']}
    assert len(found) == sum(p.requires_grad for p in task.model.parameters())
    for name, p in task.model.named_parameters():
        if p.requires_grad:
            group, lr = found[p], 0.2 if name.endswith('alpha') else 2e-3
            assert (group['lr'], group['betas'], group['weight_decay']) == (lr, (0.8, 0.95), 0)
    found = {p: g for g in mask.Pretraining.optimizer(task).param_groups for p in g['params']}
    for p in task.model.parameters():
        assert (found[p]['lr'], found[p]['betas']) == (2e-3, (0.8, 0.95))
        assert found[p]['weight_decay'] == (0.3 if p.dim() > 1 else 0)

def test_mask_batches():
    """Batches follow from seed and step; with --samples they are of so many windows."""
    task = MaskStub(mask_config(samples=3, batch_size=8), mask_teacher())
    seen = {tuple(row.tolist()) for step in range(20) for row in task.batch(step, range(8))[0]}
    assert len(seen) == 3
    whole, parts = task.batch(5, range(8))[0], [task.batch(5, [n])[0] for n in range(8)]
    assert torch.equal(whole, torch.cat(parts))
    x, y = task.batch(0, [0])
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert (task.val_starts[0], task.val_starts[-1]) == (0, len(task.text.val) - 17)

def test_mask_actions():
    with folder() as path:
        flags = mask_tiny(path)
        result = mask_run(*flags)[3]
        out_dir = ['--out-dir', path / 'out', '--device', 'cpu', '--threads', 1]
        code, out, err, found = mask_run('report', '--lengths', '64,128', '--length', 64, *out_dir)
        assert code == 0 and set(found) == {'rows', 'edge', 'memory', 'times', 'exponents'}, err
        assert out.count('PASS') + out.count('FAIL') == 2 * 4
        assert found['rows']['trained attention']['kl'] == result['kl']
        assert set(found['rows']) == {'mask only', 'trained attention'}
        assert all(math.isfinite(kl) for kl in found['edge'].values())
        assert set(found['exponents']) == {'eager', 'sdpa', 'masks'}
        code, out, err, rows = mask_run('report', *flags, '--over', 'masks=last5,window:8')
        assert code == 0 and list(rows) == ['last5', 'window:8'], err
        assert rows['window:8']['kept'] > rows['last5']['kept']
        out = mask_run('report', *flags, '--over', 'masks=last5,window:8')[1]
        assert out.count('found') >= 2 and 'window:8: step' not in out
        code, out, err, texts = mask_run('sample', *out_dir, '--max-new-tokens', 12)
        assert code == 0 and len(texts['samples']) == 7 and out.count('cache') == 14, err
        texts = [mask_run('sample', *out_dir, '--prompt', 'the quick', '--max-new-tokens',
                          30)[3]['samples'] for _ in range(2)]
        assert texts[0] == texts[1] and len(texts[0]) == 1 and texts[0][0][0] == 'the quick'
        code, out, err, result = mask_run('inspect', *flags, '--masks', 'windows')
        names = {'iter', 'layer', 'window:5', 'window:10', 'first:5'}
        assert code == 0 and all(set(row) == names for row in result['rows']), err
        assert [r['iter'] for r in result['rows']] == [0, 0, 3, 3, 6, 6] and 'head 1' in out
        assert result['rows'][0]['window:5'] == 0.5 != result['rows'][-1]['window:5']
        code, out, err, sizes = mask_run('scaling', *flags, '--lengths', '32,64')
        assert code == 0 and set(sizes['memory']) == {32, 64}, err
        flags += ['--batch-size', 16]  # the default, which teachers have unless `teacher` is told
        code, out, err, _ = mask_run('teacher', *flags, '--save', path / 't.safetensors')
        assert code == 0 and 'found' in out, err
        assert 'found' not in mask_run('teacher', *flags, '--batch-size', 8)[1]
        again = mask_run(*flags, '--init', path / 't.safetensors')[3]
        assert again['val_kl'] == mask_run(*flags)[3]['val_kl']
        code, out, err, rows = mask_run('compare', *flags, '--seeds', 0, '--over',
                                        'reading=renormalised,unnormalised,separate')
        assert code == 0 and 'separate' in out, err
        code, out, err, rows = mask_run('bench', *flags, '--rounds', 2, '--over',
                                        'execution=dense,blocked')
        assert code == 0 and set(rows) == {'dense', 'blocked'}, err
        kl, trained = mask.Task.kl, []
        def noted(self, *args):
            trained.append(torch.is_grad_enabled())
            return kl(self, *args)
        with unittest.mock.patch.object(mask.Task, 'kl', noted):
            mask_run('bench', *flags, '--rounds', 2, '--over', 'execution=dense,blocked')
        assert trained and all(trained)  # inference is the student's alone
        half = mask_run(*flags, '--dtype', 'bfloat16')[3]  # and is judged in float32
        state = mask.load_checkpoint(half['folder'] / 'ckpt.pt')
        with contextlib.redirect_stdout(io.StringIO()):
            task = mask.Task(state['config'])
        task.model.load_state_dict(state['model'])
        assert mask.fidelity(task, task.model.eval())['kl'] == half['kl']

def test_mask_bad_flags():
    with folder() as path:
        flags = mask_tiny(path)
        for words, *bad in (
                (['--masks', 'nonsense', ' all, window:N'], '--masks', 'nonsense'),
                (['--masks'], '--masks', ''),
                (['--masks'], '--masks', 'window'), (['--masks'], '--masks', 'window:0'),
                (['--masks'], '--masks', 'window:-3'), (['--masks'], '--masks', 'all:3'),
                (['--masks'], '--masks', 'window:4+'), (['--masks'], '--masks', 'sinks:1e3'),
                (['--reading'], '--reading', 'other'), (['--train'], '--train', 'all'),
                (['--execution', 'all'], '--execution', 'blocked', '--masks', 'first-all'),
                (['--execution'], '--execution', 'blocked', '--reading', 'separate'),
                (['--l1'], '--l1', -1), (['--budget'], '--budget', 1.5),
                (['--n-head'], '--n-head', 3), (['--samples'], '--samples', -1)):
            refuse(words, *flags, *bad, script=mask)
        for words, *argv in (
                (['--lengths'], 'scaling', '--lengths', 'a,b'),
                (['--max-new-tokens'], 'sample', '--max-new-tokens', 0),
                (['--prompt'], 'sample', '--prompt', ''), (['no run'], 'sample'),
                (['no run'], 'report'), (['--over'], 'report', '--over', 'masks=oops')):
            refuse(words, *argv, *flags, script=mask)
        assert not list(path.glob('out/mask_distill/*s1337*'))

def test_mask_report_recipe():
    c = mask.Config(**mask.PRESETS['report004'])
    assert (c.masks, c.samples, c.block_size, c.data) == ('last5', 1000, 512, 'wikitext-2')
    assert c.max_iters * c.batch_size * c.grad_accum_steps == 100 * c.samples and c.l1 > 0
    assert len(mask.candidates('last5')) == 5 and mask.extent('last5') == (5, 0)
    assert mask.candidates('windows') == [('window', 5), ('window', 10), ('first', 5)]

def test_mask_cuda():
    """Blocked equals dense on a GPU, and a run there passes through."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest('no GPU')
    q, k, v = (t.cuda() for t in qkv(2, 3, 200, 16, dtype=torch.float32))
    close(mask.blocked_attention(q, k, v, 'window:64+sinks:4'),
          mask.dense_attention(q, k, v, 'window:64+sinks:4'), 1e-5)
    with folder() as path:
        code, _, err, result = mask_run(*mask_tiny(path, '--device', 'cuda'))
        assert code == 0 and math.isfinite(result['val_kl']), err

# ------------------------------------ prepare_data.py ------------------------------------

def prepare(*argv):
    """Run prepare_data.py; return (meta, None), or (what it said on stderr, exit code)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return prepare_data.main([str(a) for a in argv]), None
        except SystemExit as e:
            return err.getvalue(), e.code

def refused(says, *argv, code=2):
    """Assert that the command stops with one line that says `says`."""
    said, got = prepare(*argv)
    assert got == code and said.count('\n') == 1 and says in said, (argv, got, said)
    assert said.startswith('prepare_data: '), said

def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob('*') if p.is_file()}

def tar_of(members):
    """A tar in memory. members: (name, bytes), None for a symbolic link in place of bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:') as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if data is None:
                info.type, info.linkname = tarfile.SYMTYPE, '/etc/passwd'
            info.size = len(data or b'')
            tar.addfile(info, io.BytesIO(data or b''))
    return buffer.getvalue()

@contextlib.contextmanager
def serving(body, cuts=0, ranges=True, lie=b'', pause=0):
    """Serve `body` on 127.0.0.1: the first `cuts` answers break off half-way; yields (url, log).

    log has the Range header of each request. `lie` is served in place of `body` from /lie; /moved
    redirects; an answer comes after `pause` seconds.
    """
    log, left = [], [cuts]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            log.append(self.headers.get('Range'))
            if self.path.startswith('/moved'):
                self.send_response(302)
                self.send_header('Location', self.path.replace('moved', 'here'))
                self.send_header('Content-Length', '0')
                return self.end_headers()
            time.sleep(pause)
            data, first = (lie if self.path.startswith('/lie') else body), 0
            if ranges and log[-1]:
                first = int(log[-1][6:-1])
                if first >= len(data):
                    return self.send_error(416)
                self.send_response(206)
                self.send_header('Content-Range', f'bytes {first}-{len(data) - 1}/{len(data)}')
            else:
                self.send_response(200)
            self.send_header('Content-Length', str(len(data) - first))
            self.end_headers()
            end = first + (len(data) - first) // 2 if left[0] > 0 else len(data)
            left[0] -= 1
            self.wfile.write(data[first:end])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.handle_error = lambda *_: None  # a client that hung up
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with unittest.mock.patch.object(prepare_data, 'PAUSE', 0):
            yield f'http://127.0.0.1:{server.server_port}/', log
    finally:
        server.shutdown()
        server.server_close()

def fetch(urls, path, size, digest):
    """prepare_data.fetch, quietly; returns what it said on stderr, '' for success."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            prepare_data.fetch(urls, path, size, digest)
        except SystemExit as e:
            assert e.code == 2 and err.getvalue().count('\n') == 1, err.getvalue()
    return err.getvalue()

PROSE = 'Zwölf Boxkämpfer — 日本 🎉\r\n\n  jagen\tViktor <|endoftext|> \x00\n' * 200

def test_prepare_bytes_are_utf8():
    encoder = prepare_data.get_tokenizer('bytes')
    for text in '', 'a', PROSE, ' ' * 500, '\n\n x\n', ''.join(map(chr, range(0xd800))):
        assert encoder.encode_ordinary(text) == list(text.encode()), text[:40]
        for size in 1, 7, 64:
            assert ''.join(prepare_data.pieces(io.StringIO(text, newline=''), size)) == text

def test_prepare_pieces_keep_the_tokens():
    # GPT-2's pattern, and merges that make a token of every pair of characters inside a match
    import tiktoken
    pairs = [bytes([a, b]) for a in range(128) for b in range(128)]
    encoder = tiktoken.Encoding(
        'pairs', special_tokens={}, mergeable_ranks={
            token: i for i, token in enumerate([bytes([i]) for i in range(256)] + pairs)},
        pat_str=r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    rng = np.random.default_rng(0)
    for text in PROSE, ''.join(rng.choice(list("ab'1.  \n\n\r\t\x1c\x85\u3000é"), 20_000)):
        whole = encoder.encode_ordinary(text)
        for size in 50, 333, 1000:
            cut = list(prepare_data.pieces(io.StringIO(text, newline=''), size))
            assert len(cut) > len(text) / size / 2
            assert [t for piece in cut for t in encoder.encode_ordinary(piece)] == whole, size

def test_prepare_text():
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        (d / 'some.notes.txt').write_bytes(PROSE.encode())
        run = 'text', d / 'some.notes.txt', '--data_dir', d / 'data', '--tokenizer=bytes'
        meta, _ = prepare(*run)
        folder, cut = d / 'data' / 'some.notes', int(0.9 * len(PROSE))
        parts = {'train': PROSE[:cut].encode(), 'val': PROSE[cut:].encode()}
        counts = {split: len(part) for split, part in parts.items()}
        for split, part in parts.items():
            assert np.fromfile(folder / f'{split}.bin', '<u2').astype(np.uint8).tobytes() == part
        assert meta == json.loads((folder / 'meta.json').read_text())
        assert (meta['tokenizer'], meta['vocab_size']) == ('bytes', 256)
        assert meta['tokens'] == meta['bytes'] == counts
        assert {p.name for p in folder.iterdir()} == {'train.bin', 'val.bin', 'meta.json'}
        # again: no work; a changed file: new tokens; a failure or Ctrl-C: what was there stays
        with unittest.mock.patch.object(prepare_data, 'write_bins', None):
            assert prepare(*run) == (meta, None)
        (d / 'some.notes.txt').write_bytes(b'changed' * 10)
        before = tree(d / 'data')
        for error, code in (KeyboardInterrupt, 130), (OSError(28, 'No space left'), 2):
            with unittest.mock.patch.object(prepare_data, 'meter', side_effect=error):
                refused('interrupted' if code == 130 else 'No space left', *run, code=code)
        assert tree(d / 'data') == before
        with unittest.mock.patch('os.replace', side_effect=OSError(5, 'worst moment')):
            refused('worst moment', *run)  # then there is no dataset, but not half a one either
        assert prepare_data.prepared(folder) is None
        assert prepare(*run)[0]['tokens'] == {'train': 63, 'val': 7}
        assert prepare('--list', '--data-dir', d / 'data')[0]['shakespeare'] is None
        if prepare_data.fcntl:
            (d / 'some.notes.txt').write_bytes(PROSE.encode())
            with prepare_data.workshop(folder):
                refused('another prepare_data.py', *run)

def test_prepare_refuses():
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        for name, data in ('empty', b''), ('tiny', b'abc'), ('latin', 'é'.encode('latin-1') * 99):
            (d / name).write_bytes(data)
        data = '--data-dir', d / 'data', '--tokenizer', 'bytes'
        refused('longer', 'text', d / 'empty', *data)
        refused('longer', 'text', d / 'tiny', *data)
        refused('utf-8', 'text', d / 'latin', *data)
        refused('no file', 'text', d, *data)
        refused('no file', 'text', d / 'missing', *data)
        refused('FILE', 'text', *data)
        refused('letters', 'text', d / 'latin', '--name', '../x', *data)
        refused('other dataset', 'text', d / 'latin', '--name', 'fineweb', *data)
        refused('takes no FILE', 'shakespeare', d / 'latin', *data)
        refused('where 1,115,394', 'shakespeare', '--from', d / 'latin', *data)
        refused('name the folder', 'fineweb', '--from', d / 'latin', '--data-dir', d / 'data')
        refused('leave the flag', 'fineweb', *data)
        refused('name a dataset')
        refused('no file', 'text', *data, d / 'missing')
        refused('invalid choice', 'imagenets')
        refused('image-net.org', 'imagenet')
        refused('unrecognized', 'shakespeare', '--tok', 'bytes')
        refused('--tokenizer', 'shakespeare', '--tokenizer', 'words')
        refused('1 to 21', 'openwebtext', '--subsets', '22')
        refused('use 1 to 1', 'shakespeare', '--shards', '2')
        assert not any((d / 'data').glob('*')), 'a refusal left something behind'
        with unittest.mock.patch('tiktoken.get_encoding', side_effect=ConnectionError('a\nb')):
            refused('TIKTOKEN_CACHE_DIR', 'text', d / 'tiny', '--data-dir', d / 'data')
        (d / 'file').write_text('')
        refused('file', 'text', d / 'latin', '--tokenizer', 'bytes', '--data-dir', d / 'file')
        (d / 'data' / 'tiny').mkdir(parents=True)
        (d / 'data' / 'tiny' / 'train.bin').write_bytes(b'by hand')
        (d / 'tiny').write_bytes(b'text' * 99)
        refused('from elsewhere', 'text', d / 'tiny', *data)
        assert (d / 'data' / 'tiny' / 'train.bin').read_bytes() == b'by hand'

def test_prepare_fetch():
    body = np.random.default_rng(0).bytes(500_000)
    size, digest = len(body), 'sha256:' + hashlib.sha256(body).hexdigest()
    with tempfile.TemporaryDirectory() as d:
        path, part = pathlib.Path(d, 'a.bin'), pathlib.Path(d, 'a.bin.part')
        for known in (size, digest), (None, None):
            with serving(body, cuts=2) as (url, log):  # cut twice, resumed twice
                assert fetch([url], path, *known) == '' and path.read_bytes() == body
                assert log[0] is None and len(log) == 3 and 'bytes=0-' < log[1] < log[2], log
        with serving(body, cuts=1, ranges=False) as (url, log):  # Range ignored: from the start
            assert fetch([url], path, size, digest) == '' and path.read_bytes() == body
        part.write_bytes(body + b'!')
        with serving(body) as (url, log):  # 416: from the start
            assert fetch([url], path, size, digest) == '' and path.read_bytes() == body
            assert log == [f'bytes={size + 1}-', None] and not part.exists()
        path.unlink()
        with serving(body, lie=body[:-1] + b'?') as (url, log):  # a mirror with another file
            said = fetch([url + 'lie'], path, size, digest)
            assert digest[7:] in said and hashlib.sha256(body[:-1] + b'?').hexdigest() in said
            assert not path.exists() and not part.exists() and len(log) == 1
            assert fetch([url + 'lie', url], path, size, digest) == ''
            path.unlink()
        with serving(body, lie=b'<html>log in first</html>') as (url, log):
            assert '25 bytes where 500,000' in fetch([url + 'lie'], path, size, digest)
            assert fetch([url + 'lie', url], path, size, digest) == ''
            path.unlink()
        with serving(body, cuts=99) as (url, log):  # given up: the part stays, to go on from
            assert 'ChunkedEncodingError' in fetch([url], path, size, digest)
            assert part.stat().st_size > size / 2 and not path.exists()
        with serving(body) as (url, log), unittest.mock.patch.dict(
                prepare_data.DATASETS['shakespeare'], files=[([url + 'input.txt'], size, digest)]):
            run = 'shakespeare', '--data-dir', d, '--tokenizer', 'bytes'
            refused('utf-8', *run)  # random bytes are no text; the download stays
            assert pathlib.Path(d, 'shakespeare', 'download', 'input.txt').read_bytes() == body
            refused('utf-8', *run)
            assert len(log) == 1, 'the kept download was fetched again'

def test_prepare_servers():
    """One that redirects, is slow, says nothing at all, or does not come to an end."""
    body = b'to be or not to be\n' * 25000
    with tempfile.TemporaryDirectory() as d:
        path = pathlib.Path(d, 'a.bin')
        with serving(body, cuts=1) as (url, log):
            assert fetch([url + 'moved'], path, len(body), None) == '' and path.read_bytes() == body
            assert len(log) == 4 and log[2] == log[3] > 'bytes=0-', log  # asked again, the rest
        with serving(body, pause=0.3) as (url, log):
            assert fetch([url], path, len(body), None) == '' and len(log) == 1
            path.unlink()
            with unittest.mock.patch.object(prepare_data, 'TIMEOUT', 0.05):
                assert 'ReadTimeout' in fetch([url], path, len(body), None)
            assert len(log) == 1 + prepare_data.ATTEMPTS and not path.exists()
        answer = types.SimpleNamespace(status_code=200, headers={},
                                       iter_content=lambda _: itertools.repeat(b'x', 99))
        with unittest.mock.patch('requests.get', lambda *_, **__: contextlib.nullcontext(answer)):
            assert '4 bytes where 3' in fetch(['endless'], path, 3, None)  # and no byte more
            answer.headers, answer.iter_content = {'Content-Length': '99'}, None  # not one byte
            assert '99 bytes where 3' in fetch(['another'], path, 3, None)

def test_prepare_two_at_once():
    """Two processes that prepare the same data: one does it, the other is told so or finds it."""
    body = b'to be or not to be\n' * 5000
    with tempfile.TemporaryDirectory() as d, serving(body, pause=1) as (url, log):
        argv = ['shakespeare', '--tokenizer', 'bytes', '--data-dir', d]
        script = ('import prepare_data as p; p.DATASETS["shakespeare"].update('
                  f'files=[(["{url}"], {len(body)}, None)]); p.main({argv})')
        both = [subprocess.Popen([sys.executable, '-c', script], cwd=HERE, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        said = [p.communicate(timeout=60) for p in both]
        assert min(p.returncode for p in both) == 0 and len(log) == 1, said
        assert all(p.returncode == 0 or err.count('\n') == 1 for p, (_, err) in zip(both, said))
        assert prepare_data.prepared(pathlib.Path(d, 'shakespeare'))

def test_prepare_archives():
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        data = '--data-dir', d / 'data', '--tokenizer', 'bytes', '--no-verify'
        with zipfile.ZipFile(d / 'w.zip', 'w') as z:
            z.writestr('../../evil', 'evil')
            z.writestr('wikitext-2-raw/wiki.train.raw', PROSE)
            assert prepare('wikitext-2', '--from', d / 'w.zip', *data)[1] == 2  # no valid split
            z.writestr('wikitext-2-raw/wiki.valid.raw', 'valid \n')
        meta, _ = prepare('wikitext-2', '--from', d / 'w.zip', *data)
        assert meta['tokens'] == {'train': len(PROSE.encode()), 'val': 7}, meta
        assert 'unverified' in meta['source']
        pages = [f'page {i} of some' for i in range(2001)]
        half = [tar_of([('../../evil.txt', b'\n a\n\n\n\nb '), ('/etc/evil', None)]
                       + [(f'{i}.txt', page.encode()) for i, page in enumerate(part)])
                for part in (pages[:1000], pages[1000:])]
        (d / 'o.tar').write_bytes(tar_of([
            ('../../../evil.xz', None), ('../evil.xz', lzma.compress(half[0])),
            ('owt/2.xz', lzma.compress(half[1])), ('evil.pickle', b'cos\nsystem\n.')]))
        meta, _ = prepare('openwebtext', '--from', d / 'o.tar', *data[:-1])
        bins = {s: np.fromfile(d / f'data/openwebtext/{s}.bin', '<u2').astype(np.uint8).tobytes()
                for s in ('train', 'val')}
        documents = ['a\n\nb'] + pages[:1000] + ['a\n\nb'] + pages[1000:]
        assert bins['val'].decode() == ''.join(f'{documents[i]}\n\n' for i in (0, 2000))
        documents = [x for i, x in enumerate(documents) if i % 2000]
        assert bins['train'].decode() == ''.join(f'{x}\n\n' for x in documents)
        whole, before = (d / 'o.tar').read_bytes(), tree(d / 'data')
        end = whole.index(b'evil.pickle')
        at = whole.index(b'\xfd7zXZ') + 300
        flip = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:]
        cuts = [whole[:n] for n in (100, 512, 1024, 2000, end - 100, end)]
        for bad in (b'', b'<html>' * 999, flip, *cuts):
            (d / 'bad').write_bytes(bad)
            refused('name a whole file', 'openwebtext', '--from', d / 'bad', *data[:-1])
        assert tree(d / 'data') == before
        assert {p.name for p in d.iterdir()} == {'data', 'w.zip', 'o.tar', 'bad'}

def test_prepare_cifar():
    def record(i, labels):
        return bytes(labels) + bytes([i, i + 1, i + 2]) * 1024

    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        for name, folder, parts, meta, labels in (
                ('cifar10', 'cifar-10-batches-bin', [f'data_batch_{i}.bin' for i in range(1, 6)]
                 + ['test_batch.bin'], 'batches.meta.txt', [7]),
                ('cifar100', 'cifar-100-binary', ['train.bin', 'test.bin'],
                 'fine_label_names.txt', [3, 7])):
            members = [(f'{folder}/{part}', record(i, labels) + record(i + 9, labels))
                       for i, part in enumerate(parts)]
            members += [(f'{folder}/{meta}', b'cat\ndog\n\n'), ('../evil', b'evil')]
            whole = gzip.compress(tar_of(members))
            (d / 'c.tar.gz').write_bytes(whole)
            run = name, '--from', d / 'c.tar.gz', '--data-dir', d / 'data'
            refused('where', *run)  # its size and md5 are not the official ones
            meta, _ = prepare(*run, '--no-verify')
            assert meta['classes'] == ['cat', 'dog'] and 'unverified' in meta['source']
            assert meta['images'] == {'train': 2 * len(parts) - 2, 'test': 2}
            with np.load(d / 'data' / name / 'test.npz', allow_pickle=False) as z:
                assert z['labels'].tolist() == [7, 7] and z['labels'].dtype == np.int64
                assert z['images'].shape == (2, 3, 32, 32) and z['images'].dtype == np.uint8
                data = bytes(z['images'][1].ravel())
                assert data == record(len(parts) + 8, [])
            assert prepare(*run, '--no-verify')[0] == meta  # nothing left to do
            (d / 'data' / name / 'test.npz').unlink()
            assert prepare_data.prepared(d / 'data' / name) is None
            assert prepare(*run, '--no-verify')[0] == meta
            before = tree(d / 'data')
            for bad in (whole[:-20], whole[:200], b'<html>', gzip.compress(tar_of(members[1:])),
                        gzip.compress(tar_of([(members[0][0], b'short')] + members[1:]))):
                (d / 'c.tar.gz').write_bytes(bad)
                refused('c.tar.gz', *run, '--no-verify')
            assert tree(d / 'data') == before
        assert {p.name for p in d.iterdir()} == {'data', 'c.tar.gz'}

def test_prepare_fineweb():
    def shard(magic=20240520, version=1, count=1000, top=50256):
        header = np.zeros(256, '<i4')
        header[:3] = magic, version, count
        return header.tobytes() + np.linspace(0, top, 1000).astype('<u2').tobytes()

    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        run = 'fineweb', '--from', d, '--no-verify', '--shards', '2', '--data-dir', d / 'data'
        (d / 'fineweb_val_000000.bin').write_bytes(shard())
        (d / 'fineweb_train_000002.bin').write_bytes(shard())
        for bad in (shard(magic=20240801), shard(version=7), shard(count=999), shard(count=-500),
                    shard(top=50257), shard()[:-1], shard()[:100], b''):
            (d / 'fineweb_train_000001.bin').write_bytes(bad)
            refused('fineweb_train_000001.bin', *run)
            assert not (d / 'data' / 'fineweb').exists()
        (d / 'fineweb_train_000001.bin').write_bytes(shard())
        meta, _ = prepare(*run)
        assert meta['tokens'] == {'train': 2000, 'val': 1000} and 'bytes' not in meta
        assert (meta['tokenizer'], meta['vocab_size']) == ('gpt2', 50257)
        assert (d / 'data/fineweb/val.bin').read_bytes() == shard()[1024:]
        assert (d / 'data/fineweb/train.bin').read_bytes() == 2 * shard()[1024:]

def test_prepare_imagenette():
    def photo(split, label, file, data=b'photo'):
        return f'imagenette2-160/{split}/{label}/{file}', data

    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        labels = prepare_data.IMAGENETTE
        members = [photo(split, label, f'{split}_{i}.JPEG', f'{split} {label} {i}'.encode())
                   for split, n in (('train', 3), ('val', 2)) for label in labels for i in range(n)]
        evil = [('../evil.JPEG', b'x'), photo('x/train', 'n01440764', 'evil.JPEG'),
                ('x/' + photo('train', 'n01440764', 'x.JPEG')[0], b'x'), ('/etc/evil', b'x'),
                photo('train', '..', 'evil.JPEG'),
                photo('train', 'n01440764', '../../../../evil.JPEG'), ('a.csv', b''),
                photo('train', 'n99999999', 'x.JPEG'), photo('test', 'n01440764', 'x.JPEG'),
                photo('train', 'n01440764', 'link.JPEG', None), photo('val', 'n01440764', 'x.pkl')]
        whole = gzip.compress(tar_of(evil + members))
        run = 'imagenette', '--data-dir', d / 'data'
        (d / 'i.tgz').write_bytes(whole)
        refused('where 99,003,388', *run, '--from', d / 'i.tgz')
        with serving(whole, cuts=1) as (url, log), unittest.mock.patch.dict(
                prepare_data.DATASETS['imagenette'], files=[
                    ([url + 'i.tgz'], len(whole), 'md5:' + hashlib.md5(whole).hexdigest())]):
            meta, _ = prepare(*run)
            assert meta['images'] == {'train': 30, 'val': 20} and len(log) == 2, (meta, log)
            with unittest.mock.patch.object(prepare_data, 'photos', None):
                assert prepare(*run)[0] == meta  # nothing left to do
        root = d / 'data' / 'imagenette'
        assert {p.name for p in root.iterdir()} == {'train', 'val', 'meta.json', 'download'}
        found = {'/'.join(p.parts): data for p, data in tree(root).items() if p.suffix == '.JPEG'}
        assert found == {f'{split}/{name}/{split}_{i}.JPEG': f'{split} {label} {i}'.encode()
                         for split, n in (('train', 3), ('val', 2)) for label, name in
                         labels.items() for i in range(n)}
        images, test, names = vit.load_folders(root)  # what belief_vit.py --data makes of it
        assert names == sorted(labels.values()) and len(images[1]) == 30 and len(test[1]) == 20
        before = tree(d / 'data')
        for bad in (b'', b'<html>', whole[:-3], whole[:-20], whole[:99],
                    gzip.compress(tar_of(members[:-2]))):
            (d / 'i.tgz').write_bytes(bad)
            refused('i.tgz', *run, '--from', d / 'i.tgz', '--no-verify')
        assert tree(d / 'data') == before
        (d / 'i.tgz').write_bytes(gzip.compress(tar_of(members[1:])))  # a new one takes its place
        assert prepare(*run, '--from', d / 'i.tgz', '--no-verify')[0]['images']['train'] == 29
        assert not (root / 'train' / 'tench' / 'train_0.JPEG').exists()
        (d / 'j.tgz').write_bytes(gzip.compress(tar_of([
            (name.replace('-160', '-320'), data) for name, data in members])))
        refused('i.tgz', 'imagenette-320', *run[1:], '--from', d / 'i.tgz', '--no-verify')
        assert prepare('imagenette-320', *run[1:], '--from', d / 'j.tgz', '--no-verify')[1] is None
        assert {p.name for p in d.iterdir()} == {'data', 'i.tgz', 'j.tgz'}

def test_prepare_coco():
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        names = {split: [f'{split}/{i:012d}.jpg' for i in range(n)]
                 for split, n in (('val2017', 3), ('train2017', 4))}
        with zipfile.ZipFile(d / 'annotations_trainval2017.zip', 'w') as z:
            for split in names:
                z.writestr(f'annotations/instances_{split}.json', json.dumps(split))
                z.writestr(f'annotations/captions_{split}.json', 'x' * 999)
        for split, photos in names.items():
            with zipfile.ZipFile(d / f'{split}.zip', 'w') as z:
                for name in ('../evil.jpg', f'{split}/../000000000001.jpg', '/evil.jpg',
                             f'{split}/x.jpg', 'test2017/000000000001.jpg', f'{split}/',
                             f'x/{split}/000000000009.jpg'):
                    z.writestr(name, 'evil')
                for name in photos:
                    z.writestr(name, name)
        run = 'coco', '--data-dir', d / 'data', '--from', d
        root = d / 'data' / 'coco'
        refused('where 252,907,541', *run)
        refused('name the folder', *run[:-1], d / 'val2017.zip', '--no-verify')
        refused('--split', *run, '--split', 'test')
        refused('--split train', 'cifar10', '--split', 'train')
        for flags, splits in ((), ['val2017']), (('--split', 'train'), ['val2017', 'train2017']):
            meta, why = prepare(*run, '--no-verify', *flags)
            assert meta['images'] == {split: len(names[split]) for split in splits}, (meta, why)
            found = {'/'.join(p.parts): data.decode() for p, data in tree(root).items()}
            del found['meta.json']
            assert found == {
                **{name: name for split in splits for name in names[split]},
                **{f'annotations/instances_{split}.json': f'"{split}"' for split in splits}}, found
            with unittest.mock.patch.object(prepare_data, 'photos', None):
                assert prepare(*run, '--no-verify', *flags)[0] == meta
        before = tree(d / 'data')
        with zipfile.ZipFile(d / 'empty.zip', 'w'):
            pass
        whole, empty = (d / 'val2017.zip').read_bytes(), (d / 'empty.zip').read_bytes()
        flip = whole.replace(b'val2017/000000000002.jpgval', b'val2017/000000000002.jpgvil')
        assert flip != whole
        for says, bad in (('beside it', b''), ('beside it', whole[:-30]), ('beside it', b'<html>'),
                          ('CRC', flip), ('no photo of val2017', empty)):
            (d / 'val2017.zip').write_bytes(bad)
            refused(says, *run, '--no-verify')
        (d / 'val2017.zip').write_bytes(whole)
        boxes = (d / 'annotations_trainval2017.zip').read_bytes()
        (d / 'annotations_trainval2017.zip').write_bytes(empty)
        refused('or one beside it', *run, '--no-verify')
        assert tree(d / 'data') == before
        with contextlib.ExitStack() as stack:  # the same from a server for each archive
            files = []
            for name, data in ('annotations_trainval2017.zip', boxes), ('val2017.zip', whole):
                url, _ = stack.enter_context(serving(data, cuts=1))
                files.append(([url + name], len(data), 'md5:' + hashlib.md5(data).hexdigest()))
            stack.enter_context(unittest.mock.patch.dict(
                prepare_data.DATASETS['coco'], files=files))
            assert prepare('coco', '--data-dir', d / 'new')[0]['images'] == {'val2017': 3}
        assert {p.name for p in (d / 'new' / 'coco').iterdir()} == {
            'val2017', 'annotations', 'meta.json', 'download'}

def test_prepare_weights():
    with tempfile.TemporaryDirectory() as d:
        d, body = pathlib.Path(d), np.random.default_rng(0).bytes(100_000)
        digest, data = hashlib.sha256(body).hexdigest(), ('--data-dir', d / 'data')
        (d / 'w').write_bytes(body)
        for name, file in (('detr-r50', 'detr-r50.pth'), ('resnet50', 'resnet50.pth'),
                           ('gpt2', 'gpt2/model.safetensors')):
            refused('sha256' if name == 'detr-r50' else 'bytes where', name, '--from', d / 'w',
                    *data)
            refused('leave the flag', name, '--tokenizer', 'gpt2', *data)
            refused('leave the flag', name, '--name', 'mine', *data)
            path = d / 'data' / 'weights' / file
            assert not path.exists()
            with serving(body, cuts=1, lie=body[:-1] + b'?') as (url, log):
                files = lambda at: unittest.mock.patch.dict(
                    prepare_data.DATASETS[name], files=[([at], None, 'sha256:' + digest[:8])])
                with files(url + 'lie'):
                    refused(digest[:8], name, *data)
                    assert not path.exists()
                with files(url + file):
                    meta, why = prepare(name, *data)
                    assert why is None and path.read_bytes() == body, why
                    requests = len(log)
                    assert prepare(name, *data)[0] == meta and len(log) == requests
                    assert prepare('--list', *data)[0][name] == {'file': str(path)}
                    path.write_bytes(b'broken')
                    assert prepare(name, *data)[1] is None and path.read_bytes() == body
            (d / 'w').write_bytes(b'mine')
            meta, _ = prepare(name, '--from', d / 'w', '--no-verify', *data)
            assert path.read_bytes() == b'mine' and 'unverified' in meta['source']
            (d / 'w').write_bytes(body)
        assert len(tree(d / 'data')) == 3
        # nothing but the file's bytes was looked at: a pickle that would run something stays one
        (d / 'w').write_bytes(b"cos\nsystem\n(S'touch " + str(d / 'evil').encode() + b"'\ntR.")
        assert prepare('detr-r50', '--from', d / 'w', '--no-verify', *data)[1] is None
        assert not (d / 'evil').exists()

# ------------------------------------ soak ------------------------------------
# Only with --soak. Every process is a fork of this one, which has the scripts imported.

def forked(function, *args):
    """function(*args) in a process of its own -> its id, where to read its standard error."""
    out, into = os.pipe()
    if pid := os.fork():
        os.close(into)
        return pid, out
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(into, 2)
        sys.stdout, sys.stderr = open(1, 'w', closefd=False), open(2, 'w', closefd=False)
        function(*args)
        code = 0
    except SystemExit as e:
        code = e.code
    finally:
        os._exit(code)

def ended(pid, out):
    """Wait for a forked process -> exit code (a signal's number below zero), standard error."""
    with open(out, errors='replace') as f:
        err = f.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), err

def soak_kills(n=50):
    """n SIGKILLs at random moments of each script's training, --resume auto: as if undisturbed."""
    rng = np.random.default_rng(0)
    with folder() as path:
        for script, flags in small_runs(path).items():
            kills, steps = 0, set()
            for seed in itertools.count():
                clock = time.time()
                common = [*map(str, flags), '--max-iters', '400', '--eval-interval', '10',
                          '--seed', str(seed)]
                whole, part = (path / f'{script.SCRIPT}-{seed}-{name}' for name in ('a', 'b'))
                code, err = ended(*forked(script.main, [*common, '--out-dir', str(whole)]))
                assert code == 0, err
                seconds, code = time.time() - clock, None
                while code != 0:
                    child = forked(script.main, [*common, '--out-dir', str(part), '--resume',
                                                 'auto'])
                    if kills < n:
                        time.sleep(rng.uniform(0, seconds / 2))
                        os.kill(child[0], signal.SIGKILL)
                    code, err = ended(*child)
                    assert code in (0, -signal.SIGKILL) and not err, (code, err)
                    kills += code != 0
                    for found in part.glob('*/*-s[0-9]*/ckpt.pt'):
                        steps.add(script.load_checkpoint(found)['progress'][0])
                a, b = (script.load_checkpoint(next(base.glob('*/*-s[0-9]*/ckpt.pt')))
                        for base in (whole, part))
                assert same(a['model'], b['model']) and a['progress'][0] == b['progress'][0] == 400
                if kills == n:
                    break
            print(f'  {script.SCRIPT}: {kills} kills in {seed + 1} runs, {len(steps)} different '
                  'steps to go on from, final weights equal bit for bit')

def soak_saves(n=200):
    """n SIGKILLs while checkpoints are being written one after the other: a whole one is there."""
    def write(path, script):
        for i in itertools.count():
            script.save_checkpoint(path, dict(config={}, progress=json.dumps([i, 0, [], []]),
                                              model=dict(w=torch.full((500_000,), float(i)))))
    with folder() as path:
        rng, seen = np.random.default_rng(0), set()
        for i in range(n):
            pid, out = forked(write, path / 'ckpt.pt', gpt)
            while not (path / 'ckpt.pt').exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            ended(pid, out)
            state = gpt.load_checkpoint(path / 'ckpt.pt')
            assert (state['model']['w'] == state['progress'][0]).all()
            seen.add((path / 'ckpt.tmp').exists())
        assert len(seen) == 2  # some in the middle of a file, some between two
        print(f'  {n} kills, no unreadable checkpoint')

def soak_full_disk(n=10):
    """Files may grow to n different sizes and no further: one line, exit 2, the old run intact."""
    import resource
    def limited(script, flags, size):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        script.main(flags)
    with folder() as path:
        for script, flags in small_runs(path).items():
            flags = [str(f) for f in (*flags, '--max-iters', 10)]
            assert ended(*forked(script.main, flags))[0] == 0
            checkpoint = next((path / 'out' / script.SCRIPT).glob('*-s[0-9]*/ckpt.pt'))
            for limit in np.linspace(0, checkpoint.stat().st_size - 1, n).astype(int):
                code, err = ended(*forked(limited, script, [
                    *flags, '--resume', '--max-iters', '20'], int(limit)))
                assert code == 2 and err.count('\n') == 1 and 'Traceback' not in err, (limit, err)
                assert script.load_checkpoint(checkpoint)['progress'][0] == 10
            print(f'  {script.SCRIPT}: {n} limits, {n} refusals in one line, old checkpoint intact')

# ------------------------------------ runner ------------------------------------

def main(words):
    if {'-h', '--help'} & {*words}:
        print(__doc__)
        return 0
    kind = 'soak_' if '--soak' in words else 'test_'
    words = [word for word in words if word != '--soak']
    tests = [(name, f) for name, f in list(globals().items()) if name.startswith(kind)
             and (not words or any(word in name for word in words))]
    counts = dict.fromkeys(('passed', 'failed', 'skipped'), 0)
    for name, f in tests:
        clock, why = time.time(), ''
        try:
            f()
            status = 'passed'
        except unittest.SkipTest as e:
            status, why = 'skipped', f': {e}'
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            status, why = 'failed', ':\n' + traceback.format_exc()
        counts[status] += 1
        print(f'{name} {status} ({time.time() - clock:.1f} s){why}', flush=True)
    print(', '.join(f'{n} {status}' for status, n in counts.items()))
    return 1 if counts['failed'] or not counts['passed'] else 0

if __name__ == '__main__':
    raise SystemExit(main(sys.argv[1:]))
