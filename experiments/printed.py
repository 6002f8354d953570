r"""The iteration that Optimizing Attention prints, to the letter, for admm_detr.py.

    python experiments/printed.py --cross-attention admm-printed --random-tokens 32
    python experiments/compare.py admm_detr --with experiments/printed.py --random-tokens 32 \
        --sweep cross_attention=admm,admm-printed,admm-vanilla-printed

    --cross-attention       equation
    admm-printed            (4), for problem (2), a Lasso: the inverse in d x d
    admm-vanilla-printed    (3), the same with an N x N inverse

These equations do not solve problem (2). They differ from ADMM in four places:

- The sign of mu in (3b) contradicts (3c), so that past the threshold the state about doubles in
  every iteration: use at most 20.
- The fixed point of (3) is ridge regression, whatever lambda is.
- (4) has D^1/2 where the spectrum is D, and omits the complement of the range of V.
- The threshold lambda / rho of (3b) belongs to 2 lambda.

Likely misprints: with z - mu for x - z in (3a) and x^(k+1) + mu for x^(k) - mu in (3b), (3) is ADMM
for the Lasso with 2 lambda, which is lasso(...) at twice the sparsity, without over-relaxation. For
(2) itself the threshold must be lambda / (2 rho).

The paper gives no lambda, rho, number of iterations or of random tokens. It solves and mixes over
the same tokens (--rebuild-from values --mix-random). Padding gets weight, as in its Fig. 1. OA's V
is K here. Loading this file adds both rows to ATTENTION and does nothing else.
"""
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import admm_detr as detr

def as_published(q, k, c, is_self=False, vanilla=False, sigma=1e-4):
    """Equations (3) or (4) -> x (B, nh, Q, N).  [OA Eq. 3] [OA Eq. 4]"""
    products = q @ k.mT  # (B, nh, Q, N)
    largest = detr.without_self(products, is_self).abs().amax(-1, keepdim=True)
    rho = c.rho * detr.mean_eigenvalue(k)
    threshold = 2 * c.sparsity * largest / rho  # lambda / rho
    shrink, _ = detr.PENALTY['l1']
    if vanilla:
        inverse = detr.vanilla_inverse(k, rho)
    else:
        # drawn once; [choice] sigma: OA calls the jitter on K^T K small
        jitter = sigma * torch.rand(k.size(-1), generator=torch.Generator().manual_seed(1))
        D, X = torch.linalg.eigh(k.mT @ k + jitter.diag().to(k))  # (B, nh, hs), ascending
        D = D.unsqueeze(-2)  # (B, nh, 1, hs)
        # with fewer tokens than channels, rounding makes some negative
        D = torch.maximum(D, torch.finfo(D.dtype).eps * D[..., -1:])
        Y = k @ X / D.sqrt()  # (B, nh, N, hs)
    x = z = mu = torch.zeros_like(products)
    for _ in range(c.iterations):
        new = products + rho * (x - z)  # (3a)
        new = new @ inverse if vanilla else new @ Y / (D.sqrt() + rho) @ Y.mT
        new = detr.without_self(new, is_self).clamp(-1, 1)  # [choice] 1
        z = shrink(x - mu, threshold)  # (3b), with the old x
        x, mu = new, mu + new - z  # (3c)
    return x

class Printed(detr.Reconstruction):
    """x of the tokens, padding included, and of random ones, sharpened."""
    def tokens_to_solve_over(self, k, v, padding):
        tokens = k if self.config.rebuild_from == 'keys' else v
        return detr.add_random(tokens, self.random)

detr.ATTENTION.update({
    'admm-printed': functools.partial(Printed, solve=as_published),
    'admm-vanilla-printed': functools.partial(
        Printed, solve=functools.partial(as_published, vanilla=True))})

if __name__ == '__main__':
    detr.main(sys.argv[1:])
