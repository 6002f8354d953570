"""Draw every picture of README.md and results.md that rests on runs/*.csv or on a formula.

    python experiments/figures.py    # writes experiments/*.png; trains nothing, takes seconds

    method.png    what each idea passes on, its formula, and lines of its script that compute it
    rates.png     a small GPT's validation loss by learning rate, and softmax's after more steps
    variants.png  every variant at its own best rate: its difference from softmax, sorted
    lengths.png   BeliefFormer's Fig. 3: how long MH and Delta are and where they point, by layer
    scaling.png   time and memory of attention by the number of tokens, from `memory.py lengths`

A variant has the same colour in every picture, and colour-blind readers can tell those of a panel
apart. Needs `pip install matplotlib scipy`.
"""
import contextlib
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import compare

HERE = Path(__file__).resolve().parent
BLACK, GREEN, RED = '#000000', '#009E73', '#D55E00'  # Okabe and Ito's
WINE, INDIGO, PURPLE, GREY, PALE = '#882255', '#332288', '#AA4499', '#767676', '#DDDDDD'
VARIANTS = {  # name and colour; those of variants.py, and compare.py's
    **compare.VARIANTS, 'differential': ('differential attention', INDIGO),
    'gated': ('gated attention', '#661100'), 'laplacian': ('Laplacian heads', '#666633')}
MARKERS = dict(zip(VARIANTS, 'os^DvPXpd<>h'))
matplotlib.rcParams.update({
    'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True, 'grid.color': PALE,
    'legend.frameon': False})

def save(figure, name):
    """Write NAME.png. A white margin makes it legible on a dark page, too."""
    figure.savefig(HERE / f'{name}.png', dpi=200, facecolor='white', bbox_inches='tight',
                   pad_inches=0.15)

# ------------------------------------ the method ------------------------------------
def explain(ax, script, lines):
    """Write (colour, text) lines below a drawing. What is black is code of the script."""
    source = (HERE.parent / script).read_text('utf-8')
    for i, (colour, text) in enumerate(lines):
        is_code = colour == BLACK
        assert not is_code or text in source, f'{script} has no {text!r} any more'
        ax.text(0, 1 - 0.22 * i, text, color=colour, family='monospace' if is_code else None,
                transform=ax.transAxes)

def arrow(ax, start, end, colour, label, shift, width=2.0):
    """An arrow with its label beside its middle."""
    ax.annotate('', end, start, arrowprops=dict(
        arrowstyle='-|>', color=colour, lw=width, shrinkA=1, shrinkB=1, mutation_scale=13))
    ax.text(*(np.add(start, end) / 2 + shift), label, color=colour, ha='center', va='center')

def draw_differences(ax, below):
    V, MH = np.array([3.2, 0.0]), np.array([1.3, 2.1])
    foot = MH @ V / (V @ V) * V  # alpha V
    arrow(ax, (0, 0), V, BLACK, 'V: the token\'s own value', (0, -0.28))
    arrow(ax, (0, 0), MH, BLACK, 'MH: ordinary\nattention', (-0.9, 0.35))
    arrow(ax, MH, V, RED, 'V − MH', (0.55, 0.25))
    arrow(ax, foot, MH, GREEN, 'MH − αV', (0.62, -0.55))
    ax.text(*(foot / 2 + (0.1, 0.2)), 'αV', color=GREEN, ha='center', va='center')
    corner = foot + np.array([(0.0, 0.22), (-0.22, 0.22), (-0.22, 0.0)])
    ax.plot(*corner.T, color=GREEN, lw=1.2)
    ax.set(xlim=(-0.9, 3.3), ylim=(-0.5, 2.2), title='Pass on a difference')
    explain(below, 'attentionx_gpt.py', [
        (RED, r'AttentionX:  $V - \gamma\,\mathrm{MH}$,  here $\gamma = 1$'),
        (BLACK, 'v - gamma * mh'),
        (GREEN, r'BeliefFormer:  $\mathrm{MH} - \alpha V$'),
        (BLACK, 'orthogonal(mh, v, (-2, -1))'),
        (GREY, r'$\alpha = \langle\mathrm{MH}, V\rangle\,/\,\langle V, V\rangle$')])

def draw_lasso(ax, below):
    K = np.array([(0.6, 2.1), (-1.3, 1.0), (2.3, -0.3), (1.3, 0.5), (-0.4, -0.6)])
    q, x = np.array([2.7, 1.7]), {0: 0.8, 2: 0.8}  # the Lasso's, where lambda is 1.5
    for i, k in enumerate(K):
        arrow(ax, (0, 0), k, GREY, f'$k_{i + 1}$', 0.5 * k + 0.2 * k / np.linalg.norm(k), 1.2)
    end = np.zeros(2)
    for i, x_i in x.items():
        arrow(ax, end, end + x_i * K[i], WINE, f'{x_i}$\\,k_{i + 1}$', (-0.34, 0.28))
        end = end + x_i * K[i]
    arrow(ax, (0, 0), q, BLACK, '$q$', 0.5 * q + 0.12)
    ax.set(xlim=(-1.4, 3.0), ylim=(-0.7, 2.5), title='Rebuild a query q from few keys k')
    explain(below, 'admm_detr.py', [
        (WINE, r'Lasso:  $\mathrm{min}_x\,\|q - x^T K\|^2 + \lambda\,\|x\|_1$'),
        (BLACK, 'F.relu(v - t) - F.relu(-v - t)'),
        (GREY, 'ADMM: ridge regression, then this'),
        (GREY, 'shrinkage of coefficients v by t')])

def draw_masks(ax, below):
    i, j = np.indices((12, 12))
    cells = np.select([j > i, i - j < 4, j < 1], [0, 1, 2], 3)
    ax.imshow(cells, ListedColormap(['white', INDIGO, PURPLE, PALE]), extent=(0, 12, 12, 0))
    ax.text(3.2, 1.2, '$M_1$: the last 4 tokens', color=INDIGO)
    ax.text(5.2, 3.2, '$M_2$: the first', color=PURPLE)
    ax.text(1.6, 10.6, 'not seen', color=GREY)
    ax.set(title='See few tokens', xlabel='sees token j', ylabel='token i')
    explain(below, 'mask_distill.py', [
        (INDIGO, r'Masks:  $\mathrm{softmax}(S + \log W)\,V$'),
        (INDIGO, '$W = c_1 M_1 + c_2 M_2$'),
        (BLACK, 'i - j < n'),
        (GREY, 'for $M_1$, with n = 4')])

def draw_method():
    figure = Figure(figsize=(8.6, 3.5))
    axes = figure.subplots(2, 3, height_ratios=(1.9, 1), width_ratios=(3.1, 3, 2.5))
    figure.subplots_adjust(left=0, right=1, bottom=0, hspace=0.3, wspace=0.05)
    for ax, below, draw_idea in zip(*axes, (draw_differences, draw_lasso, draw_masks)):
        draw_idea(ax, below)
        ax.set(aspect='equal', anchor='W', xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        below.axis('off')
    save(figure, 'method')

# ------------------------------------ the record ------------------------------------
# Comparisons by their csv files, each with a softmax of its own; FINE has a finer grid of rates
FINE = ['gpt-fine-judging']
COARSE = ['gpt-softmax', 'gpt-attentionx', 'gpt-belief']

def mean_losses(rows, variant):
    """{rate: mean validation loss}"""
    losses = {}
    for row in sorted(rows, key=lambda row: row['learning_rate']):
        if row['case'].split()[0] == variant:
            losses.setdefault(row['learning_rate'], []).append(row['val_loss'])
    return {rate: np.mean(values) for rate, values in losses.items()}

def read_all(names):
    """The rows of several files in runs/."""
    return [row for name in names for row in compare.read_rows(HERE / f'runs/{name}.csv')]

def draw_rates():
    figure = Figure(figsize=(9, 4), layout='constrained')
    axes = figure.subplots(1, 2)
    for ax, steps, line, choosing, judging in (
            (axes[0], 1000, '-', [*COARSE, 'gpt-fine-rates', 'gpt-common'], FINE),
            (axes[1], 4000, ':', ['gpt-longer-best', 'gpt-longer'], ['gpt-longer-best'])):
        tried = [row for row in read_all(choosing)
                 if row['role'] == 'choosing' or row['learning_rate'] == 1e-3]
        judged = [row for row in read_all(judging) if row['role'] == 'judging']
        for variant in ('softmax', 'attentionx', 'belief', 'belief-star'):
            name, colour = VARIANTS[variant]
            means, rings = mean_losses(tried, variant), mean_losses(judged, variant)
            ax.plot(means.keys(), means.values(), line, color=colour, marker=MARKERS[variant],
                    label=name)
            ax.plot(rings.keys(), rings.values(), 'o', color=colour, ms=14, mfc='none')
        ticks = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2][:4 if steps == 4000 else 5]
        ax.set(xscale='log', xlabel='peak learning rate', title=f'{steps} steps')
        ax.set_xticks(ticks, [f'{rate:g}' for rate in ticks])
        ax.minorticks_off()
    unstable = mean_losses(read_all(FINE), 'softmax')[1.6e-2]
    axes[0].annotate('one of 8 diverged', (1.6e-2, unstable), (0, 13), ha='right', fontsize=9,
                     textcoords='offset points')
    for steps in 1092, 1290:
        loss = np.mean([row['val_loss'] for row in read_all(['gpt-equal-time'])
                        if row['max_iters'] == steps])
        axes[0].plot(1e-3, loss, 'o', color=BLACK, mfc='white', zorder=4,
                     label='softmax, more steps' if steps == 1290 else None)
        axes[0].annotate(f'{steps} steps ', (1e-3, loss), ha='right', va='center', fontsize=9)
    axes[0].set(xlim=(4.5e-4, 2e-2), ylabel='validation loss (nats per byte)')
    axes[0].legend()
    save(figure, 'rates')

def table(names, *flags):
    """compare.py's lines, as in results.md, without softmax's."""
    paths = [str(HERE / f'runs/{name}.csv') for name in names]
    with contextlib.redirect_stdout(None):
        lines = compare.main(['attentionx_gpt', *flags, '--from-csv', *paths])
    return [line for line in lines if not line['case'].startswith('softmax')]

def draw_variants():
    tune = '--tune', 'learning_rate'
    lines = table(FINE, '--against', 'softmax 1.13e-2') + table(['gpt-variants'], *tune)
    finer = {line['case'].split()[0] for line in lines}
    lines += [line for line in table([*COARSE, 'gpt-gamma'], *tune)
              if line['case'].split()[0] not in finer or 'attentionx 2' in line['case']]
    lines.sort(key=lambda line: line['diff'])
    figure = Figure(figsize=(7.6, 0.6 + 0.4 * len(lines)))
    ax = figure.subplots()
    for line in lines:
        variant, *gamma, rate = line['case'].split()
        name, colour = VARIANTS[variant]
        name += ', γ = 2' if gamma == ['2'] else ''
        ax.errorbar(line['diff'], f'{name}, at {float(rate):g}', xerr=line['interval'],
                    color=colour, marker=MARKERS[variant], capsize=4, lw=2, ms=7)
    ax.invert_yaxis()
    ax.grid(visible=False, axis='y')
    ax.axvline(0, color=BLACK, lw=1)
    ax.set_xlabel('validation loss minus softmax\'s (nats per byte): left of 0 is better')
    save(figure, 'variants')

def draw_lengths():
    rows = compare.read_rows(HERE / 'runs/gpt-belief-log.csv')
    steps = sorted({row['step'] for row in rows if row['step'] > 0})
    figure = Figure(figsize=(9, 4.6), layout='constrained')
    axes = figure.subplots(2, 3, sharex=True, sharey='row')
    for layer, (above, below) in enumerate(axes.T):
        for ax, name, colour in ((above, 'mh_out', BLACK), (above, 'update_out', GREEN),
                                 (below, 'cos_mh', BLACK), (below, 'cos_update', GREEN)):
            found = np.array([[row[f'{layer}.{name}'] for row in rows if row['step'] == step]
                              for step in steps])  # (steps, seeds)
            ax.plot(steps, found.mean(1), color=colour)
            ax.fill_between(steps, found.min(1), found.max(1), color=colour, alpha=0.15, lw=0)
        above.set_title(f'layer {layer}')
        below.set_xlabel('training step')
    axes[0, 0].set(ylabel='mean length', ylim=(0, None))
    axes[1, 0].set_ylabel('cosine with the input X')
    figure.legend(axes[0, 0].lines, ['MH, after Wᵒ', 'Δ = MH − αV, after Wᵒ'],
                  loc='outside lower center', ncols=2)
    save(figure, 'lengths')

KINDS = {  # case in runs/lengths.csv: name, colour, marker
    'eager': ('eager: stores all scores', '#E69F00', 's'),
    'fused': ('the fused kernel', BLACK, 'o'),
    'masks': ('masks in blocks', INDIGO, '^'),
}

def draw_scaling():
    rows = compare.read_rows(HERE / 'runs/lengths.csv')
    tokens = sorted({row['tokens'] for row in rows})
    figure = Figure(figsize=(9, 4.6), layout='constrained')
    axes = figure.subplots(1, 2)
    for ax, field, label in zip(axes, ('ms', 'mib'), ('milliseconds', 'MiB at the peak')):
        for case, (_, colour, marker) in KINDS.items():
            found = [row[field] for row in rows if row['case'] == case]
            ax.plot(tokens, found, color=colour, marker=marker)
        starts = [row[field] for row in rows if row['tokens'] == tokens[0]]
        above = max(starts) * 2.5 * (np.array(tokens) / tokens[0]) ** 2
        below = min(starts) / 2 * np.array(tokens) / tokens[0]
        ax.plot(tokens, above, tokens, below, color=GREY, lw=0.8)
        ax.text(tokens[2], above[2], 'quadratic ', color=GREY, ha='right', va='bottom')
        ax.text(tokens[2], below[2], ' linear', color=GREY, ha='left', va='top')
        ax.set(xscale='log', yscale='log', xlabel='tokens', ylabel=label)
        ax.set_xticks(tokens, [f'{T:g}' for T in tokens])
        ax.yaxis.set_major_formatter('{x:,g}')
        ax.minorticks_off()
    figure.legend(axes[0].lines[:3], [name for name, *_ in KINDS.values()],
                  loc='outside lower center', ncols=3)
    save(figure, 'scaling')

def main():
    draw_method()
    draw_rates()
    draw_variants()
    draw_lengths()
    draw_scaling()

if __name__ == '__main__':
    main()
    print(f'pictures are in {HERE}')
