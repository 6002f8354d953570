r"""What attention does, layer by layer: what it passes on [BF Fig. 3], and where DETR's looks.

    python experiments/diagnose.py out/attentionx_gpt/tiny    # a table of a run's best weights
    python experiments/compare.py attentionx_gpt --diagnose --sweep attention=softmax,belief

The second writes these figures to the log of every run, at every evaluation. They are means: over
the tokens of eight validation windows (GPT), or over the class tokens of the first 64 validation
images (ViT), as in BF's Fig. 3. The model is watched from outside: any row of ATTENTION works.

    mh, update          lengths of MH and of the row's update, which is what enters W^o
    mh_out, update_out  lengths after W^o, without its bias. BeliefFormer*'s update is there
                        Delta W^o + Delta_s W^s  [BF Eq. 15]
    cos_mh, cos_update  cosines of these two with X, the input of the layer
    cos2_mh, ...        squared cosines: shares of MH and of the update that point along X
    stretch_mh, ...     | ||X + u|| - ||X|| | / ||X||, where u is mh_out's or update_out's vector,
                        times attn_scale if the layer has one
    turn_mh, ...        length of u's part across X, / ||X||
    longer_out          share of tokens whose update_out is longer than mh_out
    alpha               <MH,V> / <V,V>, 0 where V = 0
    longer              share of tokens whose MH - V is longer than MH: there alpha < 1/2
    gamma               if it is learned

A class of ATTENTION that does not call `heads` has no MH, and lacks the figures with that.

Of DETR, means over the first 32 validation images, for self- and cross-attention of the decoder:

    self_five, cross_five  share of |x| on the five tokens where a query looks most  [OA Sec. 4.2]:
                           0 where x = 0
    self_thin, cross_thin  share of V^T V's eigenvalues below a hundredth of their mean, in a head:
                           1 where V = 0. Then values have lost directions  [OA Sec. 3]
    cross_zeros, ...       share of zeros in x, before x^power: of a row that solves for x
    cross_relu, ...        cosine of that x with relu(q K^T - lambda / 2), `relu` of variants.py
"""
import argparse
import copy
import importlib
import math
import runpy
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

def figures(x, out, update=None, mh=None, v=None, W=None, scale=1.0):
    """Tensors (B, T, C) of a layer -> {name: a value for every token}. `scale` times the layer's
    output is added to X."""
    found = {} if mh is None else dict(mh=mh.norm(dim=-1))
    if update is not None:
        found['update'] = update.norm(dim=-1)
    vectors = dict(mh=(mh @ W).to(x), update=out) if mh is not None else dict(update=out)
    found.update({f'{name}_out': vector.norm(dim=-1) for name, vector in vectors.items()})
    cosines = {name: F.cosine_similarity(vector, x, -1) for name, vector in vectors.items()}
    found.update({f'cos_{name}': cosine for name, cosine in cosines.items()})
    found.update({f'cos2_{name}': cosine.square() for name, cosine in cosines.items()})
    length = x.norm(dim=-1)
    for name, vector in vectors.items():
        u = scale * vector
        along = (u * x).sum(-1) / length.square()
        found[f'stretch_{name}'] = ((x + u).norm(dim=-1) - length).abs() / length
        found[f'turn_{name}'] = (u - along.unsqueeze(-1) * x).norm(dim=-1) / length
    if mh is not None:
        found['longer_out'] = (found['update_out'] > found['mh_out']).to(x)
        found['alpha'] = (mh * v).sum(-1) / (v * v).sum(-1).clamp_min(1e-30)
        found['longer'] = (found['alpha'] < 0.5).to(x)
    return found

def watch(block, tokens, note):
    """Call note(figures) whenever the block's attention has run -> hooks, to be removed."""
    attn, seen = block.attn, {}
    proj = attn.c_proj if hasattr(attn, 'c_proj') else attn.proj  # W^o

    def heads(x):  # in place of the method, which it calls
        seen['mh'], seen['v'] = mh, v = type(attn).heads(attn, x)
        return mh, v

    def ended(module, args, out):
        x = seen.pop('x')[:, tokens]
        out = out if proj.bias is None else out - proj.bias
        rest = {name: t.flatten(2)[:, tokens].to(x) for name, t in seen.items()}
        scale = getattr(block, 'attn_scale', 1.0)
        note(figures(x, out[:, tokens].to(x), W=proj.weight.T, scale=scale, **rest))
        seen.clear()

    attn.heads = heads
    return [block.register_forward_pre_hook(lambda module, args: seen.update(x=args[0])),
            proj.register_forward_pre_hook(lambda module, args: seen.update(update=args[0])),
            attn.register_forward_hook(ended)]

class First:
    """The first n examples of a data set."""
    def __init__(self, dataset, n):
        self.dataset, self.n = dataset, min(n, len(dataset))

    def __len__(self):
        return self.n

    def __getattr__(self, name):  # all else is as there
        return getattr(self.dataset, name)

@torch.no_grad()
def diagnose_detr(model, evaluate, data, c, device):
    """{'0.cross_five': ..., '0.cross_thin': ..., '0.self_five': ...}, watched during evaluate."""
    found, hooks = defaultdict(list), []
    def watch_detr(attn, name):
        @torch.autocast(torch.device(device).type, enabled=False)  # as where x is solved for
        def note(module, args):
            q, k, v = attn.heads(*args[:3])
            padding = args[3] if len(args) > 3 else None
            x = attn.coefficients(q, k, v, padding)[..., :v.size(2)].abs()  # not of random tokens
            top = x.topk(min(5, x.size(-1))).values.sum(-1)
            found[f'{name}_five'].append((top / x.sum(-1).clamp_min(1e-30)).flatten())
            values = torch.linalg.eigvalsh((v.mT @ v).double())  # (B, nh, hs)
            small = values <= values.mean(-1, keepdim=True) / 100
            found[f'{name}_thin'].append(small.double().mean(-1).flatten())
            if hasattr(attn, 'solve'):
                tokens = attn.tokens_to_solve_over(k, v, padding)
                x = attn.solve(q, tokens, attn.config, attn.is_self)
                relu = F.relu(q @ tokens.mT)  # lambda / 2 is a share of the largest
                if attn.is_self:
                    relu.diagonal(dim1=2, dim2=3).zero_()
                relu = F.relu(relu - c.sparsity * relu.amax(-1, keepdim=True))
                found[f'{name}_zeros'].append((x == 0).double().mean(-1).flatten())
                found[f'{name}_relu'].append(F.cosine_similarity(x, relu, dim=-1).flatten())
        hooks.append(attn.register_forward_pre_hook(note))
    for i, layer in enumerate(model.transformer.decoder.layers):
        watch_detr(layer.self_attn, f'{i}.self')
        watch_detr(layer.multihead_attn, f'{i}.cross')
    few = copy.copy(data)
    few.val = First(data.val, 32)
    try:
        evaluate(model, few, c, device)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(values).mean().item() for name, values in found.items()}

@torch.no_grad()
def diagnose(model, evaluate, data, c, device):
    """{'0.mh': the mean length of MH in layer 0, ...}, watched during evaluate."""
    if hasattr(model, 'bbox_embed'):
        return diagnose_detr(model, evaluate, data, c, device)
    is_gpt = hasattr(model, 'transformer')
    blocks = model.transformer.h if is_gpt else model.blocks
    tokens = slice(None) if is_gpt else slice(1)  # of a ViT the class token
    found, hooks = defaultdict(list), []
    for i, block in enumerate(blocks):
        def note(values, i=i):
            for name, x in values.items():
                found[f'{i}.{name}'].append(x.flatten())
        hooks += watch(block, tokens, note)
    few = copy.copy(data)
    if not is_gpt:
        few.val = [x[:64] for x in data.val]
    try:
        evaluate(model, few, replace(c, eval_rows=8 if is_gpt else 0), device)
    finally:
        for hook in hooks:
            hook.remove()
        for block in blocks:
            del block.attn.heads
    means = {name: torch.cat(values).mean().item() for name, values in found.items()}
    for i, block in enumerate(blocks):
        gamma = getattr(block.attn, 'gamma', None)
        if isinstance(gamma, nn.Parameter):
            means[f'{i}.gamma'] = gamma.mean().item()
    return means

def logged(script):
    """A patch of the script: evaluate also finds these figures."""
    plain = script.evaluate
    def evaluate(model, data, c, device):
        return {**plain(model, data, c, device), **diagnose(model, plain, data, c, device)}
    return patch.object(script, 'evaluate', evaluate)

OWN_FIELD = {'arch': 'attentionx_gpt', 'mlp_dim': 'belief_vit', 'cross_attention': 'admm_detr'}

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('run', type=Path, help='a folder with best.pt')
    p.add_argument('--with', dest='extra', help='the Python file that adds its row of ATTENTION')
    o = p.parse_args(argv)
    if not (o.run / 'best.pt').exists():
        p.error(f'there is no {o.run / "best.pt"}')
    settings = torch.load(o.run / 'best.pt', map_location='cpu', weights_only=True)['config']
    names = [name for field, name in OWN_FIELD.items() if field in settings]
    if not names:
        p.error(f'{o.run} is not a run of {", ".join(OWN_FIELD.values())}')
    script = importlib.import_module(names[0])
    if o.extra:
        runpy.run_path(o.extra)
    model, _ = script.load_run(script.Config(folder=str(o.run)))
    c, device = model.config, next(model.parameters()).device
    found = diagnose(model, script.evaluate, script.load_data(c), c, device)
    layers = sorted({int(name.partition('.')[0]) for name in found})
    print(f'{"layer":14}' + ''.join(f'{i:10}' for i in layers))
    for name in dict.fromkeys(name.partition('.')[2] for name in found):
        values = [found.get(f'{i}.{name}', math.nan) for i in layers]
        print(f'{name:14}' + ''.join(f'{x:10.4f}' for x in values))
    return found

if __name__ == '__main__':
    main()
