# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "scipy", "tiktoken", "matplotlib"]
# ///
r"""Train variants of one script on the same batches and seeds; draw and tabulate them.

    python experiments/compare.py attentionx_gpt --sweep attention=softmax,attentionx,belief
    python experiments/compare.py attentionx_gpt --table papers --data shakespeare --seeds 11,12,13
    python experiments/compare.py attentionx_gpt --table papers --sweep learning_rate=2e-3,4e-3 \
        --tune learning_rate --seeds 0,1,2 --test-seeds 11,12,13  # each at its own rate
    python experiments/compare.py attentionx_gpt --with mine.py --sweep attention=softmax,gated
    python experiments/compare.py attentionx_gpt --from-csv experiments/runs/gpt-common.csv
    python experiments/compare.py admm_detr --from-csv experiments/runs/detr-cross.csv --against l2
    python experiments/compare.py attentionx_gpt --bench --sweep attention=softmax,belief

All other flags go to the script: --preset t4, --max-iters 1000. A run uses one CPU thread unless
--threads says otherwise. Each run is a row of a csv file: its settings, its figures, the version of
the script that made it, and checksums of its data and weights. The same command trains only what
that file lacks, so it continues where it was stopped. The last line names a picture: every case
over steps and over seconds. Needs scipy, and matplotlib for the picture.
"""
import argparse
import contextlib
import csv
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.pop('WORLD_SIZE', None)  # torchrun's, or left by it: every run here is one process

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'compare: error: {message}', file=sys.stderr)
    raise SystemExit(2)

try:
    from scipy import stats
except ImportError:
    fail('comparisons need `pip install scipy`')

# ------------------------------------ the documents' tables ------------------------------------
def rows_of(flag, values):
    return {value: f'{flag} {value}' for value in values.split()}

PAPERS = rows_of('--attention', 'softmax attentionx belief belief-star')
DETR = '--self-attention softmax --cross-attention softmax'
# Optimizing Attention's problem (2) without our options; 15 iterations leave x far from solved
OWN = DETR + ' --ridge 0 --no-positive --no-centre --power 5 --iterations 15'
HALF = OWN + ' --rho 0.1'  # the record's rows
SOLVED = OWN + ' --rho 0.01 --iterations 60'
OA = OWN + ' --rho 0.01 --random-tokens 32'  # the paper's random tokens, whose number it omits
TABLES = {  # each row's name, and its flags; of a flag that is given twice, the second counts
    'attentionx_gpt': {
        'papers': PAPERS,
        'record': {
            **rows_of('--attention', 'softmax attentionx attentionx-learned belief belief-head '
                                     'belief-star value-skip'),
            'attentionx-zd': '--attention attentionx --zero-diag'},
        'factor': {  # the same functions, scaled: a larger step, or a better layer?
            'softmax': '--attention softmax',
            'attentionx': '--attention attentionx',
            'attentionx gamma 2': '--attention attentionx --gamma 2',
            'attentionx-v1 gamma 1/2': '--attention attentionx-v1 --gamma 0.5',
            'attentionx-v1 gamma 1/3': f'--attention attentionx-v1 --gamma {1 / 3}',
            'softmax-scaled gamma 3': '--attention softmax-scaled --gamma 3'}},
    'belief_vit': {
        # AX1 and AX2 Table 1: CIFAR-10 88.15 and 89.41 %, CIFAR-100 61.86 and 64.00 %
        # BF Table 3: CIFAR-10 88.15, 89.14 and, for belief-star, 88.64 %
        'papers': PAPERS},
    'admm_detr': {
        # what can replace softmax in cross-attention, with our options
        'cross': {'softmax': DETR,
                  'no-weights': DETR + ' --cross-attention no-weights',
                  'lasso': DETR + ' --cross-attention admm',
                  'l2': DETR + ' --cross-attention l2'},
        # the paper taken at its word: (2) half solved; over the values that are mixed; (4) with
        # its misprints; (1); and in self-attention (SA)
        'more': {'softmax': DETR,
                 'Lasso, half solved': HALF + ' --cross-attention admm',
                 # the next needs --with experiments/printed.py
                 'as printed': HALF + ' --cross-attention admm-printed --solve-over value',
                 'Lasso of values': HALF + ' --random-tokens 32 --cross-attention admm '
                                    '--solve-over value',
                 'l2, no options': HALF + ' --ridge 0.1 --cross-attention l2',
                 'SA no-weights': DETR + ' --self-attention no-weights',
                 'SA Lasso, half solved': HALF + ' --self-attention admm',
                 'SA the same, N x N': HALF + ' --self-attention admm-vanilla'},
        'solved': {'softmax': DETR,
                   'Lasso, solved': SOLVED + ' --cross-attention admm',
                   'Lasso, solved, random': SOLVED + ' --cross-attention admm --random-tokens 32'},
        # OA Table 1: AP 40.6 (300 epochs), 38.5, 36.0, 38.5, 37.7
        '1': {'DETR': DETR,
              'no weights SA': DETR + ' --self-attention no-weights',
              'no weights CA': DETR + ' --cross-attention no-weights',
              'ADMM SA': OA + ' --self-attention admm',
              'ADMM CA': OA + ' --cross-attention admm'},
        # OA Table 2: AP 28.0, 38.0, 38.5
        '2': {'l2 CA': OA + ' --ridge 0.1 --cross-attention l2',
              'vanilla ADMM SA': OA + ' --self-attention admm-vanilla',
              'efficient ADMM SA': OA + ' --self-attention admm'}},
    'mask_distill': {
        'masks': {
            **rows_of('--masks', 'last5 windows window:16+sinks:4 window:32+sinks:4 window:64 '
                                 'window:64+sinks:4'),
            'last5, alphas': '--masks last5 --learn alphas',
            'last5, mask only': '--masks last5 --learn alphas --max-iters 0',
            '64+4, alphas': '--masks window:64+sinks:4 --learn alphas',
            '64+4, mask only': '--masks window:64+sinks:4 --learn alphas --max-iters 0'},
        'goals': {  # the rows that the report's goals are judged by
            '64+4': '--masks window:64+sinks:4',
            '64+4, alphas': '--masks window:64+sinks:4 --learn alphas',
            '64+4, mask only': '--masks window:64+sinks:4 --learn alphas --max-iters 0',
            'last5': '--masks last5'},
        'l1': {'no L1': '--masks first-all --learn alphas',
               'L1': '--masks first-all --learn alphas --l1 0.1',
               'a tenth of it': '--masks first-all --learn alphas --l1 0.01'}},
}
METRIC = {  # a validation figure by which --tune chooses, and which of two is better
    'attentionx_gpt': ('val_loss', min), 'belief_vit': ('val_acc', max),
    'admm_detr': ('AP', max), 'mask_distill': ('val_loss', min)}
RESULTS = {  # figures of a table; differences are of the first
    'attentionx_gpt': ['val_loss', 'mean_loss'],
    'belief_vit': ['test_acc', 'best_test_acc', 'mean_loss'],
    'admm_detr': ['AP', 'AP50', 'AP75'],
    'mask_distill': ['kl', 'accuracy', 'mse', 'cosine', 'kept', 'perplexity',
                     'teacher_perplexity']}
UNPAIRED = {'admm_detr'}  # equal seeds hardly make its runs alike: correlations of -0.06 to 0.37
UNITS = {  # of the training loss and of METRIC; what a forward pass takes, and how many tensors
    'attentionx_gpt': ('training loss (nats per token)', 'validation loss (nats per token)',
                       'tokens', 1),
    'belief_vit': ('training loss (nats per image)', 'validation accuracy (0 to 1)', 'images', 1),
    'admm_detr': ('training loss', 'AP (0 to 1)', 'images', 2),
    'mask_distill': ('training loss (nats per token)', 'validation KL (nats per token)',
                     'tokens', 1)}
BASELINE = {  # settings of the row that differences are taken from; {}: the first row's
    'attentionx_gpt': dict(attention='softmax'), 'belief_vit': dict(attention='softmax'),
    'admm_detr': dict(self_attention='softmax', cross_attention='softmax'), 'mask_distill': {}}

# ------------------------------------ cases ------------------------------------
def flag_of(field, value):
    """gamma, '2' -> --gamma=2; zero_diag, 'True' -> --zero-diag; and 'False' -> --no-zero-diag"""
    name = field.replace('_', '-')
    return {'True': f'--{name}', 'False': f'--no-{name}'}.get(value, f'--{name}={value}')

def cases_of(script, flags, table, sweep):
    """{name: Config}: rows of a table, every combination of FIELD=A,B, or both crossed."""
    cases = {'': flags}
    if table:
        if table not in TABLES[script.SCRIPT]:
            fail(f'--table {table}: choose from {", ".join(TABLES[script.SCRIPT])}')
        rows = TABLES[script.SCRIPT][table]
        cases = {name: [*flags, *text.split()] for name, text in rows.items()}
    for spec in sweep:
        field, _, values = spec.partition('=')
        if not values or field == 'seed':
            fail(f'--sweep {spec}: give FIELD=A,B; seeds are --seeds 0,1')
        cases = {f'{name} {value}'.strip(): [*words, flag_of(field, value)]
                 for name, words in cases.items() for value in values.split(',')}
    with contextlib.redirect_stdout(None):  # notes would be printed once per case
        cases = {name: script.parse(words)[1] for name, words in cases.items()}
    if len({repr(settings_of(script, c)) for c in cases.values()}) < len(cases):
        fail('two cases have the same settings: a run cannot be compared with itself')
    return cases

# A run is found again by its settings. A csv holds text, so both sides are compared as a csv gives
# them back: numbers as floats, empty ones left out.

def number(text):
    """A csv's text, as a number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text.capitalize() if text in ('TRUE', 'FALSE') else text  # as Excel writes them

def names_of(script):
    """Names of the settings that tell one run from another: all but the machine's."""
    return [f.name for f in fields(script.Config) if f.name not in script.MACHINE - {'max_iters'}]

def settings_of(script, c):
    """A Config's settings, as a csv gives them back."""
    values = {name: getattr(c, name) for name in names_of(script)}
    values['dtype'] = str(script.pick_device(c)[1])[6:]  # what `auto` means on this machine
    return {name: number(str(x)) for name, x in values.items() if str(x) not in ('', 'None')}

def settings_in(script, row):
    """Those of a row read from a csv."""
    return {name: row[name] for name in names_of(script) if name in row}

# ------------------------------------ runs ------------------------------------
def blob(path):
    """git's name for a file's content: `git log --find-object=NAME` finds it."""
    text = Path(path).read_bytes()
    return hashlib.sha1(b'blob %d\0' % len(text) + text).hexdigest()

@functools.cache
def version(script):
    """Of the script's file as it was when first asked for."""
    return blob(script.__file__)

def checksums(c, data):
    """Of what a run reads: its data and, with --init, the weights that it starts from."""
    facts = json.dumps(data.facts, sort_keys=True, default=str)
    weights = {'init_crc': float(zlib.crc32(Path(c.init).read_bytes()))} if c.init else {}
    return {'data_crc': float(zlib.crc32(facts.encode())), **weights}

def load(name, extra):
    """The script, with the variants that the file `extra` adds to it."""
    script = importlib.import_module(name)
    version(script)  # before somebody edits the file
    script.WITH = {}
    if extra:
        spec = importlib.util.spec_from_file_location(Path(extra).stem, extra)
        if not spec or not Path(extra).exists():
            fail(f'--with {extra}: there is no such Python file')
        script.WITH = {'with': blob(extra)}
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return script

def processor(device):
    if device.type == 'cuda':
        return 'CUDA {}.{}'.format(*torch.cuda.get_device_capability(device))
    if Path('/proc/cpuinfo').exists():  # Linux
        names = re.findall(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()

def train_one(name, case, c, folder):
    """Train c -> a row: its settings, versions and results. Its log goes into folder."""
    script = importlib.import_module(name)  # which load has made ready
    metric, better = METRIC[name]
    device, _ = script.pick_device(c)
    data = script.load_data(c)
    row = dict(case=case, **settings_of(script, c), script=version(script), **script.WITH)
    row.update(torch=torch.__version__, python=platform.python_version(), machine=processor(device),
               **checksums(c, data), log=folder.name)
    try:
        model, log = script.train(c, None, data)
        folder.mkdir(parents=True, exist_ok=True)
        script.write_log(folder, log)
        losses = [line['loss'] for line in log if 'loss' in line] or [math.nan]
        row.update({key: x for key, x in log[-1].items() if '.' not in key},
                   parameters=script.count(model), mean_loss=sum(losses) / len(losses))
        if math.isnan(row[metric]):
            raise FloatingPointError(f'{metric} is nan')
    except FloatingPointError as error:
        print(f'{case}, seed {c.seed}: diverged, and counts as worst: {error}')
        worst = math.inf if better is min else -math.inf
        row.update(dict.fromkeys([metric, RESULTS[name][0]], worst))
    return row

def read_rows(path):
    """Rows of a csv file as dicts; numbers are floats, empty fields are left out."""
    with open(path, newline='', encoding='utf-8-sig') as file:  # Excel begins it with a mark
        return [{key: text if key in ('case', 'script', 'with', 'log') else number(text)
                 for key, text in row.items() if text and key} for row in csv.DictReader(file)]

def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f'.{os.getpid()}.part')
    with open(part, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)

def start_worker(name, extra):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it: it would begin the next run
    sys.stdout = open(os.devnull, 'w', errors='replace')
    load(name, extra)

def results(jobs, o):
    """Yield each job's row as it finishes; o.workers processes run at a time."""
    if o.workers == 1:
        yield from itertools.starmap(train_one, jobs)
        return
    pool = ProcessPoolExecutor(o.workers, get_context('spawn'), start_worker, (o.script, o.extra))
    try:
        for future in as_completed([pool.submit(train_one, *job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # those not yet begun, if one failed

def train_all(script, cases, seeds, role, o):
    """Train each case and seed that o.csv lacks -> the rows of all cases and seeds."""
    versions = {'script': version(script), **script.WITH}
    try:
        rows = read_rows(o.csv) if o.csv.exists() else []
        write_rows(o.csv, rows)  # what cannot be written is better known before the first run
    except OSError as error:
        fail(f'--csv {o.csv}: {error}')
    if any(row.get(key) != versions.get(key) for row in rows for key in ('script', 'with')):
        fail(f'{o.csv} has rows from another version of {script.SCRIPT}.py, or of --with: '
             'name another file with --csv')
    wanted = [(case, replace(c, seed=seed)) for seed in seeds for case, c in cases.items()]
    finished = [row for row in rows if row['role'] == role]
    todo, read = [], {}
    for case, c in wanted:
        same = [row for row in finished if settings_in(script, row) == settings_of(script, c)]
        for row in same:
            if (c.data, c.init) not in read:
                read[c.data, c.init] = checksums(c, script.load_data(c))
            if any(row.get(key, x) != x for key, x in read[c.data, c.init].items()):
                fail(f'{o.csv} has rows of other data or weights, under the same names: '
                     'name another file with --csv')
        todo += [] if same else [(case, c)]
    print(f'{len(cases)} cases, {len(seeds)} seeds: {len(todo)} runs to do; rows go to {o.csv}')
    jobs, gpus = [], torch.cuda.device_count()
    for i, (case, c) in enumerate(todo):
        if gpus > 1 and c.device in ('auto', 'cuda'):
            c = replace(c, device=f'cuda:{i % gpus}')
        crc = zlib.crc32(repr(settings_of(script, c)).encode())
        name = f'{re.sub(r"[^A-Za-z0-9_.=-]", "_", case)[:60]}-s{c.seed}-{crc:08x}'
        jobs.append((script.SCRIPT, case, c, o.csv.with_suffix('.logs') / name))
    begin, metric = time.time(), METRIC[script.SCRIPT][0]
    for i, row in enumerate(results(jobs, o), 1):
        case = row.pop('case')
        rows = read_rows(o.csv)  # another command may have added some
        write_rows(o.csv, [*rows, dict(case=case, role=role, **row)])
        left = (time.time() - begin) / i * (len(jobs) - i) / 60
        print(f'run {i} of {len(jobs)} done: {case}, seed {row["seed"]:g}: '
              f'{metric} {row[metric]:.5g}; about {left:.0f} min left\n', flush=True)
    rows = [row for row in read_rows(o.csv) if row['role'] == role]
    def row_of(c):  # the first: another command may have made the same
        return next(x for x in rows if settings_in(script, x) == settings_of(script, c))
    return [dict(row_of(c), case=case, folder=o.csv.with_suffix('.logs'))  # by its current name
            for case, c in wanted]

# ------------------------------------ tables ------------------------------------
def choose(script, field, rows):
    """Print the means of cases that differ only in field -> the name of the best of each group."""
    metric, better = METRIC[script.SCRIPT]
    groups, best = {}, []
    for row in rows:
        others = settings_in(script, row)
        value, _ = others.pop(field), others.pop('seed')
        group = groups.setdefault(repr(sorted(others.items())), {})
        group.setdefault(value, []).append(row)
    print(f'\n{metric} by {field}: mean x number of runs; *: best at an end of the range')
    for group in groups.values():
        means = {value: np.mean([row[metric] for row in group[value]]) for value in sorted(group)}
        chosen = better(means, key=means.get)
        case = group[chosen][0]['case']
        star = ' *' if chosen in (min(group), max(group)) else ''
        print(f'{case + star:25} ' + '   '.join(
            f'{value}: {mean:.4f} x {len(group[value])}' for value, mean in means.items()))
        best.append(case)
    return best

def group_by_case(script, rows, against):
    """Rows by case, {name: {seed: row}}, the baseline first."""
    baseline, cases = BASELINE[script.SCRIPT], {}
    if against:
        baseline = dict(case=against)
        if against not in [row['case'] for row in rows]:
            fail(f'--against {against}: there is no such row')
    for row in sorted(rows, key=lambda row: any(row.get(key) != x for key, x in baseline.items())):
        runs = cases.setdefault(row['case'], {})
        if row['seed'] in runs:
            fail(f'{row["case"]}, seed {row["seed"]:g}: two rows; name fewer files')
        for name, x in settings_in(script, next(iter(runs.values()), row)).items():
            if name != 'seed' and row.get(name, x) != x:
                fail(f'rows of {row["case"]} differ in {name}: name a csv for each with --csv')
        runs[row['seed']] = row
    return cases

@np.errstate(all='ignore')  # a diverged run's figures are infinite
def tabulate(script, rows, metric, against=None):
    """Print a line for each case: mean, difference from the first case, and the interval that holds
    at 95 % for all rows together (Bonferroni) -> a dict for each line."""
    if not rows:
        fail('none of these rows judges yet; those of timings need --bench')
    columns = dict.fromkeys(name for row in rows for name in row)
    if metric not in columns:
        fail(f'--metric {metric}: choose from {", ".join(columns)}')
    cases = group_by_case(script, rows, against)
    first, *rest = cases.values()
    width = max(26, *(len(case) + 1 for case in cases))
    tests = max(1, sum(len(runs) > 1 for runs in rest))
    others = [name for name in RESULTS[script.SCRIPT] if name in columns and name != metric]
    paired = script.SCRIPT not in UNPAIRED
    machines = sorted({f'{row["machine"]}, torch {row["torch"]}' for row in rows
                       if 'machine' in row})
    if len(machines) > 1:
        print('\nnote: rows come from several machines, which differ about as much as seeds do: '
              + '; '.join(machines))
    print(f'\n{metric}, seeds: {len(first)}. diff: from row 1, '
          f'{"paired by seed" if paired else "not paired (Welch)"}. '
          f'Intervals: 95 %{f" for all {tests} tested rows together" if tests > 1 else ""}\n'
          f'{"":{width}}{"size":>7}{"mean":>10}{"sd":>9}{"diff":>10}{"interval":>24}'
          + ''.join(f' {name:>9}' for name in others))
    digits = 6 if metric == 'kl' else 4
    table, firsts = [], [row.get(metric, math.nan) for row in first.values()]
    for case, runs in cases.items():
        values = [row.get(metric, math.nan) for row in runs.values()]
        gaps = [x - first[seed].get(metric, math.nan)
                for seed, x in zip(runs, values) if seed in first]
        half = math.nan
        if not paired and runs is not first:
            gaps = values - np.mean(firsts)
        if len(gaps) > 1 and np.std(gaps) > 1e-9 * abs(np.mean(gaps)):
            test = (stats.ttest_1samp(gaps, 0) if paired else
                    stats.ttest_ind(values, firsts, equal_var=False))
            low, high = test.confidence_interval(1 - 0.05 / tests)
            half = (high - low) / 2
        sizes = [row['parameters'] for row in runs.values() if 'parameters' in row]
        line = dict(case=case, size=sizes[0] / 1e6 if sizes else math.nan, mean=np.mean(values),
                    sd=np.std(values, ddof=1) if len(values) > 1 else math.nan,
                    diff=np.mean(gaps) if len(gaps) else math.nan, interval=half)
        for name in others:
            line[name] = np.mean([row.get(name, math.nan) for row in runs.values()])
        table.append(line)
        text = '{size:6.2f}M{mean:10.{n}f}{sd:9.{n}f}{diff:+10.{n}f}'.format(n=digits, **line)
        ends = f'{line["diff"] - half:+.{digits}f} to {line["diff"] + half:+.{digits}f}'
        text += f'{"-" if math.isnan(half) else ends:>24}'
        for name in others:
            text += f' {line[name]:{max(9, len(name))}.4g}'
        print(f'{case:{width}}' + text.replace('+nan', '   -').replace('nan', '  -'))
    unresolved = [line['case'] for line in table[1:] if not line['interval'] < abs(line['diff'])]
    if unresolved:
        print(f'not resolved (0 is in the interval, or one seed): {", ".join(unresolved)}')
    return table

# ------------------------------------ curves ------------------------------------
VARIANTS = {  # name and colour in every picture; colour-blind readers can tell a panel's apart
    'softmax': ('softmax', '#000000'), 'attentionx': ('AttentionX', '#D55E00'),
    'belief': ('BeliefFormer', '#009E73'), 'belief-star': ('BeliefFormer*', '#0072B2'),
    'belief-head': ('BeliefFormer per head', '#56B4E9'),
    'attentionx-learned': ('AttentionX, learned γ', '#E69F00'),
    'attentionx-zd': ('AttentionX, zero diagonal', '#AA4499'),
    'value-skip': ('MH + V, a control', '#AAAAAA'),
    'attentionx-v1': ('AttentionX divided by γ', '#882255')}
SPARE = ['#332288', '#661100', '#666633']  # for cases without a name here

def looks(cases):
    """{case: (name, colour)}: the baseline, which is first, is black, and the others are not."""
    known = {case: VARIANTS.get(case, (case, None)) for case in cases}
    used = {'#000000', *(colour for _, colour in known.values())}
    spare = itertools.cycle([*SPARE, *(x for _, x in VARIANTS.values() if x not in used)])
    return {case: (name, '#000000' if case == [*cases][0] else
                   next(spare) if colour in (None, '#000000') else colour)
            for case, (name, colour) in known.items()}

def draw_curves(script, rows, o):
    """Training loss and metric of every case over steps and over seconds: means over the seeds, and
    their range -> the picture's file, None if there is none.  [AX Fig. 1] [BF Fig. 4, 5]"""
    cases = {}
    for case, runs in group_by_case(script, rows, o.against).items():
        files = [Path(row['folder'], row.get('log', '-'), 'log.csv') for row in runs.values()]
        logs = [read_rows(file) for file in files if file.exists()]
        if logs:  # else all diverged, or the csv is here without its logs
            cases[case] = [log for log in logs if len(log) == len(logs[0])]
    figures = [(name, title) for name, title in zip(('loss', METRIC[script.SCRIPT][0]),
                                                    UNITS[script.SCRIPT])
               if any(name in line for logs in cases.values() for line in logs[0][1:])]
    if not figures:
        return None
    try:
        from matplotlib.figure import Figure
    except Exception as error:
        return print(f'note: no picture, which needs `pip install matplotlib` ({error})')
    picture = Figure(figsize=(10, 3.6 * len(figures) + 0.4), layout='tight')
    axes = picture.subplots(len(figures), 2, sharey='row', sharex='col', squeeze=False)
    for (name, title), pair in zip(figures, axes):
        for ax, x in zip(pair, ('step', 'seconds')):
            for logs, (label, colour) in zip(cases.values(), looks(cases).values()):
                lines = [line for line in zip(*logs)  # all seeds' at a step, 0 only in short runs
                         if all(name in row for row in line)
                         and (line[0]['step'] > 0 or len(logs[0]) < 3)]
                across = [np.mean([row[x] for row in line]) for line in lines] or [0]
                values = np.array([[row[name] for row in line] for line in lines] or [[math.nan]])
                ax.plot(across, values.mean(1), '.-', color=colour, label=label, zorder=3)
                ax.fill_between(across, values.min(1), values.max(1), color=colour, alpha=0.15)
            ax.grid(color='#DDDDDD')
            ax.spines[['top', 'right']].set_visible(False)
        pair[0].set_ylabel(title)
    for ax, unit in zip(axes[-1], ('step', 'seconds of training')):
        ax.set_xlabel(unit)
    axes[0, 0].legend(frameon=False)
    seeds = len(next(iter(cases.values())))
    picture.suptitle(f'{script.SCRIPT}: ' + (f'means and ranges of {seeds} seeds' if seeds > 1
                                             else 'one seed'))
    path = o.picture or o.csv.with_suffix('.png')
    picture.savefig(path, dpi=150, facecolor='white')
    return path

def present(script, rows, o):
    """Print a table for every metric and draw the runs -> the lines of all tables."""
    lines = [line for metric in o.metric for line in tabulate(script, rows, metric, o.against)]
    path = draw_curves(script, rows, o)
    if path:
        print(f'\n{path}')
    return lines

# ------------------------------------ bench ------------------------------------
def bench(script, cases, rounds):
    """Time a training step, and inference, of every case in turn, so noise hits all alike -> rows:
    medians, and quartiles of the time as a ratio to the first case's in the same round. Inference
    is a forward pass without gradients.  [BF Tables 1 to 3]"""
    data, ready, times = script.load_data(next(iter(cases.values()))), {}, {}
    inputs = UNITS[script.SCRIPT][-1]
    for case, c in cases.items():
        device, dtype = script.pick_device(c)
        model = script.make_model(c, data).to(device)
        net = torch.compile(model) if c.compile else model
        ready[case] = (c, net, device, script.make_optimizer(model, c),
                       *script.mixed_precision(device, dtype))
    for step in range(rounds + 2):  # two to warm up
        for case, (c, net, device, optimizer, autocast, scaler) in ready.items():
            batches = [script.get_batch(data, c, c.max_iters + step, i, device)
                       for i in range(c.grad_accum_steps)]
            net.train()
            begin = time.perf_counter()
            script.train_step(net, batches, c, optimizer, scaler, autocast)  # ends in .item()
            trained = time.perf_counter()
            net.eval()
            wait(device)
            clock = time.perf_counter()
            with autocast, torch.no_grad():
                net(*batches[0][:inputs])
            wait(device)
            times.setdefault((case, 'training step'), []).append(trained - begin)
            times.setdefault((case, 'inference'), []).append(time.perf_counter() - clock)
    rows = []
    for (case, what), seconds in times.items():
        c, median = cases[case], np.median(seconds[2:])
        ratios = np.divide(seconds, times[next(iter(cases)), what])[2:]
        low, ratio, high = np.percentile(ratios, [25, 50, 75])
        size = c.batch_size * getattr(c, 'block_size', 1)
        size *= c.grad_accum_steps if what == 'training step' else 1
        rows.append(dict(
            case=case, role=what, ms=1000 * median, per_second=size / median, ratio=ratio, low=low,
            high=high, rounds=rounds, compile=c.compile, **settings_of(script, c),
            script=version(script), torch=torch.__version__, machine=processor(device)))
    return rows

def show_bench(script, rows):
    """Print the rows of a bench."""
    for what in 'training step', 'inference':
        print(f'\n{what}: median, {UNITS[script.SCRIPT][-2]} per second, and time as a ratio '
              'to the first case in the same round: median (quartiles)')
        for row in rows:
            if row['role'] == what:
                print('{case:26}{ms:9.1f} ms{per_second:12,.0f}{ratio:8.3f} '
                      '({low:.3f} to {high:.3f})'.format(**row))
    return rows

def wait(device):
    """For an accelerator's queue."""
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()

# ------------------------------------ the command line ------------------------------------
def seeds(text):
    """'0,1,2' -> [0, 1, 2]"""
    return sorted({int(word) for word in text.split(',')})

def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    p.add_argument('script', choices=TABLES)
    p.add_argument('--sweep', action='append', default=[], help='FIELD=A,B; may be repeated')
    tables = '; '.join(f'{name}: {", ".join(rows)}' for name, rows in TABLES.items())
    p.add_argument('--table', help=f"rows of the documents ({tables})")
    p.add_argument('--with', dest='extra', help='a Python file that adds variants to the script')
    p.add_argument('--seeds', type=seeds, default='0,1,2')
    p.add_argument('--tune', default='', help='a field of --sweep to choose for each variant')
    p.add_argument('--test-seeds', type=seeds, default=[], help='with --tune: others, which judge')
    p.add_argument('--csv', type=Path, help='where rows are kept; default: in out/SCRIPT')
    p.add_argument('--from-csv', nargs='+', help='tabulate these files, train nothing')
    p.add_argument('--metric', nargs='+', help='figures to compare, such as val_loss')
    p.add_argument('--against', help='the row that differences are taken from; default: softmax')
    p.add_argument('--workers', type=int, default=1, help='runs at a time, on all GPUs')
    p.add_argument('--bench', action='store_true', help='time a training step and inference')
    p.add_argument('--rounds', type=int, default=20, help='of --bench')
    o, flags = p.parse_known_args(argv)
    o.tune = o.tune.replace('-', '_')
    flags = ['--threads', '1', *flags]  # of two, the second counts
    for flag, instead in {'--resume': 'the same command continues without it',
                          '--seed': 'give --seeds 0,1'}.items():
        if flag in [word.partition('=')[0] for word in flags]:
            fail(f'{flag}: {instead}')
    o.metric, o.picture = o.metric or RESULTS[o.script][:1], None
    for path in o.from_csv or ():
        if not Path(path).exists():
            fail(f'--from-csv {path}: there is no such file')
    return o, flags

def main(argv=None):
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='replace')  # for consoles that cannot show every character
    o, flags = parse(argv)
    script, best = load(o.script, o.extra), []
    if {*o.seeds} & {*o.test_seeds} or (o.test_seeds and not o.tune):
        fail('--test-seeds need --tune, and must differ from --seeds: seeds that have '
             'chosen a setting would favour it')
    if o.from_csv:
        rows = [dict(row, folder=Path(path).with_suffix('.logs'))
                for path in o.from_csv for row in read_rows(path)]
        own = {'case', 'role', 'seed', fields(script.Config)[0].name}
        if not rows or not all(own <= row.keys() for row in rows):
            fail(f'--from-csv {" ".join(o.from_csv)}: not all lines are runs of {o.script}.py, '
                 'separated by commas')
        if o.bench:
            return show_bench(script, rows)
        o.csv = o.csv or Path(o.from_csv[0])
        if o.tune and o.tune not in rows[0]:
            fail(f'--tune {o.tune}: these rows have no such setting')
        if o.tune:
            choosing = [row for row in rows if row['role'] == 'choosing'] or rows
            best = choose(script, o.tune, choosing)
            dropped = {row['case'] for row in choosing} - set(best)
            rows = [row for row in rows if row['case'] not in dropped]
        rows = [row for row in rows if row['role'] == 'judging']
        return present(script, rows, o) if rows or not best else []

    if 'teacher' in script.ACTIONS and not re.search('--init|init=', ' '.join(flags + o.sweep)):
        made = script.main(['teacher', *flags])
        flags += ['--init', str(made['folder'] / 'best.pt')]
        print(f'All rows share this teacher. To continue later, add {" ".join(flags[-2:])}\n')
    cases = cases_of(script, flags, o.table, o.sweep)
    if o.bench and len(cases) < 2:
        fail('--bench times two cases or more: give --sweep or --table')
    if o.bench:
        rows = bench(script, cases, o.rounds)
        if o.csv:
            write_rows(o.csv, [*(read_rows(o.csv) if o.csv.exists() else []), *rows])
        return show_bench(script, rows)
    if o.tune and not any(spec.replace('-', '_').startswith(o.tune + '=') for spec in o.sweep):
        fail(f'--tune {o.tune}: give the values to choose from, --sweep {o.tune}=A,B')
    if not o.csv:
        made_by = '-'.join(x[:8] for x in (version(script), *script.WITH.values()))
        o.csv = Path(next(iter(cases.values())).out_dir, o.script, f'compare-{made_by}.csv')
        crc = zlib.crc32(repr([settings_of(script, c) for c in cases.values()]).encode())
        o.picture = o.csv.with_name(f'{o.csv.stem}-{crc:08x}.png')  # others share the csv
    rows = train_all(script, cases, o.seeds, 'choosing' if o.test_seeds else 'judging', o)
    if o.tune:
        best = choose(script, o.tune, rows)
        cases = {case: cases[case] for case in best}
        rows = [row for row in rows if row['case'] in best]
    if o.test_seeds:
        rows = train_all(script, cases, o.test_seeds, 'judging', o)
    elif o.tune:
        print(f'\nnote: the seeds that chose {o.tune} also judge, which favours every case: '
              'give --test-seeds')
    return present(script, rows, o)

if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('\nstopped; run the same command to continue')
        sys.exit(130)
    except BrokenProcessPool:
        fail('a worker was killed, perhaps for memory; the same command continues: give it fewer '
             '--workers')
