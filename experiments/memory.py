r"""Memory and time of attention: what masks save, how it scales with length, and DETR's Lasso.

    python experiments/memory.py masks --masks window:64+sinks:4 --n-layer 12 --n-head 12 \
        --n-embd 768 --vocab-size 50257 --block-size 2048  # GPT-2, with random weights
    python experiments/memory.py lengths  # a layer of GPT-2's size, 256 to 4096 tokens
    python experiments/memory.py lasso    # a layer of DETR's size; or lasso --device cuda

The first two compare three kinds of attention: eager, which stores T x T scores, and two that do
not, PyTorch's fused kernel and masks in blocks. `masks` takes a whole model in float32, whose
weights and logits need the same room in all three; by default a sequence has 1,024 tokens.
`lengths` takes attention alone, forward and backward, and writes rows for each length to
out/memory/lengths.csv, or to --csv; the longest sequence has --block-size tokens. (figures.py draws
experiments/runs/lengths.csv.) Other flags are those of mask_distill.py but --init, or with `lasso`
those of admm_detr.py. Needs scipy.
"""
import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import admm_detr
import bench
import compare
import mask_distill

def milliseconds(functions, rounds, device):
    """{name: median of some rounds}."""
    times = bench.take_turns(functions, rounds, device)
    return {name: 1000 * float(np.median(seconds)) for name, seconds in times.items()}

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

def of_kind(kind, make, c):
    """make(c), a SelfAttention or a GPT2 of mask_distill.py, with attention of this kind."""
    net = make(replace(c, masks=c.masks if kind == 'masks' else ''))
    for module in net.modules():
        if kind == 'eager' and isinstance(module, mask_distill.SelfAttention):
            module.attend = eager
    return net

def measure(model, c, device):
    """A whole model's peaks for one sequence, with its weights -> {name: MiB}.  [MA Sec. 2.4]"""
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    idx = torch.arange(c.block_size, device=device)[None] % c.vocab_size  # (1, T)

    def step():
        F.cross_entropy(model(idx).flatten(0, 1), idx.flatten()).backward()
        model.zero_grad()

    @torch.no_grad()
    def infer():
        model(idx, last=True)

    return {'training step': peak(step, device) + weights,
            'inference': peak(infer, device) + weights}

def masks(c):
    """Compare whole models: print a row for each figure -> {kind: {name: MiB}}."""
    c = replace(c, vocab_size=c.vocab_size or 256)
    device, _ = mask_distill.pick_device(c)
    found = {kind: measure(of_kind(kind, mask_distill.GPT2, c).to(device), c, device)
             for kind in KINDS}
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

def lengths(c, csv):
    """Compare one layer's attention at five lengths: print a row for each -> rows of the csv."""
    device, dtype = mask_distill.pick_device(c)
    size, rows = c.n_embd // c.n_head, []
    made = dict(masks=c.masks, heads=c.n_head, head_size=size, dtype=dtype, torch=torch.__version__,
                threads=torch.get_num_threads(), machine=compare.processor(device))
    layers = {kind: of_kind(kind, mask_distill.SelfAttention, c).to(device) for kind in KINDS}
    print(', '.join(f'{name} {value}' for name, value in made.items()))
    print(f'{"":6}{"peak MiB":>27}{"milliseconds":>27}{"tokens per second":>33}')
    print('tokens' + ''.join(f'{kind:>{n}}' for n in (9, 9, 11) for kind in KINDS))
    for n in (16, 8, 4, 2, 1):
        T, rounds = c.block_size // n, max(3, 2 * n)
        qkv = [torch.randn(1, c.n_head, T, size, dtype=dtype, device=device, requires_grad=True)
               for _ in range(3)]
        grad = torch.randn_like(qkv[0])
        passes = {kind: partial(both_ways, attn, *qkv, grad) for kind, attn in layers.items()}
        mib = {kind: peak(f, device) for kind, f in passes.items()}
        ms = milliseconds(passes, rounds, device)
        print(f'{T:6}' + ''.join(f'{x:9,.1f}' for x in (*mib.values(), *ms.values()))
              + ''.join(f'{1000 * T / x:11,.0f}' for x in ms.values()), flush=True)
        rows += [dict(case=kind, tokens=T, mib=mib[kind], ms=ms[kind], rounds=rounds, **made)
                 for kind in KINDS]
    compare.write_rows(csv, rows)
    print(f'rows are in {csv}')
    return rows

# ------------------------------------ DETR's Lasso ------------------------------------
def lasso(c, tokens=850):
    """Each kind in one layer of DETR's size on COCO, forward and backward, in float32. All make
    their x: DETR's code, too, asks nn.MultiheadAttention for the weights."""
    device, _ = admm_detr.pick_device(c)
    size = c.hidden_dim // c.nheads
    q = torch.randn(c.batch_size, c.nheads, c.num_queries, size, device=device, requires_grad=True)
    k = torch.randn(c.batch_size, c.nheads, tokens, size, device=device, requires_grad=True)
    softmax = torch.nn.MultiheadAttention(c.hidden_dim, c.nheads, batch_first=True).to(device)

    def layer(name):
        if name == 'softmax':
            x, y = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)
            return softmax(x, y, y)[0]
        return admm_detr.ATTENTION[name](c).to(device).coefficients(q, k, k, None) @ k

    for name in ('softmax', 'no-weights', 'l2', 'admm', 'admm-vanilla'):
        kept = {}  # for the backward pass: address -> bytes
        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(name)  # kept alive, so that no address is used twice
        ms = milliseconds({name: lambda: layer(name).sum().backward()}, 5, device)[name]
        print(f'{name:14}{ms:9.1f} ms, {sum(kept.values()) / 2**20:6.1f} MiB kept for backward')

SIZES = {  # flags that others override
    'masks': '--block-size 1024',
    'lengths': '--masks window:64+sinks:4 --n-head 12 --n-embd 768 --block-size 4096 '
               '--dtype float32',
    'lasso': '--hidden-dim 256 --nheads 8 --num-queries 100 --batch-size 2'}

def main(argv=None):
    p = compare.parser(__doc__)
    p.add_argument('what', choices=SIZES)
    o, flags = p.parse_known_args(argv)
    script = admm_detr if o.what == 'lasso' else mask_distill
    _, c = script.parse(['--threads', '1', *SIZES[o.what].split(), *flags])
    torch.set_num_threads(c.threads or torch.get_num_threads())
    if o.what == 'lengths':
        return lengths(c, o.csv or Path(c.out_dir, 'memory', 'lengths.csv'))
    return masks(c) if o.what == 'masks' else lasso(c)

if __name__ == '__main__':
    main()
