"""Draw every picture of README.md and results.md that rests on runs/*.csv or on a formula.

    python experiments/figures.py    # writes experiments/*.png; trains nothing, takes seconds

    method.png    what each idea passes on, its formula, and its line of code, read from the script
    rates.png     a small GPT's validation loss by learning rate, for every variant
    variants.png  every variant at its own best rate: its difference from softmax, sorted
    lengths.png   BeliefFormer's Fig. 3: how long MH and Delta are and where they point, by layer

Needs `pip install matplotlib scipy`. Colour-blind readers can tell the colours apart (Okabe and
Ito's, and three of Paul Tol's), and a variant has the same one in every picture.
"""
import csv
from collections import defaultdict
from pathlib import Path

import matplotlib
matplotlib.use('Agg')  # no window
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
BLACK, ORANGE, SKY, GREEN = '#000000', '#E69F00', '#56B4E9', '#009E73'
BLUE, RED, PINK, GREY = '#0072B2', '#D55E00', '#CC79A7', '#8C8C8C'
WINE, INDIGO, OLIVE = '#882255', '#332288', '#999933'  # Paul Tol's
VARIANTS = {  # case in a csv file: name, colour, marker
    'softmax': ('softmax', BLACK, 'o'),
    'attentionx': ('AttentionX', RED, 's'),
    'belief': ('BeliefFormer', GREEN, '^'),
    'belief-star': ('BeliefFormer*', BLUE, 'D'),
    'belief-head': ('BeliefFormer per head', SKY, 'v'),
    'attentionx-learned': ('AttentionX, learned γ', ORANGE, 'P'),
    'attentionx-zd': ('AttentionX, zero diagonal', PINK, 'X'),
    'value-skip': ('MH + V, a control', GREY, 'p'),
    'differential': ('differential attention', INDIGO, '<'),
    'gated': ('gated attention', WINE, '>'),
    'laplacian': ('Laplacian heads', OLIVE, 'h'),
}
plt.rcParams.update({'font.size': 10, 'axes.spines.top': False, 'axes.spines.right': False,
                     'axes.axisbelow': True, 'grid.color': '#e5e5e5', 'legend.frameon': False,
                     'axes.titlepad': 10, 'savefig.dpi': 200, 'savefig.bbox': 'tight'})

def name_of(variant):
    return VARIANTS.get(variant, (variant, GREY, 'o'))

def save(figure, name):
    figure.savefig(HERE / f'{name}.png', facecolor='white')  # legible on a dark page, too
    plt.close(figure)

# ------------------------------------ the method ------------------------------------
def explain(ax, row, colour, formula, script, *code):
    """Write a formula below a drawing, and under it the lines of a script that compute it."""
    text = (HERE.parent / f'{script}.py').read_text('utf-8')
    for i, line in enumerate((formula, *code)):
        assert i == 0 or line in text, f'{script}.py has no {line!r} any more'
        ax.annotate(line, (0, 0), (0, -26 - 20 * (row + i)), xycoords='axes fraction', va='top',
                    textcoords='offset points', color=BLACK if i else colour,
                    family='monospace' if i else None)

def arrow(ax, start, end, colour, label, shift, width=2.0):
    """An arrow with its label beside its middle."""
    ax.annotate('', end, start, arrowprops=dict(
        arrowstyle='-|>', color=colour, lw=width, shrinkA=0, shrinkB=0, mutation_scale=13))
    ax.text(*(np.add(start, end) / 2 + shift), label, color=colour, ha='center', va='center')

def draw_residuals(ax):
    V, MH = np.array([4.0, 0.0]), np.array([1.6, 2.1])
    alpha = MH @ V / (V @ V)
    arrow(ax, (0, 0), V, BLACK, 'V: the token\'s own value', (0, -0.3))
    arrow(ax, (0, 0), MH, BLACK, 'MH: what\nall tokens say', (-1.05, 0.3))
    arrow(ax, MH, V, RED, 'V − MH', (0.6, 0.25))
    arrow(ax, alpha * V, MH, GREEN, 'MH − αV', (0.72, -0.5))
    corner = alpha * V + np.array([(0.0, 0.22), (-0.22, 0.22), (-0.22, 0.0)])
    ax.plot(*corner.T, color=GREEN, lw=1.2)
    ax.set(xlim=(-0.9, 4.1), ylim=(-0.5, 2.2), title='Pass on a difference')
    explain(ax, 0, RED, 'AttentionX:  $V - \\gamma\\,\\mathrm{MH}$  (drawn for $\\gamma = 1$)',
            'attentionx_gpt', 'v - gamma * mh')
    explain(ax, 2, GREEN, 'BeliefFormer:  $\\mathrm{MH} - \\alpha V$',
            'attentionx_gpt', 'orthogonal(mh, v, (-2, -1))')

def lasso(q, K, penalty):
    """argmin ||q - x^T K||^2 + penalty ||x||_1, by gradient steps and soft thresholds."""
    x, rate = np.zeros(len(K)), 0.5 / np.linalg.norm(K, 2) ** 2
    for _ in range(2000):
        x = x - rate * 2 * (x @ K - q) @ K.T
        x = np.sign(x) * np.maximum(np.abs(x) - rate * penalty, 0)
    return x

def draw_lasso(ax):
    K = np.array([(0.6, 2.1), (-1.3, 1.0), (2.3, -0.3), (1.3, 0.5), (-0.4, -0.6)])
    q = np.array([2.7, 1.7])
    end, x = np.zeros(2), lasso(q, K, 0.7)
    for i, k in enumerate(K):
        arrow(ax, (0, 0), k, GREY, f'$k_{i + 1}$', 0.5 * k + 0.2 * k / np.linalg.norm(k), 1.2)
    for i in np.flatnonzero(x):
        arrow(ax, end, end + x[i] * K[i], WINE, f'{x[i]:.1f}$\\,k_{i + 1}$', (-0.4, 0.25))
        end = end + x[i] * K[i]
    arrow(ax, (0, 0), q, BLACK, '$q$', 0.5 * q + 0.12)
    ax.set(xlim=(-1.4, 3.0), ylim=(-0.7, 2.4), title='Rebuild a query from few tokens')
    explain(ax, 0, WINE, 'Lasso:  $\\min_x \\|q - x^T K\\|^2 + \\lambda\\,\\|x\\|_1$',
            'admm_detr', 'x = regress(z - u)', 'F.relu(v - t) - F.relu(-v - t)')

def draw_mask(ax, n=12, window=4, sinks=1):
    i, j = np.indices((n, n))
    kept = (i - j < window) | (j < sinks)
    colour = np.where(kept[..., None], matplotlib.colors.to_rgb(INDIGO), 0.85)
    ax.imshow(np.where((j <= i)[..., None], colour, 1.0), extent=(0, n, n, 0))
    ax.set(title='See few tokens', xlabel='token j', ylabel='token i')
    explain(ax, 0, INDIGO, 'Masks:  $\\mathrm{softmax}(S + \\log M)\\,V$',
            'mask_distill', 'i - j < n', '(i - j >= far) & (j < n)')

def draw_method():
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 2.45), width_ratios=(1.85, 1.42, 1))
    figure.subplots_adjust(wspace=0.12)
    for ax, draw_idea in zip(axes, (draw_residuals, draw_lasso, draw_mask)):
        draw_idea(ax)
        ax.set(aspect='equal', anchor='W', xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    save(figure, 'method')

# ------------------------------------ the record ------------------------------------
def read(name):
    """The rows of runs/NAME.csv."""
    with open(HERE / 'runs' / f'{name}.csv', newline='', encoding='utf-8') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for key in row:
            if key in ('val_loss', 'learning_rate', 'seed', 'step') or key[0].isdigit():
                row[key] = float(row[key] or 'nan')
        row['variant'] = row['case'].split()[0]  # a rate follows it
    return rows

def small_gpts():
    """Rows of the small GPT at several rates: the record's, and those of further variants. Each
    of the two has a softmax of its own, so that a difference is between runs of one processor."""
    files = [['gpt-softmax', 'gpt-attentionx', 'gpt-belief'],
             sorted(path.stem for path in HERE.glob('runs/gpt-variants*.csv'))]
    return [[row for name in names for row in read(name)] for names in files if names]

def mean_losses(rows):
    """{variant: {rate: mean loss of the runs that choose a rate}}"""
    losses = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row['role'] == 'choosing':
            losses[row['variant']][row['learning_rate']].append(row['val_loss'])
    return {variant: {rate: np.mean(own[rate]) for rate in sorted(own)}
            for variant, own in losses.items()}

def draw_rates():
    losses, common = mean_losses(sum(small_gpts(), [])), defaultdict(list)
    for row in read('gpt-common'):
        common[row['variant']].append(row['val_loss'])
    for variant, own in common.items():
        losses[variant] = {1e-3: np.mean(own), **losses[variant]}
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4), sharey=True)
    for variant, by_rate in losses.items():
        name, colour, marker = name_of(variant)
        best = min(by_rate, key=by_rate.get)
        panel = axes[0] if variant in common else axes[1]
        for ax in axes if variant == 'softmax' else [panel]:
            ax.plot(*zip(*by_rate.items()), color=colour, marker=marker, label=name)
            ax.plot(best, by_rate[best], 'o', color=colour, ms=14, mfc='none')
    ticks = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    for ax, title in zip(axes, ('The papers\' variants', 'Further variants')):
        ax.set(xscale='log', title=title, xlabel='peak learning rate (a ring: the best tried)')
        ax.set_xticks(ticks, [f'{rate:g}' for rate in ticks])
        ax.minorticks_off()
        ax.grid()
        ax.legend(loc='upper center', bbox_to_anchor=(0.5, -0.17), ncols=2)
    axes[0].set_ylabel('validation loss (nats per byte)')
    save(figure, 'rates')

def differences():
    """[(variant, rate, losses minus softmax's by seed)], each at its best rate, best first."""
    found = []
    for rows in small_gpts():
        best = {variant: min(own, key=own.get) for variant, own in mean_losses(rows).items()}
        losses = defaultdict(dict)
        for row in rows:
            rate = best.get(row['variant'], row['learning_rate'])  # or the only one it has
            if row['role'] == 'judging' and row['learning_rate'] == rate:
                losses[row['variant']][row['seed']] = row['val_loss']
        softmax = losses.pop('softmax')
        found += [(variant, best[variant], [own[seed] - softmax[seed] for seed in own])
                  for variant, own in losses.items()]
    return sorted(found, key=lambda row: np.mean(row[2]))

def draw_variants():
    rows = differences()
    figure, ax = plt.subplots(figsize=(7.6, 0.6 + 0.4 * len(rows)))
    for y, (variant, _, gaps) in enumerate(rows):
        _, colour, marker = name_of(variant)
        # 95 % for all rows together: Student's t, Bonferroni
        half = stats.sem(gaps) * stats.t.ppf(1 - 0.025 / len(rows), len(gaps) - 1)
        ax.errorbar(np.mean(gaps), y, xerr=half, color=colour, marker=marker, capsize=4, lw=2, ms=7)
    labels = [f'{name_of(variant)[0]}, at {rate:g}' for variant, rate, _ in rows]
    ax.set_yticks(range(len(rows)), labels)
    ax.invert_yaxis()
    ax.axvline(0, color=BLACK, lw=1)
    ax.grid(axis='x')
    ax.set_xlabel('validation loss minus softmax\'s (nats per byte): left of 0 is better')
    save(figure, 'variants')

def draw_lengths():
    rows = [row for row in read('gpt-belief-log') if row['step'] > 0]
    steps = sorted({row['step'] for row in rows})
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 4.4), sharex=True, sharey='row')
    for layer in range(3):
        for ax, keys in zip(axes[:, layer], (('mh_out', 'update_out'), ('cos_mh', 'cos_update'))):
            for key, colour, label in zip(keys, (BLACK, GREEN), ('MH Wᵒ', 'Δ Wᵒ')):
                found = np.array([[row[f'{layer}.{key}'] for row in rows if row['step'] == step]
                                  for step in steps])  # (steps, seeds)
                ax.plot(steps, found.mean(1), color=colour, label=label)
                ax.fill_between(steps, found.min(1), found.max(1), color=colour, alpha=0.15, lw=0)
            ax.grid()
        axes[0, layer].set_title(f'layer {layer}')
        axes[1, layer].set_xlabel('training step')
    axes[0, 0].set_ylabel('mean length')
    axes[1, 0].set_ylabel('cosine with X')
    axes[0, 0].legend()
    save(figure, 'lengths')

if __name__ == '__main__':
    draw_method()
    draw_rates()
    draw_variants()
    draw_lengths()
    print(f'pictures are in {HERE}')
