"""Draw every picture of README.md and results.md that rests on runs/*.csv or on a formula.

    python experiments/figures.py    # writes experiments/*.png; trains nothing, takes seconds

    method.png    what each idea outputs, its formula, and lines of its script that compute it
    claims.png    what was found: differences from softmax in a GPT, a ViT and DETR
    rates.png     a small GPT's validation loss by learning rate, and its difference from softmax's
    variants.png  every variant at its own best rate: its difference from softmax, sorted
    layers.png    BeliefFormer's Fig. 3: how long MH and Delta are and where they point, in a ViT's
                  first epoch
    ridge.png     from ReLU attention to a Lasso: DETR's AP over how much x is like ReLU attention's
    coefficients.png   which of the last five tokens learned masks weigh, layer by layer
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
from scipy import stats

import compare

HERE = Path(__file__).resolve().parent
BLACK, GREEN, RED = '#000000', '#009E73', '#D55E00'  # Okabe and Ito's
WINE, INDIGO, PURPLE, GREY, PALE = '#882255', '#332288', '#AA4499', '#767676', '#DDDDDD'
VARIANTS = {  # name and colour; those of variants.py, and compare.py's
    **compare.VARIANTS, 'differential': ('differential attention', INDIGO),
    'gated': ('gated attention', '#661100'), 'laplacian': ('Laplacian heads', '#666633'),
    'lasso': ('our easier Lasso', WINE), 'no-weights': ('no weight matrices', GREY),
    'Lasso,': ('the paper\'s Lasso,\nover keys', WINE)}
MARKERS = dict(zip(VARIANTS, 'os^DvPXpd<>hovs'))
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
    ax.set(xlim=(-0.9, 3.3), ylim=(-0.5, 2.2), title='Output a difference')
    explain(below, 'attentionx_gpt.py', [
        (RED, r'AttentionX:  $V - \gamma\,\mathrm{MH}$,  here $\gamma = 1$'),
        (BLACK, 'v - gamma * mh'),
        (GREEN, r'BeliefFormer:  $\mathrm{MH} - \alpha V$'),
        (BLACK, 'mh - alpha * v'),
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
        (GREY, 'A step of ADMM: ridge regression,'),
        (GREY, 'then coefficients a shrink by t:'),
        (BLACK, 'F.relu(a - t) - F.relu(-a - t)'),
        (GREY, 'the gap to q is what λ costs')])

def draw_masks(ax, below):
    i, j = np.indices((12, 12))
    cells = np.select([j > i, i - j < 4, j < 1], [0, 1, 2], 3)
    ax.imshow(cells, ListedColormap(['white', INDIGO, PURPLE, PALE]), extent=(0, 12, 12, 0))
    ax.text(3.2, 1.2, '$M_1$: the last 4 tokens', color=INDIGO)
    ax.text(5.2, 3.2, '$M_2$: the first token', color=PURPLE)
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
# Comparisons by their csv files, each with a softmax of its own
COARSE = 'gpt-softmax gpt-attentionx gpt-belief'
BEST = COARSE + ' gpt-gamma'
TUNE = '--tune', 'learning_rate'
LOSS = 'loss minus softmax\'s (nats per byte)'

def read_all(names):
    """The rows of files in runs/."""
    return [row for name in names.split() for row in compare.read_rows(HERE / f'runs/{name}.csv')]

def table(script, names, *flags):
    """compare.py's lines by their cases, as in results.md, without softmax's."""
    paths = [str(HERE / f'runs/{name}.csv') for name in names.split()]
    with contextlib.redirect_stdout(None):
        lines = compare.main([script, *flags, '--from-csv', *paths])
    return {line['case']: line for line in lines if not line['case'].startswith('softmax')}

def bars(ax, lines, **how):
    """A row for each {name: line of a table}: its difference from the first, and the interval."""
    for name, line in lines.items():
        variant = line['case'].split()[0]
        ax.errorbar(line['diff'], name, xerr=line['interval'], color=VARIANTS[variant][1], ms=7,
                    marker=MARKERS[variant], capsize=4, lw=2)
    ax.invert_yaxis()
    ax.margins(y=0.9 / len(lines))
    ax.grid(visible=False, axis='y')
    ax.axvline(0, color=BLACK, lw=1)
    ax.set(**how)

def named(lines, *cases):
    return {VARIANTS[case.split()[0]][0]: lines[case] for case in cases}

def draw_claims():
    figure = Figure(figsize=(9, 6.6), layout='constrained')
    (low, papers), (best, vit), (longer, detr) = figure.subplots(3, 2)
    gpt = dict(xlim=(-0.06, 0.06), xlabel=f'{LOSS}\nleft is better')
    lines = table('attentionx_gpt', 'gpt-common gpt-equal-time')
    bars(low, named(lines, 'attentionx', 'belief', 'belief-star'), **gpt,
         title='GPT, all at one low rate, 1000 steps')
    lines = table('attentionx_gpt', BEST, *TUNE)
    bars(best, named(lines, 'attentionx 4e-3', 'belief 8e-3', 'belief-star 4e-3'), **gpt,
         title='GPT, each at its best rate, 1000 steps')
    lines = table('attentionx_gpt', 'gpt-longer-best', *TUNE)
    bars(longer, named(lines, 'attentionx 8e-3', 'belief 8e-3', 'belief-star 8e-3'), **gpt,
         title='GPT, each at its best rate, 4000 steps')
    points = dict(xlim=(-0.04, 0.04),
                  xlabel='accuracy minus softmax\'s (0.01 is a point)\nright is better')
    lines = table('belief_vit', 'vit-papers-rate')
    of_three, of_four = stats.t.ppf(1 - 0.025 / np.array([3, 4]), df=5)  # six seeds
    for line in lines.values():  # judged as four: the last is BeliefFormer* minus BeliefFormer
        line['interval'] *= of_four / of_three
    bars(papers, named(lines, 'attentionx', 'belief', 'belief-star'), **points,
         title='ViT, all at the papers\' low rate, 6 epochs')
    three, six = [table('belief_vit', name, *TUNE) for name in ('vit-cifar10', 'vit-6-epochs')]
    bars(vit, {'AttentionX, 3': three['attentionx 2e-3'],
               'AttentionX, 6': six['attentionx 2e-3'],
               'BeliefFormer, 3': three['belief 2e-3'],
               'BeliefFormer, 6': six['belief 2e-3'],
               'BeliefFormer*, 3': three['belief-star 1e-3']}, **points,
         title='ViT, each at its best rate, 3 or 6 epochs')
    lines = table('admm_detr', 'detr-softmax-31-33 detr-softmax-34-42 detr-cross')
    lines.update(table('admm_detr', 'detr-solved'))
    bars(detr, named(lines, 'lasso', 'no-weights', 'Lasso, solved'), xlim=(-0.8, 0.2),
         title='DETR\'s cross-attention, drawn shapes',
         xlabel='average precision minus softmax\'s\nright is better')
    save(figure, 'claims')

def draw_rates():
    losses = {}  # {variant: {rate: {seed: loss}}}
    for row in read_all(COARSE + ' gpt-fine-rates gpt-common'):
        if row['role'] == 'choosing' or row['learning_rate'] == 1e-3:
            rates = losses.setdefault(row['case'].split()[0], {})
            rates.setdefault(row['learning_rate'], {})[row['seed']] = row['val_loss']
    figure = Figure(figsize=(9, 3.8), layout='constrained')
    left, right = figure.subplots(1, 2)
    for variant in ('softmax', 'attentionx', 'belief', 'belief-star'):
        means, gaps = {}, {}
        for rate, runs in sorted(losses[variant].items()):
            means[rate] = np.mean([*runs.values()])
            if rate in losses['softmax']:
                theirs = losses['softmax'][rate]
                gaps[rate] = np.mean([runs[seed] - theirs[seed] for seed in runs])
        label, colour = VARIANTS[variant]
        for ax, line in (left, means), (right, gaps):
            ax.plot(line.keys(), line.values(), color=colour, marker=MARKERS[variant], label=label)
    ticks = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    for ax in left, right:
        ax.set(xscale='log', xlabel='peak learning rate')
        ax.set_xticks(ticks, [f'{rate:g}' for rate in ticks])
        ax.minorticks_off()
    left.set(title='loss after 1000 steps', ylabel='nats per byte')
    right.set(title='the same minus softmax\'s', ylabel='nats per byte: below 0 is better')
    figure.legend(*left.get_legend_handles_labels(), loc='outside lower center', ncols=4)
    save(figure, 'rates')

def draw_variants():
    fine = table('attentionx_gpt', 'gpt-fine-judging', '--against', 'softmax 1.13e-2')
    lines = [*fine.values(), *table('attentionx_gpt', 'gpt-variants', *TUNE).values()]
    finer = {case.split()[0] for case in fine}  # these have a finer grid of rates
    lines += [line for case, line in table('attentionx_gpt', BEST, *TUNE).items()
              if case.split()[0] not in finer or 'attentionx 2' in case]
    named = {}
    for line in sorted(lines, key=lambda line: line['diff']):
        variant, *gamma, rate = line['case'].split()
        name = VARIANTS[variant][0]
        if variant == 'attentionx':
            name += f', γ = {"".join(gamma) or 3}'
        named[f'{name}, at {float(rate):g}'] = line
    figure = Figure(figsize=(7.6, 0.6 + 0.4 * len(lines)))
    bars(figure.subplots(), named, xlabel=f'validation {LOSS}: left of 0 is better')
    save(figure, 'variants')

def draw_layers():
    rows = read_all('vit-first-epoch-log')
    steps = sorted({row['step'] for row in rows})
    panels = {'length of Δ / length of MH': lambda r: r['update_out'] / r['mh_out'],
              'share along X: Δ minus MH': lambda r: r['cos2_update'] - r['cos2_mh'],
              'α: how much of V is in MH': lambda r: r['alpha']}
    figure = Figure(figsize=(9, 3.6), layout='constrained')
    axes = figure.subplots(1, 3)
    for ax, (title, figure_of) in zip(axes, panels.items()):
        for layer in (0, 3, 6, 9, 11):
            values = {step: [] for step in steps}  # of the seeds
            for row in rows:
                own = {key.partition('.')[2]: x for key, x in row.items()
                       if key.startswith(f'{layer}.')}
                values[row['step']].append(figure_of(own))
            ax.plot(steps, [np.mean(values[step]) for step in steps], label=f'layer {layer}',
                    color=matplotlib.colormaps['viridis_r'](layer / 12 + 0.08))
        ax.set(title=title, xlabel='step')
    axes[1].axhline(0, color=BLACK, lw=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=5)
    save(figure, 'layers')

def draw_ridge():
    alike = {}  # {case: x's mean cosine with ReLU attention's, of each seed and layer}
    for row in read_all('detr-ridge-log'):
        if row['step'] == 2000:
            alike.setdefault(row['case'], []).extend(row[f'{i}.cross_relu'] for i in range(2))
    found = {}  # {(penalty, sparsity): {ridge: (cosine, AP of each seed)}}
    for row in read_all('detr-ridge'):
        line = found.setdefault((row['penalty'], row['sparsity']), {})
        cosine = np.mean(alike[row['case']])
        line.setdefault(row['ridge'], (cosine, []))[1].append(row['AP'])
    figure = Figure(figsize=(7.6, 4.4), layout='constrained')
    ax = figure.subplots()
    for (penalty, sparsity), line in sorted(found.items(), reverse=True):
        colour, marker = (WINE, 'o') if penalty == 'positive' else (INDIGO, 's')
        weak = sparsity < 0.1  # its numbers are above the marks
        where = dict(xytext=(-6, 4) if weak else (6, -4), ha='right' if weak else 'left',
                     va='bottom' if weak else 'top', textcoords='offset points')
        cosines = [cosine for cosine, _ in line.values()]
        sign = 'x ≥ 0' if penalty == 'positive' else 'x of any sign'
        ax.plot(cosines, [np.mean(AP) for _, AP in line.values()], '-' if weak else '--',
                color=colour, marker=marker, mfc=colour if weak else 'white',
                label=f'{sign}, λ = {sparsity:g}')
        for ridge, (cosine, AP) in line.items():
            ax.plot([cosine] * len(AP), AP, '.', color=colour, ms=4)
            ax.annotate(f'{ridge:g}', (cosine, np.mean(AP)), color=colour, **where)
    relu = np.mean([row['AP'] for row in read_all('detr-relu')])
    ax.plot(1, relu, '*', color=BLACK, ms=12, label='ReLU attention')
    ax.set(xlabel='mean cosine of x with ReLU attention\'s', ylabel='average precision',
           xlim=(None, 1.03), ylim=(-0.05, None))
    figure.legend(*ax.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    save(figure, 'ridge')

def draw_coefficients():
    figure = Figure(figsize=(9, 4.4), layout='constrained')
    axes = figure.subplots(2, 4, sharex=True, sharey=True)
    names = ('the token itself', 'the one before', 'two before', 'three before', 'four before')
    for line, case in zip(axes, ('alphas, l1 0.001', 'attention, l1 0.001')):
        log = [row for row in read_all('masks-last5-log')
               if (row['case'], row['seed']) == (case, 1337)]
        steps = [row['step'] for row in log]
        for layer, ax in enumerate(line):
            c = np.array([[row[f'{layer}.offset:{k}'] for k in range(5)] for row in log])
            for k, name in enumerate(names):
                ax.plot(steps, c[:, k] / c.sum(1), label=name,
                        color=matplotlib.colormaps['viridis_r'](k / 5 + 0.1))
    axes[0, 0].set_ylabel('share, where only\ncoefficients learn')
    axes[1, 0].set_ylabel('share, where\nattention learns, too')
    for layer in range(4):
        axes[0, layer].set(title=f'layer {layer}', ylim=(0, None))
        axes[1, layer].set(xlabel='step', xticks=(0, 3000, 6000))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=5)
    save(figure, 'coefficients')

def draw_scaling():
    rows = read_all('lengths')
    tokens = sorted({row['tokens'] for row in rows})
    figure = Figure(figsize=(9, 4.6), layout='constrained')
    axes = figure.subplots(1, 2)
    for ax, field, label in zip(axes, ('ms', 'mib'), ('milliseconds', 'MiB at the peak')):
        for case, colour, marker in (('eager', '#E69F00', 's'), ('fused', BLACK, 'o'),
                                     ('masks', INDIGO, '^')):
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
    names = 'eager: stores all scores', 'PyTorch\'s fused kernel', 'masks in blocks'
    figure.legend(axes[0].lines[:3], names, loc='outside lower center', ncols=3)
    save(figure, 'scaling')

def main():
    draw_method()
    draw_claims()
    draw_rates()
    draw_variants()
    draw_layers()
    draw_ridge()
    draw_coefficients()
    draw_scaling()

if __name__ == '__main__':
    main()
    print(f'pictures are in {HERE}')
