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
--threads says otherwise. Each run is a row of NAME.csv: its settings and figures, the version of
the script, PyTorch and the processor. The runs themselves are in NAME.runs: the same command takes
them from there, and goes on with one that was stopped. After any edit of the script all runs begin
anew, in another csv. To train one again, remove its folder. Commands with different seeds may work
at the same time (masks need --init for that). The last line names a picture: every case over steps
and over seconds. A table's mean_loss is the training loss, a mean of all steps. --diagnose also
logs lengths and angles of what attention outputs (see diagnose.py). To test the rows of a file of
your own first: python test_all.py --with mine.py. Needs scipy, and matplotlib for the picture.
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
import sys
import time
import traceback
import zlib
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # python -P leaves out the first
import bench
import diagnose

def fail(message):
    """Exit with one line that tells the user what to do."""
    print(f'{Path(sys.argv[0]).stem}: error: {message}', file=sys.stderr)
    raise SystemExit(2)

try:
    from scipy import stats
except ImportError:
    fail('comparisons need `pip install scipy`')

METRIC = {  # a validation figure by which --tune chooses, and which of two is better
    'attentionx_gpt': ('val_loss', min), 'belief_vit': ('val_acc', max),
    'admm_detr': ('AP', max), 'mask_distill': ('val_loss', min)}
RESULTS = {  # columns of a table; diff is that of the first
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
UNPAIRED = {'admm_detr'}  # equal seeds hardly make its runs alike: correlations of -0.06 to 0.58

# ------------------------------------ cases ------------------------------------
def flag_of(field, value):
    """gamma, '2' -> --gamma=2; zero_diag, 'true' -> --zero-diag; and 'false' -> --no-zero-diag"""
    name = field.replace('_', '-')
    if value.lower() in ('true', 'false'):
        return f'--{name}' if value.lower() == 'true' else f'--no-{name}'
    return f'--{name}={value}'

def flags_in(words):
    """['--gamma=2', '--no-bias', '--data', 'x'] -> ['--gamma', '--bias', '--data']"""
    return [re.sub('^--(no-)?(.*?)(=.*)?$', r'--\2', word) for word in words if word[:2] == '--']

def cases_of(script, flags, table, sweep):
    """{name: flags}: rows of a table, every combination of FIELD=A,B, or both crossed."""
    cases, tables = {'': []}, {}
    with open(HERE / 'tables.csv', newline='') as file:
        for row in csv.DictReader(file):
            if row['script'] == script.SCRIPT:
                tables.setdefault(row['table'], {})[row['row']] = row['flags'].split()
    if table:
        if table not in tables:
            fail(f'--table {table}: choose from {", ".join(tables)}')
        cases = tables[table]
    for spec in sweep:
        field, _, values = spec.partition('=')
        if not values or field == 'seed':
            fail(f'--sweep {spec}: give FIELD=A,B; seeds are --seeds 0,1')
        if field not in names_of(script):
            fail(f'--sweep {spec}: choose from {", ".join(names_of(script))}')
        cases = {f'{name} {value}'.strip(): [*words, flag_of(field, value)]
                 for name, words in cases.items() for value in values.split(',')}
    for words in cases.values():
        names = [*{*flags_in(flags)}, *flags_in(words)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            fail(f'{twice[0]} is given twice, by --sweep, by --table or as a flag')
    cases = {name or 'as typed': [*flags, *words] for name, words in cases.items()}
    settings = [settings_of(script, script.parse(words)[1]) for words in cases.values()]
    if len(set(map(repr, settings))) < len(cases):
        fail('two cases have the same settings: a run cannot be compared with itself')
    return cases

def names_of(script):
    """Names of the settings that tell one run from another: all but the machine's."""
    return [f.name for f in fields(script.Config) if f.name not in script.MACHINE]

def settings_of(script, c):
    """Those of a Config, with what dtype `auto` means on this machine."""
    dtype = str(script.pick_device(c)[1]).removeprefix('torch.')
    return {name: getattr(c, name) for name in names_of(script)} | dict(dtype=dtype)

# ------------------------------------ csv files ------------------------------------
TEXT = {'case', 'role', 'script', 'with', 'diagnose', 'log', 'diverged', 'torch', 'machine'}

def number(text):
    """A csv's text, as a number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text.capitalize() if text in ('TRUE', 'FALSE') else text  # as Excel writes them

def read_rows(path, script=None):
    """Rows of a csv file as dicts; empty fields are left out. Numbers are floats, but where the
    script has text: --data 007 is not 7."""
    own = {f.name for f in fields(script.Config) if type(f.default) is str} if script else set()
    with open(path, newline='', encoding='utf-8-sig') as file:  # Excel begins it with a mark
        try:
            rows = [*csv.DictReader(file)]
        except (UnicodeDecodeError, csv.Error) as error:
            fail(f'{path} is no csv: {error}')
    return [{key: text if key in TEXT | own else number(text) for key, text in row.items()
             if text and key} for row in rows]

def write_rows(path, rows):
    """Write a csv file. If that is stopped, the old one is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f'{path}.{os.getpid()}.part')
    with open(part, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)

def add_rows(path, new, script):
    """Write these rows to a csv file, too. A row of the same run is replaced."""
    rows = [*(read_rows(path, script) if path.exists() else []), *new]
    runs = {row.get('log', id(row)): row for row in rows}  # timings have no log
    write_rows(path, runs.values())

def beside(path, ending):
    """a.csv -> a.runs, but rate_0.1 -> rate_0.1.runs"""
    return Path(str(path).removesuffix('.csv') + ending)

def blob(path):
    """git's name for a file's content: `git log --find-object=NAME` finds it."""
    text = Path(path).read_bytes()
    return hashlib.sha1(b'blob %d\0' % len(text) + text).hexdigest()

def made_of(script, c, o):
    """What a run's figures depend on."""
    return dict(settings_of(script, c), **o.versions, torch=torch.__version__,
                machine=processor(script.pick_device(c)[0]))

def processor(device):
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    if Path('/proc/cpuinfo').exists():  # Linux
        names = re.findall(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()

# ------------------------------------ runs ------------------------------------
def load(o):
    """The script, with the variants that --with adds to it. o gets the versions of all files that
    make a row, and a checksum of them."""
    script = importlib.import_module(o.script)
    if o.extra:
        if not Path(o.extra).is_file():
            fail(f'--with {o.extra}: there is no such Python file')
        runpy.run_path(o.extra)
    o.versions, o.code = dict(script=blob(script.__file__)), script.CODE
    for name, path in {'with': o.extra, 'diagnose': o.diagnose and diagnose.__file__}.items():
        if path:
            o.versions[name] = blob(path)
            o.code = zlib.crc32(Path(path).read_bytes(), o.code)
    return script

@contextlib.contextmanager
def compared(script, o):
    """Inside, all these files count as the script's text: it does not go on with a run after one
    was edited. What it prints goes to a file, and it draws nothing."""
    def refuse(message):
        fail(message.replace('start anew without --resume', 'name another file with --csv'))
    o.runs, o.told = beside(o.csv, '.runs'), set()
    o.runs.mkdir(parents=True, exist_ok=True)
    with (open(o.runs / 'printed.txt', 'a+', 1, 'utf-8') as o.printed,
          patch.multiple(script, CODE=o.code, fail=refuse, report=lambda *_: None),
          diagnose.logged(script) if o.diagnose else contextlib.nullcontext()):
        yield

def quietly(name, o, work, *args):
    """work(*args), which prints to a file. New notes are shown, and whose error it is."""
    begin = o.printed.seek(0, os.SEEK_END)
    try:
        with contextlib.redirect_stdout(o.printed):
            return work(*args)
    except Exception as error:
        traceback.print_exc(file=o.printed)
        fail(f'{name}: {type(error).__name__}: {error} (all of it: {o.printed.name})')
    finally:
        o.printed.seek(begin)
        for line in dict.fromkeys(o.printed):
            if line.startswith('note') and line not in o.told:
                o.told.add(line)
                print(line, end='', flush=True)

def run_of(script, words, seed, o):
    """The Config of a run in NAME.runs, which goes on if it is there."""
    seeds = [] if seed is None else [f'--seed={seed}']
    with contextlib.redirect_stdout(o.printed):  # that it is new is no news here
        return script.parse([*words, *seeds, f'--out-dir={o.runs}', '--resume'])[1]

def add_teachers(script, cases, o):
    """The cases with --init. Those of mask_distill.py without it share a teacher, which is trained
    first."""
    found = dict(cases)
    for case, words in cases.items():
        c = run_of(script, words, o.teacher_seed, o)
        if script.SCRIPT == 'mask_distill' and not c.init:
            teacher = quietly(f'the teacher of {case}', o, script.train_teacher, c)
            found[case] = [*words, f'--init={teacher["folder"] / "best.pt"}']
    return found

def mean_loss(log):
    """The mean training loss of all steps; a line of the log has that since the line before."""
    total = steps = 0
    for before, line in zip([dict(step=0), *log], log):
        if 'loss' in line:
            total += line['loss'] * (line['step'] - before['step'])
            steps += line['step'] - before['step']
    return total / steps if steps else math.nan

def train_one(script, c):
    """Train c, or go on with it -> its figures."""
    found = {}
    def report(c, model, log, folder, data):  # in place of the script's samples and pictures
        found.update(log[-1], data_crc=data.meta['checksum'], mean_loss=mean_loss(log),
                     parameters=sum(p.numel() for p in model.parameters() if p.requires_grad))
    try:
        with patch.object(script, 'report', report):
            script.train_and_report(c)
        return {name: x for name, x in found.items() if '.' not in name}  # no layer's
    except FloatingPointError as error:
        metric, better = METRIC[script.SCRIPT]
        worst = math.inf if better is min else -math.inf
        return {metric: worst, RESULTS[script.SCRIPT][0]: worst, 'diverged': str(error)}

def train_all(script, cases, seeds, role, o):
    """Train each case and seed, or take it from NAME.runs -> their rows, which the csv has, too."""
    old = read_rows(o.csv, script) if o.csv.exists() else []
    if any({key: row[key] for key in ('script', 'with', 'diagnose') if key in row} != o.versions
           for row in old):
        fail(f'{o.csv} has rows of another version of {o.script}.py, of --with or of --diagnose: '
             'name another file with --csv')
    add_rows(o.csv, [], script)  # what cannot be written is better known before the first run
    known = {row['log']: row for row in old if 'log' in row}
    jobs = [(case, seed) for seed in seeds for case in cases]
    print(f'{len(jobs)} runs: rows go to {o.csv}, what runs print to {o.printed.name}', flush=True)
    cases, rows, times = add_teachers(script, cases, o), [], []
    for i, (case, seed) in enumerate(jobs, 1):
        begin, c = time.perf_counter(), run_of(script, cases[case], seed, o)
        row = dict(case=case, role=role, log=Path(c.folder).name) | made_of(script, c, o)
        before = known.get(row['log'], {}) if c.resume else {}
        row |= {name: before[name] for name in ('dtype', 'torch', 'machine') if name in before}
        found = before  # it would diverge once more
        if 'diverged' not in before:
            found = quietly(f'{case}, seed {seed}', o, train_one, script, c)
        row |= {name: x for name, x in found.items() if name not in row}
        rows.append(row)
        add_rows(o.csv, rows, script)  # all: another command may have written meanwhile
        figure = METRIC[o.script][0]
        end = f'{figure} {row[figure]:.5g}'
        if 'diverged' in row:
            end = f'diverged, and counts as worst: {row["diverged"]}'
        if not c.resume:  # it was trained now
            times.append(time.perf_counter() - begin)
            end += f'; about {np.mean(times) * (len(jobs) - i) / 60:.1f} min for the others'
        print(f'run {i} of {len(jobs)}: {case}, seed {seed}: {end}', flush=True)
    return [dict(row, folder=o.runs / o.script) for row in rows]

# ------------------------------------ tables ------------------------------------
def figures_of(runs, name):
    """{seed: figure} of a case; nan where a run has none."""
    return {seed: row.get(name, math.nan) for seed, row in runs.items()}

def mean(figures):
    return np.mean([*figures.values()])

def choose(script, rows, field):
    """Print the means of cases that differ only in field -> the names of all but the best of each
    group, by the seeds that all of the group have."""
    metric, better = METRIC[script.SCRIPT]
    rows = ([row for row in rows if row['role'] == 'choosing']
            or [row for row in rows if row['role'] == 'judging'])
    if field == 'seed' or not all(field in row for row in rows):
        fail(f'--tune {field}: these rows have no such setting')
    groups, lines, chosen = {}, {}, set()
    for row in rows:
        others = {name: row[name] for name in names_of(script) if name in row}
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
        text = '   '.join(f'{value}: {means[value]:.4f} ({len(group[value])})' for value in group)
        if best != better(means, key=means.get):
            text += f'   by the {len(shared)} that all have: ' + '   '.join(
                f'{value}: {x:.4f}' for value, x in common.items())
        lines[names[best] + (' *' if best in (min(group), max(group)) else '')] = text
        chosen.add(names[best])
    print(f'\n{metric} by {field}: mean (runs); *: the best is the lowest or highest tried')
    for name, text in lines.items():
        print(f'{name:{max(25, *map(len, lines))}} {text}')
    if all(row['role'] == 'judging' for row in rows):
        print(f'\nnote: the same seeds choose {field} and judge it, so all look too good: '
              'add --test-seeds')
    return {row['case'] for row in rows} - chosen

def group_by_case(script, rows, against):
    """{case: {seed: row}}, the baseline first."""
    baseline, cases = dict(case=against) if against else BASELINE[script.SCRIPT], {}
    for row in sorted(rows, key=lambda row: any(row.get(key) != x for key, x in baseline.items())):
        runs = cases.setdefault(row['case'], {})
        if row['seed'] in runs:
            fail(f'{row["case"]}, seed {row["seed"]:.0f}: two rows; name fewer files, or a csv for '
                 'each comparison')
        runs[row['seed']] = row
    if against and against not in cases:
        fail(f'--against {against}: choose from {", ".join(cases)}')
    for case, runs in cases.items():
        for name in names_of(script):
            unset = getattr(script.Config, name) in (None, '')  # a field that a csv leaves empty
            values = {row.get(name, '') for row in runs.values() if unset or name in row}
            if len(values) > 1 and name != 'seed':
                fail(f'rows of {case} differ in {name}: name a csv for each with --csv')
    return cases

def difference(ours, firsts, paired, tests):
    """Two cases' {seed: figure} -> the mean difference, and half the width of its interval, nan
    where there is none. It holds at 95 % for all tests together (Bonferroni)."""
    samples = [[*ours.values()], [*firsts.values()]]
    middle = mean(ours) - mean(firsts)
    if paired:
        samples = [[x - firsts[seed] for seed, x in ours.items() if seed in firsts]]
        middle = np.mean(samples[0]) if samples[0] else math.nan
    few = len(samples[0]) < 2 or ours == firsts
    if few or not max(map(np.std, samples)) > 1e-9 * abs(middle):
        return middle, math.nan
    test = stats.ttest_1samp(*samples, 0) if paired else stats.ttest_ind(*samples, equal_var=False)
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
    names = dict.fromkeys(name for row in rows for name, x in row.items()
                          if isinstance(x, (int, float)))
    if metric not in names:
        fail(f'--metric {metric}: choose from {", ".join(names)}')
    machines = sorted({f'{row["machine"]}, torch {row["torch"]}' for row in rows
                       if 'machine' in row})
    if len(machines) > 1:
        print('\nnote: another machine can change a figure as much as another seed, and these rows '
              'are of ' + '; '.join(machines))
    if len({row['data_crc'] for row in rows if 'data_crc' in row}) > 1:
        print('\nnote: not all rows are of the same data (builtin differs between Pythons)')
    paired = script.SCRIPT not in UNPAIRED
    unlike = [f'{case} ({len(runs)})' for case, runs in cases.items()
              if runs.keys() != first.keys()]
    if unlike:
        hint = ', so compare diff (of shared seeds), not means' * paired
        print(f'\nnote: other seeds than row 1 (their number){hint}: {"; ".join(unlike)}')
    tests = max(1, sum(len(runs.keys() & first.keys() if paired else runs) > 1 for runs in rest))
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
    print_table(table, others, 6 if script.SCRIPT == 'mask_distill' else 4)
    for word, sign in ('higher', 1), ('lower', -1):
        found = [line['case'] for line in table[1:] if sign * line['diff'] > line['interval']]
        if found:
            print(f'{word} than row 1: {"; ".join(found)}')
    unresolved = [line['case'] for line in table[1:] if not line['interval'] < abs(line['diff'])]
    if unresolved:
        print(f'open (0 is in the interval, or there is no interval): {"; ".join(unresolved)}')
    worst = [f'{row["case"]}, seed {row["seed"]:.0f}' for row in rows if 'diverged' in row]
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
    path = row['folder'] / row.get('log', '-') / 'log.csv'
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

def draw_means(path, curves, labels, title, legend):
    """Each case's figures, {name: label}, over steps and over seconds: means over the seeds, and
    their range.  [AX Fig. 1] [BF Fig. 4, 5]"""
    from matplotlib.figure import Figure
    picture = Figure(figsize=(10, 7.6), layout='tight')
    axes = picture.subplots(2, 2, sharey='row')
    spare = itertools.cycle([colour for name, (_, colour) in VARIANTS.items()
                             if name not in curves] or ['#767676'])
    styles = {case: VARIANTS.get(case) or (case, next(spare)) for case in curves}
    for ax, (name, clock) in zip(axes.flat, itertools.product(labels, ('step', 'seconds'))):
        for case, logs in curves.items():
            label, colour = styles[case]
            lines = [line for line in zip(*logs)  # all seeds' at a step
                     if line[0]['step'] > 0 and all(name in row for row in line)]
            if name != 'loss':  # the second half alone, since small ranges are seen there
                lines = lines[min(len(lines) // 2, len(lines) - 2):]
            x = [np.mean([row[clock] for row in line]) for line in lines]
            y = [[row[name] for row in line] for line in lines]
            ax.plot(x, [*map(np.mean, y)], '.-', color=colour, label=label)
            ax.fill_between(x, [*map(min, y)], [*map(max, y)], color=colour, alpha=0.2)
        ax.set(xlabel='seconds of training' if clock == 'seconds' else clock)
        ax.grid(color='#DDDDDD')
    for ax, label in zip(axes[:, 0], labels.values()):
        ax.set(ylabel=label)
    axes[0, 0].legend(frameon=False, title=legend)
    picture.suptitle(title)
    picture.savefig(path, dpi=150, facecolor='white')
    print(f'\npicture {path}')

def show_curves(script, cases, path):
    """Draw the curves, if the logs are here and have any."""
    curves, firsts = read_curves(cases), [next(iter(runs.values())) for runs in cases.values()]
    if not curves:
        return
    if max(len(logs[0]) for logs in curves.values()) < 3:  # the first is the untrained model's
        return print('note: no picture: each run was evaluated once, at its end (--eval-interval)')
    differ = [name for name in names_of(script) if name != 'seed'
              and len({repr(row.get(name)) for row in firsts}) > 1]
    labels = dict(zip(('loss', METRIC[script.SCRIPT][0]), LABELS[script.SCRIPT]))
    title = f'{script.SCRIPT}: means and ranges over the seeds; lower row: the second half'
    legend = ', '.join(differ) if len(differ) < 3 else ''
    script.draw(draw_means, path, curves, labels, title, legend)

def present(script, rows, o):
    """Print a table of the runs, and draw them -> the table's lines."""
    if not rows:
        fail('no row judges: rows that choose a setting need --test-seeds, timings --bench')
    cases = group_by_case(script, rows, o.against)
    table = tabulate(script, cases, o.metric)
    if not o.from_csv:
        print('seconds of training, means (--bench compares speed): ' + ', '.join(
            f'{case} {mean(figures_of(runs, "seconds")):.4g}' for case, runs in cases.items()))
    if o.diagnose and not o.from_csv:
        o.log_csv = o.log_csv or beside(o.csv, '-log.csv')
    if o.log_csv:
        lines = [dict(case=row['case'], seed=row['seed'], **line)
                 for row in rows for line in log_of(row)]
        if not lines:
            fail('--log-csv: the logs of these rows are not here')
        write_rows(o.log_csv, lines)
        print(f'\nlogs are in {o.log_csv}')
    show_curves(script, cases, beside(o.csv, '.png'))
    return table

# ------------------------------------ the command line ------------------------------------
def parser(text):
    """Of this tool and of memory.py: what it does not know is a flag of the script."""
    p = argparse.ArgumentParser(description=text, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    p.add_argument('--csv', type=Path, help='where rows are kept; default: in out/')
    return p

def seeds(text):
    """'0,1,2' -> [0, 1, 2]"""
    return sorted({int(word) for word in text.split(',')})

def parse(argv):
    """argv -> this tool's flags, and the script's."""
    p = parser(__doc__)
    p.add_argument('script', type=lambda name: name.removesuffix('.py'), choices=METRIC)
    p.add_argument('--sweep', action='append', default=[], help='FIELD=A,B; may be repeated')
    p.add_argument('--table', help='rows of a table of the record, see tables.csv')
    p.add_argument('--with', dest='extra', help='a Python file that adds variants')
    p.add_argument('--seeds', type=seeds, help='default: 0,1,2')
    p.add_argument('--tune', help='a field of --sweep to choose for each variant')
    p.add_argument('--test-seeds', type=seeds, default=[], help='with --tune: others, which judge')
    p.add_argument('--teacher-seed', type=int, help='of the teacher that rows of masks share')
    p.add_argument('--from-csv', nargs='+', action='extend', type=Path,
                   help='tabulate these files, train nothing')
    p.add_argument('--metric', help='the figure to compare, such as val_loss')
    p.add_argument('--against', help='the row that differences are taken from; default: '
                   'softmax, or the first')
    p.add_argument('--log-csv', type=Path, help='a file for the logs of the rows of the table')
    p.add_argument('--diagnose', action='store_true', help='log what diagnose.py finds, too; '
                   '--log-csv is then NAME-log.csv beside --csv')
    p.add_argument('--bench', action='store_true', help='time a training step and inference')
    p.add_argument('--rounds', type=int, default=20, help='of --bench')
    o, flags = p.parse_known_args(argv)
    o.metric = o.metric or RESULTS[o.script][0]
    if o.from_csv and (flags or o.sweep or o.table or o.seeds):
        print('note    --from-csv trains nothing: settings and seeds are those of the rows')
    o.seeds = o.seeds or [0, 1, 2]
    flags = [word for word in flags if word != '--resume']  # its runs go on, always
    if '--seed' in flags_in(flags):
        fail('--seed: give --seeds 0,1')
    if {*o.seeds} & {*o.test_seeds} or (o.test_seeds and not o.tune):
        fail('--test-seeds need --tune, and must differ from --seeds: seeds that have '
             'chosen a setting would favour it')
    if o.from_csv:
        o.test_seeds = []
    elif o.tune and o.tune not in [x.partition('=')[0] for x in o.sweep]:
        fail(f'--tune {o.tune}: give the values to choose from, --sweep {o.tune}=A,B')
    if o.log_csv and o.log_csv in [o.csv, *(o.from_csv or [])]:
        fail(f'--log-csv {o.log_csv}: that file has the rows; name another')
    if o.diagnose and o.script == 'mask_distill':
        fail('--diagnose: mask_distill.py logs its coefficients by itself')
    if o.rounds < 1:
        fail('--rounds must be 1 or more')
    if o.bench and (o.against or o.diagnose or o.tune):
        fail('--bench: ratios are to the first case; leave out --against, --diagnose and --tune')
    return o, flags if '--threads' in flags_in(flags) else ['--threads', '1', *flags]

def rows_in(script, paths):
    """The rows of csv files."""
    rows = [dict(row, folder=beside(path, '.runs') / script.SCRIPT)
            for path in paths for row in read_rows(path, script)]
    own, figure = {'case', 'role', 'seed', fields(script.Config)[0].name}, METRIC[script.SCRIPT][0]
    if not rows or not all(own <= row.keys() and (row['role'] != 'judging' or figure in row)
                           for row in rows):
        fail(f'--from-csv {" ".join(map(str, paths))}: not all lines are runs of '
             f'{script.SCRIPT}.py, separated by commas')
    return rows

def time_all(script, cases, o):
    """Time each case -> their rows."""
    cases = {case: script.parse(words)[1] for case, words in add_teachers(script, cases, o).items()}
    rows = quietly('--bench', o, bench.bench, script, cases, o.rounds)
    return [row | made_of(script, cases[row['case']], o) for row in rows]

def run_all(script, cases, o):
    """Train or time all cases -> their rows."""
    if o.bench:
        return time_all(script, cases, o)
    if not o.test_seeds:
        return train_all(script, cases, o.seeds, 'judging', o)
    rows = train_all(script, cases, o.seeds, 'choosing', o)
    worse = choose(script, rows, o.tune)
    best = {case: words for case, words in cases.items() if case not in worse}
    return train_all(script, best, o.test_seeds, 'judging', o)

def main(argv=None):
    o, flags = parse(argv)
    script, kept = load(o), o.csv
    if o.from_csv:
        script.parse(flags)  # among them may be a misspelled one
        o.csv, rows = o.csv or o.from_csv[0], rows_in(script, o.from_csv)
    else:
        cases = cases_of(script, flags, o.table, o.sweep)
        if o.against and o.against not in cases:
            fail(f'--against {o.against}: choose from {", ".join(cases)}')
        first = script.parse(next(iter(cases.values())))[1]
        torch.set_num_threads(first.threads or torch.get_num_threads())
        o.csv = o.csv or Path(first.out_dir, o.script, f'compare-{o.code:08x}.csv')
        with compared(script, o):
            rows = run_all(script, cases, o)
    if o.bench:
        if not any('ms' in row for row in rows):
            fail('--bench: none of these rows is a timing')
        if kept and not o.from_csv:
            add_rows(kept, rows, script)
        return bench.show(script, rows)
    if o.tune and not o.test_seeds:
        worse = choose(script, rows, o.tune)
        rows = [row for row in rows if row['case'] not in worse]
        judged = {row['case'] for row in rows if row['role'] == 'judging'}
        if waiting := {row['case'] for row in rows if row['role'] == 'choosing'} - judged:
            print(f'\nnote: chosen, but not judged yet: {"; ".join(sorted(waiting))}')
    return present(script, [row for row in rows if row['role'] == 'judging'], o)

if __name__ == '__main__':
    sys.stdout = sys.stdout or open(os.devnull, 'w')  # it may be closed
    sys.stdout.reconfigure(errors='replace')  # a console may lack a character
    try:
        main()
    except KeyboardInterrupt:
        print('\nstopped; run the same command to continue')
        sys.exit(130)
    except OSError as error:  # no such file; disk full
        fail(error)
