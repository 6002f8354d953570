"""Every test of the repository, on CPU and, where there is one, on a GPU.

    python test_all.py                 # all of them
    python test_all.py belief resume   # those with one of these words in their name
    python test_all.py --soak          # hundreds of kills and full disks instead, some minutes
    pytest test_all.py                 # the same tests, if you have pytest

No network, no files but this repository's, nothing written outside temporary folders.
"""
import contextlib, csv, dataclasses, functools, gzip, hashlib, http.server, inspect, io, itertools
import json, lzma, math, os, pathlib, re, signal, struct, subprocess, sys, tarfile, tempfile
import threading, time, traceback, unittest, unittest.mock, zipfile, zlib

os.environ.setdefault('OMP_NUM_THREADS', '1')  # tiny tensors: threads only wait for each other
import numpy as np
import torch
from torch.nn import functional as F

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import attentionx_gpt as gpt
import belief_vit as vit
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
            '--batch-size', 4, '--max-iters', 6, '--eval-interval', 3, '--eval-iters', 2,
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
    """The same windows every time; the mean over positions is the loss; bits follow from nats."""
    with folder() as path:
        (path / 't.txt').write_text(TEXT)
        task = gpt.Task(config(vocab_size=0, data=str(path / 't.txt'), batch_size=3, eval_iters=2))
        a, b = task.evaluate(), task.evaluate()
        assert a == b and abs(a['val_bpb'] - a['val_loss'] / math.log(2)) < 1e-9
        x, y = gpt.windows(task.text.val, task.val_starts, task.config, task.device)
        close(task.model(x, y)[1], a['val_loss'], 1e-5)
        assert len(task.by_position) == 16 and len(task.val_starts) == 6
        assert (task.val_starts[0], task.val_starts[-1]) == (0, len(task.text.val) - 17)
        task.text.bytes_per_token = 4.0
        assert abs(task.evaluate()['val_bpb'] - a['val_bpb'] / 4) < 1e-9

# ------------------------------------ harness ------------------------------------

def block(name, kind):
    text = (HERE / name).read_text('utf-8')
    return re.search(rf'# --- {kind} .*?\n(.*)# --- end of {kind}\n', text, re.S)[1]

def test_shared_blocks_identical():
    for kind, most in (('harness', 220), ('workbench', 240)):
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

def test_flags_have_help():
    flags = gpt.flags()
    assert set(flags) == {f.name for f in dataclasses.fields(gpt.Config)}
    assert all(len(words) > 3 for *_, words in flags.values())
    for preset in gpt.PRESETS.values():
        gpt.Config(**preset)
    code, out, _, _ = run('--help')
    assert code == 0 and all('--' + name.replace('_', '-') in out for name in flags)

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
    """Whatever stands in a checkpoint's place: one line, exit 2, nothing executed."""
    with folder() as path:
        good = run(*tiny(path, '--max-iters', 1))[3]['folder'] / 'ckpt.pt'
        data, bad = good.read_bytes(), path / 'bad.pt'
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(path / 'executed'),)
        cases = [b'', b'<html>', data[:len(data) // 2], data[:-1], data[1:]]
        for at in np.random.default_rng(0).integers(len(data), size=25):
            cases.append(data[:at] + bytes([data[at] ^ 16]) + data[at + 1:])
        original = torch.load(good, weights_only=True)
        for case in cases:
            bad.write_bytes(case)
            code, _, err, _ = run('sample', '--resume', bad, '--max-new-tokens', 1)
            if code == 0:  # the flipped bit lies in padding: what was read must be what was written
                assert same(torch.load(bad, weights_only=True)['model'], original['model'])
            else:
                assert code == 2 and err.count('\n') == 1 and 'bad.pt' in err, err
        for state in ({'script': 'belief_vit', 'model': {}}, {'model': {}}, [1, 2], Evil(),
                      {'script': 'attentionx_gpt', 'x': Evil()}):
            torch.save(state, bad)
            refuse(['bad.pt'], 'sample', '--resume', bad)
        assert not (path / 'executed').exists()
        refuse(['nowhere'], 'sample', '--resume', path / 'nowhere.pt')
        refuse(['no run'], 'sample', '--out-dir', path / 'nowhere')

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
    loss = gpt.Task.loss
    def broken(self, model, batch):
        self.calls = getattr(self, 'calls', 0) + 1
        return loss(self, model, batch) * (math.nan if self.calls == 5 else 1)
    with folder() as path:
        with unittest.mock.patch.object(gpt.Task, 'loss', broken):
            refuse(['step 4', 'nan', 'ckpt.pt', 'holds step 3'], *tiny(path))
        state = gpt.load_checkpoint(path / 'out/attentionx_gpt/attentionx-s1337/ckpt.pt')
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
        refuse(['--seeds', 'one'], 'compare', '--seeds', 'one', *tiny(path))
        refuse(['--rounds'], 'bench', '--rounds', 1, *tiny(path))
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
        edited = path / 'attentionx_gpt.py'
        edited.write_text((HERE / 'attentionx_gpt.py').read_text('utf-8') + '# edited\n', 'utf-8')
        with counting, unittest.mock.patch.object(gpt, '__file__', str(edited)):
            assert run(*flags)[0] == 0 and len(taken) == 8 * 6
        (path / 'text.txt').write_text(TEXT[::-1])  # other data, other runs
        taken.clear()
        with counting:
            assert run(*flags)[0] == 0 and len(taken) == 8 * 6

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

def test_two_processes():
    """torchrun with two processes takes the steps of one process at the same global batch."""
    with folder() as path:
        flags = [str(f) for f in tiny(path, '--grad-accum-steps', 2)]
        one = run(*flags)[3]
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone',
                   '--nproc-per-node', '2', str(HERE / 'attentionx_gpt.py'), *flags,
                   '--out-dir', str(path / 'two')]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count('validation loss') == 1
        two = weights(path / 'two/attentionx_gpt/attentionx-s1337')
        for key, p in weights(one['folder']).items():
            close(p, two[key], 1e-5)

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

def test_vit_same_method():
    """The functions that both scripts have are the same text."""
    for name in ('inner', 'ratio', 'orthogonal', 'softmax', 'attentionx', 'attentionx_v1', 'belief',
                 'belief_head', 'belief_star', 'softmax_scaled', 'value_skip', 'default_gamma'):
        assert inspect.getsource(getattr(gpt, name)) == inspect.getsource(getattr(vit, name)), name

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
        adam = vit.SETAdam([p], 0.01)
        p.grad = torch.ones_like(p)
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

def test_vit_evaluation():
    """Loss and accuracy over the whole split, in batches that need not divide it."""
    with folder() as path:
        vit_data(path / 'd')
        task = vit.Task(vit_config(data=str(path / 'd'), batch_size=7, val_fraction=0.3))
        logits = task.model.eval()(task.normalise(*[task.val[0]], 8))
        figures = task.evaluate()
        close(F.cross_entropy(logits, task.val[1]), figures['val_loss'], 1e-5)
        close((logits.argmax(1) == task.val[1]).double().mean(), figures['val_acc'], 1e-6)
        assert vit.linear_accuracy(task) > 0.9  # colours are easy

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
        flags = vit_tiny(path, '--lr', 0.01, '--val-fraction', 0.25, '--max-iters', 12)
        code, out, err, result = vit_run(*flags, '--first-size', 4, '--patch-size', 2,
                                     '--size-epochs', 2.0, '--attention', 'belief-star')
        assert code == 0 and result['test_acc'] == 1, (err, out)
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
        q, k, v = (t.transpose(1, 2) for t in attn.heads(net.blocks[0].norm1(x)))
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

def test_vit_attention_maps():
    """The class token's weights, from the whole matrix of scores, of each head."""
    images = vit_images(3)
    for name, zero_diag in (('vit-small', True), ('vit-small', False), ('deit-small', False)):
        net = vit_model(model=name, zero_diag=zero_diag, num_heads=2).double().eval()
        maps = vit.attention_maps(net, images)
        for i, (block, x) in enumerate(zip(net.blocks, vit.block_inputs(net, images))):
            q, k, _ = block.attn.heads(block.norm1(x))
            mean = 0
            for head in range(2):
                scores = q[:, :, head] @ k[:, :, head].mT / (1 if block.attn.config.shifted
                                                             else q.size(-1) ** 0.5)
                if zero_diag:
                    scores[:, torch.arange(5), torch.arange(5)] = -math.inf
                mean = mean + scores.softmax(-1)[:, 0, 1:] / 2
            close(maps[:, i].flatten(1), mean / mean.amax(1, keepdim=True), 1e-12)
        assert maps.shape == (3, len(net.blocks), 2, 2)

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

def test_vit_flags():
    flags = vit.flags()
    assert set(flags) == {f.name for f in dataclasses.fields(vit.Config)}
    assert all(len(words) > 3 for *_, words in flags.values())
    for preset in vit.PRESETS.values():
        vit.Config(**preset)
    code, out, _, _ = vit_run('--help')
    assert code == 0 and all('--' + name.replace('_', '-') in out for name in flags)
    text = open(vit.__file__, encoding='utf-8').read()
    _, docstring, code = text.split('"""', 2)
    tag = r'\[\w+ (?:Eq|Sec|Alg)\. [\d.]+\]'
    assert set(re.findall(tag, docstring)) == set(re.findall(tag, code)) != set()

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
    s, y, x = v if r[0] < 0.5 else -v, r[1] * H, r[2] * W
    if name == 'SolarizeAdd':
        more = np.clip(np.asarray(image) + v, 0, 255).astype(np.uint8)
        return ImageOps.solarize(Image.fromarray(more), 128)
    if name == 'Cutout':
        corners = max(0, x - v / 2), max(0, y - v / 2), min(W, x + v / 2), min(H, y + v / 2)
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
    'ShearY': 'dd455221a66a17f6', 'Cutout': '1cb010d667b722e6',
    'TranslateX': '6d7bd1fa33ee71b2', 'TranslateY': '6d7bd1fa33ee71b2',
    'none': 'b102961ef776987a', 'paper': 'd21a81948816df68',
    'fixed': 'fa58e7215127dfdd',
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
def serving(body, cuts=0, ranges=True, lie=b''):
    """Serve `body` on 127.0.0.1: the first `cuts` answers break off half-way; yields (url, log).

    log has the Range header of each request. `lie` is served in place of `body` from /lie.
    """
    log, left = [], [cuts]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            log.append(self.headers.get('Range'))
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
    encoder = prepare_data.load_tokenizer('bytes')
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
        refused('invalid choice', 'imagenet')
        refused('unrecognized', 'shakespeare', '--tok', 'bytes')
        refused('--tokenizer', 'shakespeare', '--tokenizer', 'words')
        refused('1 to 21', 'openwebtext', '--subsets', '22')
        refused('use 1 to 1', 'shakespeare', '--shards', '2')
        assert not any((d / 'data').glob('*')), 'a refusal left something behind'
        with unittest.mock.patch('tiktoken.get_encoding', side_effect=ConnectionError('a\nb')):
            refused('TIKTOKEN_CACHE_DIR', 'text', d / 'tiny', '--data-dir', d / 'data')
        (d / 'file').write_text('')
        refused('file', 'text', d / 'latin', '--tokenizer', 'bytes', '--data-dir', d / 'file')

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
        images, test, names, _ = vit.load_folders(root)  # what belief_vit.py --data makes of it
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

def soak_flags(path):
    """{script: flags of a run of some seconds that writes a checkpoint every few steps}"""
    vit_data(path / 'data')
    return {gpt: tiny(path, '--eval-interval', 5, '--dropout', 0.1),
            vit: vit_tiny(path, '--eval-interval', 5, '--dropout', 0.1)}

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
        for script, flags in soak_flags(path).items():
            kills, steps = 0, set()
            for seed in itertools.count():
                clock = time.time()
                common = [*map(str, flags), '--max-iters', '800', '--seed', str(seed)]
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
                    for found in part.rglob('ckpt.pt'):
                        steps.add(script.load_checkpoint(found)['progress'][0])
                a, b = (script.load_checkpoint(next(base.rglob('ckpt.pt')))
                        for base in (whole, part))
                assert same(a['model'], b['model']) and a['progress'][0] == b['progress'][0] == 800
                if kills == n:
                    break
            print(f'  {script.SCRIPT}: {kills} kills in {seed + 1} runs, {len(steps)} different '
                  'steps to go on from, final weights equal bit for bit')

def soak_saves(n=200):
    """n SIGKILLs while checkpoints are being written one after the other: a whole one is there."""
    def write(path, script):
        for i in itertools.count():
            script.save_checkpoint(path, dict(config={}, progress=json.dumps(i), model=dict(
                w=torch.full((500_000,), float(i)))))
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
            assert (state['model']['w'] == state['progress']).all()
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
        for script, flags in soak_flags(path).items():
            flags = [str(f) for f in (*flags, '--max-iters', 10)]
            assert ended(*forked(script.main, flags))[0] == 0
            checkpoint = next((path / 'out' / script.SCRIPT).rglob('ckpt.pt'))
            for limit in np.linspace(0, checkpoint.stat().st_size - 1, n).astype(int):
                code, err = ended(*forked(limited, script, [
                    *flags, '--resume', '--max-iters', '20'], int(limit)))
                assert code == 2 and err.count('\n') == 1 and 'Traceback' not in err, (limit, err)
                assert script.load_checkpoint(checkpoint)['progress'][0] == 10
            print(f'  {script.SCRIPT}: {n} limits, {n} refusals in one line, old checkpoint intact')

# ------------------------------------ runner ------------------------------------

def main(words):
    kind = 'soak_' if '--soak' in words else 'test_'
    words = [word for word in words if word != '--soak']
    tests = [(name, f) for name, f in list(globals().items()) if name.startswith(kind)
             and name != 'soak_flags' and (not words or any(word in name for word in words))]
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
