r"""Memory and time of attention: what masks save, how it scales with length, and DETR's Lasso.

    python experiments/memory.py --masks window:64+sinks:4 --n-layer 12 --n-head 12 \
        --n-embd 768 --vocab-size 50257 --block-size 2048  # GPT-2, with random weights
    python experiments/memory.py lengths  # a layer of GPT-2's size, 256 to 4096 tokens
    python experiments/memory.py lasso  # or lasso cuda

The first two compare three kinds of attention: eager, which stores T x T scores, and two that do
not, PyTorch's fused kernel and masks in blocks. The first takes a whole model in float32, whose
weights and logits need the same room in all three; by default a sequence has 1,024 tokens. The
second takes attention alone, forward and backward, and writes runs/lengths.csv, which figures.py
draws as scaling.png; the longest sequence has --block-size tokens. Flags are those of
mask_distill.py but --init. `lasso` takes a layer of DETR's size. Needs matplotlib and scipy.
"""
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import admm_detr
import compare
import figures
import mask_distill

def milliseconds(functions, rounds, device):
    """{name: median of some rounds}. The functions take turns, so that noise hits all alike."""
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, f in functions.items():
            begin = time.perf_counter()
            f()
            if device.type == 'cuda':
                torch.cuda.synchronize(device)
            times[name].append(1000 * (time.perf_counter() - begin))
    return {name: float(np.median(values)) for name, values in times.items()}

def peak(f, device):
    """The most MiB that f() holds at once. CUDA counts them. On a CPU, PyTorch's profiler lists the
    size of every allocation, negative for a release: the peak is their largest running sum."""
    if device.type == 'cuda':
        f()  # so that cuBLAS has its workspace
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    os.environ['KINETO_LOG_LEVEL'] = '99'  # some builds of the profiler talk
    with torch.profiler.profile(profile_memory=True) as profile:
        f()
    events = profile.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == '[memory]']
    return max(np.cumsum([size for _, size in sorted(sizes)])) / 2**20

# ------------------------------------ the report's masks ------------------------------------
KINDS = 'eager', 'fused', 'masks'

def eager(q, k, v):
    """In place of SelfAttention.attend: full attention that stores its scores."""
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (B, nh, T, T)
    future = torch.ones(S.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(S.masked_fill(future, -math.inf), -1) @ v

def turn(attn, kind, c):
    """Make a SelfAttention of mask_distill.py, which is fused, one of the three kinds."""
    if kind == 'eager':
        attn.attend = eager
    if kind == 'masks':
        attn.add_masks(c)
    return attn

def measure(model, c, device):
    """A whole model's peaks for one sequence, with its weights -> {name: MiB}.  [MA Sec. 2.4]"""
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    idx = torch.arange(c.block_size, device=device)[None] % c.vocab_size  # (1, T)

    def step():
        mask_distill.loss_of(model, (idx, idx), c).backward()
        model.zero_grad()

    @torch.no_grad()
    def infer():
        model(idx, last=True)

    return {'training step': peak(step, device) + weights,
            'inference': peak(infer, device) + weights}

def masks(argv):
    """Compare whole models: print a row for each figure -> {kind: {name: MiB}}."""
    _, c = mask_distill.parse(['--block-size', '1024', *argv])
    c = replace(c, init='', vocab_size=c.vocab_size or 256)  # of the sizes that flags give
    device, _ = mask_distill.pick_device(c)
    found = {}
    for kind in KINDS:
        model = mask_distill.GPT2(c)
        for block in model.h:
            turn(block.attn, kind, c)
        found[kind] = measure(model.to(device), c, device)
    print(f'{c.block_size} tokens, MiB' + ''.join(f'{kind:>10}' for kind in KINDS)
          + '   30 % of the memory saved?')
    for name, full in found['eager'].items():
        saved = 1 - found['masks'][name] / full
        print(f'{name:16}' + ''.join(f'{found[kind][name]:10.1f}' for kind in KINDS)
              + f'{saved:9.0%} less, ' + ('PASS' if saved >= 0.3 else 'FAIL'))
    return found

def both_ways(attn, q, k, v, grad):
    """Attention alone, forward and backward from the gradient of its output."""
    inputs = [q, k, v] if attn.alpha is None else [q, k, v, attn.alpha]
    torch.autograd.grad(attn.attend(q, k, v), inputs, grad)

def lengths(argv):
    """Compare one layer's attention at five lengths: print a row for each -> rows of the csv."""
    _, c = mask_distill.parse([
        '--masks', 'window:64+sinks:4', '--n-head', '12', '--n-embd', '768', '--block-size', '4096',
        '--dtype', 'float32', '--threads', '1', *argv])
    device, dtype = mask_distill.pick_device(c)
    size, csv, rows = c.n_embd // c.heads, figures.HERE / 'runs/lengths.csv', []
    made = dict(masks=c.masks, heads=c.heads, head_size=size, dtype=dtype, torch=torch.__version__,
                threads=torch.get_num_threads(), machine=compare.processor(device))
    layers = {kind: turn(mask_distill.SelfAttention(c), kind, c).to(device) for kind in KINDS}
    print(', '.join(f'{name} {value}' for name, value in made.items()))
    print(f'{"":6}{"peak MiB":>27}{"milliseconds":>27}{"tokens per second":>33}')
    print('tokens' + ''.join(f'{kind:>{n}}' for n in (9, 9, 11) for kind in KINDS))
    for n in (16, 8, 4, 2, 1):
        T, rounds = c.block_size // n, max(3, 2 * n)
        qkv = [torch.randn(1, c.heads, T, size, dtype=dtype, device=device, requires_grad=True)
               for _ in range(3)]
        grad = torch.randn_like(qkv[0])
        passes = {kind: partial(both_ways, attn, *qkv, grad) for kind, attn in layers.items()}
        mib = {kind: peak(f, device) for kind, f in passes.items()}  # this warms up, too
        ms = milliseconds(passes, rounds, device)
        print(f'{T:6}' + ''.join(f'{x:9,.1f}' for x in (*mib.values(), *ms.values()))
              + ''.join(f'{1000 * T / x:11,.0f}' for x in ms.values()), flush=True)
        rows += [dict(case=kind, tokens=T, mib=mib[kind], ms=ms[kind], rounds=rounds, **made)
                 for kind in KINDS]
    compare.write_rows(csv, rows)
    figures.draw_scaling()
    print(f'rows are in {csv}, their picture is {figures.HERE}/scaling.png')
    return rows

# ------------------------------------ DETR's Lasso ------------------------------------
def lasso(device='cpu', images=2, heads=8, queries=100, tokens=850, size=32):
    """Each kind in one layer of DETR's size on COCO, forward and backward, in float32 and one
    thread."""
    torch.set_num_threads(1)
    device = torch.device(device)
    q = torch.randn(images, heads, queries, size, device=device, requires_grad=True)
    k = torch.randn(images, heads, tokens, size, device=device, requires_grad=True)
    c, padding = admm_detr.Config(), torch.zeros(images, tokens, dtype=torch.bool, device=device)
    softmax = torch.nn.MultiheadAttention(heads * size, heads, batch_first=True).to(device)

    def layer(name):
        if name == 'softmax':
            x, y = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)
            return softmax(x, y, y)[0]
        return admm_detr.ATTENTION[name](q, k, padding, False, c) @ k

    for name in ('softmax', 'no-weights', 'l2', 'admm', 'admm-vanilla'):
        kept = {}  # for the backward pass: address -> bytes
        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(name)  # kept alive, so that no address is used twice
        ms = milliseconds({name: lambda: layer(name).sum().backward()}, 5, device)[name]
        print(f'{name:14}{ms:9.1f} ms, {sum(kept.values()) / 2**20:6.1f} MiB kept for backward')

if __name__ == '__main__':
    if sys.argv[1:2] == ['lasso']:
        lasso(*sys.argv[2:])
    elif sys.argv[1:2] == ['lengths']:
        lengths(sys.argv[2:])
    else:
        masks(sys.argv[1:])
