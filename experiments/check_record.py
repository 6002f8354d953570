"""Check the figures of README.md, results.md, exercises.md and runs/README.md's section Expected
against runs/*.csv.

    python experiments/check_record.py    # seconds; ends with 1 and the line where one is off

    a table under `$ python ...`     is what compare.py prints, letter by letter
    an interval, such as +0.1 to +0.2, or 0.1 and its half width: one that compare.py gives for such
                                     a table, or one that `own_intervals` below computes
    a verdict beside an interval     says no more than the interval does
    any other decimal or per cent    stands in runs/sources.csv: computed there, or quoted from a
                                     named source. Each text has it as often as that file says
    a csv                            has the checksum in runs/SHA256SUMS

What is code, or a command, is not checked.
"""
import contextlib
import csv
import difflib
import functools
import hashlib
import io
import os
import re
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

import compare

HERE = Path(__file__).resolve().parent
RUNS = HERE / 'runs'
TEXTS = {name: path.read_text('utf-8') for name, path in (
    ('README', HERE.parent / 'README.md'), ('results', HERE / 'results.md'),
    ('exercises', HERE / 'exercises.md'), ('runs', RUNS / 'README.md'))}
TEXTS['runs'] = re.search(r'## Expected\n.*?(?=## Tables\n)', TEXTS['runs'], re.S)[0]
COMPARE = re.compile(r'```text\n\$ python experiments/compare\.py (.*?)\n(.*?)\n```', re.S)
NUMBER = r'[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?'
FIGURE = re.compile(  # +0.1 to +0.2; 0.1 ± 0.2; 1, 2 and 3 %; 0.1
    r'[+-]\d+\.\d+\sto\s[+-]\d+\.\d+|[+-]?\d+\.\d+\s±\s\d+\.\d+|'
    rf'(?:{NUMBER}(?:\s%)?(?:,\s|\sand\s|\sto\s|,\sand\s))*{NUMBER}\s%|'
    r'[+-]?\d+(?:,\d{3})*\.\d+(?:e-\d+)?')

# ------------------------------------ what the csv files hold ------------------------------------
@functools.cache
def rows_of(*names):
    """The rows of files in runs/."""
    return [row for name in names for row in compare.read_rows(RUNS / f'{name}.csv')]

def values(names, case, field='val_loss', role='judging'):
    """{seed: figure} of a case."""
    return {row['seed']: row[field] for row in rows_of(*names.split())
            if row['case'] == case and row.get('role', 'judging') == role}

def mean(*which, **role):
    """Of such values."""
    return np.mean([*values(*which, **role).values()])

def gaps(names, case, first, field='val_loss'):
    """Differences of two cases, by seed."""
    ours, theirs = values(names, case, field), values(names, first, field)
    return {seed: x - theirs[seed] for seed, x in ours.items() if seed in theirs}

def share(part, whole):
    """In per cent: the ratio of two means of paired values, and its 95 % interval by Fieller."""
    seeds = [seed for seed in part if seed in whole]
    a, b = [np.array([x[seed] for seed in seeds]) for x in (part, whole)]
    t = stats.t.ppf(0.975, len(seeds) - 1) ** 2 / len(seeds)
    (s_aa, s_ab), (_, s_bb) = t * np.cov(a, b)
    roots = np.roots([b.mean() ** 2 - s_bb, 2 * (s_ab - a.mean() * b.mean()), a.mean() ** 2 - s_aa])
    return [100 * x for x in (a.mean() / b.mean(), *sorted(roots))]

def left(case):
    """How much of a lead over softmax at a rate of 0.001 is left after 4000 steps."""
    return share(gaps('gpt-longer', case, 'softmax'), gaps('gpt-common', case, 'softmax'))

def cost(name, case, what='training step'):
    """A ratio to softmax's time, and its quartiles."""
    row, = [row for row in rows_of(name) if row['case'] == case and row['role'] == what]
    return [row['ratio'], row['low'], row['high']]

def layers(name, step, formula, case=None):
    """Mean, least and most over the seeds at a step of a log, for each layer. `formula` gets a
    function that reads a column of the layer, such as r('alpha')."""
    rows = [row for row in rows_of(name) if row['step'] == step and case in (None, row['case'])]
    depth = sum(key.endswith('.mh') for key in rows[0])
    found = np.array([[formula(lambda key: row[f'{i}.{key}']) for row in rows]
                      for i in range(depth)])
    return np.stack([found.mean(1), found.min(1), found.max(1)], 1)

def alike(key, f=np.median):
    """Median, or another f, of the correlations of two layers' curves over a ViT's first epoch."""
    steps = sorted({row['step'] for row in rows_of('vit-first-epoch-log')})
    curves = [layers('vit-first-epoch-log', step, lambda r: r(key))[:, 0] for step in steps]
    return f(np.corrcoef(np.transpose(curves))[np.triu_indices(12, 1)])

def looks(name, step, key, **where):
    """Mean of a log's column at a step, of the rows with these settings."""
    return np.mean([row[key] for row in rows_of(name) if row['step'] == step
                    and all(row.get(field) == x for field, x in where.items())])

def moved(learn):
    """The most by which a share of the last five tokens moves in the second half of the runs in
    which attention, or only the alphas, learn."""
    found = []
    for name in ('masks-last5-log', 'masks-last5-other-log'):
        runs = {}
        for row in rows_of(name):
            if row['case'].startswith(learn) and row['step'] >= 3125:
                c = np.array([[row[f'{i}.offset:{k}'] for k in range(5)] for i in range(4)])
                run = runs.setdefault((row['case'], row['seed']), [])
                run.append(c / c.sum(1, keepdims=True))
        found += [abs(np.array(run) - run[-1]).max() for run in runs.values()]
    return max(found)

def by_epoch_20(case):
    """Per cent of the fall of the loss that a run's first 1250 of 6250 steps bring, by seed."""
    losses = [[row['loss'] for row in rows_of('masks-last5-log') if row['step'] == step
               and row['case'] == case] for step in (125, 1250, 6250)]
    begin, then, end = np.array(losses)
    return 100 * (begin - then) / (begin - end)

def first(script, flags, figure):
    """Of a first run."""
    row, = [row for row in rows_of('first-runs')
            if (row['program'], row.get('flags', ''), row['figure']) == (script, flags, figure)]
    return row['value']

def equal_time(case, steps):
    """Differences from softmax's loss after so many steps, interpolated seed by seed."""
    names = 'gpt-common gpt-equal-time gpt-factor'
    times = [values(names, name) for name in ('softmax', 'softmax 1092', 'softmax 1290')]
    return [x - np.interp(steps, (1000, 1092, 1290), [loss[seed] for loss in times])
            for seed, x in values(names, case).items()]

GAMMAS = [('gpt-attentionx', 'attentionx 4e-3'), ('gpt-gamma-one', 'attentionx 1 4e-3'),
          ('gpt-gamma-zero-diag', 'attentionx 4e-3'), ('gpt-attentionx', 'attentionx-zd 4e-3')]

def gamma_gaps():
    """Differences of gamma 3 from gamma 1 by seed: with the diagonal, and without it."""
    each = [values(*pair) for pair in GAMMAS]
    three, one, three_zd, one_zd = np.array([[x[seed] for seed in sorted(x)] for x in each])
    return three - one, three_zd - one_zd

def ends(command, case):
    """The interval that compare.py prints for a case; the command names files of runs/."""
    words = [f'{RUNS}/{word}.csv' if (RUNS / f'{word}.csv').exists() else word
             for word in shlex.split(command)]
    line, = [line for line in run_compare(*words)[1] if line['case'] == case]
    return [line['diff'] - line['interval'], line['diff'] + line['interval']]

def over_values():
    """AP by seed, 31 to 36: OA's own problem in self-attention, no weights, softmax."""
    softmax = values('detr-softmax-31-33 detr-softmax-34-42', 'softmax', 'AP')
    return [values('detr-values-self', 'SA over values, 0.3', 'AP'),
            values('detr-more-self detr-values-self', 'SA no-weights', 'AP'),
            {seed: x for seed, x in softmax.items() if seed <= 36}]

def correlation(names, *cases):
    """Of two cases over the seeds."""
    one, other = [values(names, case, 'AP') for case in cases]
    return np.corrcoef([one[seed] for seed in one], [other[seed] for seed in one])[0, 1]

def at_rates(kind):
    """AP at three rates, means of the seeds 31 and 32."""
    rows = rows_of('detr-rates', 'detr-softmax-31-33', 'detr-cross')
    return [np.mean([row['AP'] for row in rows if row['seed'] in (31, 32)
                     and (row['cross_attention'], row['learning_rate']) == (kind, rate)])
            for rate in (3e-4, 1e-3, 3e-3)]

def from_relu(penalty, sparsity, ridge):
    """AP of seeds 31 and 32, x's mean cosine with ReLU attention's, per cent of zeros in x."""
    case = f'admm {ridge:g} {penalty} {sparsity:g}'
    cosine, zeros = np.mean([[looks('detr-ridge-log', 2000, f'{layer}.cross_{key}', case=case)
                              for key in ('relu', 'zeros')] for layer in (0, 1)], 0)
    AP = values('detr-ridge', case, 'AP')
    return [AP[31], AP[32], cosine, 100 * zeros]

def price(penalty, ridge):
    """Mean AP that a sparsity of 0.3 costs, against 0.03."""
    weak, strong = [from_relu(penalty, sparsity, ridge)[:2] for sparsity in (0.03, 0.3)]
    return np.mean(weak) - np.mean(strong)

THREE = 'attentionx', 'belief', 'belief-star'
FOUR = 'accuracy', 'mse', 'cosine', 'kl'
SHORTER = lambda r: r('update_out') / r('mh_out')
ANGLE = lambda r: np.degrees(np.arccos(r('cos_mh')) - np.arccos(r('cos_update')))
LENGTH_FOR_TURN = lambda key, case: layers('gpt-lengths-log', 1000, lambda r: r(
    f'stretch_{key}') / r(f'turn_{key}'), case)[:, 0]
ANGLES = layers('gpt-belief-log', 1000, ANGLE)
BEST = {name: gaps(f'gpt-softmax gpt-{file}', f'{name} {rate}', 'softmax 1.6e-2')
        for name, file, rate in (('attentionx', 'attentionx', '4e-3'), ('belief', 'belief', '8e-3'),
                                 ('belief-star', 'belief', '4e-3'))}
LENGTHS = {(row['case'], row['tokens']): row for row in rows_of('lengths')}
BY_ALPHAS = [mean('masks-teachers', f'64+4, mask only teacher{n}.pt', 'kl')
             - mean('masks-more-teachers', f'64+4, alphas teacher{n}.pt', 'kl') for n in (2, 3, 4)]

# ------------------------------------ tables and intervals ------------------------------------
@functools.cache
def run_compare(*words):
    """compare.py -> what it prints, and its lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        lines = compare.main([*words])
    return out.getvalue().strip('\n'), lines

def check_tables(texts):
    """Tables that are not what compare.py prints -> complaints."""
    for name, text in texts.items():
        for command, table in COMPARE.findall(text):
            prints, _ = run_compare(*shlex.split(command))
            difference = difflib.unified_diff(table.splitlines(), prints.splitlines(), n=0,
                                              lineterm='', fromfile=name, tofile=command)
            if table != prints:
                yield '\n'.join(difference)

def printed_intervals(texts):
    """Those of every table of the texts and of runs/README.md; a ViT's in points."""
    runs = (RUNS / 'README.md').read_text('utf-8')
    commands = [command for text in texts.values() for command, _ in COMPARE.findall(text)]
    commands += re.findall(r'compare\.py (.* --from-csv .*)', runs)
    for words in map(shlex.split, commands):
        scale = 100 if words[0] == 'belief_vit' else 1
        for line in run_compare(*words)[1] if '--bench' not in words else []:
            middle, half = scale * line['diff'], scale * line['interval']
            yield middle - half, middle + half

def own_intervals():
    """Those that no command prints."""
    # equal time: variants at what a step costs, in steps of softmax
    for case, steps in {
            'attentionx': [1009], 'attentionx-v1 gamma 1/2': [1009],
            'attentionx-v1 gamma 1/3': [1009], 'belief': [1029, 1017, 1023, 1036, 1064, 1092],
            'belief-star': [1136, 1064, 1084, 1091, 1290]}.items():
        for n in steps:
            yield stats.ttest_1samp(equal_time(case, n), 0).confidence_interval(1 - 0.05 / 5)
    both = np.subtract(equal_time('belief-star', 1136), equal_time('belief', 1029))
    yield stats.ttest_1samp(both, 0).confidence_interval(1 - 0.05 / 5)
    # claim 4 in a family of the papers' three variants alone
    yield stats.ttest_1samp([*BEST['belief-star'].values()], 0).confidence_interval(1 - 0.05 / 3)
    # BeliefFormer* and AttentionX against BeliefFormer in the ViT, in points: alone, in six pairs
    for case in 'belief-star 1e-3', 'attentionx 2e-3':
        gap = [100 * x for x in gaps('vit-cifar10', case, 'belief 2e-3', 'test_acc').values()]
        for tests in 1, 6:
            yield stats.ttest_1samp(gap, 0).confidence_interval(1 - 0.05 / tests)
    # the ViT at the papers' rate: four tests, and AttentionX against BeliefFormer by itself
    for case, first, tests in (('attentionx', 'softmax', 4), ('belief', 'softmax', 4),
                               ('belief-star', 'softmax', 4), ('belief-star', 'belief', 4),
                               ('attentionx', 'belief', 1)):
        gap = [100 * x for x in gaps('vit-papers-rate', case, first, 'test_acc').values()]
        yield stats.ttest_1samp(gap, 0).confidence_interval(1 - 0.05 / tests)
    # AttentionX against BeliefFormer after 6 epochs at best rates
    gap = gaps('vit-6-epochs', 'attentionx 2e-3', 'belief 2e-3', 'test_acc').values()
    yield stats.ttest_1samp([100 * x for x in gap], 0).confidence_interval()
    # gamma 3 against 1 with the diagonal, 1 against 3 without it, and what differs in the gains
    own, zero = gamma_gaps()
    for gap in own, -zero, own - zero:
        yield stats.ttest_1samp(gap, 0).confidence_interval(1 - 0.05 / 3)
    # OA's own problem in self-attention, against no weights and softmax
    ours, *others = [[*x.values()] for x in over_values()]
    for other in others:
        yield stats.ttest_ind(ours, other, equal_var=False).confidence_interval(1 - 0.05 / 2)
    # ReLU attention against softmax and ridge regression, the Lasso against that, each by itself
    softmax = 'detr-softmax-31-33 detr-softmax-34-42'
    for (name, case), (other, first) in ((('detr-relu', 'relu'), (softmax, 'softmax')),
                                         (('detr-relu', 'relu'), ('detr-cross', 'l2')),
                                         (('detr-cross', 'lasso'), ('detr-cross', 'l2'))):
        pair = [[*values(*which, 'AP').values()] for which in ((name, case), (other, first))]
        yield stats.ttest_ind(*pair, equal_var=False).confidence_interval()
    # a d x d inverse against an N x N one: as planned, and paired
    pair = [[*values('detr-more-self', case, 'AP').values()]
            for case in ('SA Lasso, half solved', 'SA the same, N x N')]
    yield stats.ttest_ind(*pair, equal_var=False).confidence_interval()
    yield stats.ttest_rel(*pair).confidence_interval()
    # claim 12a: KL with all the text, less KL with 1,000 samples
    pairs = [('masks-last5', 'attention, l1 0.001, all text', 'attention, l1 0.001'),
             ('masks-last5-more', '0', '1000')]
    less = [x for pair in pairs for x in gaps(*pair, 'kl').values()]
    yield stats.ttest_1samp(less, 0).confidence_interval()
    # fresh drawings: the 19 seeds done first, and all; paired, and as planned
    lasso, none = [values('detr-fresh', case, 'AP') for case in ('admm', 'no-weights')]
    for seeds in [seed for seed in lasso if seed < 69 or seed == 71], [*lasso]:
        x, y = [[one[seed] for seed in seeds] for one in (lasso, none)]
        yield stats.ttest_rel(x, y).confidence_interval()
        yield stats.ttest_ind(x, y, equal_var=False).confidence_interval()

def texts_of(intervals):
    """All that may be written of them: rounded, or with half the width."""
    for low, high in intervals:
        for digits in 6, 4, 3, 1:
            yield f'{low:+.{digits}f} to {high:+.{digits}f}'
        yield f'{abs(low + high) / 2:.3f} ± {(high - low) / 2:.3f}'

def check_verdicts(text):
    """Verdicts of results.md that their intervals do not bear -> complaints."""
    seen = 0
    for line in plain(text).splitlines():
        found = re.findall(r'\| (better|worse|open), ([+-]\d+\.\d+) to ([+-]\d+\.\d+)', line)
        if last := re.search(r'\| ([+-][\d.]+) to ([+-][\d.]+) \| (better|worse|open) \|$', line):
            found.append((last[3], last[1], last[2]))
        for word, low, high in found:
            seen += 1
            is_loss = int(re.match(r'\| (\d+)', line)[1]) < 7  # the claim's number
            clear = 'better' if (float(high) < 0) == is_loss else 'worse'
            if word != 'open' and (word != clear or float(low) <= 0 <= float(high)):
                yield f'results: {word} is more than {low} to {high} says: {line}'
    if seen < 30:
        yield f'results: only {seen} verdicts beside an interval'

# ------------------------------------ other figures ------------------------------------
def plain(text):
    """A text without code and commands; minus signs as they stand in code."""
    text = COMPARE.sub('', text.replace('\N{MINUS SIGN}', '-').replace('\xa0', ' '))
    text = re.sub(r'```.*?```', '', text, flags=re.S)
    text = re.sub(r'(?m)^ {4}(?:python|pip|git|!|%|from|result = ).*$', '', text)
    return re.sub(r'`[^`\n]*`|\*\*', '', text)

def says(value, figure):
    """Whether a value, rounded to as many digits as the figure has, is the figure."""
    mantissa, _, power = figure.replace(',', '').partition('e')
    unit = 10.0 ** (int(power or 0) - len(mantissa.partition('.')[2]))
    return abs(value - float(figure.replace(',', ''))) <= 0.5 * unit

def known_figures():
    """runs/sources.csv -> {text: Counter of figures}, and the lines that compute something else."""
    known, wrong = {name: Counter() for name in TEXTS}, []
    with open(RUNS / 'sources.csv', newline='', encoding='utf-8') as file:
        for row in csv.DictReader(file):
            told = row['figures'].split()
            if row['source'].startswith('='):
                found = np.ravel(eval(row['source'][1:], globals()))
                if len(found) != len(told) or not all(map(says, found, told)):
                    wrong.append(f'sources.csv: {" ".join(told)} is {found} by {row["source"]}')
            for figure in told:
                known[row['text']][figure] += int(row['times'] or 1)
    return known, wrong

def check_figures(name, text, known, intervals):
    """Figures that a text has more or less often than is known -> complaints."""
    text, places = plain(text), defaultdict(list)
    for match in FIGURE.finditer(text):
        if ' '.join(match[0].split()) not in intervals:
            line = text.splitlines()[text.count('\n', 0, match.start())]
            for figure in re.findall(NUMBER, match[0]):
                places[figure].append(line)
    for figure in sorted({*places, *known}):
        times, lines = len(places[figure]), dict.fromkeys(places[figure])
        if times != known[figure]:
            yield '\n  '.join([f'{name} has {figure} {times} times, and sources.csv '
                               f'{known[figure]}:', *lines])

def check_sums():
    """csv files that are not those of SHA256SUMS -> complaints."""
    files = {path.name: hashlib.sha256(path.read_bytes().replace(b'\r\n', b'\n')).hexdigest()
             for path in RUNS.glob('*.csv') if path.name != 'sources.csv'}
    sums = dict(line.split()[::-1] for line in (RUNS / 'SHA256SUMS').read_text().splitlines())
    for name in sorted(sums.keys() | files):
        if sums.get(name) != files.get(name):
            yield f'SHA256SUMS has {sums.get(name)} for runs/{name}, which has {files.get(name)}'

def main():
    os.chdir(HERE.parent)  # where the commands are typed
    intervals = {*texts_of(printed_intervals(TEXTS)), *texts_of(own_intervals())}
    known, wrong = known_figures()
    wrong += check_tables(TEXTS)
    for name, text in TEXTS.items():
        wrong += check_figures(name, text, known[name], intervals)
    wrong += check_verdicts(TEXTS['results'])
    wrong += check_sums()
    figures = sum(sum(counter.values()) for counter in known.values())
    print('\n'.join(wrong) or f'{figures} figures, all intervals and all tables agree')
    return 1 if wrong else 0

if __name__ == '__main__':
    sys.exit(main())
