"""Validation drawings that have chosen nothing, for admm_detr.py.

    python experiments/compare.py admm_detr --with experiments/fresh.py --seeds 51,52 \\
        --sweep cross_attention=no-weights,admm

The default options of its Lasso were chosen on the script's own validation drawings. These are as
many others, from the same distribution; training drawings stay. Loading this file replaces them.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import admm_detr as detr

class Fresh(detr.Drawings):
    """Without a generator, drawings come from a stream of another name."""
    def example(self, row, rng=None):
        return super().example(row, rng or detr.stream('fresh', row))

    def target(self, row, rng=None):
        return super().target(row, rng or detr.stream('fresh', row))

detr.Drawings = Fresh
