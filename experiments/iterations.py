r"""How many iterations of ADMM a Lasso of admm_detr.py needs, on the tokens of a run.

    python experiments/iterations.py out/admm_detr/RUN --ridge 0.3 --penalty l1 --sparsity 0.3

Queries and tokens are those that the run's decoder meets in cross-attention, on the first 16
validation images. The flags state the Lasso. For each rho a line has the fewest of ITERATIONS that
bring ||x - x*|| / ||x*|| to 1 %, over all queries and layers. x* is what MANY iterations in
float64 end at. The first line also has the mean cosine of x* with relu(q K^T - lambda / 2), and
the last names the rho that needs fewest.
"""
import argparse
import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import admm_detr as detr
import diagnose
import variants

RHOS = 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0
ITERATIONS = 4, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 160, 200, 300
MANY = 5000  # which reach the optimum

@torch.no_grad()
def problems(folder, c):
    """[(q, tokens)] of each layer's cross-attention, in float64."""
    model, _ = detr.load_run(detr.Config(folder=folder, device='cpu'))
    sizes = dict(hidden_dim=model.config.hidden_dim, nheads=model.config.nheads)
    found, maker = {}, detr.Reconstruction(replace(c, **sizes), solve=None)
    for i, layer in enumerate(model.transformer.decoder.layers):
        def note(attn, args, i=i):
            q, k, v = attn.heads(*args[:3])
            padding = args[3] if len(args) > 3 else None
            found.setdefault(i, []).append((q, maker.tokens_to_solve_over(k, v, padding)))
        layer.multihead_attn.register_forward_pre_hook(note)
    data = copy.copy(detr.load_data(model.config))
    data.val = diagnose.First(data.val, 16)
    detr.evaluate(model, data, model.config, torch.device('cpu'))
    return [[torch.cat(parts).double() for parts in zip(*pairs)] for pairs in found.values()]

def left(pairs, c, best):
    """||x - x*|| / ||x*||, over all layers."""
    gaps = torch.cat([(detr.lasso(q, k, c) - x).flatten() for (q, k), x in zip(pairs, best)])
    return (gaps.norm() / torch.cat([x.flatten() for x in best]).norm()).item()

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('run', help='a folder with best.pt')
    o, flags = p.parse_known_args(argv)
    c = detr.parse(flags)[1]
    pairs, found = problems(o.run, c), {}
    best = [detr.lasso(q, k, replace(c, iterations=MANY, rho=0.1)) for q, k in pairs]
    zeros = torch.cat([x.flatten() for x in best]).eq(0).double().mean().item()
    alike = torch.cat([F.cosine_similarity(x, variants.relu(q, k, c), dim=-1).flatten()
                       for (q, k), x in zip(pairs, best)]).mean()
    other = left(pairs, replace(c, iterations=MANY, rho=0.03), best)
    print(f'{zeros:.3f} of x* is zero, cosine {alike:.3f}; another rho ends {other:.1e} from it')
    for rho in RHOS:
        gap = lambda n: left(pairs, replace(c, iterations=n, rho=rho), best)
        n = next((n for n in ITERATIONS if gap(n) <= 0.01), ITERATIONS[-1])
        if gap(n) <= 0.01:
            found[rho] = n, gap(n)
        print(f'rho {rho:<6g} {n:4} iterations leave {100 * gap(n):.2f} %', flush=True)
    if found:
        rho = min(found, key=found.get)
        print(f'--iterations {found[rho][0]} --rho {rho:g}')
    return found

if __name__ == '__main__':
    main()
