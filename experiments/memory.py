r"""Memory and time of attention: the report's goal for masks, and DETR's layers with a Lasso.

    python experiments/memory.py --masks window:64+sinks:4 --n-layer 12 --n-head 12 \
        --n-embd 768 --vocab-size 50257 --block-size 2048  # GPT-2, with random weights
    python experiments/memory.py lasso

The first compares three kinds of attention in float32: eager, which stores T x T scores, and two
that do not, PyTorch's fused kernel and masks in blocks. Weights and logits take the same room in
all three. Its flags are those of mask_distill.py; by default a sequence has 1,024 tokens.
"""
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import admm_detr
import mask_distill

def milliseconds(f):
    timer = Timer('f()', globals=dict(f=f), num_threads=torch.get_num_threads())
    return 1000 * timer.blocked_autorange(min_run_time=1).median

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
def eager(self, q, k, v, maps=None):
    """Replaces SelfAttention.attend: full attention that stores its scores."""
    S = (q / math.sqrt(q.size(-1))) @ k.mT  # (B, nh, T, T)
    future = torch.ones(S.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(S.masked_fill(future, -math.inf), -1) @ v

def measure(model, c, device):
    """Memory and time of one sequence: in one layer's attention alone and, memory only, in the
    whole model with its weights -> {name: figure}.  [MA Sec. 2.4]"""
    T, attn = c.block_size, model.h[0].attn
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    idx = torch.arange(T, device=device)[None] % c.vocab_size  # (1, T)
    shape = 1, c.heads, T, c.n_embd // c.heads
    q, k, v = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]

    def attention():
        torch.autograd.grad(attn.attend(q, k, v).sum(), (q, k, v))

    def step():
        mask_distill.loss_of(model, (idx, idx), c).backward()
        model.zero_grad()

    @torch.no_grad()
    def infer():
        model(idx, last=True)

    return {'attention, MiB': peak(attention, device),
            'training step, MiB': peak(step, device) + weights,
            'inference, MiB': peak(infer, device) + weights,
            'attention, ms': milliseconds(attention)}

def masks(argv):
    """Compare the three kinds: print a row for each figure -> {kind: {name: figure}}."""
    _, c = mask_distill.parse(['--block-size', '1024', *argv])
    c = replace(c, vocab_size=c.vocab_size or 256)
    device, _ = mask_distill.pick_device(c)
    model = mask_distill.GPT2(c).to(device)
    with patch.object(mask_distill.SelfAttention, 'attend', eager):
        found = dict(eager=measure(model, c, device))
    found['fused'] = measure(model, c, device)
    for block in model.h:
        block.attn.masks, block.attn.reading = c.masks, c.reading
        block.attn.alpha = torch.zeros(len(mask_distill.candidates(c.masks)), device=device)
    found['masks'] = measure(model, c, device)
    print(f'{c.block_size:5} tokens{"":8}{"eager":>10}{"fused":>10}{"masks":>10}   '
          '30 % of the memory saved?')
    for name, full in found['eager'].items():
        line = f'{name:20}' + ''.join(f'{figures[name]:10.1f}' for figures in found.values())
        if 'MiB' in name:
            saved = 1 - found['masks'][name] / full
            line += f'{saved:9.0%} less, ' + ('PASS' if saved >= 0.3 else 'FAIL')
        print(line)
    return found

# ------------------------------------ DETR's Lasso ------------------------------------
def lasso(images=2, heads=8, queries=100, tokens=850, size=32):
    """Each kind in one layer of DETR's size on COCO, forward and backward, in one thread."""
    torch.set_num_threads(1)
    q = torch.randn(images, heads, queries, size, requires_grad=True)
    k = torch.randn(images, heads, tokens, size, requires_grad=True)
    c, padding = admm_detr.Config(), torch.zeros(images, tokens, dtype=torch.bool)
    softmax = torch.nn.MultiheadAttention(heads * size, heads, batch_first=True)  # four matrices

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
        ms = milliseconds(lambda: layer(name).sum().backward())
        print(f'{name:14}{ms:8.0f} ms, {sum(kept.values()) / 2**20:6.1f} MiB kept for backward')

if __name__ == '__main__':
    if sys.argv[1:] == ['lasso']:
        lasso()
    else:
        masks(sys.argv[1:])
