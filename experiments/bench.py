"""What a training step and inference cost. `compare.py --bench` prints these figures, and with
--csv keeps them."""
import time

import numpy as np
import torch

def take_turns(works, rounds, device):
    """{name: function} -> {name: seconds of each round}. They take turns, so that noise hits all
    alike. Two more rounds, before these, warm up."""
    def clock():
        if device.type != 'cpu':
            getattr(torch, device.type).synchronize()  # an accelerator has a queue
        return time.perf_counter()
    times = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, work in works.items():
            begin = clock()
            work()
            times[name].append(clock() - begin)
    return {name: seconds[2:] for name, seconds in times.items()}

def works_of(script, c, device):
    """The net of a case, and two functions: a training step, and a forward pass alone."""
    data = script.load_data(c)
    autocast, scaler = script.mixed_precision(*script.pick_device(c))
    if script.SCRIPT == 'mask_distill':
        teacher = [script.find_teacher(c, data).to(device).eval()]
        model = script.make_student(*teacher, c)
    else:
        teacher, model = [], script.make_model(c, data.meta).to(device)
    net = torch.compile(model) if c.compile else model
    optimizer = script.make_optimizer(model, c)
    batches = [script.get_batch(data, c, 0, i, device) for i in range(c.grad_accum_steps)]
    inputs = 2 if script.SCRIPT == 'admm_detr' else 1  # images and their padding

    def train():
        script.train_step(net, *teacher, batches, c, optimizer, scaler, autocast)

    @torch.no_grad()
    def infer():
        with autocast:
            net(*batches[0][:inputs])

    return net, train, infer

def bench(script, cases, rounds):
    """Time {case: Config} -> rows: medians, and quartiles of the time as a ratio to the first
    case's in the same round.  [BF Tables 1 to 3]"""
    first, c = next(iter(cases.items()))
    device, rows = script.pick_device(c)[0], []
    works = {case: works_of(script, c, device) for case, c in cases.items()}
    for at, what in enumerate(('training step', 'inference'), 1):
        for net, *_ in works.values():
            net.train(what == 'training step')
        times = take_turns({case: work[at] for case, work in works.items()}, rounds, device)
        for case, c in cases.items():
            median = np.median(times[case])
            low, ratio, high = np.percentile(np.divide(times[case], times[first]), [25, 50, 75])
            size = c.batch_size * getattr(c, 'block_size', 1)
            size *= c.grad_accum_steps if what == 'training step' else 1
            rows.append(dict(case=case, role=what, ms=1000 * median, per_second=size / median,
                             ratio=ratio, low=low, high=high, rounds=rounds, compile=c.compile))
    return rows

def show(script, rows):
    """Print these rows, also those of a csv file -> the rows."""
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
