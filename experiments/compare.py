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
picture: every case over steps and over seconds. A table's mean_loss is the training loss, a mean of
all steps. --diagnose also logs lengths and angles of what attention outputs (see diagnose.py).
Needs scipy, and matplotlib for the picture.
"""
import argparse
import contextlib
import csv
import hashlib
import importlib
import itertools
import math
import os
import platform
import re
import runpy
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
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

# ------------------------------------ what is compared ------------------------------------
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
LABELS = {  # of the training loss and of METRIC
    'attentionx_gpt': ('training loss (nats per token)', 'validation loss (nats per token)'),
    'belief_vit': ('training loss (nats per image)', 'validation accuracy (0 to 1)'),
    'admm_detr': ('training loss', 'AP (0 to 1)'),
    'mask_distill': ('training loss (nats per token)', 'validation KL (nats per token)')}
UNPAIRED = {'admm_detr'}  # equal seeds hardly make its runs alike: correlations of -0.06 to 0.37

def flag_of(field, value):
    """gamma, '2' -> --gamma=2; zero_diag, 'True' -> --zero-diag; and 'False' -> --no-zero-diag"""
    name = field.replace('_', '-')
    if value in ('True', 'False'):
        return f'--{name}' if value == 'True' else f'--no-{name}'
    return f'--{name}={value}'

def cases_of(script, flags, table, sweep):
    """{name: Config}: rows of a table, every combination of FIELD=A,B, or both crossed."""
    cases, tables = {'': flags}, {}
    with open(HERE / 'tables.csv', newline='') as file:
        for row in csv.DictReader(file):
            if row['script'] == script.SCRIPT:
                tables.setdefault(row['table'], {})[row['row']] = row['flags'].split()
    if table:
        if table not in tables:
            fail(f'--table {table}: choose from {", ".join(tables)}')
        cases = {name: [*flags, *words] for name, words in tables[table].items()}
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

TEXT = 'case', 'script', 'with', 'diagnose', 'log', 'diverged'  # even where they look like numbers

def read_rows(path):
    """Rows of a csv file as dicts; numbers are floats, empty fields are left out."""
    with open(path, newline='', encoding='utf-8-sig') as file:  # Excel begins it with a mark
        return [{key: text if key in TEXT else number(text) for key, text in row.items()
                 if text and key} for row in csv.DictReader(file)]

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

def merge(path, versions):
    """Write all rows to the csv file, and once more if another command has written meanwhile."""
    written = -1
    while written < len(rows := read_all(path, versions)):
        write_rows(path, rows)
        written = len(rows)

# ------------------------------------ where a row comes from ------------------------------------
def load(name, extra):
    """The script, with the variants that the file `extra` adds to it."""
    script = importlib.import_module(name)
    if extra:
        if not Path(extra).exists():
            fail(f'--with {extra}: there is no such Python file')
        runpy.run_path(extra)
    return script

def blob(path):
    """git's name for a file's content: `git log --find-object=NAME` finds it."""
    text = Path(path).read_bytes()
    return hashlib.sha1(b'blob %d\0' % len(text) + text).hexdigest()

def versions_of(script, o):
    """Of the files that make a row."""
    files = {'script': script.__file__, 'diagnose': o.diagnose and diagnose.__file__,
             'with': o.extra}
    return {key: blob(path) for key, path in files.items() if path}

def versions_in(row):
    return {key: row[key] for key in ('script', 'with', 'diagnose') if key in row}

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

# ------------------------------------ runs ------------------------------------
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

def results_of(name, c, folder, diagnosed):
    """Train c, or go on with it -> its figures."""
    script = importlib.import_module(name)  # which load has made ready
    metric, better = METRIC[name]
    c = replace(c, folder=str(folder), resume=(folder / 'ckpt.pt').exists())
    try:
        with diagnose.logged(script) if diagnosed else contextlib.nullcontext():
            model, log = script.train(c, folder, script.load_data(c))
        found = {key: x for key, x in log[-1].items() if '.' not in key}
        if math.isnan(found[metric]):
            raise FloatingPointError(f'{metric} is nan')
    except FloatingPointError as error:
        worst = math.inf if better is min else -math.inf
        return {metric: worst, RESULTS[name][0]: worst, 'diverged': str(error)}
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return dict(found, parameters=size, mean_loss=mean_loss(log))

def train_one(name, row, c, folder):
    """Train c, unless that is done -> its row. Its log and its row go into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'lock', 'w') as file:
        if fcntl:  # wait if another command trains the same
            fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / 'row.csv').exists():
            try:
                found = results_of(name, c, folder, 'diagnose' in row)
            except Exception:  # the traceback does not say whose run it was
                print(f'failed: {row["case"]}, seed {row["seed"]:g}', file=sys.stderr)
                raise
            write_rows(folder / 'row.csv', [{**row, **found}])
    (folder / 'ckpt.pt').unlink(missing_ok=True)
    return read_rows(folder / 'row.csv')[0]

def start_worker(name, extra, threads):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it: it would begin the next run
    sys.stdout = open(os.devnull, 'w', errors='replace')
    torch.set_num_threads(threads)
    load(name, extra)

def train_jobs(jobs, o):
    """Yield each job's row as it finishes; o.workers processes run at a time."""
    if o.workers == 1:
        yield from itertools.starmap(train_one, jobs)
        return
    pool = ProcessPoolExecutor(o.workers, get_context('spawn'), start_worker,
                               (o.script, o.extra, torch.get_num_threads()))
    try:
        for future in as_completed([pool.submit(train_one, *job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # those not yet begun, if one failed

def find(script, rows, c, role):
    """The row of a run, or None; the first, as another command may have made the same."""
    settings = settings_of(script, c)
    return next((row for row in rows if row.get('role') == role
                 and settings_in(script, row) == settings), None)

def new_row(script, case, c, role, made_of):
    """A run's row before its results. `log` names its folder."""
    row = dict(case=case, role=role, **settings_of(script, c), **made_of)
    name, crc = re.sub('[^A-Za-z0-9_.=-]', '_', case)[:60], zlib.crc32(repr(row).encode())
    return dict(row, log=f'{name}-s{c.seed}-{crc:08x}', torch=torch.__version__,
                python=platform.python_version(), machine=processor(script.pick_device(c)[0]))

def train_all(script, cases, seeds, role, o):
    """Train each case and seed that o.csv lacks -> the rows of all cases and seeds."""
    try:
        rows = read_all(o.csv, o.versions)
        write_rows(o.csv, rows)  # what cannot be written is better known before the first run
    except OSError as error:
        fail(f'--csv {o.csv}: {error}')
    if any(versions_in(row) != o.versions for row in rows):
        fail(f'{o.csv} has rows from another version of {o.script}.py, of --with or of --diagnose: '
             'name another file with --csv')
    runs = [(case, replace(c, seed=seed)) for seed in seeds for case, c in cases.items()]
    logs, gpus, jobs = o.csv.with_suffix('.logs'), torch.cuda.device_count(), []
    for case, c in runs:
        row, sums = find(script, rows, c, role), checksums(script, c)
        if not row:
            row = new_row(script, case, c, role, {**o.versions, **sums})
            if gpus > 1 and c.device in ('auto', 'cuda'):
                c = replace(c, device=f'cuda:{len(jobs) % gpus}')
            jobs.append((o.script, row, c, logs / row['log']))
        elif any(row.get(key, x) != x for key, x in sums.items()):
            fail(f'{o.csv} has rows of other data or weights, under the same names: '
                 'name another file with --csv')
    print(f'{len(cases)} cases, {len(seeds)} seeds: {len(jobs)} runs to do; rows go to {o.csv}')
    metric, begin = METRIC[o.script][0], time.perf_counter()
    for i, row in enumerate(train_jobs(jobs, o), 1):
        try:
            merge(o.csv, o.versions)
        except OSError as error:
            print(f'note: the row waits in {logs / row["log"]}, the next run adds it: {error}')
        end = f'{metric} {row[metric]:.5g}'
        if 'diverged' in row:
            end = f'diverged, and counts as worst: {row["diverged"]}'
        left = (time.perf_counter() - begin) / i * (len(jobs) - i) / 60
        print(f'run {i} of {len(jobs)} done: {row["case"]}, seed {row["seed"]:g}: {end}; '
              f'about {left:.0f} min left\n', flush=True)
    rows = read_all(o.csv, o.versions)
    return [dict(find(script, rows, c, role), case=case, folder=logs) for case, c in runs]

# ------------------------------------ tables ------------------------------------
def figures_of(runs, name):
    """{seed: figure} of a case; nan where a run has none."""
    return {seed: row.get(name, math.nan) for seed, row in runs.items()}

def mean(figures):
    return np.mean([*figures.values()])

def choose(script, field, rows):
    """Print the means of cases that differ only in field -> the names of all but the best of each
    group, by the seeds that all of the group have."""
    metric, better = METRIC[script.SCRIPT]
    if not all(field in row for row in rows):
        fail(f'--tune {field}: these rows have no such setting')
    groups, lines, chosen = {}, {}, set()
    for row in rows:
        others = settings_in(script, row)
        value, seed = others.pop(field), others.pop('seed')
        group = groups.setdefault(repr(sorted(others.items())), {})
        group.setdefault(value, {})[seed] = row
    for group in groups.values():
        group = dict(sorted(group.items()))
        names = {value: [*runs.values()][0]['case'] for value, runs in group.items()}
        shared = set.intersection(*map(set, group.values()))  # of seeds
        if not shared:
            fail(f'--tune {field}: no seed has all of {", ".join(names.values())}')
        means = {value: mean(figures_of(runs, metric)) for value, runs in group.items()}
        common = {value: np.mean([runs[seed][metric] for seed in shared])
                  for value, runs in group.items()}
        best = better(common, key=common.get)
        text = '   '.join(f'{value}: {means[value]:.4f} x {len(group[value])}' for value in group)
        if best != better(means, key=means.get):
            text += f'   by the {len(shared)} that all have: ' + '   '.join(
                f'{value}: {x:.4f}' for value, x in common.items())
        lines[names[best] + (' *' if best in (min(group), max(group)) else '')] = text
        chosen.add(names[best])
    print(f'\n{metric} by {field}: mean x number of runs; *: best at an end of the range')
    for name, text in lines.items():
        print(f'{name:{max(25, *map(len, lines))}} {text}')
    return {row['case'] for row in rows} - chosen

def group_by_case(script, rows, against):
    """{case: {seed: row}}, the baseline first."""
    baseline, cases = dict(case=against) if against else BASELINE[script.SCRIPT], {}
    for row in sorted(rows, key=lambda row: any(row.get(key) != x for key, x in baseline.items())):
        runs = cases.setdefault(row['case'], {})
        if row['seed'] in runs:
            fail(f'{row["case"]}, seed {row["seed"]:g}: two rows; name fewer files')
        runs[row['seed']] = row
    if against and against not in cases:
        fail(f'--against {against}: there is no such row')
    for case, runs in cases.items():
        for name in names_of(script):
            values = {row[name] for row in runs.values() if name in row}
            if len(values) > 1 and name != 'seed':
                fail(f'rows of {case} differ in {name}: name a csv for each with --csv')
    return cases

def difference(ours, firsts, paired, tests):
    """Two cases' {seed: figure} -> the mean difference, and half the width of its interval, nan
    where there is none. It holds at 95 % for all tests together (Bonferroni)."""
    gaps = [x - firsts[seed] for seed, x in ours.items() if seed in firsts]
    if not paired and ours != firsts:
        gaps = [x - mean(firsts) for x in ours.values()]
    middle = np.mean(gaps) if gaps else math.nan
    if len(gaps) < 2 or not np.std(gaps) > 1e-9 * abs(middle):
        return middle, math.nan
    test = (stats.ttest_1samp(gaps, 0) if paired else
            stats.ttest_ind([*ours.values()], [*firsts.values()], equal_var=False))
    low, high = test.confidence_interval(1 - 0.05 / tests)
    return middle, (high - low) / 2

def print_table(table, others, digits):
    """Print the lines of a table under their columns' names; - is what is missing."""
    first = max(26, *(len(line['case']) + 1 for line in table))
    widths = dict(size=7, mean=10, sd=9, diff=10, interval=24,
                  **{name: max(10, len(name) + 1) for name in others})
    print(' ' * first + ''.join(f'{name:>{n}}' for name, n in widths.items()))
    for line in table:
        diff, half = line['diff'], line['interval']
        texts = dict(
            size=f'{line["size"]:.2f}M', mean=f'{line["mean"]:.{digits}f}',
            sd=f'{line["sd"]:.{digits}f}', diff=f'{diff:+.{digits}f}',
            interval=f'{diff - half:+.{digits}f} to {diff + half:+.{digits}f}',
            **{name: f'{line[name]:.4g}' for name in others})
        print(f'{line["case"]:{first}}' + ''.join(
            f'{"-" if "nan" in text else text:>{widths[name]}}' for name, text in texts.items()))

@np.errstate(all='ignore')  # a diverged run's figures are infinite
def tabulate(script, cases, metric):
    """Print a line for each case -> a dict for each."""
    first, *rest = cases.values()
    rows = [row for runs in cases.values() for row in runs.values()]
    names = dict.fromkeys(name for row in rows for name in row)
    if metric not in names:
        fail(f'--metric {metric}: choose from {", ".join(names)}')
    machines = sorted({f'{row["machine"]}, torch {row["torch"]}' for row in rows
                       if 'machine' in row})
    if len(machines) > 1:
        print('\nnote: rows come from several machines, which differ about as much as seeds do: '
              + '; '.join(machines))
    paired = script.SCRIPT not in UNPAIRED
    tests = max(1, sum(len(runs) > 1 for runs in rest))
    print(f'\n{metric}, seeds: {len(first)}. diff: from row 1, '
          f'{"paired by seed" if paired else "not paired (Welch)"}. '
          f'Intervals: 95 %{f" for all {tests} tested rows together" if tests > 1 else ""}')
    others = [name for name in RESULTS[script.SCRIPT] if name in names and name != metric]
    table, firsts = [], figures_of(first, metric)
    for case, runs in cases.items():
        ours = figures_of(runs, metric)
        diff, half = difference(ours, firsts, paired, tests)
        size = max(row.get('parameters', 0) for row in runs.values()) / 1e6
        sd = np.std([*ours.values()], ddof=1) if len(ours) > 1 else math.nan
        table.append(dict(case=case, size=size or math.nan, mean=mean(ours), sd=sd, diff=diff,
                          interval=half, **{name: mean(figures_of(runs, name)) for name in others}))
    print_table(table, others, 6 if metric == 'kl' else 4)
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

def log_of(row):
    """The lines of a run's log; none if it is not here."""
    path = Path(row['folder'], row.get('log', '-'), 'log.csv')
    return read_rows(path) if path.exists() else []

def read_curves(cases):
    """{case: logs of its seeds}. A log that is shorter than others is left out, with a note."""
    curves = {case: [log_of(row) for row in runs.values()] for case, runs in cases.items()}
    if not any(map(any, curves.values())):  # the csv is here without its logs
        return {}
    for case, logs in curves.items():
        longest = max(map(len, logs))
        curves[case] = [log for log in logs if log and len(log) == longest]
        if len(curves[case]) < len(logs):
            print(f'note: the picture shows {len(curves[case])} of {len(logs)} runs of {case}: '
                  'other logs are shorter, or not here')
    return {case: logs for case, logs in curves.items() if logs}

def draw(curves, figures, title, path):
    """Each case's figures, {name: label}, over steps and over seconds: means over the seeds, and
    their range.  [AX Fig. 1] [BF Fig. 4, 5]"""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f'note: no picture, which needs `pip install matplotlib` ({error})')
        return
    picture = Figure(figsize=(10, 7.6), layout='tight')
    axes = picture.subplots(2, 2, sharex='col', sharey='row')
    spare = [colour for _, colour in VARIANTS.values()]
    for ax, (name, clock) in zip(axes.flat, itertools.product(figures, ('step', 'seconds'))):
        for i, (case, logs) in enumerate(curves.items()):
            label, colour = VARIANTS.get(case, (case, spare[i % len(spare)]))
            lines = [line for line in zip(*logs)  # all seeds' at a step
                     if line[0]['step'] > 0 and all(name in row for row in line)]
            x = [np.mean([row[clock] for row in line]) for line in lines]
            y = [[row[name] for row in line] for line in lines]
            ax.plot(x, [*map(np.mean, y)], '.-', color=colour, label=label)
            ax.fill_between(x, [*map(min, y)], [*map(max, y)], color=colour, alpha=0.15)
        ax.set(xlabel='seconds of training' if clock == 'seconds' else clock,
               ylabel=figures[name])
        ax.label_outer()
        ax.grid(color='#DDDDDD')
    axes[0, 0].legend(frameon=False)
    picture.suptitle(title)
    picture.savefig(path, dpi=150, facecolor='white')
    print(f'\n{path}')

def present(script, rows, o):
    """Print a table of the runs, and draw them -> the table's lines."""
    if not rows:
        fail('none of these rows judges yet; those of timings need --bench')
    cases = group_by_case(script, rows, o.against)
    table = tabulate(script, cases, o.metric)
    if not o.from_csv:
        print('seconds of training, means: ' + ', '.join(
            f'{case} {mean(figures_of(runs, "seconds")):.4g}' for case, runs in cases.items()))
    if o.log_csv:
        write_rows(Path(o.log_csv), [dict(case=row['case'], seed=row['seed'], **line)
                                     for row in rows for line in log_of(row)])
        print(f'\nlogs are in {o.log_csv}')
    curves = read_curves(cases)
    if curves:
        figures = dict(zip(('loss', METRIC[o.script][0]), LABELS[o.script]))
        draw(curves, figures, f'{o.script}: means and ranges over the seeds',
             o.csv.with_suffix('.png'))
    return table

# ------------------------------------ bench ------------------------------------
def wait(device):
    """For an accelerator's queue."""
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()

def seconds_of(work, device):
    wait(device)
    begin = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - begin

def time_cases(script, cases, rounds):
    """Seconds of a training step, and of inference, a forward pass without gradients, of every case
    in turn, so that noise hits all alike -> {(case, what): seconds of every round}."""
    data, ready, times = script.load_data(next(iter(cases.values()))), {}, {}
    inputs = 2 if script.SCRIPT == 'admm_detr' else 1  # of a forward pass: images and their padding
    for case, c in cases.items():
        device, dtype = script.pick_device(c)
        if script.SCRIPT == 'mask_distill':
            teacher = [script.find_teacher(c, data).to(device).eval()]
            model = script.make_student(*teacher, c)
        else:
            teacher, model = [], script.make_model(c, data.meta).to(device)
        ready[case] = (torch.compile(model) if c.compile else model, teacher, device,
                       script.make_optimizer(model, c), *script.mixed_precision(device, dtype))
    for step in range(rounds + 2):  # two to warm up
        for case, (net, teacher, device, optimizer, autocast, scaler) in ready.items():
            c = cases[case]
            batches = [script.get_batch(data, c, c.max_iters + step, i, device)
                       for i in range(c.grad_accum_steps)]
            net.train()
            trained = seconds_of(lambda: script.train_step(
                net, *teacher, batches, c, optimizer, scaler, autocast), device)
            net.eval()
            with autocast, torch.no_grad():
                inferred = seconds_of(lambda: net(*batches[0][:inputs]), device)
            times.setdefault((case, 'training step'), []).append(trained)
            times.setdefault((case, 'inference'), []).append(inferred)
    return {key: seconds[2:] for key, seconds in times.items()}

def bench(script, cases, o):
    """Time every case -> rows: medians, and quartiles of the time as a ratio to the first case's in
    the same round.  [BF Tables 1 to 3]"""
    rows, times, first = [], time_cases(script, cases, o.rounds), next(iter(cases))
    for (case, what), seconds in times.items():
        c, median = cases[case], np.median(seconds)
        low, ratio, high = np.percentile(np.divide(seconds, times[first, what]), [25, 50, 75])
        size = c.batch_size * getattr(c, 'block_size', 1)
        size *= c.grad_accum_steps if what == 'training step' else 1
        rows.append(dict(
            case=case, role=what, ms=1000 * median, per_second=size / median, ratio=ratio, low=low,
            high=high, rounds=o.rounds, compile=c.compile, **settings_of(script, c), **o.versions,
            torch=torch.__version__, machine=processor(script.pick_device(c)[0])))
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
    argv = sys.argv[1:] if argv is None else argv
    o, flags = p.parse_known_args([re.sub('^--[^=]*', lambda flag: flag[0].replace('_', '-'), word)
                                   for word in argv])
    return o, ['--threads', '1', *flags]  # of two, the second counts

def seeds(text):
    """'0,1,2' -> [0, 1, 2]"""
    return sorted({int(word) for word in text.split(',')})

def parse(argv):
    p = parser(__doc__)
    p.add_argument('script', type=lambda name: name.removesuffix('.py'), choices=METRIC)
    p.add_argument('--sweep', action='append', default=[], help='FIELD=A,B; may be repeated')
    p.add_argument('--table', help='rows of a table of the record, see tables.csv')
    p.add_argument('--with', dest='extra', help='a Python file that adds variants')
    p.add_argument('--seeds', type=seeds, default='0,1,2')
    p.add_argument('--tune', help='a field of --sweep to choose for each variant')
    p.add_argument('--test-seeds', type=seeds, default=[], help='with --tune: others, which judge')
    p.add_argument('--teacher-seed', type=int, help='of the teacher that rows of masks share')
    p.add_argument('--from-csv', nargs='+', type=Path, help='tabulate these files, train nothing')
    p.add_argument('--metric', help='the figure to compare, such as val_loss')
    p.add_argument('--against', help='the row that differences are taken from; default: softmax')
    p.add_argument('--log-csv', help='a file for the logs of all rows')
    p.add_argument('--diagnose', action='store_true', help='log what diagnose.py finds, too; '
                   '--log-csv is then NAME-log.csv beside --csv')
    p.add_argument('--workers', type=int, default=1, help='runs at a time, on all GPUs')
    p.add_argument('--bench', action='store_true', help='time a training step and inference')
    p.add_argument('--rounds', type=int, default=20, help='of --bench')
    o, flags = read_flags(p, argv)
    o.metric = o.metric or RESULTS[o.script][0]
    o.tune = o.tune and o.tune.replace('-', '_')
    given = [word.partition('=')[0] for word in flags]
    if '--resume' in given:
        fail('--resume: the same command continues without it')
    if '--seed' in given:
        fail('--seed: give --seeds 0,1')
    if {*o.seeds} & {*o.test_seeds} or (o.test_seeds and not o.tune):
        fail('--test-seeds need --tune, and must differ from --seeds: seeds that have '
             'chosen a setting would favour it')
    swept = [spec.partition('=')[0].replace('-', '_') for spec in o.sweep]
    if o.tune and o.tune not in swept and not o.from_csv:
        fail(f'--tune {o.tune}: give the values to choose from, --sweep {o.tune}=A,B')
    if o.diagnose and o.script == 'mask_distill':
        fail('--diagnose: mask_distill.py logs its coefficients by itself')
    return o, flags

def rows_in(script, paths):
    """The rows of csv files."""
    rows = [dict(row, folder=path.with_suffix('.logs'))
            for path in paths for row in read_rows(path)]
    own = {'case', 'role', 'seed', fields(script.Config)[0].name}
    if not rows or not all(own <= row.keys() for row in rows):
        fail(f'--from-csv {" ".join(map(str, paths))}: not all lines are runs of '
             f'{script.SCRIPT}.py, separated by commas')
    return rows

def main(argv=None):
    o, flags = parse(argv)
    script = load(o.script, o.extra)
    o.versions = versions_of(script, o)
    if o.from_csv:
        rows, o.csv = rows_in(script, o.from_csv), o.csv or o.from_csv[0]
        if o.bench:
            return show_bench(script, rows)
    else:
        cases = cases_of(script, flags, o.table, o.sweep)
        first = next(iter(cases.values()))
        torch.set_num_threads(first.threads or torch.get_num_threads())
        add_teachers(script, cases, o.teacher_seed)
        if o.bench:
            rows = show_bench(script, bench(script, cases, o))
            if o.csv:
                write_rows(o.csv, [*(read_rows(o.csv) if o.csv.exists() else []), *rows])
            return rows
        if not o.csv:
            made_by = '-'.join(x[:8] for x in o.versions.values())
            o.csv = Path(first.out_dir, o.script, f'compare-{made_by}.csv')
        if o.diagnose:
            o.log_csv = o.log_csv or o.csv.with_name(f'{o.csv.stem}-log.csv')
        rows = train_all(script, cases, o.seeds, 'choosing' if o.test_seeds else 'judging', o)
    if o.tune:
        choosing = [row for row in rows if row['role'] == 'choosing']
        worse = choose(script, o.tune, choosing or rows)
        rows = [row for row in rows if row['case'] not in worse]
        if not choosing:
            print(f'\nnote: the seeds that chose {o.tune} also judge, which favours every case: '
                  'give --test-seeds')
    if o.test_seeds and not o.from_csv:
        cases = {case: c for case, c in cases.items() if case not in worse}
        rows = train_all(script, cases, o.test_seeds, 'judging', o)
    return present(script, [row for row in rows if row['role'] == 'judging'], o)

if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')  # a console may lack a character
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
