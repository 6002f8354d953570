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
    python experiments/compare.py attentionx_gpt --diagnose --sweep attention=softmax,belief
    python experiments/compare.py attentionx_gpt --bench --sweep attention=softmax,belief

All other flags go to the script: --preset t4, --max-iters 1000. A run uses one CPU thread unless
--threads says otherwise. Each run is a row of a csv file: its settings, its figures, the version of
the script that made it, and checksums of its data and weights. The same command trains only what
that file lacks, and a run that was stopped goes on from its last checkpoint. Runs are in
NAME.logs beside NAME.csv: to train one again, remove its row and its folder. The last line names a
picture: every case over steps and over seconds. --diagnose also logs lengths and angles of what
attention passes on (see diagnose.py). Needs scipy, and matplotlib for the picture.
"""
import argparse
import contextlib
import csv
import functools
import hashlib
import importlib
import importlib.util
import itertools
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
import diagnose

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{Path(sys.argv[0]).stem}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

try:
    from scipy import stats
except ImportError:
    fail('comparisons need `pip install scipy`')
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

# ------------------------------------ the documents' tables ------------------------------------
def rows_of(flag, values):
    return {value: f'{flag} {value}' for value in values.split()}

PAPERS = rows_of('--attention', 'softmax attentionx belief belief-star')
DETR = '--self-attention softmax --cross-attention softmax'
# Optimizing Attention's problem (2) without our options, but over keys: the record's rows
OWN = DETR + ' --ridge 0 --penalty l1 --no-centre --power 5 --iterations 15'
HALF = OWN + ' --rho 0.1'  # x is far from solved
SOLVED = OWN + ' --rho 0.01 --iterations 60'
# As the paper has it (preset `paper`): over values, with random tokens that have values, clamped
OA = OWN + ' --rho 0.01 --rebuild-from values --clamp 1 --random-tokens 32 --mix-random'
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
        # (2) half solved; over the values that are mixed; (4) with its misprints; (1); and in
        # self-attention (SA)
        'more': {'softmax': DETR,
                 'Lasso, half solved': HALF + ' --cross-attention admm',
                 # the next needs --with experiments/printed.py
                 'as printed': HALF + ' --random-tokens 32 --cross-attention admm-printed '
                               '--rebuild-from values',
                 'Lasso of values': HALF + ' --random-tokens 32 --cross-attention admm '
                                    '--rebuild-from values',
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
        '2': {'l2 CA': OA + ' --cross-attention l2',
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
BASELINE = {  # settings of the row that differences are taken from; {}: the first row's
    'attentionx_gpt': dict(attention='softmax'), 'belief_vit': dict(attention='softmax'),
    'admm_detr': dict(self_attention='softmax', cross_attention='softmax'), 'mask_distill': {}}
UNPAIRED = {'admm_detr'}  # equal seeds hardly make its runs alike: correlations of -0.06 to 0.37
LABELS = {  # of the training loss and of METRIC
    'attentionx_gpt': ('training loss (nats per token)', 'validation loss (nats per token)'),
    'belief_vit': ('training loss (nats per image)', 'validation accuracy (0 to 1)'),
    'admm_detr': ('training loss', 'AP (0 to 1)'),
    'mask_distill': ('training loss (nats per token)', 'validation KL (nats per token)')}

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
    cases = {name or 'as typed': script.parse(words)[1] for name, words in cases.items()}
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
    return [f.name for f in fields(script.Config) if f.name not in script.MACHINE]

def settings_of(script, c):
    """A Config's settings, as a csv gives them back."""
    values = {name: getattr(c, name) for name in names_of(script)}
    if script.SCRIPT == 'mask_distill' and c.init:  # then the file decides
        for name in ('n_layer', 'n_head', 'n_embd', 'vocab_size', 'teacher_iters', 'teacher_lr',
                     'teacher_warmup'):
            del values[name]
    values['dtype'] = str(script.pick_device(c)[1])[6:]  # what `auto` means on this machine
    return {name: number(str(x)) for name, x in values.items() if str(x) not in ('', 'None')}

def settings_in(script, row):
    """Those of a row read from a csv."""
    return {name: row[name] for name in names_of(script) if name in row}

# ------------------------------------ csv files ------------------------------------
# A run is a folder in NAME.logs, with its log and, when it has ended, its row. NAME.csv collects
# the rows. What it lacks, since it was open elsewhere or another command wrote it at the same
# moment, waits in the folders.

def read_rows(path):
    """Rows of a csv file as dicts; numbers are floats, empty fields are left out."""
    with open(path, newline='', encoding='utf-8-sig') as file:  # Excel begins it with a mark
        return [{key: text if key in ('case', 'script', 'with', 'diagnose', 'log', 'diverged')
                 else number(text) for key, text in row.items() if text and key}
                for row in csv.DictReader(file)]

def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f'.{os.getpid()}.part')
    with open(part, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows(rows)
    try:
        os.replace(part, path)
    except OSError:  # a directory or, on Windows, open in another program
        part.unlink()
        raise

def read_all(path, versions):
    """Rows of a csv file, and those of these versions that wait in folders."""
    rows = read_rows(path) if path.exists() else []
    known = {row.get('log') for row in rows}
    for file in sorted(path.with_suffix('.logs').glob('*/row.csv')):
        if file.parent.name not in known:
            rows += [row for row in read_rows(file) if versions_in(row) == versions]
    return rows

def versions_in(row):
    return {key: row[key] for key in ('script', 'with', 'diagnose') if key in row}

def merge(path, versions):
    """Write all rows to the csv file, and once more if another command has written meanwhile."""
    written = -1
    while written < len(rows := read_all(path, versions)):
        write_rows(path, rows)
        written = len(rows)

# ------------------------------------ runs ------------------------------------
def blob(path):
    """git's name for a file's content: `git log --find-object=NAME` finds it."""
    text = Path(path).read_bytes()
    return hashlib.sha1(b'blob %d\0' % len(text) + text).hexdigest()

@functools.cache
def version(script):
    """Of the script's file as it was when first asked for."""
    return blob(script.__file__)

def load(name, extra):
    """The script, with the variants that the file `extra` adds to it."""
    script = importlib.import_module(name)
    version(script)  # before somebody edits the file
    if extra:
        spec = importlib.util.spec_from_file_location(Path(extra).stem, extra)
        if not spec or not Path(extra).exists():
            fail(f'--with {extra}: there is no such Python file')
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return script

def versions_of(script, o):
    """Of the files that make a row."""
    files = dict(diagnose=diagnose.__file__ if o.diagnose else '', **{'with': o.extra})
    return dict(script=version(script), **{key: blob(path) for key, path in files.items() if path})

def checksums(script, c):
    """Of what a run reads: its data and, with --init, the weights that it starts from."""
    found = dict(data_crc=number(str(script.load_data(c).meta['checksum'])))
    if c.init:
        crc = 0
        for name, tensor in sorted(script.load(c.init)['model'].items()):
            crc = zlib.crc32(name.encode(), crc)
            crc = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy(), crc)
        found['init_crc'] = float(crc)
    return found

def processor(device):
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    if Path('/proc/cpuinfo').exists():  # Linux
        names = re.findall(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()

def add_teachers(script, cases, seed):
    """Cases of mask_distill.py without --init share a teacher, which is trained first."""
    made = {}  # by what tells one teacher from another
    for case, c in cases.items():
        if script.SCRIPT == 'mask_distill' and not c.init:
            c = replace(c, seed=c.seed if seed is None else seed)
            kind = tuple(getattr(c, name) for name in sorted(script.TEACHER))
            if kind not in made:
                made[kind] = str(script.train_teacher(c)['folder'] / 'best.pt')
            cases[case] = replace(cases[case], init=made[kind])

def mean_loss(log):
    """The mean training loss of all steps; a line of the log has that since the line before."""
    total = steps = 0
    for before, line in zip(log, log[1:]):
        if 'loss' in line:
            total += line['loss'] * (line['step'] - before['step'])
            steps += line['step'] - before['step']
    return total / steps if steps else math.nan

def train_one(name, row, c, folder):
    """Train c, or go on with it -> its row. Its log and its row go into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'lock', 'w') as file:
        if fcntl:  # wait if another command trains the same
            fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / 'row.csv').exists():
            write_rows(folder / 'row.csv', [finish(name, row, c, folder)])
    (folder / 'ckpt.pt').unlink(missing_ok=True)
    return read_rows(folder / 'row.csv')[0]

def finish(name, row, c, folder):
    """row, with the results."""
    script = importlib.import_module(name)  # which load has made ready
    metric, better = METRIC[name]
    c = replace(c, folder=str(folder), resume=(folder / 'ckpt.pt').exists())
    logged = diagnose.logged(script) if 'diagnose' in row else contextlib.nullcontext()
    try:
        with logged:
            model, log = script.train(c, folder, script.load_data(c))
        row.update({key: x for key, x in log[-1].items() if '.' not in key},
                   parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
                   mean_loss=mean_loss(log))
        if math.isnan(row[metric]):
            raise FloatingPointError(f'{metric} is nan')
    except FloatingPointError as error:
        worst = math.inf if better is min else -math.inf
        row.update(dict.fromkeys([metric, RESULTS[name][0]], worst), diverged=str(error))
    return row

def start_worker(name, extra, threads):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it: it would begin the next run
    sys.stdout = open(os.devnull, 'w', errors='replace')
    torch.set_num_threads(threads)
    load(name, extra)

def results(jobs, o):
    """Yield each job's row as it finishes; o.workers processes run at a time."""
    if o.workers == 1:
        yield from itertools.starmap(train_one, jobs)
        return
    pool = ProcessPoolExecutor(o.workers, get_context('spawn'), start_worker,
                               (o.script, o.extra, torch.get_num_threads()))
    futures = {pool.submit(train_one, *job): job for job in jobs}
    try:
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, Exception) and not isinstance(error, BrokenProcessPool):
                _, row, *_ = futures[future]
                fail(f'{row["case"]}, seed {row["seed"]:g}: {type(error).__name__}: '
                     f'{" ".join(str(error).split())[:200]} (--workers 1 shows where)')
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # those not yet begun, if one failed

def train_all(script, cases, seeds, role, o):
    """Train each case and seed that o.csv lacks -> the rows of all cases and seeds."""
    versions, logs = versions_of(script, o), o.csv.with_suffix('.logs')
    try:
        rows = read_all(o.csv, versions)
        write_rows(o.csv, rows)  # what cannot be written is better known before the first run
    except OSError as error:
        fail(f'--csv {o.csv}: {error}')
    if any(versions_in(row) != versions for row in rows):
        fail(f'{o.csv} has rows from another version of {o.script}.py, of --with or of --diagnose: '
             'name another file with --csv')
    wanted = [(case, replace(c, seed=seed)) for seed in seeds for case, c in cases.items()]
    sums = {(c.data, c.init): checksums(script, c) for _, c in wanted}
    def found(c, rows):  # the first: another command may have made the same
        own = settings_of(script, c)
        return next((row for row in rows if row.get('role') == role
                     and settings_in(script, row) == own), None)
    jobs, gpus = [], torch.cuda.device_count()
    for case, c in wanted:
        row, crcs = found(c, rows), sums[c.data, c.init]
        if row and any(row.get(key, x) != x for key, x in crcs.items()):
            fail(f'{o.csv} has rows of other data or weights, under the same names: '
                 'name another file with --csv')
        if row:
            continue
        row = dict(case=case, role=role, **settings_of(script, c), **versions, **crcs)
        crc = zlib.crc32(repr(row).encode())
        row['log'] = f'{re.sub(r"[^A-Za-z0-9_.=-]", "_", case)[:60]}-s{c.seed}-{crc:08x}'
        if gpus > 1 and c.device in ('auto', 'cuda'):
            c = replace(c, device=f'cuda:{len(jobs) % gpus}')
        row.update(torch=torch.__version__, python=platform.python_version(),
                   machine=processor(script.pick_device(c)[0]))
        jobs.append((o.script, row, c, logs / row['log']))
    print(f'{len(cases)} cases, {len(seeds)} seeds: {len(jobs)} runs to do; rows go to {o.csv}')
    begin, metric = time.perf_counter(), METRIC[o.script][0]
    for i, row in enumerate(results(jobs, o), 1):
        try:
            merge(o.csv, versions)
        except OSError as error:
            print(f'note: the row waits in {logs / row["log"]}, the next run adds it: {error}')
        left = (time.perf_counter() - begin) / i * (len(jobs) - i) / 60
        end = f'diverged, and counts as worst: {row["diverged"]}' if 'diverged' in row else (
            f'{metric} {row[metric]:.5g}')
        print(f'run {i} of {len(jobs)} done: {row["case"]}, seed {row["seed"]:g}: {end}; '
              f'about {left:.0f} min left\n', flush=True)
    rows = read_all(o.csv, versions)
    return [dict(found(c, rows), case=case, folder=logs) for case, c in wanted]  # by its name now

# ------------------------------------ tables ------------------------------------
def choose(script, field, rows):
    """Print the means of cases that differ only in field -> the name of the best of each group, by
    the seeds that all of the group have."""
    metric, better = METRIC[script.SCRIPT]
    groups, lines, best = {}, {}, []
    for row in rows:
        others = settings_in(script, row)
        value, seed = others.pop(field), others.pop('seed')
        group = groups.setdefault(repr(sorted(others.items())), {})
        group.setdefault(value, {})[seed] = row
    for group in groups.values():
        shared = set.intersection(*map(set, group.values()))  # of seeds
        if not shared:
            fail(f'--tune {field}: no seed has all of ' +
                 ', '.join(next(iter(runs.values()))['case'] for runs in group.values()))
        def mean(value, seeds):
            return np.mean([group[value][seed][metric] for seed in seeds])
        values = sorted(group)
        chosen = better(values, key=lambda value: mean(value, shared))
        case = next(iter(group[chosen].values()))['case']
        text = '   '.join(f'{value}: {mean(value, group[value]):.4f} x {len(group[value])}'
                          for value in values)
        if chosen != better(values, key=lambda value: mean(value, group[value])):
            text += f'   by the {len(shared)} that all have: ' + '   '.join(
                f'{value}: {mean(value, shared):.4f}' for value in values)
        lines[case + (' *' if chosen in (values[0], values[-1]) else '')] = text
        best.append(case)
    print(f'\n{metric} by {field}: mean x number of runs; *: best at an end of the range')
    for name, text in lines.items():
        print(f'{name:{max(25, *map(len, lines))}} {text}')
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

def interval(values, firsts, gaps, paired, tests):
    """Half the width of a difference's interval; nan where there is none."""
    if len(gaps) < 2 or not np.std(gaps) > 1e-9 * abs(np.mean(gaps)):
        return math.nan
    test = (stats.ttest_1samp(gaps, 0) if paired else
            stats.ttest_ind(values, firsts, equal_var=False))
    low, high = test.confidence_interval(1 - 0.05 / tests)
    return (high - low) / 2

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
        if not paired and runs is not first:
            gaps = values - np.mean(firsts)
        half = interval(values, firsts, gaps, paired, tests)
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
    worst = [f'{row["case"]}, seed {row["seed"]:g}' for row in rows if 'diverged' in row]
    if worst:
        print(f'diverged, which counts as worst: {"; ".join(worst)}')
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

def log_of(row):
    """The lines of a run's log; none if it is not here."""
    path = Path(row['folder'], row.get('log', '-'), 'log.csv')
    return read_rows(path) if path.exists() else []

def write_logs(path, rows):
    """All lines of all logs, with the case and the seed of each."""
    write_rows(Path(path), [dict(case=row['case'], seed=row['seed'], **line)
                            for row in rows for line in log_of(row)])
    print(f'\nlogs are in {path}')

def read_curves(script, rows, against):
    """{case: logs of its seeds}. A log that is shorter than others is left out, with a note."""
    logs = {case: [log_of(row) for row in runs.values()]
            for case, runs in group_by_case(script, rows, against).items()}
    if not any(map(any, logs.values())):
        return {}  # the csv is here without its logs
    for case, found in logs.items():
        whole = max(map(len, found))
        logs[case] = [log for log in found if log and len(log) == whole]
        if len(logs[case]) < len(found):
            print(f'note: the picture shows {len(logs[case])} of {len(found)} runs of {case}: '
                  'other logs are shorter, or not here')
    return logs

def draw_curves(script, rows, o):
    """Training loss and metric of every case over steps and over seconds: means over the seeds, and
    their range -> the picture's file, None if there is none.  [AX Fig. 1] [BF Fig. 4, 5]"""
    cases = read_curves(script, rows, o.against)
    figures = [(name, title) for name, title in zip(('loss', METRIC[script.SCRIPT][0]),
                                                    LABELS[script.SCRIPT])
               if any(name in line for logs in cases.values() for log in logs for line in log[1:])]
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
                if not lines:
                    continue
                across = [np.mean([row[x] for row in line]) for line in lines]
                values = np.array([[row[name] for row in line] for line in lines])
                ax.plot(across, values.mean(1), '.-', color=colour, label=label, zorder=3)
                ax.fill_between(across, values.min(1), values.max(1), color=colour, alpha=0.15)
            ax.grid(color='#DDDDDD')
            ax.spines[['top', 'right']].set_visible(False)
        pair[0].set_ylabel(title)
    for ax, unit in zip(axes[-1], ('step', 'seconds of training')):
        ax.set_xlabel(unit)
    axes[0, 0].legend(frameon=False)
    seeds = sorted({len(logs) for logs in cases.values()} - {0})
    picture.suptitle(f'{script.SCRIPT}: ' + ('one seed' if seeds == [1] else
                                             f'means and ranges of {seeds[-1]} seeds'))
    path = o.picture or o.csv.with_suffix('.png')
    picture.savefig(path, dpi=150, facecolor='white')
    return path

def present(script, rows, o):
    """Print a table for every metric and draw the runs -> the lines of all tables."""
    lines = [line for metric in o.metric for line in tabulate(script, rows, metric, o.against)]
    times = {}
    for row in rows:
        if 'seconds' in row and not o.from_csv:
            times.setdefault(row['case'], []).append(row['seconds'])
    if times:
        print('seconds of training, means: ' + ', '.join(
            f'{case} {np.mean(seconds):.4g}' for case, seconds in times.items()))
    if o.log_csv:
        write_logs(o.log_csv, rows)
    path = draw_curves(script, rows, o)
    if path:
        print(f'\n{path}')
    return lines

# ------------------------------------ bench ------------------------------------
def bench(script, cases, o):
    """Time a training step, and inference, of every case in turn, so noise hits all alike -> rows:
    medians, and quartiles of the time as a ratio to the first case's in the same round. Inference
    is a forward pass without gradients.  [BF Tables 1 to 3]"""
    data, ready, times = script.load_data(next(iter(cases.values()))), {}, {}
    inputs = 2 if script.SCRIPT == 'admm_detr' else 1  # of a forward pass: images and their padding
    for case, c in cases.items():
        device, dtype = script.pick_device(c)
        if script.SCRIPT == 'mask_distill':
            teacher = [script.find_teacher(c, data).to(device).eval()]
            model = script.make_student(*teacher, c)
        else:
            teacher, model = [], script.make_model(c, data.meta).to(device)
        net = torch.compile(model) if c.compile else model
        ready[case] = (c, net, device, teacher, script.make_optimizer(model, c),
                       *script.mixed_precision(device, dtype))
    for step in range(o.rounds + 2):  # two to warm up
        for case, (c, net, device, teacher, optimizer, autocast, scaler) in ready.items():
            batches = [script.get_batch(data, c, c.max_iters + step, i, device)
                       for i in range(c.grad_accum_steps)]
            net.train()
            begin = time.perf_counter()
            script.train_step(net, *teacher, batches, c, optimizer, scaler, autocast)
            trained = time.perf_counter()  # it ends in .item()
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
            high=high, rounds=o.rounds, compile=c.compile, **settings_of(script, c),
            **versions_of(script, o), torch=torch.__version__,
            machine=processor(script.pick_device(c)[0])))
    return rows

def show_bench(script, rows):
    """Print the rows of a bench."""
    width = max(26, *(len(row['case']) + 1 for row in rows))
    unit = 'images' if script.SCRIPT in ('belief_vit', 'admm_detr') else 'tokens'
    for what in 'training step', 'inference':
        print(f'\n{what}: median, {unit} per second, and time as a ratio '
              'to the first case in the same round: median (quartiles)')
        for row in rows:
            if row['role'] == what:
                print('{case:{width}}{ms:9.1f} ms{per_second:12,.0f}{ratio:8.3f} '
                      '({low:.3f} to {high:.3f})'.format(width=width, **row))
    return rows

def wait(device):
    """For an accelerator's queue."""
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()

# ------------------------------------ the command line ------------------------------------
def parser(text):
    """Of this tool and of memory.py: what it does not know is a flag of the script."""
    p = argparse.ArgumentParser(description=text, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    p.add_argument('--csv', type=Path, help='where rows are kept; default: in out/')
    return p

def read_flags(p, argv):
    """argv -> what p knows, and the flags of the script."""
    argv = sys.argv[1:] if argv is None else [str(word) for word in argv]
    o, flags = p.parse_known_args([re.sub('^--[^=]*', lambda flag: flag[0].replace('_', '-'), word)
                                   for word in argv])
    return o, ['--threads', '1', *flags]  # of two, the second counts

def seeds(text):
    """'0,1,2' -> [0, 1, 2]"""
    return sorted({int(word) for word in text.split(',')})

def parse(argv):
    p = parser(__doc__)
    p.add_argument('script', type=lambda name: name.removesuffix('.py'), choices=TABLES)
    p.add_argument('--sweep', action='append', default=[], help='FIELD=A,B; may be repeated')
    tables = '; '.join(f'{name}: {", ".join(rows)}' for name, rows in TABLES.items())
    p.add_argument('--table', help=f"rows of the documents ({tables})")
    p.add_argument('--with', dest='extra', default='', help='a Python file that adds variants')
    p.add_argument('--seeds', type=seeds, default='0,1,2')
    p.add_argument('--tune', default='', help='a field of --sweep to choose for each variant')
    p.add_argument('--test-seeds', type=seeds, default=[], help='with --tune: others, which judge')
    p.add_argument('--teacher-seed', type=int, help='of the teacher that rows of masks share')
    p.add_argument('--from-csv', nargs='+', help='tabulate these files, train nothing')
    p.add_argument('--metric', nargs='+', help='figures to compare, such as val_loss')
    p.add_argument('--against', help='the row that differences are taken from; default: softmax')
    p.add_argument('--log-csv', help='a file for the logs of all rows')
    p.add_argument('--diagnose', action='store_true', help='log what diagnose.py finds, too; '
                   '--log-csv is then NAME-log.csv beside --csv')
    p.add_argument('--workers', type=int, default=1, help='runs at a time, on all GPUs')
    p.add_argument('--bench', action='store_true', help='time a training step and inference')
    p.add_argument('--rounds', type=int, default=20, help='of --bench')
    o, flags = read_flags(p, argv)
    o.tune = o.tune.replace('-', '_')
    for flag, instead in {'--resume': 'the same command continues without it',
                          '--seed': 'give --seeds 0,1'}.items():
        if flag in [word.partition('=')[0] for word in flags]:
            fail(f'{flag}: {instead}')
    if {*o.seeds} & {*o.test_seeds} or (o.test_seeds and not o.tune):
        fail('--test-seeds need --tune, and must differ from --seeds: seeds that have '
             'chosen a setting would favour it')
    if o.diagnose and o.script == 'mask_distill':
        fail('--diagnose: mask_distill.py logs its coefficients by itself')
    o.metric, o.picture = o.metric or RESULTS[o.script][:1], None
    for path in o.from_csv or ():
        if not Path(path).exists():
            fail(f'--from-csv {path}: there is no such file')
    return o, flags

def from_csv(script, o):
    """Tabulate rows of files."""
    rows = [dict(row, folder=Path(path).with_suffix('.logs'))
            for path in o.from_csv for row in read_rows(path)]
    own = {'case', 'role', 'seed', fields(script.Config)[0].name}
    if not rows or not all(own <= row.keys() for row in rows):
        fail(f'--from-csv {" ".join(o.from_csv)}: not all lines are runs of {o.script}.py, '
             'separated by commas')
    if o.bench:
        return show_bench(script, rows)
    o.csv, best = o.csv or Path(o.from_csv[0]), []
    if o.tune:
        if o.tune not in rows[0]:
            fail(f'--tune {o.tune}: these rows have no such setting')
        choosing = [row for row in rows if row['role'] == 'choosing'] or rows
        best = choose(script, o.tune, choosing)
        dropped = {row['case'] for row in choosing} - set(best)
        rows = [row for row in rows if row['case'] not in dropped]
    rows = [row for row in rows if row['role'] == 'judging']
    return present(script, rows, o) if rows or not best else []

def main(argv=None):
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='replace')  # for consoles that cannot show every character
    o, flags = parse(argv)
    script = load(o.script, o.extra)
    if o.from_csv:
        return from_csv(script, o)
    cases = cases_of(script, flags, o.table, o.sweep)
    if o.bench and len(cases) < 2:
        fail('--bench times two cases or more: give --sweep or --table')
    if o.tune and not any(spec.replace('-', '_').startswith(o.tune + '=') for spec in o.sweep):
        fail(f'--tune {o.tune}: give the values to choose from, --sweep {o.tune}=A,B')
    torch.set_num_threads(next(iter(cases.values())).threads or torch.get_num_threads())
    add_teachers(script, cases, o.teacher_seed)
    if o.bench:
        rows = show_bench(script, bench(script, cases, o))
        if o.csv:
            write_rows(o.csv, [*(read_rows(o.csv) if o.csv.exists() else []), *rows])
        return rows
    if not o.csv:
        made_by = '-'.join(x[:8] for x in versions_of(script, o).values())
        o.csv = Path(next(iter(cases.values())).out_dir, o.script, f'compare-{made_by}.csv')
        crc = zlib.crc32(repr([settings_of(script, c) for c in cases.values()]).encode())
        o.picture = o.csv.with_name(f'{o.csv.stem}-{crc:08x}.png')  # others share the csv
    if o.diagnose:
        o.log_csv = o.log_csv or o.csv.with_name(f'{o.csv.stem}-log.csv')
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
    except (OSError, FloatingPointError) as error:  # disk full; a teacher diverged
        fail(error)
    except BrokenProcessPool:
        fail('a worker was killed, perhaps for memory; the same command continues: give it fewer '
             '--workers')
